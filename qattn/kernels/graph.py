r"""The kernel of a graph: K = D + A + ε 11ᵀ, with D the degrees of the adjacency A."""

import math

import torch
from torch import Tensor

from qattn import _checks
from qattn._autocast import product
from qattn._types import ArrayLike, dtype_name
from qattn.attended import Attended, merge
from qattn.kernels.base import Kernel
from qattn.kernels.sparse_matrix import (
    Edges,
    ScipySparse,
    check_weights,
    checked_edges,
    is_sparse,
    is_symmetric,
    sorted_edges,
    with_diagonal,
)

__all__ = ["GraphKernel"]


class GraphKernel(Kernel):
    r"""K = D + A + ε 11ᵀ, symmetric and positive semidefinite, because D dominates A in each row.

    An integer tensor or array with two rows is an edge index, as in PyTorch Geometric; everything else is an adjacency
    matrix. (So a dense adjacency of two vertices should be of floating point.) Results are differentiable with respect
    to the weights of edges. Pairs without an edge, also zeros of a dense adjacency, remain absent and have no gradient.

    Args:
        adjacency_or_edge_index: Either a symmetric matrix A ≥ 0 of shape (N, N), dense or a sparse one of torch or
            SciPy; or integers (2, E), the two vertices of each edge, with both directions of every edge.
        edge_weight: Weights ≥ 0 of shape (E,) for an edge index, equal in both directions; 1 by default. Weights of
            repeated edges are added.
        eps: Weight ε ≥ 0 between all pairs of vertices, which connects all components. It costs O(N), as the matrix is
            never formed.
        num_vertices: Number N of vertices for an edge index; by default one more than its largest entry.

    Examples:
        >>> star = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]])
        >>> GraphKernel(star)
        GraphKernel(4 vertices, 3 edges, eps=0)
        >>> GraphKernel(star, torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])).to_dense()[0].round()
        tensor([6., 1., 2., 3.])
    """

    def __init__(
        self,
        adjacency_or_edge_index: ArrayLike | ScipySparse,
        edge_weight: ArrayLike | None = None,
        *,
        eps: float = 0.0,
        num_vertices: int | None = None,
    ) -> None:
        if edge_weight is not None or _is_edge_index(adjacency_or_edge_index):
            index, weight, N = _checked_edge_index(adjacency_or_edge_index, edge_weight, num_vertices)  # type: ignore[arg-type]
        else:
            index, weight, N = checked_edges("adjacency", adjacency_or_edge_index)
            if num_vertices not in (None, N):
                raise ValueError(f"`num_vertices` should be {N}, the size of the adjacency; got {num_vertices}.")
        self._eps = _checks.not_negative("eps", eps)
        degrees = weight.new_zeros(N).index_add(0, index[0], weight)
        isolated = int((degrees == 0).sum())
        if isolated and not eps > 0:
            raise ValueError(
                f"{isolated} of the {N} vertices have no edge, so that no scaling makes their rows sum to one. "
                "Use `eps` > 0, or leave them out."
            )
        self._edges = Edges.of(*with_diagonal(index, weight, degrees), N)

    def __repr__(self) -> str:
        count = int((self._edges.index[0] < self._edges.index[1]).sum())
        return f"GraphKernel({self._edges.num_rows} vertices, {count} edges, eps={self._eps:g})"

    def __str__(self) -> str:
        parts = self.components
        if parts == 1:
            return repr(self)
        end = "connected by eps alone" if self._eps else "between which nothing diffuses unless eps > 0"
        return f"{self!r}\n  {parts} connected components, {end}"

    @property
    def components(self) -> int:
        """Number of connected components of the adjacency."""
        from scipy.sparse import csr_matrix  # here, because SciPy is slow to import
        from scipy.sparse.csgraph import connected_components

        rows, columns = self._edges.index.cpu().numpy()
        matrix = csr_matrix((rows == rows, (rows, columns)), shape=tuple(self._edges.shape))
        return int(connected_components(matrix, directed=False)[0])

    @property
    def shape(self) -> torch.Size:
        return self._edges.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._edges.log,)

    def replace(self, *tensors: Tensor) -> "GraphKernel":
        return self._with(_edges=self._edges.replace(*tensors))

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        if self._eps == 0:
            return self._edges.attend(bias, value)
        # ε 11ᵀ has the same row for all vertices. Values of 16 bits are averaged in float32 and rounded once.
        values = None if value is None else value.to(torch.promote_types(value.dtype, self.dtype))
        along_edges = self._edges.attend(bias, values)
        lse = math.log(self._eps) + torch.logsumexp(bias, dim=-1, keepdim=True)
        mean = None
        if values is not None and along_edges.out is not None:
            share = torch.softmax(torch.where((bias == -torch.inf).all(-1, keepdim=True), 0, bias), dim=-1)
            mean = product(share.to(values.dtype)[..., None, :], values).expand_as(along_edges.out)
        merged = merge(along_edges, Attended(mean, lse.expand_as(along_edges.lse)))
        return merged if value is None or merged.out is None else Attended(merged.out.to(value.dtype), merged.lse)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        exact = self.replace(self._edges.log.detach().cpu().double())
        return exact.attend(bias.detach().cpu().double()).lse[..., rows]


def _is_edge_index(adjacency_or_edge_index: ArrayLike | ScipySparse) -> bool:
    """Return whether an argument is dense and holds integers in two rows."""
    if is_sparse(adjacency_or_edge_index):
        return False
    tensor = _checks.as_tensor("adjacency", adjacency_or_edge_index)  # type: ignore[arg-type]
    return tensor.ndim == 2 and len(tensor) == 2 and _is_integer(tensor)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _checked_edge_index(
    edge_index: ArrayLike, edge_weight: ArrayLike | None, num_vertices: int | None
) -> tuple[Tensor, Tensor, int]:
    """Check the edges of an undirected graph; return them sorted, (2, E), their weights (E,) and N."""
    index = _checks.as_tensor("edge_index", edge_index)
    if index.ndim != 2 or len(index) != 2 or not _is_integer(index):
        got = f"{dtype_name(index.dtype)} {_checks.shape_of(index)}"
        raise ValueError(f"`edge_index` should hold integers of shape (2, E); got {got}.")
    E = index.shape[1]
    weight = torch.ones(E, device=index.device)
    if edge_weight is not None:
        weight = _checks.floating("edge_weight", edge_weight)
    if weight.shape != (E,):
        raise ValueError(
            f"`edge_weight` should have one number per edge, shape ({E},); got {_checks.shape_of(weight)}."
        )
    last = int(index.max()) if E else -1
    N = last + 1 if num_vertices is None else _checks.integer("num_vertices", num_vertices, 1)
    if N == 0:
        raise ValueError("`num_vertices` should be given with an `edge_index` without edges.")
    if last >= N or (index < 0).any():
        raise ValueError(
            f"`edge_index` should hold vertices from 0 to {N - 1}; got {int(index.min())} to {last}. "
            "Raise `num_vertices`, or drop those edges."
        )
    check_weights("edge_weight", weight)
    if not is_symmetric(index, weight.detach(), N):
        raise ValueError(
            "`edge_index` should hold both directions of every edge, with equal weights. Add the reversed edges: "
            "`torch.cat([edge_index, edge_index.flip(0)], dim=1)`."
        )
    return *sorted_edges(index, weight, N), N

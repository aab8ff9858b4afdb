r"""The kernel of a graph: K = D + A + ε 11ᵀ, with D the degrees of the adjacency A."""

import math
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended, merge
from qattn.kernels.base import Kernel
from qattn.kernels.edges import Edges

__all__ = ["GraphKernel"]


class GraphKernel(Kernel):
    r"""K = D + A + ε 11ᵀ: symmetric and positive semidefinite, because D dominates A in each row.

    Args:
        adjacency: A ≥ 0, symmetric, (N, N): a sparse matrix of torch or SciPy, a dense tensor or array, or a pair
            (edge_index, edge_weight) of shapes (2, E) and (E,), with both directions of every edge, and None for
            weights of 1. Results are differentiable by the weights of edges; pairs without an edge, also those of a
            dense adjacency that are 0, stay absent, and have no gradient.
        eps: A weight ε ≥ 0 between all pairs, which joins what is not connected. It is never formed: it costs O(N).
        size: The number of vertices, for an edge_index that does not name the last of them.

    Example:
        >>> star = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]])
        >>> GraphKernel((star, None))
        GraphKernel(4 vertices, 3 edges, eps=0)
    """

    def __init__(self, adjacency: Any, eps: float = 0.0, *, size: int | None = None) -> None:
        index, weight, size = _checks.edges("adjacency", adjacency, size)
        self._eps = _checks.not_negative("eps", eps)
        degrees = weight.new_zeros(size).index_add(0, index[0], weight)
        isolated = int((degrees == 0).sum())
        if isolated and not eps > 0:
            raise ValueError(
                f"{isolated} of the {size} vertices have no edge, so that no scaling makes their rows sum to one. "
                "Give an `eps` > 0, or leave them out."
            )
        vertices = torch.arange(size, device=index.device)
        joined = torch.cat([index, vertices.expand(2, -1)], dim=1)
        self._edges = Edges.of(*_checks.sorted_edges(joined, torch.cat([weight, degrees]), size), size)

    def __repr__(self) -> str:
        count = int((self._edges.index[0] < self._edges.index[1]).sum())
        return f"GraphKernel({self._edges.size} vertices, {count} edges, eps={self._eps:g})"

    def __str__(self) -> str:
        parts = self.components
        if parts == 1:
            return repr(self)
        end = "joined by eps alone" if self._eps else "and nothing goes from one to another unless eps > 0"
        return f"{self!r}\n  {parts} connected components, {end}"

    @property
    def components(self) -> int:
        """The number of connected components of the adjacency."""
        from scipy.sparse import csr_matrix  # here, because SciPy is slow to import
        from scipy.sparse.csgraph import connected_components

        rows, columns = self._edges.index.cpu().numpy()
        shape = (self._edges.size, self._edges.size)
        return int(connected_components(csr_matrix((rows == rows, (rows, columns)), shape=shape), directed=False)[0])

    @property
    def shape(self) -> torch.Size:
        return self._edges.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._edges.log,)

    def replace(self, *tensors: Tensor) -> "GraphKernel":
        kernel = object.__new__(GraphKernel)
        kernel._eps, kernel._edges = self._eps, self._edges.replace(*tensors)
        return kernel

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        if self._eps == 0:
            return self._edges.attend(bias, value)
        # ε 11ᵀ has the same row for all vertices. Values of 16 bits are averaged in float32, and rounded once.
        values = None if value is None else value.to(torch.promote_types(value.dtype, self.dtype))
        along_edges = self._edges.attend(bias, values)
        lse = math.log(self._eps) + torch.logsumexp(bias, dim=-1, keepdim=True)
        mean = None
        if values is not None and along_edges.out is not None:
            share = torch.softmax(torch.where((bias == -torch.inf).all(-1, keepdim=True), 0, bias), dim=-1)
            with torch.autocast(self.device.type, enabled=False):
                mean = (share.to(values.dtype)[..., None, :] @ values).expand_as(along_edges.out)
        whole = merge(along_edges, Attended(mean, lse.expand_as(along_edges.lse)))
        return whole if value is None or whole.out is None else Attended(whole.out.to(value.dtype), whole.lse)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        exact = self.replace(self._edges.log.detach().cpu().double())
        return exact.attend(bias.detach().cpu().double()).lse[..., rows]

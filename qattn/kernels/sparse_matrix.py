r"""A sparse symmetric matrix K ≥ 0, given by its positive entries: log-domain attention along its edges."""

import warnings
from functools import cached_property
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn._types import ArrayLike
from qattn.attended import Attended

__all__ = [
    "Edges",
    "ScipySparse",
    "check_weights",
    "checked_edges",
    "is_sparse",
    "is_symmetric",
    "sorted_edges",
    "with_diagonal",
]


class ScipySparse(Protocol):
    """A sparse matrix or array of SciPy."""

    shape: tuple[int, ...]

    def tocoo(self) -> Any:
        """Convert to coordinates."""


class Edges:
    """Entries K_ij = e^{s_e} of edges e = (i, j), in the order of their rows.

    Args:
        index: Rows and columns, shape (2, E), sorted by rows and then columns.
        log: Logarithms s of the entries, shape (E,).
        num_rows: Number N of rows and columns.
    """

    def __init__(self, index: Tensor, log: Tensor, num_rows: int) -> None:
        self.index, self.log, self.num_rows = index.to(log.device), log, num_rows

    @classmethod
    def of(cls, index: Tensor, entries: Tensor, num_rows: int) -> "Edges":
        """Make the edges of sorted entries (E,) ≥ 0, without those that are 0."""
        is_edge = entries > 0
        if not is_edge.all():
            index, entries = index[:, is_edge], entries[is_edge]
        return cls(index, torch.log(entries.to(torch.promote_types(entries.dtype, torch.float32))), num_rows)

    @property
    def tensor(self) -> Tensor:
        """The tensor with respect to which the entries are differentiable."""
        return self.log

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.num_rows))

    def replace(self, log: Tensor) -> "Edges":
        """Return the same edges with other logarithms, on their device."""
        edges = Edges(self.index, log, self.num_rows)
        if "_starts" in vars(self):
            edges._starts = self._starts.to(log.device)
        return edges

    def attend(self, bias: Tensor, value: Tensor | None) -> Attended:
        """Compute out (*batch, N, C) and lse (*batch, N) for bias (*batch, N) and value (*batch, N, C)."""
        tensors = (self.log, bias) if value is None else (self.log, bias, value)
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if bias.device.type == "cpu" and not has_gradient:  # a GPU would have to be asked whether weights are too small
            attended = self._attend_by_products(bias, value)
            if attended is not None:
                return attended
        rows, columns = self.index
        scores = self.log + bias[..., columns]  # (*batch, E)
        shape = (*scores.shape[:-1], self.num_rows)
        row_of_edge = rows.expand_as(scores)
        largest = scores.new_full(shape, -torch.inf).scatter_reduce(-1, row_of_edge, scores.detach(), "amax")
        largest = torch.where(largest == -torch.inf, 0, largest)  # rows without weight
        weights = torch.exp(scores - largest[..., rows])
        total = scores.new_zeros(shape).scatter_add(-1, row_of_edge, weights)
        is_empty = total == 0
        divisor = torch.where(is_empty, 1, total)
        lse = torch.where(is_empty, -torch.inf, largest + torch.log(divisor))
        if value is None:
            return Attended(None, lse)
        # Values of 16 bits are averaged in the dtype of the weights, and rounded once.
        dtype = torch.promote_types(weights.dtype, value.dtype)
        weights, values = (weights / divisor[..., rows]).to(dtype), value.to(dtype)
        batch = broadcast_shapes(weights.shape[:-1], values.shape[:-2])
        if not has_gradient:
            items = zip(
                weights.expand(*batch, -1).reshape(batch.numel(), len(rows)),
                values.expand(*batch, -1, -1).reshape(batch.numel(), *values.shape[-2:]),
                strict=True,
            )
            out = torch.stack([self._product(entries, v) for entries, v in items])
            return Attended(out.reshape(*batch, self.num_rows, values.shape[-1]).to(value.dtype), lse)
        products = weights[..., None] * values[..., columns, :]  # (*batch, E, C), which a gradient needs anyway
        out = values.new_zeros(*batch, self.num_rows, values.shape[-1])
        out = out.index_add(len(batch), rows, products.expand(*batch, -1, -1))
        return Attended(out.to(value.dtype), lse)

    def _attend_by_products(self, bias: Tensor, value: Tensor | None) -> Attended | None:
        """Attend by one sparse product in float64, with K e^b and K (e^b v); None if sums are too small for it.

        The largest entry and the largest weight are scaled to 1.
        """
        if len(self.log) == 0 or (bias == torch.inf).any():
            return None
        top = bias.double().amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)
        columns = torch.exp(bias - top)[..., None]  # (*batch, N, 1)
        if value is not None:
            batch = broadcast_shapes(columns.shape[:-2], value.shape[:-2])
            columns = columns.expand(*batch, -1, -1)
            columns = torch.cat([columns, columns * value], dim=-1)
        entries, largest = self._scaled
        wide = columns.movedim(-2, 0).reshape(self.num_rows, -1)  # (N, *batch · C)
        sums = self._product(entries, wide)
        sums = sums.reshape(self.num_rows, *columns.shape[:-2], columns.shape[-1]).movedim(0, -2)
        total = sums[..., 0]
        # Entries and weights above the least normal number are not rounded, and all others together do not matter.
        tiny = len(self.log) * torch.finfo(torch.float64).tiny / torch.finfo(torch.float64).eps
        if not (total > tiny).all():
            return None
        out = None if value is None else (sums[..., 1:] / total[..., None]).to(value.dtype)
        lse = (torch.log(total) + top + largest).to(torch.promote_types(bias.dtype, self.log.dtype))
        if value is not None and lse.shape != bias.shape:  # axes that only the values have
            lse = lse[(0,) * (lse.ndim - bias.ndim)]
            for axis in range(bias.ndim - 1):
                lse = lse.narrow(axis, 0, bias.shape[axis])
        return Attended(out, lse)

    @cached_property
    def _starts(self) -> Tensor:
        """Index of the first edge of each row, (N + 1,)."""
        counts = torch.bincount(self.index[0], minlength=self.num_rows)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor]:
        """Entries over the largest one, (E,), and its logarithm, in float64."""
        log = self.log.detach().double()
        return torch.exp(log - log.amax()), log.amax()

    def _product(self, entries: Tensor, columns: Tensor) -> Tensor:
        """Compute Σ_j w_ij v_j for entries w (E,) and columns v (N, C)."""
        with warnings.catch_warnings(), torch.autocast(columns.device.type, enabled=False):
            warnings.filterwarnings("ignore", message="Sparse CSR")  # torch calls them beta; COO products are slower
            return (
                torch.sparse_csr_tensor(self._starts, self.index[1], entries, self.shape, check_invariants=False)
                @ columns
            )


def is_sparse(matrix: object) -> TypeGuard[Tensor | ScipySparse]:
    """Return whether a matrix is a sparse one of torch or SciPy."""
    return matrix.layout != torch.strided if isinstance(matrix, Tensor) else hasattr(matrix, "tocoo")


def checked_edges(name: str, matrix: ArrayLike | ScipySparse) -> tuple[Tensor, Tensor, int]:
    """Check that a matrix is symmetric and ≥ 0; return its sorted edges (2, E), their weights (E,) and its size N."""
    if not is_sparse(matrix):
        dense = _checks.floating(name, matrix)  # type: ignore[arg-type]
        index = dense.nonzero().T
        weight, shape = dense[tuple(index)], tuple(dense.shape)
    elif isinstance(matrix, Tensor):
        entries = matrix.to_sparse_coo().coalesce()
        index, weight, shape = entries.indices(), _checks.floating(name, entries.values()), tuple(matrix.shape)
    else:
        entries = matrix.tocoo()
        index = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
        weight, shape = _checks.floating(name, entries.data), tuple(matrix.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        remedy = " An edge_index should hold integers." if shape[:1] == (2,) else ""
        raise ValueError(f"`{name}` should have shape (N, N); got {shape}.{remedy}")
    check_weights(name, weight)
    if not is_symmetric(index, weight.detach(), shape[0]):
        raise ValueError(f"`{name}` should be symmetric. For a matrix A, use `(A + A.T) / 2`.")
    return *sorted_edges(index, weight, shape[0]), shape[0]


def check_weights(name: str, weight: Tensor) -> None:
    """Check that weights are finite and ≥ 0."""
    _checks.finite(name, weight, "Leave those edges out.")
    if (weight < 0).any():
        raise ValueError(
            f"`{name}` should not be negative; {int((weight < 0).sum())} of its {len(weight)} entries are. "
            "Use their absolute values, or `exp` of a signed score."
        )


def sorted_edges(index: Tensor, weight: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sort edges (2, E) by rows and then columns, and add up the weights (E,) of repeated ones."""
    index = index.long()
    keys = index[0] * num_rows + index[1]
    if (keys[1:] > keys[:-1]).all():
        return index, weight
    keys, order = torch.sort(keys)  # takes a third of the time of `coalesce`, and half that of a counting sort
    weight = weight[order]
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    if not is_first.all():
        keys, number = keys[is_first], torch.cumsum(is_first, 0) - 1
        weight = weight.new_zeros(len(keys)).index_add(0, number, weight)
    return torch.stack([keys // num_rows, keys % num_rows]), weight


def with_diagonal(index: Tensor, weight: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Add a diagonal (N,) to sorted edges (2, E) without sorting again."""
    (rows, columns), N = index, len(diagonal)
    is_loop = rows == columns
    if is_loop.any():
        diagonal = diagonal.index_add(0, rows[is_loop], weight[is_loop])
        index, weight = index[:, ~is_loop], weight[~is_loop]
        rows, columns = index
    # Before an edge (i, j) stand the edges before it, i diagonal entries, and one more if j > i.
    place = torch.arange(len(rows), device=rows.device) + rows + (columns > rows)
    is_diagonal = torch.ones(len(rows) + N, dtype=torch.bool, device=rows.device)
    is_diagonal[place] = False
    own = is_diagonal.nonzero()[:, 0]
    result = index.new_empty(2, len(rows) + N)
    result[:, place], result[:, own] = index, torch.arange(N, device=rows.device)
    entries = weight.new_zeros(len(rows) + N).index_copy(0, place, weight)
    return result, entries.index_copy(0, own, diagonal)


def is_symmetric(index: Tensor, weight: Tensor, num_rows: int) -> bool:
    """Return whether Ax = Aᵀx for a random x, to five digits in each row, which needs no sorting."""
    x = 0.5 + torch.rand(num_rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight.device)
    product, transposed = (
        x.new_zeros(num_rows).index_add(0, rows, weight.double() * x[columns])
        for rows, columns in (index, index.flip(0))
    )
    return bool(((product - transposed).abs() <= 1e-5 * torch.maximum(product, transposed)).all())

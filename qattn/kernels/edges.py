r"""A sparse symmetric matrix K ≥ 0, by its entries above 0: log-domain attention along its edges."""

import warnings
from functools import cached_property

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn.attended import Attended

__all__ = ["Edges"]


class Edges:
    """The entries K_ij = e^{s_e} of the edges e = (i, j), in the order of their rows.

    Args:
        index: Rows and columns, shape (2, E), sorted by rows and then columns.
        log: The logarithms s of the entries, shape (E,).
        size: The number N of rows and columns.
    """

    def __init__(self, index: Tensor, log: Tensor, size: int) -> None:
        self.index, self.log, self.size = index.to(log.device), log, size

    @classmethod
    def of(cls, index: Tensor, entries: Tensor, size: int) -> "Edges":
        """Those of entries (E,) ≥ 0 in that order; the ones that are 0 are left out."""
        is_edge = entries > 0
        entries = entries[is_edge].to(torch.promote_types(entries.dtype, torch.float32))
        return cls(index[:, is_edge], torch.log(entries), size)

    @property
    def tensor(self) -> Tensor:
        """What it is differentiated by."""
        return self.log

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.size, self.size))

    def replace(self, log: Tensor) -> "Edges":
        """The same edges with other logarithms, and on their device."""
        edges = Edges(self.index, log, self.size)
        if "_starts" in vars(self):
            edges._starts = self._starts.to(log.device)
        return edges

    def attend(self, bias: Tensor, value: Tensor | None) -> Attended:
        """lse (*batch, N) and out (*batch, N, C) for bias (*batch, N) and value (*batch, N, C)."""
        rows, columns = self.index
        scores = self.log + bias[..., columns]  # (*batch, E)
        shape = (*scores.shape[:-1], self.size)
        places = rows.expand_as(scores)
        largest = scores.new_full(shape, -torch.inf).scatter_reduce(-1, places, scores.detach(), "amax")
        largest = torch.where(largest == -torch.inf, 0, largest)  # rows without any weight
        weights = torch.exp(scores - largest[..., rows])
        total = scores.new_zeros(shape).scatter_add(-1, places, weights)
        is_empty = total == 0
        divisor = torch.where(is_empty, 1, total)
        lse = torch.where(is_empty, -torch.inf, largest + torch.log(divisor))
        if value is None:
            return Attended(None, lse)
        # Values of 16 bits are averaged in the precision of the weights, and rounded once.
        dtype = torch.promote_types(weights.dtype, value.dtype)
        weights, values = (weights / divisor[..., rows]).to(dtype), value.to(dtype)
        if torch.is_grad_enabled() and (weights.requires_grad or value.requires_grad):
            batch = broadcast_shapes(weights.shape[:-1], values.shape[:-2])
            products = weights[..., None] * values[..., columns, :]  # (*batch, E, C): what a gradient needs anyway
            out = values.new_zeros(*batch, self.size, values.shape[-1])
            out = out.index_add(len(batch), rows, products.expand(*batch, -1, -1))
        else:
            out = self._product(weights, values)
        return Attended(out.to(value.dtype), lse)

    @cached_property
    def _starts(self) -> Tensor:
        """Where each row begins among the edges, (N + 1,)."""
        rows = torch.arange(self.size + 1, device=self.index.device)
        return torch.searchsorted(self.index[0].contiguous(), rows)

    def _product(self, weights: Tensor, value: Tensor) -> Tensor:
        """Σ_j w_ij v_j by one sparse product for each item of a batch: memory for the edges and the values alone."""
        batch = broadcast_shapes(weights.shape[:-1], value.shape[:-2])
        weights = weights.expand(*batch, -1).reshape(batch.numel(), weights.shape[-1])
        values = value.expand(*batch, -1, -1).reshape(batch.numel(), *value.shape[-2:])
        with warnings.catch_warnings(), torch.autocast(value.device.type, enabled=False):
            warnings.filterwarnings("ignore", message="Sparse CSR")  # torch calls them new; COO products are slower
            items = [
                torch.sparse_csr_tensor(self._starts, self.index[1], w, (self.size, self.size), check_invariants=False)
                @ v
                for w, v in zip(weights, values, strict=True)
            ]
        return torch.stack(items).reshape(*batch, self.size, value.shape[-1])

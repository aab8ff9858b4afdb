"""All pairs of a sharded cloud: blocks of keys go around a ring of ranks, and what each gives is merged."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial, reduce

import torch
from torch import Tensor

from qattn.attended import Attended, merge
from qattn.attention.api import attend_by
from qattn.attention.backend import Derivatives, Differentiating, Engine
from qattn.attention.dispatch import BACKENDS, select
from qattn.attention.gradient import derivatives
from qattn.attention.inputs import Inputs
from qattn.distributed.group import Group, pack, unpack

__all__ = ["Ring"]


class Ring(Engine, Differentiating):
    """Attention from the queries of this rank to the keys of all, by an attention backend.

    A rank holds two blocks at a time: one that it attends to, while the next one comes in.

    Args:
        group: The ranks.
        queries: How many queries each of them has.
        keys: How many keys.
        backend: Which attention backend.
    """

    def __init__(self, group: Group, queries: list[int], keys: list[int], backend: str) -> None:
        self._group, self._queries, self._keys, self._backend = group, queries, keys, backend

    @property
    def ranks(self) -> Group:
        return self._group

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    @cached_property
    def exchanged(self) -> "Ring":
        return Ring(self._group, self._keys, self._queries, self._backend)

    def attend(self, inputs: Inputs) -> Attended:
        bias = inputs.key.new_zeros(inputs.key.shape[:2]) if inputs.bias is None else inputs.bias
        parts = [inputs.key, bias[..., None], *([] if inputs.value is None else [inputs.value])]
        out, lse = reduce(merge, (self._attended(inputs, *block) for block in self._blocks(parts)))
        return Attended(None if inputs.value is None or out is None else out.to(inputs.value.dtype), lse)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        bias = inputs.key.new_zeros(inputs.key.shape[:2]) if inputs.bias is None else inputs.bias
        sums = [inputs.query.new_zeros(()) for _ in range(3)]
        for key, biases, columns in self._blocks([inputs.key, bias[..., None], column]):
            if key.shape[1] and row.shape[1]:
                local = replace(inputs, key=key, value=None, bias=biases[..., 0])
                sums = [a + b for a, b in zip(sums, self._differentiated(local, row, columns, shift), strict=True)]
        empty = Derivatives(torch.zeros_like(shift), torch.zeros_like(inputs.query), torch.zeros_like(shift))
        return Derivatives(*(a + b for a, b in zip(sums, empty, strict=True)))

    def _differentiated(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        """Sums over one block; by any backend where the one that attends does not take these inputs."""
        backend = BACKENDS.get(self._backend)
        is_taken = backend is not None and not backend.not_supported_reasons(inputs)
        return derivatives(select(inputs, self._backend if is_taken else "auto"), inputs, row, column, shift)

    def _blocks(self, parts: list[Tensor]) -> Iterator[list[Tensor]]:
        """What each rank has of keys, parts (B, M, w) as they are on this one, from this rank around the ring."""
        rank, size, B = self._group.rank, self._group.size, len(parts[0])
        widths, dtypes = [x.shape[-1] for x in parts], [x.dtype for x in parts]
        block = pack(*(x.flatten(0, 1) for x in parts))  # (B M, bytes)
        for step in range(size):
            owner = (rank - step) % size
            following, works = block, []
            if step < size - 1:
                following = block.new_empty(B * self._keys[owner - 1], block.shape[-1])
                works = self._group.begin_exchange({(rank + 1) % size: block}, {(rank - 1) % size: following})
            yield [x.unflatten(0, (B, self._keys[owner])) for x in unpack(block, widths, dtypes)]
            self._group.end_exchange(works)
            block = following

    def _attended(self, inputs: Inputs, key: Tensor, bias: Tensor, value: Tensor | None = None) -> Attended:
        """Attention to one block, with out in the dtype of the scores, for merging."""
        chosen = partial(select, name=self._backend)
        out, lse = attend_by(
            chosen, inputs.query, key, value, bias=bias[..., 0], score=inputs.score, tol=inputs.tol, sigma=inputs.sigma
        )
        return Attended(None if out is None else out.to(inputs.dtype), lse.to(inputs.dtype))

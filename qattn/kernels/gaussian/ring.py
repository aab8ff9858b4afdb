"""The method "exact" for a sharded cloud: blocks of keys go around a ring of ranks, and their results are merged."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from qattn.attended import Attended, Derivatives, merge
from qattn.attention.batched import attend_batched
from qattn.attention.dispatch import Dispatch
from qattn.attention.engine import Differentiating, Engine
from qattn.attention.gradient import derivatives
from qattn.attention.inputs import Inputs
from qattn.distributed.group import Group, pack, unpack

__all__ = ["Ring"]


class Ring(Engine, Differentiating):
    """Attention from the queries of this rank to the keys of all ranks, with an attention backend.

    A rank holds two blocks at a time: the one that it attends to, and the next one, which it receives meanwhile.

    Args:
        group: Process group over which the points are sharded.
        queries: Number of queries per rank.
        keys: Number of keys per rank.
        engine: Engine for one block of keys.
    """

    def __init__(self, group: Group, queries: list[int], keys: list[int], engine: Dispatch) -> None:
        self._group, self._queries, self._keys, self._engine = group, queries, keys, engine

    @property
    def ranks(self) -> Group:
        return self._group

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    @cached_property
    def transposed(self) -> "Ring":
        return Ring(self._group, self._keys, self._queries, self._engine)

    @property
    def for_gradients(self) -> "Ring":
        return Ring(self._group, self._queries, self._keys, self._engine.for_gradients)

    def attend(self, inputs: Inputs) -> Attended:
        parts = [inputs.key, inputs.biases[..., None], *([] if inputs.value is None else [inputs.value])]
        out, lse = reduce(merge, (self._attended(inputs, *block) for block in self._blocks(parts)))
        return Attended(None if inputs.value is None or out is None else out.to(inputs.value.dtype), lse)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def is_direct(self, inputs: Inputs) -> bool:
        # Ranks need one answer, also those without points.
        engine, is_empty = self._engine, 0 in (inputs.query.shape[1], inputs.key.shape[1])
        is_direct = is_empty or (engine.can_differentiate(inputs) and engine.is_direct(inputs))
        return not self._group.any(not is_direct, inputs.device)

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        sums = [inputs.query.new_zeros(()) for _ in range(3)]
        for key, biases, columns in self._blocks([inputs.key, inputs.biases[..., None], column]):
            if key.shape[1] and row.shape[1]:
                local = replace(inputs, key=key, value=None, bias=biases[..., 0])
                sums = [a + b for a, b in zip(sums, derivatives(self._engine, local, row, columns, shift), strict=True)]
        empty = Derivatives(torch.zeros_like(shift), torch.zeros_like(inputs.query), torch.zeros_like(shift))
        return Derivatives(*(a + b for a, b in zip(sums, empty, strict=True)))

    def _blocks(self, parts: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the block of keys of each rank, starting with this one: parts (B, M, w), as given for this rank."""
        rank, size, B = self._group.rank, self._group.size, len(parts[0])
        widths, dtypes = [x.shape[-1] for x in parts], [x.dtype for x in parts]
        block = pack(*(x.flatten(0, 1) for x in parts))  # (B M, bytes)
        for step in range(size):
            owner = (rank - step) % size
            next_block, works = block, []
            if step < size - 1:
                next_block = block.new_empty(B * self._keys[owner - 1], block.shape[-1])
                works = self._group.begin_exchange({(rank + 1) % size: block}, {(rank - 1) % size: next_block})
            yield [x.unflatten(0, (B, self._keys[owner])) for x in unpack(block, widths, dtypes)]
            self._group.end_exchange(works)
            block = next_block

    def _attended(self, inputs: Inputs, key: Tensor, bias: Tensor, value: Tensor | None = None) -> Attended:
        """Attend to one block, with out in the dtype of the scores, for merging."""
        out, lse = attend_batched(
            self._engine, inputs.query, key, value, bias[..., 0], sigma=inputs.sigma, tol=inputs.tol
        )
        return Attended(None if out is None else out.to(inputs.dtype), lse.to(inputs.dtype))

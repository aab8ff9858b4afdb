"""All pairs of a sharded cloud: blocks of keys go around a ring of ranks, and what each gives is merged."""

from functools import cached_property

from torch import Tensor

from qattn.attended import Attended, merge
from qattn.attention import attend
from qattn.attention.backend import Engine
from qattn.attention.inputs import Inputs
from qattn.distributed.group import Group, pack, unpack

__all__ = ["Ring"]


class Ring(Engine):
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
    def is_sharded(self) -> bool:
        return True

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    def centred(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key

    @cached_property
    def exchanged(self) -> "Ring":
        return Ring(self._group, self._keys, self._queries, self._backend)

    def attend(self, inputs: Inputs) -> Attended:
        rank, size, B = self._group.rank, self._group.size, len(inputs.query)
        bias = inputs.key.new_zeros(inputs.key.shape[:2]) if inputs.bias is None else inputs.bias
        parts = [inputs.key, bias[..., None], *([] if inputs.value is None else [inputs.value])]
        widths, dtypes = [x.shape[-1] for x in parts], [x.dtype for x in parts]
        block = pack(*(x.flatten(0, 1) for x in parts))  # (B M, bytes)
        result = None
        for step in range(size):
            owner = (rank - step) % size
            following, works = block, []
            if step < size - 1:
                following = block.new_empty(B * self._keys[owner - 1], block.shape[-1])
                works = self._group.begin_exchange({(rank + 1) % size: block}, {(rank - 1) % size: following})
            parts = [x.unflatten(0, (B, self._keys[owner])) for x in unpack(block, widths, dtypes)]
            part = self._attended(inputs, *parts)
            result = part if result is None else merge(result, part)
            self._group.end_exchange(works)
            block = following
        assert result is not None
        return Attended(None if result.out is None else result.out.to(dtypes[-1]), result.lse)

    def _attended(self, inputs: Inputs, key: Tensor, bias: Tensor, value: Tensor | None = None) -> Attended:
        """Attention to one block, with out in the dtype of the scores, for merging."""
        out, lse = attend(
            inputs.query, key, value, bias=bias[..., 0], score=inputs.score, tol=inputs.tol, backend=self._backend
        )
        return Attended(None if out is None else out.to(inputs.dtype), lse.to(inputs.dtype))

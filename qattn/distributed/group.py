"""A process group as qattn uses it: a few collectives, counted, whose failure says what to do.

All ranks run the same code: every collective of one is a collective of all, in the same order, in the backward pass
too. What decides about collectives is therefore computed from numbers that all of them have, such as sums over ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qattn.distributed.agreement import Request, disagreement
from qattn.ranks import Ranks

__all__ = ["Group", "pack", "unpack"]


class Group(Ranks):
    """The ranks of a process group, each with a shard of the sites.

    Args:
        group: A process group; None for that of all processes.

    Attributes:
        sent: The bytes that this rank has sent: those of messages as they are, and those of collectives as if by rings,
            2(R − 1)/R times the data for a sum and R − 1 times for a gathering.
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "A sharded cloud needs a process group, and there is none. Call "
                "`torch.distributed.init_process_group()` first, in a program started by `torchrun`."
            )
        self.group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def sum(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self)

    def maximum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX, "comparing")

    def _reduced(self, x: Tensor, operation: Any, doing: str) -> Tensor:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        if x.numel() == 0:  # on all ranks
            return x
        self.sent += 2 * (self.size - 1) * x.nbytes // self.size
        with self._in_touch(doing):
            dist.all_reduce(x, operation, group=self.group)
        return x

    def gathered(self, x: Tensor) -> list[Tensor]:
        """The tensors x of all ranks, of one shape."""
        x = x.detach().contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        self.sent += (self.size - 1) * x.nbytes
        with self._in_touch("gathering"):
            dist.all_gather(found, x, group=self.group)
        return found

    def joined(self, x: Tensor) -> list[Tensor]:
        lengths = [int(n) for n in self.gathered(torch.tensor([len(x)], device=x.device))]
        if max(lengths) == 0:
            return [x.detach()] * self.size
        padded = x.new_zeros(max(lengths), *x.shape[1:])
        padded[: len(x)] = x
        return [rows[:n] for rows, n in zip(self.gathered(padded), lengths, strict=True)]

    def agree(self, call: str, device: torch.device, options: Mapping[str, object]) -> None:
        request = Request(call, {name: repr(value) for name, value in options.items()})
        hashes = self.gathered(torch.tensor(request.hashes(), device=device))
        if all(torch.equal(other, hashes[0]) for other in hashes):
            return
        # All ranks have come to this, as they have the same hashes.
        texts = self.joined(torch.tensor(list(request.to_json()), dtype=torch.uint8, device=device))
        raise ValueError(disagreement([Request.from_json(bytes(text.tolist())) for text in texts]))

    def begin_exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> list[Any]:
        """Begins to send tensors to ranks, and to fill others from ranks; empty ones are not sent."""
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=r) for r, x in outgoing.items() if len(x)]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=r) for r, x in incoming.items() if len(x)]
        self.sent += sum(x.nbytes for x in outgoing.values())
        with self._in_touch("exchanging points"):
            return dist.batch_isend_irecv(operations) if operations else []

    def end_exchange(self, works: Sequence[Any]) -> None:
        """Waits until what was begun is done."""
        with self._in_touch("exchanging points"):
            for work in works:
                work.wait()

    @contextmanager
    def _in_touch(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {self.rank} of {self.size} lost touch with the others while {doing}: one of them has died, or "
                "has not answered within the timeout of the process group. Start all ranks again; given a potential "
                f"that was saved as `init=`, normalising goes on from there. ({str(error).splitlines()[0]})"
            ) from error


class _Sum(torch.autograd.Function):
    """Σ x over the ranks. What follows on each of them depends on all, so cotangents are summed too."""

    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return group._reduced(x, dist.ReduceOp.SUM, "adding up")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return _Sum.apply(grads[0], ctx.group), None


def pack(*tensors: Tensor) -> Tensor:
    """Tensors (n, w) of any dtypes side by side as bytes, (n, w'): one message instead of several."""
    return torch.cat([x.contiguous().view(torch.uint8) for x in tensors], dim=-1)


def unpack(packed: Tensor, widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors (n, w) that were packed."""
    sizes = [width * dtype.itemsize for width, dtype in zip(widths, dtypes, strict=True)]
    # Copied even if contiguous, as a single row is, whatever its stride, which has to be a multiple of the new dtype.
    columns = [column.clone(memory_format=torch.contiguous_format) for column in packed.split(sizes, dim=-1)]
    return [column.view(dtype) for column, dtype in zip(columns, dtypes, strict=True)]

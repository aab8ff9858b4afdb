"""Process groups, with the few collectives that qattn uses, and counts of the bytes that they send.

All ranks run the same code: every collective is called by all ranks in the same order, also in the backward pass.
Decisions about collectives therefore depend only on numbers that all ranks have, such as sums over ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from qattn import _checks
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.distributed.agreement import Request, disagreement
from qattn.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Group", "GroupLike", "GroupOrWorld", "pack", "unpack"]

GroupOrWorld: TypeAlias = "dist.ProcessGroup | Literal['world']"
"""A process group, or "world" for all processes."""

GroupLike: TypeAlias = "dist.ProcessGroup | Ranks | Literal['world'] | None"
"""A process group, "world" for all processes, or None for points that are all in this process."""


class Group(Ranks):
    """The ranks of a process group, each with a shard of the sites.

    Args:
        group: Process group, or "world" for all processes.

    Attributes:
        sent: Number of bytes that this rank has sent. Collectives count as if they were rings: 2(R − 1)/R times the
            data for a sum, and R − 1 times the data for a gather.
    """

    def __init__(self, group: GroupOrWorld = "world") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "A sharded cloud needs a process group, but none is initialized. Call "
                "`torch.distributed.init_process_group()` first, in a program started by `torchrun`."
            )
        if isinstance(group, str):
            _checks.one_of("group", group, ("world",))
        self.group = None if isinstance(group, str) else group
        self._rank, self._size = dist.get_rank(self.group), dist.get_world_size(self.group)
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
        return self._reduced(x, dist.ReduceOp.MAX, "a maximum")

    def _reduced(self, x: Tensor, operation: Any, task: str) -> Tensor:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        if x.numel() == 0:  # on all ranks
            return x
        self.sent += 2 * (self.size - 1) * x.nbytes // self.size
        with self._explaining_failure(task):
            dist.all_reduce(x, operation, group=self.group)
        return x

    def gathered(self, x: Tensor) -> list[Tensor]:
        """Gather tensors x of one shape from all ranks."""
        x = x.detach().contiguous()
        tensors = [torch.empty_like(x) for _ in range(self.size)]
        self.sent += (self.size - 1) * x.nbytes
        with self._explaining_failure("a gather"):
            dist.all_gather(tensors, x, group=self.group)
        return tensors

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
        # All ranks get here, as they compare the same hashes.
        texts = self.joined(torch.tensor(list(request.to_json()), dtype=torch.uint8, device=device))
        raise ValueError(disagreement([Request.from_json(bytes(text.tolist())) for text in texts]))

    @staticmethod
    def of(group: GroupLike, points: ArrayLike | None = None) -> Ranks:
        """Return the ranks of a `group` argument; if it is None, those of points that are a DTensor, or `ALONE`."""
        if isinstance(group, Ranks):
            return group
        if group is None:
            return Group(points.device_mesh.get_group()) if _is_dtensor(points) else ALONE
        return Group(group)

    def local_part(self, name: str, array: ArrayLike, axis: int) -> ArrayLike:
        if not _is_dtensor(array):
            return array
        axis = max(0, array.ndim + axis)
        if array.device_mesh.ndim != 1 or not array.placements[0].is_shard(axis):
            raise ValueError(
                f"`{name}` should be sharded along its points over a mesh with one axis; got {array.placements}. Use "
                f"`{name}.redistribute(placements=[Shard({axis})])`."
            )
        return array.to_local()

    def like(self, result: Tensor, given: ArrayLike) -> TensorOrArray:
        if not _is_dtensor(given):
            return like_input(result, given)
        from torch.distributed.tensor import DTensor, Shard  # here, because importing it takes a while

        axis = max(0, result.ndim - 2)
        N = given.shape[max(0, given.ndim - 2)]
        layout = torch.empty(*result.shape[:axis], N, *result.shape[axis + 1 :], device="meta")
        return DTensor.from_local(
            result, given.device_mesh, [Shard(axis)], run_check=False, shape=layout.shape, stride=layout.stride()
        )

    def check_alone(self, name: str) -> None:
        raise ValueError(
            f"`{name}` needs all sites in one process, but this kernel is sharded over several. Gather the points and "
            "make a `GaussianKernel` of them without `group`."
        )

    def begin_exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> "list[dist.Work]":
        """Start to send tensors to ranks and to receive tensors from ranks, by their numbers; skip empty ones."""
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=r) for r, x in outgoing.items() if len(x)]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=r) for r, x in incoming.items() if len(x)]
        self.sent += sum(x.nbytes for x in outgoing.values())
        with self._explaining_failure("an exchange of points"):
            return dist.batch_isend_irecv(operations) if operations else []

    def end_exchange(self, works: "Sequence[dist.Work]") -> None:
        """Wait for the end of an exchange."""
        with self._explaining_failure("an exchange of points"):
            for work in works:
                work.wait()

    @contextmanager
    def _explaining_failure(self, task: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {self.rank} of {self.size} lost the connection to the others during {task}: one of them has "
                "failed, or did not answer within the timeout of the process group. Start all ranks again; with a "
                f"saved potential as `init=`, normalization continues from there. ({str(error).splitlines()[0]})"
            ) from error


def _is_dtensor(array: object) -> "TypeGuard[DTensor]":
    """Recognize a DTensor without importing its class, which takes a while."""
    return hasattr(array, "to_local")


class _Sum(torch.autograd.Function):
    """Σ x over the ranks. Results of all ranks depend on the sum, so their cotangents are summed too."""

    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return group._reduced(x, dist.ReduceOp.SUM, "a sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0], ctx.group), None


def pack(*tensors: Tensor) -> Tensor:
    """Pack tensors (n, w) of any dtypes into one tensor of bytes (n, w'), to send one message instead of several."""
    return torch.cat([x.contiguous().view(torch.uint8) for x in tensors], dim=-1)


def unpack(packed: Tensor, widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Undo `pack`, for tensors (n, w) of these widths and dtypes."""
    sizes = [width * dtype.itemsize for width, dtype in zip(widths, dtypes, strict=True)]
    # Always copied: a single row counts as contiguous whatever its stride, and `view` needs a multiple of the dtype.
    columns = [column.clone(memory_format=torch.contiguous_format) for column in packed.split(sizes, dim=-1)]
    return [column.view(dtype) for column, dtype in zip(columns, dtypes, strict=True)]

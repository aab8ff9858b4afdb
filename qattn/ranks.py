"""The process group over which the sites of a kernel are sharded, or `ALONE` if all are in this process.

Solvers use it for the few numbers that depend on all sites at once. Everything else that they compute is local to a
site, or comes from `attend`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from qattn._types import ArrayLike, TensorOrArray, like_input

__all__ = ["ALONE", "Ranks", "kind_of_rows"]

_RUN = 64  # points that are reduced together


class Ranks(ABC):
    """A set of processes, each with a shard of the sites, and the reductions that they compute together."""

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """True if all sites are in this process."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of processes."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Compute Σ x over the ranks, differentiably."""

    @abstractmethod
    def maximum(self, x: Tensor) -> Tensor:
        """Compute the elementwise maximum of x over the ranks, without gradient."""

    @abstractmethod
    def joined(self, x: Tensor) -> list[Tensor]:
        """Gather the tensors x (n, …) of all ranks, whose n may differ, without gradient."""

    @abstractmethod
    def agree(self, call: str, device: torch.device, options: Mapping[str, object]) -> None:
        """Raise on all ranks if they call different functions, or with different options.

        Args:
            call: Name of the function.
            device: Device on which the ranks exchange messages.
            options: Up to 15 options by the names that messages give them; compared by `repr`. See `kind_of_rows`.
        """

    @abstractmethod
    def local_part(self, name: str, array: ArrayLike, axis: int) -> ArrayLike:
        """Return this rank's part of a DTensor sharded along `axis` < 0, and all other arrays unchanged."""

    @abstractmethod
    def like(self, result: Tensor, given: ArrayLike) -> TensorOrArray:
        """Convert a result (n,) or (*batch, n, C) to a DTensor, tensor or array, whichever `given` is."""

    @abstractmethod
    def check_alone(self, name: str) -> None:
        """Raise if the sites are sharded, as `name` needs all of them in one process."""

    def first(self, x: Tensor) -> Tensor:
        """Return the x of the first rank, without gradient, where those of other ranks may differ by rounding."""
        return self.joined(x)[0]

    def any(self, condition: bool, device: torch.device) -> bool:
        """Return whether a condition holds on any rank; all ranks ask, with a device that they communicate by."""
        return bool(self.maximum(torch.tensor(float(condition), device=device)) > 0)

    def total(self, x: Tensor) -> Tensor:
        """Compute Σ x over all sites, (*batch, N) to (*batch,)."""
        return self.sum(x.sum(-1))

    def largest(self, x: Tensor) -> Tensor:
        """Compute the largest x ≥ 0 over all sites, (*batch, N) to (*batch,), without gradient; 0 without sites."""
        return self.maximum(x.detach().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1]))

    def highest(self, x: Tensor) -> Tensor:
        """Compute the largest x over the rows (n, …) of all ranks, shape (…), without gradient; −inf without rows."""
        return self.maximum(x.detach().amax(0) if len(x) else x.new_full(x.shape[1:], -torch.inf))

    def box(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the least and the largest coordinates, (D,) each, of the points (n, D) of all ranks."""
        D = points.shape[-1]
        points = points.detach()
        if head := len(points) // _RUN * _RUN:  # extremes of long rows are found ten times as fast
            runs = points[:head].reshape(-1, _RUN * D)
            ends = torch.stack([runs.amin(0), runs.amax(0)]).reshape(2 * _RUN, D)
            points = torch.cat([ends, points[head:]])
        sides = (points.amax(0), -points.amin(0)) if len(points) else (points.new_full((D,), -torch.inf),) * 2
        high = self.maximum(torch.cat(sides))
        return -high[D:], high[:D]

    def mean(self, bias: Tensor, value: Tensor) -> Tensor:
        """Average values (*batch, N, C) over all sites with weights e^b, (*batch, 1, C); 0 if there is no weight."""
        absent = bias.new_full((*bias.shape[:-1], 1), -torch.inf)
        largest = self.maximum(torch.cat([bias, absent], dim=-1).amax(-1, keepdim=True))
        weights = torch.exp(bias - torch.where(largest == -torch.inf, 0, largest))[..., None]
        total = self.sum(weights.sum(-2, keepdim=True))
        return self.sum((weights * value).sum(-2, keepdim=True)) / torch.where(total > 0, total, 1)

    def log_sum(self, x: Tensor) -> Tensor:
        """Compute log Σ e^x over the ranks."""
        largest = self.maximum(x)
        largest = torch.where(largest == -torch.inf, 0, largest)
        return largest + torch.log(self.sum(torch.exp(x - largest)))


class _Alone(Ranks):
    """The current process alone, with all sites."""

    @property
    def is_alone(self) -> bool:
        return True

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def maximum(self, x: Tensor) -> Tensor:
        return x.detach()

    def joined(self, x: Tensor) -> list[Tensor]:
        return [x.detach()]

    def agree(self, call: str, device: torch.device, options: Mapping[str, object]) -> None:
        pass

    def local_part(self, name: str, array: ArrayLike, axis: int) -> ArrayLike:
        if hasattr(array, "to_local"):
            raise ValueError(
                f"`{name}` is a DTensor, but all sites of the kernel are in one process. Make a `GaussianKernel` of "
                f"points that are sharded in the same way, or pass `{name}.full_tensor()`."
            )
        return array

    def like(self, result: Tensor, given: ArrayLike) -> TensorOrArray:
        return like_input(result, given)

    def check_alone(self, name: str) -> None:
        pass


ALONE = _Alone()


def kind_of_rows(array: ArrayLike | None, axis: int) -> str | None:
    """Describe what shards of an array have in common: their shape, with n along `axis`, and any gradient."""
    if array is None:
        return None
    sizes = list(map(str, np.shape(array)))
    if sizes:
        sizes[max(axis, -len(sizes))] = "n"
    gradient = ", with gradient" if getattr(array, "requires_grad", False) and torch.is_grad_enabled() else ""
    return f"({', '.join(sizes)}){gradient}"

"""Who holds the sites of a kernel: this process alone, or the ranks of a group, each with a shard of them.

Solvers ask this for the few numbers that are of all sites together. Everything else that they do is site by site, or by
`attend`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["ALONE", "Ranks"]


class Ranks(ABC):
    """Those that hold sites, and what they compute together."""

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """Whether all sites are here."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this process."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of processes."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Σ x over the ranks."""

    @abstractmethod
    def maximum(self, x: Tensor) -> Tensor:
        """The largest x of the ranks, without gradient."""

    @abstractmethod
    def joined(self, x: Tensor) -> list[Tensor]:
        """The tensors x of all ranks, (n, …) with a length of their own each, without gradient."""

    @abstractmethod
    def agree(self, call: str, device: torch.device, options: Mapping[str, object]) -> None:
        """Raises on all ranks if they differ in the function that they call, or in its options.

        Args:
            call: The name of the function.
            device: Where the ranks can exchange messages.
            options: Up to 15 options by the names that a message gives them; compared by `repr`.
        """

    def first(self, x: Tensor) -> Tensor:
        """What the first rank has, without gradient: for what others compute alike, but for rounding."""
        return self.joined(x)[0]

    def total(self, x: Tensor) -> Tensor:
        """Σ x over all sites, (*batch, N) to (*batch,)."""
        return self.sum(x.sum(-1))

    def largest(self, x: Tensor) -> Tensor:
        """The largest x ≥ 0 of all sites, (*batch, N) to (*batch,), without gradient; 0 if there are none."""
        return self.maximum(x.detach().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1]))

    def highest(self, x: Tensor) -> Tensor:
        """The largest of the rows x (n, …) of all ranks, shape (…), without gradient; −inf if there are none."""
        return self.maximum(x.detach().amax(0) if len(x) else x.new_full(x.shape[1:], -torch.inf))

    def box(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest coordinates, (D,) each, of the points (n, D) of all ranks."""
        high = self.highest(torch.cat([points, -points], dim=-1))
        return -high[points.shape[-1] :], high[: points.shape[-1]]

    def mean(self, bias: Tensor, value: Tensor) -> Tensor:
        """The means of values (*batch, N, C) over all sites, with weights e^b, shape (*batch, 1, C); 0 of none."""
        none = bias.new_full((*bias.shape[:-1], 1), -torch.inf)
        top = self.maximum(torch.cat([bias, none], dim=-1).amax(-1, keepdim=True))
        weights = torch.exp(bias - torch.where(top == -torch.inf, 0, top))[..., None]
        total = self.sum(weights.sum(-2, keepdim=True))
        return self.sum((weights * value).sum(-2, keepdim=True)) / torch.where(total > 0, total, 1)

    def log_sum(self, x: Tensor) -> Tensor:
        """log Σ e^x over the ranks."""
        top = self.maximum(x)
        top = torch.where(top == -torch.inf, 0, top)
        return top + torch.log(self.sum(torch.exp(x - top)))


class _Alone(Ranks):
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


ALONE = _Alone()

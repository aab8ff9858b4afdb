"""Who holds the sites of a kernel: this process alone, or the ranks of a group, each with a shard of them.

Solvers ask this for the few numbers that are of all sites together. Everything else that they do is site by site, or by
`attend`.
"""

from abc import ABC, abstractmethod

from torch import Tensor

__all__ = ["ALONE", "Ranks"]


class Ranks(ABC):
    """Reductions over all sites, of which the last axis holds those that are here."""

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """Whether all sites are here."""

    @abstractmethod
    def total(self, x: Tensor) -> Tensor:
        """Σ x over all sites, (*batch, N) to (*batch,); differentiable."""

    @abstractmethod
    def largest(self, x: Tensor) -> Tensor:
        """The largest x ≥ 0 of all sites, (*batch, N) to (*batch,), without gradient; 0 if there are none."""


class _Alone(Ranks):
    @property
    def is_alone(self) -> bool:
        return True

    def total(self, x: Tensor) -> Tensor:
        return x.sum(-1)

    def largest(self, x: Tensor) -> Tensor:
        return x.detach().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


ALONE = _Alone()

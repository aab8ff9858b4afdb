"""The contract of what attends: say why not, or attend."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.inputs import Inputs
from qattn.ranks import ALONE, Ranks

__all__ = ["Backend", "Derivatives", "Differentiating", "Engine"]


class Engine(ABC):
    """What computes attention, exactly or to the tolerance of its inputs."""

    @abstractmethod
    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        """Why these inputs cannot be taken; empty if they can. Never raises."""

    @abstractmethod
    def attend(self, inputs: Inputs) -> Attended:
        """out (B, N, C) in the dtype of the values, or None, and lse (B, N); the reasons are known to be empty."""

    @property
    def exchanged(self) -> "Engine":
        """What attends from the keys to the queries; itself, unless it has been prepared for certain points."""
        return self

    @property
    def ranks(self) -> Ranks:
        """The processes that hold queries and keys; all of them attend together, also those that hold none."""
        return ALONE


class Derivatives(NamedTuple):
    """Σ_j s̄_ij, Σ_j s̄_ij (k_j − q_i) and Σ_j s̄_ij ‖k_j − q_i‖²: (B, N), (B, N, D) and (B, N)."""

    total: Tensor
    first: Tensor
    second: Tensor


class Differentiating(ABC):
    """Engines that sum derivatives over pairs themselves, with differences of points taken directly."""

    @abstractmethod
    def can_differentiate(self, inputs: Inputs) -> bool:
        """Whether it can for such inputs."""

    @abstractmethod
    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        """The sums for s̄_ij = exp(s_ij − shift_i) R_i · S_j, with rows R (B, N, C), columns S (B, M, C), shift (B, N).

        The values of the inputs do not matter, and their scores s_ij include the bias.
        """


class Backend(Engine):
    """An attention kernel.

    Attributes:
        name: What `attend(backend=...)` calls it.
        tolerance: Largest error of lse, and of out for values of order 1, that its arithmetic allows on a cloud within
            ten bandwidths of its centre, by the dtype of the query. The tests and `qattn doctor` hold it to this.
    """

    name: ClassVar[str]
    tolerance: ClassVar[dict[torch.dtype, float]]

"""The contract of what attends: say why not, or attend."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.inputs import Inputs
from qattn.lift import centre

__all__ = ["Backend", "Engine", "Moments"]


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
    def is_sharded(self) -> bool:
        """Whether other ranks hold further queries and keys: then all of them attend, also those that hold none."""
        return False

    def centred(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys about an origin near them, the same for all that attend to one another."""
        return centre(query, key)


class Moments(ABC):
    """What an engine has that can average values times ‖q − k‖² in the pass in which it averages values."""

    @abstractmethod
    def takes_moments(self, inputs: Inputs) -> bool:
        """Whether it can for such inputs."""

    @abstractmethod
    def attend_with_moments(self, inputs: Inputs) -> tuple[Attended, Tensor]:
        """As `Engine.attend` with values, and the averages of values times ‖q − k‖², (B, N, C)."""


class Backend(Engine):
    """An attention kernel.

    Attributes:
        name: What `attend(backend=...)` calls it.
        tolerance: Largest error of lse, and of out for values of order 1, that its arithmetic allows on a cloud within
            ten bandwidths of its centre, by the dtype of the query. The tests and `qattn doctor` hold it to this.
    """

    name: ClassVar[str]
    tolerance: ClassVar[dict[torch.dtype, float]]

"""The interface of attention engines: state the reasons against some inputs, or attend."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from qattn.attended import Attended, Derivatives, PairSums, PairTerms
from qattn.attention.inputs import Inputs
from qattn.ranks import ALONE, Ranks

__all__ = ["Backend", "Differentiating", "Engine", "Fused"]


class Engine(ABC):
    """Computes attention, exactly or to the tolerance of its inputs. It may be prepared for certain points."""

    @abstractmethod
    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        """Return the reasons why these inputs are not supported; empty if they are. Never raises."""

    @abstractmethod
    def attend(self, inputs: Inputs) -> Attended:
        """Attend, for inputs without reasons against them.

        Returns:
            out (B, N, C) in the dtype of the values, or None, and lse (B, N).
        """

    @property
    def transposed(self) -> "Engine":
        """The engine from keys to queries; the same engine, unless it is prepared for certain points."""
        return self

    @property
    def for_gradients(self) -> "Engine":
        """The engine for backward passes, whose inputs may have another dtype."""
        return self

    @property
    def ranks(self) -> Ranks:
        """Process group over which queries and keys are sharded. All its ranks attend together, even without points."""
        return ALONE


class Differentiating(ABC):
    """Engines that sum derivatives over pairs themselves."""

    @abstractmethod
    def can_differentiate(self, inputs: Inputs) -> bool:
        """Return whether these inputs are supported."""

    def is_direct(self, inputs: Inputs) -> bool:
        """Return whether differences of points are taken first, so that no large products cancel in the sums."""
        return True

    @abstractmethod
    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        """Compute Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²) with s̄_ij = exp(s_ij − shift_i) R_i · S_j.

        Args:
            inputs: Points, bandwidths and biases of the scores s_ij. The values are ignored.
            row: Rows R (B, N, C).
            column: Columns S (B, M, C).
            shift: Shifts (B, N).
        """


class Fused(Differentiating):
    """Engines that take the sums over keys and those over queries in one pass over pairs."""

    @abstractmethod
    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        """Compute the sums of `differentiate`, and those over queries. The values of the inputs are ignored."""

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        return self.pair_sums(inputs, PairTerms(row, column, shift)).rows


class Backend(Engine):
    """An attention kernel.

    Attributes:
        name: Name in `attend(backend=...)`.
        tolerance: Largest error of lse, and of out for values of order 1, on a cloud within ten bandwidths of its
            center, by the dtype of the query. The tests and `qattn doctor` check it.
    """

    name: ClassVar[str]
    tolerance: ClassVar[dict[torch.dtype, float]]

r"""Radial profiles that are mixtures of Gaussians: k(r) = ∫ p(t) exp(−r² / 2 s(t)²) dt with p ≥ 0, r in units of σ.

The trapezoidal rule, in a variable in which the integrand looks alike for all r, turns the integral into a sum with
positive weights. Its *relative* error is bounded at every distance in reach, so sums over points with any weights have
the same relative error.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from qattn.attention.score import gaussian

__all__ = ["Matern", "Profile", "RationalQuadratic"]

_MIN_TOL = 1e-11  # smallest error of a quadrature in float64
_VANISHED = 90.0  # −log of a number that vanishes in float32
_MAX_ELEMENTARY = 10  # ν beyond which powers of a overflow in float32


class Profile(ABC):
    """A function k(r) that decreases from k(0) = 1."""

    @abstractmethod
    def score(self, query: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
        """Compute log k(‖q − k‖) from tuples of coordinates."""

    @property
    @abstractmethod
    def is_elementary(self) -> bool:
        """True if the score consists of torch functions, so that attention can compute and differentiate it."""

    @property
    @abstractmethod
    def reach(self) -> float:
        """Distance beyond which k vanishes, and a sum of Gaussians may decrease faster."""

    @abstractmethod
    def _nodes(self, reach: float, tol: float, step: float) -> tuple[np.ndarray, np.ndarray]:
        """Return bandwidths and log weights of the rule with a step, cut where less than a fraction `tol` is left."""

    @cache  # noqa: B019 (profiles are few, and small)
    def gaussians(self, reach: float, tol: float) -> tuple[Tensor, Tensor]:
        """Return s_n and log w_n, (n,) each, such that Σ w_n exp(−r² / 2 s_n²) is k(r) to `tol` for r ≤ `reach`."""
        if not tol >= _MIN_TOL:
            raise ValueError(
                f"`tol` is too small for a sum of Gaussians, whose error would have to be {tol:.1e}. Use a larger "
                '`tol`, or `method="exact"`.'
            )
        reach = min(reach, self.reach)
        r = np.concatenate([[0.0], np.geomspace(1e-6 * reach, reach, 1000)])
        exact = self.score([torch.from_numpy(r)], [torch.zeros(1, dtype=torch.float64)]).numpy()
        for count in range(100):  # the error decreases like a Gaussian of 1 / step
            bandwidths, log_weights = self._nodes(reach, 0.2 * tol, 1.2 * 0.93**count)
            terms = log_weights - 0.5 * (r[:, None] / bandwidths) ** 2
            if np.abs(np.expm1(np.logaddexp.reduce(terms, axis=1) - exact)).max() <= tol:
                return torch.from_numpy(bandwidths), torch.from_numpy(log_weights)
        raise ValueError(f"`tol` is too small: no sum of Gaussians was found that is {self} to {tol:.1e}.")


@dataclass(frozen=True)
class Matern(Profile):
    r"""k(r) = 2^{1−ν} a^ν K_ν(a) / Γ(ν) = ∫ t^{ν−1} e^{−t} exp(−a² / 4t) dt / Γ(ν), with a = √(2ν) r.

    For ν = p + ½ it is e^{−a} times a polynomial, and for ν = ½ the exponential e^{−r}.
    """

    nu: float

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
        # The square root has no derivative at 0. Clamping replaces 0 by the least positive number, with derivative 0.
        square = -4 * self.nu * gaussian(query, key)
        a = torch.sqrt(square.clamp(min=torch.finfo(square.dtype).tiny))
        if self.is_elementary:
            p, f = round(self.nu - 0.5), math.factorial
            polynomial = torch.zeros_like(a)
            for i in range(p + 1):
                polynomial = polynomial + f(p) * f(p + i) / (f(2 * p) * f(i) * f(p - i)) * (2 * a) ** (p - i)
            return torch.log(polynomial) - a
        from scipy.special import kve  # here, because SciPy is slow to import

        bessel = torch.from_numpy(kve(self.nu, a.numpy()))
        constant = (1 - self.nu) * math.log(2) - math.lgamma(self.nu)
        near = -square / (4 * max(self.nu - 1, 1.0))  # first term of a series, where the Bessel function overflows
        return torch.where(bessel.isfinite(), constant + self.nu * torch.log(a) + torch.log(bessel) - a, near)

    @property
    def is_elementary(self) -> bool:
        return (self.nu - 0.5).is_integer() and self.nu < _MAX_ELEMENTARY

    @property
    def reach(self) -> float:
        return _VANISHED / math.sqrt(2 * self.nu)

    def _nodes(self, reach: float, tol: float, step: float) -> tuple[np.ndarray, np.ndarray]:
        from scipy.special import expit, gammaincinv

        # t = w² with w = log(1 + e^u): u is about log w for small t, and w for large t. The integrand is about
        # e^{−a − (w − a/2w)²}, whose width does not depend on a.
        first = math.sqrt(gammaincinv(self.nu, tol))
        last = math.sqrt(0.5 * (self.nu + math.hypot(self.nu, math.sqrt(2 * self.nu) * reach))) + math.sqrt(
            -math.log(tol)
        )
        low, high = (w + math.log(-math.expm1(-w)) for w in (first, last))
        u = low + step * (0.5 + np.arange(math.ceil((high - low) / step)))
        w = np.logaddexp(0, u)
        log_weights = (
            math.log(2 * step) - math.lgamma(self.nu) + (2 * self.nu - 1) * np.log(w) - w**2 + np.log(expit(u))
        )
        return w / math.sqrt(self.nu), log_weights


@dataclass(frozen=True)
class RationalQuadratic(Profile):
    r"""k(r) = (1 + r² / 2α)^{−α} = ∫ t^{α−1} e^{−t} exp(−t r² / 2α) dt / Γ(α)."""

    alpha: float

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
        return -self.alpha * torch.log1p(-gaussian(query, key) / self.alpha)

    @property
    def is_elementary(self) -> bool:
        return True

    @property
    def reach(self) -> float:
        return math.inf

    def _nodes(self, reach: float, tol: float, step: float) -> tuple[np.ndarray, np.ndarray]:
        from scipy.special import gammainccinv, gammaincinv

        # In u = log t the integrands of two distances are translates of one another.
        low = math.log(gammaincinv(self.alpha, tol)) - math.log1p(reach**2 / (2 * self.alpha))
        high = math.log(gammainccinv(self.alpha, tol))
        step /= math.sqrt(1 + self.alpha)  # the integrand becomes narrower as α grows
        u = low + step * (0.5 + np.arange(math.ceil((high - low) / step)))
        return np.sqrt(self.alpha) * np.exp(-0.5 * u), math.log(step) - math.lgamma(
            self.alpha
        ) + self.alpha * u - np.exp(u)

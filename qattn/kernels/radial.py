r"""Radial kernels K_ij = k(‖x_i − x_j‖ / σ) that are mixtures of Gaussians: exponential, Matérn, rational quadratic.

Σ_n w_n exp(−‖x_i − x_j‖² / 2σ²s_n²) with w_n > 0 is positive definite by construction: a merged sum of Gaussian
kernels, each by its own method and backend. All pairs by the score itself is the exact way.
"""

import math
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended, merge
from qattn.attention.dispatch import select
from qattn.kernels.base import PointKernel
from qattn.kernels.gaussian import GaussianKernel
from qattn.kernels.prepared import attend_folded
from qattn.kernels.profiles import Matern, Profile, RationalQuadratic

__all__ = ["ExponentialKernel", "MaternKernel", "RationalQuadraticKernel"]

_FEW_PAIRS = 2**22  # that "auto" computes exactly
_MOST_NU = 100  # beyond, Bessel functions overflow


class _RadialKernel(PointKernel):
    """The kernel of a profile; `GaussianKernel` at the bandwidth σ knows the points, and makes the terms of the sum."""

    def __init__(self, points: Any, sigma: Any, profile: Profile, method: str, tol: float, backend: str) -> None:
        _checks.one_of("method", method, ("auto", "exact", "gaussians"))
        _checks.positive("`tol`", tol)
        if method == "exact" and not profile.is_elementary:
            raise ValueError(f'{profile} has no closed form to be computed by. Take `method="gaussians"`.')
        # Half of the error may be that of each Gaussian, the other half that of their sum.
        self._base = GaussianKernel(points, sigma, tol=0.5 * tol, backend=backend)
        self._profile, self._method, self._tol, self._backend = profile, method, tol, backend

    def _of(self, base: GaussianKernel) -> "_RadialKernel":
        """The same kernel with another base."""
        kernel = object.__new__(type(self))
        kernel.__dict__.update(self.__dict__, _base=base)
        kernel.__dict__.pop("_terms", None)
        return kernel

    def __repr__(self) -> str:
        sigma = self.sigma
        bandwidth = f"{float(sigma):g}" if sigma.ndim == 0 else f"{len(sigma)} bandwidths"
        parameters = "".join(f", {name}={value:g}" for name, value in self._parameters.items())
        name = type(self).__name__
        return f"{name}({tuple(self.points.shape)}, sigma={bandwidth}{parameters}, method={self.method!r})"

    def __str__(self) -> str:
        if self.method == "exact":
            return repr(self)
        lines = [f"  {float(w.exp()):8.2g} × {term!r}" for _, w, term in self._terms]
        return "\n".join([repr(self), *lines])

    @property
    def _parameters(self) -> dict[str, float]:
        return vars(self._profile)

    @property
    def points(self) -> Tensor:
        """The positions x, shape (*batch, N, d)."""
        return self._base.points

    @property
    def sigma(self) -> Tensor:
        """The bandwidth σ, a tensor without axes or of shape (H,)."""
        return self._base.sigma

    @property
    def method(self) -> str:
        """How it is computed, "exact" or "gaussians"."""
        if self._method != "auto":
            return self._method
        return "exact" if self._profile.is_elementary and self.shape.numel() <= _FEW_PAIRS else "gaussians"

    @cached_property
    def _terms(self) -> list[tuple[Tensor, Tensor, GaussianKernel]]:
        """Bandwidths in units of σ, log weights from the largest down, and Gaussian kernels prepared for them.

        They are made once, with or without gradients: `attend` gives them the tensors that have some.
        """
        # A power of two, so that the sum does not change with every point that moves.
        reach = 2.0 ** math.ceil(math.log2(max(1.0, self._base.diameter / float(self.sigma.detach().amin()))))
        bandwidths, log_weights = (x.to(self.sigma) for x in self._profile.gaussians(reach, 0.4 * self._tol))
        kernels = [self._base.with_sigma(s * self.sigma.detach()) for s in bandwidths]
        terms = zip(bandwidths, log_weights, kernels, strict=True)
        return sorted(terms, key=lambda term: float(term[1]), reverse=True)

    @property
    def shape(self) -> torch.Size:
        return self._base.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._base.tensors

    def replace(self, *tensors: Tensor) -> "_RadialKernel":
        kernel = self._of(self._base.replace(*tensors))
        if (kernel.device, kernel.points.dtype) == (self.device, self.points.dtype) and "_terms" in vars(self):
            kernel._terms = self._terms
        return kernel

    def at(self, points: Any) -> "_RadialKernel":
        return self._of(self._base.at(points))

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        if self.method == "exact":
            chosen = partial(select, name=self._backend)
            clouds, score = self._base.clouds(self.sigma), self._profile.score
            return attend_folded(chosen, *clouds, value, bias, self._tol, score, self.sigma)
        # Values of 16 bits are averaged in the precision of the logarithms, and rounded once.
        values = None if value is None else value.to(torch.promote_types(value.dtype, self.dtype))
        # A term adds at most w Σ e^b to a row. The largest come first, so that the least can be seen to add nothing.
        total = torch.logsumexp(bias.detach(), dim=-1, keepdim=True) - math.log(0.1 * self._tol / len(self._terms))
        points, sigma, *targets = self.tensors
        whole: Attended | None = None
        for s, w, term in self._terms:
            if whole is None or (w + total > whole.lse).any():
                out, lse = term.replace(points, s * sigma, *targets).attend(bias, values)
                part = Attended(out, lse + w)
                whole = part if whole is None else merge(whole, part)
        assert whole is not None
        return whole if value is None or whole.out is None else Attended(whole.out.to(value.dtype), whole.lse)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        return self._base.exact_lse(rows, bias, self._profile.score)


class ExponentialKernel(_RadialKernel):
    r"""K_ij = exp(−‖x_i − x_j‖ / σ), symmetric and positive definite; the Matérn kernel of ν = ½.

    Args:
        points: Positions x of shape (*batch, N, d), a tensor or an array.
        sigma: The length σ > 0: a number, or H numbers, which give a head axis before N.
        method: "exact" computes all pairs; "gaussians" a sum of some thirty Gaussian kernels with positive weights,
            each by its own cheapest method. "auto" takes the former for few pairs.
        tol: The largest error of lse that is acceptable; see `error`.
        backend: Which attention backend; see `qattn.backends()`.

    Example:
        >>> ExponentialKernel(torch.randn(100, 3), sigma=0.5)
        ExponentialKernel((100, 3), sigma=0.5, method='exact')
    """

    def __init__(
        self, points: Any, sigma: Any, *, method: str = "auto", tol: float = 1e-3, backend: str = "auto"
    ) -> None:
        super().__init__(points, sigma, Matern(0.5), method, tol, backend)

    @property
    def _parameters(self) -> dict[str, float]:
        return {}


class MaternKernel(_RadialKernel):
    r"""K_ij = 2^{1−ν} a^ν K_ν(a) / Γ(ν) with a = √(2ν) ‖x_i − x_j‖ / σ, symmetric and positive definite.

    Args:
        points: Positions x of shape (*batch, N, d), a tensor or an array.
        sigma: The length σ > 0: a number, or H numbers, which give a head axis before N.
        nu: The smoothness ν > 0: ½ is the exponential kernel, ∞ the Gaussian one. Only ½, 3/2, … 19/2 can be "exact".
        method: As of `ExponentialKernel`.
        tol: The largest error of lse that is acceptable; see `error`.
        backend: Which attention backend; see `qattn.backends()`.

    Example:
        >>> MaternKernel(torch.randn(100, 3), sigma=0.5, nu=1.5)
        MaternKernel((100, 3), sigma=0.5, nu=1.5, method='exact')
    """

    def __init__(
        self, points: Any, sigma: Any, nu: float, *, method: str = "auto", tol: float = 1e-3, backend: str = "auto"
    ) -> None:
        _checks.positive("`nu`", nu)
        if nu > _MOST_NU:
            raise ValueError(
                f"`nu` should be at most {_MOST_NU}; got {nu}. Take a `GaussianKernel`, which is the limit."
            )
        super().__init__(points, sigma, Matern(float(nu)), method, tol, backend)


class RationalQuadraticKernel(_RadialKernel):
    r"""K_ij = (1 + ‖x_i − x_j‖² / 2ασ²)^{−α}, symmetric and positive definite, with heavy tails.

    Args:
        points: Positions x of shape (*batch, N, d), a tensor or an array.
        sigma: The length σ > 0: a number, or H numbers, which give a head axis before N.
        alpha: How fast it falls off, α > 0; ∞ is the Gaussian kernel.
        method: As of `ExponentialKernel`.
        tol: The largest error of lse that is acceptable; see `error`.
        backend: Which attention backend; see `qattn.backends()`.

    Example:
        >>> RationalQuadraticKernel(torch.randn(100, 3), sigma=0.5, alpha=1)
        RationalQuadraticKernel((100, 3), sigma=0.5, alpha=1, method='exact')
    """

    def __init__(
        self, points: Any, sigma: Any, alpha: float, *, method: str = "auto", tol: float = 1e-3, backend: str = "auto"
    ) -> None:
        _checks.positive("`alpha`", alpha)
        super().__init__(points, sigma, RationalQuadratic(float(alpha)), method, tol, backend)

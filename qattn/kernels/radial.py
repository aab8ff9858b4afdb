r"""Radial kernels K_ij = k(‖x_i − x_j‖ / σ) that are mixtures of Gaussians: exponential, Matérn, rational quadratic.

The method "gaussians" computes Σ_n w_n exp(−‖x_i − x_j‖² / 2σ²s_n²) with w_n > 0, which is positive definite by
construction: a sum of Gaussian kernels, each with its own method and backend. The method "exact" computes all pairs
with the score log k.
"""

import math
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import Index
from qattn._types import ArrayLike
from qattn.attended import Attended, merge
from qattn.attention.api import BackendName
from qattn.attention.batched import attend_batched
from qattn.attention.dispatch import Dispatch
from qattn.kernels.base import PointKernel
from qattn.kernels.gaussian.kernel import GaussianKernel, describe_sigma
from qattn.kernels.gaussian.prepared import with_heads
from qattn.kernels.profiles import Matern, Profile, RationalQuadratic

__all__ = ["ExponentialKernel", "MaternKernel", "RationalQuadraticKernel"]

RadialMethod = Literal["auto", "exact", "gaussians"]

_FEW_PAIRS = 2**22  # up to this many pairs, "auto" is "exact"
_MAX_NU = 100  # beyond it Bessel functions overflow


class _RadialKernel(PointKernel):
    """The kernel of a profile. Its base, the Gaussian kernel of bandwidth σ, holds the points and makes the terms."""

    def __init__(
        self,
        points: ArrayLike,
        sigma: ArrayLike,
        profile: Profile,
        method: RadialMethod,
        tol: float,
        backend: BackendName,
    ) -> None:
        _checks.one_of("method", method, ("auto", "exact", "gaussians"))
        _checks.positive("`tol`", tol)
        if method == "exact" and not profile.is_elementary:
            raise ValueError(f'`method="exact"` needs a closed form, which {profile} lacks. Use `method="gaussians"`.')
        # Half of the error is for each Gaussian kernel, the other half for the sum.
        self._base = GaussianKernel(points, sigma, tol=0.5 * tol, backend=backend)
        self._profile, self._method, self._tol, self._backend = profile, method, tol, backend

    def _of(self, base: GaussianKernel) -> "_RadialKernel":
        """Return the same kernel with another base."""
        kernel = self._with(_base=base)
        kernel.__dict__.pop("_terms", None)
        return kernel

    def __repr__(self) -> str:
        bandwidth = describe_sigma(self.sigma)
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
        """Positions x, shape (*batch, N, d)."""
        return self._base.points

    @property
    def sigma(self) -> Tensor:
        """Length scale σ, a scalar tensor or one of shape (H,)."""
        return self._base.sigma

    @property
    def method(self) -> Literal["exact", "gaussians"]:
        """The method in use, "exact" or "gaussians"."""
        if self._method != "auto":
            return self._method
        return "exact" if self._profile.is_elementary and self.shape.numel() <= _FEW_PAIRS else "gaussians"

    @cached_property
    def _terms(self) -> list[tuple[Tensor, Tensor, GaussianKernel]]:
        """Bandwidths in units of σ, log weights from the largest to the smallest, and prepared Gaussian kernels.

        They are made once, from detached tensors: `attend` replaces them by tensors that may require gradients.
        """
        # A power of two, so that moving points rarely change the sum.
        reach = 2.0 ** math.ceil(math.log2(max(1.0, self._base.diameter() / float(self.sigma.detach().amin()))))
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

    def indexed(self, index: Index) -> "_RadialKernel":
        return self._of(self._base.indexed(index))

    def at(self, points: ArrayLike) -> "_RadialKernel":
        return self._of(self._base.at(points))

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        points, sigma, *targets = self.tensors
        if self.method == "exact":
            key = with_heads(points.to(self.dtype), sigma)
            query = with_heads(targets[0].to(self.dtype), sigma) if targets else key
            return attend_batched(
                Dispatch(self._backend),
                query,
                key,
                value,
                bias,
                sigma=sigma,
                score=self._profile.score,
                tol=self._tol,
                all_rows=all_rows,
            )
        # Values of 16 bits are averaged in the dtype of lse, and rounded once.
        values = None if value is None else value.to(torch.promote_types(value.dtype, self.dtype))
        # A term adds at most w Σ e^b to a row. The largest come first, so that negligible ones can be skipped.
        total = torch.logsumexp(bias.detach(), dim=-1, keepdim=True) - math.log(0.1 * self._tol / len(self._terms))
        merged: Attended | None = None
        for s, w, term in self._terms:
            if merged is None or (w + total > merged.lse).any():
                out, lse = term.replace(points, s * sigma, *targets).attend(bias, values, all_rows=all_rows)
                part = Attended(out, lse + w)
                merged = part if merged is None else merge(merged, part)
        assert merged is not None
        return merged if value is None or merged.out is None else Attended(merged.out.to(value.dtype), merged.lse)

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        return self._base.exact_lse(rows, bias, self._profile.score)


class ExponentialKernel(_RadialKernel):
    r"""K_ij = exp(−‖x_i − x_j‖ / σ), symmetric and positive definite; the Matérn kernel with ν = ½.

    Args:
        points: Positions x of shape (*batch, N, d).
        sigma: Length scale σ > 0: a number, or H numbers, which give a head axis before N.
        method: "exact" computes all pairs; "gaussians" computes a sum of about thirty Gaussian kernels with positive
            weights, each with its cheapest method. "auto" is "exact" for few pairs.
        tol: Largest acceptable error of lse; see `error`.
        backend: Attention backend; see `qattn.backends()`.

    Examples:
        >>> ExponentialKernel(torch.randn(100, 3), sigma=0.5)
        ExponentialKernel((100, 3), sigma=0.5, method='exact')
    """

    def __init__(
        self,
        points: ArrayLike,
        sigma: ArrayLike,
        *,
        method: RadialMethod = "auto",
        tol: float = 1e-3,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__(points, sigma, Matern(0.5), method, tol, backend)

    @property
    def _parameters(self) -> dict[str, float]:
        return {}


class MaternKernel(_RadialKernel):
    r"""K_ij = 2^{1−ν} a^ν K_ν(a) / Γ(ν) with a = √(2ν) ‖x_i − x_j‖ / σ, symmetric and positive definite.

    Args:
        points: Positions x of shape (*batch, N, d).
        sigma: Length scale σ > 0: a number, or H numbers, which give a head axis before N.
        nu: Smoothness 0 < ν ≤ 100: ½ gives the exponential kernel, the limit ∞ the Gaussian one. Only ½, 3/2, … 19/2
            can be "exact".
        method: "auto", "exact" or "gaussians"; see `ExponentialKernel`.
        tol: Largest acceptable error of lse; see `error`.
        backend: Attention backend; see `qattn.backends()`.

    Examples:
        >>> MaternKernel(torch.randn(100, 3), sigma=0.5, nu=1.5)
        MaternKernel((100, 3), sigma=0.5, nu=1.5, method='exact')
    """

    def __init__(
        self,
        points: ArrayLike,
        sigma: ArrayLike,
        nu: float,
        *,
        method: RadialMethod = "auto",
        tol: float = 1e-3,
        backend: BackendName = "auto",
    ) -> None:
        _checks.positive("`nu`", nu)
        if nu > _MAX_NU:
            raise ValueError(f"`nu` should be at most {_MAX_NU}; got {nu}. Use `GaussianKernel`, the limit ν → ∞.")
        super().__init__(points, sigma, Matern(float(nu)), method, tol, backend)


class RationalQuadraticKernel(_RadialKernel):
    r"""K_ij = (1 + ‖x_i − x_j‖² / 2ασ²)^{−α}, symmetric and positive definite, with heavy tails.

    Args:
        points: Positions x of shape (*batch, N, d).
        sigma: Length scale σ > 0: a number, or H numbers, which give a head axis before N.
        alpha: Exponent α > 0 of the decay; the limit ∞ gives the Gaussian kernel.
        method: "auto", "exact" or "gaussians"; see `ExponentialKernel`.
        tol: Largest acceptable error of lse; see `error`.
        backend: Attention backend; see `qattn.backends()`.

    Examples:
        >>> RationalQuadraticKernel(torch.randn(100, 3), sigma=0.5, alpha=1)
        RationalQuadraticKernel((100, 3), sigma=0.5, alpha=1, method='exact')
    """

    def __init__(
        self,
        points: ArrayLike,
        sigma: ArrayLike,
        alpha: float,
        *,
        method: RadialMethod = "auto",
        tol: float = 1e-3,
        backend: BackendName = "auto",
    ) -> None:
        _checks.positive("`alpha`", alpha)
        super().__init__(points, sigma, RationalQuadratic(float(alpha)), method, tol, backend)

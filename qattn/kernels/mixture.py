r"""The kernel of a Gaussian mixture: overlaps of its components, smoothed by σ.

With g a Gaussian of variance σ²/2, ∫ (N(x_i, Σ_i) ⋆ g)(N(x_j, Σ_j) ⋆ g) is, up to a constant,
det(C_ij)^{−½} exp(−½ δᵀ C_ij⁻¹ δ) with δ = x_i − x_j and C_ij = σ²I + Σ_i + Σ_j: a Gram matrix, and so positive
semidefinite. Without the determinant, which is not of the form a_i a_j and so is not normalised out, it is not.
"""

import math
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import broadcast_shapes
from qattn._compiled import why_not_compiled
from qattn.attended import Attended
from qattn.attention import attend
from qattn.attention.dispatch import select
from qattn.kernels.base import PointKernel
from qattn.kernels.overlap import DIMENSIONS, NearOverlaps, Overlap
from qattn.kernels.prepared import attend_folded, attend_prepared

__all__ = ["MixtureKernel"]

_LOST = 30.0  # units in the last place that a score loses, times the condition of its covariance
_MOST_PAIRS = 2**32  # that a GPU computes without leaving any out


class MixtureKernel(PointKernel):
    r"""K_ij = √(det σ²I / det C_ij) exp(−½ δᵀ C_ij⁻¹ δ), δ = x_i − x_j, C_ij = σ²I + Σ_i + Σ_j: positive semidefinite.

    With covariances of 0 it is the Gaussian kernel of the means.

    Args:
        means: The means x of shape (*batch, N, d), a tensor or an array.
        covariances: The covariances Σ: (*batch, N) for variances, (*batch, N, d) for diagonal matrices,
            (*batch, N, d, d) for full ones.
        sigma: The bandwidth σ > 0: a number, or H numbers, which give a head axis before N.
        weights: The weights of the components, (*batch, N), the default masses; equal by default.
        form: "overlap", or "equation 5" for the kernel as the paper prints it: without the determinant, and indefinite.
        method: "exact" computes all pairs; "tiles" those that are near enough to matter, up to three dimensions. "auto"
            takes tiles where it can; on a GPU only for more than 65,000 components.
        tol: The largest error of lse that is acceptable; see `error`.
        backend: Which attention backend "exact" uses: one that takes a score, "reference" or "flex".

    Example:
        >>> MixtureKernel(torch.randn(500, 3), 0.01 * torch.rand(500, 3), sigma=0.1)
        MixtureKernel(500 diagonal Gaussians in 3 dimensions, sigma=0.1, method='tiles')
    """

    def __init__(
        self,
        means: Any,
        covariances: Any,
        sigma: Any,
        weights: Any = None,
        *,
        form: str = "overlap",
        method: str = "auto",
        tol: float = 1e-3,
        backend: str = "auto",
    ) -> None:
        _checks.one_of("form", form, ("overlap", "equation 5"))
        _checks.one_of("method", method, ("auto", "exact", "tiles"))
        _checks.positive("`tol`", tol)
        self._means = _checks.points("means", means)
        self._covariances, kind = _checks.covariances(covariances, self._means)
        self._sigma = _checks.bandwidth(sigma, self._means)
        self._weights = _checks.weights(weights, self._means)
        self._targets: Tensor | None = None  # points at which it is evaluated instead of at its own components
        self._overlap = Overlap(self._means.shape[-1], kind, form == "overlap")
        self._method, self._tol, self._backend = method, tol, backend
        if method == "tiles" and self._overlap.dims > DIMENSIONS:
            raise ValueError(
                f'`method="tiles"` takes up to {DIMENSIONS} dimensions, and these means have {self._overlap.dims}.'
            )
        if method == "tiles" and (reason := why_not_compiled()):
            raise ValueError(f'`method="tiles"` cannot be used here: {reason}. Take `method="exact"`.')

    @classmethod
    def from_splats(
        cls, means: Any, log_scales: Any, quaternions: Any, logit_opacities: Any, sigma: Any, **options: Any
    ) -> "MixtureKernel":
        r"""The kernel of 3D Gaussian splats as they are stored: Σ = R diag(e^{2s}) Rᵀ, weights 1 / (1 + e^{−o}).

        Args:
            means: Positions (N, 3).
            log_scales: Logarithms s of the standard deviations along the axes of each splat, (N, 3).
            quaternions: Rotations (N, 4), w first, of any length but 0.
            logit_opacities: Logits o of the opacities, (N,) or (N, 1).
            sigma: The bandwidth σ.
            **options: Further arguments of `MixtureKernel`.
        """
        means = _checks.points("means", means)
        scales, turns, logits = _checks.splats(means, log_scales, quaternions, logit_opacities)
        axes = _rotations(turns) * torch.exp(scales)[..., None, :]  # columns are half axes
        return cls(means, axes @ axes.mT, sigma, torch.sigmoid(logits), **options)

    @classmethod
    def from_sklearn(cls, mixture: Any, sigma: Any, **options: Any) -> "MixtureKernel":
        """The kernel of a fitted `sklearn.mixture.GaussianMixture`, of any `covariance_type`.

        Args:
            mixture: The fitted mixture.
            sigma: The bandwidth σ.
            **options: Further arguments of `MixtureKernel`.
        """
        if not hasattr(mixture, "covariances_"):
            raise ValueError("`mixture` should be fitted. Call `mixture.fit(points)` first.")
        covariances = mixture.covariances_
        if mixture.covariance_type == "tied":
            covariances = np.broadcast_to(covariances, (len(mixture.means_), *covariances.shape))
        return cls(mixture.means_, covariances, sigma, mixture.weights_, **options)

    def __repr__(self) -> str:
        *batch, N, d = self._means.shape
        count = " × ".join(map(str, [*batch, N]))
        sigma = f"{float(self._sigma):g}" if self._sigma.ndim == 0 else f"{len(self._sigma)} bandwidths"
        form = "" if self._overlap.has_determinant else ", form='equation 5'"
        kind = f"{self._overlap.kind} Gaussians in {d} dimension{'s' * (d > 1)}"
        return f"MixtureKernel({count} {kind}, sigma={sigma}{form}, method={self.method!r})"

    @property
    def means(self) -> Tensor:
        """The means x, shape (*batch, N, d)."""
        return self._means

    @property
    def sigma(self) -> Tensor:
        """The bandwidth σ, a tensor without axes or of shape (H,)."""
        return self._sigma

    def effective_sigma(self, dims: int) -> float:
        """√(σ² + (2/d) Σ m_i tr Σ_i): the bandwidth of Q as a diffusion, d = 2 for surfaces and 3 for volumes.

        As the paper has it (appendix G), for `qattn.laplacian_eigenvalues`; of one mixture with one bandwidth.
        """
        covariances, d = self._covariances.detach(), self._overlap.dims
        trace = {
            "isotropic": lambda: d * covariances,
            "diagonal": lambda: covariances.sum(-1),
            "full": lambda: covariances.diagonal(dim1=-2, dim2=-1).sum(-1),
        }[self._overlap.kind]()
        return math.sqrt(
            float(self._sigma) ** 2 + 2 / _checks.integer("dims", dims, 1) * float((self.mass * trace).sum())
        )

    @property
    def mass(self) -> Tensor:
        """The weights of the components, of sum 1."""
        mass = self._weights / self._weights.sum(-1, keepdim=True)
        return mass[..., None, :] if self._sigma.ndim and mass.ndim > 1 else mass

    @property
    def method(self) -> str:
        """How it is computed, "exact" or "tiles"."""
        if self._method != "auto":
            return self._method
        is_large = self.device.type == "cpu" or self.shape.numel() > _MOST_PAIRS
        can_tile = self._overlap.dims <= DIMENSIONS and why_not_compiled() is None
        return "tiles" if is_large and can_tile else "exact"

    @property
    def shape(self) -> torch.Size:
        targets = self._means if self._targets is None else self._targets
        batch = broadcast_shapes(targets.shape[:-2], self._means.shape[:-2])
        return torch.Size((*batch, *self._sigma.shape, targets.shape[-2], self._means.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = self._means, self._covariances, self._sigma, self._weights
        return own if self._targets is None else (*own, self._targets)

    def replace(self, *tensors: Tensor) -> "MixtureKernel":
        kernel = object.__new__(MixtureKernel)
        kernel.__dict__.update(self.__dict__)
        kernel._means, kernel._covariances, kernel._sigma, kernel._weights = tensors[:4]
        kernel._targets = None if self._targets is None else tensors[4]
        return kernel

    def at(self, points: Any) -> "MixtureKernel":
        """The kernel between points, which are components of covariance 0, and its own components."""
        targets = _checks.points("points", points).to(self._means)
        _checks.same_dimension(targets, self._means)
        kernel = self.replace(*self.tensors[:4])
        kernel._targets = targets
        kernel.__dict__.pop("_engine", None)
        return kernel

    @cached_property
    def _is_stiff(self) -> bool:
        """Whether covariances are so long for σ that scores in the dtype of the means would lose more than `tol`.

        C⁻¹ has the condition number κ ≤ 1 + 2 tr Σ / σ², and elimination loses about κ units in the last place.
        """
        if self._overlap.kind != "full" or self._covariances.numel() == 0:
            return False
        trace = self._covariances.detach().double().diagonal(dim1=-2, dim2=-1).sum(-1).amax()
        condition = 1 + 2 * float(trace) / float(self._sigma.detach().amin()) ** 2
        return _LOST * torch.finfo(self.dtype).eps * condition > self._tol

    @cached_property
    def _lacking(self) -> Tensor:
        """What the variances of each component lack to be above −σ²/4 in all directions, (*batch, N).

        Rounding takes them below 0 by as much as a part in a million of the largest. Then C ≥ σ²/2 all the same.
        """
        covariances = self._covariances.detach().double()
        least = torch.linalg.eigvalsh(0.5 * (covariances + covariances.mT))[..., 0]
        return (-0.25 * self._sigma.detach().double().amin() ** 2 - least).clamp(min=0)

    def _embedded(self, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries (*batch, N, D) and keys (*batch, M, D); one object for a mixture and itself.

        Long and thin covariances need the digits of float64, which the compiled loop takes in any case. Means are about
        that of the components that a bias leaves in: others may be far away.
        """
        in_double = self._is_stiff or (self.method == "tiles" and self.device.type == "cpu")
        dtype = torch.float64 if in_double else self.dtype
        means, covariances, sigma = (x.to(dtype) for x in (self._means, self._covariances, self._sigma))
        if self._is_stiff:
            identity = torch.eye(self._overlap.dims, dtype=dtype, device=covariances.device)
            covariances = covariances + self._lacking.to(covariances)[..., None, None] * identity
        is_present = means.new_ones(means.shape[:-1], dtype=torch.bool)
        if bias is not None:
            is_present = (bias > -torch.inf).any(-2) if sigma.ndim else bias > -torch.inf
        origin = self.ranks.mean(torch.where(is_present, 0.0, -torch.inf).to(dtype), means.detach())
        key = self._overlap.embed(means - origin, covariances, sigma)
        if self._targets is None:
            return key, key
        none = covariances.new_zeros(*self._targets.shape[:-1], *covariances.shape[self._means.ndim - 1 :])
        return self._overlap.embed(self._targets.to(dtype) - origin, none, sigma), key

    @cached_property
    def _engine(self) -> NearOverlaps:
        query, key = self._embedded()
        batch = self.shape[:-2]

        def flat(x: Tensor) -> Tensor:
            return x.expand(*batch, -1, -1).reshape(batch.numel(), *x.shape[-2:])

        keys = flat(key)
        return NearOverlaps(self._overlap, keys if query is key else flat(query), keys)

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        query, key = self._embedded(bias.detach())
        if self.method == "tiles":
            out, lse = attend_prepared(self._engine, query, key, value, bias, self._tol, self._overlap)
        else:
            chosen = partial(select, name=self._backend)
            out, lse = attend_folded(chosen, query, key, value, bias, self._tol, self._overlap)
        return Attended(out, lse.to(torch.promote_types(self.dtype, bias.dtype)))

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        exact = self.replace(*(tensor.detach().cpu().double() for tensor in self.tensors))
        query, key = exact._embedded()
        bias = bias.detach().cpu().double()
        return attend(query[..., rows, :], key, bias=bias, score=self._overlap, backend="reference").lse


def _rotations(quaternions: Tensor) -> Tensor:
    """Rotation matrices (N, 3, 3) of quaternions (N, 4), w first."""
    w, x, y, z = torch.nn.functional.normalize(quaternions, dim=-1).unbind(-1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)

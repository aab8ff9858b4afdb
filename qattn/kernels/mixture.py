r"""The kernel of a Gaussian mixture: overlaps of its components, smoothed by σ.

With g a Gaussian of variance σ²/2, ∫ (N(x_i, Σ_i) ⋆ g)(N(x_j, Σ_j) ⋆ g) is, up to a constant,
det(C_ij)^{−½} exp(−½ δᵀ C_ij⁻¹ δ) with δ = x_i − x_j and C_ij = σ²I + Σ_i + Σ_j: a Gram matrix, and so positive
semidefinite. Without the determinant it is not. Normalization does not remove the determinant, which is not of the form
a_i a_j.
"""

import math
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import Index, broadcast_shapes, own_index
from qattn._types import ArrayLike
from qattn.attended import Attended
from qattn.attention.api import BackendName
from qattn.attention.batched import attend_batched
from qattn.attention.dispatch import Dispatch
from qattn.attention.engine import Engine
from qattn.kernels.base import PointKernel
from qattn.kernels.gaussian.kernel import describe_sigma
from qattn.kernels.mixture_overlap import DIMENSIONS, Kind, NearOverlaps, Overlap
from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.mixture import LOOP
from qattn.tiles.when_to_compile import charge, is_due

__all__ = ["MixtureKernel", "checked_covariances"]

_LOST = 30.0  # rounding error of a score in units in the last place, per condition number of its covariance
_MAX_PAIRS = 2**32  # up to this many pairs, "auto" computes all of them on a GPU
_PAIR = 5e-8  # seconds on one core per pair of components, by torch, if most weights underflow; else a quarter
_PASSES_OF_GRADIENTS = 6.0  # passes in the time of one that is differentiated, about


class MixtureKernel(PointKernel):
    r"""K_ij = √(det σ²I / det C_ij) exp(−½ δᵀ C_ij⁻¹ δ), δ = x_i − x_j, C_ij = σ²I + Σ_i + Σ_j: positive semidefinite.

    With covariances of 0 it is the Gaussian kernel of the means.

    Args:
        means: Means x of shape (*batch, N, d).
        covariances: Covariances Σ: (*batch, N) for variances, (*batch, N, d) for diagonal matrices, (*batch, N, d, d)
            for full ones.
        sigma: Bandwidth σ > 0: a number, or H numbers, which give a head axis before N.
        weights: Weights of the components, (*batch, N), which are the default masses; equal by default.
        form: "overlap", or "equation 5" for the kernel as printed in the paper: without the determinant, and
            indefinite.
        method: "exact" computes all pairs; "tiles" computes pairs that are near enough to matter, up to three
            dimensions. "auto" is "tiles" if possible, on a GPU only for more than 65,000 components, and on a CPU where
            nothing is compiled only once compiling pays.
        tol: Largest acceptable error of lse; see `error`.
        backend: Attention backend of "exact", one that takes a score: "reference" or "flex".

    Examples:
        >>> MixtureKernel(torch.randn(500, 3), 0.01 * torch.rand(500, 3), sigma=0.1)
        MixtureKernel(500 diagonal Gaussians in 3 dimensions, sigma=0.1, method='tiles')
    """

    def __init__(
        self,
        means: ArrayLike,
        covariances: ArrayLike,
        sigma: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        form: Literal["overlap", "equation 5"] = "overlap",
        method: Literal["auto", "exact", "tiles"] = "auto",
        tol: float = 1e-3,
        backend: BackendName = "auto",
    ) -> None:
        _checks.one_of("form", form, ("overlap", "equation 5"))
        _checks.one_of("method", method, ("auto", "exact", "tiles"))
        _checks.positive("`tol`", tol)
        self._means = _checks.points("means", means)
        self._covariances, kind = checked_covariances(covariances, self._means)
        self._sigma = _checks.bandwidth(sigma, self._means)
        self._weights = _checked_weights(weights, self._means)
        self._targets: Tensor | None = None  # points at which it is evaluated, instead of its own components
        self._overlap = Overlap(self._means.shape[-1], kind, form == "overlap")
        self._method, self._tol, self._backend = method, tol, backend
        if method == "tiles" and self._overlap.dims > DIMENSIONS:
            raise ValueError(
                f'`method="tiles"` takes up to {DIMENSIONS} dimensions, but these means have {self._overlap.dims}. '
                'Use `method="exact"`.'
            )
        if method == "tiles" and (reason := why_not_compiled()):
            raise ValueError(f'`method="tiles"` cannot be used here: {reason}. Use `method="exact"`.')

    @classmethod
    def from_splats(
        cls,
        means: ArrayLike,
        log_scales: ArrayLike,
        quaternions: ArrayLike,
        logit_opacities: ArrayLike,
        sigma: ArrayLike,
        **options: Any,
    ) -> "MixtureKernel":
        r"""Make the kernel of stored 3D Gaussian splats: Σ = R diag(e^{2s}) Rᵀ, weights 1 / (1 + e^{−o}).

        Args:
            means: Positions (N, 3).
            log_scales: Logarithms s of the standard deviations along the axes of each splat, (N, 3).
            quaternions: Rotations (N, 4), w first, with any norm but 0.
            logit_opacities: Logits o of the opacities, (N,) or (N, 1).
            sigma: Bandwidth σ.
            **options: Further arguments of `MixtureKernel`.
        """
        centers = _checks.points("means", means)
        scales, rotations, logits = _checked_splats(centers, log_scales, quaternions, logit_opacities)
        axes = _rotations(rotations) * torch.exp(scales)[..., None, :]  # columns are half axes
        return cls(centers, axes @ axes.mT, sigma, torch.sigmoid(logits), **options)

    @classmethod
    def from_sklearn(cls, mixture: Any, sigma: ArrayLike, **options: Any) -> "MixtureKernel":
        """Make the kernel of a fitted `sklearn.mixture.GaussianMixture` of any `covariance_type`.

        Args:
            mixture: Fitted mixture.
            sigma: Bandwidth σ.
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
        form = "" if self._overlap.has_determinant else ", form='equation 5'"
        kind = f"{self._overlap.kind} Gaussians in {d} dimension{'s' * (d > 1)}"
        return f"MixtureKernel({count} {kind}, sigma={describe_sigma(self._sigma)}{form}, method={self.method!r})"

    @property
    def means(self) -> Tensor:
        """Means x, shape (*batch, N, d)."""
        return self._means

    @property
    def sigma(self) -> Tensor:
        """Bandwidth σ, a scalar tensor or one of shape (H,)."""
        return self._sigma

    def effective_sigma(self, dims: int) -> float:
        """Compute √(σ² + (2/d) Σ m_i tr Σ_i), the bandwidth of Q as a diffusion, for one mixture and one bandwidth.

        It is the σ of `qattn.laplacian_eigenvalues` (appendix G of the paper).

        Args:
            dims: Dimension d of the shape: 2 for surfaces, 3 for volumes.
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
        """Weights of the components, with sum 1."""
        mass = self._weights / self._weights.sum(-1, keepdim=True)
        return mass[..., None, :] if self._sigma.ndim and mass.ndim > 1 else mass

    @property
    def method(self) -> Literal["exact", "tiles"]:
        """The method in use, "exact" or "tiles"."""
        if self._method != "auto":
            return self._method
        if self._overlap.dims > DIMENSIONS or why_not_compiled():
            return "exact"
        is_cpu = self.device.type == "cpu"
        pays = is_due(LOOP, self._seconds_by_torch) if is_cpu else self.shape.numel() > _MAX_PAIRS
        return "tiles" if pays else "exact"

    @property
    def _seconds_by_torch(self) -> float:
        """Estimate how long a pass over all pairs takes on a CPU."""
        needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
        passes = _PASSES_OF_GRADIENTS if needs_gradients else 1.0
        return _PAIR * passes * self.shape.numel() / torch.get_num_threads()

    @property
    def shape(self) -> torch.Size:
        targets = self._means if self._targets is None else self._targets
        batch = broadcast_shapes(targets.shape[:-2], self._means.shape[:-2])
        return torch.Size((*batch, *self._sigma.shape, targets.shape[-2], self._means.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        tensors = self._means, self._covariances, self._sigma, self._weights
        return tensors if self._targets is None else (*tensors, self._targets)

    def replace(self, *tensors: Tensor) -> "MixtureKernel":
        means, covariances, sigma, weights = tensors[:4]
        targets = None if self._targets is None else tensors[4]
        return self._with(_means=means, _covariances=covariances, _sigma=sigma, _weights=weights, _targets=targets)

    def indexed(self, index: Index) -> "MixtureKernel":
        of_means, of_sigma = (index[:-1], index[-1:]) if self._sigma.ndim else (index, ())
        own = own_index(of_means, self._means.shape[:-2])
        weights = self._weights[own_index(of_means, self._weights.shape[:-1])]
        targets = None
        if self._targets is not None:
            targets = self._targets[own_index(of_means, self._targets.shape[:-2])]
        means, covariances, sigma = self._means[own], self._covariances[own], self._sigma[of_sigma]
        kernel = self._with(_means=means, _covariances=covariances, _sigma=sigma, _weights=weights, _targets=targets)
        for name in ("_engine", "_is_stiff", "_lacking"):
            kernel.__dict__.pop(name, None)
        return kernel

    def at(self, points: ArrayLike) -> "MixtureKernel":
        """Return the kernel between points, which are components of covariance 0, and its own components."""
        targets = _checks.points("points", points).to(self._means)
        if targets.shape[-1] != self._means.shape[-1]:
            raise ValueError(
                f"`points` should have {self._means.shape[-1]} coordinates, as the means have; "
                f"got shape {tuple(targets.shape)}."
            )
        kernel = self._with(_targets=targets)
        kernel.__dict__.pop("_engine", None)
        return kernel

    @cached_property
    def _is_stiff(self) -> bool:
        """True if scores in the dtype of the means would have errors above `tol`, because covariances are far above σ².

        The condition number of C is κ ≤ 1 + 2 tr Σ / σ², and elimination loses about κ units in the last place.
        """
        if self._overlap.kind != "full" or self._covariances.numel() == 0:
            return False
        trace = self._covariances.detach().double().diagonal(dim1=-2, dim2=-1).sum(-1).amax()
        condition = 1 + 2 * float(trace) / float(self._sigma.detach().amin()) ** 2
        return _LOST * torch.finfo(self.dtype).eps * condition > self._tol

    @cached_property
    def _lacking(self) -> Tensor:
        """Increase of the variances of each component to at least −σ²/4 in all directions, (*batch, N).

        By rounding, variances may be negative, by up to a millionth of the largest. With the increase C ≥ σ²/2.
        """
        covariances = self._covariances.detach().double()
        least = torch.linalg.eigvalsh(0.5 * (covariances + covariances.mT))[..., 0]
        return (-0.25 * self._sigma.detach().double().amin() ** 2 - least).clamp(min=0)

    def _embedded(self, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed queries (*batch, N, D) and keys (*batch, M, D); one object if they are the same.

        Long and thin covariances need float64, which the compiled loops always use. The origin is the mean of the
        components that the bias does not leave out, as others may be far away.
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
        zeros = covariances.new_zeros(*self._targets.shape[:-1], *covariances.shape[self._means.ndim - 1 :])
        return self._overlap.embed(self._targets.to(dtype) - origin, zeros, sigma), key

    @cached_property
    def _engine(self) -> NearOverlaps:
        query, key = self._embedded()
        batch = self.shape[:-2]

        def flat(x: Tensor) -> Tensor:
            return x.expand(*batch, -1, -1).reshape(batch.numel(), *x.shape[-2:])

        keys = flat(key)
        return NearOverlaps(self._overlap, keys if query is key else flat(query), keys)

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        query, key = self._embedded(bias.detach())
        engine: Engine = Dispatch(self._backend)
        if self.method == "tiles":
            batch = self.shape[:-2]
            engine, keys = self._engine, key.expand(*batch, -1, -1)
            query, key = keys if query is key else query.expand(*batch, -1, -1), keys
        elif self._method == "auto" and self.device.type == "cpu" and self._overlap.dims <= DIMENSIONS:
            charge(LOOP, self._seconds_by_torch)
        out, lse = attend_batched(
            engine, query, key, value, bias, score=self._overlap, tol=self._tol, all_rows=all_rows
        )
        return Attended(out, lse.to(torch.promote_types(self.dtype, bias.dtype)))

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        exact = self.replace(*(tensor.detach().cpu().double() for tensor in self.tensors))
        query, key = exact._embedded()
        bias = bias.detach().cpu().double()
        reference = Dispatch("reference")
        return attend_batched(reference, query[..., rows, :], key, None, bias, score=self._overlap, tol=1.0).lse


def _rotations(quaternions: Tensor) -> Tensor:
    """Compute the rotation matrices (N, 3, 3) of quaternions (N, 4), w first."""
    w, x, y, z = torch.nn.functional.normalize(quaternions, dim=-1).unbind(-1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def checked_covariances(numbers: ArrayLike, means: Tensor) -> tuple[Tensor, Kind]:
    """Check the covariances of means (*batch, N, d); return a tensor and their kind."""
    tensor = _checks.floating("covariances", numbers).to(means)
    *batch, d = means.shape
    shapes: dict[Kind, tuple[int, ...]] = {"isotropic": (*batch,), "diagonal": (*batch, d), "full": (*batch, d, d)}
    kind = next((kind for kind, shape in shapes.items() if tensor.shape == shape), None)
    if kind is None:
        raise ValueError(
            f"`covariances` should have shape {shapes['isotropic']} for variances, {shapes['diagonal']} for diagonal "
            f"matrices or {shapes['full']} for full ones, with means {_checks.shape_of(means)}; "
            f"got {_checks.shape_of(tensor)}."
        )
    _checks.finite("covariances", tensor, "Drop those components.")
    variances = tensor.detach()
    if kind == "full":
        gap, size = (variances - variances.mT).abs().amax(), variances.abs().amax()
        if gap > 1e-5 * size:
            raise ValueError(
                f"`covariances` should be symmetric; entries differ from their mirror image by up to {float(gap):.3g}. "
                "Use `(covariances + covariances.mT) / 2`."
            )
        variances = torch.linalg.eigvalsh(variances.double())
    is_negative = variances < -1e-6 * variances.abs().amax(-1, keepdim=True)
    if is_negative.any() or (kind != "full" and (variances < 0).any()):
        raise ValueError(
            "`covariances` should have no negative variance in any direction; some do. "
            "Pass variances, not their logarithms, nor precisions of the wrong sign."
        )
    return tensor, kind


def _checked_weights(numbers: ArrayLike | None, means: Tensor) -> Tensor:
    """Convert the weights of components with means (*batch, N, d) to a tensor (*batch, N) ≥ 0; equal by default."""
    dtype = torch.promote_types(means.dtype, torch.float32)
    if numbers is None:
        return torch.ones(means.shape[-2], dtype=dtype, device=means.device)
    tensor = _checks.floating("weights", numbers).to(means.device, dtype)
    if tensor.shape not in (means.shape[:-1], means.shape[-2:-1]):
        raise ValueError(
            f"`weights` should have shape {tuple(means.shape[:-1])}, one per component; got {_checks.shape_of(tensor)}."
        )
    _checks.finite("weights", tensor, "Components without weight get 0.")
    if (tensor < 0).any() or (tensor.sum(-1) == 0).any():
        raise ValueError("`weights` should be 0 or more, with a positive sum. For logits, use `torch.sigmoid`.")
    return tensor


def _checked_splats(
    means: Tensor, log_scales: ArrayLike, quaternions: ArrayLike, logit_opacities: ArrayLike
) -> tuple[Tensor, Tensor, Tensor]:
    """Check log scales (N, 3), quaternions (N, 4) and logits (N,) of splats at means (N, 3)."""
    N = means.shape[0]
    if means.shape != (N, 3):
        raise ValueError(f"`means` of splats should have shape (N, 3); got {_checks.shape_of(means)}.")
    arguments: dict[str, tuple[ArrayLike, tuple[int, ...]]] = {
        "log_scales": (log_scales, (N, 3)),
        "quaternions": (quaternions, (N, 4)),
        "logit_opacities": (logit_opacities, (N,)),
    }
    tensors = []
    for name, (numbers, shape) in arguments.items():
        tensor = _checks.floating(name, numbers).to(means)
        if name == "logit_opacities" and tensor.shape == (N, 1):
            tensor = tensor[:, 0]
        if tensor.shape != shape:
            raise ValueError(f"`{name}` of {N} splats should have shape {shape}; got {_checks.shape_of(tensor)}.")
        _checks.finite(name, tensor, "Drop those splats.")
        tensors.append(tensor)
    if (tensors[1] == 0).all(-1).any():
        raise ValueError("`quaternions` should not be 0; some are. The identity is (1, 0, 0, 0).")
    return tensors[0], tensors[1], tensors[2]

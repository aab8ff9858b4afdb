r"""Diffusion maps as a scikit-learn estimator: ψ_t(x) = (λ_1^t φ_1(x), …, λ_n^t φ_n(x)), where Q φ = λ φ.

Eigenvectors extend to functions of all of space, φ(y) = (Qφ)(y) / λ, so ψ_t(y) = Q(λ^{t−1} φ)(y) is one attention, at
the samples of the fit and at new ones. All computations are in float64: 1 − λ is of the order of (σ / size)², and large
clouds have eigenvectors that float32 cannot distinguish from constants.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn.kernels import GaussianKernel
from qattn.mass import density
from qattn.operators.diffusion import diffusion
from qattn.spectra import Spectrum, eigsh

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.neighbors import NearestNeighbors
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "qattn.sklearn needs scikit-learn. Install it with `pip install 'qattn-diffusion[sklearn]'`.", name=error.name
    ) from None

__all__ = ["SinkhornDiffusionMap"]

_NUM_NEIGHBORS, _QUANTILE = 10, 0.9  # twice the bandwidth reaches ten neighbors of nine samples in ten
_TOL = 1e-8  # of the normalization, whose errors mix eigenvectors with constants by their ratio to 1 − λ
_EIGENPAIRS_TOL = 1e-3  # relative to 1 − λ
_EIGENPAIRS_PASSES = 1000  # enough for curves of many samples
_DTYPES = [np.float64, np.float32]  # others are converted to the first


class SinkhornDiffusionMap(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    r"""Diffusion map ψ_t(x) = (λ_1^t φ_1(x), …, λ_n^t φ_n(x)) of the leading eigenpairs of a Sinkhorn diffusion.

    The first pair, λ_0 = 1 with a constant eigenvector, is left out. Eigenvectors are orthonormal for the masses and
    deterministic, up to rotations among those of equal eigenvalues.

    Args:
        n_components: Number n of coordinates, less than the number of samples.
        sigma: Bandwidth σ of the Gaussian kernel. "auto" takes half the distance within which nine samples in ten have
            ten neighbors (or all others, if they are fewer), which scales with the data.
        t: Diffusion time t ≥ 0, in steps of Q; 0 leaves the eigenvectors unscaled.
        density: "uniform" gives all samples the same mass; coordinates then depend on the sampling density.
            "estimated" gives them 1 / Σ_j K_ij, for coordinates of the shape itself.

    Attributes:
        embedding_: Coordinates ψ_t of the samples, shape (n_samples, n_components).
        eigenvalues_: λ_1, …, λ_n in descending order, shape (n_components,).
        sigma_: Bandwidth.
        diffusion_: Operator Q, a `Diffusion`.
        n_features_in_: Number of features of the samples.
        feature_names_in_: Names of the features, if the samples have some.

    Examples:
        >>> angle = torch.arange(100) * 0.02 * torch.pi
        >>> circle = torch.stack([angle.cos(), angle.sin()], dim=1).numpy()
        >>> psi = SinkhornDiffusionMap(n_components=2).fit_transform(circle)
        >>> psi.shape, bool((psi**2).sum(1).std() < 0.01)  # a circle again
        ((100, 2), True)
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        sigma: float | Literal["auto"] = "auto",
        t: float = 1.0,
        density: Literal["uniform", "estimated"] = "uniform",
    ) -> None:
        self.n_components = n_components
        self.sigma = sigma
        self.t = t
        self.density = density

    def fit(self, X: Any, y: object = None) -> "SinkhornDiffusionMap":
        """Compute the eigenpairs of samples (n_samples, n_features); `y` is ignored."""
        X = validate_data(self, X, dtype=_DTYPES, ensure_min_samples=2)
        n = _checks.integer("n_components", self.n_components, 1)
        if n >= len(X):
            raise ValueError(f"`n_components` should be less than the number of samples, {len(X)}; got {n}.")
        _checks.one_of("density", self.density, ("uniform", "estimated"))
        t = _checks.not_negative("t", self.t)
        self.sigma_ = _bandwidth(X, self.sigma)
        kernel = GaussianKernel(X.astype(np.float64), self.sigma_, tol=_TOL)
        q = diffusion(kernel, mass=density(kernel) if self.density == "estimated" else None, tol=_TOL)
        spectrum = eigsh(q, n + 1, tol=_EIGENPAIRS_TOL, max_iter=_EIGENPAIRS_PASSES)
        values = spectrum.values[1:].clamp(min=torch.finfo(torch.float64).eps)  # 0 has no power t − 1 < 0
        self.diffusion_, self._modes = q, values ** (t - 1) * _without_constants(spectrum)
        self.eigenvalues_ = values.numpy()
        self.embedding_ = self._embedded(X)
        return self

    def fit_transform(self, X: Any, y: object = None) -> Any:
        """Fit samples (n_samples, n_features) and return their coordinates, (n_samples, n_components)."""
        return self.fit(X).embedding_

    def transform(self, X: Any) -> Any:
        """Return the coordinates ψ_t, (n_samples, n_components), of any samples (n_samples, n_features)."""
        check_is_fitted(self)
        return self._embedded(validate_data(self, X, dtype=_DTYPES, reset=False))

    def _embedded(self, X: np.ndarray) -> np.ndarray:
        """Return Q(λ^{t−1} φ) at samples, in their dtype."""
        return (self.diffusion_.extend(X) @ self._modes).numpy().astype(X.dtype)

    @property
    def _n_features_out(self) -> int:
        return self._modes.shape[1]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = [dtype.__name__ for dtype in _DTYPES]
        return tags


def _bandwidth(X: np.ndarray, sigma: float | Literal["auto"]) -> float:
    """Return σ, by default half a quantile over the samples of their distances to the tenth neighbor."""
    if not isinstance(sigma, str):
        return float(_checks.one_bandwidth(sigma, torch.float64, torch.device("cpu")))
    _checks.one_of("sigma", sigma, ("auto",))
    k = min(_NUM_NEIGHBORS, len(X) - 1)
    distances, _ = NearestNeighbors(n_neighbors=k).fit(X).kneighbors()  # to other samples
    half_distance = 0.5 * float(np.quantile(distances[:, -1], _QUANTILE))
    if half_distance == 0:
        raise ValueError(
            f'`sigma="auto"` uses the distance to neighbor {k}, which is 0 for {_QUANTILE:.0%} of the samples: they '
            "are repeated. Give a number, or each sample once."
        )
    return half_distance


def _without_constants(spectrum: Spectrum) -> Tensor:
    """Return n of n + 1 eigenvectors, (N, n), orthogonal to constants.

    If the cloud has disconnected parts, λ = 1 occurs once per part, and each of its eigenvectors may contain a part of
    the constant one. A reflection of the coefficients collects it in the first.
    """
    c = spectrum.project(torch.ones_like(spectrum.mass))  # (n + 1,)
    c[0] += torch.copysign(c.norm(), c[0])
    return (spectrum.vectors - (spectrum.vectors @ c)[:, None] * (2 / (c @ c) * c))[:, 1:]

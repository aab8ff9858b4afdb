r"""A diffusion map as an estimator of scikit-learn: ψ_t(x) = (λ_1^t φ_1(x), …, λ_n^t φ_n(x)), with Q φ = λ φ.

The modes are functions of all of space, φ(y) = (Qφ)(y) / λ, so ψ_t(y) = Q(λ^{t−1} φ)(y) is one attention, at the points
of the fit and at others. All of it goes by float64: 1 − λ is of the order of (σ / size)², and large clouds have modes
that float32 cannot tell from constants.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qattn import _checks
from qattn.kernels import GaussianKernel
from qattn.mass import density
from qattn.operators import diffusion
from qattn.spectral import Spectrum, eigsh

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.neighbors import NearestNeighbors
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "qattn.sklearn needs scikit-learn. Install it with `pip install 'qattn-diffusion[sklearn]'`.", name=error.name
    ) from None

__all__ = ["SinkhornDiffusionMap"]

_NEIGHBOUR, _SHARE = 10, 0.9  # within twice the bandwidth, ten neighbours of nine samples in ten
_TOL = 1e-8  # of the normalisation, whose errors mix modes with constants as they compare to 1 − λ
_MODES_TOL = 1e-3  # of the modes, relative to 1 − λ
_MODES_PASSES = 1000  # which curves of many samples may take
_DTYPES = [np.float64, np.float32]  # the first for what is neither


class SinkhornDiffusionMap(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    r"""ψ_t(x) = (λ_1^t φ_1(x), …, λ_n^t φ_n(x)): the leading modes of a Sinkhorn-normalised diffusion, as coordinates.

    λ_0 = 1 and its constant mode are left out. The modes are orthonormal for the masses and deterministic, up to
    turning those of equal eigenvalues into one another.

    Args:
        n_components: The number n of coordinates, less than the number of samples.
        sigma: The bandwidth σ of the Gaussian kernel; "auto" takes half the distance within which nine samples in
            ten have ten neighbours (or all others, if those are fewer), which scales with the data.
        t: The time of diffusion, t ≥ 0, in steps of Q; 0 leaves the modes as they are.
        density: "uniform" gives each sample the same mass, and modes that depend on how densely it was sampled.
            "estimated" takes 1 / Σ_j K_ij, for the modes of the shape itself.

    Attributes:
        embedding_: The coordinates ψ_t of the samples, shape (n_samples, n_components).
        eigenvalues_: λ_1, …, λ_n, from the largest down, shape (n_components,).
        sigma_: The bandwidth.
        diffusion_: The operator Q, a `Diffusion`.
        n_features_in_: The number of features of the samples.
        feature_names_in_: Their names, if they have some.

    Example:
        >>> angle = torch.arange(100) * 0.02 * torch.pi
        >>> circle = torch.stack([angle.cos(), angle.sin()], dim=1).numpy()
        >>> psi = SinkhornDiffusionMap(n_components=2).fit_transform(circle)
        >>> psi.shape, bool((psi**2).sum(1).std() < 0.01)  # a circle again
        ((100, 2), True)
    """

    def __init__(self, n_components: int = 2, *, sigma: Any = "auto", t: float = 1.0, density: str = "uniform") -> None:
        self.n_components = n_components
        self.sigma = sigma
        self.t = t
        self.density = density

    def fit(self, X: Any, y: Any = None) -> "SinkhornDiffusionMap":
        """Finds the modes of samples (n_samples, n_features); `y` is not looked at."""
        X = validate_data(self, X, dtype=_DTYPES, ensure_min_samples=2)
        n = _checks.integer("n_components", self.n_components, 1)
        if n >= len(X):
            raise ValueError(f"`n_components` should be less than the number of samples, {len(X)}; got {n}.")
        _checks.one_of("density", self.density, ("uniform", "estimated"))
        t = _checks.not_negative("t", self.t)
        self.sigma_ = _bandwidth(X, self.sigma)
        kernel = GaussianKernel(X.astype(np.float64), self.sigma_, tol=_TOL)
        q = diffusion(kernel, mass=density(kernel) if self.density == "estimated" else None, tol=_TOL)
        spectrum = eigsh(q, n + 1, tol=_MODES_TOL, max_iter=_MODES_PASSES)
        values = spectrum.values[1:].clamp(min=torch.finfo(torch.float64).eps)  # 0 would have no power t − 1 < 0
        self.diffusion_, self._modes = q, values ** (t - 1) * _without_constants(spectrum)
        self.eigenvalues_ = values.numpy()
        self.embedding_ = self._embedded(X)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Finds the modes of samples, and returns their coordinates."""
        return self.fit(X).embedding_

    def transform(self, X: Any) -> Any:
        """The coordinates ψ_t, (n_samples, n_components), of any samples (n_samples, n_features)."""
        check_is_fitted(self)
        return self._embedded(validate_data(self, X, dtype=_DTYPES, reset=False))

    def _embedded(self, X: Any) -> Any:
        """Q(λ^{t−1} φ) at samples, in their dtype."""
        return (self.diffusion_.extend(X) @ self._modes).numpy().astype(X.dtype)

    @property
    def _n_features_out(self) -> int:
        return self._modes.shape[1]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = [dtype.__name__ for dtype in _DTYPES]
        return tags


def _bandwidth(X: Any, sigma: Any) -> float:
    """σ as given, or half of a quantile over the samples of their distances to a neighbour."""
    if not isinstance(sigma, str):
        return float(_checks.one_bandwidth(sigma, torch.float64, torch.device("cpu")))
    _checks.one_of("sigma", sigma, ("auto",))
    k = min(_NEIGHBOUR, len(X) - 1)
    distances, _ = NearestNeighbors(n_neighbors=k).fit(X).kneighbors()  # to others than themselves
    found = 0.5 * float(np.quantile(distances[:, -1], _SHARE))
    if found == 0:
        raise ValueError(
            f'`sigma="auto"` goes by the distance to neighbour {k}, which is 0 for {_SHARE:.0%} of the samples: they '
            "are repeated. Give a number, or each sample once."
        )
    return found


def _without_constants(spectrum: Spectrum) -> Tensor:
    """n modes (N, n) of n + 1, orthogonal to constants.

    If the cloud has parts that do not see one another, λ = 1 is there for each of them, and any of its modes may hold
    some of the constant one. A reflection of coefficients gathers it in the first.
    """
    c = spectrum.project(torch.ones_like(spectrum.mass))  # (n + 1,)
    c[0] += torch.copysign(c.norm(), c[0])
    return (spectrum.vectors - (spectrum.vectors @ c)[:, None] * (2 / (c @ c) * c))[:, 1:]

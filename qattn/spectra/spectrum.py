r"""Spectra of diffusion operators Q ≈ exp(−σ²L/2), and the eigenvalues of the Laplacian L: −(2/σ²) log λ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._autocast import without_autocast
from qattn._html import table
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn._warning import warn_caller
from qattn.ranks import ALONE, Ranks
from qattn.spectra.linalg import inner

__all__ = ["Spectrum", "frequencies_of", "laplacian_eigenvalues"]

_NUM_SHOWN = 8  # eigenpairs in notebooks


@dataclass(frozen=True)
class Spectrum:
    """Eigenpairs Q φ = λ φ, orthonormal for the masses: Φᵀ diag(m) Φ = I.

    The fields hold tensors, or arrays if the operator was made from arrays. Methods return an array for a signal that
    is an array and a tensor for a tensor, in the wider dtype of the signal and the vectors.

    Attributes:
        values: Eigenvalues λ in descending order, shape (k,).
        vectors: Eigenvectors φ, shape (N, k). The entry of largest magnitude in each of them is positive.
        residuals: ‖Qφ − λφ‖ in the norm of the masses, shape (k,).
        mass: Masses m for which the vectors are orthonormal, shape (N,), with sum 1.
        sigma: Bandwidth σ for which Q ≈ exp(−σ²L/2); None if there is none, as for graphs and matrices.
        ranks: Process group over which the sites are sharded; `ALONE` if they are local.
        choices: Choices of `qattn.spectrum` with their reasons, by name; empty for `eigsh`.
    """

    values: TensorOrArray
    vectors: TensorOrArray
    residuals: TensorOrArray
    mass: TensorOrArray
    sigma: float | None = None
    ranks: Ranks = ALONE
    choices: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def _repr_html_(self) -> str:
        """Return a table of the first eigenpairs for notebooks."""
        values, residuals = (torch.as_tensor(x)[:_NUM_SHOWN] for x in (self.values, self.residuals))
        title = f"Spectrum: {len(self)} eigenpairs, {len(self.vectors):,} sites"
        header = ["mode", "eigenvalue λ", "residual"]
        rows = [[n, f"{values[n]:.6f}", f"{residuals[n]:.0e}"] for n in range(len(values))]
        if self.sigma is not None:
            title, header = f"{title}, σ = {self.sigma:g}", [*header, "frequency"]
            rows = [[*row, f"{mu:.4g}"] for row, mu in zip(rows, _minus_log(values, self.sigma), strict=True)]
        chosen = table("Chosen", self.choices.items()) if self.choices else ""
        return table(title, rows, header) + chosen

    @property
    def frequencies(self) -> TensorOrArray:
        """Eigenvalues of the Laplacian, −(2/σ²) log λ, in ascending order; see `laplacian_eigenvalues`.

        Raises:
            ValueError: If `sigma` is None.
        """
        if self.sigma is None:
            raise ValueError(
                "The frequencies of a spectrum follow from the bandwidth of a Gaussian kernel, and this spectrum has "
                "`sigma=None`, as those of graphs and matrices have. Take "
                "`laplacian_eigenvalues(spectrum.values, sigma)` with a bandwidth of your own."
            )
        return laplacian_eigenvalues(self.values, self.sigma)

    def torch(self) -> "Spectrum":
        """Return the spectrum with tensors as fields."""
        return self._map(lambda x: _checks.floating("spectrum", x))

    def numpy(self) -> "Spectrum":
        """Return the spectrum with arrays as fields."""
        return self.torch()._map(lambda x: x.numpy(force=True))

    def to(self, *args: Any, **kwargs: Any) -> "Spectrum":
        """Return the spectrum with tensors on another device or in another dtype, by the arguments of `Tensor.to`."""
        return self.torch()._map(lambda x: x.to(*args, **kwargs))

    @without_autocast()
    def project(self, signal: ArrayLike) -> TensorOrArray:
        """Return the coefficients Φᵀ diag(m) f, shape (k,) or (k, C), of a signal f, shape (N,) or (N, C)."""
        return like_input(self.torch()._coefficients(self._signal(signal)), signal)

    @without_autocast()
    def power(self, t: float, signal: ArrayLike) -> TensorOrArray:
        """Return Φ Λ^t Φᵀ diag(m) f for a real t ≥ 0: Q^t within the span of the eigenvectors."""
        _checks.not_negative("t", t)
        return self._apply(lambda values: values.clamp(min=0) ** t, signal)

    @without_autocast()
    def minus_log(self, signal: ArrayLike) -> TensorOrArray:
        """Return Φ (−log Λ) Φᵀ diag(m) f: −log Q within the span of the eigenvectors, about σ²/2 times L f.

        Raises:
            ValueError: If an eigenvalue is 0 or less.
        """
        if not (self.values > 0).all():
            raise ValueError(
                f"{int((self.values <= 0).sum())} of the {len(self)} eigenvalues are 0 or less, and have no logarithm. "
                "Take fewer, or a smaller bandwidth."
            )
        return self._apply(lambda values: -torch.log(values), signal)

    def _map(self, function: Callable[[Any], Any]) -> "Spectrum":
        arrays = {name: function(getattr(self, name)) for name in ("values", "vectors", "residuals", "mass")}
        return replace(self, **arrays)

    def _signal(self, signal: ArrayLike) -> Tensor:
        vectors = _checks.floating("vectors", self.vectors)
        f = _checks.signal(signal, torch.Size((len(vectors), len(vectors))), vectors.device)
        return f.to(torch.promote_types(f.dtype, vectors.dtype))

    def _coefficients(self, f: Tensor) -> Tensor:
        weighted = self.mass * f if f.ndim == 1 else self.mass[:, None] * f
        return inner(self.vectors, weighted, self.ranks).to(weighted.dtype)

    def _apply(self, function: Callable[[Tensor], Tensor], signal: ArrayLike) -> TensorOrArray:
        """Return Φ g(Λ) Φᵀ diag(m) f for a function g."""
        spectrum, f = self.torch(), self._signal(signal)
        coefficients, factors = spectrum._coefficients(f), function(spectrum.values)
        scaled = factors * coefficients if f.ndim == 1 else factors[:, None] * coefficients
        return like_input(spectrum.vectors.to(scaled.dtype) @ scaled, signal)


def laplacian_eigenvalues(values: ArrayLike, sigma: float) -> TensorOrArray:
    r"""Estimate eigenvalues −(2/σ²) log λ of the Laplacian from eigenvalues λ of Q.

    Args:
        values: Eigenvalues λ, shape (k,).
        sigma: Bandwidth σ; for mixtures, that of `MixtureKernel.effective_sigma`.

    Returns:
        Estimates in the order of `values`, a tensor or an array like them. They are ∞ where λ ≤ 0, which no Laplacian
        explains; a warning gives their number.

    Examples:
        >>> laplacian_eigenvalues(torch.tensor([1.0, 0.99]), sigma=0.1)
        tensor([0.0000, 2.0101])
    """
    eigenvalues = _checks.floating("values", values)
    sigma = float(_checks.bandwidth(sigma, eigenvalues.double()))
    count = int((eigenvalues <= 0).sum())
    if count:
        warn_caller(
            f"{count} of the {eigenvalues.numel()} eigenvalues of Q are 0 or less, and match none of a Laplacian: they "
            "are ∞ here. Take fewer, or a smaller bandwidth, or a kernel that is positive semidefinite."
        )
    return like_input(_minus_log(eigenvalues, sigma), values)


def _minus_log(values: Tensor, sigma: float) -> Tensor:
    """Return −(2/σ²) log λ for eigenvalues λ (k,), ∞ where λ ≤ 0."""
    frequencies = -2 / sigma**2 * torch.log(values.clamp(min=0))
    return torch.where(frequencies == 0, 0, frequencies)  # 0 instead of −0


def frequencies_of(spectrum: Spectrum, frequencies: ArrayLike | None, name: str = "frequencies") -> Tensor:
    """Return the frequencies (k,) of a spectrum, or `frequencies` in their place, which are checked."""
    tensor, k = _checks.as_tensor(name, spectrum.frequencies if frequencies is None else frequencies), len(spectrum)
    if tensor.shape != (k,):
        raise ValueError(
            f"`{name}` should have shape ({k},), one per eigenvector of the spectrum; got {_checks.shape_of(tensor)}."
        )
    _checks.finite(name, tensor, "Take fewer eigenpairs: eigenvalues of Q of 0 or less match none of a Laplacian.")
    if frequencies is not None and (torch.diff(tensor) < 0).any():
        raise ValueError(
            f"`{name}` should ascend, from 0 for the constants; got {tensor.tolist()[:4]}… "
            "From eigenvalues of Q, take `laplacian_eigenvalues(values, sigma)`."
        )
    return tensor

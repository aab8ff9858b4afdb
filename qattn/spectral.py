r"""The leading eigenpairs of a diffusion operator, and what they tell of the Laplacian: Q ≈ exp(σ²Δ/2)."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Spectrum"]


@dataclass(frozen=True)
class Spectrum:
    """Eigenpairs Q φ = λ φ, orthonormal for the masses: Φᵀ diag(m) Φ = I.

    Attributes:
        values: The eigenvalues λ, from the largest down, shape (k,).
        vectors: The eigenvectors φ, shape (N, k).
        residuals: ‖Qφ − λφ‖ in the norm of the masses, shape (k,).
        mass: The masses m that they are orthonormal for, shape (N,), of sum 1.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    mass: Tensor

    def project(self, signal: Tensor) -> Tensor:
        """The coefficients Φᵀ diag(m) f, (k,) or (k, C), of a signal (N,) or (N, C)."""
        weighted = self.mass * signal if signal.ndim == 1 else self.mass[:, None] * signal
        return self.vectors.T @ weighted

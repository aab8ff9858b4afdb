"""Leading eigenpairs of diffusion operators, and the eigenvalues of the Laplacian that they imply: Q ≈ exp(−σ²L/2)."""

from qattn.spectra.bandwidth import effective_sigma
from qattn.spectra.eigensolver import eigsh
from qattn.spectra.spectrum import Spectrum, laplacian_eigenvalues

__all__ = ["Spectrum", "effective_sigma", "eigsh", "laplacian_eigenvalues"]

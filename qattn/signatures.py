r"""Signatures of points: descriptors of the shape around each point, from heat diffusion and wave propagation.

| | at point i | for |
|---|---|---|
| `heat_kernel_signature` | Σ_l e^{−tμ_l} φ_l(i)² | times t |
| `wave_kernel_signature` | Σ_l w_l φ_l(i)², w_l ∝ exp(−(e − log μ_l)² / 2s²) | log-energies e |

The frequencies μ are eigenvalues of the Laplacian in ascending order from 0, by default those of the spectrum. Squares
do not depend on the signs of eigenvectors, nor their sums on rotations within an eigenspace. As masses sum to 1, φ² has
mean 1: areas enter through the frequencies alone.
"""

import math

import torch
from torch import Tensor

from qattn import _checks
from qattn._autocast import without_autocast
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.spectra.spectrum import Spectrum, frequencies_of

__all__ = ["heat_kernel_signature", "wave_kernel_signature"]

_ZERO = 1e-4  # of the last frequency: above the zeros of an operator with `tol=1e-3`, below μ_1 of surfaces
_WIDTH = 7.0  # spacings of energies per window, as in Aubry et al.


@without_autocast()
def heat_kernel_signature(
    spectrum: Spectrum,
    times: ArrayLike | None = None,
    *,
    num_times: int = 16,
    scaled: bool = False,
    frequencies: ArrayLike | None = None,
) -> TensorOrArray:
    r"""Heat kernel signature HKS_i(t) = Σ_l e^{−tμ_l} φ_l(i)², the heat that stays at a point (Sun et al. 2009).

    Args:
        spectrum: Eigenvectors φ, shape (N, k), and their frequencies μ.
        times: Times t ≥ 0, shape (T,). By default `num_times` times, evenly spaced in log t from 4 ln10 / μ_k to
            4 ln10 / μ_1, where μ_1 is the first frequency above 0: these scale with the shape. Give the same times for
            shapes whose sizes should be distinguished.
        num_times: Number of times, if `times` is not given.
        scaled: If True, divide by the heat trace Σ_l e^{−tμ_l}, which weights all times alike: the mean over the shape
            is then 1.
        frequencies: Frequencies μ in ascending order, shape (k,), to use instead of `spectrum.frequencies`.

    Returns:
        Signatures of shape (N, T), an array if the spectrum holds arrays.

    Examples:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> heat_kernel_signature(two, times=[0.0, 100.0], frequencies=[0.0, 1.0])
        tensor([[2., 1.],
                [2., 1.]])
    """
    vectors = spectrum.torch().vectors
    mu = frequencies_of(spectrum, frequencies).to(vectors)
    if times is None:
        positive = mu[~_is_zero(mu)]
        _check_number(positive, 1)
        first, last = 4 * math.log(10) / positive[-1], 4 * math.log(10) / positive[0]
        t = first * (last / first) ** _unit_steps("num_times", num_times, mu)
    else:
        t = _times(times, mu)
    decay = torch.exp(-t * mu.clamp(min=0)[:, None])  # (k, T)
    if scaled:
        decay = decay / decay.sum(0)
    return like_input(vectors.square() @ decay, spectrum.vectors)


@without_autocast()
def wave_kernel_signature(
    spectrum: Spectrum, *, num_energies: int = 128, frequencies: ArrayLike | None = None
) -> TensorOrArray:
    r"""Wave kernel signature WKS_i(e) = Σ_l w_l φ_l(i)², w_l ∝ exp(−(e − log μ_l)² / 2s²), Σ_l w_l = 1.

    This is the probability of finding a quantum particle of energy about e at point i (Aubry et al. 2011). Large parts
    of a shape dominate its heat; energies separate them from small ones.

    Args:
        spectrum: Eigenvectors φ, shape (N, k), and their frequencies μ. Zeros among these, one per connected part of
            the shape, have no logarithm and are left out: the first, and all below 1e-4 μ_k.
        num_energies: Number n of energies, evenly spaced from log μ_1 to log μ_k. Windows have the width
            s = 7 (log μ_k − log μ_1) / n.
        frequencies: Frequencies μ in ascending order, shape (k,), to use instead of `spectrum.frequencies`.

    Returns:
        Signatures of shape (N, n) with mean 1 over the shape, an array if the spectrum holds arrays.

    Examples:
        >>> vectors = torch.tensor([[1.0, 0.0, 1.5], [1.0, 1.4, 0.0], [1.0, -1.4, 0.0]])
        >>> values, residuals, weight = torch.tensor([1.0, 0.5, 0.2]), torch.zeros(3), torch.full((3,), 1 / 3)
        >>> three = Spectrum(values, vectors, residuals, weight, sigma=0.1)
        >>> wave_kernel_signature(three).shape
        torch.Size([3, 128])
    """
    vectors = spectrum.torch().vectors
    mu = frequencies_of(spectrum, frequencies).to(vectors)
    is_positive = ~_is_zero(mu)
    _check_number(mu[is_positive].detach().unique(), 2)
    log_mu = torch.log(mu[is_positive])
    first, last = log_mu[0], log_mu[-1]
    width = _WIDTH * (last - first) / num_energies
    energies = first + (last - first) * _unit_steps("num_energies", num_energies, mu)
    # A softmax, as all windows underflow at an energy in a wide gap of the spectrum.
    weights = torch.softmax(-0.5 * ((energies - log_mu[:, None]) / width) ** 2, dim=0)  # (l, n)
    return like_input(vectors[:, is_positive].square() @ weights, spectrum.vectors)


def _is_zero(frequencies: Tensor) -> Tensor:
    """Return a mask of the frequencies that are 0 up to errors: one per connected part of the shape."""
    is_zero = frequencies <= _ZERO * frequencies[-1]
    is_zero[0] = True
    return is_zero


def _check_number(positive: Tensor, minimum: int) -> None:
    if len(positive) < minimum:
        raise ValueError(
            f"`frequencies` should hold at least {minimum} above 0 that differ; got {len(positive)}, as there is a 0 "
            "for each part of a shape. Compute more eigenpairs."
        )


def _unit_steps(name: str, count: int, like: Tensor) -> Tensor:
    return torch.linspace(0, 1, _checks.integer(name, count, 1), dtype=like.dtype, device=like.device)


def _times(times: ArrayLike, like: Tensor) -> Tensor:
    tensor = _checks.as_tensor("times", times).to(like)
    if tensor.ndim != 1 or len(tensor) == 0:
        raise ValueError(f"`times` should have shape (T,); got {_checks.shape_of(tensor)}. For one time, give `[t]`.")
    _checks.finite("times", tensor, "Heat that has spread for long is 1 everywhere.")
    if (tensor < 0).any():
        raise ValueError(f"`times` should not be negative; {int((tensor < 0).sum())} of its {len(tensor)} numbers are.")
    return tensor

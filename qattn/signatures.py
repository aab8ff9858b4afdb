r"""Signatures of points: what heat and waves tell of the shape around each of them.

| | at the point i | for |
|---|---|---|
| `heat_kernel_signature` | Σ_l e^{−tμ_l} φ_l(i)² | times t |
| `wave_kernel_signature` | Σ_l w_l φ_l(i)², w_l ∝ exp(−(e − log μ_l)² / 2s²) | log-energies e |

The frequencies μ are eigenvalues of the Laplacian, from 0 up, as `laplacian_eigenvalues` estimates them from those of
Q. Squares forget the signs of eigenvectors, and their sums the rotations inside an eigenspace. As masses sum to 1, φ²
has the mean 1: areas enter by the frequencies alone.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.spectral import Spectrum

__all__ = ["heat_kernel_signature", "wave_kernel_signature"]

_ZERO = 1e-4  # of the last frequency: zeros of an operator with a `tol` of 1e-3 are below, μ_1 of surfaces is above
_WIDTH = 7.0  # energies that a window is wide, as Aubry et al. have it


def heat_kernel_signature(
    frequencies: Any, spectrum: Spectrum, times: Any = None, *, count: int = 16, scaled: bool = False
) -> Any:
    r"""HKS_i(t) = Σ_l e^{−tμ_l} φ_l(i)², the heat that stays at a point (Sun et al. 2009).

    Args:
        frequencies: The eigenvalues μ of the Laplacian, ascending, shape (k,).
        spectrum: The eigenvectors φ, (N, k).
        times: Times t ≥ 0, shape (T,). By default `count` of them, evenly spaced in log t from 4 ln10 / μ_k to
            4 ln10 / μ_1, where μ_1 is the first that is not 0: these follow the size of the shape. Give the same times
            for shapes whose sizes are to be told apart.
        count: How many times, if they are not given.
        scaled: Whether to divide by the heat trace Σ_l e^{−tμ_l}, so that all times count alike: the mean over the
            shape is then 1.

    Returns:
        Signatures of shape (N, T), an array if the spectrum holds arrays.

    Example:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> heat_kernel_signature([0.0, 1.0], two, times=[0.0, 100.0])
        tensor([[2., 1.],
                [2., 1.]])
    """
    vectors = spectrum.to_torch().vectors
    mu = _checks.frequencies("frequencies", frequencies, vectors)
    if times is None:
        positive = mu[~_is_zero(mu)]
        _checks.frequencies_suffice(positive, 1)
        first, last = 4 * math.log(10) / positive[-1], 4 * math.log(10) / positive[0]
        t = first * (last / first) ** _steps(count, mu)
    else:
        t = _checks.times(times, mu)
    decay = torch.exp(-t * mu.clamp(min=0)[:, None])  # (k, T)
    if scaled:
        decay = decay / decay.sum(0)
    return spectrum.as_held(vectors.square() @ decay)


def wave_kernel_signature(frequencies: Any, spectrum: Spectrum, *, count: int = 128) -> Any:
    r"""WKS_i(e) = Σ_l w_l φ_l(i)², w_l = exp(−(e − log μ_l)² / 2s²) / C_e, Σ_l w_l = 1 (Aubry et al. 2011).

    The chance to meet at a point a quantum particle of an energy about e. Heat tells most of large parts of a shape,
    energies tell them from small ones.

    Args:
        frequencies: The eigenvalues μ of the Laplacian, ascending, shape (k,). Zeros, one for each part of the
            shape, are left out, as they have no logarithm: the first, and what is below 1e-4 μ_k.
        spectrum: The eigenvectors φ, (N, k).
        count: The number n of energies, evenly spaced from log μ_1 to log μ_k; windows have the width
            s = 7 (log μ_k − log μ_1) / n.

    Returns:
        Signatures of shape (N, n), whose means over the shape are 1; an array if the spectrum holds arrays.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0, 1.5], [1.0, 1.4, 0.0], [1.0, -1.4, 0.0]])
        >>> three = Spectrum(torch.tensor([1.0, 0.5, 0.2]), vectors, torch.zeros(3), torch.full((3,), 1 / 3))
        >>> wave_kernel_signature([0.0, 1.0, 2.0], three).shape
        torch.Size([3, 128])
    """
    vectors = spectrum.to_torch().vectors
    mu = _checks.frequencies("frequencies", frequencies, vectors)
    is_positive = ~_is_zero(mu)
    _checks.frequencies_suffice(mu[is_positive].detach().unique(), 2)
    log_mu = torch.log(mu[is_positive])
    low, high = log_mu[0], log_mu[-1]
    width = _WIDTH * (high - low) / count
    energies = low + (high - low) * _steps(count, mu)
    # By softmax, as all windows about an energy in a wide gap of the spectrum can be 0.
    weights = torch.softmax(-0.5 * ((energies - log_mu[:, None]) / width) ** 2, dim=0)  # (l, n)
    return spectrum.as_held(vectors[:, is_positive].square() @ weights)


def _is_zero(frequencies: Tensor) -> Tensor:
    """Which frequencies are 0 but for errors: that of the constants, and one for each further part of a shape."""
    is_zero = frequencies <= _ZERO * frequencies[-1]
    is_zero[0] = True
    return is_zero


def _steps(count: int, like: Tensor) -> Tensor:
    return torch.linspace(0, 1, _checks.integer("count", count, 1), dtype=like.dtype, device=like.device)

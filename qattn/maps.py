r"""Functional maps between two shapes, by their spectra: C = Φ_tᵀ M_t Π Φ_s.

Points and functions go opposite ways. A point map gives each point of the *target* a point of the *source*:

    index (N_target,), entries from 0 to N_source − 1

and so brings functions of the source to the target, (Πf)_j = f[index[j]]. The functional map C, (k_target, k_source),
is that in the two bases: coefficients a of a function of the source become coefficients C a of one on the target. In
the names of pyFM, with mesh 1 as the source and mesh 2 as the target, `index` is `p2p_21` and C is `FM_12`.

| | from | to |
|---|---|---|
| `functional_map` | a point map | C |
| `fit_functional_map` | features of both shapes | C |
| `point_map` | C | a point map |
| `zoomout` | either, coarse | both, fine |

Maps compose as they should where bases are complete: C_ac = C_bc C_ab belongs to `index_ab[index_bc]`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._nearest import nearest
from qattn._progress import Progress
from qattn.spectral import Spectrum

__all__ = ["fit_functional_map", "functional_map", "point_map", "zoomout"]


def functional_map(source: Spectrum, target: Spectrum, index: Any) -> Tensor:
    r"""C = Φ_tᵀ M_t Φ_s[index], the map of functions that belongs to a map of points.

    Args:
        source: The spectrum that functions come from, with k_s vectors.
        target: The spectrum that they go to, with k_t vectors.
        index: The source point of each target point, integers of shape (N_target,).

    Returns:
        C of shape (k_t, k_s); orthogonal if the map keeps masses and eigenspaces, as isometries do.

    Example:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> functional_map(two, two, [1, 0])  # the exchange changes the sign of the second
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    _checks.held_alone("functional_map", source.ranks)
    index = _checks.point_map(index, source.vectors, target.vectors)
    return target.project(source.vectors[index])


def fit_functional_map(
    source: Spectrum,
    target: Spectrum,
    source_features: Any,
    target_features: Any,
    *,
    frequencies: tuple[Any, Any],
    weight: float = 1.0,
) -> Tensor:
    r"""argmin_C ‖CA − B‖² + w (‖A‖² / k_s) Σ_ij r_ij C_ij², with A = Φ_sᵀ M_s F_s and B = Φ_tᵀ M_t F_t.

    The penalty r_ij = |1 / (a_i − i) − 1 / (b_j − i)|² = (a_i − b_j)² / (1 + a_i²)(1 + b_j²), where a² and b² are the
    frequencies of the target and the source over the largest of them, is 0 for maps that commute with the Laplacians
    (by their resolvents: Ren et al. 2019). Each row of C is then a linear system of its own (Donati et al. 2020).

    Args:
        source: The spectrum that functions come from.
        target: The spectrum that they go to.
        source_features: F_s of shape (N_source, d): signatures, bumps about landmarks, or what a network makes of them.
        target_features: F_t of shape (N_target, d), which the map should take F_s to.
        frequencies: The eigenvalues of the Laplacian of the source, (k_s,), and of the target, (k_t,), both ascending.
        weight: w ≥ 0, independent of the units of features and shapes.

    Returns:
        C of shape (k_t, k_s), differentiable by the features, and by the spectra if those are.

    Example:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> mu, bumps = torch.tensor([0.0, 1.0]), torch.eye(2)
        >>> fit_functional_map(two, two, bumps, bumps.flip(0), frequencies=(mu, mu), weight=0.0).round()
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    F_s, F_t = _checks.features(source_features, target_features, source.vectors, target.vectors)
    A, B = source.project(F_s), target.project(F_t)  # (k_s, d), (k_t, d)
    given = zip(("source", "target"), frequencies, (source, target), strict=True)
    mu_s, mu_t = (_checks.frequencies(f"frequencies of the {name}", mu, s.vectors) for name, mu, s in given)
    penalty = _checks.not_negative("weight", weight) * _resolvent_differences(mu_t, mu_s)  # (k_t, k_s)
    # Functions that no feature has a part of, as the odd ones of a symmetric shape, would leave the systems singular.
    ridge = len(A) * torch.finfo(A.dtype).eps
    systems = A @ A.T + A.square().sum() / len(A) * torch.diag_embed(penalty + ridge)  # (k_t, k_s, k_s)
    return torch.linalg.solve(systems, (B @ A.T)[..., None])[..., 0]


def _resolvent_differences(mu_t: Tensor, mu_s: Tensor) -> Tensor:
    largest = torch.maximum(mu_t[-1], mu_s[-1])
    tiny = torch.finfo(mu_t.dtype).eps  # √ has no derivative at 0
    a, b = ((mu / largest).clamp(min=tiny).sqrt() for mu in (mu_t[:, None], mu_s))
    return (a - b) ** 2 / ((1 + a**2) * (1 + b**2))


@eager
def point_map(source: Spectrum, target: Spectrum, C: Any) -> Tensor:
    r"""index_j = argmin_i ‖Φ_s[i] Cᵀ − Φ_t[j]‖, the source point of each target point (Ovsjanikov et al. 2012).

    Args:
        source: The spectrum that functions come from.
        target: The spectrum that they go to.
        C: A functional map of shape (k_t, k_s), of the leading k_s and k_t vectors of the spectra, or of all.

    Returns:
        Integers of shape (N_target,): exact nearest neighbours, in memory proportional to the points.

    Example:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> point_map(two, two, [[1.0, 0.0], [0.0, -1.0]])
        tensor([1, 0])
    """
    _checks.held_alone("point_map", source.ranks)
    C = _checks.functional_map(C, source.vectors, target.vectors)
    k_t, k_s = C.shape
    # In float64, because neighbours are closer than the rounding of their squares in float32.
    placed = source.vectors.detach()[:, :k_s].double() @ C.detach().double().T  # (N_source, k_t)
    return nearest(target.vectors.detach()[:, :k_t].double(), placed)


@eager
def zoomout(
    source: Spectrum, target: Spectrum, init: Any, *, start: int, stop: int, step: int = 1
) -> tuple[Tensor, Tensor]:
    r"""C_k → index → C_{k+step} → … → C_stop: refines a map by one size of bases after the other (Melzi et al. 2019).

    Args:
        source: The spectrum that functions come from, with at least `stop` vectors.
        target: The spectrum that they go to, with at least `stop` vectors.
        init: A functional map of at least (start, start), whose leading part is taken, or a point map (N_target,).
        start: The size of bases to begin with: as many as the given map is right about, often 4 to 20.
        stop: The size to end with; the last step is a shorter one if need be.
        step: How much larger the bases become each time.

    Returns:
        C of shape (stop, stop), and its point map (N_target,).

    Example:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> C, index = zoomout(two, two, [1, 0], start=2, stop=2)
        >>> index
        tensor([1, 0])
    """
    sizes = _checks.sizes_of_bases(start, stop, step, source.vectors, target.vectors)
    given = torch.as_tensor(init)
    if given.ndim == 2:
        C = _checks.functional_map(given, source.vectors, target.vectors, least=sizes[0])[: sizes[0], : sizes[0]]
    else:
        C = functional_map(_leading(source, sizes[0]), _leading(target, sizes[0]), given)
    index = point_map(source, target, C)
    with Progress("ZoomOut", len(sizes) - 1) as progress:
        for k in sizes[1:]:
            C = functional_map(_leading(source, k), _leading(target, k), index)
            index = point_map(source, target, C)
            progress.advance()
    return C, index


def _leading(spectrum: Spectrum, k: int) -> Spectrum:
    return replace(
        spectrum, values=spectrum.values[:k], vectors=spectrum.vectors[:, :k], residuals=spectrum.residuals[:k]
    )

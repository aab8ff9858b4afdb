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

Maps are arrays if the spectrum of the source holds arrays, else tensors.

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

_ROUNDING = 8.0  # units in the last place by which coefficients of features may be wrong


def functional_map(source: Spectrum, target: Spectrum, index: Any) -> Any:
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
    first, second = source.to_torch(), target.to_torch()
    index = _checks.point_map(index, first.vectors, second.vectors)
    return source.as_held(second.project(first.vectors[index]))


def fit_functional_map(
    source: Spectrum,
    target: Spectrum,
    source_features: Any,
    target_features: Any,
    *,
    frequencies: tuple[Any, Any],
    weight: float = 1.0,
) -> Any:
    r"""argmin_C ‖CA − B‖² + (‖A‖² / k_s) Σ_ij (w r_ij + ε) C_ij², with A = Φ_sᵀ M_s F_s and B = Φ_tᵀ M_t F_t.

    The penalty r_ij = |1 / (a_i − i) − 1 / (b_j − i)|² = (a_i − b_j)² / (1 + a_i²)(1 + b_j²), where a² and b² are the
    frequencies of the target and the source over the largest of them, is 0 for maps that commute with the Laplacians
    (by their resolvents: Ren et al. 2019). Each row of C is then a least-squares problem of its own (Donati et al.
    2020), solved by QR in float64: signatures are nearly dependent, and their squares would lose half of the digits.
    The ridge, ε = 2e-16 k_s in float64 and 9e-13 k_s in float32, takes functions that no feature has a part of but for
    rounding, as the odd ones of a symmetric shape, to 0.

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
    _checks.not_negative("weight", weight)
    first, second = source.to_torch(), target.to_torch()
    F_s, F_t = _checks.features(source_features, target_features, first.vectors, second.vectors)
    A, B = first.project(F_s.double()), second.project(F_t.double())  # (k_s, d), (k_t, d)
    given = zip(("source", "target"), frequencies, (first, second), strict=True)
    mu_s, mu_t = (_checks.frequencies(f"frequencies of the {name}", mu, s.vectors.double()) for name, mu, s in given)
    size = torch.linalg.vector_norm(A) / len(A) ** 0.5
    penalty = weight**0.5 * size * _resolvent_differences(mu_t, mu_s)  # (k_t, k_s)
    dtype = first.vectors.dtype
    epsilon = len(A) * max(torch.finfo(A.dtype).eps, (_ROUNDING * torch.finfo(dtype).eps) ** 2)
    ridge = epsilon**0.5 * size * torch.eye(len(A), dtype=A.dtype, device=A.device)
    C = _least_squares(torch.cat([A.T, ridge]), penalty, torch.nn.functional.pad(B, (0, len(A))))
    return source.as_held(C.to(dtype))


def _resolvent_differences(mu_t: Tensor, mu_s: Tensor) -> Tensor:
    """√r, (k_t, k_s), signs included, so that it has a derivative where it is 0."""
    largest = torch.maximum(mu_t[-1], mu_s[-1])
    tiny = torch.finfo(mu_t.dtype).eps  # √ has no derivative at 0
    a, b = ((mu / largest).clamp(min=tiny).sqrt() for mu in (mu_t[:, None], mu_s))
    return (a - b) / ((1 + a**2) * (1 + b**2)).sqrt()


def _least_squares(matrix: Tensor, penalty: Tensor, target: Tensor) -> Tensor:
    """argmin ‖M x_i − y_i‖² + ‖diag(p_i) x_i‖², (k_t, k), for M (n, k) of full rank, p (k_t, k) and y (k_t, n)."""
    Q, R = torch.linalg.qr(matrix)  # once for all rows: then only k + k equations are left of each
    stacked = torch.cat([R.expand(len(penalty), -1, -1), torch.diag_embed(penalty)], dim=1)  # (k_t, 2 k, k)
    turn, triangle = torch.linalg.qr(stacked)
    projected = turn[:, : len(R)].mT @ (target @ Q)[..., None]
    return torch.linalg.solve_triangular(triangle, projected, upper=True)[..., 0]


@eager
def point_map(source: Spectrum, target: Spectrum, C: Any) -> Any:
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
    first, second = source.to_torch().vectors.detach(), target.to_torch().vectors.detach()
    C = _checks.functional_map(C, first, second)
    k_t, k_s = C.shape
    # In float64, because neighbours are closer than the rounding of their squares in float32.
    placed = first[:, :k_s].double() @ C.detach().double().T  # (N_source, k_t)
    return source.as_held(nearest(second[:, :k_t].double(), placed))


@eager
def zoomout(source: Spectrum, target: Spectrum, init: Any, *, start: int, stop: int, step: int = 1) -> tuple[Any, Any]:
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
    as_held, source, target = source.as_held, source.to_torch(), target.to_torch()
    sizes = _checks.sizes_of_bases(start, stop, step, source.vectors, target.vectors)
    given = _checks.as_tensor("init", init)
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
    return as_held(C), as_held(index)


def _leading(spectrum: Spectrum, k: int) -> Spectrum:
    return replace(
        spectrum, values=spectrum.values[:k], vectors=spectrum.vectors[:, :k], residuals=spectrum.residuals[:k]
    )

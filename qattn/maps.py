r"""Functional maps between two shapes, in the bases of their spectra: C = Φ_tᵀ M_t Π Φ_s.

Points and functions go in opposite directions. A point map gives every point of the *target* a point of the *source*,

    index (N_target,), integers from 0 to N_source − 1,

and so pulls functions of the source back to the target: (Πf)_j = f[index[j]]. The functional map C, of shape
(k_target, k_source), is Π in the two bases: it maps coefficients a of a function on the source to coefficients C a of
one on the target. In pyFM, with mesh 1 as the source and mesh 2 as the target, `index` is `p2p_21` and C is `FM_12`.

| | from | to |
|---|---|---|
| `functional_map` | a point map | C |
| `fit_functional_map` | features of both shapes | C |
| `point_map` | C | a point map |
| `zoomout` | a coarse C or point map | a fine C and point map, by ZoomOut |

Maps are arrays if the spectrum of the source holds arrays, and tensors otherwise. Where bases are complete they
compose: C_ac = C_bc C_ab corresponds to `index_ab[index_bc]`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._progress import Progress
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.distances.neighbors import nearest_neighbors
from qattn.spectra.spectrum import Spectrum, frequencies_of

__all__ = ["fit_functional_map", "functional_map", "point_map", "zoomout"]

_ROUNDING = 8.0  # machine epsilons of error in the coefficients of features


def functional_map(source: Spectrum, target: Spectrum, index: ArrayLike) -> TensorOrArray:
    r"""Return the functional map C = Φ_tᵀ M_t Φ_s[index] of a point map.

    Args:
        source: Spectrum that functions come from, with k_s vectors.
        target: Spectrum that functions go to, with k_t vectors.
        index: Source point of every target point, integers of shape (N_target,).

    Returns:
        C of shape (k_t, k_s). It is orthogonal if the map keeps masses and eigenspaces, as isometries do.

    Examples:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> functional_map(two, two, [1, 0])  # exchanging the points changes the sign of the second vector
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    source.ranks.check_alone("functional_map")
    s, t = source.torch(), target.torch()
    index = _point_map(index, s.vectors, t.vectors)
    return like_input(t.project(s.vectors[index]), source.vectors)


def fit_functional_map(
    source: Spectrum,
    target: Spectrum,
    source_features: ArrayLike,
    target_features: ArrayLike,
    *,
    weight: float = 1.0,
    frequencies: tuple[ArrayLike, ArrayLike] | None = None,
) -> TensorOrArray:
    r"""Fit a functional map to features: argmin_C ‖CA − B‖² + (‖A‖² / k_s) Σ_ij (w r_ij + ε) C_ij².

    A = Φ_sᵀ M_s F_s and B = Φ_tᵀ M_t F_t are the coefficients of the features. The penalty

        r_ij = |1 / (a_i − √−1) − 1 / (b_j − √−1)|² = (a_i − b_j)² / (1 + a_i²)(1 + b_j²),

    where a² and b² are the frequencies of the target and the source divided by their maximum, vanishes for maps that
    commute with the Laplacians, through their resolvents (Ren et al. 2019). Each row of C is a least-squares problem
    (Donati et al. 2020), solved by QR in float64: signatures are nearly dependent, and normal equations would lose half
    of the digits. The ridge, ε = 2e-16 k_s in float64 and 9e-13 k_s in float32, maps those functions to 0 of which the
    features contain only rounding errors, such as the odd functions of a symmetric shape.

    Args:
        source: Spectrum that functions come from.
        target: Spectrum that functions go to.
        source_features: F_s of shape (N_source, d): signatures, bumps around landmarks, or the output of a network.
        target_features: F_t of shape (N_target, d), to which the map should take F_s.
        weight: w ≥ 0, independent of the units of features and shapes.
        frequencies: Frequencies of the source, (k_s,), and of the target, (k_t,), both in ascending order, to use
            instead of those of the spectra.

    Returns:
        C of shape (k_t, k_s), differentiable in the features, and in spectra that require gradients.

    Examples:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> values, weight = torch.tensor([1.0, 0.5]), torch.tensor([0.5, 0.5])
        >>> two = Spectrum(values, vectors, torch.zeros(2), weight, sigma=0.1)
        >>> bumps = torch.eye(2)
        >>> fit_functional_map(two, two, bumps, bumps.flip(0), weight=0.0).round()
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    _checks.not_negative("weight", weight)
    s, t = source.torch(), target.torch()
    F_s, F_t = _features(source_features, target_features, s.vectors, t.vectors)
    A, B = s.project(F_s.double()), t.project(F_t.double())  # (k_s, d), (k_t, d)
    mu_s, mu_t = (None, None) if frequencies is None else frequencies
    mu_s = frequencies_of(s, mu_s, "frequencies of the source").to(A)
    mu_t = frequencies_of(t, mu_t, "frequencies of the target").to(A)
    size = torch.linalg.vector_norm(A) / len(A) ** 0.5
    penalty = weight**0.5 * size * _resolvent_differences(mu_t, mu_s)  # (k_t, k_s)
    dtype = s.vectors.dtype
    epsilon = len(A) * max(torch.finfo(A.dtype).eps, (_ROUNDING * torch.finfo(dtype).eps) ** 2)
    ridge = epsilon**0.5 * size * torch.eye(len(A), dtype=A.dtype, device=A.device)
    C = _least_squares(torch.cat([A.T, ridge]), penalty, torch.nn.functional.pad(B, (0, len(A))))
    return like_input(C.to(dtype), source.vectors)


def _resolvent_differences(mu_t: Tensor, mu_s: Tensor) -> Tensor:
    """Return √r, (k_t, k_s), with its sign, so that it is differentiable at 0."""
    largest = torch.maximum(mu_t[-1], mu_s[-1])
    tiny = torch.finfo(mu_t.dtype).eps  # √ has no derivative at 0
    a, b = ((mu / largest).clamp(min=tiny).sqrt() for mu in (mu_t[:, None], mu_s))
    return (a - b) / ((1 + a**2) * (1 + b**2)).sqrt()


def _least_squares(matrix: Tensor, penalty: Tensor, target: Tensor) -> Tensor:
    """Return argmin ‖M x_i − y_i‖² + ‖diag(p_i) x_i‖², (k_t, k), for M (n, k) of full rank, p (k_t, k), y (k_t, n)."""
    Q, R = torch.linalg.qr(matrix)  # shared by all rows, and leaves k + k equations for each
    stacked = torch.cat([R.expand(len(penalty), -1, -1), torch.diag_embed(penalty)], dim=1)  # (k_t, 2 k, k)
    basis, triangle = torch.linalg.qr(stacked)
    projected = basis[:, : len(R)].mT @ (target @ Q)[..., None]
    return torch.linalg.solve_triangular(triangle, projected, upper=True)[..., 0]


@eager
def point_map(source: Spectrum, target: Spectrum, C: ArrayLike) -> TensorOrArray:
    r"""Return the point map index_j = argmin_i ‖Φ_s[i] Cᵀ − Φ_t[j]‖ of a functional map (Ovsjanikov et al. 2012).

    Args:
        source: Spectrum that functions come from.
        target: Spectrum that functions go to.
        C: Functional map of shape (k_t, k_s), for the leading k_s and k_t vectors of the spectra or for all of them.

    Returns:
        Source point of every target point, integers of shape (N_target,). Neighbors are exact, and memory is
        proportional to the number of points.

    Examples:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> point_map(two, two, [[1.0, 0.0], [0.0, -1.0]])
        tensor([1, 0])
    """
    source.ranks.check_alone("point_map")
    s, t = source.torch().vectors, target.torch().vectors
    return like_input(_nearest_rows(s, t, _functional_map(C, s, t)), source.vectors)


def _nearest_rows(source: Tensor, target: Tensor, C: Tensor) -> Tensor:
    """Return argmin_i ‖Φ_s[i] Cᵀ − Φ_t[j]‖, (N_target,), for vectors (N_source, K_s) and (N_target, K_t)."""
    k_t, k_s = C.shape
    # In float64, as neighbors can be closer than the rounding of squares in float32.
    source, target, C = (x.detach().double() for x in (source[:, :k_s], target[:, :k_t], C))
    return nearest_neighbors(target, source @ C.T)


@eager
def zoomout(
    source: Spectrum, target: Spectrum, init: ArrayLike, *, start: int, stop: int, step: int = 1
) -> tuple[TensorOrArray, TensorOrArray]:
    r"""Refine a map by ZoomOut, C_k → index → C_{k+step} → … → C_stop, with growing bases (Melzi et al. 2019).

    Args:
        source: Spectrum that functions come from, with at least `stop` vectors.
        target: Spectrum that functions go to, with at least `stop` vectors.
        init: Functional map of shape (start, start) or larger, of which the leading block is used, or a point map
            (N_target,).
        start: Size of the first bases: as large as `init` is reliable, often 4 to 20.
        stop: Size of the last bases; the last step is shorter if necessary.
        step: Growth of the bases per step.

    Returns:
        C of shape (stop, stop), and its point map (N_target,).

    Examples:
        >>> vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> two = Spectrum(torch.tensor([1.0, 0.5]), vectors, torch.zeros(2), torch.tensor([0.5, 0.5]))
        >>> C, index = zoomout(two, two, [1, 0], start=2, stop=2)
        >>> index
        tensor([1, 0])
    """
    source.ranks.check_alone("zoomout")
    s, t = source.torch(), target.torch()
    first, *sizes = _basis_sizes(start, stop, step, min(len(s), len(t)))
    if _checks.as_tensor("init", init).ndim == 2:
        C = _functional_map(init, s.vectors, t.vectors, minimum=first)[:first, :first]
    else:
        C = _leading_map(s, t, _point_map(init, s.vectors, t.vectors), first)
    index = _nearest_rows(s.vectors, t.vectors, C)
    with Progress("ZoomOut", len(sizes)) as progress:
        for k in sizes:
            C = _leading_map(s, t, index, k)
            index = _nearest_rows(s.vectors, t.vectors, C)
            progress.advance()
    return like_input(C, source.vectors), like_input(index, source.vectors)


def _leading_map(s: Spectrum, t: Spectrum, index: Tensor, k: int) -> Tensor:
    """Return the functional map (k, k) of a point map, for the leading k vectors."""
    return replace(t, vectors=t.vectors[:, :k]).project(s.vectors[index, :k])


def _point_map(index: ArrayLike, source: Tensor, target: Tensor) -> Tensor:
    """Check a point map (N_target,) for vectors (N_source, k_s) and (N_target, k_t)."""
    tensor = _checks.integers("index", index, "the source point of every target point").to(source.device)
    N, M = len(source), len(target)
    if tensor.shape != (M,):
        raise ValueError(
            f"`index` should have shape ({M},), one source point per target point; got {_checks.shape_of(tensor)}."
            + (" It seems to map the source to the target: exchange the two." if tensor.shape == (N,) else "")
        )
    smallest, largest = (int(end) for end in tensor.aminmax())
    if smallest < 0 or largest >= N:
        raise ValueError(
            f"`index` should number source points from 0 to {N - 1}; got numbers from {smallest} to {largest}."
        )
    return tensor


def _functional_map(C: ArrayLike, source: Tensor, target: Tensor, minimum: int = 1) -> Tensor:
    """Check a functional map of at least `minimum` and at most all vectors (N_source, K_s) and (N_target, K_t)."""
    tensor, (K_s, K_t) = _checks.as_tensor("C", C).to(source), (source.shape[-1], target.shape[-1])
    if tensor.ndim != 2 or not (minimum <= tensor.shape[0] <= K_t and minimum <= tensor.shape[1] <= K_s):
        raise ValueError(
            f"`C` should have shape (k_target, k_source), from ({minimum}, {minimum}) to ({K_t}, {K_s}), the numbers "
            f"of vectors of the spectra; got {_checks.shape_of(tensor)}."
        )
    _checks.finite("C", tensor, "Fit it with a larger `weight`.")
    return tensor


def _features(
    source_features: ArrayLike, target_features: ArrayLike, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Check features (N_source, d) and (N_target, d) for vectors (N_source, k_s) and (N_target, k_t)."""
    F_s = _checks.as_tensor("source_features", source_features).to(source)
    F_t = _checks.as_tensor("target_features", target_features).to(target)
    for name, tensor, N in (("source_features", F_s, len(source)), ("target_features", F_t, len(target))):
        if tensor.ndim != 2 or len(tensor) != N:
            got = _checks.shape_of(tensor)
            raise ValueError(f"`{name}` should have shape ({N}, d), one row per point; got {got}.")
        _checks.finite(name, tensor, "A map cannot be fitted to them.")
    if F_s.shape[1] != F_t.shape[1]:
        raise ValueError(
            f"`target_features` should have the d = {F_s.shape[1]} columns of `source_features`, in their order; "
            f"got {_checks.shape_of(F_t)}."
        )
    if not F_s.any():
        raise ValueError("`source_features` should not all be 0, as they then determine no map.")
    return F_s, F_t


def _basis_sizes(start: int, stop: int, step: int, num_vectors: int) -> list[int]:
    """Return start, start + step, …, stop, after checking them."""
    start, step = _checks.integer("start", start, 1), _checks.integer("step", step, 1)
    if not start <= _checks.integer("stop", stop, 1) <= num_vectors:
        raise ValueError(
            f"`stop` should be from `start`, {start}, to the number of vectors that both spectra have, {num_vectors}; "
            f"got {stop}. Compute more eigenpairs for a larger one."
        )
    return [*range(start, stop, step), int(stop)]

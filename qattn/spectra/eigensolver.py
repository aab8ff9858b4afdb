r"""Leading eigenpairs of a diffusion operator, by a Chebyshev-filtered block iteration.

Q is self-adjoint for its masses, and its leading eigenvalues crowd below 1 as those of a Laplacian crowd above 0. All
columns of a block share one pass of the kernel, which computes its exponentials once. Chebyshev polynomials of Q damp
the rest of the spectrum, and a Rayleigh–Ritz step separates the eigenvectors. Large clouds start from the eigenvectors
of coarse levels.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._progress import Progress
from qattn._types import ArrayLike
from qattn._warning import warn_caller
from qattn.kernels import GaussianKernel, MixtureKernel, OrientedKernel, VoxelKernel
from qattn.operators.diffusion import Diffusion
from qattn.spectra.coarse import coarse_operator
from qattn.spectra.linalg import differences, inner, norms, orthonormalize_, rotate_, rounding
from qattn.spectra.spectrum import Spectrum
from qattn.spectra.symmetric import SymmetricOperator, count_sites

__all__ = ["eigsh"]

_MAX_DENSE = 600  # sites up to which LAPACK computes all eigenpairs
_GUESS_DEGREE, _NOISE_DEGREE, _MAX_DEGREE = 12, 48, 192  # of the first filter, after a guess or noise; of any filter
_COARSE_TOL, _COARSE_PASSES = 0.1, 100  # for coarse levels
_MIN_GAP = 0.01  # relative gap of the first and last eigenvalue that residuals are compared with at least
_NOT_CONSTANT = 1e-3  # part of a vector that deflation leaves if it is more than a constant
_LANCZOS_STEPS = 12  # for the lower end of the spectrum


@eager
@torch.no_grad()
def eigsh(
    q: Diffusion, k: int, *, tol: float = 1e-2, max_iter: int = 500, init: Spectrum | ArrayLike | None = None
) -> Spectrum:
    r"""Compute the k leading eigenpairs Q φ = λ φ of a diffusion operator, by block passes of its kernel.

    Operators that keep constants, normalized by "sinkhorn" or "row", have a known first pair: λ = 1 and φ = 1. The
    normalization by "sinkhorn" is continued beyond the `tol` of the operator, to rounding or 1e-8, because frequencies
    −(2/σ²) log λ resolve the difference: Qφ of the given operator may differ from λφ by its `marginal_error`.

    Args:
        q: Operator of one cloud, mixture, grid or graph, with one bandwidth and any normalization; shape (N, N).
        k: Number of eigenpairs, at most the number of points with mass.
        tol: Accepted residuals ‖Qφ − λφ‖, relative to the smaller of λ and 1 − λ of the last pair. Eigenvalues of the
            Laplacian are then accurate to about tol², isolated eigenvectors to about k tol. For operators that do not
            keep constants, the first λ replaces the 1.
        max_iter: Maximum number of kernel passes, each with about 1.5 k columns. If `tol` is not reached by then, or
            because of rounding, a warning says so and the residuals show it.
        init: Spectrum or vectors (N, n) to start from, such as those of a similar cloud.

    Returns:
        A `Spectrum`, of arrays if the operator was made from arrays; identical for identical input. Its `sigma` is that
        of a Gaussian kernel of points or voxels, the effective one for surfaces, `kernel.effective_sigma(2)`, of a
        mixture, and None for other kernels and for the normalization "none".

    Examples:
        >>> points = torch.nn.functional.normalize(torch.randn(2000, 3), dim=-1)
        >>> spectrum = eigsh(diffusion(points, 0.2), 9)
        >>> spectrum.frequencies[1:4].round()  # 2 three times, on the unit sphere
        tensor([2., 2., 2.])
    """
    _checks.one_item("eigsh", q.shape, "eigsh(q[0], k)")
    options = {"`k`": k, "`tol`": tol, "`max_iter`": max_iter, "Whether there is `init`": init is not None}
    q.kernel.ranks.agree("eigsh", q.kernel.device, options)
    _checks.positive("`tol`", tol)
    _checks.integer("max_iter", max_iter, 1)
    num_sites = count_sites(q)
    if _checks.integer("k", k, 1) > num_sites:
        raise ValueError(f"`k` should be at most the number of points with mass, {num_sites}; got {k}.")
    guess = None if init is None else _starting_vectors(init, q.shape[-1])
    with Progress("Eigenpairs") as progress:
        spectrum, complaint = _solve(q, k, tol, max_iter, guess, progress)
    if complaint is not None:
        warn_caller(complaint)
    spectrum = replace(spectrum, sigma=_diffusion_bandwidth(q))
    return spectrum if isinstance(q.mass, Tensor) else spectrum.numpy()


def _starting_vectors(init: Spectrum | ArrayLike, num_rows: int) -> Tensor:
    tensor = _checks.as_tensor("init", init.vectors if isinstance(init, Spectrum) else init)
    if tensor.ndim != 2 or len(tensor) != num_rows:
        got = _checks.shape_of(tensor)
        raise ValueError(f"`init` should be a spectrum or vectors of shape ({num_rows}, n); got {got}.")
    _checks.finite("init", tensor, "Start without it.")
    return tensor


def _diffusion_bandwidth(q: Diffusion) -> float | None:
    """Return σ with Q ≈ exp(−σ²L/2), or None where the kernel or its normalization has none."""
    kernel = q.kernel
    if q.normalization == "none":
        return None
    if isinstance(kernel, MixtureKernel):
        return kernel.replace(*(tensor.detach() for tensor in kernel.tensors)).effective_sigma(2)
    return float(kernel.sigma.detach()) if isinstance(kernel, GaussianKernel | OrientedKernel | VoxelKernel) else None


def _solve(
    q: Diffusion, k: int, tol: float, max_iter: int, guess: Tensor | None, progress: Progress
) -> tuple[Spectrum, str | None]:
    """Return a spectrum, and a complaint if it is less accurate than requested."""
    num_sites = count_sites(q)
    num_columns = min(num_sites, k + max(8, k // 2))  # more than k widen the gap to the damped eigenvalues
    s = SymmetricOperator(q, num_columns, progress)
    num_unknown = k - s.keeps_constants
    if max(_MAX_DENSE, 3 * num_columns) >= num_sites or num_unknown == 0:
        return _solve_dense(s, num_unknown), None
    lowest = 0.0 if isinstance(s.kernel, GaussianKernel | OrientedKernel) else _lowest_eigenvalue(s)
    block, max_degree = _starting_block(s, num_columns, guess, progress)
    return _iterate(s, num_unknown, tol, max_iter, lowest, block, max_degree)


def _solve_dense(s: SymmetricOperator, k: int) -> Spectrum:
    """Return k eigenpairs by LAPACK in float64, from the matrix of all sites that have mass."""
    present = (s.weight > 0).nonzero()[:, 0]
    sizes = [len(index) for index in s.ranks.joined(present)]
    columns = s.weight.new_zeros(len(s.weight), sum(sizes))
    columns[present, sum(sizes[: s.ranks.rank]) + torch.arange(len(present), device=present.device)] = 1
    matrix = torch.cat(s.ranks.joined((s @ columns)[present].double()))
    if s.keeps_constants:  # moved below all other eigenvalues
        root = torch.cat(s.ranks.joined(s.root[present].double()))
        matrix = matrix - 2 * root @ root.T
    values, vectors = (s.ranks.first(x).flip(-1) for x in torch.linalg.eigh((matrix + matrix.T) / 2))
    u = s.weight.new_zeros(len(s.weight), k)
    u[present] = vectors[:, :k].to(u).split(sizes)[s.ranks.rank]
    return _spectrum(s, values[:k].to(u), u, s @ u if k else u)


def _spectrum(s: SymmetricOperator, values: Tensor, u: Tensor, product: Tensor) -> Spectrum:
    """Return the spectrum of eigenpairs (λ, u) of P S P, with the constant pair if that was deflated."""
    vectors, residuals = s.eigenvectors(u, values), s.residuals(values, u, product)
    largest = s.ranks.largest(vectors.mT.abs())
    sign = torch.full_like(largest, -2.0)  # on ranks that do not hold the largest entry
    if len(vectors):
        extreme = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
        sign = torch.where(extreme.abs() == largest, torch.sign(extreme), sign)
    vectors = s.ranks.maximum(sign) * vectors
    if s.keeps_constants:
        values, vectors = torch.cat([values.new_ones(1), values]), torch.cat([torch.ones_like(s.root), vectors], dim=1)
        residuals = torch.cat([residuals.new_full((1,), s.constant_error), residuals])
    return Spectrum(values, vectors, residuals, s.weight, ranks=s.ranks)


def _starting_block(
    s: SymmetricOperator, num_columns: int, guess: Tensor | None, progress: Progress
) -> tuple[Tensor, int]:
    """Return a block (N, num_columns) to start from, and the maximum degree of the first filter.

    The block holds the guess, or the eigenvectors of a coarse level, and noise in the remaining columns.
    """
    if guess is None and isinstance(s.kernel, GaussianKernel | OrientedKernel):
        coarse = coarse_operator(s.kernel, s.mass, num_columns)
        if coarse is not None:
            spectrum, _ = _solve(coarse, num_columns, _COARSE_TOL, _COARSE_PASSES, None, progress)
            guess = coarse.extend(s.kernel.points.detach()) @ spectrum.vectors
    noise = _noise(s, num_columns)
    if guess is None:
        return noise, _NOISE_DEGREE
    u = s.root * guess.to(s.root)
    u = u[:, norms(s.deflated(u), s.ranks) > _NOT_CONSTANT * norms(u, s.ranks)]
    return torch.cat([u[:, :num_columns], noise[:, : max(0, num_columns - u.shape[1])]], dim=1), _GUESS_DEGREE


def _noise(s: SymmetricOperator, num_columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(s.ranks.rank)
    return torch.randn(len(s.root), num_columns, generator=generator).to(s.root)


def _lowest_eigenvalue(s: SymmetricOperator) -> float:
    """Return an estimated lower bound of the spectrum, at most 0: the lowest Ritz value of Lanczos minus its residual.

    A filter amplifies what lies below its damped interval more than the eigenvectors that it should amplify.
    """
    v = s.deflated(torch.where(s.root > 0, _noise(s, 1), 0))
    basis = v / norms(v, s.ranks)
    rows, beta = [], 0.0
    for step in range(_LANCZOS_STEPS):
        w = s @ basis[:, -1:]
        rows.append(inner(basis, w, s.ranks)[:, 0])
        for _ in range(2):
            w = w - basis @ inner(basis, w, s.ranks).to(w.dtype)
        beta = float(norms(w, s.ranks))
        if beta <= torch.finfo(w.dtype).eps ** 0.5 * float(rows[0].abs()) or step == _LANCZOS_STEPS - 1:
            break
        basis = torch.cat([basis, w / beta], dim=1)
    gram = torch.stack([torch.nn.functional.pad(row, (0, len(rows) - len(row))) for row in rows])
    values, vectors = (s.ranks.first(x) for x in torch.linalg.eigh(gram))  # reads the lower triangle
    return min(0.0, float(values[0]) - beta * abs(float(vectors[-1, 0])))


def _iterate(
    s: SymmetricOperator, k: int, tol: float, max_iter: int, lowest: float, block: Tensor, max_degree: int
) -> tuple[Spectrum, str | None]:
    """Filter a block until the residuals of k Ritz pairs are within `tol`; return them, and a complaint if they fail.

    Residuals need not fall below the errors of the normalization and of rounding, which limit the accuracy anyway.
    """
    floor = max(rounding(s.weight.dtype), 0.01 * s.normalization_error)
    values, u, product = _rayleigh_ritz(s, block)
    previous, failures, complaint = math.inf, 0, None
    while True:
        residuals = differences(product, values, u, s.ranks)
        worst, largest, last = float(residuals[:k].amax()), float(values[0]), float(values[k - 1])
        gap = 1 - last if s.keeps_constants else max(largest - last, _MIN_GAP * largest)
        goal = max(tol * min(abs(last), gap), floor * (1 if s.keeps_constants else largest))
        if worst <= goal:
            break
        failures = failures + 1 if worst > 0.8 * previous and max_degree == _MAX_DEGREE else 0
        if worst > 0.3 * previous:  # slow: longer filters need fewer Rayleigh–Ritz steps
            max_degree = min(_MAX_DEGREE, 2 * max_degree)
        lower, upper = _damped_interval(values, residuals, lowest)
        gain = 2 * worst / goal
        degree = _filter_degree(values, k, lower, upper, gain)
        if degree > max_degree:
            degree, upper = max_degree, min(upper, _largest_upper_end(lower, largest, max_degree, gain))
        if failures == 3 or s.num_passes + degree > max_iter:
            remedies = ["Raise `tol` or `max_iter`"]
            remedies += ["take a larger `sigma`"] * hasattr(s.kernel, "sigma")
            remedies += ["take float64"] * (s.weight.dtype == torch.float32)
            complaint = (
                f"eigsh stopped after {s.num_passes} passes with residuals of up to {worst:.1e}, above {goal:.1e}. "
                f"{', or '.join(remedies)}."
            )
            break
        previous = worst
        block = _filter_(s, u, product, lower, upper, largest, degree)
        del u, product  # which the filter has overwritten
        values, u, product = _rayleigh_ritz(s, block)
    return _spectrum(s, values[:k], u[:, :k], product[:, :k]), complaint


def _rayleigh_ritz(s: SymmetricOperator, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Ritz values in descending order, Ritz vectors u and S u, of the span of a block (N, n), overwritten."""
    basis = orthonormalize_(s.deflated_(block), s.ranks)
    product = s @ basis
    gram = inner(basis, product, s.ranks)  # in float64, as it separates the eigenvectors
    values, rotation = (s.ranks.first(x).flip(-1) for x in torch.linalg.eigh((gram + gram.T) / 2))
    return values.to(block.dtype), rotate_(basis, rotation), rotate_(product, rotation)


def _filter_(
    s: SymmetricOperator, block: Tensor, product: Tensor, lower: float, upper: float, largest: float, degree: int
) -> Tensor:
    """Return p(S) X for X = `block` and S X = `product`, p the Chebyshev polynomial of `degree` of [lower, upper].

    p is small on the interval and scaled to p(largest) = 1 at every step, without which it would overflow. Both blocks
    are overwritten.
    """
    center, half_width = (lower + upper) / 2, (upper - lower) / 2
    scale = first_scale = half_width / (largest - center)
    previous, current = block, product.add_(block, alpha=-center).mul_(scale / half_width)
    for _ in range(degree - 1):
        next_scale = 1 / (2 / first_scale - scale)
        step = (s @ current).add_(current, alpha=-center)
        previous.mul_(-scale * next_scale).add_(step, alpha=2 * next_scale / half_width)
        previous, current = current, previous
        scale = next_scale
    return current


def _damped_interval(values: Tensor, residuals: Tensor, lowest: float) -> tuple[float, float]:
    """Return the interval to damp: from the lowest eigenvalue to the last Ritz value minus its residual."""
    last = float(values[-1])
    lower = min(lowest, last)
    return lower, max(last - float(residuals[-1]), lower + 1e-6 * float(values[0] - lower))


def _filter_degree(values: Tensor, k: int, lower: float, upper: float, gain: float) -> int:
    """Return the smallest degree that amplifies the k-th Ritz vector by `gain` over the damped interval.

    It is capped so that the first Ritz vector is not amplified so much that rounding buries the k-th under it.
    """
    first, last = (math.acosh(max(1.0, (2 * float(values[n]) - upper - lower) / (upper - lower))) for n in (0, k - 1))
    sufficient = math.log(2 * gain) / max(last, 1e-9)  # cosh(n x) ≈ ½ e^{n x}
    cap = -0.5 * math.log(torch.finfo(values.dtype).eps) / max(first - last, 1e-9)
    return max(1, int(min(math.ceil(max(2.0, sufficient)), cap, _MAX_DEGREE)))


def _largest_upper_end(lower: float, largest: float, degree: int, gain: float) -> float:
    """Return the largest end of a damped interval over which a filter amplifies the largest eigenvalue by `gain`.

    It solves cosh(n arcosh x) = gain for x = (2 largest − lower − upper) / (upper − lower).
    """
    x = math.cosh(math.acosh(max(gain, 2.0)) / degree)
    return (2 * largest - lower + lower * x) / (1 + x)

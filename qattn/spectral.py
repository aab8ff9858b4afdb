r"""The leading eigenpairs of a diffusion operator, and what they tell of the Laplacian: Q ≈ exp(−σ²L/2).

Q is self-adjoint for its masses, and its leading eigenvalues crowd below 1, where a Laplacian's crowd above 0. They are
found by a block method: all columns go through one pass of the kernel, whose exponentials are paid once for all of
them. Chebyshev polynomials of Q damp what is below the wanted eigenvalues, and a Rayleigh–Ritz step sorts out the rest.

Large clouds start from small ones: the operator of centres of neighbouring points, with their masses and a bandwidth
that they can resolve, has nearly the same modes (Theorem 4.5 of the paper), and they extend to all points by one
application. What they lack is rough, and short filters remove it.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._eager import eager
from qattn._progress import Progress
from qattn.kernels.base import GaussianPoints
from qattn.operators import Diffusion, diffusion
from qattn.ranks import ALONE, Ranks
from qattn.solver import log_of_mass
from qattn.tiling import kd_order

__all__ = ["Spectrum", "eigsh", "laplacian_eigenvalues"]

_FEW = 600  # points of which all eigenpairs are computed
_COARSER = 8  # times fewer points on the next level
_LEAST = 4000  # points that are not worth a coarser level
_NEIGHBOURS = 8.0  # Σ_j K_ij that a coarser level should have at least
_SHORT, _LONG, _MOST_DEGREE = 12, 48, 192  # most degrees of filters: the first after a good start, or noise; and any
_ROUNDING = 30.0  # residuals, in units of rounding, below which nothing is gained


@dataclass(frozen=True)
class Spectrum:
    """Eigenpairs Q φ = λ φ, orthonormal for the masses: Φᵀ diag(m) Φ = I.

    Attributes:
        values: The eigenvalues λ, from the largest down, shape (k,).
        vectors: The eigenvectors φ, shape (N, k); of each the entry that is largest in size is positive.
        residuals: ‖Qφ − λφ‖ in the norm of the masses, shape (k,).
        mass: The masses m that they are orthonormal for, shape (N,), of sum 1.
        ranks: Who holds the sites, if these are a shard of them.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    mass: Tensor
    ranks: Ranks = ALONE

    def __len__(self) -> int:
        return len(self.values)

    def project(self, signal: Tensor) -> Tensor:
        """The coefficients Φᵀ diag(m) f, (k,) or (k, C), of a signal (N,) or (N, C)."""
        weighted = self.mass * signal if signal.ndim == 1 else self.mass[:, None] * signal
        return self.ranks.sum(self.vectors.T @ weighted)

    def power(self, t: float, signal: Tensor) -> Tensor:
        """Φ Λ^t Φᵀ diag(m) f for any real t ≥ 0: Q^t of what the modes span; the rest is dropped."""
        _checks.not_negative("t", t)
        return self._applied(self.values.clamp(min=0) ** t, signal)

    def minus_log(self, signal: Tensor) -> Tensor:
        """−log Q of what the modes span: Φ (−log Λ) Φᵀ diag(m) f, about σ²/2 times the Laplacian of f."""
        if not (self.values > 0).all():
            raise ValueError(
                f"{int((self.values <= 0).sum())} of the {len(self)} eigenvalues are 0 or less, and have no logarithm. "
                "Take fewer, or a smaller bandwidth."
            )
        return self._applied(-torch.log(self.values), signal)

    def _applied(self, factors: Tensor, signal: Tensor) -> Tensor:
        coefficients = self.project(signal)
        return self.vectors @ (factors * coefficients if signal.ndim == 1 else factors[:, None] * coefficients)


def laplacian_eigenvalues(values: Any, sigma: float) -> Any:
    r"""Estimates −(2/σ²) log λ of the eigenvalues of the Laplacian, from those of Q.

    Args:
        values: Eigenvalues λ of Q, shape (k,), a tensor or an array.
        sigma: The bandwidth σ; `MixtureKernel.effective_sigma` for mixtures.

    Returns:
        Their estimates in the order of `values`; ∞ where λ ≤ 0, which no Laplacian explains, with a warning.

    Example:
        >>> laplacian_eigenvalues(torch.tensor([1.0, 0.99]), sigma=0.1)
        tensor([0.0000, 2.0101])
    """
    given = _checks.floating("values", values)
    sigma = float(_checks.bandwidth(sigma, given.double()))
    count = int((given <= 0).sum())
    if count:
        warnings.warn(
            f"{count} of the {given.numel()} eigenvalues of Q are 0 or less, and stand for none of a Laplacian: they "
            "are ∞ here. Take fewer, or a smaller bandwidth, or a kernel that is positive semidefinite.",
            stacklevel=2,
        )
    found = -2 / sigma**2 * torch.log(given.clamp(min=0))
    found = torch.where(found == 0, 0, found)  # no −0
    return found if isinstance(values, Tensor) else found.numpy(force=True)


class _Symmetric:
    """S = √w Q /√w, symmetric for the weight w = m e^{r−l} that Q is self-adjoint for; counts its passes."""

    def __init__(self, q: Diffusion, progress: Progress) -> None:
        weight = torch.exp(log_of_mass(q._mass) + q._right - q._left).detach().expand(q.shape[-1])
        self.ranks = q.kernel.ranks
        self.mass = weight / self.ranks.total(weight)
        self._q, self._progress = q, progress
        self._root = self.mass.sqrt()[:, None]  # (N, 1)
        self._inverse = torch.where(self._root > 0, 1 / torch.where(self._root > 0, self._root, 1), 0)
        self.passes = 0

    def __matmul__(self, u: Tensor) -> Tensor:
        self.passes += 1
        result = self._root * self._q._apply(self._inverse * u)
        self._progress.advance()
        return result

    def from_vectors(self, vectors: Tensor) -> Tensor:
        """√w φ."""
        return self._root * vectors

    def to_vectors(self, u: Tensor, values: Tensor) -> Tensor:
        """φ; at points without mass, by the operator: φ = Qφ / λ."""
        vectors = self._inverse * u
        if self.ranks.largest((self.mass == 0).to(vectors)) == 0:
            return vectors
        extended = self._q._apply(vectors) / values
        return torch.where(self._root > 0, vectors, extended)


def _orthonormal(block: Tensor, ranks: Ranks) -> Tensor:
    """An orthonormal basis of what the columns (N, n) span; over ranks by the QR of what each has left of its own."""
    own = torch.linalg.qr(block)
    if ranks.is_alone:
        return own.Q
    parts = ranks.joined(own.R)
    turns = ranks.first(torch.linalg.qr(torch.cat(parts)).Q).split([len(part) for part in parts])
    return own.Q @ turns[ranks.rank]


def _norms(x: Tensor, ranks: Ranks) -> Tensor:
    """Those of the columns (N, n), shape (n,)."""
    return ranks.total(x.mT.square()).sqrt()


def _ritz(s: _Symmetric, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz values from the largest down, Ritz vectors u and S u, of an orthonormal basis of the block."""
    basis = _orthonormal(block, s.ranks)
    applied = s @ basis
    # Sums over all points in float64, chunk by chunk: they decide which modes are told apart.
    chunks = zip(basis.split(2**16), applied.split(2**16), strict=True)
    gram = s.ranks.sum(torch.stack([a.double().T @ b.double() for a, b in chunks]).sum(0))
    values, turn = (s.ranks.first(x) for x in torch.linalg.eigh((gram + gram.T) / 2))
    values, turn = values.flip(0).to(block.dtype), turn.flip(1).to(block.dtype)
    return values, basis @ turn, applied @ turn


def _filtered(s: _Symmetric, block: Tensor, applied: Tensor, low: float, cut: float, degree: int) -> Tensor:
    """p(S) X for a block X and S X, p the Chebyshev polynomial of a degree that is small on [low, cut] and 1 at 1."""
    centre, half = (low + cut) / 2, (cut - low) / 2
    sigma = first = half / (1 - centre)  # scales p(1) to 1 at every step, or it would overflow
    previous, current = block, (applied - centre * block) * (sigma / half)
    for _ in range(degree - 1):
        following = 1 / (2 / first - sigma)
        step = (s @ current) - centre * current
        previous, current = current, step * (2 * following / half) - previous * (sigma * following)
        sigma = following
    return current


@eager
@torch.no_grad()
def eigsh(
    q: Diffusion, k: int, *, tol: float = 1e-2, max_iter: int = 500, init: Spectrum | Tensor | None = None
) -> Spectrum:
    r"""The k leading eigenpairs of a diffusion operator, by block passes of its kernel.

    Args:
        q: The operator of one cloud, mixture, grid or graph, with one bandwidth; any normalisation. Made with a `tol`
            of 1e-5 rather than 1e-3, its smallest frequencies are right too.
        k: How many.
        tol: Residuals ‖Qφ − λφ‖ that are acceptable, relative to 1 − λ or λ of the last, whichever is less: eigenvalues
            of the Laplacian are then right to about tol², and isolated eigenvectors to about k tol.
        max_iter: The most passes of the kernel, each with some more than k columns. Missing `tol` by then, or by
            rounding, is warned of and shows in the residuals.
        init: A spectrum or vectors (N, n) to start from, as of a similar cloud.

    Returns:
        A `Spectrum`; the same for the same input.

    Example:
        >>> points = torch.nn.functional.normalize(torch.randn(2000, 3), dim=-1)
        >>> spectrum = eigsh(diffusion(points, 0.2), 9)
        >>> laplacian_eigenvalues(spectrum.values, 0.2)[1:4].round()  # 2 three times, on the unit sphere
        tensor([2., 2., 2.])
    """
    if len(q.shape) > 2:
        raise ValueError(f"`eigsh` takes one cloud with one bandwidth; this operator has shape {tuple(q.shape)}.")
    asked = {"`k`": k, "`tol`": tol, "`max_iter`": max_iter, "Whether there is `init`": init is not None}
    q.kernel.ranks.agree("eigsh", q.kernel.device, asked)
    _checks.positive("`tol`", tol)
    _checks.integer("max_iter", max_iter, 1)
    N = _count(q)
    if _checks.integer("k", k, 1) > N:
        raise ValueError(f"`k` should be at most the number of points, {N}; got {k}.")
    with Progress("Eigenpairs") as progress:
        spectrum, complaint = _solved(q, k, tol, max_iter, init, progress)
    if complaint:
        warnings.warn(complaint, stacklevel=4)  # past `eager` and `no_grad`
    return spectrum


def _solved(
    q: Diffusion, k: int, tol: float, max_iter: int, init: Spectrum | Tensor | None, progress: Progress
) -> tuple[Spectrum, str | None]:
    """A spectrum, and what is to be said if it is not as exact as was asked for."""
    N = _count(q)
    size = min(N, k + max(8, k // 2))  # more columns widen the gap to what is damped
    s = _Symmetric(q.for_channels(size), progress)
    if max(_FEW, 3 * size) >= N:
        return _all(s, k), None
    # Eigenvalues are no more exact than the solver was, nor than rounding.
    floor = _ROUNDING * torch.finfo(s.mass.dtype).eps
    if q.normalization == "sinkhorn":
        floor = max(floor, 0.01 * float(q._error))
    return _leading(s, k, tol, floor, max_iter, *_start(q, s, size, init, progress))


def _count(q: Diffusion) -> int:
    """The number of sites, of all ranks."""
    return int(q.kernel.ranks.sum(torch.tensor(q.shape[-1], device=q.kernel.device)))


def _all(s: _Symmetric, k: int) -> Spectrum:
    """By LAPACK, in float64."""
    sizes = [len(mass) for mass in s.ranks.joined(s.mass)]
    identity = torch.eye(sum(sizes), dtype=s.mass.dtype, device=s.mass.device)
    dense = torch.cat(s.ranks.joined((s @ identity.split(sizes)[s.ranks.rank]).double()))
    values, u = (s.ranks.first(x) for x in torch.linalg.eigh((dense + dense.T) / 2))
    values, u = values.flip(0)[:k].to(s.mass), u.flip(1)[:, :k].to(s.mass).split(sizes)[s.ranks.rank]
    return _spectrum(s, values, u, s @ u)


def _spectrum(s: _Symmetric, values: Tensor, u: Tensor, applied: Tensor) -> Spectrum:
    vectors = s.to_vectors(u, values)
    largest = s.ranks.largest(vectors.mT.abs())
    sign = torch.full_like(largest, -2.0)  # of ranks that do not have the largest
    if len(vectors):
        own = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
        sign = torch.where(own.abs() == largest, torch.sign(own), sign)
    return Spectrum(values, s.ranks.maximum(sign) * vectors, _norms(applied - values * u, s.ranks), s.mass, s.ranks)


def _start(
    q: Diffusion, s: _Symmetric, size: int, init: Spectrum | Tensor | None, progress: Progress
) -> tuple[Tensor, int]:
    """A block (N, size) to start from, and the degree of the first filter.

    The block is what is given, or the modes of a coarser level, and noise for what lacks.
    """
    N, like = q.shape[-1], s.mass
    given = init.vectors if isinstance(init, Spectrum) else init
    if given is None:
        given = _coarse(q, size, progress)
    noise = torch.randn(N, size, generator=torch.Generator().manual_seed(s.ranks.rank)).to(like)
    if given is None:
        return noise, _LONG
    if given.ndim != 2 or len(given) != N:
        raise ValueError(f"`init` should be a spectrum or vectors of shape ({N}, n); got {tuple(given.shape)}.")
    u = s.from_vectors(given.to(like))
    return torch.cat([u[:, :size], noise[:, : max(0, size - u.shape[1])]], dim=1), _SHORT


def _coarse(q: Diffusion, size: int, progress: Progress) -> Tensor | None:
    """The modes of a coarser level, at all points; None for kernels of other things than points, or of few of them."""
    kernel, N = q.kernel, q.shape[-1]
    if not isinstance(kernel, GaussianPoints) or max(_LEAST, 4 * _COARSER * size) > _count(q):
        return None
    points, mass = kernel.points.detach(), q._mass.detach().expand(N)
    centres, masses = _centres(points, mass)  # on each rank of its own points
    # Centres see fewer neighbours than points, by as much as they are fewer: the bandwidth makes up for it.
    zero = torch.zeros(N, dtype=kernel.dtype, device=mass.device)
    some = kernel.at(centres[:: max(1, len(centres) // 256)]).attend(zero).lse
    neighbours = float(torch.exp(torch.cat(kernel.ranks.joined(some))).median()) / _COARSER
    sigma = float(kernel.sigma) * max(1.0, math.sqrt(_NEIGHBOURS / neighbours))
    small = diffusion(kernel.moved(centres, sigma), mass=masses)
    spectrum, _ = _solved(small, size, 0.1, 100, None, progress)
    return small.extend(points) @ spectrum.vectors


def _centres(points: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Centres of mass of `_COARSER` neighbouring points each, and their masses.

    A random sample would have a density of its own, and modes that differ from those of the points all over; these
    have the density of the points, and modes that differ in detail only.
    """
    present = (mass > 0).nonzero()[:, 0]
    order = present[kd_order(points[present].cpu()[None])[0].to(present.device)]
    groups = order[: len(order) // _COARSER * _COARSER].reshape(-1, _COARSER)
    masses = mass[groups]
    total = masses.sum(1)
    return (masses[..., None] * points[groups]).sum(1) / total[:, None], total


def _leading(
    s: _Symmetric, k: int, tol: float, floor: float, max_iter: int, block: Tensor, longest: int
) -> tuple[Spectrum, str | None]:
    """From a block to start with, until all residuals are within `tol`, or below the floor."""
    values, u, applied = _ritz(s, block)
    before, failures, complaint = math.inf, 0, None
    while True:
        residuals = _norms(applied - values * u, s.ranks)
        worst, last = float(residuals[:k].amax()), float(values[k - 1])
        goal = max(tol * min(last, 1 - last), floor)
        if worst <= goal:
            break
        failures = failures + 1 if worst > 0.8 * before and longest == _MOST_DEGREE else 0
        if worst > 0.3 * before:  # slow: longer filters, which cost fewer Rayleigh–Ritz steps
            longest = min(_MOST_DEGREE, 2 * longest)
        low, cut = _damped(values, residuals)
        gain = 2 * worst / goal
        degree = _degree(values, k, low, cut, gain)
        if degree > longest:
            degree, cut = longest, min(cut, _cut(low, longest, gain))
        if failures == 3 or s.passes + degree > max_iter:
            complaint = (
                f"eigsh stopped after {s.passes} passes with residuals of up to {worst:.1e}, above {goal:.1e}. Raise "
                "`tol` or `max_iter`; or take a larger `sigma`, a smaller `tol` of the operator, or float64."
            )
            break
        before = worst
        values, u, applied = _ritz(s, _filtered(s, u, applied, low, cut, degree))
    return _spectrum(s, values[:k], u[:, :k], applied[:, :k]), complaint


def _damped(values: Tensor, residuals: Tensor) -> tuple[float, float]:
    """The interval to damp: what is below the last Ritz value, by as much as that one may be wrong."""
    last = float(values[-1])
    low = min(0.0, last)
    return low, max(last - float(residuals[-1]), low + 1e-6)


def _degree(values: Tensor, k: int, low: float, cut: float, gain: float) -> int:
    """That of the filter which raises the last wanted vector by `gain` over all that is damped.

    None that raises the first of them so much more that the last would be lost beside it, to rounding.
    """
    first, last = (math.acosh(max(1.0, (2 * float(values[n]) - cut - low) / (cut - low))) for n in (0, k - 1))
    wanted = math.log(2 * gain) / max(last, 1e-9)  # cosh(n x) ≈ ½ e^{n x}
    visible = -0.5 * math.log(torch.finfo(values.dtype).eps) / max(first - last, 1e-9)
    return max(1, int(min(math.ceil(max(2.0, wanted)), visible, _MOST_DEGREE)))


def _cut(low: float, degree: int, gain: float) -> float:
    """Where a filter of that degree ends to damp if it raises what is near 1 by `gain` over all below.

    cosh(n arcosh x) = gain for x = (2 − low − cut) / (cut − low).
    """
    x = math.cosh(math.acosh(max(gain, 2.0)) / degree)
    return (2 - low + low * x) / (1 + x)

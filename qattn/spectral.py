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
from collections.abc import Callable
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
from qattn.solver import log_of_mass, sinkhorn
from qattn.tiling import kd_order

__all__ = ["Spectrum", "eigsh", "laplacian_eigenvalues"]

_FEW = 600  # points of which all eigenpairs are computed
_COARSER = 8  # times fewer points on the next level
_LEAST = 4000  # points that are not worth a coarser level
_NEIGHBOURS = 8.0  # Σ_j K_ij that a coarser level should have at least
_SHORT, _LONG, _MOST_DEGREE = 12, 48, 192  # most degrees of filters: the first after a good start, or noise; and any
_CHUNK = 2**16  # rows that are summed in float64 at a time
_ROUNDING = 30.0  # residuals, in units of rounding, below which nothing is gained
_NORMALIZED = 1e-8  # the mean of |Q1 − 1| at which normalizing further is not worth a pass
_MOST_STEPS = 40  # of normalizing further
_KEPT = 1e-3  # the norm of Q1 − 1 below which constants count as kept
_CONSTANT = 1e-3  # of a vector, which is left beside the constant one if it is no other
_LANCZOS = 12  # steps, for the low end of a spectrum
_LEAST_GAP = 0.01  # between the first and the last eigenvalue, relative, that residuals are compared with
_ALONE = 0.05  # Σ_j K_ij below which a coarser level would have to be wider than modes are


@dataclass(frozen=True)
class Spectrum:
    """Eigenpairs Q φ = λ φ, orthonormal for the masses: Φᵀ diag(m) Φ = I.

    The fields are tensors, or arrays if the operator was made of arrays. Methods return an array for a signal that is
    one, and a tensor for a tensor, in the wider dtype of signal and vectors.

    Attributes:
        values: The eigenvalues λ, from the largest down, shape (k,).
        vectors: The eigenvectors φ, shape (N, k); of each the entry that is largest in size is positive.
        residuals: ‖Qφ − λφ‖ in the norm of the masses, shape (k,).
        mass: The masses m that they are orthonormal for, shape (N,), of sum 1.
        ranks: Who holds the sites, if these are a shard of them.
    """

    values: Any
    vectors: Any
    residuals: Any
    mass: Any
    ranks: Ranks = ALONE

    def __len__(self) -> int:
        return len(self.values)

    def to_torch(self) -> "Spectrum":
        """The same spectrum with fields that are tensors."""
        values, vectors, residuals, mass = (_checks.floating(name, getattr(self, name)) for name in _FIELDS)
        return Spectrum(values, vectors, residuals, mass, self.ranks)

    def to_numpy(self) -> "Spectrum":
        """The same spectrum with fields that are arrays."""
        tensors = self.to_torch()
        values, vectors, residuals, mass = (getattr(tensors, name).numpy(force=True) for name in _FIELDS)
        return Spectrum(values, vectors, residuals, mass, self.ranks)

    def as_held(self, tensor: Tensor) -> Any:
        """A tensor as it is, or as an array if the fields of this spectrum are arrays."""
        return tensor if isinstance(self.vectors, Tensor) else tensor.numpy(force=True)

    def project(self, signal: Any) -> Any:
        """The coefficients Φᵀ diag(m) f, (k,) or (k, C), of a signal (N,) or (N, C)."""
        return _as_given(self.to_torch()._projected(self._signal(signal)), signal)

    def power(self, t: float, signal: Any) -> Any:
        """Φ Λ^t Φᵀ diag(m) f for any real t ≥ 0: Q^t of what the modes span; the rest is dropped."""
        _checks.not_negative("t", t)
        return self._applied(lambda values: values.clamp(min=0) ** t, signal)

    def minus_log(self, signal: Any) -> Any:
        """−log Q of what the modes span: Φ (−log Λ) Φᵀ diag(m) f, about σ²/2 times the Laplacian of f."""
        if not (self.values > 0).all():
            raise ValueError(
                f"{int((self.values <= 0).sum())} of the {len(self)} eigenvalues are 0 or less, and have no logarithm. "
                "Take fewer, or a smaller bandwidth."
            )
        return self._applied(lambda values: -torch.log(values), signal)

    def _signal(self, signal: Any) -> Tensor:
        vectors = _checks.floating("vectors", self.vectors)
        values = _checks.signal(signal, torch.Size((len(vectors), len(vectors))), vectors.device)
        return values.to(torch.promote_types(values.dtype, vectors.dtype))

    def _projected(self, signal: Tensor) -> Tensor:
        weighted = self.mass * signal if signal.ndim == 1 else self.mass[:, None] * signal
        return self.ranks.sum(_inner(self.vectors, weighted)).to(weighted.dtype)

    def _applied(self, function: Callable[[Tensor], Tensor], signal: Any) -> Any:
        """Φ g(Λ) Φᵀ diag(m) f."""
        own, f = self.to_torch(), self._signal(signal)
        coefficients, factors = own._projected(f), function(own.values)
        scaled = factors * coefficients if f.ndim == 1 else factors[:, None] * coefficients
        return _as_given(own.vectors.to(scaled.dtype) @ scaled, signal)


_FIELDS = ("values", "vectors", "residuals", "mass")


def _as_given(result: Tensor, signal: Any) -> Any:
    return result if isinstance(signal, Tensor) else result.numpy(force=True)


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
    """S = √w Q /√w, symmetric for the weight w = m e^{r−l} that Q is self-adjoint for; counts its passes.

    If Q keeps constants, S √w = √w is known, and is taken out: products are with P S P, P = I − √w √wᵀ. Nothing has to
    be resolved then that is closer to 1 than rounding allows.
    """

    def __init__(self, q: Diffusion, progress: Progress) -> None:
        weight = torch.exp(log_of_mass(q._mass) + q._right - q._left).detach().expand(q.shape[-1])
        self.ranks = q.kernel.ranks
        self.mass = weight / self.ranks.total(weight)
        self._q, self._progress = q, progress
        self._root = self.mass.sqrt()[:, None]  # (N, 1)
        self._inverse = torch.where(self._root > 0, 1 / torch.where(self._root > 0, self._root, 1), 0)
        self.passes = 0
        self._keeps_constants = False
        if q.normalization in ("sinkhorn", "row"):
            self._off = self @ self._root - self._root  # S √w − √w, which is 0 but for errors
            self.error = float(_norms(self._off, self.ranks))  # the norm of Q1 − 1
            self._keeps_constants = self.error <= _KEPT

    @property
    def keeps_constants(self) -> bool:
        """Whether the constant mode is known, and taken out."""
        return self._keeps_constants

    @property
    def root(self) -> Tensor:
        """√w, (N, 1)."""
        return self._root

    def __matmul__(self, u: Tensor) -> Tensor:
        self.passes += 1
        result = self._root * self._q._apply(self._inverse * self.projected(u))
        self._progress.advance()
        return self.projected(result)

    def projected(self, u: Tensor) -> Tensor:
        """P u."""
        if not self._keeps_constants:
            return u
        return u - self._root * self.ranks.sum(_inner(self._root, u)).to(u.dtype)

    def residuals(self, values: Tensor, u: Tensor, applied: Tensor) -> Tensor:
        """‖S u − λ u‖ of columns u with P S P u, shape (k,)."""
        own = _norms(applied - values * u, self.ranks)
        if not self._keeps_constants:
            return own
        return torch.hypot(own, self.ranks.sum(_inner(self._off, u))[0].to(own.dtype))

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


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b in float64, for columns a (N, n) and b (N,) or (*batch, N, m): chunk by chunk, as a copy would be large."""
    axis = min(b.ndim, 2)
    chunks = zip(a.split(_CHUNK), b.split(_CHUNK, dim=-axis), strict=True)
    return torch.stack([x.double().T @ y.double() for x, y in chunks]).sum(0)


def _norms(x: Tensor, ranks: Ranks) -> Tensor:
    """Those of the columns (N, n), shape (n,)."""
    return ranks.total(x.mT.square()).sqrt()


def _ritz(s: _Symmetric, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz values from the largest down, Ritz vectors u and S u, of an orthonormal basis of the block."""
    basis = _orthonormal(s.projected(block), s.ranks)
    applied = s @ basis
    gram = s.ranks.sum(_inner(basis, applied))  # which decides what modes are told apart
    values, turn = (s.ranks.first(x) for x in torch.linalg.eigh((gram + gram.T) / 2))
    values, turn = values.flip(0).to(block.dtype), turn.flip(1).to(block.dtype)
    return values, basis @ turn, applied @ turn


def _filtered(s: _Symmetric, block: Tensor, applied: Tensor, low: float, cut: float, top: float, degree: int) -> Tensor:
    """p(S) X for a block X and S X, p the Chebyshev polynomial of a degree that is small on [low, cut], 1 at `top`."""
    centre, half = (low + cut) / 2, (cut - low) / 2
    sigma = first = half / (top - centre)  # scales p(top) to 1 at every step, or it would overflow
    previous, current = block, (applied - centre * block) * (sigma / half)
    for _ in range(degree - 1):
        following = 1 / (2 / first - sigma)
        step = (s @ current) - centre * current
        previous, current = current, step * (2 * following / half) - previous * (sigma * following)
        sigma = following
    return current


@eager
@torch.no_grad()
def eigsh(q: Diffusion, k: int, *, tol: float = 1e-2, max_iter: int = 500, init: Any = None) -> Spectrum:
    r"""The k leading eigenpairs of a diffusion operator, by block passes of its kernel.

    Of an operator that keeps constants, normalized by "sinkhorn" or "row", the first pair is known: λ = 1, φ = 1.
    "sinkhorn" is taken further here than the `tol` of the operator, to rounding or 1e-8, as frequencies
    −(2/σ²) log λ would see the difference: Qφ of the given one may differ from λφ by its `marginal_error`.

    Args:
        q: The operator of one cloud, mixture, grid or graph, with one bandwidth; any normalization.
        k: How many, at most the number of points with mass.
        tol: Residuals ‖Qφ − λφ‖ that are acceptable, relative to 1 − λ or λ of the last, whichever is less: eigenvalues
            of the Laplacian are then right to about tol², and isolated eigenvectors to about k tol. Of operators that
            do not keep constants, the first λ stands for the 1.
        max_iter: The most passes of the kernel, each with some more than k columns. Missing `tol` by then, or by
            rounding, is warned of and shows in the residuals.
        init: A spectrum or vectors (N, n) to start from, as of a similar cloud.

    Returns:
        A `Spectrum`, of arrays if the operator was made of arrays; the same for the same input.

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
    count = _count(q)
    if _checks.integer("k", k, 1) > count:
        raise ValueError(f"`k` should be at most the number of points with mass, {count}; got {k}.")
    start = None if init is None else _checks.vectors("init", getattr(init, "vectors", init), q._left)
    with Progress("Eigenpairs") as progress:
        spectrum, complaint = _solved(q, k, tol, max_iter, start, progress)
    if complaint:
        warnings.warn(complaint, stacklevel=4)  # past `eager` and `no_grad`
    return spectrum.to_numpy() if q._is_numpy else spectrum


def _solved(
    q: Diffusion, k: int, tol: float, max_iter: int, init: Tensor | None, progress: Progress
) -> tuple[Spectrum, str | None]:
    """A spectrum, and what is to be said if it is not as exact as was asked for."""
    count = _count(q)
    size = min(count, k + max(8, k // 2))  # more columns widen the gap to what is damped
    q = _normalized(q.for_channels(size))
    s = _Symmetric(q, progress)
    wanted = k - s.keeps_constants
    if max(_FEW, 3 * size) >= count or wanted == 0:
        return _all(s, wanted), None
    # Eigenvalues are no more exact than the solver was, nor than rounding.
    floor = _ROUNDING * torch.finfo(s.mass.dtype).eps
    if q.normalization == "sinkhorn":
        floor = max(floor, 0.01 * float(q._error))
    lowest = 0.0 if isinstance(q.kernel, GaussianPoints) else _lowest(s)
    spectrum, complaint = _leading(s, wanted, tol, floor, max_iter, lowest, *_start(q, s, size, init, progress))
    if complaint:
        remedies = ["Raise `tol` or `max_iter`"]
        remedies += ["take a larger `sigma`"] * hasattr(q.kernel, "sigma")
        remedies += ["take float64"] * (s.mass.dtype == torch.float32)
        complaint = f"{complaint} {', or '.join(remedies)}."
    return spectrum, complaint


def _count(q: Diffusion) -> int:
    """The number of sites with mass, of all ranks."""
    return int(q.kernel.ranks.sum((q._mass.detach().expand(q.shape[-1]) > 0).sum()))


def _normalized(q: Diffusion) -> Diffusion:
    """The operator with rows that sum to one as exactly as its kernel can, if they are meant to."""
    if q.normalization == "row":
        left = -q.kernel.attend(q._right + log_of_mass(q._mass).expand(q.shape[-1])).lse
        return q._with(left=left)
    if q.normalization != "sinkhorn":
        return q
    goal = max(_ROUNDING * torch.finfo(q.kernel.dtype).eps, _NORMALIZED)
    # Each pass divides the error by five, about; the first only tells what it is by this method of the kernel.
    steps = math.ceil(math.log(max(float(q._error), goal) / goal) / math.log(5))
    result = sinkhorn(q.kernel, q._mass, tol=0, max_iter=min(_MOST_STEPS, 2 + steps), init=q._left)
    if not result.marginal_error <= q._error:  # an indefinite kernel, far from a solution
        return q
    left = result.potential
    return q._with(left=left, right=left, result=result)


def _all(s: _Symmetric, k: int) -> Spectrum:
    """By LAPACK, in float64, on the points that have mass."""
    present = (s.mass > 0).nonzero()[:, 0]
    sizes = [len(index) for index in s.ranks.joined(present)]
    columns = torch.zeros(len(s.mass), sum(sizes), dtype=s.mass.dtype, device=s.mass.device)
    columns[present, sum(sizes[: s.ranks.rank]) + torch.arange(len(present), device=present.device)] = 1
    dense = torch.cat(s.ranks.joined((s @ columns)[present].double()))
    if s.keeps_constants:  # to the end of the spectrum, below all others
        root = torch.cat(s.ranks.joined(s.root[present].double()))
        dense = dense - 2 * root @ root.T
    values, u = (s.ranks.first(x) for x in torch.linalg.eigh((dense + dense.T) / 2))
    values, own = values.flip(0)[:k].to(s.mass), u.flip(1)[:, :k].to(s.mass).split(sizes)[s.ranks.rank]
    u = s.mass.new_zeros(len(s.mass), k)
    u[present] = own
    return _spectrum(s, values, u, s @ u if k else u)


def _spectrum(s: _Symmetric, values: Tensor, u: Tensor, applied: Tensor) -> Spectrum:
    vectors, residuals = s.to_vectors(u, values), s.residuals(values, u, applied)
    largest = s.ranks.largest(vectors.mT.abs())
    sign = torch.full_like(largest, -2.0)  # of ranks that do not have the largest
    if len(vectors):
        own = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
        sign = torch.where(own.abs() == largest, torch.sign(own), sign)
    vectors = s.ranks.maximum(sign) * vectors
    if s.keeps_constants:
        values, vectors = torch.cat([values.new_ones(1), values]), torch.cat([torch.ones_like(s.root), vectors], dim=1)
        residuals = torch.cat([residuals.new_full((1,), s.error), residuals])
    return Spectrum(values, vectors, residuals, s.mass, s.ranks)


def _start(q: Diffusion, s: _Symmetric, size: int, init: Tensor | None, progress: Progress) -> tuple[Tensor, int]:
    """A block (N, size) to start from, and the degree of the first filter.

    The block is what is given, or the modes of a coarser level, and noise for what lacks.
    """
    N, like = q.shape[-1], s.mass
    given = _coarse(q, size, progress) if init is None else init
    noise = torch.randn(N, size, generator=torch.Generator().manual_seed(s.ranks.rank)).to(like)
    if given is None:
        return noise, _LONG
    u = s.from_vectors(given.to(like))
    # The constant mode, where it is known, is no start for another.
    left, whole = (_norms(x, s.ranks) for x in (s.projected(u), u))
    u = u[:, left > _CONSTANT * whole]
    return torch.cat([u[:, :size], noise[:, : max(0, size - u.shape[1])]], dim=1), _SHORT


def _lowest(s: _Symmetric) -> float:
    """A lower bound, in practice, of the spectrum, at most 0: by a few steps of Lanczos and the residual of the last.

    What is below the interval that a filter damps would be raised by it, more than all that is wanted.
    """
    v = torch.randn(len(s.mass), 1, generator=torch.Generator().manual_seed(s.ranks.rank)).to(s.mass)
    v = s.projected(torch.where(s.root > 0, v, 0))
    basis = v / _norms(v, s.ranks)
    rows, beta = [], 0.0
    for step in range(_LANCZOS):
        w = s @ basis[:, -1:]
        rows.append(s.ranks.sum(_inner(basis, w))[:, 0])
        for _ in range(2):
            w = w - basis @ s.ranks.sum(_inner(basis, w)).to(w.dtype)
        beta = float(_norms(w, s.ranks))
        if beta <= torch.finfo(w.dtype).eps ** 0.5 * float(rows[0].abs()) or step == _LANCZOS - 1:
            break
        basis = torch.cat([basis, w / beta], dim=1)
    gram = torch.stack([torch.nn.functional.pad(row, (0, len(rows) - len(row))) for row in rows])
    values, vectors = (s.ranks.first(x) for x in torch.linalg.eigh(gram))  # of the lower triangle
    return min(0.0, float(values[0]) - beta * abs(float(vectors[-1, 0])))


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
    if neighbours < _ALONE:  # points see nobody: there are no modes to speak of
        return None
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
    s: _Symmetric, k: int, tol: float, floor: float, max_iter: int, lowest: float, block: Tensor, longest: int
) -> tuple[Spectrum, str | None]:
    """From a block to start with, until all residuals are within `tol`, or below the floor."""
    values, u, applied = _ritz(s, block)
    before, failures, complaint = math.inf, 0, None
    while True:
        residuals = _norms(applied - values * u, s.ranks)
        worst, last, top = float(residuals[:k].amax()), float(values[k - 1]), float(values[0])
        gap = 1 - last if s.keeps_constants else max(top - last, _LEAST_GAP * top)
        goal = max(tol * min(abs(last), gap), floor * (1 if s.keeps_constants else top))
        if worst <= goal:
            break
        failures = failures + 1 if worst > 0.8 * before and longest == _MOST_DEGREE else 0
        if worst > 0.3 * before:  # slow: longer filters, which cost fewer Rayleigh–Ritz steps
            longest = min(_MOST_DEGREE, 2 * longest)
        low, cut = _damped(values, residuals, lowest)
        gain = 2 * worst / goal
        degree = _degree(values, k, low, cut, gain)
        if degree > longest:
            degree, cut = longest, min(cut, _cut(low, top, longest, gain))
        if failures == 3 or s.passes + degree > max_iter:
            complaint = f"eigsh stopped after {s.passes} passes with residuals of up to {worst:.1e}, above {goal:.1e}."
            break
        before = worst
        values, u, applied = _ritz(s, _filtered(s, u, applied, low, cut, top, degree))
    return _spectrum(s, values[:k], u[:, :k], applied[:, :k]), complaint


def _damped(values: Tensor, residuals: Tensor, lowest: float) -> tuple[float, float]:
    """The interval to damp: what is below the last Ritz value, by as much as that one may be wrong."""
    last = float(values[-1])
    low = min(lowest, last)
    return low, max(last - float(residuals[-1]), low + 1e-6 * float(values[0] - low))


def _degree(values: Tensor, k: int, low: float, cut: float, gain: float) -> int:
    """That of the filter which raises the last wanted vector by `gain` over all that is damped.

    None that raises the first of them so much more that the last would be lost beside it, to rounding.
    """
    first, last = (math.acosh(max(1.0, (2 * float(values[n]) - cut - low) / (cut - low))) for n in (0, k - 1))
    wanted = math.log(2 * gain) / max(last, 1e-9)  # cosh(n x) ≈ ½ e^{n x}
    visible = -0.5 * math.log(torch.finfo(values.dtype).eps) / max(first - last, 1e-9)
    return max(1, int(min(math.ceil(max(2.0, wanted)), visible, _MOST_DEGREE)))


def _cut(low: float, top: float, degree: int, gain: float) -> float:
    """Where a filter of that degree ends to damp if it raises what is near `top` by `gain` over all below.

    cosh(n arcosh x) = gain for x = (2 top − low − cut) / (cut − low).
    """
    x = math.cosh(math.acosh(max(gain, 2.0)) / degree)
    return (2 * top - low + low * x) / (1 + x)

"""Random configurations of the whole public interface against a dense oracle in float64; no tests.

    python tests/adversarial.py --count 10000 [--first SEED] [--seconds S]

A seed draws clouds, masses, bandwidths, a kernel or a sum of two, a normalization, a signal and what is checked. The
oracle knows the tensors as they are given, in their dtype, and shares no code with the library. Operators are compared
at their own potential, which is exact at any potential, and the potential by the row sums that it leaves.
"""

import argparse
import math
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import qattn
from qattn.kernels.gaussian import cost, fourier
from qattn.kernels.gaussian.fourier import FourierError

CHECKS = ("values", "transpose", "extend", "power", "applied", "space", "error", "sums", "gradients")
SIXTEEN = {torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of the largest value: rounded in and out
NORMALIZATIONS = ("sinkhorn", "sinkhorn", "sinkhorn", "row", "symmetric", "none")

Leaves = dict[str, Tensor]


class Draw:
    """Random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self._random, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def chance(self, p: float) -> bool:
        return self._random.random() < p

    def choice(self, options: Any) -> Any:
        return self._random.choice(list(options))

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def log_uniform(self, low: float, high: float) -> float:
        return 10 ** self._random.uniform(low, high)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self._generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self._generator)


@dataclass
class Term:
    """A kernel of a sum: what it is made of, how the library makes it, and log K by the definition.

    Attributes:
        leaves: Tensors as they are given.
        make: The kernel of some leaves.
        log: log K (*batch, N, M) of leaves in float64, at new points if any are given.
        entries: K itself, of kernels that have entries that are 0.
        tol: The error of lse that is asked for.
        parts: The names of what gradients are checked by.
        is_fourier: Whether its error may be absolute, a part of all weights.
        reach: −log K to which the tolerance is promised: sums of Gaussians vanish faster than some profiles.
    """

    name: str
    leaves: Leaves
    make: Callable[[Leaves], Any]
    tol: float
    log: Callable[[Leaves, Tensor | None], Tensor] | None = None
    entries: Callable[[Leaves], Tensor] | None = None
    parts: tuple[str, ...] = ()
    is_fourier: bool = False
    reach: float = math.inf


@dataclass
class Problem:
    """A problem drawn from a seed."""

    seed: int
    check: str
    dtype: torch.dtype
    terms: list[Term]
    factors: list[float | None]
    batch: tuple[int, ...]
    size: int
    mass: Tensor | None
    normalization: str
    tol: float
    signal: Any
    points: Tensor | None
    extent: float
    sigma: Tensor | None
    options: dict[str, Any]
    by_points: bool
    is_costly: bool
    notes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        signal = self.signal
        told = {
            "check": self.check,
            "kernel": " + ".join(f"{f or 1:.2g} {t.name}" for f, t in zip(self.factors, self.terms, strict=True)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "N": self.size,
            "batch": self.batch,
            "normalization": self.normalization,
            "tol": self.tol,
            "signal": f"{getattr(signal, 'dtype', '')} {tuple(signal.shape)}",
            **self.notes,
        }
        return ", ".join(f"{name}={value}" for name, value in told.items())


class Beyond(Exception):  # noqa: N818 (nothing is wrong)
    """The result is more than a float of the signal's dtype holds."""


class Wrong(AssertionError):  # noqa: N818 (as its messages read)
    """The library and the oracle differ."""


# What is drawn.


def cloud(draw: Draw, N: int, d: int) -> tuple[Tensor, str]:
    """A cloud of an extent of about 1."""
    kind = draw.choice(
        ("uniform", "uniform", "clusters", "line", "plane", "sphere", "duplicates", "needle", "one place")
    )
    if kind == "clusters":
        count = draw.integer(1, 5)
        widths = 10 ** (-4 * draw.uniform(count))
        which = (draw.uniform(N) * count).long()
        return draw.uniform(count, d)[which] + widths[which, None] * draw.normal(N, d), kind
    if kind == "line":
        return draw.uniform(N, 1) * torch.nn.functional.normalize(draw.normal(1, d), dim=-1), kind
    if kind == "plane":
        return draw.uniform(N, 2) @ draw.normal(2, d), kind
    if kind == "sphere":
        return torch.nn.functional.normalize(draw.normal(N, d), dim=-1), kind
    if kind == "duplicates":
        count = draw.integer(1, 4)
        return draw.uniform(count, d)[(draw.uniform(N) * count).long()], kind
    if kind == "needle":
        return draw.uniform(N, d) * torch.tensor([1.0] + [1e-4] * (d - 1)), kind
    if kind == "one place":
        return draw.uniform(1, d).expand(N, d).clone(), kind
    return draw.uniform(N, d), kind


def masses(draw: Draw, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """Masses with points that have none, at least one in each cloud that has."""
    kind = draw.choice(("equal", "even", "decades", "huge", "tiny"))
    m = draw.uniform(*shape) + 0.1
    if kind == "equal":
        m = torch.ones(shape, dtype=torch.float64)
    if kind == "decades":
        m = 10 ** (-10 * draw.uniform(*shape))
    m = m * {"huge": 1e36, "tiny": 1e-30}.get(kind, 1.0)
    if draw.chance(0.5):
        m = torch.where(draw.uniform(*shape) < draw.choice((0.05, 0.5, 0.95)), 0, m)
        kind += " with zeros"
    m[..., draw.integer(0, shape[-1] - 1)] = m.amax() if m.any() else 1.0
    if len(shape) > 1 and draw.chance(0.2):  # a cloud with one point of mass
        m[0] = torch.where(torch.arange(shape[-1]) == 0, m.amax(), 0)
    return m, kind


def signals(draw: Draw, N: int, batch: tuple[int, ...], is_plain: bool) -> tuple[Any, str]:
    """A signal of some shape, dtype and mean; arrays, booleans and views among them."""
    shape = draw.choice(((N,), (N, 1), (N, 3), (N, 5), (*batch, N, 2), (2, *([1] * len(batch)), N, 2)))
    s = draw.normal(*shape)
    s = s + draw.choice((0, 0, 1, 10, 100))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16))
    if not is_plain and dtype != torch.float16:  # which ends at 65,504
        s = s * draw.choice((1, 1, 1e-3, 1e3))
    s = s.to(dtype)
    form = "plain" if is_plain else draw.choice(("plain", "plain", "array", "boolean", "strided"))
    if form == "array" and dtype != torch.bfloat16:
        return s.numpy(), form
    if form == "boolean":
        return s > s.float().mean(), form
    if form == "strided":
        return torch.stack([s, s], dim=-1)[..., 0], form
    return s, form


def spectral_range(draw: Draw, heads: int | None, extent: float) -> Tensor:
    """σ from 1e-4 to 1e4 of the extent, one or several."""
    if heads is None:
        return torch.tensor(extent * draw.log_uniform(-4, 4), dtype=torch.float64)
    return torch.tensor([extent * draw.log_uniform(-4, 4) for _ in range(heads)], dtype=torch.float64)


# Kernels by their definition.


def differences(x: Tensor, sigma: Tensor, new: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x_i − x_j) / σ, (*batch, N, M, d), and σ with the axes of pairs."""
    targets = x if new is None else new
    if sigma.ndim:
        targets, x, sigma = targets[..., None, :, :], x[..., None, :, :], sigma[:, None, None]
    return (targets[..., :, None, :] - x[..., None, :, :]) / sigma[..., None], sigma


def log_gaussian(leaves: Leaves, new: Tensor | None) -> Tensor:
    apart, _ = differences(leaves["points"], leaves["sigma"], new)
    return -0.5 * apart.square().sum(-1)


def distances(leaves: Leaves, new: Tensor | None) -> Tensor:
    apart, _ = differences(leaves["points"], leaves["sigma"], new)
    square = apart.square().sum(-1)
    is_zero = square == 0  # where the root has no derivative
    return torch.where(is_zero, 0, torch.sqrt(torch.where(is_zero, 1, square)))


def log_matern(nu: float) -> Callable[[Leaves, Tensor | None], Tensor]:
    def log(leaves: Leaves, new: Tensor | None) -> Tensor:
        a = math.sqrt(2 * nu) * distances(leaves, new)
        if nu == 0.5:
            return -a
        if nu == 1.5:
            return torch.log1p(a) - a
        if nu == 2.5:
            return torch.log1p(a + a.square() / 3) - a
        from scipy.special import kve

        tiny = 1e-7
        bessel = torch.from_numpy(kve(nu, a.clamp(min=tiny).numpy()))
        found = (1 - nu) * math.log(2) - math.lgamma(nu) + nu * torch.log(a.clamp(min=tiny)) + torch.log(bessel) - a
        return torch.where(a < tiny, 0, found)

    return log


def log_rational(alpha: float) -> Callable[[Leaves, Tensor | None], Tensor]:
    def log(leaves: Leaves, new: Tensor | None) -> Tensor:
        apart, _ = differences(leaves["points"], leaves["sigma"], new)
        return -alpha * torch.log1p(apart.square().sum(-1) / (2 * alpha))

    return log


def matrices(covariances: Tensor, means: Tensor) -> Tensor:
    """Full covariances (*batch, N, d, d)."""
    d = means.shape[-1]
    if covariances.ndim == means.ndim - 1:
        return covariances[..., None, None] * torch.eye(d, dtype=means.dtype)
    return torch.diag_embed(covariances) if covariances.ndim == means.ndim else (covariances + covariances.mT) / 2


def log_overlap(leaves: Leaves, new: Tensor | None) -> Tensor:
    means, sigma = leaves["points"], leaves["sigma"]
    own = matrices(leaves["covariances"], means)
    other = own if new is None else torch.zeros_like(own[..., :1, :, :]).expand(*own.shape[:-3], new.shape[-2], -1, -1)
    if sigma.ndim:
        own, other = own[..., None, :, :, :], other[..., None, :, :, :]
    apart, s = differences(means, sigma, new)
    C = (
        torch.eye(means.shape[-1], dtype=means.dtype)
        + (other[..., :, None, :, :] + own[..., None, :, :, :]) / s[..., None, None] ** 2
    )
    root = torch.linalg.cholesky(C)
    turned = torch.linalg.solve_triangular(root, apart[..., None], upper=False)[..., 0]
    return -0.5 * turned.square().sum(-1) - torch.log(root.diagonal(dim1=-2, dim2=-1)).sum(-1)


# Terms.


def gaussian_term(draw: Draw, x: Tensor, sigma: Tensor, tol: float) -> Term:
    options = [("auto", "auto"), ("exact", "auto"), ("exact", "native"), ("exact", "sdpa"), ("exact", "reference")]
    options += [("tiles", "auto"), ("tiles", "native"), ("auto", "auto")]
    options += [("fourier", "auto")] * 2 * (x.shape[-1] <= 3)
    method, backend = draw.choice(options)

    def make(leaves: Leaves) -> Any:
        return qattn.GaussianKernel(leaves["points"], leaves["sigma"], method=method, backend=backend, tol=tol)

    return Term(
        f"Gaussian({method}, {backend})", {"points": x, "sigma": sigma}, make, tol, log_gaussian,
        parts=("points", "sigma"), is_fourier=method in ("fourier", "auto"),
    )  # fmt: skip


def radial_term(draw: Draw, x: Tensor, sigma: Tensor, tol: float) -> Term:
    kind = draw.choice(("exponential", "matern", "rational"))
    method = draw.choice(("auto", "exact", "gaussians"))
    backend = draw.choice(("auto", "reference")) if method == "exact" else "auto"
    nu, alpha = draw.choice((0.5, 1.5, 2.5)), draw.choice((0.5, 1.0, 3.0))
    if kind == "matern" and method == "gaussians" and draw.chance(0.3):
        nu = draw.choice((0.8, 3.3))
    options = {"method": method, "backend": backend, "tol": tol}

    def make(leaves: Leaves) -> Any:
        own = leaves["points"], leaves["sigma"]
        if kind == "exponential":
            return qattn.ExponentialKernel(*own, **options)
        if kind == "matern":
            return qattn.MaternKernel(*own, nu, **options)
        return qattn.RationalQuadraticKernel(*own, alpha, **options)

    log = {"exponential": log_matern(0.5), "matern": log_matern(nu), "rational": log_rational(alpha)}[kind]
    # A sum of Gaussians is as good as its values; that of a profile with a kink has no derivative at 0 to compare.
    is_smooth = kind == "rational" or (kind == "matern" and nu in (1.5, 2.5))
    parts = ("points", "sigma") if is_smooth or method == "exact" else ()
    name = f"{kind}(nu={nu}, alpha={alpha}, {method}, {backend})"
    reach = 80.0 if kind != "rational" and method != "exact" else math.inf
    return Term(name, {"points": x, "sigma": sigma}, make, tol, log, None, parts, method != "exact", reach)


def mixture_term(draw: Draw, x: Tensor, sigma: Tensor, tol: float) -> Term:
    kind = draw.choice(("isotropic", "diagonal", "full"))
    method = draw.choice(("auto", "exact", *(("tiles",) if x.shape[-1] <= 3 else ())))
    *batch, N, d = x.shape
    size = float(sigma.min()) ** 2 * 10 ** (4 * draw.uniform(*batch, N) - 3)
    if kind != "full":  # whose entries, rounded, would not be positive definite
        size = size * draw.choice((1.0, 1.0, 1e10))
    if kind == "isotropic":
        covariances = size
    elif kind == "diagonal":
        covariances = size[..., None] * draw.uniform(*batch, N, d)
    else:
        axes = draw.normal(*batch, N, d, d) * 10 ** (-2 * draw.uniform(*batch, N, 1, d))
        covariances = size[..., None, None] * axes @ axes.mT
    leaves = {"points": x, "covariances": covariances.to(x.dtype), "sigma": sigma}

    def make(leaves: Leaves) -> Any:
        c = leaves["covariances"]
        c = (c + c.mT) / 2 if kind == "full" else c
        return qattn.MixtureKernel(leaves["points"], c, leaves["sigma"], method=method, tol=tol)

    return Term(
        f"Mixture({kind}, {method})", leaves, make, tol, log_overlap, parts=("points", "covariances", "sigma")
    )  # fmt: skip


def voxel_term(draw: Draw, dtype: torch.dtype, tol: float) -> tuple[Term, int]:
    axes = draw.integer(1, 3)
    shape = [draw.integer(1, {1: 100, 2: 16, 3: 7}[axes]) for _ in range(axes)]
    weights = draw.uniform(*shape) * (draw.uniform(*shape) < draw.choice((0.1, 0.5, 1.0)))
    weights.view(-1)[0] = 0.5
    weights = weights.to(dtype)
    spacing = [draw.log_uniform(-1, 1) for _ in shape]
    sigma = torch.tensor(max(spacing) * draw.log_uniform(-2, 2), dtype=dtype)
    method = draw.choice(("auto", "blocks", "points"))
    index = weights.nonzero()
    x = index.double() * torch.tensor(spacing, dtype=torch.float64)

    def make(leaves: Leaves) -> Any:
        return qattn.VoxelKernel(weights, leaves["sigma"], spacing, method=method, tol=tol)

    def log(leaves: Leaves, new: Tensor | None) -> Tensor:
        return log_gaussian({"points": x, "sigma": leaves["sigma"]}, None)

    term = Term(f"Voxels({shape}, {method})", {"sigma": sigma}, make, tol, log, parts=("sigma",))
    return term, len(index)


def graph_term(draw: Draw, N: int, dtype: torch.dtype) -> Term:
    order = torch.triu_indices(N, N, 1)
    order = order[:, draw.uniform(order.shape[1]) < draw.choice((0.02, 0.2, 1.0))]
    weights = 10 ** (draw.choice((0, 2)) * draw.normal(order.shape[1])).to(dtype)
    eps = draw.log_uniform(-6, 0)
    form = draw.choice(("edges", "dense", "sparse"))
    both = torch.cat([order, order.flip(0)], dim=1)

    def adjacency(w: Tensor) -> Tensor:
        return w.new_zeros(N, N).index_put((both[0], both[1]), torch.cat([w, w]))

    def make(leaves: Leaves) -> Any:
        w = leaves["edges"]
        if form == "dense":
            return qattn.GraphKernel(adjacency(w), eps=eps)
        weight = torch.cat([w, w])
        if form == "sparse":
            return qattn.GraphKernel(torch.sparse_coo_tensor(both, weight, (N, N), check_invariants=True), eps=eps)
        return qattn.GraphKernel(both, weight, eps=eps, num_vertices=N)

    def entries(leaves: Leaves) -> Tensor:
        A = adjacency(leaves["edges"])
        return torch.diag_embed(A.sum(-1)) + A + eps

    return Term(f"Graph({form}, eps={eps:.1g})", {"edges": weights}, make, 1e-6, entries=entries, parts=("edges",))


def matrix_term(draw: Draw, N: int, dtype: torch.dtype, batch: tuple[int, ...]) -> Term:
    """A positive definite matrix with entries that are 0."""
    is_sparse = not batch and draw.chance(0.5)
    factor = draw.uniform(*batch, N, 4) * (draw.uniform(*batch, N, 4) < 0.4)
    similarity = (factor @ factor.mT + 0.1 * torch.eye(N)).to(dtype)
    similarity = (similarity + similarity.mT) / 2

    def make(leaves: Leaves) -> Any:
        s = (leaves["similarity"] + leaves["similarity"].mT) / 2
        return qattn.MatrixKernel(s.to_sparse() if is_sparse else s)

    def entries(leaves: Leaves) -> Tensor:
        return (leaves["similarity"] + leaves["similarity"].mT) / 2

    parts = () if is_sparse else ("similarity",)
    name = f"Matrix({'sparse' if is_sparse else 'dense'})"
    return Term(name, {"similarity": similarity}, make, 1e-6, entries=entries, parts=parts)


def placed(draw: Draw, batch: tuple[int, ...], N: int, d: int) -> tuple[Tensor, float, dict[str, Any]]:
    """Clouds (*batch, N, d) before they are moved away, their extent and what they are."""
    kinds, clouds = [], []
    for _ in range(math.prod(batch)):
        x, kind = cloud(draw, N, d)
        clouds.append(x)
        kinds.append(kind)
    x = torch.stack(clouds).reshape(*batch, N, d)
    size = draw.choice((1.0, 1.0, 1e-3, 1e3))
    extent = float((x.amax(-2) - x.amin(-2)).amax()) or 1.0
    return x * size, extent * size, {"clouds": "/".join(kinds), "d": d}


def draw_problem(seed: int) -> Problem:
    """The configuration of a seed."""
    draw = Draw(seed)
    check = draw.choice((*CHECKS, "values", "gradients"))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    is_gradient = check == "gradients"
    tol = draw.log_uniform(-6, -3) if not is_gradient else 0.0
    kernel_tol = 1e-6 if is_gradient else draw.log_uniform(-6, -3)
    kinds = ["gaussian", "gaussian", "gaussian", "radial", "mixture", "voxels", "graph", "matrix", "sum", "sum"]
    kind = draw.choice(kinds)
    if check == "space":
        kind = "gaussian"
    if check == "extend":
        kind = draw.choice(("gaussian", "radial", "mixture", "sum"))
    N = draw.integer(1, draw.choice((4, 60, 150 if is_gradient else 400)))
    d = draw.integer(1, 4)
    has_points = kind not in ("voxels", "graph", "matrix")
    clouds = (draw.integer(1, 3),) if has_points and draw.chance(0.3) else ()
    heads = draw.integer(1, 3) if has_points and draw.chance(0.3) else None
    if kind == "mixture":
        N = min(N, 150)
    if math.prod(clouds) * (heads or 1) > 3:
        N = min(N, 150)
    x, extent, notes = placed(draw, clouds, N, d)
    sigma = spectral_range(draw, heads, extent).to(dtype)
    heads_shape = () if heads is None else (heads,)
    batch = (*clouds, *heads_shape)
    factors: list[float | None] = [None]
    terms: list[Term] = []
    if kind == "voxels":
        term, N = voxel_term(draw, dtype, kernel_tol)
        terms, batch = [term], ()
    mass, far = None, torch.zeros(*clouds, N, dtype=torch.bool)
    if draw.chance(0.75):
        mass, notes["masses"] = masses(draw, draw.choice(((N,), (*clouds, N))))
        mass = mass.to(dtype)
        if has_points and draw.chance(0.5):  # points without mass, far away
            far = (mass == 0).expand(*clouds, N) & (draw.uniform(*clouds, N) < 0.5)
            way = torch.nn.functional.normalize(draw.normal(*clouds, N, d), dim=-1)
            x = torch.where(far[..., None], x + extent * 10 ** (4 * draw.uniform(*clouds, N, 1)) * way, x)
            notes["far"] = int(far.sum())
        if heads is not None and mass.ndim > 1:
            mass = mass[..., None, :]
    shift = draw.choice((0.0, 0.0, 1e3, 1e6))
    x = (x + shift * draw.uniform(d)).to(dtype)
    if has_points:
        notes |= {"shift": shift, "extent": f"{extent:.2g}", "sigma": [f"{s:.3g}" for s in sigma.reshape(-1).tolist()]}
        makers = {"gaussian": gaussian_term, "radial": radial_term, "mixture": mixture_term}
        if kind in makers:
            terms = [makers[kind](draw, x, sigma, kernel_tol)]
    if kind == "graph":
        terms = [graph_term(draw, N, dtype)]
    if kind == "matrix":
        batch = draw.choice(((), (), (2,)))
        terms = [matrix_term(draw, N, dtype, batch)]
    if kind == "sum":
        two = draw.choice((sigma, spectral_range(draw, heads, extent).to(dtype)))
        options = [
            lambda: gaussian_term(draw, x, two, kernel_tol),
            lambda: radial_term(draw, x, two, kernel_tol),
            lambda: (
                mixture_term(draw, x[..., :150, :], two, kernel_tol) if N <= 150 else radial_term(draw, x, two, 1e-4)
            ),
        ]
        if check not in ("extend", "space"):
            options += [lambda: graph_term(draw, N, dtype), lambda: matrix_term(draw, N, dtype, ())]
        terms = [gaussian_term(draw, x, sigma, kernel_tol), draw.choice(options)()]
        factors = [draw.choice((None, draw.log_uniform(-3, 3))) for _ in terms]
        if draw.chance(0.5):
            terms, factors = terms[::-1], factors[::-1]
    signal, notes["form"] = signals(draw, N, batch, is_gradient)
    normalization = draw.choice(NORMALIZATIONS[: 4 if check == "space" else 6])
    if check in ("applied", "sums"):
        normalization = "sinkhorn"
    by_points = kind == "gaussian" and not is_gradient and draw.chance(0.4)
    if by_points:
        terms = [replace(terms[0], tol=min(10 * tol, 1e-3))]
    options: dict[str, Any] = {"max_iter": 80}
    if is_gradient:
        options = {"max_iter": 50, "adjoint": draw.choice(("implicit", "implicit", "unroll"))}
        notes["adjoint"] = options["adjoint"]
    elif draw.chance(0.2):
        options = {"max_iter": 200, "iteration": "plain"}
    is_costly = draw.chance(0.4)
    notes |= {"kernel_tol": f"{terms[0].tol:.1g}", "by_points": by_points, "costly": is_costly}
    return Problem(
        seed, check, dtype, terms, factors, batch, N, mass, normalization, tol, signal,
        x if has_points else None, extent, sigma if has_points else None, options, by_points, is_costly, notes,
    )  # fmt: skip


# The oracle.


def double(leaves: Leaves) -> Leaves:
    return {name: x.detach().double() for name, x in leaves.items()}


def log_matrix(p: Problem, new: Tensor | None = None) -> Tensor:
    """log K (*batch, N, M), −inf where K is 0."""
    total = None
    for term, factor in zip(p.terms, p.factors, strict=True):
        leaves = double(term.leaves)
        log = torch.log(term.entries(leaves)) if term.log is None else term.log(leaves, new)
        log = log + math.log(factor or 1.0)
        total = log if total is None else torch.logaddexp(total, log)
    assert total is not None
    return total.expand(*p.batch, *total.shape[-2:])


def mass_of(p: Problem, q: Any) -> Tensor:
    """Masses (*batch, N), in float64."""
    if p.mass is None:
        return torch.as_tensor(q.mass).detach().double().expand(*p.batch, p.size)
    return p.mass.double().expand(*p.batch, p.size)


def log_or_absent(mass: Tensor) -> Tensor:
    has = mass > 0
    return torch.where(has, torch.log(torch.where(has, mass, 1)), -torch.inf)


def lse_of(log: Tensor, bias: Tensor) -> Tensor:
    """log Σ_j K_ij e^{b_j}, −inf for rows without any weight."""
    scores = log + bias[..., None, :]
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    return top[..., 0] + torch.log(torch.exp(scores - top).sum(-1))


@dataclass
class Truth:
    """diag(e^left) K diag(e^right) by its logarithms, at the potential of an operator."""

    log: Tensor
    mass: Tensor
    left: Tensor
    right: Tensor
    is_stochastic: bool

    @property
    def lse(self) -> Tensor:
        return lse_of(self.log, self.right)

    @property
    def matrix(self) -> Tensor:
        """Q (*batch, N, M); rows of points without mass are those of softmax where constants are kept."""
        left = self.left
        if self.is_stochastic:
            left = torch.where(self.mass > 0, left, -self.lse)
        left = torch.where(left.abs() < torch.inf, left, 0)
        return torch.exp(left[..., :, None] + self.log + self.right[..., None, :])


def truth_of(p: Problem, q: Any) -> Truth:
    log, mass = log_matrix(p), mass_of(p, q)
    log_mass = log_or_absent(mass)
    potential = torch.as_tensor(q.potential).detach().double().expand(*p.batch, p.size)
    plain = lse_of(log, log_mass)
    zero = torch.zeros_like(plain)
    left, right = {
        "sinkhorn": (potential, potential),
        "row": (-plain, zero),
        "symmetric": (-0.5 * plain, -0.5 * plain),
        "none": (zero, zero),
    }[p.normalization]
    right = torch.where(log_mass > -torch.inf, right + log_mass, -torch.inf)
    return Truth(log, mass, left, right, p.normalization in ("sinkhorn", "row"))


def values_of(p: Problem, absent: Tensor | None = None) -> Tensor:
    """The signal in float64 as (*batch, N, C), 0 at points that are absent."""
    v = torch.as_tensor(p.signal).double()
    v = v[:, None] if v.ndim == 1 else v
    return v if absent is None else torch.where(absent[..., None], 0, v)


def shaped(p: Problem, result: Tensor) -> Tensor:
    """The shape that the library gives: without an axis of channels for a signal (N,)."""
    return result[..., 0] if p.signal.ndim == 1 else result


# What is promised.


def kernel_tol(p: Problem) -> float:
    return max(term.tol for term in p.terms)


def signal_dtype(p: Problem) -> torch.dtype:
    dtype = torch.as_tensor(p.signal).dtype
    return torch.float32 if dtype == torch.bool else dtype


def signal_eps(p: Problem) -> float:
    """Error that rounding of the signal may cause, relative to the largest of its values."""
    return SIXTEEN.get(signal_dtype(p), 4 * torch.finfo(signal_dtype(p)).eps)


def rounding(p: Problem, truth: Truth, lse: Tensor) -> Tensor:
    """The relative error of rows (*batch, N, 1) by rounding of scores and potentials in the dtype of the kernel.

    Scores of rows far from all points are taken in float64 once they are too large for float32 to be right to the
    tolerance, so that they count up to that size only.
    """
    eps = torch.finfo(p.dtype).eps
    finite = truth.right[truth.right > -torch.inf]
    top = float(finite.max())
    size = float(finite.abs().max()) + (top - lse).abs().nan_to_num(0, 0, 0).clamp(
        max=max(200, kernel_tol(p) / eps / 8)
    )
    potential = torch.where(truth.left.abs() < 1e3, truth.left.abs(), 0).amax(-1)
    return 8 * eps * (16 + size + potential[..., None])[..., None]


def is_sure(p: Problem, truth: Truth, lse: Tensor) -> Tensor:
    """Rows (*batch, N) that float64 determines: scores of points too far away do not tell one key from another."""
    finite = torch.where(truth.right > -torch.inf, truth.right, -torch.inf).amax(-1, keepdim=True)
    gap = (finite - lse).abs()
    is_in_reach = gap < min(term.reach for term in p.terms)
    return (is_in_reach & (gap * torch.finfo(torch.float64).eps * 8 < kernel_tol(p))) | (lse == -torch.inf)


def compare(p: Problem, what: str, found: Any, expected: Tensor, allowed: Tensor, sure: Tensor | None = None) -> None:
    """Raises if any entry differs by more than allowed."""
    found = torch.as_tensor(found).detach().double()
    if found.shape != expected.shape:
        raise Wrong(f"{what} has the shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    gap = (found - expected).abs()
    ratio = torch.where(gap.isnan(), torch.inf, gap / allowed)
    ratio = torch.where(gap == 0, 0, ratio)
    if sure is not None:
        ratio = torch.where(sure.expand(ratio.shape), ratio, 0)
    worst = int(ratio.argmax())
    if ratio.numel() and float(ratio.reshape(-1)[worst]) > 1:
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))
        got, truth = float(found.reshape(-1)[worst]), float(expected.reshape(-1)[worst])
        raise Wrong(
            f"{what} is {got:.6g} for {truth:.6g} at {place}, {float(ratio.reshape(-1)[worst]):.2g} times what is "
            f"allowed; {int((ratio > 1).sum())} of {ratio.numel()} are off"
        )


def allowed_values(p: Problem, rows: Tensor, v: Tensor, error: Tensor) -> Tensor:
    """Bound of the errors of values (*batch, N, C), for row sums (*batch, N), a signal and the rounding of rows."""
    center = v.mean(dim=-2, keepdim=True)
    spread = (v - center).abs().amax((-1, -2), keepdim=True)  # channels share transforms, and their errors
    center = center.abs().amax(-1, keepdim=True)
    tol = kernel_tol(p)
    part = (20 * tol + error) * spread + (4 * tol + error) * center + signal_eps(p) * (spread + center)
    return rows[..., None] * part + least(p)


def least(p: Problem) -> float:
    """Bound of the errors of numbers below the range of a float, which become 0 or lose digits."""
    return 2 * max(torch.finfo(x).smallest_normal for x in (p.dtype, signal_dtype(p)))


def skip_beyond(p: Problem, *expected: Tensor) -> None:
    """Operators that do not keep constants, and gradients in space, may leave the range of a float."""
    most = 0.1 * min(torch.finfo(x).max for x in (p.dtype, signal_dtype(p)))
    if not all(bool((x.abs() < most).all()) for x in expected):
        raise Beyond


def operator(p: Problem, terms: list[Leaves] | None = None, mass: Tensor | None = None, signal: Any = None) -> Any:
    """The operator as the library makes it; what it makes of a signal, and the operator, if one is given."""
    leaves = [term.leaves for term in p.terms] if terms is None else terms
    mass = p.mass if mass is None else mass
    solver = {name: p.options[name] for name in ("max_iter", "iteration", "adjoint") if name in p.options}
    others = {name: value for name, value in p.options.items() if name not in solver}
    options = {"normalization": p.normalization, "tol": p.tol, "solver": qattn.Solver(**solver), **others}
    if p.by_points:
        name = p.terms[0].name
        method, backend = name.removeprefix("Gaussian(").removesuffix(")").split(", ")
        x, sigma = leaves[0]["points"], leaves[0]["sigma"]
        given = x.numpy() if p.seed % 3 == 0 else x
        options |= {"method": method, "backend": backend}
        if signal is not None:
            return qattn.diffuse(given, sigma, signal, mass, **options)
        return qattn.diffusion(given, sigma, mass, **options)
    kernels = [term.make(own) for term, own in zip(p.terms, leaves, strict=True)]
    kernels = [k if f is None else f * k for k, f in zip(kernels, p.factors, strict=True)]
    kernel = kernels[0] if len(kernels) == 1 else kernels[0] + kernels[1]
    if len(kernels) > 1 and mass is None and any(k.mass is not None for k in kernels):
        mass = torch.full((p.size,), 1 / p.size, dtype=p.dtype)
    if signal is not None:
        return qattn.diffuse(kernel, None, signal, mass, **options)
    return qattn.diffusion(kernel, mass=mass, **options)


def with_holes(p: Problem, truth: Truth) -> Any:
    """The signal with NaN at points without mass."""
    signal = torch.as_tensor(p.signal)
    if p.seed % 2 or signal.dtype == torch.bool:
        return p.signal
    absent = (truth.mass == 0).reshape(-1, p.size).all(0)
    hollow = torch.where(absent if signal.ndim == 1 else absent[:, None], torch.nan, signal)
    return hollow if isinstance(p.signal, Tensor) else hollow.numpy()


# The checks.


def check_values(p: Problem) -> None:
    q = operator(p)
    truth = truth_of(p, q)
    compare_values(p, truth, q @ with_holes(p, truth))


def compare_values(p: Problem, truth: Truth, found: Any) -> None:
    matrix, lse, v = truth.matrix, truth.lse, values_of(p, truth.mass == 0)
    expected = matrix @ v
    skip_beyond(p, expected)
    allowed = allowed_values(p, matrix.sum(-1), v, rounding(p, truth, lse)).expand(expected.shape)
    sure = is_sure(p, truth, lse)[..., None].expand(expected.shape)
    compare(p, "Qv", found, shaped(p, expected), shaped(p, allowed), shaped(p, sure))


def check_applied(p: Problem) -> None:
    applied, q = operator(p, signal=p.signal)
    compare_values(p, truth_of(p, q), applied)


def check_power(p: Problem) -> None:
    q = operator(p)
    truth = truth_of(p, q)
    v = values_of(p, truth.mass == 0)
    matrix, lse = truth.matrix, truth.lse
    expected, allowed = matrix @ v, allowed_values(p, matrix.sum(-1), v, rounding(p, truth, lse))
    for _ in range(2):
        expected, allowed = (
            matrix @ expected,
            matrix @ allowed + allowed_values(p, matrix.sum(-1), expected, rounding(p, truth, lse)),
        )
    skip_beyond(p, expected, matrix @ (matrix @ v), matrix @ v)
    allowed = 2 * allowed.expand(expected.shape)
    sure = is_sure(p, truth, lse)[..., None].expand(expected.shape)
    compare(p, "Q³v", q.power(3, p.signal), shaped(p, expected), shaped(p, allowed), shaped(p, sure))


def check_transpose(p: Problem) -> None:
    q = operator(p)
    truth = truth_of(p, q)
    g = values_of(p)
    far = is_sure(p, truth, truth.lse) & (truth.lse > -300)
    keep = far.reshape(-1, p.size).all(0)  # rows of points so far away that e^l is beyond what a float holds
    left = torch.where(far, truth.left, -torch.inf)
    signal = torch.as_tensor(p.signal)
    signal = torch.where(keep if signal.ndim == 1 else keep[:, None], signal, torch.zeros((), dtype=signal.dtype))
    g = torch.where(keep[:, None], g, 0)
    matrix = torch.exp(left[..., :, None] + truth.log + truth.right[..., None, :]).mT
    expected = matrix @ g
    sizes = g.abs().amax(-1, keepdim=True)
    while sizes.ndim > len(p.batch) + 2:  # a batch that the kernel lacks goes by channels, which share their errors
        sizes = sizes.amax(0)
    weights = truth.left.abs().where(far, torch.zeros(())).amax(-1)[..., None, None]
    error = (
        20 * kernel_tol(p)
        + 8 * torch.finfo(p.dtype).eps * (32 + 2 * weights)
        + rounding(p, truth, truth.lse).amax(-2, keepdim=True)
        + signal_eps(p)
    )
    skip_beyond(p, matrix @ sizes)
    allowed = (error * (matrix @ sizes) + least(p)).expand(expected.shape)
    compare(p, "Qᵀg", q.T @ signal, shaped(p, expected), shaped(p, allowed))


def new_points(p: Problem) -> Tensor:
    """Points near the cloud, and far from it."""
    assert p.points is not None
    draw = Draw(p.seed + 10**9)
    x = p.points.double()
    n = draw.integer(1, 30)
    near = x[..., (draw.uniform(n) * p.size).long(), :]
    way = draw.normal(*near.shape) * p.extent
    return (near + way * 10 ** (8 * draw.uniform(*near.shape[:-1], 1) - 4)).to(p.dtype)


def check_extend(p: Problem) -> None:
    q = operator(p)
    truth, new = truth_of(p, q), new_points(p)
    log = log_matrix(p, new.double())
    rows = replace(truth, log=log, left=torch.zeros(log.shape[:-1], dtype=torch.float64))
    lse = rows.lse
    rows.left = -lse
    if not truth.is_stochastic:
        log_mass = log_or_absent(truth.mass)
        rows.left = -0.5 * lse_of(log, log_mass) if p.normalization == "symmetric" else torch.zeros_like(lse)
    matrix = torch.exp(rows.left[..., :, None] + log + truth.right[..., None, :])
    v = values_of(p, truth.mass == 0)
    expected = matrix @ v
    error = rounding(p, rows, lse)
    if not truth.is_stochastic:  # e^{l + lse}, of logarithms that may be large
        error = error + 8 * torch.finfo(p.dtype).eps * lse.abs().clamp(max=1e3)[..., None]
    skip_beyond(p, expected)
    allowed = allowed_values(p, matrix.sum(-1), v, error).expand(expected.shape)
    sure = is_sure(p, rows, lse)[..., None].expand(expected.shape)
    compare(p, "Q at new points", q.extend(new) @ p.signal, shaped(p, expected), shaped(p, allowed), shaped(p, sure))


def check_space(p: Problem) -> None:
    """∇(Qf): the covariance of signal and position within each row, over σ²."""
    q = operator(p)
    assert p.points is not None
    assert p.sigma is not None
    truth = truth_of(p, q)
    value, gradient = q.value_and_gradient(p.signal)
    compare_values(p, truth, value)
    lse, v, x, sigma = truth.lse, values_of(p, truth.mass == 0), p.points.double(), p.sigma.double()
    if sigma.ndim:
        x, sigma = x[..., None, :, :], sigma[:, None, None]
    rows = torch.exp(truth.log + truth.right[..., None, :] - lse[..., None])
    has = (truth.mass > 0)[..., None]
    x = torch.where(has, x, x[..., :1, :])
    x = x - (torch.where(has, x, 0).sum(-2, keepdim=True) / has.sum(-2, keepdim=True))
    x = torch.where(has, x, 0).expand(*p.batch, -1, -1)
    center = v.mean(-2, keepdim=True)
    dev = torch.where(has, v - center, 0)
    mean_x, mean_v = rows @ x, rows @ dev
    products = (dev[..., None] * x[..., None, :]).flatten(-2)
    covariance = (rows @ products).unflatten(-1, (v.shape[-1], -1)) - mean_v[..., None] * mean_x[..., None, :]
    expected = covariance / sigma[..., None] ** 2
    spread = dev.abs().amax((-1, -2), keepdim=True)[..., None]
    radius = (x.abs().amax((-1, -2), keepdim=True) / sigma)[..., None]
    # Weights that are left out are at ten bandwidths at most; an error that is absolute counts to the end of the cloud.
    # Sums of products are in float32 while that takes away less than 1e-4.
    reach = (10 + radius) if p.terms[0].is_fourier or p.terms[0].name.endswith("sdpa)") else 10.0
    error = 20 * kernel_tol(p) * reach + 1e-3 + signal_eps(p) + 10 * rounding(p, truth, lse)[..., None]
    constant = signal_eps(p) * center.abs().amax() * (1 + 1e-3 * radius)
    allowed = (error * spread + constant) / sigma[..., None] + least(p)
    skip_beyond(p, expected)
    rest = allowed.expand(expected.shape)
    sure = is_sure(p, truth, lse)[..., None, None] & (lse > truth.right.amax(-1, keepdim=True) - 200)[..., None, None]
    if p.signal.ndim == 1:
        expected, rest = expected[..., 0, :], rest[..., 0, :]
        sure = sure[..., 0, :]
    compare(p, "∇(Qf)", gradient, expected, rest, sure)


def check_error(p: Problem) -> None:
    """`error` is at least a tenth of the largest error of the row sums of points with mass."""
    q = operator(p)
    truth = truth_of(p, q)
    told = torch.as_tensor(q.kernel_error(num_rows=1024)).double()
    right = (
        torch.zeros_like(truth.right) if p.normalization in ("row", "none") else torch.as_tensor(q.potential).double()
    )
    right = torch.where(truth.mass > 0, right + log_or_absent(truth.mass), -torch.inf)
    with torch.no_grad():
        found = q.kernel.attend(right.to(p.dtype)).lse.double()
    exact = lse_of(truth.log, right.to(p.dtype).double())
    gaps = torch.where(truth.mass > 0, torch.expm1(found - exact).abs(), 0).amax(-1)
    floor = rounding(p, truth, truth.lse).amax((-1, -2))
    if (told.isnan() | (told < 0.1 * gaps - floor)).any():
        raise Wrong(f"error() says {told.max():.2g} where rows are off by {gaps.max():.2g}")
    if (gaps > 4 * kernel_tol(p) + floor).any():
        raise Wrong(f"row sums are off by {gaps.max():.2g}, for a tolerance of {kernel_tol(p):.2g}")


def check_sums(p: Problem) -> None:
    """Constants and mass are kept to the tolerance of normalizing, and `marginal_error` tells it."""
    q = operator(p)
    truth = truth_of(p, q)
    m = truth.mass / truth.mass.amax(-1, keepdim=True)
    m = m / m.sum(-1, keepdim=True)
    Q = torch.exp(truth.left[..., :, None] + truth.log + truth.right[..., None, :])
    Q = torch.where((truth.mass > 0)[..., None], Q, 0)
    kept = (m * (Q.sum(-1) - 1).abs()).sum(-1)
    moved = ((m[..., None, :] @ Q)[..., 0, :] - m).abs().sum(-1)
    allowed = p.tol + 4 * kernel_tol(p) + rounding(p, truth, truth.lse).amax((-1, -2))
    compare(p, "the mean of |Q1 − 1|", kept, torch.zeros_like(kept), allowed)
    compare(p, "the mass that is lost", moved, torch.zeros_like(kept), allowed)
    told = torch.as_tensor(q.marginal_error).double()
    compare(p, "marginal_error", told, kept, 4 * kernel_tol(p) + rounding(p, truth, truth.lse).amax((-1, -2)))


def check_gradients(p: Problem) -> None:
    """First derivatives of a random loss by everything that the operator and the signal are made of."""
    q = operator(p)
    truth = truth_of(p, q)
    is_near = (is_sure(p, truth, truth.lse) & (truth.lse > truth.right.amax(-1, keepdim=True) - 1e3)).reshape(
        -1, p.size
    )
    counted = is_near.all(0)
    if p.seed % 2 or any(term.entries is not None for term in p.terms):  # rows that nothing reaches have no derivative
        counted = counted & (truth.mass > 0).reshape(-1, p.size).all(0)
    signal = torch.as_tensor(p.signal)
    weights = Draw(p.seed + 10**9).normal(*torch.broadcast_shapes((*p.batch, p.size, 1), values_of(p).shape))
    weights = torch.where(counted[:, None], weights, 0).to(signal.dtype)

    terms = [{k: v.clone().requires_grad_(k in t.parts) for k, v in t.leaves.items()} for t in p.terms]
    mass = mass_of(p, q).to(p.dtype) if p.mass is None else p.mass
    mass = mass.clone().requires_grad_()
    s = signal.clone().requires_grad_()
    q = operator(p, terms, mass)
    out = q @ s
    out = out[..., None] if s.ndim == 1 else out
    (weights.to(p.dtype) * out.to(p.dtype)).sum().backward()

    exact = [{k: v.detach().double().requires_grad_(v.requires_grad) for k, v in own.items()} for own in terms]
    exact_mass, exact_signal = (x.detach().double().requires_grad_() for x in (mass, s))
    expected = dense_operator(p, exact, exact_mass) @ (exact_signal[:, None] if s.ndim == 1 else exact_signal)
    (weights.double() * expected).sum().backward()
    leaves = [exact_mass, exact_signal, *(leaf for own in exact for leaf in own.values())]
    skip_beyond(p, *(leaf.grad for leaf in leaves if leaf.grad is not None))

    center = values_of(p, truth.mass == 0).mean(-2, keepdim=True)
    rows = truth.matrix.sum(-1, keepdim=True)  # of operators that do not keep constants, those count too
    v = values_of(p, truth.mass == 0)
    spread = v - center if truth.is_stochastic else v
    # What cancels: terms of the size of loss and signal, each rounded, or cut off, to a few digits. The adjoint is
    # solved to 4 ε^¾ of its largest entry.
    size = float((weights.double().abs() * rows * spread.abs().amax(-2, keepdim=True)).sum())
    skip_beyond(p, rows * v.abs().max(), rows * weights.double().abs().sum() / math.sqrt(p.size))
    eps = torch.finfo(p.dtype).eps
    size += eps**0.25 * float((weights.double().abs() * rows * center.abs()).sum())
    digits = 20 * kernel_tol(p) + 8 * eps**0.75 + 8 * float(rounding(p, truth, truth.lse).max())
    relative = 1e-2 if p.dtype == torch.float32 else 1e-3
    if signal.dtype in SIXTEEN:
        relative, digits = 3e-2, digits + eps
    scale = 1.0 if p.sigma is None else 1 / float(p.sigma.double().min())
    most = float(weights.double().abs().max()) * math.sqrt(p.size)

    def judge(name: str, found: Tensor | None, true: Tensor | None, weight: Tensor | float, floor: float) -> None:
        if found is None or true is None:
            raise Wrong(f"no gradient by {name}")
        true = true * weight
        gap = (found.double() * weight - true).norm()
        # Cotangents of scores, of which gradients are made, may be below the range of a float.
        if not gap <= relative * true.norm() + floor + most * least(p):
            raise Wrong(
                f"the gradient by {name} is off by {float(gap / true.norm()):.2g} of itself, {float(true.norm()):.3g}, "
                f"or {float(gap / floor):.2g} times what rounding explains"
            )

    rough = SIXTEEN.get(signal.dtype, 0.0)
    judge("the signal", s.grad, exact_signal.grad, 1.0, (digits + rough) * most * float(rows.max()))
    judge("mass", mass.grad, exact_mass.grad, mass.detach().double(), digits * size)
    for number, (own, other) in enumerate(zip(terms, exact, strict=True)):
        for name, leaf in own.items():
            if not leaf.requires_grad:
                continue
            weight: Tensor | float = leaf.detach().double() if name in ("sigma", "edges") else 1.0
            floor = digits * size * {"points": scale, "sigma": 10.0, "covariances": scale**2}.get(name, 1.0)
            judge(f"{name} of kernel {number}", leaf.grad, other[name].grad, weight, floor)


def dense_operator(p: Problem, terms: list[Leaves], mass: Tensor) -> Tensor:
    """Q (*batch, N, N) as a function of everything, normalized to the last digit and differentiated implicitly."""
    is_linear = any(term.entries is not None for term in p.terms)
    total = None
    for term, factor, leaves in zip(p.terms, p.factors, terms, strict=True):
        part = term.entries(leaves) if term.log is None else term.log(leaves, None)
        if is_linear:
            part = (factor or 1.0) * (part if term.log is None else torch.exp(part))
            total = part if total is None else total + part
        else:
            part = part + math.log(factor or 1.0)
            total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    total = total.expand(*p.batch, p.size, p.size)
    log_mass = log_or_absent(mass).expand(*p.batch, p.size)

    def lse(bias: Tensor, kernel: Tensor) -> Tensor:
        if not is_linear:
            return torch.logsumexp(kernel + bias[..., None, :], dim=-1)
        top = bias.detach().amax(-1, keepdim=True)
        sums = (kernel * torch.exp(bias - top)[..., None, :]).sum(-1)
        return torch.where(sums > 0, top + torch.log(torch.where(sums > 0, sums, 1)), 0)  # of rows that nothing reaches

    def matrix(left: Tensor, right: Tensor) -> Tensor:
        scores = left[..., :, None] + right[..., None, :]
        return total * torch.exp(scores) if is_linear else torch.exp(total + scores)

    zero = torch.zeros_like(log_mass)
    if p.normalization == "none":
        return matrix(zero, log_mass)
    if p.normalization != "sinkhorn":
        rows = lse(log_mass, total)
        left, right = (-rows, zero) if p.normalization == "row" else (-0.5 * rows, -0.5 * rows)
        return matrix(left, right + log_mass)
    has = log_mass > -torch.inf
    with torch.no_grad():
        f = zero
        for _ in range(120):
            f = 0.5 * (f - lse(torch.where(has, f + log_mass, -torch.inf), total))
        f = torch.where(has, f, -lse(torch.where(has, f + log_mass, -torch.inf), total))
        # Where f + lse(f + log m) = 0, its derivative is that of −(I + Q)⁻¹ times the left-hand side.
        slope = torch.eye(p.size, dtype=torch.float64) + matrix(f, torch.where(has, f + log_mass, -torch.inf))
    residual = f + lse(f + log_mass, total)
    f = f - torch.linalg.solve(slope, residual[..., None])[..., 0]
    return matrix(f, f + log_mass)


# Running.


def excuse(p: Problem, error: BaseException) -> str | None:
    """The reason why a refusal is legitimate."""
    names = " ".join(term.name for term in p.terms)
    text = str(error)
    if isinstance(error, FourierError) and "fourier" in names:
        return "fourier refuses"
    if isinstance(error, NotImplementedError) and "sdpa" in names and "does not take these inputs" in text:
        return "sdpa refuses"
    if isinstance(error, ValueError) and "Voxels" in names and "within 650 nats" in text:
        return "voxels refuse"
    if isinstance(error, ValueError) and "closed form" in text:
        return "no closed form"
    return None


def run(seed: int) -> str:
    """Runs the configuration of a seed: "passed" or why it is excused; raises otherwise."""
    p = draw_problem(seed)
    with ExitStack() as stack:
        if p.is_costly:  # as if the cloud were large, so that "auto" takes tiles and FFTs
            dear = replace(cost._COSTS["cpu"], pair=1e6)
            stack.enter_context(mock.patch.object(cost, "_FEW_PAIRS", 0))
            stack.enter_context(mock.patch.dict(cost._COSTS, cpu=dear))
        stack.enter_context(mock.patch.object(fourier, "most_modes", return_value=2**16))  # which take no time
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        try:
            globals()[f"check_{p.check}"](p)
        except Beyond:
            return "beyond range"
        except Exception as error:
            if reason := excuse(p, error):
                return reason
            if warned and isinstance(error, Wrong):
                return "warned"
            raise
    if told := [w for w in warned if not issubclass(w.category, UserWarning)]:
        raise Wrong(f"it warns: {told[0].message}")
    return "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to stop")
    parser.add_argument("--trace", action="store_true", help="print where failures are raised")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, told, outcomes, failed = time.monotonic(), time.monotonic(), Counter[str](), []
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() - start > options.seconds:
            break
        try:
            outcomes[run(seed)] += 1
        except Exception as error:
            failed.append(seed)
            outcomes["failed"] += 1
            print(f"{seed}: {type(error).__name__}: {error}\n    {draw_problem(seed)}", flush=True)
            if options.trace:
                traceback.print_exc(file=sys.stdout)
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"… {sum(outcomes.values())} seeds, {len(failed)} failed, {told - start:.0f} s", flush=True)
    print(f"{sum(outcomes.values())} seeds: {dict(outcomes)}; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

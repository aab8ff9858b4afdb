"""Kernels and the plain float64 matrices that they stand for; no tests.

An entry of `KERNELS` is all that a kernel, a method or a backend needs to be held to every law of `test_laws.py`: the
tensors it is made of, how it is made of them, and the logarithms of its entries, differentiable, by their definition.
What it does not do is said in `lacks`, law by law, with the reason.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from qattn import (
    ExponentialKernel,
    GaussianKernel,
    GraphKernel,
    Kernel,
    MaternKernel,
    MatrixKernel,
    MixtureKernel,
    OrientedKernel,
    RationalQuadraticKernel,
    VoxelKernel,
)

N = 90  # more than a tile
TOL = 1e-7  # of methods that leave something out


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)


def distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x_i − y_j‖², by differences."""
    return ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)


@dataclass(frozen=True)
class Case:
    """A kernel and its definition.

    Attributes:
        tensors: What it is made of, in float64, by name.
        make: The kernel of such tensors, in any dtype.
        log: The logarithms (N, N) of its entries, of float64 tensors.
        log_at: Those between new points (N', d) and its sites, for kernels of points.
        lacks: The laws that it does not have, and why.
        fixed: The tensors that it is not differentiated by.
    """

    tensors: dict[str, Tensor]
    make: Callable[..., Kernel]
    log: Callable[..., Tensor]
    log_at: Callable[..., Tensor] | None = None
    lacks: dict[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.log(**self.tensors).shape[-1]


POINTS = torch.nn.functional.normalize(_normal(N, 3, seed=0), dim=-1) * (0.8 + 0.2 * _normal(N, 1, seed=1))
CLOUD = {"points": POINTS, "sigma": torch.tensor(0.4, dtype=torch.float64)}
NOT_POINTS = "its sites are not points"
NOT_GAUSSIAN = "only Gaussian kernels of points have gradients in space"
ONE_GRID = "one grid or graph, one bandwidth"
COMPILES = "torch compiles a kernel for each shape, in tens of seconds"


def _gaussian(x: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
    return -distances(x, y) / (2 * sigma**2)


def _exponential(x: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
    square = distances(x, y)
    return -torch.where(square == 0, 0, torch.where(square == 0, 1, square).sqrt()) / sigma


def _matern(x: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
    a = -(3**0.5) * _exponential(x, y, sigma)
    return torch.log1p(a) - a


def _rational_quadratic(x: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
    return -2 * torch.log1p(distances(x, y) / (4 * sigma**2))


def _of_points(score: Callable[..., Tensor], make: Callable[..., Kernel], **lacks: str) -> Case:
    def log(points: Tensor, sigma: Tensor) -> Tensor:
        return score(points, points, sigma)

    def log_at(new: Tensor, points: Tensor, sigma: Tensor) -> Tensor:
        return score(new, points, sigma)

    return Case(CLOUD, make, log, log_at, lacks)


def _by(kind: Callable[..., Kernel], *arguments: float, **options: object) -> Callable[..., Kernel]:
    return lambda points, sigma: kind(points, sigma, *arguments, **options)


def _full(covariances: Tensor, dims: int) -> Tensor:
    """Covariances (N,), (N, d) or (N, d, d) as matrices."""
    if covariances.ndim == 1:
        covariances = covariances[:, None].expand(-1, dims)
    return torch.diag_embed(covariances) if covariances.ndim == 2 else _symmetric(covariances)


def _symmetric(matrix: Tensor) -> Tensor:
    """A matrix of which an entry and its mirror image share their derivative."""
    return (matrix + matrix.mT) / 2


def _mixture(covariances: Tensor, form: str = "overlap", **options: object) -> Case:
    tensors = {**CLOUD, "covariances": covariances}

    def overlap(x: Tensor, A: Tensor, y: Tensor, B: Tensor, sigma: Tensor) -> Tensor:
        d = x.shape[-1]
        C = sigma**2 * torch.eye(d, dtype=x.dtype) + A[:, None] + B
        apart = x[:, None] - y
        score = -0.5 * (apart[..., None, :] @ torch.linalg.solve(C, apart[..., None]))[..., 0, 0]
        return score - 0.5 * torch.logdet(C / sigma**2) if form == "overlap" else score

    def log(points: Tensor, sigma: Tensor, covariances: Tensor) -> Tensor:
        full = _full(covariances, points.shape[-1])
        return overlap(points, full, points, full, sigma)

    def log_at(new: Tensor, points: Tensor, sigma: Tensor, covariances: Tensor) -> Tensor:
        full = _full(covariances, points.shape[-1])
        return overlap(new, torch.zeros_like(full[: len(new)]), points, full, sigma)

    def make(points: Tensor, sigma: Tensor, covariances: Tensor) -> Kernel:
        if covariances.ndim == points.ndim + 1:
            covariances = _symmetric(covariances)
        return MixtureKernel(points, covariances, sigma, form=form, **options)

    lacks = {"value_and_gradient": NOT_GAUSSIAN}
    if form != "overlap":
        lacks["spectrum"] = "it is indefinite, which is why the overlap is the default"
    return Case(tensors, make, log, log_at, lacks)


NORMALS = _normal(N, 3, seed=7)
WEIGHT = torch.rand(N, dtype=torch.float64, generator=_generator(8))


def _oriented(**options: object) -> Case:
    """The kernel at new points, with the normal and the weight of the nearest site."""

    def factor(n: Tensor, u: Tensor, m: Tensor, w: Tensor) -> Tensor:
        n, m = (torch.nn.functional.normalize(normals, dim=-1) for normals in (n, m))
        c, e = (1 - u**2 / 2).sqrt(), (1 - w**2 / 2).sqrt()
        return torch.log(c[:, None] * e + 0.5 * u[:, None] * w * (n @ m.T))

    def log(points: Tensor, sigma: Tensor, normals: Tensor, weight: Tensor) -> Tensor:
        return _gaussian(points, points, sigma) + factor(normals, weight, normals, weight)

    def log_at(new: Tensor, points: Tensor, sigma: Tensor, normals: Tensor, weight: Tensor) -> Tensor:
        near = distances(new, points).argmin(-1)
        return _gaussian(new, points, sigma) + factor(normals[near], weight[near], normals, weight)

    def make(points: Tensor, sigma: Tensor, normals: Tensor, weight: Tensor) -> Kernel:
        return OrientedKernel(points, normals, sigma, weight=weight, **options)

    tensors = {**CLOUD, "normals": NORMALS, "weight": WEIGHT}
    return Case(tensors, make, log, log_at, {"value_and_gradient": NOT_GAUSSIAN})


AXES = 0.3 * _normal(N, 3, 3, seed=2)
MASK = torch.rand(7, 6, 5, generator=_generator(3)) < 0.4
VOXELS = torch.where(MASK, 0.1 + torch.rand(7, 6, 5, dtype=torch.float64, generator=_generator(4)), 0)
SPACING = 0.1, 0.1, 0.2


def _voxels(method: str) -> Case:
    centers = MASK.nonzero().double() * torch.tensor(SPACING, dtype=torch.float64)

    def make(sigma: Tensor, weights: Tensor) -> Kernel:
        return VoxelKernel(weights, sigma, SPACING, method=method, tol=TOL)

    def log(sigma: Tensor, weights: Tensor) -> Tensor:
        return _gaussian(centers, centers, sigma)

    lacks = {"extend": NOT_POINTS, "value_and_gradient": NOT_GAUSSIAN, "batches": ONE_GRID}
    sigma = torch.tensor(0.15, dtype=torch.float64)
    return Case({"sigma": sigma, "weights": VOXELS}, make, log, None, lacks, fixed=("weights",))


EDGES = ((distances(POINTS, POINTS) < 0.4) & ~torch.eye(N, dtype=torch.bool)).nonzero().T
HALF = _normal(N, N, seed=5).abs()
SIMILARITY = HALF @ HALF.T / N
NEAR = distances(POINTS, POINTS) < 0.6


def _graph(eps: float) -> Case:
    """One weight for both directions of an edge: that of the lower end and the higher one."""

    def symmetric(weight: Tensor) -> Tensor:
        low, high = EDGES.amin(0), EDGES.amax(0)
        return weight[low, high]

    def make(weight: Tensor) -> Kernel:
        return GraphKernel(EDGES, symmetric(weight), eps=eps, num_vertices=N)

    def log(weight: Tensor) -> Tensor:
        A = weight.new_zeros(N, N).index_put((EDGES[0], EDGES[1]), symmetric(weight))
        K = A + torch.diag(A.sum(-1)) + eps
        return torch.where(K > 0, torch.log(torch.where(K > 0, K, 1)), -torch.inf)

    lacks = {"extend": NOT_POINTS, "value_and_gradient": NOT_GAUSSIAN, "batches": ONE_GRID}
    return Case(
        {"weight": 0.5 + torch.rand(N, N, dtype=torch.float64, generator=_generator(6))}, make, log, None, lacks
    )


def _matrix(make: Callable[[Tensor], Kernel], mask: Tensor | None = None, **lacks: str) -> Case:
    def whole(similarity: Tensor) -> Tensor:
        K = _symmetric(similarity)
        return K if mask is None else torch.where(mask, K, 0) + torch.diag(K.sum(-1))  # which is definite

    def log(similarity: Tensor) -> Tensor:
        K = whole(similarity)
        return torch.where(K > 0, torch.log(torch.where(K > 0, K, 1)), -torch.inf)

    lacks = {
        "extend": NOT_POINTS,
        "value_and_gradient": NOT_GAUSSIAN,
        "batches": "held by tests/test_matrix.py",
    } | lacks
    fixed = ("similarity",) if "first_gradients" in lacks else ()
    return Case({"similarity": SIMILARITY}, lambda similarity: make(whole(similarity)), log, None, lacks, fixed)


SLOW = {"second_gradients": COMPILES, "two_threads": COMPILES, "sixteen_bits": COMPILES, "power": COMPILES,
        "value_and_gradient": COMPILES, "batches": COMPILES, "arrays": COMPILES, "algebra": COMPILES,
        "error": COMPILES, "copies": COMPILES, "extend": COMPILES, "transpose": COMPILES}  # fmt: skip
RADIAL = {"value_and_gradient": NOT_GAUSSIAN}
PRODUCTS = "the derivative by its entries is not known of a function that multiplies"

KERNELS: dict[str, Case] = {
    **{
        f"gaussian, exact, {backend}": _of_points(
            _gaussian, _by(GaussianKernel, method="exact", backend=backend, tol=1e-4)
        )
        for backend in ("native", "sdpa", "reference")
    },
    "gaussian, exact, flex": _of_points(
        _gaussian, _by(GaussianKernel, method="exact", backend="flex"), **SLOW, float64="flex takes no float64"
    ),
    "gaussian, tiles": _of_points(_gaussian, _by(GaussianKernel, method="tiles", tol=TOL)),
    "gaussian, fourier": _of_points(_gaussian, _by(GaussianKernel, method="fourier", tol=TOL)),
    "oriented, exact": _oriented(method="exact"),
    "oriented, tiles": _oriented(method="tiles", tol=TOL),
    "oriented, fourier": _oriented(method="fourier", tol=TOL),
    "exponential, exact": _of_points(_exponential, _by(ExponentialKernel, method="exact"), **RADIAL),
    "exponential, gaussians": _of_points(_exponential, _by(ExponentialKernel, method="gaussians", tol=1e-6), **RADIAL),
    "matern, exact": _of_points(_matern, _by(MaternKernel, 1.5, method="exact"), **RADIAL),
    "matern, gaussians": _of_points(_matern, _by(MaternKernel, 1.5, method="gaussians", tol=1e-6), **RADIAL),
    "rational quadratic, exact": _of_points(
        _rational_quadratic, _by(RationalQuadraticKernel, 2.0, method="exact"), **RADIAL
    ),
    "rational quadratic, gaussians": _of_points(
        _rational_quadratic, _by(RationalQuadraticKernel, 2.0, method="gaussians", tol=1e-6), **RADIAL
    ),
    "mixture, isotropic, exact": _mixture(AXES[:, 0, 0] ** 2, method="exact"),
    "mixture, diagonal, tiles": _mixture(AXES[:, 0] ** 2, method="tiles", tol=TOL),
    "mixture, full, exact": _mixture(AXES @ AXES.mT, method="exact"),
    "mixture, full, tiles": _mixture(AXES @ AXES.mT, method="tiles", tol=TOL),
    "mixture, equation 5": _mixture(AXES[:, 0] ** 2, "equation 5", method="tiles", tol=TOL),
    "voxels, blocks": _voxels("blocks"),
    "voxels, points": _voxels("points"),
    "graph": _graph(0.0),
    "graph, eps": _graph(1e-3),
    "matrix": _matrix(MatrixKernel),
    "matrix, sparse": _matrix(lambda K: MatrixKernel(K.to_sparse()), NEAR),
    "matrix, products": _matrix(
        lambda K: MatrixKernel(aslinearoperator(K.detach().double().numpy())),
        first_gradients=PRODUCTS,
        second_gradients=PRODUCTS,
        sixteen_bits="held without gradients by tests/test_matrix.py",
        copies="a function need not be one that can be pickled",
    ),
    "sum": _of_points(
        lambda x, y, sigma: torch.logaddexp(_gaussian(x, y, sigma), _exponential(x, y, sigma) + math.log(0.5)),
        lambda points, sigma: GaussianKernel(points, sigma) + 0.5 * ExponentialKernel(points, sigma),
        value_and_gradient=NOT_GAUSSIAN,
    ),
}

# One or two of each kind of data, which the quick tier holds to the laws; the whole suite holds all to them.
QUICK = {
    "gaussian, exact, native",
    "gaussian, tiles",
    "exponential, exact",
    "oriented, tiles",
    "mixture, full, tiles",
    "voxels, blocks",
    "graph, eps",
    "matrix",
    "matrix, sparse",
    "matrix, products",
    "sum",
}


def potential(log_kernel: Tensor, mass: Tensor, steps: int = 40) -> Tensor:
    """f with f + lse(f + log m) = 0, differentiable: the last steps of the plain iteration."""
    log_mass = log_of(mass)
    f = torch.zeros_like(mass)
    with torch.no_grad():
        for _ in range(100):
            f = 0.5 * (f - torch.logsumexp(log_kernel + f + log_mass, -1))
    for _ in range(steps):
        f = 0.5 * (f - torch.logsumexp(log_kernel + f + log_mass, -1))
    return f


def log_of(mass: Tensor) -> Tensor:
    return torch.where(mass > 0, torch.log(torch.where(mass > 0, mass, 1)), -torch.inf)


def operator(log_kernel: Tensor, mass: Tensor, normalization: str = "sinkhorn") -> Tensor:
    """The matrix Q (N, N), by its definition."""
    log_mass = log_of(mass)
    sums = torch.logsumexp(log_kernel + log_mass, -1)
    zero = torch.zeros_like(sums)
    if normalization == "sinkhorn":
        f = potential(log_kernel, mass)
        f = torch.where(mass > 0, f, -torch.logsumexp(log_kernel + f + log_mass, -1))
        left = right = f
    else:
        left, right = {"row": (-sums, zero), "symmetric": (-sums / 2, -sums / 2), "none": (zero, zero)}[normalization]
    return torch.exp(left[:, None] + log_kernel + right + log_mass)

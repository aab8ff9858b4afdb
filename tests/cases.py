"""Problems and the plain float64 answer to them; no tests."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from qattn import Solver, diffusion, shapes
from qattn.spectra import Spectrum

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def slow(*values):
    """Values of a parametrization that `pytest -m "not slow"` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Case(NamedTuple):
    """Sizes of one problem: batch shape, N, M, D, channels (None: lse alone), and whether there is a bias."""

    batch: tuple[int, ...]
    N: int
    M: int
    D: int
    C: int | None
    has_bias: bool

    def __str__(self) -> str:
        return f"{self.batch}-N{self.N}-M{self.M}-D{self.D}-C{self.C}-{'bias' if self.has_bias else 'plain'}"


CASES = [
    Case((), 100, 100, 3, 4, True),
    Case((), 130, 65, 3, None, True),
    Case((), 64, 64, 3, 8, False),
    Case((), 1, 70, 2, 1, True),
    Case((), 70, 1, 3, 3, True),
    Case((), 1, 1, 1, 1, False),
    Case((2, 3), 40, 50, 3, 2, True),
    Case((3,), 33, 129, 1, None, False),
    Case((), 90, 80, 4, 17, True),
    Case((), 50, 60, 7, 5, True),
    Case((), 40, 50, 20, 40, True),
]


def make(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor | None]:
    """Points within ten bandwidths of their center, as the tolerances of the backends assume."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*case.batch, *shape, dtype=torch.float64)

    radius = 2.0 / case.D**0.5
    query, key = normal(case.N, case.D) * radius, normal(case.M, case.D) * radius
    value = None if case.C is None else normal(case.M, case.C)
    bias = normal(case.M) if case.has_bias else None
    tensors = {"query": query, "key": key, "value": value, "bias": bias}
    return {name: None if t is None else t.to(device, dtype) for name, t in tensors.items()}


def dense(query: Tensor, key: Tensor, value: Tensor | None = None, bias: Tensor | None = None):
    """out and lse in float64 with the N × M matrix of scores: the definition, with nothing of the library."""
    query, key = query.double(), key.double()
    scores = -0.5 * ((query[..., :, None, :] - key[..., None, :, :]) ** 2).sum(-1)
    if bias is not None:
        scores = scores + bias.double()[..., None, :]
    lse = scores.logsumexp(-1)
    if value is None:
        return None, lse
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
    return weights @ value.double(), lse


def check_gradients(module: nn.Module) -> None:
    """Every parameter should have a gradient that is finite and not 0."""
    for label, parameter in module.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
        assert parameter.grad.abs().amax() > 0, label


def dense_spectrum(points: Tensor, sigma: float, k: int, tol: float = 1e-8) -> Spectrum:
    """The k leading eigenpairs of the operator of a cloud, by its dense matrix."""
    q = diffusion(points, sigma, tol=tol, solver=Solver(max_iter=200))
    root = q.mass.sqrt()
    symmetric = root[:, None] * q.to_dense() / root  # √m Q /√m
    values, u = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    values, vectors = values.flip(0)[:k], u.flip(1)[:, :k] / root[:, None]
    residuals = (root[:, None] * (q @ vectors - values * vectors)).norm(dim=0)
    return Spectrum(values, vectors, residuals, q.mass, sigma)


def pairwise_distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x[..., :, None, :] - y[..., None, :, :], dim=-1)


def dense_energy_distance(x: Tensor, y: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """The Energy Distance of two clouds by its formula, with all distances, in float64."""
    x, y = x.double(), y.double()
    a, b = (torch.ones(z.shape[-2]).double() if m is None else m.double() for z, m in ((x, a), (y, b)))
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)

    def mean(p: Tensor, q: Tensor, D: Tensor) -> Tensor:
        return (p[..., None, :] @ D @ q[..., None])[..., 0, 0]

    cross, own_x, own_y = (pairwise_distances(*pair) for pair in ((x, y), (x, x), (y, y)))
    return mean(a, b, cross) - mean(a, a, own_x) / 2 - mean(b, b, own_y) / 2


# From the generator that conftest.py seeds for each test, so that several clouds of a test differ.
sphere = partial(shapes.sphere, seed=None, dtype=torch.float64)
ball = partial(shapes.ball, seed=None, dtype=torch.float64)

"""Measured axioms of operators that satisfy them, and of operators that violate one or more."""

import pytest
import torch
from cases import slow, sphere

from qattn import Diffusion, GaussianKernel, GraphKernel, MatrixKernel, Solver, check_axioms, diffusion


@pytest.mark.parametrize("method", ["exact", "tiles", slow("fourier")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sinkhorn_has_them_all(method, dtype):
    mass = torch.rand(500, dtype=dtype) + 0.1
    report = check_axioms(diffusion(sphere(500).to(dtype), 0.3, mass, method=method))
    assert report.holds
    assert report.largest_eigenvalue == pytest.approx(1, abs=1e-2)
    assert str(report).startswith("A diffusion operator, to 0.01:\n  yes  self-adjoint")
    assert "NO" not in str(report)


def test_few_points_and_arrays():
    assert check_axioms(diffusion(sphere(20).numpy(), 0.5)).holds
    assert check_axioms(diffusion(torch.zeros(1, 3), 0.5)).holds


@pytest.mark.parametrize(
    ("normalization", "broken"),
    [
        ("row", {"self-adjoint", "keeps mass"}),
        ("symmetric", {"keeps constants", "keeps mass"}),
        ("none", {"keeps constants", "keeps mass", "damps"}),
    ],
)
def test_other_normalizations_lack_some(normalization, broken):
    """The cloud has uneven density and a large total mass."""
    points = torch.cat([sphere(300), 0.3 * sphere(30) + 1])
    report = check_axioms(diffusion(points, 0.3, torch.ones(330), normalization=normalization))
    assert {name for name, holds in report.verdicts.items() if not holds} == broken
    assert str(report).startswith("Not a diffusion operator")
    assert "NO" in str(report)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers():
    q = diffusion(sphere(400).float(), 0.3, torch.rand(400))
    assert check_axioms(q, seed=0) == check_axioms(q, seed=0)
    assert check_axioms(q, seed=0) != check_axioms(q, seed=1)


def test_an_indefinite_kernel_does_not_damp():
    """Two narrow Gaussians and a wide one, without determinants: the spectrum extends down to −0.146."""
    distance, spread = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([1e-4, 1e6, 1e-4])
    covariance = spread[:, None] + spread
    similarity = torch.exp(-((distance[:, None] - distance) ** 2) / (2 * covariance)).double()
    q = diffusion(MatrixKernel(similarity), mass=torch.ones(3), tol=1e-10, solver=Solver(max_iter=200))
    report = check_axioms(q)
    assert report.smallest_eigenvalue == pytest.approx(-0.146, abs=2e-3)
    assert not report.verdicts["damps"]
    assert check_axioms(q, tol=0.2).verdicts["damps"]


def test_negative_values_are_seen(monkeypatch):
    product = Diffusion.__matmul__
    monkeypatch.setattr(Diffusion, "__matmul__", lambda q, signal: product(q, signal) - 0.5)
    report = check_axioms(diffusion(sphere(100), 0.3))
    assert report.negativity > 0.1
    assert not report.verdicts["positive"]


def test_a_graph_and_a_sum():
    path = torch.diag(torch.ones(99), 1)
    assert check_axioms(diffusion(GraphKernel(path + path.T), tol=1e-6, solver=Solver(max_iter=500))).holds
    points = sphere(200)
    assert check_axioms(diffusion(GaussianKernel(points, 0.2) + 0.5 * GaussianKernel(points, 0.6))).holds


def test_batches_are_refused():
    with pytest.raises(ValueError, match=r"takes one cloud with one bandwidth; this operator has shape \(2, 50, 50\)"):
        check_axioms(diffusion(sphere(50), [0.3, 0.5]))

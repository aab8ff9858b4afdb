"""The measured bandwidth of a diffusion, against a dense float64 reference and against known spectra."""

import math

import pytest
import torch
from cases import ball, sphere

from qattn import GraphKernel, diffusion, eigsh, laplacian_eigenvalues
from qattn.spectra import effective_sigma

pytestmark = pytest.mark.usefixtures("_one_thread")


def dense(points, mass, sigma, d):
    """The definition, from matrices of all pairs in float64, with rows that sum to one."""
    x = points.double()[mass > 0]
    m = mass.double()[mass > 0]
    kernel, scaling = torch.exp(-(torch.cdist(x, x) ** 2) / (2 * sigma**2)), torch.ones(len(x), dtype=torch.float64)
    for _ in range(300):
        scaling = torch.sqrt(scaling / (kernel @ (m * scaling)))
    q = scaling[:, None] * kernel * (m * scaling)
    differences = x[None] - x[:, None]
    shift = torch.einsum("ij,ija->ia", q, differences)
    covariance = torch.einsum("ij,ija,ijb->iab", q, differences, differences) - shift[:, :, None] * shift[:, None, :]
    tangents = torch.linalg.eigh(covariance).eigenvectors[:, :, -d:]
    projection = tangents @ tangents.mT
    residual = torch.eye(len(x), dtype=torch.float64) - q
    u = x - (m[:, None] * x).sum(0) / m.sum()
    for n in range(4):
        node = 0.55 + 0.45 * math.cos(math.pi * (2 * n + 1) / 8)
        force = torch.einsum("iab,ib->ia", projection, residual @ u)
        u = u - torch.einsum("iab,ib->ia", projection, residual @ force) / node
    log = sum(torch.linalg.matrix_power(residual, k) / k for k in range(1, 5))
    return math.sqrt(2 / d * float((m[:, None] * u * (log @ u)).sum() / m.sum()))


@pytest.mark.parametrize("method", ["exact", "tiles"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("place", [0.0, 1e3])
def test_against_all_pairs(method, dtype, rtol, place):
    """Masses over four decades and points without mass; rounding to float32 at 1e3 moves points by 3e-5."""
    generator = torch.Generator().manual_seed(0)
    points = (sphere(700) + place).to(dtype)
    mass = 10.0 ** (-4 * torch.rand(700, generator=generator, dtype=torch.float64))
    mass[::7] = 0
    for sigma in (0.15, 0.5):
        exact = dense(points, mass, sigma, 2)
        converged = diffusion(points, sigma, mass, method=method, tol=1e-6)
        assert effective_sigma(converged, dims=2) == pytest.approx(exact, rel=rtol)
        assert effective_sigma(diffusion(points, sigma, mass, method=method), dims=2) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(("name", "d"), [("curve", 1), ("surface", 2), ("volume", 3)])
def test_dimensions(name, d):
    angle = 2 * math.pi * torch.rand(1500, 1, dtype=torch.float64)
    points = {
        "curve": torch.cat([angle.cos(), angle.sin(), (2 * angle).sin()], dim=-1),
        "surface": sphere(1500),
        "volume": ball(1500),
    }[name]
    q = diffusion(points, 0.3 if name == "volume" else 0.1, mass="density")
    assert effective_sigma(q) == effective_sigma(q, dims=d)
    assert effective_sigma(q) != effective_sigma(q, dims=d % 3 + 1)


def test_even_points_have_the_bandwidth_of_their_kernel():
    """A circle of even points has no excess of pairs of points with themselves, no noise, and no boundary."""
    angle = torch.arange(400, dtype=torch.float64) * 2 * math.pi / 400
    points = torch.stack([angle.cos(), angle.sin()], dim=-1)
    for sigma in (0.05, 0.1):
        # Chords are shorter than arcs, so that rows are wider along the circle than σ.
        assert effective_sigma(diffusion(points, sigma, tol=1e-8)) == pytest.approx(sigma, rel=0.3 * sigma**2 + 1e-4)


@pytest.mark.parametrize("normalization", ["sinkhorn", "row"])
def test_frequencies_of_random_points_of_a_sphere(normalization):
    """2 three times, 6 five times, 12 seven times: to 3 %, where the bandwidth of the kernel is 8 % off."""
    q = diffusion(sphere(2500), 0.08, mass="density", normalization=normalization)
    spectrum = eigsh(q, 16)
    exact = torch.tensor([2.0] * 3 + [6.0] * 5 + [12.0] * 7)
    measured = laplacian_eigenvalues(spectrum.values, effective_sigma(q))[1:] / exact
    nominal = spectrum.frequencies[1:] / exact
    assert float((measured.mean() - 1).abs()) < 0.03
    assert float(nominal.mean()) < 0.94


def test_a_square_and_a_cube_have_boundaries():
    """Frequencies (π k)² of the first modes, to 5 %, where equal masses and σ itself are 7 to 25 % off."""
    generator = torch.Generator().manual_seed(0)
    for d, sigma in ((2, 0.05), (3, 0.14)):
        points = torch.rand(2500, d, generator=generator, dtype=torch.float64)
        q = diffusion(points, sigma, mass="density")
        found = laplacian_eigenvalues(eigsh(q, d + 1).values, effective_sigma(q))[1:]
        assert float(found.mean()) == pytest.approx(math.pi**2, rel=0.05)


def test_points_that_are_alone_are_not_measured():
    points = sphere(200)
    assert effective_sigma(diffusion(points, 1e-4)) == pytest.approx(1e-4)
    assert effective_sigma(diffusion(torch.zeros(5, 3), 0.1)) == pytest.approx(0.1)
    assert effective_sigma(diffusion(torch.rand(1, 3), 0.1)) == pytest.approx(0.1)


def test_rows_that_reach_across_the_shape_are_not_measured():
    """Few points, and strips narrower than rows, whose coordinates would be relaxed away."""
    few, strip = sphere(12), torch.rand(400, 2, dtype=torch.float64) * torch.tensor([1.0, 0.05], dtype=torch.float64)
    for points, sigma in ((few, 1.2), (strip, 0.1)):
        assert effective_sigma(diffusion(points, sigma, "density"), dims=points.shape[1]) == pytest.approx(sigma)
    assert effective_sigma(diffusion(strip, 0.01, "density"), dims=2) == pytest.approx(0.01, rel=0.1)


def test_what_cannot_be_measured_says_so():
    points = sphere(50)
    for q in (
        diffusion(GraphKernel(torch.tensor([[0, 1], [1, 0]]))),
        diffusion(points, [0.1, 0.2]),
        diffusion(points, 0.2, normalization="symmetric"),
    ):
        with pytest.raises(ValueError, match="`effective_sigma` needs one cloud with a `GaussianKernel`"):
            effective_sigma(q)
    with pytest.raises(ValueError, match="dims"):
        effective_sigma(diffusion(points, 0.2), dims=0)

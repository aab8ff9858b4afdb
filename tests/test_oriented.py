"""Normals of clouds, and kernels that know them: what lies close together is not joined."""

import math

import numpy as np
import pytest
import torch
from cases import ball, slow, sphere

import qattn
from qattn import GaussianKernel, OrientedKernel, diffusion, eigsh, normals
from qattn.orientation import share_of_other_sheets

pytestmark = pytest.mark.usefixtures("_one_thread")


def plates(n, gap):
    """Two parallel squares, the lower one first, and their outward normals."""
    points = torch.rand(2 * n, 3, dtype=torch.float64)
    points[:, 2] = 0
    points[n:, 2] = gap
    up = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    return points, torch.where((torch.arange(2 * n) < n)[:, None], -up, up)


def folded(n, gap):
    """A sheet of length 2 and width ½ in the shape of a U, its normals, and positions along it from 0."""
    length, width = 2 * torch.rand(n, dtype=torch.float64), 0.5 * torch.rand(n, dtype=torch.float64)
    radius = gap / 2
    straight = 1 - math.pi * radius / 2
    angle = ((length - straight) / radius).clamp(0, math.pi)
    beyond = (length - straight - math.pi * radius).clamp(min=0)
    x = length.clamp(max=straight) + radius * angle.sin() - beyond
    points = torch.stack([x, width, -radius * angle.cos()], dim=-1)
    return points, torch.stack([angle.sin(), torch.zeros_like(angle), -angle.cos()], dim=-1), length


def flipped(found, exact):
    """Part of the normals on the wrong side."""
    return float(((found * exact).sum(-1) < 0).double().mean())


def test_heat_stays_on_its_plate():
    points, n = plates(1000, 0.05)
    start = torch.zeros(2000, dtype=torch.float64)
    start[0] = 1
    shares = [float(diffusion(points, 0.1, normals=given).power(4, start)[1000:].sum()) for given in (None, n)]
    total = float(diffusion(points, 0.1, normals=n).power(4, start).sum())
    assert shares[0] > 0.4
    assert abs(shares[1]) < 1e-6
    assert total == pytest.approx(1, rel=1e-3)


@pytest.mark.slow
def test_heat_follows_a_folded_sheet():
    points, n, length = folded(3000, 0.08)
    start = (length < 0.2).double()
    plain, along = (diffusion(points, 0.08, normals=given, tol=1e-5).power(6, start) for given in (None, n))
    opposite = length > 1.6  # around the bend, and right above the start
    assert float(plain[opposite].mean()) > 0.3 * float(plain[length < 0.2].mean())
    assert float(along[opposite].mean()) < 1e-3 * float(along[length < 0.2].mean())
    # Nearly what it has unfolded, as a rectangle of length 2: the bend, as narrow as σ, slows diffusion down.
    first = float(eigsh(diffusion(points, 0.08, "density", normals=n), 2).frequencies[1])
    assert first == pytest.approx((math.pi / 2) ** 2, rel=0.25)
    assert float(eigsh(diffusion(points, 0.08, "density"), 2).frequencies[1]) > 2 * first


def test_weights_go_from_a_gaussian_kernel_to_none_between_opposite_normals():
    points, n = plates(50, 0.05)
    gaussian = GaussianKernel(points, 0.3).to_dense()
    torch.testing.assert_close(OrientedKernel(points, n, 0.3, weight=0.0).to_dense(), gaussian)
    torch.testing.assert_close(OrientedKernel(points, 0 * n, 0.3).to_dense(), gaussian)
    full = OrientedKernel(points, 5 * n, 0.3).to_dense()
    torch.testing.assert_close(full[:50, :50], gaussian[:50, :50])
    assert float(full[:50, 50:].abs().max()) < 1e-12
    half = OrientedKernel(points, n, 0.3, weight=0.5).to_dense()
    torch.testing.assert_close(half[:50, 50:], 0.75 * gaussian[:50, 50:])


def test_at_other_points():
    """Own points have their own normals, and others those of the nearest, unless they bring some."""
    points, n = plates(50, 0.05)
    kernel = OrientedKernel(points, n, 0.3)
    for at in (kernel.at(points), kernel.at(points.clone()), kernel.at(points, n), kernel.at(points + 0.001 * n)):
        torch.testing.assert_close(at.to_dense(), kernel.to_dense(), atol=2e-3, rtol=0)
    assert float(kernel.at(points[:50], -n[:50]).to_dense()[:, :50].abs().max()) < 1e-12


def test_far_from_the_origin_and_many_points_of_no_mass():
    points, n = plates(200, 0.05)
    mass = torch.rand(400, dtype=torch.float64)
    mass[::3] = 0
    signal = torch.randn(400, 2, dtype=torch.float64)
    signal[::3] = torch.nan
    q = diffusion(points, 0.2, mass, normals=n, tol=1e-9)
    for method in ("exact", "tiles"):
        moved = diffusion((points + 1000).float(), 0.2, mass, normals=n, tol=1e-6, method=method)
        torch.testing.assert_close(
            (moved @ signal.float())[mass > 0].double(), (q @ signal)[mass > 0], rtol=0, atol=3e-3
        )


@pytest.mark.parametrize("size", [slow(6000), 900])
def test_spectra_with_normals_by_coarse_levels_and_by_lapack(size):
    """Normals slow diffusion on a sphere down by no more than σ²/2."""
    x = sphere(size).float()
    q = diffusion(x, 0.15, "density", normals=x)
    spectrum = eigsh(q, 9)
    assert spectrum.sigma == pytest.approx(0.15)
    assert float(spectrum.residuals.max()) < 0.02
    plain = eigsh(diffusion(x, 0.15, "density"), 9).frequencies
    torch.testing.assert_close(spectrum.frequencies[1:], plain[1:], rtol=0.03, atol=0)


def test_normals_of_an_ellipsoid_point_outwards():
    direction, scale = sphere(1500).float(), torch.tensor([1.0, 0.7, 0.4])
    exact = torch.nn.functional.normalize(direction / scale, dim=-1)
    found = normals(3 + scale * direction)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(1500))
    assert flipped(found, exact) == 0
    assert float((found * exact).sum(-1).mean()) > 0.97


@pytest.mark.parametrize("gap", [0.03, 0.08])
def test_normals_of_a_folded_sheet_are_on_one_side(gap):
    """The layers are as near as the first or the third neighbor of 3000 points; the sides are told by reflection."""
    points, exact, _ = folded(3000, gap)
    wrong = flipped(normals(points), exact)
    assert min(wrong, 1 - wrong) < 0.03


def test_normals_of_a_thin_ellipsoid():
    """Sides at 2.5 mean distances of neighbors; signs carried without a reflection get half of them wrong."""
    scale = torch.tensor([1.0, 0.7, 0.05], dtype=torch.float64)
    candidates = sphere(20_000)
    stretch = (candidates / scale).norm(dim=-1)  # area, per area of the sphere
    x = candidates[torch.rand(20_000, dtype=torch.float64) < stretch / stretch.max()][:3000]
    assert flipped(normals(scale * x), x / scale) < 0.1


def test_normals_of_curves_arrays_and_few_points():
    angle = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    found = normals(circle)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, circle, atol=1e-2)
    flat = normals([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(np.abs(flat), [[0, 0, 1]] * 5, atol=1e-6)


def test_share_of_other_sheets():
    points, n = plates(500, 0.05)
    mass = torch.full((1000,), 1e-3, dtype=torch.float64)
    share = share_of_other_sheets(GaussianKernel(points, 0.1), mass, n)
    rows = diffusion(points, 0.1, normalization="row").to_dense()
    other = (rows * (n @ n.T < 0)).sum(1)
    torch.testing.assert_close(share, rows @ other, rtol=1e-3, atol=1e-3)
    x = sphere(2000)
    assert float(share_of_other_sheets(GaussianKernel(x, 0.1), torch.full((2000,), 5e-4), x).max()) == 0


def test_wrong_arguments_say_so():
    x = ball(20)
    for normal, message in ((torch.ones(19, 3), "one per point"), (torch.full((20, 3), torch.nan), "should be finite")):
        with pytest.raises(ValueError, match=message):
            OrientedKernel(x, normal, 0.1)
    for weight, message in ((torch.ones(19), "one per normal"), (2.0, "from 0"), (torch.nan, "from 0")):
        with pytest.raises(ValueError, match=message):
            OrientedKernel(x, x, 0.1, weight=weight)
    with pytest.raises(ValueError, match="`normals` should not be given with a kernel"):
        diffusion(GaussianKernel(x, 0.1), normals=x)
    with pytest.raises(ValueError, match=r"shape \(N, d\), one cloud"):
        normals(torch.rand(2, 20, 3))
    with pytest.raises(ValueError, match="num_neighbors"):
        normals(x, 1)
    assert "OrientedKernel((20, 3), sigma=0.1" in str(qattn.diffusion(x, 0.1, normals=x))

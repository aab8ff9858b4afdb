"""Distances along clouds, against the exact ones of a line, a plane with a hole and a sphere, and a dense solve."""

import math

import numpy as np
import pytest
import torch
from cases import sphere

import qattn
from qattn import diffusion, shapes
from qattn.distances import geodesic_distance
from qattn.distances.geodesic import _NEAR, _RATES, _REACH, _Cells, _log_heat

HOLE = 0.4  # radius


def holed_square(num_points):
    """Random points of [−1, 1]² outside a disk, the first one near the left side."""
    x = 2 * torch.rand(2 * num_points, 2) - 1
    x = x[x.norm(dim=1) > HOLE][:num_points]
    x[0] = torch.tensor([-0.9, 0.0])
    return x


def around_the_hole(x, source):
    """Lengths of the shortest paths from a source: straight, or along two tangents and an arc of the disk."""
    d = (x - source).norm(dim=1)
    t = ((-source * (x - source)).sum(1) / d.square().clamp(min=1e-12)).clamp(0, 1)
    closest = (source + t[:, None] * (x - source)).norm(dim=1)
    a, b = source.norm(), x.norm(dim=1)
    angle = torch.acos(((x @ source) / (a * b)).clamp(-1, 1))
    arc = angle - torch.acos(HOLE / a) - torch.acos((HOLE / b).clamp(max=1))
    bent = (a**2 - HOLE**2).sqrt() + (b**2 - HOLE**2).clamp(min=0).sqrt() + HOLE * arc
    return torch.where((closest < HOLE) & (arc > 0), bent, d)


def on_the_sphere(x, source):
    return 2 * torch.asin(((x - source).norm(dim=1) / 2).clamp(max=1))


def mean_relative_error(found, exact):
    away = exact > 0
    return float(((found - exact).abs() / exact)[away].mean())


@pytest.mark.parametrize("N", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_distances_on_the_sphere_are_within_two_percent(N):
    x = shapes.sphere(N)
    q = diffusion(x, 2 * math.sqrt(4 * math.pi / N))
    error = mean_relative_error(geodesic_distance(q, 0), on_the_sphere(x, x[0]))
    assert error < (0.02 if N < 20_000 else 0.006)


@pytest.mark.slow
def test_distances_go_around_a_hole():
    x = holed_square(10_000)
    q = diffusion(x, 2 * math.sqrt((4 - math.pi * HOLE**2) / len(x)))
    exact = around_the_hole(x, x[0])
    assert (exact - (x - x[0]).norm(dim=1)).max() > 0.1  # some paths are bent
    assert mean_relative_error(geodesic_distance(q, 0), exact) < 0.02


def test_a_method_is_replaced_and_the_rest_stays():
    kernel = qattn.GaussianKernel(sphere(50), 0.3, tol=1e-5)
    other = kernel.with_method("tiles")
    assert (kernel.method, other.method, other.tol) == ("exact", "tiles", 1e-5)
    bias = torch.zeros(50, dtype=torch.float64)
    torch.testing.assert_close(other.attend(bias).lse, kernel.attend(bias).lse, rtol=0, atol=1e-5)


def test_cells_find_all_points_within_reach():
    x = sphere(500)
    cells = _Cells(x, 0.3)
    mask = torch.zeros(500, dtype=torch.bool)
    mask[[3, 77]] = True
    around = set(cells.around(mask).tolist())
    distances = torch.cdist(x, x[mask]).amin(1)
    assert set((distances < 0.3).nonzero()[:, 0].tolist()) <= around
    assert distances[list(around)].max() <= 0.6 * math.sqrt(3)
    assert len(around) < 250


def test_heat_is_that_of_a_dense_solve():
    """u = e^{−κ²/2} Q u away from a source, with u given near it: a linear system, in float64."""
    x = sphere(400)
    sigma = 0.15
    q = diffusion(x, sigma, tol=1e-10, solver=qattn.Solver(max_iter=300))
    straight = (x - x[3]).norm(dim=1)
    near = straight <= _NEAR * sigma
    for rate in _RATES:
        alpha, Q = math.exp(-(rate**2) / 2), q.to_dense()
        system = torch.where(near[:, None], torch.eye(400).double(), torch.eye(400) - alpha * Q)
        u = torch.linalg.solve(system, torch.where(near, torch.exp(-rate * straight / sigma), 0))
        found = _log_heat(q, q.kernel, x, _Cells(x, _REACH * sigma), straight, rate)
        assert (found - u.log()).abs().max() < 0.02


def test_distances_scale_with_the_shape_and_do_not_depend_on_its_place():
    x = sphere(500)
    d = geodesic_distance(diffusion(x, 0.15), 7)
    far = geodesic_distance(diffusion(1e-3 * x + 5, 0.15e-3), 7)
    assert torch.allclose(1e3 * far, d, rtol=1e-2)
    single = geodesic_distance(diffusion((1e-3 * x).float(), 0.15e-3), 7)
    assert torch.allclose(1e3 * single.double(), d, rtol=1e-2)


def test_several_sources_and_sets_of_them():
    x = sphere(500)
    q = diffusion(x, 0.15)
    a, b, both = geodesic_distance(q, 3), geodesic_distance(q, 11), geodesic_distance(q, [3, 11])
    assert a[3] == b[11] == both[3] == both[11] == 0
    assert (both - torch.minimum(a, b)).abs().max() < 0.15  # a bandwidth, where the two meet
    sets = geodesic_distance(q, torch.tensor([[3, 3], [3, 11]]))
    assert sets.shape == (500, 2)
    assert torch.equal(sets[:, 0], a)
    assert torch.equal(sets[:, 1], both)


def test_arrays_give_arrays_and_fourier_agrees():
    x = shapes.sphere(3000).numpy()
    by_tiles = geodesic_distance(diffusion(x, 0.1, method="tiles"), 0)
    assert isinstance(by_tiles, np.ndarray)
    assert by_tiles.dtype == np.float32
    by_fourier = geodesic_distance(diffusion(x, 0.1, method="fourier"), 0)
    assert np.abs(by_fourier - by_tiles).max() < 0.01


def test_points_without_mass_have_distances_but_do_not_conduct():
    x = torch.linspace(0, 1, 101).double()[:, None]
    mass = torch.ones(101).double()
    mass[1::2] = 0
    d = geodesic_distance(diffusion(x, 0.03, mass), 0)
    assert (d - x[:, 0]).abs().max() < 0.02
    mass[40:60] = 0  # a gap of seven bandwidths
    d = geodesic_distance(diffusion(x, 0.03, mass), 0)
    assert (d[:40] - x[:40, 0]).abs().max() < 0.02
    assert d[61:].isinf().all()


def test_masses_over_many_decades():
    x = sphere(1500)
    mass = 10.0 ** (-6 + 6 * torch.rand(1500)).double()
    d = geodesic_distance(diffusion(x, 0.2, mass), 0)
    assert mean_relative_error(d, on_the_sphere(x, x[0])) < 0.06


def test_other_parts_are_infinitely_far():
    x = torch.cat([sphere(300), sphere(300) + torch.tensor([5.0, 0, 0])])
    d = geodesic_distance(diffusion(x, 0.2), 0)
    assert d[:300].isfinite().all()
    assert d[300:].isinf().all()
    assert geodesic_distance(diffusion(x, 0.2), [0, 300]).isfinite().all()


@pytest.mark.parametrize("mass", [0.0, 1.0])
def test_single_points_are_infinitely_far_at_any_distance(mass):
    x = torch.cat([sphere(300), torch.tensor([[50.0, 0, 0], [1e5, 0, 0]])])
    masses = torch.tensor([1.0] * 300 + [mass] * 2)
    d = geodesic_distance(diffusion(x, 0.2, masses), 0)
    assert d[:300].isfinite().all()
    assert d[300:].isinf().all()


def test_wrong_input_is_refused():
    x = sphere(50)
    q = diffusion(x, 0.5)
    with pytest.raises(ValueError, match="should be integers"):
        geodesic_distance(q, [0.0])
    with pytest.raises(ValueError, match="from 0 to 49; got numbers from 3 to 50"):
        geodesic_distance(q, [3, 50])
    with pytest.raises(ValueError, match="at least one source"):
        geodesic_distance(q, torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"geodesic_distance\(q\[0\], sources\)"):
        geodesic_distance(diffusion(x, [0.5, 1.0]), 0)
    with pytest.raises(ValueError, match="needs a `GaussianKernel`"):
        geodesic_distance(diffusion(qattn.MatrixKernel(torch.eye(5))), 0)

"""Spectra with nothing to choose: of random and even points, surfaces, volumes and thin sheets."""

import math

import numpy as np
import pytest
import torch
from cases import ball, slow, sphere

import qattn
from qattn import diffusion, eigsh, spectrum
from qattn.spectra import effective_sigma

pytestmark = pytest.mark.usefixtures("_one_thread")
SPHERE = torch.tensor([2.0] * 3 + [6.0] * 5 + [12.0] * 7)


def errors(found, exact):
    return (torch.as_tensor(found)[1:].float() / exact - 1).abs()


def modes_of_a_box(d, k):
    n = torch.arange(12.0)
    squares = torch.cartesian_prod(*[n] * d).square().sum(1) if d > 1 else n.square()
    return math.pi**2 * squares.sort().values[1:k]


@pytest.mark.parametrize("size", [1500, slow(5000)])
def test_random_points_of_a_sphere(size):
    found = spectrum(sphere(size).float(), 16)
    assert float(errors(found.frequencies, SPHERE).mean()) < (0.04 if size < 5000 else 0.02)
    assert found.choices["mass"].startswith("density")
    assert found.choices["dimension"].startswith("2")
    assert found.choices["normals"].startswith("not needed")


@pytest.mark.parametrize("d", [1, 2, slow(3)])
def test_even_points_keep_equal_masses_and_the_bandwidth(d):
    """A grid, where masses by density would be those of a heavier boundary."""
    axis = (torch.arange({1: 300, 2: 40, 3: 14}[d]) + 0.5) / {1: 300, 2: 40, 3: 14}[d]
    grid = torch.cartesian_prod(*[axis] * d).reshape(-1, d)
    found = spectrum(grid, 8)
    assert found.choices["mass"].startswith("equal")
    assert found.choices["dimension"].startswith(str(d))
    plain = eigsh(diffusion(grid, found.sigma, tol=1e-4), 8)
    torch.testing.assert_close(found.frequencies, plain.frequencies, rtol=1e-4, atol=1e-4)
    assert float(errors(found.frequencies, modes_of_a_box(d, 8)).median()) < 0.02


@pytest.mark.parametrize("d", [2, slow(3)])
def test_random_points_of_a_square_and_a_cube(d):
    """No worse than equal masses, and within a few per cent."""
    points, exact = torch.rand(2000, d, dtype=torch.float64), modes_of_a_box(d, 8)
    found = spectrum(points, 8)
    assert found.choices["dimension"].startswith(str(d))
    sigma = float(found.choices["sigma"].split(",")[0])
    equal = eigsh(diffusion(points, sigma, tol=1e-4), 8).frequencies
    median = float(errors(found.frequencies, exact).median())
    assert median < 0.06
    assert median < 0.7 * float(errors(equal, exact).median())


@pytest.mark.slow
def test_uneven_points():
    """Four times as many in the north: a quarter of the south is kept."""
    x = sphere(5000).float()
    uneven = torch.cat([x[x[:, 2] > 0], x[x[:, 2] <= 0][::4]])
    assert float(errors(spectrum(uneven, 16).frequencies, SPHERE).mean()) < 0.06


@pytest.mark.slow
def test_sheets_back_to_back():
    """A flat ellipsoid, whose first mode is that of its two sides; without normals it is two thirds too fast."""
    scale = torch.tensor([1.0, 1.0, 0.03], dtype=torch.float64)
    candidates = sphere(20_000)
    stretch = (candidates / scale).norm(dim=-1)  # area, per area of the sphere
    x = scale * candidates[torch.rand(20_000, dtype=torch.float64) < stretch / stretch.max()][:2500]
    found, plain = spectrum(x, 6), spectrum(x, 6, normals=None)
    assert found.choices["normals"].startswith("estimated")
    # Modes of two discs joined at the rim are those of a disc, with free rim (even) and with fixed rim (odd).
    exact = torch.tensor([1.8412**2] * 2 + [2.4048**2] + [3.0542**2] * 2)
    assert float(errors(found.frequencies, exact).median()) < 0.12
    assert float(errors(plain.frequencies, exact).median()) > 0.15
    given = spectrum(x, 6, normals=x / scale**2)
    assert given.choices["normals"].startswith("as given")
    assert float(errors(given.frequencies, exact).median()) < 0.12


def test_choices_of_the_caller():
    x = sphere(700)
    found = spectrum(x, 4, sigma=0.3, mass=None, normals=None)
    assert found.choices == {
        "sigma": "0.3, as given",
        "dimension": found.choices["dimension"],
        "normals": "none, as given",
        "mass": "equal, as given",
        "frequencies": "by 0.3, the bandwidth",
    }
    torch.testing.assert_close(found.values, eigsh(diffusion(x, 0.3, tol=1e-4), 4).values, rtol=1e-4, atol=0)
    mass = torch.rand(700, dtype=torch.float64)
    given = spectrum(x, 4, sigma=0.3, mass=mass, normals=None)
    torch.testing.assert_close(given.mass, mass / mass.sum())
    assert given.sigma == 0.3
    dense = spectrum(x, 4, sigma=0.3, mass="density", normals=None)
    assert dense.sigma == pytest.approx(effective_sigma(diffusion(x, 0.3, "density", tol=1e-4)), rel=1e-3)
    assert "density, as given" in dense._repr_html_()
    assert "Chosen" not in eigsh(diffusion(x, 0.3), 4)._repr_html_()


def test_arrays_few_and_coinciding_points():
    x = ball(400).numpy()
    found = spectrum(np.concatenate([x, x[:50]]), 3)
    assert isinstance(found.vectors, np.ndarray)
    assert found.vectors.shape == (450, 3)
    corners = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]
    few = spectrum(corners, 2)
    assert few.frequencies == pytest.approx(equal_masses(torch.tensor(corners), few, 2).numpy(), rel=1e-3, abs=1e-6)
    assert isinstance(few.torch().choices, dict)


def equal_masses(points, found, k):
    """Frequencies of equal masses, at the bandwidth that a spectrum has chosen."""
    sigma = float(found.choices["sigma"].split(",")[0])
    return eigsh(diffusion(points, sigma, tol=1e-4), k).frequencies


def parabola(n):
    t = torch.rand(n, 1, dtype=torch.float64)
    return torch.cat([t, t.square()], dim=1)


@pytest.mark.parametrize("n", [8, 10, 12, 16, 17, 18, 20, slow(25), slow(30)])
def test_few_points(n):
    """Points of spheres and parabolas, whose first frequencies are 2 and (π / 1.479)², for several seeds.

    Rows reach across most of these clouds, so that the energy of coordinates is no measure. Then masses are equal.
    """
    for seed in range(4):
        torch.manual_seed(seed)
        for points, exact in ((sphere(n), 2), (parabola(n), 4.51)):
            found = spectrum(points, 2)
            first, equal = float(found.frequencies[1]), float(equal_masses(points, found, 2)[1])
            if found.choices["mass"].startswith("density"):
                assert n > 20
                assert abs(math.log(first / exact)) < max(0.3, abs(math.log(equal / exact)))
            else:
                assert found.sigma == pytest.approx(float(found.choices["sigma"].split(",")[0]), rel=1e-3)
                assert first == pytest.approx(equal, rel=1e-2)


@pytest.mark.parametrize("n", [10, 20, 30])
def test_few_points_of_a_sphere_are_near_the_truth(n):
    """To 50 %, whatever the seed: rows are as wide as the sphere."""
    for seed in range(4):
        torch.manual_seed(seed)
        assert 0.5 < float(spectrum(sphere(n), 2).frequencies[1]) / 2 < 1.1


def test_masses_as_given_stay_where_nothing_can_be_measured():
    x = sphere(10)
    dense, equal = spectrum(x, 2, mass="density", normals=x), spectrum(x, 2, normals=x)
    assert dense.choices["mass"] == "density, as given"
    assert "nothing can be measured" in dense.choices["frequencies"]
    assert "that of the space" in dense.choices["dimension"]
    assert float(dense.mass.max()) > 1.1 * float(dense.mass.min())
    assert equal.choices["normals"].startswith("as given")
    torch.testing.assert_close(equal.mass, torch.full((10,), 0.1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        (torch.rand(2, 30, 3), {}, "one cloud; got"),
        (torch.zeros(30, 3), {}, "three distinct points"),
        (torch.rand(30, 3), {"sigma": "best"}, "`sigma`"),
        (torch.rand(30, 3), {"sigma": -1.0}, "`sigma`"),
        (torch.rand(30, 3), {"mass": "areas"}, "`mass`"),
        (torch.rand(30, 3), {"normals": "mesh"}, "`normals`"),
        (torch.rand(30, 3), {"normals": torch.rand(29, 3)}, "`normals`"),
    ],
)
def test_wrong_arguments_say_so(points, options, message):
    with pytest.raises(ValueError, match=message):
        spectrum(points, 2, **options)


def test_the_name_is_public():
    assert qattn.spectrum is spectrum

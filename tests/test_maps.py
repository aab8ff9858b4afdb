"""Functional maps: laws of composition, known maps recovered, gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import dense_spectrum
from test_progress import terminal_of

from qattn import Spectrum, shapes
from qattn.distances import neighbors
from qattn.maps import fit_functional_map, functional_map, point_map, zoomout
from qattn.signatures import heat_kernel_signature

pytestmark = pytest.mark.usefixtures("_one_thread")


def creature(n, seed=0):
    return shapes.creature(n, seed)[0].double()


def moved_copy(points):
    """The points permuted and moved, and the permutation: copy[j] is points[order[j]], moved."""
    order = torch.randperm(len(points))
    turn = torch.linalg.qr(torch.randn(3, 3).double()).Q
    return points[order] @ turn + torch.randn(3).double(), order


def random_spectrum(n, k):
    """Random masses, and vectors that are orthonormal for them."""
    mass = torch.rand(n, dtype=torch.float64) + 0.1
    mass = mass / mass.sum()
    basis = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64)).Q
    return Spectrum(torch.linspace(1, 0.5, k).double(), basis / mass.sqrt()[:, None], torch.zeros(k), mass)


def leading(spectrum, k):
    return replace(
        spectrum, values=spectrum.values[:k], vectors=spectrum.vectors[:, :k], residuals=spectrum.residuals[:k]
    )


def bumps(spectrum, landmarks):
    """Heat that starts at the landmarks, at three times."""
    times = (0.02, 0.1, 0.5)
    heat = [spectrum.vectors * torch.exp(-t * spectrum.frequencies) @ spectrum.vectors[landmarks].T for t in times]
    return torch.cat(heat, dim=1)


def test_the_identity_maps_to_the_identity():
    spectrum = dense_spectrum(creature(200), 0.2, 30)
    C = functional_map(spectrum, spectrum, torch.arange(200))
    torch.testing.assert_close(C, torch.eye(30).double())
    assert (point_map(spectrum, spectrum, C) == torch.arange(200)).all()


def test_functions_are_pulled_back():
    source, target = random_spectrum(20, 20), random_spectrum(30, 30)
    index, f = torch.randint(20, (30,)), torch.randn(20).double()
    C = functional_map(source, target, index)
    assert C.shape == (30, 20)
    torch.testing.assert_close(target.vectors @ (C @ source.project(f)), f[index])  # the bases are complete


def test_composition():
    a, b, c = random_spectrum(20, 12), random_spectrum(30, 30), random_spectrum(25, 14)  # the middle basis is complete
    index_ab, index_bc = torch.randint(20, (30,)), torch.randint(30, (25,))
    C = functional_map(b, c, index_bc) @ functional_map(a, b, index_ab)
    torch.testing.assert_close(functional_map(a, c, index_ab[index_bc]), C)


def test_the_inverse_is_the_adjoint():
    """Maps that keep masses have it in any bases."""
    source, order = random_spectrum(40, 10), torch.randperm(40)
    other = random_spectrum(40, 10)
    basis = torch.linalg.qr(other.vectors * source.mass[order].sqrt()[:, None]).Q
    target = replace(other, vectors=basis / source.mass[order].sqrt()[:, None], mass=source.mass[order])
    forth, back = functional_map(source, target, order), functional_map(target, source, order.argsort())
    torch.testing.assert_close(back, forth.T)


def test_isometries_are_orthogonal_and_commute_with_the_laplacian():
    points = creature(300)
    copy, order = moved_copy(points)
    source, target = (dense_spectrum(x, 0.2, 25) for x in (points, copy))
    C, mu = functional_map(source, target, order), source.frequencies
    torch.testing.assert_close(C.T @ C, torch.eye(25).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(C * mu, mu[:, None] * C, rtol=0, atol=1e-5 * float(mu[-1]))
    assert (point_map(source, target, C) == order).all()


def test_a_point_map_returns_from_its_functional_map():
    """Complete bases and bijections suffice; a tree serves few dimensions, products serve many."""
    for n in (15, 60):
        source, order = random_spectrum(n, n), torch.randperm(n)
        target = replace(source, vectors=source.vectors[order], mass=source.mass[order])
        assert (point_map(source, target, functional_map(source, target, order)) == order).all()


@pytest.mark.parametrize("k", [5, 20, 21, 40])
def test_nearest_neighbors_are_exact(k, monkeypatch):
    monkeypatch.setattr(neighbors, "_MAX_DISTANCES", 1000)  # several chunks
    source, target = random_spectrum(90, 40), random_spectrum(70, k)
    C = torch.randn(k, 40).double()
    expected = torch.cdist(target.vectors, source.vectors @ C.T, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    assert (point_map(source, target, C) == expected).all()
    assert (point_map(source.to(torch.float32), target.to(torch.float32), C) == expected).all()


def test_maps_of_leading_vectors():
    source, target = random_spectrum(50, 20), random_spectrum(40, 20)
    C = torch.randn(7, 5).double()
    assert (point_map(source, target, C) == point_map(leading(source, 5), leading(target, 7), C)).all()


def test_a_fit_minimizes_what_it_says():
    source, target = dense_spectrum(creature(80), 0.3, 6), dense_spectrum(creature(90, 1), 0.3, 8)
    mu_s, mu_t = source.frequencies, target.frequencies
    F_s, F_t = torch.randn(80, 5).double(), torch.randn(90, 5).double()
    A, B = source.project(F_s), target.project(F_t)
    a, b = ((mu.clamp(min=0) / max(mu_s[-1], mu_t[-1])).sqrt() for mu in (mu_t, mu_s))
    resolvents = (1 / (a - 1j))[:, None] - 1 / (b - 1j)

    def objective(C):
        penalty = (resolvents.abs() ** 2 * C**2).sum()
        return ((C @ A - B) ** 2).sum() + 0.3 * (A**2).sum() / 6 * penalty

    C = fit_functional_map(source, target, F_s, F_t, weight=0.3).requires_grad_()
    assert C.shape == (8, 6)
    (gradient,) = torch.autograd.grad(objective(C), C)
    assert float(gradient.abs().amax()) < 1e-7 * float((A**2).sum())


def test_a_fit_does_not_depend_on_units():
    source, target = dense_spectrum(creature(80), 0.3, 6), dense_spectrum(creature(90, 1), 0.3, 8)
    F_s, F_t = torch.randn(80, 5).double(), torch.randn(90, 5).double()
    C = fit_functional_map(source, target, F_s, F_t)
    frequencies = source.frequencies / 49, target.frequencies / 49
    again = fit_functional_map(source, target, 1e3 * F_s, 1e3 * F_t, frequencies=frequencies)
    torch.testing.assert_close(again, C)


@pytest.mark.parametrize("weight", [1.0, 1e-3])
def test_maps_by_signatures_in_float32(weight):
    """Heat kernel signatures are nearly dependent; the reference solves all equations by an SVD in float64."""
    double = [dense_spectrum(creature(300, seed), 0.2, 20) for seed in (0, 1)]
    mu, nu = (spectrum.frequencies for spectrum in double)
    single = [spectrum.to(torch.float32) for spectrum in double]
    F, G = (heat_kernel_signature(s, scaled=True, frequencies=m) for s, m in zip(single, (mu, nu), strict=True))
    C = fit_functional_map(*single, F, G, frequencies=(mu.float(), nu.float()), weight=weight)

    A, B = (s.vectors.double().T @ (s.mass[:, None] * f).double() for s, f in zip(single, (F, G), strict=True))
    largest = torch.maximum(mu[-1], nu[-1])
    a, b = (nu.float().double() / largest).clamp(min=1e-16), (mu.float().double() / largest).clamp(min=1e-16)
    root = (a.sqrt()[:, None] - b.sqrt()) / ((1 + a[:, None]) * (1 + b)).sqrt()
    unit = (A.square().sum() / 20) ** 0.5
    ridge = (20 * 9.1e-13) ** 0.5 * torch.eye(20).double()
    expected = []
    for row, y in zip(root, B, strict=True):
        M = torch.cat([A.T, unit * weight**0.5 * torch.diag(row), unit * ridge])
        expected.append(torch.linalg.lstsq(M, torch.cat([y, torch.zeros(40)]).double(), driver="gelsd").solution)
    expected = torch.stack(expected)
    assert float(torch.linalg.cond(A)) > 1e5
    assert float((C - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_that_no_feature_tells_of(dtype):
    spectrum = dense_spectrum(creature(100), 0.3, 10).to(dtype)
    C = fit_functional_map(spectrum, spectrum, *2 * [spectrum.vectors[:, :3]])
    torch.testing.assert_close(C, torch.diag(torch.arange(10) < 3).to(dtype), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_gradients_of_a_fit():
    source, target = dense_spectrum(creature(12), 0.5, 3), dense_spectrum(creature(14, 1), 0.5, 4)

    def call(F_s, F_t, vectors, mu):
        frequencies = mu, target.frequencies
        return fit_functional_map(
            replace(source, vectors=vectors), target, F_s, F_t, frequencies=frequencies, weight=0.5
        )

    mu = source.frequencies.clamp(min=0.1)
    inputs = torch.randn(12, 5).double(), torch.randn(14, 5).double(), source.vectors, mu
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs])
    mu = torch.cat([torch.zeros(1), source.frequencies[1:]]).requires_grad_()  # √μ has no derivative at 0
    (gradient,) = torch.autograd.grad(call(*inputs[:3], mu).sum(), mu)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("features", ["landmarks", "signatures"])
def test_zoomout_finds_the_order_of_a_copy(features):
    points = creature(500)
    copy, order = moved_copy(points)
    source, target = (dense_spectrum(x, 0.15, 60) for x in (points, copy))
    if features == "landmarks":
        landmarks = torch.tensor([0, 100, 200, 300, 400])
        F_s, F_t = bumps(source, landmarks), bumps(target, order.argsort()[landmarks])
    else:
        F_s, F_t = heat_kernel_signature(source), heat_kernel_signature(target)
    C = fit_functional_map(source, target, F_s, F_t)
    C, index = zoomout(source, target, C, start=10, stop=60, step=5)
    assert float((index == order).double().mean()) > 0.95
    torch.testing.assert_close(C, functional_map(source, target, order), rtol=0, atol=0.1)


def test_zoomout_between_two_samples_of_a_shape():
    a, b = creature(500), creature(600, 1)
    nearest = torch.cdist(b, a).argmin(1)
    source, target = (dense_spectrum(x, 0.15, 60) for x in (a, b))
    landmarks = torch.tensor([0, 100, 200, 300, 400, 450])
    F_s, F_t = bumps(source, landmarks), bumps(target, torch.cdist(a[landmarks], b).argmin(1))
    C = fit_functional_map(leading(source, 20), leading(target, 20), F_s, F_t)
    before = (a[point_map(source, target, C)] - b).norm(dim=1).mean()
    _, index = zoomout(source, target, C, start=20, stop=60, step=5)
    after, least = (a[index] - b).norm(dim=1).mean(), (a[nearest] - b).norm(dim=1).mean()
    assert after < 0.7 * before
    assert after < 2.5 * least  # the creature is 2 long, and its points 0.05 apart


def test_zoomout_of_a_point_map():
    points = creature(300)
    copy, order = moved_copy(points)
    source, target = (dense_spectrum(x, 0.2, 30) for x in (points, copy))
    wrong = order.clone()
    some = torch.randperm(300)[:60]
    wrong[some] = torch.randint(300, (60,))
    C, index = zoomout(source, target, wrong.numpy(), start=8, stop=30, step=4)  # 8, 12, …, 28, 30
    assert C.shape == (30, 30)
    assert float((index == order).double().mean()) > 0.95
    assert (point_map(source, target, C) == index).all()
    once, _ = zoomout(source, target, order, start=30, stop=30)
    torch.testing.assert_close(once, functional_map(source, target, order))


@pytest.mark.usefixtures("_slow_machine")
def test_long_refinements_show_their_passes(monkeypatch):
    spectrum = random_spectrum(30, 20)
    terminal = terminal_of(monkeypatch)
    zoomout(spectrum, spectrum, np.arange(30), start=5, stop=20)
    assert "ZoomOut" in terminal.getvalue()
    assert "/15" in terminal.getvalue()


MU = torch.arange(4.0)
SOURCE, TARGET = random_spectrum(9, 4), random_spectrum(7, 4)
INDEX, F_S, F_T = torch.arange(7), torch.ones(9, 2), torch.ones(7, 2)


def fit(F_s=F_S, F_t=F_T, frequencies=(MU, MU), **options):
    return fit_functional_map(SOURCE, TARGET, F_s, F_t, frequencies=frequencies, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: functional_map(SOURCE, TARGET, INDEX.double()), "`index` should be integers.*got float64"),
        (lambda: functional_map(SOURCE, TARGET, INDEX[:3]), r"`index` should have shape \(7,\).*got \(3,\)\.$"),
        (lambda: functional_map(SOURCE, TARGET, torch.arange(9)), r"got \(9,\). It seems to map the source to the"),
        (lambda: functional_map(SOURCE, TARGET, INDEX + 3), "number source points from 0 to 8; got .* from 3 to 9"),
        (lambda: functional_map(SOURCE, TARGET, INDEX - 1), "number source points from 0 to 8; got .* from -1 to 5"),
        (lambda: fit(F_S[:, 0]), r"`source_features` should have shape \(9, d\), one row per point; got \(9,\)"),
        (lambda: fit(F_S, F_S), r"`target_features` should have shape \(7, d\).*got \(9, 2\)"),
        (lambda: fit(F_S, F_T[:, :1]), r"`target_features` should have the d = 2 columns.*got \(7, 1\)"),
        (lambda: fit(F_S * torch.nan), "`source_features` should be finite"),
        (lambda: fit(0 * F_S), "`source_features` should not all be 0"),
        (lambda: fit(frequencies=(MU, MU[:3])), r"`frequencies of the target` should have shape \(4,\).*got \(3,\)"),
        (lambda: fit(frequencies=(MU.flip(0), MU)), "`frequencies of the source` should ascend"),
        (lambda: fit(frequencies=None), "`sigma=None`.*Take `laplacian_eigenvalues"),
        (lambda: fit(weight=-1), "`weight` should be 0 or more"),
        (lambda: point_map(SOURCE, TARGET, torch.eye(5)), r"from \(1, 1\) to \(4, 4\).*got \(5, 5\)"),
        (lambda: point_map(SOURCE, TARGET, INDEX), r"`C` should have shape \(k_target, k_source\).*got \(7,\)"),
        (lambda: point_map(SOURCE, TARGET, torch.eye(4) / 0), "`C` should be finite"),
        (lambda: zoomout(SOURCE, TARGET, torch.eye(2), start=3, stop=4), r"from \(3, 3\) to \(4, 4\).*got \(2, 2\)"),
        (lambda: zoomout(SOURCE, TARGET, INDEX, start=3, stop=5), "`stop` should be from `start`, 3, .*, 4; got 5"),
        (lambda: zoomout(SOURCE, TARGET, INDEX, start=3, stop=2), "`stop` should be from `start`, 3, .*, 4; got 2"),
        (lambda: zoomout(SOURCE, TARGET, INDEX, start=0, stop=2), "`start` should be an integer of at least 1"),
        (lambda: zoomout(SOURCE, TARGET, INDEX, start=2, stop=4, step=0), "`step` should be an integer of at least 1"),
        (lambda: zoomout(SOURCE, TARGET, INDEX.double(), start=2, stop=4), "`index` should be integers"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_arrays_in_arrays_out():
    spectrum = dense_spectrum(creature(60), 0.4, 6)
    arrays = spectrum.numpy()
    index, F = np.arange(60)[::-1], arrays.vectors[:, :4]
    for name, made, same in (
        ("functional_map", functional_map(arrays, arrays, index), functional_map(spectrum, spectrum, index.copy())),
        (
            "fit_functional_map",
            fit_functional_map(arrays, arrays, F, F),
            fit_functional_map(spectrum, spectrum, F, F),
        ),
        ("point_map", point_map(arrays, arrays, np.eye(6)), point_map(spectrum, spectrum, torch.eye(6))),
        ("zoomout", *(zoomout(s, s, index, start=3, stop=6)[1] for s in (arrays, spectrum))),
    ):
        assert isinstance(made, np.ndarray), name
        assert isinstance(same, torch.Tensor), name
        np.testing.assert_array_equal(made, same.numpy())

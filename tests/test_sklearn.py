"""Diffusion maps: the protocol of scikit-learn, shapes with known eigenvectors, and laws."""

import numpy as np
import pytest
from cases import slow
from scipy.stats import ortho_group, spearmanr
from sklearn.datasets import load_digits, make_blobs, make_swiss_roll
from sklearn.utils.estimator_checks import parametrize_with_checks

import qattn
from qattn.sklearn import SinkhornDiffusionMap


@pytest.mark.slow
@parametrize_with_checks([SinkhornDiffusionMap(), SinkhornDiffusionMap(t=0.5, density="estimated")])
def test_protocol(estimator, check):
    check(estimator)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def circle(angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def strip(rng, N):
    return rng.uniform(size=(N, 3)) * [5, 2, 0.1]


def unevenness(radii):
    return radii.std() / radii.mean()


@pytest.mark.slow
def test_modes_of_a_circle_are_a_circle():
    angles = np.linspace(0, 2 * np.pi, 300, endpoint=False)
    model = SinkhornDiffusionMap().fit(circle(angles))
    assert unevenness(np.linalg.norm(model.embedding_, axis=1)) < 1e-6
    assert model.eigenvalues_ == pytest.approx(
        np.exp(-(model.sigma_**2) / 2), rel=1e-4
    )  # the Laplacian has the eigenvalue 1
    between = model.transform(circle(angles + 0.01))
    assert unevenness(np.linalg.norm(between, axis=1)) < 1e-6


def test_first_mode_of_a_strip_runs_along_it(rng):
    X = strip(rng, 1000)
    psi = SinkhornDiffusionMap(n_components=1).fit_transform(X)
    assert abs(spearmanr(psi[:, 0], X[:, 0]).statistic) > 0.995


@pytest.mark.slow
def test_first_mode_of_a_swiss_roll_unrolls_it():
    X, along = make_swiss_roll(1500, random_state=0)
    psi = SinkhornDiffusionMap(n_components=1).fit_transform(X)
    assert abs(spearmanr(psi[:, 0], along).statistic) > 0.999


@pytest.mark.slow
def test_new_samples_are_where_they_would_have_been(rng):
    X = strip(rng, 1500)
    model = SinkhornDiffusionMap().fit(X[300:])
    there = SinkhornDiffusionMap(sigma=model.sigma_).fit(X).embedding_[:300]
    held_out = model.transform(X[:300])
    held_out = held_out * np.sign((held_out * there).sum(0))
    assert np.linalg.norm(held_out - there) < 0.05 * np.linalg.norm(there)


@pytest.mark.parametrize("density", ["uniform", "estimated"])
def test_moves_and_units_do_not_matter(rng, density):
    X = strip(rng, 500)
    model = SinkhornDiffusionMap(density=density).fit(X)
    moved = SinkhornDiffusionMap(density=density).fit(100 * X @ ortho_group.rvs(3, random_state=0) + 7)
    assert moved.sigma_ == pytest.approx(100 * model.sigma_, rel=1e-10)
    assert moved.eigenvalues_ == pytest.approx(model.eigenvalues_, rel=1e-8)
    assert moved.embedding_ == pytest.approx(model.embedding_, abs=1e-5)


def test_estimated_masses_take_out_the_density(rng):
    fine = np.linspace(0, 2 * np.pi, 1000)
    angles = np.sort(np.interp(rng.uniform(size=800), (fine + 0.8 * np.sin(fine)) / (2 * np.pi), fine))

    def error(density):
        """Error of the angles in the embedding, up to a rotation and a reflection."""
        psi = SinkhornDiffusionMap(sigma=0.1, density=density).fit_transform(circle(angles))
        found = np.unwrap(np.arctan2(psi[:, 1], psi[:, 0]))
        return (found * np.sign(found[-1] - found[0]) - angles).std()

    assert error("estimated") < 0.05 < 0.2 < error("uniform")


@pytest.mark.parametrize("size", [300, 900])  # by LAPACK, and by passes of the kernel
@pytest.mark.parametrize("parts", [2, slow(3)])
def test_parts_that_do_not_see_one_another_are_told_apart(size, parts):
    X, part = make_blobs(size, centers=1000 * np.eye(parts), random_state=0)
    psi = SinkhornDiffusionMap(n_components=parts - 1).fit_transform(X)
    middles = np.stack([psi[part == i].mean(0) for i in range(parts)])
    assert np.abs(psi - middles[part]).max() < 1e-4
    assert np.linalg.norm(middles[:, None] - middles, axis=-1)[~np.eye(parts, dtype=bool)].min() > 1
    assert psi.mean(0) == pytest.approx(0, abs=1e-10)  # orthogonal to constants


@pytest.mark.slow
def test_time_scales_the_modes(rng):
    X = strip(rng, 200)
    first, later = (SinkhornDiffusionMap(t=t, sigma=0.5).fit(X) for t in (0, 2.5))
    assert later.embedding_ == pytest.approx(first.eigenvalues_**2.5 * first.embedding_)
    assert (first.embedding_**2).mean(0) == pytest.approx(1, rel=1e-5)  # orthonormal for the masses


@pytest.mark.slow
def test_many_features():
    X = load_digits().data[:400]
    model = SinkhornDiffusionMap(n_components=5).fit(X)
    assert model.diffusion_.kernel.method == "exact"
    single = SinkhornDiffusionMap(n_components=5).fit_transform(X.astype(np.float32))
    assert single.dtype == np.float32
    assert single == pytest.approx(model.embedding_, abs=1e-5)
    assert list(model.get_feature_names_out()[:2]) == ["sinkhorndiffusionmap0", "sinkhorndiffusionmap1"]
    assert isinstance(model.diffusion_, qattn.Diffusion)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "`n_components` should be an integer of at least 1; got 0"),
        ({"n_components": 20}, "`n_components` should be less than the number of samples, 20; got 20"),
        ({"sigma": "median"}, "`sigma` should be 'auto'; got 'median'"),
        ({"sigma": -1.0}, "`sigma` should be positive"),
        ({"sigma": [1.0, 2.0]}, "`sigma` should be one number"),
        ({"t": -1.0}, "`t` should be 0 or more"),
        ({"density": "none"}, "`density` should be 'uniform' or 'estimated'; got 'none'"),
    ],
)
def test_wrong_options_are_said(rng, options, message):
    with pytest.raises(ValueError, match=message):
        SinkhornDiffusionMap(**options).fit(rng.normal(size=(20, 2)))


def test_repeated_samples_have_no_bandwidth():
    with pytest.raises(ValueError, match="the distance to neighbor 10, which is 0 for 90% of the samples"):
        SinkhornDiffusionMap().fit(np.repeat(np.eye(2), 20, axis=0))

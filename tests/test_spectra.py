"""Spectra against LAPACK and closed forms, and the laws that they obey on every modality."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import ball, slow, sphere
from scipy.special import ive

from qattn import (
    ExponentialKernel,
    GaussianKernel,
    GraphKernel,
    MatrixKernel,
    MixtureKernel,
    Solver,
    Spectrum,
    VoxelKernel,
    diffusion,
    eigsh,
    laplacian_eigenvalues,
    shapes,
)
from qattn.ranks import ALONE
from qattn.spectra.coarse import centers_of_mass
from qattn.spectra.linalg import orthonormalize_

pytestmark = pytest.mark.usefixtures("_one_thread")


def dense(q, k):
    """Leading eigenvalues by LAPACK."""
    matrix = q.to_dense().double()
    values = torch.linalg.eigvals(matrix).real.sort(descending=True).values
    return values[:k]


def check(q, spectrum, k, tol=1e-2):
    """Check the laws: orthonormal eigenpairs of a well-normalized q, in descending order, with true residuals."""
    values, vectors, mass = spectrum.values, spectrum.vectors, spectrum.mass
    assert (len(spectrum), *vectors.shape) == (k, q.shape[-1], k)
    torch.testing.assert_close(mass.sum(), torch.ones_like(mass.sum()))
    gram = vectors.double().T @ (mass[:, None] * vectors).double()
    torch.testing.assert_close(gram, torch.eye(k).to(gram), rtol=0, atol=1e-4)
    assert (values.diff() <= 1e-6).all()
    residuals = (mass[:, None] * (q @ vectors - values * vectors) ** 2).sum(0).sqrt()
    torch.testing.assert_close(residuals, spectrum.residuals, rtol=0.1, atol=2e-6)
    assert float(residuals.amax()) <= max(tol * (1 - float(values[-1])), 1e-5)
    assert (vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all()


OPERATORS = {
    "gaussian": lambda: diffusion(sphere(900), 0.3, torch.rand(900), tol=1e-9),
    "mixture": lambda: diffusion(MixtureKernel(ball(800), 0.01 * torch.rand(800, 3), 0.3), tol=1e-9),
    "voxels": lambda: diffusion(VoxelKernel(torch.ones(12, 10, 9), 2.0), tol=1e-6),
    "graph": lambda: diffusion(GraphKernel(_grid_graph(30)), tol=1e-6, solver=Solver(max_iter=300)),
    "matrix": lambda: diffusion(MatrixKernel(torch.exp(-_distances(ball(700)) / 0.5)), tol=1e-9),
    "row": lambda: diffusion(sphere(900), 0.3, normalization="row"),
    "symmetric": lambda: diffusion(sphere(900), 0.3, normalization="symmetric"),
}


def _distances(x):
    return (x[:, None] - x).norm(dim=-1)


def _grid_graph(n):
    index = torch.arange(n * n).reshape(n, n)
    steps = (index[1:], index[:-1]), (index[:, 1:], index[:, :-1])
    pairs = torch.cat([torch.stack(ends).flatten(1) for ends in steps], dim=1)
    return torch.cat([pairs, pairs.flip(0)], dim=1)


@pytest.mark.parametrize("name", ["gaussian", *map(slow, list(OPERATORS)[1:])])
def test_eigenpairs_of_every_operator(name):
    q = OPERATORS[name]()
    spectrum = eigsh(q, 12, tol=1e-3)
    check(q, spectrum, 12, 1e-3)
    torch.testing.assert_close(spectrum.values.double(), dense(q, 12), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["symmetric", "none"])
def test_operators_that_do_not_keep_constants_are_solved_as_exactly(normalization):
    """A large |Q1 − 1| of such operators is no error of the solver, and must not loosen its tolerance."""
    points = torch.cat([sphere(700), 0.3 * sphere(300) + 1])
    q = diffusion(points, 0.3, normalization=normalization)
    spectrum = eigsh(q, 8, tol=1e-4)
    last = float(spectrum.values[-1])
    assert float(q.marginal_error) > 0.01
    assert float(spectrum.residuals.amax()) <= 1e-4 * min(last, 1 - last)
    torch.testing.assert_close(spectrum.values, dense(q, 8), rtol=0, atol=1e-7)


def test_few_points_go_to_lapack():
    q = diffusion(sphere(60), 0.5, tol=1e-13)
    for k in (1, 5, 60):
        spectrum = eigsh(q, k)
        torch.testing.assert_close(spectrum.values, dense(q, k), rtol=0, atol=1e-10)
        assert float(spectrum.residuals.amax()) < 1e-12
    assert len(eigsh(diffusion(torch.zeros(1, 3), 1.0), 1)) == 1


def closed_form(k, sigma, radius=0.5):
    """Eigenvalues of Q on a sphere, with their multiplicities."""
    kappa = radius**2 / sigma**2
    values = [ive(level + 0.5, kappa) / ive(0.5, kappa) for level in range(12) for _ in range(2 * level + 1)]
    return torch.tensor(values[:k])


@pytest.mark.parametrize("n", [3000, slow(20_000)])
def test_the_sphere(n):
    """λ_l = I_{l+½}(R²/σ²) / I_½(R²/σ²), 2l + 1 times; the larger cloud starts from a coarse level."""
    sigma = 0.05
    q = diffusion(0.5 * sphere(n).float(), sigma, tol=1e-6)
    spectrum = eigsh(q, 36)
    check(q, spectrum, 36)
    exact = laplacian_eigenvalues(closed_form(36, sigma), sigma)
    deviation = ((spectrum.frequencies - exact) / exact.clamp(min=1)).abs()
    assert float(deviation.median()) < 400 / n  # sampling
    levels = [spectrum.frequencies[level**2 : (level + 1) ** 2] for level in range(6)]
    for lower, upper in pairwise(levels):
        assert lower.amax() < upper.amin()  # gaps between the multiplets


@pytest.mark.slow
def test_small_bandwidths_of_large_clouds():
    """Eigenvalues crowd below 1, and coarse levels need a wider kernel."""
    sigma = 0.02
    points = shapes.creature(12_000)[0]
    q = diffusion(points, sigma, tol=1e-6)
    spectrum = eigsh(q, 10)
    check(q, spectrum, 10)
    assert float(spectrum.values[-1]) > 0.97
    exact = diffusion(points, sigma, method="exact", tol=1e-6)
    ritz = spectrum.vectors.T @ (spectrum.mass[:, None] * (exact @ spectrum.vectors))
    torch.testing.assert_close(ritz.diagonal(), spectrum.values, rtol=0, atol=1e-4)


@pytest.fixture
def passes(monkeypatch):
    """Shapes of Gaussian kernels, one per pass with values."""
    shapes_of_passes, attend = [], GaussianKernel.attend

    def counted(self, bias, value=None, **options):
        if value is not None:
            shapes_of_passes.append(tuple(self.shape))
        return attend(self, bias, value, **options)

    monkeypatch.setattr(GaussianKernel, "attend", counted)
    return shapes_of_passes


@pytest.mark.slow
def test_coarser_levels_leave_little_to_do(passes):
    """Eigenvectors of coarser levels lack only detail, which short filters recover: few passes use all points."""
    q = diffusion(shapes.creature(40_000)[0], 0.03, tol=1e-6)
    spectrum = eigsh(q, 10)
    assert passes.count((5000, 5000)) > 0
    assert passes.count((40_000, 40_000)) <= 20  # 25 from a random sample, and hundreds from noise
    assert float(spectrum.values[-1]) > 0.97
    check(q, spectrum, 10)


def test_coarser_levels_know_the_masses():
    """Centers are centers of mass, and points without mass do not contribute."""
    points = torch.rand(100, 3)
    mass = torch.rand(100)
    mass[::5] = 0
    centers, masses = centers_of_mass(points, mass)
    assert len(centers) == 80 / 8
    torch.testing.assert_close(masses.sum(), mass.sum())
    torch.testing.assert_close((masses[:, None] * centers).sum(0), (mass[:, None] * points).sum(0))


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "k"), [(0.2, 40), (0.3, 40), (0.5, 9), (1.0, 4)])
def test_wide_kernels(sigma, k):
    """Eigenvalues decay to rounding: a filter must not bury the last eigenvector under the first."""
    q = diffusion(shapes.creature(2000)[0], sigma, tol=1e-6)
    spectrum = eigsh(q, k)
    matrix = q.to_dense().double()  # symmetric, as masses are equal
    exact = torch.linalg.eigvalsh((matrix + matrix.T) / 2).flip(0)[:k]
    torch.testing.assert_close(spectrum.values.double(), exact, rtol=2e-3, atol=1e-6)
    assert float(spectrum.residuals.amax()) <= 1e-2 * float(exact[-1].clamp(max=1 - exact[-1]))


@pytest.mark.slow
def test_deterministic_and_from_a_start(passes):
    q = diffusion(sphere(5000).float(), 0.15, tol=1e-6)
    first, second = eigsh(q, 16), eigsh(q, 16)
    assert torch.equal(first.vectors, second.vectors)
    passes.clear()
    again = eigsh(q, 16, init=first)
    assert len(passes) <= 8  # only the columns beyond the start are noise
    torch.testing.assert_close(again.values, first.values, rtol=0, atol=1e-4)
    check(q, eigsh(q, 16, init=first.vectors[:, :4]), 16)


def test_points_without_mass_get_their_extension():
    points, mass = sphere(900), torch.rand(900).double()
    mass[::9] = 0
    q = diffusion(points, 0.3, mass, tol=1e-8)
    spectrum = eigsh(q, 9, tol=1e-4)
    check(q, spectrum, 9, 1e-3)
    alone = diffusion(points[mass > 0], 0.3, mass[mass > 0], tol=1e-8)
    expected = alone.extend(points) @ spectrum.vectors[mass > 0] / spectrum.values
    torch.testing.assert_close(spectrum.vectors, expected, rtol=0, atol=1e-2)


def test_a_disconnected_graph_has_as_many_ones():
    two = torch.block_diag(torch.ones(400, 400), torch.ones(300, 300)) - torch.eye(700)
    values = eigsh(diffusion(GraphKernel(two)), 3).values
    torch.testing.assert_close(values[:2], torch.ones(2), rtol=0, atol=1e-3)
    assert values[2] < 0.9


def test_powers():
    q = diffusion(sphere(300), 0.5, tol=1e-10)
    spectrum, signal = eigsh(q, 300), torch.randn(300, 2).double()
    for t in (1, 3):
        torch.testing.assert_close(spectrum.power(t, signal), q.power(t, signal), rtol=0, atol=1e-8)
    half = spectrum.power(0.5, signal)
    torch.testing.assert_close(spectrum.power(0.5, half), q @ signal, rtol=0, atol=1e-6)
    torch.testing.assert_close(spectrum.power(0, signal[:, 0]), signal[:, 0], rtol=0, atol=1e-8)
    torch.testing.assert_close(q.power(2.5, signal, spectrum=spectrum), spectrum.power(2.5, signal), rtol=0, atol=1e-8)
    with pytest.raises(ValueError, match=r"`t` should be an integer.*eigsh"):
        q.power(0.5, signal)
    with pytest.raises(ValueError, match="`t` should be 0 or more"):
        spectrum.power(-1, signal)


@pytest.mark.slow
def test_minus_log():
    """Linear functions on the sphere have the eigenvalue 2."""
    points = sphere(3000)
    spectrum = eigsh(diffusion(points, 0.2, tol=1e-7), 16, tol=1e-4)
    laplacian = 2 / 0.2**2 * spectrum.minus_log(points)
    torch.testing.assert_close(
        (laplacian * points).mean() / (points**2).mean(), torch.tensor(2.0).double(), rtol=0.05, atol=0
    )
    slope = (spectrum.power(1 + 1e-4, points[:, 0]) - spectrum.power(1 - 1e-4, points[:, 0])) / 2e-4
    torch.testing.assert_close(-slope, spectrum.minus_log(spectrum.power(1, points[:, 0])), rtol=0, atol=1e-7)
    wide = Spectrum(torch.tensor([1.0, -0.1]), torch.ones(2, 2), torch.zeros(2), torch.ones(2) / 2)
    with pytest.raises(ValueError, match="1 of the 2 eigenvalues are 0 or less"):
        wide.minus_log(torch.ones(2))


def test_laplacian_eigenvalues():
    found = laplacian_eigenvalues([1.0, np.exp(-0.5)], 0.1)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, [0, 100])
    with pytest.warns(UserWarning, match="2 of the 3 eigenvalues of Q are 0 or less") as record:
        found = laplacian_eigenvalues(torch.tensor([0.5, 0.0, -0.146]), 1.0)
    assert found.isinf().tolist() == [False, True, True]
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        laplacian_eigenvalues(torch.tensor([0.5]), 1.0)


@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "full"])
def test_the_effective_bandwidth_of_a_mixture(kind):
    variances = torch.tensor([0.01, 0.03]).double()
    spread = {
        "isotropic": variances,
        "diagonal": variances[:, None].expand(2, 3),
        "full": variances[:, None, None] * torch.eye(3).double(),
    }[kind]
    kernel = MixtureKernel(torch.zeros(2, 3).double(), spread, 0.1, [1.0, 3.0])
    assert kernel.effective_sigma(3) == pytest.approx((0.01 + 2 * 0.025) ** 0.5)
    assert kernel.effective_sigma(2) == pytest.approx((0.01 + 3 * 0.025) ** 0.5)


BANDWIDTHS = {
    "points": (lambda x: GaussianKernel(x, 0.4), {}, 0.4),
    "rows": (lambda x: GaussianKernel(x, 0.4), {"normalization": "row"}, 0.4),
    "voxels": (lambda x: VoxelKernel(torch.ones(4, 3, 2), 1.5), {}, 1.5),
    "mixture": (lambda x: MixtureKernel(x, torch.full((30,), 0.01), 0.4), {}, (0.4**2 + 3 * 0.01) ** 0.5),
    "learned": (lambda x: MixtureKernel(x, 0 * x[:, 0], torch.tensor(0.4, requires_grad=True)), {}, 0.4),
    "none": (lambda x: GaussianKernel(x, 0.4), {"normalization": "none"}, None),
    "exponential": (lambda x: ExponentialKernel(x, 0.4), {}, None),
    "matrix": (lambda x: MatrixKernel(torch.exp(-torch.cdist(x, x))), {}, None),
}


@pytest.mark.parametrize("name", BANDWIDTHS)
def test_frequencies_follow_from_the_bandwidth_of_the_kernel(name):
    make, options, sigma = BANDWIDTHS[name]
    spectrum = eigsh(diffusion(make(sphere(30)), **options), 5)
    if sigma is None:
        assert spectrum.sigma is None
        with pytest.raises(ValueError, match=r"`sigma=None`.*`laplacian_eigenvalues\(spectrum.values, sigma\)`"):
            _ = spectrum.frequencies
    else:
        assert spectrum.sigma == pytest.approx(sigma, rel=1e-6)
        torch.testing.assert_close(spectrum.frequencies, laplacian_eigenvalues(spectrum.values, sigma))


def test_conversions_of_a_spectrum():
    spectrum = eigsh(diffusion(sphere(60), 0.5), 4)
    single = spectrum.to(torch.float32)
    arrays = spectrum.numpy()
    for name in ("values", "vectors", "residuals", "mass"):
        field = getattr(spectrum, name)
        torch.testing.assert_close(getattr(single, name), field.float(), rtol=0, atol=0)
        np.testing.assert_array_equal(getattr(arrays, name), field.numpy())
        assert torch.equal(getattr(arrays.torch(), name), field)
        assert getattr(arrays.to("meta"), name).device.type == "meta"
    assert single.sigma == arrays.sigma == arrays.torch().sigma == 0.5
    assert isinstance(arrays.frequencies, np.ndarray)


def test_wrong_input():
    q = diffusion(sphere(50), [0.1, 0.2])
    with pytest.raises(ValueError, match=r"takes one cloud with one bandwidth; this operator has shape \(2, 50, 50\)"):
        eigsh(q, 2)
    q = diffusion(sphere(700), 0.3)
    for k, message in (
        (0, "`k` should be an integer of at least 1"),
        (701, "`k` should be at most the number of points"),
    ):
        with pytest.raises(ValueError, match=message):
            eigsh(q, k)
    with pytest.raises(ValueError, match="`tol` should be positive"):
        eigsh(q, 3, tol=0)


def dense_operator(K, mass):
    """Q = ΛKMΛ with rows that sum to 1, by many plain steps in float64."""
    f = torch.zeros(len(K), dtype=torch.float64)
    for _ in range(500):
        f = 0.5 * (f - torch.log(K @ (mass * torch.exp(f))))
    return torch.exp(f)[:, None] * K * (mass * torch.exp(f))


def symmetric_values(Q, mass):
    """All eigenvalues of a matrix that is self-adjoint for the masses, in descending order."""
    root = mass.sqrt()
    S = root[:, None] * Q / root
    return torch.linalg.eigvalsh((S + S.T) / 2).flip(0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalization", ["sinkhorn", "row"])
def test_the_constant_mode_is_known(normalization, dtype):
    """The first frequency is 0 and the next are accurate, although −(2/σ²) log λ amplifies errors of 1e-6 in λ."""
    angle = 2 * torch.pi * torch.rand(2000).double()
    points, sigma = torch.stack([angle.cos(), angle.sin()], dim=1).to(dtype), 0.02
    x, mass = points.double(), torch.full((2000,), 1 / 2000).double()
    K = torch.exp(-((x[:, None] - x) ** 2).sum(-1) / (2 * sigma**2))
    if normalization == "sinkhorn":
        exact = symmetric_values(dense_operator(K, mass), mass)
    else:
        exact = symmetric_values(K / K.sum(1, keepdim=True), K.sum(1))
    expected = laplacian_eigenvalues(exact[:6], sigma)
    spectrum = eigsh(diffusion(points, sigma, normalization=normalization), 6)  # with the default tolerance
    found = spectrum.frequencies.double()
    assert found[0] == 0
    assert (spectrum.vectors[:, 0] == 1).all()
    torch.testing.assert_close(found[1:], expected[1:], rtol=2e-2 if dtype == torch.float32 else 1e-3, atol=0)
    assert float(spectrum.residuals[0]) < 1e-5


def test_constants_of_several_parts():
    """λ = 1 once per part: the first eigenvector is constant, the others are constant on each part."""
    parts = torch.cat([sphere(400), sphere(500) + 10, sphere(300) - 10])
    q = diffusion(parts, 0.3, tol=1e-9)
    spectrum = eigsh(q, 6, tol=1e-4)
    check(q, spectrum, 6, 1e-3)
    torch.testing.assert_close(spectrum.values[:3], torch.ones(3).double(), rtol=0, atol=1e-8)
    for part in spectrum.vectors[:, :3].split([400, 500, 300]):
        assert float(part.std(0).amax()) < 1e-3


@pytest.mark.slow
def test_few_points_with_mass_among_many():
    points, mass = sphere(5000), torch.zeros(5000).double()
    present = torch.tensor([3, 80, 900, 1500, 2222, 3456, 4999])
    mass[present] = torch.rand(7).double() + 0.1
    x, m = points[present], mass[present] / mass.sum()
    K = torch.exp(-((x[:, None] - x) ** 2).sum(-1) / (2 * 0.5**2))
    q = diffusion(points, 0.5, mass, tol=1e-12)
    spectrum = eigsh(q, 7)
    torch.testing.assert_close(spectrum.values, symmetric_values(dense_operator(K, m), m), rtol=0, atol=1e-9)
    check(q, spectrum, 7)
    with pytest.raises(ValueError, match="`k` should be at most the number of points with mass, 7; got 8"):
        eigsh(q, 8)
    for count in (300, 20):  # with few points in total
        with pytest.raises(ValueError, match="the number of points with mass, 19"):
            eigsh(diffusion(sphere(count), 0.5, (torch.arange(count) < 19).double()), 20)


@pytest.mark.slow
def test_indefinite_similarities():
    """Two halves more similar to one another than to themselves: an eigenvalue −λ per λ, below the damped interval."""
    points = sphere(500)
    G = torch.exp(-(_distances(points) ** 2) / (2 * 0.1**2))
    K = torch.cat([torch.cat([0.1 * G, G], dim=1), torch.cat([G, 0.1 * G], dim=1)])
    exact = symmetric_values(dense_operator(K, torch.ones(1000).double() / 1000), torch.ones(1000).double())
    assert (exact < -0.5).sum() > 20
    q = diffusion(MatrixKernel(K), tol=1e-9, solver=Solver(max_iter=500))
    for k in (1, 4):
        spectrum = eigsh(q, k, tol=1e-3)
        torch.testing.assert_close(spectrum.values, exact[:k], rtol=0, atol=1e-5)
    check(q, spectrum, 4, 1e-2)


@pytest.mark.parametrize("scale", [1e-6, slow(1.0), slow(1e4)])
def test_operators_of_any_size(scale):
    """The largest eigenvalue can have any size with "none"."""
    points = sphere(900)
    K = torch.exp(-((points[:, None] - points) ** 2).sum(-1) / (2 * 0.3**2))
    q = diffusion(points, 0.3, torch.full((900,), scale), normalization="none")
    for k in (1, 5):
        found = eigsh(q, k, tol=1e-4).values
        torch.testing.assert_close(found / scale, torch.linalg.eigvalsh(K).flip(0)[:k], rtol=1e-6, atol=0)


def test_points_that_see_nobody():
    """Q = I."""
    spectrum = eigsh(diffusion(1e6 * torch.rand(5000, 3), 0.3), 5)
    torch.testing.assert_close(spectrum.values, torch.ones(5))
    assert float(spectrum.residuals.amax()) < 1e-5


@pytest.mark.parametrize("n", [50, 700])
def test_a_wrong_start_is_refused(n):
    q = diffusion(sphere(n), 0.5)
    for init, message in (
        (torch.zeros(5, 3), rf"`init` should be a spectrum or vectors of shape \({n}, n\); got \(5, 3\)"),
        (torch.zeros(n), r"`init` should be a spectrum or vectors"),
        (torch.full((n, 3), torch.nan), "`init` should be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            eigsh(q, 3, init=init)
    with pytest.raises(TypeError, match="`init` should be a tensor or an array of numbers; got str"):
        eigsh(q, 3, init="warm")


@pytest.mark.parametrize("n", [100, 900])
def test_arrays_in_arrays_out(n):
    """A spectrum holds arrays if its operator was made from arrays; methods return the kind of their signal."""
    points, signal = sphere(n).float(), torch.randn(n, 2).double()
    tensors, arrays = eigsh(diffusion(points, 0.4), 5), eigsh(diffusion(points.numpy(), 0.4), 5)
    for name in ("values", "vectors", "residuals", "mass"):
        assert isinstance(getattr(tensors, name), torch.Tensor)
        assert isinstance(getattr(arrays, name), np.ndarray)
        np.testing.assert_array_equal(getattr(arrays, name), getattr(tensors, name).numpy())
    q = diffusion(points.numpy(), 0.4)
    for spectrum in (tensors, arrays):
        for apply in (spectrum.project, lambda f, s=spectrum: s.power(0.5, f), spectrum.minus_log):
            assert isinstance(apply(signal), torch.Tensor)
            assert isinstance(apply(signal.numpy()), np.ndarray)
            np.testing.assert_allclose(apply(signal.numpy()), apply(signal).numpy())
            np.testing.assert_allclose(apply(signal[:, 0].numpy()), apply(signal).numpy()[:, 0])
        assert isinstance(q.power(1.5, signal.numpy(), spectrum=spectrum), np.ndarray)
        assert isinstance(eigsh(q, 5, init=spectrum).values, np.ndarray)
    assert isinstance(laplacian_eigenvalues(arrays.values, 0.4), np.ndarray)
    with pytest.raises(ValueError, match=rf"`signal` should have shape \({n},\)"):
        arrays.project(signal[:7])


def test_sums_over_many_points():
    """Sums in float32 would have relative errors of 1e-3."""
    n = 200_000
    spectrum = Spectrum(torch.ones(1), torch.ones(n, 1), torch.zeros(1), torch.full((n,), 1 / n))
    torch.testing.assert_close(spectrum.project(torch.ones(n)), torch.ones(1))


def test_a_missed_tolerance_is_warned_of():
    q = diffusion(sphere(2000).float(), 0.1)
    with pytest.warns(UserWarning, match="eigsh stopped after .* or take float64") as record:
        spectrum = eigsh(q, 30, tol=1e-4, max_iter=8)
    assert record[0].filename == __file__
    assert isinstance(spectrum, Spectrum)
    assert float(spectrum.residuals.amax()) > 1e-5


def test_many_columns_are_worth_another_method():
    kernel = GaussianKernel(sphere(30_000).float(), 0.15)
    assert kernel.method == "fourier"
    assert kernel.for_channels(100).method == "tiles"
    assert diffusion(kernel).for_channels(100).kernel.method == "tiles"


@pytest.mark.parametrize("dependence", [1.0, 1e-2, 1e-6, 0.0])
def test_orthonormal_bases_of_nearly_dependent_columns(dependence):
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(5000, 6, generator=generator)
    columns[:, 3] = columns[:, 0] + dependence * columns[:, 3]
    columns = columns * torch.tensor([1.0, 1e-4, 1e4, 1.0, 1.0, 1.0])
    basis = orthonormalize_(columns.clone(), ALONE)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6), rtol=0, atol=3e-6)
    rest = columns - basis @ (basis.T @ columns)
    assert (rest.norm(dim=0) <= 1e-5 * columns.norm(dim=0)).all()

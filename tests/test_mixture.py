"""Mixtures: the overlaps of Gaussians, by the definition, in every dimension, form and method."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from cases import ball, slow, sphere
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import added_megabytes
from scipy.spatial.transform import Rotation

from qattn import GaussianKernel, MixtureKernel, Solver, check_axioms, diffusion, sinkhorn
from qattn.kernels.mixture_overlap import Overlap
from qattn.tiles.mixture import MixtureTiles, MixtureTiling

pytestmark = pytest.mark.usefixtures("_one_thread")


def covariances(kind, n, d, size=0.1):
    """Random ones, much longer than wide, float64."""
    axes = size * torch.exp(torch.randn(n, d, dtype=torch.float64))
    if kind == "isotropic":
        return axes[:, 0] ** 2
    if kind == "diagonal":
        return axes**2
    turns = torch.linalg.qr(torch.randn(n, d, d, dtype=torch.float64)).Q * axes[:, None]
    return turns @ turns.mT


def full(covariances, n, d):
    if covariances.shape == (n,):
        return covariances[:, None, None] * torch.eye(d).double()
    return torch.diag_embed(covariances) if covariances.shape == (n, d) else covariances


def dense(means, matrices, sigma, form="overlap", targets=None):
    """The definition, pair by pair."""
    d = means.shape[-1]
    x = means if targets is None else targets
    C = sigma**2 * torch.eye(d).double() + matrices[None] + (matrices[:, None] if targets is None else 0)
    C = C.expand(len(x), -1, -1, -1)
    apart = x[:, None] - means[None]
    exponent = -0.5 * (apart[..., None, :] @ torch.linalg.solve(C, apart[..., None]))[..., 0, 0]
    factor = torch.linalg.det(C / sigma**2) ** -0.5 if form == "overlap" else 1
    return factor * torch.exp(exponent)


def attended(matrix, bias, value):
    weights = matrix * torch.exp(bias)
    return weights @ value / weights.sum(-1, keepdim=True), torch.log(weights.sum(-1))


def check(kernel, matrix, tolerance=1e-9):
    bias, value = 3 * torch.randn(matrix.shape[-1]).double(), torch.randn(matrix.shape[-1], 3).double()
    found, expected = kernel.attend(bias, value), attended(matrix, bias, value)
    torch.testing.assert_close(found.lse, expected[1], rtol=0, atol=tolerance)
    torch.testing.assert_close(found.out, expected[0], rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(kernel.attend(bias).lse, expected[1], rtol=0, atol=tolerance)
    if kernel.method == "tiles":  # in torch, as on other devices: gradients that can be differentiated again
        weights = torch.randn(*expected[0].shape).double(), torch.randn(*expected[1].shape).double()
        inputs = bias.requires_grad_(), value.requires_grad_()
        found, expected = (
            torch.autograd.grad(attend(*inputs), inputs, weights, create_graph=True)
            for attend in (kernel.attend, partial(attended, matrix))
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=100 * tolerance)


CASES = [
    (d, kind, form)
    for d in (1, 2, 3, 4)
    for kind in ("isotropic", "diagonal", "full")
    for form in ("overlap", "equation 5")
]


@pytest.mark.parametrize("sigma", [0.05, slow(1.0)])
@pytest.mark.parametrize(("d", "kind", "form"), CASES)
def test_attend_is_the_matrix(d, kind, form, sigma):
    means, spread = torch.randn(90, d).double(), covariances(kind, 90, d)
    matrix = dense(means, full(spread, 90, d), sigma, form)
    for method in ("exact", "tiles")[: 1 + (d <= 3)]:
        kernel = MixtureKernel(means, spread, sigma, form=form, method=method, tol=1e-10)
        check(kernel, matrix)
        check(kernel.replace(*(tensor.clone() for tensor in kernel.tensors)), matrix)
        check(pickle.loads(pickle.dumps(kernel)), matrix)
        check(copy.deepcopy(kernel), matrix)


def test_batches_and_heads():
    means, spread = torch.randn(2, 70, 3).double(), torch.stack([covariances("full", 70, 3) for _ in range(2)])
    bias, value = torch.randn(2, 2, 70).double(), torch.randn(2, 2, 70, 2).double()
    for method in ("exact", "tiles"):
        kernel = MixtureKernel(means, spread, [0.1, 0.5], method=method, tol=1e-10)
        assert kernel.shape == (2, 2, 70, 70)
        out, lse = kernel.attend(bias, value)
        for b in range(2):
            for h, sigma in enumerate((0.1, 0.5)):
                expected = attended(dense(means[b], spread[b], sigma), bias[b, h], value[b, h])
                torch.testing.assert_close(out[b, h], expected[0])
                torch.testing.assert_close(lse[b, h], expected[1])
    q = diffusion(MixtureKernel(means, spread, [0.1, 0.5], torch.rand(2, 70)))
    assert q.converged.all()
    assert (q @ torch.ones(70, 1).double()).shape == (2, 2, 70, 1)


@pytest.mark.slow
def test_the_score_by_compiled_flex():
    means, spread = ball(150).float(), covariances("full", 150, 3).float()
    bias, value = torch.randn(150), torch.randn(150, 2)
    flex, reference = (
        MixtureKernel(means, spread, 0.3, method="exact", backend=backend).attend(bias, value)
        for backend in ("flex", "reference")
    )
    torch.testing.assert_close(tuple(flex), tuple(reference), rtol=0, atol=1e-4)


def test_without_covariances_it_is_the_gaussian_kernel():
    points, bias = ball(200), torch.randn(200).double()
    for spread in (torch.zeros(200), torch.zeros(200, 3), torch.zeros(200, 3, 3)):
        lse = MixtureKernel(points, spread, 0.2, tol=1e-12).attend(bias).lse
        torch.testing.assert_close(lse, GaussianKernel(points, 0.2).attend(bias).lse)


def test_the_determinant_makes_it_positive_definite():
    """Two narrow components and a wide one between them: an earlier implementation left the determinant out."""
    means = torch.tensor([[-1.0], [0.0], [1.0]]).double()
    variances = torch.tensor([1e-4, 1e8, 1e-4]).double()
    spectra = {}
    for form in ("overlap", "equation 5"):
        q = diffusion(
            MixtureKernel(means, variances, 1e-3, form=form), mass=torch.ones(3), tol=1e-10, solver=Solver(max_iter=300)
        )
        spectra[form] = torch.linalg.eigvals(q.to_dense()).real.sort().values
    torch.testing.assert_close(spectra["equation 5"], torch.tensor([-0.146, 0.618, 1.0]).double(), rtol=0, atol=1e-3)
    assert spectra["overlap"][0] > 0
    assert spectra["overlap"][-1] < 1 + 1e-8


def splats(n, seed=0):
    """Flat discs on a sphere: means, log scales, quaternions, logits."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
    scales = 0.5 * torch.randn(n, 3, generator=generator) + torch.log(torch.tensor([1, 1, 0.1]) * (12 / n) ** 0.5)
    return means, scales, torch.randn(n, 4, generator=generator), torch.randn(n, generator=generator)


@pytest.mark.parametrize("normalization", ["sinkhorn", *map(slow, ("row", "symmetric", "none"))])
def test_laws(normalization):
    kernel = MixtureKernel.from_splats(*splats(400), sigma=0.1)
    q = diffusion(kernel, normalization=normalization, tol=1e-5)
    verdicts = check_axioms(q).verdicts
    kept = {
        "sinkhorn": set(verdicts),
        "row": {"keeps constants", "positive"},
        "symmetric": {"self-adjoint", "positive"},
        "none": {"self-adjoint", "positive"},
    }
    assert {name for name, holds in verdicts.items() if holds} >= kept[normalization]
    if normalization != "sinkhorn":
        assert not verdicts["keeps mass"]
    torch.testing.assert_close(q.mass, torch.sigmoid(splats(400)[3]) / torch.sigmoid(splats(400)[3]).sum())


def test_splats_follow_the_conventions():
    means, scales, quaternions, logits = (tensor.double() for tensor in splats(50))
    kernel = MixtureKernel.from_splats(means, scales, 7 * quaternions, logits[:, None], 0.1)
    turns = torch.from_numpy(Rotation.from_quat(quaternions.roll(-1, dims=-1).numpy()).as_matrix())
    expected = turns @ torch.diag_embed(torch.exp(2 * scales)) @ turns.mT
    torch.testing.assert_close(kernel.tensors[1], expected)
    torch.testing.assert_close(kernel.mass, torch.sigmoid(logits) / torch.sigmoid(logits).sum())


@pytest.mark.parametrize("covariance_type", ["full", "tied", "diag", "spherical"])
def test_mixtures_of_sklearn(covariance_type):
    mixture = pytest.importorskip("sklearn.mixture").GaussianMixture(5, covariance_type=covariance_type, random_state=0)
    with pytest.raises(ValueError, match="should be fitted"):
        MixtureKernel.from_sklearn(mixture, 0.1)
    mixture.fit(ball(300).numpy())
    kernel = MixtureKernel.from_sklearn(mixture, 0.1, tol=1e-10)
    precisions = np.linalg.inv(np.broadcast_to(_matrices(mixture), (5, 3, 3)))
    check(kernel, dense(torch.from_numpy(mixture.means_), torch.from_numpy(np.linalg.inv(precisions)), 0.1), 1e-7)
    torch.testing.assert_close(kernel.mass, torch.from_numpy(mixture.weights_))


def _matrices(mixture):
    c = mixture.covariances_
    return {"spherical": lambda: c[:, None, None] * np.eye(3), "diag": lambda: c[:, :, None] * np.eye(3)}.get(
        mixture.covariance_type, lambda: c
    )()


def test_what_is_left_out_is_below_the_tolerance():
    means, scales, quaternions, logits = splats(4000)
    scales[::500] += 3  # a few reach far
    bias = 3 * torch.randn(4000)
    for sigma in (0.01, 0.1):
        kernel = MixtureKernel.from_splats(means, scales, quaternions, logits, sigma)
        assert float(kernel.error(bias, num_rows=64)) < 1e-3
    narrow = means.double(), torch.zeros(4000, 3, dtype=torch.float64), 0.03
    exact, coarse = (MixtureKernel(*narrow, tol=tol).attend(bias.double()).lse for tol in (1e-12, 0.3))
    assert 1e-9 < float((exact - coarse).amax()) < 0.3


def test_most_tiles_of_a_large_mixture_are_left_out():
    overlap = Overlap(3, "full", has_determinant=True)
    means, spread, sigma, _ = (x.double() for x in MixtureKernel.from_splats(*splats(20_000), sigma=0.01).tensors)
    tiling = MixtureTiling(overlap.in_space(overlap.embed(means, spread, sigma))[None])
    counts, _ = MixtureTiles(tiling, tiling, has_determinant=True).near_tiles(torch.zeros(1, 20_000), 1e-3)
    assert float(counts.double().mean()) < 0.3 * 313


def test_points_far_from_a_mixture():
    """Every weight underflows there, unless a row has a scale of its own."""
    means, spread = ball(100), covariances("full", 100, 3, 0.01)
    points = torch.cat([ball(5), 40 * sphere(5), 4000 * sphere(5)])
    kernel = MixtureKernel(means, spread, 0.1).at(points)
    assert kernel.shape == (15, 100)
    bias = torch.zeros(100).double()
    exact = MixtureKernel(means, spread, 0.1, method="exact").at(points)
    torch.testing.assert_close(kernel.attend(bias).lse, exact.attend(bias).lse, rtol=1e-12, atol=1e-3)
    near = dense(means, spread, 0.1, targets=points[:5])
    torch.testing.assert_close(kernel.attend(bias).lse[:5], torch.log(near.sum(-1)), rtol=0, atol=1e-3)
    q = diffusion(MixtureKernel(means, spread, 0.1))
    torch.testing.assert_close(q.extend(points) @ torch.ones(100).double(), torch.ones(15).double())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "tiles"])
@pytest.mark.parametrize("kind", ["isotropic", "full"])
def test_gradients(kind, method):
    n, d = 6, 2
    means, spread = torch.randn(n, d).double().requires_grad_(), covariances(kind, n, d).requires_grad_()
    sigma, bias = torch.tensor(0.4).double().requires_grad_(), torch.randn(n).double().requires_grad_()
    value = torch.randn(n, 2).double().requires_grad_()

    def symmetric(spread):
        return (spread + spread.mT) / 2 if kind == "full" else spread

    def attend(means, spread, sigma, bias, value):
        return tuple(MixtureKernel(means, symmetric(spread), sigma, method=method).attend(bias, value))

    assert torch.autograd.gradcheck(attend, (means, spread, sigma, bias, value))

    def potential(means, spread, sigma):
        return sinkhorn(MixtureKernel(means, symmetric(spread), sigma, method=method), tol=1e-11).potential

    assert torch.autograd.gradcheck(potential, (means, spread, sigma), rtol=1e-3, atol=1e-5)
    assert torch.autograd.gradgradcheck(
        lambda means, sigma: (
            MixtureKernel(means, symmetric(spread.detach()), sigma, method=method).attend(bias.detach()).lse
        ),
        (means, sigma),
    )


@pytest.mark.parametrize("form", ["overlap", "equation 5"])
def test_compiled_gradients_are_those_of_torch(form):
    """Gradients by everything a splat has, over many tiles, with keys left out and others than the queries."""
    gradients = []
    for method in ("tiles", "exact"):
        torch.manual_seed(0)
        given = [tensor.double().requires_grad_() for tensor in splats(300)]
        sigma, points = torch.tensor(0.2).double().requires_grad_(), ball(70).requires_grad_()
        kernel = MixtureKernel.from_splats(*given, sigma, method=method, form=form, tol=1e-12)
        bias, value = torch.randn(300).double(), torch.randn(300, 3).double().requires_grad_()
        bias[::7] = -torch.inf
        bias.requires_grad_()
        loss = 0
        for k in (kernel, kernel.at(points)):
            out, lse = k.attend(bias, value)
            loss = loss + (out * torch.randn_like(out)).sum() + (lse * torch.randn_like(lse)).sum()
            loss = loss + k.attend(bias).lse.square().sum()
        loss.backward()
        gradients.append([tensor.grad for tensor in (*given[:3], sigma, points, bias, value)])
    for compiled, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_weights_have_gradients():
    means, spread, weights = ball(30), covariances("full", 30, 3), torch.rand(30).double().requires_grad_()
    signal = torch.randn(30).double()

    def applied(weights):
        return diffusion(MixtureKernel(means, spread, 0.3, weights, tol=1e-12), tol=1e-11) @ signal

    assert torch.autograd.gradcheck(applied, (weights,), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@given(st.integers(0, 2**31), st.floats(-2, 2), st.floats(0.02, 2))
@settings(max_examples=20, deadline=None)
def test_invariances(seed, log_scale, sigma):
    """Moving, turning and scaling all of it change nothing, nor does splitting a component in two."""
    torch.manual_seed(seed)
    means, spread, weights = torch.randn(70, 3).double(), covariances("full", 70, 3), torch.rand(70).double()
    signal = torch.randn(70).double()
    turn, scale = torch.linalg.qr(torch.randn(3, 3).double()).Q, 10**log_scale

    def applied(means, spread, sigma, weights, signal):
        return diffusion(MixtureKernel(means, spread, sigma, weights, tol=1e-12), tol=1e-10) @ signal

    expected = applied(means, spread, sigma, weights, signal)
    moved = applied(scale * (means @ turn.T + 100), scale**2 * turn @ spread @ turn.T, scale * sigma, weights, signal)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)
    twice = torch.cat([torch.arange(70), torch.zeros(1, dtype=torch.int64)])
    halves = torch.where(twice == 0, 0.5, 1.0).double() * weights[twice]
    torch.testing.assert_close(
        applied(means[twice], spread[twice], sigma, halves, signal[twice])[:70], expected, rtol=0, atol=1e-6
    )


def test_components_without_weight():
    """Padding influences nothing, however far it is."""
    means, spread = torch.cat([ball(50), 100 * ball(20)]), covariances("diagonal", 70, 3)
    weights = (torch.arange(70) < 50).double()
    q = diffusion(MixtureKernel(means, spread, 0.3, weights), tol=1e-9)
    alone = diffusion(MixtureKernel(means[:50], spread[:50], 0.3), tol=1e-9)
    signal = torch.randn(70).double()
    torch.testing.assert_close((q @ signal)[:50], alone @ signal[:50], rtol=0, atol=1e-6)
    assert (q @ signal).isfinite().all()


MEMORY = """
def step(n, sigma):
    means = torch.nn.functional.normalize(torch.randn(n, 3), dim=-1)
    kernel = qattn.MixtureKernel(means, sigma**2 * torch.rand(n, 3), sigma)
    smooth, _ = qattn.diffuse(kernel, None, torch.randn(n, 8))
    assert smooth.isfinite().all()
"""


@pytest.mark.slow
def test_memory_grows_with_the_components():
    assert added_megabytes(MEMORY, "step(1000, 0.1)", "step(30_000, 0.02)") < 100  # the pairs would take 3,600


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: MixtureKernel(x, torch.ones(8), 1.0), r"`covariances` should have shape \(9,\).*got \(8,\)"),
        (lambda x: MixtureKernel(x, -torch.ones(9), 1.0), "no negative variance"),
        (lambda x: MixtureKernel(x, -torch.eye(3).expand(9, 3, 3), 1.0), "no negative variance"),
        (lambda x: MixtureKernel(x, torch.rand(9, 3, 3), 1.0), "should be symmetric"),
        (lambda x: MixtureKernel(x, torch.full((9,), torch.nan), 1.0), "`covariances` should be finite"),
        (lambda x: MixtureKernel(x, torch.ones(9), 0.0), "`sigma` should be positive"),
        (lambda x: MixtureKernel(x, torch.ones(9), 1.0, torch.ones(3)), "`weights` should have shape"),
        (lambda x: MixtureKernel(x, torch.ones(9), 1.0, -torch.ones(9)), "`weights` should be 0 or more"),
        (lambda x: MixtureKernel(x, torch.ones(9), 1.0, form="eq5"), "`form` should be 'overlap' or 'equation 5'"),
        (lambda x: MixtureKernel(torch.randn(9, 4), torch.ones(9), 1.0, method="tiles"), "takes up to 3 dimensions"),
        (lambda x: MixtureKernel(x, torch.ones(9), 1.0).at(torch.zeros(2, 2)), "should have 3 coordinates"),
        (lambda x: MixtureKernel.from_splats(x, torch.zeros(9, 2), x, x, 1.0), "`log_scales` of 9 splats"),
        (lambda x: MixtureKernel.from_splats(x, x, torch.zeros(9, 4), torch.zeros(9), 1.0), "should not be 0"),
        (lambda x: MixtureKernel.from_splats(x[:, :2], x, x, x, 1.0), r"should have shape \(N, 3\)"),
    ],
)  # fmt: skip
def test_wrong_input(make, message):
    with pytest.raises(ValueError, match=message):
        make(torch.randn(9, 3))


def test_what_a_kernel_prints():
    kernel = MixtureKernel(torch.randn(2, 9, 1), torch.ones(2, 9), [1.0, 2.0], form="equation 5", method="exact")
    expected = (
        "MixtureKernel(2 × 9 isotropic Gaussians in 1 dimension, sigma=2 bandwidths, form='equation 5', method='exact')"
    )
    assert repr(kernel) == expected


def needles(n, dtype, length=100.0):
    """Means, and covariances of one long direction each, in which rounding is as large as σ² is small."""
    u = torch.nn.functional.normalize(torch.randn(n, 3), dim=-1).to(dtype)
    return 20 * torch.rand(n, 3).to(dtype), length**2 * u[:, :, None] * u[:, None]


def dense_log_kernel(means, covariances, sigma):
    """log K in float64 by Cholesky's factors, of the numbers that are given."""
    covariances = 0.5 * (covariances.double() + covariances.double().mT)
    C = float(sigma) ** 2 * torch.eye(3).double() + covariances[:, None] + covariances
    L = torch.linalg.cholesky(C)
    apart = (means.double()[:, None] - means.double())[..., None]
    form = torch.linalg.solve_triangular(L, apart, upper=False).square().sum((-2, -1))
    return -0.5 * form - L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 3 * math.log(float(sigma))


@pytest.mark.parametrize("sigma", [0.1, 0.55, 5.0])
@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_needles_in_float32(method, sigma):
    """Covariances of 1e4 beside σ² ≤ 1: what is given in float32 is computed with in float64."""
    means, covariances = needles(250, torch.float32)
    kernel = MixtureKernel(means, covariances, sigma, method=method, tol=1e-5)
    log_kernel = dense_log_kernel(means, covariances, kernel.sigma)
    bias, value = torch.randn(250), torch.randn(250, 3)
    out, lse = kernel.attend(bias, value)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    scores = log_kernel + bias.double()
    torch.testing.assert_close(lse.double(), scores.logsumexp(1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(out.double(), scores.softmax(1) @ value.double(), rtol=0, atol=1e-5)
    assert float(kernel.error()) < 1e-5
    q = diffusion(kernel, tol=1e-5)
    assert q.converged
    f = torch.as_tensor(q.potential).double()
    rows = f + (log_kernel + f - math.log(250)).logsumexp(1)
    assert float(torch.expm1(rows).abs().mean()) < 2e-5


@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_gradients_of_needles_in_float32(method):
    """Gradients equal those of the dense float64 kernel, relative to the largest of each: nothing cancels visibly."""
    means, covariances = needles(60, torch.float32)
    sigma, value, weight = torch.tensor(0.55), torch.randn(60, 2), torch.randn(60, 2)

    def loss(out, lse):
        return (out * weight.to(out)).sum() + lse.sum()

    inputs = [x.clone().requires_grad_() for x in (means, covariances, sigma)]
    loss(*MixtureKernel(*inputs, method=method, tol=1e-5).attend(torch.zeros(60), value)).backward()
    x, S, s = (x.double().requires_grad_() for x in (means, covariances, sigma))
    C = s**2 * torch.eye(3).double() + 0.5 * ((S + S.mT)[:, None] + S + S.mT)
    L = torch.linalg.cholesky(C)
    form = torch.linalg.solve_triangular(L, (x[:, None] - x)[..., None], upper=False).square().sum((-2, -1))
    scores = -0.5 * form - L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 3 * s.log()
    loss(scores.softmax(1) @ value.double(), scores.logsumexp(1)).backward()
    for found, exact in zip(inputs, (x, S, s), strict=True):
        largest = float(exact.grad.abs().max())
        torch.testing.assert_close(found.grad.double(), exact.grad, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_needles_whose_rounding_is_more_than_the_bandwidth(method):
    """float32 leaves negative variances of σ² and more: results stay finite, and keep constants."""
    means, covariances = needles(200, torch.float32)
    q = diffusion(MixtureKernel(means, covariances, 0.01, method=method), tol=1e-4)
    assert q.converged
    torch.testing.assert_close(q @ torch.ones(200), torch.ones(200), rtol=0, atol=1e-2)


@pytest.mark.parametrize("sigma", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_needles_in_float64(method, sigma):
    """Digits are lost by the squared ratio of length and width: 1e10 of 1e16 for the last needles."""
    means, covariances = needles(200, torch.float64)
    lse = MixtureKernel(means, covariances, sigma, method=method).attend(torch.zeros(200).double()).lse
    exact = dense_log_kernel(means, covariances, sigma).logsumexp(1)
    torch.testing.assert_close(lse, exact, rtol=0, atol=1e-14 * (100 / sigma) ** 2)


def test_a_mixture_of_one_shape_is_close_to_its_cloud():
    """Samples of a mixture, diffused, are the mixture, diffused."""
    torch.manual_seed(0)
    means, scale = ball(40), 0.2
    samples = (means[:, None] + scale * torch.randn(40, 500, 3).double()).reshape(-1, 3)
    by_cloud = diffusion(samples, 0.5, normalization="none") @ torch.ones(20_000).double()
    by_mixture = diffusion(MixtureKernel(means, torch.full((40,), scale**2), 0.5), normalization="none")
    found = by_mixture @ torch.ones(40).double()
    # ∫ over both: the mean of a component's samples is its overlap, with σ and the scales added.
    expected = by_cloud.reshape(40, 500).mean(1)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)

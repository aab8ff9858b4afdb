"""Radial kernels: the profiles, the sums of Gaussians that stand for them, and both ways to compute them."""

import math

import numpy as np
import pytest
import torch
from cases import ball, slow, sphere
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gamma, kv

from qattn import (
    ExponentialKernel,
    GaussianKernel,
    MaternKernel,
    RationalQuadraticKernel,
    diffusion,
    sinkhorn,
)
from qattn.kernels.profiles import Matern, RationalQuadratic

pytestmark = pytest.mark.usefixtures("_one_thread")


def distances(x, y):
    """Norms of differences: `torch.cdist` takes squares apart, and a point is then 1e-8 away from itself."""
    return (x[..., :, None, :] - y[..., None, :, :]).norm(dim=-1)


def exponential(r):
    return torch.exp(-r)


def matern(nu):
    def profile(r):
        a = math.sqrt(2 * nu) * r.numpy()
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.where(a == 0, 1, 2 ** (1 - nu) / gamma(nu) * a**nu * kv(nu, a)))

    return profile


def rational_quadratic(alpha):
    return lambda r: (1 + r**2 / (2 * alpha)) ** -alpha


KERNELS = {
    "exponential": (ExponentialKernel, {}, exponential),
    "matern 0.3": (MaternKernel, {"nu": 0.3}, matern(0.3)),
    "matern 1.5": (MaternKernel, {"nu": 1.5}, matern(1.5)),
    "matern 2.5": (MaternKernel, {"nu": 2.5}, matern(2.5)),
    "matern 4.5": (MaternKernel, {"nu": 4.5}, matern(4.5)),
    "rational quadratic 0.5": (RationalQuadraticKernel, {"alpha": 0.5}, rational_quadratic(0.5)),
    "rational quadratic 3": (RationalQuadraticKernel, {"alpha": 3.0}, rational_quadratic(3.0)),
}
EXACT = [name for name in KERNELS if name != "matern 0.3"]


@pytest.mark.parametrize("tol", [slow(1e-2), 1e-4, slow(1e-7)])
@pytest.mark.parametrize("sigma", [slow(0.02), 0.3, slow(5.0)])
@pytest.mark.parametrize("name", KERNELS)
def test_gaussians_are_the_kernel_to_the_tolerance(name, sigma, tol):
    """Every entry of the matrix is, and so every sum, whatever the weights."""
    kind, parameters, profile = KERNELS[name]
    points = torch.cat([sphere(60), 0.01 * ball(20)])
    points = torch.cat([points, points[:3]])  # duplicates
    kernel = kind(points, sigma, **parameters, method="gaussians", tol=tol)
    matrix = profile(distances(points, points) / sigma)
    bias = 8 * torch.randn(len(points), dtype=torch.float64)
    value = torch.randn(len(points), 2, dtype=torch.float64)
    out, lse = kernel.attend(bias, value)
    weights = matrix * torch.exp(bias)
    torch.testing.assert_close(lse, torch.log(weights.sum(-1)), rtol=0, atol=tol)
    torch.testing.assert_close(out, weights @ value / weights.sum(-1, keepdim=True), rtol=0, atol=6 * tol)
    assert float(kernel.error(bias)) <= tol
    for j in (0, 70):  # a column by itself
        alone = torch.where(torch.arange(len(points)) == j, 0, -torch.inf)
        is_seen = matrix[:, j] > 1e-38
        ratios = torch.exp(kernel.attend(alone.double()).lse) / matrix[:, j]
        assert float((ratios - 1).abs()[is_seen].amax()) <= tol


@pytest.mark.parametrize("name", EXACT)
def test_exact_is_the_kernel(name):
    kind, parameters, profile = KERNELS[name]
    points = torch.stack([ball(40), ball(40)])
    kernel = kind(points, [0.2, 1.0], **parameters)
    assert kernel.method == "exact"
    r = distances(points, points)[:, None] / torch.tensor([0.2, 1.0], dtype=torch.float64)[:, None, None]
    bias = torch.randn(2, 2, 40, dtype=torch.float64)
    weights = profile(r) * torch.exp(bias)[..., None, :]
    value = torch.randn(2, 2, 40, 3, dtype=torch.float64)
    out, lse = kernel.attend(bias, value)
    # The distance of a point to itself is a root of the least number there is.
    torch.testing.assert_close(lse, torch.log(weights.sum(-1)), rtol=0, atol=1e-12)
    torch.testing.assert_close(out, weights @ value / weights.sum(-1, keepdim=True), rtol=0, atol=1e-12)
    by_gaussians = kind(points, [0.2, 1.0], **parameters, method="gaussians", tol=1e-8).attend(bias, value)
    torch.testing.assert_close(by_gaussians.lse, lse, rtol=0, atol=1e-8)


@pytest.mark.slow
@given(
    st.one_of(
        st.floats(0.2, 100).map(Matern),
        st.floats(0.2, 100).map(RationalQuadratic),
    ),
    st.floats(1e-2, 1e3),
    st.sampled_from([1e-1, 1e-3, 1e-6]),
)
@settings(max_examples=60, deadline=None)
def test_profiles_as_sums_of_gaussians(profile, reach, tol):
    bandwidths, log_weights = profile.gaussians(reach, tol)
    assert len(bandwidths) < 400
    r = torch.from_numpy(np.random.default_rng(0).uniform(0, min(reach, profile.reach), 500))  # other ones than fitted
    found = torch.logsumexp(log_weights - 0.5 * (r[:, None] / bandwidths) ** 2, dim=-1)
    exact = profile.score([r], [torch.zeros(1).double()])
    assert float(torch.expm1(found - exact).abs().amax()) <= 1.1 * tol


def test_the_exponential_is_the_matern_kernel_of_one_half():
    points, bias = ball(50), torch.randn(50).double()
    torch.testing.assert_close(
        ExponentialKernel(points, 0.3).attend(bias).lse, MaternKernel(points, 0.3, 0.5).attend(bias).lse
    )


@pytest.mark.parametrize(("kind", "parameter"), [(MaternKernel, 100), (RationalQuadraticKernel, 1e3)])
def test_the_limit_is_gaussian(kind, parameter):
    points, bias = ball(50), torch.randn(50).double()
    limit = GaussianKernel(points, 0.5).attend(bias).lse
    gaps = [
        (kind(points, 0.5, p, method="gaussians", tol=1e-6).attend(bias).lse - limit).abs().amax()
        for p in (parameter / 2, parameter)
    ]
    assert gaps[1] < 0.01
    assert 1.9 < gaps[0] / gaps[1] < 2.1  # of first order


@pytest.mark.parametrize("name", ["exponential", *map(slow, list(KERNELS)[1:])])
def test_laws(name):
    """Positive definite by construction: the spectrum of Q is in [0, 1]."""
    kind, parameters, _ = KERNELS[name]
    mass = torch.rand(100).double()
    q = diffusion(kind(sphere(100), 0.2, **parameters, method="gaussians"), mass=mass, tol=1e-9)
    dense, root = q.to_dense(), mass.sqrt()
    torch.testing.assert_close(dense.sum(-1), torch.ones(100).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(mass @ dense, mass, rtol=0, atol=1e-7)
    symmetric = root[:, None] * dense / root
    torch.testing.assert_close(symmetric, symmetric.T, rtol=0, atol=1e-9)
    values = torch.linalg.eigvalsh((symmetric + symmetric.T) / 2)
    assert dense.amin() >= 0
    assert values[0] > 0
    assert values[-1] < 1 + 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "gaussians"])
@pytest.mark.parametrize("kind", [ExponentialKernel, lambda x, s, **k: RationalQuadraticKernel(x, s, 1.5, **k)])
def test_gradients(kind, method):
    points, sigma = ball(6).requires_grad_(), torch.tensor(0.4).double().requires_grad_()
    bias, value = torch.randn(6).double().requires_grad_(), torch.randn(6, 2).double().requires_grad_()

    def attended(points, sigma, bias, value):
        return tuple(kind(points, sigma, method=method, tol=0.1).attend(bias, value))

    assert torch.autograd.gradcheck(attended, (points, sigma, bias, value))

    def potential(points, sigma):
        return sinkhorn(kind(points, sigma, method=method, tol=1e-3), tol=1e-11).potential

    assert torch.autograd.gradcheck(potential, (points, sigma), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_score_by_compiled_flex():
    points, bias, value = ball(150).float(), torch.randn(150), torch.randn(150, 2)
    flex, reference = (
        MaternKernel(points, 0.5, 1.5, method="exact", backend=backend).attend(bias, value)
        for backend in ("flex", "reference")
    )
    torch.testing.assert_close(tuple(flex), tuple(reference), rtol=0, atol=1e-5)


def test_duplicated_points_have_finite_gradients():
    points = torch.zeros(3, 2).requires_grad_()
    ExponentialKernel(points, 1.0).attend(torch.zeros(3)).lse.sum().backward()
    assert (points.grad == 0).all()


def test_other_points():
    points, others = ball(50), 3 * ball(20)
    for method in ("exact", "gaussians"):
        kernel = ExponentialKernel(points, 0.1, method=method).at(others)
        assert kernel.shape == (20, 50)
        matrix = torch.exp(-distances(others, points) / 0.1)
        torch.testing.assert_close(
            kernel.attend(torch.zeros(50).double()).lse, torch.log(matrix.sum(-1)), rtol=0, atol=1e-3
        )
    q = diffusion(ExponentialKernel(points, 0.5))
    torch.testing.assert_close(q.extend(others) @ torch.ones(50).double(), torch.ones(20).double())


@pytest.mark.slow
def test_many_points_go_by_gaussians_of_many_methods():
    points = sphere(5000).float()
    kernel = ExponentialKernel(points, 0.3)
    assert kernel.method == "gaussians"
    assert float(kernel.error()) < 1e-3
    assert "method='tiles'" in str(kernel)
    assert "method='exact'" in str(kernel) or "method='fourier'" in str(kernel)


def test_replacing_keeps_what_is_prepared(monkeypatch):
    kernel = ExponentialKernel(sphere(100), 0.3, method="gaussians")
    lse = kernel.attend(torch.zeros(100).double()).lse
    with monkeypatch.context() as patch:
        for name in ("Plan", "PreparedPoints"):
            patch.setattr(f"qattn.kernels.gaussian.kernel.{name}", lambda *_: pytest.fail("prepared again"))
        other = kernel.replace(*(tensor.clone() for tensor in kernel.tensors))
        torch.testing.assert_close(other.attend(torch.zeros(100).double()).lse, lse)
    single = kernel.replace(*(tensor.float() for tensor in kernel.tensors))
    assert single.attend(torch.zeros(100)).lse.dtype == torch.float32


def test_one_point():
    kernel = ExponentialKernel(torch.zeros(1, 3), 1.0, method="gaussians")
    torch.testing.assert_close(kernel.attend(torch.zeros(1)).lse, torch.zeros(1), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: ExponentialKernel(x, 0.0), "`sigma` should be positive"),
        (lambda x: ExponentialKernel(x, 1.0, method="fast"), "`method` should be 'auto' or 'exact' or 'gaussians'"),
        (lambda x: ExponentialKernel(x, 1.0, tol=0), "`tol` should be positive"),
        (lambda x: MaternKernel(x, 1.0, -1), "`nu` should be positive"),
        (lambda x: MaternKernel(x, 1.0, 1000), "Use `GaussianKernel`"),
        (lambda x: MaternKernel(x, 1.0, 0.7, method="exact"), r"needs a closed form.* Use `method=\"gaussians\"`"),
        (lambda x: RationalQuadraticKernel(x, 1.0, 0), "`alpha` should be positive"),
        (
            lambda x: ExponentialKernel(x, 1.0, tol=1e-14, method="gaussians").attend(torch.zeros(9)),
            "`tol` is too small for a sum of Gaussians",
        ),
    ],
)
def test_wrong_input(make, message):
    with pytest.raises(ValueError, match=message):
        make(torch.randn(9, 3))


def test_what_a_kernel_prints():
    points = torch.randn(100, 3)
    assert repr(ExponentialKernel(points, 0.5)) == "ExponentialKernel((100, 3), sigma=0.5, method='exact')"
    assert repr(MaternKernel(points, [0.5, 1], nu=0.7)) == (
        "MaternKernel((100, 3), sigma=2 bandwidths, nu=0.7, method='gaussians')"
    )
    assert "alpha=2" in repr(RationalQuadraticKernel(points, 0.5, alpha=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["exact", "gaussians"])
def test_values_of_sixteen_bits_are_rounded_once(method, dtype):
    """Rounding does not happen after each of the thirty terms."""
    points, value = sphere(200).float(), torch.randn(200, 8).to(dtype)
    K = torch.exp(-(points.double()[:, None] - points.double()).norm(dim=-1) / 0.3)
    exact = K @ value.double() / K.sum(-1, keepdim=True)
    out = ExponentialKernel(points, 0.3, method=method, tol=1e-6).attend(torch.zeros(200), value).out
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= 0.505 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all()

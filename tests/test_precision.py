"""Cases where rounding matters: far from the origin, in 16 bits, light points, padding, and signals with a mean."""

import pytest
import torch
from cases import slow, sphere
from einops import rearrange
from laws import distances, operator

import qattn
from qattn import ExponentialKernel, GaussianKernel, MaternKernel, MixtureKernel, diffusion
from qattn.nn import QAttention, QDiffusion
from qattn.tiles import gaussian as native

METHODS = ["exact", "tiles", slow("fourier")]


def relative(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def dense_gradients(points, sigma, mass, signal, weight):
    """Q f, and the gradients of Σ weight · Q f by points, σ, masses and signal, in float64."""
    tensors = [x.detach().double().requires_grad_() for x in (points, sigma, mass, signal)]
    x, s, m, f = tensors
    out = operator(-distances(x, x) / (2 * s**2), m) @ f
    return out.detach(), torch.autograd.grad((out * weight.double()).sum(), tensors)


def gradients(points, sigma, mass, signal, weight, **options):
    tensors = [x.detach().clone().requires_grad_() for x in (points, sigma, mass, signal)]
    out = diffusion(*tensors[:3], tol=1e-6, solver=qattn.Solver(max_iter=200), **options) @ tensors[3]
    return out.detach(), torch.autograd.grad((out * weight.to(out.dtype)).sum(dtype=torch.float32), tensors)


@pytest.mark.parametrize("offset", [1e3, 1e6])
@pytest.mark.parametrize("method", METHODS)
def test_clouds_far_from_the_origin(method, offset):
    """UTM coordinates in float32: the operator of the points as they are, and an `error` that says so."""
    points = (5 * torch.rand(600, 3, dtype=torch.float64) + offset).float()
    signal = torch.sin(points - offset)
    Q = operator(-distances(points.double(), points.double()) / (2 * 0.3**2), torch.ones(600, dtype=torch.float64))
    q = diffusion(points, 0.3, tol=1e-5, method=method)
    assert relative(q @ signal, Q @ signal.double()) < 1e-5
    assert float(q.kernel_error()) < 1e-5
    assert abs(float(q.marginal_error)) < 1e-5


@pytest.mark.parametrize("kind", [lambda *args: ExponentialKernel(*args, method="gaussians"),
                                  lambda *args: ExponentialKernel(*args, method="exact"),
                                  lambda *args: MaternKernel(*args, 1.5, method="exact")])  # fmt: skip
def test_radial_kernels_far_from_the_origin(kind):
    points = (torch.rand(300, 3, dtype=torch.float64) + 1e5).float()
    exact = kind(points.double(), 0.2)
    bias = torch.randn(300)
    found = kind(points, 0.2).attend(bias, points - 1e5)
    expected = exact.attend(bias.double(), (points - 1e5).double())
    assert relative(found.lse, expected.lse) < 1e-4
    assert relative(found.out, expected.out) < 1e-3


def test_error_does_not_share_the_arithmetic_that_it_judges(monkeypatch):
    """A loop that is wrong by a tenth of a percent is seen, though all rows are wrong alike."""
    kernel = GaussianKernel(sphere(300).float(), 0.3, method="exact", backend="native")
    attend = native.attend
    monkeypatch.setattr(
        native,
        "attend",
        lambda *args, **options: attend(*args, **options)._replace(lse=attend(*args, **options).lse + 1e-3),
    )
    assert float(kernel.error()) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("padding", [0.0, slow(1e2), 1e4])
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_in_float32(method, offset, padding):
    """Gradients by all inputs, for a signal with a mean of a hundred; points without mass far away do not matter."""
    cloud = sphere(250).float()
    points, mass = cloud + offset, 0.5 + torch.rand(250)
    signal, weight = torch.sin(4 * cloud[:, :2]) + 100, torch.cos(5 * cloud[:, 1:])
    if padding:
        if method == "fourier":
            pytest.skip("too many modes: fourier refuses, and auto takes tiles")
        points, mass = torch.cat([points, points[:20] + padding]), torch.cat([mass, torch.zeros(20)])
        signal, weight = (torch.cat([x, torch.zeros(20, 2)]) for x in (signal, weight))
    given = points, torch.tensor(0.3), mass, signal, weight
    out, expected = dense_gradients(*given)
    found, grads = gradients(*given, method=method)
    assert relative(found[:250], out[:250]) < 1e-5
    for grad, right in zip(grads, expected, strict=True):
        assert relative(grad, right) < 1e-3


@pytest.mark.parametrize("mean", [slow(0.0), 100.0])
@pytest.mark.parametrize("sigma", [0.3, slow(0.04)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize(("method", "backend"), [("exact", "native"), slow("exact", "reference"), ("tiles", "native"),
                                                 slow("fourier", "auto")])  # fmt: skip
def test_gradients_of_16_bit_signals(method, backend, dtype, bound, sigma, mean):
    """Extents of fifty bandwidths: only signals are rounded, and never coordinates."""
    points, mass = sphere(250).float(), 0.5 + torch.rand(250)
    signal = (torch.sin(4 * points[:, :2]) + mean).to(dtype)
    weight = torch.cos(5 * points[:, 1:]).to(dtype).float()  # a cotangent that autograd need not round
    given = points, torch.tensor(sigma), mass, signal, weight
    _, expected = dense_gradients(*given)
    _, grads = gradients(*given, method=method, backend=backend)
    for grad, right in zip(grads, expected, strict=True):
        assert relative(grad, right) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_layers_in_16_bits(dtype, bound):
    """∂/∂ log σ of a `QDiffusion`, whose signal is 16-bit, against the same layer in float64."""
    points, signal = sphere(200), torch.randn(1, 2, 200, 4, dtype=torch.float64).to(dtype)
    weight = torch.randn(1, 2, 200, 4).to(dtype)
    grads = []
    for precision, given in ((torch.float64, signal.double()), (torch.float32, signal)):
        layer = QDiffusion(2, sigma_range=(0.1, 0.3), tol=1e-6).to(precision)
        out = layer(given, points.to(precision)[None])
        (out * weight.to(out.dtype)).sum(dtype=precision).backward()
        grads.append(layer.log_sigma.grad)
    assert relative(grads[1], grads[0]) < bound


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
@pytest.mark.parametrize("order", [1, 2])
def test_backward_passes_under_autocast(backend, order):
    """A backward pass that is started within autocast sums in float32, and so does one that is differentiated again."""
    given = 3 * torch.randn(200, 3, dtype=torch.float64), torch.randn(200, 4, dtype=torch.float64)
    weight = torch.randn(200, 4, dtype=torch.float64)

    def gradients(dtype, backend, autocast):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out, lse = qattn.attend(leaves[0], leaves[0], leaves[1], backend=backend)
        loss = (out * weight.to(dtype)).sum() + lse.sin().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            grads = torch.autograd.grad(loss, leaves, create_graph=order == 2)
            return grads if order == 1 else torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)

    expected = gradients(torch.float64, "reference", False)
    for grad, right in zip(gradients(torch.float32, backend, True), expected, strict=True):
        assert relative(grad, right) < 1e-4


def test_autocast_does_not_round_what_qattn_computes():
    """Spectra, signatures, maps and matrices given as functions, in the dtype of their inputs."""
    points = sphere(300).float()
    similarity = torch.exp(-torch.cdist(points, points).square() / 0.2)

    def results():
        spectrum = qattn.eigsh(qattn.diffusion(points, 0.4), 9)
        product = qattn.diffusion(qattn.MatrixKernel(lambda x: similarity @ x, num_rows=300), tol=1e-6) @ points
        signature = qattn.signatures.heat_kernel_signature(spectrum, num_times=4)
        return spectrum.frequencies, signature, spectrum.power(1.5, points), product

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results()
    for inside, outside in zip(found, results(), strict=True):
        torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("unit", [1e-14, 1e14])
def test_gradients_by_sigma_in_other_units(unit):
    """Third powers of the bandwidths are beyond the range of float32."""
    points, weight = sphere(100).float(), torch.randn(100, 3)

    def gradient(unit):
        sigma = torch.tensor(0.4 * unit, requires_grad=True)
        loss = ((qattn.diffusion(points * unit, sigma, tol=1e-6) @ points) * weight).sum()
        return unit * torch.autograd.grad(loss, sigma)[0]

    torch.testing.assert_close(gradient(unit), gradient(1.0), rtol=1e-3, atol=0)


def test_attention_under_autocast():
    """Content that bfloat16 layers made: gradients by σ are those of float64 with the same content."""
    torch.manual_seed(0)
    attention, points = QAttention(8, 2, content_dim=3, sigma_range=(0.1, 0.3), tol=1e-6), sphere(150).float()[None]
    features, weight = torch.randn(1, 150, 8), torch.randn(1, 2, 150, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        content = rearrange(attention.content(features), "b n (h c) -> b h n c", h=2) / 3**0.5
        value = torch.randn(1, 2, 150, 4).bfloat16()
        out = attention.diffusion(value, points, content=content)
    by_sigma, by_content = torch.autograd.grad((out * weight).sum(dtype=torch.float32),
                                               (attention.diffusion.log_sigma, content))  # fmt: skip
    exact = QDiffusion(2, sigma_range=(0.1, 0.3), tol=1e-8).double()
    given = content.detach().double().requires_grad_()
    loss = (exact(value.double(), points.double(), content=given) * weight.double()).sum()
    right_sigma, right_content = torch.autograd.grad(loss, (exact.log_sigma, given))
    assert relative(by_sigma, right_sigma) < 2e-2
    assert relative(by_content, right_content) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1e-5, 1e-8])
def test_light_points_count_for_what_they_give(ratio):
    """Qᵀg by tiles, where g is at light points; and Σ Qᵀw = Σ w · Q1."""
    points = torch.rand(2000, 3)
    points[1000:, 0] += 1.5
    mass = torch.ones(2000)
    mass[1000:] = ratio
    q = diffusion(points, 0.2, mass, tol=3e-7, solver=qattn.Solver(max_iter=200), method="tiles")
    light = (mass < 1).float()[:, None]
    assert float((q.T @ light).sum()) == pytest.approx(float((light * (q @ torch.ones(2000, 1))).sum()), rel=1e-3)
    dense = operator(-distances(points.double(), points.double()) / (2 * 0.2**2), mass.double())
    assert relative(q.T @ light, dense.T @ light.double()) < 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1e-5, 1e-7])
@pytest.mark.parametrize("kind", ["points", "mixture"])
def test_gradients_of_light_points(kind, ratio):
    """Masses 1 : ρ in two clusters: the gradient of a loss in which both count alike."""
    points = torch.rand(400, 3)
    points[200:, 0] += 1.2
    mass, signal, weight = torch.ones(400), torch.sin(6 * points[:, :2]), torch.cos(5 * points[:, 1:])
    mass[200:] = ratio
    tensors = [x.clone().requires_grad_() for x in (points, torch.tensor(0.2))]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    variance = 0.01 if kind == "mixture" else 0.0
    if kind == "mixture":
        kernel = MixtureKernel(tensors[0], torch.full((400,), variance), tensors[1], method="tiles")
    else:
        kernel = GaussianKernel(*tensors, method="tiles")
    out = diffusion(kernel, mass=mass, tol=1e-7, solver=qattn.Solver(max_iter=200)) @ signal
    found = torch.autograd.grad((out * weight).sum(), tensors)
    C = exact[1] ** 2 + 2 * variance
    scores = -distances(exact[0], exact[0]) / (2 * C) - 1.5 * torch.log(C / exact[1] ** 2)
    loss = ((operator(scores, mass.double()) @ signal.double()) * weight.double()).sum()
    for grad, right in zip(found, torch.autograd.grad(loss, exact), strict=True):
        assert relative(grad, right) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_values_over_many_decades(method):
    """A light point with a large value matters as a heavy one does."""
    points = torch.rand(1500, 3)
    mass = 10.0 ** (-6 * torch.rand(1500))
    signal = torch.randn(1500, 1) / mass[:, None]
    Q = operator(-distances(points.double(), points.double()) / (2 * 0.1**2), mass.double())
    sizes = Q @ signal.double().abs()
    gap = (diffusion(points, 0.1, mass, tol=1e-5, method=method) @ signal).double() - Q @ signal.double()
    assert float((gap.abs() / sizes.amax()).max()) < 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_points_without_mass(method):
    """Rows of points without mass are those of `extend`, near and far; what they hold does not matter."""
    cloud = sphere(300).float()
    away = torch.tensor([[4.0, 0, 0], [7, 0, 0], [10, 0, 0], [0, 0, 60]])
    if method == "fourier":
        away = away[:3]
    points, mass = torch.cat([cloud, away]), torch.cat([torch.ones(300), torch.zeros(len(away))])
    signal = torch.cat([cloud[:, :1], torch.full((len(away), 1), torch.nan)])
    q = diffusion(points, 1.0, mass, tol=1e-5, method=method)
    alone = diffusion(cloud.double(), 1.0, tol=1e-8)
    expected = torch.cat([alone @ cloud[:, :1].double(), alone.extend(away.double()) @ cloud[:, :1].double()])
    torch.testing.assert_close((q @ signal).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("total", [2e36, 1e-36])
def test_masses_of_any_scale(total):
    points = torch.rand(300, 3)
    q = diffusion(points, 0.3, mass=torch.full((300,), total))
    torch.testing.assert_close(q @ torch.ones(300), torch.ones(300), rtol=0, atol=1e-2)
    torch.testing.assert_close(q @ points, diffusion(points, 0.3) @ points, rtol=0, atol=1e-3)
    assert float(q.marginal_error) < 1e-3


@pytest.mark.slow
def test_the_mean_of_a_signal_does_not_change_its_gradient():
    """The gradient by σ in float32 once was +0.53 instead of −0.97 at a mean of ten."""
    points = torch.rand(1500, 3)
    found = []
    for mean in (0.0, 1.0, 10.0, 100.0):
        sigma = torch.tensor(0.05, requires_grad=True)
        out = diffusion(points, sigma, tol=1e-6, solver=qattn.Solver(max_iter=500)) @ (
            torch.sin(4 * points[:, :2]) + mean
        )
        found.append(float(torch.autograd.grad((out * torch.cos(5 * points[:, 1:])).sum(), sigma)[0]))
    sigma = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    x = points.double()
    out = diffusion(x, sigma, tol=1e-10, solver=qattn.Solver(max_iter=500)) @ torch.sin(4 * x[:, :2])
    exact = float(torch.autograd.grad((out * torch.cos(5 * x[:, 1:])).sum(), sigma)[0])
    # The parts by the kernel and by the potential are ±12,686, whose last digits in float32 are 1e-3.
    assert found == pytest.approx([exact] * 4, abs=2e-3)


def test_forward_mode_and_transforms_are_refused():
    points, signal = torch.rand(20, 3), torch.rand(20, 1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(signal, torch.ones_like(signal))
        with pytest.raises(NotImplementedError, match="does not support forward-mode differentiation"):
            diffusion(points, 0.3) @ dual
    with pytest.raises(NotImplementedError, match=r"does not run inside torch\.func"):
        torch.func.jacrev(lambda x: qattn.attend(x, x).lse)(points)
    with pytest.raises(NotImplementedError, match=r"does not run inside torch\.func"):
        torch.func.vmap(lambda x: qattn.attend(x, x).lse)(points[None])


def test_an_adjoint_that_does_not_converge_warns():
    """(I + Q) of an indefinite kernel may be nearly singular."""
    similarity = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    q = diffusion(qattn.MatrixKernel(similarity + 1e-9), tol=1e-6)
    with pytest.warns(UserWarning, match=r"The gradient through the potential is inexact: after 100 steps"):
        (q @ torch.tensor([[1.0], [0.0]], dtype=torch.float64))[0].sum().backward()


def test_unrolling_a_start_that_is_exact():
    """Points far apart with masses of 1 are normalized from the start, and yet their potential follows the masses."""
    mass = torch.ones(5, dtype=torch.float64, requires_grad=True)
    points = 100 * torch.arange(5, dtype=torch.float64)[:, None]
    out = diffusion(points, 0.1, mass, solver=qattn.Solver(adjoint="unroll")) @ torch.randn(5, 1, dtype=torch.float64)
    assert torch.autograd.grad(out.square().sum(), mass)[0].abs().max() < 1e-4

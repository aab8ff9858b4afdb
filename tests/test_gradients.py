"""Gradients of attention, on every backend and of second order."""

import pytest
import torch
from cases import dense, slow
from torch.autograd import gradcheck, gradgradcheck

from qattn import GaussianKernel, attend, diffusion
from qattn.attention import flash_attn
from qattn.attention.dispatch import BACKENDS
from qattn.attention.native import Native
from qattn.nn import QDiffusion
from qattn.operators.potential_gradient import solve
from qattn.shapes import sphere

CPU = ["native", "sdpa", "reference"]


def leaves(batch=(2,), n=4, m=5, dims=2, channels=2):
    shapes = (*batch, n, dims), (*batch, m, dims), (*batch, m, channels), (*batch, m)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("backend", ["native", *map(slow, CPU[1:])])
def test_gradients_of_out_and_lse(backend):
    def function(query, key, value, bias):
        return tuple(attend(query, key, value, bias=bias, backend=backend))

    assert gradcheck(function, leaves())
    assert gradgradcheck(function, leaves(batch=(), n=3, m=3))


@pytest.mark.slow
@pytest.mark.parametrize("backend", CPU)
def test_gradients_of_lse_alone(backend):
    def function(query, key, bias):
        return attend(query, key, bias=bias, backend=backend).lse

    query, key, _, bias = leaves()
    assert gradcheck(function, (query, key, bias))
    assert gradgradcheck(function, (query, key, bias))


@pytest.mark.parametrize("wanted", range(4))
def test_gradients_of_one_argument_at_a_time(wanted):
    """The backward pass computes only what is asked for."""
    tensors = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(leaves())]
    out, lse = attend(*tensors[:3], bias=tensors[3])
    expected_out, expected_lse = dense(*tensors)
    (got,) = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), tensors[wanted])
    (expected,) = torch.autograd.grad(expected_out.sin().sum() + expected_lse.cos().sum(), tensors[wanted])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_gradients_when_only_the_lse_of_two_results_is_used():
    query, key, value, bias = leaves()
    lse = attend(query, key, value, bias=bias).lse
    got = torch.autograd.grad(lse.sum(), (query, key, bias, value), allow_unused=True)
    expected = torch.autograd.grad(dense(query, key, value, bias)[1].sum(), (query, key, bias))
    torch.testing.assert_close(got[:3], expected, rtol=1e-10, atol=1e-10)
    assert got[3] is None or (got[3] == 0).all()


def test_gradients_with_broadcast_batches_and_shared_points():
    points = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)

    def function(points, sigma):
        scaled = points / sigma[:, None, None]
        return tuple(attend(scaled, scaled, points))

    assert gradcheck(function, (points, sigma))


def test_gradients_with_absent_keys():
    query, key, value, bias = leaves()
    with torch.no_grad():
        bias[:, 2] = -torch.inf
        bias[1] = -torch.inf
    out, lse = attend(query, key, value, bias=bias)
    grads = torch.autograd.grad(out.sum() + lse[0].sum(), (query, key, value, bias))
    for grad in grads:
        assert grad.isfinite().all()
        assert (grad[1] == 0).all()
    assert (grads[1][0, 2] == 0).all()


def test_gradients_in_float32_agree_with_float64():
    points = 3 * torch.randn(200, 3)
    value = torch.randn(200, 4)

    def gradient(dtype):
        query = points.to(dtype).requires_grad_()
        out, lse = attend(query, query, value.to(dtype))
        return torch.autograd.grad(out.square().sum() + lse.sum(), query)[0]

    torch.testing.assert_close(gradient(torch.float32).double(), gradient(torch.float64), rtol=1e-4, atol=1e-4)


def test_gradients_of_another_score():
    query, key, value, bias = leaves()

    def cauchy(q, k):
        return -torch.log1p(sum((a - b) ** 2 for a, b in zip(q, k, strict=True)))

    assert gradcheck(lambda *t: tuple(attend(*t[:3], bias=t[3], score=cauchy)), (query, key, value, bias))
    with pytest.raises(NotImplementedError, match="gradients of a score other than the Gaussian one"):
        attend(query.float(), key.float(), score=cauchy, backend="flex")


def test_a_backend_that_cannot_serve_the_backward_pass_leaves_it_to_auto(monkeypatch):
    """Points without values may be float32 for a 16-bit kernel; the values of its backward pass may not."""
    backend = BACKENDS["flash_attn"]

    def pretended(self, inputs):
        return [] if inputs.value is None else ["values are float32"]

    monkeypatch.setattr(flash_attn.FlashAttn, "not_supported_reasons", pretended)
    monkeypatch.setattr(flash_attn.FlashAttn, "attend", lambda self, inputs: BACKENDS["reference"].attend(inputs))
    points = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(attend(points, points, backend=backend.name).lse.sum(), points)
    (expected,) = torch.autograd.grad(dense(points, points)[1].sum(), points)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "tiles"])
@pytest.mark.parametrize("channels", [None, 3])
def test_derivatives_by_the_bandwidth_alone(method, channels):
    """Averages of ‖q − k‖² v of the forward pass give them: those by the points divided by σ, and again."""
    points, biases = torch.rand(2, 20, 3).double(), torch.randn(2, 2, 20).double().requires_grad_()
    biases.data[0, 1, :5] = -torch.inf  # keys that are left out
    values = [] if channels is None else [torch.randn(2, 2, 20, channels).double().requires_grad_()]
    sigma = torch.tensor([0.3, 0.6]).double().requires_grad_()

    def attended(sigma, bias, *values):
        kernel = GaussianKernel(points, sigma, method=method, tol=1e-12)
        out, lse = kernel.attend(bias, *values)
        return lse if out is None else (out, lse)

    assert gradcheck(lambda s, *v: attended(s, biases.detach(), *v), [sigma, *values], atol=1e-6)
    assert gradgradcheck(lambda s, *v: attended(s, biases.detach(), *v), [sigma, *values], atol=1e-5)
    results, others = attended(sigma, biases, *values), GaussianKernel(points.requires_grad_(), sigma, method=method)
    expected = others.attend(biases, *values)
    pairs = zip([results] if channels is None else results, [x for x in expected if x is not None], strict=True)
    for got, by_points in pairs:
        cotangents = torch.randn_like(got)
        wanted = [sigma, biases, *(values if got.ndim == 4 else [])]
        torch.testing.assert_close(
            torch.autograd.grad(got, wanted, cotangents, retain_graph=True),
            torch.autograd.grad(by_points, wanted, cotangents, retain_graph=True),
            rtol=1e-6, atol=1e-9,
        )  # fmt: skip


@pytest.fixture
def passes(monkeypatch):
    """Passes over pairs in order: the number of channels of an attend, or "pair sums"."""
    found: list[object] = []
    attend, pair_sums = Native.attend, Native.pair_sums

    def sums(self, *args, **options):
        found.append("pair sums")
        return pair_sums(self, *args, **options)

    monkeypatch.setattr(Native, "attend", lambda self, inputs: found.append(inputs.channels) or attend(self, inputs))
    monkeypatch.setattr(Native, "pair_sums", sums)
    return found


def test_passes_of_a_backward(passes):
    """Values alone take one attend from keys to queries. Everything together takes one pass over pairs."""
    points, sigma, value = torch.rand(50, 3), torch.tensor(0.3), torch.randn(50, 8).requires_grad_()
    for by_sigma, by_points, expected in (
        (False, False, [8, 8]),
        (True, False, [8, "pair sums"]),
        (True, True, [8, "pair sums"]),
    ):
        passes.clear()
        kernel = GaussianKernel(points.clone().requires_grad_(by_points), sigma.clone().requires_grad_(by_sigma))
        kernel.attend(torch.zeros(50), value).out.square().sum().backward()
        assert passes == expected


def test_passes_of_a_training_step(passes):
    """Fused sums for the product and for the potential; between them, products of one channel and one lse."""
    layer, points = QDiffusion(4, sigma_range=(0.2, 1.0)), sphere(300)
    out = layer(torch.randn(4, 300, 8).requires_grad_(), points)
    assert passes[-1] == 8
    assert set(passes[:-1]) == {0}
    passes.clear()
    out.square().mean().backward()
    assert passes[0] == passes[-1] == "pair sums"
    assert passes[-2] == 0
    assert set(passes[1:-2]) == {1}
    assert len(passes) <= 10


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("tol", [1e-3, 1e-8])
def test_the_adjoint_is_solved_to_its_tolerance_in_each_head(is_transposed, tol):
    """Relative to the cotangent of that head, however large those of others are; no further than asked for."""
    generator = torch.Generator().manual_seed(0)
    points, target = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((200, 3), (2, 200)))
    target[1] *= 1e-9
    q = diffusion(points, torch.tensor([0.3, 1.5], dtype=torch.float64), tol=1e-12)
    x = solve(q.kernel, q.potential, q.mass.log(), target, q.kernel.tensors, is_transposed=is_transposed, tol=tol)
    dense_q = q.to_dense().mT if is_transposed else q.to_dense()
    residual = target - x - (dense_q @ x[..., None])[..., 0]
    relative = residual.abs().amax(-1) / target.abs().amax(-1)
    assert (relative <= tol).all()
    assert (relative >= 1e-3 * tol).any()

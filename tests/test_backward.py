"""The fused backward of engines, held to the composition of attends that derivatives of higher order take."""

import itertools

import pytest
import torch
from cases import ball, slow

from qattn import GaussianKernel, MixtureKernel, OrientedKernel, attend

NAMES = ("query", "key", "value", "bias")
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}


def problem(N, M, D, C, dtype):
    query, key = torch.randn(2, N, D, dtype=dtype), torch.randn(2, M, D, dtype=dtype)
    bias = torch.randn(2, M, dtype=dtype)
    bias[:, :2] = -torch.inf
    return (
        (query, key, torch.randn(2, M, C, dtype=dtype), bias),
        torch.randn(2, N, C, dtype=dtype),
        torch.randn(2, N, dtype=dtype),
    )


def gradients(tensors, needs, grads, create_graph, **options):
    leaves = [x.clone().requires_grad_(name in needs) for name, x in zip(NAMES, tensors, strict=True)]
    query, key, value, bias = leaves
    results = attend(query, key, value, bias=bias, **options)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(results, wanted, grads, create_graph=create_graph)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("D", [1, 3, 4, 5, 17])
def test_fused_equals_composed(backend, D, dtype):
    tensors, *grads = problem(70, 130, D, 5, dtype)
    for count in range(1, 5):
        for needs in itertools.combinations(NAMES, count):
            fused = gradients(tensors, needs, grads, False, backend=backend)
            composed = gradients(tensors, needs, grads, True, backend=backend)
            for name, a, b in zip(needs, fused, composed, strict=True):
                gap, size = (a - b.detach()).abs().max(), b.detach().abs().max()
                assert gap <= TOLERANCES[dtype] * size, (name, needs)


def gaussian(method):
    return lambda points, sigma: GaussianKernel(points, sigma, method=method, tol=1e-9)


def mixture(points, sigma):
    covariances = 0.02 * torch.eye(3).to(points) + 0.1 * points[:, :, None] * points[:, None, :]
    return MixtureKernel(points, covariances, sigma, tol=1e-9)


def oriented(points, sigma):
    return OrientedKernel(points, torch.nn.functional.normalize(points, dim=-1), sigma, tol=1e-9)


KERNELS = {
    "exact": gaussian("exact"),
    "tiles": gaussian("tiles"),
    "fourier": gaussian("fourier"),
    "heads": lambda points, sigma: gaussian("auto")(points, sigma * torch.tensor([0.5, 1.0, 2.0]).to(points)),
    "oriented": oriented,
    "mixture": mixture,
}
KERNEL_TENSORS = ("points", "sigma", "bias", "value")


@pytest.mark.parametrize("dtype", [torch.float64, slow(torch.float32), slow(torch.float16), slow(torch.bfloat16)])
@pytest.mark.parametrize("name", KERNELS)
def test_fused_equals_composed_in_kernels(name, dtype):
    """Every mask of needed gradients, by σ too, and values of 16 bits beside points of 32."""
    precision = torch.promote_types(dtype, torch.float32)
    points, bias = ball(150).to(precision), torch.randn(150, dtype=precision)
    bias[:3] = -torch.inf
    tensors = points, torch.tensor(0.3, dtype=precision), bias, torch.randn(150, 4).to(dtype)
    grads = torch.randn(150, 4).to(dtype), torch.randn(150, dtype=precision)

    def gradients(needs, create_graph):
        leaves = [x.clone().requires_grad_(n in needs) for n, x in zip(KERNEL_TENSORS, tensors, strict=True)]
        points, sigma, bias, value = leaves
        out, lse = KERNELS[name](points, sigma).attend(bias, value)
        results = out, lse.where(lse > -torch.inf, 0)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        loss = sum((result * grad).sum() for result, grad in zip(results, grads, strict=True) if result.requires_grad)
        return torch.autograd.grad(loss, wanted, create_graph=create_graph)

    tolerance = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for count in range(1, 5):
        for needs in itertools.combinations(KERNEL_TENSORS, count):
            for which, a, b in zip(needs, gradients(needs, False), gradients(needs, True), strict=True):
                gap, size = (a - b.detach()).abs().max(), b.detach().abs().max()
                assert gap <= tolerance * size, (which, needs, gap / size)


@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_gradients_are_the_same_for_any_number_of_threads(method):
    """Bit by bit: blocks of queries and keys meet in rounds, in an order that depends on their number alone."""
    points, value = ball(3000).float(), torch.randn(3000, 4)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            x, v, sigma = (
                points.clone().requires_grad_(),
                value.clone().requires_grad_(),
                torch.tensor(0.1).requires_grad_(),
            )
            out = GaussianKernel(x, sigma, method=method).attend(torch.zeros(3000), v).out
            found.append(torch.autograd.grad(out.square().sum(), (x, v, sigma)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (64, 64), (65, 1000), (4500, 130)])
def test_clouds_of_any_two_sizes(size):
    """Blocks of queries and of keys need not be as many."""
    N, M = size
    tensors, *grads = problem(N, M, 3, 2, torch.float64)
    tensors[3][:, :2] = 0.0
    fused = gradients(tensors, NAMES, grads, False, backend="native")
    expected = gradients(tensors, NAMES, grads, False, backend="reference")
    torch.testing.assert_close(fused, expected, rtol=1e-10, atol=1e-12)


def test_cotangents_of_any_size():
    """Sums are taken in units of the largest cotangent, so that tiny ones are not lost."""
    tensors, *grads = problem(50, 60, 3, 4, torch.float32)
    expected = gradients(tensors, NAMES, grads, False, backend="native")
    for factor in (2.0**-120, 2.0**100):
        found = gradients(tensors, NAMES, [factor * g for g in grads], False, backend="native")
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a / factor, b, rtol=1e-5, atol=1e-6)

"""Kernels: attending is the matrix product it stands for, and sums and multiples are what they say."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cases import sphere

from qattn import GaussianKernel, MatrixKernel, MixtureKernel, attend, diffusion


def dense_gaussian(points, sigma, targets=None):
    targets = points if targets is None else targets
    return torch.exp(-((targets[..., :, None, :] - points[..., None, :, :]) ** 2).sum(-1) / (2 * sigma**2))


def check(kernel, matrix, tolerance=1e-12):
    """attend(bias, value) against the dense matrix, and symmetry where it is square."""
    assert kernel.shape == matrix.shape
    bias = torch.randn(*matrix.shape[:-2], matrix.shape[-1], dtype=matrix.dtype)
    value = torch.randn(*matrix.shape[:-2], matrix.shape[-1], 3, dtype=matrix.dtype)
    out, lse = kernel.attend(bias, value)
    weights = matrix * torch.exp(bias)[..., None, :]
    torch.testing.assert_close(lse, torch.log(weights.sum(-1)), rtol=0, atol=tolerance)
    torch.testing.assert_close(out, weights @ value / weights.sum(-1, keepdim=True), rtol=0, atol=tolerance)
    torch.testing.assert_close(kernel.attend(bias).lse, lse, rtol=0, atol=tolerance)


POINTS = torch.randn(2, 30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
A, B = GaussianKernel(POINTS[0], 0.5), GaussianKernel(POINTS[0], 1.5)
SIMILARITY = torch.rand(10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).round(decimals=1)
SIMILARITY = (SIMILARITY + SIMILARITY.T) / 2


@pytest.mark.parametrize(
    ("kernel", "matrix"),
    [
        (A, dense_gaussian(POINTS[0], 0.5)),
        (GaussianKernel(POINTS, 0.7), dense_gaussian(POINTS, 0.7)),
        (
            GaussianKernel(POINTS, [0.3, 0.7, 2.0]),
            torch.stack([dense_gaussian(POINTS, s) for s in (0.3, 0.7, 2.0)], dim=1),
        ),
        (A + B, dense_gaussian(POINTS[0], 0.5) + dense_gaussian(POINTS[0], 1.5)),
        (3 * A, 3 * dense_gaussian(POINTS[0], 0.5)),
        (A * 0.2 + 2 * B, 0.2 * dense_gaussian(POINTS[0], 0.5) + 2 * dense_gaussian(POINTS[0], 1.5)),
        (A.at(POINTS[1]), dense_gaussian(POINTS[0], 0.5, POINTS[1])),
        ((A + A).at(POINTS[1]) + 2 * A.at(POINTS[1]), 4 * dense_gaussian(POINTS[0], 0.5, POINTS[1])),
        (MatrixKernel(SIMILARITY), SIMILARITY),
    ],
    ids=["points", "batch", "heads", "sum", "multiple", "both", "at", "sum at", "matrix"],
)  # fmt: skip
def test_attend_is_the_matrix(kernel, matrix):
    check(kernel, matrix)
    check(kernel.replace(*(tensor.clone() for tensor in kernel.tensors)), matrix)
    check(pickle.loads(pickle.dumps(kernel)), matrix)
    check(copy.deepcopy(kernel), matrix)


def test_heads_of_a_sum_with_factors():
    factors = torch.tensor([0.5, 2.0], dtype=torch.float64)
    kernel = GaussianKernel(POINTS[0], [0.5, 1.0]) * factors
    check(kernel, torch.stack([f * dense_gaussian(POINTS[0], s) for f, s in zip(factors, (0.5, 1.0), strict=True)]))


def test_a_factor_may_have_axes_that_its_kernel_lacks():
    """A mixture of two kernels for each head, with weights of their own."""
    factors = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    shares, K = factors.detach()[:, None, None], [dense_gaussian(POINTS[0], s) for s in (0.5, 1.5)]
    assert (A * factors).shape == (3, 30, 30)
    check(A * factors.detach(), shares * K[0])
    check(A * factors.detach() + B, shares * K[0] + K[1])
    q = diffusion(A * factors + B, tol=1e-10)
    matrix = q.to_dense()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 30).double())
    matrix.square().sum().backward()
    assert factors.grad.abs().min() > 0
    with pytest.raises(ValueError, match=r"broadcast with its batch axes \(2,\); got shape \(3,\)"):
        GaussianKernel(POINTS[0], [0.5, 1.0]) * torch.ones(3)


def test_masses_of_a_sum_do_not_depend_on_the_order():
    weights = torch.rand(2, 30, generator=torch.Generator().manual_seed(2)).double() + 0.1
    spread = torch.full((30,), 0.01).double()
    one, same, other = (MixtureKernel(POINTS[0], spread, 0.5, w) for w in (weights[0], 3 * weights[0], weights[1]))
    for kernel in (one + A, A + one, one + same, same + A + one):
        torch.testing.assert_close(kernel.mass, weights[0] / weights[0].sum())
    assert (A + B).mass is None
    signal = torch.randn(30, 2).double()
    for kernel in (one + other, other + one, A + one + other):
        with pytest.raises(ValueError, match=r"have different default masses.*Pass `mass`"):
            diffusion(kernel)
    results = [diffusion(kernel, mass=weights[1], tol=1e-12) @ signal for kernel in (one + other, other + one)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_round_values_of_sixteen_bits_once(dtype):
    first, *others = (GaussianKernel(POINTS[0].float(), 0.1 * 1.3**n) for n in range(12))
    kernel = sum(others, first)
    matrix = sum(dense_gaussian(POINTS[0].float().double(), 0.1 * 1.3**n) for n in range(12))
    value, bias = torch.randn(30, 50).to(dtype), torch.randn(30)
    weights = matrix * torch.exp(bias.double())
    exact = weights @ value.double() / weights.sum(-1, keepdim=True)
    out = kernel.attend(bias, value).out
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= 0.505 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


def test_a_matrix_with_an_empty_row():
    kernel = MatrixKernel([[1.0, 0.0], [0.0, 0.0]])
    out, lse = kernel.attend(torch.zeros(2), torch.ones(2, 1))
    assert lse[1] == -torch.inf
    assert out[1] == 0
    assert out[0] == 1


def test_what_a_kernel_prints():
    A, B = GaussianKernel(POINTS[0], 0.5), GaussianKernel(POINTS[0], 1.5, method="exact")
    assert repr(2 * A) == "2 * GaussianKernel((30, 3), sigma=0.5, method='auto')"  # nothing is chosen yet
    A.attend(torch.zeros(30).double())
    assert repr(A + B) == (
        "GaussianKernel((30, 3), sigma=0.5, method='exact') + GaussianKernel((30, 3), sigma=1.5, method='exact')"
    )
    assert repr(GaussianKernel(POINTS, [0.1, 0.2])) == "GaussianKernel((2, 30, 3), sigma=2 bandwidths, method='auto')"
    assert repr(MatrixKernel(SIMILARITY)) == "MatrixKernel((10, 10))"


def test_arrays_lists_and_integers():
    for points in (np.array([[0, 0], [3, 4]]), [[0, 0], [3, 4]], torch.tensor([[0, 0], [3, 4]])):
        kernel = GaussianKernel(points, 5)
        assert kernel.points.is_floating_point()
        torch.testing.assert_close(kernel.attend(torch.tensor([-torch.inf, 0.0])).lse, torch.tensor([-0.5, 0.0]))


def test_the_backend_is_handed_on():
    with pytest.raises(NotImplementedError, match="flash_attn"):
        GaussianKernel(POINTS, 0.5, backend="flash_attn").attend(torch.zeros(2, 30))
    with pytest.raises(NotImplementedError, match="cancellation"):
        GaussianKernel(POINTS.float(), 0.5, backend="sdpa", tol=1e-9).attend(torch.zeros(2, 30))


def test_batches_without_keys_cost_no_pairs():
    """Solvers can drop items that are done: native skips them, and the result shows it."""
    points = torch.randn(3, 50, 3)
    bias = torch.zeros(3, 50)
    bias[1] = -torch.inf
    out, lse = attend(points, points, points, bias=bias, backend="native")
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[2], attend(points[2], points[2]).lse, rtol=0, atol=0)


def test_a_kernel_is_a_matrix():
    """Products, the dense matrix and conversions, far from the origin; the gradient by σ of a product."""
    points = sphere(40) + 1e3
    sigma = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    matrix = torch.exp(-((points[:, None] - points) ** 2).sum(-1) / (2 * sigma**2))
    kernel, signal = GaussianKernel(points, sigma), torch.rand(40, 2, dtype=torch.float64)
    for product, expected in ((kernel @ signal, matrix @ signal), (kernel @ signal[:, 0], matrix @ signal[:, 0])):
        torch.testing.assert_close(product, expected)
        gradients = (torch.autograd.grad(x.sum(), sigma, retain_graph=True)[0] for x in (product, expected))
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(kernel.to_dense(), matrix)
    single = kernel.to(torch.float32)
    assert single.dtype == (single @ signal.float()).dtype == torch.float32
    torch.testing.assert_close(single.to_dense().double(), matrix, rtol=1e-3, atol=1e-3)

"""Similarities by their products alone, and the smallest eigenvalue of a kernel."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cases import sphere
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from qattn import GaussianKernel, GraphKernel, MatrixKernel, Solver, check_axioms, diffusion, sinkhorn

MATRIX = torch.rand(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MATRIX = (MATRIX @ MATRIX.T) / 40


def by_torch(x):
    return MATRIX.to(x.dtype) @ x


KERNELS = {
    "function": lambda: MatrixKernel(by_torch, num_rows=40).replace(torch.empty(0, dtype=torch.float64)),
    "operator": lambda: MatrixKernel(aslinearoperator(MATRIX.numpy())),
}


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_products_are_the_matrix(make):
    for kernel in (make(), make().replace(torch.empty(0, dtype=torch.float64)), copy.deepcopy(make())):
        exact = MatrixKernel(MATRIX)
        assert kernel.shape == exact.shape
        for batch in ((), (2, 3)):
            bias, value = torch.randn(*batch, 40).double(), torch.randn(*batch, 40, 5).double()
            bias[..., :7] = -torch.inf
            torch.testing.assert_close(tuple(kernel.attend(bias, value)), tuple(exact.attend(bias, value)))
            torch.testing.assert_close(kernel.attend(bias).lse, exact.attend(bias).lse)
            value = torch.randn(40, 2).double()  # of a batch less
            torch.testing.assert_close(kernel.attend(bias, value).out, exact.attend(bias, value).out)
        assert float(kernel.error()) < 1e-12


def test_pickling_a_named_function():
    kernel = pickle.loads(pickle.dumps(MatrixKernel(by_torch, num_rows=40)))
    assert kernel.attend(torch.zeros(40)).lse.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_gradients_go_through_products(make):
    mass, signal = torch.rand(40).double().requires_grad_(), torch.randn(40, 2).double().requires_grad_()

    def applied(mass, signal):
        return diffusion(make(), mass=mass, tol=1e-11) @ signal

    assert torch.autograd.gradcheck(applied, (mass, signal), rtol=1e-3, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda b, v: make().attend(b, v).out, (mass, signal), rtol=1e-3, atol=1e-6)


def dense_operator(K, mass):
    """Q of a similarity, by Newton's method on log(Σ_j e^{f_i} K_ij m_j e^{f_j}) = 0, in float64."""
    f = torch.zeros(len(K), dtype=torch.float64)
    for _ in range(100):
        rows = torch.exp(f) * (K @ (mass * torch.exp(f)))
        jacobian = torch.diag(rows) + torch.exp(f)[:, None] * K * mass * torch.exp(f)
        f = f - torch.linalg.solve(jacobian, rows - 1)
    return torch.exp(f)[:, None] * K * mass * torch.exp(f)


def test_gradients_by_entries_that_are_zero():
    """Central differences of the dense operator: an entry of 0 that grows changes it like any other."""
    K = torch.tensor([[2.0, 0, 1], [0, 2, 1], [1, 1, 3]], dtype=torch.float64, requires_grad=True)
    mass, signal = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([[1.0], [-2.0], [0.5]]).double()
    weight = torch.tensor([[0.3], [1.0], [-0.7]]).double()
    (weight * (diffusion(MatrixKernel(K), mass=mass, tol=1e-13, solver=Solver(max_iter=200)) @ signal)).sum().backward()
    step = torch.zeros(3, 3, dtype=torch.float64)
    step[0, 1] = step[1, 0] = 1e-6
    # Newton's method takes the negative entry of the backward step in its stride.
    ends = [(weight * (dense_operator(K.detach() + s * step, mass) @ signal)).sum() for s in (1, -1)]
    expected = (ends[0] - ends[1]) / 2e-6
    assert abs(float(expected)) > 0.1
    torch.testing.assert_close(K.grad[0, 1] + K.grad[1, 0], expected, rtol=1e-6, atol=0)


def test_gradients_by_entries_of_every_order():
    K = torch.rand(2, 6, 6).double()
    K = K + K.mT
    K[:, 0, 1] = K[:, 1, 0] = K[0, 2, 3] = K[0, 3, 2] = 0
    bias, value, grow = torch.randn(2, 6).double(), torch.randn(2, 6, 3).double(), torch.rand(2, 6, 6).double()
    bias[1, 4] = -torch.inf

    def attended(K, value):
        return tuple(MatrixKernel(K).attend(bias, value))

    def exact(K, value):
        weights = K * torch.exp(bias)[:, None]
        return weights @ value / weights.sum(-1, keepdim=True), torch.log(weights.sum(-1))

    inputs = K.requires_grad_(), value.requires_grad_()
    cotangents = torch.randn(2, 6, 3).double(), torch.randn(2, 6).double()
    results = []
    for function in (attended, exact):
        first = torch.autograd.grad(function(*inputs), inputs, cotangents, create_graph=True)
        second = torch.autograd.grad((first[0] * grow).sum() + (first[1] ** 2).sum(), inputs)
        results.append([x.detach() for x in (*first, *second)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_far_zeros_do_not_make_nan():
    """A pair that is absent from a row of tiny weights: e^b is more than float32 holds, and its product with 0 is 0."""
    K = torch.eye(3).requires_grad_()
    lse = MatrixKernel(K).attend(torch.tensor([-300.0, 0.0, 100.0])).lse
    torch.testing.assert_close(lse.detach(), torch.tensor([-300.0, 0.0, 100.0]))
    lse.sum().backward()
    assert not K.grad.isnan().any()
    torch.testing.assert_close(K.grad.diagonal(), torch.ones(3))
    empty = torch.diag(torch.tensor([1.0, 0.0])).requires_grad_()
    lse = MatrixKernel(empty).attend(torch.zeros(2)).lse
    assert lse.tolist() == [0, -torch.inf]
    lse[0].backward()
    assert empty.grad[0].tolist() == [1, 1]


def test_laws():
    for make in KERNELS.values():
        assert check_axioms(diffusion(make(), mass=torch.rand(40), tol=1e-6)).holds


def test_rows_without_weight():
    kernel = MatrixKernel(lambda x: torch.cat([x[:1], 0 * x[1:]]), num_rows=3)
    out, lse = kernel.attend(torch.zeros(3), torch.ones(3, 1))
    assert out[:, 0].tolist() == [1, 0, 0]
    assert lse.tolist() == [0, -torch.inf, -torch.inf]
    assert (kernel.attend(torch.full((3,), -torch.inf), torch.ones(3, 1)).out == 0).all()


def test_float32_operators_stay_so():
    kernel = MatrixKernel(aslinearoperator(csr_array(np.eye(5, dtype=np.float32))))
    assert kernel.dtype == torch.float32
    assert sinkhorn(kernel).potential.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MatrixKernel(by_torch), "`num_rows` should be given if `similarity` is a function"),
        (lambda: MatrixKernel(lambda x: x[:3], num_rows=5), r"should have its shape; got \(3, 8\)"),
        (lambda: MatrixKernel(lambda x: x.numpy(), num_rows=5), "should have its shape; got ndarray"),
        (lambda: MatrixKernel(lambda x: -x, num_rows=5), "should not be negative"),
        (lambda: MatrixKernel(lambda x: x * torch.nan, num_rows=5), "should be finite"),
        (lambda: MatrixKernel(lambda x: x + torch.rand(5, 5) @ x, num_rows=5), "should be symmetric"),
        (lambda: MatrixKernel(LinearOperator((3, 4), matvec=lambda x: x[:3])), "should be a square operator"),
        (lambda: MatrixKernel(by_torch, num_rows=0), "`num_rows` should be an integer of at least 1"),
    ],
)
def test_wrong_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_smallest_eigenvalue():
    values = torch.linalg.eigvalsh(MATRIX)
    assert MatrixKernel(MATRIX).smallest_eigenvalue() == pytest.approx(float(values[0]), abs=1e-10)  # all of a few
    turn = torch.linalg.qr(torch.randn(300, 300).double()).Q
    large = turn @ torch.diag(torch.linspace(-3, 10, 300).double()) @ turn.T
    large = (large + large.T) / 2 + 20  # entries above 0: the constant mode moves, the others hardly
    values = torch.linalg.eigvalsh(large)
    found = MatrixKernel(large).smallest_eigenvalue(tol=1e-3)
    assert found == pytest.approx(float(values[0]), abs=1e-3 * float(values[-1]))
    assert found < -1
    for kernel in (GaussianKernel(sphere(300), 0.3), GraphKernel(torch.ones(99, 99) - torch.eye(99))):
        assert kernel.smallest_eigenvalue() > -1e-2 * kernel.shape[0]
    with pytest.raises(ValueError, match=r"takes one square matrix; this kernel has shape \(2, 50, 50\)"):
        GaussianKernel(sphere(50), [0.1, 0.2]).smallest_eigenvalue()

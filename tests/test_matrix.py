"""Similarities by their products alone, and the smallest eigenvalue of a kernel."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cases import sphere
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from qattn import GaussianKernel, GraphKernel, MatrixKernel, check_axioms, diffusion, sinkhorn

MATRIX = torch.rand(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MATRIX = (MATRIX @ MATRIX.T) / 40


def by_torch(x):
    return MATRIX.to(x.dtype) @ x


KERNELS = {
    "function": lambda: MatrixKernel(by_torch, size=40).replace(torch.empty(0, dtype=torch.float64)),
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
    kernel = pickle.loads(pickle.dumps(MatrixKernel(by_torch, size=40)))
    assert kernel.attend(torch.zeros(40)).lse.isfinite().all()


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_gradients_go_through_products(make):
    mass, signal = torch.rand(40).double().requires_grad_(), torch.randn(40, 2).double().requires_grad_()

    def applied(mass, signal):
        return diffusion(make(), mass=mass, tol=1e-11) @ signal

    assert torch.autograd.gradcheck(applied, (mass, signal), rtol=1e-3, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda b, v: make().attend(b, v).out, (mass, signal), rtol=1e-3, atol=1e-6)


def test_laws():
    for make in KERNELS.values():
        assert check_axioms(diffusion(make(), mass=torch.rand(40), tol=1e-6)).holds


def test_rows_without_weight():
    kernel = MatrixKernel(lambda x: torch.cat([x[:1], 0 * x[1:]]), size=3)
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
        (lambda: MatrixKernel(by_torch), "`size`, the number of rows, should be given"),
        (lambda: MatrixKernel(lambda x: x[:3], size=5), r"should have its shape; got \(3, 8\)"),
        (lambda: MatrixKernel(lambda x: x.numpy(), size=5), "should have its shape; got ndarray"),
        (lambda: MatrixKernel(lambda x: -x, size=5), "should not be negative"),
        (lambda: MatrixKernel(lambda x: x * torch.nan, size=5), "should be finite"),
        (lambda: MatrixKernel(lambda x: x + torch.rand(5, 5) @ x, size=5), "should be symmetric"),
        (lambda: MatrixKernel(LinearOperator((3, 4), matvec=lambda x: x[:3])), "should be a square operator"),
        (lambda: MatrixKernel(by_torch, size=0), "`size` should be an integer of at least 1"),
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

"""Heads and items of a batch, `q[index]`, against the same index of the matrix."""

import pickle

import numpy as np
import pytest
import torch
from cases import slow
from laws import EDGES, N, distances

from qattn import (
    ExponentialKernel,
    GaussianKernel,
    GraphKernel,
    Kernel,
    MatrixKernel,
    MixtureKernel,
    Solver,
    diffusion,
    eigsh,
)

INDICES = [
    0,
    -1,
    np.int64(2),
    torch.tensor(1),
    slice(1, 3),
    slice(None, None, 2),
    ...,
    (),
    (..., 0),
    (slice(None), -1),
    (slice(-2, None), slice(1)),
    (2, 1),
    (0, ..., 1),
]
DOUBLE = torch.float64


def operator(points=None, sigma=(0.5, 0.9), **options):
    """Three clouds, two heads."""
    points = torch.randn(3, 20, 2, dtype=DOUBLE) if points is None else points
    mass = (torch.rand(3, 1, 20, dtype=DOUBLE) + 0.1) * (torch.arange(20) % 7 > 0)
    return diffusion(points, torch.as_tensor(sigma, dtype=DOUBLE), mass, tol=1e-9, **options)


def items(x, index, axes):
    """A tensor at an index of all but its last `axes` axes, into which `...` would reach."""
    return x[(*index, *[slice(None)] * axes) if isinstance(index, tuple) and ... in index else index]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalization", ["sinkhorn", *map(slow, ("row", "symmetric", "none"))])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_item_is_the_item_of_the_matrix(index, normalization):
    q, new = operator(normalization=normalization), torch.randn(5, 2, dtype=DOUBLE)
    item, matrix = q[index], items(q.to_dense(), index, 2)
    assert item.shape == matrix.shape
    assert item.normalization == normalization
    same(item.to_dense(), matrix)
    same(item.T.to_dense(), matrix.mT)
    same(item.extend(new).to_dense(), items(q.extend(new).to_dense(), index, 2))
    same(item.mass.expand(matrix.shape[:-1]), items(q.mass.expand(3, 2, 20), index, 1))
    same(item.potential, items(q.potential, index, 1))
    for name in ("marginal_error", "num_iter", "converged"):
        same(getattr(item, name), getattr(q, name)[index])
    same(pickle.loads(pickle.dumps(item)).to_dense(), matrix)


def test_an_item_needs_no_pass(monkeypatch):
    q = operator()
    monkeypatch.setattr(GaussianKernel, "attend", lambda *_, **__: pytest.fail("a pass of the kernel"))
    with monkeypatch.context() as patch:
        patch.setattr("qattn.kernels.gaussian.kernel.PreparedPoints", lambda *_: pytest.fail("points prepared again"))
        heads = q[:, 1]
    assert "marginal_error=" in repr(heads[0])


def test_iteration_ends():
    heads = list(diffusion(torch.randn(20, 2), [0.3, 0.5, 0.8]))
    assert [float(head.kernel.sigma) for head in heads] == pytest.approx([0.3, 0.5, 0.8])
    assert all(head.shape == (20, 20) for head in heads)
    assert [len(list(item)) for item in operator()] == [2, 2, 2]


def test_items_have_all_that_operators_have():
    """Functions that take one operator, refinement, and warm starts."""
    points = torch.randn(2, 50, 3, dtype=DOUBLE)
    q, one = diffusion(points, [0.4, 0.8], tol=1e-10), diffusion(points[1], 0.8, tol=1e-10)
    item = q[1, 1]
    same(eigsh(item, 4).values, eigsh(one, 4).values)
    np.testing.assert_allclose(item.to_scipy() @ np.eye(50), one.to_dense(), atol=1e-8)
    for found, expected in zip(item.value_and_gradient(points[1]), one.value_and_gradient(points[1]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    assert diffusion(points[1] + 1e-9, 0.8, init=item.potential).num_iter == 1
    assert (item.to(torch.float32) @ points[1].float()).dtype == torch.float32
    arrays = diffusion(points.numpy(), [0.4, 0.8])[0, 0]
    assert isinstance(arrays.mass, np.ndarray)
    assert isinstance(arrays.to_dense(), np.ndarray)


@pytest.mark.parametrize("method", ["exact", "tiles", slow("fourier")])
def test_gradients_flow_through_an_item(method):
    """Gradients of both orders, by points, σ and masses, are those of the item of a product."""
    tensors = [torch.randn(2, 30, 2, dtype=DOUBLE), torch.tensor([0.5, 0.8], dtype=DOUBLE), torch.rand(30) + 0.5]
    signal, results = torch.randn(30, 2, dtype=DOUBLE), []
    for early in (True, False):
        points, sigma, mass = (x.double().requires_grad_() for x in tensors)
        kernel = GaussianKernel(points, sigma, method=method, tol=1e-9)
        q = diffusion(kernel, mass=mass, tol=1e-10)
        out = q[1:, 0] @ signal if early else (q @ signal)[1:, 0]
        first = torch.autograd.grad(out.sin().sum(), (points, sigma, mass), create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), (points, sigma, mass))
        results.append((*first, *second))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.detach().abs().max()))


CLOUDS = torch.randn(3, N, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
HEADS = torch.tensor([0.5, 0.9], dtype=DOUBLE)
MATRICES = torch.exp(-distances(CLOUDS, CLOUDS))
FACTORS = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)
WEIGHTS = torch.rand(3, N, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)) + 0.1
AXES = torch.randn(3, N, 2, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(2)) / 5
FULL = AXES @ AXES.mT
COMPOSED = {
    "matrices": lambda: MatrixKernel(MATRICES),
    "matrices of two axes": lambda: MatrixKernel(torch.stack([MATRICES, MATRICES**2])),
    "exponential": lambda: ExponentialKernel(CLOUDS, HEADS),
    "mixtures": lambda: MixtureKernel(CLOUDS, FULL, HEADS, WEIGHTS),
    "mixtures that share weights": lambda: MixtureKernel(CLOUDS, FULL, HEADS, WEIGHTS[0], method="exact"),
    "stiff mixtures": lambda: MixtureKernel(CLOUDS.float(), 1e4 * FULL.float(), HEADS, method="exact"),
    "sum with a graph": lambda: MatrixKernel(MATRICES) + GraphKernel(EDGES),
    "sum of heads and clouds": lambda: GaussianKernel(CLOUDS[0], HEADS) + MatrixKernel(MATRICES[:, None]),
    "multiple": lambda: 0.5 * GaussianKernel(CLOUDS, HEADS),
    "multiples by item": lambda: FACTORS[:, None] * GaussianKernel(CLOUDS, HEADS),
    "multiples of one cloud": lambda: FACTORS * GaussianKernel(CLOUDS[0], 0.5),
}


@pytest.mark.parametrize("make", COMPOSED.values(), ids=COMPOSED)
def test_items_of_every_kind_of_kernel(make):
    q = diffusion(make(), tol=1e-6, solver=Solver(max_iter=300))
    matrix = q.to_dense()
    for index in (0, -1, slice(1, 3), (..., 1), slice(0, 1)):
        item = q[index]
        torch.testing.assert_close(item.to_dense(), items(matrix, index, 2), rtol=1e-4, atol=1e-6)
        mass = item.kernel.mass
        if mass is not None:  # also that of new operators of the kernel
            torch.testing.assert_close(
                diffusion(item.kernel).mass.expand(item.shape[:-1]), items(q.mass.expand(q.shape[:-1]), index, 1)
            )


@pytest.mark.parametrize(
    "make",
    [lambda: GaussianKernel(CLOUDS, HEADS), lambda: MixtureKernel(CLOUDS, FULL, HEADS)],
    ids=["points", "mixtures"],
)
def test_items_at_other_points(make):
    """Targets that all clouds share, or have of their own, are taken along."""
    for targets in (CLOUDS[0, :7], CLOUDS[:, :7], CLOUDS[1:2, :7]):
        kernel = make().at(targets)
        for index in ((1, 0), (slice(1, 3), 1), (slice(None), slice(1, 2))):
            item, bias = kernel.indexed(index), torch.zeros(3, 2, N, dtype=DOUBLE)
            same(item.attend(bias[index]).lse, kernel.attend(bias).lse[index])


class Bare(Kernel):
    """A kernel with a batch that does not implement `indexed`."""

    tensors = (torch.ones(2, 3, 3),)
    shape = torch.Size((2, 3, 3))

    def replace(self, *tensors):
        return self

    def attend(self, bias, value=None, *, all_rows=True):
        return MatrixKernel(self.tensors[0]).attend(bias, value)

    def exact_lse(self, rows, bias):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "`index` should be from -3 to 2; got 3"),
        ((0, -3), IndexError, "from -2 to 1; got -3"),
        ((0, 0, 0), ValueError, r"at most 2 integers or slices, for the axes \(3, 2\).*Take rows and columns of"),
        ((..., ...), ValueError, "one `...`"),
        (slice(3, None), ValueError, "at least one of 3 items"),
        (slice(None, None, -1), ValueError, "in their order"),
        ([0, 2], ValueError, r"integers, slices and `...`; got list. Take items one by one, as in `\[q\[i\] for"),
        (torch.tensor([True, False, True]), ValueError, "got Tensor"),
        (None, ValueError, "got NoneType"),
        (True, ValueError, "got bool"),
        (0.0, ValueError, "got float"),
    ],
    ids=str,
)
def test_what_is_no_index_is_refused(index, error, message):
    with pytest.raises(error, match=message):
        operator()[index]


def test_what_has_no_items_is_refused():
    q = diffusion(torch.randn(10, 2), 0.5)
    with pytest.raises(
        ValueError, match=r"this operator has shape \(10, 10\), and has neither. Take rows and columns of"
    ):
        q[0]
    with pytest.raises(ValueError, match="this operator has shape"):  # a loop over it is an error, not empty
        list(q)
    with pytest.raises(ValueError, match=r"does not implement `indexed`. Make a kernel of each item"):
        diffusion(Bare())[0]

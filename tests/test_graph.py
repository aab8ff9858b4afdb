"""Graphs and sparse similarities: what they stand for, the example of the paper's warm-up, and what is refused."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.autograd import gradcheck, gradgradcheck

from qattn import GraphKernel, MatrixKernel, Solver, diffusion, sinkhorn

# The star of the paper's figure 2: a hub and four leaves.
STAR = torch.zeros(5, 5, dtype=torch.float64)
STAR[0, 1:] = STAR[1:, 0] = 1
EDGE = torch.tensor([[0, 1], [1, 0]])


def random_graph(n=30, p=0.2, seed=0):
    """A weighted Erdős–Rényi graph as a dense adjacency, every vertex with an edge."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(n, n, dtype=torch.float64, generator=generator)
    A = torch.triu(weights * (torch.rand(n, n, generator=generator) < p), diagonal=1)
    A[torch.arange(n - 1), torch.arange(1, n)] += 0.1
    return A + A.T


def edges_of(A):
    index = A.nonzero().T
    return index, A[tuple(index)]


A = random_graph()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls its CSR tensors new
    CSR = A.to_sparse_csr()
FORMS = {
    "dense": A,
    "array": A.numpy(),
    "coo": A.to_sparse_coo(),
    "csr": CSR,
    "scipy csr": scipy.sparse.csr_matrix(A.numpy()),
    "scipy coo array": scipy.sparse.coo_array(A.numpy()),
    "edge index": edges_of(A),
}


def graph(form, **options):
    return GraphKernel(*form, **options) if isinstance(form, tuple) else GraphKernel(form, **options)


def check(kernel, matrix, tolerance=1e-12):
    N = len(matrix)
    assert kernel.shape == matrix.shape
    for batch in ((), (2, 3)):
        bias = torch.randn(*batch, N, dtype=torch.float64)
        value = torch.randn(*batch, N, 3, dtype=torch.float64)
        weights = matrix * torch.exp(bias)[..., None, :]
        for grad in (False, True):
            out, lse = kernel.attend(bias, value.clone().requires_grad_(grad))
            torch.testing.assert_close(lse, torch.log(weights.sum(-1)), rtol=0, atol=tolerance)
            torch.testing.assert_close(
                out.detach(), weights @ value / weights.sum(-1, keepdim=True), rtol=0, atol=tolerance
            )
        torch.testing.assert_close(kernel.attend(bias).lse, lse, rtol=0, atol=tolerance)
    assert float(kernel.error(bias[0, 0])) < 1e-12


@pytest.mark.parametrize("eps", [0.0, 1e-3, 2.0])
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_its_matrix(form, eps):
    kernel = graph(FORMS[form], eps=eps)
    matrix = torch.diag(A.sum(-1)) + A + eps
    check(kernel, matrix)
    check(kernel.replace(*(tensor.clone() for tensor in kernel.tensors)), matrix)
    check(pickle.loads(pickle.dumps(kernel)), matrix)
    check(copy.deepcopy(kernel), matrix)
    assert torch.linalg.eigvalsh(matrix).min() > -1e-12


@pytest.mark.parametrize("form", [name for name in FORMS if name not in ("dense", "array", "edge index")])
def test_a_sparse_similarity_is_its_matrix(form):
    kernel = MatrixKernel(FORMS[form])
    check(kernel, A)
    check(pickle.loads(pickle.dumps(kernel)), A)
    assert repr(kernel) == "MatrixKernel((30, 30))"


def test_the_star_of_the_paper():
    """Figure 2: a Dirac on a leaf keeps 0.625 of its mass with rows normalized, 0.75 symmetrically, all by Sinkhorn."""
    kernel = 0.5 * GraphKernel(STAR)
    dirac = torch.zeros(5, dtype=torch.float64)
    dirac[1] = 1
    mass = torch.ones(5)
    kept = {
        name: float((diffusion(kernel, mass=mass, normalization=name, tol=1e-12) @ dirac).sum())
        for name in ("row", "symmetric", "sinkhorn")
    }
    assert kept == pytest.approx({"row": 0.625, "symmetric": 0.75, "sinkhorn": 1.0}, abs=1e-10)
    assert (diffusion(kernel, mass=mass, tol=1e-12).to_dense() >= 0).all()


@pytest.mark.parametrize("eps", [0.0, 0.01])
def test_laws(eps):
    mass = torch.rand(30, dtype=torch.float64) + 0.1
    q = diffusion(GraphKernel(A.to_sparse_coo(), eps=eps), mass=mass, tol=1e-12, solver=Solver(max_iter=200))
    Q = q.to_dense()
    torch.testing.assert_close(Q.sum(-1), torch.ones(30).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(mass[:, None] * Q, (mass[:, None] * Q).T, rtol=0, atol=1e-10)
    root = mass.sqrt()
    spectrum = torch.linalg.eigvalsh(root[:, None] * Q / root)
    assert spectrum.min() > -1e-10
    assert spectrum.max() < 1 + 1e-10
    assert (Q >= 0).all()


@pytest.mark.slow
def test_gradients_by_the_weights_of_the_edges():
    index, weight = edges_of(random_graph(6, 0.5))
    half = index[0] < index[1]
    weight = weight[half].clone().requires_grad_()
    index = torch.cat([index[:, half], index[:, half].flip(0)], dim=1)
    signal = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    mass = torch.rand(6, dtype=torch.float64) + 0.5

    def function(weight, signal):
        kernel = GraphKernel(index, weight.repeat(2), eps=0.1)
        return diffusion(kernel, mass=mass, tol=1e-13, solver=Solver(max_iter=200)) @ signal

    assert gradcheck(function, (weight, signal))
    assert gradgradcheck(function, (weight, signal))


def test_absent_vertices_and_weights_over_many_decades():
    kernel = GraphKernel(A.to_sparse_coo())
    bias = torch.linspace(-2000, 2000, 30, dtype=torch.float64)
    expected = torch.logsumexp(torch.log(torch.diag(A.sum(-1)) + A) + bias, dim=-1)
    torch.testing.assert_close(kernel.attend(bias).lse, expected, rtol=0, atol=1e-9)
    nothing = torch.full((30,), -torch.inf, dtype=torch.float64)
    for other in (kernel, GraphKernel(A.to_sparse_coo(), eps=0.5)):
        out, lse = other.attend(nothing, torch.ones(30, 1, dtype=torch.float64))
        assert (lse == -torch.inf).all()
        assert (out == 0).all()


def test_isolated_vertices_and_components_are_said():
    apart = torch.block_diag(STAR, STAR)
    alone = torch.block_diag(STAR, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"2 of the 7 vertices have no edge.* Use `eps` > 0"):
        GraphKernel(alone)
    q = diffusion(GraphKernel(alone, eps=0.1), tol=1e-10)
    assert float(q.marginal_error) < 1e-9
    assert repr(GraphKernel(apart)) == "GraphKernel(10 vertices, 8 edges, eps=0)"
    assert "2 connected components, between which nothing diffuses unless eps > 0" in str(GraphKernel(apart))
    assert "3 connected components, connected by eps alone" in str(GraphKernel(alone, eps=0.1))
    assert str(GraphKernel(STAR)) == repr(GraphKernel(STAR))
    there = torch.zeros(10, dtype=torch.float64)
    there[5:] = 1
    torch.testing.assert_close(diffusion(GraphKernel(apart), tol=1e-12) @ there, there, rtol=0, atol=1e-10)


def test_an_edge_index_with_more_vertices_than_it_names():
    index = torch.tensor([[0, 1], [1, 0]])
    assert GraphKernel(index).shape == (2, 2)
    assert GraphKernel(index.numpy(), eps=0.5, num_vertices=4).shape == (4, 4)
    twice = GraphKernel(index.repeat(1, 2), torch.ones(4))  # repeated edges add up
    torch.testing.assert_close(twice.attend(torch.zeros(2)).lse, torch.log(torch.full((2,), 4.0)))


def test_two_rows_of_integers_are_an_edge_index():
    """An adjacency of two vertices is told from two edges by its dtype, whatever form it comes in."""
    numbers = [[0, 2], [2, 0]]
    for index in (numbers, np.array(numbers), torch.tensor(numbers), torch.tensor(numbers, dtype=torch.int32)):
        assert repr(GraphKernel(index, eps=1)) == "GraphKernel(3 vertices, 1 edges, eps=1)"
    for adjacency in (
        torch.tensor(numbers).double(),
        torch.tensor(numbers).to_sparse(),
        scipy.sparse.csr_array(numbers),
    ):
        torch.testing.assert_close(GraphKernel(adjacency).to_dense(), torch.full((2, 2), 2.0), check_dtype=False)
    ring = torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]])
    torch.testing.assert_close(GraphKernel(ring).to_dense(), torch.ones(3, 3) + torch.eye(3))
    triangle = torch.ones(3, 3, dtype=torch.int64) - torch.eye(3, dtype=torch.int64)
    torch.testing.assert_close(GraphKernel(triangle).to_dense(), torch.ones(3, 3) + torch.eye(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STAR - 2 * STAR,), "`adjacency` should not be negative; 8 of its 8"),
        ((torch.triu(STAR),), r"`adjacency` should be symmetric.* use `\(A \+ A.T\) / 2`"),
        ((torch.triu(STAR) + 2 * torch.tril(STAR),), "`adjacency` should be symmetric"),
        ((STAR[:3],), r"`adjacency` should have shape \(N, N\); got \(3, 5\)"),
        ((STAR * np.nan,), "`adjacency` should be finite"),
        ((torch.zeros(3, 2, dtype=torch.int64),), r"`adjacency` should have shape \(N, N\); got \(3, 2\)"),
        (
            (torch.zeros(2, 3),),
            r"`adjacency` should have shape \(N, N\); got \(2, 3\)\. An edge_index should hold integ",
        ),
        ((STAR, torch.ones(8)), r"`edge_index` should hold integers of shape \(2, E\); got float64 \(5, 5\)"),
        ((EDGE, torch.ones(3)), r"one number per edge, shape \(2,\); got \(3,\)"),
        ((EDGE, [1.0, 2.0]), "`edge_index` should hold both directions of every edge, with equal weights"),
        ((EDGE[:, :1],), r"both directions of every edge.* Add the reversed edges"),
        ((EDGE, [-1.0, -1.0]), "`edge_weight` should not be negative; 2 of its 2"),
        ((EDGE, [np.inf, 1.0]), "`edge_weight` should be finite"),
        ((torch.tensor([[0, 1], [1, -1]]),), "should hold vertices from 0 to 1; got -1 to 1"),
    ],
)
def test_wrong_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        GraphKernel(*arguments)


@pytest.mark.parametrize("eps", [-1.0, np.nan])
def test_wrong_eps(eps):
    with pytest.raises(ValueError, match=f"`eps` should be 0 or more, and finite; got {eps}"):
        GraphKernel(STAR, eps=eps)


def test_a_graph_without_edges():
    none = torch.zeros(2, 0, dtype=torch.int64)
    for kernel in (GraphKernel(torch.zeros(3, 3), eps=0.1), GraphKernel(none, eps=0.1, num_vertices=3)):
        assert repr(kernel) == "GraphKernel(3 vertices, 0 edges, eps=0.1)"
        torch.testing.assert_close(diffusion(kernel, tol=1e-6).to_dense(), torch.full((3, 3), 1 / 3))
    with pytest.raises(ValueError, match="`num_vertices` should be given with an `edge_index` without edges"):
        GraphKernel(none, eps=0.1)


def test_wrong_sizes():
    with pytest.raises(ValueError, match=r"should hold vertices from 0 to 1; got 0 to 2.* Raise `num_vertices`"):
        GraphKernel(2 * EDGE, num_vertices=2)
    with pytest.raises(ValueError, match="`num_vertices` should be an integer of at least 1; got 0"):
        GraphKernel(EDGE, num_vertices=0)
    with pytest.raises(ValueError, match="`num_vertices` should be 5, the size of the adjacency; got 7"):
        GraphKernel(STAR, num_vertices=7)
    with pytest.raises(ValueError, match="`similarity` should be symmetric"):
        MatrixKernel(torch.triu(STAR).to_sparse_coo())


def test_many_edges_in_little_memory():
    """200,000 edges and 64 channels: products for each edge and channel would be 13 million numbers."""
    n = 20_000
    index = torch.randint(n, (2, 100_000), generator=torch.Generator().manual_seed(0))
    index = torch.cat([index, index.flip(0)], dim=1)
    kernel = GraphKernel(index, eps=1e-6, num_vertices=n)
    result = sinkhorn(kernel, tol=1e-5)
    assert result.converged
    q = diffusion(kernel, tol=1e-5)
    signal = torch.rand(n, 64)
    torch.testing.assert_close((q @ signal).mean(0), signal.mean(0), rtol=0, atol=1e-4)


SIXTEEN_BITS = {
    "graph": lambda A: (GraphKernel(A), torch.diag(A.sum(1)) + A),
    "joined graph": lambda A: (GraphKernel(A, eps=0.05), torch.diag(A.sum(1)) + A + 0.05),
    "sparse": lambda A: (MatrixKernel((A + torch.eye(len(A))).to_sparse()), A + torch.eye(len(A))),
    "dense": lambda A: (MatrixKernel(A + torch.eye(len(A))), A + torch.eye(len(A))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("make", SIXTEEN_BITS.values(), ids=SIXTEEN_BITS)
def test_signals_of_sixteen_bits_are_rounded_once(make, needs_gradient, dtype):
    """The result is the float64 mean to half a unit in the last place, and a little, under autocast too."""
    kernel, K = make(random_graph(60).float())
    value, bias = torch.randn(2, 60, 5).to(dtype), torch.randn(60)
    weights = K.double() * torch.exp(bias.double())
    exact = weights @ value.double() / weights.sum(-1, keepdim=True)
    half_unit = 0.5 * torch.finfo(dtype).eps * exact.abs()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = kernel.attend(bias, value.clone().requires_grad_(needs_gradient))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert ((out.detach().double() - exact).abs() <= 1.01 * half_unit + 1e-6).all()
    if needs_gradient:
        out.sum().backward()
    smooth = diffusion(kernel) @ value
    torch.testing.assert_close(
        smooth.double(), diffusion(kernel) @ value.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_many_unsorted_edges_with_repeated_ones_and_loops(dtype):
    """Keys beyond 32 bits, with a gradient and without, as SciPy adds them up."""
    generator = torch.Generator().manual_seed(0)
    N = 50_000
    pairs = torch.randint(N, (2, 40_000), generator=generator)
    ring = torch.stack([torch.arange(N), torch.arange(N).roll(1)])
    pairs = torch.cat([pairs, pairs[:, :1000], torch.arange(500).expand(2, -1), ring], dim=1)
    index = torch.cat([pairs, pairs.flip(0)], dim=1)
    weight = 0.1 + torch.rand(pairs.shape[1], generator=generator).repeat(2)
    adjacency = scipy.sparse.csr_array((weight.double().numpy(), tuple(index.numpy())), shape=(N, N))
    signal = torch.randn(N, 2, generator=generator)
    bias = torch.randn(N, generator=generator)
    scaled = np.exp(bias.double().numpy())
    degrees = adjacency.sum(1)
    expected = adjacency @ (scaled[:, None] * signal.double().numpy()) + (degrees * scaled)[:, None] * signal.numpy()
    sums = adjacency @ scaled + degrees * scaled
    for has_gradient in (False, True):
        kernel = GraphKernel(index.to(dtype), weight.clone().requires_grad_(has_gradient))
        out, lse = kernel.attend(bias, signal)
        assert out.requires_grad == has_gradient
        torch.testing.assert_close(lse.detach().double(), torch.from_numpy(np.log(sums)), rtol=0, atol=1e-5)
        mean = torch.from_numpy(expected / sums[:, None])
        torch.testing.assert_close(out.detach().double(), mean, rtol=1e-4, atol=1e-5)

"""The laws of a diffusion operator (Definition 4.2), on clouds that break careless code."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from cases import ball, dense, slow, sphere
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import aslinearoperator, eigsh, lsqr, svds

from qattn import GaussianKernel, MatrixKernel, Solver, diffuse, diffusion

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}

NORMALIZATIONS = ("sinkhorn", "row", "symmetric", "none")


@st.composite
def clouds(draw, most=40):
    """Points, a bandwidth and masses: duplicates, collinear, far clusters, one point, twelve decades of mass."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n, dims = draw(st.integers(1, most)), draw(st.integers(1, 4))
    points = torch.randn(n, dims, dtype=torch.float64)
    kind = draw(st.sampled_from(["plain", "duplicates", "collinear", "clusters", "one place"]))
    if kind == "duplicates":
        points = points[torch.randint(n, (n,))]
    elif kind == "collinear":
        points = points[:, :1] * torch.randn(dims, dtype=torch.float64)
    elif kind == "clusters":
        points[: n // 2] += 1000.0
    elif kind == "one place":
        points[:] = points[0].clone()
    extent = max(float((points - points.mean(0)).norm(dim=-1).max()), 1e-3)
    sigma = extent * 10 ** draw(st.floats(-3, 3))
    decades = draw(st.sampled_from([0, 2, 12]))
    mass = 10 ** (decades * (torch.rand(n, dtype=torch.float64) - 0.5))
    return points, sigma, mass


def weighted_mean(values, mass):
    return float((mass * values).sum() / mass.sum())


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.float64], ids=str)
@settings(deadline=None, max_examples=60)
@given(cloud=clouds())
def test_laws_of_the_sinkhorn_normalization(dtype, cloud):
    points, sigma, mass = cloud
    tolerance = TOLERANCE[dtype]
    q = diffusion(points.to(dtype), sigma, mass.to(dtype), tol=tolerance, solver=Solver(max_iter=200))
    assert q.converged
    Q, m = q.to_dense().double(), q.mass.double()
    assert Q.isfinite().all()
    assert (Q >= 0).all()  # positive
    assert weighted_mean((Q.sum(-1) - 1).abs(), m) <= 2 * tolerance  # keeps constants
    signal = torch.rand(len(points), 1, dtype=dtype)
    before, after = ((m[:, None] * x.double()).sum() for x in (signal, q @ signal))
    assert abs(after - before) <= 4 * tolerance * m.sum()  # keeps mass
    flux = m[:, None] * Q
    assert (flux - flux.T).abs().max() <= 30 * torch.finfo(
        dtype
    ).eps ** 0.75 * flux.max()  # self-adjoint for the masses
    root = m.sqrt()
    symmetric = root[:, None] * Q / root
    values = torch.linalg.eigvalsh((symmetric + symmetric.T) / 2)
    assert values.min() >= -1e3 * torch.finfo(dtype).eps  # spectrum in [0, 1]
    # … up to the largest row sum: a light point may still be off when the weighted mean of |Q1 − 1| is small
    assert values.max() <= (1 + 10 * tolerance) * Q.sum(-1).max()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_each_normalization_is_what_its_formula_says(normalization):
    points, mass = torch.randn(40, 3, dtype=torch.float64), torch.rand(40, dtype=torch.float64) + 0.1
    K = torch.exp(-(torch.cdist(points, points) ** 2) / (2 * 0.7**2))
    q = diffusion(points, 0.7, mass, normalization=normalization, tol=1e-12)
    rows = (K * mass).sum(-1)
    if normalization == "sinkhorn":
        scale = torch.exp(q.potential)
        expected = scale[:, None] * K * mass * scale
        torch.testing.assert_close(expected.sum(-1), torch.ones(40, dtype=torch.float64), rtol=0, atol=1e-10)
    else:
        left, right = {"row": (rows, 1.0), "symmetric": (rows.sqrt(), rows.sqrt()), "none": (1.0, 1.0)}[normalization]
        expected = K * mass / right / (left[:, None] if isinstance(left, torch.Tensor) else left)
    torch.testing.assert_close(q.to_dense(), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        (q.to_dense().sum(-1) - 1).abs() @ mass / mass.sum(), q.marginal_error, rtol=1e-6, atol=1e-12
    )
    signal = torch.randn(40, 3, dtype=torch.float64)
    torch.testing.assert_close(q @ signal, expected @ signal, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.T @ signal, expected.T @ signal, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.T.T @ signal, q @ signal, rtol=0, atol=0)
    torch.testing.assert_close(q @ signal[:, 0], expected @ signal[:, 0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.power(3, signal), expected @ expected @ expected @ signal, rtol=1e-9, atol=1e-9)
    assert q.num_iter == {"row": 1, "symmetric": 1, "none": 0}.get(normalization, q.num_iter)
    assert q.converged
    # the symmetrized operator of SciPy has the spectrum of Q
    symmetric = q.to_scipy(symmetric=True) @ np.eye(40)
    np.testing.assert_allclose(symmetric, symmetric.T, atol=1e-12)
    np.testing.assert_allclose(
        np.linalg.eigvalsh(symmetric), np.sort(torch.linalg.eigvals(expected).real.numpy()), atol=1e-9
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_invariances(normalization):
    points, mass = torch.randn(60, 3, dtype=torch.float64), torch.rand(60, dtype=torch.float64) + 0.1
    signal = torch.randn(60, 2, dtype=torch.float64)

    def run(points, sigma, mass, signal):
        return diffusion(points, sigma, mass, normalization=normalization, tol=1e-11) @ signal

    here = run(points, 0.5, mass, signal)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    torch.testing.assert_close(run(points + 100, 0.5, mass, signal), here, rtol=0, atol=1e-8)
    torch.testing.assert_close(run(points @ rotation, 0.5, mass, signal), here, rtol=0, atol=1e-9)
    torch.testing.assert_close(run(7 * points, 3.5, mass, signal), here, rtol=0, atol=1e-9)
    order = torch.randperm(60)
    torch.testing.assert_close(run(points[order], 0.5, mass[order], signal[order]), here[order], rtol=0, atol=1e-9)
    split = torch.cat([points, points[:1]])
    halves = torch.cat([mass, mass[:1] / 2])
    halves[0] /= 2
    doubled = run(split, 0.5, halves, torch.cat([signal, signal[:1]]))
    torch.testing.assert_close(doubled[:60], here, rtol=0, atol=1e-9)
    padded = run(
        torch.cat([points, torch.full((5, 3), 1e3, dtype=torch.float64)]),
        0.5,
        torch.cat([mass, torch.zeros(5, dtype=torch.float64)]),
        torch.cat([signal, torch.randn(5, 2, dtype=torch.float64)]),
    )
    torch.testing.assert_close(padded[:60], here, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_limits_of_the_bandwidth(dtype):
    points, mass, signal = torch.randn(50, 3).to(dtype), torch.rand(50).to(dtype), torch.randn(50, 2).to(dtype)
    narrow, wide = (diffusion(points, sigma, mass, tol=1e-6) @ signal for sigma in (1e-4, 1e5))
    torch.testing.assert_close(narrow, signal, rtol=0, atol=1e-5)
    mean = (mass[:, None] * signal).sum(0) / mass.sum()
    torch.testing.assert_close(wide, mean.expand(50, 2), rtol=0, atol=1e-5)


def test_one_point():
    q = diffusion(torch.zeros(1, 3), 0.1, [5.0])
    torch.testing.assert_close(q @ torch.tensor([3.0]), torch.tensor([3.0]))


def test_figure_2_of_the_paper():
    """Mass of a Dirac on a leaf of a graph with a hub of degree 4: row 0.625, symmetric 0.75, the others 1."""
    adjacency = torch.zeros(5, 5, dtype=torch.float64)
    adjacency[0, 1:] = adjacency[1:, 0] = 1
    degree = adjacency.sum(-1)
    kernel = MatrixKernel((torch.diag(degree) + adjacency) / 2)
    dirac = torch.tensor([0.0, 1, 0, 0, 0], dtype=torch.float64)
    masses = {
        name: float((diffusion(kernel, mass=torch.ones(5), normalization=name, tol=1e-12) @ dirac).sum())
        for name in ("row", "symmetric", "sinkhorn")
    }
    assert masses == pytest.approx({"row": 0.625, "symmetric": 0.75, "sinkhorn": 1.0}, abs=1e-9)
    assert (diffusion(kernel, mass=torch.ones(5), tol=1e-12).to_dense() >= 0).all()
    # the truncated spectral diffusion keeps the mass but not the sign
    values, vectors = torch.linalg.eigh(torch.diag(degree) - adjacency)
    kept = vectors[:, :4] * torch.exp(-0.2 * values[:4])
    spectral = kept @ (vectors[:, :4].T @ dirac)
    assert float(spectral.sum()) == pytest.approx(1.0)
    assert spectral.min() < 0


def test_extension_to_new_points():
    points, new = ball(300), ball(40)
    signal = torch.randn(300, 2, dtype=torch.float64)
    for normalization in NORMALIZATIONS:
        q = diffusion(points, 0.3, normalization=normalization, tol=1e-12)
        torch.testing.assert_close(q.extend(points) @ signal, q @ signal, rtol=0, atol=1e-9)
        extension = q.extend(new)
        assert extension.shape == (40, 300)
        # a point of mass 0 at the new place is the same question
        with_new = torch.cat([points, new])
        mass = torch.cat([q.mass, torch.zeros(40, dtype=torch.float64)])
        whole = diffusion(with_new, 0.3, mass, normalization=normalization, tol=1e-12)
        longer = torch.cat([signal, torch.zeros(40, 2, dtype=torch.float64)])
        torch.testing.assert_close(extension @ signal, (whole @ longer)[300:], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="is not a function of points"):
        diffusion(MatrixKernel(torch.eye(3))).extend(new)


@pytest.mark.slow
def test_refinement_converges_to_the_closed_form_on_the_sphere():
    """Theorem 4.5: Q Y = λ Y for a spherical harmonic, λ = I_{5/2}(k) / I_{1/2}(k), k = 1/σ², as N grows."""
    sigma = 0.5
    k = 1 / sigma**2
    exact = 1 + 3 / k**2 - 3 / (k * math.tanh(k))
    errors = []
    for n in (250, 1000, 4000, 16000):
        points = sphere(n)
        harmonic = points[:, 0] * points[:, 1]
        q = diffusion(points, sigma, tol=1e-6)
        errors.append(float((q @ harmonic - exact * harmonic).abs().max()))
    assert errors[-1] < 0.02
    assert errors[-1] < errors[0] / 4


@pytest.mark.slow
def test_scipy_finds_the_spectrum():
    q = diffusion(sphere(400), 0.3, tol=1e-8)
    values = eigsh(q.to_scipy(symmetric=True), k=4, return_eigenvectors=False)
    expected = torch.linalg.eigvals(q.to_dense()).real.sort().values[-4:]
    np.testing.assert_allclose(values, expected.numpy(), atol=1e-6)
    x = np.random.default_rng(0).standard_normal((400, 3))
    operator, matrix = q.to_scipy(), q.to_dense().numpy()
    np.testing.assert_allclose(operator @ x, matrix @ x, atol=1e-12)
    np.testing.assert_allclose(operator.T @ x, matrix.T @ x, atol=1e-12)
    np.testing.assert_allclose(operator @ x[:, 0], matrix @ x[:, 0], atol=1e-12)
    v, one, columns = np.random.default_rng(0).standard_normal(400), np.eye(400), np.eye(400)[:, :3]
    for found, exact in (
        (operator.matvec(v), matrix @ v),
        (operator.rmatvec(v), matrix.T @ v),
        (operator.H @ v, matrix.T @ v),
        (operator.T @ v, matrix.T @ v),
        (operator.T.T @ v, matrix @ v),
        (operator.H.rmatvec(v), matrix @ v),
        (operator.T @ columns, matrix.T @ columns),
        (svds(operator, 3, return_singular_vectors=False, v0=v), np.linalg.svd(matrix, compute_uv=False)[2::-1]),
        (lsqr(operator + aslinearoperator(one), v)[0], np.linalg.solve(matrix + one, v)),
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
    with pytest.raises(ValueError, match="`to_scipy` takes one cloud"):
        diffusion(sphere(10), [0.1, 0.2]).to_scipy()


def test_absurd_dense_matrices_are_refused():
    with pytest.raises(ValueError, match=r"`to_dense` would make a matrix of shape \(100000, 100000\), 37.3 GB"):
        diffusion(torch.randn(100_000, 1), 1.0, normalization="none").to_dense()


def test_arrays_come_back_as_arrays():
    rng = np.random.default_rng(0)
    points, signal = rng.standard_normal((50, 3)), rng.standard_normal((50, 2))
    applied, q = diffuse(points, 0.5, signal, np.ones(50))
    for result in (q @ signal, applied, q.potential, q.mass, q.to_dense(), q.T @ signal, q.extend(points) @ signal):
        assert isinstance(result, np.ndarray)
        assert result.dtype == np.float64
    np.testing.assert_allclose(applied, q @ signal, atol=1e-12)
    assert isinstance(q @ torch.from_numpy(signal), torch.Tensor)
    assert isinstance(q.power(2, signal), np.ndarray)
    assert q.converged.item() is True


def test_heads_batches_and_their_signals():
    points, sigma = torch.randn(3, 40, 2), torch.tensor([0.3, 0.6])
    q = diffusion(points, sigma)
    assert q.shape == (3, 2, 40, 40)
    assert (q @ torch.randn(40)).shape == (3, 2, 40)
    assert (q @ torch.randn(40, 5)).shape == (3, 2, 40, 5)
    assert (q @ torch.randn(3, 1, 40, 5)).shape == (3, 2, 40, 5)
    signal = torch.randn(3, 2, 40, 5)
    alone = diffusion(points[1], 0.6) @ signal[1, 1]
    torch.testing.assert_close((q @ signal)[1, 1], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close((q.T @ signal)[1, 1], diffusion(points[1], 0.6).T @ signal[1, 1], rtol=0, atol=1e-4)


def test_the_signal_given_at_construction():
    points, signal = torch.randn(200, 3), torch.randn(200)
    for normalization in NORMALIZATIONS:
        applied, q = diffuse(points, 0.5, signal, normalization=normalization)
        torch.testing.assert_close(applied, q @ signal, rtol=0, atol=1e-5)


def test_copies_pickles_and_moves():
    points, signal = torch.randn(50, 3), torch.randn(50, 2)
    q = diffusion(points, 0.5)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.to("cpu")):
        torch.testing.assert_close(other @ signal, q @ signal, rtol=0, atol=0)
        assert other.num_iter == q.num_iter
    assert (q.to(torch.float64) @ signal.double()).dtype == torch.float64


def test_autocast_leaves_the_scores_alone():
    points, signal = torch.randn(200, 3), torch.randn(200, 4)
    for backend in ("native", "sdpa", "reference"):
        q = diffusion(points, 0.2, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = diffusion(points, 0.2, backend=backend)
            torch.testing.assert_close(inside @ signal, q @ signal, rtol=0, atol=1e-6)

    kernel, value = MatrixKernel(torch.eye(50) + 0.1), torch.randn(50, 4)
    exact = diffusion(kernel) @ value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(diffusion(kernel) @ value, exact, rtol=0, atol=1e-6)


def test_what_it_prints():
    text = repr(diffusion(torch.zeros(10, 3), 0.5))
    assert text.startswith("Diffusion(GaussianKernel((10, 3), sigma=0.5, method='exact'), normalization='sinkhorn', ")
    assert "marginal_error=" in text


@pytest.mark.parametrize("normalization", ["sinkhorn", "row", "symmetric", "none"])
def test_looking_computes_nothing(normalization, monkeypatch):
    points, mass = torch.randn(40, 3).double(), torch.rand(40).double()
    q = diffusion(points, 0.5, mass, normalization=normalization)
    expected = (q.to_dense().sum(-1) - 1).abs() @ mass / mass.sum()
    monkeypatch.setattr(GaussianKernel, "attend", lambda *_: pytest.fail("a pass of the kernel"))
    torch.testing.assert_close(q.marginal_error, expected)
    assert f"marginal_error={float(q.marginal_error):.1e}" in repr(q)
    assert q.to("cpu").marginal_error == q.for_channels(3).marginal_error == q.marginal_error


@pytest.mark.parametrize(("normalization", "passes"), [("row", 2), ("symmetric", 2), ("none", 1)])
def test_errors_of_one_step_cost_no_pass_beside_the_signal(normalization, passes, monkeypatch):
    calls, attend = [], GaussianKernel.attend
    monkeypatch.setattr(
        GaussianKernel, "attend", lambda *given, **options: calls.append(given) or attend(*given, **options)
    )
    points, mass = torch.randn(40, 3).double(), torch.rand(40).double()
    applied, q = diffuse(points, 0.5, points, mass, normalization=normalization)
    assert len(calls) == passes
    torch.testing.assert_close(applied, q.to_dense() @ points)
    torch.testing.assert_close(q.marginal_error, (q.to_dense().sum(-1) - 1).abs() @ mass / mass.sum())


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", ["implicit", "unroll"])
def test_gradients_through_the_operator(adjoint):
    points = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    mass = (torch.rand(5, dtype=torch.float64) + 0.2).requires_grad_()
    signal = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def function(points, sigma, mass, signal):
        return diffusion(points, sigma, mass, tol=1e-13, solver=Solver(adjoint=adjoint)) @ signal

    assert torch.autograd.gradcheck(function, (points, sigma, mass, signal))
    assert torch.autograd.gradgradcheck(function, (points, sigma, mass, signal))


def test_gradients_of_what_was_applied_at_construction():
    points = torch.randn(30, 2, dtype=torch.float64, requires_grad=True)
    signal = torch.randn(30, dtype=torch.float64, requires_grad=True)
    applied, q = diffuse(points, 0.5, signal, tol=1e-12)
    got = torch.autograd.grad(applied.sin().sum(), (points, signal), retain_graph=True)
    torch.testing.assert_close(
        got, torch.autograd.grad((q @ signal).sin().sum(), (points, signal)), rtol=1e-9, atol=1e-9
    )


def test_the_detached_gradient_of_sigma_has_the_wrong_sign():
    """The implicit one agrees with finite differences on a unit sphere with σ = 0.6."""
    points = sphere(96)
    for seed in range(20):  # a random linear loss for which the two disagree in sign
        weight = torch.randn(96, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        signal = torch.randn(96, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 100))

        def loss(sigma, adjoint="implicit", weight=weight, signal=signal):
            return (weight * (diffusion(points, sigma, tol=1e-13, solver=Solver(adjoint=adjoint)) @ signal)).sum()

        def gradient(adjoint, loss=loss):
            sigma = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
            return float(torch.autograd.grad(loss(sigma, adjoint), sigma)[0])

        difference = float(loss(0.6 + 1e-5) - loss(0.6 - 1e-5)) / 2e-5
        assert gradient("implicit") == pytest.approx(difference, rel=1e-5, abs=1e-7)
        if gradient("detach") * difference < 0:
            return
    pytest.fail("no loss among 20 for which the detached gradient has the wrong sign")


def test_a_constant_signal_has_no_gradient():
    """Q1 = 1 at every σ; the detached gradient says otherwise."""
    sigma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    points, ones = sphere(60), torch.ones(60, 1, dtype=torch.float64)
    (implicit,) = torch.autograd.grad((diffusion(points, sigma, tol=1e-13) @ ones).mean(), sigma)
    (detached,) = torch.autograd.grad(
        (diffusion(points, sigma, tol=1e-13, solver=Solver(adjoint="detach")) @ ones).mean(), sigma
    )
    assert abs(implicit) < 1e-9
    assert abs(detached) > 1


@pytest.mark.slow
def test_gradients_on_every_backend_in_float32():
    points, signal = torch.randn(300, 3), torch.randn(300, 3)

    def gradient(dtype, backend):
        x = points.to(dtype).requires_grad_()
        q = diffusion(x, 0.5, tol=1e-5, backend=backend)
        return torch.autograd.grad((q @ signal.to(dtype)).square().sum(), x)[0].double()

    exact = gradient(torch.float64, "reference")
    for backend in ("native", "sdpa", "reference"):
        torch.testing.assert_close(gradient(torch.float32, backend), exact, rtol=1e-3, atol=1e-3)


def test_dense_reference_of_the_cases_agrees():
    """The operator against the matrix of `cases.dense`, which shares no code with it."""
    points, signal = ball(100) / 0.3, torch.randn(100, 2, dtype=torch.float64)
    q = diffusion(points, 1.0, tol=1e-10)
    bias = q.potential - math.log(100)
    out, lse = dense(points, points, signal, bias)
    torch.testing.assert_close(q @ signal, torch.exp(q.potential + lse)[:, None] * out, rtol=1e-10, atol=1e-10)
    assert isinstance(q.kernel, GaussianKernel)


@pytest.mark.parametrize("method", ["exact", "tiles", slow("fourier")])
def test_products_from_both_sides(method):
    """`rows @ q`, arrays and `torch.matmul` agree with the matrix; light points and those without mass included."""
    points = sphere(80) + 5
    mass = 10 ** (-8 * torch.rand(80, dtype=torch.float64))
    mass[::9] = 0
    q = diffusion(GaussianKernel(points, 0.5, method=method, tol=1e-9), mass=mass, tol=1e-9)
    matrix, rows = q.to_dense(), torch.rand(3, 80, dtype=torch.float64)
    torch.testing.assert_close(rows @ q, rows @ matrix, rtol=1e-5, atol=1e-14)
    torch.testing.assert_close(rows[0] @ q, rows[0] @ matrix, rtol=1e-5, atol=1e-14)
    np.testing.assert_allclose(rows.numpy() @ q, rows @ matrix, rtol=1e-5, atol=1e-14)
    torch.testing.assert_close(torch.matmul(q, rows.mT), q @ rows.mT)
    torch.testing.assert_close(torch.matmul(rows, q), rows @ q)
    torch.testing.assert_close(rows @ q.T, rows @ matrix.mT, rtol=1e-5, atol=1e-9)


def test_operators_look_like_tensors():
    q = diffusion(sphere(30).float(), [0.3, 0.6])
    assert (q.dtype, q.device, q.shape) == (torch.float32, torch.device("cpu"), (2, 30, 30))
    assert (torch.rand(4, 30) @ q).shape == (2, 4, 30)
    assert repr(q.T).endswith(".T")
    assert repr(q.extend(sphere(5).float())).endswith("extend(5 points)")
    with pytest.raises(TypeError, match="not to one another"):
        q @ q
    with pytest.raises(ValueError, match="no transpose"):
        torch.rand(5) @ q.extend(sphere(5).float())

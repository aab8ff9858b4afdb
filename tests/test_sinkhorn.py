"""The solver: its fixed point, its rate, its promises, its derivatives."""

import math
import warnings

import pytest
import torch
from cases import ball, slow, sphere
from torch.autograd import gradcheck, gradgradcheck

from qattn import GaussianKernel, MatrixKernel, Solver, diffuse, diffusion, nn, sinkhorn


def marginal(kernel, mass, potential):
    """Mass-weighted mean of |Q1 − 1|, from one more attend."""
    lse = kernel.attend(potential + torch.log(mass)).lse
    share = mass / mass.sum(-1, keepdim=True)
    return (share * (torch.exp(potential + lse) - 1).abs()).sum(-1)


CLOUDS = {
    "sphere": lambda: sphere(1500),
    "ball": lambda: ball(1500),
    "square": lambda: torch.rand(1500, 2, dtype=torch.float64),
    "clusters": lambda: torch.cat([0.05 * ball(1000), ball(500) + 2]),
}
MASSES = {"equal": lambda n: torch.full((n,), 1 / n), "log-normal": lambda n: torch.exp(torch.randn(n))}


@pytest.mark.parametrize("sigma", [slow(0.02), slow(0.05), 0.2, slow(0.5)])
@pytest.mark.parametrize("masses", MASSES)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_passes_to_a_tolerance(cloud, masses, sigma):
    """The limits are 5 passes to 1e-3 and 9 to 1e-6, one more with two densities; the paper's takes up to 8 and 18."""
    points = CLOUDS[cloud]()
    mass = MASSES[masses](len(points)).double()
    kernel = GaussianKernel(points, sigma)
    spare = cloud == "clusters"
    for tol, most in ((1e-3, 5), (1e-6, 9)):
        result = sinkhorn(kernel, mass, tol=tol)
        assert result.converged
        assert result.num_iter <= most + spare
        assert result.marginal_error <= tol
        torch.testing.assert_close(
            marginal(kernel, mass, result.potential), result.marginal_error, rtol=1e-6, atol=1e-12
        )
    plain = sinkhorn(kernel, mass, tol=1e-6, solver=Solver(iteration="plain"))
    assert plain.num_iter > result.num_iter
    assert (plain.potential - result.potential).abs().mean() < 1e-5


def test_the_plain_iteration_is_the_paper_s():
    kernel, f = GaussianKernel(sphere(200), 0.3), torch.zeros(200, dtype=torch.float64)
    log_mass = torch.full((200,), 1 / 200, dtype=torch.float64).log()
    for _ in range(7):
        f = 0.5 * (f - kernel.attend(f + log_mass).lse)
    with pytest.warns(UserWarning, match="Sinkhorn stopped after 8 passes"):
        result = sinkhorn(kernel, tol=1e-12, solver=Solver(max_iter=8, iteration="plain"))
    torch.testing.assert_close(result.potential, f, rtol=0, atol=1e-14)


def test_history_and_warm_start():
    kernel = GaussianKernel(ball(300), 0.2)
    result = sinkhorn(kernel, tol=1e-6)
    assert len(result.history) == result.num_iter
    assert result.history[-1] == result.marginal_error
    errors = torch.stack(result.history[1:])
    assert (errors[1:] < 0.3 * errors[:-1]).all()
    again = sinkhorn(kernel, tol=1e-6, init=result.potential)
    assert again.num_iter == 1
    torch.testing.assert_close(again.potential, result.potential, rtol=0, atol=0)
    near = sinkhorn(GaussianKernel(kernel.points, 0.202), tol=1e-6, init=result.potential)
    assert near.num_iter < result.num_iter


@pytest.mark.parametrize(
    "call",
    [
        lambda points: sinkhorn(GaussianKernel(points, 0.3), tol=1e-9, solver=Solver(max_iter=3)),
        lambda points: diffusion(points, 0.3, tol=1e-9, solver=Solver(max_iter=3)),
        lambda points: nn.QDiffusion(1, sigma_range=(0.3, 0.3), tol=1e-9, solver=Solver(max_iter=3))(
            points[None], points
        ),
        lambda points: nn.QBlock(3, 1, sigma_range=(0.3, 0.3), tol=1e-9, solver=Solver(max_iter=3))(points, points),
    ],
    ids=["sinkhorn", "diffusion", "layer", "block"],
)
def test_the_warning_points_at_the_caller(call):
    with pytest.warns(UserWarning, match="Sinkhorn stopped") as record:
        call(torch.rand(50, 3))
    [warning] = record
    assert warning.filename == __file__
    assert warning.lineno == call.__code__.co_firstlineno


def test_a_missed_tolerance_warns_and_shows():
    with pytest.warns(
        UserWarning, match=r"Sinkhorn stopped after 3 passes with a mean \|Q1 − 1\| of .* above tol = 1.0e-09"
    ):
        result = sinkhorn(GaussianKernel(ball(100), 0.3), tol=1e-9, solver=Solver(max_iter=3))
    assert not result.converged
    assert result.num_iter == 3
    assert result.marginal_error > 1e-9


def test_no_tolerance_takes_all_passes_and_does_not_warn():
    for iteration in ("chebyshev", "plain"):
        result = sinkhorn(GaussianKernel(torch.rand(50, 3), 0.3), tol=0, solver=Solver(max_iter=7, iteration=iteration))
        assert result.num_iter == 7
        assert not result.converged
    q = diffusion(torch.rand(50, 3), 0.3, tol=0, solver=Solver(max_iter=7))
    assert q.num_iter == 7
    assert q.kernel.tol == 1e-3


def test_each_item_of_a_batch_stops_by_itself():
    points = torch.stack([ball(200), 100 * ball(200)])  # the second is a diagonal kernel: two passes
    sigma = [0.1, 0.5]
    kernel = GaussianKernel(points, sigma)
    result = sinkhorn(kernel, tol=1e-6)
    assert result.potential.shape == (2, 2, 200)
    for b in range(2):
        for h in range(2):
            alone = sinkhorn(GaussianKernel(points[b], sigma[h]), tol=1e-6)
            torch.testing.assert_close(result.potential[b, h], alone.potential, rtol=0, atol=1e-12)
            assert result.num_iter[b, h] == alone.num_iter
            torch.testing.assert_close(result.marginal_error[b, h], alone.marginal_error, rtol=0, atol=1e-12)
    assert len(result.num_iter.unique()) > 1


def test_finished_items_are_not_attended(monkeypatch):
    kernel = GaussianKernel(torch.stack([ball(100), 100 * ball(100)]), 0.3)
    active = []
    original = GaussianKernel.attend
    monkeypatch.setattr(
        GaussianKernel,
        "attend",
        lambda self, bias, *args, **kwargs: (
            active.append((bias > -torch.inf).any(-1).tolist()),
            original(self, bias, *args, **kwargs),
        )[1],
    )
    sinkhorn(kernel, tol=1e-6)
    assert active[0] == [True, True]
    assert active[-1] == [True, False]


def test_the_last_pass_applies_the_values(monkeypatch):
    kernel, value = GaussianKernel(ball(300), 0.2), torch.randn(300, 4, dtype=torch.float64)
    plain = sinkhorn(kernel, tol=1e-5)
    calls = []
    original = GaussianKernel.attend
    monkeypatch.setattr(
        GaussianKernel,
        "attend",
        lambda self, bias, value=None, **options: (
            calls.append(value is not None),
            original(self, bias, value, **options),
        )[1],
    )
    out, q = diffuse(kernel, None, value, tol=1e-5)
    assert len(calls) == plain.num_iter == q.num_iter
    assert calls[-1]
    assert sum(calls) <= 2
    mean, lse = kernel.attend(q.potential - math.log(300), value)
    torch.testing.assert_close(out, torch.exp(q.potential + lse)[:, None] * mean, rtol=0, atol=1e-12)


def potentials_of_all_rows(points, sigma, mass):
    """Potentials (H, N) of a cloud in float64, by plain iterations; those of points without mass follow."""
    x = points.double() / sigma.double()[:, None, None]
    scores, f = -0.5 * torch.cdist(x, x) ** 2, torch.zeros(x.shape[:2]).double()
    for _ in range(100):
        f = 0.5 * (f - torch.logsumexp(scores + (f + mass.double().log())[:, None, :], -1))
    return -torch.logsumexp(scores + (f + mass.double().log())[:, None, :], -1)


@pytest.mark.parametrize("method", ["exact", "tiles", "fourier"])
@pytest.mark.parametrize("warm", [False, True])
def test_potentials_at_points_without_mass(method, warm):
    """Near and far away, and for heads that stop at a pass of their own."""
    points, sigma = ball(60).float(), torch.tensor([0.3, 0.6, 3.0])
    far = 1.0 if method == "fourier" else 50.0
    points[-6:] *= torch.tensor([1.0, 1.0, 2.0, 4.0, 6.0, 6.0 * far])[:, None]
    mass = torch.full((60,), 1 / 54)
    mass[-6:] = 0
    expected = potentials_of_all_rows(points, sigma, mass)
    kernel = GaussianKernel(points, sigma, method=method, tol=1e-6)
    result = sinkhorn(kernel, mass, tol=1e-5, init=expected.float() if warm else None)
    assert (len(set(result.num_iter.tolist())) > 1) != warm
    errors = (result.potential - expected).abs() / expected.abs().clamp(min=1)
    assert errors.amax() < 5e-5, errors


def test_values_of_a_batch_whose_items_stop_at_different_passes():
    kernel, value = GaussianKernel(torch.stack([ball(100), 100 * ball(100)]), 0.3), torch.randn(2, 100, 2).double()
    out, _ = diffuse(kernel, None, value, tol=1e-6)
    for item in range(2):
        alone, _ = diffuse(GaussianKernel(kernel.points[item], 0.3), None, value[item], tol=1e-6)
        torch.testing.assert_close(out[item], alone, rtol=0, atol=1e-10)


def test_the_safeguard_for_indefinite_kernels():
    """Similarities with eigenvalues down to −N/2: Chebyshev alone may diverge, the solver converges."""
    n = 40
    matrix = 1e-6 + torch.zeros(n, n, dtype=torch.float64)
    matrix[: n // 2, n // 2 :] = 1
    matrix[n // 2 :, : n // 2] = 1
    assert torch.linalg.eigvalsh(matrix)[0] < -n / 4
    mass = torch.rand(n, dtype=torch.float64) + 0.1
    mass[: n // 2] /= mass[: n // 2].sum()
    mass[n // 2 :] /= mass[n // 2 :].sum()
    result = sinkhorn(MatrixKernel(matrix), mass, tol=1e-8, solver=Solver(max_iter=200))
    assert result.converged
    assert result.marginal_error <= 1e-8


def leaves(n=6, dims=2):
    points = torch.randn(n, dims, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    mass = (torch.rand(n, dtype=torch.float64) + 0.1).requires_grad_()
    return points, sigma, mass


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", ["implicit", "unroll"])
def test_gradients_of_the_potential(adjoint):
    def potential(points, sigma, mass):
        return sinkhorn(GaussianKernel(points, sigma), mass, tol=1e-13, solver=Solver(adjoint=adjoint)).potential

    assert gradcheck(potential, leaves())
    assert gradgradcheck(potential, leaves(4))


@pytest.mark.slow
def test_implicit_equals_a_long_unroll_up_to_the_third_derivative():
    inputs = leaves(12)

    def derivatives(adjoint):
        points, sigma, mass = inputs
        quantity = (
            sinkhorn(GaussianKernel(points, sigma), mass, tol=1e-14, solver=Solver(max_iter=60, adjoint=adjoint))
            .potential.sin()
            .sum()
        )
        found = []
        for _ in range(3):
            grads = torch.autograd.grad(quantity, inputs, create_graph=True)
            found += grads
            quantity = sum(grad.sin().sum() for grad in grads)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 1e-14 may be out of reach by a rounding
        implicit, unrolled = derivatives("implicit"), derivatives("unroll")
    for a, b in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_gradients_of_kernels_that_are_made_of_kernels():
    points, sigma, mass = leaves()
    factor = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def potential(points, sigma, mass, factor):
        kernel = GaussianKernel(points, sigma) + factor * GaussianKernel(points, 2 * sigma)
        return sinkhorn(kernel, mass, tol=1e-13).potential

    assert gradcheck(potential, (points, sigma, mass, factor))

    similarity = torch.rand(5, 5, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda s: sinkhorn(MatrixKernel(s + s.T), tol=1e-13).potential, similarity)


@pytest.mark.slow
def test_gradients_with_heads_batches_and_padding():
    points = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    mass = torch.tensor([[[0.2, 0.3, 0.5, 0.0, 0.0]], [[0.1, 0.2, 0.3, 0.2, 0.2]]], dtype=torch.float64)

    def potential(points, sigma):
        return sinkhorn(GaussianKernel(points, sigma), mass, tol=1e-13).potential

    assert gradcheck(potential, (points, sigma))  # of the points without mass too
    assert gradgradcheck(potential, (points, sigma))


def test_unrolling_a_batch_whose_items_stop_at_different_passes():
    points = torch.stack([ball(30), 100 * ball(30)]).requires_grad_()
    grads = []
    for adjoint in ("implicit", "unroll"):
        result = sinkhorn(GaussianKernel(points, 0.5), tol=1e-12, solver=Solver(adjoint=adjoint))
        assert len(result.num_iter.unique()) == 2
        grads += torch.autograd.grad(result.potential.sin().sum(), points)
    assert grads[0].isfinite().all()
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


def test_half_precision_points_are_scaled_in_float32():
    points = ball(100).half()
    result, exact = (sinkhorn(GaussianKernel(p, 0.05), tol=1e-5) for p in (points, points.double()))
    assert result.potential.dtype == torch.float32
    torch.testing.assert_close(result.potential.double(), exact.potential, rtol=0, atol=1e-3)


def test_detach_gives_the_potential_no_gradient():
    """The rest of the operator keeps its own: the gradient is that of e^f K m e^f v at a constant f."""
    points, sigma, mass = leaves()
    assert not sinkhorn(GaussianKernel(points, sigma), mass, solver=Solver(adjoint="detach")).potential.requires_grad
    signal = torch.randn(6, 2, dtype=torch.float64)
    q = diffusion(points, sigma, mass, solver=Solver(adjoint="detach"), tol=1e-12)
    scale = torch.exp(q.potential)
    matrix = scale[:, None] * torch.exp(-(torch.cdist(points, points) ** 2) / (2 * sigma**2)) * (mass * scale)
    got = torch.autograd.grad((q @ signal).sin().sum(), (points, sigma, mass))
    expected = torch.autograd.grad((matrix @ signal).sin().sum(), (points, sigma, mass))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_derivative_by_the_masses():
    """Proposition 4.6: dλ/λ = −(I + Q)⁻¹ Q dm/m, at most half as large as dm/m."""
    points, mass = sphere(150), torch.rand(150, dtype=torch.float64) + 0.5
    mass = (mass / mass.sum()).requires_grad_()
    change = torch.randn(150, dtype=torch.float64)  # dm / m

    def log_scaling(mass):
        return sinkhorn(GaussianKernel(points, 0.4), mass, tol=1e-13).potential

    f = log_scaling(mass)
    jacobian = torch.stack([torch.autograd.grad(f[i], mass, retain_graph=True)[0] for i in range(150)])
    got = jacobian @ (mass.detach() * change)
    kernel = torch.exp(-(torch.cdist(points, points) ** 2) / (2 * 0.4**2))
    Q = torch.exp(f.detach())[:, None] * kernel * (mass.detach() * torch.exp(f.detach()))
    expected = -torch.linalg.solve(torch.eye(150) + Q, Q @ change)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)

    def norm(v):
        return (mass.detach() * v**2).sum().sqrt()

    assert norm(got) <= 0.5 * norm(change)

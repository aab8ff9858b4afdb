"""Geodesics: derivatives of H, conservation laws of its flow, and matching."""

import pytest
import torch
from cases import slow

from qattn import mass, shapes
from qattn.geodesics import (
    INTEGRATORS,
    METRICS,
    Hamiltonian,
    carry,
    from_stencil,
    match,
    shoot,
    stencil,
)

pytestmark = pytest.mark.usefixtures("_one_thread")

SIGMA = 0.4
PARTS = [(metric, integrator) for metric in METRICS for integrator in INTEGRATORS]
QUICK_METRICS = ["kernel", slow("diffusion")]
QUICK_INTEGRATORS = ["euler", slow("midpoint")]
QUICK_PARTS = [slow(*part) if "midpoint" in part else part for part in PARTS]


def cloud(n=20, d=3):
    """Positions and momenta."""
    return torch.rand(n, d, dtype=torch.float64), 0.3 * torch.randn(n, d, dtype=torch.float64)


def exact(metric):
    return Hamiltonian(SIGMA, metric=metric, tol=1e-13)


def dense(q, p, metric):
    """H by dense matrices, normalized by many plain steps that autograd differentiates."""
    K = torch.exp(-(q[:, None] - q).square().sum(-1) / (2 * SIGMA**2))
    f = torch.zeros_like(q[:, 0])
    for _ in range(60 if metric == "diffusion" else 0):
        f = 0.5 * (f - torch.log(K @ torch.exp(f) / len(q)))
    scale = torch.exp(f) / len(q) ** 0.5 if metric == "diffusion" else torch.exp(f)
    return 0.5 * (p * (scale[:, None] * (K @ (scale[:, None] * p)))).sum()


def energies(hamiltonian, path):
    return torch.stack([hamiltonian(q, p) for q, p in zip(path.positions, path.momenta, strict=True)])


@pytest.mark.parametrize("metric", METRICS)
def test_h_and_its_derivatives_are_those_of_matrices(metric):
    q, p = cloud()
    hamiltonian = exact(metric)
    torch.testing.assert_close(hamiltonian(q, p), dense(q, p, metric))
    q.requires_grad_()
    p.requires_grad_()
    velocity, force = hamiltonian.derivatives(hamiltonian.operator(q), p)
    by_q, by_p = torch.autograd.grad(dense(q, p, metric), (q, p))
    torch.testing.assert_close(velocity, by_p)
    torch.testing.assert_close(force, -by_q)
    by_q, by_p = torch.autograd.grad(hamiltonian(q, p), (q, p))  # H itself, by the adjoint of the normalization
    torch.testing.assert_close(velocity, by_p)
    torch.testing.assert_close(force, -by_q)


@pytest.mark.parametrize("metric", QUICK_METRICS)
def test_derivatives_can_be_differentiated_again(metric):
    hamiltonian = exact(metric)
    q, p = (x.requires_grad_() for x in cloud(6, 2))
    assert torch.autograd.gradcheck(
        lambda q, p: hamiltonian.derivatives(hamiltonian.operator(q), p), (q, p), fast_mode=True
    )


@pytest.mark.parametrize(("metric", "integrator"), QUICK_PARTS)
def test_gradients_of_the_error_of_a_match(metric, integrator):
    q, p = cloud(5, 2)
    target = q + 0.1

    def error(p):
        last = shoot(exact(metric), q, p, dt=0.5, integrator=integrator).positions[-1]
        return (last - target).square().sum()

    assert torch.autograd.gradcheck(error, p.requires_grad_(), atol=1e-6, fast_mode=True)


def test_the_start_of_the_normalization_changes_nothing():
    q, p = cloud()
    hamiltonian, results = exact("diffusion"), []
    for init in (None, torch.randn(len(q), dtype=torch.float64)):
        x = q.clone().requires_grad_()
        velocity, force = hamiltonian.derivatives(hamiltonian.operator(x, init), p)
        results.append((velocity, force, *torch.autograd.grad((velocity * force).sum(), x)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("metric", QUICK_METRICS)
def test_midpoints_keep_energy_and_lead_back(metric):
    q, p = cloud()
    p = p if metric == "diffusion" else p / len(q)
    hamiltonian = exact(metric)
    drift = {}
    for integrator in INTEGRATORS:
        path = shoot(hamiltonian, q, p, dt=0.2, integrator=integrator)
        H = energies(hamiltonian, path)
        drift[integrator] = float((H / H[0] - 1).abs().max())
    assert drift["midpoint"] < 2e-3
    assert drift["midpoint"] < 0.05 * drift["euler"]
    back = shoot(hamiltonian, path.positions[-1], path.momenta[-1], until=-1.0, dt=0.2, integrator="midpoint")
    torch.testing.assert_close(back.positions[-1], q, rtol=0, atol=1e-9)
    torch.testing.assert_close(back.momenta[-1], p, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_errors_fall_as_the_order_of_the_integrator_says(metric):
    q, p = cloud()
    truth = shoot(exact(metric), q, p, until=0.5, dt=0.05, integrator="midpoint").positions[-1]
    for integrator, order in (("euler", 1), ("midpoint", 2)):
        ends = (shoot(exact(metric), q, p, until=0.5, dt=dt, integrator=integrator) for dt in (0.25, 0.125))
        coarse, fine = ((path.positions[-1] - truth).norm() for path in ends)
        assert 0.75 * 2**order < coarse / fine < 1.4 * 2**order


@pytest.mark.parametrize("integrator", QUICK_INTEGRATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_translation_keeps_its_velocity(integrator, dtype):
    """Q keeps constants, so equal momenta translate a shape by themselves; with K the points would separate."""
    q = cloud()[0].to(dtype)
    p = torch.tensor([0.5, -1.0, 0.2]).to(q).expand_as(q)
    path = shoot(Hamiltonian(SIGMA, tol=1e-6), q, p, until=1.5, dt=0.25, integrator=integrator)
    torch.testing.assert_close(path.positions, q + path.times[:, None, None] * p, rtol=0, atol=2e-4)
    torch.testing.assert_close(path.momenta, p.expand_as(path.momenta), rtol=0, atol=2e-4)
    other = shoot(Hamiltonian(SIGMA, metric="kernel"), q, p / len(q), until=1.5, dt=0.25, integrator=integrator)
    assert (other.momenta - other.momenta[0]).abs().max() > 0.01


@pytest.mark.parametrize(("metric", "integrator"), QUICK_PARTS)
def test_momentum_is_kept_whatever_the_tolerance(metric, integrator):
    q, p = cloud()
    path = shoot(Hamiltonian(SIGMA, metric=metric, tol=1e-1), q, p, dt=0.25, integrator=integrator)
    torch.testing.assert_close(path.momenta.sum(1), p.sum(0).expand(len(path.times), 3))
    if integrator == "midpoint":  # conserves quadratic invariants
        angular = torch.linalg.cross(path.positions, path.momenta).sum(1)
        torch.testing.assert_close(angular, angular[:1].expand_as(angular))


@pytest.mark.parametrize("metric", QUICK_METRICS)
def test_geodesics_move_and_turn_with_their_shape(metric):
    q, p = cloud()
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    path = shoot(exact(metric), q, p)
    other = shoot(exact(metric), q @ turn + 3.0, p @ turn)
    torch.testing.assert_close(other.positions, path.positions @ turn + 3.0)
    torch.testing.assert_close(other.momenta, path.momenta @ turn)


@pytest.mark.parametrize("metric", QUICK_METRICS)
def test_twice_the_momenta_is_twice_the_speed(metric):
    q, p = cloud()
    path = shoot(exact(metric), q, p, until=0.8, dt=0.1)
    fast = shoot(exact(metric), q, 2 * p, until=0.4, dt=0.05)
    torch.testing.assert_close(fast.positions, path.positions)
    torch.testing.assert_close(fast.momenta, 2 * path.momenta)


@pytest.mark.parametrize(
    ("until", "dt", "count"), [(0.3, 0.1, 3), (1.0, 0.1, 10), (-0.5, 0.2, 3), (0.05, 0.1, 1), (1e-8, 0.1, 1)]
)
def test_steps_are_equal_and_none_is_longer_than_dt(until, dt, count):
    q, p = (x.float() for x in cloud(5))
    path = shoot(Hamiltonian(SIGMA, metric="kernel"), q, p, until=until, dt=dt)
    assert path.positions.shape == path.momenta.shape == (count + 1, 5, 3)
    assert path.times.dtype == torch.float32
    torch.testing.assert_close(path.times, torch.linspace(0, until, count + 1))
    assert (path.times.diff().abs() <= dt + 1e-6).all()


def test_no_time_is_no_way():
    q, p = cloud(5)
    path = shoot(exact("diffusion"), q, p, until=0)
    assert path.times.tolist() == [0.0]
    torch.testing.assert_close(path.positions, q[None])


def test_a_step_too_long_for_midpoints_is_refused():
    q, p = cloud()
    with pytest.raises(ValueError, match="Take a shorter `dt`"):
        shoot(Hamiltonian(SIGMA, metric="kernel"), q, 100 * p, until=10, dt=10, integrator="midpoint")


@pytest.mark.slow
@pytest.mark.parametrize("metric", QUICK_METRICS)
def test_matching_finds_the_way(metric):
    q, p = cloud()
    p = p if metric == "diffusion" else p / len(q)
    hamiltonian = Hamiltonian(SIGMA, metric=metric, tol=1e-8)
    target = shoot(hamiltonian, q, p, dt=0.25).positions[-1]
    found = match(hamiltonian, q, target, dt=0.25, max_iter=20)
    last = shoot(hamiltonian, q, found.momenta, dt=0.25).positions[-1]
    assert found.errors[0] == pytest.approx(float((q - target).square().sum(-1).mean()))
    assert found.errors[-1] == pytest.approx(float((last - target).square().sum(-1).mean()), rel=1e-3)
    assert found.errors[-1] < 1e-2 * found.errors[0]
    assert found.errors[1] < 0.5 * found.errors[0]  # the first step is already good
    assert len(found.errors) < 25  # few steps were rejected
    assert not found.momenta.requires_grad


@pytest.mark.slow
def test_matching_by_midpoints():
    source = cloud(10, 2)[0].float()
    target = 1.2 * source
    options = {"dt": 0.5, "integrator": "midpoint"}
    found = match(Hamiltonian(SIGMA), source, target, max_iter=2, **options)
    last = shoot(Hamiltonian(SIGMA), source, found.momenta, **options).positions[-1]
    assert found.errors[-1] == pytest.approx(float((last - target).square().sum(-1).mean()), rel=1e-2)
    assert found.errors[-1] < 0.2 * found.errors[0]


@pytest.mark.slow
def test_matching_depends_on_no_unit():
    q, p = cloud()
    results = []
    for unit in (1.0, 1000.0):
        found = match(Hamiltonian(unit * SIGMA), unit * q, unit * (q + p), dt=0.5, max_iter=5)
        results.append((found.momenta / unit, torch.tensor(found.errors) / unit**2))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_shape_is_where_it_is():
    q, _ = cloud()
    found = match(exact("diffusion"), q, q)
    assert found.errors == (0.0,)
    assert not found.momenta.any()


@pytest.mark.parametrize("metric", METRICS)
def test_a_geodesic_carries_its_own_points_where_they_go(metric):
    q, p = cloud()
    path = shoot(exact(metric), q, p, until=-0.5)
    torch.testing.assert_close(carry(exact(metric), path, q), path.positions)
    near = carry(exact(metric), path, q[:3] + 1e-6)
    torch.testing.assert_close(near, path.positions[:, :3], rtol=0, atol=1e-4)


@pytest.mark.parametrize("d", [2, 3])
def test_a_stencil_has_the_moments_of_its_gaussians(d):
    means = torch.randn(4, d, dtype=torch.float64)
    root = torch.randn(4, d, d, dtype=torch.float64)
    covariances = root @ root.mT
    points = stencil(means, covariances)
    assert points.shape == (4 * 2 * d, d)
    found = from_stencil(points)
    torch.testing.assert_close(found[0], means)
    torch.testing.assert_close(found[1], covariances)
    torch.testing.assert_close(points[: 2 * d].T.cov(correction=0), covariances[0] / d)  # spread over 2 d points
    linear, shift = torch.randn(d, d, dtype=torch.float64), torch.randn(d, dtype=torch.float64)
    moved = from_stencil(points @ linear.T + shift)
    torch.testing.assert_close(moved[0], means @ linear.T + shift)
    torch.testing.assert_close(moved[1], linear @ covariances @ linear.T)


def test_stencils_of_variances_and_of_flat_gaussians():
    means, variances = torch.randn(2, 4, 3), torch.rand(2, 4)
    for covariances in (variances, variances[..., None].expand(2, 4, 3)):
        found = from_stencil(stencil(means, covariances))
        torch.testing.assert_close(found[0], means)
        torch.testing.assert_close(found[1], variances[..., None, None] * torch.eye(3))
    flat = torch.diag(torch.tensor([1.0, 1.0, 0.0])).expand(1, 3, 3)
    torch.testing.assert_close(from_stencil(stencil(torch.zeros(1, 3), flat))[1], flat)


@pytest.mark.parametrize("lengths", [(1.0, 1.0, 1.0), (1.0, 1.0, 4.0), (1.0, 2.0, 4.0)])
def test_gradients_through_a_stencil(lengths):
    """Functions of the Gaussians have exact gradients for any choice of axes, also where lengths are equal."""
    turn = torch.linalg.qr(torch.randn(2, 3, 3).double()).Q
    covariances = (turn * torch.tensor(lengths).double()) @ turn.mT
    covariances.requires_grad_()
    linear, weight = torch.randn(3, 3).double(), torch.randn(2, 3, 3).double()

    def moved(matrices):
        return linear @ matrices @ linear.T

    points = stencil(torch.randn(2, 3).double(), covariances)
    (weight * from_stencil(points @ linear.T)[1] ** 2).sum().backward()
    exact = torch.func.grad(lambda matrices: (weight * moved(matrices) ** 2).sum())(covariances.detach())
    torch.testing.assert_close(covariances.grad, (exact + exact.mT) / 2)


def test_gradients_through_stencils_of_variances():
    variances = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    found = from_stencil(stencil(torch.zeros(3, 2).double(), variances))[1]
    (found.diagonal(dim1=1, dim2=2).sum(-1) ** 2).sum().backward()
    torch.testing.assert_close(variances.grad, 8 * variances.detach())  # of (2 v)² per component


@pytest.mark.slow
def test_areas_stay_with_the_diffusion_and_blow_up_with_the_kernel():
    """Appendix I of the paper, on a bent ellipsoid."""
    vertices, faces = shapes.sphere_mesh(2)
    source = vertices * torch.tensor([1.0, 0.25, 0.25])
    angle = 0.8 * source[:, :1]
    bent = torch.cat([torch.sin(angle) / 0.8, (1 - torch.cos(angle)) / 0.8], dim=-1)
    target = torch.cat([bent, torch.zeros_like(angle)], dim=-1)
    target = target + source[:, 1:2] * torch.cat([-torch.sin(angle), torch.cos(angle), 0 * angle], dim=-1)
    target = target + source * torch.tensor([0.0, 0.0, 1.0])
    ratios = {}
    for metric in METRICS:
        hamiltonian = Hamiltonian(0.25, metric=metric)
        found = match(hamiltonian, source, target, dt=0.25, max_iter=8)
        path = shoot(hamiltonian, source, found.momenta, until=1.5, dt=0.25).positions
        areas = torch.stack([mass.vertex_areas(q, faces).sum() for q in path])
        ratios[metric] = (areas / areas[0])[[2, -1]].tolist()
    half, beyond = ratios["kernel"]
    assert half < 1 < beyond  # contracts on the way, and blows up beyond the end
    assert abs(ratios["diffusion"][0] - 1) < 0.7 * abs(half - 1)
    assert abs(ratios["diffusion"][1] - 1) < 0.7 * abs(beyond - 1)


WRONG = {
    "sigma": (lambda q, p: Hamiltonian(0.0), "`sigma` should be positive"),
    "tol": (lambda q, p: Hamiltonian(1.0, tol=0), "`tol` should be positive"),
    "metric": (lambda q, p: Hamiltonian(1.0, metric="euclidean"), "`metric` should be 'diffusion' or 'kernel'"),
    "batch": (lambda q, p: shoot(Hamiltonian(1.0), q[None], p[None]), r"`positions` should have shape \(N, d\)"),
    "shape": (lambda q, p: shoot(Hamiltonian(1.0), q, p[:3]), r"`momenta` should be like `positions`, \(20, 3\)"),
    "dtype": (lambda q, p: shoot(Hamiltonian(1.0), q, p.float()), "float64 cpu, one row per point; got .* float32"),
    "nan": (lambda q, p: shoot(Hamiltonian(1.0), q, p * torch.nan), "`momenta` should be finite"),
    "dt": (lambda q, p: shoot(Hamiltonian(1.0), q, p, dt=0), "`dt` should be positive"),
    "until": (lambda q, p: shoot(Hamiltonian(1.0), q, p, until=torch.inf), "until.* should be .* finite"),
    "integrator": (lambda q, p: shoot(Hamiltonian(1.0), q, p, integrator="rk4"), "`integrator` should be 'euler'"),
    "target": (lambda q, p: match(Hamiltonian(1.0), q, q[:3]), "`target` should be like `source`"),
    "max_iter": (lambda q, p: match(Hamiltonian(1.0), q, p, max_iter=0), "`max_iter` should be an integer"),
    "points": (
        lambda q, p: carry(Hamiltonian(1.0), shoot(Hamiltonian(1.0), q, p), q[:, :2]),
        "`points` should have 3 coordinates",
    ),
    "stencil": (lambda q, p: from_stencil(q), "should be a multiple of"),
    "covariances": (lambda q, p: stencil(q, p), "no negative variance"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_told(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(*cloud())

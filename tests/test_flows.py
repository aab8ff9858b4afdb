"""Flows: steps against their formula, descent, and where points end."""

import numpy as np
import pytest
import torch
from cases import dense_energy_distance
from memory import added_megabytes
from test_progress import terminal_of

from qattn import diffuse, diffusion, flows
from qattn.distances import chamfer_distance, energy_distance
from qattn.flows import flow

SCRIPT = """
def run(n):
    x = torch.rand(n, 2, requires_grad=True)
    qattn.distances.energy_distance(x, torch.rand(n, 2)).backward()
    assert x.grad.isfinite().all()
    qattn.flows.flow(x, torch.rand(n, 2), 0.1, num_steps=2)
"""


@pytest.mark.slow
def test_memory_grows_with_the_points():
    """The matrix of all distances of 16,000 points per cloud would take 4 GB."""
    assert added_megabytes(SCRIPT, "run(500); run(6000)", "run(16_000)") < 100


def disc_and_corner(n=300, dtype=torch.float32):
    """Points in a square, and in a disc beside it."""
    angle, radius = torch.rand(2, n, dtype=dtype)
    disc = radius.sqrt()[:, None] * torch.stack([torch.cos(6.2832 * angle), torch.sin(6.2832 * angle)], dim=-1)
    return 0.2 * torch.rand(n, 2, dtype=dtype), 0.6 + 0.3 * disc


@pytest.mark.parametrize("options", [{}, {"sigma": 0.1}, {"sigma": 0.1, "normalization": "none"}])
def test_a_flow_descends(options):
    x, y = disc_and_corner()
    way = flow(x, y, num_steps=40, every=5, **options)
    assert way.steps.tolist() == list(range(0, 41, 5))
    assert (way.positions[0] == x).all()
    energy = energy_distance(way.positions, y)
    assert (energy.diff() < 0).all()
    assert energy[-1] < 0.1 * energy[0]


@pytest.mark.slow
def test_the_normalized_flow_leaves_none_behind():
    x, y = disc_and_corner()
    plain, raw, normalized = (
        flow(x, y, num_steps=100, **options).positions[-1]
        for options in ({}, {"sigma": 0.1, "normalization": "none"}, {"sigma": 0.1})
    )
    assert chamfer_distance(normalized, y) < 0.8 * chamfer_distance(plain, y)
    assert chamfer_distance(normalized, y) < 0.2 * chamfer_distance(raw, y)


@pytest.mark.parametrize("normalization", ["sinkhorn", "none"])
def test_steps_are_those_of_the_formula(normalization):
    x, y = disc_and_corner(80, torch.float64)
    a = torch.rand(80).double()
    way = flow(x, y, 0.1, source_mass=a, num_steps=2, every=1, step_size=0.02, normalization=normalization, tol=1e-10)
    a, scale = a / a.sum(), 1.0
    for step in range(2):
        now = way.positions[step].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(dense_energy_distance(now, y, a), now)
        L = diffusion(now.detach(), 0.1, a, normalization=normalization, tol=1e-10).to_dense()
        if normalization == "none":
            scale = L.sum(1).mean() if step == 0 else scale
        expected = now.detach() - 0.02 / scale * L @ (gradient / a[:, None])
        torch.testing.assert_close(way.positions[step + 1], expected, rtol=0, atol=1e-9)


def test_points_without_mass_are_carried_along():
    x, y = disc_and_corner(100, torch.float64)
    mass = torch.ones(100).double()
    mass[60:] = 0
    way, alone = flow(x, y, source_mass=mass, num_steps=20), flow(x[:60], y, num_steps=20)
    torch.testing.assert_close(way.positions[:, :60], alone.positions)
    assert chamfer_distance(way.positions[-1, 60:], y) < 0.1 * chamfer_distance(x[60:], y)


def test_arrays_come_back_as_arrays():
    x, y = (z.numpy() for z in disc_and_corner(20))
    way = flow(x, y, 0.5, num_steps=3)
    assert isinstance(way.positions, np.ndarray)
    assert isinstance(way.steps, np.ndarray)
    assert way.steps.tolist() == [0, 3]


def test_batches_flow_as_each_cloud_does():
    x, y = disc_and_corner(60, torch.float64)
    batch = torch.stack([x, x.flip(1) + 0.1])
    way = flow(batch, y, 0.1, num_steps=5, tol=1e-9)
    assert way.positions.shape == (2, 2, 60, 2)
    alone = flow(batch[1], y, 0.1, num_steps=5, tol=1e-9)
    torch.testing.assert_close(way.positions[:, 1], alone.positions, rtol=0, atol=1e-8)


def test_potentials_start_from_those_of_the_step_before(monkeypatch):
    passes = []

    def counted(*args, **kwargs):
        smooth, q = diffuse(*args, **kwargs)
        passes.append(int(q.num_iter))
        return smooth, q

    monkeypatch.setattr(flows, "diffuse", counted)
    flow(*disc_and_corner(), 0.1, num_steps=10, step_size=0.01)
    assert max(passes[1:]) < passes[0]


@pytest.mark.usefixtures("_slow_machine")
def test_long_flows_show_their_steps(monkeypatch):
    terminal = terminal_of(monkeypatch)
    flow(*disc_and_corner(20), num_steps=7)
    assert "Flow" in terminal.getvalue()
    assert "/7" in terminal.getvalue()


X, Y = torch.ones(4, 2), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flow(X, Y, sigma=0.0), "`sigma` should be positive"),
        (lambda: flow(X, Y, sigma=[0.1, 0.2]), "`sigma` should be one number"),
        (lambda: flow(X, Y, num_steps=0), "`num_steps` should be an integer of at least 1"),
        (lambda: flow(X, Y, every=0.5), "`every` should be an integer of at least 1"),
        (lambda: flow(X, Y, step_size=-1.0), "`step_size` should be positive"),
        (lambda: flow(X, Y, normalization="none"), "normalization are options of smoothing.*Give `sigma` too"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""O(N) memory, measured: 16,000 points, whose scores alone would take 1 GB, within a tenth of that."""

import gc

import pytest
import torch
from memory import added_megabytes

import qattn
from qattn.kernels.gaussian.plan import Plan
from qattn.kernels.gaussian.prepared import PreparedPoints

TRAINING = """
points = torch.randn(20_000, 3)
signal, log_sigma = torch.randn(20_000, 8), torch.tensor(0.0, requires_grad=True)

def step(n):
    x = points[:n].clone().requires_grad_()
    q = qattn.diffusion(x, log_sigma.exp())
    (q @ signal[:n]).square().mean().backward()
    assert x.grad.isfinite().all() and log_sigma.grad.isfinite()
"""


@pytest.mark.slow
def test_a_training_step_of_20_000_points_stays_under_a_gigabyte():
    """Gradients by points and σ, through the normalization, with 8 channels; one N × N matrix would be 1.6 GB."""
    assert added_megabytes(TRAINING, "step(300)", "step(20_000)") < 1000


MANY = """
def step(n, method, sigma):
    points = torch.nn.functional.normalize(torch.randn(n, 3), dim=-1)
    smooth, q = qattn.diffuse(points, sigma, torch.randn(n, 8), method=method)
    assert smooth.isfinite().all() and q.kernel_error(num_rows=16) <= 1e-3
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sigma"), [("tiles", 0.01), ("fourier", 0.2)])
def test_300_000_points_by_tiles_and_fourier(method, sigma):
    """Less than a kilobyte a point: a graph of 100 neighbors with weights would alone take 1.2."""
    steps = (f"step({n}, {method!r}, {sigma})" for n in (2000, 300_000))
    assert added_megabytes(MANY, *steps) < 300


ATTENTION = """
def run(n, backend, wants_gradient):
    points = torch.randn(n, 2, requires_grad=wants_gradient)
    out, lse = qattn.attend(points, points, torch.ones(n, 1), backend=backend)
    if wants_gradient:
        (out.sum() + lse.sum()).backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "wants_gradient"),
    [("native", False), ("native", True), ("sdpa", False), ("sdpa", True), ("reference", False), ("flex", False)],
)
def test_memory_grows_with_the_points_not_the_pairs(backend, wants_gradient):
    n = 16_000
    small, large = (f"run({size}, {backend!r}, {wants_gradient})" for size in (500, n))
    allowed = 100 if backend != "flex" else 250  # compiling for a new shape takes some too
    assert added_megabytes(ATTENTION, f"for _ in range(3): {small}", large) < allowed < n * n * 4 / 2**20


@pytest.mark.parametrize("method", ["exact", "tiles", "fourier", "auto"])
def test_what_a_kernel_has_prepared_goes_with_it(method):
    """Memory is free at once, without Python's collector: a loop that makes an operator in each step must not grow."""
    points = torch.nn.functional.normalize(torch.randn(5000, 3), dim=-1)

    def step():
        kernel = qattn.GaussianKernel(points, 0.5, method=method)
        qattn.diffuse(kernel, None, points)

    def prepared():
        return [thing for thing in gc.get_objects() if type(thing) in (Plan, PreparedPoints)]

    step()  # which may compile, and leave frames behind
    gc.collect()
    gc.disable()
    try:
        before = len(prepared())
        step()
        assert len(prepared()) == before
    finally:
        gc.enable()

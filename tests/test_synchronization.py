"""How often the host waits for a CUDA device, counted on fake tensors: once in a Sinkhorn pass, for its convergence."""

from contextlib import ExitStack

import pytest
import torch
from cases import slow
from fake_cuda import Recorder, Synchronizations, fake_cuda

import qattn


def passes_and_waits(channels, max_iter, **options):
    """Attention kernels that a diffusion calls, and how often the host waits, with so many passes."""
    with ExitStack() as stack:
        for context in fake_cuda():
            stack.enter_context(context)
        points = torch.empty(500, 3, device="cuda")
        value = torch.empty(500, channels, device="cuda") if channels else None
        waits, calls = stack.enter_context(Synchronizations()), stack.enter_context(Recorder())
        solver, kernel = qattn.Solver(max_iter=max_iter), qattn.GaussianKernel(points, 0.3, method="exact", **options)
        if value is None:
            qattn.diffusion(kernel, tol=0, solver=solver)
        else:
            qattn.diffuse(kernel, None, value, tol=0, solver=solver)
        return len(calls.calls), waits.count


@pytest.mark.parametrize("channels", [slow(0), 8])
def test_a_sinkhorn_pass_waits_once(channels):
    """More passes add one wait each; what is known of the points is not asked again."""
    few, many = passes_and_waits(channels, 3), passes_and_waits(channels, 11)
    assert many[0] - few[0] == 8
    assert many[1] - few[1] == 8


def test_waiting_is_counted():
    with ExitStack() as stack:
        for context in fake_cuda():
            stack.enter_context(context)
        x = torch.ones(3, device="cuda")
        waits = stack.enter_context(Synchronizations())
        assert bool(x.all())
        assert not bool(x.any())
        assert float(x.sum()) == 1.0
        assert waits.count == 3
        assert x.cpu().device.type == "cpu"
        assert waits.count == 4

"""Waits of the host for a CUDA device, counted on fake tensors: one in a Sinkhorn pass, for its convergence."""

import sys
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
from cases import slow
from fake_cuda import Recorder, Synchronizations, allow_fake_cuda_tensors, fake_cuda
from torch.overrides import TorchFunctionMode

import qattn
from qattn import GaussianKernel
from qattn.attention import tensor_cores
from qattn.kernels.gaussian import prepared
from qattn.operators.potential_gradient import solve
from qattn.tiles import device


def passes_and_waits(channels, max_iter):
    """Attention kernels of torch that a diffusion calls, and how often the host waits, with so many passes."""
    allow_fake_cuda_tensors()
    with ExitStack() as stack:
        for context in fake_cuda():
            stack.enter_context(context)
        points = torch.empty(500, 3, device="cuda")
        value = torch.empty(500, channels, device="cuda") if channels else None
        waits, calls = stack.enter_context(Synchronizations()), stack.enter_context(Recorder())
        solver = qattn.Solver(max_iter=max_iter)
        kernel = qattn.GaussianKernel(points, 0.3, method="exact", backend="sdpa")
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


class Reads(TorchFunctionMode):
    """Counts the numbers and sizes that the host reads from tensors on the CPU, where nothing is fake."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function.__name__ in ("__bool__", "__float__", "__int__", "item", "tolist", "nonzero")
        return function(*args, **(kwargs or {}))


def kernel_and_mass(is_padded):
    mass = torch.ones(50)
    if is_padded:
        mass[-5:] = 0
    return qattn.GaussianKernel(torch.rand(50, 3), 0.3, method="exact", backend="reference"), mass


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_sinkhorn_pass_reads_once_with_points_without_mass_too(is_padded):
    """Only the last pass asks whether points without mass are far away, whose rows are computed apart."""

    def reads(max_iter):
        kernel, mass = kernel_and_mass(is_padded)
        with Reads() as counter:
            qattn.diffusion(kernel, mass=mass, tol=0, solver=qattn.Solver(max_iter=max_iter))
        return counter.count

    assert reads(11) - reads(3) == 8


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_step_of_the_adjoint_reads_its_residual_alone(is_padded, monkeypatch):
    """Each product on a CPU also asks whether any point is absent, to save a copy of the values."""
    kernel, mass = kernel_and_mass(is_padded)
    products, attend = [], GaussianKernel.attend
    monkeypatch.setattr(
        GaussianKernel, "attend", lambda self, *args, **options: products.append(1) or attend(self, *args, **options)
    )

    def steps_and_reads(tol):
        q = qattn.diffusion(kernel, mass=mass, tol=1e-6)
        products.clear()
        with Reads() as counter:
            solve(kernel, q.potential, q.bias - q.potential, mass, kernel.tensors, is_transposed=True, tol=tol)
        return len(products), counter.count

    few, many = steps_and_reads(1e-1), steps_and_reads(1e-5)
    assert many[0] > few[0] + 2
    assert many[1] - few[1] == 2 * (many[0] - few[0])


def test_a_product_of_an_operator_with_masses_everywhere_reads_nothing_of_its_results():
    kernel, mass = kernel_and_mass(is_padded=False)
    q, value = qattn.diffusion(kernel, mass=mass), torch.randn(50, 3)
    with Reads() as counter:
        q.apply(value)
    assert counter.count == 1  # on a CPU, whether any point is absent


def launches_and_waits(monkeypatch, method, max_iter, channels):
    """Kernels of our own that a diffusion launches, and how often the host waits."""
    allow_fake_cuda_tensors()
    operators = Mock()
    monkeypatch.setattr(device, "why_not_installed", lambda: None)
    monkeypatch.setitem(sys.modules, "qattn.tiles.gpu.operators", operators)  # which imports Triton
    monkeypatch.setattr(prepared, "kd_order", lambda points: torch.zeros(points.shape[:2], dtype=torch.int64))
    with ExitStack() as stack:
        for context in fake_cuda():
            stack.enter_context(context)
        points, value = torch.empty(500, 3, device="cuda"), torch.empty(500, channels, device="cuda")
        waits = stack.enter_context(Synchronizations())
        kernel = qattn.GaussianKernel(points, 0.3, method=method, backend="triton")
        qattn.diffuse(kernel, None, value, tol=0, solver=qattn.Solver(max_iter=max_iter))
        return len(operators.method_calls), waits.count


@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_our_own_kernels_wait_for_the_convergence_alone(monkeypatch, method):
    """Near tiles are found and walked over on the device: two launches a pass, and no wait besides that of Sinkhorn."""
    few, many = (launches_and_waits(monkeypatch, method, max_iter, 8) for max_iter in (3, 11))
    assert many[0] - few[0] == 8 * (2 if method == "tiles" else 1)
    assert many[1] - few[1] == 8


def test_points_are_measured_once_to_be_lifted(monkeypatch):
    """Tensor cores serve lse alone if the lift is exact enough, which is known after the first pass."""
    monkeypatch.setattr(tensor_cores, "MANY_PAIRS", 0)
    few, many = (launches_and_waits(monkeypatch, "exact", max_iter, 8) for max_iter in (3, 11))
    lifted = sys.modules["qattn.tiles.gpu.operators"].sum_lifted_blocks
    assert lifted.call_count == 10  # the last pass has values
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

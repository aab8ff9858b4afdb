"""The kernels of the `triton` backend, compiled for sm_80, their PTX emulated, against float64.

The whole of `qattn.tiles.device` runs, with the emulator in place of a launch: what is compiled is what is launched,
and tensor cores round as they do on a GPU. Small problems, as each takes seconds.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import ptx
import pytest
import torch
from cases import dense
from conftest import Held
from machine_code import Kernel, compiled
from own_kernels import TYPES, constants_of
from torch import Tensor

from qattn.attended import PairTerms
from qattn.lift import SPLIT_UNIT, extent
from qattn.tiles import device
from qattn.tiles.device import LIFTED_WEIGHT, Cutoff, DeviceTiling
from qattn.tiles.gpu import operators
from qattn.tiles.order import kd_order

EVIDENCE = "PTX of sm_80, emulated"


def emulate(kernel: Any, grid: tuple[int, ...], num_warps: int, *arguments: Any, **constants: Any) -> None:
    """Compile and emulate what `operators._launch` would launch."""
    known = constants_of(kernel, arguments, constants)
    built: Kernel = compiled(kernel, TYPES, known, 80, num_warps)
    given = [x for name, x in zip(kernel.arg_names, arguments, strict=False) if name not in known]
    passed = [_array(x) if isinstance(x, Tensor) else x for x in given]
    ptx.launch(ptx.Program.parse(built.ptx), grid, passed, built.shared)
    for x, array in zip(given, passed, strict=True):
        if isinstance(x, Tensor):
            x.copy_(torch.from_numpy(array).view(x.dtype))


def _array(x: Tensor) -> np.ndarray:
    """Return numbers as NumPy has them; bfloat16, which it has not, as its bits."""
    return np.ascontiguousarray((x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy())


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    torch.manual_seed(0)
    with mock.patch.object(operators, "_launch", emulate):
        yield


def gap(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference; equal infinities count as 0, and NaN as infinite."""
    difference = torch.where(got.double() == expected, 0, got.double() - expected)
    return float(difference.abs().nan_to_num(torch.inf).amax())


def test_lse(held: Held) -> None:
    """Two clouds, a key left out, and rows so far that their sums underflow."""
    query, key, bias = torch.randn(2, 100, 3), torch.randn(2, 70, 3), torch.randn(2, 70)
    query[1, 64:] += 20
    bias[:, ::5] = -torch.inf
    _, lse = device.attend(DeviceTiling(query), DeviceTiling(key), None, None, bias)
    _, expected = dense(query, key, None, bias)
    held("triton: lse", EVIDENCE, gap(lse[0], expected[0]), 1e-5)
    held("triton: lse of rows that underflow, relative", EVIDENCE, gap(lse[1] / expected[1], torch.ones(100)), 1e-6)


@pytest.mark.parametrize("sigma", [0.2, 0.05])
def test_lifted_lse(sigma, held: Held) -> None:
    """Exponents by tensor cores, with their rounding, of points of a sphere; a third of the keys absent."""
    points = torch.randn(1, 200, 3, dtype=torch.float64)
    points = (points / points.norm(dim=-1, keepdim=True) / sigma).float()
    bias = torch.where(torch.arange(200) % 3 == 0, -torch.inf, torch.randn(200))[None]
    cloud = DeviceTiling(points)
    _, lse = device.attend(cloud, cloud, None, None, bias, is_lifted=True)
    bound = extent(points, points, bias).rounding(SPLIT_UNIT)
    held(f"triton: lifted lse, σ = {sigma}", EVIDENCE, gap(lse, dense(points, points, None, bias)[1]), bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lifted_values(dtype, held: Held) -> None:
    """Exponents by tensor cores, and weights of 16 bits; a third of the keys absent."""
    points, value = torch.randn(1, 128, 3) * 3, torch.randn(1, 128, 8).to(dtype)
    value[..., 0] = 1.5
    bias = torch.where(torch.arange(128) % 3 == 0, -torch.inf, torch.randn(128))[None]
    cloud = DeviceTiling(points)
    out, lse = device.attend(cloud, cloud, None, value, bias, is_lifted=True)
    expected_out, expected_lse = dense(points, points, value, bias)
    bound = extent(points, points, bias).rounding(SPLIT_UNIT) + LIFTED_WEIGHT
    held("triton: lifted lse beside values / estimate", EVIDENCE, gap(lse, expected_lse) / bound, 1)
    assert out is not None
    name, unit = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
    sizes = dense(points, points, value.abs(), bias)[0]
    error = gap((out - expected_out) / sizes, torch.zeros(())) / (bound + unit)
    held(f"triton: lifted out, {name} values / estimate", EVIDENCE, error, 1)
    held("triton: lifted averages of a constant", EVIDENCE, gap(out[..., 0], torch.full((), 1.5)), 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values(dtype, held: Held) -> None:
    """Products by tensor cores keep float32: the weights and values in two parts, sums of blocks rounded to nearest."""
    query, key, value = torch.randn(1, 64, 3), torch.randn(1, 200, 3), torch.randn(1, 200, 8).to(dtype)
    with mock.patch.object(device, "_is_narrow", return_value=dtype == torch.float16):
        out, lse = device.attend(DeviceTiling(query), DeviceTiling(key), None, value.float(), None)
    expected_out, expected_lse = dense(query, key, value)
    held("triton: lse beside values", EVIDENCE, gap(lse, expected_lse), 1e-5)
    name = str(dtype).removeprefix("torch.")
    held(f"triton: out, {name} values", EVIDENCE, gap(out, expected_out), 3e-6)


def test_constants_are_kept(held: Held) -> None:
    """Averages of 1: the bias that truncation in tensor cores leaves."""
    points = torch.randn(1, 256, 3)
    out, _ = device.attend(DeviceTiling(points), DeviceTiling(points), None, torch.ones(1, 256, 1), None)
    held("triton: averages of a constant", EVIDENCE, gap(out, torch.ones(1, 256, 1)), 2e-6)


def test_sums_over_pairs(held: Held) -> None:
    query, key, bias = torch.randn(1, 70, 3), torch.randn(1, 64, 3), torch.randn(1, 64)
    clouds = DeviceTiling(query), DeviceTiling(key)
    _, lse = dense(query, key, None, bias)
    terms = PairTerms(torch.randn(1, 70, 5), torch.randn(1, 64, 5), lse.float(), by_column=True, num_values=4)
    (total, first, second), *columns = device.differentiate(*clouds, None, bias, terms)
    x = key.double()[:, None] - query.double()[:, :, None]
    weights = torch.exp(bias.double()[:, None] - 0.5 * x.square().sum(-1) - lse[..., None])
    s = weights * torch.einsum("bnc,bmc->bnm", terms.row.double(), terms.column.double())
    expected = (
        s.sum(-1), (s[..., None] * x).sum(2), (s * x.square().sum(-1)).sum(-1), s.sum(1), (s[..., None] * x).sum(1),
        torch.einsum("bnm,bnc->bmc", weights, terms.row.double())[..., :4],
    )  # fmt: skip
    for got, right in zip((total, first, second, *columns), expected, strict=True):
        held("triton: sums over pairs, relative", EVIDENCE, gap(got, right) / float(right.abs().amax()), 5e-6)


def test_tiles(held: Held) -> None:
    """Lists found by the compiled kernel, and walked over by the other."""
    points, bias, sigma = torch.rand(1, 640, 3), torch.randn(1, 640), torch.tensor([0.05])
    cloud, widths = DeviceTiling(points, kd_order(points)), {}
    _, lse = device.attend(cloud, cloud, sigma, None, bias, Cutoff(1e-4, widths))
    near = device._near_tiles(cloud, cloud, device._scale(cloud, sigma), bias, bias, Cutoff(1e-4, widths))
    assert 0 < float(near.counts.float().mean()) < 0.9 * cloud.tiles
    _, expected = dense(points / 0.05, points / 0.05, None, bias)
    held("triton: tiles, lse / tol", EVIDENCE, gap(lse, expected) / 1e-4, 1.0)

"""Estimates of what lifted scores lose to rounding, against the arithmetic of each kernel emulated in NumPy."""

import numpy as np
import pytest
import torch
from cases import ball, dense, slow
from torch._subclasses.fake_tensor import FakeTensorMode

from qattn.attention.dispatch import BACKENDS
from qattn.attention.dot_product import DotProductBackend
from qattn.attention.inputs import Inputs
from qattn.lift import Extent, extent, lift, split_lift

SIGMAS = [slow(0.2), 0.1, slow(0.05), slow(0.02)]
ROWS = 256  # whose sums are emulated


def unit(monkeypatch, name, *, capability=(8, 0), dtype=torch.float32, value_dtype=None, device="cuda"):
    """The unit roundoff that a backend states on a pretended device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with FakeTensorMode():
        points = torch.zeros(1, 8, 3, dtype=dtype, device=device)
        value = None if value_dtype is None else torch.zeros(1, 8, 4, dtype=value_dtype, device=device)
        return BACKENDS[name].unit_roundoff(Inputs(points, points, value))


def truncated(x, bits):
    """x toward zero, with `bits` bits behind the leading one of the largest of its last axis."""
    step = np.ldexp(1.0, np.frexp(np.abs(x).max(-1, keepdims=True))[1] - 1 - bits)
    return np.trunc(x / step) * step


def summed(query, key, group):
    """q · k as tensor cores add: `group` products and the sum so far, aligned to the largest, truncated to 24 bits."""
    result = np.zeros((len(query), len(key), 1))
    for first in range(0, query.shape[1], group):
        columns = slice(first, first + group)
        terms = np.concatenate([query[:, None, columns] * key[None, :, columns], result], axis=-1)
        result = truncated(truncated(terms, 23).sum(-1, keepdims=True), 23)
    return result[..., 0]


def parts_of_tf32(x):
    """float32 as CUTLASS splits it: a big part cut off after 10 explicit bits, a small one rounded to as many."""
    mask = np.uint32(0xFFFFE000)
    big = (x.view(np.uint32) & mask).view(np.float32)
    small = (((x - big).view(np.uint32) + np.uint32(0x1000)) & mask).view(np.float32)
    return big.astype(np.float64), small.astype(np.float64)


def lse_error(scores, lifted, points):
    lse = torch.from_numpy(scores).logsumexp(-1) + lifted.row[0, :ROWS].double()
    return float((lse - dense(points[0, :ROWS], points[0])[1]).abs().max())


def check(error, points, unit_roundoff):
    """A bound, and not a useless one."""
    estimate = extent(points, points, None).rounding(unit_roundoff)
    assert error <= estimate <= 20 * error


@pytest.mark.parametrize("accumulate", ["float64", "tensor cores"])
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("name", ["sdpa", "xformers"])
def test_float32_on_tensor_cores_is_three_products_of_tf32(monkeypatch, name, sigma, accumulate):
    points = (ball(2000) / sigma).float()[None]
    lifted = lift(points, points, None)
    (query, query_rest), (key, key_rest) = (parts_of_tf32(x.numpy()) for x in (lifted.query[0, :ROWS], lifted.key[0]))
    columns = np.hstack([query_rest, query, query]), np.hstack([key, key_rest, key])
    scores = columns[0] @ columns[1].T if accumulate == "float64" else summed(*columns, group=4)
    check(lse_error(scores, lifted, points), points, unit(monkeypatch, name))


@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("name", ["flash_attn", "sdpa", "xformers"])
def test_split_lifts_on_tensor_cores(monkeypatch, name, sigma, dtype):
    points = (ball(2000) / sigma).float()[None]
    lifted = split_lift(points, points, None, dtype)
    scores = summed(lifted.query[0, :ROWS].double().numpy(), lifted.key[0].double().numpy(), group=8)
    check(lse_error(scores, lifted, points), points, unit(monkeypatch, name, value_dtype=torch.float16))


@pytest.mark.parametrize("sigma", SIGMAS)
def test_float32_on_a_cpu(monkeypatch, sigma):
    points = (ball(2000) / sigma).float()[None]
    inputs = Inputs(points, points, None)
    error = float((BACKENDS["sdpa"].attend(inputs).lse - dense(points, points)[1]).abs().max())
    check(error, points, unit(monkeypatch, "sdpa", device="cpu"))


def test_units_by_device_and_dtype(monkeypatch):
    """Tensor cores take float32 from compute capability 8.0 on; before, and on a CPU, products are of 24 bits."""
    for name in ("sdpa", "xformers"):
        old, new = (unit(monkeypatch, name, capability=capability) for capability in ((7, 5), (8, 0)))
        assert old == 2.0**-23
        assert new == unit(monkeypatch, name, capability=(9, 0)) == 2.0**-20
    assert unit(monkeypatch, "sdpa", capability=(7, 5), dtype=torch.float16) == 2.0**-23  # it has no 16-bit kernel
    assert unit(monkeypatch, "sdpa", dtype=torch.float16) == unit(monkeypatch, "flash_attn") == 2.0**-22
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pytest.fail("asked without a GPU"))
    points = torch.zeros(1, 8, 3, dtype=torch.float64)
    inputs = Inputs(points, points, None)
    assert BACKENDS["sdpa"].unit_roundoff(inputs) == 2.0**-52


@pytest.mark.parametrize("name", [name for name, one in BACKENDS.items() if isinstance(one, DotProductBackend)])
def test_tolerances_are_what_the_estimates_allow(monkeypatch, name):
    """The cloud is within ten bandwidths of its center, with biases of a few units."""
    size = Extent(10.0, 10.0, 5.0)
    estimate = size.rounding(unit(monkeypatch, name))
    assert estimate <= BACKENDS[name].tolerance[torch.float32] <= 2 * estimate


def test_small_bandwidths_are_refused_where_tf32_would_miss_the_tolerance(monkeypatch):
    """σ = 0.02 on the unit ball loses 1.4e-3 of lse in 3×TF32, and 3e-4 in float32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with FakeTensorMode():
        points = torch.zeros(1, 8, 3, device="cuda")
        inputs = Inputs(points, points, None)
        inputs.__dict__["extent"] = Extent(50.0, 50.0, 0.0)
        [reason] = BACKENDS["sdpa"].not_supported_reasons(inputs)
        assert "lifting would lose about 4.8e-03 of lse to cancellation" in reason
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        assert BACKENDS["sdpa"].not_supported_reasons(inputs) == []

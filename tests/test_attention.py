"""Every backend against the dense float64 answer, and the inputs that break careless ones."""

import math

import pytest
import torch
from cases import CASES, DTYPES, dense, make, slow, sphere

from qattn import attend
from qattn.attention import sdpa
from qattn.attention.dispatch import BACKENDS
from qattn.attention.inputs import Inputs
from qattn.attention.score import gaussian

CPU = ["native", "sdpa", "reference"]
FLEX_CASES = [CASES[0], CASES[1], CASES[6]]  # each shape compiles for seconds


def check(arguments, backend, tolerance, **options):
    out, lse = attend(**arguments, backend=backend, **options)
    expected_out, expected_lse = dense(**arguments)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tolerance)
    if arguments["value"] is None:
        assert out is None
    else:
        assert out.dtype == arguments["value"].dtype
        torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=3 * tolerance)  # values reach 3
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", CPU)
def test_backend_agrees_with_dense_float64(backend, dtype, case):
    check(make(case, dtype), backend, BACKENDS[backend].tolerance[dtype])


@pytest.mark.slow
@pytest.mark.xdist_group("flex")
@pytest.mark.parametrize("case", FLEX_CASES, ids=str)
def test_flex_agrees_with_dense_float64(case):
    check(make(case, torch.float32), "flex", BACKENDS["flex"].tolerance[torch.float32])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_public_sdpa_with_a_sink_agrees_with_dense_float64(case):
    """The path of devices without an lse, run on the CPU."""
    tensors = make(case, torch.float32)
    batch = torch.Size((math.prod(case.batch),))
    flat = {n: None if t is None else t.reshape(*batch, *t.shape[len(case.batch) :]) for n, t in tensors.items()}
    out, lse = sdpa._public(Inputs(**flat, score=gaussian, tol=1e-3, batch=batch))
    expected_out, expected_lse = dense(**flat)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)
    if out is not None:
        torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=3e-4)


def test_auto_takes_any_dtype_and_mixed_values():
    points = torch.randn(40, 3)
    for dtype in DTYPES:
        out, lse = attend(points, points, points.to(dtype))
        assert out.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("backend", CPU)
def test_far_keys_give_the_right_lse(backend):
    """Scores of −1e4 and below underflow exp in every precision, the lse does not."""
    query, key, value = sphere(50), sphere(60) + 150.0, torch.randn(60, 2, dtype=torch.float64)
    out, lse = attend(query, key, value, backend=backend)
    expected_out, expected_lse = dense(query, key, value)
    assert expected_lse.max() < -1e4
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=0)
    torch.testing.assert_close(out, expected_out, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_far_keys_in_float32(backend):
    query, key = sphere(50).float(), (sphere(60) + 150.0).float()
    _, lse = attend(query, key, backend=backend)
    torch.testing.assert_close(lse.double(), dense(query, key)[1], rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", CPU)
def test_biases_over_sixty_decades(backend, dtype):
    query, key, value = sphere(80), 5 * sphere(90), torch.randn(90, 3, dtype=torch.float64)
    bias = torch.linspace(math.log(1e-30), math.log(1e30), 90, dtype=torch.float64)[torch.randperm(90)]
    arguments = {"query": query, "key": key, "value": value, "bias": bias}
    arguments = {name: tensor.to(dtype) for name, tensor in arguments.items()}
    check(arguments, backend, {torch.float32: 1e-4, torch.float64: 1e-11}[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", CPU)
def test_rows_that_see_only_small_biases(backend, dtype):
    """Two clouds far apart, one with weights e^-69 and one with e^69: every row needs its own scale."""
    key = torch.cat([sphere(40), sphere(40) + 30.0]).to(dtype)
    bias = torch.cat([torch.full((40,), -69.0), torch.full((40,), 69.0)]).to(dtype)
    arguments = {"query": key, "key": key, "value": torch.randn(80, 2, dtype=dtype), "bias": bias}
    check(arguments, backend, {torch.float32: 1e-3, torch.float64: 1e-11}[dtype])


@pytest.mark.parametrize("backend", CPU)
def test_absent_keys_do_not_count(backend):
    query, key, value = torch.randn(50, 3), torch.randn(70, 3), torch.randn(70, 4)
    bias = torch.randn(70)
    present = torch.rand(70) < 0.5
    masked = attend(query, key, value, bias=torch.where(present, bias, -torch.inf), backend=backend)
    dropped = attend(query, key[present], value[present], bias=bias[present], backend=backend)
    torch.testing.assert_close(masked, dropped, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [None, torch.randn(2, 30, 4)], ids=["lse", "values"])
@pytest.mark.parametrize("backend", CPU)
def test_all_keys_absent(backend, value):
    """The keys of one of two clouds are absent; no NaN anywhere."""
    points, bias = torch.randn(2, 30, 3), torch.zeros(2, 30)
    bias[1] = -torch.inf
    out, lse = attend(points, points, value, bias=bias, backend=backend)
    assert lse[0].isfinite().all()
    assert (lse[1] == -torch.inf).all()
    if value is not None:
        assert out[0].isfinite().all()
        assert (out[1] == 0).all()


@pytest.mark.slow
@pytest.mark.xdist_group("flex")
def test_flex_with_absent_far_and_heavy_keys():
    """One shape for all of flex's hard inputs."""
    tensors = make(CASES[0], torch.float32)
    tensors["bias"][:50] = -torch.inf
    check(tensors, "flex", 1e-5)
    tensors["key"] += 60.0
    out, lse = attend(**tensors, backend="flex")
    expected_out, expected_lse = dense(**tensors)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2e-3)
    tensors["bias"] = torch.full((100,), -torch.inf)
    out, lse = attend(**tensors, backend="flex")
    assert (lse == -torch.inf).all()
    assert (out == 0).all()


def exponential(query, key):
    """−‖q − k‖."""
    square = sum((q - k) ** 2 for q, k in zip(query, key, strict=True))
    return -torch.sqrt(square + 1e-20)


@pytest.mark.xdist_group("flex")
@pytest.mark.parametrize("backend", ["reference", slow("flex")])
def test_another_score(backend):
    query, key, value = torch.randn(100, 3), torch.randn(100, 3), torch.randn(100, 4)
    out, lse = attend(query, key, value, score=exponential, backend=backend)
    scores = -torch.cdist(query.double(), key.double())
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ value.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", CPU)
def test_batches_broadcast(backend):
    query, key, value, bias = torch.randn(5, 1, 20, 3), torch.randn(4, 30, 3), torch.randn(30, 2), torch.randn(5, 1, 30)
    out, lse = attend(query, key, value, bias=bias, backend=backend)
    assert out.shape == (5, 4, 20, 2)
    assert lse.shape == (5, 4, 20)
    alone = attend(query[2, 0], key[3], value, bias=bias[2, 0], backend=backend)
    torch.testing.assert_close(out[2, 3], alone.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[2, 3], alone.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", CPU)
def test_strided_and_expanded_input(backend):
    wide = torch.randn(60, 2, 3)
    query, key = wide[:, 0], torch.randn(3, 50).T
    value, bias = torch.randn(1, 2).expand(50, 2), torch.randn(1).expand(50)
    strided = attend(query, key, value, bias=bias, backend=backend)
    contiguous = attend(*(t.contiguous() for t in (query, key, value)), bias=bias.contiguous(), backend=backend)
    torch.testing.assert_close(strided, contiguous, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", CPU)
def test_empty_sides(backend):
    points, value = torch.randn(10, 3), torch.randn(10, 2)
    out, lse = attend(points[:0], points, value, backend=backend)
    assert out.shape == (0, 2)
    assert lse.shape == (0,)
    out, lse = attend(points, points[:0], value[:0], backend=backend)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    out, lse = attend(points, points, value[:, :0], backend=backend)
    assert out.shape == (10, 0)
    assert lse.isfinite().all()
    out, lse = attend(points.expand(0, 10, 3), points, backend=backend)
    assert lse.shape == (0, 10)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_more_than_65536_rows(backend):
    n = 65_536 + 7
    query, key, value = 3 * torch.randn(n, 2), 3 * torch.randn(50, 2), torch.randn(50, 2)
    out, lse = attend(query, key, value, backend=backend)
    expected_out, expected_lse = dense(query, key, value)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=1e-3)
    out, lse = attend(key, query, query, backend=backend)
    expected_out, expected_lse = dense(key, query, query)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", CPU)
def test_translation_changes_nothing(backend):
    """Lifted and scaled coordinates lose no digits to an offset that float32 itself can hold."""
    points = (torch.randn(200, 3) * 1024).round() / 1024
    moved = points + 64.0
    assert torch.equal(moved - 64.0, points)
    here, there = (attend(p / 0.125, p / 0.125, points, backend=backend) for p in (points, moved))
    torch.testing.assert_close(here, there, rtol=0, atol=5e-4)


@pytest.mark.parametrize("backend", CPU)
def test_permutation_and_repetition(backend):
    query, key, value, bias = torch.randn(90, 3), torch.randn(100, 3), torch.randn(100, 2), torch.randn(100)
    order = torch.randperm(100)
    first = attend(query, key, value, bias=bias, backend=backend)
    second = attend(query, key[order], value[order], bias=bias[order], backend=backend)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    again = attend(query, key, value, bias=bias, backend=backend)
    torch.testing.assert_close(first, again, rtol=0, atol=0)

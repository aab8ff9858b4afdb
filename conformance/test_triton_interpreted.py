"""The kernels of the `triton` backend, interpreted on a CPU (TRITON_INTERPRET=1), against dense float64 and `native`.

What this shows without a GPU: that the source of the kernels computes what it should, in float32, for all shapes, lists
of tiles and hard inputs. What it does not: the compiler, and the rounding of tensor cores (test_triton_compiled.py).
"""

import itertools
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import CASES, ball, dense, make, sphere
from conftest import Held
from interpreter import products_of_bfloat16  # noqa: F401  (a fixture)
from torch import Tensor

import qattn
from qattn.attended import PairTerms
from qattn.attention import inputs as inputs_of_attention
from qattn.attention import tensor_cores
from qattn.attention.dispatch import BACKENDS
from qattn.attention.inputs import Inputs
from qattn.attention.tensor_cores import is_lift_exact
from qattn.attention.triton import Triton
from qattn.kernels.gaussian import calibration
from qattn.lift import SPLIT_UNIT, extent
from qattn.tiles import device
from qattn.tiles.device import LIFTED_WEIGHT, Cutoff, DeviceTiling
from qattn.tiles.gpu import operators
from qattn.tiles.order import kd_order
from qattn.tiles.sizes import TILE

ATTEND, BACKWARD, TILES = "triton: attend", "triton: backward", "triton: tiles"
INTERPRETED = "interpreted"
TOLERANCE = Triton.tolerance


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def gap(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference; equal infinities count as 0, and NaN as infinite."""
    difference = torch.where(got.double() == expected, 0, got.double() - expected)
    return float(difference.abs().nan_to_num(torch.inf).amax()) if difference.numel() else 0.0


def attend(**arguments: Tensor | None) -> qattn.attended.Attended:
    return qattn.attend(**arguments, backend="triton")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.D <= device.DIMENSIONS], ids=str)
def test_attention(case, dtype, held: Held) -> None:
    arguments = make(case, dtype)
    out, lse = attend(**arguments)
    expected_out, expected_lse = dense(**arguments)
    name = str(dtype).removeprefix("torch.")
    held(f"{ATTEND}, lse, {name}", INTERPRETED, gap(lse, expected_lse), TOLERANCE[torch.float32])
    if out is not None:
        assert out.dtype == dtype
        held(f"{ATTEND}, out, {name}", INTERPRETED, gap(out, expected_out), TOLERANCE[dtype])


@pytest.mark.parametrize("D", range(1, device.DIMENSIONS + 1))
@pytest.mark.parametrize("C", [None, 9])
def test_every_dimension(D, C, held: Held) -> None:
    key = torch.randn(150, D)
    arguments = {"query": torch.randn(70, D), "key": key, "value": None if C is None else torch.randn(150, C)}
    out, lse = attend(**arguments)
    expected_out, expected_lse = dense(**arguments)
    held(f"{ATTEND}, lse, float32", INTERPRETED, gap(lse, expected_lse), 1e-5)
    if out is not None:
        held(f"{ATTEND}, out, float32", INTERPRETED, gap(out, expected_out), 1e-5)


@pytest.mark.parametrize("C", [1, 7, 8, 9, 31, 33, 70])
def test_any_number_of_channels(C, held: Held) -> None:
    arguments = {"query": torch.randn(2, 65, 3), "key": torch.randn(2, 130, 3), "value": torch.randn(2, 130, C)}
    out, _ = attend(**arguments)
    held(f"{ATTEND}, out, float32", INTERPRETED, gap(out, dense(**arguments)[0]), 1e-5)


def test_float32_points_with_16_bit_values(held: Held) -> None:
    """The weights keep 22 bits: what is left is the rounding of the result."""
    query, value = torch.randn(100, 3), torch.randn(100, 5)
    for dtype in (torch.float16, torch.bfloat16):
        out, lse = attend(query=query, key=query, value=value.to(dtype))
        expected_out, expected_lse = dense(query, query, value.to(dtype))
        held(f"{ATTEND}, lse, float32", INTERPRETED, gap(lse, expected_lse), 1e-5)
        held(f"{ATTEND}, out, 16-bit values", INTERPRETED, gap(out, expected_out.to(dtype).double()), 2**-9)


def test_rows_far_from_all_keys(held: Held) -> None:
    """Every exp underflows relative to the largest bias; they are computed again, relative to their own maximum."""
    key, value = torch.randn(200, 3), torch.randn(200, 4)
    query = torch.cat([torch.randn(60, 3), torch.randn(70, 3) + 30, torch.randn(3, 3) + 300])
    out, lse = attend(query=query, key=key, value=value)
    expected_out, expected_lse = dense(query, key, value)
    _, alone = attend(query=query, key=key)
    for found in (lse, alone):
        held("triton: rows that underflow, lse relative", INTERPRETED, gap(found / expected_lse, torch.ones(133)), 1e-6)
    held("triton: rows that underflow, out", INTERPRETED, gap(out[:130], expected_out[:130]), 1e-5)


def test_biases_over_sixty_decades(held: Held) -> None:
    """A row that sees only keys of tiny weight is as exact as one that sees heavy ones."""
    query = torch.cat([torch.randn(80, 2), torch.randn(80, 2) + 40])
    bias = torch.cat([torch.full((80,), 70.0), torch.full((80,), -70.0)]) + torch.randn(160)
    value = torch.randn(160, 3)
    out, lse = attend(query=query, key=query, value=value, bias=bias)
    expected_out, expected_lse = dense(query, query, value, bias)
    held("triton: biases over sixty decades, lse", INTERPRETED, gap(lse, expected_lse), 2e-5)
    held("triton: biases over sixty decades, out", INTERPRETED, gap(out, expected_out), 2e-5)


def test_absent_keys(held: Held) -> None:
    query, value = torch.randn(3, 90, 3), torch.randn(3, 90, 2)
    bias = torch.randn(3, 90)
    bias[0, ::2] = -torch.inf
    bias[1] = -torch.inf
    bias[2, :89] = -torch.inf
    out, lse = attend(query=query, key=query, value=value, bias=bias)
    expected_out, expected_lse = dense(query, query, value, bias)
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()
    held("triton: absent keys, lse", INTERPRETED, gap(lse, expected_lse), 1e-5)
    held("triton: absent keys, out", INTERPRETED, gap(out, expected_out), 1e-5)


def test_far_from_the_origin(held: Held) -> None:
    """Differences are taken first, so a cloud at 1e5 loses nothing but what its coordinates have lost."""
    points, value = (torch.rand(150, 3) * 5 + 1e5), torch.randn(150, 2)
    q = qattn.GaussianKernel(points, 0.3, method="exact", backend="triton")
    out, lse = q.attend(torch.zeros(150), value)
    expected_out, expected_lse = dense(points.double() / 0.3, points.double() / 0.3, value)
    held("triton: a cloud at 1e5, lse", INTERPRETED, gap(lse, expected_lse), 1e-5)
    held("triton: a cloud at 1e5, out", INTERPRETED, gap(out, expected_out), 1e-5)


def lifted_lse(query: Tensor, key: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return device.attend(DeviceTiling(query), DeviceTiling(key), None, None, bias, is_lifted=True, **options).lse


@pytest.mark.parametrize("D", range(1, 8))
def test_lifted_lse(D, held: Held) -> None:
    """Two clouds of ragged sizes far from the origin, a third of the keys absent."""
    query, key, bias = 3 * torch.randn(2, 70, D), 3 * torch.randn(2, 150, D) + 1, torch.randn(2, 150)
    bias[:, ::3] = -torch.inf
    expected = dense(query, key, None, bias)[1]
    bound = extent(query, key, bias).rounding(SPLIT_UNIT)
    held(
        "triton: lifted lse / estimate", INTERPRETED, gap(lifted_lse(query + 1e2, key + 1e2, bias), expected) / bound, 2
    )


def test_lifted_rows_that_underflow_are_computed_from_differences(held: Held) -> None:
    query, key = torch.randn(1, 100, 3), torch.randn(1, 70, 3)
    query[:, 64:] += 20
    bias = torch.where(torch.arange(70) % 5 == 0, -torch.inf, torch.randn(70))[None]
    lse, expected = lifted_lse(query, key, bias), dense(query, key, None, bias)[1]
    held(
        "triton: lifted lse, rows that underflow, relative", INTERPRETED, gap(lse / expected, torch.ones(1, 100)), 1e-5
    )
    assert (lifted_lse(query, key, torch.full((1, 70), -torch.inf)) == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "C"), [(3, 1), (1, 8), (2, 33), (3, 70), (7, 9)])
def test_lifted_values(D, C, dtype, held: Held) -> None:
    """Clouds of ragged sizes far from the origin, a third of the keys absent, masses over ten decades."""
    query, key, value = torch.randn(2, 70, D), torch.randn(2, 150, D), torch.randn(2, 150, C).to(dtype)
    bias = 10 * math.log(10) * (torch.rand(2, 150) - 1)
    bias[:, ::3] = -torch.inf
    clouds = DeviceTiling(query + 1e2), DeviceTiling(key + 1e2)
    out, lse = device.attend(*clouds, None, value, bias, is_lifted=True)
    expected_out, expected_lse = dense(query + 1e2, key + 1e2, value, bias)
    bound = extent(query, key, bias).rounding(SPLIT_UNIT) + LIFTED_WEIGHT
    held("triton: lifted lse beside values / estimate", INTERPRETED, gap(lse, expected_lse) / bound, 1)
    assert out is not None
    assert out.dtype == dtype
    sizes = dense(query + 1e2, key + 1e2, value.abs(), bias)[0]
    name, unit = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
    error = gap((out - expected_out) / sizes, torch.zeros(())) / (bound + unit)
    held(f"triton: lifted out, {name} values / estimate", INTERPRETED, error, 1)


def test_lifted_averages_are_relatively_exact(held: Held) -> None:
    """Values over thirty decades: an average of small ones does not see the large ones far away. Constants stay."""
    points = torch.linspace(0, 30, 200)[None, :, None].expand(-1, -1, 3)
    value = torch.stack([torch.exp2(-3 * points[..., 0]), torch.full((1, 200), 1.1)], dim=-1)
    cloud = DeviceTiling(points)
    out, _ = device.attend(cloud, cloud, torch.tensor([0.7]), value, None, is_lifted=True)
    expected, _ = dense(points / 0.7, points / 0.7, value)
    assert out is not None
    bound = extent(points / 0.7, points / 0.7, None).rounding(SPLIT_UNIT) + LIFTED_WEIGHT
    error = gap(out[..., 0] / expected[..., 0], torch.ones(())) / bound
    held("triton: lifted averages of values over decades, relative / estimate", INTERPRETED, error, 1)
    held("triton: lifted averages of a constant", INTERPRETED, gap(out[..., 1], torch.full((), 1.1)), 1e-6)


def test_lifted_values_of_rows_that_underflow(held: Held) -> None:
    query, key, value = torch.randn(1, 100, 3), torch.randn(1, 70, 3), torch.randn(1, 70, 5)
    query[:, 64:] += 20
    bias = torch.where(torch.arange(70) % 5 == 0, -torch.inf, torch.randn(70))[None]
    out, lse = device.attend(DeviceTiling(query), DeviceTiling(key), None, value, bias, is_lifted=True)
    expected_out, expected_lse = dense(query, key, value, bias)
    error = gap(lse / expected_lse, torch.ones(1, 100))
    held("triton: lifted lse beside values, rows that underflow, relative", INTERPRETED, error, 1e-5)
    held("triton: lifted out, rows that underflow", INTERPRETED, gap(out, expected_out), 1e-4)
    absent = torch.full((1, 70), -torch.inf)
    out, lse = device.attend(DeviceTiling(query), DeviceTiling(key), None, value, absent, is_lifted=True)
    assert (lse == -torch.inf).all()
    assert (out == 0).all()


def test_lifted_values_over_lists(held: Held) -> None:
    points, value, tol = torch.rand(1, 640, 3) / 0.05, torch.randn(1, 640, 3), 1e-3
    cloud, widths = sorted_cloud(points), {}
    for _ in range(2):  # then with a list that is longer than its memory
        out, lse = device.attend(cloud, cloud, None, value, None, Cutoff(tol, widths), is_lifted=True)
        expected_out, expected_lse = dense(points, points, value)
        bound = tol + extent(points, points, None).rounding(SPLIT_UNIT) + LIFTED_WEIGHT
        held(f"{TILES}, lifted lse beside values / bound", INTERPRETED, gap(lse, expected_lse) / bound, 1)
        sizes = dense(points, points, value.abs())[0]
        error = gap((out - expected_out) / sizes, torch.zeros(())) / bound
        held(f"{TILES}, lifted out / bound", INTERPRETED, error, 1)
        widths[cloud] = 1


def test_lifted_lse_over_lists(held: Held) -> None:
    points, tol = torch.rand(1, 640, 3) / 0.05, 1e-4
    cloud = sorted_cloud(points)
    lse = device.attend(cloud, cloud, None, None, None, Cutoff(tol, {}), is_lifted=True).lse
    bound = tol + extent(points, points, None).rounding(SPLIT_UNIT)
    held(f"{TILES}, lifted lse / bound", INTERPRETED, gap(lse, dense(points, points)[1]) / bound, 1)


@pytest.mark.parametrize(("sigma", "is_lifted"), [(0.1, True), (0.005, False)])
def test_many_pairs_are_lifted_where_that_is_exact_enough(sigma, is_lifted, held: Held, monkeypatch) -> None:
    monkeypatch.setattr(tensor_cores, "MANY_PAIRS", 0)
    attended = Mock(wraps=device.attend)
    monkeypatch.setattr(device, "attend", attended)
    points = (ball(300) / sigma).float()
    lse = attend(query=points, key=points).lse
    assert attended.call_args.kwargs == {"is_lifted": is_lifted}
    held("triton: lse, lifted or not / tol", INTERPRETED, gap(lse, dense(points, points)[1]) / 1e-3, 1)
    attend(query=points, key=points, value=points)
    assert attended.call_args.kwargs == {"is_lifted": is_lifted}


def test_a_lift_holds_its_biases() -> None:
    """Biases relative to the largest one fit into float16, or the points are not lifted, however large `tol` is."""
    points = torch.rand(1, 100, 3)
    for size, is_lifted in ((1e4, True), (2.9e4, False)):
        bias = size * torch.linspace(-1, 1, 100)[None]
        assert is_lift_exact(Inputs(points, points, None, bias, tol=0.1), 2**30) == is_lifted
        if is_lifted:
            assert gap(lifted_lse(points, points, bias), dense(points, points, None, bias)[1]) < 1e-2


def test_values_without_channels(held: Held) -> None:
    arguments = {"query": torch.randn(2, 65, 3), "key": torch.randn(2, 70, 3), "value": torch.empty(2, 70, 0)}
    out, lse = attend(**arguments)
    assert out.shape == (2, 65, 0)
    held(f"{ATTEND}, lse, float32", INTERPRETED, gap(lse, dense(**arguments)[1]), 1e-5)


def test_reasons_against_inputs() -> None:
    def reasons(**changes: Tensor) -> list[str]:
        given = {"query": torch.zeros(1, 5, 3), "key": torch.zeros(1, 5, 3)} | changes
        return Triton().not_supported_reasons(Inputs(**given))  # type: ignore[arg-type]

    wide = torch.zeros(1, 5, 17)
    assert reasons() == []
    assert reasons(query=wide, key=wide) == ["17 dimensions (takes up to 16)"]
    assert reasons(query=torch.zeros(1, 5, 3).double()) == ["float64 (takes float32, float16, bfloat16)"]
    assert reasons(value=torch.zeros(1, 5, 3).double()) == ["float64 (takes float32, float16, bfloat16)"]


def dense_pair_sums(inputs: Inputs, terms: PairTerms) -> tuple[Tensor, ...]:
    """Return all sums in float64: totals, first and second of rows, totals and first of columns, values."""
    query, key, sigma = inputs.query.double(), inputs.key.double(), inputs.sigma.double()[:, None, None]
    x = key[:, None] - query[:, :, None]  # (B, N, M, D)
    scores = inputs.biases.double()[:, None] - 0.5 * x.square().sum(-1) / sigma**2
    weights = torch.exp(scores - terms.shift.double()[..., None])
    s = weights * torch.einsum("bnc,bmc->bnm", terms.row.double(), terms.column.double())
    return (
        s.sum(-1),
        (s[..., None] * x).sum(2),
        (s * x.square().sum(-1)).sum(-1),
        s.sum(1),
        (s[..., None] * x).sum(1),
        torch.einsum("bnm,bnc->bmc", weights, terms.row.double())[..., : terms.num_values],
    )


@pytest.mark.parametrize(("D", "C"), [(1, 1), (3, 9), (3, 17), (5, 40), (16, 2)])
def test_sums_over_pairs(D, C, held: Held) -> None:
    """All sums of the fused backward, with absent keys and a row without any key."""
    query, key, bias = torch.randn(2, 100, D), torch.randn(2, 70, D), torch.randn(2, 70)
    bias[:, ::7] = -torch.inf
    inputs = Inputs(query, key, None, bias, torch.tensor([0.7, 1.5]) * math.sqrt(D))
    _, lse = Triton().attend(inputs)
    lse[:, 3] = torch.inf  # as for rows without keys
    terms = PairTerms(torch.randn(2, 100, C), torch.randn(2, 70, C), lse, by_column=True, num_values=max(0, C - 1))
    (total, first, second), column_total, column_first, values = Triton().pair_sums(inputs, terms)
    assert (values is None) == (C == 1)
    found = (total, first, second, column_total, column_first, *([] if values is None else [values]))
    for got, expected in zip(found, dense_pair_sums(inputs, terms), strict=False):
        held("triton: sums over pairs, relative", INTERPRETED, gap(got, expected) / float(expected.abs().amax()), 2e-6)


NAMES = ("query", "key", "value", "bias")


@pytest.mark.parametrize("needs", [n for c in (1, 2, 4) for n in itertools.combinations(NAMES, c)], ids="-".join)
def test_gradients(needs, held: Held) -> None:
    tensors = [torch.randn(2, 70, 3), torch.randn(2, 90, 3), torch.randn(2, 90, 4), torch.randn(2, 90)]
    tensors[3][:, :2] = -torch.inf
    grads = torch.randn(2, 70, 4), torch.randn(2, 70)

    def gradients(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = {name: x.to(dtype).requires_grad_(name in needs) for name, x in zip(NAMES, tensors, strict=True)}
        results = qattn.attend(**leaves, backend=backend)
        return torch.autograd.grad(results, [leaves[name] for name in needs], [g.to(dtype) for g in grads])

    pairs = zip(gradients("triton", torch.float32), gradients("reference", torch.float64), strict=True)
    for got, expected in pairs:
        held(f"{BACKWARD}, relative", INTERPRETED, gap(got, expected) / float(expected.abs().amax()), 1e-5)


@pytest.mark.parametrize("N", [64, 128, 100])
def test_transposed_tensors(N, held: Held) -> None:
    """Kernels know no strides. Clouds that fill their tiles are not padded, so that padding copies nothing."""

    def transposed(*shape: int) -> Tensor:
        return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))

    tensors = transposed(2, N, 3), transposed(2, N, 3), transposed(2, N, 4), transposed(2, N)
    cotangents = transposed(2, N, 4), transposed(2, N)

    def results(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        assert not any(x.is_contiguous() for x in leaves)
        out, lse = qattn.attend(*leaves[:3], bias=leaves[3], backend=backend)
        gradients = torch.autograd.grad((out, lse), leaves, [g.to(dtype) for g in cotangents])
        return [out.detach(), lse.detach(), *gradients]

    names = "out", "lse", *(f"by {name}" for name in NAMES)
    found, exact = results("triton", torch.float32), results("reference", torch.float64)
    for name, got, expected in zip(names, found, exact, strict=True):
        error = gap(got, expected) / float(expected.abs().amax())
        held(f"triton: transposed tensors, {name}, relative", INTERPRETED, error, 1e-5)


@pytest.mark.parametrize("N", [64, 128])
def test_transposed_tensors_by_tensor_cores_and_tiles(N, held: Held) -> None:
    query, key = (torch.randn(3, N, 2).permute(2, 1, 0) for _ in range(2))
    sigma = (torch.rand(4) + 0.5)[::2]
    value, bias = torch.randn(4, N, 2).permute(2, 1, 0), torch.randn(N, 2).T
    clouds = DeviceTiling(query), DeviceTiling(key)
    scaled = [x.double() / sigma.double()[:, None, None] for x in (query, key)]
    expected_out, expected_lse = dense(*scaled, value, bias)
    for cutoff, is_lifted in ((None, True), (Cutoff(1e-6, {}), False), (Cutoff(1e-6, {}), True)):
        out, lse = device.attend(*clouds, sigma, value, bias, cutoff, is_lifted)
        alone = device.attend(*clouds, sigma, None, bias, cutoff, is_lifted).lse
        bound = 1e-5 + is_lifted * (extent(*scaled, bias).rounding(SPLIT_UNIT) + LIFTED_WEIGHT)
        for got, expected in ((out, expected_out), (lse, expected_lse), (alone, expected_lse)):
            held("triton: transposed tensors, lifted or by tiles / bound", INTERPRETED, gap(got, expected) / bound, 1)


def sorted_cloud(points: Tensor) -> DeviceTiling:
    return DeviceTiling(points, kd_order(points))


@pytest.mark.parametrize("decades", [0, 8])
@pytest.mark.parametrize("tol", [1e-2, 1e-4])
def test_near_tiles(tol, decades, held: Held) -> None:
    """Lists leave out no more than the tolerance, of sums and of averages, also for masses over decades."""
    points, sigma = torch.stack([sphere(900), ball(900)]).float(), torch.tensor([0.1, 0.05])
    bias = decades * math.log(10) * (torch.rand(2, 900) - 1)
    value = torch.randn(2, 900, 3)
    cloud, widths = sorted_cloud(points), {}
    out, lse = device.attend(cloud, cloud, sigma, value, bias, Cutoff(tol, widths))
    scaled = points.double() / sigma.double()[:, None, None]
    expected_out, expected_lse = dense(scaled, scaled, value, bias)
    sizes, _ = dense(scaled, scaled, value.abs(), bias)
    held(f"{TILES}, lse / tol", INTERPRETED, gap(lse, expected_lse) / tol, 1.0)
    held(f"{TILES}, out / (tol × sizes)", INTERPRETED, gap((out - expected_out) / sizes, torch.zeros(())) / tol, 1.0)
    near = device._near_tiles(cloud, cloud, device._scale(cloud, sigma), bias, bias, Cutoff(tol, widths))
    assert float(near.counts.float().mean()) < 0.9 * cloud.tiles


def test_lists_are_those_of_the_cpu() -> None:
    """The same bounds as the walk down the tree of `native`, up to its order and to rounding."""
    from qattn.tiles import gaussian
    from qattn.tiles.tiling import Tiling

    points, bias = sphere(3000).float()[None], torch.randn(1, 3000)
    order, sigma = kd_order(points), torch.tensor([0.1])
    counts, lists = gaussian.near_tiles(*[Tiling(points, order)] * 2, sigma, bias, 1e-3)
    cloud = DeviceTiling(points, order)
    near = device._near_tiles(cloud, cloud, device._scale(cloud, sigma), bias, bias, Cutoff(1e-3, {}))
    for tile in range(cloud.tiles):
        here = set(near.tiles[0, tile, : near.counts[0, tile]].tolist())
        there = set(lists[0, tile, : counts[0, tile]].tolist())
        assert len(here) == near.counts[0, tile]
        assert len(here ^ there) <= 0.2 * len(there)


def test_a_list_longer_than_its_memory_stands_for_all_keys(held: Held) -> None:
    points, bias = ball(700).float()[None], torch.randn(1, 700)
    cloud, sigma = sorted_cloud(points), torch.tensor([0.1])
    widths = {cloud: 1}
    _, lse = device.attend(cloud, cloud, sigma, None, bias, Cutoff(1e-3, widths))
    assert widths == {cloud: 1}
    exact = dense(points.double() / 0.1, points.double() / 0.1, None, bias)[1]
    held(f"{TILES}, lists too long, lse", INTERPRETED, gap(lse, exact), 1e-5)


def test_memory_for_lists_is_bounded(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists beyond it stand for all keys."""
    points, sigma = ball(1100).float()[None], torch.tensor([1.0])
    cloud = sorted_cloud(points)
    exact = dense(points, points)[1]
    for memory, expected in ((2**30, 32), (4 * 17 * cloud.tiles, 32), (4 * 16 * cloud.tiles, 16), (0, 16)):
        monkeypatch.setattr(device, "_MEMORY", memory)
        widths: dict[DeviceTiling, int] = {}
        _, lse = device.attend(cloud, cloud, sigma, None, None, Cutoff(1e-6, widths))
        assert widths == {cloud: expected}  # all 18 tiles are near; lists have a multiple of 16 places
        held(f"{TILES}, lists beyond their memory, lse", INTERPRETED, gap(lse, exact), 1e-5)


def test_the_first_pass_of_tiles_measures_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass tells how many pairs are near. No later one waits for an answer."""
    monkeypatch.setattr(tensor_cores, "MANY_PAIRS", 1)
    measured, lifted = Mock(wraps=inputs_of_attention.extent), Mock(wraps=operators.sum_lifted_blocks)
    monkeypatch.setattr(inputs_of_attention, "extent", measured)
    monkeypatch.setattr(operators, "sum_lifted_blocks", lifted)
    kernel, counts = qattn.GaussianKernel(sphere(300).float(), 0.2, method="tiles", backend="triton"), []
    for _ in range(3):
        kernel.attend(torch.zeros(300))
        counts.append((measured.call_count, lifted.call_count))
    assert counts == [(1, 0), (1, 1), (1, 2)]


def test_clouds_without_keys_have_empty_lists() -> None:
    points = torch.randn(2, 200, 3)
    bias = torch.zeros(2, 200)
    bias[0] = -torch.inf
    cloud = sorted_cloud(points)
    out, lse = device.attend(cloud, cloud, None, torch.ones(2, 200, 1), bias, Cutoff(1e-3, {}))
    assert (lse[0] == -torch.inf).all()
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1], torch.ones(200, 1))


def test_sums_over_near_pairs(held: Held) -> None:
    """The derivatives of tiles differ from those of all pairs by the tolerance."""
    points, sigma, tol = sphere(640).float()[None], torch.tensor([0.1]), 1e-4
    inputs = Inputs(points, points, None, torch.randn(1, 640), sigma)
    cloud = sorted_cloud(points)
    _, lse = device.attend(cloud, cloud, sigma, None, inputs.bias)
    terms = PairTerms(torch.randn(1, 640, 4), torch.randn(1, 640, 4), lse, by_column=True, num_values=3)
    rows, *columns = device.differentiate(cloud, cloud, sigma, inputs.bias, terms, Cutoff(tol, {}))
    for got, expected in zip((*rows, *columns), dense_pair_sums(inputs, terms), strict=True):
        error = gap(got, expected) / float(expected.abs().amax())
        held(f"{TILES}, sums over pairs / tol", INTERPRETED, error / tol, 1.0)


@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_a_diffusion_end_to_end_equals_native(method, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """`diffusion`, `q @ signal` and the gradients of both by points, σ and signal."""
    cloud, values = sphere(300).float(), torch.randn(300, 3)

    passes = {name: Mock(wraps=getattr(device, name)) for name in ("attend", "differentiate")}
    for name, counted in passes.items():
        monkeypatch.setattr(device, name, counted)

    def run(backend: str) -> tuple[Tensor, ...]:
        points, sigma, signal = cloud.clone(), torch.tensor(0.2), values.clone()
        leaves = [x.requires_grad_() for x in (points, sigma, signal)]
        kernel = qattn.GaussianKernel(points, sigma, method=method, backend=backend, tol=1e-6)
        q = qattn.diffusion(kernel, tol=1e-6)
        out = q @ signal
        return out.detach(), (q.T @ signal).detach(), *torch.autograd.grad((out * cloud).sum(), leaves)

    for name, got, expected in zip(
        ("Q v", "Qᵀ v", "by points", "by σ", "by signal"), run("triton"), run("native"), strict=True
    ):
        error = gap(got, expected.double()) / max(1.0, float(expected.abs().amax()))
        held(f"triton: diffusion by {method}, {name}, against native", INTERPRETED, error, 1e-5)
    assert passes["attend"].call_count > 5
    assert passes["differentiate"].call_count == 2  # of the product, and of the potential


@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_a_diffusion_by_tensor_cores(method, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinkhorn passes and the product; the sums of its gradient are of differences."""
    monkeypatch.setattr(tensor_cores, "MANY_PAIRS", 1)
    summed, attended = (Mock(wraps=getattr(operators, f"{name}_lifted_blocks")) for name in ("sum", "attend"))
    monkeypatch.setattr(operators, "sum_lifted_blocks", summed)
    monkeypatch.setattr(operators, "attend_lifted_blocks", attended)
    cloud = sphere(300).float()

    def run(backend: str) -> tuple[Tensor, Tensor]:
        points = cloud.clone().requires_grad_()
        kernel = qattn.GaussianKernel(points, 0.2, method=method, backend=backend)
        out = qattn.diffusion(kernel, tol=1e-4) @ cloud
        return out.detach(), torch.autograd.grad(out[..., 0].square().sum(), points)[0]

    found = run("triton")
    assert summed.call_count > 2
    assert attended.call_count >= 1
    for name, got, expected in zip(("Q v", "by points"), found, run("native"), strict=True):
        error = gap(got, expected.double()) / max(1.0, float(expected.abs().amax()))
        held(f"triton: diffusion by {method}, lifted, {name}, against native", INTERPRETED, error, 2e-4)


def test_several_bandwidths_and_clouds(held: Held) -> None:
    points, sigma = torch.stack([sphere(150), ball(150)]).float(), torch.tensor([0.1, 0.3])
    for method in ("exact", "tiles"):
        found = [
            qattn.diffusion(qattn.GaussianKernel(points, sigma, method=method, backend=backend)) @ points[:, None]
            for backend in ("triton", "native")
        ]
        held(f"triton: heads by {method}, against native", INTERPRETED, gap(found[0], found[1].double()), 1e-5)


def test_costs_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that a GPU is calibrated with run; their times here mean nothing."""
    monkeypatch.setattr(calibration, "_PAIRS", 128)
    monkeypatch.setattr(calibration, "_LINES", (64, 128, 256))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    state = torch.get_rng_state()
    rates = calibration._measured(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)  # random numbers of the user do not depend on it
    assert rates.pair > 0
    assert all(math.isfinite(rate) for rate in rates)


def test_doctor_finds_it_within_its_tolerance() -> None:
    problem = qattn.doctor.standard_problem(150, torch.float32)
    exact = BACKENDS["reference"].attend(qattn.doctor.standard_problem(150, torch.float64))
    assert gap(BACKENDS["triton"].attend(problem).lse, exact.lse) <= 1e-4  # the points are rounded too
    assert TILE == 64

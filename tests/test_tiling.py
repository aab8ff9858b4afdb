"""Clouds in tiles: the order, the boxes, and which tiles are found near."""

import math

import pytest
import torch
from cases import ball, dense, slow, sphere
from hypothesis import given, settings
from hypothesis import strategies as st

from qattn.tiles import order
from qattn.tiles.gaussian import attend as attend_tilings
from qattn.tiles.gaussian import near_tiles
from qattn.tiles.order import kd_order
from qattn.tiles.pairs import rounds
from qattn.tiles.sizes import PART, TILE
from qattn.tiles.tiling import Tiling


def tiling(points):
    return Tiling(points[None], kd_order(points[None]))


def by_torch(points):
    """Sort as on a machine where sorting is not compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "is_due", lambda loop, seconds: False)
        return kd_order(points)


@pytest.mark.parametrize("sort", [kd_order, by_torch])
@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 700), dims=st.integers(1, 5), values=st.sampled_from([1, 2, 5, 0]), seed=st.integers(0, 2**31))
def test_the_order_is_a_permutation_with_ties_and_without(sort, n, dims, values, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(2, n, dims, generator=generator)
    if values:  # a few numbers only, as on a grid, or one
        points = torch.randint(values, points.shape, generator=generator).float()
    assert (sort(points).sort().values == torch.arange(n)).all()


@pytest.mark.parametrize("sort", [kd_order, by_torch])
def test_aligned_runs_of_tiles_are_nodes_of_a_tree(sort):
    """Each run of 2^n leaves is on one side of a plane from the other half of the run of twice its length."""
    points = ball(1000).float()
    ordered = points[sort(points[None])[0]]
    length = PART
    while length < 1000:
        for start in range(0, 1000 - length, 2 * length):
            one, two = ordered[start : start + length], ordered[start + length : start + 2 * length]
            assert ((one.amax(0) <= two.amin(0)) | (two.amax(0) <= one.amin(0))).any()
        length *= 2


def test_tiles_are_smaller_than_chance():
    points = sphere(20_000).float()
    tree = tiling(points).tree
    low, high = tree.nodes[0, : -(-20_000 // TILE)].chunk(2, dim=-1)
    area = 4 * torch.pi * TILE / 20_000  # of the sphere, for a tile
    factor = (0.5 / torch.log(torch.tensor(2.0))).sqrt()
    assert ((high - low) / factor).norm(dim=-1).median() < 2 * area**0.5


def test_the_order_does_not_depend_on_the_threads(monkeypatch):
    points = torch.randn(1, 100_000, 3)
    orders = []
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda c=count: c)
        orders.append(kd_order(points))
    assert (orders[0] == orders[1]).all()


@pytest.mark.parametrize("n", [1, TILE, 5 * TILE, 1000])
def test_sorting_and_back(n):
    points = torch.randn(3, n, 2)
    tiles = Tiling(points, kd_order(points))
    for x in (torch.randn(3, n), torch.randn(3, n, 4)):
        torch.testing.assert_close(tiles.unsort(tiles.sort(x)), x, rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, TILE - 1, TILE, 3 * TILE + 5, 1000])
def test_boxes_hold_their_points_and_tops_their_weights(n):
    points = torch.randn(2, n, 3, dtype=torch.float64)
    tiles = Tiling(points, kd_order(points))
    tree = tiles.tree
    bias = torch.randn(2, n, dtype=torch.float64)
    bias[0, tiles.order[0, :TILE]] = -torch.inf
    weights = tiles.weights(bias, torch.zeros(2, 1, dtype=torch.float64), torch.tensor([1.0, 4.0], dtype=torch.float64))
    beta = weights.beta.reshape(2, -1, TILE) * torch.tensor([1.0, 4.0])[:, None, None]
    sorted_bias = torch.nn.functional.pad(tiles.sort(bias), (0, tiles.tiles * TILE - n), value=-torch.inf)
    torch.testing.assert_close(beta.flatten(1) * math.log(2), sorted_bias)
    tops = weights.nodes().reshape(2, -1)
    corner = tiles.points.reshape(2, -1, 3)
    leaves = tree.parts.reshape(2, -1, 6)
    for part in range(leaves.shape[1]):
        some = corner[:, part * PART : (part + 1) * PART]
        torch.testing.assert_close(leaves[:, part], torch.cat([some.amin(1), some.amax(1)], dim=-1))
    levels = len(tree.starts) - 1
    for level in range(levels):
        for node in range(int(tree.starts[level + 1] - tree.starts[level])):
            at, run = int(tree.starts[level]) + node, slice(node << level, (node + 1) << level)
            some = tiles.points.reshape(2, -1, TILE, 3)[:, run].flatten(1, 2)
            torch.testing.assert_close(tree.nodes[:, at], torch.cat([some.amin(1), some.amax(1)], dim=-1))
            expected = torch.logsumexp(beta[:, run].flatten(1) * torch.log(torch.tensor(2.0)), dim=1)
            torch.testing.assert_close(tops[:, at], (expected / torch.log(torch.tensor(2.0))).double())
    assert tree.nodes.shape[1] == int(tree.starts[-1])
    parts = torch.logsumexp(sorted_bias.unflatten(1, (-1, PART)), dim=-1) / math.log(2)
    torch.testing.assert_close(weights.parts.reshape(2, -1), parts)
    least = tiles.sort(bias).split(TILE, dim=1)
    torch.testing.assert_close(weights.least.reshape(2, -1), torch.stack([x.amin(1) for x in least], 1) / math.log(2))


def relative_error(got, expected):
    return float((got.lse[0].double() - expected).abs().amax())


SHAPES = {
    "surface": lambda: sphere(3000),
    "volume": lambda: ball(3000),
    "clusters": lambda: torch.cat([ball(1500) * 0.02 + 0.3, ball(1500)]),
    "flat": lambda: ball(3000) * torch.tensor([1.0, 0.1, 0.001], dtype=torch.float64),
    "square": lambda: torch.rand(3000, 2, dtype=torch.float64),
    "line": lambda: torch.rand(3000, 1, dtype=torch.float64),
    "four dimensions": lambda: torch.rand(2000, 4, dtype=torch.float64),
    "six dimensions": lambda: torch.rand(2000, 6, dtype=torch.float64),
    "outliers": lambda: torch.cat([sphere(2900), 100 * ball(100)]),
    "duplicates": lambda: sphere(50).repeat(40, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("decades", [0, 6])
@pytest.mark.parametrize("tol", [1e-3, 1e-6])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_left_out_is_within_the_tolerance(name, tol, decades):
    """Every row, for equal weights and for weights over six decades, at four bandwidths."""
    points = SHAPES[name]()
    bias = decades * (torch.rand(1, len(points), dtype=torch.float64) - 0.5) * 2.3
    for sigma in (0.01, 0.05, 0.2, 1.0):
        tiles = tiling(points / sigma)
        got = attend_tilings(tiles, tiles, None, None, bias, tol)
        _, expected = dense(points / sigma, points / sigma, bias=bias[0])
        assert relative_error(got, expected) <= tol


@pytest.mark.parametrize("offset", [0.0, 3.0, 30.0])
def test_other_points_and_far_ones(offset):
    """Rows that no key is near still have their nearest ones, however far."""
    points, targets = ball(2000) / 0.05, (ball(500) + offset) / 0.05
    value, bias = torch.randn(2000, 2, dtype=torch.float64), torch.randn(2000, dtype=torch.float64)
    out, lse = attend_tilings(tiling(targets), tiling(points), None, value[None], bias[None], 1e-3)
    expected_out, expected_lse = dense(targets, points, value, bias)
    torch.testing.assert_close(lse[0], expected_lse, rtol=0, atol=1e-3)
    torch.testing.assert_close(out[0], expected_out, rtol=0, atol=3e-3)


@pytest.mark.parametrize("channels", [slow(1), 3, slow(20)])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)], ids=str)
def test_values(dtype, channels):
    points = (sphere(2000) / 0.1).to(dtype)
    value = torch.randn(2000, channels, dtype=dtype)
    tiles = tiling(points)
    out, lse = attend_tilings(tiles, tiles, None, value[None], None, 1e-5)
    expected_out, expected_lse = dense(points, points, value)
    torch.testing.assert_close(lse[0].double(), expected_lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(out[0].double(), expected_out, rtol=0, atol=6e-5)


def test_absent_keys_and_clouds_without_any():
    points = torch.stack([sphere(600), sphere(600)]) / 0.2
    tiles = Tiling(points, kd_order(points))
    bias = torch.zeros(2, 600, dtype=torch.float64)
    bias[0, ::2] = -torch.inf
    bias[1] = -torch.inf
    out, lse = attend_tilings(tiles, tiles, None, points, bias, 1e-6)
    expected_out, expected_lse = dense(points[0], points[0, 1::2], points[0, 1::2])
    torch.testing.assert_close(lse[0], expected_lse, rtol=0, atol=1e-6)
    torch.testing.assert_close(out[0], expected_out, rtol=0, atol=1e-4)
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()


def test_most_pairs_are_left_out():
    """The tolerance is not met by computing everything: 3,000 points of a sphere see few tiles each."""
    points = sphere(3000).float()
    tiles = tiling(points / 0.05)
    counts, _ = near_tiles(tiles, tiles, None, torch.zeros(1, 3000), 1e-3)
    assert counts.float().mean() < 0.35 * tiles.tiles


def test_lists_are_numbered_within_their_cloud():
    points = torch.stack([sphere(500), 2 * sphere(500)]).float() / 0.1
    tiles = Tiling(points, kd_order(points))
    counts, lists = near_tiles(tiles, tiles, None, torch.zeros(2, 500), 1e-3)
    assert int(lists.amax()) < tiles.tiles
    for b in range(2):
        for row in range(tiles.tiles):
            assert row in lists[b, row, : counts[b, row]]


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)], ids=str)
def test_sums_that_serve_both_rows_of_a_pair(dtype):
    """A batch with two bandwidths, masses over 30 decades, absent points and a last tile that is not full.

    Sums too small for float32 are found by the other loop, and so is everything as soon as there are values.
    """
    generator = torch.Generator().manual_seed(0)
    points = 30 + torch.stack([sphere(3001), 2 * ball(3001)]).to(dtype)
    sigma = torch.tensor([0.1, 0.2], dtype=dtype)
    bias = 70 * (torch.rand(2, 3001, generator=generator, dtype=dtype) - 1)
    bias[:, ::5] = -torch.inf
    tiles = Tiling(points, kd_order(points))
    lse = attend_tilings(tiles, tiles, sigma, None, bias, 1e-6).lse
    again = attend_tilings(tiles, tiles, sigma, torch.ones(2, 3001, 1, dtype=dtype), bias, 1e-6).lse
    for cloud in range(2):
        x = points[cloud].double() / sigma[cloud].double()
        expected = dense(x, x, bias=bias[cloud].double())[1]
        atol = 2e-5 if dtype == torch.float32 else 2e-6
        torch.testing.assert_close(lse[cloud].double(), expected, rtol=0, atol=atol)
        torch.testing.assert_close(lse[cloud], again[cloud], rtol=0, atol=atol)


def test_pairs_of_blocks_meet_once_and_never_twice_in_a_round():
    tiles = Tiling(torch.stack([sphere(5000), ball(5000)]))
    first = {task[:2] for some in rounds(tiles, tiles) for task in some if task[1] <= tiles.tiles}  # of the first cloud
    near = torch.rand(2, len(first), len(first)) < 0.2
    near = near | near.mT | torch.eye(len(first), dtype=torch.bool)
    for is_near in (None, near):
        expected = int(near.sum()) if is_near is not None else near.numel()
        tasks = [task for some in rounds(tiles, tiles, is_near) for task in some]
        assert len(set(tasks)) == len(tasks) == expected
        half = rounds(tiles, tiles, is_near, is_half=True)
        pairs = [frozenset((task[:2], task[2:])) for some in half for task in some]
        assert len(set(pairs)) == len(pairs) == (expected + near.shape[0] * near.shape[1]) / 2
        for some in (*half, *rounds(tiles, tiles, is_near)):
            assert len({task[:2] for task in some}) == len({task[2:] for task in some}) == len(some)

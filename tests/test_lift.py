"""Lifted embeddings against the score they stand for, and how exact they are in 16 bits."""

import pytest
import torch
from cases import ball, sphere
from hypothesis import given, settings
from hypothesis import strategies as st

from qattn.lift import (
    center,
    extent,
    lift,
    lift_full,
    part_dtype,
    scale_values,
    split_columns,
    split_lift,
)


def score(query, key, bias=None):
    result = -0.5 * torch.cdist(query, key) ** 2
    return result if bias is None else result + bias[..., None, :]


def cloud(n, m, dims=3):
    return torch.randn(2, n, dims, dtype=torch.float64), torch.randn(2, m, dims, dtype=torch.float64)


@pytest.mark.parametrize("dims", [1, 2, 3, 8])
def test_lift_is_the_score_up_to_the_row(dims):
    query, key = cloud(20, 30, dims)
    bias = torch.randn(2, 30, dtype=torch.float64)
    lifted = lift(query, key, bias)
    assert lifted.query.shape[-1] == dims + 1
    product = lifted.query @ lifted.key.mT + lifted.row[..., None]
    torch.testing.assert_close(product, score(query, key, bias), rtol=0, atol=1e-12)


def test_full_lift_is_the_paper_s_with_both_potentials():
    """(e, f − ½‖e‖², 1) · (e, 1, f − ½‖e‖² + log m) = log(e^f K m e^f)."""
    points, _ = cloud(25, 1)
    potential, log_mass = torch.randn(2, 25, dtype=torch.float64), torch.randn(2, 25, dtype=torch.float64)
    query, key = lift_full(points, points, potential + log_mass, row=potential)
    assert query.shape[-1] == points.shape[-1] + 2
    expected = score(points, points, potential + log_mass) + potential[..., None]
    torch.testing.assert_close(query @ key.mT, expected, rtol=0, atol=1e-12)


def test_full_lift_without_a_row_potential():
    query, key = cloud(20, 30)
    lifted_query, lifted_key = lift_full(query, key, None)
    torch.testing.assert_close(lifted_query @ lifted_key.mT, score(query, key), rtol=0, atol=1e-12)


def test_centering_moves_the_mean_of_the_keys_to_the_origin():
    query, key = cloud(20, 30)
    moved_query, moved_key = center(query + 100, key + 100)
    torch.testing.assert_close(moved_key.mean(1), torch.zeros(2, 3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(score(moved_query, moved_key), score(query, key), rtol=0, atol=1e-10)


def test_extent_ignores_absent_keys_and_empty_clouds():
    query, key = cloud(5, 6)
    size = extent(query, key, torch.tensor([0.0, -3.0, -torch.inf, 1, 1, 1]).expand(2, 6))
    assert size.bias == 3.0
    assert extent(query[:, :0], key, None).query == 0.0


def lse_error(points, dtype, split):
    """Largest error of the lse when lifted points of `dtype` meet in float32, as in a 16-bit kernel."""
    exact = score(points, points).logsumexp(-1)
    single = points.float()
    lifted = split_lift(single, single, None, dtype) if split else lift(single, single, None)
    product = lifted.query.to(dtype).float() @ lifted.key.to(dtype).float().mT + lifted.row[..., None]
    return float((product.logsumexp(-1) - exact).abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sigma", "bound"), [(0.05, 1e-4), (0.02, 1e-3)])
def test_split_lift_is_exact_where_the_plain_one_is_useless(sigma, bound, dtype):
    points = ball(1000)[None] / sigma
    assert lse_error(points, dtype, split=False) > 0.1
    assert lse_error(points, dtype, split=True) <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sigma", "bound"), [(0.05, 1e-4), (0.02, 1e-3)])
def test_split_lift_in_torch_s_16_bit_kernel(sigma, bound, dtype):
    """The same parts through a real fused kernel with 16-bit inputs, whose own exp is good to about 5e-5."""
    points = ball(1000)[None] / sigma
    single = points.float()
    lifted = split_lift(single, single, None, dtype)
    query, key = (torch.nn.functional.pad(x, (0, 32 - x.shape[-1]))[:, None] for x in lifted[:2])
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, key, scale=1.0)
    error = (lse[:, 0] + lifted.row - score(points, points).logsumexp(-1)).abs().max()
    assert float(error) <= bound + 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_split_lift_columns_and_absent_keys(dtype):
    points = sphere(50)[None].float() / 0.05
    bias = torch.randn(1, 50)
    bias[:, ::2] = -torch.inf
    lifted = split_lift(points, points, bias, dtype)
    assert lifted.query.dtype == lifted.key.dtype == dtype
    assert lifted.query.shape[-1] == lifted.key.shape[-1] == split_columns(3, dtype) <= 24
    product = lifted.query.float() @ lifted.key.float().mT + lifted.row[..., None]
    assert product.isfinite().all()
    expected = score(points.double(), points.double(), bias.double()).logsumexp(-1)
    torch.testing.assert_close(product.logsumexp(-1).double(), expected, rtol=0, atol=1e-3)


def test_part_dtype_leaves_float16_when_its_range_ends():
    near, far = sphere(50)[None] / 0.05, sphere(50)[None] / 0.005
    assert part_dtype(extent(near, near, None)) == torch.float16
    assert part_dtype(extent(far, far, None)) == torch.bfloat16
    lifted = split_lift(far.float(), far.float(), None, torch.bfloat16)
    assert lifted.key.isfinite().all()


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_estimated_rounding_bounds_the_error_of_a_float32_lift(sigma, seed):
    torch.manual_seed(seed)
    points = ball(200)[None] / sigma
    exact = score(points, points).logsumexp(-1)
    lifted = lift(points.float(), points.float(), None)
    error = ((lifted.query @ lifted.key.mT).logsumexp(-1) + lifted.row - exact).abs().max()
    estimate = extent(points, points, None).rounding(2.0**-23)
    assert float(error) <= estimate + 2e-6  # what the sum of exponentials itself rounds
    assert estimate <= 200 * float(error)  # a bound, but not a useless one


def test_scaled_values_fit_float16():
    value = torch.randn(2, 40, 3) * torch.tensor([1e-20, 1.0, 1e20])
    value[..., 1] = 0
    scaled, scale = scale_values(value, torch.float16)
    assert scaled.abs().max() <= 1
    torch.testing.assert_close(scaled.float() * scale, value, rtol=2**-11, atol=0)

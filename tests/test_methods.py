"""The methods of the Gaussian kernel against all pairs, the choice between them, and what they report."""

import copy
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from cases import ball, dense, slow, sphere
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, Dataset

from qattn import Attended, GaussianKernel, MatrixKernel, diffusion
from qattn.kernels.gaussian import fourier, prepared
from qattn.kernels.gaussian.cost import Workload
from qattn.kernels.gaussian.fourier import FourierError
from qattn.kernels.gaussian.plan import Plan
from qattn.kernels.gaussian.prepared import PreparedPoints
from qattn.ranks import ALONE
from qattn.tiles.tiling import Tiling

APPROXIMATE = ["tiles", "fourier"]
SHAPES = {
    "surface": lambda n: sphere(n),
    "volume": lambda n: ball(n),
    "clusters": lambda n: torch.cat([ball(n // 2) * 0.02 + 0.3, ball(n - n // 2)]),
    "flat": lambda n: ball(n) * torch.tensor([1.0, 0.1, 0.001], dtype=torch.float64),
    "square": lambda n: torch.rand(n, 2, dtype=torch.float64),
    "line": lambda n: torch.rand(n, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("decades", [slow(0), 5])
@pytest.mark.parametrize("sigma", [0.1, slow(0.5), slow(5.0)])
@pytest.mark.parametrize("name", ["surface", *map(slow, list(SHAPES)[1:])])
@pytest.mark.parametrize("method", APPROXIMATE)
def test_the_tolerance_is_kept_on_every_row(method, name, sigma, decades):
    """lse and out, in float32 at 1e-3 and in float64 at 1e-7, against dense float64."""
    points = SHAPES[name](2000)
    value = torch.rand(2000, 3, dtype=torch.float64)
    bias = decades * (torch.rand(2000, dtype=torch.float64) - 0.5) * 2.3
    expected_out, expected_lse = dense(points / sigma, points / sigma, value, bias)
    for dtype, tol in ((torch.float32, 1e-3), (torch.float64, 1e-7)):
        kernel = GaussianKernel(points.to(dtype), sigma, method=method, tol=tol)
        out, lse = kernel.attend(bias.to(dtype), value.to(dtype))
        assert out.dtype == lse.dtype == dtype
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tol)
        torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=3 * tol)
        assert kernel.method == method
        assert float(kernel.error(bias.to(dtype))) <= tol


@pytest.mark.parametrize("method", APPROXIMATE)
def test_a_diffusion_reports_its_error(method):
    points = sphere(3000).float()
    mass = torch.rand(3000) ** 4 + 1e-6
    q = diffusion(points, 0.2, mass, method=method)
    exact = diffusion(points.double(), 0.2, mass.double(), method="exact", tol=1e-8)
    assert 0 < float(q.kernel_error()) <= 1e-3
    assert float(q.kernel_error(num_rows=16, seed=1)) != float(q.kernel_error(num_rows=16, seed=2))
    assert float(exact.kernel_error()) < 1e-12
    signal = torch.rand(3000, 2)
    torch.testing.assert_close((q @ signal).double(), exact @ signal.double(), rtol=0, atol=5e-3)
    assert isinstance(diffusion(points.numpy(), 0.2, method=method).kernel_error(), np.ndarray)


def test_errors_of_sums_multiples_and_matrices(monkeypatch):
    points = sphere(2000).float()
    kernel = GaussianKernel(points, 0.3, method="tiles") + 2 * GaussianKernel(points, 0.6, method="fourier")
    assert 0 < float(kernel.error()) <= 1e-3
    wrong = GaussianKernel(points, 0.3, method="exact")
    monkeypatch.setattr(wrong, "exact_lse", lambda rows, bias: torch.zeros(len(rows)))
    assert float((kernel + wrong * 0.5).error()) > 1e-2  # it would have been seen
    similarity = torch.rand(50, 50, dtype=torch.float64)
    assert float(MatrixKernel(similarity + similarity.T).error()) < 1e-12


def test_errors_hide_nothing(monkeypatch):
    """NaN is no error of 0, a row that is lost counts fully, and other seeds draw other rows."""
    points = sphere(2000).float()
    kernel = GaussianKernel(points, 0.3, method="tiles")
    assert len({float(kernel.error(num_rows=3, seed=seed)) for seed in range(5)}) > 1
    attend = kernel.attend
    for wrong, expected in ((torch.nan, torch.nan), (-torch.inf, 1.0)):
        monkeypatch.setattr(kernel, "attend", lambda bias, wrong=wrong: Attended(None, attend(bias).lse * 0 + wrong))
        torch.testing.assert_close(float(kernel.error()), expected, equal_nan=True)


@pytest.mark.slow
def test_errors_of_a_ragged_batch_leave_out_the_padding():
    """A row that is padding in one cloud and a point in the other is measured in the other alone."""
    points = torch.stack([sphere(600).float(), torch.cat([sphere(500).float() + 20, torch.zeros(100, 3)])])
    mass = torch.ones(2, 600)
    mass[1, 500:] = 0
    q = diffusion(points, 0.5, mass, method="fourier")
    assert (q.kernel_error(num_rows=600) <= 1e-3).all()


@pytest.mark.parametrize("method", ["tiles", slow("fourier")])
def test_gradients_agree_with_exact_ones(method):
    """Gradients by points, σ, masses and signal, through the normalization, with a batch and heads."""
    generator = torch.Generator().manual_seed(0)
    points = torch.stack([sphere(500), sphere(500)])
    mass = torch.rand(2, 1, 500, dtype=torch.float64, generator=generator) + 0.1
    signal = torch.randn(2, 1, 500, 2, dtype=torch.float64, generator=generator)
    sigma = torch.tensor([0.2, 0.5], dtype=torch.float64)

    def gradients(method):
        leaves = [x.clone().requires_grad_() for x in (points, sigma, mass, signal)]
        kernel = GaussianKernel(*leaves[:2], method=method, tol=1e-6)
        q = diffusion(kernel, mass=leaves[2], tol=1e-10)
        return torch.autograd.grad((q @ leaves[3]).sin().sum() + q.potential.square().sum(), leaves)

    for got, expected in zip(gradients(method), gradients("exact"), strict=True):
        assert float((got - expected).abs().amax()) <= 1e-5 * float(expected.abs().amax())


@pytest.mark.parametrize("method", ["tiles", slow("fourier")])
def test_second_derivatives_and_other_points(method):
    points, targets = sphere(300), sphere(200)

    def hessian_product(method):
        x, y = points.clone().requires_grad_(), targets.clone().requires_grad_()
        kernel = GaussianKernel(x, 0.4, method=method, tol=1e-8).at(y)
        out, lse = kernel.attend(torch.zeros(300, dtype=torch.float64), points)
        first = torch.autograd.grad(out.sin().sum() + lse.square().sum(), (x, y), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))

    for got, expected in zip(hessian_product(method), hessian_product("exact"), strict=True):
        assert float((got - expected).abs().amax()) <= 1e-6 * float(expected.abs().amax())


@pytest.mark.slow
def test_each_head_has_its_own_method():
    points = sphere(12_000).float()
    sigma = torch.tensor([0.02, 1.0, 0.03, 2.0])
    kernel = GaussianKernel(points, sigma)
    assert kernel.method == ("tiles", "fourier", "tiles", "fourier")
    assert "method='tiles, fourier'" in repr(kernel)
    bias, value = torch.randn(4, 12_000), torch.randn(4, 12_000, 2)
    exact = GaussianKernel(points, sigma, method="exact")
    for b, v in ((bias, value), (bias, value[0]), (bias[0], value)):
        out, lse = kernel.attend(b, v)
        expected = exact.attend(b, v)
        torch.testing.assert_close(lse, expected.lse, rtol=0, atol=1e-3)
        torch.testing.assert_close(out, expected.out, rtol=0, atol=3e-3)
    torch.testing.assert_close(kernel.attend(bias).lse, exact.attend(bias).lse, rtol=0, atol=1e-3)
    assert kernel.error(bias).shape == (4,)
    leaf = sigma.clone().requires_grad_()
    (got,) = torch.autograd.grad(GaussianKernel(points, leaf).attend(bias).lse.sum(), leaf)
    (expected,) = torch.autograd.grad(GaussianKernel(points, leaf, method="exact").attend(bias).lse.sum(), leaf)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("method", ["tiles", slow("fourier")])
def test_signals_with_axes_that_the_cloud_lacks(method):
    points = torch.stack([sphere(400), sphere(400)]).float()
    signal = torch.randn(3, 2, 400, 2)
    got, expected = (diffusion(points, 0.3, method=m, tol=1e-5) @ signal for m in (method, "exact"))
    assert got.shape == expected.shape == signal.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-3)
    single = torch.randn(5, 400, 1)
    got, expected = (diffusion(points[:1], 0.3, method=m, tol=1e-5) @ single for m in (method, "exact"))
    assert got.shape == expected.shape == single.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-3)
    with pytest.raises(ValueError, match=r"`bias` should have the batch axes \(2,\)"):
        GaussianKernel(points, 0.3, method=method).attend(torch.zeros(3, 2, 400))


@pytest.mark.parametrize("method", ["tiles", slow("fourier")])
def test_points_without_mass(method):
    """Padding, also far from the cloud, changes nothing and stays finite."""
    points = sphere(800).float()
    padded = torch.cat([points + 20, torch.zeros(200, 3)])
    mass = torch.cat([torch.ones(800), torch.zeros(200)])
    q = diffusion(padded, 0.5, mass, method=method, tol=1e-5)
    signal = torch.randn(1000, 2)
    smooth = q @ signal
    assert smooth.isfinite().all()
    assert q.potential.isfinite().all()
    expected = diffusion(points, 0.5, torch.ones(800), method="exact", tol=1e-5) @ signal[:800]
    torch.testing.assert_close(smooth[:800], expected, rtol=0, atol=5e-3)
    assert float(q.kernel_error()) <= 1e-3


# --- what "auto" takes


def test_points_of_a_kernel_are_laid_out_once(monkeypatch):
    made = []
    monkeypatch.setattr("qattn.attention.inputs.Tiling", lambda points: made.append(points) or Tiling(points))
    q = diffusion(torch.randn(40, 3), [0.5, 1.0], method="exact")
    for value in (torch.randn(2, 40, 1), torch.randn(2, 40, 20)):
        q @ value
    assert int(q.num_iter.amax()) > 2
    assert len(made) == 1


@pytest.mark.parametrize("batch", [(2, 3), (3, 2, 1)])
def test_biases_may_add_axes_in_any_order(batch):
    """The same number of clouds, whose points come in another order."""
    points = torch.randn(2, 1, 20, 3).double()
    biases = [torch.randn(2, 3, 20).double(), torch.randn(3, 2, 1, 20).double()]
    kernel = GaussianKernel(points, 0.5, method="exact")
    scores = -0.5 * torch.cdist(points, points) ** 2 / 0.25  # (2, 1, 20, 20)
    for bias in biases if batch == (2, 3) else biases[::-1]:
        torch.testing.assert_close(kernel.attend(bias).lse, (scores + bias[..., None, :]).logsumexp(-1))


def test_auto_takes_the_cheapest_and_says_why():
    points = sphere(20_000).float()
    small, large = GaussianKernel(points, 0.02), GaussianKernel(points, 1.0)
    for kernel in (small, large):
        assert str(kernel) == repr(kernel)  # printing chooses nothing
        assert "method='auto'" in repr(kernel)
    assert [choice.method for kernel in (small, large) for choice in kernel.choices()] == ["tiles", "fourier"]
    for kernel in (small, large):
        lines = str(kernel).splitlines()
        assert lines[0] == repr(kernel)
        assert [line.split()[0] for line in lines[1:]] == ["exact", "tiles", "fourier"]
        assert [line.split()[0] for line in lines if line.endswith("← taken")] == [kernel.method]
    assert "modes, more than" in str(small)
    assert "too many pairs in reach" in str(large)
    assert GaussianKernel(points[:100], 0.02).method == "exact"
    heads = GaussianKernel(points[:100], [0.02, 1.0])
    heads.attend(torch.zeros(100))
    assert "sigma = 0.02" in str(heads)


def test_auto_in_many_dimensions_is_exact():
    kernel = GaussianKernel(torch.randn(5000, 12), 1.0)
    assert kernel.method == "exact"
    assert "up to 3 dimensions" in str(kernel)
    assert "in 12 dimensions boxes overlap" in str(GaussianKernel(torch.randn(50, 12), 1.0, method="tiles"))
    assert "overlap" not in str(GaussianKernel(torch.randn(50, 3), 1.0, method="tiles"))


def test_an_attention_backend_asked_for_is_used():
    points = sphere(5000).float()
    assert GaussianKernel(points, 0.02, backend="sdpa").method == "exact"
    assert GaussianKernel(points, 0.02, backend="native").method == "tiles"
    (choice,) = GaussianKernel(points, 0.02, backend="sdpa").choices()
    assert 'it takes the backends native, triton, flex, not "sdpa"' in str(choice)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"method": "fourier", "points": torch.randn(10, 4)}, "up to 3 dimensions, and these points have 4"),
        ({"method": "fourier", "backend": "sdpa"}, "it uses no attention backend"),
        ({"method": "tiles", "backend": "flex", "points": torch.randn(10, 3).double()}, "do not take float64"),
        (
            {"method": "tiles", "backend": "reference"},
            'it takes the backends native, triton, flex, not "reference"',
        ),
    ],
)
def test_a_method_that_cannot_serve_says_why(arguments, reason):
    points = arguments.pop("points", torch.randn(10, 3))
    with pytest.raises(ValueError, match=reason):
        GaussianKernel(points, 1.0, **arguments)


@pytest.mark.usefixtures("_flex_everywhere")
def test_values_that_a_method_does_not_take():
    kernel = GaussianKernel(torch.randn(100, 3), 1.0, method="tiles", backend="flex")
    with pytest.raises(
        NotImplementedError, match=r"value +\(100, 2\) +float64(.|\n)*FlexAttention does not take float64"
    ):
        kernel.attend(torch.zeros(100), torch.zeros(100, 2).double())


@pytest.mark.usefixtures("_flex_everywhere")
def test_methods_by_device():
    """Other devices have "exact"; on CUDA, "fourier" asks for its library."""
    elsewhere = torch.empty(10, 3, device="meta")
    with pytest.raises(ValueError, match="it takes points on cpu or cuda, and these are on meta"):
        Plan(PreparedPoints(elsewhere, elsewhere, ALONE), torch.tensor(1.0), "tiles", 1e-3, "auto", Workload())
    with FakeTensorMode():
        on_cuda = torch.empty(10, 3, device="cuda")
        Plan(PreparedPoints(on_cuda, on_cuda, ALONE), torch.tensor(1.0), "tiles", 1e-3, "auto", Workload())
        with pytest.raises(ValueError, match="cufinufft is not installed: `pip install cufinufft`"):
            Plan(PreparedPoints(on_cuda, on_cuda, ALONE), torch.tensor(1.0), "fourier", 1e-3, "auto", Workload())


def test_fourier_says_when_it_needs_too_many_modes():
    with pytest.raises(ValueError, match=r'would need \d+ × \d+ × \d+ modes .* Use `method="tiles"`'):
        GaussianKernel(ball(100).float(), 1e-3, method="fourier").attend(torch.zeros(100))


def faint_cloud(n):
    """A few points so light and so far that no absolute error is small enough for them."""
    points = torch.cat([sphere(n), 12 * sphere(5)])
    mass = torch.cat([torch.ones(n), torch.full((5,), 1e-20)]).double()
    return points, mass


def test_fourier_says_when_it_does_not_reach_the_tolerance():
    points, mass = faint_cloud(1000)
    with pytest.raises(FourierError, match="does not reach tol"):
        diffusion(points, 1.0, mass, method="fourier")


@pytest.mark.slow
def test_auto_turns_to_another_method_then_and_says_so():
    points, mass = faint_cloud(15_000)
    kernel = GaussianKernel(points, [1.0, 0.02])
    assert kernel.method[0] == "fourier"
    q = diffusion(kernel, mass=mass)
    assert "fourier" not in kernel.method
    assert "does not reach tol" in str(kernel)
    assert (q.kernel_error() <= 1e-3).all()


@pytest.mark.slow
def test_auto_does_so_in_a_backward_pass_too(monkeypatch):
    """Targets apart from the points, so that the engine of the backward pass is another one."""
    points, targets = sphere(20_000), sphere(15_000)

    def gradient(method):
        x, y = points.clone().requires_grad_(), targets.clone().requires_grad_()
        kernel = GaussianKernel(x, 1.0, method=method, tol=1e-6).at(y)
        total = kernel.attend(torch.zeros(20_000, dtype=torch.float64)).lse.sum()
        assert kernel.method in (method, "fourier")
        if method == "auto":
            monkeypatch.setattr(fourier, "_MIN_ERROR", 1.0)  # from here on no error is small enough
            monkeypatch.setattr(fourier, "first_error", lambda *_: 1e-2)
        return torch.autograd.grad(total, (x, y)), kernel

    (got, kernel), (expected, _) = gradient("auto"), gradient("exact")
    assert kernel.method != "fourier"
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("few", [300, 3])
def test_fourier_adds_digits_where_rows_sum_to_little(few, monkeypatch):
    """Rows over seven decades, some or so few that a sample misses them: the tolerance is met all the same."""
    points = torch.cat([sphere(3000) * 0.1, sphere(few) * 3])
    bias = torch.cat([torch.zeros(3000), torch.full((few,), -9.0)]).double()
    kernel, errors, modes = GaussianKernel(points, 0.7, method="fourier"), [], fourier.modes
    monkeypatch.setattr(fourier, "modes", lambda extent, error: errors.append(error) or modes(extent, error))
    lse = kernel.attend(bias).lse
    torch.testing.assert_close(lse, dense(points / 0.7, points / 0.7, bias=bias)[1], rtol=0, atol=1e-3)
    assert kernel.method == "fourier"
    assert errors[-1] < fourier.first_error(1e-3, 1.0, 1.0)


def test_plans_are_kept_between_passes(monkeypatch):
    import finufft  # here, because not every machine has it

    made, plan = [], finufft.Plan
    monkeypatch.setattr(finufft, "Plan", lambda *args, **options: made.append(args) or plan(*args, **options))
    q = diffusion(sphere(1000).float(), 0.5, method="fourier")
    assert int(q.num_iter) > 2
    assert len(made) == 2  # there and back
    q @ torch.randn(1000, 40)  # 41 columns, 21 pairs: eight at a time, and five
    assert sorted((kind, count) for kind, _, count, *_ in made[2:]) == [(1, 5), (1, 8), (2, 5), (2, 8)]


def test_channels_of_very_different_sizes():
    """Two ride in one transform, and the smaller should not drown in the error of the larger."""
    points = sphere(1000).float()
    value = torch.stack([1e6 * points[:, 0], 1e-3 * points[:, 1], torch.zeros(1000)], dim=-1)
    out, expected = (
        GaussianKernel(points, 0.5, method=m).attend(torch.zeros(1000), value).out for m in ("fourier", "exact")
    )
    torch.testing.assert_close(
        out / value.abs().amax(0).clamp(min=1e-3), expected / value.abs().amax(0).clamp(min=1e-3), rtol=0, atol=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "exact", *APPROXIMATE])
def test_tolerances_beyond_what_the_dtype_holds_or_anyone_wants(method):
    points = sphere(5000).float()
    for tol in (1e-9, 5.0):
        lse = GaussianKernel(points, 0.3, method=method, tol=tol).attend(torch.zeros(5000)).lse
        if tol < 1:
            torch.testing.assert_close(lse.double(), dense(points / 0.3, points / 0.3)[1], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", APPROXIMATE)
def test_a_tight_tolerance_of_the_operator_is_one_of_its_kernel(method):
    q = diffusion(sphere(3000), 0.2, method=method, tol=1e-7)
    assert q.converged
    assert q.kernel.tol == pytest.approx(1e-6)
    assert float(q.kernel_error()) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", *APPROXIMATE])
def test_the_thread_count_changes_nothing_beyond_rounding(method):
    points, value = sphere(5000).float(), torch.randn(5000, 2)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            q = diffusion(points, 0.1, method=method, tol=1e-5)
            results.append(torch.cat([q.potential[:, None], q @ value], dim=-1))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-5 if method == "fourier" else 0)


@pytest.mark.parametrize("method", APPROXIMATE)
def test_kernels_in_use_are_copied_and_pickled(method):
    q = diffusion(sphere(500).float(), 0.3, method=method)
    signal = torch.randn(500, 1)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.to("cpu")):
        torch.testing.assert_close(other @ signal, q @ signal, rtol=0, atol=1e-6)
        assert other.kernel.method == method
    double = q.to(torch.float64)
    assert double.kernel.method == method
    torch.testing.assert_close(double @ signal.double(), (q @ signal).double(), rtol=0, atol=1e-3)


class Smoothed(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        points = torch.nn.functional.normalize(
            torch.randn(5000, 3, generator=torch.Generator().manual_seed(index)), dim=-1
        )
        return diffusion(points, 0.2, method=APPROXIMATE[index % 2]).potential


@pytest.mark.slow
def test_workers_of_a_data_loader():
    """Forked from a process that has used the threads of both methods."""
    expected = torch.stack([Smoothed()[index] for index in range(4)])
    loader = DataLoader(Smoothed(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=0, atol=1e-5)


def test_orders_and_tiles_are_made_once(monkeypatch):
    calls = []
    kd_order = prepared.kd_order
    monkeypatch.setattr(prepared, "kd_order", lambda points: calls.append(points.shape) or kd_order(points))
    points = sphere(5000).float().requires_grad_()
    q = diffusion(GaussianKernel(points, [0.02, 0.03]))
    (q @ torch.randn(5000, 1)).sum().backward()
    q.kernel.with_sigma([0.04, 0.05]).attend(torch.zeros(2, 5000))
    assert calls == [(1, 5000, 3)]


# --- tiles by FlexAttention, tested where a C++ compiler is; on CUDA the same lists


@pytest.mark.slow
@pytest.mark.parametrize("channels", [None, 3])
def test_tiles_by_compiled_flex(channels):
    points = torch.stack([sphere(500), 2 * sphere(500)]).float()
    bias = torch.randn(2, 500)
    bias[0, ::3] = -torch.inf
    value = None if channels is None else torch.randn(2, 500, channels)
    out, lse = GaussianKernel(points, 0.15, method="tiles", backend="flex").attend(bias, value)
    expected_out, expected_lse = dense(points / 0.15, points / 0.15, value, bias)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)
    if channels:
        torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=3e-3)


@pytest.mark.slow
def test_flex_attends_to_the_listed_blocks_and_no_others():
    """A tolerance as loose as this shows in the sums."""
    points = sphere(1000).float()
    exact = GaussianKernel(points, 0.15, method="exact").attend(torch.zeros(1000)).lse
    native, flex = (
        GaussianKernel(points, 0.15, method="tiles", backend=backend, tol=20.0).attend(torch.zeros(1000)).lse
        for backend in ("native", "flex")
    )
    assert float((exact - flex).amax()) > 1e-3
    assert float((flex - native).amin()) > -1e-5  # native leaves out parts of the listed tiles too
    assert float((exact - flex).amin()) > -1e-5


# --- plans of cufinufft, which is not here: its published signature, served by finufft


def test_cufinufft_is_called_as_it_is_published(monkeypatch):
    made = []

    class Plan:
        def __init__(self, nufft_type, n_modes, n_trans=1, eps=1e-6, isign=None, dtype="complex64", **kwargs):
            assert set(kwargs) <= {"gpu_device_id", "gpu_stream", "upsampfac", "gpu_method"}
            made.append((nufft_type, n_modes, n_trans, isign, dtype, kwargs))

    stream = types.SimpleNamespace(device=torch.device("cuda", 1), cuda_stream=123)
    monkeypatch.setitem(sys.modules, "cufinufft", types.SimpleNamespace(Plan=Plan))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    fourier._plan_on(torch.device("cuda", 1), 1, (5, 7), 2, 1e-4, -1, "complex64", 100)
    assert made == [(1, (5, 7), 2, -1, "complex64", {"gpu_device_id": 1, "gpu_stream": 123})]

"""A machine on which nothing is compiled: tiles in plain torch, and what is chosen until it pays to compile."""

import subprocess
import sys

import pytest
import torch
from cases import dense, sphere

import qattn
from qattn.attended import PairTerms
from qattn.tiles import by_torch, gaussian, when_to_compile
from qattn.tiles.mixture import LOOP
from qattn.tiles.order import kd_order
from qattn.tiles.tiling import Tiling
from qattn.tiles.when_to_compile import Loop, charge, compile_at_first_call, is_due, seconds_until_due

FAR = 100.0


def tiling(points):
    return Tiling(points, kd_order(points))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.float64, 2e-6)])
@pytest.mark.parametrize("channels", [None, 1, 20])
@pytest.mark.parametrize("tol", [1e-7, None])
def test_tiles_by_torch_are_attention(dtype, atol, channels, tol):
    """Two clouds with bandwidths of their own attend to themselves; a third of the keys is absent from the first."""
    points, sigma = torch.stack([sphere(700), 3 * sphere(700)]).to(dtype), torch.tensor([0.2, 0.4], dtype=dtype)
    bias = torch.randn(2, 700, dtype=dtype)
    bias[0, ::3] = -torch.inf
    value = None if channels is None else torch.randn(2, 700, channels, dtype=dtype)
    tiles = tiling(points)
    out, lse = by_torch.attend(tiles, tiles, sigma, value, bias, tol)
    for b in range(2):
        x = points[b].double() / sigma[b].double()
        of_cloud = None if value is None else value[b].double()
        expected_out, expected_lse = dense(x, x, of_cloud, bias[b].double())
        torch.testing.assert_close(lse[b].double(), expected_lse, rtol=0, atol=atol)
        if value is not None:
            torch.testing.assert_close(out[b].double(), expected_out, rtol=0, atol=3 * atol)


def test_rows_far_from_all_keys_and_clouds_without_any():
    query, key = torch.cat([sphere(100), FAR * sphere(30)])[None].repeat(2, 1, 1), sphere(200)[None].repeat(2, 1, 1)
    bias = torch.zeros(2, 200, dtype=torch.float64)
    bias[1] = -torch.inf
    out, lse = by_torch.attend(tiling(query), tiling(key), None, key, bias, 1e-7)
    expected_out, expected_lse = dense(query[0], key[0], key[0])
    torch.testing.assert_close(lse[0], expected_lse, rtol=0, atol=1e-6)
    torch.testing.assert_close(out[0], expected_out, rtol=0, atol=1e-5)
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()


def test_keys_of_small_weight_and_large_value_are_not_left_out():
    """Values 1/m of masses over eight decades, as in the transpose of an operator."""
    points = sphere(2000)
    mass = torch.where(points[:, 0] > 0, 1.0, 1e-8).double()
    value = (1 / mass)[:, None]
    tiles = tiling((points / 0.1)[None])
    out, _ = by_torch.attend(tiles, tiles, None, value[None], mass.log()[None], 1e-6)
    expected, _ = dense(points / 0.1, points / 0.1, value, mass.log())
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=0)


def test_values_keep_their_dtype():
    tiles = tiling(torch.rand(1, 100, 3))
    out, lse = by_torch.attend(tiles, tiles, None, torch.rand(1, 100, 2).bfloat16(), None, 1e-3)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


@pytest.mark.parametrize(("count", "sigma"), [(5000, 0.03), (200, 0.3), (1, 1.0)])
def test_the_estimate_of_near_pairs_is_their_number(count, sigma):
    """The number is that of the tiles that loops list, or a little more, if all tiles are in the sample."""
    points = sphere(count)[None].float()
    tiles, sigmas = tiling(points), torch.tensor([sigma])
    num_tiles, num_pairs = by_torch.count_near(tiles, tiles, sigmas, 1e-3, 10**6)
    counts, _ = gaussian.near_tiles(tiles, tiles, sigmas, torch.zeros(1, count), 1e-3)
    assert 0.98 * int(counts.sum()) <= num_tiles <= 1.1 * int(counts.sum())
    assert 0 < num_pairs <= 64**2 * num_tiles


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.float64, 2e-6)])
@pytest.mark.parametrize("is_self", [True, False])
@pytest.mark.parametrize("tol", [1e-7, None])
def test_sums_of_derivatives_by_torch(dtype, rtol, is_self, tol):
    """Sums over keys and over queries of two clouds with bandwidths of their own, against dense matrices in float64."""
    query = torch.stack([sphere(300), 3 * sphere(300)])
    key = query if is_self else torch.stack([sphere(200), 3 * sphere(200)])
    B, N, M, sigma = 2, 300, key.shape[1], torch.tensor([0.2, 0.4]).double()
    bias, row, column = torch.randn(B, M).double(), torch.randn(B, N, 5).double(), torch.randn(B, M, 5).double()
    bias[0, ::3] = -torch.inf
    scores = -0.5 * torch.cdist(query, key) ** 2 / sigma[:, None, None] ** 2 + bias[:, None]
    shift = scores.logsumexp(-1)
    shift[1, ::5] = torch.inf  # rows without keys
    weights = torch.exp(scores - shift[..., None])
    terms, apart = weights * (row @ column.mT), key[:, None] - query[:, :, None]
    expected = [
        terms.sum(-1),
        (terms[..., None] * apart).sum(2),
        (terms * apart.square().sum(-1)).sum(-1),
        terms.sum(1),
        (terms[..., None] * apart).sum(1),
        weights.mT @ row[..., :4],
    ]
    x = tiling(query.to(dtype))
    tiles = x, x if is_self else tiling(key.to(dtype))
    pairs = PairTerms(row.to(dtype), column.to(dtype), shift.to(dtype), by_column=True, num_values=4)
    rows, *columns = by_torch.differentiate(*tiles, sigma, bias.to(dtype), pairs, tol)
    for found, wanted in zip((*rows, *columns), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=rtol * float(wanted.abs().amax()))
    rows, *columns = by_torch.differentiate(*tiles, sigma, bias.to(dtype), pairs._replace(by_column=False), tol)
    assert columns[:2] == [None, None]
    torch.testing.assert_close(columns[2].double(), expected[5], rtol=0, atol=rtol * float(expected[5].amax()))


@pytest.mark.usefixtures("_cold")
def test_loops_are_due_once_torch_has_taken_as_long_as_the_compiler_would(monkeypatch):
    loop, other = Loop("sort", torch.float32, 1), Loop("sort", torch.float64, 1)
    seconds = seconds_until_due(loop)
    for _ in range(2):  # to ask costs nothing
        assert not is_due(loop, 0.6 * seconds)
    charge(loop, 0.6 * seconds)
    assert is_due(loop, 0.6 * seconds)
    assert not is_due(loop, 0.3 * seconds)
    assert not is_due(other, 0.6 * seconds)
    with compile_at_first_call():
        assert is_due(other, 0.0)
        assert is_due(gaussian.loop_of("attend near", torch.float32, 16), 0.0)
    assert not is_due(other, 0.0)
    assert seconds_until_due(loop) == pytest.approx(0.4 * seconds)
    monkeypatch.setattr(when_to_compile, "is_compiled", lambda task: True)
    assert is_due(other, 0.0)


@pytest.mark.usefixtures("_cold")
@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_a_backward_pass_charges_its_loop_once(method):
    """The charge is what the sums take, once, however often gradients ask how to compute them."""
    loop = gaussian.loop_of("differentiate" if method == "exact" else "differentiate near", torch.float32, 3)
    points, sigma = sphere(300).float().requires_grad_(), torch.tensor(0.3, requires_grad=True)
    out, lse = qattn.GaussianKernel(points, sigma, method=method).attend(torch.zeros(300), points[:, :2])
    before = seconds_until_due(loop)
    (out.sum() + lse.sum()).backward()
    charged = before - seconds_until_due(loop)
    cloud = tiling(points.detach()[None])
    tol = None if method == "exact" else 1e-3
    terms = PairTerms(torch.ones(1, 300, 3), torch.ones(1, 300, 3), lse.detach()[None], True, True, 2)
    gaussian.differentiate(cloud, cloud, sigma.detach()[None], None, terms, tol)
    assert 0 < charged == pytest.approx(before - charged - seconds_until_due(loop))


def test_loops_that_cannot_be_compiled_are_never_due(monkeypatch):
    monkeypatch.setattr(when_to_compile, "why_not_compiled", lambda: "Numba is broken")
    assert not is_due(Loop("sort", torch.float32, 1), 1e9)


def test_tiles_with_and_without_loops(request, monkeypatch):
    """Normalized, applied and differentiated, by loops and by torch: equal within the tolerance."""
    from qattn.tiles.loops import gaussian as loops

    points, signal = sphere(2000), torch.randn(2000, 3, dtype=torch.float64)

    def results():
        x, sigma = points.clone().requires_grad_(), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        q = qattn.diffusion(qattn.GaussianKernel(x, sigma, method="tiles", tol=1e-7), tol=1e-9)
        y = q @ signal
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, sigma))]

    with_loops = results()
    request.getfixturevalue("_cold")
    for name in ("attend_tiles", "sum_tiles", "differentiate_tiles"):
        monkeypatch.setattr(loops, name, None)  # would raise
    for found, expected in zip(results(), with_loops, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().amax()))


@pytest.mark.usefixtures("_cold")
def test_loops_that_are_asked_for_are_not_replaced(monkeypatch):
    monkeypatch.setattr(by_torch, "attend", None)  # would raise
    qattn.diffusion(qattn.GaussianKernel(sphere(300).float(), 0.2, method="tiles", backend="native"))


def test_the_choice_knows_what_is_compiled(request):
    """Many points in a large box, where loops beat FFTs by little: not by the time of the compiler."""
    points = torch.rand(20_000, 3)
    seconds = qattn.GaussianKernel(points, 0.04).choices()[0].seconds
    request.getfixturevalue("_cold")
    cold = qattn.GaussianKernel(points, 0.04).choices()[0]
    assert cold.method == "fourier"
    assert cold.seconds["fourier"] == seconds["fourier"]
    for name in ("exact", "tiles"):
        assert cold.seconds[name] > 5 * seconds[name]


@pytest.mark.usefixtures("_cold")
def test_ffts_do_not_take_the_place_of_loops_for_ever(monkeypatch):
    """Each cloud pays a little more than with loops; together they pay for the compiler, once."""
    monkeypatch.setattr(when_to_compile, "_COMPILER", dict.fromkeys(when_to_compile._COMPILER, 1.0))
    points, loop = torch.rand(20_000, 3), gaussian.loop_of("attend near", torch.float32, 3)
    left = [seconds_until_due(loop)]
    while (kernel := qattn.GaussianKernel(points, 0.03)).method == "fourier":
        assert seconds_until_due(loop) == left[-1]  # to ask which method is taken costs nothing
        kernel.attend(torch.zeros(20_000))
        left.append(seconds_until_due(loop))
        assert left[-1] < left[-2]
    assert 2 < len(left) < 100
    assert qattn.GaussianKernel(points, 0.03).method == "tiles"


def covariances(count):
    turns = 0.1 * torch.randn(count, 3, 3, dtype=torch.float64)
    return turns @ turns.mT


@pytest.mark.usefixtures("_cold")
def test_mixtures_are_exact_until_their_loops_pay(monkeypatch):
    """Each pass pays for its pairs, passes that are differentiated for more; 4-D mixtures have no loops to pay for."""
    points, bias = sphere(300), torch.zeros(300, dtype=torch.float64)
    kernel = qattn.MixtureKernel(points, covariances(300), 0.2)
    seconds = kernel._seconds_by_torch
    monkeypatch.setitem(when_to_compile._COMPILER, "mixture", 8.5 * seconds)
    cold = kernel.attend(bias, points)
    assert seconds_until_due(LOOP) == pytest.approx(7.5 * seconds)
    qattn.MixtureKernel(torch.rand(300, 4), torch.ones(300), 0.2).attend(bias)
    qattn.MixtureKernel(points, covariances(300), 0.2, method="exact").attend(bias)
    assert seconds_until_due(LOOP) == pytest.approx(7.5 * seconds)
    qattn.MixtureKernel(points.clone().requires_grad_(), covariances(300), 0.2).attend(bias).lse.sum().backward()
    assert seconds_until_due(LOOP) == pytest.approx(1.5 * seconds)
    assert kernel.method == "exact"
    kernel.attend(bias)
    assert kernel.method == "tiles"
    torch.testing.assert_close(tuple(kernel.attend(bias, points)), tuple(cold), rtol=0, atol=2e-3)


COLD = """
import torch
from numba.core import event


class Listener(event.Listener):
    def on_start(self, happening):
        print(happening.data["dispatcher"].py_func.__name__)

    def on_end(self, happening):
        pass


event.register("numba:compile", Listener())
import qattn

for sigma in (0.05, 0.01):
    q = qattn.diffusion(torch.rand(20_000, 3), sigma)
    assert (q @ torch.ones(20_000, 1) - 1).abs().mean() < 2e-3
q = qattn.diffusion(qattn.MixtureKernel(torch.rand(1000, 3), 0.01 * torch.rand(1000, 3), 0.1))
assert (q @ torch.ones(1000, 1) - 1).abs().mean() < 2e-3
"""


@pytest.mark.slow
def test_the_first_results_wait_for_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=True)
    assert not done.stdout

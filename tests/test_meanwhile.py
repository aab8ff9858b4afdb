"""A machine on which nothing is compiled: near tiles in plain torch, and what is chosen until it pays to compile."""

import subprocess
import sys

import pytest
import torch
from cases import dense, sphere

import qattn
from qattn.tiles import gaussian, meanwhile, plain
from qattn.tiles.meanwhile import Loop
from qattn.tiles.order import kd_order
from qattn.tiles.tiling import Tiling

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
    out, lse = plain.attend(tiles, tiles, sigma, value, bias, tol)
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
    out, lse = plain.attend(tiling(query), tiling(key), None, key, bias, 1e-7)
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
    out, _ = plain.attend(tiles, tiles, None, value[None], mass.log()[None], 1e-6)
    expected, _ = dense(points / 0.1, points / 0.1, value, mass.log())
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=0)


def test_values_keep_their_dtype():
    tiles = tiling(torch.rand(1, 100, 3))
    out, lse = plain.attend(tiles, tiles, None, torch.rand(1, 100, 2).bfloat16(), None, 1e-3)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


@pytest.mark.parametrize(("count", "sigma"), [(5000, 0.03), (200, 0.3), (1, 1.0)])
def test_the_estimate_of_near_pairs_is_their_number(count, sigma):
    """With all tiles in the sample, near pairs of tiles are those that loops list, or few more."""
    points = sphere(count)[None].float()
    tiles, sigmas = tiling(points), torch.tensor([sigma])
    num_tiles, num_pairs = plain.count_near(tiles, tiles, sigmas, 1e-3, 10**6)
    counts, _ = gaussian.near_tiles(tiles, tiles, sigmas, torch.zeros(1, count), 1e-3)
    assert 0.98 * int(counts.sum()) <= num_tiles <= 1.1 * int(counts.sum())
    assert 0 < num_pairs <= 64**2 * num_tiles


@pytest.mark.usefixtures("_cold")
def test_loops_are_due_once_torch_has_taken_as_long_as_the_compiler_would(monkeypatch):
    loop, other = Loop("sort", torch.float32, 1), Loop("sort", torch.float64, 1)
    seconds = meanwhile.patience(loop)
    assert not meanwhile.is_due(loop, 0.6 * seconds)
    assert meanwhile.is_due(loop, 0.6 * seconds)
    assert not meanwhile.is_due(loop, 0.3 * seconds)  # the call before was not made by torch
    assert not meanwhile.is_due(other, 0.6 * seconds)
    meanwhile.compile_at_first_call()
    assert meanwhile.is_due(other, 0.0)
    assert meanwhile.is_due(gaussian.loop_of("attend near", torch.float32, 16), 0.0)
    monkeypatch.setattr(meanwhile, "_spent", {})
    assert not meanwhile.is_due(other, 0.0)
    monkeypatch.setattr(meanwhile, "is_compiled", lambda task: True)
    assert meanwhile.is_due(other, 0.0)


def test_loops_that_cannot_be_compiled_are_never_due(monkeypatch):
    monkeypatch.setattr(meanwhile, "why_not_compiled", lambda: "Numba is broken")
    assert not meanwhile.is_due(Loop("sort", torch.float32, 1), 1e9)


def test_tiles_with_and_without_loops(request, monkeypatch):
    """Normalized, applied and differentiated, by loops and by torch: equal within the tolerance."""
    points, signal = sphere(2000), torch.randn(2000, 3, dtype=torch.float64)

    def results():
        x, sigma = points.clone().requires_grad_(), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        q = qattn.diffusion(qattn.GaussianKernel(x, sigma, method="tiles", tol=1e-7), tol=1e-9)
        y = q @ signal
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, sigma))]

    with_loops = results()
    request.getfixturevalue("_cold")
    for name in ("attend", "differentiate"):
        monkeypatch.setattr(gaussian, name, None)  # would raise
    for by_torch, by_loops in zip(results(), with_loops, strict=True):
        torch.testing.assert_close(by_torch, by_loops, rtol=1e-4, atol=1e-5 * float(by_loops.abs().amax()))


@pytest.mark.usefixtures("_cold")
def test_loops_that_are_asked_for_are_not_replaced(monkeypatch):
    monkeypatch.setattr(plain, "attend", None)  # would raise
    qattn.diffusion(qattn.GaussianKernel(sphere(300).float(), 0.2, method="tiles", backend="native"))


def test_the_choice_knows_what_is_compiled(request):
    """Many points in a large box, where loops beat FFTs by little: not by the time of the compiler."""
    points = torch.rand(20_000, 3)
    seconds = qattn.GaussianKernel(points, 0.04).choices[0].seconds
    request.getfixturevalue("_cold")
    cold = qattn.GaussianKernel(points, 0.04).choices[0]
    assert cold.method == "fourier"
    assert cold.seconds["fourier"] == seconds["fourier"]
    for name in ("exact", "tiles"):
        assert cold.seconds[name] > 5 * seconds[name]


@pytest.mark.usefixtures("_cold")
def test_ffts_do_not_take_the_place_of_loops_for_ever(monkeypatch):
    """Each cloud pays a little more than with loops; together they pay for the compiler, once."""
    monkeypatch.setattr(meanwhile, "_COMPILER", dict.fromkeys(meanwhile._COMPILER, 1.0))
    points, loop = torch.rand(20_000, 3), gaussian.loop_of("attend near", torch.float32, 3)
    left = [meanwhile.patience(loop)]
    while (kernel := qattn.GaussianKernel(points, 0.03)).method == "fourier":
        assert meanwhile.patience(loop) == left[-1]  # to ask which method is taken costs nothing
        kernel.attend(torch.zeros(20_000))
        left.append(meanwhile.patience(loop))
        assert left[-1] < left[-2]
    assert 2 < len(left) < 100
    assert qattn.GaussianKernel(points, 0.03).method == "tiles"


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
"""


@pytest.mark.slow
def test_the_first_results_wait_for_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=True)
    assert not done.stdout

"""Every CUDA backend on a real device, where there is one."""

from dataclasses import replace

import pytest
import torch
from cases import CASES, DTYPES, ball, dense, make, sphere

from qattn import GaussianKernel, attend, diffusion
from qattn.attention.dispatch import BACKENDS, select
from qattn.attention.dot_product import DotProductBackend
from qattn.attention.inputs import Inputs
from qattn.attention.tensor_cores import is_lift_exact
from qattn.attention.triton import why_not_this_gpu
from qattn.doctor import standard_problem
from qattn.lift import SPLIT_UNIT
from qattn.tiles.device import LIFTED_WEIGHT

# Warnings are shown, and are no errors: torch has some on GPUs, as of TensorFloat32 that is not used.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
CUDA = [name for name in BACKENDS if name != "native"]
PROMISED = ["triton", "sdpa", "flex", "reference"]  # what torch for CUDA brings along


@pytest.fixture
def _takes_triton():
    if reason := why_not_this_gpu(torch.device("cuda")):
        pytest.skip(f"triton: {reason}")


@pytest.mark.parametrize("backend", PROMISED)
def test_promised_backends_are_there(backend, request):
    """A backend that is missing altogether fails here; other tests skip those that do not take some inputs."""
    if backend == "triton":
        request.getfixturevalue("_takes_triton")
    assert BACKENDS[backend].not_supported_reasons(standard_problem(100, torch.float32, "cuda")) == []


@pytest.mark.usefixtures("_takes_triton")
def test_auto_takes_direct_differences():
    for channels in (0, 8):
        assert select(standard_problem(100, torch.float32, "cuda", channels), "auto").name == "triton"


def attend_or_skip(backend, **arguments):
    try:
        return attend(**arguments, backend=backend)
    except NotImplementedError as reasons:
        pytest.skip(str(reasons))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", CUDA)
def test_backend_agrees_with_dense_float64(backend, dtype, case):
    arguments = make(case, dtype, "cuda")
    out, lse = attend_or_skip(backend, **arguments)
    expected_out, expected_lse = dense(**arguments)
    tolerance = BACKENDS[backend].tolerance[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tolerance)
    if out is not None:
        torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=3 * tolerance)


@pytest.mark.parametrize("backend", CUDA)
def test_float32_points_with_float16_values(backend):
    arguments = make(CASES[0], torch.float32, "cuda")
    arguments["value"] = arguments["value"].half()
    out, lse = attend_or_skip(backend, **arguments)
    expected_out, expected_lse = dense(**arguments)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=6e-3)


@pytest.mark.parametrize("backend", CUDA)
@pytest.mark.parametrize("sigma", [0.2, 0.1, 0.05, 0.02])
def test_lse_of_small_bandwidths(backend, sigma):
    """The error is within the backend's estimate, which decides whether it may serve; 1e-4 where nothing cancels."""
    points = (ball(2000) / sigma).float().cuda()
    _, lse = attend_or_skip(backend, query=points, key=points, tol=1e-2)
    bound = 1e-4
    if isinstance(kernel := BACKENDS[backend], DotProductBackend):
        inputs = Inputs(points[None], points[None], tol=1e-2)
        bound = inputs.extent.rounding(kernel.unit_roundoff(inputs))
    torch.testing.assert_close(lse.double(), dense(points, points)[1], rtol=0, atol=bound)


@pytest.mark.usefixtures("_takes_triton")
@pytest.mark.parametrize("channels", [None, 8])
def test_many_pairs_by_tensor_cores(channels):
    """Lifted where the estimate is within `tol`, and within the estimate; from differences where it is not."""
    points = (ball(25_000) / 0.05).float().cuda()
    value = None if channels is None else torch.randn(25_000, channels, device="cuda")
    inputs = Inputs(points[None], points[None], None if value is None else value[None])
    expected_out, expected_lse = dense(points[:256], points, value)
    estimate = inputs.extent.rounding(SPLIT_UNIT) + (0 if value is None else LIFTED_WEIGHT)
    for tol, bound in ((1e-3, estimate), (1e-6, 1e-5)):
        assert is_lift_exact(replace(inputs, tol=tol), len(points) ** 2) == (tol == 1e-3)
        out, lse = attend(points, points, value, backend="triton", tol=tol)
        torch.testing.assert_close(lse[:256].double(), expected_lse, rtol=0, atol=bound)
        if value is not None:
            torch.testing.assert_close(out[:256].double(), expected_out, rtol=0, atol=3 * bound)


@pytest.mark.parametrize("backend", CUDA)
def test_absent_keys(backend):
    arguments = make(CASES[6], torch.float32, "cuda")
    arguments["bias"][..., ::2] = -torch.inf
    arguments["bias"][1] = -torch.inf
    out, lse = attend_or_skip(backend, **arguments)
    expected_out, expected_lse = dense(**arguments)
    tolerance = BACKENDS[backend].tolerance[torch.float32]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tolerance)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=3 * tolerance)


@pytest.mark.parametrize("backend", CUDA)
def test_more_than_65536_rows(backend):
    points = torch.randn(65_536 + 7, 2, device="cuda")
    out, lse = attend_or_skip(backend, query=points, key=points, value=points)
    rows = torch.randint(len(points), (200,), device="cuda")
    expected_out, expected_lse = dense(points[rows], points, points)
    torch.testing.assert_close(lse[rows].double(), expected_lse, rtol=0, atol=1e-4)
    torch.testing.assert_close(out[rows].double(), expected_out, rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", CUDA)
def test_gradients(backend):
    points = torch.randn(300, 3, device="cuda", requires_grad=True)
    out, lse = attend_or_skip(backend, query=points, key=points, value=points)
    (got,) = torch.autograd.grad(out.square().sum() + lse.sum(), points)
    expected_out, expected_lse = dense(points, points, points)
    (expected,) = torch.autograd.grad(expected_out.square().sum() + expected_lse.sum(), points)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_diffusion_there_is_the_diffusion_here():
    points, signal = ball(500).float(), torch.randn(500, 4)
    here = diffusion(points, 0.3, tol=1e-5)
    for there in (diffusion(points.cuda(), 0.3, tol=1e-5), here.to("cuda")):
        torch.testing.assert_close((there @ signal.cuda()).cpu(), here @ signal, rtol=0, atol=1e-3)
        torch.testing.assert_close((there.T @ signal.cuda()).cpu(), here.T @ signal, rtol=0, atol=1e-3)
        assert there.marginal_error.device.type == there.potential.device.type == "cuda"


def test_gradients_through_the_normalization():
    def gradient(device):
        points = torch.linspace(0, 3, 600, device=device).sin().reshape(200, 3).requires_grad_()
        return torch.autograd.grad((diffusion(points, 0.5, tol=1e-5) @ points.square()).sum(), points)[0].cpu()

    torch.testing.assert_close(gradient("cuda"), gradient("cpu"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["tiles", "fourier"])
@pytest.mark.parametrize("channels", [None, 5])
def test_methods_of_the_gaussian_kernel(method, channels):
    """Tiles by our own kernels, Fourier by cufinufft; float32 on the surface of the ball."""
    points = torch.stack([sphere(3000), sphere(3000)]).float().cuda()
    bias = torch.randn(2, 3000, device="cuda")
    value = None if channels is None else torch.randn(2, 3000, channels, device="cuda")
    try:
        kernel = GaussianKernel(points, 0.2, method=method)
    except ValueError as reason:
        pytest.skip(str(reason))
    out, lse = kernel.attend(bias, value)
    expected_out, expected_lse = dense(points / 0.2, points / 0.2, value, bias)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)
    if out is not None:
        torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=3e-3)


def test_tiles_leave_out_what_they_may():
    """The lists of near tiles are found on the device; the native loops on the host say what they leave out."""
    points, signal = ball(30_000).float(), torch.randn(30_000, 2)
    here, there = (
        diffusion(x, 0.05, method="tiles", tol=1e-5) @ s for x, s in ((points, signal), (points.cuda(), signal.cuda()))
    )
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("_takes_triton")
@pytest.mark.parametrize("num_points", [20_000, 100_000])  # the latter may be lifted, for which points are measured
def test_a_pass_of_tiles_does_not_wait(num_points):
    points = ball(num_points).float().cuda()
    kernel, bias = GaussianKernel(points, 0.05, method="tiles"), torch.randn(num_points, device="cuda")
    kernel.attend(bias, points, all_rows=False)  # the first pass measures how long lists are
    try:
        torch.cuda.set_sync_debug_mode("error")
        kernel.attend(bias, points, all_rows=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_million_points():
    points = sphere(1_000_000).float().cuda().requires_grad_()
    q = diffusion(points, 0.003, method="tiles")
    assert (q.kernel_error() <= 1e-3).all()
    (q @ torch.randn(1_000_000, 2, device="cuda")).square().mean().backward()
    assert points.grad.isfinite().all()

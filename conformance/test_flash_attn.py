"""The real flash-attn package behind qattn's adapter: its Triton kernel, interpreted on a CPU, against float64.

What this shows without a GPU: that the adapter calls the public function as the package means it, that the lse comes
back in the layout and base it expects, and how much of float32 points the split lift keeps in a 16-bit kernel. Parts
are float16 throughout, because Triton's interpreter gets bfloat16 wrong.
"""

from collections.abc import Callable
from unittest.mock import Mock

import flash_attn
import pytest
import torch
from conftest import Held
from flash_attn.flash_attn_interface import _flash_attn_forward
from flash_attn.flash_attn_triton_amd import interface_fa
from torch import Tensor

from qattn.attended import Attended
from qattn.attention import dot_product
from qattn.attention.flash_attn import PACKAGES, FlashAttn, attend_with
from qattn.attention.inputs import Inputs
from qattn.lift import lift, pad

# The package registers its operator for CUDA alone; interpreted, the same function takes CPU tensors.
_flash_attn_forward.register_kernel("cpu")(_flash_attn_forward._init_fn)

PACKAGE = next(package for package in PACKAGES if package.module == "flash_attn")
CLOUDS, POINTS = 4, 200  # more points than a block of 128, and no multiple of one


@pytest.fixture
def kernel() -> Mock:
    """The package's function, its calls counted."""
    return Mock(wraps=flash_attn.flash_attn_func)


def normal(*shape: int) -> Tensor:
    """Normal float64 numbers, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def sphere(sigma: float) -> Tensor:
    """Clouds on the unit sphere in units of sigma, in float32."""
    points = normal(CLOUDS, POINTS, 3)
    return (points / points.norm(dim=-1, keepdim=True) / sigma).float()


def given(points: Tensor, value: Tensor | None = None, bias: Tensor | None = None) -> Inputs:
    """Inputs that no rounding disqualifies: the errors are what is measured here."""
    return Inputs(points, points, value, bias, tol=1.0)


def dense_scores(points: Tensor) -> Tensor:
    """−½‖x_i − x_j‖² in float64, (B, N, N)."""
    points = points.double()
    return -0.5 * (points[:, :, None] - points[:, None]).square().sum(-1)


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN counts as infinite."""
    return float((got - expected).abs().nan_to_num(torch.inf).amax())


def sinkhorn(log_mass: Tensor, lse: Callable[[Tensor], Tensor], passes: int) -> Tensor:
    """f ← f − ½(f + lse(f + log m)), whose fixed point has exp(f + lse(f + log m)) = Q1 = 1."""
    potential = torch.zeros_like(log_mass)
    for _ in range(passes):
        potential = potential - 0.5 * (potential + lse(potential + log_mass))
    return potential


def test_the_adapter_runs_the_kernel_of_the_package(kernel: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the public function, which reaches the Triton kernel and not the package's own plain reference."""
    triton_kernel = Mock(wraps=interface_fa.attention_prefill_forward_triton_impl)
    monkeypatch.setattr(interface_fa, "attention_prefill_forward_triton_impl", triton_kernel)
    inputs = given(sphere(0.2))
    attend_with(PACKAGE, kernel, inputs)
    assert kernel.call_count == triton_kernel.call_count == 1
    width = dot_product.width(inputs, split=True, multiple=8)
    for tensor in kernel.call_args.args:  # q, k and v, one head
        assert tensor.dtype == torch.float16
        assert tensor.shape == (CLOUDS, POINTS, 1, width)


def test_the_backend_refuses_a_cpu_and_says_so() -> None:
    """The package is installed and its kernel runs here, but only for this test: `attend` must not offer it."""
    assert FlashAttn().not_supported_reasons(given(sphere(0.2))) == ["device is cpu (takes cuda)"]


# About twice 2⁻²⁴ · ½(2/σ)², the rounding of the largest score in float32: what no lift can do without.
@pytest.mark.parametrize(("sigma", "tolerance"), [(0.2, 1e-5), (0.05, 1e-4), (0.02, 1e-3)])
def test_lse_of_float32_points(kernel: Mock, sigma: float, tolerance: float, held: Held) -> None:
    """The split lift keeps float32 in a kernel that takes float16."""
    points = sphere(sigma)
    attended = attend_with(PACKAGE, kernel, given(points))
    assert kernel.call_count == 1
    assert attended.out is None
    gap = error(attended.lse, dense_scores(points).logsumexp(-1))
    held(f"flash_attn 2: lse, σ = {sigma}", "interpreted", gap, tolerance)


def test_lse_is_lost_without_the_split(kernel: Mock) -> None:
    """The same kernel on points lifted in one piece: why the adapter splits them."""
    points = sphere(0.05)
    lifted = lift(points, points, None)
    query, key = (pad(x.half(), 16)[:, :, None] for x in (lifted.query, lifted.key))
    _, lse, _ = kernel(query, key, key, softmax_scale=1.0, return_attn_probs=True)
    assert error(lse[:, 0] + lifted.row, dense_scores(points).logsumexp(-1)) > 0.1


def test_values_biases_and_absent_keys(kernel: Mock, held: Held) -> None:
    """Float16 values with float32 points; a third of the keys are left out by a bias of −inf."""
    points, value, bias = sphere(0.1), normal(CLOUDS, POINTS, 4).half(), normal(CLOUDS, POINTS).float()
    bias[:, ::3] = -torch.inf
    out, lse = attend_with(PACKAGE, kernel, given(points, value, bias))
    scores = dense_scores(points) + bias.double()[:, None]
    assert kernel.call_count == 1
    assert out is not None
    assert out.dtype == torch.float16
    out_error, lse_error = error(out, scores.softmax(-1) @ value.double()), error(lse, scores.logsumexp(-1))
    held("flash_attn 2: out, float16", "interpreted", out_error, FlashAttn.tolerance[torch.float16])
    held("flash_attn 2: lse, σ = 0.1, absent keys", "interpreted", lse_error, FlashAttn.tolerance[torch.float32])


def test_solving_and_applying_a_small_cloud(kernel: Mock) -> None:
    """A Sinkhorn-normalized diffusion with every sum over points taken by the kernel."""
    passes = 15
    points, value = sphere(0.2), normal(CLOUDS, POINTS, 4).half()
    log_mass = (0.5 * normal(CLOUDS, POINTS)).log_softmax(-1)  # unequal masses, of sum 1

    def attend(bias: Tensor, value: Tensor | None = None) -> Attended:
        return attend_with(PACKAGE, kernel, given(points, value, bias))

    potential = sinkhorn(log_mass.float(), lambda bias: attend(bias).lse, passes)
    out, lse = attend(potential + log_mass.float(), value)
    assert kernel.call_count == passes + 1
    assert out is not None
    row_sums = (potential + lse).exp()  # Q1
    diffused = row_sums[..., None] * out  # Qv

    scores = dense_scores(points)
    expected = sinkhorn(log_mass, lambda bias: (scores + bias[:, None]).logsumexp(-1), passes)
    diffusion = (expected[..., None] + scores + (expected + log_mass)[:, None]).exp()  # Q, (B, N, N)
    assert error(potential, expected) <= 2e-5
    assert error(diffused, diffusion @ value.double()) <= FlashAttn.tolerance[torch.float16]
    assert error(row_sums, torch.ones_like(expected)) <= 2e-5

"""FlashAttention 4 behind qattn's adapter, compiled for the GPU that FLASH_ATTENTION_ARCH names, and emulated.

The package compiles without a GPU, from fake CUDA tensors. For sm_80 what it compiles also runs, on the emulator, with
the numbers that the adapter passes.
"""

import math
import os
import tempfile
from pathlib import Path

ARCHITECTURE = os.environ["FLASH_ATTENTION_ARCH"]
DUMP = Path(tempfile.mkdtemp())
os.environ |= {
    "CUTE_DSL_ARCH": ARCHITECTURE + ("a" if ARCHITECTURE == "sm_90" else ""),
    "FLASH_ATTENTION_NUM_SMS": "132",
    "CUTE_DSL_KEEP_PTX": "1",
    "CUTE_DSL_DUMP_DIR": str(DUMP),
}

import flash_attn.cute  # noqa: E402
import numpy as np  # noqa: E402
import ptx  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from conftest import Held  # noqa: E402
from fake_cuda import allow_fake_cuda_tensors  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from qattn.attention.flash_attn import PACKAGES, FlashAttn, attend_with  # noqa: E402
from qattn.attention.inputs import Inputs  # noqa: E402
from qattn.lift import SPLIT_UNIT, Extent  # noqa: E402

PACKAGE = next(package for package in PACKAGES if package.module == "flash_attn.cute")
ROWS = 128  # of a block


def compile_kernel(channels: int, radius: float) -> tuple[Tensor | None, Tensor]:
    """Let the adapter call the package with fake CUDA tensors, for which it compiles its kernel."""
    allow_fake_cuda_tensors()
    with FakeTensorMode():
        query, key, bias = (torch.empty(2, *n, device="cuda") for n in ((300, 3), (200, 3), (200,)))
        value = torch.empty(2, 200, channels, dtype=torch.float16, device="cuda") if channels else None
        inputs = Inputs(query, key, value, bias)
        inputs.__dict__["extent"] = Extent(radius, radius, 1.0)
        return attend_with(PACKAGE, flash_attn.cute.flash_attn_func, inputs)


@pytest.mark.parametrize("channels", [0, 8, 64])
@pytest.mark.parametrize("radius", [10.0, 200.0], ids=["float16 parts", "bfloat16 parts"])
def test_the_kernel_compiles(channels, radius, held: Held) -> None:
    out, lse = compile_kernel(channels, radius)
    wrong = lse.shape != (2, 300) or lse.dtype != torch.float32 or lse.device.type != "cuda"
    if channels:
        assert out is not None
        wrong = wrong or out.shape != (2, 300, channels) or out.dtype != torch.float16
    held("flash_attn 4: wrong shapes or dtypes", f"compiled, {ARCHITECTURE}", float(wrong), 0)
    assert int(ARCHITECTURE.removeprefix("sm_")) // 10 in PACKAGE.capabilities


def emulated(program: ptx.Program, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, return_lse: bool):
    """Attend as `flash_attn_func` does, in its layout (1, N, heads = 1, E), by the emulator."""
    assert return_lse
    N, M, E = query.shape[1], key.shape[1], query.shape[-1]
    out, lse = np.zeros((N, E), np.float16), np.zeros(N, np.float32)
    arrays = [np.ascontiguousarray(x[0, :, 0].numpy()) for x in (query, key, value)]

    def tensor(array: np.ndarray, size: int) -> ptx.Struct:  # pointer, sizes and strides of rows, heads and batch
        return ptx.Struct("<Qiiiiqqq", [array, size, 1, 1, 0, E, E, size * E])

    sums = ptx.Struct("<Qiiiiqq", [lse, N, 1, 1, 0, N, N])
    tensors = [tensor(x, n) for x, n in zip((*arrays, out), (N, M, M, N), strict=True)]
    grid = -(-N // ROWS), 1, 1
    ptx.launch(program, grid, [*tensors, sums, softmax_scale * math.log2(math.e)], 2**16)
    return torch.from_numpy(out)[None, :, None], torch.from_numpy(lse)[None, None]


@pytest.mark.skipif(ARCHITECTURE != "sm_80", reason="the emulator knows the instructions of sm_80")
@pytest.mark.parametrize("sigma", [0.2, 0.05])
def test_the_compiled_kernel_emulated(sigma, held: Held) -> None:
    """Float32 points, float16 values, a third of the keys absent."""
    for file in DUMP.glob("*.ptx"):
        file.unlink()
    flash_attn.cute.interface._flash_attn_fwd.compile_cache.clear()
    compile_kernel(8, 10.0)
    (file,) = DUMP.glob("*.ptx")
    program = ptx.Program.parse(file.read_text())
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1, 200, 3, generator=generator, dtype=torch.float64)
    points = (points / points.norm(dim=-1, keepdim=True) / sigma).float()
    value, bias = torch.randn(1, 200, 8, generator=generator).half(), torch.randn(1, 200, generator=generator)
    bias[:, ::3] = -torch.inf
    inputs = Inputs(points, points, value, bias, tol=1.0)
    out, lse = attend_with(PACKAGE, lambda *tensors, **options: emulated(program, *tensors, **options), inputs)
    scores = -0.5 * (points.double()[:, :, None] - points.double()[:, None]).square().sum(-1) + bias.double()[:, None]
    evidence, bound = "PTX of sm_80, emulated", inputs.extent.rounding(SPLIT_UNIT)
    held(f"flash_attn 4: lse, σ = {sigma}", evidence, float((lse - scores.logsumexp(-1)).abs().amax()), bound)
    error = float((out - scores.softmax(-1) @ value.double()).abs().amax())
    held("flash_attn 4: out, float16", evidence, error, FlashAttn.tolerance[torch.float16])

"""FlashAttention 2 behind qattn's adapter: the CUDA kernel of the package, compiled by nvcc, its PTX emulated.

flash_attn_2_32.ptx.gz is made by flash_attn_2.sh: the kernel for float16 and heads of up to 32, to which the package
pads the 16 columns of the split lift.
"""

import math
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from cases import dense
from conftest import Held
from other_kernels import artefact
from torch import Tensor

from qattn.attention.flash_attn import PACKAGES, FlashAttn, attend_with
from qattn.attention.inputs import Inputs
from qattn.lift import SPLIT_UNIT

PACKAGE = next(package for package in PACKAGES if package.module == "flash_attn")
BLOCK, SHARED = 128, 24576  # queries, and keys, of a block; its bytes of shared memory
# Params of the kernel in C++: pointers; strides of batches, rows and heads; heads; results; sizes; the scale; lists;
# dropout, windows, a cap, random numbers, flags, splits and slopes.
LAYOUT = "<3Q 9q 3i4x 2Q 3q 3Q 10i 2f 5Q 108x f B3x 2f 2i f 32x Q 4B i Qq 2B6x"


@pytest.fixture(scope="module")
def program() -> ptx.Program:
    return ptx.Program.parse(artefact("flash_attn_2_32"))


def emulated(program: ptx.Program, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, **options: Any):
    """Attend as `flash_attn_func` does, in its layout (1, N, heads = 1, E), by the emulator."""
    assert options == {"return_attn_probs": True}
    q, k, v = (np.ascontiguousarray(x[0, :, 0].numpy()) for x in (query, key, value))
    (N, E), M = q.shape, len(k)
    out, lse = np.zeros((N, E), np.float16), np.zeros(N, np.float32)
    rounded = [-(-n // BLOCK) * BLOCK for n in (N, M)]
    fields = [
        q, k, v, N * E, M * E, M * E, E, E, E, E, E, E, 1, 1, 1, out, 0, N * E, E, E, 0, lse, 0,
        1, N, M, 0, E, *rounded, 32, 0, N, softmax_scale, softmax_scale * math.log2(math.e), 0, 0, 0, 0, 0,
        1.0, 255, 1.0, softmax_scale, -1, -1, 0.0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0,
    ]  # fmt: skip
    ptx.launch(program, (rounded[0] // BLOCK, 1, 1), [ptx.Struct(LAYOUT, fields)], SHARED)
    return torch.from_numpy(out)[None, :, None], torch.from_numpy(lse)[None, None], None


@pytest.mark.parametrize("sigma", [0.2, 0.05])
def test_split_lift(program, sigma, held: Held) -> None:
    """Float32 points, float16 values, a third of the keys absent."""
    torch.manual_seed(0)
    points = torch.randn(1, 200, 3, dtype=torch.float64)
    points = (points / points.norm(dim=-1, keepdim=True) / sigma).float()
    value, bias = torch.randn(1, 200, 8).half(), torch.randn(1, 200)
    bias[:, ::3] = -torch.inf
    inputs = Inputs(points, points, value, bias, tol=1.0)
    out, lse = attend_with(PACKAGE, lambda *tensors, **options: emulated(program, *tensors, **options), inputs)
    expected_out, expected_lse = dense(points, points, value, bias)
    evidence, bound = "PTX of sm_80, emulated", inputs.extent.rounding(SPLIT_UNIT)
    held(f"flash_attn 2: lse, σ = {sigma}", evidence, float((lse - expected_lse).abs().amax()), bound)
    error = float((out - expected_out).abs().amax())
    held("flash_attn 2: out, float16", evidence, error, FlashAttn.tolerance[torch.float16])

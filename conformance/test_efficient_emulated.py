"""The float32 kernel of torch for CUDA behind the `sdpa` adapter: compiled from torch's headers, its PTX emulated.

efficient.ptx.gz is made by efficient.sh. The kernel multiplies in 3×TF32, so this holds the rounding that qattn assumes
of it, by which `sdpa` and `xformers` refuse inputs.
"""

import gzip
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ptx
import pytest
import torch
from cases import dense
from conftest import Held
from torch import Tensor

from qattn.attention import dot_product, sdpa
from qattn.attention.inputs import Inputs

QUERIES, WARPS, SHARED = 64, 4, 100_000  # of a block
# Params of the kernel in C++: pointers, offsets and sizes, strides of rows and heads, strides of batches, batches.
LAYOUT = "<7Q I4x 3Q i f 5i B3x 8i 5q 2i 72x"


@pytest.fixture(scope="module")
def program() -> ptx.Program:
    return ptx.Program.parse(gzip.decompress((Path(__file__).parent / "efficient.ptx.gz").read_bytes()).decode())


def emulated(program: ptx.Program, query: Tensor, key: Tensor, value: Tensor, *options: Any, scale: float):
    """Attend as the operator of torch does, in its layout (1, heads = 1, N, E), by the emulator."""
    assert options == (None, True)
    q, k, v = (np.ascontiguousarray(x[0, 0].numpy()) for x in (query, key, value))
    (N, E), (M, C) = q.shape, v.shape
    out, lse = np.zeros((N, C), np.float32), np.zeros(-(-N // 32) * 32, np.float32)
    fields = [
        q, k, v, 0, 0, 0, 0, 0, out, 0, lse, 0, scale, E, C, N, M, M, 0,
        E, E, C, 0, C, E, E, C, 0, N * E, M * E, M * C, 0, 1, 1,
    ]  # fmt: skip
    ptx.launch(program, (-(-N // QUERIES), 1, 1), [ptx.Struct(LAYOUT, fields)], SHARED, width=32)
    return torch.from_numpy(out)[None, None], torch.from_numpy(lse)[None, None]


@pytest.mark.parametrize("sigma", [0.2, 0.05])
def test_float32(program, sigma, held: Held) -> None:
    torch.manual_seed(0)
    points = torch.randn(1, 100, 3, dtype=torch.float64)
    points = (points / points.norm(dim=-1, keepdim=True) / sigma).float()
    value, bias = torch.randn(1, 100, 8), torch.randn(1, 100)
    bias[:, ::3] = -torch.inf
    inputs = Inputs(points, points, value, bias, tol=1.0)
    operator = mock.Mock(side_effect=lambda *a, **k: emulated(program, *a, **k))
    with mock.patch.object(sdpa.torch.ops.aten, "_scaled_dot_product_efficient_attention", operator):
        out, lse = sdpa._cuda_efficient(inputs)
    assert operator.call_count == 1
    expected_out, expected_lse = dense(points, points, value, bias)
    evidence, bound = "PTX of sm_80, emulated", inputs.extent.rounding(dot_product._UNIT_3XTF32)
    held(f"sdpa: float32, lse, σ = {sigma}", evidence, float((lse - expected_lse).abs().amax()), bound)
    held(f"sdpa: float32, out, σ = {sigma}", evidence, float((out - expected_out).abs().amax()), bound)

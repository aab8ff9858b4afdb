"""The split-K kernels of xformers and of mslk behind qattn's adapter, interpreted on a CPU, against float64.

Both packages dispatch by device to CUDA alone, so the tests name the operator and let it take CPU tensors. Parts are
float16 throughout, because Triton's interpreter gets bfloat16 wrong.
"""

import functools
import importlib
import logging
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from conftest import Held
from torch import Tensor

from qattn.attention.inputs import Inputs
from qattn.attention.xformers import Xformers, attend_with
from qattn.lift import SPLIT_UNIT

logging.disable(logging.WARNING)  # xformers says that its extension is not built for this torch


def kernels(package: str) -> tuple[SimpleNamespace, Mock]:
    """Return the `fmha` of a package with its Triton kernel alone, and its calls counted."""
    with patch.object(torch.ops, "load_library", lambda path: None):  # libraries for CUDA, which is not there
        fmha = importlib.import_module(package)
        operator = importlib.import_module(f"{package}.triton_splitk").FwOp
    operator.SUPPORTED_DEVICES = {"cuda", "cpu"}
    calls = Mock(wraps=operator.apply)
    function = functools.partial(fmha.memory_efficient_attention_forward_requires_grad, op=operator)
    with_calls = patch.object(operator, "apply", calls)

    def attend(*tensors: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        with with_calls:
            return function(*tensors, scale=scale)

    return SimpleNamespace(memory_efficient_attention_forward_requires_grad=attend), calls


@pytest.mark.parametrize("package", ["xformers.ops.fmha", "mslk.attention.fmha"])
@pytest.mark.parametrize("sigma", [0.2, 0.05])
def test_split_k(package, sigma, held: Held) -> None:
    """Float32 points by the split lift, float16 values, a third of the keys absent."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(2, 100, 3, generator=generator, dtype=torch.float64)
    points = (points / points.norm(dim=-1, keepdim=True) / sigma).float()
    value = torch.randn(2, 100, 4, generator=generator).half()
    bias = torch.randn(2, 100, generator=generator)
    bias[:, ::3] = -torch.inf
    inputs = Inputs(points, points, value, bias, tol=1.0)
    fmha, calls = kernels(package)
    out, lse = attend_with(fmha, inputs)
    assert calls.call_count == 1
    scores = -0.5 * (points.double()[:, :, None] - points.double()[:, None]).square().sum(-1) + bias.double()[:, None]
    path = f"{package.split('.')[0]}: split-K"
    bound = inputs.extent.rounding(SPLIT_UNIT)
    held(f"{path}, lse, σ = {sigma}", "interpreted", float((lse - scores.logsumexp(-1)).abs().amax()), bound)
    error = float((out - scores.softmax(-1) @ value.double()).abs().amax())
    held(f"{path}, out, float16", "interpreted", error, Xformers.tolerance[torch.float16])

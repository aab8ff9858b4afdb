"""The `flex` backend on CUDA, end to end: Inductor writes its CUDA code on a CPU, and Triton's interpreter runs it."""

from unittest import mock

import pytest
import torch
from cases import dense
from conftest import Held
from pretended_cuda import Twins, interpreted, without_twins
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qattn.attended import Attended
from qattn.attention import flex
from qattn.attention.inputs import BlockLists, Inputs


def on_pretended_cuda(inputs: Inputs) -> tuple[Attended, list[str]]:
    """Attend by the CUDA path of flex; return the numbers, and the kernels that were launched."""
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    compiled, twins = without_twins(flex._compiled()), Twins()

    def fake(x: Tensor | None) -> Tensor | None:
        return None if x is None else twins.fake(x)

    with interpreted(twins) as launched, FakeTensorMode(allow_non_fake_inputs=True):
        lists = inputs.blocks and BlockLists(*map(fake, inputs.blocks[:2]), inputs.blocks.size)
        given = Inputs(*map(fake, inputs.tensors), blocks=lists)
        with twins, mock.patch.object(flex, "_compiled", return_value=compiled):
            out, lse = flex._cuda(given)
        assert lse.device.type == "cuda"
    flex._compiled.cache_clear()
    return Attended(twins.real(out), twins.real(lse)), launched


@pytest.mark.parametrize("channels", [0, 8])
def test_all_keys(channels, held: Held) -> None:
    torch.manual_seed(0)
    query, key, bias = 3 * torch.randn(2, 200, 3), 3 * torch.randn(2, 150, 3), torch.randn(2, 150)
    bias[:, ::3] = -torch.inf
    value = torch.randn(2, 150, channels) if channels else None
    (out, lse), launched = on_pretended_cuda(Inputs(query, key, value, bias, torch.tensor([0.8, 1.2])))
    assert sum("flex_attention" in name for name in launched) == 1
    scale = torch.tensor([0.8, 1.2]).double()[:, None, None]
    expected_out, expected_lse = dense(query.double() / scale, key.double() / scale, value, bias)
    held("flex: Inductor's code for CUDA, lse", "interpreted", float((lse - expected_lse).abs().amax()), 1e-5)
    if channels:
        error = float((out - expected_out).abs().amax())
        held("flex: Inductor's code for CUDA, out", "interpreted", error, 1e-5)


def test_lists_of_blocks(held: Held) -> None:
    """Exactly the listed blocks are attended to, and no others."""
    torch.manual_seed(0)
    points, value, size = torch.randn(1, 256, 3), torch.randn(1, 256, 4), 64
    counts = torch.tensor([[1, 2, 4, 3]], dtype=torch.int32)
    blocks = torch.tensor([[[2, 0, 0, 0], [0, 3, 0, 0], [3, 1, 0, 2], [0, 1, 2, 0]]], dtype=torch.int32)
    (out, lse), launched = on_pretended_cuda(Inputs(points, points, value, blocks=BlockLists(counts, blocks, size)))
    assert sum("flex_attention" in name for name in launched) == 1
    for row in range(4):
        keys = torch.cat([torch.arange(b * size, (b + 1) * size) for b in blocks[0, row, : counts[0, row]].tolist()])
        rows = slice(row * size, (row + 1) * size)
        expected_out, expected_lse = dense(points[0, rows], points[0, keys], value[0, keys])
        for name, got, expected in (("lse", lse, expected_lse), ("out", out, expected_out)):
            error = float((got[0, rows] - expected).abs().amax())
            held(f"flex: lists of blocks on CUDA, {name}", "interpreted", error, 1e-5)

"""The CUDA operators of torch on fake tensors: their schemas take what we pass, and we read what they return.

No kernel runs; the numbers are tested where a GPU is (test_gpu.py).
"""

import pytest
import torch
from cases import slow
from fake_cuda import Indexing, Recorder
from torch._subclasses.fake_tensor import FakeTensorMode

from qattn.attended import PairTerms
from qattn.attention import sdpa
from qattn.attention.inputs import Inputs
from qattn.lift import Extent


def fake_inputs(dtype, channels, has_bias=True, batch=2, n=50, m=70, radius=10.0):
    def empty(*shape, dtype=dtype):
        return torch.empty(batch, *shape, dtype=dtype, device="cuda")

    value = empty(m, channels) if channels else None
    bias = empty(m, dtype=torch.float32) if has_bias else None
    points = torch.float32 if radius > 10 and channels else dtype
    result = Inputs(empty(n, 3, dtype=points), empty(m, 3, dtype=points), value, bias)
    result.__dict__["extent"] = Extent(radius, radius, 1.0)
    return result


@pytest.mark.parametrize("channels", [0, slow(1), 4, slow(9), slow(70)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_memory_efficient_attention(channels, has_bias):
    with FakeTensorMode(), Recorder() as recorder, Indexing():
        out, lse = sdpa.Sdpa().attend(fake_inputs(torch.float32, channels, has_bias))
        [(name, (query, key, value, mask, wants_lse), options, result)] = recorder.calls
        assert "_scaled_dot_product_efficient_attention" in name
        assert (mask, wants_lse, options) == (None, True, {"scale": 1.0})
        assert query.shape[-1] == key.shape[-1]
        assert query.shape[-1] % 4 == 0
        assert value.shape[-1] % 4 == 0
        assert value.shape[-1] >= max(channels, 4)
        if channels == 0:
            assert value.shape[-1] == 4
        assert result[1].shape == (2, 1, 64)  # rows padded to a multiple of 32
        assert lse.shape == (2, 50)
        assert lse.dtype == torch.float32
        assert lse.device.type == "cuda"
        assert out is None if channels == 0 else out.shape == (2, 50, channels)


@pytest.mark.parametrize("channels", [0, 1, 8, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("radius", "parts"), [(10.0, torch.float16), (200.0, torch.bfloat16)])
def test_flash_attention(channels, dtype, radius, parts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with FakeTensorMode(), Recorder() as recorder, Indexing():
        out, lse = sdpa.Sdpa().attend(fake_inputs(dtype, channels, radius=radius))
        [(name, tensors, options, result)] = recorder.calls
        assert "_scaled_dot_product_flash_attention" in name
        assert options == {"scale": 1.0}
        assert len({tensor.shape[-1] for tensor in tensors}) == 1
        assert tensors[0].shape[-1] % 8 == 0
        assert {tensor.dtype for tensor in tensors} == {parts}
        assert result[1].shape == (2, 1, 50)
        assert lse.shape == (2, 50)
        assert lse.dtype == torch.float32
        if channels:
            assert out.shape == (2, 50, channels)
            assert out.dtype == dtype


@pytest.mark.parametrize("channels", [1, slow(9), 70])
def test_backward_of_memory_efficient_attention(channels):
    with FakeTensorMode(), Recorder() as recorder, Indexing():
        inputs = fake_inputs(torch.float32, channels)
        assert sdpa.Sdpa().can_differentiate(inputs)
        row, column = (x.new_empty(2, n, channels) for x, n in ((inputs.query, 50), (inputs.key, 70)))
        shift = row.new_empty(2, 50)
        terms = PairTerms(row, column, shift, by_column=True, num_values=channels)
        sums = sdpa.Sdpa().pair_sums(inputs, terms)
        [(name, arguments, options, result)] = recorder.calls
        assert "_scaled_dot_product_efficient_attention_backward" in name
        *tensors, mask, averages, lse, _, _, dropout, needed = arguments
        width = -(-max(6, channels) // 16) * 16
        assert [tuple(x.shape) for x in tensors] == [(2, 1, n, width) for n in (50, 50, 70, 70)]
        assert (mask, dropout, options) == (None, 0.0, {"scale": 1.0})
        assert needed == [True, True, True, False]
        assert averages.shape == tensors[0].shape
        assert lse.shape == (2, 1, 64)  # rows padded to a multiple of 32, as the forward returns them
        assert [tuple(x.shape) for x in result[:3]] == [(2, 1, n, width) for n in (50, 70, 70)]
        total, first, second = sums.rows
        assert (total.shape, first.shape, second.shape) == ((2, 50), (2, 50, 3), (2, 50))
        assert sums.column_first.shape == (2, 70, 3)
        assert sums.values.shape == (2, 70, channels)

"""The kernels of the `triton` backend as operators: `torch.compile` takes them into one graph with what surrounds them.

Inductor writes the whole code for an A100 on fake CUDA tensors. That code is read here, not run.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Held
from pretended_cuda import pretended, written_by_inductor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qattn.attended import PairTerms
from qattn.tiles import device
from qattn.tiles.device import DeviceTiling


def compiled_code(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """Compile a function of CUDA tensors of these shapes as one graph, and return its code."""

    def call() -> None:
        torch.compile(function, fullgraph=True)(*(torch.empty(shape, device="cuda") for shape in shapes))

    return written_by_inductor(call)


def launches(code: str) -> Counter[str]:
    """Count the launches of each kernel of our own."""
    names = "sum_blocks", "attend_blocks", "sum_values", "differentiate_blocks"
    return Counter(name for name in names for _ in re.findall(rf"\n +{name}_\d+\.run\(", code))


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    out, lse = device.attend(DeviceTiling(query), DeviceTiling(key), None, value, bias)
    assert out is not None
    return out.square().sum(-1) + lse, device.attend(DeviceTiling(key), DeviceTiling(query), None, None, None).lse


def _differentiate(query: Tensor, key: Tensor, row: Tensor, column: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    terms = PairTerms(row, column, shift, by_column=True, num_values=3)
    sums = device.differentiate(DeviceTiling(query), DeviceTiling(key), None, None, terms)
    return sums.rows.first.sum(-1), sums.column_first, sums.values  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (_attend, [(2, 100, 3), (2, 70, 3), (2, 70, 8), (2, 70)], {"attend_blocks": 1, "sum_blocks": 1}),
        (
            _differentiate,
            [(2, 100, 3), (2, 70, 3), (2, 100, 4), (2, 70, 4), (2, 100)],
            {"differentiate_blocks": 2, "sum_values": 1},
        ),
    ],
)
def test_one_graph_holds_the_kernels(function, shapes, expected, held: Held) -> None:
    found = launches(compiled_code(function, *shapes))
    missing = float(sum((Counter(expected) - found).values()) + sum((found - Counter(expected)).values()))
    held("triton: torch.compile, one graph, launches that differ", "code written by Inductor, sm_80", missing, 0)


def test_kernels_are_launched_on_the_gpu_of_their_tensors() -> None:
    """Kernels run on the GPU of their points, which need not be the current one."""
    with (
        pretended(),
        FakeTensorMode(),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()) as entered,
    ):
        for index, count in ((0, 0), (1, 4)):  # lse, and three passes over sums of derivatives
            points, value = (torch.empty(1, 100, columns, device=f"cuda:{index}") for columns in (3, 4))
            terms = PairTerms(value, value, points.new_empty(1, 100), by_column=True, num_values=3)
            cloud = DeviceTiling(points)
            device.attend(cloud, cloud, None, None, None)
            device.differentiate(cloud, cloud, None, None, terms)
            assert entered.mock_calls == [mock.call(torch.device("cuda:1"))] * count


def test_fake_tensors_pass() -> None:
    """Shapes and dtypes without a device."""
    with pretended(), FakeTensorMode():
        out, lse = _attend(
            *(torch.empty(shape, device="cuda") for shape in ((2, 100, 3), (2, 70, 3), (2, 70, 8), (2, 70)))
        )
    assert (out.shape, out.dtype, out.device.type) == ((2, 100), torch.float32, "cuda")
    assert lse.shape == (2, 70)

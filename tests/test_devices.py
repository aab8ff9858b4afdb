"""The GPU on which kernels are launched: that of the tensors."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qattn._devices import on_gpu_of


@pytest.mark.parametrize(
    ("device", "count", "current", "expected"),
    [
        ("cuda:1", 2, 0, [torch.device("cuda:1")]),
        ("cuda:0", 2, 1, [torch.device("cuda:0")]),
        ("cuda:1", 2, 1, []),
        ("cuda:0", 1, None, []),  # which is not asked
        ("cpu", 2, None, []),
    ],
)
def test_another_gpu_becomes_the_current_one(device, count, current, expected, monkeypatch):
    entered = []

    def entering(device):
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: {0: 0, 1: 1}[current])
    monkeypatch.setattr(torch.cuda, "device", entering)
    with FakeTensorMode(), on_gpu_of(torch.empty(2, device=device)):
        assert entered == expected

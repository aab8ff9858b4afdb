"""The GPU on which kernels are launched."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["on_gpu_of"]


def on_gpu_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of a tensor the current one, on which Triton launches kernels, if it is another."""
    if x.device.type == "cuda" and torch.cuda.device_count() > 1 and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()

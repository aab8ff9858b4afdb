"""Corrections of Triton's interpreter; no tests."""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["products_of_bfloat16"]


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply numbers of bfloat16, which the interpreter keeps as integers, and would multiply as such (3.7.1)."""
    create_dot = InterpreterBuilder.create_dot

    def decoded(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)

    def multiply(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *options: Any) -> TensorHandle:
        return create_dot(self, decoded(a), decoded(b), *options)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply)

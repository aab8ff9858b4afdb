"""What the backends with dot-product kernels share: lifting the inputs for such a kernel, and reading its results.

A kernel computes out = softmax(q̃ k̃ᵀ) ṽ and the lse of q̃ k̃ᵀ. It is given lifted points, in one piece or split into
16-bit parts, padded to the widths it is fast at; its lse then lacks the row constant of the lift, and its values may
have been scaled into the range of float16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.inputs import Inputs
from qattn.lift import lift, pad, part_dtype, scale_values, split_columns, split_lift

__all__ = ["DotProduct", "prepare", "reasons", "wants_sixteen_bits", "width"]


def wants_sixteen_bits(inputs: Inputs) -> bool:
    """Whether the values are 16-bit, or the points where there are none: then a 16-bit kernel loses nothing."""
    return (inputs.query if inputs.value is None else inputs.value).dtype in (torch.float16, torch.bfloat16)


def width(inputs: Inputs, *, split: bool, multiple: int) -> int:
    """The common width of q̃, k̃ and ṽ."""
    D = inputs.key.shape[-1]
    columns = split_columns(D, part_dtype(inputs.extent)) if split else D + 1
    return -(-max(columns, inputs.channels) // multiple) * multiple


def reasons(inputs: Inputs) -> list[str]:
    """Why no dot-product kernel can serve: another score, or more cancellation than was asked for."""
    if not inputs.is_gaussian:
        return ["the score is not the Gaussian one, so not a dot product of lifted points"]
    if (error := inputs.extent.rounding(inputs.dtype)) > inputs.tol:
        dtype = str(inputs.dtype).removeprefix("torch.")
        return [
            f"lifting would lose about {error:.1e} of lse to cancellation in {dtype}, more than tol = {inputs.tol:.1e}"
        ]
    return []


@dataclass(frozen=True)
class DotProduct:
    """Inputs for a dot-product kernel with scale 1.

    Attributes:
        query: Shape (B, N, E).
        key: Shape (B, M, E).
        value: Shape (B, M, E); the key, which is at hand, if only the lse is wanted.
    """

    inputs: Inputs
    query: Tensor
    key: Tensor
    value: Tensor
    row: Tensor
    scale: Tensor | None

    def attended(self, out: Tensor, lse: Tensor) -> Attended:
        """Reads the kernel's out (B, N, ≥ C) and lse (B, ≥ N): some kernels pad the rows of lse."""
        value = self.inputs.value
        lse = lse[:, : self.row.shape[1]].to(self.row.dtype) + self.row
        if value is None:
            return Attended(None, lse)
        mean = out[..., : value.shape[-1]]
        return Attended((mean if self.scale is None else self.scale * mean).to(value.dtype), lse)


def prepare(inputs: Inputs, *, split: bool, multiple: int) -> DotProduct:
    """Lifts, in 16-bit parts if `split`, and pads to a multiple of `multiple`."""
    E = width(inputs, split=split, multiple=multiple)
    query, key = inputs.embedded
    bias = None if inputs.bias is None else inputs.bias.to(inputs.dtype)
    scale = None
    if split:
        dtype = part_dtype(inputs.extent)
        lifted = split_lift(query, key, bias, dtype)
    else:
        dtype = inputs.dtype
        lifted = lift(query, key, bias)
    lifted_key = pad(lifted.key, E)
    if inputs.value is None:
        value = lifted_key
    elif split:
        value, scale = scale_values(inputs.value, dtype)
        value = pad(value, E)
    else:
        value = pad(inputs.value.to(dtype), E)
    return DotProduct(inputs, pad(lifted.query, E), lifted_key, value, lifted.row, scale)

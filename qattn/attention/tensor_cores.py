"""The choice between exact differences of points and products of lifted points, which tensor cores compute."""

import torch

from qattn.attention.inputs import Inputs
from qattn.lift import SPLIT_UNIT, part_dtype
from qattn.tiles.device import LIFTED_WEIGHT

__all__ = ["MANY_PAIRS", "is_lift_exact"]

MANY_PAIRS = 2**29  # from which tensor cores save more than lifting the points costs, by benchmarks/gpu_model.py
_LIFTED_DIMENSIONS = 7  # whose lifted points have up to 32 columns


def is_lift_exact(inputs: Inputs, num_pairs: int) -> bool:
    """Return whether tensor cores may compute the exponents: a lift pays off for these pairs, and is exact to `tol`."""
    if num_pairs < MANY_PAIRS or inputs.query.shape[-1] > _LIFTED_DIMENSIONS:
        return False
    extent = inputs.extent
    relative = extent._replace(bias=2 * extent.bias)  # to the largest bias
    error = extent.rounding(SPLIT_UNIT) + (0.0 if inputs.value is None else LIFTED_WEIGHT)
    return part_dtype(relative) == torch.float16 and error <= inputs.tol

"""Gaussian mixtures and splats."""

from typing import Any

import torch
from torch import Tensor

from qattn._checks.numbers import finite, floating, shape_of

__all__ = ["covariances", "splats", "weights"]


def covariances(numbers: Any, means: Tensor) -> tuple[Tensor, str]:
    """Covariances of means (*batch, N, d), and their kind: "isotropic", "diagonal" or "full"."""
    tensor = floating("covariances", numbers).to(means)
    *batch, d = means.shape
    shapes = {"isotropic": (*batch,), "diagonal": (*batch, d), "full": (*batch, d, d)}
    kind = next((kind for kind, shape in shapes.items() if tensor.shape == shape), None)
    if kind is None:
        raise ValueError(
            f"`covariances` should have shape {shapes['isotropic']} for variances, {shapes['diagonal']} for diagonal "
            f"matrices or {shapes['full']} for full ones, with means {shape_of(means)}; got {shape_of(tensor)}."
        )
    finite("covariances", tensor, "Drop those components.")
    found = tensor.detach()
    if kind == "full":
        gap, size = (found - found.mT).abs().amax(), found.abs().amax()
        if gap > 1e-5 * size:
            raise ValueError(
                f"`covariances` should be symmetric; some entries differ by {float(gap):.3g} from their mirror image. "
                "Take `(covariances + covariances.mT) / 2`."
            )
        found = torch.linalg.eigvalsh(found.double())
    if (found < -1e-6 * found.abs().amax(-1, keepdim=True)).any() or (kind != "full" and (found < 0).any()):
        raise ValueError(
            "`covariances` should have no negative variance in any direction; some do. "
            "Give variances, and not their logarithms, nor precisions of the wrong sign."
        )
    return tensor, kind


def weights(numbers: Any, means: Tensor) -> Tensor:
    """Weights (*batch, N) ≥ 0 of components with means (*batch, N, d); equal by default."""
    dtype = torch.promote_types(means.dtype, torch.float32)
    if numbers is None:
        return torch.ones(means.shape[-2], dtype=dtype, device=means.device)
    tensor = floating("weights", numbers).to(means.device, dtype)
    if tensor.shape not in (means.shape[:-1], means.shape[-2:-1]):
        raise ValueError(
            f"`weights` should have shape {tuple(means.shape[:-1])}, one a component; got {shape_of(tensor)}."
        )
    finite("weights", tensor, "Components without weight get 0.")
    if (tensor < 0).any() or (tensor.sum(-1) == 0).any():
        raise ValueError(
            "`weights` should be 0 or more, with a positive sum. For logits, take `torch.sigmoid` of them."
        )
    return tensor


def splats(means: Tensor, log_scales: Any, quaternions: Any, logit_opacities: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log scales (N, 3), quaternions (N, 4) and logits (N,) of splats at means (N, 3)."""
    N = means.shape[0]
    if means.shape != (N, 3):
        raise ValueError(f"`means` of splats should have shape (N, 3); got {shape_of(means)}.")
    given = {
        "log_scales": (log_scales, (N, 3)),
        "quaternions": (quaternions, (N, 4)),
        "logit_opacities": (logit_opacities, (N,)),
    }
    tensors = []
    for name, (numbers, shape) in given.items():
        tensor = floating(name, numbers).to(means)
        if name == "logit_opacities" and tensor.shape == (N, 1):
            tensor = tensor[:, 0]
        if tensor.shape != shape:
            raise ValueError(f"`{name}` of {N} splats should have shape {shape}; got {shape_of(tensor)}.")
        finite(name, tensor, "Drop those splats.")
        tensors.append(tensor)
    if (tensors[1] == 0).all(-1).any():
        raise ValueError("`quaternions` should not be 0: those of no rotation are (1, 0, 0, 0).")
    return tensors[0], tensors[1], tensors[2]

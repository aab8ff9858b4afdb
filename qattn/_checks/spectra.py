"""Eigenpairs, signatures and maps."""

from typing import Any

import torch
from torch import Tensor

from qattn._checks.numbers import as_tensor, finite, integer, not_negative, shape_of

__all__ = [
    "features",
    "frequencies",
    "frequencies_suffice",
    "functional_map",
    "point_map",
    "sizes_of_bases",
    "times",
    "vectors",
    "whole_part",
]


def whole_part(t: float, spectrum: Any) -> int:
    """How often an operator is applied for its power t ≥ 0; a fraction is left to a spectrum."""
    not_negative("t", t)
    if int(t) != t and spectrum is None:
        raise ValueError(
            f"`t` should be an integer; got {t}. For a fraction of it, give the modes to take it of: "
            "`q.power(t, signal, spectrum=qattn.eigsh(q, k))`."
        )
    return int(t)


def vectors(name: str, numbers: Any, like: Tensor) -> Tensor:
    """Vectors (N, n) to start from, of the dtype and on the device of one (N,)."""
    tensor = as_tensor(name, numbers)
    if tensor.ndim != 2 or len(tensor) != len(like):
        raise ValueError(f"`{name}` should be a spectrum or vectors of shape ({len(like)}, n); got {shape_of(tensor)}.")
    finite(name, tensor, "Start without it.")
    return tensor.to(like)


def frequencies(name: str, numbers: Any, vectors: Tensor) -> Tensor:
    """Eigenvalues (k,) of a Laplacian, ascending, one for each of eigenvectors (N, k)."""
    tensor, k = as_tensor(name, numbers).to(vectors), vectors.shape[-1]
    if tensor.shape != (k,):
        raise ValueError(
            f"`{name}` should have shape ({k},), one for each eigenvector of the spectrum; got {shape_of(tensor)}."
        )
    finite(name, tensor, "Take fewer eigenpairs: an eigenvalue of Q of 0 or less stands for none of a Laplacian.")
    if (torch.diff(tensor) < 0).any():
        raise ValueError(
            f"`{name}` should ascend, from 0 for the constants; got {tensor.tolist()[:4]}… "
            "Of eigenvalues of Q, take `laplacian_eigenvalues(values, sigma)`."
        )
    return tensor


def frequencies_suffice(positive: Tensor, least: int) -> None:
    """Checks that there are frequencies above 0, different ones, to choose scales by."""
    if len(positive) < least:
        raise ValueError(
            f"`frequencies` should hold at least {least} above 0 that differ; got {len(positive)}, as there is a 0 for "
            "each part of a shape. Compute more eigenpairs."
        )


def times(numbers: Any, like: Tensor) -> Tensor:
    """Times (T,) ≥ 0."""
    tensor = as_tensor("times", numbers).to(like)
    if tensor.ndim != 1 or len(tensor) == 0:
        raise ValueError(f"`times` should have shape (T,); got {shape_of(tensor)}. For one time, give `[t]`.")
    finite("times", tensor, "Heat that has spread for long is 1 everywhere.")
    if (tensor < 0).any():
        raise ValueError(f"`times` should not be negative; {int((tensor < 0).sum())} of its {len(tensor)} numbers are.")
    return tensor


def point_map(numbers: Any, source: Tensor, target: Tensor) -> Tensor:
    """A source point for each target point, integers (N_target,), of vectors (N_source, k) and (N_target, k)."""
    tensor, (N, M) = as_tensor("index", numbers).to(source.device), (len(source), len(target))
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"`index` should be integers, the source point of each target point; got {dtype}.")
    if tensor.shape != (M,):
        raise ValueError(
            f"`index` should have shape ({M},), a source point for each target point; got {shape_of(tensor)}."
            + (" It seems to map the source to the target: exchange the two." if tensor.shape == (N,) else "")
        )
    low, high = (int(end) for end in tensor.aminmax())
    if low < 0 or high >= N:
        raise ValueError(f"`index` should number source points from 0 to {N - 1}; got numbers from {low} to {high}.")
    return tensor.long()


def functional_map(numbers: Any, source: Tensor, target: Tensor, least: int = 1) -> Tensor:
    """A map (k_t, k_s) of at least so many of the vectors (N_source, K_s) and (N_target, K_t), and at most of all."""
    tensor, (K_s, K_t) = as_tensor("C", numbers).to(source), (source.shape[-1], target.shape[-1])
    if tensor.ndim != 2 or not (least <= tensor.shape[0] <= K_t and least <= tensor.shape[1] <= K_s):
        raise ValueError(
            f"`C` should have shape (k_target, k_source), from ({least}, {least}) to ({K_t}, {K_s}), all that the "
            f"spectra have; got {shape_of(tensor)}."
        )
    finite("C", tensor, "Fit it with a larger `weight`.")
    return tensor


def features(source_features: Any, target_features: Any, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N_source, d) and (N_target, d) of two shapes with vectors (N_source, k_s) and (N_target, k_t)."""
    F_s = as_tensor("source_features", source_features).to(source)
    F_t = as_tensor("target_features", target_features).to(target)
    for name, tensor, N in (("source_features", F_s, len(source)), ("target_features", F_t, len(target))):
        if tensor.ndim != 2 or len(tensor) != N:
            raise ValueError(f"`{name}` should have shape ({N}, d), one row a point; got {shape_of(tensor)}.")
        finite(name, tensor, "A map cannot be fitted to them.")
    if F_s.shape[1] != F_t.shape[1]:
        raise ValueError(
            f"`target_features` should have the d = {F_s.shape[1]} columns of `source_features`, in their order; "
            f"got {shape_of(F_t)}."
        )
    if not F_s.any():
        raise ValueError("`source_features` should not all be 0, as nothing is then known of the map.")
    return F_s, F_t


def sizes_of_bases(start: int, stop: int, step: int, source: Tensor, target: Tensor) -> list[int]:
    """start, start + step, …, stop, if both spectra have as many vectors, (N_source, K_s) and (N_target, K_t)."""
    start, step, most = integer("start", start, 1), integer("step", step, 1), min(source.shape[-1], target.shape[-1])
    if not start <= integer("stop", stop, 1) <= most:
        raise ValueError(
            f"`stop` should be from `start`, {start}, to the number of vectors that both spectra have, {most}; "
            f"got {stop}. Compute more eigenpairs for a larger one."
        )
    return [*range(start, stop, step), int(stop)]

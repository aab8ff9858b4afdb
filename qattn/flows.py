r"""Flows of one cloud to another, down the gradient of the Energy Distance.

A step moves the points x of a cloud with masses a by x ← x − η L ∇E / a, where E is the Energy Distance to the target
(see `qattn.distances`) and L is the identity or smooths over the points in their current places:

| `sigma` | `normalization` | L |
|---|---|---|
| None | | the identity: the gradient flow of the Wasserstein metric |
| σ | "none" | the Gaussian kernel, divided by the mean of its row sums at the start |
| σ | "sinkhorn" | the diffusion Q, whose rows are averages and need no scale |
"""

from dataclasses import dataclass
from typing import Any

import torch

from qattn import _checks
from qattn._eager import eager
from qattn._progress import Progress
from qattn._types import ArrayLike, TensorOrArray, like_input
from qattn.distances.inputs import normalized_mass, two_clouds
from qattn.distances.sums import distance_sums
from qattn.operators.diffusion import diffuse

__all__ = ["Flow", "flow"]


@dataclass(frozen=True)
class Flow:
    """Positions of points along a flow, as tensors, or as arrays if the source is not a tensor.

    Attributes:
        steps: Numbers of steps after which positions were saved, from 0 to the last, shape (T,).
        positions: Positions after these steps, shape (T, *batch, N, d). `energy_distance(positions, target)` has the
            shape (T, *batch).
    """

    steps: TensorOrArray
    positions: TensorOrArray


@eager
@torch.no_grad()
def flow(
    source: ArrayLike,
    target: ArrayLike,
    sigma: float | None = None,
    *,
    source_mass: ArrayLike | None = None,
    target_mass: ArrayLike | None = None,
    step_size: float = 0.05,
    num_steps: int = 1000,
    every: int = 10,
    **options: Any,
) -> Flow:
    r"""Move the points of a cloud to those of another by repeated steps x ← x − η L ∇E / a.

    Each step takes N (N + M) directions and one operator, whose potential starts from that of the previous step. The
    operator acts on displacements ∇E / a, which are N ∇E for equal masses and independent of the number of points.

    Args:
        source: Points x to move, shape (*batch, N, d).
        target: Points y to move them to, shape (*batch, M, d); batch axes broadcast.
        sigma: Bandwidth of the Gaussian kernel in L, in units of the points; if None, L is the identity.
        source_mass: Masses a ≥ 0, shape (*batch, N), equal by default. Points without mass are carried along.
        target_mass: Masses b ≥ 0, shape (*batch, M), equal by default.
        step_size: η, in units of the points. If L is the identity or averages, no step is longer than 2η.
        num_steps: Number of steps.
        every: Number of steps between saved positions; the first and the last are always saved.
        **options: Further arguments of `qattn.diffusion`, such as `normalization` or `method`.

    Returns:
        A `Flow` with the saved positions.

    Examples:
        >>> x, y = 0.1 * torch.rand(200, 2), torch.rand(300, 2)
        >>> result = flow(x, y, sigma=0.2, num_steps=100)
        >>> result.positions.shape
        torch.Size([11, 200, 2])
        >>> E = distances.energy_distance(result.positions, y)
        >>> bool(E[-1] < 0.1 * E[0])
        True
    """
    x, y = two_clouds(source, target)
    a, b = normalized_mass("source_mass", source_mass, x), normalized_mass("target_mass", target_mass, y)
    _checks.positive("`step_size`", step_size)
    num_steps, every = _checks.integer("num_steps", num_steps, 1), _checks.integer("every", every, 1)
    if sigma is not None:
        _checks.one_bandwidth(sigma, torch.float64, torch.device("cpu"))
    elif options:
        raise ValueError(f"{', '.join(options)} are options of smoothing, which needs a bandwidth. Give `sigma` too.")
    weight = torch.cat([-a, b], dim=-1)
    saved = [*range(0, num_steps, every), num_steps]
    positions = [x]
    potential, scale = None, 1.0
    with Progress("Flow", num_steps) as progress:
        for step in range(1, num_steps + 1):
            _, displacement = distance_sums(x, torch.cat([x, y], dim=-2), weight)
            displacement = displacement.to(x.dtype)
            if sigma is not None:
                displacement, q = diffuse(x, sigma, displacement, a, init=potential, **options)
                if q.normalization == "sinkhorn":
                    potential = q.potential
                elif q.normalization == "none" and step == 1:
                    scale = (q @ torch.ones_like(a)[..., None]).mean(-2, keepdim=True)
            x = x - step_size * displacement / scale
            if step == saved[len(positions)]:
                positions.append(x)
            progress.advance()
    return Flow(like_input(torch.tensor(saved), source), like_input(torch.stack(positions), source))

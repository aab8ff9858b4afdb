r"""Flows of one cloud towards another, down the gradient of the Energy Distance.

A cloud x with masses a, of sum 1, is the measure μ = Σ a_i δ(x_i). Of two of them,

    E(μ, ν) = Σ a_i b_j ‖x_i − y_j‖ − ½ Σ a_i a_j ‖x_i − x_j‖ − ½ Σ b_i b_j ‖y_i − y_j‖

is 0 if they are the same and positive if not, whatever the number of their points (Rizzo and Székely 2016). A flow
moves the points of the first by x ← x − η L ∇E / a, where L is the identity or smooths over the points as they lie:

| `sigma` | `normalization` | L |
|---|---|---|
| None | | the identity: the gradient flow of Wasserstein's metric |
| σ | "none" | the Gaussian kernel, divided by the mean sum of its rows at the start |
| σ | "sinkhorn" | the diffusion Q, which takes means and so needs no scale |

The sums over all pairs are computed in O(N) memory: by a compiled loop on CPUs, in chunks elsewhere.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from qattn import _checks
from qattn._compiled import share, why_not_compiled
from qattn._eager import eager
from qattn._nearest import nearest
from qattn._progress import Progress
from qattn.operators import diffusion

__all__ = ["Flow", "chamfer_distance", "energy_distance", "flow"]

_LEAST_ROWS = 64  # that share a tile of columns in the cache
_PAIRS = 2**22  # that a thread sums at a time, or that are held at once where there is no compiled loop


@dataclass(frozen=True)
class Flow:
    """Where points were on their way.

    Attributes:
        steps: After how many steps, from 0 to the last, shape (T,).
        positions: The points then, shape (T, *batch, N, d): `energy_distance(positions, target)` is (T, *batch).
    """

    steps: Any
    positions: Any


@eager
def energy_distance(source: Any, target: Any, source_mass: Any = None, target_mass: Any = None) -> Any:
    r"""E(μ, ν) = Σ a_i b_j ‖x_i − y_j‖ − ½ Σ a_i a_j ‖x_i − x_j‖ − ½ Σ b_i b_j ‖y_i − y_j‖, shape (*batch,).

    In (N + M)² distances and O(N + M) memory, gradients included:

        ∂E/∂x_i = a_i (Σ_j b_j (x_i − y_j) / ‖x_i − y_j‖ − Σ_j a_j (x_i − x_j) / ‖x_i − x_j‖),

    where points in the same place add nothing. It is differentiable once, by points and masses.

    Args:
        source: The points x, shape (*batch, N, d), a tensor or an array.
        target: The points y, shape (*batch, M, d); batch axes broadcast.
        source_mass: The masses a ≥ 0, shape (*batch, N), equal by default; they are divided by their sum.
        target_mass: The masses b ≥ 0, shape (*batch, M), in the same way.

    Example:
        >>> energy_distance(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor(5.)
    """
    x, y = _checks.two_clouds(source, target)
    a, b = _checks.shares("source_mass", source_mass, x), _checks.shares("target_mass", target_mass, y)
    energy = _EnergyDistance.apply(torch.cat([x, y], dim=-2), torch.cat([a, -b], dim=-1))
    return energy if isinstance(source, Tensor) else energy.numpy(force=True)


class _EnergyDistance(torch.autograd.Function):
    """−½ Σ w_i w_j ‖z_i − z_j‖, for both clouds as one z (*batch, N + M, d), the masses w of the second negative."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        u, g = _sums(z, z, w)
        ctx.save_for_backward(w, u, g)
        return (-0.5 * (w * u).sum(-1)).to(w.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        w, u, g = ctx.saved_tensors
        by_mass = -gradient[..., None] * u
        return (-(gradient[..., None] * w)[..., None] * g).to(w.dtype), by_mass.to(w.dtype)


@eager
def chamfer_distance(source: Any, target: Any, power: float = 2) -> Any:
    r"""1/N Σ_i min_j ‖x_i − y_j‖^p + 1/M Σ_j min_i ‖x_i − y_j‖^p, shape (*batch,).

    Points have no masses here, and gradients hold the nearest points fixed. Points in the same place add nothing to
    them, though p < 2 has no derivative there.

    Args:
        source: The points x, shape (*batch, N, d), a tensor or an array.
        target: The points y, shape (*batch, M, d); batch axes broadcast.
        power: p > 0. Squares are usual, and tell most of points that are far away; with p = 1, it is a length.

    Example:
        >>> chamfer_distance([[0.0, 0.0], [3.0, 0.0]], [[0.0, 4.0]])
        array(36.5)
        >>> chamfer_distance([[0.0, 0.0], [3.0, 0.0]], [[0.0, 4.0]], power=1)
        array(8.5)
    """
    x, y = _checks.two_clouds(source, target)
    _checks.positive("`power`", power)
    clouds = zip(x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:]), strict=True)
    means = [_to_nearest(a, b, power) + _to_nearest(b, a, power) for a, b in clouds]
    result = torch.stack(means).reshape(x.shape[:-2])
    return result if isinstance(source, Tensor) else result.numpy(force=True)


def _to_nearest(x: Tensor, y: Tensor, power: float) -> Tensor:
    """The mean of ‖x_i − y_j‖^p from points (N, d) to the nearest of others (M, d)."""
    index = nearest(x.detach().double(), y.detach().double())
    distances = torch.linalg.vector_norm(x - y[index], dim=-1)
    is_apart = distances > 0
    return torch.where(is_apart, torch.where(is_apart, distances, 1).pow(power), 0).mean()


@eager
@torch.no_grad()
def flow(
    source: Any,
    target: Any,
    sigma: float | None = None,
    *,
    source_mass: Any = None,
    target_mass: Any = None,
    step_size: float = 0.05,
    steps: int = 1000,
    every: int = 10,
    **options: Any,
) -> Flow:
    r"""x ← x − η L ∇E / a, again and again: the points of a cloud move to where those of another are.

    Each step takes N (N + M) directions, and one operator, whose potential starts from that of the step before. Its
    matrix acts on displacements ∇E / a, N ∇E for equal masses, which do not depend on the number of points.

    Args:
        source: The points x to move, shape (*batch, N, d), a tensor or an array.
        target: The points y to move them to, shape (*batch, M, d); batch axes broadcast.
        sigma: The bandwidth of the Gaussian kernel of L, in units of the points; without it, L is the identity.
        source_mass: The masses a ≥ 0, shape (*batch, N), equal by default. Points without mass are carried along.
        target_mass: The masses b ≥ 0, shape (*batch, M), equal by default.
        step_size: η, in units of the points: where L is the identity or takes means, no step is longer than 2η.
        steps: The number of steps.
        every: How many steps there are between the positions that are kept; the first and the last always are.
        **options: Further arguments of `qattn.diffusion`, such as `normalization` or `method`.

    Example:
        >>> x, y = 0.1 * torch.rand(200, 2), torch.rand(300, 2)
        >>> way = flow(x, y, sigma=0.2, steps=100)
        >>> way.positions.shape
        torch.Size([11, 200, 2])
        >>> E = energy_distance(way.positions, y)
        >>> bool(E[-1] < 0.1 * E[0])
        True
    """
    x, y = _checks.two_clouds(source, target)
    a, b = _checks.shares("source_mass", source_mass, x), _checks.shares("target_mass", target_mass, y)
    _checks.positive("`step_size`", step_size)
    steps, every = _checks.integer("steps", steps, 1), _checks.integer("every", every, 1)
    _checks.smoothing(sigma, options)
    weight = torch.cat([-a, b], dim=-1)
    kept = [*range(0, steps, every), steps]
    positions = [x]
    potential, scale = None, 1.0
    with Progress("Flow", steps) as progress:
        for step in range(1, steps + 1):
            _, displacement = _sums(x, torch.cat([x, y], dim=-2), weight)
            displacement = displacement.to(x.dtype)
            if sigma is not None:
                q = diffusion(x, sigma, a, init=potential, signal=displacement, **options)
                displacement = q.applied
                if q.normalization == "sinkhorn":
                    potential = q.potential
                elif q.normalization == "none" and step == 1:
                    scale = (q @ torch.ones_like(a)[..., None]).mean(-2, keepdim=True)
            x = x - step_size * displacement / scale
            if step == kept[len(positions)]:
                positions.append(x)
            progress.advance()
    numbers, ways = torch.tensor(kept), torch.stack(positions)
    return Flow(numbers, ways) if isinstance(source, Tensor) else Flow(numbers.numpy(), ways.numpy(force=True))


def _sums(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j w_j ‖x_i − y_j‖, (*batch, N), and Σ_j w_j (x_i − y_j) / ‖x_i − y_j‖, (*batch, N, d), in float64 on CPUs."""
    batch, (N, d) = x.shape[:-2], x.shape[-2:]
    x, y, w = x.reshape(-1, N, d), y.reshape(-1, *y.shape[-2:]), w.reshape(-1, w.shape[-1])
    # In units of the extent, squares neither overflow nor vanish; about the centre, coordinates round less.
    centre = y.mean(-2, keepdim=True)
    x, y = x - centre, y - centre
    scale = torch.maximum(x.abs().amax((-2, -1)), y.abs().amax((-2, -1)))  # (B,)
    scale = torch.where(scale > 0, scale, 1)
    x, y = x / scale[:, None, None], y / scale[:, None, None]
    is_compiled = x.device.type == "cpu" and why_not_compiled() is None
    u, g = (_compiled_sums if is_compiled else _chunked_sums)(x, y, w)
    return (u * scale[:, None]).reshape(*batch, N), g.reshape(*batch, N, d)


def _compiled_sums(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    from qattn import _distances  # here, because importing Numba takes a while

    (B, N, d), M, tile = x.shape, y.shape[1], _distances.TILE
    axes = max(3, d)
    rows = pad(x, (0, axes - d)).contiguous()
    columns = pad(y, (0, axes - d, 0, -M % tile)).unflatten(1, (-1, tile)).mT.contiguous()  # (B, T, axes, TILE)
    weight = pad(w, (0, -M % tile)).unflatten(1, (-1, tile)).contiguous()  # (B, T, TILE)
    u, g = torch.zeros(B, N, dtype=torch.float64), torch.zeros(B, N, axes, dtype=torch.float64)
    arrays, results = [t.detach().numpy() for t in (rows, columns, weight)], [t.numpy() for t in (u, g)]
    tiny: Any = torch.tensor(torch.finfo(x.dtype).tiny, dtype=x.dtype).numpy()[()]  # a number of the loops' own type
    loop = _distances.sum_in_space if axes == 3 else _distances.sum_in_any_dimension
    chunk = max(_LEAST_ROWS, _PAIRS // M)

    def run(task: tuple[int, int]) -> None:
        b, begin = task
        loop(*(array[b] for array in arrays), begin, min(begin + chunk, N), tiny, *(result[b] for result in results))

    tasks = [(b, begin) for b in range(B) for begin in range(0, N, chunk)]
    share(run, tasks, len(tasks))
    return u, g[..., :d]


def _chunked_sums(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    parts = []
    for some in x.split(max(1, _PAIRS // (y.shape[0] * y.shape[1])), dim=1):  # (B, n, d)
        distances = torch.cdist(some, y, compute_mode="donot_use_mm_for_euclid_dist")  # (B, n, M)
        factors = torch.where(distances > 0, w[:, None] / distances, 0)
        directions = [
            (factors * (p[..., None] - q[:, None])).sum(-1) for p, q in zip(some.unbind(-1), y.unbind(-1), strict=True)
        ]
        parts.append(((distances * w[:, None]).sum(-1), torch.stack(directions, dim=-1)))
    u, g = zip(*parts, strict=True)
    return torch.cat(u, dim=1), torch.cat(g, dim=1)

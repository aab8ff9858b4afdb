r"""Weighted sums of distances and of their gradients over all pairs of points, in O(N) memory.

A compiled loop computes them on CPUs, chunks of the matrix of distances elsewhere.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.threads import chunks, share

__all__ = ["chunked_sums", "compiled_sums", "distance_sums"]

_MIN_ROWS = 64  # that share a tile of columns in the cache
_MAX_PAIRS = 2**22  # per task of a thread, or in memory at a time where there is no compiled loop


def distance_sums(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return u_i = Σ_j w_j ‖x_i − y_j‖ and g_i = Σ_j w_j (x_i − y_j) / ‖x_i − y_j‖, in float64 on CPUs.

    Args:
        x: Points of shape (*batch, N, d).
        y: Points of shape (*batch, M, d).
        w: Weights of shape (*batch, M).

    Returns:
        u of shape (*batch, N), and g of shape (*batch, N, d).
    """
    batch, (N, d) = x.shape[:-2], x.shape[-2:]
    x, y, w = x.reshape(-1, N, d), y.reshape(-1, *y.shape[-2:]), w.reshape(-1, w.shape[-1])
    # In units of the extent squares neither overflow nor underflow; about the center coordinates round less.
    center = y.mean(-2, keepdim=True)
    x, y = x - center, y - center
    scale = torch.maximum(x.abs().amax((-2, -1)), y.abs().amax((-2, -1)))  # (B,)
    scale = torch.where(scale > 0, scale, 1)
    x, y = x / scale[:, None, None], y / scale[:, None, None]
    is_compiled = x.device.type == "cpu" and why_not_compiled() is None
    u, g = (compiled_sums if is_compiled else chunked_sums)(x, y, w)
    return (u * scale[:, None]).reshape(*batch, N), g.reshape(*batch, N, d)


def compiled_sums(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `distance_sums` of a batch (B, N, d), (B, M, d), (B, M) on CPUs by the compiled loop."""
    from qattn.tiles.loops import distances  # here, because importing Numba takes a while

    (B, N, d), M, tile = x.shape, y.shape[1], distances.TILE
    axes = max(3, d)
    rows = pad(x, (0, axes - d)).contiguous()
    columns = pad(y, (0, axes - d, 0, -M % tile)).unflatten(1, (-1, tile)).mT.contiguous()  # (B, T, axes, TILE)
    weight = pad(w, (0, -M % tile)).unflatten(1, (-1, tile)).contiguous()  # (B, T, TILE)
    u, g = torch.zeros(B, N, dtype=torch.float64), torch.zeros(B, N, axes, dtype=torch.float64)
    arrays, results = [t.detach().numpy() for t in (rows, columns, weight)], [t.numpy() for t in (u, g)]
    tiny: Any = torch.tensor(torch.finfo(x.dtype).tiny, dtype=x.dtype).numpy()[()]  # a scalar of the dtype of the loop
    loop = distances.sum_in_space if axes == 3 else distances.sum_in_any_dimension

    def run(b: int, begin: int, end: int) -> None:
        loop(*(array[b] for array in arrays), begin, end, tiny, *(result[b] for result in results))

    share(run, [(b, *ends) for b in range(B) for ends in chunks(N, max(_MIN_ROWS, _MAX_PAIRS // M))])
    return u, g[..., :d]


def chunked_sums(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `distance_sums` of a batch (B, N, d), (B, M, d), (B, M) on any device, by chunks of rows."""
    parts = []
    for rows in x.split(max(1, _MAX_PAIRS // (y.shape[0] * y.shape[1])), dim=1):  # (B, n, d)
        distances = torch.cdist(rows, y, compute_mode="donot_use_mm_for_euclid_dist")  # (B, n, M)
        factors = torch.where(distances > 0, w[:, None] / distances, 0)
        coordinates = zip(rows.unbind(-1), y.unbind(-1), strict=True)
        directions = [(factors * (p[..., None] - q[:, None])).sum(-1) for p, q in coordinates]
        parts.append(((distances * w[:, None]).sum(-1), torch.stack(directions, dim=-1)))
    u, g = zip(*parts, strict=True)
    return torch.cat(u, dim=1), torch.cat(g, dim=1)

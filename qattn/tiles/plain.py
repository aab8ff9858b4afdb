"""Gaussian attention between tiles in plain torch, for the time until the loops are compiled.

The weights and the cut-off are those of the loops (`tiles.loops.cutoff`), with two differences: all pairs of tiles are
compared, instead of the nodes of a tree, and tiles are near or far as a whole.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.tiles.gaussian import excess, scales_of
from qattn.tiles.sizes import PART, TILE
from qattn.tiles.threads import chunks, share
from qattn.tiles.tiling import Tiling, log2_sum

__all__ = ["attend", "count_near", "seconds_for"]

_PAIR, _COORDINATE = 2.5e-9, 0.8e-9  # seconds on one core, per pair of points and for each of their coordinates

_SHARES = 12.0  # log₂ of the least number of tiles among which the tolerance is divided
_COMPARED = 2**20  # pairs of tiles that are compared at a time
_CHUNKS = 8  # tasks per thread
_FEWEST = 32  # tiles that stand for all, however many there are
_PAIRS = 2**18  # pairs of points at a time: 1 MB of scores in float32, which fits a cache


class _Keys(NamedTuple):
    """Key tiles of a cloud, and what they add to sums of weights, in log₂."""

    boxes: Tensor  # (S, 2 D)
    sums: Tensor  # (S,) log₂ Σ 2^β
    tops: Tensor  # (S,) the same, with larger β for keys of large values


def attend(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    tol: float | None = None,
) -> Attended:
    """Attend with the scores −‖q − k‖² / 2σ² + b, as `tiles.gaussian.attend` does, with the same arguments."""
    B, dtype = query.clouds, query.cloud.dtype
    bias = torch.zeros(B, key.size, dtype=dtype) if bias is None else bias.detach().to(dtype)
    top = bias.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    most = bias if value is None or tol is None else bias + excess(value, bias)
    beta, larger = (_tiled(key, (x - top) / math.log(2)) for x in (bias, most))  # (B, S, TILE)
    floors = beta.amin(-1) if query is key else beta.new_full((B, query.tiles), -torch.inf)
    points, keys = (x.points.unflatten(0, (B, -1)) for x in (query, key))  # (B, ·, TILE, D)
    values = None if value is None else key.tiled(value.detach().to(dtype)).unflatten(0, (B, -1))  # (B, S, TILE, C)

    lse = beta.new_empty(B, query.tiles, TILE)
    out = None if values is None else beta.new_empty(B, query.tiles, TILE, values.shape[-1])
    scales, sums, tops = scales_of(query, sigma).tolist(), log2_sum(beta), log2_sum(larger)

    def run(b: int, begin: int, end: int) -> None:
        rows = slice(begin, end)
        is_near = torch.ones(end - begin, key.tiles, dtype=torch.bool)
        if tol is not None:
            keys_of_cloud = _Keys(_boxes(key, b), sums[b], tops[b])
            is_near, _ = _near(_boxes(query, b)[rows], floors[b, rows], keys_of_cloud, scales[b], tol)
        value_of_cloud = None if values is None else values[b]
        averages, log2_sums = _summed(points[b, rows], keys[b], beta[b], value_of_cloud, scales[b], is_near)
        lse[b, rows] = log2_sums * math.log(2) + top[b]
        if out is not None and averages is not None:
            out[b, rows] = averages

    step = max(1, min(_COMPARED // key.tiles, query.tiles // (_CHUNKS * torch.get_num_threads())))
    # One thread per task: if all threads shared each operation of torch, they would wait for one another after each.
    share(run, [(b, *rows) for b in range(B) for rows in chunks(query.tiles, step)])
    lse = query.untiled(lse.flatten(0, 1))
    return Attended(None if out is None or value is None else query.untiled(out.flatten(0, 1)).to(value.dtype), lse)


def seconds_for(pairs: float, dims: int) -> float:
    """Estimate how long `attend` takes for so many pairs of points."""
    return (_PAIR + dims * _COORDINATE) * pairs / torch.get_num_threads()


def count_near(query: Tiling, key: Tiling, sigma: Tensor | None, tol: float, num_samples: int) -> tuple[float, float]:
    """Estimate the numbers of near pairs of tiles, and of pairs of points in near parts of them, for equal biases.

    A number of query tiles, or fewer if there are very many keys, stand for all.
    """
    B, parts = query.clouds, TILE // PART
    num_samples = min(num_samples, B * query.tiles, max(_FEWEST, _COMPARED // key.tiles))
    sample = torch.linspace(0, B * query.tiles - 1, num_samples).round().long()
    sums, part_sums = (_log2_counts(key, width) for width in (TILE, PART))
    num_tiles = num_parts = 0
    for b, scale in enumerate(scales_of(query, sigma).tolist()):
        rows = sample[sample // query.tiles == b] % query.tiles
        floors = sums.new_full((len(rows),), 0.0 if query is key else -torch.inf)
        is_near, least = _near(_boxes(query, b)[rows], floors, _Keys(_boxes(key, b), sums, sums), scale, tol)
        i, j = is_near.nonzero(as_tuple=True)  # (pairs,)
        of_query = (rows[i] * parts)[:, None, None] + torch.arange(parts)[:, None]  # (pairs, parts, 1)
        of_key = (j * parts)[:, None, None] + torch.arange(parts)  # (pairs, 1, parts)
        boxes = [x.tree.parts.unflatten(0, (B, -1))[b, part] for x, part in ((query, of_query), (key, of_key))]
        gap, _ = _distances(*boxes)  # (pairs, parts, parts)
        num_tiles += len(i)
        num_parts += int((part_sums[of_key] - scale * gap > least[i, None, None]).sum())
    weight = B * query.tiles / max(1, len(sample))
    return weight * num_tiles, weight * PART**2 * num_parts


def _log2_counts(tiling: Tiling, width: int) -> Tensor:
    """Compute log₂ of the number of points in each run of a width, in tiles of a cloud; −inf in the padding."""
    first = torch.arange(0, tiling.tiles * TILE, width)
    return (tiling.size - first).clamp(0, width).to(tiling.cloud.dtype).log2()


def _tiled(tiling: Tiling, beta: Tensor) -> Tensor:
    """Sort β (B, N) into tiles (B, T, TILE), −inf in the padding of the last one."""
    return tiling.padded(beta, -torch.inf).unflatten(0, (tiling.clouds, -1))


def _boxes(tiling: Tiling, b: int) -> Tensor:
    """Return the boxes (low, high) of the tiles of a cloud, (T, 2 D)."""
    return tiling.tree.nodes[b, : tiling.tiles]


def _distances(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the least and the largest squared distance of points of two boxes (…, 2 D)."""
    d = boxes.shape[-1] // 2
    gap = span = torch.zeros((), dtype=boxes.dtype)
    for c in range(d):  # one by one: sums over a short last axis are slow
        below, above = boxes[..., c] - others[..., d + c], boxes[..., d + c] - others[..., c]
        apart, across = torch.maximum(below, -above).clamp_(min=0), torch.maximum(above, -below)
        gap, span = torch.addcmul(gap, apart, apart), torch.addcmul(span, across, across)
    return gap, span


def _near(boxes: Tensor, floors: Tensor, keys: _Keys, scale: float, tol: float) -> tuple[Tensor, Tensor]:
    """Find the key tiles that matter to query tiles with boxes (t, 2 D) and known lower bounds (t,) of row sums.

    Returns:
        Whether they matter, (t, S), and log₂ of a weight (t,) that is too small to matter.
    """
    gap, span = _distances(boxes[:, None], keys.boxes)  # (t, S)
    most, least = keys.tops - scale * gap, keys.sums - scale * span
    floors = torch.maximum(floors, least.amax(-1))
    is_empty = floors == -torch.inf
    shares = max(_SHARES, math.log2(len(keys.sums)))
    is_candidate = most > (floors + math.log2(tol) - shares)[:, None]
    ratios = torch.exp2(least - torch.where(is_empty, 0, floors)[:, None])
    floors = floors + torch.log2((ratios * is_candidate).sum(-1).clamp(min=1))
    count = is_candidate.sum(-1).clamp(min=1)
    smallest = floors + math.log2(tol) - torch.log2(count.to(floors.dtype)).clamp(max=shares)
    return is_candidate & (most > smallest[:, None]), smallest


def _summed(
    query: Tensor, key: Tensor, beta: Tensor, value: Tensor | None, scale: float, is_near: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Average values (S, TILE, C) with the weights 2^(β_j − c ‖q_i − k_j‖²) of near tiles.

    Args:
        query: Query tiles (t, TILE, D).
        key: Key tiles (S, TILE, D).
        beta: β (S, TILE).
        value: Values, or None.
        scale: c.
        is_near: Which key tiles matter to a query tile, (t, S).

    Returns:
        Averages (t, TILE, C), or None, and log₂ of the sums of weights (t, TILE).
    """
    log2_sums = query.new_full(query.shape[:2], -torch.inf)
    out = None if value is None else query.new_zeros(*query.shape[:2], value.shape[-1])
    keys = key.unbind(-1)
    for i, near in enumerate(is_near):
        beta_of_near = beta[near].flatten()  # (n,)
        if not len(beta_of_near):
            continue
        keys_of_near = [x[near].flatten() for x in keys]  # D × (n,)
        values_of_near = None if value is None else value[near].flatten(0, 1)  # (n, C)
        for begin, end in chunks(TILE, max(1, _PAIRS // len(beta_of_near))):
            scores = beta_of_near.expand(end - begin, -1).contiguous()  # (rows, n)
            for q, k in zip(query[i, begin:end].unbind(-1), keys_of_near, strict=True):
                apart = q[:, None] - k
                scores.addcmul_(apart, apart, value=-scale)
            top = scores.amax(-1, keepdim=True)
            shift = torch.where(top == -torch.inf, 0, top)
            weights = scores.sub_(shift).exp2_()
            total = weights.sum(-1, keepdim=True)
            log2_sums[i, begin:end] = (shift + torch.log2(total))[:, 0]
            if out is not None and values_of_near is not None:
                out[i, begin:end] = weights @ values_of_near / total.clamp(min=torch.finfo(total.dtype).tiny)
    return out, log2_sums

"""Gaussian attention between tiles, and sums of its derivatives, in plain torch until the loops are compiled.

It is about ten times as slow. Weights and cut-off are the same as in the loops (`tiles.loops.cutoff`), with two
differences: all pairs of tiles are compared, instead of the nodes of a tree, and tiles are near or far as a whole.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qattn.attended import Attended, Derivatives, PairSums, PairTerms
from qattn.tiles.sizes import PART, TILE
from qattn.tiles.threads import chunks, share
from qattn.tiles.tiling import Tiling, excess, log2_sum, scales_of

__all__ = ["attend", "count_near", "differentiate", "nanoseconds", "seconds_for"]

_PAIR, _COORDINATE = 2.5, 0.8  # nanoseconds on one core, per pair of points and for each of their coordinates
_SHARES = 12.0  # log₂ of the least number of tiles that share the tolerance
_COMPARED = 2**20  # pairs of tiles that are compared at a time
_CHUNKS = 8  # tasks per thread
_SAMPLE = 32  # tiles for which near tiles are counted, to estimate a duration
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
    top = _top(bias)
    most = bias if value is None or tol is None else bias + excess(value, bias)
    beta, larger = (_tiled(key, (x - top) / math.log(2)) for x in (bias, most))  # (B, S, TILE)
    points, keys = (x.points.unflatten(0, (B, -1)) for x in (query, key))  # (B, ·, TILE, D)
    values = None if value is None else key.tiled(value.detach().to(dtype)).unflatten(0, (B, -1))  # (B, S, TILE, C)
    scales = scales_of(query, sigma).tolist()
    lse = beta.new_empty(B, query.tiles, TILE)
    out = None if values is None else beta.new_empty(B, query.tiles, TILE, values.shape[-1])

    def run(b: int, rows: slice, is_near: Tensor) -> None:
        value_of_cloud = None if values is None else values[b]
        averages, log2_sums = _averages(points[b, rows], keys[b], beta[b], value_of_cloud, scales[b], is_near)
        lse[b, rows] = log2_sums * math.log(2) + top[b]
        if out is not None and averages is not None:
            out[b, rows] = averages

    _share_tiles(run, query, key, scales, beta, larger, tol)
    lse = query.untiled(lse.flatten(0, 1))
    return Attended(None if out is None or value is None else query.untiled(out.flatten(0, 1)).to(value.dtype), lse)


def differentiate(
    query: Tiling,
    key: Tiling,
    sigma: Tensor | None,
    bias: Tensor | None,
    terms: PairTerms,
    tol: float | None = None,
) -> PairSums:
    """Compute sums over pairs of points, as `tiles.gaussian.differentiate` does, with the same arguments."""
    dtype = query.cloud.dtype
    bias = torch.zeros(key.clouds, key.size, dtype=dtype) if bias is None else bias.detach().to(dtype)
    row, column, shift = (x.detach().to(dtype) for x in terms[:3])
    terms = terms._replace(row=row, column=column, shift=shift)
    rows, _ = _sums_over_keys(query, key, sigma, bias, terms._replace(num_values=0), tol)
    if not (terms.by_column or terms.num_values):
        return PairSums(rows)
    # Sums over queries are sums over keys of the transpose, where b_j and −shift_i change places.
    transposed = terms._replace(row=column, column=row, shift=-bias)
    columns, values = _sums_over_keys(key, query, sigma, -shift, transposed, tol)
    result = PairSums(rows, values=values if terms.num_values else None)
    return result._replace(column_total=columns.total, column_first=-columns.first) if terms.by_column else result


def _sums_over_keys(
    query: Tiling, key: Tiling, sigma: Tensor | None, bias: Tensor, terms: PairTerms, tol: float | None
) -> tuple[Derivatives, Tensor]:
    """Compute Σ_j s̄_ij (1, k_j − q_i, ‖k_j − q_i‖²), and Σ_j p_ij S_j of the first channels (B, N, C′)."""
    B, D = query.clouds, query.dims
    top, size = _top(bias), terms.column.abs().amax(-1)
    beta, sized = (_tiled(key, x / math.log(2)) for x in (bias - top, bias - top + torch.log(size)))  # (B, S, TILE)
    tiles = query.points, key.points, query.tiled(terms.row), key.tiled(terms.column)
    points, keys, rows_of, columns = (x.unflatten(0, (B, -1)) for x in tiles)  # (B, ·, TILE, ·)
    shifts = query.padded((terms.shift - top) / math.log(2), torch.inf).unflatten(0, (B, -1))  # (B, T, TILE)
    scales = scales_of(query, sigma).tolist()
    sums = beta.new_zeros(B, query.tiles, TILE, D + 2 + terms.num_values)

    def run(b: int, tiles: slice, is_near: Tensor) -> None:
        for i, rows, near, scores in _scores(points[b, tiles], keys[b], beta[b], scales[b], is_near):
            t, column = tiles.start + i, columns[b, near].flatten(0, 1)  # (n, C)
            of_rows = sums[b, t, rows]
            weights = scores.sub_(shifts[b, t, rows, None]).exp2_()
            of_rows[:, D + 2 :] = weights @ column[:, : terms.num_values]
            products = weights.mul_(rows_of[b, t, rows] @ column.T)
            of_rows[:, 0] = products.sum(-1)
            for c in range(D if terms.by_points else 0):
                apart = keys[b, near, :, c].flatten() - points[b, t, rows, c, None]
                of_rows[:, 1 + c] = (moments := products * apart).sum(-1)
                of_rows[:, 1 + D] += moments.mul_(apart).sum(-1)

    _share_tiles(run, query, key, scales, sized, sized, tol)
    total, first, second, values = query.untiled(sums.flatten(0, 1)).split([1, D, 1, terms.num_values], dim=-1)
    return Derivatives(total[..., 0], first, second[..., 0]), values


def _share_tiles(
    run: Callable[[int, slice, Tensor], None],
    query: Tiling,
    key: Tiling,
    scales: list[float],
    beta: Tensor,
    larger: Tensor,
    tol: float | None,
) -> None:
    """Call run(b, tiles, is_near) for query tiles (t) of each cloud, on all threads, with the key tiles that matter.

    Args:
        run: Function of a cloud, its query tiles, and which key tiles matter to them, (t, S).
        query: Clouds that attend.
        key: Clouds attended to.
        scales: c of each cloud.
        beta: Weights 2^β of the keys in sums, (B, S, TILE).
        larger: Larger β if keys matter more than their weight.
        tol: Fraction of sums that may be left out; None to compute all pairs.
    """
    floors = beta.amin(-1) if query is key else beta.new_full((query.clouds, query.tiles), -torch.inf)
    sums, tops = log2_sum(beta), log2_sum(larger)

    def task(b: int, begin: int, end: int) -> None:
        tiles = slice(begin, end)
        is_near = torch.ones(end - begin, key.tiles, dtype=torch.bool)
        if tol is not None:
            keys = _Keys(_boxes(key, b), sums[b], tops[b])
            is_near, _ = _near(_boxes(query, b)[tiles], floors[b, tiles], keys, scales[b], tol)
        run(b, tiles, is_near)

    step = max(1, min(_COMPARED // key.tiles, query.tiles // (_CHUNKS * torch.get_num_threads())))
    # One thread per task: if all threads shared each operation of torch, they would wait for one another after each.
    share(task, [(b, *tiles) for b in range(query.clouds) for tiles in chunks(query.tiles, step)])


def nanoseconds(pairs: float, dims: int) -> float:
    """Estimate how long `attend` takes for so many pairs of points on one core."""
    return (_PAIR + dims * _COORDINATE) * pairs


def seconds_for(query: Tiling, key: Tiling, sigma: Tensor | None, tol: float | None) -> float:
    """Estimate how long `attend` takes with the threads of torch."""
    pairs: float = query.clouds * query.size * key.size
    if tol is not None:
        num_tiles, _ = count_near(query, key, sigma, tol, _SAMPLE)
        compared = query.clouds * query.tiles * key.tiles  # pairs of tiles, each at the cost of some pairs of points
        pairs = TILE**2 * num_tiles + TILE * compared
    return 1e-9 * nanoseconds(pairs, query.dims) / torch.get_num_threads()


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


def _top(bias: Tensor) -> Tensor:
    """Return the largest bias of each cloud, (B, 1); 0 for clouds without keys."""
    top = bias.amax(-1, keepdim=True)
    return torch.where(top == -torch.inf, 0, top)


def _scores(
    query: Tensor, key: Tensor, beta: Tensor, scale: float, is_near: Tensor
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield scores β_j − c ‖q_i − k_j‖² of rows of each query tile with the points of its near key tiles.

    Args:
        query: Query tiles (t, TILE, D).
        key: Key tiles (S, TILE, D).
        beta: β (S, TILE).
        scale: c.
        is_near: Which key tiles matter to a query tile, (t, S).

    Returns:
        The number of the query tile, its rows, which key tiles are near (S,), and the scores (rows, n).
    """
    for i, near in enumerate(is_near):
        if not near.any():
            continue
        beta_of_near, keys = beta[near].flatten(), key[near].flatten(0, 1).unbind(-1)  # (n,) and D × (n,)
        for begin, end in chunks(TILE, max(1, _PAIRS // len(beta_of_near))):
            scores = beta_of_near.expand(end - begin, -1).contiguous()
            for q, k in zip(query[i, begin:end].unbind(-1), keys, strict=True):
                apart = q[:, None] - k
                scores.addcmul_(apart, apart, value=-scale)
            yield i, slice(begin, end), near, scores


def _averages(
    query: Tensor, key: Tensor, beta: Tensor, value: Tensor | None, scale: float, is_near: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Average values (S, TILE, C) with the weights 2^(β_j − c ‖q_i − k_j‖²) of near tiles; see `_scores`.

    Returns:
        Averages (t, TILE, C), or None, and log₂ of the sums of weights (t, TILE).
    """
    log2_sums = query.new_full(query.shape[:2], -torch.inf)
    out = None if value is None else query.new_zeros(*query.shape[:2], value.shape[-1])
    for i, rows, near, scores in _scores(query, key, beta, scale, is_near):
        top = scores.amax(-1, keepdim=True)
        shift = torch.where(top == -torch.inf, 0, top)
        weights = scores.sub_(shift).exp2_()
        total = weights.sum(-1, keepdim=True)
        log2_sums[i, rows] = (shift + torch.log2(total))[:, 0]
        if out is not None and value is not None:
            out[i, rows] = weights @ value[near].flatten(0, 1) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return out, log2_sums

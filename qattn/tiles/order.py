"""The order of a balanced k-d tree, by compiled loops or by torch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn.tiles.sizes import PART
from qattn.tiles.threads import share
from qattn.tiles.when_to_compile import Loop, charge, is_due

__all__ = ["kd_order"]

_WORD = 16  # bytes that the loops move at once
_COMPILED_WORDS = 2  # loops are compiled for each width of rows up to this one, and once for all wider ones
_MIN_POINTS = 2**14  # least number of points per task of a thread
_BY_TORCH = 2e-6  # seconds per point


def kd_order(points: Tensor, leaf: int = PART) -> Tensor:
    """Sort each cloud of points (B, N, D) by a k-d tree with leaves of a number of points.

    Returns:
        Indices (B, N), int64.
    """
    B, N, D = points.shape
    num_words = -(-(D + 1) * points.element_size() // _WORD)  # for the coordinates and the index of a point
    loop = Loop("sort", points.dtype, min(num_words, _COMPILED_WORDS + 1))
    if not is_due(loop, seconds := _BY_TORCH * B * N):
        charge(loop, seconds)
        return _by_torch(points.detach(), leaf)
    order = _by_loops(points.detach(), leaf, num_words)
    loop.remember()
    return order


def _by_loops(points: Tensor, leaf: int, num_words: int) -> Tensor:
    """Sort rows of words, each with the coordinates of a point and its index."""
    from qattn.tiles.loops import kd  # here, because importing Numba takes a while

    B, N, D = points.shape
    rows = points.new_empty(B, N, num_words * _WORD // points.element_size())
    rows[..., :D] = points
    numbers = rows.view(torch.int32 if points.element_size() == 4 else torch.int64)[..., D]
    numbers[:] = torch.arange(N)
    width = (0,) * num_words if num_words <= _COMPILED_WORDS else ()
    clouds = [(cloud.numpy(), cloud.numpy().view("complex128"), D, width, leaf) for cloud in rows]
    tasks = [(b, 0, N) for b in range(B)]

    def split(b: int, first: int, last: int) -> None:
        middle = kd.split(*clouds[b], first, last)
        halves.extend(run for run in ((b, first, middle), (b, middle, last)) if run[1] < run[2])

    # Level by level, until there is enough for all threads to do.
    while (
        tasks
        and len(tasks) < 4 * torch.get_num_threads()
        and max(last - first for _, first, last in tasks) > _MIN_POINTS
    ):
        halves: list[tuple[int, int, int]] = []
        share(split, tasks)
        tasks = halves
    share(lambda b, first, last: kd.sort(*clouds[b], first, last), tasks)
    return numbers.long()


def _by_torch(points: Tensor, leaf: int) -> Tensor:
    """Halve all runs of a level at once. Points at infinity make the number of leaves a power of two, and come last."""
    B, N, D = points.shape
    size = leaf
    while size < N:
        size *= 2
    order = torch.arange(size).repeat(B, 1)
    points = pad(points, (0, 0, 0, size - N), value=torch.inf)
    run = size
    while run > leaf:
        runs = points.gather(1, order[..., None].expand(-1, -1, D)).unflatten(1, (-1, run))  # (B, runs, run, D)
        sides = torch.where(runs == torch.inf, -torch.inf, runs).amax(2) - runs.amin(2)  # −inf without points
        axes = sides.argmax(-1)[..., None, None].expand(-1, -1, run, -1)
        ranks = runs.gather(-1, axes)[..., 0].argsort(-1)  # (B, runs, run)
        order = order.unflatten(1, (-1, run)).gather(-1, ranks).flatten(1)
        run //= 2
    return order[:, :N].contiguous()

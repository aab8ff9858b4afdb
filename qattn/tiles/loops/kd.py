"""The order of a balanced k-d tree.

Halving a cloud repeatedly at the median of its longest side gives runs of near points. Pairs of such runs within reach
of one another hold half as many points as those along a space-filling curve.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
from numba import njit

from qattn.tiles.compiled import compiled

__all__ = ["sort", "split"]

_SAMPLE = 33  # coordinates from which a pivot is chosen
_FOR_SIDES = 128  # points, about, from which the longest side is found


@njit
def _swap(points, order, i, j):
    for c in range(points.shape[1]):
        points[i, c], points[j, c] = points[j, c], points[i, c]
    order[i], order[j] = order[j], order[i]


@njit
def _pivot(points, first, last, k, axis, sample):
    """Return a coordinate of rows first … last that is likely near the k-th: an order statistic of a sample of them."""
    if last - first < 8 * _SAMPLE:
        a, b, c = points[first, axis], points[(first + last) // 2, axis], points[last, axis]
        return max(min(a, b), min(max(a, b), c))
    for n in range(_SAMPLE):
        x, i = points[first + n * (last - first) // (_SAMPLE - 1), axis], n
        while i > 0 and sample[i - 1] > x:
            sample[i] = sample[i - 1]
            i -= 1
        sample[i] = x
    return sample[(k - first) * (_SAMPLE - 1) // (last - first)]


@njit
def _select(points, order, first, last, k, axis, sample):
    """Swap rows first … last − 1 until none before k lies beyond one from k on, along one axis (quickselect)."""
    last -= 1
    while first < last:
        pivot = _pivot(points, first, last, k, axis, sample)
        i, j = first, last
        while i <= j:  # equal numbers stop both scans, so that ties are divided evenly
            while points[i, axis] < pivot:
                i += 1
            while points[j, axis] > pivot:
                j -= 1
            if i <= j:
                _swap(points, order, i, j)
                i += 1
                j -= 1
        if k <= j:
            last = j
        elif k >= i:
            first = i
        else:
            return


@njit
def _longest_side(points, first, last):
    """Return the longest side of the box of rows first … last − 1, as far as a sample of them shows."""
    axis, longest = 0, points[first, 0] - points[first, 0]
    step = max(1, (last - first) // _FOR_SIDES)
    for c in range(points.shape[1]):
        low = high = points[first, c]
        for i in range(first + step, last, step):
            low, high = min(low, points[i, c]), max(high, points[i, c])
        if high - low > longest:
            axis, longest = c, high - low
    return axis


@njit
def _split(points, order, first, last, leaf, sample):
    """Divide rows first … last − 1 in two, and return where the second part begins; `last` if they are one leaf.

    The first part has the largest number 2^n of leaves below the total, so that every aligned run of 2^n leaves is a
    node of the tree.
    """
    if last - first <= leaf:
        return last
    size = leaf
    while 2 * size < last - first:
        size *= 2
    _select(points, order, first, last, first + size, _longest_side(points, first, last), sample)
    return first + size


@compiled
def split(points, order, first, last, leaf):
    """Divide rows first … last − 1 of points (N, d), and of `order` (N,) with them, as `_split` does."""
    return _split(points, order, first, last, leaf, np.empty(_SAMPLE, points.dtype))


@compiled
def sort(points, order, first, last, leaf):
    """Sort the rows first … last − 1 of points (N, d), and `order` (N,) with them, into the leaves of a tree."""
    stack, sample = [(first, last)], np.empty(_SAMPLE, points.dtype)
    while len(stack) > 0:
        first, last = stack.pop()
        middle = _split(points, order, first, last, leaf, sample)
        if middle < last:
            stack.append((first, middle))
            stack.append((middle, last))

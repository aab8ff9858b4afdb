"""The order of a balanced k-d tree.

Halving a cloud repeatedly at the median of its longest side gives runs of near points. Pairs of such runs within reach
of one another hold half as many points as runs along a space-filling curve.

Points move together with their indices, as rows of words of 16 bytes. `rows` (N, W) and `words` (N, w) are views of the
same memory: the first has the d coordinates of each point, and something else in its other columns. `width` is a tuple
with an item for each word of a row, so that the compiler knows their number, or the empty tuple if it need not.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
from numba import njit

from qattn.tiles.compiled import compiled

__all__ = ["sort", "split"]

_SAMPLE = 33  # coordinates from which a pivot is chosen
_FOR_SIDES = 128  # points, about, from which the longest side is found


@njit
def _pivot(rows, first, last, k, axis, sample):
    """Return a coordinate of rows first … last that is likely near the k-th: an order statistic of a sample."""
    if last - first < 8 * _SAMPLE:
        a, b, c = rows[first, axis], rows[(first + last) // 2, axis], rows[last, axis]
        return max(min(a, b), min(max(a, b), c))
    for n in range(_SAMPLE):
        x, i = rows[first + n * (last - first) // (_SAMPLE - 1), axis], n
        while i > 0 and sample[i - 1] > x:
            sample[i] = sample[i - 1]
            i -= 1
        sample[i] = x
    return sample[(k - first) * (_SAMPLE - 1) // (last - first)]


@njit(forceinline=True)
def _partition(rows, words, first, last, axis, pivot, with_equal, width):
    """Move the rows below a pivot, or at most equal to it, to the front; return where the others begin.

    Every row is swapped, and only the place to swap with depends on the comparison. A branch would be mispredicted half
    of the time, which costs three times as much as a swap.
    """
    place = first
    for i in range(first, last + 1):
        x = rows[i, axis]
        for c in range(len(width) or words.shape[1]):
            words[i, c], words[place, c] = words[place, c], words[i, c]
        place += x <= pivot if with_equal else x < pivot
    return place


@njit
def _select(rows, words, first, last, k, axis, sample, width):
    """Swap rows first … last − 1 until none before k lies beyond one from k on, along one axis (quickselect)."""
    last -= 1
    while first < last:
        pivot = _pivot(rows, first, last, k, axis, sample)
        place = _partition(rows, words, first, last, axis, pivot, False, width)
        if k < place:
            last = place - 1
        elif place > first:
            first = place
        else:  # the pivot is the least of them: those equal to it are in order
            first = _partition(rows, words, first, last, axis, pivot, True, width)
            if k < first:
                return


@njit
def _longest_side(rows, dims, first, last):
    """Return the longest side of the box of rows first … last − 1, as far as a sample of them shows."""
    axis, longest = 0, rows[first, 0] - rows[first, 0]
    step = max(1, (last - first) // _FOR_SIDES)
    for c in range(dims):
        low = high = rows[first, c]
        for i in range(first + step, last, step):
            low, high = min(low, rows[i, c]), max(high, rows[i, c])
        if high - low > longest:
            axis, longest = c, high - low
    return axis


@njit
def _split(rows, words, dims, first, last, leaf, sample, width):
    """Divide rows first … last − 1 in two, and return where the second part begins; `last` if they are one leaf.

    The first part has the largest number 2^n of leaves below the total, so that every aligned run of 2^n leaves is a
    node of the tree.
    """
    if last - first <= leaf:
        return last
    size = leaf
    while 2 * size < last - first:
        size *= 2
    _select(rows, words, first, last, first + size, _longest_side(rows, dims, first, last), sample, width)
    return first + size


@compiled
def split(rows, words, dims, width, leaf, first, last):
    """Divide the rows first … last − 1, as `_split` does."""
    return _split(rows, words, dims, first, last, leaf, np.empty(_SAMPLE, rows.dtype), width)


@compiled
def sort(rows, words, dims, width, leaf, first, last):
    """Sort the rows first … last − 1 into the leaves of a tree."""
    stack, sample = [(first, last)], np.empty(_SAMPLE, rows.dtype)
    while len(stack) > 0:
        first, last = stack.pop()
        middle = _split(rows, words, dims, first, last, leaf, sample, width)
        if middle < last:
            stack.append((first, middle))
            stack.append((middle, last))

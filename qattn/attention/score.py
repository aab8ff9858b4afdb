"""Scores: functions of one query and one key, written coordinate by coordinate.

A score takes two tuples of coordinates, (q_1, …, q_D) and (k_1, …, k_D), and returns s(q, k) elementwise. The same
function serves blocks of pairs in plain torch and single pairs inside a compiled kernel.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["Score", "gaussian", "pair_score"]

Score = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def gaussian(query: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
    """Compute −½‖q − k‖² from differences: nothing cancels, however far the points are from the origin."""
    score = (query[0] - key[0]) ** 2
    for q, k in zip(query[1:], key[1:], strict=True):
        score = score + (q - k) ** 2
    return -0.5 * score


def pair_score(score: Score, query: Sequence[Tensor], key: Sequence[Tensor], sigma: Tensor | None) -> Tensor:
    """Compute s(q, k), or s((q − k) / σ, 0) with a bandwidth: differences come first, as scaling would round points."""
    if sigma is None:
        return score(query, key)
    return score([(q - k) / sigma for q, k in zip(query, key, strict=True)], [0.0] * len(query))  # type: ignore[list-item]

"""Whether all ranks ask for the same: hashes of what each of them asks for, compared before they compute together.

Ranks that differ in a tolerance or in a number of channels would run out of step: one waits for a message that nobody
sends, or takes one message for another. A short message of a fixed length, sent first, finds that out.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["LENGTH", "Request", "disagreement"]

LENGTH = 16  # of the hashes of a request: of the call, and of up to 15 options
_MOST_CHARACTERS = 60  # of a value that a message shows


class Request(NamedTuple):
    """A function that a rank has called, and its options as text, by the names that messages give them."""

    call: str
    options: Mapping[str, str]

    def hashes(self) -> list[int]:
        """`LENGTH` integers that are the same for equal requests, whatever the process."""
        texts = [self.call, *(f"{name} {value}" for name, value in self.options.items())]
        hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
        return [int.from_bytes(h, "big", signed=True) for h in hashes] + [0] * (LENGTH - len(hashes))

    def to_json(self) -> bytes:
        return json.dumps([self.call, dict(self.options)]).encode()

    @staticmethod
    def from_json(text: bytes) -> "Request":
        return Request(*json.loads(text))


def disagreement(requests: Sequence[Request]) -> str:
    """Which options differ, and on which ranks; the requests are in the order of the ranks."""
    calls = [f"`{request.call}`" for request in requests]
    if len(set(calls)) > 1:
        return f"All ranks should call the same functions in the same order; got {_by_ranks(calls)}."
    sentences = []
    for name in requests[0].options:
        values = [request.options[name] for request in requests]
        if len(set(values)) > 1:
            sentences.append(f"{name} should be the same on all ranks; got {_by_ranks(values)}.")
    return " ".join(sentences)


def _by_ranks(values: Sequence[str]) -> str:
    """Each value, and the ranks that gave it."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [str(rank) for rank, other in enumerate(values) if other == value]
        shown = value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}…"
        parts.append(f"{shown} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    return " and ".join(parts)

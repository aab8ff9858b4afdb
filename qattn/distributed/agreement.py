"""Check that all ranks call the same function with the same options, from hashes that they exchange first.

Ranks with different tolerances or numbers of channels would get out of step: one would wait for a message that is never
sent, or mistake one message for another. A short message of fixed length, sent first, detects that.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["LENGTH", "Request", "disagreement"]

LENGTH = 16  # hashes per request: one of the call, and up to 15 of options
_MAX_CHARACTERS = 60  # shown of a value in a message


class Request(NamedTuple):
    """A function that a rank calls, and its options as text, by the names that messages give them."""

    call: str
    options: Mapping[str, str]

    def hashes(self) -> list[int]:
        """Compute `LENGTH` integers that are the same for equal requests in all processes."""
        texts = [self.call, *(f"{name} {value}" for name, value in self.options.items())]
        hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
        return [int.from_bytes(h, "big", signed=True) for h in hashes] + [0] * (LENGTH - len(hashes))

    def to_json(self) -> bytes:
        return json.dumps([self.call, dict(self.options)]).encode()

    @staticmethod
    def from_json(text: bytes) -> "Request":
        return Request(*json.loads(text))


def disagreement(requests: Sequence[Request]) -> str:
    """Write a message that names the options that differ, for one request per rank."""
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
    """List each value with the ranks that have it."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [str(rank) for rank, other in enumerate(values) if other == value]
        shown = value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}…"
        parts.append(f"{shown} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    return " and ".join(parts)

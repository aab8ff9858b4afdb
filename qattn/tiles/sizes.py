"""Sizes of tiles, the memory layout that the compiled loops and their callers share."""

__all__ = ["PART", "TILE"]

TILE = 64  # points
PART = 16  # points of a part of a tile: floats in the widest register

"""Compiled loops over tiles of points on a CPU. They depend on clouds, weights and values, and on nothing else."""

__all__: list[str] = []

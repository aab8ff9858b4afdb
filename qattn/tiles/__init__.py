"""Compiled loops over tiles of points, for CPUs and GPUs. They depend on clouds, weights and values alone."""

__all__: list[str] = []

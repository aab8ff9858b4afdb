"""Diffusion operators: normalized kernels."""

__all__: list[str] = []

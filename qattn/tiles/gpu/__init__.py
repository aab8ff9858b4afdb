"""Kernels for GPUs, compiled by Triton. Triton is optional, so import them where they are launched."""

__all__: list[str] = []

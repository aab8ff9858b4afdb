"""Functions compiled by Numba. Importing them takes a while, so import them where they are called."""

__all__: list[str] = []

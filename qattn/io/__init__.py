"""Clouds, meshes, splats and grids from files, and results into them (extra `io`)."""

from qattn.io.building import PartlyReadWarning
from qattn.io.cloud import Cloud, Grid
from qattn.io.reading import FORMATS, read
from qattn.io.writing import replacing, write

__all__ = ["FORMATS", "Cloud", "Grid", "PartlyReadWarning", "read", "replacing", "write"]

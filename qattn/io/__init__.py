"""Read point clouds, meshes, splats and voxel grids from files, and write them (extra `io`)."""

from qattn.io.cloud import Cloud
from qattn.io.errors import PartlyReadWarning
from qattn.io.grid import Grid
from qattn.io.reading import FORMATS, read
from qattn.io.writing import atomic_write, write

__all__ = ["FORMATS", "Cloud", "Grid", "PartlyReadWarning", "atomic_write", "read", "write"]

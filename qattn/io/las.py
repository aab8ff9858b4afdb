"""LAS and LAZ files, read by laspy after the counts in their headers were compared with the size of the file."""

import struct
from importlib import import_module
from io import BytesIO

import numpy as np

from qattn.io.cloud import Cloud, cloud_from_arrays
from qattn.io.errors import RefusedError, check_size

__all__ = ["read_las"]

_COORDINATE_BYTES = 24  # per point, in float64


def read_las(data: bytes, limit: int) -> Cloud:
    """Read points with all their dimensions."""
    laspy = import_module("laspy")
    # laspy searches for as many records as the header declares, even billions; a record has at least 54 bytes.
    if len(data) >= 104 and 54 * struct.unpack_from("<I", data, 100)[0] > len(data):
        raise ValueError("fewer records than the header declares")
    # A single thread: several threads trust the sizes in the chunk table, and lazrs aborts if memory runs out.
    with laspy.open(BytesIO(data), read_evlrs=False, laz_backend=laspy.LazBackend.Lazrs) as file:
        header = file.header
        if header.point_count > 1000 * len(data):  # a byte holds at most some hundred points, all equal
            raise ValueError("fewer points than the header declares")
        check_size(header.point_count * (header.point_format.size + _COORDINATE_BYTES), limit)
        if header.are_points_compressed and _num_chunks(data, header.offset_to_point_data) > len(data):
            raise ValueError("fewer chunks than the chunk table declares")
        try:
            las = file.read_points(-1)  # only points: the records behind them may be billions too
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a panic in Rust, which is not an Exception
                raise
            raise ValueError(str(error)) from None
    if len(las) != header.point_count:
        raise ValueError("fewer points than the header declares")
    if len(las) == 0:
        raise RefusedError("it holds no points.")
    names = [name for name in las.point_format.dimension_names if name not in ("X", "Y", "Z")]
    x = np.column_stack([np.asarray(axis, np.float64) for axis in (las.x, las.y, las.z)])
    return cloud_from_arrays(x, None, {name: np.asarray(las[name]) for name in names})


def _num_chunks(data: bytes, start: int) -> int:
    """Return the declared number of chunks of a LAZ file, for which lazrs allocates memory."""
    (table,) = struct.unpack_from("<q", data, start)
    if table == -1:  # written as a stream: the position of the table is at the end of the file
        (table,) = struct.unpack_from("<q", data, len(data) - 8)
    return int(struct.unpack_from("<I", data, table + 4)[0])

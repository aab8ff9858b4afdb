"""Reads LAS and LAZ files by laspy, after their counts have been compared with what there is."""

import struct
from importlib import import_module
from io import BytesIO

import numpy as np

from qattn.io.building import cloud_of
from qattn.io.cloud import Cloud
from qattn.io.limits import RefusedError, within

__all__ = ["read_las"]

_COORDINATES = 24  # bytes of a point in float64


def read_las(data: bytes, limit: int) -> Cloud:
    """Reads a cloud with all dimensions."""
    laspy = import_module("laspy")
    # laspy would look for as many records as the header says, be it billions; one takes 54 bytes.
    if len(data) >= 104 and 54 * struct.unpack_from("<I", data, 100)[0] > len(data):
        raise ValueError("fewer records than its header says")
    # One thread: several trust the sizes in the table of chunks, and lazrs ends the process if memory is short.
    with laspy.open(BytesIO(data), read_evlrs=False, laz_backend=laspy.LazBackend.Lazrs) as file:
        header = file.header
        if header.point_count > 1000 * len(data):  # equal points take a byte a hundred; memory is taken for all
            raise ValueError("fewer points than its header says")
        within(limit, header.point_count * (header.point_format.size + _COORDINATES))
        if header.are_points_compressed and _chunks(data, header.offset_to_point_data) > len(data):
            raise ValueError("fewer chunks than its table says")
        try:
            las = file.read_points(-1)  # the points alone: records behind them may be billions too
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, which is no Exception
                raise
            raise ValueError(str(error)) from None
    if len(las) != header.point_count:
        raise ValueError("fewer points than its header says")
    if len(las) == 0:
        raise RefusedError("it holds no points.")
    names = [name for name in las.point_format.dimension_names if name not in ("X", "Y", "Z")]
    x = np.column_stack([np.asarray(axis, np.float64) for axis in (las.x, las.y, las.z)])
    return cloud_of(x, None, {name: np.asarray(las[name]) for name in names})


def _chunks(data: bytes, start: int) -> int:
    """How many chunks of points a LAZ file says it has, for which lazrs takes memory."""
    (table,) = struct.unpack_from("<q", data, start)  # where their table is
    if table == -1:  # written in one go, so that its place stands at the end
        (table,) = struct.unpack_from("<q", data, len(data) - 8)
    return int(struct.unpack_from("<I", data, table + 4)[0])

"""The kernels of the `triton` backend with the constants that `tiles.gpu.operators` launches them with; no tests."""

from typing import Any
from unittest import mock

import torch
from machine_code import Kernel, compiled

from qattn.attended import PairTerms
from qattn.tiles import device
from qattn.tiles.device import Cutoff, DeviceTiling
from qattn.tiles.gpu import operators
from qattn.tiles.sizes import TILE

__all__ = ["TYPES", "build", "constants_of", "launches"]

_FLOATS = (
    "query", "keys", "beta", "scales", "tops", "values", "shifts", "rows", "columns", "lse", "out", "sums", "queries",
    "floors", "constants",
)  # fmt: skip
TYPES = (
    dict.fromkeys(_FLOATS, "*fp32")
    | dict.fromkeys(("lifted_query", "lifted_keys"), "*fp16")
    | {"parts": "*bf16"}
    | dict.fromkeys(("counts", "lists"), "*i32")
    | dict.fromkeys(("one", "tiny", "log_tol"), "fp32")
    | dict.fromkeys(("clouds", "chunks", "width", "query_size", "key_size", "query_tiles", "key_tiles"), "i32")
)


def constants_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> dict[str, Any]:
    """Return what the compiler knows: constants, arguments that are None, and whether there is one chunk of channels.

    Triton compiles code of its own for numbers that are 1. Here one cloud is compiled as if it were one of several.
    """
    given = list(zip(kernel.arg_names, arguments, strict=False))
    return constants | {name: x for name, x in given if x is None or (name, x) == ("chunks", 1)}


def launches(dims: int, channels: int, *, listed: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return, for each kernel, its constants and its number of warps as `operators` launches it.

    Args:
        dims: Dimension of the points.
        channels: Number of channels of values, and one less than that of rows and columns.
        listed: Whether kernels walk over lists of tiles.
        dtype: Dtype of the values.
    """
    found: dict[str, Any] = {}

    def record(kernel: Any, grid: tuple[int, ...], num_warps: int, *arguments: Any, **constants: Any) -> None:
        found.setdefault(kernel.__name__, (kernel, constants_of(kernel, arguments, constants), num_warps))

    cloud = DeviceTiling(torch.zeros(1, 64, dims))
    lists = device._Lists(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, 256, dtype=torch.int32))
    cutoff = Cutoff(1e-3, {}) if listed else None
    value, terms = torch.zeros(1, 64, channels, dtype=dtype), torch.zeros(1, 64, channels + 1)
    with mock.patch.object(operators, "_launch", record), mock.patch.object(device, "_near_tiles", return_value=lists):
        for is_lifted in (False, True) if dims <= 7 else (False,):
            device.attend(cloud, cloud, None, None, None, cutoff, is_lifted)
            device.attend(cloud, cloud, None, value, None, cutoff, is_lifted)
        sums = PairTerms(terms, terms, torch.zeros(1, 64), by_column=True, num_values=channels)
        device.differentiate(cloud, cloud, None, None, sums, cutoff)
    return found


def build(name: str, capability: int, dims: int, channels: int, **options: Any) -> tuple[Kernel, int]:
    """Compile a kernel as it is launched; also return the number of pairs of a step for each thread."""
    kernel, constants, warps = launches(dims, channels, **options)[name]
    columns = TILE if name == "sum_lifted_blocks" else constants["COLUMNS"]  # it takes a tile at a time
    return compiled(kernel, TYPES, constants, capability, warps), constants["ROWS"] * columns // (32 * warps)

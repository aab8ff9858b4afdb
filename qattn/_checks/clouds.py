"""Points, meshes and bandwidths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qattn._broadcasting import broadcast_shapes
from qattn._checks.numbers import as_tensor, finite, floating, positive, shape_of

__all__ = [
    "bandwidth",
    "counts_of_clouds",
    "mesh",
    "no_empty_clouds",
    "one_bandwidth",
    "one_cloud",
    "one_shape",
    "points",
    "same_dimension",
    "shares",
    "simplices",
    "smoothing",
    "two_clouds",
]


def points(name: str, numbers: Any, dimensions: Sequence[int] = (), *, least: int = 1) -> Tensor:
    """Positions (*batch, N, d) of at `least` so many points, d one of `dimensions` if there are any."""
    tensor = floating(name, numbers)
    if tensor.ndim < 2:
        raise ValueError(
            f"`{name}` should have shape (*batch, N, d); got {shape_of(tensor)}. "
            f"For points on a line, give them as `{name}[:, None]`."
        )
    if tensor.shape[-2] < least or tensor.shape[-1] == 0:
        raise ValueError(f"`{name}` should hold at least one point with one coordinate; got shape {shape_of(tensor)}.")
    if dimensions and tensor.shape[-1] not in dimensions:
        expected = " or ".join(f"(*batch, N, {d})" for d in dimensions)
        raise ValueError(f"`{name}` should have shape {expected}; got {shape_of(tensor)}.")
    finite(name, tensor, "Drop those points first, or set them to 0 and give them mass 0.")
    return tensor


def one_cloud(numbers: Any, dims: int, least: int) -> Tensor:
    """Positions (N, d) of one cloud."""
    tensor = points("points", numbers, (dims,))
    if tensor.ndim != 2 or len(tensor) < least:
        raise ValueError(
            f"`points` should have shape (N, {dims}), one cloud of {least} or more; got {shape_of(tensor)}."
        )
    return tensor


def one_shape(name: str, numbers: Any, like: tuple[str, Tensor] | None = None) -> Tensor:
    """Positions (N, d) of one shape, or vectors (N, d), one for each point of another, which is given by its name."""
    tensor = points(name, numbers)
    if tensor.ndim != 2:
        raise ValueError(f"`{name}` should have shape (N, d), one shape; got {shape_of(tensor)}.")
    if like is not None and (tensor.shape, tensor.dtype, tensor.device) != (
        like[1].shape,
        like[1].dtype,
        like[1].device,
    ):
        given = (f"{shape_of(x)} {str(x.dtype).removeprefix('torch.')} {x.device}" for x in (like[1], tensor))
        raise ValueError(
            "`{}` should be like `{}`, {}, a row for each of its points; got {}.".format(name, like[0], *given)
        )
    return tensor


def two_clouds(source: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Positions (*batch, N, d) and (*batch, M, d) of points in the same space, with a common batch and dtype."""
    x, y = points("source", source), points("target", target)
    if y.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"`target` should have as many coordinates as `source` {shape_of(x)}: shape (*batch, M, {x.shape[-1]}); "
            f"got {shape_of(y)}."
        )
    if y.device != x.device:
        raise ValueError(
            f"`target` should be on the device of `source`, {x.device}; got {y.device}. "
            "Move it with `target.to(source.device)`."
        )
    try:
        batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"The batch axes should broadcast to one shape; got `source` {shape_of(x)}, `target` {shape_of(y)}."
        ) from None
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype).expand(*batch, -1, -1), y.to(dtype).expand(*batch, -1, -1)


def shares(name: str, numbers: Any, cloud: Tensor) -> Tensor:
    """Masses (*batch, N) ≥ 0 of points (*batch, N, d), divided by their sums; 1/N each by default."""
    shape, N = cloud.shape[:-1], cloud.shape[-2]
    if numbers is None:
        return cloud.new_full(shape, 1 / N)
    tensor = floating(name, numbers).to(cloud.device, cloud.dtype)
    if tensor.shape not in (shape, shape[-1:]):
        raise ValueError(
            f"`{name}` should have shape {tuple(shape)}, one mass a point; got {shape_of(tensor)}. "
            "Leave it out for equal masses."
        )
    finite(name, tensor, "Points without mass get 0.")
    if (tensor < 0).any() or (tensor.sum(-1) == 0).any():
        raise ValueError(f"`{name}` should be 0 or more, with a positive sum in each cloud.")
    return (tensor / tensor.sum(-1, keepdim=True)).expand(shape)


def counts_of_clouds(packed: Tensor, offset: Any, batch: Any) -> Tensor:
    """The sizes (B,) of packed clouds, from where they end or from the number of each row; a tensor, array or list."""
    if (offset is None) == (batch is None):
        raise ValueError("Give either `offset`, where each cloud ends, or `batch`, the cloud of each row.")
    T = len(packed)
    if offset is not None:
        offset = _integers("offset", offset, packed.device)
        counts = torch.diff(offset, prepend=offset.new_zeros(1))
        if offset.ndim != 1 or len(offset) == 0 or int(offset[-1]) != T or (counts < 0).any():
            raise ValueError(
                f"`offset` should rise to the number of rows, {T}, without a leading 0; got {offset.tolist()[:8]}. "
                "From `cu_seqlens`, take `cu_seqlens[1:]`."
            )
        return counts
    batch = _integers("batch", batch, packed.device)
    if batch.shape != (T,) or T == 0 or (torch.diff(batch) < 0).any() or int(batch[0]) < 0:
        raise ValueError(
            f"`batch` should be sorted, from 0, with one number a row, shape ({T},); got {shape_of(batch)}."
        )
    return torch.bincount(batch)


def _integers(name: str, numbers: Any, device: torch.device) -> Tensor:
    tensor = as_tensor(name, numbers).to(device)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"`{name}` should be integers; got {str(tensor.dtype).removeprefix('torch.')}.")
    return tensor.long()


def no_empty_clouds(totals: Tensor, name: str) -> None:
    """Checks the numbers (B,) of points of packed clouds."""
    if (totals == 0).any():
        empty = ", ".join(map(str, (totals == 0).nonzero()[:, 0].tolist()))
        raise ValueError(
            f"`{name}` should give each of its {len(totals)} clouds a point; those numbered {empty}, from 0, have "
            "none. Leave them out."
        )


def same_dimension(new: Tensor, old: Tensor) -> None:
    """Checks points at which a kernel is to be evaluated."""
    if new.shape[-1] != old.shape[-1]:
        raise ValueError(
            f"`points` should have {old.shape[-1]} coordinates, as the kernel's own; got shape {shape_of(new)}."
        )


def bandwidth(sigma: Any, cloud: Tensor) -> Tensor:
    """σ without axes or (H,), in the dtype of the logarithms."""
    dtype = torch.promote_types(cloud.dtype, torch.float32)
    tensor = as_tensor("sigma", sigma).to(cloud.device, dtype)
    if tensor.ndim > 1:
        raise ValueError(
            f"`sigma` should be a number, or of shape (H,) for one head a bandwidth; got {shape_of(tensor)}."
        )
    positive("`sigma`", tensor.detach() if tensor.ndim else float(tensor.detach()))
    return tensor


def one_bandwidth(sigma: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """σ without axes."""
    tensor = as_tensor("sigma", sigma).to(device, dtype)
    if tensor.ndim > 0:
        raise ValueError(
            f"`sigma` should be one number; got shape {shape_of(tensor)}. Make a kernel for each bandwidth, and add "
            "them or use them by themselves."
        )
    positive("`sigma`", float(tensor.detach()))
    return tensor


def smoothing(sigma: Any, options: dict[str, Any]) -> None:
    """Checks the bandwidth of an operator that moves points, which may be left out with all else of it."""
    if sigma is not None:
        one_bandwidth(sigma, torch.float64, torch.device("cpu"))
    elif options:
        raise ValueError(f"{', '.join(options)} are for smoothing, and that has a bandwidth: give `sigma` too.")


def simplices(name: str, numbers: Any, corners: int, vertices: Tensor) -> Tensor:
    """The corners (F, corners) of triangles or tetrahedra, as numbers of vertices."""
    tensor = as_tensor(name, numbers).to(vertices.device)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"`{name}` should be integers, which number the vertices; got {dtype}.")
    if tensor.ndim != 2 or tensor.shape[-1] != corners or len(tensor) == 0:
        raise ValueError(f"`{name}` should have shape (F, {corners}) with at least one row; got {shape_of(tensor)}.")
    tensor, N = tensor.long(), vertices.shape[-2]
    low, high = (int(end) for end in tensor.aminmax())
    if low < 0 or high >= N:
        raise ValueError(
            f"`{name}` should number vertices from 0 to {N - 1}; got numbers from {low} to {high}."
            + (" They seem to count from 1: subtract 1." if low == 1 and high == N else "")
        )
    return tensor


def mesh(given: Any) -> tuple[Tensor, Tensor]:
    """The vertices (N, 3) and the triangles (F, 3) of one mesh in space: a pair, or an object that has them."""
    if hasattr(given, "vertices") and hasattr(given, "faces"):  # a trimesh.Trimesh, which need not be imported for it
        given = given.vertices, given.faces
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(
            f"`mesh` should be a pair (vertices, faces) or a trimesh.Trimesh; got {type(given).__name__}. "
            "A file is read by `trimesh.load_mesh`."
        )
    vertices, faces = given
    positions = points("vertices", vertices, (3,))
    if positions.ndim != 2:
        raise ValueError(f"`vertices` should have shape (N, 3), one mesh in space; got {shape_of(positions)}.")
    return positions, simplices("faces", faces, 3, positions)

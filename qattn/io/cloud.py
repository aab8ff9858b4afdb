"""Point clouds, meshes and Gaussian splats as files hold them.

Splats are points with scales, rotations and opacities among their attributes, so that a cloud that was read is written
again without loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from qattn._types import ArrayLike
from qattn.bandwidths import spacing
from qattn.io.errors import RefusedError
from qattn.kernels import GaussianKernel, Kernel, MixtureKernel
from qattn.mass import vertex_areas

__all__ = ["Cloud", "cloud_from_arrays"]

_FAR = 10.0  # extents from the origin, beyond which float32 would lose digits


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points with optional faces and attributes.

    Attributes:
        coordinates: Positions in float32 or float64 as in the file, shape (N, d).
        faces: Vertex indices of the triangles of a mesh, integers of shape (F, 3), or None.
        attributes: Arrays of shape (N,) or (N, C) by name, in the order and dtype of the file.

    Examples:
        >>> cloud = Cloud(np.array([[5e5, 5e6, 10.0], [5e5, 5e6 + 0.001, 10.0]]))
        >>> cloud.points[1] - cloud.points[0]
        array([0.   , 0.001, 0.   ], dtype=float32)
    """

    coordinates: np.ndarray
    faces: np.ndarray | None = None
    attributes: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        x = self.coordinates
        if x.dtype not in (np.float32, np.float64):
            raise ValueError(f"`coordinates` should be float32 or float64; got {x.dtype}.")
        if x.ndim != 2 or x.size == 0:
            raise ValueError(f"`coordinates` should have shape (N, d) with at least one point; got {x.shape}.")
        num_bad = len(x) - int(np.isfinite(x).all(-1).sum())
        if num_bad:
            raise ValueError(f"{num_bad} of the {len(x)} points are not finite. Remove points with NaN or infinity.")
        if self.faces is not None:
            if self.faces.ndim != 2 or self.faces.shape[1] != 3 or len(self.faces) == 0:
                raise ValueError(f"`faces` should have shape (F, 3) with at least one row; got {self.faces.shape}.")
            first, last = self.faces.min(), self.faces.max()
            if first < 0 or last >= len(x):
                raise ValueError(f"`faces` should index points from 0 to {len(x) - 1}; got {first} to {last}.")
        for name, values in self.attributes.items():
            if values.ndim not in (1, 2) or len(values) != len(x) or values.dtype.kind not in "biuf":
                raise ValueError(
                    f"The attribute `{name}` should be numbers of shape ({len(x)},) or ({len(x)}, C); "
                    f"got {values.dtype} of shape {values.shape}."
                )

    def __len__(self) -> int:
        return len(self.coordinates)

    @cached_property
    def offset(self) -> np.ndarray:
        """Shift that is subtracted from the coordinates before they become float32, shape (d,).

        The center of the bounding box if that lies far from the origin, else 0.
        """
        low, high = self.box
        is_far = max(np.abs(low).max(), np.abs(high).max()) > _FAR * self.extent
        return (low + high) / 2 if is_far else np.zeros_like(low)

    @cached_property
    def points(self) -> np.ndarray:
        """Coordinates minus the offset, float32 of shape (N, d): the points of the kernel."""
        return (self.coordinates - self.offset).astype(np.float32)

    @cached_property
    def box(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest coordinate along each axis, float64 of shape (d,) each."""
        return self.coordinates.min(0).astype(np.float64), self.coordinates.max(0).astype(np.float64)

    @property
    def extent(self) -> float:
        """Length of the diagonal of the bounding box."""
        low, high = self.box
        return float(np.linalg.norm(high - low))

    @cached_property
    def spacing(self) -> float:
        """Mean distance from a point to the nearest distinct one, over at most 10,000 points."""
        return spacing(self.points)

    @cached_property
    def mass(self) -> np.ndarray | None:
        """Masses of shape (N,): the attribute `mass` if present, else the vertex areas of a mesh, else None."""
        if "mass" in self.attributes:
            return self.attributes["mass"]
        return None if self.faces is None else np.asarray(vertex_areas(self.points, self.faces))

    @property
    def splats(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
        """Means, log scales, quaternions and opacity logits for `MixtureKernel.from_splats`; None without splats."""
        columns = [[f"scale_{i}" for i in range(3)], [f"rot_{i}" for i in range(4)]]
        if not {"opacity", *columns[0], *columns[1]} <= self.attributes.keys():
            return None
        log_scales, quaternions = (np.column_stack([self.attributes[name] for name in names]) for names in columns)
        return self.points, log_scales, quaternions, self.attributes["opacity"]

    def kernel(self, sigma: float) -> Kernel:
        """Return the mixture kernel of splats, or the Gaussian kernel of points."""
        if self.splats is None:
            return GaussianKernel(self.points, sigma)
        return MixtureKernel.from_splats(*self.splats, sigma=sigma)

    def with_points(self, points: ArrayLike) -> "Cloud":
        """Return a copy with other `points` of shape (N, d), to which the offset is added."""
        return replace(self, coordinates=(np.asarray(points) + self.offset).astype(self.coordinates.dtype))

    def with_attributes(self, **attributes: ArrayLike) -> "Cloud":
        """Return a copy with attributes added, or replaced where the names are equal."""
        arrays = {name: np.asarray(values) for name, values in attributes.items()}
        return replace(self, attributes={**self.attributes, **arrays})


def cloud_from_arrays(coordinates: np.ndarray, faces: np.ndarray | None, attributes: Mapping[str, np.ndarray]) -> Cloud:
    """Convert the arrays of a file to native byte order and make a cloud; wrong ones refuse the file."""
    if coordinates.dtype.kind not in "iuf" or (faces is not None and faces.dtype.kind not in "iu"):
        raise RefusedError("points should be real numbers, and faces integers.")
    is_single = coordinates.dtype.kind == "f" and coordinates.dtype.itemsize <= 4
    x = np.ascontiguousarray(coordinates, np.float32 if is_single else np.float64)
    if faces is not None:
        faces = np.ascontiguousarray(faces, np.int64) if len(faces) else None
    native = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("=")) for name, a in attributes.items()}
    try:
        return Cloud(x, faces, native)
    except ValueError as error:
        raise RefusedError(str(error)) from None

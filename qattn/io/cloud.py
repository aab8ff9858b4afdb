"""What a file holds: points with what is known of each, or a grid of voxels.

Splats are points too, with their scales, rotations and opacities among the attributes, so that whatever was read can be
written again with nothing lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qattn import _checks
from qattn.kernels import GaussianKernel, Kernel, MixtureKernel, VoxelKernel
from qattn.mass import vertex_areas

__all__ = ["Cloud", "Grid"]

_FAR = 10.0  # extents from the origin, beyond which float32 would lose digits
_FEW = 2_000  # points whose distances are all computed, in less time than a library for trees is imported
_SOME = 10_000  # points whose nearest neighbour is looked for

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points, the faces between them if they are a mesh, and attributes of each.

    Attributes:
        coordinates: Where the points are, shape (N, d), in float64 or float32 as the file has them.
        faces: The corners of triangles, integers of shape (F, 3), or None.
        attributes: Arrays of N rows by name, (N,) or (N, C), in the order and of the type of the file.

    Example:
        >>> cloud = Cloud(np.array([[5e5, 5e6, 10.0], [5e5, 5e6 + 0.001, 10.0]]))
        >>> cloud.points[1] - cloud.points[0]
        array([0.   , 0.001, 0.   ], dtype=float32)
    """

    coordinates: Array
    faces: Array | None = None
    attributes: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        x = self.coordinates
        if x.dtype not in (np.float32, np.float64):
            raise ValueError(f"`coordinates` should be float32 or float64; got {x.dtype}.")
        if x.ndim != 2 or x.size == 0:
            raise ValueError(f"`coordinates` should have shape (N, d) with at least one point; got {x.shape}.")
        is_finite = np.isfinite(x).all(-1)
        if not is_finite.all():
            count = len(x) - int(is_finite.sum())
            raise ValueError(f"{count} of the {len(x)} points are not finite, NaN or infinite: drop them first.")
        if self.faces is not None:
            if self.faces.ndim != 2 or self.faces.shape[1] != 3 or len(self.faces) == 0:
                raise ValueError(f"`faces` should have shape (F, 3) with at least one row; got {self.faces.shape}.")
            low, high = self.faces.min(), self.faces.max()
            if low < 0 or high >= len(x):
                raise ValueError(f"The faces number points from {low} to {high}, and there are {len(x)}.")
        for name, values in self.attributes.items():
            if values.ndim not in (1, 2) or len(values) != len(x) or values.dtype.kind not in "biuf":
                raise ValueError(
                    f"The attribute `{name}` should be numbers of shape ({len(x)},) or ({len(x)}, C); "
                    f"got {values.dtype} of shape {values.shape}."
                )

    def __len__(self) -> int:
        return len(self.coordinates)

    @cached_property
    def offset(self) -> Array:
        """What is taken off the coordinates before they become float32: 0, or the middle of a box far from 0."""
        low, high = self.box
        is_far = max(np.abs(low).max(), np.abs(high).max()) > _FAR * self.extent
        return (low + high) / 2 if is_far else np.zeros_like(low)

    @cached_property
    def points(self) -> Array:
        """The coordinates less the offset, in float32: what operators are made of."""
        return (self.coordinates - self.offset).astype(np.float32)

    @cached_property
    def box(self) -> tuple[Array, Array]:
        """The least and the largest coordinate along each axis, in float64."""
        return self.coordinates.min(0).astype(np.float64), self.coordinates.max(0).astype(np.float64)

    @property
    def extent(self) -> float:
        """The diagonal of the box."""
        low, high = self.box
        return float(np.linalg.norm(high - low))

    @cached_property
    def spacing(self) -> float:
        """The mean distance of a point to the nearest other place with a point, over at most 10,000 of them."""
        places = np.unique(self.points, axis=0)
        if len(places) == 1:
            return 0.0
        if len(places) <= _FEW:
            x = torch.from_numpy(places)
            distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
            return float(distances.amin(1).double().mean())
        from scipy.spatial import cKDTree  # here, because SciPy is slow to import

        some = places[:: -(-len(places) // _SOME)]
        return float(cKDTree(places).query(some, 2)[0][:, 1].mean())

    @cached_property
    def mass(self) -> Array | None:
        """The attribute `mass`, or the areas about the vertices of a mesh, or None: the masses of the kernel."""
        if "mass" in self.attributes:
            return self.attributes["mass"]
        return None if self.faces is None else np.asarray(vertex_areas(self.points, self.faces))

    @property
    def splats(self) -> tuple[Array, Array, Array, Array] | None:
        """Means, log scales, quaternions and logits of opacity, as `MixtureKernel.from_splats` takes them, if any."""
        names = {"scale": 3, "rot": 4}
        columns = {name: [f"{name}_{i}" for i in range(count)] for name, count in names.items()}
        if not {"opacity", *columns["scale"], *columns["rot"]} <= self.attributes.keys():
            return None
        scales, turns = (np.column_stack([self.attributes[name] for name in columns[key]]) for key in names)
        return self.points, scales, turns, self.attributes["opacity"]

    def kernel(self, sigma: float) -> Kernel:
        """The kernel of the splats, if these are splats, or the Gaussian kernel of the points."""
        if self.splats is None:
            return GaussianKernel(self.points, sigma)
        return MixtureKernel.from_splats(*self.splats, sigma=sigma)

    def moved(self, points: Any) -> "Cloud":
        """The same with other `points`, to which the offset is added again."""
        return replace(self, coordinates=(np.asarray(points) + self.offset).astype(self.coordinates.dtype))

    def with_attributes(self, **attributes: Any) -> "Cloud":
        """The same with further attributes, or with others of the same names."""
        given = {name: np.asarray(values) for name, values in attributes.items()}
        return replace(self, attributes={**self.attributes, **given})


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers on voxels: a mask, weights, labels or a picture.

    Attributes:
        values: Booleans, integers or floating point as the file has them, with 1, 2 or 3 axes; occupied voxels are
            those above 0, of which there is at least one.
        spacing: The size of a voxel along each axis.
        header: What else the file says, such as where the grid lies in the world, for a file of the same format.
    """

    values: Array
    spacing: tuple[float, ...]
    header: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.values.ndim not in (1, 2, 3) or self.values.dtype.kind not in "biuf":
            raise ValueError(
                "`values` should be a grid of real numbers with 1, 2 or 3 axes; "
                f"got {self.values.dtype} of shape {self.values.shape}."
            )
        if not self.occupied.any():
            raise ValueError(f"`values` should hold at least one occupied voxel, above 0, of {self.values.shape}.")
        _checks.spacing(self.spacing, self.values.ndim)

    @cached_property
    def occupied(self) -> Array:
        """True where the value is above 0."""
        return self.values if self.values.dtype.kind == "b" else self.values > 0

    @property
    def weights(self) -> Array:
        """What `VoxelKernel` takes: the occupied voxels, or weights if the values are floating point."""
        return self.values if self.values.dtype.kind == "f" else self.occupied

    @property
    def extent(self) -> float:
        """The diagonal of the box about the centers of the occupied voxels."""
        occupied = [np.flatnonzero(self.occupied.any(self._others(axis))) for axis in range(self.values.ndim)]
        return float(np.linalg.norm([h * (i[-1] - i[0]) for i, h in zip(occupied, self.spacing, strict=True)]))

    def _others(self, axis: int) -> tuple[int, ...]:
        return tuple(other for other in range(self.values.ndim) if other != axis)

    def kernel(self, sigma: float) -> VoxelKernel:
        """The kernel of the occupied voxels."""
        return VoxelKernel(torch.from_numpy(self.weights), sigma, self.spacing)

    def with_values(self, values: Array) -> "Grid":
        """The same grid with other values."""
        return replace(self, values=values)

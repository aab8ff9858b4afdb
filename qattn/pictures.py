"""Pictures of clouds: a camera, a light, colors, and plots that several scripts share.

Colors are tensors (N, 3) of red, green and blue from 0 to 1. matplotlib comes with the extra `examples` and is imported
only where it is needed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "camera_view",
    "colormap",
    "curves",
    "draw_mesh",
    "draw_modes",
    "facing_normals",
    "figure",
    "heat",
    "light",
    "render",
    "scatter",
    "show",
    "signed",
]

_MAX_MARKERS = 20_000  # more points are too many for matplotlib
_NUM_MODES = 6
_TITLE = 17  # points of its letters, so that it can be read where a wide picture is shown in a narrow column
_NEIGHBORS = 12  # of each point, through which a plane is laid


def figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches, without a window."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Pictures need matplotlib. Install it with `pip install 'qattn-diffusion[examples]'`."
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def camera_view(points: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate points and normals (N, 3) to a view from the side and slightly above: x right, y up, z to the viewer."""
    turn, tilt = math.radians(-35), math.radians(15)
    around = torch.tensor([[math.cos(turn), 0, -math.sin(turn)], [0, 1, 0], [math.sin(turn), 0, math.cos(turn)]])
    down = torch.tensor([[1, 0, 0], [0, math.cos(tilt), -math.sin(tilt)], [0, math.sin(tilt), math.cos(tilt)]])
    camera = (down @ around).T
    return points @ camera, normals @ camera


def light(normals: Tensor) -> Tensor:
    """Return the brightness (N, 1) of a surface with normals (N, 3) in camera coordinates."""
    return (0.45 + 0.6 * (normals @ torch.tensor([0.35, 0.65, 0.68])).clamp(min=0))[:, None]


def facing_normals(view: Tensor) -> Tensor:
    """Estimate normals that face the viewer for points (N, 3) in camera coordinates, from planes through neighbors.

    On the visible part of a closed surface these are the outward normals.
    """
    from scipy.spatial import cKDTree

    index = torch.from_numpy(cKDTree(view).query(view, min(_NEIGHBORS, len(view)))[1]).reshape(len(view), -1)
    centered = view[index] - view[index].mean(1, keepdim=True)  # (N, neighbors, 3)
    normals = torch.linalg.eigh(centered.mT @ centered).eigenvectors[..., 0]
    return normals * torch.where(normals[:, 2:] < 0, -1.0, 1.0)


def colormap(name: str, level: Tensor) -> Tensor:
    """Return the colors of a matplotlib colormap at levels (N,) from 0 to 1."""
    from matplotlib import colormaps

    return torch.from_numpy(colormaps[name](level.numpy())[:, :3]).float()


def heat(density: Tensor) -> Tensor:
    """Color a density (N,) on a logarithmic scale, from red at its maximum to gray at a thousandth of it."""
    smallest = 1e-3 * density.max()  # also for slightly negative values, which FFTs leave
    level = torch.log10(density.clamp(min=smallest) / smallest) / 3
    opacity = level.sqrt()[:, None]
    return (1 - opacity) * torch.tensor([0.80, 0.82, 0.86]) + opacity * colormap("YlOrRd", 0.15 + 0.85 * level)


def signed(values: Tensor) -> Tensor:
    """Color a signal (N,): red where it is positive, blue where it is negative, white at 0."""
    scale = float(values.abs().kthvalue(math.ceil(0.99 * len(values))).values)
    return colormap("RdBu_r", (0.5 + 0.5 * values / (scale or 1.0)).clamp(0, 1))


def render(points: Tensor, normals: Tensor, colors: Tensor, width: int = 700) -> Tensor:
    """Render points (N, 3) of 2 × 2 pixels to an image (height, width, 3); nearer points hide farther ones."""
    view, facing = camera_view(points, normals)
    low, high = view[:, :2].amin(0), view[:, :2].amax(0)
    scale = (width - 2) / float(high[0] - low[0])
    height = int(scale * float(high[1] - low[1])) + 2
    column, row = ((view[:, :2] - low) * scale).long().unbind(-1)
    order = torch.argsort(view[:, 2])  # the nearest is written last
    corner = ((height - 2 - row) * width + column)[order]
    last = torch.full((height * width,), -1)
    for offset in (0, 1, width, width + 1):
        last = last.scatter_reduce(0, corner + offset, torch.arange(len(corner)), "amax")
    image = torch.ones(height, width, 3)
    image.view(-1, 3)[last >= 0] = (colors * light(facing))[order[last[last >= 0]]].clamp(0, 1)
    return image


def show(axis: "Axes", image: Tensor, title: str) -> None:
    """Show an image of `render` without a frame."""
    axis.imshow(image.numpy())
    axis.axis("off")
    axis.set_title(title, fontsize=_TITLE)


def scatter(
    axis: "Axes", view: Tensor, facing: Tensor, colors: Tensor, size: float, marker: str = "o", title: str = ""
) -> None:
    """Draw shaded points with normals `facing` in camera coordinates, nearest last, without those that face away."""
    order = torch.argsort(view[:, 2])
    order = order[facing[order, 2] > -0.2]
    shaded = (colors * light(facing)).clamp(0, 1)[order]
    x, y = view[order, :2].T.numpy()
    axis.scatter(x, y, c=shaded.numpy(), s=size, marker=marker, linewidths=0)
    axis.set_aspect("equal")
    axis.axis("off")
    axis.set_title(title, fontsize=_TITLE)


def draw_mesh(axis: "Axes", vertices: Tensor, faces: Tensor, colors: Tensor, title: str = "") -> None:
    """Draw shaded triangles (F, 3) between vertices (N, 3) in colors (F, 3), nearest last."""
    from matplotlib.collections import PolyCollection

    view, _ = camera_view(vertices, vertices)
    a, b, c = view[faces].unbind(1)
    area_normals = torch.linalg.cross(b - a, c - a)  # (F, 3)
    normals = torch.zeros_like(view)
    for corner in faces.T:
        normals.index_add_(0, corner, area_normals)
    normals = torch.nn.functional.normalize(normals, dim=-1)[faces].mean(1)  # smooth over neighboring faces
    order = torch.argsort((a + b + c)[:, 2])
    shaded = (colors * light(normals)).clamp(0, 1)[order]
    triangles = list(view[faces[order], :2].numpy())
    axis.add_collection(PolyCollection(triangles, facecolors=shaded.numpy(), edgecolors="face", linewidths=0.3))
    axis.autoscale()
    axis.set_aspect("equal")
    axis.axis("off")
    axis.set_title(title, fontsize=_TITLE)


def curves(axis: "Axes", rows: Sequence[Mapping[str, Any]], x: str, y: str, by: str = "name", **style: Any) -> None:
    """Plot one line through (row[x], row[y]) per value of row[by], with a legend; skip rows without y."""
    rows = [row for row in rows if y in row]
    for label in dict.fromkeys(row[by] for row in rows):
        line = sorted((row[x], row[y]) for row in rows if row[by] == label)
        axis.plot(*zip(*line, strict=True), marker="o", label=label, **style)
    axis.grid(alpha=0.3, which="both")
    if rows:
        axis.legend(frameon=False, fontsize=9)


def draw_modes(file: BinaryIO, points: Tensor, vectors: Tensor, frequencies: Tensor) -> None:
    """Write a PNG of the first modes after the constant one on points (N, d), and of the Laplacian's eigenvalues."""
    modes = range(min(1, vectors.shape[1] - 1), min(1 + _NUM_MODES, vectors.shape[1]))
    picture = figure(2.4 * len(modes) + 3.2, 2.8)
    axes = picture.subplots(1, len(modes) + 1, width_ratios=[*[2.4] * len(modes), 3.2])
    sample = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:_MAX_MARKERS]
    view = _front_view(points[sample])
    facing = facing_normals(view)
    size = min(100.0, 2e5 / len(sample))  # large enough for near points to hide far ones
    for axis, mode in zip(axes, modes, strict=False):
        scatter(axis, view, facing, signed(vectors[sample, mode]), size, title=f"mode {mode + 1}")
    axes[-1].plot(range(1, len(frequencies) + 1), frequencies.numpy(), ".-", color="0.2", markersize=4, linewidth=0.8)
    axes[-1].set_title("−(2/σ²) log λ, the Laplacian's eigenvalues", fontsize=9)
    axes[-1].set_xlabel("mode", fontsize=9)
    axes[-1].set_ylim(bottom=0)
    picture.savefig(file, format="png", dpi=150)


def _front_view(points: Tensor) -> Tensor:
    """Turn points (N, d) so that the viewer looks along the shortest edge of their box, with y or z up."""
    x = torch.nn.functional.pad(points, (0, max(0, 3 - points.shape[1])))[:, :3]
    x = (x - x.mean(0)).float()
    depth = int((x.amax(0) - x.amin(0)).argmin())
    right, up, sign = {0: (2, 1, -1), 1: (0, 2, -1), 2: (0, 1, 1)}[depth]
    return torch.stack([x[:, right], x[:, up], sign * x[:, depth]], dim=-1)

"""Pictures of clouds: a camera, a light, colours, and the plots that several scripts share.

Colours are tensors (N, 3) of red, green and blue from 0 to 1. Axes are matplotlib's, which comes with the extra
`examples` and is imported where it is needed, because importing qattn should not.
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
    "colour_map",
    "curves",
    "draw_mesh",
    "draw_modes",
    "figure",
    "heat",
    "light",
    "render",
    "scatter",
    "seen",
    "show",
    "signed",
    "towards_the_eye",
]

_MOST = 20_000  # points of which markers are drawn; more are too many for matplotlib
_MODES = 6


def figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches, which no window ever shows."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Pictures need matplotlib. Install it with `pip install 'qattn-diffusion[examples]'`."
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def seen(points: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
    """Points and normals (N, 3) as seen from the side and a little above: x right, y up, z towards the eye."""
    turn, tilt = math.radians(-35), math.radians(15)
    around = torch.tensor([[math.cos(turn), 0, -math.sin(turn)], [0, 1, 0], [math.sin(turn), 0, math.cos(turn)]])
    down = torch.tensor([[1, 0, 0], [0, math.cos(tilt), -math.sin(tilt)], [0, math.sin(tilt), math.cos(tilt)]])
    camera = (down @ around).T
    return points @ camera, normals @ camera


def light(normals: Tensor) -> Tensor:
    """How bright a surface is, shape (N, 1), for normals as they are seen."""
    return (0.45 + 0.6 * (normals @ torch.tensor([0.35, 0.65, 0.68])).clamp(min=0))[:, None]


def towards_the_eye(view: Tensor, neighbours: int = 12) -> Tensor:
    """Normals (N, 3), on the side of the eye, of points as they are seen: of the planes through their neighbours.

    Of what is visible of a surface these are the normals to the outside, whatever the order of its points.
    """
    from scipy.spatial import cKDTree

    near = torch.from_numpy(cKDTree(view).query(view, min(neighbours, len(view)))[1]).reshape(len(view), -1)
    apart = view[near] - view[near].mean(1, keepdim=True)  # (N, neighbours, 3)
    normals = torch.linalg.eigh(apart.mT @ apart).eigenvectors[..., 0]
    return normals * torch.where(normals[:, 2:] < 0, -1.0, 1.0)


def colour_map(name: str, level: Tensor) -> Tensor:
    """Colours of a map of matplotlib at levels (N,) from 0 to 1."""
    from matplotlib import colormaps

    return torch.from_numpy(colormaps[name](level.numpy())[:, :3]).float()


def heat(density: Tensor) -> Tensor:
    """Colours of a density (N,), from red at its largest to grey at a thousandth of it."""
    least = 1e-3 * density.max()  # also where FFTs leave a little less than nothing
    level = torch.log10(density.clamp(min=least) / least) / 3
    share = level.sqrt()[:, None]
    return (1 - share) * torch.tensor([0.80, 0.82, 0.86]) + share * colour_map("YlOrRd", 0.15 + 0.85 * level)


def signed(values: Tensor) -> Tensor:
    """Colours of a signal (N,): red where it is positive, blue where it is negative, white at 0."""
    top = float(values.abs().kthvalue(math.ceil(0.99 * len(values))).values)
    return colour_map("RdBu_r", (0.5 + 0.5 * values / (top or 1.0)).clamp(0, 1))


def render(points: Tensor, normals: Tensor, colours: Tensor, width: int = 700) -> Tensor:
    """An image (height, width, 3) in which each pixel shows the nearest of the points (N, 3), 2 × 2 pixels each."""
    view, facing = seen(points, normals)
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
    image.view(-1, 3)[last >= 0] = (colours * light(facing))[order[last[last >= 0]]].clamp(0, 1)
    return image


def show(axis: "Axes", image: Tensor, title: str) -> None:
    """An image of `render`, without a frame."""
    axis.imshow(image.numpy())
    axis.axis("off")
    axis.set_title(title, fontsize=13)


def scatter(
    axis: "Axes", view: Tensor, facing: Tensor, colours: Tensor, size: float, marker: str = "o", title: str = ""
) -> None:
    """Points and normals as they are seen, shaded, the nearest drawn last and those that face away left out."""
    order = torch.argsort(view[:, 2])
    order = order[facing[order, 2] > -0.2]
    shaded = (colours * light(facing)).clamp(0, 1)[order]
    x, y = view[order, :2].T.numpy()
    axis.scatter(x, y, c=shaded.numpy(), s=size, marker=marker, linewidths=0)
    axis.set_aspect("equal")
    axis.axis("off")
    axis.set_title(title, fontsize=13)


def draw_mesh(axis: "Axes", vertices: Tensor, faces: Tensor, colours: Tensor, title: str = "") -> None:
    """Triangles (F, 3) between vertices (N, 3), in colours (F, 3), shaded, the nearest drawn last."""
    from matplotlib.collections import PolyCollection

    view, _ = seen(vertices, vertices)
    a, b, c = view[faces].unbind(1)
    across = torch.linalg.cross(b - a, c - a)  # (F, 3), as long as triangles are large
    normals = torch.zeros_like(view)
    for corner in faces.T:
        normals.index_add_(0, corner, across)
    normals = torch.nn.functional.normalize(normals, dim=-1)[faces].mean(1)  # smooth over the neighbours
    order = torch.argsort((a + b + c)[:, 2])
    shaded = (colours * light(normals)).clamp(0, 1)[order]
    triangles = list(view[faces[order], :2].numpy())
    axis.add_collection(PolyCollection(triangles, facecolors=shaded.numpy(), edgecolors="face", linewidths=0.3))
    axis.autoscale()
    axis.set_aspect("equal")
    axis.axis("off")
    axis.set_title(title, fontsize=13)


def curves(axis: "Axes", rows: Sequence[Mapping[str, Any]], x: str, y: str, by: str = "name", **style: Any) -> None:
    """One line through (row[x], row[y]) for each of the row[by], with a legend; rows without a y are left out."""
    rows = [row for row in rows if y in row]
    for label in dict.fromkeys(row[by] for row in rows):
        line = sorted((row[x], row[y]) for row in rows if row[by] == label)
        axis.plot(*zip(*line, strict=True), marker="o", label=label, **style)
    axis.grid(alpha=0.3, which="both")
    if rows:
        axis.legend(frameon=False, fontsize=9)


def draw_modes(file: BinaryIO, points: Tensor, vectors: Tensor, frequencies: Tensor) -> None:
    """The first modes after the constant one on points (N, d), and the eigenvalues of the Laplacian, as PNG."""
    modes = range(min(1, vectors.shape[1] - 1), min(1 + _MODES, vectors.shape[1]))
    picture = figure(2.4 * len(modes) + 3.2, 2.8)
    axes = picture.subplots(1, len(modes) + 1, width_ratios=[*[2.4] * len(modes), 3.2])
    some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:_MOST]
    view = _from_the_front(points[some])
    facing = towards_the_eye(view)
    size = min(100.0, 2e5 / len(some))  # so that near points hide far ones
    for axis, mode in zip(axes, modes, strict=False):
        scatter(axis, view, facing, signed(vectors[some, mode]), size, title=f"mode {mode + 1}")
    axes[-1].plot(range(1, len(frequencies) + 1), frequencies.numpy(), ".-", color="0.2", markersize=4, linewidth=0.8)
    axes[-1].set_title("−(2/σ²) log λ, the Laplacian's eigenvalues", fontsize=9)
    axes[-1].set_xlabel("mode", fontsize=9)
    axes[-1].set_ylim(bottom=0)
    picture.savefig(file, format="png", dpi=150)


def _from_the_front(points: Tensor) -> Tensor:
    """Points (N, 3) seen along the shortest side of their box, with y or z upwards, as most files have it."""
    x = torch.nn.functional.pad(points, (0, max(0, 3 - points.shape[1])))[:, :3]
    x = (x - x.mean(0)).float()
    across = int((x.amax(0) - x.amin(0)).argmin())
    right, up, towards = {0: (2, 1, -1), 1: (0, 2, -1), 2: (0, 1, 1)}[across]
    return torch.stack([x[:, right], x[:, up], towards * x[:, across]], dim=-1)

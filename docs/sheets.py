"""Draws docs/images/sheets.png: heat on a folded sheet, with and without normals; run `python docs/sheets.py`."""

import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import qattn

GAP, SIGMA, STEPS = 0.1, 0.08, 12


def folded(n: int, gap: float) -> torch.Tensor:
    """Return points (n, 3) of a sheet of length 2 in the shape of a U."""
    random = torch.Generator().manual_seed(0)
    along, across = 2 * torch.rand(n, generator=random), torch.rand(n, generator=random)
    radius = gap / 2
    straight = 1 - math.pi * radius / 2
    angle = ((along - straight) / radius).clamp(0, math.pi)
    x = along.clamp(max=straight) + radius * angle.sin() - (along - straight - math.pi * radius).clamp(min=0)
    return torch.stack([x, across, -radius * angle.cos()], dim=1)


def main() -> None:
    """Diffuse the same Dirac by both kernels, and draw both."""
    points = folded(6000, GAP)
    start = torch.zeros(len(points))
    start[(points - torch.tensor([0.35, 0.5, -GAP / 2])).norm(dim=1).argmin()] = 1
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), subplot_kw={"projection": "3d"}, layout="constrained")
    titles = ("points alone", "with normals")
    heats = [qattn.diffusion(points, SIGMA, normals=n).power(STEPS, start) for n in (None, qattn.normals(points))]
    for axis, title, heat in zip(axes, titles, heats, strict=True):
        x, y, z = (points * torch.tensor([1, 1, 4])).T  # apart, to see both layers
        axis.scatter(x, y, z, c=heat / heats[1].max(), s=3, cmap="inferno", vmin=0, vmax=1)
        upper = points[:, 2] > 0
        axis.set_title(f"{title}: {float(heat[upper].sum()):.0%} of the heat is in the upper layer")
        axis.set_axis_off()
        axis.set_box_aspect((1, 1, 0.5))
        axis.view_init(elev=28, azim=-60)
    figure.savefig(Path(__file__).parent / "images" / "sheets.png", dpi=110)


if __name__ == "__main__":
    main()

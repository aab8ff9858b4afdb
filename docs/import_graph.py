"""Draw the import graph of qattn by tiers, to docs/images/import_graph.png: `python docs/import_graph.py [PATH]`.

The picture contains a checksum of what it shows, by which tests/test_docs.py tells whether it is of today's graph.

Tiers and imports are read by the code of tests/test_package.py, which also tests that imports go down. Within a tier,
packages stand above those that they import, so that every arrow points down. Line widths grow with the number of
imports. Imports of the foundation, which every tier has, are summed up on the right.
"""

import hashlib
import math
import runpy
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).parent.parent
COLORS = ("#7d8aa0", "#d08c2a", "#c8553d", "#7b4b94", "#2a6f97", "#40916c")  # of the tiers, the lowest first
UNIT, DPI = 0.55, 110  # inches per unit of the lengths below
WIDTH, LEFT, RIGHT = 24.0, 2.9, 1.1  # of the picture and of its margins
LINE, PAD, CHARACTER = 0.33, 0.17, 0.15  # height of a line of text, space around it, width of a character
ROWS, TIERS = 0.55, 0.9  # space between rows of one tier, and between tiers
WIDE, NARROW = 100, 27  # characters per line of a package alone in its tier, and of others
PER_ROW = 7  # packages of the foundation


def package_of(module: str) -> str:
    """Return the first part of a dotted name."""
    return module.split(".")[0]


def rows_of(packages: tuple[str, ...], counts: Counter[tuple[str, str]]) -> list[list[str]]:
    """Return the packages of a tier in rows, the lowest first: each above those of the tier that it imports."""

    def level(package: str) -> int:
        return max((1 + level(other) for other in packages if counts[package, other]), default=0)

    levels = [level(package) for package in packages]
    return [[p for p, own in zip(packages, levels, strict=True) if own == row] for row in range(max(levels) + 1)]


def text_of(package: str, modules: list[str], width: int) -> list[str]:
    """Return the name of a package, and those of its modules in lines of at most `width` characters."""
    names = [name.removeprefix(f"{package}.") for name in modules if name.startswith(f"{package}.")]
    return [package, *textwrap.wrap("  ".join(names), width, break_on_hyphens=False)]


def draw_row(axis: Axes, texts: list[list[str]], bottom: float, color: str) -> tuple[dict[str, FancyBboxPatch], float]:
    """Draw boxes side by side; return them by the name of their package, and the height of the row."""
    widths = [max(map(len, text)) * CHARACTER + 2 * PAD for text in texts]
    tallest = max(map(len, texts)) * LINE + 2 * PAD
    space = (WIDTH - LEFT - RIGHT - sum(widths)) / (len(texts) + 1)
    boxes, x = {}, LEFT + space
    for text, width in zip(texts, widths, strict=True):
        height = len(text) * LINE + 2 * PAD
        y = bottom + (tallest - height) / 2
        box = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.12", fc="white", ec=color, lw=1.6)
        box.set_zorder(3)
        axis.add_patch(box)
        for number, line in enumerate(text):
            style = {"size": 8.5, "color": "#444444"} if number else {"size": 10.0, "weight": "bold"}
            middle = y + height - PAD - (number + 0.5) * LINE
            axis.text(x + width / 2, middle, line, ha="center", va="center", family="monospace", zorder=4, **style)
        boxes[text[0]] = box
        x += width + space
    return boxes, tallest


def center(box: FancyBboxPatch) -> tuple[float, float]:
    """Return the middle of a box."""
    return box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2


def draw_arrow(axis: Axes, start: FancyBboxPatch, end: FancyBboxPatch, count: int, color: str) -> None:
    """Draw an arrow from a package to one that it imports, as wide as the root of the number of imports."""
    style = {"arrowstyle": "-|>", "mutation_scale": 9 + 1.5 * math.sqrt(count), "lw": 0.9 * math.sqrt(count)}
    ends = {"posA": center(start), "posB": center(end), "patchA": start, "patchB": end}
    axis.add_patch(FancyArrowPatch(**ends, **style, color=color, alpha=0.8, zorder=2))


class Graph(NamedTuple):
    """All that the picture shows."""

    tiers: dict[str, tuple[str, ...]]  # packages, the lowest tier first
    modules: list[str]
    counts: Counter[tuple[str, str]]  # imports of a package by another one

    def checksum(self) -> str:
        """Return a checksum that changes with any of them."""
        shown = self.tiers, self.modules, sorted(self.counts.items())
        return hashlib.sha256(repr(shown).encode()).hexdigest()


def read_graph() -> Graph:
    """Read the tiers, and count imports."""
    sys.path.insert(0, str(ROOT / "tests"))  # of which test_package.py imports a module
    read = runpy.run_path(str(ROOT / "tests" / "test_package.py"))
    tiers, files, imports = read["TIERS"], read["MODULES"], read["imports"]
    modules = sorted(filter(None, files))
    counts: Counter[tuple[str, str]] = Counter()
    for name in modules:
        others = {other for other in imports(files[name]) if other and package_of(other) != package_of(name)}
        counts.update((package_of(name), package_of(other)) for other in others)
    return Graph(tiers, modules, counts)


def main(target: Path) -> None:
    """Draw the tiers from the lowest up, and write the picture."""
    graph = read_graph()
    tiers, modules, counts = graph
    tier_of = {package: number for number, packages in enumerate(tiers.values()) for package in packages}
    drawn = {pair: count for pair, count in counts.items() if tier_of[pair[1]]}  # all but those of the foundation

    picture = Figure()
    axis = picture.add_axes((0, 0, 1, 1))
    axis.axis("off")
    boxes: dict[str, FancyBboxPatch] = {}

    def mean_target(package: str) -> float:
        """Return the mean place of what a package imports; the right end for those without arrows."""
        places = {center(boxes[other])[0]: n for (own, other), n in drawn.items() if own == package and other in boxes}
        return sum(x * n for x, n in places.items()) / sum(places.values()) if places else WIDTH

    floors, ceilings, bottom = [], [], 0.7
    for number, (tier, packages) in enumerate(tiers.items()):
        rows = rows_of(packages, counts)
        if number == 0:
            rows = [list(packages[start : start + PER_ROW]) for start in range(0, len(packages), PER_ROW)]
        floors.append(bottom - 0.35)
        for row in rows:
            width = WIDE if len(packages) == 1 else NARROW
            texts = [text_of(package, modules, width) for package in sorted(row, key=mean_target)]
            new, height = draw_row(axis, texts, bottom, COLORS[number])
            boxes |= new
            bottom += height + ROWS
        ceilings.append(bottom - ROWS + 0.35)
        corner, size = (LEFT, floors[-1]), (WIDTH - LEFT - RIGHT, ceilings[-1] - floors[-1])
        axis.add_patch(Rectangle(corner, *size, fc=COLORS[number], alpha=0.13, lw=0, zorder=0))
        middle = (floors[-1] + ceilings[-1]) / 2
        axis.text(LEFT - 0.2, middle, tier, size=13, weight="bold", color=COLORS[number], ha="right", va="center")
        bottom += TIERS - ROWS

    for (package, other), count in drawn.items():
        draw_arrow(axis, boxes[package], boxes[other], count, COLORS[tier_of[package]])
    side = WIDTH - RIGHT
    for number in range(1, len(tiers)):
        count = sum(n for (own, other), n in counts.items() if tier_of[own] == number and tier_of[other] == 0)
        x, y, end = side + 0.16 * number, floors[number] + 0.2, ceilings[0] - 0.9 + 0.14 * number
        style = {"color": COLORS[number], "lw": 0.4 * math.sqrt(count), "solid_joinstyle": "miter"}
        axis.plot([side, x, x, side], [y, y, end, end], zorder=1, **style)
        axis.text(side - 0.1, y, f"{count} of the foundation", size=8.5, color=COLORS[number], ha="right", va="center")
    height = bottom - TIERS + 0.7
    axis.set(xlim=(0, WIDTH), ylim=(0, height))
    picture.set_size_inches(UNIT * WIDTH, UNIT * height)
    picture.savefig(target, dpi=DPI, metadata={"Graph": graph.checksum()})
    print(f"wrote {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "import_graph.png")

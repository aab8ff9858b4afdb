"""Clouds with a label at each point: RNA surfaces, Princeton parts, aerial LiDAR, and generated animals.

Files are .npz. `rna` has `points` (S, n, 3), `labels` (S, n), −1 where there is none, and `split` (S,). `psb` has the
same and `classes` (S,), the kind of each object: labels of a kind follow those of the kinds before it, and the network
is told the kind, as is usual for ShapeNet's parts; only labels of the kind count, in training as in tests. `lidar` is
several files with `xyz` (n, 3) and `label` (n,) in the classes of ASPRS, given one by one; `fold` is the number of the
one that tests.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

import qattn
from qattn.shapes import CREATURE_PARTS, creature, creature_parts, posed

LIDAR_CLASSES = "ground", "vegetation", "building", "other"
ASPRS = {2: 0, 3: 1, 4: 1, 5: 1, 6: 2}  # to these; all others are the last
RNA_UNIT = 33.0  # Å, about the root mean square distance of a molecule's points to their center
LIDAR_UNIT = 10.0  # m
LIDAR_RADIUS = 20.0  # m, of a window, or more where it would have fewer than `LIDAR_LEAST` points
LIDAR_LEAST = 2048
LIDAR_WINDOWS = 80  # of a tile to train with


@dataclass(frozen=True)
class Cloud:
    """Points with labels, −1 where there is none; all of the points, of which samples are drawn."""

    points: Tensor  # (n, 3), in units in which shapes have radii near 1
    labels: Tensor  # (n,)
    kind: int = 0


@dataclass(frozen=True)
class DataSet:
    """Clouds to train and to test with.

    Attributes:
        kinds: Labels (first, last + 1) that clouds of each kind have.
        rotation: Those of training clouds: "none", "any", or the number of the axis that they are about.
    """

    name: str
    train: list
    test: list
    kinds: tuple
    rotation: str | int

    @cached_property
    def num_classes(self):
        return max(last for _, last in self.kinds)

    def held_out(self, parts):
        """Return the data with every `parts`-th training cloud held out for tests, to choose settings by."""
        held = range(parts - 1, len(self.train), parts)
        train = [cloud for i, cloud in enumerate(self.train) if i not in held]
        return DataSet(self.name, train, [self.train[i] for i in held], self.kinds, self.rotation)


def load(name, paths, fold=0):
    """The data set `rna`, `psb` or `lidar` from its files."""
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.is_file():
            raise SystemExit(f"{path} should be an .npz file.")
    if name == "lidar":
        if not 0 <= fold < len(paths) or len(paths) < 2:
            raise SystemExit(f"`--fold` should be the number of one of at least two tiles; got {fold} of {len(paths)}.")
        return _lidar(paths, fold)
    if name not in ("rna", "psb") or len(paths) != 1:
        raise SystemExit(
            f"Data should be `rna` or `psb` with one file, or `lidar` with several; got {name} and {paths}."
        )
    return (_rna if name == "rna" else _psb)(np.load(paths[0]))


def generated(count, num_test, num_points):
    """Animals in random poses."""
    clouds = []
    for seed in range(count + num_test):
        rest, _ = creature(num_points, seed)
        points = posed(rest, seed, stretch=0.15)
        clouds.append(Cloud(points - points.mean(0), creature_parts(rest)))
    return DataSet("animals", clouds[:count], clouds[count:], ((0, len(CREATURE_PARTS)),), 1)


def _rna(data):
    points, labels = data["points"].astype(np.float64), data["labels"].astype(np.int64)
    points = (points - points.mean(1, keepdims=True)) / RNA_UNIT
    clouds = [Cloud(torch.from_numpy(p).float(), torch.from_numpy(y)) for p, y in zip(points, labels, strict=True)]
    return DataSet("rna", *_split(clouds, data["split"]), ((0, int(labels.max()) + 1),), "any")


def _psb(data):
    names = list(dict.fromkeys(data["classes"].tolist()))
    sizes = [int(data["labels"][data["classes"] == name].max()) + 1 for name in names]
    ends = np.cumsum(sizes)
    clouds = []
    for points, labels, name in zip(data["points"], data["labels"], data["classes"], strict=True):
        kind = names.index(name)
        first = int(ends[kind] - sizes[kind])
        clouds.append(Cloud(torch.from_numpy(points).float(), torch.from_numpy(labels.astype(np.int64)) + first, kind))
    kinds = tuple((int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True))
    return DataSet("psb", *_split(clouds, data["split"]), kinds, "any")


def _split(clouds, split):
    return tuple([c for c, s in zip(clouds, split.astype(str), strict=True) if s == kind] for kind in ("train", "test"))


def _lidar(paths, fold):
    train, test = [], []
    for number, path in enumerate(paths):
        data = np.load(path)
        points = data["xyz"].astype(np.float64)
        labels = np.vectorize(lambda code: ASPRS.get(code, len(LIDAR_CLASSES) - 1))(data["label"]).astype(np.int64)
        if number == fold:
            test = _windows(points, labels, _grid(points))
        else:
            centers = np.random.default_rng(number).choice(len(points), LIDAR_WINDOWS, replace=False)
            train += _windows(points, labels, points[centers, :2])
    return DataSet("lidar", train, test, ((0, len(LIDAR_CLASSES)),), 2)


def _grid(points):
    """Centers (n, 2) of windows that cover a tile, half a radius apart, but at most 64."""
    low, high = points[:, :2].min(0), points[:, :2].max(0)
    count = np.clip(np.ceil((high - low) / (LIDAR_RADIUS / 2)), 1, 8).astype(int)
    axes = [a + (b - a) * (np.arange(n) + 0.5) / n for a, b, n in zip(low, high, count, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)


def _windows(points, labels, centers):
    """Clouds of the points in cylinders about centers (n, 2), with height 0 at the lowest."""
    tree = cKDTree(points[:, :2])
    least = 1.001 * tree.query(centers, min(LIDAR_LEAST, len(points)))[0][:, -1]  # despite rounding
    clouds = []
    for center, radius in zip(centers, np.maximum(least, LIDAR_RADIUS), strict=True):
        index = np.sort(tree.query_ball_point(center, radius))
        x = (points[index] - [*center, points[index, 2].min()]) / LIDAR_UNIT
        clouds.append(Cloud(torch.from_numpy(x).float(), torch.from_numpy(labels[index])))
    return clouds


def subset(cloud, count, seed):
    """A cloud of `count` of the points, drawn evenly; all of them if there are no more."""
    return _chosen(cloud, torch.randperm(len(cloud.points), generator=_seeded(seed))[:count])


def uneven_subset(cloud, count, seed):
    """A cloud of `count` of the points, drawn 10 times as densely at one end as at the other."""
    share = 10 ** _along(cloud.points, seed)
    return _chosen(cloud, torch.multinomial(share, count, generator=_seeded(seed)))


def noisy_subset(cloud, count, seed):
    """A cloud of `count` of the points, moved at random by half a spacing."""
    drawn = subset(cloud, count, seed)
    noise = torch.randn(drawn.points.shape, generator=_seeded(seed + 1))
    return Cloud(drawn.points + 0.5 * qattn.bandwidths.spacing(drawn.points) * noise, drawn.labels, drawn.kind)


def partial_subset(cloud, count, seed):
    """A cloud of `count` of the points that are left when a quarter of them is cut off at one end."""
    along = _along(cloud.points, seed)
    left = torch.argsort(along)[: max(count, 3 * len(along) // 4)]
    return subset(_chosen(cloud, left), count, seed)


SAMPLINGS = {  # the factor of the number of points, and how they are drawn
    "as trained": (1.0, subset),
    "4 times": (4.0, subset),
    "a quarter": (0.25, subset),
    "uneven": (1.0, uneven_subset),
    "noise": (1.0, noisy_subset),
    "part missing": (1.0, partial_subset),
}


def _along(points, seed):
    """Position (n,) along a random direction, from 0 to 1."""
    height = points @ torch.randn(3, generator=_seeded(seed))
    return (height - height.min()) / (height.max() - height.min())


def _chosen(cloud, index):
    return Cloud(cloud.points[index], cloud.labels[index], cloud.kind)


def _seeded(seed):
    return torch.Generator().manual_seed(seed)

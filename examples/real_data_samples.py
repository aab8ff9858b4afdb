"""Samples of clouds as networks take them, with masses and with the neighbors that some networks need.

Masses, neighbors and farthest points of a sample are computed when a network first asks for them, within its time, and
kept: the samples that training draws from are a pool.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from real_data_sets import subset
from scipy.spatial import cKDTree
from torch import Tensor

import qattn

NEIGHBORS = 16  # of vector attention, as published; 32 in a ball, as published
IN_BALL = 32
LEVELS = 3  # below the points
RATIO = 4  # of points from level to level
SCALE = 0.9, 1.1  # of samples in training


class Level(NamedTuple):
    """Neighbors of points of one level, the points of the next, and how to come back from there.

    Attributes:
        near: Indices (N, k) of neighbors in this level, of all points, or for balls (N', k) of the next level's points.
        kept: Indices (N',) of the points of the next level.
        up: Indices (N, 3) of the three nearest of these to each point.
        share: Weights (N, 3) of these, by inverse distance.
    """

    near: Tensor
    kept: Tensor
    up: Tensor
    share: Tensor


@dataclass(frozen=True)
class Sample:
    """A sample of a cloud. `spacing` is the mean distance to the nearest point in samples as the network trained on."""

    cloud: object
    count: int
    spacing: float

    @cached_property
    def mass(self):
        """Masses (N,) by density, at two spacings of what the network trained on, whatever the sampling."""
        return qattn.mass.density(self.cloud.points, sigma=2 * self.spacing)

    @cached_property
    def neighbors(self):
        """Levels of nearest neighbors, each a quarter of the one before; the last has only `near`."""
        levels, points = [], self.cloud.points.numpy()
        for depth in range(LEVELS + 1):
            near = _nearest(points, points, NEIGHBORS)[1]
            if depth == LEVELS:
                levels.append(Level(torch.from_numpy(near), *3 * (torch.zeros(0, dtype=torch.long),)))
                break
            level = _level(points, near, max(4, len(points) // RATIO))
            levels.append(level)
            points = points[level.kept.numpy()]
        return levels

    @cached_property
    def balls(self):
        """Levels of balls about farthest points; their numbers and radii are those of training, always."""
        levels, points = [], self.cloud.points.numpy()
        generator = np.random.default_rng(0)
        for depth in range(LEVELS):
            level = _level(points, None, max(4, self.count // RATIO ** (depth + 1)))
            centers = points[level.kept.numpy()]
            inside = cKDTree(points).query_ball_point(centers, 6 * 2**depth * self.spacing)  # of some 30 in training
            near = np.empty((len(centers), IN_BALL), dtype=np.int64)
            for row, (found, center) in enumerate(zip(inside, level.kept.tolist(), strict=True)):
                drawn = generator.permutation(found)[:IN_BALL]
                near[row] = center  # a ball with fewer points repeats its center
                near[row, : len(drawn)] = drawn
            levels.append(level._replace(near=torch.from_numpy(near)))
            points = centers
        return levels


def _nearest(points, queries, count):
    distances, index = cKDTree(points).query(queries, min(count, len(points)))
    return distances.reshape(len(queries), -1), index.reshape(len(queries), -1)


def _level(points, near, count):
    kept = _farthest_points(points, count)
    distances, up = _nearest(points[kept], points, 3)
    share = 1 / (distances + 1e-8)
    share = torch.from_numpy(share / share.sum(1, keepdims=True)).float()
    return Level(None if near is None else torch.from_numpy(near), *map(torch.from_numpy, (kept, up)), share)


def _farthest_points(points, count):
    """Indices (count,) of points, each the farthest from those before it."""
    chosen, squares = np.zeros(min(count, len(points)), dtype=np.int64), np.full(len(points), np.inf)
    for step in range(1, len(chosen)):
        squares = np.minimum(squares, ((points - points[chosen[step - 1]]) ** 2).sum(1))
        chosen[step] = squares.argmax()
    return chosen


class Batch:
    """Samples with as many points each.

    Attributes:
        points: Positions (B, N, 3), turned and scaled.
        features: What networks are given at points (B, N, C): positions, and the kind of the object where there are
            several.
        labels: Labels (B, N), −1 where there is none.
        is_possible: Whether each label is one of the kind of each object, (B, K).
    """

    def __init__(self, samples, kinds, turns=None):
        self._samples = samples
        self.points = torch.stack([sample.cloud.points for sample in samples])
        if turns is not None:
            self.points = self.points @ turns.mT
        self.labels = torch.stack([sample.cloud.labels for sample in samples])
        self.features = self.points
        of_kind = torch.tensor([sample.cloud.kind for sample in samples])
        first, last = torch.tensor(kinds)[of_kind, :, None].unbind(1)  # (B, 1) each
        every = torch.arange(max(last for _, last in kinds))
        self.is_possible = (first <= every) & (every < last)
        if len(kinds) > 1:
            hot = torch.nn.functional.one_hot(of_kind, len(kinds)).to(self.points)[:, None]
            self.features = torch.cat([self.points, hot.expand(-1, self.points.shape[1], -1)], dim=-1)

    @property
    def mass(self):
        """Masses (B, N)."""
        return torch.stack([sample.mass for sample in self._samples])

    @property
    def neighbors(self):
        """Levels of nearest neighbors, with a batch axis."""
        return _stacked([sample.neighbors for sample in self._samples])

    @property
    def balls(self):
        """Levels of balls, with a batch axis."""
        return _stacked([sample.balls for sample in self._samples])


def _stacked(samples):
    return [Level(*map(torch.stack, zip(*levels, strict=True))) for levels in zip(*samples, strict=True)]


class Sampler:
    """Batches of a data set's training clouds, from a pool of samples of each.

    Args:
        data: `DataSet`.
        count: Number of points of a sample.
        pool: Number of samples of a cloud.
        size: Number of samples in a batch.
    """

    def __init__(self, data, count, pool, size):
        self.data, self.count, self.pool, self.size = data, count, pool, size
        self.spacing = spacing(data, count)
        self.sample = lru_cache(maxsize=None)(self._sample)

    def _sample(self, number, seed):
        return Sample(subset(self.data.train[number], self.count, seed), self.count, self.spacing)

    def draw(self, generator):
        """The next batch."""
        numbers = torch.randperm(len(self.data.train), generator=generator)[: self.size].tolist()
        seeds = torch.randint(self.pool, (self.size,), generator=generator).tolist()
        low, high = SCALE
        scales = low + (high - low) * torch.rand(len(numbers), 1, 1, generator=generator)
        turns = scales * rotations(self.data.rotation, len(numbers), generator)
        samples = [self.sample(*each) for each in zip(numbers, seeds, strict=False)]
        return Batch(samples, self.data.kinds, turns)


def spacing(data, count):
    """Mean distance to the nearest point in samples of `count` points of some training clouds."""
    some = data.train[:: math.ceil(len(data.train) / 20)]
    return float(np.median([qattn.bandwidths.spacing(subset(cloud, count, 0).points) for cloud in some]))


def rotations(kind, count, generator):
    """Matrices (count, 3, 3): "none", "any", or about the axis of a number."""
    if kind == "none":
        return torch.eye(3).expand(count, 3, 3)
    if kind == "any":
        q, r = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator))
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform over all, with reflections
        return q * torch.linalg.det(q)[:, None, None]
    angles = 2 * math.pi * torch.rand(count, generator=generator)
    turns, (i, j) = torch.zeros(count, 3, 3), [axis for axis in range(3) if axis != kind]
    turns[:, kind, kind] = 1
    turns[:, i, i] = turns[:, j, j] = angles.cos()
    turns[:, i, j], turns[:, j, i] = -angles.sin(), angles.sin()
    return turns

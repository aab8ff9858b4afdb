"""Samples of prepared shapes, and batches of them, as networks and losses take them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from matching_data import farthest_points
from matching_spectra import normals, signatures, spectrum
from scipy.spatial import cKDTree
from torch import Tensor
from tqdm import tqdm

from qattn.nn import tangent_gradients

NEIGHBORS = 12  # of gradients
SPREAD = 128  # eigenvectors that the peer diffuses with, as DiffusionNet in ULRSSM
VARIANTS = {  # operator that maps are fitted for, and that of the signatures that networks are given, or coordinates
    "mesh": ("mesh", "mesh"),
    "qfm-mesh-wks": ("q", "mesh"),
    "qfm": ("q", "q"),
    "xyz": ("q", "xyz"),
}
SCALES, NOISE, FARTHEST = (0.9, 1.1), 0.01, 0.05  # of coordinates that are augmented, in units of √area


@dataclass(frozen=True)
class Prepared:
    """A shape with all that samples of it are made of."""

    shape: object
    points: Tensor  # (n, 3)
    mass: Tensor  # (n,)
    inputs: Tensor  # (n, C)
    normals: Tensor  # (n, 3)
    spectrum: object  # for maps
    spread: object  # spectrum for the peer, or None where there is no peer


def prepared(shape, variant, k, has_peer, cache):
    """Prepare a shape for a variant: spectra of k eigenvectors, and inputs."""
    kind, inputs = VARIANTS[variant]
    of_shape = spectrum(shape, kind, k, cache)
    points = torch.from_numpy(shape.points).float()
    return Prepared(
        shape,
        points,
        of_shape.mass,
        points if inputs == "xyz" else signatures(spectrum(shape, inputs, k, cache)),
        normals(shape, kind, cache),
        of_shape,
        spectrum(shape, "cloud", k, cache) if has_peer else None,
    )


def all_prepared(shapes, variant, k, has_peer, cache, what):
    bar = tqdm(shapes, desc=f"spectra of {what}", disable=None)
    return [prepared(shape, variant, k, has_peer, cache) for shape in bar]


@dataclass(frozen=True)
class Sample:
    """Some points of a shape."""

    shape: Prepared
    index: Tensor  # (N,)
    mass: Tensor  # (N,), that of all points, each given to the nearest of the sample
    gradients: tuple  # two sparse matrices (N, N), in frames whose normals point outward
    projection: Tensor  # Φ⁺ (k, N), by least squares with these masses
    spread_projection: Tensor | None  # the same of the peer's eigenvectors


def sampled(shape, index, k):
    """The sample of points with some numbers, for the leading k eigenvectors."""
    index = torch.as_tensor(index)
    points = shape.points[index]
    owner = cKDTree(points.numpy()).query(shape.points.numpy())[1]
    mass = torch.from_numpy(np.bincount(owner, shape.mass.numpy(), len(index))).float()
    gradients = oriented(tangent_gradients(points, num_neighbors=NEIGHBORS), points, shape.normals[index])
    projection = least_squares(shape.spectrum.vectors[index, :k], mass)
    spread = None if shape.spread is None else least_squares(shape.spread.vectors[index, :SPREAD], mass)
    return Sample(shape, index, mass, gradients, projection, spread)


def least_squares(vectors, mass):
    """Φ⁺ = (ΦᵀMΦ)⁻¹ ΦᵀM (k, N): eigenvectors of all points are not quite orthonormal on some of them."""
    weighted = (vectors * mass[:, None]).double().T
    return torch.linalg.solve(weighted @ vectors.double(), weighted).float()


def oriented(gradients, points, outward):
    """Gradients in frames (e, e') with e × e' outward: the second changes its sign where this is inward.

    Gradients of the coordinates are the frames themselves. Without this, left and right could not be told apart.
    """
    across, up = gradients
    sign = torch.sign((torch.linalg.cross(across @ points, up @ points) * outward).sum(1))
    indices = up.indices()
    flipped = torch.sparse_coo_tensor(
        indices, up.values() * sign[indices[0]], up.shape, is_coalesced=True, check_invariants=False
    )
    return across, flipped


@dataclass(frozen=True)
class Batch:
    """Samples with the same number of points, one after the other."""

    points: Tensor  # (B, N, 3)
    mass: Tensor  # (B, N)
    inputs: Tensor  # (B, N, C)
    gradients: tuple  # two lists of B sparse matrices (N, N)
    vectors: Tensor  # (B, N, k)
    projections: Tensor  # (B, k, N)
    frequencies: Tensor  # (B, k)
    spread_vectors: Tensor | None  # the same of the peer
    spread_projections: Tensor | None
    spread_frequencies: Tensor | None


def batched(samples, k, rotations=None):
    """The batch of samples; rotations (B, 3, 3) turn the coordinates that networks are given, and the points."""
    shapes, stack = [sample.shape for sample in samples], torch.stack
    points = stack([sample.shape.points[sample.index] for sample in samples])
    inputs = stack([sample.shape.inputs[sample.index] for sample in samples])
    if rotations is not None:
        points = points @ rotations
        inputs = points if inputs.shape[-1] == 3 else inputs
    spread = (None, None, None)
    if shapes[0].spread is not None:
        spread = (
            stack([sample.shape.spread.vectors[sample.index, :SPREAD] for sample in samples]),
            stack([sample.spread_projection for sample in samples]),
            stack([shape.spread.frequencies[:SPREAD].float() for shape in shapes]),
        )
    return Batch(
        points,
        stack([sample.mass for sample in samples]),
        inputs,
        tuple([sample.gradients[side] for sample in samples] for side in (0, 1)),
        stack([sample.shape.spectrum.vectors[sample.index, :k] for sample in samples]),
        stack([sample.projection for sample in samples]),
        stack([shape.spectrum.frequencies[:k].float() for shape in shapes]),
        *spread,
    )


class Sampler:
    """Pairs of samples of prepared shapes, drawn at random, and others in each step.

    Args:
        data_sets: Lists of prepared shapes; pairs are of the same list.
        num_points: Number of points of a sample.
        k: Number of eigenvectors.
        rotation: "none", "vertical" or "any": how each sample is turned.
        is_augmented: Whether coordinates that networks are given are stretched along the axes, and noisy.
    """

    def __init__(self, data_sets, num_points, k, rotation, is_augmented=False):
        self.data_sets, self.k, self.rotation, self.is_augmented = data_sets, k, rotation, is_augmented
        smallest = min(len(shape.points) for shapes in data_sets for shape in shapes)
        self.num_points = min(num_points, smallest)
        self._weights = torch.tensor([float(len(shapes) * (len(shapes) - 1)) for shapes in data_sets])

    def draw(self, num_pairs, generator):
        """A batch of 2 P samples: P sources, then their targets."""
        pairs = []
        for _ in range(num_pairs):
            shapes = self.data_sets[int(torch.multinomial(self._weights, 1, generator=generator))]
            numbers = torch.randperm(len(shapes), generator=generator)[:2].tolist()
            pairs.append([self._sample(shapes[number], generator) for number in numbers])
        sources, targets = zip(*pairs, strict=True)
        rotations = None
        if self.rotation != "none":
            rotations = random_rotations(2 * num_pairs, self.rotation, generator)
        batch = batched([*sources, *targets], self.k, rotations)
        return replace(batch, inputs=augmented(batch.inputs, generator)) if self.is_augmented else batch

    def _sample(self, shape, generator):
        """Points far from one another, among two thirds of them."""
        count = len(shape.points)
        some = torch.randperm(count, generator=generator)[: max(self.num_points, 2 * count // 3)].numpy()
        return sampled(shape, some[farthest_points(shape.points[some].numpy(), self.num_points, 0)], self.k)


def augmented(points, generator):
    """Stretch clouds (B, N, 3) along each axis, and move their points a little, at random."""
    low, high = SCALES
    stretch = low + (high - low) * torch.rand(len(points), 1, 3, generator=generator)
    noise = NOISE * torch.randn(points.shape, generator=generator)
    return stretch * points + noise.clamp(-FARTHEST, FARTHEST)


def random_rotations(count, kind, generator):
    """Rotations (count, 3, 3), uniform about the vertical axis y or among all."""
    if kind == "vertical":
        angle = 2 * torch.pi * torch.rand(count, generator=generator)
        c, s, o = angle.cos(), angle.sin(), torch.zeros(count)
        return torch.stack([c, o, -s, o, o + 1, o, s, o, c], dim=-1).unflatten(-1, (3, 3))
    Q, R = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return Q * torch.linalg.det(Q)[:, None, None]

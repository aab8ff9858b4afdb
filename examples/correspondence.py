"""Unsupervised matching of shapes in many poses, of points alone: Q-DiffNet and functional maps, both by Q.

In the manner of ULRSSM (Cao et al. 2023), as the variant Q-FM of the paper: a network gives features to points, those
of two shapes fit functional maps between the leading eigenvectors of their operators, and losses ask that these maps be
orthogonal, inverse to one another, and those of the soft point maps that the features make. No correspondence is given.

Each shape is a cloud of its own: sampled by itself, turned about the vertical, in no order. If all poses shared one
sample, its irregularities would mark every point, and tell left from right. The truth is the nearest point in a pose
that all shapes share. Errors are geodesic, along edges between neighbors, in % of the largest distance on the source.

The creature is its own mirror image, as most animals are: wave kernel signatures cannot tell left from right, nor can a
network of them that sees no more than lengths and angles of gradients. Volumes of three gradients can (`chiral`).
Errors "up to the mirror", where each point may also go to its mirror image, show what is left beside that.
"""

import argparse
import math
import time
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from quick import parsed
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import cKDTree
from torch import Tensor
from tqdm import trange

import qattn
from qattn.maps import fit_functional_map, functional_map, point_map, zoomout
from qattn.nn import QDiffNet
from qattn.pictures import camera_view
from qattn.shapes import creature, posed
from qattn.signatures import wave_kernel_signature

TEMPERATURE = 0.07  # of soft maps, as in ULRSSM
REFINED = "functional map, ZoomOut"
START = 20  # eigenvectors that ZoomOut starts from


@dataclass
class Shape:
    """A cloud, and what is known of it before training."""

    points: Tensor  # (N, 3)
    home: Tensor  # (N, 3), where they are in the pose that all shapes share: only truth knows
    mass: Tensor  # (N,)
    spectrum: qattn.Spectrum
    signatures: Tensor  # (N, C)


def creatures(seeds, options):
    """Dense samples (M, 3) of the creature as it stands, and in a pose."""
    for seed in seeds:
        home, _ = creature(8 * options.points, seed=seed)
        yield home, posed(home, seed, bend=options.bend, stretch=options.stretch)


def meshes(folder):
    """Vertices (M, 3) of all meshes of a folder, which number them alike."""
    import trimesh

    paths = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in (".obj", ".off", ".ply"))
    loaded = [trimesh.load(path, force="mesh", process=False, maintain_order=True).vertices for path in paths]
    if len(loaded) < 4 or len({len(vertices) for vertices in loaded}) > 1:
        raise SystemExit(f"{folder} should have four meshes or more, all of the same number of vertices.")
    return [torch.tensor(vertices, dtype=torch.float32) for vertices in loaded]


def spread(points, n, first):
    """Numbers (n,) of points far from one another, one after the other the farthest from those before."""
    chosen, squares = [first], torch.full((len(points),), torch.inf)
    while len(chosen) < n:
        squares = torch.minimum(squares, (points - points[chosen[-1]]).square().sum(1))
        chosen.append(int(squares.argmax()))
    return torch.tensor(chosen)


def nearest(queries, points):
    """Numbers of the points that are nearest to others."""
    return torch.from_numpy(cKDTree(points.numpy()).query(queries.numpy())[1])


def spacing(points):
    return float(cKDTree(points.numpy()).query(points.numpy(), 2)[0][:, 1].mean())


def sampled(home, pose, seed, unit, options):
    """A cloud of some points of a pose, turned, with its spectrum."""
    generator = torch.Generator().manual_seed(seed)
    chosen = spread(home, options.points, int(torch.randint(len(home), (), generator=generator)))
    chosen = chosen[torch.randperm(len(chosen), generator=generator)]
    angle = 2 * math.pi * float(torch.rand((), generator=generator))
    c, s = math.cos(angle), math.sin(angle)
    points = pose[chosen] @ torch.tensor([[c, 0, -s], [0, 1, 0], [s, 0, c]])
    points = points - points.mean(0)
    mass = qattn.mass.density(points, 1.5 * unit)
    sigma = options.sigma * unit
    spectrum = qattn.eigsh(qattn.diffusion(points, sigma, mass, tol=1e-6), options.k)
    return Shape(points, home[chosen], mass, spectrum, wave_kernel_signature(spectrum, num_energies=64))


def geodesics(shape):
    """Distances (N, N) along edges between points that are neighbors in the common pose, over the largest."""
    N, home = len(shape.points), shape.home.numpy()
    ends = torch.from_numpy(cKDTree(home).query(home, 9)[1])[:, 1:].flatten()
    starts = torch.arange(N).repeat_interleave(8)
    lengths = (shape.points[starts] - shape.points[ends]).norm(dim=1)
    graph = csr_array((lengths.numpy(), (starts.numpy(), ends.numpy())), shape=(N, N))
    distances = torch.from_numpy(dijkstra(graph, directed=False)).float()
    if distances.isinf().any():
        raise SystemExit("The points fall into parts that are not connected; take more of them.")
    return distances / distances.max()


def features(network, shapes):
    """Unit vectors (B, N, C) of shapes with the same number of points."""
    signatures, points, mass = (torch.stack([getattr(s, n) for s in shapes]) for n in ("signatures", "points", "mass"))
    return torch.nn.functional.normalize(network(signatures - 1, points, mass), dim=-1)


def fitted(source, target, features_s, features_t, options):
    return fit_functional_map(source.spectrum, target.spectrum, features_s, features_t, weight=options.weight)


def losses(a, b, features_a, features_b, options):
    """Compute the losses of bijectivity, orthogonality and alignment, for the maps of two shapes."""
    one = torch.eye(options.k)
    C_ab = fitted(a, b, features_a, features_b, options)
    C_ba = fitted(b, a, features_b, features_a, options)
    # The soft point map is an attention: features of length 1 have −‖f − g‖² / 2 = f · g − 1.
    f, g = features_a / TEMPERATURE**0.5, features_b / TEMPERATURE**0.5
    soft_ab = b.spectrum.project(qattn.attend(g, f, a.spectrum.vectors).out)
    soft_ba = a.spectrum.project(qattn.attend(f, g, b.spectrum.vectors).out)
    bijectivity = (C_ab @ C_ba - one).square().sum() + (C_ba @ C_ab - one).square().sum()
    orthogonality = (C_ab.T @ C_ab - one).square().sum() + (C_ba.T @ C_ba - one).square().sum()
    alignment = (C_ab - soft_ab).square().sum() + (C_ba - soft_ba).square().sum()
    return torch.stack([bijectivity, orthogonality, alignment])


def trained(shapes, unit, options):
    torch.manual_seed(0)
    network = QDiffNet(
        shapes[0].signatures.shape[1],
        64,
        num_scales=options.scales,
        num_blocks=options.blocks,
        sigma_range=(1.2 * unit, 12 * unit),
        chiral=options.chiral,
        solver=qattn.Solver(adjoint="detach"),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps, eta_min=1e-4)
    running = None
    with trange(options.steps, desc="training", disable=None) as bar:
        for _ in bar:
            a, b = (shapes[int(number)] for number in torch.randperm(len(shapes))[:2])
            three = losses(a, b, *features(network, [a, b]), options)
            optimizer.zero_grad()
            three.sum().backward()
            optimizer.step()
            schedule.step()
            running = three.detach() if running is None else running.lerp(three.detach(), 0.05)
            bar.set_postfix_str("bijective {:.1f}, orthogonal {:.1f}, aligned {:.1f}".format(*running))
    print("losses at the end: bijectivity {:.2f}, orthogonality {:.2f}, alignment {:.2f}".format(*running))
    return network


def point_maps(source, target, features_s, features_t, options):
    """Point maps (N,) of the target into the source, by name."""
    pair = source.spectrum, target.spectrum
    near = torch.cdist(features_t, features_s).argmin(1)
    C = fitted(source, target, features_s, features_t, options)
    return {
        "nearest features": near,
        "nearest, ZoomOut": refined(pair, near, options),
        "functional map": point_map(*pair, C),
        REFINED: refined(pair, C, options),
    }


def refined(pair, init, options):
    return zoomout(*pair, init, start=min(START, options.k), stop=options.k, step=2)[1]


def turned(points, towards):
    """Points (N, 3) after the rotation that brings them nearest to others, row by row."""
    U, _, V = torch.linalg.svd((points - points.mean(0)).T @ (towards - towards.mean(0)))
    U[:, -1] *= torch.sign(torch.linalg.det(U @ V))
    return (points - points.mean(0)) @ (U @ V)


def mirrored(home):
    """Mirror images (N, 3) of points, across the axis for which these are nearest to them, and how near they are."""
    center, tree = (home.amax(0) + home.amin(0)) / 2, cKDTree(home.numpy())
    images = [torch.where(torch.arange(3) == axis, 2 * center - home, home) for axis in range(3)]
    return min(((image, tree.query(image.numpy())[0].mean()) for image in images), key=lambda pair: pair[1])


def evaluated(shapes, given, options):
    """Errors (pairs, N) and up to the mirror, and the maps of the first pair, by (features, map)."""
    distances = [geodesics(shape) for shape in shapes]
    found, first = {}, {}
    for i, j in permutations(range(len(shapes)), 2):
        source, target = shapes[i], shapes[j]
        truth, image = nearest(target.home, source.home), nearest(mirrored(target.home)[0], source.home)
        x, y = (turned(shape.points, shape.home) for shape in (source, target))  # turned by what only truth knows
        maps = {("xyz, turned by the truth", "nearest"): nearest(y, x)}
        for name, of_shapes in given.items():
            all_maps = point_maps(source, target, of_shapes[i], of_shapes[j], options)
            maps |= {(name, how): index for how, index in all_maps.items()}
        pair = source.spectrum, target.spectrum
        maps["truth", "through the bases"] = point_map(*pair, functional_map(*pair, truth))
        for key, index in maps.items():
            error, flipped = distances[i][index, truth], distances[i][index, image]
            found.setdefault(key, []).append(torch.stack([error, torch.minimum(error, flipped)]))
        if not first:
            first = {"pair": (source, target), "truth": truth} | maps
    return {key: torch.stack(errors, dim=1) for key, errors in found.items()}, first


def draw(errors, first, options):
    """Colors brought from the source of the first pair to its target, and errors of all pairs."""
    source, target = first["pair"]
    ours, theirs = ("Q-DiffNet", REFINED), ("signatures", REFINED)
    figure, axes = plt.subplots(1, 5, figsize=(17, 3.6), layout="constrained", width_ratios=[1, 1, 1, 1, 1.15])
    low, high = source.home.amin(0), source.home.amax(0)
    colors = 0.1 + 0.85 * (source.home - low) / (high - low)
    clouds = [
        ("source", source, torch.arange(len(source.home))),
        ("target, truth", target, first["truth"]),
        (f"ours, {100 * errors[ours][0, 0].mean():.1f}%", target, first[ours]),
        (f"signatures, {100 * errors[theirs][0, 0].mean():.1f}%", target, first[theirs]),
    ]
    for axis, (title, shape, index) in zip(axes, clouds, strict=False):
        view, _ = camera_view(*2 * [turned(shape.points, shape.home)])
        order = view[:, 2].argsort()
        axis.scatter(*view[order, :2].T, c=colors[index][order].numpy(), s=45_000 / len(order), linewidths=0)
        axis.set(title=title, aspect="equal")
        axis.axis("off")
    styles = {"Q-DiffNet": "C0", "signatures": "C1", "xyz, turned by the truth": "C2", "truth": "0.6"}
    for (name, how), both in errors.items():
        if how in ("nearest", "through the bases", REFINED):
            for row, style in zip(both, "-:", strict=True):
                values = 100 * row.flatten().sort().values
                share = torch.linspace(0, 100, len(values))
                axes[-1].plot(
                    values, share, style, color=styles[name], label=f"{name}, {how}" if style == "-" else None
                )
    axes[-1].set(xlim=(0, 25), ylim=(0, 100), xlabel="geodesic error in %", ylabel="% of points below")
    axes[-1].set_title("all pairs; dotted: up to the mirror", fontsize=10)
    axes[-1].legend(frameon=False, fontsize=7, loc="lower right")
    figure.savefig(options.output, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="of meshes that number their vertices alike; or the creature")
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--k", type=int, default=40, help="eigenvectors")
    parser.add_argument("--sigma", type=float, default=2.0, help="of the operator of the spectra, in spacings")
    parser.add_argument("--bend", type=float, default=0.3, help="of the creature's limbs, in radians")
    parser.add_argument("--stretch", type=float, default=0.05)
    parser.add_argument("--train", type=int, default=16, help="clouds to train with")
    parser.add_argument("--test", type=int, default=4, help="poses to test with, all pairs; half of those of a folder")
    parser.add_argument("--steps", type=int, default=300, help="of training, a pair each")
    parser.add_argument("--scales", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--weight", type=float, default=1.0, help="of the regularization of functional maps")
    parser.add_argument("--chiral", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", default="correspondence.png")
    options = parsed(parser, points=300, k=20, train=4, test=2, steps=10)

    start = time.perf_counter()
    if options.folder:
        poses = meshes(options.folder)
        options.points = min(options.points, len(poses[0]))
        home = min(poses, key=lambda pose: mirrored(pose)[1])  # the pose that is most symmetric
        clouds = [(home, pose) for pose in poses]
        testing, training = clouds[: len(clouds) // 2], clouds[len(clouds) // 2 :]
    else:
        training = list(creatures(range(1, options.train + 1), options))
        testing = list(creatures(range(1001, options.test + 1001), options))
    home = training[0][0]
    unit = spacing(home[spread(home, options.points, 0)])
    some = [training[number % len(training)] for number in range(options.train)]
    train = [sampled(*pair, number, unit, options) for number, pair in enumerate(some)]
    test = [sampled(*pair, 1000 + number, unit, options) for number, pair in enumerate(testing)]
    print(f"{len(train)} clouds to train with and {len(test)} to test, of {options.points} points {unit:.3f} apart")
    print(f"{time.perf_counter() - start:.0f} s for samples and spectra", flush=True)

    start = time.perf_counter()
    network = trained(train, unit, options)
    print(f"{time.perf_counter() - start:.0f} s for {options.steps} steps", flush=True)

    start = time.perf_counter()
    with torch.no_grad():
        learned = [features(network, [shape])[0] for shape in test]
    given = {"signatures": [shape.signatures for shape in test], "Q-DiffNet": learned}
    errors, first = evaluated(test, given, options)
    print("\nmean geodesic error, in % of the largest distance\n")
    print(f"{'features':<26}{'point map':<26}{'error':>8}{'up to the mirror':>18}")
    for (name, how), both in errors.items():
        error, flipped = 100 * both.mean((1, 2))
        print(f"{name:<26}{how:<26}{error:8.1f}{flipped:18.1f}")
    draw(errors, first, options)
    print(f"\n{time.perf_counter() - start:.0f} s to evaluate; wrote {options.output}")


if __name__ == "__main__":
    main()

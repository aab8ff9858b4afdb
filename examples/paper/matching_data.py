"""Data sets of shapes to match: FAUST, SCAPE and SMAL from their usual folders or from .npz files, and generated ones.

A folder has meshes, `<name>.off` or `<name>.obj`, and files `<name>.vts` with the number, from 1, of the vertex at each
of the places that all shapes have; `<name>.sym.vts` has their mirror images. They may be in folders of their own. A
folder without them has meshes that number their vertices alike, as SCAPE, and so has an .npz file with `vertices`
(S, V, 3) and `faces` (S, F, 3): each shape is then sampled by itself, so that no sampling gives the answer away. Other
.npz files have `names`, and for each of them `<name>.v`, `.f`, `.vts` and maybe `.sym.vts`, from 0.

What a map should find at a place is a point of the shape, as in the remeshed data sets: for shapes that are sampled
here, the point nearest to the vertex there. A map can then be perfect. Errors of samples that are drawn anew are
measured from the vertex itself, so that few points cost what they cost.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from fem import creature_mesh
from scipy.spatial import cKDTree

import qattn
from qattn.sampling import on_surface
from qattn.shapes import posed

TRAINING = {"faust": 80, "scape": 51}  # the first shapes; the others test. SMAL comes with a split
VERTICES = 5000  # of a shape that shares its numbering with others, as the remeshed ones have
PLACES = 1000  # at which errors are measured, drawn at random, the same of all shapes
NEIGHBORS = 12  # that area is measured with
UPRIGHT = np.array([[0.0, 0, -1], [1, 0, 0], [0, -1, 0]])  # turns SCAPE, up x and facing −y, to up y and facing z


@dataclass(frozen=True)
class Shape:
    """Points of a surface, and the mesh on which distances are measured."""

    name: str
    points: np.ndarray  # (n, 3), float64, with center 0, in units of the square root of the cloud's area
    vertices: np.ndarray  # (V, 3), of the mesh, in its own units
    faces: np.ndarray  # (F, 3)
    nearest_vertex: np.ndarray  # (n,), the vertex that each point is, or is nearest to
    places: np.ndarray  # (K,), the point at, or nearest to, each of the places that all shapes of a data set have
    truth: np.ndarray  # (K,), the vertex that maps should find at each place
    exact: np.ndarray  # (K,), the vertex at each place
    mirrored: np.ndarray | None  # (K,), the vertex at the mirror image of each place, if known

    @property
    def area(self):
        return float(qattn.mass.vertex_areas(self.vertices, self.faces).sum())


@dataclass(frozen=True)
class DataSet:
    """Shapes of one kind: pairs are of the same data set."""

    name: str
    train: list
    test: list


def local_areas(points):
    """Areas (n,) that the points of a cloud (n, 3) have: π r² / k, with r the distance to the k-th neighbor."""
    radii = cKDTree(points).query(points, NEIGHBORS + 1)[0][:, -1]
    return np.pi * radii**2 / NEIGHBORS


def normalized(points):
    points = np.asarray(points, dtype=np.float64)
    return (points - points.mean(0)) / local_areas(points).sum() ** 0.5


def farthest_points(points, count, first):
    """Numbers (count,) of points, each the farthest from those before it."""
    chosen, squares = np.empty(count, dtype=np.int64), np.full(len(points), np.inf)
    chosen[0] = first
    for step in range(1, count):
        difference = points - points[chosen[step - 1]]
        np.minimum(squares, np.einsum("nd,nd->n", difference, difference), out=squares)
        chosen[step] = squares.argmax()
    return chosen


def some_of(count, num_places=PLACES):
    """Numbers, in order, of places that errors are measured at, out of `count`."""
    return np.sort(np.random.default_rng(0).permutation(count)[:num_places])


def meshed(name, vertices, faces, places, mirrored=None):
    """A shape whose points are the vertices of its mesh."""
    vertices, faces = np.asarray(vertices, dtype=np.float64), np.asarray(faces, dtype=np.int64)
    some, itself = some_of(len(places)), np.arange(len(vertices))
    places, mirrored = places[some], None if mirrored is None else mirrored[some]
    return Shape(name, normalized(vertices), vertices, faces, itself, places, places, places, mirrored)


def sampled(name, vertices, faces, count, seed, num_places=PLACES):
    """A shape of some vertices of a mesh, far from one another. Places are vertices that meshes number alike."""
    vertices, faces = np.asarray(vertices, dtype=np.float64), np.asarray(faces, dtype=np.int64)
    chosen = farthest_points(vertices, min(count, len(vertices)), np.random.default_rng(seed).integers(len(vertices)))
    common = some_of(len(vertices), num_places)
    places = cKDTree(vertices[chosen]).query(vertices[common])[1]
    return Shape(name, normalized(vertices[chosen]), vertices, faces, chosen, places, chosen[places], common, None)


def resampled(shape, count, seed, is_uneven=False):
    """Sample the same surface anew, at random by area, or up to 20 times as densely at one of its ends."""
    drawn, _ = on_surface((shape.vertices, shape.faces), (8 if is_uneven else 1) * count, seed)
    if is_uneven:
        generator = np.random.default_rng(seed)
        height = drawn @ generator.standard_normal(3)
        share = (height - height.min()) / np.ptp(height)
        drawn = drawn[generator.choice(len(drawn), count, replace=False, p=20**share / (20**share).sum())]
    return replace(
        shape,
        points=normalized(drawn),
        nearest_vertex=cKDTree(shape.vertices).query(drawn)[1],
        places=cKDTree(drawn).query(shape.vertices[shape.exact])[1],
        truth=shape.exact,
    )


def upright(shape):
    """Turn a shape as SCAPE is registered to stand and look as those of FAUST do."""
    return replace(shape, points=shape.points @ UPRIGHT.T, vertices=shape.vertices @ UPRIGHT.T)


def load(name, path):
    """The data set of a name, faust, scape or smal, from a folder or an .npz file."""
    path = Path(path)
    if path.is_dir():
        shapes, is_test = _from_folder(path), None
    elif path.suffix == ".npz":
        shapes, is_test = _from_npz(np.load(path))
    else:
        raise SystemExit(f"{path} should be a folder of meshes or an .npz file.")
    if name == "scape" and np.mean([np.ptp(shape.vertices, axis=0) for shape in shapes], axis=0).argmax() == 0:
        shapes = [upright(shape) for shape in shapes]
    if is_test is None:
        if name not in TRAINING:
            raise SystemExit(f"{path} has no split into shapes to train and to test with, and {name} has no usual one.")
        is_test = np.arange(len(shapes)) >= TRAINING[name]
    train, test = ([s for s, t in zip(shapes, is_test, strict=True) if t == kind] for kind in (False, True))
    if not train or len(test) < 2:
        raise SystemExit(f"{path} has {len(train)} shapes to train with and {len(test)} to test with: too few.")
    return DataSet(name, train, test)


def _from_folder(folder):
    files = {path.name: path for path in sorted(folder.rglob("*")) if path.is_file()}
    meshes = [path for name, path in sorted(files.items()) if path.suffix.lower() in (".off", ".obj")]
    shapes = []
    for number, path in enumerate(meshes):
        cloud = qattn.io.read(path)
        vertices, faces = cloud.coordinates, cloud.faces
        if f"{path.stem}.vts" in files:
            places, mirrored = (
                np.loadtxt(files[name], dtype=np.int64) - 1 if (name := path.stem + end) in files else None
                for end in (".vts", ".sym.vts")
            )
            shapes.append(meshed(path.stem, vertices, faces, places, mirrored))
        else:
            shapes.append(sampled(path.stem, vertices, faces, VERTICES, number))
    return shapes


def _from_npz(data):
    names = [str(name) for name in data["names"]]
    if "vertices" in data:
        each = zip(names, data["vertices"], data["faces"], strict=True)
        return [sampled(*mesh, VERTICES, number) for number, mesh in enumerate(each)], None
    shapes = []
    for name in names:
        vertices, faces, places = (data[name + end] for end in (".v", ".f", ".vts"))
        shapes.append(meshed(name, vertices, faces, places, data.get(f"{name}.sym.vts")))
    is_test = data["split"].astype(str) == "test" if "split" in data else None
    return shapes, is_test


def generated(count, num_test, num_points):
    """Creatures in random poses, each sampled by itself."""
    vertices, faces = creature_mesh(cells=32)
    shapes = []
    for seed in range(count + num_test):
        pose = posed(torch.from_numpy(vertices).float(), seed, bend=0.3).double().numpy()
        shapes.append(sampled(f"creature{seed}", pose, faces, num_points, seed, num_places=100))
    return DataSet("creature", shapes[:count], shapes[count:])

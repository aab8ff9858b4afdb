"""How true are spectra, heat kernel signatures and heat of point clouds, against finite elements on the mesh?

Random points of generated shapes and of meshes given by path, scaled to the unit ball; also uneven ones, four times as
many on one half, and noisy ones, moved by 0.01. One shape, the sheet, is open. Candidates, on the same points: equal
masses with the bandwidth that `qattn.spectrum` chooses and its frequencies as they come; `qattn.spectrum` as it is,
without normals, and with those of the mesh; and `robust_laplacian`. Errors are of eigenvalues 2 to 40, of signatures at
eight times, and of the heat of 16 points at the first of these times, all from 40 modes. With --normals, those of
`qattn.normals` are compared with those of the mesh instead. Rows of other shapes, sizes, samplings and candidates in
the record are kept.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch
from _measure import RECORDS, RESULTS, finding, parsed, save
from scipy.sparse.linalg import eigsh
from scipy.special import spherical_jn

import qattn
from qattn.shapes import sphere_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "paper"))
from fem import creature_mesh, eigenpairs, load

K = 40
NOISE, UNEVEN = 0.01, 0.25
FIGURES = ("median", "largest", "signatures", "heat")
SURFACES = ("sphere", "thin ellipsoid", "creature", "sheet")
SOLIDS = ("solid cube", "ball", "grid of a cube")


def mesh_of(name):
    """Vertices, with those at one place merged, and faces in the unit ball."""
    if name == "creature":
        vertices, faces = creature_mesh()
    elif name == "sheet":
        vertices, faces = sheet_mesh()
    elif name in ("sphere", "thin ellipsoid"):
        vertices, faces = (x.numpy() for x in sphere_mesh(6 if name == "sphere" else 5))
        vertices = vertices.astype(float) * ([1, 0.7, 0.04] if name == "thin ellipsoid" else 1)
    else:
        vertices, faces = load(name)
    vertices, index = np.unique(vertices, axis=0, return_inverse=True)
    vertices = vertices - (vertices.min(0) + vertices.max(0)) / 2
    return vertices / np.linalg.norm(vertices, axis=1).max(), index.reshape(-1)[faces]


def sheet_mesh(n=120):
    """A rectangle that is bent to waves, with n × n vertices."""
    u, v = np.meshgrid(np.linspace(-1, 1, n), np.linspace(-0.6, 0.6, n), indexing="ij")
    vertices = np.stack([u, v, 0.3 * np.sin(4 * u) * np.cos(3 * v)], axis=-1).reshape(-1, 3)
    index = np.arange(n * n).reshape(n, n)
    a, b, c, d = (index[i : n - 1 + i, j : n - 1 + j].ravel() for i, j in ((0, 0), (1, 0), (1, 1), (0, 1)))
    return vertices, np.concatenate([np.stack([a, b, c], axis=1), np.stack([a, c, d], axis=1)])


@cache
def truth(shape):
    """The mesh, its eigenvalues, and eigenvectors that are orthonormal for masses of sum 1."""
    vertices, faces = mesh_of(shape)
    values, vectors = eigenpairs(vertices, faces, K)
    x, y, z = np.moveaxis(vertices[faces], 1, 0)
    area = np.linalg.norm(np.cross(y - x, z - x), axis=1).sum() / 2
    return (vertices, faces), values, vectors * area**0.5


def sampled(vertices, faces, n, sampling, seed=0):
    """Points, the normals of their faces, and a function that interpolates values at the vertices."""
    random = np.random.default_rng(seed)
    corners = vertices[faces]
    products = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    areas = np.linalg.norm(products, axis=1)
    centers = corners.mean(1)
    weight = areas * np.where(centers[:, 0] > np.median(centers[:, 0]), 1, UNEVEN if sampling == "uneven" else 1)
    face = random.choice(len(faces), n, p=weight / weight.sum())
    root, share = np.sqrt(random.random(n)), random.random(n)
    coordinates = np.stack([1 - root, root * (1 - share), root * share], axis=1)
    points = (coordinates[:, :, None] * corners[face]).sum(1)
    if sampling == "noisy":
        points = points + NOISE * random.standard_normal(points.shape)
    return points, products[face] / areas[face, None], lambda f: (coordinates[:, :, None] * f[faces[face]]).sum(1)


def solid(name, n):
    """Points of a solid and the eigenvalues that it has."""
    random, k = np.random.default_rng(0), np.arange(12)
    if name == "ball":
        points = random.standard_normal((n, 3))
        points *= random.random((n, 1)) ** (1 / 3) / np.linalg.norm(points, axis=1, keepdims=True)
        values, t = [0.0], np.linspace(0.05, 20, 200_000)
        for degree in range(16):
            slope = spherical_jn(degree, t, True)
            values += [root**2 for root in t[:-1][slope[:-1] * slope[1:] < 0] for _ in range(2 * degree + 1)]
        return points, np.sort(values)[:K]
    values = np.sort((np.pi**2 * (k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)).ravel())[:K]
    if name == "solid cube":
        return random.random((n, 3)), values
    axis = (np.arange(round(n ** (1 / 3))) + 0.5) / round(n ** (1 / 3))
    return np.stack(np.meshgrid(axis, axis, axis), axis=-1).reshape(-1, 3), values


def by_equal_masses(points, normals):
    x = torch.from_numpy(points).float()
    sigma = float(qattn.spectrum(x, 1, normals=None).choices["sigma"].split(",")[0])
    return by_modes(qattn.eigsh(qattn.diffusion(x, sigma, tol=1e-4), K))


def by_spectrum(**options):
    return lambda points, normals: by_modes(qattn.spectrum(torch.from_numpy(points).float(), K, **options))


def by_true_normals(points, normals):
    if normals is None:
        raise ValueError("no normals")
    return by_spectrum(normals=normals)(points, normals)


def by_modes(spectrum):
    """Eigenvalues, and eigenvectors that are orthonormal for masses of sum 1."""
    return spectrum.frequencies.double().numpy(), spectrum.vectors.double().numpy()


def by_robust_laplacian(points, normals):
    from robust_laplacian import point_cloud_laplacian

    stiffness, mass = point_cloud_laplacian(points)
    start = np.random.default_rng(0).standard_normal(len(points))
    values, vectors = eigsh(stiffness, K, mass, sigma=-1e-2, v0=start)
    return values, vectors * mass.diagonal().sum() ** 0.5


CANDIDATES = {
    "qattn": by_spectrum(),
    "equal masses": by_equal_masses,
    "without normals": by_spectrum(normals=None),
    "normals of the mesh": by_true_normals,
    "robust_laplacian": by_robust_laplacian,
}


def relative(found, exact):
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def heat(values, vectors, t, sources):
    """Signatures (N,) at the time t, and the heat (N, S) of sources."""
    decayed = np.exp(-t * values) * vectors
    return (decayed * vectors).sum(1), decayed @ vectors[sources].T


def errors(found, exact, sources):
    """Compute errors of eigenvalues and, if there are eigenvectors, of signatures and heat."""
    deviations = found[0][1:] / exact[0][1:] - 1
    result = {
        "median": float(np.median(np.abs(deviations))),
        "largest": float(np.abs(deviations).max()),
        "bias": float(np.median(deviations)),
    }
    if exact[1] is not None:
        times = np.geomspace(*(4 * np.log(10) / exact[0][[K - 1, 1]]), 8)
        pairs = [(heat(*found, t, sources), heat(*exact, t, sources)) for t in times]
        result["signatures"] = float(np.mean([relative(one[0], other[0]) for one, other in pairs]))
        result["heat"] = relative(pairs[0][0][1], pairs[0][1][1])
    return result


def rows_of(shape, n, sampling, candidates):
    name = Path(shape).stem
    if shape in SOLIDS:
        points, values = solid(shape, n)
        normals, exact = None, (values, None)
    else:
        mesh, values, vectors = truth(shape)
        points, normals, interpolated = sampled(*mesh, n, sampling)
        exact = values, interpolated(vectors)
    sources = np.random.default_rng(1).choice(len(points), 16, replace=False)
    for candidate in candidates:
        if candidate in ("normals of the mesh", "robust_laplacian") and normals is None:
            continue
        found = CANDIDATES[candidate](points, normals)
        row = {"name": candidate, "shape": name, "N": len(points), "sampling": sampling}
        yield row | errors(found, exact, sources)


def row_of_normals(shape, n, sampling):
    """Part of the estimated normals that are on the wrong side, and their mean angle to those of the mesh, as lines."""
    points, exact, _ = sampled(*mesh_of(shape), n, sampling)
    cosines = (qattn.normals(points) * exact).sum(1)
    angle = np.degrees(np.arccos(np.abs(cosines).clip(max=1)).mean())
    wrong = float((cosines < 0).mean())
    row = {"name": "normals", "shape": Path(shape).stem, "N": n, "sampling": sampling}
    return row | {"wrong side": min(wrong, 1 - wrong) if shape == "sheet" else wrong, "angle": float(angle)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", help="meshes, or names of generated shapes; by default all of the latter")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 5000, 20_000])
    parser.add_argument("--samplings", nargs="+", default=["random"], choices=["random", "uneven", "noisy"])
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--normals", action="store_true", help="compare normals instead")
    options = parsed(parser, sizes=[1000], shapes=["sphere", "solid cube"])
    path = (RESULTS if options.quick else RECORDS) / "accuracy.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for shape in options.shapes or [*SURFACES, *(() if options.normals else SOLIDS)]:
        for n in options.sizes:
            for sampling in ["random"] if shape in SOLIDS else options.samplings:
                if options.normals:
                    new = [row_of_normals(shape, n, sampling)]
                else:
                    new = rows_of(shape, n, sampling, options.candidates)
                for row in new:
                    rows = [old for old in rows if of(old) != of(row)] + [row]
                    print(described(row), flush=True)
                    assert row["name"] != "qattn" or sampling != "random" or row["median"] < 0.1
        save("accuracy", rows, findings(rows), options.quick)


def of(row):
    return [row[name] for name in ("shape", "N", "sampling", "name")]


def described(row):
    figures = " ".join(f"{name} {row[name]:6.1%}" for name in FIGURES if name in row)
    if row["name"] == "normals":
        figures = f"wrong side {row['wrong side']:.1%}, {row['angle']:.1f}°"
    return f"{row['shape']:15} {row['N']:6} {row['sampling']:7} {row['name']:20} {figures}"


def findings(rows):
    cases = sorted({(row["shape"], row["N"], row["sampling"]) for row in rows})
    parts = [(case, [row for row in rows if (row["shape"], row["N"], row["sampling"]) == case]) for case in cases]
    return [
        finding(f"{shape}, {n:,} {sampling} points", "median error {median:.1%}", some, "median")
        for (shape, n, sampling), some in parts
    ]


if __name__ == "__main__":
    main()

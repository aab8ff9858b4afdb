"""Data of a shape, computed once before training and kept in a folder: spectra, signatures, frames, distances.

Spectra are of three kinds: "mesh", of the cotangent Laplacian; "q", of the operator Q of the cloud, for which there is
no mesh; and "cloud", of `robust_laplacian` on the same points, for the spectral network that Q-DiffNet is compared to.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from fem import eigenpairs
from matching_data import local_areas
from scipy.sparse.linalg import eigsh

import qattn
from qattn.signatures import wave_kernel_signature

# Spacings; of the operator of which "q" is the spectrum. Wider kernels may join what touches, such as hands
# and hips; that this is the reason was not tested. On three training shapes of FAUST, signatures alone have errors, up
# to the mirror, of 9.9, 13.9, 23.4 and 25.6 for 0.7, 1, 1.4 and 2; with `robust_laplacian` 11.6, with the mesh 5.9.
SIGMA = 0.7
DENSITY = 1.5  # spacings; of the masses
UNIT = 0.02  # bandwidth for which eigenvalues of Laplacians are written as those of diffusions
ENERGIES = 128  # of wave kernel signatures


class Cache:
    """A folder of arrays by name; each is computed once."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, shape, what, compute, of_mesh=False):
        """Return the arrays of a shape, or of its mesh alone; `compute()` makes those that the folder lacks."""
        points = shape.vertices if of_mesh else shape.points
        digest = hashlib.sha256(points.tobytes() + shape.faces.tobytes()).hexdigest()[:12]
        path = self.folder / f"{shape.name}-{digest}-{what}.npz"
        if not path.exists():
            arrays = compute()
            unfinished = path.with_suffix(".part.npz")
            np.savez(unfinished, **arrays)
            unfinished.replace(path)  # never half a file, if this is interrupted
        with np.load(path) as data:
            return dict(data)


def spacing(points):
    """Edge of the square that a point has, averaged by area, so that a kernel also reaches where points are sparse."""
    areas = local_areas(points)
    return float(np.average(areas, weights=areas)) ** 0.5


def masses(shape, kind):
    """Masses (n,) with sum 1: areas around the vertices of a mesh if these are the points, and else by density."""
    if kind == "mesh" and np.array_equal(shape.nearest_vertex, np.arange(len(shape.vertices))):
        areas = qattn.mass.vertex_areas(shape.vertices, shape.faces)
        return areas / areas.sum()
    return qattn.mass.density(shape.points, DENSITY * spacing(shape.points))


def spectrum(shape, kind, k, cache):
    """A `qattn.Spectrum` of k eigenvectors at the points of a shape, in units in which the shape has area 1."""
    if kind == "mesh":
        arrays = cache.get(shape, f"mesh{k}", lambda: _of_mesh(shape, k), of_mesh=True)
        arrays["vectors"], arrays["mass"] = arrays["vectors"][shape.nearest_vertex], masses(shape, "mesh")
    else:
        name, compute = {"q": (f"q{SIGMA:g}-{k}", _of_q), "cloud": (f"cloud{k}", _of_cloud)}[kind]
        arrays = cache.get(shape, name, lambda: compute(shape, k))
    frequencies, vectors, mass = (torch.from_numpy(arrays[name]).float() for name in ("frequencies", "vectors", "mass"))
    values = torch.exp(-(UNIT**2) * frequencies.double() / 2)
    return qattn.Spectrum(values, vectors, torch.zeros_like(values), mass, UNIT)


def _of_mesh(shape, k):
    frequencies, vectors = eigenpairs(shape.vertices / shape.area**0.5, shape.faces, k)
    return _arrays(frequencies, vectors)


def _of_q(shape, k):
    mass, sigma = masses(shape, "q"), SIGMA * spacing(shape.points)
    found = qattn.eigsh(qattn.diffusion(shape.points, sigma, mass, tol=1e-6), k)
    return _arrays(found.frequencies, found.vectors, mass=mass)


def _of_cloud(shape, k):
    try:
        from robust_laplacian import point_cloud_laplacian
    except ModuleNotFoundError:
        raise SystemExit("This needs robust_laplacian: `pip install 'qattn-diffusion[bench]'`.") from None
    stiffness, mass = point_cloud_laplacian(shape.points)
    start = np.random.default_rng(0).standard_normal(len(shape.points))  # without one, no two runs are alike
    frequencies, vectors = eigsh(stiffness, k, mass, sigma=-1e-2, v0=start)
    area = mass.diagonal().sum()
    return _arrays(frequencies * area, vectors * area**0.5, mass=mass.diagonal() / area)


def _arrays(frequencies, vectors, **others):
    arrays = {"frequencies": np.maximum(np.asarray(frequencies), 0), "vectors": vectors, **others}
    return {name: np.asarray(array, dtype=np.float32) for name, array in arrays.items()}


def signatures(of):
    """Wave kernel signatures (n, C) of a spectrum, about 0."""
    return wave_kernel_signature(of, num_energies=ENERGIES).float() - 1


def normals(shape, kind, cache):
    """Normals (n, 3) of one orientation: those of the mesh, or of the cloud where there is no mesh."""
    if kind == "mesh":
        return torch.from_numpy(_mesh_normals(shape)).float()
    arrays = cache.get(shape, "signed-normals", lambda: {"normals": qattn.normals(shape.points).astype(np.float32)})
    return torch.from_numpy(arrays["normals"])


def _mesh_normals(shape):
    a, b, c = (shape.vertices[shape.faces[:, corner]] for corner in range(3))
    sums, of_faces = np.zeros_like(shape.vertices), np.cross(b - a, c - a)
    for corner in range(3):
        np.add.at(sums, shape.faces[:, corner], of_faces)
    return sums[shape.nearest_vertex]


def geodesics(shape, cache):
    """Vertices (R,) at places and their mirror images, and distances (R, V) from them over √area, by fast marching."""
    arrays = cache.get(shape, "geodesics", lambda: _marched(shape), of_mesh=True)
    return arrays["rows"], arrays["distances"]


def _marched(shape):
    try:
        from potpourri3d import MeshFastMarchingDistanceSolver
    except ModuleNotFoundError:
        raise SystemExit("Distances along meshes need potpourri3d: `pip install 'qattn-diffusion[bench]'`.") from None
    solver, scale = MeshFastMarchingDistanceSolver(shape.vertices, shape.faces), shape.area**-0.5
    rows = np.unique(shape.truth if shape.mirrored is None else np.concatenate([shape.truth, shape.mirrored]))
    distances = np.stack([scale * solver.compute_distance([[(int(row), [])]]) for row in rows])
    if not np.isfinite(distances).all():
        raise SystemExit(f"The mesh of {shape.name} has several parts, and no distances between them.")
    return {"rows": rows, "distances": distances.astype(np.float16)}

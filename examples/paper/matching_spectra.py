"""Data of a shape, computed once before training and kept in a folder: spectra, signatures, frames, distances.

Spectra are of three kinds: "mesh", of the cotangent Laplacian; "q", of the operator Q of the cloud, for which there is
no mesh; and "cloud", of `robust_laplacian` on the same points, for the spectral network that Q-DiffNet is compared to.
"""

import hashlib
import zlib
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from fem import eigenpairs
from matching_data import local_areas
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import eigsh
from scipy.spatial import cKDTree

import qattn
from qattn.signatures import wave_kernel_signature

# Spacings, of the operator of which "q" is the spectrum, whose kernel does not join sheets that touch. On ten people of
# FAUST in ten poses, functional maps of the true correspondence have errors of 1.9 with 200 eigenvectors; 2.4 with a
# Gaussian kernel, 1.6 with `robust_laplacian`, 1.0 with the mesh. Nearest signatures have errors, up to the mirror, of
# 15.2, 14.9, 18.2 and 7.2. Bandwidths of 0.5, 0.6 and 0.9 are no better in both.
SIGMA = 0.7
DENSITY = 1.5  # spacings; of the masses of samples of a mesh
UNIT = 0.02  # bandwidth for which eigenvalues of Laplacians are written as those of diffusions
ENERGIES = 128  # of wave kernel signatures
NEAR, NEIGHBORS, ROUNDS = 16, 12, 20  # of outward normals: neighbors of fluxes and of signs, and averages of these


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


def spectrum(shape, kind, k, cache):
    """A `qattn.Spectrum` of k eigenvectors at the points of a shape, in units in which the shape has area 1."""
    if kind == "mesh":
        arrays = cache.get(shape, f"mesh{k}", lambda: _of_mesh(shape, k), of_mesh=True)
        arrays["vectors"], arrays["mass"] = arrays["vectors"][shape.nearest_vertex], _masses(shape)
    elif kind == "q":
        outward = normals(shape, kind, cache)
        arrays = cache.get(shape, f"q{SIGMA:g}-{k}-outward", lambda: _of_q(shape, k, outward))
    else:
        arrays = cache.get(shape, f"cloud{k}", lambda: _of_cloud(shape, k))
    frequencies, vectors, mass = (torch.from_numpy(arrays[name]).float() for name in ("frequencies", "vectors", "mass"))
    values = torch.exp(-(UNIT**2) * frequencies.double() / 2)
    return qattn.Spectrum(values, vectors, torch.zeros_like(values), mass, UNIT)


def _masses(shape):
    """Masses (n,) with sum 1: areas around the vertices of a mesh if these are the points, and else by density."""
    if np.array_equal(shape.nearest_vertex, np.arange(len(shape.vertices))):
        areas = qattn.mass.vertex_areas(shape.vertices, shape.faces)
        return areas / areas.sum()
    return qattn.mass.density(shape.points, DENSITY * spacing(shape.points))


def _of_mesh(shape, k):
    frequencies, vectors = eigenpairs(shape.vertices / shape.area**0.5, shape.faces, k)
    return _arrays(frequencies, vectors)


def _of_q(shape, k, outward):
    sigma = SIGMA * spacing(shape.points)
    found = qattn.spectrum(shape.points, k, sigma=sigma, mass="density", normals=outward.numpy())
    return _arrays(found.frequencies, found.vectors, mass=found.mass)


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
    """Normals (n, 3), outward: those of the mesh, or of the cloud where there is no mesh."""
    if kind == "mesh":
        return torch.from_numpy(_mesh_normals(shape)).float()
    arrays = cache.get(shape, "outward", lambda: {"normals": outward(shape.points).astype(np.float32)})
    return torch.from_numpy(arrays["normals"])


def outward(points):
    """Outward normals (n, 3) of the closed surface of points.

    `qattn.normals` carries signs from neighbor to neighbor, and where sheets touch, as at armpits, takes wrong ones to
    whole limbs. Here they are those of `_fluxes`, averaged over neighbors with the signs that these carry.
    """
    found = qattn.normals(points)
    near = cKDTree(points).query(points, NEIGHBORS + 1)[1][:, 1:]  # (n, K)
    edges = points[near] - points[:, None]
    edges /= np.maximum(np.linalg.norm(edges, axis=-1, keepdims=True), np.finfo(float).tiny)  # points may coincide
    along = np.einsum("na,nka->nk", found, edges) * np.einsum("nka,nka->nk", found[near], edges)
    agreement = np.einsum("na,nka->nk", found, found[near]) - 2 * along  # after a reflection halfway
    own = (found * _fluxes(points)).sum(1)
    sign = own = own / np.abs(own).mean()
    for _ in range(ROUNDS):
        sign = own + (agreement * sign[near]).mean(1)
    return np.sign(sign)[:, None] * found


def _fluxes(points):
    """The smallest outward areas μ (n, 3) of which the solid angle of half a sphere is seen from each point.

    That is Σ_j μ_j · (x_j − x_i) / 4π ‖x_j − x_i‖³ = ½, by Gauss's formula (Lin et al. 2022), solved with Jacobi's
    preconditioner. Areas are no smaller than distances to the neighbors, and noise is half of the diagonal.
    """
    x = torch.from_numpy(points).float()
    reach = torch.from_numpy(cKDTree(points).query(points, NEAR + 1)[0][:, -1]).float()
    scale = 1 / (4 * torch.pi * torch.cdist(x, x).clamp_(min=reach[:, None]) ** 3)
    parts = [scale * (axis - axis[:, None]) for axis in x.T]  # three of (n, n)
    diagonal = sum(part.square().sum(1) for part in parts)
    solution = torch.zeros(len(x))
    residual = torch.full_like(solution, 0.5)
    step = direction = residual / diagonal
    size = residual @ step
    while residual.norm() > 1e-3 * len(x) ** 0.5:
        image = sum(part @ (part.T @ direction) for part in parts) + 0.5 * diagonal * direction
        length = size / (direction @ image)
        solution, residual = solution + length * direction, residual - length * image
        step = residual / diagonal
        size, before = residual @ step, size
        direction = step + size / before * direction
    return torch.stack([part.T @ solution for part in parts], 1).numpy()


def _mesh_normals(shape):
    a, b, c = (shape.vertices[shape.faces[:, corner]] for corner in range(3))
    sums, of_faces = np.zeros_like(shape.vertices), np.cross(b - a, c - a)
    for corner in range(3):
        np.add.at(sums, shape.faces[:, corner], of_faces)
    return sums[shape.nearest_vertex]


def geodesics(shape, cache):
    """Vertices (R,) at places and their mirror images, and distances (R, V) from them over √area, by fast marching."""
    rows = np.unique(np.concatenate([x for x in (shape.truth, shape.exact, shape.mirrored) if x is not None]))
    name = f"geodesics{zlib.crc32(rows.tobytes()):08x}"
    return rows, cache.get(shape, name, lambda: _marched(shape, rows), of_mesh=True)["distances"]


def _marched(shape, rows):
    try:
        from potpourri3d import MeshFastMarchingDistanceSolver
    except ModuleNotFoundError:
        raise SystemExit("Distances along meshes need potpourri3d: `pip install 'qattn-diffusion[bench]'`.") from None
    owner, faces = unpinched(shape.faces)
    solver, scale = MeshFastMarchingDistanceSolver(shape.vertices[owner], faces), shape.area**-0.5
    distances = np.full((len(rows), len(shape.vertices)), np.inf, dtype=np.float16)
    for row, vertex in enumerate(rows):
        starts = [[(int(copy), [])] for copy in np.flatnonzero(owner == vertex)]
        found = np.full(len(shape.vertices), np.inf)
        np.minimum.at(found, owner, scale * solver.compute_distance(starts))
        distances[row] = found
    if not np.isfinite(distances).all():
        raise SystemExit(f"The mesh of {shape.name} has several parts, and no distances between them.")
    return {"distances": distances}


def unpinched(faces):
    """The vertex of each new one, and new faces: vertices where several fans of faces meet are copied for each.

    The meshes of SCAPE have one such vertex, and fast marching takes none.
    """
    corners = np.arange(faces.size).reshape(-1, 3)
    starts, ends = (np.stack([faces.ravel(), corners.ravel()], 1), np.roll(np.stack([faces, corners], 2), -1, 1))
    ends = ends.reshape(-1, 2)
    is_up = (starts[:, 0] < ends[:, 0])[:, None]
    low, high = np.where(is_up, starts, ends), np.where(is_up, ends, starts)  # (3 F, 2), vertices and corners of edges
    order = np.lexsort((high[:, 0], low[:, 0]))
    low, high = low[order], high[order]
    is_same = (low[1:, 0] == low[:-1, 0]) & (high[1:, 0] == high[:-1, 0])
    joined = [(x[:-1, 1][is_same], x[1:, 1][is_same]) for x in (low, high)]
    rows, columns = np.concatenate(joined, axis=1)
    graph = scipy.sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=(faces.size, faces.size))
    count, fan = connected_components(graph, directed=False)
    owner = np.empty(count, dtype=np.int64)
    owner[fan] = faces.ravel()
    return owner, fan.reshape(-1, 3)

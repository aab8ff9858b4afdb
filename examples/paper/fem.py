"""Meshes of shapes, and the Laplacian on them by linear finite elements: what spectra are compared to."""

import math

import numpy as np
import scipy.sparse
import trimesh
from scipy.sparse.linalg import eigsh
from scipy.spatial import Delaunay, cKDTree
from trimesh.ray.ray_util import contains_points

from qattn.sampling import voxelize_solid, voxelize_surface
from qattn.shapes import creature_distance, cube_tetrahedra, sphere_mesh


def load(name):
    """Vertices and faces of a sphere of diameter 1, a cube of edge 1, or in the unit sphere a creature or a file."""
    if name == "sphere":
        vertices, faces = sphere_mesh(5)
        return 0.5 * vertices.double().numpy(), faces.numpy()
    if name == "cube":
        mesh = trimesh.creation.box()
        for _ in range(5):
            mesh = mesh.subdivide()
        return np.array(mesh.vertices), np.array(mesh.faces)
    vertices, faces = creature_mesh() if name == "creature" else _file(name)
    vertices = vertices - (vertices.min(0) + vertices.max(0)) / 2
    return vertices / np.linalg.norm(vertices, axis=1).max(), faces


def _file(path):
    mesh = trimesh.load(path, force="mesh")
    return np.array(mesh.vertices), np.array(mesh.faces)


def creature_mesh(cells=72):
    """Triangulate the surface of the creature, by marching through the tetrahedra of a grid."""
    grid, tetrahedra = cube_tetrahedra(cells)
    grid, tetrahedra = 2.4 * (grid.double() - 0.5), tetrahedra.numpy()
    distance = creature_distance(grid).numpy()
    # A corner too close to the surface would make needles.
    distance = np.where(np.abs(distance) < 0.1 * 2.4 / cells, np.copysign(0.1 * 2.4 / cells, distance), distance)
    inside = (distance < 0)[tetrahedra]
    corners = np.take_along_axis(tetrahedra, np.argsort(~inside, axis=1), axis=1)  # those inside first
    count = inside.sum(1)
    # Each edge (in, out) is a vertex; a tetrahedron with two corners inside has four of them in a ring.
    rings = {1: [(0, 1), (0, 2), (0, 3)], 2: [(0, 2), (0, 3), (1, 3), (1, 2)], 3: [(0, 3), (1, 3), (2, 3)]}
    triangles = []
    for n, ring in rings.items():
        ends = corners[count == n][:, ring]  # (T, 3 or 4, 2)
        triangles += [ends[:, [0, 1, 2]]] + ([ends[:, [0, 2, 3]]] if n == 2 else [])
    edges, faces = np.unique(np.concatenate(triangles).reshape(-1, 2), axis=0, return_inverse=True)
    a, b = grid.numpy()[edges.T]
    share = distance[edges[:, 0]] / (distance[edges[:, 0]] - distance[edges[:, 1]])
    vertices, faces = a + share[:, None] * (b - a), faces.reshape(-1, 3)
    x, y, z = np.moveaxis(vertices[faces], 1, 0)
    is_inward = (np.cross(y - x, z - x) * (b - a)[faces].sum(1)).sum(-1) < 0
    return vertices, np.where(is_inward[:, None], faces[:, ::-1], faces)


def tetrahedralise(mesh, inside=10_000):
    """Vertices and tetrahedra of a closed mesh: Delaunay's, of its vertices and of a grid with some points inside."""
    vertices, faces = mesh
    closed = trimesh.Trimesh(vertices, faces)
    spacing = (abs(closed.volume) / inside) ** (1 / 3)
    solid, surface = voxelize_solid(mesh, spacing), voxelize_surface(mesh, spacing)
    centers = solid.origin + spacing * np.argwhere(solid.mask & ~surface.mask)
    centers = centers + 0.1 * spacing * np.random.default_rng(0).uniform(-1, 1, centers.shape)  # in general position
    centers = centers[cKDTree(vertices).query(centers)[0] > 0.6 * spacing]
    points = np.concatenate([vertices, centers])
    tetrahedra = Delaunay(points).simplices
    edges = points[tetrahedra[:, 1:]] - points[tetrahedra[:, :1]]
    volumes = np.abs(np.linalg.det(edges)) / 6
    tetrahedra = tetrahedra[volumes > 1e-3 * np.linalg.norm(edges, axis=-1).max(1) ** 3]  # flat ones have no gradient
    doubtful = (tetrahedra < len(vertices)).all(1)
    middles = points[tetrahedra[doubtful]].mean(1)
    doubtful[doubtful] = ~contains_points(closed.ray, middles, check_direction=[0.0, 0.0, 1.0])
    return points, tetrahedra[~doubtful]


def eigenpairs(vertices, simplices, k):
    """The k smallest eigenvalues of the Laplacian on triangles (cotangents) or tetrahedra, and their eigenvectors."""
    d, N = simplices.shape[1] - 1, len(vertices)
    edges = vertices[simplices[:, 1:]] - vertices[simplices[:, :1]]  # (F, d, 3)
    gram = edges @ edges.transpose(0, 2, 1)
    sizes = np.sqrt(np.linalg.det(gram)) / math.factorial(d)
    sizes, gram, simplices = sizes[sizes > 0], gram[sizes > 0], simplices[sizes > 0]
    slopes = np.concatenate([-np.ones((1, d)), np.eye(d)])  # of the d + 1 hat functions, along the edges
    stiff = sizes[:, None, None] * (slopes @ np.linalg.inv(gram) @ slopes.T)  # (F, d + 1, d + 1)
    # Halfway between Galerkin's masses, which make eigenvalues too large, and lumped ones, which make them too small.
    mass = sizes[:, None, None] * (1 + (d + 3) * np.eye(d + 1)) / (2 * (d + 1) * (d + 2))
    rows, columns = np.broadcast_arrays(simplices[:, :, None], simplices[:, None])
    where = rows.ravel().astype(np.int32), columns.ravel().astype(np.int32)  # which older versions of SciPy factor
    stiff, mass = (scipy.sparse.csc_array((x.ravel(), where), shape=(N, N)) for x in (stiff, mass))
    used = np.unique(simplices)
    stiff, mass = (x[used][:, used] for x in (stiff, mass))
    values, some = eigsh(stiff, k, mass, sigma=-1.0)
    vectors = np.zeros((N, k))
    vectors[used] = some
    return values, vectors

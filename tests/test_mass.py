"""Masses: closed forms, laws of scale and of splitting, gradients."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import sphere

from qattn import GaussianKernel, GraphKernel, MatrixKernel, VoxelKernel, diffuse, diffusion, mass, shapes, sinkhorn

pytestmark = pytest.mark.usefixtures("_one_thread")

CUBE = torch.cartesian_prod(*3 * [torch.tensor([0.0, 1.0], dtype=torch.float64)])
CUBE_FACES = torch.tensor(
    [[0, 1, 3], [0, 3, 2], [4, 6, 7], [4, 7, 5], [0, 4, 5], [0, 5, 1], [2, 3, 7], [2, 7, 6], [0, 2, 6], [0, 6, 4],
     [1, 5, 7], [1, 7, 3]]
)  # fmt: skip


def rotation():
    return torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q


def test_areas_of_known_shapes():
    assert float(mass.vertex_areas(CUBE, CUBE_FACES).sum()) == pytest.approx(6, rel=1e-14)
    triangle = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0], [9.0, 9.0]])  # the last belongs to no face
    torch.testing.assert_close(mass.vertex_areas(triangle, [[0, 1, 2]]), torch.tensor([2.0, 2.0, 2.0, 0.0]))
    errors = []
    for subdivisions in (2, 3, 4):
        vertices, faces = shapes.sphere_mesh(subdivisions)
        errors.append(1 - float(mass.vertex_areas(vertices.double(), faces).sum()) / (4 * math.pi))
    assert 0 < errors[-1] < 2e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)  # second order
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)


def test_volumes_of_known_shapes():
    for k in (1, 2, 5):
        vertices, tetrahedra = shapes.cube_tetrahedra(k)
        masses = mass.vertex_volumes(vertices.double(), tetrahedra)
        assert float(masses.sum()) == pytest.approx(1, rel=1e-6)  # k = 5 rounds the vertices to float32
        reflected = vertices.double() * torch.tensor([-1.0, 1.0, 1.0])
        torch.testing.assert_close(mass.vertex_volumes(reflected, tetrahedra), masses)
    is_inner = ((vertices > 0.01) & (vertices < 0.99)).all(-1)
    torch.testing.assert_close(masses[is_inner], torch.full_like(masses[is_inner], 1 / 5**3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 7.0, 1e3])
def test_motions_and_scale(scale):
    turn, shift = rotation(), torch.randn(3, dtype=torch.float64)
    areas = mass.vertex_areas(CUBE, CUBE_FACES)
    torch.testing.assert_close(
        mass.vertex_areas(scale * CUBE @ turn + shift, CUBE_FACES), scale**2 * areas, rtol=1e-8, atol=0
    )
    vertices, tetrahedra = shapes.cube_tetrahedra(2)
    volumes = mass.vertex_volumes(vertices.double(), tetrahedra)
    moved = scale * vertices.double() @ turn + shift
    torch.testing.assert_close(mass.vertex_volumes(moved, tetrahedra), scale**3 * volumes, rtol=1e-8, atol=0)


def test_the_plane_is_a_plane_in_space():
    vertices = torch.rand(20, 2, dtype=torch.float64)
    faces = torch.randint(20, (30, 3))
    lifted = torch.cat([vertices, torch.full((20, 1), 3.0, dtype=torch.float64)], dim=-1) @ rotation()
    torch.testing.assert_close(mass.vertex_areas(vertices, faces), mass.vertex_areas(lifted, faces))


def test_splitting_a_triangle_keeps_the_area():
    vertices = torch.cat([CUBE, CUBE[CUBE_FACES[0]].mean(0, keepdim=True)])
    a, b, c = CUBE_FACES[0].tolist()
    split = torch.cat([CUBE_FACES[1:], torch.tensor([[a, b, 8], [b, c, 8], [c, a, 8]])])
    masses = mass.vertex_areas(vertices, split)
    assert float(masses.sum()) == pytest.approx(6, rel=1e-14)
    assert float(masses[8]) == pytest.approx(0.5 / 3)


def test_batches_and_arrays():
    batch = torch.stack([CUBE, 2 * CUBE])
    areas = mass.vertex_areas(batch, CUBE_FACES)
    torch.testing.assert_close(areas.sum(-1), torch.tensor([6.0, 24.0], dtype=torch.float64))
    array = mass.vertex_areas(batch.numpy(), CUBE_FACES.numpy().astype(np.uint32))
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, areas.numpy())
    vertices, tetrahedra = shapes.cube_tetrahedra(2)
    volumes = mass.vertex_volumes(torch.stack([vertices, 2 * vertices]), tetrahedra)
    torch.testing.assert_close(volumes.sum(-1), torch.tensor([1.0, 8.0]))
    assert isinstance(mass.vertex_volumes(vertices.numpy(), tetrahedra), np.ndarray)
    assert mass.vertex_areas(CUBE.half(), CUBE_FACES).dtype == torch.float32


def test_gradients():
    vertices = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    faces, tetrahedra = torch.randint(6, (5, 3)), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4], [5, 4, 3, 0]])
    faces[0] = torch.tensor([0, 1, 2])
    assert torch.autograd.gradcheck(lambda x: mass.vertex_volumes(x, tetrahedra), vertices)
    is_proper = torch.tensor([len(set(face)) == 3 for face in faces.tolist()])
    assert torch.autograd.gradcheck(lambda x: mass.vertex_areas(x, faces[is_proper]), vertices)
    points = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mass.density(x, 0.7), points)


@pytest.mark.parametrize("scale", [1e10, 1.0, 1e-12])
def test_areas_of_any_size_in_float32(scale):
    """No squared length may overflow or underflow, also for a small triangle beside a large one."""
    corners = torch.tensor([[0.0, 0, 0], [3, 1, 0], [1, 2, 2], [1e-6, 0, 0], [0, 1e-6, 1e-6]]) * scale
    faces = torch.tensor([[0, 1, 2], [0, 3, 4]])
    a, b, c = corners.double()[faces].unbind(1)
    exact = torch.linalg.cross(b - a, c - a).norm(dim=-1) / 6
    areas = mass.vertex_areas(corners, faces).double()
    torch.testing.assert_close(areas[[1, 3]], exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(areas.sum(), 3 * exact.sum(), rtol=1e-5, atol=0)


def test_triangles_without_area():
    vertices = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0]], requires_grad=True)
    faces = [[0, 1, 2], [1, 1, 1], [0, 0, 3], [0, 1, 3]]  # collinear, a point, a segment, and a proper triangle
    masses = mass.vertex_areas(vertices, faces)
    torch.testing.assert_close(masses, torch.tensor([1.0, 1.0, 0.0, 1.0]) / 6)
    (grad,) = torch.autograd.grad(masses.sum(), vertices)
    torch.testing.assert_close(grad, torch.autograd.grad(mass.vertex_areas(vertices, faces[3:]).sum(), vertices)[0])


def test_density_is_the_reciprocal_row_sum():
    points = torch.randn(3, 40, 2, dtype=torch.float64)
    for sigma in (0.5, [0.2, 1.0]):
        kernel = GaussianKernel(points, sigma)
        q = diffusion(points, sigma, normalization="none")
        rows = q.to_dense().sum(-1) * 40  # of K, as masses are 1/N
        expected = (1 / rows) / (1 / rows).sum(-1, keepdim=True)
        torch.testing.assert_close(mass.density(points, sigma, num_iter=1), expected)
        torch.testing.assert_close(mass.density(kernel, num_iter=1), expected)
    assert expected.shape == (3, 2, 40)
    assert isinstance(mass.density(points.numpy(), 0.5), np.ndarray)


def test_density_levels_the_row_sums():
    """Each iteration divides masses by the sums of rows, which become equal."""
    points = sphere(800)
    matrix = GaussianKernel(points, 0.2).to_dense()
    expected, spreads = torch.ones(800, dtype=torch.float64), []
    for num_iter in range(1, 6):
        expected = expected / (matrix @ expected)
        masses = mass.density(points, 0.2, num_iter=num_iter)
        torch.testing.assert_close(masses, expected / expected.sum())
        sums = matrix @ masses
        spreads.append(float(sums.std() / sums.mean()))
    assert all(after < before for before, after in pairwise(spreads))
    assert spreads[3] < 0.5 * spreads[0]
    torch.testing.assert_close(mass.density(points, 0.2), mass.density(points, 0.2, num_iter=4))


def test_masses_by_name():
    points = sphere(300)
    q = diffusion(points, 0.3, mass="density")
    torch.testing.assert_close(q.mass, mass.density(points, 0.3))
    torch.testing.assert_close(sinkhorn(q.kernel, "density").potential, q.potential)
    heads = diffusion(points, [0.2, 0.4], mass="density")
    torch.testing.assert_close(heads.mass, mass.density(points, [0.2, 0.4]))
    smooth, same = diffuse(points, 0.3, points, mass="density")
    torch.testing.assert_close(smooth, q @ points)
    torch.testing.assert_close(same.mass, q.mass)
    with pytest.raises(ValueError, match="`mass` should be 'density'; got 'areas'"):
        diffusion(points, 0.3, mass="areas")


def test_density_shares_the_mass_of_one_place():
    """Several points at one place share the mass of a single point."""
    copies = torch.tensor([1, 5, 2, 30])
    places = 100 * torch.eye(4, dtype=torch.float64)
    masses = mass.density(places.repeat_interleave(copies, dim=0), 1.0)
    torch.testing.assert_close(masses, (1 / (4 * copies.double())).repeat_interleave(copies))
    points = sphere(200)
    torch.testing.assert_close(mass.density(points.repeat(3, 1), 0.3), mass.density(points, 0.3).repeat(3) / 3)


def test_density_undoes_uneven_sampling():
    points = torch.cat(
        [sphere(6000), torch.nn.functional.normalize(sphere(2000) + torch.tensor([0.0, 0.0, 1.0]), dim=-1)]
    )
    is_upper = points[:, 2] > 0
    assert float(is_upper.double().mean()) > 0.6
    assert float(mass.density(points, 0.1)[is_upper].sum()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("method", ["tiles", "fourier"])
def test_density_by_every_method(method):
    points = sphere(6000).float()
    torch.testing.assert_close(
        mass.density(points, 0.2, method=method), mass.density(points, 0.2, method="exact"), rtol=2e-3, atol=0
    )


def test_density_of_other_kernels():
    similarity = torch.tensor([[1.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(mass.density(MatrixKernel(similarity), num_iter=1), torch.tensor([2.0, 1.0, 4.0]) / 7)
    ring = torch.tensor([[0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 2]])
    torch.testing.assert_close(mass.density(GraphKernel(ring)), torch.full((3,), 1 / 3))
    with pytest.raises(ValueError, match="should have a positive sum; 1 of 2 are 0"):
        mass.density(MatrixKernel([[1.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mass.vertex_areas(CUBE, CUBE_FACES.double()), "`faces` should be integers, .*; got float64"),
        (lambda: mass.vertex_areas(CUBE, CUBE_FACES > 3), "`faces` should be integers, .*; got bool"),
        (lambda: mass.vertex_areas(CUBE, CUBE_FACES[0]), r"`faces` should have shape \(F, 3\).*got \(3,\)"),
        (lambda: mass.vertex_areas(CUBE, CUBE_FACES[:0]), r"with at least one row; got \(0, 3\)"),
        (lambda: mass.vertex_areas(CUBE, CUBE_FACES - 1), "`faces` should index vertices from 0 to 7; got .* from -1"),
        (lambda: mass.vertex_areas(CUBE, CUBE_FACES + 1), "got indices from 1 to 8. They seem to count from 1"),
        (lambda: mass.vertex_areas(CUBE[:, :1], CUBE_FACES), r"\(\*batch, N, 2\) or \(\*batch, N, 3\); got \(8, 1\)"),
        (lambda: mass.vertex_areas(CUBE * torch.nan, CUBE_FACES), "`vertices` should be finite; 24 of its 24"),
        (lambda: mass.vertex_volumes(CUBE[:, :2], [[0, 1, 2, 3]]), r"`vertices` should have shape \(\*batch, N, 3\)"),
        (lambda: mass.vertex_volumes(CUBE, CUBE_FACES), r"`tetrahedra` should have shape \(F, 4\).*got \(12, 3\)"),
        (lambda: mass.density(CUBE), "`sigma` should be given with points"),
        (lambda: mass.density(GaussianKernel(CUBE, 1.0), 1.0), "`sigma` should not be given with a kernel"),
    ],
)  # fmt: skip
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_voxels_of_a_plane_and_of_a_diagonal_stand_for_their_areas():
    """A plane along an axis has one voxel for each square; at 45° it has √2 too few for its area."""
    straight, slanted = torch.zeros(2, 61, 61, 61, dtype=torch.bool)
    straight[:, :, 30] = True
    diagonal = torch.arange(61)
    slanted[diagonal, diagonal] = True
    inner = (slice(20, 41),) * 3
    per_voxel = []
    for mask in (straight, slanted):
        kernel = VoxelKernel(mask, 3.0)
        sums = torch.exp(kernel.attend(torch.zeros(len(kernel.points))).lse)
        masses = mass.voxel_density(mask)
        torch.testing.assert_close(masses * sums, (masses * sums)[:1].expand_as(masses))  # 1 / Σ K up to a factor
        torch.testing.assert_close(masses.sum(), torch.tensor(1.0))
        per_voxel.append(float((1 / kernel.to_grid(sums, fill=torch.inf))[inner].amax()))
    assert per_voxel[1] / per_voxel[0] == pytest.approx(2**0.5, rel=2e-2)


def test_voxel_densities_of_arrays():
    mask = np.zeros((4, 4), dtype=bool)
    mask[1:3, 1] = True
    assert mass.voxel_density(mask).tolist() == [0.5, 0.5]

"""Points and voxels of meshes: positions, uniformity, and equal results for equal seeds."""

import sys

import numpy as np
import pytest
import torch
from cases import slow

from qattn import mass, shapes
from qattn.sampling import in_volume, on_surface, voxelize_solid, voxelize_surface

pytestmark = pytest.mark.usefixtures("_one_thread")

trimesh = pytest.importorskip("trimesh")
pytest.importorskip("rtree")

VERTICES, FACES = shapes.sphere_mesh(3)
BALL = (VERTICES.double(), FACES)
BALL_VOLUME = float(torch.linalg.det(BALL[0][FACES]).sum() / 6)
BOX = trimesh.creation.box(extents=[1.0, 2.0, 3.0])
TORUS = trimesh.creation.torus(major_radius=1.0, minor_radius=0.3, major_sections=96, minor_sections=48)


def both_shells():
    """Return a hollow ball: the outer and the inner sphere in one mesh."""
    return torch.cat([BALL[0], 0.5 * BALL[0]]), torch.cat([FACES, FACES.flip(-1) + len(VERTICES)])


def occupied(voxels, points):
    """Return whether points lie in voxels of the mask."""
    index = np.round((np.asarray(points) - np.asarray(voxels.origin)) / voxels.spacing).astype(int)
    return np.asarray(voxels.mask)[tuple(index.T)]


def torus_distance(points):
    return np.hypot(np.hypot(points[:, 0], points[:, 1]) - 1, points[:, 2]) - 0.3


def test_points_lie_on_their_faces():
    points, face = on_surface(BALL, 2000)
    a, b, c = BALL[0][FACES[face]].unbind(1)
    weights = torch.linalg.solve(torch.stack([a, b, c], dim=-1), points)  # barycentric, as no face meets the origin
    torch.testing.assert_close(weights.sum(-1), torch.ones(2000, dtype=torch.float64))
    assert float(weights.amin()) > -1e-12
    # Uniform in a triangle each of them is 1/3 on average, with variance 1/18.
    assert float((weights.mean(0) - 1 / 3).abs().amax()) < 4 * (1 / 18 / 2000) ** 0.5


def test_faces_are_drawn_by_area():
    vertices = torch.randn(30, 3, dtype=torch.float64)
    faces = torch.randint(30, (40, 3))
    faces[0], faces[17], faces[39] = 3, 5, 7  # without area at both ends and between
    share = torch.stack([mass.vertex_areas(vertices, face[None]).sum() for face in faces])
    share = share / share.sum()
    n = 100_000
    count = torch.bincount(on_surface((vertices, faces), n)[1], minlength=40)
    assert (count[share == 0] == 0).all()
    expected = n * share[share > 0]
    chi_square = float(((count[share > 0] - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.slow
def test_points_of_a_ball():
    points = in_volume(BALL, 20_000)
    assert points.shape == (20_000, 3)
    a, b, c = BALL[0][FACES].unbind(1)
    normal = torch.linalg.cross(b - a, c - a)
    assert float((points @ normal.T - (a * normal).sum(-1)).amax()) < 1e-9  # convex: below the plane of each face
    radius = points.norm(dim=-1)
    assert float((radius < 0.5).double().mean()) == pytest.approx(4 * torch.pi / 3 / 8 / BALL_VOLUME, abs=0.01)
    assert float(points.mean(0).abs().amax()) < 0.02


def test_points_of_a_box():
    points = in_volume(BOX, 20_000)
    assert isinstance(points, np.ndarray)
    assert (np.abs(points) <= np.array([0.5, 1.0, 1.5])).all()
    for axis, size in enumerate((1.0, 2.0, 3.0)):
        count = np.histogram(points[:, axis], bins=20, range=(-size / 2, size / 2))[0]
        assert ((count - 1000) ** 2 / 1000).sum() < 19 + 4 * 38**0.5


@pytest.mark.slow
def test_points_of_a_torus():
    points = in_volume(TORUS, 5000)
    assert torus_distance(points).max() < 0.7 * (1 - np.cos(np.pi / 96))  # chords of the inner ring reach into the hole
    quadrant = np.bincount((points[:, 0] > 0) + 2 * (points[:, 1] > 0), minlength=4)
    assert np.abs(quadrant - 1250).max() < 4 * 1250**0.5


@pytest.mark.parametrize("thickness", [1e-3, 1e-7])
def test_points_of_a_thin_plate(thickness):
    """A plate in a generic orientation, where hardly any point of a cubic cell is inside."""
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    plate = trimesh.creation.box(extents=[1.0, 2.0, 1.0])
    corners, faces = plate.vertices * [1, 1, thickness], plate.faces
    points = in_volume((corners @ turn.T + 5, faces), 2000) - 5
    inside = points @ turn / [0.5, 1.0, 0.5 * thickness]
    assert np.abs(inside).max() <= 1 + 1e-6
    assert np.abs((inside**2).mean(0) - 1 / 3).max() < 4 * (4 / 45 / 2000) ** 0.5
    assert np.abs(inside.mean(0)).max() < 4 * (1 / 3 / 2000) ** 0.5


def test_hollows_are_outside():
    assert float(in_volume(both_shells(), 3000).norm(dim=-1).amin()) > 0.49
    voxels = voxelize_solid(both_shells(), 0.05)
    center = tuple((torch.tensor(voxels.mask.shape) // 2).tolist())
    assert not voxels.mask[center]
    assert voxelize_solid(BALL, 0.05).mask[center]


@pytest.mark.parametrize("scale", [1e-6, slow(1e6)])
def test_scale_does_not_matter(scale):
    small, large = in_volume(BALL, 1000), in_volume((scale * BALL[0] + scale, FACES), 1000)
    torch.testing.assert_close(large / scale - 1, small, rtol=0, atol=1e-6)
    assert torch.equal(voxelize_solid((scale * BALL[0], FACES), 0.1 * scale).mask, voxelize_solid(BALL, 0.1).mask)


@pytest.mark.parametrize("spacing", [slow(0.5), 0.11, slow(0.04)])
@pytest.mark.parametrize("mesh", [BALL, BOX, slow(TORUS)], ids=["ball", "box", "torus"])
def test_voxels_hold_the_samples(mesh, spacing):
    surface, solid = voxelize_surface(mesh, spacing), voxelize_solid(mesh, spacing)
    assert occupied(surface, on_surface(mesh, 100_000)[0]).all()
    assert occupied(solid, in_volume(mesh, 5000)).all()
    assert (np.asarray(solid.mask) >= np.asarray(surface.mask)).all()


def test_voxels_are_those_that_meet():
    """Random triangles of all sizes, against linear programs for the distances of triangles and cubes."""
    from scipy.optimize import linprog

    vertices = torch.rand(12, 3, dtype=torch.float64) * 4
    faces = torch.arange(12).view(4, 3)
    vertices[3:6] *= 0.1
    faces[3, 1] = faces[3, 2]  # a segment
    for face in faces:
        mask, origin, _ = voxelize_surface((vertices, face[None]), 1.0)
        corners = vertices[face].numpy()
        for index in np.ndindex(*mask.shape):
            center = origin.numpy() + index
            # Barycentric weights w with |wᵀ corners − center| ≤ s in each coordinate, s minimal: ½ if they just touch.
            rows = np.block([[corners.T, -np.ones((3, 1))], [-corners.T, -np.ones((3, 1))]])
            least = linprog(
                [0, 0, 0, 1], rows, np.concatenate([center, -center]), [[1, 1, 1, 0]], [1], bounds=[(0, None)] * 4
            ).fun
            assert bool(mask[index]) == (least <= 0.5)


@pytest.mark.slow
def test_volume_and_area_of_voxels_converge():
    errors, counts = [], []
    for spacing in (0.1, 0.05, 0.025):
        errors.append(float(voxelize_solid(BALL, spacing).mask.sum()) * spacing**3 / BALL_VOLUME - 1)
        counts.append(float(voxelize_surface(BALL, spacing).mask.sum()) * spacing**2)
    assert 0 < errors[2] < errors[1] < errors[0]
    assert errors[2] == pytest.approx(errors[0] / 4, rel=0.2)  # first order: half a layer of voxels too many
    assert counts[2] == pytest.approx(counts[1], rel=0.05)


def test_what_touches_counts():
    corners = torch.tensor([[-0.5, -0.5, -0.5], [0.5, -0.5, -0.5], [-0.5, 0.5, -0.5]], dtype=torch.float64)
    voxels = voxelize_surface((corners, [[0, 1, 2]]), 1.0)
    assert voxels.mask.shape == (3, 3, 2)
    assert voxels.origin.tolist() == [-1, -1, -1]
    assert int(voxels.mask.sum()) == 2 * (9 - 1)  # all but the corner that the hypotenuse cuts off
    one = voxelize_solid(BOX, 100.0)
    assert one.mask.shape == (1, 1, 1)
    assert one.mask.all()


def test_grids_fit_one_another():
    a, b = voxelize_surface(BALL, 0.1), voxelize_surface((BALL[0] + 0.3, FACES), 0.1)
    torch.testing.assert_close(b.origin - a.origin, torch.full((3,), 0.3, dtype=torch.float64))
    assert torch.equal(a.mask, b.mask)


@pytest.mark.slow
def test_seeds():
    for draw in (lambda **seed: on_surface(BALL, 100, **seed)[0], lambda **seed: in_volume(BALL, 100, **seed)):
        torch.testing.assert_close(draw(), draw(seed=0), rtol=0, atol=0)
        assert not torch.equal(draw(), draw(seed=1))


def test_what_comes_in_comes_out():
    points, face = on_surface((VERTICES, FACES), 10)
    assert points.dtype == in_volume((VERTICES, FACES), 10).dtype == torch.float32
    assert face.dtype == torch.int64
    voxels = voxelize_solid((VERTICES, FACES), 0.2)
    assert voxels.mask.dtype == torch.bool
    assert voxels.origin.dtype == torch.float32
    assert voxels.spacing == 0.2
    for mesh in (BOX, (VERTICES.numpy(), FACES.numpy())):
        results = [*on_surface(mesh, 10), in_volume(mesh, 10), *voxelize_surface(mesh, 0.5)[:2]]
        assert all(isinstance(array, np.ndarray) for array in results)
    assert in_volume((VERTICES.numpy(), FACES.tolist()), 10).dtype == np.float32
    with_grad = VERTICES.clone().requires_grad_()
    assert not in_volume((with_grad, FACES), 10).requires_grad


def test_seams_are_closed():
    """Vertices that are listed once per face, as at texture seams."""
    soup = (BALL[0][FACES].reshape(-1, 3), torch.arange(FACES.numel()).view(-1, 3))
    torch.testing.assert_close(in_volume(soup, 100), in_volume(BALL, 100))


@pytest.mark.slow
def test_vertices_without_a_face_do_not_matter():
    stray = (torch.cat([BALL[0], torch.full((1, 3), 1e4, dtype=torch.float64)]), FACES)
    assert torch.equal(voxelize_solid(stray, 0.1).mask, voxelize_solid(BALL, 0.1).mask)
    torch.testing.assert_close(in_volume(stray, 100), in_volume(BALL, 100))


FLAT = (torch.rand(3, 3), torch.tensor([[0, 1, 2], [0, 2, 1]]))  # closed, without volume


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: in_volume((VERTICES, FACES[1:]), 10), "The mesh should be closed.*fill_holes"),
        (lambda: voxelize_solid((VERTICES, FACES[1:]), 0.1), "The mesh should be closed"),
        (lambda: in_volume(FLAT, 10), "The mesh contains no volume"),
        (lambda: in_volume((torch.ones(3, 3), FLAT[1]), 10), "The mesh should be closed"),
        (lambda: on_surface((torch.ones(3, 3), FLAT[1]), 10), "The mesh has no area"),
        (lambda: on_surface(BALL, 0), "`num_points` should be an integer of at least 1; got 0"),
        (lambda: in_volume(BALL, -1), "`num_points` should be an integer of at least 1; got -1"),
        (lambda: voxelize_surface(BALL, 0.0), "`spacing` should be positive and finite; got 0.0"),
        (lambda: voxelize_solid(BALL, -1.0), "`spacing` should be positive and finite; got -1.0"),
        (lambda: voxelize_surface(BALL, 1e-4), "a grid of 20,001 × 20,001 × 20,001 voxels. .*31 times as large"),
        (lambda: on_surface((VERTICES, FACES[:0]), 10), "`faces` should have shape .* at least one row"),
        (lambda: on_surface((VERTICES[:0], FACES), 10), "`vertices` should hold at least one point"),
        (lambda: on_surface((VERTICES[:, :2], FACES), 10), r"`vertices` should have shape \(\*batch, N, 3\)"),
        (lambda: on_surface((VERTICES[None], FACES), 10), r"`vertices` should have shape \(N, d\), one cloud"),
        (lambda: on_surface((VERTICES * torch.nan, FACES), 10), "`vertices` should be finite"),
        (lambda: on_surface((VERTICES, FACES + 1), 10), "`faces` should index vertices from 0"),
    ],
)  # fmt: skip
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_no_mesh_at_all():
    with pytest.raises(TypeError, match=r"`mesh` should be a pair .*; got str\. Read a file with `trimesh.load_mesh`"):
        on_surface("creature.off", 10)


def test_without_trimesh(monkeypatch):
    for name in ("trimesh", "rtree"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            assert len(on_surface(BALL, 10)[0]) == 10
            assert voxelize_surface(BALL, 0.5).mask.any()
            remedy = f"The inside of a mesh needs {name}. Install it with `pip install 'qattn-diffusion\\[io\\]'`"
            with pytest.raises(ModuleNotFoundError, match=remedy):
                in_volume(BALL, 10)

"""Generated shapes: points lie on them, meshes are closed and oriented, equal seeds give equal shapes."""

import math

import pytest
import torch

from qattn import shapes


def test_the_creature():
    points, normals = shapes.creature(3000)
    assert points.shape == normals.shape == (3000, 3)
    assert float(shapes.creature_distance(points).abs().amax()) < 1e-3
    torch.testing.assert_close(normals.norm(dim=-1), torch.ones(3000))
    assert (shapes.creature_distance(points + 0.01 * normals) > 0).all()
    inside = shapes.creature_inside(3000)
    assert inside.shape == (3000, 3)
    assert (shapes.creature_distance(inside) < 0).all()
    # Uniform: the share of the volume in any half is that of the points, up to four deviations.
    box = torch.rand(200_000, 3) * torch.tensor([2.2, 1.7, 0.8]) - torch.tensor([1.1, 0.8, 0.4])
    volume = box[shapes.creature_distance(box) < 0]
    for axis in range(3):
        assert float((inside[:, axis] > 0).float().mean()) == pytest.approx(
            float((volume[:, axis] > 0).float().mean()), abs=4 * math.sqrt(0.25 / 3000 + 0.25 / len(volume))
        )


def test_distance_takes_a_grid():
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(x, x, x, indexing="ij"), dim=-1)
    distance = shapes.creature_distance(grid)
    torch.testing.assert_close(distance.reshape(-1), shapes.creature_distance(grid.reshape(-1, 3)))
    assert distance.dtype == torch.float64


def test_spheres_and_balls():
    for dims in (2, 3, 5):
        torch.testing.assert_close(shapes.sphere(500, dims).norm(dim=-1), torch.ones(500))
    points = shapes.ball(20_000, dtype=torch.float64)
    assert points.dtype == torch.float64
    radius = points.norm(dim=-1)
    assert float(radius.amax()) <= 1
    assert float((radius < 0.5).double().mean()) == pytest.approx(1 / 8, abs=0.01)


def _creature(n, seed=0):
    return shapes.creature(n, seed)[0]


@pytest.mark.parametrize("shape", [shapes.sphere, shapes.ball, shapes.creature_inside, _creature])
def test_seeds(shape):
    state = torch.get_rng_state()
    first = shape(50)
    torch.testing.assert_close(shape(50, seed=0), first, rtol=0, atol=0)
    assert not torch.equal(shape(50, seed=1), first)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is unchanged


def test_without_a_seed_draws_differ():
    for shape in (shapes.sphere, shapes.ball):
        assert not torch.equal(shape(50, seed=None), shape(50, seed=None))


@pytest.mark.parametrize("subdivisions", [0, 1, 3])
def test_sphere_mesh(subdivisions):
    vertices, faces = shapes.sphere_mesh(subdivisions)
    assert vertices.shape == (10 * 4**subdivisions + 2, 3)
    assert faces.shape == (20 * 4**subdivisions, 3)
    torch.testing.assert_close(vertices.norm(dim=-1), torch.ones(len(vertices)))
    assert (torch.linalg.det(vertices[faces]) > 0).all()  # counterclockwise from outside
    edges = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    assert len(edges.unique(dim=0)) == len(edges)  # each edge once in each direction: closed
    assert torch.equal(edges.unique(dim=0), edges.flip(-1).unique(dim=0))


@pytest.mark.parametrize("k", [1, 3])
def test_cube_tetrahedra(k):
    vertices, tetrahedra = shapes.cube_tetrahedra(k)
    assert vertices.shape == ((k + 1) ** 3, 3)
    assert tetrahedra.shape == (6 * k**3, 4)
    corners = vertices.double()[tetrahedra]
    volumes = torch.linalg.det(corners[:, 1:] - corners[:, :1]) / 6
    torch.testing.assert_close(volumes, torch.full_like(volumes, 1 / (6 * k**3)), rtol=1e-6, atol=0)
    # Each triangle belongs to two tetrahedra, or lies on the boundary of the cube.
    sides = torch.cat([tetrahedra[:, [i for i in range(4) if i != j]] for j in range(4)]).sort(dim=-1).values
    sides, count = sides.unique(dim=0, return_counts=True)
    assert count.max() == 2
    assert (count == 1).sum() == 12 * k**2
    outer = vertices[sides[count == 1]]
    assert ((outer == 0).all(1) | (outer == 1).all(1)).any(-1).all()


def test_wrong_input():
    for call in (shapes.creature, shapes.creature_inside, shapes.sphere, shapes.ball):
        with pytest.raises(ValueError, match="`num_points` should be an integer of at least 1; got 0"):
            call(0)
    with pytest.raises(ValueError, match="`num_subdivisions` should be an integer of at least 0; got -1"):
        shapes.sphere_mesh(-1)
    with pytest.raises(ValueError, match="`num_cells` should be an integer of at least 1; got 0"):
        shapes.cube_tetrahedra(0)


def test_the_creature_without_gradients():
    with torch.no_grad():
        points, normals = shapes.creature(500)
    expected = shapes.creature(500)
    assert torch.equal(points, expected[0])
    assert torch.equal(normals, expected[1])
    assert not normals.requires_grad


def test_parts_of_the_creature():
    points, _ = shapes.creature(2000)
    parts = shapes.creature_parts(points)
    assert set(parts.tolist()) == set(range(len(shapes.CREATURE_PARTS)))
    highest = points[parts == shapes.CREATURE_PARTS.index("ear"), 1].amin()
    lowest = points[parts == shapes.CREATURE_PARTS.index("hind leg"), 1].amax()
    assert highest > lowest


def test_poses():
    """The body is fixed, limbs rotate rigidly, and nothing moves without a bend."""
    points, _ = shapes.creature(2000)
    torch.testing.assert_close(shapes.posed(points, 3, bend=0.0), points)
    moved = shapes.posed(points, 3)
    assert torch.equal(moved, shapes.posed(points, 3))
    assert not torch.equal(moved, shapes.posed(points, 4))
    parts = shapes.creature_parts(points)
    away = (moved - points).norm(dim=-1)
    assert away[(parts == 0) & (points[:, 0].abs() < 0.1)].amax() < 5e-3
    assert away[parts == shapes.CREATURE_PARTS.index("tail")].amax() > 0.1
    foot = points[:, 1] < -0.5
    foot &= points[:, 0] > 0
    foot &= points[:, 2] > 0  # one leg
    torch.testing.assert_close(torch.pdist(moved[foot]), torch.pdist(points[foot]), rtol=0, atol=2e-3)
    wider = torch.pdist(shapes.posed(points, 3, stretch=0.3)[foot]) / torch.pdist(points[foot])
    torch.testing.assert_close(wider, wider.mean().expand_as(wider), rtol=2e-2, atol=0)
    assert abs(float(wider.mean()) - 1) > 0.01


def test_poses_of_wrong_points():
    with pytest.raises(ValueError, match="points"):
        shapes.posed(torch.rand(10, 2), 0)
    with pytest.raises(ValueError, match="bend"):
        shapes.posed(torch.rand(10, 3), 0, bend=-1.0)

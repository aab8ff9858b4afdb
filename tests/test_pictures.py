"""Pictures: nearer points hide farther ones, and colors are valid for any signal."""

import sys

import pytest
import torch

from qattn import pictures, shapes


def test_what_is_in_front_is_seen():
    view = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.55, 0.55, 0.5], [0.55, 0.55, -0.5]])
    camera = pictures.camera_view(torch.eye(3), torch.eye(3))[0]
    normals = torch.tensor([0.0, 0.0, 1.0]).expand(4, 3)
    colors = torch.eye(3)[[0, 0, 1, 2]]
    image = pictures.render(view @ camera.T, normals @ camera.T, colors, width=12)
    visible = {tuple((color > 0.1).int().tolist()) for color in image.reshape(-1, 3)}
    assert visible == {(1, 1, 1), (1, 0, 0), (0, 1, 0)}  # the background, two corners, and the nearer of the others


def test_the_nearest_triangle_is_drawn_last_and_light_falls_on_it():
    camera = pictures.camera_view(torch.eye(3), torch.eye(3))[0]
    corner = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    view = torch.cat([corner + torch.tensor([0.0, 0.0, depth]) for depth in (1.0, -1.0)])
    faces = torch.tensor([[0, 1, 2], [3, 5, 4]])  # the first in front, facing the viewer; the second facing away
    axis = pictures.figure(1, 1).subplots()
    pictures.draw_mesh(axis, view @ camera.T, faces, torch.eye(3)[:2], title="two")
    (drawn,) = axis.collections
    colors = torch.from_numpy(drawn.get_facecolors()[:, :3])
    assert (colors > 0.1).int().tolist() == [[0, 1, 0], [1, 0, 0]]
    assert colors[1].max() > 1.5 * colors[0].max()
    torch.testing.assert_close(torch.from_numpy(drawn.get_paths()[1].vertices[:3]), corner[:, :2].double())


def test_colors_are_colors_whatever_the_signal():
    for values in (torch.randn(500), torch.zeros(500), torch.ones(1)):
        assert ((pictures.signed(values) >= 0) & (pictures.signed(values) <= 1)).all()
    density = torch.linspace(-1e-3, 1, 500)  # FFTs leave values slightly below 0
    assert ((pictures.heat(density) >= 0) & (pictures.heat(density) <= 1)).all()
    red, blue = pictures.signed(torch.tensor([1.0, -1.0]))
    assert red[0] > 2 * red[2]
    assert blue[2] > 2 * blue[0]


def test_normals_of_a_sphere_are_found():
    points = shapes.sphere(5000)
    normals = pictures.facing_normals(points)
    front = points[:, 2] > 0.2
    assert (normals[front] * points[front]).sum(-1).median() > 0.99
    assert (normals[:, 2] >= 0).all()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="Pictures need matplotlib"):
        pictures.figure(1, 1)

"""The pipeline of examples/paper/matching.py: losses against plain references, data as files have them, and training
that goes on where it was."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import qattn
from qattn.maps import fit_functional_map, functional_map, point_map, zoomout

FOLDER = Path(qattn.__file__).parent.parent / "examples"

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def module(monkeypatch):
    pytest.importorskip("trimesh")
    for folder in (FOLDER, FOLDER / "paper"):
        monkeypatch.syspath_prepend(str(folder))
    yield lambda name: importlib.import_module(f"matching_{name}")
    for name in [name for name in sys.modules if name.startswith("matching_")]:
        del sys.modules[name]


@pytest.fixture
def sphere():
    vertices, faces = (x.numpy() for x in qattn.shapes.sphere_mesh(3))
    return vertices.astype(np.float64) * [1.0, 1.3, 0.8], faces


def spectrum_of(num_points, k, seed):
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(num_points, generator=generator, dtype=torch.float64) + 0.5
    mass = mass / mass.sum()
    vectors = torch.linalg.qr(mass.sqrt()[:, None] * torch.randn(num_points, k, generator=generator).double())[0]
    values = torch.rand(k, generator=generator).double().sort(descending=True).values
    return qattn.Spectrum(values, vectors / mass.sqrt()[:, None], torch.zeros(k), mass, 0.1)


def test_maps_are_those_of_the_library(module):
    losses = module("losses")
    s, t = spectrum_of(60, 10, 0), spectrum_of(70, 10, 1)
    f, g = torch.randn(60, 30).double(), torch.randn(70, 30).double()
    A, B = s.project(f), t.project(g)
    C = losses.fitted_maps(A, B, s.frequencies, t.frequencies, weight=3.0)
    relative = 3.0 * len(A) / float(A.square().sum())  # the library's weight is in units of the features
    torch.testing.assert_close(C, fit_functional_map(s, t, f, g, weight=relative), rtol=1e-4, atol=1e-5)


def test_gradients_of_row_solves(module):
    losses = module("losses")
    A = torch.randn(2, 4, 9).double().requires_grad_()
    penalty, right = torch.rand(2, 3, 4).double() + 0.1, torch.randn(2, 3, 4).double().requires_grad_()

    def solve(A, right):
        return losses.RowSolve.apply(A @ A.mT, penalty, right)

    dense = torch.stack([torch.linalg.inv(A @ A.mT + torch.diag_embed(penalty[:, i])) for i in range(3)], 1)
    torch.testing.assert_close(solve(A, right), (dense @ right[..., None])[..., 0])
    assert torch.autograd.gradcheck(solve, (A, right))


def test_losses_vanish_for_a_shape_and_its_copy(module):
    losses = module("losses")
    same = spectrum_of(40, 8, 0)
    features = torch.randn(40, 200).double().expand(2, 1, 40, 200)
    projections = (same.vectors.T * same.mass).expand(2, 1, 8, 40)
    C = losses.maps(features, projections, same.frequencies.expand(2, 1, 8))
    three = losses.losses(C, losses.soft_maps(features, same.vectors.expand(2, 1, 40, 8), projections))
    assert three.max() < 1e-2  # random features in 200 dimensions are nearly orthogonal
    other = losses.maps(torch.stack([features[0], features[0].flip(1)]), projections, same.frequencies.expand(2, 1, 8))
    assert losses.losses(other, torch.zeros_like(other))[0] > 1


def test_folders_and_npz_files_give_the_same_shapes(module, sphere, tmp_path):
    data, (vertices, faces) = module("data"), sphere
    generator, arrays = np.random.default_rng(0), {"names": list("abc"), "split": ["train", "test", "test"]}
    (tmp_path / "off").mkdir()
    (tmp_path / "corres").mkdir()
    for name in "abc":
        order = generator.permutation(len(vertices))
        rank = np.argsort(order)
        arrays |= {f"{name}.v": vertices[order], f"{name}.f": rank[faces]}
        arrays |= {f"{name}.vts": rank, f"{name}.sym.vts": rank[::-1]}
        lines = ["OFF", f"{len(vertices)} {len(faces)} 0"]
        lines += [" ".join(map(repr, map(float, x))) for x in vertices[order]]
        lines += [f"3 {a} {b} {c}" for a, b, c in rank[faces]]
        (tmp_path / "off" / f"{name}.off").write_text("\n".join(lines))
        np.savetxt(tmp_path / "corres" / f"{name}.vts", rank + 1, fmt="%d")
        np.savetxt(tmp_path / "corres" / f"{name}.sym.vts", rank[::-1] + 1, fmt="%d")
    np.savez(tmp_path / "shapes.npz", **arrays)
    of_file = data.load("smal", tmp_path / "shapes.npz")
    assert [len(of_file.train), len(of_file.test)] == [1, 2]
    with pytest.raises(SystemExit, match="has no split"):
        data.load("smal", tmp_path)
    data.TRAINING["three"] = 1
    of_folder = data.load("three", tmp_path)
    for one, other in zip(of_file.train + of_file.test, of_folder.train + of_folder.test, strict=True):
        assert one.name == other.name
        np.testing.assert_allclose(one.points, other.points, atol=1e-6)
        for field in ("faces", "places", "truth", "mirrored"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        np.testing.assert_allclose(one.vertices[one.truth], vertices)


def test_common_numbering_is_not_given_away(module, sphere, tmp_path):
    data, (vertices, faces) = module("data"), sphere
    data.VERTICES = 200
    np.savez(tmp_path / "s.npz", names=["a", "b", "c"], vertices=np.stack(3 * [vertices]), faces=np.stack(3 * [faces]))
    data.TRAINING["scape"] = 1
    shapes = data.load("scape", tmp_path / "s.npz")
    one, other = shapes.test
    assert len(one.points) == 200
    assert len(np.intersect1d(one.nearest_vertex, other.nearest_vertex)) < 150
    np.testing.assert_array_equal(one.exact, other.exact)
    np.testing.assert_array_equal(one.truth, one.nearest_vertex[one.places])  # so that a map can be perfect
    gaps = np.linalg.norm(one.vertices[one.truth] - one.vertices[one.exact], axis=1)
    assert 0 < gaps.max() < 0.4  # the nearest point of the sample, not any
    np.testing.assert_array_equal(data.resampled(one, 100, 0).truth, one.exact)


@pytest.mark.parametrize("name", ["scape", "faust"])
def test_registered_scape_is_turned_to_stand(module, tmp_path, name):
    """The height of SCAPE is along x, and it looks along −y."""
    data = module("data")
    box = qattn.shapes.sphere_mesh(2)
    vertices, faces = box[0].double().numpy() * [3.0, 0.5, 1.0], box[1].numpy()
    np.savez(tmp_path / "s.npz", names=["a", "b", "c"], vertices=np.stack(3 * [vertices]), faces=np.stack(3 * [faces]))
    data.TRAINING[name] = 1
    for shape in data.load(name, tmp_path / "s.npz").train:
        up, ahead = ([0, 1, 0], [0, 0, 1]) if name == "scape" else ([1, 0, 0], [0, -1, 0])
        np.testing.assert_allclose(shape.vertices @ np.transpose([up, ahead]), vertices @ [[1, 0], [0, -1], [0, 0]])
        volumes = [np.linalg.det(x[faces]).sum() for x in (shape.vertices, vertices)]
        np.testing.assert_allclose(*volumes)  # no mirror image
        in_order = shape.vertices[shape.nearest_vertex]
        np.testing.assert_allclose(shape.points, data.normalized(in_order), atol=1e-12)


def test_errors_of_truth_and_mirror(module, sphere, tmp_path):
    pytest.importorskip("potpourri3d")
    data, spectra, evaluation = module("data"), module("spectra"), module("evaluation")
    vertices, faces = sphere
    reflected = np.abs(vertices[:, None] * [-1, 1, 1] - vertices[None]).sum(-1).argmin(1)
    places = np.arange(0, len(vertices), 7)
    shape = data.meshed("a", vertices, faces, places, reflected[places])
    ruler = evaluation.Ruler(shape, spectra.Cache(tmp_path))
    assert ruler.errors(places)[0].max() == 0
    errors, up_to_mirror = ruler.errors(reflected[places])
    assert errors.max() > 50
    assert up_to_mirror.max() == 0
    # On a round sphere the distance of opposite points is π r, over √(4π) r.
    ball = data.meshed("b", vertices / [1.0, 1.3, 0.8], faces, places)
    antipode = np.abs(-ball.vertices[:, None] - ball.vertices[None]).sum(-1).argmin(1)
    error = evaluation.Ruler(ball, spectra.Cache(tmp_path)).errors(antipode[places])[0]
    np.testing.assert_allclose(error, 100 * np.pi / np.sqrt(4 * np.pi), rtol=0.03)


def test_distances_where_fans_of_faces_meet(module, tmp_path):
    """A strip that is bent to a cylinder, and joined at one vertex alone: distances are those along the strip."""
    pytest.importorskip("potpourri3d")
    data, spectra = module("data"), module("spectra")
    x, z = (grid.ravel() for grid in np.meshgrid(np.linspace(0, 2 * np.pi, 65), np.linspace(0, 0.8, 9), indexing="ij"))
    vertices = np.stack([np.cos(x), np.sin(x), z], 1)
    corner = (9 * np.arange(64)[:, None] + np.arange(8)).ravel()
    faces = np.concatenate([corner[:, None] + quad for quad in ([0, 9, 10], [0, 10, 1])])
    owner, same = spectra.unpinched(faces)
    np.testing.assert_array_equal(owner[same], faces)
    assert len(owner) == len(vertices)  # nothing to copy
    first, last = 4, 9 * 64 + 4  # in the middle of both ends
    pinched = np.where(faces == last, first, faces)
    owner, split = spectra.unpinched(pinched)
    np.testing.assert_array_equal(owner[split], pinched)
    np.testing.assert_array_equal(np.flatnonzero(np.bincount(owner) != 1), [first, last])  # the latter is used no more
    kept = np.delete(np.arange(len(vertices)), last)
    rank = np.searchsorted(kept, np.arange(len(vertices)))
    shape = data.meshed("a", vertices[kept], rank[pinched], np.array([first, 9 * 16]))
    _, (from_pinch, from_side) = spectra.geodesics(shape, spectra.Cache(tmp_path))
    x, z = x[kept], z[kept]
    expected = np.hypot(np.minimum(x, 2 * np.pi - x), z - 0.4)
    np.testing.assert_allclose(from_pinch * shape.area**0.5, expected, rtol=0.03, atol=0.06)
    expected = np.hypot(x - np.pi / 2, z)
    expected[first] = np.hypot(np.pi / 2, 0.4)
    np.testing.assert_allclose(from_side * shape.area**0.5, expected, rtol=0.03, atol=0.06)


def test_point_maps_are_those_of_the_library(module):
    """Point maps at places alone, by least squares, which for orthonormal vectors is the projection."""
    evaluation, samples, k = module("evaluation"), module("samples"), 40
    source, target = spectrum_of(90, k, 0), spectrum_of(80, k, 1)
    generator = torch.Generator().manual_seed(2)
    features = [torch.nn.functional.normalize(torch.randn(n, 9, generator=generator).double()) for n in (90, 80)]
    places = np.array([3, 70, 3, 11])
    shapes = [SimpleNamespace(spectrum=each, shape=SimpleNamespace(places=places)) for each in (source, target)]
    projection = samples.least_squares(target.vectors, target.mass).double()
    torch.testing.assert_close(projection, target.vectors.T * target.mass, rtol=0, atol=1e-6)
    maps = evaluation.point_maps(*shapes, features, projection, True)
    near = (features[1] @ features[0].T).argmax(1)
    C = functional_map(source, target, near)
    refined = zoomout(source, target, near, start=20, stop=k, step=20)[1]
    expected = near, point_map(source, target, C), refined
    for found, index in zip(maps.values(), expected, strict=True):
        assert torch.equal(found, index[places])


def test_normals_are_outward_where_sheets_touch(module, sphere):
    """An arm touches a body, where `qattn.normals` has the wrong signs at a quarter of the points."""
    spectra, (vertices, faces) = module("spectra"), sphere
    points, expected = [], []
    for count, radii, middle in ((1500, [1.0, 2.6, 0.8], 0), (500, [0.2, 1.3, 0.3], [1.2, 0, 0])):
        drawn, _ = qattn.sampling.on_surface((vertices / [1.0, 1.3, 0.8] * radii, faces), count, 0)
        points.append(drawn + middle)
        expected.append(drawn / np.square(radii))
    found = spectra.outward(np.concatenate(points))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)
    assert ((found * np.concatenate(expected)).sum(1) < 0).mean() < 0.04


def test_frames_are_oriented_and_projections_exact(module, sphere, tmp_path):
    data, samples, spectra = module("data"), module("samples"), module("spectra")
    vertices, faces = sphere
    shape = data.meshed("a", vertices, faces, np.arange(len(vertices)))
    cache = spectra.Cache(tmp_path)
    for variant in ("mesh", "qfm"):
        prepared = samples.prepared(shape, variant, 12, False, cache)
        sample = samples.sampled(prepared, np.random.default_rng(0).permutation(len(vertices))[:300], 12)
        points = prepared.points[sample.index]
        across, up = (gradient @ points for gradient in sample.gradients)
        assert ((torch.linalg.cross(across, up) * points).sum(1) > 0).all()  # outward, on a convex shape
        torch.testing.assert_close(
            sample.projection @ prepared.spectrum.vectors[sample.index, :12], torch.eye(12), rtol=0, atol=1e-4
        )
        torch.testing.assert_close(sample.mass.sum(), prepared.mass.sum())


@pytest.mark.parametrize("kind", ["vertical", "any"])
def test_features_do_not_depend_on_rotations_unless_coordinates_are_given(module, sphere, tmp_path, kind):
    data, samples, spectra, networks = (module(name) for name in ("data", "samples", "spectra", "networks"))
    vertices, faces = sphere
    shape, cache = data.meshed("a", vertices, faces, np.arange(len(vertices))), spectra.Cache(tmp_path)
    R = samples.random_rotations(2, kind, torch.Generator().manual_seed(0))
    torch.testing.assert_close(R @ R.mT, torch.eye(3).expand(2, 3, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.linalg.det(R), torch.ones(2))
    assert (R[:, 1, 1] == 1).all() == (kind == "vertical")
    for variant, is_invariant in (("mesh", True), ("xyz", False)):
        prepared = samples.prepared(shape, variant, 12, False, cache)
        index = np.random.default_rng(0).permutation(len(vertices))[:100]
        sample = samples.sampled(prepared, index, 8)
        torch.manual_seed(0)
        network = networks.QNetwork(prepared.inputs.shape[1], "tiny")
        with torch.no_grad():
            as_it_is, turned = (network(samples.batched(2 * [sample], 8, rotations)) for rotations in (None, R))
        size = float(as_it_is.abs().max())
        assert torch.allclose(as_it_is, turned, rtol=0, atol=1e-3 * size) == is_invariant


def test_other_samples_of_a_surface(module, sphere):
    data, spectra = module("data"), module("spectra")
    vertices, faces = sphere
    shape = data.meshed("a", vertices, faces, np.arange(0, len(vertices), 5))
    even, uneven = (data.resampled(shape, 1500, 3, is_uneven) for is_uneven in (False, True))
    for other in (even, uneven):
        assert other.points.shape == (1500, 3)
        nearest = vertices[other.nearest_vertex[other.places]]
        assert np.linalg.norm(nearest - vertices[shape.truth], axis=1).mean() < 0.15
        np.testing.assert_allclose(data.local_areas(other.points).sum(), 1)
    sizes = [np.quantile(data.local_areas(other.points), [0.1, 0.9]) for other in (even, uneven)]
    assert sizes[0][1] < 4 * sizes[0][0]
    assert sizes[1][1] > 5 * sizes[1][0]
    assert spectra.spacing(uneven.points) > 1.2 * spectra.spacing(even.points)


def test_coordinates_are_augmented(module):
    samples = module("samples")
    points = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]).repeat(1, 500, 1).expand(4, -1, -1)
    found = samples.augmented(points, torch.Generator().manual_seed(0)) / points  # (4, 1000, 3)
    assert (found - 1).abs().max() < 0.1 + 0.05
    centers = found.mean(1)  # one factor for each cloud and axis
    assert centers.std() > 0.03
    np.testing.assert_allclose((found - centers[:, None]).std((0, 1)) * torch.tensor([1.0, 2.0, 3.0]), 0.01, rtol=0.05)


def test_rows_are_kept_if_their_settings_are_the_same(module, tmp_path):
    import matching

    record = matching.Record(tmp_path / "r.json")
    record.row("q", {"steps": 3, "shapes": {"faust": 80}})["seconds"] = 1.5
    record.save()
    again = matching.Record(tmp_path / "r.json")
    assert again.row("q", {"steps": 3, "shapes": {"faust": 80}})["seconds"] == 1.5
    assert "seconds" not in again.row("q", {"steps": 4, "shapes": {"faust": 80}})


@pytest.mark.slow
def test_training_goes_on_where_it_was(module, tmp_path):
    """Every parameter, the curve and the next random numbers are those of a training that was not interrupted."""
    data, samples, spectra, training = (module(name) for name in ("data", "samples", "spectra", "training"))
    networks = module("networks")
    cache = spectra.Cache(tmp_path / "cache")
    shapes = data.generated(2, 0, 150).train
    prepared = [samples.prepared(shape, "qfm", 12, False, cache) for shape in shapes]

    def start(path, variant="qfm"):
        torch.manual_seed(0)
        network = networks.QNetwork(prepared[0].inputs.shape[1], "tiny")
        sampler = samples.Sampler([prepared], 100, 10, "any")
        return training.Training(network, sampler, 1e-3, 2, 0, path, {"variant": variant})

    whole = start(tmp_path / "whole.pt")
    before = whole.network.network.first.weight.detach().clone()
    whole.run(training.Budget(steps=4), 1e9)

    class InterruptedError(Exception):
        pass

    def interrupt(after):
        def check(part):
            if part.step == after:
                raise InterruptedError

        return check

    first = start(tmp_path / "part.pt")
    first.record_every = 1
    with pytest.raises(InterruptedError):
        first.run(training.Budget(steps=4), 0.0, interrupt(3))  # the checkpoint is that of step 2
    with pytest.raises(SystemExit, match="variant was qfm, not mesh"):
        start(tmp_path / "part.pt", "mesh")
    second = start(tmp_path / "part.pt")
    assert second.step == 2
    assert 0 < second.wall < 60
    second.run(training.Budget(steps=4), 1e9)
    assert second.step == whole.step == 4
    for name, parameter in whole.network.state_dict().items():
        torch.testing.assert_close(second.network.state_dict()[name], parameter, rtol=0, atol=0)
    assert torch.equal(second.generator.get_state(), whole.generator.get_state())
    assert not torch.equal(before, whole.network.network.first.weight)

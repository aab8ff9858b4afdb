"""The pipeline of examples/paper/matching.py: losses against plain references, data as files have them, and training
that goes on where it was."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qattn
from qattn.maps import fit_functional_map

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
    np.testing.assert_array_equal(one.truth, other.truth)
    gaps = np.linalg.norm(vertices[one.nearest_vertex[one.places]] - vertices[one.truth], axis=1)
    assert gaps.max() < 0.4  # the nearest point of the sample, not any


def test_errors_of_truth_and_mirror(module, sphere, tmp_path):
    pytest.importorskip("potpourri3d")
    data, spectra, evaluation = module("data"), module("spectra"), module("evaluation")
    vertices, faces = sphere
    reflected = np.abs(vertices[:, None] * [-1, 1, 1] - vertices[None]).sum(-1).argmin(1)
    places = np.arange(0, len(vertices), 7)
    shape = data.meshed("a", vertices, faces, places, reflected[places])
    ruler = evaluation.Ruler(shape, spectra.Cache(tmp_path))
    same, mirror = np.arange(len(vertices)), reflected
    assert ruler.errors(shape, same)[0].max() == 0
    errors, up_to_mirror = ruler.errors(shape, mirror)
    assert errors.max() > 50
    assert up_to_mirror.max() == 0
    # On a round sphere the distance of opposite points is π r, over √(4π) r.
    ball = data.meshed("b", vertices / [1.0, 1.3, 0.8], faces, places)
    antipode = np.abs(-ball.vertices[:, None] - ball.vertices[None]).sum(-1).argmin(1)
    error = evaluation.Ruler(ball, spectra.Cache(tmp_path)).errors(ball, antipode)[0]
    np.testing.assert_allclose(error, 100 * np.pi / np.sqrt(4 * np.pi), rtol=0.03)


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
        means = (sample.mass[:, None] * as_it_is).sum(1) / sample.mass.sum()
        assert means.abs().max() < 1e-5 * size  # features are centered


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


@pytest.mark.slow
def test_training_goes_on_where_it_was(module, tmp_path):
    """Every parameter, the curve and the next random numbers are those of a training that was not interrupted."""
    data, samples, spectra, training = (module(name) for name in ("data", "samples", "spectra", "training"))
    networks = module("networks")
    cache = spectra.Cache(tmp_path / "cache")
    shapes = data.generated(2, 0, 150).train
    prepared = [samples.prepared(shape, "qfm", 12, False, cache) for shape in shapes]

    def start(path):
        torch.manual_seed(0)
        network = networks.QNetwork(prepared[0].inputs.shape[1], "tiny")
        return training.Training(network, samples.Sampler([prepared], 100, 10, 2, "any"), 1e-3, 2, 0, path)

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
    second = start(tmp_path / "part.pt")
    assert second.step == 2
    second.run(training.Budget(steps=4), 1e9)
    assert second.step == whole.step == 4
    for name, parameter in whole.network.state_dict().items():
        torch.testing.assert_close(second.network.state_dict()[name], parameter, rtol=0, atol=0)
    assert torch.equal(second.generator.get_state(), whole.generator.get_state())
    assert not torch.equal(before, whole.network.network.first.weight)

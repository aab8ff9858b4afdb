"""The pieces of examples/real_data.py: data as files have them, neighbors, peers against plain formulas, scores, and
training that goes on where it was."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qattn

FOLDER = Path(qattn.__file__).parent.parent / "examples"

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def module(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: importlib.import_module(f"real_data_{name}")
    for name in [name for name in sys.modules if name.startswith("real_data_")]:
        del sys.modules[name]


@pytest.fixture
def files(tmp_path):
    """Files of the three data sets, in small."""
    rng = np.random.default_rng(0)
    split = np.array(["train", "train", "test"])
    points = rng.normal(size=(3, 200, 3)).astype(np.float32)
    np.savez(
        tmp_path / "rna.npz", points=33 * points + 7, labels=rng.integers(-1, 6, (3, 200)).astype(np.int16), split=split
    )
    kinds = np.array(["Cup", "Fish", "Fish"])
    labels = np.stack([rng.permutation(np.arange(200) % size) for size in (2, 3, 3)]).astype(np.int8)
    np.savez(tmp_path / "psb.npz", points=points, labels=labels, split=split, classes=kinds)
    for name in "ab":
        xyz = (60 * rng.random((5000, 3)) * [1, 1, 0.2]).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", xyz=xyz, label=rng.choice([0, 2, 5, 6, 17], 5000).astype(np.uint8))
    return tmp_path


def test_data_sets(module, files):
    sets = module("sets")
    rna = sets.load("rna", [files / "rna.npz"])
    assert [len(rna.train), len(rna.test), rna.num_classes] == [2, 1, 6]
    assert rna.train[0].points.mean(0).abs().max() < 1e-5
    assert 1 < rna.train[0].points.square().sum(-1).mean() < 5
    assert rna.train[0].labels.min() == -1

    psb = sets.load("psb", [files / "psb.npz"])
    assert psb.kinds == ((0, 2), (2, 5))
    assert [cloud.kind for cloud in [*psb.train, *psb.test]] == [0, 1, 1]
    assert [cloud.labels.unique().tolist() for cloud in psb.train] == [[0, 1], [2, 3, 4]]

    lidar = sets.load("lidar", [files / "a.npz", files / "b.npz"], fold=1)
    assert len(lidar.train) == sets.LIDAR_WINDOWS
    data = np.load(files / "b.npz")
    for cloud in lidar.test:
        assert len(cloud.points) >= sets.LIDAR_LEAST
        assert cloud.points[:, 2].min() == 0
    known = {tuple(row) for row in np.stack([data["xyz"][:, 2], data["label"]], 1).round(3).tolist()}
    cloud = lidar.test[0]
    code = {0: 2, 1: 5, 2: 6}
    low = data["xyz"][:, 2].min()
    for height, label in list(zip((10 * cloud.points[:, 2]).tolist(), cloud.labels.tolist(), strict=True))[::100]:
        if label < 3:
            assert any(abs(z - low - height) < 0.05 and code[label] == c for z, c in known)

    held = psb.held_out(2)
    assert len(held.train) == len(held.test) == 1
    assert held.test[0] is psb.train[1]
    with pytest.raises(SystemExit, match="`--fold` should be"):
        sets.load("lidar", [files / "a.npz", files / "b.npz"], fold=2)
    with pytest.raises(SystemExit, match=r"should be an \.npz file"):
        sets.load("rna", [files / "none.npz"])


def test_samplings(module):
    """Each draws as many points as it says, with their labels, and does what its name says."""
    sets = module("sets")
    points = torch.rand(4000, 3)
    cloud = sets.Cloud(points, torch.arange(4000), 3)
    for name, (factor, draw) in sets.SAMPLINGS.items():
        drawn = draw(cloud, round(400 * factor), 5)
        assert len(drawn.points) == round(400 * factor)
        assert len(drawn.labels.unique()) == len(drawn.labels)
        assert drawn.kind == 3
        moved = (drawn.points - points[drawn.labels]).norm(dim=1)
        assert (moved.mean() > 0.01) == (name == "noise")
    _, uneven = sets.SAMPLINGS["uneven"]
    along = sets._along(points, 5)
    dense = (along[uneven(cloud, 400, 5).labels] > 0.5).float().mean()
    assert dense > 0.6  # half of the points without
    _, partial = sets.SAMPLINGS["part missing"]
    assert along[partial(cloud, 400, 5).labels].max() < along.quantile(0.76)


def test_neighbors_and_balls(module):
    """Near points are the nearest, kept ones are spread, and interpolation has the values of the next level there."""
    sets, samples, networks = module("sets"), module("samples"), module("networks")
    points = torch.rand(256, 3)
    sample = samples.Sample(sets.Cloud(points, torch.zeros(256)), 256, qattn.bandwidths.spacing(points))
    distances = torch.cdist(points, points)
    level, *_, last = sample.neighbors
    assert torch.equal(level.near.sort().values, distances.topk(16, largest=False).indices.sort().values)
    assert len(level.kept.unique()) == 64
    assert distances[:, level.kept].amin(1).max() < 0.5 * distances[:, :64].amin(1).max() + 0.2
    assert len(last.near) == 4
    x = torch.randn(1, 64, 5)
    of_batch = samples._stacked([sample.neighbors])[0]
    torch.testing.assert_close(networks.interpolated(x, of_batch)[0, level.kept], x[0], rtol=0, atol=1e-5)

    radius = 6 * sample.spacing
    for center, inside in zip(sample.balls[0].kept.tolist(), sample.balls[0].near, strict=True):
        assert (distances[center, inside] <= radius + 1e-6).all()
        count = int((distances[center] <= radius).sum())
        assert len(inside.unique()) == min(count, 32)


def test_vector_attention_is_its_formula(module):
    networks = module("networks")
    layer = networks.VectorAttention(16).eval()
    x, points, near = torch.randn(1, 20, 16), torch.rand(1, 20, 3), torch.randint(20, (1, 20, 4))
    with torch.no_grad():
        out = layer(x, points, near)
        for i in (0, 13):
            j = near[0, i]
            delta = layer.position(points[0, j] - points[0, i])
            scores = layer.weight(layer.query(x[0, i]) - layer.key(x[0, j]) + delta)  # (4, 2): of 8 channels each
            weight = scores.softmax(0).repeat(1, 8)  # channels of a group are 2 apart
            torch.testing.assert_close(out[0, i], (weight * (layer.value(x[0, j]) + delta)).sum(0))


def test_scores(module):
    training = module("training")
    labels, found = torch.tensor([0, 0, 1, 1, 2, -1]), torch.tensor([0, 1, 1, 1, 0, 2])
    result = training.scores(training.confusion(labels, found, 4))
    assert result["accuracy"] == pytest.approx(60)
    assert result["mean IoU"] == pytest.approx(100 * (1 / 3 + 2 / 3 + 0) / 3)  # the fourth label does not occur


def test_labels_of_other_kinds_do_not_count(module):
    sets, samples, training = module("sets"), module("samples"), module("training")
    kinds, labels = ((0, 2), (2, 5)), torch.tensor([0, 1, -1, 0, 1])
    clouds = [sets.Cloud(torch.rand(5, 3), torch.where(labels < 0, -1, labels + kinds[k][0]), k) for k in (0, 1)]
    batch = samples.Batch([samples.Sample(cloud, 5, 0.1) for cloud in clouds], kinds)
    assert batch.is_possible.tolist() == [[True] * 2 + [False] * 3, [False] * 2 + [True] * 3]
    assert batch.features[1, 0, 3:].tolist() == [0, 1]
    scores, there = torch.randn(2, 5, 5), labels >= 0
    parts = [
        torch.nn.functional.cross_entropy(scores[b, there, first:last], labels[there], reduction="sum")
        for b, (first, last) in enumerate(kinds)
    ]
    torch.testing.assert_close(training.loss(scores, batch), sum(parts) / 8)


@pytest.mark.parametrize("kind", ["any", 0, 2])
def test_rotations(module, kind):
    R = module("samples").rotations(kind, 2000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(R @ R.mT, torch.eye(3).expand(2000, 3, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.linalg.det(R), torch.ones(2000))
    mean = torch.zeros(3, 3)
    if kind != "any":
        mean[kind, kind] = 1
    assert (R.mean(0) - mean).abs().max() < 0.08


@pytest.mark.slow
def test_every_network_learns_and_goes_on_where_it_was(module, tmp_path):
    """Interrupted and resumed training has the parameters of one that was not; and the loss goes down."""
    sets, samples, networks, training = (module(name) for name in ("sets", "samples", "networks", "training"))
    resumable = importlib.import_module("resumable")
    data = sets.generated(3, 1, 300)
    for row in networks.ROWS:
        sampler = samples.Sampler(data, 64, 2, 2)

        def start(name, row=row, sampler=sampler):
            torch.manual_seed(0)
            network = networks.made(row, 3, data.num_classes, sampler.spacing)
            return training.Training(network, sampler, 3e-3, 0, tmp_path / f"{row}-{name}.pt")

        whole = start("whole")
        whole.record_every = 1
        whole.run(resumable.Budget(steps=6), 1e9)
        losses = [point["losses"][0] for point in whole.curve]
        assert losses[-1] < losses[0], row

        class InterruptedError(Exception):
            pass

        def interrupt(part, error=InterruptedError):
            if part.step == 3:
                raise error

        first = start("part")
        first.record_every = 1
        with pytest.raises(InterruptedError):
            first.run(resumable.Budget(steps=6), 0.0, interrupt)  # the checkpoint is that of step 2
        second = start("part")
        assert second.step == 2
        second.run(resumable.Budget(steps=6), 1e9)
        for name, value in whole.network.state_dict().items():
            torch.testing.assert_close(
                second.network.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=f"{row} {name}"
            )
        results = training.tested(second.network, data, 64, sampler.spacing, 1)
        assert set(results) == set(sets.SAMPLINGS)
        assert all(0 <= found["mean IoU"] <= found["accuracy"] <= 100 for found in results.values()), row

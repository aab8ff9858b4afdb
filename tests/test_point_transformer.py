"""The point transformer: cells, blocks against dense matrices, and the laws of the whole network."""

import copy
import math
import types

import pytest
import torch
from cases import check_gradients, slow

import qattn
from qattn.nn import QAttention, QDiffusion, QPointTransformer
from qattn.nn.cells import merged
from qattn.nn.point_block import Extension, PointBlock

pytestmark = pytest.mark.usefixtures("_one_thread")

SMALL = {"spacing": 0.15, "widths": (8, 16), "num_blocks": (2, 1), "num_heads": (2, 4), "content_dim": 3}
SMALL |= {"gradient_dim": 2}
KINDS = {
    "points": {},
    "mean": {"output": "mean"},
    "normals": {"normals": True},
    "without content": {"content_dim": 0},
    "without gradients": {"gradient_dim": 0, "normalization": "row"},
}


def network(name="points", **options):
    torch.manual_seed(1)
    return QPointTransformer(5, 4, **SMALL | KINDS[name] | options)


def exact(module):
    """The network in float64, normalized as far as it goes."""
    for layer in module.modules():
        if isinstance(layer, QDiffusion):
            layer.tol = 1e-12
    return module.double()


def cloud(*shape, normals=False, dtype=torch.float64):
    """Features, points and masses over two decades; with normals, points are twice as wide."""
    points = torch.rand(*shape, 3, dtype=dtype)
    if normals:
        points = torch.cat([points, torch.nn.functional.normalize(points - 0.5, dim=-1)], dim=-1)
    return torch.randn(*shape, 5, dtype=dtype), points, 10 ** (2 * torch.rand(*shape, dtype=dtype))


# Cells.


def test_cells_are_sums_and_means_by_mass():
    """A dictionary of cells in each cloud; also of negative coordinates, with NaN where there is no mass."""
    torch.manual_seed(0)
    points, mass, x = 4 * torch.rand(3, 50, 2) - 2, torch.rand(3, 50), torch.randn(3, 50, 4)
    mass[0, ::3] = mass[2, 5:] = 0
    x[0, ::3] = torch.nan
    cells = merged(points, mass, 0.5)
    means = cells.mean(x)
    for b in range(3):
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in range(50):
            if mass[b, i] > 0:
                groups.setdefault(tuple((points[b, i] / 0.5).floor().int().tolist()), []).append(i)
        for number, key in enumerate(sorted(groups)):
            m = mass[b, groups[key]]
            torch.testing.assert_close(cells.mass[b, number], m.sum())
            torch.testing.assert_close(cells.points[b, number], m @ points[b, groups[key]] / m.sum())
            torch.testing.assert_close(means[b, number], m @ x[b, groups[key]] / m.sum())
            torch.testing.assert_close(
                cells.at_points(means)[b, groups[key]], means[b, number].expand(len(groups[key]), -1)
            )
        assert (cells.mass[b, len(groups) :] == 0).all()
        assert (cells.points[b, len(groups) :] == cells.points[b, 0]).all()
    torch.testing.assert_close(cells.mass.sum(-1), mass.sum(-1))


def test_gradients_of_cells():
    points, mass, x = torch.rand(2, 9, 3).double(), torch.rand(2, 9).double() + 0.1, torch.randn(2, 9, 2).double()

    def run(points, mass, x):
        cells = merged(points, mass, 0.6)
        return cells.points, cells.mass, cells.mean(x)

    assert torch.autograd.gradcheck(run, [tensor.requires_grad_() for tensor in (points, mass, x)])


def test_too_many_cells():
    with pytest.raises(ValueError, match="`spacing` should be"):
        network(spacing=1e-30)(torch.randn(9, 5), torch.rand(9, 3))


# Blocks.


def dense_weights(points, content, sigma, mass):
    """Q (N, N) of one head, by plain Sinkhorn on the matrix."""
    squares = ((points[:, None] - points) ** 2).sum(-1) / sigma**2 + ((content[:, None] - content) ** 2).sum(-1)
    kernel, f = torch.exp(-squares / 2), torch.zeros(len(points), dtype=points.dtype)
    for _ in range(300):
        f = 0.5 * (f - torch.log(kernel @ (mass * torch.exp(f))))
    return torch.exp(f)[:, None] * kernel * mass * torch.exp(f)


@pytest.mark.parametrize("normals", [False, True])
def test_blocks_are_dense_attention_with_gradients(normals):
    """Outputs of a block from dense matrices in float64; gradients of features as covariances within rows."""
    torch.manual_seed(0)
    options = {"coord_dim": 3, "content_dim": 3, "gradient_dim": 2, "mlp_ratio": 2.0, "dropout": 0.0, "drop_path": 0.0}
    block = exact(PointBlock(8, 2, normals=normals, sigma_range=(0.3, 0.6), **options))
    x, points, mass = torch.randn(30, 8).double(), torch.rand(30, 3).double() + 50, torch.rand(30).double()
    sides = torch.nn.functional.normalize(torch.randn(30, 3).double(), dim=-1) if normals else None
    y = block.norm(x)
    value, content = block.value(y).unflatten(-1, (2, 4)), block.content(y).unflatten(-1, (2, 3)) / math.sqrt(3)
    means, slopes, shifts = [], [], []
    for h, sigma in enumerate(block.diffusion.sigma):
        c = content[:, h] if sides is None else torch.cat([content[:, h], sides / block.log_tau[h].exp()], dim=-1)
        q = dense_weights(points, c, sigma, mass)
        v, away = value[:, h], points - points[:, None]  # away: from each row to all points
        means.append(q @ v)
        slopes.append(torch.einsum("ij,ijg,ijd->igd", q, v[:, :2] - means[h][:, None, :2], away) / sigma)
        shifts.append(torch.einsum("ij,ijd->id", q, away) / sigma)
    slope = torch.stack(slopes, dim=1).flatten(1, 2).mT  # (N, d, H G)
    directions = slope / (slope.square().sum(1, keepdim=True) + 1e-3).sqrt()
    angles = torch.tanh((directions * block.mix(directions)).sum(1))
    parts = torch.cat([*means, slope.flatten(1), *shifts, angles], dim=-1)
    expected = block.mlp(x + block.out(parts))
    got, q = block(x[None], points[None], mass[None], None if sides is None else sides[None], None)
    torch.testing.assert_close(got[0], expected)
    flow = mass[:, None] * q.to_dense()[0]
    torch.testing.assert_close(flow, flow.mT)
    torch.testing.assert_close(flow.sum(-1), mass.expand(2, -1))


def test_extensions_are_averages_by_mass():
    layer = Extension(6, 4).double()
    x, points, mass, targets = torch.randn(2, 20, 6), torch.rand(2, 20, 3), torch.rand(2, 20), torch.rand(2, 33, 3)
    x, points, mass, targets = (tensor.double() for tensor in (x, points, mass, targets))
    mass[1, 4:] = 0
    weights = torch.exp(-(torch.cdist(targets, points) ** 2) / (2 * layer.log_sigma.exp() ** 2)) * mass[:, None]
    expected = weights @ layer.linear(layer.norm(x)) / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(layer(x, points, mass, targets), expected)


@pytest.mark.parametrize("content_dim", [0, 4])
def test_tiles_in_space_are_attention_to_all(content_dim):
    """Tiles sorted by positions alone give what all pairs give, whatever the content; blocks share one order."""
    torch.manual_seed(0)
    found = []
    points, features = torch.rand(2, 400, 3), 3 * torch.randn(2, 400, 8)
    for method in ("tiles", "exact"):
        torch.manual_seed(1)
        first, second = (
            QAttention(8, 2, content_dim=content_dim, sigma_range=(0.05, 0.1), method=method, tol=1e-5) for _ in "ab"
        )
        q = first.weights(features, points)
        out = second(features, points, warm_start=q)
        out.square().sum().backward()
        found.append([q.to_dense(), out, *(parameter.grad for parameter in second.parameters())])
    for by_tiles, by_all in zip(*found, strict=True):
        torch.testing.assert_close(by_tiles, by_all, rtol=1e-3, atol=1e-3)


def test_points_are_sorted_once(monkeypatch):
    """Heads and blocks of a level share the order of its positions."""
    sorts = []
    order = qattn.kernels.gaussian.prepared.kd_order
    monkeypatch.setattr(
        "qattn.kernels.gaussian.prepared.kd_order", lambda points: (sorts.append(tuple(points.shape)), order(points))[1]
    )
    torch.manual_seed(0)
    model = network(num_blocks=(3, 1), method="tiles", output="mean")
    model(torch.randn(2, 100, 5), torch.rand(2, 100, 3)).sum().backward()
    assert len(sorts) == 2, sorts  # one per level
    assert all(shape[0] == 2 and shape[2] == 3 for shape in sorts)


# The network.


@pytest.mark.parametrize("name", KINDS)
def test_every_parameter_gets_a_gradient(name):
    model = network(name, drop_path=0.2, dropout=0.1).train()
    features, points, mass = cloud(2, 60, normals=name == "normals", dtype=torch.float32)
    for _ in range(4):  # blocks are dropped at random
        model(features, points, mass).square().sum().backward()
    check_gradients(model)


@pytest.mark.parametrize("name", ["points", *(slow(name) for name in KINDS if name != "points")])
def test_layouts_agree(name):
    """Padded = packed = dict = PyG = one by one, wherever padding lies and whatever it holds."""
    model, sizes = exact(network(name)), [20, 1, 35]
    offset, batch = torch.tensor(sizes).cumsum(0), torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    features, points, mass = cloud(56, normals=name == "normals")
    single = [model(*xs) for xs in zip(features.split(sizes), points.split(sizes), mass.split(sizes), strict=True)]
    expected = torch.stack(single) if name == "mean" else torch.cat(single)
    torch.testing.assert_close(model(features, points, mass, offset=offset), expected)
    record = {"feat": features, "coord": points, "mass": mass, "offset": offset}
    torch.testing.assert_close(model(record)["feat"], expected)
    data = types.SimpleNamespace(x=features, pos=points, mass=mass, batch=batch)
    torch.testing.assert_close(model(data).x, expected)
    (f, present), (x, _), (m, _) = (qattn.ragged.to_padded(t, offset=offset) for t in (features, points, mass))
    x = torch.where(present[..., None], x, 100.0)
    order = torch.randperm(f.shape[1])
    out = model(f[:, order], x[:, order], m[:, order])
    torch.testing.assert_close(out if name == "mean" else out[:, order.argsort()][present], expected)


@pytest.mark.parametrize("name", KINDS)
def test_permutations_and_steps_of_the_grid(name):
    model = exact(network(name))
    features, points, mass = cloud(60, normals=name == "normals")
    expected, order = model(features, points, mass), torch.randperm(60)
    permuted = model(features[order], points[order], mass[order])
    torch.testing.assert_close(permuted, expected if name == "mean" else expected[order])
    moved = points.clone()
    moved[:, :3] += 0.3 * torch.tensor([5.0, -7.0, 2000.0]).double()  # cells of the last level are 0.3 wide
    torch.testing.assert_close(model(features, moved, 7 * mass), expected)


@pytest.mark.parametrize("name", KINDS)
def test_points_that_are_split_change_nothing(name):
    """Two points with half the mass each are the same measure as one, on all levels."""
    model = exact(network(name))
    features, points, mass = cloud(60, normals=name == "normals")
    half = torch.cat([mass[:20] / 2, mass[20:], mass[:20] / 2])
    got = model(torch.cat([features, features[:20]]), torch.cat([points, points[:20]]), half)
    torch.testing.assert_close(got if name == "mean" else got[:60], model(features, points, mass))


@pytest.mark.slow
def test_finer_and_uneven_samples_give_nearly_the_same():
    """Outputs at the same points, from 500 points of a sphere, from four times as many, and with uneven masses."""
    model = network(spacing=0.4).requires_grad_(False)
    points = qattn.shapes.sphere(4000, seed=0)
    weight = torch.exp(2 * points[:, 0])  # ever more points on one side, each of less mass
    picked = torch.multinomial(weight, 2000, generator=torch.Generator().manual_seed(0))

    def outputs(sample, mass):
        """The outputs at points that have no mass of their own."""
        x, m = torch.cat([points[:50], sample]), torch.cat([torch.zeros(50), mass])
        return model(torch.cat([x, x[:, :2]], dim=-1), x, m)[:50]

    expected = outputs(points, torch.ones(4000))

    def error(sample, mass):
        return float((outputs(sample, mass) - expected).norm() / (expected - expected.mean(0)).norm())

    assert error(points[:1000], torch.ones(1000)) < 0.15
    uneven = error(points[picked], 1 / weight[picked])
    assert uneven < 0.15
    assert error(points[picked], torch.ones(2000)) > 1.5 * uneven  # masses matter


@pytest.mark.slow
@pytest.mark.parametrize("name", ["points", "normals"])
def test_gradients_are_those_of_differences(name):
    """Derivatives by features, points, masses, bandwidths and all other parameters, along a random direction each."""
    model = exact(network(name))
    features, points, mass = cloud(12, normals=name == "normals")
    names = [label for label, _ in model.named_parameters()]
    inputs = [features, points, mass / mass.sum(), *(parameter.detach().clone() for parameter in model.parameters())]
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def loss(tensors):
        parameters = dict(zip(names, tensors[3:], strict=True))
        return torch.func.functional_call(model, parameters, tuple(tensors[:3])).square().sum()

    gradients = torch.autograd.grad(loss(inputs), inputs)
    groups = {"features": [0], "points": [1], "mass": [2]}
    groups["bandwidths"] = [3 + n for n, label in enumerate(names) if "log_" in label]
    groups["weights"] = [3 + n for n, label in enumerate(names) if "log_" not in label]
    for group, members in groups.items():
        steps = [torch.zeros_like(tensor) for tensor in inputs]
        for n in members:
            steps[n] = 1e-5 * torch.randn_like(inputs[n]) * (inputs[n].detach() if group == "mass" else 1)
        with torch.no_grad():
            ends = [float(loss([x + sign * step for x, step in zip(inputs, steps, strict=True)])) for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / 2
        got = sum(float((gradient * step).sum()) for gradient, step in zip(gradients, steps, strict=True))
        assert abs(got - expected) < 1e-4 * abs(expected) + 1e-9, group


@pytest.mark.slow
def test_autocast():
    """Features in bfloat16, geometry in float32, far from the origin."""
    model = network()
    reference = copy.deepcopy(model).double()
    features, points, _ = cloud(2, 80, dtype=torch.float32)
    points = points + 96
    expected = reference(features.double(), points.double())
    expected.square().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(features, points)
        out.float().square().sum().backward()
    assert float(((out.double() - expected).norm() / expected.norm()).detach()) < 0.02
    for (label, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        if "log" not in label:
            assert float((parameter.grad - other.grad).norm() / other.grad.norm()) < 0.2, label


def test_blocks_that_are_computed_again():
    features, points, mass = cloud(2, 60, dtype=torch.float32)
    gradients = []
    for recompute in (False, True):
        model = network(recompute=recompute, dropout=0.3, drop_path=0.5)
        torch.manual_seed(1)
        model(features, points, mass).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_dropped_blocks():
    """Clouds lose a block half of the time for a fraction of 0.5, and the mean is kept; in evaluation none does."""
    mlp = qattn.nn.point_block.ResidualMLP(4, 2.0, 0.0, 0.5)
    x = torch.randn(1, 3, 4).expand(4000, -1, -1)
    change = mlp(x) - x
    kept = change.abs().amax((1, 2)) > 0
    assert 0.45 < float(kept.float().mean()) < 0.55
    mlp.eval()
    torch.testing.assert_close(change[kept][0], 2 * (mlp(x) - x)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch speaks of its graph breaks
def test_compiled():
    """Traced and differentiated as a graph; the compiler of its parts has nothing of ours to compile."""
    model = network()
    features, points, mass = cloud(60, dtype=torch.float32)

    def run(function):
        model.zero_grad()
        out = function(features, points, mass)
        out.square().sum().backward()
        return [out.detach(), *(parameter.grad for parameter in model.parameters())]

    torch.testing.assert_close(run(torch.compile(model, backend="aot_eager")), run(model), rtol=1e-3, atol=1e-3)


def test_pretrained(tmp_path):
    model = network("mean", tol=1e-4)
    model.save_pretrained(tmp_path)
    again = QPointTransformer.from_pretrained(tmp_path)
    features, points, mass = cloud(40, dtype=torch.float32)
    torch.testing.assert_close(again(features, points, mass), model(features, points, mass))
    assert again.spacing == 0.15
    assert again.levels[0][0].diffusion.tol == 1e-4


@pytest.mark.parametrize("preset", ["tiny", slow("small"), slow("base")])
def test_presets(preset):
    model = QPointTransformer(3, 2, spacing=0.2, preset=preset)
    points = torch.rand(80, 3)
    assert model(points, points).shape == (80, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spacing": 0}, "`spacing`"),
        ({"preset": "huge"}, "`preset`"),
        ({"output": "cloud"}, "`output`"),
        ({"widths": (8, 16, 32)}, "one number per level"),
        ({"widths": (8, 15)}, "multiples of `num_heads`"),
        ({"gradient_dim": 5}, "at most the number of channels per head"),
        ({"content_dim": -1}, "`content_dim`"),
        ({"drop_path": 1.0}, "`drop_path`"),
        ({"group": "world"}, "`group` is not an option"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        network(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model(torch.randn(9, 4), torch.rand(9, 3)), "`features` should have 5 channels"),
        (lambda model: model(torch.randn(9, 5), torch.rand(9, 6)), "`points` should have 3 channels"),
        (lambda model: model(torch.randn(9, 5), torch.rand(9, 3), torch.zeros(9)), "positive sum"),
        (lambda model: model(torch.randn(9, 5), torch.rand(9, 3), -torch.ones(9)), "not be negative"),
        (lambda model: model(torch.randn(9, 5), torch.full((9, 3), torch.nan)), "finite"),
    ],
)
def test_wrong_clouds(call, message):
    with pytest.raises(ValueError, match=message):
        call(network())

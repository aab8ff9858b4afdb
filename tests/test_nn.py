"""Layers: the mathematics of the operators, in every layout, with gradients on every parameter."""

import copy
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from cases import check_gradients, slow, sphere
from einops import rearrange

import qattn
from qattn import diffusion
from qattn.kernels.gaussian import prepared
from qattn.nn import QAttention, QBlock, QDiffNet, QDiffusion, tangent_gradients

pytestmark = pytest.mark.usefixtures("_one_thread")

SMALL = {"num_scales": 4, "channels_per_scale": 2, "num_blocks": 2, "sigma_range": (0.1, 1.0)}


def dense_operator(points, sigma, mass, content=None, steps=200):
    """Q (N, N) in float64, by plain Sinkhorn on the matrix: the definition, with nothing of the library."""
    squares = ((points[:, None] - points) ** 2).sum(-1) / sigma**2
    if content is not None:
        squares = squares + ((content[:, None] - content) ** 2).sum(-1)
    kernel, f = torch.exp(-squares / 2), torch.zeros(len(points), dtype=points.dtype)
    for _ in range(steps):
        f = 0.5 * (f - torch.log(kernel @ (mass * torch.exp(f))))
    return torch.exp(f)[:, None] * kernel * mass * torch.exp(f)


def exact(module):
    """The network in float64, normalized as far as it goes."""
    for layer in module.modules():
        if isinstance(layer, QDiffusion):
            layer.tol = 1e-12
    return module.double()


def modules():
    torch.manual_seed(1)
    return {
        "attention": QAttention(8, 2),
        "content": QAttention(8, 2, content_dim=3, bias=False),
        "block": QBlock(8, 2, content_dim=3, dropout=0.1).eval(),
        "diffnet": QDiffNet(8, 5, **SMALL),
        "without gradients": QDiffNet(8, 5, gradient="none", **SMALL),
        "of clouds": QDiffNet(8, 5, output="mean", dropout=0.1, **SMALL).eval(),
    }


NAMES = list(modules())


# The layer.


@pytest.mark.parametrize("applications", [1, 3])
def test_the_layer_is_powers_of_the_operator(applications):
    layer = exact(QDiffusion(3, sigma_range=(0.2, 0.8), num_applications=applications))
    points, signal = torch.rand(2, 40, 3).double(), torch.randn(2, 3, 40, 5).double()
    mass = torch.rand(2, 40).double()
    mass = mass / mass.sum(-1, keepdim=True)
    got = layer(signal, points, mass)
    torch.testing.assert_close(layer.sigma, torch.tensor([0.2, 0.4, 0.8]).double(), rtol=1e-6, atol=0)
    for b in range(2):
        for h, sigma in enumerate(layer.sigma):
            q = dense_operator(points[b], sigma, mass[b])
            torch.testing.assert_close(got[b, h], torch.linalg.matrix_power(q, applications) @ signal[b, h])
    torch.testing.assert_close((mass[:, None, :, None] * got).sum(2), (mass[:, None, :, None] * signal).sum(2))


def test_the_setting_of_the_paper():
    layer = QDiffusion(
        2,
        sigma_range=(0.2, 0.5),
        num_applications=2,
        solver=qattn.Solver(11, "plain", "detach"),
        tol=0,
    ).double()
    points, signal = torch.rand(50, 3).double(), torch.randn(2, 50, 4).double()
    got = layer(signal, points)
    assert layer.operator(points).num_iter.tolist() == [11, 11]
    for h, sigma in enumerate(layer.sigma.detach()):
        q = dense_operator(points, sigma, torch.full((50,), 0.02).double(), steps=10)
        torch.testing.assert_close(got[h], q @ q @ signal[h])


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["sinkhorn", "row", "symmetric", "none"])
def test_gradients_are_exact(normalization):
    layer = exact(QDiffusion(2, sigma_range=(0.3, 0.6), num_applications=2, normalization=normalization))
    points, signal = torch.rand(6, 2).double(), torch.randn(2, 6, 3).double()
    mass, content = torch.rand(6).double() + 0.5, 0.3 * torch.randn(2, 6, 2).double()

    def run(log_sigma, signal, points, mass, content):
        return torch.func.functional_call(layer, {"log_sigma": log_sigma}, (signal, points, mass), {"content": content})

    inputs = [x.requires_grad_() for x in (layer.log_sigma.detach().clone(), signal, points, mass, content)]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-6)


def test_gradients_of_features_are_those_of_the_extension():
    """(Q(f ⊗ x) − Qf ⊗ Qx) / σ² against central differences, and against autograd, of Q at other points."""
    points = torch.rand(60, 3).double()
    signal = torch.randn(60, 4).double()
    q = diffusion(points, 0.3, torch.rand(60).double(), tol=1e-12)
    value, gradient = q.value_and_gradient(signal)
    torch.testing.assert_close(value, q @ signal)
    at = points.clone().requires_grad_()
    extended = q.extend(at) @ signal
    for channel in range(4):
        (expected,) = torch.autograd.grad(extended[:, channel].sum(), at, retain_graph=True)
        torch.testing.assert_close(gradient[:, channel], expected)
    step = 1e-4 * torch.eye(3).double()
    differences = [(q.extend(points + s) @ signal - q.extend(points - s) @ signal) / 2e-4 for s in step]
    torch.testing.assert_close(gradient, torch.stack(differences, dim=-1), rtol=1e-5, atol=1e-5)


def test_gradients_of_one_signal_and_of_arrays():
    """(N,) gives (N,) and (N, d), with heads (H, N) and (H, N, d); arrays come back as arrays."""
    points, signal = torch.rand(30, 3).double(), torch.randn(30).double()
    for q in (diffusion(points, 0.3), diffusion(points, [0.3, 0.6])):
        value, gradient = q.value_and_gradient(signal)
        columns, slopes = q.value_and_gradient(signal[:, None])
        assert gradient.shape == (*q.shape[:-1], 3)
        torch.testing.assert_close(value, columns[..., 0], rtol=0, atol=0)
        torch.testing.assert_close(gradient, slopes[..., 0, :], rtol=0, atol=0)
        for array, tensor in zip(q.value_and_gradient(signal.numpy()), (value, gradient), strict=True):
            assert isinstance(array, np.ndarray)
            np.testing.assert_array_equal(array, tensor.numpy())


def test_gradients_of_features_of_heads():
    points, signal = torch.rand(2, 30, 3).double(), torch.randn(2, 3, 30, 4).double()
    layer = exact(QDiffusion(3, sigma_range=(0.2, 0.8), num_applications=2))
    value, gradient, q = layer.diffused(signal, points, gradient=True)
    torch.testing.assert_close(value, layer(signal, points))
    assert gradient.shape == (2, 3, 30, 4, 3)
    one = diffusion(points[1], float(layer.sigma[2].detach()), tol=1e-12)
    torch.testing.assert_close(gradient[1, 2], one.value_and_gradient(one @ signal[1, 2])[1])
    single = exact(QDiffusion(3, sigma_range=(0.2, 0.8)))
    torch.testing.assert_close(single.diffused(signal, points, gradient=True)[1], q.value_and_gradient(signal)[1])


def test_gradients_of_features_need_points_and_rows_that_sum_to_one():
    for q in (diffusion(torch.rand(9, 3), 0.3, normalization="none"), diffusion(qattn.MatrixKernel(torch.ones(9, 9)))):
        with pytest.raises(ValueError, match="value_and_gradient"):
            q.value_and_gradient(torch.rand(9, 1))


def test_blocks_start_from_one_another():
    """The potentials of near bandwidths are nearly right: one pass instead of five, and the same result."""
    points, _ = qattn.shapes.creature(500)
    first, second = QDiffusion(16, sigma_range=(0.05, 0.5)), QDiffusion(12, sigma_range=(0.06, 0.6))
    signal = torch.randn(12, 500, 2)
    q = first.operator(points)
    near = second.operator(points, warm_start=q)
    assert float(near.num_iter.double().mean()) < 0.5 * float(q.num_iter.double().mean())
    torch.testing.assert_close(second(signal, points, warm_start=q), second(signal, points), rtol=0, atol=2e-2)
    single = QDiffusion(1, sigma_range=(0.1, 0.1))
    torch.testing.assert_close(
        single(signal[:1], points, warm_start=q),
        single(signal[:1], points, warm_start=single.operator(points)),
        rtol=0,
        atol=2e-2,
    )
    with pytest.raises(ValueError, match="same points"):
        second.operator(points + 1, warm_start=q)


def test_points_of_blocks_are_sorted_once(monkeypatch):
    calls, kd_order = [], prepared.kd_order
    monkeypatch.setattr(prepared, "kd_order", lambda points: calls.append(points.shape) or kd_order(points))
    first, second = (QDiffusion(2, sigma_range=(0.05, 0.5), method="tiles") for _ in range(2))
    points = torch.rand(300, 3)
    second.operator(points, warm_start=first.operator(points))
    assert calls == [(1, 300, 3)]


def test_starting_from_operators_with_content():
    """Potentials are taken over, head by head where there are no bandwidths to tell them apart; points are not."""
    points = qattn.shapes.creature(300)[0]
    layer, coarser = QDiffusion(4, sigma_range=(0.1, 0.4)), QDiffusion(4, sigma_range=(0.11, 0.44))
    content, signal = 0.3 * torch.randn(4, 300, 2), torch.randn(4, 300, 2)
    plain, rich = layer.operator(points), layer.operator(points, content=content)
    for near, given in ((rich, 1.02 * content), (rich, None), (plain, 0.1 * content)):
        cold = coarser.operator(points, content=given)
        warm = coarser.operator(points, content=given, warm_start=near)
        assert warm.converged.all()
        assert (warm.num_iter <= cold.num_iter).all()
        torch.testing.assert_close(
            coarser(signal, points, content=given, warm_start=near), cold @ signal, rtol=0, atol=2e-2
        )
    assert layer.operator(points, content=content, warm_start=rich).num_iter.tolist() == [1, 1, 1, 1]
    attention = QAttention(8, 2, content_dim=3)
    features, cloud = torch.randn(1, 30, 8), torch.rand(1, 30, 3)
    near = attention.weights(features, cloud)
    mass = torch.full((1, 30), 1 / 30)
    expected = attention(features, cloud, mass)
    torch.testing.assert_close(attention(features, cloud, mass, warm_start=near), expected, rtol=0, atol=1e-2)
    for wrong in (QDiffusion(3, sigma_range=(0.1, 0.4)).operator(points, content=content[:3]), diffusion(points, 0.1)):
        with pytest.raises(ValueError, match=r"`warm_start` should be .* the shape \(4, 300, 300\) of this layer"):
            layer.operator(points, warm_start=wrong)
    with pytest.raises(ValueError, match="same points"):
        layer.operator(points + 1, content=content, warm_start=plain)
    with pytest.raises(ValueError, match="one of a MatrixKernel"):
        layer.operator(points, warm_start=diffusion(qattn.MatrixKernel(torch.ones(300, 300))))


@pytest.mark.parametrize("low", [1e-4, 1e3])
def test_extreme_bandwidths(low):
    """σ → 0 does nothing, σ → ∞ averages; both with gradients that are numbers."""
    layer = QDiffusion(2, sigma_range=(low, 2 * low))
    signal, points = torch.randn(2, 100, 3), torch.rand(100, 3)
    out = layer(signal, points)
    expected = signal if low < 1 else signal.mean(1, keepdim=True).expand_as(signal)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)
    out.square().sum().backward()
    assert layer.log_sigma.grad.isfinite().all()


def test_bandwidths_that_are_not_learned():
    """Fixed bandwidths have no gradient, and are saved all the same."""
    layer = QDiffusion(2, sigma_range=(0.1, 0.4), learn_sigma=False)
    signal = torch.randn(2, 50, 3, requires_grad=True)
    layer(signal, torch.rand(50, 3)).square().sum().backward()
    assert layer.log_sigma.grad is None
    assert signal.grad.abs().amax() > 0
    assert list(layer.state_dict()) == ["log_sigma"]


# Attention.


def test_attention_with_content_is_doubly_stochastic():
    """Rows sum to one, columns to one for the masses; and it is what Sinkhorn makes of the dot products too."""
    attention = exact(QAttention(8, 2, content_dim=3))
    features, points, mass = torch.randn(1, 30, 8).double(), torch.rand(1, 30, 3).double(), torch.rand(1, 30).double()
    q = attention.weights(features, points, mass).to_dense()[0].detach()
    torch.testing.assert_close(q.sum(-1), torch.ones(2, 30).double())
    torch.testing.assert_close(mass @ q, mass.expand(2, 30)[:, None])
    assert (q > -1e-15).all()
    c = rearrange(attention.content(features[0]).detach(), "n (h c) -> h n c", h=2) / 3**0.5
    for h, sigma in enumerate(attention.diffusion.sigma.detach()):
        torch.testing.assert_close(q[h], dense_operator(points[0], sigma, mass[0], c[h]))
        products = torch.exp(c[h] @ c[h].T - torch.cdist(points[0], points[0]) ** 2 / (2 * sigma**2))
        f = torch.zeros(30).double()
        for _ in range(200):
            f = 0.5 * (f - torch.log(products @ (mass[0] * torch.exp(f))))
        torch.testing.assert_close(q[h], torch.exp(f)[:, None] * products * mass[0] * torch.exp(f))


def test_attention_is_projections_around_the_operator():
    attention = exact(QAttention(6, 2, content_dim=2))
    features, points = torch.randn(20, 6).double(), torch.rand(20, 3).double()
    q = attention.weights(features[None], points[None]).to_dense()[0]
    values = attention.value(features)
    heads = torch.cat([q[0] @ values[:, :3], q[1] @ values[:, 3:]], dim=-1)
    torch.testing.assert_close(attention(features, points), attention.out(heads))


# All modules.


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    module = modules()[name].train()
    module(torch.randn(2, 30, 8), torch.rand(2, 30, 3)).square().sum().backward()
    check_gradients(module)


@pytest.mark.parametrize("name", ["diffnet", *(slow(name) for name in NAMES if name != "diffnet")])
def test_layouts_agree(name):
    """Padded = packed = a dict = one by one."""
    module = exact(modules()[name])
    sizes = [20, 1, 35]
    offset = torch.tensor(sizes).cumsum(0)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    features, points = torch.randn(56, 8).double(), torch.rand(56, 3).double() + 10
    mass = torch.rand(56).double() + 0.1
    for m in (None, mass):
        masses = [None] * 3 if m is None else m.split(sizes)
        single = [module(*xs) for xs in zip(features.split(sizes), points.split(sizes), masses, strict=True)]
        expected = torch.stack(single) if name == "of clouds" else torch.cat(single)
        torch.testing.assert_close(module(features, points, m, offset=offset), expected)
        torch.testing.assert_close(module(features, points, m, batch=batch), expected)
        cloud = {"coord": points, "feat": features, "offset": offset, "grid_size": 0.1}
        cloud |= {} if m is None else {"mass": m}
        result = module(cloud)
        torch.testing.assert_close(result["feat"], expected)
        assert result["coord"] is points
        assert result["grid_size"] == 0.1
        assert cloud["feat"] is features
        del cloud["offset"]
        torch.testing.assert_close(module(cloud | {"batch": batch})["feat"], expected)
        # Padding may lie anywhere: it has no mass.
        padded, present = qattn.ragged.to_padded(features, offset=offset)
        x, _ = qattn.ragged.to_padded(points, offset=offset)
        weight = present.double() if m is None else qattn.ragged.to_padded(m, offset=offset)[0]
        out = module(padded, x, weight)
        torch.testing.assert_close(out if name == "of clouds" else out[present], expected)


class Data:
    """The part of `torch_geometric.data.Data` that counts: attributes, None where there is nothing."""

    def __init__(self, **given):
        self.__dict__ |= {"x": None, "pos": None, "batch": None} | given


@pytest.mark.parametrize("name", ["block", "of clouds"])
@pytest.mark.parametrize("kind", [slow(dict), Data, slow(types.SimpleNamespace)])
def test_names_of_pyg(name, kind):
    """`x`, `pos` and `batch`, or one cloud without: a copy comes back, with new features under the same name."""
    module = exact(modules()[name])
    features, points, mass = torch.randn(56, 8).double(), torch.rand(56, 3).double(), torch.rand(56).double()
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 1, 35]))

    def get(record, key):
        return record[key] if kind is dict else getattr(record, key)

    for more in ({}, {"batch": batch}, {"batch": batch, "mass": mass}, {"mass": mass}):
        given = kind(x=features, pos=points, **more, y=7)
        result = module(given)
        assert type(result) is kind
        torch.testing.assert_close(get(result, "x"), module(features, points, **more), rtol=0, atol=0)
        assert get(result, "pos") is points
        assert get(result, "y") == 7
        assert get(given, "x") is features


@pytest.mark.parametrize("given", [[20, 21, 56], np.array([20, 21, 56]), torch.tensor([20, 21, 56], dtype=torch.int32)])
def test_clouds_told_apart_by_lists_and_arrays(given):
    module = modules()["block"]
    features, points = torch.randn(56, 8), torch.rand(56, 3)
    expected = module(features, points, offset=torch.tensor([20, 21, 56]))
    torch.testing.assert_close(module({"feat": features, "coord": points, "offset": given})["feat"], expected)
    batch = np.repeat([0, 1, 2], [20, 1, 35])
    for numbers in (batch, batch.tolist()):
        torch.testing.assert_close(module({"x": features, "pos": points, "batch": numbers})["x"], expected)


@pytest.mark.parametrize("name", NAMES)
def test_equivariance(name):
    """Permuted points give permuted features; moved and mirrored points give the same."""
    module = exact(modules()[name])
    features, points, mass = torch.randn(30, 8).double(), torch.rand(30, 3).double(), torch.rand(30).double()
    expected = module(features, points, mass)
    order = torch.randperm(30)
    permuted = module(features[order], points[order], mass[order])
    torch.testing.assert_close(permuted, expected if name == "of clouds" else expected[order])
    motion = torch.linalg.qr(torch.randn(3, 3).double()).Q
    torch.testing.assert_close(module(features, points @ motion.T + 5, mass), expected)


@pytest.mark.parametrize("name", NAMES)
def test_points_that_are_split_change_nothing(name):
    """A point twice with half its mass each is the same measure: what makes networks indifferent to sampling."""
    module = exact(modules()[name])
    features, points, mass = torch.randn(30, 8).double(), torch.rand(30, 3).double(), torch.rand(30).double()
    half = torch.cat([mass[:10] / 2, mass[10:], mass[:10] / 2])
    expected, got = (
        module(features, points, mass),
        module(torch.cat([features, features[:10]]), torch.cat([points, points[:10]]), half),
    )
    torch.testing.assert_close(got if name == "of clouds" else got[:30], expected)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(name, tmp_path):
    first = modules()[name].eval()
    features, points = torch.randn(30, 8), torch.rand(30, 3)
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.1)
        changed = first(features, points)
        first.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        restored = first(features, points)
        torch.testing.assert_close(modules()[name].eval()(features, points), restored)
    assert not torch.allclose(changed, restored)


def test_pretrained(tmp_path):
    """Safetensors and the arguments, by huggingface_hub."""
    network = QDiffNet(3, 5, output="mean", num_applications=1, tol=1e-4, **SMALL)
    network.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    again = QDiffNet.from_pretrained(tmp_path)
    points = torch.rand(30, 3)
    torch.testing.assert_close(again(points, points), network(points, points))
    assert again.blocks[0].diffusion.tol == 1e-4


@pytest.mark.slow
def test_pretrained_needs_huggingface_hub():
    script = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "import torch, qattn\n"
        "network = qattn.nn.QDiffNet(3, 2, num_scales=2, num_blocks=1)\n"
        "print(network(torch.rand(9, 3), torch.rand(9, 3)).shape)\n"
        "for save in (network.save_pretrained, network.push_to_hub, network.from_pretrained):\n"
        "    try:\n"
        "        save('x')\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert lines.splitlines()[0] == "torch.Size([9, 2])"
    assert lines.count("qattn-diffusion[hub]") == 3


# How networks are run.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["content", "diffnet"])
@pytest.mark.filterwarnings("ignore")  # torch speaks of its graph breaks
def test_compiled(name):
    module = modules()[name]
    features, points = torch.randn(30, 8), torch.rand(30, 3)

    def run(function):
        module.zero_grad()
        out = function(features, points)
        out.square().sum().backward()
        return [out.detach(), *(parameter.grad for parameter in module.parameters())]

    torch.testing.assert_close(run(torch.compile(module)), run(module), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    """Features in bfloat16, potentials and points in float32: values and gradients near those of float64."""
    module = modules()[name]
    exact_module = copy.deepcopy(module).double()
    points = torch.rand(2, 50, 3) + 100  # far off: bfloat16 would lose the points
    features = torch.randn(2, 50, 8, requires_grad=True)
    exact_features = features.detach().double().requires_grad_()
    expected = exact_module(exact_features, points.double())
    expected.square().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(features, points)
        assert out.dtype == (torch.float32 if name == "block" else torch.bfloat16)  # norms and sums are in float32
        out.float().square().sum().backward()

    def error(found, wanted):
        return float((found.detach().double() - wanted).norm() / wanted.norm())

    assert error(out, expected.detach()) < 0.02
    assert error(features.grad, exact_features.grad) < 0.02
    for (label, parameter), other in zip(module.named_parameters(), exact_module.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        if not label.endswith("log_sigma"):
            assert error(parameter.grad, other.grad) < 0.15, label  # some units of a ReLU change sides


def test_half_precision_points_and_signals():
    layer = QDiffusion(2, sigma_range=(0.2, 0.5)).bfloat16()
    signal, points = torch.randn(2, 50, 4).bfloat16(), torch.rand(50, 3).bfloat16()
    out = layer(signal, points)
    assert out.dtype == torch.bfloat16
    expected = layer.float()(signal.float(), points.float())
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_blocks_that_are_computed_again():
    """`recompute` changes memory, nothing else; also with masses and dropout."""
    points, mass = torch.rand(2, 40, 3), torch.rand(2, 40)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        network = QDiffNet(3, 2, recompute=recompute, dropout=0.3, **SMALL)
        torch.manual_seed(1)
        network(points, points, mass).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_exported_with_any_number_of_points(name, tmp_path):
    module = modules()[name].eval()
    any_number = torch.export.Dim("N", min=2, max=10**6)
    shapes = {"features": {1: any_number}, "points": {1: any_number}, "mass": {1: any_number}}
    features, points, mass = torch.randn(2, 30, 8), torch.rand(2, 30, 3), torch.rand(2, 30)
    program = torch.export.export(module, (features, points, mass), dynamic_shapes=shapes, strict=False)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    features, points, mass = torch.randn(2, 77, 8), torch.rand(2, 77, 3), torch.rand(2, 77)
    with torch.no_grad():
        torch.testing.assert_close(loaded(features, points, mass), module(features, points, mass), rtol=0, atol=5e-3)


@pytest.mark.slow
def test_training_from_random_bandwidths_stays_finite():
    """100 steps, from bandwidths far too small to far too large."""
    network = QDiffNet(3, 1, output="mean", **SMALL | {"sigma_range": (1e-3, 1e2)})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in network.blocks:
            block.diffusion.log_sigma.uniform_(-9, 5, generator=generator)
    points = torch.rand(4, 60, 3, generator=generator)
    target = points.std(dim=1).norm(dim=-1, keepdim=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (network(points, points) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(parameter.isfinite().all() for parameter in network.parameters())
    assert losses[-1] < 0.1 * losses[0]


PARALLEL = """
import sys, torch, qattn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def run(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    clouds = torch.rand(2, 40, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)  # rank 0 decides where the parameters start
    sizes = {"widths": (8, 8), "num_blocks": (1, 1), "num_heads": (2, 2), "gradient_dim": 2, "recompute": True}
    for network in (
        qattn.nn.QDiffNet(3, 2, num_scales=2, channels_per_scale=2, num_blocks=2, sigma_range=(0.1, 1.0)),
        qattn.nn.QPointTransformer(3, 2, spacing=0.2, **sizes),
    ):
        parallel = DistributedDataParallel(network)
        parallel(clouds[rank], clouds[rank]).square().mean().backward()
        found = [parameter.grad.clone() for parameter in network.parameters()]
        network.zero_grad()
        sum(network(cloud, cloud).square().mean() for cloud in clouds).div(2).backward()
        for got, parameter in zip(found, network.parameters()):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-5)
    dist.barrier()  # see examples/distributed.py
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(run, nprocs=2)
"""


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    """Two processes with a cloud each have the gradients of one with both."""
    (tmp_path / "parallel.py").write_text(PARALLEL)
    subprocess.run([sys.executable, tmp_path / "parallel.py", tmp_path / "meeting"], check=True, timeout=300)


# Tangent planes.


def test_gradients_in_tangent_planes():
    """Exact for linear functions on a plane; lengths right on a sphere; nothing but zeros where points coincide."""
    flat = torch.cat([torch.rand(200, 2), torch.zeros(200, 1)], dim=1).double()
    slope = flat @ torch.tensor([1.0, 2.0, 0.0]).double()
    gradient = torch.stack([g @ slope for g in tangent_gradients(flat)])
    torch.testing.assert_close(gradient.norm(dim=0), torch.full((200,), 5**0.5).double())
    for g in tangent_gradients(flat):
        torch.testing.assert_close(g @ torch.ones(200).double(), torch.zeros(200).double(), rtol=0, atol=1e-9)

    points = sphere(3000)
    height = points[:, 2]
    lengths = torch.stack([g @ height for g in tangent_gradients(points, num_neighbors=20)]).norm(dim=0)
    torch.testing.assert_close(lengths, (1 - height**2).sqrt(), rtol=0, atol=0.1)

    same = torch.zeros(50, 3)
    assert all(g.to_dense().abs().amax() == 0 for g in tangent_gradients(same))
    line = torch.linspace(0, 1, 50)[:, None] * torch.tensor([[1.0, 2.0, 2.0]])
    gradient = torch.stack([g @ line[:, 0] for g in tangent_gradients(line)])
    torch.testing.assert_close(gradient.norm(dim=0), torch.full((50,), 1 / 3), rtol=1e-3, atol=0)


def test_a_network_with_tangent_gradients():
    """Frames change nothing, as in DiffusionNet: one cloud, a batch, packed clouds of different sizes."""
    network = exact(QDiffNet(3, 4, gradient="tangent", **SMALL))
    points = sphere(120)
    grad_x, grad_y = tangent_gradients(points)
    expected = network(points, points, gradients=(grad_x, grad_y))
    angle = 2 * torch.pi * torch.rand(120, 1).double()
    turned = (angle.cos() * grad_x + angle.sin() * grad_y, angle.cos() * grad_y - angle.sin() * grad_x)
    torch.testing.assert_close(network(points, points, gradients=turned), expected)
    both = torch.stack([points, points])
    stacked = tuple(torch.stack([g, g]) for g in (grad_x, grad_y))
    torch.testing.assert_close(network(both, both, gradients=stacked)[1], expected)
    other = sphere(50)
    packed, pairs = torch.cat([points, other]), tangent_gradients(other)
    lists = [grad_x, pairs[0]], [grad_y, pairs[1]]
    got = network(packed, packed, offset=torch.tensor([120, 170]), gradients=lists)
    torch.testing.assert_close(got[:120], expected)
    torch.testing.assert_close(got[120:], network(other, other, gradients=pairs))
    got.square().sum().backward()
    assert all(parameter.grad.abs().amax() > 0 for parameter in network.parameters())


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_hidden_layers(hidden):
    network = QDiffNet(3, 4, num_hidden_layers=hidden, **SMALL)
    widths = [layer.in_features for layer in network.blocks[0].mlp if isinstance(layer, torch.nn.Linear)]
    assert widths == [24] + hidden * [8]
    assert network(torch.rand(20, 3), torch.rand(20, 3)).shape == (20, 4)


# Left and right.


def handed(chiral):
    torch.manual_seed(0)
    return QDiffNet(
        2, 5, num_scales=3, channels_per_scale=4, num_blocks=2, sigma_range=(0.2, 0.8), chiral=chiral, tol=1e-6
    ).double()


@pytest.mark.parametrize("chiral", [False, True])
def test_rotations_and_mirrors(chiral):
    points = qattn.shapes.creature(200)[0].double()
    inputs = torch.sin(3 * points[:, :2])  # fixed to the points
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    rotation = rotation * torch.linalg.det(rotation)
    net = handed(chiral)
    out = net(inputs, points)
    torch.testing.assert_close(net(inputs, points @ rotation.T), out, rtol=0, atol=1e-5)
    change = (net(inputs, points @ -rotation.T) - out).detach().abs().max()
    assert change > 1e-3 if chiral else change < 1e-5


def test_chirality_needs_gradients_in_space():
    with pytest.raises(ValueError, match="needs gradients in space"):
        QDiffNet(2, 5, chiral=True, gradient="none")


# Wrong input.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QDiffusion(0, sigma_range=(0.1, 1.0)), "num_scales"),
        (lambda: QDiffusion(2, sigma_range=0.1), "pair"),
        (lambda: QDiffusion(2, sigma_range=(1.0, 0.1)), "least, largest"),
        (lambda: QDiffusion(2, sigma_range=(0.0, 0.1)), "least bandwidth"),
        (lambda: QDiffusion(2, sigma_range=(0.1, 1.0), num_applications=0), "applications"),
        (lambda: QDiffusion(2, sigma_range=(0.1, 1.0), tol=-1), "tol"),
        (lambda: QDiffusion(2, sigma_range=(0.1, 1.0), normalization="x"), "normalization"),
        (lambda: QDiffusion(2, sigma_range=(0.1, 1.0), solver=qattn.Solver(adjoint="x")), "adjoint"),
        (lambda: QDiffusion(2, sigma_range=(0.1, 1.0), solver=qattn.Solver(iteration="x")), "iteration"),
        (lambda: QDiffusion(2, sigma_range=(0.1, 1.0), method="x"), "method"),
        (lambda: QDiffusion(2, sigma_range=(0.1, 1.0), backend="x"), "backend"),
        (lambda: QAttention(7, 2), "multiple"),
        (lambda: QDiffNet(3, 2, gradient="x"), "gradient"),
        (lambda: QDiffNet(3, 2, output="x"), "output"),
        (lambda: QDiffNet(3, 2, num_blocks=0), "num_blocks"),
        (lambda: tangent_gradients(torch.rand(3, 3)), "points"),
        (lambda: tangent_gradients(torch.rand(2, 9, 3)), "points"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, x: net(x[:5], x), "features"),
        (lambda net, x: net(x), "points"),
        (lambda net, x: net(x[:, :2], x), "channels"),
        (lambda net, x: net(x, x, torch.ones(5)), "mass"),
        (lambda net, x: net(x, x, offset=torch.tensor([5, 8])), "offset"),
        (lambda net, x: net(x, x, offset=torch.tensor([0, 9])), "`offset` should .* with index 0 have none"),
        (lambda net, x: net(x, x, batch=[0] * 4 + [3] * 5), "`batch` should .* with index 1, 2 have none"),
        (lambda net, x: net(x, x, (torch.arange(9) > 4).float(), offset=[5, 9]), "`mass` should have a positive sum"),
        (
            lambda net, x: net(x, x, offset=[4.0, 9.0]),
            "`offset` should be integers, the end of each cloud; got float64",
        ),
        (lambda net, x: net(x.double(), x), "`features` should be float32, like the parameters; got float64"),
        (lambda net, x: net(x.half(), x), "`features` should be float32, like the parameters; got float16"),
        (lambda net, x: QDiffNet(3, 2, chiral=True, **SMALL)(x, x[:, :2]), "`points` should have 3 coordinates"),
        (lambda net, x: net(x[None], x[None], offset=torch.tensor([9])), "offset"),
        (lambda net, x: net({"feat": x, "coord": x}), "offset"),
        (lambda net, x: net({"feat": x, "offset": torch.tensor([9])}), "coord"),
        (lambda net, x: net({"feat": x, "coord": x, "offset": torch.tensor([9])}, x), "dict"),
        (lambda net, x: net({"x": x, "coord": x}), "`x` and `pos`, as in PyG; got coord, x"),
        (lambda net, x: net(Data(pos=x)), "`x` and `pos`, as in PyG; got pos"),
        (lambda net, x: net(x, x, gradients=(x, x)), "gradients"),
        (lambda net, x: net(x.numpy(), x), "features"),
    ],
)
def test_wrong_clouds(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(QDiffNet(3, 2, **SMALL), torch.rand(9, 3))


def test_float64_features_under_autocast():
    """Autocast casts float32 only."""
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="`features` should be float32"):
        QDiffNet(3, 2, **SMALL)(torch.rand(9, 3).double(), torch.rand(9, 3))


def test_wrong_signals():
    layer, attention = QDiffusion(2, sigma_range=(0.1, 1.0)), QAttention(4, 2)
    with pytest.raises(ValueError, match="signal"):
        layer(torch.rand(3, 9, 1), torch.rand(9, 3))
    with pytest.raises(ValueError, match="signal"):
        layer(torch.rand(9, 1), torch.rand(9, 3))
    with pytest.raises(ValueError, match="channels"):
        attention(torch.rand(9, 4), torch.rand(9, 2))
    tangent = QDiffNet(3, 2, gradient="tangent", **SMALL)
    with pytest.raises(ValueError, match="tangent_gradients"):
        tangent(torch.rand(9, 3), torch.rand(9, 3))
    with pytest.raises(ValueError, match="gradients"):
        tangent(torch.rand(9, 3), torch.rand(9, 3), gradients=(torch.rand(10, 10), torch.rand(10, 10)))

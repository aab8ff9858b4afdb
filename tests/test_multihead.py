"""`QMultiheadAttention` against a dense Sinkhorn iteration in float64, and in the layers of torch that call it."""

import inspect

import pytest
import torch
from torch import nn

from qattn import Solver
from qattn.nn import QAttention, QMultiheadAttention

EXACT = {"tol": 1e-6, "solver": Solver(max_iter=200)}


def dense(module, x, mass, points=None):
    """Outputs (B, N, C) and weights (B, H, N, N) by plain steps of Sinkhorn on the whole matrix, differentiable."""
    attention = module.attention
    H, B, N = attention.diffusion.num_scales, *x.shape[:2]
    c = attention.content(x).view(B, N, H, -1).transpose(1, 2) / attention.content_dim**0.5
    log_k = -(c[:, :, :, None] - c[:, :, None]).square().sum(-1) / 2
    if points is not None:
        squares = (points[:, None, :, None] - points[:, None, None]).square().sum(-1)
        log_k = log_k - squares / (2 * attention.diffusion.sigma.double().square()[:, None, None])
    log_m = mass.log()[:, None]
    f = torch.zeros(B, H, N, dtype=x.dtype)
    for _ in range(300):
        f = (f - torch.logsumexp(log_k + (f + log_m)[..., None, :], -1)) / 2
    weights = torch.exp(f[..., None] + log_k + (f + log_m)[..., None, :])
    values = attention.value(x).view(B, N, H, -1).transpose(1, 2)
    return attention.out((weights @ values).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("coord_dim", [0, 3])
def test_values_gradients_and_weights(coord_dim):
    """Padding counts, and positions if there are any, also far from the origin."""
    module = QMultiheadAttention(8, 2, coord_dim=coord_dim, batch_first=True, sigma_range=(0.3, 1.0), **EXACT)
    x = torch.randn(2, 30, 8)
    points = torch.rand(2, 30, 3) if coord_dim else None
    padding = torch.zeros(2, 30, dtype=torch.bool)
    padding[1, 20:] = True
    twin = QMultiheadAttention(8, 2, coord_dim=coord_dim, batch_first=True, sigma_range=(0.3, 1.0)).double()
    twin.load_state_dict(module.state_dict())
    expected, weights = dense(twin, x.double(), (~padding).double(), None if points is None else points.double())
    there = ~padding
    for shift in (0.0, 100.0):
        moved = None if points is None else points + shift
        out, found = module(
            x, x, x, key_padding_mask=padding, need_weights=True, average_attn_weights=False, points=moved
        )
        tolerance = 1e-5 if shift == 0 else 1e-3
        torch.testing.assert_close(out[there], expected.float()[there], rtol=0, atol=tolerance)
        torch.testing.assert_close(
            found.transpose(1, 2)[there], weights.float().transpose(1, 2)[there], rtol=0, atol=tolerance
        )
        if points is None:
            break
    cotangent = torch.randn_like(out)[there]
    module(x, key_padding_mask=padding, points=points)[0][there].backward(cotangent)
    expected[there].backward(cotangent.double())
    of_twin = dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        if coord_dim == 0 and name.endswith("log_sigma"):
            assert parameter.grad is None
            continue
        expected_grad = of_twin[name].grad.float()
        torch.testing.assert_close(
            parameter.grad, expected_grad, rtol=1e-3, atol=1e-4 * float(expected_grad.abs().max())
        )


def test_weights_are_doubly_stochastic_and_symmetric():
    module = QMultiheadAttention(16, 4, batch_first=True, **EXACT)
    x = torch.randn(3, 40, 16)
    _, weights = module(x, need_weights=True)
    assert weights.shape == (3, 40, 40)
    for axis in (1, 2):
        torch.testing.assert_close(weights.sum(axis), torch.ones(3, 40), rtol=0, atol=1e-5)
    torch.testing.assert_close(weights, weights.mT, rtol=0, atol=1e-6)


def test_the_call_is_that_of_torch():
    ours, theirs = (
        list(inspect.signature(kind.forward).parameters) for kind in (QMultiheadAttention, nn.MultiheadAttention)
    )
    assert ours[: len(theirs)] == theirs
    ours, theirs = (list(inspect.signature(kind).parameters) for kind in (QMultiheadAttention, nn.MultiheadAttention))
    assert ours[:4] == theirs[:4]


def test_layouts_agree():
    """Tokens first, batches first, and one sequence without a batch."""
    torch.manual_seed(0)
    first = QMultiheadAttention(8, 2, coord_dim=2, batch_first=True)
    torch.manual_seed(0)
    second = QMultiheadAttention(8, 2, coord_dim=2)
    x, points = torch.randn(2, 20, 8), torch.rand(2, 20, 2)
    expected, weights = first(x, points=points, need_weights=True)
    turned, _ = second(x.transpose(0, 1), points=points.transpose(0, 1))
    torch.testing.assert_close(turned.transpose(0, 1), expected)
    alone, own = first(x[0], points=points[0], need_weights=True)
    torch.testing.assert_close(alone, expected[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(own, weights[0], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_inside_the_encoder_of_torch():
    """The encoder works in training, and without gradients, where torch would take its own; padding changes nothing."""
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    layer.self_attn = QMultiheadAttention(16, 2, batch_first=True, **EXACT)
    encoder = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 25, 16)
    padding = torch.arange(25).expand(2, 25) >= torch.tensor([[25], [15]])
    out = encoder(x, src_key_padding_mask=padding)
    out[~padding].square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters() if parameter.requires_grad)
    with torch.no_grad():
        again = encoder.eval()(x, src_key_padding_mask=padding)
        alone = encoder(x[1:, :15])
    torch.testing.assert_close(again, out.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(alone, out[1:, :15].detach(), rtol=0, atol=1e-4)


def test_autocast():
    module, x = QMultiheadAttention(16, 2, batch_first=True), torch.randn(2, 30, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x)
    torch.testing.assert_close(out.float(), module(x)[0], rtol=0, atol=0.03)


def test_what_symmetric_attention_is_not():
    module, x = QMultiheadAttention(8, 2, batch_first=True), torch.randn(1, 10, 8)
    with pytest.raises(ValueError, match="`key` should be `query` itself"):
        module(x, x.clone(), x)
    with pytest.raises(ValueError, match="`value` should be `query` itself"):
        module(x, x, x.clone())
    with pytest.raises(ValueError, match="`is_causal` False"):
        module(x, is_causal=True)
    with pytest.raises(ValueError, match="`attn_mask` should be None"):
        module(x, attn_mask=torch.zeros(10, 10))
    with pytest.raises(ValueError, match=r"`coord_dim=0`, and got \(1, 10, 3\)"):
        module(x, points=torch.rand(1, 10, 3))
    with pytest.raises(ValueError, match="`coord_dim=3`, and got none"):
        QMultiheadAttention(8, 2, coord_dim=3)(x)
    with pytest.raises(ValueError, match="`dim` should be a multiple"):
        QMultiheadAttention(9, 2)
    with pytest.raises(ValueError, match="`content_dim` should be"):
        QAttention(8, 2, coord_dim=0)

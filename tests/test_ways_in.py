"""Layers in the code of others: PyG itself, and a stand-in with the names of Pointcept's Point Transformer V3."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import qattn
from qattn.nn import QAttention

FOLDER = Path(qattn.__file__).parent.parent / "examples"

pytestmark = pytest.mark.usefixtures("_one_thread")


class Point(dict):
    """A point of Pointcept, an `addict.Dict`: entries are attributes, and a missing one reads as an empty dict."""

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value

    def __missing__(self, name):
        return Point()

    def __getstate__(self):
        return self

    def __setstate__(self, state):
        self.update(state)


def scan(sizes, channels=12, grid_size=0.05):
    """Clouds in cells, as `GridSample` makes them."""
    coord = torch.cat([torch.rand(size, 3) for size in sizes])
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return Point(
        coord=coord,
        grid_coord=(coord / grid_size).int(),
        feat=torch.randn(len(coord), channels),
        batch=batch,
        offset=torch.tensor(sizes).cumsum(0),
        grid_size=grid_size,
    )


class Block(nn.Module):
    """The block of Point Transformer V3 without its sparse convolution: how it makes and calls its attention."""

    def __init__(self, kind, channels, num_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attn = kind(
            channels=channels,
            patch_size=48,
            num_heads=num_heads,
            qkv_bias=True,
            qk_scale=None,
            attn_drop=0.0,
            proj_drop=0.0,
            order_index=1,
            enable_rpe=False,
            enable_flash=False,
            upcast_attention=True,
            upcast_softmax=True,
        )
        self.mlp = nn.Linear(channels, channels)

    def forward(self, point):
        shortcut = point.feat
        point.feat = self.norm1(point.feat)
        point = self.attn(point)
        point.feat = shortcut + point.feat
        point.feat = point.feat + self.mlp(self.norm2(point.feat))
        return point


def pooled(point):
    """`SerializedPooling` with stride 2: points of a cell twice as large become one, which remembers its parts."""
    cells = point.grid_coord >> 1
    keys = torch.cat([point.batch[:, None], cells], dim=1)
    unique, cluster = torch.unique(keys, dim=0, return_inverse=True)
    feat = torch.zeros(len(unique), point.feat.shape[1]).index_reduce(0, cluster, point.feat.detach(), "amax")
    return Point(
        feat=feat,
        grid_coord=unique[:, 1:],
        batch=unique[:, 0],
        offset=torch.bincount(unique[:, 0]).cumsum(0),
        pooling_inverse=cluster,
        pooling_parent=point,
    )


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("pointcept").QSerializedAttention


def test_in_a_block_of_pointcept(layer):
    """A layer changes the features of the point that it is given, cloud by cloud, with positions in cells."""
    block, point = Block(layer, 12, 3), scan([70, 40])
    before = point.feat.clone()
    assert block(point) is point
    assert set(point) == {"coord", "grid_coord", "feat", "batch", "offset", "grid_size", "mass"}
    with torch.no_grad():
        for first, last in ((0, 70), (70, 110)):
            x, cells = before[first:last], point.grid_coord[first:last].float()
            x = x + block.attn.attention(block.norm1(x), cells)
            torch.testing.assert_close(point.feat[first:last], x + block.mlp(block.norm2(x)), rtol=0, atol=1e-5)
    point.feat.square().sum().backward()
    for parameter in block.parameters():
        assert parameter.grad.abs().amax() > 0


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_pooled_points_have_the_mass_of_their_parts(layer):
    point = scan([200, 90])
    once = pooled(point)
    twice = pooled(once)
    before = twice.feat.clone()
    attention = layer(12, 3)
    attention(twice)
    cells = torch.cat([point.batch[:, None], point.grid_coord >> 2], dim=1)
    _, counts = torch.unique(cells, dim=0, return_counts=True)
    assert counts.max() > 2
    torch.testing.assert_close(twice.mass, counts.float())
    expected = attention.attention(before, twice.grid_coord.float(), counts.float(), offset=twice.offset)
    torch.testing.assert_close(twice.feat, expected)
    equal = attention.attention(before, twice.grid_coord.float(), offset=twice.offset)
    assert (twice.feat - equal).abs().max() > 1e-4


def test_a_layer_takes_a_point_of_pointcept_itself():
    """The layer gives back a copy of the same kind."""
    point = scan([50, 30])
    out = QAttention(12, 3)(point)
    assert type(out) is Point
    assert out is not point
    assert (out.feat - point.feat).abs().max() > 1e-3


def test_what_has_no_meaning_for_diffusion(layer):
    for option in ({"qk_scale": 0.5}, {"attn_drop": 0.1}, {"enable_rpe": True}):
        with pytest.raises(ValueError, match="`qk_scale` should be None, `attn_drop` 0 and `enable_rpe` False"):
            layer(12, 3, **option)


@pytest.mark.slow
def test_in_a_batch_of_pyg():
    """The layer stands in the places of `PointTransformerConv`, and takes a `Batch` itself."""
    pyg = pytest.importorskip("torch_geometric")
    clouds = [pyg.data.Data(x=torch.randn(n, 8), pos=torch.rand(n, 3)) for n in (30, 50)]
    data = pyg.data.Batch.from_data_list(clouds)
    edge_index = torch.stack([torch.arange(80), torch.arange(80).roll(1)])
    before, after = pyg.nn.PointTransformerConv(8, 8), QAttention(8, 2, content_dim=4)
    out = after(data.x, data.pos, batch=data.batch)
    assert before(data.x, data.pos, edge_index).shape == out.shape
    of_batch = after(data)
    assert type(of_batch) is type(data)
    torch.testing.assert_close(of_batch.x, out)
    for cloud, part in zip(clouds, out.split([30, 50]), strict=True):
        torch.testing.assert_close(after(cloud.x, cloud.pos), part, rtol=0, atol=1e-5)

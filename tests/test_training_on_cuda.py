"""Training steps under autocast on fake CUDA tensors: which kernels run, in which dtypes, how long the host waits.

Shapes stand for memory: if a step makes the same tensors at N points and at 2 N, none of them more than twice as large,
it takes O(N). Fake tensors have no numbers, so lists of near tiles have their least width here.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from itertools import product
from typing import NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
from cases import slow
from fake_cuda import Synchronizations, allow_fake_cuda_tensors, backward, edge, fake_cuda, grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qattn import Solver
from qattn.kernels.gaussian import plan, prepared
from qattn.nn import QAttention, QBlock, QDiffNet, QPointTransformer, point_transformer
from qattn.nn.cells import Cells
from qattn.tiles import device

CLOUDS, HEADS, WIDTH = 2, 4, 16
LAYERS = {
    "QDiffNet": lambda **options: QDiffNet(WIDTH, 8, num_scales=HEADS, num_blocks=2, **options),
    "QAttention": lambda **options: QAttention(WIDTH, HEADS, content_dim=4, **options),
    "QBlock": lambda **options: QBlock(WIDTH, HEADS, **options),
    "QPointTransformer": lambda **options: QPointTransformer(
        WIDTH, 8, spacing=0.1, widths=(16, 32), num_blocks=(1, 1), num_heads=(HEADS, HEADS), gradient_dim=4, **options
    ),
}
OPERATORS = {"QDiffNet": 2, "QAttention": 1, "QBlock": 1, "QPointTransformer": 2}
EXTENSIONS = {"QPointTransformer": 2}  # passes from coarse levels to fine ones, without Sinkhorn


class Created(TorchDispatchMode):
    """Keeps the dtype and the size of all tensors on the device that operators return."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == "cuda":
                self.tensors.append((x.dtype, x.untyped_storage().nbytes()))
        return result


class Pass(NamedTuple):
    """Launches of our own kernels by name, and waits of the host, in a forward or a backward pass."""

    launches: Counter
    waits: int


class Step(NamedTuple):
    """A training step."""

    forward: Pass
    backward: Pass
    tensors: list


def eighths(points, mass, edge):
    """Stand in for `cells.merged`, whose sizes are numbers of the device: every eighth point is a cell."""
    B, N, _ = points.shape
    M = N // 8
    share = mass / mass.sum(-1, keepdim=True)
    return Cells(points[:, :M], mass[:, :M], torch.zeros(B, N, dtype=torch.int64, device="cuda"), share)


@pytest.fixture
def step(monkeypatch):
    """Return a function that makes a training step of a layer with N points, in float16."""
    allow_fake_cuda_tensors()
    operators = Mock()
    for module in (device, plan):
        monkeypatch.setattr(module, "why_not_installed", lambda: None)
    monkeypatch.setitem(sys.modules, "qattn.tiles.gpu.operators", operators)  # which imports Triton
    monkeypatch.setattr(point_transformer, "merged", eighths)
    monkeypatch.setattr(prepared, "kd_order", lambda points: torch.zeros(points.shape[:2], dtype=torch.int64))
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.autograd, "grad", grad)

    def launches():
        calls = operators.method_calls
        dtypes = {x.dtype for _, arguments, _ in calls for x in arguments if isinstance(x, torch.Tensor)}
        assert dtypes <= {torch.float32, torch.int32}
        operators.reset_mock()
        return Counter(name for name, _, _ in calls)

    def run(name, method, num_points, max_iter=3):
        with ExitStack() as stack:
            capability, fake_tensors, _ = fake_cuda()
            stack.enter_context(capability)
            stack.enter_context(fake_tensors)
            with torch.device("cuda"):
                layer = LAYERS[name](method=method, tol=0.0, solver=Solver(max_iter=max_iter))
            points = torch.empty(CLOUDS, num_points, 3, device="cuda")
            features = torch.empty(CLOUDS, num_points, WIDTH, device="cuda")
            waits, created = stack.enter_context(Synchronizations()), stack.enter_context(Created())
            with torch.autocast("cuda", torch.float16):
                out = layer(features, points)
                loss = out.float().square().mean()
            assert torch.float16 in {dtype for dtype, _ in created.tensors}  # else it was not cast
            forward = Pass(launches(), waits.count)
            reached = backward([loss], [torch.ones_like(loss)])
            for parameter in layer.parameters():
                assert reached[edge(parameter)].shape == parameter.shape
                assert reached[edge(parameter)].dtype == torch.float32
            return Step(forward, Pass(launches(), waits.count - forward.waits), created.tensors)

    return run


CASES = [
    ("QBlock", "exact"),
    *(
        slow(name, method)
        for name, method in product(LAYERS, ("exact", "tiles"))
        if (name, method) != ("QBlock", "exact")
    ),
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_our_own_kernels_serve_all_passes(step, name, method):
    """Points are float32 under autocast too: Sinkhorn takes lse alone, and all gradients are fused sums."""
    forward, back, _ = step(name, method, 1000)
    assert forward.launches["sum_blocks"] >= 2 * OPERATORS[name]
    assert forward.launches["attend_blocks"] >= OPERATORS[name]
    assert back.launches["differentiate_blocks"] >= 2 * OPERATORS[name]
    assert back.launches["sum_values"] >= OPERATORS[name]
    assert (forward.launches["list_near_tiles"] > 0) == (method == "tiles")


@pytest.mark.parametrize(("name", "method"), CASES)
def test_memory_grows_with_the_points_and_nothing_large_is_float64(step, name, method):
    few, many = (step(name, method, num_points).tensors for num_points in (1024, 2048))
    assert len(few) == len(many)
    assert all(large <= 2 * small for (_, small), (_, large) in zip(few, many, strict=True))
    doubles = [size for dtype, size in many if dtype == torch.float64]
    # 1/σ² is computed in float64, one for each head; and where the origin of a grid is, of coordinates.
    assert max(doubles) <= 8 * CLOUDS * (3 * 2048 if name == "QPointTransformer" else HEADS)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_host_waits_for_convergence(step, name, method):
    """The host waits once in a Sinkhorn pass. Checks of arguments and choices of dtypes add a fixed number of waits."""
    few, many = (step(name, method, 500, max_iter) for max_iter in (3, 7))
    passes = many.forward.launches["sum_blocks"] - few.forward.launches["sum_blocks"]
    assert passes == 4 * OPERATORS[name]
    assert many.forward.waits - few.forward.waits == passes
    assert many.backward.waits == few.backward.waits
    sorting = 3 if method == "tiles" else 0  # points to the host to be sorted, and the first lengths of lists back
    count = OPERATORS[name] + EXTENSIONS.get(name, 0)
    assert few.forward.waits <= few.forward.launches["sum_blocks"] + (11 + sorting) * count
    assert few.backward.waits <= 6 * count


@pytest.mark.slow
def test_the_backward_pass_of_fakes_is_that_of_torch():
    """`fake_cuda.backward` on real tensors, with the inner gradients of the implicit adjoint."""
    torch.manual_seed(0)
    layer = QBlock(8, 2, content_dim=2, tol=1e-9).double()
    loss = layer(torch.randn(1, 20, 8).double(), torch.randn(1, 20, 3).double()).square().sum()
    with patch.object(torch.autograd, "grad", grad):
        reached = backward([loss], [torch.ones_like(loss)])
    loss.backward()
    for parameter in layer.parameters():
        torch.testing.assert_close(reached[edge(parameter)], parameter.grad, rtol=1e-12, atol=1e-12)

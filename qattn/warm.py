"""Compile all loops for this machine, so that no later call waits for a compiler."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from qattn.distances import energy_distance
from qattn.kernels import GaussianKernel, MixtureKernel
from qattn.kernels.base import PointKernel
from qattn.tiles import gaussian
from qattn.tiles.order import kd_order
from qattn.tiles.tiling import Tiling
from qattn.tiles.when_to_compile import compile_at_first_call

__all__ = ["tasks"]

_NUM_POINTS, _NUM_CHANNELS, _SIGMA = 100, 3, 0.5
_MANY_POINTS = 2**15  # so many are sorted by several threads
# Loops are compiled for each of the dimensions up to 4, and once for all that are larger; the most usual come first.
_DIMENSIONS = (3, 2, 1, 4, 5)
_SORTED_DIMENSIONS = (1, 2, 4, 8)  # rows of every width for which sorting is compiled, in both dtypes


def tasks() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a function to call, for everything that qattn compiles."""
    for dtype in (torch.float32, torch.float64):
        for d in _DIMENSIONS:
            points = torch.rand(_NUM_POINTS, d, generator=torch.Generator().manual_seed(0), dtype=dtype)
            name = f"{dtype}, {d if d < _DIMENSIONS[-1] else 'more'} dimensions"
            exact = partial(GaussianKernel, method="exact", backend="native")
            yield f"all pairs, {name}", partial(_compile, _differentiate, exact, points)
            yield f"near pairs, {name}", partial(_compile, _tile, points)
        for d in _SORTED_DIMENSIONS:
            yield f"sorting, {dtype}", partial(_compile, kd_order, torch.rand(1, _MANY_POINTS, d, dtype=dtype))
        for d in (3, 4):
            points = torch.rand(_NUM_POINTS, d, generator=torch.Generator().manual_seed(0), dtype=dtype)
            yield f"distances, {dtype}", partial(_compile, _distances, points)
    points = torch.rand(_NUM_POINTS, 3, generator=torch.Generator().manual_seed(0))
    yield "mixtures", partial(_compile, _differentiate, _mixture, points)


@compile_at_first_call()
def _compile(function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)


def _differentiate(kernel: Callable[[Tensor, Tensor], PointKernel], points: Tensor) -> None:
    """Attend, with few channels, and differentiate by points and by bandwidth."""
    points, sigma = points.clone().requires_grad_(), points.new_tensor(_SIGMA, requires_grad=True)
    out, lse = kernel(points, sigma).attend(points.new_zeros(len(points)), points[:, :1].repeat(1, _NUM_CHANNELS))
    assert out is not None
    (out.sum() + lse.sum()).backward()


def _tile(points: Tensor) -> None:
    _differentiate(partial(GaussianKernel, method="tiles"), points)
    GaussianKernel(points, _SIGMA, method="tiles").attend(points.new_zeros(len(points)))  # of both rows of each pair
    tiling = Tiling(points[None], kd_order(points[None]))
    gaussian.near_tiles(tiling, tiling, None, points.new_zeros(1, len(points)), 1e-3)


def _mixture(points: Tensor, sigma: Tensor) -> MixtureKernel:
    return MixtureKernel(points, torch.full((len(points),), 0.1), sigma, method="tiles")


def _distances(points: Tensor) -> None:
    points = points.clone().requires_grad_()
    energy_distance(points, points.detach() + 1).sum().backward()

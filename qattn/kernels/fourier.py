r"""The method "fourier": a Gaussian is its own Fourier transform, so K v = Fᴴ ĝ F v by two non-uniform FFTs.

On a box with period P, exp(−½‖x − y‖²) = Σ_k ĝ_k e^{ik·(x − y)} with ĝ_k = Π_c √(2π)/P_c · exp(−½k_c²) over k ∈ 2πℤ/P.
F is a transform of type 1, from points to modes, and Fᴴ one of type 2, back; the product is symmetric and positive
definite as K is. Two real channels ride in one complex transform.

Its error is absolute, about a fraction δ of ‖w‖₂ in every row for weights w, so rows that sum to little need a smaller
δ. It is chosen from the least of a few exact rows; then each pass compares its own lowest rows with exact ones, and is
done again with more modes and digits while they differ by more than the tolerance.

Of a cloud that lies on several ranks, each transforms its own points, and the modes are added up.
"""

import math
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.backend import Engine
from qattn.attention.inputs import Inputs
from qattn.kernels.prepared import rows_of_all
from qattn.lift import centre
from qattn.ranks import ALONE, Ranks

__all__ = ["SINGLE", "Fourier", "FourierError", "first_error", "modes", "most_modes"]

DIMENSIONS = 3
_MOST = 0.01  # of the tolerance: the largest δ
_SAFETY = 0.125  # of the δ that would just do
_TIGHTER = 1 / 30
_LAST = 1e-15
_ROWS = 64  # that are compared with exact ones, and as many of the lowest
_LEAST_ROWS = 8  # of each rank
_TRANSFORMS = 8  # at a time, each on a grid of its own
SINGLE = 2e-6  # the δ from which on float32 will do


class FourierError(ValueError):
    """The method cannot reach the tolerance for these points and weights."""


def most_modes(points: int) -> int:
    """The modes that memory proportional to the points allows."""
    return max(2**22, 8 * points)


def modes(extent: list[float], error: float) -> list[int]:
    """How many modes each axis needs for points within `extent` bandwidths and an error δ."""
    reach = math.sqrt(2 * math.log(1 / error))  # K and ĝ are below the error beyond it
    return [2 * math.ceil((side + reach) * reach / (2 * math.pi)) + 1 for side in extent]


def first_error(tol: float, least: float, norm: float) -> float:
    """The δ to begin with, for rows that sum to at `least` so much and weights of a norm ‖w‖₂."""
    tol = min(tol, 1.0)
    return max(_LAST, min(_MOST * tol, _SAFETY * tol * least / norm))


class _Product:
    """K v between two clouds (N, D) and (M, D), to an error δ; its plans are kept."""

    def __init__(self, query: Tensor, key: Tensor, error: float, ranks: Ranks) -> None:
        self.error, self._ranks = error, ranks
        low, high = ranks.box(torch.cat([query, key]).double())
        reach = math.sqrt(2 * math.log(1 / error))
        self.shape = tuple(modes((high - low).tolist(), error))
        limit = most_modes(int(ranks.sum(torch.tensor(len(query) + len(key), device=key.device))) // ranks.size)
        if math.prod(self.shape) > limit:
            raise FourierError(
                f'`method="fourier"` would need {" × ".join(map(str, self.shape))} modes for these points, more than '
                f'{limit:.1e}, at an error of {error:.0e} of all weights. Take `method="tiles"` or "auto".'
            )
        self.dtype = torch.float32 if error >= SINGLE else torch.float64
        period = high - low + reach
        middle = (low + high) / 2
        self._query, self._key = (
            [c.contiguous().to(self.dtype) for c in ((x - middle) * (2 * math.pi / period)).unbind(-1)]
            for x in (query, key)
        )
        self.weights = torch.ones((), dtype=torch.float64, device=query.device)
        for side, count in zip(period.tolist(), self.shape, strict=True):
            k = 2 * math.pi / side * torch.arange(-(count // 2), count // 2 + 1, device=query.device).double()
            self.weights = self.weights[..., None] * (math.sqrt(2 * math.pi) / side * torch.exp(-0.5 * k**2))
        self.weights = self.weights.to(self.dtype)
        self._plans: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()  # a plan works in memory of its own

    def _plan(self, kind: int, transforms: int) -> Any:
        """The plan of a kind, 1 from points to modes and 2 back, for some transforms at once."""
        if (kind, transforms) not in self._plans:
            points = self._key if kind == 1 else self._query
            sign = -1 if kind == 1 else 1
            dtype = "complex64" if self.dtype == torch.float32 else "complex128"
            eps = max(10 * self.error, 1e-14)
            plan = _plan_on(points[0].device, kind, self.shape, transforms, eps, sign, dtype, len(points[0]))
            plan.setpts(*(_array(c) for c in points))
            self._plans[kind, transforms] = plan
        return self._plans[kind, transforms]

    def __call__(self, columns: Tensor) -> Tensor:
        """K v for columns v (n, M), as (n, N)."""
        n = len(columns)
        # Errors are shared by the two channels of a pair, which therefore should be of one size.
        scale = self._ranks.total(columns.square()).sqrt()[:, None]
        scale = torch.where(scale == 0, 1, scale)  # (n, 1)
        columns = (columns / scale).to(self.dtype)
        if n % 2:
            columns = torch.cat([columns, torch.zeros_like(columns[:1])])
        pairs = torch.complex(columns[0::2], columns[1::2])  # (n/2, M)
        with self._lock:
            results = torch.cat([self._transform(some.contiguous()) for some in pairs.split(_TRANSFORMS)])
        return scale * torch.stack([results.real, results.imag], dim=1).flatten(0, 1)[:n]

    def _transform(self, pairs: Tensor) -> Tensor:
        count, (M, N) = len(pairs), (len(self._key[0]), len(self._query[0]))
        spectrum = pairs.new_zeros(*((count,) if count > 1 else ()), *self.shape)
        if M:  # a plan takes no empty shard
            spectrum = torch.as_tensor(self._plan(1, count).execute(_array(pairs if count > 1 else pairs[0])))
        spectrum = self._ranks.sum(spectrum).mul_(self.weights)
        if not N:
            return pairs.new_zeros(count, 0)
        return torch.as_tensor(self._plan(2, count).execute(_array(spectrum))).reshape(count, -1)


def _plan_on(
    device: torch.device, kind: int, shape: tuple[int, ...], transforms: int, eps: float, sign: int, dtype: str, N: int
) -> Any:
    """A plan of finufft, or of cufinufft for points on CUDA."""
    if device.type == "cuda":
        from cufinufft import Plan

        stream = torch.cuda.current_stream(device)
        where = {"gpu_device_id": stream.device.index, "gpu_stream": stream.cuda_stream}
        return Plan(kind, shape, transforms, eps, sign, dtype=dtype, **where)
    from finufft import Plan

    # With many modes the transform of the finer grid is what takes time, with few the spreading to it.
    finer = 1.25 if math.prod(shape) > 0.5 * N and eps > 1e-8 else 2.0
    return Plan(kind, shape, transforms, eps, sign, dtype=dtype, nthreads=torch.get_num_threads(), upsampfac=finer)


def _array(x: Tensor) -> Any:
    """What a plan takes: an array on the CPU, the tensor itself on CUDA."""
    return x.numpy() if x.device.type == "cpu" else x


class Fourier(Engine):
    """Attention from points (B, N, D) to points (B, M, D), in units of the bandwidth; D ≤ 3.

    Args:
        query: The points that attend.
        key: The points attended to, about the same origin; the same object for a cloud and itself.
        instead: Gives another engine for what this one cannot do to the tolerance; raises by default.
        ranks: Who holds the points; each rank gives its own, about an origin that all share.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        instead: Callable[[FourierError], Engine] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._query, self._key, self._instead, self._ranks = query, key, instead, ranks
        self._products: dict[int, _Product] = {}
        self._rows = max(_LEAST_ROWS, _ROWS // ranks.size)

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    @property
    def is_sharded(self) -> bool:
        return not self._ranks.is_alone

    def centred(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return centre(query, key) if self._ranks.is_alone else (query, key)

    @cached_property
    def exchanged(self) -> "Fourier":
        if self._query is self._key:
            return self
        instead = self._instead
        other = None if instead is None else lambda error: instead(error).exchanged
        return Fourier(self._key, self._query, other, self._ranks)

    def _product(self, b: int, error: float) -> _Product:
        """The product of the cloud b to an error δ, or a smaller one that has been made before."""
        if b not in self._products or self._products[b].error > error:
            self._products[b] = _Product(self._query[b], self._key[b], error, self._ranks)
        return self._products[b]

    def attend(self, inputs: Inputs) -> Attended:
        try:
            return self._attend(inputs)
        except FourierError as error:
            if self._instead is None:
                raise
            return self._instead(error).attend(inputs)

    def _attend(self, inputs: Inputs) -> Attended:
        outs, lses = [], []
        for b in range(len(inputs.query)):
            bias = inputs.key.new_zeros(inputs.key.shape[1]) if inputs.bias is None else inputs.bias[b]
            value = None if inputs.value is None else inputs.value[b]
            out, lse = self._attend_cloud(b, bias.to(inputs.dtype), value, inputs.tol)
            outs.append(out)
            lses.append(lse)
        return Attended(None if inputs.value is None else torch.stack(outs), torch.stack(lses))  # type: ignore[arg-type]

    def _attend_cloud(self, b: int, bias: Tensor, value: Tensor | None, tol: float) -> Attended:
        """Attention of the cloud b, for bias (M,) and value (M, C)."""
        N, ranks = self._query.shape[1], self._ranks
        top = ranks.highest(bias)
        if top == -torch.inf:
            nothing = bias.new_full((N,), -torch.inf)
            return Attended(None if value is None else value.new_zeros(N, value.shape[-1]), nothing)
        weights = torch.exp(bias - top)
        columns = weights[None]
        if value is not None:
            columns = torch.cat([columns, (value.to(bias.dtype) * weights[:, None]).T])  # (1 + C, M)
        rows = self._some_rows(bias)
        exact = self._exact(b, rows, bias)
        rounding = 16 * torch.finfo(bias.dtype).eps * max(1.0, float(ranks.largest(exact.abs())))
        least, norm = -ranks.highest(-exact), ranks.total(weights.square()).sqrt()
        error = first_error(tol, float(torch.exp(least - top)), float(norm))
        while True:
            product = self._product(b, error)
            sums = product(columns).to(bias.dtype)  # (1 + C, N)
            total = sums[0].clamp(min=float(product.error * ranks.total(weights)))
            if self._query is self._key:
                total = torch.maximum(total, weights)  # what a row adds to itself
            lse = torch.log(total) + top
            lowest = self._lowest_rows(bias, lse)
            gaps = torch.cat([lse[rows] - exact, lse[lowest] - self._exact(b, lowest, bias)]).abs()
            gap = float(ranks.largest(torch.where(gaps.isnan(), torch.inf, gaps)))
            if gap <= 0.5 * tol + rounding:
                break
            error = product.error * _TIGHTER
            if error < _LAST:
                raise FourierError(
                    f'`method="fourier"` does not reach tol = {tol:.0e}: the lowest rows are off by {gap:.0e}. '
                    'Take `method="tiles"` or "auto".'
                )
        return Attended(None if value is None else (sums[1:] / total).T.to(value.dtype), lse)

    def _present(self, bias: Tensor) -> Tensor:
        """The numbers of the rows that count: for a cloud and itself, those of points that are present."""
        if self._query is self._key:
            return (bias > -torch.inf).nonzero()[:, 0]
        return torch.arange(self._query.shape[1], device=bias.device)

    def _some_rows(self, bias: Tensor) -> Tensor:
        present = self._present(bias)
        return present[:: max(1, -(-len(present) // self._rows))]

    def _lowest_rows(self, bias: Tensor, lse: Tensor) -> Tensor:
        present = self._present(bias)
        return present[lse[present].topk(min(self._rows, len(present)), largest=False).indices]

    def _exact(self, b: int, rows: Tensor, bias: Tensor) -> Tensor:
        return rows_of_all(self._ranks, self._query[b, rows].to(bias.dtype), self._key[b].to(bias.dtype), bias)

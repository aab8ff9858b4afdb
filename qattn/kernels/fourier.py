r"""The method "fourier": a Gaussian is its own Fourier transform, so K v = Fᴴ ĝ F v by two non-uniform FFTs.

On a box with period P, exp(−½‖x − y‖²) = Σ_k ĝ_k e^{ik·(x − y)} with ĝ_k = Π_c √(2π)/P_c · exp(−½k_c²) over k ∈ 2πℤ/P.
F is a transform of type 1, from points to modes, and Fᴴ one of type 2, back; the product is symmetric and positive
definite as K is. Two real channels ride in one complex transform.

Its error is absolute, about a fraction δ of ‖w‖₂ in every row for weights w, so rows that sum to little need a smaller
δ. It is chosen from the least of a few exact rows; then each pass compares its own lowest rows with exact ones, and is
done again with more modes and digits while they differ by more than the tolerance. Rows of points that have no weight
themselves may sum to anything, however little: those that are lost in the error are computed from all pairs.

Derivatives are products too, with other weights of the modes: with x = q − k,

    (k − q) K = ∇K:  i k ĝ_k        and        ‖x‖² K = ΔK + d K:  (d − ‖k‖²) ĝ_k,

so that nothing cancels, and a transform of type 1 of each column serves all of them.

Of a cloud that lies on several ranks, each transforms its own points, and the modes are added up.
"""

import math
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.backend import Derivatives, Differentiating, Engine
from qattn.attention.inputs import Inputs
from qattn.kernels.prepared import rows_attended, rows_differentiated
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
_SURE = 8.0  # times the error that rows of absent points should sum to, at least, over the tolerance
_OF_GRADIENTS = 1e-2  # of the tolerance: sums of derivatives are of numbers that cancel


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
    """K v between two clouds (N, D) and (M, D) with a bandwidth, to an error δ; its plans are kept."""

    def __init__(self, query: Tensor, key: Tensor, sigma: float, error: float, ranks: Ranks) -> None:
        self.error, self._ranks = error, ranks
        query, key = query.double(), key.double()
        corner = -ranks.highest(-torch.cat([query, key]))  # differences to it are right, wherever the cloud is
        query, key = (query - corner) / sigma, (key - corner) / sigma
        low, high = ranks.box(torch.cat([query, key]))
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
        weights = torch.ones((), dtype=torch.float64, device=query.device)
        self._frequencies = []  # k along each axis, which broadcast to the modes
        for axis, (side, count) in enumerate(zip(period.tolist(), self.shape, strict=True)):
            k = 2 * math.pi / side * torch.arange(-(count // 2), count // 2 + 1, device=query.device).double()
            weights = weights[..., None] * (math.sqrt(2 * math.pi) / side * torch.exp(-0.5 * k**2))
            self._frequencies.append(k.reshape(-1, *[1] * (len(self.shape) - 1 - axis)).to(self.dtype))
        self.weights = weights.to(self.dtype)
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

    def __call__(self, columns: Tensor, derivatives: bool = False) -> Tensor:
        """K v for columns v (n, M), as (1, n, N).

        With derivatives, Σ_j K_ij v_j (1, k_j − q_i, ‖k_j − q_i‖²) in units of the bandwidth, (2 + D, n, N).
        """
        n = len(columns)
        # Errors are shared by the two channels of a pair, which therefore should be of one size.
        scale = self._ranks.total(columns.square()).sqrt()[:, None]  # (n, 1), 0 for what stays 0
        columns = (columns / torch.where(scale == 0, 1, scale)).to(self.dtype)
        if n % 2:
            columns = torch.cat([columns, torch.zeros_like(columns[:1])])
        pairs = torch.complex(columns[0::2], columns[1::2])  # (n/2, M)
        factors = self._factors() if derivatives else [self.weights]
        with self._lock:
            parts = [self._transform(some.contiguous(), factors) for some in pairs.split(_TRANSFORMS)]
        results = torch.cat(parts, dim=1)  # (1 or 2 + D, n/2, N)
        return scale * torch.stack([results.real, results.imag], dim=2).flatten(1, 2)[:, :n]

    def _factors(self) -> list[Tensor]:
        """ĝ, i k ĝ along each axis, and (d − ‖k‖²) ĝ."""
        first = [torch.complex(torch.zeros_like(self.weights), k * self.weights) for k in self._frequencies]
        square = sum(k**2 for k in self._frequencies)
        return [self.weights, *first, (len(self.shape) - square) * self.weights]

    def _transform(self, pairs: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """The pairs (n, M) by each of the factors of the modes: (len(factors), n, N)."""
        count, (M, N) = len(pairs), (len(self._key[0]), len(self._query[0]))
        spectrum = pairs.new_zeros(*((count,) if count > 1 else ()), *self.shape)
        if M:  # a plan takes no empty shard
            spectrum = torch.as_tensor(self._plan(1, count).execute(_array(pairs if count > 1 else pairs[0])))
        spectrum = self._ranks.sum(spectrum)
        if not N:
            return pairs.new_zeros(len(factors), count, 0)
        back = self._plan(2, count)
        results = [torch.as_tensor(back.execute(_array(factor * spectrum))).reshape(count, -1) for factor in factors]
        return torch.stack(results)


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


class Fourier(Engine, Differentiating):
    """Attention from points (B, N, D) to points (B, M, D) with bandwidths (B,); D ≤ 3.

    Args:
        query: The points that attend.
        key: The points attended to; the same object for a cloud and itself.
        sigma: The bandwidths.
        instead: Gives another engine for what this one cannot do to the tolerance; raises by default.
        ranks: Who holds the points; each rank gives its own, about an origin that all share.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        sigma: Tensor,
        instead: Callable[[FourierError], Engine] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._query, self._key, self._sigma, self._instead, self._ranks = query, key, sigma.detach(), instead, ranks
        self._products: dict[tuple[int, bool], _Product] = {}
        self._rows = max(_LEAST_ROWS, _ROWS // ranks.size)

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @cached_property
    def exchanged(self) -> "Fourier":
        if self._query is self._key:
            return self
        instead = self._instead
        other = None if instead is None else lambda error: instead(error).exchanged
        return Fourier(self._key, self._query, self._sigma, other, self._ranks)

    def _product(self, b: int, error: float, is_derivative: bool) -> _Product:
        """The product of the cloud b to an error δ, or a smaller one that has been made before."""
        known = self._products.get((b, is_derivative))
        if known is None or known.error > error:
            known = _Product(self._query[b], self._key[b], float(self._sigma[b]), error, self._ranks)
            self._products[b, is_derivative] = known
        return known

    def attend(self, inputs: Inputs) -> Attended:
        try:
            return self._attend(inputs)
        except FourierError as error:
            if self._instead is None:
                raise
            return self._instead(error).attend(inputs)

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        try:
            return self._differentiate(inputs, row, column, shift)
        except FourierError as error:
            if self._instead is None:
                raise
            other = self._instead(error)
            assert isinstance(other, Differentiating)
            return other.differentiate(inputs, row, column, shift)

    def _attend(self, inputs: Inputs) -> Attended:
        outs, lses = [], []
        for b in range(len(inputs.query)):
            bias = _bias(inputs, b)
            value = None if inputs.value is None else inputs.value[b]
            out, lse = self._attend_cloud(b, bias, value, inputs.tol)
            outs.append(out)
            lses.append(lse)
        return Attended(None if inputs.value is None else torch.stack(outs), torch.stack(lses))  # type: ignore[arg-type]

    def _attend_cloud(self, b: int, bias: Tensor, value: Tensor | None, tol: float) -> Attended:
        """Attention of the cloud b, for bias (M,) and value (M, C)."""
        N = self._query.shape[1]
        if self._ranks.highest(bias) == -torch.inf:
            nothing = bias.new_full((N,), -torch.inf)
            return Attended(None if value is None else value.new_zeros(N, value.shape[-1]), nothing)
        columns = bias.new_zeros(0, len(bias)) if value is None else value.to(bias.dtype).T
        sums, lse, top, unsure = self._sums(b, bias, columns, tol, derivatives=False)
        out = None if value is None else (sums[0] / torch.exp(lse - top)).T.to(value.dtype)
        if self._ranks.maximum(torch.tensor(len(unsure), device=bias.device)):
            exact = rows_attended(self._ranks, *self._clouds(b, unsure, bias), value, bias)
            lse = lse.index_copy(0, unsure, exact.lse)
            out = None if out is None or exact.out is None else out.index_copy(0, unsure, exact.out)
        return Attended(out, lse)

    def _differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        results = []
        for b in range(len(inputs.query)):
            bias, size = _bias(inputs, b), column[b].abs().amax(-1)
            bias = bias + torch.log(size)  # weights contain the sizes of the columns
            unit = column[b] / torch.where(size > 0, size, 1)[:, None]
            results.append(self._differentiate_cloud(b, bias, row[b], unit, shift[b], inputs.tol))
        total, first, second = (torch.stack(x) for x in zip(*results, strict=True))
        scale = self._sigma.to(total)[:, None]
        return Derivatives(total, scale[..., None] * first, scale**2 * second)

    def _differentiate_cloud(
        self, b: int, bias: Tensor, row: Tensor, column: Tensor, shift: Tensor, tol: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of the cloud b, in units of the bandwidth, for columns of size 1."""
        N, D = self._query.shape[1:]
        if self._ranks.highest(bias) == -torch.inf:
            return row.new_zeros(N), row.new_zeros(N, D), row.new_zeros(N)
        sums, _, top, unsure = self._sums(b, bias, column.T, _OF_GRADIENTS * tol, derivatives=True)
        weighted = torch.einsum("nc,pcn->np", row, sums) * torch.exp(top - shift)[:, None]  # (N, 2 + D)
        if self._ranks.maximum(torch.tensor(len(unsure), device=bias.device)):
            clouds = self._clouds(b, unsure, bias)
            exact = rows_differentiated(self._ranks, *clouds, row[unsure], column, bias, shift[unsure])
            weighted = weighted.index_copy(0, unsure, exact)
        total, first, second = weighted.split([1, D, 1], dim=-1)
        return total[:, 0], first, second[:, 0]

    def _sums(
        self, b: int, bias: Tensor, columns: Tensor, tol: float, derivatives: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Products of e^{b − top} times columns (C, M): as `_Product` gives them, lse (N,), top, and unsure rows."""
        ranks = self._ranks
        top = ranks.highest(bias)
        weights = torch.exp(bias - top)
        columns = torch.cat([weights[None], columns * weights])  # (1 + C, M)
        rows = self._some_rows(bias)
        exact = self._exact(b, rows, bias)
        rounding = 16 * torch.finfo(bias.dtype).eps * max(1.0, float(ranks.largest(exact.abs())))
        least, norm = -ranks.highest(-exact), ranks.total(weights.square()).sqrt()
        error = first_error(tol, float(torch.exp(least - top)), float(norm))
        while True:
            product = self._product(b, error, derivatives)
            sums = product(columns, derivatives).to(bias.dtype)  # (1 or 2 + D, 1 + C, N)
            noise = float(product.error * ranks.total(weights))
            total = sums[0, 0].clamp(min=noise)
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
        return sums[:, 1:], lse, top, self._unsure_rows(bias, total, float(product.error * norm) / tol)

    def _present(self, bias: Tensor) -> Tensor:
        """The numbers of the rows that count: for a cloud and itself, those of points that are present."""
        if self._query is self._key:
            return (bias > -torch.inf).nonzero()[:, 0]
        return torch.arange(self._query.shape[1], device=bias.device)

    def _unsure_rows(self, bias: Tensor, total: Tensor, least: float) -> Tensor:
        """The rows of absent points that sum to less than `least`, which has been checked for none of them."""
        if self._query is not self._key:  # all rows count, and have been checked
            return torch.zeros(0, dtype=torch.long, device=bias.device)
        return ((bias == -torch.inf) & (total < _SURE * least)).nonzero()[:, 0]

    def _some_rows(self, bias: Tensor) -> Tensor:
        present = self._present(bias)
        return present[:: max(1, -(-len(present) // self._rows))]

    def _lowest_rows(self, bias: Tensor, lse: Tensor) -> Tensor:
        present = self._present(bias)
        return present[lse[present].topk(min(self._rows, len(present)), largest=False).indices]

    def _exact(self, b: int, rows: Tensor, bias: Tensor) -> Tensor:
        return rows_attended(self._ranks, *self._clouds(b, rows, bias), None, bias).lse

    def _clouds(self, b: int, rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A few queries (n, D), all keys (M, D) and the bandwidth of the cloud b."""
        return self._query[b, rows].to(bias.dtype), self._key[b].to(bias.dtype), self._sigma[b]


def _bias(inputs: Inputs, b: int) -> Tensor:
    """The bias (M,) of the cloud b, 0 by default."""
    bias = inputs.key.new_zeros(inputs.key.shape[1]) if inputs.bias is None else inputs.bias[b]
    return bias.to(inputs.dtype)

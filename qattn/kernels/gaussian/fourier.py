r"""The method "fourier": K v = Fᴴ ĝ F v with two non-uniform FFTs, as a Gaussian is its own Fourier transform.

On a box with period P, exp(−½‖x − y‖²) = Σ_k ĝ_k e^{ik·(x − y)} with ĝ_k = Π_c √(2π)/P_c · exp(−½k_c²) over k ∈ 2πℤ/P.
F is a transform of type 1, from points to modes, and Fᴴ one of type 2, from modes to points. The product is symmetric
and positive definite, as K is. One complex transform computes two real channels.

The error is absolute, about δ‖w‖₂ in every row for weights w, so rows with small sums need a smaller δ. The first δ
follows from the least of a few exact rows. Each pass then compares its lowest rows with exact ones, and is repeated
with more modes and digits while they differ by more than the tolerance. Rows of points without weight may have
arbitrarily small sums: those below the error are computed from all pairs.

Derivatives are products with other weights of the modes. With x = q − k,

    (k − q) K = ∇K:  i k ĝ_k        and        ‖x‖² K = ΔK + d K:  (d − ‖k‖²) ĝ_k,

so that nothing cancels, and one transform of type 1 per column gives all of them.

If the points are sharded, each rank transforms its own, and the modes are summed over the ranks.
"""

import math
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qattn.attended import Attended, Derivatives
from qattn.attention.engine import Differentiating, Engine
from qattn.attention.inputs import Inputs
from qattn.kernels.gaussian import exact_rows
from qattn.ranks import ALONE, Ranks

__all__ = ["SINGLE", "Fourier", "FourierError", "first_error", "modes", "most_modes"]

DIMENSIONS = 3
_MAX_ERROR = 0.01  # largest δ, as a fraction of the tolerance
_SAFETY = 0.125  # fraction of the largest δ that would suffice
_TIGHTER = 1 / 30  # factor of δ from one attempt to the next
_MIN_ERROR = 1e-15
_ROWS = 64  # rows compared with exact ones; as many again of the lowest
_MIN_ROWS = 8  # per rank
_TRANSFORMS = 8  # computed at a time, each on a grid of its own
SINGLE = 2e-6  # smallest δ that float32 reaches
_SURE = 8.0  # rows of absent points are accurate if they sum to at least this times error / tolerance
_OF_GRADIENTS = 1e-2  # fraction of the tolerance for sums of derivatives, whose terms cancel


class FourierError(ValueError):
    """The method cannot reach the tolerance for these points and weights."""


def most_modes(points: int) -> int:
    """Return the largest number of modes, in proportion to the number of points."""
    return max(2**22, 8 * points)


def modes(extent: list[float], error: float) -> list[int]:
    """Return the number of modes along each axis, for points within `extent` bandwidths and an error δ."""
    reach = math.sqrt(2 * math.log(1 / error))  # K and ĝ are below the error beyond it
    return [2 * math.ceil((side + reach) * reach / (2 * math.pi)) + 1 for side in extent]


def first_error(tol: float, least: float, norm: float) -> float:
    """Return the first δ to try, for rows whose sums are at least `least` and weights with norm ‖w‖₂."""
    tol = min(tol, 1.0)
    return max(_MIN_ERROR, min(_MAX_ERROR * tol, _SAFETY * tol * least / norm))


class _Product:
    """The map v ↦ K v between two clouds (N, D) and (M, D) with one bandwidth, to an error δ; FFT plans are cached."""

    def __init__(self, query: Tensor, key: Tensor, sigma: float, error: float, ranks: Ranks) -> None:
        self.error, self._ranks = error, ranks
        query, key = query.double(), key.double()
        corner = -ranks.highest(-torch.cat([query, key]))  # differences from it are accurate, wherever the cloud is
        query, key = (query - corner) / sigma, (key - corner) / sigma
        low, high = ranks.box(torch.cat([query, key]))
        reach = math.sqrt(2 * math.log(1 / error))
        self.shape = tuple(modes((high - low).tolist(), error))
        limit = most_modes(int(ranks.sum(torch.tensor(len(query) + len(key), device=key.device))) // ranks.size)
        if math.prod(self.shape) > limit:
            raise FourierError(
                f'`method="fourier"` would need {" × ".join(map(str, self.shape))} modes for these points, more than '
                f'{limit:.1e}, at an error of {error:.0e} of all weights. Use `method="tiles"` or "auto".'
            )
        self.dtype = torch.float32 if error >= SINGLE else torch.float64
        period = high - low + reach
        middle = (low + high) / 2
        self._query, self._key = (
            [c.contiguous().to(self.dtype) for c in ((x - middle) * (2 * math.pi / period)).unbind(-1)]
            for x in (query, key)
        )
        weights = torch.ones((), dtype=torch.float64, device=query.device)
        self._frequencies = []  # k along each axis, which broadcast to all modes
        for axis, (side, count) in enumerate(zip(period.tolist(), self.shape, strict=True)):
            k = 2 * math.pi / side * torch.arange(-(count // 2), count // 2 + 1, device=query.device).double()
            weights = weights[..., None] * (math.sqrt(2 * math.pi) / side * torch.exp(-0.5 * k**2))
            self._frequencies.append(k.reshape(-1, *[1] * (len(self.shape) - 1 - axis)).to(self.dtype))
        self.weights = weights.to(self.dtype)
        self._plans: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()  # a plan has work memory of its own

    def _plan(self, kind: Literal[1, 2], transforms: int) -> Any:
        """Return the plan of type 1, from points to modes, or 2, back, for a number of transforms at once."""
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
        """Compute K v for columns v (n, M), as (1, n, N).

        With derivatives, Σ_j K_ij v_j (1, k_j − q_i, ‖k_j − q_i‖²) in units of the bandwidth, (2 + D, n, N).
        """
        n = len(columns)
        # The two channels of a pair share their errors, and so are scaled to one size.
        scale = self._ranks.total(columns.square()).sqrt()[:, None]  # (n, 1), 0 for columns of 0
        columns = (columns / torch.where(scale == 0, 1, scale)).to(self.dtype)
        if n % 2:
            columns = torch.cat([columns, torch.zeros_like(columns[:1])])
        pairs = torch.complex(columns[0::2], columns[1::2])  # (n/2, M)
        factors = self._factors() if derivatives else [self.weights]
        with self._lock:
            parts = [self._transform(chunk.contiguous(), factors) for chunk in pairs.split(_TRANSFORMS)]
        results = torch.cat(parts, dim=1)  # (1 or 2 + D, n/2, N)
        return scale * torch.stack([results.real, results.imag], dim=2).flatten(1, 2)[:, :n]

    def _factors(self) -> list[Tensor]:
        """Compute ĝ, i k ĝ along each axis, and (d − ‖k‖²) ĝ."""
        first = [torch.complex(torch.zeros_like(self.weights), k * self.weights) for k in self._frequencies]
        square = sum(k**2 for k in self._frequencies)
        return [self.weights, *first, (len(self.shape) - square) * self.weights]

    def _transform(self, pairs: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Transform pairs (n, M) to modes, multiply by each factor, and transform back: (len(factors), n, N)."""
        count, (M, N) = len(pairs), (len(self._key[0]), len(self._query[0]))
        spectrum = pairs.new_zeros(*((count,) if count > 1 else ()), *self.shape)
        if M:  # plans do not take empty shards
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
    """Make a plan of finufft, or of cufinufft for points on CUDA."""
    if device.type == "cuda":
        from cufinufft import Plan

        stream = torch.cuda.current_stream(device)
        options = {"gpu_device_id": stream.device.index, "gpu_stream": stream.cuda_stream}
        return Plan(kind, shape, transforms, eps, sign, dtype=dtype, **options)
    from finufft import Plan

    # With many modes the FFT of the finer grid takes most of the time, with few modes the spreading to it.
    factor = 1.25 if math.prod(shape) > 0.5 * N and eps > 1e-8 else 2.0
    return Plan(kind, shape, transforms, eps, sign, dtype=dtype, nthreads=torch.get_num_threads(), upsampfac=factor)


def _array(x: Tensor) -> np.ndarray | Tensor:
    """Convert to the type that a plan takes: an array on the CPU, the tensor itself on CUDA."""
    return x.numpy() if x.device.type == "cpu" else x


class Fourier(Engine, Differentiating):
    """Attention from points (B, N, D) to points (B, M, D) with bandwidths (B,); D ≤ 3.

    Args:
        query: Points that attend.
        key: Points attended to; the same object if a cloud attends to itself.
        sigma: Bandwidths.
        ranks: Process group over which the points are sharded. Points are relative to an origin that all ranks share.
    """

    def __init__(self, query: Tensor, key: Tensor, sigma: Tensor, ranks: Ranks = ALONE) -> None:
        self._query, self._key, self._sigma, self._ranks = query, key, sigma.detach(), ranks
        self._products: dict[tuple[int, bool], _Product] = {}
        self._rows = max(_MIN_ROWS, _ROWS // ranks.size)

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @cached_property
    def transposed(self) -> "Fourier":
        return self if self._query is self._key else Fourier(self._key, self._query, self._sigma, self._ranks)

    def _product(self, b: int, error: float, is_derivative: bool) -> _Product:
        """Return the product of cloud b to an error δ; a cached one may have a smaller error."""
        product = self._products.get((b, is_derivative))
        if product is None or product.error > error:
            product = _Product(self._query[b], self._key[b], float(self._sigma[b]), error, self._ranks)
            self._products[b, is_derivative] = product
        return product

    def attend(self, inputs: Inputs) -> Attended:
        outs, lses = [], []
        for b, bias in enumerate(inputs.biases.to(inputs.dtype)):
            value = None if inputs.value is None else inputs.value[b]
            out, lse = self._cloud_attended(b, bias, value, inputs.tol, inputs.all_rows)
            outs.append(out)
            lses.append(lse)
        return Attended(None if inputs.value is None else torch.stack(outs), torch.stack(lses))  # type: ignore[arg-type]

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        results = []
        for b, bias in enumerate(inputs.biases.to(inputs.dtype)):
            size = column[b].abs().amax(-1)
            bias = bias + torch.log(size)  # weights contain the sizes of the columns
            unit = column[b] / torch.where(size > 0, size, 1)[:, None]
            results.append(self._cloud_differentiated(b, bias, row[b], unit, shift[b], inputs.tol))
        total, first, second = (torch.stack(x) for x in zip(*results, strict=True))
        scale = self._sigma.to(total)[:, None]
        return Derivatives(total, scale[..., None] * first, scale**2 * second)

    def _cloud_attended(self, b: int, bias: Tensor, value: Tensor | None, tol: float, all_rows: bool) -> Attended:
        """Attend within cloud b, for bias (M,) and value (M, C)."""
        N = self._query.shape[1]
        if self._ranks.highest(bias) == -torch.inf:
            nothing = bias.new_full((N,), -torch.inf)
            return Attended(None if value is None else value.new_zeros(N, value.shape[-1]), nothing)
        columns = bias.new_zeros(0, len(bias)) if value is None else value.to(bias.dtype).T
        sums, lse, top, unsure = self._sums(b, bias, columns, tol, derivatives=False)
        out = None if value is None else (sums[0] / torch.exp(lse - top)).T.to(value.dtype)
        if all_rows and self._ranks.maximum(torch.tensor(len(unsure), device=bias.device)):
            exact = exact_rows.attend(self._ranks, *self._clouds(b, unsure, bias), value, bias)
            lse = lse.index_copy(0, unsure, exact.lse)
            out = None if out is None or exact.out is None else out.index_copy(0, unsure, exact.out)
        return Attended(out, lse)

    def _cloud_differentiated(
        self, b: int, bias: Tensor, row: Tensor, column: Tensor, shift: Tensor, tol: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the sums of cloud b, in units of the bandwidth, for columns of size 1."""
        N, D = self._query.shape[1:]
        top = self._ranks.highest(bias)
        if not top.isfinite():  # no key at all, or a cotangent that is not finite
            fill = 0.0 if top == -torch.inf else torch.nan
            return row.new_full((N,), fill), row.new_full((N, D), fill), row.new_full((N,), fill)
        sums, _, top, unsure = self._sums(b, bias, column.T, _OF_GRADIENTS * tol, derivatives=True)
        weighted = torch.einsum("nc,pcn->np", row, sums) * torch.exp(top - shift)[:, None]  # (N, 2 + D)
        if self._ranks.maximum(torch.tensor(len(unsure), device=bias.device)):
            clouds = self._clouds(b, unsure, bias)
            exact = exact_rows.differentiate(self._ranks, *clouds, row[unsure], column, bias, shift[unsure])
            weighted = weighted.index_copy(0, unsure, exact)
        total, first, second = weighted.split([1, D, 1], dim=-1)
        return total[:, 0], first, second[:, 0]

    def _sums(
        self, b: int, bias: Tensor, columns: Tensor, tol: float, derivatives: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Apply `_Product` to e^{b − top} times columns (C, M), with top the largest bias.

        Returns:
            The products, lse (N,), top, and the indices of rows that may be inaccurate.
        """
        ranks = self._ranks
        top = ranks.highest(bias)
        weights = torch.exp(bias - top)
        columns = torch.cat([weights[None], columns * weights])  # (1 + C, M)
        rows = self._sampled_rows(bias)
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
                total = torch.maximum(total, weights)  # the term of a point itself
            lse = torch.log(total) + top
            lowest = self._lowest_rows(bias, lse)
            gaps = torch.cat([lse[rows] - exact, lse[lowest] - self._exact(b, lowest, bias)]).abs()
            gap = float(ranks.largest(torch.where(gaps.isnan(), torch.inf, gaps)))
            if gap <= 0.5 * tol + rounding:
                break
            error = product.error * _TIGHTER
            if error < _MIN_ERROR:
                raise FourierError(
                    f'`method="fourier"` does not reach tol = {tol:.0e}: the lowest rows are off by {gap:.0e}. '
                    'Use `method="tiles"` or "auto".'
                )
        return sums[:, 1:], lse, top, self._unsure_rows(bias, total, float(product.error * norm) / tol)

    def _present(self, bias: Tensor) -> Tensor:
        """Return the indices of the rows that are checked: if a cloud attends to itself, those of present points."""
        if self._query is self._key:
            return (bias > -torch.inf).nonzero()[:, 0]
        return torch.arange(self._query.shape[1], device=bias.device)

    def _unsure_rows(self, bias: Tensor, total: Tensor, least: float) -> Tensor:
        """Return the indices of absent points whose rows, which are not checked, sum to less than about `least`."""
        if self._query is not self._key:  # all rows are checked
            return torch.zeros(0, dtype=torch.long, device=bias.device)
        return ((bias == -torch.inf) & (total < _SURE * least)).nonzero()[:, 0]

    def _sampled_rows(self, bias: Tensor) -> Tensor:
        present = self._present(bias)
        return present[:: max(1, -(-len(present) // self._rows))]

    def _lowest_rows(self, bias: Tensor, lse: Tensor) -> Tensor:
        present = self._present(bias)
        return present[lse[present].topk(min(self._rows, len(present)), largest=False).indices]

    def _exact(self, b: int, rows: Tensor, bias: Tensor) -> Tensor:
        return exact_rows.attend(self._ranks, *self._clouds(b, rows, bias), None, bias).lse

    def _clouds(self, b: int, rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return some queries (n, D), all keys (M, D) and the bandwidth of cloud b."""
        return self._query[b, rows].to(bias.dtype), self._key[b].to(bias.dtype), self._sigma[b]

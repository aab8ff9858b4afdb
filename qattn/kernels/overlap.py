r"""Attention between Gaussians: the score −½ (x − y)ᵀ C⁻¹ (x − y) − ½ log det C with C = A + B.

A Gaussian is embedded as its mean and covariance: (x, v) for A = v I, (x, v_1 … v_d) for a diagonal A, and x with the
upper triangle of A, row by row, for a full one. Everything is in units of σ, and A contains ½ I, so that C ≥ I.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn._broadcasting import broadcast_shapes
from qattn._compiled import share
from qattn.attended import Attended, sized
from qattn.attention.backend import Engine
from qattn.attention.inputs import Inputs
from qattn.attention.native import LOWEST, excess, in_base_2
from qattn.attention.reference import Reference
from qattn.attention.score import Score
from qattn.tiling import FACTOR, PART, TILE, Tiling, kd_order

__all__ = ["DIMENSIONS", "NearOverlaps", "Overlap"]

DIMENSIONS = 3  # that the compiled loop takes
_CHUNKS = 16  # of tiles, for each thread
_PAIRS = 2**20  # of Gaussians whose tiles are gathered at once


@dataclass(frozen=True)
class Overlap:
    """The score of embedded Gaussians.

    Attributes:
        dims: The dimension d of the means.
        kind: "isotropic", "diagonal" or "full".
        has_determinant: Whether −½ log det C is part of it.
    """

    dims: int
    kind: str
    has_determinant: bool

    def __call__(self, query: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
        d = self.dims
        apart = [q - k for q, k in zip(query[:d], key[:d], strict=True)]
        added = [q + k for q, k in zip(query[d:], key[d:], strict=True)]
        pivots = added * d if self.kind == "isotropic" else added
        if self.kind == "full":
            apart, pivots = _eliminated(apart, added)
        form = apart[0] ** 2 / pivots[0]
        for x, pivot in zip(apart[1:], pivots[1:], strict=True):
            form = form + x**2 / pivot
        if not self.has_determinant:
            return -0.5 * form
        # One by one: the product of many pivots, or of large ones, is more than a float holds.
        log_determinant = torch.log(pivots[0]) * (d if self.kind == "isotropic" else 1)
        for pivot in pivots[1:] if self.kind != "isotropic" else ():
            log_determinant = log_determinant + torch.log(pivot)
        return -0.5 * (form + log_determinant)

    def embed(self, means: Tensor, covariances: Tensor, sigma: Tensor) -> Tensor:
        """Means (*batch, N, d) and covariances in units of σ, with a head axis before N if σ has one."""
        if self.kind == "isotropic":
            numbers, identity = covariances[..., None], covariances.new_ones(1)
        elif self.kind == "diagonal":
            numbers, identity = covariances, covariances.new_ones(self.dims)
        else:
            row, column = torch.triu_indices(self.dims, self.dims, device=covariances.device)
            both = covariances[..., row, column] + covariances[..., column, row]  # which rounding may have made differ
            numbers, identity = 0.5 * both, (row == column).to(covariances)
        if sigma.ndim:
            means, numbers, sigma = means[..., None, :, :], numbers[..., None, :, :], sigma[:, None, None]
        means, numbers = means / sigma, numbers / sigma**2 + 0.5 * identity
        batch = broadcast_shapes(means.shape[:-1], numbers.shape[:-1])
        return torch.cat([means.expand(*batch, -1), numbers.expand(*batch, -1)], dim=-1)

    def in_space(self, embedded: Tensor) -> Tensor:
        """The same as full Gaussians in three dimensions, (…, 9): axes that are missing have mean 0 and variance ½."""
        d = self.dims
        means, numbers = embedded[..., :d], embedded[..., d:]
        matrix = 0.5 * torch.eye(DIMENSIONS, dtype=embedded.dtype, device=embedded.device)
        matrix = matrix.repeat(*embedded.shape[:-1], 1, 1)
        if self.kind == "full":
            row, column = torch.triu_indices(d, d)
            matrix[..., row, column] = matrix[..., column, row] = numbers
        else:
            matrix[..., range(d), range(d)] = numbers
        row, column = torch.triu_indices(DIMENSIONS, DIMENSIONS)
        return torch.cat([pad(means, (0, DIMENSIONS - d)), matrix[..., row, column]], dim=-1)


def _eliminated(x: Sequence[Tensor], triangle: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """L⁻¹x and the pivots D of C = L D Lᵀ, given by its upper triangle: then xᵀC⁻¹x = Σ (L⁻¹x)² / D."""
    d, x = len(x), list(x)
    index = {(i, j): n for n, (i, j) in enumerate((i, j) for i in range(d) for j in range(i, d))}
    C = {(i, j): triangle[n] for (i, j), n in index.items()}
    for k in range(d):
        for i in range(k + 1, d):
            factor = C[k, i] / C[k, k]
            x[i] = x[i] - factor * x[k]
            for j in range(i, d):
                C[i, j] = C[i, j] - factor * C[k, j]
    return x, [C[k, k] for k in range(d)]


class _Cloud:
    """Gaussians (B, N, 9) in tiles, in the order of a k-d tree of their means and of how far they reach."""

    def __init__(self, gaussians: Tensor) -> None:
        means, triangle = gaussians.detach().cpu().double().split([3, 6], dim=-1)
        row, column = torch.triu_indices(3, 3)
        matrices = means.new_zeros(*means.shape, 3)
        matrices[..., row, column] = matrices[..., column, row] = triangle
        eigenvalues = torch.linalg.eigvalsh(matrices)  # (B, N, 3), rising
        order = kd_order(torch.cat([means, eigenvalues[..., -1:].sqrt()], dim=-1))
        self.tiling = Tiling(means * FACTOR, order)  # as the loops take them
        self.rows = torch.cat([self.tiling.points, self.tiling.tiled(triangle)], dim=-1)  # (B T, TILE, 9)
        self.columns = self.rows.mT.contiguous()  # (B T, 9, TILE)
        eigenvalues = self.tiling.tiled(eigenvalues)  # (B T, TILE, 3)
        self._spread, self._size = eigenvalues[..., -1], eigenvalues.prod(-1) ** (1 / 3)
        self.log_own = -0.5 * torch.log2(2 * eigenvalues).sum(-1)  # of 1 / √det C with itself, (B T, TILE)

    @cached_property
    def parts(self) -> Any:
        """What bounds the Gaussians of each part."""
        spread, size = (x.reshape(-1, PART) for x in (self._spread, self._size))
        return _nodes(self.tiling.tree.parts, spread.amax(-1), size.amin(-1))

    @cached_property
    def nodes(self) -> Any:
        """What bounds those of each tile, pair of tiles, and so on up to the whole."""
        levels = [
            torch.stack([self._spread.amax(-1), -self._size.amin(-1)], dim=-1).unflatten(0, (self.tiling.clouds, -1))
        ]
        while levels[-1].shape[1] > 1:
            last = levels[-1]
            even = torch.cat([last, last[:, -1:]], dim=1)[:, : last.shape[1] + last.shape[1] % 2]
            levels.append(even.unflatten(1, (-1, 2)).amax(2))
        spread, size = torch.cat(levels, dim=1).unbind(-1)  # (B, nodes)
        return _nodes(self.tiling.tree.nodes, spread.contiguous(), -size)


def _nodes(*tensors: Tensor) -> Any:
    from qattn.kernels._overlap import Nodes  # here, because importing Numba takes a while

    return Nodes(*(tensor.numpy() for tensor in tensors))


class NearOverlaps(Engine):
    """Attention between Gaussians that are near enough to matter: compiled on a CPU, else in torch.

    Args:
        overlap: The score.
        query: The embedded Gaussians that attend, (B, N, D).
        key: Those attended to; the same object for a mixture and itself.
    """

    def __init__(self, overlap: Overlap, query: Tensor, key: Tensor) -> None:
        self._overlap = overlap
        keys = _Cloud(overlap.in_space(key.detach()))
        self._pair = _Pair(keys if query is key else _Cloud(overlap.in_space(query.detach())), keys, overlap)

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    def attend(self, inputs: Inputs) -> Attended:
        bias = inputs.key.new_zeros(inputs.key.shape[:2]) if inputs.bias is None else inputs.bias
        if inputs.device.type != "cpu":
            return self._pair.attend_listed(inputs.query, inputs.key, inputs.value, bias, inputs.score, inputs.tol)
        # In float64: a covariance that is much longer than wide needs the digits.
        value = None if inputs.value is None else inputs.value.double()
        tensors: tuple[Tensor | None, ...] = (None, None)
        if inputs.needs_gradients:
            tensors = tuple(self._overlap.in_space(x.double()) for x in (inputs.query, inputs.key))
        out, lse = _Attend.apply(*tensors, value, bias.double(), self._pair, inputs.tol)
        return Attended(out if inputs.value is None else out.to(inputs.value.dtype), lse.to(inputs.dtype))


class _Pair:
    """Two clouds of Gaussians, the first of which attends to the second."""

    def __init__(self, query: _Cloud, key: _Cloud, overlap: Overlap) -> None:
        self.query, self.key = query, key
        self.score = Overlap(DIMENSIONS, "full", overlap.has_determinant)

    @property
    def exchanged(self) -> "_Pair":
        return _Pair(self.key, self.query, self.score)

    def _cutoff(self, beta: Tensor, tol: float, by_value: Tensor | None = None) -> Any:
        from qattn.kernels._overlap import Cutoff

        query, key = self.query, self.key
        # A row has at least what it adds to itself.
        own = key.log_own if self.score.has_determinant else torch.zeros_like(key.log_own)
        floors = (beta + own).amin(-1) if query is key else beta.new_full((len(query.rows),), -torch.inf)
        part_tops, sums = key.tiling.tops(beta)
        tops = sums
        if by_value is not None:
            part_tops, tops = key.tiling.tops(by_value)
        return Cutoff(
            tol=math.log2(tol),
            has_determinant=self.score.has_determinant,
            floors=floors.numpy(),
            queries=query.nodes,
            query_parts=query.parts,
            keys=key.nodes,
            key_parts=key.parts,
            tops=tops.numpy(),
            sums=sums.numpy(),
            part_tops=part_tops.numpy(),
            starts=key.tiling.tree.starts.numpy(),
            query_tiles=query.tiling.tiles,
        )

    def _share(self, run: Callable[[int, int], None]) -> None:
        """Runs a loop over the tiles of queries, chunk by chunk."""
        tiles = len(self.query.rows)
        chunk = -(-tiles // (_CHUNKS * torch.get_num_threads()))
        chunks = range(0, tiles, chunk)
        share(lambda begin: run(begin, min(begin + chunk, tiles)), chunks, len(chunks))

    def attend(self, value: Tensor | None, bias: Tensor, tol: float) -> Attended:
        """By the compiled loop, for value (B, M, C) and bias (B, M) in float64."""
        from qattn.attention._simd import REGISTER_BYTES
        from qattn.kernels._overlap import attend_gaussians

        query, key = self.query, self.key
        beta, top = in_base_2(key.tiling, bias)
        more = None if value is None else in_base_2(key.tiling, bias + excess(value, bias), top)[0]
        cutoff = self._cutoff(beta, tol, more)
        C, lanes = 0 if value is None else value.shape[-1], REGISTER_BYTES // beta.itemsize
        channels = -(-C // lanes) * lanes
        values = beta.new_zeros(len(key.rows), TILE, channels)
        if value is not None:
            values[..., :C] = key.tiling.tiled(value)
        lse, out = beta.new_empty(len(query.rows), TILE), beta.new_empty(len(query.rows), TILE, channels)
        tiny = key.tiling.size * 2.0 ** LOWEST[64] / torch.finfo(beta.dtype).eps
        arrays = [x.numpy() for x in (query.rows, key.columns, beta, values)]
        self._share(lambda *tiles: attend_gaussians(*arrays, cutoff, *tiles, tiny, lse.numpy(), out.numpy()))
        whole = query.tiling.untiled(lse) * math.log(2) + top
        return Attended(None if value is None else query.tiling.untiled(out[..., :C]), whole)

    def gradients(self, row: Tensor, column: Tensor, bias: Tensor, shift: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        """Σ_j s̄_ij and Σ_j s̄_ij ∂s_ij, (B, N) and (B, N, 9), with s̄_ij = e^{s_ij + b_j − shift_i} row_i · column_j."""
        from qattn.kernels._overlap import add_gradients

        query, key = self.query, self.key
        beta, top = in_base_2(key.tiling, bias)
        cutoff = self._cutoff(beta + torch.log2(key.tiling.tiled(column).abs().amax(-1)), tol)
        shifts = query.tiling.tiled((shift - top) / math.log(2))
        rows, columns = query.tiling.tiled(row), key.tiling.tiled(column).mT.contiguous()
        result = beta.new_empty(len(query.rows), TILE, 10)
        arrays = [x.numpy() for x in (query.rows, shifts, rows, key.columns, beta, columns)]
        self._share(lambda *tiles: add_gradients(*arrays, cutoff, *tiles, result.numpy()))
        total, means, triangle = query.tiling.untiled(result).split([1, 3, 6], dim=-1)
        # Coordinates carry a factor; what is off the diagonal stands for two entries.
        twice = triangle.new_tensor([1, 2, 2, 1, 2, 1])
        return total[..., 0], torch.cat([means / FACTOR, triangle * twice], dim=-1)

    def attend_listed(
        self, query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor, score: Score, tol: float
    ) -> Attended:
        """By the reference, on the near tiles of each tile, gathered: on any device, differentiable to any order."""
        from qattn.kernels._overlap import list_near_gaussians

        rows, columns = self.query.tiling, self.key.tiling
        cutoff = self._cutoff(in_base_2(columns, bias.detach().cpu().double())[0], tol)
        counts = torch.empty(len(self.query.rows), dtype=torch.int64)
        list_near_gaussians(cutoff, counts.numpy(), torch.empty(len(counts), 0, dtype=torch.int64).numpy())
        lists = torch.zeros(len(counts), max(1, int(counts.amax())), dtype=torch.int64)
        list_near_gaussians(cutoff, counts.numpy(), lists.numpy())

        queries, keys = rows.tiled(query), columns.tiled(key)
        values = None if value is None else columns.tiled(value)
        is_padding = torch.arange(columns.tiles * TILE, device=bias.device).expand(columns.clouds, -1) >= columns.size
        biases = torch.where(is_padding.reshape(-1, TILE), -torch.inf, columns.tiled(bias))
        by_count = torch.argsort(counts)  # so that lists of about one length are padded together
        pieces: list[Attended] = []
        begin = 0
        while begin < len(counts):
            some = by_count[begin : begin + max(1, _PAIRS // (TILE**2 * max(1, int(counts[by_count[begin]]))))]
            width = max(1, int(counts[some].amax()))
            listed = lists[some, :width].to(bias.device)  # (n, width)
            is_listed = (torch.arange(width) < counts[some, None]).to(bias.device)
            gathered = Inputs(
                queries[some.to(bias.device)],
                keys[listed].flatten(1, 2),
                None if values is None else values[listed].flatten(1, 2),
                torch.where(is_listed[..., None], biases[listed], -torch.inf).flatten(1, 2),
                score,
                tol,
                torch.Size((len(some),)),
            )
            pieces.append(Reference().attend(gathered))
            begin += len(some)
        back = torch.argsort(by_count).to(bias.device)
        lse = rows.untiled(torch.cat([piece.lse for piece in pieces])[back])
        if value is None:
            return Attended(None, lse)
        return Attended(rows.untiled(torch.cat([piece.out for piece in pieces])[back]), lse)  # type: ignore[misc]


class _Attend(torch.autograd.Function):
    """Compiled attention between Gaussians (B, N, 9) and (B, M, 9); see `attention/gradient.py` for its gradient."""

    @staticmethod
    def forward(
        query: Tensor | None, key: Tensor | None, value: Tensor | None, bias: Tensor, pair: _Pair, tol: float
    ) -> tuple[Tensor | None, Tensor]:
        return pair.attend(value, bias, tol)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor]) -> None:
        *tensors, ctx.pair, ctx.tol = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        *inputs, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: by torch
            return *_pulled_back(ctx.pair, ctx.tol, inputs, grads), None, None
        _, _, value, bias = inputs
        grad_out, grad_lse = grads
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        row, column = grad_lse[..., None], torch.ones_like(bias)[..., None]
        if grad_out is not None:
            row = torch.cat([grad_out, row - (grad_out * out).sum(-1, keepdim=True)], dim=-1)
            column = torch.cat([value, column], dim=-1)
        present = torch.where(lse == -torch.inf, -torch.inf, -lse)  # a row without keys has no weights
        absent = torch.where(bias == -torch.inf, torch.inf, -bias)  # nor has a key that is left out
        needs_query, needs_key, needs_value, needs_bias = ctx.needs_input_grad[:4]
        grad_query = grad_key = grad_value = grad_bias = None
        exchanged = ctx.pair.exchanged
        if needs_query:
            shift = torch.where(lse == -torch.inf, torch.inf, lse)
            _, grad_query = ctx.pair.gradients(row, column, bias, shift, ctx.tol)
        if needs_key or needs_bias:
            grad_bias, grad_key = exchanged.gradients(column, row, present, absent, ctx.tol)
        if needs_value and grad_out is not None:
            log_size, unit = sized(grad_out)
            means, scale = exchanged.attend(unit, present + log_size, ctx.tol)
            grad_value = torch.exp(scale + bias)[..., None] * means
        return grad_query, grad_key, grad_value, grad_bias, None, None


def _pulled_back(
    pair: _Pair, tol: float, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients by the inputs of `_Attend`, themselves differentiable."""
    query, key, value, bias = (x.view_as(x) if x is not None and x.requires_grad else x for x in inputs)
    assert query is not None
    assert key is not None
    assert bias is not None
    attended = pair.attend_listed(query, key, value, bias, pair.score, tol)
    results, cotangents = zip(*((y, g) for y, g in zip(attended, grads, strict=True) if g is not None), strict=True)
    wanted = [x for x in (query, key, value, bias) if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, cotangents, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]

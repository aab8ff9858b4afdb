r"""Attention between Gaussians: the score −½ (x − y)ᵀ C⁻¹ (x − y) − ½ log det C with C = A + B.

A Gaussian is embedded as its mean and covariance: (x, v) for A = v I, (x, v_1 … v_d) for a diagonal A, and x with the
upper triangle of A, row by row, for a full one. All numbers are in units of σ, and A contains ½ I, so that C ≥ I.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn._autocast import without_autocast
from qattn._broadcasting import broadcast_shapes
from qattn._vector_jacobian import vector_jacobian
from qattn.attended import Attended, balanced
from qattn.attention.dispatch import Dispatch
from qattn.attention.engine import Engine
from qattn.attention.inputs import Inputs
from qattn.tiles.mixture import MixtureTiles, MixtureTiling
from qattn.tiles.sizes import TILE

__all__ = ["DIMENSIONS", "Kind", "NearOverlaps", "Overlap"]

Kind = Literal["isotropic", "diagonal", "full"]
DIMENSIONS = 3  # of the compiled loops
_PAIRS = 2**20  # pairs of Gaussians that are gathered at a time


@dataclass(frozen=True)
class Overlap:
    """The score of embedded Gaussians.

    Attributes:
        dims: Dimension d of the means.
        kind: Form of the covariances: "isotropic", "diagonal" or "full".
        has_determinant: Whether the score contains −½ log det C.
    """

    dims: int
    kind: Kind
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
        # A sum of logarithms: the product of many, or of large, pivots would overflow.
        log_determinant = torch.log(pivots[0]) * (d if self.kind == "isotropic" else 1)
        for pivot in pivots[1:] if self.kind != "isotropic" else ():
            log_determinant = log_determinant + torch.log(pivot)
        return -0.5 * (form + log_determinant)

    def embed(self, means: Tensor, covariances: Tensor, sigma: Tensor) -> Tensor:
        """Embed means (*batch, N, d) and covariances in units of σ, with a head axis before N if σ has one."""
        if self.kind == "isotropic":
            numbers, identity = covariances[..., None], covariances.new_ones(1)
        elif self.kind == "diagonal":
            numbers, identity = covariances, covariances.new_ones(self.dims)
        else:
            row, column = torch.triu_indices(self.dims, self.dims, device=covariances.device)
            twice = covariances[..., row, column] + covariances[..., column, row]  # they may differ by rounding
            numbers, identity = 0.5 * twice, (row == column).to(covariances)
        if sigma.ndim:
            means, numbers, sigma = means[..., None, :, :], numbers[..., None, :, :], sigma[:, None, None]
        means, numbers = means / sigma, numbers / sigma**2 + 0.5 * identity
        batch = broadcast_shapes(means.shape[:-1], numbers.shape[:-1])
        return torch.cat([means.expand(*batch, -1), numbers.expand(*batch, -1)], dim=-1)

    def in_space(self, embedded: Tensor) -> Tensor:
        """Convert to full Gaussians in three dimensions, (…, 9); missing axes get mean 0 and variance ½."""
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
    """Compute L⁻¹x and the pivots D of C = L D Lᵀ, given by its upper triangle: then xᵀC⁻¹x = Σ (L⁻¹x)² / D."""
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


class NearOverlaps(Engine):
    """Attention between Gaussians that are near enough to matter: compiled on a CPU, in torch on other devices.

    Args:
        overlap: Score of two Gaussians.
        query: Embedded Gaussians that attend, (B, N, D).
        key: Embedded Gaussians attended to; the same object if a mixture attends to itself.
    """

    def __init__(self, overlap: Overlap, query: Tensor, key: Tensor) -> None:
        self._overlap = overlap
        keys = MixtureTiling(overlap.in_space(key.detach()))
        queries = keys if query is key else MixtureTiling(overlap.in_space(query.detach()))
        self._tiles = MixtureTiles(queries, keys, overlap.has_determinant)

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    def attend(self, inputs: Inputs) -> Attended:
        if inputs.device.type != "cpu":
            return _attend_listed(self._tiles, replace(inputs, bias=inputs.biases))
        # In float64, which long and thin covariances need.
        value = None if inputs.value is None else inputs.value.double()
        tensors: tuple[Tensor | None, ...] = (None, None)
        if inputs.needs_gradients:
            tensors = tuple(self._overlap.in_space(x.double()) for x in (inputs.query, inputs.key))
        score = Overlap(DIMENSIONS, "full", self._overlap.has_determinant)
        out, lse = _Attend.apply(*tensors, value, inputs.biases.double(), self._tiles, score, inputs.tol)
        return Attended(out if inputs.value is None else out.to(inputs.value.dtype), lse.to(inputs.dtype))


def _attend_listed(tiles: MixtureTiles, inputs: Inputs) -> Attended:
    """Attend with the reference backend to the near tiles of each tile: on any device, differentiable to any order."""
    assert inputs.bias is not None
    rows, columns, device = tiles.query.tiling, tiles.key.tiling, inputs.device
    counts, lists = tiles.near_tiles(inputs.bias, inputs.tol)
    queries, keys = rows.tiled(inputs.query), columns.tiled(inputs.key)
    values = None if inputs.value is None else columns.tiled(inputs.value)
    is_padding = torch.arange(columns.tiles * TILE, device=device).expand(columns.clouds, -1) >= columns.size
    biases = torch.where(is_padding.reshape(-1, TILE), -torch.inf, columns.tiled(inputs.bias))
    by_count = torch.argsort(counts)  # lists of similar lengths are padded together
    parts: list[Attended] = []
    begin = 0
    while begin < len(counts):
        group = by_count[begin : begin + max(1, _PAIRS // (TILE**2 * max(1, int(counts[by_count[begin]]))))]
        width = max(1, int(counts[group].amax()))
        listed = lists[group, :width].to(device)  # (n, width)
        is_listed = (torch.arange(width) < counts[group, None]).to(device)
        gathered = Inputs(
            queries[group.to(device)],
            keys[listed].flatten(1, 2),
            None if values is None else values[listed].flatten(1, 2),
            torch.where(is_listed[..., None], biases[listed], -torch.inf).flatten(1, 2),
            score=inputs.score,
            tol=inputs.tol,
        )
        parts.append(Dispatch("reference").attend(gathered))
        begin += len(group)
    order = torch.argsort(by_count).to(device)
    lse = rows.untiled(torch.cat([part.lse for part in parts])[order])
    if inputs.value is None:
        return Attended(None, lse)
    return Attended(rows.untiled(torch.cat([part.out for part in parts])[order]), lse)  # type: ignore[misc]


class _Attend(torch.autograd.Function):
    """Compiled attention between Gaussians (B, N, 9) and (B, M, 9); see `attention/gradient.py` for the gradient."""

    @staticmethod
    def forward(
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        bias: Tensor,
        tiles: MixtureTiles,
        score: Overlap,
        tol: float,
    ) -> tuple[Tensor | None, Tensor]:
        return tiles.attend(value, bias, tol)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor]) -> None:
        *tensors, ctx.tiles, ctx.score, ctx.tol = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # in torch, to be differentiated again

            def attend(query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor) -> tuple[Tensor, ...]:
                attended = _attend_listed(ctx.tiles, Inputs(query, key, value, bias, score=ctx.score, tol=ctx.tol))
                return tuple(y for y, g in zip(attended, grads, strict=True) if g is not None)  # type: ignore[misc]

            return *vector_jacobian(attend, inputs, tuple(g for g in grads if g is not None)), None, None, None
        _, _, value, bias = inputs
        grad_out, grad_lse = grads
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        row, column = grad_lse[..., None], torch.ones_like(bias)[..., None]
        if grad_out is not None:
            row = torch.cat([grad_out, row - (grad_out * out).sum(-1, keepdim=True)], dim=-1)
            column = torch.cat([value, column], dim=-1)
        # Rows without keys have no weights.
        shift = torch.where(lse == -torch.inf, torch.inf, lse)
        needs_query, needs_key, needs_value, needs_bias = ctx.needs_input_grad[:4]
        num_values = grad_out.shape[-1] if needs_value and grad_out is not None else 0
        row, column, size = balanced(row, column)
        by_row, by_column, values = ctx.tiles.differentiate(
            row, column, bias, shift, ctx.tol, by_column=needs_key or needs_bias, num_values=num_values
        )
        grad_query = by_row[..., 1:] if needs_query else None
        grad_key = by_column[..., 1:] if needs_key else None
        grad_bias = by_column[..., 0] if needs_bias else None
        grad_value = None if values is None else values / size
        return grad_query, grad_key, grad_value, grad_bias, None, None, None

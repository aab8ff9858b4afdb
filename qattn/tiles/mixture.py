"""Attention between Gaussians in tiles, and sums of its derivatives over pairs, in float64.

A Gaussian is given by nine numbers, its mean and the upper triangle of its covariance in three dimensions. The score of
two Gaussians is −½ δᵀ C⁻¹ δ − ½ log det C, with δ the difference of the means and C the sum of the covariances.
"""

import math
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.tiles.order import kd_order
from qattn.tiles.pairs import both_sides, rounds
from qattn.tiles.sizes import PART, TILE
from qattn.tiles.threads import even_chunks, share
from qattn.tiles.tiling import FACTOR, Tiling, Weights, excess
from qattn.tiles.when_to_compile import Loop

if TYPE_CHECKING:
    from qattn.tiles.loops.cutoff import MixtureCutoff, Nodes

__all__ = ["LOOP", "MixtureTiles", "MixtureTiling"]

LOOP = Loop("mixture", torch.float64)


class MixtureTiling:
    """Gaussians (B, N, 9) in tiles, in the order of a k-d tree of their means and largest standard deviations."""

    def __init__(self, gaussians: Tensor) -> None:
        means, triangle = gaussians.detach().cpu().double().split([3, 6], dim=-1)
        row, column = torch.triu_indices(3, 3)
        matrices = means.new_zeros(*means.shape, 3)
        matrices[..., row, column] = matrices[..., column, row] = triangle
        eigenvalues = torch.linalg.eigvalsh(matrices)  # (B, N, 3), rising
        order = kd_order(torch.cat([means, eigenvalues[..., -1:].sqrt()], dim=-1))
        self.tiling = Tiling(means * FACTOR, order)  # with the factor, e^(−½x²) is 2^(−x²)
        self.rows = torch.cat([self.tiling.points, self.tiling.rows(triangle)], dim=-1)  # (B T, TILE, 9)
        self.columns = self.rows.mT.contiguous()  # (B T, 9, TILE)
        eigenvalues = self.tiling.rows(eigenvalues)  # (B T, TILE, 3)
        self._spread, self._size = eigenvalues[..., -1], eigenvalues.prod(-1) ** (1 / 3)
        self.log_own = -0.5 * torch.log2(2 * eigenvalues).sum(-1)  # log₂(1 / √det C) with itself, (B T, TILE)

    @cached_property
    def parts(self) -> "Nodes":
        """Bounds of the Gaussians of each part."""
        spread, size = (x.reshape(-1, PART) for x in (self._spread, self._size))
        return _nodes(self.tiling.tree.parts, spread.amax(-1), size.amin(-1))

    @cached_property
    def nodes(self) -> "Nodes":
        """Bounds of the Gaussians of each tile, of each pair of tiles, and so on up to the cloud."""
        levels = [
            torch.stack([self._spread.amax(-1), -self._size.amin(-1)], dim=-1).unflatten(0, (self.tiling.clouds, -1))
        ]
        while levels[-1].shape[1] > 1:
            last = levels[-1]
            even = torch.cat([last, last[:, -1:]], dim=1)[:, : last.shape[1] + last.shape[1] % 2]
            levels.append(even.unflatten(1, (-1, 2)).amax(2))
        spread, size = torch.cat(levels, dim=1).flatten(0, 1).unbind(-1)
        return _nodes(self.tiling.tree.nodes.flatten(0, 1), spread.contiguous(), -size)


def _nodes(*tensors: Tensor) -> "Nodes":
    from qattn.tiles.loops.cutoff import Nodes  # here, because importing Numba takes a while

    return Nodes(*(tensor.numpy() for tensor in tensors))


class MixtureTiles:
    """Pairs of near tiles of two clouds of Gaussians.

    Args:
        query: Gaussians that attend.
        key: Gaussians attended to; the same object if a mixture attends to itself.
        has_determinant: Whether the score contains −½ log det C.
    """

    def __init__(self, query: MixtureTiling, key: MixtureTiling, has_determinant: bool) -> None:
        self.query, self.key, self._has_determinant = query, key, has_determinant

    @property
    def transposed(self) -> "MixtureTiles":
        """The pairs with queries and keys exchanged."""
        return MixtureTiles(self.key, self.query, self._has_determinant)

    def attend(self, value: Tensor | None, bias: Tensor, tol: float) -> Attended:
        """Attend with value (B, M, C) and bias (B, M), in float64."""
        from qattn.tiles.loops import mixture, simd

        query, key = self.query, self.key
        weights = key.tiling.weights(bias)
        by_value = None if value is None else key.tiling.weights(bias + excess(value, bias), weights.top)
        cutoff, beta = self._cutoff(weights, tol, by_value), weights.beta
        C, lanes = 0 if value is None else value.shape[-1], simd.REGISTER_BYTES // beta.itemsize
        channels = -(-C // lanes) * lanes
        values = beta.new_empty(len(key.rows), TILE, 0) if value is None else key.tiling.rows(value, channels)
        lse, out = beta.new_empty(len(query.rows), TILE), beta.new_empty(len(query.rows), TILE, channels)
        tiny = key.tiling.size * 2.0 ** simd.LOWEST[64] / torch.finfo(beta.dtype).eps
        arrays = [x.numpy() for x in (query.rows, key.columns, beta, values)]
        run = partial(mixture.attend_mixtures, *arrays, cutoff, tiny, lse.numpy(), out.numpy())
        share(run, even_chunks(len(query.rows)))
        LOOP.remember()
        lse = query.tiling.untiled(lse) * math.log(2) + weights.top
        return Attended(None if value is None else query.tiling.from_rows(out)[..., :C], lse)

    def differentiate(
        self,
        row: Tensor,
        column: Tensor,
        bias: Tensor,
        shift: Tensor,
        tol: float,
        *,
        by_column: bool,
        num_values: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute sums over pairs with p_ij = e^{s_ij + b_j − shift_i} and s̄_ij = p_ij R_i · S_j, in float64.

        Args:
            row: Rows R (B, N, C).
            column: Columns S (B, M, C).
            bias: Biases (B, M).
            shift: Shifts (B, N).
            tol: Fraction of Σ_j p_ij |S_j|, and of Σ_i p_ij |R_i|, that may be left out.
            by_column: Whether sums over queries are needed too.
            num_values: Number of channels of R for which Σ_i p_ij R_i is needed.

        Returns:
            Σ_j s̄_ij (1, ∂s_ij) (B, N, 10); Σ_i s̄_ij (1, ∂s_ij) (B, M, 10), and Σ_i p_ij R_i, or None.
        """
        from qattn.tiles.loops import mixture

        query, key = self.query.tiling, self.key.tiling
        weights = key.weights(bias)
        shift = shift - weights.top
        cutoff = self._cutoff(key.weights(bias + torch.log(column.abs().amax(-1)), weights.top), tol)
        back = None
        if by_column or num_values:
            sizes = query.weights(torch.log(row.abs().amax(-1)) - shift, torch.zeros_like(weights.top))
            back = self.transposed._cutoff(sizes, tol)
        shifts = query.padded(shift / math.log(2), torch.inf)
        tensors = self.query.rows, shifts, query.rows(row), self.key.columns, weights.beta, key.columns_of(column)
        rowwise = shift.new_zeros(len(self.query.rows), TILE, 10)
        columnwise = shift.new_zeros(len(self.key.rows) if by_column else 0, 10, TILE)
        values = shift.new_zeros(len(self.key.rows) if num_values else 0, num_values, TILE)
        results = [x.numpy() for x in (rowwise, columnwise, values)]
        reach = both_sides(query, key, cutoff, back)
        run = partial(mixture.differentiate_mixtures, *(x.numpy() for x in tensors), cutoff, reach, *results)
        share(run, *rounds(query, key))
        # Coordinates contain FACTOR, and each entry off the diagonal occurs twice in the matrix.
        factors = shift.new_tensor([1, *[1 / FACTOR] * 3, 1, 2, 2, 1, 2, 1])
        return (
            factors * query.from_rows(rowwise),
            factors * key.from_rows(columnwise.mT) if by_column else None,
            key.from_rows(values.mT) if num_values else None,
        )

    def near_tiles(self, bias: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        """List the key tiles that matter to each query tile: counts (tiles,) and indices (tiles, width)."""
        from qattn.tiles.loops.cutoff import list_near_tiles

        cutoff = self._cutoff(self.key.tiling.weights(bias.detach().cpu().double()), tol)
        counts = torch.empty(len(self.query.rows), dtype=torch.int64)
        list_near_tiles(cutoff, counts.numpy(), torch.empty(len(counts), 0, dtype=torch.int64).numpy())
        lists = torch.zeros(len(counts), max(1, int(counts.amax())), dtype=torch.int64)
        list_near_tiles(cutoff, counts.numpy(), lists.numpy())
        return counts, lists

    def _cutoff(self, weights: Weights, tol: float, by_value: Weights | None = None) -> "MixtureCutoff":
        from qattn.tiles.loops.cutoff import MixtureCutoff

        query, key = self.query, self.key
        # The sum of a row is at least the term of the Gaussian itself.
        own = key.log_own if self._has_determinant else torch.zeros_like(key.log_own)
        floors = (weights.beta + own).amin(-1) if query is key else own.new_full((len(query.rows),), -torch.inf)
        tops = weights if by_value is None else by_value
        return MixtureCutoff(
            tol=math.log2(tol),
            floors=floors.numpy(),
            query_tiles=query.tiling.tiles,
            query_nodes=query.tiling.tree.nodes.shape[1],
            key_nodes=key.tiling.tree.nodes.shape[1],
            starts=key.tiling.tree.starts.numpy(),
            queries=query.nodes,
            query_parts=query.parts,
            keys=key.nodes,
            key_parts=key.parts,
            tops=tops.nodes().numpy(),
            part_tops=tops.parts.numpy(),
            sums=weights.nodes().numpy(),
            has_determinant=self._has_determinant,
        )

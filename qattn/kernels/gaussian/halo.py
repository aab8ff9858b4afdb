r"""The method "tiles" for a sharded cloud: a rank attends to its own keys and to a halo of near keys of other ranks.

Keys farther than R bandwidths from a row add at most e^{−R²/2} Σ_j e^{b_j} to its sum S. With a lower bound c of log S,
the floor, they may be left out for

    R²/2 ≥ log Σ_j e^{b_j} − c + log(1/tol).

Rows are grouped by the nodes of a k-d order, whose boxes all ranks know. The floor of a node is its largest lower
bound: the least b_i of the node, as each row adds to itself; or log Σ e^b over the keys in a box, minus ½ the largest
squared distance to it. Such boxes are the nodes of this rank, and one around all keys of each other rank. Their bounds
are finite also for rows of points without mass, as long as there is any mass.
"""

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn.attended import Attended, Derivatives
from qattn.attention.engine import Differentiating, Engine
from qattn.attention.gradient import derivatives
from qattn.attention.inputs import Inputs
from qattn.distributed.group import Group, pack, unpack
from qattn.kernels.gaussian.tiles import SortedCloud, Tiles
from qattn.tiles.order import kd_order
from qattn.tiles.sizes import PART
from qattn.tiles.tiling import excess

__all__ = ["Halo"]

_NODES = 256  # groups of rows per cloud
_MARGIN = 1.0  # added to the R²/2 that is needed, so that the halo can stay if the need grows by less
_CHUNK = 2**10  # points whose distances to boxes are computed at a time


class _Nodes:
    """Runs of a sorted cloud (B, N, D), and boxes around them in units of the bandwidths (B,)."""

    def __init__(self, cloud: SortedCloud, sigma: Tensor, device: torch.device) -> None:
        B, N, D = cloud.points.shape
        self.is_empty, self._order, self._run = N == 0, cloud.order.to(device), PART
        while _NODES * self._run < N:  # runs of 2^n leaves are nodes of the k-d tree
            self._run *= 2
        self.low = torch.full((B, _NODES, D), torch.inf, dtype=torch.float64, device=device)
        self.high = -self.low
        if N:
            padded = torch.arange(_NODES * self._run).clamp(max=N - 1)  # repeats the last point
            index = cloud.order[:, padded, None].expand(-1, -1, D)
            runs = cloud.points.double().gather(1, index).unflatten(1, (_NODES, self._run)).to(device)
            scale = sigma.to(device)[:, None, None]
            self.low, self.high = runs.amin(2) / scale, runs.amax(2) / scale

    def split(self, x: Tensor, fill: float) -> Tensor:
        """Reshape x (B, N) to (B, nodes, points), with `fill` in place of missing points."""
        x = x.double().gather(1, self._order)
        return pad(x, (0, _NODES * self._run - x.shape[1]), value=fill).unflatten(1, (_NODES, self._run))

    @property
    def boxes(self) -> Tensor:
        """Lower and upper corners, (B, nodes, 2, D)."""
        return torch.stack([self.low, self.high], dim=2)


class Halo(Engine, Differentiating):
    """Attention from the queries of this rank to the keys of all ranks, in tiles.

    Args:
        group: Process group over which the points are sharded.
        query: Points (B, N, D) that attend.
        key: Points attended to, relative to one origin on all ranks; the same object if a cloud attends to itself.
        sigma: Bandwidths (B,).
        backend: Backend of `Tiles`.
    """

    def __init__(self, group: Group, query: SortedCloud, key: SortedCloud, sigma: Tensor, backend: str) -> None:
        self._group, self._query, self._key, self._backend = group, query, key, backend
        self._sigma = sigma.detach().double()
        self._reach: Tensor | None = None  # (B, nodes): R²/2 of the halo
        self._outgoing: dict[int, list[Tensor]] = {}  # for each other rank and cloud, the indices of keys to send
        self._counts: dict[int, list[int]] = {}  # for each other rank and cloud, the number of keys to receive
        self._keys: list[Tensor] = []  # per cloud, local keys and then the halo
        self._tiles: list[Tiles] = []  # per cloud

    @property
    def ranks(self) -> Group:
        return self._group

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return Tiles(self._query, self._key, self._backend).not_supported_reasons(inputs)

    @cached_property
    def transposed(self) -> "Halo":
        if self._query is self._key:
            return self
        return Halo(self._group, self._key, self._query, self._sigma, self._backend)

    def attend(self, inputs: Inputs) -> Attended:
        bias = inputs.biases
        more = None if inputs.value is None else excess(inputs.value, bias, self._group)
        is_absent = self._reached(inputs, bias, bias if more is None else bias + more)
        parts = [bias[..., None], *([] if inputs.value is None else [inputs.value])]
        N, C = inputs.query.shape[1], inputs.channels
        empty = Attended(
            None if inputs.value is None else inputs.value.new_zeros(1, N, C),
            inputs.query.new_full((1, N), -torch.inf, dtype=inputs.dtype),
        )
        results = [
            self._attended(b, inputs, *rows) if self._query.points.shape[1] and not is_absent[b] else empty
            for b, rows in enumerate(self._with_halo(parts))
        ]
        outs = None if inputs.value is None else torch.cat([result.out for result in results])  # type: ignore[misc]
        return Attended(outs, torch.cat([result.lse for result in results]))

    def can_differentiate(self, inputs: Inputs) -> bool:
        return True

    def is_direct(self, inputs: Inputs) -> bool:
        # Ranks may have different devices, but need one answer.
        is_direct = Tiles(self._query, self._key, self._backend).can_differentiate(inputs)
        return not self._group.any(not is_direct, inputs.device)

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        bias = inputs.biases
        sized = bias + torch.log(column.abs().amax(-1))
        is_absent = self._reached(inputs, sized, sized)
        results = Derivatives(torch.zeros_like(shift), torch.zeros_like(inputs.query), torch.zeros_like(shift))
        for b, (biases, columns) in enumerate(self._with_halo([bias[..., None], column])):
            if self._query.points.shape[1] and not is_absent[b]:
                local = self._local(b, inputs, biases, None)
                sums = derivatives(self._tiles[b], local, row[b : b + 1], columns[None], shift[b : b + 1])
                for result, part in zip(results, sums, strict=True):
                    result[b] = part[0]
        return results

    def _reached(self, inputs: Inputs, bias: Tensor, most: Tensor) -> list[bool]:
        """Grow the halo if needed: row sums have the weights e^bias, the cut-off uses the larger weights e^most.

        Returns:
            For each cloud, whether it has no keys on any rank.
        """
        needed, is_absent = self._needed(bias, most, 0.5 * inputs.tol)
        grows = self._reach is None or bool((needed > self._reach).any())
        if self._group.any(grows, inputs.device):
            self._grow(needed, inputs.key)
        return is_absent

    def _attended(self, b: int, inputs: Inputs, bias: Tensor, value: Tensor | None = None) -> Attended:
        """Attend within cloud b to local keys and the halo, with bias (M, 1) and value (M, C)."""
        return self._tiles[b].attend(self._local(b, inputs, bias, value))

    def _local(self, b: int, inputs: Inputs, bias: Tensor, value: Tensor | None) -> Inputs:
        query, key = inputs.query[b : b + 1], self._keys[b][None]
        values, sigma = None if value is None else value[None], self._sigma[b : b + 1]
        return Inputs(query, key, values, bias[None, :, 0], sigma, tol=0.5 * inputs.tol)

    @cached_property
    def _nodes(self) -> tuple[_Nodes, _Nodes]:
        """Nodes of the queries and of the keys."""
        key = _Nodes(self._key, self._sigma, self._device)
        return key if self._query is self._key else _Nodes(self._query, self._sigma, self._device), key

    @cached_property
    def _boxes(self) -> list[Tensor]:
        """Boxes around the nodes of the queries of each rank, (B, nodes, 2, D)."""
        return self._group.gathered(self._nodes[0].boxes)

    @cached_property
    def _roots(self) -> Tensor:
        """Boxes around all keys of each rank, (B, ranks, 2, D)."""
        nodes = self._nodes[1]
        return torch.stack(self._group.gathered(torch.stack([nodes.low.amin(1), nodes.high.amax(1)], dim=1)), dim=1)

    def _needed(self, bias: Tensor, most: Tensor, tol: float) -> tuple[Tensor, list[bool]]:
        """Compute R²/2 for each node of queries, (B, nodes), and whether each cloud has no keys on any rank."""
        self._device = bias.device
        query, key = self._nodes
        sums = key.split(bias, -torch.inf).logsumexp(-1)  # (B, nodes)
        sums_of_ranks = torch.stack(self._group.gathered(sums.logsumexp(-1)), dim=1)  # (B, ranks)
        total = sums_of_ranks.logsumexp(-1)  # (B,)
        total_most = torch.stack(self._group.gathered(_log_sum(most)), dim=1).logsumexp(-1)  # (B,)
        roots = self._roots
        if query.is_empty:
            needed = torch.full_like(query.low[..., 0], -torch.inf)
        else:
            floor = _floor(query, roots[:, :, 0], roots[:, :, 1], sums_of_ranks)
            floor = torch.maximum(floor, _floor(query, key.low, key.high, sums))
            if query is key:
                floor = torch.maximum(floor, key.split(bias, torch.inf).amin(-1))
            needed = total_most[:, None] - floor + math.log(1 / min(tol, 0.5))
        return torch.where((total == -torch.inf)[:, None], -torch.inf, needed), (total == -torch.inf).tolist()

    def _grow(self, needed: Tensor, key: Tensor) -> None:
        """Exchange a halo with at least this reach, and sort it together with the local keys."""
        self._reach = needed + _MARGIN if self._reach is None else torch.maximum(self._reach, needed + _MARGIN)
        rank, B = self._group.rank, len(key)
        reaches = self._group.gathered(self._reach)
        others = [r for r in range(self._group.size) if r != rank]
        scaled = [key[b].double() / self._sigma[b].to(key.device) for b in range(B)]
        self._outgoing = {r: [_in_reach(scaled[b], self._boxes[r][b], reaches[r][b]) for b in range(B)] for r in others}
        sizes = [[len(self._outgoing[r][b]) if r != rank else 0 for b in range(B)] for r in range(self._group.size)]
        counts = self._group.gathered(torch.tensor(sizes, device=key.device))  # one (ranks, B) per rank
        self._counts = {r: counts[r][rank].tolist() for r in others}
        self._keys = [rows[0] for rows in self._with_halo([key])]
        self._tiles = []
        for b, points in enumerate(self._keys):
            points = points[None].cpu()
            query = SortedCloud(self._query.points[b : b + 1], self._query.order[b : b + 1])
            self._tiles.append(Tiles(query, SortedCloud(points, kd_order(points)), self._backend, is_strict=False))

    def _with_halo(self, parts: list[Tensor]) -> list[list[Tensor]]:
        """Append the rows of the halo to rows of local keys, parts (B, M, w): for each cloud, tensors (M', w)."""
        widths, dtypes = [x.shape[-1] for x in parts], [x.dtype for x in parts]
        outgoing = {
            r: pack(*(torch.cat([x[b, index] for b, index in enumerate(indices)]) for x in parts))
            for r, indices in self._outgoing.items()
        }
        width = sum(w * dtype.itemsize for w, dtype in zip(widths, dtypes, strict=True))
        incoming = {
            r: torch.empty(sum(counts), width, dtype=torch.uint8, device=parts[0].device)
            for r, counts in self._counts.items()
        }
        self._group.end_exchange(self._group.begin_exchange(outgoing, incoming))
        arrived = [
            [x.split(self._counts[r]) for x in unpack(rows, widths, dtypes)] for r, rows in sorted(incoming.items())
        ]
        return [
            [torch.cat([x[b], *(columns[n][b] for columns in arrived)]) for n, x in enumerate(parts)]
            for b in range(len(parts[0]))
        ]


def _log_sum(bias: Tensor) -> Tensor:
    """Compute log Σ e^b over (B, M) in float64; −inf if M = 0."""
    return bias.double().logsumexp(-1) if bias.shape[-1] else bias.new_full((len(bias),), -torch.inf).double()


def _floor(nodes: _Nodes, low: Tensor, high: Tensor, sums: Tensor) -> Tensor:
    """Bound the log of all row sums in each node from below, by boxes (B, n, D) of keys with log-sums (B, n)."""
    span = torch.maximum(nodes.high[:, :, None] - low[:, None], high[:, None] - nodes.low[:, :, None])
    return (sums[:, None] - 0.5 * span.square().sum(-1)).amax(-1)  # (B, nodes)


def _in_reach(points: Tensor, boxes: Tensor, reach: Tensor) -> Tensor:
    """Find the points (M, D) with ½ distance² to one of the boxes (n, 2, D) within its reach (n,); return indices."""

    def is_near(x: Tensor, low: Tensor, high: Tensor, reach: Tensor) -> Tensor:
        gap = torch.maximum(low - x[:, None], x[:, None] - high).clamp(min=0)  # (m, n, D)
        return (0.5 * gap.square().sum(-1) <= reach).any(-1)

    low, high = boxes.unbind(1)
    box_of_all = low.amin(0, keepdim=True), high.amax(0, keepdim=True), reach.amax(0, keepdim=True)
    chunks = []
    for first in range(0, len(points), _CHUNK):
        x = points[first : first + _CHUNK].double()
        candidates = is_near(x, *box_of_all).nonzero()[:, 0]  # most points are far from all boxes
        chunks.append(first + candidates[is_near(x[candidates], low, high, reach)])
    return torch.cat([torch.arange(0, device=points.device), *chunks])

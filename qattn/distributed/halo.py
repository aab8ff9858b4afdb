r"""The method "tiles" for a sharded cloud: a rank attends to its own keys and to a halo, those of others in its reach.

Keys beyond a distance R of a row, in bandwidths, add at most e^{−R²/2} Σ_j e^{b_j} to its sum S. With a floor c under
log S, they may be left out for

    R²/2 ≥ log Σ_j e^{b_j} − c + log(1/tol).

Rows are taken together in the nodes of a k-d order, whose boxes all ranks know. The floor of a node is what each row
adds to itself, the least b_i of the node, or what is within some other box at the most: b-weighted sums of the nodes
of this rank, and of all of every other one, at the largest distance of the boxes. The latter is finite for rows of
points without mass too, as long as there is any mass.
"""

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from qattn.attended import Attended
from qattn.attention.backend import Derivatives, Differentiating, Engine
from qattn.attention.inputs import Inputs
from qattn.attention.native import excess
from qattn.attention.score import gaussian
from qattn.distributed.group import Group, pack, unpack
from qattn.kernels.tiles import SortedCloud, Tiles
from qattn.tiling import PART, kd_order

__all__ = ["Halo"]

_NODES = 256  # of each cloud, in which rows are taken together
_MARGIN = 1.0  # by which R²/2 exceeds what is needed: while it does, the halo need not be found again
_CHUNK = 2**10  # points whose distances to boxes are computed at a time


class _Nodes:
    """Runs of a sorted cloud (B, N, D), and boxes about them in units of the bandwidths (B,); none if it is empty."""

    def __init__(self, cloud: SortedCloud, sigma: Tensor, device: torch.device) -> None:
        B, N, D = cloud.points.shape
        self.is_empty, self._order, self._run = N == 0, cloud.order.to(device), PART
        while _NODES * self._run < N:  # a power of two of leaves, which is a node of the k-d tree
            self._run *= 2
        self.low = torch.full((B, _NODES, D), torch.inf, dtype=torch.float64, device=device)
        self.high = -self.low
        if N:
            last = torch.arange(_NODES * self._run).clamp(max=N - 1)  # the last point repeated
            index = cloud.order[:, last, None].expand(-1, -1, D)
            runs = cloud.points.double().gather(1, index).unflatten(1, (_NODES, self._run)).to(device)
            scale = sigma.to(device)[:, None, None]
            self.low, self.high = runs.amin(2) / scale, runs.amax(2) / scale

    def split(self, x: Tensor, filling: float) -> Tensor:
        """x (B, N) as (B, nodes, points), with something in the place of points that are missing."""
        x = x.double().gather(1, self._order)
        return pad(x, (0, _NODES * self._run - x.shape[1]), value=filling).unflatten(1, (_NODES, self._run))

    @property
    def boxes(self) -> Tensor:
        """(B, nodes, 2, D)."""
        return torch.stack([self.low, self.high], dim=2)


class Halo(Engine, Differentiating):
    """Attention from the queries of this rank to the keys of all, in tiles.

    Args:
        group: The ranks.
        query: The points (B, N, D) that attend.
        key: The points attended to, about the same origin on all ranks; the same object for a cloud and itself.
        sigma: The bandwidths (B,).
        backend: That of `Tiles`.
    """

    def __init__(self, group: Group, query: SortedCloud, key: SortedCloud, sigma: Tensor, backend: str) -> None:
        self._group, self._query, self._key, self._backend = group, query, key, backend
        self._sigma = sigma.detach().double()
        self._reach: Tensor | None = None  # (B, nodes): R²/2 of the halo
        self._wanted: dict[int, list[Tensor]] = {}  # for each other rank and cloud, the numbers of keys that it needs
        self._counts: dict[int, list[int]] = {}  # and how many of that rank this one needs
        self._keys: list[Tensor] = []  # of each cloud, those here and those of the halo
        self._tiles: list[Tiles] = []

    @property
    def ranks(self) -> Group:
        return self._group

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return Tiles(self._query, self._key, self._backend).not_supported_reasons(inputs)

    @cached_property
    def exchanged(self) -> "Halo":
        if self._query is self._key:
            return self
        return Halo(self._group, self._key, self._query, self._sigma, self._backend)

    def attend(self, inputs: Inputs) -> Attended:
        bias = inputs.key.new_zeros(inputs.key.shape[:2]) if inputs.bias is None else inputs.bias
        more = None if inputs.value is None else excess(inputs.value, bias, self._group)
        is_absent = self._reached(inputs, bias, bias if more is None else bias + more)
        parts = [bias[..., None], *([] if inputs.value is None else [inputs.value])]
        found = [
            self._attended(b, inputs, *rows) if self._query.points.shape[1] and not is_absent[b] else None
            for b, rows in enumerate(self._with_halo(parts))
        ]
        N, C = inputs.query.shape[1], inputs.channels
        nothing = Attended(
            None if inputs.value is None else inputs.value.new_zeros(1, N, C),
            inputs.query.new_full((1, N), -torch.inf, dtype=inputs.dtype),
        )
        results = [nothing if one is None else one for one in found]
        outs = None if inputs.value is None else torch.cat([one.out for one in results])  # type: ignore[misc]
        return Attended(outs, torch.cat([one.lse for one in results]))

    def can_differentiate(self, inputs: Inputs) -> bool:
        return Tiles(self._query, self._key, self._backend).can_differentiate(inputs)

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        bias = inputs.key.new_zeros(inputs.key.shape[:2]) if inputs.bias is None else inputs.bias
        sized = bias + torch.log(column.abs().amax(-1))
        is_absent = self._reached(inputs, sized, sized)
        found = Derivatives(torch.zeros_like(shift), torch.zeros_like(inputs.query), torch.zeros_like(shift))
        for b, (biases, columns) in enumerate(self._with_halo([bias[..., None], column])):
            if self._query.points.shape[1] and not is_absent[b]:
                local = self._local(b, inputs, biases, None)
                sums = self._tiles[b].differentiate(local, row[b : b + 1], columns[None], shift[b : b + 1])
                for whole, part in zip(found, sums, strict=True):
                    whole[b] = part[0]
        return found

    def _reached(self, inputs: Inputs, bias: Tensor, most: Tensor) -> list[bool]:
        """Finds a halo for keys that count for e^most where sums are of e^bias; which clouds have no keys at all."""
        needed, is_absent = self._needed(bias, most, 0.5 * inputs.tol)
        grows = self._reach is None or bool((needed > self._reach).any())
        if self._group.maximum(torch.tensor(float(grows), device=inputs.device)) > 0:
            self._grow(needed, inputs.key)
        return is_absent

    def _attended(self, b: int, inputs: Inputs, bias: Tensor, value: Tensor | None = None) -> Attended:
        """Attention of the cloud b to keys here and in the halo, with bias (M, 1) and value (M, C)."""
        return self._tiles[b].attend(self._local(b, inputs, bias, value))

    def _local(self, b: int, inputs: Inputs, bias: Tensor, value: Tensor | None) -> Inputs:
        query, key = inputs.query[b : b + 1], self._keys[b][None]
        values, sigma = None if value is None else value[None], self._sigma[b : b + 1]
        return Inputs(query, key, values, bias[None, :, 0], gaussian, 0.5 * inputs.tol, query.shape[:1], sigma)

    @cached_property
    def _nodes(self) -> tuple[_Nodes, _Nodes]:
        """Those of the queries and of the keys."""
        key = _Nodes(self._key, self._sigma, self._device)
        return key if self._query is self._key else _Nodes(self._query, self._sigma, self._device), key

    @cached_property
    def _boxes(self) -> list[Tensor]:
        """Those about the queries of each rank, (B, nodes, 2, D)."""
        return self._group.gathered(self._nodes[0].boxes)

    @cached_property
    def _roots(self) -> Tensor:
        """Those about all keys of each rank, (B, ranks, 2, D)."""
        nodes = self._nodes[1]
        return torch.stack(self._group.gathered(torch.stack([nodes.low.amin(1), nodes.high.amax(1)], dim=1)), dim=1)

    def _needed(self, bias: Tensor, most: Tensor, tol: float) -> tuple[Tensor, list[bool]]:
        """R²/2 for each node of queries, (B, nodes), and which clouds have no keys on any rank."""
        self._device = bias.device
        query, key = self._nodes
        tops = key.split(bias, -torch.inf).logsumexp(-1)  # (B, nodes)
        all_tops = torch.stack(self._group.gathered(tops.logsumexp(-1)), dim=1)  # (B, ranks)
        total = all_tops.logsumexp(-1)  # (B,)
        count = torch.stack(self._group.gathered(_log_sum(most)), dim=1).logsumexp(-1)  # (B,)
        roots = self._roots
        if query.is_empty:
            needed = torch.full_like(query.low[..., 0], -torch.inf)
        else:
            floor = _least(query, roots[:, :, 0], roots[:, :, 1], all_tops)
            floor = torch.maximum(floor, _least(query, key.low, key.high, tops))
            if query is key:
                floor = torch.maximum(floor, key.split(bias, torch.inf).amin(-1))
            needed = count[:, None] - floor + math.log(1 / min(tol, 0.5))
        return torch.where((total == -torch.inf)[:, None], -torch.inf, needed), (total == -torch.inf).tolist()

    def _grow(self, needed: Tensor, key: Tensor) -> None:
        """Finds a halo for at least this reach, and sorts it with the keys that are here."""
        self._reach = needed + _MARGIN if self._reach is None else torch.maximum(self._reach, needed + _MARGIN)
        rank, B = self._group.rank, len(key)
        reaches = self._group.gathered(self._reach)
        others = [r for r in range(self._group.size) if r != rank]
        scaled = [key[b].double() / self._sigma[b].to(key.device) for b in range(B)]
        self._wanted = {r: [_in_reach(scaled[b], self._boxes[r][b], reaches[r][b]) for b in range(B)] for r in others}
        sizes = [[len(self._wanted[r][b]) if r != rank else 0 for b in range(B)] for r in range(self._group.size)]
        counts = self._group.gathered(torch.tensor(sizes, device=key.device))  # of each rank, (ranks, B)
        self._counts = {r: counts[r][rank].tolist() for r in others}
        self._keys = [rows[0] for rows in self._with_halo([key])]
        self._tiles = []
        for b, points in enumerate(self._keys):
            points = points[None].cpu()
            query = SortedCloud(self._query.points[b : b + 1], self._query.order[b : b + 1])
            self._tiles.append(Tiles(query, SortedCloud(points, kd_order(points)), self._backend))

    def _with_halo(self, parts: list[Tensor]) -> list[list[Tensor]]:
        """Rows of keys, parts (B, M, w), with those of the halo behind them: for each cloud, tensors (M', w)."""
        widths, dtypes = [x.shape[-1] for x in parts], [x.dtype for x in parts]
        outgoing = {
            r: pack(*(torch.cat([x[b, index] for b, index in enumerate(wanted)]) for x in parts))
            for r, wanted in self._wanted.items()
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
    """log Σ e^b of (B, M) in float64; −inf of none."""
    return bias.double().logsumexp(-1) if bias.shape[-1] else bias.new_full((len(bias),), -torch.inf).double()


def _least(nodes: _Nodes, low: Tensor, high: Tensor, tops: Tensor) -> Tensor:
    """A floor under the log of the sums of all rows in each node: what boxes (B, n, D) add with log-sums (B, n)."""
    span = torch.maximum(nodes.high[:, :, None] - low[:, None], high[:, None] - nodes.low[:, :, None])
    return (tops[:, None] - 0.5 * span.square().sum(-1)).amax(-1)  # (B, nodes)


def _in_reach(points: Tensor, boxes: Tensor, reach: Tensor) -> Tensor:
    """The numbers of points (M, D) of which ½ distance² to one of the boxes (n, 2, D) is within its reach (n,)."""

    def is_near(x: Tensor, low: Tensor, high: Tensor, reach: Tensor) -> Tensor:
        gap = torch.maximum(low - x[:, None], x[:, None] - high).clamp(min=0)  # (m, n, D)
        return (0.5 * gap.square().sum(-1) <= reach).any(-1)

    low, high = boxes.unbind(1)
    whole = low.amin(0, keepdim=True), high.amax(0, keepdim=True), reach.amax(0, keepdim=True)
    chunks = []
    for first in range(0, len(points), _CHUNK):
        x = points[first : first + _CHUNK].double()
        some = is_near(x, *whole).nonzero()[:, 0]  # most are far from all of them
        chunks.append(first + some[is_near(x[some], low, high, reach)])
    return torch.cat([torch.arange(0, device=points.device), *chunks])

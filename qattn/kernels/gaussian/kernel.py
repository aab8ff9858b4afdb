r"""The Gaussian kernel of a cloud: K_ij = exp(−‖x_i − x_j‖² / 2σ²)."""

from typing import Any, Literal

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import Index, broadcast_shapes, own_index
from qattn._types import ArrayLike
from qattn.attended import Attended
from qattn.attention.api import BackendName
from qattn.attention.batched import attend_batched
from qattn.attention.dispatch import Dispatch
from qattn.attention.score import Score, gaussian
from qattn.distributed.group import Group, GroupLike
from qattn.kernels.base import PointKernel
from qattn.kernels.gaussian import exact_rows
from qattn.kernels.gaussian.cost import Choice, Workload
from qattn.kernels.gaussian.plan import Plan
from qattn.kernels.gaussian.prepared import PreparedPoints, with_heads
from qattn.ranks import Ranks, kind_of_rows

__all__ = ["GaussianKernel", "MethodName", "describe_sigma"]

MethodName = Literal["auto", "exact", "tiles", "fourier"]


class GaussianKernel(PointKernel):
    r"""K_ij = exp(−‖x_i − x_j‖² / 2σ²), symmetric and positive definite.

    The points are all in this process, or sharded over the ranks of a `torch.distributed` group. In the latter case
    each rank passes the positions, masses, signals and biases of its shard, and gets results at its points. `sinkhorn`,
    `diffusion` and the layers compute the same as for the entire cloud, gradients included. A shard of the points gets
    the gradient of the sum of the losses of all ranks. A parameter that all ranks share, such as σ, gets the part of
    this rank: sum these parts, or average them as DDP does. All ranks must call the same functions in the same order
    with the same options; options that differ raise an error that names them. Properties and printing do not
    communicate; methods do.

    Args:
        points: Positions x of shape (*batch, N, d). Integers are converted. With `group`, the shard of this rank, whose
            N may differ and be 0; or a DTensor sharded along its points, which implies its group.
        sigma: Bandwidth σ > 0: a number, or H numbers, which give a head axis before N.
        method: "exact" computes all pairs. "tiles" computes pairs that are near enough to matter, at any bandwidth and
            best at small ones, up to three or four dimensions. "fourier" uses non-uniform FFTs, best at large
            bandwidths, up to three dimensions. "auto" uses the cheapest for each head, see `choices`.
        tol: Largest acceptable error of lse; see `error`.
        backend: Attention backend of "exact" or "tiles"; see `qattn.backends()`.
        group: Process group over which the points are sharded, or "world" for all processes; None for local points.

    Examples:
        >>> kernel = GaussianKernel(torch.randn(100, 3), sigma=[0.1, 0.2])
        >>> kernel.shape
        torch.Size([2, 100, 100])
        >>> print(*kernel.choices(), sep="\n")
          exact  all 1.0e+04 pairs: few, other methods not compared   ← taken
          exact  all 1.0e+04 pairs: few, other methods not compared   ← taken
    """

    def __init__(
        self,
        points: ArrayLike,
        sigma: ArrayLike,
        *,
        method: MethodName = "auto",
        tol: float = 1e-3,
        backend: BackendName = "auto",
        group: GroupLike = None,
    ) -> None:
        self._ranks = Group.of(group, points)
        local = self._ranks.local_part("points", points, -2)
        self._points = self._targets = _checks.points("points", local, least=int(self._ranks.is_alone))
        self._sigma = _checks.bandwidth(sigma, self._points)
        self._method, self._tol, self._backend, self._workload = method, tol, backend, Workload()
        if not self._ranks.is_alone:
            self._agree("GaussianKernel", self._points)
        _checks.positive("`tol`", tol)
        self._prepared = PreparedPoints(self._targets, self._points, self._ranks)
        self._plan = self._new_plan()

    def _agree(self, call: str, points: Tensor) -> None:
        """Check that all ranks have points of one kind and the same options."""
        by_sigma = self._sigma.requires_grad and torch.is_grad_enabled()
        options = {
            "`sigma`": self._sigma.tolist(),
            "`method`": self._method,
            "`tol`": float(self._tol),
            "`backend`": self._backend,
            "The shape of `points`, (*batch, n, d) and with n = 0 where there are none,": kind_of_rows(points, -2),
            "The dtype of `points`": points.dtype,
            "Whether `sigma` has a gradient": by_sigma,
        }
        self._ranks.agree(call, self.device, options)

    def _new_plan(self) -> Plan:
        return Plan(self._prepared, self._sigma, self._method, self._tol, self._backend, self._workload)

    def _replanned(self, **changed: Any) -> "GaussianKernel":
        """Return a copy with other attributes and a new plan."""
        kernel = self._with(**changed)
        kernel._plan = kernel._new_plan()
        return kernel

    def __getstate__(self) -> dict[str, Any]:  # engines cannot be pickled
        return {name: value for name, value in self.__dict__.items() if name not in ("_prepared", "_plan")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepared = PreparedPoints(self._targets, self._points, self._ranks)
        self._plan = self._new_plan()

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(choice.method for choice in self._plan.known_choices)) or "auto"
        total, place = "", ""
        if not self._ranks.is_alone:
            total = f" of {sum(self._prepared.keys)} points"
            place = f", rank {self._ranks.rank} of {self._ranks.size}"
        shape, sigma = f"{tuple(self._points.shape)}{total}", describe_sigma(self._sigma)
        return f"GaussianKernel({shape}, sigma={sigma}, method={methods!r}{place})"

    def __str__(self) -> str:
        lines = [repr(self)]
        for sigma, choice in zip(self._sigma.reshape(-1).tolist(), self._plan.known_choices, strict=False):
            lines += [f"  sigma = {sigma:g}"] * self._sigma.ndim + [str(choice)]
        return "\n".join(lines)

    def _remarks(self) -> list[tuple[str, str]]:
        choices = zip(self._sigma.reshape(-1).tolist(), self._plan.known_choices, strict=False)
        return [(f"methods, σ = {sigma:g}", str(choice)) for sigma, choice in choices]

    @property
    def points(self) -> Tensor:
        """Positions x, shape (*batch, N, d); for a sharded cloud, those of this rank."""
        return self._points

    @property
    def sigma(self) -> Tensor:
        """Bandwidth σ, a scalar tensor or one of shape (H,)."""
        return self._sigma

    @property
    def tol(self) -> float:
        """Largest acceptable error of lse."""
        return self._tol

    def choices(self) -> list[Choice]:
        """Choose the method of each bandwidth before the first pass would, with a note on each candidate.

        All ranks must call it. Afterwards, `print(kernel)` shows the same.
        """
        return self._plan.choices()

    @property
    def method(self) -> MethodName | tuple[MethodName, ...]:
        """The method in use, one per head if there are heads; "auto" on several ranks before their first pass."""
        choices = self._plan.choices() if self._ranks.is_alone else self._plan.known_choices
        methods: list[MethodName] = [choice.method for choice in choices] or ["auto"] * self._sigma.numel()
        return methods[0] if self._sigma.ndim == 0 else tuple(methods)

    def diameter(self) -> float:
        """Return an upper bound of the distance between any two of its points. All ranks must call it."""
        return float(self._prepared.extent.norm())

    @property
    def shape(self) -> torch.Size:
        batch = broadcast_shapes(self._targets.shape[:-2], self._points.shape[:-2])
        return torch.Size((*batch, *self._sigma.shape, self._targets.shape[-2], self._points.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        is_self = self._targets is self._points
        return (self._points, self._sigma) if is_self else (self._points, self._sigma, self._targets)

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @property
    def mass(self) -> Tensor | None:
        """1/N per point, with N the number of points of all ranks; None for local points."""
        if self._ranks.is_alone:
            return None
        total = sum(self._prepared.keys)
        return torch.full((self._points.shape[-2],), 1 / total, dtype=self.dtype, device=self.device)

    def replace(self, *tensors: Tensor) -> "GaussianKernel":
        points, sigma = tensors[:2]
        targets = points if self._targets is self._points else tensors[2]
        changed = {"_points": points, "_sigma": sigma, "_targets": targets}
        if (points.device, points.dtype) == (self.device, self._points.dtype):
            return self._with(**changed)
        return self._replanned(**changed, _prepared=PreparedPoints(targets, points, self._ranks))

    def indexed(self, index: Index) -> "GaussianKernel":
        of_points, of_sigma = (index[:-1], index[-1:]) if self._sigma.ndim else (index, ())
        sigma = self._sigma[of_sigma]
        if all(entry == slice(None) for entry in of_points):  # heads of the same points, which are not prepared again
            return self._replanned(_sigma=sigma)
        points = self._points[own_index(of_points, self._points.shape[:-2])]
        targets = points
        if self._targets is not self._points:
            targets = self._targets[own_index(of_points, self._targets.shape[:-2])]
        prepared = PreparedPoints(targets, points, self._ranks)
        return self._replanned(_points=points, _targets=targets, _sigma=sigma, _prepared=prepared)

    def with_method(self, method: MethodName) -> "GaussianKernel":
        """Return the kernel of the same points and bandwidths, computed by another method."""
        return self._replanned(_method=method)

    def with_sigma(self, sigma: ArrayLike) -> "GaussianKernel":
        """Return the kernel with another bandwidth at the same points, which are not prepared again."""
        return self._replanned(_sigma=_checks.bandwidth(sigma, self._points))

    def share_preparation(self, other: "GaussianKernel") -> "GaussianKernel":
        """Return the same kernel with the preparation, such as the order, of another kernel of the same points."""
        return self._replanned(_prepared=other._prepared)

    def ordered_like(self, other: "GaussianKernel") -> "GaussianKernel":
        """Return the same kernel, with its points sorted in the order of another kernel of the same size.

        Tiles of points with further coordinates are then compact in the coordinates of the other kernel, and sorted
        once.
        """
        return self._replanned(_prepared=self._prepared.ordered_like(other._prepared))

    def like(self, points: Tensor, sigma: float) -> "GaussianKernel":
        """Return a Gaussian kernel of other points (N, d) on the same ranks."""
        return GaussianKernel(points, sigma, group=self._ranks)

    def for_channels(self, num_channels: int) -> "GaussianKernel":
        """Return the same kernel with the methods that are cheapest to apply repeatedly to many channels."""
        return self._replanned(_workload=Workload(sums=0, channels=num_channels))

    def at(self, points: ArrayLike) -> "GaussianKernel":
        targets = _checks.points("points", points, least=int(self._ranks.is_alone)).to(self._points)
        if not self._ranks.is_alone:
            self._agree("at", targets)
        if targets.shape[-1] != self._points.shape[-1]:
            raise ValueError(
                f"`points` should have {self._points.shape[-1]} coordinates, as the kernel's own; "
                f"got shape {tuple(targets.shape)}."
            )
        return self._replanned(_targets=targets, _prepared=PreparedPoints(targets, self._points, self._ranks))

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        parts, batch = self._plan.parts, self.shape[:-2]
        if any(not isinstance(engine, Dispatch) for _, engine in parts):
            self._check_batch(bias, batch)
        key = self._prepared.located(self._points).to(self.dtype)
        query = key if self._targets is self._points else self._prepared.located(self._targets).to(self.dtype)
        results = []
        for heads, engine in parts:
            sigma, some_bias, some_value = self._sigma, bias, value
            if heads is not None:
                sigma, some_bias = sigma[heads], bias.expand(*batch, -1).index_select(-2, heads)
            if heads is not None and value is not None:
                whole = broadcast_shapes(value.shape[:-2], batch)
                some_value = value.expand(*whole, -1, -1).index_select(-3, heads)
            keys = with_heads(key, sigma)
            queries = keys if query is key else with_heads(query, sigma)
            results.append(
                attend_batched(
                    engine, queries, keys, some_value, some_bias, sigma=sigma, tol=self._tol, all_rows=all_rows
                )
            )
        if len(parts) == 1:
            return results[0]
        back = torch.argsort(torch.cat([heads for heads, _ in parts if heads is not None]))
        lse = torch.cat([result.lse for result in results], dim=-2).index_select(-2, back)
        if value is None:
            return Attended(None, lse)
        return Attended(torch.cat([result.out for result in results], dim=-3).index_select(-3, back), lse)  # type: ignore[misc]

    def _check_batch(self, bias: Tensor, batch: torch.Size) -> None:
        """Check that engines which have been prepared for a batch are given no larger one."""
        if broadcast_shapes(bias.shape[:-1], batch) != batch:
            raise ValueError(
                f"`bias` should have the batch axes {tuple(batch)} of the kernel; got shape {tuple(bias.shape)}. "
                'Give the points those axes too, or take `method="exact"`.'
            )

    def exact_lse(self, rows: Tensor, bias: Tensor, score: Score = gaussian) -> Tensor:
        return self.exact_attend(rows, bias, None, score).lse

    def exact_attend(self, rows: Tensor, bias: Tensor, value: Tensor | None, score: Score = gaussian) -> Attended:
        """Attend from a few rows (n,) to all sites, as `exact_lse`."""
        # In plain torch, which shares no code with the method that it checks; if sharded, where ranks can communicate.
        device = torch.device("cpu") if self._ranks.is_alone else self.device
        sigma, bias, points, targets = (
            x.detach().to(device, torch.float64) for x in (self._sigma, bias, self._points, self._targets)
        )
        batch = self.shape[:-2]
        query, key = (with_heads(self._prepared.located(x), sigma) for x in (targets[..., rows.to(device), :], points))
        query, key = (x.expand(*batch, -1, -1).reshape(batch.numel(), *x.shape[-2:]) for x in (query, key))
        bias = bias.expand(*batch, -1).reshape(batch.numel(), bias.shape[-1])
        values: list[Tensor | None] = [None] * batch.numel()
        if value is not None:
            value = value.detach().to(device, torch.float64)
            values = list(value.expand(*batch, -1, -1).reshape(batch.numel(), *value.shape[-2:]))
        clouds = zip(query, key, sigma.expand(batch).reshape(-1), values, bias, strict=True)
        found = [exact_rows.attend(self._ranks, *cloud, "reference", score) for cloud in clouds]
        lse = torch.stack([one.lse for one in found]).reshape(*batch, len(rows)).cpu()
        if value is None:
            return Attended(None, lse)
        out = torch.stack([one.out for one in found if one.out is not None])
        return Attended(out.reshape(*batch, len(rows), value.shape[-1]).cpu(), lse)


def describe_sigma(sigma: Tensor) -> str:
    """Describe a bandwidth, for `repr`."""
    return f"{float(sigma.detach()):g}" if sigma.ndim == 0 else f"{len(sigma)} bandwidths"

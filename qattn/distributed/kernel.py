r"""The Gaussian kernel of a cloud that lies on several ranks."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended
from qattn.attention.backend import Engine
from qattn.distributed.group import Group
from qattn.distributed.halo import Halo
from qattn.distributed.ring import Ring
from qattn.distributed.shards import Shards
from qattn.kernels.base import GaussianPoints
from qattn.kernels.fourier import Fourier
from qattn.kernels.methods import Instead, Methods, Work
from qattn.kernels.prepared import attend_by_heads, attend_prepared, rows_attended
from qattn.kernels.sites import with_heads
from qattn.ranks import Ranks

__all__ = ["ShardedGaussian"]


class ShardedGaussian(GaussianPoints):
    r"""K_ij = exp(−‖x_i − x_j‖² / 2σ²) between the points of all ranks, of which each has a shard.

    Each rank gives the masses, signals and biases of its points, and gets results at them; shapes are those of its
    shard. What `sinkhorn`, `diffusion` and the layers do with it is what they would do with the whole cloud, gradients
    included: those by a shard of the points are of the sum of what all ranks differentiate, and those by a number that
    all share, such as σ, are each rank's part of it, to be added up, or averaged as DDP does.

    All ranks call the same functions in the same order, with the same options, and ask for the same gradients; options
    that differ are found when a kernel or an operator is made, or a signal is given, and named. Properties and printing
    need no other rank. A rank without points takes part with shards of length 0.

    Args:
        points: This rank's positions, of shape (*batch, n, d); n may differ, and be 0. Or a DTensor (*batch, N, d) that
            is sharded along its points; masses and signals may then be DTensors too, and results of such signals are.
        sigma: The bandwidth σ > 0, the same on all ranks: a number, or H numbers, which give a head axis before n.
        group: The process group; None for that of all processes, or of a DTensor. Its timeout is how long a rank waits
            for the others.
        method: "exact" computes all pairs, with blocks of points that go around the ranks; "tiles" exchanges only the
            points that are near other ranks, which are few if shards are compact; "fourier" adds up modes. "auto" takes
            the cheapest, the same on all ranks; see `GaussianKernel`.
        tol: The largest error of lse that is acceptable.
        backend: Which attention backend "exact" or "tiles" uses; see `qattn.backends()`.
    """

    def __init__(
        self,
        points: Any,
        sigma: Any,
        *,
        group: Any = None,
        method: str = "auto",
        tol: float = 1e-3,
        backend: str = "auto",
    ) -> None:
        own = _checks.own_part("points", points, -2, None)
        if own is not points and group is None:
            group = points.device_mesh.get_group()
        self._points = self._targets = _checks.points("points", own, least=0)
        self._sigma = _checks.bandwidth(sigma, self._points)
        self._method, self._tol, self._backend = method, tol, backend
        self._group = group if isinstance(group, Group) else Group(group)
        options = {"`sigma`": self._sigma.tolist(), "`method`": method, "`tol`": float(tol), "`backend`": backend}
        by_sigma = self._sigma.requires_grad and torch.is_grad_enabled()
        options |= _kind(self._points) | {"Whether `sigma` has a gradient": by_sigma}
        self._group.agree("ShardedGaussian", self.device, options)
        _checks.positive("`tol`", tol)
        self._shards = Shards(self._group, self._targets, self._points)
        self._work = Work()
        self._methods = self._make_methods()

    def _make_methods(self) -> Methods:
        make = partial(_engine, self._shards, self._backend)
        return Methods(self._shards.sites, self._sigma, self._method, self._tol, self._backend, self._work, make)

    def _with(self, **changed: Any) -> "ShardedGaussian":
        """A copy with some of its parts changed."""
        kernel = object.__new__(ShardedGaussian)
        kernel.__dict__.update(self.__dict__ | changed)
        return kernel

    def _remade(self, **changed: Any) -> "ShardedGaussian":
        """A copy that chooses its methods anew."""
        kernel = self._with(**changed)
        kernel._methods = kernel._make_methods()
        return kernel

    def __repr__(self) -> str:
        sigma = f"{float(self._sigma):g}" if self._sigma.ndim == 0 else f"{len(self._sigma)} bandwidths"
        where = f"rank {self._group.rank} of {self._group.size}"
        methods = ", ".join(dict.fromkeys(self._methods_in_use))
        return (
            f"ShardedGaussian({tuple(self._points.shape)} of {self._shards.total} points, sigma={sigma}, "
            f"method={methods!r}, {where})"
        )

    @property
    def centred(self) -> Tensor:
        return self._points - self._shards.origin.to(self._points)

    @property
    def method(self) -> str | tuple[str, ...]:
        """The method in use: a word, or one for each head; "auto" until the ranks have chosen, in their first pass."""
        methods = self._methods_in_use
        return methods[0] if self._sigma.ndim == 0 else methods

    @property
    def _methods_in_use(self) -> tuple[str, ...]:
        chosen = self._methods.chosen
        return (self._method,) * self._sigma.numel() if chosen is None else tuple(choice.method for choice in chosen)

    @property
    def group(self) -> Group:
        """The ranks, and how many bytes this one has sent."""
        return self._group

    @property
    def ranks(self) -> Ranks:
        return self._group

    @property
    def mass(self) -> Tensor:
        """1/N for each point, N the number of points of all ranks."""
        return torch.full((self._points.shape[-2],), 1 / self._shards.total, dtype=self.dtype, device=self.device)

    def replace(self, *tensors: Tensor) -> "ShardedGaussian":
        points, sigma = tensors[:2]
        targets = points if self._is_self else tensors[2]
        changed = {"_points": points, "_sigma": sigma, "_targets": targets}
        if (points.device, points.dtype) == (self.device, self._points.dtype):
            return self._with(**changed)
        return self._remade(**changed, _shards=Shards(self._group, targets, points))

    def prepared_as(self, other: "ShardedGaussian") -> "ShardedGaussian":
        return self._remade(_shards=other._shards)

    def at(self, points: Any) -> "ShardedGaussian":
        """The kernel between other points, of which each rank gives some, and those of all ranks."""
        targets = _checks.points("points", points, least=0).to(self._points)
        self._group.agree("at", self.device, _kind(targets))
        _checks.same_dimension(targets, self._points)
        return self._remade(_targets=targets, _shards=Shards(self._group, targets, self._points))

    def moved(self, points: Tensor, sigma: float) -> "ShardedGaussian":
        return ShardedGaussian(points, sigma, group=self._group)

    def for_channels(self, channels: int) -> "ShardedGaussian":
        return self._remade(_work=Work(sums=0, channels=channels))

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        return attend_by_heads(self._methods.groups, self.shape[:-2], bias, value, self._attend_by)

    def _attend_by(self, engine: Engine | None, heads: Tensor | None, bias: Tensor, value: Tensor | None) -> Attended:
        assert engine is not None
        sigma = self._sigma if heads is None else self._sigma[heads]
        return attend_prepared(engine, *self._clouds(sigma), value, bias, self._tol, sigma=sigma)

    def _clouds(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Targets (*batch, n, d) and points (*batch, m, d) about the origin of all ranks, for the heads of σ."""
        key = with_heads(self.centred.to(self.dtype), sigma)
        if self._is_self:
            return key, key
        targets = self._targets - self._shards.origin.to(self._targets)
        return with_heads(targets.to(self.dtype), sigma), key

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        # On the device of the points, where the ranks can talk, and to the CPU in the end.
        query, key, sigma, bias = (x.detach().double() for x in (*self._clouds(self._sigma), self._sigma, bias))
        batch = self.shape[:-2]
        query, key = (x.expand(*batch, -1, -1).reshape(batch.numel(), *x.shape[-2:]) for x in (query, key))
        bias = bias.expand(*batch, -1).reshape(batch.numel(), bias.shape[-1])
        sigma, rows = sigma.expand(batch).reshape(-1), rows.to(query.device)
        clouds = zip(query[:, rows], key, sigma, bias, strict=True)
        found = [rows_attended(self._group, q, k, s, None, b, "reference").lse for q, k, s, b in clouds]
        return torch.stack(found).reshape(*batch, len(rows)).cpu()


def _kind(points: Tensor) -> dict[str, object]:
    """What shards (*batch, n, d) have to have in common."""
    return {
        "The shape of `points`, (*batch, n, d) and with n = 0 where there are none,": _checks.kind_of_rows(points, -2),
        "The dtype of `points`": points.dtype,
    }


def _engine(shards: Shards, backend: str, method: str, sigma: Tensor, instead: Instead | None) -> Engine:
    """The engine of a method for some bandwidths."""
    if method == "tiles":
        return Halo(shards.group, *shards.sites.sorted(sigma), shards.sites.flat(sigma)[2], backend)
    if method == "fourier":
        return Fourier(*shards.sites.flat(sigma), instead, shards.group)
    return Ring(shards.group, shards.queries, shards.keys, backend)

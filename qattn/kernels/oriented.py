r"""The Gaussian kernel of points with normals of their surface.

    K_ij = exp(−‖x_i − x_j‖² / 2σ²) (1 + n_i · n_j) / 2

Two sheets that lie back to back, or a hand on a hip, are near in space and far along the surface. Their normals are
opposite, and K does not join them. Where a surface bends, the factor is 1 − ‖n_i − n_j‖² / 4: diffusion across the bend
is slower. Weights 0 ≤ w_i ≤ 1 say how much each normal counts,

    K_ij = exp(−‖x_i − x_j‖² / 2σ²) (c_i c_j + ½ w_i w_j n_i · n_j),        c_i = √(1 − w_i² / 2),

from the Gaussian kernel at 0 to the above at 1. The factor is the dot product of unit vectors (c_i, w_i n_i / √2), and
not negative. K is therefore positive semidefinite, by Schur's product theorem, and attention with it is Gaussian
attention to four times as many channels: with t = w n / √2c,

    Σ_j K_ij e^{b_j} v_j = c_i Σ_j exp(−‖x_i − x_j‖² / 2σ²) c_j e^{b_j} (v_j + t_i · t_j v_j).
"""

from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn._broadcasting import Index, broadcast_shapes, own_index
from qattn._types import ArrayLike
from qattn.attended import Attended
from qattn.kernels.base import PointKernel
from qattn.kernels.gaussian.kernel import GaussianKernel
from qattn.ranks import Ranks

__all__ = ["OrientedKernel"]

_SHARE = 0.25  # part of the tolerance for the Gaussian kernel, whose sums are larger where normals are opposite


class OrientedKernel(PointKernel):
    r"""K_ij = exp(−‖x_i − x_j‖² / 2σ²) (1 + n_i · n_j) / 2, symmetric and positive semidefinite.

    Args:
        points: Positions x of shape (*batch, N, d).
        normals: Normals n of the surface, of shape (*batch, N, d), all on the same side of it; see `qattn.normals`.
            They are scaled to length 1. A normal of 0 has weight 0.
        sigma: Bandwidth σ > 0: a number, or H numbers, which give a head axis before N.
        weight: How much each normal counts, from 0 to 1, of shape (*batch, N) or a number. With 0, the kernel is
            Gaussian.
        tol: Largest acceptable error of lse; see `error`.
        **options: Further arguments of `GaussianKernel`: `method`, `backend`, `group`.

    Examples:
        >>> points = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.01]])  # back to back
        >>> OrientedKernel(points, [[0.0, 0.0, -1.0], [0.0, 0.0, 1.0]], sigma=0.1).to_dense() > 1e-6
        tensor([[ True, False],
                [False,  True]])
    """

    def __init__(
        self,
        points: ArrayLike,
        normals: ArrayLike,
        sigma: ArrayLike,
        *,
        weight: ArrayLike = 1.0,
        tol: float = 1e-3,
        **options: Any,
    ) -> None:
        _checks.positive("`tol`", tol)
        self._base = GaussianKernel(points, sigma, tol=_SHARE * tol, **options)
        local = self._base.ranks.local_part("normals", normals, -2)
        self._normals = self._targets = _scaled(local, weight, self._base.points)

    def __repr__(self) -> str:
        return repr(self._base).replace("GaussianKernel", "OrientedKernel", 1)

    def __str__(self) -> str:
        return "\n".join([repr(self), *str(self._base).splitlines()[1:]])

    def _remarks(self) -> list[tuple[str, str]]:
        return self._base._remarks()

    @property
    def points(self) -> Tensor:
        """Positions x, shape (*batch, N, d)."""
        return self._base.points

    @property
    def normals(self) -> Tensor:
        """Normals times their weights, w n, shape (*batch, N, d)."""
        return self._normals

    @property
    def sigma(self) -> Tensor:
        """Bandwidth σ, a scalar tensor or one of shape (H,)."""
        return self._base.sigma

    @property
    def method(self) -> str | tuple[str, ...]:
        """The method of the Gaussian kernel in use, one per head if there are heads."""
        return self._base.method

    @property
    def shape(self) -> torch.Size:
        normals = broadcast_shapes(self._targets.shape[:-2], self._normals.shape[:-2])
        heads = (1,) * self.sigma.ndim
        return torch.Size((*broadcast_shapes((*normals, *heads), self._base.shape[:-2]), *self._base.shape[-2:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        is_self = self._targets is self._normals
        return (*self._base.tensors, self._normals) if is_self else (*self._base.tensors, self._normals, self._targets)

    def replace(self, *tensors: Tensor) -> "OrientedKernel":
        count = len(self._base.tensors)
        return self._with(_base=self._base.replace(*tensors[:count]), _normals=tensors[count], _targets=tensors[-1])

    @property
    def ranks(self) -> Ranks:
        return self._base.ranks

    @property
    def mass(self) -> Tensor | None:
        return self._base.mass

    def indexed(self, index: Index) -> "OrientedKernel":
        of_points = index[:-1] if self.sigma.ndim else index
        normals = self._normals[own_index(of_points, self._normals.shape[:-2])]
        targets = normals
        if self._targets is not self._normals:
            targets = self._targets[own_index(of_points, self._targets.shape[:-2])]
        return self._with(_base=self._base.indexed(index), _normals=normals, _targets=targets)

    def for_channels(self, num_channels: int) -> "OrientedKernel":
        """Return the same kernel with the methods that are cheapest to apply repeatedly to many channels."""
        return self._with(_base=self._base.for_channels(4 * num_channels))

    def at(self, points: ArrayLike, normals: ArrayLike | None = None) -> "OrientedKernel":
        """Return the kernel between other points (*batch, N', d) and its own.

        Args:
            points: Positions (*batch, N', d).
            normals: Their normals (*batch, N', d), of weight 1. By default, each has the normal and the weight of the
                nearest of the kernel's own points.
        """
        base = self._base.at(points)
        at = base.tensors[2] if len(base.tensors) > 2 else base.points  # its own points are no other ones
        if normals is None:
            base.ranks.check_alone("at")
            targets = _nearest(at, self.points, self._normals)
        else:
            targets = _scaled(normals, 1.0, at)
        return self._with(_base=base, _targets=targets)

    def attend(self, bias: Tensor, value: Tensor | None = None, *, all_rows: bool = True) -> Attended:
        (c_row, t_row), (c, t) = (_features(self._by_heads(x.to(self.dtype))) for x in (self._targets, self._normals))
        bias = bias + torch.log(c)
        if value is None:
            mean_t, lse = self._base.attend(bias, t, all_rows=all_rows)
            assert mean_t is not None
            return Attended(None, lse + torch.log(c_row * _part(t_row, mean_t)))
        v = value.to(torch.promote_types(value.dtype, self.dtype))
        C, d = v.shape[-1], t.shape[-1]
        products = (t[..., None] * v[..., None, :]).flatten(-2)  # (*batch, N, d C)
        v, t = (x.expand(*products.shape[:-1], -1) for x in (v, t))
        mean, lse = self._base.attend(bias, torch.cat([t, v, products], dim=-1), all_rows=all_rows)
        assert mean is not None
        mean_t, mean_v, mean_tv = mean.split([d, C, d * C], dim=-1)
        part = _part(t_row, mean_t)
        sums = mean_v + (t_row[..., None] * mean_tv.unflatten(-1, (d, C))).sum(-2)
        return Attended((sums / part[..., None]).to(value.dtype), lse + torch.log(c_row * part))

    def _by_heads(self, x: Tensor) -> Tensor:
        """Insert an axis of heads into normals (*batch, N, d), if there are heads."""
        return x[..., None, :, :] if self.sigma.ndim else x

    def exact_lse(self, rows: Tensor, bias: Tensor) -> Tensor:
        normals = (self._by_heads(x.detach().cpu().double()) for x in (self._targets, self._normals))
        (c_row, t_row), (c, t) = (_features(x) for x in normals)
        mean_t, lse = self._base.exact_attend(rows, bias.cpu().double() + torch.log(c), t)
        assert mean_t is not None
        return lse + torch.log(c_row[..., rows] * _part(t_row[..., rows, :], mean_t))


def _features(normals: Tensor) -> tuple[Tensor, Tensor]:
    """Return c (*batch, N) and t = w n / √2c (*batch, N, d), so that the factor is c_i c_j (1 + t_i · t_j)."""
    c = (1 - 0.5 * normals.square().sum(-1)).sqrt()
    return c, normals / (2**0.5 * c[..., None])


def _part(own: Tensor, mean: Tensor) -> Tensor:
    """Compute 1 + t_i · mean_i(t), from 0 to 2 and at least rounding: the factor by which normals change a row sum."""
    return (1 + (own * mean).sum(-1)).clamp(min=torch.finfo(own.dtype).eps)


def _scaled(normals: ArrayLike, weight: ArrayLike, points: Tensor) -> Tensor:
    """Check normals and weights of points (*batch, N, d), and return normals of the length of their weights."""
    n, w = _checks.floating("normals", normals), _checks.floating("weight", weight)
    if n.shape[-2:] != points.shape[-2:]:
        raise ValueError(
            f"`normals` should have shape (*batch, {points.shape[-2]}, {points.shape[-1]}), one per point; got "
            f"{_checks.shape_of(n)}. `qattn.normals(points)` estimates them."
        )
    _checks.finite("normals", n, "Points without one have a normal of 0.")
    if w.ndim and w.shape[-1:] != n.shape[-2:-1]:
        raise ValueError(
            f"`weight` should be a number or have shape (*batch, {n.shape[-2]}), one per normal; got "
            f"{_checks.shape_of(w)}."
        )
    if not ((w >= 0) & (w <= 1)).all():
        raise ValueError(
            f"`weight` should be from 0, for normals that do not count, to 1; got up to {float(w.max()):g}."
        )
    n, w = n.to(points), w.to(points)
    length = torch.linalg.vector_norm(n, dim=-1, keepdim=True)
    return w[..., None] * n / torch.where(length > 0, length, 1)


def _nearest(queries: Tensor, points: Tensor, normals: Tensor) -> Tensor:
    """Return the normals (*batch, M, d) of the points (*batch, N, d) that are nearest to queries (*batch, M, d)."""
    from scipy.spatial import cKDTree  # here, because SciPy is slow to import

    batch = broadcast_shapes(queries.shape[:-2], points.shape[:-2], normals.shape[:-2])
    q, p, n = (x.expand(*batch, -1, -1).reshape(batch.numel(), *x.shape[-2:]) for x in (queries, points, normals))
    clouds = zip(*(x.detach().cpu().double().numpy() for x in (q, p)), strict=True)
    index = [torch.from_numpy(cKDTree(own).query(new)[1]) for new, own in clouds]
    found = torch.stack([one[where.to(n.device)] for one, where in zip(n, index, strict=True)])
    return found.reshape(*batch, *found.shape[1:])

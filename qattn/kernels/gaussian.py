r"""The Gaussian kernel of a cloud: K_ij = exp(−‖x_i − x_j‖² / 2σ²), which is attention between the points x / σ."""

from typing import Any

import torch
from torch import Tensor

from qattn import _checks
from qattn.attended import Attended
from qattn.attention import attend
from qattn.kernels.base import PointKernel

__all__ = ["GaussianKernel"]


class GaussianKernel(PointKernel):
    r"""K_ij = exp(−‖x_i − x_j‖² / 2σ²), symmetric and positive definite.

    Args:
        points: Positions x of shape (*batch, N, d), a tensor or an array. Integers are converted.
        sigma: The bandwidth σ > 0: a number, or H numbers, which give a head axis before N.
        method: "exact" computes all pairs.
        tol: The largest error of lse that is acceptable of an attention backend.
        backend: Which backend attends; see `qattn.backends()`.

    Example:
        >>> kernel = GaussianKernel(torch.randn(100, 3), sigma=[0.1, 0.2])
        >>> kernel.shape
        torch.Size([2, 100, 100])
    """

    def __init__(
        self, points: Any, sigma: Any, *, method: str = "exact", tol: float = 1e-3, backend: str = "auto"
    ) -> None:
        self._points = self._targets = _checks.points("points", points)
        self._sigma = _checks.bandwidth(sigma, self._points)
        _checks.one_of("method", method, ("exact",))
        self._method, self._tol, self._backend = method, tol, backend

    def __repr__(self) -> str:
        sigma = f"{float(self._sigma):g}" if self._sigma.ndim == 0 else f"{len(self._sigma)} bandwidths"
        return f"GaussianKernel({tuple(self._points.shape)}, sigma={sigma}, method={self._method!r})"

    @property
    def points(self) -> Tensor:
        """The positions x, shape (*batch, N, d)."""
        return self._points

    @property
    def sigma(self) -> Tensor:
        """The bandwidth σ, a tensor without axes or of shape (H,)."""
        return self._sigma

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self._targets.shape[:-2], self._points.shape[:-2])
        return torch.Size((*batch, *self._sigma.shape, self._targets.shape[-2], self._points.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._points, self._targets, self._sigma

    def replace(self, *tensors: Tensor) -> "GaussianKernel":
        kernel = object.__new__(GaussianKernel)
        kernel.__dict__.update(self.__dict__)
        kernel._points, kernel._targets, kernel._sigma = tensors
        return kernel

    def at(self, points: Any) -> "GaussianKernel":
        targets = _checks.points("points", points).to(self._points)
        _checks.same_dimension(targets, self._points)
        return self.replace(self._points, targets, self._sigma)

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        return attend(
            self._scaled(self._targets),
            self._scaled(self._points),
            value,
            bias=bias,
            tol=self._tol,
            backend=self._backend,
        )

    def _scaled(self, points: Tensor) -> Tensor:
        """x / σ in the dtype of the logarithms, with the head axis if there is one."""
        points = points.to(self.dtype)
        if self._sigma.ndim == 0:
            return points / self._sigma
        return points[..., None, :, :] / self._sigma[:, None, None]  # (*batch, H, N, d)

r"""Diffusion at learned scales: Q_σ^m f, one bandwidth σ a head."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qattn import _checks
from qattn._eager import eager
from qattn.attention.dispatch import BACKENDS
from qattn.distributed import Group, ShardedGaussian
from qattn.kernels import GaussianKernel
from qattn.kernels.base import GaussianPoints
from qattn.kernels.methods import METHODS
from qattn.operators import NORMALIZATIONS, Diffusion, diffusion
from qattn.ranks import ALONE, Ranks
from qattn.solver import ADJOINTS, ITERATIONS

__all__ = ["QDiffusion"]


class QDiffusion(nn.Module):
    r"""Q_σ^m f for H learned bandwidths σ, each with its own channels of f.

    The bandwidths are stored as logarithms, `log_sigma`. Their gradients are exact: they go through the normalisation,
    by its implicit adjoint, which stores none of its steps.

    Args:
        num_scales: The number H of bandwidths.
        sigma: The least and the largest bandwidth to start from, in the unit of the points; the others lie evenly
            between them in logarithm.
        learn_sigma: Whether the bandwidths are learned; as they are, they save the better part of a backward pass.
        applications: How often the operator is applied, m.
        normalization: "sinkhorn"; "row", "symmetric" and "none" for comparison.
        adjoint: How gradients go through the normalisation: "implicit", "unroll" or "detach".
        iteration: "chebyshev" or "plain".
        tol: The mass-weighted mean of |Q1 − 1| at which normalising stops; 0 takes all of `max_iter` passes.
        max_iter: The most kernel passes of normalising; the last of them measures only.
        method: How the Gaussian kernel is computed; see `qattn.GaussianKernel`.
        backend: Which attention backend it uses; see `qattn.backends()`.
        sharded: Whether clouds lie over all ranks of `torch.distributed`, or of a process group that is given: points,
            masses and signals are then this rank's shards of them; see `qattn.distributed.ShardedGaussian`.

    The paper's setting, ten plain steps without gradients through them, is
    `QDiffusion(32, sigma=…, applications=2, adjoint="detach", iteration="plain", tol=0, max_iter=11)`.

    Example:
        >>> layer = QDiffusion(4, sigma=(0.1, 1.0))
        >>> layer(torch.randn(2, 4, 100, 8), torch.randn(2, 100, 3)).shape
        torch.Size([2, 4, 100, 8])
    """

    def __init__(
        self,
        num_scales: int,
        *,
        sigma: tuple[float, float],
        learn_sigma: bool = True,
        applications: int = 1,
        normalization: str = "sinkhorn",
        adjoint: str = "implicit",
        iteration: str = "chebyshev",
        tol: float = 1e-3,
        max_iter: int = 50,
        method: str = "auto",
        backend: str = "auto",
        sharded: Any = False,
    ) -> None:
        super().__init__()
        low, high = _checks.range_of_bandwidths(sigma)
        self.num_scales = _checks.integer("num_scales", num_scales, 1)
        self.applications = _checks.integer("applications", applications, 1)
        scales = torch.linspace(math.log(low), math.log(high), num_scales)
        self.log_sigma = nn.Parameter(scales, requires_grad=learn_sigma)
        _checks.one_of("normalization", normalization, NORMALIZATIONS)
        _checks.one_of("adjoint", adjoint, ADJOINTS)
        _checks.one_of("iteration", iteration, ITERATIONS)
        _checks.one_of("method", method, ("auto", *METHODS))
        _checks.one_of("backend", backend, ("auto", *BACKENDS))
        self._adjoint, self._method, self._sharded = adjoint, {"method": method, "backend": backend}, sharded
        self._normalizing: dict[str, Any] = {
            "normalization": normalization,
            "iteration": iteration,
            "tol": _checks.not_negative("tol", tol),
            "max_iter": _checks.integer("max_iter", max_iter, 1),
        }

    def extra_repr(self) -> str:
        low, high = self.sigma.detach().aminmax()
        return f"{self.num_scales}, sigma=({low:.3g}, {high:.3g}), applications={self.applications}"

    @property
    def sigma(self) -> Tensor:
        """The bandwidths, shape (H,)."""
        return self.log_sigma.to(torch.promote_types(self.log_sigma.dtype, torch.float32)).exp()

    @property
    def ranks(self) -> Ranks:
        """Who holds the points of a cloud."""
        return Group(None if self._sharded is True else self._sharded) if self._sharded else ALONE

    @eager
    def operator(
        self,
        points: Tensor,
        mass: Tensor | None = None,
        *,
        content: Tensor | None = None,
        near: Diffusion | None = None,
        signal: Tensor | None = None,
    ) -> Diffusion:
        r"""The operator Q of shape (*batch, H, N, N) at points (*batch, N, d).

        Args:
            points: Positions x; computed with in float32 at least, also under autocast.
            mass: Masses (*batch, N), 0 for padding; equal by default.
            content: Further coordinates c of each head, (*batch, H, N, c): K = exp(−‖x − x′‖²/2σ² − ‖c − c′‖²/2).
            near: The operator of another layer at the same points. They need not be sorted again, and normalizing
                starts from its potentials, at the nearest bandwidths. Where either layer has `content`, whose
                distances differ, only the potentials are taken over: of an operator with content, head by head.
            signal: A signal (*batch, H, N, P) to apply it to with the last pass of normalising: `applied`.
        """
        kernel, init = _kernel(points, self.sigma, content, self.ranks, **self._method), None
        if near is not None:
            other = _checks.near_operator(near, kernel, points, self.num_scales)
            has_bandwidths = other.sigma.ndim > 0  # else its points are lifted, with content
            if has_bandwidths and content is None:
                kernel = kernel.prepared_as(other)
            if near.normalization == "sinkhorn":
                init = near.potential.detach().nan_to_num(0, 0, 0)  # points without mass, out of reach
                if has_bandwidths:
                    init = _interpolated(init, other.sigma.detach(), self.sigma.detach().to(init))
        return diffusion(
            kernel, None, _for_heads(mass), init=init, signal=signal, adjoint=self._adjoint, **self._normalizing
        )

    def forward(
        self,
        signal: Tensor,
        points: Tensor,
        mass: Tensor | None = None,
        *,
        content: Tensor | None = None,
        near: Diffusion | None = None,
    ) -> Tensor:
        """The diffused signal (*batch, H, N, P), in the dtype of the signal; for the rest see `operator`."""
        return self.diffused(signal, points, mass, content=content, near=near)[0]

    @eager
    def diffused(
        self,
        signal: Tensor,
        points: Tensor,
        mass: Tensor | None = None,
        *,
        content: Tensor | None = None,
        near: Diffusion | None = None,
        gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None, Diffusion | None]:
        """The diffused signal, its gradient in space (*batch, H, N, P, d) if asked for, and the operator.

        The operator is for `near` of other layers; there is none while exporting.
        """
        _checks.heads(signal, self.num_scales, points)
        m = self.applications
        if torch.compiler.is_exporting():
            _checks.held_alone("torch.export", self.ranks)
            options = self._normalizing | self._method
            both = _diffuse(signal, points, self.sigma, mass, content, m, gradient, **options)
            return (both[..., 0], both[..., 1:], None) if gradient else (both, None, None)
        # The last pass of normalising applies the operator too; but gradients take a pass with more channels.
        fused = signal if m > gradient else None
        q = self.operator(points, mass, content=content, near=near, signal=fused)
        if not gradient:
            return q.power(m - 1, q.applied), None, q
        return *q.value_and_gradient(signal if fused is None else q.power(m - 2, q.applied)), q


def _kernel(
    points: Tensor, sigma: Tensor, content: Tensor | None, ranks: Ranks, method: str, backend: str
) -> GaussianPoints:
    kind = partial(ShardedGaussian, group=ranks) if isinstance(ranks, Group) else GaussianKernel
    x = points.to(torch.promote_types(points.dtype, torch.float32))
    sigma = sigma.to(x)
    if content is None:
        return kind(x, sigma, method=method, backend=backend)
    lifted = torch.cat([x[..., None, :, :] / sigma[:, None, None], content.to(x)], dim=-1)  # (*batch, H, N, d + c)
    return kind(lifted, 1.0, method=method, backend=backend)


def _for_heads(mass: Tensor | None) -> Tensor | None:
    """Masses (*batch, N) as (*batch, 1, N), the same for all heads."""
    return None if mass is None else mass[..., None, :]


def _interpolated(potential: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Potentials (*batch, H, N) at new bandwidths (H,), linear in log σ between those at old ones (H',)."""
    old, order = old.log().sort()
    above = torch.searchsorted(old, new.log()).clamp(max=len(old) - 1)
    below = (above - 1).clamp(min=0)
    weight = ((new.log() - old[below]) / (old[above] - old[below]).clamp(min=1e-12)).clamp(0, 1)[:, None]
    return torch.lerp(potential[..., order[below], :], potential[..., order[above], :], weight)


@torch.library.custom_op("qattn::diffuse", mutates_args=())
def _diffuse(
    signal: Tensor,
    points: Tensor,
    sigma: Tensor,
    mass: Tensor | None,
    content: Tensor | None,
    applications: int,
    gradient: bool,
    normalization: str,
    iteration: str,
    tol: float,
    max_iter: int,
    method: str,
    backend: str,
) -> Tensor:
    """Q_σ^m f, or with its gradient (…, P, 1 + d): the one operator that `torch.export` records of a diffusion.

    A program needs qattn where it runs.
    """
    kernel = _kernel(points, sigma, content, ALONE, method, backend)
    q = diffusion(
        kernel, None, _for_heads(mass), normalization=normalization, iteration=iteration, tol=tol, max_iter=max_iter
    )
    if not gradient:
        return q.power(applications, signal).contiguous()
    value, slope = q.value_and_gradient(q.power(applications - 1, signal))
    return torch.cat([value[..., None], slope], dim=-1)


@_diffuse.register_fake
def _(signal: Tensor, points: Tensor, sigma: Any, mass: Any, content: Any, m: Any, gradient: bool, *_: Any) -> Tensor:
    shape = (*signal.shape, 1 + points.shape[-1]) if gradient else signal.shape
    return torch.empty(shape, dtype=signal.dtype, device=signal.device)

r"""Diffusion at learned scales: Q_σ^m f, one bandwidth σ per head."""

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from qattn import _checks
from qattn._eager import eager
from qattn._versions import is_exporting
from qattn.attention.api import BackendName
from qattn.attention.dispatch import BACKENDS
from qattn.distributed.group import Group, GroupLike
from qattn.kernels import GaussianKernel
from qattn.kernels.gaussian.cost import METHODS
from qattn.kernels.gaussian.kernel import MethodName
from qattn.operators.diffusion import Diffusion, Normalization, diffuse, diffusion
from qattn.operators.sinkhorn import Solver
from qattn.ranks import Ranks

__all__ = ["QDiffusion"]


class QDiffusion(nn.Module):
    r"""Q_σ^m f for H learned bandwidths σ, each with its own channels of f.

    The bandwidths are stored as logarithms, `log_sigma`. Their gradients are exact: they include the normalization, by
    its implicit adjoint, which stores none of its steps.

    Args:
        num_scales: Number H of bandwidths.
        sigma_range: Least and largest initial bandwidth, in units of the points; the others are evenly spaced between
            them in log σ.
        learn_sigma: If False, σ is fixed and the backward pass costs about half.
        num_applications: Number m of applications of the operator.
        normalization: "sinkhorn"; "row", "symmetric" and "none" are for comparison.
        tol: Mass-weighted mean of |Q1 − 1| at which the normalization stops; with 0, all passes of the solver are made.
        solver: Options of the Sinkhorn iteration and of its derivative.
        method: Method of the Gaussian kernel; see `qattn.GaussianKernel`.
        backend: Attention backend of the Gaussian kernel; see `qattn.backends()`.
        group: Process group over which clouds are sharded, or "world" for all processes. Points, masses and signals are
            then shards of this rank; see `qattn.GaussianKernel`.

    The setting of the paper, ten plain steps that are not differentiated, is
    `QDiffusion(32, sigma_range=…, num_applications=2, tol=0, solver=Solver(11, "plain", "detach"))`.

    Examples:
        >>> layer = QDiffusion(4, sigma_range=(0.1, 1.0))
        >>> layer(torch.randn(2, 4, 100, 8), torch.randn(2, 100, 3)).shape
        torch.Size([2, 4, 100, 8])
    """

    def __init__(
        self,
        num_scales: int,
        *,
        sigma_range: tuple[float, float],
        learn_sigma: bool = True,
        num_applications: int = 1,
        normalization: Normalization = "sinkhorn",
        tol: float = 1e-3,
        solver: Solver = Solver(),  # noqa: B008 (it is frozen)
        method: MethodName = "auto",
        backend: BackendName = "auto",
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        low, high = _checked_range(sigma_range)
        self.num_scales = _checks.integer("num_scales", num_scales, 1)
        self.num_applications = _checks.integer("num_applications", num_applications, 1)
        scales = torch.linspace(math.log(low), math.log(high), num_scales)
        self.log_sigma = nn.Parameter(scales, requires_grad=learn_sigma)
        _checks.one_of("normalization", normalization, ("sinkhorn", "row", "symmetric", "none"))
        _checks.one_of("method", method, ("auto", *METHODS))
        _checks.one_of("backend", backend, ("auto", *BACKENDS))
        self.normalization, self.tol, self.solver = normalization, _checks.not_negative("tol", tol), solver
        self._method, self._backend, self._group = method, backend, group

    def extra_repr(self) -> str:
        low, high = self.sigma.detach().aminmax()
        return f"{self.num_scales}, sigma=({low:.3g}, {high:.3g}), num_applications={self.num_applications}"

    @property
    def sigma(self) -> Tensor:
        """Bandwidths, shape (H,)."""
        return self.log_sigma.to(torch.promote_types(self.log_sigma.dtype, torch.float32)).exp()

    @property
    def ranks(self) -> Ranks:
        """Process group over which clouds are sharded; `ALONE` if they are local."""
        return Group.of(self._group)

    def _kernel(self, points: Tensor, content: Tensor | None) -> GaussianKernel:
        """Make the kernel of the layer. With content, its points are positions in units of σ, and content."""
        x = points.to(torch.promote_types(points.dtype, torch.float32))
        sigma = self.sigma.to(x)
        options: dict[str, Any] = {"method": self._method, "backend": self._backend, "group": self.ranks}
        if content is None:
            return GaussianKernel(x, sigma, **options)
        lifted = torch.cat([x[..., None, :, :] / sigma[:, None, None], content.to(x)], dim=-1)  # (*batch, H, N, d + c)
        kernel = GaussianKernel(lifted, 1.0, **options)
        # Sorted in space, once for all heads: far points have small weights, whatever their content.
        return kernel.ordered_like(GaussianKernel(x, 1.0)) if self.ranks.is_alone and x.shape[-1] else kernel

    def _start(
        self, kernel: GaussianKernel, points: Tensor, content: Tensor | None, warm_start: Diffusion | None
    ) -> tuple[GaussianKernel, Tensor | None]:
        """Return the kernel with the preparation of another operator, and the potential to start from."""
        if warm_start is None:
            return kernel, None
        other = _checked_warm_start(warm_start, kernel, points, self.num_scales)
        has_bandwidths = other.sigma.ndim > 0  # otherwise its points contain content
        if has_bandwidths and content is None:
            kernel = kernel.share_preparation(other)
        elif content is not None and kernel.ranks.is_alone and points.shape[-1]:
            kernel = kernel.ordered_like(other)
        if warm_start.normalization != "sinkhorn":
            return kernel, None
        init = warm_start.potential.detach().nan_to_num(0, 0, 0)  # NaN at points without mass that are out of reach
        if has_bandwidths:
            init = _interpolated(init, other.sigma.detach(), self.sigma.detach().to(init))
        return kernel, init

    @eager
    def operator(
        self,
        points: Tensor,
        mass: Tensor | None = None,
        *,
        content: Tensor | None = None,
        warm_start: Diffusion | None = None,
    ) -> Diffusion:
        r"""Make the operator Q of shape (*batch, H, N, N) at points (*batch, N, d).

        Args:
            points: Positions x. They are converted to float32 at least, also under autocast.
            mass: Masses (*batch, N), 0 for padding; equal by default.
            content: Further coordinates c per head, (*batch, H, N, c): K = exp(−‖x − x′‖²/2σ² − ‖c − c′‖²/2).
            warm_start: Operator of another layer at the same points. The points are not sorted again, and the
                normalization starts from its potentials, interpolated in log σ; those of an operator with content are
                reused head by head.
        """
        kernel, init = self._start(self._kernel(points, content), points, content, warm_start)
        return diffusion(
            kernel,
            mass=_for_heads(mass),
            normalization=self.normalization,
            tol=self.tol,
            solver=self.solver,
            init=init,
        )

    def forward(
        self,
        signal: Tensor,
        points: Tensor,
        mass: Tensor | None = None,
        *,
        content: Tensor | None = None,
        warm_start: Diffusion | None = None,
    ) -> Tensor:
        """Diffuse a signal (*batch, H, N, P), in its dtype; see `operator` for the other arguments."""
        return self.diffused(signal, points, mass, content=content, warm_start=warm_start)[0]

    @eager
    def diffused(
        self,
        signal: Tensor,
        points: Tensor,
        mass: Tensor | None = None,
        *,
        content: Tensor | None = None,
        warm_start: Diffusion | None = None,
        gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None, Diffusion | None]:
        """Diffuse a signal, and return the operator for the `warm_start` of other layers.

        Returns:
            The diffused signal; its gradient in space (*batch, H, N, P, d), or None if not `gradient`; and the
            operator, or None while exporting.
        """
        if signal.ndim < 3 or signal.shape[-3] != self.num_scales or signal.shape[-2] != points.shape[-2]:
            raise ValueError(
                f"`signal` should have shape (*batch, {self.num_scales}, {points.shape[-2]}, P), with P channels per "
                f"bandwidth, at points {tuple(points.shape)}; got {tuple(signal.shape)}."
            )
        m = self.num_applications
        if is_exporting():
            self.ranks.check_alone("torch.export")
            options: dict[str, Any] = {"normalization": self.normalization, "tol": self.tol, **asdict(self.solver)}
            options |= {"method": self._method, "backend": self._backend}
            both = _diffuse(signal, points, self.sigma, mass, content, m, gradient, **options)
            return (both[..., 0], both[..., 1:], None) if gradient else (both, None, None)
        if m == 1 and gradient:  # the gradient needs a pass with more channels than `diffuse` has
            q = self.operator(points, mass, content=content, warm_start=warm_start)
            return *q.value_and_gradient(signal), q
        kernel, init = self._start(self._kernel(points, content), points, content, warm_start)
        once, q = diffuse(
            kernel,
            None,
            signal,
            _for_heads(mass),
            normalization=self.normalization,
            tol=self.tol,
            solver=self.solver,
            init=init,
        )
        if not gradient:
            return q.power(m - 1, once), None, q
        return *q.value_and_gradient(q.power(m - 2, once)), q


def _checked_range(sigma_range: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = (float(number) for number in sigma_range)
    except (TypeError, ValueError):
        raise ValueError(
            "`sigma_range` should be a pair, the least and the largest bandwidth in units of the points; "
            f"got {sigma_range!r}."
        ) from None
    _checks.positive("the least bandwidth", low)
    if not low <= high < math.inf:
        raise ValueError(f"`sigma_range` should be a pair (least, largest) of finite bandwidths; got {sigma_range!r}.")
    return low, high


def _checked_warm_start(
    warm_start: Diffusion, kernel: GaussianKernel, points: Tensor, num_heads: int
) -> GaussianKernel:
    """Check that a layer with some heads at points (*batch, N, d) can start from an operator; return its kernel."""
    other = warm_start.kernel
    if not isinstance(other, GaussianKernel) or other.ranks.is_alone != kernel.ranks.is_alone:
        raise ValueError(
            "`warm_start` should be an operator of a Gaussian kernel at the same points; got one of a "
            f"{type(other).__name__}."
        )
    if other.sigma.ndim == 0:  # with content, which hides the positions
        shape = (*points.shape[:-2], num_heads, *points.shape[-2:-1] * 2)
        if tuple(warm_start.shape) != shape:
            raise ValueError(
                f"`warm_start` should be an operator with bandwidths (H,), or one with content and the shape {shape} "
                f"of this layer, whose heads are reused one by one; got shape {tuple(warm_start.shape)}."
            )
    elif points is not other.points and not torch.equal(points.detach().to(other.points.dtype), other.points.detach()):
        raise ValueError(
            "`warm_start` should be an operator of a Gaussian kernel at the same points; its points differ."
        )
    return other


def _for_heads(mass: Tensor | None) -> Tensor | None:
    """Add a head axis to masses: (*batch, N) to (*batch, 1, N)."""
    return None if mass is None else mass[..., None, :]


def _interpolated(potential: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Interpolate potentials (*batch, H', N) of old bandwidths (H',) linearly in log σ, to new bandwidths (H,)."""
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
    num_applications: int,
    gradient: bool,
    normalization: str,
    tol: float,
    max_iter: int,
    iteration: str,
    adjoint: str,
    method: str,
    backend: str,
) -> Tensor:
    """Compute Q_σ^m f, or with its gradient (…, P, 1 + d): the one operator that `torch.export` records.

    An exported program needs qattn where it runs.
    """
    layer = QDiffusion(
        len(sigma),
        sigma_range=(1.0, 1.0),
        normalization=normalization,  # type: ignore[arg-type]
        tol=tol,
        solver=Solver(max_iter, iteration, adjoint),  # type: ignore[arg-type]
        method=method,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
    )
    layer.log_sigma = nn.Parameter(sigma.log())
    q = layer.operator(points, mass, content=content)
    if not gradient:
        return q.power(num_applications, signal).detach().contiguous()
    value, slope = q.value_and_gradient(q.power(num_applications - 1, signal))
    return torch.cat([value[..., None], slope], dim=-1).detach()


@_diffuse.register_fake
def _(
    signal: Tensor,
    points: Tensor,
    sigma: Tensor,
    mass: Tensor | None,
    content: Tensor | None,
    num_applications: int,
    gradient: bool,
    *_: object,
) -> Tensor:
    shape = (*signal.shape, 1 + points.shape[-1]) if gradient else signal.shape
    return torch.empty(shape, dtype=signal.dtype, device=signal.device)

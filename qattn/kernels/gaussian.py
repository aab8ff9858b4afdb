r"""The Gaussian kernel of a cloud: K_ij = exp(−‖x_i − x_j‖² / 2σ²), which is attention between the points x / σ."""

from functools import partial
from typing import Any

from torch import Tensor

from qattn import _checks
from qattn.attended import Attended
from qattn.attention.api import attend_by
from qattn.attention.backend import Engine
from qattn.attention.dispatch import select
from qattn.attention.score import Score, gaussian
from qattn.kernels.base import GaussianPoints
from qattn.kernels.methods import Choice, Methods, Work
from qattn.kernels.prepared import attend_by_heads, attend_folded, attend_prepared
from qattn.kernels.sites import Sites, with_heads

__all__ = ["GaussianKernel"]


class GaussianKernel(GaussianPoints):
    r"""K_ij = exp(−‖x_i − x_j‖² / 2σ²), symmetric and positive definite.

    Args:
        points: Positions x of shape (*batch, N, d), a tensor or an array. Integers are converted.
        sigma: The bandwidth σ > 0: a number, or H numbers, which give a head axis before N.
        method: "exact" computes all pairs; "tiles" those that are near enough to matter, at any bandwidth and best at
            small ones, up to three or four dimensions; "fourier" goes by non-uniform FFTs, best at large bandwidths, up
            to three dimensions. "auto" takes the cheapest, for each head; `print(kernel)` tells why.
        tol: The largest error of lse that is acceptable; see `error`.
        backend: Which attention backend "exact" or "tiles" uses; see `qattn.backends()`.

    Example:
        >>> kernel = GaussianKernel(torch.randn(100, 3), sigma=[0.1, 0.2])
        >>> kernel.shape
        torch.Size([2, 100, 100])
        >>> print(GaussianKernel(torch.randn(100, 3), sigma=0.1))
        GaussianKernel((100, 3), sigma=0.1, method='exact')
          exact  all 1.0e+04 pairs, too few to think about   ← taken
    """

    def __init__(
        self, points: Any, sigma: Any, *, method: str = "auto", tol: float = 1e-3, backend: str = "auto"
    ) -> None:
        _checks.positive("`tol`", tol)
        self._points = self._targets = _checks.points("points", points)
        self._sigma = _checks.bandwidth(sigma, self._points)
        self._method, self._tol, self._backend = method, tol, backend
        self._work = Work()
        self._sites = Sites(self._targets, self._points)
        self._methods = self._make_methods()

    def _make_methods(self) -> Methods:
        return Methods(self._sites, self._sigma, self._method, self._tol, self._backend, self._work)

    def __getstate__(self) -> dict[str, Any]:  # what is prepared stays behind: plans cannot be pickled
        return {name: value for name, value in self.__dict__.items() if name not in ("_sites", "_methods")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sites = Sites(self._targets, self._points)
        self._methods = self._make_methods()

    def _with(self, **changed: Any) -> "GaussianKernel":
        """A copy with some of its parts changed."""
        kernel = object.__new__(GaussianKernel)
        kernel.__dict__.update(self.__dict__ | changed)
        return kernel

    def __repr__(self) -> str:
        sigma = f"{float(self._sigma):g}" if self._sigma.ndim == 0 else f"{len(self._sigma)} bandwidths"
        methods = ", ".join(dict.fromkeys(choice.method for choice in self.choices))
        return f"GaussianKernel({tuple(self._points.shape)}, sigma={sigma}, method={methods!r})"

    def __str__(self) -> str:
        lines = [repr(self)]
        for sigma, choice in zip(self._sigma.reshape(-1).tolist(), self.choices, strict=True):
            lines += [f"  sigma = {sigma:g}"] * self._sigma.ndim + [str(choice)]
        return "\n".join(lines)

    @property
    def centred(self) -> Tensor:
        return self._points - self._points.double().mean(-2, keepdim=True).to(self._points).detach()

    @property
    def choices(self) -> list[Choice]:
        """What speaks for and against each method, and which is taken: one a bandwidth."""
        return self._methods.choices

    @property
    def method(self) -> str | tuple[str, ...]:
        """The method in use: a word, or one for each head."""
        methods = tuple(choice.method for choice in self.choices)
        return methods[0] if self._sigma.ndim == 0 else methods

    @property
    def diameter(self) -> float:
        """A bound on the distance between any two of its points."""
        return float(self._sites.extent.norm())

    @property
    def tol(self) -> float:
        """The largest error of lse that is acceptable."""
        return self._tol

    def replace(self, *tensors: Tensor) -> "GaussianKernel":
        points, sigma = tensors[:2]
        targets = points if self._is_self else tensors[2]
        kernel = self._with(_points=points, _sigma=sigma, _targets=targets)
        if (points.device, points.dtype) != (self.device, self._points.dtype):
            kernel._sites = Sites(targets, points)
            kernel._methods = kernel._make_methods()
        return kernel

    def with_sigma(self, sigma: Any) -> "GaussianKernel":
        """The kernel of another bandwidth at the same points, which need not be prepared again."""
        kernel = self._with(_sigma=_checks.bandwidth(sigma, self._points))
        kernel._methods = kernel._make_methods()
        return kernel

    def prepared_as(self, other: "GaussianKernel") -> "GaussianKernel":
        """The same kernel, with what another one has prepared for the same points: their order."""
        kernel = self._with(_sites=other._sites)
        kernel._methods = kernel._make_methods()
        return kernel

    def moved(self, points: Tensor, sigma: float) -> "GaussianKernel":
        return GaussianKernel(points, sigma)

    def for_channels(self, channels: int) -> "GaussianKernel":
        """The same kernel by the method that is cheapest to apply to so many channels, again and again."""
        kernel = self._with(_work=Work(sums=0, channels=channels))
        kernel._methods = kernel._make_methods()
        return kernel

    def at(self, points: Any) -> "GaussianKernel":
        targets = _checks.points("points", points).to(self._points)
        _checks.same_dimension(targets, self._points)
        kernel = self._with(_targets=targets, _sites=Sites(targets, self._points))
        kernel._methods = kernel._make_methods()
        return kernel

    def attend(self, bias: Tensor, value: Tensor | None = None) -> Attended:
        return attend_by_heads(self._methods.groups, self.shape[:-2], bias, value, self._attend_by)

    def clouds(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and points for the heads of σ, (*batch, N, d) or (*batch, H, N, d); one object for the same."""
        key = with_heads(self._points.to(self.dtype), sigma)
        return key if self._is_self else with_heads(self._targets.to(self.dtype), sigma), key

    def _attend_by(self, engine: Engine | None, heads: Tensor | None, bias: Tensor, value: Tensor | None) -> Attended:
        """By an engine, which has been prepared for the batch of some heads; by an attention backend if None."""
        sigma = self._sigma if heads is None else self._sigma[heads]
        query, key = self.clouds(sigma)
        if engine is None:
            chosen = partial(select, name=self._backend)
            return attend_folded(chosen, query, key, value, bias, self._tol, sigma=sigma)
        return attend_prepared(engine, query, key, value, bias, self._tol, sigma=sigma)

    def exact_lse(self, rows: Tensor, bias: Tensor, score: Score = gaussian) -> Tensor:
        query, key, sigma, bias = (x.detach().cpu().double() for x in (*self.clouds(self._sigma), self._sigma, bias))
        reference = partial(select, name="reference")  # plain torch, which shares nothing with what it judges
        return attend_by(reference, query[..., rows, :], key, None, bias=bias, score=score, tol=1.0, sigma=sigma).lse

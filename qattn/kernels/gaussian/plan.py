"""The plan of a Gaussian kernel: which engine computes which heads."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from qattn import _checks
from qattn._versions import why_no_flex, why_not_importable
from qattn.attended import Attended, Derivatives
from qattn.attention.dispatch import Dispatch
from qattn.attention.engine import Differentiating, Engine
from qattn.attention.gradient import derivatives
from qattn.attention.inputs import Inputs
from qattn.distributed.group import Group
from qattn.kernels.gaussian import fourier, tiles
from qattn.kernels.gaussian.cost import METHODS, Choice, Method, Workload, choose, is_known
from qattn.kernels.gaussian.fourier import Fourier, FourierError
from qattn.kernels.gaussian.halo import Halo
from qattn.kernels.gaussian.prepared import PreparedPoints
from qattn.kernels.gaussian.ring import Ring
from qattn.kernels.gaussian.tiles import Tiles
from qattn.ranks import Ranks
from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.device import why_not_installed
from qattn.tiles.when_to_compile import charge

__all__ = ["Plan"]

_FEW_DIMENSIONS = 4  # largest dimension in which tiles pay off


class Plan:
    """Methods and engines of a Gaussian kernel, chosen and made when they are first needed.

    Args:
        points: Targets and points of the kernel.
        sigma: Bandwidth, a scalar tensor or (H,).
        method: "auto", "exact", "tiles" or "fourier".
        tol: Largest acceptable error of lse.
        backend: Attention backend. With a backend that "tiles" cannot use, only "exact" remains.
        workload: Passes for which the cost is estimated.
    """

    def __init__(
        self,
        points: PreparedPoints,
        sigma: Tensor,
        method: Method | Literal["auto"],
        tol: float,
        backend: str,
        workload: Workload,
    ) -> None:
        _checks.one_of("method", method, ("auto", *METHODS))
        self.points, self._sigma = points, sigma.detach()
        self._method, self._tol, self._backend, self._workload = method, tol, backend, workload
        if method != "auto":
            for reason in self._refusals(method):
                raise ValueError(f'`method="{method}"` cannot be used here: {reason}.')

    def _refusals(self, method: Method) -> list[str]:
        """Return the reasons why a method cannot be used, at any bandwidth."""
        device, d = self.points.device, self.points.dims
        reasons = []
        if method == "fourier":
            if d > fourier.DIMENSIONS:
                reasons.append(f"it takes up to {fourier.DIMENSIONS} dimensions, and these points have {d}")
            if self._backend != "auto":
                reasons.append(f'it uses no attention backend, but `backend="{self._backend}"` is given')
        if method == "tiles" and self._backend not in ("auto", *tiles.BACKENDS):
            reasons.append(f'it takes the backends {", ".join(tiles.BACKENDS)}, not "{self._backend}"')
        on_gpu = self._backend == "auto" and device.type == "cuda"
        if method == "tiles" and (on_gpu or self._backend in ("triton", "flex")) and self.points.dtype == torch.float64:
            reasons.append("it uses Triton or FlexAttention, which do not take float64")
        by_flex = self._backend == "flex" or (on_gpu and why_not_installed() is not None)
        if method == "tiles" and by_flex and is_known(device) and (reason := why_no_flex(device.type)):
            reasons.append(f"it uses FlexAttention, which {reason}")
        if method == "tiles" and (reason := why_not_compiled()):
            reasons.append(reason)
        if method != "exact" and not is_known(device):
            reasons.append(f"it takes points on cpu or cuda, and these are on {device.type}")
        library = "cufinufft" if device.type == "cuda" else "finufft"
        if method == "fourier" and (reason := why_not_importable(library)):
            reasons.append(reason)
        return reasons

    @cached_property
    def _first_choices(self) -> list[Choice]:
        """The choice for each head, from estimates before any pass."""
        count = self._sigma.numel()
        if self._method == "auto":
            others: tuple[Method, ...] = "fourier", "tiles"
            refusals = {name: self._refusals(name) for name in others}
            sigmas = self._sigma.reshape(-1).tolist()
            return [choose(self.points, sigma, self._tol, self._workload, refusals) for sigma in sigmas]
        note = "as requested"
        if self._method == "tiles" and self.points.dims > _FEW_DIMENSIONS:
            note += f"; in {self.points.dims} dimensions boxes overlap, so few pairs are left out"
        return [Choice(self._method, {self._method: note}, {})] * count

    @cached_property
    def parts(self) -> list[tuple[Tensor | None, Engine]]:
        """Heads of each method in use, None for all, and their engine."""
        methods = [choice.method for choice in self._first_choices]
        for choice in self._first_choices:
            if choice.missed is not None:
                charge(*choice.missed)
        parts: list[tuple[Tensor | None, Engine]] = []
        for method in dict.fromkeys(methods):
            numbers = [head for head, name in enumerate(methods) if name == method]
            heads = None if len(numbers) == len(methods) else torch.tensor(numbers, device=self.points.device)
            sigma = self._sigma if heads is None else self._sigma[heads]
            make = partial(_engine, self.points, sigma, self._backend)
            engine = make(method)
            if self._method == "auto" and method == "fourier":
                other = self._first_choices[numbers[0]].without_fourier("").method
                engine = _FourierOr(engine, partial(make, other))
            parts.append((heads, engine))
        return parts

    def choices(self) -> list[Choice]:
        """Choose a method for each head, together with all ranks; updated by what passes have shown since."""
        choices = list(self._first_choices)
        for heads, engine in self.__dict__.get("parts", ()):
            if isinstance(engine, _FourierOr) and engine.failure is not None:
                for head in range(len(choices)) if heads is None else heads.tolist():
                    choices[head] = choices[head].without_fourier(engine.failure)
        return choices

    @property
    def known_choices(self) -> list[Choice]:
        """The choice for each head; empty if none has been made."""
        return self.choices() if self._method != "auto" or "_first_choices" in self.__dict__ else []


def _engine(points: PreparedPoints, sigma: Tensor, backend: str, method: Method) -> Engine:
    """Make the engine of a method for these bandwidths."""
    ranks = points.ranks
    if method == "fourier":
        return Fourier(*points.flat(sigma), ranks)
    if isinstance(ranks, Group):
        if method == "tiles":
            return Halo(ranks, *points.sorted(sigma), points.flat(sigma)[2], backend)
        return Ring(ranks, points.queries, points.keys, Dispatch(backend))
    if method == "tiles":
        return Tiles(*points.sorted(sigma), backend)
    return Dispatch(backend, is_prepared=True)


class _FourierOr(Engine, Differentiating):
    """The engine of "fourier" until it misses the tolerance, then another one.

    Attributes:
        failure: Message of the pass that missed the tolerance; None if none has.
    """

    def __init__(self, by_fourier: Engine, make_other: Callable[[], Engine]) -> None:
        self._fourier, self._make_other = by_fourier, make_other
        self.failure: str | None = None

    @cached_property
    def _other(self) -> Engine:
        return self._make_other()

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []

    @property
    def ranks(self) -> Ranks:
        return self._fourier.ranks

    @cached_property
    def transposed(self) -> "_FourierOr":
        by_fourier, make_other = self._fourier.transposed, self._make_other  # a reference to self would be a cycle
        return self if by_fourier is self._fourier else _FourierOr(by_fourier, lambda: make_other().transposed)

    def attend(self, inputs: Inputs) -> Attended:
        if self.failure is None:
            try:
                return self._fourier.attend(inputs)
            except FourierError as error:
                self.failure = str(error)
        return self._other.for_gradients.attend(inputs)

    def can_differentiate(self, inputs: Inputs) -> bool:
        engine = self._fourier if self.failure is None else self._other.for_gradients
        return isinstance(engine, Differentiating) and engine.can_differentiate(inputs)

    def is_direct(self, inputs: Inputs) -> bool:
        engine = self._fourier if self.failure is None else self._other.for_gradients
        return isinstance(engine, Differentiating) and engine.is_direct(inputs)

    def differentiate(self, inputs: Inputs, row: Tensor, column: Tensor, shift: Tensor) -> Derivatives:
        if self.failure is None:
            assert isinstance(self._fourier, Differentiating)
            try:
                return self._fourier.differentiate(inputs, row, column, shift)
            except FourierError as error:
                self.failure = str(error)
        return derivatives(self._other.for_gradients, inputs, row, column, shift)

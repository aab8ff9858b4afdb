"""Backend selection: the first backend in `ORDER` that supports the inputs."""

from dataclasses import replace
from functools import cache

import torch

from qattn._warning import warn_caller
from qattn.attended import Attended, PairSums, PairTerms
from qattn.attention.engine import Backend, Engine, Fused
from qattn.attention.flash_attn import FlashAttn
from qattn.attention.flex import Flex
from qattn.attention.inputs import Inputs
from qattn.attention.native import Native
from qattn.attention.reference import Reference
from qattn.attention.sdpa import Sdpa
from qattn.attention.triton import Triton
from qattn.attention.xformers import Xformers
from qattn.lift import Extent
from qattn.tiles import device
from qattn.tiles.compiled import why_not_compiled
from qattn.tiles.tiling import Tiling

__all__ = ["BACKENDS", "ORDER", "Dispatch", "reasons_against", "select"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Native(), Triton(), FlashAttn(), Sdpa(), Xformers(), Flex(), Reference())
}
_UNTIL_COMPILED = Native(compile_now=False)  # that of `backend="auto"`, which waits for no compiler

# Backends that `backend="auto"` tries, by device. On CPUs flex is not among them: it compiles for seconds per shape. On
# CUDA, kernels of 16 bits come first if the points have no more: tensor cores then compute the scores too.
ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "sdpa", "reference"),
    "cuda": ("triton", "flash_attn", "sdpa", "xformers", "flex", "reference"),
    "cuda, 16 bits": ("flash_attn", "triton", "sdpa", "xformers", "flex", "reference"),
    "other": ("sdpa", "reference"),
}
_SLOWER = {
    "native": "Attention takes two to four times as long without compiled loops: {}.",
    "triton": "Attention on a GPU is slower, or less exact, without kernels of our own: {}.",
}


def select(inputs: Inputs, name: str) -> Backend:
    """Return the backend called `name`, or for "auto" the first in `ORDER` that takes the inputs.

    Raises:
        NotImplementedError: If it does not take them, with the reasons of every backend.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f'`backend` should be "auto" or one of {", ".join(BACKENDS)}; got {name!r}.')
    candidates = _order(inputs) if name == "auto" else (name,)
    for candidate in candidates:
        if not reasons_against(candidate, inputs, warns=name == "auto"):
            return _UNTIL_COMPILED if name == "auto" and candidate == "native" else BACKENDS[candidate]
    raise NotImplementedError(_message(inputs, name))


def reasons_against(name: str, inputs: Inputs, *, warns: bool = False) -> list[str]:
    """Return the reasons of a backend against inputs. With `warns`, a warning says once if it is only missing."""
    reasons = BACKENDS[name].not_supported_reasons(inputs)
    if warns and reasons == [_why_missing(name)]:
        _warn_of_slowness(_SLOWER[name].format(*reasons))
    return reasons


def _why_missing(name: str) -> str | None:
    """Return why a backend of our own is missing on this machine, or None."""
    if name == "native":
        return why_not_compiled()
    return device.why_not_installed() if name == "triton" else None


def _order(inputs: Inputs) -> tuple[str, ...]:
    device = inputs.device.type
    has_16_bits = inputs.query.dtype in (torch.float16, torch.bfloat16)
    return ORDER.get(f"{device}, 16 bits" if has_16_bits else device, ORDER.get(device, ORDER["other"]))


@cache  # once for each reason
def _warn_of_slowness(message: str) -> None:
    warn_caller(message)


class Dispatch(Engine, Fused):
    """The engine that computes all pairs, with the backend that its inputs select.

    Args:
        name: A backend, or "auto".
        is_strict: Whether to raise an error if the backend does not take the inputs. If False, "auto" replaces it.
        is_prepared: Whether all inputs have the same points, and biases that at most double. Points are then laid out
            once. On a GPU, backends are selected once for each kind of values, and no pass waits for the device.
    """

    def __init__(self, name: str = "auto", is_strict: bool = True, is_prepared: bool = False) -> None:
        self._name, self._is_strict, self._is_prepared = name, is_strict, is_prepared
        self._selected: dict[object, tuple[Backend, Extent | None]] = {}
        self._tilings: dict[object, tuple[Tiling, Tiling]] = {}

    def _backend(self, inputs: Inputs) -> Backend:
        if not self._is_strict and self._name != "auto" and BACKENDS[self._name].not_supported_reasons(inputs):
            return select(inputs, "auto")
        return select(inputs, self._name)

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        return []  # `attend` raises with those of all backends

    def attend(self, inputs: Inputs) -> Attended:
        if inputs.device.type == "cpu":
            backend = self._backend(inputs)
            if not self._is_prepared or not isinstance(backend, Native):
                return backend.attend(inputs)
            layout = inputs.dtype, inputs.batch  # to which biases may add axes
            inputs = replace(inputs, known_tilings=self._tilings.get(layout))
            self._tilings[layout] = inputs.tilings
            return backend.attend(inputs)
        if not self._is_prepared:
            return self._backend(inputs).attend(inputs)
        kind = inputs.dtype, inputs.channels, None if inputs.value is None else inputs.value.dtype
        if kind not in self._selected:
            inputs = replace(inputs, bias_growth=2.0)
            backend = self._backend(inputs)
            attended = backend.attend(inputs)
            self._selected[kind] = backend, inputs.measured_extent
            return attended
        backend, extent = self._selected[kind]
        return backend.attend(replace(inputs, known_extent=extent))

    @property
    def for_gradients(self) -> "Dispatch":
        return Dispatch(self._name, is_strict=False)

    def can_differentiate(self, inputs: Inputs) -> bool:
        backend = self._backend(inputs)
        return isinstance(backend, Fused) and backend.can_differentiate(inputs)

    def is_direct(self, inputs: Inputs) -> bool:
        backend = self._backend(inputs)
        return isinstance(backend, Fused) and backend.is_direct(inputs)

    def pair_sums(self, inputs: Inputs, terms: PairTerms) -> PairSums:
        backend = self._backend(inputs)
        assert isinstance(backend, Fused)
        return backend.pair_sums(inputs, terms)


def _message(inputs: Inputs, name: str) -> str:
    """Write a message with the inputs, and the reasons of every backend."""
    subject = "No attention backend takes" if name == "auto" else f'`backend="{name}"` does not take'
    width = max(map(len, BACKENDS)) + 1
    lines = [f"{subject} these inputs:", inputs.describe()]
    for other, backend in BACKENDS.items():
        reasons = backend.not_supported_reasons(inputs)
        lines.append(f"  {other + ':':{width}} {'; '.join(reasons) or 'takes them'}")
    return "\n".join(lines)

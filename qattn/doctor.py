"""Measure every attention backend on this machine: availability, accuracy and speed.

Accuracy is measured on a standard problem, points on the unit sphere with σ = 0.1 and random biases, against the
reference in float64. Speed is measured on a larger cloud, one that keeps a GPU busy for longer than a launch takes; of
its many pairs `triton` may lift the points, which it does not for few.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qattn._types import dtype_name
from qattn.attended import Attended
from qattn.attention.dispatch import BACKENDS, select
from qattn.attention.inputs import Inputs

__all__ = ["BackendReport", "backends", "choices", "standard_problem"]

_SMALL, _CHANNELS = 500, 8
_LARGE = {"cpu": 4096, "cuda": 65_536, "mps": 4096}  # points
_SIGMA = 0.1
_BUDGET = 0.25  # seconds per measurement


@dataclass(frozen=True)
class BackendReport:
    """Accuracy and speed of one backend on one device, for one dtype of points and values.

    Attributes:
        name: Name for `attend(backend=...)`.
        device: Device of the measurement.
        dtype: Dtype of points and values.
        reasons: Why the backend cannot be used; empty if it can.
        lse_error: Largest error of lse on the standard problem; None if the backend was not run.
        out_error: Largest error of out, for values of order 1.
        tolerance: Largest error that the backend promises.
        lse_ns: Nanoseconds per pair of points, lse alone.
        out_ns: Nanoseconds per pair of points, with 8 channels of values.
    """

    name: str
    device: str
    dtype: torch.dtype
    reasons: tuple[str, ...]
    lse_error: float | None = None
    out_error: float | None = None
    tolerance: float | None = None
    lse_ns: float | None = None
    out_ns: float | None = None

    @property
    def is_usable(self) -> bool:
        """True if the backend supports the standard problem."""
        return not self.reasons

    @property
    def is_exact(self) -> bool:
        """True if the backend ran and its errors are within its tolerance."""
        errors = self.lse_error, self.out_error
        return self.tolerance is not None and all(e is None or e <= self.tolerance for e in errors)


def standard_problem(num_points: int, dtype: torch.dtype, device: str = "cpu", num_channels: int = _CHANNELS) -> Inputs:
    """Return points on the unit sphere in units of σ = 0.1, biases of order 1, and values if there are channels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    points = normal(1, num_points, 3)
    points = (points / points.norm(dim=-1, keepdim=True) / _SIGMA).to(device, dtype)
    bias = normal(1, num_points).to(device, torch.promote_types(dtype, torch.float32))
    value = normal(1, num_points, num_channels).to(device, dtype) if num_channels else None
    return Inputs(points, points, value, bias)


def _errors(run: Callable[[Inputs], Attended], inputs: Inputs) -> tuple[float, float | None]:
    """Return the largest errors of lse and of out against the reference on the same numbers in float64."""
    value = None if inputs.value is None else inputs.value.double()
    bias = None if inputs.bias is None else inputs.bias.double()
    exact = Inputs(inputs.query.double(), inputs.key.double(), value, bias, tol=inputs.tol)
    expected, got = BACKENDS["reference"].attend(exact), run(inputs)
    lse_error = float((got.lse - expected.lse).abs().amax())
    if got.out is None or expected.out is None:
        return lse_error, None
    return lse_error, float((got.out - expected.out).abs().amax())


def _nanoseconds(run: Callable[[Inputs], Attended], inputs: Inputs) -> float:
    """Return the best time per pair over the runs within the budget; the first run, which may compile, is dropped."""

    def once() -> float:
        start = time.perf_counter()
        run(inputs)
        if inputs.device.type == "cuda":
            torch.cuda.synchronize(inputs.device)
        return time.perf_counter() - start

    once()
    end = time.perf_counter() + _BUDGET
    best = once()
    while time.perf_counter() < end:
        best = min(best, once())
    return best / (inputs.query.shape[1] * inputs.key.shape[1]) * 1e9


def _report(name: str, device: str, dtype: torch.dtype) -> BackendReport:
    backend = BACKENDS[name]
    small = standard_problem(_SMALL, dtype, device)
    reasons = backend.not_supported_reasons(small)
    if reasons:
        return BackendReport(name, device, dtype, tuple(reasons))
    try:
        lse_error, out_error = _errors(backend.attend, small)
        lse_ns, out_ns = (
            _nanoseconds(backend.attend, standard_problem(_LARGE[device], dtype, device, num_channels))
            for num_channels in (0, _CHANNELS)
        )
    except Exception as error:  # the backend claimed support and failed: report it and go on
        return BackendReport(
            name, device, dtype, (f"failed here: {type(error).__name__}: {str(error).splitlines()[0]}",)
        )
    return BackendReport(name, device, dtype, (), lse_error, out_error, backend.tolerance[dtype], lse_ns, out_ns)


def _devices() -> list[tuple[str, torch.dtype]]:
    devices = [("cpu", torch.float32), ("cpu", torch.float64)]
    if torch.cuda.is_available():
        devices += [("cuda", torch.float32), ("cuda", torch.float16), ("cuda", torch.bfloat16)]
    if torch.backends.mps.is_available():
        devices += [("mps", torch.float32)]
    return devices


def backends(progress: Callable[[str], None] = lambda _: None) -> list[BackendReport]:
    """Measure every attention backend on every device and dtype of this machine; takes some seconds.

    Args:
        progress: Called with a description of each measurement before it starts.

    Returns:
        One report per backend, device and dtype.

    Examples:
        >>> usable = [report.name for report in backends() if report.is_usable]  # doctest: +SKIP
    """
    reports = []
    for device, dtype in _devices():
        for name in BACKENDS:
            progress(f"{name} on {device} in {dtype_name(dtype)}")
            reports.append(_report(name, device, dtype))
    return reports


def choices() -> list[tuple[str, str]]:
    """Return the backend that `backend="auto"` selects for typical inputs, as pairs (description, name)."""
    rows = []
    for device, dtype in _devices():
        for num_channels, kind in ((0, "lse alone"), (_CHANNELS, f"{_CHANNELS} channels")):
            inputs = standard_problem(_SMALL, dtype, device, num_channels)
            rows.append((f"{device}, {dtype_name(dtype)}, {kind}", select(inputs, "auto").name))
    return rows

"""What every backend can do on this machine: usable or not and why, how exact, how fast.

Each is tried on a standard problem, points of the unit sphere with σ = 0.1 and random biases, against the reference in
float64; the time is that of a larger cloud. Nothing is looked up in a table of claims.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.dispatch import BACKENDS, select
from qattn.attention.inputs import Inputs
from qattn.attention.score import gaussian

__all__ = ["BackendReport", "backends", "choices"]

_SMALL, _LARGE, _CHANNELS = 500, 4096, 8
_SIGMA = 0.1
_BUDGET = 0.25  # seconds a figure


@dataclass(frozen=True)
class BackendReport:
    """What one backend does on one device with one dtype of points and values.

    Attributes:
        name: What `attend(backend=...)` calls it.
        device: The device it was tried on.
        dtype: The dtype of points and values.
        reasons: Why it cannot be used; empty if it can.
        lse_error: Largest error of lse on the standard problem; None if it was not run.
        out_error: Largest error of out, for values of order 1.
        tolerance: What the two errors are held to.
        lse_ns: Nanoseconds a pair of points, lse alone.
        out_ns: Nanoseconds a pair of points, with 8 channels of values.
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
        """Whether it takes the standard problem."""
        return not self.reasons

    @property
    def is_exact(self) -> bool:
        """Whether it ran and kept to its tolerance."""
        errors = self.lse_error, self.out_error
        return self.tolerance is not None and all(e is None or e <= self.tolerance for e in errors)


def standard_problem(n: int, dtype: torch.dtype, device: str = "cpu", channels: int = _CHANNELS) -> Inputs:
    """`n` points of the unit sphere in units of σ = 0.1, biases and `channels` values (0 for none) of order 1."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    points = normal(1, n, 3)
    points = (points / points.norm(dim=-1, keepdim=True) / _SIGMA).to(device, dtype)
    bias = normal(1, n).to(device, torch.promote_types(dtype, torch.float32))
    value = normal(1, n, channels).to(device, dtype) if channels else None
    return Inputs(points, points, value, bias, gaussian, 1e-3, torch.Size((1,)))


def _errors(run: Callable[[Inputs], Attended], inputs: Inputs) -> tuple[float, float | None]:
    """Largest error of lse and of out against the reference on the same numbers in float64."""
    value = None if inputs.value is None else inputs.value.double()
    bias = None if inputs.bias is None else inputs.bias.double()
    exact = Inputs(inputs.query.double(), inputs.key.double(), value, bias, inputs.score, inputs.tol, inputs.batch)
    expected, got = BACKENDS["reference"].attend(exact), run(inputs)
    lse_error = float((got.lse - expected.lse).abs().amax())
    if got.out is None or expected.out is None:
        return lse_error, None
    return lse_error, float((got.out - expected.out).abs().amax())


def _nanoseconds(run: Callable[[Inputs], Attended], inputs: Inputs) -> float:
    """The best time a pair of the runs that fit the budget; the first, which may compile, does not count."""

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
        large = standard_problem(_LARGE, dtype, device)
        lse_ns = _nanoseconds(backend.attend, standard_problem(_LARGE, dtype, device, channels=0))
        out_ns = _nanoseconds(backend.attend, large)
    except Exception as error:  # a kernel that promised and failed: the doctor says so and goes on
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
    """Tries every attention backend on every device and dtype of this machine; takes some seconds.

    Args:
        progress: Called with the name of what is tried next.

    Example:
        >>> usable = [report.name for report in backends() if report.is_usable]  # doctest: +SKIP
    """
    reports = []
    for device, dtype in _devices():
        for name in BACKENDS:
            progress(f"{name} on {device} in {str(dtype).removeprefix('torch.')}")
            reports.append(_report(name, device, dtype))
    return reports


def choices() -> list[tuple[str, str]]:
    """What `backend="auto"` takes for typical inputs on this machine: pairs of a description and a name."""
    rows = []
    for device, dtype in _devices():
        for channels, what in ((0, "lse alone"), (_CHANNELS, f"{_CHANNELS} channels")):
            inputs = standard_problem(_SMALL, dtype, device, channels)
            rows.append((f"{device}, {str(dtype).removeprefix('torch.')}, {what}", select(inputs, "auto").name))
    return rows

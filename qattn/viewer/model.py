"""Pictures of a shape: colors of its points for each state of the panels, without a browser."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qattn.axioms import check_axioms
from qattn.bandwidths import num_neighbors
from qattn.distances import geodesic_distance
from qattn.io import Cloud, Grid
from qattn.io.lengths import spacing_of
from qattn.kernels import GaussianKernel, Kernel
from qattn.maps import fit_functional_map, zoomout
from qattn.operators.diffusion import Diffusion, diffusion
from qattn.pictures import colormap, heat, signed
from qattn.signatures import heat_kernel_signature, wave_kernel_signature
from qattn.spectra import Spectrum, eigsh
from qattn.spectra.automatic import spectrum as spectrum_of_points

__all__ = ["PANELS", "Model", "Picture", "State", "positions_of"]

PANELS = ("Diffuse", "Modes", "Signatures", "Distance from here", "Match", "Operator")
NUM_MODES = 40
NUM_TIMES = 60  # of heat kernel signatures
_MATCHED_MODES = 12, 30  # of the first fit, and after ZoomOut
_REACH = 2.0  # steps of log σ, up to which potentials are extrapolated
_SPACE = "&emsp;"  # between columns, which viser sets close together
_ALONE = 1.001  # neighbors of a point, up to which Q is the identity


@dataclass(frozen=True)
class State:
    """State of the controls.

    Attributes:
        panel: One of `PANELS`.
        sigma: Bandwidth σ, a length.
        steps: Number of applications of Q.
        signal: "Dirac", "noise", "xyz", or the name of an attribute.
        point: Index of the clicked point.
        mode: Number of the eigenvector, from 0.
        time: Number of the time of the heat kernel signature, from 0 to `NUM_TIMES` − 1.
    """

    panel: str
    sigma: float
    steps: int = 1
    signal: str = "Dirac"
    point: int = 0
    mode: int = 1
    time: int = 30


@dataclass(frozen=True)
class Picture:
    """A colored shape.

    Attributes:
        colors: Red, green and blue of every point, uint8 of shape (N, 3).
        caption: Numbers that belong to it, in Markdown.
        moved: Positions in place of those of the shape, shape (N, 3), or None.
        other: Colors of the second shape, or None.
        curve: Numbers to plot against 1, 2, …, or None.
    """

    colors: np.ndarray
    caption: str
    moved: np.ndarray | None = None
    other: np.ndarray | None = None
    curve: np.ndarray | None = None


class Model:
    """Computations on a shape, with the last operator and spectrum kept for the next picture.

    Args:
        shape: Cloud, mesh, splats or grid.
        other: A second shape, to which "Match" carries colors.
    """

    def __init__(self, shape: Cloud | Grid, other: Cloud | Grid | None = None) -> None:
        self.shape, self.other = shape, other
        self.positions = positions_of(shape)
        self._operators = _Operators(shape)
        self._others = None if other is None else _Operators(other)
        self._steps: tuple[State, int, Tensor] | None = None  # last state but for its steps, their number, the result
        self._panels: dict[str, Callable[[State], Picture]] = {
            "Diffuse": self._diffuse,
            "Modes": self._modes,
            "Signatures": self._signatures,
            "Distance from here": self._distance,
            "Match": self._match,
            "Operator": self._describe,
        }

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def signals(self) -> list[str]:
        """Names of what can be diffused."""
        attributes = self.shape.attributes if isinstance(self.shape, Cloud) else {}
        return ["Dirac", "noise", "xyz", *attributes]

    @property
    def sigma_range(self) -> tuple[float, float]:
        """Bandwidths from half a spacing to the extent."""
        spacing, extent = spacing_of(self.shape), self.shape.extent
        if not 0 < spacing < extent:
            raise ValueError("The shape should have at least two distinct points, to diffuse between them.")
        return 0.5 * spacing, extent

    def start(self, sigma: float | None = None) -> State:
        """Return the state that is shown first: a Dirac at the point with the largest first coordinate."""
        low, high = self.sigma_range
        sigma = min(8 * low, high) if sigma is None else sigma
        return State("Diffuse", sigma, steps=10, point=int(self.positions[:, 0].argmax()))

    def picture(self, state: State) -> Picture:
        """Compute the picture of a state."""
        return self._panels[state.panel](state)

    def pick(self, origin: np.ndarray, direction: np.ndarray) -> int:
        """Return the point under the mouse: the first one near a ray."""
        offsets = self.positions - origin
        along = offsets @ (direction / np.linalg.norm(direction))
        across = np.sqrt(np.maximum((offsets**2).sum(1) - along**2, 0))
        radius = max(1.5 * spacing_of(self.shape), float(across.min()))
        return int(np.where(across <= radius, along, np.inf).argmin())

    def _diffuse(self, state: State) -> Picture:
        start = time.perf_counter()
        q = self._operators.at(state.sigma)
        signal = self._signal(state)
        mean = signal.mean(0)
        smooth = (
            self._power(q, state, signal) if state.signal == "Dirac" else mean + self._power(q, state, signal - mean)
        )
        seconds = time.perf_counter() - start
        caption = f"{_count(state.steps, 'step')} with {self._sigma(state)}, {seconds:.2f} s{_warning(q)}"
        if state.signal == "Dirac":
            return Picture(_bytes(heat(smooth[:, 0])), f"Dirac at point {state.point:,}: {caption}")
        if state.signal == "xyz" and isinstance(self.shape, Cloud):
            length = float((smooth - signal).norm(dim=1).mean())
            caption = f"Points move by {length:.3g} on average: {caption}"
            return Picture(_bytes(_as_colors(signal)), caption, moved=_padded(smooth.numpy()))
        colors = _as_colors(smooth) if smooth.shape[1] == 3 else _ramp(smooth[:, 0])
        return Picture(_bytes(colors), f"{state.signal}: {caption}")

    def _power(self, q: Diffusion, state: State, signal: Tensor) -> Tensor:
        """Apply Q for all steps of the state, from the last result if it differs only in having fewer steps."""
        key, done = replace(state, steps=0), 0
        if self._steps is not None and self._steps[0] == key and self._steps[1] <= state.steps:
            _, done, signal = self._steps
        signal = q.power(state.steps - done, signal)
        self._steps = key, state.steps, signal
        return signal

    def _signal(self, state: State) -> Tensor:
        """Return the signal (N, C) of a state."""
        N = len(self)
        if state.signal == "Dirac":
            dirac = torch.zeros(N, 1)
            dirac[state.point] = N
            return dirac
        if state.signal == "noise":
            return torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
        if state.signal == "xyz":
            return torch.from_numpy(np.ascontiguousarray(self.positions, np.float32))
        assert isinstance(self.shape, Cloud)
        values = self.shape.attributes[state.signal].reshape(N, -1).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"The attribute `{state.signal}` is NaN or infinite at some points.")
        return torch.from_numpy(values)

    def _modes(self, state: State) -> Picture:
        spectrum = self._operators.spectrum(state.sigma)
        mode = min(state.mode, len(spectrum) - 1)
        frequencies = spectrum.frequencies
        caption = (
            f"Mode {mode} of {len(spectrum)}: eigenvalue {float(spectrum.values[mode]):.5f}, frequency "
            f"{float(frequencies[mode]):.4g}, residual {float(spectrum.residuals[mode]):.0e}, {self._sigma(state)}"
        )
        if spectrum.choices:
            caption += "\n\n| | |\n|---|---|\n" + "\n".join(
                f"| {name} | {why} |" for name, why in spectrum.choices.items()
            )
        colors = _bytes(signed(spectrum.vectors[:, mode].float()))
        return Picture(colors, caption, curve=frequencies.double().numpy())

    def _signatures(self, state: State) -> Picture:
        spectrum = self._operators.spectrum(state.sigma)
        signature = heat_kernel_signature(spectrum, num_times=NUM_TIMES, scaled=True)[:, state.time]
        low, high = float(signature.min()), float(signature.max())
        caption = (
            f"Heat kernel signature, time {state.time + 1} of {NUM_TIMES}: from {low:.3g} to {high:.3g} of the mean, "
            f"{self._sigma(state)}"
        )
        return Picture(_bytes(_ramp(signature.float(), "inferno")), caption)

    def _distance(self, state: State) -> Picture:
        start = time.perf_counter()
        q = self._operators.at(state.sigma)
        distance = torch.as_tensor(geodesic_distance(q, state.point)).float()
        reached = distance.isfinite()
        largest = float(distance[reached].max())
        colors = _bands(torch.where(reached, distance, largest) / (largest or 1.0))
        colors = torch.where(reached[:, None], colors, torch.tensor([0.6, 0.6, 0.6]))
        cut = f"; {_count(int((~reached).sum()), 'point')} not connected, in gray" if not reached.all() else ""
        seconds = time.perf_counter() - start
        caption = (
            f"Distance from point {state.point:,}: at most {largest:.4g}{cut}, {self._sigma(state)}, {seconds:.1f} s"
        )
        return Picture(_bytes(colors), caption)

    def _match(self, state: State) -> Picture:
        if self._others is None or self.other is None:
            raise ValueError("Match carries colors from this shape to a second one. Open a second file first.")
        share = state.sigma / self.shape.extent
        source = self._operators.spectrum(state.sigma)
        target = self._others.spectrum(share * self.other.extent)
        first, last = _MATCHED_MODES
        a, b = (_leading(spectrum, min(last, len(source), len(target))) for spectrum in (source, target))
        features = [_descriptors(spectrum) for spectrum in (a, b)]
        C = fit_functional_map(a, b, *features)
        first = min(first, len(a))
        C, index = zoomout(a, b, C, start=first, stop=len(a), step=2)
        colors = _bytes(_as_colors(torch.from_numpy(np.ascontiguousarray(self.positions, np.float32))))
        deviation = float((C @ C.T - torch.eye(len(C))).norm() / len(C) ** 0.5)
        caption = (
            f"Colors carried over by a functional map of {len(a)} modes, {deviation:.2f} from orthogonal "
            f"(0 for isometric shapes). Symmetric shapes may be matched with their mirror image."
        )
        return Picture(colors, caption, other=colors[index.numpy()])

    def _describe(self, state: State) -> Picture:
        q = self._operators.at(state.sigma)
        error, report = float(q.kernel_error()), check_axioms(q)
        caption = (
            f"{self._sigma(state)}{_warning(q)}\n\n"
            f"| | |\n|---|---|\n| sites | {len(self):,} |\n| passes | {int(q.num_iter)} |\n"
            f"| seconds | {self._operators.seconds:.2f} |\n| mean of \\|Q1 − 1\\| | {float(q.marginal_error):.1e} |\n"
            f"| error of row sums | {error:.1e} |\n\n{_as_tables(q.kernel)}\n\n{_as_tables(report)}"
        )
        potential = torch.as_tensor(q.potential).float()
        return Picture(_bytes(_ramp(potential)), f"Potential f. {caption}")

    def _sigma(self, state: State) -> str:
        spacings, share = state.sigma / spacing_of(self.shape), state.sigma / self.shape.extent
        return f"σ = {state.sigma:.4g} ({spacings:.2g} spacings, {share:.2%} of the extent)"


class _Operators:
    """The operators of a shape: the last one is kept, and the next one starts from the potentials of the last two."""

    def __init__(self, shape: Cloud | Grid) -> None:
        self._shape = shape
        self._kernel: Kernel | None = None
        self._last: tuple[float, Diffusion] | None = None
        self._potentials: list[tuple[float, Tensor]] = []  # log σ and f of the last two operators
        self._spectrum: tuple[float, Spectrum] | None = None
        self.seconds = 0.0  # that the last operator took

    def at(self, sigma: float) -> Diffusion:
        """Return the operator with a bandwidth."""
        if self._last is None or self._last[0] != sigma:
            start = time.perf_counter()
            kernel = self._kernel = self._kernel_at(sigma)
            mass = self._shape.mass if isinstance(self._shape, Cloud) else None
            q = diffusion(kernel, mass=mass, init=self._expected_potential(sigma))
            self._last = sigma, q
            self._potentials = [*self._potentials[-1:], (math.log(sigma), q.potential.nan_to_num(0, 0, 0))]
            self.seconds = time.perf_counter() - start
        return self._last[1]

    def _expected_potential(self, sigma: float) -> Tensor | None:
        """Return f as a linear function of log σ through the last two, or the last one if they are far from σ."""
        if len(self._potentials) < 2:
            return self._potentials[0][1] if self._potentials else None
        (before, g), (last, f) = self._potentials
        t = (math.log(sigma) - last) / (last - before)
        return f + t * (f - g) if abs(t) <= _REACH else f

    def _kernel_at(self, sigma: float) -> Kernel:
        if isinstance(self._kernel, GaussianKernel):  # whose points are sorted already
            return self._kernel.with_sigma(sigma)
        return self._shape.kernel(sigma)

    def spectrum(self, sigma: float) -> Spectrum:
        """Return the leading eigenpairs with a bandwidth: of points alone by `spectrum`, else those of the operator."""
        if self._spectrum is None or self._spectrum[0] != sigma:
            shape = self._shape
            if isinstance(shape, Cloud) and shape.splats is None and shape.mass is None:
                found = spectrum_of_points(torch.from_numpy(shape.points), min(NUM_MODES, len(shape) // 2), sigma=sigma)
            else:
                q = self.at(sigma)
                found = eigsh(q, min(NUM_MODES, q.shape[-1] // 2))
            self._spectrum = sigma, found
        return self._spectrum[1]


def positions_of(shape: Cloud | Grid) -> np.ndarray:
    """Return the positions of points or of occupied voxels, in three coordinates, shape (N, 3)."""
    if isinstance(shape, Cloud):
        return _padded(shape.points)
    return _padded(np.argwhere(shape.occupied) * np.asarray(shape.spacing))


def _padded(points: np.ndarray) -> np.ndarray:
    """Return the first three coordinates (N, 3), with zeros for those that are missing."""
    return np.pad(points, ((0, 0), (0, max(0, 3 - points.shape[1]))))[:, :3].astype(np.float32)


def _leading(spectrum: Spectrum, k: int) -> Spectrum:
    values, vectors, residuals = spectrum.values[:k], spectrum.vectors[:, :k], spectrum.residuals[:k]
    return replace(spectrum, values=values, vectors=vectors, residuals=residuals)


def _descriptors(spectrum: Spectrum) -> Tensor:
    """Return signatures that do not depend on the size of the shape, shape (N, d)."""
    heats = heat_kernel_signature(spectrum, num_times=20, scaled=True)
    return torch.cat([heats, wave_kernel_signature(spectrum, num_energies=40)], dim=1)


def _warning(q: Diffusion) -> str:
    """Return a sentence if Q is nearly the identity."""
    if not isinstance(q.kernel, GaussianKernel) or float(num_neighbors(q).nan_to_num(0).median()) > _ALONE:
        return ""
    return ". **σ is so small that Q is the identity.**"


def _as_colors(signal: Tensor) -> Tensor:
    """Convert three channels (N, 3) to colors, each scaled from its smallest to its largest value without outliers."""
    ordered = signal.sort(dim=0).values
    low, high = (ordered[int(share * (len(signal) - 1))] for share in (0.02, 0.98))
    return (0.1 + 0.8 * (signal - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)


def _ramp(values: Tensor, name: str = "viridis") -> Tensor:
    """Color numbers (N,) from their 2nd to their 98th percentile."""
    ordered = values.sort().values
    low, high = (float(ordered[int(share * (len(values) - 1))]) for share in (0.02, 0.98))
    return colormap(name, ((values - low) / ((high - low) or 1.0)).clamp(0, 1))


def _bands(level: Tensor) -> Tensor:
    """Color levels (N,) from 0 to 1, every other one of 16 bands darker."""
    is_dark = (16 * level).floor() % 2 == 1
    return colormap("plasma", level) * torch.where(is_dark, 0.8, 1.0)[:, None]


def _bytes(colors: Tensor) -> np.ndarray:
    return (255 * colors.clamp(0, 1)).round().to(torch.uint8).numpy()


def _as_tables(report: object) -> str:
    """Return a report in Markdown: lines with columns as rows of a table, which wrap, and others in bold."""
    lines = []
    for line in str(report).splitlines():
        cells = re.split(" {2,}(?![ ←])", line.strip().replace("|", "\\|"))
        if len(cells) == 1:
            lines += ["", f"**{cells[0]}**" if cells[0] else ""]
        else:
            if not lines[-1].startswith("|"):
                lines += ["", "| " * (len(cells) + 1), "|---" * len(cells) + "|"]
            lines.append(f"| {f'{_SPACE} | '.join(cells)} |")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

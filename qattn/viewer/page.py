"""Pages of the viewer: the controls and the scene of each browser, on viser."""

import contextlib
import math
import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import viser

from qattn import io
from qattn._progress import watched
from qattn.io import Cloud, Grid
from qattn.io.lengths import parse_sigma, spacing_of
from qattn.kernels import MixtureKernel
from qattn.viewer.model import NUM_MODES, NUM_TIMES, PANELS, Model, Picture, State, positions_of
from qattn.viewer.worker import Worker

__all__ = ["Viewer", "exported_page"]

_SIZE = 2.0  # of a shape in the scene
_GAP = 1.0  # shapes side by side, in sizes
_POINT = 2.0  # size of a point in spacings, with which random points cover a surface
_BACKGROUND = 60, 64, 72  # darker than any color of a picture, of which many are white
_EYE = np.array([0.5, -1.0, 0.4])  # direction to look from, with z up, as viser has it
_RIGHT = np.array([1.0, 0.5, 0.0]) / 1.25**0.5  # of who looks from there
_ASIDE = 0.7  # of the camera, to the right, because the controls hide a part of the scene
_TYPING = 0.5  # seconds after which a text that did not change is complete
_SIGMA_HINT = "A length (0.05), a multiple of the spacing (3x) or a share of the extent (2%)"
_TURNS = {  # of coordinates, so that an axis of the shape points up
    "y": np.array([[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]),
    "z": np.eye(3),
    "x": np.array([[0, 1.0, 0], [0, 0, 1], [1, 0, 0]]),
}


class Viewer:
    """A server of pages, one for each browser, with a state of its own.

    Args:
        shape: Cloud, mesh, splats or grid to show first.
        other: A second shape, for "Match".
        host: Address to listen on; other machines cannot reach the loopback address.
        port: Port to listen on, or a free one after it.
        sigma: Bandwidth to start with, a length; by default one that suits the shape.
    """

    def __init__(
        self,
        shape: Cloud | Grid,
        other: Cloud | Grid | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        sigma: float | None = None,
    ) -> None:
        self._shape, self._other, self._sigma = shape, other, sigma
        Model(shape, other).start()  # raises if there is nothing to show
        self.pages: dict[int, _Page] = {}
        self._lock = threading.Lock()
        self._server = _server(host, port)
        self._server.gui.configure_theme(control_width="large", show_logo=False, show_share_button=False)
        self._server.on_client_connect(self._open)
        self._server.on_client_disconnect(lambda client: self._close(client.client_id))

    @property
    def address(self) -> str:
        """Address to open in a browser."""
        return f"http://{self._server.get_host()}:{self._server.get_port()}"

    def wait(self) -> None:
        """Serve until the process is interrupted."""
        self._server.sleep_forever()

    def stop(self) -> None:
        """Close all pages and the server."""
        for client_id in list(self.pages):
            self._close(client_id)
        _stop(self._server)

    def _open(self, client: viser.ClientHandle) -> None:
        page = _Page(client, Model(self._shape, self._other), self._sigma)
        with self._lock:
            self.pages[client.client_id] = page
        page.recompute()

    def _close(self, client_id: int) -> None:
        with self._lock:
            page = self.pages.pop(client_id, None)
        if page is not None:
            page.close()


class _Page:
    """The controls of one browser, which change its state and ask the worker for a new picture."""

    def __init__(self, client: viser.ClientHandle, model: Model, sigma: float | None) -> None:
        self._client, self._model = client, model
        self._state = model.start(sigma)
        self._scene = _Scene(client.scene, model, "y")
        self._worker: Worker[tuple[Model, State], tuple[Model, Picture]] = Worker(self._compute, self._show, self._fail)
        self._add_controls()
        client.scene.on_click()(self._click)
        self._look()

    def recompute(self) -> None:
        """Ask for the picture of the current state; the old one stays until it is there."""
        self._bar.visible = True
        self._worker.request((self._model, self._state))

    def close(self) -> None:
        """End the worker, and let go of the model."""
        self._worker.close()
        self._scene = self._model = self._client = None  # type: ignore[assignment]

    def _add_controls(self) -> None:
        gui, state, model = self._client.gui, self._state, self._model
        self._panel = gui.add_dropdown("Show", PANELS, initial_value=state.panel)
        self._panel.on_update(self._change)
        self._slider = self._new_slider()
        self._sigma = gui.add_text("σ", self._written(state.sigma), hint=_SIGMA_HINT)
        self._sigma.on_update(self._write)
        self._signal = gui.add_dropdown("Signal", model.signals, initial_value=state.signal)
        self._steps = gui.add_slider("Steps", 1, 100, 1, state.steps)
        self._mode = gui.add_slider("Mode", 0, NUM_MODES - 1, 1, state.mode)
        self._time = gui.add_slider("Time", 0, NUM_TIMES - 1, 1, state.time)
        for control in (self._signal, self._steps, self._mode, self._time):
            control.on_update(self._change)
        self._bar = gui.add_progress_bar(100, animated=True)
        self._caption = gui.add_markdown("")
        self._plot: Any = None
        self._up = gui.add_dropdown("Up", tuple(_TURNS))
        self._up.on_update(self._turn)
        opened = gui.add_upload_button("Open a file")
        opened.on_upload(lambda _: self._read(opened.value, is_second=False))
        second = gui.add_upload_button("Open a second file, to match")
        second.on_upload(lambda _: self._read(second.value, is_second=True))
        export = gui.add_button("Save this page")
        export.on_click(lambda _: self._export())
        self._show_controls()

    def _new_slider(self, order: float | None = None) -> Any:
        """Return a slider of log σ for the current shape, with marks at powers of four."""
        low, high = self._exponents()
        marks = tuple((float(e), _spacings(e)) for e in range(math.ceil(low), math.floor(high) + 1, 2))
        start = self._exponent(self._state.sigma)
        slider = self._client.gui.add_slider("log₂ σ", low, high, 0.05, start, marks=marks, order=order)
        slider.on_update(self._slide)
        return slider

    def _exponents(self) -> tuple[float, float]:
        low, high = (math.log2(sigma / spacing_of(self._model.shape)) for sigma in self._model.sigma_range)
        return round(low, 2), round(high, 2)

    def _exponent(self, sigma: float) -> float:
        low, high = self._exponents()
        return min(max(math.log2(sigma / spacing_of(self._model.shape)), low), high)

    def _show_controls(self) -> None:
        """Show the controls of the current panel, and hide the others."""
        panel = self._state.panel
        self._signal.visible = self._steps.visible = panel == "Diffuse"
        self._mode.visible, self._time.visible = panel == "Modes", panel == "Signatures"

    def _slide(self, event: Any) -> None:
        """Take over σ from the slider, if it was moved by hand."""
        if event.client is not None:
            self._state = replace(self._state, sigma=spacing_of(self._model.shape) * 2.0**self._slider.value)
            self._sigma.value = self._written(self._state.sigma)
            self.recompute()

    def _write(self, event: Any) -> None:
        """Take over σ from the field, if it was written by hand; a sentence tells what it should be."""
        text = self._sigma.value
        if event.client is None:
            return
        time.sleep(_TYPING)
        if text != self._sigma.value:
            return
        try:
            sigma = parse_sigma(text, self._model.shape, "σ")
        except ValueError as error:
            self._fail(str(error))
            return
        self._state = replace(self._state, sigma=sigma)
        self._slider.value = self._exponent(sigma)
        self.recompute()

    def _written(self, sigma: float) -> str:
        """Return a bandwidth as a multiple of the spacing."""
        return f"{sigma / spacing_of(self._model.shape):.3g}x"

    def _change(self, _: object) -> None:
        """Take over the values of all controls but those of σ."""
        self._state = replace(
            self._state,
            panel=self._panel.value,
            signal=self._signal.value,
            steps=int(self._steps.value),
            mode=int(self._mode.value),
            time=int(self._time.value),
        )
        self._show_controls()
        self.recompute()

    def _click(self, event: Any) -> None:
        ray = self._scene.ray(np.array(event.ray_origin), np.array(event.ray_direction))
        self._state = replace(self._state, point=self._model.pick(*ray))
        if self._state.panel == "Diffuse" and self._signal.value != "Dirac":
            self._signal.value = "Dirac"  # which calls `_change`
        self.recompute()

    def _read(self, uploaded: Any, *, is_second: bool) -> None:
        """Read an uploaded file; a sentence tells why one is refused, and the old shape stays."""
        try:
            shape = _read(uploaded.name, uploaded.content)
            model = Model(self._model.shape, shape) if is_second else Model(shape)
            state = replace(self._state, panel="Match") if is_second else model.start()
        except Exception as error:  # any, because the page should outlive it
            self._fail(str(error))
            return
        self._model, self._state = model, state
        self._new_scene()
        order = self._slider.order
        self._slider.remove()
        self._slider = self._new_slider(order)
        self._sigma.value = self._written(state.sigma)
        self._signal.options, self._steps.value = tuple(model.signals), state.steps
        self._signal.value, self._panel.value = state.signal, state.panel
        self._look()
        self._change(None)

    def _turn(self, _: object) -> None:
        self._new_scene()
        self.recompute()

    def _new_scene(self) -> None:
        self._scene.remove()
        self._scene = _Scene(self._client.scene, self._model, self._up.value)

    def _look(self) -> None:
        """Turn the camera to the shapes."""
        camera = self._client.camera
        camera.position, camera.look_at = self._scene.eye, self._scene.center

    def _compute(self, request: tuple[Model, State]) -> tuple[Model, Picture]:
        model, state = request
        self._tell(0, None)
        with watched(self._tell):
            return model, model.picture(state)

    def _tell(self, count: int, total: int | None) -> None:
        """Fill the bar by the passes that are done; where nobody knows how many there will be, it is full and moves."""
        self._bar.animated = total is None
        self._bar.value = 100 * count / total if total else 100

    def _show(self, computed: tuple[Model, Picture]) -> None:
        model, picture = computed
        if model is not self._model:  # another file was opened meanwhile
            return
        self._scene.draw(picture)
        self._caption.content = picture.caption
        if self._plot is not None:
            self._plot.remove()
            self._plot = None
        if picture.curve is not None:
            x = np.arange(1.0, len(picture.curve) + 1)
            series = (
                viser.uplot.Series(label="mode"),
                viser.uplot.Series(label="frequency", stroke="#d84315", width=2),
            )
            space = (12, 24, 0, 0)  # above and to the right, for the last labels
            self._plot = self._client.gui.add_uplot(
                (x, picture.curve), series, scales={"x": {"time": False}}, aspect=1.6, padding=space
            )
        self._bar.visible = False

    def _fail(self, sentence: str) -> None:
        self._caption.content = f"**{sentence}**"
        self._bar.visible = False

    def _export(self) -> None:
        try:
            content = exported_page(self._model, self._model.picture(self._state)).encode()
            self._client.send_file_download("qattn.html", content)
        except Exception as error:  # any, because the page should outlive it
            self._fail(str(error))


class _Scene:
    """The shapes of a page, scaled to `_SIZE` and side by side.

    In a page that is exported, splats are points, because browsers do not let pages from disk start the workers that
    sort splats. There are no controls either, for which shapes would have to make room.
    """

    def __init__(self, scene: viser.SceneApi, model: Model, up: str, *, is_exported: bool = False) -> None:
        self._scene, self._model, self._rotation = scene, model, _TURNS[up]
        low, high = model.positions.min(0), model.positions.max(0)
        self._middle, self._scale = (low + high) / 2, _SIZE / float(np.linalg.norm(high - low))
        self._is_exported = is_exported
        self._handles: dict[str, Any] = {}
        scene.set_background_image(np.full((1, 1, 3), _BACKGROUND, np.uint8))

    @property
    def center(self) -> np.ndarray:
        """Point that the camera looks at."""
        between = 0.5 * _GAP * _SIZE if self._model.other is not None else 0.0
        aside = 0.0 if self._is_exported else _ASIDE * self._away
        return (between + aside) * _RIGHT

    @property
    def eye(self) -> np.ndarray:
        """Place from which all shapes are seen."""
        return self.center + 0.7 * self._away * _SIZE * _EYE

    @property
    def _away(self) -> float:
        """Distance from which all shapes are visible, relative to that for one of them."""
        return 1.0 if self._model.other is None else 1.8

    def ray(self, origin: np.ndarray, direction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert a ray in the scene to the coordinates of the shape."""
        return origin @ self._rotation / self._scale + self._middle, direction @ self._rotation

    def draw(self, picture: Picture) -> None:
        """Draw a picture in place of the last one."""
        model = self._model
        positions = model.positions if picture.moved is None else picture.moved
        self._draw("shape", model.shape, (positions - self._middle) * self._scale, picture.colors, 0.0)
        if model.other is None:
            return
        points = positions_of(model.other)
        low, high = points.min(0), points.max(0)
        scaled = (points - (low + high) / 2) * (_SIZE / float(np.linalg.norm(high - low)))
        colors = np.full((len(points), 3), 190, np.uint8) if picture.other is None else picture.other
        self._draw("other", model.other, scaled, colors, _GAP * _SIZE)

    def _draw(self, name: str, shape: Cloud | Grid, points: np.ndarray, colors: np.ndarray, shift: float) -> None:
        points = (points @ self._rotation.T + shift * _RIGHT).astype(np.float32)
        if isinstance(shape, Cloud) and shape.faces is not None:
            self._handles[name] = self._scene.add_mesh_trimesh(f"/{name}", _colored_mesh(points, shape.faces, colors))
            return
        handle = self._handles.get(name)
        if isinstance(shape, Cloud) and shape.splats is not None and not self._is_exported:
            if handle is not None and np.array_equal(handle.centers, points):
                handle.rgbs = colors
            else:
                covariances, opacities = _splats(shape, self._rotation * _SIZE / shape.extent)
                self._handles[name] = self._scene.add_gaussian_splats(
                    f"/{name}", points, covariances, colors, opacities
                )
            return
        if handle is not None and np.array_equal(handle.points, points):
            handle.colors = colors
            return
        size = _POINT * spacing_of(shape) * _SIZE / shape.extent
        self._handles[name] = self._scene.add_point_cloud(
            f"/{name}", points, colors, point_size=size, point_shape="circle", precision="float32"
        )

    def remove(self) -> None:
        """Remove the shapes."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}


def _spacings(exponent: int) -> str:
    """Return 2^exponent as a multiple of the spacing."""
    return f"{2**exponent}x" if exponent >= 0 else f"1/{2**-exponent}x"


def exported_page(model: Model, picture: Picture) -> str:
    """Return an HTML page that shows a picture by itself, without a server or a network."""
    server = _server("127.0.0.1", 8080)
    try:
        scene = _Scene(server.scene, model, "y", is_exported=True)
        scene.draw(picture)
        server.initial_camera.look_at = scene.center
        server.initial_camera.position = scene.eye
        return server.get_scene_serializer().as_html()
    finally:
        _stop(server)


def _server(host: str, port: int) -> viser.ViserServer:
    """Start a server that prints nothing."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        return viser.ViserServer(host=host, port=port, label="qattn", verbose=False)


def _stop(server: viser.ViserServer) -> None:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        server.stop()


def _read(name: str, content: bytes) -> Cloud | Grid:
    """Read the content of a file, whose name tells its format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(name).name
        path.write_bytes(content)
        try:
            return io.read(path)
        except (ValueError, OSError) as error:
            raise ValueError(str(error).replace(f"{folder}/", "")) from None


def _splats(shape: Cloud, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return covariances (N, 3, 3) and opacities (N, 1) of splats in coordinates that a matrix turns and scales."""
    assert shape.splats is not None
    _, covariances, *_ = MixtureKernel.from_splats(*shape.splats, sigma=1.0).tensors
    logits = shape.splats[3].reshape(-1, 1).astype(np.float64)
    return turn @ covariances.double().numpy() @ turn.T, 1 / (1 + np.exp(-logits))


def _colored_mesh(vertices: np.ndarray, faces: np.ndarray, colors: np.ndarray) -> Any:
    import trimesh  # here, because clouds do not need it

    return trimesh.Trimesh(vertices, faces, vertex_colors=colors, process=False)

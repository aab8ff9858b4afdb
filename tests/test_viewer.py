"""The viewer: its pictures are those of the library, its worker drops what is stale, and its pages work in Chromium."""

import gc
import io as streams
import math
import re
import shutil
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qattn
from qattn import diffusion, eigsh, io, shapes
from qattn.cli import app
from qattn.distances import geodesic_distance
from qattn.pictures import heat, signed
from qattn.viewer import PANELS, Model, Viewer, Worker, exported_page

pytestmark = pytest.mark.usefixtures("_one_thread")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
in_chromium = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"),
    pytest.mark.xdist_group("chromium"),
    pytest.mark.slow,
]


def creature(n=600, seed=0):
    return io.Cloud(shapes.creature(n, seed)[0].numpy())


def splats(n=600):
    """Flat splats on the creature, thin along its normals."""
    points, normals = shapes.creature(n)
    half = torch.nn.functional.normalize(normals + torch.tensor([0.0, 0.0, 1.0]), dim=-1)  # turns z to the normal
    columns = {f"scale_{i}": np.full(n, math.log(size), np.float32) for i, size in enumerate((0.06, 0.06, 0.01))}
    columns |= {f"rot_{i}": column.numpy() for i, column in enumerate((0 * half[:, 0], *half.T))}
    return io.Cloud(points.numpy(), None, {**columns, "opacity": np.full(n, 3.0, np.float32)})


def as_bytes(colors):
    return (255 * colors.clamp(0, 1)).round().byte().numpy()


@pytest.fixture(scope="module")
def model():
    return Model(creature(), creature(500, seed=1))


def test_a_dirac_is_diffused_as_the_library_does(model):
    state = model.start()
    picture = model.picture(state)
    q = diffusion(model.shape.points, state.sigma)
    dirac = np.zeros((600, 1), np.float32)
    dirac[state.point] = 600
    expected = as_bytes(heat(torch.from_numpy(q.power(10, dirac))[:, 0]))
    assert np.abs(picture.colors.astype(int) - expected).max() <= 3
    assert picture.colors[state.point, 0] > picture.colors[state.point, 2] + 50  # red at its source
    assert "10 steps" in picture.caption
    more = model.picture(replace(state, steps=50))
    assert (more.colors != picture.colors).any()


def test_steps_go_on_from_the_last_ones():
    model = Model(creature())
    state = model.start()
    for steps in (3, 7, 7, 2):
        picture, fresh = (m.picture(replace(state, steps=steps)) for m in (model, Model(creature())))
        assert (picture.colors == fresh.colors).all()
    other = replace(state, steps=5, point=9)
    assert (model.picture(other).colors == Model(creature()).picture(other).colors).all()
    noise = replace(state, steps=8, signal="noise")
    assert np.abs(model.picture(noise).colors.astype(int) - Model(creature()).picture(noise).colors).max() <= 1


def test_a_moved_slider_starts_from_the_last_potentials():
    model = Model(creature(2000))
    state = model.start()
    passes = []
    for notch in range(6):
        moved = replace(state, sigma=state.sigma * 2 ** (0.05 * notch))
        colors = model.picture(moved).colors.astype(int)
        table = model.picture(replace(moved, panel="Operator")).caption  # of the same operator
        passes.append(int(re.search(r"passes \| (\d+)", table)[1]))
        assert float(re.search(r"− 1\\\| \| (\S+)", table)[1]) <= 1e-3
        assert np.abs(colors - Model(creature(2000)).picture(moved).colors).max() <= 3
    assert max(passes[2:]) <= 2 < passes[0]
    far = replace(state, sigma=20 * state.sigma)
    assert np.abs(model.picture(far).colors.astype(int) - Model(creature(2000)).picture(far).colors).max() <= 3


def test_positions_move_as_those_of_the_command(model):
    state = replace(model.start(), signal="xyz", steps=1)
    picture = model.picture(state)
    expected = diffusion(model.shape.points, state.sigma) @ model.shape.points
    assert np.abs(picture.moved - expected).max() < 2e-3 * model.shape.extent


def test_modes_and_signatures_are_those_of_the_spectrum(model):
    state = replace(model.start(), panel="Modes", mode=3)
    picture = model.picture(state)
    spectrum = qattn.spectrum(torch.from_numpy(model.shape.points), 40, sigma=state.sigma)
    expected = as_bytes(signed(spectrum.vectors[:, 3]))
    difference = np.abs(picture.colors.astype(int) - expected)
    assert np.median(difference) <= 2
    assert len(picture.curve) == 40
    assert np.allclose(picture.curve[1:], spectrum.frequencies[1:], rtol=2e-2)
    assert all(f"| {name} | {choice} |" in picture.caption for name, choice in spectrum.choices.items())
    early, late = (model.picture(replace(state, panel="Signatures", time=t)).colors for t in (0, 59))
    assert (early != late).any()


def test_modes_of_a_mesh_are_those_of_its_masses():
    vertices, faces = shapes.sphere_mesh(3)
    model = Model(io.Cloud(vertices.numpy(), faces.numpy()))
    state = replace(model.start(), panel="Modes")
    picture = model.picture(state)
    spectrum = eigsh(diffusion(vertices, state.sigma, model.shape.mass), 40)
    assert np.allclose(picture.curve[1:], spectrum.frequencies[1:], rtol=2e-2)
    assert "|" not in picture.caption


def test_distances_are_those_of_the_library(model):
    state = replace(model.start(), panel="Distance from here", point=5)
    picture = model.picture(state)
    distance = geodesic_distance(diffusion(model.shape.points, state.sigma), 5)
    assert f"at most {distance.max():.4g}"[:11] in picture.caption
    assert len(np.unique(picture.colors, axis=0)) > 50


def test_a_shape_matches_itself():
    cloud = creature()
    picture = Model(cloud, cloud).picture(replace(Model(cloud).start(), panel="Match"))
    assert (picture.other == picture.colors).all(1).mean() > 0.99


def test_the_operator_is_described(model):
    caption = model.picture(replace(model.start(), panel="Operator")).caption
    for text in ("passes", "error of row sums", "keeps mass", "GaussianKernel", "spacings"):
        assert text in caption


def test_a_tiny_bandwidth_is_called_the_identity(model):
    caption = model.picture(replace(model.start(), sigma=1e-5)).caption
    assert "Q is the identity" in caption
    assert "identity" not in model.picture(model.start()).caption


def test_attributes_noise_splats_and_voxels():
    cloud = creature(200).with_attributes(height=np.arange(200.0), bad=np.full(200, np.nan))
    model = Model(cloud)
    assert model.signals == ["Dirac", "noise", "xyz", "height", "bad"]
    for signal in ("noise", "height"):
        assert model.picture(replace(model.start(), signal=signal)).colors.shape == (200, 3)
    with pytest.raises(ValueError, match="`bad` is NaN"):
        model.picture(replace(model.start(), signal="bad"))
    grid = Model(io.Grid(np.ones((6, 6, 6), bool), (1.0, 1.0, 1.0)))
    assert len(grid) == 216
    for panel in ("Diffuse", "Modes", "Operator"):
        assert grid.picture(replace(grid.start(), panel=panel)).colors.shape == (216, 3)
    with pytest.raises(ValueError, match="needs a `GaussianKernel`"):
        grid.picture(replace(grid.start(), panel="Distance from here"))
    with pytest.raises(ValueError, match="Open a second file"):
        grid.picture(replace(grid.start(), panel="Match"))
    with pytest.raises(ValueError, match="two distinct points"):
        Model(io.Cloud(np.zeros((3, 3)))).start()


def test_the_point_under_the_mouse(model):
    points = model.positions
    nose = int(points[:, 0].argmax())
    assert model.pick(points[nose] + np.array([5.0, 0, 0]), np.array([-1.0, 0, 0])) == nose
    towards = points[7] - np.array([0.3, 4.0, 0.1])
    found = model.pick(np.array([0.3, 4.0, 0.1]), towards)
    along = (points - np.array([0.3, 4.0, 0.1])) @ (towards / np.linalg.norm(towards))
    assert along[found] <= along[7] + 1e-5  # it, or one in front of it


def test_a_worker_drops_stale_requests_and_outlives_errors():
    started, go = threading.Event(), threading.Event()
    computed, shown, failed = [], [], []

    def compute(number):
        computed.append(number)
        started.set()
        go.wait(10)
        return 1 / number

    worker = Worker(compute, shown.append, failed.append)
    worker.request(1)
    assert started.wait(10)
    for number in (2, 3, 0):
        worker.request(number)
    go.set()
    worker.wait()
    assert (computed, shown, failed) == ([1, 0], [1.0], ["division by zero"])
    worker.request(4)
    worker.wait()
    assert shown == [1.0, 0.25]
    worker.close()
    worker.request(5)
    time.sleep(0.05)
    assert computed == [1, 0, 4]


def test_the_command_refuses_in_one_line(tmp_path):
    bad = tmp_path / "bad.ply"
    bad.write_bytes(b"ply\nnonsense")
    result = CliRunner().invoke(app, ["view", str(bad)])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    result = CliRunner().invoke(app, ["view", "--export", str(tmp_path / "page.txt")])
    assert result.exit_code == 2
    assert ".html" in result.output


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = "--headless=new --no-sandbox --disable-dev-shm-usage --use-angle=swiftshader --enable-unsafe-swiftshader"
    for flag in [*flags.split(), "--window-size=1000,700"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def viewer():
    served = Viewer(creature(), port=8321)
    yield served
    served.stop()


def until(condition, seconds=40.0):
    """Wait until a condition is true; return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.1)
    return value


def text(browser):
    return browser.find_element("tag name", "body").text


def opened(browser, viewer):
    """Open the page, and wait for its first picture; return its number."""
    before = set(viewer.pages)
    browser.get(viewer.address)
    until(lambda: "Dirac at point" in text(browser))
    return (set(viewer.pages) - before).pop()


def pixels(browser):
    """The part of the window without controls, (H, W, 3)."""
    from PIL import Image

    image = Image.open(streams.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    return np.asarray(image)[200:, :640].astype(int)


def seen(browser, condition):
    """Wait until the pixels meet a condition; return them."""
    return until(lambda: [image] if condition(image := pixels(browser)) else [])[0]


def num_colored(image):
    return int((image.max(-1) - image.min(-1) > 60).sum())


def num_different(image, other):
    return int((np.abs(image - other).max(-1) > 30).sum())


class TestInChromium:
    pytestmark = in_chromium

    def test_a_slider_changes_the_colors_and_a_click_starts_a_dirac(self, browser, viewer):
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        number = opened(browser, viewer)
        before = seen(browser, lambda image: num_colored(image) > 100)
        browser.find_elements("css selector", "[role=slider]")[1].send_keys(Keys.END)
        until(lambda: "100 steps" in text(browser))
        after = seen(browser, lambda image: num_different(image, before) > 500)
        page = viewer.pages[number]
        point = page._state.point
        rows, columns = np.nonzero(np.abs(after - after[-1, 0]).max(-1) > 40)  # the shape, not the background
        x = int(np.percentile(columns, 15))
        y = int(np.median(rows[np.abs(columns - x) < 4])) + 200
        ActionChains(browser).move_by_offset(x, y).click().perform()
        until(lambda: page._state.point != point)
        until(lambda: f"Dirac at point {page._state.point:,}" in text(browser))
        clicked = seen(browser, lambda image: num_different(image, after) > 500)
        around = clicked[max(0, y - 208) : y - 192, x - 8 : x + 8]
        assert num_colored(around) > 0
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

    def test_a_bandwidth_is_written_as_on_the_command_line(self, browser, viewer):
        from selenium.webdriver.common.keys import Keys

        page = viewer.pages[opened(browser, viewer)]
        fields = browser.find_elements("css selector", "input")
        field = next(field for field in fields if field.get_attribute("value") == page._sigma.value)
        for text_of_sigma, shown in (("2%", "2.00% of the extent"), ("3y", "got '3y'"), ("3x", "(3 spacings")):
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(text_of_sigma)
            until(lambda shown=shown: shown in text(browser))
        assert page._slider.value == pytest.approx(math.log2(3), abs=0.03)
        browser.find_elements("css selector", "[role=slider]")[0].send_keys(Keys.HOME)
        until(lambda: "(0.5 spacings" in text(browser))
        assert field.get_attribute("value") == "0.5x"

    def test_a_bad_file_shows_its_sentence_and_a_good_one_opens(self, browser, viewer, tmp_path):
        number = opened(browser, viewer)
        bad, good = tmp_path / "bad.ply", tmp_path / "good.ply"
        bad.write_bytes(b"ply\nnonsense")
        vertices, faces = shapes.sphere_mesh(2)
        io.write(good, io.Cloud(vertices.numpy(), faces.numpy()))
        browser.find_elements("css selector", "input[type=file]")[0].send_keys(str(bad))
        until(lambda: "bad.ply" in text(browser))
        assert str(tmp_path) not in text(browser)
        browser.find_elements("css selector", "input[type=file]")[0].send_keys(str(good))
        until(lambda: len(viewer.pages[number]._model) == len(vertices))
        until(lambda: "Dirac at point" in text(browser))

    def test_two_pages_have_states_of_their_own_and_closing_one_frees_it(self, browser, viewer):
        from selenium.webdriver.common.keys import Keys

        first = opened(browser, viewer)
        browser.switch_to.new_window("tab")
        second = opened(browser, viewer)
        until(lambda: set(viewer.pages) == {first, second})  # and no page of another test
        browser.find_elements("css selector", "[role=slider]")[1].send_keys(Keys.END)
        until(lambda: "100 steps" in text(browser))
        assert viewer.pages[first]._state.steps == 10
        held, thread = weakref.ref(viewer.pages[second]._model), viewer.pages[second]._worker._thread
        browser.close()
        browser.switch_to.window(browser.window_handles[0])
        until(lambda: set(viewer.pages) == {first})
        until(lambda: not thread.is_alive())
        until(lambda: gc.collect() is not None and held() is None)
        assert "10 steps" in text(browser)

    @pytest.mark.parametrize("shape", [creature(), splats()], ids=["points", "splats"])
    def test_an_exported_page_works_from_disk(self, browser, tmp_path, shape):
        model = Model(shape)
        browser.get_log("browser")  # of other tests
        target = Path(tmp_path / "page.html")
        target.write_text(exported_page(model, model.picture(model.start())))
        browser.get(target.as_uri())
        until(lambda: num_colored(pixels(browser)) > 100)
        text = target.read_text()
        assert "http://127.0.0.1" not in text
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

    def test_splats_are_drawn_as_splats(self, browser):
        from selenium.webdriver.common.keys import Keys

        browser.get_log("browser")  # of other tests
        served = Viewer(splats(), port=8360)
        number = opened(browser, served)
        before = seen(browser, lambda image: num_colored(image) > 100)
        browser.find_elements("css selector", "[role=slider]")[1].send_keys(Keys.END)
        until(lambda: "100 steps" in text(browser))
        seen(browser, lambda image: num_different(image, before) > 500)
        handle = served.pages[number]._scene._handles["shape"]
        thinnest, _, widest = np.linalg.eigvalsh(handle.covariances.astype(np.float64)).T
        assert np.allclose(np.sqrt(widest / thinnest), 6, rtol=0.1)
        assert np.allclose(handle.opacities, 255 / (1 + math.exp(-3)), atol=1)
        messages = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert [
            text for text in messages if "computeBoundingSphere" not in text
        ] == []  # which viser says of any splats
        served.stop()


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_has_a_computation(model, panel):
    assert model.picture(replace(model.start(), panel=panel)).colors.shape == (600, 3)

"""Pages run as shown: the blocks of Python of each, one after the other, and the commands, on files as named."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trimesh
from cases import slow
from matplotlib import pyplot
from PIL import Image
from test_io import WHOLE
from typer.testing import CliRunner

import qattn
from qattn import io
from qattn.cli import app

ROOT = Path(qattn.__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
WITH_PYTHON = [page for page in PAGES if "```python\n" in page.read_text()]
LONG = {"tutorial", "motion", "mixtures", "speed", "points"}
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/paper/README.md", "benchmarks/README.md")]
GENERATED = ("index.md", "paper.md", "benchmarks.md", "contributing.md", "changelog.md")  # by docs/readme.py

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.mark.slow
def test_the_import_graph_is_drawn(tmp_path):
    target = tmp_path / "graph.png"
    subprocess.run([sys.executable, str(ROOT / "docs" / "import_graph.py"), str(target)], check=True)
    assert pyplot.imread(target).shape[0] > 1000


def test_the_picture_of_the_import_graph_is_of_today():
    """`python docs/import_graph.py` draws it anew."""
    graph = runpy.run_path(str(ROOT / "docs" / "import_graph.py"))["read_graph"]()
    with Image.open(ROOT / "docs" / "images" / "import_graph.png") as picture:
        assert picture.info["Graph"] == graph.checksum()


@pytest.mark.parametrize(
    "page", [slow(page) if page.stem in LONG else page for page in WITH_PYTHON], ids=lambda page: page.stem
)
def test_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_run(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("Agg")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    exec(compile(notebook.read_text(), notebook.name, "exec"), {})
    pyplot.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "files.md"], ids=lambda page: page.stem)
def test_commands_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trimesh.creation.icosphere(3).export("bunny.obj")
    (tmp_path / "scan.laz").write_bytes(WHOLE["scan.laz"])
    values = np.random.default_rng(0).random((8, 8, 8)).astype(np.float32)
    io.write("brain.nii.gz", io.Grid(values, (1.0, 1.0, 1.0)))
    lines = [
        shlex.split(line, comments=True) for line in re.findall(r"^\$ qattn (.*)$", page.read_text(), re.MULTILINE)
    ]
    lines = [
        line for line in lines if line[0] not in ("doctor", "demo", "view")
    ]  # which have tests of their own, in small
    assert len(lines) >= 5
    for line in lines:
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0, result.output
        assert all((tmp_path / word).exists() for word in line if word.endswith((".ply", ".npz", ".png", ".nii.gz")))


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= targets
    for script in re.findall(r"((?:examples|benchmarks)/[\w/]+\.py)", text):
        assert (ROOT / script).exists()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / link).exists() or link in GENERATED


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in [*PAGES, *(ROOT / "docs" / "api").glob("*.md"), *NOTEBOOKS]:
        assert page.relative_to(ROOT / "docs").with_suffix(".md").as_posix() in navigation


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    packages = [qattn, qattn.kernels, qattn.nn, qattn.spectra, qattn.distances, qattn.distributed]
    for name in {name for package in packages for name in package.__all__}:
        assert re.search(rf"^::: qattn\.(\w+\.)*{name}\b", text, re.MULTILINE), name

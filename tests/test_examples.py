"""Each example runs, in small, and draws its picture."""

import runpy
import sys
from pathlib import Path

import pytest

import qattn

FOLDER = Path(qattn.__file__).parent.parent / "examples"
EXAMPLES = [
    path
    for path in sorted(FOLDER.rglob("*.py"))
    if "__main__" in path.read_text() and path.stem != "distributed"  # which test_distributed.py starts on two ranks
]

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(FOLDER).with_suffix("").as_posix())
def test_an_example_draws_its_picture(path, tmp_path, monkeypatch, capsys):
    """And what it says of the paper's claims is true: it fails where one does not hold."""
    monkeypatch.chdir(tmp_path)
    for folder in {FOLDER, path.parent}:
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", [path.name, "--quick"])
    runpy.run_path(str(path), run_name="__main__")
    assert (tmp_path / f"{path.stem}.png").read_bytes()[:4] == b"\x89PNG"
    assert f"wrote {path.stem}.png" in capsys.readouterr().out

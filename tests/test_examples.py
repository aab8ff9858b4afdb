"""Each example runs, in small, and draws its picture."""

import runpy
import sys
from pathlib import Path

import pytest

import qattn

FOLDER = Path(qattn.__file__).parent.parent / "examples"
EXAMPLES = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if "__main__" in path.read_text() and path.stem != "distributed"  # which test_distributed.py starts on two ranks
)

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_draws_its_picture(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert f"wrote {name}.png" in capsys.readouterr().out

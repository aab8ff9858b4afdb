"""Each example runs, in small, and draws its picture."""

import importlib
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qattn

FOLDER = Path(qattn.__file__).parent.parent / "examples"
EXAMPLES = [
    path
    for path in sorted(FOLDER.rglob("*.py"))
    if "__main__" in path.read_text() and path.stem != "distributed"  # which test_distributed.py starts on two ranks
]

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(FOLDER).with_suffix("").as_posix())
def test_an_example_draws_its_picture(path, tmp_path, monkeypatch, capsys):
    """The paper's claims hold too: an example fails where one does not."""
    if path.stem == "pyg":
        pytest.importorskip("torch_geometric")
    monkeypatch.chdir(tmp_path)
    for folder in {FOLDER, path.parent}:
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", [path.name, "--quick"])
    runpy.run_path(str(path), run_name="__main__")
    assert (tmp_path / f"{path.stem}.png").read_bytes()[:4] == b"\x89PNG"
    assert f"wrote {path.stem}.png" in capsys.readouterr().out


def test_a_claim_that_does_not_hold_fails(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER / "paper"))
    claims = importlib.import_module("claims")
    claims.report(("1 + 1 = 2", "2", True), ("1 = 2", "no", None))
    assert capsys.readouterr().out.count("the paper") == 2
    for false in (False, np.bool_(False), torch.tensor(False)):
        with pytest.raises(SystemExit, match="1 of 2 claims did not hold"):
            claims.report(("1 + 1 = 2", "2", np.bool_(True)), ("1 + 1 = 3", "2", false))

"""The report of `make gpu`, on a CPU with small clouds: its first run on a GPU should not be the first of all."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest
import torch
from conftest import Held
from interpreter import products_of_bfloat16  # noqa: F401  (a fixture)

from qattn import doctor
from qattn.attention import flex, tensor_cores


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pretend that the CPU, on which Triton interprets, is a GPU; return the path of the report."""
    device = SimpleNamespace(name="a CPU", major=8, minor=0, multi_processor_count=2, total_memory=2**30)
    answers = {
        "is_available": True, "get_device_properties": device, "synchronize": None, "reset_peak_memory_stats": None,
        "max_memory_allocated": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(doctor, "_devices", lambda: [("cpu", torch.float32)])
    monkeypatch.setattr(doctor, "_LARGE", {"cpu": 128})
    monkeypatch.setattr(doctor, "_SMALL", 128)
    monkeypatch.setattr(doctor, "_BUDGET", 0)
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)  # or FlexAttention would be compiled for a GPU
    monkeypatch.setattr(tensor_cores, "MANY_PAIRS", 200**2)  # for the large clouds alone
    changes = {"DEVICE": "cpu", "POINTS": 200, "MANY_POINTS": 300, "TRAINED": (100,), "REPORT": tmp_path / "report.md"}
    for name, value in changes.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    return tmp_path / "report.md"


def write(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    run = SimpleNamespace(returncode=code, stdout="90 passed", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: run)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == code


def test_every_section_is_written(report, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    write(monkeypatch, 0)
    text = report.read_text()
    wrong = [line for line in text.splitlines() if gpu.BAD in line]
    held("make gpu: sections, on a CPU, lines that fail", "interpreted", len(wrong), 0)
    assert "Nothing is wrong." in text
    for title in gpu.SECTIONS:
        assert f"## {title}" in text
    for name in gpu.PASSES:
        assert f"| {name} |" in text
    assert "| triton | float32 |" in text


def test_what_fails_is_in_the_verdict(report, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that raises, and tests that fail; all the rest is there."""
    monkeypatch.setattr(gpu, "QDiffNet", lambda *_: 1 / 0)
    monkeypatch.setattr(gpu, "SECTIONS", {title: gpu.SECTIONS[title] for title in ("Machine", "Training", "Tests")})
    write(monkeypatch, 1)
    verdict = report.read_text().split("## Machine")[0]
    assert "Wrong:" in verdict
    assert "**failed**: ZeroDivisionError: division by zero" in verdict
    assert "**failed**: pytest ended with 1" in verdict
    assert verdict.count("- ") == 2


def test_passes_are_those_of_the_model() -> None:
    modeled = {row["what"] for row in json.loads(gpu.MODEL.read_text())["triton"]}
    assert set(gpu.PASSES) <= modeled

"""The doctor: measurements, reasons against backends, and detection of wrong results."""

import pytest
import torch
from typer.testing import CliRunner

from qattn import Attended, backends, doctor
from qattn.attention import flex
from qattn.attention.dispatch import BACKENDS
from qattn.cli import app


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Take small problems, and hide the compiler from Flex, which would take most of the time."""
    monkeypatch.setattr(doctor, "_LARGE", {"cpu": 256})
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)


@pytest.mark.slow
def test_backends_measures_what_is_usable_and_explains_the_rest():
    reports = {(report.name, report.dtype): report for report in backends() if report.device == "cpu"}
    assert {name for name, _ in reports} == set(BACKENDS)
    for name in ("native", "sdpa", "reference"):
        for dtype in (torch.float32, torch.float64):
            report = reports[name, dtype]
            assert report.is_usable
            assert report.is_exact
            assert report.lse_ns > 0
            assert report.out_ns > 0
    report = reports["flex", torch.float32]
    assert report.reasons == ("no C++ compiler was found, which torch.compile needs on a CPU",)
    assert report.lse_error is None
    assert "device is cpu (takes cuda)" in reports["flash_attn", torch.float32].reasons


def test_the_table_shows_every_backend():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for name in BACKENDS:
        assert name in result.output
    assert "cpu, float32, lse alone" in result.output


@pytest.mark.slow
def test_a_wrong_kernel_is_found(monkeypatch):
    right = BACKENDS["sdpa"].attend

    def wrong(self, inputs):
        out, lse = right(inputs)
        return Attended(out, lse + 0.01)

    monkeypatch.setattr(type(BACKENDS["sdpa"]), "attend", wrong)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "error above its tolerance" in " ".join(result.output.split())


@pytest.mark.slow
def test_a_kernel_that_crashes_is_reported_and_the_others_go_on(monkeypatch):
    def crash(self, inputs):
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setattr(type(BACKENDS["sdpa"]), "attend", crash)
    reports = [report for report in backends() if report.name == "sdpa"]
    assert reports[0].reasons == ("failed here: RuntimeError: no kernel image is available",)
    assert any(report.is_exact for report in backends() if report.name == "native")

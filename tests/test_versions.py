"""Versions of torch that lack something, and machines on which Numba or finufft is missing or broken."""

import os
import subprocess
import sys

import matrix
import pytest
import torch

import qattn
from qattn import _versions
from qattn.attention.dispatch import BACKENDS
from qattn.attention.inputs import Inputs

_WITHOUT_NUMBA = """
import sys, warnings
if "hidden" in sys.argv:
    sys.modules["numba"] = None
import torch, qattn

reason = sys.argv[-1]
points, signal = torch.rand(900, 3, dtype=torch.float64), torch.randn(900, 2, dtype=torch.float64)
K = torch.exp(-((points[:, None] - points) ** 2).sum(-1) / (2 * 0.3**2))
weights = K / K.sum(1, keepdim=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    q = qattn.diffusion(points, 0.3, normalization="row")
    torch.testing.assert_close(q @ signal, weights @ signal)
assert len(caught) == 1, caught
assert f"two to four times as long without compiled loops: {reason}" in str(caught[0].message), caught[0]
assert qattn.diffusion(points, 0.3, tol=1e-6).marginal_error < 1e-6
mixture = qattn.MixtureKernel(points, torch.zeros(900), 0.3)
torch.testing.assert_close(mixture.attend(torch.zeros(900).double(), signal).out, weights @ signal)
sigma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
(qattn.diffusion(points, sigma, normalization="row") @ signal).square().sum().backward()
step = 1e-5
ends = [(qattn.diffusion(points, 0.3 + h, normalization="row") @ signal).square().sum() for h in (step, -step)]
torch.testing.assert_close(sigma.grad, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=0)
large = qattn.diffusion(torch.rand(4200, 3), 0.3)  # eigenpairs would start from a coarse level
assert reason in str(large.kernel), str(large.kernel)
assert float(qattn.eigsh(large, 3).residuals.max()) < 1e-2
distances = (points[:, None] - points - 1).norm(dim=-1).mean() - (points[:, None] - points).norm(dim=-1).mean()
torch.testing.assert_close(qattn.distances.energy_distance(points, points + 1), distances)
for call in (
    lambda: qattn.attend(points, points, backend="native"),
    lambda: qattn.GaussianKernel(points, 0.3, method="tiles"),
    lambda: qattn.MixtureKernel(points, torch.zeros(900), 0.3, method="tiles"),
):
    try:
        call()
    except (NotImplementedError, ValueError) as error:
        assert reason in str(error), error
    else:
        raise AssertionError("nothing was said")
"""

_WITHOUT_FINUFFT = """
import sys
if "hidden" in sys.argv:
    sys.modules["finufft"] = None
import torch, qattn

reason = sys.argv[-1]
points = torch.rand(5000, 3)
kernel = qattn.GaussianKernel(points, 0.3)
assert reason in str(*kernel.choices()), kernel.choices()
assert kernel.method != "fourier"
lse = -(torch.cdist(points[:9].double(), points.double()) ** 2) / (2 * 0.3**2)
torch.testing.assert_close(kernel.attend(torch.zeros(5000)).lse[:9].double(), lse.logsumexp(1), rtol=0, atol=1e-3)
try:
    qattn.GaussianKernel(points, 0.3, method="fourier")
except ValueError as error:
    assert f'`method="fourier"` cannot be used here: {reason}' in str(error), error
else:
    raise AssertionError("nothing was said")
"""


def run(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def broken(library, folder):
    """A folder with a library that does not import, as of another version of NumPy."""
    (folder / library).mkdir()
    (folder / library / "__init__.py").write_text('raise ImportError("it needs another NumPy\\nin its second line")')
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["off", "hidden", "broken"])
def test_without_numba_others_serve_and_say_that_they_are_slower(how, tmp_path):
    """Functions that need Numba say so."""
    reason = {
        "off": "Numba's compiler is turned off, by NUMBA_DISABLE_JIT",
        "hidden": "numba is not installed: `pip install numba`",
        "broken": "numba is installed, but does not import (ImportError: it needs another NumPy)",
    }[how]
    environment = broken("numba", tmp_path) if how == "broken" else {}
    run(_WITHOUT_NUMBA, how, reason, NUMBA_DISABLE_JIT="1" if how == "off" else "0", **environment)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hidden", "broken"])
def test_without_finufft_other_methods_serve(how, tmp_path):
    reason = {
        "hidden": "finufft is not installed: `pip install finufft`",
        "broken": "finufft is installed, but does not import (ImportError: it needs another NumPy)",
    }[how]
    run(_WITHOUT_FINUFFT, how, reason, **(broken("finufft", tmp_path) if how == "broken" else {}))


@pytest.mark.parametrize(("device", "least"), [("cpu", "2.13"), ("cuda", "2.9")])
def test_an_old_torch_is_a_reason_against_flex(device, least, monkeypatch):
    monkeypatch.setattr(_versions, "_TORCH", (2, 8))
    points = torch.empty(1, 4, 3, device="meta")
    reason = f"needs torch {least} on {device}, and this is {torch.__version__}"
    inputs = Inputs(points, points)
    monkeypatch.setattr(Inputs, "device", torch.device(device))
    assert reason in BACKENDS["flex"].not_supported_reasons(inputs)
    monkeypatch.setattr(_versions, "_TORCH", (2, 13))
    assert reason not in BACKENDS["flex"].not_supported_reasons(inputs)


def test_an_old_torch_is_a_reason_against_tiles_by_flex(monkeypatch):
    monkeypatch.setattr(_versions, "_TORCH", (2, 8))
    with pytest.raises(ValueError, match=r"it uses FlexAttention, which needs torch 2\.13 on cpu"):
        qattn.GaussianKernel(torch.rand(10, 3), 1.0, method="tiles", backend="flex")


def test_export_is_told_from_a_plain_call(monkeypatch):
    assert not _versions.is_exporting()
    monkeypatch.delattr(torch.compiler, "is_exporting", raising=False)  # as in torch 2.6
    assert not _versions.is_exporting()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert _versions.is_exporting()


def test_the_matrix_finds_the_python_that_runs_it(monkeypatch):
    """Python on Windows has no name with its version."""
    monkeypatch.setenv("PATH", "")
    assert matrix.interpreter(f"{sys.version_info.major}.{sys.version_info.minor}") == sys.executable


@pytest.mark.parametrize(("arguments", "code"), [(["oldest"], 1), ([], 0)])
def test_the_matrix_fails_if_what_it_is_asked_for_does_not_run(arguments, code, monkeypatch, capsys):
    rows = []
    monkeypatch.setattr(matrix, "interpreter", lambda version: None)
    monkeypatch.setattr(matrix, "write_row", lambda name, cells: rows.append(name))
    monkeypatch.setattr(sys, "argv", ["matrix.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert int(ended.value.code) == code
    assert rows == (arguments or list(matrix.SETS))
    assert "oldest: not run, there is no Python 3.10 here" in capsys.readouterr().out

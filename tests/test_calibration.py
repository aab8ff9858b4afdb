"""Costs on a GPU: measured once, kept on disk, and measured again where what is kept does not serve."""

import json

import pytest
import torch
from fake_cuda import Synchronizations, allow_fake_cuda_tensors
from torch._subclasses.fake_tensor import FakeTensorMode

from qattn.kernels.gaussian import calibration
from qattn.kernels.gaussian.calibration import Rates
from qattn.kernels.gaussian.cost import Workload, choose
from qattn.kernels.gaussian.prepared import PreparedPoints
from qattn.ranks import ALONE
from qattn.tiles import device

TRUE = Rates(pair=0.001, comparison=0.01, point=0.5, call=4e5)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A pretended GPU with known costs, whose passes are counted."""
    allow_fake_cuda_tensors()
    measured = []

    def attend(query, key, sigma, value, bias, cutoff=None):
        measured.append((query.size, cutoff is not None))

    def seconds(run, on):
        run()
        size, is_tiled = measured[-1]
        tiled = TRUE.call + TRUE.point * size + TRUE.comparison * (size / 64) ** 2
        return 1e-9 * (tiled if is_tiled else TRUE.pair * size**2)

    monkeypatch.setattr(device, "why_not_installed", lambda: None)
    monkeypatch.setattr(device, "attend", attend)
    monkeypatch.setattr(calibration, "_seconds", seconds)
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda on: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda on: (8, 0))
    calibration.rates.cache_clear()
    with FakeTensorMode():
        yield measured
    calibration.rates.cache_clear()


CUDA = torch.device("cuda")


def test_costs_are_those_of_the_gpu(gpu):
    assert list(calibration.rates(CUDA)) == pytest.approx(list(TRUE), rel=1e-6)
    assert len(gpu) == 4


def test_costs_are_measured_once(gpu, tmp_path):
    first = calibration.rates(CUDA)
    calibration.rates.cache_clear()  # as a new process
    assert calibration.rates(CUDA) == first
    assert len(gpu) == 4
    (name,) = json.loads((tmp_path / "costs.json").read_text())
    assert name.startswith("A GPU, torch ")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"A GPU": [1]}', '{"A GPU": "x"}'])
def test_a_damaged_file_is_measured_again(gpu, tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    assert list(calibration.rates(CUDA)) == pytest.approx(list(TRUE), rel=1e-6)


def test_nothing_is_kept_where_nothing_can_be_written(gpu, monkeypatch):
    monkeypatch.setattr(calibration, "cache_folder", lambda: None)
    assert list(calibration.rates(CUDA)) == pytest.approx(list(TRUE), rel=1e-6)


def test_nothing_is_measured_without_triton(gpu, monkeypatch):
    monkeypatch.setattr(device, "why_not_installed", lambda: "triton is not installed")
    assert calibration.rates(CUDA) is None
    assert gpu == []


@pytest.mark.parametrize(("num_points", "count"), [(1000, 0), (10_000, 4)])
def test_few_pairs_do_not_wait_for_measurements(gpu, num_points, count):
    """Few pairs are all computed, whatever they cost."""
    points = torch.empty(num_points, 3, device="cuda")
    refusals = {"fourier": ["not here"], "tiles": ["not here"]}
    with Synchronizations():
        found = choose(PreparedPoints(points, points, ALONE), 0.1, 1e-3, Workload(), refusals)
    assert ("measured on this GPU" in found.notes["exact"]) == (count > 0)
    assert len(gpu) == count

"""The way from a call to the compiled loop: functions of qattn between the two."""

import sys
from pathlib import Path

import pytest
import torch

import qattn
from qattn.tiles.loops import gaussian

ROOT = str(Path(qattn.__file__).parent)
points = torch.nn.functional.normalize(torch.randn(600, 3, generator=torch.Generator().manual_seed(0)), dim=-1)


def walk(monkeypatch, function, loop="attend_tiles"):
    """The functions of qattn on the way from a call to a loop, the deepest of all ways."""
    ways, original = [], getattr(gaussian, loop)

    def spied(*args):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(ROOT):
                names.append(f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_code.co_name}")
            frame = frame.f_back
        ways.append(names[::-1])
        return original(*args)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(gaussian, loop, spied)
            function()
    finally:
        torch.set_num_threads(threads)
    assert ways
    return max(ways, key=len)


@pytest.mark.parametrize(("method", "loop"), [("exact", "attend_tiles"), ("tiles", "sum_tiles")])
def test_from_diffusion_to_the_loop(method, loop, monkeypatch):
    way = walk(monkeypatch, lambda: qattn.diffusion(points, 0.2, method=method), loop)
    assert len([name for name in way if name != "_eager.py:call"]) <= 12, way


@pytest.mark.parametrize("method", ["exact", "tiles"])
def test_from_a_product_to_the_loop(method, monkeypatch):
    q = qattn.diffusion(points, 0.2, method=method)
    assert len([name for name in walk(monkeypatch, lambda: q @ points) if name != "_eager.py:call"]) <= 14

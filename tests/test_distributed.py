"""Clouds over 2 and 4 ranks against one process with the whole cloud, and what becomes of ranks that die.

What is checked is in `on_ranks.py`, which runs on every rank.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import slow
from on_ranks import same_as_one

import qattn
from qattn.distributed.group import pack, unpack

SCRIPT = str(Path(__file__).with_name("on_ranks.py"))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def environment(**more):
    root = str(Path(qattn.__file__).parents[1])
    return os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"} | more


def on_ranks(size, *checks, **more):
    command = [sys.executable, SCRIPT, free_port(), str(size), *checks]
    run = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


METHODS = "exact", "tiles", "fourier"


@pytest.mark.parametrize("method", ["exact", "tiles", slow("fourier")])
def test_one_rank_is_one_process(method):
    """A group of this process alone, which waits for no other to start."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        same_as_one(method)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_are_one_process():
    """Attention, operators, gradients, spectra, networks; one start of processes for all, which is what takes time."""
    checks = "same_as_one", "near_and_far", "batches_and_heads", "gradients"
    others = "spectra:exact", "spectra:tiles", "compacted:tiles", "dtensors:tiles", "choices:auto"
    others += "masses_by_density:exact", "masses_by_density:tiles", "disagreements:auto", "looks:auto", "looks:tiles"
    others += "with_normals:exact", "with_normals:tiles", "cold:tiles", "cold:auto", "cancelled:exact"
    layers = "refusals:auto", "networks:exact", "compiled_in_bfloat16:exact", "fully_sharded:exact"
    on_ranks(2, *(f"{check}:{method}" for check in checks for method in METHODS), *others, *layers)


@pytest.mark.slow
def test_four_ranks_are_one_process():
    others = "gradients:exact", "compacted:tiles", "subgroups:tiles", "disagreements:auto", "masses_by_density:exact"
    on_ranks(4, *(f"same_as_one:{method}" for method in METHODS), *others)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "size"), [(signal.SIGKILL, 3), (signal.SIGSTOP, 2)], ids=["killed", "stalled"])
def test_a_rank_that_is_lost_stops_the_others(tmp_path, number, size):
    """The others stop within the timeout and say what to do; a new start goes on from what was saved."""
    port, timeout = free_port(), 4.0
    command = [sys.executable, SCRIPT, port, str(size), "killed:tiles"]
    folder = {"FOLDER": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            command,
            env=environment(RANK=str(rank), SIGNAL=str(int(number)), TIMEOUT=str(timeout), **folder),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        os.waitpid(ranks[1].pid, os.WUNTRACED)  # until it is killed or stopped
        for rank in {0, size - 1} - {1}:
            errors = ranks[rank].communicate(timeout=timeout + 60)[1]
            assert ranks[rank].returncode not in (0, None)
            assert f"Rank {rank} of {size} lost the connection to the others" in errors
            assert "`init=`" in errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stderr.close()
    if number == signal.SIGKILL:
        on_ranks(size, "restarted:tiles", **folder)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_of_several_dtypes_go_in_one_message(rows):
    tensors = torch.randn(rows, 3), torch.arange(rows)[:, None], torch.randn(rows, 2).double()
    packed = pack(*tensors)
    found = unpack(packed, [3, 1, 2], [tensor.dtype for tensor in tensors])
    assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))


def test_a_group_is_needed():
    with pytest.raises(ValueError, match=r"init_process_group.*torchrun"):
        qattn.GaussianKernel(torch.randn(5, 3), 0.1, group="world")


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path):
    script = Path(qattn.__file__).parents[1] / "examples" / "distributed.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    sizes = ["--points", "5000", "--sigma", "0.1", "--power", "5", "--train", "300", "--steps", "2"]
    sizes += ["--folder", str(tmp_path), "--output", str(tmp_path / "out.png")]
    run = subprocess.run([*torchrun, *sizes], env=environment(), capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "of the points are known by their part" in run.stdout
    assert run.stderr.count("0/2 [00:00<?, ?it/s]") == 1  # one bar, of the first rank
    assert len(list(tmp_path.glob("*.pt"))) == 2  # potentials, for another start
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"

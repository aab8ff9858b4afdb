"""Kernels of others for the same attention, as machine code for GPUs that are not there; no tests.

Each comes from the code that its package runs: FlexAttention's is written by Inductor, FlashAttention 4's by CuTe DSL
in an environment of its own. Those of FlashAttention 2 and KeOps were compiled by nvcc once and are kept as PTX, with
the scripts that make them.
"""

import gzip
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from machine_code import Kernel, Loop, assembled, read
from pretended_cuda import _module, written_by_inductor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qattn.attention import flex
from qattn.attention.inputs import Inputs

__all__ = ["Candidate", "artefact", "flash_attn_2", "flash_attn_4", "flex_attention", "keops"]

_FOLDER = Path(__file__).parent
_FLASH_ATTN_4 = _FOLDER.parent / ".venv-conformance-fa4" / "bin" / "python"


class Candidate(NamedTuple):
    """A kernel whose loop over keys can be modeled.

    Attributes:
        kernel: Machine code.
        loop: The loop over blocks of keys.
        pairs: Pairs of a thread in an iteration.
        num_warps: Warps of a program.
        num_working: Warps of a program that run the loop; the others load.
    """

    kernel: Kernel
    loop: Loop
    pairs: int
    num_warps: int
    num_working: int


def artefact(name: str) -> str:
    """Return the PTX that is kept under a name."""
    return gzip.decompress((_FOLDER / f"{name}.ptx.gz").read_bytes()).decode()


def _largest_loop(kernel: Kernel) -> Loop:
    return max(kernel.weights, key=lambda loop: len(loop.body))


def flash_attn_2(width: int, capability: int) -> Candidate:
    """FlashAttention 2 for heads of up to 32, or of 128, with blocks of 128 queries."""
    keys, shared = {32: (128, 24576), 128: (64, 65536)}[width]
    kernel = assembled(artefact(f"flash_attn_2_{width}"), capability, shared)
    return Candidate(kernel, _largest_loop(kernel), keys, 4, 4)


def keops(capability: int) -> Candidate:
    """The reduction Max_SumShiftExp of KeOps, by which it computes lse; two exponentials a pair."""
    kernel = assembled(artefact("keops"), capability, shared=192 * 4 * 4)
    loop = _largest_loop(kernel)
    return Candidate(kernel, loop, loop.counts["MUFU.EX2"] // 2, 6, 6)


def flex_attention(capability: int) -> Candidate:
    """FlexAttention as the `flex` backend calls it for lse alone, in the code that Inductor writes for an A100."""

    def call() -> None:
        flex._compiled.cache_clear()
        query, key, bias = (torch.empty(1, *shape, device="cuda") for shape in ((8192, 3), (8192, 3), (8192,)))
        flex._cuda(Inputs(query, key, None, bias))

    code = written_by_inductor(call)
    flex._compiled.cache_clear()
    found = re.search(r"async_compile\.triton\('(\w*flex_attention\w*)', '''(.*?)''', device_str='cuda'\)", code, re.S)
    assert found is not None
    name, source = found.groups()
    options: dict[str, Any] = {}

    def template(**given: Any) -> Any:
        options.update(given)
        return lambda kernel: kernel

    with (
        mock.patch("torch._inductor.runtime.triton_heuristics.template", template),
        mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"),
    ):
        kernel = getattr(_module(source, name), name)
    meta, blocks = options["triton_meta"], options["inductor_meta"]["config_args"]
    result = triton.compile(
        ASTSource(kernel, dict(meta["signature"]), {}, meta["configs"][0]),
        target=GPUTarget("cuda", capability, 32),
        options={name: options[name] for name in ("num_warps", "num_stages")},
    )
    built = read(result.asm["ptx"], result.asm["cubin"], result.metadata.shared)
    warps = options["num_warps"]
    return Candidate(built, _largest_loop(built), blocks["BLOCK_M"] * blocks["BLOCK_N"] // (32 * warps), warps, warps)


def flash_attn_4(capability: int) -> Candidate:
    """FlashAttention 4 for the split lift of points in space, 16 columns, compiled in its own environment."""
    command = "import test_flash_attn_4 as t; t.compile_kernel(0, 10.0); print(t.DUMP)"
    environment = os.environ | {
        "FLASH_ATTENTION_ARCH": f"sm_{capability}",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "PYTHONPATH": f"{_FOLDER}:{_FOLDER.parent / 'tests'}",
    }
    made = subprocess.run([_FLASH_ATTN_4, "-c", command], env=environment, capture_output=True, text=True, check=True)
    folder = Path(made.stdout.splitlines()[-1])
    (code,), (cubin,) = ([file.read_bytes() for file in folder.glob(f"*.{ending}")] for ending in ("ptx", "cubin"))
    kernel = read(code.decode(), cubin, shared=0)
    threads = int(re.search(r"\.(?:reqntid|maxntid) (\d+)", kernel.ptx).group(1))  # type: ignore[union-attr]
    loop = _largest_loop(kernel)
    loading = 4 if capability == 90 else 0  # one of three groups of four warps
    return Candidate(kernel, loop, loop.counts["FADD"], threads // 32, threads // 32 - loading)

"""How fast would attention kernels run on a GPU, by a model of their machine code?

    make gpu-model                    the tables below, in Markdown
    make gpu-model RECORD=1           and keep them in benchmarks/records/gpu_model.json

Nothing runs on a GPU. The kernels are compiled ahead of time, and a model of one quarter of a multiprocessor runs their
inner loop: it has W warps, as many as the registers allow, and issues one instruction a cycle. An instruction waits
until its warp is ready (stall counts and scoreboards are read from its encoding), and until its pipe is free. Assumed
are how long an instruction keeps its pipe busy, and how long results take to arrive.

The model knows no caches, no launches, no tails and no conflicts of memory banks, so it is an upper bound. It is
calibrated by one figure: FlashAttention 2 with heads of 128 on an A100, which is published to reach 73 % of 312 TFLOPS.
On an H100 it has not been compared with anything, and does not know how long warps wait for asynchronous tensor cores.
Believe ratios above 1.5, not percents.

A pass over near tiles of a million points is estimated from their number, which is counted on a CPU, and from the
modeled speed over lists. Finding the tiles is not in it.

The float32 kernel of torch has three loops for each block of keys, which the model does not run. Its instructions of
PTX are counted while it is emulated, and its speed is the bound that issuing one instruction a cycle sets.
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import machine_code
import other_kernels
import ptx
import torch
from machine_code import Instruction, Kernel
from other_kernels import Candidate, artefact
from own_kernels import build
from test_efficient_emulated import emulated as emulate_efficient

from qattn import shapes
from qattn.tiles.gaussian import near_tiles
from qattn.tiles.order import kd_order
from qattn.tiles.sizes import TILE
from qattn.tiles.tiling import Tiling

RECORD = Path(__file__).parent / "records" / "gpu_model.json"
ITERATIONS = 12


class Gpu(NamedTuple):
    """A GPU: multiprocessors, clock, and cycles for which a warp's instruction keeps a pipe of a quarter busy."""

    name: str
    capability: int
    multiprocessors: int
    gigahertz: float
    fma: int
    alu: int = 2
    mufu: int = 8
    memory: int = 4
    tensor: int = 4  # 16 × 8 × 8 products of TF32, or 16 × 8 × 16 of 16-bit numbers


GPUS = (Gpu("A100", 80, 108, 1.41, fma=2, tensor=8), Gpu("H100", 90, 132, 1.755, fma=1, tensor=4))
# Cycles until the result of an instruction is there; those with a fixed latency have it in their stall counts.
LATENCY = {
    "MUFU": 22, "LDS": 26, "LDSM": 30, "LDG": 40, "SHFL": 24, "S2R": 30, "LDC": 30, "R2UR": 12, "STS": 10, "STSM": 10
}  # fmt: skip
FMA = {"FFMA", "FADD", "FMUL", "IMAD"}
MEMORY = {"LDS", "LDSM", "STS", "STSM", "LDG", "STG", "LDGSTS", "SHFL", "LDL", "STL"}
FREE = {"BRA", "NOP", "BAR", "CALL", "DEPBAR", "WARPGROUP", "WARPSYNC", "BSSY", "BSYNC", "MEMBAR", "FENCE"}


def pipe(instruction: Instruction, gpu: Gpu) -> tuple[str, int]:
    """Return the pipe of an instruction, and the cycles for which it is busy."""
    head, *suffixes = instruction.name.split(".")
    if head == "MUFU":
        return "MUFU", gpu.mufu
    if head in FMA:
        return "FMA", gpu.fma
    if head in ("HMMA", "HGMMA"):
        if head == "HMMA":
            products = {"1684": 512, "1688": 1024, "16816": 2048}[suffixes[0]]
        else:
            products = math.prod(map(int, suffixes[0].split("x"))) // 4  # by the warps of four quarters
        return "tensor", max(1, products * gpu.tensor // (1024 if "TF32" in suffixes else 2048))
    if head in MEMORY:
        width = 4 if {"128", "4"} & set(suffixes) else 2 if {"64", "2"} & set(suffixes) else 1
        return "memory", gpu.memory * (width if head != "LDG" else 1)
    return ("", 0) if head in FREE else ("uniform", 2) if head.startswith("U") else ("ALU", gpu.alu)


def cycles_of_iteration(body: list[Instruction], gpu: Gpu, num_warps: int) -> float:
    """Return the cycles of an iteration of a loop in steady state, with so many warps on one scheduler."""
    code = [(*pipe(i, gpu), i, LATENCY.get(i.name.split(".")[0], 20)) for i in body]
    place, ready, done = [0] * num_warps, [0] * num_warps, [0] * num_warps
    boards = [[0] * 8 for _ in range(num_warps)]  # when the last operation that sets a scoreboard is done
    free: dict[str, int] = defaultdict(int)
    cycle, last, ends = 0, 0, []
    while min(done) < ITERATIONS:
        for offset in range(num_warps):  # the warp that issued last, as long as it can, then the others in turn
            warp = (last + offset) % num_warps
            name, busy, instruction, latency = code[place[warp]]
            waits = any(instruction.wait >> n & 1 and boards[warp][n] > cycle for n in range(6))
            if done[warp] >= ITERATIONS or ready[warp] > cycle or waits or (name and free[name] > cycle):
                continue
            if name:
                free[name] = cycle + busy
            for board, time in ((instruction.write, latency), (instruction.read, 8)):
                boards[warp][board] = max(boards[warp][board], cycle + time) if board < 6 else 0
            ready[warp] = cycle + max(1, instruction.stall)
            place[warp] += 1
            if place[warp] == len(code):
                place[warp] = 0
                done[warp] += 1
                if warp == 0:
                    ends.append(cycle)
            last = warp
            break
        cycle += 1
    half = len(ends) // 2
    return (ends[-1] - ends[half]) / (len(ends) - 1 - half)


def warps_of_quarter(kernel: Kernel, num_warps: int) -> int:
    """Return how many warps of a kernel one quarter of a multiprocessor holds, by registers and shared memory."""
    by_registers = 65536 // (-(-kernel.registers // 8) * 8 * 32 * num_warps)
    by_memory = 160 * 1024 // (kernel.shared + 1024)
    return max(1, min(by_registers, by_memory, 64 // num_warps) * num_warps // 4)


class Row(NamedTuple):
    """A kernel on a GPU."""

    what: str
    gpu: str
    registers: int
    spilled: int  # bytes
    instructions: float  # a pair
    pairs: float  # a second
    busiest: str


def model(what: str, candidate: Candidate, gpu: Gpu) -> Row:
    """Model the loop of a kernel over keys."""
    kernel, loop, pairs, num_warps, num_working = candidate
    warps = max(1, warps_of_quarter(kernel, num_warps) * num_working // num_warps)
    cycles = cycles_of_iteration(loop.body, gpu, warps)
    rate = 4 * warps * 32 * pairs / cycles * gpu.multiprocessors * gpu.gigahertz * 1e9
    load: Counter[str] = Counter()
    for instruction in loop.body:
        of, busy = pipe(instruction, gpu)
        load[of] += busy
    load["issue"] = len(loop.body)
    busiest = load.most_common(1)[0][0]
    return Row(what, gpu.name, kernel.registers, kernel.stack, len(loop.body) / pairs, rate, busiest)


def own(name: str, capability: int, dims: int, channels: int, listed: bool = False) -> Candidate:
    """Compile one of our own kernels, all of which have programs of four warps here."""
    kernel, pairs = build(name, capability, dims, channels, listed=listed)
    return Candidate(kernel, kernel.weights[0], pairs, 4, 4)


def counted_efficient(gpu: Gpu) -> Row:
    """Count the instructions of torch's float32 kernel for 64 more keys, by the emulator."""
    program = ptx.Program.parse(artefact("efficient"))
    counts = []
    for num_keys in (64, 128):
        x = torch.zeros(1, 1, num_keys, 16)
        with mock.patch.object(ptx._Block, "_execute", autospec=True, side_effect=ptx._Block._execute) as executed:
            emulate_efficient(program, x[:, :, :64], x, x, None, True, scale=1.0)
        counts.append(executed.call_count)
    instructions = (counts[1] - counts[0]) / (64 * 64 / program.threads)
    kernel = machine_code.assembled(artefact("efficient"), gpu.capability, 0)
    rate = 4 * 32 / instructions * gpu.multiprocessors * gpu.gigahertz * 1e9
    return Row("torch, float32, by count", gpu.name, kernel.registers, kernel.stack, instructions, rate, "issue")


OWN = (
    ("lse, d = 2", "sum_blocks", 2, 1),
    ("lse, d = 3", "sum_blocks", 3, 1),
    ("lse, d = 3, lifted", "sum_lifted_blocks", 3, 1),
    ("8 channels, float32", "attend_blocks", 3, 8),
    ("16 channels, float32", "attend_blocks", 3, 16),
    ("32 channels, float32", "attend_blocks", 3, 32),
    ("8 channels, float32, lifted", "attend_lifted_blocks", 3, 8),
    ("16 channels, float32, lifted", "attend_lifted_blocks", 3, 16),
    ("32 channels, float32, lifted", "attend_lifted_blocks", 3, 32),
    ("sums of the backward pass, 8 channels", "differentiate_blocks", 3, 8),
)
LISTED = (("lse, d = 3, over lists of tiles", "sum_blocks"), ("lse, d = 3, lifted, over lists", "sum_lifted_blocks"))
MILLION, SPACINGS, TOL = 1_000_000, 2.2, 1e-3  # points of a ball, σ in mean spacings, and what may be left out
PUBLISHED = 0.73 * 312e12  # FLOPS of FlashAttention 2 with heads of 128 on an A100


def of_own_kernels() -> list[Row]:
    rows = [model(what, own(name, gpu.capability, d, c), gpu) for what, name, d, c in OWN for gpu in GPUS]
    return rows + [model(what, own(name, gpu.capability, 3, 1, True), gpu) for what, name in LISTED for gpu in GPUS]


def of_all_for_lse() -> list[Row]:
    """Model one pass for lse in space by all kernels; those of FlashAttention also average float16 values."""
    rows = []
    for gpu in GPUS:
        capability = gpu.capability
        candidates = {
            "triton, differences": own("sum_blocks", capability, 3, 1),
            "triton, lifted": own("sum_lifted_blocks", capability, 3, 1),
            "FlashAttention 4, lifted": other_kernels.flash_attn_4(capability),
            "FlashAttention 2, lifted": other_kernels.flash_attn_2(32, capability),
            "KeOps": other_kernels.keops(capability),
            "FlexAttention": other_kernels.flex_attention(capability),
        }
        rows += [model(what, candidate, gpu) for what, candidate in candidates.items()]
        rows.append(counted_efficient(gpu))
    return rows


def calibration() -> Row:
    """Model what is published: FLOPS of FlashAttention 2 with heads of 128, four for each pair and channel."""
    return model("FlashAttention 2, heads of 128", other_kernels.flash_attn_2(128, 80), GPUS[0])


def of_a_million_points(rows: list[Row]) -> dict[str, float]:
    """Count near tiles of a million points, and estimate a pass over them, in milliseconds, from rows over lists."""
    cloud = Tiling(points := shapes.ball(MILLION)[None], kd_order(points))
    sigma = SPACINGS * (4 / 3 * math.pi / MILLION) ** (1 / 3)
    counts, _ = near_tiles(cloud, cloud, torch.tensor([sigma]), torch.zeros(1, MILLION), TOL)
    pairs = float(counts.sum()) * TILE**2
    durations = {f"{row.what}, {row.gpu}": 1e3 * pairs / row.pairs for row in rows if row.what in dict(LISTED)}
    return {"near tiles of a tile": float(counts.double().mean()), "pairs": pairs} | durations


def show(rows: list[Row]) -> None:
    """Print a table, with speeds relative to KeOps if that is among the kernels."""
    keops = {row.gpu: row.pairs for row in rows if row.what == "KeOps"}
    heads = ["one pass", "GPU", "registers", "spilled", "instructions a pair", "10¹² pairs/s, modeled", "busiest"]
    if keops:
        heads.append("KeOps = 1")
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for what, gpu, registers, spilled, instructions, pairs, busiest in rows:
        cells = [what, gpu, registers, spilled, f"{instructions:.1f}", f"{pairs / 1e12:.2f}", busiest]
        if keops:
            cells.append(f"{pairs / keops[gpu]:.1f}")
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"keep the tables in {RECORD.name}")
    is_recorded = parser.parse_args().record
    known, ours, lse = calibration(), of_own_kernels(), of_all_for_lse()
    flops = known.pairs * 4 * 128
    error = flops / PUBLISHED - 1
    print(f"calibration: {flops / 1e12:.0f} TFLOPS modeled, {PUBLISHED / 1e12:.0f} published: {error:+.0%}\n")
    show(lse)
    print()
    show(ours)
    million = of_a_million_points(ours)
    print(f"\nPasses over near tiles of {MILLION:,} points of a ball, σ of {SPACINGS} spacings, in milliseconds:")
    for name, x in million.items():
        print(f"- {name}: {x:.3g}")
    if is_recorded:
        record = {
            "calibration": {"modeled": flops, "published": PUBLISHED, **known._asdict()},
            "lse": [row._asdict() for row in lse],
            "triton": [row._asdict() for row in ours],
            "million points": million,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How fast would the kernels of the `triton` backend run on a GPU, by a model of their machine code?

    make gpu-model                    the table below, in Markdown
    make gpu-model RECORD=1           and keep it in benchmarks/records/gpu_model.json

Nothing runs on a GPU. The kernels are compiled ahead of time, and a model of one quarter of a multiprocessor runs their
inner loop: it has W warps, as many as the registers allow, and issues one instruction a cycle. An instruction waits
until its warp is ready (stall counts and scoreboards are read from its encoding), and until its pipe is free. Assumed
are how long an instruction keeps its pipe busy, and how long results take to arrive.

The model knows no caches, no launches, no tails and no conflicts of memory banks, so it is an upper bound. The same
model gave 253 TFLOPS for FlashAttention 2 with heads of 128 on an A100, where 228 are published: 11 % too many. On an
H100 it has not been compared with anything. Believe ratios above 1.5, not percents.
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from machine_code import Instruction, Kernel
from own_kernels import build

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
    tensor: int = 4  # 16 × 8 × 8 products of 11 bits, which take twice as long as those of 16-bit numbers


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
    if head == "HMMA":
        return "tensor", gpu.tensor if "1688" in suffixes else gpu.tensor // 2
    if head == "HGMMA":
        rows, columns, depth = (int(n) for n in suffixes[0].split("x"))
        return "tensor", max(
            1, rows * columns * depth * gpu.tensor // (16 * 8 * 8 * 4)
        )  # by the warps of four quarters
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
    instructions: float  # a pair
    pairs: float  # a second
    busiest: str


def model(what: str, name: str, gpu: Gpu, dims: int, channels: int, listed: bool = False) -> Row:
    kernel, pairs = build(name, gpu.capability, dims, channels, listed=listed)
    loop = kernel.weights[0].body
    warps = warps_of_quarter(kernel, 4)
    cycles = cycles_of_iteration(loop, gpu, warps)
    rate = 4 * warps * 32 * pairs / cycles * gpu.multiprocessors * gpu.gigahertz * 1e9
    load: Counter[str] = Counter()
    for instruction in loop:
        of, busy = pipe(instruction, gpu)
        load[of] += busy
    load["issue"] = len(loop)
    return Row(what, gpu.name, kernel.registers, len(loop) / pairs, rate, load.most_common(1)[0][0])


CASES = (
    ("lse, d = 2", "sum_blocks", 2, 1),
    ("lse, d = 3", "sum_blocks", 3, 1),
    ("8 channels, float32", "attend_blocks", 3, 8),
    ("16 channels, float32", "attend_blocks", 3, 16),
    ("32 channels, float32", "attend_blocks", 3, 32),
    ("sums of the backward pass, 8 channels", "differentiate_blocks", 3, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"keep the table in {RECORD.name}")
    is_recorded = parser.parse_args().record
    rows = [model(what, name, gpu, dims, channels) for what, name, dims, channels in CASES for gpu in GPUS]
    rows += [model("lse, d = 3, over lists of tiles", "sum_blocks", gpu, 3, 1, listed=True) for gpu in GPUS]
    print("| one pass | GPU | registers | instructions a pair | 10¹² pairs/s, modeled | busiest |")
    print("|---|---|---|---|---|---|")
    for what, gpu, registers, instructions, pairs, busiest in rows:
        print(f"| {what} | {gpu} | {registers} | {instructions:.1f} | {pairs / 1e12:.2f} | {busiest} |")
    if is_recorded:
        RECORD.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

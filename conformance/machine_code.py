"""Compile Triton kernels for GPUs that are not there, and read what the machine code does.

Triton brings the assembler and the disassembler of NVIDIA along, so no driver is needed. Counts belong to one version
of them, which requirements-triton.txt pins.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["Instruction", "Kernel", "Loop", "assembled", "compiled", "disassembled", "read", "spilled_on_amd"]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);\s*/\*\s*0x([0-9a-f]{16})\s*\*/"
)
_SECOND_WORD = re.compile(r"\s*/\*\s*0x([0-9a-f]{16})\s*\*/")


class Instruction(NamedTuple):
    """An instruction, with the control bits that its encoding holds."""

    name: str  # as MUFU.EX2
    operands: str
    stall: int  # cycles before the warp issues the next one
    write: int  # scoreboard that is set when the result is there; 7 for none
    read: int  # scoreboard that is set when the operands are read; 7 for none
    wait: int  # mask of the scoreboards that it waits for


class Loop(NamedTuple):
    """An innermost loop."""

    body: list[Instruction]

    @property
    def counts(self) -> Counter[str]:
        """Number of each instruction; only MUFU keeps what follows a dot."""
        return Counter(i.name if i.name.startswith("MUFU") else i.name.split(".")[0] for i in self.body)


class Kernel(NamedTuple):
    """A compiled kernel."""

    ptx: str
    cubin: bytes
    registers: int
    stack: int  # bytes; more than 0 if registers spill
    shared: int  # bytes
    loops: list[Loop]

    @property
    def weights(self) -> list[Loop]:
        """Loops that compute weights."""
        return [loop for loop in self.loops if loop.counts["MUFU.EX2"]]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, num_warps: int) -> Kernel:
    """Compile a Triton kernel.

    Args:
        kernel: A function decorated by `triton.jit`.
        types: Triton's name of the type of each argument, such as "*fp32"; those that are constants are ignored.
        constants: Arguments whose values are known; None for pointers that are not there.
        capability: As 80.
        num_warps: Warps of a program.
    """
    options = {"num_warps": num_warps, "num_stages": 1}
    source = _source(kernel, types, constants)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return read(result.asm["ptx"], result.asm["cubin"], result.metadata.shared)


def _source(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    # As at run time: pointers and numbers of points are multiples of 16.
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(kernel.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in ("clouds", "chunks", "query_tiles", "key_tiles")
    }
    return ASTSource(kernel, signature, constants, aligned)


def spilled_on_amd(kernel: Any, types: dict[str, str], constants: dict[str, Any], name: str, num_warps: int) -> int:
    """Compile a Triton kernel for a GPU of AMD whose wavefronts have 64 lanes, and return how many registers spill."""
    options = {"num_warps": num_warps, "num_stages": 1}
    code = triton.compile(_source(kernel, types, constants), target=GPUTarget("hip", name, 64), options=options).asm
    return sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code["amdgcn"]))


def assembled(ptx: str, capability: int, shared: int) -> Kernel:
    """Assemble the PTX of a kernel that takes so many bytes of shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        # The newer of the two assemblers that Triton brings along: nvcc writes a later version of PTX.
        subprocess.run([_TOOLS / "ptxas-blackwell", f"-arch=sm_{capability}", "-o", target, source], check=True)
        return read(ptx, target.read_bytes(), shared)


def read(ptx: str, cubin: bytes, shared: int) -> Kernel:
    """Read what a kernel uses, and its loops."""
    used = _run("cuobjdump", cubin, "-res-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", used).group(1)) for name in ("REG", "STACK"))  # type: ignore[union-attr]
    return Kernel(ptx, cubin, registers, stack, shared, disassembled(cubin))


def _run(tool: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = subprocess.run([_TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True)
        return found.stdout + found.stderr


def disassembled(cubin: bytes) -> list[Loop]:
    """Return the innermost loops of a kernel, those of backward branches that hold no other."""
    body, labels, pending = [], {}, []
    head: tuple[str, str] | None = None
    for line in _run("nvdisasm", cubin, "-c", "-hex").splitlines():
        if found := _LABEL.match(line):
            pending.append(found.group(1))
        elif found := _INSTRUCTION.match(line):
            labels |= dict.fromkeys(pending, len(body))
            pending, head = [], (found.group(3), found.group(4))
        elif (found := _SECOND_WORD.match(line)) and head is not None:
            control = int(found.group(1), 16) >> 41
            fields = control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
            body.append(Instruction(*head, *fields))
            head = None
    ranges = {
        (labels[found.group(0)], n)
        for n, instruction in enumerate(body)
        if instruction.name.startswith("BRA")
        and (found := re.search(r"\.L_\w+", instruction.operands))
        and labels.get(found.group(0), n + 1) <= n
    }
    inner = [r for r in sorted(ranges) if not any(o != r and r[0] <= o[0] and o[1] <= r[1] for o in ranges)]
    return [Loop(body[first : last + 1]) for first, last in inner if last > first]

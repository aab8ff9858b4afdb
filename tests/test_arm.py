"""Registers as wide as NEON's: right here too, and in assembly for ARM vectorized, fused, and kept in registers.

The loops are compiled for this machine with the registers of an ARM, and their optimized code is translated for two
ARMs. That is not a run: docs/versions.md says what has run under emulation.
"""

import json
import os
import platform
import re
import subprocess
import sys

import pytest

SCRIPT = r"""
import json, platform, re
import llvmlite.binding as llvm, numba, torch

numba.njit(lambda: 0)  # Numba learns about this machine before it is given another name
platform.machine = lambda: "aarch64"
from qattn.tiles.loops import gaussian, simd
import qattn

assert simd.REGISTER_BYTES == 16
for dtype, tol in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
    x, v = torch.rand(300, 3, dtype=dtype), torch.rand(300, 9, dtype=dtype)
    scores = -0.5 * ((x.double()[:, None] - x.double()) ** 2).sum(-1)
    for value in (v[:, :1], v):
        out, lse = qattn.attend(x, x, value, backend="native")
        torch.testing.assert_close(lse.double(), scores.logsumexp(1), rtol=0, atol=tol)
        torch.testing.assert_close(out.double(), scores.softmax(1) @ value.double(), rtol=0, atol=tol)

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
result = {}
for signature, code in gaussian.attend_tiles.inspect_llvm().items():
    code = re.sub(r"@llvm\.x86\.[\w.]+", "@release", code).replace("immarg", "")  # counts references, outside of loops
    code = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
    for triple, cpu in (("aarch64-unknown-linux-gnu", "neoverse-n1"), ("arm64-apple-macosx14.0.0", "apple-m1")):
        machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3, reloc="pic")
        text = re.sub(r"^target triple = .*$", f'target triple = "{triple}"', code, flags=re.M)
        text = re.sub(r"^target datalayout = .*$", f'target datalayout = "{machine.target_data}"', text, flags=re.M)
        result[f"{cpu}, {signature[0].dtype}"] = machine.emit_assembly(llvm.parse_assembly(text))
print(json.dumps(result))
"""


def inner_loops(assembly):
    """Blocks that jump back to their own beginning, and multiply."""
    for block in re.split(r"^(?=[.\w$]+:)", assembly, flags=re.MULTILINE):
        name = re.escape(block.split(":", 1)[0])
        if re.search(rf"\tb\.\w+\t{name}$|\tcbn?z\t\w+, {name}$", block, flags=re.MULTILINE) and "\tfml" in block:
            yield block


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="translates code for x86")
def test_loops_with_the_registers_of_an_arm(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assemblies = json.loads(done.stdout)
    assert len(assemblies) == 4
    for name, assembly in assemblies.items():
        loops = list(inner_loops(assembly))
        assert len(loops) >= 6, name
        for loop in loops:
            assert re.search(r"\tfml[as](\.[42][sd])?\tv", loop), f"{name}: not vectorized\n{loop}"
            assert not re.search(r"\tfmadd|\tbl\t", loop), f"{name}: one by one, or a call\n{loop}"
        reloads = [len(re.findall(r"\tq\d+.*\[sp", loop)) for loop in loops]
        # In float64 exp2 has more constants than there are registers left, in loops that compute little else.
        assert max(reloads) <= (0 if name.endswith("float32") else 8), f"{name}: {reloads}"

"""Memory of a computation, measured in a process of its own; no tests."""

import subprocess
import sys

SCRIPT = """
import resource, torch, qattn
{functions}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # the largest so far

{first}
before = peak()
{then}
print(peak() - before)
"""


def added_megabytes(functions: str, first: str, then: str) -> float:
    """Megabytes that the statement `then` needs beyond `first`, which imports, compiles and starts threads."""
    script = SCRIPT.format(functions=functions, first=first, then=then)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)

"""Run the fast tests with the oldest versions that pyproject.toml declares, with some between, and with the newest.

    make matrix                          # all sets, and their rows in docs/versions.md
    python tests/matrix.py oldest        # one of them

A set is installed into `.matrix/`, which git ignores, and removed after its run. Wheels are kept there.
"""

import argparse
import glob
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".matrix"
SOURCES = "sources"  # folder of their copy in an environment
PAGE = ROOT / "docs" / "versions.md"
LIBRARIES = ("torch", "numpy", "scipy", "numba", "finufft")
# What the builds of torch on PyPI bring along on Linux: gigabytes of CUDA. Elsewhere it is a tenth of that.
SIZES = "about 6 GB on disk while it runs, 3 GB of wheels kept, 3 minutes to install and 5 to 10 of tests on two cores"


class Set(NamedTuple):
    """Versions that are tested together: that of Python, and of libraries; others are the newest that fit."""

    python: str
    pins: dict[str, str]


def declared() -> dict[str, str]:
    """Read the lower bounds of pyproject.toml; the highest, if there are several for a library."""
    bounds: dict[str, str] = {}
    for name, version in re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text()):
        bounds[name] = max(bounds.get(name, ""), version, key=lambda v: [int(n) for n in v.split(".") if n])
    return bounds


SETS = {
    "oldest": Set("3.10", declared()),
    "middle": Set("3.12", {"torch": "2.8.0", "numpy": "2.1.3", "scipy": "1.14.1", "numba": "0.61.2"}),
    "newest": Set("3.13", {}),
    "python3.14": Set("3.14", {}),
}


def interpreter(version: str) -> str | None:
    """Find Python of a version: the one that runs this, on the PATH, or among those of pyenv."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    for path in (shutil.which(f"python{version}"), *glob.glob(f"{pyenv}/versions/{version}.*/bin/python")):
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def install(chosen: Set, python: str, folder: Path) -> Path:
    """Make an environment with a copy of the sources, which may be edited meanwhile, and return its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    shutil.copytree(ROOT, folder / SOURCES, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "site"))
    own = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in chosen.pins.items()))
    pip, wheels = [own, "-m", "pip", "--quiet"], FOLDER / "wheels"
    subprocess.run([*pip, "install", "--upgrade", "pip"], check=True)
    # All wheels into a folder, where those of the last run are found again; pip's cache needs an index that allows it.
    pins, project = ["--constraint", constraints], f"{folder / SOURCES}[test]"
    fetch = [*pip, "wheel", "--cache-dir", wheels / "built", "--wheel-dir", wheels, *pins]
    subprocess.run([*fetch, project, "hatchling", "editables"], check=True)  # the latter two build the project
    subprocess.run([*pip, "install", "--no-index", "--find-links", wheels, *pins, "--editable", project], check=True)
    return own


def versions(python: Path) -> list[str]:
    """Return the versions of Python and of `LIBRARIES` in an environment."""
    script = (
        "import importlib.metadata as m, platform, sys\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return 'absent'\n"
        "print(platform.python_version(), *map(version, sys.argv[1:]))"
    )
    return subprocess.run([python, "-c", script, *LIBRARIES], capture_output=True, text=True, check=True).stdout.split()


def run_tests(python: Path, folder: Path) -> dict[str, int]:
    """Run the fast tests, and count what passed, failed and was skipped."""
    report = folder / "report.xml"
    # Old libraries meet new ones here, and warn of what those will remove.
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-W",
        "ignore::DeprecationWarning",
        f"--junitxml={report}",
    ]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "loops"), "MPLBACKEND": "agg"}
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=folder / SOURCES, env=environment, check=False)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"passed": total - skipped - failed, "failed": failed, "skipped": skipped}


def size(folder: Path) -> float:
    """Return the size of a folder in GB."""
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e9


def write_row(name: str, cells: list[str]) -> None:
    """Replace the row of a set in the table of the page, or add it."""
    machine = f"{platform.system()} {platform.machine()}"
    today = datetime.now(timezone.utc).date().isoformat()
    row = f"| {' | '.join([name, machine, *cells, today])} |"
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = f"| {name} | {machine} |"
    old = [n for n, line in enumerate(lines) if line.startswith(start)]
    if old:
        lines[old[0]] = row
    else:
        lines.insert(lines.index("<!-- end of the table of tests/matrix.py -->"), row)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(name: str, python: Path, folder: Path, seconds: float) -> bool:
    """Run the fast tests in an environment that was installed in so many seconds, and write the row of its set.

    Returns:
        Whether all tests passed that were not skipped.
    """
    found, gigabytes, start = versions(python), size(folder), time.monotonic()
    counts = run_tests(python, folder)
    minutes = [f"{duration / 60:.0f}" for duration in (seconds, time.monotonic() - start)]
    result = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    print(f"{name}: {result}", flush=True)
    write_row(name, [*found, result, f"{gigabytes:.1f} GB", f"{minutes[0]} + {minutes[1]}"])
    return counts["passed"] > 0 and counts["failed"] == 0


def main() -> None:
    """Run the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", help=f"some of {', '.join(SETS)}; default: all")
    arguments = parser.parse_args()
    names = arguments.sets or list(SETS)
    if unknown := set(names) - set(SETS):
        parser.error(f"no set is called {', '.join(unknown)}; there are {', '.join(SETS)}")
    print(f"{len(names)} sets, one after the other, each: {SIZES}", flush=True)
    has_failed = False
    for name in names:
        chosen, folder = SETS[name], FOLDER / name
        python = interpreter(chosen.python)
        if python is None:
            print(f"{name}: not run, there is no Python {chosen.python} here", flush=True)
            write_row(name, [chosen.python, *[""] * len(LIBRARIES), f"not run: no Python {chosen.python} here", "", ""])
            has_failed |= name in arguments.sets  # asked for by name
            continue
        print(f"{name}: installing", flush=True)
        start = time.monotonic()
        try:
            own = install(chosen, python, folder)
            has_failed |= not report(name, own, folder, time.monotonic() - start)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()

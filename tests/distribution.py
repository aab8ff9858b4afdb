"""Build the wheel and the sdist, look into both, install the wheel without extras, and use it: `make dist`.

They are left in `dist/` if all is well.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What the Makefile's targets read, and what says how to work on it.
NEEDED = (
    "Makefile", "constraints.txt", "hatch_build.py", "mkdocs.yml", "pyproject.toml", "README.md", "CHANGELOG.md",
    "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE", "qattn/py.typed", "tests/conftest.py",
    "tests/matrix.py", "benchmarks/all.py", "conformance/run.sh", "docs/tutorial.md", "docs/images/dirac.png",
    "examples/dirac.py",
)  # fmt: skip
MAX_MEGABYTES = {".whl": 1.0, ".gz": 20.0}
USER = '''
"""A script of a user, which type checkers should understand."""

import numpy as np
import torch

import qattn

points = qattn.shapes.sphere(50)
q: qattn.Diffusion = qattn.diffusion(points, sigma=0.3)
smooth: torch.Tensor = q @ points
array: np.ndarray = np.asarray(q.mass)
spectrum: qattn.Spectrum = qattn.eigsh(q, k=4)
attended = qattn.attend(points, points, points)
assert attended.out is not None
print(smooth.shape, array.shape, spectrum.values.shape, attended.out.shape, attended.lse.shape)
'''


def run(*command: str | Path, **options: object) -> str:
    """Run a command, and return what it prints; stop with all of that if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> list[Path]:
    """Build the sdist, and the wheel from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return sorted(folder.iterdir())


def look_into(wheel: Path, sdist: Path) -> None:
    """Check that nothing is missing, and that nothing is there by mistake."""
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(path.relative_to(ROOT).as_posix()) for path in (ROOT / "qattn").rglob("*.py")}
    strangers = [name for name in names if not name.startswith("qattn") or "__pycache__" in name]
    assert not strangers, strangers
    assert modules <= set(names), modules - set(names)
    assert "qattn/py.typed" in names
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[-1] for name in archive.getnames()}
    missing = [name for name in NEEDED if name not in packed]
    assert not missing, missing
    assert not [name for name in packed if "__pycache__" in name or name.startswith((".venv", ".matrix", "site/"))]
    for file in (wheel, sdist):
        megabytes = file.stat().st_size / 1e6
        assert megabytes < MAX_MEGABYTES[file.suffix], f"{file.name}: {megabytes:.1f} MB"
        print(f"{file.name}: {megabytes:.2f} MB")


def look_at_description(wheel: Path) -> None:
    """Check that an index can show it: no pictures or links of the repository, and all sections of README."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    broken = [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith(("http", "#"))]
    assert not broken, broken
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ .*", readme, re.MULTILINE)
    assert re.findall(r"^#+ .*", text, re.MULTILINE) == headings
    assert "docs/versions.md" in readme  # a link, of which the text stays
    assert "(what was run with what)" in text


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel with its core dependencies into an empty environment, and do there what README says."""
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    run(python, "-m", "pip", "check")
    size = sum(path.lstat().st_size for path in (folder / "venv").rglob("*")) / 1e9
    print(f"installed with its core dependencies: {size:.1f} GB")
    elsewhere = {"cwd": folder, "env": {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}}
    for block in (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]:
        run(python, "-W", "error", "-c", block.split("```")[0], **elsewhere)
    refused = subprocess.run([python, "-m", "qattn"], capture_output=True, text=True, check=False, **elsewhere)  # type: ignore[call-overload]
    assert "needs typer. Install it with `pip install 'qattn-diffusion[cli]'`" in refused.stderr, refused.stderr
    script = folder / "user.py"
    script.write_text(USER)
    print(run(python, script, **elsewhere).strip())
    print(run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, script, **elsewhere).strip())


def main() -> None:
    """Build, check, install and run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = build(folder / "first"), build(folder / "second")
        for one, other in zip(first, second, strict=True):
            sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (one, other)]
            assert sums[0] == sums[1], f"{one.name} differs from one build to the next"
            print(f"{one.name}: sha256 {sums[0]}, twice")
        print(run(sys.executable, "-m", "twine", "check", "--strict", *first).strip())
        wheel, sdist = sorted(first, key=lambda file: file.suffix, reverse=True)
        look_into(wheel, sdist)
        look_at_description(wheel)
        use(wheel, folder)
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(folder / "first", ROOT / "dist")


if __name__ == "__main__":
    main()

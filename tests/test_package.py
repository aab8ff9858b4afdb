"""The package as a whole: names, layers, optional libraries, the command."""

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import qattn
from qattn.attention.dispatch import BACKENDS

ROOT = Path(qattn.__file__).parent

# Lowest first; a module may import those before it, and its own package.
LAYERS = [
    "_eager", "_warning", "_broadcasting", "_compiled", "_progress", "_kd", "_distances", "_nearest", "pullback",
    "tiling", "attended", "lift", "ranks", "_checks", "_scipy", "attention", "kernels", "distributed", "solver",
    "operators", "spectral", "signatures", "maps", "flows", "geodesics", "axioms", "mass", "ragged", "nn", "shapes",
    "sampling", "sklearn", "doctor", "io", "pictures", "cli", "__main__",
]  # fmt: skip


def imports(path):
    """The qattn modules a file imports, as dotted names without the leading `qattn`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "qattn":
            for alias in node.names:
                module = f"{node.module}.{alias.name}".split(".")[1:]
                is_module = (ROOT / Path(*module)).with_suffix(".py").exists()
                yield ".".join(module if is_module else module[:-1])


def test_every_public_name_exists():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if path.stem in ("_simd", "_loops") or parts[-2:] == ("_checks", "__init__"):
            continue  # read by Numba alone; and a list of stars
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert module.__all__
        assert all(hasattr(module, name) for name in module.__all__), module.__name__


def test_no_public_name_hides_a_module():
    """`import qattn.x` must give the module x; an earlier implementation had a function in its place."""
    for package in (ROOT, ROOT / "attention", ROOT / "kernels"):
        modules = {path.stem for path in package.glob("*.py")}
        names = importlib.import_module(".".join(package.relative_to(ROOT.parent).parts)).__all__
        functions = {n for n in names if not isinstance(getattr(qattn, n, None), types.ModuleType)}
        assert not modules & functions


def test_imports_go_downwards():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for module in imports(path):
            top = module.split(".")[0]
            if top:  # "" is the package itself, for its version
                assert LAYERS.index(top) <= LAYERS.index(parts[0]), f"{'.'.join(parts)} imports {module}"


def test_backends_do_not_import_one_another():
    files = {f"attention.{name}" for name in BACKENDS}
    for name in BACKENDS:
        assert not files & set(imports(ROOT / "attention" / f"{name}.py"))


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_import_brings_nothing_heavy():
    heavy = {
        "numba",
        "scipy",
        "llvmlite",
        "typer",
        "rich",
        "matplotlib",
        "torch._dynamo",
        "torch._inductor",
        "flash_attn",
        "xformers",
        "trimesh",
        "rtree",
        "sklearn",
        "laspy",
        "nibabel",
        "nrrd",
    }
    loaded = run(
        "import sys, torch; before = set(sys.modules); import qattn; print(*(set(sys.modules) - before))"
    ).split()
    assert not heavy & set(loaded)


def test_a_small_cloud_is_diffused_without_slow_imports(tmp_path):
    (tmp_path / "in.csv").write_text("x,y,z\n0,0,0\n1,0,0\n0,1,0\n1,1,0\n")
    out = tmp_path / "out.ply"
    script = (
        "import contextlib, gc, sys\n"
        "from qattn.__main__ import main\n"
        f"sys.argv = ['qattn', 'diffuse', {str(tmp_path / 'in.csv')!r}, '--sigma', '2x', '-o', {str(out)!r}]\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "print(gc.get_freeze_count() > 0, *sys.modules)\n"
    )
    *_, is_frozen, loaded = [*run(script).strip().rpartition("\n")[2].split(" ", 1)]
    assert out.exists()
    assert is_frozen == "True"
    assert not {"sympy", "scipy.spatial", "trimesh", "matplotlib"} & set(loaded.split())


def test_works_without_any_optional_library():
    script = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'flash_attn', 'flash_attn_interface', 'xformers', 'mslk',\n"
        "             'trimesh', 'rtree', 'sklearn', 'laspy', 'nibabel', 'nrrd'):\n"
        "    sys.modules[name] = None\n"
        "import torch, qattn\n"
        "x = torch.randn(10, 3)\n"
        "print(qattn.attend(x, x, x).out.shape)\n"
        "try:\n"
        "    from qattn.__main__ import main; main()\n"
        "except SystemExit as stop:\n"
        "    print(stop)\n"
        "try:\n"
        "    import qattn.sklearn\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    assert run(script).splitlines() == [
        "torch.Size([10, 3])",
        "The qattn command needs typer. Install it with `pip install 'qattn-diffusion[cli]'`.",
        "qattn.sklearn needs scikit-learn. Install it with `pip install 'qattn-diffusion[sklearn]'`.",
    ]


def test_doctests():
    import doctest

    torch.manual_seed(0)
    names = {"torch": torch, **{name: getattr(qattn, name) for name in qattn.__all__}}
    count = 0
    for path in ROOT.rglob("*.py"):
        if path.stem not in ("__main__", "_simd", "_loops"):
            module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
            failures, tests = doctest.testmod(module, extraglobs=names)
            assert failures == 0
            count += tests
    assert count > 10


def test_python_blocks_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT.parent / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("command", [["qattn"], [sys.executable, "-m", "qattn"]], ids=["script", "module"])
def test_the_command_answers(command):
    if command == ["qattn"]:
        command = [str(Path(sys.executable).with_name("qattn"))]
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == qattn.__version__
    run = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in run.stdout

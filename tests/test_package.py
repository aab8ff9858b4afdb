"""The package as a whole: names, layers, optional libraries, the command."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from cases import slow

import qattn
from qattn.attention.dispatch import BACKENDS

ROOT = Path(qattn.__file__).parent

# Lowest first. A module may import modules of lower tiers and of its own, and there are no cycles.
TIERS = {
    "foundation": (
        "_types", "_versions", "_devices", "_html", "_autocast", "_eager", "_warning", "_broadcasting", "_progress",
        "_vector_jacobian", "_checks", "_meshes", "_scipy", "attended", "lift", "ranks", "ragged", "distributed",
    ),
    "tiles": ("tiles",),
    "attention": ("attention",),
    "kernels": ("kernels",),
    "operators": (
        "operators", "spectra", "signatures", "maps", "distances", "flows", "geodesics", "axioms", "mass",
        "bandwidths", "orientation",
    ),
    "applications": (
        "nn", "shapes", "sampling", "sklearn", "doctor", "warm", "io", "pictures", "viewer", "cli", "__main__",
    ),
}  # fmt: skip


def module_of(path):
    """The dotted name of a file, without the leading `qattn`; "" for the package itself."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}
BY_VARIABLES = {"_versions", "attention.flash_attn", "attention.xformers"}  # import libraries whose names are arguments


def calls(path, name):
    """The calls of a function in a file, by its name alone or as an attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name:
            yield node


def imports(path):
    """The qattn modules that a file imports in any form and at any depth, as dotted names without `qattn`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (own_module(name) for name in names if name.split(".")[0] == "qattn")
    for call in calls(path, "import_module"):
        if isinstance(call.args[0], ast.Constant) and call.args[0].value.split(".")[0] == "qattn":
            yield own_module(call.args[0].value)


def own_module(name):
    """The module, without `qattn`, that has a dotted name of qattn."""
    _, *rest = name.split(".")
    while ".".join(rest) not in MODULES:
        rest.pop()  # a name inside a module
    return ".".join(rest)


NAMELESS = [("tiles", "__init__"), ("operators", "__init__")]  # packages that export nothing


def test_every_public_name_exists():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if path.parent.name in ("loops", "gpu") or parts[1:] in NAMELESS:
            continue  # read by Numba or Triton alone; nothing of its own
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert module.__all__
        assert all(hasattr(module, name) for name in module.__all__), module.__name__


def test_no_public_name_hides_a_module():
    """`import qattn.x` must give the module x; an earlier implementation had a function in its place."""
    for folder in (ROOT, *(ROOT / name for name in ("attention", "distances", "kernels", "nn", "spectra"))):
        package = importlib.import_module(".".join(folder.relative_to(ROOT.parent).parts))
        modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}
        functions = {name for name in package.__all__ if not isinstance(getattr(package, name), types.ModuleType)}
        assert not modules & functions


def test_imports_go_downwards():
    tier_of = {name: number for number, names in enumerate(TIERS.values()) for name in names}
    tier_of[""] = tier_of["cli"]  # the package itself
    for name, path in MODULES.items():
        for other in imports(path):
            assert tier_of[other.split(".")[0]] <= tier_of[name.split(".")[0]], f"{name} imports {other}"


def test_all_imports_are_seen():
    """Names in variables can hide a module; only those of libraries are kept in them."""
    by_variables = {
        name
        for name, path in MODULES.items()
        if not all(isinstance(call.args[0], ast.Constant) for call in calls(path, "import_module"))
    }
    assert by_variables == BY_VARIABLES
    assert not [name for name, path in MODULES.items() if list(calls(path, "__import__"))]


def test_imports_have_no_cycle():
    """A cycle that is broken by importing inside a function counts too."""
    graph = {name: set(imports(path)) - {name} for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_backends_are_imported_by_their_selection_alone():
    files = {f"attention.{name}" for name in BACKENDS}
    assert files <= set(MODULES)
    importers = {name for name, path in MODULES.items() if files & set(imports(path))}
    assert importers == {"attention.dispatch"}


# Of clauses, which hide the subject, and of what continues a sentence that is not there.
OPENERS = re.compile(
    "(What|Whatever|Those|Who|Where|Whether|That|Which|How|Why|It|Its|They|Their|This|Both|Neither|And|Also|So|Not|Once"
    "|As|At|After|Against|Before|By|Elsewhere|For|From|In|Instead|On|Over|Through|With|Within|Without) "
)
FOLDERS = [ROOT.parent / name for name in ("tests", "examples", "benchmarks", "conformance", "docs")]
SCRIPTS = {path.relative_to(ROOT.parent).as_posix(): path for folder in FOLDERS for path in folder.rglob("*.py")}


def docstrings(path):
    """All docstrings of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            yield docstring


BRITISH = re.compile(
    "normalis|centre|colour|neighbour|grey|vectoris|initialis|optimis|behaviour|honour", flags=re.IGNORECASE
)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_prose(name):
    """Docstrings open with an imperative or a noun phrase, in American spelling, with formulas in plain Unicode."""
    assert not BRITISH.findall(MODULES[name].read_text())
    for docstring in docstrings(MODULES[name]):
        assert not OPENERS.match(docstring), docstring
        assert ":math:" not in docstring
        assert ".. math::" not in docstring
        assert "Example:" not in [line.strip() for line in docstring.splitlines()], docstring


def test_docstrings_of_scripts_open_with_what_they_are_about():
    """A verb or a noun phrase too; benchmarks may open with the question that they answer."""
    assert len(SCRIPTS) > 100
    found = {name: [text for text in docstrings(path) if OPENERS.match(text)] for name, path in SCRIPTS.items()}
    found |= {
        name: [text for text in texts if not text.splitlines()[0].endswith("?")]
        for name, texts in found.items()
        if name.startswith("benchmarks/")
    }
    assert not {name: texts for name, texts in found.items() if texts}


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
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
        "triton",
        "xformers",
        "trimesh",
        "rtree",
        "sklearn",
        "laspy",
        "nibabel",
        "nrrd",
        "viser",
    }
    loaded = run(
        "import sys, torch; before = set(sys.modules); import qattn; print(*(set(sys.modules) - before))"
    ).split()
    assert not heavy & set(loaded)


@pytest.mark.slow
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


@pytest.mark.slow
def test_works_without_any_optional_library():
    script = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'flash_attn', 'flash_attn_interface', 'xformers', 'mslk',\n"
        "             'triton', 'trimesh', 'rtree', 'sklearn', 'laspy', 'nibabel', 'nrrd', 'viser'):\n"
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


@pytest.mark.slow
def test_doctests():
    import doctest

    torch.manual_seed(0)
    names = {"torch": torch, **{name: getattr(qattn, name) for name in qattn.__all__}}
    count = 0
    for path in ROOT.rglob("*.py"):
        if path.stem != "__main__" and path.parent.name != "gpu":  # Triton is optional
            module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
            failures, tests = doctest.testmod(module, extraglobs=names)
            assert failures == 0
            count += tests
    assert count > 10


@pytest.mark.slow
def test_python_blocks_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT.parent / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("command", [slow(["qattn"]), [sys.executable, "-m", "qattn"]], ids=["script", "module"])
def test_the_command_answers(command):
    if command == ["qattn"]:
        command = [str(Path(sys.executable).with_name("qattn"))]
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == qattn.__version__
    run = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in run.stdout


def test_spelling_is_american_everywhere():
    """Pages, examples, benchmarks and tests count too; the table of old names in the changelog keeps them."""
    files = [path for folder in FOLDERS for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    assert len(files) > 100
    found = {path.name: BRITISH.findall(path.read_text()) for path in files if path.name != "test_package.py"}
    assert not {name: words for name, words in found.items() if words}

"""Machine code on disk: found again, never exchanged, and never in the way; what is done before there is any."""

import hashlib
import os
import pickle
import subprocess
import sys
import tempfile

import pytest
import torch
from cases import dense

import qattn
from qattn.tiles import by_torch, cache, when_to_compile
from qattn.tiles.cache import Files

SCRIPT = """
import sys, torch
from numba.core import caching
from qattn.tiles import compiled
if "nowhere" in sys.argv:
    compiled.cache_folder = lambda: None
if "read-only" in sys.argv:  # an installation and a home in which Numba may not write
    own = [locator for locator in caching.FunctionCache._impl_class._locator_classes if "Provided" in locator.__name__]
    caching.FunctionCache._impl_class._locator_classes = own
import qattn
from qattn.tiles.loops import gaussian
x = torch.randn(100, 3)
lse = qattn.attend(x, x, backend="native").lse
torch.testing.assert_close(lse, (-0.5 * torch.cdist(x, x) ** 2).logsumexp(1), rtol=0, atol=1e-4)
_, hits, misses = gaussian.attend_tiles.stats
print(sum(hits.values()), sum(misses.values()))
"""


def run(*arguments, **environment):
    """The numbers of loops that were found and that were compiled."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_compiled_once_and_again_if_damaged(tmp_path):
    """A second process finds the loop compiled; one that is cut short, or another's, is compiled anew."""
    folder = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert run(**folder) == ["0", "1"]
    assert run(**folder) == ["1", "0"]
    (file,) = tmp_path.rglob("gaussian.attend_tiles*.nbc")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert run(**folder) == ["0", "1"]
    file.write_bytes(b"the cache of another program")
    assert run(**folder) == ["0", "1"]
    assert run(**folder) == ["1", "0"]


@pytest.mark.slow
def test_works_where_nothing_can_be_kept():
    assert run("nowhere") == ["0", "1"]


@pytest.mark.slow
def test_kept_elsewhere_if_the_installation_and_the_home_are_read_only(tmp_path):
    home = {"HOME": os.devnull, "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path)}
    # The __pycache__ of the loops is writable here, but for Numba it is not: the folder is ours.
    run("read-only", **home)
    assert run("read-only", **home) == ["1", "0"]


def test_what_is_kept_is_what_was_compiled(tmp_path):
    """Numba's own files can be exchanged by processes that compile at once, and stale ones be loaded."""
    from qattn.tiles.loops import gaussian

    assert isinstance(gaussian.attend_tiles._cache._cache_file, Files)

    old, new, other = (Files(tmp_path, "loop-7.py311", stamp) for stamp in ("old", "new", "new"))
    unrelated = Files(tmp_path, "loop-71.py311", "old")
    for files in (old, unrelated):
        files.save("float32", "old code")
    assert new.load("float32") is None
    new.save("float32", "code for float32")
    other.save("float64", "code for float64")
    for files in (new, other):
        assert [files.load(key) for key in ("float32", "float64")] == ["code for float32", "code for float64"]
    assert old.load("float32") is None  # removed
    assert unrelated.load("float32") == "old code"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:40] + b"?" + x[41:]])
def test_damaged_files_count_as_missing(damage, tmp_path):
    files = Files(tmp_path, "loop", "stamp")
    files.save("float32", "code")
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert files.load("float32") is None
    files.save("float32", "code")
    assert files.load("float32") == "code"


@pytest.mark.parametrize("foreign", [b"", b"no pickle", b"ca_missing_module\nCode\n.", pickle.dumps("code")[:-1]])
def test_whole_files_of_others_count_as_missing(foreign, tmp_path):
    """The checksum is right, and what it is of cannot be loaded here."""
    files = Files(tmp_path, "loop", "stamp")
    files.save("float32", "code")
    (path,) = tmp_path.iterdir()
    path.write_bytes(hashlib.sha256(foreign).digest() + foreign)
    assert files.load("float32") is None


def test_files_that_cannot_be_written_are_done_without(tmp_path):
    files = Files(tmp_path / "missing", "loop", "stamp")
    files.save("float32", "code")
    assert files.load("float32") is None


@pytest.fixture
def _fresh():
    cached = cache.cache_folder, cache._announce, cache._tasks
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_the_first_folder_that_can_be_written_to(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o777)  # anyone could put code there
    monkeypatch.setattr(cache, "_folders", lambda: iter([(blocked / "x", False), (shared, True), (own, True)]))
    assert cache.cache_folder() == (own if hasattr(os, "getuid") else shared)
    assert own.stat().st_mode & 0o777 == 0o700
    cache.cache_folder.cache_clear()
    monkeypatch.setattr(cache, "_folders", lambda: iter([(blocked / "x", False)]))
    assert cache.cache_folder() is None


@pytest.mark.usefixtures("_fresh")
def test_a_machine_on_which_nothing_can_be_written(monkeypatch):
    """A container whose files are read-only: Python finds no temporary folder either."""

    def read_only(*_, **__):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", read_only)
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert cache.cache_folder() is None
    assert not cache.is_compiled("attend")
    monkeypatch.setattr(cache, "_remembered", set())
    cache.remember("attend")
    assert cache.is_compiled("attend")


@pytest.mark.usefixtures("_fresh")
def test_one_line_says_that_loops_are_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for key in ("float32", "float64"):
        Files(tmp_path, "loop", "stamp").load(key)
    line = "qattn compiles loops for this machine, once. `qattn warm` compiles all of them.\n"
    assert capsys.readouterr().err == line


@pytest.mark.usefixtures("_fresh")
def test_tasks_are_remembered_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_folders", lambda: iter([(tmp_path, False)]))
    monkeypatch.setattr(cache, "_remembered", set())
    assert not cache.is_compiled("attend")
    cache.remember("attend")
    monkeypatch.setattr(cache, "_remembered", set())  # as in another process
    assert cache.is_compiled("attend")
    assert not cache.is_compiled("differentiate")
    monkeypatch.setattr(cache, "stamp", lambda: "another Numba")
    assert not cache.is_compiled("attend")


@pytest.mark.usefixtures("_fresh")
def test_processors_that_share_a_folder_remember_their_own_tasks(tmp_path, monkeypatch):
    """Code is compiled for the instructions of one; what another notes does not remove it."""
    monkeypatch.setattr(cache, "_folders", lambda: iter([(tmp_path, False)]))
    monkeypatch.setattr(cache, "_remembered", set())
    compiled = []
    for processor in ("znver3", "skylake-avx512", "znver3"):
        cache._tasks.cache_clear()
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda processor=processor: processor)
        compiled.append(cache.is_compiled("attend"))
        cache.remember("attend")
        cache._remembered.clear()  # as in another process
    assert compiled == [False, False, True]


@pytest.fixture
def _cold(_cold, monkeypatch):
    """A machine on which nothing is compiled, and where compiling is worth 5 · 300² pairs."""
    _be_patient(monkeypatch, 5 * 300 * 300)


def _be_patient(monkeypatch, pairs):
    """Let compiling take as long as torch takes for so many pairs, with all threads."""
    seconds = 1.001e-9 * by_torch.nanoseconds(pairs, 3) / torch.get_num_threads()
    monkeypatch.setattr(when_to_compile, "_COMPILER", dict.fromkeys(when_to_compile._COMPILER, seconds))


def _spied(monkeypatch):
    """Names of what attends from now on, "torch" or "loop"."""
    from qattn.tiles.loops import gaussian

    names = []

    def spy(name, original):
        return lambda *args: (names.append(name), original(*args))[1]

    monkeypatch.setattr(by_torch, "attend", spy("torch", by_torch.attend))
    monkeypatch.setattr(gaussian, "attend_tiles", spy("loop", gaussian.attend_tiles))
    return names


@pytest.mark.usefixtures("_cold")
def test_the_first_pairs_are_computed_by_plain_torch(monkeypatch):
    names = _spied(monkeypatch)
    points = torch.rand(300, 3)
    results = [qattn.attend(points, points, points) for _ in range(7)]
    assert list(dict.fromkeys(names)) == ["torch", "loop"]
    assert names.count("torch") == 5
    out, lse = dense(points, points, points)
    for result in results:
        torch.testing.assert_close(result.out.double(), out, rtol=0, atol=1e-5)
        torch.testing.assert_close(result.lse.double(), lse, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("_cold")
def test_a_backend_that_is_asked_for_is_not_replaced(monkeypatch):
    names = _spied(monkeypatch)
    points = torch.rand(30, 3)
    qattn.attend(points, points, backend="native")
    assert set(names) == {"loop"}


@pytest.mark.usefixtures("_cold")
def test_many_pairs_are_worth_compiling(monkeypatch):
    names = _spied(monkeypatch)
    points = torch.rand(700, 3)
    qattn.attend(points, points)
    assert set(names) == {"loop"}


@pytest.mark.usefixtures("_cold")
def test_gradients_before_and_after(monkeypatch):
    _be_patient(monkeypatch, 10**9)
    points = torch.rand(200, 3, dtype=torch.float64)

    def gradients():
        x, sigma = points.clone().requires_grad_(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad((qattn.diffusion(x, sigma, tol=1e-9) @ points).square().sum(), (x, sigma))

    before = gradients()
    monkeypatch.setattr(by_torch, "differentiate", None)  # would raise
    _be_patient(monkeypatch, 0)
    torch.testing.assert_close(gradients(), before, rtol=1e-6, atol=1e-8)


WARMED = """
import torch
from numba.core import event

compiled = []


class Listener(event.Listener):
    def on_start(self, happening):
        compiled.append(happening.data["dispatcher"].py_func.__name__)

    def on_end(self, happening):
        pass


event.register("numba:compile", Listener())
import qattn

for dtype in (torch.float32, torch.float64):
    for d in (1, 2, 3, 4, 6, 9):
        points, sigma = torch.rand(400, d, dtype=dtype), torch.tensor(0.3, dtype=dtype)
        for method in ("exact", "tiles"):
            q = qattn.diffusion(points.requires_grad_(), sigma.requires_grad_(), method=method)
            (q @ torch.rand(400, 20, dtype=dtype)).sum().backward()
    for d in (2, 6):
        large = qattn.diffusion(torch.rand(20_000, d, dtype=dtype), 0.02, method="tiles")
    qattn.eigsh(large, 3)
    qattn.distances.energy_distance(points, points + 1).sum().backward()
qattn.diffusion(qattn.MixtureKernel(torch.rand(300, 3), torch.full((300,), 0.1), 0.2)) @ torch.rand(300, 2)
print(*compiled)
"""


@pytest.mark.slow
def test_nothing_is_compiled_after_warming():
    command = [sys.executable, "-m", "qattn", "warm"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tasks compiled in" in done.stdout
    done = subprocess.run([sys.executable, "-c", WARMED], capture_output=True, text=True, check=True)
    assert not done.stdout.split()

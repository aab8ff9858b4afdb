"""The selection of a backend, and the message if none takes the inputs."""

import sys
import types

import pytest
import torch
from cases import sphere
from torch._subclasses.fake_tensor import FakeTensorMode

from qattn import attend
from qattn.attention import dispatch, flash_attn, xformers
from qattn.attention.dispatch import BACKENDS, ORDER, select
from qattn.attention.inputs import Inputs
from qattn.attention.score import gaussian
from qattn.kernels.gaussian.tiles import SortedCloud, Tiles
from qattn.lift import Extent
from qattn.tiles import device as triton_device


def inputs(dtype=torch.float32, value_dtype=None, device="cpu", score=gaussian, tol=1e-3, batch=1, dims=3):
    points = torch.zeros(batch, 64, dims, dtype=dtype, device=device)
    value = None if value_dtype is None else torch.zeros(batch, 64, 4, dtype=value_dtype, device=device)
    result = Inputs(points, points, value, score=score, tol=tol)
    result.__dict__["extent"] = Extent(10.0, 10.0, 0.0)  # measured from data, which a fake tensor has not
    return result


FMHA = types.ModuleType("fmha")


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU: fake CUDA tensors, a compute capability, and all packages installed."""

    def pretend(capability=(8, 0), packages=flash_attn.PACKAGES, fmha=FMHA, triton=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(flash_attn, "installed", lambda: list(packages))
        monkeypatch.setattr(xformers, "_load", lambda: fmha)
        monkeypatch.setattr(triton_device, "why_not_installed", lambda: triton)

    pretend()
    with FakeTensorMode():
        yield pretend


def test_every_backend_is_in_some_order_and_known():
    assert {name for order in ORDER.values() for name in order} == set(BACKENDS)
    assert all(order[-1] == "reference" for order in ORDER.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_auto_on_a_cpu_is_native(dtype):
    assert select(inputs(dtype, dtype), "auto").name == "native"


def test_auto_on_a_cpu_with_another_score_is_reference():
    assert select(inputs(score=lambda q, k: q[0] * k[0]), "auto").name == "reference"


@pytest.mark.usefixtures("_flex_everywhere")
def test_auto_on_a_gpu(gpu):
    """Direct differences for float32 points, also where no lift is exact enough; 16-bit kernels for 16-bit points."""
    for value_dtype in (torch.float16, None, torch.float32):
        assert select(inputs(torch.float32, value_dtype, "cuda"), "auto").name == "triton"
    assert select(inputs(device="cuda", tol=1e-7), "auto").name == "triton"
    assert select(inputs(torch.float16, torch.float16, "cuda"), "auto").name == "flash_attn"
    assert select(inputs(torch.bfloat16, torch.float32, "cuda"), "auto").name == "triton"
    assert select(inputs(torch.float16, torch.float16, "cuda", tol=1e-7), "auto").name == "triton"
    assert select(inputs(torch.float64, None, "cuda"), "auto").name == "reference"
    assert select(inputs(device="cuda", score=lambda q, k: q[0] * k[0]), "auto").name == "flex"
    gpu(packages=())
    assert select(inputs(torch.float16, torch.float16, "cuda"), "auto").name == "triton"


@pytest.mark.usefixtures("_flex_everywhere")
@pytest.mark.filterwarnings("ignore:Attention on a GPU is slower")
def test_auto_on_a_gpu_without_triton(gpu):
    gpu(triton="triton is not installed")
    assert select(inputs(torch.float32, torch.float16, "cuda"), "auto").name == "flash_attn"
    assert select(inputs(torch.float32, None, "cuda"), "auto").name == "flash_attn"
    assert select(inputs(torch.float32, torch.float32, "cuda"), "auto").name == "sdpa"
    assert select(inputs(torch.float64, None, "cuda"), "auto").name == "reference"
    assert select(inputs(device="cuda", score=lambda q, k: q[0] * k[0]), "auto").name == "flex"
    assert select(inputs(device="cuda", tol=1e-7), "auto").name == "flex"
    gpu(packages=(), fmha="xformers is not installed", triton="triton is not installed")
    assert select(inputs(torch.float32, torch.float16, "cuda"), "auto").name == "sdpa"


@pytest.mark.usefixtures("_flex_everywhere")
def test_one_warning_says_that_triton_is_missing(gpu):
    """One warning for all pairs and near tiles; none where the GPU would be refused or another backend is asked for."""
    cloud = SortedCloud(torch.zeros(1, 64, 3, device="cpu"), torch.zeros(1, 64, dtype=torch.int64))
    message = "slower, or less exact, without kernels of our own: triton is not installed"
    for find in (lambda given: select(given, "auto").name, Tiles(cloud, cloud).not_supported_reasons):
        dispatch._warn_of_slowness.cache_clear()
        gpu(capability=(7, 5), triton="triton is not installed")
        find(inputs(device="cuda"))
        gpu(triton="triton is not installed")
        select(inputs(device="cuda"), "sdpa")
        with pytest.warns(UserWarning, match=message) as caught:
            assert find(inputs(device="cuda")) == find(inputs(device="cuda"))
        assert len(caught) == 1


def reasons(name, given):
    return BACKENDS[name].not_supported_reasons(given)


def test_reasons_of_the_gpu_backends(gpu):
    lossy = "lifting would lose about {} of lse to cancellation, more than tol = 1.0e-07"
    for name, error in (("flash_attn", "4.8e-05"), ("sdpa", "1.9e-04"), ("xformers", "1.9e-04")):
        assert reasons(name, inputs(device="cuda", tol=1e-7)) == [lossy.format(error)]
    assert reasons("flash_attn", inputs(torch.float32, torch.float32, "cuda")) == [
        "values are float32, and it rounds their weights to 16 bits (takes float16, bfloat16 or no values)"
    ]
    assert reasons("flash_attn", inputs(device="cuda", batch=70_000)) == ["batch of 70000 (takes up to 65535)"]
    assert reasons("flash_attn", inputs(device="cuda", dims=80)) == ["lifted width 328 (takes up to 256)"]
    assert reasons("sdpa", inputs(torch.float64, None, "cuda")) == [
        "float64 on cuda (takes float32, float16, bfloat16)"
    ]
    assert reasons("sdpa", inputs(torch.float16, None, "cuda", dims=80)) == ["lifted width 328 (takes up to 256)"]
    assert reasons("native", inputs(device="cuda")) == ["device is cuda (takes cpu)"]
    assert reasons("triton", inputs(torch.float64, None, "cuda", dims=17)) == [
        "float64 (takes float32, float16, bfloat16)", "17 dimensions (takes up to 16)",
    ]  # fmt: skip
    gpu(capability=(7, 5))
    assert reasons("triton", inputs(device="cuda")) == ["it needs compute capability 8.0, this GPU has 7.5"]
    assert reasons("flash_attn", inputs(device="cuda")) == [
        "flash_attn.cute, flash_attn_interface, flash_attn does not run on compute capability 7.5"
    ]
    assert reasons("xformers", inputs(torch.float16, None, "cuda")) == [
        "its 16-bit kernels need compute capability 8.0, this GPU has 7.5"
    ]
    gpu(capability=(12, 0))
    assert reasons("xformers", inputs(device="cuda")) == [
        "its float32 kernel stops at compute capability 9.0, this GPU has 12.0"
    ]


@pytest.mark.parametrize(("name", "is_taken"), [("gfx942:sramecc+:xnack-", True), ("gfx1030", False)])
def test_gpus_of_amd(gpu, monkeypatch, name, is_taken):
    """Only GPUs for which the kernels were compiled are taken."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(gcnArchName=name))
    gpu(capability=(9, 4))
    expected = [] if is_taken else ["of AMD it takes gfx90a, gfx942, gfx950, this GPU is gfx1030"]
    assert reasons("triton", inputs(device="cuda")) == expected


def test_a_tighter_tolerance_moves_auto_from_lifts_to_differences():
    assert reasons("sdpa", inputs(tol=1e-7)) != []
    assert reasons("sdpa", inputs(tol=1e-3)) == []
    points = (sphere(100) / 0.001).float()
    with pytest.raises(NotImplementedError, match=r"sdpa: *lifting would lose about 3\.\de-01 of lse"):
        attend(points, points, backend="sdpa")
    assert attend(points, points).lse.isfinite().all()


def test_explicit_names_are_obeyed(monkeypatch):
    points = torch.randn(20, 3)
    for name in ("native", "sdpa", "reference"):
        called = []
        original = type(BACKENDS[name]).attend
        monkeypatch.setattr(
            type(BACKENDS[name]), "attend", lambda self, i, o=original, c=called: (c.append(self.name), o(self, i))[1]
        )
        attend(points, points, backend=name)
        assert called == [name]


def test_unknown_names():
    with pytest.raises(
        ValueError, match='`backend` should be "auto" or one of native, triton, flash_attn, sdpa, xformers, flex'
    ):
        attend(torch.randn(5, 3), torch.randn(5, 3), backend="cudnn")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.4.0", "needs triton 3.5, which torch 2.9 brings along, and this is 3.4.0"),
        ("3.5.1", None),
        ("3.10.0", None),
    ],
)
def test_versions_of_triton(fake_triton, version, reason):
    """Versions before 3.5 do not compile the kernels."""
    fake_triton(version)
    assert triton_device.why_not_installed.__wrapped__() == reason


def test_triton_that_cannot_launch(fake_triton, monkeypatch):
    """Triton compiles its launcher on the machine itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fake_triton("3.7.1", "raise RuntimeError('Failed to find C compiler.\\nPlease specify via CC')")
    assert triton_device.why_not_installed.__wrapped__() == (
        "triton cannot launch kernels here, for which it needs a C compiler and Python.h "
        "(RuntimeError: Failed to find C compiler.)"
    )
    fake_triton("3.7.1", "return 'cuda'")
    assert triton_device.why_not_installed.__wrapped__() is None


@pytest.fixture
def fake_triton(monkeypatch, tmp_path):
    """Return a function that puts a package `triton` in the place of any other, with a version and a driver."""
    modules = "triton", "triton.language", "triton.runtime"
    folder = tmp_path / "triton"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)

    def make(version, target="raise AssertionError"):
        for module in modules:
            sys.modules.pop(module, None)
        driver = f"class driver:\n    class active:\n        def get_current_target():\n            {target}\n"
        for name, text in (("__init__", f'__version__ = "{version}"\n'), ("language", ""), ("runtime", driver)):
            (folder / f"{name}.py").write_text(text)

    yield make
    for module in modules:
        sys.modules.pop(module, None)


def nothing_installed(monkeypatch):
    monkeypatch.setattr(triton_device, "why_not_installed", lambda: "triton is not installed (`pip install triton`)")
    monkeypatch.setattr(flash_attn, "_load", lambda module: "")
    monkeypatch.setattr(xformers, "_load", lambda: "xformers is not installed (`pip install xformers`)")


@pytest.mark.usefixtures("_flex_everywhere")
def test_the_whole_message_of_a_refused_name(monkeypatch):
    nothing_installed(monkeypatch)
    query, key, value = torch.randn(2, 500, 3), torch.randn(60, 3), torch.randn(60, 16)
    with pytest.raises(NotImplementedError) as caught:
        attend(query, key, value, bias=torch.zeros(60), backend="flash_attn")
    assert str(caught.value) == (
        '`backend="flash_attn"` does not take these inputs:\n'
        "    query  (2, 500, 3)  float32  cpu\n"
        "    key    (2, 60, 3)   float32  cpu\n"
        "    value  (2, 60, 16)  float32  cpu\n"
        "    bias   (2, 60)      float32  cpu\n"
        "  native:     takes them\n"
        "  triton:     triton is not installed (`pip install triton`); device is cpu (takes cuda)\n"
        "  flash_attn: no FlashAttention package is installed (`pip install flash-attn --no-build-isolation`); "
        "device is cpu (takes cuda); values are float32, and it rounds their weights to 16 bits "
        "(takes float16, bfloat16 or no values)\n"
        "  sdpa:       takes them\n"
        "  xformers:   xformers is not installed (`pip install xformers`); device is cpu (takes cuda)\n"
        "  flex:       takes them\n"
        "  reference:  takes them"
    )


def test_the_whole_message_when_nobody_takes_the_input(monkeypatch):
    nothing_installed(monkeypatch)
    monkeypatch.setitem(dispatch.ORDER, "cpu", ("native", "sdpa"))

    def mixture(query, key):
        return query[0] * key[0]

    with pytest.raises(NotImplementedError) as caught:
        attend(torch.randn(10, 1), torch.randn(10, 1), score=mixture)
    lines = str(caught.value).splitlines()
    assert lines[0] == "No attention backend takes these inputs:"
    assert "    score  mixture" in lines
    assert "  native:     the score is not the Gaussian one, for which the loops are compiled" in lines
    assert "  sdpa:       the score is not the Gaussian one, so not a dot product of lifted points" in lines

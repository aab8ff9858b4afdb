"""CUDA tensors and Inductor's CUDA code on a build of torch for CPUs.

`pretended()` lets `torch.compile` take fake CUDA tensors and write the code of its Triton kernels for an A100.
`interpreted()` also runs that code: every fake tensor has a twin on the CPU, and Triton's interpreter runs the kernels
on the twins.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_cuda import allow_fake_cuda_tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode_temporarily
from torch.utils._pytree import tree_map

__all__ = ["Twins", "interpreted", "pretended", "written_by_inductor"]

_CAPABILITY = (8, 0)
_A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multi_processor_count=108, total_memory=80 * 2**30,
    shared_memory_per_block=49152, shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    L2_cache_size=40 * 2**20, gcnArchName="", is_integrated=0, is_multi_gpu_board=0,
)  # fmt: skip


def _constant(data: Any, **options: Any) -> Tensor:
    """`torch.tensor`, of a number on CUDA as `torch.full`: the former would make it on a device."""
    if isinstance(data, int) and torch.device(options.get("device") or "cpu").type == "cuda":
        return torch.full((), data, **options)
    return torch.tensor(data, **options)


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Pretend an A100 to `torch.compile`."""
    import torch._inductor.config
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    allow_fake_cuda_tensors()
    answers = {
        "is_available": True, "get_device_properties": _A100, "get_device_capability": _CAPABILITY, "current_device": 0,
        "device_count": 1, "synchronize": None, "is_bf16_supported": True, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }  # fmt: skip
    of_interface = "get_device_properties", "current_device", "device_count", "synchronize"
    target = GPUTarget("cuda", 80, 32)
    active = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda *_: 0, utils=None
    )
    torch_module = ModuleType("torch")
    torch_module.__dict__.update(torch.__dict__, tensor=_constant)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for name in (*of_interface, "exchange_device", "maybe_exchange_device"):
            answer = answers.get(name, 0)
            function = staticmethod(lambda *_, answer=answer, **__: answer)
            stack.enter_context(mock.patch.object(device_interface.CudaInterface, name, function))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        # Constants would be made on the device, or folded there.
        stack.enter_context(mock.patch("torch.fx.experimental.proxy_tensor.CONSTANT_NUMEL_LIMIT", -1))
        stack.enter_context(mock.patch("torch._dynamo._trace_wrapped_higher_order_op.torch", torch_module))
        options = {"joint_graph_constant_folding": False, "force_disable_caches": True, "compile_threads": 1}
        stack.enter_context(torch._inductor.config.patch(options))
        stack.enter_context(mock.patch.object(driver, "_active", active))
        device_interface.caching_worker_device_properties.pop("cuda", None)
        stack.callback(device_interface.caching_worker_device_properties.pop, "cuda", None)
        yield


def written_by_inductor(call: Callable[[], Any]) -> str:
    """Return the code that Inductor writes for an A100, for what a call compiles first. It is not run."""
    from torch._inductor.graph import GraphLowering

    written: list[str] = []

    def keep(self: Any, wrapper_code: Any) -> Any:
        written.append(wrapper_code.value)
        raise RuntimeError("not to be run")

    torch._dynamo.reset()
    with (
        pretended(),
        mock.patch.object(GraphLowering, "_compile_to_module_lines", keep),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        try:
            call()
        except Exception:
            if not written:
                raise
    return written[0]


class Twins(TorchDispatchMode):
    """Fake CUDA tensors with a twin on the CPU each: every operator runs on both."""

    def __init__(self) -> None:
        super().__init__()
        self._twins: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the id of one that is gone

    def fake(self, real: Tensor) -> Tensor:
        """Return a fake CUDA tensor whose twin is a given tensor."""
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
        self._link(fake, real)
        return fake

    def real(self, x: Any) -> Any:
        """Return the twin of a fake tensor, and anything else as it is."""
        return self._twins[id(x)] if isinstance(x, FakeTensor) else x

    def _link(self, fake: Tensor, real: Tensor) -> None:
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        self._twins[id(fake)] = real
        self._kept.append(fake)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator on fake tensors and on their twins."""
        fakes = function(*args, **(kwargs or {}))
        with _disable_current_modes():
            args, kwargs = tree_map(self.real, (args, kwargs or {}))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            reals = function(*args, **kwargs)
        several = isinstance(fakes, tuple | list)
        for fake, real in zip(fakes if several else [fakes], reals if several else [reals], strict=True):
            if isinstance(fake, FakeTensor) and id(fake) not in self._twins:
                self._link(fake, real)
        return fakes


def _module(source: str, name: str) -> ModuleType:
    """Write a module to a file, where Triton can read the source of its kernels, and import it."""
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Interpreted:
    """Launches a kernel as Inductor's own launcher would, with one configuration."""

    def __init__(self, kernel: Any, is_template: bool, options: dict[str, Any], launched: list[str]) -> None:
        self._kernel, self._is_template, self._options, self._launched = kernel, is_template, options, launched

    def run(self, *args: Any, stream: Any = None) -> None:
        if self._is_template:
            *args, x, y, z = args  # type: ignore[assignment]
            self._kernel[x, y, z](*args)
        else:
            block = min(1024, self._options["size_hints"]["x"])
            self._kernel[-(-args[-1] // block),](*args, XBLOCK=block)
        self._launched.append(self._kernel.fn.__name__)


class _AsyncCompile:
    """Stands for Inductor's class of this name."""

    def __init__(self, launched: list[str]) -> None:
        self._launched = launched

    def triton(self, name: str, source: str, device_str: str) -> Any:
        from torch._inductor.runtime import triton_helpers, triton_heuristics

        def decorator(is_template: bool) -> Callable[..., Any]:
            return lambda *_, **options: lambda kernel: _Interpreted(kernel, is_template, options, self._launched)

        with (
            mock.patch.object(triton_heuristics, "template", decorator(True)),
            mock.patch.object(triton_heuristics, "pointwise", decorator(False)),
            mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        ):
            return getattr(_module(source, name), name)

    def wait(self, scope: Any) -> None:
        """Nothing is compiled in the background."""


# Lines of Inductor's code that ask for a device, and what stands for them.
_REPLACED = {
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = lambda device: 0",
    "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda":
        "empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)",
    "with torch.cuda._DeviceGuard(0):": "if True:",
    "torch.cuda.set_device(0)": "pass",
}  # fmt: skip


@contextlib.contextmanager
def interpreted(twins: Twins) -> Iterator[list[str]]:
    """Run what `torch.compile` compiles for fake CUDA tensors on their twins; yield the names of launched kernels."""
    from torch._inductor.graph import GraphLowering

    launched: list[str] = []

    def run_on_twins(self: Any, wrapper_code: Any) -> Any:
        code = wrapper_code.value
        for line, other in _REPLACED.items():
            assert line in code or line.startswith("torch.cuda.set_device"), line
            code = code.replace(line, other)
        with mock.patch("torch._inductor.async_compile.AsyncCompile", return_value=_AsyncCompile(launched)):
            module = _module(code, "written_by_inductor")

        def call(args: list[Any]) -> tuple[Any, ...]:
            reals = [twins.real(x) for x in args]
            args.clear()
            with _disable_current_modes():
                results = module.call(reals)
            return tuple(twins.fake(x) if isinstance(x, Tensor) else x for x in results)

        return SimpleNamespace(call=call, __file__=module.__file__, __name__=module.__name__, key="", runner=None)

    with pretended(), mock.patch.object(GraphLowering, "_compile_to_module_lines", run_on_twins):
        yield launched


def without_twins(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a compiled function outside of the innermost mode, which Dynamo would trace."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _pop_mode_temporarily():
            return function(*args, **kwargs)

    return call

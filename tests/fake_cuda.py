"""CUDA tensors without a CUDA device: fake ones, that have shapes and no numbers; no tests."""

import ctypes
import heapq
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def allow_fake_cuda_tensors():
    """Give CUDA the device guard of meta tensors, unless there is a device: copies of fakes ask for one.

    A build without CUDA has none, and that of a build with CUDA asks for a driver. The table of guards has its name
    from the compiler, so tests that need them are skipped where it may be another.
    """
    if sys.platform != "linux":
        pytest.skip("fake CUDA tensors need the library of torch for Linux")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    if not torch.cuda.is_available():
        guards[cuda] = guards[meta]


class Indexing(TorchFunctionMode):
    """Basic indexing and `~` by plain operators: they ask for a CUDA build themselves, even of a fake tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__invert__:
            return torch.logical_not(*args)
        if function is not torch.Tensor.__getitem__:
            return function(*args, **(kwargs or {}))
        tensor, index = args
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            missing = tensor.ndim - sum(i is not None and i is not Ellipsis for i in index)
            where = index.index(Ellipsis)
            index = index[:where] + (slice(None),) * missing + index[where + 1 :]
        axis = 0
        for i in index:
            if i is None:
                tensor = tensor.unsqueeze(axis)
            elif isinstance(i, int):
                tensor, axis = tensor.select(axis, i), axis - 1
            elif i != slice(None):
                start, stop, step = i.indices(tensor.shape[axis])
                assert step == 1
                tensor = tensor.narrow(axis, start, stop - start)
            axis += 1
        return tensor


class Recorder(TorchDispatchMode):
    """Keeps the attention operators that were called, with their tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "attention" in function.__name__:
            self.calls.append((function.__name__, args, kwargs, result))
        return result


class Synchronizations(TorchFunctionMode):
    """Counts what the host waits for: numbers and copies that come from the device.

    As fake tensors have no numbers, all are 1, `all()` and `equal()` are true and `any()` is false: nothing is
    wrong with the inputs.
    """

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        # One copy of a real tensor, and one number at a time of a fake one.
        self._patch = mock.patch.object(FakeTensor, "tolist", lambda tensor: self._numbers(tensor))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def _numbers(self, tensor):
        self.count += 1
        return np.ones(tensor.shape, float if tensor.is_floating_point() else int).tolist()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, tensor = function.__name__, args[0] if args else None
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
            assert name not in ("nonzero", "masked_select"), f"{name}: a size that depends on numbers of the device"
            convert = {"__bool__": bool, "__float__": float, "__int__": int, "__index__": int}.get(name)
            if name == "item":
                return self._numbers(tensor)
            self.count += convert is not None or name in ("cpu", "numpy", "equal")
            if name == "equal":
                return True
            if convert is not None:
                return convert(getattr(tensor, "answer", 1))
        result = function(*args, **(kwargs or {}))
        if name == "to" and tensor.device.type == "cuda":
            self.count += result.device.type == "cpu"
        if name == "any":
            result.answer = 0
        return result


def fake_cuda(capability=(8, 0)):
    """Patches and modes in which CUDA tensors are fake."""
    return (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        FakeTensorMode(),
        Indexing(),
    )


def backward(outputs, cotangents, inputs=(), create_graph=False):
    """Run the backward pass of fake CUDA tensors, for which the engine of torch asks for a device.

    Nodes are called in reverse order of their creation, as by that engine. The pass ends at leaves, or at `inputs`.

    Returns:
        The cotangent that reached each output of each node: a dict by `edge`.
    """
    outputs, cotangents = zip(
        *((y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad), strict=True
    )
    ends = {edge(x)[0] for x in inputs}
    needed = leading([edge(y)[0] for y in outputs], ends)
    reached, queue, seen = {}, [], set()

    def receive(node, place, cotangent):
        if cotangent is None or node not in needed:
            return
        expected = node._input_metadata[place]
        cotangent = cotangent.sum_to_size(tuple(expected.shape)).to(expected.dtype)
        reached[node, place] = reached[node, place] + cotangent if (node, place) in reached else cotangent
        if node not in seen and node not in ends and node.next_functions:
            heapq.heappush(queue, (-node._sequence_nr(), len(seen), node))
        seen.add(node)

    for output, cotangent in zip(outputs, cotangents, strict=True):
        receive(*edge(output), cotangent)
    with torch.set_grad_enabled(create_graph):
        while queue:
            node = heapq.heappop(queue)[-1]
            taken = [reached.get((node, n)) for n in range(len(node._input_metadata))]
            for (child, place), result in zip(*called(node, taken), strict=True):
                receive(child, place, result)
    return reached


def leading(starts, ends):
    """Return the nodes on the way to some nodes, or to any leaf if there are none."""
    found, stack = set(starts), list(starts)
    while stack:
        node = stack.pop()
        children = {child for child, _ in node.next_functions if child is not None} if node not in ends else set()
        stack += children - found
        found |= children
    if not ends:
        return found
    needed = found & ends
    for node in sorted(found, key=lambda node: node._sequence_nr()):
        if any(child in needed for child, _ in node.next_functions):
            needed.add(node)
    return needed


def called(node, cotangents):
    """Return the edges of a node, and the cotangents that go along them."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        results = node(*cotangents)
        return node.next_functions, results if isinstance(results, tuple) else (results,)
    results = node.apply(*cotangents)
    results = results if isinstance(results, tuple) else (results,)
    # One for each argument, of which only tensors have edges.
    edges = [(child, place) for child, place in node.next_functions if child is not None]
    return edges, [x for x, is_needed in zip(results, node.needs_input_grad, strict=True) if is_needed]


def edge(tensor):
    """Return the node of a tensor, and which of the outputs of the node the tensor is."""
    found = torch.autograd.graph.get_gradient_edge(tensor)
    return found.node, found.output_nr


def grad(outputs, inputs, grad_outputs, create_graph=False, allow_unused=True):
    """Stand in for `torch.autograd.grad`, for fake CUDA tensors."""
    assert allow_unused
    cotangents = grad_outputs if isinstance(grad_outputs, tuple) else (grad_outputs,)
    reached = backward(outputs, cotangents, inputs, create_graph)
    return tuple(reached.get(edge(x)) for x in inputs)

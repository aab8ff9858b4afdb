"""Run PTX, the assembly of NVIDIA GPUs, on a CPU: an emulator for what Triton, CuTe and nvcc compile for sm_80.

Threads of a block are lanes of NumPy arrays and run in lockstep; where they diverge, those at the lowest place in the
code run first, so that they meet again. Loads and stores are checked: they must be aligned, and within one of the
arrays. Shared memory starts as NaN.

Tensor cores are modeled as they are found to round: float32 factors lose their low 13 bits, products of a step are
summed exactly, and the result is truncated to float32. ex2, lg2 and division are rounded correctly, where hardware is
off by a unit or two. Barriers do nothing, and asynchronous copies are done at once, so races are not seen.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Program", "Struct", "launch"]

Array = np.ndarray[Any, Any]
_TYPES = {
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "u8": np.uint8, "u16": np.uint16,
    "u32": np.uint32, "u64": np.uint64, "s32": np.int32, "s64": np.int64, "f32": np.float32, "f64": np.float64,
    "f16": np.float16, "s16": np.int16, "s8": np.int8, "pred": np.bool_,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal
}  # fmt: skip
_WARP = 32
_FIRST = 2**20  # address of the first array; the space between arrays belongs to none
_GAP = 2**12
_PARAMETER = 512  # bytes for a parameter, at most


class Instruction(NamedTuple):
    """An instruction: guard, as "!%p1" or "", name, and operands, where braces make a tuple."""

    guard: str
    name: list[str]
    operands: list[Any]


class Program(NamedTuple):
    """A kernel: its instructions, the place of each label, and the types of its parameters."""

    code: list[Instruction]
    labels: dict[str, int]
    parameters: list[str]
    threads: int

    @staticmethod
    def parse(text: str) -> "Program":
        """Read the only kernel of a module."""
        text = re.sub(r"//.*", "", text)
        body = text.partition(".entry")[2]
        parameters = re.findall(r"\.param [^,)]*?(\w+_param_\d+)", body.partition("{")[0])
        threads = int(re.search(r"\.(?:reqntid|maxntid) (\d+)", body).group(1))  # type: ignore[union-attr]
        code: list[Instruction] = []
        labels = {}
        body = re.sub(r"^\s*\.loc.*$", "", body[body.index("{") + 1 :], flags=re.MULTILINE)
        body = re.sub(r"^\s*(\$\w+):", r"\1:;", body, flags=re.MULTILINE)
        for statement in body.split(";"):
            line = re.sub(r"^[{}\s]+", "", " ".join(statement.split()))
            if found := re.match(r"(\$\w+):$", line):
                labels[found.group(1)] = len(code)
            elif found := re.match(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", line):
                guard, name, operands = found.groups()
                code.append(Instruction(guard or "", re.split(r"\.", name), _operands(operands)))
            elif line and not line.startswith("."):
                raise ValueError(f"not understood: {line}")
        return Program(code, labels, parameters, threads)


def _operands(text: str) -> list[Any]:
    """Split operands at commas outside of braces."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)
    return [tuple(x.strip() for x in p[1:-1].split(",")) if p.startswith("{") else p.strip() for p in parts]


class Struct(NamedTuple):
    """A parameter made of several fields: a format of the module `struct`, and numbers, or arrays for pointers."""

    layout: str
    fields: list[Any]


class _Parameters(NamedTuple):
    """Parameters of a launch: the offset of each, and their bytes."""

    offsets: dict[str, int]
    data: bytes


class _Memory:
    """Arrays in one address space, with gaps between them."""

    def __init__(self, arrays: list[Array], first: int) -> None:
        self._first, self.addresses, end = first, [], 0
        for array in arrays:
            self.addresses.append(first + end)
            end += -(-array.nbytes // 16) * 16 + _GAP
        self._bytes = np.full(max(end, 16), 0xFF, np.uint8)
        self._is_ours = np.zeros(len(self._bytes), np.bool_)
        for array, address in zip(arrays, self.addresses, strict=True):
            place = slice(address - first, address - first + array.nbytes)
            self._bytes[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._is_ours[place] = True

    def _places(self, addresses: Array, size: int, count: int) -> Array:
        places = addresses.astype(np.int64) - self._first
        if (places % (size * count)).any():
            raise ValueError(f"an access of {size * count} bytes is not aligned")
        inside = (places >= 0) & (places + size * count <= len(self._bytes))
        if not inside.all() or not (self._is_ours[places] & self._is_ours[places + size * count - 1]).all():
            raise ValueError("an access is outside of all arrays")
        return places // size

    def load(self, addresses: Array, dtype: Any, count: int) -> list[Array]:
        places = self._places(addresses, np.dtype(dtype).itemsize, count)
        return [self._bytes.view(dtype)[places + n] for n in range(count)]

    def store(self, addresses: Array, values: list[Array]) -> None:
        places = self._places(addresses, values[0].dtype.itemsize, len(values))
        for n, value in enumerate(values):
            self._bytes.view(value.dtype)[places + n] = value

    def read_back(self, arrays: list[Array]) -> None:
        for array, address in zip(arrays, self.addresses, strict=True):
            place = slice(address - self._first, address - self._first + array.nbytes)
            array[...] = self._bytes[place].view(array.dtype).reshape(array.shape)


def launch(
    program: Program, grid: tuple[int, ...], arguments: list[Any], shared_bytes: int, width: int | None = None
) -> None:
    """Run a kernel; arrays among its arguments are changed in place.

    Args:
        program: The kernel.
        grid: Numbers of blocks.
        arguments: Arrays for pointers, numbers, and structs of them; further parameters, which Triton adds, are 0.
        shared_bytes: Size of the shared memory of a block.
        width: Size of a block along x; all of its threads by default.
    """
    fields = [field for x in arguments for field in (x.fields if isinstance(x, Struct) else [x])]
    arrays = [x for x in fields if isinstance(x, np.ndarray)]
    memory = _Memory(arrays, _FIRST)
    addresses = {id(array): address for array, address in zip(arrays, memory.addresses, strict=True)}

    def encoded(x: Any) -> bytes:
        if isinstance(x, Struct):
            return struct.pack(x.layout, *(addresses.get(id(field), field) for field in x.fields))
        return struct.pack("<f" if isinstance(x, float) else "<q", addresses.get(id(x), x))

    given = [encoded(x) for x in arguments] + [b""] * (len(program.parameters) - len(arguments))
    given = [x.ljust(_PARAMETER, bytes(1)) for x in given]
    parameters = _Parameters({name: n * _PARAMETER for n, name in enumerate(program.parameters)}, b"".join(given))
    with np.errstate(all="ignore"):
        for block in np.ndindex(*reversed(grid)):
            _Block(program, parameters, memory, tuple(reversed(block)), shared_bytes, width or program.threads).run()
    memory.read_back(arrays)


def _flushed(x: Array) -> Array:
    """Return float32 numbers with those below the normal range set to 0."""
    x = x.astype(np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def _half(x: Array, kind: str) -> Array:
    """Return the bits of float32 numbers rounded to f16 or to bf16, as uint32."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = x.astype(np.float32).view(np.uint32)
    return bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)  # ties to even


def _truncated(x: Array) -> Array:
    """Round float64 numbers to float32, toward zero."""
    near = x.astype(np.float32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)


class _Block:
    """A block of threads."""

    def __init__(
        self,
        program: Program,
        parameters: dict[str, bytes],
        memory: _Memory,
        place: tuple[int, ...],
        shared_bytes: int,
        width: int,
    ) -> None:
        self._program, self._parameters, self._global = program, parameters, memory
        self._shared = _Memory([np.full(max(16, shared_bytes), 0xFF, np.uint8)], 0)
        lanes = np.arange(program.threads, dtype=np.uint32)
        self._registers: dict[str, Array] = {
            "%tid.x": lanes % width,
            "%tid.y": lanes // width,
            "%laneid": lanes % _WARP,
        }
        for axis, number, size in zip("xyz", (*place, 0, 0), (width, program.threads // width, 1), strict=False):
            self._registers[f"%ctaid.{axis}"] = np.full_like(lanes, number)
            self._registers[f"%ntid.{axis}"] = np.full_like(lanes, size)
        self._registers["%tid.z"] = np.zeros_like(lanes)
        self._lanes = lanes
        self._active = np.ones(program.threads, np.bool_)

    def run(self) -> None:
        """Run until all threads have returned."""
        waiting: dict[int, Array] = {0: self._active}  # threads by the place in the code at which they are
        while waiting:
            place = min(waiting)
            self._active = waiting.pop(place)
            while True:
                if place in waiting:
                    self._active = self._active | waiting.pop(place)
                instruction = self._program.code[place]
                place += 1
                if instruction.name[0] in ("ret", "exit"):
                    break
                if instruction.name[0] != "bra":
                    if not instruction.guard:
                        self._execute(instruction)
                        continue
                    everyone = self._active
                    self._active = everyone & self._guard(instruction.guard)
                    if self._active.any():
                        self._execute(instruction)
                    self._active = everyone
                    continue
                jumps = self._active & self._guard(instruction.guard)
                target = self._program.labels[instruction.operands[0]]
                for at, threads in ((target, jumps), (place, self._active & ~jumps)):
                    if threads.any():
                        waiting[at] = waiting[at] | threads if at in waiting else threads
                break

    def _guard(self, guard: str) -> Array:
        if not guard:
            return np.ones_like(self._active)
        value = self._registers[guard.lstrip("!")]
        return ~value if guard.startswith("!") else value

    def _value(self, operand: str, kind: str) -> Array:
        """Return an operand as numbers of a type, one for each thread."""
        dtype = np.dtype(_TYPES[kind])
        if operand in self._registers:
            value = self._registers[operand]
            if value.dtype == np.bool_ or value.dtype.itemsize == dtype.itemsize:
                return value.view(dtype) if value.dtype != np.bool_ else value
            return value.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)
        if operand.startswith("%") and "." not in operand:
            return np.zeros(self._program.threads, dtype)  # not written yet
        if operand.startswith("0f"):
            bits: int | float = int(operand[2:], 16)
            return np.full(self._program.threads, bits, np.uint32).view(dtype)
        if re.match(r"-?(0x)?\d", operand):
            number = int(operand, 0)
            if dtype.kind == "f":
                return np.full(self._program.threads, number, dtype)
            size = 8 * dtype.itemsize
            return np.full(self._program.threads, number & (2**size - 1), np.dtype(f"u{dtype.itemsize}")).view(dtype)
        if operand.startswith("%"):
            raise ValueError(f"not known: {operand}")
        # Symbols are parameters, and the start of shared memory.
        return np.full(self._program.threads, self._parameters.offsets.get(operand, 0), dtype)

    def _write(self, register: str, value: Array) -> None:
        """Write a register of the active threads, as bits."""
        value = value if value.dtype == np.bool_ else value.view(np.dtype(f"u{value.dtype.itemsize}"))
        if not self._active.all():
            old = self._registers.get(register, np.zeros_like(value))
            if old.dtype != value.dtype:
                old = old.astype(value.dtype)
            value = np.where(self._active, value, old)
        self._registers[register] = value

    def _execute(self, instruction: Instruction) -> None:
        _, name, operands = instruction
        getattr(self, f"_{name[0]}")(name, operands)

    def _sources(self, operands: list[Any], kind: str) -> Iterator[Array]:
        return (self._value(x, kind) for x in operands[1:])

    def _binary(self, name: list[str], operands: list[Any], function: Callable[..., Array]) -> None:
        result = function(*self._sources(operands, name[-1]))
        self._write(operands[0], _flushed(result) if "ftz" in name else result)

    def _add(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.add)

    def _sub(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.subtract)

    def _neg(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.negative)

    def _abs(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.abs)

    def _min(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.fmin if name[-1].startswith("f") else np.minimum)

    def _max(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.fmax if name[-1].startswith("f") else np.maximum)

    def _and(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.bitwise_and)

    def _or(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.bitwise_or)

    def _xor(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.bitwise_xor)

    def _not(self, name: list[str], operands: list[Any]) -> None:
        self._binary(name, operands, np.invert)

    def _div(self, name: list[str], operands: list[Any]) -> None:
        a, b = self._sources(operands, name[-1])
        if a.dtype.kind == "f":
            self._write(operands[0], a / b)
        else:  # toward zero, unlike NumPy's
            quotient = np.abs(a.astype(np.int64)) // np.maximum(1, np.abs(b.astype(np.int64)))
            self._write(operands[0], (quotient * np.sign(a) * np.sign(b)).astype(a.dtype))

    def _mul(self, name: list[str], operands: list[Any]) -> None:
        a, b = self._sources(operands, name[-1])
        self._write(operands[0], self._multiplied(name, a, b))

    def _multiplied(self, name: list[str], a: Array, b: Array) -> Array:
        if "hi" in name:
            return (a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
        if "wide" in name:
            wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
            return a.astype(wide) * b.astype(wide)
        return a * b

    def _mad(self, name: list[str], operands: list[Any]) -> None:
        a, b = (self._value(x, name[-1]) for x in operands[1:3])
        product = self._multiplied(name, a, b)
        kind = {8: "u64", 4: "u32"}[product.dtype.itemsize]
        self._write(operands[0], product.view(_TYPES[kind]) + self._value(operands[3], kind))

    def _fma(self, name: list[str], operands: list[Any]) -> None:
        a, b, c = (x.astype(np.float64) for x in self._sources(operands, name[-1]))
        result = (a * b + c).astype(np.float32)
        self._write(operands[0], _flushed(result) if "ftz" in name else result)

    def _ex2(self, name: list[str], operands: list[Any]) -> None:
        (x,) = self._sources(operands, "f32")
        self._write(operands[0], _flushed(np.exp2(x.astype(np.float64))))

    def _lg2(self, name: list[str], operands: list[Any]) -> None:
        (x,) = self._sources(operands, "f32")
        self._write(operands[0], np.log2(_flushed(x).astype(np.float64)).astype(np.float32))

    def _shl(self, name: list[str], operands: list[Any]) -> None:
        value, count = self._value(operands[1], name[-1]), self._value(operands[2], "u32")
        self._write(
            operands[0], np.where(count < 8 * value.itemsize, value << count.astype(value.dtype), 0).astype(value.dtype)
        )

    def _shr(self, name: list[str], operands: list[Any]) -> None:
        value, count = self._value(operands[1], name[-1]), self._value(operands[2], "u32")
        self._write(operands[0], value >> np.minimum(count, 8 * value.itemsize - 1).astype(value.dtype))

    def _bfe(self, name: list[str], operands: list[Any]) -> None:
        value = self._value(operands[1], name[-1])
        first, size = (self._value(x, "u32").astype(np.int64) for x in operands[2:4])
        field = (value.astype(np.int64) & 0xFFFFFFFF) >> first & (1 << size) - 1
        if name[-1] == "s32":
            field = np.where(field >> np.maximum(size - 1, 0) & 1, field - (1 << size), field)
        self._write(operands[0], field.astype(value.dtype))

    def _bfi(self, name: list[str], operands: list[Any]) -> None:
        value, into, first, size = self._sources(operands, "b32")
        mask = ((np.uint64(1) << size.astype(np.uint64)) - np.uint64(1) << first.astype(np.uint64)).astype(np.uint32)
        self._write(operands[0], into & ~mask | value << first & mask)

    def _cvta(self, name: list[str], operands: list[Any]) -> None:
        self._write(operands[0], self._value(operands[1], "u64"))

    def _atom(self, name: list[str], operands: list[Any]) -> None:
        """Take the minimum or maximum with a number of shared memory; the result is what was there before."""
        addresses, values = self._address(operands[1]), self._value(operands[2], name[-1])
        function = {"min": np.minimum, "max": np.maximum}[name[2]]
        before = np.zeros_like(values)
        for lane in np.flatnonzero(self._active):
            place = addresses[lane : lane + 1]
            before[lane] = self._shared.load(place, values.dtype, 1)[0][0]
            self._shared.store(place, [function(before[lane : lane + 1], values[lane : lane + 1])])
        self._write(operands[0], before)

    def _mov(self, name: list[str], operands: list[Any]) -> None:
        target, source = operands
        if isinstance(target, tuple) or isinstance(source, tuple):
            self._repacked(name[-1], target, source)
        else:
            self._write(target, self._value(source, name[-1]))

    def _repacked(self, kind: str, target: Any, source: Any) -> None:
        """Join registers to a wider one, or divide it."""
        dtype = np.dtype(_TYPES[kind])
        if isinstance(source, tuple):
            part = f"b{8 * dtype.itemsize // len(source)}"
            joined = np.stack([self._value(x, part) for x in source], axis=-1)
            self._write(target, np.ascontiguousarray(joined).view(dtype)[:, 0])
        else:
            part_type = _TYPES[f"b{8 * dtype.itemsize // len(target)}"]
            parts = np.ascontiguousarray(self._value(source, kind)).view(part_type).reshape(-1, len(target))
            for n, register in enumerate(target):
                self._write(register, np.ascontiguousarray(parts[:, n]))

    def _cvt(self, name: list[str], operands: list[Any]) -> None:
        to, of = name[-2:]
        if to in ("f16x2", "bf16x2"):  # the second operand is the lower half
            low, high = (_half(self._value(x, of), to.removesuffix("x2")) for x in operands[:0:-1])
            self._write(operands[0], low | high << np.uint32(16))
            return
        value = self._value(operands[1], of)
        if "rzi" in name:
            value = np.trunc(value)
        self._write(operands[0], value.astype(_TYPES[to]))

    def _selp(self, name: list[str], operands: list[Any]) -> None:
        a, b = (self._value(x, name[-1]) for x in operands[1:3])
        self._write(operands[0], np.where(self._registers[operands[3]], a, b))

    def _setp(self, name: list[str], operands: list[Any]) -> None:
        a, b = (self._value(x, name[-1]) for x in operands[1:3])
        comparison = name[1]
        is_unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros_like(self._active)
        if comparison == "nan":
            result = is_unordered
        elif comparison.endswith("u") and comparison[:-1] in _COMPARISONS:
            result = _COMPARISONS[comparison[:-1]](a, b) | is_unordered
        else:
            result = _COMPARISONS[comparison](a, b) & ~is_unordered
        if len(operands) == 4:
            result = {"and": np.logical_and, "or": np.logical_or}[name[2]](result, self._guard(operands[3]))
        self._write(operands[0], result)

    def _address(self, operand: str) -> Array:
        base, *offset = operand.strip("[] ").split("+")
        return self._value(base.strip(), "u64").astype(np.int64) + sum(int(x, 0) for x in offset)

    def _ld(self, name: list[str], operands: list[Any]) -> None:
        target, source = operands
        targets = target if isinstance(target, tuple) else (target,)
        dtype = _TYPES[name[-1]]
        if name[1] == "param":
            found = np.frombuffer(self._parameters.data, dtype, len(targets), int(self._address(source)[0]))
            for register, number in zip(targets, found, strict=True):
                # A signed number fills a wider register, as a 32-bit size does.
                wide = number.astype(np.int64) if register.startswith("%rd") and dtype == np.int32 else number
                self._write(register, np.full(self._program.threads, wide))
            return
        memory = self._shared if name[1] == "shared" else self._global
        addresses = self._address(source)[self._active]
        for register, loaded in zip(targets, memory.load(addresses, dtype, len(targets)), strict=True):
            value = np.zeros(self._program.threads, dtype)
            value[self._active] = loaded
            self._write(register, value)

    def _st(self, name: list[str], operands: list[Any]) -> None:
        target, source = operands
        sources = source if isinstance(source, tuple) else (source,)
        memory = self._shared if name[1] == "shared" else self._global
        kind = f"b{name[-1][1:]}"
        memory.store(self._address(target)[self._active], [self._value(x, kind)[self._active] for x in sources])

    def _bar(self, name: list[str], operands: list[Any]) -> None:
        if not self._active.all():
            raise ValueError("a barrier is reached by some threads of a block only")

    def _shfl(self, name: list[str], operands: list[Any]) -> None:
        value, number = self._value(operands[1], "b32"), self._value(operands[2], "s32")
        lane = (self._lanes % _WARP).astype(np.int64)
        other = {"bfly": lane ^ number, "idx": number, "down": lane + number, "up": lane - number}[name[2]]
        other = np.where((other >= 0) & (other < _WARP), other, lane)
        self._write(operands[0].split("|")[0], value[self._lanes - lane + other])

    def _redux(self, name: list[str], operands: list[Any]) -> None:
        """Reduce a number over the threads of a warp."""
        function = {"add": np.sum, "min": np.min, "max": np.max, "or": np.bitwise_or.reduce}[name[2]]
        value = self._value(operands[1], name[-1])
        result = function(value.reshape(-1, _WARP), axis=1)  # type: ignore[operator]
        self._write(operands[0], np.repeat(result, _WARP).astype(value.dtype))

    def _rcp(self, name: list[str], operands: list[Any]) -> None:
        (x,) = self._sources(operands, "f32")
        self._write(operands[0], _flushed(1 / x.astype(np.float64)))

    def _cp(self, name: list[str], operands: list[Any]) -> None:
        """Copy 16 bytes from global to shared memory; those beyond the number that is given are 0."""
        if "group" in name[2]:
            return
        target, source = (self._address(x)[self._active] for x in operands[:2])
        sizes = self._value(operands[3] if len(operands) > 3 else "16", "u32")[self._active]
        assert set(np.unique(sizes)) <= {0, 16}
        words = [np.zeros(len(target), np.uint32) for _ in range(4)]
        for word, loaded in zip(words, self._global.load(source[sizes > 0], np.uint32, 4), strict=True):
            word[sizes > 0] = loaded
        self._shared.store(target, words)

    def _ldmatrix(self, name: list[str], operands: list[Any]) -> None:
        """Load 8 × 8 matrices of 16-bit numbers, whose rows lie at the addresses of eight threads each."""
        addresses = self._address(operands[1]).reshape(-1, _WARP)
        lane = np.arange(_WARP)
        for n, register in enumerate(operands[0]):
            rows = addresses[:, 8 * n : 8 * n + 8, None] + 4 * np.arange(4)  # (warps, 8, 4) words
            words = self._shared.load(rows.reshape(-1), np.uint32, 1)[0].reshape(-1, 8, 4)
            if "trans" in name:
                numbers = np.ascontiguousarray(words).view(np.uint16).transpose(0, 2, 1)
                words = np.ascontiguousarray(numbers).view(np.uint32)
            self._write(register, np.ascontiguousarray(words[:, lane // 4, lane % 4]).reshape(-1))

    def _mma(self, name: list[str], operands: list[Any]) -> None:
        """D (16 × 8) = A (16 × k) B (k × 8) + C in the layouts of mma.m16n8k8 for tf32, m16n8k16 for f16 and bf16."""
        assert name[3:] in (
            ["m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"],
            ["m16n8k16", "row", "col", "f32", "f16", "f16", "f32"],
            ["m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"],
        ), name
        warps, lane = self._program.threads // _WARP, np.arange(_WARP)
        row, column = lane // 4, lane % 4
        k, packed = (8, 1) if "tf32" in name else (16, 2)

        def parts(registers: tuple[str, ...], is_factor: bool) -> Array:
            """Return numbers (registers, numbers of a register, warps, lanes)."""
            bits = np.stack([self._value(x, "u32") for x in registers])
            if is_factor and packed == 2:
                halves = np.ascontiguousarray(bits).view(np.uint16).reshape(*bits.shape, 2)
                numbers = halves.view(np.float16)
                if "bf16" in name:
                    numbers = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
                return np.moveaxis(numbers, -1, 1).astype(np.float64).reshape(len(bits), 2, warps, _WARP)
            bits = bits & np.uint32(0xFFFFE000 if is_factor else 0xFFFFFFFF)
            return bits.view(np.float32).astype(np.float64).reshape(len(bits), 1, warps, _WARP)

        a, b, c = np.zeros((warps, 16, k)), np.zeros((warps, k, 8)), np.zeros((warps, 16, 8))
        for n, registers in enumerate(parts(operands[1], True)):
            for m, part in enumerate(registers):
                a[:, row + 8 * (n % 2), packed * column + m + k // 2 * (n // 2)] = part
        for n, registers in enumerate(parts(operands[2], True)):
            for m, part in enumerate(registers):
                b[:, packed * column + m + k // 2 * n, row] = part
        for n, registers in enumerate(parts(operands[3], False)):
            c[:, row + 8 * (n // 2), 2 * column + n % 2] = registers[0]
        d = _truncated(np.einsum("wik,wkj->wij", a, b) + c)
        for n, register in enumerate(operands[0]):
            self._write(register, np.ascontiguousarray(d[:, row + 8 * (n // 2), 2 * column + n % 2]).reshape(-1))

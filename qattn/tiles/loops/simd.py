"""Vector registers for Numba: a `Vec` holds as many floats as one register of this machine.

Numba has no vector type, and the vectorizer of LLVM uses at most 256 bits and does not vectorize reductions. With
explicit registers the loops run as fast as hand-written C. A `Vec` is an ordinary Numba value: local variables become
registers, and on machines with narrower registers LLVM splits them, so that the same code is correct everywhere.
"""

# mypy: disable-error-code="no-untyped-def"

import platform

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")  # whose NEON has registers of 16 bytes
REGISTER_BYTES = 16 if _IS_ARM else 64 if llvm.get_host_cpu_features().get("avx512f") else 32
ROWS = 8  # query rows processed at a time: the latency of a multiply-add, in cycles, times two that start per cycle
FEW = 4  # rows processed at a time where each of them needs two registers

LOWEST = {32: -100.0, 64: -960.0}  # log₂ of the smallest weight that does not count as 0, by the bits of the dtype

_INT32 = ir.IntType(32)


class _Float:
    """A float type for exp2: its layout, and the minimax coefficients of 2^r on [−½, ½] after the leading 1."""

    def __init__(self, llvm_type, bits, mantissa, coefficients):
        self.bits = bits
        self.lanes = REGISTER_BYTES * 8 // bits
        self.vector = ir.VectorType(llvm_type, self.lanes)
        self.integer = ir.VectorType(ir.IntType(bits), self.lanes)
        self.suffix = f"v{self.lanes}f{bits}"
        self.mantissa = mantissa
        self.magic = 1.5 * 2.0**mantissa  # adding it rounds to an integer, which is then in the low bits
        self.coefficients = coefficients
        self.align = bits // 8


_FLOATS = {
    types.float32: _Float(
        ir.FloatType(), 32, 23,
        # relative error 9e-8
        (0.69314697758721271, 0.24022242077583798, 0.055507337603907950, 0.0096715129970405142,
         0.0013264722046182421),
    ),
    types.float64: _Float(
        ir.DoubleType(), 64, 52,
        # relative error 3e-18
        (0.69314718055994532581, 0.24022650695910131262, 0.055504108664820083176, 0.0096181291075941195762,
         0.001333355814677463106, 0.00015403530457112641239, 0.000015252733493118438132,
         1.3215435282068186062e-6, 1.0178199575306790033e-7, 7.0737832854020625193e-9,
         4.4347708103775014815e-10),
    ),
}  # fmt: skip


class Vec(types.Type):
    """The Numba type of a register of `dtype`."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Vec({dtype}, {_FLOATS[dtype].lanes})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, _FLOATS[fe_type.dtype].vector)


def _constant(vector, number):
    if isinstance(vector.element, ir.FloatType):
        number = ir.Constant(ir.FloatType(), number).constant
    return ir.Constant(vector, [number] * vector.count)


def _splat(builder, vector, scalar):
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(_INT32, vector.count), [0] * vector.count)
    )


def _call(builder, name, float_type, *arguments):
    signature = ir.FunctionType(float_type.vector, [float_type.vector] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{float_type.suffix}")
    return builder.call(function, arguments)


def _element(context, builder, array_type, array, offset):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _load(context, builder, float_type, array_type, array, offset):
    pointer = _element(context, builder, array_type, array, offset)
    return builder.load(builder.bitcast(pointer, float_type.vector.as_pointer()), align=float_type.align)


def _fma(builder, float_type, a, b, c):
    return _call(builder, "fma", float_type, a, b, c)


@intrinsic
def lanes(_, array):
    """Return the number of floats of the array's dtype per register, a constant to the compiler."""

    def emit(context, builder, signature, arguments):
        return ir.Constant(ir.IntType(64), _FLOATS[array.dtype].lanes)

    return types.int64(array), emit


@intrinsic
def load(_, array, offset):
    """Load the register at a flat offset of a contiguous array."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        return _load(context, builder, float_type, signature.args[0], *arguments)

    return Vec(array.dtype)(array, types.intp), emit


@intrinsic
def store(_, array, offset, register):
    """Store a register at a flat offset of a contiguous array."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        pointer = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(arguments[2], builder.bitcast(pointer, float_type.vector.as_pointer()), align=float_type.align)

    return types.void(array, types.intp, register), emit


@intrinsic
def splat(_, scalar):
    """Make a register with the same number in all lanes."""

    def emit(context, builder, signature, arguments):
        return _splat(builder, _FLOATS[scalar].vector, arguments[0])

    return Vec(scalar)(scalar), emit


@intrinsic
def add(_, a, b):
    """Compute a + b."""

    def emit(context, builder, signature, arguments):
        return builder.fadd(*arguments)

    return a(a, b), emit


@intrinsic
def subtract(_, a, b):
    """Compute a − b."""

    def emit(context, builder, signature, arguments):
        return builder.fsub(*arguments)

    return a(a, b), emit


@intrinsic
def multiply(_, a, b):
    """Compute a b."""

    def emit(context, builder, signature, arguments):
        return builder.fmul(*arguments)

    return a(a, b), emit


@intrinsic
def multiply_add(_, a, b, c):
    """Compute a b + c, rounded once."""

    def emit(context, builder, signature, arguments):
        return _fma(builder, _FLOATS[a.dtype], *arguments)

    return a(a, b, c), emit


@intrinsic
def divide(_, a, b):
    """Compute a / b."""

    def emit(context, builder, signature, arguments):
        return builder.fdiv(*arguments)

    return a(a, b), emit


@intrinsic
def root(_, a):
    """Compute √a."""

    def emit(context, builder, signature, arguments):
        return _call(builder, "sqrt", _FLOATS[a.dtype], *arguments)

    return a(a), emit


@intrinsic
def minus_square(_, s, a, b):
    """Compute s − (a − b)², rounded twice."""

    def emit(context, builder, signature, arguments):
        difference = builder.fsub(arguments[1], arguments[2])
        return _fma(builder, _FLOATS[s.dtype], builder.fneg(difference), difference, arguments[0])

    return s(s, a, b), emit


@intrinsic
def maximum(_, a, b):
    """Compute max(a, b)."""

    def emit(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, b), emit


@intrinsic
def sum_of(_, register):
    """Sum all lanes, by adding halves."""
    float_type = _FLOATS[register.dtype]

    def emit(context, builder, signature, arguments):
        total, width = arguments[0], float_type.lanes
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(
                    total, total, ir.Constant(ir.VectorType(_INT32, width), list(range(start, start + width)))
                )
                for start in (0, width)
            )
            total = builder.fadd(low, high)
        return builder.extract_element(total, ir.Constant(_INT32, 0))

    return register.dtype(register), emit


def _power_of_2(builder, float_type, x, factor=None):
    """Compute 2^x, or 2^(factor x), whose exponent is rounded only after its reduction to [−½, ½]."""
    magic = _constant(float_type.vector, float_type.magic)
    rounded = builder.fadd(x, magic) if factor is None else _fma(builder, float_type, factor, x, magic)
    integer = builder.fsub(rounded, magic)
    if factor is None:
        remainder = builder.fsub(x, integer)
    else:
        remainder = _fma(builder, float_type, factor, x, builder.fneg(integer))
    *others, power = (_constant(float_type.vector, c) for c in (1.0, *float_type.coefficients))
    for coefficient in reversed(others):
        power = _fma(builder, float_type, power, remainder, coefficient)
    exponent = builder.shl(
        builder.bitcast(rounded, float_type.integer),
        ir.Constant(float_type.integer, [float_type.mantissa] * float_type.lanes),
    )
    result = builder.bitcast(builder.add(builder.bitcast(power, float_type.integer), exponent), float_type.vector)
    lowest = _constant(float_type.vector, float_type.magic + LOWEST[float_type.bits])
    return builder.select(builder.fcmp_ordered(">", rounded, lowest), result, _constant(float_type.vector, 0.0))


@intrinsic
def exp2(_, x):
    """Compute 2^x for x ≤ 0 or slightly above; 0 for small results, whose products would be denormal and slow."""

    def emit(context, builder, signature, arguments):
        return _power_of_2(builder, _FLOATS[x.dtype], *arguments)

    return x(x), emit


@intrinsic
def exp2_of_product(_, factor, x):
    """Compute 2^(factor x), at the cost of `exp2`."""

    def emit(context, builder, signature, arguments):
        return _power_of_2(builder, _FLOATS[x.dtype], arguments[1], arguments[0])

    return x(factor, x), emit


@intrinsic
def zero_rows(_, array):
    """Make a tuple of `ROWS` registers of zeros."""
    registers = types.UniTuple(Vec(array.dtype), ROWS)

    def emit(context, builder, signature, arguments):
        zero = _constant(_FLOATS[array.dtype].vector, 0.0)
        return context.make_tuple(builder, registers, [zero] * ROWS)

    return registers(array), emit


@intrinsic
def store_rows(_, array, offset, stride, rows):
    """Store rows[r] at offset + r·stride for each row."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        position = arguments[1]
        for register in cgutils.unpack_tuple(builder, arguments[3], ROWS):
            pointer = _element(context, builder, signature.args[0], arguments[0], position)
            builder.store(register, builder.bitcast(pointer, float_type.vector.as_pointer()), align=float_type.align)
            position = builder.add(position, arguments[2])

    return types.void(array, types.intp, types.intp, rows), emit


@intrinsic
def add_rows(_, array, offset, stride, rows):
    """Add rows[r] to the register at offset + r·stride for each row."""
    return _adder(ROWS, array, rows)


@intrinsic
def multiply_add_rows(_, rows, array, offset, stride, register):
    """Compute rows[r] + array[offset + r·stride] · register for each row, one step of a matrix product."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        result = []
        position = arguments[2]
        for row in cgutils.unpack_tuple(builder, arguments[0], ROWS):
            factor = builder.load(_element(context, builder, signature.args[1], arguments[1], position))
            factor = _splat(builder, float_type.vector, factor)
            result.append(_fma(builder, float_type, factor, arguments[4], row))
            position = builder.add(position, arguments[3])
        return context.make_tuple(builder, rows, result)

    return rows(rows, array, types.intp, types.intp, register), emit


@intrinsic
def multiply_add_registers(_, rows, array, offset, stride, register):
    """Compute rows[r] + w_r · register for each row, where w_r is the register at offset + r·stride."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        result = []
        position = arguments[2]
        for row in cgutils.unpack_tuple(builder, arguments[0], ROWS):
            weight = _load(context, builder, float_type, signature.args[1], arguments[1], position)
            result.append(_fma(builder, float_type, weight, arguments[4], row))
            position = builder.add(position, arguments[3])
        return context.make_tuple(builder, rows, result)

    return rows(rows, array, types.intp, types.intp, register), emit


@intrinsic
def add_squares_rows(_, rows, array, offset, stride, register):
    """Compute rows[r] + (register − array[offset + r·stride])² for each row, one step of squared distances."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        result = []
        position = arguments[2]
        for row in cgutils.unpack_tuple(builder, arguments[0], ROWS):
            other = builder.load(_element(context, builder, signature.args[1], arguments[1], position))
            apart = builder.fsub(arguments[4], _splat(builder, float_type.vector, other))
            result.append(_fma(builder, float_type, apart, apart, row))
            position = builder.add(position, arguments[3])
        return context.make_tuple(builder, rows, result)

    return rows(rows, array, types.intp, types.intp, register), emit


@intrinsic
def splat_rows(_, array, offset, stride):
    """Make `ROWS` registers, with array[offset + r·stride] in all lanes."""
    return _splatter(ROWS, array)


@intrinsic
def add_products_rows(_, total, rows, array, offset, stride):
    """Compute total + Σ_r rows[r] · w_r, where w_r is the register at offset + r·stride."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        result, registers, source, position, step = arguments
        for row in cgutils.unpack_tuple(builder, registers, ROWS):
            weight = _load(context, builder, float_type, signature.args[2], source, position)
            result = _fma(builder, float_type, row, weight, result)
            position = builder.add(position, step)
        return result

    return total(total, rows, array, types.intp, types.intp), emit


@intrinsic
def zero_few(_, array):
    """Make a tuple of `FEW` registers of zeros."""
    registers = types.UniTuple(Vec(array.dtype), FEW)

    def emit(context, builder, signature, arguments):
        zero = _constant(_FLOATS[array.dtype].vector, 0.0)
        return context.make_tuple(builder, registers, [zero] * FEW)

    return registers(array), emit


@intrinsic
def splat_few(_, array, offset, stride):
    """Make `FEW` registers, with array[offset + r·stride] in all lanes."""
    return _splatter(FEW, array)


def _splatter(count, array):
    """Make an intrinsic that makes a tuple of registers of numbers at offset + r·stride."""
    float_type = _FLOATS[array.dtype]
    registers = types.UniTuple(Vec(array.dtype), count)

    def emit(context, builder, signature, arguments):
        position, result = arguments[1], []
        for _ in range(count):
            number = builder.load(_element(context, builder, signature.args[0], arguments[0], position))
            result.append(_splat(builder, float_type.vector, number))
            position = builder.add(position, arguments[2])
        return context.make_tuple(builder, registers, result)

    return registers(array, types.intp, types.intp), emit


@intrinsic
def add_differences_few(_, few, total, others, register, weights, offset, stride):
    """Add w_r (register − others[r]) to few[r], and all of them to `total`; return both.

    The weights w_r are the registers at offset + r·stride. All that is used repeatedly fits the 16 registers of AVX2.
    """
    float_type = _FLOATS[weights.dtype]
    both = types.Tuple((few, total))

    def emit(context, builder, signature, arguments):
        before, sum_of_rows, subtrahends, minuend, source, position, step = arguments
        result = []
        rows = zip(*(cgutils.unpack_tuple(builder, x, FEW) for x in (before, subtrahends)), strict=True)
        for row, other in rows:
            apart = builder.fsub(minuend, other)
            weight = _load(context, builder, float_type, signature.args[4], source, position)
            result.append(_fma(builder, float_type, weight, apart, row))
            sum_of_rows = _fma(builder, float_type, weight, apart, sum_of_rows)
            position = builder.add(position, step)
        return context.make_tuple(builder, both, [context.make_tuple(builder, few, result), sum_of_rows])

    return both(few, total, others, register, weights, types.intp, types.intp), emit


@intrinsic
def add_few(_, array, offset, stride, few):
    """Add few[r] to the register at offset + r·stride for each of them."""
    return _adder(FEW, array, few)


def _adder(count, array, rows):
    """Make an intrinsic that adds a tuple of registers to those at offset + r·stride."""
    float_type = _FLOATS[array.dtype]

    def emit(context, builder, signature, arguments):
        position = arguments[1]
        for register in cgutils.unpack_tuple(builder, arguments[3], count):
            before = _load(context, builder, float_type, signature.args[0], arguments[0], position)
            pointer = _element(context, builder, signature.args[0], arguments[0], position)
            pointer = builder.bitcast(pointer, float_type.vector.as_pointer())
            builder.store(builder.fadd(before, register), pointer, align=float_type.align)
            position = builder.add(position, arguments[2])

    return types.void(array, types.intp, types.intp, rows), emit

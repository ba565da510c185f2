"""Short vectors for numba: what a compiler cannot be trusted to find in a loop over signs and bits.

numba has no vector type, and LLVM's vectoriser gives up on packing, or does not, with every release. So eight or 64
numbers are one value here, as in LLVM's own language, which has code for it on every processor. Nothing is ever
reassociated or contracted: an operation on a vector rounds each lane as the same operation on numbers.

An array of uint16 is one of bfloat16: it is loaded as float32, and takes the upper halves of what is stored. What
rounds to bfloat16, to the last bit as bf16.py says, takes the array that the numbers are kept in, and does nothing
where that is no such array: loops are then compiled as if it were not there.

Used inside functions that numba compiles only. Nothing checks bounds. numba's cache looks at the file of the compiled
function alone: after a change here, touch cpu.py, optim/kernels/loops.py and lamb_loops.py, or the old code runs.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

from thinwire.comm.kernels.bf16 import FACTOR, LARGEST, LOW, STRIDE
from thinwire.comm.kernels.bf16 import WORD as MASK

BYTE = 8
"""Lanes whose signs fill a byte."""
WORD = 64
"""Lanes whose signs fill eight bytes."""
QUAD = 32
"""Lanes whose signs fill four bytes."""
_I32 = ir.IntType(32)
_LANES = ir.VectorType(_I32, BYTE)


class Vector(types.Type):
    """`lanes` numbers of a float type."""

    def __init__(self, dtype: types.Type, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        lane = manager.lookup(vector.dtype).get_data_type()
        super().__init__(manager, vector, ir.VectorType(lane, vector.lanes))


class _Elementwise(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
            return signature(args[0], *args)
        return None


def _elementwise(function: Any, instruction: str) -> None:
    infer_global(function)(type(f"_{instruction}", (_Elementwise,), {}))

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    lower_builtin(function, Vector, Vector)(lower)


_elementwise(operator.add, "fadd")
_elementwise(operator.sub, "fsub")
_elementwise(operator.mul, "fmul")
_elementwise(operator.truediv, "fdiv")


@intrinsic  # type: ignore[untyped-decorator]
def load8(typingctx: Any, array: Any, at: Any) -> Any:
    """array[at .. at+7]."""
    return _load(array, at, BYTE)


@intrinsic  # type: ignore[untyped-decorator]
def load64(typingctx: Any, array: Any, at: Any) -> Any:
    """array[at .. at+63]."""
    return _load(array, at, WORD)


@intrinsic  # type: ignore[untyped-decorator]
def load8_from(typingctx: Any, address: Any, at: Any, like: Any) -> Any:
    """Numbers at .. at+7 of those that begin at this address, of the dtype of the array `like`."""
    vector = Vector(like.dtype, BYTE)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number = context.get_value_type(like.dtype)
        first = builder.inttoptr(args[0], number.as_pointer())
        pointer = builder.bitcast(builder.gep(first, [args[1]]), context.get_value_type(vector).as_pointer())
        return builder.load(pointer, align=like.dtype.bitwidth // 8)

    return vector(address, at, like), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store(typingctx: Any, array: Any, at: Any, vector: Any) -> Any:
    """array[at ...] <- vector. Into bfloat16: float32 that are such, for nothing is rounded."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[2]
        if sig.args[0].dtype == types.uint16:
            bits = builder.bitcast(value, ir.VectorType(ir.IntType(32), value.type.count))
            upper = builder.lshr(bits, ir.Constant(bits.type, [16] * value.type.count))
            value = builder.trunc(upper, ir.VectorType(ir.IntType(16), value.type.count))
        pointer, align = _pointer(context, builder, sig.args[0], args, value.type)
        builder.store(value, pointer, align=align)
        return context.get_dummy_value()

    return types.none(array, at, vector), codegen


@intrinsic  # type: ignore[untyped-decorator]
def splat8(typingctx: Any, number: Any) -> Any:
    """The number in each of 8 lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], BYTE)

    return Vector(number, BYTE)(number), codegen


@intrinsic  # type: ignore[untyped-decorator]
def zeros64(typingctx: Any, array: Any) -> Any:
    """64 zeros of the array's dtype."""
    vector = Vector(array.dtype, WORD)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(vector), [0.0] * WORD)

    return vector(array), codegen


@intrinsic  # type: ignore[untyped-decorator]
def signed_by_bits(typingctx: Any, byte: Any, size: Any) -> Any:
    """Size where the byte's bit is 1, -size where it is 0; lane 0 is the byte's highest bit."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        positive = _lane_bits(builder, args[0], sig.args[1].dtype.bitwidth)
        return builder.select(positive, args[1], builder.fneg(args[1]))

    return size(types.uint8, size), codegen


@intrinsic  # type: ignore[untyped-decorator]
def chosen_by_bits(typingctx: Any, byte: Any, x: Any, y: Any) -> Any:
    """X where the byte's bit is 1, y where it is 0; lane 0 is the byte's highest bit."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(_lane_bits(builder, args[0], sig.args[1].dtype.bitwidth), args[1], args[2])

    return x(types.uint8, x, x), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load_bits(typingctx: Any, array: Any, at: Any) -> Any:
    """Array[at .. at+3], bytes of signs, as one number for signed_by_word."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer, _ = _pointer(context, builder, sig.args[0], args, ir.IntType(32))
        return builder.load(pointer, align=1)

    return types.uint32(array, at), codegen


@intrinsic  # type: ignore[untyped-decorator]
def signed_by_word(typingctx: Any, word: Any, byte: Any, minus_size: Any) -> Any:
    """As signed_by_bits of one of the bytes 0 to 3 of load_bits. minus_size: -size. Half as many instructions."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        width = sig.args[2].dtype.bitwidth
        number = ir.IntType(width)
        word_value, byte_value, minus = args
        bits = _splat(builder, word_value if width == word_value.type.width else builder.zext(word_value, number), BYTE)
        # The processor's order: byte 0 is the lowest. What is shifted to the top is the lane's bit, where the sign is.
        first = builder.sub(
            ir.Constant(number, width - BYTE), builder.mul(_cast(builder, byte_value, number), number(BYTE))
        )
        shifts = builder.add(_splat(builder, first, BYTE), ir.Constant(bits.type, list(range(BYTE))))
        top = ir.Constant(bits.type, [1 << (width - 1)] * BYTE)
        flips = builder.and_(builder.shl(bits, shifts), top)
        return builder.bitcast(builder.xor(builder.bitcast(minus, bits.type), flips), minus.type)

    return minus_size(types.uint32, types.intp, minus_size), codegen


@intrinsic  # type: ignore[untyped-decorator]
def signed_as(typingctx: Any, x: Any, size: Any) -> Any:
    """Size where x >= 0, -0.0 included, else -size."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(_not_negative(builder, args[0]), args[1], builder.fneg(args[1]))

    return size(x, size), codegen


@intrinsic  # type: ignore[untyped-decorator]
def root(typingctx: Any, x: Any) -> Any:
    """The square root of each lane, rounded as that of a number."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(args[0].type, [args[0].type])
        name = f"llvm.sqrt.v{sig.args[0].lanes}f{sig.args[0].dtype.bitwidth}"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return x(x), codegen


@intrinsic  # type: ignore[untyped-decorator]
def larger(typingctx: Any, x: Any, y: Any) -> Any:
    """The larger of two lanes; y where x is NaN, x where y is."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x_value, y_value = args
        unordered = builder.fcmp_unordered("uno", x_value, x_value)
        takes_y = builder.or_(unordered, builder.fcmp_ordered(">", y_value, x_value))
        return builder.select(takes_y, y_value, x_value)

    return x(x, x), codegen


@intrinsic  # type: ignore[untyped-decorator]
def any_below(typingctx: Any, x: Any, y: Any) -> Any:
    """Is x < y in any lane? A NaN is not."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.IntType(sig.args[0].lanes)
        found = builder.bitcast(builder.fcmp_ordered("<", args[0], args[1]), lanes)
        return builder.icmp_unsigned("!=", found, lanes(0))

    return types.boolean(x, x), codegen


@intrinsic  # type: ignore[untyped-decorator]
def cut(typingctx: Any, x: Any, bound: Any) -> Any:
    """X where |x| <= bound, else bound or -bound; NaN stays."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x_value, high = args
        low = builder.fneg(high)
        x_value = builder.select(builder.fcmp_ordered(">", x_value, high), high, x_value)
        return builder.select(builder.fcmp_ordered("<", x_value, low), low, x_value)

    return x(x, bound), codegen


@intrinsic  # type: ignore[untyped-decorator]
def lane(typingctx: Any, x: Any, index: Any) -> Any:
    """The number in one lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], args[1])

    return x.dtype(x, index), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_signs(typingctx: Any, array: Any, at: Any, x: Any) -> Any:
    """Write the bits (x >= 0) into array: uint8, from byte `at`; lane 0 is the first byte's highest bit."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        packed = ir.IntType(sig.args[2].lanes)
        bits = builder.bitcast(_not_negative(builder, args[2]), packed)
        bits = builder.bitreverse(bits)  # lane 0 is now the highest bit of all; its byte must be the first
        if packed.width > BYTE:
            bits = builder.bswap(bits)
        pointer, align = _pointer(context, builder, sig.args[0], args, packed)
        builder.store(bits, pointer, align=align)
        return context.get_dummy_value()

    return types.none(array, at, x), codegen


@intrinsic  # type: ignore[untyped-decorator]
def folded(typingctx: Any, vector: Any) -> Any:
    """The sum of the lanes in halves: 32 + 32, 16 + 16, ... 1 + 1."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes, value = sig.args[0].lanes, args[0]
        while lanes > 1:
            lanes //= 2
            low, high = (
                builder.shuffle_vector(
                    value, ir.Constant(value.type, ir.Undefined), _indices(range(first, first + lanes))
                )
                for first in (0, lanes)
            )
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), codegen


@intrinsic  # type: ignore[untyped-decorator]
def rounded8(typingctx: Any, x: Any, kept: Any, noise: Any, at: Any) -> Any:
    """bf16.rounded of x, elements at .. at+7 behind noise.start.

    But what is above the largest bfloat16 may become infinite, and a NaN must be a quiet one, as those of sums are:
    loops do not keep what they cannot square.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not _is_narrow(sig.args[1]):
            return args[0]
        stays = builder.fcmp_unordered("uno", args[0], args[0])
        return _rounded(builder, args[0], stays, args[2], args[3])

    return x(x, kept, noise, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def rounded8_any(typingctx: Any, x: Any, noise: Any, at: Any) -> Any:
    """bf16.rounded of x, float32, elements at .. at+7 behind noise.start."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        size = builder.and_(builder.bitcast(args[0], _LANES), _every(0x7FFFFFFF))
        quiet = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), _every(0x400000), _every(0))
        bits = builder.or_(builder.bitcast(args[0], _LANES), quiet)
        stays = builder.icmp_signed(">", size, _every(LARGEST))
        return _rounded(builder, builder.bitcast(bits, args[0].type), stays, args[1], args[2])

    return x(x, noise, types.intp), codegen


def _rounded(builder: Any, x: Any, stays: Any, noise: Any, at: Any) -> Any:
    bits, r = builder.bitcast(x, _LANES), builder.select(stays, _every(0), _drawn(builder, noise, at))
    return builder.bitcast(builder.and_(builder.add(bits, r), _every(MASK ^ LOW)), x.type)


def _is_narrow(kept: Any) -> bool:
    return bool(kept.dtype == types.uint16)


def _every(number: int) -> Any:
    return ir.Constant(_LANES, [number] * BYTE)


def _drawn(builder: Any, noise: Any, at: Any) -> Any:
    """bf16.drawn of eight elements, as <8 x i32>. noise: the numbers of a Noise."""
    key, start = (builder.extract_value(noise, number) for number in range(2))
    first = builder.mul(builder.trunc(builder.add(start, at), _I32), _I32(STRIDE))
    begin = builder.add(first, builder.trunc(key, _I32))
    x = builder.add(_splat(builder, begin, BYTE), ir.Constant(_LANES, [lane * STRIDE & MASK for lane in range(BYTE)]))
    x = builder.mul(builder.xor(x, builder.lshr(x, _every(16))), _every(FACTOR))
    return builder.lshr(x, _every(16))


def _load(array: Any, at: Any, lanes: int) -> Any:
    narrow = array.dtype == types.uint16
    vector = Vector(types.float32 if narrow else array.dtype, lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value_type = context.get_value_type(vector)
        stored_type = ir.VectorType(ir.IntType(16), lanes) if narrow else value_type
        pointer, align = _pointer(context, builder, sig.args[0], args, stored_type)
        value = builder.load(pointer, align=align)
        if not narrow:
            return value
        bits = builder.zext(value, ir.VectorType(ir.IntType(32), lanes))
        return builder.bitcast(builder.shl(bits, ir.Constant(bits.type, [16] * lanes)), value_type)

    return vector(array, at), codegen


def _pointer(context: Any, builder: Any, array_type: Any, args: Any, value_type: Any) -> tuple[Any, int]:
    """To array[at] as a value of the given type, and the alignment that holds for any such place."""
    array = context.make_array(array_type)(context, builder, args[0])
    return builder.bitcast(builder.gep(array.data, [args[1]]), value_type.as_pointer()), array_type.dtype.bitwidth // 8


def _splat(builder: Any, number: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, _indices([0] * lanes))


def _cast(builder: Any, number: Any, to: Any) -> Any:
    if number.type.width == to.width:
        return number
    return builder.trunc(number, to) if number.type.width > to.width else builder.zext(number, to)


def _lane_bits(builder: Any, byte: Any, width: int) -> Any:
    """Of 8 lanes of this width: is the lane's bit 1?"""
    bits = _splat(builder, builder.zext(byte, ir.IntType(width)), BYTE)
    of_lane = ir.Constant(bits.type, [1 << (BYTE - 1 - i) for i in range(BYTE)])
    return builder.icmp_unsigned("!=", builder.and_(bits, of_lane), ir.Constant(bits.type, [0] * BYTE))


def _indices(lanes: Any) -> Any:
    numbers = list(lanes)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)


def _not_negative(builder: Any, x: Any) -> Any:
    return builder.fcmp_ordered(">=", x, ir.Constant(x.type, [0.0] * x.type.count))

"""Rounding to bfloat16 for numba, eight numbers at a time: what bf16.py defines, to the last bit.

Most take the array that the numbers are kept in, and do nothing where that is no array of bfloat16: loops are then
compiled as if they were not there. numba's cache looks at the file of the compiled function alone: after a change here,
touch cpu_loops.py and optim/kernels/loops.py.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from thinwire.comm.kernels.bf16 import FACTOR, LARGEST, LOW, STRIDE, WORD
from thinwire.comm.kernels.vectors import BYTE

_I32 = ir.IntType(32)
_LANES = ir.VectorType(_I32, BYTE)


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
    return builder.bitcast(builder.and_(builder.add(bits, r), _every(WORD ^ LOW)), x.type)


def _is_narrow(kept: Any) -> bool:
    return bool(kept.dtype == types.uint16)


def _every(number: int) -> Any:
    return ir.Constant(_LANES, [number] * BYTE)


def _drawn(builder: Any, noise: Any, at: Any) -> Any:
    """bf16.drawn of eight elements, as <8 x i32>. noise: the numbers of a Noise."""
    key, start = (builder.extract_value(noise, number) for number in range(2))
    first = builder.mul(builder.trunc(builder.add(start, at), _I32), _I32(STRIDE))
    begin = builder.add(first, builder.trunc(key, _I32))
    x = builder.add(_splat(builder, begin), ir.Constant(_LANES, [lane * STRIDE & WORD for lane in range(BYTE)]))
    x = builder.mul(builder.xor(x, builder.lshr(x, _every(16))), _every(FACTOR))
    return builder.lshr(x, _every(16))


def _splat(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_LANES, ir.Undefined)
    first = builder.insert_element(undefined, number, _I32(0))
    return builder.shuffle_vector(first, undefined, _every(0))

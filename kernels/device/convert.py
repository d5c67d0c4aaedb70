"""Conversions between floats, bf16 and the words of memory that hold them.

A word holds two bf16, the one at the lower address in its lower half, or one fp32.
"""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import T
from specplan.kernels.device.ptx import emit


def bits_to_float(word: Int32) -> Float32:
    """The fp32 of these bits."""
    return Float32(arith.bitcast(T.f32(), word.ir_value()))


def float_to_bits(value: Float32) -> Int32:
    """The bits of an fp32."""
    return Int32(arith.bitcast(T.i32(), value.ir_value()))


def bf16_low(word: Int32) -> Float32:
    """The bf16 at the lower address of a word, widened."""
    return bits_to_float(word << 16)


def bf16_high(word: Int32) -> Float32:
    """The bf16 at the higher address of a word, widened."""
    return bits_to_float(word & Int32(-65536))


def pack_bf16(low: Float32, high: Float32) -> Int32:
    """Two floats rounded to nearest even bf16, as one word."""
    return emit([Int32], [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")[0]


def pack_bf16_pairs(values: list[Float32]) -> list[Int32]:
    """Consecutive floats as words of bf16."""
    return [pack_bf16(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def split_bf16(low: Float32, high: Float32) -> tuple[Int32, Int32]:
    """Two floats as the sum of two words of bf16, which keeps 16 bits of significand."""
    upper = pack_bf16(low, high)
    return upper, pack_bf16(low - bf16_low(upper), high - bf16_high(upper))

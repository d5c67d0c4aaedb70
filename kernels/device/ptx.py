"""Inline PTX, and what ``cute.arch`` and ``cute.math`` have no function for.

An instruction without side effects may move, be merged or be dropped; a volatile one keeps its
order against other volatile ones. A *word* is an Int32 that holds 32 bits of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm

Scalar = TypeVar("Scalar", Int32, Int64, Float32)
LOG2_E = 1.4426950408889634


def emit(
    results: Sequence[Any],
    operands: Sequence[Boolean | Int32 | Int64 | Float32],
    text: str,
    constraints: str,
    volatile: bool = False,
) -> list[Any]:
    """Emit ``text``, whose operands $0, $1, ... are the results and then the operands."""
    kinds = [r.mlir_type for r in results]
    if len(kinds) > 1:
        kind: ir.Type | None = llvm.StructType.get_literal(kinds)
    else:
        kind = kinds[0] if kinds else None
    value = llvm.inline_asm(
        kind,
        [operand.ir_value() for operand in operands],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(kinds) < 2:
        return [r(value) for r in results]
    return [r(llvm.extractvalue(r.mlir_type, value, [i])) for i, r in enumerate(results)]


def opaque(x: Int32) -> Int32:
    """x, hidden from the optimizer: what is computed from it is not hoisted out of a loop into
    registers.
    """
    return emit([Int32], [x], "mov.b32 $0, $1;", "=r,r", volatile=True)[0]


def select(condition: Boolean, yes: Scalar, no: Scalar) -> Scalar:
    """``yes if condition else no``, without a branch; the value not taken may be NaN."""
    kind = type(yes)
    return kind(arith.select(condition.ir_value(), yes.ir_value(), kind(no).ir_value()))


def permute_bytes(x: Int32, y: Int32, selector: Int32) -> Int32:
    """Bytes of ``y:x`` picked by the four nibbles of ``selector`` (``prmt``)."""
    return emit([Int32], [x, y, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")[0]


def exp2(x: Float32) -> Float32:
    """2^x (``ex2.approx.ftz``): 2 ulp, 0 for -inf.

    ``cute.math.exp2`` gives the same instruction in another order, and gdn_replay's stream kernel
    two registers more (234 instead of 232 per thread with an fp32 state).
    """
    return emit([Float32], [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")[0]


def exp(x: Float32) -> Float32:
    """e^x for x of either sign; relative error below 3e-7 + 6e-8 |x|."""
    return exp2(x * Float32(LOG2_E))

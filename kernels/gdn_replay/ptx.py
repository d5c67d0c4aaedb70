"""The PTX instructions that the kernels of this family are written in, as functions over DSL
scalars.

A *word* is an Int32 that holds 32 bits of memory: two bf16 (lower address in the lower half) or one
fp32. Addresses are Int64 (global) or Int32 (shared). Loads and stores are volatile, so they keep
their order against the copies and barriers around them; arithmetic is not, so it is free to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T

Scalar = TypeVar("Scalar", Int32, Int64, Float32)
LOG2_E = 1.4426950408889634


def _asm(
    results: Sequence[Any],
    operands: Sequence[Boolean | Int32 | Int64 | Float32],
    text: str,
    constraints: str,
    volatile: bool = False,
) -> list[Int32 | Float32]:
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
    return _asm([Int32], [x], "mov.b32 $0, $1;", "=r,r", volatile=True)[0]


def select(condition: Boolean, yes: Scalar, no: Scalar) -> Scalar:
    """``yes if condition else no``, by a select instruction: what is not taken may be NaN."""
    kind = type(yes)
    return kind(arith.select(condition.ir_value(), yes.ir_value(), kind(no).ir_value()))


def bits_to_float(word: Int32) -> Float32:
    return Float32(arith.bitcast(T.f32(), word.ir_value()))


def float_to_bits(value: Float32) -> Int32:
    return Int32(arith.bitcast(T.i32(), value.ir_value()))


def low(word: Int32) -> Float32:
    """The bf16 at the lower address of a word, widened."""
    return bits_to_float(word << 16)


def high(word: Int32) -> Float32:
    """The bf16 at the higher address of a word, widened."""
    return bits_to_float(word & Int32(-65536))


def pack(at_low: Float32, at_high: Float32) -> Int32:
    """Two floats rounded to nearest even bf16, as one word."""
    return _asm([Int32], [at_high, at_low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")[0]


def split(at_low: Float32, at_high: Float32) -> tuple[Int32, Int32]:
    """Two floats as the sum of two words of bf16: 16 bits of significand are kept."""
    upper = pack(at_low, at_high)
    return upper, pack(at_low - low(upper), at_high - high(upper))


def permute(x: Int32, y: Int32, selector: Int32) -> Int32:
    return _asm([Int32], [x, y, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")[0]


def exp2(x: Float32) -> Float32:
    return _asm([Float32], [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")[0]


def exp(x: Float32) -> Float32:
    """e^x for x of either sign; relative error below 3e-7 + 6e-8 |x|."""
    return exp2(x * Float32(LOG2_E))


def reciprocal(x: Float32) -> Float32:
    return _asm([Float32], [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f")[0]


def rsqrt(x: Float32) -> Float32:
    return _asm([Float32], [x], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f")[0]


def maximum(x: Float32, y: Float32) -> Float32:
    return _asm([Float32], [x, y], "max.f32 $0, $1, $2;", "=f,f,f")[0]


def magnitude(x: Float32) -> Float32:
    return _asm([Float32], [x], "abs.f32 $0, $1;", "=f,f")[0]


def shuffle(value: Float32, lane: Int32) -> Float32:
    """The value that ``lane`` of this warp holds."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    return _asm([Float32], [value, lane], text, "=f,f,r", volatile=True)[0]


def shuffle_xor(value: Float32, mask: int) -> Float32:
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;"
    return _asm([Float32], [value], text, "=f,f", volatile=True)[0]


def shuffle_up(value: Float32, distance: int) -> Float32:
    text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, -1;"
    return _asm([Float32], [value], text, "=f,f", volatile=True)[0]


def mma(acc: Sequence[Float32], a: Sequence[Int32], b: tuple[Int32, Int32]) -> list[Float32]:
    """acc[16 x 8] + a[16 x 16] b[16 x 8], bf16 operands, fp32 accumulators (``mma.sync`` m16n8k16).

    Lane 4g + t holds rows g and g+8: a = (row g, k 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..);
    b = (k 2t.., column g), (k 2t+8.., column g); acc = (g, column 2t), (g, 2t+1), (g+8, 2t), (g+8,
    2t+1).
    """
    return _asm(
        [Float32] * 4,
        [*a, *b, *acc],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
    )


def _vector(words: int, first: int) -> str:
    names = ", ".join(f"${first + i}" for i in range(words))
    return f"{{{names}}}" if words > 1 else names


def _width(words: int) -> str:
    return {1: "b32", 2: "v2.b32", 4: "v4.b32"}[words]


def load(address: Int64, words: int, live: Boolean | None = None, cache: str = "") -> list[Int32]:
    """Words from global memory; zeros, and no access, where not ``live``."""
    text = f"ld.global{cache}.{_width(words)} {_vector(words, 0)}, [${words}];"
    if live is None:
        return _asm([Int32] * words, [address], text, "=r," * words + "l", volatile=True)
    zero = "".join(f"mov.b32 ${i}, 0; " for i in range(words))
    text = f"{{ .reg .pred p; setp.ne.s32 p, ${words + 1}, 0; {zero}@p {text} }}"
    constraints = "=&r," * words + "l,r"
    return _asm([Int32] * words, [address, Int32(live)], text, constraints, volatile=True)


def load_constant(address: Int64, words: int, live: Boolean | None = None) -> list[Int32]:
    """``load`` of what nobody writes while the kernel runs: it may move across stores."""
    return load(address, words, live, ".nc")


def load_half(address: Int64, live: Boolean) -> Float32:
    """One bf16 from global memory, widened; zero, and no access, where not ``live``."""
    text = (
        "{ .reg .pred p; .reg .b16 x; setp.ne.s32 p, $2, 0; mov.b16 x, 0; "
        "@p ld.global.nc.b16 x, [$1]; .reg .b16 z; mov.b16 z, 0; mov.b32 $0, {z, x}; }"
    )
    return bits_to_float(_asm([Int32], [address, Int32(live)], text, "=r,l,r", volatile=True)[0])


def store(address: Int64, values: Sequence[Int32], live: Boolean | None = None) -> None:
    """Words to global memory, where ``live``."""
    words = len(values)
    if live is None:
        text = f"st.global.{_width(words)} [$0], {_vector(words, 1)};"
        _asm([], [address, *values], text, "l" + ",r" * words, volatile=True)
        return
    text = f"st.global.{_width(words)} [$0], {_vector(words, 2)};"
    text = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; @p {text} }}"
    constraints = "l,r" + ",r" * words
    _asm([], [address, Int32(live), *values], text, constraints, volatile=True)


def load_shared(address: Int32, offset: int) -> list[Int32]:
    """16 bytes from shared memory."""
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return _asm([Int32] * 4, [address], text, "=r,=r,=r,=r,r", volatile=True)


def store_shared(address: Int32, values: Sequence[Int32]) -> None:
    """16 bytes to shared memory."""
    text = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
    _asm([], [address, *values], text, "r,r,r,r,r", volatile=True)


def copy_async_or_zero(shared: Int32, address: Int64, live: Boolean) -> None:
    """Starts copying 16 bytes to shared memory; zeros, and no access to ``address``, where not
    ``live``.
    """
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    _asm([], [shared, address, Int32(live) * 16], text, "r,l,r", volatile=True)


def copy_async(shared: Int32, shared_offset: int, address: Int64, offset: int) -> None:
    """Starts copying 16 bytes from global to shared memory, past L1."""
    text = f"cp.async.cg.shared.global [$0+{shared_offset}], [$1+{offset}], 16;"
    _asm([], [shared, address], text, "r,l", volatile=True)


def prefetch_l2(address: Int64, size: int, live: Boolean) -> None:
    """Starts bringing ``size`` bytes, a multiple of 16, to L2, where ``live``. Nothing is read:
    what earlier grids still write there is seen by a later load.
    """
    text = (
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$0], {size}; }}"
    )
    _asm([], [address, Int32(live)], text, "l,r", volatile=True)


def copy_async_commit() -> None:
    _asm([], [], "cp.async.commit_group;", "", volatile=True)


def sync_warp() -> None:
    _asm([], [], "bar.warp.sync -1;", "~{memory}", volatile=True)


def sync_cta() -> None:
    _asm([], [], "bar.sync 0;", "~{memory}", volatile=True)


def wait_for_previous_grid() -> None:
    """Programmatic dependent launch: what earlier grids write may be read only after this."""
    _asm([], [], "griddepcontrol.wait;", "~{memory}", volatile=True)


def let_next_grid_launch() -> None:
    _asm([], [], "griddepcontrol.launch_dependents;", "", volatile=True)


def copy_async_wait(pending: int) -> None:
    """Waits until at most ``pending`` of this thread's copy groups are under way. Others' copies
    need a barrier too.
    """
    text = f"cp.async.wait_group {pending};"
    _asm([], [], text, "~{memory}", volatile=True)

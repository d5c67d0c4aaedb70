"""The PTX instructions that ``sparse_gqa_verify`` is written in, each as a function of DSL numbers.

Addresses are integers: 64 bits in global memory, 32 bits in shared memory. Every access of memory
is marked as having side effects, which keeps the program order between accesses and barriers;
arithmetic is not, so that the compiler may move it.
"""

from __future__ import annotations

from typing import Any

from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

Words = tuple[Int32, Int32, Int32, Int32]


def _emit(kind: str, outputs: str, text: str, inputs: str, values: list[Any], effects: bool) -> Any:
    """One inline instruction. ``outputs`` and ``inputs`` spell operand classes: r (32 bits), l
    (64), f (float), h (16).
    """
    classes = {"r": T.i32(), "f": T.f32(), "l": T.i64()}
    if len(outputs) == 0:
        result = None
    elif len(outputs) == 1:
        result = classes[outputs]
    else:
        result = llvm.StructType.get_literal([classes[c] for c in outputs])
    constraints = ",".join([f"={c}" for c in outputs] + list(inputs))
    if kind == "memory":
        constraints += ",~{memory}" if constraints else "~{memory}"
    return llvm.inline_asm(
        result,
        [value.ir_value() for value in values],
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def _part(value: ir.Value, index: int, kind: Any) -> ir.Value:
    return llvm.extractvalue(kind, value, [index])


def _arithmetic(text: str, *values: Int32) -> Int32:
    return Int32(_emit("", "r", text, "r" * len(values), list(values), False))


# ----- integers -----------------------------------------------------------------------------------


def shift_right(value: Int32, bits: Int32 | int) -> Int32:
    """Logical shift, whatever the sign."""
    return _arithmetic("shr.b32 $0, $1, $2;", value, Int32(bits))


def permute(low: Int32, high: Int32, selector: int) -> Int32:
    """Bytes of ``high:low`` picked by the four nibbles of ``selector``."""
    return _arithmetic(f"prmt.b32 $0, $1, $2, {selector:#x};", low, high)


def zero_extend_bytes(value: Int32, selector: int) -> Int32:
    """Bytes of ``value`` picked by ``selector``, where a nibble of 4 is a zero byte."""
    return _arithmetic(f"prmt.b32 $0, $1, 0, {selector:#x};", value)


def blend(value: Int32, mask: int, other: Int32) -> Int32:
    """``(value & mask) | other`` in one instruction."""
    return _arithmetic(f"lop3.b32 $0, $1, {mask:#x}, $2, 0xEA;", value, other)


def multiply_high(a: Int32, b: Int32) -> Int32:
    return _arithmetic("mul.hi.u32 $0, $1, $2;", a, b)


def advance(base: Int64, count: Int32, step: Int64) -> Int64:
    """``base + count * step``, where the count is not negative."""
    text = "{ .reg .b64 t; cvt.u64.u32 t, $2; mad.lo.u64 $0, t, $3, $1; }"
    return Int64(_emit("", "l", text, "lrl", [base, count, step], False))


def divide_unsigned(a: Int32, b: Int32) -> Int32:
    return _arithmetic("div.u32 $0, $1, $2;", a, b)


def population(value: Int32) -> Int32:
    return _arithmetic("popc.b32 $0, $1;", value)


def highest_bit(value: Int32) -> Int32:
    """Where the highest set bit stands; -1 if none is set."""
    return _arithmetic("bfind.u32 $0, $1;", value)


def lowest_bit(value: Int32) -> Int32:
    """Where the lowest set bit stands; -1 if none is set."""
    return highest_bit(value & (Int32(0) - value))


def choose(condition: Boolean, yes: Int32, no: Int32) -> Int32:
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.b32 $0, $2, $3, p; }"
    return _arithmetic(text, Int32(condition), yes, no)


def choose_float(condition: Boolean | Int32, yes: Float32, no: Float32) -> Float32:
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.f32 $0, $2, $3, p; }"
    return Float32(_emit("", "f", text, "rff", [Int32(condition), yes, no], False))


def opaque(value: Int32) -> Int32:
    """The same value, of which the compiler knows nothing and which it does not move."""
    return Int32(_emit("", "r", "mov.b32 $0, $1;", "r", [value], True))


def float_of_bits(value: Int32) -> Float32:
    return Float32(_emit("", "f", "mov.b32 $0, $1;", "r", [value], False))


# ----- floats -------------------------------------------------------------------------------------


def exp2(value: Float32) -> Float32:
    """2^x with an error of 2 ulp; 0 for -inf."""
    return Float32(_emit("", "f", "ex2.approx.ftz.f32 $0, $1;", "f", [value], False))


def multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a * b + c``, rounded once."""
    return Float32(_emit("", "f", "fma.rn.f32 $0, $1, $2, $3;", "fff", [a, b, c], False))


def multiply(a: Float32, b: Float32) -> Float32:
    """``a * b``, rounded before anything else is done with it."""
    return Float32(_emit("", "f", "mul.rn.f32 $0, $1, $2;", "ff", [a, b], False))


def maximum(a: Float32, b: Float32) -> Float32:
    """The larger number; NaN only if both are."""
    return Float32(_emit("", "f", "max.f32 $0, $1, $2;", "ff", [a, b], False))


def reciprocal(value: Float32) -> Float32:
    """1 / x to 1 ulp."""
    return Float32(_emit("", "f", "rcp.approx.ftz.f32 $0, $1;", "f", [value], False))


def exact_reciprocal(value: Float32) -> Float32:
    """1 / x correctly rounded for x >= 1; 0 for Inf. Beyond 2^96 it is scaled, and below 2^-126
    rounded a second time.
    """
    text = (
        "{ .reg .pred p, q; .reg .f32 d, r, e, s;"
        " setp.gt.f32 p, $1, 0f6F800000; setp.eq.f32 q, $1, 0f7F800000;"
        " selp.f32 s, 0f1F800000, 0f3F800000, p;"
        " mul.f32 d, $1, s;"
        " rcp.approx.ftz.f32 r, d;"
        " neg.f32 d, d;"
        " fma.rn.f32 e, d, r, 0f3F800000;"
        " fma.rn.f32 r, r, e, r;"
        " mul.f32 r, r, s;"
        " selp.f32 $0, 0f00000000, r, q; }"
    )
    return Float32(_emit("", "f", text, "f", [value], False))


def exponential(value: Float32) -> Float32:
    """e^x as CUDA's ``expf`` computes it, instruction by instruction, so that a fused gate rounds
    like a separate one.
    """
    text = (
        "{ .reg .f32 a, b, c, d; .reg .b32 e;"
        " fma.rn.sat.f32 a, $1, 0f3BBB989D, 0f3F000000;"
        " fma.rm.f32 b, a, 0f437C0000, 0f4B400001;"
        " add.f32 c, b, 0fCB40007F;"
        " neg.f32 c, c;"
        " fma.rn.f32 c, $1, 0f3FB8AA3B, c;"
        " fma.rn.f32 c, $1, 0f32A57060, c;"
        " mov.b32 e, b;"
        " shl.b32 e, e, 23;"
        " mov.b32 b, e;"
        " ex2.approx.ftz.f32 d, c;"
        " mul.f32 $0, d, b; }"
    )
    return Float32(_emit("", "f", text, "f", [value], False))


def pack_bf16(low: Float32, high: Float32) -> Int32:
    return Int32(_emit("", "r", "cvt.rn.bf16x2.f32 $0, $2, $1;", "ff", [low, high], False))


def pack_f16(low: Float32, high: Float32) -> Int32:
    return Int32(_emit("", "r", "cvt.rn.f16x2.f32 $0, $2, $1;", "ff", [low, high], False))


def unpack_bf16(pair: Int32) -> tuple[Float32, Float32]:
    return float_of_bits(pair << 16), float_of_bits(pair & Int32(-65536))


def multiply_f16(a: Int32, b: Int32) -> Int32:
    """f16x2, subnormals kept."""
    return _arithmetic("mul.rn.f16x2 $0, $1, $2;", a, b)


def e4m3_pairs(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 as two f16x2, exact."""
    text = (
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
    )
    both = _emit("", "rr", text, "r", [word], False)
    return Int32(_part(both, 0, T.i32())), Int32(_part(both, 1, T.i32()))


def e2m1_pairs(word: Int32) -> Words:
    """Eight e2m1 as four f16x2 in order, by the conversion that sm_100a and newer have."""
    text = (
        "{ .reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, $4;"
        " cvt.rn.f16x2.e2m1x2 $0, a; cvt.rn.f16x2.e2m1x2 $1, b;"
        " cvt.rn.f16x2.e2m1x2 $2, c; cvt.rn.f16x2.e2m1x2 $3, d; }"
    )
    return _four(_emit("", "rrrr", text, "r", [word], False))


def _four(value: ir.Value) -> Words:
    a, b, c, d = (Int32(_part(value, i, T.i32())) for i in range(4))
    return a, b, c, d


def mma(acc: Any, at: int, a: Words, b0: Int32, b1: Int32, f16: bool) -> None:
    """m16n8k16 with fp32 accumulators ``acc[at .. at + 3]``."""
    kind = "f16" if f16 else "bf16"
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}},"
        " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    old = [acc[at + i] for i in range(4)]
    new = _emit("", "ffff", text, "rrrrrrffff", [*a, b0, b1, *old], False)
    for i in range(4):
        acc[at + i] = Float32(_part(new, i, T.f32()))


# ----- shared memory ------------------------------------------------------------------------------


def load_shared(address: Int32, offset: int = 0) -> Int32:
    return Int32(_emit("memory", "r", f"ld.shared.b32 $0, [$1+{offset}];", "r", [address], True))


def load_shared_byte(address: Int32, offset: int = 0) -> Int32:
    return Int32(_emit("memory", "r", f"ld.shared.u8 $0, [$1+{offset}];", "r", [address], True))


def load_shared_half(address: Int32, offset: int = 0) -> Int32:
    text = f"ld.shared.u16 $0, [$1+{offset}];"
    return Int32(_emit("memory", "r", text, "r", [address], True))


def load_shared2(address: Int32, offset: int = 0) -> tuple[Int32, Int32]:
    text = f"ld.shared.v2.b32 {{$0, $1}}, [$2+{offset}];"
    both = _emit("memory", "rr", text, "r", [address], True)
    return Int32(_part(both, 0, T.i32())), Int32(_part(both, 1, T.i32()))


def load_shared4(address: Int32, offset: int = 0) -> Words:
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return _four(_emit("memory", "rrrr", text, "r", [address], True))


def load_shared_float(address: Int32, offset: int = 0) -> Float32:
    return Float32(_emit("memory", "f", f"ld.shared.f32 $0, [$1+{offset}];", "r", [address], True))


def store_shared(address: Int32, value: Int32, offset: int = 0) -> None:
    _emit("memory", "", f"st.shared.b32 [$0+{offset}], $1;", "rr", [address, value], True)


def store_shared_float(address: Int32, value: Float32, offset: int = 0) -> None:
    _emit("memory", "", f"st.shared.f32 [$0+{offset}], $1;", "rf", [address, value], True)


def store_shared2(address: Int32, a: Int32, b: Int32) -> None:
    _emit("memory", "", "st.shared.v2.b32 [$0], {$1, $2};", "rrr", [address, a, b], True)


def store_shared2_if(address: Int32, a: Int32, b: Int32, condition: Boolean) -> None:
    text = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.v2.b32 [$0], {$1, $2}; }"
    _emit("memory", "", text, "rrrr", [address, a, b, Int32(condition)], True)


def load_shared_wide(address: Int32) -> tuple[Int64, Int64]:
    both = _emit("memory", "ll", "ld.shared.v2.b64 {$0, $1}, [$2];", "r", [address], True)
    return Int64(_part(both, 0, T.i64())), Int64(_part(both, 1, T.i64()))


def store_shared_wide(address: Int32, a: Int64, b: Int64) -> None:
    _emit("memory", "", "st.shared.v2.b64 [$0], {$1, $2};", "rll", [address, a, b], True)


def load_shared4_float(
    address: Int32, offset: int = 0
) -> tuple[Float32, Float32, Float32, Float32]:
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    four = _emit("memory", "ffff", text, "r", [address], True)
    a, b, c, d = (Float32(_part(four, i, T.f32())) for i in range(4))
    return a, b, c, d


def store_shared4_float(address: Int32, values: list[Float32]) -> None:
    text = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
    _emit("memory", "", text, "rffff", [address, *values], True)


def store_shared4(address: Int32, words: Words, offset: int = 0) -> None:
    text = f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};"
    _emit("memory", "", text, "rrrrr", [address, *words], True)


def or_shared(address: Int32, bits: Int32) -> None:
    _emit("memory", "", "red.shared.or.b32 [$0], $1;", "rr", [address, bits], True)


def or_shared_before(address: Int32, bits: Int32) -> Int32:
    """Sets bits of a word, and returns the word before that."""
    return Int32(
        _emit("memory", "r", "atom.shared.or.b32 $0, [$1], $2;", "rr", [address, bits], True)
    )


def store_shared_if(address: Int32, value: Int32, condition: Boolean) -> None:
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.b32 [$0], $1; }"
    _emit("memory", "", text, "rrr", [address, value, Int32(condition)], True)


# ----- shared memory of the CTAs of a cluster -----------------------------------------------------


def load_rank(address: Int32, rank: Int32) -> Int32:
    """The word that CTA ``rank`` of the cluster has at this CTA's ``address``."""
    text = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.b32 $0, [a]; }"
    return Int32(_emit("memory", "r", text, "rr", [address, rank], True))


def load_rank_floats_if(
    address: Int32, rank: Int32, count: int, condition: Boolean
) -> list[Float32]:
    """``count`` floats, 1, 2 or 4, of CTA ``rank``; zeros where the condition does not hold, and
    that rank need not exist then.
    """
    names = [f"${i}" for i in range(count)]
    size, target = ("", names[0]) if count == 1 else (f".v{count}", f"{{{', '.join(names)}}}")
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    text = (
        # Without a value for the address the compiler would keep one in a register, through all
        # loops.
        f"{{ .reg .pred p; .reg .b32 a; setp.ne.s32 p, ${count + 2}, 0; {zeros} mov.b32 a, 0;"
        f" @p mapa.shared::cluster.u32 a, ${count}, ${count + 1};"
        f" @p ld.shared::cluster{size}.f32 {target}, [a]; }}"
    )
    result = llvm.inline_asm(
        T.f32() if count == 1 else llvm.StructType.get_literal([T.f32()] * count),
        [address.ir_value(), rank.ir_value(), Int32(condition).ir_value()],
        text,
        ",".join(["=&f"] * count + ["r", "r", "r", "~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if count == 1:
        return [Float32(result)]
    return [Float32(_part(result, i, T.f32())) for i in range(count)]


def cluster_arrive() -> None:
    """Says to the cluster that this thread's accesses up to here are done."""
    _emit("memory", "", "barrier.cluster.arrive.release.aligned;", "", [], True)


def cluster_arrive_relaxed() -> None:
    """Says to the cluster that this thread has come here, and nothing about its stores."""
    _emit("memory", "", "barrier.cluster.arrive.relaxed.aligned;", "", [], True)


def cluster_wait() -> None:
    """Waits until all threads of the cluster have arrived, and sees what they wrote before."""
    _emit("memory", "", "barrier.cluster.wait.acquire.aligned;", "", [], True)


# ----- global memory ------------------------------------------------------------------------------


def load_global(address: Int64) -> Int32:
    return Int32(_emit("memory", "r", "ld.global.b32 $0, [$1];", "l", [address], True))


def load_global_float(address: Int64) -> Float32:
    return Float32(_emit("memory", "f", "ld.global.f32 $0, [$1];", "l", [address], True))


def load_global_if(address: Int64, condition: Boolean, otherwise: int) -> Int32:
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, {otherwise};"
        " @p ld.global.b32 $0, [$1]; }"
    )
    # The early clobber keeps the result out of the address register, which the load still needs.
    result = llvm.inline_asm(
        T.i32(),
        [address.ir_value(), Int32(condition).ir_value()],
        text,
        "=&r,l,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(result)


def load_global_steps_if(address: Int64, step: Int64, condition: Boolean) -> Words:
    """Four words, ``step`` bytes apart; -1 where the condition does not hold."""
    loads = " add.s64 at, at, $5;".join(f" @p ld.global.b32 ${i}, [at];" for i in range(4))
    text = (
        "{ .reg .pred p; .reg .b64 at; setp.ne.s32 p, $6, 0;"
        + "".join(f" mov.b32 ${i}, -1;" for i in range(4))
        + f" mov.b64 at, $4;{loads} }}"
    )
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 4),
        [address.ir_value(), step.ir_value(), Int32(condition).ir_value()],
        text,
        "=&r,=&r,=&r,=&r,l,l,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return _four(result)


def _load_global_if(address: Int64, condition: Boolean, count: int) -> ir.Value:
    names = ", ".join(f"${i}" for i in range(count))
    zeros = "".join(f" mov.b32 ${i}, 0;" for i in range(count))
    return llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * count),
        [address.ir_value(), Int32(condition).ir_value()],
        f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0;{zeros}"
        f" @p ld.global.v{count}.b32 {{{names}}}, [${count}]; }}",
        # The early clobber keeps the results out of the address register.
        ",".join(["=&r"] * count + ["l", "r", "~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def load_global4_if(address: Int64, condition: Boolean) -> Words:
    """Zeros where the condition does not hold; the address is not touched then."""
    return _four(_load_global_if(address, condition, 4))


def load_global2_if(address: Int64, condition: Boolean) -> tuple[Int32, Int32]:
    """Zeros where the condition does not hold; the address is not touched then."""
    two = _load_global_if(address, condition, 2)
    return Int32(_part(two, 0, T.i32())), Int32(_part(two, 1, T.i32()))


def load_global4_float_if(
    address: Int64, condition: Boolean
) -> tuple[Float32, Float32, Float32, Float32]:
    """Zeros where the condition does not hold; the address is not touched then."""
    a, b, c, d = load_global4_if(address, condition)
    return float_of_bits(a), float_of_bits(b), float_of_bits(c), float_of_bits(d)


def store_global(address: Int64, word: Int32) -> None:
    _emit("memory", "", "st.global.b32 [$0], $1;", "lr", [address, word], True)


def store_global2(address: Int64, a: Int32, b: Int32) -> None:
    _emit("memory", "", "st.global.v2.b32 [$0], {$1, $2};", "lrr", [address, a, b], True)


def store_global4(address: Int64, words: Words) -> None:
    text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    _emit("memory", "", text, "lrrrr", [address, *words], True)


def store_global4_float(address: Int64, values: list[Float32]) -> None:
    text = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
    _emit("memory", "", text, "lffff", [address, *values], True)


def store_global_float(address: Int64, value: Float32) -> None:
    _emit("memory", "", "st.global.f32 [$0], $1;", "lf", [address, value], True)


# ----- asynchronous copies ------------------------------------------------------------------------


def copy16(target: Int32, source: Int64, condition: Boolean) -> None:
    """16 bytes to shared memory, or 16 zero bytes without touching the source."""
    text = (
        "{ .reg .pred p; .reg .b32 n; setp.ne.s32 p, $2, 0; selp.b32 n, 16, 0, p;"
        " cp.async.cg.shared.global [$0], [$1], 16, n; }"
    )
    _emit("memory", "", text, "rlr", [target, source, Int32(condition)], True)


def copy4(target: Int32, source: Int64, condition: Boolean) -> None:
    """4 bytes to shared memory, or 4 zero bytes without touching the source."""
    text = (
        "{ .reg .pred p; .reg .b32 n; setp.ne.s32 p, $2, 0; selp.b32 n, 4, 0, p;"
        " cp.async.ca.shared.global [$0], [$1], 4, n; }"
    )
    _emit("memory", "", text, "rlr", [target, source, Int32(condition)], True)


def copy8(target: Int32, source: Int64, condition: Boolean) -> None:
    """8 bytes to shared memory, or 8 zero bytes without touching the source."""
    text = (
        "{ .reg .pred p; .reg .b32 n; setp.ne.s32 p, $2, 0; selp.b32 n, 8, 0, p;"
        " cp.async.ca.shared.global [$0], [$1], 8, n; }"
    )
    _emit("memory", "", text, "rlr", [target, source, Int32(condition)], True)


def copy4_if(target: Int32, source: Int64, condition: Boolean) -> None:
    """4 bytes to shared memory, or nothing."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.ca.shared.global [$0], [$1], 4; }"
    _emit("memory", "", text, "rlr", [target, source, Int32(condition)], True)


def prefetch_l2(source: Int64, condition: Boolean) -> None:
    """Asks for the 128 bytes around an address to be brought to the L2."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
    _emit("memory", "", text, "lr", [source, Int32(condition)], True)


def commit() -> None:
    _emit("memory", "", "cp.async.commit_group;", "", [], True)


def wait(pending: int) -> None:
    _emit("memory", "", f"cp.async.wait_group {pending};", "", [], True)


# ----- threads ------------------------------------------------------------------------------------


def barrier() -> None:
    _emit("memory", "", "bar.sync 0;", "", [], True)


def warp_barrier() -> None:
    _emit("memory", "", "bar.warp.sync 0xffffffff;", "", [], True)


def any_thread(condition: Boolean) -> Int32:
    """Whether the condition holds in any thread of the CTA; also a barrier."""
    text = (
        "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; bar.red.or.pred q, 0, p; selp.b32 $0, 1, 0, q; }"
    )
    return Int32(_emit("memory", "r", text, "r", [Int32(condition)], True))


def any_lane(condition: Boolean) -> Boolean:
    """Whether the condition holds in any lane of the warp."""
    text = (
        "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff;"
        " selp.b32 $0, 1, 0, q; }"
    )
    return Int32(_emit("memory", "r", text, "r", [Int32(condition)], True)) != 0


def _shuffle(kind: str, value: Int32, by: int, clamp: int) -> Int32:
    text = f"shfl.sync.{kind}.b32 $0, $1, {by}, {clamp}, 0xffffffff;"
    return Int32(_emit("memory", "r", text, "r", [value], True))


def shuffle_up(value: Int32, by: int) -> Int32:
    """The value of the lane ``by`` below; lanes below ``by`` keep their own."""
    return _shuffle("up", value, by, 0)


def shuffle_xor(value: Int32, mask: int) -> Int32:
    return _shuffle("bfly", value, mask, 31)


def shuffle_xor_float(value: Float32, mask: int) -> Float32:
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
    return Float32(_emit("memory", "f", text, "f", [value], True))


def shuffle_from_float(value: Float32, lane: Int32) -> Float32:
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return Float32(_emit("memory", "f", text, "fr", [value, lane], True))

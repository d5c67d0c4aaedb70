"""The largest of a row of logits and where it is, as torch orders them.

NaN is above everything, the first NaN wins; else the larger value; of equal ones, -0 and +0 among
them, the lowest column. A *key* is the value's order in its upper word (NaN all ones, -0 as +0,
negative numbers inverted, others with their sign set) and the complement of the column in the
lower one: the largest key is the answer whatever the order in which keys are compared, and 0 is
below the key of every column.

A CTA reads 16 bytes a load, ``UNROLL`` loads of a thread under way, and what of its columns lies
before the first and behind the last multiple of 16 bytes one by one. On the way a thread keeps the
largest value and the group of loads that it was first in; which column it was is looked up once, in
that group, when the warp's largest value is known. So a bf16 costs half a comparison, where a key
of each column would cost more than the memory's bandwidth leaves time for. The figures are counts
of instructions; nothing of this was timed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from specplan.kernels.device import memory, ptx
from specplan.kernels.device.convert import float_to_bits
from specplan.kernels.device.ptx import emit

THREADS = 256
WARPS = THREADS // 32
#: Loads of 16 bytes that a thread has under way.
UNROLL = 4
#: -inf, as fp32 and as two bf16.
_LOWEST = {4: -0x00800000, 2: -0x007F0080}


@cute.jit
def warp_best(
    row: Int64,
    begin: Int32,
    end: Int32,
    thread: Int32,
    item: cutlass.Constexpr[int],
) -> tuple[Int32, Int32]:
    """The largest key of the columns ``begin`` to ``end - 1`` that this thread's warp reads, upper
    word first; no more than the key of no column where it reads none.

    ``row`` is the address of column 0; ``item`` is 2 for bf16 and 4 for fp32.
    """
    width = 16 // item
    first = row + Int64(begin) * item
    before = ((16 - (Int32(first) & 15)) & 15) // item
    before = cutlass.max(cutlass.min(before, end - begin), Int32(0))
    start = begin + before
    vectors = cutlass.max(end - start, Int32(0)) // width
    body = row + Int64(start) * item
    rest = start + vectors * width

    # Columns outside the multiples of 16 bytes: fewer than `width` on either side.
    column = ptx.select(thread < width, begin + thread, rest + thread - width)
    limit = ptx.select(thread < width, start, end)
    lone = (thread < 2 * width) & (column < limit)
    single = _load_one(row + Int64(column) * item, lone, item)

    largest = Int32(_LOWEST[4])
    group = Int32(0)
    step = THREADS * UNROLL
    for i in cutlass.range(0, (vectors + (step - 1)) // step, 1, unroll=1):
        at = i * step + thread
        words = []
        for u in cutlass.range_constexpr(UNROLL):
            vector = at + u * THREADS
            words += _load_vector(body + Int64(vector) * 16, vector < vectors, item)
        largest, group = _keep(_largest(words, item), i, largest, group)

    of_group = order(largest)
    of_single = ptx.select(lone, order(single), Int32(0))
    high = warp_max(unsigned_max(of_group, of_single))
    low = Int32(0)
    if of_group == high:
        at = group * step + thread
        for u in cutlass.range_constexpr(UNROLL - 1, -1, -1):
            vector = at + u * THREADS
            if vector < vectors:
                found = memory.load_read_only(body + Int64(vector) * 16, 4)
                low = _first_equal(found, largest, start + vector * width, low, item)
    low = unsigned_max(low, ptx.select(lone & (of_single == high), ~column, Int32(0)))
    return high, warp_max(low)


@cute.jit
def cta_best(
    row: Int64,
    begin: Int32,
    end: Int32,
    thread: Int32,
    item: cutlass.Constexpr[int],
) -> tuple[Int32, Int32]:
    """As :func:`warp_best`, of all threads of the CTA, for its first warp alone; with a barrier."""
    high, low = warp_best(row, begin, end, thread, item)
    shared = cute.arch.alloc_smem(Int32, 2 * WARPS, alignment=8).toint()
    place = shared + (thread // 32) * 8
    _store_shared(place, low, high, thread % 32 == 0)
    cute.arch.sync_threads()
    other_low, other_high = _load_shared(shared + (thread % WARPS) * 8)
    high = warp_max(other_high)
    return high, warp_max(ptx.select(other_high == high, other_low, Int32(0)))


def chunk_of(columns: Int32, splits: Int32, width: int) -> Int32:
    """Columns of one of ``splits`` parts of a row: a multiple of ``width``."""
    vectors = (columns + (width - 1)) // width
    return (vectors + splits - 1) // splits * width


def address_of(vector: cute.Tensor) -> Int64:
    """The address of a tensor, 0 of an empty one."""
    return ptx.select(vector.shape[0] > 0, vector.iterator.toint(), Int64(0))


def order(bits: Int32) -> Int32:
    """A word that is larger, unsigned, for an fp32 (its bits) that is later in the order."""
    text = (
        "{ .reg .pred p; .reg .b32 b, m; setp.eq.f32 p, $1, 0f00000000; selp.b32 b, 0, $1, p; "
        "shr.s32 m, b, 31; or.b32 m, m, 0x80000000; xor.b32 b, b, m; setp.nan.f32 p, $1, $1; "
        "selp.b32 $0, -1, b, p; }"
    )
    return emit([Int32], [bits], text, "=r,r")[0]


def value_of(high: Int32) -> Int32:
    """The bits of the fp32 that :func:`order` gives a word for: zero is +0, NaN 0x7fffffff."""
    text = (
        "{ .reg .pred p; .reg .b32 b, m; shr.s32 m, $1, 31; not.b32 m, m; "
        "or.b32 m, m, 0x80000000; xor.b32 b, $1, m; setp.eq.s32 p, $1, -1; "
        "selp.b32 $0, 0x7FFFFFFF, b, p; }"
    )
    return emit([Int32], [high], text, "=r,r")[0]


def unsigned_max(a: Int32, b: Int32) -> Int32:
    """The larger of two unsigned words."""
    return emit([Int32], [a, b], "max.u32 $0, $1, $2;", "=r,r,r")[0]


def warp_max(word: Int32) -> Int32:
    """The largest unsigned word of a whole warp."""
    text = "redux.sync.max.u32 $0, $1, 0xFFFFFFFF;"
    return emit([Int32], [word], text, "=r,r", volatile=True)[0]


def store_logit(address: Int64, bits: Int32, live: Boolean, item: int) -> None:
    """Store the upper ``item`` bytes of an fp32 of these bits, where ``live``."""
    if item == 4:
        memory.store_global(address, [bits], live)
        return
    text = (
        "{ .reg .pred p; .reg .b16 x; setp.ne.s32 p, $2, 0; cvt.u16.u32 x, $1; "
        "@p st.global.b16 [$0], x; }"
    )
    emit([], [address, bits >> 16, Int32(live)], text, "l,r,r", volatile=True)


def _load_one(address: Int64, live: Boolean, item: int) -> Int32:
    """One logit as the bits of an fp32."""
    if item == 2:
        return float_to_bits(memory.load_read_only_bf16(address, live))
    return memory.load_read_only(address, 1, live)[0]


def _load_vector(address: Int64, live: Boolean, item: int) -> list[Int32]:
    """16 bytes of logits; all -inf where not ``live``."""
    fill = "".join(f"mov.b32 ${i}, {_LOWEST[item]}; " for i in range(4))
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; {fill}"
        "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )
    return emit([Int32] * 4, [address, Int32(live)], text, "=&r,=&r,=&r,=&r,l,r", volatile=True)


def _largest(words: list[Int32], item: int) -> Int32:
    """The largest logit of some words as the bits of an fp32; NaN if any is."""
    kind = "bf16x2" if item == 2 else "f32"
    while len(words) > 1:
        pairs = zip(words[::2], words[1::2], strict=True)
        words = [_max_or_nan(a, b, kind) for a, b in pairs]
    if item == 4:
        return words[0]
    return _max_or_nan(words[0] << 16, words[0] & Int32(-65536), "f32")


def _max_or_nan(a: Int32, b: Int32, kind: str) -> Int32:
    return emit([Int32], [a, b], f"max.NaN.{kind} $0, $1, $2;", "=r,r,r")[0]


def _keep(found: Int32, i: Int32, largest: Int32, group: Int32) -> tuple[Int32, Int32]:
    """The larger of two logits and its group: the second one unless the first is above it."""
    text = (
        "{ .reg .pred p; setp.eq.f32 p, $4, $4; setp.gtu.and.f32 p, $2, $4, p; "
        "selp.b32 $0, $2, $4, p; selp.b32 $1, $3, $5, p; }"
    )
    kept = emit([Int32, Int32], [found, i, largest, group], text, "=&r,=r,r,r,r,r")
    return kept[0], kept[1]


def _first_equal(words: list[Int32], largest: Int32, column: Int32, low: Int32, item: int) -> Int32:
    """The complement of the first column of a vector that has the largest logit, or ``low``."""
    logits = []
    for word in words:
        logits += [word] if item == 4 else [word << 16, word & Int32(-65536)]
    # A NaN equals nothing; where the largest is one, the first NaN is looked for.
    text = (
        "{ .reg .pred p, q; setp.nan.f32 q, $2, $2; setp.nan.and.f32 q, $1, $1, q; "
        "setp.eq.or.f32 p, $1, $2, q; selp.b32 $0, $3, $4, p; }"
    )
    for i in reversed(range(len(logits))):
        operands = [logits[i], largest, ~(column + i), low]
        low = emit([Int32], operands, text, "=r,r,r,r,r")[0]
    return low


def _store_shared(address: Int32, low: Int32, high: Int32, live: Boolean) -> None:
    text = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.v2.b32 [$0], {$1, $2}; }"
    emit([], [address, low, high, Int32(live)], text, "r,r,r,r", volatile=True)


def _load_shared(address: Int32) -> tuple[Int32, Int32]:
    found = emit([Int32] * 2, [address], "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", True)
    return found[0], found[1]

"""The window of a group of rows: the union of their lists.

A union is found through bitmaps of blocks of four tokens: one of each row, of the blocks that it
lists whole and in order, a *quad*, and one of all rows. Most lists are quads but for up to three
tokens at their end. What is left of a list after as many quads as all threads take, and the
tokens of broken quads, stand in the bitmap of all rows alone, and are looked at one by one when
the window is filled.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import BITMAP_WORDS, TABLE_WORDS, Form
from specplan.kernels.sparse_gqa_verify.cta import Cta
from specplan.kernels.sparse_gqa_verify.selection import (
    list_address,
    rank_of,
    split_token,
    table_address,
)
from specplan.plans.sparse_gqa_verify import GROUP_ROWS, UNION_TOKENS


def bitmap_words(cta: Cta) -> Int32:
    """Words of a bitmap that tokens of the request can stand in: a multiple of 4."""
    most = ptx.divide_unsigned(Int32(UNION_TOKENS), cta.page_size)
    tokens = cutlass.min(Int32(cta.table.shape[1]), most) * cta.page_size
    return ptx.shift_right(tokens + 511, 9) << 2


@cute.jit
def clear_bitmaps(cta: Cta, form: cutlass.Constexpr) -> None:
    """Clears bitmaps and window."""
    zero = Int32(0)
    for word in cutlass.range(4 * cta.thread, bitmap_words(cta), 4 * form.threads, unroll=1):
        for r in cutlass.range_constexpr(GROUP_ROWS + 1):
            at = cta.smem + form.ring_at + r * BITMAP_WORDS * 4 + word * 4
            ptx.store_shared4(at, (zero, zero, zero, zero))
    for i in cutlass.range_constexpr(form.per_window):
        ptx.store_shared2(
            cta.smem + form.window_at + (i * form.threads + cta.thread) * 8, zero, zero
        )


def fetch_row(cta: Cta, row: Int32 | int, exists: Any, form: Form) -> list[ptx.Words]:
    """This thread's quads of a row's list, -1 where it has none."""
    entry = Int64(cta.lists.stride[1]) * 4
    source = list_address(cta, Int32(row))
    width = Int32(cta.lists.shape[1])
    address = source + Int64(4 * cta.thread) * entry
    found = []
    for turn in range(form.quads):
        first = 4 * (turn * form.threads + cta.thread)
        inside = exists & (first + 4 <= width)
        found.append(ptx.load_global_steps_if(address, entry, inside))
        address = address + 4 * form.threads * entry
    return found


def rest_row_of(cta: Cta) -> Int32:
    """The row of what this warp takes of the rests."""
    return cta.warp & 3


def fetch_rest(cta: Cta, exists: Any, form: Form) -> list[Int32]:
    """This thread's four entries of a row's rest, -1 where it has none."""
    row = rest_row_of(cta)
    exists = exists & (row < cta.rows) & (cta.warp < 4)
    entry = Int64(cta.lists.stride[1]) * 4
    first = 4 * (form.quads * form.threads + cta.lane)
    source = list_address(cta, row) + Int64(first) * entry
    width = Int32(cta.lists.shape[1])
    return [
        ptx.load_global_if(source + i * entry, exists & (first + i < width), -1) for i in range(4)
    ]


def load_row_facts(cta: Cta, row: Int32, form: Form) -> tuple[Int32, Int32]:
    """``(entries, last token)`` of a row that may be listed: a token of the request's table, and of
    the bitmaps.
    """
    _, listed, limit, _ = ptx.load_shared4(cta.smem + row * 16, form.misc_at)
    tokens = cutlass.min(Int32(cta.table.shape[1]) * cta.page_size, UNION_TOKENS)
    return listed, cutlass.min(limit, tokens - 1)


def mark_row(cta: Cta, row: Int32, quads: list[ptx.Words], form: Form) -> tuple[Int32, Int32]:
    """Marks the whole blocks of this thread's quads of a row. ``(a bit for each quad that is not
    one but has tokens, not 0 if a block is there twice)``.
    """
    listed, limit = load_row_facts(cta, row, form)
    bitmap = cta.smem + form.ring_at + row * (BITMAP_WORDS * 4)
    width = Int32(cta.lists.shape[1])
    broken = Int32(0)
    twice = Int32(0)
    for turn, t in enumerate(quads):
        first = 4 * (turn * form.threads + cta.thread)
        odd = (t[0] & 3) | (t[1] ^ (t[0] + 1)) | (t[2] ^ (t[0] + 2)) | (t[3] ^ (t[0] + 3))
        whole = (odd == 0) & (t[0] >= 0) & (t[3] <= limit) & (first + 4 <= listed)
        # Threads with nothing to mark write a harmless 0 to a word of their own: a condition on an
        # atomic would be a branch.
        block = t[0] >> 2
        bit = ptx.choose(whole, Int32(1) << (block & 31), Int32(0))
        at = ptx.choose(whole, (block >> 5) * 4, cta.thread * 4)
        twice = twice | (ptx.or_shared_before(bitmap + at, bit) & bit)
        tokens = ((t[0] & t[1] & t[2] & t[3]) >= 0) | (first + 4 > width)
        broken = broken | (Int32(~whole & tokens & (first < listed)) << turn)
    return broken, twice


@cute.jit
def mark_rest(cta: Cta, rest: Any, broken: Int32, form: cutlass.Constexpr) -> None:
    """Marks the blocks of the rests and of broken quads, and keeps what is looked at again."""
    row = rest_row_of(cta)
    listed, limit = load_row_facts(cta, row, form)
    first = 4 * (form.quads * form.threads + cta.lane)
    tokens = []
    for i in cutlass.range_constexpr(4):
        valid = (first + i < listed) & (rest[i] >= 0) & (rest[i] <= limit)
        tokens.append(ptx.choose(valid, rest[i], Int32(-1)))
    kept = cta.smem + form.rest_at + cta.thread * 16
    ptx.store_shared4(kept, (tokens[0], tokens[1], tokens[2], tokens[3]))
    ptx.store_shared(cta.smem + form.broken_at + cta.thread * 4, broken)
    more = Boolean(True)
    while more:
        if ptx.any_lane((tokens[0] & tokens[1] & tokens[2] & tokens[3]) >= 0):
            for token in tokens:
                block = token >> 2
                at = ptx.choose(token >= 0, (block >> 5) * 4, cta.thread * 4)
                bit = ptx.choose(token >= 0, Int32(1) << (block & 31), Int32(0))
                ptx.or_shared(cta.smem + form.union_at + at, bit)
        more = ptx.any_lane(broken != 0)
        row, tokens = load_broken_quad(cta, broken, form)
        broken = broken & (broken - 1)


def load_broken_quad(cta: Cta, broken: Int32, form: Form) -> tuple[Int32, list[Int32]]:
    """``(row, four tokens, -1 if not valid)`` of the last of this thread's broken quads, if any."""
    number = ptx.lowest_bit(broken)
    number = ptx.choose(broken != 0, number, Int32(0))
    row = number // form.quads
    first = 4 * ((number % form.quads) * form.threads + cta.thread)
    listed, limit = load_row_facts(cta, row, form)
    entry = Int64(cta.lists.stride[1]) * 4
    source = list_address(cta, row) + Int64(first) * entry
    tokens = [
        ptx.load_global_if(source + i * entry, (broken != 0) & (first + i < listed), -1)
        for i in range(4)
    ]
    return row, [ptx.choose((token >= 0) & (token <= limit), token, Int32(-1)) for token in tokens]


@cute.jit
def mark_again(cta: Cta, form: cutlass.Constexpr) -> Int32:
    """Bitmaps and rests of all rows, where tiles have overwritten them; not 0 if a row lists a
    block twice. Begins and ends with a barrier.
    """
    ptx.wait(0)
    ptx.barrier()
    clear_bitmaps(cta, form)
    ptx.barrier()
    broken = Int32(0)
    twice = Int32(0)
    for row in cutlass.range(cta.rows, unroll=1):
        quads = fetch_row(cta, row, Boolean(True), form)
        odd, again = mark_row(cta, row, quads, form)
        broken = broken | (odd << (row * form.quads))
        twice = twice | again
    mark_rest(cta, fetch_rest(cta, Boolean(True), form), broken, form)
    ptx.barrier()
    return twice


@cute.jit
def stage_table(cta: Cta, form: cutlass.Constexpr) -> None:
    """Starts copying the request's row of the block table, if it is short."""
    columns = Int32(cta.table.shape[1])
    base = request_of(cta, form)
    if (columns <= TABLE_WORDS) & (base >= 0):
        source = table_address(cta, base, Int32(0))
        step = Int64(cta.table.stride[1]) * 4
        for column in cutlass.range(cta.thread, columns, form.threads, unroll=1):
            target = cta.smem + form.table_at + column * 4
            ptx.copy4_if(target, source + Int64(column) * step, Boolean(True))
    ptx.commit()


def request_of(cta: Cta, form: Form) -> Int32:
    """The request of a union's rows, -1 if none of them has one."""
    owners = [ptx.load_shared(cta.smem + form.misc_at + 16 * r) for r in range(GROUP_ROWS)]
    return cutlass.max(cutlass.max(owners[0], owners[1]), cutlass.max(owners[2], owners[3]))


@cute.jit
def count_blocks(cta: Cta, form: cutlass.Constexpr) -> Int32:
    """The bitmap of the union, and the blocks below each of its words; how many there are. Ends
    with a barrier, unless there are none.
    """
    scratch = cta.smem + form.misc_at + 64
    words = bitmap_words(cta)
    blocks = Int32(0)
    for start in cutlass.range(0, words, 4 * form.threads, unroll=1):
        word = start + 4 * cta.thread
        there = word < words
        at = cta.smem + form.ring_at + word * 4
        four = [Int32(0)] * 4
        for r in cutlass.range_constexpr(GROUP_ROWS + 1):
            part = ptx.load_shared4(at, r * BITMAP_WORDS * 4)
            four = [a | b for a, b in zip(four, part, strict=True)]
        four = [ptx.choose(there, each, Int32(0)) for each in four]
        ptx.store_shared4(at, (four[0], four[1], four[2], four[3]), GROUP_ROWS * BITMAP_WORDS * 4)
        each = [ptx.population(bits) for bits in four]
        mine = (each[0] + each[1]) + (each[2] + each[3])
        inclusive = mine
        for power in cutlass.range_constexpr(5):
            lower = ptx.shuffle_up(inclusive, 1 << power)
            inclusive = inclusive + ptx.choose(cta.lane >= (1 << power), lower, Int32(0))
        if cta.lane == 31:
            ptx.store_shared(scratch + cta.warp * 4, inclusive)
        ptx.barrier()
        of_warps = []
        for part in cutlass.range_constexpr(form.warps // 4):
            of_warps += ptx.load_shared4(scratch, 16 * part)
        running = blocks + inclusive - mine
        for w in cutlass.range_constexpr(form.warps):
            running = running + ptx.choose(cta.warp > w, of_warps[w], Int32(0))
            blocks = blocks + of_warps[w]
        below = []
        for j in cutlass.range_constexpr(4):
            below.append(running)
            running = running + each[j]
        ptx.store_shared4(
            at, (below[0], below[1], below[2], below[3]), (GROUP_ROWS + 1) * BITMAP_WORDS * 4
        )
        ptx.barrier()
    return blocks


@cute.jit
def fill_union(cta: Cta, low: Int32, entries: Int32, staged: Any, form: cutlass.Constexpr) -> Int32:
    """Entries for the blocks of rank ``low ..``; not 0 if a row lists a token in two ways.
    ``staged``: the table may be in shared memory.
    """
    window = cta.smem + form.window_at
    base = request_of(cta, form)
    staged = staged & (Int32(cta.table.shape[1]) <= TABLE_WORDS)
    words = bitmap_words(cta)
    # The largest power of two below the words: a search over them starts there.
    widest = Int32(1) << ptx.highest_bit(words - 1)
    twice = Int32(0)
    # A warp whose entries are beyond the last has nothing to find.
    for start in cutlass.range(32 * cta.warp, entries, form.threads, unroll=1):
        place = start + cta.lane
        rank = low + cutlass.min(place, entries - 1)
        at = Int32(0)
        half = widest
        while half > 0:
            beyond = at + half
            inside = beyond < words
            safe = ptx.choose(inside, beyond, Int32(0))
            below = ptx.load_shared(cta.smem + safe * 4, form.prefix_at)
            at = ptx.choose(inside & (below <= rank), beyond, at)
            half = half >> 1
        word = cta.smem + at * 4
        bits = ptx.load_shared(word, form.union_at)
        bit = find_nth_bit(bits, rank - ptx.load_shared(word, form.prefix_at))
        members = Int32(0)
        for r in cutlass.range_constexpr(GROUP_ROWS):
            row_bits = ptx.load_shared(word, form.ring_at + r * BITMAP_WORDS * 4)
            members = members | ((ptx.shift_right(row_bits, bit) & 1) << r)
        members = members * 0x1111
        token = (at * 32 + bit) * 4
        page, slot, valid = look_up_union_page(cta, base, token, place < entries, staged, form)
        target = window + ptx.choose(valid, place, cta.thread) * 8
        entry = ptx.choose(valid, (slot << 16) | members, Int32(0))
        ptx.store_shared_if(target, page, valid)
        twice = twice | (ptx.or_shared_before(target + 4, entry) & members & entry)
    row = rest_row_of(cta)
    tokens = list(ptx.load_shared4(cta.smem + form.rest_at + cta.thread * 16))
    broken = ptx.load_shared(cta.smem + form.broken_at + cta.thread * 4)
    more = Boolean(True)
    while more:
        if ptx.any_lane((tokens[0] & tokens[1] & tokens[2] & tokens[3]) >= 0):
            marks = []
            found = []
            for token in tokens:
                place = rank_of(cta, ptx.choose(token >= 0, token >> 2, Int32(0)), form) - low
                mine = (token >= 0) & (place >= 0) & (place < entries)
                marks.append((place, Int32(1) << (4 * (token & 3) + row)))
                found.append(look_up_union_page(cta, base, token, mine, staged, form))
            for i in cutlass.range_constexpr(4):
                place, member = marks[i]
                _, _, valid = found[i]
                member = ptx.choose(valid, member, Int32(0))
                target = window + ptx.choose(valid, place, cta.thread) * 8
                twice = twice | (ptx.or_shared_before(target + 4, member) & member)
        more = ptx.any_lane(broken != 0)
        row, tokens = load_broken_quad(cta, broken, form)
        broken = broken & (broken - 1)
    return twice


def find_nth_bit(bits: Int32, number: Int32) -> Int32:
    """Where the bit stands that has ``number`` set bits below it."""
    at = Int32(0)
    for half in (16, 8, 4, 2, 1):
        lower = ptx.population(ptx.shift_right(bits, at) & ((1 << half) - 1))
        above = number >= lower
        number = number - ptx.choose(above, lower, Int32(0))
        at = at + ptx.choose(above, Int32(half), Int32(0))
    return at


def look_up_union_page(
    cta: Cta, base: Int32, token: Int32, exists: Any, staged: Any, form: Form
) -> tuple[Int32, Int32, Any]:
    """``(page, slot, valid)`` of a token of a union's request."""
    column, slot = split_token(cta, token)
    inside = exists & (column < Int32(cta.table.shape[1]))
    near = cta.smem + ptx.choose(inside & staged, column, Int32(0)) * 4
    page = ptx.load_global_if(table_address(cta, base, column), inside & ~staged, -1)
    page = ptx.choose(staged, ptx.load_shared(near, form.table_at), page)
    return page, slot, inside & (page >= 0) & (page < cta.pages)

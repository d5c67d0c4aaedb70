"""``step_setup``: which request, position, page and group each row of a step has, in one launch.

All tensors are on one CUDA device and int32 where nothing else is said. B requests, R rows (the
capacity of the launch, at least the rows of all requests), C columns of the block table, S history
slots; *index* is int32 or int64 (a constant of the plan). Vectors are dense unless strides are
named. Optional ones may be empty instead.

======================  ==============  ========================================================
kv_lens                 [B]             tokens of a request in the cache, this step's rows too
seq_lens                [B] or [0]      rows of each request; empty: ``tokens`` each
block_table             [B, C]          any strides; entry v: page ``v // scale``, none if v < 0
request_of_row          [R]             written
position_of_row         [R]             written
visible_of_row          [R]             written
page_of_row             [R] index       written
within_of_row           [R] index       written
first_position          [B]             written
ordinal_of_row          [R] or [0]      written
position_of_row_int64   [R] or [0]      int64, written
length_of_row           [R] or [0]      written
cache_slot              [R] or [0]      int64, written
group_slot              [R] or [0]      int64, written; needs ``page_size % group == 0``
table_out               [>=B, >=C]      any strides, or [0, 0]; [:B, :C] is written
work                    [>=B, 4]        or [0, 4]; [:B] is written
n_commit                [1]             written with ``work``
slots                   [B]             any stride; history slot of each request, for ``work``
hist_len, bank          [S]             for ``work``
======================  ==============  ========================================================

Row t is row t - start of the request q whose rows begin at ``start``, the sum of those before: q is
the number of inclusive prefix sums that are <= t, so a request without rows owns none. A length of
rows below 0 counts as 0. Then::

    ordinal  = t - start
    p        = kv_lens[q] - seq_lens[q] + ordinal
    visible  = (p + 1) // group
    page     = unscaled table[q, p // page_size], -1 if the table has no such column
    within   = p % page_size
    cache_slot = page * page_size + within                                 -1 if page < 0
    group_slot = page * (page_size // group) + within // group
                                          -1 if page < 0 or (p + 1) % group != 0
    first_position[q] = kv_lens[q] - seq_lens[q]                           -1 if below 0

A row that no request has, and one with p < 0 (the lengths of a dummy), is padding: request,
position, page, cache_slot and group_slot -1, all others 0. Every row of [0, R) is written.
``table_out[q, c]`` is ``v // scale``, or v itself where v < 0.

``work`` has a line (q, slot, hist_len, bank) for each request: first those whose history is
committed (hist_len + rows > window), as many as ``n_commit`` says, then the other real ones, both
in the order of the batch, then those whose slot is outside [0, S): (q, -1, 0, 0).

Outputs must not share memory with each other or with inputs, and no column is read that the table
does not have.

Compiled function: the tensors in the order of ``plans/step_setup.py``, then ``tokens, page_size,
group, page_groups, scale, window, launches``; ``page_groups`` is page_size // group. It launches
nothing and raises RuntimeError unless the rules there hold, and nothing where ``launches`` is 0.

One thread a row; CTAs behind those unscale the table, eight elements a thread, and the last makes
the work items, all without a word to each other. Where rows differ, each CTA of rows sums the rows
of all requests in shared memory, and a thread searches there for its request. Nothing divides: the
host gives multipliers, exact for all 31-bit integers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from specplan.kernels import fakes, ranges
from specplan.kernels.device import memory
from specplan.kernels.device.divide import divide31, reciprocal31
from specplan.kernels.device.names import host_name, kernel_name
from specplan.plans.plan import Plan
from specplan.plans.step_setup import MOST_REQUESTS, OP, TABLE_ITEMS, THREADS

WARPS = THREADS // 32
#: Bits of ``wanted``: the optional outputs of a row.
ORDINAL, WIDE_POSITION, LENGTH, CACHE_SLOT, GROUP_SLOT = (1 << bit for bit in range(5))


@cute.jit
def store_long(pointer: cute.Pointer, offset: Int64, value: Int64) -> None:
    """Store an int64 at ``pointer[offset]``."""
    cute.make_tensor(pointer + offset, cute.make_layout(1))[0] = value


@cute.jit
def sum_before(value: Int32, of_warps: cute.Tensor, thread: Int32) -> tuple[Int32, Int32]:
    """The sum of the values of the threads before this one, and of all; holds one barrier."""
    inclusive = value
    for power in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(inclusive, 1 << power, mask_and_clamp=0)
        if thread % 32 >= (1 << power):
            inclusive = inclusive + lower
    if thread % 32 == 31:
        of_warps[thread // 32] = inclusive
    cute.arch.sync_threads()
    before = inclusive - value
    total = Int32(0)
    for warp in cutlass.range_constexpr(WARPS):
        part = of_warps[warp]
        if thread // 32 > warp:
            before = before + part
        total = total + part
    return before, total


@cute.jit
def sum_rows(
    seq_lens: cute.Pointer,
    requests: Int32,
    rows: Int32,
    ends: cute.Tensor,
    of_warps: cute.Tensor,
    thread: Int32,
) -> None:
    """``ends[b]`` = rows of requests 0..b; a request counts for at most ``rows``, so that no sum
    overflows. Ends with a barrier.
    """
    each = (requests + THREADS - 1) // THREADS
    first = thread * each
    last = cutlass.min(first + each, requests)
    mine = Int32(0)
    for b in cutlass.range(first, last, unroll=1):
        count = memory.load_word(seq_lens, Int64(b))
        mine = mine + cutlass.max(Int32(0), cutlass.min(count, rows))
        ends[b] = mine
    before, _ = sum_before(mine, of_warps, thread)
    for b in cutlass.range(first, last, unroll=1):
        ends[b] = ends[b] + before
    cute.arch.sync_threads()


@kernel_name("step_setup")
@cute.kernel
def _step_setup(
    kv_lens: cute.Pointer,
    seq_lens: cute.Pointer,
    block_table: cute.Pointer,
    request_of_row: cute.Pointer,
    position_of_row: cute.Pointer,
    visible_of_row: cute.Pointer,
    page_of_row: cute.Pointer,
    within_of_row: cute.Pointer,
    first_position: cute.Pointer,
    ordinal_of_row: cute.Pointer,
    position_of_row_int64: cute.Pointer,
    length_of_row: cute.Pointer,
    cache_slot: cute.Pointer,
    group_slot: cute.Pointer,
    table_out: cute.Pointer,
    work: cute.Pointer,
    n_commit: cute.Pointer,
    slots: cute.Pointer,
    hist_len: cute.Pointer,
    bank: cute.Pointer,
    table_strides: tuple[Int32, Int32],
    out_strides: tuple[Int32, Int32],
    slot_stride: Int32,
    requests: Int32,
    rows: Int32,
    columns: Int32,
    histories: Int32,
    tokens: Int32,
    page_size: Int32,
    group: Int32,
    page_groups: Int32,
    window: Int32,
    wanted: Int32,
    row_ctas: Int32,
    table_ctas: Int32,
    by_tokens: tuple[Int64, Int32],
    by_page: tuple[Int64, Int32],
    by_group: tuple[Int64, Int32],
    by_scale: tuple[Int64, Int32],
    by_columns: tuple[Int64, Int32],
    wide: cutlass.Constexpr[bool],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ends = cute.make_tensor(
        cute.arch.alloc_smem(Int32, MOST_REQUESTS), cute.make_layout(MOST_REQUESTS)
    )
    of_warps = cute.make_tensor(cute.arch.alloc_smem(Int32, WARPS), cute.make_layout(WARPS))
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if cta < row_ctas:
        row = cta * THREADS + thread
        request = requests
        ordinal = Int32(0)
        if tokens > 0:
            request = divide31(row, by_tokens)
            ordinal = row - request * tokens
        elif cta * THREADS < rows:
            sum_rows(seq_lens, requests, rows, ends, of_warps, thread)
            request, ordinal = _search(ends, requests, row)
        if row < rows:
            _map_row(
                row, request, ordinal, kv_lens, seq_lens, block_table, request_of_row,
                position_of_row, visible_of_row, page_of_row, within_of_row, ordinal_of_row,
                position_of_row_int64, length_of_row, cache_slot, group_slot, table_strides,
                requests, columns, tokens, page_size, group, page_groups, wanted, by_page,
                by_group, by_scale, wide,
            )  # fmt: skip
        if row < requests:
            length = memory.load_word(kv_lens, Int64(row))
            count = tokens
            if tokens == 0:
                count = cutlass.max(Int32(0), memory.load_word(seq_lens, Int64(row)))
            first = Int32(-1)
            if length >= count:
                first = length - count
            memory.store_word(first_position, Int64(row), first)
    elif cta < row_ctas + table_ctas:
        _unscale(
            (cta - row_ctas) * (THREADS * TABLE_ITEMS) + thread, block_table, table_out,
            table_strides, out_strides, requests * columns, columns, by_scale, by_columns,
        )  # fmt: skip
    else:
        _list_work(
            thread, seq_lens, slots, hist_len, bank, work, n_commit, of_warps, slot_stride,
            requests, histories, tokens, window,
        )  # fmt: skip


@cute.jit
def _search(ends: cute.Tensor, requests: Int32, row: Int32) -> tuple[Int32, Int32]:
    """The request of a row, ``requests`` if none, and the row's place in it."""
    low = Int32(0)
    high = requests
    while low < high:
        middle = (low + high) >> 1
        if ends[middle] <= row:
            low = middle + 1
        else:
            high = middle
    start = Int32(0)
    if low > 0:
        start = ends[low - 1]
    return low, row - start


@cute.jit
def _map_row(
    row: Int32,
    request: Int32,
    ordinal: Int32,
    kv_lens: cute.Pointer,
    seq_lens: cute.Pointer,
    block_table: cute.Pointer,
    request_of_row: cute.Pointer,
    position_of_row: cute.Pointer,
    visible_of_row: cute.Pointer,
    page_of_row: cute.Pointer,
    within_of_row: cute.Pointer,
    ordinal_of_row: cute.Pointer,
    position_of_row_int64: cute.Pointer,
    length_of_row: cute.Pointer,
    cache_slot: cute.Pointer,
    group_slot: cute.Pointer,
    table_strides: tuple[Int32, Int32],
    requests: Int32,
    columns: Int32,
    tokens: Int32,
    page_size: Int32,
    group: Int32,
    page_groups: Int32,
    wanted: Int32,
    by_page: tuple[Int64, Int32],
    by_group: tuple[Int64, Int32],
    by_scale: tuple[Int64, Int32],
    wide: cutlass.Constexpr[bool],
) -> None:
    """Everything that is said of one row."""
    length = Int32(0)
    position = Int32(-1)
    if request < requests:
        count = tokens
        length = cutlass.max(Int32(0), memory.load_word(kv_lens, Int64(request)))
        if tokens == 0:
            count = memory.load_word(seq_lens, Int64(request))
        # No sum of these leaves 32 bits: length and count are not below 0, and ordinal < count.
        position = length - count + ordinal
    page = Int32(-1)
    within = Int32(0)
    visible = Int32(0)
    slot = Int64(-1)
    slot_of_group = Int64(-1)
    if position >= 0:
        column = divide31(position, by_page)
        within = position - column * page_size
        visible = divide31(position + 1, by_group)
        if column < columns:
            at = Int64(request) * table_strides[0] + Int64(column) * table_strides[1]
            page = memory.load_word(block_table, at)
            if page >= 0:
                page = divide31(page, by_scale)
                slot = Int64(page) * page_size + within
                if visible * group == position + 1:
                    slot_of_group = Int64(page) * page_groups + divide31(within, by_group)
    else:
        request = Int32(-1)
        position = Int32(-1)
        ordinal = Int32(0)
        length = Int32(0)
    at = Int64(row)
    memory.store_word(request_of_row, at, request)
    memory.store_word(position_of_row, at, position)
    memory.store_word(visible_of_row, at, visible)
    if cutlass.const_expr(wide):
        store_long(page_of_row, at, Int64(page))
        store_long(within_of_row, at, Int64(within))
    else:
        memory.store_word(page_of_row, at, page)
        memory.store_word(within_of_row, at, within)
    if (wanted & ORDINAL) != 0:
        memory.store_word(ordinal_of_row, at, ordinal)
    if (wanted & WIDE_POSITION) != 0:
        store_long(position_of_row_int64, at, Int64(position))
    if (wanted & LENGTH) != 0:
        memory.store_word(length_of_row, at, length)
    if (wanted & CACHE_SLOT) != 0:
        store_long(cache_slot, at, slot)
    if (wanted & GROUP_SLOT) != 0:
        store_long(group_slot, at, slot_of_group)


@cute.jit
def _unscale(
    first: Int32,
    block_table: cute.Pointer,
    table_out: cute.Pointer,
    table_strides: tuple[Int32, Int32],
    out_strides: tuple[Int32, Int32],
    entries: Int32,
    columns: Int32,
    by_scale: tuple[Int64, Int32],
    by_columns: tuple[Int64, Int32],
) -> None:
    """Entries first, first + THREADS, ... of the table in pages; all loads before the first use."""
    places = []
    values = []
    for item in cutlass.range_constexpr(TABLE_ITEMS):
        # Below the entries, or it wrapped to below 0.
        entry = first + item * THREADS
        inside = Boolean((entry >= 0) & (entry < entries))
        q = divide31(cutlass.max(Int32(0), entry), by_columns)
        c = entry - q * columns
        source = Int64(q) * table_strides[0] + Int64(c) * table_strides[1]
        values.append(memory.load_global(block_table.toint() + source * 4, 1, inside)[0])
        places.append((inside, Int64(q) * out_strides[0] + Int64(c) * out_strides[1]))
    for item in cutlass.range_constexpr(TABLE_ITEMS):
        inside, place = places[item]
        page = values[item]
        if page >= 0:
            page = divide31(page, by_scale)
        memory.store_global(table_out.toint() + place * 4, [page], inside)


@cute.jit
def _list_work(
    thread: Int32,
    seq_lens: cute.Pointer,
    slots: cute.Pointer,
    hist_len: cute.Pointer,
    bank: cute.Pointer,
    work: cute.Pointer,
    n_commit: cute.Pointer,
    of_warps: cute.Tensor,
    slot_stride: Int32,
    requests: Int32,
    histories: Int32,
    tokens: Int32,
    window: Int32,
) -> None:
    """The work items, by one CTA: a thread has consecutive requests, counts those that are
    committed in the lower half of a word and other real ones in the upper half, and then knows
    where its own go.
    """
    each = (requests + THREADS - 1) // THREADS
    first = thread * each
    last = cutlass.min(first + each, requests)
    mine = Int32(0)
    for b in cutlass.range(first, last, unroll=1):
        _, _, kind = _history(b, seq_lens, slots, hist_len, slot_stride, histories, tokens, window)
        mine = mine + kind
    before, total = sum_before(mine, of_warps, thread)
    committed = total & 0xFFFF
    real = committed + (total >> 16)
    for b in cutlass.range(first, last, unroll=1):
        slot, length, kind = _history(
            b, seq_lens, slots, hist_len, slot_stride, histories, tokens, window
        )
        of_bank = Int32(0)
        if slot >= 0:
            of_bank = memory.load_word(bank, Int64(slot))
        commits = before & 0xFFFF
        others = before >> 16
        place = real + b - commits - others
        if kind == 1:
            place = commits
        elif kind != 0:
            place = committed + others
        line = Int64(place) * 4
        memory.store_word(work, line, b)
        memory.store_word(work, line + 1, slot)
        memory.store_word(work, line + 2, length)
        memory.store_word(work, line + 3, of_bank)
        before = before + kind
    if thread == 0:
        memory.store_word(n_commit, Int64(0), committed)


@cute.jit
def _history(
    b: Int32,
    seq_lens: cute.Pointer,
    slots: cute.Pointer,
    hist_len: cute.Pointer,
    slot_stride: Int32,
    histories: Int32,
    tokens: Int32,
    window: Int32,
) -> tuple[Int32, Int32, Int32]:
    """A request's history slot or -1, its length or 0, and what it counts as: 1 if it is committed,
    2^16 if it is not, 0 without a slot.
    """
    slot = memory.load_word(slots, Int64(b) * slot_stride)
    length = Int32(0)
    kind = Int32(0)
    if (slot >= 0) & (slot < histories):
        length = memory.load_word(hist_len, Int64(slot))
        count = tokens
        if tokens == 0:
            count = cutlass.max(Int32(0), memory.load_word(seq_lens, Int64(b)))
        kind = Int32(1 << 16)
        if Int64(length) + count > window:
            kind = Int32(1)
    else:
        slot = Int32(-1)
    return slot, length, kind


def lower(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """The host function of a plan and its fake arguments, for ``cute.compile``."""
    wide = plan["index"] == "int64"

    @host_name("step_setup")
    @cute.jit
    def step_setup(
        kv_lens: cute.Tensor,
        seq_lens: cute.Tensor,
        block_table: cute.Tensor,
        request_of_row: cute.Tensor,
        position_of_row: cute.Tensor,
        visible_of_row: cute.Tensor,
        page_of_row: cute.Tensor,
        within_of_row: cute.Tensor,
        first_position: cute.Tensor,
        ordinal_of_row: cute.Tensor,
        position_of_row_int64: cute.Tensor,
        length_of_row: cute.Tensor,
        cache_slot: cute.Tensor,
        group_slot: cute.Tensor,
        table_out: cute.Tensor,
        work: cute.Tensor,
        n_commit: cute.Tensor,
        slots: cute.Tensor,
        hist_len: cute.Tensor,
        bank: cute.Tensor,
        tokens: Int32,
        page_size: Int32,
        group: Int32,
        page_groups: Int32,
        scale: Int32,
        window: Int32,
        launches: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(
            *(OP, plan),
            kv_lens=kv_lens,
            seq_lens=seq_lens,
            block_table=block_table,
            request_of_row=request_of_row,
            ordinal_of_row=ordinal_of_row,
            position_of_row_int64=position_of_row_int64,
            length_of_row=length_of_row,
            cache_slot=cache_slot,
            group_slot=group_slot,
            table_out=table_out,
            work=work,
            n_commit=n_commit,
            slots=slots,
            hist_len=hist_len,
            bank=bank,
            tokens=tokens,
            page_size=page_size,
            group=group,
            page_groups=page_groups,
            scale=scale,
            window=window,
        )
        if launches > 0:
            requests = Int32(kv_lens.shape[0])
            rows = Int32(request_of_row.shape[0])
            columns = Int32(block_table.shape[1])
            optional = (
                (ORDINAL, ordinal_of_row),
                (WIDE_POSITION, position_of_row_int64),
                (LENGTH, length_of_row),
                (CACHE_SLOT, cache_slot),
                (GROUP_SLOT, group_slot),
            )
            wanted = Int32(0)
            for bit, tensor in optional:
                wanted = wanted + Int32(tensor.shape[0] > 0) * bit
            entries = requests * columns * Int32(table_out.shape[0] > 0)
            # At least one CTA: a call with nothing to write loads the code.
            threads = cutlass.max(Int32(1), cutlass.max(rows, requests))
            row_ctas = cute.ceil_div(threads, THREADS)
            table_ctas = cute.ceil_div(entries, THREADS * TABLE_ITEMS)
            work_ctas = Int32(work.shape[0] > 0)
            _step_setup(
                kv_lens.iterator,
                seq_lens.iterator,
                block_table.iterator,
                request_of_row.iterator,
                position_of_row.iterator,
                visible_of_row.iterator,
                page_of_row.iterator,
                within_of_row.iterator,
                first_position.iterator,
                ordinal_of_row.iterator,
                position_of_row_int64.iterator,
                length_of_row.iterator,
                cache_slot.iterator,
                group_slot.iterator,
                table_out.iterator,
                work.iterator,
                n_commit.iterator,
                slots.iterator,
                hist_len.iterator,
                bank.iterator,
                (block_table.stride[0], block_table.stride[1]),
                (table_out.stride[0], table_out.stride[1]),
                slots.stride[0],
                requests,
                rows,
                columns,
                Int32(hist_len.shape[0]),
                tokens,
                page_size,
                group,
                page_groups,
                window,
                wanted,
                row_ctas,
                table_ctas,
                reciprocal31(cutlass.max(Int32(1), tokens)),
                reciprocal31(page_size),
                reciprocal31(group),
                reciprocal31(scale),
                reciprocal31(cutlass.max(Int32(1), columns)),
                wide,
            ).launch(
                grid=[row_ctas + table_ctas + work_ctas, 1, 1],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    return step_setup, fakes.arguments(OP, plan)

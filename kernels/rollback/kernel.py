"""Rollback of rows that a verify step wrote and the target model rejected: save, then put back.

A verify step writes index-side cache rows (index keys of every sparse layer, the positions they
share) before it is known which draft tokens are accepted. ``gather`` copies the old rows of all
planes into a snapshot before the step's first write; ``restore`` or ``commit`` copies the rejected
ones back. Planes are moved as bits, whatever their dtype. Each op is one launch.

Arguments, all on one CUDA device; g, r, c: taken by gather, restore, commit; I is the cell's dtype,
int32 or int64. Vectors and tables are dense.

============  =======================  =====  ====================================================
argument      shape, dtype             ops    meaning
============  =======================  =====  ====================================================
planes        [planes, 8] int64        g r c  plane table: ``plans.rollback.Plane``, field by field
pages         [rows] I                 g r c  page of each verify row
within        [rows] I                 g r c  place of the row in its page
old           [>= rows, record] uint8  g r c  snapshot, row r of a plane at its ``record_offset``;
                                              16-byte aligned, row stride a multiple of 16
pending       [1] int32                g r c  the snapshot's shares, 0: not pending (zero at start)
rejected      [rows] int32             r      not 0: the row goes back
accepted      [requests] int32         c      accepted tokens n, the target model's own included
row_requests  [>= rows or 0] int32     c      request of each row; read only if tokens is 0
row_ordinals  [same] int32             c      ordinal of each row in its request; likewise
states        [states, 9] int64        c      state table: ``plans.rollback.State``, field by field
slots         [requests or 0] int32    c      state slot of each request; empty: nothing staged
cursors       [slots or 0] int32       c      replay cursors; empty: none
tokens        int32                    c      rows of a request, rows in request order; 0: listed
record_bytes  int32                    g r c  bytes of a record, from the layout
plane_count   int32                    g r c  planes, from the layout
splits        int32                    g r c  chunks of a plane's rows, from the plan; 0: no launch
overlap       int32, 0 or 1            g r c  programmatic dependent launch, from the plan
============  =======================  =====  ====================================================

- gather(planes, pages, within, old, pending, record_bytes, plane_count, splits, overlap)
- restore(planes, pages, within, old, pending, rejected, record_bytes, plane_count, splits, overlap)
- commit(planes, pages, within, old, pending, accepted, row_requests, row_ordinals, states, slots,
  cursors, tokens, record_bytes, plane_count, splits, overlap)

Semantics, for every plane and every row r whose page lies in [0, pages) and whose place lies in
[0, page_tokens); any other row is skipped, nothing wraps:

- gather: ``old[r] = plane[pages[r], within[r]]``; then the snapshot is pending.
- restore: ``plane[pages[r], within[r]] = old[r]`` where ``rejected[r]`` is not 0.
- commit: the same where ``ordinal(r) >= max(n, 1)``, n of the row's request. A row of no request
  (outside [0, requests)) is padding and stays. For each request g with slot s: in every state pool
  that has a slot s, ``pool[s] = candidates[g, min(max(n, 1), candidates) - 1]``, cast to the
  pool's dtype; and ``cursors[s] = max(n, 1) - 1`` if there is such a cursor. A dummy request has
  slot -1 and changes neither. A count below 1 is read as 1, everywhere.
- restore and commit do nothing unless the snapshot is pending, and consume it: a second one, with
  whichever op and grid, in a replayed graph too, is a no-op. Each CTA takes its share of
  ``pending`` when its threads have used what they read there, and all shares make what gather put
  there: no CTA of the launch that consumes a snapshot can find it consumed.

Nothing else is written: no other row, page, pool, slot or cursor, and in ``old`` no skipped row,
no row past ``rows`` and no byte between planes. Rows may share a place: they were saved with equal
bits, so the place goes back if any of them is rejected. Requests may share a slot only where they
write equal values.

The compiled module checks arity, dtypes, ranks, the tables' widths, equal lengths of pages, within
and rejected and of the two row lists, dense vectors and tables, ``old``'s alignment and row stride,
and devices. The host side raises RuntimeError and launches nothing unless ``old`` holds ``rows``
rows and the layout's record bytes, the plane table has the layout's planes, tokens >= 0, with
tokens 0 the lists hold ``rows`` entries, else rows = requests x tokens, slots is as long as
accepted or empty with nothing staged, and there are at most 64 states (the grid's second extent
stays below 65536). A Python wrapper must check that rows >= 1 (else nothing to do, no launch).

**How a server builds the tables**, once at start. For each cache tensor ``[pages, page_tokens,
*row]``, of any dtype, rows dense, pages and rows at any stride: ``plane(t.data_ptr(), page stride
in bytes, row stride in bytes, pages, page_tokens, row bytes)``. ``layout`` gives each its place in
a record, and ``table()`` the rows of the int64 tensor; ``state`` and ``state_table`` do the same
for staged states. The tables hold addresses: the caches, pools and candidate buffers must stay
where they are and outlive them. A launch reads the plane table before it waits for its predecessor,
so the upload must be complete (synchronise) before the first launch. ``old`` and ``pending`` are
allocated at the same time and kept; then every op can be captured.

Why it is as it is. Figures: one H200, nodes of a CUDA graph, 12 planes of 256-byte rows and one of
12 bytes, back to back over rotating buffers unless said otherwise; torch index ops for comparison:

- At 4 rows: gather 1.0 us, restore and commit 1.2, commit with two state pools 1.5 (torch: 54 and
  117). At 2048 rows, cold: gather 5.8 us, restoring all rows 5.9 (torch: 88 and 182; ``copy_`` of
  as many bytes in one piece: 5.1). In L2, with slower index loads than now: gather 3.5, restore
  3.6. All of this before records were aligned to cache lines (3088 bytes a record, not 3200).
- One CTA moves a chunk of one plane's rows, so that the access width (16, 8 or 4 bytes, by the
  plane's alignment) is a uniform branch and no specialization. The least power of two of lanes
  that covers a row shares it, at most a warp.
- A saved row is loaded when its verdict is known, although that is one dependent load more: what
  gather skipped was never written, and must not be read.
- ``overlap`` starts the launch while its predecessor drains, and reads the plane table meanwhile:
  1.0 us instead of 1.6 at 4 rows behind a launch that signals its dependents, as these do; behind
  one that does not (a torch kernel) 1.9 instead of 1.6.
- Tried and dropped: asking L2 for the rows before the wait (gather 5.4 us instead of 6.0 in the
  same run at 2048 rows, restore 6.7 instead of 6.1); 256 threads, 2 or 8 rows in flight a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Numeric, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from specplan.kernels import ranges
from specplan.plans.plan import Plan
from specplan.plans.rollback import (
    CASTS,
    MAX_LANES,
    MAX_STATES,
    PLANE_FIELDS,
    SHARES,
    STATE_FIELDS,
    VECTOR,
    Plane,
    State,
)

_INDEX: dict[str, type[Numeric]] = {"int32": Int32, "int64": Int64}
_CAST_TYPES: dict[str, type[Numeric]] = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "float32": Float32,
    "int32": Int32,
    "int64": Int64,
}
_PLANE = {name: column for column, name in enumerate(Plane.__dataclass_fields__)}
_STATE = {name: column for column, name in enumerate(State.__dataclass_fields__)}

#: Accesses that a thread keeps in flight while it copies a staged state.
_STATE_UNROLL = 4


# ----- lowering -----------------------------------------------------------------------------------


def lower(plan: Plan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The host function of a plan and the fake arguments to compile it with; see the module
    docstring for the lists.
    """
    threads, unroll = plan.int("threads"), plan.int("unroll")
    index = _INDEX[str(plan["index"])]
    rows = cute.sym_int()

    def array(dtype: type[Numeric], length: Any) -> Any:
        return make_fake_compact_tensor(dtype, (length,), assumed_align=dtype.width // 8)

    planes = make_fake_compact_tensor(
        Int64, (cute.sym_int(), PLANE_FIELDS), stride_order=(1, 0), assumed_align=8
    )
    # Symbols of one width: the compiler (4.8.1) misreads a stride where a tensor mixes 32- and
    # 64-bit ones.
    old = make_fake_tensor(
        Uint8,
        (cute.sym_int(), cute.sym_int()),
        (cute.sym_int(divisibility=VECTOR), 1),
        assumed_align=VECTOR,
    )
    common = (planes, array(index, rows), array(index, rows), old, array(Int32, 1))
    integers = tuple(Int32(1) for _ in range(4))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)

    if plan.op == "gather":

        @cute.jit
        def rollback_gather(
            planes: cute.Tensor,
            pages: cute.Tensor,
            within: cute.Tensor,
            old: cute.Tensor,
            pending: cute.Tensor,
            record_bytes: Int32,
            plane_count: Int32,
            splits: Int32,
            overlap: Int32,
            stream: Any,
        ) -> None:
            ranges.refuse_unless(*_fits(planes, pages, old, record_bytes, plane_count))
            if splits > 0:
                chunk = (pages.shape[0] + splits - 1) // splits
                _gather(planes, pages, within, old, pending, chunk, threads, unroll).launch(
                    grid=(planes.shape[0], splits, 1),
                    block=(threads, 1, 1),
                    stream=stream,
                    use_pdl=overlap,
                )

        return rollback_gather, (*common, *integers, stream)

    if plan.op == "restore":

        @cute.jit
        def rollback_restore(
            planes: cute.Tensor,
            pages: cute.Tensor,
            within: cute.Tensor,
            old: cute.Tensor,
            pending: cute.Tensor,
            rejected: cute.Tensor,
            record_bytes: Int32,
            plane_count: Int32,
            splits: Int32,
            overlap: Int32,
            stream: Any,
        ) -> None:
            ranges.refuse_unless(*_fits(planes, pages, old, record_bytes, plane_count))
            if splits > 0:
                chunk = (pages.shape[0] + splits - 1) // splits
                _restore(
                    planes,
                    pages,
                    within,
                    old,
                    pending,
                    rejected,
                    chunk,
                    threads,
                    unroll,
                ).launch(
                    grid=(planes.shape[0], splits, 1),
                    block=(threads, 1, 1),
                    stream=stream,
                    use_pdl=overlap,
                )

        return rollback_restore, (*common, array(Int32, rows), *integers, stream)

    @cute.jit
    def rollback_commit(
        planes: cute.Tensor,
        pages: cute.Tensor,
        within: cute.Tensor,
        old: cute.Tensor,
        pending: cute.Tensor,
        accepted: cute.Tensor,
        row_requests: cute.Tensor,
        row_ordinals: cute.Tensor,
        states: cute.Tensor,
        slots: cute.Tensor,
        cursors: cute.Tensor,
        tokens: Int32,
        record_bytes: Int32,
        plane_count: Int32,
        splits: Int32,
        overlap: Int32,
        stream: Any,
    ) -> None:
        rows, requests = pages.shape[0], accepted.shape[0]
        ranges.refuse_unless(
            *_fits(planes, pages, old, record_bytes, plane_count),
            tokens >= 0,
            (tokens > 0) | (row_requests.shape[0] >= rows),
            (tokens == 0) | (Int64(requests) * tokens == rows),
            (slots.shape[0] == requests)
            | ((slots.shape[0] == 0) & (states.shape[0] == 0) & (cursors.shape[0] == 0)),
            states.shape[0] <= MAX_STATES,
        )
        if splits > 0:
            chunk = (pages.shape[0] + splits - 1) // splits
            parts = states.shape[0] * slots.shape[0] + (slots.shape[0] + threads - 1) // threads
            reciprocal = Int64(0)
            if tokens > 0:
                reciprocal = ((Int64(1) << 32) + tokens - 1) // Int64(tokens)
            _commit(
                planes,
                pages,
                within,
                old,
                pending,
                accepted,
                row_requests,
                row_ordinals,
                states,
                slots,
                cursors,
                tokens,
                reciprocal,
                splits,
                chunk,
                threads,
                unroll,
            ).launch(
                grid=(
                    planes.shape[0],
                    splits + (parts + planes.shape[0] - 1) // planes.shape[0],
                    1,
                ),
                block=(threads, 1, 1),
                stream=stream,
                use_pdl=overlap,
            )

    listed = cute.sym_int()
    states = make_fake_compact_tensor(
        Int64, (cute.sym_int(), STATE_FIELDS), stride_order=(1, 0), assumed_align=8
    )
    return rollback_commit, (
        *common,
        array(Int32, cute.sym_int()),
        array(Int32, listed),
        array(Int32, listed),
        states,
        array(Int32, cute.sym_int()),
        array(Int32, cute.sym_int()),
        Int32(1),
        *integers,
        stream,
    )


def _fits(
    planes: cute.Tensor,
    pages: cute.Tensor,
    old: cute.Tensor,
    record_bytes: Int32,
    plane_count: Int32,
) -> tuple[Any, ...]:
    """What must hold of the plane table and the snapshot, in every op."""
    return (
        old.shape[0] >= pages.shape[0],
        old.shape[1] >= record_bytes,
        planes.shape[0] == plane_count,
    )


# ----- kernels: one CTA moves a chunk of one plane's rows -----------------------------------------


@cute.kernel
def _gather(
    planes: cute.Tensor,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    pending: cute.Tensor,
    chunk: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    block, split, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    plane = _plane(planes, block, thread)
    first = split * chunk
    last = cutlass.min(first + chunk, pages.shape[0])

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if block == 0 and split == 0 and thread == 0:
        pending[0] = Int32(SHARES)
    if plane.vector == 16:
        _save_rows(plane, pages, within, old, first, last, 16, threads, unroll)
    elif plane.vector == 8:
        _save_rows(plane, pages, within, old, first, last, 8, threads, unroll)
    else:
        _save_rows(plane, pages, within, old, first, last, 4, threads, unroll)


@cute.kernel
def _restore(
    planes: cute.Tensor,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    pending: cute.Tensor,
    rejected: cute.Tensor,
    chunk: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    block, split, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    plane = _plane(planes, block, thread)
    first = split * chunk
    last = cutlass.min(first + chunk, pages.shape[0])
    judge = _Mask(rejected)

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    live = _pending(pending)
    _restore_plane(plane, pages, within, old, judge, live, first, last, threads, unroll)
    _consume(pending, live)


@cute.kernel
def _commit(
    planes: cute.Tensor,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    pending: cute.Tensor,
    accepted: cute.Tensor,
    row_requests: cute.Tensor,
    row_ordinals: cute.Tensor,
    states: cute.Tensor,
    slots: cute.Tensor,
    cursors: cute.Tensor,
    tokens: Int32,
    reciprocal: Int64,
    splits: Int32,
    chunk: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    block, split, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    plane = _plane(planes, block, thread)
    first = split * chunk
    last = cutlass.min(first + chunk, pages.shape[0])
    judge = _Counts(accepted, row_requests, row_ordinals, tokens, reciprocal)

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    live = _pending(pending)
    if split < splits:
        _restore_plane(plane, pages, within, old, judge, live, first, last, threads, unroll)
    else:
        part = (split - splits) * planes.shape[0] + block
        copies = states.shape[0] * slots.shape[0]
        if part < copies:
            which = part // slots.shape[0]
            request = part - which * slots.shape[0]
            _commit_state(states, which, request, accepted, slots, live, thread, threads)
        else:
            request = (part - copies) * threads + thread
            if request < slots.shape[0]:
                _advance_cursor(request, accepted, slots, cursors, live)
    _consume(pending, live)


# ----- rows ---------------------------------------------------------------------------------------


class _View(NamedTuple):
    """A plane as one thread sees it, read before the grid waits for its predecessor."""

    base: Int64
    page_stride: Int64
    row_stride: Int64
    pages: Int32
    page_tokens: Int32
    record_offset: Int32
    vector: Int32
    items: Int32
    lane: Int32
    lanes: Int32
    row: Int32
    shift: Int32


class _Mask(NamedTuple):
    """The rejected rows as a mask."""

    rejected: cute.Tensor


class _Counts(NamedTuple):
    """The rejected rows as accepted counts; row r is token r mod tokens of request r / tokens, or
    listed if tokens is 0.
    """

    accepted: cute.Tensor
    row_requests: cute.Tensor
    row_ordinals: cute.Tensor
    tokens: Int32
    reciprocal: Int64


def _plane(planes: cute.Tensor, plane: Int32, thread: Int32) -> _View:
    def field(name: str) -> Int64:
        return planes[plane, _PLANE[name]]

    vector = Int32(field("vector"))
    items = Int32(field("row_bytes")) >> (2 + Int32(vector > 4) + Int32(vector > 8))
    shift = Int32(0)
    for power in range(MAX_LANES.bit_length() - 1):
        shift += Int32(items > (1 << power))
    lanes = Int32(1) << shift
    return _View(
        base=field("base"),
        page_stride=field("page_stride"),
        row_stride=field("row_stride"),
        pages=Int32(field("pages")),
        page_tokens=Int32(field("page_tokens")),
        record_offset=Int32(field("record_offset")),
        vector=vector,
        items=items,
        lane=thread & (lanes - 1),
        lanes=lanes,
        row=thread >> shift,
        shift=shift,
    )


@cute.jit
def _save_rows(
    plane: _View,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    first: Int32,
    last: Int32,
    width: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    step = Int32(threads) >> plane.shift
    for base in cutlass.range(first + plane.row, last, step * unroll, unroll=1):
        rows = [cutlass.min(base + i * step, last - 1) for i in range(unroll)]
        places = [(_read(pages, row), _read(within, row)) for row in rows]
        there = [
            Boolean(base + i * step < last) & _exists(plane, *places[i]) for i in range(unroll)
        ]
        sources = [_row_address(plane, *place) for place in places]
        targets = [_record_address(plane, old, row) for row in rows]
        for item in cutlass.range(plane.lane, plane.items, plane.lanes, unroll=1):
            offset = Int64(item * width)
            words = [_load(sources[i] + offset, width, there[i]) for i in range(unroll)]
            for i in cutlass.range_constexpr(unroll):
                _store(targets[i] + offset, words[i], there[i])


@cute.jit
def _restore_plane(
    plane: _View,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    judge: _Mask | _Counts,
    live: Boolean,
    first: Int32,
    last: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    if plane.vector == 16:
        _restore_rows(plane, pages, within, old, judge, live, first, last, 16, threads, unroll)
    elif plane.vector == 8:
        _restore_rows(plane, pages, within, old, judge, live, first, last, 8, threads, unroll)
    else:
        _restore_rows(plane, pages, within, old, judge, live, first, last, 4, threads, unroll)


@cute.jit
def _restore_rows(
    plane: _View,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    judge: _Mask | _Counts,
    live: Boolean,
    first: Int32,
    last: Int32,
    width: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    step = Int32(threads) >> plane.shift
    for base in cutlass.range(first + plane.row, last, step * unroll, unroll=1):
        rows = [cutlass.min(base + i * step, last - 1) for i in range(unroll)]
        inside = [Boolean(base + i * step < last) for i in range(unroll)]
        sources = [_record_address(plane, old, row) for row in rows]
        places = [(_read(pages, row), _read(within, row)) for row in rows]
        chosen = [_rejected(judge, row) for row in rows]
        targets = [_row_address(plane, *place) for place in places]
        back = [inside[i] & chosen[i] & live & _exists(plane, *places[i]) for i in range(unroll)]
        for item in cutlass.range(plane.lane, plane.items, plane.lanes, unroll=1):
            offset = Int64(item * width)
            words = [_load(sources[i] + offset, width, back[i]) for i in range(unroll)]
            for i in cutlass.range_constexpr(unroll):
                _store(targets[i] + offset, words[i], back[i])


@cute.jit
def _rejected(judge: _Mask | _Counts, row: Int32) -> Boolean:
    """Whether the row goes back. A row of no request is left alone, and so is ordinal 0 whatever
    the count says.
    """
    verdict = Boolean(False)
    if cutlass.const_expr(isinstance(judge, _Mask)):
        verdict = Boolean(_read(judge.rejected, row) != 0)
    else:
        listed = Boolean(judge.tokens == 0)
        given_request = _read(judge.row_requests, row, listed)
        given_ordinal = _read(judge.row_ordinals, row, listed)
        request = Int32((Int64(row) * judge.reciprocal) >> 32)
        ordinal = row - request * judge.tokens
        if listed:
            request = given_request
            ordinal = given_ordinal
        real = (request >= 0) & (request < judge.accepted.shape[0])
        count = _read(judge.accepted, request, real)
        verdict = real & (ordinal >= cutlass.max(count, 1))
    return verdict


def _exists(plane: _View, page: Numeric, place: Numeric) -> Boolean:
    return (page >= 0) & (page < plane.pages) & (place >= 0) & (place < plane.page_tokens)


def _row_address(plane: _View, page: Numeric, place: Numeric) -> Int64:
    return plane.base + Int64(page) * plane.page_stride + Int64(place) * plane.row_stride


def _record_address(plane: _View, old: cute.Tensor, row: Int32) -> Int64:
    return old.iterator.toint() + Int64(row) * old.stride[0] + plane.record_offset


# ----- staged state -------------------------------------------------------------------------------


@cute.jit
def _commit_state(
    states: cute.Tensor,
    which: Int32,
    request: Int32,
    accepted: cute.Tensor,
    slots: cute.Tensor,
    live: Boolean,
    thread: Int32,
    threads: cutlass.Constexpr,
) -> None:
    """``pool[slots[g]] = candidates[g, n - 1]`` for one state pool and request, with n clamped to
    1..candidates.
    """
    count = accepted[request]
    slot = slots[request]
    chosen = cutlass.min(cutlass.max(count, 1), Int32(states[which, _STATE["candidates"]])) - 1
    source = (
        states[which, _STATE["candidates_base"]]
        + Int64(request) * states[which, _STATE["request_stride"]]
        + Int64(chosen) * states[which, _STATE["candidate_stride"]]
    )
    target = states[which, _STATE["pool_base"]] + Int64(slot) * states[which, _STATE["slot_stride"]]
    items = Int32(states[which, _STATE["items"]])
    kind = Int32(states[which, _STATE["kind"]])
    if live and slot >= 0 and slot < Int32(states[which, _STATE["slots"]]):
        if kind == 16:
            _copy_state(source, target, items, thread, 16, threads)
        elif kind == 8:
            _copy_state(source, target, items, thread, 8, threads)
        elif kind == 4:
            _copy_state(source, target, items, thread, 4, threads)
        for (given, wanted), code in CASTS.items():
            if kind == code:
                _cast_state(
                    source, target, items, thread, _CAST_TYPES[given], _CAST_TYPES[wanted], threads
                )


@cute.jit
def _copy_state(
    source: Int64,
    target: Int64,
    items: Int32,
    thread: Int32,
    width: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    for base in cutlass.range(thread, items, threads * _STATE_UNROLL, unroll=1):
        inside = [Boolean(base + i * threads < items) for i in range(_STATE_UNROLL)]
        offsets = [Int64(base + i * threads) * width for i in range(_STATE_UNROLL)]
        words = [_load(source + offsets[i], width, inside[i]) for i in range(_STATE_UNROLL)]
        for i in cutlass.range_constexpr(_STATE_UNROLL):
            _store(target + offsets[i], words[i], inside[i])


@cute.jit
def _cast_state(
    source: Int64,
    target: Int64,
    items: Int32,
    thread: Int32,
    given: cutlass.Constexpr,
    wanted: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    candidate = _vector(given, source, items)
    pool = _vector(wanted, target, items)
    for item in cutlass.range(thread, items, threads, unroll=_STATE_UNROLL):
        pool[item] = candidate[item].to(wanted)


def _vector(dtype: type[Numeric], address: Int64, items: Int32) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(items))


@cute.jit
def _advance_cursor(
    request: Int32, accepted: cute.Tensor, slots: cute.Tensor, cursors: cute.Tensor, live: Boolean
) -> None:
    """``cursors[slots[g]] = max(n - 1, 0)``; a dummy request has no slot and leaves every cursor as
    it was.
    """
    slot = slots[request]
    if live and slot >= 0 and slot < cursors.shape[0]:
        cursors[slot] = cutlass.max(accepted[request], 1) - 1


# ----- the snapshot's shares ----------------------------------------------------------------------


def _pending(pending: cute.Tensor) -> Boolean:
    shares = cute.arch.load(pending.iterator, Int32, sem="relaxed", scope="gpu")
    return Boolean(shares > 0)


@cute.jit
def _consume(pending: cute.Tensor, live: Boolean) -> None:
    """Take this CTA's share, after every thread has used what it read: the last CTA to do so leaves
    zero.
    """
    cute.arch.sync_threads()
    thread, _, _ = cute.arch.thread_idx()
    if live and thread == 0:
        block, split, _ = cute.arch.block_idx()
        wide, high, _ = cute.arch.grid_dim()
        share = Int32(1)
        if block == 0 and split == 0:
            share = Int32(SHARES) - (wide * high - 1)
        cute.arch.red(pending.iterator, -share, op="add", dtype=Int32, sem="relaxed", scope="gpu")


# ----- memory: raw addresses, predicated accesses of 4, 8 or 16 bytes -----------------------------


def _read(vector: cute.Tensor, index: Int32, when: Boolean | None = None) -> Numeric:
    """One element, undefined unless ``when``, in program order: a plain load is scheduled ahead of
    ``old``'s rows.
    """
    dtype = vector.element_type
    return cute.arch.inline_ptx(
        f"ld.global.b{dtype.width} {{$w0}}, [{{$r0}}];",
        write_only_types=[dtype],
        read_only_args=[vector.iterator.toint() + Int64(index) * (dtype.width // 8)],
        predicate=when,
    )


def _load(address: Int64, width: int, when: Boolean) -> list[Int32]:
    """``width`` bytes as 32-bit words if ``when``, undefined words otherwise. Rows are read once:
    L1 is not filled.
    """
    words = width // 4
    vector = "" if words == 1 else f".v{words}"
    targets = ", ".join(f"{{$w{i}}}" for i in range(words))
    if words > 1:
        targets = "{" + targets + "}"
    value = cute.arch.inline_ptx(
        f"ld.global.L1::no_allocate{vector}.b32 {targets}, [{{$r0}}];",
        write_only_types=[Int32] * words,
        read_only_args=[address],
        predicate=when,
    )
    return [value] if words == 1 else list(value)


def _store(address: Int64, words: list[Int32], when: Boolean) -> None:
    vector = "" if len(words) == 1 else f".v{len(words)}"
    sources = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    if len(words) > 1:
        sources = "{" + sources + "}"
    cute.arch.inline_ptx(
        f"st.global{vector}.b32 [{{$r0}}], {sources};",
        read_only_args=[address, *words],
        predicate=when,
    )

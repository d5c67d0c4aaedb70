"""``scatter``: the sampler's store update in one launch.

All tensors are int32 on one CUDA device. N rows of outputs, S store slots; H, X and D are the
widths of the history, next and draft stores (compile-time constants of the plan), a, b and c those
of the outputs (run time, each may be narrower, equal, wider or zero).

====================  ===========  ===============================================================
new_tokens            [N, a]       accepted tokens of each row; only the first ``lens`` were written
next_new_tokens       [N, b]       input tokens of the next step
lens                  [N]          accepted lengths, used raw
next_draft_tokens     [N, c]       drafts of the next step
slots                 [>= rows]    distinct store slot of each moved row
store_new_tokens      [H, S, 1]    token-major history store
store_next_new_tokens [X, S, 1]    token-major next-input store
store_lens            [S]
store_next_draft      [S, D]       slot-major draft store
====================  ===========  ===============================================================

For r in [0, rows), i = row_begin + r, s = slots[r], n = lens[i]::

    store_new_tokens[w, s]      = new_tokens[i, w]        if w < min(a, n) else 0
    store_next_new_tokens[w, s] = next_new_tokens[i, w]   if w < b else 0
    store_next_draft[s, w]      = next_draft_tokens[i, w] if w < c else 0
    store_lens[s]               = n

A column at or past n is never read: its producer may not have written it. Nothing else is written;
a slot outside [0, S) is skipped. Rows may be strided; columns are dense.

Compiled function: ``scatter(new_tokens, next_new_tokens, lens, next_draft_tokens, slots,
store_new_tokens, store_next_new_tokens, store_lens, store_next_draft, row_begin, rows, columns)``.
It launches nothing and raises RuntimeError unless ``0 <= row_begin``, ``0 <= rows``, ``row_begin +
rows <= N``, ``rows <= len(slots)`` and ``columns == a``, the width that the plan was picked for.

One thread per (row, column), with the columns along the lanes of a power of two, so that no thread
divides. The longest chain is lens -> new_tokens -> store, two dependent loads; slots, the other
outputs and lens are all in flight before the first use.

The launch overlaps its predecessor's end (programmatic dependent launch): a CTA is placed early and
waits before its first load, so what earlier kernels wrote is there. On an H200 that takes
back-to-back calls in a graph at 8 x 8 from 1.16 to 1.00 us per node, and passing pointers instead
of whole tensors took it from 1.25 to 1.16 (an empty kernel: 0.54).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from specplan.kernels import fakes, ranges
from specplan.kernels.device import memory
from specplan.plans.plan import Plan
from specplan.plans.scatter import OP

#: 128 and 64 threads measure the same at 8 x 8; at 64 x 8, 128 are faster (0.99 against 1.12 us
#: per node).
THREADS = 128


@cute.kernel
def _scatter(
    new_tokens: cute.Pointer,
    next_new_tokens: cute.Pointer,
    lens: cute.Pointer,
    next_draft_tokens: cute.Pointer,
    slots: cute.Pointer,
    store_new_tokens: cute.Pointer,
    store_next_new_tokens: cute.Pointer,
    store_lens: cute.Pointer,
    store_next_draft: cute.Pointer,
    widths: tuple[Int32, Int32, Int32],
    strides: tuple[Int32, Int32, Int32],
    store_strides: tuple[Int32, Int32, Int32],
    size: Int32,
    row_begin: Int32,
    rows: Int32,
    shape: cutlass.Constexpr[tuple[int, int, int]],
    lanes: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    w = thread % lanes
    r = cta * (THREADS // lanes) + thread // lanes
    history, nexts, drafts = shape
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if r < rows:
        i = row_begin + r
        s = memory.load_word(slots, Int64(r))
        n = memory.load_word(lens, Int64(i))
        following = Int32(0)
        if w < nexts and w < widths[1]:
            following = memory.load_word(next_new_tokens, Int64(i) * strides[1] + w)
        draft = Int32(0)
        if w < drafts and w < widths[2]:
            draft = memory.load_word(next_draft_tokens, Int64(i) * strides[2] + w)
        accepted = Int32(0)
        if w < n and w < history and w < widths[0]:
            accepted = memory.load_word(new_tokens, Int64(i) * strides[0] + w)

        if s >= 0 and s < size:
            if w < nexts:
                memory.store_word(store_next_new_tokens, Int64(w) * store_strides[1] + s, following)
            if w < drafts:
                memory.store_word(store_next_draft, Int64(s) * store_strides[2] + w, draft)
            if w == 0:
                memory.store_word(store_lens, Int64(s), n)
            if w < history:
                memory.store_word(store_new_tokens, Int64(w) * store_strides[0] + s, accepted)


def lower(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """The host function of a plan and its fake arguments, for ``cute.compile``."""
    history, nexts, drafts = plan.int("history"), plan.int("next"), plan.int("draft")
    lanes = plan.int("lanes")

    @cute.jit
    def scatter(
        new_tokens: cute.Tensor,
        next_new_tokens: cute.Tensor,
        lens: cute.Tensor,
        next_draft_tokens: cute.Tensor,
        slots: cute.Tensor,
        store_new_tokens: cute.Tensor,
        store_next_new_tokens: cute.Tensor,
        store_lens: cute.Tensor,
        store_next_draft: cute.Tensor,
        row_begin: Int32,
        rows: Int32,
        columns: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(
            *(OP, plan),
            new_tokens=new_tokens,
            slots=slots,
            row_begin=row_begin,
            rows=rows,
            columns=columns,
        )
        # A grid of at least one CTA, so that a call with no rows is a launch that does nothing: it
        # is how code is loaded ahead of a graph capture.
        grid = cutlass.max(Int32(1), cute.ceil_div(rows, THREADS // lanes))
        _scatter(
            new_tokens.iterator,
            next_new_tokens.iterator,
            lens.iterator,
            next_draft_tokens.iterator,
            slots.iterator,
            store_new_tokens.iterator,
            store_next_new_tokens.iterator,
            store_lens.iterator,
            store_next_draft.iterator,
            (new_tokens.shape[1], next_new_tokens.shape[1], next_draft_tokens.shape[1]),
            (new_tokens.stride[0], next_new_tokens.stride[0], next_draft_tokens.stride[0]),
            (
                store_new_tokens.stride[0],
                store_next_new_tokens.stride[0],
                store_next_draft.stride[0],
            ),
            store_lens.shape[0],
            row_begin,
            rows,
            (history, nexts, drafts),
            lanes,
        ).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    return scatter, fakes.arguments(OP, plan)

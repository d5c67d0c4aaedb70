"""``draft_step``: what stands between two steps of a draft model, in one launch: the token, where
it goes, lengths, positions, and the page and slots of the next row.

B requests of one row each, context requests among them; K drafts a request, j is ``step``. What may
be left out is empty.

================  ====================  ==========================================================
target            [B, V] bf16, fp32     logits of the draft head, any row stride, V up to 262,144;
                  [B] int32, int64      or the token of each request, any stride
input_ids         [B] int32, int64      written: the token
drafts            [>= B, K] int32       any row stride; column j is written
scratch           [>= 2 B] int64        for logits: zero before the first launch; every launch
                                        leaves it zero
d2t               [D] int32, int64      D >= V; token = t + d2t[t], t itself outside 0..D-1
next_new_tokens   [>= B, > K] int32     any row stride; column j + 1 is written, and column 0 where
                                        ``next_token`` is given
next_token        [>= B] int32          the last accepted token, of ``accept``
kv_lens           [>= B] int32          in and out: + 1 if j < K - 1
positions         [A, >= B]             int32, int64; in and out: + 1 if j < K - 1; A up to 32 axes
slot              [>= B] int32          any stride; below 0 for a padding request
block_table       [>= B, C] int32       any strides; entry v: page ``v // scale``, none if v < 0
request_of_row    [>= B] int32          written
position_of_row   [>= B] int32          written
visible_of_row    [>= B] int32          written
page_of_row       [>= B] int32, int64   written; needs the table and page_size
within_of_row     [>= B] int32, int64   the same
cache_slot        [>= B] int64          the same
group_slot        [>= B] int64          the same, and ``page_size % group == 0``
================  ====================  ==========================================================

The token t of a row of logits is its argmax as torch orders it (``argmax``). A padding request has
the token of its row; its length and positions stay.

The next row of a request is its last one in the cache: p = kv_len - 1 with the length after the
move. Of it is said what ``step_setup`` says with one row a request::

    request  = b
    position = p
    visible  = (p + 1) // group
    page     = unscaled table[b, p // page_size], -1 if the table has no such column
    within   = p % page_size
    cache_slot = page * page_size + within                                 -1 if page < 0
    group_slot = page * (page_size // group) + within // group
                                          -1 if page < 0 or (p + 1) % group != 0

A padding request, and one with p < 0, is a padding row: request, position, page, cache_slot and
group_slot -1, visible and within 0. Elements at and past B are not written.

Compiled function: the tensors in the order of ``plans/draft_step.py``, then ``step, page_size,
group, page_groups, scale, splits``; ``page_groups`` is page_size // group. One for each dtype of
the target, for every step and whatever is left out. With ``splits`` 0 it checks its arguments and
launches nothing; it raises RuntimeError unless the rules there hold.

Logits: ``splits`` CTAs share a row as in ``argmax``; the last of a row settles its request and
zeroes its scratch. Ids: a warp a request. What is read of a request besides its logits is under way
before them, so that behind the last arrival only the key and ``d2t`` are waited for. Nothing
depends on the order of CTAs.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from specplan.kernels import fakes, ranges
from specplan.kernels.device import argmax, atomic, memory
from specplan.kernels.device.divide import reciprocal31
from specplan.kernels.device.names import kernel_name
from specplan.kernels.draft_step.settle import Early, Step, settle
from specplan.plans.accept import IDS
from specplan.plans.argmax import ITEM
from specplan.plans.draft_step import OP
from specplan.plans.plan import Plan

#: Threads of a CTA that takes ready ids: a warp a request.
IDS_THREADS = 128


@kernel_name("draft_step_logits")
@cute.kernel
def _draft_logits(
    target: Int64,
    row_stride: Int64,
    columns: Int32,
    chunk: Int32,
    addresses: tuple[Int64, ...],
    strides: tuple[Int32, ...],
    numbers: tuple[Int32, ...],
    by_page: tuple[Int64, Int32],
    by_group: tuple[Int64, Int32],
    by_scale: tuple[Int64, Int32],
    item: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    split, row, _ = cute.arch.block_idx()
    splits, _, _ = cute.arch.grid_dim()
    step = Step(addresses, strides, numbers, by_page, by_group, by_scale)
    begin = split * chunk
    end = cutlass.min(begin + chunk, columns)
    address = target + Int64(row) * row_stride * item
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    early = Early(step, row, thread, thread < 32)
    high, low = argmax.cta_best(address, begin, end, thread, item)
    if thread < 32:
        leader = thread == 0
        key = step.scratch + Int64(row) * 8
        counter = key + Int64(step.requests) * 8
        atomic.raise_key(key, low, high, leader)
        arrived = atomic.arrive(counter, leader)
        live = cute.arch.shuffle_sync(arrived, 0) == splits - 1
        if live:
            found, _ = atomic.load_key(key, leader)
            atomic.store_key(key, Int32(0), Int32(0), leader)
            atomic.store_key(counter, Int32(0), Int32(0), leader)
            settle(step, early, row, thread, ~found)


@kernel_name("draft_step_ids")
@cute.kernel
def _draft_ids(
    target: Int64,
    row_stride: Int64,
    addresses: tuple[Int64, ...],
    strides: tuple[Int32, ...],
    numbers: tuple[Int32, ...],
    by_page: tuple[Int64, Int32],
    by_group: tuple[Int64, Int32],
    by_scale: tuple[Int64, Int32],
    item: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    step = Step(addresses, strides, numbers, by_page, by_group, by_scale)
    lane = thread % 32
    request = cta * (IDS_THREADS // 32) + thread // 32
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if request < step.requests:
        # Of a wide id the lower word.
        at = target + Int64(request) * row_stride * item
        token = memory.load_global(at, 1, lane == 0)[0]
        early = Early(step, request, lane, lane >= 0)
        settle(step, early, request, lane, token)


def lower(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """The host function of a plan and its fake arguments, for ``cute.compile``."""
    dtype = str(plan["dtype"])
    is_ids = dtype in IDS
    item = {**ITEM, "int32": 4, "int64": 8}[dtype]

    @cute.jit
    def draft_step(
        target: cute.Tensor,
        input_ids_int32: cute.Tensor,
        input_ids_int64: cute.Tensor,
        drafts: cute.Tensor,
        scratch: cute.Tensor,
        d2t_int32: cute.Tensor,
        d2t_int64: cute.Tensor,
        next_new_tokens: cute.Tensor,
        next_token: cute.Tensor,
        kv_lens: cute.Tensor,
        positions_int32: cute.Tensor,
        positions_int64: cute.Tensor,
        slot: cute.Tensor,
        block_table: cute.Tensor,
        request_of_row: cute.Tensor,
        position_of_row: cute.Tensor,
        visible_of_row: cute.Tensor,
        page_of_row_int32: cute.Tensor,
        page_of_row_int64: cute.Tensor,
        within_of_row_int32: cute.Tensor,
        within_of_row_int64: cute.Tensor,
        cache_slot: cute.Tensor,
        group_slot: cute.Tensor,
        step: Int32,
        page_size: Int32,
        group: Int32,
        page_groups: Int32,
        scale: Int32,
        splits: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(
            *(OP, plan),
            target=target,
            input_ids_int32=input_ids_int32,
            input_ids_int64=input_ids_int64,
            drafts=drafts,
            scratch=scratch,
            d2t_int32=d2t_int32,
            d2t_int64=d2t_int64,
            next_new_tokens=next_new_tokens,
            next_token=next_token,
            kv_lens=kv_lens,
            positions_int32=positions_int32,
            positions_int64=positions_int64,
            slot=slot,
            block_table=block_table,
            request_of_row=request_of_row,
            position_of_row=position_of_row,
            visible_of_row=visible_of_row,
            page_of_row_int32=page_of_row_int32,
            page_of_row_int64=page_of_row_int64,
            within_of_row_int32=within_of_row_int32,
            within_of_row_int64=within_of_row_int64,
            cache_slot=cache_slot,
            group_slot=group_slot,
            step=step,
            page_size=page_size,
            group=group,
            page_groups=page_groups,
            scale=scale,
        )
        if splits > 0:
            requests = Int32(target.shape[0])
            held = (
                *(input_ids_int32, input_ids_int64, scratch, d2t_int32, d2t_int64),
                *(next_new_tokens, next_token, kv_lens, slot, block_table, request_of_row),
                *(position_of_row, visible_of_row, page_of_row_int32, page_of_row_int64),
                *(within_of_row_int32, within_of_row_int64, cache_slot, group_slot),
                *(positions_int32, positions_int64),
            )
            addresses = (drafts.iterator.toint(), *(argmax.address_of(each) for each in held))
            strides = (
                *(drafts.stride[0], next_new_tokens.stride[0], slot.stride[0]),
                *(block_table.stride[0], block_table.stride[1]),
                *(positions_int32.stride[0], positions_int64.stride[0]),
            )
            numbers = (
                *(requests, step, Int32(step < drafts.shape[1] - 1)),
                positions_int32.shape[0] + positions_int64.shape[0],
                *(d2t_int32.shape[0] + d2t_int64.shape[0], block_table.shape[1]),
                *(page_size, group, page_groups),
            )
            divisors = (
                reciprocal31(cutlass.max(Int32(1), page_size)),
                *(reciprocal31(group), reciprocal31(scale)),
            )
            if cutlass.const_expr(is_ids):
                _draft_ids(
                    target.iterator.toint(),
                    Int64(target.stride[0]),
                    *(addresses, strides, numbers, *divisors, item),
                ).launch(
                    grid=[cute.ceil_div(requests, IDS_THREADS // 32), 1, 1],
                    block=[IDS_THREADS, 1, 1],
                    stream=stream,
                    use_pdl=True,
                )
            else:
                columns = Int32(target.shape[1])
                _draft_logits(
                    target.iterator.toint(),
                    Int64(target.stride[0]),
                    columns,
                    argmax.chunk_of(columns, splits, 16 // item),
                    *(addresses, strides, numbers, *divisors, item),
                ).launch(
                    grid=[splits, requests, 1],
                    block=[argmax.THREADS, 1, 1],
                    stream=stream,
                    use_pdl=True,
                )

    return draft_step, fakes.arguments(OP, plan)

"""``accept``: greedy acceptance of a verify step in one launch: the target's tokens, the matching
prefix of the drafts, rows, lengths, positions and the cursors of ``gdn_replay``.

B requests: C context requests first, of one row each, then G generation requests of T = K + 1 rows.
Row of request g's token t: C + g*T + t; N = C + G*T rows. What may be left out is empty.

=============  ====================  =============================================================
target         [N, V] bf16, fp32     logits, any row stride, V up to 262,144; or
               [N] int32, int64      the target's token of each row, any stride
drafts         [>= G, K] int32       any row stride; a draft below 0 matches nothing
accepted       [B, T] int32          written: the target's tokens, of a context request its token
                                     and zeros; with ``fill`` 1, -1 at and past the count
n_acc          [B] int32             written: the count, 1 of a context request
scratch        [>= N + B + 1] int64  zero before the first launch; every launch leaves it zero
next_token     [>= B] int32          written: the target's token at the count
rows           [>= B] int32, int64   written: the row of that token
last_row       [>= C] int32          what a context request has as its row, in place of its number
kv_lens        [>= B] int32          in and out: + count - T + extra; of a context request + extra
positions      [A, P] int32, int64   A up to 32 axes
positions_out  [A, >= B]             written: positions[., rows[b]] + 1; -1 where P ends before
slot           [>= B] int32          any stride; -1 for a padding request
hist_len       [S] int32             in and out, of generation requests with a slot in 0..S-1:
bank           [S] int32             commit = hist_len + T > 16; hist_len = count, behind the
                                     records that there are unless commit; bank ^= commit
n_override     [>= B] int32          a count that replaces the others where it is not negative; 0
                                     for a request that was aborted
pool           [65536] fp32          uniform numbers in [0, 1), of ``force_mode`` 2
counter        [>= 1] int64          + 1 by a launch with ``force_mode`` 2
=============  ====================  =============================================================

The target's token of a row of logits is its argmax as torch orders it (``argmax``). The count of a
generation request is 1 + the drafts that equal the target's tokens before the first that does not.
Then ``force_mode`` 1 makes it ``force_base``, and 2 makes it force_base + 1 where ``pool[(counter *
6007 + g * 1009) % 65536] < force_frac``, with the counter's new value, within 1..T; then comes
``n_override``, at most T. With a count of 0 rows, next token and positions are those of a count of
1, lengths and cursors are not. A padding request's tokens are those of its rows, and its lengths
and cursors stay.

Compiled function: ``accept(target, drafts, accepted, n_acc, scratch, next_token, rows_int32,
rows_int64, last_row, kv_lens, positions_int32, positions_int64, positions_out_int32,
positions_out_int64, slot, hist_len, bank, n_override, pool, counter, contexts, extra, fill,
force_mode, force_base, force_frac, splits)``: one for each dtype of the target, for every mode and
whatever is left out. With ``splits`` 0 it checks its arguments and launches nothing.

Logits: ``splits`` CTAs share a row; each raises the row's key in the scratch (see
``kernels/device/argmax.py``) and arrives at its request's counter. The last of a request settles it
and zeroes its scratch; with ``force_mode`` 2 the last request moves the counter. Ids: a warp a
request. No grid barrier, and nothing depends on the order of CTAs.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from specplan.kernels import fakes, ranges
from specplan.kernels.accept.settle import Early, Step, finish_force, settle
from specplan.kernels.device import argmax, atomic, memory, ptx
from specplan.kernels.device.names import kernel_name
from specplan.plans.accept import IDS, OP
from specplan.plans.argmax import ITEM
from specplan.plans.plan import Plan

#: Threads of a CTA that accepts ready ids: one warp per request.
IDS_THREADS = 128


@kernel_name("accept_logits")
@cute.kernel
def _accept_logits(
    target: Int64,
    row_stride: Int64,
    columns: Int32,
    chunk: Int32,
    addresses: tuple[Int64, ...],
    strides: tuple[Int32, ...],
    numbers: tuple[Int32, ...],
    force_frac: Float32,
    item: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    split, row, _ = cute.arch.block_idx()
    splits, _, _ = cute.arch.grid_dim()
    step = Step(addresses, strides, numbers, force_frac)
    of_generation = cutlass.max(row - step.contexts, Int32(0)) // step.tokens
    is_context = row < step.contexts
    request = ptx.select(is_context, row, step.contexts + of_generation)
    tokens = ptx.select(is_context, Int32(1), step.tokens)
    first_row = ptx.select(is_context, row, step.contexts + of_generation * step.tokens)
    begin = split * chunk
    end = cutlass.min(begin + chunk, columns)
    address = target + Int64(row) * row_stride * item
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    early = Early(step, request, thread, thread < 32)
    high, low = argmax.cta_best(address, begin, end, thread, item)
    if thread < 32:
        leader = thread == 0
        atomic.raise_key(step.scratch + Int64(row) * 8, low, high, leader)
        counter = step.scratch + (Int64(step.rows) + request) * 8
        arrived = atomic.arrive(counter, leader)
        live = cute.arch.shuffle_sync(arrived, 0) == splits * tokens - 1
        if live:
            has_row = thread < tokens
            key = step.scratch + (Int64(first_row) + thread) * 8
            found, _ = atomic.load_key(key, has_row)
            atomic.store_key(key, Int32(0), Int32(0), has_row)
            atomic.store_key(counter, Int32(0), Int32(0), leader)
            settle(step, early, request, thread, ~found, thread >= 0)
            finish_force(step, thread, thread >= 0)


@kernel_name("accept_ids")
@cute.kernel
def _accept_ids(
    target: Int64,
    row_stride: Int64,
    addresses: tuple[Int64, ...],
    strides: tuple[Int32, ...],
    numbers: tuple[Int32, ...],
    force_frac: Float32,
    item: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    step = Step(addresses, strides, numbers, force_frac)
    lane = thread % 32
    request = cta * (IDS_THREADS // 32) + thread // 32
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if request < step.requests:
        generation = request - step.contexts
        tokens = ptx.select(generation < 0, Int32(1), step.tokens)
        row = ptx.select(generation < 0, request, step.contexts + generation * step.tokens)
        # Of a wide id the lower word.
        at = target + (Int64(row) + lane) * row_stride * item
        token = memory.load_global(at, 1, lane < tokens)[0]
        early = Early(step, request, lane, lane >= 0)
        settle(step, early, request, lane, token, lane >= 0)
        finish_force(step, lane, lane >= 0)


def lower(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """The host function of a plan and its fake arguments, for ``cute.compile``."""
    dtype = str(plan["dtype"])
    is_ids = dtype in IDS
    item = {**ITEM, "int32": 4, "int64": 8}[dtype]

    @cute.jit
    def accept(
        target: cute.Tensor,
        drafts: cute.Tensor,
        accepted: cute.Tensor,
        n_acc: cute.Tensor,
        scratch: cute.Tensor,
        next_token: cute.Tensor,
        rows_int32: cute.Tensor,
        rows_int64: cute.Tensor,
        last_row: cute.Tensor,
        kv_lens: cute.Tensor,
        positions_int32: cute.Tensor,
        positions_int64: cute.Tensor,
        positions_out_int32: cute.Tensor,
        positions_out_int64: cute.Tensor,
        slot: cute.Tensor,
        hist_len: cute.Tensor,
        bank: cute.Tensor,
        n_override: cute.Tensor,
        pool: cute.Tensor,
        counter: cute.Tensor,
        contexts: Int32,
        extra: Int32,
        fill: Int32,
        force_mode: Int32,
        force_base: Int32,
        force_frac: Float32,
        splits: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(
            *(OP, plan),
            target=target,
            drafts=drafts,
            accepted=accepted,
            scratch=scratch,
            next_token=next_token,
            rows_int32=rows_int32,
            rows_int64=rows_int64,
            last_row=last_row,
            kv_lens=kv_lens,
            positions_int32=positions_int32,
            positions_int64=positions_int64,
            positions_out_int32=positions_out_int32,
            positions_out_int64=positions_out_int64,
            slot=slot,
            hist_len=hist_len,
            n_override=n_override,
            pool=pool,
            counter=counter,
            contexts=contexts,
            fill=fill,
            force_mode=force_mode,
        )
        if splits > 0:
            requests = accepted.shape[0]
            vectors = (next_token, rows_int32, rows_int64, last_row, kv_lens, slot, hist_len)
            vectors = (*vectors, bank, n_override, pool, counter)
            addresses = (
                *(drafts.iterator.toint(), accepted.iterator.toint()),
                *(n_acc.iterator.toint(), scratch.iterator.toint()),
                *(argmax.address_of(each) for each in vectors),
                *(argmax.address_of(each) for each in (positions_int32, positions_int64)),
                *(argmax.address_of(each) for each in (positions_out_int32, positions_out_int64)),
            )
            strides = (
                *(drafts.stride[0], accepted.stride[0], slot.stride[0]),
                *(positions_int32.stride[0], positions_int64.stride[0]),
                *(positions_out_int32.stride[0], positions_out_int64.stride[0]),
            )
            numbers = (
                *(requests, accepted.shape[1], contexts, extra, fill, force_mode, force_base),
                hist_len.shape[0],
                positions_int32.shape[0] + positions_int64.shape[0],
                cutlass.max(positions_int32.shape[1], positions_int64.shape[1]),
            )
            if cutlass.const_expr(is_ids):
                _accept_ids(
                    target.iterator.toint(),
                    Int64(target.stride[0]),
                    *(addresses, strides, numbers, force_frac, item),
                ).launch(
                    grid=[cute.ceil_div(requests, IDS_THREADS // 32), 1, 1],
                    block=[IDS_THREADS, 1, 1],
                    stream=stream,
                    use_pdl=True,
                )
            else:
                columns = Int32(target.shape[1])
                _accept_logits(
                    target.iterator.toint(),
                    Int64(target.stride[0]),
                    columns,
                    argmax.chunk_of(columns, splits, 16 // item),
                    *(addresses, strides, numbers, force_frac, item),
                ).launch(
                    grid=[splits, Int32(target.shape[0]), 1],
                    block=[argmax.THREADS, 1, 1],
                    stream=stream,
                    use_pdl=True,
                )

    return accept, fakes.arguments(OP, plan)

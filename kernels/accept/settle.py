"""What becomes of a request once the target's tokens are known: one warp, a lane for each token."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from specplan.kernels.device import atomic, memory
from specplan.kernels.device.convert import bits_to_float
from specplan.kernels.device.ptx import emit, select
from specplan.plans.accept import (
    FORCE_DRAWN,
    FORCE_SAME,
    POOL,
    POOL_REQUEST,
    POOL_STEP,
    WINDOW,
)


class Step:
    """The arguments of a launch besides the target: addresses, 0 for what is left out, strides in
    elements, and numbers.
    """

    def __init__(
        self,
        addresses: tuple[Int64, ...],
        strides: tuple[Int32, ...],
        numbers: tuple[Int32, ...],
        force_frac: Float32,
    ) -> None:
        self.drafts, self.accepted, self.n_acc, self.scratch = addresses[:4]
        self.next_token, self.rows_int32, self.rows_int64, self.last_row = addresses[4:8]
        self.kv_lens, self.slot, self.hist_len, self.bank = addresses[8:12]
        self.n_override, self.pool, self.counter = addresses[12:15]
        self.positions, self.positions_out = addresses[15:17], addresses[17:19]
        self.draft_stride, self.accepted_stride, self.slot_stride = strides[:3]
        self.position_strides, self.position_out_strides = strides[3:5], strides[5:7]
        self.requests, self.tokens, self.contexts, self.extra, self.fill = numbers[:5]
        self.force_mode, self.force_base, self.slots, self.axes = numbers[5:9]
        self.position_rows = numbers[9]
        self.force_frac = force_frac

    @property
    def rows(self) -> Int32:
        """Rows of the target."""
        return self.contexts + (self.requests - self.contexts) * self.tokens

    @property
    def force_count(self) -> Int64:
        """Address of the counter of requests that are done."""
        return self.scratch + (Int64(self.rows) + self.requests) * 8


class Early:
    """What a warp loads of its request before the target's tokens are known. Of what the request's
    last CTA writes, others may be late to read: these loads are atomic.
    """

    def __init__(self, step: Step, request: Int32, lane: Int32, live: Boolean) -> None:
        generation = request - step.contexts
        drafted = live & (generation >= 0) & (lane < step.tokens - 1)
        at = Int64(generation) * step.draft_stride + lane
        self.draft = memory.load_global(step.drafts + at * 4, 1, drafted)[0]
        self.drafted = drafted
        given = live & (step.slot != 0)
        at = Int64(request) * step.slot_stride
        slot = memory.load_global(step.slot + at * 4, 1, given)[0]
        #: Padding requests have slot -1; without slots there are none.
        self.real = (step.slot == 0) | (slot >= 0)
        self.moves = (
            given & (generation >= 0) & (step.hist_len != 0) & (slot >= 0) & (slot < step.slots)
        )
        self.slot = slot
        at = Int64(request) * 4
        self.length = atomic.load_relaxed(step.kv_lens + at, live & (step.kv_lens != 0))
        overridden = live & (step.n_override != 0)
        override = memory.load_global(step.n_override + at, 1, overridden)[0]
        self.override = select(overridden, override, Int32(-1))
        self.hist_len = atomic.load_relaxed(step.hist_len + Int64(slot) * 4, self.moves)
        self.bank = atomic.load_relaxed(step.bank + Int64(slot) * 4, self.moves)


def settle(
    step: Step, early: Early, request: Int32, lane: Int32, token: Int32, live: Boolean
) -> None:
    """Match, count and write a request's outputs, where ``live``; ``token`` is the target's of this
    lane. All lanes of the warp are here.
    """
    generation = request - step.contexts
    verified = generation >= 0
    tokens = select(verified, step.tokens, Int32(1))
    matches = early.drafted & (early.draft >= 0) & (early.draft == token)
    run = cute.arch.vote_ballot_sync(matches)
    count = _ones_below_zero(Int32(run)) + 1
    count = _forced(step, generation, count, live)
    count = select(verified, count, Int32(1))
    count = select(early.override >= 0, cutlass.min(early.override, tokens), count)
    last = cutlass.max(count, Int32(1)) - 1

    kept = select(lane < tokens, token, Int32(0))
    kept = select((step.fill != 0) & (lane >= count), Int32(-1), kept)
    at = Int64(request) * step.accepted_stride + lane
    memory.store_global(step.accepted + at * 4, [kept], live & (lane < step.tokens))
    at = Int64(request)
    is_last = live & (step.next_token != 0) & (lane == last)
    memory.store_global(step.next_token + at * 4, [token], is_last)

    first = live & (lane == 0)
    memory.store_global(step.n_acc + at * 4, [count], first)
    listed = live & (step.last_row != 0) & (generation < 0)
    context_row = memory.load_global(step.last_row + at * 4, 1, listed)[0]
    context_row = select(listed, context_row, request)
    row = step.contexts + generation * step.tokens + last
    row = select(verified, row, context_row)
    memory.store_global(step.rows_int32 + at * 4, [row], first & (step.rows_int32 != 0))
    wide = first & (step.rows_int64 != 0)
    atomic.store_key(step.rows_int64 + at * 8, row, row >> 31, wide)
    moved = early.length + count + step.extra - select(verified, step.tokens, Int32(1))
    moved = select(verified, moved, early.length + step.extra)
    counted = first & (step.kv_lens != 0) & early.real
    memory.store_global(step.kv_lens + at * 4, [moved], counted)
    _positions(step, request, lane, row, live)

    commits = early.hist_len + step.tokens > WINDOW
    records = select(commits, count, early.hist_len + count)
    place = Int64(early.slot) * 4
    memory.store_global(step.hist_len + place, [records], first & early.moves)
    bank = select(commits, early.bank ^ 1, early.bank)
    memory.store_global(step.bank + place, [bank], first & early.moves)


def finish_force(step: Step, lane: Int32, live: Boolean) -> None:
    """Count a request that has read the counter, where ``live``; the last one moves it."""
    first = live & (lane == 0) & (step.force_mode == FORCE_DRAWN)
    last = first & (atomic.arrive(step.force_count, first) == step.requests - 1)
    low, high = atomic.load_key(step.counter, last)
    low = low + 1
    high = select(low == 0, high + 1, high)
    atomic.store_key(step.counter, low, high, last)
    atomic.store_key(step.force_count, Int32(0), Int32(0), last)


def _forced(step: Step, generation: Int32, count: Int32, live: Boolean) -> Int32:
    """The count that ``force_mode`` wants of a generation request, or its own."""
    base = cutlass.max(step.force_base, Int32(1))
    drawn = live & (step.force_mode == FORCE_DRAWN) & (generation >= 0)
    before, _ = atomic.load_key(step.counter, drawn)
    place = ((before + 1) * POOL_STEP + generation * POOL_REQUEST) & (POOL - 1)
    uniform = bits_to_float(memory.load_global(step.pool + Int64(place) * 4, 1, drawn)[0])
    more = drawn & (uniform < step.force_frac)
    wanted = cutlass.min(base + select(more, Int32(1), Int32(0)), step.tokens)
    forced = (step.force_mode == FORCE_SAME) | (step.force_mode == FORCE_DRAWN)
    return select(forced, wanted, count)


def _positions(step: Step, request: Int32, lane: Int32, row: Int32, live: Boolean) -> None:
    """Positions after the last accepted token's, an axis a lane; -1 of a row that is not there."""
    here = live & (lane < step.axes)
    there = here & (row >= 0) & (row < step.position_rows)
    for dtype, address in enumerate(step.positions):
        source = Int64(lane) * step.position_strides[dtype] + row
        target = Int64(lane) * step.position_out_strides[dtype] + request
        out = step.positions_out[dtype]
        if dtype == 0:
            found = memory.load_global(address + source * 4, 1, there & (address != 0))[0]
            found = select(there, found + 1, Int32(-1))
            memory.store_global(out + target * 4, [found], here & (out != 0))
        else:
            low, high = atomic.load_key(address + source * 8, there & (address != 0))
            low = low + 1
            high = select(low == 0, high + 1, high)
            low, high = select(there, low, Int32(-1)), select(there, high, Int32(-1))
            atomic.store_key(out + target * 8, low, high, here & (out != 0))


def _ones_below_zero(word: Int32) -> Int32:
    """How many ones stand below the lowest zero of a word whose highest bit is zero."""
    return emit([Int32], [word & ~(word + 1)], "popc.b32 $0, $1;", "=r,r")[0]

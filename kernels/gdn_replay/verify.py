"""The verify op: launch configuration, and the kernel for few heads."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from specplan.kernels.device import convert, memory, ptx
from specplan.kernels.device.divide import divide16, reciprocal16
from specplan.kernels.device.memory import element_address
from specplan.kernels.device.names import host_name, kernel_name
from specplan.kernels.gdn_replay.cursors import (
    Cursor,
    load_cursor,
    load_slot,
    locate_new_records,
    peek_slot,
)
from specplan.kernels.gdn_replay.history import (
    Weights,
    arrange_deltas,
    copy_history_keys,
    fold_history,
    load_decays,
    load_deltas,
    weight_deltas,
)
from specplan.kernels.gdn_replay.operands import TokenShare, normalize_rows, store_operand
from specplan.kernels.gdn_replay.recurrence import (
    Coefficients,
    Gates,
    add_history,
    load_gate_inputs,
    multiply_keys,
    multiply_state,
    substitute_forward,
)
from specplan.kernels.gdn_replay.tiles import HEAD, LANES, HistoryKeys, Lane, Operand, StateTile

STATE = {"bf16": BFloat16, "fp32": Float32}


class Verify:
    """The verify op, specialized for one plan.

    The grid is at most ``ctas`` CTAs. This kernel is for few heads, where all that counts is how
    soon the first result is there: it walks units of one head, or of a part of its value rows, in
    strides of the grid. A warp has two buffers for its tiles of the state, used in turn: the next
    unit's tile is copied while this one is worked on.

    The first tile is prefetched to L2 before the kernel waits for earlier grids. That reads row
    slots which those may still write, for nothing but the prefetch.
    """

    #: Whether a CTA takes its heads as one stream (``StreamVerify``).
    streams = False

    def __init__(self, state: str, tokens: int, rows: int, warps: int, resident: int) -> None:
        self.wide = STATE[state] is Float32
        self.tokens = tokens
        self.rows = rows
        self.warps = warps
        self.resident = resident
        self.tile = StateTile(self.wide, rows)
        self.splits = HEAD // (rows * warps)
        self.unit_bytes = HistoryKeys.BYTES + Operand.BYTES
        self.operand_bytes = self.unit_bytes

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA: operands, and two state tiles per warp."""
        return self.operand_bytes + 2 * self.warps * self.tile.bytes

    @host_name("gdn_replay_verify")
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        hist_len: cute.Tensor,
        bank: cute.Tensor,
        slot: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        parts = v.shape[0] * v.shape[2] * self.splits
        if cutlass.const_expr(self.streams):
            ctas = ctas // self.splits * self.splits
        self.kernel(
            q, k, v, a, b, A_log, dt_bias,
            state, rec_u, rec_k, rec_G, hist_len, bank, slot, out, scale,
        ).launch(
            grid=(cutlass.min(parts, ctas), 1, 1),
            block=(LANES * self.warps, 1, 1),
            smem=self.shared_memory,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @kernel_name("gdn_replay_verify")
    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        hist_len: cute.Tensor,
        bank: cute.Tensor,
        slot: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
    ) -> None:
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        warp = thread // LANES
        value_heads = Int32(v.shape[2])
        ratio = value_heads // Int32(k.shape[2])
        per_ratio = reciprocal16(ratio)
        row_units = value_heads * self.splits
        rows = Int32(v.shape[0])
        step_row, step_unit = ctas // row_units, ctas % row_units
        tokens = Int32(q.shape[1])
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        records = HistoryKeys(shared)
        X = Operand(shared + HistoryKeys.BYTES)
        buffer = shared + self.operand_bytes + warp * (2 * self.tile.bytes)
        # A unit is (row n, head and part within the row); *_1 belong to the next unit, *_2 to the
        # one after it.
        n, within = cta // row_units, cta % row_units
        early = peek_slot(slot, n, state)
        if early >= 0:
            self.tile.prefetch_l2(
                self.tile_address(state, early, within, warp), thread % LANES == 0
            )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        n_1, within_1 = next_unit(n, within, step_row, step_unit, row_units)
        s = memory.load_global(element_address(slot, n), 1)[0]
        s_1 = load_slot(slot, n_1, rows)
        length, current = load_cursor(hist_len, bank, s)
        if s >= 0:
            tile_at = self.tile_address(state, s, within, warp)
            self.tile.copy_async(buffer, tile_at, thread % LANES)
        cute.arch.cp_async_commit_group()
        parity = Int32(0)

        while n < rows:
            me = ptx.opaque(thread)
            lane = Lane(me % LANES, self.rows // 8)
            head = within // self.splits
            part = within % self.splits
            first_row = (part * self.warps + warp) * self.rows
            key_head = divide16(head, per_ratio)
            column = first_row + lane.result_row
            live = lane.token < tokens
            cursor = Cursor(length, current)
            slot_k = element_address(rec_k, s, key_head)

            share = TokenShare(me, self.warps)
            raw_k = share.load(element_address(k, n, share.token, key_head), share.token < tokens)
            raw_q = share.load(element_address(q, n, share.token, key_head), share.token < tokens)
            if s >= 0:
                copy_history_keys(records, slot_k, cursor, me, self.warps)
            cute.arch.cp_async_commit_group()
            if s_1 >= 0:
                tile_at = self.tile_address(state, s_1, within_1, warp)
                self.tile.copy_async(buffer + (1 - parity) * self.tile.bytes, tile_at, lane.index)
            cute.arch.cp_async_commit_group()
            length, current = load_cursor(hist_len, bank, s_1)
            n_2, within_2 = next_unit(n_1, within_1, step_row, step_unit, row_units)
            s_2 = load_slot(slot, n_2, rows)

            if s < 0:
                zeros = [Int32(0)] * lane.tiles
                memory.store_global(element_address(out, n, lane.token, head, column), zeros, live)
            else:
                every = Boolean(True)
                values = memory.load_read_only(
                    element_address(v, n, lane.token, head, column), lane.tiles, live
                )
                raw = load_gate_inputs(
                    element_address(a, n, lane.token, head),
                    element_address(b, n, lane.token, head),
                    element_address(A_log, head),
                    element_address(dt_bias, head),
                    live,
                    every,
                )
                head_G = element_address(rec_G, s, head)
                head_u = element_address(rec_u, s, head)
                decays = load_decays(head_G, lane, cursor, every)
                deltas = load_deltas(head_u, lane, cursor, first_row, every)

                commits, to_record = locate_new_records(cursor, tokens)
                store_operand(
                    X,
                    share,
                    normalize_rows(share, raw_k, Float32(1.0)),
                    normalize_rows(share, raw_q, scale),
                    slot_k + Int64((to_record + share.token) * (HEAD * 2)),
                    (part == 0) & (head == key_head * ratio) & (share.token < tokens),
                )
                to_record = to_record + lane.token
                gates = Gates(raw, lane, live)
                weights = Weights(decays, lane, cursor)
                base = ptx.select(commits, Float32(0.0), weights.total)
                memory.store_global(
                    head_G + Int64(to_record * 4),
                    [convert.float_to_bits(base + gates.c)],
                    live & (first_row == 0) & (lane.quad == 0),
                )
                U = arrange_deltas(lane, deltas)
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_threads()

                C, M = multiply_keys(lane, X, records)
                coefficients = Coefficients(lane, gates, weights, C, M)
                bases = self.tile.lane_bases(buffer + parity * self.tile.bytes, lane)
                R = multiply_state(lane, X, self.tile.reader(bases))
                H = add_history(R, coefficients, U)
                u, y = substitute_forward(lane, self.tokens, coefficients, values, H)
                head_out = element_address(out, n, lane.token, head, column)
                memory.store_global(head_out, convert.pack_bf16_pairs(y), live)
                memory.store_global(
                    head_u + Int64(to_record * (HEAD * 2) + column * 2),
                    convert.pack_bf16_pairs(u),
                    live,
                )
                if commits:
                    row = first_row + lane.operand_row + lane.odd
                    target = element_address(state, s, head, row, lane.quad * 8)
                    weighted = weight_deltas(lane, weights, U)
                    # a loop, because the compiler turns straight code under a branch into
                    # predicated code that always runs
                    for half in cutlass.range(2, unroll=1):
                        fold_history(
                            lane, half, weights.decay, weighted, records,
                            self.tile.reader(bases, half),
                            target + Int64(half * (self.tile.row_bytes // 2)), self.wide,
                        )  # fmt: skip
                cute.arch.sync_threads()

            n, within, s = n_1, within_1, s_1
            n_1, within_1, s_1 = n_2, within_2, s_2
            parity = 1 - parity

    def tile_address(self, state: cute.Tensor, s: Int32, within: Int32, warp: Int32) -> Int64:
        """Address of a warp's state tile of a unit."""
        row = (within % self.splits * self.warps + warp) * self.rows
        return element_address(state, s, within // self.splits, row)


def next_unit(
    n: Int32, within: Int32, step_row: Int32, step_unit: Int32, row_units: Int32
) -> tuple[Int32, Int32]:
    """The unit one grid stride on, without a division."""
    within = within + step_unit
    wraps = within >= row_units
    return n + step_row + Int32(wraps), ptx.select(wraps, within - row_units, within)

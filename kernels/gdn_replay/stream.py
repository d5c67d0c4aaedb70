"""The verify kernel for many heads: a CTA streams its share of them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from specplan.kernels.device import convert, memory, ptx
from specplan.kernels.device.divide import divide16, reciprocal16
from specplan.kernels.device.memory import element_address
from specplan.kernels.device.names import kernel_name
from specplan.kernels.gdn_replay.cursors import (
    Cursor,
    load_cursor,
    load_slot,
    locate_new_records,
    peek_slot,
)
from specplan.kernels.gdn_replay.history import (
    HistoryKeysShare,
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
from specplan.kernels.gdn_replay.tiles import HEAD, LANES, HistoryKeys, Lane, Operand
from specplan.kernels.gdn_replay.verify import Verify


class StreamVerify(Verify):
    """The verify op for many heads, specialized for one plan.

    A CTA takes consecutive heads, its even share of all rows' heads, as one stream: the next head's
    tile is copied once this head's is there, no sooner, and what else a head is made of is loaded
    into registers while the head before it is worked on. All that does not need the tile is done
    before it is waited for. A *unit* is what the stream has of one key head; the next unit's keys,
    queries and K_hist are copied from a unit's start on, and have shared memory of their own. So a
    unit begins with one barrier and no wait for memory.

    One tile per warp is in flight, not two, with which the first tiles of all warps, and all other
    loads, probably come later. On an H200 (16/32 heads, bf16, T = 4) 16, 32, 64 and 256 requests
    took 11.5, 17.9, 31.2 and 110 us with two, 9.1, 15.8, 29.6 and 108 with one, and more with tiles
    ahead prefetched to L2.
    """

    streams = True

    def __init__(self, state: str, tokens: int, rows: int, warps: int, resident: int) -> None:
        super().__init__(state, tokens, rows, warps, resident)
        #: Raw keys and queries of 8 tokens.
        self.raw_bytes = 2 * 16 * max(8 * HEAD * 2 // 16, warps * LANES)
        self.operand_bytes = 2 * self.unit_bytes + self.raw_bytes

    @kernel_name("gdn_replay_verify_grouped")
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
        value_heads = Int32(v.shape[2])
        ratio = value_heads // Int32(k.shape[2])
        per_ratio = reciprocal16(ratio)
        rows = Int32(v.shape[0])
        tokens = Int32(q.shape[1])
        part = cta % self.splits
        first_row = (part * self.warps + thread // LANES) * self.rows
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        buffer = shared + self.operand_bytes + thread // LANES * (2 * self.tile.bytes)
        # This CTA's share: ``left`` heads from ``head`` of row n on. *_1 and *_2 belong to the rows
        # after row n.
        shares, index, heads = ctas // self.splits, cta // self.splits, rows * value_heads
        left = heads // shares
        start = left * index + cutlass.min(index, heads % shares)
        left = left + Int32(index < heads % shares)
        n, head = start // value_heads, start % value_heads
        early = peek_slot(slot, n, state)
        if early >= 0:
            tile_at = element_address(state, early, head, first_row)
            self.tile.prefetch_l2(tile_at, thread % LANES == 0)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        self.copy_raw_tokens(shared, thread, q, k, n, divide16(head, per_ratio))
        cute.arch.cp_async_commit_group()
        s = memory.load_global(element_address(slot, n), 1)[0]
        s_1, s_2 = load_slot(slot, n + 1, rows), load_slot(slot, n + 2, rows)
        length, current = load_cursor(hist_len, bank, s)
        if s >= 0:
            tile_at = element_address(state, s, head, first_row)
            self.tile.copy_async(buffer, tile_at, thread % LANES)
        cute.arch.cp_async_commit_group()
        length_1, current_1 = load_cursor(hist_len, bank, s_1)
        raw_K = HistoryKeysShare(thread, self.warps).load(
            element_address(rec_k, s, divide16(head, per_ratio)), Cursor(length, current), s >= 0
        )
        next_v, next_token, next_G, next_u = self.load_head(
            Lane(thread % LANES, self.rows // 8), Cursor(length, current),
            v, a, b, A_log, dt_bias, rec_u, rec_G, n, s, head, first_row, s >= 0,
        )  # fmt: skip
        HistoryKeysShare(thread, self.warps).store(HistoryKeys(shared), raw_K)
        cute.arch.cp_async_wait_group(1)
        parity, at = Int32(0), Int32(0)

        while left > 0:
            me = ptx.opaque(thread)
            lane = Lane(me % LANES, self.rows // 8)
            live = lane.token < tokens
            column = first_row + lane.result_row
            share = TokenShare(me, self.warps)
            raw = self.raw_address(shared, me)
            operands = shared + parity * self.unit_bytes
            records = HistoryKeys(operands)
            X = Operand(operands + HistoryKeys.BYTES)
            key_head = divide16(head, per_ratio)
            unit = cutlass.min((key_head + 1) * ratio - head, left)
            cursor = Cursor(length, current)
            commits, to_record = locate_new_records(cursor, tokens)
            store_operand(
                X,
                share,
                normalize_rows(share, share.load_copied(raw), Float32(1.0)),
                normalize_rows(share, share.load_copied(raw + self.raw_bytes // 2), scale),
                element_address(rec_k, s, key_head) + Int64((to_record + share.token) * (HEAD * 2)),
                (s >= 0) & (part == 0) & (head == key_head * ratio) & (share.token < tokens),
            )
            to_record = to_record + lane.token
            # the next unit: further on in this row, or the first of the next row
            wraps = head + unit >= value_heads
            head_1 = ptx.select(wraps, Int32(0), head + unit)
            s_a = ptx.select(unit < left, ptx.select(wraps, s_1, s), Int32(-1))
            cursor_a = Cursor(
                ptx.select(wraps, length_1, length), ptx.select(wraps, current_1, current)
            )
            # All warps have passed the barrier before, so none reads this pair of operands any
            # more; behind this one, none reads the other pair.
            cute.arch.sync_threads()
            if s_a >= 0:
                to = shared + (1 - parity) * self.unit_bytes
                key_head_1 = divide16(head_1, per_ratio)
                slot_k = element_address(rec_k, s_a, key_head_1)
                copy_history_keys(HistoryKeys(to), slot_k, cursor_a, me, self.warps)
                self.copy_raw_tokens(shared, me, q, k, n + Int32(wraps), key_head_1)
            cute.arch.cp_async_commit_group()

            C, M = multiply_keys(lane, X, records)
            for i in cutlass.range(unit, unroll=1):
                bases = self.tile.lane_bases(buffer + at * self.tile.bytes, lane)
                values, token, decays, deltas = next_v, next_token, next_G, next_u

                last = i + 1 == unit
                # opaque, because the optimizer would keep every address of the row in registers
                # over this loop
                row_n, row_s = ptx.opaque(n), ptx.opaque(s)
                n_b = ptx.select(last & wraps, row_n + 1, row_n)
                s_b = ptx.select(last, s_a, row_s)
                head_b = ptx.select(last, head_1, head + i + 1)
                cursor_b = Cursor(
                    ptx.select(last, cursor_a.length, length),
                    ptx.select(last, cursor_a.bank, current),
                )
                next_v, next_token, next_G, next_u = self.load_head(
                    lane, cursor_b,
                    v, a, b, A_log, dt_bias, rec_u, rec_G, n_b, s_b, head_b, first_row, s_b >= 0,
                )  # fmt: skip

                # all that does not need the tile
                gates = Gates(token, lane, live)
                weights = Weights(decays, lane, cursor)
                coefficients = Coefficients(lane, gates, weights, C, M)
                U = arrange_deltas(lane, deltas)
                base = ptx.select(commits, Float32(0.0), weights.total)
                memory.store_global(
                    element_address(rec_G, row_s, head + i) + Int64(to_record * 4),
                    [convert.float_to_bits(base + gates.c)],
                    live & (s >= 0) & (first_row == 0) & (lane.quad == 0),
                )
                # younger than the tile of a unit's first head: the next unit's operands
                if i == 0:
                    cute.arch.cp_async_wait_group(1)
                else:
                    cute.arch.cp_async_wait_group(0)
                # From here on no lane reads the other buffer any more.
                cute.arch.sync_warp()
                s_t, tile_at = self.locate_next_tile(
                    state, s, s_1, head + i + 1, first_row, value_heads, i + 1 < left
                )
                if s_t >= 0:
                    to = buffer + (1 - at) * self.tile.bytes
                    self.tile.copy_async(to, tile_at, lane.index)
                cute.arch.cp_async_commit_group()
                head_out = element_address(out, row_n, lane.token, head + i, column)
                if s < 0:
                    memory.store_global(head_out, [Int32(0)] * lane.tiles, live)
                else:
                    R = multiply_state(lane, X, self.tile.reader(bases))
                    H = add_history(R, coefficients, U)
                    u, y = substitute_forward(lane, self.tokens, coefficients, values, H)
                    memory.store_global(head_out, convert.pack_bf16_pairs(y), live)
                    to_u = element_address(rec_u, row_s, head + i)
                    to_u = to_u + Int64(to_record * (HEAD * 2) + column * 2)
                    memory.store_global(to_u, convert.pack_bf16_pairs(u), live)
                    if commits:
                        row = first_row + lane.operand_row + lane.odd
                        target = element_address(state, row_s, head + i, row, lane.quad * 8)
                        weighted = weight_deltas(lane, weights, U)
                        # a loop, because the compiler turns straight code under a branch into
                        # predicated code that always runs
                        for half in cutlass.range(2, unroll=1):
                            fold_history(
                                lane, half, weights.decay, weighted, records,
                                self.tile.reader(bases, half),
                                target + Int64(half * (self.tile.row_bytes // 2)), self.wide,
                            )  # fmt: skip

                at = 1 - at

            # the next unit's operands; younger than they is the next unit's first tile
            cute.arch.cp_async_wait_group(1)
            parity = 1 - parity
            left = left - unit
            head = head_1
            if wraps:
                n = n + 1
                s, length, current = s_1, length_1, current_1
                s_1 = s_2
                length_1, current_1 = load_cursor(hist_len, bank, s_1)
                s_2 = load_slot(slot, n + 2, rows)

    @staticmethod
    def locate_next_tile(
        state: cute.Tensor,
        s: Int32,
        s_1: Int32,
        head: Int32,
        first_row: Int32,
        value_heads: Int32,
        exists: Boolean,
    ) -> tuple[Int32, Int64]:
        """The slot, or -1, and the address of a warp's tile of a head. Heads are counted from row
        n's first one on into the next row.
        """
        wraps = head >= value_heads
        s = ptx.select(wraps, s_1, s)
        head = ptx.select(wraps, head - value_heads, head)
        return ptx.select(exists, s, Int32(-1)), element_address(state, s, head, first_row)

    def raw_address(self, shared: Int32, thread: Int32) -> Int32:
        """Address of this thread's raw keys of a unit; its queries lie ``raw_bytes // 2`` on."""
        return shared + 2 * self.unit_bytes + thread * 16

    def copy_raw_tokens(
        self,
        shared: Int32,
        thread: Int32,
        q: cute.Tensor,
        k: cute.Tensor,
        n: Int32,
        key_head: Int32,
    ) -> None:
        """Start copying this thread's part of a unit's keys and queries."""
        share = TokenShare(thread, self.warps)
        live = share.token < Int32(q.shape[1])
        raw = self.raw_address(shared, thread)
        share.copy_async(raw, element_address(k, n, share.token, key_head), live)
        share.copy_async(
            raw + self.raw_bytes // 2, element_address(q, n, share.token, key_head), live
        )

    @staticmethod
    def load_head(
        lane: Lane,
        cursor: Cursor,
        v: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        rec_u: cute.Tensor,
        rec_G: cute.Tensor,
        n: Int32,
        s: Int32,
        head: Int32,
        first_row: Int32,
        exists: Boolean,
    ) -> tuple[list[Int32], list[Float32], list[Float32], list[Int32]]:
        """Load a head's inputs to registers, without its state and what the heads of a key head
        share: values, gates, and the history's decays and deltas.
        """
        live = exists & (lane.token < Int32(v.shape[1]))
        column = first_row + lane.result_row
        return (
            memory.load_read_only(
                element_address(v, n, lane.token, head, column), lane.tiles, live
            ),
            load_gate_inputs(
                element_address(a, n, lane.token, head),
                element_address(b, n, lane.token, head),
                element_address(A_log, head),
                element_address(dt_bias, head),
                live,
                exists,
            ),
            load_decays(element_address(rec_G, s, head), lane, cursor, exists),
            load_deltas(element_address(rec_u, s, head), lane, cursor, first_row, exists),
        )

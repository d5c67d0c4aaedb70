"""The ``materialize`` op: the fold alone, from one slot into the same or another slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from specplan.kernels.device import memory
from specplan.kernels.device.memory import element_address
from specplan.kernels.device.names import host_name, kernel_name
from specplan.kernels.gdn_replay.cursors import Cursor
from specplan.kernels.gdn_replay.history import (
    Weights,
    arrange_deltas,
    copy_history_keys,
    fold_history,
    load_decays,
    load_deltas,
    weight_deltas,
)
from specplan.kernels.gdn_replay.tiles import HEAD, LANES, HistoryKeys, Lane
from specplan.kernels.gdn_replay.verify import STATE


class Materialize:
    """Fold a slot's checkpoint and records into a slot's checkpoint."""

    #: Value rows per warp, and warps per CTA.
    ROWS, WARPS = 16, 4

    def __init__(self, state: str) -> None:
        self.wide = STATE[state] is Float32

    @host_name("gdn_replay_materialize")
    @cute.jit
    def __call__(
        self,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        bank: cute.Tensor,
        src: cute.Tensor,
        dst: cute.Tensor,
        count: cute.Tensor,
        stream: Any,
    ) -> None:
        self.kernel(state, rec_u, rec_k, rec_G, bank, src, dst, count).launch(
            grid=(HEAD // (self.ROWS * self.WARPS), rec_u.shape[1], src.shape[0]),
            block=(LANES * self.WARPS, 1, 1),
            smem=HistoryKeys.BYTES,
            stream=stream,
        )

    @kernel_name("gdn_replay_materialize")
    @cute.kernel
    def kernel(
        self,
        state: cute.Tensor,
        rec_u: cute.Tensor,
        rec_k: cute.Tensor,
        rec_G: cute.Tensor,
        bank: cute.Tensor,
        src: cute.Tensor,
        dst: cute.Tensor,
        count: cute.Tensor,
    ) -> None:
        part, head, n = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = Lane(thread % LANES, self.ROWS // 8)
        first_row = (part * self.WARPS + thread // LANES) * self.ROWS
        key_head = head // (Int32(rec_u.shape[1]) // Int32(rec_k.shape[1]))
        source = memory.load_global(element_address(src, n), 1)[0]
        target = memory.load_global(element_address(dst, n), 1)[0]
        if (source >= 0) & (target >= 0):
            length = memory.load_global(element_address(count, n), 1)[0]
            cursor = Cursor(length, memory.load_global(element_address(bank, source), 1)[0])
            records = HistoryKeys(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
            slot_k = element_address(rec_k, source, key_head)
            copy_history_keys(records, slot_k, cursor, thread, self.WARPS)
            cute.arch.cp_async_commit_group()
            every = Boolean(True)
            head_G = element_address(rec_G, source, head)
            weights = Weights(load_decays(head_G, lane, cursor, every), lane, cursor)
            head_u = element_address(rec_u, source, head)
            deltas = arrange_deltas(lane, load_deltas(head_u, lane, cursor, first_row, every))
            row = first_row + lane.operand_row + lane.odd
            column = lane.quad * 8
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            weighted = weight_deltas(lane, weights, deltas)
            for half in cutlass.range(2, unroll=1):
                at = column + half * (HEAD // 2)
                fold_history(
                    lane, half, weights.decay, weighted, records,
                    make_global_reader(element_address(state, source, head, row, at), self.wide),
                    element_address(state, target, head, row, at), self.wide,
                )  # fmt: skip


def make_global_reader(lane_address: Int64, wide: bool) -> Callable[[int, int], list[Int32]]:
    """``StateTile.reader`` for a state in global memory."""
    size = 4 if wide else 2

    def read(tile: int, block: int) -> list[Int32]:
        start = lane_address + Int64((tile * 2 * HEAD + block * 32) * size)
        words: list[Int32] = []
        for i in range(size // 2):
            words += memory.load_global(start + Int64(i * 16), 4)
        return words

    return read

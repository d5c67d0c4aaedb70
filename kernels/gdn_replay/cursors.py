"""Slots and cursors of a batch's rows, and the ops that move the cursors."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32
from specplan.kernels.device import memory, ptx
from specplan.kernels.device.memory import element_address
from specplan.kernels.device.names import host_name, kernel_name
from specplan.kernels.gdn_replay.tiles import WINDOW

CURSOR_THREADS = 128


class Cursor:
    """Where a row's live records are: P of them in bank c."""

    def __init__(self, length: Int32, bank: Int32) -> None:
        self.length = length
        self.bank = bank


def load_cursor(hist_len: cute.Tensor, bank: cute.Tensor, s: Int32) -> tuple[Int32, Int32]:
    """Load hist_len and bank of a slot; zeros for slot -1."""
    length = memory.load_global(element_address(hist_len, s), 1, s >= 0)[0]
    return length, memory.load_global(element_address(bank, s), 1, s >= 0)[0]


def load_slot(slot: cute.Tensor, n: Int32, rows: Int32) -> Int32:
    """Load the slot of row n; -1 past the end."""
    s = memory.load_global(element_address(slot, n), 1, n < rows)[0]
    return ptx.select(n < rows, s, Int32(-1))


def peek_slot(slot: cute.Tensor, n: Int32, state: cute.Tensor) -> Int32:
    """Load the slot of row n while earlier grids may still write it, for a prefetch only.

    A value that is no slot becomes -1. The load bypasses L1, which would keep the value for the
    load that counts.
    """
    exists = n < Int32(slot.shape[0])
    s = memory.load_global(element_address(slot, n), 1, exists, ".cg")[0]
    return ptx.select(exists & (s >= 0) & (s < Int32(state.shape[0])), s, Int32(-1))


def locate_new_records(cursor: Cursor, tokens: Int32) -> tuple[Boolean, Int32]:
    """Whether a row commits, and the place of its first new record, counted over both banks."""
    commits = cursor.length + tokens > WINDOW
    to_row = ptx.select(commits, Int32(0), cursor.length)
    to_bank = ptx.select(commits, 1 - cursor.bank, cursor.bank)
    return commits, to_bank * WINDOW + to_row


@kernel_name("gdn_replay_advance")
@cute.kernel
def advance_kernel(
    hist_len: cute.Tensor,
    bank: cute.Tensor,
    slot: cute.Tensor,
    n_acc: cute.Tensor,
    tokens: Int32,
) -> None:
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    n = block * CURSOR_THREADS + thread
    s = load_slot(slot, n, Int32(slot.shape[0]))
    live = s >= 0
    accepted = memory.load_global(element_address(n_acc, n), 1, live)[0]
    length = memory.load_global(element_address(hist_len, s), 1, live)[0]
    current = memory.load_global(element_address(bank, s), 1, live)[0]
    commits = length + tokens > WINDOW
    kept = ptx.select(commits, Int32(0), length)
    memory.store_global(element_address(hist_len, s), [kept + accepted], live)
    memory.store_global(element_address(bank, s), [ptx.select(commits, 1 - current, current)], live)


@host_name("gdn_replay_advance")
@cute.jit
def advance(
    hist_len: cute.Tensor,
    bank: cute.Tensor,
    slot: cute.Tensor,
    n_acc: cute.Tensor,
    tokens: Int32,
    stream: Any,
) -> None:
    """Move the cursors by the accepted tokens: once a step, after acceptance and the last layer."""
    advance_kernel(hist_len, bank, slot, n_acc, tokens).launch(
        grid=((slot.shape[0] + CURSOR_THREADS - 1) // CURSOR_THREADS, 1, 1),
        block=(CURSOR_THREADS, 1, 1),
        stream=stream,
    )


@kernel_name("gdn_replay_reset")
@cute.kernel
def reset_kernel(hist_len: cute.Tensor, bank: cute.Tensor, slot: cute.Tensor) -> None:
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    s = load_slot(slot, block * CURSOR_THREADS + thread, Int32(slot.shape[0]))
    memory.store_global(element_address(hist_len, s), [Int32(0)], s >= 0)
    memory.store_global(element_address(bank, s), [Int32(0)], s >= 0)


@host_name("gdn_replay_reset")
@cute.jit
def reset(hist_len: cute.Tensor, bank: cute.Tensor, slot: cute.Tensor, stream: Any) -> None:
    """Empty the history of slots: on allocation, after prefill, on resume."""
    reset_kernel(hist_len, bank, slot).launch(
        grid=((slot.shape[0] + CURSOR_THREADS - 1) // CURSOR_THREADS, 1, 1),
        block=(CURSOR_THREADS, 1, 1),
        stream=stream,
    )

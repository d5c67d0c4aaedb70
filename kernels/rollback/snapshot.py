"""The snapshot's shares: whether it is pending, and who consumes it."""

from __future__ import annotations

from cutlass import Boolean, Int32, cute
from specplan.plans.rollback import SHARES


def is_pending(pending: cute.Tensor) -> Boolean:
    """Whether the snapshot is pending, as an atomic load sees it."""
    shares = cute.arch.load(pending.iterator, Int32, sem="relaxed", scope="gpu")
    return Boolean(shares > 0)


@cute.jit
def take_share(pending: cute.Tensor, live: Boolean) -> None:
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

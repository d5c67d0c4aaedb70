"""Atomic accesses of global memory, at the scope of the GPU.

A *key* is an unsigned 64-bit number in two words, the lower one first.
"""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64
from specplan.kernels.device.ptx import emit


def load_relaxed(address: Int64, live: Boolean) -> Int32:
    """Load a word that other CTAs of the launch may write; zero where not ``live``."""
    text = (
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; "
        "@p ld.relaxed.gpu.global.b32 $0, [$1]; }"
    )
    return emit([Int32], [address, Int32(live)], text, "=&r,l,r", volatile=True)[0]


def load_key(address: Int64, live: Boolean) -> tuple[Int32, Int32]:
    """Load a key that other CTAs of the launch have written; zeros where not ``live``."""
    text = (
        "{ .reg .pred p; .reg .b64 k; setp.ne.s32 p, $3, 0; mov.b64 k, 0; "
        "@p ld.relaxed.gpu.global.b64 k, [$2]; mov.b64 {$0, $1}, k; }"
    )
    constraints = "=&r,=&r,l,r"
    low, high = emit([Int32, Int32], [address, Int32(live)], text, constraints, volatile=True)
    return low, high


def store_key(address: Int64, low: Int32, high: Int32, live: Boolean) -> None:
    """Store a key, where ``live``."""
    text = (
        "{ .reg .pred p; .reg .b64 k; setp.ne.s32 p, $3, 0; mov.b64 k, {$1, $2}; "
        "@p st.global.b64 [$0], k; }"
    )
    emit([], [address, low, high, Int32(live)], text, "l,r,r,r", volatile=True)


def raise_key(address: Int64, low: Int32, high: Int32, live: Boolean) -> None:
    """Replace a key by the larger of it and another, where ``live``."""
    text = (
        "{ .reg .pred p; .reg .b64 k; setp.ne.s32 p, $3, 0; mov.b64 k, {$1, $2}; "
        "@p red.relaxed.gpu.global.max.u64 [$0], k; }"
    )
    emit([], [address, low, high, Int32(live)], text, "l,r,r,r", volatile=True)


def arrive(address: Int64, live: Boolean) -> Int32:
    """Add 1 to a 64-bit counter, where ``live``: how many were there before, modulo 2^32, or -1.

    What this thread, and what others that a barrier orders before it, have done is visible to
    whoever arrives later.
    """
    text = (
        "{ .reg .pred p; .reg .b64 n; setp.ne.s32 p, $2, 0; mov.b64 n, -1; "
        "@p atom.acq_rel.gpu.global.add.u64 n, [$1], 1; cvt.u32.u64 $0, n; }"
    )
    return emit([Int32], [address, Int32(live)], text, "=r,l,r", volatile=True)[0]

"""Staged states and replay cursors of the requests that a commit accepts."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Numeric, cute
from specplan.kernels.device import memory
from specplan.plans.rollback import CASTS, State

CAST_TYPES: dict[str, type[Numeric]] = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "float32": Float32,
    "int32": Int32,
    "int64": Int64,
}
#: Column of each field in the state table.
STATE_COLUMN = {name: column for column, name in enumerate(State.__dataclass_fields__)}
#: Accesses that a thread keeps in flight while it copies a staged state.
UNROLL = 4


@cute.jit
def commit_state(
    states: cute.Tensor,
    which: Int32,
    request: Int32,
    accepted: cute.Tensor,
    slots: cute.Tensor,
    live: Boolean,
    thread: Int32,
    threads: cutlass.Constexpr,
) -> None:
    """``pool[slots[g]] = candidates[g, n - 1]`` for one state pool and request, with n clamped to
    1..candidates.
    """
    count = accepted[request]
    slot = slots[request]
    chosen = (
        cutlass.min(cutlass.max(count, 1), Int32(states[which, STATE_COLUMN["candidates"]])) - 1
    )
    source = (
        states[which, STATE_COLUMN["candidates_base"]]
        + Int64(request) * states[which, STATE_COLUMN["request_stride"]]
        + Int64(chosen) * states[which, STATE_COLUMN["candidate_stride"]]
    )
    target = (
        states[which, STATE_COLUMN["pool_base"]]
        + Int64(slot) * states[which, STATE_COLUMN["slot_stride"]]
    )
    items = Int32(states[which, STATE_COLUMN["items"]])
    kind = Int32(states[which, STATE_COLUMN["kind"]])
    if live and slot >= 0 and slot < Int32(states[which, STATE_COLUMN["slots"]]):
        if kind == 16:
            copy_state(source, target, items, thread, 16, threads)
        elif kind == 8:
            copy_state(source, target, items, thread, 8, threads)
        elif kind == 4:
            copy_state(source, target, items, thread, 4, threads)
        for (given, wanted), code in CASTS.items():
            if kind == code:
                cast_state(
                    source, target, items, thread, CAST_TYPES[given], CAST_TYPES[wanted], threads
                )


@cute.jit
def copy_state(
    source: Int64,
    target: Int64,
    items: Int32,
    thread: Int32,
    width: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    """Copy ``items`` items of ``width`` bytes with all threads of the CTA."""
    for base in cutlass.range(thread, items, threads * UNROLL, unroll=1):
        inside = [Boolean(base + i * threads < items) for i in range(UNROLL)]
        offsets = [Int64(base + i * threads) * width for i in range(UNROLL)]
        words = [
            memory.load_once(source + offsets[i], width // 4, inside[i]) for i in range(UNROLL)
        ]
        for i in cutlass.range_constexpr(UNROLL):
            memory.store_once(target + offsets[i], words[i], inside[i])


@cute.jit
def cast_state(
    source: Int64,
    target: Int64,
    items: Int32,
    thread: Int32,
    given: cutlass.Constexpr,
    wanted: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    """Cast ``items`` elements from dtype ``given`` to ``wanted`` with all threads of the CTA."""
    candidate = view_vector(given, source, items)
    pool = view_vector(wanted, target, items)
    for item in cutlass.range(thread, items, threads, unroll=UNROLL):
        pool[item] = candidate[item].to(wanted)


def view_vector(dtype: type[Numeric], address: Int64, items: Int32) -> cute.Tensor:
    """A vector of ``items`` elements at an address."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(items))


@cute.jit
def advance_cursor(
    request: Int32, accepted: cute.Tensor, slots: cute.Tensor, cursors: cute.Tensor, live: Boolean
) -> None:
    """``cursors[slots[g]] = max(n - 1, 0)``; a dummy request has no slot and leaves every cursor as
    it was.
    """
    slot = slots[request]
    if live and slot >= 0 and slot < cursors.shape[0]:
        cursors[slot] = cutlass.max(accepted[request], 1) - 1

"""``stage``: a step's host values, in one record, to the buffers that the step reads.

All tensors are int32 vectors on one CUDA device. The record may be pinned host memory that the
device reads in place: what the host wrote before the launch, or before the replay of a graph that
holds it, is what arrives. An int64 destination is two words an element, the lower one first.

==================  ========  ==============================================================
record              [words]   read
destination_0..15   [n_k]     segment k; empty ones are no segment
==================  ========  ==============================================================

For k < 16 and i < n_k::

    destination_k[i] = record[offset_k + i]

Segments may read the same words. Destinations must not overlap each other or the record, else what
is in them is not defined (``specplan.stage.describe`` refuses destinations that do).

Compiled function: ``stage(record, destination_0, ..., destination_15, offset_0, ..., offset_15,
launches)``. It launches nothing and raises RuntimeError unless every segment lies in the record,
and nothing where ``launches`` is 0.

A row of CTAs a segment, a thread a word: a warp's 128 bytes are one request over the bus. The
addresses are kernel arguments, so nothing is read before the words themselves. Loads do not keep
lines of host memory from an earlier launch (``ld.cv``).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from specplan.kernels import fakes, ranges
from specplan.kernels.device import memory
from specplan.kernels.device.names import host_name, kernel_name
from specplan.kernels.device.ptx import select
from specplan.plans.plan import Plan
from specplan.plans.stage import OP, SEGMENTS

THREADS = 256


@kernel_name("stage")
@cute.kernel
def _stage(
    record: cute.Pointer,
    addresses: tuple[Int64, ...],
    offsets: tuple[Int32, ...],
    words: tuple[Int32, ...],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    part, segment, _ = cute.arch.block_idx()
    address = addresses[0]
    offset = offsets[0]
    count = words[0]
    for number in cutlass.range_constexpr(1, SEGMENTS):
        mine = Boolean(segment == number)
        address = select(mine, addresses[number], address)
        offset = select(mine, offsets[number], offset)
        count = select(mine, words[number], count)
    word = part * THREADS + thread
    live = Boolean(word < count)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    source = record.toint() + (Int64(offset) + word) * 4
    value = memory.load_global(source, 1, live, ".cv")
    memory.store_global(address + Int64(word) * 4, value, live)


def lower(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """The host function of a plan and its fake arguments, for ``cute.compile``."""

    @host_name("stage")
    @cute.jit
    def stage(
        record: cute.Tensor,
        destination_0: cute.Tensor,
        destination_1: cute.Tensor,
        destination_2: cute.Tensor,
        destination_3: cute.Tensor,
        destination_4: cute.Tensor,
        destination_5: cute.Tensor,
        destination_6: cute.Tensor,
        destination_7: cute.Tensor,
        destination_8: cute.Tensor,
        destination_9: cute.Tensor,
        destination_10: cute.Tensor,
        destination_11: cute.Tensor,
        destination_12: cute.Tensor,
        destination_13: cute.Tensor,
        destination_14: cute.Tensor,
        destination_15: cute.Tensor,
        offset_0: Int32,
        offset_1: Int32,
        offset_2: Int32,
        offset_3: Int32,
        offset_4: Int32,
        offset_5: Int32,
        offset_6: Int32,
        offset_7: Int32,
        offset_8: Int32,
        offset_9: Int32,
        offset_10: Int32,
        offset_11: Int32,
        offset_12: Int32,
        offset_13: Int32,
        offset_14: Int32,
        offset_15: Int32,
        launches: Int32,
        stream: Any,
    ) -> None:
        destinations = (
            destination_0, destination_1, destination_2, destination_3, destination_4,
            destination_5, destination_6, destination_7, destination_8, destination_9,
            destination_10, destination_11, destination_12, destination_13, destination_14,
            destination_15,
        )  # fmt: skip
        offsets = (
            offset_0, offset_1, offset_2, offset_3, offset_4, offset_5, offset_6, offset_7,
            offset_8, offset_9, offset_10, offset_11, offset_12, offset_13, offset_14, offset_15,
        )  # fmt: skip
        ranges.refuse_unless_declared(
            *(OP, plan),
            record=record,
            **{f"destination_{number}": each for number, each in enumerate(destinations)},
            **{f"offset_{number}": each for number, each in enumerate(offsets)},
        )
        if launches > 0:
            words = tuple(Int32(each.shape[0]) for each in destinations)
            # At least one CTA: a call with nothing to move loads the code.
            most = Int32(1)
            segments = Int32(1)
            for number, count in enumerate(words):
                most = cutlass.max(most, count)
                last = Int32(count > 0) * (number + 1)
                segments = cutlass.max(segments, last)
            _stage(
                record.iterator,
                tuple(each.iterator.toint() for each in destinations),
                offsets,
                words,
            ).launch(
                grid=[cute.ceil_div(most, THREADS), segments, 1],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    return stage, fakes.arguments(OP, plan)

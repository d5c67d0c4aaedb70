"""``argmax``: the largest logit of each row, as torch orders them.

==========  =================  ====================================================================
logits      [N, V] bf16, fp32  any row stride; V up to 262,144
ids         [N] int32, int64   ids[r] = c + offset + (d2t[c] if there is one), c the column
value       [>= N]             the largest logit in the dtype of the logits; zero is +0, a bf16 NaN
                               is 0x7fff and an fp32 one 0x7fffffff; may be left out
key         [>= N] int64       the order of the value in the upper word, the complement of c +
                               offset in the lower one; may be left out
d2t         [>= V]             int32 or int64; may be left out
scratch     [>= 2 N] int64     zero before the first launch; every launch leaves it zero
==========  =================  ====================================================================

NaN is above everything, +inf too, and the first NaN wins; else the larger value; of equal ones, -0
and +0 among them, the lowest column; of a row of -inf column 0. Columns at and past V are never
looked at. Of the shards of a vocabulary the largest key, compared as an unsigned number, is that of
the whole: the shards add their first column as ``offset``.

Compiled function: ``argmax(logits, ids_int32, ids_int64, value, key, d2t_int32, d2t_int64, scratch,
offset, splits)``, empty tensors for what is left out, ids of one of the two dtypes. With ``splits``
0 it checks its arguments and launches nothing. It raises RuntimeError unless ``1 <= V <= 262144``,
the vectors are as long as above, and offset >= 0.

``splits`` CTAs share a row (``kernels/device/argmax.py``); each raises the row's key in the scratch
and arrives at the row's counter, and the last one writes the outputs and zeroes both. Keys are
compared as numbers, so no order of CTAs changes a bit.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from specplan.kernels import fakes, ranges
from specplan.kernels.device import argmax as vocabulary
from specplan.kernels.device import atomic, memory
from specplan.kernels.device.argmax import THREADS
from specplan.kernels.device.names import kernel_name
from specplan.plans.argmax import ITEM, OP
from specplan.plans.plan import Plan


@kernel_name("argmax")
@cute.kernel
def _argmax(
    logits: Int64,
    row_stride: Int64,
    columns: Int32,
    chunk: Int32,
    outputs: tuple[Int64, Int64, Int64, Int64],
    maps: tuple[Int64, Int64],
    scratch: Int64,
    offset: Int32,
    item: cutlass.Constexpr[int],
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    split, row, _ = cute.arch.block_idx()
    splits, rows, _ = cute.arch.grid_dim()
    begin = split * chunk
    end = cutlass.min(begin + chunk, columns)
    address = logits + Int64(row) * row_stride * item
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    high, low = vocabulary.cta_best(address, begin, end, thread, item)
    if thread < 32:
        at = scratch + Int64(row) * 8
        counter = at + Int64(rows) * 8
        first = thread == 0
        atomic.raise_key(at, low, high, first)
        last = first & (atomic.arrive(counter, first) == splits - 1)
        low, high = atomic.load_key(at, last)
        column = ~low
        atomic.store_key(at, Int32(0), Int32(0), last)
        atomic.store_key(counter, Int32(0), Int32(0), last)
        token = column + offset
        token = token + memory.load_global(maps[0] + Int64(column) * 4, 1, last & (maps[0] != 0))[0]
        token = token + memory.load_global(maps[1] + Int64(column) * 8, 1, last & (maps[1] != 0))[0]
        memory.store_global(outputs[0] + Int64(row) * 4, [token], last & (outputs[0] != 0))
        wide = outputs[1] + Int64(row) * 8
        atomic.store_key(wide, token, token >> 31, last & (outputs[1] != 0))
        value = vocabulary.value_of(high)
        place = outputs[2] + Int64(row) * item
        vocabulary.store_logit(place, value, last & (outputs[2] != 0), item)
        key = outputs[3] + Int64(row) * 8
        atomic.store_key(key, ~(column + offset), high, last & (outputs[3] != 0))


def lower(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """The host function of a plan and its fake arguments, for ``cute.compile``."""
    item = ITEM[str(plan["dtype"])]

    @cute.jit
    def argmax(
        logits: cute.Tensor,
        ids_int32: cute.Tensor,
        ids_int64: cute.Tensor,
        value: cute.Tensor,
        key: cute.Tensor,
        d2t_int32: cute.Tensor,
        d2t_int64: cute.Tensor,
        scratch: cute.Tensor,
        offset: Int32,
        splits: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(
            *(OP, plan),
            logits=logits,
            ids_int32=ids_int32,
            ids_int64=ids_int64,
            value=value,
            key=key,
            d2t_int32=d2t_int32,
            d2t_int64=d2t_int64,
            scratch=scratch,
            offset=offset,
        )
        if splits > 0:
            columns = Int32(logits.shape[1])
            _argmax(
                logits.iterator.toint(),
                Int64(logits.stride[0]),
                columns,
                vocabulary.chunk_of(columns, splits, 16 // item),
                tuple(vocabulary.address_of(each) for each in (ids_int32, ids_int64, value, key)),
                (vocabulary.address_of(d2t_int32), vocabulary.address_of(d2t_int64)),
                scratch.iterator.toint(),
                offset,
                item,
            ).launch(
                grid=[splits, Int32(logits.shape[0]), 1],
                block=[THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    return argmax, fakes.arguments(OP, plan)

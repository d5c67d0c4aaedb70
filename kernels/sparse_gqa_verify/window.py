"""The window: which tokens a CTA attends, and for which rows.

An entry is two words: the physical page, and slot << 16 | membership. In a union an entry is four
consecutive tokens, and bit 4 i + r says that row r lists token i of it. Otherwise an entry is one
token, and bit r says that it is row r's.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import DIRECT, EARLY, FILTERED, UNION
from specplan.kernels.sparse_gqa_verify.cta import Cta, restore_cta
from specplan.kernels.sparse_gqa_verify.selection import fill_listed, share_of
from specplan.kernels.sparse_gqa_verify.union import count_blocks, fill_union, mark_again


@cute.jit
def fill_window(
    cta: Cta,
    mode: Int32,
    row: Int32,
    window: Int32,
    early: Any,
    form: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """``(entries, windows are left, a list repeats a token)``. Ends with a barrier."""
    entries = Int32(0)
    left = Int32(0)
    cta = restore_cta(cta, form)
    repeated = Int32(0)
    first = Int32(0)
    low = Int32(0)
    high = Int32(0)
    # The first entries of a lone row are there already.
    begin = ptx.choose(early & (window == 0), Int32(EARLY * form.threads), Int32(0))
    if mode == DIRECT:
        last = Int32(0)
        if begin > 0:
            first, last = ptx.load_shared2(cta.smem + form.share_at, 48)
        else:
            ptx.wait(0)
            ptx.barrier()
            first, last = share_of(cta, ptx.load_shared(cta.smem + form.misc_at + row * 16 + 4))
        first = first + window * form.window
        entries = cutlass.min(last - first, form.window)
        left = Int32(last - first > form.window)
    else:
        # Several rows' first bitmaps are there already, and tiles overwrite them.
        again = Int32(1)
        if cutlass.const_expr(form.m_tiles > 1):
            again = Int32((window > 0) | (mode == FILTERED))
        if again != 0:
            repeated = mark_again(cta, form)
        blocks = count_blocks(cta, form)
        low, high = share_of(cta, blocks)
        if mode == UNION:
            low = low + window * form.window
            entries = cutlass.min(high - low, form.window)
            left = Int32(high - low > form.window)
            repeated = repeated | fill_union(cta, low, entries, again == 0, form)
            ptx.barrier()
        else:
            repeated = Int32(0)  # rows alone take a list as it is
            listed = ptx.load_shared(cta.smem + form.misc_at + row * 16 + 4)
            first = window * form.window
            entries = cutlass.min(listed - first, form.window)
            left = Int32(listed - first > form.window)
    if (mode != UNION) & (begin < cutlass.max(entries, 1)):
        fill_listed(cta, row, first, entries, begin, mode == FILTERED, low, high, form)
        ptx.barrier()
    return entries, left, repeated

"""The window of rows that are done alone: entries of a row's list, looked up in the block table."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import Form
from specplan.kernels.sparse_gqa_verify.cta import Cta
from specplan.kernels.sparse_gqa_verify.queries import row_address
from specplan.plans.sparse_gqa_verify import UNION_TOKENS


@cute.jit
def prefetch_inputs(
    cta: Cta,
    q: cute.Tensor,
    request: Int32,
    of_rows: tuple[cute.Tensor, ...],
    factors: tuple[cute.Tensor, ...],
    form: cutlass.Constexpr,
) -> None:
    """Asks the L2 for what the CTAs of a unit read first, each for a part: lists, queries, and the
    table of the request, if its rows name the one that they stand at. No more than a hint: what
    came before may still write all of this, and nothing is read.
    """
    place = cta.split * form.threads + cta.thread
    together = cta.splits * form.threads
    for tensor in of_rows:
        ptx.prefetch_l2(word_address(tensor, cta.row0), place == 0)
    if cutlass.const_expr(form.f16):
        for tensor in factors:
            ptx.prefetch_l2(tensor.iterator.toint(), place == 0)
    entry = Int64(cta.lists.stride[1]) * 4
    for row in cutlass.range(cta.rows, unroll=1):
        source = list_address(cta, row)
        for line in cutlass.range(32 * place, Int32(cta.lists.shape[1]), 32 * together, unroll=1):
            ptx.prefetch_l2(source + Int64(line) * entry, Boolean(True))
        for line in cutlass.range(place, cta.group * 4, together, unroll=1):
            head = cta.kv_head * cta.group + (line >> 2)
            dim = 64 * (line & 3)
            ptx.prefetch_l2(row_address(q, cta.row0 + row, head, dim), Boolean(True))
    if request < Int32(cta.table.shape[0]):
        for column in cutlass.range(32 * place, Int32(cta.table.shape[1]), 32 * together, unroll=1):
            ptx.prefetch_l2(table_address(cta, request, column), Boolean(True))


def place_entries(
    cta: Cta, owner: Int32, tokens: list[Int32], limit: Int32, live: Any, form: Form
) -> None:
    """Window entries of a lone row's first tokens, of which this thread has every so many."""
    found = [
        look_up_page(cta, owner, token, live & (token >= 0) & (token <= limit)) for token in tokens
    ]
    for u, (page, slot, valid) in enumerate(found):
        ptx.store_shared2(
            cta.smem + form.window_at + (u * form.threads + cta.thread) * 8,
            ptx.choose(valid, page, Int32(0)),
            ptx.choose(valid, (slot << 16) | 1, Int32(0)),
        )


def word_address(vector: cute.Tensor, index: Int32) -> Int64:
    return vector.iterator.toint() + Int64(index) * Int64(vector.stride[0]) * 4


def share_of(cta: Cta, count: Int32) -> tuple[Int32, Int32]:
    """This split's part of ``count`` items."""
    return count * cta.split // cta.splits, count * (cta.split + 1) // cta.splits


def list_address(cta: Cta, row: Int32) -> Int64:
    return cta.lists.iterator.toint() + Int64(cta.row0 + row) * Int64(cta.lists.stride[0]) * 4


def look_up_page(cta: Cta, owner: Int32, token: Int32, exists: Any) -> tuple[Int32, Int32, Any]:
    """``(page, slot, valid)`` of a logical token of request ``owner``."""
    column, slot = split_token(cta, token)
    inside = exists & (column < Int32(cta.table.shape[1]))
    page = ptx.load_global_if(table_address(cta, owner, column), inside, -1)
    return page, slot, (page >= 0) & (page < cta.pages)


def split_token(cta: Cta, token: Int32) -> tuple[Int32, Int32]:
    """``(column of the block table, slot)`` of a logical token."""
    column = ptx.multiply_high(token, cta.page_reciprocal)
    slot = token - column * cta.page_size
    short = slot >= cta.page_size
    return column + Int32(short), slot - ptx.choose(short, cta.page_size, Int32(0))


def table_address(cta: Cta, owner: Int32, column: Int32) -> Int64:
    at = Int64(owner) * Int64(cta.table.stride[0]) + Int64(column) * Int64(cta.table.stride[1])
    return cta.table.iterator.toint() + at * 4


@cute.jit
def fill_listed(
    cta: Cta,
    row: Int32,
    first: Int32,
    entries: Int32,
    begin: Int32,
    filtered: Any,
    low: Int32,
    high: Int32,
    form: cutlass.Constexpr,
) -> None:
    """Entries ``first ..`` of a row's list; if filtered, those alone whose block's rank is in low
    .. high - 1.
    """
    info = cta.smem + form.misc_at + row * 16
    owner = ptx.load_shared(info)
    limit = ptx.load_shared(info + 8)
    source = list_address(cta, row)
    entry = Int64(cta.lists.stride[1]) * 4
    padded = (entries + form.tile - 1) // form.tile * form.tile
    if begin < padded:
        places = [begin + u * form.threads + cta.thread for u in range(form.per_window)]
        tokens = [
            ptx.load_global_if(source + Int64(first + i) * entry, i < entries, -1) for i in places
        ]
        found = []
        for token in tokens:
            exists = (token >= 0) & (token <= limit)
            within = exists & (token < UNION_TOKENS)
            rank = rank_of(cta, ptx.choose(within, token >> 2, Int32(0)), form)
            exists = exists & (~filtered | (within & (rank >= low) & (rank < high)))
            found.append(look_up_page(cta, owner, token, exists))
        for u in cutlass.range_constexpr(form.per_window):
            page, slot, valid = found[u]
            ptx.store_shared2_if(
                cta.smem + form.window_at + places[u] * 8,
                ptx.choose(valid, page, Int32(0)),
                ptx.choose(valid, (slot << 16) | (Int32(1) << row), Int32(0)),
                places[u] < form.window,
            )


def rank_of(cta: Cta, block: Int32, form: Form) -> Int32:
    """How many marked blocks lie below ``block``."""
    word = (block >> 5) * 4
    bits = ptx.load_shared(cta.smem + form.union_at + word)
    below = ptx.load_shared(cta.smem + form.prefix_at + word)
    return below + ptx.population(bits & ((Int32(1) << (block & 31)) - 1))

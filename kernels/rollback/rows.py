"""Rows of a plane: saved to the snapshot, and put back where they are rejected."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Numeric, cute
from specplan.kernels.device import memory
from specplan.plans.rollback import MAX_LANES, Plane

#: Column of each field in the plane table.
PLANE_COLUMN = {name: column for column, name in enumerate(Plane.__dataclass_fields__)}


class PlaneView(NamedTuple):
    """A plane as one thread sees it, read before the grid waits for its predecessor."""

    base: Int64
    page_stride: Int64
    row_stride: Int64
    pages: Int32
    page_tokens: Int32
    record_offset: Int32
    vector: Int32
    items: Int32
    lane: Int32
    lanes: Int32
    row: Int32
    shift: Int32


class RejectedMask(NamedTuple):
    """The rejected rows as a mask."""

    rejected: cute.Tensor


class AcceptedCounts(NamedTuple):
    """The rejected rows as accepted counts; row r is token r mod tokens of request r / tokens, or
    listed if tokens is 0.
    """

    accepted: cute.Tensor
    row_requests: cute.Tensor
    row_ordinals: cute.Tensor
    tokens: Int32
    reciprocal: Int64


def view_plane(planes: cute.Tensor, plane: Int32, thread: Int32) -> PlaneView:
    """Load a plane's row of the table, and divide its rows' accesses over the lanes."""

    def field(name: str) -> Int64:
        return planes[plane, PLANE_COLUMN[name]]

    vector = Int32(field("vector"))
    items = Int32(field("row_bytes")) >> (2 + Int32(vector > 4) + Int32(vector > 8))
    shift = Int32(0)
    for power in range(MAX_LANES.bit_length() - 1):
        shift += Int32(items > (1 << power))
    lanes = Int32(1) << shift
    return PlaneView(
        base=field("base"),
        page_stride=field("page_stride"),
        row_stride=field("row_stride"),
        pages=Int32(field("pages")),
        page_tokens=Int32(field("page_tokens")),
        record_offset=Int32(field("record_offset")),
        vector=vector,
        items=items,
        lane=thread & (lanes - 1),
        lanes=lanes,
        row=thread >> shift,
        shift=shift,
    )


@cute.jit
def save_rows(
    plane: PlaneView,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    first: Int32,
    last: Int32,
    width: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    """Copy rows ``first`` to ``last - 1`` of a plane to the snapshot."""
    step = Int32(threads) >> plane.shift
    for base in cutlass.range(first + plane.row, last, step * unroll, unroll=1):
        rows = [cutlass.min(base + i * step, last - 1) for i in range(unroll)]
        places = [
            (memory.load_element(pages, row), memory.load_element(within, row)) for row in rows
        ]
        there = [Boolean(base + i * step < last) & exists(plane, *places[i]) for i in range(unroll)]
        sources = [row_address(plane, *place) for place in places]
        targets = [record_address(plane, old, row) for row in rows]
        for item in cutlass.range(plane.lane, plane.items, plane.lanes, unroll=1):
            offset = Int64(item * width)
            words = [
                memory.load_once(sources[i] + offset, width // 4, there[i]) for i in range(unroll)
            ]
            for i in cutlass.range_constexpr(unroll):
                memory.store_once(targets[i] + offset, words[i], there[i])


@cute.jit
def restore_plane(
    plane: PlaneView,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    verdicts: RejectedMask | AcceptedCounts,
    live: Boolean,
    first: Int32,
    last: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    """Put rejected rows back, by accesses as wide as the plane allows."""
    if plane.vector == 16:
        restore_rows(plane, pages, within, old, verdicts, live, first, last, 16, threads, unroll)
    elif plane.vector == 8:
        restore_rows(plane, pages, within, old, verdicts, live, first, last, 8, threads, unroll)
    else:
        restore_rows(plane, pages, within, old, verdicts, live, first, last, 4, threads, unroll)


@cute.jit
def restore_rows(
    plane: PlaneView,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    verdicts: RejectedMask | AcceptedCounts,
    live: Boolean,
    first: Int32,
    last: Int32,
    width: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    """Put the rejected rows of ``first`` to ``last - 1`` back from the snapshot."""
    step = Int32(threads) >> plane.shift
    for base in cutlass.range(first + plane.row, last, step * unroll, unroll=1):
        rows = [cutlass.min(base + i * step, last - 1) for i in range(unroll)]
        inside = [Boolean(base + i * step < last) for i in range(unroll)]
        sources = [record_address(plane, old, row) for row in rows]
        places = [
            (memory.load_element(pages, row), memory.load_element(within, row)) for row in rows
        ]
        chosen = [is_rejected(verdicts, row) for row in rows]
        targets = [row_address(plane, *place) for place in places]
        back = [inside[i] & chosen[i] & live & exists(plane, *places[i]) for i in range(unroll)]
        for item in cutlass.range(plane.lane, plane.items, plane.lanes, unroll=1):
            offset = Int64(item * width)
            words = [
                memory.load_once(sources[i] + offset, width // 4, back[i]) for i in range(unroll)
            ]
            for i in cutlass.range_constexpr(unroll):
                memory.store_once(targets[i] + offset, words[i], back[i])


@cute.jit
def is_rejected(verdicts: RejectedMask | AcceptedCounts, row: Int32) -> Boolean:
    """Whether the row goes back. A row of no request is left alone, and so is ordinal 0 whatever
    the count says.
    """
    verdict = Boolean(False)
    if cutlass.const_expr(isinstance(verdicts, RejectedMask)):
        verdict = Boolean(memory.load_element(verdicts.rejected, row) != 0)
    else:
        listed = Boolean(verdicts.tokens == 0)
        given_request = memory.load_element(verdicts.row_requests, row, listed)
        given_ordinal = memory.load_element(verdicts.row_ordinals, row, listed)
        request = Int32((Int64(row) * verdicts.reciprocal) >> 32)
        ordinal = row - request * verdicts.tokens
        if listed:
            request = given_request
            ordinal = given_ordinal
        real = (request >= 0) & (request < verdicts.accepted.shape[0])
        count = memory.load_element(verdicts.accepted, request, real)
        verdict = real & (ordinal >= cutlass.max(count, 1))
    return verdict


def exists(plane: PlaneView, page: Numeric, place: Numeric) -> Boolean:
    """Whether a row's page and its place in the page exist."""
    return (page >= 0) & (page < plane.pages) & (place >= 0) & (place < plane.page_tokens)


def row_address(plane: PlaneView, page: Numeric, place: Numeric) -> Int64:
    """Address of a row of a plane; may be anything for a row that does not exist."""
    return plane.base + Int64(page) * plane.page_stride + Int64(place) * plane.row_stride


def record_address(plane: PlaneView, old: cute.Tensor, row: Int32) -> Int64:
    """Address of a row's record of a plane in the snapshot."""
    return old.iterator.toint() + Int64(row) * old.stride[0] + plane.record_offset

"""What becomes of a request once its draft token is known: one warp, of which the first lane has
the token, and each lane an axis of the positions.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64
from specplan.kernels.device import atomic, memory
from specplan.kernels.device.divide import divide31
from specplan.kernels.device.ptx import select


class Step:
    """The arguments of a launch besides the target: addresses, 0 for what is left out, strides in
    elements, numbers, and what divides by the tokens of a page, of a group, and by the scale.
    """

    def __init__(
        self,
        addresses: tuple[Int64, ...],
        strides: tuple[Int32, ...],
        numbers: tuple[Int32, ...],
        by_page: tuple[Int64, Int32],
        by_group: tuple[Int64, Int32],
        by_scale: tuple[Int64, Int32],
    ) -> None:
        self.drafts, self.ids_int32, self.ids_int64, self.scratch = addresses[:4]
        self.d2t_int32, self.d2t_int64, self.next_new_tokens, self.next_token = addresses[4:8]
        self.kv_lens, self.slot, self.block_table, self.request_of_row = addresses[8:12]
        self.position_of_row, self.visible_of_row = addresses[12:14]
        self.page_of_row, self.within_of_row = addresses[14:16], addresses[16:18]
        self.cache_slot, self.group_slot = addresses[18:20]
        self.positions = addresses[20:22]
        self.draft_stride, self.new_token_stride, self.slot_stride = strides[:3]
        self.table_strides, self.position_strides = strides[3:5], strides[5:7]
        self.requests, self.step, self.more, self.axes, self.mapped = numbers[:5]
        self.columns, self.page_size, self.group, self.page_groups = numbers[5:9]
        self.by_page, self.by_group, self.by_scale = by_page, by_group, by_scale


class Early:
    """What a warp loads of its request before the token is known. Of what the request's last CTA
    writes, others may be late to read: these loads are atomic.
    """

    def __init__(self, step: Step, request: Int32, lane: Int32, live: Boolean) -> None:
        leader = live & (lane == 0)
        at = Int64(request) * step.slot_stride
        slot = memory.load_global(step.slot + at * 4, 1, live & (step.slot != 0))[0]
        #: Padding requests have a slot below 0; without slots there are none.
        self.real = (step.slot == 0) | (slot >= 0)
        self.moves = self.real & (step.more != 0)
        at = Int64(request) * 4
        length = atomic.load_relaxed(step.kv_lens + at, leader & (step.kv_lens != 0))
        self.length = length + select(self.moves, Int32(1), Int32(0))
        self.position = self.length - 1
        self.there = self.real & (self.position >= 0)
        self.column = divide31(cutlass.max(self.position, Int32(0)), step.by_page)
        #: Of a table that is there, a column that it has.
        self.listed = leader & self.there & (step.block_table != 0) & (self.column < step.columns)
        row, column = step.table_strides
        entry = Int64(request) * row + Int64(self.column) * column
        self.entry = memory.load_global(step.block_table + entry * 4, 1, self.listed)[0]
        has_token = leader & (step.next_token != 0) & (step.next_new_tokens != 0)
        self.has_token = has_token
        self.next_token = memory.load_global(step.next_token + at, 1, has_token)[0]
        axis = live & (lane < step.axes)
        self.axis = axis
        narrow = Int64(lane) * step.position_strides[0] + request
        wide = Int64(lane) * step.position_strides[1] + request
        self.narrow_place = step.positions[0] + narrow * 4
        self.wide_place = step.positions[1] + wide * 8
        self.narrow = atomic.load_relaxed(self.narrow_place, axis & (step.positions[0] != 0))
        self.low, self.high = atomic.load_key(self.wide_place, axis & (step.positions[1] != 0))


def settle(step: Step, early: Early, request: Int32, lane: Int32, token: Int32) -> None:
    """Write a request's outputs; the first lane's ``token`` is the column of the draft head. All
    lanes of the warp are here.
    """
    leader = lane == 0
    known = leader & (token >= 0) & (token < step.mapped)
    at = Int64(token)
    more = memory.load_global(step.d2t_int32 + at * 4, 1, known & (step.d2t_int32 != 0))[0]
    wide = memory.load_global(step.d2t_int64 + at * 8, 1, known & (step.d2t_int64 != 0))[0]
    token = token + more + wide

    at = Int64(request)
    draft = step.drafts + (at * step.draft_stride + step.step) * 4
    memory.store_global(draft, [token], leader)
    memory.store_global(step.ids_int32 + at * 4, [token], leader & (step.ids_int32 != 0))
    atomic.store_key(step.ids_int64 + at * 8, token, token >> 31, leader & (step.ids_int64 != 0))
    line = step.next_new_tokens + at * step.new_token_stride * 4
    memory.store_global(line, [early.next_token], early.has_token)
    place = line + (Int64(step.step) + 1) * 4
    memory.store_global(place, [token], leader & (step.next_new_tokens != 0))

    moves = leader & early.moves & (step.kv_lens != 0)
    memory.store_global(step.kv_lens + at * 4, [early.length], moves)
    axis = early.axis & early.moves
    narrow = early.narrow + 1
    memory.store_global(early.narrow_place, [narrow], axis & (step.positions[0] != 0))
    low = early.low + 1
    high = select(low == 0, early.high + 1, early.high)
    atomic.store_key(early.wide_place, low, high, axis & (step.positions[1] != 0))
    _map_row(step, early, request, leader)


def _map_row(step: Step, early: Early, request: Int32, leader: Boolean) -> None:
    """What is said of the request's next row."""
    there, at = early.there, Int64(request)
    position = early.position
    page = select(early.listed, early.entry, Int32(-1))
    page = select(page >= 0, divide31(cutlass.max(page, Int32(0)), step.by_scale), page)
    within = position - early.column * step.page_size
    visible = divide31(cutlass.max(position + 1, Int32(0)), step.by_group)
    ends = (page >= 0) & (visible * step.group == position + 1)
    slot = Int64(page) * step.page_size + within
    slot = select(page >= 0, slot, Int64(-1))
    of_group = divide31(cutlass.max(within, Int32(0)), step.by_group)
    group_slot = Int64(page) * step.page_groups + of_group
    group_slot = select(ends, group_slot, Int64(-1))
    within, visible = select(there, within, Int32(0)), select(there, visible, Int32(0))

    for address, word in (
        (step.request_of_row, select(there, request, Int32(-1))),
        (step.position_of_row, select(there, position, Int32(-1))),
        (step.visible_of_row, visible),
        (step.page_of_row[0], page),
        (step.within_of_row[0], within),
    ):
        memory.store_global(address + at * 4, [word], leader & (address != 0))
    for address, low, high in (
        (step.page_of_row[1], page, page >> 31),
        (step.within_of_row[1], within, Int32(0)),
        (step.cache_slot, Int32(slot), Int32(slot >> 32)),
        (step.group_slot, Int32(group_slot), Int32(group_slot >> 32)),
    ):
        atomic.store_key(address + at * 8, low, high, leader & (address != 0))

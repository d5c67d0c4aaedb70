"""Asynchronous copies of the tokens of a tile: K, V and their block scales to shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import FETCH_BATCH, Form
from specplan.kernels.sparse_gqa_verify.cta import Cta


class Plane(NamedTuple):
    """How the copies address a cache plane of this CTA's head, in bytes: base, page stride, token
    stride.

    It is kept in shared memory: in registers these values would be alive through the whole tile
    loop.
    """

    base: Int64
    page: Int64
    token: Int32


class Places(NamedTuple):
    """Window entries of tokens that are a multiple of four apart: where the first stands, less
    ``window_at``, and the bytes to the next; which of an entry's tokens they are, and that token's
    bits of its membership.
    """

    at: Int32
    step: Int32
    within: Int32
    bits: Int32


def locate_tokens(cta: Cta, place: Int32, apart: int, shift: Int32) -> Places:
    within = place & ((Int32(1) << shift) - 1)
    at = cta.smem + (place >> shift) * 8
    return Places(at, Int32(8 * apart) >> shift, within, Int32(15) << (4 * within))


def load_entries(
    places: Places, start: Int32 | int, count: int, form: Form
) -> list[tuple[Int32, Int32, Any]]:
    """``(page, slot, listed by any row)`` of some of the tokens."""
    found = []
    at = places.at + start * places.step
    for _ in range(count):
        page, packed = ptx.load_shared2(at, form.window_at)
        slot = ptx.shift_right(packed, 16) + places.within
        found.append((page, slot, (packed & places.bits) != 0))
        at = at + places.step
    return found


def load_plane(cta: Cta, which: int, form: Form) -> Plane:
    base, page = ptx.load_shared_wide(cta.smem + form.planes_at + 32 * which)
    return Plane(base, page, ptx.load_shared(cta.smem + form.planes_at + 32 * which + 16))


def source_address(plane: Plane, first: Int32, page: Int32, slot: Int32) -> Int64:
    """Where the bytes of a token stand, from ``first`` on."""
    base = ptx.advance(plane.base + Int64(first), page, plane.page)
    return base + Int64(slot) * Int64(plane.token)


@cute.jit
def fetch_k(
    cta: Cta, tile: Int32, stage: Int32, tiles: Int32, shift: Int32, form: cutlass.Constexpr
) -> None:
    """Starts copying this warp's tokens of K; one group of copies, empty beyond the last tile."""
    if tile < tiles:
        plane = load_plane(cta, 0, form)
        # Eight lanes per token, so that an address serves all of the 128 bytes of a row.
        chunk = cta.lane & 7
        token = cta.warp * 16 + (cta.lane >> 3)
        ring = cta.smem + form.ring_at + (stage * form.tile + token) * form.row_bytes
        ring = ring + (chunk ^ ((token & 1) << 2)) * 16
        places = locate_tokens(cta, tile * form.tile + token, 4, shift)
        entries = load_entries(places, 0, 4, form)
        for turn in cutlass.range_constexpr(4):
            page, slot, listed = entries[turn]
            source = source_address(plane, chunk * 16, page, slot)
            for part in cutlass.range_constexpr(form.row_bytes // 128):
                target = ring + (4 * turn * form.row_bytes + 128 * part)
                ptx.copy16(target, source + 128 * part, listed)
        if cutlass.const_expr(form.dtype == "nvfp4"):
            # Half of a token's 16 scales a lane.
            token, half = cta.warp * 16 + (cta.lane >> 1), (cta.lane & 1) * 8
            places = locate_tokens(cta, tile * form.tile + token, 4, shift)
            page, slot, listed = load_entries(places, 0, 1, form)[0]
            source = source_address(load_plane(cta, 2, form), half, page, slot)
            target = cta.smem + form.k_scales_at + (stage * form.tile + token) * 16 + half
            ptx.copy8(target, source, listed)
    ptx.commit()


@cute.jit
def fetch_v(
    cta: Cta, tile: Int32, stage: Int32, tiles: Int32, shift: Int32, form: cutlass.Constexpr
) -> None:
    """Starts copying this warp's dims of V; one group of copies, empty beyond the last tile."""
    if tile < tiles:
        plane = load_plane(cta, 1, form)
        chunks = form.row_bytes // 16 // form.warps
        per_turn = 32 // chunks
        chunk = cta.warp * chunks + (cta.lane & (chunks - 1))
        token = cta.lane >> (chunks.bit_length() - 1)
        ring = cta.smem + form.v_at + (stage * form.tile + token) * form.row_bytes
        # The swizzle goes by bits 1 and 2 of the token; of four tokens a turn bit 2 is the turn's.
        swizzle = token & 6
        sides = (ring + (chunk ^ swizzle) * 16, ring + (chunk ^ swizzle ^ (per_turn & 4)) * 16)
        places = locate_tokens(cta, tile * form.tile + token, per_turn, shift)
        turns = form.tile // per_turn
        batch = min(turns, FETCH_BATCH)
        for start in cutlass.range(0, turns, batch, unroll=1):
            entries = load_entries(places, start, batch, form)
            first = start * (per_turn * form.row_bytes)
            for u in cutlass.range_constexpr(batch):
                page, slot, listed = entries[u]
                target = sides[u % 2] + first + u * (per_turn * form.row_bytes)
                ptx.copy16(target, source_address(plane, chunk * 16, page, slot), listed)
        if cutlass.const_expr(form.dtype == "nvfp4"):
            scales = load_plane(cta, 3, form)
            # 16 bytes, or 4, hold what a warp needs, or two of eight. Interleaved ones are those of
            # four tokens.
            wanted = (cta.warp >> (form.warps // 8)) * (4 + 12 * cta.interleaved)
            keep = -1 - 3 * cta.interleaved
            ring = cta.smem + form.v_scales_at
            ring = ring + ((stage * form.warps + cta.warp) * form.tile + cta.lane) * 16
            places = locate_tokens(cta, tile * form.tile + cta.lane, 32, shift)
            entries = load_entries(places, 0, form.tile // 32, form)
            for turn in cutlass.range_constexpr(form.tile // 32):
                page, slot, listed = entries[turn]
                source = source_address(scales, wanted, page, slot & keep)
                if cta.interleaved != 0:
                    ptx.copy16(ring + turn * 512, source, listed)
                else:
                    ptx.copy4(ring + turn * 512, source, listed)
    ptx.commit()

"""Online softmax: scores to weights, row maxima and totals."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import MOST_WEIGHT, Form
from specplan.kernels.sparse_gqa_verify.cta import Cta
from specplan.kernels.sparse_gqa_verify.queries import maxima_address


def load_members(cta: Cta, tile: Int32, shift: Int32, form: Form) -> list[Int32]:
    """Membership of the four tokens that this lane has scores of, in its lowest bits."""
    place = tile * form.tile + cta.warp * 16 + 2 * (cta.lane & 3)
    first = cta.smem + (place >> shift) * 8
    rest = Int32(1) - (shift >> 1)  # of a union both tokens of a pair are of one entry
    members: list[Int32] = []
    for j in range(2):
        for e in range(2):
            at = first + j * (Int32(64) >> shift) + e * 8 * rest
            packed = ptx.load_shared(at, form.window_at + 4)
            within = (place + e) & ((Int32(1) << shift) - 1)
            members.append(packed >> (4 * within))
    return members


def select_listed(members: list[Int32], row_bits: Int32, i: int) -> list[Int32]:
    """Not 0 where this lane's row ``i`` lists each of its four tokens."""
    bits = (row_bits >> (4 * i)) & 15
    return [each & bits for each in members]


def score_spots(i: int) -> list[int]:
    """Where a lane's four scores of its row ``i`` stand."""
    return [(i // 2 * 2 + j) * 4 + 2 * (i % 2) + e for j in range(2) for e in range(2)]


def load_row_scale(cta: Cta, i: int, form: Form) -> Float32:
    """What makes a raw score of this lane's row ``i`` one in log2 units."""
    at = cta.smem + ((cta.lane >> 2) * 4 if form.f16 else 0)
    return ptx.load_shared_float(at, form.row_scales_at + (32 * i if form.f16 else 0))


@cute.jit
def weigh_scores(
    cta: Cta,
    tile: Int32,
    first: Any,
    shift: Int32,
    row_bits: Int32,
    scores: Any,
    acc: Any,
    top: Any,
    total: Any,
    form: cutlass.Constexpr,
) -> None:
    """Scores to weights in shared memory, as A fragments, and to totals. Ends with a barrier.

    A weight is relative to its row's ``top``, which is the row's maximum at some earlier tile. As
    long as no sum of four weights is above ``MOST_WEIGHT``, no warp has to know the others' scores;
    else all rows take their maxima of now, and what was summed before shrinks.
    """
    added = cute.make_rmem_tensor((2 * form.m_tiles,), Float32)
    above = Int32(1)
    if not first:
        members = load_members(cta, tile, shift, form)
        anchors = [top[i] for i in range(2 * form.m_tiles)]
        store_weights(cta, tile, members, row_bits, scores, anchors, added, False, form)
        # A row that has no maximum yet gives infinite weights, or NaN.
        fits = added[0] <= MOST_WEIGHT
        for i in cutlass.range_constexpr(1, 2 * form.m_tiles):
            fits = fits & (added[i] <= MOST_WEIGHT)
        ptx.wait(2 * form.stages - 1)
        above = ptx.any_thread(~fits)
    if above != 0:
        # Rare: what is read again takes no registers before.
        again = load_members(cta, tile, shift, form)
        raise_row_maxima(cta, again, row_bits, scores, acc, top, total, form)
        again = load_members(cta, tile, shift, form)
        anchors = [anchor_of(top[i]) for i in range(2 * form.m_tiles)]
        store_weights(cta, tile, again, row_bits, scores, anchors, added, True, form)
        ptx.wait(2 * form.stages - 1)
        ptx.barrier()
    for i in cutlass.range_constexpr(2 * form.m_tiles):
        total[i] = total[i] + added[i]


def anchor_of(top: Float32) -> Float32:
    """A maximum, or 0 for a row that has none."""
    return ptx.choose_float(top == Float32(float("-inf")), Float32(0.0), top)


def store_weights(
    cta: Cta,
    tile: Int32,
    members: list[Int32],
    row_bits: Int32,
    scores: Any,
    anchors: list[Float32],
    added: Any,
    rounded: bool,
    form: Form,
) -> None:
    """``rounded``: scores are scaled as maxima are, so that a row's maximum weighs 1 however large
    it is. Else they may weigh more or less where they have no digits after the point.
    """
    pack = ptx.pack_f16 if form.f16 else ptx.pack_bf16
    base = cta.smem + (tile & 1) * form.p_bytes + cta.warp * 512 + cta.lane * 16
    for m_tile in range(form.m_tiles):
        halves: list[list[Int32]] = []
        for i in (2 * m_tile, 2 * m_tile + 1):
            scale = load_row_scale(cta, i, form)
            weights = []
            for spot, listed in zip(
                score_spots(i), select_listed(members, row_bits, i), strict=True
            ):
                if rounded:
                    exponent = ptx.multiply(scores[spot], scale) - anchors[i]
                else:
                    exponent = ptx.multiply_add(scores[spot], scale, -anchors[i])
                weight = ptx.exp2(exponent)
                weights.append(ptx.choose_float(listed, weight, Float32(0.0)))
            added[i] = (weights[0] + weights[1]) + (weights[2] + weights[3])
            halves.append([pack(weights[0], weights[1]), pack(weights[2], weights[3])])
        upper, lower = halves
        fragment = (upper[0], lower[0], upper[1], lower[1])
        ptx.store_shared4(base, fragment, form.p_at + m_tile * form.warps * 512)


def raise_row_maxima(
    cta: Cta,
    members: list[Int32],
    row_bits: Int32,
    scores: Any,
    acc: Any,
    top: Any,
    total: Any,
    form: Form,
) -> None:
    """Every row's maximum over all warps' scores so far; sums and totals become relative to it."""
    minus = Float32(float("-inf"))
    tops: list[Float32] = []
    for i in range(2 * form.m_tiles):
        scale = load_row_scale(cta, i, form)
        largest = minus
        for spot, listed in zip(score_spots(i), select_listed(members, row_bits, i), strict=True):
            scaled = ptx.choose_float(listed, ptx.multiply(scores[spot], scale), minus)
            largest = ptx.maximum(largest, scaled)
        tops.append(largest)
    # Side by side, so that a shuffle does not wait for the one before.
    for mask in (1, 2):
        others = [ptx.shuffle_xor_float(each, mask) for each in tops]
        tops = [ptx.maximum(a, b) for a, b in zip(tops, others, strict=True)]
    for i in range(2 * form.m_tiles):
        ptx.store_shared_float(
            maxima_address(cta, form) + cta.warp * 4, tops[i], 32 * form.warps * i
        )
    ptx.barrier()
    n_tiles = form.slice // 8
    for i in range(2 * form.m_tiles):
        largest = top[i]
        for part in range(form.warps // 4):
            at = maxima_address(cta, form)
            four = ptx.load_shared4_float(at, 32 * form.warps * i + 16 * part)
            several = ptx.maximum(ptx.maximum(four[0], four[1]), ptx.maximum(four[2], four[3]))
            largest = ptx.maximum(largest, several)
        fade = ptx.exp2(top[i] - anchor_of(largest))
        top[i] = largest
        total[i] = total[i] * fade
        for n in range(n_tiles):
            for e in range(2):
                spot = ((i // 2) * n_tiles + n) * 4 + 2 * (i % 2) + e
                acc[spot] = acc[spot] * fade

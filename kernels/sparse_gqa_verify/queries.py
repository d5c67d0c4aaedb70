"""Queries: global memory to MMA fragments in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import Form
from specplan.kernels.sparse_gqa_verify.cta import Cta


def first_dim(form: Form, warp: Int32, quad: Int32, pair: int) -> Int32:
    """First of the eight dims that lane ``quad`` of a quad feeds to MMA steps 2 p and 2 p + 1,
    where p = pairs a warp x warp + pair.

    A step contracts 16 dims in any order, if K and Q agree. This order makes what a lane needs of a
    K row 16 contiguous bytes in every format.
    """
    p = warp * (8 // form.warps) + pair
    if form.dtype == "bf16":
        return p * 32 + 8 * quad
    if form.dtype == "fp8_e4m3":
        return (p >> 1) * 64 + (p & 1) * 8 + 16 * quad
    return (p >> 2) * 128 + ((p >> 1) & 1) * 16 + (p & 1) * 8 + 32 * quad


def row_of(cta: Cta, m: Int32) -> Int32:
    """``m // group``, exact for the few rows there are."""
    return (m * cta.group_reciprocal) >> 16


def locate_row_and_head(cta: Cta, m: Int32) -> tuple[Int32, Int32]:
    """The row of q and the query head of a row of the MMA tiles."""
    row = row_of(cta, m)
    return cta.row0 + row, cta.kv_head * cta.group + (m - row * cta.group)


def fetch_queries(cta: Cta, q: cute.Tensor, form: Form) -> Any:
    """What this lane's fragments of its warp's steps hold: eight dims of each of its rows for
    every two steps.
    """
    pairs = 8 // form.warps
    words = cute.make_rmem_tensor((form.m_tiles * 8 * pairs,), Int32)
    for i in range(2 * form.m_tiles):
        m = (cta.lane >> 2) + 8 * i
        row, head = locate_row_and_head(cta, m)
        for pair in range(pairs):
            dim = first_dim(form, cta.warp, cta.lane & 3, pair)
            address = row_address(q, row, head, dim)
            four = ptx.load_global4_if(address, m < cta.rows * cta.group)
            for j in range(4):
                words[4 * (pairs * i + pair) + j] = four[j]
    return words


def maxima_address(cta: Cta, form: Form) -> Int32:
    """Where each warp's part of something about this lane's first row stands; the next is eight
    rows of ``warps`` words on.
    """
    return cta.smem + form.reduce_at + (cta.lane >> 2) * 4 * form.warps


@cute.jit
def place_queries(
    cta: Cta,
    words: Any,
    score_scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Q to fragments in shared memory. In fp16 each row is scaled by a power of two, which is
    exact.
    """
    pairs = 8 // form.warps
    if cutlass.const_expr(form.f16):
        mine = maxima_address(cta, form) + cta.warp * 4
        for i in cutlass.range_constexpr(2 * form.m_tiles):
            largest = Int32(0)
            for j in cutlass.range_constexpr(4 * pairs):
                word = words[i * 4 * pairs + j]
                largest = cutlass.max(largest, word & 0x7FFF)
                largest = cutlass.max(largest, ptx.shift_right(word, 16) & 0x7FFF)
            largest = cutlass.max(largest, ptx.shuffle_xor(largest, 1))
            largest = cutlass.max(largest, ptx.shuffle_xor(largest, 2))
            ptx.store_shared(mine, largest, 32 * form.warps * i)
        ptx.barrier()
        for i in cutlass.range_constexpr(2 * form.m_tiles):
            largest = Int32(0)
            for part in cutlass.range_constexpr(form.warps // 4):
                at = maxima_address(cta, form)
                four = ptx.load_shared4(at, 32 * form.warps * i + 16 * part)
                both = cutlass.max(cutlass.max(four[0], four[1]), cutlass.max(four[2], four[3]))
                largest = cutlass.max(largest, both)
            # The largest magnitude moves to [16, 32). Rows with Inf or NaN stay as they are.
            exponent = cutlass.max(largest >> 7, 8)
            exponent = ptx.choose(largest >= 0x7F80, Int32(131), exponent)
            factor = ptx.float_of_bits((258 - exponent) << 23)
            inverse = ptx.float_of_bits((exponent - 4) << 23)
            row_scale = cta.smem + form.row_scales_at + ((cta.lane >> 2) + 8 * i) * 4
            if cta.warp == 0:
                ptx.store_shared_float(row_scale, score_scale * inverse)
            for j in cutlass.range_constexpr(4 * pairs):
                at_word = i * 4 * pairs + j
                low, high = ptx.unpack_bf16(words[at_word])
                words[at_word] = ptx.pack_f16(low * factor, high * factor)
    elif cta.thread == 0:
        ptx.store_shared_float(cta.smem + form.row_scales_at, score_scale)

    base = cta.smem + cta.warp * (2 * pairs * 512) + cta.lane * 16
    for tile in cutlass.range_constexpr(form.m_tiles):
        for pair in cutlass.range_constexpr(pairs):
            upper = [words[4 * (2 * tile * pairs + pair) + i] for i in range(4)]
            lower = [words[4 * ((2 * tile + 1) * pairs + pair) + i] for i in range(4)]
            if cutlass.const_expr(form.dtype == "nvfp4" and not form.native_e2m1):
                upper, lower = order_evens_first(upper), order_evens_first(lower)
            for step in cutlass.range_constexpr(2):
                ptx.store_shared4(
                    base,
                    (upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]),
                    (tile * 16 + 2 * pair + step) * 512,
                )


def order_evens_first(words: list[Int32]) -> list[Int32]:
    """Eight halves d0 .. d7 as (d0,d2) (d4,d6) (d1,d3) (d5,d7), the order that the integer e2m1
    decode produces.
    """
    a, b, c, d = words
    return [
        ptx.permute(a, b, 0x5410),
        ptx.permute(c, d, 0x5410),
        ptx.permute(a, b, 0x7632),
        ptx.permute(c, d, 0x7632),
    ]


def row_address(tensor: cute.Tensor, row: Int32, head: Int32, dim: Int32) -> Int64:
    at = Int64(row) * Int64(tensor.stride[0]) + Int64(head) * Int64(tensor.stride[1]) + Int64(dim)
    return tensor.iterator.toint() + at * 2

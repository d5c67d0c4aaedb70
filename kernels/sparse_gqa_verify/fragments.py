"""K and V in shared memory, decoded to MMA fragments."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import Form
from specplan.kernels.sparse_gqa_verify.cta import Cta
from specplan.plans.sparse_gqa_verify import HEAD_DIM


def decode_e2m1(word: Int32, form: Form) -> list[Int32]:
    """Eight e2m1 as four f16x2. By integers: times 2^-14, in the order of ``order_evens_first``."""
    if form.native_e2m1:
        return list(ptx.e2m1_pairs(word))
    odd = ptx.blend(word, -0x7F7F7F80, ptx.shift_right(word, 3) & 0x0E0E0E0E)
    even = ptx.blend(word << 4, -0x7F7F7F80, (word << 1) & 0x0E0E0E0E)
    return [
        ptx.zero_extend_bytes(even, 0x1404),
        ptx.zero_extend_bytes(even, 0x3424),
        ptx.zero_extend_bytes(odd, 0x1404),
        ptx.zero_extend_bytes(odd, 0x3424),
    ]


def decode_scale_pairs(word: Int32, form: Form) -> tuple[Int32, Int32]:
    """Four e4m3 block scales as two f16x2, times 2^7 where the integer decode left 2^-14."""
    low, high = ptx.e4m3_pairs(word)
    if form.native_e2m1:
        return low, high
    factor = Int32(0x58005800)
    return ptx.multiply_f16(low, factor), ptx.multiply_f16(high, factor)


def make_key_fragments(
    words: list[ptx.Words],
    scales: list[tuple[Int32, Int32]],
    step: int,
    before: list[list[Int32]],
    form: Form,
) -> list[list[Int32]]:
    """B fragments of a step, for each n-tile; an e2m1 word holds two steps, of which the second is
    left from ``before``.
    """
    if form.dtype == "bf16":
        return [[four[2 * step], four[2 * step + 1]] for four in words]
    if form.dtype == "fp8_e4m3":
        return [list(ptx.e4m3_pairs(four[step])) for four in words]
    if step % 2:
        return [pairs[2:] for pairs in before]
    return [
        [ptx.multiply_f16(pair, each[step // 4]) for pair in decode_e2m1(four[step // 2], form)]
        for four, each in zip(words, scales, strict=True)
    ]


@cute.jit
def load_phases(cta: Cta, tile: Int32, shift: Int32, phases: Any, form: cutlass.Constexpr) -> None:
    """Where in an interleaved group of four scale bytes each of this lane's four tokens of a step
    is, a byte each; 0 if linear.
    """
    quad = cta.lane & 3
    # A union's entries are whole groups of four. Elsewhere a token may stand anywhere in its own.
    first = 2 * (quad & 1) * cta.interleaved
    both = first | ((first + cta.interleaved) << 8)
    for step in cutlass.range_constexpr(form.tile // 16):
        phases[step] = both | (both << 16)
    # A loop of one turn or none: a condition would become predicates, which cost every tile.
    for _ in cutlass.range(cta.interleaved * (1 - (shift >> 1)), unroll=1):
        for step in cutlass.range_constexpr(form.tile // 16):
            word = Int32(0)
            for i in cutlass.range_constexpr(4):
                token = 16 * step + 8 * (i // 2) + i % 2 + 2 * quad
                at = cta.smem + (tile * form.tile + token) * 8
                phase = ptx.shift_right(ptx.load_shared(at, form.window_at + 4), 16) & 3
                word = word | (phase << (8 * i))
            phases[step] = word


def make_value_fragments(
    cta: Cta, stage: Int32, step: int, phases: Any, form: Form
) -> list[tuple[Int32, Int32]]:
    """B fragments of V for 16 tokens: column g of n-tile i is dim ``slice warp + n g + i`` of n
    n-tiles.
    """
    g, quad = cta.lane >> 2, cta.lane & 3
    n_tiles = form.slice // 8
    # The swizzle flips pairs of 16-byte chunks by bits 1 and 2 of the token, which are this lane's
    # quad.
    lane_bytes = n_tiles * form.row_bytes // HEAD_DIM
    byte = g * lane_bytes
    chunk = cta.warp * (form.row_bytes // form.warps // 16) + (byte >> 4)
    base = cta.smem + (stage * form.tile + 2 * quad) * form.row_bytes
    base = base + (chunk ^ (2 * quad)) * 16 + (byte & 15)
    halves: list[list[Int32]] = []
    for high in range(2):
        at = [form.v_at + (16 * step + 8 * high + e) * form.row_bytes for e in range(2)]
        dims: list[Int32] = [Int32(0)] * n_tiles
        a, b = (load_lane_words(base, offset, lane_bytes) for offset in at)
        if form.dtype == "bf16":
            for i in range(n_tiles // 2):
                dims[2 * i] = ptx.permute(a[i], b[i], 0x5410)
                dims[2 * i + 1] = ptx.permute(a[i], b[i], 0x7632)
        elif form.dtype == "fp8_e4m3":
            for i in range(n_tiles // 4):
                dims[4 * i : 4 * i + 2] = ptx.e4m3_pairs(ptx.permute(a[i], b[i], 0x5140))
                dims[4 * i + 2 : 4 * i + 4] = ptx.e4m3_pairs(ptx.permute(a[i], b[i], 0x7362))
        else:
            scale = load_value_scale(cta, stage, 16 * step + 8 * high, phases[step], form)
            if form.native_e2m1:
                a8, b8 = decode_e2m1(a[0], form), decode_e2m1(b[0], form)
                for i in range(n_tiles // 2):
                    dims[2 * i] = ptx.permute(a8[i], b8[i], 0x5410)
                    dims[2 * i + 1] = ptx.permute(a8[i], b8[i], 0x7632)
            else:
                # Bytes of both tokens by turns decode to pairs of dims 0, 2, 1, 3 of four.
                for i, turns in enumerate((0x5140, 0x7362)[: n_tiles // 4]):
                    pairs = decode_e2m1(ptx.permute(a[0], b[0], turns), form)
                    for j, dim in enumerate((0, 2, 1, 3)):
                        dims[4 * i + dim] = pairs[j]
            dims = [ptx.multiply_f16(pair, scale) for pair in dims]
        halves.append(dims)
    return list(zip(halves[0], halves[1], strict=True))


def load_lane_words(base: Int32, offset: int, count: int) -> tuple[Int32, ...]:
    """``count`` bytes of shared memory, as words."""
    if count == 16:
        return ptx.load_shared4(base, offset)
    if count == 8:
        return ptx.load_shared2(base, offset)
    return (ptx.load_shared(base, offset) if count == 4 else ptx.load_shared_half(base, offset),)


def load_value_scale(cta: Cta, stage: Int32, first: int, phases: Int32, form: Form) -> Int32:
    """The block scales of this lane's dims, for tokens ``first + 2 quad`` and the next, as
    f16x2.
    """
    block = cta.lane >> 3 if form.warps == 4 else 2 * (cta.warp & 1) + (cta.lane >> 4)
    base = cta.smem + ((stage * form.warps + cta.warp) * form.tile + 2 * (cta.lane & 3)) * 16
    base = base + block * (1 + 3 * cta.interleaved)
    pair = []
    for e in range(2):
        phase = ptx.zero_extend_bytes(phases, 0x4440 + first % 16 // 4 + e)
        pair.append(ptx.load_shared_byte(base + phase, form.v_scales_at + (first + e) * 16))
    both, _ = decode_scale_pairs(pair[0] | (pair[1] << 8), form)
    return both

"""The main loop over the tiles of a window: gather K and V, score, weigh, accumulate.

What a warp reads of K and V it also fetches, so copies need no barrier of the CTA: warp w scores
tokens 16 w .. 16 w + 15 of a tile against all dims, and accumulates its slice of the dims over
all tokens. Only row maxima and weights cross.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.cta import Cta
from specplan.kernels.sparse_gqa_verify.fragments import (
    decode_scale_pairs,
    load_phases,
    make_key_fragments,
    make_value_fragments,
)
from specplan.kernels.sparse_gqa_verify.gather_kv import fetch_k, fetch_v
from specplan.kernels.sparse_gqa_verify.softmax import weigh_scores


@cute.jit
def run_mainloop(
    cta: Cta,
    window: Int32,
    entries: Int32,
    shift: Int32,
    row_bits: Int32,
    acc: Any,
    top: Any,
    total: Any,
    form: cutlass.Constexpr,
) -> None:
    tiles = ((entries << shift) + form.tile - 1) // form.tile
    stage = Int32(0)
    # The first turns only fetch, so that the loop holds every step once.
    for tile in cutlass.range(-form.stages, tiles, unroll=1):
        # What follows from the lane alone is computed again for each tile: kept, it would push
        # other values out of registers.
        fresh = cta._replace(lane=ptx.opaque(cta.lane), warp=ptx.opaque(cta.warp))
        if tile >= 0:
            ptx.wait(2 * form.stages - 1)
            ptx.warp_barrier()
            scores = cute.make_rmem_tensor((8 * form.m_tiles,), Float32)
            for i in cutlass.range_constexpr(8 * form.m_tiles):
                scores[i] = Float32(0.0)
            score_tokens(cta, stage, scores, form)
            ptx.warp_barrier()
            fetch_k(fresh, tile + form.stages, stage, tiles, shift, form)
            first = (tile | window) == 0
            weigh_scores(cta, tile, first, shift, row_bits, scores, acc, top, total, form)
            accumulate_values(cta, tile, stage, shift, acc, form)
            ptx.warp_barrier()
        else:
            fetch_k(fresh, tile + form.stages, stage, tiles, shift, form)
        fetch_v(fresh, tile + form.stages, stage, tiles, shift, form)
        stage = ptx.choose(stage == form.stages - 1, Int32(0), stage + 1)
    ptx.wait(0)


@cute.jit
def score_tokens(cta: Cta, stage: Int32, scores: Any, form: cutlass.Constexpr) -> None:
    """scores += Q K^T of this warp's 16 tokens."""
    quad, g = cta.lane & 3, cta.lane >> 2
    blocks = {"bf16": 8, "fp8_e4m3": 4, "nvfp4": 2}[form.dtype]
    steps = 16 // blocks
    queries = cta.smem + cta.lane * 16
    first = stage * form.tile + cta.warp * 16 + g
    # The swizzle flips the upper half of the eight chunks of 128 bytes for odd tokens.
    swizzle = (g & 1) * 64
    keys = cta.smem + form.ring_at + first * form.row_bytes + quad * 16
    sides = (keys + swizzle, keys + (64 - swizzle))
    key_scales = cta.smem + form.k_scales_at + first * 16 + 2 * quad
    for block in cutlass.range_constexpr(blocks):
        words = []
        scales = []
        for j in cutlass.range_constexpr(2):
            at = 8 * j * form.row_bytes + (block // 2) * 128
            words.append(ptx.load_shared4(sides[block % 2], at))
            if cutlass.const_expr(form.dtype == "nvfp4"):
                half = ptx.load_shared_half(key_scales, 128 * j + 8 * block)
                both, _ = decode_scale_pairs(half, form)
                scales.append((ptx.permute(both, both, 0x1010), ptx.permute(both, both, 0x3232)))
        fragments: list[list[Int32]] = []
        for step in cutlass.range_constexpr(steps):
            fragments = make_key_fragments(words, scales, step, fragments, form)
            for tile in cutlass.range_constexpr(form.m_tiles):
                a = ptx.load_shared4(queries, (tile * 16 + block * steps + step) * 512)
                for j in cutlass.range_constexpr(2):
                    b0, b1 = fragments[j][0], fragments[j][1]
                    ptx.mma(scores, (tile * 2 + j) * 4, a, b0, b1, form.f16)


@cute.jit
def accumulate_values(
    cta: Cta, tile: Int32, stage: Int32, shift: Int32, acc: Any, form: cutlass.Constexpr
) -> None:
    """acc += P V of this warp's dims."""
    steps = form.tile // 16
    phases = cute.make_rmem_tensor((steps,), Int32)
    if cutlass.const_expr(form.dtype == "nvfp4"):
        load_phases(cta, tile, shift, phases, form)
    base = cta.smem + (tile & 1) * form.p_bytes + cta.lane * 16
    for step in cutlass.range_constexpr(steps):
        weights = []
        for m_tile in cutlass.range_constexpr(form.m_tiles):
            weights.append(ptx.load_shared4(base, form.p_at + (m_tile * form.warps + step) * 512))
        fragments = make_value_fragments(cta, stage, step, phases, form)
        for n in cutlass.range_constexpr(form.slice // 8):
            b0, b1 = fragments[n]
            for m_tile in cutlass.range_constexpr(form.m_tiles):
                ptx.mma(
                    acc, (m_tile * (form.slice // 8) + n) * 4, weights[m_tile], b0, b1, form.f16
                )

"""A peer for ``sparse_gqa_verify``: attention over chosen tokens as servers do it in Triton. A
program takes a K/V head of one row and a split of its list, and a second kernel merges. Rows of a
request are not read together.

BF16 and FP8 caches ``[pages, kv_heads, page_size, 256]`` with any strides; the gate is fused.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from specplan.kernels.sparse_gqa_verify.cases import Inputs

HEAD_DIM = 256


@dataclass(frozen=True)
class Config:
    """Tokens of a tile, warps of a program, and splits of a row's list."""

    tile: int
    warps: int
    splits: int


#: Tiles and warps that are tried at each size; the fastest speaks for the peer. One and two warps
#: are what servers' tables for this arch take.
TILES = ((32, 1), (64, 2), (32, 4))


def candidates(rows: int, kv_heads: int) -> list[Config]:
    """What is tried at a size: the splits that those tables take there, half and twice as many."""
    base = rows * kv_heads
    usual = 64 if base <= 32 else 16 if base <= 64 else 8 if base <= 256 else 4
    splits = [n for n in (usual // 4, usual // 2, usual, 2 * usual) if 1 <= n <= 64]
    return [Config(tile, warps, n) for tile, warps in TILES for n in splits]


@triton.jit  # type: ignore[misc]
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    list_ptr,
    owner_ptr,
    gate_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    scale,
    k_scale_ptr,
    v_scale_ptr,
    width,
    pages,
    columns,
    requests,
    splits,
    k_page,
    k_head,
    k_token,
    v_page,
    v_head,
    v_token,
    table_row,
    list_row,
    heads,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    FP8: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    head = tl.arange(0, 16)
    dim = tl.arange(0, DIM)
    shown = (head < GROUP)[:, None]
    place = (row * heads + kv_head * GROUP + head).to(tl.int64)[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + place, mask=shown, other=0.0)
    if FP8:
        scale = scale * tl.load(k_scale_ptr)
    scale = scale * 1.4426950408889634
    owner = tl.load(owner_ptr + row)
    live = (owner >= 0) & (owner < requests)
    share = tl.cdiv(tl.cdiv(width, splits), TILE) * TILE
    top = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, DIM), tl.float32)
    last = tl.minimum(width, (split + 1) * share)
    for first in range(split * share, last, TILE):
        entry = first + tl.arange(0, TILE)
        token = tl.load(
            list_ptr + row.to(tl.int64) * list_row + entry, mask=(entry < last) & live, other=-1
        )
        column = token // PAGE
        valid = (token >= 0) & (column < columns)
        page = tl.load(table_ptr + owner.to(tl.int64) * table_row + column, mask=valid, other=-1)
        valid = valid & (page >= 0) & (page < pages)
        page = page.to(tl.int64)
        slot = token % PAGE
        k_at = page * k_page + kv_head * k_head + slot * k_token
        k = tl.load(k_ptr + k_at[None, :] + dim[:, None], mask=valid[None, :], other=0.0)
        if FP8:
            k = k.to(tl.bfloat16)
        scores = tl.dot(q, k) * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - anchor)
        weights = tl.exp2(scores - anchor[:, None])
        total = total * keep + tl.sum(weights, 1)
        v_at = page * v_page + kv_head * v_head + slot * v_token
        v = tl.load(v_ptr + v_at[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
        if FP8:
            v = v.to(tl.bfloat16)
        acc = acc * keep[:, None] + tl.dot(weights.to(tl.bfloat16), v)
        top = new_top
    if WHOLE:
        factor = 1.0
        if FP8:
            factor = tl.load(v_scale_ptr)
        divisor = tl.where(total == 0.0, 1.0, total)
        result = (acc * factor / divisor[:, None]).to(tl.bfloat16)
        if GATED:
            gate = tl.load(gate_ptr + place, mask=shown, other=0.0).to(tl.float32)
            result = (result.to(tl.float32) * tl.sigmoid(gate)).to(tl.bfloat16)
        tl.store(out_ptr + place, result, mask=shown)
    else:
        part = (row * heads + kv_head * GROUP + head).to(tl.int64) * splits + split
        tl.store(sums_ptr + part[:, None] * DIM + dim[None, :], acc, mask=shown)
        tl.store(stats_ptr + part * 2, top, mask=head < GROUP)
        tl.store(stats_ptr + part * 2 + 1, total, mask=head < GROUP)


@triton.jit  # type: ignore[misc]
def _merge(  # type: ignore[no-untyped-def]
    sums_ptr,
    stats_ptr,
    gate_ptr,
    out_ptr,
    v_scale_ptr,
    splits,
    DIM: tl.constexpr,
    MOST: tl.constexpr,
    FP8: tl.constexpr,
    GATED: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM)
    each = tl.arange(0, MOST)
    there = each < splits
    part = place * splits + each
    tops = tl.load(stats_ptr + part * 2, mask=there, other=float("-inf"))
    totals = tl.load(stats_ptr + part * 2 + 1, mask=there, other=0.0)
    largest = tl.max(tops, 0)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(tops - anchor)
    total = tl.sum(weights * totals, 0)
    sums = tl.load(sums_ptr + part[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0)
    result = tl.sum(sums * weights[:, None], 0)
    if FP8:
        result = result * tl.load(v_scale_ptr)
    result = (result / tl.where(total == 0.0, 1.0, total)).to(tl.bfloat16)
    if GATED:
        gate = tl.load(gate_ptr + place * DIM + dim).to(tl.float32)
        result = (result.to(tl.float32) * tl.sigmoid(gate)).to(tl.bfloat16)
    tl.store(out_ptr + place * DIM + dim, result)


def prepare(inputs: Inputs, out: torch.Tensor, config: Config) -> Callable[[], Any]:
    """A call over fixed buffers; its scratch is allocated here. ``q``, the gate and ``out`` are
    contiguous.
    """
    rows, heads, _ = inputs.q.shape
    k, v = inputs.k_cache, inputs.v_cache
    pages, kv_heads, page_size, _ = k.shape
    requests, columns = inputs.block_table.shape
    splits, gated = config.splits, inputs.output_gate is not None
    fp8 = k.dtype != torch.bfloat16
    parts = rows * heads * splits if splits > 1 else 1
    sums = torch.empty(parts, HEAD_DIM, device=k.device)
    stats = torch.empty(parts, 2, device=k.device)
    gate = inputs.output_gate if inputs.output_gate is not None else inputs.q

    def call() -> None:
        _attend[(rows, kv_heads, splits)](
            inputs.q,
            k,
            v,
            inputs.block_table,
            inputs.selected_tokens,
            inputs.request_indices,
            gate,
            out,
            sums,
            stats,
            inputs.softmax_scale,
            inputs.k_scale,
            inputs.v_scale,
            inputs.selected_tokens.shape[1],
            pages,
            columns,
            requests,
            splits,
            *k.stride()[:3],
            *v.stride()[:3],
            inputs.block_table.stride(0),
            inputs.selected_tokens.stride(0),
            heads,
            GROUP=heads // kv_heads,
            PAGE=page_size,
            TILE=config.tile,
            DIM=HEAD_DIM,
            FP8=fp8,
            WHOLE=splits == 1,
            GATED=gated,
            num_warps=config.warps,
            num_stages=2,
        )
        if splits > 1:
            _merge[(rows * heads,)](
                sums,
                stats,
                gate,
                out,
                inputs.v_scale,
                splits,
                DIM=HEAD_DIM,
                MOST=triton.next_power_of_2(splits),
                FP8=fp8,
                GATED=gated,
                num_warps=4,
            )

    return call

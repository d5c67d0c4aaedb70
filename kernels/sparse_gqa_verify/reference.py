"""The strict reference of ``sparse_gqa_verify``, in plain torch, on a CPU or a GPU.

For row ``n`` with request ``b = request_indices[n]`` and list entry ``j`` with token ``t =
selected_tokens[n, j]``::

    valid(n, j) = 0 <= b < B and t >= 0 and t // T < C and 0 <= block_table[b, t // T] < P
                  and (j < valid_count[n], if given) and (t <= query_positions[n], if given)
    s_ij  = softmax_scale * k_scale * (q_i . K[page, h, t mod T])
    o_i   = v_scale * sum_j softmax(s_i)_j V[page, h, t mod T]          over the valid j alone
    out_i = bf16(o_i);   with a gate: bf16(float(bf16(o_i)) * sigmoid(float(gate_i)))

A row with no valid entry is exactly 0, whatever its gate holds, and its LSE is -inf. Entries that
are not valid are never read. Duplicates count as often as they stand in the list. NaN and Inf of a
valid entry reach the rows that list it, and no others.

Caches are views ``[P, Hk, T, D]`` with any strides (NHD callers pass ``permute(0, 2, 1, 3)``).
NVFP4 data is uint8 with last dimension ``D / 2``, two e2m1 values a byte, the even dimension in the
low nibble; its block scales are e4m3, one per 16 dimensions. ``VScaleOrder`` says how the V scales
lie inside a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specplan.plans.sparse_gqa_verify import VScaleOrder as VScaleOrder

#: Magnitudes of e2m1 by their three low bits.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: Rows whose gathered K and V stand in memory at a time: 64 rows of 2051 tokens are 270 MB in fp32.
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class Attention:
    """Result of :func:`attention`: ``out`` in q's dtype, ``exact`` before any rounding, ``lse`` in
    natural log.
    """

    out: torch.Tensor
    exact: torch.Tensor
    lse: torch.Tensor


def interleave(scales: torch.Tensor) -> torch.Tensor:
    """Linear scales ``[..., T, S]`` in the interleaved order, same shape."""
    *outer, tokens, blocks = scales.shape
    tiles = scales.contiguous().view(*outer, tokens // 4, 4, blocks)
    return tiles.transpose(-1, -2).reshape(*outer, tokens, blocks)


def deinterleave(scales: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`interleave`."""
    *outer, tokens, blocks = scales.shape
    tiles = scales.contiguous().view(*outer, tokens // 4, blocks, 4)
    return tiles.transpose(-1, -2).reshape(*outer, tokens, blocks)


def decode_e2m1(data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 ``[..., n]`` to e2m1 values ``[..., 2 n]``, the low nibble first."""
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).long()
    table = torch.tensor(E2M1 + tuple(-x for x in E2M1), dtype=dtype, device=data.device)
    return table[codes]


def decode(
    data: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values of a cache before its global scale; with block scales (linear), ``data`` is NVFP4."""
    if scales is None:
        return data.to(dtype)
    blocks = scales.view(torch.float8_e4m3fn) if scales.dtype == torch.uint8 else scales
    values = decode_e2m1(data, dtype)
    return values * blocks.to(dtype).repeat_interleave(16, dim=-1)


def _take(data: torch.Tensor, at: tuple[torch.Tensor | slice, ...]) -> torch.Tensor:
    """``data[at]``; through bytes, since not every device indexes float8."""
    if data.itemsize > 1:
        return data[at]
    return data.view(torch.uint8)[at].view(data.dtype)


def valid_entries(
    block_table: torch.Tensor,
    selected_tokens: torch.Tensor,
    request_indices: torch.Tensor,
    pages: int,
    page_size: int,
    valid_count: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(valid, page, slot)``, each ``[N, W]``; page and slot are 0 where an entry is not valid."""
    requests, columns = block_table.shape
    tokens = selected_tokens.long()
    owner = request_indices.long()[:, None]
    valid = (owner >= 0) & (owner < requests) & (tokens >= 0) & (tokens // page_size < columns)
    if valid_count is not None:
        order = torch.arange(tokens.shape[1], device=tokens.device)
        valid &= order[None, :] < valid_count.long()[:, None]
    if query_positions is not None:
        valid &= tokens <= query_positions.long()[:, None]
    if block_table.numel() == 0:
        return torch.zeros_like(valid), torch.zeros_like(tokens), torch.zeros_like(tokens)
    column = torch.where(valid, tokens // page_size, 0)
    page = block_table.long()[torch.where(valid, owner, 0), column]
    valid &= (page >= 0) & (page < pages)
    zero = torch.zeros_like(page)
    return valid, torch.where(valid, page, zero), torch.where(valid, tokens % page_size, zero)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    selected_tokens: torch.Tensor,
    request_indices: torch.Tensor,
    *,
    softmax_scale: float,
    k_block_scales: torch.Tensor | None = None,
    v_block_scales: torch.Tensor | None = None,
    k_scale: torch.Tensor | float = 1.0,
    v_scale: torch.Tensor | float = 1.0,
    v_scale_order: VScaleOrder = VScaleOrder.LINEAR,
    valid_count: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    output_gate: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Attention:
    """Attention of every row over its own list, computed in ``dtype`` (float32 or float64).

    >>> q = torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    >>> cache = torch.ones(1, 1, 4, 16, dtype=torch.bfloat16)
    >>> table, owner = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    >>> chosen = torch.tensor([[2, -1]], dtype=torch.int32)
    >>> attention(q, cache, cache, table, chosen, owner,
    softmax_scale=0.25).out.float().mean().item() 1.0
    """
    rows, heads, dim = q.shape
    pages, kv_heads, page_size, _ = k_cache.shape
    valid, page, slot = valid_entries(
        block_table,
        selected_tokens,
        request_indices,
        pages,
        page_size,
        valid_count,
        query_positions,
    )
    if v_block_scales is not None and v_scale_order is VScaleOrder.INTERLEAVED:
        v_block_scales = deinterleave(v_block_scales)
    exact = torch.zeros(rows, heads, dim, dtype=dtype, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=dtype, device=q.device)
    for first in range(0, rows, _ROWS_AT_A_TIME):
        part = slice(first, first + _ROWS_AT_A_TIME)
        keep = valid[part]

        def gather(
            data: torch.Tensor, scales: torch.Tensor | None, part: slice = part
        ) -> torch.Tensor:
            at = (page[part], slice(None), slot[part])
            taken = _take(data, at)
            values = decode(taken, None if scales is None else _take(scales, at), dtype)
            return values.permute(0, 2, 1, 3)  # [n, Hk, W, D]

        shown = keep[:, None, :, None]
        k = gather(k_cache, k_block_scales).masked_fill(~shown, 0)
        v = gather(v_cache, v_block_scales).masked_fill(~shown, 0)
        grouped = q[part].to(dtype).reshape(-1, kv_heads, heads // kv_heads, dim)
        scores = (grouped @ k.transpose(-1, -2)) * softmax_scale * k_scale
        scores = scores.masked_fill(~keep[:, None, None, :], -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(torch.isneginf(top), 0, top)
        weights = torch.exp(scores - top)
        weights = weights.masked_fill(~keep[:, None, None, :], 0)
        total = weights.sum(-1, keepdim=True)
        sums = (weights @ v) * v_scale
        exact[part] = torch.where(total == 0, 0, sums / total).reshape(-1, heads, dim)
        lse[part] = (top + torch.log(total)).reshape(-1, heads)
    out = exact.to(q.dtype)
    if output_gate is not None:
        gated = gate(out, output_gate.reshape(out.shape))
        out = torch.where(torch.isneginf(lse)[..., None], 0, gated)
    return Attention(out, exact, lse)


def gate(out: torch.Tensor, output_gate: torch.Tensor) -> torch.Tensor:
    """The sigmoid gate with its second rounding, on an output that is rounded already."""
    return (out.float() * torch.sigmoid(output_gate.float())).to(out.dtype)


def select_tokens(
    position: int, groups: list[int], length: int, *, ratio: int, budget: int
) -> list[int]:
    """The list of one row, as the indexer's caller expands it: chosen groups, then the causal tail,
    then -1.

    ``groups`` are the chosen group ids, -1 for none; the width is ``budget + ratio - 1``.

    >>> select_tokens(9, [1, 0], 10, ratio=4, budget=8)
    [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, -1]
    """
    tokens = [g * ratio + i for g in groups if g >= 0 for i in range(ratio)]
    tokens = [t for t in tokens if t < length]
    tokens += range((position + 1) // ratio * ratio, position + 1)
    return tokens + [-1] * (budget + ratio - 1 - len(tokens))

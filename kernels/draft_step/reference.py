"""``draft_step`` in plain torch, on CPU or GPU: the contract, output by output."""

from __future__ import annotations

import torch
from specplan.kernels.argmax.reference import columns


def draft_step(
    target: torch.Tensor,
    input_ids: torch.Tensor,
    drafts: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    step: int,
    d2t: torch.Tensor | None = None,
    next_new_tokens: torch.Tensor | None = None,
    next_token: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    slot: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    request_of_row: torch.Tensor | None = None,
    position_of_row: torch.Tensor | None = None,
    visible_of_row: torch.Tensor | None = None,
    page_of_row: torch.Tensor | None = None,
    within_of_row: torch.Tensor | None = None,
    cache_slot: torch.Tensor | None = None,
    group_slot: torch.Tensor | None = None,
    page_size: int | None = None,
    group: int | None = None,
    scale: int | None = None,
    splits: int | None = None,
) -> None:
    """Fill the outputs in place; arguments as :meth:`specplan.draft_step.DraftStep.__call__`, any
    device. The scratch is left as it is.
    """
    requests, device = target.shape[0], target.device
    if not requests:
        return
    token = columns(target) if target.dim() == 2 else target.to(torch.int32).long()
    if d2t is not None and d2t.shape[0]:
        known = (token >= 0) & (token < d2t.shape[0])
        token = token + torch.where(known, d2t[token.clamp(0, d2t.shape[0] - 1)].long(), 0)
    token = token.to(torch.int32)
    input_ids.copy_(token)
    drafts[:requests, step] = token
    if next_new_tokens is not None:
        next_new_tokens[:requests, step + 1] = token
        if next_token is not None:
            next_new_tokens[:requests, 0] = next_token[:requests]

    # Requests that are no padding, and their lengths and positions if another step follows.
    real = torch.ones(requests, dtype=torch.bool, device=device)
    if slot is not None:
        real = slot[:requests] >= 0
    moved = real.int() * (step < drafts.shape[1] - 1)
    if positions is not None:
        positions[:, :requests] += moved
    if kv_lens is None:
        return
    kv_lens[:requests] += moved

    # The next row, the last one of each request.
    position = kv_lens[:requests].long() - 1
    there = real & (position >= 0)
    position = torch.where(there, position, -1)
    request = torch.arange(requests, device=device)
    by = group or 1
    for out, values in (
        (request_of_row, torch.where(there, request, -1)),
        (position_of_row, position),
        (visible_of_row, torch.where(there, (position + 1) // by, 0)),
    ):
        if out is not None:
            out[:requests] = values.to(out.dtype)
    if block_table is None or not page_size:
        return
    column = torch.where(there, position // page_size, block_table.shape[1])
    column = column.clamp(max=block_table.shape[1])
    padded = torch.nn.functional.pad(block_table[:requests].long(), (0, 1), value=-1)
    entry = padded[request, column]
    page = torch.where(entry < 0, entry, entry // (scale or 1))
    within = torch.where(there, position % page_size, 0)
    ends = (page >= 0) & ((position + 1) % by == 0)
    for out, values in (
        (page_of_row, page),
        (within_of_row, within),
        (cache_slot, torch.where(page >= 0, page * page_size + within, -1)),
        (group_slot, torch.where(ends, page * (page_size // by) + within // by, -1)),
    ):
        if out is not None:
            out[:requests] = values.to(out.dtype)

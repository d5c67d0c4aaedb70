"""``accept`` in plain torch, on CPU or GPU: the contract, request by request."""

from __future__ import annotations

import torch
from specplan.kernels.argmax.reference import columns
from specplan.plans.accept import (
    FORCE_DRAWN,
    FORCE_SAME,
    POOL,
    POOL_REQUEST,
    POOL_STEP,
    WINDOW,
)


def accept(
    target: torch.Tensor,
    accepted: torch.Tensor,
    n_acc: torch.Tensor,
    scratch: torch.Tensor | None = None,
    drafts: torch.Tensor | None = None,
    *,
    next_token: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    last_row: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    positions_out: torch.Tensor | None = None,
    slot: torch.Tensor | None = None,
    hist_len: torch.Tensor | None = None,
    bank: torch.Tensor | None = None,
    n_override: torch.Tensor | None = None,
    pool: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    contexts: int | None = None,
    extra: int | None = None,
    fill: int | None = None,
    force_mode: int | None = None,
    force_base: int | None = None,
    force_frac: float | None = None,
    splits: int | None = None,
) -> None:
    """Fill the outputs in place; arguments as :meth:`specplan.accept.Accept.__call__`, any device.
    The scratch is left as it is.
    """
    (requests, tokens), first, device = accepted.shape, contexts or 0, accepted.device
    generations = requests - first
    if not requests:
        return
    ids = (columns(target) if target.dim() == 2 else target).to(torch.int32)
    verified = ids[first:].view(generations, tokens)
    place = torch.arange(requests, device=device)

    # The target's tokens and the matching prefix.
    given = torch.zeros_like(accepted)
    given[:first, 0] = ids[:first]
    given[first:] = verified
    count = torch.ones(requests, dtype=torch.int32, device=device)
    if generations and tokens > 1:
        assert drafts is not None
        draft = drafts[:generations]
        match = (draft == verified[:, :-1]) & (draft >= 0)
        count[first:] += match.int().cumprod(1).sum(1).int()

    # Counts that are not the matching one.
    if force_mode in (FORCE_SAME, FORCE_DRAWN):
        wanted = torch.full((generations,), max(force_base or 0, 1), device=device)
        if force_mode == FORCE_DRAWN:
            assert pool is not None and counter is not None
            counter[0] += 1
            request = torch.arange(generations, device=device)
            drawn = (counter[0] * POOL_STEP + request * POOL_REQUEST) & (POOL - 1)
            wanted += pool[drawn] < (force_frac or 0.0)
        count[first:] = wanted.clamp(max=tokens).int()
    if n_override is not None:
        most = torch.where(place < first, 1, tokens).int()
        override = n_override[:requests]
        count = torch.where(override >= 0, torch.minimum(override, most), count)
    last = count.clamp(min=1).long() - 1

    n_acc.copy_(count)
    if next_token is not None:
        next_token[:requests] = given[place, last]
    row = torch.where(place < first, place, first + (place - first) * tokens + last)
    if last_row is not None:
        row[:first] = last_row[:first].long()
    if rows is not None:
        rows[:requests] = row.to(rows.dtype)
    if positions is not None and positions_out is not None:
        there = (row >= 0) & (row < positions.shape[1])
        moved = torch.full_like(positions_out[:, :requests], -1)
        moved[:, there] = positions[:, row[there]] + 1
        positions_out[:, :requests] = moved
    if fill:
        given.masked_fill_(torch.arange(tokens, device=device) >= count[:, None], -1)
    accepted.copy_(given)

    # Lengths and cursors of requests that are no padding.
    where = slot[:requests].long() if slot is not None else place
    if kv_lens is not None:
        moved = kv_lens[:requests] + torch.where(place < first, 0, count - tokens) + (extra or 0)
        kv_lens[:requests] = torch.where(where >= 0, moved.int(), kv_lens[:requests])
    if hist_len is not None and bank is not None:
        moves = (place >= first) & (where >= 0) & (where < hist_len.shape[0])
        at = where[moves]
        commits = hist_len[at] + tokens > WINDOW
        hist_len[at] = torch.where(commits, 0, hist_len[at]) + count[moves]
        bank[at] = torch.where(commits, bank[at] ^ 1, bank[at])

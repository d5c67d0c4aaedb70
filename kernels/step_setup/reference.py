"""``step_setup`` in plain torch, on CPU or GPU: the contract by prefix sums and a search."""

from __future__ import annotations

import torch
from specplan.plans.step_setup import WINDOW


def step_setup(
    kv_lens: torch.Tensor,
    block_table: torch.Tensor,
    request_of_row: torch.Tensor,
    position_of_row: torch.Tensor,
    visible_of_row: torch.Tensor,
    page_of_row: torch.Tensor,
    within_of_row: torch.Tensor,
    first_position: torch.Tensor,
    *,
    tokens: int,
    page_size: int,
    group: int,
    seq_lens: torch.Tensor | None = None,
    scale: int | None = None,
    ordinal_of_row: torch.Tensor | None = None,
    position_of_row_int64: torch.Tensor | None = None,
    length_of_row: torch.Tensor | None = None,
    cache_slot: torch.Tensor | None = None,
    group_slot: torch.Tensor | None = None,
    table_out: torch.Tensor | None = None,
    work: torch.Tensor | None = None,
    n_commit: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    hist_len: torch.Tensor | None = None,
    bank: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """Fill the outputs in place; arguments as :meth:`specplan.step_setup.StepSetup.__call__`, any
    device.
    """
    device = kv_lens.device
    requests, columns = block_table.shape
    rows = request_of_row.shape[0]
    scale = 1 if scale is None else scale
    counts = torch.full((requests,), tokens, dtype=torch.int64, device=device)
    if seq_lens is not None and tokens == 0:
        counts = seq_lens.long().clamp(min=0)
    lengths = kv_lens.long()
    first_position.copy_(torch.where(lengths >= counts, lengths - counts, -1))

    table = block_table.long()
    pages = torch.where(table < 0, table, table // scale)
    if table_out is not None:
        table_out[:requests, :columns] = pages.int()

    # A request and a column more, which stand for what is not there.
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=device)
    owner = torch.searchsorted(ends, row, right=True)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    starts = torch.cat([nothing, ends])[owner]
    ordinal = row - starts
    length = torch.cat([lengths.clamp(min=0), nothing])[owner]
    count = torch.cat([counts, nothing])[owner]
    position = length - count + ordinal
    real = (owner < requests) & (position >= 0)

    def kept(values: torch.Tensor, padding: int) -> torch.Tensor:
        return torch.where(real, values, padding)

    position = kept(position, -1)
    column = torch.where(real, position // page_size, columns).clamp(max=columns)
    padded = torch.nn.functional.pad(pages, (0, 1, 0, 1), value=-1)
    page = kept(padded[owner, column], -1)
    within = kept(position % page_size, 0)
    there = page >= 0
    request_of_row.copy_(kept(owner, -1))
    position_of_row.copy_(position)
    visible_of_row.copy_(kept((position + 1) // group, 0))
    page_of_row.copy_(page)
    within_of_row.copy_(within)
    if ordinal_of_row is not None:
        ordinal_of_row.copy_(kept(ordinal, 0))
    if position_of_row_int64 is not None:
        position_of_row_int64.copy_(position)
    if length_of_row is not None:
        length_of_row.copy_(kept(length, 0))
    if cache_slot is not None:
        cache_slot.copy_(torch.where(there, page * page_size + within, -1))
    if group_slot is not None:
        last = there & ((position + 1) % group == 0)
        group_slot.copy_(torch.where(last, page * (page_size // group) + within // group, -1))
    if work is not None:
        assert slots is not None and n_commit is not None
        _list_work(
            counts, slots, hist_len, bank, work, n_commit, WINDOW if window is None else window
        )


def _list_work(
    counts: torch.Tensor,
    slots: torch.Tensor,
    hist_len: torch.Tensor | None,
    bank: torch.Tensor | None,
    work: torch.Tensor,
    n_commit: torch.Tensor,
    window: int,
) -> None:
    requests = slots.shape[0]
    nothing = torch.zeros(1, dtype=torch.int64, device=slots.device)
    lens = nothing if hist_len is None else torch.cat([hist_len.long(), nothing])
    banks = nothing if bank is None else torch.cat([bank.long(), nothing])
    slot = slots.long()
    real = (slot >= 0) & (slot < lens.shape[0] - 1)
    at = torch.where(real, slot, lens.shape[0] - 1)
    commits = real & (lens[at] + counts > window)
    kind = torch.where(commits, 0, torch.where(real, 1, 2))
    order = torch.sort(kind, stable=True).indices
    lines = [
        torch.arange(requests, device=slots.device),
        torch.where(real, slot, -1),
        torch.where(real, lens[at], 0),
        torch.where(real, banks[at], 0),
    ]
    work[:requests] = torch.stack(lines, dim=1)[order].int()
    n_commit.copy_(commits.sum().reshape(1))

"""``scatter`` in plain torch, on CPU or GPU: the contract, element by element."""

from __future__ import annotations

import torch


def scatter(
    new_tokens: torch.Tensor,
    next_new_tokens: torch.Tensor,
    lens: torch.Tensor,
    next_draft_tokens: torch.Tensor,
    slots: torch.Tensor,
    store_new_tokens: torch.Tensor,
    store_next_new_tokens: torch.Tensor,
    store_lens: torch.Tensor,
    store_next_draft: torch.Tensor,
    row_begin: int,
    rows: int,
) -> None:
    """Store the moved rows in place; arguments as :meth:`specplan.scatter.Scatter.__call__`, any
    device.

    Slots outside the stores are skipped. Unlike the kernel it reads columns at or past the accepted
    length, and drops them.
    """
    if rows == 0:
        return
    moved = slice(row_begin, row_begin + rows)
    where = slots[:rows].long()
    inside = (where >= 0) & (where < store_lens.shape[0])
    where = where[inside]
    n = lens[moved][inside]

    def padded(tokens: torch.Tensor, width: int) -> torch.Tensor:
        tokens = tokens[moved][inside][:, :width]
        return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))

    history = padded(new_tokens, store_new_tokens.shape[0])
    column = torch.arange(history.shape[1], device=history.device)
    history = torch.where(column < n[:, None], history, torch.zeros_like(history))
    store_new_tokens[:, where, 0] = history.T
    store_next_new_tokens[:, where, 0] = padded(next_new_tokens, store_next_new_tokens.shape[0]).T
    store_next_draft[where] = padded(next_draft_tokens, store_next_draft.shape[1])
    store_lens[where] = n

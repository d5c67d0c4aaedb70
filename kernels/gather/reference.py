"""``gather`` in plain torch, on CPU or GPU: the contract, element by element."""

from __future__ import annotations

import torch


def gather(
    store_next_new_tokens: torch.Tensor,
    store_next_draft: torch.Tensor,
    store_lens: torch.Tensor,
    slots: torch.Tensor,
    pos_indices: torch.Tensor,
    input_ids: torch.Tensor,
    draft_tokens: torch.Tensor,
    pos_offsets: torch.Tensor,
    kv_offsets: torch.Tensor,
    input_ids_begin: int,
    draft_tokens_begin: int,
    pos_offsets_begin: int,
    kv_offsets_begin: int,
    requests: int,
    tokens: int,
    drafts: int,
) -> None:
    """Fill the destinations in place; arguments as :meth:`specplan.gather.Gather.__call__`, any
    device.
    """
    if requests == 0:
        return
    flat = requests * tokens
    size = store_lens.shape[0]

    def taken(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``values[index]`` along dim 0, and 0 for an index outside it."""
        index = index.long()
        inside = (index >= 0) & (index < size)
        picked = values[torch.where(inside, index, torch.zeros_like(index))]
        return torch.where(
            inside.reshape(-1, *[1] * (picked.dim() - 1)), picked, torch.zeros_like(picked)
        )

    where = slots[:requests]
    input_ids[input_ids_begin : input_ids_begin + flat] = taken(
        where, store_next_new_tokens[:tokens, :, 0].T
    ).reshape(-1)
    pos_offsets[pos_offsets_begin : pos_offsets_begin + flat] = taken(
        pos_indices[:flat], store_lens
    )
    draft_tokens[draft_tokens_begin : draft_tokens_begin + requests * drafts] = taken(
        where, store_next_draft[:, :drafts]
    ).reshape(-1)
    kv_offsets[kv_offsets_begin : kv_offsets_begin + requests] = taken(where, store_lens - tokens)

"""SGLang 0.5.23: its tensors as arguments of specplan's ops (see ``docs/servers.md``)."""

from __future__ import annotations

import torch
from specplan.integrations.tensors import (
    by_request,
    fp8,
    gate_parameters,
    int32_into,
    packed_heads,
    replay_records,
    scale,
)

__all__ = [
    "by_request",
    "gate_parameters",
    "int32_into",
    "layer_state",
    "packed_heads",
    "page_table_into",
    "replay_records",
    "scale",
    "token_pool_pages",
]


def layer_state(temporal: torch.Tensor, layer: int) -> torch.Tensor:
    """One layer's checkpoints [size + 1, HV, 128, 128] of ``[layers, size + 1, HV, V, K]``;
    a view. Slots of padding are -1 already.
    """
    if temporal.dim() != 5:
        raise ValueError(f"the pool is {tuple(temporal.shape)}, expected 5 dimensions")
    return temporal[layer]


def token_pool_pages(pool: torch.Tensor, page_size: int) -> torch.Tensor:
    """A flat pool of tokens ``[slots, kv_heads, head_dim]`` as pages ``[pages, kv_heads, page_size,
    head_dim]``; a view. ``page_size`` divides the server's own.

    Raises
    ------
    ValueError
        The pool is no whole number of pages. SGLang's has one page of padding in front, so it is.
    """
    if pool.dim() != 3 or page_size < 1 or pool.shape[0] % page_size:
        raise ValueError(
            f"the pool is {tuple(pool.shape)}, expected [pages x {page_size}, kv_heads, head_dim]"
        )
    pages: torch.Tensor = fp8(pool).unflatten(0, (pool.shape[0] // page_size, page_size))
    return pages.permute(0, 2, 1, 3)


def page_table_into(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """The table of pages of the batch, from the server's table of token slots: two launches, once a
    step for all layers.

    Parameters
    ----------
    req_to_token
        int32 [requests of the pool, tokens]; every ``page_size`` tokens lie in one page.
    req_pool_indices
        int32 or int64 [batch]: rows of it.
    out
        int32 [batch, tokens / page_size rounded up], dense.
    """
    firsts = req_to_token[:, ::page_size]
    wanted = (req_pool_indices.shape[0], firsts.shape[1])
    if out.dtype is not torch.int32 or tuple(out.shape) != wanted:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, expected int32 {wanted}")
    torch.index_select(firsts, 0, req_pool_indices, out=out)
    return out.floor_divide_(page_size)

"""vLLM 0.33: its tensors as arguments of specplan's ops (see ``docs/servers.md``)."""

from __future__ import annotations

import torch
from specplan.integrations.paging import Recut, recut
from specplan.integrations.tensors import (
    by_request,
    fp8,
    gate_parameters,
    int32_into,
    null_slots_into,
    packed_heads,
    replay_records,
    scale,
)

__all__ = [
    "NULL_BLOCK",
    "Recut",
    "by_request",
    "chosen_tokens",
    "gate_parameters",
    "int32_into",
    "kv_pages",
    "packed_heads",
    "replay_records",
    "scale",
    "state_slots_into",
]

#: The block that padding rows name.
NULL_BLOCK = 0


def state_slots_into(state_indices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The pool slot of each row, -1 for padding, in int32: ``out`` [batch] after three launches.

    ``state_indices`` is ``spec_state_indices_tensor`` int32 [batch, num_spec + 1], whose first
    column is the one block that a request needs here, or a list [batch].
    """
    first = state_indices[:, 0] if state_indices.dim() == 2 else state_indices
    return null_slots_into(first, NULL_BLOCK, out)


def kv_pages(
    kv_cache: torch.Tensor, page_size: int, *, head_dim: int = 256
) -> tuple[torch.Tensor, torch.Tensor, Recut]:
    """K and V of a cache ``[blocks, kv_heads, block_tokens, 2 * head_dim]`` as pages, and the cut;
    views. Bytes are seen as e4m3. The outer order (HND, NHD) is in the strides.

    Raises
    ------
    ValueError
        See :func:`specplan.integrations.paging.recut`.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * head_dim:
        raise ValueError(f"the cache is {tuple(kv_cache.shape)}, expected rows of {2 * head_dim}")
    cache = fp8(kv_cache)
    k, cut = recut(cache[..., :head_dim], page_size)
    v, _ = recut(cache[..., head_dim:], page_size)
    return k, v, cut


def chosen_tokens(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``selected_tokens`` [rows, width] and ``valid_count`` [rows] of [rows, width + 1], whose
    last column is the count; views.
    """
    if indices.dim() != 2 or indices.shape[1] < 2:
        raise ValueError(f"the lists are {tuple(indices.shape)}, expected [rows, width + 1]")
    return indices[:, :-1], indices[:, -1]

"""Peers of ``scatter``, ``gather``, ``rollback`` and ``gdn_replay.advance`` in Triton, written for
the benchmark: one kernel an op, as a server would write it by hand.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

WINDOW = 16


@triton.jit
def _scatter(
    new, following, lens, drafts, slots, history, nexts, lengths, stored,
    new_row, following_row, draft_row, S, stored_row, a, b, c, row_begin,
    H: tl.constexpr, X: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i = row + row_begin
    w = tl.arange(0, LANES)
    s = tl.load(slots + row)
    n = tl.load(lens + i)
    first = tl.load(new + i * new_row + w, mask=(w < n) & (w < a), other=0)
    second = tl.load(following + i * following_row + w, mask=w < b, other=0)
    third = tl.load(drafts + i * draft_row + w, mask=w < c, other=0)
    tl.store(history + w * S + s, first, mask=w < H)
    tl.store(nexts + w * S + s, second, mask=w < X)
    tl.store(stored + s * stored_row + w, third, mask=w < D)
    tl.store(lengths + s, n)


def scatter(arguments: Mapping[str, Any]) -> None:
    """Launch over the arguments of ``pack.scatter``, by name."""
    t = arguments
    stores = ("store_new_tokens", "store_next_new_tokens", "store_lens", "store_next_draft")
    outputs = ("new_tokens", "next_new_tokens", "lens", "next_draft_tokens", "slots")
    widths = [t[name].shape[0] for name in stores[:2]] + [t["store_next_draft"].shape[1]]
    _scatter[(t["rows"],)](
        *(t[name] for name in (*outputs, *stores)),
        *(t[name].stride(0) for name in ("new_tokens", "next_new_tokens", "next_draft_tokens")),
        t["store_lens"].shape[0], t["store_next_draft"].stride(0),
        *(t[name].shape[1] for name in ("new_tokens", "next_new_tokens", "next_draft_tokens")),
        t["row_begin"], *widths, LANES=triton.next_power_of_2(max(widths)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _gather(
    nexts, stored, lengths, slots, places, ids, drafts, positions, caches,
    S, stored_row, ids_at, drafts_at, positions_at, caches_at, T, d, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    j = tl.arange(0, LANES)
    s = tl.load(slots + row)
    place = tl.load(places + row * T + j, mask=j < T, other=0)
    tl.store(ids + ids_at + row * T + j, tl.load(nexts + j * S + s, mask=j < T), mask=j < T)
    tl.store(positions + positions_at + row * T + j, tl.load(lengths + place, mask=j < T),
             mask=j < T)  # fmt: skip
    draft = tl.load(stored + s * stored_row + j, mask=j < d)
    tl.store(drafts + drafts_at + row * d + j, draft, mask=j < d)
    tl.store(caches + caches_at + row, tl.load(lengths + s) - T)


def gather(arguments: Mapping[str, Any]) -> None:
    """Launch over the arguments of ``pack.gather``, by name."""
    t = arguments
    names = ("store_next_new_tokens", "store_next_draft", "store_lens", "slots", "pos_indices")
    outputs = ("input_ids", "draft_tokens", "pos_offsets", "kv_offsets")
    _gather[(t["requests"],)](
        *(t[name] for name in (*names, *outputs)),
        t["store_lens"].shape[0], t["store_next_draft"].stride(0),
        *(t[f"{name}_begin"] for name in outputs), t["tokens"], t["drafts"],
        LANES=triton.next_power_of_2(t["tokens"]), num_warps=1,
    )  # fmt: skip


@triton.jit
def _save(
    keys, positions, page, within, old_keys, old_positions, rejected,
    key_page, key_layer, position_page, LAYERS: tl.constexpr, ROW: tl.constexpr,
    RESTORE: tl.constexpr,
):  # fmt: skip
    """All layers' rows of one place: into the snapshot, or back where the row was rejected."""
    row, layer = tl.program_id(0), tl.program_id(1)
    p, w = tl.load(page + row).to(tl.int64), tl.load(within + row)
    wanted = True
    if RESTORE:
        wanted = tl.load(rejected + row) != 0
    if layer < LAYERS:
        lane = tl.arange(0, ROW)
        plane = keys + p * key_page + layer * key_layer + w * ROW + lane
        saved = old_keys + (row * LAYERS + layer).to(tl.int64) * ROW + lane
        if RESTORE:
            tl.store(plane, tl.load(saved), mask=wanted & (lane >= 0))
        else:
            tl.store(saved, tl.load(plane))
    else:
        word = tl.arange(0, 4)
        cell = positions + p * position_page + w * 3 + word
        kept = old_positions + row * 3 + word
        if RESTORE:
            tl.store(cell, tl.load(kept, mask=word < 3), mask=wanted & (word < 3))
        else:
            tl.store(kept, tl.load(cell, mask=word < 3), mask=word < 3)


def save(step: Any, old: tuple[torch.Tensor, torch.Tensor], *, restore: bool) -> None:
    """Launch over the planes of a benchmark's rollback step: keys ``[pages, layers + 1, tokens,
    128]`` in bf16 and positions ``[pages, 2, tokens, 3]`` in int32.
    """
    keys, positions = step.keys, step.positions
    rows, layers = step.page.numel(), keys.shape[1] - 1
    _save[(rows, layers + 1)](
        keys, positions, step.page, step.within, *old, step.rejected,
        keys.stride(0), keys.stride(1), positions.stride(0),
        LAYERS=layers, ROW=keys.shape[3], RESTORE=restore, num_warps=1,
    )  # fmt: skip


@triton.jit
def _advance(hist_len, bank, slot, slot_stride, n_acc, T, rows, LANES: tl.constexpr):
    row = tl.arange(0, LANES)
    here = row < rows
    s = tl.load(slot + row * slot_stride, mask=here, other=-1)
    live = here & (s >= 0)
    before = tl.load(hist_len + s, mask=live, other=0)
    accepted = tl.load(n_acc + row, mask=live, other=0)
    full = before + T > 16
    tl.store(hist_len + s, tl.where(full, accepted, before + accepted), mask=live)
    side = tl.load(bank + s, mask=live, other=0)
    tl.store(bank + s, tl.where(full, 1 - side, side), mask=live)


def advance(
    hist_len: torch.Tensor, bank: torch.Tensor, slot: torch.Tensor, n_acc: torch.Tensor, tokens: int
) -> None:
    """Move the cursors by the accepted tokens, as ``gdn_replay.advance`` does."""
    rows = slot.numel()
    lanes = triton.next_power_of_2(rows)
    _advance[(1,)](
        hist_len, bank, slot, slot.stride(0), n_acc, tokens, rows, LANES=lanes, num_warps=4
    )

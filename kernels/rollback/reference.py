"""What ``rollback`` computes, in plain torch on CPU or GPU: the strict reference, bit for bit.

Planes are tensors ``[pages, page_tokens, *row]`` of any dtype, rows dense, pages and rows at any
stride; their saved rows are tensors ``[rows, *row]``. A row takes part only where its page and its
place in the page exist. All functions write in place, and a restore or commit of a snapshot that is
not pending does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specplan.plans.rollback import SHARES
from torch import Tensor


@dataclass(frozen=True)
class StatePool:
    """A ``pool`` [slots, *state] and its ``candidates`` [requests, candidates, *state]."""

    pool: Tensor
    candidates: Tensor


def gather(
    planes: Sequence[Tensor], pages: Tensor, within: Tensor, old: Sequence[Tensor], pending: Tensor
) -> None:
    """Save row r of every plane, ``plane[pages[r], within[r]]``, to ``old[plane][r]``, and arm the
    snapshot.

    Saved rows whose place does not exist keep what they held.

    """
    for plane, saved in zip(planes, old, strict=True):
        rows = _existing(plane, pages, within).nonzero().squeeze(1)
        saved[rows] = plane[pages[rows].long(), within[rows].long()]
    pending.fill_(SHARES)


def restore(
    planes: Sequence[Tensor],
    pages: Tensor,
    within: Tensor,
    old: Sequence[Tensor],
    pending: Tensor,
    rejected: Tensor,
) -> None:
    """Put the saved row back where ``rejected[r]`` is not zero, and consume the snapshot.

    Rows that share a place carry equal saved values, so the place goes back if any of them is
    rejected.
    """
    if int(pending) == 0:
        return
    for plane, saved in zip(planes, old, strict=True):
        back = _existing(plane, pages, within) & (rejected != 0)
        rows = back.nonzero().squeeze(1)
        plane[pages[rows].long(), within[rows].long()] = saved[rows]
    pending.zero_()


def rejected_rows(accepted: Tensor, row_requests: Tensor, row_ordinals: Tensor) -> Tensor:
    """The mask, int32 [rows]: ``ordinal >= max(accepted[request], 1)``. A row of no request is
    never rejected.

    ``accepted`` counts the token that the target model always adds, so ordinal 0 never goes back; a
    count below 1 is read as 1.
    """
    real = (row_requests >= 0) & (row_requests < accepted.numel())
    if accepted.numel() == 0:
        return torch.zeros_like(row_ordinals)
    counts = accepted.clamp(min=1)[row_requests.long().clamp(0, accepted.numel() - 1)]
    return (real & (row_ordinals >= counts)).to(torch.int32)


def commit(
    planes: Sequence[Tensor],
    pages: Tensor,
    within: Tensor,
    old: Sequence[Tensor],
    pending: Tensor,
    accepted: Tensor,
    row_requests: Tensor,
    row_ordinals: Tensor,
    states: Sequence[StatePool] = (),
    slots: Tensor | None = None,
    cursors: Tensor | None = None,
) -> None:
    """Everything that a step commits after acceptance, once per snapshot.

    Rows go back as :func:`restore` does with :func:`rejected_rows`. Request g with slot s and n
    accepted tokens sets ``pool[s] = candidates[g, n - 1]`` in every state pool, cast to the pool's
    dtype, n clamped to what there is, and ``cursors[s] = max(n - 1, 0)``. A slot that does not
    exist in a pool is skipped there.
    """
    if int(pending) == 0:
        return
    mask = rejected_rows(accepted, row_requests, row_ordinals)
    restore(planes, pages, within, old, pending, mask)
    if slots is None or slots.numel() == 0:
        return
    for each in states:
        requests = ((slots >= 0) & (slots < each.pool.shape[0])).nonzero().squeeze(1)
        chosen = accepted[requests].long().clamp(1, each.candidates.shape[1]) - 1
        each.pool[slots[requests].long()] = each.candidates[requests, chosen].to(each.pool.dtype)
    if cursors is not None:
        requests = ((slots >= 0) & (slots < cursors.numel())).nonzero().squeeze(1)
        advanced = accepted[requests].clamp(min=1) - 1
        cursors[slots[requests].long()] = advanced.to(cursors.dtype)


def _existing(plane: Tensor, pages: Tensor, within: Tensor) -> Tensor:
    there = (pages >= 0) & (pages < plane.shape[0])
    return there & (within >= 0) & (within < plane.shape[1])

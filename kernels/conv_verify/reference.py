"""``conv_verify`` in plain torch, on any device: the convolution in float64, and the moves between
its ring and the windows of other servers.
"""

from __future__ import annotations

import torch
from specplan.plans.conv_verify import BEFORE, TAPS
from torch import Tensor


def conv_verify(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    position: Tensor,
    slot: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Fill ``out`` and the step's places of the ring; arguments as
    :meth:`specplan.conv_verify.ConvVerify.__call__`. For t = 0..T-1, with z the inputs by
    position, zeros before position 0::

        out[n, t] = bf16(silu(bias + sum_j weight[:, j] * z[P + t - 3 + j]))
        ring[slot, (P + t) % R] = x[n, t]
    """
    tokens, places = x.shape[1], ring.shape[1]
    live = ((slot >= 0) & (slot < ring.shape[0]) & (position >= 0)).nonzero().flatten()
    at, first = slot[live].long(), position[live].long()
    before = first[:, None] + torch.arange(-BEFORE, 0, device=x.device)
    history = ring[at[:, None], before % places]
    history = torch.where((before >= 0)[..., None], history, 0)
    rows = x[live]
    inputs = torch.cat([history, rows], 1).double()
    total = torch.zeros(rows.shape, dtype=torch.float64, device=x.device)
    if bias is not None:
        total += bias.double()
    for tap in range(TAPS):
        total += weight[:, tap].double() * inputs[:, tap : tap + tokens]
    out.zero_()
    out[live] = (total / (1 + (-total).exp())).to(out.dtype)
    now = (first[:, None] + torch.arange(tokens, device=x.device)) % places
    ring[at[:, None], now] = rows


def _live(ring: Tensor, position: Tensor, slot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are moved, their slots, and the positions of their last three inputs."""
    rows = ((slot >= 0) & (slot < ring.shape[1]) & (position >= 0)).nonzero().flatten()
    before = position[rows].long()[:, None] + torch.arange(-BEFORE, 0, device=slot.device)
    return rows, slot[rows].long(), before


def import_(windows: Tensor, ring: Tensor, position: Tensor, slot: Tensor) -> None:
    """``ring[l, slot, (P - 3 + i) % R] = windows[l, m, :, i]`` where P - 3 + i >= 0."""
    rows, at, before = _live(ring, position, slot)
    for i in range(BEFORE):
        known = before[:, i] >= 0
        place = before[known, i] % ring.shape[2]
        ring[:, at[known], place] = windows[:, rows[known], :, i]


def export(windows: Tensor, ring: Tensor, position: Tensor, slot: Tensor) -> None:
    """The reverse of :func:`import_`; zeros for positions below 0."""
    rows, at, before = _live(ring, position, slot)
    for i in range(BEFORE):
        found = ring[:, at, before[:, i] % ring.shape[2]]
        windows[:, rows, :, i] = torch.where((before[:, i] >= 0)[None, :, None], found, 0)

"""Rows of ``gdn_replay.verify`` that are drawn, and run through the reference, once for many cells.

No result of a row depends on the other rows of its call, so the reference of one row serves every
batch that it is in. Certification goes through every batch of 1 to 256 requests: with rows drawn
anew in each, nearly all of its time went into random numbers and the reference. A cell's rows are
ROWS that belong to its problem, dtype and tokens, in slots and an order of the cell's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from specplan.kernels.gdn_replay import cases
from specplan.plans.gdn_replay import WINDOW
from torch import Tensor

#: How many rows are drawn. Prime, and more than a step of any common batch reaches in a stride of
#: its own, so that rows that lie a power of two apart are different ones.
ROWS = 101
#: Draws of each kind of cell; odd ones commit in every row.
DRAWS = 4
#: Kinds of cells whose draws are kept, and the bytes of all that are.
KINDS, KEPT_BYTES = 2, 6 << 30


@dataclass(frozen=True)
class Drawn:
    """A step of ROWS rows, row i in slot i, and the same after the reference.

    Attributes
    ----------
    before, after
        The step with its inputs, and what the reference made of it.
    """

    before: cases.Step
    after: cases.Step

    @property
    def bytes(self) -> int:
        """Device memory of both."""
        return self.before.buffer.numel() + self.after.buffer.numel()


_KEPT: OrderedDict[tuple[object, ...], dict[int, Drawn]] = OrderedDict()


def drawn(
    geometry: Mapping[str, int], tokens: int, dtype: str, device: torch.device | str, draw: int
) -> Drawn:
    """Draw number ``draw`` of a kind of cell: the same rows at each call."""
    kind = (*sorted(geometry.items()), tokens, dtype, str(device))
    if kind not in _KEPT:
        _KEPT[kind] = {}
    _KEPT.move_to_end(kind)
    while len(_KEPT) > KINDS or (
        len(_KEPT) > 1
        and sum(each.bytes for d in _KEPT.values() for each in d.values()) > KEPT_BYTES
    ):
        _KEPT.popitem(last=False)
    draws = _KEPT[kind]
    if draw not in draws:
        lengths = cases.full_lengths(ROWS, tokens, device) if draw % 2 else None
        before = cases.make_step(
            *(geometry, ROWS, tokens, dtype, device, 1000 + draw),
            lengths=lengths,
            padding=False,
            spare=0,
        )
        before.tensors["slot"].copy_(torch.arange(ROWS, device=device))
        after = before.clone()
        cases.run_reference("verify", after, tokens)
        draws[draw] = Drawn(before, after)
    return draws[draw]


@dataclass(frozen=True)
class Placed:
    """Which drawn row a call's rows and slots have.

    Attributes
    ----------
    rows
        int64 [N]: the drawn row of each row.
    slots
        int64 [S]: the drawn row of each slot.
    live
        int64 [L]: the rows that are no padding.
    """

    rows: Tensor
    slots: Tensor
    live: Tensor


def place(step: cases.Step, source: Drawn, generator: torch.Generator) -> Placed:
    """Give a step the drawn rows, in an order and in slots that ``generator`` draws; every fifth
    row is padding. What lies between the tensors stays as it is.
    """
    t, device = step.tensors, step.buffer.device
    requests, count = t["slot"].shape[0], t["hist_len"].shape[0]
    number = torch.arange(requests, device=device)
    order = torch.randperm(count, generator=generator, device=device)[:requests]
    first = int(torch.randint(0, ROWS, (), generator=generator, device=device))
    rows = (number + first) % ROWS
    slots = (torch.arange(count, device=device) * 7 + first) % ROWS
    live = (number % 5 != 2).nonzero().flatten()
    slots[order[live]] = rows[live]
    slot = order.clone()
    slot[number % 5 == 2] = -1
    for name in ("slots", "rows"):
        step.backing[name].random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    t["slot"].copy_(slot)
    # verify does not take it; of padding rows it is what nobody may use.
    step.integers["n_acc"].random_(0, 2, generator=generator)
    step.integers["n_acc"].masked_fill_(slot < 0, cases.GARBAGE)
    drawn_from = source.before.backing
    for name in ("qkv", "ba"):
        torch.index_select(drawn_from[name], 0, rows, out=step.backing[name])
        step.backing[name].masked_fill_((slot < 0)[:, None, None], float("nan"))
    for name in (*cases.POOLS, "hist_len", "bank"):
        torch.index_select(drawn_from[name], 0, slots, out=step.backing[name])
    for name in ("A_log", "dt_bias"):
        step.backing[name].copy_(drawn_from[name])
    t["out"].fill_(float("nan"))
    return Placed(rows, slots, live)


def expected(step: cases.Step, source: Drawn, placed: Placed) -> cases.Step:
    """The step as it must be after the call."""
    after = step.clone()
    slot, live = step.tensors["slot"], placed.live
    after.tensors["out"].zero_()
    after.tensors["out"][live] = source.after.tensors["out"][placed.rows[live]]
    # A pool's rows with the guard behind them are those of the draw.
    at, row = slot[live].long(), placed.rows[live]
    for name in ("rec_u", "rec_k", "rec_G"):
        after.backing[name][at] = source.after.backing[name][row]
    length = step.tensors["hist_len"][at]
    commits = length + step.tensors["q"].shape[1] > WINDOW
    after.backing["state"][at[commits]] = source.after.backing["state"][row[commits]]
    return after

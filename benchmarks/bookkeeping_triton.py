"""Peers of ``accept``, ``step_setup``, ``draft_step`` and ``stage`` in Triton, written for the
benchmark: one plain kernel an op, as a server would write it by hand. For inputs without NaN,
without padding, and with the outputs that the benchmark asks for.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import triton
import triton.language as tl

from bookkeeping import Work


@triton.jit
def _accept(
    logits, row_stride, V, drafts, accepted, n_acc, next_token, rows, kv_lens, positions,
    positions_out, slot, hist_len, bank, T: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a request: its rows one after another."""
    b = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    alive = b >= 0
    count = 0
    last = 0
    for t in tl.static_range(T):
        row = logits + (b * T + t).to(tl.int64) * row_stride
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        at = lane
        for start in range(0, V, BLOCK):
            column = start + lane
            found = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32)
            better = found > best
            at = tl.where(better, column, at)
            best = tl.where(better, found, best)
        top = tl.max(best, 0)
        token = tl.min(tl.where(best == top, at, 0x7FFFFFFF), 0)
        tl.store(accepted + b * T + t, token)
        count += alive.to(tl.int32)
        last = tl.where(alive, token, last)
        if t < T - 1:
            alive = alive & (tl.load(drafts + b * (T - 1) + t) == token)
    place = b * T + count - 1
    tl.store(n_acc + b, count)
    tl.store(next_token + b, last)
    tl.store(rows + b, place.to(tl.int64))
    tl.store(positions_out + b, tl.load(positions + place) + 1)
    tl.store(kv_lens + b, tl.load(kv_lens + b) + count - T)
    s = tl.load(slot + b)
    before = tl.load(hist_len + s)
    commits = before + T > WINDOW
    tl.store(hist_len + s, tl.where(commits, count, before + count))
    side = tl.load(bank + s)
    tl.store(bank + s, tl.where(commits, 1 - side, side))


def accept(work: Work) -> None:
    """Launch over a work."""
    t = work.tensors
    names = ("drafts", "accepted", "n_acc", "next_token", "rows", "kv_lens", "positions")
    requests, tokens = t["accepted"].shape
    _accept[(requests,)](
        t["target"], t["target"].stride(0), t["target"].shape[1], *(t[name] for name in names),
        *(t[name] for name in ("positions_out", "slot", "hist_len", "bank")),
        T=tokens, WINDOW=16, BLOCK=4096, num_warps=8,
    )  # fmt: skip


@triton.jit
def _setup(
    kv_lens, table, request_of_row, position_of_row, visible_of_row, page_of_row, within_of_row,
    first_position, ordinal_of_row, cache_slot, group_slot, table_out, rows, requests, columns,
    row_programs, T: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Programs of rows, and behind them programs of table entries."""
    program = tl.program_id(0)
    if program < row_programs:
        row = program * ROWS + tl.arange(0, ROWS)
        here = row < rows
        request = row // T
        ordinal = row % T
        position = tl.load(kv_lens + request, mask=here, other=0) - T + ordinal
        entry = tl.load(table + request * columns + position // PAGE, mask=here, other=0)
        page = tl.where(entry < 0, entry, entry // SCALE)
        within = position % PAGE
        tl.store(request_of_row + row, request, mask=here)
        tl.store(ordinal_of_row + row, ordinal, mask=here)
        tl.store(position_of_row + row, position, mask=here)
        tl.store(visible_of_row + row, (position + 1) // GROUP, mask=here)
        tl.store(page_of_row + row, page, mask=here)
        tl.store(within_of_row + row, within, mask=here)
        tl.store(first_position + request, position - ordinal, mask=here & (ordinal == 0))
        wide = page.to(tl.int64)
        tl.store(cache_slot + row, wide * PAGE + within, mask=here)
        slot = wide * (PAGE // GROUP) + within // GROUP
        ends = (position + 1) % GROUP == 0
        tl.store(group_slot + row, tl.where(ends, slot, -1), mask=here)
    else:
        at = (program - row_programs) * ENTRIES + tl.arange(0, ENTRIES)
        inside = at < requests * columns
        entry = tl.load(table + at, mask=inside, other=0)
        tl.store(table_out + at, tl.where(entry < 0, entry, entry // SCALE), mask=inside)


def step_setup(work: Work) -> None:
    """Launch over a work."""
    t, n = work.tensors, work.numbers
    requests, columns = t["block_table"].shape
    rows = t["request_of_row"].shape[0]
    programs = triton.cdiv(rows, 256)
    names = ("request_of_row", "position_of_row", "visible_of_row", "page_of_row", "within_of_row")
    more = ("first_position", "ordinal_of_row", "cache_slot", "group_slot", "table_out")
    _setup[(programs + triton.cdiv(requests * columns, 2048),)](
        t["kv_lens"], t["block_table"], *(t[name] for name in (*names, *more)),
        rows, requests, columns, programs, T=n["tokens"], PAGE=n["page_size"], GROUP=n["group"],
        SCALE=n["scale"], ROWS=256, ENTRIES=2048, num_warps=8,
    )  # fmt: skip


@triton.jit
def _draft(
    target, input_ids, drafts, K, new_tokens, next_token, kv_lens, positions, table, columns,
    page_of_row, within_of_row, cache_slot, requests, STEP: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A lane a request; the draft is not the last."""
    b = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = b < requests
    token = tl.load(target + b, mask=here, other=0)
    tl.store(input_ids + b, token, mask=here)
    tl.store(drafts + b * K + STEP, token, mask=here)
    tl.store(new_tokens + b * (K + 1) + STEP + 1, token, mask=here)
    tl.store(new_tokens + b * (K + 1), tl.load(next_token + b, mask=here, other=0), mask=here)
    position = tl.load(kv_lens + b, mask=here, other=0)
    tl.store(kv_lens + b, position + 1, mask=here)
    tl.store(positions + b, tl.load(positions + b, mask=here, other=0) + 1, mask=here)
    entry = tl.load(table + b * columns + position // PAGE, mask=here, other=0)
    page = entry // SCALE
    within = position % PAGE
    tl.store(page_of_row + b, page, mask=here)
    tl.store(within_of_row + b, within, mask=here)
    tl.store(cache_slot + b, page.to(tl.int64) * PAGE + within, mask=here)


@triton.jit
def _argmax(logits, row_stride, V, ids, BLOCK: tl.constexpr):
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = lane
    for start in range(0, V, BLOCK):
        column = start + lane
        found = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32)
        better = found > best
        at = tl.where(better, column, at)
        best = tl.where(better, found, best)
    token = tl.min(tl.where(best == tl.max(best, 0), at, 0x7FFFFFFF), 0)
    tl.store(ids + tl.program_id(0), token)


def draft_step(work: Work) -> None:
    """Launch over a work; of logits, a kernel for the argmax before it."""
    t, n = work.tensors, work.numbers
    target, requests = t["target"], t["input_ids"].shape[0]
    if target.dim() == 2:
        _argmax[(requests,)](
            target, target.stride(0), target.shape[1], t["input_ids"], BLOCK=4096, num_warps=8
        )
        target = t["input_ids"]
    _draft[(triton.cdiv(requests, 64),)](
        target, t["input_ids"], t["drafts"], t["drafts"].shape[1], t["next_new_tokens"],
        t["next_token"], t["kv_lens"], t["positions"], t["block_table"], t["block_table"].shape[1],
        t["page_of_row"], t["within_of_row"], t["cache_slot"], requests, STEP=n["step"],
        PAGE=n["page_size"], SCALE=n["scale"], LANES=64, num_warps=2,
    )  # fmt: skip


@triton.jit
def _stage(record, first, second, third, fourth, words, LANES: tl.constexpr):
    """A segment of equal length for each number of the second axis."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    segment = tl.program_id(1)
    value = tl.load(record + segment * words + at, mask=at < words)
    tl.store(first + at, value, mask=at < tl.where(segment == 0, words, 0))
    tl.store(second + at, value, mask=at < tl.where(segment == 1, words, 0))
    tl.store(third + at, value, mask=at < tl.where(segment == 2, words, 0))
    tl.store(fourth + at, value, mask=at < tl.where(segment == 3, words, 0))


def stage(work: Work) -> None:
    """Launch over a work of four segments."""
    record, *destinations = work.tensors.values()
    words = destinations[0].shape[0]
    _stage[(triton.cdiv(words, 256), 4)](record, *destinations, words, LANES=256, num_warps=4)


ARMS = {"accept": accept, "step_setup": step_setup, "draft_step": draft_step, "stage": stage}

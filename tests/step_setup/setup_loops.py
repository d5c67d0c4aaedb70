"""step_setup's contract as loops over Python lists, and calls that it can be asked about."""

from __future__ import annotations

from typing import Any

import torch

ROWS = ("request_of_row", "position_of_row", "visible_of_row", "page_of_row", "within_of_row")
OPTIONAL = ("ordinal_of_row", "position_of_row_int64", "length_of_row", "cache_slot", "group_slot")
LONG = ("position_of_row_int64", "cache_slot", "group_slot")
PADDING = {"visible_of_row": 0, "within_of_row": 0, "ordinal_of_row": 0, "length_of_row": 0}


def loops(call: dict[str, Any]) -> dict[str, Any]:
    """All tensors after the call, as lists, one element at a time."""
    t = {name: value.tolist() for name, value in call.items() if hasattr(value, "tolist")}
    lens, table = t["kv_lens"], t["block_table"]
    size, group, scale = call["page_size"], call["group"], call.get("scale") or 1
    counts = [max(0, n) for n in t["seq_lens"]] if call["tokens"] == 0 else None
    counts = counts if counts is not None else [call["tokens"]] * len(lens)

    def paged(value: int) -> int:
        return value if value < 0 else value // scale

    for b, (length, count) in enumerate(zip(lens, counts, strict=True)):
        t["first_position"][b] = length - count if length >= count else -1
        if "table_out" in t:
            for c, value in enumerate(table[b]):
                t["table_out"][b][c] = paged(value)
    owners = [(b, i) for b, count in enumerate(counts) for i in range(count)]
    for row in range(len(t["request_of_row"])):
        said: dict[str, int] = {}
        if row < len(owners):
            b, ordinal = owners[row]
            p = max(0, lens[b]) - counts[b] + ordinal
            if p >= 0:
                column = p // size
                page = paged(table[b][column]) if column < len(table[b]) else -1
                last = page >= 0 and (p + 1) % group == 0
                said = {
                    "request_of_row": b,
                    "position_of_row": p,
                    "visible_of_row": max(0, (p + 1) // group),
                    "page_of_row": page,
                    "within_of_row": p % size,
                    "ordinal_of_row": ordinal,
                    "position_of_row_int64": p,
                    "length_of_row": lens[b],
                    "cache_slot": page * size + p % size if page >= 0 else -1,
                    "group_slot": page * (size // group) + p % size // group if last else -1,
                }
        for name in (*ROWS, *OPTIONAL):
            if name in t:
                t[name][row] = said.get(name, PADDING.get(name, -1))
    if "work" in t:
        window = 16 if call.get("window") is None else call["window"]
        kinds: tuple[list[list[int]], ...] = ([], [], [])
        for b, slot in enumerate(t["slots"]):
            if 0 <= slot < len(t["hist_len"]):
                history = t["hist_len"][slot]
                kind = 0 if history + counts[b] > window else 1
                kinds[kind].append([b, slot, history, t["bank"][slot]])
            else:
                kinds[2].append([b, -1, 0, 0])
        t["work"][: len(lens)] = [line for kind in kinds for line in kind]
        t["n_commit"][0] = len(kinds[0])
    return t


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, 0x5BADBAD, dtype=dtype)


def call_of(
    lens: list[int],
    table: list[list[int]],
    rows: int,
    *,
    tokens: int = 0,
    counts: list[int] | None = None,
    index: torch.dtype = torch.int32,
    **more: Any,
) -> dict[str, Any]:
    """A call with all outputs of rows, poisoned."""
    ints = torch.int32
    call: dict[str, Any] = {
        "kv_lens": torch.tensor(lens, dtype=ints),
        "block_table": torch.tensor(table, dtype=ints) if table else poisoned(0, 4),
        **{name: poisoned(rows) for name in ROWS[:3]},
        **{name: poisoned(rows, dtype=index) for name in ROWS[3:]},
        "first_position": poisoned(len(lens)),
        **{n: poisoned(rows, dtype=torch.int64 if n in LONG else ints) for n in OPTIONAL},
        "tokens": tokens,
        "page_size": 32,
        "group": 4,
    }
    if counts is not None:
        call["seq_lens"] = torch.tensor(counts, dtype=ints)
    return {**call, **more}


def held(call: dict[str, Any], expected: dict[str, Any]) -> None:
    """That every tensor of the call is what is expected."""
    for name, value in expected.items():
        assert call[name].tolist() == value, name

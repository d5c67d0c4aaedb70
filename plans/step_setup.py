"""Planning of ``step_setup``: one plan for each dtype of the page indices.

Requests, tokens, page sizes, the scale of the block table and the tokens of a group are run-time
values of one kernel, which divides by them with multipliers from the host, and so is which of the
optional outputs are wanted. So a server's first call of another kind finds its code loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import (
    FREE,
    Op,
    Parameter,
    Rule,
    Scalar,
    Size,
    Tensor,
    Value,
    picked,
    vector,
)

#: The most requests of a call: each CTA holds the sums of their rows in shared memory.
MOST_REQUESTS = 2048
#: The most tokens of a request that a cell has; batches of longer ones run its plan.
MOST_TOKENS = 8
#: Threads of a CTA, and elements of the block table that a thread unscales.
THREADS, TABLE_ITEMS = 256, 8
#: The records that a replay window holds, where a call does not say (``gdn_replay``).
WINDOW = 16


class StepSetup:
    """The planning side of ``step_setup`` (see :class:`specplan.plans.family.Family`).

    A problem is how many tokens a group of the sparse selection has; 1 for models without groups.
    The dtype of a cell is that of ``page_of_row`` and ``within_of_row``.
    """

    name = "step_setup"
    ops = ("step_setup",)
    dtypes = ("int32", "int64")
    geometry: ClassVar[Mapping[str, tuple[int, int]]] = {"group": (1, 65536)}

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        if tokens > MOST_TOKENS:
            return f"{tokens} tokens, cells have at most {MOST_TOKENS} a request"
        return None

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        return 1

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        return (Plan("step_setup", "step_setup", arch.name, (("index", dtype),)),)


FAMILY = StepSetup()

_INDEX = {"torch.int32": "int32", "torch.int64": "int64"}


def _index_of(c: Any) -> str:
    """The dtype of the page indices, by the name that a cell has for it."""
    return _INDEX.get(str(c.page_of_row.tensor.dtype), "")


def _size(c: Any) -> Size:
    # Requests of different lengths run the plan of their mean, and longer ones that of the longest
    # cell: the kernel is the same. A call with no requests is checked like one with one.
    requests = max(1, c.kv_lens.shape[0])
    mean = -(-c.request_of_row.shape[0] // requests)
    tokens = c.given.tokens or min(max(1, mean), MOST_TOKENS)
    return Size((c.given.group,), _index_of(c), requests, tokens)


def _optional(name: str, dtype: str, about: str) -> Tensor:
    """An output of one element a row, or none."""
    stand_in = "none" if dtype == "int32" else "no_longs"
    return vector(name, dtype, f"{name}_held", about, written=True, stand_in=stand_in)


def _rows_or_none(name: str) -> Rule:
    """An optional output has as many rows as the others, or is not there."""
    return Rule(
        lambda c: (
            (getattr(c, name).shape[0] == c.request_of_row.shape[0])
            | (getattr(c, name).shape[0] == 0)
        ),
        lambda c: (
            f"{name} has {getattr(c, name).shape[0]} elements for {c.request_of_row.shape[0]} rows"
        ),
    )


_ROWS = (
    ("ordinal_of_row", "int32", "place of the row in its request; 0 for padding"),
    ("position_of_row_int64", "int64", "`position_of_row` once more"),
    ("length_of_row", "int32", "length of the row's request; 0 for padding"),
    ("cache_slot", "int64", "page x page size + place in the page, or -1"),
    ("group_slot", "int64", "the same in groups, for the last token of a group; else -1"),
)


def _histories(c: Any) -> Any:
    """Which requests have a history that a work item names."""
    slots = c.slots.tensor
    return (slots >= 0) & (slots < c.hist_len.shape[0])


def _of_history(name: str, most: str) -> Value:
    """What the history of each request holds."""

    def held(c: Any) -> Any:
        return picked(getattr(c, name).tensor, c.slots.tensor)

    def wrong(c: Any) -> Any:
        if c.work.shape[0] == 0 or c.hist_len.shape[0] == 0:
            return None
        limit = c.window if most == "window" else int(most)
        return _histories(c) & ((held(c) < 0) | (held(c) > limit))

    text = "0..{c.window} are records" if most == "window" else "a bank is 0 or 1"
    return Value(name, wrong, text, held=held)


def _no_work_items(c: Any) -> Any:
    return c.work.shape[0] == 0


OP = Op(
    "step_setup",
    "step_setup",
    tensors=(
        vector("kv_lens", "int32", "B", "tokens of each request in the cache, this step's too"),
        vector(
            *("seq_lens", "int32", "listed", "rows of each request, where they differ"),
            stand_in="none",
        ),
        Tensor(
            *("block_table", "int32", ("B", "C"), (FREE, FREE)),
            "scaled page of each `page_size` tokens; below 0: no page",
        ),
        vector("request_of_row", "int32", "rows", "request of each row, or -1", written=True),
        vector("position_of_row", "int32", "rows", "position, or -1", written=True),
        vector(
            *("visible_of_row", "int32", "rows", "whole groups up to the row's own token"),
            written=True,
        ),
        vector("page_of_row", "index", "rows", "page of each row, or -1", written=True),
        vector("within_of_row", "index", "rows", "place of each row in its page", written=True),
        vector("first_position", "int32", "B", "position of the first row, or -1", written=True),
        *(_optional(*row) for row in _ROWS),
        Tensor(
            *("table_out", "int32", ("R", "W"), (FREE, FREE), "the table in pages"),
            written=True,
            stand_in="no_table",
        ),
        Tensor(
            *("work", "int32", ("items", 4), (4, 1)),
            "request, slot, length and bank of each history, those that are committed first",
            written=True,
            stand_in="no_work",
        ),
        vector(
            *("n_commit", "int32", "counted", "how many are committed"),
            written=True,
            stand_in="none",
        ),
        Tensor("slots", "int32", ("slotted",), (FREE,), "history slot", stand_in="none"),
        vector("hist_len", "int32", "S", "records of each slot", stand_in="none"),
        vector("bank", "int32", "S_bank", "bank of each slot", stand_in="none"),
    ),
    scalars=(
        Scalar("tokens"),
        Scalar("page_size"),
        Scalar("group"),
        # Divided in Python: a host function cannot divide before it has refused 0.
        Scalar("page_groups", expression="page_size // group"),
        Scalar("scale", expression="1 if scale is None else scale"),
        Scalar("window", expression=f"{WINDOW} if window is None else window"),
        # 0: the call is checked and nothing is launched.
        Scalar("launches", expression="1", idle=0),
    ),
    parameters=(
        Parameter("kv_lens"),
        Parameter("block_table"),
        *(
            Parameter(name)
            for name in (
                *("request_of_row", "position_of_row", "visible_of_row", "page_of_row"),
                *("within_of_row", "first_position"),
            )
        ),
        Parameter("tokens", "int", keyword=True, about="rows of each request; 0 with `seq_lens`"),
        Parameter("page_size", "int", keyword=True, about="tokens of a page"),
        Parameter("group", "int", keyword=True, about="tokens of a group; 1 without groups"),
        Parameter("seq_lens", optional=True, keyword=True),
        Parameter("scale", "int", True, True, "table entry // scale = page; 1 without it"),
        *(Parameter(name, optional=True, keyword=True) for name, _, _ in _ROWS),
        *(
            Parameter(name, optional=True, keyword=True)
            for name in ("table_out", "work", "n_commit", "slots", "hist_len", "bank")
        ),
        Parameter("window", "int", True, True, f"records of a window; {WINDOW} without it"),
    ),
    # The compiled function checks what else tells calls apart.
    key=(
        *("kv_lens.get_device()", "kv_lens.numel()", "request_of_row.numel()", "tokens", "group"),
        "page_of_row.dtype",
    ),
    size=_size,
    absent={
        "none": ("int32", (0,)),
        "no_longs": ("int64", (0,)),
        "no_table": ("int32", (0, 0)),
        "no_work": ("int32", (0, 4)),
    },
    derived=(
        ("requests", lambda c: c.kv_lens.shape[0]),
        ("row_count", lambda c: c.request_of_row.shape[0]),
    ),
    rules=(
        Rule(
            lambda c: _index_of(c) != "",
            "page_of_row is {c.page_of_row.tensor.dtype}, expected torch.int32 or torch.int64",
            reason="argument",
            compiled=False,
        ),
        Rule(
            lambda c: c.requests <= MOST_REQUESTS,
            f"{{c.requests}} requests, at most {MOST_REQUESTS} fit one launch",
        ),
        Rule(lambda c: c.tokens >= 0, "tokens is {c.tokens}, below 0"),
        Rule(
            lambda c: (c.tokens > 0) | (c.seq_lens.shape[0] == c.requests),
            "tokens is 0, and seq_lens has {c.seq_lens.shape[0]} elements for {c.requests} "
            "requests",
        ),
        Rule(
            lambda c: (c.tokens == 0) | (c.seq_lens.shape[0] == 0),
            "tokens is {c.tokens} and seq_lens is given; one of them says the rows of a request",
        ),
        Rule(
            lambda c: c.wide(c.requests) * c.tokens <= c.row_count,
            "{c.requests} requests of {c.tokens} tokens do not fit {c.row_count} rows",
        ),
        Rule(lambda c: c.page_size >= 1, "page_size is {c.page_size}, below 1"),
        Rule(lambda c: c.group >= 1, "group is {c.group}, below 1"),
        Rule(lambda c: c.scale >= 1, "scale is {c.scale}, below 1", planned=True),
        Rule(lambda c: c.window >= 0, "window is {c.window}, below 0", planned=True),
        *(_rows_or_none(name) for name, _, _ in _ROWS),
        Rule(
            # Groups lie within pages.
            lambda c: (
                (c.group_slot.shape[0] == 0) | (c.wide(c.page_groups) * c.group == c.page_size)
            ),
            "a page of {c.page_size} tokens is not divided by groups of {c.group}",
            planned=True,
        ),
        Rule(
            lambda c: (
                (c.table_out.shape[0] == 0)
                | (
                    (c.table_out.shape[0] >= c.requests)
                    & (c.table_out.shape[1] >= c.block_table.shape[1])
                )
            ),
            "table_out is {c.table_out.shape}, the table {c.block_table.shape}",
        ),
        Rule(
            lambda c: c.wide(c.requests) * c.block_table.shape[1] < (1 << 31),
            "a table of {c.block_table.shape} has 2^31 entries or more",
        ),
        Rule(
            lambda c: _no_work_items(c) | (c.work.shape[0] >= c.requests),
            "work has {c.work.shape[0]} items for {c.requests} requests",
        ),
        Rule(
            lambda c: (
                _no_work_items(c) | ((c.slots.shape[0] == c.requests) & (c.n_commit.shape[0] == 1))
            ),
            "work items need n_commit of one element and slots of {c.requests}",
        ),
        Rule(
            lambda c: c.bank.shape[0] == c.hist_len.shape[0],
            "bank has {c.bank.shape[0]} slots, hist_len {c.hist_len.shape[0]}",
        ),
    ),
    values=(
        Value(
            "seq_lens",
            lambda c: (
                c.seq_lens.tensor.clamp(min=0).cumsum(0) > c.row_count
                if c.tokens == 0 and c.requests
                else None
            ),
            "the rows of all requests up to this one do not fit {c.row_count}",
        ),
        Value(
            "slots",
            lambda c: None if c.work.shape[0] == 0 or c.requests == 0 else _histories(c),
            "no two requests have one history",
            distinct=True,
        ),
        _of_history("hist_len", "window"),
        _of_history("bank", "1"),
    ),
    idle={
        "tokens": 1,
        "page_size": 4,
        "group": 4,
        "page_groups": 1,
        "scale": 1,
        "window": 1,
        "launches": 1,
        "listed": 0,
    },
)
OPS = {OP.name: OP}

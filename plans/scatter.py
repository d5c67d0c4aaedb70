"""Planning of ``scatter``: one plan for each set of store widths.

The widths of the outputs, the number of rows and every address are run-time values of the one
kernel, so requests and tokens do not choose the plan; the store widths do, because they are the
extents that the compiled module checks and the lanes that a row takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import FREE, Op, Rule, Scalar, Size, Tensor, Value, vector


class Scatter:
    """The planning side of ``scatter`` (see :class:`specplan.plans.family.Family`)."""

    name = "scatter"
    ops = ("scatter",)
    dtypes = ("int32",)
    geometry: ClassVar[Mapping[str, tuple[int, int]]] = {
        "history": (1, 128),
        "next": (1, 128),
        "draft": (0, 128),
    }

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        if tokens > geometry["history"]:
            return f"{tokens} tokens do not fit a history store of width {geometry['history']}"
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
        columns = max(geometry["history"], geometry["next"], geometry["draft"], 1)
        lanes = 1 << (columns - 1).bit_length()
        spec = (
            ("history", geometry["history"]),
            ("next", geometry["next"]),
            ("draft", geometry["draft"]),
            ("lanes", lanes),
        )
        return (Plan("scatter", "scatter", arch.name, spec),)


FAMILY = Scatter()


def _output(name: str, width: str, about: str) -> Tensor:
    return Tensor(name, "int32", ("N", width), (FREE, 1), about)


def _token_major(name: str, width: str, about: str) -> Tensor:
    return Tensor(name, "int32", (width, "S", 1), (FREE, 1, FREE), about, written=True)


def _size(c: Any) -> Size:
    # A call moves as many history columns as both sides have; an output with no columns moves the
    # length alone.
    tokens = max(1, min(c.new_tokens.shape[1], c.history))
    return Size((c.history, c.next, c.draft), "int32", c.rows, tokens)


OP = Op(
    "scatter",
    "scatter",
    tensors=(
        _output("new_tokens", "a", "accepted tokens of each row"),
        _output("next_new_tokens", "b", "input tokens of the next step"),
        vector("lens", "int32", "N", "accepted lengths, used raw"),
        _output("next_draft_tokens", "c", "drafts of the next step"),
        vector("slots", "int32", "listed", "distinct store slot of each moved row"),
        _token_major("store_new_tokens", "history", "token-major history store"),
        _token_major("store_next_new_tokens", "next", "token-major next-input store"),
        vector("store_lens", "int32", "S", "length store", written=True),
        Tensor(
            *("store_next_draft", "int32", ("S", "draft"), (FREE, 1), "slot-major draft store"),
            written=True,
        ),
    ),
    scalars=(
        Scalar("row_begin", idle=0),
        Scalar("rows", idle=0),
        # The width that the plan was picked for.
        Scalar("columns", known=lambda c: c.new_tokens.shape[1]),
    ),
    key=("new_tokens.get_device()", "rows", "new_tokens.numel()", "store_next_draft.numel()"),
    size=_size,
    rules=(
        Rule(lambda c: c.row_begin >= 0, "row_begin is {c.row_begin}, below 0"),
        Rule(lambda c: c.rows >= 0, "rows is {c.rows}, below 0"),
        Rule(
            lambda c: c.wide(c.row_begin) + c.rows <= c.new_tokens.shape[0],
            lambda c: (
                f"rows {c.row_begin}..{c.row_begin + c.rows} lie outside the outputs' "
                f"{c.new_tokens.shape[0]} rows"
            ),
        ),
        Rule(
            lambda c: c.rows <= c.slots.shape[0],
            "rows is {c.rows}, the slot table has {c.slots.shape[0]}",
        ),
        Rule(
            lambda c: c.columns == c.new_tokens.shape[1],
            "the plan is for {c.columns} columns, new_tokens has {c.new_tokens.shape[1]}",
            planned=True,
        ),
    ),
    values=(
        Value(
            "slots",
            lambda c: _moved(c) >= c.S,
            "the stores have {c.S} slots; a row of none has a negative one",
            lambda c: _moved(c),
        ),
        Value(
            "slots",
            lambda c: _moved(c) >= 0,
            "no two moved rows have one slot",
            lambda c: _moved(c),
            distinct=True,
        ),
    ),
    no_work=lambda p: p.rows == 0,
    quick="rows == 0",
)
OPS = {OP.name: OP}


def _moved(c: Any) -> Any:
    """The slots of the rows that move."""
    return c.slots.tensor[: c.rows]

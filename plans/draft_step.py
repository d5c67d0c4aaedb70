"""Planning of ``draft_step``: the splits of a row of logits are those of ``argmax``; ready ids of
tokens have none.

Requests, the vocabulary, the draft's number, page sizes and everything that may be left out are
run-time values of one compiled function for each dtype of the target. A problem is the class that
the vocabulary is of, 0 for token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specplan.plans import argmax
from specplan.plans.accept import IDS, IDS_CLASS, MOST_AXES
from specplan.plans.arch import Arch
from specplan.plans.argmax import ITEM, MOST_CLASS, held
from specplan.plans.plan import Plan
from specplan.plans.signature import (
    FREE,
    Form,
    Op,
    Parameter,
    Rule,
    Scalar,
    Size,
    Tensor,
    Value,
)


class DraftStep:
    """The planning side of ``draft_step`` (see :class:`specplan.plans.family.Family`). Requests are
    rows.
    """

    name = "draft_step"
    ops = ("draft_step",)
    dtypes = (*ITEM, *IDS)
    geometry: Mapping[str, tuple[int, int]] = {"vocabulary_k": (IDS_CLASS, MOST_CLASS)}

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        classes = geometry["vocabulary_k"]
        return None if classes == IDS_CLASS else argmax.check_class(classes)

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        return None if tokens == 1 else f"{tokens} tokens: a draft step has one row a request"

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        if geometry["vocabulary_k"] == IDS_CLASS or dtype not in ITEM:
            return 1
        return argmax.splits_of(geometry["vocabulary_k"], requests * tokens, dtype, arch)

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        if (geometry["vocabulary_k"] == IDS_CLASS) != (dtype in IDS):
            raise ValueError(f"a target of {dtype} and vocabulary_k {geometry['vocabulary_k']}")
        spec, launch = (("dtype", dtype),), (("splits", splits),)
        return (Plan("draft_step", "draft_step", arch.name, spec, launch),)


FAMILY = DraftStep()


# ----- the op -------------------------------------------------------------------------------------


def _target(dtype: str) -> Tensor:
    about = "rows of the draft head's logits, any row stride, or the token of each request"
    shape: tuple[int | str, ...] = ("N", "V") if dtype in ITEM else ("N",)
    strides = (FREE, 1) if dtype in ITEM else (FREE,)
    return Tensor("target", dtype, shape, strides, about, bits=64, forms=(dtype,))


def _positions(dtype: str, other: str) -> Tensor:
    """Positions by axis, as a tensor of one dtype."""
    return Tensor(
        *(f"positions_{dtype}", dtype, (f"axes_{dtype}", f"P_{dtype}"), (FREE, 1)),
        "position of each request's row, by axis",
        source=f"no_positions_{dtype} if positions is None or positions.dtype {other} "
        "else positions",
        parameter="positions",
        written=True,
    )


def _positions_rules(dtype: str) -> tuple[Rule, Rule]:
    """Positions of one dtype have few axes, and room for every request."""

    def shape(c: Any) -> Any:
        return getattr(c, f"positions_{dtype}").shape

    return (
        Rule(
            lambda c: shape(c)[0] <= MOST_AXES,
            lambda c: f"positions have {shape(c)[0]} axes, at most {MOST_AXES}",
        ),
        Rule(
            lambda c: (shape(c)[0] == 0) | (shape(c)[1] >= c.requests),
            lambda c: f"positions need {c.requests} elements an axis, they have {shape(c)[1]}",
        ),
    )


#: What is said of a request's next row: name, dtype (or both), what it is, whether it needs pages.
MAPPING = (
    ("request_of_row", "int32", "the request's number, or -1", False),
    ("position_of_row", "int32", "place of the row in the cache, or -1", False),
    ("visible_of_row", "int32", "whole groups up to the row's own token", False),
    ("page_of_row", "either", "page of the row, or -1", True),
    ("within_of_row", "either", "place of the row in its page", True),
    ("cache_slot", "int64", "page x page size + place in the page, or -1", True),
    ("group_slot", "int64", "the same in groups, for the last token of a group; else -1", True),
)


def _row_tensors(name: str, dtype: str, about: str) -> tuple[Tensor, ...]:
    if dtype == "either":
        return argmax.either(name, about, written=True)
    return (argmax.optional(name, dtype, about, written=True),)


def _row_names(name: str, dtype: str) -> tuple[str, ...]:
    return (f"{name}_int32", f"{name}_int64") if dtype == "either" else (name,)


def _row_rules(name: str, of: str, paged: bool) -> tuple[Rule, ...]:
    """An output of the next row, a tensor of its parameter ``of``, has room, and what it is made
    from is there.
    """

    def left_out(c: Any) -> Any:
        return getattr(c, name).shape[0] == 0

    rules = (
        held(name, "requests", of),
        Rule(lambda c: left_out(c) | (c.kv_lens.shape[0] > 0), f"{of} needs kv_lens"),
    )
    if not paged:
        return rules
    return (
        *rules,
        Rule(
            lambda c: left_out(c) | ((c.page_size > 0) & (c.block_table.shape[0] > 0)),
            f"{of} needs a block table and page_size, which is {{c.page_size}}",
            planned=True,
        ),
    )


def _d2t_rule(name: str) -> Rule:
    """A map of token ids has all columns of the logits, or is left out."""

    def has(c: Any) -> Any:
        return getattr(c, name).shape[0]

    return Rule(
        lambda c: (has(c) == 0) | (has(c) >= c.target.shape[1]),
        lambda c: f"d2t needs {c.target.shape[1]} elements, it has {has(c)}",
        forms=tuple(ITEM),
    )


_ABOUT = {
    "page_size": "tokens of a page; none without pages",
    "group": "tokens of a group; 1 without it",
    "scale": "table entry // scale = page; 1 without it",
}

OP = Op(
    "draft_step",
    "draft_step",
    tensors=(
        *(_target(dtype) for dtype in (*ITEM, *IDS)),
        *argmax.either("input_ids", "the token of each request", written=True),
        Tensor(
            *("drafts", "int32", ("G", "K"), (FREE, 1), "column `step` of each request's drafts"),
            written=True,
        ),
        argmax.optional("scratch", "int64", "2 x requests or more, zero; for logits", written=True),
        *argmax.either("d2t", "what is added to a token, by token"),
        Tensor(
            *("next_new_tokens", "int32", ("R", "W"), (FREE, 1)),
            "the last accepted token, then the drafts",
            written=True,
            stand_in="no_tokens",
        ),
        argmax.optional("next_token", "int32", "the last accepted token of each request"),
        argmax.optional("kv_lens", "int32", "tokens of each request in the cache", written=True),
        _positions("int32", "is not int32"),
        _positions("int64", "is int32"),
        Tensor(
            *("slot", "int32", ("slot_held",), (FREE,), "state slot, any stride; -1: padding"),
            stand_in="no_int32",
        ),
        Tensor(
            *("block_table", "int32", ("table_held", "C"), (FREE, FREE)),
            "scaled page of each `page_size` tokens; below 0: no page",
            stand_in="no_tokens",
        ),
        *(t for name, dtype, about, _ in MAPPING for t in _row_tensors(name, dtype, about)),
    ),
    scalars=(
        Scalar("step"),
        Scalar("page_size", expression="0 if page_size is None else page_size"),
        Scalar("group", expression="1 if group is None else group"),
        # Divided in Python: a host function cannot divide before it has refused 0.
        Scalar("page_groups", expression="0 if page_size is None else page_size // (group or 1)"),
        Scalar("scale", expression="1 if scale is None else scale"),
        # With no splits a call is checked and nothing is launched.
        Scalar("splits", launch="splits", idle=0),
    ),
    parameters=(
        *map(Parameter, ("target", "input_ids", "drafts")),
        Parameter("scratch", optional=True),
        Parameter("step", "int", keyword=True, about="number of the draft, 0 to K - 1"),
        *(
            Parameter(name, optional=True, keyword=True)
            for name in (
                *("d2t", "next_new_tokens", "next_token", "kv_lens", "positions", "slot"),
                *("block_table", *(name for name, _, _, _ in MAPPING)),
            )
        ),
        *(
            Parameter(name, "int", True, True, _ABOUT[name])
            for name in ("page_size", "group", "scale")
        ),
        Parameter("splits", "int", True, True, "the planning rule's without it"),
    ),
    key=(
        *("target.get_device()", "target.numel()", "input_ids.numel()", "target.dtype"),
        "splits",
    ),
    size=lambda c: Size(
        (argmax.vocabulary_class(c.target.shape[1]) if c.form in ITEM else IDS_CLASS,),
        *(c.form, c.requests, 1, c.given.splits),
    ),
    derived=(
        ("requests", lambda c: c.target.shape[0]),
        ("drafted", lambda c: c.drafts.shape[1]),
        ("twice", lambda c: c.wide(c.target.shape[0]) * 2),
    ),
    rules=(
        Rule(
            lambda c: c.target.shape[1] >= 1,
            "a row of logits has no columns",
            forms=tuple(ITEM),
        ),
        Rule(
            lambda c: c.target.shape[1] <= MOST_CLASS * 1024,
            f"{{c.target.shape[1]}} columns, at most {MOST_CLASS * 1024}",
            forms=tuple(ITEM),
        ),
        Rule(
            lambda c: c.wide(c.input_ids_int32.shape[0]) + c.input_ids_int64.shape[0] == c.requests,
            lambda c: (
                f"input_ids has {c.input_ids_int32.shape[0] + c.input_ids_int64.shape[0]} elements "
                f"for {c.requests} requests"
            ),
        ),
        Rule(
            lambda c: c.drafts.shape[0] >= c.requests,
            "drafts are {c.drafts.shape} for {c.requests} requests",
        ),
        Rule(
            lambda c: (c.step >= 0) & (c.step < c.drafted),
            "step is {c.step}, of {c.drafted} drafts",
        ),
        Rule(
            lambda c: (c.scratch.shape[0] >= c.twice),
            "scratch needs {c.twice} elements, it has {c.scratch.shape[0]}",
            forms=tuple(ITEM),
        ),
        *(_d2t_rule(f"d2t_{dtype}") for dtype in IDS),
        Rule(
            lambda c: (
                (c.next_new_tokens.shape[0] == 0)
                | (
                    (c.next_new_tokens.shape[0] >= c.requests)
                    & (c.next_new_tokens.shape[1] > c.drafted)
                )
            ),
            "next_new_tokens is {c.next_new_tokens.shape} for {c.requests} requests of "
            "{c.drafted} drafts",
        ),
        *(held(name, "requests") for name in ("next_token", "kv_lens", "slot")),
        *(rule for dtype in IDS for rule in _positions_rules(dtype)),
        Rule(
            lambda c: (c.block_table.shape[0] == 0) | (c.block_table.shape[0] >= c.requests),
            "block_table is {c.block_table.shape} for {c.requests} requests",
        ),
        Rule(lambda c: c.page_size >= 0, "page_size is {c.page_size}, below 0", planned=True),
        Rule(lambda c: c.group >= 1, "group is {c.group}, below 1", planned=True),
        Rule(lambda c: c.scale >= 1, "scale is {c.scale}, below 1", planned=True),
        *(
            rule
            for name, dtype, _, paged in MAPPING
            for each in _row_names(name, dtype)
            for rule in _row_rules(each, name, paged)
        ),
        Rule(
            # Groups lie within pages.
            lambda c: (
                (c.group_slot.shape[0] == 0) | (c.wide(c.page_groups) * c.group == c.page_size)
            ),
            "a page of {c.page_size} tokens is not divided by groups of {c.group}",
            planned=True,
        ),
    ),
    values=(
        Value(
            "scratch",
            lambda c: c.scratch.tensor[: 2 * c.requests] != 0 if c.requests else None,
            "it is zero before every call",
            forms=tuple(ITEM),
        ),
    ),
    no_work=lambda p: p.target.dim() in (1, 2) and p.target.shape[0] == 0,
    form=Form("target", {dtype: dtype for dtype in (*ITEM, *IDS)}),
    absent={
        "no_tokens": ("int32", (0, 0)),
        "no_positions_int32": ("int32", (0, 0)),
        "no_positions_int64": ("int64", (0, 0)),
        **{name: argmax.ABSENT[name] for name in ("no_int32", "no_int64")},
    },
    idle={
        **dict.fromkeys(("splits", "page_groups", "scale"), 1),
        **dict.fromkeys(("scratch_held", "W"), 2),
        **dict.fromkeys(("page_size", "group"), 4),
        **dict.fromkeys(("step", "input_ids_int64_held"), 0),
    },
)
OPS = {OP.name: OP}

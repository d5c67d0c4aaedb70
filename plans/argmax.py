"""Planning rule of ``argmax``, and what it shares with ``accept`` and ``draft_step``: how many CTAs
share a row of logits.

The vocabulary is run-time data of the kernel: a problem is the class that it is of, the next power
of two of 1,024 columns. One compiled function serves every class and every number of splits.

A row is cut so that

- the CTAs of all rows are at most ``PER_SM`` an SM: so many are resident at once, and each has 16
  KiB of loads under way;
- a CTA has ``GROUP`` bytes, one load of each of its threads' four, if that still gives every SM
  one;
- a CTA has at least ``LEAST`` bytes, one load a thread: fewer would only add atomics.

These are arithmetic; nothing was timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specplan.plans.arch import Arch
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
    vector,
)

ITEM = {"bf16": 2, "fp32": 4}
#: The smallest and the largest class of vocabularies, in units of 1,024 columns.
LEAST_CLASS, MOST_CLASS = 32, 256
PER_SM = 6
#: Bytes that a CTA of 256 threads reads with four loads a thread, and with one.
GROUP, LEAST = 16384, 4096


def vocabulary_class(columns: int) -> int:
    """The class of a vocabulary: the next power of two of 1,024 columns, at least 32."""
    return max(LEAST_CLASS, 1 << (-(-columns // 1024) - 1).bit_length())


def check_class(vocabulary_k: int) -> str | None:
    """Why a number is no class of vocabularies, or None."""
    if vocabulary_k != vocabulary_class(vocabulary_k * 1024):
        return f"vocabulary_k is {vocabulary_k}, a class is a power of two, at least {LEAST_CLASS}"
    return None


def splits_of(vocabulary_k: int, rows: int, dtype: str, arch: Arch) -> int:
    """CTAs that share a row of logits."""
    row_bytes = vocabulary_k * 1024 * ITEM[dtype]
    wanted = min(PER_SM * arch.sm_count, max(arch.sm_count, rows * row_bytes // GROUP))
    return max(1, min(wanted // rows, row_bytes // LEAST))


class Argmax:
    """The planning side of ``argmax`` (see :class:`specplan.plans.family.Family`). Requests are
    rows.
    """

    name = "argmax"
    ops = ("argmax",)
    dtypes = ("bf16", "fp32")
    geometry: Mapping[str, tuple[int, int]] = {"vocabulary_k": (LEAST_CLASS, MOST_CLASS)}

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        return check_class(geometry["vocabulary_k"])

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        return None if tokens == 1 else f"{tokens} tokens: rows are requests of one token each"

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        return splits_of(geometry["vocabulary_k"], requests * tokens, dtype, arch)

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        spec, launch = (("dtype", dtype),), (("splits", splits),)
        return (Plan("argmax", "argmax", arch.name, spec, launch),)


FAMILY = Argmax()

#: Empty tensors that stand in for optional ones.
ABSENT = {
    "no_int32": ("int32", (0,)),
    "no_int64": ("int64", (0,)),
    "no_fp32": ("fp32", (0,)),
    "no_bf16": ("bf16", (0,)),
}


def optional(name: str, dtype: str, about: str, **more: Any) -> Tensor:
    """A dense vector that a call may leave out, then an empty one."""
    return vector(name, dtype, f"{name}_held", about, stand_in=f"no_{dtype}", **more)


def either(name: str, about: str, **more: Any) -> tuple[Tensor, Tensor]:
    """A dense vector of int32 or int64, as a tensor of each dtype; one or both are empty."""
    return (
        vector(
            *(f"{name}_int32", "int32", f"{name}_int32_held", about),
            source=f"no_int32 if {name} is None or {name}.dtype is not int32 else {name}",
            parameter=name,
            **more,
        ),
        vector(
            *(f"{name}_int64", "int64", f"{name}_int64_held", about),
            source=f"no_int64 if {name} is None or {name}.dtype is int32 else {name}",
            parameter=name,
            **more,
        ),
    )


def logits(name: str = "logits", rows: str = "N") -> tuple[Tensor, Tensor]:
    """Rows of logits at any distance, bf16 or fp32, each a compiled form."""
    return (_logits(name, rows, "bf16"), _logits(name, rows, "fp32"))


def _logits(name: str, rows: str, dtype: str) -> Tensor:
    about = "rows of logits, any row stride"
    return Tensor(name, dtype, (rows, "V"), (FREE, 1), about, bits=64, forms=(dtype,))


def held(name: str, count: str, what: str = "") -> Rule:
    """An optional vector has so many elements, a name of the call, or is left out."""

    def has(c: Any) -> Any:
        return getattr(c, name).shape[0]

    return Rule(
        lambda c: (has(c) == 0) | (has(c) >= getattr(c, count)),
        lambda c: f"{what or name} needs {getattr(c, count)} elements, it has {has(c)}",
    )


def held_either(name: str, count: str) -> tuple[Rule, Rule]:
    """The same of a vector of int32 or int64."""
    return (held(f"{name}_int32", count, name), held(f"{name}_int64", count, name))


LOGITS_FORM = {"bf16": "bf16", "fp32": "fp32"}

OP = Op(
    "argmax",
    "argmax",
    tensors=(
        *logits(),
        *either("ids", "the column of each row, plus `offset` and `d2t`", written=True),
        Tensor(
            *(
                "value",
                "dtype",
                ("value_held",),
                (1,),
                "the largest logit, in its dtype; zero as +0",
            ),
            source="(no_bf16 if logits.dtype is bf16 else no_fp32) if value is None else value",
            written=True,
        ),
        optional(
            *("key", "int64", "order of the value, then complement of column plus `offset`"),
            written=True,
        ),
        *either("d2t", "what is added to a column, by column"),
        vector("scratch", "int64", "scratch_held", "at least 2 x rows, zero", written=True),
    ),
    scalars=(
        Scalar("offset", expression="0 if offset is None else offset"),
        # With no splits a call is checked and nothing is launched.
        Scalar("splits", launch="splits", idle=0),
    ),
    parameters=(
        Parameter("logits"),
        Parameter("ids"),
        Parameter("scratch"),
        *(Parameter(name, optional=True, keyword=True) for name in ("value", "key", "d2t")),
        Parameter("offset", "int", True, True, about="added to every column; 0 without it"),
        Parameter("splits", "int", True, True, about="the planning rule's without it"),
    ),
    key=("logits.get_device()", "logits.numel()", "ids.numel()", "logits.dtype", "splits"),
    size=lambda c: Size((vocabulary_class(c.columns),), c.form, c.rows, 1, c.given.splits),
    derived=(
        ("rows", lambda c: c.logits.shape[0]),
        ("columns", lambda c: c.logits.shape[1]),
        ("twice", lambda c: c.wide(c.logits.shape[0]) * 2),
    ),
    rules=(
        Rule(lambda c: c.columns >= 1, "a row of logits has no columns"),
        Rule(
            lambda c: c.columns <= MOST_CLASS * 1024,
            f"{{c.columns}} columns, at most {MOST_CLASS * 1024}",
        ),
        # What a call leaves out is empty, and ids may not be.
        Rule(
            lambda c: c.wide(c.ids_int32.shape[0]) + c.ids_int64.shape[0] == c.rows,
            lambda c: (
                f"ids has {c.ids_int32.shape[0] + c.ids_int64.shape[0]} elements for {c.rows} rows"
            ),
        ),
        held("value", "rows"),
        held("key", "rows"),
        *held_either("d2t", "columns"),
        Rule(
            lambda c: c.scratch.shape[0] >= c.twice,
            "scratch needs {c.twice} elements, it has {c.scratch.shape[0]}",
        ),
        Rule(lambda c: c.offset >= 0, "offset is {c.offset}, below 0", planned=True),
    ),
    values=(
        Value(
            "scratch",
            lambda c: c.scratch.tensor[: 2 * c.rows] != 0 if c.rows else None,
            "it is zero before every call",
        ),
    ),
    no_work=lambda p: p.logits.dim() == 2 and p.logits.shape[0] == 0,
    device="logits.get_device()",
    form=Form("logits", LOGITS_FORM),
    absent=ABSENT,
    idle={"scratch_held": 2, "splits": 1, "offset": 0, "ids_int64_held": 0},
)
OPS = {OP.name: OP}

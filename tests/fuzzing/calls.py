"""What the fuzzers of all families share: how a call is written down, made, and counted.

What calls are made comes from a ``random.Random`` (or Hypothesis's stand-in for one) and from
nothing else, so a seed and a number name a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from numbers import Integral, Real
from random import Random
from typing import Any

import specplan
import torch

#: Bytes between tensors, at least.
GUARD = 64
#: What a spoilt tensor's dtype may be, and its bytes.
ITEM = {
    torch.int32: 4,
    torch.int64: 8,
    torch.int16: 2,
    torch.uint8: 1,
    torch.bool: 1,
    torch.float32: 4,
    torch.bfloat16: 2,
}
#: What a call may pass in the place of a tensor.
NO_TENSORS: tuple[Any, ...] = (None, 3, "slots", [1, 2, 3], 2.5)


#: Names of integers and numbers of the public calls, and whether None is one of their values.
SCALARS: Mapping[str, bool] = {
    **dict.fromkeys(("row_begin", "rows", "requests", "tokens", "drafts", "softmax_scale"), False),
    **dict.fromkeys(
        (f"{n}_begin" for n in ("input_ids", "draft_tokens", "pos_offsets", "kv_offsets")), False
    ),
    **dict.fromkeys(("page_size", "group", "step"), False),
    **dict.fromkeys(
        ("splits", "scale", "window", "offset", "contexts", "fill", "extra", "force_mode"), True
    ),
}
#: Of these, the ones that need not be integers.
FLOATS = ("softmax_scale", "scale", "force_frac")


def is_scalar(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an argument of a call is a number: the rows and drafts of accept and draft_step are
    tensors, which those of scatter and gather are not.
    """
    of_tokens = "target" in arguments and name in ("rows", "drafts")
    return name in arguments and name in SCALARS and not of_tokens


def takes_none(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether None is a value of a number: draft_step may have no pages, step_setup may not."""
    of_draft = "step" in arguments and name in ("page_size", "group")
    return SCALARS[name] or of_draft


def no_number(arguments: Mapping[str, Any]) -> str:
    """What of a call is a scalar of a wrong type, whatever it may count as: such a call must be
    declined. Nothing if all are right.
    """
    for name in SCALARS:
        if not is_scalar(name, arguments):
            continue
        if arguments[name] is None and takes_none(name, arguments):
            continue
        kind = Real if name in FLOATS else Integral
        value = arguments[name]
        if isinstance(value, bool) or not isinstance(value, kind):
            return f"{name} is {value!r}"
    return ""


@dataclass(frozen=True)
class View:
    """A tensor to be: its shape, strides and dtype, and where in the call's row it lies."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype = torch.int32
    #: ``row`` for one in the call's row, ``host`` for a CPU tensor, ``none`` for no tensor at all.
    kind: str = "row"
    offset: int = 0
    #: The name of a tensor in whose place this one lies, too.
    alias: str = ""
    value: Any = None
    #: Bytes that the tensor is moved off the alignment of its item by four.
    shift: int = 0

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        if not prod(self.shape):
            return 0
        last = sum((size - 1) * s for size, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


def dense(*shape: int, dtype: torch.dtype = torch.int32, gap: int = 0) -> View:
    """A dense tensor, or one with ``gap`` elements after each of its rows."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if gap and len(shape) > 1:
        strides[0] += gap
    return View(shape, tuple(max(1, s) for s in strides), dtype)


@dataclass
class Call:
    """One call: an op by its dotted name, arguments by name, and how it may be judged."""

    op: str
    arguments: dict[str, Any]
    #: Values that tensors have, by name: what is random otherwise, and must mean something here.
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Names of what the op writes. If one shares memory with another argument, or a slot stands
    #: twice, the outcome is not defined, and only what is outside of these must be untouched.
    written: tuple[str, ...] = ()
    defined: bool = True
    #: What was done to it.
    changes: list[str] = field(default_factory=list)
    #: How it is made: one of ``WAYS``.
    way: str = "call"

    def __str__(self) -> str:
        shown = []
        for name, value in self.arguments.items():
            if isinstance(value, View):
                kind = (
                    str(value.dtype).removeprefix("torch.") if value.kind == "row" else value.kind
                )
                text = f"{kind}{list(value.shape)}/{list(value.strides)}@{value.offset}"
                if value.kind == "none":
                    text = repr(value.value)
                if value.alias:
                    text += f" on {value.alias}"
            else:
                text = repr(value) if isinstance(value, (int, float, str)) else type(value).__name__
            shown.append(f"{name}={text}")
        done = ", ".join(self.changes) or "nothing"
        how = self.op if self.way == "call" else f"{self.op}.{self.way}"
        return f"{how}({', '.join(shown)}); changed: {done}"


class DoesNotFit(Exception):
    """The call's tensors need more than a row has."""


class Flat(dict[torch.dtype, torch.Tensor]):
    """A storage as one row of elements, by their dtype."""

    def __init__(self, raw: torch.Tensor) -> None:
        super().__init__()
        self.raw = raw.view(-1)

    def __missing__(self, dtype: torch.dtype) -> torch.Tensor:
        self[dtype] = self.raw.view(dtype)
        return self[dtype]


class Storage:
    """The rows of a batch of calls on one device."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.row_bytes = rows.shape[1]
        self.flat = Flat(rows)

    def tensor(self, view: View, row: int) -> Any:
        """What a call passes: the tensor of a view, or what stands in its place."""
        if view.kind == "none":
            return view.value
        if view.kind == "host":
            # Pools are large, and what is on the CPU is read by nobody.
            make = torch.zeros if prod(view.shape) < 1 << 16 else torch.empty
            return make(view.shape, dtype=view.dtype)
        offset = (row * self.row_bytes + view.offset) // view.dtype.itemsize
        return torch.as_strided(self.flat[view.dtype], view.shape, view.strides, offset)

    def arguments(self, call: Call, row: int) -> dict[str, Any]:
        return {
            name: self.tensor(value, row) if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }

    def write_values(self, call: Call, row: int) -> None:
        """Write the inputs that mean something, where the call still has room for them."""
        for name, values in call.values.items():
            view = call.arguments.get(name)
            if isinstance(view, View) and view.kind == "row" and view.strides in ((1,), (2,)):
                tensor = self.tensor(view, row)
                count = min(tensor.numel(), values.numel())
                tensor[:count] = values[:count].to(view.dtype)


@dataclass(frozen=True)
class Failure:
    """A call that did what no call may do."""

    batch: int
    row: int
    call: str
    what: str

    def __str__(self) -> str:
        return f"batch {self.batch}, row {self.row}: {self.what}\n    {self.call}"


#: How a call may be made.
WAYS = ("call", "require", "bind")


def any_way(chance: Random) -> str:
    return chance.choices(WAYS, (5, 2, 3))[0]


def through(op: Any, way: str, *arguments: Any, **named: Any) -> Any:
    """The answer of an op, called, required, or bound and launched."""
    if way == "require":
        try:
            answer = op.require(*arguments, **named)
        except specplan.UncertifiedCell as error:
            return error.uncertified
        return True if answer is None else answer
    if way != "bind":
        return op(*arguments, **named)
    launch = op.bind(*arguments, **named)
    if isinstance(launch, specplan.Uncertified):
        return launch
    launch()
    return True


@dataclass
class Score:
    """What happened so far."""

    calls: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def note(self, call: Call, answer: Any) -> None:
        """Count a call by what came of it; a text stands for what the op's own objects refuse."""
        self.calls += 1
        if isinstance(answer, str):
            how = f"declined: {answer}"
        else:
            how = "launched" if answer else f"declined: {answer.reason.value}"
        if answer and not isinstance(answer, str) and not call.defined:
            how = "launched, outcome not defined"
        self.answers[f"{call.op}: {how}"] += 1


def judge(
    batch: int,
    calls: Sequence[Call],
    expected: Storage,
    found: Storage,
    before: Mapping[int, torch.Tensor],
    errors: dict[int, str],
    score: Score,
) -> None:
    """Compare the rows of a batch, and keep what is wrong with which call."""
    for row, unchanged in before.items():
        # Not defined: whatever is written, it lies in what the call gave to be written.
        expected.rows[row] = unchanged
        for name in calls[row].written:
            view = calls[row].arguments[name]
            if isinstance(view, View) and view.kind == "row":
                for storage in (expected, found):
                    storage.tensor(view, row).zero_()
    differs = (expected.rows != found.rows).any(dim=1)
    for row in differs.nonzero().flatten().tolist():
        where = (expected.rows[row] != found.rows[row]).nonzero().flatten().tolist()
        inside = sorted({owner(calls[row], byte) for byte in where})
        errors.setdefault(
            row, f"{len(where)} bytes are not the reference's, from byte {where[0]}, in {inside}"
        )
    for row, what in sorted(errors.items()):
        score.failures.append(Failure(batch, row, str(calls[row]), what))


def owner(call: Call, byte: int) -> str:
    """The argument in which a byte of the row lies, or its guard."""
    for name, view in call.arguments.items():
        if isinstance(view, View) and view.kind == "row":
            start = view.offset
            if start <= byte < start + view.extent:
                return name
    return "a guard"

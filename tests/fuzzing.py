"""Random calls of scatter, gather and rollback: right ones, and ones with something wrong.

Every call has a row of bytes of its own in one storage, filled with noise, in which all its tensors
lie with noise between them. The ops run over the rows of one storage, the plain references over a
copy of it, and then the whole storages are compared: one comparison covers the outputs, the inputs,
the gaps between rows of a strided tensor, the guards, and the rows of the other calls. A declined
call must leave its row as it was.

What calls are made comes from a ``random.Random`` (or Hypothesis's stand-in for one) and from
nothing else, so a seed and a number name a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import specplan
import torch
from specplan.kernels.rollback import reference as rollback_reference
from specplan.plans import rollback as rollback_plan

#: Bytes between tensors, at least.
GUARD = 64
_ITEM = {
    torch.int32: 4,
    torch.int64: 8,
    torch.int16: 2,
    torch.uint8: 1,
    torch.bool: 1,
    torch.float32: 4,
    torch.bfloat16: 2,
}
#: What a call may pass in the place of a tensor.
_NO_TENSORS: tuple[Any, ...] = (None, 3, "slots", [1, 2, 3], 2.5)


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
        return (last + 1) * _ITEM[self.dtype]


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
    #: Whether it is made as a bound launch.
    bound: bool = False

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
        how = f"{self.op}.bind" if self.bound else self.op
        return f"{how}({', '.join(shown)}); changed: {done}"


# What calls are made


def any_call(chance: Random, problems: Mapping[str, Sequence[Mapping[str, int]]]) -> Call:
    """A call of scatter or gather of one of the problems, in half of the cases spoilt."""
    family = chance.choice(sorted(set(problems) & {"scatter", "gather"}))
    geometry = chance.choice(list(problems[family]))
    call = (_scatter if family == "scatter" else _gather)(chance, geometry)
    call.bound = chance.random() < 0.25
    if chance.random() < 0.5:
        for _ in range(chance.choice((1, 1, 1, 2))):
            _spoil(chance, call)
    return call


def _size(chance: Random) -> int:
    return chance.choice((1, 2, 3, 5, 8, 13, chance.randint(1, 24)))


def _slots(chance: Random, count: int, size: int) -> torch.Tensor:
    """Distinct slots, some of them outside of the stores."""
    order = list(range(size))
    chance.shuffle(order)
    outside = [-1, size, size + 7, -(1 << 31), (1 << 31) - 1, -2]
    values = [*order, *outside * count][:count]
    for at in range(count):
        if chance.random() < 0.08:
            values[at] = chance.choice(outside)
    return torch.tensor(values, dtype=torch.int32)


def _stores(chance: Random, size: int, geometry: Mapping[str, int]) -> dict[str, View]:
    def token_major(width: int) -> View:
        gap = chance.choice((0, 0, 1, 5))
        return View((width, size, 1), (size + gap, 1, chance.choice((1, 1, size, 3))))

    stores = {"store_next_new_tokens": token_major(geometry["next"])}
    if "history" in geometry:
        stores["store_new_tokens"] = token_major(geometry["history"])
    stores["store_lens"] = dense(size)
    stores["store_next_draft"] = dense(size, geometry["draft"], gap=chance.choice((0, 0, 3)))
    return stores


def _scatter(chance: Random, geometry: Mapping[str, int]) -> Call:
    rows, size = _size(chance), _size(chance) + chance.randint(0, 12)
    begin, past = chance.choice((0, 0, 1, 4)), chance.choice((0, 0, 1, 3))
    held = begin + rows + past
    most = geometry["history"]
    widths = [chance.randint(0, most + 2), chance.randint(0, geometry["next"] + 3)]
    widths.append(chance.randint(0, geometry["draft"] + 3))
    outputs = [dense(held, width, gap=chance.choice((0, 0, 2, 9))) for width in widths]
    stores = _stores(chance, size, geometry)
    call = Call(
        "scatter",
        {
            "new_tokens": outputs[0],
            "next_new_tokens": outputs[1],
            "lens": dense(held),
            "next_draft_tokens": outputs[2],
            "slots": dense(rows + chance.choice((0, 0, 2))),
            "store_new_tokens": stores["store_new_tokens"],
            "store_next_new_tokens": stores["store_next_new_tokens"],
            "store_lens": stores["store_lens"],
            "store_next_draft": stores["store_next_draft"],
            "row_begin": begin,
            "rows": rows,
        },
        written=(*("store_new_tokens", "store_next_new_tokens", "store_lens", "store_next_draft"),),
    )
    lens = [chance.choice((0, 1, most, most + 1, chance.randint(-2, 9))) for _ in range(held)]
    call.values["lens"] = torch.tensor(lens, dtype=torch.int32)
    call.values["slots"] = _slots(chance, rows, size)
    if chance.random() < 0.02 and rows > 1:
        call.values["slots"][0] = call.values["slots"][1]
        call.defined = False
        call.changes.append("a slot twice")
    return call


def _gather(chance: Random, geometry: Mapping[str, int]) -> Call:
    requests, size = _size(chance), _size(chance) + chance.randint(0, 12)
    tokens = chance.randint(1, min(8, geometry["next"]))
    drafts = chance.randint(0, min(tokens - 1, geometry["draft"]))
    flat = requests * tokens
    begins = [chance.choice((0, 0, 1, 6)) for _ in range(4)]
    counts = (flat, requests * drafts, flat, requests)
    stores = _stores(chance, size, {k: geometry[k] for k in ("next", "draft")})
    names = ("input_ids", "draft_tokens", "pos_offsets", "kv_offsets")
    call = Call(
        "gather",
        {
            "store_next_new_tokens": stores["store_next_new_tokens"],
            "store_next_draft": stores["store_next_draft"],
            "store_lens": stores["store_lens"],
            "slots": dense(requests + chance.choice((0, 0, 2))),
            "pos_indices": dense(flat + chance.choice((0, 0, 2))),
            **{
                name: dense(begin + count + chance.choice((0, 0, 3)))
                for name, begin, count in zip(names, begins, counts, strict=True)
            },
            **{f"{name}_begin": begin for name, begin in zip(names, begins, strict=True)},
            "requests": requests,
            "tokens": tokens,
            "drafts": drafts,
        },
        written=names,
    )
    many = torch.tensor([chance.randrange(-1, size + 1) for _ in range(flat)], dtype=torch.int32)
    call.values["pos_indices"] = many
    call.values["slots"] = torch.tensor(
        [chance.randrange(-1, size + 1) for _ in range(requests)], dtype=torch.int32
    )
    return call


#: Integers near the ends of what 32 and 64 bits hold, and what wraps to a small one.
_ENDS = tuple(
    sign * (1 << bits) + more
    for bits in (31, 32, 63, 64)
    for sign in (1, -1)
    for more in (-1, 0, 2)
)


def _spoil(chance: Random, call: Call) -> None:
    """Change one thing of a call; it may still be a right one."""
    views = [name for name, value in call.arguments.items() if isinstance(value, View)]
    integers = [name for name, value in call.arguments.items() if type(value) is int]
    if integers and chance.random() < 0.3:
        name = chance.choice(integers)
        value = call.arguments[name]
        changed = chance.choice(
            (
                *(value - 1, value + 1, -1, 0, -value, 257, 1 << 20, *chance.sample(_ENDS, 3)),
                *(value + (1 << 32), value + (1 << 64), float(value), 2.5, None, "1", True),
            )
        )
        call.arguments[name] = changed
        call.changes.append(f"{name} {value!r} -> {changed!r}")
        return
    name = chance.choice(views)
    view = call.arguments[name]
    kind, changed = chance.choice(_SPOILS)(chance, name, view, call)
    call.arguments[name] = changed
    call.changes.append(f"{name}: {kind}")


Spoilt = tuple[str, View]


def _other_dtype(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    dtype = chance.choice([d for d in _ITEM if d is not view.dtype])
    return f"is {dtype}", replace(view, dtype=dtype)


def _other_rank(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    if view.shape and chance.random() < 0.4:
        return "is flat", dense(prod(view.shape), dtype=view.dtype)
    at = chance.randint(0, len(view.shape))
    shape = (*view.shape[:at], 1, *view.shape[at:])
    strides = (*view.strides[:at], 1, *view.strides[at:])
    return "has one dimension more", replace(view, shape=shape, strides=strides)


def _other_size(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    if not view.shape:
        return "stays", view
    at = chance.randrange(len(view.shape))
    size = chance.choice((max(0, view.shape[at] - 1), view.shape[at] + 1, 0, 1, view.shape[at] * 2))
    shape = (*view.shape[:at], size, *view.shape[at + 1 :])
    return f"has {size} in dimension {at}", dense(*shape, dtype=view.dtype)


def _other_strides(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    if len(view.shape) > 1 and chance.random() < 0.4:
        reverse = dense(*view.shape[::-1], dtype=view.dtype)
        return "is transposed", replace(reverse, shape=view.shape, strides=reverse.strides[::-1])
    if not view.shape:
        return "stays", view
    at = chance.randrange(len(view.shape))
    if chance.random() < 0.3 and name not in call.written:
        strides = (*view.strides[:at], 0, *view.strides[at + 1 :])
        return f"is expanded in dimension {at}", replace(view, strides=strides)
    doubled = tuple(2 * stride for stride in view.strides)
    return "has a gap after every element", replace(view, strides=doubled)


def _host(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    return "is on the CPU", replace(view, kind="host")


def _no_tensor(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    value = chance.choice(_NO_TENSORS)
    return f"is {value!r}", replace(view, kind="none", value=value)


def _shares(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    """Lie where another argument lies; which of the two is written makes the difference."""
    others = [
        n
        for n, v in call.arguments.items()
        if isinstance(v, View) and v.kind == "row" and n != name
    ]
    other = chance.choice(others)
    if name in call.written or other in call.written or "slots" in (name, other):
        # Slots that are other values, too, may repeat.
        call.defined = False
    return f"lies where {other} lies", replace(view, alias=other)


def _swapped(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    other = chance.choice([n for n, v in call.arguments.items() if isinstance(v, View)])
    mine = call.arguments[other]
    call.arguments[other] = view
    call.values.pop(other, None)
    call.values.pop(name, None)
    return f"is {other}, and the other way round", mine


_SPOILS: tuple[Callable[[Random, str, View, Call], Spoilt], ...] = (
    *(_other_dtype, _other_rank, _other_size, _other_size, _other_strides, _other_strides),
    *(_host, _no_tensor, _shares, _shares, _swapped),
)


# Where the tensors lie


class DoesNotFit(Exception):
    """The call's tensors need more than a row has."""


def place(call: Call, row_bytes: int, chance: Random) -> None:
    """Give every tensor of a call its offset in the row, noise between them."""
    at = GUARD
    for name, view in call.arguments.items():
        if isinstance(view, View) and view.kind == "row" and not view.alias:
            call.arguments[name] = placed = _placed(view, at, chance)
            at = placed.offset + view.extent + GUARD
    for name, view in call.arguments.items():
        if isinstance(view, View) and view.alias:
            there = call.arguments[view.alias]
            # What it lay on may have been changed since, and be nowhere now.
            offset = there.offset if isinstance(there, View) and not there.alias else GUARD
            item = _ITEM[view.dtype]
            offset = offset // item * item
            call.arguments[name] = replace(view, offset=offset)
            at = max(at, offset + view.extent + GUARD)
    if at > row_bytes:
        raise DoesNotFit
    if _writes_over(call):
        call.defined = False


def _writes_over(call: Call) -> bool:
    """Whether something that the op writes shares a byte with another argument: one that lies where
    a smaller one lies reaches over what comes behind it.
    """
    spans = [
        (name in call.written, view.offset, view.offset + view.extent)
        for name, view in call.arguments.items()
        if isinstance(view, View) and view.kind == "row" and view.extent
    ]
    return any(
        (first or second) and start < other_end and other_start < end
        for at, (first, start, end) in enumerate(spans)
        for second, other_start, other_end in spans[:at]
    )


def _placed(view: View, at: int, chance: Random) -> View:
    item = max(4, _ITEM[view.dtype])
    at = -(-at // 16) * 16 + chance.choice((0, 0, item, 2 * item)) + view.shift
    return replace(view, offset=-(-at // _ITEM[view.dtype]) * _ITEM[view.dtype])


class Storage:
    """The rows of a batch of calls on one device."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.row_bytes = rows.shape[1]
        flat = rows.view(-1)
        self.flat = {dtype: flat.view(dtype) for dtype in _ITEM}

    def tensor(self, view: View, row: int) -> Any:
        """What a call passes: the tensor of a view, or what stands in its place."""
        if view.kind == "none":
            return view.value
        if view.kind == "host":
            return torch.zeros(view.shape, dtype=view.dtype)
        item = _ITEM[view.dtype]
        offset = (row * self.row_bytes + view.offset) // item
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


# Running and judging


@dataclass(frozen=True)
class Failure:
    """A call that did what no call may do."""

    batch: int
    row: int
    call: str
    what: str

    def __str__(self) -> str:
        return f"batch {self.batch}, row {self.row}: {self.what}\n    {self.call}"


def through(op: Any, bound: bool, *arguments: Any, **named: Any) -> Any:
    """The answer of an op, called or bound and launched."""
    if not bound:
        return op(*arguments, **named)
    launch = op.bind(*arguments, **named)
    if isinstance(launch, specplan.Uncertified):
        return launch
    launch()
    return True


#: Launches a call: ``launch(call, arguments)`` is the op's answer.
Launch = Callable[[Call, Mapping[str, Any]], Any]
REFERENCES: Mapping[str, Callable[..., None]] = {
    "scatter": specplan.reference.scatter,
    "gather": specplan.reference.gather,
}


@dataclass
class Score:
    """What happened so far."""

    calls: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def note(self, call: Call, answer: Any) -> None:
        self.calls += 1
        how = "launched" if answer is True else f"declined: {answer.reason.value}"
        if answer is True and not call.defined:
            how = "launched, outcome not defined"
        self.answers[f"{call.op}: {how}"] += 1


def run_copies(
    batch: int,
    calls: Sequence[Call],
    noise: torch.Tensor,
    launch: Launch,
    device: torch.device,
    score: Score,
    wrap: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> None:
    """Run a batch of placed calls of scatter and gather, and judge it.

    ``noise`` is uint8 [calls, row bytes] on the CPU. ``wrap`` is applied to the tensors that the op
    gets.
    """
    host = Storage(noise)
    for row, call in enumerate(calls):
        host.write_values(call, row)
    ours = Storage(noise.to(device, copy=True))
    before = {row: noise[row].clone() for row, call in enumerate(calls) if not call.defined}
    errors: dict[int, str] = {}
    for row, call in enumerate(calls):
        arguments = ours.arguments(call, row)
        for name, value in arguments.items():
            view = call.arguments[name]
            if isinstance(view, View) and view.kind == "row":
                arguments[name] = wrap(value)
        try:
            answer = launch(call, arguments)
        except Exception as error:
            errors[row] = f"raised {error!r}"
            continue
        if answer is not True and not isinstance(answer, specplan.Uncertified):
            errors[row] = f"answered {answer!r}"
            continue
        score.note(call, answer)
        if answer is True and call.defined:
            try:
                given = host.arguments(call, row).items()
                # True counts as 1, and torch does not subtract it.
                REFERENCES[call.op](**{n: 1 if v is True else v for n, v in given})
            except Exception as error:
                errors[row] = f"was launched, and the reference raises {error!r}"
    _judge(batch, calls, host, Storage(ours.rows.cpu()), before, errors, score)


def _judge(
    batch: int,
    calls: Sequence[Call],
    expected: Storage,
    found: Storage,
    before: Mapping[int, torch.Tensor],
    errors: dict[int, str],
    score: Score,
) -> None:
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
        inside = sorted({_owner(calls[row], byte) for byte in where})
        errors.setdefault(
            row, f"{len(where)} bytes are not the reference's, from byte {where[0]}, in {inside}"
        )
    for row, what in sorted(errors.items()):
        score.failures.append(Failure(batch, row, str(calls[row]), what))


def _owner(call: Call, byte: int) -> str:
    """The argument in which a byte of the row lies, or its guard."""
    for name, view in call.arguments.items():
        if isinstance(view, View) and view.kind == "row":
            start = view.offset
            if start <= byte < start + view.extent:
                return name
    return "a guard"


# rollback: sequences, because a restore needs what a gather saved


@dataclass
class Episode:
    """A gather, the step's writes, and what puts rows back; each call spoilt in some cases."""

    geometry: Mapping[str, int]
    #: The planes, uint8 [pages, page tokens, row bytes].
    planes: list[View]
    calls: list[Call]
    #: Where the planes begin and end: the step inverts all bytes between.
    extent: tuple[int, int]
    layout_views: dict[str, View] = field(default_factory=dict)


def episode(chance: Random, geometry: Mapping[str, int], row_bytes: int) -> Episode:
    """A sequence of rollback's ops over one cache, placed in a row of ``row_bytes``."""
    requests, tokens = chance.choice((1, 2, 4, 8, chance.randint(1, 6))), chance.randint(1, 4)
    rows = requests * tokens
    pages, page_tokens = chance.randint(1, 4), chance.choice((1, 3, 4, 8))
    index = chance.choice((torch.int32, torch.int64))
    at = GUARD
    planes = []
    shift = chance.choice((0, 0, 4, 8))
    for count, size in (
        (geometry["planes"], geometry["row_bytes"]),
        (geometry["side_planes"], geometry["side_row_bytes"]),
    ):
        for _ in range(count):
            gap = chance.choice((0, 0, 16))
            strides = (page_tokens * (size + gap) + gap, size + gap, 1)
            view = View((pages, page_tokens, size), strides, torch.uint8)
            view = replace(view, offset=-(-at // 16) * 16 + shift)
            planes.append(view)
            at = view.offset + view.extent + GUARD
    extent = (planes[0].offset, at - GUARD)
    described = [
        rollback_plan.plane(16 * (1 << 20) + v.offset, *v.strides[:2], *v.shape) for v in planes
    ]
    record = rollback_plan.layout(described).record_bytes
    wide = record + chance.choice((0, 16, 128))
    views: dict[str, View] = {
        "planes": dense(len(planes), rollback_plan.PLANE_FIELDS, dtype=torch.int64),
        "pages": dense(rows, dtype=index),
        "within": dense(rows, dtype=index),
        "old": View((rows + chance.choice((0, 1)), record), (wide, 1), torch.uint8),
        "pending": dense(1),
        "rejected": dense(rows),
        "accepted": dense(requests),
        "row_requests": dense(rows + chance.choice((0, 2))),
        "row_ordinals": dense(rows + chance.choice((0, 2))),
        "slots": dense(requests),
        "cursors": dense(requests + chance.choice((0, 3))),
    }
    for name, view in views.items():
        offset = -(-at // 16) * 16
        views[name] = replace(view, offset=offset)
        at = offset + view.extent + GUARD
    if at > row_bytes:
        raise DoesNotFit
    values = {
        "pages": torch.tensor([chance.randrange(-1, pages + 1) for _ in range(rows)]),
        "within": torch.tensor([chance.randrange(-1, page_tokens + 1) for _ in range(rows)]),
        "pending": torch.tensor([0]),
        "rejected": torch.tensor([chance.choice((0, 1, -5)) for _ in range(rows)]),
        "accepted": torch.tensor([chance.randint(-1, tokens + 1) for _ in range(requests)]),
        "row_requests": torch.tensor([chance.randrange(-1, requests + 1) for _ in range(rows)]),
        "row_ordinals": torch.tensor([chance.randrange(tokens) for _ in range(rows)]),
        "slots": _slots(chance, requests, requests + 3),
    }
    common = {name: views[name] for name in ("planes", "pages", "within", "old", "pending")}
    calls = []
    for op in (
        "gather",
        chance.choice(("restore", "commit")),
        chance.choice(("restore", "commit")),
    ):
        arguments: dict[str, Any] = {"tokens": tokens, **common}
        if op == "restore":
            arguments["rejected"] = views["rejected"]
        if op == "commit":
            arguments["accepted"] = views["accepted"]
            if chance.random() < 0.5:
                arguments["row_requests"] = views["row_requests"]
                arguments["row_ordinals"] = views["row_ordinals"]
            if chance.random() < 0.5:
                arguments["slots"] = views["slots"]
                if chance.random() < 0.7:
                    arguments["cursors"] = views["cursors"]
        call = Call(f"rollback.{op}", arguments, values, bound=chance.random() < 0.25)
        if chance.random() < 0.4:
            _spoil_rollback(chance, call)
        calls.append(call)
    return Episode(geometry, planes, calls, extent, views)


def _spoil_rollback(chance: Random, call: Call) -> None:
    """Change one argument in place of where it lies; the plane table's values stay, since what they
    point to is the caller's word.
    """
    name = chance.choice([n for n in call.arguments if n != "planes"])
    value = call.arguments[name]
    if not isinstance(value, View):
        changed = chance.choice((0, -1, value + 1, value + (1 << 32), 1 << 31, 2.5, None, "4"))
        call.arguments[name] = changed
        call.changes.append(f"{name} {value!r} -> {changed!r}")
        return
    at = chance.randrange(len(value.shape))
    fewer = (*value.shape[:at], value.shape[at] - 1, *value.shape[at + 1 :])
    narrow = {d for d in _ITEM if _ITEM[d] <= _ITEM[value.dtype] and d is not value.dtype}
    choices = [
        (f"has one less in dimension {at}", replace(value, shape=fewer)),
        ("is on the CPU", replace(value, kind="host")),
        ("is no tensor", replace(value, kind="none", value=chance.choice(_NO_TENSORS))),
        ("is another dtype", replace(value, dtype=chance.choice(sorted(narrow, key=str)))),
        (
            "has one dimension more",
            replace(value, shape=(1, *value.shape), strides=(1, *value.strides)),
        ),
    ]
    # Elsewhere there is noise. A snapshot that noise says is pending, or rows whose places are not
    # those that they were saved from, are no calls whose outcome is defined.
    if name not in ("pending", "pages", "within"):
        shifted = replace(value, offset=value.offset + max(4, _ITEM[value.dtype]))
        choices.append(("lies elsewhere", shifted))
    kind, view = chance.choice(choices)
    call.arguments[name] = view
    call.changes.append(f"{name}: {kind}")


#: Launches one op of a sequence: its row, the call, the layout, the arguments, and all rows.
LaunchStep = Callable[[int, Call, Any, Mapping[str, Any], Storage], Any]


def run_episodes(
    batch: int,
    episodes: Sequence[Episode],
    noise: torch.Tensor,
    launch: LaunchStep,
    device: torch.device,
    score: Score,
) -> None:
    """Run a batch of rollback's sequences and judge it."""
    ours = Storage(torch.empty_like(noise, device=device))
    host = Storage(noise)
    layouts = []
    for row, each in enumerate(episodes):
        for name, values in each.calls[0].values.items():
            tensor = host.tensor(each.layout_views[name], row)
            tensor[: values.numel()] = values.to(tensor.dtype)
        base = ours.rows.data_ptr() + row * ours.row_bytes
        described = [
            rollback_plan.plane(base + v.offset, *v.strides[:2], *v.shape) for v in each.planes
        ]
        layout = rollback_plan.layout(described)
        layouts.append(layout)
        host.tensor(each.layout_views["planes"], row).copy_(torch.tensor(layout.table()))
    ours.rows.copy_(noise)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    errors: dict[int, str] = {}
    for row, each in enumerate(episodes):
        for number, call in enumerate(each.calls):
            if row in errors:
                break
            wrong = _one(row, call, layouts[row], each, host, ours, launch, score)
            if wrong:
                errors[row] = wrong
            if number == 0:
                first, last = (row * ours.row_bytes + byte for byte in each.extent)
                for storage in (host, ours):
                    storage.flat[torch.uint8][first:last].bitwise_not_()
    shown = [_whole(each) for each in episodes]
    _judge(batch, shown, host, Storage(ours.rows.cpu()), {}, errors, score)


def _whole(each: Episode) -> Call:
    """An episode as one call, to be shown."""
    named = {f"plane{i}": view for i, view in enumerate(each.planes)}
    changes = [
        f"{call.op.partition('.')[2]} ({', '.join(call.changes) or 'as is'})" for call in each.calls
    ]
    return Call("rollback", {**each.layout_views, **named}, changes=changes)


def _one(
    row: int,
    call: Call,
    layout: Any,
    each: Episode,
    host: Storage,
    ours: Storage,
    launch: LaunchStep,
    score: Score,
) -> str:
    """One op of a sequence, on both sides; what went wrong, or nothing."""
    try:
        answer = launch(row, call, layout, ours.arguments(call, row), ours)
    except Exception as error:
        return f"{call.op} raised {error!r}"
    if answer is not True and not isinstance(answer, specplan.Uncertified):
        return f"{call.op} answered {answer!r}"
    score.note(call, answer)
    if answer is True:
        try:
            apply(call, host.arguments(call, row), layout, each, host, row)
        except Exception as error:
            return f"{call.op} was launched, and the reference raises {error!r}"
    return ""


def apply(
    call: Call, arguments: Mapping[str, Any], layout: Any, each: Episode, rows_of: Storage, row: int
) -> None:
    """What the reference makes of one op of a sequence, in one row of a storage."""
    op = call.op.partition(".")[2]
    rows = arguments["pages"].numel()
    if not rows:
        return
    old = arguments["old"]
    saved = [old[:rows, p.record_offset : p.record_offset + p.row_bytes] for p in layout.planes]
    planes = [rows_of.tensor(view, row) for view in each.planes]
    common = (planes, arguments["pages"], arguments["within"], saved, arguments["pending"])
    if op == "gather":
        rollback_reference.gather(*common)
    elif op == "restore":
        rollback_reference.restore(*common, arguments["rejected"])
    else:
        tokens, accepted = arguments["tokens"], arguments["accepted"]
        ordinal = torch.arange(rows, dtype=torch.int32)
        rollback_reference.commit(
            *common,
            accepted,
            arguments.get("row_requests", ordinal // tokens)[:rows],
            arguments.get("row_ordinals", ordinal % tokens)[:rows],
            (),
            arguments.get("slots"),
            arguments.get("cursors"),
        )

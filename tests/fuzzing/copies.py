"""Random calls of scatter and gather: right ones, and ones with something wrong.

Every call has a row of bytes of its own in one storage, filled with noise, in which all its tensors
lie with noise between them. The ops run over the rows of one storage, the plain references over a
copy of it, and then the whole storages are compared: one comparison covers the outputs, the inputs,
the gaps between rows of a strided tensor, the guards, and the rows of the other calls. A declined
call must leave its row as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from random import Random
from typing import Any

import specplan
import torch

from fuzzing.calls import (
    GUARD,
    ITEM,
    NO_TENSORS,
    Call,
    DoesNotFit,
    Score,
    Storage,
    View,
    any_way,
    dense,
    judge,
    no_number,
)


def any_call(chance: Random, problems: Mapping[str, Sequence[Mapping[str, int]]]) -> Call:
    """A call of scatter or gather of one of the problems, in half of the cases spoilt."""
    family = chance.choice(sorted(set(problems) & {"scatter", "gather"}))
    geometry = chance.choice(list(problems[family]))
    call = (_scatter if family == "scatter" else _gather)(chance, geometry)
    call.way = any_way(chance)
    if chance.random() < 0.5:
        for _ in range(chance.choice((1, 1, 1, 2))):
            _spoil(chance, call)
    return call


def _size(chance: Random) -> int:
    return chance.choice((1, 2, 3, 5, 8, 13, chance.randint(1, 24)))


def random_slots(chance: Random, count: int, size: int) -> torch.Tensor:
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
    call.values["slots"] = random_slots(chance, rows, size)
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
                *(value + (1 << 32), value + (1 << 64), float(value), 2.5, None, "1", True, False),
                *(torch.tensor(min(max(value, -(1 << 63)), (1 << 63) - 1)), [value]),
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
    dtype = chance.choice([d for d in ITEM if d is not view.dtype])
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
    value = chance.choice(NO_TENSORS)
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
            item = ITEM[view.dtype]
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
    item = max(4, ITEM[view.dtype])
    at = -(-at // 16) * 16 + chance.choice((0, 0, item, 2 * item)) + view.shift
    return replace(view, offset=-(-at // ITEM[view.dtype]) * ITEM[view.dtype])


#: Launches a call: ``launch(call, arguments)`` is the op's answer.
Launch = Callable[[Call, Mapping[str, Any]], Any]
REFERENCES: Mapping[str, Callable[..., None]] = {
    "scatter": specplan.reference.scatter,
    "gather": specplan.reference.gather,
}


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
        if answer is True and no_number(call.arguments):
            errors[row] = f"was launched, and {no_number(call.arguments)}"
            continue
        if answer is True and call.defined:
            try:
                REFERENCES[call.op](**host.arguments(call, row))
            except Exception as error:
                errors[row] = f"was launched, and the reference raises {error!r}"
    judge(batch, calls, host, Storage(ours.rows.cpu()), before, errors, score)

"""Random sequences of rollback's ops, because a restore needs what a gather saved.

They lie and are judged as the calls of scatter and gather are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import specplan
import torch
from specplan.kernels.rollback import reference as rollback_reference
from specplan.plans import rollback as rollback_plan

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
from fuzzing.copies import random_slots


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
        "slots": random_slots(chance, requests, requests + 3),
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
        call = Call(f"rollback.{op}", arguments, values, way=any_way(chance))
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
        numbers = (0, -1, value + 1, value + (1 << 32), 1 << 31)
        others = (2.5, float(value), None, "4", True, torch.tensor(value))
        changed = chance.choice((*numbers, *others))
        call.arguments[name] = changed
        call.changes.append(f"{name} {value!r} -> {changed!r}")
        return
    at = chance.randrange(len(value.shape))
    fewer = (*value.shape[:at], value.shape[at] - 1, *value.shape[at + 1 :])
    narrow = {d for d in ITEM if ITEM[d] <= ITEM[value.dtype] and d is not value.dtype}
    choices = [
        (f"has one less in dimension {at}", replace(value, shape=fewer)),
        ("is on the CPU", replace(value, kind="host")),
        ("is no tensor", replace(value, kind="none", value=chance.choice(NO_TENSORS))),
        ("is another dtype", replace(value, dtype=chance.choice(sorted(narrow, key=str)))),
        (
            "has one dimension more",
            replace(value, shape=(1, *value.shape), strides=(1, *value.strides)),
        ),
    ]
    # Elsewhere there is noise. A snapshot that noise says is pending, or rows whose places are not
    # those that they were saved from, are no calls whose outcome is defined.
    if name not in ("pending", "pages", "within"):
        shifted = replace(value, offset=value.offset + max(4, ITEM[value.dtype]))
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
    judge(batch, shown, host, Storage(ours.rows.cpu()), {}, errors, score)


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
    if answer is True and no_number(call.arguments):
        return f"{call.op} was launched, and {no_number(call.arguments)}"
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

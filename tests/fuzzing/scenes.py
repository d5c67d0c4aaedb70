"""What the fuzzers of floating-point results share: scenes, spoilt calls, and the judgement.

A *scene* is one storage in which all buffers of some calls lie, guards between them. A call's
tensors are views of it. The storage is kept as it was; the op runs over one copy and, if it
launched, the reference over another. Of what the op may write, every element is compared within its
bound and then taken over, so that one comparison of the whole storages, bit for bit, covers the
inputs, the guards, and what of the outputs must not change. A declined call leaves every byte as it
was. All errors of a batch stay on the device and are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any, NamedTuple, Protocol

import specplan
import torch

from fuzzing.calls import ITEM, NO_TENSORS, Call, Failure, Score, Storage, View, no_number

#: What a spoilt tensor's dtype may be.
DTYPES = (*ITEM, torch.float16, torch.float64, torch.float8_e4m3fn)
#: Bytes by which a spoilt tensor is moved, if its elements are no larger.
SHIFTS = (1, 2, 4, 8, 16, 32)


@dataclass
class Scene:
    """Buffers that some calls share."""

    label: str
    #: uint8 [bytes], a multiple of 8.
    base: torch.Tensor
    #: The tensors of a right call of the largest size.
    views: dict[str, View]
    facts: dict[str, Any] = field(default_factory=dict)


#: A buffer, how far it is from the reference, and how far it may be.
Measure = tuple[str, torch.Tensor, float]


class Family(Protocol):
    """What the judgement asks a family."""

    def idle(self, call: Call) -> bool:
        """Whether the call has no rows: then it is answered True, and nothing happens."""
        ...

    def forbidden(self, scene: Scene, call: Call) -> str:
        """Why the call may not be launched, whatever comes out; else nothing."""
        ...

    def expect(self, scene: Scene, call: Call, tensors: Mapping[str, Any]) -> Any:
        """Run the reference in place; what ``settle`` must know of before."""
        ...

    def settle(
        self, call: Call, found: Mapping[str, Any], expected: Mapping[str, Any], known: Any
    ) -> list[Measure]:
        """Compare what may be written, and take it over where it is within its bound."""
        ...


def view_of(tensor: torch.Tensor, offset: int = 0) -> View:
    """A tensor as a view of its storage, which begins ``offset`` bytes into a larger one."""
    at = offset + tensor.storage_offset() * tensor.element_size()
    return View(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, offset=at)


def part(view: View, axis: int, start: int, count: int, step: int = 1) -> View:
    """``count`` indices of an axis, every ``step``-th from ``start``."""
    shape, strides = list(view.shape), list(view.strides)
    offset = view.offset + start * strides[axis] * view.dtype.itemsize
    shape[axis] = count
    strides[axis] *= step
    return replace(view, shape=tuple(shape), strides=tuple(strides), offset=offset)


def span(view: View) -> tuple[int, int]:
    """First byte and the one after the last; the same if there is none."""
    start = view.offset // view.dtype.itemsize * view.dtype.itemsize
    return start, start + view.extent


def meet(a: View, b: View) -> bool:
    (first, end), (start, last) = span(a), span(b)
    return first < last and start < end and first < end and start < last


def within(view: View, region: View) -> bool:
    (first, end), (start, last) = span(view), span(region)
    return start <= first and end <= last


def folded(view: View) -> bool:
    """Whether two indices of a view mean one element; one that may be is taken for it."""
    reach = 1
    for stride, size in sorted(zip(view.strides, view.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * size
    return False


def rows_of(call: Call) -> dict[str, View]:
    """The arguments that lie in the storage."""
    return {
        name: value
        for name, value in call.arguments.items()
        if isinstance(value, View) and value.kind == "row"
    }


# What is done to a call


@dataclass(frozen=True)
class Rules:
    """What of a family's arguments may be changed, and how.

    ``control`` are tensors whose values say where an op reads and writes, and which nobody checks:
    they may become others that must be declined, or fewer, and never hold other values.
    """

    control: frozenset[str] = frozenset()
    #: What integers and floats may become, by name, from the call and what they are.
    scalars: Mapping[str, Callable[[Random, Call, Any], Sequence[Any]]] = field(
        default_factory=dict
    )
    #: Names of which two may not be changed in one call.
    once: frozenset[str] = frozenset()


Spoilt = tuple[str, View] | None
Change = Callable[[Random, str, View, Call], Spoilt]


def _other_dtype(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    dtype = chance.choice([d for d in DTYPES if d is not view.dtype])
    return f"is {dtype}", replace(view, dtype=dtype)


def _other_rank(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    shape, strides = view.shape, view.strides
    if shape and chance.random() < 0.3:
        return "has one dimension less", replace(view, shape=shape[1:], strides=strides[1:])
    at = chance.randint(0, len(shape))
    longer = (*shape[:at], 1, *shape[at:]), (*strides[:at], 1, *strides[at:])
    return "has one dimension more", replace(view, shape=longer[0], strides=longer[1])


def _fewer(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    if not view.shape or not prod(view.shape):
        return None
    at = chance.randrange(len(view.shape))
    size = view.shape[at]
    count = chance.choice((size - 1, size - 1, 0, 1, size // 2))
    start = chance.choice((0, size - count))
    step = 2 if count == size // 2 and count and chance.random() < 0.5 else 1
    found = part(view, at, 0 if step == 2 else start, count, step)
    return f"has {count} of {size} in dimension {at}", found


def _more(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    if not view.shape:
        return None
    at = chance.randrange(len(view.shape))
    count = view.shape[at] + chance.choice((1, 1, view.shape[at]))
    return f"has {count} in dimension {at}", part(view, at, 0, count)


def _other_strides(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    if not view.shape:
        return None
    shape, at = view.shape, chance.randrange(len(view.shape))
    kind = chance.choice(("expanded", "transposed", "gaps"))
    if kind == "expanded":
        strides = (*view.strides[:at], 0, *view.strides[at + 1 :])
        return f"is expanded in dimension {at}", replace(view, strides=strides)
    if kind == "transposed" and len(shape) > 1:
        other = (at + 1) % len(shape)
        order = sorted(range(len(shape)), key=lambda i: {at: other, other: at}.get(i, i))
        strides_of, dense = {}, 1
        for i in reversed(order):
            strides_of[i], dense = dense, dense * max(1, shape[i])
        strides = tuple(strides_of[i] for i in range(len(shape)))
        return f"has dimensions {at} and {other} the other way round", replace(
            view, strides=strides
        )
    by = chance.choice((1, 2, 8, 16))
    strides = (*view.strides[:at], view.strides[at] + by, *view.strides[at + 1 :])
    return f"is {by} further apart in dimension {at}", replace(view, strides=strides)


def _moved(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    by = chance.choice([s for s in SHIFTS if s >= view.dtype.itemsize])
    return f"is {by} bytes off", replace(view, offset=view.offset + by)


def _host(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    return "is on the CPU", replace(view, kind="host")


def _no_tensor(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    value = chance.choice(NO_TENSORS)
    return f"is {value!r}", replace(view, kind="none", value=value)


def _is_another(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    others = rows_of(call)
    others.pop(name, None)
    if not others:
        return None
    alike = [n for n, v in others.items() if v.shape == view.shape and v.dtype is view.dtype]
    other = chance.choice(alike if alike and chance.random() < 0.7 else sorted(others))
    return f"is {other}", others[other]


def _lies_where(chance: Random, name: str, view: View, call: Call) -> Spoilt:
    """Where another lies, or where it ends, less some bytes."""
    others = rows_of(call)
    others.pop(name, None)
    if not others:
        return None
    other = chance.choice(sorted(others))
    first, end = span(others[other])
    if chance.random() < 0.5:
        return f"lies where {other} lies", replace(view, offset=first)
    back = chance.choice((0, 2, 16, 512))
    at = (end - back) // 2 * 2
    return f"lies {back} bytes before the end of {other}", replace(view, offset=max(0, at))


_CHANGES: tuple[Change, ...] = (
    *(_other_dtype, _other_rank, _fewer, _fewer, _more, _other_strides, _other_strides),
    *(_moved, _host, _no_tensor, _is_another, _is_another, _lies_where),
)
_CONTROL_CHANGES: tuple[Change, ...] = (_other_dtype, _other_rank, _fewer, _host, _no_tensor)


def spoil(chance: Random, call: Call, rules: Rules, times: int) -> None:
    """Change some things of a call; it may still be a right one."""
    changed: set[str] = set()
    while times:
        views = rows_of(call)
        scalars = [n for n in rules.scalars if n in call.arguments and n not in changed]
        if scalars and (not views or chance.random() < 0.25):
            name = chance.choice(scalars)
            value = call.arguments[name]
            other = chance.choice(rules.scalars[name](chance, call, value))
            call.arguments[name] = other
            call.changes.append(f"{name} {value!r} -> {other!r}")
            changed.add(name)
            times -= 1
            continue
        name = chance.choice(sorted(views))
        control = name in rules.control
        if (name in rules.once and changed & rules.once) or (control and name in changed):
            continue
        found = chance.choice(_CONTROL_CHANGES if control else _CHANGES)(
            chance, name, views[name], call
        )
        if found is None:
            continue
        what, call.arguments[name] = found
        call.changes.append(f"{name}: {what}")
        changed.add(name)
        times -= 1


# Running and judging

#: Launches a call: its answer, or a text for what the op's own objects refuse.
Launch = Callable[[Call, Mapping[str, Any]], Any]


class Verdicts:
    """What came of the calls of a batch, on the device until ``settle``."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        #: Scene, call, what is wrong (or nothing), the measures' names and bounds, and the errors.
        self.entries: list[
            tuple[int, Call, str, Scene, list[tuple[str, float]], torch.Tensor | None]
        ] = []

    def wrong(self, row: int, scene: Scene, call: Call, what: str) -> None:
        self.entries.append((row, call, what, scene, [], None))

    def add(
        self,
        row: int,
        scene: Scene,
        call: Call,
        measures: Iterable[Measure],
        found: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        measures = list(measures)
        differs = found.view(torch.int64) != expected.view(torch.int64)
        numbers = [differs.sum(), differs.to(torch.uint8).argmax() * 8]
        errors = torch.stack([e.double() for e in (*numbers, *(m[1] for m in measures))])
        bounds = [(name, bound) for name, _, bound in measures]
        self.entries.append((row, call, "", scene, bounds, errors))

    def settle(self, score: Score) -> None:
        """Read all errors at once. After a failure, what else happened in its scene is not told."""
        held = [errors for *_, errors in self.entries if errors is not None]
        try:
            numbers = iter(torch.cat(held).tolist() if held else [])
        except RuntimeError as error:
            score.failures.append(Failure(self.batch, -1, "", f"the device failed: {error}"))
            numbers = iter(())
            held = []
        failed: set[int] = set()
        for row, call, what, scene, bounds, errors in self.entries:
            if errors is not None and held:
                count, first = int(next(numbers)), int(next(numbers))
                found = [(name, next(numbers), bound) for name, bound in bounds]
                beyond = [f"{n}: {e:.4g}, at most {b:g}" for n, e, b in found if not e <= b]
                if count:
                    where = _owner(scene, call, first)
                    beyond.append(
                        f"{count} words beside what it may write differ, the first at byte "
                        f"{first}, in {where}"
                    )
                what = "; ".join(beyond)
            if what and row not in failed:
                failed.add(row)
                shown = f"{scene.label}: {call}"
                score.failures.append(Failure(self.batch, row, shown, what))
        self.entries = []


def _owner(scene: Scene, call: Call, byte: int) -> str:
    """What lies at a byte, or in the eight from it: an argument, another buffer, or a guard."""
    for views in (rows_of(call), scene.views):
        for name, view in views.items():
            start, end = span(view)
            if start < byte + 8 and byte < end:
                return name
    return "a guard"


def run_scene(
    row: int,
    scene: Scene,
    calls: Iterable[Call],
    family: Family,
    launch: Launch,
    verdicts: Verdicts,
    score: Score,
    wrap: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> None:
    """Make calls over a scene, one after another, each over the storage as it was."""
    ours, base = Storage(scene.base.clone().view(1, -1)), scene.base
    raw = ours.rows.view(-1)
    for call in calls:
        given = ours.arguments(call, 0)
        for name in rows_of(call):
            given[name] = wrap(given[name])
        try:
            answer = launch(call, given)
        except Exception as error:
            verdicts.wrong(row, scene, call, f"raised {error!r}")
            raw.copy_(base)
            continue
        if isinstance(answer, specplan.InParts):
            answer = True
        if answer is not True and not isinstance(answer, (specplan.Uncertified, str)):
            verdicts.wrong(row, scene, call, f"answered {answer!r}")
            raw.copy_(base)
            continue
        score.note(call, answer)
        if answer is True and no_number(call.arguments):
            verdicts.wrong(row, scene, call, f"was launched, and {no_number(call.arguments)}")
            raw.copy_(base)
            continue
        if answer is not True or family.idle(call):
            verdicts.add(row, scene, call, (), raw, base)
            continue
        forbidden = family.forbidden(scene, call)
        if forbidden:
            verdicts.wrong(row, scene, call, forbidden)
        else:
            _judge(row, scene, call, family, ours, verdicts)
        raw.copy_(base)


class Run(NamedTuple):
    """What came of some scenes, and those of them that had a call."""

    score: Score
    rows: set[int]

    @property
    def failures(self) -> list[Failure]:
        return self.score.failures

    def all_fail(self) -> bool:
        """Whether something was found wrong in every one of several scenes."""
        return len(self.rows) > 3 and {failure.row for failure in self.failures} == self.rows


def run_scenes(
    family: Family,
    scene_of: Callable[[Random], Scene],
    call_of: Callable[[Random, Scene], Call],
    launch_of: Callable[[Scene], Launch],
    seed: str,
    count: int,
    keep: Callable[[Call], bool] = lambda call: True,
    wrap: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> Run:
    """Some scenes with ten calls each, less those that are not to be kept."""
    rows: set[int] = set()
    score, verdicts = Score(), Verdicts(0)
    for row in range(count):
        chance = Random(f"{seed}:{row}")
        scene = scene_of(chance)
        calls = [call for call in (call_of(chance, scene) for _ in range(10)) if keep(call)]
        rows |= {row} if calls else set()
        run_scene(row, scene, calls, family, launch_of(scene), verdicts, score, wrap)
    verdicts.settle(score)
    return Run(score, rows)


def _judge(
    row: int, scene: Scene, call: Call, family: Family, ours: Storage, verdicts: Verdicts
) -> None:
    """Compare what a launch left with what the reference makes of the same."""
    wanted = Storage(scene.base.clone().view(1, -1))
    measures: list[Measure] = []
    if call.defined:
        expected = wanted.arguments(call, 0)
        try:
            known = family.expect(scene, call, expected)
        except Exception as error:
            verdicts.wrong(row, scene, call, f"was launched, and the reference raises {error!r}")
            return
        measures = family.settle(call, ours.arguments(call, 0), expected, known)
    else:
        views = rows_of(call)
        for name in call.written:
            for storage in (ours, wanted):
                if name in views:
                    storage.tensor(views[name], 0).zero_()
    verdicts.add(row, scene, call, measures, ours.rows.view(-1), wanted.rows.view(-1))


def taken_over(
    found: torch.Tensor,
    expected: torch.Tensor,
    written: torch.Tensor | None,
    atol: float,
    rtol: float,
) -> torch.Tensor:
    """The largest |found - expected| / (atol + rtol |expected|) where ``written``; there, expected
    becomes found. Two NaNs are equal.
    """
    a, b = found.float(), expected.float()
    error = (a - b).abs_().div_(b.abs().mul_(rtol).add_(atol))
    error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, error)
    if written is None:
        expected.copy_(found)
    else:
        error = torch.where(written, error, 0.0)
        expected.copy_(torch.where(written, found, expected))
    return error.max() if error.numel() else error.sum()

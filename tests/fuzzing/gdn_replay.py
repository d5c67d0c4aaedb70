"""Random calls of ``gdn_replay``: verify, advance, materialize and reset.

A scene is one step of ``cases.allocate`` and ``fill``: its storage holds the pools, the cursors,
packed q, k, v and gates, and guards. A call takes some of its rows and tokens.

What the caller promises and nobody can see (distinct live slots below the pool's, history lengths
of 0 to 16, banks of 0 and 1, prefixes no longer than their history) is kept in every call that may
be launched: the tensors that say so never hold anything else. What is read, or written, is free: a
call whose inputs are not what ``fill`` made, or whose outputs share memory with something, is held
to what it may write, and to nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from random import Random
from typing import Any

import torch
from specplan.kernels.gdn_replay import cases, reference
from specplan.plans.gdn_replay import HEAD, MATERIALIZE, VERIFY, CommitterError, Cursors, Pool

from fuzzing.calls import Call, Storage, View, any_way, through
from fuzzing.scenes import (
    Measure,
    Rules,
    Scene,
    folded,
    meet,
    part,
    rows_of,
    span,
    spoil,
    taken_over,
    view_of,
    within,
)

OPS = ("verify", "advance", "materialize", "reset")
CURSORS = ("hist_len", "bank")
POOLS = cases.POOLS
#: Bytes of a scene, in nine of ten cases; one row always fits.
MOST_BYTES = 24 << 20
DEFAULT_SCALE = HEAD**-0.5
#: Where q, k, v and the gates may lie and still be what ``fill`` made for them.
_HOMES = {
    **dict.fromkeys(("q", "k", "v"), ("qkv",)),
    **dict.fromkeys(("a", "b"), ("ba",)),
    **dict.fromkeys(("A_log", "dt_bias"), ("A_log", "dt_bias")),
}
_WRITTEN = {
    "verify": ("out", "state", "rec_u", "rec_k", "rec_G"),
    "materialize": ("state",),
    "advance": CURSORS,
    "reset": CURSORS,
}
#: Tensors whose values steer what is read and written.
_CONTROL = frozenset((*CURSORS, "slot", "n_acc", "src", "dst", "count"))
#: Backing memory that holds such values.
_STEERING = ("slots", "rows", "hist_len", "bank")


def scene(
    chance: Random, problems: Sequence[Mapping[str, int]], device: torch.device, most: int = 24
) -> Scene:
    """Buffers of up to ``most`` requests and 8 tokens, of one of the problems."""
    geometry = chance.choice(list(problems))
    dtype = chance.choice(("bf16", "fp32"))
    tokens = chance.randint(1, 8)
    requests = min(most, chance.choice((1, 2, 3, 5, 8, 13, chance.randint(1, 24))))
    keys, values = geometry["key_heads"], geometry["value_heads"]
    a_slot = values * HEAD * HEAD * cases.STATE_DTYPES[dtype].itemsize
    a_slot += (values + keys) * 2 * cases.WINDOW * HEAD * 2
    if chance.random() < 0.9:
        requests = max(1, min(requests, MOST_BYTES // a_slot))
    spare = chance.randint(1, 3)
    step = cases.allocate(geometry, requests, tokens, dtype, device, spare)
    seed = chance.getrandbits(40)
    generator = torch.Generator(device=device).manual_seed(seed)
    full = chance.random() < 0.3
    lengths = cases.full_lengths(requests + spare, tokens, device) if full else None
    padding = chance.random() < 0.7
    cases.fill(step, generator, seed, tokens, lengths=lengths, padding=padding)
    views = {name: view_of(t) for name, t in {**step.tensors, **step.integers}.items()}
    homes = {name: view_of(t) for name, t in step.backing.items()}
    facts = {"geometry": geometry, "dtype": dtype, "requests": requests, "tokens": tokens}
    label = f"{keys}/{values} heads, {dtype}, {requests} x {tokens}"
    return Scene(label, step.buffer, views, {**facts, "homes": homes})


def any_call(chance: Random, scene: Scene) -> Call:
    """A call over the scene, in half of the cases spoilt; made anew until it may be launched."""
    while True:
        op = chance.choices(OPS, (5, 2, 2, 2))[0]
        call = _call(chance, scene, op)
        if chance.random() < 0.5:
            spoil(chance, call, RULES, chance.choice((1, 1, 1, 2)))
        if call.op in ("gdn_replay.verify", "gdn_replay.materialize"):
            geometry = {**scene.facts["geometry"], "dtype": scene.facts["dtype"]}
            same = all(call.arguments[name] == value for name, value in geometry.items())
            # Half of the spoilt pools come to the op past their own constructor.
            call.arguments["checked"] = not same or chance.random() < 0.5
        if _may_be_launched(scene, call):
            call.defined = call.defined and _defined(scene, call)
            return call


def _call(chance: Random, scene: Scene, op: str) -> Call:
    """A right call of an op: some rows, and of verify some tokens."""
    held, tokens = scene.facts["requests"], scene.facts["tokens"]
    rows = chance.choice((held, held, chance.randint(1, held), 0 if chance.random() < 0.1 else 1))
    splits = chance.choice((1, 2, 4)) if chance.random() < 0.15 else None
    if splits is not None and rows:
        # The sizes that the catalog has with other splits than the rule's.
        rows = chance.choice([size for size in (1, 8, 16) if size <= held])
    begin = chance.randint(0, held - rows)
    step = 2 if rows and begin + 2 * rows - 1 <= held and chance.random() < 0.2 else 1

    def some(name: str) -> View:
        return part(scene.views[name], 0, begin, rows, step)

    cursors = {
        **{name: scene.views[name] for name in CURSORS},
        **scene.facts["geometry"],
        "dtype": scene.facts["dtype"],
    }
    pools = {name: scene.views[name] for name in POOLS}
    committer = chance.choice(("", "", "", VERIFY, VERIFY, "the cache manager"))
    arguments: dict[str, Any]
    if op == "verify":
        width = chance.choice((tokens, tokens, chance.randint(1, tokens)))
        if splits is not None:
            width = chance.choice([size for size in (1, 4, 8) if size <= tokens])
        first = chance.randint(0, tokens - width)
        arguments = {**cursors, **pools, "committer": committer}
        for name in ("q", "k", "v", "a", "b", "out"):
            arguments[name] = part(some(name), 1, first, width)
        if chance.random() < 0.2:
            arguments["q"], arguments["k"] = arguments["k"], arguments["q"]
        if chance.random() < 0.2:
            arguments["a"], arguments["b"] = arguments["b"], arguments["a"]
        if chance.random() < 0.2 and rows:
            # A row of tokens of every request, from one token on.
            heads = scene.facts["geometry"]["value_heads"] * HEAD
            strides = (heads, rows * heads, HEAD, 1)
            out = arguments["out"]
            arguments["out"] = replace(out, strides=strides, offset=scene.views["out"].offset)
        for name in ("A_log", "dt_bias"):
            arguments[name] = scene.views[name]
        arguments |= {"slot": some("slot"), "scale": None, "splits": splits}
        if chance.random() < 0.4:
            arguments["scale"] = chance.choice((0.1, 1.0, -0.05, 0.0, 2.5, DEFAULT_SCALE))
    elif op == "materialize":
        arguments = {**cursors, **pools, "committer": committer}
        arguments |= {name: some(name) for name in ("src", "dst", "count")}
        if chance.random() < 0.3:
            arguments["dst"] = arguments["src"]
            if committer == VERIFY and chance.random() < 0.7:
                arguments["committer"] = chance.choice(("", MATERIALIZE))
    else:
        arguments = {**cursors, "slot": some("slot")}
        if op == "advance":
            arguments |= {"n_acc": some("n_acc"), "tokens": chance.randint(tokens, 8)}
    return Call(f"gdn_replay.{op}", arguments, written=_WRITTEN[op], way=any_way(chance))


def _scales(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    nan, inf = float("nan"), float("inf")
    return (nan, inf, -inf, 1e30, 1, True, "1", [0.1], 1 << 70, torch.ones(1), 1j)


def _splits(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    return (3, 0, -1, 8, 1, 2, 4, 2.0, 2.5, "2", True, 1 << 40, (2,), [2], torch.tensor(2))


def _tokens(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    wrapped = (value + (1 << 32), value + (1 << 64), -value, 1 << 31)
    return (0, -1, 9, 16, float(value), value + 0.5, None, str(value), True, value - 1, *wrapped)


def _cursors_of(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    return (0, -1, value + 1, value * 2, 1 << 40)


def _dtypes(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    return ("fp16", "bf16", "fp32", "", None)


RULES = Rules(
    control=_CONTROL,
    once=frozenset(CURSORS),
    scalars={
        "scale": _scales,
        "splits": _splits,
        "tokens": _tokens,
        "key_heads": _cursors_of,
        "value_heads": _cursors_of,
        "dtype": _dtypes,
    },
)


def _may_be_launched(scene: Scene, call: Call) -> bool:
    """Whether all tensors lie in the storage, and none that is written on values that steer."""
    views, homes = rows_of(call), scene.facts["homes"]
    size = scene.base.numel()
    if any(min(v.strides, default=0) < 0 or span(v)[1] > size for v in views.values()):
        return False
    floats = [n for n in call.written if n in views and n not in CURSORS]
    return not any(meet(views[n], homes[steering]) for n in floats for steering in _STEERING)


def _defined(scene: Scene, call: Call) -> bool:
    """Whether the outcome follows from the contract."""
    views, homes = rows_of(call), scene.facts["homes"]
    for name, view in views.items():
        if name in _HOMES and not any(within(view, homes[home]) for home in _HOMES[name]):
            return False
        if name in POOLS and view != scene.views[name]:
            return False
    if "out" in views and (
        folded(views["out"])
        or any(meet(views["out"], view) for name, view in views.items() if name != "out")
    ):
        return False
    if call.changes and call.op == "gdn_replay.verify" and not _inputs_are_finite(scene, views):
        return False
    scale = call.arguments.get("scale")
    if isinstance(scale, (int, float)) and not (abs(scale) <= 10 and isfinite(scale)):
        return False
    tokens = call.arguments.get("tokens", 8)
    return not (isinstance(tokens, (int, float)) and tokens < scene.facts["tokens"])


def _inputs_are_finite(scene: Scene, views: Mapping[str, View]) -> bool:
    """Whether no row that has a slot reads the NaN of one that has none, as a view that was moved
    may. What such a token does to those before it, the matrix form says wrongly: it multiplies by
    zero what it must not see.
    """
    storage = Storage(scene.base.view(1, -1))
    live = storage.tensor(views["slot"], 0) >= 0 if "slot" in views else None
    for name in ("q", "k", "v", "a", "b"):
        if name not in views or live is None or views[name].shape[:1] != live.shape:
            continue
        tensor = storage.tensor(views[name], 0)
        if tensor.is_floating_point() and not bool(tensor[live].float().isfinite().all()):
            return False
    return True


def launch(ops: Any, call: Call, arguments: Mapping[str, Any]) -> Any:
    """The answer of ``pack.gdn_replay`` to a call, or what of its own objects refuses it."""
    given = dict(arguments)
    committer, checked = given.pop("committer", ""), given.pop("checked", True)
    geometry = {name: given.pop(name) for name in ("key_heads", "value_heads", "dtype")}
    hist_len, bank = (given.pop(name) for name in CURSORS)
    op = call.op.partition(".")[2]
    pools = [given.pop(name) for name in POOLS if name in given]
    try:
        first: Any = Cursors(hist_len, bank, **geometry)
        if committer:
            first.claim(committer)
        if pools:
            first = Pool(first, *pools) if checked else unchecked(first, pools)
    except ValueError:
        return "the pool or its cursors"
    except (AttributeError, TypeError, IndexError):
        # Not tensors at all; the op must decline whatever else somebody gives it.
        first = (None, 3, "pool", [])[len(str(call)) % 4]
    try:
        return through(getattr(ops, op), call.way, first, **given)
    except CommitterError:
        if not rival(call):
            raise
        return "another committer"


def unchecked(cursors: Cursors, tensors: Sequence[Any]) -> Pool:
    """A pool of these tensors, whatever its constructor would say."""
    pool = object.__new__(Pool)
    pool.cursors, pool.tensors = cursors, (*tensors, *cursors.tensors)
    return pool


def rival(call: Call) -> bool:
    """Whether the call would commit what somebody else commits."""
    committer = call.arguments.get("committer", "")
    if call.op == "gdn_replay.verify":
        return committer not in ("", VERIFY)
    src, dst = (call.arguments.get(name) for name in ("src", "dst"))
    return (
        isinstance(src, View)
        and isinstance(dst, View)
        and (src.offset == dst.offset or src.kind != "row" or dst.kind != "row")
        and committer not in ("", MATERIALIZE)
    )


class _Family:
    """See ``fuzzing.scenes.Family``."""

    def idle(self, call: Call) -> bool:
        rows = {"verify": "q", "materialize": "src"}.get(call.op.partition(".")[2], "slot")
        view = call.arguments[rows]
        return isinstance(view, View) and 0 in (view.shape[:1] if rows == "q" else view.shape)

    def forbidden(self, scene: Scene, call: Call) -> str:
        committer = call.arguments.get("committer", "")
        launches = call.op == "gdn_replay.verify" or (
            call.op == "gdn_replay.materialize" and call.arguments["src"] == call.arguments["dst"]
        )
        if launches and rival(call):
            return f"commits although {committer} does"
        return ""

    def expect(self, scene: Scene, call: Call, tensors: Mapping[str, Any]) -> Any:
        op = call.op.partition(".")[2]
        names = cases.reference_arguments(op)
        given = {name: tensors[name] for name in names}
        step = cases.Step(given, given, {}, scene.base, ())
        if op == "verify":
            written = cases.written_by(op, step, tensors["q"].shape[1])
            written["out"] = (tensors["slot"] >= 0)[:, None, None, None]
            scale = call.arguments["scale"]
            reference.verify_exact(**given, scale=DEFAULT_SCALE if scale is None else scale)
            return written
        written = cases.written_by(op, step, 0)
        more = (int(call.arguments["tokens"]),) if op == "advance" else ()
        getattr(reference, op)(*given.values(), *more)
        return written

    def settle(
        self, call: Call, found: Mapping[str, Any], expected: Mapping[str, Any], known: Any
    ) -> list[Measure]:
        measures = []
        for name, written in known.items():
            atol, rtol, _ = cases.bound_of(name, call.arguments["dtype"])
            if name == "out":
                # What is read is linear in the queries, and they in their scale.
                scale = call.arguments["scale"]
                scale = DEFAULT_SCALE if scale is None else scale
                atol = max(atol * abs(scale) / DEFAULT_SCALE, 1e-30)
            error = taken_over(found[name], expected[name], written, atol, rtol)
            measures.append((name, error, 1.0))
        return measures


FAMILY = _Family()

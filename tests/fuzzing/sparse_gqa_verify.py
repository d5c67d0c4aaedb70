"""Random calls of ``sparse_gqa_verify``.

A scene holds the inputs of ``cases.make_inputs`` in one storage whose every other byte belongs to
NaNs: guards, the output, and the workspace. A call takes some of its rows, and whatever number of
rows a request that divides them. Lists, pages, owners, counts and positions may be any integers.

The reference is the strict one, row by row, which also says what becomes of a NaN that a row lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from random import Random
from typing import Any

import specplan
import torch
from specplan.kernels.sparse_gqa_verify import cases, reference
from specplan.plans.sparse_gqa_verify import MAX_SPLITS, VScaleOrder

from fuzzing.calls import Call, View, any_way
from fuzzing.scenes import (
    Measure,
    Rules,
    Scene,
    meet,
    part,
    rows_of,
    span,
    spoil,
    view_of,
    within,
)

OP = "sparse_gqa_verify"
DTYPES = ("bf16", "fp8_e4m3", "nvfp4")
#: Bytes between the buffers of a scene.
GUARD_BYTES = 256
#: Most words of a scene's workspace; a call that needs more gets too few.
MOST_WORDS = 4 << 20
#: Rows of every argument that has as many as q.
_BY_ROW = ("q", "selected_tokens", "request_indices", "out")
#: Integers of rows, any of which may stand for another.
_INTEGERS = ("block_table", "selected_tokens", "request_indices", "valid_count", "query_positions")
#: Tensors of which one may be another and still hold numbers of the size that is expected.
_ALIKE = (
    ("q", "output_gate"),
    ("k_cache", "v_cache"),
    ("k_block_scales", "v_block_scales"),
    ("k_scale", "v_scale"),
)


def words_of(op: Any) -> Callable[..., int]:
    """What ``scene`` asks: ``op.workspace``, and 0 where that declines."""

    def words(requests: int, tokens: int, splits: int | None, **problem: Any) -> int:
        sizes = {"requests": requests, "tokens": tokens, "splits": splits}
        try:
            found: int = op.workspace(**sizes, **problem)
        except specplan.UncertifiedCell:
            return 0
        return found

    return words


def scene(
    chance: Random,
    problems: Sequence[Mapping[str, int]],
    device: torch.device,
    words: Callable[..., int],
    most: int = 11,
) -> Scene:
    """Buffers of up to ``most`` requests of 8 rows. ``words`` says what workspace a size needs; see
    ``words_of``.
    """
    geometry = dict(chance.choice(list(problems)))
    dtype = chance.choice(DTYPES)
    tokens = chance.randint(1, 8)
    requests = min(most, chance.choice((1, 2, 2, 3, 4, chance.randint(1, 8), 11)))
    width = geometry["selected"]
    longest = chance.choices((64, 600, width + 300), (6, 6, 1))[0]
    context = max(tokens, chance.randint(1, longest))
    counted = chance.random() < 0.3
    kind = chance.choice(("as served", "hard", "wild"))
    # Of wild lists hardly a row has no NaN where what nobody selected is poisoned.
    poison = chance.random() < (0.15 if kind == "wild" else 0.7)
    order = chance.choice(list(VScaleOrder)) if dtype == "nvfp4" else VScaleOrder.LINEAR
    inputs = cases.make_inputs(
        *(geometry, requests, tokens, dtype, device),
        seed=chance.getrandbits(40),
        context=context,
        overlap=chance.choice((0.0, 0.5, 0.9, 1.0)),
        order=order,
        nhd=chance.random() < 0.5,
        poison=poison,
        counted=counted,
    )
    if kind == "hard" and not counted and width > 9:
        inputs = cases.hardened(inputs)
    if kind == "wild":
        inputs = _wild(chance, inputs, context)
    if inputs.valid_count is None:
        inputs = replace(inputs, valid_count=_integers(chance, inputs.q.shape[:1], -3, width + 3))
    needed = {
        words(r, t, s, dtype=dtype, **geometry)
        for r in (1, requests)
        for t in (1, tokens)
        for s in (None, 2, 4, 8, 16)
    }
    base, views = _laid_out(inputs, min(max(needed), MOST_WORDS))
    label = (
        f"{geometry['q_heads']}/{geometry['kv_heads']} heads, pages of {geometry['page_size']}, "
        f"{dtype}, {requests} x {tokens}, context {context}, {kind}"
    )
    facts = {
        "geometry": geometry,
        "dtype": dtype,
        "order": order,
        # What the count excludes is NaN.
        "keeps_count": counted and poison,
        "positions": inputs.query_positions is not None,
        "words": lambda r, t, s: words(r, t, s, dtype=dtype, **geometry),
    }
    return Scene(label, base, views, facts)


def _integers(chance: Random, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    return torch.randint(low, high + 1, tuple(shape), generator=generator, dtype=torch.int32)


def _wild(chance: Random, inputs: cases.Inputs, context: int) -> cases.Inputs:
    """Integers out of any range, some of them."""
    rows, width = inputs.selected_tokens.shape
    requests, pages = inputs.block_table.shape[0], inputs.k_cache.shape[0]
    lists = _integers(chance, (rows, width), -5, context + 40)
    # Half of the lists are short, as a list of a short context is.
    lists[:: chance.choice((1, 2)), min(width, context) :] = -1
    for extreme in (-(1 << 31), (1 << 31) - 1, 1 << 18, (1 << 18) - 1, 1 << 30):
        lists[chance.randrange(rows), chance.randrange(width)] = extreme
    table = _integers(chance, inputs.block_table.shape, -1, pages)
    table[chance.randrange(requests), chance.randrange(table.shape[1])] = chance.choice(
        (-(1 << 31), (1 << 31) - 1, pages, pages + 7)
    )
    owner = _integers(chance, (rows,), -1, requests)
    owner[chance.randrange(rows)] = chance.choice((-(1 << 31), (1 << 31) - 1, requests, -2))
    positions = _integers(chance, (rows,), -2, context + 2)
    device = inputs.q.device
    return replace(
        inputs,
        selected_tokens=lists.to(device),
        block_table=table.to(device),
        request_indices=owner.to(device),
        query_positions=positions.to(device),
    )


def _laid_out(inputs: cases.Inputs, words: int) -> tuple[torch.Tensor, dict[str, View]]:
    """All inputs in one storage, with room for the output and the workspace."""
    rows, heads, dim = inputs.q.shape
    device, size = inputs.q.device, GUARD_BYTES
    starts: dict[int, tuple[int, torch.Tensor]] = {}
    views: dict[str, View] = {}
    for each in fields(cases.Inputs):
        tensor = getattr(inputs, each.name)
        if not isinstance(tensor, torch.Tensor):
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in starts:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            starts[key] = size, raw
            size = _after(size + raw.numel())
        views[each.name] = view_of(tensor, starts[key][0])
    out = View((rows, heads, dim), ((heads + 1) * dim, dim, 1), torch.bfloat16, offset=size)
    size = _after(size + rows * (heads + 1) * dim * 2)
    views["out"] = out
    views["workspace"] = View((words,), (1,), torch.float32, offset=size)
    size = _after(size + 4 * words)
    base = torch.empty(size, dtype=torch.uint8, device=device)
    base.view(torch.int16).fill_(cases.POISON_16)
    for start, raw in starts.values():
        base[start : start + raw.numel()] = raw
    return base, views


def _after(end: int) -> int:
    return -(-(end + GUARD_BYTES) // 256) * 256


def any_call(chance: Random, scene: Scene) -> Call:
    """A call over the scene, in half of the cases spoilt."""
    while True:
        call = _call(chance, scene)
        if chance.random() < 0.5:
            spoil(chance, call, RULES, chance.choice((1, 1, 1, 2)))
        views = rows_of(call)
        if all(min(v.strides, default=0) >= 0 for v in views.values()) and all(
            span(v)[1] <= scene.base.numel() for v in views.values()
        ):
            call.defined = _defined(scene, call)
            return call


def _call(chance: Random, scene: Scene) -> Call:
    """A right call: some rows, and a number of tokens that divides them."""
    held = scene.views["q"].shape[0]
    tokens = chance.choice([t for t in range(1, 9) if t <= held])
    splits = chance.choice((1, 2, 4, 8, 16)) if chance.random() < 0.2 else None
    if splits is not None and chance.random() < 0.8:
        # The sizes that the catalog has with other splits than the rule's.
        tokens = chance.choice([t for t in (1, 4) if t <= held])
    most = min(held // tokens, 64)
    requests = most if chance.random() < 0.5 else chance.randint(1, most)
    if splits is not None and chance.random() < 0.8:
        requests = chance.choice([r for r in (1, 2, 11, 20) if r <= most])
    rows = requests * tokens
    if chance.random() < 0.03:
        rows = 0
    begin = chance.randint(0, held - rows)
    step = 2 if rows and begin + 2 * rows - 1 <= held and chance.random() < 0.2 else 1

    def some(name: str) -> View:
        return part(scene.views[name], 0, begin, rows, step)

    facts, views = scene.facts, scene.views
    arguments: dict[str, Any] = {name: views[name] for name in ("k_cache", "v_cache")}
    arguments |= {name: some(name) for name in _BY_ROW}
    arguments["block_table"] = views["block_table"]
    if facts["dtype"] != "bf16":
        arguments |= {name: views[name] for name in ("k_scale", "v_scale")}
    if facts["dtype"] == "nvfp4":
        arguments["v_scale_order"] = facts["order"]
        for name in ("k_block_scales", "v_block_scales"):
            dtype = torch.uint8 if chance.random() < 0.2 else torch.float8_e4m3fn
            arguments[name] = replace(views[name], dtype=dtype)
    if chance.random() < (0.95 if facts["keeps_count"] else 0.4):
        arguments["valid_count"] = some("valid_count")
    if facts["positions"] and chance.random() < (0.95 if facts["keeps_count"] else 0.6):
        arguments["query_positions"] = some("query_positions")
    if chance.random() < 0.6:
        gate = some("output_gate")
        if chance.random() < 0.3:
            heads, dim = gate.shape[1:]
            gate = replace(gate, shape=(rows, heads * dim), strides=(gate.strides[0], 1))
        arguments["output_gate"] = gate
    if chance.random() < 0.2 and rows:
        # Heads outside of rows.
        out = views["out"]
        arguments["out"] = replace(some("out"), strides=(256, 256 * rows, 1), offset=out.offset)
    arguments["tokens"] = tokens
    usual = scene.facts["geometry"]["head_dim"] ** -0.5
    arguments["softmax_scale"] = usual
    if chance.random() < 0.3:
        arguments["softmax_scale"] = chance.choice((1e-30, 0.01, 0.25, 1.0))
    if splits is not None or chance.random() < 0.5:
        arguments["splits"] = splits
    needed = facts["words"](requests, tokens, splits)
    space = views["workspace"]
    words = chance.choices((needed, space.shape[0], max(0, needed - 1)), (6, 2, 1))[0]
    arguments["workspace"] = part(space, 0, 0, min(words, space.shape[0]))
    if not needed and chance.random() < 0.5:
        del arguments["workspace"]
    return Call(OP, arguments, written=("out", "workspace"), way=any_way(chance))


def _tokens(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    wrapped = (value + (1 << 32), value + (1 << 64), -value, 1 << 31, value * 2, value + 1)
    return (0, -1, 9, float(value), value + 0.5, None, str(value), True, 1, *wrapped)


def _scales(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    nan, inf = float("nan"), float("inf")
    return (
        0.0,
        -0.0,
        -value,
        nan,
        inf,
        -inf,
        1e30,
        3e38,
        1e39,
        1e-50,
        1,
        0,
        True,
        "1",
        None,
        [1.0],
        1j,
    )


def _splits(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    return (
        3,
        0,
        -1,
        2,
        8,
        MAX_SPLITS,
        MAX_SPLITS + 1,
        2.0,
        2.5,
        "2",
        True,
        1 << 40,
        [2],
        63,
        torch.tensor(2),
    )


def _orders(chance: Random, call: Call, value: Any) -> Sequence[Any]:
    return (None, *VScaleOrder, "linear", 0, 1)


RULES = Rules(
    scalars={
        "tokens": _tokens,
        "softmax_scale": _scales,
        "splits": _splits,
        "v_scale_order": _orders,
    }
)


def _defined(scene: Scene, call: Call) -> bool:
    """Whether the outcome follows from the contract, within a bound that was measured: whatever the
    integers, but not floats that are other memory.
    """
    scale = call.arguments["softmax_scale"]
    if isinstance(scale, (int, float)) and not scale <= 4:
        return False
    for name, view in rows_of(call).items():
        if name in _INTEGERS or name in call.written:
            continue
        alike = next((names for names in _ALIKE if name in names), (name,))
        if not any(within(view, scene.views[other]) for other in alike):
            return False
        # A cache of NVFP4 and its scales lie in one page.
        packed = alike[0] in ("k_cache", "k_block_scales") and scene.facts["dtype"] == "nvfp4"
        if packed and all(_bytes(view) != _bytes(scene.views[other]) for other in alike):
            return False
    return True


def _bytes(view: View) -> tuple[Any, ...]:
    """A view of bytes, whatever they are called."""
    return view.shape, view.strides, view.offset, view.dtype.itemsize


def _needed(scene: Scene, call: Call) -> int:
    """fp32 words of workspace that a call which was launched needs."""
    rows = call.arguments["q"].shape[0]
    tokens, splits = call.arguments["tokens"], call.arguments.get("splits")
    found: int = scene.facts["words"](rows // int(tokens), int(tokens), splits)
    return found


class _Family:
    """See ``fuzzing.scenes.Family``."""

    def idle(self, call: Call) -> bool:
        q = call.arguments["q"]
        return isinstance(q, View) and q.shape[:1] == (0,)

    def forbidden(self, scene: Scene, call: Call) -> str:
        views = rows_of(call)
        needed = _needed(scene, call)
        for written in ("out", "workspace") if needed else ("out",):
            for name, view in views.items():
                if name == written or written not in views or (name == "workspace" and not needed):
                    continue
                if meet(views[written], view):
                    return f"was launched, and {written} overlaps {name}"
        space = views.get("workspace")
        if needed and (space is None or space.shape[0] < needed):
            return f"was launched, and needs {needed} words of workspace"
        return ""

    def expect(self, scene: Scene, call: Call, tensors: Mapping[str, Any]) -> Any:
        given = {
            name: value
            for name, value in tensors.items()
            if value is not None and name not in ("tokens", "splits", "out", "workspace")
        }
        scale = given.pop("softmax_scale")
        return reference.attention(**given, softmax_scale=float(scale)).out

    def settle(
        self, call: Call, found: Mapping[str, Any], expected: Mapping[str, Any], known: Any
    ) -> list[Measure]:
        wanted, got = known.float(), found["out"].float()
        same = (wanted == got) | (wanted.isnan() & got.isnan())
        difference = torch.where(same, 0.0, got - wanted)
        length = torch.linalg.vector_norm(wanted.nan_to_num()).clamp(min=1e-3)
        empty = (wanted == 0).flatten(1).all(1)
        # The bound of one output is two steps of bf16 at 1: it grows with what is above.
        largest = (difference.abs() / wanted.abs().nan_to_num().clamp(min=1)).amax()
        measures = [
            ("out, relative L2", torch.linalg.vector_norm(difference) / length, cases.RELATIVE_L2),
            ("out, largest error", largest, cases.ABSOLUTE),
            ("rows that should be 0", (got.ne(0).flatten(1).any(1) & empty).sum(), 0.0),
        ]
        expected["out"].copy_(found["out"])
        if isinstance(found.get("workspace"), torch.Tensor):
            expected["workspace"].copy_(found["workspace"])
        return measures


FAMILY = _Family()

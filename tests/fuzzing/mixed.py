"""Random calls of every op, one after another, of mixed problems, dtypes, sizes and devices.

No earlier call may change what a call answers: each is made on a pack that has seen all calls
before it and on a fresh one, and what was launched, or why it was declined, must be the same. A
call is a right one of one of the problems, or has one thing wrong: an argument of another problem's
call, something that is no tensor or has no memory, or a scalar of a wrong type.

Values are such that whatever launches stays inside its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import specplan
import torch
from specplan.plans import rollback as rollback_plan
from specplan.plans.families import FAMILIES
from specplan.plans.gdn_replay import HEAD, WINDOW, CommitterError, Cursors, Pool
from specplan.plans.sparse_gqa_verify import VScaleOrder
from specplan.plans.stage import Segments, describe

from fuzzing.calls import is_scalar, takes_none

Problems = Mapping[str, Sequence[Mapping[str, int]]]
INT32, BF16, FP32 = torch.int32, torch.bfloat16, torch.float32
#: Words of the long workspaces: enough for any of these calls.
WORDS = 1 << 20
OPS = tuple(
    family if op == family else f"{family}.{op}"
    for family, planning in FAMILIES.items()
    for op in planning.ops
)


@dataclass
class Call:
    """One call of an op by its dotted name; ``scalar`` is that of a wrong type, if one is."""

    op: str
    arguments: dict[str, Any]
    changed: str = ""
    scalar: str = ""
    way: str = "call"

    def __str__(self) -> str:
        def shown(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__

        given = ", ".join(f"{name}={shown(value)}" for name, value in self.arguments.items())
        return f"{self.op}.{self.way}({given}); changed: {self.changed or 'nothing'}"


@dataclass
class World:
    """The tensors of a sequence of calls, each made once; ``place`` puts one on a device."""

    problems: Problems
    place: Callable[[torch.Tensor, int], torch.Tensor]
    devices: int = 1
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def tensor(
        self, device: int, name: str, *shape: int, dtype: torch.dtype = INT32, fill: str = "zeros"
    ) -> torch.Tensor:
        key = (device, name, shape, dtype, fill)
        if key not in self.made:
            if fill == "range":
                tensor = torch.arange(shape[0], dtype=dtype)
            elif fill == "ones":
                tensor = torch.ones(shape, dtype=dtype)
            else:
                tensor = torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
                tensor = tensor if tensor.dtype == dtype else tensor.view(dtype)
            self.made[key] = self.place(tensor, device)
        return self.made[key]

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def right_call(chance: Random, world: World, op: str) -> Call:
    """A right call of an op, of any of its family's problems, on any device."""
    family, _, name = op.partition(".")
    geometry = dict(chance.choice(list(world.problems[family])))
    device = chance.randrange(world.devices)
    arguments = _MAKERS[family](chance, world, geometry, device, name)
    return Call(op, arguments, way=chance.choice(("call", "call", "call", "bind")))


def any_call(chance: Random, world: World, op: str) -> Call:
    """A call of an op, in two of five cases with one thing wrong."""
    call = right_call(chance, world, op)
    if chance.random() < 0.6:
        return call
    tensors = [n for n, v in call.arguments.items() if isinstance(v, torch.Tensor)]
    scalars = [n for n in call.arguments if is_scalar(n, call.arguments)]
    kind = chance.choice(("scalar", "other", "other", "nothing", "nothing"))
    if kind == "scalar" and scalars:
        name = chance.choice(scalars)
        call.arguments[name] = wrong = chance.choice(wrong_scalars(name, call.arguments))
        call.scalar = name
        call.changed = f"{name} is {wrong!r}"
    elif kind == "other":
        other = right_call(chance, world, call.op)
        # A table belongs to its layout: what it points to is the caller's word.
        names = [n for n in tensors if n in other.arguments and n != "planes"]
        if names:
            name = chance.choice(names)
            call.arguments[name] = other.arguments[name]
            call.changed = f"{name} is of another call"
    elif tensors:
        name = chance.choice(tensors)
        given = call.arguments[name]
        what, call.arguments[name] = chance.choice(no_tensors(given))
        call.changed = f"{name} is {what}"
    return call


def wrong_scalars(name: str, arguments: Mapping[str, Any]) -> list[Any]:
    """What is no number for an op, whatever it may count as."""
    value = arguments[name]
    number = 2 if value is None else value
    wrong = ["2", True, False, torch.tensor(int(number)), np.array(int(number)), [number]]
    if not takes_none(name, arguments):
        wrong.append(None)
    if name not in ("scale", "softmax_scale"):
        wrong += [2.5, float(number), torch.tensor([number])]
    return wrong


def no_tensors(given: torch.Tensor) -> list[tuple[str, Any]]:
    """What is no tensor that a launch can take."""
    plain = given.as_subclass(torch.Tensor)
    found = [
        ("None", None),
        ("an array", np.zeros(tuple(given.shape), dtype=np.int32)),
        ("a meta tensor", torch.empty_like(plain, device="meta")),
    ]
    if plain.dtype in (INT32, FP32):
        found.append(("a sparse tensor", plain.to_sparse()))
    return found


def _scatter(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    rows, begin = chance.choice((1, 2, 3, 4)), chance.choice((0, 0, 1))
    size, held = chance.choice((4, 6, 8)), begin + rows + chance.choice((0, 0, 1))
    width = chance.choice((0, 1, 2, 3, 4, g["history"]))

    def tensor(name: str, *shape: int, fill: str = "zeros") -> torch.Tensor:
        return world.tensor(device, name, *shape, fill=fill)

    return {
        "new_tokens": tensor("new", held, width),
        "next_new_tokens": tensor("next", held, g["next"]),
        "lens": tensor("lens", held + chance.choice((0, 0, 0, 2))),
        "next_draft_tokens": tensor("drafts", held, g["draft"]),
        "slots": tensor("slots", rows, fill="range"),
        "store_new_tokens": tensor("history store", g["history"], size, 1),
        "store_next_new_tokens": tensor("next store", g["next"], size, 1),
        "store_lens": tensor("lens store", size),
        "store_next_draft": tensor("draft store", size, g["draft"]),
        "row_begin": begin,
        "rows": chance.choice((rows, rows, rows, rows, 0)),
    }


def _gather(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    requests, tokens = chance.choice((0, 1, 2, 3, 4)), chance.randint(1, min(4, g["next"]))
    drafts, size = chance.randint(0, min(tokens - 1, g["draft"])), chance.choice((4, 6, 8))
    flat = requests * tokens

    def tensor(name: str, *shape: int) -> torch.Tensor:
        return world.tensor(device, name, *shape)

    counts = {
        "input_ids": flat,
        "draft_tokens": requests * drafts,
        "pos_offsets": flat,
        "kv_offsets": requests,
    }
    begins = {f"{name}_begin": chance.choice((0, 1, 2)) for name in counts}
    return {
        "store_next_new_tokens": tensor("next store", g["next"], size, 1),
        "store_next_draft": tensor("draft store", size, g["draft"]),
        "store_lens": tensor("lens store", size),
        "slots": tensor("slots", requests),
        "pos_indices": tensor("positions", flat),
        **{name: tensor(name, begins[f"{name}_begin"] + count) for name, count in counts.items()},
        **begins,
        "requests": requests,
        "tokens": tokens,
        "drafts": drafts,
    }


def _rollback(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    requests, tokens = chance.choice((1, 2, 4)), chance.choice((1, 2, 4))
    rows = requests * tokens

    def described() -> tuple[Any, torch.Tensor]:
        planes = []
        for count, size in (("planes", "row_bytes"), ("side_planes", "side_row_bytes")):
            for number in range(g[count]):
                planes.append(
                    world.tensor(device, f"{count} {number}", 2, 4, g[size], dtype=torch.uint8)
                )
        layout = rollback_plan.layout(
            [
                rollback_plan.plane(p.data_ptr(), 4 * p.shape[2], p.shape[2], 2, 4, p.shape[2])
                for p in planes
            ]
        )
        return layout, world.place(torch.tensor(layout.table()), device)

    layout, table = world.once((device, "layout", *g.values()), described)
    index = chance.choice((INT32, torch.int64))
    held = rows + chance.choice((0, 1))
    arguments: dict[str, Any] = {
        "layout": layout,
        "tokens": tokens,
        "planes": table,
        "pages": world.tensor(device, "pages", rows, dtype=index),
        "within": world.tensor(device, "within", rows, dtype=index),
        "old": world.tensor(device, "old", held, layout.record_bytes, dtype=torch.uint8),
        "pending": world.tensor(device, "pending", 1),
    }
    if name == "restore":
        arguments["rejected"] = world.tensor(device, "rejected", rows)
    if name == "commit":
        arguments["accepted"] = world.tensor(device, "accepted", requests)
        if chance.random() < 0.5:
            for list_of in ("row_requests", "row_ordinals"):
                arguments[list_of] = world.tensor(device, list_of, rows)
        if chance.random() < 0.5:
            arguments["slots"] = world.tensor(device, "slots", requests, fill="range")
    return arguments


def _gdn(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    keys, values = g["key_heads"], g["value_heads"]
    dtype = chance.choice(("bf16", "fp32"))
    state = {"bf16": BF16, "fp32": FP32}[dtype]
    slots, party = 8, chance.choice(("ours", "ours", "ours", "theirs"))

    def pool() -> Pool:
        def tensor(what: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return world.tensor(device, f"{what} {party}", slots, *shape, dtype=dtype)

        cursors = Cursors(
            *(tensor("hist_len", dtype=INT32), tensor("bank", dtype=INT32)),
            key_heads=keys,
            value_heads=values,
            dtype=dtype,
        )
        if party == "theirs":
            cursors.claim("a cache manager")
        return Pool(
            cursors,
            tensor("state", values, HEAD, HEAD, dtype=state),
            tensor("rec_u", values, 2, WINDOW, HEAD),
            tensor("rec_k", keys, 2, WINDOW, HEAD),
            tensor("rec_G", values, 2, WINDOW, dtype=FP32),
        )

    of_layer = world.once((device, "pool", keys, values, dtype, party), pool)
    rows, tokens = chance.choice((0, 1, 2, 3, 4, 8)), chance.choice((1, 2, 4, 8))
    slot = world.tensor(device, "slot", rows, fill="range")
    if name == "verify":

        def row(what: str, *shape: int) -> torch.Tensor:
            return world.tensor(device, what, rows, tokens, *shape, dtype=BF16)

        return {
            "pool": of_layer,
            "q": row("q", keys, HEAD),
            "k": row("k", keys, HEAD),
            "v": row("v", values, HEAD),
            "a": row("a", values),
            "b": row("b", values),
            "A_log": world.tensor(device, "A_log", values, dtype=FP32),
            "dt_bias": world.tensor(device, "dt_bias", values, dtype=FP32),
            "slot": slot,
            "out": row("out", values, HEAD),
            "scale": chance.choice((None, None, 0.5, 1)),
            "splits": chance.choice((None, None, None, 1, 2)),
        }
    if name == "materialize":
        in_place = chance.random() < 0.2
        return {
            "pool": of_layer,
            "src": slot,
            "dst": slot if in_place else world.tensor(device, "dst", rows, fill="range"),
            "count": world.tensor(device, "count", rows),
        }
    arguments: dict[str, Any] = {"cursors": of_layer.cursors, "slot": slot}
    if name == "advance":
        arguments["n_acc"] = world.tensor(device, "n_acc", rows)
        arguments["tokens"] = tokens
    return arguments


def _attention(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    requests, tokens = chance.choice((1, 2, 4, 8)), chance.choice((1, 2, 4))
    rows, heads = requests * tokens, (g["kv_heads"], g["page_size"])
    dtype = chance.choice(("bf16", "fp8_e4m3", "nvfp4"))
    element = {"bf16": BF16, "fp8_e4m3": torch.float8_e4m3fn, "nvfp4": torch.uint8}[dtype]
    dim = g["head_dim"]

    def tensor(name: str, *shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
        return world.tensor(device, name, *shape, dtype=dtype)

    stored = dim // 2 if dtype == "nvfp4" else dim
    arguments: dict[str, Any] = {
        "q": tensor("q", rows, g["q_heads"], dim, dtype=BF16),
        "k_cache": tensor("k", 2, *heads, stored, dtype=element),
        "v_cache": tensor("v", 2, *heads, stored, dtype=element),
        "block_table": tensor("table", requests, 2),
        "selected_tokens": tensor("lists", rows, g["selected"]),
        "request_indices": tensor("requests", rows),
        "out": tensor("out", rows, g["q_heads"], dim, dtype=BF16),
        "tokens": tokens,
        "softmax_scale": chance.choice((0.0625, 0.5, 1)),
    }
    if dtype != "bf16":
        for scale in ("k_scale", "v_scale"):
            arguments[scale] = world.tensor(device, scale, 1, dtype=FP32, fill="ones")
    if dtype == "nvfp4":
        arguments["v_scale_order"] = chance.choice(list(VScaleOrder))
        kept = chance.choice((torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fn))
        for scales in ("k_block_scales", "v_block_scales"):
            arguments[scales] = tensor(scales, 2, *heads, dim // 16, dtype=kept)
    if chance.random() < 0.6:
        arguments["workspace"] = tensor("workspace", WORDS, dtype=FP32)
    if chance.random() < 0.4:
        arguments["valid_count"] = tensor("valid_count", rows)
    if chance.random() < 0.3:
        flat = chance.random() < 0.3
        shape = (rows, g["q_heads"] * dim) if flat else (rows, g["q_heads"], dim)
        arguments["output_gate"] = tensor("gate", *shape, dtype=BF16)
    if chance.random() < 0.3:
        arguments["splits"] = chance.choice((1, 2, 4))
    return arguments


def _setup(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    requests, tokens = chance.choice((0, 1, 2, 3, 4, 8)), chance.choice((0, 1, 2, 4))
    rows = requests * max(1, tokens) + chance.choice((0, 0, 3))
    index = chance.choice((INT32, torch.int64))

    def tensor(name: str, *shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
        return world.tensor(device, name, *shape, dtype=dtype)

    arguments: dict[str, Any] = {
        "kv_lens": tensor("kv_lens", requests),
        "block_table": tensor("table", requests, 2),
        "request_of_row": tensor("request_of_row", rows),
        "position_of_row": tensor("position_of_row", rows),
        "visible_of_row": tensor("visible_of_row", rows),
        "page_of_row": tensor("page_of_row", rows, dtype=index),
        "within_of_row": tensor("within_of_row", rows, dtype=index),
        "first_position": tensor("first_position", requests),
        "tokens": tokens,
        "page_size": g["group"] * chance.choice((1, 8)),
        "group": g["group"],
        "scale": chance.choice((None, None, 1, 48)),
    }
    if tokens == 0:
        arguments["seq_lens"] = tensor("seq_lens", requests)
    for wanted, dtype in (
        *(("ordinal_of_row", INT32), ("position_of_row_int64", torch.int64)),
        *(("length_of_row", INT32), ("cache_slot", torch.int64), ("group_slot", torch.int64)),
    ):
        if chance.random() < 0.3:
            arguments[wanted] = tensor(wanted, rows, dtype=dtype)
    if chance.random() < 0.3:
        arguments["table_out"] = tensor("table_out", requests + 1, 2)
    if chance.random() < 0.4:
        arguments["work"] = tensor("work", requests, 4)
        arguments["n_commit"] = tensor("n_commit", 1)
        arguments["slots"] = world.tensor(device, "slots", requests, fill="range")
        arguments["hist_len"] = tensor("hist_len", 8)
        arguments["bank"] = tensor("bank", 8)
        arguments["window"] = chance.choice((None, 16))
    return arguments


def _argmax(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    rows, dtype = chance.choice((0, 1, 2, 3, 4)), chance.choice((BF16, FP32))
    columns = g["vocabulary_k"] * 1024 - chance.choice((0, 3))
    index = (INT32, torch.int64)

    def tensor(name: str, *shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
        return world.tensor(device, name, *shape, dtype=dtype)

    arguments: dict[str, Any] = {
        "logits": tensor("logits", rows, columns, dtype=dtype),
        "ids": tensor("ids", rows, dtype=chance.choice(index)),
        "scratch": tensor("scratch", 2 * rows + 1, dtype=torch.int64),
        "offset": chance.choice((None, 0, columns)),
    }
    if chance.random() < 0.5:
        arguments["value"] = tensor("value", rows, dtype=dtype)
    if chance.random() < 0.5:
        arguments["key"] = tensor("key", rows, dtype=torch.int64)
    if chance.random() < 0.5:
        arguments["d2t"] = tensor("d2t", columns, dtype=chance.choice(index))
    return arguments


def _stage(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    count, words = chance.choice((1, 2, 3, 4)), chance.choice((16, 64))
    sizes = tuple(chance.choice((1, 2, 8)) for _ in range(count))
    offsets = tuple(chance.choice((0, 3, words - 16)) for _ in range(count))

    def described() -> Segments:
        tensors = [
            world.tensor(device, f"destination {number}", size, dtype=kind)
            for number, (size, kind) in enumerate(
                zip(sizes, (INT32, torch.int64) * 2, strict=False)
            )
        ]
        return describe(list(zip(tensors, offsets, strict=True)), INT32)

    return {
        "record": world.tensor(device, "record", words),
        "segments": world.once((device, "segments", sizes, offsets), described),
    }


def _accept(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    requests, tokens = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 4))
    contexts = chance.choice((None, 0, 1, requests))
    generations = requests - (contexts or 0)
    rows = (contexts or 0) + generations * tokens
    index = chance.choice((INT32, torch.int64))

    def tensor(name: str, *shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
        return world.tensor(device, name, *shape, dtype=dtype)

    if g["vocabulary_k"]:
        columns, dtype = g["vocabulary_k"] * 1024, chance.choice((BF16, FP32))
        target = tensor("target", rows, columns, dtype=dtype)
    else:
        target = tensor("target", rows, dtype=index)
    arguments: dict[str, Any] = {
        "target": target,
        "accepted": tensor("accepted", requests, tokens),
        "n_acc": tensor("n_acc", requests),
        "scratch": tensor("scratch", rows + requests + 1, dtype=torch.int64),
        "contexts": contexts,
        "fill": chance.choice((None, 0, 1)),
        "extra": chance.choice((None, 0, 1)),
    }
    if tokens > 1:
        arguments["drafts"] = tensor("drafts", generations, tokens - 1)
    for wanted in ("next_token", "kv_lens", "n_override"):
        if chance.random() < 0.4:
            arguments[wanted] = tensor(wanted, requests)
    if chance.random() < 0.4:
        arguments["rows"] = tensor("rows", requests, dtype=index)
    if chance.random() < 0.4:
        arguments["positions"] = tensor("positions", 3, rows, dtype=index)
        arguments["positions_out"] = tensor("positions_out", 3, requests, dtype=index)
    if chance.random() < 0.4:
        arguments["slot"] = world.tensor(device, "slot", requests, fill="range")
        arguments["hist_len"] = tensor("hist_len", 8)
        arguments["bank"] = tensor("bank", 8)
    if chance.random() < 0.3:
        arguments["force_mode"], arguments["force_base"] = chance.choice((1, 2)), 1
        arguments["force_frac"] = chance.choice((0, 0.5))
        arguments["pool"] = tensor("pool", 65536, dtype=FP32)
        arguments["counter"] = tensor("counter", 1, dtype=torch.int64)
    return arguments


def _conv(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    requests, tokens = chance.choice((0, 1, 2, 3, 4)), chance.choice((1, 2, 4))
    channels, places = g["channels"], chance.choice((8, 16, 64))

    def tensor(name: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return world.tensor(device, name, *shape, dtype=dtype)

    lists = {
        "position": tensor("conv positions", requests, dtype=INT32),
        "slot": world.tensor(device, "slot", requests, fill="range"),
    }
    if name:
        layers = chance.choice((0, 1, 2))
        windows = tensor("windows", layers, requests, channels, 3)
        return {"windows": windows, "ring": tensor("rings", layers, 8, places, channels), **lists}
    x = tensor("conv inputs", requests, tokens, channels)
    apart = chance.random() < 0.5
    arguments: dict[str, Any] = {
        "x": x,
        "weight": tensor("taps", channels, 4),
        "ring": tensor("conv ring", 8, places, channels),
        **lists,
        "out": tensor("conv outputs", requests, tokens, channels) if apart else x,
    }
    if chance.random() < 0.4:
        arguments["bias"] = tensor("conv bias", channels, dtype=chance.choice((BF16, FP32)))
    return arguments


def _draft_step(
    chance: Random, world: World, g: Mapping[str, int], device: int, name: str
) -> dict[str, Any]:
    requests, drafted = chance.choice((0, 1, 2, 3, 4)), chance.choice((1, 2, 3))
    index = chance.choice((INT32, torch.int64))

    def tensor(name: str, *shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
        return world.tensor(device, name, *shape, dtype=dtype)

    columns = g["vocabulary_k"] * 1024
    if columns:
        target = tensor("target", requests, columns, dtype=chance.choice((BF16, FP32)))
    else:
        target = tensor("target", requests, dtype=index)
    arguments: dict[str, Any] = {
        "target": target,
        "input_ids": tensor("input_ids", requests, dtype=chance.choice((INT32, torch.int64))),
        "drafts": tensor("drafts", requests, drafted),
        "step": chance.randrange(drafted),
    }
    if columns or chance.random() < 0.3:
        arguments["scratch"] = tensor("scratch", 2 * requests, dtype=torch.int64)
    if chance.random() < 0.4:
        arguments["d2t"] = tensor("d2t", columns or 8, dtype=index)
    if chance.random() < 0.4:
        arguments["next_new_tokens"] = tensor("next", requests, drafted + 1)
        arguments["next_token"] = tensor("next_token", requests)
    if chance.random() < 0.4:
        arguments["positions"] = tensor("positions", 3, requests, dtype=index)
    if chance.random() < 0.4:
        arguments["slot"] = world.tensor(device, "slot", requests, fill="range")
    if chance.random() < 0.6:
        arguments["kv_lens"] = tensor("kv_lens", requests)
        for wanted in ("request_of_row", "position_of_row", "visible_of_row"):
            if chance.random() < 0.4:
                arguments[wanted] = tensor(wanted, requests)
        if chance.random() < 0.6:
            arguments["block_table"] = tensor("table", requests, 2)
            arguments["page_size"] = 32
            arguments["group"] = chance.choice((None, 1, 4))
            arguments["scale"] = chance.choice((None, 1, 48))
            for wanted in ("page_of_row", "within_of_row"):
                arguments[wanted] = tensor(wanted, requests, dtype=index)
            for wanted in ("cache_slot", "group_slot"):
                arguments[wanted] = tensor(wanted, requests, dtype=torch.int64)
    return arguments


_MAKERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "scatter": _scatter,
    "gather": _gather,
    "rollback": _rollback,
    "gdn_replay": _gdn,
    "sparse_gqa_verify": _attention,
    "step_setup": _setup,
    "argmax": _argmax,
    "stage": _stage,
    "accept": _accept,
    "conv_verify": _conv,
    "draft_step": _draft_step,
}


#: Launches: symbol and arguments.
Launched = list[tuple[str, tuple[Any, ...]]]
#: What a call came to: the answer, or the exception's text, and what it launched.
Outcome = tuple[str, Launched]
#: The launches since it was last asked.
Launches = Callable[[], Launched]


def outcome(pack: specplan.Pack, call: Call, launches: Launches) -> Outcome:
    """Make a call, and say what came of it."""
    op: Any = pack
    for name in call.op.split("."):
        op = getattr(op, name)
    launches()
    try:
        if call.way == "bind":
            answer = op.bind(**call.arguments)
            if not isinstance(answer, specplan.Uncertified):
                launches()
                answer()
                answer = True
        else:
            answer = op(**call.arguments)
    except CommitterError as error:
        return f"CommitterError: {error}", launches()
    if isinstance(answer, specplan.Uncertified):
        return f"{answer.reason.value}: {answer.detail}", launches()
    return repr(answer), launches()


def described(found: Outcome) -> tuple[Any, ...]:
    """An outcome in a form that can be compared: tensors by their memory and form."""

    def plain(value: Any) -> Any:
        if hasattr(value, "__dlpack__") and not isinstance(value, torch.Tensor):
            # As a bind has converted it.
            value = torch.from_dlpack(value)
        if isinstance(value, torch.Tensor):
            # Where nothing lies, it does not matter where.
            at = value.data_ptr() if value.numel() else 0
            return at, tuple(value.shape), tuple(value.stride()), value.dtype
        return type(value).__name__, value

    answer, launched = found
    return answer, [(symbol, tuple(map(plain, given))) for symbol, given in launched]


def judge(call: Call, seen: Outcome, fresh: Outcome) -> str:
    """What is wrong with the outcome of a call on a pack that has seen others, or nothing."""
    if described(seen) != described(fresh):
        return f"{call}\n  after other calls: {seen[0]}\n  on a fresh pack:   {fresh[0]}"
    if call.scalar and call.way == "call" and seen != ("True", []):
        reason = seen[0].partition(":")[0]
        if reason != "argument" or call.scalar not in seen[0] or seen[1]:
            return f"{call}\n  a scalar of a wrong type was not declined as one: {seen[0]}"
    return ""


def sequence(
    chance: Random,
    world: World,
    count: int,
    pack: specplan.Pack,
    fresh_pack: Callable[[], specplan.Pack],
    launches: Launches,
    ops: Sequence[str] = OPS,
) -> tuple[dict[str, int], list[str]]:
    """Make calls one after another, each on a pack that has seen those before it and on a fresh
    one; how many came to what, by op, and what was wrong.
    """
    answers: dict[str, int] = {}
    failures: list[str] = []
    for _ in range(count):
        op = chance.choice(list(ops))
        call = any_call(chance, world, op)
        packs = [pack, fresh_pack()]
        # A call may claim cursors, so either may be the first.
        order = [0, 1] if chance.random() < 0.5 else [1, 0]
        found: dict[int, Outcome] = {}
        wrong = ""
        for which in order:
            with suppress(AssertionError):
                try:
                    found[which] = outcome(packs[which], call, launches)
                except Exception as error:
                    wrong = f"{call}\n  raised {error!r}"
        wrong = wrong or judge(call, found[0], found[1])
        if wrong:
            failures.append(wrong)
            continue
        how = found[0][0].partition(":")[0]
        answers[f"{op}: {how}"] = answers.get(f"{op}: {how}", 0) + 1
    return answers, failures

"""Input cases of ``conv_verify``: packed rows, in place and apart, rings of several sizes, every
bias, lists that are columns of wider tables; NaN wherever nobody may read. Integers and copies are
compared bit for bit, outputs within one unit of bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from specplan.kernels.case import Arena, Comparison, ExactCase
from specplan.kernels.conv_verify import reference
from specplan.plans.conv_verify import BEFORE, MOST_RING

BF16 = torch.bfloat16
#: Bytes of the windows and rings of a case that moves them.
MOVED_BYTES = 1 << 24
MEASURE = "units in the last place of bf16"
SOURCE = "one rounding to bf16 of sums in fp32, against float64"
#: Magnitudes below this are equal: silu of a very negative sum is nothing beside its neighbours.
NOTHING = 1e-30


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many bf16 lie between two, by element; NaN is equal to NaN and far from all else."""

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    near = (a.float().abs() < NOTHING) & (b.float().abs() < NOTHING)
    found = (order(a) - order(b)).abs()
    found = torch.where(a.isnan() != b.isnan(), 1 << 16, found)
    return torch.where(near | (a.isnan() & b.isnan()), 0, found)


class ConvCase(ExactCase):
    """One convolution: ``wide`` channels more lie in each packed row, ``in_place`` without memory
    for ``out``.
    """

    measure = "words that differ"

    def __init__(
        self,
        name: str,
        channels: int,
        requests: int,
        tokens: int,
        device: torch.device | str,
        *,
        places: int = 16,
        bias: str = "",
        in_place: bool = False,
        wide: int = 0,
        spare: int = 2,
    ) -> None:
        self.channels, self.requests, self.tokens = channels, requests, tokens
        self.places, self.in_place = places, in_place
        arena, slots, row = Arena(), requests + spare, channels + wide
        arena.add_typed("x", BF16, requests, tokens, channels, strides=(tokens * row, row, 1))
        arena.add_typed("weight", BF16, channels, 4)
        strides = (places * channels + 64, channels, 1)
        arena.add_typed("ring", BF16, slots, places, channels, strides=strides)
        arena.add_strided("position", (requests,), (2,))
        arena.add_strided("slot", (requests,), (3,))
        if not in_place:
            arena.add_typed("out", BF16, requests, tokens, channels)
        if bias:
            arena.add_typed("bias", {"bf16": BF16, "fp32": torch.float32}[bias], channels)
        super().__init__(name, "conv_verify", arena, {}, torch.device(device))

    def arguments(self) -> Mapping[str, Any]:
        return self._with_out(self.tensors)

    def _with_out(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "out": tensors["x" if self.in_place else "out"]}

    def shape_inputs(self, generator: torch.Generator) -> None:
        t, device = self.tensors, self.buffer.device
        slots, nan = t["ring"].shape[0], float("nan")
        for name in ("x", "weight", *(("bias",) if "bias" in t else ())):
            t[name].copy_(torch.randn(t[name].shape, generator=generator, device=device))
        order = torch.randperm(slots, generator=generator, device=device)[: self.requests]
        rows = torch.arange(self.requests, device=device)
        position = torch.randint(
            0, 3 * self.places, (self.requests,), generator=generator, device=device
        )
        position[rows % 7 == 3] = rows[rows % 7 == 3] % BEFORE
        position[rows % 11 == 5] = (1 << 30) + rows[rows % 11 == 5]
        dead = rows % 5 == 2
        order[dead] = torch.where(rows[dead] % 2 == 0, -1, slots + 3)
        position[rows % 13 == 6] = -1
        t["slot"].copy_(order)
        t["position"].copy_(position)
        live = (~dead & (position >= 0)).nonzero().flatten()
        # What a step may read is there, and nothing else.
        t["ring"].fill_(nan)
        before = position[live, None] + torch.arange(-BEFORE, 0, device=device)
        known = before >= 0
        at = order[live, None].expand_as(before)[known]
        count = (len(at), self.channels)
        values = torch.randn(count, generator=generator, device=device).to(BF16)
        t["ring"][at, before[known] % self.places] = values
        # The last rows of some requests are drafts that nobody gave.
        t["x"][rows % 3 == 1, -1] = nan
        if not self.in_place:
            t["out"].fill_(nan)

    def reference(self, **arguments: Any) -> None:
        reference.conv_verify(**self._with_out(arguments))

    def compare(self, expected: torch.Tensor) -> Iterator[Comparison]:
        mine, wanted = self.buffer.view(torch.int16), expected.view(torch.int16)
        marks = torch.zeros_like(self.buffer)
        self._with_out(self.arena.tensors(marks))["out"].view(torch.int16).fill_(-1)
        differs = (mine != wanted) & (marks.view(torch.int16) == 0)
        yield Comparison("all that is no output", self.measure, differs.sum(), 0)
        ours = self._with_out(self.tensors)["out"]
        theirs = self._with_out(self.arena.tensors(expected))["out"]
        yield Comparison("out", MEASURE, ulps(ours, theirs).max(), 1.0, SOURCE)
        # Padding rows are zeros, all bits of them.
        t = self.tensors
        dead = (t["slot"] < 0) | (t["slot"] >= t["ring"].shape[0]) | (t["position"] < 0)
        stray = (ours.view(torch.int16) != 0) & dead[:, None, None]
        yield Comparison("padding rows", "elements that differ", stray.sum(), 0)

    def pick(self) -> Mapping[str, Any]:
        return {
            "channels": self.channels,
            "requests": self.requests,
            "tokens": self.tokens,
            "dtype": "bf16",
            "splits": 1,
        }


class MoveCase(ExactCase):
    """``import_`` or ``export`` of some layers; windows innermost in ``order``: ``taps`` as SGLang
    and TensorRT-LLM have them, ``channels`` as vLLM.
    """

    measure = "elements that differ"

    def __init__(
        self,
        op: str,
        channels: int,
        requests: int,
        device: torch.device | str,
        *,
        order: str,
        places: int = 8,
        layers: int = 2,
    ) -> None:
        self.channels, self.requests, self.places = channels, requests, places
        arena, slots = Arena(), requests + 2
        inner = {"taps": (BEFORE, 1), "channels": (1, channels)}[order]
        shape, each = (layers, requests, channels, BEFORE), channels * BEFORE
        strides = ((requests * each + 8), each, *inner)
        arena.add_typed("windows", BF16, *shape, strides=strides)
        strides = (slots * places * channels + 64, places * channels, channels, 1)
        arena.add_typed("ring", BF16, layers, slots, places, channels, strides=strides)
        arena.add_strided("position", (requests,), (1,))
        arena.add_strided("slot", (requests,), (2,))
        super().__init__(f"{op} of {order}", op, arena, {}, torch.device(device))

    def shape_inputs(self, generator: torch.Generator) -> None:
        t, device = self.tensors, self.buffer.device
        slots = t["ring"].shape[1]
        order = torch.randperm(slots, generator=generator, device=device)[: self.requests]
        rows = torch.arange(self.requests, device=device)
        order[rows % 4 == 1] = -1
        position = (rows * 5 + int(order[0])) % (2 * self.places)
        position[rows % 6 == 2] = (1 << 30) + 1
        t["slot"].copy_(order)
        t["position"].copy_(position)

    def reference(self, **arguments: Any) -> None:
        getattr(reference, self.op)(**arguments)

    def pick(self) -> Mapping[str, Any]:
        sizes = {"requests": self.requests, "tokens": 1}
        return {"channels": self.channels, **sizes, "dtype": "bf16", "splits": 1}


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device,
) -> Iterator[ConvCase | MoveCase]:
    """The cases that a cell must pass. Moves have no tokens: cells of one token have them."""
    channels = geometry["channels"]
    yield ConvCase(
        *("apart, no ring larger than it must be", channels, requests, tokens, device),
        places=tokens + BEFORE,
        bias=("", "bf16", "fp32")[(requests + tokens) % 3],
    )
    yield ConvCase(
        *("in place, a slice of packed rows", channels, requests, tokens, device),
        in_place=True,
        wide=128,
        places=(8 if tokens <= 5 else MOST_RING, 16, tokens + BEFORE + 1)[requests % 3],
        bias=("fp32", "", "bf16")[(requests + tokens) % 3],
    )
    if tokens == 1:
        layers = max(1, min(3, MOVED_BYTES // (requests * channels * 16)))
        for op in ("import_", "export"):
            for order in ("taps", "channels"):
                yield MoveCase(op, channels, requests, device, order=order, layers=layers)


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments with the op's
    name under ``op``, and the storage that must not change.
    """

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        case = ConvCase("declined", 1024, 3, 4, device, bias="fp32", wide=64)
        case.refill(1)
        arguments = {**case.arguments()}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, {**arguments, "op": "conv_verify"}, case.buffer

    for name in ("x", "weight", "ring", "out"):
        yield changed(f"{name} is float32", **{name: lambda t: t.float()})
        yield changed(f"{name} has fewer channels", **{name: _fewer_channels})
        yield changed(f"{name} is two bytes off", **{name: _two_bytes_off})
        if device.type == "cuda":
            yield changed(f"{name} is on the CPU", **{name: lambda t: t.cpu()})
    for name in ("position", "slot"):
        yield changed(f"{name} is int64", **{name: lambda t: t.long()})
        yield changed(f"{name} is short", **{name: lambda t: t[:-1]})
        yield changed(f"{name} has two dimensions", **{name: lambda t: t[:, None]})
    yield changed("the bias is short", bias=lambda t: t[:-1])
    yield changed("the bias is float64", bias=lambda t: t.double())
    yield changed("x has a row less", x=lambda t: t[:-1])
    yield changed("out has a token less", out=lambda t: t[:, :-1])
    yield changed("the ring has six places for four tokens", ring=lambda t: t[:, :6])
    yield changed("the ring has 65 places", ring=lambda t: _ring_of(t, 65))
    yield changed("out lies a row behind x", x=lambda t: t[:2], out=_one_row_on)
    nine = dict.fromkeys(("x", "out"), lambda t: torch.cat([t, t, t[:, :1]], 1))
    yield changed("9 tokens", **nine)
    for op in ("import_", "export"):
        wrong: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
            *(("windows", lambda t: t.float()), ("windows", lambda t: t[..., :2])),
            *(("windows", lambda t: t[:, :-1]), ("ring", lambda t: t[:1])),
            *(("ring", lambda t: t[..., :-8]), ("slot", lambda t: t.long())),
            *(("ring", lambda t: t[:, :, :3]), ("position", lambda t: t[:-1])),
        )
        for name, change in wrong:
            moved = MoveCase(op, 1024, 3, device, order="taps")
            moved.refill(1)
            arguments = {**moved.arguments(), name: change(moved.arguments()[name])}
            yield f"{op}: {name} changed", {**arguments, "op": op}, moved.buffer


def _fewer_channels(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-8] if tensor.dim() == 2 else tensor[..., :-8]


def _two_bytes_off(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return wide[1:].view(tensor.shape)


def _ring_of(tensor: torch.Tensor, places: int) -> torch.Tensor:
    shape = (tensor.shape[0], places, tensor.shape[2])
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _one_row_on(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[1:]

"""Inputs and expectations of ``gdn_replay`` for tests, certification and benchmarks.

All buffers of a case, inputs included, lie in one storage with guard bytes between them; the pools
are strided views with a guard behind each slot, q, k, v are columns of one packed row, a and b of
another, ``slot`` is a column of a wider table. A comparison covers the storage whole: what the op
must write within a bound, every other byte bit for bit, and so the zeros of padding rows. ``out``,
the dead rows of the records and every input of a padding row hold NaN beforehand, so that a value
that is not written, or is read although dead, shows; integers of padding rows hold garbage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from specplan.kernels.case import Comparison
from specplan.kernels.gdn_replay import reference
from specplan.plans import gdn_replay as plan
from specplan.plans.gdn_replay import HEAD, WINDOW
from torch import Tensor

#: Elements behind each slot of a pool; keeps the 16-byte alignment that the kernels ask for.
GUARD = 64
#: Guard bytes between buffers, and their alignment.
GUARD_BYTES = 256
STATE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
POOLS = ("state", "rec_u", "rec_k", "rec_G")
#: What the integers of padding rows hold: no count, and out of bounds wherever it were added.
GARBAGE = -(1 << 30)
#: About how many bytes the buffers of cells with a common graph take; certification holds three
#: more copies of one case's buffers, and one of each.
GRAPH_BYTES = 1 << 30
#: Rows of ``materialize`` in a cell of several tokens. It does not depend on the tokens, and its
#: calls resolve to the cells of one token: those run it on all their requests. Also how many of its
#: rows go to another slot; the others are folded in place.
FEW_ROWS = 8
#: Bytes of float32 states that are compared at a time, so that they stay in L2.
CHUNK = 16 << 20

#: buffer -> (atol, rtol, where it comes from): against the float32 reference, on the inputs of
#: ``fill``. "Seen" is the measured error over the bound: on an H200, over all compiled
#: functions, 4 geometries, 2..4 tokens and all history lengths, 0.52 at most in bf16 and 0.40 in
#: fp32; by buffer with the matrix-form reference on a CPU, and for rec_G and the bf16 state with an
#: earlier version on an H200.
BOUNDS = {
    "out": (1e-3, 8e-3, "bf16 operands q^ and k^; seen 0.33"),
    "rec_u": (6e-3, 1.6e-2, "contract section 2; seen 0.42"),
    "rec_k": (1e-6, 2.0**-7, "one unit in the last place of bf16; seen 1 unit"),
    "rec_G": (1e-5, 1e-5, "contract section 2; seen 0.03"),
    "state": (6e-3, 1.6e-2, "contract section 2, one rounding to bf16; seen 0.28"),
}
#: An fp32 checkpoint is folded with two-term operands: 2^-17 of a sum of 16 products of size 1.
FP32_STATE_BOUND = (1e-4, 1e-4, "two-term operands; seen 0.04")
#: One head in so many decays by about e^-100 per token: exponentials of sums would overflow.
STRONG = 8


@dataclass(frozen=True)
class Step:
    """The tensors of one verify step, by the names of the op's arguments; the row integers of the
    other ops; the memory that backs them; and the storage that holds all of it.
    """

    tensors: dict[str, Tensor]
    integers: dict[str, Tensor]
    backing: dict[str, Tensor]
    buffer: Tensor
    spans: tuple[tuple[int, int], ...]

    def over(self, buffer: Tensor) -> Step:
        """The same step in another storage of the same size, with the same strides."""

        def moved(tensor: Tensor) -> Tensor:
            start = tensor.storage_offset()
            whole = buffer.view(tensor.dtype)
            return whole.as_strided(tensor.shape, tensor.stride(), start)

        return Step(
            {name: moved(tensor) for name, tensor in self.tensors.items()},
            {name: moved(tensor) for name, tensor in self.integers.items()},
            {name: moved(tensor) for name, tensor in self.backing.items()},
            buffer,
            self.spans,
        )

    def clone(self) -> Step:
        """The same step in memory of its own, with the same strides."""
        return self.over(self.buffer.clone())


def allocate(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    dtype: str,
    device: torch.device | str,
    spare: int = 1,
    pools: bool = True,
) -> Step:
    """Buffers of one step for ``requests`` rows and ``spare`` slots more; without ``pools`` only
    what the cursor ops take.
    """
    HK, HV = geometry["key_heads"], geometry["value_heads"]
    slots, bf16, fp32, int32 = requests + spare, torch.bfloat16, torch.float32, torch.int32
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "slots": (int32, (requests, 3)),
        "rows": (int32, (requests, 4)),
        "hist_len": (int32, (slots,)),
        "bank": (int32, (slots,)),
    }
    inner = {
        "state": (STATE_DTYPES[dtype], (HV, HEAD, HEAD)),
        "rec_u": (bf16, (HV, 2, WINDOW, HEAD)),
        "rec_k": (bf16, (HK, 2, WINDOW, HEAD)),
        "rec_G": (fp32, (HV, 2, WINDOW)),
    }
    if pools:
        shapes |= {
            "qkv": (bf16, (requests, tokens, (2 * HK + HV) * HEAD)),
            "ba": (bf16, (requests, tokens, 2 * HV)),
            "A_log": (fp32, (HV,)),
            "dt_bias": (fp32, (HV,)),
            "out": (bf16, (requests, tokens, HV, HEAD)),
        }
        shapes |= {
            name: (kind, (slots, prod(shape) + GUARD)) for name, (kind, shape) in inner.items()
        }
    starts, size = {}, GUARD_BYTES
    for name, (kind, shape) in shapes.items():
        starts[name] = size
        end = size + prod(shape) * kind.itemsize + GUARD_BYTES
        size = -(-end // GUARD_BYTES) * GUARD_BYTES
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    backing, spans = {}, []
    for name, (kind, shape) in shapes.items():
        end = starts[name] + prod(shape) * kind.itemsize
        spans.append((starts[name], end))
        whole = buffer.view(kind)
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        backing[name] = whole.as_strided(shape, strides, starts[name] // kind.itemsize)
    tensors = {name: backing[name] for name in ("hist_len", "bank")}
    tensors["slot"] = backing["slots"][:, 1]
    rows = ("n_acc", "src", "dst", "count")
    integers = {name: backing["rows"][:, i] for i, name in enumerate(rows)}
    if pools:
        width = HK * HEAD
        tensors |= {name: backing[name] for name in ("A_log", "dt_bias", "out")}
        tensors["q"] = backing["qkv"][..., :width].unflatten(-1, (HK, HEAD))
        tensors["k"] = backing["qkv"][..., width : 2 * width].unflatten(-1, (HK, HEAD))
        tensors["v"] = backing["qkv"][..., 2 * width :].unflatten(-1, (HV, HEAD))
        tensors["a"], tensors["b"] = backing["ba"][..., HV:], backing["ba"][..., :HV]
        for name, (_, shape) in inner.items():
            tensors[name] = backing[name][:, : prod(shape)].unflatten(1, shape)
        tensors = {name: tensors[name] for name in reference_arguments("verify")}
    return Step(tensors, integers, backing, buffer, tuple(spans))


def fill(
    step: Step,
    generator: torch.Generator,
    seed: int,
    tokens: int,
    *,
    lengths: Tensor | None = None,
    padding: bool = True,
    poison: bool = True,
) -> None:
    """Draw new inputs in place. History lengths cover 0..W over the slots unless given; every
    fifth row is padding. ``poison`` puts NaN into dead records and the inputs of padding rows.

    Magnitudes follow what the recurrence itself produces: |S| about 0.3, |u| about 1, unit keys,
    decays between 0.05 and 1 per token, heads with distinct A_log.
    """
    t, backing, device = step.tensors, step.backing, step.buffer.device
    requests, slots = t["slot"].shape[0], t["hist_len"].shape[0]
    step.buffer.view(torch.int32).random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    row = torch.arange(slots, device=device)
    order = torch.randperm(slots, generator=generator, device=device)[:requests]
    if padding:
        order[row[:requests] % 5 == 2] = -1
    t["slot"].copy_(order)
    t["hist_len"].copy_((row * 5 + seed) % (WINDOW + 1) if lengths is None else lengths)
    t["bank"].random_(0, 2, generator=generator)
    step.integers["n_acc"].random_(0, tokens + 1, generator=generator)
    step.integers["n_acc"].masked_fill_(order < 0, GARBAGE)
    if "state" not in t:
        return
    src = row[:requests]
    i = step.integers
    i["src"].copy_(src)
    i["dst"].copy_(torch.where(src < slots - requests, requests + src, src))
    i["count"].copy_((t["hist_len"][:requests] - src % 3).clamp(min=0))
    if requests > 3:
        i["dst"][0], i["src"][1], i["dst"][2] = 0, -1, -1
        i["count"][1:3] = GARBAGE

    backing["qkv"].normal_(generator=generator)
    backing["ba"].normal_(generator=generator)
    heads = t["A_log"].shape[0]
    t["A_log"].copy_(torch.linspace(-3.0, 1.0, heads, device=device))
    t["dt_bias"].normal_(-1.0, 0.5, generator=generator)
    if heads >= STRONG:
        t["A_log"][STRONG - 1 :: STRONG] = 4.0
        t["dt_bias"][STRONG - 1 :: STRONG] = 2.0
    backing["state"].normal_(0.0, 0.3, generator=generator)
    backing["rec_u"].normal_(generator=generator)
    backing["rec_k"].normal_(generator=generator)
    t["rec_k"].copy_(reference.unit(t["rec_k"], torch.float32))
    backing["rec_G"].uniform_(0.0, 0.5, generator=generator)
    t["rec_G"].copy_(-t["rec_G"].cumsum(-1))
    if poison:
        at = torch.arange(WINDOW, device=device)
        this = torch.arange(2, device=device)[None, :, None] == t["bank"][:, None, None]
        dead = ~(this & (at < t["hist_len"][:, None, None]))  # [slots, 2, W]
        for name in ("rec_u", "rec_k"):
            t[name].masked_fill_(dead[:, None, ..., None], float("nan"))
        t["rec_G"].masked_fill_(dead[:, None], float("nan"))
        for name in ("qkv", "ba"):
            backing[name].masked_fill_((order < 0)[:, None, None], float("nan"))
    t["out"].fill_(float("nan"))


def make_step(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    dtype: str,
    device: torch.device | str = "cpu",
    seed: int = 0,
    lengths: Tensor | None = None,
    padding: bool = True,
    spare: int = 1,
    poison: bool = True,
) -> Step:
    """A step with its inputs drawn; see ``allocate`` and ``fill``."""
    step = allocate(geometry, requests, tokens, dtype, device, spare)
    generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + requests * 8 + tokens)
    fill(step, generator, seed, tokens, lengths=lengths, padding=padding, poison=poison)
    return step


def full_lengths(slots: int, tokens: int, device: torch.device | str) -> Tensor:
    """History lengths at which every row of a step of ``tokens`` tokens commits."""
    return WINDOW - torch.arange(slots, device=device) % tokens


@dataclass(frozen=True)
class Expected:
    """A step as it must be afterwards, and what of it the op may have written, as a mask over each
    tensor that it writes.
    """

    step: Step
    written: Mapping[str, Tensor]


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device | str,
) -> Iterator[GdnCase]:
    """The cases that a cell must pass. ``splits`` changes the plan, not the expected result.

    ``verify`` with padding rows, on rows that are drawn once for many cells (``drawn.py``): even
    seeds have history lengths 0..W, odd seeds rows that all commit. The cursor ops on every row.
    ``materialize`` on every row where tokens is 1, else on a few.
    """

    def case(name: str, op: str, **options: Any) -> GdnCase:
        return GdnCase(name, op, geometry, requests, tokens, splits, dtype, device, **options)

    yield case("every history length, and all rows full", "verify", drawn_once=True)
    yield case("cursors", "advance")
    yield case("cursors", "reset")
    rows = requests if tokens == 1 else min(requests, FEW_ROWS)
    yield case("prefixes", "materialize", rows=rows)


class GdnCase:
    """One call of one op (see :class:`specplan.kernels.case.Case`).

    Parameters
    ----------
    rows
        Rows of the call, where they are not the cell's requests.
    full
        Whether the histories are so long that every row commits; for odd seeds, unless given.
    drawn_once
        Whether ``verify``'s rows are those that cells of this kind share.
    """

    def __init__(
        self,
        name: str,
        op: str,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        device: torch.device | str,
        *,
        rows: int | None = None,
        full: bool | None = None,
        drawn_once: bool = False,
    ) -> None:
        self.name, self.op, self.drawn_once = name, op, drawn_once
        self.geometry, self.requests, self.tokens = dict(geometry), requests, tokens
        self.splits, self.dtype, self.full = splits, dtype, full
        rows = requests if rows is None else rows
        spare = min(rows, FEW_ROWS) if op == "materialize" else 1
        pools = op in ("verify", "materialize")
        self.step = allocate(geometry, rows, tokens, dtype, device, spare, pools)
        self.generator = torch.Generator(device=device)
        self.cursors = plan.Cursors(
            self.step.tensors["hist_len"], self.step.tensors["bank"], **geometry, dtype=dtype
        )
        if pools:
            self.pool = plan.Pool(self.cursors, *(self.step.tensors[name] for name in POOLS))
        ends = [0, *(end for _, end in self.step.spans)]
        starts = [*(start for start, _ in self.step.spans), self.step.buffer.numel()]
        gaps = [torch.arange(a, b) for a, b in zip(ends, starts, strict=True)]
        self.gaps = torch.cat(gaps).to(device)
        if drawn_once:
            # What lies between the tensors is given once; every comparison has it.
            self.generator.manual_seed(rows)
            words = self.buffer.view(torch.int32)
            words.random_(-(1 << 31), (1 << 31) - 1, generator=self.generator)

    @property
    def buffer(self) -> Tensor:
        return self.step.buffer

    def arguments(self) -> Mapping[str, Any]:
        t = {**self.step.tensors, **self.step.integers}
        if self.op == "verify":
            names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "slot", "out")
            return {"pool": self.pool, **{n: t[n] for n in names}, "splits": self.splits}
        if self.op == "materialize":
            return {"pool": self.pool, **{n: t[n] for n in ("src", "dst", "count")}}
        named: dict[str, Any] = {"cursors": self.cursors, "slot": t["slot"]}
        if self.op == "advance":
            named |= {"n_acc": t["n_acc"], "tokens": self.tokens}
        return named

    def compiled_arguments(self) -> tuple[Tensor | int | float, ...]:
        """The compiled function's arguments in its order, without the plan's launch integers."""
        names = reference_arguments(self.op)
        extra = {"verify": (HEAD**-0.5,), "advance": (self.tokens,)}.get(self.op, ())
        t = {**self.step.tensors, **self.step.integers}
        return (*(t[name] for name in names), *extra)

    def pick(self) -> Mapping[str, Any]:
        sizes = {"requests": self.requests, "tokens": self.tokens, "splits": self.splits}
        return {**self.geometry, **sizes, "dtype": self.dtype}

    def refill(self, seed: int) -> None:
        self.generator.manual_seed(seed)
        if self.drawn_once:
            from specplan.kernels.gdn_replay import drawn

            draw = seed % drawn.DRAWS
            kind = (self.geometry, self.tokens, self.dtype, self.buffer.device)
            self.draw = drawn.drawn(*kind, draw)
            self.placed = drawn.place(self.step, self.draw, self.generator)
            return
        slots = self.step.tensors["hist_len"].shape[0]
        full = seed % 2 == 1 if self.full is None else self.full
        lengths = full_lengths(slots, self.tokens, self.buffer.device) if full else None
        fill(self.step, self.generator, seed, self.tokens, lengths=lengths)

    def snapshot(self) -> Tensor:
        return self.buffer.clone()

    def restore(self, snapshot: Tensor) -> None:
        self.buffer.copy_(snapshot)

    def expect(self) -> Expected:
        if self.drawn_once:
            from specplan.kernels.gdn_replay import drawn

            after = drawn.expected(self.step, self.draw, self.placed)
        else:
            after = self.step.clone()
            run_reference(self.op, after, self.tokens)
        return Expected(after, written_by(self.op, self.step, self.tokens))

    def compare(self, expected: Expected) -> Iterator[Comparison]:
        got, want = self.step, expected.step
        stray = (got.buffer[self.gaps] != want.buffer[self.gaps]).sum()
        for name, memory in got.backing.items():
            written = expected.written.get(name)
            if written is None:
                stray = stray + (_words(memory) != _words(want.backing[name])).sum()
                continue
            # A mask says the same of all elements of a row, so words may be as wide as these let.
            wide = name != "rec_G"
            differs = _words(memory, wide) != _words(want.backing[name], wide)
            per_word = memory.numel() // differs.numel()
            inner = written[0].numel() // per_word
            mine = differs[:, :inner] if name in POOLS else differs.flatten(1)
            stray = stray + differs.sum() - mine.sum()
            kept = ~(written[..., :1] if wide else written).flatten(1)
            stray = stray + (mine.unflatten(1, (kept.shape[1], -1)) & kept[..., None]).sum()
        yield Comparison("all that must not change", "words that differ", stray, 0)
        for name, written in expected.written.items():
            atol, rtol, source = bound_of(name, self.dtype)
            a, b = got.tensors[name], want.tensors[name]
            # The dimensions that the mask tells apart in front, so that it takes whole rows.
            first = {"state": (0,), "out": (0, 1)}.get(name, (0, 2, 3))
            order = (*first, *(i for i in range(a.dim()) if i not in first))
            a, b, mask = a.permute(order), b.permute(order), written.permute(order)
            while mask.dim() > len(first):
                mask = mask[..., 0]
            at = mask.nonzero()
            some = max(1, CHUNK // (4 * prod(a.shape[len(first) :])))
            # A byte that must not change is the other comparison's.
            shares = [
                _share(a[tuple(i.T)], b[tuple(i.T)], atol, rtol).max()
                for i in at.split(some)
                if len(i)
            ]
            error = torch.stack([*shares, torch.zeros((), device=a.device)]).max()
            measure = f"|error| / ({atol:g} + {rtol:g} |value|)"
            yield Comparison(name, measure, error, 1.0, source)

    def identical(self, snapshot: Tensor) -> Tensor:
        return (self.buffer.view(torch.int32) != snapshot.view(torch.int32)).sum()


def bound_of(name: str, dtype: str) -> tuple[float, float, str]:
    """(atol, rtol, source) of a buffer that an op writes, by the dtype of the state."""
    return FP32_STATE_BOUND if name == "state" and dtype == "fp32" else BOUNDS[name]


#: What cells have in common that share the rows that ``verify`` runs on.
SHARED_BY = ("problem", "dtype", "tokens")


def cells_a_graph(geometry: Mapping[str, int], requests: int, tokens: int, dtype: str) -> int:
    """How many cells of this size certification may keep the buffers of."""
    element = STATE_DTYPES[dtype].itemsize
    each = requests * geometry["value_heads"] * (HEAD * HEAD * element + 4 * WINDOW * HEAD)
    return min(16, max(1, GRAPH_BYTES // (each * (2 if tokens == 1 else 1))))


def _share(a: Tensor, b: Tensor, atol: float, rtol: float) -> Tensor:
    """|a - b| / (atol + rtol |b|), in float32."""
    a, b = a.float(), b.float()
    return (a - b).abs_().div_(b.abs().mul_(rtol).add_(atol))


def _words(memory: Tensor, wide: bool = False) -> Tensor:
    if wide:
        return memory.view(torch.int64)
    return memory.view(torch.int16 if memory.element_size() == 2 else torch.int32)


def reference_arguments(op: str) -> tuple[str, ...]:
    """The tensors of an op's reference, and of its compiled function, in their order."""
    cursors = ("hist_len", "bank", "slot")
    return {
        "verify": ("q", "k", "v", "a", "b", "A_log", "dt_bias", *POOLS, *cursors, "out"),
        "advance": (*cursors, "n_acc"),
        "reset": cursors,
        "materialize": (*POOLS, "bank", "src", "dst", "count"),
    }[op]


def run_reference(op: str, step: Step, tokens: int) -> None:
    """An op's reference on a step, in place; verify's by the exact matrix form."""
    named = {**step.tensors, **step.integers}
    arguments: list[Any] = [named[name] for name in reference_arguments(op)]
    if op == "advance":
        arguments.append(tokens)
    getattr(reference, {"verify": "verify_exact"}.get(op, op))(*arguments)


def written_by(op: str, step: Step, tokens: int) -> dict[str, Tensor]:
    """Masks over the float tensors of what an op must write, from the cursors before it. The
    cursors are integers, and compared bit for bit.
    """
    t = step.tensors
    if op == "materialize":
        src, dst, state = step.integers["src"], step.integers["dst"], t["state"]
        hit = torch.zeros(state.shape[0] + 1, dtype=torch.bool, device=dst.device)
        hit[torch.where((src >= 0) & (dst >= 0), dst, -1).long()] = True
        return {"state": hit[:-1, None, None, None].expand(state.shape)}
    if op != "verify":
        return {}
    hist_len, bank, slot = t["hist_len"], t["bank"], t["slot"]
    active = torch.zeros(hist_len.shape[0] + 1, dtype=torch.bool, device=slot.device)
    active[slot.long()] = True  # padding rows hit the last
    active = active[:-1]
    commits = active & (hist_len + tokens > WINDOW)
    start = torch.where(commits, 0, hist_len)[:, None, None]
    into = torch.where(commits, 1 - bank, bank)[:, None, None]
    row = torch.arange(WINDOW, device=slot.device)
    here = torch.arange(2, device=slot.device)[:, None] == into
    rows = active[:, None, None] & here & (row >= start) & (row < start + tokens)
    masks = dict.fromkeys(("rec_u", "rec_k"), rows[:, None, :, :, None])
    masks |= {"rec_G": rows[:, None], "state": commits[:, None, None, None]}
    written = {name: mask.expand(t[name].shape) for name, mask in masks.items()}
    # The zeros of a padding row are exact: the comparison bit for bit has them.
    rows = (slot >= 0)[:, None, None, None]
    return {"out": rows.expand(t["out"].shape), **written}


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments with the op's
    name under ``op``, and the storage that must not change.
    """
    geometry = {"key_heads": 2, "value_heads": 8}

    def changed(op: str, what: str, **changes: Any) -> tuple[str, dict[str, Any], Tensor]:
        case = GdnCase("declined", op, geometry, 3, 4, 1, "bf16", device)
        case.refill(1)
        arguments = {**case.arguments()}
        if op == "verify":
            arguments["splits"] = None
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return f"{op}: {what}", {**arguments, "op": op}, case.buffer

    def pools(**changes: Any) -> Any:
        """The pool with some tensors changed, past the checks of its constructor."""

        def change(pool: plan.Pool) -> plan.Pool:
            other = plan.Pool(pool.cursors, *pool.tensors[:4])
            named = dict(zip((*POOLS, "hist_len", "bank"), pool.tensors, strict=True))
            other.tensors = tuple(changes.get(n, lambda t: t)(t) for n, t in named.items())
            return other

        return change

    rows = {"verify": ("slot",), "advance": ("slot", "n_acc"), "reset": ("slot",)}
    rows["materialize"] = ("src", "dst", "count")
    for op, names in rows.items():
        for name in names:
            yield changed(op, f"{name} is int64", **{name: lambda t: t.long()})
            yield changed(op, f"{name} has two dimensions", **{name: lambda t: t.unsqueeze(1)})
            if len(names) > 1 or op == "verify":
                yield changed(op, f"{name} is short", **{name: lambda t: t[:-1]})
            if device.type == "cuda":
                yield changed(op, f"{name} is on the CPU", **{name: lambda t: t.cpu()})
    steps = ("q", "k", "v", "a", "b", "out")
    for name in steps:
        yield changed("verify", f"{name} is float32", **{name: lambda t: t.float()})
        yield changed("verify", f"{name} has a row less", **{name: lambda t: t[:-1]})
        yield changed("verify", f"{name} has a token less", **{name: lambda t: t[:, :-1]})
        yield changed("verify", f"{name} has a head less", **{name: lambda t: t[:, :, :-1]})
        if device.type == "cuda":
            yield changed("verify", f"{name} is on the CPU", **{name: lambda t: t.cpu()})
    for name in ("q", "k", "v", "out"):
        narrow = {name: lambda t: t[..., :-1]}
        yield changed("verify", f"heads of {name} are narrow", **narrow)
    for name in ("A_log", "dt_bias"):
        yield changed("verify", f"{name} is bf16", **{name: lambda t: t.bfloat16()})
        yield changed("verify", f"{name} has a head less", **{name: lambda t: t[:-1]})
    yield changed("verify", "q is 2 bytes off", q=_two_bytes_off)
    for name in ("q", "k", "v", "out"):
        odd = {name: lambda t: _wider(t, 1, 4)}
        yield changed("verify", f"tokens of {name} are no multiple of 16 bytes apart", **odd)
        yield changed("verify", f"{name} is not dense", **{name: lambda t: _wider(t, 3, 1)})
    for name in ("a", "b"):
        yield changed("verify", f"{name} is not dense", **{name: lambda t: _wider(t, 2, 1)})
    yield changed("verify", "9 tokens", **dict.fromkeys(steps, _nine_tokens))
    yield changed("verify", "splits are 3", splits=3)
    yield changed("verify", "scale is a text", scale="1")
    for op in ("verify", "materialize"):
        for name in ("rec_u", "rec_k", "rec_G", "state", "hist_len", "bank"):
            if name == "hist_len" and op == "materialize":
                continue
            wider = {name: lambda t: t.double()}
            yield changed(op, f"{name} is float64", pool=pools(**wider))
            if name not in ("hist_len", "bank", "rec_G"):
                off = {name: lambda t: _wider(t, 0, 1)}
                yield changed(
                    op, f"slots of {name} are no multiple of 16 bytes apart", pool=pools(**off)
                )
            if name not in ("hist_len", "bank"):
                sparse = {name: lambda t: _wider(t, 1, 8)}
                yield changed(op, f"{name} is not dense", pool=pools(**sparse))
            fewer = {name: lambda t: t[:-1]}
            yield changed(op, f"{name} has a slot less", pool=pools(**fewer))
    for tokens in (0, -1, 9):
        yield changed("advance", f"tokens is {tokens}", tokens=tokens)


def _two_bytes_off(tensor: Tensor) -> Tensor:
    wide = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return wide[1:].view(tensor.shape)


def _wider(tensor: Tensor, at: int, by: int) -> Tensor:
    """A tensor of that shape whose stride ``at`` is ``by`` elements more than the dense one."""
    strides, dense = [0] * tensor.dim(), 1
    for i in reversed(range(tensor.dim())):
        dense += by if i == at else 0
        strides[i] = dense
        dense *= tensor.shape[i]
    memory = torch.zeros(dense, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, strides)


def _nine_tokens(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor, tensor[:, :1]], dim=1)

"""Input cases of ``accept``: prefixes of every length, context and padding requests, every output
given and left out, forced counts, logits whose order is special.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from specplan.kernels.accept.reference import accept
from specplan.kernels.argmax.cases import (
    DTYPES,
    FEW_ROWS,
    VOCABULARIES,
    fill_logits,
    fill_special,
    row_stride,
)
from specplan.kernels.argmax.reference import columns
from specplan.kernels.case import Arena, ExactCase
from specplan.plans.accept import FORCE_DRAWN, IDS, POOL, WINDOW

_INDEX = {"int32": torch.int32, "int64": torch.int64}
#: Axes of positions.
AXES = 3


class AcceptCase(ExactCase):
    """One accept call of ``contexts`` context requests and the others of ``tokens`` tokens.

    ``outputs`` gives everything that may be left out, ``wide`` with int64 where there is a choice;
    ``numbers`` are the call's scalars.
    """

    def __init__(
        self,
        name: str,
        vocabulary_k: int,
        device: torch.device,
        *,
        requests: int,
        tokens: int,
        dtype: str,
        splits: int,
        width: int = 0,
        contexts: int = 0,
        outputs: bool = True,
        wide: bool = False,
        special: bool = False,
        gap: int = 8,
        shift: int = 0,
        **numbers: Any,
    ) -> None:
        self.geometry = {"vocabulary_k": vocabulary_k}
        self.requests, self.tokens, self.contexts = requests, tokens, contexts
        self.dtype, self.splits, self.special, self.width = dtype, splits, special, width
        generations = requests - contexts
        rows = contexts + generations * tokens
        arena = Arena()
        if dtype in IDS:
            stride = 2 if wide else 1
            arena.add_typed("target", _INDEX[dtype], rows, strides=(stride,))
        else:
            kind = DTYPES[dtype]
            step = row_stride(rows, width, kind.itemsize, gap)
            arena.add_typed("target", kind, rows, width, strides=(step, 1), shift=shift)
        arena.add("accepted", requests, tokens, row_stride=tokens + 3 * wide)
        arena.add("n_acc", requests)
        arena.add_typed("scratch", torch.int64, rows + requests + 2)
        if tokens > 1 and generations:
            arena.add("drafts", generations + 1, tokens - 1, row_stride=tokens + 1)
        if outputs:
            index = _INDEX["int64" if wide else "int32"]
            for vector in ("next_token", "kv_lens", "n_override"):
                arena.add(vector, requests + 1)
            arena.add_typed("rows", index, requests + 1)
            if contexts:
                arena.add("last_row", contexts)
            held = (AXES if wide else 1, rows - 1 if wide and rows > 1 else rows)
            arena.add_typed("positions", index, *held, strides=(held[1] + 5, 1))
            out = (held[0], requests)
            arena.add_typed("positions_out", index, *out, strides=(requests + 2, 1))
            arena.add_typed("slot", torch.int32, requests, strides=(1 + wide,))
            arena.add("hist_len", requests + 3)
            arena.add("bank", requests + 3)
        if numbers.get("force_mode") == FORCE_DRAWN:
            arena.add_typed("pool", torch.float32, POOL)
            arena.add_typed("counter", torch.int64, 1)
        integers = {"splits": splits, **({"contexts": contexts} if contexts else {}), **numbers}
        super().__init__(name, "accept", arena, integers, device)

    def shape_inputs(self, generator: torch.Generator) -> None:
        t, device = self.tensors, self.buffer.device

        def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator, device=device)

        target = t["target"]
        if target.dim() == 1:
            target.random_(0, 250_000, generator=generator)
        else:
            width = 16 // target.element_size()
            vectors = (self.width + width - 1) // width
            chunk = (vectors + self.splits - 1) // self.splits * width
            (fill_special if self.special else fill_logits)(target, generator, chunk)
        t["scratch"].zero_()
        generations = self.requests - self.contexts
        if "drafts" in t:
            # The target's tokens up to a length that is drawn, then another or no token.
            ids = columns(target) if target.dim() == 2 else target.long()
            verified = ids[self.contexts :].view(generations, self.tokens)[:, :-1]
            length = drawn(0, self.tokens, generations)[:, None]
            place = torch.arange(self.tokens - 1, device=device)[None]
            other = torch.where(drawn(0, 2, generations, 1) == 0, -1, verified + 1)
            drafts = torch.where(place == length, other, verified)
            t["drafts"][:generations] = drafts.int()
        if "kv_lens" in t:
            t["kv_lens"].random_(self.tokens, 1 << 20, generator=generator)
            count = drawn(-1, self.tokens + 2, self.requests + 1)
            some = drawn(0, 4, self.requests + 1) == 0
            t["n_override"].copy_(torch.where(some, count, -1))
            t["positions"].random_(0, 1 << 20, generator=generator)
            # Slots in another order, some of no state, one of no slot that there is.
            order = torch.randperm(self.requests + 3, generator=generator, device=device)
            none = drawn(0, 5, self.requests) == 0
            t["slot"].copy_(torch.where(none, -1, order[: self.requests]))
            if self.requests > 4:
                t["slot"][3] = self.requests + 3
            t["hist_len"].random_(0, WINDOW + 1, generator=generator)
            t["bank"].random_(0, 2, generator=generator)
        if "last_row" in t:
            # Of a row that there is, and of one that is not.
            rows = self.contexts + generations * self.tokens
            t["last_row"].random_(-1, rows + 2, generator=generator)
        if "pool" in t:
            t["pool"].uniform_(generator=generator)
            t["counter"].random_(0, 1 << 33, generator=generator)

    def reference(self, **arguments: Any) -> None:
        accept(**arguments)

    def pick(self) -> Mapping[str, Any]:
        return {
            **self.geometry,
            "requests": self.requests,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "splits": self.splits,
        }


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device,
) -> Iterator[AcceptCase]:
    """The cases that a cell must pass."""
    vocabulary_k = geometry["vocabulary_k"]
    whole, shard = VOCABULARIES.get(vocabulary_k, (0, 0))
    few = requests * tokens <= 64

    def case(name: str, **more: Any) -> AcceptCase:
        return AcceptCase(
            *(name, vocabulary_k, device),
            requests=requests, tokens=tokens, dtype=dtype, splits=splits,
            **{"width": whole, "special": few, **more},
        )  # fmt: skip

    yield case("context requests and all outputs", contexts=requests // 3, wide=True, extra=1)
    rows = requests * tokens
    if rows > FEW_ROWS and rows & (rows - 1):
        return
    yield case("tokens and counts alone", width=shard, outputs=False, fill=1)
    yield case(
        "counts that are drawn, rows that are not aligned",
        width=max(0, vocabulary_k * 1024 - 5), gap=3, shift=1,
        force_mode=FORCE_DRAWN, force_base=2, force_frac=0.5, fill=1,
    )  # fmt: skip
    yield case("the same count for all", width=shard, force_mode=1, force_base=3, wide=True)
    if requests <= FEW_ROWS:
        yield case("context requests alone", contexts=requests, width=shard, force_mode=1)


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        case = AcceptCase(
            *("declined", 32, device),
            requests=6, tokens=4, dtype="bf16", splits=1, width=64, contexts=2,
            force_mode=FORCE_DRAWN, force_base=1, force_frac=0.5,
        )  # fmt: skip
        case.refill(1)
        arguments = {**case.arguments(), "splits": None}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer

    yield changed("the target is float16", target=lambda t: t.half())
    yield changed("the target has one row less", target=lambda t: t[:-1])
    yield changed("the target has no columns", target=lambda t: t[:, :0])
    yield changed("the target is transposed", target=lambda t: t.T.contiguous().T)
    for name in ("accepted", "n_acc", "drafts", "next_token", "kv_lens", "n_override", "slot"):
        yield changed(f"{name} is int64", **{name: lambda t: t.long()})
        yield changed(f"{name} is float32", **{name: lambda t: t.float()})
        yield changed(f"{name} is short", **{name: lambda t: t[:3]})
        yield changed(f"{name} has one dimension more", **{name: lambda t: t[None]})
    for name in ("hist_len", "bank", "last_row"):
        yield changed(f"{name} is int64", **{name: lambda t: t.long()})
    yield changed("bank has other slots", bank=lambda t: t[:-1])
    yield changed("last_row is short", last_row=lambda t: t[:1])
    yield changed("rows are float32", rows=lambda t: t.float())
    yield changed("rows are short", rows=lambda t: t[:3])
    yield changed("positions_out is short", positions_out=lambda t: t[:, :3])
    yield changed("drafts of another length", drafts=lambda t: t[:, :2])
    yield changed("drafts are none", drafts=None)
    yield changed("scratch is int32", scratch=lambda t: t.int())
    yield changed("scratch is short", scratch=lambda t: t[:20])
    yield changed("cursors without slots", slot=None)
    yield changed("a draw without a pool", pool=None)
    yield changed("a short pool", pool=lambda t: t[:-1])
    yield changed("a draw without a counter", counter=None)
    yield changed("a force mode that there is not", force_mode=3)
    yield changed("a fill that there is not", fill=2)
    yield changed("contexts is negative", contexts=-1)
    yield changed("more contexts than requests", contexts=7)
    yield changed("contexts is not an integer", contexts=1.5)
    yield changed("splits of no cell", splits=7777)
    if device.type == "cuda":
        yield changed("drafts are on the CPU", drafts=lambda t: t.cpu())
        yield changed("scratch is on the CPU", scratch=lambda t: t.cpu())

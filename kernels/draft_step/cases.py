"""Input cases of ``draft_step``: the first, a middle and the last draft, padding requests, every
output given and left out, pages that there are and are not, logits whose order is special.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from specplan.kernels.argmax.cases import (
    DTYPES,
    FEW_ROWS,
    VOCABULARIES,
    fill_logits,
    fill_special,
    row_stride,
)
from specplan.kernels.case import Arena, ExactCase
from specplan.kernels.draft_step.reference import draft_step
from specplan.plans.accept import IDS

_INDEX = {"int32": torch.int32, "int64": torch.int64}
#: Axes of positions; columns of a block table; entries of a map of token ids.
AXES, COLUMNS, MAPPED = 3, 5, 1000
#: Tokens of a page and of a group, and what table entries are divided by.
PAGE, GROUP, SCALE = 32, 4, 48
_PAGED = ("page_of_row", "within_of_row", "cache_slot", "group_slot")


class DraftStepCase(ExactCase):
    """One draft_step call.

    ``outputs`` gives everything that may be left out, ``wide`` with int64 where there is a choice,
    and with positions of one axis or three.
    """

    def __init__(
        self,
        name: str,
        vocabulary_k: int,
        device: torch.device,
        *,
        requests: int,
        dtype: str,
        splits: int,
        width: int = 0,
        step: int = 0,
        drafted: int = 3,
        outputs: bool = True,
        mapped: str = "",
        wide: bool = False,
        special: bool = False,
        gap: int = 8,
        shift: int = 0,
        page_size: int = PAGE,
        group: int = GROUP,
        scale: int = SCALE,
    ) -> None:
        self.geometry = {"vocabulary_k": vocabulary_k}
        self.requests, self.dtype, self.splits = requests, dtype, splits
        self.width, self.special, self.page_size, self.scale = width, special, page_size, scale
        arena, more = Arena(), 1 + wide
        if dtype in IDS:
            arena.add_typed("target", _INDEX[dtype], requests, strides=(more,))
        else:
            kind = DTYPES[dtype]
            stride = row_stride(requests, width, kind.itemsize, gap)
            arena.add_typed("target", kind, requests, width, strides=(stride, 1), shift=shift)
            arena.add_typed("scratch", torch.int64, 2 * requests + 1)
        index = _INDEX["int64" if wide else "int32"]
        arena.add_typed("input_ids", index, requests)
        arena.add("drafts", requests + wide, drafted, row_stride=drafted + 2)
        if mapped:
            arena.add_typed("d2t", _INDEX[mapped], width or MAPPED)
        integers = {"splits": splits, "step": step}
        if outputs:
            arena.add("next_new_tokens", requests + 1, drafted + 1, row_stride=drafted + 4)
            for vector in ("next_token", "kv_lens"):
                arena.add(vector, requests + 1)
            axes = AXES if wide else 1
            arena.add_typed("positions", index, axes, requests, strides=(requests + 3, 1))
            arena.add_typed("slot", torch.int32, requests, strides=(more,))
            table = (COLUMNS + 2, 1) if wide else (1, requests + 2)
            arena.add_typed("block_table", torch.int32, requests, COLUMNS, strides=table)
            for vector in ("request_of_row", "position_of_row", "visible_of_row"):
                arena.add(vector, requests + 1)
            for vector in _PAGED:
                of = index if vector.endswith("_of_row") else torch.int64
                arena.add_typed(vector, of, requests + 1)
            integers |= {"page_size": page_size, "group": group, "scale": scale}
        super().__init__(name, "draft_step", arena, integers, device)

    def shape_inputs(self, generator: torch.Generator) -> None:
        t, device = self.tensors, self.buffer.device
        target = t["target"]
        if target.dim() == 1:
            # Beyond the map of ids, too.
            target.random_(-2, MAPPED + 50, generator=generator)
        else:
            width = 16 // target.element_size()
            vectors = (self.width + width - 1) // width
            chunk = (vectors + self.splits - 1) // self.splits * width
            (fill_special if self.special else fill_logits)(target, generator, chunk)
            t["scratch"].zero_()
        if "d2t" in t:
            t["d2t"].random_(-1000, 200_000, generator=generator)
        if "kv_lens" not in t:
            return
        # Requests without tokens, at the end of a page or group, and past the table.
        lens = t["kv_lens"]
        lens.random_(-1, (COLUMNS + 1) * self.page_size, generator=generator)
        edge = torch.randint(0, COLUMNS + 1, lens.shape, generator=generator, device=device)
        at_edge = torch.randint(0, 3, lens.shape, generator=generator, device=device) == 0
        lens.copy_(torch.where(at_edge, edge * self.page_size - 1, lens))
        t["positions"].random_(0, 1 << 20, generator=generator)
        if t["positions"].dtype is torch.int64:
            # A step across the lower word.
            t["positions"][0, 0] = (1 << 32) - 1
        none = torch.randint(0, 4, (self.requests,), generator=generator, device=device) == 0
        slots = torch.randperm(self.requests, generator=generator, device=device)
        t["slot"].copy_(torch.where(none, -1, slots))
        t["block_table"].random_(-3 * self.scale, 4096 * self.scale, generator=generator)

    def reference(self, **arguments: Any) -> None:
        draft_step(**arguments)

    def pick(self) -> Mapping[str, Any]:
        return {
            **self.geometry,
            "requests": self.requests,
            "tokens": 1,
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
) -> Iterator[DraftStepCase]:
    """The cases that a cell must pass."""
    vocabulary_k = geometry["vocabulary_k"]
    whole, shard = VOCABULARIES.get(vocabulary_k, (0, 0))

    def case(name: str, **more: Any) -> DraftStepCase:
        return DraftStepCase(
            *(name, vocabulary_k, device),
            requests=requests, dtype=dtype, splits=splits,
            **{"width": whole, "special": requests <= 64, **more},
        )  # fmt: skip

    yield case("a middle draft and all outputs", step=1, mapped="int32", wide=True)
    if requests > FEW_ROWS and requests & (requests - 1):
        return
    yield case("tokens alone", width=shard, outputs=False)
    yield case(
        "the last draft, rows that are not aligned",
        width=max(0, vocabulary_k * 1024 - 5), gap=3, shift=1, step=2, mapped="int64",
    )  # fmt: skip
    yield case(
        "the first draft of many, no groups",
        width=shard, drafted=7, page_size=48, group=1, scale=1,
    )  # fmt: skip


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        case = DraftStepCase(
            *("declined", 32, device),
            requests=6, dtype="bf16", splits=1, width=64, step=1, mapped="int32",
        )  # fmt: skip
        case.refill(1)
        arguments = {**case.arguments(), "splits": None}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer

    yield changed("the target is float16", target=lambda t: t.half())
    yield changed("the target has no columns", target=lambda t: t[:, :0])
    yield changed("the target is transposed", target=lambda t: t.T.contiguous().T)
    yield changed("the target has too many columns", target=lambda t: t[:, :1].expand(6, 300_000))
    yield changed("input_ids are short", input_ids=lambda t: t[:5])
    yield changed("input_ids are float32", input_ids=lambda t: t.float())
    yield changed("input_ids are None", input_ids=None)
    for name in (
        *("drafts", "next_new_tokens", "next_token", "kv_lens", "slot", "block_table"),
        *("request_of_row", "position_of_row", "visible_of_row"),
    ):
        yield changed(f"{name} is int64", **{name: lambda t: t.long()})
    for name in ("cache_slot", "group_slot", "scratch"):
        yield changed(f"{name} is int32", **{name: lambda t: t.int()})
    for name in ("page_of_row", "within_of_row", "positions", "d2t"):
        yield changed(f"{name} is float32", **{name: lambda t: t.float()})
    for name in (
        *("drafts", "next_new_tokens", "next_token", "kv_lens", "slot", "block_table", "d2t"),
        *("request_of_row", "position_of_row", "visible_of_row", "page_of_row", "within_of_row"),
        *("cache_slot", "group_slot", "scratch"),
    ):
        yield changed(f"{name} is short", **{name: lambda t: t[:5]})
        yield changed(f"{name} has one dimension more", **{name: lambda t: t[None]})
    yield changed("positions are short", positions=lambda t: t[:, :5])
    yield changed("positions of too many axes", positions=lambda t: t[:1].expand(33, -1))
    yield changed("logits without a scratch", scratch=None)
    yield changed("next_new_tokens has no column for the last draft", next_new_tokens=_narrower)
    yield changed("a row without lengths", kv_lens=None)
    yield changed("pages without a table", block_table=None)
    yield changed("pages without a page size", page_size=None)
    yield changed("a page size below 0", page_size=-1)
    yield changed("a group of 0", group=0)
    yield changed("a group that divides no page", group=5)
    yield changed("a scale of 0", scale=0)
    yield changed("a step below 0", step=-1)
    yield changed("a step past the drafts", step=3)
    yield changed("a step that is not an integer", step=1.5)
    yield changed("no step", step=None)
    yield changed("splits of no cell", splits=7777)
    if device.type == "cuda":
        yield changed("drafts are on the CPU", drafts=lambda t: t.cpu())
        yield changed("scratch is on the CPU", scratch=lambda t: t.cpu())


def _narrower(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-1]

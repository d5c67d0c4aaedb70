"""Input cases of ``gather``: destinations that begin anywhere, fewer drafts than tokens, arbitrary
position lists, repeated slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from specplan.kernels.case import Arena, ExactCase
from specplan.kernels.gather.reference import gather

DESTINATIONS = ("input_ids", "draft_tokens", "pos_offsets", "kv_offsets")


class GatherCase(ExactCase):
    """One gather call of ``requests`` x ``tokens`` from S slots into four flat buffers."""

    def __init__(
        self,
        name: str,
        geometry: Mapping[str, int],
        device: torch.device,
        *,
        requests: int,
        tokens: int,
        drafts: int,
        begins: tuple[int, int, int, int] = (0, 0, 0, 0),
        tail: int = 3,
        slots: int | None = None,
        out_of_range: bool = False,
    ) -> None:
        size = slots if slots is not None else requests + 5
        self.geometry = dict(geometry)
        self.size = size
        self.out_of_range = out_of_range
        counts = (requests * tokens, requests * drafts, requests * tokens, requests)
        arena = Arena()
        arena.add("store_next_new_tokens", geometry["next"], size, 1)
        arena.add("store_next_draft", size, geometry["draft"])
        arena.add("store_lens", size)
        arena.add("slots", requests + 1)
        arena.add("pos_indices", requests * tokens + 2)
        for label, begin, count in zip(DESTINATIONS, begins, counts, strict=True):
            arena.add(label, begin + count + tail)
        integers = {f"{n}_begin": b for n, b in zip(DESTINATIONS, begins, strict=True)}
        integers.update(requests=requests, tokens=tokens, drafts=drafts)
        super().__init__(name, "gather", arena, integers, device)

    def shape_inputs(self, generator: torch.Generator) -> None:
        low, high = (-2, self.size + 2) if self.out_of_range else (0, self.size)
        for name in ("slots", "pos_indices"):
            self.tensors[name].random_(low, high, generator=generator)

    def reference(self, **arguments: Any) -> None:
        gather(**arguments)

    def pick(self) -> Mapping[str, Any]:
        return {
            **self.geometry,
            "requests": self.integers["requests"],
            "tokens": self.integers["tokens"],
        }


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device,
) -> Iterator[GatherCase]:
    """The cases that a cell must pass."""
    most = min(tokens - 1, geometry["draft"])
    fresh = max(0, 256 - requests) % 17
    yield GatherCase(
        "behind requests without a previous step",
        geometry,
        device,
        requests=requests,
        tokens=tokens,
        drafts=most,
        begins=(fresh * tokens, fresh * (tokens - 1), fresh * tokens, fresh),
        tail=0,
    )
    yield GatherCase(
        "scattered begins, half the drafts, repeated slots",
        geometry,
        device,
        requests=requests,
        tokens=tokens,
        drafts=most // 2,
        begins=(37, 5, 11, 3),
        slots=max(1, requests // 2),
    )
    yield GatherCase(
        "indices outside the stores, no drafts",
        geometry,
        device,
        requests=requests,
        tokens=tokens,
        drafts=0,
        out_of_range=True,
    )


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """
    geometry = {"next": 8, "draft": 7}

    def fresh() -> GatherCase:
        case = GatherCase(
            "declined", geometry, device, requests=4, tokens=4, drafts=3, tail=0, slots=8
        )
        case.refill(1)
        return case

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        case = fresh()
        arguments = dict(case.arguments())
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer

    case = fresh()
    for name, tensor in case.tensors.items():
        yield changed(f"{name} is int64", **{name: lambda t: t.long()})
        yield changed(f"{name} is float32", **{name: lambda t: t.float()})
        if device.type == "cuda":
            yield changed(f"{name} is on the CPU", **{name: lambda t: t.cpu()})
        yield changed(f"{name} has one dimension more", **{name: lambda t: t.unsqueeze(0)})
        if tensor.dim() == 1 and name != "store_lens":
            yield changed(f"{name} is short", **{name: lambda t: t[:3]})
    for name in DESTINATIONS:
        yield changed(f"{name} begins below 0", **{f"{name}_begin": -1})
        yield changed(f"{name} begins too far on", **{f"{name}_begin": 1})
    yield changed("a store has other slots", store_lens=lambda t: t[:-1])
    yield changed(
        "a store's last dimension is not 1", store_next_new_tokens=lambda t: t.expand(8, -1, 2)
    )
    yield changed("the draft store is transposed", store_next_draft=lambda t: t.T.contiguous().T)
    yield changed("no tokens", tokens=0)
    yield changed("more tokens than the store is wide", tokens=9)
    yield changed("drafts is negative", drafts=-1)
    yield changed("as many drafts as tokens", drafts=4)
    yield changed("requests is negative", requests=-1)
    yield changed("more requests than any cell", requests=257)
    yield changed("not a tensor", slots=None)
    yield changed("tokens is not an integer", tokens=2.5)

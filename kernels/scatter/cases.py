"""Input cases of ``scatter``: widths narrower and wider than the stores, rows from the middle,
strided rows, lengths past both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from specplan.kernels.case import Arena, ExactCase
from specplan.kernels.scatter.reference import scatter


class ScatterCase(ExactCase):
    """One scatter call: ``rows`` moved of N outputs into S slots.

    Random words fill everything, so the columns at and past a row's accepted length hold values
    that must not come through, and the slots that are not moved hold values that must stay.
    """

    def __init__(
        self,
        name: str,
        geometry: Mapping[str, int],
        device: torch.device,
        *,
        rows: int,
        widths: tuple[int, int, int],
        row_begin: int = 0,
        extra_rows: int = 0,
        extra_slots: int = 5,
        row_gap: int = 0,
        uneven: int = 0,
    ) -> None:
        accepted, following, drafts = widths
        outputs = row_begin + rows + extra_rows
        size = rows + extra_slots
        self.geometry = dict(geometry)
        self.slots = size
        arena = Arena()
        for label, width in (("new_tokens", accepted), ("next_new_tokens", following)):
            arena.add(label, outputs, width, row_stride=width + row_gap)
        arena.add("lens", outputs + uneven)
        arena.add("next_draft_tokens", outputs + 2 * uneven, drafts, row_stride=drafts + row_gap)
        arena.add("slots", rows + 2)
        arena.add("store_new_tokens", geometry["history"], size, 1)
        arena.add("store_next_new_tokens", geometry["next"], size, 1)
        arena.add("store_lens", size)
        arena.add("store_next_draft", size, geometry["draft"])
        super().__init__(name, "scatter", arena, {"row_begin": row_begin, "rows": rows}, device)

    def shape_inputs(self, generator: torch.Generator) -> None:
        lens, slots = self.tensors["lens"], self.tensors["slots"]
        top = self.tensors["new_tokens"].shape[1] + 3
        lens.random_(-1, top, generator=generator)
        order = torch.randperm(self.slots, generator=generator, device=slots.device)
        slots[: self.integers["rows"]] = order[: self.integers["rows"]].int()

    def reference(self, **arguments: Any) -> None:
        scatter(**arguments)

    def pick(self) -> Mapping[str, Any]:
        width = self.tensors["new_tokens"].shape[1]
        return {
            **self.geometry,
            "requests": self.integers["rows"],
            "tokens": max(1, min(width, self.geometry["history"])),
        }


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device,
) -> Iterator[ScatterCase]:
    """The cases that a cell must pass."""
    yield ScatterCase("dense", geometry, device, rows=requests, widths=(tokens, tokens, tokens - 1))
    yield ScatterCase(
        "middle rows, strided, wider next and draft outputs",
        geometry,
        device,
        rows=requests,
        widths=(tokens, geometry["next"] + 3, geometry["draft"] + 2),
        row_begin=3,
        extra_rows=2,
        row_gap=7,
    )
    if tokens == geometry["history"]:
        yield ScatterCase(
            "accepted tokens wider than the store",
            geometry,
            device,
            rows=requests,
            widths=(tokens + 8, tokens, 1),
            row_begin=1,
        )
    if tokens == 2:
        yield ScatterCase(
            "outputs with different numbers of rows",
            geometry,
            device,
            rows=requests,
            widths=(tokens, tokens, 1),
            row_begin=1,
            uneven=1,
        )
    if tokens == 1:
        yield ScatterCase(
            "no columns", geometry, device, rows=requests, widths=(0, 0, 0), extra_slots=0
        )


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """
    geometry = {"history": 8, "next": 8, "draft": 7}

    def fresh() -> ScatterCase:
        case = ScatterCase("declined", geometry, device, rows=4, widths=(4, 4, 3), extra_rows=1)
        case.refill(1)
        return case

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        case = fresh()
        arguments = dict(case.arguments())
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.long()

    def host(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def transposed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.T.contiguous().T

    case = fresh()
    for name, tensor in case.tensors.items():
        yield changed(f"{name} is int64", **{name: wide})
        yield changed(f"{name} is float32", **{name: lambda t: t.float()})
        if device.type == "cuda":
            yield changed(f"{name} is on the CPU", **{name: host})
        yield changed(f"{name} has one dimension more", **{name: lambda t: t.unsqueeze(0)})
        if tensor.dim() == 2:
            yield changed(f"{name} is transposed", **{name: transposed})
            yield changed(f"{name} is flat", **{name: lambda t: t.reshape(-1)})
    yield changed("row_begin is negative", row_begin=-1)
    yield changed("rows is negative", rows=-1)
    yield changed("the rows reach past the outputs", row_begin=2)
    yield changed("one output has too few rows", lens=lambda t: t[:3])
    yield changed("the slot table is short", slots=lambda t: t[:3])
    yield changed("the slot table has two dimensions", slots=lambda t: t.reshape(2, 3))
    yield changed("a store has other slots", store_lens=lambda t: t[:-1])
    yield changed(
        "a store's last dimension is not 1", store_new_tokens=lambda t: t.expand(8, -1, 2)
    )
    yield changed("the store's width is in no problem", store_new_tokens=lambda t: t[:7])
    yield changed("more requests than any cell", rows=257)
    yield changed("not a tensor", new_tokens=None)
    yield changed("rows is not an integer", rows=2.5)

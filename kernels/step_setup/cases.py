"""Input cases of ``step_setup``: uniform and ragged rows, dummies, requests without rows, lengths
that end groups and pages, tables too short and with holes, capacities above the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from specplan.kernels.case import Arena, ExactCase
from specplan.kernels.step_setup.reference import step_setup

INDEX: Mapping[str, torch.dtype] = {"int32": torch.int32, "int64": torch.int64}
#: The optional outputs of one element a row.
OPTIONAL = (
    *("ordinal_of_row", "position_of_row_int64", "length_of_row", "cache_slot", "group_slot"),
)
LONG = ("position_of_row_int64", "cache_slot", "group_slot")
COLUMNS = 9


class StepSetupCase(ExactCase):
    """One setup of ``requests`` requests of ``tokens`` rows, or of ``counts`` rows each."""

    def __init__(
        self,
        name: str,
        geometry: Mapping[str, int],
        device: torch.device,
        *,
        requests: int,
        tokens: int,
        dtype: str = "int32",
        counts: Sequence[int] | None = None,
        capacity: int | None = None,
        page_size: int = 32,
        scale: int | None = None,
        columns: int = COLUMNS,
        outputs: Sequence[str] = OPTIONAL,
        table_out: bool = True,
        work: bool = True,
        strided: bool = False,
    ) -> None:
        self.geometry, self.dtype, self.requests = dict(geometry), dtype, requests
        self.cell_tokens, self.counts, self.columns = tokens, counts, columns
        group = geometry["group"]
        live = requests * tokens if counts is None else sum(counts)
        rows = live if capacity is None else capacity
        arena = Arena()
        arena.add("kv_lens", requests)
        if counts is not None:
            arena.add("seq_lens", requests)
        if strided:
            # A view of every second column of a column-major table.
            arena.add_strided("block_table", (requests, columns), (1, 2 * (requests + 3)))
        else:
            arena.add("block_table", requests, columns, row_stride=columns + 5)
        for label in ("request_of_row", "position_of_row", "visible_of_row"):
            arena.add(label, rows)
        for label in ("page_of_row", "within_of_row"):
            arena.add_strided(label, (rows,), (1,), INDEX[dtype])
        arena.add("first_position", requests)
        for label in outputs:
            if label in LONG:
                arena.add_long(label, rows)
            else:
                arena.add(label, rows)
        if table_out:
            # Rows and columns more than the table has, which must stay as they are.
            arena.add("table_out", requests + 1, columns + 3, row_stride=columns + 4)
        self.histories = requests + 2
        if work:
            arena.add("work", requests + 1, 4)
            arena.add("n_commit", 1)
            arena.add_strided("slots", (requests,), (3 if strided else 1,))
            arena.add("hist_len", self.histories)
            arena.add("bank", self.histories)
        integers: dict[str, int] = {
            "tokens": tokens if counts is None else 0,
            "page_size": page_size,
            "group": group,
        }
        if scale is not None:
            integers["scale"] = scale
        self.page_size = page_size
        super().__init__(name, "step_setup", arena, integers, device)

    def shape_inputs(self, generator: torch.Generator) -> None:
        t, device = self.tensors, self.buffer.device

        def drawn(low: int, high: int, count: int) -> torch.Tensor:
            return torch.randint(low, high, (count,), generator=generator, device=device)

        requests, group = self.requests, self.integers["group"]
        counts = torch.full((requests,), self.integers["tokens"], device=device)
        if self.counts is not None:
            counts = torch.tensor(self.counts, device=device)
            t["seq_lens"].copy_(counts)
        # Lengths anywhere, the last column's end and beyond among them; some that end a page or a
        # group, some dummies, some shorter than the rows.
        reach = self.page_size * self.columns
        lengths = drawn(0, reach + self.page_size, requests) + counts
        kind = drawn(0, 8, requests)
        for at, multiple in ((0, self.page_size), (1, group)):
            ends = lengths // multiple * multiple
            lengths = torch.where(kind == at, ends, lengths)
        lengths = torch.where(kind == 2, 0, lengths)
        lengths = torch.where(kind == 3, counts - 1, lengths)
        t["kv_lens"].copy_(lengths)
        scale = self.integers.get("scale", 1)
        table = drawn(0, 1 << 20, requests * self.columns) * scale
        holes = drawn(0, 9, requests * self.columns)
        table = torch.where(holes == 0, -1, torch.where(holes == 1, -7, table))
        t["block_table"].copy_(table.reshape(requests, self.columns))
        if "slots" in t:
            order = torch.randperm(self.histories, generator=generator, device=device)[:requests]
            outside = drawn(0, 6, requests)
            order = torch.where(outside == 0, -1, order)
            order = torch.where(outside == 1, self.histories, order)
            t["slots"].copy_(order)
            t["hist_len"].copy_(drawn(0, 17, self.histories))
            t["bank"].copy_(drawn(0, 2, self.histories))

    def reference(self, **arguments: Any) -> None:
        step_setup(**arguments)

    def pick(self) -> Mapping[str, Any]:
        return {
            **self.geometry,
            "requests": self.requests,
            "tokens": self.cell_tokens,
            "dtype": self.dtype,
        }


def ragged(requests: int, tokens: int) -> list[int]:
    """Rows of each request, at most ``tokens``: none at the start, in the middle and at the end."""
    counts = [1 + (5 * b) % tokens for b in range(requests)]
    for b in {0, requests // 2, requests - 1}:
        if requests > 3:
            counts[b] = 0
    return counts


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device,
) -> Iterator[StepSetupCase]:
    """The cases that a cell must pass."""
    pages = (4, 32, 64, 128)
    group = geometry["group"]

    def page_of(number: int) -> int:
        size = pages[(requests + tokens + number) % len(pages)]
        return max(size, group)

    yield StepSetupCase(
        *("uniform, as many rows as there are, all outputs", geometry, device),
        requests=requests,
        tokens=tokens,
        dtype=dtype,
        page_size=page_of(0),
        scale=48,
    )
    yield StepSetupCase(
        *("uniform, more rows, no optional output", geometry, device),
        requests=requests,
        tokens=tokens,
        dtype=dtype,
        capacity=requests * tokens + 37,
        page_size=page_of(1),
        outputs=(),
        table_out=False,
        work=False,
        strided=True,
    )
    full = requests * tokens
    yield StepSetupCase(
        *("ragged, some requests without rows, as many as the cell has", geometry, device),
        requests=requests,
        tokens=tokens,
        dtype=dtype,
        counts=ragged(requests, tokens),
        capacity=full,
        page_size=page_of(2),
        scale=2,
        strided=True,
    )
    if tokens == 8:
        counts = [300, *ragged(requests, tokens)[1:]]
        yield StepSetupCase(
            *("a context request, many more rows than the cell has", geometry, device),
            requests=requests,
            tokens=tokens,
            dtype=dtype,
            counts=counts,
            capacity=sum(counts) + full,
            page_size=page_of(3),
            outputs=("cache_slot", "ordinal_of_row"),
        )


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """

    def fresh(**more: Any) -> StepSetupCase:
        case = StepSetupCase(
            *("declined", {"group": 4}, device), requests=6, tokens=4, capacity=30, **more
        )
        case.refill(1)
        return case

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        return changed_of(fresh(), what, **changes)

    def changed_of(
        case: StepSetupCase, what: str, **changes: Any
    ) -> tuple[str, dict[str, Any], torch.Tensor]:
        arguments = dict(case.arguments())
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer

    case = fresh()
    for name, tensor in case.tensors.items():
        yield changed(f"{name} is float32", **{name: lambda t: t.float()})
        other = torch.int32 if tensor.dtype is torch.int64 else torch.int64
        if name not in ("page_of_row",):
            yield changed(f"{name} is {other}", **{name: lambda t, o=other: t.to(o)})
        if device.type == "cuda":
            yield changed(f"{name} is on the CPU", **{name: lambda t: t.cpu()})
        yield changed(f"{name} has one dimension more", **{name: lambda t: t.unsqueeze(0)})
        if name not in ("work", "table_out"):
            yield changed(f"{name} is short", **{name: lambda t: t[:-1]})
        else:
            yield changed(f"{name} is short", **{name: lambda t: t[:5]})
        if tensor.dim() == 1 and name not in ("slots", "n_commit"):
            yield changed(f"{name} has gaps", **{name: lambda t: t.repeat_interleave(2)[::2]})
    yield changed("page_of_row alone is int64", page_of_row=lambda t: t.long())
    yield changed("the table has other requests", block_table=lambda t: t[:-1])
    yield changed("table_out has fewer columns", table_out=lambda t: t[:, :5])
    yield changed("work items are of five numbers", work=lambda t: t.new_empty(7, 5))
    yield changed("work items without slots", slots=None)
    yield changed("work items without a count", n_commit=None)
    yield changed("slots without banks", bank=None)
    yield changed("too few rows", tokens=6)
    yield changed("tokens is negative", tokens=-1)
    yield changed("no tokens and no lists", tokens=0)
    yield changed("tokens and lists", seq_lens=case.tensors["kv_lens"].clone())
    listed = fresh(counts=[4, 0, 4, 4, 4, 0])
    yield changed_of(listed, "a short list of rows", seq_lens=lambda t: t[:-1])
    yield changed("no page size", page_size=0)
    yield changed("pages of part of a group", page_size=6)
    yield changed("no group", group=0)
    yield changed("a group of no problem", group=3)
    yield changed("scale is 0", scale=0)
    yield changed("scale is negative", scale=-2)
    yield changed("window is negative", window=-1)
    yield changed("not a tensor", kv_lens=None)
    yield changed("tokens is not an integer", tokens=2.5)
    yield changed("page_size is beyond 32 bits", page_size=1 << 32)

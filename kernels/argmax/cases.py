"""Input cases of ``argmax``: rows whose answer is special, ties on both sides of a boundary between
two CTAs, rows that are not aligned, everything that may be left out given and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from specplan.kernels.argmax.reference import argmax
from specplan.kernels.case import Arena, ExactCase
from specplan.plans.argmax import LEAST_CLASS, vocabulary_class

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Vocabularies of each class: those of Qwen3-Next and of a model with 248,320, and their shards.
VOCABULARIES: Mapping[int, tuple[int, int]] = {
    32: (31040, 18992),
    64: (62080, 37984),
    128: (124160, 75968),
    256: (248320, 151936),
}
#: Rows of more bytes than this in all share memory: each begins a little behind the one before.
MOST_BYTES = 1 << 26
#: Up to so many rows, and at powers of two, a cell passes all cases; others pass one.
FEW_ROWS = 8


def row_stride(rows: int, columns: int, item: int, gap: int) -> int:
    """Elements from a row to the next."""
    whole = -(-columns // 8) * 8 + gap
    if rows * whole * item <= MOST_BYTES:
        return whole
    return max(8, MOST_BYTES // item // rows // 8 * 8) + gap


def fill_logits(logits: torch.Tensor, generator: torch.Generator, chunk: int) -> None:
    """Random logits; what lies between two rows becomes NaN."""
    storage = torch.as_strided(logits, (reach(logits),), (1,), logits.storage_offset())
    storage.fill_(float("nan"))
    if logits.stride(0) < logits.shape[1]:
        storage.normal_(generator=generator)
    else:
        logits.normal_(generator=generator)


def reach(tensor: torch.Tensor) -> int:
    """Elements from the first of a tensor to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def fill_special(logits: torch.Tensor, generator: torch.Generator, chunk: int) -> None:
    """Rows whose answer is special, each of another kind, over random ones; ``chunk`` is where a
    CTA's columns may end.
    """
    fill_logits(logits, generator, chunk)
    if logits.stride(0) < logits.shape[1]:
        return
    last, inf, nan = logits.shape[1] - 1, float("inf"), float("nan")
    edge = min(chunk, last)
    first = int(torch.randint(0, 13, (), generator=generator, device=logits.device))
    for number, row in enumerate(logits):
        match (number + first) % 13:
            case 0:
                row.fill_(-inf)
            case 1:
                row.fill_(nan)
            case 2:
                row[last], row[edge // 2], row[edge] = -nan, nan, inf
            case 3:
                row.clamp_(max=-1)
                row[edge // 2], row[edge] = -0.0, 0.0
            case 4:
                row.clamp_(max=-1)
                row[edge - 1 if edge else 0], row[edge] = 0.0, -0.0
            case 5:
                row[max(edge - 1, 0) : edge + 1] = 64
            case 6:
                row[edge:] = 64
            case 7:
                row[last] = inf
            case 8:
                row[0] = row[last] = 64
            case 9:
                row.fill_(-2.5)
            case 10:
                row.fill_(-inf)
                row[last] = torch.finfo(logits.dtype).min
            case 11:
                row[0], row[last] = nan, inf
            case _:
                pass


class ArgmaxCase(ExactCase):
    """One argmax call over rows of logits."""

    def __init__(
        self,
        name: str,
        vocabulary_k: int,
        device: torch.device,
        *,
        rows: int,
        columns: int,
        dtype: str,
        splits: int,
        wide_ids: bool = False,
        outputs: bool = True,
        mapped: str = "",
        offset: int = 0,
        special: bool = False,
        gap: int = 8,
        shift: int = 0,
    ) -> None:
        assert vocabulary_class(columns) == vocabulary_k
        kind = DTYPES[dtype]
        self.geometry = {"vocabulary_k": vocabulary_k}
        self.rows, self.columns, self.dtype, self.splits = rows, columns, dtype, splits
        self.special, self.mapped = special, mapped
        arena = Arena()
        stride = row_stride(rows, columns, kind.itemsize, gap)
        arena.add_typed("logits", kind, rows, columns, strides=(stride, 1), shift=shift)
        arena.add_typed("ids", torch.int64 if wide_ids else torch.int32, rows)
        arena.add_typed("scratch", torch.int64, 2 * rows + 1)
        if outputs:
            arena.add_typed("value", kind, rows + 1)
            arena.add_typed("key", torch.int64, rows + 1)
        if mapped:
            arena.add_typed("d2t", getattr(torch, mapped), columns)
        integers = {"splits": splits, **({"offset": offset} if offset else {})}
        super().__init__(name, "argmax", arena, integers, device)

    def shape_inputs(self, generator: torch.Generator) -> None:
        width = 16 // self.tensors["logits"].element_size()
        vectors = (self.columns + width - 1) // width
        chunk = (vectors + self.splits - 1) // self.splits * width
        fill = fill_special if self.special else fill_logits
        fill(self.tensors["logits"], generator, chunk)
        self.tensors["scratch"].zero_()
        if self.mapped:
            self.tensors["d2t"].random_(-1000, 200_000, generator=generator)

    def reference(self, **arguments: Any) -> None:
        argmax(**arguments)

    def pick(self) -> Mapping[str, Any]:
        return {
            **self.geometry,
            "requests": self.rows,
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
) -> Iterator[ArgmaxCase]:
    """The cases that a cell must pass."""
    vocabulary_k, rows = geometry["vocabulary_k"], requests * tokens
    whole, shard = VOCABULARIES[vocabulary_k]

    def case(name: str, columns: int, **more: Any) -> ArgmaxCase:
        return ArgmaxCase(
            *(name, vocabulary_k, device),
            rows=rows, columns=columns, dtype=dtype, splits=splits, **more,
        )  # fmt: skip

    yield case("values and keys of a shard", shard, offset=shard, special=rows <= 64)
    if rows > FEW_ROWS and rows & (rows - 1):
        return
    yield case("int64 ids alone", whole, wide_ids=True, outputs=False, special=rows <= 64)
    yield case(
        "rows that are not aligned, ids of another vocabulary",
        vocabulary_k * 1024 - 5, mapped="int32", gap=3, shift=1, special=rows <= 64,
    )  # fmt: skip
    # The smallest vocabulary of the class; of the first class, fewer columns than CTAs.
    least = vocabulary_k * 512 + 1 if vocabulary_k > LEAST_CLASS else 9
    yield case(
        "the smallest vocabulary of the class",
        least, mapped="int64", wide_ids=True, gap=1, special=rows <= 64,
    )  # fmt: skip


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        case = ArgmaxCase(
            *("declined", 32, device),
            rows=4, columns=1000, dtype="bf16", splits=1, mapped="int32",
        )  # fmt: skip
        case.refill(1)
        arguments = {**case.arguments(), "splits": None}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer

    yield changed("logits are float16", logits=lambda t: t.half())
    yield changed("logits are int32", logits=lambda t: t.int())
    yield changed("logits have one dimension", logits=lambda t: t[0])
    yield changed("logits are transposed", logits=lambda t: t.T.contiguous().T)
    yield changed("logits have no columns", logits=lambda t: t[:, :0])
    yield changed("logits have too many columns", logits=lambda t: t[:, :1].expand(4, 300_000))
    yield changed("ids are float32", ids=lambda t: t.float())
    yield changed("ids are short", ids=lambda t: t[:3])
    yield changed("ids have one dimension more", ids=lambda t: t[None])
    yield changed("ids are None", ids=None)
    yield changed("value is float32", value=lambda t: t.float())
    yield changed("value is short", value=lambda t: t[:3])
    yield changed("key is int32", key=lambda t: t.int())
    yield changed("key is short", key=lambda t: t[:3])
    yield changed("d2t is float32", d2t=lambda t: t.float())
    yield changed("d2t is short", d2t=lambda t: t[:-1])
    yield changed("scratch is int32", scratch=lambda t: t.int())
    yield changed("scratch is short", scratch=lambda t: t[:7])
    yield changed("offset is negative", offset=-1)
    yield changed("offset is not an integer", offset=1.5)
    yield changed("splits of no cell", splits=7777)
    yield changed("more rows than any cell", logits=lambda t: t[:1].expand(9000, -1),
                  ids=torch.zeros(9000, dtype=torch.int32, device=device),
                  scratch=torch.zeros(18000, dtype=torch.int64, device=device),
                  value=None, key=None)  # fmt: skip
    if device.type == "cuda":
        yield changed("ids are on the CPU", ids=lambda t: t.cpu())
        yield changed("scratch is on the CPU", scratch=lambda t: t.cpu())

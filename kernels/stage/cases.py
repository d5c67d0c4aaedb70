"""Input cases of ``stage``: one to sixteen segments of both word sizes, long and short, from words
that others read too; the record in pinned host memory where there is a GPU, and on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from specplan.kernels.case import Arena, Comparison, ExactCase
from specplan.kernels.stage.reference import stage
from specplan.plans.stage import Segments, describe, on_device


class StageCase(ExactCase):
    """Segments of ``sizes`` elements, every third one of int64; ``gaps`` words of the record lie
    before each, or, where that is below 0, it begins inside the one before.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        sizes: Sequence[int],
        *,
        gaps: Sequence[int] = (0,),
        pinned: bool = True,
    ) -> None:
        arena = Arena()
        self.offsets: list[int] = []
        at = 3
        for number, size in enumerate(sizes):
            words = size
            if number % 3 == 2:
                arena.add_long(f"destination_{number}", size)
                words *= 2
            else:
                arena.add(f"destination_{number}", size)
            at = max(0, at + gaps[number % len(gaps)])
            self.offsets.append(at)
            at += words
        self.count = sum(size > 0 for size in sizes)
        words = max(o + 2 * s for o, s in zip(self.offsets, sizes, strict=True)) + 2
        on_host = pinned and device.type == "cuda"
        if on_host:
            self.host = torch.empty(words, dtype=torch.int32, pin_memory=True)
            self.record = torch.utils.dlpack.from_dlpack(on_device(self.host, device.index or 0))
        else:
            self.record = self.host = torch.empty(words, dtype=torch.int32, device=device)
        super().__init__(name, "stage", arena, {}, device)
        self.before = self.host.clone()
        self.segments = self._described(self.tensors)

    def _described(self, tensors: Mapping[str, torch.Tensor]) -> Segments:
        return describe(list(zip(tensors.values(), self.offsets, strict=True)), torch.int32)

    def arguments(self) -> Mapping[str, Any]:
        return {"record": self.record, "segments": self.segments}

    def shape_inputs(self, generator: torch.Generator) -> None:
        if self.record.device.type == "cuda":
            # The host writes at once, and an earlier launch may still read.
            torch.cuda.synchronize(self.record.device)
        own = torch.Generator(device=self.host.device)
        own.manual_seed(generator.initial_seed())
        self.host.random_(-(1 << 31), (1 << 31) - 1, generator=own)
        self.before.copy_(self.host)

    def expect(self) -> torch.Tensor:
        expected = self.buffer.clone()
        stage(self.host, self._described(self.arena.tensors(expected)))
        return expected

    def compare(self, expected: torch.Tensor) -> Iterator[Comparison]:
        yield from super().compare(expected)
        changed = (self.host != self.before).sum().to(self.buffer.device)
        yield Comparison("the record", self.measure, changed, 0)

    def pick(self) -> Mapping[str, Any]:
        return {"segments": 16, "requests": self.count, "tokens": 1}


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device,
) -> Iterator[StageCase]:
    """The cases that a cell must pass."""
    yield StageCase(
        "short segments of pinned memory", device, [1 + 7 * k % 64 for k in range(requests)]
    )
    yield StageCase(
        *("long segments and gaps", device),
        [(255, 256, 257, 1, 700)[(k + requests) % 5] for k in range(requests)],
        gaps=(0, 5, 1),
    )
    yield StageCase(
        *("words that several read, a record on the device", device),
        [33 + k for k in range(requests)],
        gaps=(0, -20),
        pinned=False,
    )


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """

    def fresh() -> StageCase:
        case = StageCase("declined", device, [8, 4, 6, 9], pinned=False)
        case.refill(1)
        return case

    def changed(what: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        case = fresh()
        arguments = dict(case.arguments())
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer

    def moved(segments: Segments, number: int, offset: int) -> Segments:
        offsets = [*segments.offsets[:number], offset, *segments.offsets[number + 1 :]]
        return Segments(segments.views, tuple(offsets), segments.count)

    def viewed(segments: Segments, number: int, view: Any) -> Segments:
        views = [*segments.views[:number], view, *segments.views[number + 1 :]]
        return Segments(tuple(views), segments.offsets, segments.count)

    yield changed("the record is int64", record=lambda t: t.long())
    yield changed("the record has two dimensions", record=lambda t: t.unsqueeze(0))
    yield changed("the record has gaps", record=lambda t: t.repeat_interleave(2)[::2])
    yield changed("the record is short", record=lambda t: t[:20])
    if device.type == "cuda":
        yield changed("the record is on the CPU", record=lambda t: t.cpu())
    yield changed("the record is no tensor", record=None)
    yield changed("the segments are none", segments=None)
    yield changed("the segments are a list", segments=lambda s: list(s.views))
    for number in range(16):
        yield changed(
            f"segment {number} begins below 0", segments=lambda s, n=number: moved(s, n, -1)
        )
        yield changed(
            f"segment {number} ends beyond", segments=lambda s, n=number: moved(s, n, 1 << 20)
        )
    yield changed("an offset beyond 32 bits", segments=lambda s: moved(s, 1, 1 << 32))
    yield changed("a destination of int64", segments=lambda s: viewed(s, 1, s.views[1].long()))
    yield changed("a destination of fp32", segments=lambda s: viewed(s, 1, s.views[1].float()))
    yield changed("a destination with gaps", segments=lambda s: viewed(s, 0, s.views[0][::2]))
    yield changed(
        "a destination of two dimensions", segments=lambda s: viewed(s, 0, s.views[0][None])
    )
    yield changed("a destination that is none", segments=lambda s: viewed(s, 3, None))

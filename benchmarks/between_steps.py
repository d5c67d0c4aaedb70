"""Everything between two decode steps, ours beside the torch ops, in one run: how many launches,
how many nodes of a graph, and how long.

    python benchmarks/between_steps.py --packs packs --out benchmarks/results/between_steps.json

In order: stage (slots, counts, lengths and a step's number: 2 KiB in four segments), step_setup,
rollback.gather (12 layers and their positions), accept from ready tokens with the cursors of
``gdn_replay``, rollback.commit, three times draft_step from ready tokens, scatter; 4 tokens a
request. The model, its logits and their argmax are not in it: their time would hide the rest. The
torch arm is the composed ops of the other benchmarks. Both arms of each op are compared before
anything is timed or counted; launches and nodes are what torch's profiler saw the device do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollback as rollback_bench
import specplan
import step_copies
import torch

import bookkeeping
import measure
from bookkeeping import Work

DRAFTS = 3
#: Words of the record: 2 KiB.
WORDS = 512

Calls = Sequence[Callable[[], object]]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    return parser.parse_args(arguments)


@dataclass
class Books:
    """The work of one place between two steps, but for rollback and scatter."""

    before: Sequence[Work]
    accept: Work
    drafts: Sequence[Work]

    @classmethod
    def of(cls, requests: int, device: torch.device) -> Books:
        tokens = DRAFTS + 1
        accept = bookkeeping.accept_work(requests, tokens, 64, "bf16", device, 1)
        # Tokens in the place of logits: of each row, its argmax.
        accept.tensors["target"] = accept.tensors["target"].argmax(1).int()
        drafts = []
        for step in range(DRAFTS):
            drafts.append(bookkeeping.draft_work(requests, tokens, device, step))
            drafts[-1].numbers["step"] = step
        staged = bookkeeping.stage_work(WORDS, device, 2)
        return cls([staged, bookkeeping.setup_work(requests, tokens, device, 3)], accept, drafts)

    @property
    def works(self) -> list[Work]:
        return [*self.before, self.accept, *self.drafts]

    def torch_calls(self) -> dict[int, Callable[[], None]]:
        """The torch ops of each work, by its place."""
        return {
            at: bookkeeping.torch_call(work, bookkeeping.REPLACED[work.family])
            for at, work in enumerate(self.works)
        }


def commit_in_torch(step: Any, tokens: int) -> None:
    """Which rows go back, and a select and a scatter for each plane."""
    ordinal = torch.arange(tokens, device=step.accepted.device)
    back = ordinal >= step.accepted.clamp(min=1)[:, None]
    step.rejected.copy_(back.reshape(-1))
    step.torch_restore()


def check_rollback(step: Any, tokens: int) -> None:
    """End the program unless both arms leave the planes alike, after all rows were written."""
    before = [plane.clone() for plane in step.planes]
    left = []
    for save, commit in (
        (step.gather, step.commit),
        (step.torch_gather, lambda: commit_in_torch(step, tokens)),
    ):
        for plane, first in zip(step.planes, before, strict=True):
            plane.copy_(first)
        save()
        for plane in step.planes:
            plane[step.long_page, step.long_within] = 7
        commit()
        left.append([plane.clone() for plane in step.planes])
    changed = [not torch.equal(a, b) for a, b in zip(left[0], before, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    if not same or not all(changed):
        raise SystemExit("rollback: the torch ops and ours differ")


def check_scatter(case: Any, calls: Calls) -> None:
    """End the program unless every arm leaves what the reference does."""
    case.refill(5)
    before, expected = case.snapshot(), case.expect()
    for call in calls:
        case.restore(before)
        call()
        if any(bool(each.error > each.bound) for each in case.compare(expected)):
            raise SystemExit("scatter: an arm is not the reference")


def chains(pack: specplan.Pack, requests: int) -> tuple[Calls, Calls]:
    """Our calls and the torch calls of one place between two steps, checked."""
    device, tokens = torch.device("cuda", 0), DRAFTS + 1
    books = Books.of(requests, device)
    rows = rollback_bench.Step(pack, requests * tokens, tokens, 0)
    stored = step_copies.cases("scatter", requests, tokens, device)[0]
    long_slots = step_copies.with_long_slots(stored)

    def ours_of(work: Work) -> Callable[[], object]:
        op, given = getattr(pack, work.family), work.arguments()
        return lambda: op.require(**given)

    ours = [ours_of(work) for work in books.works]
    theirs = list(books.torch_calls().values())
    for work, mine, other in zip(books.works, ours, theirs, strict=True):
        bookkeeping.check(work, {"ours": mine, "torch": other})
    check_rollback(rows, tokens)
    scatters = (
        lambda: pack.scatter.require(**stored.arguments()),
        lambda: step_copies.torch_scatter(long_slots),
    )
    check_scatter(stored, scatters)
    commits = (rows.commit, lambda: commit_in_torch(rows, tokens))
    head, at = len(books.before), len(books.before) + 1
    return (
        [*ours[:head], rows.gather, *ours[head:at], commits[0], *ours[at:], scatters[0]],
        [
            *theirs[:head],
            rows.torch_gather,
            *theirs[head:at],
            commits[1],
            *theirs[at:],
            scatters[1],
        ],
    )


def run(pack: specplan.Pack, requests: int) -> dict[str, Any]:
    row: dict[str, Any] = {"requests": requests, "tokens": DRAFTS + 1}
    for name, calls in zip(("ours", "torch"), chains(pack, requests), strict=True):

        def chain(calls: Calls = calls) -> None:
            for call in calls:
                call()

        row[f"{name}_launches"] = measure.device_work(chain)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        row[f"{name}_nodes"] = measure.device_work(graph.replay)
        row[f"graph_{name}_us"] = measure.graph_times({name: [chain]}, nodes=8)[name]
        row[f"eager_{name}_us"] = measure.eager_times({name: chain})[name]
        row[f"replay_{name}_us"] = measure.eager_times({name: graph.replay})[name]
    return row


def main() -> None:
    chosen = options()
    pack = specplan.load(chosen.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    rows = [run(pack, requests) for requests in chosen.requests]
    print(measure.table(rows))
    measure.write(
        chosen.out,
        "between_steps",
        rows,
        method="launches and nodes: kernels, copies and fills that torch's profiler saw; graph: 8 "
        "chains in a CUDA graph, median of 15 replays, by chain; eager, replay: calls and a wait "
        "for the device, median of 9 rounds of 50",
        seconds=round(time.monotonic() - begin, 1),
    )


if __name__ == "__main__":
    main()

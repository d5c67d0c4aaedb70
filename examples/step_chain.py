"""The bookkeeping of a speculative step as one captured CUDA graph, replayed for twenty steps whose
state is carried, beside a loop over Python's numbers.

    stage -> step_setup -> rollback.gather -> (model) -> accept -> rollback.commit
          -> gdn_replay.advance -> (draft head, draft_step) x K -> scatter

The model is a stand-in: a few torch ops that make logits from tokens and positions, and write the
caches. Between two replays the host rewrites the record alone. Without a GPU the same chain runs on
the references, step by step, and says so::

    python examples/step_chain.py
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import specplan
import torch
from specplan.plans.gdn_replay import Cursors
from specplan.rollback import describe
from specplan.stage import StepRecord

B, T, V, STEPS = 8, 4, 1000, 20  # requests, tokens of each, vocabulary, steps
K = T - 1  # drafts
PAGE, GROUP, COLUMNS, PLANES = 32, 4, 4, 3  # tokens of a page and of a group, pages, sparse layers
SLOTS = B + 5
PADDING, ABORTED = 3, (7, 1)  # a request that there is not; the step in which a request is aborted


class Event:
    """What a CUDA event is where there is nothing to wait for."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class State:
    """Everything that a step reads and writes, on one device."""

    def __init__(self, device: str) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = B * T
        # What the host says of a step.
        self.slot, self.override, self.salt = zeros(B), zeros(B), zeros(1)
        self.table = zeros(B, COLUMNS)
        # What a step leaves to the next.
        self.kv_lens, self.hist_len, self.bank = zeros(B), zeros(SLOTS), zeros(SLOTS)
        self.next_new, self.drafts = zeros(B, T), zeros(B, K)
        # The last page is where padding rows write.
        pages = B * COLUMNS + 1
        self.planes = [zeros(pages, PAGE, 64) for _ in range(PLANES)] + [zeros(pages, PAGE, 3)]
        self.stores = (zeros(T, SLOTS, 1), zeros(T, SLOTS, 1), zeros(SLOTS), zeros(SLOTS, K))
        # What lives within a step.
        self.request, self.position, self.visible = zeros(rows), zeros(1, rows), zeros(rows)
        self.page, self.within, self.first = zeros(rows), zeros(rows), zeros(B)
        self.accepted, self.count, self.last, self.next_row = (
            zeros(B, T),
            zeros(B),
            zeros(B),
            zeros(B),
        )
        self.draft_ids, self.draft_position = zeros(B), zeros(1, B)
        self.old = zeros(rows, 1024, dtype=torch.uint8)
        self.pending = zeros(1)
        self.scratch = zeros(rows + B + 1, dtype=torch.int64)
        self.draft_scratch = zeros(2 * B, dtype=torch.int64)

    def tensors(self) -> list[torch.Tensor]:
        held = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return [*held, *self.planes, *self.stores]


def logits_of(tokens: torch.Tensor) -> torch.Tensor:
    """Logits whose largest is at a token, for each row."""
    column = torch.arange(V, device=tokens.device)
    return (column == tokens[:, None]).to(torch.bfloat16)


def follows(token: Any, position: Any) -> Any:
    """The token that the draft head says comes next: of numbers and of tensors."""
    return (token * 7919 + position * 10473 + 17) % V


def model(s: State) -> torch.Tensor:
    """Write the caches, and make the target's logits: in one of five places not the draft's."""
    tokens, position = s.next_new.reshape(-1).long(), s.position[0].long()
    page = torch.where(s.page < 0, B * COLUMNS, s.page).long()
    for layer, plane in enumerate(s.planes):
        value = (tokens * 31 + position + layer + s.salt).int()
        plane[page, s.within.long()] = value[:, None].expand(-1, plane.shape[2])
    differs = (tokens + position + s.salt) % 5 == 0
    return logits_of((follows(tokens, position) + differs) % V)


def step(ops: Any, s: State, record: StepRecord, layout: Any, planes: Any) -> None:
    """One step; every op raises unless it was launched."""
    assert record.commit(ops.stage)
    s.kv_lens.add_((s.slot >= 0) * T)
    ops.step_setup(
        *(s.kv_lens, s.table, s.request, s.position[0], s.visible, s.page, s.within, s.first),
        tokens=T, page_size=PAGE, group=GROUP,
    )  # fmt: skip
    snapshot = (layout, T, planes, s.page, s.within, s.old, s.pending)
    ops.gather(*snapshot)
    ops.accept(
        *(model(s), s.accepted, s.count, s.scratch, s.drafts), next_token=s.last, rows=s.next_row,
        kv_lens=s.kv_lens, positions=s.position, positions_out=s.draft_position, slot=s.slot,
        n_override=s.override,
    )  # fmt: skip
    ops.commit(*snapshot, s.count)
    ops.advance(Cursors(s.hist_len, s.bank, key_heads=16, value_heads=32), s.slot, s.count, T)
    tokens = s.last
    for j in range(K):
        draft_logits = logits_of(follows(tokens.long(), s.draft_position[0].long()))
        ops.draft_step(
            draft_logits, s.draft_ids, s.drafts, s.draft_scratch, step=j,
            positions=s.draft_position, next_new_tokens=s.next_new, next_token=s.last, slot=s.slot,
        )  # fmt: skip
        tokens = s.draft_ids
    ops.scatter(s.accepted, s.next_new, s.count, s.drafts, s.slot, *s.stores, 0, B)


def packed(pack: Any) -> SimpleNamespace:
    """The pack's ops in the form that raises."""
    return SimpleNamespace(
        stage=pack.stage,
        step_setup=pack.step_setup.require,
        gather=pack.rollback.gather.require,
        accept=pack.accept.require,
        commit=pack.rollback.commit.require,
        advance=pack.gdn_replay.advance.require,
        draft_step=pack.draft_step.require,
        scatter=pack.scatter.require,
    )


def referenced(s: State) -> SimpleNamespace:
    """The references, in the form of the pack's ops."""
    reference = specplan.reference
    saved = [plane.new_zeros(B * T, plane.shape[2]) for plane in s.planes]
    requests = torch.arange(B, dtype=torch.int32).repeat_interleave(T)
    ordinals = torch.arange(T, dtype=torch.int32).repeat(B)

    def stage(record: torch.Tensor, segments: Any) -> bool:
        reference.stage(record, segments)
        return True

    def gather(_l: Any, _t: int, _p: Any, page: Any, within: Any, _o: Any, pending: Any) -> None:
        reference.rollback.gather(s.planes, page, within, saved, pending)

    def commit(
        _l: Any, _t: int, _p: Any, page: Any, within: Any, _o: Any, pending: Any, count: Any
    ) -> None:
        common = (s.planes, page, within, saved, pending)
        reference.rollback.commit(*common, count, requests, ordinals)

    def advance(cursors: Cursors, slot: torch.Tensor, count: torch.Tensor, tokens: int) -> None:
        reference.gdn_replay.advance(*cursors.tensors, slot, count, tokens)

    return SimpleNamespace(
        stage=stage,
        step_setup=reference.step_setup,
        gather=gather,
        accept=reference.accept,
        commit=commit,
        advance=advance,
        draft_step=reference.draft_step,
        scatter=reference.scatter,
    )


def host_values(number: int) -> list[torch.Tensor]:
    """What the host says of a step: slots, counts to override, the step's number, pages."""
    slot, override = [(b * 3 + 1) % SLOTS for b in range(B)], [-1] * B
    slot[PADDING] = -1
    if number == ABORTED[0]:
        override[ABORTED[1]] = 0
    pages = [(c * B + b) for b in range(B) for c in range(COLUMNS)]
    return [torch.tensor(values, dtype=torch.int32) for values in (slot, override, [number], pages)]


class Loop:
    """The same steps over Python's numbers."""

    def __init__(self) -> None:
        self.lens, self.next_new = [0] * B, [[0] * T for _ in range(B)]
        self.hist, self.bank = [0] * SLOTS, [0] * SLOTS
        self.caches: dict[tuple[int, int, int], int] = {}
        self.stored: dict[int, tuple[list[int], list[int], int]] = {}
        self.counts, self.accepted = [0] * B, [[0] * T for _ in range(B)]

    def step(self, number: int) -> None:
        slots, override, _, pages = (values.tolist() for values in host_values(number))
        for b in range(B):
            slot, tokens = slots[b], self.next_new[b]
            real = slot >= 0
            self.lens[b] += T * real
            places = [self.lens[b] - T + t if real else -1 for t in range(T)]
            count, before, own = 0, dict(self.caches), []
            for t, (token, p) in enumerate(zip(tokens, places, strict=True)):
                for layer in range(PLANES + 1):
                    if real:
                        page = pages[b * COLUMNS + p // PAGE]
                        self.caches[layer, page, p % PAGE] = token * 31 + p + layer + number
                own.append((follows(token, p) + ((token + p + number) % 5 == 0)) % V)
                if t == count and (t == 0 or tokens[t] == own[t - 1]):
                    count += 1
            count = count if override[b] < 0 else min(override[b], T)
            kept = max(count, 1)
            for layer in range(PLANES + 1):
                for p in places[kept:] if real else []:
                    at = (layer, pages[b * COLUMNS + p // PAGE], p % PAGE)
                    self.caches[at] = before.get(at, 0)
            token, p = own[kept - 1], places[kept - 1] + 1
            following = [token]
            for _ in range(K):
                token, p = follows(token, p), p + real
                following.append(token)
            if real:
                self.lens[b] += count - T
                commits = self.hist[slot] + T > 16
                self.hist[slot] = count + (0 if commits else self.hist[slot])
                self.bank[slot] ^= commits
                history = [each if t < count else 0 for t, each in enumerate(own)]
                self.stored[slot] = (history, following, count)
            self.counts[b], self.accepted[b], self.next_new[b] = count, own, following

    def compare(self, s: State) -> None:
        """Raise unless the device holds what the loop does."""

        def same(what: str, found: torch.Tensor, wanted: Any) -> None:
            if found.cpu().tolist() != wanted:
                raise AssertionError(f"{what}: {found.cpu().tolist()}, the loop has {wanted}")

        same("counts", s.count, self.counts)
        same("tokens", s.accepted, self.accepted)
        same("next tokens", s.next_new, self.next_new)
        same("drafts", s.drafts, [line[1:] for line in self.next_new])
        same("lengths", s.kv_lens, self.lens)
        same("history lengths", s.hist_len, self.hist)
        same("banks", s.bank, self.bank)
        for slot, (history, following, count) in self.stored.items():
            same("stored tokens", s.stores[0][:, slot, 0], history)
            same("stored next tokens", s.stores[1][:, slot, 0], following)
            same("stored lengths", s.stores[2][slot], count)
            same("stored drafts", s.stores[3][slot], following[1:])
        for layer, plane in enumerate(s.planes):
            wanted = torch.zeros(plane.shape[:2], dtype=torch.int32)
            for (of, page, within), value in self.caches.items():
                if of == layer:
                    wanted[page, within] = value
            # Not of the last page, where padding rows write.
            wanted = wanted[:-1, :, None].expand(-1, -1, plane.shape[2])
            if not torch.equal(plane[:-1].cpu(), wanted):
                raise AssertionError(f"the cache of layer {layer} is not that of the loop")


def run(ops: Any, s: State, record: StepRecord, capture: bool) -> dict[str, int]:
    """Twenty steps, each compared; what happened in them."""
    layout, planes = describe(s.planes)

    def fill(number: int) -> None:
        for target, values in zip(
            (s.slot, s.override, s.salt, s.table.view(-1)), host_values(number), strict=True
        ):
            assert record.append(target, values)

    def once() -> None:
        step(ops, s, record, layout, planes)

    again: Callable[[], None] = once
    if capture:
        # torch's own ops want a first run outside of a capture.
        fill(0)
        once()
        torch.cuda.synchronize()
        for tensor in s.tensors():
            tensor.zero_()
        fill(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        again = graph.replay
    else:
        fill(0)
    loop = Loop()
    seen = {"accepted": 0, "rejected": 0, "commits": 0}
    for number in range(STEPS):
        if number:
            for segment, values in enumerate(host_values(number)):
                assert record.rewrite(segment, values)
        banks = list(loop.bank)
        again()
        record.replayed()
        loop.step(number)
        loop.compare(s)
        seen["accepted"] += sum(loop.counts)
        seen["rejected"] += sum(T - count for count in loop.counts)
        seen["commits"] += sum(a != b for a, b in zip(banks, loop.bank, strict=True))
    return seen


def on_references() -> dict[str, int]:
    """The chain on the CPU, where a launch is a call and a replay is another one."""
    s = State("cpu")
    host = torch.zeros(B * (COLUMNS + 2) + 1, dtype=torch.int32)
    record = StepRecord(
        host.numel(), torch.device("cpu"), host=host, device_view=host, event=Event,
        capturing=lambda: True,
    )  # fmt: skip
    return run(referenced(s), s, record, capture=False)


def on_gpu() -> dict[str, int]:
    """The chain as one graph; candidates run, too."""
    pack = specplan.load(candidates=True)
    pack.prepare()
    s = State("cuda")
    record = StepRecord(B * (COLUMNS + 2) + 1, torch.device("cuda", torch.cuda.current_device()))
    return run(packed(pack), s, record, capture=True)


def main() -> None:
    if torch.cuda.is_available():
        print("one graph a step:", on_gpu())
    else:
        print("no GPU: the same chain on the references, without a graph:", on_references())
    print(f"{STEPS} chained steps are those of the loop")


if __name__ == "__main__":
    main()

"""Requests that join, decode in speculative steps, are preempted and finish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .caches import PAGE, Caches, OutOf
from .drafting import Drafter
from .model import HybridModel
from .ops import LIST, Ops, PackOps, TorchOps


@dataclass
class Request:
    """One completion.

    Attributes
    ----------
    prompt, limit, stop
        Token ids; how many new ones at most; ids that end the completion, which they are part of.
    tokens
        The prompt and what was generated. The caches hold all of these but the last.
    told
        Called with each new batch of tokens.
    """

    number: int
    prompt: list[int]
    limit: int
    stop: frozenset[int] = frozenset()
    told: Callable[[list[int]], None] | None = None
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    done: bool = False
    cancelled: bool = False
    preemptions: int = 0

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]


@dataclass
class Counts:
    """What the engine did so far."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    agreed: int = 0
    prefilled: int = 0
    preempted: int = 0
    finished: int = 0
    cancelled: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Rows:
    """The buffers of a step of one batch size: B requests of T rows, R = B x T."""

    input_ids: torch.Tensor
    drafts: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    request_of_row: torch.Tensor
    position_of_row: torch.Tensor
    visible_of_row: torch.Tensor
    page_of_row: torch.Tensor
    within_of_row: torch.Tensor
    first_position: torch.Tensor
    accepted: torch.Tensor
    n_acc: torch.Tensor
    scratch: torch.Tensor

    @classmethod
    def of(cls, requests: int, tokens: int, columns: int, device: torch.device) -> Rows:
        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = requests * tokens
        return cls(
            ints(requests, tokens),
            ints(requests, max(1, tokens - 1)),
            *(ints(requests), ints(requests), ints(requests, columns)),
            *(ints(rows) for _ in range(5)),
            ints(requests),
            ints(requests, tokens),
            ints(requests),
            ints(rows + requests + 1, dtype=torch.int64),
        )


class Engine:
    """Continuous batching over one model.

    Parameters
    ----------
    tokens
        Rows of a request in a step: the token that is known and ``tokens - 1`` guesses.
    ops
        Who computes what lies between the matrix products: the references unless given. A
        :class:`PackOps` that lacks a step's cells is refused here, with what it lacks.
    slots, pages
        Requests that run at a time, and pages of 32 tokens that they share.
    batches
        Batch sizes that steps are padded to.
    """

    def __init__(
        self,
        model: HybridModel,
        drafter: Drafter,
        *,
        tokens: int = 4,
        slots: int = 8,
        pages: int = 256,
        batches: Sequence[int] = (1, 2, 4, 8),
        state_dtype: str = "fp32",
        ops: Ops | None = None,
    ) -> None:
        self.model, self.drafter, self.tokens = model, drafter, tokens
        self.batches = sorted(batches)
        self.caches = Caches(model.sizes, slots, pages, model.device, state_dtype)
        self.ops = ops or TorchOps()
        if isinstance(self.ops, PackOps):
            holes = self.ops.holes(model.sizes, self.batches, tokens, state_dtype)
            if holes:
                raise ValueError("the pack does not hold the steps:\n  " + "\n  ".join(holes))
        self.columns = -(-LIST // PAGE)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counts()
        #: The longest context of the step under way.
        self.longest = 0
        self._rows: dict[int, Rows] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._next = 0

    # Requests

    def submit(
        self,
        prompt: Sequence[int],
        limit: int,
        stop: Iterable[int] = (),
        told: Callable[[list[int]], None] | None = None,
    ) -> Request:
        """Queue a completion. ValueError for one that never fits."""
        if not prompt:
            raise ValueError("the prompt is empty")
        wrong = [t for t in prompt if not 0 <= t < self.model.sizes.vocabulary]
        if wrong:
            raise ValueError(f"token {wrong[0]} is not in 0..{self.model.sizes.vocabulary - 1}")
        if limit < 1:
            raise ValueError(f"at most {limit} new tokens; at least 1")
        length = len(prompt) + limit + self.tokens
        most = min(LIST, (self.caches.pages.count - 1) * PAGE)
        if length > most:
            raise ValueError(
                f"{len(prompt)} tokens and {limit} new ones take a context of {length}, at most "
                f"{most} here"
            )
        request = Request(self._next, list(prompt), limit, frozenset(stop), told)
        request.tokens = list(prompt)
        self._next += 1
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now; its slot and pages are free from here on."""
        if request.done:
            return
        request.cancelled = request.done = True
        self.counts.cancelled += 1
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._leave(request)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.busy:
            self.step()

    # A step

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, and verify one step of all that run."""
        start = time.perf_counter()
        self._admit()
        self._make_room()
        if self.running:
            batch = next(size for size in self.batches if size >= len(self.running))
            rows = self._rows_of(batch)
            self._fill(rows)
            self._launch(batch, rows)
            self._take(rows)
            self.counts.steps += 1
        self.counts.seconds += time.perf_counter() - start

    def _launch(self, batch: int, rows: Rows) -> None:
        """The step, from its graph once there is one. A step moves states, so the first of a batch
        size runs by itself, which also warms up what a capture must find warm.
        """
        if batch in self._graphs:
            self._graphs[batch].replay()
            return
        self.forward(rows)
        if self.ops.captures and self.model.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.forward(rows)
            self._graphs[batch] = graph

    def _rows_of(self, batch: int) -> Rows:
        if batch not in self._rows:
            self._rows[batch] = Rows.of(batch, self.tokens, self.columns, self.model.device)
        return self._rows[batch]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batches[-1]:
            request = self.waiting[0]
            try:
                self._join(request)
            except OutOf:
                if not self.running:
                    raise
                return
            self.waiting.popleft()
            self.running.append(request)

    def _join(self, request: Request) -> None:
        """Prefill all tokens but the last, which the first step runs."""
        length = len(request.tokens) - 1
        self._grow(request, length + self.tokens)
        try:
            request.slot = self.caches.slots.take()
        except OutOf:
            self._give_pages(request)
            raise
        if length:
            ids = torch.tensor(request.tokens[:-1], device=self.model.device)
            _, cache = self.model.prefill(ids, None)
            self.caches.take_over(cache, length, request.slot, request.pages)
            self.counts.prefilled += length
        else:
            self.caches.clear(request.slot)

    def _grow(self, request: Request, length: int) -> None:
        """Pages for so many tokens; :class:`OutOf`, and none taken, if they are not there."""
        more = -(-length // PAGE) - len(request.pages)
        if more > len(self.caches.pages.left):
            raise OutOf(f"{more} pages are needed, {len(self.caches.pages.left)} are free")
        request.pages += [self.caches.pages.take() for _ in range(more)]

    def _give_pages(self, request: Request) -> None:
        for page in request.pages:
            self.caches.pages.give(page)
        request.pages = []

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._give_pages(request)
        self.caches.slots.give(request.slot)
        request.slot = -1

    def _make_room(self) -> None:
        """Pages for the step's rows; the request that came last has to make room for the others,
        and starts again from its tokens later.
        """
        for request in list(self.running):
            while request in self.running:
                try:
                    self._grow(request, len(request.tokens) - 1 + self.tokens)
                    break
                except OutOf:
                    last = self.running[-1]
                    self._leave(last)
                    last.preemptions += 1
                    self.counts.preempted += 1
                    self.waiting.appendleft(last)

    def _fill(self, rows: Rows) -> None:
        batch, width = rows.input_ids.shape
        ids = torch.zeros((batch, width), dtype=torch.int32)
        drafts = torch.full((batch, max(1, width - 1)), -1, dtype=torch.int32)
        lens, slots = torch.zeros(batch, dtype=torch.int32), torch.full((batch,), -1)
        table = torch.full((batch, self.columns), -1, dtype=torch.int32)
        for number, request in enumerate(self.running):
            guesses = self.drafter.draft(request.number, request.tokens, width - 1)
            row = [request.tokens[-1], *guesses]
            ids[number, : len(row)] = torch.tensor(row)
            drafts[number, : len(guesses)] = torch.tensor(guesses, dtype=torch.int32)
            lens[number] = len(request.tokens) - 1 + width
            slots[number] = request.slot
            table[number, : len(request.pages)] = torch.tensor(request.pages)
            self.counts.drafted += len(guesses)
        self.longest = int(lens.max())
        for ours, given in (
            *((rows.input_ids, ids), (rows.drafts, drafts), (rows.kv_lens, lens)),
            *((rows.slots, slots), (rows.table, table)),
        ):
            ours.copy_(given)

    def forward(self, rows: Rows) -> None:
        """The step itself: what a graph holds."""
        ops, caches, model = self.ops, self.caches, self.model
        batch, width = rows.input_ids.shape
        ops.step_setup(
            kv_lens=rows.kv_lens,
            block_table=rows.table,
            request_of_row=rows.request_of_row,
            position_of_row=rows.position_of_row,
            visible_of_row=rows.visible_of_row,
            page_of_row=rows.page_of_row,
            within_of_row=rows.within_of_row,
            first_position=rows.first_position,
            tokens=width,
            page_size=PAGE,
            group=1,
        )
        positions = rows.position_of_row.view(batch, width)
        hidden = model.embed(rows.input_ids)
        rotary = model.rotary(hidden, positions.clamp(min=0))
        lists = torch.arange(ops.list_of(self.longest), device=hidden.device, dtype=torch.int32)
        lists = torch.where(lists <= rows.position_of_row[:, None], lists, -1)
        for number, layer in model.layers():
            if number in caches.pools:
                mixer, mixed = layer.linear_attn, model.mix(layer, hidden)
                weight = mixer.conv1d.weight.squeeze(1)
                qkv = ops.convolve(number, caches.rings[number], mixed.qkv, weight, rows)
                core = ops.recur(caches.pools[number], mixed, qkv, mixer, rows)
                hidden = model.unmix(layer, hidden, core, mixed.z)
                continue
            found = model.attend(layer, hidden, rotary)
            place = (rows.page_of_row.clamp(min=0).long(), rows.within_of_row.long())
            caches.k[number][place] = found.k.flatten(0, 1)
            caches.v[number][place] = found.v.flatten(0, 1)
            k_cache, v_cache = caches.heads_first(number)
            q = found.q.flatten(0, 1).contiguous()
            out = torch.empty_like(q)
            ops.attend(
                q=q,
                k_cache=k_cache,
                v_cache=v_cache,
                block_table=rows.table,
                selected_tokens=lists,
                request_indices=rows.request_of_row,
                out=out,
                tokens=width,
                softmax_scale=model.sizes.head_dim**-0.5,
                output_gate=found.gate.flatten(0, 1).contiguous(),
            )
            hidden = model.unattend(layer, hidden, out.view(batch, width, *out.shape[1:]))
        ops.accept(
            target=model.logits(hidden),
            accepted=rows.accepted,
            n_acc=rows.n_acc,
            scratch=rows.scratch,
            drafts=rows.drafts if width > 1 else None,
            slot=rows.slots,
            hist_len=caches.hist_len,
            bank=caches.bank,
        )

    def _take(self, rows: Rows) -> None:
        accepted, counts = rows.accepted.tolist(), rows.n_acc.tolist()
        for number, request in enumerate(list(self.running)):
            new = accepted[number][: counts[number]]
            self.counts.agreed += counts[number] - 1
            room = request.limit - len(request.generated)
            new = new[:room]
            ends = [i for i, token in enumerate(new) if token in request.stop]
            if ends:
                new = new[: ends[0] + 1]
            request.tokens += new
            self.counts.tokens += len(new)
            request.done = bool(ends) or len(new) == room
            if request.told is not None:
                request.told(new)
            if request.done:
                self.counts.finished += 1
                self._leave(request)


def generate(engine: Engine, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """The completions of some prompts, run together."""
    requests = [engine.submit(prompt, limit) for prompt in prompts]
    engine.run()
    return [request.generated for request in requests]


def by_the_models_own_code(
    model: HybridModel, prompt: Sequence[int], limit: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy decoding by transformers, a token at a time; the tokens and the logits of each."""
    ids: Any = torch.tensor(list(prompt), device=model.device)
    found, seen, cache = [], [], None
    for _ in range(limit):
        logits, cache = model.prefill(ids, cache)
        seen.append(logits.float())
        found.append(int(logits.argmax()))
        ids = torch.tensor(found[-1:], device=model.device)
    return found, seen

"""What the benchmarks of ``accept``, ``step_setup``, ``draft_step`` and ``stage`` share: inputs as
a server has them, the torch ops that each op replaces, and how arms are checked and timed.

The inputs and the torch ops run on any device. Each tensor has memory of its own: torch.compile may
take views into one allocation for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import specplan
import torch
from specplan.plans.accept import WINDOW
from specplan.plans.stage import describe
from specplan.stage import mapped

import measure

#: Rotating buffer sets of one arm.
SETS = 8
PAGE, GROUP, SCALE = 32, 4, 2
#: Columns of a block table: of step_setup, which unscales all of it, and of draft_step, whose
#: lengths grow by one a call and stay inside.
SETUP_COLUMNS, DRAFT_COLUMNS = 256, 4096
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Tensors = dict[str, torch.Tensor]
Numbers = dict[str, int]
TorchOps = Callable[[Tensors, Numbers], None]


@dataclass
class Work:
    """One call of an op: its tensors and numbers by name, and what is neither."""

    family: str
    tensors: Tensors
    numbers: Numbers = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The arguments of the op and of its reference, by name."""
        if self.family == "stage":
            return {"record": self.tensors["record"], "segments": self.more["segments"]}
        return {**self.tensors, **self.numbers}

    def reference(self) -> None:
        getattr(specplan.reference, self.family)(**self.arguments())


# Inputs


def accept_work(
    requests: int, tokens: int, columns: int, dtype: str, device: torch.device, seed: int
) -> Work:
    """A verify step's logits, drafts of which about three of four match, and all that moves."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = requests * tokens

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).int()

    logits = torch.empty(rows, -(-columns // 8) * 8, dtype=DTYPES[dtype], device=device)
    logits = logits.normal_(generator=generator)[:, :columns]
    verified = logits.argmax(1).view(requests, tokens)[:, :-1].int()
    drafts = torch.where(drawn(0, 4, *verified.shape) == 0, verified + 1, verified).contiguous()
    t = {
        "target": logits,
        "accepted": drawn(0, 9, requests, tokens),
        "n_acc": drawn(0, 9, requests),
        "scratch": torch.zeros(rows + requests + 1, dtype=torch.int64, device=device),
        "drafts": drafts,
        "next_token": drawn(0, 9, requests),
        "rows": drawn(0, 9, requests).long(),
        "kv_lens": drawn(1000, 100_000, requests),
        "positions": drawn(0, 100_000, 1, rows),
        "positions_out": drawn(0, 9, 1, requests),
        "slot": torch.randperm(requests + 3, generator=generator, device=device)[:requests].int(),
        "hist_len": drawn(0, WINDOW + 1, requests + 3),
        "bank": drawn(0, 2, requests + 3),
    }
    return Work("accept", t)


def setup_work(requests: int, tokens: int, device: torch.device, seed: int) -> Work:
    """A step's lengths and block table, and the outputs that rollback, attention and the caches
    take.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = requests * tokens

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).int()

    of_rows = ("request_of_row", "position_of_row", "visible_of_row", "page_of_row")
    t = {
        "kv_lens": drawn(tokens, PAGE * SETUP_COLUMNS, requests),
        "block_table": drawn(0, SCALE * 100_000, requests, SETUP_COLUMNS),
        **{name: drawn(0, 9, rows) for name in (*of_rows, "within_of_row", "ordinal_of_row")},
        "first_position": drawn(0, 9, requests),
        "cache_slot": drawn(0, 9, rows).long(),
        "group_slot": drawn(0, 9, rows).long(),
        "table_out": drawn(0, 9, requests, SETUP_COLUMNS),
    }
    numbers = {"tokens": tokens, "page_size": PAGE, "group": GROUP, "scale": SCALE}
    return Work("step_setup", t, numbers)


def draft_work(
    requests: int, tokens: int, device: torch.device, seed: int, columns: int = 0
) -> Work:
    """The first of ``tokens`` - 1 drafts: ready ids, or logits of ``columns``; lengths, positions
    and the place of the next row.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).int()

    target = drawn(0, 100_000, requests)
    if columns:
        target = torch.randn(
            requests, columns, generator=generator, device=device, dtype=torch.bfloat16
        )
    t = {
        "target": target,
        "input_ids": drawn(0, 9, requests),
        "drafts": drawn(0, 9, requests, max(2, tokens - 1)),
        "scratch": torch.zeros(2 * requests, dtype=torch.int64, device=device),
        "next_new_tokens": drawn(0, 9, requests, max(2, tokens - 1) + 1),
        "next_token": drawn(0, 100_000, requests),
        "kv_lens": drawn(1, 1000, requests),
        "positions": drawn(0, 1000, 1, requests),
        "block_table": drawn(0, SCALE * 100_000, requests, DRAFT_COLUMNS),
        **{name: drawn(0, 9, requests) for name in ("page_of_row", "within_of_row")},
        "cache_slot": drawn(0, 9, requests).long(),
    }
    return Work("draft_step", t, {"step": 0, "page_size": PAGE, "group": GROUP, "scale": SCALE})


def stage_work(words: int, device: torch.device, seed: int, parts: int = 4) -> Work:
    """A pinned record of as many equal segments as ``parts``; on a CPU it is not pinned."""
    generator = torch.Generator().manual_seed(seed)
    host = torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")
    host.random_(0, 1 << 30, generator=generator)
    record = mapped(host, device) if device.type == "cuda" else host
    size = words // parts
    t = {
        f"destination_{number}": torch.zeros(size, dtype=torch.int32, device=device)
        for number in range(parts)
    }
    segments = describe([(each, size * at) for at, each in enumerate(t.values())], torch.int32)
    return Work("stage", {"record": record, **t}, {}, {"segments": segments, "host": host})


# What each op replaces


def torch_accept(t: Tensors, n: Numbers) -> None:
    """An argmax, the matching prefix, and a handful of gathers and scatters. Every request has a
    slot.
    """
    requests, tokens = t["accepted"].shape
    target = t["target"]
    ids = target.argmax(1).int() if target.dim() == 2 else target
    verified = ids.view(requests, tokens)
    match = (t["drafts"] == verified[:, :-1]).int().cumprod(1).sum(1)
    count = (match + 1).int()
    last = match.long()
    t["accepted"].copy_(verified)
    t["n_acc"].copy_(count)
    t["next_token"].copy_(verified.gather(1, last[:, None])[:, 0])
    row = torch.arange(requests, device=last.device) * tokens + last
    t["rows"].copy_(row)
    t["positions_out"].copy_(t["positions"].index_select(1, row) + 1)
    t["kv_lens"].add_(count - tokens)
    slot = t["slot"].long()
    before = t["hist_len"].index_select(0, slot)
    commits = before + tokens > WINDOW
    t["hist_len"].index_copy_(0, slot, torch.where(commits, count, before + count))
    t["bank"].index_copy_(0, slot, t["bank"].index_select(0, slot) ^ commits.int())


def torch_step_setup(t: Tensors, n: Numbers) -> None:
    """The composed mapping of a step whose requests all have ``tokens`` rows."""
    tokens, page_size, group = n["tokens"], n["page_size"], n["group"]
    row = torch.arange(t["request_of_row"].shape[0], device=t["kv_lens"].device)
    request = row // tokens
    ordinal = row - request * tokens
    first = t["kv_lens"] - tokens
    position = first.index_select(0, request) + ordinal
    table = t["block_table"]
    pages = torch.where(table < 0, table, table // n["scale"])
    page = pages[request, position // page_size].long()
    within = position % page_size
    t["table_out"].copy_(pages)
    t["first_position"].copy_(first)
    t["request_of_row"].copy_(request)
    t["ordinal_of_row"].copy_(ordinal)
    t["position_of_row"].copy_(position)
    t["visible_of_row"].copy_((position + 1) // group)
    t["page_of_row"].copy_(page)
    t["within_of_row"].copy_(within)
    t["cache_slot"].copy_(page * page_size + within)
    slot = page * (page_size // group) + within // group
    t["group_slot"].copy_(torch.where((position + 1) % group == 0, slot, -1))


def torch_draft_step(t: Tensors, n: Numbers) -> None:
    """The ops between two draft steps. Every request is a real one."""
    step, page_size = n["step"], n["page_size"]
    token = t["target"].argmax(1).int() if t["target"].dim() == 2 else t["target"]
    t["input_ids"].copy_(token)
    t["drafts"][:, step].copy_(token)
    t["next_new_tokens"][:, step + 1].copy_(token)
    t["next_new_tokens"][:, 0].copy_(t["next_token"])
    if step < t["drafts"].shape[1] - 1:
        t["kv_lens"].add_(1)
        t["positions"].add_(1)
    position = (t["kv_lens"] - 1).long()
    page = t["block_table"].gather(1, (position // page_size)[:, None])[:, 0].long() // n["scale"]
    within = position % page_size
    t["page_of_row"].copy_(page)
    t["within_of_row"].copy_(within)
    t["cache_slot"].copy_(page * page_size + within)


def torch_stage(t: Tensors, n: Numbers) -> None:
    """A copy for each destination, from ``record``: pinned memory of the host, or the device's view
    of it.
    """
    at = 0
    for name, destination in t.items():
        if name != "record":
            size = destination.shape[0]
            destination.copy_(t["record"][at : at + size], non_blocking=True)
            at += size


REPLACED: Mapping[str, TorchOps] = {
    "accept": torch_accept,
    "step_setup": torch_step_setup,
    "draft_step": torch_draft_step,
    "stage": torch_stage,
}


# Arms


def differences(work: Work, call: Callable[[], object]) -> list[str]:
    """The tensors that an arm leaves other than the reference does; then all is as it was."""
    before = {name: tensor.clone() for name, tensor in work.tensors.items()}

    def left(call: Callable[[], object]) -> Tensors:
        call()
        found = {name: tensor.clone() for name, tensor in work.tensors.items()}
        for name, tensor in before.items():
            work.tensors[name].copy_(tensor)
        return found

    expected, found = left(work.reference), left(call)
    return [name for name in before if not torch.equal(found[name], expected[name])]


def check(work: Work, arms: Mapping[str, Callable[[], object]]) -> None:
    """End the program if an arm is wrong: a figure of it would mean nothing."""
    for name, call in arms.items():
        wrong = differences(work, call)
        if wrong:
            raise SystemExit(f"{work.family}: {name} is not the reference in {', '.join(wrong)}")


def torch_call(work: Work, ops: TorchOps, mapped: bool = False) -> Callable[[], None]:
    """The torch ops over a work; those of stage copy from the host's pinned memory, unless
    ``mapped`` asks for the device's view of it.
    """
    t = dict(work.tensors)
    if work.family == "stage" and not mapped:
        t["record"] = work.more["host"]
    return lambda: ops(t, work.numbers)


def run(
    pack: specplan.Pack, works: Sequence[Work], triton_arm: Callable[[Work], None]
) -> dict[str, float]:
    """Figures of one op at one size: graph, eager and host time of every arm, by column."""
    family = works[0].family
    op, ops = getattr(pack, family), REPLACED[family]
    compiled = torch.compile(ops, dynamic=False, fullgraph=True)
    arms: dict[str, list[Callable[[], object]]] = {
        "ours": [lambda w=w: op.require(**w.arguments()) for w in works],
        "torch": [torch_call(w, ops) for w in works],
        "compiled": [torch_call(w, compiled, mapped=True) for w in works],
        "triton": [lambda w=w: triton_arm(w) for w in works],
    }
    for at, work in enumerate(works):
        check(work, {name: calls[at] for name, calls in arms.items()})
    graph = measure.graph_times({"empty": [measure.EmptyKernel()], **arms})
    eager = measure.eager_times({name: calls[0] for name, calls in arms.items()})
    first = works[0]
    given = first.arguments()
    named = {parameter.name: None for parameter in op.op.declared.parameters} | given
    resolved = op.op.resolve(tuple(named.values()))
    function, passed = resolved.function, (*resolved.tensors, *resolved.numbers)
    host = measure.host_times(
        {
            "bare": lambda: function(*passed),
            "op": lambda: op(**given),
            "bind": op.bind(**given),
        }
    )
    return {
        **{f"graph_{name}_us": value for name, value in graph.items()},
        **{f"eager_{name}_us": value for name, value in eager.items()},
        **{f"host_{name}_us": value for name, value in host.items()},
        "host_op_over_bare_us": host["op"] - host["bare"],
    }

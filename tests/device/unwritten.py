"""Calls over memory of which only what an op may read was ever written; initcheck then reports any
other read.

Each case is made twice: one that is filled as always, and one in memory of its own that gets those
bytes of the first alone that the op needs. Results are compared as always; where neither the inputs
nor the results are, the second takes over the first's bytes after the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import specplan
import torch
from specplan.kernels.case import Comparison
from specplan.kernels.gdn_replay import cases as gdn
from specplan.kernels.rollback import cases as rollback
from specplan.kernels.rollback import reference as rollback_reference
from specplan.kernels.sparse_gqa_verify import cases as gqa
from specplan.kernels.stage.cases import StageCase
from specplan.plans import gdn_replay as gdn_plan
from specplan.plans.families import SIGNATURES
from specplan.plans.sparse_gqa_verify import VScaleOrder
from torch import Tensor

#: (requests, tokens) of the cells.
POINTS = ((1, 1), (2, 4), (8, 2), (16, 4), (64, 8))


def calls(pack: specplan.Pack, family: str, device: torch.device) -> int:
    """Launch the family's ops; returns how many calls were right."""
    makers: Mapping[str, Callable[..., Iterator[None]]] = {
        "rollback": _rollback,
        "gdn_replay": _gdn,
        "sparse_gqa_verify": _gqa,
    }
    if family not in makers:
        return sum(1 for _ in _exact(pack, family, device))
    problems = pack.manifest().problems[family]
    geometry = dict(next(iter(problems.values())))
    return sum(
        1
        for requests, tokens in POINTS
        for _ in makers[family](pack, geometry, requests, tokens, device)
    )


def scarce(source: Tensor, live: Tensor) -> Tensor:
    """Memory like ``source`` (bytes) of which only the ``live`` bytes are written."""
    fresh = torch.empty_like(source)
    _take_over(fresh, source, live)
    return fresh


def _take_over(target: Tensor, source: Tensor, these: Tensor) -> None:
    at = these.nonzero().squeeze(1)
    target[at] = source[at]


def _hold(name: str, comparisons: Iterator[Comparison]) -> None:
    for comparison in comparisons:
        if not float(comparison.error) <= comparison.bound:
            raise SystemExit(f"{name}: {comparison}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


# ----- scatter and gather -------------------------------------------------------------------------


def copies(
    pack: specplan.Pack, device: torch.device, points: Iterable[tuple[int, int]], control: bool
) -> int:
    """Scatter and gather over buffers whose producer wrote only what it must; with ``control`` the
    torch ops that scatter replaces. Returns how many sizes were right.
    """
    count = 0
    for requests, tokens in points:
        size, outputs = requests + 5, requests + 4
        lens_host = torch.arange(requests) % (tokens + 2)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        new, following, drafts = (
            empty(outputs, tokens),
            empty(outputs, tokens),
            empty(outputs, tokens - 1),
        )
        lens, slots = empty(outputs), empty(requests + 2)
        lens[3 : 3 + requests] = lens_host.to(device, torch.int32)
        slots[:requests] = torch.randperm(size)[:requests].to(device, torch.int32)
        for r in range(requests):
            new[3 + r, : min(int(lens_host[r]), tokens)] = 7
        following[3 : 3 + requests] = 8
        if tokens > 1:
            drafts[3 : 3 + requests] = 9
        stores = (empty(8, size, 1), empty(8, size, 1), empty(size), empty(size, 7))
        arguments = (new, following, lens, drafts, slots, *stores, 3, requests)
        (specplan.reference.scatter if control else pack.scatter.require)(*arguments)
        moved = slots[:requests].long()
        history = stores[0][:, moved, 0].T.cpu()
        wanted = torch.where(
            torch.arange(8) < torch.minimum(lens_host, torch.tensor(tokens))[:, None], 7, 0
        )
        if not torch.equal(history, wanted.int()):
            raise SystemExit(f"scatter {requests}x{tokens}: wrong history")
        if not control:
            positions = empty(requests * tokens + 2)
            positions[: requests * tokens] = slots[:requests].repeat_interleave(tokens)
            outs = (
                empty(requests * tokens),
                empty(max(1, requests * (tokens - 1))),
                empty(requests * tokens),
                empty(requests),
            )
            pack.gather.require(
                stores[1],
                stores[3],
                stores[2],
                slots,
                positions,
                *outs,
                0,
                0,
                0,
                0,
                requests,
                tokens,
                tokens - 1,
            )
            if not torch.equal(outs[3].cpu(), (lens_host - tokens).int()):
                raise SystemExit(f"gather {requests}x{tokens}: wrong kv offsets")
        count += 1
    return count


# ----- families of integers -----------------------------------------------------------------------

#: What is written, and read before.
IN_AND_OUT = ("scratch", "kv_lens", "positions", "hist_len", "bank", "counter")
#: Cells of a family, each of another dtype and problem, and how many requests they have at most.
CELLS, MOST_REQUESTS = 6, 8


def _exact(pack: specplan.Pack, family: str, device: torch.device) -> Iterator[None]:
    """Outputs were never written; of inputs, what lies between their rows was not."""
    manifest = pack.manifest()
    checks = import_module(f"specplan.kernels.{family}.cases").checks
    cells: dict[tuple[str, str], Any] = {}
    for cell, group in manifest.cells(family):
        if group.automatic and cell.requests <= MOST_REQUESTS:
            cells[cell.problem, cell.dtype] = cell
    for cell in list(cells.values())[:CELLS]:
        size = (cell.requests, cell.tokens, cell.splits, cell.dtype, device)
        pairs = zip(
            *(checks(manifest.problems[family][cell.problem], *size) for _ in range(2)),
            strict=True,
        )
        for full, part in pairs:
            full.refill(5)
            live = _exact_live(full)
            if isinstance(full, StageCase):
                part.host.copy_(full.host)
                part.before.copy_(full.host)
            expected = full.expect()
            _take_over(part.buffer.view(torch.uint8), full.buffer.view(torch.uint8), live)
            op = getattr(pack, family)
            op.require(**part.arguments())
            # What stays as it was, in outputs too, was never written.
            same = (expected.view(torch.uint8) == full.buffer.view(torch.uint8)) & ~live
            _take_over(part.buffer.view(torch.uint8), full.buffer.view(torch.uint8), same)
            _hold(f"{cell}: {full.name}", part.compare(expected))
            yield


def _written(family: str) -> set[str]:
    return {
        name
        for op in SIGNATURES[family].values()
        for tensor in op.tensors
        if tensor.written
        for name in (tensor.name, tensor.of)
    }


def _exact_marks(case: Any, chosen: Callable[[str], bool]) -> Tensor:
    marks = torch.zeros_like(case.buffer)
    for name, tensor in case.arena.tensors(marks).items():
        if chosen(name):
            _mark(tensor)
    return marks.view(torch.uint8) != 0


def _mark(tensor: Tensor) -> None:
    """Set every byte of a tensor's elements, whatever its strides and dtype."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(word).fill_(-1 if word is not torch.uint8 else 255)


def _exact_live(case: Any) -> Tensor:
    outputs = _written(case.op)
    if isinstance(case, StageCase):
        return torch.zeros_like(case.buffer.view(torch.uint8)) != 0
    return _exact_marks(case, lambda name: name not in outputs or name in IN_AND_OUT)


# ----- rollback -----------------------------------------------------------------------------------


def _rollback(
    pack: specplan.Pack,
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    device: torch.device,
) -> Iterator[None]:
    """Planes hold rows at the listed places alone, the snapshot those that ``gather`` saves."""
    options: tuple[tuple[str, dict[str, Any]], ...] = (
        ("gather", {"places": "outside"}),
        ("restore", {"places": "outside"}),
        ("restore", {"mask": "all"}),
        ("commit", {"places": "outside", "listed": True, "counts": "wild"}),
        ("commit", {}),
    )
    for seed, (op, chosen) in enumerate(options):
        size = (geometry, requests, tokens, "int32", device)
        full = rollback.RollbackCase("filled", op, *size, **chosen)
        full.refill(seed)
        expected = full.expect()
        live = _rollback_live(full)
        part = rollback.RollbackCase("scarce", op, *size, **chosen)
        _take_over(part.buffer, full.buffer, live)
        tables = ("planes", "states") if part.staged else ("planes",)
        for name in tables:
            part.tensors[name].copy_(part._tables[name])
        getattr(pack.rollback, op).require(**part.arguments())
        _take_over(part.buffer, full.buffer, (expected == full.buffer) & ~live)
        for name in tables:
            part.tensors[name].copy_(full._tables[name])
        _hold(f"rollback.{op} {requests}x{tokens}", part.compare(expected))
        yield


def _rollback_live(case: rollback.RollbackCase) -> Tensor:
    """What the op may read of a filled case, as a mask of its bytes."""
    marks = torch.zeros_like(case.buffer)
    marked, tensors = case._tensors(marks), case.tensors
    lists = ("pages", "within", "rejected", "accepted", "row_requests", "row_ordinals", "slots")
    for name in (*lists, "pending"):
        if name in marked:
            _bytes(marked[name]).fill_(1)
    for plane, saved in zip(case._planes(marked), case._saved(marked), strict=True):
        there = rollback_reference._existing(plane, tensors["pages"], tensors["within"])
        rows = there.nonzero().squeeze(1)
        if case.op == "gather":
            plane[tensors["pages"][rows].long(), tensors["within"][rows].long()] = 1
        else:
            saved[rows] = 1
    if case.staged:
        chosen = (tensors["accepted"].long().clamp(1, case.tokens) - 1).tolist()
        for i in range(len(case.states)):
            for request, at in enumerate(chosen):
                _bytes(marked[f"candidates{i}"])[request, at] = 1
    return marks != 0


# ----- gdn_replay ---------------------------------------------------------------------------------


def _gdn(
    pack: specplan.Pack,
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    device: torch.device,
) -> Iterator[None]:
    """Slots of no row, and records at and past a history's length, were never written."""
    for dtype in ("bf16", "fp32"):
        for op, full_histories in (
            *(("verify", False), ("verify", True)),
            *(("advance", None), ("reset", None), ("materialize", None)),
        ):
            splits = pack.gdn_replay.verify.pick(
                **geometry, requests=requests, tokens=tokens, dtype=dtype
            ).cell.splits
            size = (geometry, requests, tokens, splits, dtype, device)
            full = gdn.GdnCase("filled", op, *size, full=full_histories)
            full.refill(3)
            expected = full.expect()
            live = _gdn_live(full)
            part = gdn.GdnCase("scarce", op, *size, full=full_histories)
            part.step = part.step.over(scarce(full.buffer, live))
            cursors = (part.step.tensors[name] for name in ("hist_len", "bank"))
            part.cursors = gdn_plan.Cursors(*cursors, **geometry, dtype=dtype)
            if op in ("verify", "materialize"):
                pools = (part.step.tensors[name] for name in gdn.POOLS)
                part.pool = gdn_plan.Pool(part.cursors, *pools)
            getattr(pack.gdn_replay, op).require(**part.arguments())
            same = expected.step.buffer == full.buffer
            _take_over(part.buffer, full.buffer, same & ~live & ~_gdn_written(full, expected))
            _hold(f"gdn_replay.{op} {dtype} {requests}x{tokens}", part.compare(expected))
            yield


def _gdn_live(case: gdn.GdnCase) -> Tensor:
    marks = torch.zeros_like(case.buffer)
    marked, step = case.step.over(marks), case.step
    whole = ("slots", "rows", "hist_len", "bank", "qkv", "ba", "A_log", "dt_bias")
    for name in whole:
        if name in marked.backing:
            _bytes(marked.backing[name]).fill_(1)
    if "state" not in step.tensors:
        return marks != 0
    t, i = step.tensors, step.integers
    if case.op == "verify":
        read = {int(s): int(t["hist_len"][s]) for s in t["slot"].tolist() if s >= 0}
    else:
        read = {int(s): int(n) for s, n in zip(i["src"].tolist(), i["count"].tolist(), strict=True)}
        read.pop(-1, None)
    for slot, count in read.items():
        bank = int(t["bank"][slot])
        _bytes(marked.tensors["state"])[slot] = 1
        for name in ("rec_u", "rec_k"):
            _bytes(marked.tensors[name])[slot, :, bank, :count] = 1
        g = marked.tensors["rec_G"][slot, :, bank, :count]
        g.copy_(torch.full_like(g.view(torch.int32), 0x01010101).view(torch.float32))
    return marks != 0


def _gdn_written(case: gdn.GdnCase, expected: gdn.Expected) -> Tensor:
    marks = torch.zeros_like(case.buffer)
    marked = case.step.over(marks)
    for name, mask in expected.written.items():
        tensor = marked.tensors[name]
        word = torch.int16 if tensor.element_size() == 2 else torch.int32
        tensor.view(word).masked_fill_(mask, -1)
    return marks != 0


# ----- sparse_gqa_verify --------------------------------------------------------------------------


def _gqa(
    pack: specplan.Pack,
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    device: torch.device,
) -> Iterator[None]:
    """Cache slots that no row lists, outputs and the workspace were never written."""
    for dtype in ("bf16", "fp8_e4m3", "nvfp4"):
        for hard in (False, True):
            options: dict[str, Any] = {"context": geometry["selected"] + 501, "hard": hard}
            if dtype == "nvfp4" and hard:
                options["order"] = VScaleOrder.INTERLEAVED
            splits = pack.sparse_gqa_verify.pick(
                **geometry, requests=requests, tokens=tokens, dtype=dtype
            ).cell.splits
            case = gqa.GqaCase(
                "scarce", geometry, requests, tokens, splits, dtype, device, **options
            )
            expected = case.expect()
            case.inputs = _scarce_inputs(case.inputs)
            case.buffer = torch.empty_like(case.buffer)
            case.out = case.buffer[1:-1, : case.out.shape[1]]
            case.workspace = torch.empty_like(case.workspace)
            pack.sparse_gqa_verify.require(**case.arguments())
            wanted = expected.out.float()
            error = torch.linalg.vector_norm(case.out.float() - wanted)
            size = torch.linalg.vector_norm(wanted).clamp(min=1e-3)
            relative = Comparison(
                "out", "relative L2 error", error / size, gqa.RELATIVE_L2, gqa.RELATIVE_L2_SOURCE
            )
            _hold(f"sparse_gqa_verify {dtype} {requests}x{tokens}", iter([relative]))
            yield


def _scarce_inputs(inputs: gqa.Inputs) -> gqa.Inputs:
    """The same inputs in memory of their own, caches and scales written where they are listed."""
    found = {raw.data_ptr(): (raw, torch.zeros_like(raw)) for raw in gqa._storages(inputs)}
    tensors = {
        each.name: getattr(inputs, each.name)
        for each in fields(gqa.Inputs)
        if isinstance(getattr(inputs, each.name), Tensor)
    }
    valid, page, slot = gqa.entries(inputs)
    page, slot = page[valid], slot[valid]
    for name, tensor in tensors.items():
        _, marks = found[tensor.untyped_storage().data_ptr()]
        seen = _like(tensor, marks)
        if not name.endswith(("_cache", "_block_scales")):
            _bytes(seen if seen.dim() else seen[None]).fill_(1)
        elif name == "v_block_scales" and inputs.v_scale_order is VScaleOrder.INTERLEAVED:
            # A token's scales lie among those of three more.
            for i in range(4):
                _bytes(seen)[page, :, slot // 4 * 4 + i] = 1
        else:
            _bytes(seen)[page, :, slot] = 1
    fresh = {key: scarce(raw, marks != 0) for key, (raw, marks) in found.items()}
    return replace(
        inputs,
        **{
            name: _like(tensor, fresh[tensor.untyped_storage().data_ptr()])
            for name, tensor in tensors.items()
        },
    )


def _like(tensor: Tensor, raw: Tensor) -> Tensor:
    """The view of other bytes that a tensor is of its own."""
    whole = raw[: raw.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

"""Inputs of ``sparse_gqa_verify`` for tests, certification and benchmarks, and the checks of a
cell.

Every case poisons what must not be read and what must be overwritten. Slots of K, V and block
scales that no row selects are NaN where the format has one; queries and gates of rows without
entries are not finite. Outputs and workspace are NaN before a call, and lie in larger buffers of
NaN whose every element is compared. In the cases of a cell integers that no row needs are garbage:
pages of the block table, lists beyond their count, and all of a padding row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Any

import torch
from specplan.kernels.case import Comparison
from specplan.kernels.sparse_gqa_verify.reference import (
    attention,
    decode,
    deinterleave,
    gate,
    interleave,
    valid_entries,
)
from specplan.kernels.sparse_gqa_verify.writer import to_fp8, to_nvfp4
from specplan.plans.sparse_gqa_verify import (
    GROUP_ROWS,
    MAX_SPLITS,
    PARTIAL_WORDS,
    VScaleOrder,
    workspace_words,
)

#: Relative L2 error against the reference in fp32. Where it comes from: the output is rounded to
#: bf16 (relative RMS 2^-9 / sqrt(3) = 1.1e-3) and a gate rounds it again (1.6e-3 together); weights
#: in bf16 add up to 1.2e-3, in fp16 1.5e-4. Measured on an H200 over 147 cases: 2.6e-3 with bf16
#: caches, 9.3e-4 with FP8 and NVFP4, where most of what the reference rounds is rounded alike.
RELATIVE_L2 = 4e-3
RELATIVE_L2_SOURCE = (
    "output and gate rounded to bf16 1.6e-3, weights in bf16 1.2e-3 or in fp16 1.5e-4; seen 2.6e-3 "
    "with bf16 caches, 9.3e-4 with FP8 and NVFP4"
)
#: Largest absolute error on outputs below 1, and relative error above: two steps of bf16 there
#: (2^-7 each), for the two roundings.
ABSOLUTE = 2**-6
ABSOLUTE_SOURCE = "two steps of bf16 below 1, for the two roundings; relative to outputs above 1"

#: Caches of many requests share physical pages, as a prefix cache does, so that they stay small.
MOST_TOKENS = 16384
#: Words after the workspace.
GUARD = 64
#: NaNs with payloads that no kernel makes: what outputs, guards and workspace hold before a call.
POISON_16 = 0x7FA5
POISON_32 = 0x7FC5A5A5
#: Integers that nobody wrote, in turns: below and above every token, page, request and count.
GARBAGE = (-(2**31), 2**31 - 1, -2, 2**30)
#: Requests whose keys or values are taken out of the decoded cache at a time: 32 of 2560 tokens
#: with 2 heads are 168 MB.
REQUESTS_AT_A_TIME = 32

#: Query heads over all rows of the cells whose cases share a graph, and the most such cells. At
#: 2048 rows of 24 heads in bf16, whole, a case holds 127 MB; a cell has two, and certification
#: keeps three copies of one besides.
HEADS_A_GRAPH = 2048 * 24
MOST_CELLS_A_GRAPH = 8
#: CTAs among which a call of the catalog splits units, at most: 20 requests of 4 rows in 16 splits.
MOST_SPLIT_CTAS = 2560

RATIO = 4


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call; fields are named like those of the compiled function. Caches are ``[P,
    Hk, T, D]`` views.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_block_scales: torch.Tensor | None
    v_block_scales: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    v_scale_order: VScaleOrder
    block_table: torch.Tensor
    selected_tokens: torch.Tensor
    request_indices: torch.Tensor
    valid_count: torch.Tensor | None
    query_positions: torch.Tensor | None
    output_gate: torch.Tensor | None
    softmax_scale: float


def random_lists(
    requests: int,
    tokens: int,
    context: int,
    width: int,
    overlap: float,
    generator: torch.Generator,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(selected_tokens [N, W], query_positions [N])``: aligned groups of four, then the causal
    tail, then -1.

    Rows of a request share about ``overlap`` of their groups. Row j of a request stands at position
    context - tokens + j.
    """
    rows = requests * tokens
    budget = (width - RATIO + 1) // RATIO
    position = context - tokens + torch.arange(tokens, device=device).repeat(requests)
    visible = (position + 1) // RATIO
    most = context // RATIO
    shared = torch.rand(requests, 1, most, generator=generator, device=device)
    score = torch.rand(requests, tokens, most, generator=generator, device=device)
    # Every row of a request takes the request's best groups, and fills up with its own.
    common = shared.topk(int(overlap * min(budget, most)), dim=2).indices
    score = score.scatter_(2, common.expand(-1, tokens, -1), 2.0).view(rows, most)
    order = torch.arange(most, device=device)
    score = torch.where(order[None, :] < visible[:, None], score, -1.0)
    best = score.topk(min(budget, most), dim=1)
    group = torch.where(best.values >= 0, best.indices, -1)
    count = torch.minimum(visible, torch.full_like(visible, group.shape[1]))
    lists = torch.full((rows, width), -1, dtype=torch.int64, device=device)
    step = torch.arange(RATIO, device=device)
    expanded = torch.where(group[..., None] >= 0, group[..., None] * RATIO + step, -1)
    lists[:, : group.shape[1] * RATIO] = expanded.flatten(1)
    for i in range(RATIO - 1):
        token = visible * RATIO + i
        there = token <= position
        place = count * RATIO + i
        keep = lists.gather(1, place[:, None])[:, 0]
        lists.scatter_(1, place[:, None], torch.where(there, token, keep)[:, None])
    return lists.int(), position.int()


def make_inputs(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    dtype: str,
    device: torch.device | str,
    *,
    seed: int = 0,
    context: int = 8192,
    overlap: float = 0.9,
    gated: bool = True,
    order: VScaleOrder = VScaleOrder.LINEAR,
    nhd: bool = False,
    spare_pages: int = 3,
    poison: bool = True,
    counted: bool = False,
    garbage: bool = False,
    padding: int = 0,
    most_tokens: int = MOST_TOKENS,
    softmax_scale: float | None = None,
) -> Inputs:
    """Random inputs of a cell. Pages are scattered; slots that no row selects are poisoned.

    ``counted`` gives a ``valid_count``, which cuts every third row by 7 entries, and moves every
    fourth row's ``query_positions`` back by 300: what they exclude is poisoned, too. With
    ``garbage`` pages that no row needs are no pages, and lists hold anything beyond their count.
    The last ``padding`` requests are none: nobody wrote the integers of their rows. Without a
    ``softmax_scale`` it is the head dimension's.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    heads, kv_heads, dim = geometry["q_heads"], geometry["kv_heads"], geometry["head_dim"]
    page, width = geometry["page_size"], geometry["selected"]
    rows, columns = requests * tokens, -(-context // page)
    pages = min(requests * columns, most_tokens // page) + spare_pages
    lists, positions = random_lists(requests, tokens, context, width, overlap, generator, device)
    places = torch.randperm(pages, generator=generator, device=device)
    if requests * columns > pages - spare_pages:
        own = torch.arange(requests * columns, device=device)
        places = places[own % (pages - spare_pages)]
    table = places[: requests * columns].view(requests, columns).int()
    owner = torch.arange(requests, device=device).repeat_interleave(tokens).int()

    real = (requests - padding) * tokens
    there = lists >= 0
    there[real:] = False
    count = None
    if counted:
        row = torch.arange(rows, device=device)
        count = (there.sum(1) - 7 * (row % 3 == 2)).int()
        positions = positions - 300 * (row % 4 == 3).int()
        there &= torch.arange(width, device=device) < count[:, None]
        there &= lists <= positions[:, None]
        if garbage:
            beyond = torch.arange(width, device=device) >= count[:, None]
            lists = torch.where(beyond, _garbage(lists), lists)
    # One page more takes the marks of what is not there.
    marked = torch.zeros(pages + 1, page, dtype=torch.bool, device=device)
    where = torch.where(there, lists, 0).long()
    physical = table.long()[owner.long()[:, None], where // page]
    marked[torch.where(there, physical, pages), where % page] = True
    used = marked[:pages]
    if garbage:
        needed = torch.zeros(rows, columns + 1, dtype=torch.bool, device=device)
        needed.scatter_(1, torch.where(there, where // page, columns), True)
        needed = needed[:, :columns].view(requests, tokens, columns).any(1)
        table = torch.where(needed, table, _garbage(table))
    for each in (lists, count, positions):
        if each is not None:
            each[real:] = _garbage(each[real:])
    owner[real:] = _garbage(owner[real:])

    def cache() -> torch.Tensor:
        # K and V are halves of one allocation, so that the page stride is larger than a page.
        shape = (pages, 2, page, kv_heads, dim) if nhd else (pages, 2, kv_heads, page, dim)
        both = normal(*shape).to(torch.bfloat16)
        return both.permute(0, 1, 3, 2, 4) if nhd else both

    both = cache()
    unused = ~used[:, None, None, :, None]
    k_scales = v_scales = None
    k_factor, v_factor = 1.0, 1.0
    if dtype == "bf16":
        if poison:
            both.masked_fill_(unused, torch.nan)
        k, v = both[:, 0], both[:, 1]
    elif dtype == "fp8_e4m3":
        k_factor, v_factor = 0.5, 0.75
        layout = both.permute(0, 1, 3, 2, 4) if nhd else both
        factor = torch.tensor([k_factor, v_factor], device=device)[None, :, None, None, None]
        stored = to_fp8(layout.float() / factor)
        if poison:
            raw = stored.view(torch.uint8)
            shown = unused.permute(0, 1, 3, 2, 4) if nhd else unused
            raw.masked_fill_(shown, 0x7F)
        stored = stored.permute(0, 1, 3, 2, 4) if nhd else stored
        k, v = stored[:, 0], stored[:, 1]
    else:
        k_factor, v_factor = 0.01, 0.013
        packed_k = to_nvfp4(both[:, 0], k_factor)
        packed_v = to_nvfp4(both[:, 1], v_factor)
        for packed in (packed_k, packed_v):
            if poison:
                packed.scales.view(torch.uint8).masked_fill_(unused[:, 0], 0x7F)
                packed.data.masked_fill_(unused[:, 0], 0xFF)
        v_scales = packed_v.scales
        if order is VScaleOrder.INTERLEAVED:
            v_scales = interleave(v_scales.view(torch.uint8)).view(torch.float8_e4m3fn)
        k_scales = packed_k.scales
        # One page holds K data, K scales, V data, V scales, as servers lay it out.
        parts = [
            packed_k.data.view(torch.uint8),
            k_scales.view(torch.uint8),
            packed_v.data.view(torch.uint8),
            v_scales.view(torch.uint8),
        ]
        parts = [p.transpose(1, 2) if nhd else p for p in parts]
        if nhd and order is VScaleOrder.INTERLEAVED:
            parts[3] = v_scales.view(torch.uint8)  # an interleaved plane is compact for each head
        flat = torch.cat([p.reshape(pages, -1) for p in parts], dim=1)
        planes = []
        first = 0
        for index, p in enumerate(parts):
            size = p[0].numel()
            plane = flat[:, first : first + size].view(pages, *p.shape[1:])
            swapped = nhd and not (index == 3 and order is VScaleOrder.INTERLEAVED)
            planes.append(plane.transpose(1, 2) if swapped else plane)
            first += size
        k, v = planes[0], planes[2]
        k_scales = planes[1].view(torch.float8_e4m3fn)
        v_scales = planes[3].view(torch.float8_e4m3fn)
    scalar = [torch.tensor([x], dtype=torch.float32, device=device) for x in (k_factor, v_factor)]
    return Inputs(
        q=normal(rows, heads, dim).to(torch.bfloat16),
        k_cache=k,
        v_cache=v,
        k_block_scales=k_scales,
        v_block_scales=v_scales,
        k_scale=scalar[0],
        v_scale=scalar[1],
        v_scale_order=order,
        block_table=table,
        selected_tokens=lists,
        request_indices=owner,
        valid_count=count,
        query_positions=positions,
        output_gate=(2 * normal(rows, heads, dim)).to(torch.bfloat16) if gated else None,
        softmax_scale=dim**-0.5 if softmax_scale is None else softmax_scale,
    )


def _garbage(like: torch.Tensor) -> torch.Tensor:
    """int32 of a shape that nobody wrote."""
    turns = torch.tensor(GARBAGE, dtype=torch.int32, device=like.device)
    return turns[torch.arange(like.numel(), device=like.device) % len(GARBAGE)].view(like.shape)


def entries(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`valid_entries` of a call: ``(valid, page, slot)``, each ``[N, W]``."""
    pages, _, page_size, _ = inputs.k_cache.shape
    return valid_entries(
        inputs.block_table,
        inputs.selected_tokens,
        inputs.request_indices,
        pages,
        page_size,
        inputs.valid_count,
        inputs.query_positions,
    )


def expected(inputs: Inputs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The reference's output for the inputs of a call."""
    return attention(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.selected_tokens,
        inputs.request_indices,
        softmax_scale=inputs.softmax_scale,
        k_block_scales=inputs.k_block_scales,
        v_block_scales=inputs.v_block_scales,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
        v_scale_order=inputs.v_scale_order,
        valid_count=inputs.valid_count,
        query_positions=inputs.query_positions,
        output_gate=inputs.output_gate,
        dtype=dtype,
    ).out


def by_request(inputs: Inputs, tokens: int) -> torch.Tensor:
    """What :func:`expected` computes, but for the order of sums, in fp32 until the roundings.

    Where the reference gathers every row's list, this decodes the cache once, takes each request's
    whole context out of it for all its rows, and weighs a token by how often a row lists it. A
    request has at most ``tokens`` rows, anywhere in the batch. What is listed must be finite: a
    NaN counts as 0 here, as it must where no row lists it.
    """
    rows, heads, dim = inputs.q.shape
    pages, kv_heads, page_size, _ = inputs.k_cache.shape
    requests, columns = inputs.block_table.shape
    length, group = columns * page_size, heads // kv_heads
    device = inputs.q.device
    valid, _, _ = entries(inputs)
    at = torch.where(valid, inputs.selected_tokens.long(), 0)
    listed = torch.zeros(rows, length, device=device).scatter_add_(1, at, valid.float())

    # Each row's place among its request's; rows of no request all go to one more place.
    owner = inputs.request_indices.long()
    live = (owner >= 0) & (owner < requests)
    rank = (owner[:, None] == owner[None, :]).tril(-1).sum(1)
    place = torch.where(live & (rank < tokens), owner * tokens + rank, requests * tokens)
    q = torch.zeros(requests * tokens + 1, heads, dim, device=device)
    counts = torch.zeros(requests * tokens + 1, length, device=device)
    q[place] = inputs.q.float()
    counts[place] = listed
    q = q[:-1].view(requests, tokens, kv_heads, group, dim).permute(2, 0, 1, 3, 4)
    counts = counts[:-1].view(requests, tokens, length)

    v_scales = inputs.v_block_scales
    if v_scales is not None and inputs.v_scale_order is VScaleOrder.INTERLEAVED:
        v_scales = deinterleave(v_scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    keys, values = (
        _heads_first(decode(data, scales))
        for data, scales in (
            (inputs.k_cache, inputs.k_block_scales),
            (inputs.v_cache, v_scales),
        )
    )
    results = torch.zeros(requests * tokens + 1, heads, dim, device=device)
    for first in range(0, requests, REQUESTS_AT_A_TIME):
        part = slice(first, first + REQUESTS_AT_A_TIME)
        table = inputs.block_table[part].long()
        table = torch.where((table >= 0) & (table < pages), table, 0)
        several = table.shape[0]
        weight = counts[part][None, :, :, None, :]
        k = keys[:, table].view(kv_heads, several, length, dim)
        scores = q[:, part].reshape(kv_heads, several, tokens * group, dim) @ k.transpose(-1, -2)
        scores = scores * (inputs.softmax_scale * inputs.k_scale)
        scores = scores.view(kv_heads, several, tokens, group, length)
        top = scores.masked_fill(weight == 0, -torch.inf).amax(-1, keepdim=True)
        top = torch.where(torch.isneginf(top), 0, top)
        weights = torch.where(weight > 0, torch.exp(scores - top) * weight, 0)
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total == 0, 0, weights / total)
        del k
        v = values[:, table].view(kv_heads, several, length, dim)
        sums = weights.view(kv_heads, several, tokens * group, length) @ v * inputs.v_scale
        sums = sums.view(kv_heads, several, tokens, group, dim).permute(1, 2, 0, 3, 4)
        results[first * tokens : (first + several) * tokens] = sums.reshape(-1, heads, dim)
    out = results[place].to(inputs.q.dtype)
    if inputs.output_gate is not None:
        out = torch.where(valid.any(1)[:, None, None], gate(out, inputs.output_gate), 0)
    return out


def _heads_first(values: torch.Tensor) -> torch.Tensor:
    """A decoded cache as ``[heads, pages, tokens, dim]`` with 0 for NaN."""
    return (
        values.transpose(0, 1)
        .contiguous()
        .nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    )


def hardened(inputs: Inputs) -> Inputs:
    """Dead and empty rows, invalid pages, a repeated token, a reversed list, and rows that stand
    among those of another request.
    """
    lists = inputs.selected_tokens.clone()
    owner = inputs.request_indices.clone()
    table = inputs.block_table.clone()
    rows = lists.shape[0]
    lists[0] = lists[0].flip(0)
    # Steps of a number that has no factor in common with the width visit every place once.
    places = torch.arange(lists.shape[1], device=lists.device)
    lists[-1] = lists[-1, places * _coprime(lists.shape[1]) % lists.shape[1]]
    lists[rows // 3, 5] = lists[rows // 3, 9]
    if rows > 2:
        owner[1] = -1
        lists[1] = _garbage(lists[1])
        lists[rows // 2] = -1
    if rows > 4:
        owner[rows - 1] = table.shape[0]
        table[-1, min(3, table.shape[1] - 1)] = -1
        table[0, min(2, table.shape[1] - 1)] = inputs.k_cache.shape[0]
        first, second = rows // 4, 3 * rows // 4
        swap = torch.tensor([second, first], device=owner.device)
        owner[[first, second]] = owner[swap]
        lists[[first, second]] = lists[swap]
    return replace(
        inputs,
        selected_tokens=lists,
        request_indices=owner,
        block_table=table,
        query_positions=None,
    )


def with_unwritten_rows(inputs: Inputs) -> Inputs:
    """Rows without a valid entry get queries and gates that nobody wrote: NaN, Inf and -Inf by
    turns of the row.
    """
    valid, _, _ = entries(inputs)
    rows = torch.arange(valid.shape[0], device=valid.device)
    kinds = torch.tensor([torch.nan, torch.inf, -torch.inf], device=valid.device)
    poison = kinds[rows % 3].to(inputs.q.dtype)[:, None, None]
    written = valid.any(1)[:, None, None]
    gates = inputs.output_gate
    return replace(
        inputs,
        q=torch.where(written, inputs.q, poison),
        output_gate=None if gates is None else torch.where(written, gates, poison),
    )


def _coprime(width: int) -> int:
    return next(step for step in range(width // 3 + 1, 2 * width) if gcd(step, width) == 1)


@dataclass(frozen=True)
class Expected:
    """What a call must leave behind: its output, and its inputs as they were."""

    out: torch.Tensor
    inputs: tuple[torch.Tensor, ...]


class GqaCase:
    """One call (see :class:`specplan.kernels.case.Case`).

    Parameters
    ----------
    hard
        Whether the inputs go through :func:`hardened`.
    options
        Keywords of :func:`make_inputs`.
    """

    op = "sparse_gqa_verify"

    def __init__(
        self,
        name: str,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        device: torch.device | str,
        *,
        hard: bool = False,
        **options: Any,
    ) -> None:
        self.name = name
        self.geometry = dict(geometry)
        self.requests, self.tokens, self.splits, self.dtype = requests, tokens, splits, dtype
        self.device = torch.device(device)
        self.hard = hard
        self.options = options
        self.inputs = self._draw(0)
        rows, heads, dim = self.inputs.q.shape
        # A row before and after the output, and a head's width between its rows.
        self.buffer = torch.empty(
            rows + 2, heads + 1, dim, dtype=torch.bfloat16, device=self.device
        )
        self.out = self.buffer[1:-1, :heads]
        self.words = room(geometry, requests, tokens, splits)
        self.space = torch.empty(self.words + GUARD, device=self.device)
        self.workspace = self.space[: self.words]
        self._poison()

    def _draw(self, seed: int) -> Inputs:
        drawn = make_inputs(
            self.geometry,
            self.requests,
            self.tokens,
            self.dtype,
            self.device,
            seed=seed,
            **self.options,
        )
        drawn = hardened(drawn) if self.hard else drawn
        return with_unwritten_rows(drawn) if self.options.get("poison", True) else drawn

    def _poison(self) -> None:
        self.buffer.view(torch.int16).fill_(POISON_16)
        self.space.view(torch.int32).fill_(POISON_32)

    def arguments(self) -> Mapping[str, Any]:
        given = {
            each.name: getattr(self.inputs, each.name)
            for each in fields(Inputs)
            if getattr(self.inputs, each.name) is not None
        }
        if self.dtype == "bf16":
            del given["k_scale"], given["v_scale"]
        if self.dtype != "nvfp4":
            del given["v_scale_order"]
        sizes = {"tokens": self.tokens, "splits": self.splits}
        return {**given, "out": self.out, "workspace": self.workspace, **sizes}

    def pick(self) -> Mapping[str, Any]:
        sizes = {"requests": self.requests, "tokens": self.tokens, "splits": self.splits}
        return {**self.geometry, **sizes, "dtype": self.dtype}

    def refill(self, seed: int) -> None:
        for mine, drawn in zip(
            _storages(self.inputs), _storages(self._draw(seed % (1 << 62))), strict=True
        ):
            mine.copy_(drawn)
        self._poison()

    def snapshot(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.clone() for t in (*_storages(self.inputs), self.buffer, self.space))

    def restore(self, snapshot: tuple[torch.Tensor, ...]) -> None:
        mine = (*_storages(self.inputs), self.buffer, self.space)
        for tensor, saved in zip(mine, snapshot, strict=True):
            tensor.copy_(saved)

    def expect(self) -> Expected:
        inputs = tuple(t.clone() for t in _storages(self.inputs))
        return Expected(by_request(self.inputs, self.tokens), inputs)

    def compare(self, expected: Expected) -> Iterator[Comparison]:
        wanted = expected.out.float()
        difference = self.out.float() - wanted
        size = torch.linalg.vector_norm(wanted).clamp(min=1e-3)
        relative = torch.linalg.vector_norm(difference) / size
        yield Comparison("out", "relative L2 error", relative, RELATIVE_L2, RELATIVE_L2_SOURCE)
        largest = (difference.abs() / wanted.abs().clamp(min=1)).amax()
        yield Comparison("out", "largest error", largest, ABSOLUTE, ABSOLUTE_SOURCE)
        empty = (wanted == 0).flatten(1).all(1)
        filled = (self.out.ne(0).flatten(1).any(1) & empty).sum()
        yield Comparison("out", "rows that should be 0 and are not", filled, 0)
        raw = self.buffer.view(torch.int16) != POISON_16
        written = raw[0].sum() + raw[-1].sum() + raw[1:-1, -1].sum()
        yield Comparison("guards", "elements written", written, 0)
        beyond = (self.space[self.words :].view(torch.int32) != POISON_32).sum()
        yield Comparison("after the workspace", "elements written", beyond, 0)
        changed = torch.stack(
            [(a != b).sum() for a, b in zip(_storages(self.inputs), expected.inputs, strict=True)]
        )
        yield Comparison("inputs", "bytes that differ", changed.sum(), 0)

    def identical(self, snapshot: tuple[torch.Tensor, ...]) -> torch.Tensor:
        before = snapshot[-2].view(torch.int16)
        return (self.buffer.view(torch.int16) != before).sum()


def _storages(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The bytes of all tensors, each storage once."""
    found: dict[int, torch.Tensor] = {}
    for each in fields(Inputs):
        tensor = getattr(inputs, each.name)
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in found:
                raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                found[storage.data_ptr()] = raw.set_(storage)
    return tuple(found.values())


def room(geometry: Mapping[str, int], requests: int, tokens: int, splits: int) -> int:
    """fp32 words that are enough for any grouping of the rows and any number of whole units. A call
    with fewer than it needs is declined.
    """
    heads = geometry["q_heads"] // geometry["kv_heads"]
    return max(
        min(
            workspace_words(geometry, requests, tokens, group, splits, 0),
            MOST_SPLIT_CTAS * group * heads * PARTIAL_WORDS,
        )
        for group in range(1, min(tokens, GROUP_ROWS) + 1)
    )


def checks(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    splits: int,
    dtype: str,
    device: torch.device | str,
) -> Iterator[GqaCase]:
    """The cases of a cell: rows as a server has them, and rows that try what a kernel may assume.

    Caches are NHD in every other cell, and V scales are interleaved in the second case. Contexts
    are such that lists end in tails of 0 to 3 tokens; in every fourth cell the second case stands
    where a list begins to leave something out, at positions up to 2047, 2048, 2049 or 2050 of a
    list of 2051. In every other cell the second case's scores are 16 times as far apart; in every
    other one it has a gate. Rows without entries hold queries and gates that are not finite; the
    last of several requests of the first case is padding.
    """
    selected = geometry["selected"]
    # Longer than the list, so that something is left out.
    longer = selected + 500 + requests % 4
    edge = selected - 3 + (requests // 4) % 4

    def case(name: str, context: int, **options: Any) -> GqaCase:
        return GqaCase(
            name, geometry, requests, tokens, splits, dtype, device, context=context, **options
        )

    nhd = bool((requests + tokens) % 2)
    padding = int(requests > 1)
    yield case("as served", longer, counted=True, garbage=True, padding=padding, nhd=nhd)
    order = VScaleOrder.INTERLEAVED if dtype == "nvfp4" else VScaleOrder.LINEAR
    context = edge if requests % 4 == 3 and edge > tokens else longer
    # With a scale of 1 scores are 16 apart, not 1: a few tokens take all the weight, and every list
    # has some that weigh thousands of times what those before them do.
    scale = 1.0 if requests % 2 else None
    gated = (requests // 2 + tokens) % 2 == 0
    yield case(
        "hard",
        context,
        hard=True,
        garbage=True,
        order=order,
        overlap=0.5,
        gated=gated,
        softmax_scale=scale,
    )


def cells_a_graph(geometry: Mapping[str, int], requests: int, tokens: int, dtype: str) -> int:
    """How many cells of this size certification may keep the buffers of."""
    heads = requests * tokens * geometry["q_heads"]
    return max(1, min(MOST_CELLS_A_GRAPH, HEADS_A_GRAPH // heads))


def declined(device: torch.device) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """Calls that must be declined and write nothing: what is wrong, the arguments, and the storage
    that must not change.
    """
    geometry = {"q_heads": 24, "kv_heads": 2, "head_dim": 256, "page_size": 32, "selected": 2051}

    def changed(what: str, dtype: str, **changes: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
        # The rule's splits, and a workspace that would do for any.
        case = GqaCase("declined", geometry, 2, 4, MAX_SPLITS, dtype, device, context=2600)
        arguments = {**case.arguments(), "splits": None}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return what, arguments, case.buffer.view(torch.int16)

    for name in ("q", "out", "output_gate", "selected_tokens", "request_indices", "block_table"):
        yield changed(f"{name} is float64", "bf16", **{name: lambda t: t.double()})
        yield changed(f"{name} has a dimension more", "bf16", **{name: lambda t: t.unsqueeze(0)})
    for name in ("q", "k_cache", "out", "block_table", "request_indices"):
        if device.type == "cuda":
            yield changed(f"{name} is on the CPU", "bf16", **{name: lambda t: t.cpu()})
    for name in ("request_indices", "query_positions", "selected_tokens", "block_table"):
        yield changed(f"{name} is int64", "bf16", **{name: lambda t: t.long()})
    for name in ("selected_tokens", "request_indices", "output_gate", "query_positions"):
        yield changed(f"{name} has a row less", "bf16", **{name: lambda t: t[:-1]})
    yield changed("tokens do not divide the rows", "bf16", tokens=3)
    yield changed("tokens is 0", "bf16", tokens=0)
    yield changed("tokens is not an integer", "bf16", tokens=4.5)
    yield changed("no cell has these splits", "bf16", splits=63)
    yield changed("the workspace is too small", "bf16", workspace=lambda t: t[:64])
    yield changed("there is no workspace", "bf16", workspace=None)
    yield changed("the workspace is not aligned", "bf16", workspace=lambda t: t[1:])
    yield changed("softmax_scale is 0", "bf16", softmax_scale=0.0)
    yield changed("softmax_scale is NaN", "bf16", softmax_scale=float("nan"))
    yield changed("q is fp16", "bf16", q=lambda t: t.half())
    yield changed("q's head dimension is 128", "bf16", q=lambda t: t[..., :128])
    yield changed("a head of q is missing", "bf16", q=lambda t: t[:, 1:])
    yield changed("a column of the lists is missing", "bf16", selected_tokens=lambda t: t[:, 1:])
    yield changed("rows of out share memory", "bf16", out=lambda t: t[:1].expand(t.shape))
    yield changed("bf16 caches with scales", "bf16", k_scale=torch.ones(1, device=device))
    yield changed("bf16 caches with a scale order", "bf16", v_scale_order=VScaleOrder.LINEAR)
    yield changed("pages are not whole", "bf16", k_cache=lambda t: t[:, :, :16])
    yield changed("the caches differ in pages", "bf16", v_cache=lambda t: t[:-1])
    yield changed("K is FP8 and V is not", "bf16", k_cache=lambda t: t.to(torch.float8_e4m3fn))
    for name in ("k_scale", "v_scale"):
        yield changed(f"{name} is missing", "fp8_e4m3", **{name: None})
    for name in ("k_block_scales", "v_block_scales"):
        yield changed(f"{name} is missing", "nvfp4", **{name: None})
    yield changed("the scale order is unknown", "nvfp4", v_scale_order="sideways")
    yield changed("the scale order is missing", "nvfp4", v_scale_order=None)
    yield changed("scales have fewer tokens", "nvfp4", k_block_scales=lambda t: t[:, :, :16])
    yield changed(
        "interleaved V scales have another token stride",
        "nvfp4",
        v_scale_order=VScaleOrder.INTERLEAVED,
        v_block_scales=_spread,
    )
    case = GqaCase("declined", geometry, 2, 4, MAX_SPLITS, "bf16", device, context=2600)
    arguments = {**case.arguments(), "splits": None}
    for name in ("q", "output_gate"):
        yield f"out is {name}", {**arguments, name: case.out}, case.buffer.view(torch.int16)
    shifted = case.buffer[:-2, : case.out.shape[1]]
    yield "out overlaps q", {**arguments, "q": shifted}, case.buffer.view(torch.int16)


def _spread(scales: torch.Tensor) -> torch.Tensor:
    """The same scales with 32 bytes from token to token."""
    wide = torch.zeros(*scales.shape[:-1], 32, dtype=torch.uint8, device=scales.device)
    wide[..., :16] = scales.view(torch.uint8)
    return wide[..., :16].view(torch.float8_e4m3fn)

"""sparse_gqa_verify beside a Triton split-K kernel and beside gather + SDPA in torch, in one run.

    python benchmarks/sparse_gqa_verify.py --packs packs \\
        --out benchmarks/results/sparse_gqa_verify.json

24/2 heads, page 32, lists of 2051 tokens, 4 rows a request, gate fused, random data. The peers read
BF16 and FP8 caches; at each size the Triton kernel runs in the fastest of its configurations. The
*union floor* is the bytes of each request's union of lists, once, over the copy ceiling. Calls
rotate over the rows of different requests until they have read several times the L2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import specplan
import torch
import triton_split_k
from specplan.kernels.sparse_gqa_verify.cases import Inputs, make_inputs, random_lists
from specplan.kernels.sparse_gqa_verify.reference import gate

import measure

PROBLEM = "qsa_24_2"
TOKENS = 4
ROWS = [1, 4, 16, 32, 64, 128, 256, 512, 1024]
COPY_CEILING = 4.3e12
L2_BYTES = 60e6
#: Bytes of K and V of a token and K/V head.
TOKEN_BYTES = {"bf16": 1024, "fp8_e4m3": 512, "nvfp4": 288}
#: The caches' tokens at most: 4 GB in BF16. Beyond it requests share pages, as far apart in time as
#: the cache is larger than the L2.
MOST_TOKENS = 1 << 21
MOST_REQUESTS = 256
MOST_SETS = 128
#: Outputs of the arms agree within this relative L2 error: the peers round weights to bf16.
AGREEMENT = 1e-2


@dataclass(frozen=True)
class Size:
    """One line of the table."""

    dtype: str
    rows: int
    context: int
    overlap: float

    @property
    def tokens(self) -> int:
        return min(self.rows, TOKENS)

    @property
    def requests(self) -> int:
        return self.rows // self.tokens


def make_cache(geometry: dict[str, int], dtype: str, context: int) -> Inputs:
    """One cache for all sizes of a dtype and context, with the block table of 256 requests."""
    return make_inputs(
        geometry,
        MOST_REQUESTS,
        1,
        dtype,
        "cuda",
        context=context,
        poison=False,
        most_tokens=MOST_TOKENS,
    )


class Work:
    """The inputs of a size: one cache, and rotating sets of rows."""

    def __init__(self, geometry: dict[str, int], size: Size, cache: Inputs) -> None:
        self.size = size
        least = size.requests * geometry["selected"] * geometry["kv_heads"]
        least *= TOKEN_BYTES[size.dtype]
        most = MOST_REQUESTS // size.requests
        self.sets = max(1, min(MOST_SETS, most, int(4 * L2_BYTES // least)))
        requests = size.requests * self.sets
        generator = torch.Generator(device="cuda").manual_seed(size.rows)
        lists, _ = random_lists(
            requests,
            size.tokens,
            size.context,
            geometry["selected"],
            size.overlap,
            generator,
            "cuda",
        )
        shape = (requests * size.tokens, geometry["q_heads"], geometry["head_dim"])
        q, gates = torch.randn(2, *shape, generator=generator, device="cuda").to(torch.bfloat16)
        self.whole = replace(
            cache,
            q=q,
            selected_tokens=lists,
            request_indices=torch.arange(requests, device="cuda")
            .repeat_interleave(size.tokens)
            .int(),
            query_positions=None,
            output_gate=2 * gates,
        )
        self.inputs = [self._part(number) for number in range(self.sets)]
        self.out = [torch.empty_like(each.q) for each in self.inputs]

    def _part(self, number: int) -> Inputs:
        rows = slice(number * self.size.rows, (number + 1) * self.size.rows)
        whole = self.whole
        return replace(
            whole,
            q=whole.q[rows],
            selected_tokens=whole.selected_tokens[rows],
            request_indices=whole.request_indices[rows],
            output_gate=None if whole.output_gate is None else whole.output_gate[rows],
        )

    def union_bytes(self) -> float:
        """Bytes of the union of each request's lists, a mean over the sets."""
        lists = self.whole.selected_tokens.view(self.size.requests * self.sets, -1).long()
        marks = torch.zeros(lists.shape[0], self.size.context + 1, device="cuda")
        marks.scatter_(1, torch.where(lists >= 0, lists, self.size.context), 1.0)
        tokens = float(marks[:, :-1].sum()) / self.sets
        return tokens * self.whole.k_cache.shape[1] * TOKEN_BYTES[self.size.dtype]

    def overlap(self) -> float:
        """Share of a request's first list that stands in its last, too."""
        lists = self.whole.selected_tokens.unflatten(0, (-1, self.size.tokens))
        marks = torch.zeros(2, lists.shape[0], self.size.context + 1, device="cuda")
        for mark, column in zip(marks, (0, -1), strict=True):
            each = lists[:, column].long()
            mark.scatter_(1, torch.where(each >= 0, each, self.size.context), 1.0)
        marks = marks[:, :, :-1]
        return float((marks[0] * marks[1]).sum() / marks[0].sum())


def ours(
    pack: specplan.Pack, inputs: Inputs, out: torch.Tensor, space: torch.Tensor, size: Size
) -> dict[str, Any]:
    """Arguments of the op."""
    arguments = {
        "q": inputs.q,
        "k_cache": inputs.k_cache,
        "v_cache": inputs.v_cache,
        "block_table": inputs.block_table,
        "selected_tokens": inputs.selected_tokens,
        "request_indices": inputs.request_indices,
        "out": out,
        "workspace": space,
        "tokens": size.tokens,
        "softmax_scale": inputs.softmax_scale,
        "output_gate": inputs.output_gate,
    }
    if size.dtype != "bf16":
        arguments |= {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    if size.dtype == "nvfp4":
        arguments |= {
            "k_block_scales": inputs.k_block_scales,
            "v_block_scales": inputs.v_block_scales,
            "v_scale_order": inputs.v_scale_order,
        }
    return arguments


def torch_gather_sdpa(inputs: Inputs, out: torch.Tensor) -> None:
    """Each row's tokens gathered, then dense attention over them: BF16 and FP8."""
    tokens = inputs.selected_tokens.long()
    page_size = inputs.k_cache.shape[2]
    valid = tokens >= 0
    safe = tokens.clamp(min=0)
    pages = inputs.block_table.long()[inputs.request_indices.long()[:, None], safe // page_size]
    slots = safe % page_size

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        raw = cache if cache.dtype == torch.bfloat16 else cache.view(torch.uint8)
        taken = raw[pages, :, slots].transpose(1, 2)
        return taken.view(cache.dtype).to(torch.bfloat16)

    fp8 = inputs.k_cache.dtype != torch.bfloat16
    q = inputs.q[:, :, None, :]
    result = torch.nn.functional.scaled_dot_product_attention(
        q * inputs.k_scale.to(torch.bfloat16) if fp8 else q,
        gathered(inputs.k_cache),
        gathered(inputs.v_cache),
        attn_mask=valid[:, None, None, :],
        scale=inputs.softmax_scale,
        enable_gqa=True,
    )[:, :, 0]
    if fp8:
        result = result * inputs.v_scale.to(torch.bfloat16)
    out.copy_(result if inputs.output_gate is None else gate(result, inputs.output_gate))


def tuned(work: Work) -> triton_split_k.Config:
    """The peer's fastest configuration for a size."""
    inputs, out = work.inputs[: min(4, work.sets)], work.out
    configs = triton_split_k.candidates(work.size.rows, inputs[0].k_cache.shape[1])
    arms = {
        str(number): [
            triton_split_k.prepare(each, into, config)
            for each, into in zip(inputs, out, strict=False)
        ]
        for number, config in enumerate(configs)
    }
    times = measure.graph_times(arms, nodes=8, rounds=3)
    return configs[int(min(times, key=lambda name: times[name]))]


def agree(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    if not error < AGREEMENT:
        raise SystemExit(f"{name} differs from ours by {error:.3g} in relative L2")


def run(
    pack: specplan.Pack,
    size: Size,
    cache: Inputs,
    known: dict[tuple[str, int], triton_split_k.Config],
) -> dict[str, Any]:
    geometry = dict(pack.manifest().problems["sparse_gqa_verify"][PROBLEM])
    work = Work(geometry, size, cache)
    op = pack.sparse_gqa_verify
    words = op.workspace(
        problem=PROBLEM, requests=size.requests, tokens=size.tokens, dtype=size.dtype
    )
    space = torch.empty(words, device="cuda")
    calls = [
        ours(pack, each, out, space, size) for each, out in zip(work.inputs, work.out, strict=True)
    ]
    op.require(**calls[0])
    wanted = work.out[0].clone()

    nodes = work.sets * -(-16 // work.sets)
    arms: dict[str, list[Callable[[], Any]]] = {
        "ours": [partial(op.require, **call) for call in calls]
    }
    peers = size.dtype != "nvfp4"
    config = None
    if peers:
        config = known.get((size.dtype, size.rows))
        if config is None:
            config = known[size.dtype, size.rows] = tuned(work)
        arms["triton"] = [
            triton_split_k.prepare(each, out, config)
            for each, out in zip(work.inputs, work.out, strict=True)
        ]
        arms["triton"][0]()
        agree("the Triton kernel", work.out[0], wanted)
    graph = measure.graph_times(arms, nodes=nodes)
    if peers:
        torch_gather_sdpa(work.inputs[0], work.out[0])
        agree("gather + SDPA", work.out[0], wanted)
        arm = [
            partial(torch_gather_sdpa, each, out)
            for each, out in zip(work.inputs[:2], work.out, strict=False)
        ]
        # Ten to fifty times slower than the others, so that few rounds tell it.
        graph |= measure.graph_times({"torch": arm}, nodes=len(arm), rounds=3)
    union = work.union_bytes()
    row: dict[str, Any] = {
        "dtype": size.dtype,
        "rows": size.rows,
        "requests": size.requests,
        "context": size.context,
        "overlap": size.overlap,
        "overlap_found": work.overlap(),
        "sets": work.sets,
        **{f"{name}_us": value for name, value in graph.items()},
        "union_bytes": union,
        "floor_us": union / COPY_CEILING * 1e6,
        "ours_union_bytes_per_s": union / graph["ours"] * 1e6,
    }
    if config is not None:
        row["triton_config"] = [config.tile, config.warps, config.splits]
        row["triton_union_bytes_per_s"] = union / graph["triton"] * 1e6
        row["ours_over_triton"] = graph["ours"] / graph["triton"]
    return row


def host(pack: specplan.Pack, dtype: str) -> dict[str, Any]:
    """Host time of a call at 4 rows: the compiled function, the op, a bound launch."""
    geometry = dict(pack.manifest().problems["sparse_gqa_verify"][PROBLEM])
    size = Size(dtype, 4, 8192, 0.9)
    work = Work(geometry, size, make_cache(geometry, dtype, size.context))
    op = pack.sparse_gqa_verify
    words = op.workspace(problem=PROBLEM, requests=size.requests, tokens=size.tokens, dtype=dtype)
    space = torch.empty(words, device="cuda")
    call = ours(pack, work.inputs[0], work.out[0], space, size)
    bound = op.bind(**call)
    if not bound:
        raise SystemExit(str(bound))
    # The same arguments as the bound launch, all of them torch's.
    each = work.inputs[0]
    scales: tuple[Any, ...] = () if dtype == "bf16" else (each.k_scale, each.v_scale)
    if dtype == "nvfp4":
        scales = (each.k_block_scales, each.v_block_scales, *scales)
    owner = each.request_indices
    tensors = (
        *(each.q, each.k_cache, each.v_cache, *scales, each.block_table, each.selected_tokens),
        *(owner, owner, owner, each.output_gate, work.out[0], space),
    )
    scalars = bound.args[len(tensors) :]
    function = bound.func
    times = measure.host_times(
        {
            "bare": lambda: function(*tensors, *scalars),
            "op": lambda: op(**call),
            "bind": bound,
            "bare_converted": lambda: function(*bound.args),
        },
        calls=100,
    )
    return {
        "dtype": dtype,
        **{f"host_{name}_us": value for name, value in times.items()},
        "host_op_over_bare_us": times["op"] - times["bare"],
        "host_bind_over_bare_converted_us": times["bind"] - times["bare_converted"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtypes", nargs="+", default=list(TOKEN_BYTES), choices=TOKEN_BYTES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--overlaps", type=float, nargs="+", default=[0.9, 0.5, 0.0])
    options = parser.parse_args()
    pack = specplan.load(options.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    known: dict[tuple[str, int], triton_split_k.Config] = {}
    geometry = dict(pack.manifest().problems["sparse_gqa_verify"][PROBLEM])
    rows = []
    for context, dtype in product(options.contexts, options.dtypes):
        cache = make_cache(geometry, dtype, context)
        for overlap, count in product(options.overlaps, options.rows):
            rows.append(run(pack, Size(dtype, count, context, overlap), cache, known))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
        del cache
        torch.cuda.empty_cache()
    hosts = [host(pack, dtype) for dtype in options.dtypes]
    print(measure.table(hosts))
    measure.write(
        options.out,
        "sparse_gqa_verify",
        rows,
        host=hosts,
        method="CUDA graph over rotating rows of one cache, medians; ours and the Triton peer "
        "alternate, gather + SDPA in graphs of its own; floor = union bytes / 4.3 TB/s",
        seconds=round(time.monotonic() - begin, 1),
    )


if __name__ == "__main__":
    main()

"""The launches of one verify step in one CUDA graph, ours beside peers put together, in one run.

    python benchmarks/whole_step.py --packs packs --out benchmarks/results/whole_step.json

A model like Qwen3.8-Flash-Next with 16/32 GDN heads: gather, rollback.gather, 36 layers of
gdn_replay.verify, 12 layers of sparse_gqa_verify (24/2 heads, lists of 2051 of 8192 tokens, page
32), rollback.restore, advance, scatter; 4 tokens a request, no matrix products between. Histories
are drawn row by row and move on by what is accepted, so that every step some rows commit.

Arms, all on the same inputs:

- ``ours``;
- ``triton_replay``: the replay design, split-K attention (the fastest configuration at each size)
  and the copies, each written by hand in Triton: the strongest arm that needs no work of a server
  beside ours;
- ``state_a_token``: the same with a recurrent kernel that stores a whole state after every token,
  as servers without replay do.

Every arm's outputs are compared with ours before anything is timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import copies_triton
import gdn_replay as gdn_bench
import gdn_triton
import rollback as rollback_bench
import sparse_gqa_verify as sparse_bench
import specplan
import step_copies
import torch
import triton_split_k
from specplan.kernels.gdn_replay import cases as gdn_cases
from specplan.kernels.sparse_gqa_verify.cases import Inputs, make_inputs

import measure

TOKENS = 4
GDN_LAYERS, SPARSE_LAYERS = 36, 12
HEADS = {"key_heads": 16, "value_heads": 32}
#: Replays of a sample: the GPU does not idle between the graphs of one.
REPLAYS = 4
Call = Callable[[], Any]


def accepted_tokens(requests: int) -> tuple[list[int], list[int]]:
    """(history lengths, accepted tokens of this step) of a simulated run, by request."""
    _, plain, commits = gdn_bench.simulate(TOKENS)
    draw = random.Random(requests)
    chance = draw.choices(range(1, TOKENS + 1), weights=[1, 1, 2, 5], k=requests)
    return draw.choices(plain + commits, k=requests), chance


class GdnLayers:
    """36 layers of checkpoints and records over the same cursors, and one set of inputs a layer."""

    def __init__(self, pack: specplan.Pack, requests: int) -> None:
        lengths, accepted = accepted_tokens(requests)
        self.steps: list[dict[str, torch.Tensor]] = []
        for layer in range(GDN_LAYERS):
            made = gdn_cases.allocate(HEADS, requests, TOKENS, "bf16", "cuda", 0)
            generator = torch.Generator("cuda").manual_seed(layer)
            gdn_cases.fill(made, generator, 1, TOKENS, padding=False, poison=False)
            step = dict(made.tensors)
            step["A_log"].clamp_(max=1.0)
            step["dt_bias"].clamp_(max=0.0)
            self.steps.append(step)
        first = self.steps[0]
        first["hist_len"].copy_(torch.tensor(lengths, dtype=torch.int32))
        first["bank"].zero_()
        self.n_acc = torch.tensor(accepted, dtype=torch.int32, device="cuda")
        shared = {name: first[name] for name in ("hist_len", "bank", "slot")}
        self.steps = [{**step, **shared} for step in self.steps]
        self.cursors = pack.gdn_replay.Cursors(shared["hist_len"], shared["bank"], **HEADS)
        self.pools = [
            pack.gdn_replay.Pool(self.cursors, *(step[name] for name in gdn_cases.POOLS))
            for step in self.steps
        ]
        self.pristine = [
            {name: step[name].clone() for name in (*gdn_cases.POOLS, "hist_len", "bank")}
            for step in self.steps
        ]
        shape = (requests, TOKENS, HEADS["value_heads"], gdn_cases.HEAD, gdn_cases.HEAD)
        self.states = [
            torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(GDN_LAYERS)
        ]

    def restore(self) -> None:
        for step, before in zip(self.steps, self.pristine, strict=True):
            for name, tensor in before.items():
                step[name].copy_(tensor)


class SparseLayers:
    """12 layers with caches, lists and queries of their own."""

    def __init__(self, pack: specplan.Pack, requests: int, dtype: str) -> None:
        geometry = dict(pack.manifest().problems["sparse_gqa_verify"][sparse_bench.PROBLEM])
        self.size = sparse_bench.Size(dtype, requests * TOKENS, 8192, 0.9)
        self.inputs: list[Inputs] = [
            make_inputs(
                geometry,
                requests,
                TOKENS,
                dtype,
                "cuda",
                seed=layer,
                context=self.size.context,
                poison=False,
                most_tokens=sparse_bench.MOST_TOKENS,
            )
            for layer in range(SPARSE_LAYERS)
        ]
        words = pack.sparse_gqa_verify.workspace(
            problem=sparse_bench.PROBLEM, requests=requests, tokens=TOKENS, dtype=dtype
        )
        self.space = torch.empty(words, device="cuda")
        self.out = [torch.empty_like(each.q) for each in self.inputs]
        self.ours = [
            sparse_bench.ours(pack, each, out, self.space, self.size)
            for each, out in zip(self.inputs, self.out, strict=True)
        ]
        configs = triton_split_k.candidates(self.size.rows, geometry["kv_heads"])
        arms = {
            str(number): [
                triton_split_k.prepare(each, into, config)
                for each, into in zip(self.inputs, self.out, strict=True)
            ]
            for number, config in enumerate(configs)
        }
        times = measure.graph_times(arms, nodes=SPARSE_LAYERS, rounds=3)
        best = min(times, key=lambda name: times[name])
        self.triton: list[Call] = list(arms[best])
        self.config = configs[int(best)]


class Step:
    """All buffers of a step, and the launches of each arm over them."""

    def __init__(self, pack: specplan.Pack, requests: int, dtype: str) -> None:
        device = torch.device("cuda", 0)
        self.pack = pack
        self.gather = step_copies.cases("gather", requests, TOKENS, device)[0].arguments()
        self.scatter = step_copies.cases("scatter", requests, TOKENS, device)[0].arguments()
        self.rollback = rollback_bench.Step(pack, requests * TOKENS, TOKENS, 1)
        rows, keys = self.rollback.page.numel(), self.rollback.keys
        self.old = (
            torch.empty(rows, keys.shape[1] - 1, keys.shape[3], dtype=keys.dtype, device=device),
            torch.empty(rows, 3, dtype=torch.int32, device=device),
        )
        self.gdn = GdnLayers(pack, requests)
        self.sparse = SparseLayers(pack, requests, dtype)
        gdn_arms = {
            f"{block}x{warps}": self._replay(block, warps) for block, warps in gdn_bench.BLOCKS
        }
        times = measure.graph_times(gdn_arms, nodes=GDN_LAYERS, rounds=3)
        self.replay_block = min(times, key=lambda name: times[name])
        snapshot_arms = {
            f"{block}x{warps}": self._snapshots(block, warps) for block, warps in gdn_bench.BLOCKS
        }
        times = measure.graph_times(snapshot_arms, nodes=GDN_LAYERS, rounds=3)
        self.snapshots_block = min(times, key=lambda name: times[name])
        self.triton_gdn = {
            "triton_replay": gdn_arms[self.replay_block],
            "state_a_token": snapshot_arms[self.snapshots_block],
        }
        self.gdn.restore()

    def _replay(self, block: int, warps: int) -> list[Call]:
        return [lambda step=step: gdn_triton.replay(step, block, warps) for step in self.gdn.steps]

    def _snapshots(self, block: int, warps: int) -> list[Call]:
        return [
            partial(gdn_triton.snapshots, step, states, block, warps)
            for step, states in zip(self.gdn.steps, self.gdn.states, strict=True)
        ]

    def run_ours(self) -> None:
        pack, gdn = self.pack, self.gdn
        pack.gather.require(**self.gather)
        pack.rollback.gather.require(*self.rollback.gather_arguments)
        names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "slot", "out")
        for layer, (pool, step) in enumerate(zip(gdn.pools, gdn.steps, strict=True)):
            pack.gdn_replay.verify.require(pool, *(step[name] for name in names))
            if layer % 3 == 2:
                pack.sparse_gqa_verify.require(**self.sparse.ours[layer // 3])
        pack.rollback.restore.require(*self.rollback.restore_arguments)
        pack.gdn_replay.advance.require(gdn.cursors, gdn.steps[0]["slot"], gdn.n_acc, TOKENS)
        pack.scatter.require(**self.scatter)

    def run_peer(self, name: str) -> None:
        gdn = self.gdn
        copies_triton.gather(self.gather)
        copies_triton.save(self.rollback, self.old, restore=False)
        for layer, launch in enumerate(self.triton_gdn[name]):
            launch()
            if layer % 3 == 2:
                self.sparse.triton[layer // 3]()
        copies_triton.save(self.rollback, self.old, restore=True)
        if name == "triton_replay":
            first = gdn.steps[0]
            copies_triton.advance(
                first["hist_len"], first["bank"], first["slot"], gdn.n_acc, TOKENS
            )
        copies_triton.scatter(self.scatter)

    def arms(self) -> dict[str, Call]:
        return {
            "ours": self.run_ours,
            "triton_replay": lambda: self.run_peer("triton_replay"),
            "state_a_token": lambda: self.run_peer("state_a_token"),
        }

    def results(self) -> dict[str, torch.Tensor]:
        """What a step writes, as it is now."""
        stores = {
            name: tensor
            for name, tensor in {**self.gather, **self.scatter}.items()
            if isinstance(tensor, torch.Tensor)
        }
        first = self.gdn.steps[0]
        found = {
            **{f"copies {name}": tensor for name, tensor in stores.items()},
            "rollback keys": self.rollback.keys,
            "rollback positions": self.rollback.positions,
            "hist_len": first["hist_len"],
            "bank": first["bank"],
            **{f"gdn out {i}": step["out"] for i, step in enumerate(self.gdn.steps)},
            **{f"sparse out {i}": out for i, out in enumerate(self.sparse.out)},
        }
        return {name: tensor.clone() for name, tensor in found.items()}

    def check(self) -> None:
        """Every arm's results against ours, from the same start and over poisoned outputs."""
        found: dict[str, Mapping[str, torch.Tensor]] = {}
        for name, run in self.arms().items():
            self.gdn.restore()
            for step in self.gdn.steps:
                step["out"].fill_(float("nan"))
                if name == "state_a_token":
                    step["hist_len"].zero_()  # it starts from the checkpoint alone
            for out in self.sparse.out:
                out.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            found[name] = self.results()
        self.gdn.restore()
        for name, results in found.items():
            for what, tensor in results.items():
                if name == "state_a_token" and what.startswith(("gdn", "hist", "bank")):
                    continue
                wanted = found["ours"][what]
                if tensor.dtype == torch.bfloat16 and "keys" not in what:
                    error = (tensor.float() - wanted.float()).norm() / wanted.float().norm()
                    if not float(error) < sparse_bench.AGREEMENT:
                        raise SystemExit(f"{name}, {what}: relative L2 {float(error):.3g}")
                elif not torch.equal(tensor, wanted):
                    raise SystemExit(f"{name}, {what}: differs from ours")
        self._check_state_a_token()
        self._check_rollback()

    def _check_rollback(self) -> None:
        """Saved, overwritten and restored by each: the same planes, and not those from before."""
        planes = (self.rollback.keys, self.rollback.positions)
        before = [plane.clone() for plane in planes]
        found: list[list[torch.Tensor]] = []
        for gather, restore in (
            (self.rollback.gather, self.rollback.restore),
            (
                lambda: copies_triton.save(self.rollback, self.old, restore=False),
                lambda: copies_triton.save(self.rollback, self.old, restore=True),
            ),
        ):
            gather()
            for plane in planes:
                plane.neg_()
            restore()
            found.append([plane.clone() for plane in planes])
            for plane, old in zip(planes, before, strict=True):
                plane.copy_(old)
        for ours, theirs, old in zip(*found, before, strict=True):
            if not torch.equal(ours, theirs) or torch.equal(ours, -old) or torch.equal(ours, old):
                raise SystemExit("rollback: the restored planes are wrong")

    def _check_state_a_token(self) -> None:
        """Its outputs against ours where there is no history."""
        names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "slot", "out")
        step, pool = self.gdn.steps[0], self.gdn.pools[0]
        step["hist_len"].zero_()
        self.pack.gdn_replay.verify.require(pool, *(step[name] for name in names))
        wanted = step["out"].float().clone()
        step["out"].fill_(float("nan"))
        self.triton_gdn["state_a_token"][0]()
        error = float((step["out"].float() - wanted).norm() / wanted.norm())
        if not error < sparse_bench.AGREEMENT:
            raise SystemExit(f"a state a token: relative L2 {error:.3g}")
        self.gdn.restore()


def step_times(arms: Mapping[str, Call], rounds: int = 15) -> dict[str, float]:
    """Median µs of a step by arm, the arms alternating."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, run in arms.items():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graphs[name] = graph
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            if number >= 2:
                samples[name].append(start.elapsed_time(end) * 1000 / REPLAYS)
    return {name: statistics.median(times) for name, times in samples.items()}


def run(pack: specplan.Pack, requests: int, dtype: str) -> dict[str, Any]:
    step = Step(pack, requests, dtype)
    step.check()
    times = step_times(step.arms())
    row: dict[str, Any] = {
        "dtype": dtype,
        "requests": requests,
        "tokens": TOKENS,
        "gdn_layers": GDN_LAYERS,
        "sparse_layers": SPARSE_LAYERS,
        **{f"{name}_us": value for name, value in times.items()},
        "triton_replay_block": step.replay_block,
        "snapshots_block": step.snapshots_block,
        "triton_config": [
            step.sparse.config.tile, step.sparse.config.warps, step.sparse.config.splits
        ],
    }  # fmt: skip
    row |= {f"{name}_over_ours": times[name] / times["ours"] for name in times if name != "ours"}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp8_e4m3"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32, 64])
    options = parser.parse_args()
    pack = specplan.load(options.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        for requests in options.requests:
            rows.append(run(pack, requests, dtype))
            torch.cuda.empty_cache()
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()},
                  flush=True)  # fmt: skip
            measure.write(
                options.out,
                "whole_step",
                rows,
                method="one CUDA graph a step, medians of 15 samples of 4 replays, arms "
                "alternating; histories drawn by row, moved on by each replay",
                seconds=round(time.monotonic() - begin, 1),
            )


if __name__ == "__main__":
    main()

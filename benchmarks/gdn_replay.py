"""gdn_replay beside what it replaces, in one run: a state after every token, FLA's recurrent
kernel, and the same replay design in Triton.

    python benchmarks/gdn_replay.py --packs packs --out benchmarks/results/gdn_replay.json

First a *mixed* step: histories drawn row by row from a simulated run, so that some rows commit:
what a server runs. Then steps in which no row commits and steps in which every row does are timed
apart, and weighted by the commit rate of that run. Each begins from the same checkpoints and
records: those that an earlier arm's launches left behind a longer history would not be one that a
run can have. Slots rotate over pools of several times the L2, so checkpoints and records come from
memory; a step's inputs are in L2, as they are behind the projection that wrote them. Ours and the
Triton arms are checked against the reference first; FLA's keeps one final state and no records.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gdn_triton
import specplan
import torch
from specplan.kernels.gdn_replay import cases, reference

import measure

WINDOW = cases.WINDOW
COPY_CEILING = 4.3e12
#: Mean accepted tokens a step, the guaranteed one included, by tokens.
MEAN_ACCEPTED = {2: 1.8, 4: 3.3, 8: 5.5}
#: State bytes that the slots of a pool hold together: several times the 60 MB L2.
ROTATING = 512 << 20
MOST_NODES = 128
#: (value rows, warps) of the Triton arms; each figure is that of the best.
BLOCKS = ((16, 2), (32, 2), (32, 4), (64, 4))
Arm = Sequence[Callable[[], Any]]


@functools.cache
def simulate(tokens: int, steps: int = 40_000) -> tuple[float, list[int], list[int]]:
    """(commit rate, history lengths before plain steps, before commits) of one slot's run, drafts
    accepted with one probability each up to the first rejection.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        mean = sum(chance**i for i in range(tokens))
        low, high = (chance, high) if mean < MEAN_ACCEPTED[tokens] else (low, chance)
    draw = random.Random(tokens)
    length = 0
    plain: list[int] = []
    commits: list[int] = []
    for _ in range(steps):
        accepted = 1
        while accepted < tokens and draw.random() < chance:
            accepted += 1
        full = length + tokens > WINDOW
        (commits if full else plain).append(length)
        length = accepted if full else length + accepted
    return len(commits) / steps, plain, commits


class Bench:
    """The buffers of one shape, and a launch of each arm for every window of slots."""

    def __init__(
        self, pack: specplan.Pack, heads: tuple[int, int], dtype: str, requests: int, tokens: int
    ) -> None:
        self.pack, self.dtype, self.requests, self.tokens = pack, dtype, requests, tokens
        self.geometry = {"key_heads": heads[0], "value_heads": heads[1]}
        element = cases.STATE_DTYPES[dtype].itemsize
        self.state_bytes = heads[1] * cases.HEAD**2 * element
        windows = max(2, -(-ROTATING // (self.state_bytes * requests)))
        self.windows = windows = min(windows, max(2, MOST_NODES))
        # A pool of its own geometry: the step's rows are the inputs of every window.
        small = cases.allocate(
            self.geometry, requests, tokens, dtype, "cuda", requests * (windows - 1)
        )
        generator = torch.Generator("cuda").manual_seed(1)
        cases.fill(small, generator, 1, tokens, padding=False, poison=False)
        self.step = small.tensors
        self.step["hist_len"].zero_()
        self.step["bank"].zero_()
        self.step["A_log"].clamp_(max=1.0)
        self.step["dt_bias"].clamp_(max=0.0)
        self.pristine = {name: self.step[name].clone() for name in cases.POOLS}
        order = torch.arange(requests * windows, dtype=torch.int32, device="cuda")
        self.slots = [order[i * requests : (i + 1) * requests] for i in range(windows)]
        cursors = pack.gdn_replay.Cursors(
            self.step["hist_len"], self.step["bank"], **self.geometry, dtype=dtype
        )
        self.pool = pack.gdn_replay.Pool(cursors, *(self.step[name] for name in cases.POOLS))
        rows = max(requests, -(-ROTATING // (self.state_bytes * tokens)))
        rows = min(rows, requests * windows) // requests * requests
        shape = (rows, tokens, heads[1], cases.HEAD, cases.HEAD)
        self.states = torch.empty(shape, dtype=cases.STATE_DTYPES[dtype], device="cuda")

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Pools as they were at first, and history lengths of all slots from those that a run has
        before steps of one kind.
        """
        self.restore()
        count = self.step["hist_len"].numel()
        drawn = random.Random(0).choices(lengths, k=count)
        self.step["hist_len"].copy_(torch.tensor(drawn, dtype=torch.int32))

    def restore(self) -> None:
        for name, before in self.pristine.items():
            self.step[name].copy_(before)

    def inputs(self, window: int) -> dict[str, torch.Tensor]:
        return {**self.step, "slot": self.slots[window]}

    def ours(self) -> Arm:
        names = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "slot", "out")
        launches = []
        for window in range(self.windows):
            step = self.inputs(window)
            launch = self.pack.gdn_replay.verify.bind(self.pool, *(step[name] for name in names))
            if not launch:
                raise SystemExit(str(launch))
            launches.append(launch)
        return launches

    def replay(self, block: int, warps: int) -> Arm:
        def launch(step: dict[str, torch.Tensor]) -> Callable[[], None]:
            return lambda: gdn_triton.replay(step, block, warps)

        return [launch(self.inputs(window)) for window in range(self.windows)]

    def snapshots(self, block: int, warps: int) -> Arm:
        def launch(window: int) -> Callable[[], None]:
            step = self.inputs(window)
            at = window * self.requests % self.states.shape[0]
            states = self.states[at : at + self.requests]
            return lambda: gdn_triton.snapshots(step, states, block, warps)

        return [launch(window) for window in range(self.windows)]

    def fla(self) -> Arm | str:
        """FLA's kernel on states that lie in row order already: its gather from slots is not
        counted, and it keeps one final state only. A text says why there is none.
        """
        try:
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        except ImportError as error:
            return f"not importable: {error}"
        step = self.step
        dense = {name: step[name].contiguous() for name in ("q", "k", "v", "a", "b")}
        numel = self.step["state"][0].numel()
        shape = (self.requests, *self.step["state"].shape[1:])

        def launch(window: int) -> Callable[[], Any]:
            first = self.states.view(-1, numel)
            at = window * self.requests % (first.shape[0] // self.requests * self.requests)
            at = min(at, first.shape[0] - self.requests)
            initial = first[at : at + self.requests].view(shape)
            return lambda: fused_recurrent_gated_delta_rule(
                dense["q"],
                dense["k"],
                dense["v"],
                g=dense["a"],
                beta=dense["b"],
                initial_state=initial,
                state_v_first=True,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                A_log=step["A_log"],
                dt_bias=step["dt_bias"],
            )

        self.states.normal_(0.0, 0.3)
        launches = [launch(window) for window in range(self.windows)]
        try:
            launches[0]()
            torch.cuda.synchronize()
        except Exception as error:
            return f"refused the call: {type(error).__name__}: {error}"
        return launches

    def check(self, arms: dict[str, Arm]) -> None:
        """Every arm's output on the first window against the reference; the pools must be as they
        were at first.
        """
        step = self.inputs(0)
        want = {name: tensor.clone() for name, tensor in step.items()}
        reference.verify(**want)
        for name, arm in arms.items():
            step["out"].fill_(float("nan"))
            arm[0]()
            torch.testing.assert_close(
                step["out"], want["out"], atol=4e-3, rtol=1.6e-2, msg=lambda m, n=name: f"{n}: {m}"
            )
            self.restore()

    def bytes_a_step(self, lengths: Sequence[int], commits: bool) -> float:
        """What one launch must move: the floor beside which a time means something."""
        keys, values = self.geometry["key_heads"], self.geometry["value_heads"]
        record = values * cases.HEAD * 2 + keys * cases.HEAD * 2 + values * 4
        inputs = (2 * keys + 2 * values) * cases.HEAD * 2 + values * 4
        history = sum(lengths) / len(lengths) * record
        state = self.state_bytes * (2 if commits else 1)
        return self.requests * (state + history + self.tokens * (record + inputs))


def best(make: Callable[[int, int], Arm], nodes: int) -> tuple[str, Arm]:
    """The fastest of ``BLOCKS`` for one Triton arm."""
    arms = {f"{block}x{warps}": make(block, warps) for block, warps in BLOCKS}
    times = measure.graph_times(arms, nodes=nodes, rounds=3)
    name = min(times, key=lambda each: times[each])
    return name, arms[name]


def run(
    pack: specplan.Pack, heads: tuple[int, int], dtype: str, requests: int, tokens: int
) -> dict[str, Any]:
    rate, plain, commits = simulate(tokens)
    bench = Bench(pack, heads, dtype, requests, tokens)
    nodes = bench.windows
    ours = bench.ours()
    fla = bench.fla()
    arms: dict[str, Arm] = {"ours": ours}
    others: dict[str, Arm] = {}
    row: dict[str, Any] = {
        "heads": f"{heads[0]}/{heads[1]}",
        "dtype": dtype,
        "requests": requests,
        "tokens": tokens,
        "commit_rate": rate,
        "fla": fla if isinstance(fla, str) else "timed",
    }
    bench.set_lengths(plain)
    row["triton_replay_block"], arms["triton_replay"] = best(bench.replay, nodes)
    row["snapshots_block"], others["snapshots"] = best(bench.snapshots, nodes)
    bench.set_lengths(plain + commits)
    bench.check(arms)
    for name, value in measure.graph_times(arms, nodes=nodes).items():
        row[f"{name}_mixed_us"] = value
    mixed = (1 - rate) * bench.bytes_a_step(plain, False) + rate * bench.bytes_a_step(commits, True)
    row["floor_mixed_us"] = mixed / COPY_CEILING * 1e6
    floor = 0.0
    for phase, lengths, share in (("plain", plain, 1 - rate), ("commit", commits, rate)):
        bench.set_lengths(lengths)
        # The snapshots start from the checkpoint alone, so they are right where there is no
        # history; a commit repeated by the graph folds the same history again, which takes as long.
        bench.check(arms)
        times = measure.graph_times(arms, nodes=nodes)
        for name, value in times.items():
            row[f"{name}_{phase}_us"] = value
            row[f"{name}_us"] = row.get(f"{name}_us", 0.0) + share * value
        floor += share * bench.bytes_a_step(lengths, phase == "commit")
    bench.set_lengths([0])
    bench.check(others)
    if not isinstance(fla, str):
        others["fla"] = fla
    row |= {f"{name}_us": t for name, t in measure.graph_times(others, nodes=nodes).items()}
    row["floor_us"] = floor / COPY_CEILING * 1e6
    row["share_of_ceiling"] = row["floor_us"] / row["ours_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=cases.STATE_DTYPES)
    parser.add_argument("--heads", nargs="+", default=["16/32", "16/64"], help="key/value heads")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2, 4, 8], choices=MEAN_ACCEPTED)
    options = parser.parse_args()
    pack = specplan.load(options.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    for heads, dtype, requests, tokens in itertools.product(
        options.heads, options.dtypes, options.requests, options.tokens
    ):
        keys, values = map(int, heads.split("/"))
        rows.append(run(pack, (keys, values), dtype, requests, tokens))
        torch.cuda.empty_cache()
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()},
              flush=True)  # fmt: skip
        # After each: a run that is ended early leaves what it has measured.
        measure.write(
            options.out,
            "gdn_replay",
            rows,
            method="CUDA graphs over rotating slots, medians; mixed: histories drawn by row; "
            "plain and commit steps apart, weighted by commit_rate, the rate of a simulated run; "
            "floor at 4.3 TB/s",
            seconds=round(time.monotonic() - begin, 1),
        )


if __name__ == "__main__":
    main()

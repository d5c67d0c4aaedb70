"""scatter and gather beside the torch ops that they replace, an empty kernel and a raw launch, in
one run.

python benchmarks/step_copies.py --packs packs --out benchmarks/results/step_copies.json
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import specplan
import torch
from specplan.kernels.case import ExactCase
from specplan.kernels.gather.cases import GatherCase
from specplan.kernels.scatter.cases import ScatterCase

import measure

#: Rotating buffer sets of one arm. They fit L2 many times over, as they do in a server between two
#: steps: L2 is warm.
SETS = 8


def torch_scatter(a: dict[str, Any]) -> None:
    """The ops that the kernel replaces: pads, a masked select by length, and four index copies."""
    rows = slice(a["row_begin"], a["row_begin"] + a["rows"])
    slots = a["slots"][: a["rows"]]

    def padded(tokens: torch.Tensor, width: int) -> torch.Tensor:
        tokens = tokens[rows]
        if tokens.shape[1] == width:
            return tokens
        return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))

    lens = a["lens"][rows]
    history = padded(a["new_tokens"], a["store_new_tokens"].shape[0])
    column = torch.arange(history.shape[1], device=history.device)
    history = torch.where(column < lens.unsqueeze(1), history, 0)
    a["store_new_tokens"].squeeze(-1).index_copy_(1, slots, history.T)
    following = padded(a["next_new_tokens"], a["store_next_new_tokens"].shape[0])
    a["store_next_new_tokens"].squeeze(-1).index_copy_(1, slots, following.T)
    a["store_lens"].index_copy_(0, slots, lens)
    drafts = padded(a["next_draft_tokens"], a["store_next_draft"].shape[1])
    a["store_next_draft"].index_copy_(0, slots, drafts)


def torch_gather(a: dict[str, Any]) -> None:
    """The four gathers that the kernel replaces."""
    r, t, d = a["requests"], a["tokens"], a["drafts"]
    slots = a["slots"][:r]
    at = a["input_ids_begin"]
    a["input_ids"][at : at + r * t] = (
        a["store_next_new_tokens"].squeeze(-1)[:t].index_select(1, slots).T.reshape(-1)
    )
    at = a["pos_offsets_begin"]
    torch.index_select(
        a["store_lens"], 0, a["pos_indices"][: r * t], out=a["pos_offsets"][at : at + r * t]
    )
    if d:
        at = a["draft_tokens_begin"]
        a["draft_tokens"][at : at + r * d] = (
            a["store_next_draft"].index_select(0, slots)[:, :d].reshape(-1)
        )
    at = a["kv_offsets_begin"]
    a["kv_offsets"][at : at + r] = a["store_lens"].index_select(0, slots) - t


def cases(family: str, requests: int, tokens: int, device: torch.device) -> list[ExactCase]:
    made: list[ExactCase] = []
    for index in range(SETS):
        case: ExactCase
        if family == "scatter":
            case = ScatterCase(
                "bench",
                {"history": 8, "next": 8, "draft": 7},
                device,
                rows=requests,
                widths=(tokens, tokens, tokens - 1),
                extra_slots=256,
            )
        else:
            case = GatherCase(
                "bench",
                {"next": 8, "draft": 7},
                device,
                requests=requests,
                tokens=tokens,
                drafts=tokens - 1,
                slots=requests + 256,
            )
        case.refill(index)
        made.append(case)
    return made


def with_long_slots(case: ExactCase) -> dict[str, Any]:
    """torch's index copies take int64 indices; a server keeps them so, and the conversion is not
    timed.
    """
    slots = case.arguments()["slots"].long()
    return {**case.arguments(), "slots": slots}


def run(pack: specplan.Pack, family: str, requests: int, tokens: int) -> dict[str, Any]:
    import tvm_ffi

    device = torch.device("cuda", 0)
    op = getattr(pack, family)
    replaced = {"scatter": torch_scatter, "gather": torch_gather}[family]
    sets = cases(family, requests, tokens, device)
    empty = measure.EmptyKernel()
    picked = op.pick(problem="mtp7", requests=requests, tokens=tokens)
    if not picked:
        raise SystemExit(str(picked))
    graph = measure.graph_times(
        {
            "empty": [empty],
            "ours": [lambda c=c: op.require(**c.arguments()) for c in sets],
            "torch": [lambda a=a: replaced(a) for a in map(with_long_slots, sets)],
        }
    )
    positional = tuple(sets[0].arguments().values())
    # Scatter's compiled function also takes the columns that its plan was picked for.
    bare = (*positional, *([positional[0].shape[1]] if family == "scatter" else []))
    converted = tuple(tvm_ffi.from_dlpack(a) if isinstance(a, torch.Tensor) else a for a in bare)
    function, long_slots = picked.function, with_long_slots(sets[0])
    host = measure.host_times(
        {
            "raw": empty.bound(torch.cuda.current_stream().cuda_stream),
            "bare": lambda: function(*bare),
            "op": lambda: op(*positional),
            "bare_converted": lambda: function(*converted),
            "bind": op.bind(*positional),
        }
    )
    host |= measure.host_times({"torch": lambda: replaced(long_slots)}, calls=50, rounds=9)
    return {
        "family": family,
        "requests": requests,
        "tokens": tokens,
        **{f"graph_{name}_us": value for name, value in graph.items()},
        **{f"host_{name}_us": value for name, value in host.items()},
        "host_op_over_bare_us": host["op"] - host["bare"],
        "host_bind_over_converted_us": host["bind"] - host["bare_converted"],
    }


_START = """
import time
t0 = time.perf_counter(); import torch
t1 = time.perf_counter(); import specplan, specplan.pack
t2 = time.perf_counter(); torch.zeros(1, device="cuda"); torch.cuda.synchronize()
t3 = time.perf_counter(); pack = specplan.load({packs!r}, candidates=True)
t4 = time.perf_counter(); pack.prepare()
t5 = time.perf_counter(); print(t2 - t1, t4 - t3, t5 - t4)
"""


def start_times(packs: str) -> dict[str, float]:
    """Seconds in a fresh process, medians of 5: import beyond torch, load + verify (tvm-ffi's
    import included), prepare.
    """
    samples = []
    for _ in range(5):
        code = _START.format(packs=packs)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        samples.append([float(text) for text in done.stdout.split()])
    names = ("import_s", "load_verify_s", "prepare_s")
    return {n: statistics.median(s[i] for s in samples) for i, n in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pack = specplan.load(options.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    rows = [
        run(pack, family, requests, tokens)
        for family in ("scatter", "gather")
        for requests in (1, 8, 64, 256)
        for tokens in (1, 4, 8)
    ]
    start = start_times(str(options.packs))
    print(measure.table(rows))
    print({name: round(value, 3) for name, value in start.items()})
    measure.write(
        options.out,
        "step_copies",
        rows,
        method="CUDA graph of 64 nodes over 8 buffer sets, L2 warm, median of 15 replays; "
        "host: median of 25 rounds of 400 calls",
        start=start,
        seconds=round(time.monotonic() - begin, 1),
    )


if __name__ == "__main__":
    main()

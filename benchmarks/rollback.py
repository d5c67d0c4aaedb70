"""rollback beside the torch index ops that it replaces, in one run.

    python benchmarks/rollback.py --packs packs --out benchmarks/results/rollback.json

12 bf16 planes with rows of 256 bytes and one int32 plane with rows of 12 bytes, places random, half
of the rows rejected. Buffers rotate; at 2048 rows the sets are several times the 60 MB L2, at few
rows a step's rows fit L2 as they do in a server.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import specplan
import torch

import measure

LAYERS, ROW, PAGE_TOKENS = 12, 128, 128
COPY_CEILING = 4.3e12


class Step:
    """One verify step's caches, snapshot and inputs."""

    def __init__(self, pack: specplan.Pack, rows: int, tokens: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        pages = 2 + 3 * rows // PAGE_TOKENS
        shape = (pages, LAYERS + 1, PAGE_TOKENS, ROW)
        self.keys = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        self.keys.normal_(generator=generator)
        self.positions = torch.randint(
            0, 1 << 20, (pages, 2, PAGE_TOKENS, 3), generator=generator, device="cuda"
        ).int()
        self.planes = [self.keys[:, i] for i in range(LAYERS)] + [self.positions[:, 0]]
        self.layout, self.table = pack.rollback.describe(self.planes)
        place = torch.randperm(pages * PAGE_TOKENS, generator=generator, device="cuda")[:rows]
        self.long_page, self.long_within = place // PAGE_TOKENS, place % PAGE_TOKENS
        self.page, self.within = self.long_page.int(), self.long_within.int()
        self.old = torch.zeros(rows, self.layout.record_bytes, dtype=torch.uint8, device="cuda")
        self.pending = torch.zeros(1, dtype=torch.int32, device="cuda")
        order = torch.randperm(rows, generator=generator, device="cuda")
        self.rejected = (order < rows // 2).int()
        self.accepted = torch.full((rows // tokens,), tokens // 2, dtype=torch.int32, device="cuda")
        self.saved = [
            torch.empty(rows, *p.shape[2:], dtype=p.dtype, device="cuda") for p in self.planes
        ]
        ops, common = pack.rollback, (self.layout, tokens, self.table, self.page, self.within)
        self.gather_arguments = (*common, self.old, self.pending)
        self.restore_arguments = (*self.gather_arguments, self.rejected)
        self.commit_arguments = (*self.gather_arguments, self.accepted)
        self.gather = lambda: ops.gather.require(*self.gather_arguments)
        self.restore = lambda: ops.restore.require(*self.restore_arguments)
        self.commit = lambda: ops.commit.require(*self.commit_arguments)

    def pair(self) -> None:
        self.gather()
        self.restore()

    def torch_gather(self) -> None:
        for plane, saved in zip(self.planes, self.saved, strict=True):
            saved.copy_(plane[self.long_page, self.long_within])

    def torch_restore(self) -> None:
        mask = (self.rejected != 0)[:, None]
        for plane, saved in zip(self.planes, self.saved, strict=True):
            now = plane[self.long_page, self.long_within]
            plane[self.long_page, self.long_within] = torch.where(mask, saved, now)


def run(pack: specplan.Pack, rows: int) -> dict[str, Any]:
    # 2048 rows are the most: 256 requests of 8 tokens. Fewer rows are requests of 4.
    tokens = 8 if rows > 1024 else 4
    step_bytes = 2 * rows * (LAYERS * ROW * 2 + 12)
    sets = 24 if rows >= 512 else 8
    steps = [Step(pack, rows, tokens, seed) for seed in range(sets)]
    source = [
        torch.randint(0, 255, (step_bytes // 2,), dtype=torch.uint8, device="cuda")
        for _ in range(2 * sets)
    ]
    graph = measure.graph_times(
        {
            "empty": [measure.EmptyKernel()],
            "gather": [s.gather for s in steps],
            # A restore consumes its snapshot, so it is timed behind the gather that arms it.
            "gather_restore": [s.pair for s in steps],
            "copy": [lambda i=i: source[2 * i].copy_(source[2 * i + 1]) for i in range(sets)],
        },
        nodes=2 * sets,
    )
    graph |= measure.graph_times(
        {
            "torch_gather": [s.torch_gather for s in steps],
            "torch_restore": [s.torch_restore for s in steps],
        },
        nodes=sets,
        rounds=7,
    )
    first = steps[0]
    picked = pack.rollback.gather.pick(
        problem="qsa12", requests=rows // tokens, tokens=tokens, dtype="int32"
    )
    if not picked:
        raise SystemExit(str(picked))
    bare_arguments = (first.table, first.page, first.within, first.old, first.pending)
    layout = first.gather_arguments[0]
    launch = (layout.record_bytes, len(layout.planes), *picked.launch.values())
    host = measure.host_times(
        {
            "bare": lambda: picked.function(*bare_arguments, *launch),
            "op": lambda: pack.rollback.gather(*first.gather_arguments),
            "bind": pack.rollback.gather.bind(*first.gather_arguments),
            "restore": lambda: pack.rollback.restore(*first.restore_arguments),
            "commit": lambda: pack.rollback.commit(*first.commit_arguments),
        },
        calls=200,
    )
    host |= measure.host_times(
        {"torch_gather": first.torch_gather, "torch_restore": first.torch_restore},
        calls=20,
        rounds=7,
    )
    restore = graph["gather_restore"] - graph["gather"]
    return {
        "rows": rows,
        **{f"graph_{name}_us": value for name, value in graph.items()},
        "graph_restore_us": restore,
        "gather_share_of_ceiling": step_bytes / COPY_CEILING * 1e6 / graph["gather"],
        "copy_share_of_ceiling": step_bytes / COPY_CEILING * 1e6 / graph["copy"],
        **{f"host_{name}_us": value for name, value in host.items()},
        "host_op_over_bare_us": host["op"] - host["bare"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pack = specplan.load(options.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    rows = [run(pack, count) for count in (4, 64, 512, 2048)]
    for row in rows:
        print({name: round(value, 3) for name, value in row.items()})
    measure.write(
        options.out,
        "rollback",
        rows,
        method="CUDA graph over rotating buffer sets (8; 24 at 512 rows and more), medians; "
        "restore = (gather + restore) - gather",
        seconds=round(time.monotonic() - begin, 1),
    )


if __name__ == "__main__":
    main()

"""step_setup, draft_step and stage beside the torch ops that they replace, in one run.

    python benchmarks/step_setup.py --packs packs --out benchmarks/results/step_setup.json

step_setup: uniform requests of 4 tokens, a table of 256 pages that is unscaled, slots of tokens and
groups. draft_step: the first of three drafts, from ready ids (the bookkeeping alone) and from
logits of 151,936 columns. stage: 2 KiB and 32 KiB of pinned memory in four segments; the torch arm
copies each from there, the compiled and the Triton arm read the same mapped memory as ours. Each
arm is compared with the reference before it is timed. L2 is warm, as between two steps of a server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import specplan
import torch

import bookkeeping
import measure

COLUMNS = 151_936
#: Bytes of a record.
STAGED = (2048, 32_768)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(STAGED))
    return parser.parse_args(arguments)


def works(
    chosen: argparse.Namespace, device: torch.device
) -> list[tuple[str, str, list[bookkeeping.Work]]]:
    """Family, size in words, and the buffer sets of each row."""
    made = []
    for requests in chosen.requests:
        size, seeds = (requests, chosen.tokens), range(bookkeeping.SETS)
        at = f"{requests} x {chosen.tokens}"
        made += [
            ("step_setup", at, [bookkeeping.setup_work(*size, device, each) for each in seeds]),
            ("draft_step", at, [bookkeeping.draft_work(*size, device, each) for each in seeds]),
            (
                *("draft_step", f"{at}, logits"),
                [bookkeeping.draft_work(*size, device, each, COLUMNS) for each in seeds],
            ),
        ]
    for count in chosen.bytes:
        sets = [
            bookkeeping.stage_work(count // 4, device, each) for each in range(bookkeeping.SETS)
        ]
        made.append(("stage", f"{count} bytes", sets))
    return made


def main() -> None:
    import bookkeeping_triton

    chosen = options()
    pack = specplan.load(chosen.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    for family, size, sets in works(chosen, torch.device("cuda", 0)):
        figures = bookkeeping.run(pack, sets, bookkeeping_triton.ARMS[family])
        rows.append({"family": family, "size": size, **figures})
    print(measure.table(rows))
    measure.write(
        chosen.out,
        "step_setup",
        rows,
        method="CUDA graph of 64 nodes over 8 buffer sets, L2 warm, median of 15 replays; eager: "
        "calls and a wait for the device, median of 9 rounds of 50; host: median of 25 rounds of "
        "400 calls",
        seconds=round(time.monotonic() - begin, 1),
    )


if __name__ == "__main__":
    main()

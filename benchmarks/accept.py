"""accept from logits beside the torch ops that it replaces, in one run.

    python benchmarks/accept.py --packs packs --out benchmarks/results/accept.json

Requests of 4 tokens; next token, rows, lengths, positions and the cursors of ``gdn_replay`` are all
asked for. Arms: ours; the torch ops eager, in a CUDA graph, and through torch.compile in one; a
plain Triton kernel, a program a request. Each is compared with the reference before it is timed.
Eight sets of logits rotate: of 4 rows they fit L2, as logits do that were just written; from 64
rows on they do not.
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

COPY_CEILING = 4.3e12
#: Vocabularies of Qwen3-Next and of a model with 248,320 tokens.
COLUMNS = (151_936, 248_320)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--columns", type=int, nargs="+", default=list(COLUMNS))
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=sorted(bookkeeping.DTYPES))
    return parser.parse_args(arguments)


def share(requests: int, tokens: int, columns: int, dtype: str, micros: float) -> float:
    """The logits' bytes over the copy ceiling, as a share of a time in µs."""
    item = bookkeeping.DTYPES[dtype].itemsize
    return requests * tokens * columns * item / COPY_CEILING * 1e6 / micros


def run(
    pack: specplan.Pack, requests: int, tokens: int, columns: int, dtype: str
) -> dict[str, Any]:
    import bookkeeping_triton

    device = torch.device("cuda", 0)
    works = [
        bookkeeping.accept_work(requests, tokens, columns, dtype, device, seed)
        for seed in range(bookkeeping.SETS)
    ]
    figures = bookkeeping.run(pack, works, bookkeeping_triton.accept)
    size = (requests, tokens, columns, dtype)
    return {
        "dtype": dtype,
        "columns": columns,
        "requests": requests,
        "tokens": tokens,
        **figures,
        "share_of_ceiling": share(*size, figures["graph_ours_us"]),
        "triton_share_of_ceiling": share(*size, figures["graph_triton_us"]),
    }


def main() -> None:
    chosen = options()
    pack = specplan.load(chosen.packs, candidates=True)
    pack.prepare()
    begin = time.monotonic()
    rows = []
    for dtype in chosen.dtypes:
        for columns in chosen.columns:
            for requests in chosen.requests:
                rows.append(run(pack, requests, chosen.tokens, columns, dtype))
                print({name: round(v, 3) if isinstance(v, float) else v
                       for name, v in rows[-1].items()}, flush=True)  # fmt: skip
    measure.write(
        chosen.out,
        "accept",
        rows,
        method="CUDA graph of 64 nodes over 8 buffer sets, median of 15 replays; eager: calls and "
        "a wait for the device, median of 9 rounds of 50; host: median of 25 rounds of 400 calls",
        seconds=round(time.monotonic() - begin, 1),
    )


if __name__ == "__main__":
    main()

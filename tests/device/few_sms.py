"""Certification samples on few SMs, as a smaller device of the arch or a MIG slice has them.

    python tests/device/few_sms.py --packs packs [--sms 16] [--family F ...] [--most-requests 64]

Every compiled form of every family runs what `specplan certify` runs of a cell (eager against the
reference, again bit for bit, in a graph with rewritten inputs), on a stream of a CUDA green context
that has so many SMs. A kernel that assumed all of its CTAs resident would hang here or be wrong.
That the stream has few SMs is measured first: a matrix product must take at least twice as long on
it. Exit 0 if every sample passed. With MPS the same limit holds for a whole process:
`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=12 specplan certify --shard 1/50 ...`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import specplan
import torch
from specplan.plans.catalog import load
from specplan.plans.coverage import uses_of
from specplan.tools.certify import CertificationError, FamilyRun, Shard


def stream_of(sms: int) -> tuple[torch.cuda.Stream, int]:
    """A stream of the current device on which at least ``sms`` SMs work, and how many do."""
    from cuda.bindings import driver

    def done(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            raise SystemExit(f"no green context on this machine: {code}")
        return values[0] if len(values) == 1 else values

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    device = done(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = done(driver.cuDeviceGetDevResource(device, kind))
    groups, _, _ = done(driver.cuDevSmResourceSplitByCount(1, whole, 0, sms))
    described = done(driver.cuDevResourceGenerateDesc(groups[:1], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = done(driver.cuGreenCtxCreate(described, device, int(flags)))
    blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = done(driver.cuGreenCtxStreamCreate(context, int(blocking), 0))
    return torch.cuda.ExternalStream(int(stream)), groups[0].sm.smCount


def seconds(stream: torch.cuda.Stream) -> float:
    """What ten products of large matrices take on a stream."""
    with torch.cuda.stream(stream):
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for count in (2, 10):
            stream.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                a @ a
            stream.synchronize()
            taken = time.perf_counter() - start
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--sms", type=int, default=16)
    parser.add_argument("--family", action="append")
    parser.add_argument("--most-requests", type=int, default=64)
    given = parser.parse_args()

    few, count = stream_of(given.sms)
    slower = seconds(few) / seconds(torch.cuda.Stream())
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{count} of {whole} SMs: matrix products take {slower:.1f} times as long")
    if slower < 2:
        raise SystemExit("the stream is not limited to few SMs, so nothing would be shown")
    catalog = load()
    pack = specplan.load(given.packs, candidates=True)
    pack.prepare()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.graph = partial(torch.cuda.graph, stream=few)  # type: ignore[misc,assignment]
    failed = 0
    for family in given.family or catalog.problems:
        cells = sorted(
            (c for c in catalog.cells(pack.archs[0], family) if c.requests <= given.most_requests),
            key=lambda cell: (cell.requests * cell.tokens, str(cell)),
        )
        # Of every compiled form the largest cell, which has the most CTAs.
        largest = {plan.symbol: cell for cell in cells for plan in catalog.plans_of(cell)}
        samples = list(dict.fromkeys(largest.values()))
        start, comparisons = time.monotonic(), 0
        with tempfile.TemporaryDirectory() as scratch, torch.cuda.stream(few):
            run = FamilyRun(catalog, pack, family, device, Path(scratch), Shard(1, 1))
            for cell in samples:
                try:
                    uses = {cell: uses_of(catalog.plans_of(cell))}
                    for _, measured in run.run_batch([cell], uses):
                        comparisons += sum(each.comparisons for each in measured)
                except CertificationError as error:
                    failed += 1
                    print(f"failed: {error}")
        print(
            f"{family}: {len(samples)} samples, {comparisons} comparisons, "
            f"{time.monotonic() - start:.0f} s"
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

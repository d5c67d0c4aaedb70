"""What compute-sanitizer runs: ops of a pack over a spread of cells, each checked by the reference.

``make sanitize`` runs it under memcheck, racecheck and synccheck, and under initcheck twice:

- ``--unwritten`` leaves the outputs of a scatter as their producer leaves them: the columns at and
  past a row's accepted length, and the rows that are not moved, are never written. The other
  families' pools, caches, snapshots and workspaces are written only where an op has to read
  (``unwritten.py``). initcheck sees a tensor as an allocation of its own only with
  ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``. It must see torch's kernels too, or it takes what they wrote
  for unwritten; so its findings are sorted by kernel afterwards (``--judge clean``), and none may
  be ours.
- ``--control`` runs the torch ops that scatter replaces, which do read what nobody wrote. If the
  tool does not find that (``--judge control``), it finds nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import specplan
import torch
import unwritten
from specplan.plans.catalog import Catalog
from specplan.plans.catalog import load as load_catalog
from specplan.plans.cell import Cell

POINTS = ((1, 1), (3, 2), (8, 8), (64, 4), (256, 8))


def one_of_each_kind(catalog: Catalog, cells: Iterable[Cell]) -> list[Cell]:
    """The smallest cells that reach every compiled form, and in it every kind of launch: integers
    count as 0, 1 or more.
    """
    chosen = []
    seen: set[tuple[Any, ...]] = set()
    for cell in sorted(cells, key=lambda cell: (cell.requests * cell.tokens, str(cell))):
        kinds = {
            (plan.symbol, *(min(number, 2) for _, number in plan.launch))
            for plan in catalog.plans_of(cell)
        }
        if not kinds <= seen:
            seen |= kinds
            chosen.append(cell)
    return chosen


def spread(
    pack: specplan.Pack,
    device: torch.device,
    quick: bool,
    families: list[str] | None,
    most_requests: int,
) -> int:
    """Every family and problem at a few sizes; ``quick`` takes two problems a family, and
    :func:`one_of_each_kind` of all.
    """
    catalog = load_catalog()
    arch = pack.archs[0]
    count = 0
    for family, problems in catalog.problems.items():
        if family not in pack.manifest(arch).objects or family not in (families or [family]):
            continue
        cases = import_module(f"specplan.kernels.{family}.cases")
        cells = [cell for cell in catalog.cells(arch, family) if cell.requests <= most_requests]
        at_points = list(problems)[: 2 if quick else None]
        kinds = set(one_of_each_kind(catalog, cells) if quick else ())
        cells = [
            cell
            for cell in cells
            if (cell.problem in at_points and (cell.requests, cell.tokens) in POINTS)
            or cell in kinds
        ]
        for cell in cells:
            for case in cases.checks(
                problems[cell.problem],
                cell.requests,
                cell.tokens,
                cell.splits,
                cell.dtype,
                device,
            ):
                case.refill(count)
                expected = case.expect()
                owner = getattr(pack, family)
                op = owner if case.op == family else getattr(owner, case.op)
                op.require(**case.arguments())
                for comparison in case.compare(expected):
                    if not float(comparison.error) <= comparison.bound:
                        raise SystemExit(f"{cell}: {case.name}: {comparison}")
                count += 1
    return count


def judge(wanted: str) -> int:
    """Sort an initcheck log on standard input by kernel; the exit code of the judgement."""
    ours = others = 0
    finished = False
    block = False
    for line in sys.stdin:
        print(line, end="")
        finished |= "every result as the reference gives it" in line
        if "Uninitialized" in line:
            block = True
        elif block and " at " in line:
            block = False
            if "kernel_cutlass" in line:
                ours += 1
            else:
                others += 1
    print(f"reads of unwritten memory: {ours} by specplan's kernels, {others} by others")
    if not finished:
        print("the run did not finish")
        return 1
    return int(ours > 0) if wanted == "clean" else int(ours + others == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--family", action="append", help="only this family; repeatable")
    parser.add_argument("--most-requests", type=int, default=256, help="no larger cells")
    parser.add_argument("--unwritten", action="store_true")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--judge", choices=("clean", "control"))
    options = parser.parse_args()
    if options.judge:
        sys.exit(judge(options.judge))
    device = torch.device("cuda", 0)
    pack = specplan.load(options.packs, candidates=True)
    pack.prepare()
    calls = (
        0
        if options.control or options.unwritten
        else spread(pack, device, options.quick, options.family, options.most_requests)
    )
    if not options.family or {"scatter", "gather"} & set(options.family):
        calls += unwritten.copies(pack, device, POINTS, options.control)
    if options.unwritten:
        for family in sorted(set(pack.manifest().objects) - {"scatter", "gather"}):
            if family in (options.family or [family]):
                calls += unwritten.calls(pack, family, device)
    torch.cuda.synchronize()
    print(f"{calls} calls, every result as the reference gives it")


if __name__ == "__main__":
    main()

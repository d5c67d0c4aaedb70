"""Simulation: run plans on a CPU, on small cells, and compare every buffer with the reference.

What runs is the runtime's op, the compiled host function of the pack, and the PTX that the plan's
machine code was made from. See :mod:`specplan.tools.simulator` for how, and ``docs/simulation.md``
for what this cannot see.
"""

from __future__ import annotations

import datetime
import hashlib
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import click
from specplan.plans import manifest, simulations
from specplan.plans.cell import Cell
from specplan.plans.manifest import Manifest, Use
from specplan.plans.simulations import Measured, SimulatedPlan, Simulations

SUITE = (
    "the runtime's op and the compiled host function, up to each launch; then the PTX on a CPU",
    "outputs poisoned, every buffer compared whole with the reference, with a certificate's bounds",
    "every access within the tensors of the call, aligned, and within the CTA's shared memory",
    "copies land as late as the waits allow; shared memory and registers start as garbage",
    "no race between threads of a launch that barriers do not order",
)
UNSEEN = (
    "what the assembler makes of the PTX",
    "timing, occupancy, registers and what they spill",
    "the last digits of ex2, rcp, rsqrt and mma, which the hardware rounds its own way",
    "the memory model beyond races: overlap of dependent launches, caches, order of atomics",
    "cells other than the ones listed",
)
#: Cells of more rows than this run only where a plan has no smaller one.
MOST_ROWS = 16
#: Inputs are drawn twice for each case of a cell, since some cases take turns by the draw, but once
#: where the rows times the sum of the geometry's numbers are more than this.
DRAWN_TWICE = 4096
#: A plan also runs on the largest cell of at most so many rows, where rows times the sum of its
#: geometry's numbers are at most so much: rows of one batch meet in one CTA.
MORE_ROWS, MORE_WORK = 12, 4096


@dataclass(frozen=True)
class Task:
    """One plan of a pack and the cells to run it on."""

    pack: Path
    symbol: str
    cells: tuple[Cell, ...]
    cost: int


@dataclass(frozen=True)
class Outcome:
    """What became of a task: the evidence, or why there is none."""

    symbol: str
    found: SimulatedPlan | None
    complaints: tuple[str, ...]
    seconds: float


def tasks(
    pack: Path, read: Manifest, families: Sequence[str], most_rows: int = MOST_ROWS
) -> list[Task]:
    """Every plan of a pack, each on the smallest cell of every kind of launch that it has."""
    best: dict[tuple[str, Any], tuple[int, int, Cell]] = {}
    for group in read.groups:
        if families and group.family not in families:
            continue
        size = sum(read.problems[group.family][group.problem].values())
        points = sorted(group.points(), key=lambda at: (at[0] * at[1], at))
        few = [(t, r) for t, r in points if t * r <= MORE_ROWS and t * r * size <= MORE_WORK]
        for larger, (tokens, requests) in enumerate([points[0], *few[-1:]]):
            cell = Cell(
                *(group.family, group.problem, group.dtype, read.arch, group.splits),
                *(tokens, requests),
            )
            for use in group.uses:
                at = (use.symbol, (bool(larger), *_kind(use)))
                rank = (-cell.rows if larger else 0, cell.rows * size, cell)
                if at not in best or rank < best[at]:
                    best[at] = rank
    by_symbol: dict[str, list[tuple[int, Cell]]] = {}
    for (symbol, _), (_, cost, cell) in best.items():
        if (cost, cell) not in by_symbol.setdefault(symbol, []):
            by_symbol[symbol].append((cost, cell))
    made = []
    for symbol, each in sorted(by_symbol.items()):
        each.sort()
        kept = [each[0], *(found for found in each[1:] if found[1].rows <= most_rows)]
        made.append(
            Task(pack, symbol, tuple(cell for _, cell in kept), sum(cost for cost, _ in kept))
        )
    return made


def _kind(use: Use) -> tuple[tuple[str, bool], ...]:
    """Which of a launch's integers are more than one: another way through the code."""
    return tuple((name, value > 1) for name, value in use.launch if name != "tokens")


def simulate(
    packs: Mapping[str, Path],
    families: Sequence[str],
    *,
    jobs: int,
    sample: tuple[int, int],
    most_rows: int,
    out: Path | None,
    ptx: Path,
) -> int:
    """``specplan simulate``; returns the exit code."""
    todo: list[Task] = []
    read = {arch: manifest.read(directory) for arch, directory in packs.items()}
    for arch, directory in packs.items():
        todo += tasks(directory, read[arch], families, most_rows)
    todo = todo[sample[0] - 1 :: sample[1]]
    outcomes: dict[Path, list[Outcome]] = {}
    failed = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start, (ptx,)) as pool:
        running = {
            pool.submit(run, task): task for task in sorted(todo, key=lambda task: -task.cost)
        }
        for number, done in enumerate(as_completed(running), 1):
            task, outcome = running[done], done.result()
            outcomes.setdefault(task.pack, []).append(outcome)
            state = "failed" if outcome.found is None else f"{len(task.cells)} cells"
            click.echo(
                f"{number}/{len(todo)} {outcome.symbol}: {state}, {outcome.seconds:.1f} s", err=True
            )
            for complaint in outcome.complaints:
                click.echo(f"  {complaint}", err=True)
            failed += outcome.found is None
    for arch, directory in packs.items():
        _write(out if out is not None else simulations.local_directory(directory), read[arch],
               outcomes.get(directory, []))  # fmt: skip
    click.echo(f"{len(todo) - failed} of {len(todo)} plans simulated")
    return 1 if failed else 0


def _write(out: Path, pack: Manifest, outcomes: Sequence[Outcome]) -> None:
    """Add what was found to the files of an arch; of what they had, keep what still holds. A plan
    that failed loses its mark.
    """
    digest = simulator_digest()
    by_family: dict[str, dict[str, SimulatedPlan | None]] = {}
    for outcome in outcomes:
        family = pack.plans[outcome.symbol].family
        by_family.setdefault(family, {})[outcome.symbol] = outcome.found
    for family, found in sorted(by_family.items()):
        path = out / pack.arch / f"{family}.yaml"
        kept: dict[str, SimulatedPlan] = {}
        if path.is_file():
            old = simulations.read(path)
            if old.simulator == digest:
                kept = {
                    symbol: ran
                    for symbol, ran in old.plans.items()
                    if symbol not in found and old.covers([Use(symbol)], pack)
                }
        plans = {**kept, **{symbol: ran for symbol, ran in found.items() if ran is not None}}
        if not plans:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        simulations.write(
            Simulations(family, pack.arch, _today(), _tools(pack), digest, SUITE, UNSEEN, plans),
            path,
        )
        click.echo(f"{path}: {len(plans)} plans")


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _tools(pack: Manifest) -> Mapping[str, str]:
    return {
        **pack.tools,
        "specplan": pack.version,
        **{name: metadata.version(name) for name in ("numpy", "torch")},
        "python": platform.python_version(),
    }


def simulator_digest() -> str:
    """sha256 of the sources of the simulator, which decide what a simulation is worth."""
    folder = Path(__file__).with_name("simulator")
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# In a worker process


_worker: _Worker | None = None


class _Worker:
    """The packs that a process has loaded, and its compiler."""

    def __init__(self, ptx: Path) -> None:
        import torch
        from specplan.tools.simulator.compiling import PtxCompiler

        torch.set_num_threads(1)
        self.compiler = PtxCompiler(ptx)
        self.scratch = tempfile.TemporaryDirectory()
        self.packs: dict[Path, tuple[Any, Any, Manifest]] = {}

    def pack(self, directory: Path) -> tuple[Any, Any, Manifest]:
        """A loaded pack, the simulator of its launches, and its manifest."""
        from specplan.tools.simulator import device

        if directory not in self.packs:
            read = manifest.read(directory)
            simulator = device.Simulator(lambda symbol: self.compiler.ptx(read.plans[symbol]))
            place = Path(self.scratch.name, str(len(self.packs)))
            self.packs[directory] = (device.load(directory, place, simulator), simulator, read)
        return self.packs[directory]


def _start(ptx: Path) -> None:
    global _worker
    _worker = _Worker(ptx)


def run(task: Task) -> Outcome:
    """Simulate one plan."""
    from specplan.tools.simulator.device import imagined_device

    assert _worker is not None
    start = time.monotonic()
    complaints: list[str] = []
    found = None
    try:
        pack, simulator, read = _worker.pack(task.pack)
        with imagined_device(read.capability):
            found = _simulated(pack, simulator, read, task, complaints)
    except Exception as error:
        cause = error.__cause__ or error
        complaints.append(f"{type(cause).__name__}: {cause}")
    return Outcome(
        task.symbol, None if complaints else found, tuple(complaints), time.monotonic() - start
    )


def _simulated(
    pack: Any, simulator: Any, read: Manifest, task: Task, complaints: list[str]
) -> SimulatedPlan | None:
    """The evidence; with a complaint, none."""
    plan = read.plans[task.symbol]
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    calls = comparisons = instructions = 0
    for cell in task.cells:
        for case in _cases(read, plan.family, plan.op, cell):
            for draw in range(_draws(read, cell)):
                where = f"{cell}: case {case.name!r}, draw {draw + 1}"
                simulator.clear()
                case.refill(_seed(cell, draw))
                expected = case.expect()
                _call(pack, plan.family, cell, case)
                symbols = {launched.symbol for launched, _ in simulator.findings}
                if symbols != {task.symbol}:
                    complaints.append(f"{where}: launched {', '.join(symbols) or 'nothing'}")
                calls += 1
                for _, seen in simulator.findings:
                    instructions += seen.instructions
                    complaints += [f"{where}: {race}" for race in seen.races]
                for made in case.compare(expected):
                    comparisons += 1
                    error = float(made.error)
                    if not error <= made.bound:
                        complaints.append(
                            f"{where}: {made.buffer}: {error:g} {made.measure}, "
                            f"bound {made.bound:g}"
                        )
                    at = (made.buffer, made.measure)
                    before = worst.get(at, (0.0, made.bound))
                    if error / (made.bound or 1) >= before[0] / (before[1] or 1):
                        worst[at] = (error, float(made.bound))
                if complaints:
                    return None
    outputs = [Measured(*at, *measured) for at, measured in sorted(worst.items())]
    return SimulatedPlan(
        plan.device_code,
        plan.host_code,
        tuple(
            f"{c.problem} {c.dtype} splits={c.splits} tokens={c.tokens} requests={c.requests}"
            for c in task.cells
        ),
        calls,
        comparisons,
        instructions,
        tuple(outputs),
    )


def _cases(read: Manifest, family: str, op: str, cell: Cell) -> Iterator[Any]:
    """The cases of a cell that call an op."""
    import torch

    module = import_module(f"specplan.kernels.{family}.cases")
    geometry = read.problems[family][cell.problem]
    made = module.checks(
        geometry, cell.requests, cell.tokens, cell.splits, cell.dtype, torch.device("cpu")
    )
    return (case for case in made if case.op == op)


def _draws(read: Manifest, cell: Cell) -> int:
    size = sum(read.problems[cell.family][cell.problem].values())
    return 2 if cell.rows * size <= DRAWN_TWICE else 1


def _seed(cell: Cell, draw: int) -> int:
    # The draw decides the last digit, by which some cases take turns.
    digest = hashlib.sha256(str(cell._replace(arch="")).encode()).hexdigest()
    return int(digest[:8], 16) * 2 + draw


def _call(pack: Any, family: str, cell: Cell, case: Any) -> None:
    """Make the call, which must come to the cell."""
    owner = getattr(pack, family)
    op = owner if case.op == family else getattr(owner, case.op)
    picked = op.pick(**case.pick())
    if not picked:
        raise RuntimeError(f"{cell}: case {case.name!r} picks nothing: {picked}")
    if picked.cell._replace(problem=cell.problem) != cell:
        raise RuntimeError(f"{cell}: case {case.name!r} comes to another cell, {picked.cell}")
    answer = op(**case.arguments())
    if not answer:
        raise RuntimeError(f"{cell}: case {case.name!r} was declined: {answer}")

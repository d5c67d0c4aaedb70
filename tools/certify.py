"""Certification: run every cell of the catalog on this machine's GPU, and write down what was
measured.

Each case of a cell runs through the public op. Eager: inputs drawn, outputs poisoned, every buffer
compared whole with the reference; then once more from the same start, which must give the same
bits. In a CUDA graph: captured once, replayed three times with every input rewritten in place,
compared each time. Calls that must be declined must leave every byte as it was.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import hashlib
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from specplan.plans import certificates, ranges
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell
from specplan.plans.certificates import (
    EVERY_OUTPUT,
    Certificate,
    CertifiedCell,
    CertifiedPlan,
    Output,
    Tally,
    group_cells,
    join_tallies,
)
from specplan.plans.coverage import is_certified, local_certificates, uses_of
from specplan.plans.manifest import Manifest, Use, packs_under
from specplan.tools.marking import free, renew

SUITE = (
    "eager, every buffer compared whole with the reference, outputs poisoned",
    "the same call again from the same start, bit-identical",
    "captured in a CUDA graph, replayed 3 times with every input rewritten in place",
    "declined calls write nothing",
)
#: Cells whose cases share one graph: enough to spread the cost of a capture, little enough to keep
#: memory small. A family whose cases are large says less, as ``CELLS_A_GRAPH`` in its cases or, by
#: the size of a cell, ``cells_a_graph(geometry, requests, tokens, dtype)``.
BATCH = 32
REPLAYS = 3
#: What the second run of every call is compared with: the first.
RERUN = Output("all that the call writes, run again", "bits that differ", 0.0, "the same bits")
#: The form of a progress file.
PROGRESS = 2


class CertificationError(RuntimeError):
    """A cell did not pass, or the run cannot start."""


@dataclass(frozen=True)
class Measured:
    """What was measured of one output that a plan wrote in a cell: the worst error of all
    comparisons, and how many there were.
    """

    symbol: str
    output: Output
    error: float
    comparisons: int


#: What was measured in a cell: every output of every plan.
Results = tuple[Measured, ...]


@dataclass(frozen=True)
class Shard:
    """The I-th of N parts, counted from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        left, slash, right = text.partition("/")
        if (
            not slash
            or not left.isdigit()
            or not right.isdigit()
            or not 1 <= int(left) <= int(right)
        ):
            raise click.BadParameter(f"{text!r} is not I/N with 1 <= I <= N", param_hint="--shard")
        return cls(int(left), int(right))

    @property
    def suffix(self) -> str:
        return "" if self.count == 1 else f".{self.index}-of-{self.count}"


def certify_main(
    catalog: Catalog,
    *,
    arch: str,
    families: Sequence[str],
    problems: Sequence[str],
    requests: str | None,
    shard: str,
    only_missing: bool,
    out: Path | None,
    device: int,
    root: Path,
) -> int:
    """``specplan certify``; returns the exit code."""
    part = Shard.parse(shard)
    if only_missing and part.count > 1 and out is None:
        # Beside the pack, a shard that ends would change what the others find missing.
        raise click.UsageError("--missing in shards needs --out")
    try:
        import specplan
        import torch
    except ImportError as error:
        click.echo(f"error: {error}; pip install 'specplan[certify]'", err=True)
        return 1
    try:
        major, minor = torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        click.echo(f"error: certification needs a CUDA device: {error}", err=True)
        return 1
    found = f"sm_{major}{minor}a"
    if arch not in ("auto", found):
        click.echo(f"error: cuda:{device} is {found}, it cannot certify {arch}", err=True)
        return 1
    # Streams and captures are those of the current device.
    torch.cuda.set_device(device)
    if found not in catalog.archs:
        click.echo(f"error: {found} is not an arch of the catalog", err=True)
        return 1
    try:
        wanted_requests = None if requests is None else set(ranges.parse(requests))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--requests") from error
    try:
        pack = specplan.load(root, arch=found, candidates=True)
        directory = (
            out / found
            if out is not None
            else (local_certificates(packs_under(root)[found]) / found)
        )
        directory.mkdir(parents=True, exist_ok=True)
        evidence = (
            certificates.read_all(
                [certificates.default_directory(), local_certificates(packs_under(root)[found])],
                found,
            )
            if only_missing
            else []
        )
        for family in families or [
            f for f in catalog.problems if f in pack.manifest(found).objects
        ]:
            cells = [
                cell
                for cell in catalog.cells(found, family)
                if (not problems or cell.problem in problems)
                and (wanted_requests is None or cell.requests in wanted_requests)
            ]
            if only_missing:
                cells = missing(catalog, cells, pack.manifest(found), evidence)
            cells = share_of(cells, part, family)
            if only_missing and not cells:
                click.echo(f"{family}: nothing is missing", err=True)
                continue
            run = FamilyRun(catalog, pack, family, torch.device("cuda", device), directory, part)
            if only_missing:
                run.path = free(run.path)
            path = run.certify(cells)
            click.echo(f"{path}: {len(cells)} cells")
        if out is None:
            renew(
                packs_under(root)[found],
                [certificates.default_directory()],
                lambda text: click.echo(text, err=True),
            )
    except (CertificationError, specplan.SpecplanError) as error:
        click.echo(f"error: {error}", err=True)
        return 1
    return 0


def share_of(cells: Sequence[Cell], part: Shard, family: str) -> list[Cell]:
    """The cells of a shard: every N-th, or, where the family's cases share what is costly to make
    (``SHARED_BY``) and there are shards for no more than one kind of cell each, one run of cells.
    """
    cases = import_module(f"specplan.kernels.{family}.cases")
    shared_by: tuple[str, ...] = getattr(cases, "SHARED_BY", ())

    def kind(cell: Cell) -> tuple[Any, ...]:
        return tuple(getattr(cell, name) for name in shared_by)

    if not shared_by or len({kind(cell) for cell in cells}) < part.count:
        return list(cells[part.index - 1 :: part.count])
    ordered = sorted(cells, key=kind)
    begin, end = (len(cells) * i // part.count for i in (part.index - 1, part.index))
    return ordered[begin:end]


def missing(
    catalog: Catalog, cells: Sequence[Cell], pack: Manifest, evidence: Sequence[Certificate]
) -> list[Cell]:
    """The cells that no certificate covers as the pack has them, those of plans that it lacks
    included.
    """

    def covered(cell: Cell) -> bool:
        uses = uses_of(catalog.plans_of(cell))
        built = all(use.symbol in pack.plans for use in uses)
        return built and is_certified(cell, uses, pack, evidence)

    return [cell for cell in cells if not covered(cell)]


class FamilyRun:
    """The certification of one family on one device."""

    def __init__(
        self,
        catalog: Catalog,
        pack: Any,
        family: str,
        device: Any,
        directory: Path,
        shard: Shard,
    ) -> None:
        self.catalog = catalog
        self.pack = pack
        self.family = family
        self.device = device
        self.arch = f"sm_{''.join(map(str, _capability(device)))}a"
        self.manifest: Manifest = pack.manifest(self.arch)
        self.cases = import_module(f"specplan.kernels.{family}.cases")
        self.path = directory / f"{family}{shard.suffix}.yaml"
        self.progress_path = directory / f".{family}{shard.suffix}.partial.jsonl"
        self.start = time.monotonic()

    def certify(self, cells: Sequence[Cell]) -> Path:
        """Run every cell, resuming where an interrupted run stopped, and write the certificate."""
        self.check_declined()
        uses = {cell: uses_of(self.catalog.plans_of(cell)) for cell in cells}
        for cell, needed in uses.items():
            for use in needed:
                if use.symbol not in self.manifest.plans:
                    raise CertificationError(f"{cell} needs plan {use.symbol}, which is not built")
        results = self.resume(cells)
        todo = [cell for cell in cells if cell not in results]
        with self.progress_path.open("a", encoding="utf-8") as log:
            if not results:
                log.write(json.dumps(self.binding()) + "\n")
            done = 0
            # Commands run without the cyclic collector. What a batch leaves in cycles, like a
            # caught exception and the frame that it names, holds GPU buffers: it is collected
            # after each batch, past the many cells, which are not walked.
            gc.collect()
            gc.freeze()
            for number, batch in enumerate(self.batches(todo)):
                for cell, measured in self.run_batch(batch, uses):
                    results[cell] = measured
                    log.write(_progress_line(cell, measured) + "\n")
                log.flush()
                gc.collect()
                done += len(batch)
                self.tell(number, done, len(todo))
        certificates.write(self.path, self.certificate(uses, results))
        # What a reader would refuse is not evidence: then the progress stays, and nothing is lost.
        certificates.read(self.path)
        self.progress_path.unlink()
        return self.path

    def batches(self, cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
        """Cells whose cases share one graph."""
        by_size = getattr(self.cases, "cells_a_graph", None)
        most: int = getattr(self.cases, "CELLS_A_GRAPH", BATCH)
        at = 0
        while at < len(cells):
            cell = cells[at]
            if by_size is not None:
                geometry = self.catalog.problems[self.family][cell.problem]
                most = by_size(geometry, cell.requests, cell.tokens, cell.dtype)
            yield cells[at : at + most]
            at += most

    def tell(self, batch: int, done: int, total: int) -> None:
        if sys.stderr.isatty() or done == total or batch % 64 == 63:
            spent = time.monotonic() - self.start
            left = spent / max(1, done) * (total - done)
            click.echo(f"{self.family}: {done}/{total} cells, about {left:.0f} s left", err=True)

    # Evidence

    def run_batch(
        self, cells: Sequence[Cell], uses: Mapping[Cell, tuple[Use, ...]]
    ) -> Iterator[tuple[Cell, Results]]:
        """Check a batch of cells; raises CertificationError at the first that does not pass."""
        import torch

        cases = [
            (cell, case)
            for cell in cells
            for case in self.cases.checks(
                self.catalog.problems[self.family][cell.problem],
                cell.requests,
                cell.tokens,
                cell.splits,
                cell.dtype,
                self.device,
            )
        ]
        seed = int(hashlib.sha256(str(cells[0]).encode()).hexdigest()[:12], 16)
        # By cell: case and phase, the plan that ran, what was compared, the error.
        found: dict[Cell, list[tuple[str, str, Output, Any]]] = {cell: [] for cell in cells}
        symbols: list[str] = []

        def note(cell: Cell, case: Any, symbol: str, phase: str, expected: Any) -> None:
            for c in case.compare(expected):
                place = f"case {case.name!r}, {phase}, {c.buffer}"
                found[cell].append((place, symbol, c.output, c.error))

        for number, (cell, case) in enumerate(cases):
            symbol = self.check_pick(cell, case, uses[cell])
            symbols.append(symbol)
            case.refill(seed + number)
            before, expected = case.snapshot(), case.expect()
            self.call(cell, case)
            note(cell, case, symbol, "eager", expected)
            first = case.snapshot()
            case.restore(before)
            self.call(cell, case)
            place = f"case {case.name!r}, rerun"
            found[cell].append((place, symbol, RERUN, case.identical(first)))
            del before, expected, first  # before the next case's are made

        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph):
            for cell, case in cases:
                self.call(cell, case)
        for replay in range(REPLAYS):
            expectations = []
            for number, (_, case) in enumerate(cases):
                case.refill(seed + (replay + 1) * 1_000_003 + number)
                expectations.append(case.expect())
            graph.replay()
            for (cell, case), symbol, expected in zip(cases, symbols, expectations, strict=True):
                note(cell, case, symbol, f"graph replay {replay + 1}", expected)

        flat = torch.stack([e[3].double() for entries in found.values() for e in entries]).tolist()
        at = 0
        for cell, entries in found.items():
            worst: dict[tuple[str, Output], tuple[float, int]] = {}
            for (place, symbol, output, _), error in zip(
                entries, flat[at : at + len(entries)], strict=True
            ):
                if not error <= output.bound:
                    raise CertificationError(
                        f"{cell}: {place}: {error:g} {output.measure}, bound {output.bound:g}"
                    )
                before, count = worst.get((symbol, output), (0.0, 0))
                worst[symbol, output] = max(before, error), count + 1
            at += len(entries)
            yield (
                cell,
                tuple(
                    Measured(symbol, output, min(_round_up(error), output.bound), count)
                    for (symbol, output), (error, count) in worst.items()
                ),
            )

    def call(self, cell: Cell, case: Any) -> None:
        answer = _op(self.pack, self.family, case.op)(**case.arguments())
        if not answer:
            raise CertificationError(f"{cell}: case {case.name!r} was declined: {answer}")
        if answer is not True:
            raise CertificationError(f"{cell}: case {case.name!r} ran as other cells: {answer}")

    def check_pick(self, cell: Cell, case: Any, uses: tuple[Use, ...]) -> str:
        """The call must come to the cell that it is evidence for; returns the plan that it runs."""
        picked = _op(self.pack, self.family, case.op).pick(arch=self.arch, **case.pick())
        if not picked:
            raise CertificationError(f"{cell}: case {case.name!r} picks nothing: {picked}")
        if picked.plan.symbol not in {use.symbol for use in uses} or (
            (picked.cell.requests, picked.cell.tokens, picked.cell.splits, picked.cell.dtype)
            != (cell.requests, cell.tokens, cell.splits, cell.dtype)
        ):
            raise CertificationError(
                f"{cell}: case {case.name!r} comes to another cell, {picked.cell}"
            )
        return str(picked.plan.symbol)

    def check_declined(self) -> None:
        """Calls that must be declined: the answer is falsy and no byte changes."""
        import torch

        count = 0
        for what, arguments, storage in self.cases.declined(self.device):
            before = storage.clone()
            op = _op(self.pack, self.family, arguments.pop("op", self.family))
            for call in (op, op.bind):
                if call(**arguments):
                    raise CertificationError(f"{self.family}: not declined although {what}")
            torch.cuda.synchronize(self.device)
            if not torch.equal(before, storage):
                raise CertificationError(f"{self.family}: declined, but wrote, when {what}")
            count += 1
        click.echo(f"{self.family}: {count} declined calls wrote nothing", err=True)

    # The file

    def binding(self) -> dict[str, Any]:
        """What an interrupted run was about: it resumes only over the same bits on the same kind of
        device.
        """
        bits = {
            s: [p.device_code, p.host_code, p.signature]
            for s, p in self.manifest.plans.items()
            if p.family == self.family
        }
        text = json.dumps([PROGRESS, bits, SUITE, _device_facts(self.device)], sort_keys=True)
        return {"binding": hashlib.sha256(text.encode()).hexdigest()}

    def resume(self, cells: Sequence[Cell]) -> dict[Cell, Results]:
        """What an interrupted run of the same bits measured in these cells."""
        try:
            text = self.progress_path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # killed while it wrote a line
                self.progress_path.write_text(whole, encoding="utf-8")
            lines = whole.splitlines()
            if json.loads(lines[0]) != self.binding():
                raise ValueError("another run")
            by_key = {_key(cell): cell for cell in cells}
            results: dict[Cell, Results] = {}
            for line in lines[1:]:
                *key, measured = json.loads(line)
                if tuple(key) in by_key:
                    results[by_key[tuple(key)]] = tuple(
                        Measured(symbol, Output(*output), error, comparisons)
                        for symbol, output, error, comparisons in measured
                    )
            click.echo(f"{self.family}: resuming after {len(results)} cells", err=True)
        except (OSError, ValueError, IndexError, TypeError):
            self.progress_path.unlink(missing_ok=True)
            return {}
        return results

    def certificate(
        self, uses: Mapping[Cell, tuple[Use, ...]], results: Mapping[Cell, Results]
    ) -> Certificate:
        """What was measured in these cells, as it is written down."""
        import torch

        symbols = {use.symbol for needed in uses.values() for use in needed}
        plans = {symbol: self.manifest.plans[symbol] for symbol in symbols}
        sources: dict[str, str] = {}
        for plan in plans.values():
            sources.update(plan.key["sources"])
        return Certificate(
            family=self.family,
            arch=self.arch,
            tools={
                **self.manifest.tools,
                "specplan": self.manifest.version,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            sources=dict(sorted(sources.items())),
            problems={
                cell.problem: self.catalog.problems[self.family][cell.problem] for cell in results
            },
            plans={
                symbol: CertifiedPlan(plan.device_code, plan.host_code, plan.signature)
                for symbol, plan in sorted(plans.items())
            },
            groups=group_cells(
                CertifiedCell(
                    *(cell.problem, cell.dtype, cell.splits, cell.tokens, cell.requests),
                    uses[cell],
                    sum(each.comparisons for each in measured),
                )
                for cell, measured in results.items()
            ),
            device=_device_facts(self.device),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            suite=SUITE,
            recorded=EVERY_OUTPUT,
            tallies=tally(results),
        )


def tally(results: Mapping[Cell, Results]) -> tuple[Tally, ...]:
    """The worst error of every output by plan and problem."""
    return join_tallies(
        Tally(each.output, each.comparisons, {each.symbol: {cell.problem: each.error}})
        for cell, measured in results.items()
        for each in measured
    )


def _progress_line(cell: Cell, measured: Results) -> str:
    rows = [
        [each.symbol, list(dataclasses.astuple(each.output)), each.error, each.comparisons]
        for each in measured
    ]
    return json.dumps([*_key(cell), rows])


def _op(pack: Any, family: str, op: str) -> Any:
    """An op by name: the family itself, or one of the ops that it holds."""
    owner = getattr(pack, family)
    return owner if op == family else getattr(owner, op)


def _key(cell: Cell) -> tuple[Any, ...]:
    return (cell.problem, cell.dtype, cell.splits, cell.tokens, cell.requests)


def _capability(device: Any) -> tuple[int, int]:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def _device_facts(device: Any) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "driver": driver_version(),
    }


def driver_version() -> str:
    """The NVIDIA driver's release, as nvidia-smi says it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip()


def _round_up(error: float) -> float:
    """Three significant digits, rounded up, so that a certificate never claims less error than was
    measured.
    """
    if error == 0:
        return 0.0
    scale = 10.0 ** (math.floor(math.log10(abs(error))) - 2)
    return float(f"{math.ceil(error / scale) * scale:.3g}")

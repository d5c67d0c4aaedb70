"""The build: reachable plans -> objects -> shared objects -> manifest, incremental, atomic and
deterministic.

Layout of the output directory::

    <out>/<arch>/manifest.json            written last, atomically
    <out>/<arch>/<family>-<sha256>.so     named by content, never changed in place
    <out>/objects/<key>.o, <key>.json     one compiled plan each, reused while its key stands
    <out>/logs/<symbol>.log               what the compiler printed

A killed build leaves files that nothing refers to and a manifest that is either the old one or the
new one. Nothing is deleted here, so a build beside a build, or a reader of the old manifest, keeps
what it refers to; ``specplan gc`` clears up.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specplan.plans import certificates, manifest
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell
from specplan.plans.coverage import is_certified, local_certificates, uses_of
from specplan.plans.manifest import Manifest, ObjectRecord, PlanRecord, Use
from specplan.plans.plan import Plan
from specplan.plans.version import VERSION
from specplan.tools.build import keys, link, pool


class BuildError(RuntimeError):
    """The build cannot go on; the message says why and what mends it."""


@dataclass(frozen=True)
class Failure:
    """A plan that did not compile."""

    symbol: str
    error: str
    log: str


@dataclass
class Report:
    """What a build did."""

    out: Path
    packs: dict[str, Path] = field(default_factory=dict)
    planned: int = 0
    compiled: int = 0
    reused: int = 0
    linked: int = 0
    failed: list[Failure] = field(default_factory=list)
    spilled: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> Mapping[str, Any]:
        return {
            "out": str(self.out),
            "packs": {arch: str(path) for arch, path in self.packs.items()},
            "planned": self.planned,
            "compiled": self.compiled,
            "reused": self.reused,
            "linked": self.linked,
            "failed": [{"symbol": f.symbol, "error": f.error, "log": f.log} for f in self.failed],
            "spilled": self.spilled,
            "seconds": round(self.seconds, 3),
        }


#: Called after each plan: (done, total, symbol, error or None).
Progress = Callable[[int, int, str, str | None], None]


#: A cell, the plans that it uses, and whether its splits are the planning rule's own choice.
Entry = tuple[Cell, tuple[Use, ...], bool]


@dataclass(frozen=True)
class _Target:
    """What one arch needs: the cells with their uses, and the plans behind them."""

    arch: str
    cells: Sequence[Entry]
    plans: Mapping[str, Plan]


def targets(catalog: Catalog, archs: Iterable[str], families: Sequence[str]) -> list[_Target]:
    """The reachable plans of each arch: the image of its cells under the planning rules, and
    nothing else.
    """
    found = []
    for arch in archs:
        cells: list[Entry] = []
        plans: dict[str, Plan] = {}
        for cell in catalog.cells(arch):
            if families and cell.family not in families:
                continue
            of_cell = catalog.plans_of(cell)
            cells.append((cell, uses_of(of_cell), catalog.is_automatic(cell)))
            for plan in of_cell:
                if plan.symbol not in plans:
                    plans[plan.symbol] = replace(plan, launch=())
        found.append(_Target(arch, cells, plans))
    return found


def build(
    catalog: Catalog,
    out: Path,
    archs: Sequence[str],
    *,
    families: Sequence[str] = (),
    jobs: int | None = None,
    dry_run: bool = False,
    keep_going: bool = False,
    evidence: Sequence[Path] = (),
    progress: Progress = lambda done, total, symbol, error: None,
    waiting: Callable[[str], None] = lambda text: None,
) -> Report:
    """Bring the packs of some archs up to date.

    Parameters
    ----------
    catalog
        What to build.
    out
        Output directory; created where it does not exist.
    archs
        Compile targets. With ``families`` given, only these families are compiled; what a pack
        holds of others is kept.
    jobs
        Compile processes; default: one for each CPU that this process may use.
    evidence
        Directories of certificates; those beside a pack count too.
    dry_run
        Say what would be compiled, write nothing.
    keep_going
        Go on after a plan fails, and write packs without it.

    Raises
    ------
    BuildError
        The output cannot be written, the compiler is not there, or the linker fails.
    """
    start = time.monotonic()
    report = Report(out)
    if not any(name == "nvidia-cutlass-dsl" for name in keys.tool_versions()):
        raise BuildError(
            "the compiler (nvidia-cutlass-dsl[cu13]) is not installed: pip install "
            "'specplan[build]'"
        )
    with _readable_errors(out):
        inputs = {} if families else {a: _inputs(catalog, a, out / a, evidence) for a in archs}
        current = {a for a, digest in inputs.items() if _is_current(out / a, digest, report)}
        archs = [arch for arch in archs if arch not in current]
    wanted = targets(catalog, archs, families)
    plans = {symbol: plan for target in wanted for symbol, plan in target.plans.items()}
    report.planned += len(plans)
    digests = {symbol: keys.digest(keys.key(plan)) for symbol, plan in plans.items()}
    if dry_run:
        ready = [s for s in plans if _object_record(out, digests[s]) is not None]
        report.reused += len(ready)
        report.compiled = len(plans) - len(ready)
        report.seconds = time.monotonic() - start
        return report
    with _readable_errors(out):
        for directory in (out, out / "objects", out / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        with _exclusive(out, waiting):
            records = _compile(out, plans, digests, report, jobs, keep_going, progress)
            if report.failed and not keep_going:
                report.seconds = time.monotonic() - start
                return report
            for target in wanted:
                _write_pack(
                    catalog,
                    out,
                    target,
                    digests,
                    records,
                    report,
                    families,
                    evidence,
                    "" if report.failed else inputs.get(target.arch, ""),
                )
    report.spilled = sorted([*report.spilled, *(s for s, r in records.items() if r["spills"])])
    report.packs = {arch: report.packs[arch] for arch in catalog.archs if arch in report.packs}
    report.seconds = time.monotonic() - start
    return report


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def _inputs(catalog: Catalog, arch: str, directory: Path, evidence: Sequence[Path]) -> str:
    """Digest of everything that decides a pack's manifest: the catalog, the planning rules, the
    device code's sources, the tools, and the certificates. Content only, no paths.
    """
    files = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for root in [*evidence, local_certificates(directory)]
        for path in sorted((root / arch).glob("*.yaml"))
    ]
    parts = {
        "format": keys.FORMAT,
        "specplan": VERSION,
        "arch": arch,
        "catalog": catalog.digest,
        "planning": dict(keys.planning_sources()),
        "sources": {family: dict(keys.sources(family)) for family in catalog.problems},
        "tools": dict(keys.tool_versions()),
        "linker": link.linker_version(),
        "host": keys.host_triple(),
        "certificates": files,
    }
    return keys.digest(parts)


def _is_current(directory: Path, inputs: str, report: Report) -> bool:
    """Whether a pack is whole and was made from just these inputs; if so it is reported."""
    try:
        found = manifest.read(directory)
    except manifest.ManifestError:
        return False
    if found.inputs != inputs or any(
        manifest.check_object(directory, record) for record in found.objects.values()
    ):
        return False
    report.packs[found.arch] = directory
    report.planned += len(found.plans)
    report.reused += len(found.plans)
    report.spilled += [symbol for symbol, plan in found.plans.items() if plan.spills]
    return True


@contextmanager
def _readable_errors(out: Path) -> Iterator[None]:
    """Full disks and read-only directories as one clear error; what was there before stays as it
    was.
    """
    try:
        yield
    except link.LinkError as error:
        raise BuildError(str(error)) from error
    except OSError as error:
        if error.errno in _DISK_FULL:
            what = f"the disk of {out} is full; the packs that were there are unchanged"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            what = f"{out} is not writable ({error.strerror}); choose another directory with --out"
        else:
            what = f"{error.filename or out}: {error.strerror or error}"
        raise BuildError(what) from error


@contextmanager
def _exclusive(out: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """One build at a time in a directory, where the file system has locks.

    Where it has none the builds run side by side: names are content, writes are renames and nothing
    is deleted, so they do the same work twice and the last manifest stands.
    """
    import filelock

    lock = filelock.FileLock(out / ".lock")
    try:
        try:
            lock.acquire(timeout=1)
        except filelock.Timeout:
            waiting(f"another build holds {out}; waiting for it")
            lock.acquire()
    except NotImplementedError:
        waiting(f"the file system of {out} has no locks; building without one")
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _object_record(out: Path, digest: str) -> dict[str, Any] | None:
    """The record of an object that is there and whole, else None."""
    try:
        record: dict[str, Any] = json.loads((out / "objects" / f"{digest}.json").read_text())
        data = (out / "objects" / f"{digest}.o").read_bytes()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(data).hexdigest() != record.get("object_sha256"):
        return None
    return record


def _compile(
    out: Path,
    plans: Mapping[str, Plan],
    digests: Mapping[str, str],
    report: Report,
    jobs: int | None,
    keep_going: bool,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """Compile what has no whole object yet; returns the records by symbol."""
    records: dict[str, dict[str, Any]] = {}
    todo: list[pool.Job] = []
    for symbol, plan in plans.items():
        record = _object_record(out, digests[symbol])
        if record is not None:
            records[symbol] = record
        else:
            beside = out / "objects" / f".{digests[symbol]}.{os.getpid()}.o.tmp"
            todo.append(pool.Job(plan, beside, out / "logs" / f"{symbol}.log"))
    report.reused += len(records)
    stop = threading.Event()
    workers = jobs or len(os.sched_getaffinity(0))
    done = 0
    with closing(pool.run(todo, workers, stop)) as outcomes:
        for outcome in outcomes:
            done += 1
            symbol = outcome.job.plan.symbol
            progress(done, len(todo), symbol, outcome.error)
            if outcome.record is None:
                outcome.job.object_path.unlink(missing_ok=True)
                if outcome.errno in _DISK_FULL:
                    # Not a fault of this plan: every other would fail in the same way.
                    raise OSError(outcome.errno, outcome.error)
                log = str(outcome.job.log_path)
                report.failed.append(Failure(symbol, outcome.error or "unknown", log))
                if not keep_going:
                    stop.set()
                continue
            outcome.job.object_path.replace(out / "objects" / f"{digests[symbol]}.o")
            manifest.write_atomically(
                out / "objects" / f"{digests[symbol]}.json",
                json.dumps(outcome.record, indent=1).encode(),
            )
            records[symbol] = outcome.record
            report.compiled += 1
    return records


def _write_pack(
    catalog: Catalog,
    out: Path,
    target: _Target,
    digests: Mapping[str, str],
    records: Mapping[str, dict[str, Any]],
    report: Report,
    families: Sequence[str],
    evidence: Sequence[Path],
    inputs: str,
) -> None:
    """Link what changed and write the manifest of one arch."""
    directory = out / target.arch
    directory.mkdir(exist_ok=True)
    try:
        old: Manifest | None = manifest.read(directory)
    except manifest.ManifestError:
        old = None
    by_family: dict[str, list[str]] = {}
    for symbol, plan in sorted(target.plans.items()):
        if symbol in records:
            by_family.setdefault(plan.family, []).append(symbol)

    objects: dict[str, ObjectRecord] = {}
    plans: dict[str, PlanRecord] = {}
    if old is not None and families:
        kept = set(old.objects) - set(families)
        objects.update({name: old.objects[name] for name in kept})
        plans.update({s: p for s, p in old.plans.items() if p.family in kept})

    def of_family(item: tuple[str, list[str]]) -> tuple[str, ObjectRecord, dict[str, str], bool]:
        family, symbols = item
        inputs = link.inputs_digest([records[s]["object_sha256"] for s in symbols])
        before = old.objects.get(family) if old is not None else None
        if (
            old is not None
            and before is not None
            and before.inputs == inputs
            and all(s in old.plans for s in symbols)
            and manifest.check_object(directory, before) is None
        ):
            return family, before, {s: old.plans[s].signature for s in symbols}, False
        beside = directory / f".{family}.{os.getpid()}.tmp.so"
        try:
            link.link([out / "objects" / f"{digests[s]}.o" for s in symbols], beside)
            texts = link.signatures(beside, symbols)
            features = link.cpu_features(beside)
            data = beside.read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            name = f"{family}-{sha256[:16]}.so"
            beside.replace(directory / name)
        finally:
            beside.unlink(missing_ok=True)
        return family, ObjectRecord(name, len(data), sha256, inputs, features), texts, True

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        for family, record, texts, linked in threads.map(of_family, by_family.items()):
            objects[family] = record
            report.linked += linked
            for symbol in by_family[family]:
                plan, found = target.plans[symbol], records[symbol]
                plans[symbol] = PlanRecord(
                    symbol,
                    plan.family,
                    plan.op,
                    plan.spec,
                    keys.key(plan),
                    texts[symbol],
                    found["device_code"],
                    found["host_code"],
                    found["registers"],
                    found["spills"],
                    found["object_size"],
                    found["object_sha256"],
                )

    arch = catalog.archs[target.arch]
    bare = Manifest(
        target.arch,
        arch.capability,
        VERSION,
        {**keys.tool_versions(), "linker": link.linker_version()},
        keys.host_triple(),
        objects,
        plans,
        {**(old.problems if old is not None and families else {}), **catalog.problems},
        (),
        inputs,
    )
    entries = [entry for entry in target.cells if all(use.symbol in plans for use in entry[1])]
    if old is not None and families:
        entries += [
            (cell, group.uses, group.automatic)
            for cell, group in old.cells()
            if cell.family not in families
        ]
    new = stamp(bare, entries, [*evidence, local_certificates(directory)])
    text = manifest.dumps(new).encode()
    path = directory / manifest.NAME
    if not path.is_file() or path.read_bytes() != text:
        manifest.write_atomically(path, text)
    report.packs[target.arch] = directory


def stamp(
    bare: Manifest,
    entries: Iterable[Entry],
    evidence: Iterable[Path],
) -> Manifest:
    """The manifest with its cell table, each cell marked certified where a certificate matches the
    bits.
    """
    found = certificates.read_all(evidence, bare.arch)
    groups = manifest.group_cells(
        (cell, uses, automatic, is_certified(cell, uses, bare, found))
        for cell, uses, automatic in entries
    )
    return replace(bare, groups=groups)


def restamp(directory: Path, evidence: Iterable[Path]) -> Manifest:
    """Mark the cells of a built pack anew, after a certificate was added."""
    old = manifest.read(directory)
    entries = [(cell, group.uses, group.automatic) for cell, group in old.cells()]
    # What it was made from has changed by a certificate: the next build looks at everything again.
    old = replace(old, inputs="")
    new = stamp(old, entries, [*evidence, local_certificates(directory)])
    if new != old:
        manifest.write_atomically(directory / manifest.NAME, manifest.dumps(new).encode())
    return new


def main(arguments: Sequence[str] | None = None) -> None:
    """``python build_plans.py``: the same as ``specplan build``."""
    from specplan.tools.cli import build_command

    build_command.main(args=list(arguments) if arguments is not None else sys.argv[1:])

"""The build: reachable plans -> objects -> shared objects -> manifest, incremental, atomic and
deterministic.

Layout of the output directory::

    <out>/<arch>/manifest.json            written last, atomically
    <out>/<arch>/<family>-<host>-<sha256>.so   named by content, never changed in place
    <out>/objects/<key>.o, <key>.json     one plan for one host each, reused while its key stands
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
from specplan.plans.hosts import HOSTS, this_machine
from specplan.plans.manifest import (
    HostRecord,
    Manifest,
    ObjectRecord,
    PlanObject,
    PlanRecord,
    Use,
)
from specplan.plans.plan import Plan
from specplan.plans.version import VERSION
from specplan.tools.build import claims, keys, link, pool
from specplan.tools.marking import carry


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
    #: By arch: the cells that were built, by state.
    cells: dict[str, claims.Count] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def complaint(self) -> str | None:
        """What to say where the catalog claims more than was built, or None."""
        return claims.complaint(self.out, self.cells)

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
            "cells": {arch: count.as_json() for arch, count in self.cells.items()},
            "holds": self.complaint is None,
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
    hosts: Sequence[str] = (),
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
    hosts
        Names of :data:`specplan.plans.hosts.HOSTS` to emit host code for; default: this machine's.
        Libraries that a pack has for other hosts are kept where they hold the same device code.
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
    hosts = list(dict.fromkeys(hosts)) or [this_machine()]
    if unknown := [name for name in hosts if name not in HOSTS]:
        raise BuildError(
            f"packs cannot be built for host {unknown[0]}; hosts: {', '.join(HOSTS)}. "
            "Name one with --host"
        )
    start = time.monotonic()
    report = Report(out)
    if not any(name == "nvidia-cutlass-dsl" for name in keys.tool_versions()):
        raise BuildError(
            "the compiler (nvidia-cutlass-dsl[cu13]) is not installed: pip install "
            "'specplan[build]'"
        )
    oldest = (3, keys.SAME_BYTES[0])
    if sys.version_info[:2] < oldest:
        raise BuildError(
            f"Python {keys.python()} compiles to other device code than the certified one; "
            f"build with {'.'.join(map(str, oldest))} or newer"
        )
    with _readable_errors(out):
        inputs = {} if families else {a: _inputs(catalog, a, out / a, evidence) for a in archs}
        current = {a for a, d in inputs.items() if _is_current(out / a, d, hosts, report)}
        archs = [arch for arch in archs if arch not in current]
    wanted = targets(catalog, archs, families)
    plans = {symbol: plan for target in wanted for symbol, plan in target.plans.items()}
    report.planned += len(plans)
    names = {symbol: _names(plan, hosts) for symbol, plan in plans.items()}
    if dry_run:
        ready = [s for s in plans if all(_object_record(out, n) for n in names[s].values())]
        report.reused += len(ready)
        report.compiled = len(plans) - len(ready)
        report.seconds = time.monotonic() - start
        return report
    with _readable_errors(out):
        for directory in (out, out / "objects", out / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        with _exclusive(out, waiting):
            records = _compile(out, plans, names, report, jobs, keep_going, progress)
            if report.failed and not keep_going:
                report.seconds = time.monotonic() - start
                return report
            for target in wanted:
                _write_pack(
                    catalog,
                    out,
                    target,
                    hosts,
                    names,
                    records,
                    report,
                    families,
                    evidence,
                    "" if report.failed else inputs.get(target.arch, ""),
                )
    report.spilled = sorted([*report.spilled, *(s for s, r in records.items() if r["spills"])])
    report.packs = {arch: report.packs[arch] for arch in catalog.archs if arch in report.packs}
    for arch, directory in report.packs.items():
        report.cells[arch] = claims.count(catalog, directory, arch, families, evidence)
    report.seconds = time.monotonic() - start
    return report


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def _inputs(catalog: Catalog, arch: str, directory: Path, evidence: Sequence[Path]) -> str:
    """Digest of everything that decides a pack's manifest: the catalog, the planning rules, the
    device code's sources, the tools, and the certificates. Content only, no paths.
    """
    # A head names its file of cells by sha256.
    heads = certificates.heads([*evidence, local_certificates(directory)], arch)
    files = sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in heads})
    parts = {
        "format": keys.FORMAT,
        "specplan": VERSION,
        "arch": arch,
        "catalog": catalog.digest,
        "planning": dict(keys.planning_sources()),
        "sources": {family: dict(keys.sources(family)) for family in catalog.problems},
        "tools": dict(keys.tool_versions()),
        "python": keys.python(),
        "certificates": files,
    }
    return keys.digest(parts)


def _names(plan: Plan, hosts: Sequence[str]) -> dict[str, str]:
    """The names of a plan's objects, by host."""
    key = keys.key(plan)
    return {host: keys.object_name(key, HOSTS[host]) for host in hosts}


def _is_current(directory: Path, inputs: str, hosts: Sequence[str], report: Report) -> bool:
    """Whether a pack is whole and was made from just these inputs for these hosts; if so it is
    reported.
    """
    try:
        found = manifest.read(directory)
    except manifest.ManifestError:
        return False
    if found.inputs != inputs:
        return False
    for host in hosts:
        record = found.hosts.get(host)
        if record is None or set(record.objects) != set(found.families):
            return False
        for family, library in record.objects.items():
            objects = [
                plan.objects[host].sha256
                for _, plan in sorted(found.plans.items())
                if plan.family == family
            ]
            if library.inputs != link.inputs_digest(HOSTS[host], objects):
                return False
    if any(manifest.check_object(directory, record) for _, _, record in found.libraries()):
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


def _object_record(out: Path, name: str) -> dict[str, Any] | None:
    """The record of an object that is there and whole, else None."""
    try:
        record: dict[str, Any] = json.loads((out / "objects" / f"{name}.json").read_text())
        data = (out / "objects" / f"{name}.o").read_bytes()
        (expected,) = record["objects"].values()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        return None
    return record


def _compile(
    out: Path,
    plans: Mapping[str, Plan],
    names: Mapping[str, Mapping[str, str]],
    report: Report,
    jobs: int | None,
    keep_going: bool,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """Compile what has no whole object yet, once for all hosts; returns the records by symbol."""
    records: dict[str, dict[str, Any]] = {}
    todo: list[pool.Job] = []
    for symbol, plan in plans.items():
        found = {host: _object_record(out, name) for host, name in names[symbol].items()}
        record = _joined([each for each in found.values() if each is not None])
        if record is not None and len(record["objects"]) == len(found):
            records[symbol] = record
            continue
        # An object that disagrees with another of the same plan is compiled again with it.
        missing = [host for host in found if record is None or host not in record["objects"]]
        beside = {
            host: out / "objects" / f".{names[symbol][host]}.{os.getpid()}.o.tmp"
            for host in missing
        }
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
                for path in outcome.job.object_paths.values():
                    path.unlink(missing_ok=True)
                if outcome.errno in _DISK_FULL:
                    # Not a fault of this plan: every other would fail in the same way.
                    raise OSError(outcome.errno, outcome.error)
                log = str(outcome.job.log_path)
                report.failed.append(Failure(symbol, outcome.error or "unknown", log))
                if not keep_going:
                    stop.set()
                continue
            for host, path in outcome.job.object_paths.items():
                name = names[symbol][host]
                path.replace(out / "objects" / f"{name}.o")
                alone = {**outcome.record, "objects": {host: outcome.record["objects"][host]}}
                manifest.write_atomically(
                    out / "objects" / f"{name}.json", json.dumps(alone, indent=1).encode()
                )
            others = [
                _object_record(out, name)
                for host, name in names[symbol].items()
                if host not in outcome.job.object_paths
            ]
            joined = _joined([outcome.record, *(each for each in others if each is not None)])
            if joined is None:
                raise BuildError(
                    f"the objects of {symbol} for {', '.join(names[symbol])} do not hold the same "
                    "device code; delete the build directory's objects and build again"
                )
            records[symbol] = joined
            report.compiled += 1
    return records


def _joined(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The records of one plan's objects for several hosts as one; None if there are none, or if
    they differ in more than the objects.
    """
    if not records:
        return None
    shared = [{k: v for k, v in record.items() if k != "objects"} for record in records]
    if any(each != shared[0] for each in shared):
        return None
    objects = {host: item for record in records for host, item in record["objects"].items()}
    return {**shared[0], "objects": objects}


def _write_pack(
    catalog: Catalog,
    out: Path,
    target: _Target,
    hosts: Sequence[str],
    names: Mapping[str, Mapping[str, str]],
    records: Mapping[str, dict[str, Any]],
    report: Report,
    families: Sequence[str],
    evidence: Sequence[Path],
    inputs: str,
) -> None:
    """Link what changed, then write the manifest; nothing refers to the new files before that."""
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

    plans: dict[str, PlanRecord] = {}
    if old is not None and families:
        plans.update({s: p for s, p in old.plans.items() if p.family not in families})
    for family, symbols in by_family.items():
        kept = _kept_objects(old, family, symbols, target.plans, hosts)
        for symbol in symbols:
            plan, found = target.plans[symbol], records[symbol]
            objects = {h: PlanObject(o["size"], o["sha256"]) for h, o in found["objects"].items()}
            plans[symbol] = PlanRecord(
                symbol,
                plan.family,
                plan.op,
                plan.spec,
                keys.key(plan),
                found["signature"],
                found["device_code"],
                found["host_code"],
                found["registers"],
                found["spills"],
                {**kept.get(symbol, {}), **objects},
            )

    libraries: dict[str, dict[str, ObjectRecord]] = {host: {} for host in hosts}
    linkers = {host: link.linker_version(host) for host in hosts}
    if old is not None:
        for host, family, record in old.libraries():
            symbols = [s for s, plan in plans.items() if plan.family == family]
            if symbols and all(host in plans[s].objects for s in symbols):
                libraries.setdefault(host, {})[family] = record
                linkers.setdefault(host, old.hosts[host].linker)

    def of_family(item: tuple[str, str]) -> tuple[str, str, ObjectRecord, link.Taken | None]:
        host, family = item
        symbols = by_family[family]
        wanted = link.inputs_digest(HOSTS[host], [plans[s].objects[host].sha256 for s in symbols])
        before = libraries[host].get(family)
        if (
            before is not None
            and before.inputs == wanted
            and manifest.check_object(directory, before) is None
        ):
            return host, family, before, None
        beside = directory / f".{family}-{host}.{os.getpid()}.tmp.so"
        try:
            objects = [out / "objects" / f"{names[s][host]}.o" for s in symbols]
            taken = link.link(HOSTS[host], objects, beside)
            link.check_functions(HOSTS[host], beside, {s: plans[s].signature for s in symbols})
            data = beside.read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            name = f"{family}-{host}-{sha256[:16]}.so"
            beside.replace(directory / name)
        finally:
            beside.unlink(missing_ok=True)
        return host, family, ObjectRecord(name, len(data), sha256, wanted), taken

    linked: dict[tuple[str, str], Mapping[str, tuple[str, ...]]] = {}
    todo = [(host, family) for host in hosts for family in by_family]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        for host, family, record, taken in threads.map(of_family, todo):
            libraries[host][family] = record
            report.linked += taken is not None
            if taken is not None:
                linked[host, family] = taken.by_library()
    takes: dict[str, dict[str, set[str]]] = {host: {} for host in libraries}
    for host, of_host in libraries.items():
        for family in of_host:
            # What was kept takes what its pack says; all libraries of a pack say it together.
            kept_takes = old.hosts[host].takes if old is not None and host in old.hosts else {}
            for library, names_taken in linked.get((host, family), kept_takes).items():
                takes[host].setdefault(library, set()).update(names_taken)

    arch = catalog.archs[target.arch]
    bare = Manifest(
        target.arch,
        arch.capability,
        VERSION,
        keys.tool_versions(),
        {
            host: HostRecord(
                HOSTS[host].triple,
                HOSTS[host].cpu,
                linkers[host],
                {library: tuple(sorted(symbols)) for library, symbols in takes[host].items()},
                libraries[host],
            )
            for host in libraries
            if libraries[host]
        },
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
    carry(directory, target.arch, evidence)
    new = stamp(bare, entries, [*evidence, local_certificates(directory)])
    text = manifest.dumps(new).encode()
    path = directory / manifest.NAME
    if not path.is_file() or path.read_bytes() != text:
        manifest.write_atomically(path, text)
    report.packs[target.arch] = directory


def _kept_objects(
    old: Manifest | None,
    family: str,
    symbols: Sequence[str],
    plans: Mapping[str, Plan],
    hosts: Sequence[str],
) -> dict[str, dict[str, PlanObject]]:
    """A family's objects for hosts that are not built now, if the pack has them of the same plans
    with the same keys.
    """
    if old is None or {s for s, p in old.plans.items() if p.family == family} != set(symbols):
        return {}
    if any(old.plans[symbol].key != keys.key(plans[symbol]) for symbol in symbols):
        return {}
    return {
        symbol: {h: o for h, o in old.plans[symbol].objects.items() if h not in hosts}
        for symbol in symbols
    }


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


def main(arguments: Sequence[str] | None = None) -> None:
    """``python build_plans.py``: the same as ``specplan build``."""
    from specplan.tools.cli.build import build_command

    build_command.main(args=list(arguments) if arguments is not None else sys.argv[1:])

"""The command line: build, certify, coverage, verify, list, size, explain, doctor, gc.

Exit codes, everywhere: 0 it holds, 1 it does not, 2 the command was used wrongly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from specplan.plans import catalog as catalogs
from specplan.plans import certificates, locations, manifest
from specplan.plans import deployment as deployments
from specplan.plans.catalog import Catalog, CatalogError
from specplan.plans.cell import Cell, State, nearest
from specplan.plans.certificates import CertificateError
from specplan.plans.coverage import Coverage, compute, uses_of
from specplan.plans.deployment import DeploymentError
from specplan.plans.families import FAMILIES
from specplan.plans.manifest import ManifestError, packs_under
from specplan.plans.reading import suggest
from specplan.plans.version import VERSION

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _fail(message: str, code: int = 1) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


def _catalog(path: Path | None) -> Catalog:
    try:
        return catalogs.load(path)
    except CatalogError as error:
        _fail(str(error))


def _archs(catalog: Catalog, names: Sequence[str]) -> list[str]:
    """The archs named, each once; ``all`` means all of the catalog. A misspelt one is a usage
    error.
    """
    wanted: list[str] = []
    for name in names:
        if name == "all":
            wanted.extend(catalog.archs)
        elif name in catalog.archs:
            wanted.append(name)
        else:
            hint = suggest(name, catalog.archs)
            raise click.BadParameter(f"unknown arch {name!r}{hint}", param_hint="--arch")
    return list(dict.fromkeys(wanted))


def _family_names(names: Sequence[str], hint_for: str = "--family") -> tuple[str, ...]:
    for name in names:
        if name not in FAMILIES:
            hint = suggest(name, FAMILIES)
            raise click.BadParameter(f"unknown family {name!r}{hint}", param_hint=hint_for)
    return tuple(dict.fromkeys(names))


def _root(path: Path | None) -> Path:
    """The directory of packs: as given, else the first place of the search path that has one."""
    if path is not None:
        return path
    for _, place in locations.search_path():
        if packs_under(place):
            return place
    return locations.build_directory() or locations.packaged_directory()


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _option_catalog() -> Decorator:
    return click.option(
        "--catalog",
        "catalog_path",
        type=click.Path(path_type=Path),
        help="Catalog file; default: the one that specplan ships.",
    )


def _option_packs() -> Decorator:
    return click.option(
        "--packs",
        type=click.Path(path_type=Path),
        help="Directory of packs; default: $SPECPLAN_PACKS, the installed wheel, "
        "the per-user directory.",
    )


def _option_certificates() -> Decorator:
    return click.option(
        "--certificates",
        "certificate_path",
        type=click.Path(path_type=Path),
        help="Directory of certificates; default: the ones that specplan ships. "
        "Those beside a pack count too.",
    )


def _evidence(path: Path | None) -> list[Path]:
    return [path if path is not None else certificates.default_directory()]


@click.group(context_settings=CONTEXT)
@click.version_option(VERSION, prog_name="specplan")
def main() -> None:
    """Certified, ahead-of-time compiled launch plans for the speculative-decoding step."""
    # A command makes some hundred thousand cells, none of them in a cycle, and ends: the cyclic
    # collector would walk them over and over.
    gc.disable()


# build


@main.command("build")
@click.option(
    "--arch", "archs", multiple=True, default=("all",), help="Compile target, or 'all'. Repeatable."
)
@click.option("--family", "families", multiple=True, help="Only this family. Repeatable.")
@click.option("--jobs", type=click.IntRange(1), help="Compile processes; default: one a CPU.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Output directory; default: $SPECPLAN_PACKS or the per-user directory.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be compiled; write nothing.")
@click.option(
    "--keep-going", is_flag=True, help="Go on after a plan fails; write packs without it."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@_option_catalog()
@_option_certificates()
def build_command(
    archs: Sequence[str],
    families: Sequence[str],
    jobs: int | None,
    out: Path | None,
    dry_run: bool,
    keep_going: bool,
    as_json: bool,
    catalog_path: Path | None,
    certificate_path: Path | None,
) -> None:
    """Compile every reachable plan into packs. Needs the compiler, no GPU and no torch."""
    catalog = _catalog(catalog_path)
    wanted = _archs(catalog, archs)
    chosen = _family_names(families)
    try:
        from specplan.tools.build import BuildError, build
    except ImportError as error:
        _fail(f"the build step cannot be imported ({error}); pip install 'specplan[build]'")
    target = out if out is not None else locations.build_directory()
    if target is None:
        _fail(
            "this user has no home directory to keep packs in; "
            f"name a directory with --out or ${locations.ENVIRONMENT}"
        )
    with _Progress(quiet=as_json) as progress:
        try:
            report = build(
                catalog,
                target,
                wanted,
                families=chosen,
                jobs=jobs,
                dry_run=dry_run,
                keep_going=keep_going,
                evidence=_evidence(certificate_path),
                progress=progress,
                waiting=lambda text: click.echo(text, err=True),
            )
        except (BuildError, CertificateError) as error:
            progress.close()
            _fail(str(error))
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        for failure in report.failed:
            click.echo(f"failed: {failure.symbol}: {failure.error}\n  log: {failure.log}", err=True)
        verb = "would compile" if dry_run else "compiled"
        click.echo(
            f"{report.planned} plans for {', '.join(wanted)}: {verb} {report.compiled}, "
            f"reused {report.reused}"
            + (f", failed {len(report.failed)}" if report.failed else "")
            + f" in {report.seconds:.1f} s"
        )
        for arch, path in report.packs.items():
            click.echo(f"  {arch}: {path}")
        if report.spilled:
            click.echo(f"plans with spills: {', '.join(report.spilled)}")
    sys.exit(1 if report.failed else 0)


class _Progress:
    """A bar with counts and time left on a terminal, plain lines elsewhere; always on standard
    error.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.bar: Any = None
        self.task: Any = None
        self.start = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def __call__(self, done: int, total: int, symbol: str, error: str | None) -> None:
        if sys.stderr.isatty() and not self.quiet:
            self._on_terminal(done, total, symbol)
        elif not self.quiet and (done == total or done % max(1, total // 20) == 0 or error):
            left = (time.monotonic() - self.start) / done * (total - done)
            what = f" failed: {symbol}" if error else ""
            click.echo(f"compiled {done}/{total}, about {left:.0f} s left{what}", err=True)

    def _on_terminal(self, done: int, total: int, symbol: str) -> None:
        if self.bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self.bar = Progress(
                TextColumn("compiling"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[symbol]}"),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task("plans", total=total, symbol="")
            self.bar.start()
        self.bar.update(self.task, completed=done, symbol=symbol)


# coverage


@main.command("coverage")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    help="Only this arch, or 'all'. Repeatable. "
    "Default: the archs that have a pack; with --strict all.",
)
@click.option("--family", help="Only this family.")
@click.option(
    "--strict",
    is_flag=True,
    help="Every arch of the catalog must be built, and no evidence may be without a claim.",
)
@click.option(
    "--deployment",
    type=click.Path(path_type=Path),
    help="Only the cells that a server with this configuration can reach; all must be certified.",
)
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--markdown", "form", flag_value="markdown", help="Print a Markdown table.")
@click.option(
    "--junit", "form", flag_value="junit", help="Print JUnit XML; only with --deployment."
)
@click.option("--svg", type=click.Path(path_type=Path), help="Write a picture into this file, too.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page into this file, too.")
@_option_packs()
@_option_catalog()
@_option_certificates()
def coverage_command(
    archs: Sequence[str],
    family: str | None,
    strict: bool,
    deployment: Path | None,
    form: str | None,
    svg: Path | None,
    html: Path | None,
    packs: Path | None,
    catalog_path: Path | None,
    certificate_path: Path | None,
) -> None:
    """Say for every cell whether its claim holds. Exit 1 on any that does not. Needs no GPU."""
    catalog = _catalog(catalog_path)
    if deployment is not None:
        if archs or family or strict:
            raise click.UsageError("--deployment says arch and families itself")
        if svg or html:
            raise click.UsageError(
                "--svg and --html show the catalog; they go without --deployment"
            )
        _deployment_coverage(catalog, deployment, form, _root(packs), _evidence(certificate_path))
    if form == "junit":
        raise click.UsageError("--junit goes with --deployment")
    if family is not None:
        _family_names([family])
    root = _root(packs)
    wanted = _archs(catalog, archs)
    if not wanted:
        built = packs_under(root)
        wanted = [arch for arch in catalog.archs if strict or arch in built]
    try:
        coverage = compute(
            catalog, root, wanted, _evidence(certificate_path), family=family, strict=strict
        )
    except CertificateError as error:
        _fail(str(error))
    if form == "json":
        click.echo(json.dumps(coverage.as_json()))
    elif wanted:
        click.echo(_table(coverage, markdown=form == "markdown"))
    if not wanted:
        _fail(f"no pack under {root}; build one with `specplan build`, or name it with --packs")
    _draw(coverage, catalog, svg, html)
    for complaint in coverage.complaints:
        click.echo(f"does not hold: {complaint}", err=True)
    for line in _broken(coverage):
        click.echo(f"does not hold: {line}", err=True)
    if coverage.holds and form is None:
        click.echo("every claim holds")
    sys.exit(0 if coverage.holds else 1)


def _draw(coverage: Coverage, catalog: Catalog, svg: Path | None, html: Path | None) -> None:
    """Write the pictures that were asked for."""
    if svg is None and html is None:
        return
    from specplan.tools import picture
    from specplan.tools.grids import grids

    found = grids(coverage, catalog)
    for path, draw in ((svg, picture.svg), (html, picture.html)):
        if path is not None:
            try:
                path.write_text(draw(coverage, found), encoding="utf-8")
            except OSError as error:
                _fail(f"{path} cannot be written ({error.strerror or error})")


def _deployment_coverage(
    catalog: Catalog, path: Path, form: str | None, root: Path, evidence: list[Path]
) -> NoReturn:
    """``coverage --deployment``: exit 0 only if every cell that the server can reach launches."""
    from specplan.tools import deployment_report

    try:
        wanted = deployments.load(path, catalog)
        found = deployments.answer(wanted, catalog, root, evidence)
    except (DeploymentError, CertificateError) as error:
        _fail(str(error), 2 if isinstance(error, DeploymentError) else 1)
    if form == "json":
        click.echo(json.dumps(found.as_json()))
    else:
        click.echo(deployment_report.FORMS[form or "text"](found))
    sys.exit(0 if found.holds else 1)


def _table(coverage: Coverage, *, markdown: bool) -> str:
    """Family x arch, one column a state. A state that no cell is in shows as a dot."""
    head = ["family", "arch", *(state.value for state in State), "cells"]
    body = []
    for family, archs in coverage.summary().items():
        for arch, counts in archs.items():
            body.append(
                [
                    family,
                    arch,
                    *(str(counts.get(state.value, 0) or ".") for state in State),
                    str(sum(counts.values())),
                ]
            )
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            text.ljust(width) if i < 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip()

    lines = [line(head)]
    if markdown:
        rules = [
            "-" * width if i < 2 else "-" * (width - 1) + ":" for i, width in enumerate(widths)
        ]
        lines.append(f"| {' | '.join(rules)} |")
    return "\n".join([*lines, *map(line, body)])


def _broken(coverage: Coverage) -> list[str]:
    """One line for each way in which claims fail, with how many cells fail that way and one of
    them.
    """
    found: dict[tuple[str, str, str, str], list[Cell]] = {}
    for row in coverage.rows:
        if not row.holds:
            at = (row.cell.family, row.cell.arch, row.state.value, row.reason)
            found.setdefault(at, []).append(row.cell)
    return [
        f"{family} on {arch}: {len(cells)} cells {state}: {reason} (first: {cells[0]})"
        for (family, arch, state, reason), cells in found.items()
    ]


# verify


@main.command("verify")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_option_packs()
def verify_command(as_json: bool, packs: Path | None) -> None:
    """Check the bytes of packs.

    Manifest digest, sizes, sha256, and that the device code inside is what the manifest names.
    """
    from specplan.plans import device_code

    root = _root(packs)
    found = packs_under(root)
    results: dict[str, list[str]] = {}
    for arch, directory in found.items():
        wrong: list[str] = []
        try:
            pack = manifest.read(directory)
        except ManifestError as error:
            results[arch] = [str(error)]
            continue
        for family, record in pack.objects.items():
            complaint = manifest.check_object(directory, record)
            if complaint is not None:
                wrong.append(complaint)
                continue
            data = (directory / record.file).read_bytes()
            inside = {device_code.read(image).sha256 for image in device_code.images(data)}
            named = {p.device_code for p in pack.plans.values() if p.family == family}
            if inside != named:
                wrong.append(
                    f"{record.file} holds other device code than its manifest names "
                    f"({len(named - inside)} missing, {len(inside - named)} unknown)"
                )
        results[arch] = wrong
    if as_json:
        click.echo(json.dumps({"packs": str(root), "archs": results}, indent=1))
    else:
        for arch, wrong in results.items():
            click.echo(f"{arch}: {'whole' if not wrong else 'corrupt'} ({found[arch]})")
            for complaint in wrong:
                click.echo(f"  {complaint}", err=True)
    if not found:
        _fail(f"no pack under {root}")
    sys.exit(1 if any(results.values()) else 0)


# list and size


def _found(packs: Path | None, arch: str | None, family: str | None, problem: str | None) -> Any:
    """The packs at hand; exit 2 for a name that none of them can mean, 1 if there are none."""
    from specplan.tools import inventory

    if family is not None:
        _family_names([family])
    everything = inventory.at_hand(packs)
    known = {
        name
        for each in everything
        if each.pack is not None
        for of, problems in each.pack.problems.items()
        if family in (None, of)
        for name in problems
    }
    if problem is not None and known and problem not in known:
        hint = suggest(problem, sorted(known))
        raise click.BadParameter(f"unknown problem {problem!r}{hint}", param_hint="--problem")
    found = [each for each in everything if arch in (None, each.arch)]
    if not found:
        places = [packs] if packs is not None else [place for _, place in locations.search_path()]
        there = ", ".join(dict.fromkeys(each.arch for each in everything)) or "none"
        wanted = f"no pack for {arch}" if arch else "no pack"
        _fail(f"{wanted} under {', '.join(map(str, places))}; archs found: {there}")
    return found


def _columns(records: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Records as lines; the columns ``right`` are numbers."""
    rows = [[f"{v:,}" if isinstance(v, int) else str(v) for v in record] for record in records]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


@main.command("list")
@click.argument("what", type=click.Choice(["packs", "plans", "cells"]), default="packs")
@click.option("--arch", help="Only this arch.")
@click.option("--family", help="Only this family; of plans and cells.")
@click.option("--problem", help="Only this problem; of plans and cells.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_option_packs()
def list_command(
    what: str,
    arch: str | None,
    family: str | None,
    problem: str | None,
    as_json: bool,
    packs: Path | None,
) -> None:
    """List the packs at hand, or the plans or cells in those that a load takes.

    Exit 1 if there is nothing to list, or if a manifest cannot be read.
    """
    from specplan.tools import inventory

    if what == "packs" and (family or problem):
        raise click.UsageError("--family and --problem go with `list plans` and `list cells`")
    found = _found(packs, arch, family, problem)
    records: list[Any]
    if what == "packs":
        records = inventory.packs(found)
    else:
        records = list(getattr(inventory, what)(found, family, problem))
    wrong = [each.wrong for each in found if each.wrong]
    if as_json:
        click.echo(json.dumps({what: records, "complaints": wrong}, indent=1))
    elif records:
        click.echo(_LISTS[what](records))
    for complaint in wrong:
        click.echo(f"wrong: {complaint}", err=True)
    if not records:
        click.echo(f"error: none of the packs at hand has {what} like that", err=True)
    sys.exit(1 if wrong or not records else 0)


def _listed_packs(records: Sequence[Any]) -> str:
    head = ("arch", "plans", "certified", "candidate", "specplan", "directory", "")
    body = [
        (
            *(r["arch"], r["plans"], r["cells"]["certified"], r["cells"]["candidate"]),
            *(r["specplan"] or "?", r["directory"]),
            f"[{r['place']}]" if r["used"] else f"[{r['place']}, behind another]",
        )
        for r in records
    ]
    return _columns([head, *body], (1, 2, 3))


def _listed_plans(records: Sequence[Any]) -> str:
    head = ("arch", "family", "op", "cells", "registers", "spills", "bytes", "symbol")
    names = ("arch", "family", "op", "cells", "registers", "spills", "object_bytes", "symbol")
    return _columns([head, *[[r[name] for name in names] for r in records]], (3, 4, 5, 6))


def _listed_cells(records: Sequence[Any]) -> str:
    head = ("arch", "family", "problem", "dtype", "splits", "tokens", "requests", "cells", "state")
    body = [
        (
            *(r["arch"], r["family"], r["problem"], r["dtype"]),
            f"{r['splits']}" if r["planned"] else f"{r['splits']} forced",
            *(r["tokens"], r["requests"], r["cells"], r["state"]),
        )
        for r in records
    ]
    return _columns([head, *body], (7,))


_LISTS: dict[str, Callable[[Sequence[Any]], str]] = {
    "packs": _listed_packs,
    "plans": _listed_plans,
    "cells": _listed_cells,
}


@main.command("size")
@click.option("--arch", help="Only this arch.")
@click.option("--family", help="Only this family.")
@click.option("--plans", "by_plan", is_flag=True, help="Also the objects of every plan.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
@_option_packs()
def size_command(
    arch: str | None, family: str | None, by_plan: bool, as_json: bool, packs: Path | None
) -> None:
    """Say what each family of each pack costs an installer, and what is shared by all.

    Exit 1 if a file is not there, or has another size than its manifest says.
    """
    from specplan import library
    from specplan.tools import inventory

    found = [each for each in _found(packs, arch, family, None) if each.used]
    wrong = [each.wrong for each in found if each.wrong]
    weights = []
    for each in found:
        if each.pack is not None:
            part, complaints = inventory.weigh(each, family)
            weights += part
            wrong += complaints
    records = list(inventory.plans(found, family, None)) if by_plan else []
    runtime = next((path for path in library.runtime_candidates() if path.is_file()), None)
    shared = runtime.stat().st_size if runtime else None
    if as_json:
        body: dict[str, Any] = {
            "families": [weight.as_dict() for weight in weights],
            "installed_bytes": sum(weight.installed for weight in weights),
            "wheel_bytes": sum(weight.packed for weight in weights),
            "runtime_library_bytes": shared,
            "complaints": wrong,
        }
        click.echo(json.dumps({**body, "plans": records} if by_plan else body, indent=1))
    elif weights:
        head = (
            "arch",
            "family",
            "plans",
            "cells",
            "library",
            "manifest",
            "installed",
            "in a wheel",
        )
        lines: list[Sequence[Any]] = [head]
        for weight in weights:
            sizes = (weight.library, weight.table, weight.installed, weight.packed)
            lines.append(
                (weight.arch, weight.family, weight.plans, weight.cells, *map(_bytes, sizes))
            )
        totals = [
            sum(getattr(w, n) for w in weights) for n in ("library", "table", "installed", "packed")
        ]
        lines.append(
            (
                "",
                "in all",
                sum(w.plans for w in weights),
                sum(w.cells for w in weights),
                *map(_bytes, totals),
            )
        )
        click.echo(_columns(lines, range(2, 8)))
        if shared is not None:
            click.echo(f"\nbesides, once for all packs: {runtime}, {_bytes(shared)}")
        if records:
            click.echo("\n" + _listed_plans(records))
    for complaint in wrong:
        click.echo(f"wrong: {complaint}", err=True)
    if not weights and not wrong:
        _fail(f"no pack at hand has family {family}")
    sys.exit(1 if wrong else 0)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


# explain


@main.command("explain")
@click.argument("family")
@click.argument(
    "assignments", nargs=-1, metavar="requests=R tokens=T problem=P [splits=S] [dtype=D]"
)
@click.option("--arch", required=True, help="Arch to decide for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_option_packs()
@_option_catalog()
@_option_certificates()
def explain_command(
    family: str,
    assignments: Sequence[str],
    arch: str,
    as_json: bool,
    packs: Path | None,
    catalog_path: Path | None,
    certificate_path: Path | None,
) -> None:
    """Print the way from a call to its plan, or why there is none."""
    catalog = _catalog(catalog_path)
    _family_names([family], "FAMILY")
    _archs(catalog, [arch])
    values = _assignments(assignments)
    problems = catalog.problems.get(family, {})
    problem = values.get("problem", "")
    if problem not in problems:
        hint = suggest(problem, problems) if problem else f"; known: {', '.join(problems)}"
        raise click.UsageError(f"problem={problem!r} is no problem of {family}{hint}")
    planning = FAMILIES[family]
    dtype = values.get("dtype", planning.dtypes[0])
    if dtype not in planning.dtypes:
        raise click.UsageError(f"dtype={dtype!r}{suggest(dtype, planning.dtypes)}")
    try:
        requests, tokens = int(values["requests"]), int(values["tokens"])
        splits = int(values["splits"]) if "splits" in values else None
    except (KeyError, ValueError) as error:
        raise click.UsageError("requests=R and tokens=T are needed, as integers") from error
    if splits is not None and splits < 1:
        raise click.UsageError(
            f"splits={splits} is below 1; leave it out for the planning rule's choice"
        )
    steps: list[tuple[str, str]] = []
    geometry = problems[problem]
    steps.append(("problem", f"{problem}: {', '.join(f'{k}={v}' for k, v in geometry.items())}"))
    steps.append(("rows", f"{requests} requests x {tokens} tokens = {requests * tokens}"))
    complaint = planning.check_tokens(geometry, tokens) if tokens >= 1 else "tokens is below 1"
    if complaint is None and requests >= 1:
        chosen = planning.splits(geometry, requests, tokens, dtype, catalog.archs[arch])
        steps.append(
            (
                "splits",
                f"{splits} as asked" if splits else f"{chosen} by the planning rule for {arch}",
            )
        )
        splits = splits or chosen
    cell = Cell(family, problem, dtype, arch, splits or 1, tokens, requests)
    try:
        answer, state = _decide(
            catalog, cell, _root(packs), _evidence(certificate_path), steps, complaint
        )
    except CertificateError as error:
        _fail(str(error))
    if as_json:
        body = {"cell": cell.as_dict(), "steps": dict(steps), "state": state, "runs": answer}
        click.echo(json.dumps(body, indent=1))
    else:
        width = max(len(name) for name, _ in steps)
        for name, text in steps:
            click.echo(f"{name.ljust(width)}  {text}")
    sys.exit(0 if answer else 1)


def _decide(
    catalog: Catalog,
    cell: Cell,
    root: Path,
    evidence: list[Path],
    steps: list[tuple[str, str]],
    complaint: str | None,
) -> tuple[bool, str]:
    """The steps after the cell is known. Returns whether it runs certified, and its state."""
    if cell not in catalog.claims:
        steps.append(("catalog", complaint or f"has no cell {cell}"))
        mine = (c for c in catalog.cells(cell.arch, cell.family))
        steps.append(("nearest", "; ".join(map(str, nearest(cell, mine)))))
        steps.append(("answer", "uncertified: the call is declined"))
        return False, "uncertified"
    block = next(
        b
        for b in catalog.blocks
        if b.family == cell.family
        and cell.arch in b.archs
        and cell.problem in b.problems
        and cell.requests in b.requests
        and cell.tokens in b.tokens
        and cell.dtype in b.dtypes
        and (catalog.is_automatic(cell) if b.splits is None else cell.splits in b.splits)
    )
    claim = State.CERTIFIED if catalog.claims[cell] else State.CANDIDATE
    steps.append(("catalog", f"{claim.value} (line {block.line}: {block.why})"))
    plans = catalog.plans_of(cell)
    steps.append(("plan", ", ".join(plan.symbol for plan in plans)))
    launch = {name: value for plan in plans for name, value in plan.launch}
    if launch:
        steps.append(("launch", ", ".join(f"{k}={v}" for k, v in launch.items())))
    coverage = compute(_only(catalog, cell), root, [cell.arch], evidence)
    row = coverage.rows[0]
    steps.append(("pack", f"{root}: {row.reason or row.state.value}"))
    directory = packs_under(root).get(cell.arch)
    if directory is not None and row.state in (State.CERTIFIED, State.CANDIDATE):
        record = manifest.read(directory).plans[uses_of(plans)[0].symbol]
        steps.append(("registers", f"{record.registers} a thread, {record.spills} spills"))
    answer = {
        State.CERTIFIED: "certified: the call launches",
        State.CANDIDATE: "candidate: the call launches only after load(candidates=True)",
    }.get(row.state, f"{row.state.value}: the call is declined")
    steps.append(("answer", answer))
    return row.state is State.CERTIFIED, row.state.value


def _only(catalog: Catalog, cell: Cell) -> Catalog:
    """The catalog with the claim of one cell."""
    return dataclasses.replace(catalog, blocks=(), claims={cell: catalog.claims[cell]})


def _assignments(items: Sequence[str]) -> dict[str, str]:
    known = ("requests", "tokens", "problem", "splits", "dtype")
    values: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or name not in known:
            raise click.UsageError(f"{item!r} is not NAME=VALUE with a name of {', '.join(known)}")
        values[name] = value
    return values


# gc


@main.command("gc")
@click.option(
    "--older-than",
    default=3600,
    show_default=True,
    help="Only files that are older than this many seconds.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be deleted.")
@_option_packs()
def gc_command(older_than: int, dry_run: bool, packs: Path | None) -> None:
    """Delete objects and shared objects that no manifest refers to.

    Young files are kept, because a build that is under way may be about to refer to them.
    """
    root = _root(packs)
    from specplan.tools.build.keys import digest

    kept: set[Path] = set()
    for directory in packs_under(root).values():
        try:
            pack = manifest.read(directory)
        except ManifestError as error:
            _fail(f"{error}; nothing was deleted")
        kept |= {directory / record.file for record in pack.objects.values()}
        for plan in pack.plans.values():
            name = digest(plan.key)
            kept |= {root / "objects" / f"{name}.o", root / "objects" / f"{name}.json"}
    now = time.time()
    # A set: a star matches a leading dot here, so that the patterns overlap.
    candidates = {*root.glob("objects/*"), *root.glob("*/*.so"), *root.glob("*/.*.tmp*")}
    size = count = 0
    for path in sorted(candidates - kept):
        # A build or another gc may take a file away between the look and the deed.
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if now - found.st_mtime > older_than:
                if not dry_run:
                    path.unlink()
                count, size = count + 1, size + found.st_size
    verb = "would delete" if dry_run else "deleted"
    click.echo(f"{verb} {count} files, {size / 1e6:.1f} MB, under {root}")


# certify and doctor live in modules of their own, because they import torch


@main.group("certify", invoke_without_command=True)
@click.option(
    "--arch", default="auto", show_default=True, help="Arch to certify; 'auto' is that of the GPU."
)
@click.option("--family", "families", multiple=True, help="Only this family. Repeatable.")
@click.option("--problem", "problems", multiple=True, help="Only this problem. Repeatable.")
@click.option(
    "--requests", help="Only these requests, for example 1..8. What is left out is not certified."
)
@click.option("--shard", default="1/1", show_default=True, help="I/N: certify the I-th of N parts.")
@click.option(
    "--missing",
    "only_missing",
    is_flag=True,
    help="Only cells that no certificate, shipped or beside the pack, covers as the pack has them.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for the certificates; default: beside the pack.",
)
@click.option("--device", default=0, show_default=True, help="CUDA device index.")
@_option_packs()
@_option_catalog()
@click.pass_context
def certify_command(context: click.Context, /, **options: Any) -> None:
    """Check every cell on this GPU and write certificates."""
    if context.invoked_subcommand is None:
        from specplan.tools.certify import certify_main

        catalog = _catalog(options.pop("catalog_path"))
        families = _family_names(options.pop("families"))
        problems = {p for f in families or catalog.problems for p in catalog.problems.get(f, {})}
        for name in options["problems"]:
            if name not in problems:
                hint = suggest(name, sorted(problems))
                raise click.BadParameter(f"unknown problem {name!r}{hint}", param_hint="--problem")
        sys.exit(
            certify_main(catalog, families=families, root=_root(options.pop("packs")), **options)
        )


@certify_command.command("merge")
@click.argument("parts", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory of certificates to write.",
)
def certify_merge_command(parts: Sequence[Path], out: Path) -> None:
    """Join the certificates of shards that ran on the same kind of device with the same pack."""
    from specplan.tools.merge import MergeError, merge

    try:
        for path, cells in merge(parts, out):
            click.echo(f"{path}: {cells} cells")
    except (MergeError, CertificateError) as error:
        _fail(str(error))


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_command(as_json: bool) -> None:
    """Print what a bug report needs, and what is wrong."""
    from specplan.tools.doctor import examine

    report, complaints = examine()
    if as_json:
        click.echo(json.dumps({**report, "complaints": complaints}, indent=1))
    else:
        width = max(map(len, report))
        for name, value in report.items():
            click.echo(f"{name.ljust(width)}  {value}")
        for complaint in complaints:
            click.echo(f"wrong: {complaint}")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()

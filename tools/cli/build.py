"""``specplan build``: compile every reachable plan into packs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from specplan.plans import locations
from specplan.plans.certificates import CertificateError
from specplan.plans.hosts import HOSTS
from specplan.tools.cli.common import (
    arch_names,
    evidence_directories,
    fail,
    family_names,
    option_catalog,
    option_certificates,
    read_catalog,
)


@click.command("build")
@click.option(
    "--arch", "archs", multiple=True, default=("all",), help="Compile target, or 'all'. Repeatable."
)
@click.option("--family", "families", multiple=True, help="Only this family. Repeatable.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    type=click.Choice([*HOSTS, "all"]),
    help="CPU architecture of the servers; default: this machine's. Repeatable.",
)
@click.option("--jobs", type=click.IntRange(1), help="Compile processes; default: one a CPU.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Output directory; default: $SPECPLAN_PACKS, packs/ of the checkout that specplan runs "
    "from, or the per-user directory.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be compiled; write nothing.")
@click.option(
    "--keep-going", is_flag=True, help="Go on after a plan fails; write packs without it."
)
@click.option(
    "--strict", is_flag=True, help="Exit 1 where a cell that is claimed certified is not, as built."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@option_catalog()
@option_certificates()
def build_command(
    archs: Sequence[str],
    families: Sequence[str],
    hosts: Sequence[str],
    jobs: int | None,
    out: Path | None,
    dry_run: bool,
    keep_going: bool,
    strict: bool,
    as_json: bool,
    catalog_path: Path | None,
    certificate_path: Path | None,
) -> None:
    """Compile every reachable plan into packs. Needs the compiler, no GPU and no torch."""
    catalog = read_catalog(catalog_path)
    wanted = arch_names(catalog, archs)
    chosen = family_names(families)
    try:
        from specplan.tools.build import BuildError, build
    except ImportError as error:
        fail(f"the build step cannot be imported ({error}); pip install 'specplan[build]'")
    target = out if out is not None else locations.build_directory()
    if target is None:
        fail(
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
                hosts=list(HOSTS) if "all" in hosts else hosts,
                jobs=jobs,
                dry_run=dry_run,
                keep_going=keep_going,
                evidence=evidence_directories(certificate_path),
                progress=progress,
                waiting=lambda text: click.echo(text, err=True),
            )
        except (BuildError, CertificateError) as error:
            progress.close()
            fail(str(error))
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
            click.echo(f"  {arch}: {path} (cells: {report.cells[arch]})")
        if report.spilled:
            click.echo(f"plans with spills: {', '.join(report.spilled)}")
    complaint = report.complaint
    if complaint is not None:
        click.echo(f"{'error' if strict else 'warning'}: {complaint}", err=True)
    sys.exit(1 if report.failed or (strict and complaint is not None) else 0)


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

            self.bar = _bar(Console(stderr=True))
            self.task = self.bar.add_task("plans", total=total, symbol="")
            self.bar.start()
        self.bar.update(self.task, completed=done, symbol=symbol)


def _bar(console: Any) -> Any:
    """The bar; a narrow terminal shortens the bar and the symbol, never the counts or the time."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    return Progress(
        TextColumn("compiling", table_column=Column(no_wrap=True)),
        BarColumn(None, table_column=Column(ratio=1, max_width=40, min_width=1)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn(
            "{task.fields[symbol]}",
            table_column=Column(ratio=2, no_wrap=True, overflow="ellipsis", min_width=1),
        ),
        console=console,
        expand=True,
    )

"""``python -m benchmarks report`` and ``compare``: from the committed results, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks import points
from benchmarks.compare import compare


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Pages and comparisons from result files. Timing itself: the scripts of this folder."""


@main.command("report")
@click.option(
    "--results", type=click.Path(path_type=Path), default=points.RESULTS, help="Result files."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(__file__).parent.parent / "docs" / "benchmarks",
    help="Directory of the pages.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if the pages are of other data.")
def report_command(results: Path, out: Path, check: bool) -> None:
    """Write the pages of docs/benchmarks from the result files alone."""
    from benchmarks import report

    try:
        found = points.runs(results)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if check:
        wrong = report.differences(found, out)
        for line in wrong:
            click.echo(f"does not hold: {line}", err=True)
        sys.exit(1 if wrong else 0)
    try:
        written = report.write(found, out)
    except ImportError as error:
        raise click.ClickException(f"{error}; pip install 'matplotlib>=3.9'") from error
    for path in written:
        click.echo(str(path))


@main.command("compare")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--most", default=5.0, show_default=True, help="Per cent that a point may get worse.")
def compare_command(old: Path, new: Path, most: float) -> None:
    """Compare two result files by ratio to a peer of the same run. Exit 1 where a point got more
    than --most per cent worse.
    """
    try:
        changes = compare(points.read(old), points.read(new))
    except ValueError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    slower = [change for change in changes if change.worse * 100 > most]
    for change in sorted(changes, key=lambda c: -c.worse):
        at = ", ".join(map(str, change.point))
        sign = "WORSE" if change in slower else "     "
        click.echo(
            f"{sign} {change.worse:+7.1%}  {at}: {change.metric}, of {change.peer} "
            f"{change.old:.3f} -> {change.new:.3f}"
        )
    click.echo(f"{len(changes)} points, {len(slower)} more than {most:g} % worse")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()

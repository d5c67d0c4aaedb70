"""``specplan doctor``: what a bug report needs, and what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from specplan.tools.cli.common import argument_packs, named_packs, option_packs


@click.command("doctor")
@argument_packs()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@option_packs()
def doctor_command(path: Path | None, as_json: bool, packs: Path | None) -> None:
    """Print what a bug report needs, and what is wrong.

    Says of every pack what a load would refuse it for. No GPU is no fault: builders have none.
    """
    from specplan.tools.doctor import examine

    report, complaints = examine(named_packs(path, packs))
    if as_json:
        click.echo(json.dumps({**report, "complaints": complaints}, indent=1))
    else:
        width = max(map(len, report))
        for name, value in report.items():
            click.echo(f"{name.ljust(width)}  {value}")
        for complaint in complaints:
            click.echo(f"wrong: {complaint}")
    sys.exit(1 if complaints else 0)

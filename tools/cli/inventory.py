"""``specplan list`` and ``specplan size``: what packs hold and what they cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from specplan.plans import locations
from specplan.plans.reading import suggest
from specplan.tools.cli.common import fail, family_names, option_packs


def _found(packs: Path | None, arch: str | None, family: str | None, problem: str | None) -> Any:
    """The packs at hand; exit 2 for a name that none of them can mean, 1 if there are none."""
    from specplan.tools import inventory

    if family is not None:
        family_names([family])
    if arch == "all":
        arch = None
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
        fail(f"{wanted} under {', '.join(map(str, places))}; archs found: {there}")
    return found


def columns(records: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
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


@click.command("list")
@click.argument("what", type=click.Choice(["packs", "plans", "cells"]), default="packs")
@click.option("--arch", help="Only this arch; 'all', the default, is every one.")
@click.option("--family", help="Only this family; of plans and cells.")
@click.option("--problem", help="Only this problem; of plans and cells.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@option_packs()
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
    head = ("arch", "hosts", "plans", "certified", "candidate", "specplan", "directory", "")
    body = [
        (
            *(r["arch"], " ".join(r["hosts"]) or "?", r["plans"]),
            *(r["cells"]["certified"], r["cells"]["candidate"]),
            *(r["specplan"] or "?", r["directory"]),
            f"[{r['place']}]" if r["used"] else f"[{r['place']}, behind another]",
        )
        for r in records
    ]
    return columns([head, *body], (2, 3, 4))


def _listed_plans(records: Sequence[Any]) -> str:
    head = ("arch", "family", "op", "cells", "registers", "spills", "bytes", "symbol")
    names = ("arch", "family", "op", "cells", "registers", "spills")
    body = [
        [*(r[name] for name in names), sum(r["object_bytes"].values()), r["symbol"]]
        for r in records
    ]
    return columns([head, *body], (3, 4, 5, 6))


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
    return columns([head, *body], (7,))


_LISTS: dict[str, Callable[[Sequence[Any]], str]] = {
    "packs": _listed_packs,
    "plans": _listed_plans,
    "cells": _listed_cells,
}


@click.command("size")
@click.option("--arch", help="Only this arch; 'all', the default, is every one.")
@click.option("--family", help="Only this family.")
@click.option("--plans", "by_plan", is_flag=True, help="Also the objects of every plan.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
@option_packs()
def size_command(
    arch: str | None, family: str | None, by_plan: bool, as_json: bool, packs: Path | None
) -> None:
    """Say what each family of each pack costs an installer, by host.

    Exit 1 if a file is not there, or has another size than its manifest says.
    """
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
    if as_json:
        body: dict[str, Any] = {
            "families": [weight.as_dict() for weight in weights],
            "installed_bytes": sum(weight.installed for weight in weights),
            "wheel_bytes": sum(weight.packed for weight in weights),
            "complaints": wrong,
        }
        click.echo(json.dumps({**body, "plans": records} if by_plan else body, indent=1))
    elif weights:
        head = (
            "arch",
            "host",
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
                (
                    weight.arch,
                    weight.host,
                    weight.family,
                    weight.plans,
                    weight.cells,
                    *map(_bytes, sizes),
                )
            )
        totals = [
            sum(getattr(w, n) for w in weights) for n in ("library", "table", "installed", "packed")
        ]
        lines.append(
            (
                "",
                "",
                "in all",
                sum(w.plans for w in weights),
                sum(w.cells for w in weights),
                *map(_bytes, totals),
            )
        )
        click.echo(columns(lines, range(3, 9)))
        if records:
            click.echo("\n" + _listed_plans(records))
    for complaint in wrong:
        click.echo(f"wrong: {complaint}", err=True)
    if not weights and not wrong:
        fail(f"no pack at hand has family {family}")
    sys.exit(1 if wrong else 0)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"

"""``specplan explain``: the way from a call to its plan, or why there is none."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from specplan.plans import manifest
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell, State, nearest
from specplan.plans.certificates import CertificateError
from specplan.plans.coverage import compute, uses_of
from specplan.plans.families import FAMILIES
from specplan.plans.manifest import packs_under
from specplan.plans.reading import suggest
from specplan.tools.cli.common import (
    evidence_directories,
    fail,
    family_names,
    one_arch,
    option_catalog,
    option_certificates,
    option_packs,
    pack_root,
    read_catalog,
)


@click.command("explain")
@click.argument("family")
@click.argument(
    "assignments", nargs=-1, metavar="requests=R tokens=T problem=P [splits=S] [dtype=D]"
)
@click.option("--arch", required=True, help="Arch to decide for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@option_packs()
@option_catalog()
@option_certificates()
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
    catalog = read_catalog(catalog_path)
    family_names([family], "FAMILY")
    one_arch(catalog, arch)
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
            catalog,
            cell,
            pack_root(packs, arch),
            evidence_directories(certificate_path),
            steps,
            complaint,
        )
    except CertificateError as error:
        fail(str(error))
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

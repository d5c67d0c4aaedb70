"""``specplan coverage``: every claim against its evidence, or one server's cells."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
from specplan.plans import deployment as deployments
from specplan.plans import locations, servers
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell, State
from specplan.plans.certificates import CertificateError
from specplan.plans.coverage import Coverage, compute
from specplan.plans.deployment import DeploymentError
from specplan.plans.servers import ModelError
from specplan.plans.simulations import SimulationFileError
from specplan.tools.cli.common import (
    arch_names,
    evidence_directories,
    fail,
    family_names,
    option_catalog,
    option_certificates,
    option_packs,
    pack_root,
    read_catalog,
)


@click.command("coverage")
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
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="A model's config.json, or its directory: only the cells that a server of it can reach, "
    "derived from the config and the options below.",
)
@click.option("--server", type=click.Choice(servers.SERVERS), help="The server; with --model.")
@click.option(
    "--tp", type=click.IntRange(1), default=1, help="Tensor parallel ranks; with --model."
)
@click.option(
    "--kv-dtype",
    default="auto",
    help="K/V cache dtype as the server spells it; with --model. Default: the model's dtype.",
)
@click.option(
    "--state-dtype",
    default="auto",
    help="Dtype of recurrent states; with --model. Default: what model and server make of it.",
)
@click.option(
    "--drafts", type=click.IntRange(0), default=0, help="Draft tokens a step; with --model."
)
@click.option(
    "--max-requests",
    type=click.IntRange(1, 65536),
    help="Most requests of a batch; with --model, which needs it.",
)
@click.option(
    "--page",
    type=click.IntRange(1),
    help="Tokens of a K/V page, if the server is told; with --model.",
)
@click.option(
    "--records",
    is_flag=True,
    help="vLLM's page of recurrent state holds the records of gdn_replay too; with --model.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Keep the derived deployment in this file; with --model.",
)
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--markdown", "form", flag_value="markdown", help="Print a Markdown table.")
@click.option(
    "--junit",
    "form",
    flag_value="junit",
    help="Print JUnit XML; only with --deployment or --model.",
)
@click.option("--svg", type=click.Path(path_type=Path), help="Write a picture into this file, too.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page into this file, too.")
@option_packs()
@option_catalog()
@option_certificates()
def coverage_command(
    archs: Sequence[str],
    family: str | None,
    strict: bool,
    deployment: Path | None,
    model: Path | None,
    form: str | None,
    svg: Path | None,
    html: Path | None,
    packs: Path | None,
    catalog_path: Path | None,
    certificate_path: Path | None,
    **given: Any,
) -> None:
    """Say for every cell whether its claim holds. Exit 1 on any that does not. Needs no GPU."""
    catalog = read_catalog(catalog_path)
    _go_together(model, deployment, given)
    if deployment is not None or model is not None:
        if family or strict or (archs and deployment is not None):
            raise click.UsageError("--deployment and --model say which cells; --model takes --arch")
        if svg or html:
            raise click.UsageError(
                "--svg and --html show the catalog; they go without --deployment and --model"
            )
        evidence = evidence_directories(certificate_path)
        at_hand = locations.packs_at_hand(packs)
        if model is not None:
            named = tuple(arch_names(catalog, archs or ["sm_90a"]))
            _model_coverage(catalog, model, named, given, form, at_hand, evidence)
        elif deployment is not None:
            _deployment_coverage(catalog, deployment, form, at_hand, evidence)
    if form == "junit":
        raise click.UsageError("--junit goes with --deployment or --model")
    if family is not None:
        family_names([family])
    built = locations.packs_at_hand(packs)
    wanted = arch_names(catalog, archs)
    if not wanted:
        wanted = [arch for arch in catalog.archs if strict or arch in built]
    try:
        coverage = compute(
            catalog,
            built,
            wanted,
            evidence_directories(certificate_path),
            family=family,
            strict=strict,
        )
    except (CertificateError, SimulationFileError) as error:
        fail(str(error))
    if not wanted:
        place = pack_root(packs)
        none = f"no pack under {place}; build one with `specplan build`, or name it with --packs"
        coverage = replace(coverage, complaints=[none])
    if form == "json":
        click.echo(json.dumps(coverage.as_json()))
    elif wanted:
        click.echo(_table(coverage, markdown=form == "markdown"))
    if not wanted:
        fail(coverage.complaints[0])
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
                fail(f"{path} cannot be written ({error.strerror or error})")


def _deployment_coverage(
    catalog: Catalog, path: Path, form: str | None, root: Mapping[str, Path], evidence: list[Path]
) -> NoReturn:
    """``coverage --deployment``: exit 0 only if every cell that the server can reach launches."""
    from specplan.tools import deployment_report

    try:
        wanted = deployments.load(path, catalog)
        found = deployments.answer(wanted, catalog, root, evidence)
    except (DeploymentError, CertificateError) as error:
        fail(str(error), 2 if isinstance(error, DeploymentError) else 1)
    if form == "json":
        click.echo(json.dumps(found.as_json()))
    else:
        click.echo(deployment_report.FORMS[form or "text"](found))
    sys.exit(0 if found.holds else 1)


def _go_together(model: Path | None, deployment: Path | None, given: Mapping[str, Any]) -> None:
    """Refuse options of --model without it, and --model without what it needs."""
    if model is None:
        context = click.get_current_context()
        for name in given:
            if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --model")
    elif deployment is not None:
        raise click.UsageError("--model derives the deployment; give one of the two")
    elif given["server"] is None or given["max_requests"] is None:
        raise click.UsageError("--model needs --server and --max-requests")


def _model_coverage(
    catalog: Catalog,
    path: Path,
    archs: tuple[str, ...],
    given: Mapping[str, Any],
    form: str | None,
    at_hand: Mapping[str, Path],
    evidence: list[Path],
) -> NoReturn:
    """``coverage --model``: the same question as ``--deployment``, of a derived one."""
    from specplan.tools import deployment_report

    write = given["write"]
    setup = servers.Setup(archs=archs, **{k: v for k, v in given.items() if k != "write"})
    try:
        derived = servers.derive(servers.read_config(path), setup)
        if write is not None and derived.text:
            write.write_text(derived.text, encoding="utf-8")
        found = servers.answer(derived, setup, catalog, at_hand, evidence)
    except (ModelError, DeploymentError) as error:
        fail(str(error), 2)
    except CertificateError as error:
        fail(str(error))
    if form == "json":
        body = {"deployment": derived.text, "notes": derived.notes, **found.as_json()}
        click.echo(json.dumps(body))
    else:
        click.echo(deployment_report.of_model(derived, found, form or "text"))
    sys.exit(0 if found.holds else 1)


def _table(coverage: Coverage, *, markdown: bool) -> str:
    """Family x arch, one column a state, and how many candidates were simulated on a CPU. None
    shows as a dot.
    """
    states = [state.value for state in State]
    head = ["family", "arch", *states, "cells", "simulated"]
    simulated = Counter(
        (row.cell.family, row.cell.arch)
        for row in coverage.rows
        if row.simulated and row.state is State.CANDIDATE
    )
    body = []
    for family, archs in coverage.summary().items():
        for arch, counts in archs.items():
            body.append(
                [
                    family,
                    arch,
                    *(str(counts.get(state.value, 0) or ".") for state in State),
                    str(sum(counts.values())),
                    str(simulated[family, arch] or "."),
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

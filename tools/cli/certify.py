"""``specplan certify`` and ``specplan certify merge``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from specplan.plans.certificates import CertificateError
from specplan.plans.reading import suggest
from specplan.tools.cli.common import (
    fail,
    family_names,
    option_catalog,
    option_packs,
    pack_root,
    read_catalog,
)


@click.group("certify", invoke_without_command=True)
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
@option_packs()
@option_catalog()
@click.pass_context
def certify_command(context: click.Context, /, **options: Any) -> None:
    """Check every cell on this GPU and write certificates."""
    if context.invoked_subcommand is None:
        from specplan.tools.certify import certify_main

        catalog = read_catalog(options.pop("catalog_path"))
        families = family_names(options.pop("families"))
        problems = {p for f in families or catalog.problems for p in catalog.problems.get(f, {})}
        for name in options["problems"]:
            if name not in problems:
                hint = suggest(name, sorted(problems))
                raise click.BadParameter(f"unknown problem {name!r}{hint}", param_hint="--problem")
        sys.exit(
            certify_main(
                catalog, families=families, root=pack_root(options.pop("packs")), **options
            )
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
        fail(str(error))

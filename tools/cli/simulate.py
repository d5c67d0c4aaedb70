"""``specplan simulate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path

import click
from specplan.plans.manifest import ManifestError, packs_under
from specplan.plans.reading import suggest
from specplan.plans.simulations import SimulationFileError
from specplan.tools.cli.common import fail, family_names, pack_root


@click.command("simulate")
@click.argument("path", required=False, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--arch",
    "archs",
    multiple=True,
    help="Only the pack of this arch; 'all' is every pack. Repeatable. Default: all.",
)
@click.option("--family", "families", multiple=True, help="Only this family. Repeatable.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option(
    "--sample",
    default="1/1",
    show_default=True,
    help="N/M: of the plans in order, every M-th from the N-th on.",
)
@click.option(
    "--most-rows",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Cells of more rows run only where a plan has no smaller one.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for the results; default: beside each pack.",
)
def simulate_command(
    path: Path | None,
    archs: Sequence[str],
    families: Sequence[str],
    jobs: int,
    sample: str,
    most_rows: int,
    out: Path | None,
) -> None:
    """Run plans on a CPU, on small cells, against the references.

    PATH is a pack or a directory of packs. Every plan is compiled again for its PTX, which an
    interpreter runs: needs the compiler, torch, numpy and a C compiler, and no GPU. The result is
    evidence of its own kind: a plan that passes is simulated, not certified.
    """
    chosen = _sample(sample)
    wanted_families = family_names(families)
    root = pack_root(path)
    packs = packs_under(root)
    if not packs:
        fail(f"no pack under {root}; build one with `specplan build`")
    if archs and "all" not in archs:
        for arch in archs:
            if arch not in packs:
                raise click.BadParameter(
                    f"no pack of {arch!r} under {root}{suggest(arch, packs)}", param_hint="--arch"
                )
        packs = {arch: packs[arch] for arch in packs if arch in archs}
    missing = [
        f"{what} (pip install 'specplan[{extra}]')"
        for module, what, extra in (
            ("cutlass", "the compiler", "build"),
            ("torch", "torch", "server"),
            ("numpy", "numpy", "build"),
            ("tvm_ffi", "apache-tvm-ffi", "server"),
        )
        if util.find_spec(module) is None
    ]
    if missing:
        fail(f"a simulation needs {' and '.join(missing)}")
    from specplan.tools.simulate import simulate

    try:
        code = simulate(
            packs,
            wanted_families,
            jobs=jobs,
            sample=chosen,
            most_rows=most_rows,
            out=out,
            ptx=root / "ptx" if root not in packs.values() else root.parent / "ptx",
        )
    except (ManifestError, SimulationFileError) as error:
        fail(str(error))
    sys.exit(code)


def _sample(text: str) -> tuple[int, int]:
    first, slash, of = text.partition("/")
    if not (slash and first.isdigit() and of.isdigit() and 1 <= int(first) <= int(of)):
        raise click.BadParameter(f"{text!r} is not N/M with 1 <= N <= M", param_hint="--sample")
    return int(first), int(of)

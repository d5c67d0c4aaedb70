"""A small pack for tests: its catalog, its made-up certificate, and what tests do to a pack on
disk.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specplan.plans import certificates, manifest
from specplan.plans.certificates import (
    EVERY_OUTPUT,
    Certificate,
    CertifiedCell,
    CertifiedPlan,
    Output,
    Tally,
    group_cells,
    join_tallies,
)
from specplan.plans.manifest import Manifest

ARCH = "sm_90a"

#: A catalog of four plans. Requests 1..4 get a certificate made up by the fixture, requests 5 have
#: none: a pack of both kinds.
CATALOG = """\
schema: 1
archs:
  sm_90a:
    {device: NVIDIA H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472, smem_per_cta:
    232448}
families:
  scatter:
    problems:
      mtp3: {history: 4, next: 4, draft: 3}
      mtp7: {history: 8, next: 8, draft: 7}
    cells:
      - {problems: [mtp3], requests: 1..4, tokens: 1..4, splits: 1, dtypes: [int32],
         certified: [sm_90a], why: tests}
      - {problems: [mtp3], requests: 5, tokens: 1..4, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
      - {problems: [mtp7], requests: 1..4, tokens: 1..8, splits: 1, dtypes: [int32],
         certified: [sm_90a], why: tests}
  gather:
    problems:
      mtp3: {next: 4, draft: 3}
    cells:
      - {problems: [mtp3], requests: 1..4, tokens: 2..4, splits: 1, dtypes: [int32],
         certified: [sm_90a], why: tests}
      - {problems: [mtp3], requests: 5, tokens: 2..4, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
"""

#: The most requests that the made-up certificate covers.
CERTIFIED_REQUESTS = 4


@dataclass(frozen=True)
class SmallPack:
    """The small pack as built. Tests that change files work on ``copy(...)``."""

    root: Path
    catalog: Path
    #: The report of the build that made it, as ``--json`` printed it.
    report: Mapping[str, Any]

    @property
    def directory(self) -> Path:
        return self.root / ARCH

    @cached_property
    def manifest(self) -> Manifest:
        return manifest.read(self.directory)

    def copy(self, to: Path) -> Path:
        """Everything that the build wrote, with its times, under another directory."""
        shutil.copytree(self.root, to, symlinks=True)
        return to


def command(*arguments: str | Path) -> list[str]:
    """The command line of this very package, whatever ``specplan`` script may be on the path."""
    return [sys.executable, "-m", "specplan.tools.cli", *map(str, arguments)]


#: What a made-up certificate says was compared.
MADE_UP = Output("all tensors", "elements that differ", 0.0, "made up")

#: Runs the command line: ``cli("verify", "--packs", root)``.
Cli = Callable[..., subprocess.CompletedProcess[str]]


def run(
    arguments: list[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """A command with this environment and ``env``, its output as text."""
    return subprocess.run(
        arguments,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def build(place: Path, catalog: str, *options: str | Path) -> str:
    """Build the packs of a catalog in ``place / "packs"``, beside the catalog; returns what the
    build printed.
    """
    (place / "catalog.yaml").write_text(catalog)
    where = ("--catalog", place / "catalog.yaml", "--out", place / "packs")
    done = run(command("build", *where, *options))
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def whole(root: Path, arch: str = ARCH) -> Manifest:
    """The manifest of a pack whose every object is there with the bytes that it names."""
    pack = manifest.read(root / arch)
    wrong = [manifest.check_object(root / arch, record) for _, _, record in pack.libraries()]
    assert wrong and not any(wrong), wrong
    return pack


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file under a directory, with its time and bytes."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def rewrite(directory: Path, **changes: Any) -> None:
    """Change fields of a pack's manifest as a build would have written them, digest and all."""
    changed = dataclasses.replace(manifest.read(directory), **changes)
    (directory / manifest.NAME).write_text(manifest.dumps(changed))


def tree(to: Path) -> Path:
    """A copy of this package's sources under another directory, which goes on ``PYTHONPATH``."""
    import specplan
    from specplan import kernels, plans, tools

    rooms = {"": specplan, "plans": plans, "kernels": kernels, "tools": tools}
    for name, package in rooms.items():
        source = Path(package.__file__ or "").resolve().parent
        for path in source.rglob("*"):
            inside = path.relative_to(source)
            if path.suffix in (".c", ".py", ".yaml") and path.is_file():
                if not name and inside.parts[0] in rooms:
                    continue
                target = to / "specplan" / name / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    return to


def path_of(directory: Path) -> dict[str, str]:
    """The environment in which a copied tree is the one that is imported."""
    there = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{directory}{os.pathsep}{there}" if there else str(directory)}


def certify(directory: Path) -> None:
    """Give a pack a certificate of its own bits for the cells up to ``CERTIFIED_REQUESTS``
    requests.
    """
    from specplan.tools.marking import restamp

    pack = manifest.read(directory)
    for family in pack.families:
        cells = [
            CertifiedCell(
                *(cell.problem, cell.dtype, cell.splits, cell.tokens, cell.requests),
                *(group.uses, 1),
            )
            for cell, group in pack.cells(family)
            if cell.requests <= CERTIFIED_REQUESTS
        ]
        symbols = {use.symbol for cell in cells for use in cell.uses}
        major, minor = pack.capability
        path = directory / "certificates" / pack.arch / f"{family}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        certificates.write(
            path,
            Certificate(
                family=family,
                arch=pack.arch,
                tools=pack.tools,
                sources=next(pack.plans[symbol].key["sources"] for symbol in symbols),
                problems=pack.problems[family],
                plans={
                    symbol: CertifiedPlan(plan.device_code, plan.host_code, plan.signature)
                    for symbol, plan in pack.plans.items()
                    if symbol in symbols
                },
                groups=group_cells(cells),
                device={
                    "name": "made up for tests",
                    "capability": f"{major}.{minor}",
                    "sm_count": 1,
                    "driver": "none",
                },
                date="2026-01-01",
                suite=("none",),
                recorded=EVERY_OUTPUT,
                tallies=join_tallies(
                    Tally(MADE_UP, 1, {use.symbol: {cell.problem: 0.0}})
                    for cell in cells
                    for use in cell.uses
                ),
            ),
        )
    restamp(directory, [])

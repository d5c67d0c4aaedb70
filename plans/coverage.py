"""Coverage: what the packs and the certificates together say of every cell of the catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from specplan.plans import certificates, manifest, simulations
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell, State
from specplan.plans.certificates import Certificate
from specplan.plans.evidence import (
    UNBACKED,
    Evidence,
    Marks,
    compare,
    judge,
    local_directory,
    mark_complaints,
)
from specplan.plans.manifest import Manifest, ManifestError, Use, packs_under
from specplan.plans.plan import Plan
from specplan.plans.simulations import Simulations


@dataclass(frozen=True)
class Row:
    """One cell's state: what was found, whether the catalog's claim about it holds, and why not."""

    cell: Cell
    state: State
    claimed: State
    plans: tuple[str, ...]
    reason: str
    #: Whether all its plans, as the pack has them, were simulated on a CPU. No state depends on it.
    simulated: bool = False

    @property
    def holds(self) -> bool:
        """A certified claim needs the certificate; a candidate claim needs the built plan."""
        if self.claimed is State.CERTIFIED:
            return self.state is State.CERTIFIED
        return self.state in (State.CANDIDATE, State.CERTIFIED)


@dataclass(frozen=True)
class Coverage:
    """The rows of the archs that were asked for, and what is wrong beside any single cell."""

    rows: Sequence[Row]
    complaints: Sequence[str]

    @property
    def holds(self) -> bool:
        return not self.complaints and all(row.holds for row in self.rows)

    def summary(self) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """family -> arch -> state -> number of cells; states that no cell is in are left out."""
        counts: dict[str, dict[str, Counter[str]]] = {}
        for row in self.rows:
            of_arch = counts.setdefault(row.cell.family, {}).setdefault(row.cell.arch, Counter())
            of_arch[row.state.value] += 1
        return {
            family: {
                arch: {s.value: c[s.value] for s in State if c[s.value]}
                for arch, c in archs.items()
            }
            for family, archs in counts.items()
        }

    def as_json(self) -> Mapping[str, Any]:
        """The public shape of ``specplan coverage --json``."""
        return {
            "cells": [
                {
                    **row.cell.as_dict(),
                    "state": row.state.value,
                    "plan": " ".join(row.plans),
                    "claimed": row.claimed.value,
                    "holds": row.holds,
                    "reason": row.reason,
                    "simulated": row.simulated,
                }
                for row in self.rows
            ],
            "summary": self.summary(),
            "complaints": list(self.complaints),
        }


def local_certificates(pack: Path) -> Path:
    """Where ``specplan certify`` puts the certificates that a user makes: beside the pack."""
    return local_directory(pack)


def compute(
    catalog: Catalog,
    root: Path | Mapping[str, Path],
    archs: Iterable[str],
    certificate_directories: Iterable[Path],
    *,
    family: str | None = None,
    strict: bool = False,
    simulation_directories: Iterable[Path] | None = None,
) -> Coverage:
    """Judge every cell of the catalog on the given archs, in the packs under ``root``, or in the
    pack that ``root`` names for each arch.

    With ``strict``, evidence that no claim uses is a complaint too: a certificate for cells that
    the catalog does not have, for archs that it does not have, and a pack whose table is not the
    planning rule's. Simulations, those that specplan ships unless directories of them are given and
    those beside a pack, mark cells and change no state.
    """
    directories = list(certificate_directories)
    if simulation_directories is None:
        simulation_directories = [simulations.default_directory()]
    places = list(simulation_directories)
    packs = packs_under(root) if isinstance(root, Path) else root
    rows: list[Row] = []
    complaints: list[str] = []
    for arch in archs:
        directory = packs.get(arch)
        evidence = certificates.read_all(
            [*directories, *([local_certificates(directory)] if directory else [])], arch
        )
        of_arch = _Judge(catalog, directory, arch, evidence)
        if of_arch.complaint is not None:
            complaints.append(of_arch.complaint)
        complaints.extend(of_arch.marks(family))
        simulated = _Simulated(of_arch.manifest, places, directory, arch)
        for cell in catalog.cells(arch, family):
            rows.append(simulated.mark(of_arch.row(cell, catalog.claims[cell])))
        if strict:
            complaints.extend(of_arch.orphans(family))
    if strict:
        complaints.extend(_unknown_archs(catalog, directories))
    return Coverage(rows, complaints)


class _Simulated:
    """Says which rows' plans were simulated as the pack has them."""

    def __init__(
        self, pack: Manifest | None, places: Sequence[Path], directory: Path | None, arch: str
    ) -> None:
        self.pack = pack
        found: Sequence[Simulations] = ()
        if pack is not None and directory is not None:
            found = simulations.read_all([*places, simulations.local_directory(directory)], arch)
        self.found = found
        self._known: dict[tuple[str, ...], bool] = {}

    def mark(self, row: Row) -> Row:
        """The row, marked if it is built and simulated."""
        if not self.found or row.state not in (State.CANDIDATE, State.CERTIFIED):
            return row
        assert self.pack is not None
        if row.plans not in self._known:
            uses = [Use(symbol) for symbol in row.plans]
            self._known[row.plans] = any(each.covers(uses, self.pack) for each in self.found)
        return replace(row, simulated=True) if self._known[row.plans] else row


def _unknown_archs(catalog: Catalog, directories: Iterable[Path]) -> list[str]:
    """Directories of certificates that no arch of the catalog reads."""
    return [
        f"{place} holds certificates, and the catalog has no arch {place.name!r}"
        for directory in directories
        for place in sorted({path.parent for path in directory.glob("*/*.yaml")})
        if place.name not in catalog.archs
    ]


class _Judge:
    """Judges the cells of one arch; everything that many cells share is looked at once."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path | None,
        arch: str,
        evidence: Sequence[Certificate],
    ) -> None:
        self.catalog = catalog
        self.directory = directory
        self.evidence = evidence
        self.manifest: Manifest | None = None
        self.complaint: str | None = None
        self.corrupt: dict[str, str] = {}
        self.lacking: dict[str, str] = {}
        if directory is not None:
            try:
                self.manifest = manifest.read(directory)
                self.complaint = manifest.wrong_arch(self.manifest, directory, arch)
            except ManifestError as error:
                self.complaint = str(error)
            if self.complaint is not None:
                self.manifest = None
            elif self.manifest is not None:
                for _, name, record in self.manifest.libraries():
                    wrong = manifest.check_object(directory, record)
                    if wrong is not None:
                        self.corrupt.setdefault(name, wrong)
                for host, name in self.manifest.lacking():
                    self.lacking.setdefault(name, f"the pack has no library for host {host}")

    def row(self, cell: Cell, claimed_certified: bool) -> Row:
        claimed = State.CERTIFIED if claimed_certified else State.CANDIDATE
        if self.manifest is None:
            reason = self.complaint or "no pack for this arch"
            state = State.CORRUPT if self.complaint else State.MISSING
            return Row(cell, state, claimed, (), reason)
        group = self.manifest.find(cell)
        if group is None:
            return Row(cell, State.MISSING, claimed, (), "the pack has no plan for it")
        symbols = tuple(use.symbol for use in group.uses)
        wrong = self.corrupt.get(cell.family)
        if wrong is not None:
            return Row(cell, State.CORRUPT, claimed, symbols, wrong)
        lacking = self.lacking.get(cell.family)
        if lacking is not None:
            return Row(cell, State.MISSING, claimed, symbols, lacking)
        if group.uses != uses_of(self.catalog.plans_of(cell)):
            return Row(
                cell, State.STALE, claimed, symbols, "the planning rule gives another plan now"
            )
        if (
            self.manifest.problems[cell.family][cell.problem]
            != (self.catalog.problems[cell.family][cell.problem])
        ):
            return Row(cell, State.STALE, claimed, symbols, "the problem's geometry changed")
        state, reason = judge(cell, group, self.manifest, self.evidence)
        if claimed_certified:
            if state is State.CANDIDATE and reason in ("", UNBACKED):
                reason = "claimed certified, without a certificate"
        elif state is State.STALE:
            # Nothing is claimed that could be stale.
            state = State.CANDIDATE
        return Row(cell, state, claimed, symbols, reason)

    def marks(self, family: str | None) -> list[str]:
        """How the pack's marks of claimed cells differ from the evidence."""
        if self.manifest is None or self.directory is None:
            return []
        found = compare(self.manifest, self.evidence)

        def claimed(cells: Iterable[Cell]) -> tuple[Cell, ...]:
            return tuple(
                cell
                for cell in cells
                if cell in self.catalog.claims and family in (None, cell.family)
            )

        return mark_complaints(Marks(claimed(found.ahead), claimed(found.behind)), self.directory)

    def orphans(self, family: str | None) -> list[str]:
        """Evidence and plans that no claim of the catalog uses."""
        complaints = []
        for certificate in self.evidence:
            if family in (None, certificate.family):
                unclaimed = sum(
                    Cell(
                        certificate.family,
                        c.problem,
                        c.dtype,
                        certificate.arch,
                        c.splits,
                        c.tokens,
                        c.requests,
                    )
                    not in self.catalog.claims
                    for c in certificate.cells()
                )
                if unclaimed:
                    complaints.append(
                        f"certificate {certificate.arch}/{certificate.family} has {unclaimed} "
                        "cells that the catalog does not claim"
                    )
        if self.manifest is not None:
            extra = sum(cell not in self.catalog.claims for cell, _ in self.manifest.cells(family))
            if extra:
                complaints.append(
                    f"the {self.manifest.arch} pack has {extra} cells that the catalog lacks"
                )
        return complaints


@cache
def uses_of(plans: tuple[Plan, ...]) -> tuple[Use, ...]:
    """The plans of a cell as the manifest spells them."""
    return tuple(Use(plan.symbol, plan.launch) for plan in plans)


def is_certified(
    cell: Cell, uses: tuple[Use, ...], pack: Manifest, evidence: Iterable[Evidence]
) -> bool:
    """Whether any certificate covers a cell as the pack has it."""
    return any(
        certificate.family == cell.family and certificate.mismatch(cell, uses, pack) is None
        for certificate in evidence
    )

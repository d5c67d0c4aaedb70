"""Coverage: what the packs and the certificates together say of every cell of the catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specplan.plans import certificates, manifest
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell, State
from specplan.plans.certificates import Certificate
from specplan.plans.manifest import Manifest, ManifestError, Use, packs_under
from specplan.plans.plan import Plan


@dataclass(frozen=True)
class Row:
    """One cell's state: what was found, whether the catalog's claim about it holds, and why not."""

    cell: Cell
    state: State
    claimed: State
    plans: tuple[str, ...]
    reason: str

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
                {**row.cell.as_dict(), "state": row.state.value, "plan": " ".join(row.plans)}
                for row in self.rows
            ],
            "summary": self.summary(),
        }


def local_certificates(pack: Path) -> Path:
    """Where ``specplan certify`` puts the certificates that a user makes: beside the pack."""
    return pack / "certificates"


def compute(
    catalog: Catalog,
    root: Path,
    archs: Iterable[str],
    certificate_directories: Iterable[Path],
    *,
    family: str | None = None,
    strict: bool = False,
) -> Coverage:
    """Judge every cell of the catalog on the given archs.

    With ``strict``, evidence that no claim uses is a complaint too: a certificate for cells that
    the catalog does not have, for archs that it does not have, and a pack whose table is not the
    planning rule's.
    """
    directories = list(certificate_directories)
    packs = packs_under(root)
    rows: list[Row] = []
    complaints: list[str] = []
    for arch in archs:
        directory = packs.get(arch)
        evidence = certificates.read_all(
            [*directories, *([local_certificates(directory)] if directory else [])], arch
        )
        judge = _Judge(catalog, directory, evidence)
        if judge.complaint is not None:
            complaints.append(judge.complaint)
        for cell in catalog.cells(arch, family):
            rows.append(judge.row(cell, catalog.claims[cell]))
        if strict:
            complaints.extend(judge.orphans(family))
    if strict:
        complaints.extend(_unknown_archs(catalog, directories))
    return Coverage(rows, complaints)


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
        self, catalog: Catalog, directory: Path | None, evidence: Sequence[Certificate]
    ) -> None:
        self.catalog = catalog
        self.evidence = evidence
        self.manifest: Manifest | None = None
        self.complaint: str | None = None
        self.corrupt: dict[str, str] = {}
        if directory is not None:
            try:
                self.manifest = manifest.read(directory)
            except ManifestError as error:
                self.complaint = str(error)
            else:
                for name, record in self.manifest.objects.items():
                    wrong = manifest.check_object(directory, record)
                    if wrong is not None:
                        self.corrupt[name] = wrong

    def row(self, cell: Cell, claimed_certified: bool) -> Row:
        claimed = State.CERTIFIED if claimed_certified else State.CANDIDATE
        if self.manifest is None:
            reason = "the manifest cannot be read" if self.complaint else "no pack for this arch"
            state = State.CORRUPT if self.complaint else State.MISSING
            return Row(cell, state, claimed, (), reason)
        group = self.manifest.find(cell)
        if group is None:
            return Row(cell, State.MISSING, claimed, (), "the pack has no plan for it")
        symbols = tuple(use.symbol for use in group.uses)
        wrong = self.corrupt.get(cell.family)
        if wrong is not None:
            return Row(cell, State.CORRUPT, claimed, symbols, wrong)
        if group.uses != uses_of(self.catalog.plans_of(cell)):
            return Row(
                cell, State.STALE, claimed, symbols, "the planning rule gives another plan now"
            )
        if (
            self.manifest.problems[cell.family][cell.problem]
            != (self.catalog.problems[cell.family][cell.problem])
        ):
            return Row(cell, State.STALE, claimed, symbols, "the problem's geometry changed")
        mismatches = []
        for certificate in self.evidence:
            if certificate.family == cell.family:
                mismatch = certificate.mismatch(cell, group.uses, self.manifest)
                if mismatch is None:
                    return Row(cell, State.CERTIFIED, claimed, symbols, "")
                mismatches.append(mismatch)
        if not claimed_certified:
            return Row(cell, State.CANDIDATE, claimed, symbols, "")
        stale = [mismatch for mismatch in mismatches if mismatch != certificates.NO_EVIDENCE]
        if not stale:
            return Row(
                cell, State.CANDIDATE, claimed, symbols, "claimed certified, without a certificate"
            )
        return Row(cell, State.STALE, claimed, symbols, stale[0])

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
                    for c in certificate.cells
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
    cell: Cell, uses: tuple[Use, ...], pack: Manifest, evidence: Iterable[Certificate]
) -> bool:
    """Whether any certificate covers a cell as the pack has it."""
    return any(
        certificate.family == cell.family and certificate.mismatch(cell, uses, pack) is None
        for certificate in evidence
    )

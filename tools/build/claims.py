"""What a build says of the cells that it built: which of the catalog's claims about them hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplan.plans.catalog import Catalog
from specplan.plans.cell import State
from specplan.plans.coverage import compute
from specplan.tools.build import keys


@dataclass(frozen=True)
class Count:
    """The cells of one arch by state, and by family how many are not what the catalog claims."""

    states: Mapping[State, int]
    unmet: Mapping[str, int]

    def as_json(self) -> Mapping[str, Any]:
        return {state.value: number for state, number in self.states.items()}

    def __str__(self) -> str:
        found = [f"{number} {state.value}" for state, number in self.states.items()]
        return ", ".join(found) or "no cells"


def count(
    catalog: Catalog,
    directory: Path,
    arch: str,
    families: Sequence[str],
    evidence: Sequence[Path],
) -> Count:
    """Count the cells of one arch, of these families or of all, in the pack that was just built."""
    rows = [
        row
        for row in compute(catalog, {arch: directory}, [arch], evidence).rows
        if not families or row.cell.family in families
    ]
    states = Counter(row.state for row in rows)
    unmet = Counter(row.cell.family for row in rows if not row.holds)
    return Count({s: states[s] for s in State if states[s]}, dict(unmet))


def complaint(out: Path, counts: Mapping[str, Count]) -> str | None:
    """What to say where the catalog claims more than was built, or None."""
    unmet = [
        f"{arch} {family}: {number}"
        for arch, found in counts.items()
        for family, number in found.unmet.items()
    ]
    if not unmet:
        return None
    archs = " ".join(f"--arch {arch}" for arch, found in counts.items() if found.unmet)
    text = (
        "claims do not hold: cells that are not, as built here, what the catalog says they are "
        f"({'; '.join(unmet)}). `specplan coverage {archs} --packs {out}` says why"
    )
    if not keys.is_known_python():
        text += (
            f"; this is Python {keys.python()}, which is not known to compile to the certified "
            f"bytes (3.{keys.SAME_BYTES[0]} to 3.{keys.SAME_BYTES[-1]} do)"
        )
    return text

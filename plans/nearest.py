"""The certified cell that is nearest to one that is not there, and in what it differs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import log2
from typing import Any

from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell, octaves


@dataclass(frozen=True)
class Neighbour:
    """A certified cell near one that is wanted.

    ``differs`` has the keys of the geometry whose values are not the same: what was wanted, and
    what the cell has.
    """

    cell: Cell
    differs: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        unlike = ", ".join(
            f"{key} {has}, not {wanted}" for key, (wanted, has) in self.differs.items()
        )
        return f"{self.cell} ({unlike})" if unlike else str(self.cell)

    def as_dict(self) -> Mapping[str, Any]:
        """The cell's fields, and ``differs``: key -> [wanted, what the cell has]."""
        differs = {key: list(values) for key, values in self.differs.items()}
        return {**self.cell.as_dict(), "differs": differs}


#: tokens -> requests -> the splits that are certified.
_Rows = Mapping[int, Mapping[int, Sequence[int]]]
#: Problem, dtype and arch.
_At = tuple[str, str, str]


@dataclass(frozen=True)
class _Choice:
    """The nearest problem, dtype and arch: its cells by tokens, and how its geometry differs."""

    at: _At
    rows: _Rows
    differs: Mapping[str, tuple[int, int]]
    #: Requests, sorted -> the tokens that have just these; most problems have one such set.
    grids: Mapping[tuple[int, ...], tuple[int, ...]]

    def point(self, tokens: int, requests: int) -> tuple[int, int]:
        """The nearest tokens and requests."""
        found = []
        for ordered, columns in self.grids.items():
            away, column = _nearest_column(tokens, columns)
            place = bisect_left(ordered, requests)
            found += [
                (away + octaves(requests, near), column, near)
                for near in ordered[max(0, place - 1) : place + 1]
            ]
        return min(found)[1:]


class Nearest:
    """Finds neighbours among the cells that a catalog claims to be certified.

    Nearest is first by arch, dtype and geometry (fewest keys that differ, then smallest ratios),
    then by tokens and requests, in powers of two, since a server rounds its batch up to what it has
    graphs for. A server's many holes differ in tokens and requests alone, so the first is decided
    once for all of them, and the second by a search in sorted lists.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        #: By family, filled when it is first asked for.
        self.tables: dict[str, Mapping[_At, _Rows]] = {}
        self.chosen: dict[tuple[Any, ...], _Choice | None] = {}

    def find(self, wanted: Cell, geometry: Mapping[str, int]) -> Neighbour | None:
        """The nearest certified cell of the family; None if the family has none."""
        at = (wanted.family, wanted.problem, wanted.dtype, wanted.arch, *geometry.values())
        if at not in self.chosen:
            self.chosen[at] = self._choose(wanted, geometry)
        choice = self.chosen[at]
        if choice is None:
            return None
        tokens, requests = choice.point(wanted.tokens, wanted.requests)
        certified = choice.rows[tokens][requests]
        splits = certified[0]
        if len(certified) > 1:
            splits = min(certified, key=lambda count: (octaves(count, wanted.splits), count))
        cell = Cell(wanted.family, *choice.at, splits, tokens, requests)
        return Neighbour(cell, choice.differs)

    def _choose(self, wanted: Cell, geometry: Mapping[str, int]) -> _Choice | None:
        tables = self._tables(wanted.family)
        if not tables:
            return None
        problems = self.catalog.problems[wanted.family]

        def distance(at: _At) -> tuple[Any, ...]:
            problem, dtype, arch = at
            unlike = _differs(geometry, problems[problem])
            return (
                arch != wanted.arch,
                dtype != wanted.dtype,
                not dtype.startswith(wanted.dtype),
                problem != wanted.problem,
                len(unlike),
                sum(abs(log2(max(a, 0.5)) - log2(max(b, 0.5))) for a, b in unlike.values()),
                at,
            )

        best = min(tables, key=distance)
        grids: dict[tuple[int, ...], list[int]] = {}
        for tokens, row in tables[best].items():
            grids.setdefault(tuple(sorted(row)), []).append(tokens)
        differs = _differs(geometry, problems[best[0]])
        return _Choice(best, tables[best], differs, {r: tuple(t) for r, t in grids.items()})

    def _tables(self, family: str) -> Mapping[_At, _Rows]:
        if family not in self.tables:
            found: dict[_At, dict[int, dict[int, list[int]]]] = {}
            for cell, certified in self.catalog.claims.items():
                if certified and cell.family == family:
                    rows = found.setdefault((cell.problem, cell.dtype, cell.arch), {})
                    row = rows.setdefault(cell.tokens, {})
                    row.setdefault(cell.requests, []).append(cell.splits)
            self.tables[family] = found
        return self.tables[family]


@cache
def _nearest_column(tokens: int, columns: tuple[int, ...]) -> tuple[float, int]:
    return min((octaves(tokens, column), column) for column in columns)


def _differs(wanted: Mapping[str, int], has: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {key: (value, has[key]) for key, value in wanted.items() if has[key] != value}

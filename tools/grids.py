"""Coverage as grids: one a family and dtype, requests x tokens x splits by arch.

A grid has a strip for each problem, and in it a plot for each arch: requests to the right, tokens a
request downwards, first for the splits that the planning rule chooses, then for each number of
splits that a caller may force. Neighbours of one kind are joined into rectangles, and problems
whose strips look alike share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specplan.plans.catalog import Catalog
from specplan.plans.cell import State
from specplan.plans.coverage import Coverage, Row


@dataclass(frozen=True)
class Kind:
    """What a cell looks like: its coverage state, and what the catalog claims of it."""

    name: str
    label: str
    state: State
    #: Whether a claim of this kind holds.
    holds: bool


KINDS = (
    Kind("certified", "certified and built", State.CERTIFIED, True),
    Kind("candidate", "candidate and built", State.CANDIDATE, True),
    Kind("unproven", "claimed certified, no certificate", State.CANDIDATE, False),
    Kind("missing", "claimed certified, not built", State.MISSING, False),
    Kind("unbuilt", "candidate, not built", State.MISSING, False),
    Kind("stale", "stale: other bits than certified", State.STALE, False),
    Kind("corrupt", "corrupt file", State.CORRUPT, False),
)
_BY_NAME = {kind.name: kind for kind in KINDS}

#: The band of the splits that the planning rule chooses.
PLANNED = 0


@dataclass(frozen=True)
class Patch:
    """Neighbouring cells of one kind: every requests of a range (ends included) x these tokens."""

    kind: Kind
    requests: tuple[int, int]
    tokens: tuple[int, ...]
    #: Fewest and most splits of these cells.
    splits: tuple[int, int]
    #: How many cells, over all problems of the strip.
    cells: int


@dataclass(frozen=True)
class Strip:
    """Problems that look alike on every arch: bands of splits, each with its plots by arch."""

    problems: tuple[str, ...]
    #: The tokens of each band, a line each, ``PLANNED`` first.
    bands: Mapping[int, Sequence[int]]
    #: (band, arch) -> patches.
    plots: Mapping[tuple[int, str], Sequence[Patch]]

    def counts(self, arch: str) -> Counter[Kind]:
        """How many cells of each kind this strip has on one arch, over all its problems."""
        found: Counter[Kind] = Counter()
        for (_, where), patches in self.plots.items():
            if where == arch:
                for patch in patches:
                    found[patch.kind] += patch.cells
        return found


@dataclass(frozen=True)
class Grid:
    """One family and dtype."""

    family: str
    dtype: str
    most_requests: int
    strips: Sequence[Strip]

    def counts(self, arch: str) -> Counter[Kind]:
        return sum((strip.counts(arch) for strip in self.strips), Counter[Kind]())


def kind_of(row: Row) -> Kind:
    """The kind of a cell that coverage has judged."""
    if row.claimed is State.CERTIFIED and row.state is State.CANDIDATE:
        return _BY_NAME["unproven"]
    if row.claimed is State.CANDIDATE and row.state is State.MISSING:
        return _BY_NAME["unbuilt"]
    return _BY_NAME[row.state.value]


#: requests -> (kind, splits) of one line of tokens.
_Line = dict[int, tuple[Kind, int]]
#: (band, arch) -> tokens -> line: one problem.
_Lines = dict[tuple[int, str], dict[int, _Line]]


def grids(coverage: Coverage, catalog: Catalog) -> list[Grid]:
    """The grids of a coverage, in the catalog's order."""
    found: dict[tuple[str, str], dict[str, _Lines]] = {}
    several = _several_splits(coverage)
    for row in coverage.rows:
        cell = row.cell
        planned = (cell.family, cell.problem, cell.dtype, cell.arch) not in several
        band = PLANNED if planned or catalog.is_automatic(cell) else cell.splits
        problems = found.setdefault((cell.family, cell.dtype), {})
        lines = problems.setdefault(cell.problem, {}).setdefault((band, cell.arch), {})
        lines.setdefault(cell.tokens, {})[cell.requests] = (kind_of(row), cell.splits)
    return [
        Grid(
            family,
            dtype,
            max(
                requests
                for lines in problems.values()
                for plot in lines.values()
                for line in plot.values()
                for requests in line
            ),
            _strips(problems),
        )
        for (family, dtype), problems in found.items()
    ]


def _several_splits(coverage: Coverage) -> set[tuple[str, str, str, str]]:
    """Where splits differ at all; elsewhere nobody needs to ask the planning rule which is its."""
    seen: dict[tuple[str, str, str, str], int] = {}
    several = set()
    for cell in (row.cell for row in coverage.rows):
        at = (cell.family, cell.problem, cell.dtype, cell.arch)
        if seen.setdefault(at, cell.splits) != cell.splits:
            several.add(at)
    return several


def _strips(problems: Mapping[str, _Lines]) -> list[Strip]:
    alike: dict[tuple[object, ...], list[str]] = {}
    for problem, lines in problems.items():
        look = tuple(
            (at, tuple((r.kind, r.requests, r.tokens) for r in _patches([plot])))
            for at, plot in sorted(lines.items())
        )
        alike.setdefault(look, []).append(problem)
    strips = []
    for names in alike.values():
        first = problems[names[0]]
        bands = {}
        for band in sorted({band for band, _ in first}):
            bands[band] = sorted({t for (b, _), plot in first.items() if b == band for t in plot})
        plots = {at: list(_patches([problems[name][at] for name in names])) for at in first}
        strips.append(Strip(tuple(names), bands, plots))
    return strips


def _patches(plots: Sequence[Mapping[int, _Line]]) -> Iterator[Patch]:
    """The rectangles of plots that look alike: runs along requests, joined over the lines."""
    look = plots[0]
    growing: dict[tuple[Kind, int, int], list[int]] = {}
    done: list[tuple[list[int], tuple[Kind, int, int]]] = []
    for tokens in sorted(look):
        runs = list(_runs(look[tokens]))
        for run in set(growing) - set(runs):
            done.append((growing.pop(run), run))
        for run in runs:
            growing.setdefault(run, []).append(tokens)
    done += [(lines, run) for run, lines in growing.items()]
    for lines, (kind, first, last) in sorted(done, key=lambda d: (d[0], d[1][1])):
        splits = [
            plot[tokens][requests][1]
            for plot in plots
            for tokens in lines
            for requests in range(first, last + 1)
        ]
        extent = (min(splits), max(splits))
        yield Patch(kind, (first, last), tuple(lines), extent, len(splits))


def _runs(line: _Line) -> Iterator[tuple[Kind, int, int]]:
    """Maximal runs of adjacent requests of one kind."""
    ordered = sorted(line)
    start = ordered[0]
    for requests, following in zip(ordered, [*ordered[1:], None], strict=True):
        kind = line[requests][0]
        if following != requests + 1 or line[following][0] is not kind:
            yield kind, start, requests
            start = following or 0

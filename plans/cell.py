"""A cell: one point that the catalog claims to work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple


class State(str, Enum):
    """What is known of a cell on an arch, from the pack and the certificates together."""

    #: A matching certificate exists and the plan is built.
    CERTIFIED = "certified"
    #: Built, and no certificate for this arch is claimed.
    CANDIDATE = "candidate"
    #: The catalog has the cell and the pack has no plan for it.
    MISSING = "missing"
    #: Certified once, but the bits in the pack are not the bits that were certified.
    STALE = "stale"
    #: The file in the pack is not the file that the manifest describes.
    CORRUPT = "corrupt"


class Cell(NamedTuple):
    """One (family, problem, requests x tokens, splits, dtype, arch).

    A named tuple, because a catalog has hundreds of thousands and they are dictionary keys.
    ``rows`` is requests x tokens per request; ``splits`` is how many CTAs share one unit of a row's
    work.
    """

    family: str
    problem: str
    dtype: str
    arch: str
    splits: int
    tokens: int
    requests: int

    @property
    def rows(self) -> int:
        """Requests x tokens per request."""
        return self.requests * self.tokens

    def __str__(self) -> str:
        return (
            f"{self.family} {self.problem} requests={self.requests} tokens={self.tokens} "
            f"splits={self.splits} dtype={self.dtype} on {self.arch}"
        )

    def as_dict(self) -> Mapping[str, str | int]:
        """The cell in the shape and order in which ``--json`` prints it."""
        return {
            "family": self.family,
            "problem": self.problem,
            "requests": self.requests,
            "tokens": self.tokens,
            "rows": self.rows,
            "splits": self.splits,
            "dtype": self.dtype,
            "arch": self.arch,
        }


def octaves(a: int, b: int) -> float:
    """How far apart two counts are, in powers of two; it grows with the larger of them."""
    return abs(max(a, 1).bit_length() - max(b, 1).bit_length()) + abs(a - b) / (a + b + 1)


def nearest(wanted: Cell, cells: Iterable[Cell], count: int = 3) -> list[Cell]:
    """The cells closest to one that is not there, the ones that agree in dtype and problem first.

    Distance is in powers of two of requests and tokens, since a server rounds its batch up to what
    it has graphs for.
    """

    def distance(cell: Cell) -> tuple[int, int, int, float, Cell]:
        return (
            cell.arch != wanted.arch,
            cell.dtype != wanted.dtype,
            cell.problem != wanted.problem,
            octaves(cell.requests, wanted.requests)
            + octaves(cell.tokens, wanted.tokens)
            + octaves(cell.splits, wanted.splits),
            cell,
        )

    return sorted((cell for cell in cells if cell.family == wanted.family), key=distance)[:count]

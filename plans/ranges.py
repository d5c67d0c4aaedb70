"""Compact integer sets, as the catalog, the manifest and the certificates spell them: ``1..64,
72..256/8``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

_ITEM = re.compile(r"(-?\d+)(?:\.\.(-?\d+)(?:/(\d+))?)?")

#: The most that a cell may have of anything: requests, tokens, splits.
MOST = 65536
#: The most tokens per request that a cell may have.
MOST_TOKENS = 1024
#: More cells than this in one file is a slip of the pen, and would take minutes to read.
MOST_CELLS = 2_000_000


def parse(text: str | int) -> tuple[int, ...]:
    """The sorted integers of ``"1..64, 72..256/8"``; ValueError on anything else, on overlap and on
    an empty range.
    """
    if type(text) is int:
        return (text,)
    return _parse(str(text))


# A manifest of ten thousand groups has some hundred different texts.
@lru_cache(maxsize=1 << 12)
def _parse(text: str) -> tuple[int, ...]:
    values: list[int] = []
    for part in text.split(","):
        match = _ITEM.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not an integer, A..B or A..B/STEP")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        step = int(match[3]) if match[3] else 1
        if step < 1 or last < first:
            raise ValueError(f"{part.strip()!r} is an empty range")
        if (last - first) // step + len(values) >= 1_000_000:
            raise ValueError(f"{part.strip()!r} has more than a million values")
        values.extend(range(first, last + 1, step))
    if len(set(values)) != len(values):
        raise ValueError(f"{text!r} names a value twice")
    return tuple(sorted(values))


@lru_cache(maxsize=1 << 12)
def extent(tokens: str | int, requests: str | int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens and requests of a product of cells; ValueError for what no cell can have."""
    found = parse(tokens), parse(requests)
    for values, most, what in zip(found, (MOST_TOKENS, MOST), ("tokens", "requests"), strict=True):
        if values[0] < 1 or values[-1] > most:
            raise ValueError(f"{what} {values[0]}..{values[-1]} are outside 1..{most}")
    return found


def counted(before: int, products: Iterable[Sequence[Any]]) -> int:
    """How many cells a file has with these products, ``(tokens, requests, ...)`` each; ValueError
    where that is more than any file has. It multiplies, and expands nothing.
    """
    total = before
    for product in products:
        total += len(product[0]) * len(product[1])
    if total > MOST_CELLS:
        raise ValueError(f"{total:,} cells, more than the {MOST_CELLS:,} that a file may have")
    return total


def spell(values: Iterable[int]) -> str:
    """The compact spelling of a set of integers; ``parse`` reads it back.

    Three or more evenly spaced values become a range, so the text grows with the irregularity of
    the set and not with its size.
    """
    ordered = sorted(set(values))
    parts: list[str] = []
    at = 0
    while at < len(ordered):
        end = at + 1
        if end < len(ordered):
            step = ordered[end] - ordered[at]
            while end + 1 < len(ordered) and ordered[end + 1] - ordered[end] == step:
                end += 1
            # Two values are a range only when adjacent; a pair at a larger distance belongs to
            # whatever comes next.
            if end - at >= 2 or step == 1:
                parts.append(f"{ordered[at]}..{ordered[end]}" + (f"/{step}" if step != 1 else ""))
                at = end + 1
                continue
        parts.append(str(ordered[at]))
        at += 1
    return ", ".join(parts)

"""Compact integer sets, as the catalog, the manifest and the certificates spell them: ``1..64,
72..256/8``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_ITEM = re.compile(r"(-?\d+)(?:\.\.(-?\d+)(?:/(\d+))?)?")


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
        if (last - first) // step >= 1_000_000:
            raise ValueError(f"{part.strip()!r} has more than a million values")
        values.extend(range(first, last + 1, step))
    if len(set(values)) != len(values):
        raise ValueError(f"{text!r} names a value twice")
    return tuple(sorted(values))


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

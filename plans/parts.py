"""How a batch that no cell holds is cut into batches that cells hold."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import gcd


def parts_of(requests: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """The fewest sizes that add up to a number of requests, the largest ones first; nothing if none
    do.

    >>> parts_of(300, range(1, 257))
    (256, 44)
    """
    return _parts_of(requests, tuple(sorted({size for size in sizes if size > 0}, reverse=True)))


@lru_cache(maxsize=1 << 12)
def _parts_of(requests: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if requests < 1 or not sizes or requests % gcd(*sizes):
        return ()
    largest = sizes[0]
    # Of as many parts below the largest size as that size is, some add up to a multiple of it, and
    # would be fewer parts of the largest size. So what is left for the others is below its square.
    whole = max(0, -(-(requests - largest * largest) // largest))
    rest = requests - whole * largest
    parts = _fewest(rest, sizes) if rest else ()
    return (largest,) * whole + parts if parts or not rest else ()


def _fewest(requests: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The same without a shortcut. Bit n of ``reached[k]`` says that k sizes may add up to n."""
    reached, all_of_them = [1], (1 << requests + 1) - 1
    seen = 1
    while not reached[-1] >> requests & 1:
        following = 0
        for size in sizes:
            following |= reached[-1] << size
        following &= all_of_them & ~seen
        if not following:
            return ()
        seen |= following
        reached.append(following)
    parts, left = [], requests
    for before in reversed(reached[:-1]):
        size = next(size for size in sizes if size <= left and before >> left - size & 1)
        parts.append(size)
        left -= size
    return tuple(parts)

"""How a batch is cut into the sizes that cells have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specplan.plans.parts import parts_of

GRAPHS = (*range(1, 65), *range(72, 257, 8))


@pytest.mark.parametrize(
    ("requests", "parts"),
    [
        (7, (7,)),
        (68, (64, 4)),
        (300, (256, 44)),
        (321, (256, 64, 1)),
        (1000, (256, 256, 256, 232)),
        (1024, (256, 256, 256, 256)),
        (65536, (256,) * 256),
    ],
)
def test_the_fewest_parts_the_largest_first(requests: int, parts: tuple[int, ...]) -> None:
    assert parts_of(requests, GRAPHS) == parts


def test_what_no_sizes_add_up_to_has_no_parts() -> None:
    assert parts_of(7, (8, 16)) == ()
    assert parts_of(300, ()) == ()
    assert parts_of(0, GRAPHS) == ()
    assert parts_of(29, (6, 10, 15)) == ()
    # The largest first would leave 2.
    assert parts_of(8, (4, 6)) == (4, 4)


@given(st.integers(1, 400), st.sets(st.integers(1, 30), min_size=1, max_size=5))
def test_parts_are_the_fewest_of_all(requests: int, sizes: set[int]) -> None:
    found = parts_of(requests, sizes)
    fewest = [0, *(None for _ in range(requests))]
    for total in range(1, requests + 1):
        before = [fewest[total - size] for size in sizes if size <= total]
        fewest[total] = min((b + 1 for b in before if b is not None), default=None)
    assert len(found) == (fewest[requests] or 0)
    if found:
        assert sum(found) == requests
        assert set(found) <= sizes

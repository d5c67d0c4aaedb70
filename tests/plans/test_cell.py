"""Cells: rows, the printed shape, and which cells are nearest to one that is not there."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from specplan.plans.cell import Cell, nearest


def cell(requests: int, tokens: int, splits: int = 1, **changes: str) -> Cell:
    fields = {"family": "scatter", "problem": "mtp3", "dtype": "int32", "arch": "sm_90a"}
    fields.update(changes)
    return Cell(**fields, splits=splits, tokens=tokens, requests=requests)


def test_rows_are_requests_times_tokens() -> None:
    assert cell(3, 7).rows == 21


def test_the_printed_shape_has_its_keys_in_order() -> None:
    assert list(cell(2, 4, 3).as_dict().items()) == [
        ("family", "scatter"),
        ("problem", "mtp3"),
        ("requests", 2),
        ("tokens", 4),
        ("rows", 8),
        ("splits", 3),
        ("dtype", "int32"),
        ("arch", "sm_90a"),
    ]


def test_the_text_names_every_axis() -> None:
    assert str(cell(2, 4, 3)) == ("scatter mtp3 requests=2 tokens=4 splits=3 dtype=int32 on sm_90a")


def test_the_nearest_of_one_axis_come_in_order_of_distance() -> None:
    cells = [cell(requests, 4) for requests in (1, 2, 8, 16, 64, 256)]
    assert [c.requests for c in nearest(cell(9, 4), cells)] == [8, 16, 2]
    assert [c.requests for c in nearest(cell(300, 4), cells)] == [256, 64, 16]
    assert [c.tokens for c in nearest(cell(4, 9), [cell(4, t) for t in range(1, 9)])] == [8, 7, 6]


def test_a_batch_rounds_up_in_octaves_and_not_in_steps() -> None:
    """100 is nearer to 128 than to 64 in steps, but of the octave that 64 begins."""
    assert nearest(cell(100, 1), [cell(128, 1), cell(64, 1), cell(63, 1)], 1) == [cell(64, 1)]


def test_arch_weighs_more_than_dtype_more_than_problem_more_than_size() -> None:
    wanted = cell(8, 4)
    other_size = cell(256, 1, 64)
    other_problem = cell(8, 4, problem="mtp1")
    other_dtype = cell(8, 4, dtype="int64")
    other_arch = cell(8, 4, arch="sm_100a")
    cells = [other_arch, other_dtype, other_problem, other_size]
    assert nearest(wanted, cells, 4) == [other_size, other_problem, other_dtype, other_arch]


def test_another_family_is_never_near() -> None:
    assert nearest(cell(8, 4), [cell(8, 4, family="gather")]) == []


def test_splits_count_as_distance() -> None:
    assert nearest(cell(8, 4, 4), [cell(8, 4, 1), cell(8, 4, 2)], 1) == [cell(8, 4, 2)]


@given(
    st.sets(st.tuples(st.integers(1, 600), st.integers(1, 16)), min_size=1, max_size=30),
    st.integers(0, 600),
    st.integers(0, 20),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_nearest_is_an_order_of_the_cells_and_not_of_the_list(
    sizes: set[tuple[int, int]], requests: int, tokens: int, count: int, shuffle: random.Random
) -> None:
    cells = [cell(*size) for size in sizes]
    wanted = cell(requests, tokens)
    found = nearest(wanted, cells, count)
    assert len(found) == min(count, len(cells))
    assert set(found) <= set(cells)
    shuffle.shuffle(cells)
    assert nearest(wanted, cells, count) == found
    if wanted in cells:
        assert found[0] == wanted

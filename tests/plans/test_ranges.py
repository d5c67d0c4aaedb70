"""Ranges: what is spelled is read back, and nothing else is read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specplan.plans import ranges

INTEGERS = st.sets(st.integers(-70_000, 70_000), min_size=1, max_size=60)


@given(INTEGERS)
def test_parse_reads_back_what_spell_writes(values: set[int]) -> None:
    assert ranges.parse(ranges.spell(values)) == tuple(sorted(values))


@given(st.integers(-100, 100), st.integers(1, 50), st.integers(3, 400))
def test_an_even_run_is_spelled_as_one_range(first: int, step: int, count: int) -> None:
    values = range(first, first + step * count, step)
    text = ranges.spell(reversed(values))
    assert "," not in text
    assert ranges.parse(text) == tuple(values)


@given(st.lists(st.integers(), min_size=1, max_size=6, unique=True))
def test_far_apart_values_survive_too(values: list[int]) -> None:
    assert ranges.parse(ranges.spell(values)) == tuple(sorted(values))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", (7,)),
        (7, (7,)),
        ("1..4", (1, 2, 3, 4)),
        ("1..4/1", (1, 2, 3, 4)),
        ("72..96/8", (72, 80, 88, 96)),
        ("72..95/8", (72, 80, 88)),
        ("9, 1..3", (1, 2, 3, 9)),
        (" 1 ,2 ", (1, 2)),
        ("-3..-1", (-3, -2, -1)),
        ("5..5", (5,)),
        ("0..2000000/1000000", (0, 1_000_000, 2_000_000)),
    ],
)
def test_spellings(text: str | int, values: tuple[int, ...]) -> None:
    assert ranges.parse(text) == values


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, 2], "1..2"),
        ([1, 3], "1, 3"),
        ([1, 3, 5], "1..5/2"),
        ([1, 2, 3, 10, 20, 30, 31], "1..3, 10..30/10, 31"),
        ([4, 1, 4], "1, 4"),
        ([], ""),
    ],
)
def test_the_compact_spelling(values: list[int], text: str) -> None:
    assert ranges.spell(values) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not an integer"),
        ("1,", "'' is not an integer"),
        ("a", "'a' is not an integer, A..B or A..B/STEP"),
        ("1.5", "'1.5' is not an integer"),
        ("1..", "'1..' is not an integer"),
        ("..4", "'..4' is not an integer"),
        ("4/2", "'4/2' is not an integer"),
        ("1..4/-1", "'1..4/-1' is not an integer"),
        ("1...4", "'1...4' is not an integer"),
        ("4..1", "'4..1' is an empty range"),
        ("1..4/0", "'1..4/0' is an empty range"),
        ("1..3, 3", "names a value twice"),
        ("1..1000001", "has more than a million values"),
    ],
)
def test_anything_else_is_an_error_that_quotes_it(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        ranges.parse(text)


def test_a_million_values_are_the_most() -> None:
    assert len(ranges.parse("1..1000000")) == 1_000_000


@given(st.text(max_size=12))
def test_any_text_is_values_or_a_value_error(text: str) -> None:
    try:
        values = ranges.parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert values
        assert list(values) == sorted(set(values))

"""step_setup's reference against the contract written as loops over Python lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from specplan import reference  # noqa: E402

from setup_loops import OPTIONAL, call_of, held, loops, poisoned  # noqa: E402

FAR = [-(1 << 31), (1 << 31) - 1]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Any call of the contract."""
    requests, columns = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    group = draw(st.sampled_from([1, 2, 4]))
    size = group * draw(st.integers(1, 9))
    tokens = draw(st.integers(0, 4))
    counts = None
    if tokens == 0:
        counts = draw(st.lists(st.integers(-1, 5), min_size=requests, max_size=requests))
    live = requests * tokens if counts is None else sum(max(0, n) for n in counts)
    scale = draw(st.sampled_from([None, 1, 2, 3, 48]))
    entry = st.one_of(st.integers(-3, 400), st.sampled_from(FAR))
    table = draw(
        st.lists(
            st.lists(entry, min_size=columns, max_size=columns),
            min_size=requests,
            max_size=requests,
        )
    )
    length = st.one_of(st.integers(-2, size * columns + 9), st.sampled_from(FAR))
    call = call_of(
        draw(st.lists(length, min_size=requests, max_size=requests)),
        table,
        live + draw(st.integers(0, 3)),
        tokens=tokens,
        counts=counts,
        index=draw(st.sampled_from([torch.int32, torch.int64])),
        page_size=size,
        group=group,
        scale=scale,
    )
    for name in OPTIONAL:
        if draw(st.booleans()):
            del call[name]
    if draw(st.booleans()):
        call["table_out"] = poisoned(requests + 1, columns + 2)
    if draw(st.booleans()):
        held_slots = draw(st.integers(1, 4))
        history = st.lists(st.integers(0, 17), min_size=held_slots, max_size=held_slots)
        slots = st.lists(st.integers(-1, held_slots), min_size=requests, max_size=requests)
        call |= {
            "work": poisoned(requests + 1, 4),
            "n_commit": poisoned(1),
            "slots": torch.tensor(draw(slots), dtype=torch.int32),
            "hist_len": torch.tensor(draw(history), dtype=torch.int32),
            "bank": torch.arange(held_slots, dtype=torch.int32) % 2,
            "window": draw(st.sampled_from([None, 8, 16])),
        }
    return call


@settings(max_examples=200, deadline=None)
@given(calls())
def test_the_reference_is_the_contract_and_touches_nothing_else(call: dict[str, Any]) -> None:
    expected = loops(call)
    assert reference.step_setup(**call) is None
    held(call, expected)


def test_a_request_without_rows_is_nobody_s_row() -> None:
    """A public bug of this kind: a padded request of length 0 read the table's last page."""
    call = call_of([8, 0, 5, 9], [[7], [1], [8], [9]], 12, counts=[4, 0, 4, 1])
    reference.step_setup(**call)
    assert call["request_of_row"].tolist() == [0] * 4 + [2] * 4 + [3] + [-1] * 3
    assert call["page_of_row"].tolist() == [7] * 4 + [8] * 4 + [9] + [-1] * 3
    assert call["cache_slot"].tolist()[-4:] == [9 * 32 + 8, -1, -1, -1]
    assert call["first_position"].tolist() == [4, 0, 1, 8]


def test_a_dummy_is_padding_and_nothing_is_left_from_a_larger_step() -> None:
    """A public bug of this kind: values of an earlier step behind the rows of this one."""
    call = call_of([36, 0], [[3, 5], [6, 6]], 8, tokens=4)
    reference.step_setup(**call)
    assert call["request_of_row"].tolist() == [0] * 4 + [-1] * 4
    assert call["position_of_row"].tolist() == [32, 33, 34, 35] + [-1] * 4
    assert call["visible_of_row"].tolist() == [8, 8, 8, 9] + [0] * 4
    assert call["within_of_row"].tolist() == [0, 1, 2, 3] + [0] * 4
    assert call["group_slot"].tolist() == [-1, -1, -1, 5 * 8] + [-1] * 4
    assert call["first_position"].tolist() == [32, -1]


@pytest.mark.parametrize("requests", [15, 16, 17])
def test_work_items_are_written_at_every_number_of_requests(requests: int) -> None:
    """A public bug of this kind: no items below 16 requests, and stale ones were read."""
    call = call_of([40] * requests, [[1, 2]] * requests, requests * 4, tokens=4)
    call |= {
        "work": poisoned(requests, 4),
        "n_commit": poisoned(1),
        "slots": torch.arange(requests, dtype=torch.int32).flip(0).contiguous(),
        "hist_len": torch.arange(requests, dtype=torch.int32) % 17,
        "bank": torch.ones(requests, dtype=torch.int32),
    }
    call["slots"][1] = -1
    expected = loops(call)
    reference.step_setup(**call)
    held(call, expected)
    assert call["work"][-1].tolist() == [1, -1, 0, 0]

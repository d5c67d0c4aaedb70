"""scatter's reference against the contract written as loops over Python lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from specplan import reference  # noqa: E402

INT = st.integers(-(1 << 31), (1 << 31) - 1)


def loops(call: dict[str, Any]) -> dict[str, Any]:
    """All tensors after the call, as lists: the contract's four lines, one element at a time."""
    t = {name: value.tolist() for name, value in call.items() if hasattr(value, "tolist")}
    size = len(t["store_lens"])
    for r in range(call["rows"]):
        i, s = call["row_begin"] + r, t["slots"][r]
        n = t["lens"][i]
        if not 0 <= s < size:
            continue
        for w in range(len(t["store_new_tokens"])):
            row = t["new_tokens"][i]
            t["store_new_tokens"][w][s][0] = row[w] if w < len(row) and w < n else 0
        for w in range(len(t["store_next_new_tokens"])):
            row = t["next_new_tokens"][i]
            t["store_next_new_tokens"][w][s][0] = row[w] if w < len(row) else 0
        for w in range(len(t["store_next_draft"][s])):
            row = t["next_draft_tokens"][i]
            t["store_next_draft"][s][w] = row[w] if w < len(row) else 0
        t["store_lens"][s] = n
    return t


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Any call of the contract: any widths, zero among them, rows from the middle, lengths past
    both ends, slots outside.
    """
    history, following, size = (draw(st.integers(1, 5)) for _ in range(3))
    drafts = draw(st.integers(0, 5))
    a, b, c = (draw(st.integers(0, 7)) for _ in range(3))
    row_begin, rows, extra = (
        draw(st.integers(0, 3)),
        draw(st.integers(0, size)),
        draw(st.integers(0, 2)),
    )
    held = row_begin + rows + extra
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int()

    lens = draw(st.lists(st.one_of(st.integers(-2, 9), INT), min_size=held, max_size=held))
    slots = draw(st.permutations(range(size)))[:rows]
    outside = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    beyond = [size, -1, size + 3, -(1 << 31), (1 << 31) - 1]
    slots = [
        beyond[r % 5] if out else s for r, (s, out) in enumerate(zip(slots, outside, strict=True))
    ]
    uneven = draw(st.integers(0, 2))
    return {
        "new_tokens": words(held, a),
        "next_new_tokens": words(held + uneven, b),
        "lens": torch.tensor(lens, dtype=torch.int32),
        "next_draft_tokens": words(held, c + 2)[:, :c],
        "slots": torch.tensor([*slots, 0, 1], dtype=torch.int32),
        "store_new_tokens": words(history, size, 1),
        "store_next_new_tokens": words(following, size, 1),
        "store_lens": words(size),
        "store_next_draft": words(size, drafts),
        "row_begin": row_begin,
        "rows": rows,
    }


@settings(max_examples=150, deadline=None)
@given(calls())
def test_the_reference_is_the_contract_and_touches_nothing_else(call: dict[str, Any]) -> None:
    expected = loops(call)
    assert reference.scatter(**call) is None
    for name, value in expected.items():
        assert call[name].tolist() == value, name


def call_of(rows: int, width: int, lens: list[int], **changes: Any) -> dict[str, Any]:
    """Rows whose tokens are 10 * row + column + 1, stores full of -1."""
    tokens = torch.tensor([[10 * r + w + 1 for w in range(width)] for r in range(rows)]).int()
    call = {
        "new_tokens": tokens,
        "next_new_tokens": tokens + 100,
        "lens": torch.tensor(lens, dtype=torch.int32),
        "next_draft_tokens": tokens[:, 1:] + 200,
        "slots": torch.arange(rows).int(),
        "store_new_tokens": torch.full((8, rows, 1), -1, dtype=torch.int32),
        "store_next_new_tokens": torch.full((8, rows, 1), -1, dtype=torch.int32),
        "store_lens": torch.full((rows,), -1, dtype=torch.int32),
        "store_next_draft": torch.full((rows, 7), -1, dtype=torch.int32),
        "row_begin": 0,
        "rows": rows,
    }
    return {**call, **changes}


def test_columns_that_a_context_row_never_wrote_do_not_reach_the_store() -> None:
    """A public bug of this kind: a row of length 1 in an output of width 8 whose columns 1.. were
    never written.
    """
    call = call_of(1, 8, [1])
    call["new_tokens"][0, 1:] = 0x7BADBAD
    reference.scatter(**call)
    assert call["store_new_tokens"][:, 0, 0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert call["store_lens"].tolist() == [1]
    # The next inputs and the drafts are not cut at the length.
    assert call["store_next_new_tokens"][:, 0, 0].tolist() == list(range(101, 109))
    assert call["store_next_draft"][0].tolist() == list(range(202, 209))


@pytest.mark.parametrize("n", [0, -3, -(1 << 31)])
def test_no_accepted_tokens_clear_the_row_and_store_the_raw_length(n: int) -> None:
    call = call_of(2, 4, [n, 2])
    reference.scatter(**call)
    assert call["store_new_tokens"][:, 0, 0].tolist() == [0] * 8
    assert call["store_new_tokens"][:, 1, 0].tolist() == [11, 12, 0, 0, 0, 0, 0, 0]
    assert call["store_lens"].tolist() == [n, 2]


def test_a_length_past_the_widths_is_stored_as_it_is_and_adds_nothing() -> None:
    call = call_of(1, 4, [99])
    reference.scatter(**call)
    assert call["store_new_tokens"][:, 0, 0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert call["store_lens"].tolist() == [99]


def test_a_shorter_prefix_leaves_no_tail_of_the_last_step() -> None:
    call = call_of(1, 8, [8])
    reference.scatter(**call)
    call["lens"][0] = 2
    reference.scatter(**call)
    assert call["store_new_tokens"][:, 0, 0].tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


def test_no_rows_write_nothing() -> None:
    call = {**call_of(2, 4, [4, 4]), "rows": 0}
    before = {n: v.clone() for n, v in call.items() if isinstance(v, torch.Tensor)}
    reference.scatter(**call)
    assert all(torch.equal(call[name], value) for name, value in before.items())

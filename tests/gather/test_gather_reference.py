"""gather's reference against the contract written as loops over Python lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from specplan import reference  # noqa: E402

DESTINATIONS = ("input_ids", "draft_tokens", "pos_offsets", "kv_offsets")


def loops(call: dict[str, Any]) -> dict[str, Any]:
    """All tensors after the call, as lists: the contract's four lines, one element at a time."""
    t = {name: value.tolist() for name, value in call.items() if hasattr(value, "tolist")}
    size, tokens, drafts = len(t["store_lens"]), call["tokens"], call["drafts"]
    for r in range(call["requests"]):
        s = t["slots"][r]
        inside = 0 <= s < size
        for j in range(tokens):
            at = r * tokens + j
            p = t["pos_indices"][at]
            t["input_ids"][call["input_ids_begin"] + at] = (
                t["store_next_new_tokens"][j][s][0] if inside else 0
            )
            t["pos_offsets"][call["pos_offsets_begin"] + at] = (
                t["store_lens"][p] if 0 <= p < size else 0
            )
            if j < drafts:
                t["draft_tokens"][call["draft_tokens_begin"] + r * drafts + j] = (
                    t["store_next_draft"][s][j] if inside else 0
                )
        # int32 arithmetic, as on the device.
        kv = t["store_lens"][s] - tokens if inside else 0
        t["kv_offsets"][call["kv_offsets_begin"] + r] = (kv + (1 << 31)) % (1 << 32) - (1 << 31)
    return t


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Any call of the contract: repeated slots, indices outside the stores, fewer drafts and tokens
    than the stores are wide.
    """
    width, size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    draft_width = draw(st.integers(0, 6))
    requests, tokens = draw(st.integers(0, 4)), draw(st.integers(1, width))
    drafts = draw(st.integers(0, min(tokens - 1, draft_width)))
    begins = [draw(st.integers(0, 4)) for _ in DESTINATIONS]
    flat = requests * tokens
    counts = (flat, requests * drafts, flat, requests)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int()

    def indices(count: int) -> torch.Tensor:
        index = st.one_of(st.integers(-2, size + 1), st.sampled_from([-(1 << 31), (1 << 31) - 1]))
        more = draw(st.integers(0, 2))
        values = draw(st.lists(index, min_size=count + more, max_size=count + more))
        return torch.tensor(values, dtype=torch.int32)

    call: dict[str, Any] = {
        "store_next_new_tokens": words(width, size, 1),
        "store_next_draft": words(size, draft_width),
        "store_lens": words(size),
        "slots": indices(requests),
        "pos_indices": indices(flat),
    }
    for name, begin, count in zip(DESTINATIONS, begins, counts, strict=True):
        call[name] = words(begin + count + draw(st.integers(0, 2)))
        call[f"{name}_begin"] = begin
    return {**call, "requests": requests, "tokens": tokens, "drafts": drafts}


@settings(max_examples=150, deadline=None)
@given(calls())
def test_the_reference_is_the_contract_and_touches_nothing_else(call: dict[str, Any]) -> None:
    expected = loops(call)
    assert reference.gather(**call) is None
    for name, value in expected.items():
        assert call[name].tolist() == value, name


def call_of(lens: list[int], requests: int, tokens: int, **changes: Any) -> dict[str, Any]:
    """One slot per length; destinations full of -7 with room for one request in front."""
    size = len(lens)
    flat = requests * tokens

    def full(count: int) -> torch.Tensor:
        return torch.full((count,), -7, dtype=torch.int32)

    call = {
        "store_next_new_tokens": torch.arange(8 * size).int().reshape(8, size, 1),
        "store_next_draft": torch.arange(7 * size).int().reshape(size, 7) + 100,
        "store_lens": torch.tensor(lens, dtype=torch.int32),
        "slots": torch.arange(requests).int(),
        "pos_indices": torch.arange(requests).int().repeat_interleave(tokens),
        "input_ids": full(tokens + flat),
        "draft_tokens": full((requests + 1) * (tokens - 1)),
        "pos_offsets": full(tokens + flat),
        "kv_offsets": full(1 + requests),
        "input_ids_begin": 0,
        "draft_tokens_begin": 0,
        "pos_offsets_begin": 0,
        "kv_offsets_begin": 0,
        "requests": requests,
        "tokens": tokens,
        "drafts": tokens - 1,
    }
    return {**call, **changes}


def test_offsets_follow_the_row_order_and_a_dummy_row_stays_last() -> None:
    """A public bug of this kind: two real rows with lengths 3 and 1 and a dummy behind them, four
    tokens per request.
    """
    call = call_of([3, 1], 2, 4)
    call["kv_offsets"].zero_()
    reference.gather(**call)
    assert call["kv_offsets"].tolist() == [-1, -3, 0]
    assert call["pos_offsets"].tolist() == [3] * 4 + [1] * 4 + [-7] * 4


def test_no_requests_leave_the_offset_buffers_to_the_caller() -> None:
    """A public bug of this kind: with no previous batch the offsets were garbage. The
    caller zeros them: none is written here.
    """
    call = call_of([3, 1], 0, 4)
    for name in DESTINATIONS:
        call[name].fill_(0x7BADBAD)
    reference.gather(**call)
    assert all((call[name] == 0x7BADBAD).all() for name in DESTINATIONS)


def test_positions_go_through_their_own_list_and_not_through_the_slots() -> None:
    call = call_of([30, 10, 20], 2, 2)
    call["pos_indices"] = torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    call["slots"] = torch.tensor([1, 1], dtype=torch.int32)
    reference.gather(**call)
    assert call["pos_offsets"].tolist()[:4] == [20, 30, 10, 10]
    assert call["kv_offsets"].tolist()[:2] == [8, 8]
    assert call["input_ids"].tolist()[:4] == [1, 4, 1, 4]


def test_an_index_outside_the_stores_gives_zero_and_not_a_negative_length() -> None:
    call = call_of([30, 10], 2, 3)
    call["slots"] = torch.tensor([2, -1], dtype=torch.int32)
    call["pos_indices"][:2] = torch.tensor([-1, 2], dtype=torch.int32)
    reference.gather(**call)
    assert call["kv_offsets"].tolist() == [0, 0, -7]
    assert call["input_ids"].tolist() == [0] * 6 + [-7] * 3
    assert call["draft_tokens"].tolist() == [0] * 4 + [-7] * 2
    assert call["pos_offsets"].tolist() == [0, 0, 30, 10, 10, 10, -7, -7, -7]


def test_no_drafts_leave_the_draft_buffer_alone() -> None:
    call = call_of([3, 1], 2, 4, drafts=0)
    reference.gather(**call)
    assert (call["draft_tokens"] == -7).all()
    assert call["input_ids"].tolist()[:4] == [0, 2, 4, 6]

"""scatter's input cases: each moves a value, keeps its guards, and resolves to its own cell;
a call that breaks a rule is declined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specplan.kernels.case import GUARD  # noqa: E402
from specplan.kernels.scatter import cases  # noqa: E402
from specplan.plans import catalog  # noqa: E402
from specplan.plans.families import FAMILIES  # noqa: E402

CPU = torch.device("cpu")
PROBLEMS = {
    name: catalog.load().problems["scatter"][name] for name in ("mtp1", "mtp3", "mtp7", "tree15")
}


def every(geometry: Mapping[str, int], requests: int, tokens: int) -> list[cases.ScatterCase]:
    return list(cases.checks(geometry, requests, tokens, 1, "int32", CPU))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("requests", [1, 5])
def test_every_case_comes_to_its_own_cell(problem: str, requests: int) -> None:
    geometry = PROBLEMS[problem]
    for tokens in range(1, geometry["history"] + 1):
        assert FAMILIES["scatter"].check_tokens(geometry, tokens) is None
        found = every(geometry, requests, tokens)
        assert len(found) >= 2
        for case in found:
            pick = {**geometry, "requests": requests, "tokens": tokens}
            assert dict(case.pick()) == pick, case.name


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_call_changes_the_stores_and_nothing_else(problem: str) -> None:
    geometry = PROBLEMS[problem]
    names = set()
    for tokens in range(1, geometry["history"] + 1):
        for case in every(geometry, 3, tokens):
            names.add(case.name)
            case.refill(tokens)
            before = case.snapshot()
            expected = case.expect()
            # Computing what must come out leaves the buffers as they are.
            assert case.identical(before) == 0
            changed = {
                name
                for name, tensor in case.arena.tensors(expected).items()
                if not torch.equal(tensor, case.tensors[name])
            }
            stores = {"store_new_tokens", "store_next_new_tokens", "store_lens", "store_next_draft"}
            assert changed == stores, case.name
            inside = torch.zeros(case.buffer.numel(), dtype=torch.bool)
            for view in case.arena.views.values():
                torch.as_strided(inside, view.shape, view.stride, view.offset).fill_(True)
            assert (~inside).sum() >= (len(case.arena.views) + 1) * GUARD
            assert torch.equal(case.buffer[~inside], expected[~inside])
            (comparison,) = case.compare(expected)
            assert comparison.error > comparison.bound
            case.restore(expected)
            (comparison,) = case.compare(expected)
            assert comparison.error <= comparison.bound
    assert {"dense", "no columns", "accepted tokens wider than the store"} <= names


def test_a_single_wrong_word_anywhere_is_seen() -> None:
    (case, *_) = every(PROBLEMS["mtp3"], 2, 3)
    case.refill(4)
    expected = case.expect()
    for at in range(0, case.buffer.numel(), 7):
        case.restore(expected)
        case.buffer[at] ^= 1 << 30
        (comparison,) = case.compare(expected)
        assert comparison.error == 1


def test_refilling_depends_on_the_seed_alone() -> None:
    first, second = (every(PROBLEMS["mtp7"], 4, 8)[1] for _ in range(2))
    first.refill(1)
    second.refill(2)
    assert first.identical(second.buffer) > 0
    second.refill(1)
    assert first.identical(second.buffer) == 0
    slots = first.tensors["slots"][:4].tolist()
    assert len(set(slots)) == 4
    assert all(0 <= s < first.slots for s in slots)


def test_lengths_go_past_both_ends() -> None:
    case = every(PROBLEMS["mtp3"], 200, 4)[0]
    case.refill(3)
    lens = case.tensors["lens"]
    assert lens.min() < 0
    assert lens.max() > 4
    assert (lens == 0).any()


NINE = (
    *("new_tokens", "next_new_tokens", "lens", "next_draft_tokens", "slots", "store_new_tokens"),
    *("store_next_new_tokens", "store_lens", "store_next_draft"),
)


def test_declined_calls_cover_every_rule_of_the_contract() -> None:
    calls = list(cases.declined(CPU))
    said = {what for what, _, _ in calls}
    assert len(said) == len(calls)
    rules = [f"{name} is {kind}" for name in NINE for kind in ("int64", "float32")]
    rules += [f"{name} has one dimension more" for name in NINE]
    rules += [
        f"{name} is {how}"
        for name in ("new_tokens", "next_new_tokens", "next_draft_tokens", "store_next_draft")
        for how in ("transposed", "flat")
    ]
    rules += [
        "row_begin is negative",
        "rows is negative",
        "the rows reach past the outputs",
        "one output has too few rows",
        "the slot table is short",
        "the slot table has two dimensions",
        "a store has other slots",
        "a store's last dimension is not 1",
        "the store's width is in no problem",
    ]
    assert set(rules) <= said


def wrong(call: Mapping[str, Any]) -> bool:
    """Whether a call breaks a rule of the contract, from the contract alone."""
    outputs = [call[n] for n in ("new_tokens", "next_new_tokens", "lens", "next_draft_tokens")]
    stores = [call[n] for n in NINE[5:]]
    tensors = [*outputs, call["slots"], *stores]
    if not all(isinstance(t, torch.Tensor) and t.dtype == torch.int32 for t in tensors):
        return True
    if [t.dim() for t in tensors] != [2, 2, 1, 2, 1, 3, 3, 1, 2]:
        return True
    if any(t.stride(-1) != 1 and t.size(-1) > 1 for t in tensors):
        return True
    rows, begin = call["rows"], call["row_begin"]
    if not isinstance(rows, int) or not 1 <= rows <= 256 or begin < 0:
        return True
    if min(t.size(0) for t in outputs) < begin + rows or call["slots"].numel() < rows:
        return True
    size = stores[2].numel()
    trailing = [tuple(t.shape[1:]) for t in stores[:2]] != [(size, 1)] * 2
    return trailing or stores[3].size(0) != size or stores[0].size(0) != 8


def test_every_declined_call_breaks_a_rule_and_the_untouched_call_breaks_none() -> None:
    for what, arguments, storage in cases.declined(CPU):
        assert wrong(arguments), what
        assert storage.numel() > GUARD
    geometry = {"history": 8, "next": 8, "draft": 7}
    good = cases.ScatterCase("good", geometry, CPU, rows=4, widths=(4, 4, 3), extra_rows=1)
    assert not wrong(good.arguments())

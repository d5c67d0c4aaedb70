"""gather's input cases: each moves a value, keeps its guards, and resolves to its own cell; every
rule is declined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specplan.kernels.case import GUARD  # noqa: E402
from specplan.kernels.gather import cases  # noqa: E402
from specplan.plans import catalog  # noqa: E402
from specplan.plans.families import FAMILIES  # noqa: E402

CPU = torch.device("cpu")
PROBLEMS = {
    name: catalog.load().problems["gather"][name] for name in ("mtp1", "mtp3", "mtp7", "tree15")
}


def every(geometry: Mapping[str, int], requests: int, tokens: int) -> list[cases.GatherCase]:
    return list(cases.checks(geometry, requests, tokens, 1, "int32", CPU))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("requests", [1, 5])
def test_every_case_comes_to_its_own_cell(problem: str, requests: int) -> None:
    geometry = PROBLEMS[problem]
    for tokens in range(1, min(8, geometry["next"]) + 1):
        assert FAMILIES["gather"].check_tokens(geometry, tokens) is None
        found = every(geometry, requests, tokens)
        assert len(found) == 3
        for case in found:
            pick = {**geometry, "requests": requests, "tokens": tokens}
            assert dict(case.pick()) == pick, case.name


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_call_changes_its_ranges_of_the_destinations_and_nothing_else(problem: str) -> None:
    geometry = PROBLEMS[problem]
    for tokens in range(1, min(8, geometry["next"]) + 1):
        for case in every(geometry, 3, tokens):
            case.refill(tokens)
            before = case.snapshot()
            expected = case.expect()
            assert case.identical(before) == 0
            drafts = case.integers["drafts"]
            counts = (3 * tokens, 3 * drafts, 3 * tokens, 3)
            may_change = torch.zeros(case.buffer.numel(), dtype=torch.bool)
            for name, count in zip(cases.DESTINATIONS, counts, strict=True):
                view, begin = case.arena.views[name], case.integers[f"{name}_begin"]
                may_change[view.offset + begin : view.offset + begin + count] = True
                after = case.arena.tensors(expected)[name]
                changed = (after != case.tensors[name])[begin : begin + count]
                # Random words that are equal by chance are one in four billion.
                assert changed.all(), (case.name, name)
            assert torch.equal(case.buffer[~may_change], expected[~may_change])
            inside = sum(tensor.numel() for tensor in case.tensors.values())
            assert case.buffer.numel() >= inside + (len(case.tensors) + 1) * GUARD
            (comparison,) = case.compare(expected)
            assert comparison.error > comparison.bound
            case.restore(expected)
            (comparison,) = case.compare(expected)
            assert comparison.error <= comparison.bound


def test_cases_hold_what_is_hard() -> None:
    """Repeated slots, indices outside the stores, begins that differ, fewer drafts than tokens, no
    drafts.
    """
    first, second, third = every(PROBLEMS["mtp7"], 8, 8)
    for case in (first, second, third):
        case.refill(5)
    assert first.integers["drafts"] == 7
    assert first.integers["input_ids_begin"] > 0
    assert len({second.integers[f"{n}_begin"] for n in cases.DESTINATIONS}) == 4
    assert 0 < second.integers["drafts"] < 7
    slots = second.tensors["slots"][:8].tolist()
    assert len(set(slots)) < len(slots)
    assert third.integers["drafts"] == 0
    for name in ("slots", "pos_indices"):
        index = third.tensors[name]
        assert ((index < 0) | (index >= third.size)).any()
    # Positions do not follow the slots.
    repeated = second.tensors["slots"][:8].repeat_interleave(8)
    assert not torch.equal(second.tensors["pos_indices"][:64], repeated)


NINE = (
    *("store_next_new_tokens", "store_next_draft", "store_lens", "slots", "pos_indices"),
    *cases.DESTINATIONS,
)


def test_declined_calls_cover_every_rule_of_the_contract() -> None:
    calls = list(cases.declined(CPU))
    said = {what for what, _, _ in calls}
    assert len(said) == len(calls)
    rules = [f"{name} is {kind}" for name in NINE for kind in ("int64", "float32")]
    rules += [f"{name} has one dimension more" for name in NINE]
    rules += [f"{name} is short" for name in NINE[3:]]
    rules += [f"{name} begins {where}" for name in NINE[5:] for where in ("below 0", "too far on")]
    rules += [
        "a store has other slots",
        "a store's last dimension is not 1",
        "the draft store is transposed",
        "no tokens",
        "more tokens than the store is wide",
        "drafts is negative",
        "as many drafts as tokens",
        "requests is negative",
    ]
    assert set(rules) <= said


def wrong(call: Mapping[str, Any]) -> bool:
    """Whether a call breaks a rule of the contract, from the contract alone."""
    tensors = [call[name] for name in NINE]
    if not all(isinstance(t, torch.Tensor) and t.dtype == torch.int32 for t in tensors):
        return True
    if [t.dim() for t in tensors] != [3, 2, 1, 1, 1, 1, 1, 1, 1]:
        return True
    following, draft_store, lens, slots, positions = tensors[:5]
    size = lens.numel()
    if tuple(following.shape[1:]) != (size, 1) or draft_store.size(0) != size:
        return True
    if any(t.stride(-1) != 1 and t.size(-1) > 1 for t in tensors):
        return True
    requests, tokens, drafts = call["requests"], call["tokens"], call["drafts"]
    if not isinstance(tokens, int) or not 1 <= tokens <= following.size(0):
        return True
    if not 0 <= drafts < tokens or drafts > draft_store.size(1) or not 0 <= requests <= 256:
        return True
    flat = requests * tokens
    if slots.numel() < requests or positions.numel() < flat:
        return True
    counts = (flat, requests * drafts, flat, requests)
    begins = [call[f"{name}_begin"] for name in cases.DESTINATIONS]
    return any(
        begin < 0 or begin + count > t.numel()
        for t, begin, count in zip(tensors[5:], begins, counts, strict=True)
    )


def test_every_declined_call_breaks_a_rule_and_the_untouched_call_breaks_none() -> None:
    for what, arguments, storage in cases.declined(CPU):
        assert wrong(arguments), what
        assert storage.numel() > GUARD
    good = cases.GatherCase(
        "good", {"next": 8, "draft": 7}, CPU, requests=4, tokens=4, drafts=3, tail=0, slots=8
    )
    assert not wrong(good.arguments())

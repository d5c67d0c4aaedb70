"""draft_step on an imagined GPU: compiled host function and PTX against the reference."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import specplan  # noqa: E402
from specplan import reference  # noqa: E402
from specplan.kernels.draft_step import cases  # noqa: E402
from specplan.kernels.draft_step.cases import DraftStepCase  # noqa: E402
from specplan.plans.draft_step import FAMILY  # noqa: E402

CPU = torch.device("cpu")


def case_of(requests: int, dtype: str, **more: Any) -> DraftStepCase:
    of_class, splits, width = (0, 1, 0) if dtype.startswith("int") else (32, 3, 300)
    return DraftStepCase(
        *("test", of_class, CPU), requests=requests, dtype=dtype,
        **{"splits": splits, "width": width, "special": True, **more},
    )  # fmt: skip


def run(setup: Any, case: DraftStepCase, seed: int = 1) -> None:
    """A case once, compared whole, its scratch left zero, and once more, equal bit for bit."""
    case.refill(seed)
    before, expected = case.snapshot(), case.expect()
    for _ in range(2):
        case.restore(before)
        with setup.on_device() as pack:
            pack.draft_step.require(**case.arguments())
        assert len(setup.launches) == 1
        if "scratch" in case.tensors:
            assert not case.tensors["scratch"][: 2 * case.requests].any()
        for comparison in case.compare(expected):
            assert comparison.error <= comparison.bound, (case.name, seed)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("requests", [1, 2, 5, 8])
def test_requests_steps_and_what_is_left_out(setup: Any, dtype: str, requests: int) -> None:
    for seed, more in enumerate(
        (
            {"step": 0, "wide": True, "mapped": "int64"},
            {"step": 1, "mapped": "int32"},
            {"step": 2, "wide": True},
            {"step": 0, "drafted": 1, "outputs": False, "shift": 1, "gap": 3},
            {"step": 0, "page_size": 48, "group": 1, "scale": 1},
        )
    ):
        run(setup, case_of(requests, dtype, **more), seed)


@pytest.mark.parametrize("dtype", ["int64", "bf16"])
def test_every_case_of_a_cell(setup: Any, dtype: str) -> None:
    of_class = 0 if dtype == "int64" else 32
    for case in cases.checks({"vocabulary_k": of_class}, 3, 1, 3 if of_class else 1, dtype, CPU):
        run(setup, case, 5)


def test_more_requests_than_a_cta_has_warps(setup: Any) -> None:
    run(setup, case_of(39, "int32", wide=True, mapped="int32"), 3)
    run(setup, case_of(33, "int64"), 4)


def test_the_rule_s_splits_and_others_give_the_same(setup: Any) -> None:
    case = case_of(4, "bf16", width=1000, mapped="int32")
    case.refill(8)
    before, found = case.snapshot(), []
    for splits in (None, 3):
        case.restore(before)
        with setup.on_device() as pack:
            pack.draft_step.require(**{**case.arguments(), "splits": splits})
        found.append(case.snapshot())
    assert torch.equal(*found) and not torch.equal(found[0], before)


def test_a_batch_between_two_cells_runs_the_next_one(setup: Any) -> None:
    with setup.on_device() as pack:
        assert not pack.draft_step.pick(problem="ids", requests=12, tokens=1, dtype="int32")
    run(setup, case_of(12, "int32", wide=True), 2)
    # The launch follows the requests that there are: a warp each.
    assert setup.launches[0].grid[0] == 3
    case = case_of(41, "int32")
    case.refill(1)
    with setup.on_device() as pack:
        assert not pack.draft_step(**case.arguments())


def test_a_loop_of_drafts_carries_lengths_positions_and_slots(setup: Any) -> None:
    """Twenty steps of three drafts each, beside the reference on tensors of its own."""
    generator = torch.Generator().manual_seed(3)
    requests, drafted, width, columns = 5, 3, 130, 6

    def state() -> dict[str, torch.Tensor]:
        zeros = torch.zeros(requests, dtype=torch.int32)
        return {
            "input_ids": torch.zeros(requests, dtype=torch.int64),
            "drafts": torch.zeros(requests, drafted, dtype=torch.int32),
            "next_new_tokens": torch.zeros(requests, drafted + 1, dtype=torch.int32),
            "kv_lens": torch.tensor([1, 30, 0, 61, 95], dtype=torch.int32),
            "positions": torch.zeros(3, requests, dtype=torch.int64),
            **{name: zeros.clone() for name in ("page_of_row", "within_of_row", "visible_of_row")},
            "cache_slot": torch.zeros(requests, dtype=torch.int64),
            "group_slot": torch.zeros(requests, dtype=torch.int64),
        }

    ours, theirs = state(), state()
    scratch = torch.zeros(2 * requests, dtype=torch.int64)
    slot = torch.tensor([3, 0, -1, 1, 2], dtype=torch.int32)
    table = torch.randint(0, 400, (requests, columns), generator=generator).int()
    d2t = torch.randint(0, 999, (width,), generator=generator).int()
    ended = 0
    for step in range(20):
        last = torch.randint(0, 999, (requests,), generator=generator).int()
        for j in range(drafted):
            logits = torch.randn(requests, width, generator=generator).bfloat16()
            more = {
                "step": j, "d2t": d2t, "slot": slot, "next_token": last, "block_table": table,
                "page_size": 32, "group": 4, "scale": 2,
            }  # fmt: skip
            with setup.on_device() as pack:
                pack.draft_step.require(logits, scratch=scratch, **ours, **more)
            reference.draft_step(logits, **theirs, **more)
            for name in ours:
                assert torch.equal(ours[name], theirs[name]), (step, j, name)
            ended += int((ours["group_slot"] >= 0).sum())
            assert not scratch.any()
    # Two moves a step of the requests that are no padding.
    assert ours["kv_lens"].tolist() == [41, 70, 0, 101, 135]
    assert ours["positions"].tolist() == [[40, 40, 0, 40, 40]] * 3
    assert ended > 20


def test_declined_calls_write_nothing(setup: Any) -> None:
    count = 0
    for what, arguments, storage in cases.declined(CPU):
        before = storage.clone()
        with setup.on_device() as pack:
            answer = pack.draft_step(**arguments)
        assert isinstance(answer, specplan.Uncertified), what
        assert not setup.launches and torch.equal(storage, before), what
        count += 1
    assert count > 60


def test_no_requests_launch_nothing(setup: Any) -> None:
    with setup.on_device() as pack:
        assert pack.draft_step(
            torch.zeros(0, 300), torch.zeros(0, dtype=torch.int32),
            torch.zeros(0, 3, dtype=torch.int32), step=0,
        )  # fmt: skip
    assert setup.launches == []

"""accept on an imagined GPU: compiled host function and PTX against the reference."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import specplan  # noqa: E402
from specplan import reference  # noqa: E402
from specplan.accept import force_pool  # noqa: E402
from specplan.kernels.accept import cases  # noqa: E402
from specplan.kernels.accept.cases import AcceptCase  # noqa: E402
from specplan.plans.accept import FAMILY  # noqa: E402

CPU = torch.device("cpu")


def case_of(requests: int, tokens: int, dtype: str, **more: Any) -> AcceptCase:
    of_class = 0 if dtype.startswith("int") else 32
    splits = 1 if of_class == 0 else 3
    return AcceptCase(
        *("test", of_class, CPU), requests=requests, tokens=tokens, dtype=dtype,
        **{"splits": splits, "width": 300, "special": True, **more},
    )  # fmt: skip


def run(setup: Any, case: AcceptCase, seed: int = 1) -> None:
    """A case once, compared whole, its scratch left zero, and once more, equal bit for bit."""
    case.refill(seed)
    before, expected = case.snapshot(), case.expect()
    for _ in range(2):
        case.restore(before)
        with setup.on_device() as pack:
            pack.accept.require(**case.arguments())
        assert len(setup.launches) == 1
        generations = case.requests - case.contexts
        used = case.contexts + generations * case.tokens + case.requests + 1
        assert not case.tensors["scratch"][:used].any()
        for comparison in case.compare(expected):
            assert comparison.error <= comparison.bound, (case.name, seed)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize(
    ("requests", "tokens", "contexts"),
    [
        *((1, 1, 0), (1, 1, 1), (2, 8, 0), (5, 4, 2), (8, 1, 3)),
        *((7, 3, 7), (8, 5, 7), (6, 2, 1)),
    ],
)
def test_requests_tokens_and_contexts(
    setup: Any, dtype: str, requests: int, tokens: int, contexts: int
) -> None:
    for seed, more in enumerate(
        (
            {"wide": True, "extra": 1},
            {"outputs": False, "fill": 1, "shift": 1, "gap": 3},
            {"force_mode": 2, "force_base": 2, "force_frac": 0.5},
            {"force_mode": 1, "force_base": 3, "wide": True, "fill": 1},
        )
    ):
        run(setup, case_of(requests, tokens, dtype, contexts=contexts, **more), seed)


@pytest.mark.parametrize("dtype", ["int32", "bf16"])
def test_every_case_of_a_cell(setup: Any, dtype: str) -> None:
    of_class = 0 if dtype == "int32" else 32
    for case in cases.checks(
        {"vocabulary_k": of_class}, 3, 4, 1 if not of_class else 3, dtype, CPU
    ):
        run(setup, case, 5)


def test_more_requests_than_a_cta_has_warps(setup: Any) -> None:
    run(setup, case_of(40, 4, "int32", contexts=13, wide=True), 3)
    run(setup, case_of(37, 8, "int64", force_mode=2, force_base=1, force_frac=0.3), 4)


def test_no_mode_is_another_compiled_function(setup: Any) -> None:
    run(setup, case_of(4, 4, "bf16"))
    with setup.on_device() as pack:
        plans = {id(plan[0]) for plan in pack.accept.op.plans.values()}
        kept = len(pack.accept.op.plans)
    for mode in (1, 2, 0):
        run(setup, case_of(4, 4, "bf16", force_mode=mode, force_base=2, force_frac=0.5, fill=1))
        with setup.on_device() as pack:
            assert len(pack.accept.op.plans) == kept
            assert {id(plan[0]) for plan in pack.accept.op.plans.values()} == plans


def test_twenty_steps_carry_lengths_cursors_and_drafts(setup: Any) -> None:
    """What one step leaves is what the next takes; beside the reference on tensors of its own."""
    generator = torch.Generator().manual_seed(11)
    requests, tokens, width = 6, 4, 97

    def state() -> dict[str, torch.Tensor]:
        return {
            "accepted": torch.zeros(requests, tokens, dtype=torch.int32),
            "n_acc": torch.zeros(requests, dtype=torch.int32),
            "next_token": torch.zeros(requests, dtype=torch.int32),
            "rows": torch.zeros(requests, dtype=torch.int32),
            "kv_lens": torch.full((requests,), 10, dtype=torch.int32),
            "hist_len": torch.zeros(9, dtype=torch.int32),
            "bank": torch.zeros(9, dtype=torch.int32),
            "counter": torch.zeros(1, dtype=torch.int64),
        }

    ours, theirs = state(), state()
    scratch = torch.zeros(requests * tokens + requests + 1, dtype=torch.int64)
    slot, pool = torch.tensor([4, 0, -1, 7, 2, 8], dtype=torch.int32), force_pool("cpu")
    commits = 0
    for step in range(20):
        logits = torch.randn(requests * tokens, width, generator=generator).bfloat16()
        ids = logits.argmax(1).view(requests, tokens)[:, :-1].int()
        wrong = torch.randint(0, 3, ids.shape, generator=generator) == 0
        drafts = torch.where(wrong, -1, ids)
        more = {
            "drafts": drafts, "slot": slot, "pool": pool, "force_base": 2, "force_frac": 0.5,
            "force_mode": (0, 0, 1, 2)[step % 4],
        }  # fmt: skip
        for each in (ours, theirs):
            # The verify step's rows are written behind what there is.
            each["kv_lens"][slot >= 0] += tokens
        bank = theirs["bank"].clone()
        with setup.on_device() as pack:
            pack.accept.require(logits, scratch=scratch, **ours, **more)
        reference.accept(logits, **theirs, **more)
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), (step, name)
        commits += int((bank != theirs["bank"]).sum())
        assert not scratch.any()
    assert ours["counter"].item() == 5 and commits > 5


def test_declined_calls_write_nothing(setup: Any) -> None:
    count = 0
    for what, arguments, storage in cases.declined(CPU):
        before = storage.clone()
        with setup.on_device() as pack:
            answer = pack.accept(**arguments)
        assert isinstance(answer, specplan.Uncertified), what
        assert not setup.launches and torch.equal(storage, before), what
        count += 1
    assert count > 45

"""accept's reference beside loops over Python's numbers, and what forced acceptance asks for."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specplan import reference  # noqa: E402
from specplan.accept import force_pool  # noqa: E402
from specplan.kernels.accept import cases  # noqa: E402
from specplan.plans.accept import FAMILY, OP, force  # noqa: E402

CPU = torch.device("cpu")


def numbers(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_that_of_a_loop(seed: int) -> None:
    chance = Random(seed)
    requests, tokens = chance.randint(1, 9), chance.randint(1, 6)
    contexts = chance.choice((0, 1, requests, chance.randint(0, requests)))
    generations, slots = requests - contexts, requests + 2
    extra, fill = chance.choice((0, 1)), chance.choice((0, 1))
    target = [chance.randint(0, 2) for _ in range(contexts + generations * tokens)]
    drafts = [[chance.choice((-1, 0, 1, 2)) for _ in range(tokens - 1)] for _ in range(generations)]
    lens = [chance.randint(tokens, 99) for _ in range(requests)]
    slot = chance.sample([*range(slots), *[-1] * slots], requests)
    hist, bank = [chance.randint(0, 16) for _ in range(slots)], [chance.randint(0, 1)] * slots
    override = [chance.choice((-1, -1, -1, 0, 1, tokens + 3)) for _ in range(requests)]
    position = [chance.randint(0, 500) for _ in target]

    accepted, counts, following, rows, moved, after = [], [], [], [], [], []
    new_hist, new_bank = list(hist), list(bank)
    for b in range(requests):
        if b < contexts:
            own, first, most = [target[b]], b, 1
            count = 1
        else:
            g = b - contexts
            first, most = contexts + g * tokens, tokens
            own = target[first : first + tokens]
            count = 1
            for draft, token in zip(drafts[g], own, strict=False):
                if draft != token:
                    break
                count += 1
        if override[b] >= 0:
            count = min(override[b], most)
        last = max(count, 1) - 1
        line = [*own, *[0] * (tokens - len(own))]
        accepted.append([-1 if fill and t >= count else line[t] for t in range(tokens)])
        counts.append(count)
        following.append(own[last])
        rows.append(first + last)
        after.append(position[first + last] + 1)
        real = slot[b] >= 0
        moved.append(lens[b] + (extra + (0 if b < contexts else count - tokens)) * real)
        if real and b >= contexts:
            s = slot[b]
            commits = hist[s] + tokens > 16
            new_hist[s] = count + (0 if commits else hist[s])
            new_bank[s] = bank[s] ^ commits

    given: dict[str, Any] = {
        "accepted": torch.full((requests, tokens), 77, dtype=torch.int32),
        "n_acc": torch.full((requests,), 77, dtype=torch.int32),
        "next_token": torch.full((requests,), 77, dtype=torch.int32),
        "rows": torch.full((requests,), 77, dtype=torch.int64),
        "kv_lens": numbers(lens), "hist_len": numbers(hist), "bank": numbers(bank),
        "positions_out": torch.zeros(1, requests, dtype=torch.int32),
    }  # fmt: skip
    reference.accept(
        numbers(target), drafts=numbers(drafts).view(generations, tokens - 1), slot=numbers(slot),
        n_override=numbers(override), contexts=contexts, extra=extra, fill=fill,
        positions=numbers(position)[None], **given,
    )  # fmt: skip
    assert given["accepted"].tolist() == accepted
    assert given["n_acc"].tolist() == counts
    assert given["next_token"].tolist() == following
    assert given["rows"].tolist() == rows
    assert given["positions_out"].tolist() == [after]
    assert given["kv_lens"].tolist() == moved
    assert given["hist_len"].tolist() == new_hist
    assert given["bank"].tolist() == [int(each) for each in new_bank]


@pytest.mark.parametrize(
    ("accepted", "tokens", "wanted"),
    [
        *((0, 4, (1, 1, 0.0)), (2, 4, (1, 3, 0.0)), (3, 4, (1, 4, 0.0)), (9, 4, (1, 4, 0.0))),
        *(
            (0.25, 4, (2, 1, 0.25)),
            (2.5, 4, (2, 3, 0.5)),
            (3.5, 4, (1, 4, 0.0)),
            (0, 1, (1, 1, 0.0)),
        ),
    ],
)
def test_forced_numbers(accepted: float, tokens: int, wanted: tuple[int, int, float]) -> None:
    assert force(accepted, tokens) == wanted


def test_forced_numbers_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 accepted drafts"):
        force(-1, 4)


def test_draws_have_the_mean_that_is_asked_for_and_move_the_counter() -> None:
    pool, counter = force_pool("cpu"), numbers([0], torch.int64)
    mode, base, frac = force(1.25, 4)
    total, steps, requests = 0, 300, 16
    for step in range(steps):
        n_acc = numbers([0] * requests)
        reference.accept(
            torch.zeros(requests * 4, dtype=torch.int32), numbers([[0] * 4] * requests), n_acc,
            drafts=numbers([[0] * 3] * requests), pool=pool, counter=counter, force_mode=mode,
            force_base=base, force_frac=frac,
        )  # fmt: skip
        place = ((step + 1) * 6007 + torch.arange(requests) * 1009) & 65535
        assert torch.equal(n_acc, (base + (pool[place] < frac)).int())
        total += int(n_acc.sum())
    assert counter.item() == steps
    # The mean of 4,800 draws of a variance of 0.19 is within 0.03 in all but one of 10^6 pools.
    assert abs(total / (steps * requests) - 2.25) < 0.03


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize(("requests", "tokens"), [(1, 1), (8, 4), (9, 8)])
def test_cases_come_to_their_cell_and_hold_every_prefix(
    requests: int, tokens: int, dtype: str
) -> None:
    geometry = {"vocabulary_k": 0 if dtype.startswith("int") else 32}
    seen: set[str] = set()
    counts: set[int] = set()
    for case in cases.checks(geometry, requests, tokens, 1, dtype, CPU):
        assert (case.pick()["requests"], case.pick()["tokens"]) == (requests, tokens)
        seen |= set(case.tensors)
        for seed in range(12):
            case.refill(seed)
            (comparison,) = case.compare(expected := case.expect())
            assert comparison.error > comparison.bound, "the poison is not what is expected"
            counts |= set(case.arena.tensors(expected)["n_acc"].tolist())
    declared = {parameter.name for parameter in OP.parameters if parameter.kind == "tensor"}
    if requests == 8:
        assert seen == declared
    if tokens > 1:
        assert counts >= set(range(1, tokens + 1))

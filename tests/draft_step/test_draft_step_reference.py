"""draft_step's reference beside loops over Python's numbers, and its cases."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specplan import reference  # noqa: E402
from specplan.kernels.draft_step import cases  # noqa: E402
from specplan.plans.draft_step import FAMILY, MAPPING, OP  # noqa: E402

CPU = torch.device("cpu")


def numbers(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_that_of_a_loop(seed: int) -> None:
    chance = Random(seed)
    requests, drafted = chance.randint(1, 9), chance.randint(1, 5)
    step = chance.randrange(drafted)
    group = chance.choice((1, 4))
    page_size, scale = group * chance.choice((1, 2, 8)), chance.choice((1, 2, 48))
    columns = chance.randint(1, 4)
    target = [chance.randint(0, 5) for _ in range(requests)]
    d2t = [chance.randint(-9, 99) for _ in range(chance.choice((3, 6)))]
    lens = [chance.randint(-1, (columns + 1) * page_size) for _ in range(requests)]
    slot = [chance.choice((-1, 0, 5)) for _ in range(requests)]
    position = [[chance.randint(0, 500) for _ in range(requests)] for _ in range(3)]
    table = [[chance.randint(-9, 400) for _ in range(columns)] for _ in range(requests)]
    last = [chance.randint(0, 99) for _ in range(requests)]

    wanted: dict[str, list[int]] = {name: [] for name, _, _, _ in MAPPING}
    tokens, new_lens, new_positions = [], list(lens), [list(axis) for axis in position]
    for b in range(requests):
        tokens.append(target[b] + (d2t[target[b]] if target[b] < len(d2t) else 0))
        real = slot[b] >= 0
        if real and step < drafted - 1:
            new_lens[b] += 1
            for axis in new_positions:
                axis[b] += 1
        p = new_lens[b] - 1
        line = dict.fromkeys(wanted, -1) | {"visible_of_row": 0, "within_of_row": 0}
        if real and p >= 0:
            column, within = divmod(p, page_size)
            page = table[b][column] if column < columns else -1
            page = page // scale if page >= 0 else page
            line |= {"request_of_row": b, "position_of_row": p, "visible_of_row": (p + 1) // group}
            line |= {"page_of_row": page, "within_of_row": within}
            if page >= 0:
                line["cache_slot"] = page * page_size + within
            if page >= 0 and (p + 1) % group == 0:
                line["group_slot"] = page * (page_size // group) + within // group
        for name, value in line.items():
            wanted[name].append(value)

    given: dict[str, Any] = {
        "input_ids": torch.full((requests,), 77),
        "drafts": torch.full((requests, drafted), 77, dtype=torch.int32),
        "next_new_tokens": torch.full((requests, drafted + 1), 77, dtype=torch.int32),
        "kv_lens": numbers(lens), "positions": numbers(position),
        **{
            name: torch.full((requests,), 77, dtype=torch.int32 if "row" in name else torch.int64)
            for name in wanted
        },
    }  # fmt: skip
    reference.draft_step(
        numbers(target, torch.int64), step=step, d2t=numbers(d2t), slot=numbers(slot),
        next_token=numbers(last), block_table=numbers(table), page_size=page_size, group=group,
        scale=scale, **given,
    )  # fmt: skip
    assert given["input_ids"].tolist() == tokens
    assert given["kv_lens"].tolist() == new_lens
    assert given["positions"].tolist() == new_positions
    for name, values in wanted.items():
        assert given[name].tolist() == values, name
    lines = [[77] * drafted for _ in range(requests)]
    news = [[each, *[77] * drafted] for each in last]
    for b, token in enumerate(tokens):
        lines[b][step] = news[b][step + 1] = token
    assert given["drafts"].tolist() == lines
    assert given["next_new_tokens"].tolist() == news


def test_logits_are_the_argmax_and_then_the_map() -> None:
    logits = torch.full((3, 7), -1.0)
    logits[0, 4] = logits[0, 6] = 2.0
    logits[1, 5] = float("nan")
    logits[2] = float("-inf")
    ids, drafts = numbers([0, 0, 0]), numbers([[9, 9]] * 3)
    reference.draft_step(logits, ids, drafts, step=1, d2t=torch.arange(7) * 10)
    assert ids.tolist() == [44, 55, 0]
    assert drafts.tolist() == [[9, 44], [9, 55], [9, 0]]


def test_the_mapping_is_that_of_step_setup_with_one_row_a_request() -> None:
    generator = torch.Generator().manual_seed(5)
    requests, columns = 40, 6
    kv_lens = torch.randint(1, 32 * (columns + 1), (requests,), generator=generator).int()
    table = torch.randint(-48, 4000, (requests, columns), generator=generator).int()
    names = [name for name, _, _, _ in MAPPING]

    def outputs() -> dict[str, torch.Tensor]:
        kinds = {"cache_slot": torch.int64, "group_slot": torch.int64}
        return {name: torch.zeros(requests, dtype=kinds.get(name, torch.int32)) for name in names}

    ours, theirs = outputs(), outputs()
    reference.draft_step(
        torch.zeros(requests, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32),
        torch.zeros(requests, 2, dtype=torch.int32), step=0, kv_lens=kv_lens, block_table=table,
        page_size=32, group=4, scale=48, **ours,
    )  # fmt: skip
    reference.step_setup(
        kv_lens, table, first_position=torch.zeros(requests, dtype=torch.int32),
        tokens=1, page_size=32, group=4, scale=48, **theirs,
    )  # fmt: skip
    for name in names:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("requests", [1, 8, 9])
def test_cases_come_to_their_cell_and_hold_what_is_hard(requests: int, dtype: str) -> None:
    geometry = {"vocabulary_k": 0 if dtype.startswith("int") else 32}
    seen: set[str] = set()
    pages, ends, moved, padded = 0, 0, 0, 0
    for case in cases.checks(geometry, requests, 1, 1, dtype, CPU):
        assert (case.pick()["requests"], case.pick()["tokens"]) == (requests, 1)
        seen |= set(case.tensors)
        for seed in range(12):
            case.refill(seed)
            before, expected = case.snapshot(), case.expect()
            (comparison,) = case.compare(expected)
            assert comparison.error > comparison.bound, "the poison is not what is expected"
            after, first = case.arena.tensors(expected), case.arena.tensors(before)
            if "kv_lens" in after:
                slots = after["cache_slot"][:requests]
                pages, padded = pages + int((slots >= 0).sum()), padded + int((slots < 0).sum())
                ends += int((after["group_slot"][:requests] >= 0).sum())
                moved += int((after["kv_lens"] != first["kv_lens"]).sum())
    declared = {parameter.name for parameter in OP.parameters if parameter.kind == "tensor"}
    if requests == 8:
        assert seen == declared - ({"scratch"} if dtype.startswith("int") else set())
        assert pages > 50 and padded > 50 and ends > 20 and moved > 50


def test_declined_calls_name_every_argument_and_are_all_different() -> None:
    texts, named = [], set()
    right = next(cases.declined(CPU))[1]
    for what, arguments, _ in cases.declined(CPU):
        texts.append(what)
        named |= {
            name
            for name, value in arguments.items()
            if type(value) is not type(right[name])
            or (isinstance(value, torch.Tensor) and value.dtype is not right[name].dtype)
            or (isinstance(value, torch.Tensor) and value.shape != right[name].shape)
            or (isinstance(value, int) and value != right[name])
        }
    assert len(set(texts)) == len(texts)
    assert named == {parameter.name for parameter in OP.parameters}

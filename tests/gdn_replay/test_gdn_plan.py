"""The planning rule: pure integers in, plans out."""

from __future__ import annotations

import pytest
from specplan.plans.arch import Arch
from specplan.plans.gdn_replay import (
    FAMILY,
    HEAD,
    LEAST_SPLITS,
    RESERVED,
    SHAPE,
    SPLITS,
    resident,
    shared_memory,
)

H200 = Arch("sm_90a", (9, 0), 132, 233472, 232448, "NVIDIA H200")
PROBLEMS = [(16, 32), (16, 48), (16, 64), (2, 8)]


def geometry(heads: tuple[int, int]) -> dict[str, int]:
    return {"key_heads": heads[0], "value_heads": heads[1]}


def test_shapes_cover_the_value_rows() -> None:
    for splits, (rows, warps) in SHAPE.items():
        assert rows * warps * splits == HEAD


@pytest.mark.parametrize("heads", PROBLEMS)
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_every_cell_has_a_plan_for_each_op(heads: tuple[int, int], dtype: str) -> None:
    for requests in range(1, 257):
        for tokens in range(1, 9):
            splits = FAMILY.splits(geometry(heads), requests, tokens, dtype, H200)
            plans = FAMILY.plans(geometry(heads), requests, tokens, splits, dtype, H200)
            assert tuple(plan.op for plan in plans) == FAMILY.ops
            assert plans[0].int("tokens") >= tokens
            assert plans[0].int("ctas") == plans[0].int("resident") * H200.sm_count


def test_the_whole_catalog_compiles_few_functions() -> None:
    symbols = {
        plan.symbol
        for heads in PROBLEMS
        for dtype in FAMILY.dtypes
        for requests in range(1, 257)
        for tokens in range(1, 9)
        for splits in {*SPLITS, FAMILY.splits(geometry(heads), requests, tokens, dtype, H200)}
        for plan in FAMILY.plans(geometry(heads), requests, tokens, splits, dtype, H200)
    }
    assert len([s for s in symbols if "verify" in s]) == 16
    assert len(symbols) == 20


@pytest.mark.parametrize(
    "requests,splits,grouped",
    [(1, 2, False), (8, 2, False), (9, 1, False), (12, 1, False), (13, 1, True), (256, 1, True)],
)
def test_rule_at_16_32(requests: int, splits: int, grouped: bool) -> None:
    assert FAMILY.splits(geometry((16, 32)), requests, 4, "bf16", H200) == splits
    plan = FAMILY.plans(geometry((16, 32)), requests, 4, splits, "bf16", H200)[0]
    assert plan["grouped"] is grouped


def test_forced_splits_reach_every_shape_and_bad_ones_do_not() -> None:
    for splits in SPLITS:
        plan = FAMILY.plans(geometry((16, 32)), 8, 4, splits, "bf16", H200)[0]
        assert plan.int("rows") * plan.int("warps") * splits == HEAD
    with pytest.raises(ValueError, match="splits 3"):
        FAMILY.plans(geometry((16, 32)), 8, 4, 3, "bf16", H200)
    with pytest.raises(ValueError, match="tokens 9"):
        FAMILY.plans(geometry((16, 32)), 8, 9, 1, "bf16", H200)


def test_rule_at_16_32_with_a_wide_state() -> None:
    chosen = [FAMILY.splits(geometry((16, 32)), n, 4, "fp32", H200) for n in (1, 4, 5, 256)]
    assert chosen == [4, 4, 2, 2]


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("heads", PROBLEMS)
def test_splits_do_not_grow_with_requests(heads: tuple[int, int], dtype: str) -> None:
    chosen = [FAMILY.splits(geometry(heads), n, 4, dtype, H200) for n in range(1, 257)]
    assert chosen == sorted(chosen, reverse=True)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("splits", SPLITS)
def test_resident_ctas_fit_the_sm(splits: int, dtype: str) -> None:
    held = resident(dtype, splits, False, H200)
    smem = shared_memory(dtype, splits, False)
    assert smem <= H200.smem_per_cta
    assert held >= 1 and held * (smem + RESERVED) <= H200.smem_per_sm


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_resident_ctas_of_grouped_heads_fit_the_sm(dtype: str) -> None:
    splits = LEAST_SPLITS[dtype]
    smem = shared_memory(dtype, splits, True)
    assert smem <= H200.smem_per_cta
    held = resident(dtype, splits, True, H200)
    assert held == 2 and held * (smem + RESERVED) <= H200.smem_per_sm


def test_value_heads_are_a_multiple_of_key_heads() -> None:
    assert FAMILY.check_problem(geometry((16, 48))) is None
    assert "not a multiple" in str(FAMILY.check_problem(geometry((16, 40))))

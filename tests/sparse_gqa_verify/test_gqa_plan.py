"""The planning rule: pure, bounded, and the table that it must give on 132 SMs."""

from __future__ import annotations

import pytest
from specplan.plans.arch import Arch
from specplan.plans.sparse_gqa_verify import (
    FAMILY,
    MAX_CLUSTER,
    MAX_M_TILES,
    MAX_SPLITS,
    WARPS,
    Launch,
    choose,
    groups,
    resident,
    workspace_words,
)

H200 = Arch("sm_90a", (9, 0), 132, 233472, 232448, "NVIDIA H200")
MODEL = {"q_heads": 24, "kv_heads": 2, "head_dim": 256, "page_size": 32, "selected": 2051}
PROBLEMS = [
    MODEL,
    {**MODEL, "q_heads": 12, "kv_heads": 1},
    {**MODEL, "q_heads": 6, "kv_heads": 1},
    {**MODEL, "q_heads": 3, "kv_heads": 1, "page_size": 64},
    {**MODEL, "q_heads": 16},
]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("sms", [132, 148])
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_every_cell_has_a_launch_that_covers_its_units(
    problem: dict[str, int], sms: int, dtype: str
) -> None:
    arch = Arch("sm_90a", (9, 0), sms, 233472, 232448, "any")
    assert FAMILY.check_problem(problem) is None
    for requests in range(1, 257):
        for tokens in range(1, 9):
            launch = choose(problem, requests, tokens, dtype, arch)
            units = groups(requests, tokens, launch.group_rows) * problem["kv_heads"]
            assert 1 <= launch.group_rows <= tokens
            assert 1 <= launch.splits <= MAX_SPLITS
            assert 0 <= launch.whole_units <= units
            (plan,) = FAMILY.plans(problem, requests, tokens, launch.splits, dtype, arch)
            assert 1 <= plan.int("m_tiles") <= MAX_M_TILES
            assert plan.int("splits") == launch.splits
            slots = sms * resident(WARPS[plan.int("m_tiles")])
            assert launch.cluster in (1, launch.splits)
            assert launch.cluster <= MAX_CLUSTER
            if launch.apart:
                assert units * launch.splits <= sms and launch.whole_units == 0
                assert resident(WARPS[plan.int("m_tiles")]) == 2
            if launch.splits == 1:
                assert launch.whole_units == 0
            elif launch.whole_units:
                assert launch.whole_units % slots == 0
                assert (units - launch.whole_units) * launch.splits <= slots
            else:
                assert units * launch.splits <= slots


def test_few_device_functions_serve_all_cells() -> None:
    symbols = {
        FAMILY.plans(problem, requests, tokens, splits, dtype, H200)[0].symbol
        for problem in PROBLEMS
        for requests in (1, 2, 4, 16, 64, 256)
        for tokens in range(1, 9)
        for splits in (1, 2, 4, 8, 16)
        for dtype in FAMILY.dtypes
    }
    assert len(symbols) <= 9


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_all_variants_are_reached(dtype: str) -> None:
    kinds = set()
    for requests in range(1, 257):
        for tokens in range(1, 9):
            launch = choose(MODEL, requests, tokens, dtype, H200)
            last_wave = launch.splits > 1 and launch.whole_units > 0
            split = "cluster" if launch.cluster > 1 else "apart" if launch.apart else "all"
            kind = "last wave" if last_wave else "one" if launch.splits == 1 else split
            kinds.add((kind, launch.group_rows > 1))
    lone = {("one", False), ("all", False), ("cluster", False), ("last wave", False)}
    grouped = {(kind, True) for kind in ("one", "all", "apart", "cluster", "last wave")}
    assert kinds == lone | grouped


@pytest.mark.parametrize(
    ("requests", "tokens", "dtypes", "group", "splits", "cluster", "apart"),
    [
        (1, 1, "bf16 fp8_e4m3 nvfp4", 1, 33, 1, 0),
        (1, 4, "bf16 fp8_e4m3 nvfp4", 1, 33, 1, 0),
        (4, 4, "bf16 fp8_e4m3 nvfp4", 1, 7, 1, 0),
        (5, 4, "bf16 fp8_e4m3 nvfp4", 1, 6, 1, 0),
        (7, 4, "fp8_e4m3", 1, 4, 4, 0),
        (7, 4, "bf16 nvfp4", 4, 9, 1, 1),
        (8, 4, "bf16 fp8_e4m3 nvfp4", 4, 8, 1, 1),
        (12, 4, "bf16", 4, 5, 1, 1),
        (12, 4, "fp8_e4m3 nvfp4", 4, 11, 1, 0),
        (16, 4, "bf16 fp8_e4m3 nvfp4", 4, 4, 1, 1),
        (20, 4, "bf16", 4, 3, 1, 1),
        (20, 4, "fp8_e4m3 nvfp4", 4, 6, 1, 0),
        (24, 4, "bf16 fp8_e4m3 nvfp4", 4, 5, 1, 0),
        (32, 4, "bf16", 4, 2, 2, 1),
        (32, 4, "fp8_e4m3 nvfp4", 4, 4, 1, 0),
        (40, 4, "bf16 fp8_e4m3 nvfp4", 4, 3, 1, 0),
        (48, 4, "bf16 fp8_e4m3 nvfp4", 4, 2, 2, 0),
        (64, 4, "bf16 fp8_e4m3 nvfp4", 4, 2, 2, 0),
        (128, 4, "bf16 fp8_e4m3 nvfp4", 4, 1, 1, 0),
        (256, 4, "bf16 fp8_e4m3 nvfp4", 4, 1, 1, 0),
        (10, 2, "bf16 nvfp4", 2, 6, 1, 0),
        (10, 2, "fp8_e4m3", 1, 6, 1, 0),
        (32, 1, "bf16 fp8_e4m3 nvfp4", 1, 3, 3, 0),
        (40, 1, "bf16 fp8_e4m3 nvfp4", 1, 3, 1, 0),
        (48, 1, "bf16 fp8_e4m3 nvfp4", 1, 2, 2, 0),
        (64, 1, "bf16 fp8_e4m3 nvfp4", 1, 2, 2, 0),
        (128, 1, "bf16 fp8_e4m3 nvfp4", 1, 1, 1, 0),
    ],
)
def test_the_table_on_132_sms(
    requests: int, tokens: int, dtypes: str, group: int, splits: int, cluster: int, apart: int
) -> None:
    for dtype in dtypes.split():
        launch = choose(MODEL, requests, tokens, dtype, H200)
        assert launch == Launch(tokens, group, splits, 0, cluster, apart)


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
def test_forced_splits_are_kept(splits: int) -> None:
    (plan,) = FAMILY.plans(MODEL, 20, 4, splits, "nvfp4", H200)
    assert plan.int("splits") == splits
    assert plan.int("cluster") == (splits if splits <= MAX_CLUSTER else 1)
    assert plan.int("whole_units") == 0
    assert splits != FAMILY.splits(MODEL, 20, 4, "nvfp4", H200)


def test_splits_out_of_range_are_refused() -> None:
    for splits in (0, MAX_SPLITS + 1):
        with pytest.raises(ValueError, match="splits"):
            FAMILY.plans(MODEL, 1, 1, splits, "bf16", H200)


def test_problems_that_do_not_fit() -> None:
    assert "multiple" in str(FAMILY.check_problem({**MODEL, "q_heads": 25}))
    assert "at most" in str(FAMILY.check_problem({**MODEL, "q_heads": 64}))
    assert "page_size" in str(FAMILY.check_problem({**MODEL, "page_size": 30}))


def test_workspace_is_empty_without_splits_and_in_clusters() -> None:
    assert workspace_words(MODEL, 256, 4, 4, 1, 512) == 0
    assert workspace_words(MODEL, 32, 4, 4, 2, 0, 2) == 0
    # A unit of 4 rows x 12 heads in 8 splits, each row 256 sums and 4 more words.
    assert workspace_words(MODEL, 3, 4, 4, 8, 2) == 4 * 8 * 48 * 260

"""The plane table, the snapshot's layout, the state table and the planning rule: integers only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specplan.plans import rollback as plan
from specplan.plans.arch import Arch
from specplan.plans.rollback import FAMILY

H200 = Arch("sm_90a", (9, 0), 132, 233472, 232448, "NVIDIA H200")
QSA = {"planes": 12, "row_bytes": 256, "side_planes": 1, "side_row_bytes": 12}
PROBLEMS = (
    QSA,
    {"planes": 1, "row_bytes": 4, "side_planes": 0, "side_row_bytes": 0},
    {"planes": 63, "row_bytes": 1040, "side_planes": 1, "side_row_bytes": 20},
)


def dense(row_bytes: int, base: int = 1 << 40, pages: int = 9) -> plan.Plane:
    return plan.plane(base, 128 * row_bytes, row_bytes, pages, 128, row_bytes)


@pytest.mark.parametrize(
    ("base", "page_stride", "row_bytes", "vector"),
    [
        (1 << 40, 128 * 256, 256, 16),
        ((1 << 40) + 8, 128 * 256, 256, 8),
        ((1 << 40) + 4, 128 * 256, 256, 4),
        (1 << 40, 128 * 256 + 8, 256, 8),
        (1 << 40, 128 * 256 + 4, 256, 4),
        (1 << 40, 128 * 12, 12, 4),
        (1 << 40, 128 * 24, 24, 8),
    ],
)
def test_access_width_is_the_widest_that_base_strides_and_size_allow(
    base: int, page_stride: int, row_bytes: int, vector: int
) -> None:
    assert plan.plane(base, page_stride, row_bytes, 9, 128, row_bytes).vector == vector


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 1024, 8, 4, 128, 8), "multiples of 4"),
        ((0, 1024, 8, 4, 128, 6), "multiples of 4"),
        ((0, 1024, 8, 4, 128, 0), "0 bytes"),
        ((0, 1024, 8, 4, 128, plan.MAX_ROW_BYTES + 4), "expected 1.."),
        ((0, 1024, 4, 4, 128, 8), "rows of 8 bytes overlap"),
        ((0, 1020, 8, 4, 128, 8), "pages of 128 rows"),
        ((0, 1024, 8, 4, 0, 8), "4 pages of 0 rows"),
        ((0, 1024, 8, -1, 128, 8), "-1 pages"),
    ],
)
def test_impossible_planes_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.plane(*arguments)


@pytest.mark.parametrize(
    "sizes", [(256,) * 12 + (12,), (12, 256), (4,), (24, 1040, 4, 8, 16, 2048)]
)
def test_record_places_are_aligned_and_disjoint(sizes: tuple[int, ...]) -> None:
    layout = plan.layout([dense(size) for size in sizes])
    end = 0
    for placed in layout.planes:
        assert placed.record_offset >= end
        assert (
            placed.record_offset
            % min(plan.LINE, max(plan.VECTOR, placed.row_bytes & -placed.row_bytes))
            == 0
        )
        assert placed.row_bytes < plan.LINE or placed.record_offset % plan.LINE == 0
        end = placed.record_offset + placed.row_bytes
    assert end <= layout.record_bytes < end + plan.LINE
    assert layout.record_bytes % plan.LINE == 0
    assert [len(row) for row in layout.table()] == [plan.PLANE_FIELDS] * len(sizes)


def test_layout_of_the_known_planes() -> None:
    layout = plan.layout([dense(256)] * 12 + [dense(12)])
    assert [each.record_offset for each in layout.planes] == [256 * i for i in range(13)]
    assert layout.record_bytes == 3072 + 128
    assert layout.geometry == QSA


def test_layouts_name_their_problem() -> None:
    assert plan.layout([dense(12), dense(256), dense(12)]).geometry == {
        "planes": 2,
        "row_bytes": 12,
        "side_planes": 1,
        "side_row_bytes": 256,
    }
    assert plan.layout([dense(64)]).geometry == {
        "planes": 1,
        "row_bytes": 64,
        "side_planes": 0,
        "side_row_bytes": plan.NO_SIDE,
    }
    assert plan.layout([dense(64), dense(32), dense(16)]).geometry is None


@pytest.mark.parametrize("count", [0, plan.MAX_PLANES + 1])
def test_number_of_planes_is_bounded(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} planes"):
        plan.layout([dense(16)] * count)


def state(given: str, wanted: str, elements: int = 96, shift: int = 0) -> plan.State:
    sizes = plan.ITEM_BYTES
    step = elements * sizes[given]
    return plan.state(
        shift, 4 * step, step, 4, shift, elements * sizes[wanted], 9, elements, given, wanted
    )


def test_states_of_one_dtype_are_copied_in_the_widest_accesses() -> None:
    assert (state("bfloat16", "bfloat16").kind, state("bfloat16", "bfloat16").items) == (16, 12)
    assert (state("bfloat16", "bfloat16", shift=8).kind, state("int32", "int32", 3).kind) == (8, 4)
    assert state("int32", "int32", 3).items == 3


def test_states_of_two_dtypes_are_cast_element_by_element() -> None:
    kinds = {state(given, wanted).kind for given, wanted in plan.CASTS}
    assert kinds == set(plan.CASTS.values())
    assert len(kinds) == len(plan.CASTS)
    assert not kinds & {4, 8, 16}
    assert state("float32", "bfloat16", 5).items == 5


@pytest.mark.parametrize(
    ("given", "wanted", "elements", "shift", "message"),
    [
        ("float32", "int32", 4, 0, "no cast from float32 to int32"),
        ("float64", "float64", 4, 0, "no state dtype 'float64'"),
        ("bfloat16", "bfloat16", 3, 0, "multiples of 4"),
        ("float32", "bfloat16", 4, 2, "not aligned to 4"),
        ("bfloat16", "float32", 4, 2, "not aligned to 4"),
        ("int32", "int32", 0, 0, "0 elements"),
    ],
)
def test_impossible_states_are_refused(
    given: str, wanted: str, elements: int, shift: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        if given in plan.ITEM_BYTES:
            state(given, wanted, elements, shift)
        else:
            plan.state(0, 32, 32, 4, 0, 32, 9, elements, given, wanted)


@pytest.mark.parametrize("geometry", PROBLEMS)
def test_the_rule_covers_every_cell_with_few_plans(geometry: dict[str, int]) -> None:
    assert FAMILY.check_problem(geometry) is None
    symbols = set()
    for requests in range(1, 257):
        for tokens in range(1, 9):
            rows = requests * tokens
            splits = FAMILY.splits(geometry, requests, tokens, "int32", H200)
            # The host code cuts the rows like this; no CTA may be without rows.
            chunk = -(-rows // splits)
            assert (splits - 1) * chunk < rows <= splits * chunk
            assert splits < 1 << 16
            for dtype in FAMILY.dtypes:
                plans = FAMILY.plans(geometry, requests, tokens, splits, dtype, H200)
                assert tuple(each.op for each in plans) == FAMILY.ops
                symbols |= {each.symbol for each in plans}
    assert len(symbols) <= len(FAMILY.ops) * len(FAMILY.dtypes) * 2


def test_splits_of_the_known_planes() -> None:
    """The chunks that were measured best on an H200: 8 rows per CTA up to 128 rows, 32 above, 64 at
    2048.
    """
    found = {r: FAMILY.splits(QSA, r, 1, "int32", H200) for r in (1, 4, 16, 17, 128, 256)}
    assert found == {1: 1, 4: 1, 16: 2, 17: 3, 128: 16, 256: 8}
    assert [FAMILY.splits(QSA, r, 8, "int32", H200) for r in (64, 128, 256)] == [16, 32, 32]


def test_the_rule_is_a_pure_function_of_its_integers() -> None:
    for rows in (4, 2048):
        plans = FAMILY.plans(QSA, rows // 4, 4, 3, "int64", H200)
        assert plans == FAMILY.plans(dict(QSA), rows // 4, 4, 3, "int64", replace(H200))
        assert all(dict(each.launch) == {"splits": 3, "overlap": 1} for each in plans)
        assert [each["unroll"] for each in plans] == [1 if rows == 4 else 4] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": 64}, "65 planes"),
        ({"row_bytes": 258}, "multiples of 4"),
        ({"side_row_bytes": 0}, "no side planes"),
        ({"side_planes": 0}, "no side planes"),
        ({"side_row_bytes": 256}, "planes like the others"),
    ],
)
def test_problems_that_do_not_fit_are_named(change: dict[str, int], message: str) -> None:
    assert message in (FAMILY.check_problem({**QSA, **change}) or "")

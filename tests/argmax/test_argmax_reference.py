"""argmax's reference beside loops over Python's numbers, its keys, and the input cases."""

from __future__ import annotations

from math import inf, isnan, nan
from random import Random

import pytest

torch = pytest.importorskip("torch")

from specplan.kernels.argmax import cases, reference  # noqa: E402
from specplan.plans.argmax import FAMILY, splits_of, vocabulary_class  # noqa: E402
from specplan.plans.catalog import load  # noqa: E402

CPU = torch.device("cpu")
#: What is hard to order: equal zeros, infinities, NaN, neighbours, the smallest numbers.
SPECIAL = (0.0, -0.0, inf, -inf, nan, -nan, 1.0, 1.0, -1.0, 1e-40, -1e-40, 3.38e38, -3.38e38)


def loop(row: list[float]) -> int:
    """The first NaN, else the first of the largest numbers."""
    best = 0
    for column, value in enumerate(row):
        if isnan(value):
            return column
        if value > row[best]:
            best = column
    return best


def rows_of(seed: int, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    chance = Random(seed)
    few = [chance.sample(SPECIAL, chance.randint(1, 4)) for _ in range(count)]
    return torch.tensor([[chance.choice(kinds) for _ in range(width)] for kinds in few]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_are_those_of_a_loop_and_of_torch(dtype: torch.dtype) -> None:
    rows = rows_of(1, 2000, 9, dtype)
    found = reference.columns(rows)
    assert found.tolist() == [loop(row) for row in rows.float().tolist()]
    assert torch.equal(found, rows.argmax(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_key_of_the_shards_is_that_of_the_whole(dtype: torch.dtype) -> None:
    rows = rows_of(2, 500, 12, dtype)
    shards = [reference.keys(rows[:, at : at + 3], at) for at in range(0, 12, 3)]
    # As unsigned: the upper bit is the sign of an int64.
    largest = torch.stack(shards).bitwise_xor(-(1 << 63)).amax(0).bitwise_xor(-(1 << 63))
    assert torch.equal(largest, reference.keys(rows))
    column = (largest & 0xFFFFFFFF) ^ 0xFFFFFFFF
    assert torch.equal(column, rows.argmax(1))
    assert (reference.keys(rows) != 0).all(), "zeroed scratch is below every key"


def test_values_say_zero_and_nan_in_one_way() -> None:
    rows = torch.tensor([[-0.0, -0.0], [1.0, -nan], [-inf, -inf], [2.5, 2.0]])
    assert reference.values(rows).view(torch.int32).tolist() == [
        *(0, 0x7FFFFFFF),
        *torch.tensor([-inf, 2.5]).view(torch.int32).tolist(),
    ]
    low = reference.values(rows.bfloat16()).view(torch.int16).tolist()
    assert low[:2] == [0, 0x7FFF]


def test_ids_are_shifted_and_mapped() -> None:
    rows = torch.tensor([[0.0, 1.0, 0.5], [3.0, 1.0, 2.0]])
    ids, d2t = torch.zeros(2, dtype=torch.int64), torch.tensor([10, 20, 30], dtype=torch.int32)
    reference.argmax(rows, ids, offset=100, d2t=d2t)
    assert ids.tolist() == [121, 110]


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("rows", [1, 5, 12, 13])
def test_every_case_comes_to_its_own_cell_and_asks_all_outputs(rows: int, dtype: str) -> None:
    seen: set[str] = set()
    for case in cases.checks({"vocabulary_k": 32}, rows, 1, 2, dtype, CPU):
        assert case.pick()["requests"] == rows and case.pick()["dtype"] == dtype
        case.refill(1)
        (comparison,) = case.compare(case.expect())
        assert comparison.error > comparison.bound, "the poison is not what is expected"
        seen |= set(case.tensors)
    assert {"logits", "ids", "scratch", "value", "key"} <= seen


def test_vocabularies_of_the_models_and_their_shards_have_a_class() -> None:
    claimed = {each["vocabulary_k"] for each in load().problems["argmax"].values()}
    for whole in (151_936, 248_320):
        for ranks in (1, 2, 4, 8):
            columns = whole // ranks
            of_class = vocabulary_class(columns)
            assert of_class in claimed and columns <= of_class * 1024
            assert columns in cases.VOCABULARIES[of_class]


def test_splits_fill_the_gpu_and_leave_a_load_for_each_thread() -> None:
    arch = load().archs["sm_90a"]
    for of_class in (32, 64, 128, 256):
        for dtype, item in (("bf16", 2), ("fp32", 4)):
            for rows in (1, 4, 64, 1000, 8192):
                splits = splits_of(of_class, rows, dtype, arch)
                assert 1 <= splits <= of_class * 1024 * item // 4096
                assert splits == 1 or rows * splits <= 6 * arch.sm_count
    assert splits_of(256, 4, "bf16", arch) * 4 >= 0.9 * arch.sm_count

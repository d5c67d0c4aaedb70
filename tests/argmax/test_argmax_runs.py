"""argmax on an imagined GPU: compiled host function and PTX against the reference."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import specplan  # noqa: E402
from specplan.kernels.argmax import cases  # noqa: E402
from specplan.kernels.argmax.cases import ArgmaxCase  # noqa: E402
from specplan.kernels.argmax.reference import columns, keys  # noqa: E402

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def case_of(rows: int, width: int, dtype: str, splits: int, **more: Any) -> ArgmaxCase:
    return ArgmaxCase(
        *("test", 32, CPU), rows=rows, columns=width, dtype=dtype, splits=splits, **more
    )


def launch(setup: Any, case: ArgmaxCase) -> None:
    with setup.on_device() as pack:
        pack.argmax.require(**case.arguments())
    assert len(setup.launches) == 1


def run(setup: Any, case: ArgmaxCase, seed: int = 1) -> None:
    """A case once, compared whole, its scratch left zero, and once more, equal bit for bit."""
    case.refill(seed)
    before, expected = case.snapshot(), case.expect()
    for _ in range(2):
        case.restore(before)
        launch(setup, case)
        assert not case.tensors["scratch"].any()
        for comparison in case.compare(expected):
            assert comparison.error <= comparison.bound, case.name


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_ties_on_both_sides_of_every_boundary(setup: Any, dtype: str, splits: int) -> None:
    """The larger of two neighbours, and the first of two equal ones, wherever a CTA's columns, a
    thread's or a load's end.
    """
    width = 16 // cases.DTYPES[dtype].itemsize
    total = 5 * 256 * width + 3
    vectors = -(-total // width)
    chunk = -(-vectors // splits) * width
    places = {chunk * s for s in range(1, splits)} | {width, 256 * width, total - 3, total - 1}
    places |= {3, width + 2, 300 * width + 1}
    for at in sorted(place for place in places if 0 < place < total):
        case = case_of(3, total, dtype, splits)
        case.refill(at)
        logits = case.tensors["logits"]
        logits.clamp_(max=4.0)
        logits[0, at - 1] = logits[0, at] = 64.0
        logits[1, at - 1], logits[1, at] = 0.5 * 64, 64.0
        logits[2, at - 1], logits[2, at] = NAN, INF
        expected = case.expect()
        launch(setup, case)
        assert case.tensors["ids"].tolist() == [at - 1, at, at - 1]
        for comparison in case.compare(expected):
            assert comparison.error <= comparison.bound


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_few_columns_and_rows_that_begin_anywhere(setup: Any, dtype: str) -> None:
    for width in (1, 2, 7, 8, 9, 31, 33, 255):
        for shift in (0, 1, 5):
            run(setup, case_of(3, width, dtype, 2, shift=shift, gap=3, special=True), width)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_case_of_a_cell(setup: Any, dtype: str) -> None:
    splits = {"bf16": 16, "fp32": 32}[dtype]
    for case in cases.checks({"vocabulary_k": 32}, 2, 1, splits, dtype, CPU):
        run(setup, case, 2)


def test_rows_between_cells_run_the_next_one(setup: Any) -> None:
    case = ArgmaxCase(*("seven", 32, CPU), rows=7, columns=64, dtype="bf16", splits=1, special=True)
    case.refill(1)
    expected = case.expect()
    arguments = {**case.arguments(), "splits": None}
    with setup.on_device() as pack:
        answer = pack.argmax(**arguments)
    assert answer, answer
    for comparison in case.compare(expected):
        assert comparison.error <= comparison.bound


def test_the_keys_of_shards_give_the_whole_vocabulary(setup: Any) -> None:
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(5))
    logits[1, 40], logits[2, 31:33] = NAN, INF
    found = []
    for first in range(0, 96, 32):
        scratch, key = torch.zeros(6, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        ids = torch.zeros(3, dtype=torch.int32)
        part = logits[:, first : first + 32].contiguous()
        with setup.on_device() as pack:
            pack.argmax.require(part, ids, scratch, key=key, offset=first)
        assert ids.tolist() == (part.argmax(1) + first).tolist()
        found.append(key)
    largest = torch.stack(found).bitwise_xor(-(1 << 63)).amax(0).bitwise_xor(-(1 << 63))
    assert torch.equal(largest, keys(logits))
    assert torch.equal((largest & 0xFFFFFFFF) ^ 0xFFFFFFFF, columns(logits))


def test_declined_calls_write_nothing(setup: Any) -> None:
    count = 0
    for what, arguments, storage in cases.declined(CPU):
        before = storage.clone()
        with setup.on_device() as pack:
            answer = pack.argmax(**arguments)
        assert isinstance(answer, specplan.Uncertified), what
        assert not setup.launches, what
        # Bits: the guards hold NaNs.
        assert torch.equal(storage, before), what
        count += 1
    assert count >= 22

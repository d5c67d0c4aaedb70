"""stage on an imagined GPU: compiled host function and PTX against plain copies."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import specplan  # noqa: E402
from specplan.kernels.stage import cases  # noqa: E402
from specplan.kernels.stage.cases import StageCase  # noqa: E402
from specplan.stage import describe  # noqa: E402

CPU = torch.device("cpu")


def run(setup: Any, case: StageCase, seed: int = 1) -> None:
    """A case once, compared whole, and once more, equal bit for bit."""
    case.refill(seed)
    before, expected = case.snapshot(), case.expect()
    for _ in range(2):
        case.restore(before)
        with setup.on_device() as pack:
            pack.stage.require(**case.arguments())
        assert len(setup.launches) == 1
        for comparison in case.compare(expected):
            assert comparison.error <= comparison.bound, case.name


@pytest.mark.parametrize("segments", range(1, 17))
def test_every_case_of_every_number_of_segments(setup: Any, segments: int) -> None:
    for case in cases.checks({"segments": 16}, segments, 1, 1, "int32", CPU):
        assert case.pick()["requests"] == segments
        run(setup, case, segments)


def test_values_arrive_where_they_belong(setup: Any) -> None:
    """Against Python's own lists; an int64 is two words, the lower one first."""
    record = torch.tensor([7, 8, 9, -1, -2, 5, 1], dtype=torch.int32)
    first, second = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    segments = describe([(first, 1), (second, 3), (torch.zeros(0, dtype=torch.int32), 0)])
    with setup.on_device() as pack:
        pack.stage.require(record, segments)
    assert first.tolist() == [8, 9]
    assert second.tolist() == [(-2 << 32) | 0xFFFFFFFF, (1 << 32) | 5]


def test_declined_calls_write_nothing(setup: Any) -> None:
    count = 0
    for what, arguments, storage in cases.declined(CPU):
        before = storage.clone()
        with setup.on_device() as pack:
            answer = pack.stage(**arguments)
        assert isinstance(answer, specplan.Uncertified), what
        assert not setup.launches and torch.equal(storage, before), what
        count += 1
    assert count > 40
    run(setup, StageCase("good", CPU, [8, 4, 6, 9]))


def vector(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


whole = vector(8)


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([], "0 segments that are not empty"),
        ([(vector(2), 0)] * 1 + [(vector(0), 0)] * 0 + [(vector(2), -1)], "segment 1: its offset"),
        ([(vector(1), 0) for _ in range(17)], "17 segments that are not empty, expected 1..16"),
        ([(whole[:5], 0), (whole[4:], 8)], "the destinations of segments 0 and 1 overlap"),
        ([(whole[::2], 0)], "expected a dense vector"),
        ([(whole.view(2, 4), 0)], "expected a dense vector"),
        ([(whole.float(), 0)], "expected torch.int32 or torch.int64"),
        ([(vector(2), True)], "its offset is True"),
        ([(5, 0)], "the destination is no tensor: int"),
    ],
)
def test_what_describe_refuses(segments: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        describe(segments)


def test_neighbours_do_not_overlap() -> None:
    assert describe([(whole[4:], 8), (whole[:4], 0)]).count == 2

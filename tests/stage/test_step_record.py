"""StepRecord over memory of the host: what it stages, what it declines, and when it waits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specplan import Uncertified, reference  # noqa: E402
from specplan.stage import StepRecord, mapped  # noqa: E402


class Clock:
    """Events and launches in the order in which they happen."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False

    def event(self) -> Clock:
        return self

    def record(self) -> None:
        self.log.append("event")

    def synchronize(self) -> None:
        self.log.append("wait")

    def launch(self, record: Any, segments: Any) -> bool:
        self.log.append("launch")
        reference.stage(record, segments)
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def record_of(clock: Clock, words: int = 16) -> StepRecord:
    host = torch.full((words,), -9, dtype=torch.int32)
    return StepRecord(
        words, torch.device("cpu"), host=host, device_view=host,
        event=clock.event, capturing=lambda: clock.capturing,
    )  # fmt: skip


def numbers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_what_is_appended_arrives_at_the_commit(clock: Clock) -> None:
    record, small, large = record_of(clock), numbers(0, 0, 0), numbers(0, 0, dtype=torch.int64)
    assert record.append(small, numbers(1, 2)) is True
    assert record.append(large, numbers(-5, 1 << 40, dtype=torch.int64)) is True
    assert record.append(small, numbers()) is True, "nothing is no segment"
    assert small.tolist() == [0, 0, 0]
    assert record.commit(clock.launch) is True
    assert small.tolist() == [1, 2, 0] and large.tolist() == [-5, 1 << 40]
    assert record.commit(clock.launch) is True
    assert clock.log == ["launch", "event"], "nothing pending is no launch"


def test_the_record_is_written_again_only_behind_the_launch_that_reads_it(clock: Clock) -> None:
    record, at = record_of(clock), numbers(0)
    for value in (1, 2, 3):
        record.append(at, numbers(value))
        record.commit(clock.launch)
    assert clock.log == ["launch", "event", "wait", "launch", "event", "wait", "launch", "event"]
    assert at.tolist() == [3]


def test_what_is_declined_stages_nothing(clock: Clock) -> None:
    record, at = record_of(clock, 4), numbers(0, 0, 0)
    assert record.append(at[:2], numbers(1, 2))
    before = record.host.clone()
    for destination, values, said in (
        (at[1:], numbers(1), "overlap"),
        (numbers(0, 0, 0), numbers(1, 2, 3), "3 words, the record has 2 left"),
        (numbers(0), numbers(1, 2), "2 values for a destination of 1"),
        (at[2:], numbers(1, dtype=torch.int64), "expected a vector of torch.int32"),
        (at[2:], [1], "no tensor on the host"),
        (at[2:].float(), numbers(1), "expected torch.int32 or torch.int64"),
        (at[::2], numbers(1), "expected a dense vector"),
    ):
        answer = record.append(destination, values)
        assert isinstance(answer, Uncertified) and said in str(answer), answer
    assert torch.equal(record.host, before)
    assert record.commit(clock.launch) and at.tolist() == [1, 2, 0]


def test_a_declined_commit_keeps_what_was_appended(clock: Clock) -> None:
    record, at = record_of(clock), numbers(0)
    record.append(at, numbers(4))
    assert record.commit(lambda *_: False) is False
    assert record.commit(clock.launch) is True and at.tolist() == [4]


def test_a_captured_record_is_rewritten_and_not_appended_to(clock: Clock) -> None:
    record, at = record_of(clock), numbers(0, 0)
    assert "no graph has captured" in str(record.rewrite(0, numbers(1, 2)))
    record.append(at, numbers(1, 2))
    clock.capturing = True
    segments: list[Any] = []

    def captured(record: Any, given: Any) -> bool:
        segments.append(given)
        return True

    assert record.commit(captured) is True
    clock.capturing = False
    assert "a graph reads this record" in str(record.append(at, numbers(1, 2)))
    for answer, said in (
        (record.rewrite(1, numbers(1)), "segment 1 of a record with 1"),
        (record.rewrite(0, numbers(1)), "1 values for a segment of 2"),
    ):
        assert isinstance(answer, Uncertified) and said in str(answer)
    for values in ((3, 4), (5, 6)):
        assert record.rewrite(0, numbers(*values)) is True
        # A replay reads the same record to the same places.
        clock.launch(record.record, segments[0])
        record.replayed()
        assert at.tolist() == list(values)
    assert clock.log == ["launch", "event", "wait", "launch", "event"]


def test_memory_that_is_not_pinned_is_not_mapped() -> None:
    with pytest.raises(ValueError, match="only pinned host memory"):
        mapped(numbers(1), torch.device("cuda", 0))
    with pytest.raises(ValueError, match="not 3 words of int32"):
        StepRecord(3, torch.device("cpu"), host=numbers(1, 2), device_view=numbers(1))

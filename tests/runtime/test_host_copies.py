"""HostCopies over memory of the host: what it copies, what it skips, and when it sees another
writer.
"""

from __future__ import annotations

import gc
from random import Random

import pytest

torch = pytest.importorskip("torch")

from specplan.errors import ColdCaptureError, ValueCheckError  # noqa: E402
from specplan.host_copies import HostCopies  # noqa: E402


def numbers(*values: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


class Staging:
    """What is staged, and whether a graph is being captured."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.capturing = False
        self.fails = False

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("no pinned memory is left")
        self.made.append(values.clone())
        return self.made[-1]

    def over(self, destination: torch.Tensor, check: bool = True) -> HostCopies:
        return HostCopies(destination, check=check, stage=self, capturing=lambda: self.capturing)


@pytest.fixture
def staging() -> Staging:
    return Staging()


def test_prefixes_count_and_the_tail_is_kept(staging: Staging) -> None:
    buffer = torch.full((6,), -1, dtype=torch.int32)
    copies = staging.over(buffer)
    assert copies.copy_if_changed(numbers(5, 6, 7, 8)) is True
    assert copies.copy_if_changed(numbers(9, 9)) is True
    assert buffer.tolist() == [9, 9, 7, 8, -1, -1]
    assert copies.copy_if_changed(numbers(9, 9, 7, 8)) is False
    assert copies.copy_if_changed(numbers(9)) is False
    assert copies.copy_if_changed(numbers()) is False
    assert [each.tolist() for each in staging.made] == [[5, 6, 7, 8], [9, 9]]


def test_what_was_never_copied_is_not_known(staging: Staging) -> None:
    """The buffer begins with any values; the host's copy of them does, too."""
    buffer = numbers(1, 2, 3, 4)
    copies = staging.over(buffer)
    copies._held.copy_(numbers(1, 2, 3, 4))
    assert copies.copy_if_changed(numbers(1, 2)) is True
    assert copies.copy_if_changed(numbers(1, 2, 3)) is True
    assert copies.copy_if_changed(numbers(1, 2, 3)) is False


def test_a_b_a_copies_three_times(staging: Staging) -> None:
    buffer = torch.zeros(2, dtype=torch.int64)
    copies, a, b = staging.over(buffer), [1 << 40, 2], [3, 4]
    for values in (a, b, a):
        given = numbers(*values, dtype=torch.int64)
        assert copies.copy_if_changed(given) is True and buffer.tolist() == values
        assert copies.copy_if_changed(given) is False


def test_values_may_be_rewritten_in_place(staging: Staging) -> None:
    buffer, values = torch.zeros(3, dtype=torch.int32), numbers(1, 2, 3)
    copies = staging.over(buffer)
    assert copies.copy_if_changed(values) is True
    values[1] = 9
    assert copies.copy_if_changed(values) is True and buffer.tolist() == [1, 9, 3]
    assert staging.made[0].tolist() == [1, 2, 3], "each copy has memory of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_values_are_compared_bit_for_bit(staging: Staging, dtype: torch.dtype) -> None:
    buffer = torch.zeros(2, dtype=dtype)
    copies = staging.over(buffer)
    assert copies.copy_if_changed(torch.tensor([0, 1], dtype=dtype)) is True
    assert copies.copy_if_changed(torch.tensor([0, 1], dtype=dtype)) is False
    if dtype.is_floating_point:
        for value in (-0.0, float("nan")):
            given = torch.tensor([value, 1], dtype=dtype)
            assert copies.copy_if_changed(given) is True
            assert copies.copy_if_changed(given.clone()) is False


def test_a_copy_that_fails_leaves_nothing_known(staging: Staging) -> None:
    copies = staging.over(torch.zeros(2, dtype=torch.int32))
    assert copies.copy_if_changed(numbers(1, 2)) is True
    staging.fails = True
    with pytest.raises(RuntimeError, match="no pinned memory"):
        copies.copy_if_changed(numbers(3, 4))
    staging.fails = False
    assert copies.copy_if_changed(numbers(1, 2)) is True


def test_another_writer_is_seen_where_it_is_looked_for(staging: Staging) -> None:
    buffer = torch.zeros(4, dtype=torch.int32)
    copies = staging.over(buffer)
    copies.copy_if_changed(numbers(1, 2, 3, 4))
    buffer[2] = 77
    assert copies.copy_if_changed(numbers(1, 2)) is False, "what is skipped is right"
    with pytest.raises(ValueCheckError, match="row 2 is 77, where 3 was copied last") as caught:
        copies.copy_if_changed(numbers(1, 2, 3, 4))
    assert "one writer" in str(caught.value)
    assert (caught.value.argument, caught.value.row, caught.value.value) == (
        *("destination", (2,), 77.0),
    )
    copies.forget()
    assert copies.copy_if_changed(numbers(1, 2, 3, 4)) is True
    assert buffer.tolist() == [1, 2, 3, 4]


def test_without_a_check_nothing_is_looked_at(staging: Staging) -> None:
    buffer = torch.zeros(2, dtype=torch.int32)
    copies = staging.over(buffer, check=False)
    copies.copy_if_changed(numbers(1, 2))
    buffer.zero_()
    assert copies.copy_if_changed(numbers(1, 2)) is False
    assert buffer.tolist() == [0, 0]


@pytest.mark.parametrize(("value", "checks"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_checks(
    monkeypatch: pytest.MonkeyPatch, value: str, checks: bool
) -> None:
    monkeypatch.setenv("SPECPLAN_CHECK", value)
    assert HostCopies(torch.zeros(1)).check is checks
    assert HostCopies(torch.zeros(1), check=not checks).check is not checks


def test_a_capture_is_not_checked_and_takes_no_changes(staging: Staging) -> None:
    buffer = torch.zeros(2, dtype=torch.int32)
    copies = staging.over(buffer)
    copies.copy_if_changed(numbers(1, 2))
    buffer[0] = 5
    staging.capturing = True
    assert copies.copy_if_changed(numbers(1, 2)) is False
    with pytest.raises(ColdCaptureError, match="before the capture"):
        copies.copy_if_changed(numbers(3, 2))
    assert buffer.tolist() == [5, 2] and len(staging.made) == 1


def test_a_buffer_has_one_writer() -> None:
    pool = torch.zeros(10, dtype=torch.int32)
    first = HostCopies(pool[:6])
    for overlapping in (pool, pool[:6], pool[5:7], pool.view(torch.uint8)[23:25]):
        with pytest.raises(ValueError, match="one writer"):
            HostCopies(overlapping)
    second = HostCopies(pool[6:])
    assert second.copy_if_changed(numbers(1, 2, 3, 4)) and first.copy_if_changed(numbers(5))
    assert pool.tolist() == [5, 0, 0, 0, 0, 0, 1, 2, 3, 4]
    del first
    gc.collect()
    assert HostCopies(pool[:6]).copy_if_changed(numbers(7))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (numbers(1, 2, 3), "3 values for a buffer of 2"),
        (numbers(1, dtype=torch.int64), r"torch.int64 \(1,\) on cpu, expected a vector of"),
        (numbers(1, 2)[None], r"\(1, 2\)"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), "on meta"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: torch.Tensor, text: str) -> None:
    buffer = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=text):
        HostCopies(buffer).copy_if_changed(values)
    assert buffer.tolist() == [0, 0]


@pytest.mark.parametrize("destination", [torch.zeros(2, 2), torch.zeros(6)[::2]])
def test_destinations_that_are_no_dense_vector_are_refused(destination: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected a dense vector"):
        HostCopies(destination)


def test_values_need_not_be_dense(staging: Staging) -> None:
    buffer = torch.zeros(3, dtype=torch.int32)
    copies = staging.over(buffer)
    assert copies.copy_if_changed(torch.arange(6, dtype=torch.int32)[::2]) is True
    assert copies.copy_if_changed(numbers(0, 2, 4)) is False and buffer.tolist() == [0, 2, 4]


@pytest.mark.parametrize("seed", range(20))
def test_the_buffer_is_what_copying_always_makes_it(seed: int, staging: Staging) -> None:
    chance = Random(seed)
    buffer, plain = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    copies = staging.over(buffer)
    skipped = 0
    for _ in range(60):
        values = numbers(*(chance.randint(0, 1) for _ in range(chance.randint(0, 5))))
        skipped += not copies.copy_if_changed(values)
        plain[: values.numel()] = values
        assert torch.equal(buffer, plain)
    assert 10 < skipped < 55 and len(staging.made) == 60 - skipped

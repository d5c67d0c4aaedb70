"""``load(check=True)`` and ``SPECPLAN_CHECK``: values that only the caller knows, checked by torch
on CPU tensors over stub functions.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import specplan
import torch
from specplan import Uncertified, ValueCheckError
from specplan.checking import Checks
from specplan.plans.families import SIGNATURES
from test_runtime_calls import gather_call, scatter_call

from support import packs
from support.stubs import on_device


def numbers(*values: int) -> torch.Tensor:
    return on_device(torch.tensor(values, dtype=torch.int32))


@pytest.fixture
def checked(pack: specplan.Pack) -> specplan.Pack:
    pack.checks = Checks(True)
    pack.prepare(0)
    for function in pack._packs[packs.ARCH].functions.values():
        function.launches.clear()
    return pack


def launches(pack: specplan.Pack) -> int:
    return sum(len(f.launches) for f in pack._packs[packs.ARCH].functions.values())


def refused(op: Any, **call: Any) -> ValueCheckError:
    with pytest.raises(ValueCheckError) as caught:
        op(**call)
    assert caught.value.reason == "value"
    return caught.value


def test_every_op_declares_what_is_checked() -> None:
    for family, ops in SIGNATURES.items():
        for name, op in ops.items():
            # stage moves words whose values nobody looks at.
            assert op.values or family == "stage", (family, name)
            arguments = {t.name for t in op.tensors} | {p.name for p in op.parameters}
            assert {value.argument for value in op.values} <= arguments


def test_two_live_rows_of_one_slot_are_named(checked: specplan.Pack) -> None:
    for live in ([4, 2, 1, 2], [2, -1, -1, 2]):
        error = refused(checked.scatter, **scatter_call(slots=numbers(*live), rows=4))
        first = live.index(2)
        assert (error.argument, error.row, error.value) == ("slots", (3,), 2)
        assert f"slots in row 3 is 2, as in row {first}" in str(error)
    assert launches(checked) == 0
    assert checked.scatter(**scatter_call(slots=numbers(4, -1, -1, 2), rows=4)) is True
    # Rows that do not move are nobody's.
    assert checked.scatter(**scatter_call(slots=numbers(4, 3, 1, 2, 2), rows=4)) is True


def test_a_value_that_changes_under_a_known_call_is_seen(checked: specplan.Pack) -> None:
    call = scatter_call(slots=numbers(0, 1, 2, 3))
    for _ in range(2):
        assert checked.scatter(**call) is True
    call["slots"][1] = 8
    error = refused(checked.scatter, **call)
    assert "slots in row 1 is 8; the stores have 8 slots" in str(error)
    assert launches(checked) == 2


def test_indices_of_gather(checked: specplan.Pack) -> None:
    call = gather_call()
    assert checked.gather(**call) is True
    for name in ("slots", "pos_indices"):
        wrong = on_device(call[name].clone())
        wrong[1] = 1000
        error = refused(checked.gather, **{**call, name: wrong})
        assert (error.argument, error.row, error.value) == (name, (1,), 1000)
        wrong[1] = -1000
        assert checked.gather(**{**call, name: wrong}) is True


def test_a_bound_launch_is_checked_as_the_buffers_are_then(checked: specplan.Pack) -> None:
    call = scatter_call(slots=numbers(9, 9, 9, 9))
    launch = checked.scatter.bind(**call)
    before = launches(checked)
    with pytest.raises(ValueCheckError):
        launch()
    assert launches(checked) == before


def test_a_declined_call_is_declined_and_not_checked(checked: specplan.Pack) -> None:
    call = scatter_call(slots=numbers(9, 9, 9, 9), row_begin=100)
    assert isinstance(checked.scatter(**call), Uncertified)


def test_a_capture_is_not_checked_and_that_is_said_once(
    checked: specplan.Pack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with caplog.at_level(logging.INFO, "specplan"):
        for _ in range(2):
            assert checked.scatter(**scatter_call(slots=numbers(9, 9, 9, 9))) is True
    (record,) = caplog.records
    assert "not checked while a graph is captured" in record.message


def test_without_it_nothing_is_looked_at(pack: specplan.Pack) -> None:
    assert pack.scatter(**scatter_call(slots=numbers(9, 9, 9, 9))) is True


@pytest.mark.parametrize(
    ("variable", "option", "expected"),
    [(None, None, False), ("1", None, True), ("0", None, False), ("", None, False),
     ("1", False, False), (None, True, True)],
)  # fmt: skip
def test_how_it_is_asked_for(
    small_pack: packs.SmallPack,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    option: bool | None,
    expected: bool,
) -> None:
    monkeypatch.delenv("SPECPLAN_CHECK", raising=False)
    if variable is not None:
        monkeypatch.setenv("SPECPLAN_CHECK", variable)
    assert specplan.load(small_pack.root, arch=packs.ARCH, check=option).checks.enabled is expected

"""Values of ``gdn_replay`` that only the caller knows, under ``check=True``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from specplan import InParts, Pack, ValueCheckError
from specplan.checking import Checks
from specplan.kernels.gdn_replay.cases import GdnCase

import reference_pack
from reference_pack import ARCH
from support.shared import Shared

NARROW = {"key_heads": 1, "value_heads": 2}
OPS = ("verify", "advance", "materialize", "reset")


@pytest.fixture
def pack(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pack:
    directory = reference_pack.built(shared)
    loaded, _ = reference_pack.reference_pack(directory, tmp_path / "recorder", monkeypatch)
    loaded.checks = Checks(True)
    loaded.prepare(0)
    return loaded


def call_of(op: str, requests: int = 4) -> dict[str, Any]:
    case = GdnCase("x", op, NARROW, requests, 4, 1, "bf16", "cpu")
    case.refill(2)
    call = {**case.arguments(), **({"splits": None} if op == "verify" else {})}
    tensors = {**case.step.tensors, **case.step.integers}
    for name in ("slot", "src"):
        tensors[name].copy_(torch.arange(requests))
    tensors["dst"].copy_(tensors["src"])
    tensors["n_acc"].fill_(2)
    tensors["hist_len"].fill_(5)
    tensors["bank"].zero_()
    tensors["count"].fill_(5)
    return {**call, "all": tensors}


#: op, tensor, row, value, and what is said.
WRONG = [
    ("verify", "slot", 1, 9, "slot in row 1 is 9; the pools have 5 slots, -1 for padding"),
    ("verify", "slot", 1, -2, "slot in row 1 is -2"),
    ("verify", "slot", 3, 0, "slot in row 3 is 0, as in row 0; no two live rows"),
    ("verify", "hist_len", 2, 17, "hist_len in row 2 is 17; of its slot it is 0..16"),
    ("verify", "bank", 2, 2, "bank in row 2 is 2"),
    ("advance", "slot", 3, 0, "slot in row 3 is 0, as in row 0"),
    ("advance", "n_acc", 1, 5, "n_acc in row 1 is 5; accepted tokens are 0..4"),
    ("advance", "n_acc", 1, -1, "n_acc in row 1 is -1"),
    ("advance", "hist_len", 0, -1, "hist_len in row 0 is -1"),
    ("materialize", "src", 1, 5 + 8, "src in row 1 is 13"),
    ("materialize", "dst", 1, 99, "dst in row 1 is 99"),
    ("materialize", "dst", 1, 3, "dst in row 3 is 3, as in row 1; no dst"),
    ("materialize", "count", 1, 6, "count in row 1 is 6; a count is 0..hist_len"),
    ("materialize", "bank", 1, -1, "bank in row 1 is -1"),
    ("reset", "slot", 1, 9, "slot in row 1 is 9"),
]


@pytest.mark.parametrize("op", OPS)
def test_right_values_pass_with_padding_among_them(pack: Pack, op: str) -> None:
    call = call_of(op)
    tensors = call.pop("all")
    assert getattr(pack.gdn_replay, op)(**call) is True
    for name in ("slot", "src", "dst"):
        tensors[name][1::2] = -1
    # What belongs to no row may be anything.
    tensors["hist_len"][1] = tensors["bank"][1] = tensors["n_acc"][1] = 99
    tensors["count"][1] = 99
    assert getattr(pack.gdn_replay, op)(**call) is True


@pytest.mark.parametrize(("op", "name", "row", "value", "said"), WRONG)
def test_a_wrong_value_is_named(
    pack: Pack, op: str, name: str, row: int, value: int, said: str
) -> None:
    call = call_of(op)
    tensors = call.pop("all")
    tensors[name][row] = value
    functions = pack._packs[ARCH].functions.values()
    before = sum(len(f.launches) for f in functions)
    with pytest.raises(ValueCheckError, match=said) as caught:
        getattr(pack.gdn_replay, op)(**call)
    assert caught.value.argument == name
    assert caught.value.value == value
    assert sum(len(f.launches) for f in functions) == before


def test_a_dst_that_another_row_reads_is_named(pack: Pack) -> None:
    call = call_of("materialize")
    tensors = call.pop("all")
    # Row 0 writes into the slot that row 1 reads, and row 1 into another.
    tensors["dst"][:2] = torch.tensor([1, 4])
    with pytest.raises(ValueCheckError, match=r"dst in row 0 is 1; no dst is another row's src"):
        pack.gdn_replay.materialize(**call)


def test_rows_of_two_parts_are_checked_together(pack: Pack) -> None:
    call = call_of("verify", 68)
    tensors = call.pop("all")
    assert isinstance(pack.gdn_replay.verify(**call), InParts)
    tensors["slot"][66] = 3
    for run in (pack.gdn_replay.verify, pack.gdn_replay.verify.bind(**call)):
        with pytest.raises(ValueCheckError, match="slot in row 66 is 3, as in row 3"):
            run(**call) if run is pack.gdn_replay.verify else run()

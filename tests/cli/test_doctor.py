"""``specplan doctor``: facts for a bug report, and what is wrong with this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from specplan.plans.version import VERSION

import synthetic


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> synthetic.Place:
    """A whole pack, and one whose shared object was cut."""
    place = synthetic.place(tmp_path_factory.mktemp("place"))
    path = place.object("sm_100a", "gather")
    path.write_bytes(path.read_bytes()[:-3])
    return place


@pytest.fixture(scope="module")
def examined(damaged: synthetic.Place) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "specplan.tools.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "SPECPLAN_PACKS": str(damaged.packs),
            "XDG_DATA_HOME": str(damaged.packs.parent / "nothing"),
        },
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_without_a_gpu_it_exits_1_and_says_so(examined: tuple[int, dict[str, Any]]) -> None:
    code, report = examined
    assert code == 1
    assert report["devices"] == "none"
    assert "torch sees no CUDA device" in report["complaints"]


def test_it_has_what_a_bug_report_needs(examined: tuple[int, dict[str, Any]]) -> None:
    _, report = examined
    assert report["specplan"] == VERSION
    assert report["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert os.uname().machine in report["host"]
    for name in ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl", "driver", "runtime library"):
        assert report[name], name
    assert "sm_90a/scatter.yaml" in report["certificates"].split(", ")


def test_it_names_the_packs_of_every_place_that_is_searched(
    examined: tuple[int, dict[str, Any]], damaged: synthetic.Place
) -> None:
    _, report = examined
    places = {name: value for name, value in report.items() if name.startswith("packs in ")}
    assert len(places) == 3
    named = places[f"packs in {damaged.packs}"]
    assert named == (
        "sm_100a (5 plans, 0 certified cells), sm_90a (5 plans, 32 certified cells) "
        "[$SPECPLAN_PACKS]"
    )
    per_user = f"packs in {damaged.packs.parent / 'nothing' / 'specplan' / 'packs'}"
    assert places[per_user] == "none [the per-user directory]"


def test_it_names_the_file_that_is_damaged(
    examined: tuple[int, dict[str, Any]], damaged: synthetic.Place
) -> None:
    _, report = examined
    path = damaged.object("sm_100a", "gather")
    assert any(complaint.startswith(f"{path} has ") for complaint in report["complaints"])


def test_the_text_lists_the_same_complaints(
    damaged: synthetic.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specplan.tools import doctor

    monkeypatch.setattr(doctor, "examine", lambda: ({"a": "1", "longer": "2"}, ["this", "that"]))
    ran = synthetic.specplan("doctor")
    assert ran.code == 1
    assert ran.out == "a       1\nlonger  2\nwrong: this\nwrong: that\n"
    monkeypatch.setattr(doctor, "examine", lambda: ({"a": "1"}, []))
    assert synthetic.specplan("doctor").code == 0

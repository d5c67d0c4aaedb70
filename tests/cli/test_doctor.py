"""``specplan doctor``: facts for a bug report, and what is wrong with this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import manifest
from specplan.plans.version import VERSION

from support import packs, synthetic


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


def test_without_a_gpu_it_says_so_and_has_no_complaint_about_it(
    examined: tuple[int, dict[str, Any]],
) -> None:
    code, report = examined
    assert code == 1  # for the damaged file
    assert report["devices"] == "none: torch sees no CUDA device"
    assert not any("CUDA device" in complaint for complaint in report["complaints"])


def test_builders_without_a_gpu_are_told_that_all_is_well(tmp_path: Path) -> None:
    place = local_place(tmp_path)
    for named in (place.packs, place.packs / "sm_90a"):
        ran = synthetic.specplan("doctor", named)
        assert ran.code == 0, ran.out
        assert "5 plans, 32 certified cells) [as given]" in ran.out
    assert synthetic.specplan("doctor", "--packs", place.packs).code == 0
    assert synthetic.specplan("doctor", place.packs, "--packs", place.packs).code == 2


def local_place(root: Path) -> synthetic.Place:
    """Packs of sm_90a with the certificates beside them."""
    place = synthetic.place(root, archs=("sm_90a",))
    place.certificates.rename(place.packs / "sm_90a" / "certificates")
    return place


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda pack: {"hosts": {"riscv64": next(iter(pack.hosts.values()))}},
            "has libraries for riscv64, this host is",
        ),
        (lambda pack: {"arch": "sm_100a"}, "holds a pack for sm_100a, not for sm_90a"),
    ],
)
def test_it_finds_what_a_load_would_refuse(
    tmp_path: Path, change: Callable[[manifest.Manifest], dict[str, Any]], said: str
) -> None:
    from specplan.loading import refusal

    place = local_place(tmp_path)
    directory = place.packs / "sm_90a"
    packs.rewrite(directory, **change(manifest.read(directory)))
    error = refusal(place.packs / "sm_90a", "sm_90a")
    assert said in str(error)
    ran = synthetic.specplan("doctor", "--packs", place.packs)
    assert ran.code == 1
    assert f"wrong: {error}" in ran.out.splitlines()


def test_it_finds_marks_that_nothing_backs(tmp_path: Path) -> None:
    place = synthetic.place(tmp_path, archs=("sm_90a",))
    ran = synthetic.specplan("doctor", "--packs", place.packs)
    assert ran.code == 1
    directory = place.packs / "sm_90a"
    assert f"wrong: {directory} marks 32 cells certified that no certificate backs" in ran.out
    assert "5 plans, 0 certified cells" in ran.out


def test_it_finds_packs_that_everybody_may_write(tmp_path: Path) -> None:
    place = local_place(tmp_path)
    directory = place.packs / "sm_90a"
    directory.chmod(0o777)
    ran = synthetic.specplan("doctor", "--packs", place.packs)
    assert ran.code == 1
    assert f"everybody may write {directory} (mode 777): chmod o-w {directory}" in ran.out
    directory.chmod(0o1777)
    assert synthetic.specplan("doctor", "--packs", place.packs).code == 1
    directory.chmod(0o755)
    library = place.object("sm_90a", "gather")
    library.chmod(0o646)
    assert f"everybody may write {library}" in synthetic.specplan("doctor", directory).out


def test_it_has_what_a_bug_report_needs(examined: tuple[int, dict[str, Any]]) -> None:
    _, report = examined
    assert report["specplan"] == VERSION
    assert report["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert os.uname().machine in report["host"]
    for name in ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl", "driver", "tvm-ffi"):
        assert report[name], name
    assert "sm_90a/scatter.yaml" in report["certificates"].split(", ")


def test_it_names_the_packs_of_every_place_that_is_searched(
    examined: tuple[int, dict[str, Any]], damaged: synthetic.Place
) -> None:
    _, report = examined
    places = {name: value for name, value in report.items() if name.startswith("packs in ")}
    assert [value.rpartition("[")[2] for value in places.values()] == [
        "$SPECPLAN_PACKS]",
        "the checkout]",
        "the installed wheel]",
        "the per-user directory]",
    ]
    named = places[f"packs in {damaged.packs}"]
    # The certificates are neither this installation's nor beside the pack.
    assert named == (
        "sm_100a (5 plans, 0 certified cells), sm_90a (5 plans, 0 certified cells) "
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

    found = {"a": "1", "longer": "2"}, ["this", "that"]
    monkeypatch.setattr(doctor, "examine", lambda packs: found)
    ran = synthetic.specplan("doctor")
    assert ran.code == 1
    assert ran.out == "a       1\nlonger  2\nwrong: this\nwrong: that\n"
    monkeypatch.setattr(doctor, "examine", lambda packs: ({"a": "1"}, []))
    assert synthetic.specplan("doctor").code == 0

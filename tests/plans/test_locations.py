"""Where packs are looked for: a load and the commands take the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from specplan.plans import locations

from support import synthetic
from support.synthetic import specplan

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_checkout_is_known_by_the_package_that_runs_and_not_by_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locations.checkout_directory() == ROOT / "packs"
    monkeypatch.chdir(tmp_path)
    assert locations.checkout_directory() == ROOT / "packs"
    # An installed package in a directory that looks like a checkout: its own place decides.
    installed = tmp_path / "site-packages" / "specplan" / "plans" / "locations.py"
    installed.parent.mkdir(parents=True)
    for name in ("pyproject.toml", "build_plans.py", "kernels"):
        (tmp_path / name).touch()
    monkeypatch.setattr(locations, "__file__", str(installed))
    assert locations.checkout_directory() is None


def test_the_checkout_comes_after_the_environment_and_before_the_wheel_and_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(locations.ENVIRONMENT, str(tmp_path / "named"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert locations.search_path() == [
        ("$SPECPLAN_PACKS", tmp_path / "named"),
        ("the checkout", ROOT / "packs"),
        ("the installed wheel", locations.packaged_directory()),
        ("the per-user directory", tmp_path / "data" / "specplan" / "packs"),
    ]
    assert locations.build_directory() == tmp_path / "named"
    monkeypatch.delenv(locations.ENVIRONMENT)
    assert locations.build_directory() == ROOT / "packs"
    monkeypatch.setattr(locations, "checkout_directory", lambda: None)
    assert locations.build_directory() == tmp_path / "data" / "specplan" / "packs"


def test_commands_take_each_archs_pack_from_the_first_place_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``specplan.load`` does: one arch in the checkout, the other in the user's directory."""
    monkeypatch.delenv(locations.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(locations, "checkout_directory", lambda: tmp_path / "checkout")
    place = synthetic.place(tmp_path / "made")
    user = tmp_path / "data" / "specplan" / "packs"
    (tmp_path / "checkout").mkdir()
    user.mkdir(parents=True)
    (place.packs / "sm_100a").rename(user / "sm_100a")
    (place.packs / "sm_90a").rename(tmp_path / "checkout" / "sm_90a")
    assert locations.packs_at_hand() == {
        "sm_90a": tmp_path / "checkout" / "sm_90a",
        "sm_100a": user / "sm_100a",
    }
    rest = place.options[2:]
    ran = specplan("coverage", *rest)
    assert (ran.code, ran.err) == (0, "")
    assert {line.split()[1] for line in ran.out.splitlines()[1:-1]} == {"sm_90a", "sm_100a"}
    for arch in ("sm_90a", "sm_100a"):
        asked = ("scatter", "requests=1", "tokens=1", "problem=small", "--arch", arch)
        assert "missing" not in specplan("explain", *asked, *rest).out

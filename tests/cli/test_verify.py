"""``specplan verify``: a pack is what its manifest describes, or the file that is not is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from specplan.plans import manifest

from support import synthetic
from support.synthetic import Place, Ran, specplan


def verify(place: Place, *arguments: str) -> Ran:
    where = ("--packs", place.packs, "--certificates", place.certificates)
    return specplan("verify", *where, *arguments)


def test_whole_packs_are_whole(place: Place) -> None:
    ran = verify(place)
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == [
        f"{arch}: whole ({place.packs / arch})" for arch in ("sm_100a", "sm_90a")
    ]


def test_one_pack_may_be_named(place: Place) -> None:
    for named in ((place.packs / "sm_90a",), ("--packs", place.packs / "sm_90a")):
        ran = specplan("verify", *named, "--certificates", place.certificates)
        assert (ran.code, ran.out) == (0, f"sm_90a: whole ({place.packs / 'sm_90a'})\n")
    ran = specplan("verify", place.packs, "--certificates", place.certificates)
    assert (ran.code, len(ran.out.splitlines())) == (0, 2)


def test_the_json_lists_what_is_wrong_by_arch(place: Place) -> None:
    path = place.object("sm_90a", "gather")
    path.unlink()
    ran = verify(place, "--json")
    assert ran.code == 1
    body = json.loads(ran.out)
    assert list(body) == ["packs", "archs"]
    assert body["packs"] == str(place.packs)
    assert body["archs"] == {
        "sm_100a": [],
        "sm_90a": [f"{path} cannot be read (No such file or directory)"],
    }


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_object_is_corrupt(place: Place, length: int) -> None:
    path = place.object("sm_90a", "scatter")
    data = path.read_bytes()
    path.write_bytes(data[:length])
    ran = verify(place)
    assert ran.code == 1
    assert f"sm_90a: corrupt ({place.packs / 'sm_90a'})" in ran.out.splitlines()
    assert f"sm_100a: whole ({place.packs / 'sm_100a'})" in ran.out.splitlines()
    size = len(data[:length])
    assert ran.err.split("\n")[0] == f"  {path} has {size} bytes, the manifest says {len(data)}"


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 1.0])
def test_a_flipped_bit_is_corrupt(place: Place, part: float) -> None:
    path = place.object("sm_90a", "scatter")
    data = bytearray(path.read_bytes())
    data[round(part * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    ran = verify(place)
    assert ran.code == 1
    assert ran.err.startswith(f"  {path} has sha256 ")


def test_an_edited_manifest_is_corrupt(place: Place) -> None:
    path = place.packs / "sm_90a" / "manifest.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"spills": 0', '"spills": 1', 1), encoding="utf-8"
    )
    ran = verify(place)
    assert ran.code == 1
    assert f"{path}: does not match its own digest" in ran.err


def test_device_code_that_the_manifest_does_not_name_is_corrupt(place: Place) -> None:
    """Sizes and hashes fit, and still the code inside is not what a certificate would bind to."""
    directory = place.packs / "sm_90a"
    pack = manifest.read(directory)
    symbol = next(s for s, plan in pack.plans.items() if plan.family == "scatter")
    plans = {**pack.plans, symbol: replace(pack.plans[symbol], device_code="0" * 64)}
    synthetic.write_manifest(directory, replace(pack, plans=plans))
    ran = verify(place)
    assert ran.code == 1
    assert ran.err == (
        f"  {pack.objects['scatter'].file} holds other device code than its manifest names "
        "(1 missing, 1 unknown)\n"
    )


def test_no_pack_exits_1(place: Place, tmp_path: Path) -> None:
    ran = specplan("verify", "--packs", tmp_path / "nowhere")
    assert ran.code == 1
    assert ran.err == f"error: no pack under {tmp_path / 'nowhere'}\n"


def test_wrong_use_exits_2(place: Place) -> None:
    assert verify(place, "sm_90a").code == 2
    assert verify(place, "--arch", "sm_90a").code == 2


def test_the_environment_names_the_packs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPLAN_PACKS", str(place.packs))
    ran = specplan("verify", "--certificates", place.certificates)
    assert ran.code == 0
    assert str(place.packs / "sm_90a") in ran.out

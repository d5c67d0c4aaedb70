"""A build says how many of the cells that it built are certified, and where claims do not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from specplan.plans import certificates
from specplan.tools.build import claims, keys

from support import packs


def built(
    pack: packs.SmallPack, tmp_path: Path, cli: packs.Cli, *options: str, spoil: bool = False
) -> tuple[int, str, str]:
    """Bring a copy of the small pack up to date; ``spoil``: without gather's certificate."""
    root = pack.copy(tmp_path / "packs")
    evidence = tmp_path / "certificates"
    evidence.mkdir()
    if spoil:
        (root / packs.ARCH / "certificates" / packs.ARCH / "gather.yaml").unlink()
    where = ("--catalog", pack.catalog, "--out", root, "--certificates", evidence)
    done = cli("build", *where, *options)
    return done.returncode, done.stdout, done.stderr


def test_the_counts_are_those_of_coverage(
    small_pack: packs.SmallPack, tmp_path: Path, cli: packs.Cli
) -> None:
    code, out, error = built(small_pack, tmp_path, cli, "--strict")
    assert code == 0 and error == ""
    # scatter: 4 x 4 and 4 x 8 certified, 4 candidates; gather: 4 x 3 certified, 3 candidates.
    assert "(cells: 60 certified, 7 candidate)" in out
    where = ("--packs", tmp_path / "packs", "--catalog", small_pack.catalog)
    summary = json.loads(
        cli("coverage", *where, "--certificates", tmp_path / "certificates", "--json").stdout
    )["summary"]
    counted: dict[str, int] = {}
    for archs in summary.values():
        for state, number in archs[packs.ARCH].items():
            counted[state] = counted.get(state, 0) + number
    assert counted == {"certified": 60, "candidate": 7}


def test_a_build_whose_claims_do_not_hold_says_so(
    small_pack: packs.SmallPack, tmp_path: Path, cli: packs.Cli
) -> None:
    code, out, error = built(small_pack, tmp_path, cli, spoil=True)
    assert code == 0
    assert "(cells: 48 certified, 19 candidate)" in out
    assert "warning: claims do not hold" in error and "sm_90a gather: 12" in error


def test_strict_makes_it_the_exit_code(
    small_pack: packs.SmallPack, tmp_path: Path, cli: packs.Cli
) -> None:
    code, out, error = built(small_pack, tmp_path, cli, "--strict", "--json", spoil=True)
    assert code == 1
    assert error.startswith("error: claims do not hold")
    report = json.loads(out)
    assert report["cells"] == {packs.ARCH: {"certified": 48, "candidate": 19}}
    assert report["holds"] is False


def test_a_certificate_of_other_bits_makes_stale_cells(
    small_pack: packs.SmallPack, tmp_path: Path, cli: packs.Cli
) -> None:
    root = small_pack.copy(tmp_path / "packs")
    evidence = tmp_path / "certificates"
    evidence.mkdir()
    path = root / packs.ARCH / "certificates" / packs.ARCH / "gather.yaml"
    certificate = certificates.read(path)
    others = {
        symbol: replace(plan, device_code="0" * 64) for symbol, plan in certificate.plans.items()
    }
    certificates.write(path, replace(certificate, plans=others))
    done = cli(
        *("build", "--catalog", small_pack.catalog, "--out", root, "--certificates", evidence)
    )
    assert "(cells: 48 certified, 7 candidate, 12 stale)" in done.stdout
    assert "sm_90a gather: 12" in done.stderr


def test_an_unknown_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {packs.ARCH: claims.Count({}, {"gather": 12})}
    assert "Python" not in str(claims.complaint(Path("packs"), counts))
    monkeypatch.setattr(keys, "is_known_python", lambda: False)
    monkeypatch.setattr(keys, "python", lambda: "3.14")
    said = str(claims.complaint(Path("packs"), counts))
    assert "this is Python 3.14" in said and "3.11 to 3.13" in said
    assert claims.complaint(Path("packs"), {packs.ARCH: claims.Count({}, {})}) is None

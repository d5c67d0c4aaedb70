"""``specplan gc``: what a manifest refers to stays, what is young stays, the rest goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from specplan.plans import manifest
from specplan.tools.build.keys import digest

from synthetic import Place, Ran, specplan

OLD = 10_000


def gc(place: Place, *arguments: str) -> Ran:
    return specplan("gc", "--packs", place.packs, *arguments)


def write(path: Path, age: int, data: bytes = b"x" * 500_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def files(place: Place) -> set[Path]:
    return {path for path in place.packs.rglob("*") if path.is_file()}


@pytest.fixture
def kept(place: Place) -> set[Path]:
    """Everything that the manifests refer to, all of it old."""
    for arch in ("sm_90a", "sm_100a"):
        for plan in manifest.read(place.packs / arch).plans.values():
            for ending in ("o", "json"):
                write(place.packs / "objects" / f"{digest(plan.key)}.{ending}", OLD, b"kept")
    for path in files(place):
        write(path, OLD, path.read_bytes())
    return files(place)


def test_referenced_files_stay_however_old(place: Place, kept: set[Path]) -> None:
    # An arch has 5 plans with two files each, 2 shared objects and a manifest.
    assert len(kept) == 2 * (2 * 5 + 2 + 1)
    ran = gc(place)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"deleted 0 files, 0.0 MB, under {place.packs}\n"
    assert files(place) == kept


def dead_files(place: Place, age: int) -> set[Path]:
    objects, arch = place.packs / "objects", place.packs / "sm_90a"
    return {
        write(objects / f"{'a' * 64}.o", age),
        write(objects / f"{'a' * 64}.json", age),
        write(objects / ".b.17.o.tmp", age),
        write(arch / f"scatter-{'c' * 16}.so", age),
        write(arch / ".scatter.17.tmp.so", age),
        write(arch / ".manifest.json.17.tmp", age),
    }


def test_old_files_without_a_reference_go_and_are_counted_once(
    place: Place, kept: set[Path]
) -> None:
    dead = dead_files(place, OLD)
    assert len(dead) == 6
    ran = gc(place)
    assert ran.out == f"deleted 6 files, 3.0 MB, under {place.packs}\n"
    assert files(place) == kept


def test_young_files_stay(place: Place, kept: set[Path]) -> None:
    young = dead_files(place, 0)
    assert gc(place).out.startswith("deleted 0 files")
    assert files(place) == kept | young
    assert gc(place, "--older-than", "20000").out.startswith("deleted 0 files")
    assert gc(place, "--older-than", "-1").out.startswith("deleted 6 files")
    assert files(place) == kept


def test_a_dry_run_deletes_nothing(place: Place, kept: set[Path]) -> None:
    dead = dead_files(place, OLD)
    ran = gc(place, "--dry-run")
    assert ran.out == f"would delete 6 files, 3.0 MB, under {place.packs}\n"
    assert files(place) == kept | dead


def test_certificates_logs_and_foreign_files_stay(place: Place, kept: set[Path]) -> None:
    others = {
        write(place.packs / "sm_90a" / "certificates" / "sm_90a" / "scatter.yaml", OLD),
        write(place.packs / "logs" / "scatter.log", OLD),
        write(place.packs / "notes.txt", OLD),
    }
    assert gc(place).out.startswith("deleted 0 files")
    assert files(place) == kept | others


def test_a_broken_manifest_stops_it_before_anything_is_deleted(
    place: Place, kept: set[Path]
) -> None:
    dead = dead_files(place, OLD)
    (place.packs / "sm_100a" / "manifest.json").write_text("{", encoding="utf-8")
    ran = gc(place)
    assert ran.code == 1
    assert "nothing was deleted" in ran.err
    assert files(place) == kept | dead


def test_a_file_that_another_takes_away_meanwhile_is_not_counted_and_no_error(
    place: Place, kept: set[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = dead_files(place, OLD)
    gone = sorted(dead)[2]
    real = Path.glob

    def glob(self: Path, pattern: str) -> list[Path]:
        found = list(real(self, pattern))
        if gone in found:
            gone.unlink()
        return found

    monkeypatch.setattr(Path, "glob", glob)
    ran = gc(place)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"deleted 5 files, 2.5 MB, under {place.packs}\n"
    assert files(place) == kept


def test_wrong_use_exits_2(place: Place) -> None:
    assert gc(place, "--older-than", "soon").code == 2

"""``specplan gc``: what a manifest refers to stays, what is young stays, the rest goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from specplan.plans import manifest
from specplan.plans.hosts import HOSTS
from specplan.tools.build.keys import object_name

from support.synthetic import Place, Ran, specplan

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
    found = {path for path in place.packs.rglob("*") if path.is_file()}
    return found - {place.packs / ".lock"}


@pytest.fixture
def kept(place: Place) -> set[Path]:
    """Everything that the manifests refer to, all of it old."""
    for arch in ("sm_90a", "sm_100a"):
        for plan in manifest.read(place.packs / arch).plans.values():
            for host in plan.objects:
                name = object_name(plan.key, HOSTS[host])
                for ending in ("o", "json"):
                    write(place.packs / "objects" / f"{name}.{ending}", OLD, b"kept")
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
        write(objects / f".{'b' * 64}.17.o.tmp", age),
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
    real = Path.iterdir

    def iterdir(self: Path) -> list[Path]:
        found = list(real(self))
        if gone in found:
            gone.unlink()
        return found

    monkeypatch.setattr(Path, "iterdir", iterdir)
    ran = gc(place)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"deleted 5 files, 2.5 MB, under {place.packs}\n"
    assert files(place) == kept


def test_wrong_use_exits_2(place: Place) -> None:
    assert gc(place, "--older-than", "soon").code == 2


# What is not specplan's


def test_files_of_other_names_stay_and_are_spoken_of(place: Place, kept: set[Path]) -> None:
    arch, objects = place.packs / "sm_90a", place.packs / "objects"
    foreign = {
        write(arch / "libcuda.so", OLD),
        write(arch / "scatter-mine.so", OLD),
        write(arch / f"other-{'c' * 16}.so", OLD),
        write(arch / ".notes.tmp", OLD),
        write(objects / "main.o", OLD),
        write(objects / "index.json", OLD),
        write(objects / "pack" / f"{'a' * 64}.o", OLD),
        write(place.packs / "lib" / f"scatter-{'c' * 16}.so", OLD),
    }
    dead = dead_files(place, OLD)
    (arch / f"gather-{'d' * 16}.so").symlink_to(write(place.packs.parent / "far.so", OLD))
    ran = gc(place)
    assert ran.code == 0
    first, second = ran.out.splitlines()
    assert first.startswith("deleted 6 files")
    assert second.startswith("left alone 6 files that no build names so, such as ")
    assert not any(path.exists() for path in dead)
    left = files(place)
    assert kept | foreign <= left
    assert (arch / f"gather-{'d' * 16}.so").is_symlink()
    assert (place.packs.parent / "far.so").exists()


def test_a_directory_without_a_pack_is_not_touched(place: Place, tmp_path: Path) -> None:
    """Names of specplan's own form, in a directory that is somebody else's."""
    wrong = tmp_path / "wrong"
    there = {
        write(wrong / "objects" / f"{'a' * 64}.o", OLD),
        write(wrong / "sm_90a" / f"scatter-{'c' * 16}.so", OLD),
    }
    ran = specplan("gc", "--packs", wrong)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: no pack under {wrong}; nothing was deleted\n"
    assert all(path.exists() for path in there)
    assert {path for path in wrong.rglob("*") if path.is_file()} == there


def test_it_waits_for_a_build(place: Place, kept: set[Path]) -> None:
    """The build's own lock, held by another process."""
    import subprocess
    import sys

    hold = (
        "import filelock, sys, time\n"
        "with filelock.FileLock(sys.argv[1]):\n"
        "    print('held', flush=True); time.sleep(3); print('done', flush=True)\n"
    )
    command = [sys.executable, "-c", hold, str(place.packs / ".lock")]
    dead = dead_files(place, OLD)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        ran = gc(place)
        assert holder.stdout.readline() == "done\n"
    assert ran.err == f"a build holds {place.packs}; waiting for it\n"
    assert ran.out.startswith("deleted 6 files")
    assert not any(path.exists() for path in dead)


def test_what_may_not_be_deleted_is_named(
    place: Place, kept: set[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = dead_files(place, OLD)
    real = Path.unlink
    stuck = place.packs / "objects" / f"{'a' * 64}.o"

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self == stuck:
            raise PermissionError(13, "Permission denied", str(self))
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    ran = gc(place)
    assert ran.code == 1
    assert ran.out.startswith("deleted 5 files")
    assert ran.err == f"error: not deleted: {stuck}: Permission denied\n"
    assert [path for path in dead if path.exists()] == [stuck]


def test_without_permission_for_the_lock_nothing_is_deleted(
    place: Place, kept: set[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specplan.tools import locking

    def refused(path: str, *arguments: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    dead = dead_files(place, OLD)
    monkeypatch.setattr(locking.os, "open", refused)
    ran = gc(place)
    assert (ran.code, ran.out) == (1, "")
    said = f"{place.packs / '.lock'}: Permission denied; nothing was deleted"
    assert ran.err == f"error: {said}\n"
    assert all(path.exists() for path in dead)


def test_a_pack_may_be_named_by_itself(place: Place, kept: set[Path]) -> None:
    dead = dead_files(place, OLD)
    ran = specplan("gc", place.packs / "sm_90a")
    assert ran.code == 0
    assert ran.out.startswith("deleted 3 files")
    assert {path for path in dead if path.exists()} == {
        path for path in dead if path.parent.name == "objects"
    }

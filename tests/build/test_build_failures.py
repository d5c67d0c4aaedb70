"""Builds that go wrong: plans that fail, builders that are killed or crowded, disks that are full
or read-only.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from specplan.plans import manifest
from specplan.plans.hosts import this_machine

from support import packs

REPLAY = Path(__file__).with_name("replay.py")


def replayed(
    pack: packs.SmallPack, out: Path, *more: str, seconds: float = 0.0, locks: bool = True
) -> list[str]:
    """A build of the small catalog in which the compiler's answers come from the pack that was
    built before.
    """
    return [
        *(sys.executable, str(REPLAY), str(pack.root), str(seconds)),
        *("locks" if locks else "no-locks", "build", "--catalog", str(pack.catalog)),
        *("--out", str(out), "--certificates", str(pack.directory / "certificates"), *more),
    ]


def names(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


# Plans that fail


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources in which one plan of gather raises and the other's worker dies."""
    sources = packs.tree(tmp_path_factory.mktemp("failing"))
    kernel = sources / "specplan" / "kernels" / "gather" / "kernel.py"
    head = "    if plan.int('lanes') == 2:\n"
    head += "        raise ValueError('a plan that cannot be lowered')\n"
    head += "    import os, signal, sys\n    print('last words', flush=True)\n"
    head += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    start = '    """The host function of a plan and its fake arguments, for ``cute.compile``."""\n'
    text = kernel.read_text()
    assert start in text
    kernel.write_text(text.replace(start, start + head))
    return sources


def test_without_keep_going_a_failed_plan_leaves_the_old_pack(
    small_pack: packs.SmallPack, cli: packs.Cli, failing: Path, tmp_path: Path
) -> None:
    root = small_pack.copy(tmp_path / "pack")
    before = packs.contents(root / packs.ARCH)
    done = cli(
        *("build", "--catalog", small_pack.catalog, "--out", root, "--jobs", "1"),
        env=packs.path_of(failing),
    )
    assert done.returncode == 1
    assert (
        "failed: gather__next4__draft3__lanes2__sm_90a: ValueError: a plan that cannot"
        in done.stderr
    )
    assert packs.contents(root / packs.ARCH) == before
    packs.whole(root)


def test_with_keep_going_the_other_plans_are_built_and_logs_say_why(
    small_pack: packs.SmallPack, cli: packs.Cli, failing: Path, tmp_path: Path
) -> None:
    root = tmp_path / "pack"
    (root / "objects").mkdir(parents=True)
    from specplan.plans.hosts import HOSTS
    from specplan.tools.build import keys

    for plan in small_pack.manifest.plans.values():
        # One plan of scatter is there already; the other is compiled by the worker that replaces a
        # dead one.
        if plan.family == "scatter" and dict(plan.spec)["history"] == 4:
            for end in ("o", "json"):
                name = f"{keys.object_name(plan.key, HOSTS[this_machine()])}.{end}"
                (root / "objects" / name).write_bytes(
                    (small_pack.root / "objects" / name).read_bytes()
                )
    done = cli(
        *("build", "--catalog", small_pack.catalog, "--out", root, "--jobs", "1"),
        *("--keep-going", "--json"),
        env=packs.path_of(failing),
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    failed = {f["symbol"].split("__")[3]: f for f in report["failed"]}
    assert set(failed) == {"lanes2", "lanes4"}
    assert (report["compiled"], report["reused"], report["linked"]) == (1, 1, 1)
    assert failed["lanes2"]["error"] == "ValueError: a plan that cannot be lowered"
    log = Path(failed["lanes2"]["log"]).read_text()
    assert "Traceback" in log
    assert "a plan that cannot be lowered" in log
    assert "killed by signal 9" in failed["lanes4"]["error"]
    assert "last words" in Path(failed["lanes4"]["log"]).read_text()
    pack = packs.whole(root)
    assert {plan.family for plan in pack.plans.values()} == {"scatter"}
    assert {cell.family for cell, _ in pack.cells()} == {"scatter"}
    assert pack.objects["scatter"] == small_pack.manifest.objects["scatter"]
    assert not list((root / "objects").glob(".*"))


# Builders that are killed or crowded


def test_a_builder_killed_at_any_moment_leaves_no_pack_or_a_whole_one(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    start = time.monotonic()
    whole = tmp_path / "whole"
    assert packs.run(replayed(small_pack, whole, seconds=0.1)).returncode == 0
    length = time.monotonic() - start
    out = tmp_path / "killed"
    chance = random.Random(20)
    states = []
    for moment in sorted(chance.uniform(0.1, 1.0) for _ in range(10)):
        if "built" in states:
            # Objects are kept from one run to the next; a fresh directory is what takes the whole
            # time.
            out = tmp_path / f"killed-{len(states)}"
        builder = subprocess.Popen(
            replayed(small_pack, out, seconds=0.1),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            builder.wait(moment * length)
        except subprocess.TimeoutExpired:
            os.killpg(builder.pid, signal.SIGKILL)
            builder.wait()
        if (out / packs.ARCH / manifest.NAME).exists():
            assert packs.whole(out) == packs.whole(whole)
            states.append("built")
        else:
            states.append("absent")
    assert "absent" in states
    done = packs.run(replayed(small_pack, out))
    assert done.returncode == 0, done.stderr
    assert packs.whole(out) == packs.whole(whole)


def test_a_builder_killed_over_an_old_pack_leaves_the_old_or_the_new_one(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    """The old pack is of scatter alone, so a table that mixed the two would show."""
    root = tmp_path / "pack"
    done = packs.run(replayed(small_pack, root, "--family", "scatter"))
    assert done.returncode == 0, done.stderr
    old = packs.whole(root)
    chance = random.Random(5)
    for _ in range(4):
        builder = subprocess.Popen(
            replayed(small_pack, root, seconds=0.05),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            builder.wait(chance.uniform(0.3, 1.5))
        except subprocess.TimeoutExpired:
            os.killpg(builder.pid, signal.SIGKILL)
            builder.wait()
        assert packs.whole(root) in (old, small_pack.manifest)
    assert packs.run(replayed(small_pack, root)).returncode == 0
    assert packs.whole(root) == small_pack.manifest


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "useless locks"])
def test_eight_builders_in_one_directory_all_succeed(
    small_pack: packs.SmallPack, tmp_path: Path, locks: bool
) -> None:
    root = tmp_path / "pack"
    # Without locks the compiles must overlap, or nothing is shown.
    seconds = 0.05 if locks else 0.5
    builders = [
        subprocess.Popen(
            replayed(small_pack, root, "--jobs", "2", "--json", seconds=seconds, locks=locks),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    answers = [builder.communicate(timeout=300) for builder in builders]
    assert [b.returncode for b in builders] == [0] * 8, [error for _, error in answers]
    compiled = sorted(json.loads(output)["compiled"] for output, _ in answers)
    if locks:
        assert compiled == [0] * 7 + [4]
    else:
        # Without it some did the same work; if none did, this test shows nothing.
        assert sum(compiled) > 4
    assert packs.whole(root) == small_pack.manifest
    assert not [name for name in names(root) if ".tmp" in name]


def test_a_builder_that_waits_for_another_says_so(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    from filelock import FileLock

    root = tmp_path / "pack"
    root.mkdir()
    with FileLock(root / ".lock"):
        builder = subprocess.Popen(
            replayed(small_pack, root, "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert builder.stderr is not None
        assert "another build holds" in builder.stderr.readline()
        assert not (root / packs.ARCH).exists()
    assert builder.communicate(timeout=60)[0]
    assert builder.returncode == 0


# Disks


@contextmanager
def mounted(at: Path, size: int) -> Iterator[Path]:
    """A small file system of its own, where this user may mount one."""
    at.mkdir()
    done = packs.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)])
    if done.returncode != 0:
        pytest.skip(f"this user may not mount a tmpfs: {done.stderr.strip()}")
    try:
        yield at
    finally:
        packs.run(["umount", "-l", str(at)])


def fill(directory: Path, leave: int) -> Path:
    """Leave so many bytes of a file system free."""
    free = os.statvfs(directory)
    ballast = directory / "ballast"
    ballast.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - leave))
    return ballast


@pytest.mark.parametrize("objects", [0, 1, 2], ids=["object", "second object", "library"])
def test_a_full_disk_is_one_clear_error_and_the_old_pack_stays(
    small_pack: packs.SmallPack, tmp_path: Path, objects: int
) -> None:
    """The disk has room for so many objects of gather, of which there are two, and half of what
    comes next.
    """
    size = max(
        p.objects[this_machine()].size
        for p in small_pack.manifest.plans.values()
        if p.family == "gather"
    )
    with mounted(tmp_path / "disk", 4_000_000) as disk:
        root = disk / "pack"
        done = packs.run(replayed(small_pack, root, "--family", "scatter"))
        assert done.returncode == 0, done.stderr
        old = packs.whole(root)
        ballast = fill(disk, objects * (size + 8_192) + size // 2)
        done = packs.run(replayed(small_pack, root))
        assert done.returncode == 1
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert line == f"error: the disk of {root} is full; the packs that were there are unchanged"
        assert "Traceback" not in done.stderr
        assert packs.whole(root) == old
        ballast.unlink()
        assert packs.run(replayed(small_pack, root)).returncode == 0
        assert packs.whole(root) == small_pack.manifest


def test_a_full_disk_is_named_when_it_is_the_compiler_that_meets_it(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", 1_000_000) as disk:
        root = disk / "pack"
        (root / "objects").mkdir(parents=True)
        (root / "logs").mkdir()
        fill(disk, 8_192)
        done = cli("build", "--catalog", small_pack.catalog, "--out", root, "--jobs", "1")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"error: the disk of {root} is full"), (
            done.stderr
        )
        assert not (root / packs.ARCH).exists()


def test_a_read_only_directory_is_one_clear_error(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", 4_000_000) as disk:
        old = disk / "pack"
        done = packs.run(replayed(small_pack, old, "--family", "scatter"))
        assert done.returncode == 0, done.stderr
        done = packs.run(["mount", "-o", "remount,ro", str(disk)])
        if done.returncode != 0:
            pytest.skip(f"this user may not remount: {done.stderr.strip()}")
        for root in (old, disk / "new"):
            done = packs.run(replayed(small_pack, root))
            assert done.returncode == 1
            assert done.stderr.splitlines() == [
                f"error: {root} is not writable (Read-only file system); "
                "choose another directory with --out"
            ]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_output_that_is_or_lies_under_a_file_is_one_clear_error(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    done = cli("build", "--catalog", small_pack.catalog, "--out", tmp_path / place)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'file'}")
    assert (tmp_path / "file").read_text() == "in the way"

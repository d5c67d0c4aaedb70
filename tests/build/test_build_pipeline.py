"""The build as a command: the same bytes everywhere, nothing done twice, and what it says."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import manifest

from support import packs


def arguments_of(pack: packs.SmallPack, out: Path) -> tuple[str | Path, ...]:
    """A build of the small catalog with the certificates of the fixture and no others."""
    return (
        *("build", "--catalog", pack.catalog, "--out", out, "--json"),
        *("--certificates", pack.directory / "certificates"),
    )


def report_of(done: Any) -> Mapping[str, Any]:
    assert done.returncode == 0, done.stderr + done.stdout
    report: Mapping[str, Any] = json.loads(done.stdout)
    return report


def built(root: Path) -> dict[str, bytes]:
    """What a pack of this arch is read from, by name."""
    return {
        path.name: path.read_bytes() for path in (root / packs.ARCH).iterdir() if path.is_file()
    }


def test_the_report_has_its_shape_and_its_counts(small_pack: packs.SmallPack) -> None:
    report = dict(small_pack.report)
    assert report.pop("seconds") > 0
    assert report == {
        "out": str(small_pack.root),
        "packs": {packs.ARCH: str(small_pack.directory)},
        "planned": 4,
        "compiled": 4,
        "reused": 0,
        "linked": 2,
        "failed": [],
        "cells": {packs.ARCH: {"candidate": 67}},
        "holds": False,
        "spilled": [],
    }


def test_the_manifest_is_complete(small_pack: packs.SmallPack) -> None:
    pack = packs.whole(small_pack.root)
    assert set(pack.objects) == {"scatter", "gather"}
    assert {p.family: p.signature.partition("(")[0] for p in pack.plans.values()} == {
        "scatter": "scatter",
        "gather": "gather",
    }
    for plan in pack.plans.values():
        assert plan.key["arch"] == packs.ARCH
        assert all(len(digest) == 64 for digest in (plan.device_code, plan.host_code))
    text = (small_pack.directory / manifest.NAME).read_text()
    assert str(small_pack.root) not in text
    assert "torch" not in text
    assert sum(1 for _ in pack.cells("scatter")) == 4 * 5 + 8 * 4
    assert sum(group.certified for _, group in pack.cells("scatter")) == 4 * 4 + 8 * 4


def test_another_directory_job_count_and_environment_give_the_same_bytes(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    """The fixture built with all CPUs from the tests' directory; the environment must not reach the
    compiler either.
    """
    (tmp_path / "cwd").mkdir()
    dump = tmp_path / "dump"
    done = cli(
        *("build", "--catalog", small_pack.catalog, "--out", "../again", "--jobs", "1", "--json"),
        *("--certificates", small_pack.directory / "certificates"),
        cwd=tmp_path / "cwd",
        env={
            "CUTE_DSL_ARCH": "sm_100a",
            "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_KEEP_PTX": "1",
            "CUTE_DSL_DUMP_DIR": str(dump),
            "CUTLASS_DSL_OPT_LEVEL": "0",
            "PYTHONHASHSEED": "99",
            "LC_ALL": "C",
        },
    )
    assert report_of(done)["compiled"] == 4
    assert built(tmp_path / "again") == built(small_pack.root)
    assert not dump.exists()
    assert list((tmp_path / "cwd").iterdir()) == []
    objects = {p.name: p.read_bytes() for p in (tmp_path / "again" / "objects").iterdir()}
    assert objects == {p.name: p.read_bytes() for p in (small_pack.root / "objects").iterdir()}


def test_a_second_build_compiles_nothing_and_touches_nothing(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    root = small_pack.copy(tmp_path / "pack")
    before = packs.contents(root)
    done = cli(*arguments_of(small_pack, root))
    report = report_of(done)
    assert (report["compiled"], report["reused"], report["linked"]) == (0, 4, 0)
    assert packs.contents(root) == before


def test_a_changed_family_is_compiled_alone(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    """From a copy of the sources, which has the same keys as the original; then with a comment in
    gather's kernel.
    """
    sources = packs.tree(tmp_path / "sources")
    root = small_pack.copy(tmp_path / "pack")
    arguments = arguments_of(small_pack, root)
    before = packs.contents(root)
    assert report_of(cli(*arguments, env=packs.path_of(sources)))["compiled"] == 0
    assert packs.contents(root) == before

    kernel = sources / "specplan" / "kernels" / "gather" / "kernel.py"
    kernel.write_text(kernel.read_text().replace("THREADS = 128", "THREADS = 64"))
    report = report_of(cli(*arguments, env=packs.path_of(sources)))
    assert (report["compiled"], report["reused"], report["linked"]) == (2, 2, 1)
    after = packs.contents(root)
    kept = {name for name in before if not name.endswith(manifest.NAME) and "logs/" not in name}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    old, new = small_pack.manifest, packs.whole(root)
    assert new.objects["scatter"] == old.objects["scatter"]
    assert new.objects["gather"].sha256 != old.objects["gather"].sha256
    for symbol, plan in new.plans.items():
        if plan.family == "scatter":
            assert plan == old.plans[symbol]
        else:
            assert plan.key["sources"] != old.plans[symbol].key["sources"]
            assert plan.device_code != old.plans[symbol].device_code
    # The bits are no longer those of the certificate.
    certified = {cell.family for cell, group in new.cells() if group.certified}
    assert certified == {"scatter"}


def test_a_damaged_object_or_library_is_made_again(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    root = small_pack.copy(tmp_path / "pack")
    symbol, plan = next(p for p in small_pack.manifest.plans.items() if p[1].family == "gather")
    from specplan.plans.hosts import HOSTS, this_machine
    from specplan.tools.build import keys

    damaged = root / "objects" / f"{keys.object_name(plan.key, HOSTS[this_machine()])}.o"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    library = root / packs.ARCH / small_pack.manifest.objects["scatter"].file
    library.write_bytes(library.read_bytes()[:1000])
    done = cli(*arguments_of(small_pack, root))
    report = report_of(done)
    assert (report["compiled"], report["reused"], report["linked"]) == (1, 3, 1), symbol
    assert built(root) == built(small_pack.root)


def test_a_dry_run_writes_nothing_and_says_what_it_would_do(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    arguments = ("build", "--catalog", small_pack.catalog, "--dry-run")
    missing = tmp_path / "missing"
    report = report_of(cli(*arguments, "--out", missing, "--json"))
    assert (report["planned"], report["compiled"], report["reused"]) == (4, 4, 0)
    assert report["packs"] == {}
    assert not missing.exists()

    root = small_pack.copy(tmp_path / "pack")
    next((root / "objects").glob("*.o")).unlink()
    before = packs.contents(root)
    done = cli(*arguments, "--out", root)
    assert done.returncode == 0
    assert "would compile 1, reused 3" in done.stdout
    assert packs.contents(root) == before


def test_a_family_alone_keeps_what_the_pack_holds_of_others(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    root = small_pack.copy(tmp_path / "pack")
    shutil.rmtree(root / "objects")
    library = root / packs.ARCH / small_pack.manifest.objects["gather"].file
    library.unlink()
    arguments = arguments_of(small_pack, root)
    report = report_of(cli(*arguments, "--family", "gather"))
    assert (report["planned"], report["compiled"], report["linked"]) == (2, 2, 1)
    # No object of scatter is there to link again, so its library, plans and cells can only have
    # been kept. Only a build of all families says from which inputs the pack is.
    assert packs.whole(root).inputs == "" != small_pack.manifest.inputs
    packs.rewrite(root / packs.ARCH, inputs=small_pack.manifest.inputs)
    assert built(root) == built(small_pack.root)


def test_a_family_alone_in_a_new_pack_builds_that_family_only(
    small_pack: packs.SmallPack, cli: packs.Cli, tmp_path: Path
) -> None:
    root = tmp_path / "pack"
    shutil.copytree(small_pack.root / "objects", root / "objects")
    done = cli(
        *("build", "--catalog", small_pack.catalog, "--out", root, "--family", "scatter", "--json")
    )
    assert report_of(done)["planned"] == 2
    pack = packs.whole(root)
    assert set(pack.objects) == {"scatter"}
    assert {cell.family for cell, _ in pack.cells()} == {"scatter"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arch", "sm_90"), "sm_90a"),
        (("--family", "scater"), "scatter"),
        (("--jobs", "0"), "jobs"),
        (("--no-such-option",), "no-such-option"),
    ],
)
def test_wrong_usage_is_exit_2_with_the_nearest_spelling(
    small_pack: packs.SmallPack,
    cli: packs.Cli,
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    done = cli("build", "--catalog", small_pack.catalog, "--out", tmp_path / "pack", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "pack").exists()


def test_the_script_is_the_same_command(small_pack: packs.SmallPack, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "build_plans.py"
    arguments = ("--catalog", small_pack.catalog, "--out", small_pack.root, "--dry-run", "--json")
    done = packs.run([sys.executable, str(script), *map(str, arguments)], cwd=tmp_path)
    assert report_of(done)["reused"] == 4

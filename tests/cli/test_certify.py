"""``specplan certify`` without a GPU, and ``certify merge``, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from specplan.plans import catalog as catalogs
from specplan.plans import certificates, manifest
from specplan.plans.certificates import (
    CLOSEST_MEASURE,
    Certificate,
    Tally,
    group_cells,
    join_tallies,
)
from specplan.tools.certify import Shard, missing, share_of
from specplan.tools.marking import free

from support import synthetic
from support.synthetic import Place, specplan


def test_without_a_gpu_it_says_so_and_writes_nothing(place: Place) -> None:
    before = sorted(place.packs.rglob("*"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "specplan.tools.cli",
            "certify",
            "--packs",
            place.packs,
            "--arch",
            "sm_90a",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: certification needs a CUDA device: " in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(place.packs.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--family", "gathr"), "unknown family 'gathr'; did you mean 'gather'?"),
        (("--problem", "larg"), "unknown problem 'larg'; did you mean 'large'?"),
        (("--family", "gather", "--problem", "small"), "unknown problem 'small'"),
        (("--shard", "3/2"), "'3/2' is not I/N with 1 <= I <= N"),
        (("--shard", "0/2"), "'0/2' is not I/N"),
        (("--shard", "2"), "'2' is not I/N"),
        (("--shard", "a/b"), "'a/b' is not I/N"),
        (("--device", "first"), "Invalid value for '--device'"),
        (("--missing", "--shard", "1/2"), "--missing in shards needs --out"),
        (("merg",), "No such command 'merg'"),
    ],
)
def test_wrong_use_exits_2(place: Place, arguments: tuple[str, ...], said: str) -> None:
    ran = specplan("certify", "--packs", place.packs, "--catalog", place.catalog_path, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.split())


def test_missing_is_what_no_certificate_covers_as_the_pack_has_it(
    place: Place, whole: Certificate
) -> None:
    catalog = catalogs.load(place.catalog_path)
    pack = manifest.read(place.packs / "sm_90a")
    cells = list(catalog.cells("sm_90a", "scatter"))
    first, second = shard(whole, 1, 2), shard(whole, 2, 2)
    assert missing(catalog, cells, pack, []) == cells
    assert missing(catalog, cells, pack, [first, second]) == []
    left = missing(catalog, cells, pack, [first])
    assert {(c.problem, c.requests, c.tokens) for c in left} == {
        (c.problem, c.requests, c.tokens) for c in second.cells()
    }
    changed = {s: replace(plan, device_code="0" * 64) for s, plan in second.plans.items()}
    stale = replace(second, plans=changed)
    assert missing(catalog, cells, pack, [first, stale]) == left
    symbol = next(s for s, plan in pack.plans.items() if plan.family == "scatter")
    without = replace(pack, plans={s: plan for s, plan in pack.plans.items() if s != symbol})
    lost = missing(catalog, cells, without, [first, second])
    assert lost == [cell for cell in cells if symbol in {p.symbol for p in catalog.plans_of(cell)}]
    assert lost


def test_a_second_file_never_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "scatter.yaml"
    assert free(path) == path
    path.touch()
    assert free(path) == tmp_path / "scatter.2.yaml"
    (tmp_path / "scatter.2.yaml").touch()
    assert free(path) == tmp_path / "scatter.3.yaml"


# Merging


@pytest.fixture
def whole(place: Place) -> Certificate:
    return certificates.read(place.certificates / "sm_90a" / "scatter.yaml")


def shard(of: Certificate, index: int, count: int) -> Certificate:
    """The I-th of N parts, counted from 1, as `certify --shard` cuts them: what its cells need."""
    cells = list(of.cells())[index - 1 :: count]
    symbols = {use.symbol for cell in cells for use in cell.uses}
    names = {cell.problem for cell in cells}
    return replace(
        of,
        groups=group_cells(cells),
        tallies=join_tallies(
            Tally(output, 6 + cell.tokens % 2, {use.symbol: {cell.problem: error}})
            for cell in cells
            for use in cell.uses
            for output, error in ((synthetic.CLOSE, cell.tokens / 8), (synthetic.EXACT, 0.0))
        ),
        plans={symbol: plan for symbol, plan in of.plans.items() if symbol in symbols},
        problems={name: geometry for name, geometry in of.problems.items() if name in names},
    )


def write_shards(root: Path, of: Certificate, count: int) -> list[Path]:
    return [
        synthetic.write_certificate(root, shard(of, i, count), f"{of.family}.{i}-of-{count}")
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 3, 20])
def test_shards_join_to_the_whole(whole: Certificate, tmp_path: Path, count: int) -> None:
    parts = write_shards(tmp_path / "parts", whole, count)
    ran = specplan("certify", "merge", *parts, "--out", tmp_path / "joined")
    target = tmp_path / "joined" / "sm_90a" / "scatter.yaml"
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{target}: 20 cells\n"
    joined = certificates.read(target)
    assert joined == whole


def test_the_order_of_the_shards_does_not_matter(whole: Certificate, tmp_path: Path) -> None:
    parts = write_shards(tmp_path / "parts", whole, 3)
    found = []
    for name, order in (("a", parts), ("b", parts[::-1])):
        assert specplan("certify", "merge", *order, "--out", tmp_path / name).code == 0
        found.append(certificates.read(tmp_path / name / "sm_90a" / "scatter.yaml"))
    assert found[0] == found[1]


def test_a_directory_joins_each_family_and_arch_by_itself(place: Place, tmp_path: Path) -> None:
    ten = manifest.read(place.packs / "sm_100a")
    expected = {}
    for family in ("scatter", "gather"):
        nine = certificates.read(place.certificates / "sm_90a" / f"{family}.yaml")
        write_shards(tmp_path / "parts", nine, 2)
        other = synthetic.certificate(ten, family)
        write_shards(tmp_path / "parts", other, 2)
        expected.update({("sm_90a", family): nine, ("sm_100a", family): other})
    ran = specplan("certify", "merge", tmp_path / "parts", "--out", tmp_path / "joined")
    assert ran.code == 0
    found = {
        (path.parent.name, path.stem): certificates.read(path)
        for path in (tmp_path / "joined").rglob("*.yaml")
    }
    assert found == expected


def test_the_joined_certificate_is_evidence(
    place: Place, whole: Certificate, tmp_path: Path
) -> None:
    parts = write_shards(tmp_path / "parts", whole, 2)
    gather = place.certificates / "sm_90a" / "gather.yaml"
    assert specplan("certify", "merge", parts[0], gather, "--out", tmp_path / "half").code == 0
    assert specplan("coverage", *place.options, "--certificates", tmp_path / "half").code == 1
    assert specplan("certify", "merge", *parts, gather, "--out", tmp_path / "whole").code == 0
    assert specplan("coverage", *place.options, "--certificates", tmp_path / "whole").code == 0


def test_the_date_is_that_of_the_last_part(whole: Certificate, tmp_path: Path) -> None:
    first, second = shard(whole, 1, 2), replace(shard(whole, 2, 2), date="2026-02-03")
    parts = [
        synthetic.write_certificate(tmp_path, second, "scatter.b"),
        synthetic.write_certificate(tmp_path, first, "scatter.a"),
    ]
    for order in (parts, parts[::-1]):
        assert specplan("certify", "merge", *order, "--out", tmp_path / "out").code == 0
        assert certificates.read(tmp_path / "out" / "sm_90a" / "scatter.yaml").date == "2026-02-03"


def other_bits(of: Certificate) -> Certificate:
    return replace(of, plans={s: replace(p, host_code="0" * 64) for s, p in of.plans.items()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: replace(c, device={**c.device, "name": "Device eleven"}), "differ in device"),
        (lambda c: replace(c, device={**c.device, "driver": "590.0"}), "differ in device"),
        (lambda c: replace(c, tools={**c.tools, "torch": "2.9"}), "differ in tools"),
        (lambda c: replace(c, sources={}), "differ in sources"),
        (lambda c: replace(c, suite=("eager",)), "differ in suite"),
        (lambda c: replace(c, recorded=CLOSEST_MEASURE), "differ in recorded"),
        (other_bits, "differ in plan scatter__history2__next2__draft1__lanes2__sm_90a"),
        (
            lambda c: replace(c, problems={**c.problems, "large": {"history": 9}}),
            "differ in problem large",
        ),
    ],
)
def test_parts_of_different_runs_are_refused(
    whole: Certificate, tmp_path: Path, change: Callable[[Certificate], Certificate], said: str
) -> None:
    parts = [
        synthetic.write_certificate(tmp_path / "parts", shard(whole, 1, 2), "scatter.a"),
        synthetic.write_certificate(tmp_path / "parts", change(shard(whole, 2, 2)), "scatter.b"),
    ]
    ran = specplan("certify", "merge", *parts, "--out", tmp_path / "out")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: {parts[0]} and {parts[1]} {said}\n"
    assert not (tmp_path / "out").exists()


def test_parts_that_claim_the_same_cell_are_refused(whole: Certificate, tmp_path: Path) -> None:
    cells = list(whole.cells())
    first = replace(whole, groups=group_cells(cells[:11]))
    second = replace(whole, groups=group_cells(cells[10:]))
    parts = [
        synthetic.write_certificate(tmp_path / "parts", first, "scatter.a"),
        synthetic.write_certificate(tmp_path / "parts", second, "scatter.b"),
    ]
    ran = specplan("certify", "merge", *parts, "--out", tmp_path / "out")
    assert ran.code == 1
    assert f"error: {parts[0]} and {parts[1]} both have 1 cells, such as" in ran.err
    assert not (tmp_path / "out").exists()


def test_no_parts_a_missing_part_and_no_target_are_errors(
    whole: Certificate, tmp_path: Path
) -> None:
    (part,) = write_shards(tmp_path / "parts", whole, 1)
    (tmp_path / "empty").mkdir()
    out = ("--out", tmp_path / "out")
    ran = specplan("certify", "merge", tmp_path / "empty", *out)
    assert (ran.code, ran.err) == (1, "error: no certificate files were given\n")
    assert specplan("certify", "merge", *out).code == 2
    assert specplan("certify", "merge", tmp_path / "none.yaml", *out).code == 2
    assert specplan("certify", "merge", part).code == 2
    part.write_text("schema: 1\n", encoding="utf-8")
    ran = specplan("certify", "merge", part, *out)
    assert ran.code == 1
    said = "schema 1, this version of specplan reads 2; certify again"
    assert ran.err == f"error: {part}: {said}\n"


@pytest.mark.parametrize("family", ["gdn_replay", "scatter"])
@pytest.mark.parametrize("count", [1, 7, 60, 250])
def test_shards_have_every_cell_once(family: str, count: int) -> None:
    cells = list(catalogs.load().cells("sm_90a", family))[::23]
    shares = [share_of(cells, Shard(i, count), family) for i in range(1, count + 1)]
    assert sorted(map(str, cells)) == sorted(str(cell) for share in shares for cell in share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_cells_that_share_their_rows_are_in_one_shard() -> None:
    """A shard of gdn_replay makes few draws; a small sample has cells of every kind."""
    cells = list(catalogs.load().cells("sm_90a", "gdn_replay"))[::7]

    def kinds(i: int, count: int) -> set[tuple[str, str, int]]:
        share = share_of(cells, Shard(i, count), "gdn_replay")
        return {(cell.problem, cell.dtype, cell.tokens) for cell in share}

    assert max(len(kinds(i, 60)) for i in range(1, 61)) <= 6
    assert len(kinds(7, 400)) > 10

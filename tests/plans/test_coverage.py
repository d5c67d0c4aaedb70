"""Coverage: each state comes from what it says, and a claim ahead of its evidence fails."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import certificates, coverage, manifest
from specplan.plans.cell import Cell, State
from specplan.plans.certificates import group_cells
from specplan.plans.manifest import PlanRecord
from specplan.tools.marking import restamp

from support import synthetic
from support.synthetic import Place, specplan

STATES = ("certified", "candidate", "missing", "stale", "corrupt")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Packs of both archs in which every claim holds."""
    return synthetic.place(tmp_path)


def judge(
    place: Place, *archs: str, strict: bool = False, text: str = synthetic.CATALOG
) -> coverage.Coverage:
    return coverage.compute(
        synthetic.catalog(text), place.packs, archs, [place.certificates], strict=strict
    )


def states(found: coverage.Coverage) -> dict[str, Counter[str]]:
    """family -> state -> count."""
    counts: dict[str, Counter[str]] = {}
    for row in found.rows:
        counts.setdefault(row.cell.family, Counter())[row.state.value] += 1
    return counts


def reasons(found: coverage.Coverage, family: str) -> set[str]:
    return {row.reason for row in found.rows if row.cell.family == family}


def edit_certificate(place: Place, family: str, change: Callable[[Any], Any]) -> None:
    path = place.certificates / "sm_90a" / f"{family}.yaml"
    certificates.write(path, change(certificates.read(path)))


def edit_manifest(place: Place, arch: str, change: Callable[[Any], Any]) -> None:
    directory = place.packs / arch
    synthetic.write_manifest(directory, change(manifest.read(directory)))


def with_other(plan: PlanRecord, bits: str) -> PlanRecord:
    change: dict[str, Any] = {bits: "other"}
    return replace(plan, **change)


# The states


def test_certified_is_built_with_a_matching_certificate(place: Place) -> None:
    found = judge(place, "sm_90a")
    assert states(found) == {"scatter": {"certified": 20}, "gather": {"certified": 12}}
    assert found.holds
    assert all(row.plans for row in found.rows)


def test_candidate_is_built_without_a_claim(place: Place) -> None:
    found = judge(place, "sm_100a")
    assert states(found) == {"scatter": {"candidate": 20}, "gather": {"candidate": 12}}
    assert found.holds


def test_missing_is_an_arch_without_a_pack(tmp_path: Path) -> None:
    place = synthetic.place(tmp_path, archs=["sm_90a"])
    found = judge(place, "sm_90a", "sm_100a")
    missing = [row for row in found.rows if row.state is State.MISSING]
    assert {row.cell.arch for row in missing} == {"sm_100a"}
    assert len(missing) == 32
    assert {row.reason for row in missing} == {"no pack for this arch"}
    assert not found.holds


def test_missing_is_a_cell_without_a_plan(place: Place) -> None:
    def keep(cell: Cell) -> bool:
        return (cell.problem, cell.tokens) != ("large", 3)

    synthetic.pack(place.packs, synthetic.catalog(), "sm_90a", keep=keep)
    restamp(place.packs / "sm_90a", [place.certificates])
    found = judge(place, "sm_90a")
    assert states(found) == {
        "scatter": {"certified": 17, "missing": 3},
        "gather": {"certified": 9, "missing": 3},
    }
    broken = [row for row in found.rows if not row.holds]
    assert {row.reason for row in broken} == {"the pack has no plan for it"}
    assert {row.cell.tokens for row in broken} == {3}


@pytest.mark.parametrize("bits", ["device_code", "host_code", "signature"])
def test_stale_is_certified_once_with_other_bits(place: Place, bits: str) -> None:
    def change(pack: manifest.Manifest) -> manifest.Manifest:
        plans = {
            symbol: with_other(plan, bits) if "history4" in symbol else plan
            for symbol, plan in pack.plans.items()
        }
        return replace(pack, plans=plans)

    edit_manifest(place, "sm_90a", change)
    found = judge(place, "sm_90a")
    assert states(found) == {
        "scatter": {"certified": 8, "stale": 12},
        "gather": {"certified": 12},
    }
    said = f"{bits.replace('_', ' ')} changed (no source or tool version differs)"
    assert reasons(found, "scatter") == {"", said}
    assert not found.holds


def test_stale_names_the_source_that_changed(place: Place) -> None:
    def change(pack: manifest.Manifest) -> manifest.Manifest:
        plans = {}
        for symbol, plan in pack.plans.items():
            sources = {**plan.key["sources"], "specplan.kernels.gather.kernel": "9" * 64}
            key = {**plan.key, "sources": sources}
            new = replace(plan, device_code="other", key=key)
            plans[symbol] = new if plan.family == "gather" else plan
        return replace(pack, plans=plans)

    edit_manifest(place, "sm_90a", change)
    found = judge(place, "sm_90a")
    assert states(found)["gather"] == {"stale": 12}
    assert reasons(found, "gather") == {"device code changed (source kernels.gather.kernel)"}


def test_stale_is_a_plan_that_the_rule_no_longer_gives(place: Place) -> None:
    """The catalog's stores grew: the pack has the old plans."""
    text = synthetic.CATALOG.replace("large: {next: 4, draft: 3}", "large: {next: 5, draft: 3}")
    found = judge(place, "sm_90a", "sm_100a", text=text)
    assert states(found)["gather"] == {"stale": 24}
    assert reasons(found, "gather") == {"the planning rule gives another plan now"}
    assert states(found)["scatter"] == {"certified": 20, "candidate": 20}
    assert not found.holds


def test_stale_is_a_pack_of_another_geometry_with_the_same_plans(place: Place) -> None:
    def change(pack: manifest.Manifest) -> manifest.Manifest:
        of_gather = {"large": {"next": 4, "draft": 2}}
        return replace(pack, problems={**pack.problems, "gather": of_gather})

    edit_manifest(place, "sm_90a", change)
    found = judge(place, "sm_90a")
    assert states(found) == {"scatter": {"certified": 20}, "gather": {"stale": 12}}
    assert reasons(found, "gather") == {"the problem's geometry changed"}


def test_stale_is_a_certificate_for_another_geometry(place: Place) -> None:
    def change(evidence: certificates.Certificate) -> certificates.Certificate:
        return replace(evidence, problems={**evidence.problems, "small": {"history": 3}})

    edit_certificate(place, "scatter", change)
    found = judge(place, "sm_90a")
    assert states(found)["scatter"] == {"certified": 12, "stale": 8}
    assert reasons(found, "scatter") == {"", "the geometry of problem 'small' changed"}


def test_the_reason_is_the_stale_certificates_and_not_that_of_one_that_knows_nothing(
    place: Place,
) -> None:
    def of_small(evidence: certificates.Certificate) -> certificates.Certificate:
        return replace(evidence, groups=tuple(g for g in evidence.groups if g.problem == "small"))

    def of_other_bits(evidence: certificates.Certificate) -> certificates.Certificate:
        plans = {s: replace(p, host_code="0" * 64) for s, p in evidence.plans.items()}
        return replace(evidence, plans=plans)

    shipped = certificates.read(place.certificates / "sm_90a" / "scatter.yaml")
    edit_certificate(place, "scatter", of_small)
    local = coverage.local_certificates(place.packs / "sm_90a")
    synthetic.write_certificate(local, of_other_bits(shipped))
    found = judge(place, "sm_90a")
    assert states(found)["scatter"] == {"certified": 8, "stale": 12}
    assert reasons(found, "scatter") == {
        "",
        "host code changed (no source or tool version differs)",
    }


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_corrupt_is_a_file_that_the_manifest_does_not_describe(place: Place, damage: str) -> None:
    path = place.object("sm_90a", "scatter")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else b"\0" + data[1:])
    found = judge(place, "sm_90a")
    assert states(found) == {"scatter": {"corrupt": 20}, "gather": {"certified": 12}}
    (reason,) = reasons(found, "scatter")
    assert reason.startswith(str(path))
    assert not found.holds


def test_corrupt_is_every_cell_of_an_unreadable_manifest(place: Place) -> None:
    path = place.packs / "sm_100a" / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace("int32", "int64"), encoding="utf-8")
    found = judge(place, "sm_100a")
    assert states(found) == {"scatter": {"corrupt": 20}, "gather": {"corrupt": 12}}
    assert not found.holds
    assert len(found.complaints) == 1
    assert "does not match its own digest" in found.complaints[0]


# Claims and evidence


def test_a_claim_ahead_of_its_evidence_fails(place: Place) -> None:
    text = synthetic.CATALOG.replace(
        "certified: [sm_90a]\n        candidate: [sm_100a]\n        why: The counterpart.",
        "certified: [sm_90a, sm_100a]\n        why: The counterpart.",
    )
    found = judge(place, "sm_90a", "sm_100a", text=text)
    broken = [row for row in found.rows if not row.holds]
    assert {(row.cell.family, row.cell.arch) for row in broken} == {("gather", "sm_100a")}
    assert len(broken) == 12
    assert {row.state for row in broken} == {State.CANDIDATE}
    assert {row.reason for row in broken} == {"claimed certified, without a certificate"}
    assert not found.holds


def test_one_cell_without_evidence_fails(place: Place) -> None:
    def change(evidence: certificates.Certificate) -> certificates.Certificate:
        return replace(evidence, groups=group_cells(list(evidence.cells())[1:]))

    edit_certificate(place, "gather", change)
    found = judge(place, "sm_90a")
    assert states(found)["gather"] == {"certified": 11, "candidate": 1}
    assert not found.holds


def test_a_certificate_of_another_family_is_no_evidence(place: Place) -> None:
    (place.certificates / "sm_90a" / "scatter.yaml").unlink()
    found = judge(place, "sm_90a")
    assert states(found)["scatter"] == {"candidate": 20}
    assert not found.holds


def test_a_local_certificate_counts_and_makes_a_candidate_certified(place: Place) -> None:
    pack = manifest.read(place.packs / "sm_100a")
    local = coverage.local_certificates(place.packs / "sm_100a")
    synthetic.write_certificate(local, synthetic.certificate(pack, "gather"))
    found = judge(place, "sm_100a")
    assert states(found)["gather"] == {"candidate": 12}
    assert not found.holds
    assert "12 cells that a certificate covers" in found.complaints[0]
    restamp(place.packs / "sm_100a", [])
    found = judge(place, "sm_100a")
    assert states(found) == {"scatter": {"candidate": 20}, "gather": {"certified": 12}}
    assert found.holds


def test_a_stale_certificate_leaves_a_candidate_claim_a_candidate(place: Place) -> None:
    pack = manifest.read(place.packs / "sm_100a")
    evidence = synthetic.certificate(pack, "gather")
    plans = {s: replace(p, device_code="0" * 64) for s, p in evidence.plans.items()}
    local = coverage.local_certificates(place.packs / "sm_100a")
    synthetic.write_certificate(local, replace(evidence, plans=plans))
    found = judge(place, "sm_100a")
    assert states(found)["gather"] == {"candidate": 12}
    assert found.holds


def test_strict_complains_about_evidence_that_nothing_claims(place: Place) -> None:
    text = synthetic.CATALOG.replace("requests: 1..4", "requests: 1..3")
    assert judge(place, "sm_90a", text=text).holds
    found = judge(place, "sm_90a", text=text, strict=True)
    assert sorted(found.complaints) == [
        "certificate sm_90a/scatter has 2 cells that the catalog does not claim",
        "the sm_90a pack has 2 cells that the catalog lacks",
    ]
    assert all(row.holds for row in found.rows)
    assert not found.holds


def test_strict_complains_about_certificates_of_an_arch_that_the_catalog_lacks(
    place: Place,
) -> None:
    evidence = certificates.read(place.certificates / "sm_90a" / "scatter.yaml")
    path = place.certificates / "sm_91a" / "scatter.yaml"
    path.parent.mkdir()
    certificates.write(path, evidence)
    assert judge(place, "sm_90a").holds
    found = judge(place, "sm_90a", strict=True)
    assert found.complaints == [
        f"{path.parent} holds certificates, and the catalog has no arch 'sm_91a'"
    ]
    assert not found.holds


def test_strict_has_no_complaint_where_everything_fits(place: Place) -> None:
    found = judge(place, "sm_90a", "sm_100a", strict=True)
    assert found.complaints == []
    assert found.holds


# The command


def run(place: Place, *arguments: str) -> synthetic.Ran:
    return specplan("coverage", *place.options, *arguments)


def test_the_exit_code_is_0_when_every_claim_holds(place: Place) -> None:
    ran = run(place)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["family", "arch", *STATES, "cells", "simulated"]
    assert [line.split() for line in lines[1:-1]] == [
        ["scatter", "sm_90a", "20", ".", ".", ".", ".", "20", "."],
        ["scatter", "sm_100a", ".", "20", ".", ".", ".", "20", "."],
        ["gather", "sm_90a", "12", ".", ".", ".", ".", "12", "."],
        ["gather", "sm_100a", ".", "12", ".", ".", ".", "12", "."],
    ]
    assert lines[-1] == "every claim holds"


def test_the_exit_code_is_1_when_one_does_not(place: Place) -> None:
    place.object("sm_90a", "scatter").unlink()
    for form in ([], ["--json"], ["--markdown"]):
        ran = run(place, *form)
        assert ran.code == 1
        assert "every claim holds" not in ran.out
        (line,) = ran.err.splitlines()
        assert line.startswith("does not hold: scatter on sm_90a: 20 cells corrupt: ")
        assert line.endswith(
            "(first: scatter small requests=1 tokens=1 splits=1 dtype=int32 on sm_90a)"
        )


def test_a_claim_ahead_of_its_evidence_exits_1_and_is_named(place: Place) -> None:
    (place.certificates / "sm_90a" / "gather.yaml").unlink()
    ran = run(place, "--arch", "sm_90a")
    assert ran.code == 1
    assert (
        "gather on sm_90a: 12 cells candidate: claimed certified, without a certificate" in ran.err
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_90"], "unknown arch 'sm_90'; did you mean 'sm_90a'?"),
        (["--family", "scater"], "unknown family 'scater'; did you mean 'scatter'?"),
        (["--yaml"], "No such option"),
        (["surplus"], "unexpected extra argument"),
    ],
)
def test_the_exit_code_is_2_when_used_wrongly(
    place: Place, arguments: list[str], said: str
) -> None:
    ran = run(place, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_broken_certificate_exits_1_and_a_broken_catalog_2_with_one_line(place: Place) -> None:
    path = place.certificates / "sm_90a" / "gather.yaml"
    path.write_text(path.read_text().replace("Device nine", "Device ten"))
    ran = run(place)
    assert ran.code == 1
    said = f"error: {path}: does not match its own digest: it was edited"
    assert ran.err.startswith(said)
    place.catalog_path.write_text("schema: 3\narchs: {}\nfamilies: {}\n", encoding="utf-8")
    ran = run(place)
    assert ran.code == 2
    problem = "schema is 3, this version of specplan reads 1"
    assert ran.err == f"error: {place.catalog_path}:1:9: {problem}\n"


def test_no_pack_at_all_exits_1_and_says_how_to_build(place: Place, tmp_path: Path) -> None:
    ran = specplan("coverage", *place.options, "--packs", tmp_path / "empty", "--json")
    assert ran.code == 1
    said = (
        f"no pack under {tmp_path / 'empty'}; build one with `specplan build`, "
        "or name it with --packs"
    )
    assert json.loads(ran.out) == {"cells": [], "summary": {}, "complaints": [said]}
    assert ran.err == f"error: {said}\n"


def test_one_arch_and_one_family_can_be_asked_for(place: Place) -> None:
    body = json.loads(run(place, "--json", "--arch", "sm_100a", "--family", "gather").out)
    assert body["summary"] == {"gather": {"sm_100a": {"candidate": 12}}}
    assert {(c["family"], c["arch"]) for c in body["cells"]} == {("gather", "sm_100a")}


def test_strict_complains_about_archs_that_are_not_built(tmp_path: Path) -> None:
    place = synthetic.place(tmp_path, archs=["sm_90a"])
    assert run(place).code == 0
    ran = run(place, "--strict")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        f"does not hold: {family} on sm_100a: {count} cells missing: no pack for this arch "
        f"(first: {family} {problem} requests=1 tokens=1 splits=1 dtype=int32 on sm_100a)"
        for family, count, problem in (("scatter", 20, "small"), ("gather", 12, "large"))
    ]


def test_strict_complains_about_orphan_certificates(place: Place) -> None:
    text = place.catalog_path.read_text(encoding="utf-8")
    place.catalog_path.write_text(
        text.replace("requests: 1..4", "requests: 1..3"), encoding="utf-8"
    )
    assert run(place).code == 0
    ran = run(place, "--strict")
    assert ran.code == 1
    assert (
        "does not hold: certificate sm_90a/scatter has 2 cells that the catalog does not claim"
        in ran.err.splitlines()
    )


# The shapes that others parse

CELL_KEYS = [
    "family",
    "problem",
    "requests",
    "tokens",
    "rows",
    "splits",
    "dtype",
    "arch",
    "state",
    "plan",
    "claimed",
    "holds",
    "reason",
    "simulated",
]


def test_the_json_has_exactly_the_documented_shape(place: Place) -> None:
    place.object("sm_100a", "gather").unlink()
    ran = run(place, "--json")
    body = json.loads(ran.out)
    assert list(body) == ["cells", "summary", "complaints"]
    assert body["complaints"] == []
    assert len(body["cells"]) == 64
    for cell in body["cells"]:
        assert list(cell) == CELL_KEYS
        assert [type(cell[name]) for name in CELL_KEYS] == [
            str,
            str,
            int,
            int,
            int,
            int,
            str,
            str,
            str,
            str,
            str,
            bool,
            str,
            bool,
        ]
        assert cell["rows"] == cell["requests"] * cell["tokens"]
        assert cell["state"] in STATES
    assert body["cells"][0] == {
        "family": "scatter",
        "problem": "small",
        "requests": 1,
        "tokens": 1,
        "rows": 1,
        "splits": 1,
        "dtype": "int32",
        "arch": "sm_90a",
        "state": "certified",
        "plan": "scatter__history2__next2__draft1__lanes2__sm_90a",
        "claimed": "certified",
        "holds": True,
        "reason": "",
        "simulated": False,
    }
    broken = [cell for cell in body["cells"] if not cell["holds"]]
    assert {(c["family"], c["arch"], c["claimed"], c["state"]) for c in broken} == {
        ("gather", "sm_100a", "candidate", "corrupt")
    }
    assert len(broken) == 12 and all("cannot be read" in cell["reason"] for cell in broken)
    assert body["summary"] == {
        "scatter": {"sm_90a": {"certified": 20}, "sm_100a": {"candidate": 20}},
        "gather": {"sm_90a": {"certified": 12}, "sm_100a": {"corrupt": 12}},
    }


def test_the_json_has_the_complaints_about_packs_and_evidence(place: Place) -> None:
    (place.packs / "sm_100a" / "manifest.json").write_text("{", encoding="utf-8")
    unclaimed = place.certificates / "sm_70"
    unclaimed.mkdir()
    (unclaimed / "scatter.yaml").write_text("", encoding="utf-8")
    ran = run(place, "--json", "--strict")
    body = json.loads(ran.out)
    broken, orphan = body["complaints"]
    assert "sm_100a/manifest.json: is not JSON" in broken
    assert "the catalog has no arch 'sm_70'" in orphan
    assert ran.err.splitlines()[:2] == [f"does not hold: {text}" for text in body["complaints"]]


def test_the_summary_counts_the_cells_that_are_listed(place: Place) -> None:
    def change(evidence: certificates.Certificate) -> certificates.Certificate:
        return replace(evidence, groups=group_cells(list(evidence.cells())[5:]))

    edit_certificate(place, "scatter", change)
    body = json.loads(run(place, "--json").out)
    counts = Counter((c["family"], c["arch"], c["state"]) for c in body["cells"])
    nested = {
        (family, arch, state): count
        for family, archs in body["summary"].items()
        for arch, of_arch in archs.items()
        for state, count in of_arch.items()
    }
    assert nested == counts
    assert nested["scatter", "sm_90a", "candidate"] == 5


def test_the_vocabulary_of_states_is_closed() -> None:
    assert tuple(state.value for state in State) == STATES


def test_a_missing_cell_has_an_empty_plan(tmp_path: Path) -> None:
    place = synthetic.place(tmp_path, archs=["sm_90a"])
    body = json.loads(run(place, "--json", "--arch", "sm_100a").out)
    assert {(c["state"], c["plan"]) for c in body["cells"]} == {("missing", "")}


def test_the_markdown_is_a_table(place: Place) -> None:
    ran = run(place, "--markdown")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {9}
    assert rows[0] == ["family", "arch", *STATES, "cells", "simulated"]
    assert all(re.fullmatch(r"-+:?", rule) for rule in rows[1])
    assert [rule.endswith(":") for rule in rows[1]] == [False] * 2 + [True] * 7
    assert rows[2:] == [
        ["scatter", "sm_90a", "20", ".", ".", ".", ".", "20", "."],
        ["scatter", "sm_100a", ".", "20", ".", ".", ".", "20", "."],
        ["gather", "sm_90a", "12", ".", ".", ".", ".", "12", "."],
        ["gather", "sm_100a", ".", "12", ".", ".", ".", "12", "."],
    ]

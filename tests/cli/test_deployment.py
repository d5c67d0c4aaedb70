"""``specplan coverage --deployment``: the question that a server owner's CI asks."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from specplan.plans import deployment as deployments
from specplan.plans.deployment import DeploymentError

from synthetic import Place, Ran, specplan

#: Scatter's `small` stores, certified at requests 1..4 and tokens 1..2 on sm_90a.
BASE = """\
schema: 1
arch: sm_90a
max_requests: 4
draft_lengths: [0, 1]
families:
  scatter: {history: 2, next: 2, draft: 1}
"""
GRAPHS = BASE.replace("max_requests: 4", "max_requests: 8\ngraph_requests: [1, 2, 8]").replace(
    "{history: 2, next: 2, draft: 1}", "{problem: large}\n  gather: {next: 4, draft: 3}"
)


def cover(place: Place, text: str, *arguments: str) -> Ran:
    path = place.packs.parent / "server.yaml"
    path.write_text(text)
    return specplan("coverage", *place.options, "--deployment", path, *arguments)


def test_a_covered_server_is_exit_0(place: Place) -> None:
    ran = cover(place, BASE)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "8 cells reachable on sm_90a (requests 1..4; tokens 1..2): 8 certified",
        "every reachable cell is certified and built",
    ]


def test_graph_sizes_alone_are_reached_unless_the_server_is_eager_too(place: Place) -> None:
    assert cover(place, GRAPHS).code == 0
    ran = cover(place, GRAPHS + "eager: true\n")
    assert ran.code == 1
    for family in ("scatter", "gather"):
        for tokens in (1, 2):
            assert (
                f"hole: {family} large int32 requests=3..7 tokens={tokens}: uncertified: "
                "the catalog has no such cell"
            ) in ran.out.splitlines()


def test_a_hole_names_the_nearest_certified_cell(place: Place) -> None:
    ran = cover(place, BASE.replace("max_requests: 4", "max_requests: 5"), "--json")
    assert ran.code == 1
    body = json.loads(ran.out)
    assert list(body) == ["holds", "cells", "complaints"]
    assert body["holds"] is False
    holes = [cell for cell in body["cells"] if cell["state"] != "certified"]
    assert [(h["requests"], h["tokens"], h["state"]) for h in holes] == [
        (5, 1, "uncertified"),
        (5, 2, "uncertified"),
    ]
    assert [(n["requests"], n["tokens"]) for n in holes[1]["nearest"]] == [(4, 2)]
    assert list(holes[0]) == [
        *("family", "problem", "requests", "tokens", "rows", "splits", "dtype", "arch"),
        *("state", "reason", "nearest"),
    ]


def test_a_geometry_that_no_problem_has_is_a_hole_with_its_values(place: Place) -> None:
    ran = cover(place, BASE.replace("history: 2", "history: 7"))
    assert ran.code == 1
    assert "no problem of the catalog has history=7, next=2, draft=1" in ran.out


def test_tokens_that_do_not_fit_the_stores_are_a_hole(place: Place) -> None:
    ran = cover(place, BASE.replace("[0, 1]", "[2]"))
    assert ran.code == 1
    assert "3 tokens do not fit a history store of width 2" in ran.out


def test_candidates_and_missing_packs_do_not_cover_a_server(place: Place) -> None:
    ran = cover(place, BASE.replace("sm_90a", "sm_100a"))
    assert ran.code == 1
    assert "candidate: built, and not certified on this arch" in ran.out
    (place.packs / "sm_90a" / "manifest.json").unlink()
    ran = cover(place, BASE)
    assert ran.code == 1
    assert "missing: no pack for this arch" in ran.out


def test_a_corrupt_library_does_not_cover_a_server(place: Place) -> None:
    place.object("sm_90a", "scatter").write_bytes(b"short")
    ran = cover(place, BASE)
    assert ran.code == 1
    assert "hole: scatter small int32 requests=1..4 tokens=1: corrupt:" in ran.out


def test_markdown_has_one_row_for_holes_that_differ_in_requests_alone(place: Place) -> None:
    ran = cover(place, BASE.replace("max_requests: 4", "max_requests: 9"), "--markdown")
    assert ran.code == 1
    rows = [line for line in ran.out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2
    assert {row.count("|") for row in rows} == {9}
    assert "| scatter | small | int32 | 5..9 | 2 | uncertified |" in rows[3]
    covered = cover(place, BASE, "--markdown")
    assert covered.out.splitlines()[-1] == "Every reachable cell is certified and built."


def test_junit_has_a_case_a_cell_and_a_failure_a_hole(place: Place) -> None:
    ran = cover(place, BASE.replace("max_requests: 4", "max_requests: 5"), "--junit")
    assert ran.code == 1
    suite = ElementTree.fromstring(ran.out)
    assert (suite.get("tests"), suite.get("failures")) == ("10", "2")
    assert len(suite.findall("testcase")) == 10
    failures = suite.findall("testcase/failure")
    assert [f.get("message") for f in failures] == ["uncertified: the catalog has no such cell"] * 2
    assert failures[0].text is not None and "requests=4 tokens=1" in failures[0].text


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (("max_requests", "max_request"), 3, "did you mean 'max_requests'?"),
        (("sm_90a", "sm_90"), 2, "did you mean 'sm_90a'?"),
        (("scatter", "scater"), 6, "did you mean 'scatter'?"),
        (("schema: 1", "schema: 2"), 1, "schema is 2"),
        (("[0, 1]", "[-1]"), 4, "outside 0..1023"),
        (("history: 2, ", ""), 6, "lacks 'history'"),
        (("{history: 2, next: 2, draft: 1}", "{problem: smal}"), 6, "did you mean 'small'?"),
        (("draft: 1}", "draft: 1, dtype: int3}"), 6, "did you mean 'int32'?"),
        (("families:", "eager: false\nfamilies:"), 1, "nothing can run"),
        (("families:", "graph_requests: [5]\nfamilies:"), 5, "outside 1..4"),
        (("families:\n  scatter: {history: 2, next: 2, draft: 1}", "families: {}"), 5, "empty"),
    ],
)
def test_a_file_that_cannot_be_meant_is_exit_2_with_its_place(
    place: Place, change: tuple[str, str], line: int, problem: str
) -> None:
    ran = cover(place, BASE.replace(*change))
    assert ran.code == 2
    assert f"server.yaml:{line}:" in ran.err and problem in ran.err, ran.err
    assert ran.out == ""


def test_a_file_that_is_not_there_is_exit_2(place: Place) -> None:
    ran = specplan("coverage", *place.options, "--deployment", "/nowhere/server.yaml")
    assert ran.code == 2
    assert "/nowhere/server.yaml: cannot be read" in ran.err


def test_options_that_the_file_says_itself_are_refused(place: Place) -> None:
    assert cover(place, BASE, "--arch", "sm_90a").code == 2
    assert cover(place, BASE, "--strict").code == 2
    assert specplan("coverage", *place.options, "--junit").code == 2


def test_a_family_with_several_dtypes_needs_one() -> None:
    from specplan.plans import catalog as catalogs

    text = BASE[: BASE.index("families:")] + "families:\n  rollback: {problem: qsa12}\n"
    with pytest.raises(DeploymentError, match="lacks 'dtype'; known: int32, int64"):
        deployments.loads(text, catalogs.load())


def test_the_example_is_covered_by_the_shipped_claims() -> None:
    """By the catalog alone: each cell that the example reaches is claimed to be certified."""
    from specplan.plans import catalog as catalogs

    catalog = catalogs.load()
    example = Path(__file__).parent.parent.parent / "examples" / "deployment.yaml"
    wanted = deployments.load(example, catalog)
    reached = [cell for _, cell in deployments.reachable(wanted, catalog)]
    assert len(reached) == 7 * 2 * 3
    assert all(catalog.claims.get(cell) for cell in reached)

"""``specplan coverage --deployment``: the question that a server owner's CI asks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from specplan.plans import catalog as catalogs
from specplan.plans import deployment as deployments
from specplan.plans.catalog import Catalog
from specplan.plans.deployment import Answer, DeploymentError
from specplan.tools import deployment_report

from support.synthetic import Place, Ran, specplan

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
        *("state", "reason", "nearest", "geometry"),
    ]
    assert holes[0]["geometry"] == {"history": 2, "next": 2, "draft": 1}
    assert holes[0]["nearest"][0]["differs"] == {}


def test_a_geometry_that_no_problem_has_is_a_hole_with_its_values(place: Place) -> None:
    ran = cover(place, BASE.replace("history: 2", "history: 7"))
    assert ran.code == 1
    assert "no problem of the catalog has history=7, next=2, draft=1" in ran.out
    near = "nearest certified: scatter small requests=1 tokens=1 splits=1 dtype=int32 on sm_90a"
    assert f"{near} (history 2, not 7)" in ran.out


#: A server of the shipped catalog; its values, one of which each case below changes.
WELL_WRITTEN = """\
schema: 1
arch: {arch}
max_requests: 2
draft_lengths: [3]
families:
  sparse_gqa_verify:
    {{q_heads: 24, kv_heads: 2, head_dim: {head_dim}, page_size: {page}, selected: 2051,
      dtype: {dtype}}}
"""
COVERED = {"arch": "sm_90a", "head_dim": "256", "page": "32", "dtype": "fp8_e4m3"}


@pytest.fixture(scope="module")
def shipped() -> Catalog:
    return catalogs.load()


@pytest.mark.parametrize(
    ("key", "value", "reason", "near"),
    [
        ("arch", "sm_120a", "the catalog has no arch sm_120a", "on sm_90a"),
        ("arch", "sm_89", "the catalog has no arch sm_89", "on sm_90a"),
        (
            "head_dim",
            "128",
            "head_dim is 128, sparse_gqa_verify has only 256",
            "head_dim 256, not 128",
        ),
        ("page", "8", "no problem of the catalog has q_heads=24", "(page_size 32, not 8)"),
        (
            "page",
            "1600",
            "page_size is 1600, sparse_gqa_verify has 4..1024",
            "page_size 64, not 1600",
        ),
        ("page", "33", "page_size (33) is not a multiple of 4", "page_size 32, not 33"),
        ("dtype", "fp8", "sparse_gqa_verify has no dtype 'fp8'; did you mean", "dtype=fp8_e4m3"),
        ("dtype", "fp16", "sparse_gqa_verify has no dtype 'fp16'", "on sm_90a"),
    ],
)
def test_a_server_that_is_well_written_and_not_covered_is_holes(
    shipped: Catalog, tmp_path: Path, key: str, value: str, reason: str, near: str
) -> None:
    """Without any pack: what the catalog has is missing, what it lacks is uncertified."""

    def ask(**change: str) -> Answer:
        text = WELL_WRITTEN.format(**{**COVERED, **change})
        return deployments.answer(deployments.loads(text, shipped), shipped, tmp_path, [])

    assert [cell.state for cell in ask().cells] == ["missing"] * 2
    answer = ask(**{key: value})
    assert [cell.state for cell in answer.cells] == ["uncertified"] * 2
    hole, nearest = deployment_report.text(answer).splitlines()[1:3]
    assert hole.startswith("hole: sparse_gqa_verify ") and f": uncertified: {reason}" in hole
    assert nearest.startswith("      nearest certified: sparse_gqa_verify qsa_24_2")
    assert near in nearest, nearest


def test_a_server_that_is_not_covered_is_exit_1_with_a_junit_file(
    place: Place, tmp_path: Path
) -> None:
    text = WELL_WRITTEN.format(**{**COVERED, "arch": "sm_120a", "dtype": "fp8"})
    ran = cover(place, text, "--junit")
    assert (ran.code, ran.err) == (1, "")
    suite = ElementTree.fromstring(ran.out)
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    failure = suite.find("testcase/failure")
    assert failure is not None and "the catalog has no arch sm_120a" in str(failure.get("message"))


def test_every_arch_problem_and_dtype_of_a_list_is_checked(place: Place) -> None:
    assert cover(place, BASE.replace("sm_90a", "[sm_90a]")).code == 0
    ran = cover(place, BASE.replace("sm_90a", "[sm_90a, sm_100a, sm_120a]"))
    assert ran.code == 1
    assert ran.out.startswith("24 cells reachable on sm_90a, sm_100a, sm_120a")
    assert "8 candidate, 8 certified, 8 uncertified" in ran.out
    assert "tokens=1 on sm_100a: candidate:" in ran.out
    by_name = BASE.replace("{history: 2, next: 2, draft: 1}", "{problem: [small, large]}")
    ran = cover(place, by_name)
    assert ran.code == 1
    assert ran.out.startswith("16 cells reachable")
    assert "hole: scatter large int32 requests=3..4 tokens=1" in ran.out
    ran = cover(place, BASE.replace("draft: 1}", "draft: 1, dtype: [int32, int64]}"))
    assert ran.code == 1
    assert "hole: scatter small int64 requests=1..4 tokens=1: uncertified" in ran.out
    several = BASE.replace(
        "{history: 2, next: 2, draft: 1}", "[{problem: small}, {problem: large}]"
    )
    assert cover(place, several).out == cover(place, by_name).out


def test_batches_above_the_largest_graph_are_reachable_unless_the_file_says_that_none_are(
    place: Place,
) -> None:
    assert cover(place, GRAPHS).code == 0
    ran = cover(place, GRAPHS.replace("max_requests: 8", "max_requests: 10"))
    assert ran.code == 1
    assert "requests 1..2, 8..10; tokens 1..2" in ran.out
    assert "hole: scatter large int32 requests=9..10 tokens=1: uncertified" in ran.out
    ran = cover(place, GRAPHS.replace("max_requests: 8", "max_requests: 10") + "eager: false\n")
    assert (ran.code, ran.out) == (2, "")


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
        (("families:", "eager: [true]\nfamilies:"), 5, "eager must be true or false"),
        (("sm_90a", "[]"), 2, "arch is empty"),
        (("sm_90a", "[sm_90a, sm_90a]"), 2, "arch names 'sm_90a' twice"),
        (("sm_90a", "[sm_90a, sm_90]"), 2, "did you mean 'sm_90a'?"),
        (("{history: 2, next: 2, draft: 1}", "{problem: [small, larg]}"), 6, "mean 'large'?"),
        (("draft: 1}", "draft: 1, dtype: [int32, int3]}"), 6, "did you mean 'int32'?"),
        (("draft: 1}", "draft: 1, dtype: []}"), 6, "dtype of family 'scatter' is empty"),
        (("{history: 2, next: 2, draft: 1}", "[]"), 6, "family 'scatter' is empty"),
        (("draft: 1}", "draft: -1}"), 6, "outside 0.."),
        (
            ("families:", "graph_requests: [1, 2]\neager: false\nfamilies:"),
            *(6, "no graph holds more than 2 of max_requests 4"),
        ),
        (
            ("max_requests: 4\ndraft_lengths: [0, 1]", "max_requests: 65536\ndraft_lengths: 0..99"),
            *(1, "6,553,600 cells, more than 2,000,000"),
        ),
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


def test_a_family_with_several_dtypes_needs_one(shipped: Catalog) -> None:
    text = BASE[: BASE.index("families:")] + "families:\n  rollback: {problem: qsa12}\n"
    with pytest.raises(DeploymentError, match="lacks 'dtype'; known: int32, int64"):
        deployments.loads(text, shipped)


def test_the_example_is_covered_by_the_shipped_claims(shipped: Catalog) -> None:
    """By the catalog alone: each cell that the example reaches is claimed to be certified."""
    catalog = shipped
    example = Path(__file__).parent.parent.parent / "examples" / "deployment.yaml"
    wanted = deployments.load(example, catalog)
    reached = [cell for _, cell, _ in deployments.reachable(wanted, catalog)]
    assert len(reached) == 7 * 2 * 3
    assert all(catalog.claims.get(cell) for cell in reached)


def test_a_thousand_requests_of_every_family_take_seconds(shipped: Catalog, tmp_path: Path) -> None:
    """35,840 cells, every one a hole with a neighbour. A search of all certified cells for each
    took minutes; the limit is far above a busy machine's seconds and far below those.
    """
    text = """\
schema: 1
arch: sm_90a
max_requests: 1024
draft_lengths: [1, 2, 3, 4, 5, 6, 7]
families:
  scatter: {history: 8, next: 9, draft: 8}
  gather: {next: 9, draft: 8}
  rollback: {planes: 11, row_bytes: 256, side_planes: 1, side_row_bytes: 12, dtype: int32}
  gdn_replay: {key_heads: 8, value_heads: 40, dtype: fp32}
  sparse_gqa_verify:
    {q_heads: 24, kv_heads: 2, head_dim: 256, page_size: 1600, selected: 2051, dtype: fp8_e4m3}
"""
    start = time.process_time()
    answer = deployments.answer(deployments.loads(text, shipped), shipped, tmp_path, [])
    report = deployment_report.text(answer)
    taken = time.process_time() - start
    assert len(answer.holes) == len(answer.cells) == 1024 * 5 * 7
    assert all(hole.near for hole in answer.holes)
    assert report.count("nearest certified: ") == report.count("hole: ") == 5 * 7
    assert taken < 20, f"{taken:.1f} s"

"""``specplan explain``: every step from a call to its plan, or to why there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from specplan.plans import certificates, manifest

from support import synthetic
from support.synthetic import Place, Ran, specplan

CALL = ("scatter", "requests=8", "tokens=3", "problem=large", "--arch", "sm_90a")
SYMBOL = "scatter__history4__next4__draft3__lanes4__sm_90a"


def explain(place: Place, *arguments: str) -> Ran:
    return specplan("explain", *place.options, *arguments)


def steps(ran: Ran) -> dict[str, str]:
    """The printed steps by name, in order."""
    found = dict(line.split(maxsplit=1) for line in ran.out.splitlines())
    assert len(found) == len(ran.out.splitlines())
    return found


def test_a_certified_cell_is_explained_step_by_step(place: Place) -> None:
    ran = explain(place, *CALL)
    assert (ran.code, ran.err) == (0, "")
    line = synthetic.CATALOG[: synthetic.CATALOG.index("- problems: [large]")].count("\n") + 1
    assert list(steps(ran).items()) == [
        ("problem", "large: history=4, next=4, draft=3"),
        ("rows", "8 requests x 3 tokens = 24"),
        ("splits", "1 by the planning rule for sm_90a"),
        ("catalog", f"certified (line {line}: The large stores.)"),
        ("plan", SYMBOL),
        ("pack", f"{place.packs}: certified"),
        ("registers", "32 a thread, 0 spills"),
        ("answer", "certified: the call launches"),
    ]


def test_a_candidate_runs_only_when_asked_for(place: Place) -> None:
    ran = explain(place, *CALL[:-1], "sm_100a")
    assert ran.code == 1
    found = steps(ran)
    assert found["catalog"].startswith("candidate (line ")
    assert found["plan"] == SYMBOL.replace("sm_90a", "sm_100a")
    assert found["answer"] == "candidate: the call launches only after load(candidates=True)"


def test_an_uncatalogued_cell_names_the_nearest(place: Place) -> None:
    ran = explain(place, "scatter", "requests=5", "tokens=3", "problem=large", "--arch", "sm_90a")
    assert ran.code == 1
    found = steps(ran)
    assert list(found) == ["problem", "rows", "splits", "catalog", "nearest", "answer"]
    assert found["catalog"] == (
        "has no cell scatter large requests=5 tokens=3 splits=1 dtype=int32 on sm_90a"
    )
    near = found["nearest"].split("; ")
    assert len(near) == 3
    # 2 and 8 are both one octave and three requests from 5; three of 8 are fewer than three of 2.
    assert near[0] == "scatter large requests=8 tokens=3 splits=1 dtype=int32 on sm_90a"
    assert found["answer"] == "uncertified: the call is declined"


def test_tokens_beyond_the_store_say_why(place: Place) -> None:
    ran = explain(place, "scatter", "requests=8", "tokens=5", "problem=large", "--arch", "sm_90a")
    assert ran.code == 1
    found = steps(ran)
    assert found["catalog"] == "5 tokens do not fit a history store of width 4"
    assert "requests=8 tokens=4" in found["nearest"]


@pytest.mark.parametrize("call", [("requests=0", "tokens=1"), ("requests=1", "tokens=0")])
def test_nothing_to_do_is_no_cell(place: Place, call: tuple[str, str]) -> None:
    ran = explain(place, "scatter", *call, "problem=large", "--arch", "sm_90a")
    assert ran.code == 1
    assert steps(ran)["answer"] == "uncertified: the call is declined"


def test_without_a_pack_the_cell_is_missing(place: Place) -> None:
    (place.packs / "sm_90a" / "manifest.json").unlink()
    ran = explain(place, *CALL)
    assert ran.code == 1
    found = steps(ran)
    assert found["pack"] == f"{place.packs}: no pack for this arch"
    assert found["answer"] == "missing: the call is declined"
    assert "registers" not in found


def test_a_stale_cell_says_what_changed(place: Place) -> None:
    path = place.certificates / "sm_90a" / "scatter.yaml"
    old = certificates.read(path)
    plans = {symbol: replace(plan, device_code="0" * 64) for symbol, plan in old.plans.items()}
    certificates.write(path, replace(old, plans=plans))
    ran = explain(place, *CALL)
    assert ran.code == 1
    found = steps(ran)
    assert (
        found["pack"] == f"{place.packs}: device code changed (no source or tool version differs)"
    )
    assert found["answer"] == "stale: the call is declined"


def test_a_corrupt_pack_declines(place: Place) -> None:
    path = place.object("sm_90a", "scatter")
    path.write_bytes(path.read_bytes()[:-1])
    ran = explain(place, *CALL)
    assert ran.code == 1
    assert f"{path} has " in steps(ran)["pack"]
    assert steps(ran)["answer"] == "corrupt: the call is declined"


def test_asked_splits_are_taken_and_said(place: Place) -> None:
    ran = explain(place, *CALL, "splits=2")
    assert ran.code == 1
    assert steps(ran)["splits"] == "2 as asked"
    assert "splits=2" in steps(ran)["catalog"]


def test_the_block_is_that_of_the_cells_own_splits(place: Place) -> None:
    """Of two blocks that differ in splits alone, the one that claims the cell is quoted."""
    text = synthetic.CATALOG + (
        "      - {problems: [large], requests: 8, tokens: 4, splits: 2, dtypes: [int32],\n"
        "         certified: [sm_90a], why: Two splits.}\n"
    )
    place.catalog_path.write_text(text, encoding="utf-8")
    call = ("gather", "requests=8", "tokens=4", "problem=large", "--arch", "sm_90a")
    assert steps(explain(place, *call))["catalog"].endswith(": The counterpart.)")
    assert steps(explain(place, *call, "splits=2"))["catalog"].endswith(": Two splits.)")


def test_the_json_has_the_same_steps(place: Place) -> None:
    ran = explain(place, *CALL, "--json")
    body = json.loads(ran.out)
    assert list(body) == ["cell", "steps", "state", "runs"]
    assert body["steps"] == steps(explain(place, *CALL))
    assert (body["state"], body["runs"]) == ("certified", True)
    assert body["cell"] == {
        "family": "scatter",
        "problem": "large",
        "requests": 8,
        "tokens": 3,
        "rows": 24,
        "splits": 1,
        "dtype": "int32",
        "arch": "sm_90a",
    }
    body = json.loads(explain(place, *CALL[:-1], "sm_100a", "--json").out)
    assert (body["state"], body["runs"]) == ("candidate", False)


def test_launch_parameters_and_registers_are_the_packs(place: Place) -> None:
    directory = place.packs / "sm_90a"
    pack = manifest.read(directory)
    plans = {**pack.plans, SYMBOL: replace(pack.plans[SYMBOL], registers=77, spills=5)}
    synthetic.write_manifest(directory, replace(pack, plans=plans))
    assert steps(explain(place, *CALL))["registers"] == "77 a thread, 5 spills"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'FAMILY'"),
        (CALL[:-2], "Missing option '--arch'"),
        (("scater", *CALL[1:]), "unknown family 'scater'; did you mean 'scatter'?"),
        ((*CALL[:-1], "sm90a"), "unknown arch 'sm90a'; did you mean 'sm_90a'?"),
        (
            ("scatter", "requests=8", "tokens=3", "--arch", "sm_90a"),
            "problem='' is no problem of scatter; known: small, large",
        ),
        (
            ("scatter", "requests=8", "tokens=3", "problem=larg", "--arch", "sm_90a"),
            "problem='larg' is no problem of scatter; did you mean 'large'?",
        ),
        ((*CALL, "dtype=int64"), "dtype='int64'; did you mean 'int32'?"),
        ((*CALL, "row=3"), "'row=3' is not NAME=VALUE with a name of requests, tokens,"),
        ((*CALL, "splits"), "'splits' is not NAME=VALUE"),
        ((*CALL, "splits=0"), "splits=0 is below 1"),
        ((*CALL, "splits=two"), "requests=R and tokens=T are needed, as integers"),
        (
            ("scatter", "tokens=3", "problem=large", "--arch", "sm_90a"),
            "requests=R and tokens=T are needed",
        ),
        (("scatter", "requests=8", "tokens=x", "problem=large", "--arch", "sm_90a"), "as integers"),
    ],
)
def test_wrong_use_exits_2_and_says_what_is_wrong(
    place: Place, arguments: tuple[str, ...], said: str
) -> None:
    ran = explain(place, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.split())


def test_a_broken_certificate_is_an_error_with_its_path(place: Place) -> None:
    path = place.certificates / "sm_90a" / "gather.yaml"
    path.write_text("[", encoding="utf-8")
    ran = explain(place, *CALL)
    assert ran.code == 1
    assert ran.err.startswith(f"error: {path}: does not end as a certificate does")


def test_the_shipped_catalog_is_the_default(place: Place) -> None:
    ran = specplan(
        "explain", "scatter", "requests=256", "tokens=8", "problem=mtp7", "--arch", "sm_90a",
        "--packs", place.packs / "none",
    )  # fmt: skip
    assert ran.code == 1
    assert steps(ran)["problem"] == "mtp7: history=8, next=8, draft=7"
    assert steps(ran)["catalog"].startswith("certified (line ")
    assert steps(ran)["answer"] == "missing: the call is declined"

"""``list`` and ``size``: the numbers are the packs' own, and what is missing is an exit code."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import evidence, locations, manifest, ranges
from specplan.tools.marking import restamp

from support import synthetic
from support.synthetic import Place, Ran, specplan


@pytest.fixture(autouse=True)
def installed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place's certificates are those of this installation."""
    monkeypatch.setattr(evidence, "default_directory", lambda: place.certificates)


def told(*arguments: str | Path) -> Any:
    ran = specplan(*arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    return json.loads(ran.out)


def test_packs_are_listed_with_their_plans_and_cells(place: Place) -> None:
    body = told("list", "--packs", place.packs)
    assert body["complaints"] == []
    by_arch = {each["arch"]: each for each in body["packs"]}
    assert set(by_arch) == {"sm_90a", "sm_100a"}
    nine = by_arch["sm_90a"]
    assert (nine["plans"], nine["cells"]) == (5, {"certified": 32, "candidate": 0})
    assert by_arch["sm_100a"]["cells"] == {"certified": 0, "candidate": 32}
    assert nine["directory"] == str(place.packs / "sm_90a")
    assert (nine["used"], nine["families"]) == (True, ["gather", "scatter"])
    lines = specplan("list", "--packs", place.packs).out.splitlines()
    head = ["arch", "hosts", "plans", "certified", "candidate", "specplan", "directory"]
    assert lines[0].split() == head
    assert sorted(line.split()[:5] for line in lines[1:]) == [
        ["sm_100a", "x86_64", "5", "0", "32"],
        ["sm_90a", "x86_64", "5", "32", "0"],
    ]


def test_a_pack_behind_another_is_listed_as_such_and_not_used(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "data" / "specplan" / "packs"
    synthetic.pack(other, synthetic.catalog(), "sm_90a", families=("scatter",))
    restamp(other / "sm_90a", [place.certificates])
    monkeypatch.setenv(locations.ENVIRONMENT, str(place.packs))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(locations, "checkout_directory", lambda: None)
    body = told("list", "--arch", "sm_90a")
    assert [(p["directory"], p["used"]) for p in body["packs"]] == [
        (str(place.packs / "sm_90a"), True),
        (str(other / "sm_90a"), False),
    ]
    assert "[the per-user directory, behind another]" in specplan("list").out
    # What is listed of plans is what a load would run.
    assert Counter(p["family"] for p in told("list", "plans", "--arch", "sm_90a")["plans"]) == {
        "scatter": 2,
        "gather": 3,
    }


def test_plans_are_the_manifests_with_the_cells_that_use_them(place: Place) -> None:
    pack = manifest.read(place.packs / "sm_90a")
    plans = told("list", "plans", "--packs", place.packs, "--arch", "sm_90a")["plans"]
    assert {plan["symbol"] for plan in plans} == set(pack.plans)
    used: Counter[str] = Counter(use.symbol for _, group in pack.cells() for use in group.uses)
    assert {plan["symbol"]: plan["cells"] for plan in plans} == used
    for plan in plans:
        record = pack.plans[plan["symbol"]]
        assert plan["registers"] == record.registers == 32
        assert plan["object_bytes"] == {h: o.size for h, o in record.objects.items()}
        assert plan["device_code"] == record.device_code


def test_cells_are_every_cell_once(place: Place) -> None:
    body = told("list", "cells", "--packs", place.packs)["cells"]
    seen: Counter[tuple[Any, ...]] = Counter()
    for group in body:
        points = [
            (tokens, requests)
            for tokens in ranges.parse(group["tokens"])
            for requests in ranges.parse(group["requests"])
        ]
        assert len(points) == group["cells"]
        for point in points:
            at = (group["family"], group["problem"], group["arch"], group["splits"], *point)
            seen[at] += 1
            assert group["state"] == ("certified" if group["arch"] == "sm_90a" else "candidate")
    claims = synthetic.catalog().claims
    assert seen == Counter(
        (c.family, c.problem, c.arch, c.splits, c.tokens, c.requests) for c in claims
    )


@pytest.mark.parametrize(
    ("filters", "cells"),
    [
        (("--family", "gather"), 24),
        (("--family", "scatter", "--problem", "small", "--arch", "sm_100a"), 8),
        (("--problem", "large"), 48),
    ],
)
def test_filters_keep_what_they_name(place: Place, filters: tuple[str, ...], cells: int) -> None:
    body = told("list", "cells", "--packs", place.packs, *filters)["cells"]
    assert sum(group["cells"] for group in body) == cells
    wanted = dict(zip(filters[::2], filters[1::2], strict=True))
    for option, value in wanted.items():
        assert {group[option.removeprefix("--")] for group in body} == {value}


def test_splits_that_the_rule_does_not_choose_are_said_to_be_forced(tmp_path: Path) -> None:
    text = synthetic.CATALOG.replace("splits: 1\n", "splits: [1, 2]\n", 1)
    place = synthetic.place(tmp_path, text)
    ran = specplan(*("list", "cells", "--packs", place.packs, "--problem", "small"))
    assert ran.code == 0
    lines = [line for line in ran.out.splitlines() if line.startswith("sm_90a")]
    assert ["2 forced" in line for line in lines] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "plans", "--family", "scater"), "did you mean 'scatter'?"),
        (("list", "cells", "--problem", "lage"), "did you mean 'large'?"),
        (("list", "cells", "--family", "gather", "--problem", "small"), "unknown problem 'small'"),
        (("list", "packs", "--family", "gather"), "go with `list plans` and `list cells`"),
        (("list", "planes"), "'planes'"),
        (("size", "--family", "scater"), "did you mean 'scatter'?"),
    ],
)
def test_wrong_use_exits_2(place: Place, arguments: tuple[str, ...], said: str) -> None:
    ran = specplan(*arguments, "--packs", place.packs)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize("command", ["list", "size"])
def test_no_pack_exits_1_with_what_was_searched(place: Place, tmp_path: Path, command: str) -> None:
    ran = specplan(command, "--packs", tmp_path / "nowhere")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: no pack under {tmp_path / 'nowhere'}; archs found: none\n"
    ran = specplan(command, "--packs", place.packs, "--arch", "sm_103a")
    assert ran.code == 1
    assert "no pack for sm_103a" in ran.err
    assert "archs found: sm_100a, sm_90a" in ran.err


def test_nothing_like_that_exits_1(place: Place) -> None:
    ran = specplan("list", "plans", "--packs", place.packs, "--family", "rollback")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "error: none of the packs at hand has plans like that\n"
    assert specplan("size", "--packs", place.packs, "--family", "rollback").code == 1


@pytest.mark.parametrize("command", [("list",), ("list", "cells"), ("size",)])
def test_a_manifest_that_cannot_be_read_is_named_and_exits_1(
    place: Place, command: tuple[str, ...]
) -> None:
    path = place.packs / "sm_100a" / manifest.NAME
    path.write_text("{")
    ran = specplan(*command, "--packs", place.packs)
    assert ran.code == 1
    assert f"wrong: {path}: is not JSON" in ran.err
    # The other pack is shown all the same.
    assert "sm_90a" in ran.out


def weights(ran: Ran) -> dict[tuple[str, str], Any]:
    return {(w["arch"], w["family"]): w for w in json.loads(ran.out)["families"]}


def test_sizes_are_the_files_and_add_up(place: Place) -> None:
    ran = specplan("size", "--packs", place.packs, "--json")
    assert ran.code == 0
    found = weights(ran)
    for arch in ("sm_90a", "sm_100a"):
        directory = place.packs / arch
        for family in ("scatter", "gather"):
            one = found[arch, family]
            data = place.object(arch, family).read_bytes()
            assert one["library_bytes"] == len(data)
            assert len(zlib.compress(data)) < one["wheel_bytes"] < one["installed_bytes"]
        whole = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        mine = sum(w["installed_bytes"] for (a, _), w in found.items() if a == arch)
        # Whole bytes, so that each family's share may lack one.
        assert whole - 2 <= mine <= whole
    assert (arch, "other files") not in found
    body = json.loads(ran.out)
    assert body["installed_bytes"] == sum(w["installed_bytes"] for w in found.values())


def test_what_no_manifest_names_is_counted_apart(place: Place) -> None:
    left = place.packs / "sm_90a" / "scatter-0123456789abcdef.so"
    left.write_bytes(b"x" * 1234)
    found = weights(specplan("size", "--packs", place.packs, "--json"))
    assert found["sm_90a", "other files"]["installed_bytes"] == 1234
    assert found["sm_90a", "other files"]["wheel_bytes"] == 0
    only = weights(specplan("size", "--packs", place.packs, "--family", "scatter", "--json"))
    assert set(only) == {("sm_90a", "scatter"), ("sm_100a", "scatter")}


def test_a_table_has_the_totals_and_the_plans_if_asked_for(place: Place) -> None:
    lines = specplan("size", "--packs", place.packs, "--arch", "sm_90a").out.splitlines()
    head, gather, scatter, total = lines[:4]
    assert head.split()[:5] == ["arch", "host", "family", "plans", "cells"]
    assert {tuple(line.split()[:5]) for line in (gather, scatter)} == {
        ("sm_90a", "x86_64", "gather", "3", "12"),
        ("sm_90a", "x86_64", "scatter", "2", "20"),
    }
    assert total.split()[:4] == ["in", "all", "5", "32"]
    more = specplan("size", "--packs", place.packs, "--arch", "sm_90a", "--plans").out
    for symbol in manifest.read(place.packs / "sm_90a").plans:
        assert symbol in more


@pytest.mark.parametrize("gone", [True, False])
def test_a_missing_or_cut_library_exits_1_with_its_name(place: Place, gone: bool) -> None:
    path = place.object("sm_90a", "scatter")
    if gone:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    ran = specplan("size", "--packs", place.packs)
    assert ran.code == 1
    assert f"wrong: {path}" in ran.err

"""The manifest: read back as written, the same text for the same facts, no edit unseen."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specplan.plans import manifest
from specplan.plans.cell import Cell
from specplan.plans.manifest import Manifest, ManifestError, Use

from support import synthetic

T = TypeVar("T")

HERE = Path("pack/manifest.json")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return synthetic.pack(tmp_path_factory.mktemp("packs"), synthetic.catalog(), "sm_90a")


@pytest.fixture(scope="module")
def text(built: Manifest) -> str:
    return manifest.dumps(built)


def reason_of(text: str) -> tuple[str, str]:
    with pytest.raises(ManifestError) as caught:
        manifest.loads(text, HERE)
    assert str(caught.value).startswith(f"{HERE}: ")
    return caught.value.reason, str(caught.value)


def backwards(facts: Mapping[str, T]) -> dict[str, T]:
    return dict(reversed(list(facts.items())))


def with_digest(body: dict[str, Any]) -> str:
    """The text of a changed body whose digest fits."""
    return manifest.sealed(body)


# Round trip


def test_what_is_written_is_read_back(built: Manifest, text: str) -> None:
    assert manifest.loads(text, HERE) == built
    assert manifest.dumps(manifest.loads(text, HERE)) == text


def test_read_takes_the_file_of_a_directory(built: Manifest, tmp_path: Path) -> None:
    synthetic.write_manifest(tmp_path / "sm_90a", built)
    assert manifest.read(tmp_path / "sm_90a") == built


def test_launch_parameters_and_order_of_constants_survive(built: Manifest) -> None:
    symbol, plan = next(iter(built.plans.items()))
    spec = (("zeta", 1), ("alpha", True), ("mid", "int64"))
    uses = (Use(symbol, (("splits", 3), ("ctas", 4))),)
    group = replace(built.groups[0], uses=uses, automatic=False, certified=True)
    assert built.groups[0].automatic
    assert not built.groups[0].certified
    changed = replace(built, plans={symbol: replace(plan, spec=spec)}, groups=(group,))
    again = manifest.loads(manifest.dumps(changed), HERE)
    assert again == changed
    assert again.plans[symbol].spec == spec
    assert again.groups[0].uses[0].launch == (("splits", 3), ("ctas", 4))


def test_the_text_does_not_depend_on_the_order_of_the_facts(built: Manifest, text: str) -> None:
    turned = replace(
        built,
        hosts=backwards(built.hosts),
        plans=backwards(built.plans),
        tools=backwards(built.tools),
        problems=backwards(built.problems),
        groups=manifest.group_cells(
            (cell, group.uses, group.automatic, group.certified)
            for cell, group in reversed(list(built.cells()))
        ),
    )
    assert list(turned.plans) != list(built.plans)
    assert manifest.dumps(turned) == text


def test_the_table_has_every_cell_and_find_knows_the_arch(built: Manifest) -> None:
    claims = synthetic.catalog()
    assert {cell for cell, _ in built.cells()} == set(claims.cells("sm_90a"))
    assert {cell for cell, _ in built.cells("gather")} == set(claims.cells("sm_90a", "gather"))
    for cell in claims.cells("sm_90a"):
        group = built.find(cell)
        assert group is not None
        assert [use.symbol for use in group.uses] == [p.symbol for p in claims.plans_of(cell)]
    assert built.find(claims.cells("sm_100a")[0]) is None
    assert built.find(claims.cells("sm_90a")[0]._replace(requests=999)) is None


# Damage


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_is_found(text: str, built: Manifest, data: st.DataObject) -> None:
    raw = bytearray(text.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        changed = raw.decode()
    except UnicodeDecodeError:
        return  # `read` refuses it; see the test of files below
    try:
        found = manifest.loads(changed, HERE)
    except ManifestError as error:
        assert error.reason in ("unreadable", "edited", "schema")
    else:
        # Only white space between tokens may differ.
        assert found == built
        assert "".join(changed.split()) == "".join(text.split())


@settings(max_examples=100)
@given(st.data())
def test_a_changed_digit_or_letter_is_always_found(text: str, data: st.DataObject) -> None:
    places = [i for i, character in enumerate(text) if character.isalnum()]
    at = data.draw(st.sampled_from(places))
    other = data.draw(st.sampled_from("0123456789abcdefxyz"))
    if other != text[at]:
        with pytest.raises(ManifestError):
            manifest.loads(text[:at] + other + text[at + 1 :], HERE)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.25, 0.5, 0.75, 0.99])
def test_a_truncated_file_is_unreadable(
    built: Manifest, text: str, tmp_path: Path, part: float
) -> None:
    (tmp_path / "manifest.json").write_text(text[: int(len(text) * part)], encoding="utf-8")
    with pytest.raises(ManifestError, match="is not JSON") as caught:
        manifest.read(tmp_path)
    assert caught.value.reason == "unreadable"
    assert str(tmp_path / "manifest.json") in str(caught.value)
    assert "build the pack again" in str(caught.value)


def test_only_the_last_newline_may_be_cut(built: Manifest, text: str) -> None:
    assert manifest.loads(text[:-1], HERE) == built
    assert reason_of(text[:-2])[0] == "unreadable"


def test_a_missing_file_says_that_this_is_no_pack(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file: this is not a pack") as caught:
        manifest.read(tmp_path)
    assert caught.value.reason == "missing"


def test_bytes_that_are_no_text_and_a_directory_are_unreadable(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"{\xff}")
    with pytest.raises(ManifestError, match="cannot be read") as caught:
        manifest.read(tmp_path)
    assert caught.value.reason == "unreadable"
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ManifestError, match="cannot be read"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("schema", [manifest.SCHEMA + 1, 99])
def test_a_newer_schema_says_so(text: str, schema: int) -> None:
    body = json.loads(text)
    body["schema"] = schema
    reason, message = reason_of(with_digest(body))
    assert reason == "schema"
    assert (
        f"a newer version of specplan (schema {schema}, this one reads {manifest.SCHEMA})"
        in message
    )


@pytest.mark.parametrize("schema", [0, None, "1"])
def test_another_schema_says_so(text: str, schema: object) -> None:
    body = json.loads(text)
    body["schema"] = schema
    reason, message = reason_of(with_digest(body))
    assert reason == "schema"
    assert "another version of specplan" in message


@pytest.mark.parametrize("document", ["[]", "3", "null", '"manifest"', "{}"])
def test_other_json_is_no_manifest(document: str) -> None:
    assert reason_of(document)[0] in ("unreadable", "schema")


@pytest.mark.parametrize(
    "name",
    ["arch", "capability", "specplan", "tools", "hosts", "plans", "problems", "cells"],
)
def test_a_body_that_lacks_a_part_is_unreadable_even_with_its_digest(text: str, name: str) -> None:
    body = json.loads(text)
    del body[name]
    assert reason_of(json.dumps(body))[0] == "edited"
    reason, message = reason_of(with_digest(body))
    assert reason == "unreadable"
    assert f"lacks what a manifest has (KeyError('{name}'))" in message


def test_an_extent_that_is_no_range_is_unreadable(text: str) -> None:
    body = json.loads(text)
    body["cells"][0]["extent"][0]["tokens"] = "4..1"
    reason, message = reason_of(with_digest(body))
    assert reason == "unreadable"
    assert "empty range" in message


# Groups

ENTRIES = st.dictionaries(
    st.tuples(
        st.sampled_from(["small", "large"]),
        st.integers(1, 2),
        st.integers(1, 9),
        st.integers(1, 40),
    ),
    st.tuples(st.sampled_from(["p", "q"]), st.integers(1, 3), st.booleans(), st.booleans()),
    max_size=60,
)


def entries_of(
    facts: dict[tuple[str, int, int, int], tuple[str, int, bool, bool]],
) -> list[tuple[Cell, tuple[Use, ...], bool, bool]]:
    return [
        (
            Cell("scatter", problem, "int32", "sm_90a", splits, tokens, requests),
            (Use(symbol, (("ctas", ctas),)),),
            automatic,
            certified,
        )
        for (problem, splits, tokens, requests), (
            symbol,
            ctas,
            automatic,
            certified,
        ) in facts.items()
    ]


@given(ENTRIES, st.randoms(use_true_random=False))
def test_groups_hold_what_was_grouped_in_any_order(
    facts: dict[tuple[str, int, int, int], tuple[str, int, bool, bool]], shuffle: random.Random
) -> None:
    entries = entries_of(facts)
    groups = manifest.group_cells(entries)
    found = [
        (
            Cell(g.family, g.problem, g.dtype, "sm_90a", g.splits, tokens, requests),
            g.uses,
            g.automatic,
            g.certified,
        )
        for g in groups
        for tokens, requests in g.points()
    ]
    assert len(found) == len(entries)
    assert sorted(found, key=str) == sorted(entries, key=str)
    shuffle.shuffle(entries)
    assert manifest.group_cells(entries) == groups


def test_a_rectangle_of_cells_is_one_extent() -> None:
    entries = entries_of(
        {("small", 1, t, r): ("p", 1, True, True) for t in range(1, 9) for r in range(1, 257)}
    )
    (group,) = manifest.group_cells(entries)
    assert group.extent == ((tuple(range(1, 9)), tuple(range(1, 257))),)


# Packs and files


def test_packs_are_found_at_the_root_and_below_it(built: Manifest, tmp_path: Path) -> None:
    assert manifest.packs_under(tmp_path) == {}
    assert manifest.packs_under(tmp_path / "nowhere") == {}
    synthetic.write_manifest(tmp_path / "sm_90a", built)
    (tmp_path / "objects").mkdir()
    assert manifest.packs_under(tmp_path) == {"sm_90a": tmp_path / "sm_90a"}
    assert manifest.packs_under(tmp_path / "sm_90a") == {"sm_90a": tmp_path / "sm_90a"}


def test_a_pack_with_a_broken_manifest_is_found_by_its_folders_name(tmp_path: Path) -> None:
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / "sm_90a" / "manifest.json").write_text("{", encoding="utf-8")
    assert manifest.packs_under(tmp_path / "sm_90a") == {"sm_90a": tmp_path / "sm_90a"}
    assert manifest.packs_under(tmp_path) == {"sm_90a": tmp_path / "sm_90a"}


def test_objects_are_checked_by_size_and_then_by_content(tmp_path: Path) -> None:
    pack = synthetic.pack(tmp_path, synthetic.catalog(), "sm_90a")
    directory, record = tmp_path / "sm_90a", pack.objects["scatter"]
    assert manifest.check_object(directory, record) is None
    path = directory / record.file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert manifest.check_object(directory, record) == (
        f"{path} has {len(whole) - 1} bytes, the manifest says {len(whole)}"
    )
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    wrong = manifest.check_object(directory, record)
    assert wrong is not None
    assert f"the manifest says {record.sha256[:16]}..." in wrong
    path.unlink()
    wrong = manifest.check_object(directory, record)
    assert wrong is not None
    assert "cannot be read (No such file or directory)" in wrong


def test_an_atomic_write_replaces_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    manifest.write_atomically(path, b"old")
    manifest.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        manifest.write_atomically(path, b"broken")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


# What leads out of a pack, or is more than any


@pytest.mark.parametrize(
    "name",
    [
        "../evil.so",
        "/tmp/evil.so",
        "a/b.so",
        "..",
        ".",
        "",
        ".hidden.so",
        "a\nb.so",
        "a b.so",
        None,
        3,
    ],
)
def test_a_file_name_that_leads_out_of_the_pack_is_refused(tmp_path: Path, name: Any) -> None:
    built = synthetic.pack(tmp_path, synthetic.catalog(), "sm_90a")
    body = json.loads(manifest.dumps(built))
    (host,) = body["hosts"].values()
    host["objects"]["scatter"]["file"] = name
    (tmp_path / "sm_90a" / manifest.NAME).write_text(manifest.sealed(body))
    with pytest.raises(ManifestError, match="is no name of a file in the pack"):
        manifest.read(tmp_path / "sm_90a")


@pytest.mark.parametrize(
    ("extent", "said"),
    [
        ({"tokens": "1..1000000000000", "requests": 1}, "more than a million values"),
        ({"tokens": "1..1000000", "requests": "1..1000000"}, "outside 1..1024"),
        ({"tokens": "1..1024", "requests": "1..65536"}, "67,108,"),
        ({"tokens": 0, "requests": 1}, "tokens 0..0 are outside"),
        ({"tokens": 1, "requests": -5}, "requests -5..-5 are outside"),
    ],
)
def test_extents_that_no_catalog_has_are_refused_before_they_are_counted(
    tmp_path: Path, extent: dict[str, Any], said: str
) -> None:
    built = synthetic.pack(tmp_path, synthetic.catalog(), "sm_90a")
    body = json.loads(manifest.dumps(built))
    body["cells"][0]["extent"] = [extent]
    (tmp_path / "sm_90a" / manifest.NAME).write_text(manifest.sealed(body))
    start = time.process_time()
    with pytest.raises(ManifestError, match=re.escape(said)):
        manifest.read(tmp_path / "sm_90a")
    assert time.process_time() - start < 2

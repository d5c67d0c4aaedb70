"""One judgement of a cell: what certificates and a pack's marks together make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specplan.plans import certificates, coverage, evidence, manifest
from specplan.plans.cell import Cell, State
from specplan.plans.certificates import Certificate, group_cells
from specplan.plans.manifest import Manifest, Use

from support import synthetic
from support.synthetic import Place, specplan


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return synthetic.pack(tmp_path_factory.mktemp("packs"), synthetic.catalog(), "sm_90a")


def marked(pack: Manifest, cells: set[Cell]) -> Manifest:
    """The pack with just these cells marked certified."""
    entries = [(c, group.uses, group.automatic, c in cells) for c, group in pack.cells()]
    return replace(pack, groups=manifest.group_cells(entries))


def certified(pack: Manifest) -> set[Cell]:
    return {cell for cell, group in pack.cells() if group.certified}


@st.composite
def certificate_of(draw: st.DrawFn, pack: Manifest) -> Certificate:
    """A certificate of some cells, of these bits or of others, with these launch parameters or
    others, of this geometry or another.
    """
    family = draw(st.sampled_from(sorted(pack.families)))
    whole = synthetic.certificate(pack, family)
    cells = draw(st.lists(st.sampled_from(list(whole.cells())), unique=True))
    launched = [
        replace(cell, uses=tuple(Use(use.symbol, (("ctas", 2),)) for use in cell.uses))
        if draw(st.integers(0, 5)) == 0
        else cell
        for cell in cells
    ]
    plans = {
        symbol: replace(plan, host_code="0" * 64) if draw(st.integers(0, 3)) == 0 else plan
        for symbol, plan in whole.plans.items()
        if draw(st.integers(0, 5))
    }
    problems = {
        name: {**geometry, "draft": 9} if draw(st.integers(0, 5)) == 0 else geometry
        for name, geometry in whole.problems.items()
    }
    return replace(whole, groups=group_cells(launched), plans=plans, problems=problems)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_marks_and_judgement_agree_cell_by_cell(built: Manifest, data: st.DataObject) -> None:
    """Whatever a pack marks and whatever the certificates say: the runtime's marks are the cells
    that are judged certified, the build's marks are those that a certificate covers.
    """
    cells = [cell for cell, _ in built.cells()]
    pack = marked(built, set(data.draw(st.lists(st.sampled_from(cells)))))
    known = data.draw(st.lists(certificate_of(built), max_size=3))
    judged = {
        cell: evidence.judge(cell, group, pack, known).state is State.CERTIFIED
        for cell, group in pack.cells()
    }
    covered = {
        cell
        for cell, group in pack.cells()
        if any(
            e.family == cell.family and e.mismatch(cell, group.uses, pack) is None for e in known
        )
    }
    backed, right = evidence.backed(pack, known), evidence.mark(pack, known)
    assert certified(backed) == {cell for cell, holds in judged.items() if holds}
    assert certified(backed) == certified(pack) & covered
    assert certified(right) == covered
    found = evidence.compare(pack, known)
    assert set(found.ahead) == certified(pack) - covered
    assert set(found.behind) == covered - certified(pack)
    # Nothing else of the pack changes, and what is right stays as it is.
    for other in (backed, right):
        assert replace(other, groups=()) == replace(pack, groups=())
        assert {c: (g.uses, g.automatic) for c, g in other.cells()} == {
            c: (g.uses, g.automatic) for c, g in pack.cells()
        }
    assert evidence.mark(right, known) is right
    assert evidence.backed(right, known) is right


CELL = Cell("scatter", "large", "int32", "sm_90a", 1, 3, 8)


def judged(pack: Manifest, *known: Certificate) -> tuple[State, str]:
    group = pack.find(CELL)
    assert group is not None
    return tuple(evidence.judge(CELL, group, pack, known))  # type: ignore[return-value]


def test_a_cell_is_certified_where_it_is_marked_and_a_certificate_covers_it(
    built: Manifest,
) -> None:
    scatter = synthetic.certificate(built, "scatter")
    others = {s: replace(p, device_code="0" * 64) for s, p in scatter.plans.items()}
    stale = replace(scatter, plans=others)
    changed = "device code changed (no source or tool version differs)"
    pack = marked(built, {CELL})
    assert judged(pack, scatter) == (State.CERTIFIED, "")
    assert judged(pack, stale, scatter) == (State.CERTIFIED, "")
    assert judged(pack) == (State.CANDIDATE, evidence.UNBACKED)
    assert judged(pack, stale) == (State.STALE, changed)
    assert judged(built, scatter) == (State.CANDIDATE, evidence.UNMARKED)
    assert judged(built) == (State.CANDIDATE, "")
    assert judged(built, stale) == (State.STALE, changed)


# The same answer everywhere


def answers(place: Place, arch: str) -> dict[str, int]:
    """How many cells of an arch each command calls certified. The certificates are beside the
    pack, where the runtime looks, and nowhere else.
    """
    counted = {}
    ran = specplan("coverage", *place.options, "--arch", arch, "--json")
    cells = json.loads(ran.out)["cells"]
    counted["coverage"] = sum(cell["state"] == "certified" for cell in cells)
    ran = specplan("list", "packs", "--packs", place.packs, "--json")
    (row,) = (row for row in json.loads(ran.out)["packs"] if row["arch"] == arch)
    counted["list"] = row["cells"]["certified"]
    counted["explain"] = 0
    for cell in cells:
        call = [f"{name}={cell[name]}" for name in ("requests", "tokens", "problem", "splits")]
        said = specplan("explain", cell["family"], *call, "--arch", arch, *place.options, "--json")
        counted["explain"] += json.loads(said.out)["runs"]
    ran = specplan("doctor", "--packs", place.packs, "--json")
    (text,) = (text for name, text in json.loads(ran.out).items() if name.startswith("packs in"))
    counted["doctor"] = int(text.partition(f"{arch} (5 plans, ")[2].split()[0])
    places = [evidence.default_directory(), evidence.local_directory(place.packs / arch)]
    pack = manifest.read(place.packs / arch)
    known, wrong = evidence.read_all(places, arch, pack.families)
    assert not wrong
    counted["runtime"] = len(certified(evidence.backed(pack, known)))
    return counted


@pytest.fixture
def local(tmp_path: Path) -> Place:
    """A pack without a mark, and no certificate."""
    place = Place(tmp_path / "catalog.yaml", tmp_path / "packs", tmp_path / "certificates")
    place.catalog_path.write_text(synthetic.CATALOG)
    place.certificates.mkdir()
    synthetic.pack(place.packs, synthetic.catalog(), "sm_90a")
    return place


def test_every_command_and_the_runtime_give_one_answer(local: Place) -> None:
    directory = local.packs / "sm_90a"
    mends = f"mend it with `specplan mark {directory}`"

    def said(count: int, *complaint: str) -> None:
        assert set(answers(local, "sm_90a").values()) == {count}, answers(local, "sm_90a")
        ran = specplan("verify", directory)
        assert ran.code == (1 if complaint else 0)
        strict = specplan("coverage", *local.options, "--arch", "sm_90a", "--strict")
        assert strict.code == (0 if count == 32 and not complaint else 1)
        for text in complaint:
            assert text in ran.err and text in strict.err
            assert mends in ran.err and mends in strict.err

    said(0)
    # A certificate is laid beside the pack: the marks are older.
    pack = manifest.read(directory)
    scatter = synthetic.certificate(pack, "scatter")
    path = synthetic.write_certificate(evidence.local_directory(directory), scatter)
    said(0, "does not mark 20 cells that a certificate covers")
    ran = specplan("mark", directory)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        f"sm_90a: 20 cells certified, 20 of them newly marked, 0 marks taken away ({directory})\n"
    )
    said(20)
    # Somebody sets every mark, with the digest and all.
    pack = manifest.read(directory)
    synthetic.write_manifest(directory, marked(pack, {cell for cell, _ in pack.cells()}))
    said(20, "marks 12 cells certified that no certificate backs")
    # And the evidence goes.
    for file in path.parent.iterdir():
        file.unlink()
    said(0, "marks 32 cells certified that no certificate backs")
    assert specplan("mark", "--packs", local.packs).code == 0
    said(0)
    for family in ("scatter", "gather"):
        found = synthetic.certificate(pack, family)
        synthetic.write_certificate(evidence.local_directory(directory), found)
    assert specplan("mark", local.packs).code == 0
    said(32)


def test_a_certificate_from_elsewhere_is_carried_to_where_the_runtime_looks(local: Place) -> None:
    directory = local.packs / "sm_90a"
    for family in ("scatter", "gather"):
        found = synthetic.certificate(manifest.read(directory), family)
        synthetic.write_certificate(local.certificates, found)
    assert specplan("mark", directory, "--certificates", local.certificates).code == 0
    assert set(answers(local, "sm_90a").values()) == {32}
    beside = evidence.local_directory(directory) / "sm_90a"
    files = sorted(path.name for path in beside.iterdir())
    assert len(files) == 4
    assert specplan("mark", directory, "--certificates", local.certificates).code == 0
    assert sorted(path.name for path in beside.iterdir()) == files


def test_an_edited_certificate_is_no_evidence(local: Place) -> None:
    directory = local.packs / "sm_90a"
    scatter = synthetic.certificate(manifest.read(directory), "scatter")
    path = synthetic.write_certificate(evidence.local_directory(directory), scatter)
    assert specplan("mark", directory).code == 0
    path.write_text(path.read_text().replace("Device nine", "Device ten"))
    known, (wrong,) = evidence.read_all(
        [evidence.local_directory(directory)], "sm_90a", {"scatter"}
    )
    assert known == []
    assert str(wrong) == f"{path}: does not match its own digest: it was edited"
    for command in ("verify", "mark", "doctor", "list"):
        options = ("--packs", directory)
        ran = specplan(command, *options)
        assert ran.code == 1
        assert "it was edited" in ran.out + ran.err, command
    with pytest.raises(certificates.CertificateError):
        coverage.compute(synthetic.catalog(), local.packs, ["sm_90a"], [])


# A pack under another arch's name


def test_a_pack_of_another_arch_is_what_load_says_of_it(place: Place) -> None:
    from specplan.loading import refusal

    (place.packs / "sm_90a").rename(place.packs / "away")
    (place.packs / "away" / "manifest.json").rename(place.packs / "manifest.txt")
    (place.packs / "sm_100a").rename(place.packs / "sm_90a")
    error = refusal(place.packs / "sm_90a", "sm_90a")
    said = f"{place.packs / 'sm_90a'} holds a pack for sm_100a, not for sm_90a; build it again: "
    assert str(error).startswith(said)
    for command in ("verify", "list", "doctor", "mark"):
        ran = specplan(command, "--packs", place.packs)
        assert ran.code == 1
        assert said in ran.out + ran.err, command
    ran = specplan("coverage", *place.options, "--arch", "sm_90a")
    assert ran.code == 1
    assert ran.err.startswith(f"does not hold: {said}")
    assert "32 corrupt" in " ".join(
        f"{sum(row.state is State.CORRUPT for row in found.rows)} corrupt"
        for found in [
            coverage.compute(synthetic.catalog(), place.packs, ["sm_90a"], [place.certificates])
        ]
    )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return synthetic.place(tmp_path)

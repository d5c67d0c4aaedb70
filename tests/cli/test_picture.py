"""``coverage --svg`` and ``--html``: the counts are coverage's, nothing is fetched, and no kind is
told by its colour alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from specplan.plans import certificates, coverage
from specplan.plans.cell import Cell, State
from specplan.tools import picture
from specplan.tools.grids import KINDS, Grid, Patch, grids
from specplan.tools.marking import restamp

from support import synthetic
from support.synthetic import Place, specplan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def broken(tmp_path: Path) -> Place:
    """A place in which every kind of cell occurs."""
    place = synthetic.place(tmp_path)
    claims = synthetic.catalog()
    built = synthetic.pack(
        place.packs, claims, "sm_90a", keep=lambda c: (c.problem, c.requests) != ("large", 8)
    )
    scatter = synthetic.certificate(built, "scatter", keep=lambda c: c.tokens != 2)
    synthetic.write_certificate(place.certificates, scatter)
    gather = certificates.read(place.certificates / "sm_90a" / "gather.yaml")
    other = {s: replace(plan, device_code="0" * 64) for s, plan in gather.plans.items()}
    synthetic.write_certificate(place.certificates, replace(gather, plans=other))
    restamp(place.packs / "sm_90a", [place.certificates])
    synthetic.pack(place.packs, claims, "sm_100a", keep=lambda c: c.tokens != 1)
    place.object("sm_100a", "gather").write_bytes(b"x")
    return place


def judged(place: Place) -> tuple[coverage.Coverage, list[Grid]]:
    claims = synthetic.catalog(place.catalog_path.read_text())
    found = coverage.compute(claims, place.packs, list(claims.archs), [place.certificates])
    return found, grids(found, claims)


def root_of(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    return root if root.tag == f"{SVG}svg" else root.find(f".//{SVG}svg")  # type: ignore[return-value]


def patches(root: ElementTree.Element) -> Iterator[tuple[str, str, ElementTree.Element]]:
    """(family, arch, rectangle) of every patch of cells."""
    for group in root.iter(f"{SVG}g"):
        if "data-family" in group.attrib:
            for box in group.iter(f"{SVG}rect"):
                if "data-cells" in box.attrib:
                    yield group.attrib["data-family"], group.attrib["data-arch"], box


@pytest.mark.parametrize("form", ["svg", "html"])
def test_the_counts_are_those_of_coverage(broken: Place, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"coverage.{form}"
    ran = specplan("coverage", "--arch", "all", f"--{form}", file, *broken.options)
    assert ran.code == 1
    assert ran.out.startswith("family")
    states = {kind.name: kind.state.value for kind in KINDS}
    drawn: dict[str, dict[str, Counter[str]]] = {}
    seen = set()
    for family, arch, box in patches(root_of(file.read_text())):
        kind = box.attrib["data-kind"]
        seen.add(kind)
        counter = drawn.setdefault(family, {}).setdefault(arch, Counter())
        counter[states[kind]] += int(box.attrib["data-cells"])
    found, _ = judged(broken)
    assert drawn == found.summary()
    # Or this test would not see the kinds that are rare.
    assert seen == {kind.name for kind in KINDS}


def test_what_holds_and_what_does_not_is_in_words(broken: Place, tmp_path: Path) -> None:
    file = tmp_path / "coverage.svg"
    specplan("coverage", "--arch", "all", "--svg", file, *broken.options)
    found, drawn = judged(broken)
    failed = sum(not row.holds for row in found.rows)
    assert 0 < failed < len(found.rows)
    root = root_of(file.read_text())
    text = " ".join(root.itertext())
    assert f"{len(found.rows)} cells on sm_90a, sm_100a: {failed} claims of the catalog" in text
    total: Counter[str] = Counter()
    for row in found.rows:
        for kind in KINDS:
            if kind.state is row.state and kind.holds == row.holds:
                total[kind.name] += row.state is not State.MISSING
    for kind in KINDS:
        count = sum(grid.counts(arch)[kind] for grid in drawn for arch in ("sm_90a", "sm_100a"))
        if kind.state is not State.MISSING:
            assert count == total[kind.name]
        assert f"{picture.SIGNS[kind.name]} {kind.label}: {count} cells" in text


def test_where_every_claim_holds_the_picture_says_so(tmp_path: Path) -> None:
    place = synthetic.place(tmp_path)
    file = tmp_path / "coverage.html"
    ran = specplan("coverage", "--html", file, *place.options)
    assert ran.code == 0
    text = file.read_text()
    assert "64 cells on sm_90a, sm_100a: every claim of the catalog holds" in text
    assert "Does not hold" not in text


@pytest.mark.parametrize("draw", [picture.svg, picture.html], ids=["svg", "html"])
def test_nothing_is_fetched_and_nothing_runs(
    broken: Place, draw: Callable[[coverage.Coverage, list[Grid]], str]
) -> None:
    text = draw(*judged(broken))
    bare = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//|src=|href=|@import|<script|\bon\w+=", bare)
    assert set(re.findall(r"url\(([^)]*)\)", bare)) == {f"#sp-{kind.name}" for kind in KINDS}
    assert "prefers-color-scheme:dark" in text


def test_every_kind_has_a_pattern_a_sign_and_a_word_of_its_own(broken: Place) -> None:
    root = root_of(picture.svg(*judged(broken)))
    patterns = {}
    for pattern in root.iter(f"{SVG}pattern"):
        lines = [path.attrib["d"] for path in pattern.iter(f"{SVG}path")]
        patterns[pattern.attrib["id"]] = "".join(lines)
    assert set(patterns) == {f"sp-{kind.name}" for kind in KINDS}
    # Solid is a pattern, too: one kind has no lines.
    assert len(set(patterns.values())) == len(KINDS)
    assert len(set(picture.SIGNS.values())) == len({kind.label for kind in KINDS}) == len(KINDS)
    for shade in ("light", "dark"):
        assert len({getattr(look, shade).thin for look in picture.LOOKS.values()}) == len(KINDS)
    for *_, box in patches(root):
        title = box.find(f"{SVG}title")
        label = next(kind.label for kind in KINDS if kind.name == box.attrib["data-kind"])
        assert title is not None
        assert label in (title.text or "")


def cells_of(patch: Patch) -> set[tuple[int, int]]:
    first, last = patch.requests
    return {(tokens, r) for tokens in patch.tokens for r in range(first, last + 1)}


def test_patches_are_the_cells_each_once_and_neighbours_are_joined(broken: Place) -> None:
    found, drawn = judged(broken)
    rows = {row.cell: row for row in found.rows}
    seen: Counter[Cell] = Counter()
    for grid in drawn:
        for strip in grid.strips:
            for (_, arch), plot in strip.plots.items():
                for patch in plot:
                    assert patch.cells == len(cells_of(patch)) * len(strip.problems)
                    for problem in strip.problems:
                        for tokens, requests in cells_of(patch):
                            cell = Cell(
                                *(grid.family, problem, grid.dtype, arch, 1, tokens, requests)
                            )
                            seen[cell] += 1
                            assert rows[cell].state is patch.kind.state
    assert seen == Counter(list(rows))
    small = next(s for s in drawn[0].strips if s.problems == ("small",))
    assert [(p.requests, p.tokens) for p in small.plots[0, "sm_90a"]] == [
        ((1, 4), (1,)),
        ((1, 4), (2,)),
    ]


FORCED = """
      - problems: [small]
        requests: 3
        tokens: [1, 2]
        splits: 2
        dtypes: [int32]
        candidate: [sm_90a]
        why: Splits that the rule does not choose.
"""


def test_forced_splits_have_a_band_of_their_own(tmp_path: Path) -> None:
    head, gather = synthetic.CATALOG.split("  gather:")
    text = head + FORCED.lstrip("\n") + "  gather:" + gather
    place = synthetic.place(tmp_path, text)
    _, drawn = judged(place)
    small = next(s for s in drawn[0].strips if s.problems == ("small",))
    assert list(small.bands) == [0, 2]
    (patch,) = small.plots[2, "sm_90a"]
    assert (patch.requests, patch.tokens, patch.splits, patch.cells) == ((3, 3), (1, 2), (2, 2), 2)
    assert (2, "sm_100a") not in small.plots


def test_problems_that_look_alike_share_a_strip(tmp_path: Path) -> None:
    text = synthetic.CATALOG.replace(
        "      large: {history: 4, next: 4, draft: 3}\n",
        "      large: {history: 4, next: 4, draft: 3}\n"
        "      wide: {history: 4, next: 8, draft: 7}\n",
    ).replace("problems: [large]", "problems: [large, wide]", 1)
    place = synthetic.place(tmp_path, text)
    found, drawn = judged(place)
    assert [strip.problems for strip in drawn[0].strips] == [("small",), ("large", "wide")]
    assert (
        sum(drawn[0].counts("sm_90a").values()) == found.summary()["scatter"]["sm_90a"]["certified"]
    )


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    place = synthetic.place(tmp_path)
    file = tmp_path / "nowhere" / "coverage.svg"
    ran = specplan("coverage", "--svg", file, *place.options)
    assert ran.code == 1
    assert ran.err == f"error: {file} cannot be written (No such file or directory)\n"


def test_a_deployment_has_no_picture(tmp_path: Path) -> None:
    place = synthetic.place(tmp_path)
    ran = specplan(
        *("coverage", "--deployment", tmp_path / "x.yaml", "--svg", tmp_path / "x.svg"),
        *place.options,
    )
    assert ran.code == 2
    assert "--svg and --html show the catalog" in ran.err


def test_the_same_coverage_is_the_same_file(broken: Place) -> None:
    assert picture.html(*judged(broken)) == picture.html(*judged(broken))

"""Certificates: read back as written, every edit seen, nothing taken that cannot be true, and
matched by the certified bits and parameters alone.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specplan.plans import certificates, evidence, manifest, ranges
from specplan.plans.cell import Cell
from specplan.plans.certificates import (
    EVERY_OUTPUT,
    Certificate,
    CertificateError,
    CertifiedCell,
    CertifiedPlan,
    Output,
    Tally,
    group_cells,
    join_tallies,
)
from specplan.plans.manifest import Manifest, Use

from support import synthetic

CELL = Cell("scatter", "large", "int32", "sm_90a", 1, 3, 8)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return synthetic.pack(tmp_path_factory.mktemp("packs"), synthetic.catalog(), "sm_90a")


@pytest.fixture(scope="module")
def scatter(built: Manifest) -> Certificate:
    return synthetic.certificate(built, "scatter")


def uses(built: Manifest, cell: Cell = CELL) -> tuple[Use, ...]:
    group = built.find(cell)
    assert group is not None
    return group.uses


def changed_plan(certificate: Certificate, symbol: str, **bits: str) -> Certificate:
    plans = {**certificate.plans, symbol: replace(certificate.plans[symbol], **bits)}
    return replace(certificate, plans=plans)


# Files


def test_what_is_written_is_read_back(scatter: Certificate, tmp_path: Path) -> None:
    path = synthetic.write_certificate(tmp_path, scatter)
    assert path == tmp_path / "sm_90a" / "scatter.yaml"
    again = certificates.read(path)
    assert again == scatter
    assert again.count == len(list(again.cells())) == synthetic.CELLS["scatter"]


def test_the_head_says_what_people_want_to_know(scatter: Certificate, tmp_path: Path) -> None:
    path = synthetic.write_certificate(tmp_path, scatter)
    text = path.read_text()
    assert text.startswith("# Written by `specplan certify`. Evidence, not configuration")
    (cells,) = path.parent.glob("*.json")
    sha256 = hashlib.sha256(cells.read_bytes()).hexdigest()
    assert cells.name == f"scatter-{sha256[:16]}.json"
    assert f"cells: {{file: {cells.name}, sha256: {sha256}, count: 20}}\ndigest: " in text
    symbol = "scatter__history4__next4__draft3__lanes4__sm_90a"
    assert "- output: out\n  measure: '|error| / (0.001 + 0.01 |value|)'\n  bound: 1.0\n" in text
    assert f"\n    {symbol}: {{large: 0.5}}\n" in text
    assert "\n  source: equal bit for bit\n" in text
    # Signatures are long, and each stands once.
    for plan in scatter.plans.values():
        assert text.count(plan.signature) == 1


def test_cells_that_ran_alike_share_a_line(scatter: Certificate) -> None:
    lines = evidence.dumps(scatter).splitlines()
    (large,) = (line for line in lines if line.startswith('["large"'))
    assert '["1, 3","1..2, 8",13],["2, 4","1..2, 8",12]' in large


ERRORS = st.floats(0, 1, allow_nan=False)
CELLS = st.dictionaries(
    st.tuples(
        st.sampled_from(["mtp1", "on"]),
        st.sampled_from(["int32", "1e5"]),
        st.integers(1, 3),
        st.integers(1, 9),
        st.integers(1, 300),
    ),
    st.tuples(
        st.sampled_from(["p__sm_90a", "0123__sm_90a"]),
        st.integers(0, 9),
        st.integers(1, 500),
        ERRORS,
    ),
    max_size=12,
)
#: What can stand in a text of a certificate: no control characters, and something.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1).filter(
    lambda text: bool(text.strip())
)


@settings(max_examples=40)
@given(CELLS, st.text("0123456789e", min_size=64, max_size=64), TEXTS, TEXTS)
def test_any_certificate_survives_its_files(
    tmp_path_factory: pytest.TempPathFactory,
    cells: dict[tuple[str, str, int, int, int], tuple[str, int, int, float]],
    digest: str,
    device: str,
    signature: str,
) -> None:
    """Digests like numbers, names like booleans and very small errors stay what they are."""
    output = Output("ulp: a 'quoted' one", "%s #: {", 1.0, "a: b")
    written = Certificate(
        family="scatter",
        arch="sm_90a",
        tools={"nvidia-cutlass-dsl": "4.8"},
        sources={"specplan.plans.plan": digest},
        problems={"mtp1": {"history": 2}, "on": {"history": 3}},
        plans={
            "0123__sm_90a": CertifiedPlan(digest[::-1], digest, signature),
            "p__sm_90a": CertifiedPlan(digest, digest[::-1], "f(x: int32)"),
        },
        groups=group_cells(
            CertifiedCell(*at, (Use(symbol, (("ctas", ctas),)),), comparisons)
            for at, (symbol, ctas, comparisons, _) in cells.items()
        ),
        device={**synthetic.DEVICE, "name": device},
        date="2026-01-31",
        suite=("1", "on"),
        recorded=EVERY_OUTPUT,
        tallies=join_tallies(
            Tally(output, comparisons, {symbol: {at[0]: error}})
            for at, (symbol, _, comparisons, error) in cells.items()
        ),
    )
    path = tmp_path_factory.getbasetemp() / "sm_90a" / "scatter.any.yaml"
    path.parent.mkdir(exist_ok=True)
    certificates.write(path, written)
    again = certificates.read(path)
    assert again == written
    assert {(c.problem, c.dtype, c.splits, c.tokens, c.requests) for c in again.cells()} == set(
        cells
    )


def test_writing_again_leaves_one_cells_file(scatter: Certificate, tmp_path: Path) -> None:
    path = synthetic.write_certificate(tmp_path, scatter)
    (path.parent / "scatter-notes.json").touch()
    first = {p.name for p in path.parent.iterdir()}
    other = replace(scatter, groups=scatter.groups[:1])
    certificates.write(path, other)
    second = {p.name for p in path.parent.iterdir()}
    assert len(first) == len(second) == 3
    assert first & second == {"scatter.yaml", "scatter-notes.json"}
    assert certificates.read(path) == other
    certificates.write(path, other)
    assert {p.name for p in path.parent.iterdir()} == second


def test_a_write_that_is_killed_leaves_the_old_certificate(
    scatter: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic.write_certificate(tmp_path, scatter)
    real = certificates.write_atomically

    def killed(to: Path, data: bytes) -> None:
        if to.suffix == ".yaml":
            raise KeyboardInterrupt
        real(to, data)

    monkeypatch.setattr(certificates, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        certificates.write(path, replace(scatter, groups=scatter.groups[:1]))
    assert certificates.read(path) == scatter


# Edits and accidents


@settings(max_examples=150)
@given(st.data())
def test_every_edit_is_seen(
    tmp_path_factory: pytest.TempPathFactory, scatter: Certificate, data: st.DataObject
) -> None:
    """Any byte changed, taken away or added, in the head and in the cells."""
    path = synthetic.write_certificate(tmp_path_factory.getbasetemp() / "edited", scatter)
    which = data.draw(st.sampled_from(sorted(path.parent.iterdir())))
    whole = which.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["change", "cut", "add", "end"]))
    byte = bytes([data.draw(st.integers(32, 126).filter(lambda b: b != whole[at]))])
    edited = {
        "change": whole[:at] + byte + whole[at + 1 :],
        "cut": whole[:at] + whole[at + 1 :],
        "add": whole[:at] + byte + whole[at:],
        "end": whole[:at],
    }[kind]
    which.write_bytes(edited)
    try:
        with pytest.raises(CertificateError, match=r"^/"):
            certificates.read(path)
    finally:
        which.write_bytes(whole)
    assert certificates.read(path) == scatter


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: Device nine", "name: Device ten"),
        ("date: '2026-01-31'", "date: '2026-02-31'"),
        ("{large: 0.5}", "{large: 0.0}"),
        ("bound: 1.0", "bound: .inf"),
        ("arch: sm_90a", "arch: sm_100a"),
    ],
)
def test_an_edit_of_the_head_is_called_an_edit(
    scatter: Certificate, tmp_path: Path, old: str, new: str
) -> None:
    path = synthetic.write_certificate(tmp_path, scatter)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CertificateError, match="does not match its own digest: it was edited"):
        certificates.read(path)


def test_files_that_are_no_certificates_are_errors_with_their_path(
    scatter: Certificate, tmp_path: Path
) -> None:
    path = synthetic.write_certificate(tmp_path, scatter)
    (cells,) = path.parent.glob("*.json")
    text = path.read_text()

    def said(content: str) -> str:
        path.write_text(content)
        with pytest.raises(CertificateError) as caught:
            certificates.read(path)
        assert str(caught.value).startswith(f"{path}: ")
        return str(caught.value)

    old = said("schema: 1\nfamily: scatter\n")
    assert "schema 1, this version of specplan reads 2; certify again" in old
    assert "edited or cut" in said("")
    assert "edited or cut" in said(text[:-1])
    cells.rename(cells.with_suffix(".txt"))
    assert "its cells cannot be read" in said(text)
    cells.write_text("{}")
    assert "is not the file of cells that it names" in said(text)
    path.unlink()
    with pytest.raises(CertificateError, match="cannot be read"):
        certificates.read(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sm_100a/scatter.yaml", "is of arch 'sm_90a'"),
        ("sm_90a/gather.yaml", "is of family 'scatter'"),
        ("sm_90a/scatterer.yaml", "is of family 'scatter'"),
    ],
)
def test_a_certificate_lies_where_it_says(
    scatter: Certificate, tmp_path: Path, name: str, said: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    certificates.write(path, scatter)
    with pytest.raises(CertificateError, match=said):
        certificates.read(path)


# What cannot be true, whoever wrote it


def with_output(certificate: Certificate, **changes: Any) -> Certificate:
    first, *rest = certificate.tallies
    tallies = (replace(first, output=replace(first.output, **changes)), *rest)
    return replace(certificate, tallies=tallies)


def with_error(certificate: Certificate, error: float, at: int = 0) -> Certificate:
    tallies = list(certificate.tallies)
    errors = {s: dict.fromkeys(problems, error) for s, problems in tallies[at].errors.items()}
    tallies[at] = replace(tallies[at], errors=errors)
    return replace(certificate, tallies=tuple(tallies))


def on_device(certificate: Certificate, **changes: Any) -> Certificate:
    return replace(certificate, device={**certificate.device, **changes})


def with_extent(certificate: Certificate, *extent: Any) -> Certificate:
    group = replace(certificate.groups[0], extent=extent)
    return replace(certificate, groups=(group, *certificate.groups[1:]))


FUTURE = (datetime.date.today() + datetime.timedelta(days=500)).isoformat()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: on_device(c, capability="10.0"), "capability '10.0' does not run sm_90a"),
        (lambda c: on_device(c, capability="nine"), "does not run sm_90a"),
        (lambda c: on_device(c, name=""), "is no text"),
        (lambda c: on_device(c, sm_count=0), "no integer"),
        (lambda c: replace(c, device={}), "KeyError"),
        (lambda c: replace(c, date=FUTURE), "is in the future"),
        (lambda c: replace(c, date="2026-02-30"), "day is out of range"),
        (lambda c: replace(c, date="yesterday"), "is no date"),
        (lambda c: replace(c, date="2026-W05-6"), "is no date"),
        (lambda c: replace(c, suite=()), "no check was made"),
        (lambda c: replace(c, recorded="some"), "recorded is 'some'"),
        (lambda c: with_output(c, bound=math.inf), "no finite number"),
        (lambda c: with_output(c, bound=math.nan), "no finite number"),
        (lambda c: with_output(c, bound=-1.0), "is no bound"),
        (lambda c: with_output(with_error(c, 0.0), bound=0.0), "is no bound"),
        (lambda c: with_output(c, measure="bits that differ"), "is no bound"),
        (lambda c: with_output(c, source=" "), "is no text"),
        (lambda c: with_error(c, 1.5), "does not keep its bound"),
        (lambda c: with_error(c, 1.0, at=1), "does not keep its bound"),
        (lambda c: with_error(c, -0.5), "does not keep its bound"),
        (lambda c: with_error(c, math.nan), "is not nan"),
        (lambda c: replace(c, tallies=()), "nothing was compared of plan"),
        (lambda c: replace(c, plans={**c.plans, "x__sm_100a": A_PLAN}), "is not of arch sm_90a"),
        (lambda c: replace(c, plans={**c.plans, "x__sm_90a": NO_HASH}), "is no sha256"),
        (lambda c: replace(c, sources={"specplan.plans": "1"}), "is no sha256"),
        (lambda c: replace(c, problems={}), "has no geometry"),
        (lambda c: with_extent(c, ((0,), (1,), 3)), "tokens 0..0 are outside 1..1024"),
        (lambda c: with_extent(c, ((1,), (70000,), 3)), "requests 70000..70000 are outside"),
        (lambda c: with_extent(c, ((1,), (1,), 0)), "0 is no integer"),
        (lambda c: with_extent(c, ((1,), (1,), 3), ((1,), (1, 2), 3)), "a cell is there twice"),
        (
            lambda c: with_extent(c, (tuple(range(1, 1025)), tuple(range(1, 65537)), 1)),
            "67,108,8.. cells, more than the 2,000,000",
        ),
    ],
)
def test_what_cannot_be_true_is_refused(
    scatter: Certificate, tmp_path: Path, change: Callable[[Certificate], Certificate], said: str
) -> None:
    path = tmp_path / "sm_90a" / "scatter.yaml"
    path.parent.mkdir()
    certificates.write(path, change(scatter))
    with pytest.raises(CertificateError, match=said) as caught:
        certificates.read(path)
    assert str(tmp_path) in str(caught.value)


A_PLAN = CertifiedPlan("1" * 64, "2" * 64, "f()")
NO_HASH = CertifiedPlan("other", "2" * 64, "f()")


def test_a_clock_that_is_behind_does_not_make_certificates_of_the_future() -> None:
    """The day of this version is today at the earliest, and tomorrow is today somewhere."""
    version = datetime.date.fromisoformat(certificates.DATE)
    certificates.check_date((version + datetime.timedelta(days=1)).isoformat())
    today = datetime.datetime.now(datetime.UTC).date()
    certificates.check_date(today.isoformat())
    with pytest.raises(ValueError, match="in the future"):
        certificates.check_date((max(today, version) + datetime.timedelta(days=2)).isoformat())


def test_extents_that_no_catalog_has_are_refused_before_they_are_counted() -> None:
    with pytest.raises(ValueError, match="more than a million values"):
        ranges.extent("1..1000000000000", 1)
    with pytest.raises(ValueError, match=r"outside 1\.\.1024"):
        ranges.extent("1..1000000", "1..1000000")


def test_read_all_takes_every_file_of_the_arch_in_every_directory(
    built: Manifest, tmp_path: Path
) -> None:
    for directory, family in (("a", "scatter"), ("a", "gather"), ("b", "scatter")):
        synthetic.write_certificate(tmp_path / directory, synthetic.certificate(built, family))
    directories = [tmp_path / "a", tmp_path / "b", tmp_path / "nowhere"]
    found = certificates.read_all(directories, "sm_90a")
    assert [each.family for each in found] == ["gather", "scatter", "scatter"]
    assert certificates.read_all(directories, "sm_100a") == []


# Matching


def test_the_bits_that_were_certified_match(built: Manifest, scatter: Certificate) -> None:
    for cell, group in built.cells("scatter"):
        assert scatter.mismatch(cell, group.uses, built) is None


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        ("device_code", "device code changed ("),
        ("host_code", "host code changed ("),
        ("signature", "signature changed ("),
    ],
)
def test_other_bits_do_not_match(
    built: Manifest, scatter: Certificate, bits: str, said: str
) -> None:
    (use,) = uses(built)
    other = changed_plan(scatter, use.symbol, **{bits: "other"})
    mismatch = other.mismatch(CELL, uses(built), built)
    assert mismatch is not None
    assert mismatch.startswith(said)
    small = CELL._replace(problem="small", tokens=1, requests=1)
    assert uses(built, small) != uses(built)
    assert other.mismatch(small, uses(built, small), built) is None


def test_other_launch_parameters_do_not_match(built: Manifest, scatter: Certificate) -> None:
    (use,) = uses(built)
    other = (replace(use, launch=(("ctas", 2),)),)
    assert scatter.mismatch(CELL, other, built) == (
        "the planning rule gives other plans or launch parameters"
    )


def test_another_geometry_does_not_match(built: Manifest, scatter: Certificate) -> None:
    problems = {**scatter.problems, "large": {**scatter.problems["large"], "draft": 2}}
    other = replace(scatter, problems=problems)
    assert other.mismatch(CELL, uses(built), built) == "the geometry of problem 'large' changed"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c._replace(requests=7),
        lambda c: c._replace(tokens=2, requests=4),
        lambda c: c._replace(splits=2),
        lambda c: c._replace(dtype="int64"),
        lambda c: c._replace(problem="huge"),
    ],
)
def test_a_cell_that_did_not_run_has_no_evidence(
    built: Manifest, scatter: Certificate, change: Callable[[Cell], Cell]
) -> None:
    assert scatter.mismatch(change(CELL), uses(built), built) == certificates.NO_EVIDENCE


def test_a_cell_whose_plan_is_not_in_the_certificate_does_not_match(
    built: Manifest, scatter: Certificate
) -> None:
    (use,) = uses(built)
    plans = {symbol: plan for symbol, plan in scatter.plans.items() if symbol != use.symbol}
    mismatch = replace(scatter, plans=plans).mismatch(CELL, uses(built), built)
    assert mismatch == f"plan {use.symbol} has no evidence"


# What changed


def key_of(built: Manifest) -> dict[str, Any]:
    key = built.plans[uses(built)[0].symbol].key
    return {**key, "sources": dict(key["sources"]), "tools": dict(key["tools"])}


def test_nothing_changed_says_so(built: Manifest, scatter: Certificate) -> None:
    assert scatter.changed_inputs(key_of(built)) == "no source or tool version differs"


def test_a_changed_source_is_named(built: Manifest, scatter: Certificate) -> None:
    key = key_of(built)
    key["sources"]["specplan.kernels.scatter.kernel"] = "9" * 64
    assert scatter.changed_inputs(key) == "source kernels.scatter.kernel"


def test_a_new_source_is_named(built: Manifest, scatter: Certificate) -> None:
    key = key_of(built)
    key["sources"]["specplan.kernels.device.memory"] = "9" * 64
    assert scatter.changed_inputs(key) == "source kernels.device.memory"


def test_a_changed_tool_is_named_with_both_versions(built: Manifest, scatter: Certificate) -> None:
    key = key_of(built)
    key["tools"].update({"nvidia-cutlass-dsl": "4.9.0", "nvidia-cutlass-dsl-libs-cu13": "4.9.0"})
    assert scatter.changed_inputs(key) == (
        "nvidia-cutlass-dsl 4.8.1 -> 4.9.0, nvidia-cutlass-dsl-libs-cu13 absent -> 4.9.0"
    )


def test_a_python_that_is_not_known_to_compile_alike_is_named(
    built: Manifest, scatter: Certificate
) -> None:
    known = {**key_of(built), "python": "3.11 to 3.13"}
    assert scatter.changed_inputs(known) == "no source or tool version differs"
    assert scatter.changed_inputs({**known, "python": "3.14"}) == "Python 3.14"


def test_the_mismatch_names_the_changed_input(built: Manifest, scatter: Certificate) -> None:
    (use,) = uses(built)
    key = key_of(built)
    key["sources"]["specplan.kernels.scatter.kernel"] = "9" * 64
    rebuilt = replace(built.plans[use.symbol], device_code="new", key=key)
    pack = replace(built, plans={**built.plans, use.symbol: rebuilt})
    assert scatter.mismatch(CELL, uses(built), pack) == (
        "device code changed (source kernels.scatter.kernel)"
    )


# The ones that are committed


def test_every_committed_certificate_is_read() -> None:
    root = certificates.default_directory()
    paths = sorted(root.glob("*/*.yaml"))
    assert paths
    for path in paths:
        found = certificates.read(path)
        assert found.count
        # A page that people read.
        assert len(path.read_text().splitlines()) < 400
    named = {certificates._cells_named(path) for path in paths}
    assert {path.name for path in root.glob("*/*.json")} == named


def test_no_cell_is_certified_on_an_arch_without_a_committed_certificate(shipped: Any) -> None:
    root = certificates.default_directory()
    evidence = {arch: certificates.read_all([root], arch) for arch in shipped.archs}
    for arch in shipped.archs:
        covered = {
            Cell(e.family, c.problem, c.dtype, arch, c.splits, c.tokens, c.requests): c
            for e in evidence[arch]
            for c in e.cells()
        }
        for cell in shipped.cells(arch):
            if shipped.claims[cell]:
                assert cell in covered, cell
                symbols = [plan.symbol for plan in shipped.plans_of(cell)]
                assert symbols == [use.symbol for use in covered[cell].uses], cell


def test_the_manifest_marks_what_a_certificate_covers(tmp_path: Path) -> None:
    claims = synthetic.catalog()
    built = synthetic.pack(tmp_path, claims, "sm_90a")
    assert not any(group.certified for group in built.groups)
    part = synthetic.certificate(built, "scatter", keep=lambda cell: cell.requests != 8)
    synthetic.pack(tmp_path, claims, "sm_90a", evidence=[part])
    for cell, group in manifest.read(tmp_path / "sm_90a").cells():
        assert group.certified == (cell.family == "scatter" and cell.requests != 8)

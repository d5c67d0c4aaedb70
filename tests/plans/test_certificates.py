"""Certificates: read back as written, and matched by the certified bits and parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specplan.plans import certificates, manifest
from specplan.plans.cell import Cell
from specplan.plans.certificates import (
    Certificate,
    CertificateError,
    CertifiedCell,
    CertifiedPlan,
    Result,
)
from specplan.plans.manifest import Manifest, Use

import synthetic

CELL = Cell("scatter", "large", "int32", "sm_90a", 1, 3, 8)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return synthetic.pack(tmp_path_factory.mktemp("packs"), synthetic.catalog(), "sm_90a")


@pytest.fixture(scope="module")
def evidence(built: Manifest) -> Certificate:
    return synthetic.certificate(built, "scatter")


def uses(built: Manifest, cell: Cell = CELL) -> tuple[Use, ...]:
    group = built.find(cell)
    assert group is not None
    return group.uses


def changed_plan(certificate: Certificate, symbol: str, **bits: str) -> Certificate:
    plans = {**certificate.plans, symbol: replace(certificate.plans[symbol], **bits)}
    return replace(certificate, plans=plans)


# Files


def test_what_is_written_is_read_back(evidence: Certificate, tmp_path: Path) -> None:
    path = synthetic.write_certificate(tmp_path, evidence)
    assert path == tmp_path / "sm_90a" / "scatter.yaml"
    again = certificates.read(path)
    assert again.table == evidence.table
    assert len(again.cells) == len(evidence.cells) == synthetic.CELLS["scatter"]
    assert replace(again, cells=()) == replace(evidence, cells=())
    assert certificates.dumps(again) == certificates.dumps(evidence)


def test_the_text_says_that_it_is_evidence(evidence: Certificate) -> None:
    text = certificates.dumps(evidence)
    assert text.startswith("# Written by `specplan certify`. Evidence, not configuration")


def test_cells_with_equal_results_share_a_line(evidence: Certificate) -> None:
    lines = certificates.dumps(evidence).replace("'", "").splitlines()
    large = [line for line in lines if "requests: 1..2, 8" in line]
    assert [line.partition(", requests")[0] for line in large] == [
        "  - {tokens: 1, 3",
        "  - {tokens: 2, 4",
    ]


ERRORS = st.floats(0, allow_nan=False, allow_infinity=False)
RESULTS = st.builds(
    Result,
    st.sampled_from(["bits that differ", "ulp: a 'quoted' one"]),
    ERRORS,
    ERRORS,
    st.integers(1, 500),
).filter(lambda result: result.error <= result.bound)
CELLS = st.dictionaries(
    st.tuples(
        st.sampled_from(["mtp1", "on"]),
        st.sampled_from(["int32", "1e5"]),
        st.integers(1, 3),
        st.integers(1, 9),
        st.integers(1, 300),
    ),
    st.tuples(st.sampled_from(["p__sm_90a", "0123"]), st.integers(0, 9), RESULTS),
    max_size=12,
)


@settings(max_examples=40)
@given(CELLS, st.text("0123456789e", min_size=64, max_size=64), st.text(max_size=20))
def test_any_certificate_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory,
    cells: dict[tuple[str, str, int, int, int], tuple[str, int, Result]],
    digest: str,
    device: str,
) -> None:
    """Digests like numbers, names like booleans and very small errors stay what they are."""
    written = Certificate(
        "scatter",
        "sm_90a",
        {"name": device, "sm_count": 132},
        "2026-01-31",
        {"nvidia-cutlass-dsl": "4.8"},
        {"specplan.plans.plan": digest},
        ("1", "on"),
        {"mtp1": {"history": 2}, "on": {"history": 3}},
        {
            "p__sm_90a": CertifiedPlan(digest, digest[::-1], "f(x: int32)"),
            "0123": CertifiedPlan("", "1", ""),
        },
        tuple(
            CertifiedCell(*at, (Use(symbol, (("ctas", ctas),)),), result)
            for at, (symbol, ctas, result) in cells.items()
        ),
    )
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(certificates.dumps(written), encoding="utf-8")
    again = certificates.read(path)
    assert again.table == written.table
    assert replace(again, cells=()) == replace(written, cells=())


def broken(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CertificateError) as caught:
        certificates.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def test_files_that_are_no_certificates_are_errors_with_their_path(
    evidence: Certificate, tmp_path: Path
) -> None:
    path = tmp_path / "scatter.yaml"
    text = certificates.dumps(evidence)
    assert "schema 2, this version of specplan reads 1" in broken(
        path, text.replace("schema: 1", "schema: 2")
    )
    assert "cannot be read" in broken(path, "a: [")
    assert "not a certificate" in broken(path, "")
    assert "not a certificate" in broken(path, "[1]")
    assert "not a certificate (KeyError('family'))" in broken(
        path, text.replace("family:", "famile:")
    )
    assert "empty range" in broken(path, text.replace("'1, 3'", "3..1"))
    with pytest.raises(CertificateError, match="cannot be read"):
        certificates.read(tmp_path / "none.yaml")


@pytest.mark.parametrize("error", ["1.0", ".nan", "-1.0"])
def test_a_measured_error_beyond_its_bound_is_no_evidence(
    evidence: Certificate, tmp_path: Path, error: str
) -> None:
    text = certificates.dumps(evidence)
    assert "error: 0.0, bound: 0.0" in text
    found = broken(tmp_path / "scatter.yaml", text.replace("error: 0.0,", f"error: {error},"))
    assert "does not keep its bound" in found


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


def test_the_bits_that_were_certified_match(built: Manifest, evidence: Certificate) -> None:
    for cell, group in built.cells("scatter"):
        assert evidence.mismatch(cell, group.uses, built) is None


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        ("device_code", "device code changed ("),
        ("host_code", "host code changed ("),
        ("signature", "signature changed ("),
    ],
)
def test_other_bits_do_not_match(
    built: Manifest, evidence: Certificate, bits: str, said: str
) -> None:
    (use,) = uses(built)
    other = changed_plan(evidence, use.symbol, **{bits: "other"})
    mismatch = other.mismatch(CELL, uses(built), built)
    assert mismatch is not None
    assert mismatch.startswith(said)
    small = CELL._replace(problem="small", tokens=1, requests=1)
    assert uses(built, small) != uses(built)
    assert other.mismatch(small, uses(built, small), built) is None


def test_other_launch_parameters_do_not_match(built: Manifest, evidence: Certificate) -> None:
    (use,) = uses(built)
    other = (replace(use, launch=(("ctas", 2),)),)
    assert evidence.mismatch(CELL, other, built) == (
        "the planning rule gives other plans or launch parameters"
    )


def test_another_geometry_does_not_match(built: Manifest, evidence: Certificate) -> None:
    problems = {**evidence.problems, "large": {**evidence.problems["large"], "draft": 2}}
    other = replace(evidence, problems=problems)
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
    built: Manifest, evidence: Certificate, change: Callable[[Cell], Cell]
) -> None:
    assert evidence.mismatch(change(CELL), uses(built), built) == certificates.NO_EVIDENCE


def test_a_cell_whose_plan_is_not_in_the_certificate_does_not_match(
    built: Manifest, evidence: Certificate
) -> None:
    (use,) = uses(built)
    plans = {symbol: plan for symbol, plan in evidence.plans.items() if symbol != use.symbol}
    mismatch = replace(evidence, plans=plans).mismatch(CELL, uses(built), built)
    assert mismatch == f"plan {use.symbol} has no evidence"


# What changed


def key_of(built: Manifest) -> dict[str, Any]:
    key = built.plans[uses(built)[0].symbol].key
    return {**key, "sources": dict(key["sources"]), "tools": dict(key["tools"])}


def test_nothing_changed_says_so(built: Manifest, evidence: Certificate) -> None:
    assert evidence.changed_inputs(key_of(built)) == "no source or tool version differs"


def test_a_changed_source_is_named(built: Manifest, evidence: Certificate) -> None:
    key = key_of(built)
    key["sources"]["specplan.kernels.scatter.kernel"] = "9" * 64
    assert evidence.changed_inputs(key) == "source kernels.scatter.kernel"


def test_a_new_source_is_named(built: Manifest, evidence: Certificate) -> None:
    key = key_of(built)
    key["sources"]["specplan.kernels.words"] = "9" * 64
    assert evidence.changed_inputs(key) == "source kernels.words"


def test_a_changed_tool_is_named_with_both_versions(built: Manifest, evidence: Certificate) -> None:
    key = key_of(built)
    key["tools"].update({"nvidia-cutlass-dsl": "4.9.0", "nvidia-cutlass-dsl-libs-cu13": "4.9.0"})
    assert evidence.changed_inputs(key) == (
        "nvidia-cutlass-dsl 4.8.1 -> 4.9.0, nvidia-cutlass-dsl-libs-cu13 absent -> 4.9.0"
    )


def test_the_mismatch_names_the_changed_input(built: Manifest, evidence: Certificate) -> None:
    (use,) = uses(built)
    key = key_of(built)
    key["sources"]["specplan.kernels.scatter.kernel"] = "9" * 64
    rebuilt = replace(built.plans[use.symbol], device_code="new", key=key)
    pack = replace(built, plans={**built.plans, use.symbol: rebuilt})
    assert evidence.mismatch(CELL, uses(built), pack) == (
        "device code changed (source kernels.scatter.kernel)"
    )


# The ones that are committed


def test_every_committed_certificate_is_read_and_lies_where_it_says() -> None:
    root = certificates.default_directory()
    paths = sorted(root.glob("*/*.yaml"))
    assert paths
    for path in paths:
        found = certificates.read(path)
        assert (found.arch, found.family) == (path.parent.name, path.stem)
        assert found.cells
        for cell in found.cells:
            assert cell.result.error <= cell.result.bound
            assert cell.result.checks > 0
            assert {use.symbol for use in cell.uses} <= set(found.plans)
            assert cell.problem in found.problems


def test_no_cell_is_certified_on_an_arch_without_a_committed_certificate(shipped: Any) -> None:
    root = certificates.default_directory()
    evidence = {arch: certificates.read_all([root], arch) for arch in shipped.archs}
    for arch in shipped.archs:
        covered = {
            Cell(e.family, c.problem, c.dtype, arch, c.splits, c.tokens, c.requests): c
            for e in evidence[arch]
            for c in e.cells
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

"""The catalog: the shipped one loads and has what it must; all else is an error with its place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from specplan.plans import catalog as catalogs
from specplan.plans.catalog import Catalog, CatalogError
from specplan.plans.cell import Cell

from support import synthetic

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_107a")


def error_of(text: str) -> CatalogError:
    with pytest.raises(CatalogError) as caught:
        catalogs.loads(text, "c.yaml")
    return caught.value


def line_of(text: str, needle: str) -> int:
    """The line of the only place where ``needle`` stands."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if needle in line]
    assert len(lines) == 1, (needle, lines)
    return lines[0]


def changed(old: str, new: str) -> str:
    """The synthetic catalog with the first ``old`` replaced."""
    assert old in synthetic.CATALOG
    return synthetic.CATALOG.replace(old, new, 1)


# The shipped catalog


def test_the_shipped_catalog_has_all_archs_with_their_capabilities(shipped: Catalog) -> None:
    assert {name: arch.capability for name, arch in shipped.archs.items()} == {
        "sm_90a": (9, 0),
        "sm_100a": (10, 0),
        "sm_103a": (10, 3),
        "sm_107a": (10, 7),
    }
    assert shipped.archs["sm_90a"].sm_count == 132


@pytest.mark.parametrize("family", ["scatter", "gather"])
@pytest.mark.parametrize("problem", ["mtp7", "tree15", "tree31", "tree63"])
def test_every_batch_up_to_256_and_length_up_to_8_is_claimed(
    shipped: Catalog, family: str, problem: str
) -> None:
    claimed = shipped.claims
    for arch in ARCHS:
        for tokens in range(1, 9):
            lacking = [
                requests
                for requests in range(1, 257)
                if Cell(family, problem, "int32", arch, 1, tokens, requests) not in claimed
            ]
            assert not lacking, (arch, tokens)


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_shorter_chains_are_claimed_up_to_their_width(shipped: Catalog, family: str) -> None:
    found: dict[str, set[tuple[int, int]]] = {}
    for cell in shipped.cells("sm_103a", family):
        found.setdefault(cell.problem, set()).add((cell.tokens, cell.requests))
    for drafts in range(1, 8):
        assert found[f"mtp{drafts}"] == {
            (tokens, requests) for tokens in range(1, drafts + 2) for requests in range(1, 257)
        }


def test_only_sm_90a_is_claimed_to_be_certified(shipped: Catalog) -> None:
    """Nothing has run on the others: a claim for one needs its certificate and a change here."""
    assert {cell.arch for cell, certified in shipped.claims.items() if certified} == {"sm_90a"}


def test_every_block_says_why_and_where_it_stands(shipped: Catalog) -> None:
    lines = catalogs.default_path().read_text(encoding="utf-8").splitlines()
    assert shipped.blocks
    for block in shipped.blocks:
        assert len(block.why.split()) >= 5, block.line
        assert "problems" in lines[block.line - 1]


def test_automatic_splits_are_the_planning_rules_choice(shipped: Catalog) -> None:
    for cell in shipped.cells("sm_90a", "scatter")[:100]:
        assert shipped.is_automatic(cell)
        assert not shipped.is_automatic(cell._replace(splits=2))


# Reading


def test_the_blocks_expand_to_their_cells() -> None:
    claims = synthetic.catalog().claims
    assert len(claims) == 2 * (synthetic.CELLS["scatter"] + synthetic.CELLS["gather"])
    expected = {
        Cell("scatter", "large", "int32", "sm_90a", 1, tokens, requests)
        for tokens in range(1, 5)
        for requests in (1, 2, 8)
    } | {
        Cell("scatter", "small", "int32", "sm_90a", 1, tokens, requests)
        for tokens in (1, 2)
        for requests in range(1, 5)
    }
    found = {c for c in claims if c.arch == "sm_90a" and c.family == "scatter"}
    assert found == expected
    assert all(certified == (cell.arch == "sm_90a") for cell, certified in claims.items())


def test_cells_are_filtered_by_arch_and_family() -> None:
    claims = synthetic.catalog()
    assert len(claims.cells()) == 64
    assert len(claims.cells("sm_90a")) == 32
    assert len(claims.cells(family="gather")) == 24
    assert {(c.arch, c.family) for c in claims.cells("sm_100a", "gather")} == {
        ("sm_100a", "gather")
    }


def test_why_may_be_shared_by_an_alias() -> None:
    text = changed("why: The small stores.", "why: &why One text.")
    text = text.replace("why: The large stores.", "why: *why")
    assert [block.why for block in catalogs.loads(text).blocks][:2] == ["One text.", "One text."]


def test_load_reads_a_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(synthetic.CATALOG, encoding="utf-8")
    assert catalogs.load(path).source == str(path)
    path.write_text("schema: [1", encoding="utf-8")
    # The whole path: a catalog beside another has the same base name.
    with pytest.raises(CatalogError, match=rf"^{path}:2:1: not YAML"):
        catalogs.load(path)
    path.write_bytes(b"schema: \xff")
    with pytest.raises(CatalogError, match=r"mine\.yaml: cannot be read"):
        catalogs.load(path)
    with pytest.raises(CatalogError, match=r"none\.yaml: cannot be read"):
        catalogs.load(tmp_path / "none.yaml")


# Errors with their place

#: (what, old text, new text, needle of the line that the error must name, what the error must say)
ERRORS: Mapping[str, tuple[str, str, str, str]] = {
    "unknown key": (
        "splits: 1\n",
        "split: 1\n",
        "split: 1",
        "unknown key 'split' in a block of 'scatter' cells; did you mean 'splits'?",
    ),
    "unknown key at the top": (
        "families:",
        "familys:",
        "familys:",
        "unknown key 'familys' in the catalog; did you mean 'families'?",
    ),
    "unknown key without a likeness": (
        "sm_count: 132",
        "zzz: 132",
        "zzz:",
        "unknown key 'zzz' in arch 'sm_90a'; known: device, capability, sm_count, ",
    ),
    "unknown family": (
        "  gather:",
        "  gathr:",
        "gathr:",
        "unknown family 'gathr'; did you mean 'gather'?",
    ),
    "unknown geometry": (
        "large: {next: 4, draft: 3}",
        "large: {next: 4, drafts: 3}",
        "drafts: 3",
        "unknown key 'drafts' in problem 'large' of 'gather'; did you mean 'draft'?",
    ),
    "unknown problem": (
        "problems: [small]",
        "problems: [smal]",
        "problems: [smal]",
        "unknown name 'smal'; did you mean 'small'?",
    ),
    "unknown dtype": (
        "dtypes: [int32]",
        "dtypes: [int23]",
        "int23",
        "dtypes: unknown name 'int23'; did you mean 'int32'?",
    ),
    "arch typo among the certified": (
        "certified: [sm_90a]",
        "certified: [sm_90]",
        "certified: [sm_90]",
        "certified: unknown name 'sm_90'; did you mean 'sm_90a'?",
    ),
    "arch typo among the candidates": (
        "candidate: [sm_100a]",
        "candidate: [sm_110a]",
        "[sm_110a]",
        "candidate: unknown name 'sm_110a'; did you mean 'sm_100a'?",
    ),
    "arch that does not name its capability": (
        "capability: [9, 0]",
        "capability: [9, 1]",
        "capability: [9, 1]",
        "arch 'sm_90a' does not name capability 9.1: expected sm_91a",
    ),
    "capability of one number": (
        "capability: [9, 0]",
        "capability: [9]",
        "capability: [9]",
        "capability of arch 'sm_90a' must be [major, minor]",
    ),
    "requests out of range": (
        "requests: 1..4",
        "requests: 0..4",
        "requests: 0..4",
        "requests has 0, outside 1..65536",
    ),
    "too many requests": (
        "requests: 1..4",
        "requests: 1..65537",
        "requests: 1..65537",
        "requests has 65537, outside 1..65536",
    ),
    "no range": (
        "requests: 1..4",
        "requests: 1-4",
        "requests: 1-4",
        "requests: '1-4' is not an integer, A..B or A..B/STEP",
    ),
    "a value twice in a list": (
        "requests: [1, 2, 8]",
        "requests: [1..4, 3]",
        "requests: [1..4, 3]",
        "requests has 3 twice",
    ),
    "no requests": (
        "requests: [1, 2, 8]",
        "requests: []",
        "requests: []",
        "requests is empty",
    ),
    "splits out of range": (
        "splits: 1\n",
        "splits: 1025\n",
        "1025",
        "splits has 1025, outside 1..1024",
    ),
    "splits misspelt": (
        "splits: auto",
        "splits: automatic",
        "automatic",
        "splits: 'automatic' is not an integer",
    ),
    "geometry out of range": (
        "small: {history: 2",
        "small: {history: 129",
        "history: 129",
        "history of problem 'small' of 'scatter' is 129, outside 1..128",
    ),
    "geometry that is no integer": (
        "small: {history: 2",
        "small: {history: two",
        "history: two",
        "history of problem 'small' of 'scatter' must be an integer",
    ),
    "geometry that is a fraction": (
        "small: {history: 2",
        "small: {history: 2.0",
        "history: 2.0",
        "must be an integer",
    ),
    "an empty integer": (
        "small: {history: 2",
        "small: {history: !!int ''",
        "!!int",
        "history of problem 'small' of 'scatter' must be an integer",
    ),
    "sm_count out of range": (
        "sm_count: 132",
        "sm_count: 0",
        "sm_count: 0",
        "sm_count of arch 'sm_90a' is 0, outside 1..1024",
    ),
    "tokens beyond the width": (
        "tokens: 1..2",
        "tokens: 1..3",
        "tokens: 1..3",
        "problem 'small': 3 tokens do not fit a history store of width 2",
    ),
    "empty why": ("why: The small stores.", "why: ''", "why: ''", "why must be a non-empty text"),
    "blank why": (
        "why: The small stores.",
        "why: '  '",
        "why: '  '",
        "why must be a non-empty text",
    ),
    "certified and candidate at once": (
        "certified: [sm_90a]\n        candidate: [sm_100a]",
        "certified: [sm_90a]\n        candidate: [sm_100a, sm_90a]",
        "- problems: [small]",
        "sm_90a: certified and candidate at once",
    ),
    "an arch named twice": (
        "certified: [sm_90a]",
        "certified: [sm_90a, sm_90a]",
        "[sm_90a, sm_90a]",
        "certified names 'sm_90a' twice",
    ),
    "no arch at all": (
        "        certified: [sm_90a]\n        candidate: [sm_100a]\n        why: The small",
        "        why: The small",
        "- problems: [small]",
        "names no arch under 'certified' or 'candidate'",
    ),
    "a missing key": (
        "        requests: 1..4\n",
        "",
        "- problems: [small]",
        "a block of 'scatter' cells lacks 'requests'",
    ),
    "wrong schema": (
        "schema: 1",
        "schema: 2",
        "schema: 2",
        "schema is 2, this version of specplan reads 1",
    ),
    "a duplicate key": (
        "        requests: 1..4\n",
        "        requests: 1..4\n        requests: 5..6\n",
        "requests: 5..6",
        "'requests' stands twice in a block of 'scatter' cells",
    ),
    "a duplicate problem": (
        "      small: {history: 2, next: 2, draft: 1}\n",
        "      small: {history: 2, next: 2, draft: 1}\n      small: {history: 3}\n",
        "history: 3",
        "'small' stands twice in problems of 'scatter'",
    ),
    "a list where a mapping is due": (
        "small: {history: 2, next: 2, draft: 1}",
        "small: [2, 2, 1]",
        "[2, 2, 1]",
        "problem 'small' of 'scatter' must be a mapping",
    ),
    "a mapping where integers are due": (
        "requests: 1..4",
        "requests: [{a: 1}]",
        "[{a: 1}]",
        "requests must be integers or ranges such as 1..256",
    ),
    "not YAML": ("requests: 1..4", "requests: [1..4", "tokens: 1..2", "not YAML: "),
    "a tab": (
        "    problems:\n      small",
        "\tproblems:\n      small",
        "\tproblems:",
        "not YAML: ",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_names_its_line_and_what_was_meant(what: str) -> None:
    old, new, needle, message = ERRORS[what]
    text = changed(old, new)
    error = error_of(text)
    assert message in error.problem
    assert error.line == line_of(text, needle)
    assert error.column >= 1
    assert str(error) == f"c.yaml:{error.line}:{error.column}: {error.problem}"


def test_the_column_is_that_of_the_word() -> None:
    error = error_of(changed("certified: [sm_90a]", "certified: [sm_90]"))
    assert error.column == 1 + len("        certified: [")


DOUBLE = """\
      - problems: [large]
        requests: 8..9
        tokens: 4
        splits: 1
        dtypes: [int32]
        candidate: [sm_90a]
        why: Again.
"""


def test_a_cell_of_two_blocks_is_an_error_at_the_second() -> None:
    text = synthetic.CATALOG + DOUBLE
    error = error_of(text)
    assert error.line == line_of(text, "requests: 8..9") - 1
    assert error.problem == (
        "cell claimed twice: gather large requests=8 tokens=4 splits=1 dtype=int32 on sm_90a"
    )


def test_blocks_that_differ_in_splits_do_not_clash() -> None:
    text = synthetic.CATALOG + DOUBLE.replace("splits: 1", "splits: 2")
    assert len(catalogs.loads(text).claims) == 64 + 2


def test_too_many_cells_are_refused_before_they_are_made() -> None:
    text = changed("requests: 1..4", "requests: 1..65536")
    text = text.replace("splits: 1\n", "splits: 1..1024\n", 1)
    start = time.process_time()
    error = error_of(text)
    assert error.problem == "more than 2,000,000 cells; is a range too long?"
    assert error.line == line_of(text, "- problems: [small]")
    assert time.process_time() - start < 5


def test_a_list_of_many_ranges_reads_in_linear_time() -> None:
    """Twenty thousand values, which took a minute while the look for doubles was quadratic."""
    text = changed("requests: 1..4", f"requests: [{', '.join(map(str, range(1, 20_001)))}]")
    start = time.process_time()
    assert len(catalogs.loads(text).claims) == 64 + 2 * 2 * (20_000 - 4)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_file_is_an_error(text: str) -> None:
    assert error_of(text).problem == "is empty"


@pytest.mark.parametrize(
    "text",
    [
        "just words",
        "[1, 2]",
        "schema: 1\narchs: {}\nfamilies: {}",
        "schema: 1",
        "? [schema]\n: 1",
        "a: &a [*a]",
        "<<: {schema: 1}",
        "schema: 0b_\narchs: {}\nfamilies: {}",
        "--- a\n--- b",
        "\x00",
        "\ud800",
        "[" * 5000,
        "- " * 5000,
        "!!python/object/apply:os.getcwd []",
    ],
)
def test_other_documents_are_catalog_errors(text: str) -> None:
    assert str(error_of(text)).startswith("c.yaml")


# Any text


def read(text: str) -> Catalog | None:
    try:
        return catalogs.loads(text)
    except CatalogError as error:
        assert error.line >= 0
        assert str(error).startswith("catalog.yaml")
        return None


@given(st.text(max_size=200))
def test_any_text_is_a_catalog_or_a_catalog_error(text: str) -> None:
    assert read(text) is None  # nothing this short is one


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.sampled_from(
        ["auto", "1..4", "sm_90a", "mtp7", "scatter", "int32", "", "0x1F", "1_0", "1:2"]
    ),
)
#: Without smem_per_sm and why, so that no arch and no block of cells can be whole.
WORDS = """schema archs families scatter gather problems cells requests tokens splits dtypes
certified candidate sm_90a device capability sm_count history next draft"""
KEYS = st.sampled_from(WORDS.split())
TREES = st.recursive(
    LEAVES,
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(KEYS, kids, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60)
@given(TREES, TREES, TREES)
def test_any_tree_of_catalog_words_is_a_catalog_or_a_catalog_error(
    archs: object, families: object, top: object
) -> None:
    read(yaml.safe_dump({"schema": 1, "archs": archs, "families": families}))
    read(yaml.safe_dump(top))
    for at, tree in ((("families", "scatter"), families), (("archs", "sm_90a"), archs)):
        whole = yaml.load(synthetic.CATALOG, Loader=yaml.SafeLoader)
        whole[at[0]][at[1]] = tree
        assert read(yaml.safe_dump(whole)) is None  # the words lack some that each of the two needs


@settings(max_examples=300)
@given(st.data())
def test_an_edit_of_a_few_characters_is_read_or_located(data: st.DataObject) -> None:
    text = synthetic.CATALOG
    start = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 8))
    inserted = data.draw(
        st.text(max_size=4)
        | st.sampled_from(["\n", "  ", "- ", "[", "{", "!!int ", "&a ", "*a", "'", "9"])
    )
    found = read(text[:start] + inserted + text[start + length :])
    if found is not None:
        for cell in found.claims:
            assert found.plans_of(cell)

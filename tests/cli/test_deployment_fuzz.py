"""Nothing passes that was not checked: any deployment against an oracle that spells it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from specplan.plans import deployment as deployments
from specplan.plans.catalog import Catalog
from specplan.plans.cell import nearest
from specplan.plans.deployment import DeploymentError
from specplan.plans.nearest import Nearest

from support import synthetic

#: What the synthetic catalog claims: family, geometry -> requests, tokens. On sm_90a, in int32.
CERTIFIED: Mapping[tuple[str, tuple[int, ...]], tuple[set[int], set[int]]] = {
    ("scatter", (2, 2, 1)): ({1, 2, 3, 4}, {1, 2}),
    ("scatter", (4, 4, 3)): ({1, 2, 8}, {1, 2, 3, 4}),
    ("gather", (4, 3)): ({1, 2, 8}, {1, 2, 3, 4}),
}
PROBLEMS = {
    "scatter": {"small": (2, 2, 1), "large": (4, 4, 3)},
    "gather": {"large": (4, 3)},
}
KEYS = {"scatter": ("history", "next", "draft"), "gather": ("next", "draft")}


def one_or_many(words: Sequence[str], likely: str) -> st.SearchStrategy[Any]:
    many = st.lists(st.sampled_from(words), min_size=1, max_size=3, unique=True)
    return st.one_of(st.just(likely), st.sampled_from(words), many)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@st.composite
def uses(draw: st.DrawFn, family: str) -> dict[str, Any]:
    problems = PROBLEMS[family]
    body: dict[str, Any] = {}
    if draw(st.booleans()):
        body["problem"] = draw(one_or_many(list(problems), "large"))
    else:
        geometry = draw(st.sampled_from(list(problems.values())))
        if draw(st.integers(0, 4)) == 0:
            geometry = tuple(draw(st.integers(0, 300)) for _ in geometry)
        body.update(zip(KEYS[family], geometry, strict=True))
    if draw(st.booleans()):
        body["dtype"] = draw(one_or_many(["int32", "int64", "fp8"], "int32"))
    return body


@st.composite
def servers(draw: st.DrawFn) -> dict[str, Any]:
    most = draw(st.integers(1, 10))
    body: dict[str, Any] = {
        "schema": 1,
        "arch": draw(one_or_many(["sm_90a", "sm_100a", "sm_120a"], "sm_90a")),
        "max_requests": most,
        "draft_lengths": draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)),
    }
    if draw(st.booleans()):
        graphs = st.lists(st.sampled_from([1, 2, 8, most]), min_size=1, unique=True)
        body["graph_requests"] = [size for size in draw(graphs) if size <= most] or [most]
    if draw(st.booleans()):
        body["eager"] = draw(st.booleans())
    names = st.lists(st.sampled_from(list(PROBLEMS)), min_size=1, max_size=2, unique=True)
    body["families"] = {name: draw(uses(name)) for name in draw(names)}
    return body


def spelt_out(body: Mapping[str, Any]) -> dict[tuple[Any, ...], bool]:
    """Every call that the server can make, and whether it is certified."""
    most, graphs = body["max_requests"], set(body.get("graph_requests", ()))
    sizes = {n for n in range(1, most + 1) if body.get("eager") or n in graphs}
    if "eager" not in body:
        sizes |= {n for n in range(1, most + 1) if all(n > size for size in graphs)}
    found = {}
    for arch in listed(body["arch"]):
        for family, use in body["families"].items():
            if "problem" in use:
                geometries = [PROBLEMS[family][name] for name in listed(use["problem"])]
            else:
                geometries = [tuple(use[key] for key in KEYS[family])]
            for geometry in geometries:
                has = CERTIFIED.get((family, geometry), (set(), set()))
                for dtype in listed(use.get("dtype", "int32")):
                    for requests in sizes:
                        for drafts in body["draft_lengths"]:
                            at = (arch, family, geometry, dtype, requests, drafts + 1)
                            cell = requests in has[0] and drafts + 1 in has[1]
                            found[at] = cell and (arch, dtype) == ("sm_90a", "int32")
    return found


def cannot_run(body: Mapping[str, Any]) -> bool:
    """Whether the file contradicts itself: nothing larger than a graph runs, and something must."""
    if body.get("eager", True):
        return False
    return max(body.get("graph_requests", [0])) < body["max_requests"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[synthetic.Place, Catalog]:
    """Packs in which every claim holds."""
    return synthetic.place(tmp_path_factory.mktemp("whole")), synthetic.catalog()


@given(body=servers())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(
    body={
        "schema": 1,
        "arch": ["sm_90a", "sm_100a"],
        "max_requests": 4,
        "draft_lengths": [0, 1],
        "families": {"scatter": {"problem": ["small"], "dtype": "int32"}},
    }
)
def test_a_deployment_holds_if_and_only_if_every_call_that_it_spells_out_is_certified(
    whole: tuple[synthetic.Place, Catalog], body: dict[str, Any]
) -> None:
    place, catalog = whole
    text = yaml.safe_dump(body)
    if cannot_run(body):
        with pytest.raises(DeploymentError, match="eager is false"):
            deployments.loads(text, catalog)
        return
    wanted = deployments.loads(text, catalog)
    answer = deployments.answer(wanted, catalog, place.packs, [place.certificates])
    found = {
        (
            *(reached.cell.arch, reached.cell.family, tuple(reached.geometry.values())),
            *(reached.cell.dtype, reached.cell.requests, reached.cell.tokens),
        ): reached.holds
        for reached in answer.cells
    }
    expected = spelt_out(body)
    assert found == expected
    assert len(answer.cells) == len(found) == wanted.size
    assert answer.holds == all(expected.values())
    assert all(hole.reason and hole.near for hole in answer.holes)


@given(
    tokens=st.integers(1, 40),
    requests=st.integers(1, 2000),
    problem=st.sampled_from(["small", "large"]),
    family=st.sampled_from(["scatter", "gather"]),
)
@settings(max_examples=200, deadline=None)
def test_the_nearest_cell_is_the_one_that_a_search_of_all_cells_finds(
    tokens: int, requests: int, problem: str, family: str
) -> None:
    """For a problem of the catalog: the slow search over every certified cell is the oracle."""
    catalog = synthetic.catalog()
    problem = problem if problem in catalog.problems[family] else "large"
    wanted = next(iter(catalog.claims))._replace(
        family=family, problem=problem, tokens=tokens, requests=requests, splits=1
    )
    (slow,) = nearest(wanted, (cell for cell, certified in catalog.claims.items() if certified), 1)
    found = Nearest(catalog).find(wanted, catalog.problems[family][problem])
    assert found is not None
    assert (found.cell, found.differs) == (slow, {})


@given(
    history=st.integers(0, 10_000), following=st.integers(0, 10_000), draft=st.integers(0, 10_000)
)
@settings(max_examples=100, deadline=None)
def test_a_neighbour_says_exactly_the_values_that_differ(
    history: int, following: int, draft: int
) -> None:
    catalog = synthetic.catalog()
    geometry = {"history": history, "next": following, "draft": draft}
    wanted = next(iter(catalog.claims))._replace(family="scatter", problem="?")
    found = Nearest(catalog).find(wanted, geometry)
    assert found is not None
    has = catalog.problems["scatter"][found.cell.problem]
    assert {**geometry, **{key: value for key, (_, value) in found.differs.items()}} == has
    assert all(geometry[key] == value != other for key, (value, other) in found.differs.items())

"""Whatever a file says, its loader reads it or refuses it with its own error, and what was read can
be used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specplan.plans import certificates, coverage, deployment, evidence, manifest
from specplan.plans.catalog import Catalog
from specplan.plans.certificates import CertificateError
from specplan.plans.deployment import DeploymentError
from specplan.plans.manifest import ManifestError

from support import synthetic

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1..4", "sm_90a", "scatter", "large", "int32", "1..100000000", "4..1"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a tree of mappings and lists."""
    found = [at]
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        found += paths(value, (*at, key))
    return found


def changed(tree: Any, at: tuple[Any, ...], value: Any, remove: bool) -> Any:
    """The tree with another value at one place, or without what was there."""
    if not at:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if len(at) == 1 and remove:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(copy[at[0]], at[1:], value, remove)
    return copy


def mutated(data: st.DataObject, tree: Any) -> Any:
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(paths(tree)))
        tree = changed(tree, at, data.draw(ANYTHING), data.draw(st.booleans()))
    return tree


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> synthetic.Place:
    return synthetic.place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def claims() -> Catalog:
    return synthetic.catalog()


FUZZ: Callable[[Any], Any] = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

DEPLOYMENT = {
    "schema": 1,
    "arch": "sm_90a",
    "max_requests": 4,
    "draft_lengths": [0, 1],
    "graph_requests": [1, 2, 4],
    "eager": False,
    "families": {"scatter": {"history": 2, "next": 2, "draft": 1}, "gather": {"problem": "large"}},
}


@FUZZ
@given(data=st.data())
def test_a_deployment_is_read_or_refused_with_its_place(
    claims: Catalog, data: st.DataObject
) -> None:
    text = yaml.safe_dump(mutated(data, DEPLOYMENT), allow_unicode=True)
    try:
        found = deployment.loads(text, claims, "server.yaml")
    except DeploymentError as error:
        assert str(error).startswith("server.yaml")
        return
    if len(found.requests) * len(found.tokens) < 500:
        assert all(cell.arch in found.archs for _, cell, _ in deployment.reachable(found, claims))


@FUZZ
@given(text=st.text(max_size=60))
def test_any_text_is_a_deployment_or_its_error(claims: Catalog, text: str) -> None:
    with pytest.raises(DeploymentError):
        deployment.loads(text, claims)


@FUZZ
@given(data=st.data())
def test_a_certificate_is_read_or_refused_and_then_judges(
    place: synthetic.Place, claims: Catalog, tmp_path: Path, data: st.DataObject
) -> None:
    """Both files carry the digests of what they say, so that their contents are looked at."""
    path = place.certificates / "sm_90a" / "scatter.yaml"
    head = yaml.safe_load(path.read_text())
    (cells,) = path.parent.glob("scatter-*.json")
    inside = json.loads(cells.read_text())
    count = head.pop("cells")["count"]
    del head["digest"], inside["digest"]
    if data.draw(st.booleans()):
        head = mutated(data, head)
    else:
        inside = mutated(data, inside)
    path = tmp_path / "sm_90a" / "scatter.yaml"
    path.parent.mkdir(exist_ok=True)
    text = evidence.sealed(json.dumps(inside).removesuffix("}"))
    path.with_name(cells.name).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    named = f"cells: {{file: {cells.name}, sha256: {digest}, count: {count}}}\n"
    written = yaml.safe_dump(head, allow_unicode=True)
    path.write_text(certificates.sealed(written + named), encoding="utf-8")
    try:
        found = coverage.compute(claims, place.packs, ["sm_90a"], [tmp_path], strict=True)
    except CertificateError as error:
        assert str(path.parent) in str(error)
        return
    assert len(found.rows) == 32


@FUZZ
@given(data=st.data())
def test_a_manifest_with_its_digest_is_read_or_refused_and_then_judged(
    place: synthetic.Place, claims: Catalog, tmp_path: Path, data: st.DataObject
) -> None:
    """A digest says that nobody edited the file, not that what wrote it was right."""
    real = json.loads((place.packs / "sm_90a" / manifest.NAME).read_text())
    body = mutated(data, real)
    text = manifest.sealed(body) if isinstance(body, dict) else json.dumps(body)
    path = tmp_path / "sm_90a" / manifest.NAME
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    try:
        pack = manifest.read(path.parent)
        assert isinstance(pack.table, dict)
    except ManifestError as error:
        assert str(path) in str(error)
    found = coverage.compute(claims, tmp_path, ["sm_90a"], [place.certificates], strict=True)
    assert len(found.rows) == 32

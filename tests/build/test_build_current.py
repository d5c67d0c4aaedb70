"""A build with nothing to do: what it takes for nothing to do, and what it must notice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from specplan.plans import catalog as catalogs
from specplan.plans import manifest
from specplan.plans.catalog import Catalog
from specplan.plans.hosts import this_machine
from specplan.tools.build import keys, link, pipeline

from support import packs

HOST = [this_machine()]


class Tree:
    """A copy of the small pack with its catalog, built once to be current. The certificate of
    scatter lies in a directory of its own, the one of gather beside the pack.
    """

    def __init__(self, pack: packs.SmallPack, to: Path) -> None:
        self.root = pack.copy(to / "pack")
        self.catalog = to / "catalog.yaml"
        self.catalog.write_text(pack.catalog.read_text())
        self.certificates = to / "certificates"
        local = self.directory / "certificates" / packs.ARCH
        for path in local.glob("scatter*"):
            (self.certificates / packs.ARCH).mkdir(parents=True, exist_ok=True)
            path.replace(self.certificates / packs.ARCH / path.name)
        self.build()

    @property
    def directory(self) -> Path:
        return self.root / packs.ARCH

    def build(self) -> pipeline.Report:
        catalog = catalogs.load(self.catalog)
        return pipeline.build(catalog, self.root, [packs.ARCH], evidence=[self.certificates])


@pytest.fixture
def current(small_pack: packs.SmallPack, tmp_path: Path) -> Tree:
    return Tree(small_pack, tmp_path)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The archs that builds plan cells for, from here on."""
    seen: list[str] = []
    real = pipeline.targets

    def spy(catalog: Catalog, archs: Sequence[str], families: Sequence[str]) -> list[object]:
        seen.extend(archs)
        return list(real(catalog, archs, families))

    monkeypatch.setattr(pipeline, "targets", spy)
    return seen


def test_a_pack_of_the_same_inputs_is_not_even_planned(current: Tree, planned: list[str]) -> None:
    before = packs.contents(current.root)
    report = current.build()
    assert planned == []
    assert (report.planned, report.compiled, report.reused, report.linked) == (4, 0, 4, 0)
    assert report.packs == {packs.ARCH: current.directory}
    assert packs.contents(current.root) == before


def _comment(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    tree.catalog.write_text(tree.catalog.read_text() + "# a comment\n")


def _certificate(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    (tree.certificates / packs.ARCH / "scatter.yaml").unlink()


def _local_certificate(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    (tree.directory / "certificates" / packs.ARCH / "gather.yaml").unlink()


def _rule(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys, "planning_sources", lambda: {"scatter.py": "another"})


def _device_source(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    real = keys.sources
    patch.setattr(keys, "sources", lambda family: {**real(family), "specplan.more": family})


def _tool(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    real = dict(keys.tool_versions())
    patch.setattr(keys, "tool_versions", lambda: {**real, "apache-tvm-ffi": "9.9"})


def _linker(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link, "linker_version", lambda host: "another ld")


def _library(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    (tree.directory / manifest.read(tree.directory).objects["gather"].file).write_bytes(b"")


def _manifest(tree: Tree, patch: pytest.MonkeyPatch) -> None:
    (tree.directory / manifest.NAME).unlink()


@pytest.mark.parametrize(
    "change",
    [
        _comment,
        _certificate,
        _local_certificate,
        _rule,
        _device_source,
        _tool,
        _linker,
        _library,
        _manifest,
    ],
)
def test_a_change_of_any_input_is_noticed(
    current: Tree,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Tree, pytest.MonkeyPatch], None],
) -> None:
    catalog = catalogs.load(current.catalog)

    def is_current(catalog: Catalog) -> bool:
        digest = pipeline._inputs(catalog, packs.ARCH, current.directory, [current.certificates])
        return pipeline._is_current(current.directory, digest, HOST, pipeline.Report(current.root))

    assert is_current(catalog)
    change(current, monkeypatch)
    assert not is_current(catalogs.load(current.catalog))


def test_a_certificate_that_is_gone_takes_its_cells_back(current: Tree, planned: list[str]) -> None:
    certified = {g.family for g in manifest.read(current.directory).groups if g.certified}
    assert certified == {"scatter", "gather"}
    (current.certificates / packs.ARCH / "scatter.yaml").unlink()
    report = current.build()
    assert planned == [packs.ARCH]
    assert (report.compiled, report.linked) == (0, 0)
    assert {g.family for g in manifest.read(current.directory).groups if g.certified} == {"gather"}


def test_a_second_copy_of_a_certificate_changes_nothing(current: Tree, planned: list[str]) -> None:
    shutil.copytree(current.certificates, current.directory / "certificates", dirs_exist_ok=True)
    current.build()
    assert planned == []


def test_a_build_of_one_family_is_never_taken_for_the_whole(
    current: Tree, planned: list[str]
) -> None:
    catalog = catalogs.load(current.catalog)
    pipeline.build(
        catalog,
        current.root,
        [packs.ARCH],
        families=["scatter"],
        evidence=[current.certificates],
    )
    assert planned == [packs.ARCH]
    assert manifest.read(current.directory).inputs == ""
    current.build()
    assert planned == [packs.ARCH] * 2

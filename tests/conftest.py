"""Fixtures that every room's tests share: one small pack, built once for all workers, and the guard
of GPU tests.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from specplan.plans.catalog import load as load_catalog

from support import packs
from support.shared import Shared

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported. Workers share the cores already: with as many threads each as there
    # are cores, tests of whole tensors took three times as long on two cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def cli() -> packs.Cli:
    """Run the command line and return what it did: ``cli("verify", "--packs", root)``."""

    def run(
        *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return packs.run(packs.command(*arguments), cwd, env)

    return run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """What is made once for all xdist workers."""
    return Shared(tmp_path_factory)


@pytest.fixture(scope="session")
def small_pack(shared: Shared) -> packs.SmallPack:
    """A pack of scatter (mtp3, mtp7) and gather (mtp3) for sm_90a, built once and shared by all
    xdist workers.
    """
    try:
        metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        pytest.skip("the small pack needs the compiler: pip install 'specplan[test]'")

    def build(place: Path) -> None:
        empty = place / "no-certificates"
        empty.mkdir()
        report = packs.build(place, packs.CATALOG, "--certificates", empty, "--json")
        packs.certify(place / "packs" / packs.ARCH)
        # A build that finds the certificates, so that one of the same inputs has nothing to do.
        packs.build(place, packs.CATALOG, "--certificates", empty)
        (place / "report.json").write_text(report)

    place = shared.made("small-pack", build)
    report = json.loads((place / "report.json").read_text())
    return packs.SmallPack(place / "packs", place / "catalog.yaml", report)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and on a busy machine these wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def _catalogued() -> tuple[str, ...]:
    return tuple(load_catalog().archs)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The first CUDA device of an arch that the test takes, named by ``@pytest.mark.gpu("sm_90a",
    ...)`` or else any of the catalog's; or a skip.
    """
    torch = pytest.importorskip("torch")
    marker = request.node.get_closest_marker("gpu")
    archs = tuple(marker.args) if marker is not None else ()
    archs = archs or _catalogued()
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(f"sm_{major}{minor}a")
        if found[-1] in archs:
            yield torch.device("cuda", index)
            return
    pytest.skip(f"needs a GPU of arch {' or '.join(archs)}; found: {', '.join(found) or 'none'}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark ``gpu`` alone brings the fixture, so that a marked test is skipped where its arch is
    not.
    """
    for item in items:
        if item.get_closest_marker("gpu") is not None and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, "gpu")

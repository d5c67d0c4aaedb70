"""The check of promised Pythons finds bytes that differ, and says what was not tried."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from specplan.plans import certificates
from specplan.tools.build import keys, pool

import pythons
from support import packs


@pytest.fixture
def root(small_pack: packs.SmallPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small pack, with its made-up certificates for the shipped ones, and a compiler that gives
    what the pack says.
    """
    root = small_pack.copy(tmp_path / "packs")
    evidence = root / packs.ARCH / "certificates"
    monkeypatch.setattr(certificates, "default_directory", lambda: evidence)
    monkeypatch.setattr(pool, "run", _compiler(small_pack))
    return root


def _compiler(pack: packs.SmallPack, **changed: str) -> object:
    def run(
        jobs: Iterable[pool.Job], workers: int, stop: threading.Event
    ) -> Iterator[pool.Outcome]:
        for job in jobs:
            plan = pack.manifest.plans[job.plan.symbol]
            record = {"device_code": plan.device_code, "host_code": plan.host_code, **changed}
            objects = {
                host: {"sha256": changed.get("object", plan.objects[host].sha256)}
                for host in job.object_paths
            }
            yield pool.Outcome(job, {**record, "objects": objects}, None)

    return run


def test_the_same_bytes_differ_in_nothing(root: Path) -> None:
    assert pythons.differences(root, packs.ARCH) == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("device_code", "another device_code than the certified one"),
        ("host_code", "another host_code than the certified one"),
        ("object", "another object than the one in the pack"),
    ],
)
def test_other_bytes_are_found(
    root: Path,
    small_pack: packs.SmallPack,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    said: str,
) -> None:
    monkeypatch.setattr(pool, "run", _compiler(small_pack, **{what: "0" * 64}))
    found = pythons.differences(root, packs.ARCH)
    # One plan of each of the two ops.
    assert len(found) == 2 and all(line.endswith(said) for line in found)


def test_a_pack_of_another_pythons_objects_is_no_evidence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "python", lambda: "3.10")
    found = pythons.differences(root, packs.ARCH)
    assert len(found) == 2 and all("not built from these inputs" in line for line in found)


def test_no_certificates_are_nothing_to_agree_with(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "default_directory", lambda: tmp_path / "nowhere")
    assert pythons.differences(root, packs.ARCH) == [
        f"there are no certificates of {packs.ARCH} to compare with"
    ]


def test_interpreters_that_are_not_there_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keys, "SAME_BYTES", (98, 99))
    monkeypatch.setattr(sys, "argv", ["pythons.py"])
    assert pythons.main() == 0
    assert "not found, so not tried: Python 3.98, 3.99" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["pythons.py", "--all"])
    assert pythons.main() == 1


def test_a_sample_has_a_plan_of_every_op(small_pack: packs.SmallPack) -> None:
    manifest = small_pack.manifest
    found = pythons.sample(manifest)
    assert {(plan.family, plan.op) for plan in found} == {
        (plan.family, plan.op) for plan in manifest.plans.values()
    }
    assert len(found) == 2
    assert all(dataclasses.is_dataclass(plan) and plan.symbol in manifest.plans for plan in found)

"""The aarch64 half of a pack, executed under qemu-user by the real loader, compared with the x86-64
half: every function resolves, refuses an empty call with its signature, and answers thousands of
calls in and out of range just as on x86-64.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from specplan.plans import device_code, elf, manifest
from specplan.plans.hosts import HOSTS, this_machine
from specplan.plans.manifest import Manifest
from specplan.tools.build import link

from support import packs
from support.shared import Shared

torch = pytest.importorskip("torch")

from answering import answers, calls_of  # noqa: E402  isort: skip

#: Where ``make aarch64-root`` puts Debian's Python and tvm-ffi for aarch64.
ROOT = Path(
    os.environ.get("SPECPLAN_AARCH64_ROOT", Path(__file__).parents[2] / "build" / "aarch64-root")
)
#: A pack with both hosts to use instead of a small one; ``.ci/run`` names its own.
PACKS = os.environ.get("SPECPLAN_BOTH_HOSTS")
CALLS_PER_PLAN = 60


@pytest.fixture(scope="session")
def both_hosts(shared: Shared) -> Path:
    """Packs with libraries for both hosts: as named, or small ones that are built here."""
    if PACKS:
        return Path(PACKS)
    for host in HOSTS:
        try:
            link.compiler(host)
            link.static_library(host)
        except link.LinkError as error:
            pytest.skip(str(error))
    pytest.importorskip("cutlass")

    def build(place: Path) -> None:
        packs.build(place, packs.CATALOG, "--host", "all")

    return shared.made("both-hosts", build) / "packs"


@pytest.fixture(scope="session")
def emulator() -> list[str]:
    """The command that runs Python on an emulated aarch64."""
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if qemu is None:
        pytest.skip("qemu-aarch64 is not installed (Debian: qemu-user)")
    python = ROOT / "usr" / "bin" / "python3.11"
    if not (ROOT / ".whole").exists():
        pytest.skip(f"no aarch64 Python in {ROOT}: make aarch64-root")
    return [qemu, "-L", str(ROOT), str(python)]


@pytest.fixture(scope="session")
def told(both_hosts: Path) -> Manifest:
    return manifest.read(both_hosts / packs.ARCH)


def test_both_hosts_hold_the_same_device_code(both_hosts: Path, told: Manifest) -> None:
    assert set(told.hosts) == set(HOSTS)
    assert not list(told.lacking())
    for family in told.families:
        found = {}
        for host, record in told.hosts.items():
            data = (both_hosts / packs.ARCH / record.objects[family].file).read_bytes()
            assert elf.read(data).machine == elf.MACHINES[host]
            found[host] = [device_code.read(image).sha256 for image in device_code.images(data)]
        assert found["x86_64"] == found["aarch64"]
        named = {plan.device_code for plan in told.plans.values() if plan.family == family}
        assert set(found["x86_64"]) == named


@pytest.mark.skipif(this_machine() != "x86_64", reason="compares aarch64 with x86-64")
def test_the_aarch64_libraries_load_and_answer_as_those_of_x86_64(
    both_hosts: Path, told: Manifest, emulator: list[str], tmp_path: Path
) -> None:
    sources = packs.tree(tmp_path / "sources")
    calls = [
        call
        for symbol, plan in told.plans.items()
        for call in calls_of(symbol, plan, CALLS_PER_PLAN)
    ]
    here = answers([sys.executable], [sources], both_hosts, "x86_64", calls, tmp_path)
    there = answers(emulator, [sources, ROOT / "site"], both_hosts, "aarch64", calls, tmp_path)
    assert there["libraries"] == sorted(r.file for r in told.hosts["aarch64"].objects.values())
    for symbol, plan in told.plans.items():
        assert f"`{plan.signature}`" in there["empty"][symbol], symbol
    assert there["empty"] == here["empty"]
    differ = [
        (call, one, other)
        for call, one, other in zip(calls, here["answers"], there["answers"], strict=True)
        if one != other
    ]
    assert not differ, differ[:3]
    # Every op was seen to launch and to refuse, so the comparison is of both.
    seen: dict[tuple[str, str], Counter[str]] = {}
    for (symbol, _), answer in zip(calls, there["answers"], strict=True):
        kind = "launched" if re.match(r"[1-9]\d* launches", answer) else answer.partition(":")[0]
        plan = told.plans[symbol]
        seen.setdefault((plan.family, plan.op), Counter())[kind] += 1
    for (family, op), counts in seen.items():
        assert counts["launched"], (op, counts)
        assert counts["TypeError"] or counts["ValueError"], (op, counts)
        rules = import_module(f"specplan.plans.{family}").OPS[op].rules
        if any(rule.compiled for rule in rules):
            assert counts["RuntimeError"] or counts["0 launches "], (op, counts)

"""What the compiler makes of the plans. Needs the compiler, no GPU."""

from __future__ import annotations

import re
import struct

import pytest
from specplan.plans.arch import Arch
from specplan.plans.gdn_replay import FAMILY

from support.shared import Shared

pytest.importorskip("cutlass")

H200 = Arch("sm_90a", (9, 0), 132, 233472, 232448, "NVIDIA H200")
GEOMETRY = {"key_heads": 16, "value_heads": 32}


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Of the one kernel in a cubin: attributes 0x2f and 0x11 of its .nv.info section."""
    table, count, names = (
        *struct.unpack_from("<Q", cubin, 0x28),
        *struct.unpack_from("<HH", cubin, 0x3C),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    found = {}
    for section in sections:
        start = sections[names][4] + section[0]
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at < end:
            form, attribute, size = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:
                if attribute in (0x2F, 0x11):
                    found[attribute] = struct.unpack_from("<II", cubin, at)[1]
                at += size
    return found[0x2F], found[0x11]


@pytest.mark.parametrize("requests,registers", [(8, 128), (64, 255)])
def test_verify_does_not_spill(requests: int, registers: int, shared: Shared) -> None:
    splits = FAMILY.splits(GEOMETRY, requests, 4, "bf16", H200)
    plan = FAMILY.plans(GEOMETRY, requests, 4, splits, "bf16", H200)[0]
    used, stack = registers_and_stack(shared.compiled(plan).cubin)
    assert stack == 0
    assert used <= registers
    assert used * 32 * plan.int("warps") * plan.int("resident") <= 65536


@pytest.mark.parametrize("requests", [1, 64])
def test_kernel_names_hold_no_module_path(requests: int, shared: Shared) -> None:
    """A file that moves, or another Python version, must not change the compiled bits."""
    splits = FAMILY.splits(GEOMETRY, requests, 1, "bf16", H200)
    plans = FAMILY.plans(GEOMETRY, requests, 1, splits, "bf16", H200)
    assert {plan.op for plan in plans} >= {"verify", "advance"}
    for plan in plans:
        grouped = plan.op == "verify" and plan.int("grouped")
        name = f"kernel_cutlass_gdn_replay_{plan.op}{'_grouped' if grouped else ''}_0"
        assert re.findall(r"\.entry (\w+)\(", shared.compiled(plan).ptx) == [name]
        assert name.encode() in shared.compiled(plan).cubin


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_107a"])
def test_other_archs_compile_from_the_same_source(arch: str, shared: Shared) -> None:
    facts = Arch(arch, (10, 0), 148, 233472, 232448, "")
    for plan in FAMILY.plans(GEOMETRY, 1, 8, 4, "fp32", facts):
        assert shared.compiled(plan).cubin

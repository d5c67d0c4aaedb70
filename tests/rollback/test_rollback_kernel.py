"""Device code: it compiles for every arch and spills nothing."""

from __future__ import annotations

import struct

import pytest

from support.shared import Shared

pytest.importorskip("cutlass")

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.rollback import FAMILY

QSA = {"planes": 12, "row_bytes": 256, "side_planes": 1, "side_row_bytes": 12}


def plan_of(op: str, rows: int, arch: str = "sm_90a") -> Plan:
    dtype = "int32"
    facts = Arch(arch, (0, 0), 132, 0, 0, "")
    splits = FAMILY.splits(QSA, rows, 1, dtype, facts)
    (plan,) = (p for p in FAMILY.plans(QSA, rows, 1, splits, dtype, facts) if p.op == op)
    return plan


@pytest.mark.parametrize(("op", "rows"), [("gather", 256), ("restore", 4), ("commit", 256)])
def test_no_stack_and_few_registers(op: str, rows: int, shared: Shared) -> None:
    image = shared.compiled(plan_of(op, rows)).cubin
    attributes = dict(_attributes(image))
    # 64 registers let 8 CTAs of 128 threads run on an SM.
    assert attributes[0x2F] <= 64
    assert attributes[0x11] == 0


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_107a"])
def test_other_archs_compile(arch: str, shared: Shared) -> None:
    assert shared.compiled(plan_of("restore", 4, arch)).cubin


def _attributes(image: bytes) -> list[tuple[int, int]]:
    """Per-kernel values of a CUDA ELF image's .nv.info: register count (0x2f) and stack frame bytes
    (0x11).
    """
    offset = struct.unpack_from("<Q", image, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", image, offset + i * size) for i in range(count)]
    strings = sections[names][4]
    found = []
    for name, _, _, _, start, length in sections:
        label = image[strings + name : image.index(b"\0", strings + name)]
        if label != b".nv.info":
            continue
        at, end = start, start + length
        while at < end:
            form, attribute, bytes_ = struct.unpack_from("<BBH", image, at)
            at += 4
            if form == 4:
                if attribute in (0x11, 0x2F):
                    found.append((attribute, struct.unpack_from("<I", image, at + 4)[0]))
                at += bytes_
    return found

"""The device code compiles for every arch, keeps its registers, and fits the shared memory that
planning assumes.
"""

from __future__ import annotations

import re

import pytest
from forms import plan_of

from support.shared import Shared

pytest.importorskip("cutlass")

ARCHS = ["sm_90a", "sm_100a", "sm_103a", "sm_107a"]


def test_the_ctas_that_planning_assumes_fit_an_sm() -> None:
    from specplan.kernels.sparse_gqa_verify.config import TABLE_WORDS, form_of
    from specplan.plans.sparse_gqa_verify import resident

    for dtype in ("bf16", "fp8_e4m3", "nvfp4"):
        for m_tiles in (1, 2, 3):
            form = form_of(plan_of(dtype, m_tiles, "sm_90a"))
            # 228 KiB an SM, of which each CTA takes 1 KiB beside its own.
            assert resident(form.warps) * (form.smem_bytes + 1024) <= 233472
            staged = form.m_rows * (256 * 4 + 16)
            assert form.ring_at + staged <= form.smem_bytes
            assert form.table_at + TABLE_WORDS * 4 <= form.smem_bytes


@pytest.mark.parametrize(("dtype", "m_tiles"), [("bf16", 3), ("fp8_e4m3", 2), ("nvfp4", 3)])
def test_no_spills_on_sm_90a(dtype: str, m_tiles: int, shared: Shared) -> None:
    frames = _stack_frames(shared.compiled(plan_of(dtype, m_tiles, "sm_90a")).cubin)
    assert len(frames) == 2 and set(frames.values()) == {0}


@pytest.mark.parametrize(
    ("m_tiles", "kernels"),
    [(1, {"attend_0", "attend_1", "merge_2"}), (2, {"attend_0", "merge_groups_1"})],
)
def test_kernel_names_hold_no_module_path(m_tiles: int, kernels: set[str], shared: Shared) -> None:
    """A file that moves, or another Python version, must not change the compiled bits."""
    compiled = shared.compiled(plan_of("bf16", m_tiles, "sm_90a"))
    names = set(re.findall(r"\.entry (\w+)\(", compiled.ptx))
    assert names == {f"kernel_cutlass_sparse_gqa_{name}" for name in kernels}
    assert all(name.encode() in compiled.cubin for name in names)


@pytest.mark.parametrize("arch", ARCHS[1:])
def test_newer_archs_compile_from_the_same_source(arch: str, shared: Shared) -> None:
    text = shared.compiled(plan_of("nvfp4", 1, arch)).ptx
    assert re.search(r"\.target\s+" + arch, text) and "cvt.rn.f16x2.e2m1x2" in text


def _stack_frames(cubin: bytes) -> dict[str, int]:
    """Bytes of stack of each kernel in a cubin, read from its ``.nv.info`` section (attribute 0x11,
    frame size).
    """
    import struct

    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry) for i in range(count)]

    def text(at: int) -> str:
        return cubin[at : cubin.index(b"\0", at)].decode()

    labels = {text(sections[names][4] + s[0]): s for s in sections}
    symbols = labels[".symtab"]
    strings = sections[symbols[6]][4]
    frames: dict[str, int] = {}
    info = labels[".nv.info"]
    at, end = info[4], info[4] + info[5]
    while at < end:
        kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if kind != 4:
            continue
        if attribute == 0x11:
            index, frame = struct.unpack_from("<II", cubin, at)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * index)
            frames[text(strings + name)] = frame
        at += size
    return frames

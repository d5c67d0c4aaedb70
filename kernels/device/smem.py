"""Accesses of shared memory by 32-bit address."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Int32
from specplan.kernels.device.ptx import emit


def load_shared4(address: Int32, offset: int = 0) -> list[Int32]:
    """Load 16 bytes."""
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return emit([Int32] * 4, [address], text, "=r,=r,=r,=r,r", volatile=True)


def store_shared4(address: Int32, words: Sequence[Int32]) -> None:
    """Store 16 bytes."""
    text = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
    emit([], [address, *words], text, "r,r,r,r,r", volatile=True)

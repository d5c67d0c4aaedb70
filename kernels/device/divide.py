"""Division by an integer that many quotients share."""

from __future__ import annotations

from cutlass import Int32


def reciprocal16(divisor: Int32) -> Int32:
    """ceil(2^16 / divisor), for ``divide16``."""
    return (Int32(1 << 16) + divisor - 1) // divisor


def divide16(n: Int32, reciprocal: Int32) -> Int32:
    """n // divisor by one multiplication and a shift; exact for n >= 0 and n * divisor < 2^16."""
    return (n * reciprocal) >> 16

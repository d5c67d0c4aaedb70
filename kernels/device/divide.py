"""Division by an integer that many quotients share."""

from __future__ import annotations

from cutlass import Int32, Int64


def reciprocal16(divisor: Int32) -> Int32:
    """ceil(2^16 / divisor), for ``divide16``."""
    return (Int32(1 << 16) + divisor - 1) // divisor


def divide16(n: Int32, reciprocal: Int32) -> Int32:
    """n // divisor by one multiplication and a shift; exact for n >= 0 and n * divisor < 2^16."""
    return (n * reciprocal) >> 16


def reciprocal31(divisor: Int32) -> tuple[Int64, Int32]:
    """What ``divide31`` multiplies and shifts by, for a divisor from 1 on; for host code.

    With l the least integer such that 2^l >= d: ceil(2^(31 + l) / d) and 31 + l. The multiplier is
    at most 2^32, and it times d exceeds 2^(31 + l) by less than 2^l, so no n < 2^31 is off.
    """
    shift = Int32(31)
    for power in range(31):
        shift = shift + Int32(divisor > Int32(1 << power))
    wide = Int64(divisor)
    return ((Int64(1) << Int64(shift)) + wide - Int64(1)) // wide, shift


def divide31(n: Int32, reciprocal: tuple[Int64, Int32]) -> Int32:
    """n // divisor by one multiplication and a shift; exact for every n >= 0."""
    return Int32((Int64(n) * reciprocal[0]) >> Int64(reciprocal[1]))

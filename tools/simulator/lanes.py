"""What instructions compute, on arrays of one value a thread.

Integer arithmetic, conversions, additions, multiplications and fused multiply-adds of floats are
exact: every result is the one that the PTX manual defines, but for the bits of NaNs. These are not,
and are replaced by the correctly rounded result: ``ex2``, ``rcp`` and ``rsqrt`` with ``.approx``
(the hardware's are within 2 units in the last place), and ``mma``, whose sum of products and addend
is rounded once here, in no order, while the hardware may add in steps and drop digits of terms that
are much smaller than the largest. The bounds of the families' cases leave room for both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i16, i32, i64 = np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64

_LANES = np.arange(32)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once to the nearest float32."""
    product = np.multiply(a, b, dtype=f64)
    total = product + c
    bits = total.view(i64)
    # Rounding to double and then to single errs only where the double lies halfway between two
    # singles, or where the single has fewer digits because it is subnormal.
    doubtful = ((bits & 0x1FFFFFFF) == 0x10000000) | ((np.abs(total) < 2.0**-125) & (total != 0))
    if doubtful.any():
        at = np.flatnonzero(doubtful)
        p, z, s = product[at], np.broadcast_to(c, total.shape)[at].astype(f64), total[at]
        back = s - p
        error = (p - (s - back)) + (z - back)
        away = np.where((error > 0) == (s > 0), 1, -1)
        odd = (s.view(i64) & 1) != 0
        # Round to odd: what lies between two doubles becomes the one with an odd last digit.
        total[at] = np.where((error == 0) | odd, s, (s.view(i64) + away).view(f64))
    return np.asarray(total.astype(f32))


def fma_down(a: Array, b: Array, c: Array, saturate: bool) -> Array:
    """a * b + c, rounded down to a float32; with ``saturate`` clamped to [0, 1], NaN to 0."""
    exact_product = np.multiply(a, b, dtype=f64)
    total = exact_product + c
    back = total - exact_product
    error = (exact_product - (total - back)) + (np.asarray(c, f64) - back)
    single = total.astype(f32)
    above = (single > total) | ((single == total) & (error < 0))
    single = np.where(above, np.nextafter(single, f32(-np.inf)), single)
    return clamp(single) if saturate else single


def clamp(x: Array) -> Array:
    """To [0, 1]; NaN becomes 0."""
    return np.where(np.isnan(x), f32(0), np.minimum(np.maximum(x, f32(0)), f32(1)))


def flush(x: Array) -> Array:
    """Subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < f32(2.0**-126), np.copysign(f32(0), x), x)


def exp2(x: Array) -> Array:
    return np.asarray(np.exp2(x, dtype=f64).astype(f32))


def reciprocal(x: Array) -> Array:
    return f32(1) / x


def reciprocal_root(x: Array) -> Array:
    return (1 / np.sqrt(x.astype(f64))).astype(f32)


def log2(x: Array) -> Array:
    return np.asarray(np.log2(x, dtype=f64).astype(f32))


def to_bf16(x: Array) -> Array:
    """The bits of the nearest bf16, ties to even, in 32-bit words; any NaN becomes 0x7fff."""
    bits = x.view(u32)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return np.where(np.isnan(x), u32(0x7FFF), rounded)


def to_f16(x: Array) -> Array:
    """The bits of the nearest f16 in 32-bit words; any NaN becomes 0x7fff."""
    return np.where(np.isnan(x), u32(0x7FFF), x.astype(f16).view(u16).astype(u32))


def from_bf16(bits: Array) -> Array:
    return (bits << u32(16)).view(f32)


def from_f16(bits: Array) -> Array:
    return bits.astype(u16).view(f16).astype(f32)


def bf16_pairs(function: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """A function of floats on each half of two words of bf16; any NaN becomes 0x7fff. Its results
    are bf16 already.
    """
    halves = [(a << u32(16), b << u32(16)), (a & u32(0xFFFF0000), b & u32(0xFFFF0000))]
    low, high = (to_bf16(function(x.view(f32), y.view(f32))) for x, y in halves)
    return low | (high << u32(16))


def f16_pairs(x: Array) -> Array:
    """Words as pairs of f16, [..., 2]."""
    return np.ascontiguousarray(x).view(f16).reshape(*x.shape, 2)


def _e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if code & 128 else value


def _e2m1(code: int) -> float:
    value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -value if code & 8 else value


def _table(values: list[float]) -> Array:
    bits = np.array(values, f16).view(u16).astype(u32)
    return np.where(np.isnan(values), u32(0x7FFF), bits).astype(u32)


#: The f16 bits of each code.
E4M3, E2M1 = _table([_e4m3(c) for c in range(256)]), _table([_e2m1(c) for c in range(16)])


def pairs_from_e4m3(x: Array) -> Array:
    return np.asarray(E4M3[x & u32(255)] | (E4M3[(x >> u32(8)) & u32(255)] << u32(16)))


def pairs_from_e2m1(x: Array) -> Array:
    return np.asarray(E2M1[x & u32(15)] | (E2M1[(x >> u32(4)) & u32(15)] << u32(16)))


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """``prmt``: four bytes of the eight of a and b, each by four bits of the selector; with the
    fourth bit set, the sign of the byte in all its bits.
    """
    both = a.astype(u64) | (b.astype(u64) << u64(32))
    out = np.zeros(a.shape, u32)
    for i in range(4):
        nibble = (selector >> u32(4 * i)) & u32(15)
        byte = (both >> ((nibble & u32(7)).astype(u64) * u64(8))) & u64(255)
        signs = np.where(byte & u64(128), u64(255), u64(0))
        byte = np.where(nibble & u32(8), signs, byte)
        out |= byte.astype(u32) << u32(8 * i)
    return out


def any_of_three(a: Array, b: Array, c: Array, table: int) -> Array:
    """``lop3``: a bitwise function of three words by its truth table."""
    out = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), u32)
    for row in range(8):
        if table >> row & 1:
            x = a if row & 4 else ~a
            y = b if row & 2 else ~b
            z = c if row & 1 else ~c
            out |= x & y & z
    return out


def count_ones(x: Array) -> Array:
    return np.bitwise_count(x).astype(u32) if hasattr(np, "bitwise_count") else _count_ones(x)


def _count_ones(x: Array) -> Array:
    raw = np.ascontiguousarray(x).view(u8).reshape(x.size, x.itemsize)
    return np.asarray(np.unpackbits(raw, axis=1).sum(1).astype(u32))


def highest_one(x: Array) -> Array:
    """``bfind.u32``: the place of the highest one; all ones where there is none."""
    # frexp of a double is exact for 32 bits.
    return np.where(x == 0, u32(0xFFFFFFFF), (np.frexp(x.astype(f64))[1] - 1).astype(u32))


def leading_zeros(x: Array) -> Array:
    return np.where(x == 0, u32(32), u32(32) - np.frexp(x.astype(f64))[1].astype(u32))


def reverse_bits(x: Array) -> Array:
    out = np.zeros_like(x)
    for i in range(32):
        out |= ((x >> u32(i)) & u32(1)) << u32(31 - i)
    return out


def divide(a: Array, b: Array) -> Array:
    """Integers, rounded towards zero. By zero: all ones, as NVIDIA's GPUs answer."""
    a, b = np.broadcast_arrays(a, b)
    by = np.where(b == 0, 1, b)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // by)
    quotient = a // by
    quotient = quotient + ((quotient * by != a) & ((a < 0) != (by < 0)))
    return np.asarray(np.where(b == 0, a.dtype.type(-1), quotient).astype(a.dtype))


def remainder(a: Array, b: Array) -> Array:
    """Of the division towards zero; by zero: the dividend."""
    a, b = np.broadcast_arrays(a, b)
    by = np.where(b == 0, 1, b)
    rest = a - divide(a, by) * by
    return np.where(b == 0, a, rest).astype(a.dtype)


def high_product(a: Array, b: Array) -> Array:
    """Upper 32 bits of the product of two 32-bit integers, signed or not."""
    wide = i64 if a.dtype.kind == "i" else u64
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(u32)


# Where the operands of mma.m16n8k16 lie: by register, lane and half of a word.


def _fragments() -> tuple[Array, Array, Array, Array]:
    row, quad = _LANES >> 2, _LANES & 3
    a = np.zeros((16, 16), int)
    b = np.zeros((16, 8), int)
    c = np.zeros((16, 8), int)
    for register in range(4):
        for half in range(2):
            a[row + 8 * (register % 2), 2 * quad + half + 8 * (register // 2)] = (
                register * 64 + _LANES * 2 + half
            )
        c[row + 8 * (register // 2), 2 * quad + register % 2] = register * 32 + _LANES
    for register in range(2):
        for half in range(2):
            b[2 * quad + half + 8 * register, row] = register * 64 + _LANES * 2 + half
    back = np.zeros(128, int)
    back[c.reshape(-1)] = np.arange(128)
    return a.reshape(-1), b.reshape(-1), c.reshape(-1), back


_A, _B, _C, _BACK = _fragments()


def _halves(registers: list[Array], is_f16: bool) -> Array:
    """Warps x (register, lane, half), as doubles."""
    words = np.stack([x.reshape(-1, 32) for x in registers], axis=1)  # warps, registers, lanes
    pairs = words.view(u16)
    if is_f16:
        return pairs.view(f16).reshape(len(words), -1).astype(f64)
    return (pairs.astype(u32) << u32(16)).view(f32).reshape(len(words), -1).astype(f64)


def mma(a: list[Array], b: list[Array], c: list[Array], is_f16: bool) -> list[Array]:
    """``mma.m16n8k16`` with float32 sums: D = A B + C, rounded once."""
    left = _halves(a, is_f16)[:, _A].reshape(-1, 16, 16)
    right = _halves(b, is_f16)[:, _B].reshape(-1, 16, 8)
    old = np.stack([x.view(f32).reshape(-1, 32) for x in c], axis=1).reshape(len(left), 128)
    new = (left @ right).reshape(len(left), 128) + old[:, _C]
    out = new.astype(f32)[:, _BACK].view(u32).reshape(len(left), 4, 32)
    return [np.ascontiguousarray(out[:, i]).reshape(-1) for i in range(4)]


def shuffle_source(how: str, by: Array, limits: Array, lane: Array) -> tuple[Array, Array]:
    """``shfl``: the lane that each lane reads, and whether it is in range; where it is not, a lane
    reads itself.
    """
    by, limits = by.astype(i64), limits.astype(i64)
    clamp_at, segment = limits & 31, (limits >> 8) & 31
    most, least = (lane & segment) | (clamp_at & ~segment & 31), lane & segment
    if how == "up":
        source = lane - (by & 31)
        good = source >= most
    elif how == "down":
        source = lane + (by & 31)
        good = source <= most
    elif how == "bfly":
        source = lane ^ (by & 31)
        good = source <= most
    else:
        source = least | (by & 31 & ~segment)
        good = source <= most
    return np.where(good, source, lane), good

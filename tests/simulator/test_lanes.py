"""What instructions compute, against exact arithmetic and torch."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from specplan.kernels.sparse_gqa_verify.reference import E2M1  # noqa: E402
from specplan.tools.simulator import lanes  # noqa: E402

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 2.0**-126, 3.4e38, -3.4e38, 1.17e-38, 0.1], np.float32
)


def rounded(exact: Fraction) -> np.float32:
    """The nearest float32, ties to even, by exact arithmetic."""
    if exact == 0:
        return np.float32(0)
    magnitude = abs(exact)
    exponent = max(math.floor(math.log2(magnitude)), -126)
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    while exponent > -126 and Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    value = round(magnitude / unit) * unit  # Python rounds halves to even
    if value >= Fraction(2) ** 128:
        return np.float32(math.copysign(math.inf, exact))
    return np.float32(math.copysign(float(value), exact))


def test_fused_multiply_adds_are_rounded_once() -> None:
    draw = np.random.default_rng(1)
    bits = draw.integers(0, 1 << 32, (3, 4000), dtype=np.uint32)
    # Sums that lie halfway between two floats, or a hair beside it.
    ones = np.float32(1) + np.ldexp(np.float32(1), -draw.integers(1, 24, 500)).astype(np.float32)
    tiny = np.ldexp(ones, -draw.integers(20, 60, 500)).astype(np.float32)
    a = np.concatenate([bits[0].view(np.float32), ones, SPECIAL])
    b = np.concatenate([bits[1].view(np.float32), tiny, SPECIAL[::-1]])
    c = np.concatenate([bits[2].view(np.float32), ones[::-1], SPECIAL])
    with np.errstate(all="ignore"):
        got = lanes.fma(a, b, c)
    for x, y, z, found in zip(a, b, c, got, strict=True):
        if all(map(math.isfinite, (x, y, z))):
            want = rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
            assert want == found, (x, y, z)


def test_a_product_and_sum_that_double_rounding_gets_wrong() -> None:
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    # 1 + 2^-11 + 2^-24 is halfway; what is added decides, and a double cannot hold it.
    for c in (np.float32(2.0**-70), np.float32(-(2.0**-70))):
        got = lanes.fma(np.array([a]), np.array([b]), np.array([c]))[0]
        assert got == rounded(Fraction(float(a)) ** 2 + Fraction(float(c)))


def test_fused_multiply_adds_rounded_down() -> None:
    draw = np.random.default_rng(2)
    a, b, c = draw.normal(size=(3, 2000)).astype(np.float32)
    got = lanes.fma_down(a, b, c, False)
    for x, y, z, found in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert (
            Fraction(float(found)) <= exact < Fraction(float(np.nextafter(found, np.float32(9e9))))
        )
    clamped = lanes.fma_down(a, b, np.where(c > 1, np.float32(np.nan), c), True)
    assert ((clamped >= 0) & (clamped <= 1)).all()


def test_conversions_are_torchs() -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    given = np.concatenate([bits.view(np.float32), SPECIAL])
    tensor = torch.from_numpy(given)
    number = ~np.isnan(given)
    for ours, kind in ((lanes.to_bf16, torch.bfloat16), (lanes.to_f16, torch.float16)):
        with np.errstate(over="ignore"):
            got = ours(given)
        want = tensor.to(kind).view(torch.int16).numpy().view(np.uint16)
        assert (got[number] == want[number]).all() and (got[~number] == 0x7FFF).all()
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    want = every.view(torch.float8_e4m3fn).half().view(torch.int16).numpy().view(np.uint16)
    low = lanes.pairs_from_e4m3(np.arange(256, dtype=np.uint32)) & np.uint32(0xFFFF)
    finite = np.arange(256) & 127 != 127
    assert (low[finite] == want[finite]).all() and (low[~finite] == 0x7FFF).all()
    codes = np.arange(256, dtype=np.uint32)
    pairs = lanes.f16_pairs(lanes.pairs_from_e2m1(codes))
    values = np.array([*E2M1, *(-x for x in E2M1)])
    assert (pairs[:, 0] == values[codes & 15]).all() and (pairs[:, 1] == values[codes >> 4]).all()


def test_bytes_and_bits() -> None:
    draw = np.random.default_rng(4)
    a, b, c = draw.integers(0, 1 << 32, (3, 200), dtype=np.uint32)
    selector = draw.integers(0, 1 << 16, 200, dtype=np.uint32)
    got = lanes.permute_bytes(a, b, selector)
    for x, y, s, found in zip(a.tolist(), b.tolist(), selector.tolist(), got.tolist(), strict=True):
        raw = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        picked = [(raw[s >> 4 * i & 7], s >> 4 * i & 8) for i in range(4)]
        want = [(255 if byte & 128 else 0) if sign else byte for byte, sign in picked]
        assert found.to_bytes(4, "little") == bytes(want)
    for table in (0xEA, 0x96, 0x01, 0xC0):
        got = lanes.any_of_three(a, b, c, table)
        for bit in range(32):
            row = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
            assert ((got >> bit & 1) == (table >> row & 1)).all()
    assert lanes.highest_one(a).tolist() == [x.bit_length() - 1 for x in a.tolist()]
    assert lanes.leading_zeros(a).tolist() == [32 - x.bit_length() for x in a.tolist()]
    assert lanes.count_ones(a).tolist() == [x.bit_count() for x in a.tolist()]
    assert lanes._count_ones(a).tolist() == lanes.count_ones(a).tolist()
    assert lanes.highest_one(np.zeros(1, np.uint32))[0] == 0xFFFFFFFF


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint64])
def test_divisions_are_towards_zero(kind: type) -> None:
    draw = np.random.default_rng(5)
    limits = np.iinfo(kind)
    a = draw.integers(limits.min, limits.max, 500, dtype=kind)
    b = np.concatenate(
        [draw.integers(limits.min, limits.max, 250, dtype=kind), np.arange(1, 251, dtype=kind)]
    )
    quotient, rest = lanes.divide(a, b), lanes.remainder(a, b)
    for x, y, q, r in zip(a.tolist(), b.tolist(), quotient.tolist(), rest.tolist(), strict=True):
        want = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        assert (q, r) == (want, x - want * y)


@pytest.mark.parametrize("is_f16", [False, True])
def test_matrix_products_have_the_layout_of_the_manual(is_f16: bool) -> None:
    """PTX manual, m16n8k16: the element of each register, lane and half, written out."""
    kind = torch.float16 if is_f16 else torch.bfloat16
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(shape, generator=generator).to(kind) for shape in ((16, 16), (16, 8)))
    c = torch.randn(16, 8, generator=generator)

    def word(x: torch.Tensor, y: torch.Tensor) -> int:
        low, high = torch.stack([x, y]).view(torch.int16).tolist()
        return (low & 0xFFFF) | (high & 0xFFFF) << 16

    left, right, old = [], [], []
    for i in range(4):
        rows = [lane // 4 + 8 * (i % 2) for lane in range(32)]
        columns = [lane % 4 * 2 + 8 * (i // 2) for lane in range(32)]
        left.append([word(a[r, k], a[r, k + 1]) for r, k in zip(rows, columns, strict=True)])
        places = [(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for lane in range(32)]
        old.append(torch.stack([c[r, n] for r, n in places]).numpy().view(np.uint32))
    for i in range(2):
        rows = [lane % 4 * 2 + 8 * i for lane in range(32)]
        right.append([word(b[k, n // 4], b[k + 1, n // 4]) for n, k in enumerate(rows)])
    got = lanes.mma(
        *([np.array(x, np.uint32) for x in each] for each in (left, right)), old, is_f16
    )
    want = (a.double() @ b.double() + c.double()).float()
    for i in range(4):
        places = [(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for lane in range(32)]
        assert got[i].view(np.float32).tolist() == [want[r, n].item() for r, n in places]


def test_shuffles_read_the_lanes_of_their_segment() -> None:
    lane = np.arange(32)
    by = np.full(32, 1, np.uint32)
    up, good = lanes.shuffle_source("up", by, np.full(32, 0, np.uint32), lane)
    assert up.tolist() == [0, *range(31)] and good.tolist() == [False] + [True] * 31
    down, good = lanes.shuffle_source("down", by, np.full(32, 31, np.uint32), lane)
    assert down.tolist() == [*range(1, 32), 31] and not good[31]
    # Segments of 8 lanes: segment mask 0x18, clamp 31.
    index, _ = lanes.shuffle_source("idx", by * 3, np.full(32, 0x181F, np.uint32), lane)
    assert index.tolist() == [lane // 8 * 8 + 3 for lane in range(32)]
    cross, _ = lanes.shuffle_source("bfly", by * 16, np.full(32, 31, np.uint32), lane)
    assert cross.tolist() == [lane ^ 16 for lane in range(32)]

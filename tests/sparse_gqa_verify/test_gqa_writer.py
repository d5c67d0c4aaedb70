"""The FP8 and NVFP4 writer, and the exact decode recipes that the device code uses, by brute
force.
"""

from __future__ import annotations

import pytest
import torch
from specplan.kernels.sparse_gqa_verify.reference import E2M1, VScaleOrder, decode_e2m1
from specplan.kernels.sparse_gqa_verify.writer import (
    encode_e2m1,
    from_nvfp4,
    global_scale,
    to_fp8,
    to_nvfp4,
    v_to_nvfp4,
)


def test_every_e2m1_code_survives() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values[0x21 * 2 : 0x21 * 2 + 2].tolist() == [0.5, 1.0]  # the low nibble is the even dim
    assert torch.equal(encode_e2m1(values), codes)


def test_e2m1_rounds_ties_to_even_codes() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    packed = encode_e2m1(torch.cat((ties, -ties)))
    assert decode_e2m1(packed).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, -6]
    steps = torch.linspace(-8, 8, 4001)
    nearest = torch.tensor(E2M1 + tuple(-x for x in E2M1))
    best = (steps[:, None] - nearest).abs().min(1).values
    found = (decode_e2m1(encode_e2m1(torch.cat((steps, steps[:1]))))[:-1] - steps).abs()
    torch.testing.assert_close(found, best)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_nvfp4_error_is_that_of_the_format(scale: float) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = to_nvfp4(values, scale)
    assert stored.data.shape == (64, 128) and stored.scales.shape == (64, 16)
    relative = (from_nvfp4(stored, scale) - values.float()).norm() / values.float().norm()
    assert 0.08 < relative < 0.11  # unit normal data in blocks of 16: 0.095


def test_nvfp4_of_zeros_and_of_tiny_blocks_is_zero() -> None:
    values = torch.cat((torch.zeros(16), torch.full((16,), 1e-6))).bfloat16()
    stored = to_nvfp4(values, 1.0)
    assert stored.scales.float().tolist() == [0.0, 0.0]
    assert from_nvfp4(stored).abs().max() == 0


def test_global_scale_reaches_the_top_of_the_format() -> None:
    values = torch.randn(4, 256).bfloat16()
    scale = global_scale(values)
    assert to_nvfp4(values, scale).scales.float().max() == 448


def test_fp8_saturates() -> None:
    assert to_fp8(torch.tensor([1e6, -1e6, 3.0]), 0.5).float().tolist() == [448.0, -448.0, 6.0]


def test_v_orders_hold_the_same_scales() -> None:
    values = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    linear = v_to_nvfp4(values, 0.01, VScaleOrder.LINEAR)
    mixed = v_to_nvfp4(values, 0.01, VScaleOrder.INTERLEAVED)
    assert torch.equal(linear.data, mixed.data)
    ours = mixed.scales.view(torch.uint8).flatten(1)
    for token in range(8):
        for block in range(16):
            at = (token // 4) * 64 + 4 * block + token % 4
            assert torch.equal(ours[:, at], linear.scales.view(torch.uint8)[:, token, block])


def _words() -> torch.Tensor:
    """Words of eight nibbles that hold every code in every place."""
    codes = torch.arange(16)
    return sum(((codes + 3 * place) % 16) << (4 * place) for place in range(8))  # type: ignore[return-value]


def test_integer_e2m1_decode_is_exact_for_every_code_and_scale() -> None:
    """The recipe of the device code for sm_90a, in integers: f16 pairs times (scale * 2^7), 2^-7
    short of the value.
    """
    words = _words()
    byte = 0x80808080
    odd = (words & byte) | ((words >> 3) & 0x0E0E0E0E)
    even = ((words << 4) & byte) | ((words << 1) & 0x0E0E0E0E)
    halves = []
    for source in (even, odd):
        for first in (0, 2):
            for index in (first, first + 1):
                bits = ((source >> (8 * index)) & 0xFF) << 8
                halves.append(bits.to(torch.int32).to(torch.int16).view(torch.float16))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    scales = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    factor = scales.half() * 128
    assert torch.isfinite(factor).all() and torch.equal(factor.float(), scales.float() * 128)
    table = torch.tensor(E2M1 + tuple(-x for x in E2M1))
    for half, dim in zip(halves, order, strict=True):
        code = (words >> (4 * dim)) & 15
        assert torch.equal(half.float(), table[code] * 2.0**-14)
        product = half[:, None] * factor[None, :]
        assert torch.equal(product.float() * 128, table[code][:, None] * scales.float()[None, :])


def test_e4m3_and_e2m1_products_fit_fp16() -> None:
    scales = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = torch.tensor(E2M1)[:, None] * scales
    assert torch.equal(products.half().float(), products)
    assert torch.equal(scales.half().float(), scales)

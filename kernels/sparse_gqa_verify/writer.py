"""Quantizes a BF16 cache to the FP8 and NVFP4 layouts that ``sparse_gqa_verify`` reads, in plain
torch.

FP8 is a cast to e4m3 of ``x / scale``, saturated at 448. NVFP4 stores, for every 16 consecutive
dimensions, one e4m3 block scale ``SF = e4m3(amax / (6 * scale))`` and 16 e2m1 values of ``x / (SF *
scale)``, rounded to nearest with ties to the even code and saturated at 6; a block whose scale
rounds to 0 stores zeros. ``scale`` is the dequantization factor in both: value = stored * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specplan.kernels.sparse_gqa_verify.reference import decode_e2m1, interleave
from specplan.plans.sparse_gqa_verify import VScaleOrder

BLOCK = 16
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Nvfp4:
    """``data`` uint8 ``[..., D / 2]`` and ``scales`` float8_e4m3fn ``[..., D / 16]``."""

    data: torch.Tensor
    scales: torch.Tensor


def to_fp8(values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``values / scale`` as float8_e4m3fn, saturated."""
    return (values.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """float ``[..., n]`` to packed e2m1 ``[..., n / 2]``, ties to the even code, saturated at 6."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, tie_up in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (size >= bound) if tie_up else (size > bound)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def to_nvfp4(values: torch.Tensor, scale: float = 1.0) -> Nvfp4:
    """``[..., D]`` to NVFP4 with linear block scales. ``scale`` is the global dequantization
    factor.
    """
    *outer, dim = values.shape
    blocks = values.float().reshape(*outer, dim // BLOCK, BLOCK)
    factor = (blocks.abs().amax(-1) / (6 * scale)).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    step = (factor.float() * scale)[..., None]
    scaled = torch.where(step == 0, 0, blocks / torch.where(step == 0, 1, step))
    return Nvfp4(encode_e2m1(scaled.reshape(*outer, dim)), factor)


def from_nvfp4(stored: Nvfp4, scale: float = 1.0) -> torch.Tensor:
    """The float32 values that an NVFP4 tensor with linear scales stands for."""
    return decode_e2m1(stored.data) * stored.scales.float().repeat_interleave(BLOCK, -1) * scale


def global_scale(values: torch.Tensor) -> float:
    """The dequantization factor that maps the largest magnitude to the largest NVFP4 value, 448 *
    6.
    """
    return max(values.abs().amax().item() / (_E4M3_MAX * 6), 2.0**-100)


def v_to_nvfp4(values: torch.Tensor, scale: float, order: VScaleOrder) -> Nvfp4:
    """Like :func:`to_nvfp4` for a V cache ``[..., T, D]``, with its block scales in the given
    order.
    """
    stored = to_nvfp4(values, scale)
    if order is VScaleOrder.LINEAR:
        return stored
    mixed = interleave(stored.scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    return Nvfp4(stored.data, mixed)

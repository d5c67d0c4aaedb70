"""What every server needs: null slots, integers in int32, scales, gates and packed heads."""

from __future__ import annotations

from typing import Any

import torch
from specplan.plans.gdn_replay import HEAD, WINDOW


def int32_into(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Positions, slots or request indices in int32: ``values`` itself if it is int32, or ``out``
    (int32, of the same shape) after one launch. Values must fit; nobody checks.
    """
    if values.dtype is torch.int32:
        return values
    _check_out(values, out)
    return out.copy_(values)


def null_slots_into(slots: torch.Tensor, null: int, out: torch.Tensor) -> torch.Tensor:
    """Slots in int32 with -1 where the server has its null slot (vLLM: block 0): ``out`` (int32,
    of the same shape) after three small launches. ``slots`` is int32 or int64, any stride.

    A server whose null slot is negative needs none of this: any negative slot is padding.
    """
    _check_out(slots, out)
    out.copy_(slots)
    return out.masked_fill_(out == null, -1)


def scale(value: float | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """An FP8 scale as the op takes it, fp32 [1] on the device: a view of a tensor with one fp32
    element there, or a new tensor, made once when the weights are loaded.

    Raises
    ------
    ValueError
        For a tensor that has more than one element, or that is not fp32 on the device: converting
        it in each step would be a copy that nobody sees.
    """
    if not isinstance(value, torch.Tensor):
        return torch.tensor([float(value)], dtype=torch.float32, device=device)
    if value.numel() != 1 or value.dtype is not torch.float32:
        raise ValueError(f"a scale is {value.dtype} {tuple(value.shape)}, expected one of fp32")
    if value.device.type != torch.device(device).type:
        raise ValueError(f"a scale is on {value.device}, expected {device}")
    return value.view(1)


def gate_parameters(
    A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A_log`` and ``dt_bias`` of a layer in fp32 and dense, whatever the checkpoint has; once,
    when the weights are loaded.
    """
    return A_log.float().contiguous(), dt_bias.float().contiguous()


def packed_heads(
    packed: torch.Tensor, key_heads: int, value_heads: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of ``verify`` as views of rows ``[requests * tokens, (2 HK + HV) * 128]``, as the
    convolution gives them; any row stride.

    Raises
    ------
    ValueError
        For another width, or rows that are no multiple of ``tokens``.
    """
    rows, width = packed.shape
    keys, values = key_heads * HEAD, value_heads * HEAD
    if width != 2 * keys + values or tokens < 1 or rows % tokens:
        raise ValueError(
            f"rows are {tuple(packed.shape)}, expected [requests x {tokens}, {2 * keys + values}]"
        )
    by_request = packed.unflatten(0, (rows // tokens, tokens))
    parts = by_request.split((keys, keys, values), dim=-1)
    heads = (key_heads, key_heads, value_heads)
    q, k, v = (part.unflatten(-1, (n, HEAD)) for part, n in zip(parts, heads, strict=True))
    return q, k, v


def by_request(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Rows of tokens ``[requests * tokens, ...]`` as a view ``[requests, tokens, ...]``; ValueError
    where that does not come out even.
    """
    if tokens < 1 or rows.shape[0] % tokens:
        raise ValueError(f"{rows.shape[0]} rows are no multiple of {tokens} tokens a request")
    split: torch.Tensor = rows.unflatten(0, (rows.shape[0] // tokens, tokens))
    return split


def replay_records(
    slots: int, key_heads: int, value_heads: int, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """``rec_u``, ``rec_k`` and ``rec_G`` of one layer, zeroed: keyword arguments of ``Pool``. They
    have as many slots as the layer's state.
    """
    made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "rec_u": ((slots, value_heads, 2, WINDOW, HEAD), torch.bfloat16),
        "rec_k": ((slots, key_heads, 2, WINDOW, HEAD), torch.bfloat16),
        "rec_G": ((slots, value_heads, 2, WINDOW), torch.float32),
    }
    return {n: torch.zeros(s, dtype=dtype, device=device) for n, (s, dtype) in made.items()}


def fp8(cache: torch.Tensor) -> torch.Tensor:
    """A cache of bytes seen as e4m3; any other as it is."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype is torch.uint8 else cache


def _check_out(values: torch.Tensor, out: Any) -> None:
    if out.dtype is not torch.int32 or out.shape != values.shape:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, expected int32 {tuple(values.shape)}"
        )

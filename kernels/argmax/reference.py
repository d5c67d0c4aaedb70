"""``argmax`` in plain torch, on CPU or GPU: the contract, element by element."""

from __future__ import annotations

import torch

#: The most elements that a reference works on at a time.
MOST_ELEMENTS = 1 << 28
#: What a value that is NaN is given as: its bits by dtype.
NAN_BITS = {torch.bfloat16: 0x7FFF, torch.float32: 0x7FFFFFFF}
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def columns(logits: torch.Tensor) -> torch.Tensor:
    """The column of the largest logit of each row, int64: the first NaN, else the first of the
    largest values.
    """
    # So many rows at a time that the copies below stay small.
    rows = max(1, MOST_ELEMENTS // max(1, logits.shape[1]))
    if logits.shape[0] > rows:
        return torch.cat([columns(part) for part in logits.split(rows)])
    wide = logits.float()
    nan = wide.isnan()
    largest = wide.masked_fill(nan, float("-inf")).amax(1, keepdim=True)
    wanted = torch.where(nan.any(1, keepdim=True), nan, wide == largest)
    return first_true(wanted)


def first_true(marks: torch.Tensor) -> torch.Tensor:
    """The first column of each row that is true, int64."""
    column = torch.arange(marks.shape[1], device=marks.device)
    return torch.where(marks, column, marks.shape[1]).amin(1)


def keys(logits: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The key of each row, int64: the largest of keys, compared as unsigned numbers, is that of the
    row's argmax, and so is the largest over the shards of a vocabulary.
    """
    at = columns(logits)
    value = logits.float().gather(1, at[:, None])[:, 0]
    bits = (value + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    negative = bits >= 1 << 31
    order = torch.where(negative, bits ^ 0xFFFFFFFF, bits | (1 << 31))
    order = torch.where(value.isnan(), torch.full_like(order, 0xFFFFFFFF), order)
    complement = (at + offset) ^ 0xFFFFFFFF
    return (order << 32) | complement


def values(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, in its dtype; zero as +0, NaN by ``NAN_BITS``."""
    value = logits.gather(1, columns(logits)[:, None])[:, 0]
    bits = (value + 0.0).view(_BITS[logits.dtype])
    return bits.masked_fill(value.isnan(), NAN_BITS[logits.dtype]).view(logits.dtype)


def argmax(
    logits: torch.Tensor,
    ids: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    value: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    offset: int | None = None,
    splits: int | None = None,
) -> None:
    """Fill the outputs in place; arguments as :meth:`specplan.argmax.Argmax.__call__`, any device.
    The scratch is left as it is.
    """
    rows, by = logits.shape[0], offset or 0
    if not rows:
        return
    at = columns(logits)
    ids.copy_(at + by if d2t is None else at + by + d2t[at].long())
    if value is not None:
        value[:rows] = values(logits)
    if key is not None:
        key[:rows] = keys(logits, by)

"""``pack.argmax``: the largest logit of each row in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specplan.errors import Uncertified
from specplan.op import Op
from specplan.plans.argmax import OP
from specplan.plans.signature import Size


def larger_batches(size: Size) -> Sequence[Size]:
    """The cells that may run a call: its own, then the next multiples of 8, 32 and 128 requests and
    the next power of two, the smallest first. Requests are independent, and no result depends on
    the splits.
    """
    found = {-(-size.requests // step) * step for step in (1, 8, 32, 128)}
    found.add(1 << (size.requests - 1).bit_length())
    return [size._replace(requests=requests) for requests in sorted(found)]


class Argmax(Op):
    """The column of the largest logit of each row, as torch orders them: NaN is above everything
    and the first NaN wins; of equal values, -0 and +0 among them, the lowest column.
    """

    declared = OP

    def __call__(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        scratch: torch.Tensor,
        *,
        value: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        d2t: torch.Tensor | None = None,
        offset: int | None = None,
        splits: int | None = None,
    ) -> bool | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        logits
            bf16 or fp32 [rows, V], columns dense, rows at any stride, V up to 262,144, on one CUDA
            device. Rows at multiples of 16 bytes are read fastest.
        ids
            int32 or int64 [rows]: the column, plus ``offset``, plus ``d2t[column]``.
        scratch
            int64 [>= 2 * rows], zero before the first call; every call leaves it zero. Calls that
            may run at the same time need one each.
        value
            [>= rows], in the dtype of the logits: the largest logit. Zero is given as +0, NaN as
            0x7fff or 0x7fffffff.
        key
            int64 [>= rows]: the order of the value in the upper word, and the complement of the
            column plus ``offset`` in the lower one. Of the shards of a vocabulary the largest key,
            compared as unsigned, is that of the whole.
        d2t
            int32 or int64 [>= V]: from a draft head's vocabulary to the target's.
        offset
            The first column of a shard; 0 without it.
        splits
            CTAs that share a row, a cell of its own; the planning rule's choice unless given. The
            result does not depend on it.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched. No rows: True.

        Raises
        ------
        LaunchError
            CUDA refused the launch.
        ColdCaptureError
            First call on this device, inside a graph capture.

        Example
        -------
        ::

            scratch = torch.zeros(2 * rows, dtype=torch.int64, device="cuda")    # once
            pack.argmax.require(logits, ids, scratch)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    def size_for(self, size: Size) -> Sequence[Size]:
        """Rows are independent, so they also run as part of more."""
        return larger_batches(size)

"""``pack.draft_step``: what stands between two steps of a draft model, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specplan.argmax import larger_batches
from specplan.errors import Uncertified
from specplan.op import Op
from specplan.plans.draft_step import OP
from specplan.plans.signature import Size


class DraftStep(Op):
    """Take a draft token of every request, put it where drafts and inputs go, and move what the
    next draft step reads: lengths, positions, page and slots of the next row.

    One row a request, context requests among them. Nothing reads a value on the host, so the K
    launches of a draft loop are captured with the draft model's.
    """

    declared = OP

    def __call__(
        self,
        target: torch.Tensor,
        input_ids: torch.Tensor,
        drafts: torch.Tensor,
        scratch: torch.Tensor | None = None,
        *,
        step: int,
        d2t: torch.Tensor | None = None,
        next_new_tokens: torch.Tensor | None = None,
        next_token: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        slot: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        request_of_row: torch.Tensor | None = None,
        position_of_row: torch.Tensor | None = None,
        visible_of_row: torch.Tensor | None = None,
        page_of_row: torch.Tensor | None = None,
        within_of_row: torch.Tensor | None = None,
        cache_slot: torch.Tensor | None = None,
        group_slot: torch.Tensor | None = None,
        page_size: int | None = None,
        group: int | None = None,
        scale: int | None = None,
        splits: int | None = None,
    ) -> bool | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        target
            bf16 or fp32 [B, V] logits of the draft head, columns dense, rows at any stride, V up to
            262,144, whose argmax is the token (``pack.argmax``); or int32 or int64 [B] tokens, any
            stride.
        input_ids
            int32 or int64 [B]: the token, plus ``d2t[token]``.
        drafts
            int32 [>= B, K], any row stride: column ``step`` becomes the token.
        scratch
            int64 [>= 2 * B] for logits, zero before the first call; every call leaves it zero.
            Calls that may run at the same time need one each.
        step
            Number of the draft, 0..K - 1. At K - 1 no other step follows: lengths and positions
            stay.
        d2t
            int32 or int64 [>= V]: from the draft head's vocabulary to the target's, as what is
            added. A ready token that it does not have stays as it is.
        next_new_tokens, next_token
            int32 [>= B, > K], any row stride: column ``step`` + 1 becomes the token, and column 0
            ``next_token`` where it is given, int32 [>= B], the last accepted token (``accept``).
        kv_lens, positions
            int32 [>= B] and int32 or int64 [A, >= B], A up to 32, columns dense: + 1 if another
            step follows.
        slot
            int32 [>= B], any stride. One below 0 is a padding request: its length and positions
            stay, and its row is a padding row.
        block_table, page_size, scale
            int32 [>= B, C] of any strides; tokens of a page; what table entries are divided by, 1
            without it.
        request_of_row, position_of_row, visible_of_row
            int32 [>= B], of the row at kv_len - 1, with the length after the move: what
            ``step_setup`` says with one row a request. They need ``kv_lens``.
        page_of_row, within_of_row, cache_slot, group_slot
            int32 or int64 the first two, int64 the others, [>= B]: page and place of that row. They
            need ``kv_lens``, ``block_table`` and ``page_size``.
        group
            Tokens of a group, 1 without it; ``group_slot`` needs whole groups in a page.
        splits
            CTAs that share a row of logits, a cell of its own; the planning rule's choice unless
            given. The result does not depend on it.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched. No requests:
        True.

        Raises
        ------
        LaunchError
            CUDA refused the launch.
        ColdCaptureError
            First call on this device, inside a graph capture.

        Example
        -------
        ::

            scratch = torch.zeros(2 * batch, dtype=torch.int64, device="cuda")    # once
            for j in range(K):
                logits = draft_model(input_ids, positions, cache_slot)
                pack.draft_step.require(logits, input_ids, drafts, scratch, step=j,
                                        kv_lens=kv_lens, positions=positions, slot=slot,
                                        block_table=table, page_size=32, cache_slot=cache_slot)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    def size_for(self, size: Size) -> Sequence[Size]:
        """Requests are independent, so they also run as part of more."""
        return larger_batches(size)

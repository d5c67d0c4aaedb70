"""``pack.scatter``: the sampler's store update in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from specplan.errors import Uncertified
from specplan.op import Op
from specplan.plans.scatter import OP


class Scatter(Op):
    """Store each moved row's tokens, drafts and length under its slot.

    For r in [0, rows), i = row_begin + r, s = slots[r], n = lens[i]: the history store gets
    ``new_tokens[i, :n]``, the next store ``next_new_tokens[i]``, the draft store
    ``next_draft_tokens[i]``, each padded with zeros to the store's width, and the length store gets
    n. A token at or past n is never read. The slots of the moved rows must be distinct; a slot
    outside the stores is skipped.
    """

    declared = OP

    def __call__(
        self,
        new_tokens: torch.Tensor,
        next_new_tokens: torch.Tensor,
        lens: torch.Tensor,
        next_draft_tokens: torch.Tensor,
        slots: torch.Tensor,
        store_new_tokens: torch.Tensor,
        store_next_new_tokens: torch.Tensor,
        store_lens: torch.Tensor,
        store_next_draft: torch.Tensor,
        row_begin: int,
        rows: int,
    ) -> bool | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        new_tokens, next_new_tokens, next_draft_tokens
            int32 [N, a], [N, b], [N, c] on one CUDA device, columns dense; a, b, c may each be
            narrower or wider than the store.
        lens
            int32 [N], accepted lengths, used raw.
        slots
            int32 [>= rows], the store slot of each moved row.
        store_new_tokens, store_next_new_tokens
            int32 [H, S, 1] and [X, S, 1], token-major.
        store_lens, store_next_draft
            int32 [S] and [S, D].
        row_begin, rows
            The rows moved are ``row_begin .. row_begin + rows`` of the outputs; one row a request.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched. No rows: True,
        whatever the tensors.

        Raises
        ------
        LaunchError
            CUDA refused the launch.
        ColdCaptureError
            First call on this device, inside a graph capture.

        Example
        -------
        ::

            if not pack.scatter(new, following, lens, drafts, slots, *stores, 0, batch):
                specplan.reference.scatter(new, following, lens, drafts, slots, *stores, 0, batch)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    def adapt_arguments(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The outputs may differ in rows as long as each holds the rows moved; the module takes
        them with equal ones.
        """
        end = values["row_begin"] + values["rows"]
        outputs = {tensor.name: values[tensor.name] for tensor in OP.tensors[:4]}
        if len({output.size(0) for output in outputs.values()}) == 1:
            return None
        if any(output.size(0) < end for output in outputs.values()):
            return None
        return {name: output[:end] for name, output in outputs.items()}

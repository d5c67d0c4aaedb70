"""``pack.gather``: the overlap scheduler's four input gathers in one launch."""

from __future__ import annotations

import torch
from specplan.errors import Uncertified
from specplan.op import Op
from specplan.plans.gather import OP


class Gather(Op):
    """Fill the next step's inputs of the requests that were in the previous step.

    For r < requests, s = slots[r], j < tokens: ``input_ids`` gets ``store_next_new_tokens[j, s]``,
    ``pos_offsets`` gets ``store_lens[pos_indices[r * tokens + j]]``, ``draft_tokens`` gets
    ``store_next_draft[s, j]`` for j < drafts, ``kv_offsets`` gets ``store_lens[s] - tokens``. Each
    destination is flat and is written from its own begin. Slots may repeat; an index outside the
    stores gives 0.
    """

    declared = OP

    def __call__(
        self,
        store_next_new_tokens: torch.Tensor,
        store_next_draft: torch.Tensor,
        store_lens: torch.Tensor,
        slots: torch.Tensor,
        pos_indices: torch.Tensor,
        input_ids: torch.Tensor,
        draft_tokens: torch.Tensor,
        pos_offsets: torch.Tensor,
        kv_offsets: torch.Tensor,
        input_ids_begin: int,
        draft_tokens_begin: int,
        pos_offsets_begin: int,
        kv_offsets_begin: int,
        requests: int,
        tokens: int,
        drafts: int,
    ) -> bool | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        store_next_new_tokens, store_next_draft, store_lens
            int32 [X, S, 1] token-major, [S, D] and [S], on one CUDA device.
        slots, pos_indices
            int32 [>= requests] and [>= requests * tokens].
        input_ids, draft_tokens, pos_offsets, kv_offsets
            int32, one-dimensional; requests * tokens, requests * drafts, requests * tokens and
            requests elements are written.
        input_ids_begin, draft_tokens_begin, pos_offsets_begin, kv_offsets_begin
            Where in each destination the first request's elements go.
        requests, tokens, drafts
            ``drafts`` < ``tokens``; 0 leaves ``draft_tokens`` untouched.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched. No requests,
        with valid tensors: True.

        Raises
        ------
        LaunchError
            CUDA refused the launch.
        ColdCaptureError
            First call on this device, inside a graph capture.

        Example
        -------
        ::

            free = max_batch - batch    # requests without a previous step come first
            pack.gather.require(next_store, draft_store, lens_store, slots, positions, input_ids,
            draft_tokens, pos_offsets,
                                kv_offsets, free * T, free * (T - 1), free * T, free, batch, T, T -
                                1)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

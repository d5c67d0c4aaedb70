"""``pack.accept``: greedy acceptance of a verify step in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from specplan.argmax import larger_batches
from specplan.errors import Uncertified
from specplan.op import Op
from specplan.plans import accept as plan
from specplan.plans.accept import OP
from specplan.plans.signature import Size


def force_pool(device: torch.device | str) -> torch.Tensor:
    """The uniform numbers that ``force_mode`` 2 draws from: fp32 [65536], the same everywhere."""
    generator = torch.Generator().manual_seed(plan.POOL_SEED)
    return torch.rand(plan.POOL, generator=generator).to(device)


class Accept(Op):
    """Take the target's token of every row, count the drafts of each request that match, and move
    rows, lengths, positions and the cursors of ``gdn_replay``.

    Requests are C context requests of one row each, then generation requests of T rows. The count
    of a generation request is 1 + the drafts that equal the target's tokens before the first that
    does not; of a context request it is 1.
    """

    declared = OP
    attributes: ClassVar[tuple[str, ...]] = ("force", "force_pool")

    #: ``force_mode``, ``force_base`` and ``force_frac`` for a number of accepted drafts, and the
    #: pool that mode 2 draws from; made once, at start.
    force = staticmethod(plan.force)
    force_pool = staticmethod(force_pool)

    def __call__(
        self,
        target: torch.Tensor,
        accepted: torch.Tensor,
        n_acc: torch.Tensor,
        scratch: torch.Tensor,
        drafts: torch.Tensor | None = None,
        *,
        next_token: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        last_row: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        positions_out: torch.Tensor | None = None,
        slot: torch.Tensor | None = None,
        hist_len: torch.Tensor | None = None,
        bank: torch.Tensor | None = None,
        n_override: torch.Tensor | None = None,
        pool: torch.Tensor | None = None,
        counter: torch.Tensor | None = None,
        contexts: int | None = None,
        extra: int | None = None,
        fill: int | None = None,
        force_mode: int | None = None,
        force_base: int | None = None,
        force_frac: float | None = None,
        splits: int | None = None,
    ) -> bool | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        target
            bf16 or fp32 [N, V] logits, columns dense, rows at any stride, V up to 262,144, whose
            argmax is the target's token (``pack.argmax``); or int32 or int64 [N] tokens, any
            stride. N = contexts + (B - contexts) * T rows.
        accepted
            int32 [B, T], columns dense: the target's tokens of each request, all T of a generation
            request, one and zeros of a context request.
        n_acc
            int32 [B]: the count.
        scratch
            int64 [>= N + B + 1], zero before the first call; every call leaves it zero. Calls that
            may run at the same time need one each.
        drafts
            int32 [>= B - contexts, T - 1], any row stride; a draft below 0 matches nothing. None
            with T = 1.
        next_token
            int32 [>= B]: the target's token at the count.
        rows
            int32 or int64 [>= B]: the row of that token; of context request c ``last_row[c]``, or c
            without it.
        last_row
            int32 [>= contexts].
        kv_lens
            int32 [>= B], tokens of each request in the cache, this step's T included: becomes
            kv_len - T + count + extra, of a context request kv_len + extra.
        positions, positions_out
            int32 or int64 [A, P] and [A, >= B], A up to 32, columns dense: ``positions_out[., b] =
            positions[., rows[b]] + 1``, -1 for a row past P.
        slot
            int32 [>= B], any stride: the state slot of each request. One below 0 is a padding
            request, whose length and cursors stay.
        hist_len, bank
            int32 [slots]: the cursors of ``gdn_replay``, moved as its ``advance`` does, of
            generation requests. One of the two, never both.
        n_override
            int32 [>= B]: a count that replaces the matching and the forced one unless it is
            negative; at most T. 0 is for aborted requests: rows, next token and positions are then
            those of a count of 1.
        pool, counter
            fp32 [65536] from ``force_pool`` and int64 [>= 1], for ``force_mode`` 2.
        contexts
            Context requests, which come first; 0 without it.
        extra
            Added to every length; 0 without it.
        fill
            1 gives -1 past the count in ``accepted``; 0, or none, the target's tokens.
        force_mode, force_base, force_frac
            From ``force``. 1: every generation request's count is ``force_base``. 2: the counter
            goes up by 1, and a request's count is ``force_base`` + 1 where its number in the pool
            is below ``force_frac``. Tokens are not changed. No mode is another compiled function.
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

            rows = batch * T
            scratch = torch.zeros(rows + batch + 1, dtype=torch.int64, device="cuda")    # once
            pack.accept.require(logits, accepted, n_acc, scratch, drafts, next_token=next_token,
                                rows=last_rows, kv_lens=kv_lens, slot=slot, hist_len=hist_len,
                                bank=bank)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    def size_for(self, size: Size) -> Sequence[Size]:
        """Requests are independent, so they also run as part of more."""
        return larger_batches(size)

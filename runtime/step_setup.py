"""``pack.step_setup``: token mapping, positions, pages and slots of a step's rows in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specplan.argmax import larger_batches
from specplan.errors import Uncertified
from specplan.op import Op
from specplan.plans.signature import Size
from specplan.plans.step_setup import OP


class StepSetup(Op):
    """Say of every row of a step which request, position, page and group it has.

    Rows lie request after request: ``tokens`` of each, or ``seq_lens[b]``. Rows behind the last
    request's, and rows of requests whose length is below their rows (dummies), are padding and
    written as such: request, position, page and slots -1, all else 0. Nothing reads a value on the
    host, and the grid depends on shapes alone, so a captured launch follows new lengths and tables.
    """

    declared = OP

    def __call__(
        self,
        kv_lens: torch.Tensor,
        block_table: torch.Tensor,
        request_of_row: torch.Tensor,
        position_of_row: torch.Tensor,
        visible_of_row: torch.Tensor,
        page_of_row: torch.Tensor,
        within_of_row: torch.Tensor,
        first_position: torch.Tensor,
        *,
        tokens: int,
        page_size: int,
        group: int,
        seq_lens: torch.Tensor | None = None,
        scale: int | None = None,
        ordinal_of_row: torch.Tensor | None = None,
        position_of_row_int64: torch.Tensor | None = None,
        length_of_row: torch.Tensor | None = None,
        cache_slot: torch.Tensor | None = None,
        group_slot: torch.Tensor | None = None,
        table_out: torch.Tensor | None = None,
        work: torch.Tensor | None = None,
        n_commit: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        hist_len: torch.Tensor | None = None,
        bank: torch.Tensor | None = None,
        window: int | None = None,
    ) -> bool | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        kv_lens, block_table
            int32 [B], this step's rows included, and int32 [B, C] of any strides.
        request_of_row, position_of_row, visible_of_row
            int32 [R]; R is at least the rows of all requests. ``visible_of_row`` is (position + 1)
            // group.
        page_of_row, within_of_row
            int32 or int64 [R], both of one dtype: what ``pack.rollback`` takes.
        first_position
            int32 [B]: position of each request's first row, -1 where the length is below the rows.
        tokens, seq_lens
            Rows of each request; or 0, and int32 [B] of them.
        page_size, group, scale
            Tokens of a page and of a group; what table entries are divided by, 1 without it.
        ordinal_of_row, length_of_row
            int32 [R]: place of the row in its request, and its request's length.
        position_of_row_int64, cache_slot, group_slot
            int64 [R]: positions once more; page * page_size + within; and the same in groups for
            rows that end a group, which needs whole groups in a page.
        table_out
            int32 [>= B, >= C] of any strides: the table divided by ``scale``; entries below 0 stay.
        work, n_commit, slots, hist_len, bank, window
            int32 [>= B, 4] and [1], from [B], [S] and [S]: (request, slot, hist_len, bank), first
            those with hist_len + rows > window (16 without it), as many as ``n_commit`` says.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched.

        Raises
        ------
        LaunchError
            CUDA refused the launch.
        ColdCaptureError
            First call on this device, inside a graph capture.

        Example
        -------
        ::

            pack.step_setup.require(kv_lens, table, request, position, visible, page, within, first,
                                    tokens=4, page_size=32, group=4)
            pack.rollback.gather.require(layout, 4, planes, page, within, old, pending)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    def size_for(self, size: Size) -> Sequence[Size]:
        """One compiled function serves every batch, and its launch follows the actual sizes."""
        return larger_batches(size)

"""``pack.scatter``: the sampler's store update in one launch."""

from __future__ import annotations

from typing import Any

import torch
from specplan.op import CALL_ERRORS, SHAPE_ERRORS, Op
from specplan.plans.manifest import PlanRecord
from specplan.uncertified import Reason, Uncertified


class Scatter(Op):
    """Store each moved row's tokens, drafts and length under its slot.

    For r in [0, rows), i = row_begin + r, s = slots[r], n = lens[i]: the history store gets
    ``new_tokens[i, :n]``, the next store ``next_new_tokens[i]``, the draft store
    ``next_draft_tokens[i]``, each padded with zeros to the store's width, and the length store gets
    n. A token at or past n is never read. The slots of the moved rows must be distinct; a slot
    outside the stores is skipped.
    """

    family = "scatter"
    op = "scatter"

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
        if rows == 0:
            return True
        # Written out, and by the least that tells the plan: the compiled function checks the ranges
        # and the width that the plan was picked for, and what it or the look-up stumbles over is
        # worked out by _again.
        try:
            function, columns = self._picked[
                new_tokens.get_device(), rows, new_tokens.numel(), store_next_draft.numel()
            ]
            function(
                new_tokens,
                next_new_tokens,
                lens,
                next_draft_tokens,
                slots,
                store_new_tokens,
                store_next_new_tokens,
                store_lens,
                store_next_draft,
                row_begin,
                rows,
                columns,
            )
        except CALL_ERRORS as error:
            tensors = (
                *(new_tokens, next_new_tokens, lens, next_draft_tokens, slots),
                *(store_new_tokens, store_next_new_tokens, store_lens, store_next_draft),
            )
            return self._again(tensors, (row_begin, rows), error)
        return True

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments of a call once; returns ``launch()`` for these buffers,
        or a falsy Uncertified.

        ``launch()`` runs on torch's current stream, returns None, and checks nothing but what the
        compiled module checks: the buffers must stay allocated as they are. No store is written
        here; the compiled module's checks are asked with a launch of no rows.
        """
        values = self._values(arguments, named)
        tensors, integers = values[:9], values[9:]
        if integers[1] == 0:
            return _nothing
        found = self._look_up(tensors, integers)
        if not found:
            return found
        function, columns = found
        return self._bound(function, tensors, (*integers, columns), (0, 0, columns))

    def _look_up(self, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]) -> Any:
        new_tokens, _, _, _, slots, store_new_tokens, store_next, _, store_draft = tensors
        row_begin, rows = integers
        try:
            held, width = new_tokens.shape
            # What the compiled function checks by itself (the stores' widths among it) is not in
            # the key: a key that fits another problem's plan is refused by that plan, and then
            # looked up in full.
            key = (new_tokens.get_device(), rows, new_tokens.numel(), store_draft.numel())
            found = self._picked.get(key)
            if found is None or found[1] != width:
                history = store_new_tokens.size(0)
                # A call moves as many history columns as both sides have; an output with no
                # columns moves the length alone.
                picked = self._chosen(
                    key[0],
                    (history, store_next.size(0), store_draft.size(1)),
                    "int32",
                    rows,
                    max(1, min(width, history)),
                )
                if isinstance(picked, Uncertified):
                    return picked
                found = self._remember(key, (picked.function, width))
            listed = slots.numel()
            if 0 <= row_begin <= held - rows and 0 <= rows <= listed:
                return found
        except SHAPE_ERRORS as error:
            return self._refused(error)
        return self._outside(key[0], row_begin, rows, held, listed)

    def _fit(
        self, function: Any, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]
    ) -> tuple[Any, tuple[torch.Tensor, ...]] | Uncertified | None:
        row_begin, rows, _ = integers
        outputs, end = tensors[:4], row_begin + rows
        narrowed = outputs
        # The outputs may differ in rows as long as each holds the rows moved; the module takes them
        # with equal ones.
        if all(isinstance(t, torch.Tensor) and t.dim() and t.size(0) >= end for t in outputs):
            narrowed = tuple(t[:end] for t in outputs)
        fitted = (*narrowed, *tensors[4:])
        for held in (tensors[0], fitted[0]):
            self._picked.pop((held.get_device(), rows, held.numel(), tensors[8].numel()), None)
        again = self._look_up(fitted, (row_begin, rows))
        if not again:
            return again  # type: ignore[no-any-return]
        same = narrowed is outputs or all(
            a.shape == b.shape for a, b in zip(narrowed, outputs, strict=True)
        )
        if again[0] is function and same:
            return None
        return again[0], fitted

    def _outside(
        self, device: int, row_begin: int, rows: int, held: int, listed: int
    ) -> Uncertified:
        if row_begin < 0:
            detail = f"row_begin is {row_begin}, below 0"
        elif rows > listed:
            detail = f"rows is {rows}, the slot table has {listed}"
        else:
            detail = f"rows {row_begin}..{row_begin + rows} lie outside the outputs' {held} rows"
        return self._declined(Reason.RANGE, detail, device)

    @classmethod
    def idle_arguments(cls, plan: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        spec = dict(plan.spec)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return (
            zeros(1, 1),
            zeros(1, 1),
            zeros(1),
            zeros(1, 1),
            zeros(1),
            zeros(spec["history"], 1, 1),
            zeros(spec["next"], 1, 1),
            zeros(1),
            zeros(1, spec["draft"]),
            *(0, 0, 1),
        )


def _nothing() -> None:
    """The launch of a bind over no rows."""

"""``pack.gather``: the overlap scheduler's four input gathers in one launch."""

from __future__ import annotations

from typing import Any

import torch
from specplan.op import CALL_ERRORS, SHAPE_ERRORS, Op
from specplan.plans.manifest import PlanRecord
from specplan.uncertified import Reason, Uncertified


class Gather(Op):
    """Fill the next step's inputs of the requests that were in the previous step.

    For r < requests, s = slots[r], j < tokens: ``input_ids`` gets ``store_next_new_tokens[j, s]``,
    ``pos_offsets`` gets ``store_lens[pos_indices[r * tokens + j]]``, ``draft_tokens`` gets
    ``store_next_draft[s, j]`` for j < drafts, ``kv_offsets`` gets ``store_lens[s] - tokens``. Each
    destination is flat and is written from its own begin. Slots may repeat; an index outside the
    stores gives 0.
    """

    family = "gather"
    op = "gather"

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
        # Written out, and by the least that tells the plan: the compiled function checks the
        # ranges, and what it or the look-up stumbles over is worked out by _again.
        try:
            self._picked[store_next_new_tokens.get_device(), requests, tokens, drafts][0](
                store_next_new_tokens,
                store_next_draft,
                store_lens,
                slots,
                pos_indices,
                input_ids,
                draft_tokens,
                pos_offsets,
                kv_offsets,
                input_ids_begin,
                draft_tokens_begin,
                pos_offsets_begin,
                kv_offsets_begin,
                requests,
                tokens,
                drafts,
            )
        except CALL_ERRORS as error:
            tensors = (
                *(store_next_new_tokens, store_next_draft, store_lens, slots, pos_indices),
                *(input_ids, draft_tokens, pos_offsets, kv_offsets),
            )
            integers = (
                *(input_ids_begin, draft_tokens_begin, pos_offsets_begin, kv_offsets_begin),
                *(requests, tokens, drafts),
            )
            return self._again(tensors, integers, error)
        return True

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments of a call once; returns ``launch()`` for these buffers,
        or a falsy Uncertified.

        ``launch()`` runs on torch's current stream, returns None, and checks nothing but what the
        compiled module checks: the buffers must stay allocated as they are. No destination is
        written here; the compiled module's checks are asked with a launch of no requests.
        """
        values = self._values(arguments, named)
        tensors, integers = values[:9], values[9:]
        found = self._look_up(tensors, integers)
        if not found:
            return found
        return self._bound(found[0], tensors, integers, (0, 0, 0, 0, 0, 1, 0))

    def _look_up(self, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]) -> Any:
        store_next, store_draft, _, slots, pos_indices, *destinations = tensors
        *begins, requests, tokens, drafts = integers
        try:
            # The stores' widths are checked by the compiled module: a key that fits another
            # problem's plan is refused by that plan, and then looked up in full.
            key = (store_next.get_device(), requests, tokens, drafts)
            found = self._picked.get(key)
            if found is None:
                found = self._first(key, store_next, store_draft)
                if not found:
                    return found
            flat = requests * tokens
            names = ("input_ids", "draft_tokens", "pos_offsets", "kv_offsets")
            counts = (flat, requests * drafts, flat, requests)
            ranges = [
                ("slots", 0, requests, slots.numel()),
                ("pos_indices", 0, flat, pos_indices.numel()),
            ]
            for name, begin, count, buffer in zip(names, begins, counts, destinations, strict=True):
                ranges.append((name, begin, count, buffer.numel()))
            for name, begin, count, held in ranges:
                if begin < 0:
                    detail = f"{name} begins at {begin}, below 0"
                    return self._declined(Reason.RANGE, detail, key[0])
                if begin + count > held:
                    detail = f"{name} needs {begin}..{begin + count}, it has {held} elements"
                    return self._declined(Reason.RANGE, detail, key[0])
        except SHAPE_ERRORS as error:
            return self._refused(error)
        return found

    def _first(
        self, key: tuple[int, ...], following: torch.Tensor, draft_store: torch.Tensor
    ) -> Any:
        device, requests, tokens, drafts = key
        width, draft_width = following.size(0), draft_store.size(1)
        if requests < 0:
            return self._declined(Reason.RANGE, f"requests is {requests}, below 0", device)
        if not 1 <= tokens <= width:
            detail = f"tokens is {tokens}, outside 1..{width}, the next-input store's width"
            return self._declined(Reason.RANGE, detail, device)
        most = min(tokens - 1, draft_width)
        if not 0 <= drafts <= most:
            return self._declined(Reason.RANGE, f"drafts is {drafts}, outside 0..{most}", device)
        # A call with no requests is checked like one with a single request, and launches no work.
        picked = self._chosen(device, (width, draft_width), "int32", max(1, requests), tokens)
        if isinstance(picked, Uncertified):
            return picked
        return self._remember(key, (picked.function,))

    def _fit(
        self, function: Any, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]
    ) -> tuple[Any, tuple[torch.Tensor, ...]] | Uncertified | None:
        self._picked.pop((tensors[0].get_device(), *integers[4:]), None)
        again = self._look_up(tensors, integers)
        if not again:
            return again  # type: ignore[no-any-return]
        return None if again[0] is function else (again[0], tensors)

    @classmethod
    def idle_arguments(cls, plan: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        spec = dict(plan.spec)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        flat = zeros(1)
        return (
            zeros(spec["next"], 1, 1),
            zeros(1, spec["draft"]),
            flat,
            *(zeros(1) for _ in range(6)),
            *(0, 0, 0, 0, 0, 1, 0),
        )

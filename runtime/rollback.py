"""``pack.rollback``: save the rows that a verify step will overwrite, and put the rejected ones
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from specplan.op import ARGUMENT_ERRORS, CALL_ERRORS, SHAPE_ERRORS, Op
from specplan.plans import rollback as plan
from specplan.plans.manifest import PlanRecord
from specplan.plans.rollback import Layout
from specplan.uncertified import Reason, Uncertified

if TYPE_CHECKING:
    from specplan.pack import Pack

_INDEX = {torch.int32: "int32", torch.int64: "int64"}


def describe(planes: Sequence[torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    """Lay a snapshot out for cache planes, and describe them to the device; a server does this
    once, at start.

    Parameters
    ----------
    planes
        Up to 64 tensors ``[pages, page_tokens, *row]`` on one device, of any dtypes, rows dense,
        pages and rows at any stride. They must stay where they are: the table holds their
        addresses.

    Returns
    -------
    The layout, and the plane table on the planes' device, complete.

    Raises
    ------
    ValueError
        For planes that a launch cannot take, with what was found.

    Example
    -------
    ::

        layout, table = describe([*index_keys, positions])
        old = torch.empty(max_rows, layout.record_bytes, dtype=torch.uint8, device="cuda")
        pending = torch.zeros(1, dtype=torch.int32, device="cuda")

    """
    described = []
    for each in planes:
        row = each.shape[2:]
        if each.stride()[2:] != torch.empty(row, device="meta").stride():
            raise ValueError(f"a plane's rows must be dense, they have strides {each.stride()[2:]}")
        item = each.element_size()
        page_stride, row_stride = (stride * item for stride in each.stride()[:2])
        pages, page_tokens = each.shape[:2]
        described.append(
            plan.plane(
                each.data_ptr(), page_stride, row_stride, pages, page_tokens, prod(row) * item
            )
        )
    layout = plan.layout(described)
    return layout, _upload(layout.table(), planes[0].device)


def describe_states(states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Describe staged states to the device: pairs of a pool ``[slots, *state]`` and its candidates
    ``[requests, candidates, *state]``, states dense; equal dtypes, or a pair of
    :data:`specplan.plans.rollback.CASTS`.
    """
    described = []
    for pool, candidates in states:
        described.append(
            plan.state(
                candidates.data_ptr(),
                candidates.stride(0) * candidates.element_size(),
                candidates.stride(1) * candidates.element_size(),
                candidates.shape[1],
                pool.data_ptr(),
                pool.stride(0) * pool.element_size(),
                pool.shape[0],
                prod(pool.shape[1:]),
                str(candidates.dtype).removeprefix("torch."),
                str(pool.dtype).removeprefix("torch."),
            )
        )
    return _upload(plan.state_table(described), states[0][0].device)


def _upload(table: list[list[int]], device: torch.device) -> torch.Tensor:
    uploaded = torch.tensor(table, dtype=torch.int64, device=device)
    if device.type == "cuda":
        # A launch may read its table before its predecessor has ended.
        torch.cuda.synchronize(device)
    return uploaded


class _RollbackOp(Op):
    family = "rollback"

    def _find(
        self,
        layout: Layout,
        tokens: int,
        planes: torch.Tensor,
        pages: torch.Tensor,
        old: torch.Tensor,
    ) -> Any:
        """What a call comes to, its ranges checked: the compiled function and the last of its
        integers (record bytes, planes, splits, overlap); an Uncertified; None if there are no rows.
        """
        try:
            rows = pages.numel()
            if rows == 0:
                return None
            # The compiled module refuses pages and tables of other ranks, so counts are enough.
            key = (pages.get_device(), layout.key, rows, tokens, pages.dtype)
            found = self._picked.get(key)
            if found is None:
                found = self._first(key, layout)
                if not found:
                    return found
            held, width = old.shape
            if held >= rows and width >= found[1] and planes.shape[0] == found[2]:
                return found
        except SHAPE_ERRORS as error:
            return self._refused(error)
        return self._declined(
            Reason.RANGE,
            f"{rows} rows of {len(layout.planes)} planes take records of {layout.record_bytes} "
            f"bytes; "
            f"the snapshot is {tuple(old.shape)}, the plane table {tuple(planes.shape)}",
            key[0],
        )

    def _first(self, key: tuple[Any, ...], layout: Layout) -> Any:
        device, _, rows, tokens, dtype = key
        if tokens < 1:
            return self._declined(Reason.RANGE, f"tokens is {tokens}, below 1", device)
        if dtype not in _INDEX:
            detail = f"pages are {dtype}, expected torch.int32 or torch.int64"
            return self._declined(Reason.ARGUMENT, detail, device)
        if layout.geometry is None:
            return self._declined(
                Reason.UNKNOWN_PROBLEM, "the planes have more than two row sizes", device
            )
        # Ragged rows run the plan of the full batch.
        requests = -(-rows // tokens)
        geometry = tuple(layout.geometry.values())
        picked = self._chosen(device, geometry, _INDEX[dtype], requests, tokens)
        if isinstance(picked, Uncertified):
            return picked
        launch = (picked.launch["splits"], picked.launch["overlap"])
        return self._remember(
            key, (picked.function, layout.record_bytes, len(layout.planes), *launch)
        )

    def _retried(
        self, error: Exception, found: Any, tensors: tuple[torch.Tensor, ...], *tokens: int
    ) -> bool | Uncertified:
        """A call that its hot path could not make, by what :meth:`_find` says of it now."""
        if found is None:
            return True
        if not found:
            return found  # type: ignore[no-any-return]
        if isinstance(error, ARGUMENT_ERRORS):
            return self._refused(error, tensors[1].get_device())
        function, *integers = found
        answer = self._launched(function, tensors, (), (*tokens, *integers))
        return answer if isinstance(answer, Uncertified) else True

    def _held(self, found: Any, tensors: tuple[torch.Tensor, ...], *tokens: int) -> Any:
        """The bound launch of a call; the compiled module is asked with no splits, which launches
        nothing.
        """
        if found is None:
            return _nothing
        if not found:
            return found
        function, record, planes, *launch = found
        known = (*tokens, record, planes)
        return self._bound(function, tensors, (*known, *launch), (*known, 0, 0))


class SaveRows(_RollbackOp):
    """Save every plane's rows before the step's first write, and arm the snapshot (see
    :class:`Rollback`).
    """

    op = "gather"

    def __call__(
        self,
        layout: Layout,
        tokens: int,
        planes: torch.Tensor,
        pages: torch.Tensor,
        within: torch.Tensor,
        old: torch.Tensor,
        pending: torch.Tensor,
    ) -> bool | Uncertified:
        """Launch on torch's current stream: ``old[r] = plane[pages[r], within[r]]`` for every plane
        and row.

        Parameters
        ----------
        layout, planes
            From :func:`describe`.
        tokens
            Rows of a request; it chooses the cell, requests = rows / tokens rounded up.
        pages, within
            int32 or int64 [rows]: page, and place in it, of each row. A place outside its plane is
            skipped.
        old
            uint8 [>= rows, >= record bytes]: the snapshot, 16-byte aligned, its row stride a
            multiple of 16. Skipped rows keep what they held.
        pending
            int32 [1], zero at start: the snapshot's shares.

        Returns
        -------
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched. No rows: True.

        """
        try:
            function, *integers = self._picked[
                pages.get_device(), layout.key, pages.numel(), tokens, pages.dtype
            ]
            function(planes, pages, within, old, pending, *integers)
        except CALL_ERRORS as error:
            found = self._find(layout, tokens, planes, pages, old)
            return self._retried(error, found, (planes, pages, within, old, pending))
        return True

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments of a call once; returns ``launch()`` for these buffers,
        or a falsy Uncertified.
        """
        layout, tokens, *tensors = self._values(arguments, named)
        planes, pages, _, old = tensors[:4]
        return self._held(self._find(layout, tokens, planes, pages, old), tuple(tensors))


class RestoreRows(_RollbackOp):
    """Put back the saved rows that a mask rejects, and consume the snapshot (see
    :class:`Rollback`).
    """

    op = "restore"

    def __call__(
        self,
        layout: Layout,
        tokens: int,
        planes: torch.Tensor,
        pages: torch.Tensor,
        within: torch.Tensor,
        old: torch.Tensor,
        pending: torch.Tensor,
        rejected: torch.Tensor,
    ) -> bool | Uncertified:
        """Launch on torch's current stream: ``plane[pages[r], within[r]] = old[r]`` where
        ``rejected[r]`` is not 0.

        ``rejected`` is int32 [rows]; the other parameters and the answer are those of ``gather``.
        Does nothing unless the snapshot is pending.
        """
        try:
            function, *integers = self._picked[
                pages.get_device(), layout.key, pages.numel(), tokens, pages.dtype
            ]
            function(planes, pages, within, old, pending, rejected, *integers)
        except CALL_ERRORS as error:
            found = self._find(layout, tokens, planes, pages, old)
            return self._retried(error, found, (planes, pages, within, old, pending, rejected))
        return True

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments of a call once; returns ``launch()`` for these buffers,
        or a falsy Uncertified.
        """
        layout, tokens, *tensors = self._values(arguments, named)
        planes, pages, _, old = tensors[:4]
        return self._held(self._find(layout, tokens, planes, pages, old), tuple(tensors))


class Commit(_RollbackOp):
    """Put back the saved rows past each request's accepted count, and commit the staged states (see
    :class:`Rollback`).
    """

    op = "commit"

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack)
        self._absent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        layout: Layout,
        tokens: int,
        planes: torch.Tensor,
        pages: torch.Tensor,
        within: torch.Tensor,
        old: torch.Tensor,
        pending: torch.Tensor,
        accepted: torch.Tensor,
        row_requests: torch.Tensor | None = None,
        row_ordinals: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        cursors: torch.Tensor | None = None,
    ) -> bool | Uncertified:
        """Launch on torch's current stream; does nothing unless the snapshot is pending, and
        consumes it.

        Parameters
        ----------
        layout, tokens, planes, pages, within, old, pending
            As for ``gather``.
        accepted
            int32 [requests]: accepted tokens n, the target model's own included. A row goes back if
            its ordinal is at least max(n, 1).
        row_requests, row_ordinals
            int32 [>= rows], both or neither: each row's request and its place among the request's
            rows. A row of no request stays. Without them rows are in request order, ``tokens``
            each.
        states
            From :func:`describe_states`: ``pool[slots[g]] = candidates[g, n - 1]`` in each pool, n
            clamped to what there is.
        slots
            int32 [requests]: the state slot of each request; -1 for a dummy, which changes nothing.
        cursors
            int32 [slots]: ``cursors[slots[g]] = max(n - 1, 0)``.
        """
        # What is left out is empty; the compiled function refuses what does not fit together.
        try:
            device = pages.get_device()
            function, *integers = self._picked[
                device, layout.key, pages.numel(), tokens, pages.dtype
            ]
            none, no_states = self._absent[device]
            function(
                planes,
                pages,
                within,
                old,
                pending,
                accepted,
                none if row_requests is None else row_requests,
                none if row_ordinals is None else row_ordinals,
                no_states if states is None else states,
                none if slots is None else slots,
                none if cursors is None else cursors,
                tokens if row_requests is None else 0,
                *integers,
            )
        except CALL_ERRORS as error:
            optional = (row_requests, row_ordinals, states, slots, cursors)
            given = (planes, pages, within, old, pending, accepted)
            return self._retried(error, *self._checked(layout, tokens, given, optional))
        return True

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments of a call once; returns ``launch()`` for these buffers,
        or a falsy Uncertified.
        """
        values = (*self._values(arguments, named), *[None] * 5)[:13]
        layout, tokens = values[:2]
        return self._held(*self._checked(layout, tokens, values[2:8], values[8:]))

    def _checked(
        self,
        layout: Layout,
        tokens: int,
        given: tuple[torch.Tensor, ...],
        optional: tuple[torch.Tensor | None, ...],
    ) -> tuple[Any, tuple[torch.Tensor, ...], int]:
        """What :meth:`_find` says, with what commits check beside it; all tensors in the compiled
        order; and the rows of a request, 0 where they are listed.
        """
        planes, pages, _, old, _, accepted = given
        row_requests, row_ordinals, states, slots, cursors = optional
        found = self._find(layout, tokens, planes, pages, old)
        if not found:
            return found, given, 0
        device = pages.get_device()
        try:
            rows, requests = pages.numel(), accepted.numel()
            listed = row_requests is not None
            slotted = 0 if slots is None else slots.numel()
            staged = any(t is not None and t.numel() for t in (states, cursors))
            wrong = None
            if listed != (row_ordinals is not None):
                wrong = "row_requests and row_ordinals are given together or not at all"
            elif listed and min(row_requests.numel(), row_ordinals.numel()) < rows:  # type: ignore[union-attr]
                wrong = f"the row lists are shorter than the {rows} rows"
            elif not listed and rows != requests * tokens:
                wrong = f"{rows} rows are not {tokens} tokens of {requests} requests; list them"
            elif slotted != requests and slots is None and staged:
                wrong = "staged states and cursors need slots"
            elif slotted != requests and (slotted or staged):
                wrong = f"{slotted} slots for {requests} requests"
            elif states is not None and states.numel() > plan.MAX_STATES * plan.STATE_FIELDS:
                count = states.numel() // plan.STATE_FIELDS
                wrong = f"{count} staged states, at most {plan.MAX_STATES} fit one launch"
        except SHAPE_ERRORS as error:
            return self._refused(error, device), given, 0
        if wrong is not None:
            return self._declined(Reason.RANGE, wrong, device), given, 0
        none, no_states = self._nothing_of(device)
        absent = (none, none, no_states, none, none)
        filled = (
            there if each is None else each for each, there in zip(optional, absent, strict=True)
        )
        return found, (*given, *filled), 0 if listed else tokens

    def _nothing_of(self, device: int) -> tuple[torch.Tensor, torch.Tensor]:
        absent = self._absent.get(device)
        if absent is None:
            absent = self._absent[device] = (
                torch.empty(0, dtype=torch.int32, device=device),
                torch.empty(0, plan.STATE_FIELDS, dtype=torch.int64, device=device),
            )
        return absent


class Rollback:
    """Save the rows that a verify step will overwrite, and put the rejected ones back.

    ``gather`` before the step's first write, then one ``restore`` or ``commit`` after acceptance;
    each is one launch over all planes and rows, and can be captured. A snapshot is consumed by the
    first restore or commit: a second one does nothing. Planes are moved as bits, whatever their
    dtype::

        ops = pack.rollback
        layout, table = ops.describe(caches)                  # once
        ops.gather.require(layout, 4, table, pages, within, old, pending)
        ...                                                   # the step writes, the sampler accepts
        ops.commit.require(layout, 4, table, pages, within, old, pending, accepted)

    """

    family: ClassVar[str] = "rollback"

    #: What the ops take as ``layout`` and ``planes``, and as ``states``; made once, at start.
    describe = staticmethod(describe)
    describe_states = staticmethod(describe_states)

    def __init__(self, pack: Pack) -> None:
        self.gather = SaveRows(pack)
        self.restore = RestoreRows(pack)
        self.commit = Commit(pack)

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """A launch over one row of a plane without pages, with a snapshot of its own: it changes
        nothing else.
        """
        index = getattr(torch, dict(record.spec)["index"])

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        old = empty(1, plan.LINE, dtype=torch.uint8)
        nowhere = plan.layout([plan.plane(old.data_ptr(), 16, 16, 0, 1, 16)])
        table = torch.tensor(nowhere.table(), device=device)
        common = (table, empty(1, dtype=index), empty(1, dtype=index), old, empty(1))
        integers = (nowhere.record_bytes, 1, 1, 0)
        if record.op == "gather":
            return (*common, *integers)
        if record.op == "restore":
            return (*common, empty(1), *integers)
        states = empty(0, plan.STATE_FIELDS, dtype=torch.int64)
        return (*common, empty(1), empty(0), empty(0), states, empty(0), empty(0), 1, *integers)


def _nothing() -> None:
    """The launch of a bind over no rows."""

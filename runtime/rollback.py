"""``pack.rollback``: save the rows that a verify step will overwrite, and put the rejected ones
back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from specplan.errors import Uncertified
from specplan.op import LoadedPack, Op
from specplan.plans import rollback as plan
from specplan.plans.manifest import PlanRecord
from specplan.plans.rollback import OPS, Layout


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
    names: ClassVar[Mapping[str, Any]] = {"Layout": Layout}

    @classmethod
    def idle_argument(cls, name: str, record: PlanRecord, device: torch.device) -> Any:
        """One row of a plane without pages: whatever its table says, nothing is moved."""
        if name not in ("planes", "record_bytes"):
            return None
        nowhere = plan.layout([plan.plane(plan.VECTOR, 16, 16, 0, 1, 16)])
        if name == "record_bytes":
            return nowhere.record_bytes
        return torch.tensor(nowhere.table(), device=device)


class SaveRows(_RollbackOp):
    """Save every plane's rows before the step's first write, and arm the snapshot (see
    :class:`Rollback`).
    """

    declared = OPS["gather"]

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
        raise NotImplementedError  # the function made from the declaration is what is called


class RestoreRows(_RollbackOp):
    """Put back the saved rows that a mask rejects, and consume the snapshot (see
    :class:`Rollback`).
    """

    declared = OPS["restore"]

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
        raise NotImplementedError  # the function made from the declaration is what is called


class Commit(_RollbackOp):
    """Put back the saved rows past each request's accepted count, and commit the staged states (see
    :class:`Rollback`).
    """

    declared = OPS["commit"]

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
        raise NotImplementedError  # the function made from the declaration is what is called


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

    _OPS: ClassVar[dict[str, type[_RollbackOp]]] = {
        each.declared.name: each for each in (SaveRows, RestoreRows, Commit)
    }

    def __init__(self, pack: LoadedPack) -> None:
        self.gather: SaveRows = SaveRows(pack).call
        self.restore: RestoreRows = RestoreRows(pack).call
        self.commit: Commit = Commit(pack).call

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """A launch over one row of a plane without pages, with a snapshot of its own: it changes
        nothing else.
        """
        return cls._OPS[record.op].idle_arguments(record, device)

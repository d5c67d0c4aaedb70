"""Rollback's kernels, one CTA a chunk of one plane's rows, and ``lower(plan)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from specplan.kernels import fakes, ranges
from specplan.kernels.rollback.rows import (
    AcceptedCounts,
    RejectedMask,
    restore_plane,
    save_rows,
    view_plane,
)
from specplan.kernels.rollback.snapshot import is_pending, take_share
from specplan.kernels.rollback.states import advance_cursor, commit_state
from specplan.plans.plan import Plan
from specplan.plans.rollback import OPS, SHARES

# ----- lowering -----------------------------------------------------------------------------------


def lower(plan: Plan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The host function of a plan and the fake arguments to compile it with; see the module
    docstring for the lists.
    """
    threads, unroll, op = plan.int("threads"), plan.int("unroll"), OPS[plan.op]

    if plan.op == "gather":

        @cute.jit
        def rollback_gather(
            planes: cute.Tensor,
            pages: cute.Tensor,
            within: cute.Tensor,
            old: cute.Tensor,
            pending: cute.Tensor,
            record_bytes: Int32,
            plane_count: Int32,
            splits: Int32,
            overlap: Int32,
            stream: Any,
        ) -> None:
            ranges.refuse_unless_declared(
                *(op, plan),
                planes=planes,
                pages=pages,
                old=old,
                record_bytes=record_bytes,
                plane_count=plane_count,
            )
            if splits > 0:
                chunk = (pages.shape[0] + splits - 1) // splits
                _gather(planes, pages, within, old, pending, chunk, threads, unroll).launch(
                    grid=(planes.shape[0], splits, 1),
                    block=(threads, 1, 1),
                    stream=stream,
                    use_pdl=overlap,
                )

        return rollback_gather, fakes.arguments(op, plan)

    if plan.op == "restore":

        @cute.jit
        def rollback_restore(
            planes: cute.Tensor,
            pages: cute.Tensor,
            within: cute.Tensor,
            old: cute.Tensor,
            pending: cute.Tensor,
            rejected: cute.Tensor,
            record_bytes: Int32,
            plane_count: Int32,
            splits: Int32,
            overlap: Int32,
            stream: Any,
        ) -> None:
            ranges.refuse_unless_declared(
                *(op, plan),
                planes=planes,
                pages=pages,
                old=old,
                record_bytes=record_bytes,
                plane_count=plane_count,
            )
            if splits > 0:
                chunk = (pages.shape[0] + splits - 1) // splits
                _restore(
                    planes,
                    pages,
                    within,
                    old,
                    pending,
                    rejected,
                    chunk,
                    threads,
                    unroll,
                ).launch(
                    grid=(planes.shape[0], splits, 1),
                    block=(threads, 1, 1),
                    stream=stream,
                    use_pdl=overlap,
                )

        return rollback_restore, fakes.arguments(op, plan)

    @cute.jit
    def rollback_commit(
        planes: cute.Tensor,
        pages: cute.Tensor,
        within: cute.Tensor,
        old: cute.Tensor,
        pending: cute.Tensor,
        accepted: cute.Tensor,
        row_requests: cute.Tensor,
        row_ordinals: cute.Tensor,
        states: cute.Tensor,
        slots: cute.Tensor,
        cursors: cute.Tensor,
        tokens: Int32,
        record_bytes: Int32,
        plane_count: Int32,
        splits: Int32,
        overlap: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless_declared(
            *(op, plan),
            planes=planes,
            pages=pages,
            old=old,
            accepted=accepted,
            row_requests=row_requests,
            states=states,
            slots=slots,
            cursors=cursors,
            tokens=tokens,
            record_bytes=record_bytes,
            plane_count=plane_count,
        )
        if splits > 0:
            chunk = (pages.shape[0] + splits - 1) // splits
            parts = states.shape[0] * slots.shape[0] + (slots.shape[0] + threads - 1) // threads
            reciprocal = Int64(0)
            if tokens > 0:
                reciprocal = ((Int64(1) << 32) + tokens - 1) // Int64(tokens)
            _commit(
                planes,
                pages,
                within,
                old,
                pending,
                accepted,
                row_requests,
                row_ordinals,
                states,
                slots,
                cursors,
                tokens,
                reciprocal,
                splits,
                chunk,
                threads,
                unroll,
            ).launch(
                grid=(
                    planes.shape[0],
                    splits + (parts + planes.shape[0] - 1) // planes.shape[0],
                    1,
                ),
                block=(threads, 1, 1),
                stream=stream,
                use_pdl=overlap,
            )

    return rollback_commit, fakes.arguments(op, plan)


# ----- kernels: one CTA moves a chunk of one plane's rows -----------------------------------------


@cute.kernel
def _gather(
    planes: cute.Tensor,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    pending: cute.Tensor,
    chunk: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    block, split, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    plane = view_plane(planes, block, thread)
    first = split * chunk
    last = cutlass.min(first + chunk, pages.shape[0])

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if block == 0 and split == 0 and thread == 0:
        pending[0] = Int32(SHARES)
    if plane.vector == 16:
        save_rows(plane, pages, within, old, first, last, 16, threads, unroll)
    elif plane.vector == 8:
        save_rows(plane, pages, within, old, first, last, 8, threads, unroll)
    else:
        save_rows(plane, pages, within, old, first, last, 4, threads, unroll)


@cute.kernel
def _restore(
    planes: cute.Tensor,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    pending: cute.Tensor,
    rejected: cute.Tensor,
    chunk: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    block, split, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    plane = view_plane(planes, block, thread)
    first = split * chunk
    last = cutlass.min(first + chunk, pages.shape[0])
    verdicts = RejectedMask(rejected)

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    live = is_pending(pending)
    restore_plane(plane, pages, within, old, verdicts, live, first, last, threads, unroll)
    take_share(pending, live)


@cute.kernel
def _commit(
    planes: cute.Tensor,
    pages: cute.Tensor,
    within: cute.Tensor,
    old: cute.Tensor,
    pending: cute.Tensor,
    accepted: cute.Tensor,
    row_requests: cute.Tensor,
    row_ordinals: cute.Tensor,
    states: cute.Tensor,
    slots: cute.Tensor,
    cursors: cute.Tensor,
    tokens: Int32,
    reciprocal: Int64,
    splits: Int32,
    chunk: Int32,
    threads: cutlass.Constexpr,
    unroll: cutlass.Constexpr,
) -> None:
    block, split, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    plane = view_plane(planes, block, thread)
    first = split * chunk
    last = cutlass.min(first + chunk, pages.shape[0])
    verdicts = AcceptedCounts(accepted, row_requests, row_ordinals, tokens, reciprocal)

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    live = is_pending(pending)
    if split < splits:
        restore_plane(plane, pages, within, old, verdicts, live, first, last, threads, unroll)
    else:
        part = (split - splits) * planes.shape[0] + block
        copies = states.shape[0] * slots.shape[0]
        if part < copies:
            which = part // slots.shape[0]
            request = part - which * slots.shape[0]
            commit_state(states, which, request, accepted, slots, live, thread, threads)
        else:
            request = (part - copies) * threads + thread
            if request < slots.shape[0]:
                advance_cursor(request, accepted, slots, cursors, live)
    take_share(pending, live)

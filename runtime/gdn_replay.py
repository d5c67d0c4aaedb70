"""``pack.gdn_replay``: Gated DeltaNet verify over a checkpoint plus records, committing in the
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from specplan.errors import InParts, Uncertified
from specplan.op import LoadedPack, Op
from specplan.plans import gdn_replay as plan
from specplan.plans.gdn_replay import HEAD, OPS, CommitterError, Cursors, Pool
from specplan.plans.manifest import PlanRecord
from specplan.plans.signature import Size

#: Every so many requests above 64 are cells of each problem; ops whose compiled function does not
#: depend on the size run as part of the next.
_STEP = 8


class _GdnOp(Op):
    """The key of the cursors names geometry, dtype and device. That the tensors have the shapes
    which that means, fit each other, and are on that device, is checked by the compiled module.
    """

    names: ClassVar[Mapping[str, Any]] = {
        "Cursors": Cursors,
        "Pool": Pool,
        "SCALE": HEAD**-0.5,
        "MATERIALIZE": plan.MATERIALIZE,
    }

    def size_for(self, size: Size) -> Sequence[Size]:
        """Beside their own cell, requests run as part of the next multiple of eight."""
        if size.requests % _STEP == 0:
            return (size,)
        return (size, size._replace(requests=size.requests + _STEP - size.requests % _STEP))


class VerifyStep(_GdnOp):
    """Verify T tokens of N requests, fold where a history window is full, and append the records
    (see :class:`GdnReplay`).
    """

    declared = OPS["verify"]

    def __call__(
        self,
        pool: Pool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        slot: torch.Tensor,
        out: torch.Tensor,
        scale: float | None = None,
        splits: int | None = None,
    ) -> bool | InParts | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        pool
            One layer's checkpoints and records; see :class:`GdnReplay`.
        q, k, v
            bf16 [N, T, HK, 128], [N, T, HK, 128], [N, T, HV, 128], raw: the kernel normalises. They
            may be column slices of one packed row; 16-byte aligned, strides of N and T multiples of
            8 elements.
        a, b
            bf16 [N, T, HV], raw gates, each with its own strides of N and T.
        A_log, dt_bias
            fp32 [HV].
        slot
            int32 [N], any stride: the pool slot of each row, -1 for padding. Live slots are
            distinct and below the pool's slots; nobody checks that.
        out
            bf16 [N, T, HV, 128], strides as for q; zeros for padding rows.
        scale
            Of the queries; 128 ** -0.5 unless given.
        splits
            CTAs that share a head's value rows, a cell of its own; the planning rule's choice
            unless given. The result does not depend on it.

        Returns
        -------
        True; an :class:`~specplan.InParts`, truthy, if no cell holds all requests and they ran as
        several launches, of a cell each; or a falsy :class:`~specplan.Uncertified`: then nothing
        was launched. No rows: True.

        Raises
        ------
        CommitterError
            Somebody else commits the pool (:meth:`Cursors.claim`).
        LaunchError
            CUDA refused the launch.
        ColdCaptureError
            First call on this device, inside a graph capture.

        A row commits when hist_len + T > 16. A launch in which no row commits may be repeated: it
        writes the same records again. One in which a row commits must not be, before ``advance``
        has moved the cursors: it would fold the same history a second time. ``pool.commits(slot,
        T)`` tells which rows would; ``bind`` never commits; and a graph needs no warm-up launch,
        because ``pack.prepare()`` has loaded the code.

        Example
        -------
        ::

            ops = pack.gdn_replay
            cursors = ops.Cursors(hist_len, bank, key_heads=16, value_heads=32)
            pools = [ops.Pool(cursors, state, u, k, G) for state, u, k, G in layers]
            for pool, (q, k, v, a, b, A_log, dt_bias, out) in zip(pools, step):
                ops.verify.require(pool, q, k, v, a, b, A_log, dt_bias, slot, out)
            ops.advance.require(cursors, slot, n_acc, 4)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    def size_for(self, size: Size) -> Sequence[Size]:
        """A verify runs its own cell, or in parts that do."""
        return (size,)

    def may_launch(self, values: Mapping[str, Any]) -> None:
        """The kernel commits, so nobody else may."""
        values["pool"].cursors.check(plan.VERIFY)

    def launched(self, values: Mapping[str, Any]) -> None:
        """From here on the verify kernel commits the pool's cursors."""
        values["pool"].cursors.claim(plan.VERIFY)

    @classmethod
    def idle_argument(cls, name: str, record: PlanRecord, device: torch.device) -> Any:
        """One head for each CTA."""
        spec = dict(record.spec)
        return HEAD // (int(spec["rows"]) * int(spec["warps"])) if name == "ctas" else None


class Advance(_GdnOp):
    """Move the cursors by the accepted tokens, once a step (see :class:`GdnReplay`)."""

    declared = OPS["advance"]

    def __call__(
        self, cursors: Cursors, slot: torch.Tensor, n_acc: torch.Tensor, tokens: int
    ) -> bool | InParts | Uncertified:
        """Launch on torch's current stream; after the step's last layer, before the next step's
        first.

        Parameters
        ----------
        cursors
            Shared by the layers, so one launch serves all of them.
        slot
            int32 [N], any stride: the slots of this step's rows; -1 for padding.
        n_acc
            int32 [N], any stride: accepted tokens, the guaranteed first one included; 0 for an
            aborted row, at most ``tokens``. Nobody checks that.
        tokens
            The T of the step's verify launches: it decides, as there, which rows committed.

        Returns
        -------
        As for ``verify``.

        Example
        -------
        ::

            ops.advance.require(cursors, slot, n_acc, 4)
        """
        raise NotImplementedError  # the function made from the declaration is what is called


class Reset(_GdnOp):
    """Empty the history of slots (see :class:`GdnReplay`)."""

    declared = OPS["reset"]

    def __call__(self, cursors: Cursors, slot: torch.Tensor) -> bool | InParts | Uncertified:
        """Launch on torch's current stream: hist_len and bank become 0 at ``slot`` (int32 [N], any
        stride; negative slots do nothing).

        On allocation of a slot, after its prefill, on resume: the checkpoint is the caller's to
        write, and records need no clearing. The answer is as for ``verify``::

            ops.reset.require(cursors, new_slots)
        """
        raise NotImplementedError  # the function made from the declaration is what is called


class Materialize(_GdnOp):
    """Write the state after a prefix of the history into a slot (see :class:`GdnReplay`)."""

    declared = OPS["materialize"]

    def __call__(
        self, pool: Pool, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor
    ) -> bool | InParts | Uncertified:
        """Launch on torch's current stream: ``state[dst[n]]`` becomes the state of ``src[n]`` after
        the first ``count[n]`` records of its history.

        Parameters
        ----------
        pool
            One layer's checkpoints and records. Records and cursors stay, and so does the
            checkpoint of a src that is no dst.
        src, dst, count
            int32 [N], any stride. A negative src or dst does nothing. 0 <= count <= hist_len[src];
            no dst is another row's src or dst. Nobody checks that.

        Returns
        -------
        As for ``verify``.

        Raises
        ------
        CommitterError
            ``dst`` is ``src``, and somebody else commits the pool. Folding in place commits: the
            history is in the checkpoint and still in the records. A server that lets verify commit
            materializes into another slot, and resets that one.

        Example
        -------
        ::

            ops.materialize.require(pool, slot, cache_slot, hist_len_of_the_prefix)
        """
        raise NotImplementedError  # the function made from the declaration is what is called

    def may_launch(self, values: Mapping[str, Any]) -> None:
        """Folding in place commits, so nobody else may."""
        if values["dst"].data_ptr() == values["src"].data_ptr():
            values["pool"].cursors.check(plan.MATERIALIZE)

    def launched(self, values: Mapping[str, Any]) -> None:
        """From here on folding in place is what commits, if that is what was done."""
        if values["dst"].data_ptr() == values["src"].data_ptr():
            values["pool"].cursors.claim(plan.MATERIALIZE)


class GdnReplay:
    """Gated DeltaNet verify over a checkpoint plus records, committing in the kernel.

    A sequence's state is a *checkpoint* plus the *records* of the tokens accepted since. Rejecting
    a draft is not advancing its cursor; only when a history window of 16 tokens is full does verify
    fold the accepted history into the checkpoint::

        ops = pack.gdn_replay
        cursors = ops.Cursors(hist_len, bank, key_heads=16, value_heads=32, dtype="bf16")
        pool = ops.Pool(cursors, state, rec_u, rec_k, rec_G)             # one a layer, once
        ops.reset.require(cursors, slot)                                 # after the prefill
        ...
        ops.verify.require(pool, q, k, v, a, b, A_log, dt_bias, slot, out)  # every layer
        ops.advance.require(cursors, slot, n_acc, 4)                     # once a step

    Exactly one party commits. The first verify claims the cursors for the kernel; a cache manager
    that folds histories itself says ``cursors.claim("cache manager")`` at start, and whichever
    comes second gets CommitterError, when it is bound and not in the middle of a run.
    """

    family: ClassVar[str] = "gdn_replay"

    #: The cursors of a model's slots and a layer's pool, which the ops take; made once, at start.
    Cursors = Cursors
    Pool = Pool
    CommitterError = CommitterError

    _OPS: ClassVar[dict[str, type[_GdnOp]]] = {
        each.declared.name: each for each in (VerifyStep, Advance, Materialize, Reset)
    }

    def __init__(self, pack: LoadedPack) -> None:
        self.verify: VerifyStep = VerifyStep(pack).call
        self.advance: Advance = Advance(pack).call
        self.materialize: Materialize = Materialize(pack).call
        self.reset: Reset = Reset(pack).call

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """A launch over one padding row, with buffers of its own: it changes nothing else."""
        return cls._OPS[record.op].idle_arguments(record, device)

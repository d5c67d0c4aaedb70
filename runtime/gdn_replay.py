"""``pack.gdn_replay``: Gated DeltaNet verify over a checkpoint plus records, committing in the
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from specplan import library
from specplan.forked import watched
from specplan.op import ARGUMENT_ERRORS, SHAPE_ERRORS, Op, no_launch
from specplan.plans import gdn_replay as plan
from specplan.plans.gdn_replay import HEAD, WINDOW, CommitterError, Cursors, Pool
from specplan.plans.manifest import PlanRecord
from specplan.uncertified import Uncertified

if TYPE_CHECKING:
    from specplan.pack import Pack as LoadedPack

_STATE = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SCALE = HEAD**-0.5
#: Every so many requests above 64 are cells of each problem; ops whose rows are independent run as
#: part of the next.
_STEP = 8


class _GdnOp(Op):
    """A hot path reads sizes off the arguments, no shape. They and the key of the cursors, which
    names geometry, dtype and device, come to a compiled function and its launch integers. That the
    tensors have the shapes which those sizes mean, fit each other, and are on that device, is
    checked by the compiled module.
    """

    family = "gdn_replay"

    def _first(
        self,
        key: tuple[Any, ...] | None,
        cursors: Cursors,
        requests: int,
        tokens: int,
        splits: int | None,
        padded: bool,
    ) -> Any:
        """What a first call of its kind comes to: (compiled function, launch integers ...), or an
        Uncertified. A call of no rows has None. Without a key it is not remembered.
        """
        if requests == 0:
            return None
        sizes = [requests]
        if padded and requests % _STEP:
            sizes.append(requests + _STEP - requests % _STEP)
        device, geometry, dtype = cursors.device, cursors.geometry, cursors.dtype
        answers = []
        for size in sizes:
            picked = self._chosen(device, geometry, dtype, size, tokens, splits)
            answers.append(picked)
            if not isinstance(picked, Uncertified):
                break
        if isinstance(picked, Uncertified):
            return answers[0]
        admitted = (picked.function, *picked.launch.values())
        return admitted if key is None else self._remember(key, admitted)

    def _launch(self, function: Any, arguments: tuple[Any, ...]) -> bool | Uncertified:
        try:
            function(*arguments)
        except ARGUMENT_ERRORS as error:
            return self._refused(error, _device(arguments[0]))
        except Exception as error:
            raise self._failed(error) from error
        return True

    def _fixed(
        self,
        function: Any,
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        skipped: Sequence[int],
        written: Sequence[int] = (),
    ) -> Any:
        """A launch over these buffers, after the compiled module has agreed to them in a launch
        whose row list (at ``skipped``) names no row, and whose outputs (at ``written``) are others.
        """
        try:
            idle = list(tensors)
            for at in skipped:
                idle[at] = _alike(tensors[at]).fill_(-1)
            for at in written:
                idle[at] = _alike(tensors[at])
        except (*SHAPE_ERRORS, RuntimeError) as error:
            return self._refused(error, _device(tensors[0]))
        agreed = self._launch(function, (*idle, *numbers))
        if not agreed:
            return agreed
        convert = library.tvm_ffi().from_dlpack
        return watched(partial(function, tensors[0], *map(convert, tensors[1:]), *numbers))


class VerifyStep(_GdnOp):
    """Verify T tokens of N requests, fold where a history window is full, and append the records
    (see :class:`GdnReplay`).
    """

    op = "verify"

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
    ) -> bool | Uncertified:
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
        True, or a falsy :class:`~specplan.Uncertified`; then nothing was launched. No rows: True.

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
        try:
            key = (q.numel(), slot.numel(), pool.cursors.verify_key, splits)
            found = self._picked.get(key)
            if found is None:
                found = self._admit(pool, q, slot, splits)
                if not found:
                    return found is None or found
            state, rec_u, rec_k, rec_G, hist_len, bank = pool.tensors
        except SHAPE_ERRORS as error:
            return self._refused(error)
        function, ctas = found
        try:
            function(
                q,
                k,
                v,
                a,
                b,
                A_log,
                dt_bias,
                state,
                rec_u,
                rec_k,
                rec_G,
                hist_len,
                bank,
                slot,
                out,
                _SCALE if scale is None else scale,
                ctas,
            )
        except ARGUMENT_ERRORS as error:
            return self._refused(error, _device(q))
        except Exception as error:
            raise self._failed(error) from error
        return True

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments once; returns ``launch()`` for these buffers, or a falsy
        Uncertified.

        From here on the verify kernel commits the pool's cursors: if somebody else has claimed
        them, CommitterError. Nothing of the caller's is written: the compiled module's checks are
        asked with a launch in which every row is padding, into an output of its own. ``launch()``
        commits as the call does, once a step (see there).
        """
        pool, *given, scale, splits = self._values(arguments, named)
        q, k, v, a, b, A_log, dt_bias, slot, out = given
        try:
            found = self._admit(pool, q, slot, splits)
        except SHAPE_ERRORS as error:
            return self._refused(error)
        if not found:
            return no_launch if found is None else found
        function, ctas = found
        # The launch of no work has the same numbers, so the module sees these now.
        numbers = (_SCALE if scale is None else scale, ctas)
        tensors = (q, k, v, a, b, A_log, dt_bias, *pool.tensors, slot, out)
        return self._fixed(function, tensors, numbers, (13,), (14,))

    def _admit(self, pool: Pool, q: torch.Tensor, slot: torch.Tensor, splits: int | None) -> Any:
        """(compiled function, CTAs) of a verify that commits, an Uncertified, or None where there
        are no rows.
        """
        cursors = pool.cursors
        requests, tokens, _, _ = q.shape
        key = (q.numel(), slot.numel(), cursors.key, splits)
        found = self._picked.get(key)
        if found is None:
            # Of all shapes of these sizes the compiled module takes one; no other may leave its
            # plan.
            fits = q.shape == (slot.numel(), tokens, cursors.geometry[0], HEAD)
            found = self._first(key if fits else None, cursors, requests, tokens, splits, False)
        if found:
            cursors.claim(plan.VERIFY)
        return found

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        spec = dict(record.spec)
        bf16, zeros = torch.bfloat16, partial(torch.zeros, device=device)
        cursors, pools = _idle_pool(_STATE[str(spec["state"])], device)
        return (
            zeros(1, 1, 1, HEAD, dtype=bf16),
            zeros(1, 1, 1, HEAD, dtype=bf16),
            zeros(1, 1, 2, HEAD, dtype=bf16),
            zeros(1, 1, 2, dtype=bf16),
            zeros(1, 1, 2, dtype=bf16),
            zeros(2),
            zeros(2),
            *pools,
            *cursors,
            _no_row(device),
            zeros(1, 1, 2, HEAD, dtype=bf16),
            1.0,
            HEAD // (spec["rows"] * spec["warps"]),
        )


class Advance(_GdnOp):
    """Move the cursors by the accepted tokens, once a step (see :class:`GdnReplay`)."""

    op = "advance"

    def __call__(
        self, cursors: Cursors, slot: torch.Tensor, n_acc: torch.Tensor, tokens: int
    ) -> bool | Uncertified:
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
        True, or a falsy Uncertified; then nothing was launched. No rows: True.

        Example
        -------
        ::

            ops.advance.require(cursors, slot, n_acc, 4)
        """
        try:
            found = self._picked.get((slot.numel(), cursors.key, tokens))
            if found is None:
                found = self._admit(cursors, slot, tokens)
                if not found:
                    return found is None or found
            hist_len, bank = cursors.tensors
        except SHAPE_ERRORS as error:
            return self._refused(error)
        try:
            found[0](hist_len, bank, slot, n_acc, tokens)
        except ARGUMENT_ERRORS as error:
            return self._refused(error, _device(slot))
        except Exception as error:
            raise self._failed(error) from error
        return True

    def bind(self, cursors: Cursors, slot: torch.Tensor, n_acc: torch.Tensor, tokens: int) -> Any:
        """Check and convert the arguments once; returns ``launch()`` for these buffers, or a falsy
        Uncertified. No cursor moves here.
        """
        try:
            found = self._admit(cursors, slot, tokens)
        except SHAPE_ERRORS as error:
            return self._refused(error)
        if not found:
            return no_launch if found is None else found
        tensors = (*cursors.tensors, slot, n_acc)
        return self._fixed(found[0], tensors, (tokens,), (2,))

    def _admit(self, cursors: Cursors, slot: torch.Tensor, tokens: int) -> Any:
        """(compiled function,), an Uncertified, or None where there are no rows."""
        key = (slot.numel(), cursors.key, tokens)
        found = self._picked.get(key)
        return found or self._first(key, cursors, slot.numel(), tokens, None, True)

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        none = torch.zeros(1, dtype=torch.int32, device=device)
        return (none, none.clone(), _no_row(device), none.clone(), 1)


class Reset(_GdnOp):
    """Empty the history of slots (see :class:`GdnReplay`)."""

    op = "reset"

    def __call__(self, cursors: Cursors, slot: torch.Tensor) -> bool | Uncertified:
        """Launch on torch's current stream: hist_len and bank become 0 at ``slot`` (int32 [N], any
        stride; negative slots do nothing).

        On allocation of a slot, after its prefill, on resume: the checkpoint is the caller's to
        write, and records need no clearing. True, or a falsy Uncertified; no rows: True::

            ops.reset.require(cursors, new_slots)
        """
        try:
            found = self._admit(cursors, slot)
            if not found:
                return found is None or found
            hist_len, bank = cursors.tensors
        except SHAPE_ERRORS as error:
            return self._refused(error)
        return self._launch(found[0], (hist_len, bank, slot))

    def bind(self, cursors: Cursors, slot: torch.Tensor) -> Any:
        """Check and convert the arguments once; returns ``launch()`` for these buffers, or a falsy
        Uncertified. Nothing is reset here.
        """
        try:
            found = self._admit(cursors, slot)
        except SHAPE_ERRORS as error:
            return self._refused(error)
        if not found:
            return no_launch if found is None else found
        return self._fixed(found[0], (*cursors.tensors, slot), (), (2,))

    def _admit(self, cursors: Cursors, slot: torch.Tensor) -> Any:
        """(compiled function,), an Uncertified, or None where there are no rows."""
        key = (slot.numel(), cursors.key)
        found = self._picked.get(key)
        # The cells of one token are the ones that run reset and materialize at full size.
        return found or self._first(key, cursors, slot.numel(), 1, None, True)

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        none = torch.zeros(1, dtype=torch.int32, device=device)
        return (none, none.clone(), _no_row(device))


class Materialize(_GdnOp):
    """Write the state after a prefix of the history into a slot (see :class:`GdnReplay`)."""

    op = "materialize"

    def __call__(
        self, pool: Pool, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor
    ) -> bool | Uncertified:
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
        True, or a falsy Uncertified; then nothing was launched. No rows: True.

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
        try:
            found = self._admit(pool, src, dst)
            if not found:
                return found is None or found
            state, rec_u, rec_k, rec_G, _, bank = pool.tensors
        except SHAPE_ERRORS as error:
            return self._refused(error)
        return self._launch(found[0], (state, rec_u, rec_k, rec_G, bank, src, dst, count))

    def bind(self, pool: Pool, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor) -> Any:
        """Check and convert the arguments once; returns ``launch()`` for these buffers, or a falsy
        Uncertified. No checkpoint is written here; errors as for the call.
        """
        try:
            found = self._admit(pool, src, dst)
        except SHAPE_ERRORS as error:
            return self._refused(error)
        if not found:
            return no_launch if found is None else found
        tensors = (*pool.tensors[:4], pool.tensors[5], src, dst, count)
        return self._fixed(found[0], tensors, (), (5, 6))

    def _admit(self, pool: Pool, src: torch.Tensor, dst: torch.Tensor) -> Any:
        """(compiled function,), an Uncertified, or None where there are no rows."""
        cursors = pool.cursors
        key = (src.numel(), cursors.key)
        found = self._picked.get(key)
        if found is None:
            found = self._first(key, cursors, src.numel(), 1, None, True)
        if found and dst.data_ptr() == src.data_ptr():
            cursors.claim(plan.MATERIALIZE)
        return found

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        cursors, pools = _idle_pool(_STATE[str(dict(record.spec)["state"])], device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        return (*pools, cursors[1], _no_row(device), _no_row(device), count)


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
        each.op: each for each in (VerifyStep, Advance, Materialize, Reset)
    }

    def __init__(self, pack: LoadedPack) -> None:
        self.verify = VerifyStep(pack)
        self.advance = Advance(pack)
        self.materialize = Materialize(pack)
        self.reset = Reset(pack)

    @classmethod
    def idle_arguments(cls, record: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """A launch over one padding row, with buffers of its own: it changes nothing else."""
        return cls._OPS[record.op].idle_arguments(record, device)


def _idle_pool(
    state: torch.dtype, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The cursors and pools of one slot with two value heads of one key head."""
    zeros = partial(torch.zeros, device=device)
    cursors = (zeros(1, dtype=torch.int32), zeros(1, dtype=torch.int32))
    return cursors, (
        zeros(1, 2, HEAD, HEAD, dtype=state),
        zeros(1, 2, 2, WINDOW, HEAD, dtype=torch.bfloat16),
        zeros(1, 1, 2, WINDOW, HEAD, dtype=torch.bfloat16),
        zeros(1, 2, 2, WINDOW),
    )


def _no_row(device: torch.device) -> torch.Tensor:
    return torch.full((1,), -1, dtype=torch.int32, device=device)


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own with the dtype, shape, strides and 16-byte alignment of a tensor."""
    item = tensor.element_size()
    shift = tensor.data_ptr() % 16 // item
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(shift + reach + 1, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, tensor.stride(), shift)


def _device(tensor: Any) -> int:
    return tensor.get_device() if isinstance(tensor, torch.Tensor) else -1

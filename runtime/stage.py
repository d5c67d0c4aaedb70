"""``pack.stage``: a step's host values, in one record, to the buffers that the step reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from specplan.errors import Reason, Uncertified
from specplan.op import Op
from specplan.plans import stage as plan
from specplan.plans.stage import OP, Segments

#: dtypes of destinations and values, and the words of an element.
WORDS: Mapping[torch.dtype, int] = {torch.int32: 1, torch.int64: 2}


def describe(segments: Sequence[tuple[torch.Tensor, int]]) -> Segments:
    """Describe destinations to :class:`Stage`; a server does this once for each set of buffers.

    Parameters
    ----------
    segments
        Up to 16 pairs of a destination, int32 or int64 [n], dense and on one CUDA device, and the
        word of the record where its values begin. An int64 element is two words, the lower one
        first. An empty destination is no segment.

    Raises
    ------
    ValueError
        For destinations that a launch cannot take, or that overlap, with what was found.

    Example
    -------
    ::

        segments = specplan.stage.describe([(kv_lens, 0), (slots, batch), (ids, 2 * batch)])
        pack.stage.require(record, segments)
    """
    return plan.describe(segments, torch.int32)


def mapped(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned host memory as a tensor that the device reads in place, over the bus.

    It takes the host's address for the device's, which holds for what ``pin_memory`` allocates. It
    keeps the host tensor alive.

    Raises
    ------
    ValueError
        The tensor is not pinned.
    """
    if not host.is_pinned():
        raise ValueError("only pinned host memory is mapped; allocate it with pin_memory=True")
    index = torch.cuda.current_device() if device.index is None else device.index
    view: torch.Tensor = torch.utils.dlpack.from_dlpack(plan.on_device(host, index))
    return view


class Stage(Op):
    """Copy segments of a record to their destinations: ``destination[i] = record[offset + i]``.

    The record is on the device, or :func:`mapped` host memory: then the host writes it, and one
    launch, or one replay of a graph that holds it, brings all values over. It may be rewritten only
    once the launch has read it; :class:`StepRecord` keeps that rule.
    """

    declared = OP
    names: ClassVar[Mapping[str, Any]] = {"Segments": Segments}

    def __call__(self, record: torch.Tensor, segments: Segments) -> bool | Uncertified:
        """Launch on torch's current stream.

        Parameters
        ----------
        record
            int32 [words] on the destinations' device, or :func:`mapped` to it.
        segments
            From :func:`describe`.

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

            host = torch.empty(4096, dtype=torch.int32, pin_memory=True)
            record = specplan.stage.mapped(host, torch.device("cuda", 0))
            segments = specplan.stage.describe([(kv_lens, 0), (slots, 256)])
            pack.stage.require(record, segments)
        """
        raise NotImplementedError  # the function made from the declaration is what is called


class StepRecord:
    """A pinned record that the host fills, and the launches that read it.

    ::

        record = specplan.stage.StepRecord(4096, torch.device("cuda", 0))
        record.append(kv_lens, lens_of_this_step)
        record.append(slots, slots_of_this_step)
        record.commit(pack.stage)

    The words that a launch reads stay as they are until it has read them: the first append, or
    rewrite, after it waits for an event behind it. A launch that a graph captured reads the record
    anew at every replay. So a captured step needs a record of its own; its segments stay, the host
    changes their values with :meth:`rewrite`, and says :meth:`replayed` after each replay.

    Parameters
    ----------
    words
        How many words all segments have together.
    host, device_view, event, capturing
        For memory that is allocated elsewhere, and for tests: the pinned record, the same on the
        device, what makes events, and what says whether a graph is being captured.
    """

    def __init__(
        self,
        words: int,
        device: torch.device,
        *,
        host: torch.Tensor | None = None,
        device_view: torch.Tensor | None = None,
        event: Callable[[], Any] | None = None,
        capturing: Callable[[], bool] | None = None,
    ) -> None:
        self.host = torch.empty(words, dtype=torch.int32, pin_memory=True) if host is None else host
        if self.host.dtype is not torch.int32 or self.host.shape != (words,):
            raise ValueError(f"the host record is not {words} words of int32")
        self.record = mapped(self.host, device) if device_view is None else device_view
        self._new_event = torch.cuda.Event if event is None else event
        self._capturing = capturing or torch.cuda.is_current_stream_capturing
        self._event: Any = None
        self._captured = False
        self._pending: list[tuple[torch.Tensor, int]] = []
        self._used = 0

    def append(self, destination: torch.Tensor, values: torch.Tensor) -> bool | Uncertified:
        """Add a segment: ``values`` go to the first elements of ``destination`` at the next commit.

        ``values`` are a CPU tensor [n] of the destination's dtype; n = 0 adds nothing. Declined,
        with nothing staged, are other destinations than dense int32 or int64 vectors, values that
        are not on the host, too many of them, a destination that overlaps an earlier one, a full
        record, and a record that a graph has captured.
        """
        wrong = plan.refused(destination) or _unfit(values, destination)
        if not wrong and self._captured:
            wrong = "a graph reads this record; rewrite its segments, or take another record"
        if not wrong and values.numel() > destination.numel():
            wrong = f"{values.numel()} values for a destination of {destination.numel()}"
        if wrong:
            return _declined(Reason.ARGUMENT, wrong)
        if values.numel() == 0:
            return True
        words = values.numel() * WORDS[values.dtype]
        if self._used + words > self.host.numel():
            left = self.host.numel() - self._used
            return _declined(Reason.RANGE, f"{words} words, the record has {left} left")
        segments = [*self._pending, (destination[: values.numel()], self._used)]
        try:
            describe(segments)
        except ValueError as error:
            return _declined(Reason.ARGUMENT, str(error))
        self._wait()
        self.host[self._used : self._used + words] = values.contiguous().view(torch.int32)
        self._pending, self._used = segments, self._used + words
        return True

    def commit(self, op: Any) -> bool | Uncertified:
        """Launch ``op``, which is ``pack.stage``, over all that was appended since the last commit;
        True without a launch if that is nothing. What is declined stays appended.
        """
        if not self._pending:
            return True
        answer: bool | Uncertified = op(self.record, describe(self._pending))
        if not answer:
            return answer
        if self._capturing():
            # Each replay reads the record again.
            self._captured = True
            return True
        self._event = self._new_event()
        self._event.record()
        self._pending, self._used = [], 0
        return True

    def rewrite(self, number: int, values: torch.Tensor) -> bool | Uncertified:
        """Change the values of a captured segment, by its number in the order of appending; as many
        as it has.
        """
        if not self._captured:
            return _declined(Reason.ARGUMENT, "no graph has captured this record; append to it")
        if not 0 <= number < len(self._pending):
            wrong = f"segment {number} of a record with {len(self._pending)}"
            return _declined(Reason.RANGE, wrong)
        destination, offset = self._pending[number]
        wrong = _unfit(values, destination)
        if not wrong and values.numel() != destination.numel():
            wrong = f"{values.numel()} values for a segment of {destination.numel()}"
        if wrong:
            return _declined(Reason.ARGUMENT, wrong)
        self._wait()
        words = values.numel() * WORDS[values.dtype]
        self.host[offset : offset + words] = values.contiguous().view(torch.int32)
        return True

    def replayed(self) -> None:
        """To be called after each replay of the graph, on its stream: the record is free once the
        replay has read it.
        """
        self._event = self._new_event()
        self._event.record()

    def _wait(self) -> None:
        """Until the last launch has read the record."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


def _unfit(values: Any, destination: torch.Tensor) -> str:
    """Why values are none for a destination, or nothing."""
    if not isinstance(values, torch.Tensor) or values.device.type != "cpu":
        return "the values are no tensor on the host"
    if values.dim() != 1 or values.dtype is not destination.dtype:
        return (
            f"the values are {values.dtype} {tuple(values.shape)}, expected a vector of "
            f"{destination.dtype}"
        )
    return ""


def _declined(reason: Reason, detail: str) -> Uncertified:
    return Uncertified("stage", "", reason, detail)

"""Copies of host values to a buffer on the device, made only where the values changed.

A server uploads the same page tables, slots and masks in most steps. :class:`HostCopies` keeps on
the host what its buffer holds, and copies nothing where that is what is wanted. Plain torch: no
kernel, no pack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from specplan.checking import wanted
from specplan.errors import ColdCaptureError, ValueCheckError

#: Every object that copies to a buffer, so that no two copy to one.
_WRITERS: weakref.WeakSet[HostCopies] = weakref.WeakSet()


class HostCopies:
    """The only writer of a buffer, which copies host values to it where they changed.

    ::

        copies = HostCopies(block_table.view(-1))       # once, for the buffer's life
        copies.copy_if_changed(table_of_this_step)      # each step

    What the buffer holds is known only because nobody else writes it: not a kernel, not torch, not
    a graph. A second object over the same memory is refused. Other writers are seen only where
    ``check`` looks for them: then a copy that is skipped compares the buffer with what it must
    hold, and waits for the device. Not safe between threads.

    Parameters
    ----------
    destination
        A dense vector of any dtype, on any device; other shapes by ``view(-1)``. It is kept alive.
    check
        Whether skipped copies are checked; without it, whether ``SPECPLAN_CHECK`` is set, and not
        to 0.
    stage, capturing
        For tests: what gives a tensor of its own, pinned, with a CPU tensor's values, and what says
        whether a graph is being captured.

    Raises
    ------
    ValueError
        The destination is no dense vector, or another object copies to some of its memory.
    """

    def __init__(
        self,
        destination: torch.Tensor,
        *,
        check: bool | None = None,
        stage: Callable[[torch.Tensor], torch.Tensor] | None = None,
        capturing: Callable[[], bool] | None = None,
    ) -> None:
        if destination.dim() != 1 or not destination.is_contiguous():
            raise ValueError(
                f"the destination is {tuple(destination.shape)} with strides "
                f"{destination.stride()}, expected a dense vector"
            )
        start = destination.data_ptr()
        self._span = (start, start + destination.numel() * destination.element_size())
        self._destination = destination
        for other in _WRITERS:
            if other._overlaps(self):
                raise ValueError(
                    f"bytes {self._span[0]:#x}..{self._span[1]:#x} overlap the buffer of another "
                    "HostCopies; a buffer has one writer"
                )
        on_device = destination.device.type == "cuda"
        self.check = wanted() if check is None else check
        self._stage = stage or (_pinned if on_device else torch.clone)
        self._capturing = capturing or (_is_capturing if on_device else lambda: False)
        self._held = torch.empty(destination.shape, dtype=destination.dtype)
        #: Elements of the buffer that are known; those behind them were never copied.
        self._known = 0
        _WRITERS.add(self)

    def copy_if_changed(self, values: torch.Tensor) -> bool:
        """Make the buffer's first elements ``values``, without waiting; those behind them stay.
        True if they were copied, False if the buffer held them.

        Values are compared bit for bit, so a NaN equals itself and -0 is not +0. They may be
        rewritten as soon as this returns: what is copied is a pinned copy of them, on torch's
        current stream.

        Raises
        ------
        ValueError
            The values are no CPU vector of the destination's dtype, or are more than it has.
        ColdCaptureError
            They changed while a graph is being captured: its replays would copy them again from
            memory that is no longer theirs. What has not changed may be asked for.
        ValueCheckError
            With ``check``: the buffer does not hold what was copied to it last, so there is another
            writer.
        """
        self._refuse_unfit(values)
        count = values.numel()
        if count <= self._known and _same(self._held[:count], values):
            if self.check:
                self._compare(count)
            return False
        if self._capturing():
            raise ColdCaptureError(
                "host values that changed are copied while a graph is being captured, and its "
                "replays would not follow them; copy before the capture, or use specplan.stage"
            )
        # Whatever stops the copy, what the buffer then holds is not known.
        known, self._known = self._known, 0
        self._destination[:count].copy_(self._stage(values), non_blocking=True)
        self._held[:count] = values
        self._known = max(known, count)
        return True

    def forget(self) -> None:
        """Copy next time, whatever the values: after somebody else did write the buffer."""
        self._known = 0

    def _overlaps(self, other: HostCopies) -> bool:
        same = self._destination.device == other._destination.device
        return same and self._span[0] < other._span[1] and other._span[0] < self._span[1]

    def _refuse_unfit(self, values: torch.Tensor) -> None:
        dtype = self._destination.dtype
        if values.device.type != "cpu" or values.dim() != 1 or values.dtype is not dtype:
            raise ValueError(
                f"the values are {values.dtype} {tuple(values.shape)} on {values.device}, expected "
                f"a vector of {dtype} on the CPU"
            )
        if values.numel() > self._destination.numel():
            raise ValueError(
                f"{values.numel()} values for a buffer of {self._destination.numel()} elements"
            )

    def _compare(self, count: int) -> None:
        """Look for another writer of what a skipped copy takes to be there."""
        if self._capturing():
            return
        found, held = self._destination[:count].cpu(), self._held[:count]
        if _same(found, held):
            return
        size = held.element_size()
        differ = _bytes(found).view(-1, size) != _bytes(held).view(-1, size)
        place = int(differ.any(1).nonzero()[0])
        raise ValueCheckError(
            f"copy_if_changed: destination in row {place} is {found[place].item()}, where "
            f"{held[place].item()} was copied last; something else writes this buffer, which may "
            "have one writer",
            argument="destination",
            row=(place,),
            value=float(found[place]),
        )


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two CPU vectors of one dtype are equal bit for bit."""
    return torch.equal(_bytes(one), _bytes(other))


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """A pinned copy; torch does not hand its memory out again before a copy from it has ended."""
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copied.copy_(values)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()

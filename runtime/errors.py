"""Everything that specplan raises on purpose, and the falsy answer to a call that nothing certified
covers. Each has a reason code and says what was found and what mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, NoReturn

from specplan.plans.cell import Cell


class SpecplanError(RuntimeError):
    """Base of all errors of this package; ``reason`` is a stable code for programs."""

    reason = "error"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class PackNotFoundError(SpecplanError):
    """No pack for the wanted arch in any of the places searched, or none that may be read."""

    reason = "pack_not_found"


class PackCorruptError(SpecplanError):
    """A file of the pack is not what its manifest describes; nothing of it was loaded."""

    reason = "pack_corrupt"


class PackVersionError(SpecplanError):
    """The pack and this installation do not fit together: schema, host, CPU, a symbol that tvm-ffi
    or CUDA's runtime lacks.
    """

    reason = "pack_version"


class RuntimeLibraryError(SpecplanError):
    """A library is not there or cannot be opened: torch, tvm-ffi, CUDA's runtime, or one of the
    pack's own.
    """

    reason = "runtime_library"


class NoDeviceError(SpecplanError):
    """There is no CUDA device, or none that the call could mean."""

    reason = "no_device"


class ColdCaptureError(SpecplanError):
    """A plan was called for the first time inside a CUDA graph capture."""

    reason = "cold_capture"


class ForkedError(SpecplanError):
    """A pack that was used before a fork was used in the child, where CUDA does not work."""

    reason = "forked"


class LaunchError(SpecplanError):
    """CUDA refused a launch, or an earlier launch failed."""

    reason = "launch"


class UncertifiedCell(SpecplanError):
    """``require`` was called for a cell that is not certified; ``uncertified`` has the details."""

    reason = "uncertified"

    def __init__(self, uncertified: Uncertified) -> None:
        super().__init__(str(uncertified), reason=uncertified.reason.value)
        self.uncertified = uncertified


class UncoveredError(SpecplanError):
    """``pack.require`` found calls that a deployment can make and the pack declines; ``holes`` has
    one answer for each kind of them.
    """

    reason = "uncovered"

    def __init__(self, message: str, holes: Sequence[Uncertified]) -> None:
        super().__init__(message)
        self.holes = tuple(holes)


class ValueCheckError(SpecplanError):
    """A value on the device that a call must not have (``load(check=True)``, ``SPECPLAN_CHECK=1``);
    nothing was launched. ``argument``, ``row`` (an index) and ``value`` say which.
    """

    reason = "value"

    def __init__(self, message: str, *, argument: str, row: tuple[int, ...], value: float) -> None:
        super().__init__(message)
        self.argument, self.row, self.value = argument, row, value


class PackWarning(UserWarning):
    """A pack that loads, and that something is wrong with: cells that it marks certified and that
    no certificate backs, or files that others may write.
    """


class InParts:
    """A call that ran as several launches over parts of its requests, because no cell holds all of
    them. Truthy: everything was launched.

    Attributes
    ----------
    cells
        The cell of each part, in the order of the requests.
    """

    __slots__ = ("cells", "requests")

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = tuple(cells)
        #: The requests of each part.
        self.requests = tuple(cell.requests for cell in self.cells)

    def __bool__(self) -> Literal[True]:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InParts) and self.cells == other.cells

    def __hash__(self) -> int:
        return hash(self.cells)

    def __str__(self) -> str:
        first = self.cells[0]
        return (
            f"{first.family} {first.problem} on {first.arch}: {sum(self.requests)} requests in "
            f"parts of {' + '.join(map(str, self.requests))}"
        )

    def __repr__(self) -> str:
        return f"InParts({self.requests})"


class Reason(str, Enum):
    """Why a call was declined."""

    #: The catalog has no such cell: requests, tokens, splits or dtype are outside what is claimed.
    NOT_IN_CATALOG = "not_in_catalog"
    #: The store widths, head counts ... are those of no problem in the catalog.
    UNKNOWN_PROBLEM = "unknown_problem"
    #: Built, but no certificate matches on this arch. ``specplan.load(candidates=True)`` runs it.
    CANDIDATE = "candidate"
    #: A tensor's shape, stride, dtype, alignment or device is not what the plan takes.
    ARGUMENT = "argument"
    #: A range that the call names does not lie inside its tensor.
    RANGE = "range"
    #: The tensors are on a device that no loaded pack is for.
    DEVICE = "device"


class Uncertified:
    """A declined call: nothing was launched and nothing was written.

    Falsy, so that ``if not pack.scatter(...)`` reads as what it is.

    Attributes
    ----------
    family, arch
        Which contract, and the arch of the device that was asked for (empty where the device has no
        pack).
    cell
        The cell that the call came to, as far as it is known.
    reason
        A :class:`Reason`.
    detail
        What was found and what was expected, for people.
    """

    __slots__ = ("_nearest", "arch", "cell", "detail", "family", "reason")

    def __init__(
        self,
        family: str,
        arch: str,
        reason: Reason,
        detail: str,
        cell: Cell | None = None,
        nearest: Callable[[], Sequence[Cell]] | None = None,
    ) -> None:
        self.family = family
        self.arch = arch
        self.reason = reason
        self.detail = detail
        self.cell = cell
        self._nearest = nearest

    def __bool__(self) -> Literal[False]:
        return False

    @property
    def nearest(self) -> Sequence[Cell]:
        """The closest certified cells of the loaded pack; looked up when asked for, not on the
        declined call.
        """
        return self._nearest() if self._nearest is not None else ()

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        """A declined ``bind`` is not a launch; calling it says why."""
        raise UncertifiedCell(self)

    def __str__(self) -> str:
        text = f"{self.family} on {self.arch or 'an unknown arch'} declined: {self.detail}"
        close = self.nearest
        if close:
            text += f"; nearest certified: {'; '.join(map(str, close))}"
        return text

    def __repr__(self) -> str:
        return f"Uncertified({self.family!r}, reason={self.reason.value!r}, detail={self.detail!r})"

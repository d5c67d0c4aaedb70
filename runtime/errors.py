"""Everything that specplan raises on purpose. Each error has a reason code and says what was found
and what mends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specplan.uncertified import Uncertified


class SpecplanError(RuntimeError):
    """Base of all errors of this package; ``reason`` is a stable code for programs."""

    reason = "error"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class PackNotFoundError(SpecplanError):
    """No pack for the wanted arch in any of the places searched."""

    reason = "pack_not_found"


class PackCorruptError(SpecplanError):
    """A file of the pack is not what its manifest describes; nothing of it was loaded."""

    reason = "pack_corrupt"


class PackVersionError(SpecplanError):
    """The pack and this installation do not fit together: schema, tvm-ffi, runtime library, host or
    CPU.
    """

    reason = "pack_version"


class RuntimeLibraryError(SpecplanError):
    """``libcute_dsl_runtime.so`` or tvm-ffi is not there or cannot be loaded."""

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

"""specplan: certified, ahead-of-time compiled launch plans for the speculative-decoding step of LLM
servers.

A server does three things::

    import specplan

    pack = specplan.load()        # finds the pack of this GPU's arch and checks its bytes
    pack.prepare()                # loads the GPU code now: nothing is lazy inside graph capture
    if not pack.scatter(...):     # True: launched; else a falsy Uncertified with the reason
        ...                       # run specplan.reference.scatter(...) or your own path

Importing this package imports neither torch nor a compiler, touches no GPU and reads no file of
packs or catalogs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specplan.errors import (
    ColdCaptureError,
    ForkedError,
    InParts,
    LaunchError,
    NoDeviceError,
    PackCorruptError,
    PackNotFoundError,
    PackVersionError,
    PackWarning,
    Reason,
    RuntimeLibraryError,
    SpecplanError,
    Uncertified,
    UncertifiedCell,
    UncoveredError,
    ValueCheckError,
)
from specplan.plans.version import VERSION as __version__

if TYPE_CHECKING:
    from specplan import reference
    from specplan.loading import load
    from specplan.pack import Pack

__all__ = [
    "ColdCaptureError",
    "ForkedError",
    "InParts",
    "LaunchError",
    "NoDeviceError",
    "Pack",
    "PackCorruptError",
    "PackNotFoundError",
    "PackVersionError",
    "PackWarning",
    "Reason",
    "RuntimeLibraryError",
    "SpecplanError",
    "Uncertified",
    "UncertifiedCell",
    "UncoveredError",
    "ValueCheckError",
    "__version__",
    "load",
    "reference",
]

_LAZY = {"Pack": "specplan.pack", "load": "specplan.loading"}


def __getattr__(name: str) -> Any:
    # torch is imported by the first use of `load`, not by `import specplan`: the build and the
    # coverage check run on machines that have none.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "reference":
        return import_module("specplan.reference")
    raise AttributeError(f"module 'specplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""The compile targets, and the facts about them that planning may use.

Planning must come out the same on a laptop, in CI and on the server, so nothing here queries a GPU:
the facts are catalog data, and this module is only their shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One exact compile target with its suffix, for example ``sm_90a``.

    Attributes
    ----------
    name
        The compile target as the compiler spells it.
    capability
        CUDA compute capability ``(major, minor)`` of the devices that run it.
    sm_count
        Streaming multiprocessors of the device that the plans are tuned for.
    smem_per_sm, smem_per_cta
        Shared memory in bytes: of one SM, and the most that one CTA can opt into.
    device
        Name of the device that the facts describe.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_sm: int
    smem_per_cta: int
    device: str

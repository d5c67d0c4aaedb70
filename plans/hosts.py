"""Hosts: the CPU architectures that a pack's libraries are built for.

Device code and certificates are the same for all of them: a host decides only how the launch code
is lowered to CPU instructions, and it is a named target, never the CPU of the machine that builds.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Host:
    """One host that libraries are built for.

    Attributes
    ----------
    name
        As ``platform.machine()`` spells it on Linux.
    triple, cpu
        Target triple and CPU as LLVM spells them; an empty CPU is the architecture's baseline.
    flags
        Extensions beyond what every CPU of the architecture has, as ``/proc/cpuinfo`` spells them.
    """

    name: str
    triple: str
    cpu: str
    flags: tuple[str, ...]


#: x86-64-v2 is every x86-64 CPU since 2009; baseline aarch64 is ARMv8-A, which Grace has.
HOSTS: Mapping[str, Host] = MappingProxyType(
    {
        host.name: host
        for host in (
            Host(
                "x86_64",
                "x86_64-unknown-linux-gnu",
                "x86-64-v2",
                ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"),
            ),
            Host("aarch64", "aarch64-unknown-linux-gnu", "", ()),
        )
    }
)


def this_machine() -> str:
    """The name of this machine's host; it need not be one that packs are built for."""
    machine = platform.machine()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine)

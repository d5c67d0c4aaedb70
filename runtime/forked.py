"""Forked children: what a process may not do with a pack that its parent has used.

A CUDA context does not survive a fork: the driver answers a forked child with errors that name
anything but the fork. So a child of a process that has used CUDA gets ops that raise
:class:`~specplan.ForkedError` in the place of the ones it inherited. Nothing is asked on a call:
the functions of the ops are exchanged once, in the child, by ``os.register_at_fork``.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import torch
from specplan.errors import ForkedError


class Closeable(Protocol):
    """A loaded pack, as far as a fork is about it."""

    _prepared: set[tuple[int, str]]

    def _close(self) -> None: ...


_PACKS: WeakSet[Closeable] = WeakSet()
_LAUNCHES: WeakSet[partial[Any]] = WeakSet()


def watch(pack: Closeable) -> None:
    """Take notice of a pack; one that is loaded where CUDA cannot be used is closed at once."""
    _PACKS.add(pack)
    if inherited():
        pack._close()


def watched(launch: partial[Any]) -> partial[Any]:
    """Take notice of a bound launch, which holds the compiled function itself; returns it."""
    _LAUNCHES.add(launch)
    return launch


def inherited() -> bool:
    """Whether this process was forked from one that had used CUDA."""
    return bool(torch.cuda._is_in_bad_fork())


def refuse(*arguments: Any, **named: Any) -> NoReturn:
    """Raise what every use of an inherited pack raises."""
    raise ForkedError(
        f"process {os.getpid()} was forked from one that had used CUDA, and CUDA does not survive "
        "a fork: nothing was launched. Start workers with multiprocessing's 'spawn' or 'forkserver'"
        " method, or load and use the pack in the child alone"
    )


def _in_child() -> None:
    used = [pack for pack in list(_PACKS) if inherited() or pack._prepared]
    for pack in used:
        pack._close()
    if used:
        for launch in list(_LAUNCHES):
            # functools.partial has it for pickle, and typeshed does not know.
            launch.__setstate__((refuse, (), {}, None))  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_in_child)

"""The lock of a directory of packs, which builds hold: for what deletes or rewrites files there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

#: The file that ``specplan build`` locks in its output directory.
NAME = ".lock"


@contextlib.contextmanager
def exclusive(root: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock that builds hold in a directory of packs.

    The same ``flock`` on the same file as the build's, without its package, which servers lack.
    A file system without locks is worked on without one, as the build does.

    Raises
    ------
    OSError
        The lock cannot be had, for want of permission for example.
    """
    descriptor = _locked(root / NAME, waiting)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _locked(path: Path, waiting: Callable[[str], None]) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting(f"a build holds {path.parent}; waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # A holder may have taken the file away before it let go.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError | InterruptedError | PermissionError):
                raise
            return None
        os.close(descriptor)

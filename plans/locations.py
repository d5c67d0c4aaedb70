"""Where packs are looked for and where the build puts them.

The working directory is no place of its own: packs hold machine code, and standing in a directory
is no reason to run what lies there. A checkout counts if the package itself runs from it, as after
``make plans`` or ``pip install -e .``: its packs are of the sources that are imported.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from specplan.plans.manifest import packs_under

ENVIRONMENT = "SPECPLAN_PACKS"


def user_directory() -> Path | None:
    """The per-user pack directory (XDG data directory); None for a user without a home, as in a
    container that runs under a bare number.
    """
    data = os.environ.get("XDG_DATA_HOME")
    try:
        base = Path(data) if data else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return base / "specplan" / "packs"


def packaged_directory() -> Path:
    """Where packs lie that were built into an installed wheel."""
    return Path(__file__).resolve().parent.parent / "_packs"


def checkout_directory() -> Path | None:
    """The packs of the checkout that this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    if all((root / name).exists() for name in ("pyproject.toml", "build_plans.py", "kernels")):
        return root / "packs"
    return None


def build_directory() -> Path | None:
    """Where a build without ``--out`` puts its packs: ``$SPECPLAN_PACKS``, else ``packs/`` of the
    checkout that the package runs from, else the per-user directory; None if there is none of them.
    """
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else checkout_directory() or user_directory()


def search_path() -> list[tuple[str, Path]]:
    """The places that a load without a path looks at, in order, each with why."""
    places: list[tuple[str, Path]] = []
    named = os.environ.get(ENVIRONMENT)
    if named:
        places.append((f"${ENVIRONMENT}", Path(named)))
    checkout = checkout_directory()
    if checkout is not None:
        places.append(("the checkout", checkout))
    places.append(("the installed wheel", packaged_directory()))
    user = user_directory()
    if user is not None:
        places.append(("the per-user directory", user))
    return places


def packs_at_hand(path: Path | None = None) -> dict[str, Path]:
    """The pack of each arch that a load takes: under ``path``, or the first on the search path."""
    found: dict[str, Path] = {}
    for place in [path] if path is not None else [place for _, place in search_path()]:
        for arch, directory in packs_under(place).items():
            found.setdefault(arch, directory)
    return found


def writable_by_others(directory: Path) -> str | None:
    """Who else may write a pack, or None: its files, its directory, or a directory above.

    What a pack holds runs in the process that loads it. No directory may be everybody's to write
    (a sticky one, such as /tmp, is fine as long as it is above the pack); for root the pack must be
    root's alone.
    """
    directory = directory.resolve()
    for path in _of_pack(directory):
        try:
            status = path.lstat()
        except OSError:
            continue
        mode = stat.S_IMODE(status.st_mode)
        if mode & stat.S_IWOTH and not (path in directory.parents and mode & stat.S_ISVTX):
            return f"everybody may write {path} (mode {mode:o}): chmod o-w {path}"
        if os.geteuid() == 0 and path not in directory.parents:
            if status.st_uid != 0:
                return f"{path} belongs to uid {status.st_uid}, not to root: chown root {path}"
            if mode & stat.S_IWGRP and status.st_gid != 0:
                return f"group {status.st_gid} may write {path} (mode {mode:o}): chmod g-w {path}"
    return None


def _of_pack(directory: Path) -> Iterator[Path]:
    """What decides what a load of a pack gets: its files, its directory, the ones above."""
    with contextlib.suppress(OSError):
        files = [path for path in directory.iterdir() if path.suffix in (".so", ".json")]
        yield from sorted(path for path in files if not path.is_symlink())
    yield directory
    yield from directory.parents

"""Where packs are looked for and where the build puts them."""

from __future__ import annotations

import os
from pathlib import Path

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


def build_directory() -> Path | None:
    """Where a build without ``--out`` puts its packs: ``$SPECPLAN_PACKS``, else the per-user
    directory; None if there is neither.
    """
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else user_directory()


def search_path() -> list[tuple[str, Path]]:
    """The places that a load without a path looks at, in order, each with why."""
    places: list[tuple[str, Path]] = []
    named = os.environ.get(ENVIRONMENT)
    if named:
        places.append((f"${ENVIRONMENT}", Path(named)))
    places.append(("the installed wheel", packaged_directory()))
    user = user_directory()
    if user is not None:
        places.append(("the per-user directory", user))
    return places

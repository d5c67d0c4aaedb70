"""Runs a module of one copy of specplan, whatever other copies the environment holds.

``python -P pinned.py ROOMS MODULE [ARGUMENT ...]``, where ROOMS is JSON: package -> its folder.

Which copy a plain ``import specplan`` finds is up to the environment: the working directory,
``PYTHONPATH``, ``.pth`` files, finders of editable installs. A build that reads its sources from
another copy gives packs that look right and are of other sources. So the copy is named by its
folders, before anything of it is imported, and a module that it lacks is an error even where
another copy has one.

This file imports nothing of the package: ``setup.py`` uses it before anything is installed.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "specplan"
#: The rooms whose folders may lie anywhere; every other module lies in its package's folder.
ROOMS = (PACKAGE, f"{PACKAGE}.plans", f"{PACKAGE}.kernels", f"{PACKAGE}.tools")


class PinnedFinder:
    """Finds the modules of one copy of the package, and stops a search for any other."""

    def __init__(self, rooms: Mapping[str, str]) -> None:
        self.rooms = rooms

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        if name in self.rooms:
            folder = self.rooms[name]
            return spec_from_file_location(
                name, Path(folder) / "__init__.py", submodule_search_locations=[folder]
            )
        found = PathFinder.find_spec(name, path)
        if found is None:
            # The other finders are not asked: they may know another copy.
            raise ModuleNotFoundError(
                f"No module named {name!r} in {self.rooms[PACKAGE]}", name=name
            )
        return found


def command(rooms: Mapping[str, Path], module: str, *arguments: str) -> list[str]:
    """The command that runs a module of the copy whose packages lie in these folders."""
    missing = [name for name in ROOMS if not (rooms[name] / "__init__.py").is_file()]
    if missing:
        raise ModuleNotFoundError(f"no {', '.join(missing)} in {rooms[PACKAGE]}")
    folders = json.dumps({name: str(rooms[name].resolve()) for name in ROOMS})
    return [sys.executable, "-P", str(Path(__file__).resolve()), folders, module, *arguments]


def main() -> None:
    rooms, module = json.loads(sys.argv[1]), sys.argv[2]
    # A .pth file may have imported another copy already.
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.meta_path.insert(0, PinnedFinder(rooms))
    sys.argv[1:] = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

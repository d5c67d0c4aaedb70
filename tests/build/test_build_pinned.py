"""A process whose specplan is one given copy, whatever the environment would import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from specplan.tools.build import pinned, pool

#: Says where each of these modules comes from.
WHERE = """
import importlib, sys
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""
MODULES = ("specplan", "specplan.plans.cell", "specplan.kernels", "specplan.tools")


def made_up(to: Path) -> dict[str, Path]:
    """A package with the rooms in folders of their own, as in a checkout."""
    rooms = {}
    for name in pinned.ROOMS:
        room = to / name.rpartition(".")[2]
        room.mkdir(parents=True)
        (room / "__init__.py").write_text("")
        rooms[name] = room
    (rooms["specplan.plans"] / "cell.py").write_text("")
    (rooms["specplan.tools"] / "where.py").write_text(WHERE)
    return rooms


def run(
    rooms: dict[str, Path], *modules: str, cwd: Path | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        pinned.command(rooms, "specplan.tools.where", *modules),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path or "")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def rooms(tmp_path: Path) -> dict[str, Path]:
    return made_up(tmp_path / "this")


def decoy(to: Path) -> Path:
    """Another copy, with a module that the first lacks."""
    for name in ("", "plans", "kernels", "tools"):
        (to / "specplan" / name).mkdir(parents=True, exist_ok=True)
        (to / "specplan" / name / "__init__.py").write_text("")
    for name in ("plans/cell.py", "tools/where.py", "extra.py"):
        (to / "specplan" / name).write_text("")
    return to


@pytest.mark.parametrize("how", ["directory", "path", "imported", "finder"])
def test_no_other_copy_takes_part(rooms: dict[str, Path], tmp_path: Path, how: str) -> None:
    other = decoy(tmp_path / "other")
    start = tmp_path / "start"
    start.mkdir()
    if how == "imported":
        (start / "sitecustomize.py").write_text(
            f"import sys; sys.path.insert(0, {str(other)!r})\n"
            "import specplan.plans.cell, specplan.kernels, specplan.extra\n"
        )
    elif how == "finder":
        (start / "sitecustomize.py").write_text(
            "import sys\nfrom importlib.machinery import PathFinder\n"
            "class First:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.startswith('specplan'):\n"
            f"            return PathFinder.find_spec(name, path or [{str(other)!r}])\n"
            "sys.meta_path.insert(0, First())\n"
        )
    where = {"directory": None, "path": other, "imported": start, "finder": start}[how]
    cwd = other if how == "directory" else tmp_path
    done = run(rooms, *MODULES, cwd=cwd, path=where)
    assert done.returncode == 0, done.stderr
    this = tmp_path / "this"
    assert [Path(line).is_relative_to(this) for line in done.stdout.split()] == [True] * 4
    # What this copy lacks is an error, though the other has it.
    lacks = run(rooms, "specplan.extra", cwd=cwd, path=where)
    assert lacks.returncode != 0
    assert f"No module named 'specplan.extra' in {this}" in lacks.stderr


def test_a_folder_that_is_no_copy_is_refused_before_anything_runs(
    rooms: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no specplan\.plans in "):
        pinned.command({**rooms, "specplan.plans": tmp_path / "nowhere"}, "specplan.tools.where")


def test_workers_run_the_copy_that_started_them() -> None:
    rooms = pool.own_rooms()
    assert pinned.command(rooms, "specplan.tools.build.worker") == pool.WORKER
    assert pool.WORKER[:2] == [sys.executable, "-P"]
    for name, folder in rooms.items():
        assert Path(sys.modules[name].__file__ or "").parent == folder

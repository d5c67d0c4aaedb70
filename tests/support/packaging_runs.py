"""Copies of the sources, clean environments and the commands that packaging tests run in them."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: What of this test's own environment would reach into the environments under test.
CLEAN = {"SPECPLAN_PACKS": "", "SPECPLAN_ARCHS": "", "SPECPLAN_FAMILIES": "", "PYTHONPATH": ""}


def start(
    command: Sequence[str | Path], cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with its output as text, away from the checkout's folders unless told."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd or Path(sys.prefix),
        capture_output=True,
        text=True,
        env={**os.environ, **CLEAN, **more},
        check=False,
    )


def run(*command: str | Path, cwd: Path | None = None, **more: str) -> str:
    done = start(command, cwd, **more)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def from_index(*command: str | Path, cwd: Path | None = None, **more: str) -> str:
    """A command that installs from a package index: skipped without one, but never in CI."""
    done = start(command, cwd, **more)
    if done.returncode != 0 and not os.environ.get("CI"):
        unreachable = ("No matching distribution", "NewConnectionError", "ConnectionError")
        if any(text in done.stdout + done.stderr for text in unreachable):
            pytest.skip(f"no package index: {done.stderr[-300:]}")
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def copy_tracked(to: Path) -> Path:
    """The tracked files and nothing else that lies in the tree."""
    tracked = run("git", "-C", ROOT, "ls-files", "-z").split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return to


def clean_environment(to: Path) -> Path:
    """A new virtual environment with pip and nothing else; returns its interpreter."""
    venv.create(to, with_pip=True)
    return to / "bin" / "python"


def own_packages() -> list[str]:
    """Where this test's own environment has its packages: torch, tvm-ffi, the compiler. Appended to
    ``sys.path`` of another environment after its start, so that no ``.pth`` file of this one and no
    editable install takes part.
    """
    return [entry for entry in sys.path if "site-packages" in entry]

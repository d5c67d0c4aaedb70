"""Run mypy over the rooms under the names that they are installed by, and over the benchmarks.

The rooms are folders at the root of the repository and one package when installed; mypy reads
folders, so it gets a folder of links that looks as installed. Run from the root: ``python
tools/typecheck.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "specplan"
        package.mkdir()
        for path in (ROOT / "runtime").iterdir():
            (package / path.name).symlink_to(path)
        for room in ("plans", "kernels", "tools"):
            (package / room).symlink_to(ROOT / room)
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache")]
        rooms = subprocess.run([*command, "-p", "specplan"], cwd=directory, check=False)
        benchmarks = subprocess.run(
            [*command, *map(str, sorted((ROOT / "benchmarks").glob("*.py")))],
            cwd=directory,
            env={**os.environ, "MYPYPATH": f"{directory}{os.pathsep}{ROOT / 'benchmarks'}"},
            check=False,
        )
        return rooms.returncode or benchmarks.returncode


if __name__ == "__main__":
    sys.exit(main())

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
PAGES = ("__main__.py", "points.py", "compare.py", "report.py")


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "specplan"
        package.mkdir()
        for path in (ROOT / "runtime").iterdir():
            (package / path.name).symlink_to(path)
        for room in ("plans", "kernels", "tools"):
            (package / room).symlink_to(ROOT / room)
        # The pages' modules are a package, ``python -m benchmarks``; the others are scripts.
        pages = Path(directory) / "benchmarks"
        pages.mkdir()
        for name in PAGES:
            (pages / name).symlink_to(ROOT / "benchmarks" / name)
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache")]
        packages = ["-p", "specplan", "-p", "benchmarks"]
        rooms = subprocess.run([*command, *packages], cwd=directory, check=False)
        scripts = sorted(p for p in (ROOT / "benchmarks").glob("*.py") if p.name not in PAGES)
        benchmarks = subprocess.run(
            [*command, *map(str, scripts)],
            cwd=directory,
            env={**os.environ, "MYPYPATH": f"{directory}{os.pathsep}{ROOT / 'benchmarks'}"},
            check=False,
        )
        return rooms.returncode or benchmarks.returncode


if __name__ == "__main__":
    sys.exit(main())

"""Run mypy over the rooms under the names that they are installed by.

The rooms are folders at the root of the repository and one package when installed; mypy reads
folders, so it gets a folder of links that looks as installed. Run from the root: ``python
tools/typecheck.py``.
"""

from __future__ import annotations

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
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "specplan"]
        return subprocess.run(command, cwd=directory, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

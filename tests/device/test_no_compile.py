"""The runtime on a GPU neither compiles nor writes: ``no_compile.py`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu
def test_every_op_launches_in_a_process_that_can_neither_compile_nor_write() -> None:
    script = Path(__file__).with_name("no_compile.py")
    packs = os.environ.get("SPECPLAN_PACKS")
    done = subprocess.run(
        [sys.executable, str(script), *(["--packs", packs] if packs else [])],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "writes tried: none; files left: none" in done.stdout

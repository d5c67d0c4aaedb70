"""What takes long is made once in a test run: by the xdist worker that comes first, while others
that need the same wait.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from filelock import FileLock
from specplan.plans.plan import Plan


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a plan."""

    ptx: str
    cubin: bytes


class Shared:
    """A directory that all workers of a run see."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        base = factory.getbasetemp()
        self.base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """The directory ``name``, which ``make`` has filled. Tests read it and write elsewhere."""
        place, done = self.base / name, self.base / f"{name}.done"
        with FileLock(self.base / f"{name}.lock"):
            if not done.is_file():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                make(place)
                done.touch()
        return place

    def compiled(self, plan: Plan) -> Compiled:
        """A plan's PTX and cubin."""

        def compile_into(folder: Path) -> None:
            from cutlass import cute

            kernel = import_module(f"specplan.kernels.{plan.family}.kernel")
            function, arguments = kernel.lower(plan)
            kept = f"--keep-ptx --keep-cubin --dump-dir {folder}"
            cute.compile(
                function, *arguments, options=f"--enable-tvm-ffi --gpu-arch {plan.arch} {kept}"
            )

        folder = self.made(f"compiled-{plan.symbol}", compile_into)
        (ptx,), (cubin,) = folder.rglob("*.ptx"), folder.rglob("*.cubin")
        return Compiled(ptx.read_text(), cubin.read_bytes())

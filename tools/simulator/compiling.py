"""PTX of plans, from the compiler that builds packs.

A pack holds machine code only. The same plan compiled again gives the same machine code, and the
PTX that it was made from; that PTX is a plan's if the hash of the machine code is the one in the
manifest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from specplan.plans.hosts import this_machine
from specplan.plans.manifest import PlanRecord
from specplan.plans.plan import Plan


class CompileError(RuntimeError):
    """A plan's PTX could not be made, or is not that of the pack."""


class PtxCompiler:
    """Gives the PTX of plans; compiles in a process of its own, and keeps what it made in a
    directory.
    """

    def __init__(self, kept: Path) -> None:
        self.kept = kept
        self._process: subprocess.Popen[str] | None = None
        self._answers: Any = None

    def ptx(self, plan: PlanRecord) -> str:
        """The PTX of a plan, whose machine code is that of the pack."""
        path = self.kept / f"{plan.symbol}-{plan.device_code[:16]}.ptx"
        with suppress(OSError, UnicodeDecodeError):
            head, _, text = path.read_text(encoding="utf-8").partition("\n")
            if head == _head(plan, text):
                return text
        text = self._compile(plan)
        self.kept.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(f"{_head(plan, text)}\n{text}", encoding="utf-8")
        beside.replace(path)
        return text

    def _compile(self, plan: PlanRecord) -> str:
        job = {
            "family": plan.family,
            "op": plan.op,
            "arch": plan.key["arch"],
            "spec": list(plan.spec),
            "options": plan.key["options"],
        }
        try:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._answers.readline()
        except OSError as error:
            raise CompileError(f"{plan.symbol}: the compile process ended ({error})") from error
        if not line:
            self.close()
            raise CompileError(f"{plan.symbol}: the compile process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise CompileError(f"{plan.symbol}: {answer['error']}")
        for what in ("device_code", "host_code"):
            if answer[what] != getattr(plan, what):
                raise CompileError(
                    f"{plan.symbol}: these sources and tools give another {what.replace('_', ' ')} "
                    "than the pack has; build the pack again"
                )
        text: str = answer["ptx"]
        return text

    def _start(self) -> None:
        from specplan.tools.build import pinned
        from specplan.tools.build.pool import environment, own_rooms

        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*pinned.command(own_rooms(), __name__), str(writer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writer,),
                env=environment(),
                text=True,
            )
        finally:
            os.close(writer)
        self._answers = os.fdopen(reader, encoding="utf-8")

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._answers.close()
        self._process = self._answers = None


def _head(plan: PlanRecord, text: str) -> str:
    """What says that a kept text is whole, and whose."""
    return f"// device code {plan.device_code}, PTX {sha256(text.encode()).hexdigest()}"


def compile_ptx(plan: Plan, options: str) -> dict[str, Any]:
    """A plan's PTX, and the hashes of its machine code and launch code."""
    from specplan.tools.build.worker import compile_plan

    with tempfile.TemporaryDirectory() as scratch:
        kept = f"{options} --keep-ptx --dump-dir {scratch}"
        record = compile_plan(plan, kept, {this_machine(): Path(scratch, "plan.o")})
        found = list(Path(scratch).rglob("*.ptx"))
        if len(found) != 1:
            raise CompileError(f"the compiler left {len(found)} files of PTX")
        text = found[0].read_text(encoding="utf-8")
    return {
        "ptx": text,
        "device_code": record["device_code"],
        "host_code": record["host_code"],
    }


def _main() -> None:
    # As in a build: no plan's bytes may depend on torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from specplan.tools.build.worker import plan_from

    with os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8") as answers:
        for line in sys.stdin:
            job = json.loads(line)
            try:
                answer = compile_ptx(plan_from(job), job["options"])
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    _main()

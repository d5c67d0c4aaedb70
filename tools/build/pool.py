"""Worker processes that compile plans, one thread of this process minding each of them.

A worker that dies takes only the plan at hand with it: that plan fails with its log, and a new
worker goes on with the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import threading
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from specplan.plans.plan import Plan
from specplan.tools.build import keys, pinned


def own_rooms() -> dict[str, Path]:
    """Where the packages of this very copy of specplan lie."""
    return {name: Path(import_module(name).__file__ or "").parent for name in pinned.ROOMS}


#: The worker's command; the file descriptor for its answers is appended. The copy of the package
#: that compiles is the one that plans.
WORKER = pinned.command(own_rooms(), "specplan.tools.build.worker")
#: Compiles that one worker does before it is replaced, which bounds what a leak in the compiler can
#: cost.
RECYCLE_AFTER = 64
#: Seconds after which a compile is taken for hung. The slowest plan takes some seconds.
TIMEOUT_S = 600
#: More than any object takes.
_OBJECT_BYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """One plan to compile: where its objects, by host, and its log go."""

    plan: Plan
    object_paths: Mapping[str, Path]
    log_path: Path


@dataclass(frozen=True)
class Outcome:
    """What became of a job: the record for the manifest, or the error, with its number if the
    system refused something.
    """

    job: Job
    record: dict[str, Any] | None
    error: str | None
    errno: int | None = None


def run(jobs: Iterable[Job], workers: int, stop: threading.Event) -> Generator[Outcome, None, None]:
    """Compile jobs on ``workers`` processes; yields outcomes as they come. ``stop`` ends it after
    the plans at hand.
    """
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    count = 0
    for job in jobs:
        todo.put(job)
        count += 1
    done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_mind, args=(todo, done, stop), daemon=True)
        for _ in range(min(workers, count))
    ]
    for thread in threads:
        thread.start()
    finished = 0
    try:
        while finished < len(threads):
            outcome = done.get()
            if outcome is None:
                finished += 1
            else:
                yield outcome
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _mind(
    todo: queue.SimpleQueue[Job], done: queue.SimpleQueue[Outcome | None], stop: threading.Event
) -> None:
    worker: _Worker | None = None
    try:
        while not stop.is_set():
            try:
                job = todo.get_nowait()
            except queue.Empty:
                break
            try:
                if worker is None or worker.compiled >= RECYCLE_AFTER:
                    if worker is not None:
                        worker.close()
                    worker = _Worker()
                answer = worker.compile(job)
            except _WorkerDied as death:
                if worker is not None:
                    worker.close()
                worker = None
                answer = {"error": str(death), "errno": _errno_of_a_write(job)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            if "error" in answer:
                done.put(Outcome(job, None, answer["error"], answer.get("errno")))
            else:
                done.put(Outcome(job, answer, None))
    finally:
        if worker is not None:
            worker.close()
        done.put(None)


def _errno_of_a_write(job: Job) -> int | None:
    """What the system answers a write of the size of an object where the job's objects go; None if
    it takes it. A compiler that meets a full disk ends its process without saying so.
    """
    probe = next(iter(job.object_paths.values())).with_suffix(".probe")
    try:
        probe.write_bytes(bytes(_OBJECT_BYTES))
    except OSError as error:
        return error.errno
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


class _WorkerDied(Exception):
    pass


class _Worker:
    """One compile process; its answers come by a pipe that the compiler's output cannot reach."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*WORKER, str(writer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writer,),
                env=environment(),
                text=True,
            )
        finally:
            os.close(writer)
        self.answers = reader
        self.buffer = b""
        self.compiled = 0

    def compile(self, job: Job) -> dict[str, Any]:
        plan = job.plan
        message = {
            "family": plan.family,
            "op": plan.op,
            "arch": plan.arch,
            "spec": list(plan.spec),
            "options": keys.options(plan),
            "objects": {host: str(path) for host, path in job.object_paths.items()},
            "log": str(job.log_path),
        }
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise _WorkerDied(self._obituary()) from error
        line = self._read_line()
        self.compiled += 1
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read_line(self) -> bytes:
        waited = 0.0
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], 1.0)
            if not ready:
                waited += 1.0
                if waited >= TIMEOUT_S:
                    self.process.kill()
                    raise _WorkerDied(f"no answer in {TIMEOUT_S} s; the compile was stopped")
                continue
            data = os.read(self.answers, 65536)
            if not data:
                raise _WorkerDied(self._obituary())
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def _obituary(self) -> str:
        code = self.process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return f"the compile worker was {how}" if code < 0 else f"the compile worker {how}"

    def close(self) -> None:
        os.close(self.answers)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def environment() -> dict[str, str]:
    """The workers' environment: no compiler switches from outside, no GPU."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUTE_DSL_", "CUTLASS_"))
    }
    kept["CUDA_VISIBLE_DEVICES"] = ""
    kept["PYTHONHASHSEED"] = "0"
    return kept

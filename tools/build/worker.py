"""A compile worker: reads plans as JSON lines on stdin, compiles each, answers with one JSON line
on a pipe.

The DSL is not thread-safe, so a worker is a process and compiles one plan at a time. Whatever the
compiler prints goes to the log of the plan at hand: a crash leaves a log and costs one plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from specplan.plans import device_code
from specplan.plans.hosts import HOSTS
from specplan.plans.plan import Plan
from specplan.tools.build import host_target


def plan_from(job: dict[str, Any]) -> Plan:
    return Plan(
        job["family"],
        job["op"],
        job["arch"],
        tuple((name, value) for name, value in job["spec"]),
    )


def compile_plan(plan: Plan, options: str, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Compile one plan to an object for each host in ``paths``; returns what the manifest records
    about it.
    """
    import cutlass.cute as cute

    module = import_module(f"specplan.kernels.{plan.family}.kernel")
    function, arguments = module.lower(plan)
    compiled = cute.compile(function, *arguments, options=options)
    # The host side of the launch (grid, cluster, argument checks) before it is lowered to any
    # host's instructions. It holds the device code too, so it is the widest statement of what the
    # plan does that does not depend on the host.
    host_code = hashlib.sha256(str(compiled.ir_module).encode()).hexdigest()
    objects: dict[str, dict[str, Any]] = {}
    found: set[device_code.DeviceCode] = set()
    signatures: set[str] = set()
    for name, path in paths.items():
        host_target.emit(compiled, plan.symbol, HOSTS[name], path)
        data = path.read_bytes()
        images = [device_code.read(image) for image in device_code.images(data)]
        if len(images) != 1:
            raise RuntimeError(
                f"expected one device image in the object of {plan.symbol} for {name}, found "
                f"{len(images)}"
            )
        found.update(images)
        signatures.add(host_target.signature(data))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        objects[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if len(found) != 1 or len(signatures) != 1:
        raise RuntimeError(f"the objects of {plan.symbol} differ by host in more than host code")
    (code,) = found
    return {
        "objects": objects,
        "signature": signatures.pop(),
        "device_code": code.sha256,
        "host_code": host_code,
        "kernels": list(code.kernels),
        "registers": code.registers,
        "spills": code.spills,
    }


def main() -> None:
    # tvm-ffi imports torch where there is one: three seconds a worker, and no plan's bytes may
    # depend on it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            _log_to(job["log"])
            paths = {host: Path(path) for host, path in job["objects"].items()}
            answer = compile_plan(plan_from(job), job["options"], paths)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, OSError):
                answer["errno"] = error.errno
            with suppress(OSError):
                traceback.print_exc()
        # Where the disk is full the log stays short, and the answer still says why.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        print(json.dumps(answer), file=answers)


def _log_to(path: str) -> None:
    """Send what this process prints from now on to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    main()

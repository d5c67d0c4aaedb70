"""The command line with a compiler that only takes time: a worker that hands out objects that were
compiled before.

    python replay.py RECORDED_PACK SECONDS_A_PLAN {locks|no-locks} ARGUMENTS...

The pool, the worker's loop, the renames, the linker and the manifest are the real ones; only the
compile is another. ``no-locks`` stands for a file system on which a lock is granted to everyone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def worker(root: Path, seconds: float) -> None:
    from specplan.plans import manifest
    from specplan.plans.hosts import HOSTS, this_machine
    from specplan.plans.plan import Plan
    from specplan.tools.build import keys
    from specplan.tools.build import worker as real

    names = {
        symbol: keys.object_name(plan.key, HOSTS[this_machine()])
        for directory in manifest.packs_under(root).values()
        for symbol, plan in manifest.read(directory).plans.items()
    }

    def compile_plan(plan: Plan, options: str, paths: Mapping[str, Path]) -> dict[str, Any]:
        ((_, path),) = paths.items()
        recorded = root / "objects" / f"{names[plan.symbol]}.o"
        data = recorded.read_bytes()
        # In pieces, so that a kill can leave half an object.
        with path.open("wb") as file:
            for part in range(4):
                file.write(data[part * len(data) // 4 : (part + 1) * len(data) // 4])
                file.flush()
                time.sleep(seconds / 4)
        record: dict[str, Any] = json.loads(recorded.with_suffix(".json").read_text())
        return record

    real.compile_plan = compile_plan
    real.main()


def main() -> None:
    root, seconds, locks, *arguments = sys.argv[1:]
    if locks == "worker":
        sys.argv[1:] = arguments
        worker(Path(root), float(seconds))
        return
    from specplan.tools import cli
    from specplan.tools.build import pool

    if locks == "no-locks":
        import filelock

        def granted(self: Any, *arguments: Any, **named: Any) -> Any:
            return self

        for kind in filelock.FileLock.__mro__:
            if "acquire" in vars(kind):
                setattr(kind, "acquire", granted)  # noqa: B010
    pool.WORKER = [sys.executable, __file__, root, seconds, "worker"]
    cli.main(args=arguments)


if __name__ == "__main__":
    main()

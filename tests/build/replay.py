"""The command line with a compiler that only takes time: a worker that hands out objects that were compiled before.

    python replay.py RECORDED_PACK SECONDS_A_PLAN {locks|no-locks} ARGUMENTS...

The pool, the renames, the linker and the manifest are the real ones; only the worker's process is another. ``no-locks`` stands for a file
system on which a lock is granted to everyone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def worker(root: Path, seconds: float, answers: int) -> None:
    from specplan.plans import manifest
    from specplan.tools.build import keys

    digests = {
        symbol: keys.digest(plan.key)
        for directory in manifest.packs_under(root).values()
        for symbol, plan in manifest.read(directory).plans.items()
    }
    from specplan.tools.build.worker import plan_from

    with os.fdopen(answers, "w", buffering=1) as pipe:
        for line in sys.stdin:
            job = json.loads(line)
            Path(job["log"]).write_text("replayed\n")
            name = digests[plan_from(job).symbol]
            data = (root / "objects" / f"{name}.o").read_bytes()
            # In pieces, so that a kill can leave half an object.
            with Path(job["object"]).open("wb") as file:
                for part in range(4):
                    file.write(data[part * len(data) // 4 : (part + 1) * len(data) // 4])
                    file.flush()
                    time.sleep(seconds / 4)
            print((root / "objects" / f"{name}.json").read_text().replace("\n", " "), file=pipe)


def main() -> None:
    root, seconds, locks, *arguments = sys.argv[1:]
    if locks == "worker":
        worker(Path(root), float(seconds), int(arguments[0]))
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

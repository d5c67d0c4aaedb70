"""No compile and no write: every op of every family, in a process that can do neither.

    python tests/device/no_compile.py --packs packs

The compiler cannot be imported here, and an audit hook ends the process's attempt to open a file
for writing, to make, rename or remove one, or to start another process. Then a pack is loaded and
prepared, and each op of each family and dtype is called, bound and launched, and launched in a
replayed graph, each time compared with its reference. Home and the directories for caches and
temporary files are made empty ones first, and must be empty at the end: what libraries write below
Python would lie there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

#: The compiler of the plans. torch imports Triton when it initialises CUDA, so that stays
#: importable: it could not compile either without writing or starting a process.
BLOCKED = ("cutlass", "cutlass_dsl")
#: Events that change something outside of the process, besides ``open`` for writing.
CHANGES = (
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("shutil.", "tempfile.", "subprocess.Popen", "os.system", "os.exec", "os.fork"),
    *("os.posix_spawn", "os.spawn", "pty.spawn", "socket.connect"),
)
attempts: list[str] = []


class NoCompiler:
    """Finds no compiler."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(name == blocked or name.startswith(f"{blocked}.") for blocked in BLOCKED):
            attempts.append(f"import {name}")
            raise ModuleNotFoundError(f"{name} is not importable here", name=name)


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail what would write."""
    if event == "open":
        path, mode, flags = arguments
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        if not (isinstance(flags, int) and flags & writing) or path == os.devnull:
            return
        refuse(f"open {path!r} for writing (mode {mode!r})")
    if event.startswith(CHANGES):
        refuse(f"{event}{arguments!r}"[:200])


def refuse(what: str) -> NoReturn:
    attempts.append(what)
    raise PermissionError(f"no compile and no write: {what}")


def empty_homes() -> Path:
    """Point everything that libraries write to at one empty directory."""
    root = Path(tempfile.mkdtemp(prefix="no-compile-"))
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "CUDA_CACHE_PATH"):
        place = root / name.lower()
        place.mkdir()
        os.environ[name] = str(place)
    tempfile.tempdir = None
    return root


def run(packs: str | None, family_names: list[str]) -> tuple[int, set[str]]:
    """Load, prepare, call, bind, launch and replay; returns the launches and the ops."""
    from importlib import import_module

    import specplan
    import torch

    device = torch.device("cuda", 0)
    pack = specplan.load(packs, candidates=True)
    pack.prepare()
    manifest = pack.manifest(f"sm_{''.join(map(str, torch.cuda.get_device_capability(0)))}a")
    launches = 0
    ops: set[str] = set()
    for family in family_names or sorted(manifest.objects):
        cases = import_module(f"specplan.kernels.{family}.cases")
        for cell in _cells(manifest, family):
            geometry = manifest.problems[family][cell.problem]
            size = (cell.requests, cell.tokens, cell.splits, cell.dtype)
            for case in cases.checks(geometry, *size, device):
                owner = getattr(pack, family)
                op = owner if case.op == family else getattr(owner, case.op)
                launches += _three_ways(op, case, f"{cell}: {case.name}")
                ops.add(f"{family}.{case.op}")
    torch.cuda.synchronize()
    wanted = {
        f"{p.family}.{p.op}"
        for p in manifest.plans.values()
        if p.family in (family_names or manifest.objects)
    }
    if ops != wanted:
        raise SystemExit(f"not launched: {', '.join(sorted(wanted - ops))}")
    return launches, ops


def _cells(manifest: Any, family: str) -> list[Any]:
    """A small cell of each dtype, with several tokens where the family has such cells."""
    found: dict[str, Any] = {}
    small = [
        cell
        for cell, group in manifest.cells(family)
        if group.automatic and cell.requests <= 8 and cell.tokens <= 4
    ]
    for cell in sorted(small, key=lambda cell: (cell.tokens == 1, cell.requests, cell.tokens)):
        found.setdefault(cell.dtype, cell)
    return list(found.values())


def _three_ways(op: Any, case: Any, name: str) -> int:
    """A call, a bound launch, and one in a replayed graph, each against the reference."""
    import torch

    def judged(launch: Any, seed: int) -> None:
        case.refill(seed)
        expected = case.expect()
        launch()
        for comparison in case.compare(expected):
            if not float(comparison.error) <= comparison.bound:
                raise SystemExit(f"{name}: {comparison}")

    judged(lambda: op.require(**case.arguments()), 1)
    case.refill(2)
    bound = op.bind(**case.arguments())
    if not bound:
        raise SystemExit(f"{name}: {bound}")
    judged(bound, 2)
    case.refill(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    judged(graph.replay, 4)
    return 3


def main() -> int:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs")
    parser.add_argument("--family", action="append", default=[])
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    root = empty_homes()
    # What torch does at its own start is no business of specplan's; it looks for a directory for
    # temporary files by writing one.
    import torch

    torch.cuda.init()

    sys.meta_path.insert(0, NoCompiler())  # type: ignore[arg-type]
    sys.addaudithook(watch)
    # A hook that sees nothing shows nothing.
    try:
        open(root / "canary", "w")  # noqa: PTH123, SIM115
    except PermissionError:
        attempts.clear()
    else:
        raise SystemExit("the audit hook does not see writes")
    try:
        __import__("cutlass")
    except ModuleNotFoundError:
        attempts.clear()
    else:
        raise SystemExit("cutlass can be imported")
    launches, ops = run(options.packs, options.family)
    left = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    tried = [what for what in attempts if not what.startswith("import ")]
    compiler = sorted({name.partition(".")[0] for name in sys.modules} & {"cutlass", "cutlass_dsl"})
    print(f"ops: {', '.join(sorted(ops))}")
    print(f"{launches} launches, called, bound and in graphs, each as the reference gives it")
    print(f"imports refused: {', '.join(sorted(set(attempts) - set(tried))) or 'none'}")
    print(f"writes tried: {tried or 'none'}; files left: {left or 'none'}; compiler: {compiler}")
    return int(bool(tried or left or compiler))


if __name__ == "__main__":
    sys.exit(main())

"""Who imports whom, and what an import costs: read in the sources, seen in a fresh process."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import specplan
import specplan.kernels
import specplan.plans

#: The rooms, and the packages of specplan that each may import.
ROOMS = {
    "plans": (Path(specplan.plans.__path__[0]), {"plans"}),
    "kernels": (Path(specplan.kernels.__path__[0]), {"kernels", "plans"}),
    "runtime": (Path(specplan.__path__[0]), {"runtime", "plans"}),
}
#: Modules outside the standard library that each room may import.
OUTSIDE = {
    "plans": {"yaml"},
    "kernels": {"torch", "cutlass"},
    "runtime": {"torch", "tvm_ffi"},
}
#: The one file of the runtime that knows the kernels, by name and on first use.
EXCEPTION = "reference.py"
ROOM_NAME = re.compile(r"specplan\.(kernels|tools)[\w.]*")


def sources(room: str) -> list[Path]:
    """A room's files. The runtime is the package itself, with the other rooms under it."""
    root, _ = ROOMS[room]
    if room == "runtime":
        return sorted((*root.glob("*.py"), *root.glob("integrations/*.py")))
    return sorted(root.rglob("*.py"))


def room_of(module: str) -> str:
    """The room of ``specplan.X.Y``: everything that is no other room is the runtime."""
    parts = module.split(".")
    if len(parts) > 1 and parts[1] in ("plans", "kernels", "tools"):
        return parts[1]
    return "runtime"


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file names in an import anywhere in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "specplan":
                # `from specplan import plans` names the room in the alias.
                for alias in node.names:
                    yield f"specplan.{alias.name}", node.lineno
            else:
                yield node.module, node.lineno


def texts(path: Path) -> Iterator[tuple[str, int]]:
    """Every module of specplan that a file names in a string constant, as for ``import_module``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and re.fullmatch(ROOM_NAME, str(node.value)):
            yield str(node.value), node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    _, allowed = ROOMS[room]
    files = sources(room)
    assert len(files) >= 5
    seen = 0
    for path in files:
        if path.name == "__main__.py":
            continue  # ``python -m specplan`` starts the command line, which is above all rooms
        for module, line in imports(path):
            if module.split(".")[0] == "specplan":
                seen += 1
                assert room_of(module) in allowed, f"{path}:{line} imports {module}"
    assert seen > 0


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_only_its_own_dependencies(room: str) -> None:
    for path in sources(room):
        for module, line in imports(path):
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and top != "specplan":
                assert top in OUTSIDE[room], f"{path}:{line} imports {module}"


def test_device_code_and_references_do_not_share_a_dependency() -> None:
    """What compiles needs no torch, and what checks needs no compiler."""
    for path in sources("kernels"):
        used = {module.split(".")[0] for module, _ in imports(path)}
        assert not {"torch", "cutlass"} <= used, path
        if path.name == "kernel.py":
            assert "torch" not in used, path
        if path.name in ("reference.py", "cases.py"):
            assert "cutlass" not in used, path


def test_only_the_references_name_the_kernels_from_the_runtime() -> None:
    found = {path.name: list(texts(path)) for path in sources("runtime")}
    assert {name for name, named in found.items() if named} == {EXCEPTION}


def test_plans_do_not_name_other_rooms_in_strings() -> None:
    assert [(path, list(texts(path))) for path in sources("plans") if list(texts(path))] == []


# In a fresh interpreter

WATCH = """
import json, os, sys
written = []
opened = []

def hook(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        opened.append(str(path))
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        if set(mode or "") & set("wax+") or (flags or 0) & writes:
            written.append(str(path))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.truncate"):
        written.append(f"{event} {arguments[0]}")

sys.addaudithook(hook)
before = set(sys.modules)
"""
REPORT = """
modules = sorted({name.split(".")[0] for name in set(sys.modules) - before})
kernels = [name for name in sys.modules if name.startswith("specplan.kernels.")]
seen = {"kernels": kernels, "modules": modules, "written": written, "opened": opened}
print(json.dumps({**seen, "cost": globals().get("cost")}))
"""


def fresh(statements: str) -> dict[str, Any]:
    """What a new interpreter imported, wrote and opened while it ran some statements.

    A module that the environment's start-up files load counts only where a submodule follows.
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", WATCH + statements + REPORT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


HEAVY = {"torch", "cutlass", "tvm_ffi", "nvidia_cutlass_dsl", "cuda", "numpy"}


def test_the_watch_sees_a_write_and_an_import(tmp_path: Path) -> None:
    target = tmp_path / "written"
    found = fresh(
        f"import yaml\nopen({str(target)!r}, 'w').close()\nos.mkdir({str(tmp_path / 'd')!r})\n"
    )
    assert found["written"] == [str(target), f"os.mkdir {tmp_path / 'd'}"]
    assert "yaml" in found["modules"]


def test_import_specplan_loads_nothing_heavy_and_writes_nothing() -> None:
    found = fresh("import specplan\n")
    assert "specplan" in found["modules"]
    assert not set(found["modules"]) & (HEAVY | {"yaml", "click"})
    assert found["written"] == []
    assert [p for p in found["opened"] if p.endswith((".yaml", "manifest.json"))] == []


def test_the_plans_room_needs_neither_torch_nor_a_compiler() -> None:
    names = [p.stem for p in sources("plans") if p.stem != "__init__"]
    assert {"catalog", "coverage", "manifest", "scatter", "gather"} <= set(names)
    found = fresh(
        "".join(f"import specplan.plans.{name}\n" for name in names)
        + "from specplan.plans import catalog\ncatalog.load()\n"
    )
    assert not set(found["modules"]) & (HEAVY | {"click"})
    assert found["written"] == []


def test_the_command_line_starts_without_torch_and_without_a_compiler() -> None:
    found = fresh("import specplan.tools.cli\n")
    assert not set(found["modules"]) & HEAVY
    assert found["written"] == []


@pytest.fixture(scope="module")
def beside_torch() -> dict[str, Any]:
    """All of the runtime imported after torch, with the processor time of ``import specplan``."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    return fresh(
        "import torch, time\nstart = time.process_time()\nimport specplan\n"
        "cost = time.process_time() - start\n"
        "specplan.Pack\nassert 'specplan.kernels' not in sys.modules\n"
        "from specplan import reference\n"
        "for name in dir(reference): getattr(reference, name)\n"
    )


def test_the_runtime_and_the_references_need_no_compiler(beside_torch: dict[str, Any]) -> None:
    assert {"torch", "specplan"} <= set(beside_torch["modules"])
    assert not set(beside_torch["modules"]) & {"cutlass", "nvidia_cutlass_dsl", "yaml", "click"}


def test_the_runtime_takes_references_from_the_kernels_and_no_device_code(
    beside_torch: dict[str, Any],
) -> None:
    taken = {tuple(name.split(".")[2:]) for name in beside_torch["kernels"]}
    families = set(dir(specplan.reference))
    assert {"scatter", "gather"} <= families
    assert {(family, "reference") for family in families} <= taken
    assert not {parts for parts in taken if parts[-1] in ("kernel", "cases")}


def test_import_specplan_costs_next_to_nothing_beyond_torch(beside_torch: dict[str, Any]) -> None:
    """0.1 s is promised; half a second of processor time leaves room for a busy machine."""
    assert 0 < beside_torch["cost"] < 0.5

"""A plan's key: everything that decides its bytes, and nothing else.

The key holds the reachable source files, every compile option, the arch, all
``nvidia-cutlass-dsl*`` distributions, the tvm-ffi version, and the Python where it is not one of
those that compile to the same bytes; an object's key adds the host that it is for. Neither holds a
path, a driver, a torch version or the machine that builds: none of them changes the bytes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from specplan.plans.hosts import Host
from specplan.plans.plan import Plan

#: Raise it when the build step itself changes what the same sources compile to.
FORMAT = 2
#: Minor versions of Python 3 that compile to the same bytes, as tests/pythons.py shows in CI.
#: The compiler makes names of kernels out of annotations, so another Python may give other device
#: code: 3.10 does.
SAME_BYTES = (11, 12, 13)


@lru_cache(maxsize=1)
def tool_versions() -> Mapping[str, str]:
    """Versions of every distribution that takes part in a compile."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("nvidia-cutlass-dsl") or name == "apache-tvm-ffi":
            found[name] = distribution.version
    return dict(sorted(found.items()))


def is_known_python() -> bool:
    """Whether this interpreter is known to compile to the same bytes as those that certify."""
    major, minor = sys.version_info[:2]
    return major == 3 and minor in SAME_BYTES


def python() -> str:
    """What of the interpreter decides the bytes: one class for the versions that are known to
    compile alike; any other version is a class of its own.
    """
    if is_known_python():
        return f"3.{SAME_BYTES[0]} to 3.{SAME_BYTES[-1]}"
    major, minor = sys.version_info[:2]
    return f"{major}.{minor}"


def options(plan: Plan) -> str:
    """The compiler options of a plan. The arch is always said: without it the DSL silently takes
    sm_100a.
    """
    return f"--enable-tvm-ffi --gpu-arch {plan.arch} --opt-level 3"


@cache
def _spec(name: str) -> ModuleSpec | None:
    """Where a module lies, without running it or its packages: a package that cannot be imported
    here still has sources.
    """
    parent = name.rpartition(".")[0]
    path = None
    if parent:
        package = _spec(parent)
        if package is None or package.submodule_search_locations is None:
            return None
        path = package.submodule_search_locations
    for finder in sys.meta_path:
        try:
            found = finder.find_spec(name, path)
        except ModuleNotFoundError:  # how ``pinned`` says that no other finder is to be asked
            return None
        if found is not None:
            return found
    return None


@cache
def _imports(module: str) -> tuple[str, frozenset[str]]:
    """Source digest of one module of this package, and which of its modules that imports."""
    spec = _spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {module!r} to take sources from")
    source = Path(spec.origin).read_bytes()
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).rstrip(".")
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    ours = frozenset(n for n in found if n.startswith("specplan.") and _spec(n) is not None)
    return hashlib.sha256(source).hexdigest(), ours


@cache
def sources(family: str) -> Mapping[str, str]:
    """sha256 of every source file that a family's device code reaches by import, by module."""
    found: dict[str, str] = {}
    todo = [f"specplan.kernels.{family}.kernel"]
    while todo:
        module = todo.pop()
        if module not in found:
            found[module], imported = _imports(module)
            todo.extend(imported)
    return dict(sorted(found.items()))


def key(plan: Plan) -> dict[str, Any]:
    """The key of a plan, in full: the manifest records it, and a difference names the input that
    changed.
    """
    return {
        "format": FORMAT,
        "symbol": plan.symbol,
        "arch": plan.arch,
        "options": options(plan),
        "sources": dict(sources(plan.family)),
        "tools": dict(tool_versions()),
        "python": python(),
    }


def object_name(full: Mapping[str, Any], host: Host) -> str:
    """The name under which the object of a plan's key is kept for a host."""
    return digest({"plan": full, "triple": host.triple, "cpu": host.cpu})


@cache
def planning_sources() -> Mapping[str, str]:
    """sha256 of every source file of the ``plans`` room: catalog reader, rules, manifest."""
    package = _spec("specplan.plans")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("no package 'specplan.plans' to take sources from")
    files = sorted(Path(package.origin).parent.glob("*.py"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def digest(full: Mapping[str, Any]) -> str:
    """sha256 of a key, the same for the same key on any machine."""
    text = json.dumps(full, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

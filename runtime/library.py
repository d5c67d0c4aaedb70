"""The two libraries that a pack needs beside torch: tvm-ffi and ``libcute_dsl_runtime.so``."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import lru_cache
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType

from specplan.errors import PackVersionError, RuntimeLibraryError
from specplan.plans.manifest import Manifest

#: Names the runtime library itself, for images that carry it without its wheel.
ENVIRONMENT = "CUTE_DSL_RUNTIME"
_LIBRARY = "libcute_dsl_runtime.so"
_WHEEL = "nvidia-cutlass-dsl-libs-cu13"


@lru_cache(maxsize=1)
def tvm_ffi() -> ModuleType:
    """Import tvm-ffi; it takes 0.4 s, so nothing imports it before a pack is loaded."""
    # Without this, tvm-ffi compiles a C++ extension at import where torch has no DLPack exchange
    # API.
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    try:
        module: ModuleType = import_module("tvm_ffi")
    except ImportError as error:
        raise RuntimeLibraryError(
            f"apache-tvm-ffi cannot be imported ({error}); pip install 'specplan[server]'"
        ) from error
    return module


def runtime_candidates() -> list[Path]:
    """Every place where the runtime library is looked for, in order."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return [Path(named)]
    spec = util.find_spec("nvidia_cutlass_dsl")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return [Path(root) / "cu13" / "lib" / _LIBRARY for root in roots]


@lru_cache(maxsize=1)
def runtime() -> ctypes.CDLL:
    """Load the DSL's runtime library: from ``$CUTE_DSL_RUNTIME``, its wheel, or the loader's own
    path.
    """
    searched = runtime_candidates()
    for path in searched:
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise RuntimeLibraryError(f"{path} cannot be loaded: {error}") from error
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        places = ", ".join(map(str, searched)) or "no nvidia_cutlass_dsl package"
        raise RuntimeLibraryError(
            f"{_LIBRARY} was not found (searched: {places}, the loader's path); "
            f"pip install {_WHEEL}, or set {ENVIRONMENT} to the library"
        ) from error


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.1.15.post2 -> (0, 1, 15)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_versions(pack: Manifest, where: Path) -> None:
    """Refuse a pack that this installation cannot run, naming both sides and what mends it."""
    host = f"{platform.machine()}-{sys.platform}"
    if not pack.host.startswith(host + "-"):
        raise PackVersionError(
            f"the pack in {where} holds host code for {pack.host}, this host is {host}; "
            "build the pack on a host of this kind",
            reason="host",
        )
    built = pack.tools.get("apache-tvm-ffi", "0")
    found = tvm_ffi().__version__
    if _numbers(found)[:2] != _numbers(built)[:2] or _numbers(found) < _numbers(built):
        raise PackVersionError(
            f"the pack in {where} was built with apache-tvm-ffi {built}, installed is {found}; "
            f"pip install 'apache-tvm-ffi=={built}', or build the pack again",
            reason="tvm_ffi",
        )
    if not os.environ.get(ENVIRONMENT):
        built = pack.tools.get(_WHEEL, "")
        try:
            found = metadata.version(_WHEEL)
        except metadata.PackageNotFoundError:
            found = ""
        if built and found and _numbers(found) != _numbers(built):
            raise PackVersionError(
                f"the pack in {where} was built with {_WHEEL} {built}, installed is {found}; "
                f"pip install '{_WHEEL}=={built}', or build the pack again",
                reason="runtime_library",
            )
    wanted = {name for record in pack.objects.values() for name in record.cpu_features}
    there = cpu_flags()
    lacking = sorted(wanted - there) if there is not None else []
    if lacking:
        raise PackVersionError(
            f"the pack in {where} uses {', '.join(lacking)}, which this CPU lacks; "
            "build the pack on a host of this kind",
            reason="cpu",
        )


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str] | None:
    """Extensions of this CPU as the kernel spells them; None on a system that does not say, which
    is then trusted.
    """
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return None

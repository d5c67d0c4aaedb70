"""The libraries that a pack takes symbols from: tvm-ffi, and the CUDA runtime that torch is bound
to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType

from specplan.errors import PackVersionError, RuntimeLibraryError
from specplan.plans import elf
from specplan.plans.hosts import HOSTS, this_machine
from specplan.plans.manifest import CUDA_RUNTIME, TVM_FFI, Manifest

#: Versions of tvm-ffi that packs were tried under. Others load if they have the symbols.
TRIED_TVM_FFI = ("0.1.11", "0.1.15.post2")
#: What a server may install.
TVM_FFI_REQUIREMENT = "apache-tvm-ffi>=0.1.11,<0.2"
#: Packs are compiled for this CUDA; its runtime's functions are stable within a major version.
CUDA_MAJOR = 13


@lru_cache(maxsize=1)
def tvm_ffi() -> ModuleType:
    """Import tvm-ffi; it takes 0.4 s, so nothing imports it before a pack is loaded."""
    # Without this, tvm-ffi compiles a C++ extension at import where torch has no DLPack exchange
    # API.
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    try:
        module: ModuleType = import_module("tvm_ffi")
    except (ImportError, OSError) as error:
        raise RuntimeLibraryError(
            f"apache-tvm-ffi cannot be imported ({error}); pip install '{TVM_FFI_REQUIREMENT}'",
            reason="tvm_ffi",
        ) from error
    return module


def torch() -> ModuleType:
    """Import torch; nothing imports it before a pack is loaded."""
    try:
        module: ModuleType = import_module("torch")
    except (ImportError, OSError) as error:
        raise RuntimeLibraryError(
            f"torch cannot be imported ({error}), and a pack is used with its tensors; "
            "pip install torch",
            reason="torch",
        ) from error
    return module


def tvm_ffi_version() -> str | None:
    """The installed version of tvm-ffi without a local suffix, or None; imports nothing."""
    try:
        return metadata.version("apache-tvm-ffi").partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def is_tried(version: str) -> bool:
    """Whether packs were tried under a version of tvm-ffi."""
    return version.partition("+")[0] in TRIED_TVM_FFI


def check_host(pack: Manifest, where: Path) -> None:
    """Refuse a pack without libraries for this machine, or for more than its CPU has."""
    name = this_machine()
    build = f"specplan build --arch {pack.arch} --host {name} --out {where.parent}"
    if name not in pack.hosts:
        raise PackVersionError(
            f"the pack in {where} has libraries for {' and '.join(pack.hosts) or 'no host'}, this "
            f"host is {name}; {build}"
            if name in HOSTS
            else f"this host is {name}; packs are built for {' and '.join(HOSTS)}",
            reason="host",
        )
    lacking = sorted(family for host, family in pack.lacking() if host == name)
    if lacking:
        raise PackVersionError(
            f"the pack in {where} has no library of {', '.join(lacking)} for {name}; {build}",
            reason="host",
        )
    there = cpu_flags()
    if there is not None:
        absent = [flag for flag in HOSTS[name].flags if flag not in there]
        if absent:
            raise PackVersionError(
                f"packs for {name} are built for {HOSTS[name].cpu}, and this CPU lacks "
                f"{', '.join(absent)}",
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


def check_installed_tvm_ffi(pack: Manifest) -> None:
    """Refuse a pack whose symbols the installed tvm-ffi lacks; reads its file and opens nothing."""
    wanted = pack.hosts[this_machine()].takes.get(TVM_FFI, ())
    spec = util.find_spec("tvm_ffi")
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / "lib" / TVM_FFI
        if path.is_file():
            there = elf.read(path.read_bytes()).defined
            _refuse_lacking(TVM_FFI, [s for s in wanted if s not in there], path)
            return
    if spec is None:
        raise RuntimeLibraryError(
            f"apache-tvm-ffi is not installed; pip install '{TVM_FFI_REQUIREMENT}'",
            reason="tvm_ffi",
        )


def check_loaded_tvm_ffi(symbols: Iterable[str]) -> None:
    """Refuse a pack whose symbols the process's tvm-ffi lacks.

    The dynamic linker gives a pack the library of that name that is already in the process,
    whichever wheel it came from, so that one is asked.
    """
    tvm_ffi()
    try:
        library = ctypes.CDLL(TVM_FFI, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError as error:
        raise RuntimeLibraryError(
            f"tvm-ffi was imported and {TVM_FFI} is not in the process ({error}); "
            f"pip install '{TVM_FFI_REQUIREMENT}'",
            reason="tvm_ffi",
        ) from error
    lacking = [symbol for symbol in symbols if _address(library, symbol) is None]
    if lacking:
        known = _address(library, "TVMFFIFunctionCall")
        _refuse_lacking(TVM_FFI, lacking, _file_of(known) if known else Path(TVM_FFI))


def _refuse_lacking(library: str, lacking: list[str], path: Path) -> None:
    if lacking:
        raise PackVersionError(
            f"the pack takes {', '.join(lacking)} from {library}, and {path} of apache-tvm-ffi "
            f"{tvm_ffi_version() or 'of an unknown version'} has no such symbol; "
            f"pip install '{TVM_FFI_REQUIREMENT}'",
            reason="tvm_ffi",
        )


@dataclass(frozen=True)
class CudaRuntime:
    """The CUDA runtime that torch is bound to.

    Attributes
    ----------
    path, version
        Its file, and its version as ``cudaRuntimeGetVersion`` says it: 13000 is 13.0.
    functions
        Addresses of the functions that packs call, by name.
    """

    path: Path
    version: int
    functions: Mapping[str, int]


def cuda_runtime(names: Iterable[str]) -> CudaRuntime | None:
    """Functions of torch's own CUDA runtime; None where torch is built without CUDA.

    They are looked up through ``libc10_cuda.so``, torch's own library, and its dependencies: so
    they are of the runtime whose streams and contexts torch uses, whichever others are in the
    process.
    """
    module = torch()
    if module.version.cuda is None:
        return None
    owner = Path(module.__file__ or "").parent / "lib" / "libc10_cuda.so"
    brings = f"torch {module.__version__} (CUDA {module.version.cuda})"
    mends = f"install a torch that is built for CUDA {CUDA_MAJOR}"
    try:
        library = ctypes.CDLL(str(owner))
    except OSError as error:
        raise RuntimeLibraryError(
            f"{brings} has no library to find its CUDA runtime by ({error}); {mends}",
            reason="cuda_runtime",
        ) from error
    asked = _address(library, "cudaRuntimeGetVersion")
    if asked is None:
        raise RuntimeLibraryError(
            f"{brings}: {owner} takes no shared CUDA runtime; {mends}", reason="cuda_runtime"
        )
    path = _file_of(asked)
    version = ctypes.c_int()
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(asked)(ctypes.byref(version))
    spelt = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if version.value // 1000 != CUDA_MAJOR:
        raise PackVersionError(
            f"{brings} is bound to CUDA's runtime {spelt} ({path}), packs need {CUDA_RUNTIME}; "
            f"{mends}",
            reason="cuda_runtime",
        )
    functions = {name: _address(library, name) for name in names}
    lacking = [name for name, address in functions.items() if address is None]
    if lacking:
        raise PackVersionError(
            f"the pack takes {', '.join(lacking)} from {CUDA_RUNTIME}, and {path} of version "
            f"{spelt}, which {brings} is bound to, has no such symbol; {mends}",
            reason="cuda_runtime",
        )
    return CudaRuntime(path, version.value, {n: a for n, a in functions.items() if a is not None})


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(address: int) -> Path:
    """The file that holds an address of this process."""
    for name in (None, "libdl.so.2"):
        try:
            ask = ctypes.CDLL(name).dladdr
        except (OSError, AttributeError):  # glibc before 2.34 has it in libdl
            continue
        info = _DlInfo()
        if ask(ctypes.c_void_p(address), ctypes.byref(info)) and info.file:
            return Path(os.fsdecode(info.file))
    return Path("an unknown file")


def open_library(path: Path, runtime: CudaRuntime | None) -> object:
    """Open one checked library of a pack and hand it the CUDA runtime's functions; returns
    tvm-ffi's module.
    """
    try:
        module: object = tvm_ffi().load_module(str(path))
        library = ctypes.CDLL(str(path))
    except Exception as error:  # tvm-ffi raises classes of its own
        text = " ".join(str(error).split())
        if "undefined symbol" in text:
            raise RuntimeLibraryError(
                f"{path} cannot be opened: {text}. It takes a symbol that its manifest does not "
                "name; build the pack again",
                reason="undefined_symbol",
            ) from error
        hint = (
            "; the file system or a security policy forbids to execute files of it"
            if "failed to map segment" in text or "Operation not permitted" in text
            else ""
        )
        raise RuntimeLibraryError(
            f"{path} cannot be opened: {text}{hint}",
            reason="noexec" if hint else "runtime_library",
        ) from error
    bind(library, runtime.functions if runtime is not None else {})
    if runtime is not None and library.specplan_cuda_unbound():
        raise RuntimeLibraryError(
            f"{path} calls functions of CUDA's runtime that its manifest does not name; build the "
            "pack again",
            reason="undefined_symbol",
        )
    return module


def bind(library: ctypes.CDLL, functions: Mapping[str, int]) -> None:
    """Hand functions of CUDA's runtime to one library of a pack."""
    give = library.specplan_cuda_bind
    give.argtypes, give.restype = [ctypes.c_char_p, ctypes.c_void_p], ctypes.c_int
    for name, address in functions.items():
        give(name.encode(), address)

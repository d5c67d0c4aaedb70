"""One pack under every version of tvm-ffi that a server may have, and beside whatever else of the
compiler is in the process: the same answers to the same calls.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import elf
from specplan.plans.hosts import this_machine
from specplan.plans.manifest import TVM_FFI
from specplan.tools.build import link

from support import packs
from support.shared import Shared

torch = pytest.importorskip("torch")

from answering import answers, calls_of  # noqa: E402  isort: skip

OLDEST = "0.1.11"
CALLS_PER_PLAN = 60


def site_of(shared: Shared, version: str) -> Path:
    """A directory with a version of tvm-ffi, or a skip where no pip fetches it."""
    pip = [sys.executable, "-m", "pip"]
    if packs.run([*pip, "--version"]).returncode != 0:
        if not shutil.which("pip"):
            pytest.skip("no pip to fetch tvm-ffi with")
        pip = ["pip"]

    def fetch(place: Path) -> None:
        python = f"--python-version={sys.version_info[0]}.{sys.version_info[1]}"
        options = ["--quiet", "--only-binary=:all:", python, "--no-deps", "--target", str(place)]
        wanted = f"apache-tvm-ffi=={version}" if version else "apache-tvm-ffi<0.2"
        done = packs.run([*pip, "install", *options, wanted, "typing-extensions"])
        if done.returncode != 0:
            (place / "failed").write_text(done.stderr[-1000:])

    place = shared.made(f"tvm-ffi-{version or 'newest'}", fetch)
    if (place / "failed").exists():
        pytest.skip(f"tvm-ffi {version} cannot be fetched: {(place / 'failed').read_text()}")
    return place


@pytest.fixture(scope="module")
def calls(small_pack: packs.SmallPack) -> list[Any]:
    return [
        call
        for symbol, plan in small_pack.manifest.plans.items()
        for call in calls_of(symbol, plan, CALLS_PER_PLAN)
    ]


@pytest.fixture(scope="module")
def installed(
    small_pack: packs.SmallPack, calls: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The answers under the tvm-ffi that is installed."""
    scratch = tmp_path_factory.mktemp("installed")
    return ask(small_pack, [packs.tree(scratch / "sources")], calls, scratch)


def ask(
    pack: packs.SmallPack, path: list[Path], calls: list[Any], scratch: Path, *first: Path
) -> dict[str, Any]:
    host = this_machine()
    return answers([sys.executable], path, pack.root, host, calls, scratch, *first)


@pytest.mark.parametrize("version", [OLDEST, ""], ids=["oldest", "newest"])
def test_a_pack_answers_the_same_under_every_tvm_ffi(
    small_pack: packs.SmallPack,
    shared: Shared,
    calls: list[Any],
    installed: dict[str, Any],
    tmp_path: Path,
    version: str,
) -> None:
    path = [packs.tree(tmp_path / "sources"), site_of(shared, version)]
    found = ask(small_pack, path, calls, tmp_path)
    assert found["tvm_ffi"].startswith(str(path[1]))
    assert found["empty"] == installed["empty"]
    assert found["answers"] == installed["answers"]
    assert any("launches [" in answer for answer in found["answers"])


def test_the_oldest_tvm_ffi_exports_every_symbol_that_builds_may_take(shared: Shared) -> None:
    library = site_of(shared, OLDEST) / "tvm_ffi" / "lib" / TVM_FFI
    assert elf.read(library.read_bytes()).defined >= link.TVM_FFI_SYMBOLS


ABORTING = """
#include <stdlib.h>
#define F(name) void name(void) { abort(); }
F(_cudaLaunchKernelEx) F(_cudaLibraryLoadData) F(_cudaLibraryGetKernel) F(_cudaGetDevice)
F(_cudaSetDevice) F(_cudaDeviceGetAttribute) F(_cudaKernelSetAttributeForDevice)
F(_cudaFuncSetAttribute) F(_cuKernelGetAttribute) F(cuda_dialect_init_library_once)
F(cuda_dialect_unload_library_once) F(CuteDSLRT_TVMFFISetRaisedCudaError)
F(cudaGetDevice) F(cudaSetDevice) F(cudaLaunchKernelExC) F(cudaLibraryLoadData)
F(cudaLibraryGetKernel) F(cudaGetDeviceCount) F(specplan_cuda_bind) F(specplan_cuda_unbound)
"""


@pytest.mark.parametrize("kind", ["another", "installed"])
def test_a_runtime_library_that_is_loaded_first_is_not_used(
    small_pack: packs.SmallPack,
    calls: list[Any],
    installed: dict[str, Any],
    tmp_path: Path,
    kind: str,
) -> None:
    """A library of the compiler's name whose functions abort, and the compiler's own, both opened
    first and with their symbols in front of everybody's.
    """
    if kind == "another":
        first = tmp_path / "libcute_dsl_runtime.so"
        options = ["-shared", "-fPIC", f"-Wl,-soname,{first.name}", "-o", str(first), "-xc", "-"]
        subprocess.run(["cc", *options], input=ABORTING, text=True, check=True)
    else:
        first = link.static_library(this_machine()).with_name("libcute_dsl_runtime.so")
        if not first.is_file():
            pytest.skip("the compiler's runtime library is not installed")
    path = [packs.tree(tmp_path / "sources")]
    found = ask(small_pack, path, calls, tmp_path, first)
    assert found["first"] == [str(first)]
    assert found["answers"] == installed["answers"]

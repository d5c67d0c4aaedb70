"""Linking: the objects of one family and arch into one shared object, with the same bytes from the
same inputs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib import util
from pathlib import Path

from specplan.tools.build.pool import environment


class LinkError(RuntimeError):
    """The linker, or what it needs, failed; the message holds its output."""


def compiler() -> list[str]:
    """The C compiler that drives the linker: ``$CC``, else ``cc``."""
    return shlex.split(os.environ.get("CC", "cc"))


@lru_cache(maxsize=1)
def linker_version() -> str:
    """First line of the linker's version: other linkers give other bytes."""
    try:
        output = subprocess.run(
            [*compiler(), "-Wl,--version"], capture_output=True, text=True, check=False
        ).stdout
    except OSError as error:
        raise LinkError(f"no C compiler to link with ({error}); install gcc or set CC") from error
    return output.partition("\n")[0].strip() or "unknown linker"


@lru_cache(maxsize=1)
def dsl_library_directory() -> Path:
    """Where ``libcute_dsl_runtime.so`` of the installed compiler lies."""
    spec = util.find_spec("nvidia_cutlass_dsl")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        directory = Path(root) / "cu13" / "lib"
        if (directory / "libcute_dsl_runtime.so").is_file():
            return directory
    raise LinkError(
        "libcute_dsl_runtime.so (cu13) was not found; pip install 'specplan[build]' "
        f"(searched: {', '.join(roots) or 'no nvidia_cutlass_dsl package'})"
    )


@lru_cache(maxsize=1)
def tvm_ffi_library_directory() -> Path:
    """Where ``libtvm_ffi.so`` of the installed apache-tvm-ffi lies; found without importing it."""
    spec = util.find_spec("tvm_ffi")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        directory = Path(root) / "lib"
        if (directory / "libtvm_ffi.so").is_file():
            return directory
    raise LinkError("libtvm_ffi.so was not found; pip install 'specplan[build]'")


def inputs_digest(object_digests: Sequence[str]) -> str:
    """What decides the bytes of a shared object."""
    text = json.dumps([linker_version(), *object_digests])
    return hashlib.sha256(text.encode()).hexdigest()


def link(objects: Sequence[Path], output: Path) -> None:
    """Link objects, in the order given, against the two runtime libraries."""
    command = [
        *compiler(),
        "-shared",
        "-o",
        str(output),
        *map(str, objects),
        f"-L{dsl_library_directory()}",
        "-lcute_dsl_runtime",
        f"-L{tvm_ffi_library_directory()}",
        "-ltvm_ffi",
        "-Wl,--build-id=none",
        "-Wl,-z,relro,-z,now",
        "-s",
    ]
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=english, check=False)
    if done.returncode != 0:
        output.unlink(missing_ok=True)
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, done.stderr.strip())
        raise LinkError(
            f"linking {output.name} failed: {done.stderr.strip() or done.stdout.strip()}"
        )


_X86 = (
    (re.compile(r"%(zmm\d|k[1-7]\b)"), "avx512f"),
    (re.compile(r"%ymm\d"), "avx2"),
    (re.compile(r"\tv[a-z0-9]+ .*%xmm\d"), "avx"),
    (re.compile(r"\tvf(n?m(add|sub))\w* "), "fma"),
    (re.compile(r"\t(sarx|shlx|shrx|rorx|mulx|bzhi|pdep|pext) "), "bmi2"),
    (re.compile(r"\t(andn|blsr|blsi|blsmsk|bextr|tzcnt) "), "bmi1"),
    (re.compile(r"\tlzcnt "), "abm"),
    (re.compile(r"\tpopcnt "), "popcnt"),
    (re.compile(r"\tmovbe "), "movbe"),
)
_ARM = ((re.compile(r"\bz\d+\.[bhsd]"), "sve"),)


def cpu_features(shared: Path) -> tuple[str, ...]:
    """Extensions beyond the baseline that the host code uses, read from its disassembly, sorted."""
    done = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(shared)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise LinkError(f"objdump could not read {shared.name}: {done.stderr.strip()}")
    patterns = _ARM if os.uname().machine == "aarch64" else _X86
    return tuple(sorted(name for pattern, name in patterns if pattern.search(done.stdout)))


_INSPECT = """
import ctypes, json, sys
# tvm-ffi imports torch where there is one, which takes seconds and is not needed here.
sys.modules["torch"] = None
ctypes.CDLL(sys.argv[1])
import tvm_ffi
module = tvm_ffi.load_module(sys.argv[2])
found = {}
for symbol in json.load(sys.stdin):
    try:
        module.get_function(symbol)()
    except TypeError as error:
        found[symbol] = str(error)
json.dump(found, sys.stdout)
"""


def signatures(shared: Path, symbols: Sequence[str]) -> dict[str, str]:
    """The signature text of every function, from the shared object itself.

    Each function is called without arguments, which it refuses with its own signature before it
    touches CUDA. That also shows that the object loads and holds every function.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _INSPECT,
            str(dsl_library_directory() / "libcute_dsl_runtime.so"),
            str(shared),
        ],
        input=json.dumps(list(symbols)),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if done.returncode != 0:
        raise LinkError(f"{shared.name} does not load: {done.stderr.strip()[-2000:]}")
    found: dict[str, str] = json.loads(done.stdout)
    texts = {}
    for symbol in symbols:
        match = re.search(r"`(.*)`", found.get(symbol, ""), re.DOTALL)
        if match is None:
            raise LinkError(
                f"{shared.name}: {symbol} did not refuse an empty call with its signature"
            )
        texts[symbol] = " ".join(match[1].split())
    return texts

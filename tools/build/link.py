"""Linking: the objects of one family, arch and host into one shared object, with the same bytes
from the same inputs.

A library needs ``libtvm_ffi.so`` and libc, and no compiler package. What the compiler's objects
call of its runtime comes out of the static library in its wheel; the functions of CUDA's runtime
under that are forwarded to addresses that the loader hands over (``cuda_functions.c``). Everything
that is linked in stays hidden.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path

from specplan.plans import elf
from specplan.plans.hosts import Host, this_machine
from specplan.plans.manifest import CUDA_RUNTIME, TVM_FFI, write_atomically
from specplan.tools.build.pool import environment

#: The newest glibc that a library may need: manylinux_2_28.
GLIBC = (2, 28)
#: Symbols of tvm-ffi that its oldest promised version, 0.1.11, exports and the compiler's objects
#: call. A build that needs another one is refused until somebody has looked.
TVM_FFI_SYMBOLS = frozenset(
    {"TVMFFIEnvGetStream", "TVMFFIErrorSetRaisedFromCStr", "TVMFFIErrorSetRaisedFromCStrParts"}
)
_WHEEL = "nvidia-cutlass-dsl-libs-cu13"
_ARCHIVE = "libcuda_dialect_runtime_static.a"
_IN_WHEEL = f"nvidia_cutlass_dsl/cu13/lib/{_ARCHIVE}"
_OURS = Path(__file__).with_name("cuda_functions.c")
_OWN_SYMBOLS = frozenset({"CuteDSLRT_TVMFFISetRaisedCudaError"})
_EXPORTED = ("__tvm_ffi_", "specplan_cuda_")


class LinkError(RuntimeError):
    """The linker, or what it needs, failed; the message holds its output."""


def compiler(host: str) -> list[str]:
    """The C compiler that links for a host: ``$CC_<host>``; for this machine ``$CC``, else ``cc``;
    the distribution's cross compiler; ziglang from the index.
    """
    named = os.environ.get(f"CC_{host}") or (
        os.environ.get("CC", "") if host == this_machine() else ""
    )
    if named:
        return shlex.split(named)
    for name in (*(("cc",) if host == this_machine() else ()), f"{host}-linux-gnu-gcc"):
        if shutil.which(name):
            return [name]
    if util.find_spec("ziglang") is not None:
        target = f"{host}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
        return [sys.executable, "-m", "ziglang", "cc", "-target", target]
    if host == this_machine():
        raise LinkError("no C compiler to link with; install gcc or set CC")
    raise LinkError(
        f"no C compiler that links for {host}: pip install 'specplan[cross]', or install "
        f"gcc-{host.replace('_', '-')}-linux-gnu, or set CC_{host}"
    )


@cache
def linker_version(host: str) -> str:
    """The compiler and the linker behind it: others give other bytes."""
    found = []
    for option in ("--version", "-Wl,--version"):
        try:
            done = subprocess.run(
                [*compiler(host), option], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise LinkError(f"{compiler(host)[0]} does not run ({error}); set CC") from error
        line = done.stdout.partition("\n")[0].strip()
        if line and line not in found:
            found.append(line)
    return ", ".join(found) or "unknown linker"


@cache
def static_library(host: str) -> Path:
    """The compiler's static runtime library for a host: out of its installed wheel, or for another
    host out of that host's wheel of the same version, which pip fetches once.
    """
    if host == this_machine():
        spec = util.find_spec("nvidia_cutlass_dsl")
        roots = list(spec.submodule_search_locations or []) if spec else []
        for root in roots:
            path = Path(root) / "cu13" / "lib" / _ARCHIVE
            if path.is_file():
                return path
        raise LinkError(
            f"{_ARCHIVE} (cu13) was not found; pip install 'specplan[build]' "
            f"(searched: {', '.join(roots) or 'no nvidia_cutlass_dsl package'})"
        )
    try:
        version = metadata.version(_WHEEL).partition("+")[0]
    except metadata.PackageNotFoundError as error:
        raise LinkError(f"{_WHEEL} is not installed; pip install 'specplan[build]'") from error
    kept = _cache() / f"{_WHEEL}-{version}-{host}" / _ARCHIVE
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, _from_wheel(version, host, kept))
    return kept


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specplan"


def _from_wheel(version: str, host: str, kept: Path) -> bytes:
    """The static library out of another host's wheel, as the user's pip is configured to get it."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", scratch]
        command += [f"--platform=manylinux_{GLIBC[0]}_{GLIBC[1]}_{host}"]
        done = subprocess.run(
            [*command, f"{_WHEEL}=={version}"], capture_output=True, text=True, check=False
        )
        wheels = sorted(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise LinkError(
                f"linking for {host} needs {_ARCHIVE} of {_WHEEL} {version} for {host}, which pip "
                f"could not fetch: {(done.stderr or done.stdout).strip()[-600:]}\nBuild for this "
                f"machine alone with --host {this_machine()}, or put the file at {kept}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            return wheel.read(_IN_WHEEL)


def inputs_digest(host: Host, object_digests: Sequence[str]) -> str:
    """What decides the bytes of a shared object."""
    library = hashlib.sha256(static_library(host.name).read_bytes()).hexdigest()
    ours = hashlib.sha256(_OURS.read_bytes()).hexdigest()
    parts = [host.triple, host.cpu, linker_version(host.name), library, ours, *object_digests]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Taken:
    """The symbols that a library takes from outside, sorted."""

    cuda: tuple[str, ...]
    tvm_ffi: tuple[str, ...]

    def by_library(self) -> dict[str, tuple[str, ...]]:
        return {CUDA_RUNTIME: self.cuda, TVM_FFI: self.tvm_ffi}


def taken_by(objects: Iterable[bytes], library: bytes) -> Taken:
    """What objects and the members of the static library that they pull in take from outside."""
    members = [elf.read(body) for _, body in elf.members(library)]
    where = {symbol: member for member in members for symbol in member.defined}
    read = [elf.read(body) for body in objects]
    given = {symbol for each in read for symbol in each.defined} | _OWN_SYMBOLS
    todo = {symbol for each in read for symbol in each.undefined} - given
    outside: set[str] = set()
    while todo:
        symbol = todo.pop()
        member = where.get(symbol)
        if member is None:
            outside.add(symbol)
            continue
        given |= member.defined
        todo |= member.undefined - given - outside
        todo -= given
    cuda = {symbol for symbol in outside if re.match(r"cu(da)?[A-Z]", symbol)}
    tvm_ffi = {symbol for symbol in outside if symbol.startswith("TVMFFI")}
    unknown = tvm_ffi - TVM_FFI_SYMBOLS
    if unknown:
        raise LinkError(
            f"the objects call {', '.join(sorted(unknown))} of tvm-ffi, which its oldest promised "
            "version is not known to have"
        )
    return Taken(tuple(sorted(cuda)), tuple(sorted(tvm_ffi)))


def _source(taken: Taken) -> str:
    """``cuda_functions.c`` for the functions that are called."""
    texts = ("cudaGetErrorName", "cudaGetErrorString")
    listed = " ".join(
        f"F({index}, {name}, {'no_cuda_text' if name in texts else 'no_cuda'})"
        for index, name in enumerate(taken.cuda)
    )
    head = f"#define COUNT {len(taken.cuda)}\n#define FUNCTIONS(F) {listed}\n"
    return head + _OURS.read_text(encoding="utf-8")


def link(host: Host, objects: Sequence[Path], output: Path) -> Taken:
    """Link objects, in the order given, and check what the result takes and gives."""
    library = static_library(host.name)
    taken = taken_by((path.read_bytes() for path in objects), library.read_bytes())
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        ours, exports = scratch / "cuda_functions.c", scratch / "exports"
        ours.write_text(_source(taken), encoding="utf-8")
        exports.write_text(
            f"{{ global: {' '.join(f'{name}*;' for name in _EXPORTED)} local: *; }};"
        )
        stub, named = scratch / "stub.c", scratch / TVM_FFI
        stub.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(TVM_FFI_SYMBOLS)))
        common = ["-shared", "-fPIC", "-O2", "-fno-sanitize=all", "-fno-stack-protector"]
        common += ["-Wl,--build-id=none", "-s"]
        _run(host, [*common, "-nostdlib", str(stub), f"-Wl,-soname,{TVM_FFI}"], named, output.name)
        _run(
            host,
            [
                *common,
                *map(str, objects),
                *(str(ours), str(library), str(named)),
                *("-Wl,-z,relro,-z,now", "-Wl,-z,defs", f"-Wl,--version-script={exports}"),
            ],
            output,
            output.name,
        )
    try:
        check(host, output.read_bytes(), taken)
    except LinkError:
        output.unlink()
        raise
    return taken


def _run(host: Host, arguments: Sequence[str], output: Path, name: str) -> None:
    command = [*compiler(host.name), *arguments, "-o", str(output)]
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=english, check=False)
    if done.returncode != 0:
        output.unlink(missing_ok=True)
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, done.stderr.strip())
        raise LinkError(f"linking {name} failed: {done.stderr.strip() or done.stdout.strip()}")


def check(host: Host, data: bytes, taken: Taken) -> None:
    """Refuse a library that takes or gives anything that packs do not promise."""
    found = elf.read(data)
    wrong = []
    if found.machine != elf.MACHINES[host.name]:
        wrong.append(f"it is for machine {found.machine}")
    if further := set(found.needed) - {TVM_FFI, "libc.so.6"}:
        wrong.append(f"it needs {', '.join(sorted(further))}")
    if {s for s in found.undefined if s.startswith("TVMFFI")} != set(taken.tvm_ffi):
        wrong.append("it takes other symbols from tvm-ffi than its objects")
    if cuda := [s for s in found.undefined if re.match(r"_?cu(da)?[A-Z_]|CuteDSL", s)]:
        wrong.append(f"it leaves {', '.join(sorted(cuda))} undefined")
    if given := [s for s in found.defined if not s.startswith(_EXPORTED)]:
        wrong.append(f"it exports {', '.join(sorted(given)[:5])}")
    for version in sorted(v for versions in found.versions.values() for v in versions):
        numbers = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) > GLIBC:
            wrong.append(f"it needs {version}")
    if wrong:
        raise LinkError(
            f"the library for {host.name} is not what packs promise: {'; '.join(wrong)}"
        )


_INSPECT = """
import json, sys
# tvm-ffi imports torch where there is one, which takes seconds and is not needed here.
sys.modules["torch"] = None
import tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
found = {}
for symbol in json.load(sys.stdin):
    try:
        module.get_function(symbol)()
    except TypeError as error:
        found[symbol] = str(error)
json.dump(found, sys.stdout)
"""


def check_functions(host: Host, shared: Path, signatures: dict[str, str]) -> None:
    """Refuse a library that lacks a function; where this machine can run it, one whose function
    does not refuse an empty call with its signature.
    """
    exported = elf.read(shared.read_bytes()).defined
    lacking = [symbol for symbol in signatures if f"__tvm_ffi_{symbol}" not in exported]
    if lacking:
        raise LinkError(f"{shared.name} lacks {', '.join(lacking)}")
    if host.name != this_machine():
        return
    done = subprocess.run(
        [sys.executable, "-c", _INSPECT, str(shared)],
        input=json.dumps(list(signatures)),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if done.returncode != 0:
        raise LinkError(f"{shared.name} does not load: {done.stderr.strip()[-2000:]}")
    found: dict[str, str] = json.loads(done.stdout)
    for symbol, text in signatures.items():
        match = re.search(r"`(.*)`", found.get(symbol, ""), re.DOTALL)
        if match is None or " ".join(match[1].split()) != text:
            raise LinkError(
                f"{shared.name}: {symbol} did not refuse an empty call with its signature"
            )

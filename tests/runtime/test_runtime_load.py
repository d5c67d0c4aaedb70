"""Loading packs: every way in which it can fail is one error that names the cause and the way out,
before anything is mapped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import library, loading  # noqa: E402
from specplan.plans import certificates, evidence, locations, manifest  # noqa: E402
from specplan.plans.hosts import HOSTS, this_machine  # noqa: E402
from specplan.plans.manifest import ObjectRecord  # noqa: E402


def load(root: Path, **named: Any) -> specplan.Pack:
    return specplan.load(root, arch=packs.ARCH, **named)


def refusal(kind: type[specplan.SpecplanError], root: Path, **named: Any) -> specplan.SpecplanError:
    with pytest.raises(kind) as caught:
        load(root, **named)
    assert type(caught.value) is kind
    return caught.value


@pytest.fixture
def copied(small_pack: packs.SmallPack, tmp_path: Path) -> Path:
    """A copy of the small pack to spoil."""
    root = tmp_path / "pack"
    shutil.copytree(small_pack.directory, root / packs.ARCH)
    return root


def in_process(script: str, *arguments: str | Path, **env: str) -> Any:
    """What a script prints as JSON, from a process of its own."""
    done = packs.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={"PYTHONDONTWRITEBYTECODE": "1", **env},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# No pack


def test_no_pack_names_every_place_the_archs_found_and_the_command(
    small_pack: packs.SmallPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A checkout that these tests run in has packs of its own.
    monkeypatch.setattr(locations, "checkout_directory", lambda: None)
    monkeypatch.setenv(locations.ENVIRONMENT, str(small_pack.root))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(specplan.PackNotFoundError) as caught:
        specplan.load(arch="sm_100a")
    text = str(caught.value)
    assert caught.value.reason == "pack_not_found"
    for place in (small_pack.root, locations.packaged_directory(), tmp_path / "specplan" / "packs"):
        assert str(place) in text
    assert "no pack for sm_100a" in text
    assert "Archs found: sm_90a" in text
    assert "specplan build --arch sm_100a" in text


def test_a_path_is_the_only_place_searched(
    small_pack: packs.SmallPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(locations.ENVIRONMENT, str(small_pack.root))
    text = str(refusal(specplan.PackNotFoundError, tmp_path))
    assert str(tmp_path) in text
    assert str(small_pack.root) not in text
    assert "Archs found: none" in text


def test_the_first_place_that_has_the_arch_wins(
    small_pack: packs.SmallPack, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A checkout that these tests run in has packs of its own.
    monkeypatch.setattr(locations, "checkout_directory", lambda: None)
    monkeypatch.setenv(locations.ENVIRONMENT, str(small_pack.root))
    monkeypatch.setenv("XDG_DATA_HOME", str(copied.parent))
    assert str(small_pack.directory) in repr(specplan.load(arch=packs.ARCH))
    user = copied.parent / "specplan" / "packs"
    user.parent.mkdir()
    copied.rename(user)
    monkeypatch.setenv(locations.ENVIRONMENT, str(copied.parent / "nothing"))
    assert str(user) in repr(specplan.load(arch=packs.ARCH))


def test_a_pack_directory_is_as_good_as_the_directory_of_packs(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    assert load(small_pack.directory).archs == load(small_pack.root).archs == (packs.ARCH,)
    renamed = tmp_path / "by-another-name"
    shutil.copytree(small_pack.directory, renamed)
    assert load(renamed).archs == (packs.ARCH,)


def test_without_a_device_and_an_arch_there_is_nothing_to_load(
    small_pack: packs.SmallPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(specplan.NoDeviceError) as caught:
        specplan.load(small_pack.root)
    assert caught.value.reason == "no_device"
    assert "specplan.load(arch='sm_90a')" in str(caught.value)


def test_without_an_arch_the_packs_of_the_visible_devices_are_loaded(
    small_pack: packs.SmallPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(9, 0), (10, 0), (9, 0)][i])
    assert loading.visible_archs() == ["sm_90a", "sm_100a"]
    assert specplan.load(small_pack.root).archs == ("sm_90a",)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (10, 0))
    with pytest.raises(specplan.PackNotFoundError, match=r"no pack for sm_100a.*found: sm_90a"):
        specplan.load(small_pack.root)


# Corrupt files

SPOIL = """
import json, os, sys
from pathlib import Path
import specplan
root, file = Path(sys.argv[1]), Path(sys.argv[2])
whole, answers = file.read_bytes(), []
middle = len(whole) // 2
flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1:]
cuts = [0, 1, 64, 4096, middle, len(whole) - 4096, len(whole) - 1]
for data in [*(whole[:cut] for cut in cuts), whole + b"x", flipped, None]:
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    try:
        specplan.load(root, arch="sm_90a")
        error = None
    except specplan.SpecplanError as caught:
        error = caught
    mapped = str(root) in Path("/proc/self/maps").read_text()
    answers.append([type(error).__name__, getattr(error, "reason", ""), str(error), mapped])
file.write_bytes(whole)
specplan.load(root, arch="sm_90a")
print(json.dumps([answers, str(root) in Path("/proc/self/maps").read_text()]))
"""


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_a_spoilt_library_is_refused_before_anything_is_mapped(
    small_pack: packs.SmallPack, copied: Path, family: str
) -> None:
    """Truncated at several lengths, grown, one bit flipped, absent. A truncated library kills a
    process that maps it.
    """
    record = small_pack.manifest.objects[family]
    answers, mapped_when_whole = in_process(SPOIL, copied, copied / packs.ARCH / record.file)
    assert mapped_when_whole
    assert len(answers) == 10
    for kind, reason, text, mapped in answers:
        assert (kind, reason, mapped) == ("PackCorruptError", "pack_corrupt", False)
        assert record.file in text
        assert f"specplan build --arch {packs.ARCH} --out {copied}" in text
    assert f"has {record.size - 1} bytes, the manifest says {record.size}" in answers[6][2]
    assert "has sha256" in answers[8][2]
    assert "cannot be read (No such file or directory)" in answers[9][2]


def test_an_edited_manifest_is_corrupt(copied: Path) -> None:
    path = copied / packs.ARCH / manifest.NAME
    text = path.read_text()
    assert '"certified": false' in text
    path.write_text(text.replace('"certified": false', '"certified": true'))
    error = refusal(specplan.PackCorruptError, copied)
    assert error.reason == "manifest_edited"
    assert str(path) in str(error)
    assert "build the pack again" in str(error)


@pytest.mark.parametrize("text", ["", "{", "[]", "\0", '{"schema": 2, "digest": 5}', "[" * 100_000])
def test_a_manifest_that_is_none_is_corrupt(copied: Path, text: str) -> None:
    (copied / packs.ARCH / manifest.NAME).write_text(text)
    error = refusal(specplan.PackCorruptError, copied)
    assert error.reason in ("manifest_unreadable", "manifest_edited", "pack_version")
    assert "build the pack again" in str(error)


@pytest.mark.parametrize("length", [1, 100, 4000, -1])
def test_a_truncated_manifest_is_corrupt(copied: Path, length: int) -> None:
    path = copied / packs.ARCH / manifest.NAME
    path.write_bytes(path.read_bytes().rstrip()[:length])
    assert refusal(specplan.PackCorruptError, copied).reason == "manifest_unreadable"


def test_a_manifest_that_is_whole_but_lacks_a_field_is_corrupt(copied: Path) -> None:
    path = copied / packs.ARCH / manifest.NAME
    body = json.loads(path.read_text())
    del body["plans"]
    path.write_text(manifest.sealed(body))
    error = refusal(specplan.PackCorruptError, copied)
    assert error.reason == "manifest_unreadable"
    assert "'plans'" in str(error)


def test_a_pack_without_its_manifest_is_not_found(copied: Path) -> None:
    directory = copied / packs.ARCH
    (directory / manifest.NAME).unlink()
    for root in (copied, directory):
        text = str(refusal(specplan.PackNotFoundError, root))
        assert f"{directory} holds libraries and no manifest.json" in text
        assert "specplan build --arch sm_90a" in text


def test_a_pack_of_another_arch_is_refused_with_both_archs(copied: Path) -> None:
    """The manifest says sm_100a, in a folder that says sm_90a; and a pack named by itself."""
    packs.rewrite(copied / packs.ARCH, arch="sm_100a", capability=(10, 0))
    error = refusal(specplan.PackCorruptError, copied)
    assert error.reason == "manifest_arch"
    assert f"{copied / packs.ARCH} holds a pack for sm_100a, not for sm_90a" in str(error)
    assert "specplan build --arch sm_90a" in str(error)
    text = str(refusal(specplan.PackNotFoundError, copied / packs.ARCH))
    assert "no pack for sm_90a" in text
    assert "Archs found: sm_100a" in text


def test_a_newer_schema_is_a_version_error(copied: Path) -> None:
    path = copied / packs.ARCH / manifest.NAME
    body = {**json.loads(path.read_text()), "schema": manifest.SCHEMA + 1}
    path.write_text(json.dumps(body))
    error = refusal(specplan.PackVersionError, copied)
    assert error.reason == "schema"
    assert f"a newer version of specplan (schema {manifest.SCHEMA + 1}" in str(error)


# Other hosts and versions


def test_a_pack_for_another_host_is_refused(copied: Path) -> None:
    hosts = {"riscv64": manifest.read(copied / packs.ARCH).hosts[this_machine()]}
    packs.rewrite(copied / packs.ARCH, hosts=hosts)
    error = refusal(specplan.PackVersionError, copied)
    assert error.reason == "host"
    assert f"has libraries for riscv64, this host is {this_machine()}" in str(error)
    assert f"specplan build --arch {packs.ARCH} --host {this_machine()} --out {copied}" in str(
        error
    )


def test_a_pack_whose_host_lacks_a_family_is_refused(copied: Path) -> None:
    """The plans and another host's libraries are there: no call may find out later."""
    hosts = dict(manifest.read(copied / packs.ARCH).hosts)
    whole = hosts[this_machine()]
    part = {name: record for name, record in whole.objects.items() if name != "gather"}
    hosts[this_machine()] = dataclasses.replace(whole, objects=part)
    packs.rewrite(copied / packs.ARCH, hosts={**hosts, "riscv64": whole})
    error = refusal(specplan.PackVersionError, copied)
    assert error.reason == "host"
    assert f"has no library of gather for {this_machine()}" in str(error)


@pytest.mark.parametrize("installed", ["0.1.11", "0.1.14", "0.1.15.post2+local", "0.2.0", "9"])
def test_a_tvm_ffi_of_any_version_that_has_the_symbols_is_used(
    copied: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    tools = {**manifest.read(copied / packs.ARCH).tools, "apache-tvm-ffi": "0.1.12"}
    packs.rewrite(copied / packs.ARCH, tools=tools)
    monkeypatch.setattr(library.tvm_ffi(), "__version__", installed)
    monkeypatch.setattr(library.metadata, "version", lambda name: installed)
    assert load(copied).archs == (packs.ARCH,)
    assert library.is_tried(installed) == (installed in ("0.1.11", "0.1.15.post2+local"))


def test_a_symbol_that_tvm_ffi_lacks_is_named_with_the_file_and_its_version(copied: Path) -> None:
    """Before anything of the pack is opened, whether the file is asked or the process."""
    hosts = dict(manifest.read(copied / packs.ARCH).hosts)
    mine = hosts[this_machine()]
    takes = {**mine.takes, manifest.TVM_FFI: ("TVMFFIEnvGetStream", "TVMFFIFromTheFuture")}
    hosts[this_machine()] = dataclasses.replace(mine, takes=takes)
    packs.rewrite(copied / packs.ARCH, hosts=hosts)
    version = metadata.version("apache-tvm-ffi")
    file = Path(library.tvm_ffi().__file__ or "").parent / "lib" / manifest.TVM_FFI
    for error in (
        refusal(specplan.PackVersionError, copied),
        caught(lambda: library.check_loaded_tvm_ffi(takes[manifest.TVM_FFI])),
    ):
        assert error.reason == "tvm_ffi"
        assert "takes TVMFFIFromTheFuture from libtvm_ffi.so" in str(error)
        assert str(file) in str(error)
        assert f"apache-tvm-ffi {version}" in str(error)
        assert "pip install 'apache-tvm-ffi>=0.1.11,<0.2'" in str(error)


def caught(act: Callable[[], object]) -> specplan.SpecplanError:
    with pytest.raises(specplan.SpecplanError) as found:
        act()
    return found.value


def test_a_cpu_that_lacks_what_its_host_promises_is_refused_by_name(
    small_pack: packs.SmallPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = HOSTS["x86_64"].flags
    monkeypatch.setattr(library, "this_machine", lambda: "x86_64")
    pack = dataclasses.replace(
        small_pack.manifest, hosts={"x86_64": next(iter(small_pack.manifest.hosts.values()))}
    )
    for lacking in flags:
        monkeypatch.setattr(library, "cpu_flags", lambda gone=lacking: {*flags} - {gone})
        error = caught(lambda: library.check_host(pack, small_pack.directory))
        assert error.reason == "cpu"
        assert f"built for x86-64-v2, and this CPU lacks {lacking}" in str(error)
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(flags))
    library.check_host(pack, small_pack.directory)
    # A system that does not say what its CPU has is trusted.
    monkeypatch.setattr(library, "cpu_flags", lambda: None)
    library.check_host(pack, small_pack.directory)


def test_a_missing_tvm_ffi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    library.tvm_ffi.cache_clear()
    try:
        with pytest.raises(specplan.RuntimeLibraryError, match="pip install 'apache-tvm-ffi"):
            library.tvm_ffi()
    finally:
        library.tvm_ffi.cache_clear()


WITHOUT = """
import json, sys
sys.modules[sys.argv[2]] = None
import specplan
from specplan import loading
from pathlib import Path
answers = []
try:
    specplan.load(sys.argv[1], arch="sm_90a")
except specplan.SpecplanError as error:
    answers = [type(error).__name__, error.reason, str(error)]
print(json.dumps(answers))
"""


def test_a_missing_torch_is_named_and_tools_can_ask_without_one(
    small_pack: packs.SmallPack,
) -> None:
    kind, reason, text = in_process(WITHOUT, small_pack.root, "torch")
    assert (kind, reason) == ("RuntimeLibraryError", "torch")
    assert "torch cannot be imported" in text
    assert "pip install torch" in text
    asked = (
        "import sys, json; sys.modules['torch'] = None; from pathlib import Path; "
        "from specplan.loading import refusal; "
        "print(json.dumps(refusal(Path(sys.argv[1]), 'sm_90a')))"
    )
    assert in_process(asked, small_pack.directory) is None


@pytest.mark.parametrize("arch", [["sm_90a"], ("sm_90a", "sm_100a"), 90, b"sm_90a"])
def test_an_arch_that_is_no_name_is_refused(small_pack: packs.SmallPack, arch: Any) -> None:
    error = caught(lambda: specplan.load(small_pack.root, arch=arch))
    assert error.reason == "argument"
    assert f"arch is one name such as 'sm_90a', not {arch!r}" in str(error)


def test_a_path_that_is_none_is_refused() -> None:
    error = caught(lambda: specplan.load(90, arch="sm_90a"))  # type: ignore[arg-type]
    assert (error.reason, "not 90" in str(error)) == ("argument", True)


# File systems


def replaced(directory: Path, family: str, library: Path) -> None:
    """Put another library in the place of a pack's, described as it is."""
    pack = manifest.read(directory)
    mine = pack.hosts[this_machine()]
    data = library.read_bytes()
    record = ObjectRecord(library.name, len(data), sha256(data).hexdigest(), "")
    (directory / library.name).write_bytes(data)
    objects = {**mine.objects, family: record}
    hosts = {**pack.hosts, this_machine(): dataclasses.replace(mine, objects=objects)}
    packs.rewrite(directory, hosts=hosts)


def test_a_library_with_an_undefined_symbol_is_named_with_it(copied: Path, tmp_path: Path) -> None:
    source, made = tmp_path / "made.c", tmp_path / "scatter-made.so"
    source.write_text(
        "extern int nobody_has_this(void);\nint f(void) { return nobody_has_this(); }"
    )
    command = ["cc", "-shared", "-fPIC", "-Wl,-z,now", "-o", str(made), str(source)]
    subprocess.run(command, check=True)
    replaced(copied / packs.ARCH, "scatter", made)
    error = refusal(specplan.RuntimeLibraryError, copied)
    assert error.reason == "undefined_symbol"
    assert "nobody_has_this" in str(error)
    assert made.name in str(error)


def test_a_library_that_is_none_is_named(copied: Path, tmp_path: Path) -> None:
    made = tmp_path / "scatter-made.so"
    made.write_bytes(b"no library" * 1000)
    replaced(copied / packs.ARCH, "scatter", made)
    error = refusal(specplan.RuntimeLibraryError, copied)
    assert error.reason == "runtime_library"
    assert f"{copied / packs.ARCH / made.name} cannot be opened" in str(error)


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path]:
    """A file system that forbids to execute what is on it."""
    place = tmp_path / "noexec"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "noexec,size=16m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount command ({error})")
    if done.returncode != 0:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    yield place
    # Lazily: what the test opened from it may be there until the process ends.
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_noexec_mount_is_named_before_and_while_opening(
    small_pack: packs.SmallPack, noexec: Path
) -> None:
    directory = noexec / packs.ARCH
    shutil.copytree(small_pack.directory, directory)
    error = refusal(specplan.RuntimeLibraryError, noexec)
    assert error.reason == "noexec"
    assert f"{directory} is on a file system that is mounted noexec" in str(error)
    assert "SPECPLAN_PACKS" in str(error)
    record = small_pack.manifest.objects["scatter"]
    opening = caught(lambda: library.open_library(directory / record.file, None))
    assert opening.reason == "noexec"
    assert "forbids to execute" in str(opening)


def test_a_noexec_mount_is_seen_without_one(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where no test may mount: what the system says of the file system decides."""
    real = os.statvfs

    def told(path: Any) -> Any:
        found = real(path)
        return SimpleNamespace(f_flag=found.f_flag | os.ST_NOEXEC)

    monkeypatch.setattr(os, "statvfs", told)
    assert refusal(specplan.RuntimeLibraryError, copied).reason == "noexec"


AS_NOBODY = """
import json, os, sys
import specplan
from specplan import library, loading, pack
from specplan.plans import locations
locations.checkout_directory = lambda: None
library.tvm_ffi()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    specplan.load(sys.argv[1] or None, arch="sm_90a")
    answer = ["loaded", "", ""]
except specplan.SpecplanError as error:
    answer = [type(error).__name__, error.reason, str(error)]
print(json.dumps(answer))
"""


@pytest.mark.parametrize("closed", ["root", "directory", "manifest", "library"])
@pytest.mark.parametrize("named", [True, False])
def test_what_this_user_may_not_read_is_named_and_not_missing(
    small_pack: packs.SmallPack, closed: str, named: bool
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        root = Path(scratch, "packs")
        shutil.copytree(small_pack.directory, root / packs.ARCH)
        record = small_pack.manifest.objects["scatter"]
        path = {
            "root": root,
            "directory": root / packs.ARCH,
            "manifest": root / packs.ARCH / manifest.NAME,
            "library": root / packs.ARCH / record.file,
        }[closed]
        answer = ("loaded", "", "")
        before = path.stat().st_mode
        # An owner who is not root is kept out by no bits at all.
        for mode in (before, 0o700 if os.geteuid() == 0 and path.is_dir() else 0):
            path.chmod(mode)
            env = {"SPECPLAN_PACKS": "" if named else str(root), "XDG_DATA_HOME": scratch}
            answer = tuple(in_process(AS_NOBODY, str(root) if named else "", **env))
            if mode == before:
                assert answer == ("loaded", "", "")
        path.chmod(before)
        kind, reason, text = answer
        assert (kind, reason) == ("PackNotFoundError", "unreadable")
        assert f"{path} cannot be read by uid" in text
        assert "Permission denied" in text
        assert "chmod -R a+rX" in text
        assert "specplan build" not in text


# What loading does and does not do

CLEAN = """
import json, os, sys
class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "cutlass_dsl"):
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, NoCompiler())
import torch
wrote = []
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = flags is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and path != os.devnull:
            wrote.append([event, str(path)])
    elif event.startswith(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link",
    "os.symlink", "shutil.", "tempfile.")):
        wrote.append([event, str(arguments)])
    elif event.startswith(("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn",
    "socket.connect")):
        wrote.append([event, str(arguments)])
sys.addaudithook(watch)
import specplan
pack = specplan.load(sys.argv[1], arch="sm_90a")
picked = pack.scatter.pick(requests=2, tokens=3, problem="mtp3")
open(sys.argv[2], "w").close()
print(json.dumps([wrote, picked.plan.symbol, "yaml" in sys.modules, torch.cuda.is_initialized()]))
"""


def test_loading_needs_no_compiler_and_no_yaml_and_writes_nothing(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    before = packs.contents(small_pack.root)
    canary = tmp_path / "canary"
    wrote, symbol, yaml, initialized = in_process(CLEAN, small_pack.root, canary)
    # The last write is the script's own: the hook sees writes.
    assert wrote == [["open", str(canary)]]
    assert symbol in small_pack.manifest.plans
    assert not yaml
    assert not initialized
    assert packs.contents(small_pack.root) == before


def test_a_pack_replaced_on_disk_works_on_while_a_new_load_sees_the_new_one(
    copied: Path, tmp_path: Path
) -> None:
    pack = load(copied)
    old = pack.manifest()
    directory = copied / packs.ARCH
    function = pack.scatter.pick(requests=1, tokens=1, problem="mtp3").function
    for record in old.objects.values():
        (directory / record.file).unlink()
    bare = {name: dataclasses.replace(r, objects={}) for name, r in old.hosts.items()}
    packs.rewrite(directory, version="0.0.1", hosts=bare, plans={}, groups=())
    # The function still runs its own checks, and the pack its own table.
    with pytest.raises(TypeError, match="scatter"):
        function()
    assert pack.manifest() == old
    assert pack.gather.pick(requests=1, tokens=2, problem="mtp3")
    assert load(copied).manifest().version == "0.0.1"
    assert not load(copied).scatter.pick(requests=1, tokens=1, problem="mtp3")


def test_importing_specplan_reads_no_pack_and_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys, json; sys.modules['torch'] = None; import specplan; "
        "names = ('yaml', 'tvm_ffi', 'cutlass', 'click'); "
        "print(json.dumps([n for n in names if n in sys.modules]))"
    )
    assert in_process(script, SPECPLAN_PACKS=str(tmp_path)) == []


def test_every_error_is_a_specplan_error_with_a_reason_of_its_own() -> None:
    kinds = [
        getattr(specplan, name)
        for name in specplan.__all__
        if name.endswith("Error") and name != "SpecplanError"
    ]
    assert len(kinds) == 10
    assert all(issubclass(kind, specplan.SpecplanError) for kind in kinds)
    assert len({kind.reason for kind in kinds} | {"error"}) == len(kinds) + 1
    assert os.environ.get("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1") == "1"


# Marks and evidence


@pytest.fixture
def alone(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the small pack, and an installation without certificates: the committed ones cover
    the small pack's bits, too.
    """
    monkeypatch.setattr(evidence, "default_directory", lambda: tmp_path / "nowhere")
    return copied


def test_marks_without_a_certificate_do_not_run(alone: Path) -> None:
    """The certificate beside the pack is gone; its marks are all there."""
    directory = alone / packs.ARCH
    shutil.rmtree(directory / "certificates")
    with pytest.warns(specplan.PackWarning, match="certified that no certificate backs") as caught:
        pack = specplan.load(alone, arch=packs.ARCH)
    assert f"`specplan mark {directory}`" in str(caught[0].message)
    assert not any(group.certified for _, group in pack.manifest().cells())
    answer = pack.scatter.pick(requests=2, tokens=3, problem="mtp3")
    assert not answer
    assert answer.reason is specplan.Reason.CANDIDATE
    assert f"`specplan mark {directory}`" in str(answer)
    assert list(answer.nearest) == []
    with pytest.warns(specplan.PackWarning):
        willing = specplan.load(alone, arch=packs.ARCH, candidates=True)
    picked = willing.scatter.pick(requests=2, tokens=3, problem="mtp3")
    assert picked and not picked.certified


def test_marks_that_somebody_set_do_not_run(alone: Path) -> None:
    """Every cell is marked, with the manifest's digest; requests 5 have no evidence."""
    directory = alone / packs.ARCH
    old = manifest.read(directory)
    every = manifest.group_cells(
        (cell, group.uses, group.automatic, True) for cell, group in old.cells()
    )
    packs.rewrite(directory, groups=every)
    with pytest.warns(specplan.PackWarning, match="marks 7 cells certified that no certificate"):
        pack = specplan.load(alone, arch=packs.ARCH)
    assert {cell for cell, group in pack.manifest().cells() if group.certified} == {
        cell for cell, group in old.cells() if group.certified
    }
    assert pack.scatter.pick(requests=4, tokens=3, problem="mtp3")
    assert not pack.scatter.pick(requests=5, tokens=3, problem="mtp3")


def test_a_certificate_of_other_bits_backs_nothing(alone: Path) -> None:
    directory = alone / packs.ARCH
    path = directory / "certificates" / packs.ARCH / "scatter.yaml"
    found = certificates.read(path)
    others = {s: dataclasses.replace(p, host_code="0" * 64) for s, p in found.plans.items()}
    certificates.write(path, dataclasses.replace(found, plans=others))
    with pytest.warns(specplan.PackWarning, match="no certificate backs"):
        pack = specplan.load(alone, arch=packs.ARCH)
    assert not pack.scatter.pick(requests=2, tokens=3, problem="mtp3")
    assert pack.gather.pick(requests=2, tokens=3, problem="mtp3")


def test_an_edited_certificate_backs_nothing_and_is_named(alone: Path) -> None:
    path = alone / packs.ARCH / "certificates" / packs.ARCH / "gather.yaml"
    path.write_text(path.read_text().replace("made up for tests", "NVIDIA H200"))
    with pytest.warns(specplan.PackWarning, match=f"{path}: does not match its own digest"):
        pack = specplan.load(alone, arch=packs.ARCH)
    assert not pack.gather.pick(requests=2, tokens=3, problem="mtp3")
    assert pack.scatter.pick(requests=2, tokens=3, problem="mtp3")


def test_a_pack_as_it_was_built_is_loaded_without_a_warning(alone: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", specplan.PackWarning)
        pack = specplan.load(alone, arch=packs.ARCH)
    assert pack.manifest() == manifest.read(alone / packs.ARCH)


@pytest.mark.skipif(os.geteuid() != 0, reason="what root's processes are warned of")
@pytest.mark.parametrize("what", ["directory", "library", "owner", "above"])
def test_root_is_warned_of_a_pack_that_others_may_write(copied: Path, what: str) -> None:
    directory = copied / packs.ARCH
    library = next(directory.glob("*.so"))
    if what == "owner":
        os.chown(library, 12345, -1)
    else:
        {"directory": directory, "library": library, "above": copied}[what].chmod(0o777)
    with pytest.warns(specplan.PackWarning, match="what it loads can be changed") as caught:
        specplan.load(copied, arch=packs.ARCH)
    named = {"directory": directory, "above": copied}.get(what, library)
    assert str(named) in str(caught[0].message)

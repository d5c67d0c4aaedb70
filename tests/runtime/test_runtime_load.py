"""Loading packs: every way in which it can fail is one error that names the cause and the way out,
before anything is mapped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import library  # noqa: E402
from specplan import pack as pack_module  # noqa: E402
from specplan.plans import locations, manifest  # noqa: E402


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
    assert pack_module.visible_archs() == ["sm_90a", "sm_100a"]
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


@pytest.mark.parametrize("text", ["", "{", "[]", "\0", '{"schema": 1, "digest": 5}', "[" * 100_000])
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
    packs.rewrite(copied / packs.ARCH, host="riscv64-linux-gnu")
    error = refusal(specplan.PackVersionError, copied)
    assert error.reason == "host"
    assert "host code for riscv64-linux-gnu" in str(error)
    assert "build the pack on a host of this kind" in str(error)


@pytest.mark.parametrize(
    ("installed", "refused"),
    [
        ("0.1.14", True),
        ("0.2.0", True),
        ("1.1.15", True),
        ("0.1.15", False),
        ("0.1.15.post3", False),
        ("0.1.16rc1", True),
        ("0.1.16", False),
    ],
)
def test_tvm_ffi_must_be_as_new_as_the_packs_and_of_the_same_minor(
    copied: Path, monkeypatch: pytest.MonkeyPatch, installed: str, refused: bool
) -> None:
    """A prerelease counts as the part of it that is a number: 0.1.16rc1 is read as 0.1, older than
    0.1.15.
    """
    tools = {**manifest.read(copied / packs.ARCH).tools, "apache-tvm-ffi": "0.1.15.post2"}
    packs.rewrite(copied / packs.ARCH, tools=tools)
    monkeypatch.setattr(library.tvm_ffi(), "__version__", installed)
    if not refused:
        assert load(copied).archs == (packs.ARCH,)
        return
    error = refusal(specplan.PackVersionError, copied)
    assert error.reason == "tvm_ffi"
    assert f"built with apache-tvm-ffi 0.1.15.post2, installed is {installed}" in str(error)
    assert "pip install 'apache-tvm-ffi==0.1.15.post2'" in str(error)


def test_another_runtime_library_version_is_refused_unless_one_is_named(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = "nvidia-cutlass-dsl-libs-cu13"
    tools = {**manifest.read(copied / packs.ARCH).tools, wheel: "4.7.0"}
    packs.rewrite(copied / packs.ARCH, tools=tools)
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    error = refusal(specplan.PackVersionError, copied)
    assert error.reason == "runtime_library"
    assert f"pip install '{wheel}==4.7.0'" in str(error)
    monkeypatch.setenv(library.ENVIRONMENT, str(library.runtime_candidates()[0]))
    assert load(copied).archs == (packs.ARCH,)


def test_a_cpu_that_lacks_a_feature_is_refused_with_its_name(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = {
        name: dataclasses.replace(record, cpu_features=("avx2", "made_up_extension"))
        for name, record in manifest.read(copied / packs.ARCH).objects.items()
    }
    packs.rewrite(copied / packs.ARCH, objects=objects)
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"avx2", "sse2"}))
    error = refusal(specplan.PackVersionError, copied)
    assert error.reason == "cpu"
    assert "uses made_up_extension, which this CPU lacks" in str(error)
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"avx2", "made_up_extension"}))
    assert load(copied).archs == (packs.ARCH,)
    # A system that does not say what its CPU has is trusted.
    monkeypatch.setattr(library, "cpu_flags", lambda: None)
    assert load(copied).archs == (packs.ARCH,)


LACKING = """
import json, sys
from importlib import util
import specplan
from specplan import library
real = util.find_spec
util.find_spec = lambda name, *rest: None if name == "nvidia_cutlass_dsl" else real(name, *rest)
try:
    specplan.load(sys.argv[1], arch="sm_90a")
except specplan.SpecplanError as error:
    print(json.dumps([type(error).__name__, error.reason, str(error)]))
"""


@pytest.mark.parametrize("named", ["", "/nowhere/libcute_dsl_runtime.so"])
def test_a_missing_runtime_library_names_what_was_searched_and_the_wheel(
    small_pack: packs.SmallPack, named: str
) -> None:
    kind, reason, text = in_process(
        LACKING, small_pack.root, CUTE_DSL_RUNTIME=named, LD_LIBRARY_PATH=""
    )
    assert (kind, reason) == ("RuntimeLibraryError", "runtime_library")
    assert (named or "no nvidia_cutlass_dsl package") in text
    assert "pip install nvidia-cutlass-dsl-libs-cu13" in text
    assert "set CUTE_DSL_RUNTIME" in text


def test_a_runtime_library_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "libcute_dsl_runtime.so"
    wrong.write_text("not a library")
    monkeypatch.setenv(library.ENVIRONMENT, str(wrong))
    library.runtime.cache_clear()
    try:
        with pytest.raises(specplan.RuntimeLibraryError, match=f"{wrong} cannot be loaded"):
            library.runtime()
    finally:
        library.runtime.cache_clear()


def test_a_missing_tvm_ffi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    library.tvm_ffi.cache_clear()
    try:
        with pytest.raises(specplan.RuntimeLibraryError, match="pip install 'specplan"):
            library.tvm_ffi()
    finally:
        library.tvm_ffi.cache_clear()


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
    packs.rewrite(directory, version="0.0.1", objects={}, plans={}, groups=())
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
    assert len(kinds) == 8
    assert all(issubclass(kind, specplan.SpecplanError) for kind in kinds)
    assert len({kind.reason for kind in kinds} | {"error"}) == len(kinds) + 1
    assert os.environ.get("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1") == "1"

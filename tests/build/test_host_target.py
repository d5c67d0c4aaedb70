"""Host code for named hosts: the compiler's inner interface that it stands on, and that nothing but
host code depends on the host.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import device_code, elf
from specplan.plans.hosts import HOSTS
from specplan.tools.build import host_target

from support import packs
from support.shared import Shared

pytest.importorskip("cutlass")

#: Emits one plan for every host and by the compiler's own exporter, and says what it saw.
EMIT = """
import hashlib, inspect, json, sys
sys.modules["torch"] = None
from pathlib import Path
import cutlass.cute as cute
from specplan.kernels.scatter import kernel
from specplan.plans.hosts import HOSTS
from specplan.plans.plan import Plan
from specplan.tools.build import host_target, keys
out = Path(sys.argv[1])
spec = (("history", 4), ("next", 4), ("draft", 3), ("lanes", 4))
plan = Plan("scatter", "scatter", "sm_90a", spec)
function, arguments = kernel.lower(plan)
compiled = cute.compile(function, *arguments, options=keys.options(plan))
before = hashlib.sha256(str(compiled.ir_module).encode()).hexdigest()
for host in HOSTS.values():
    host_target.emit(compiled, plan.symbol, host, out / f"{host.name}.o")
compiled.export_to_c(
    str(out / "own.o"), function_name=plan.symbol, export_only_tvm_ffi_symbols=True
)
after = hashlib.sha256(str(compiled.ir_module).encode()).hexdigest()
source = inspect.getsource(type(compiled).export_to_c)
dump = compiled.export_provider.mlirExecutionEngine.dump_object_file_pic
print(json.dumps({
    "symbol": plan.symbol, "before": before, "after": after, "source": source,
    "dump": dump.__doc__ or "", "module": type(compiled).__module__,
}))
"""


@pytest.fixture(scope="session")
def emitted(shared: Shared) -> tuple[Path, dict[str, Any]]:
    def make(place: Path) -> None:
        done = packs.run([sys.executable, "-c", EMIT, str(place)], place)
        assert done.returncode == 0, done.stderr
        (place / "said.json").write_text(done.stdout.splitlines()[-1])

    place = shared.made("emitted", make)
    said: dict[str, Any] = json.loads((place / "said.json").read_text())
    return place, said


def test_the_compilers_own_exporter_takes_the_steps_that_are_taken_here(
    emitted: tuple[Path, dict[str, Any]],
) -> None:
    """When an update of the compiler changes its exporter, look at it anew before emitting by
    steps that it no longer takes.
    """
    source = emitted[1]["source"]
    steps = [
        r'internal_symbol_prefix = "__cute_internal_" \+ function_name',
        r"get_export_module\(\s*self\.ir_module,\s*internal_symbol_prefix,\s*"
        r'preserve_symbols=\{f"__tvm_ffi_\{self\.function_name\}"\},\s*\)',
        r"rename_tvm_ffi_function\(mod, self\.function_name, function_name\)",
        r'_inplace_hide_symbols\(mod, lambda x: not x\.startswith\("__tvm_ffi"\)\)',
        r"export_module_to_bytes\(",
    ]
    at = 0
    for step in steps:
        match = re.compile(step).search(source, at)
        assert match is not None, f"the exporter no longer does {step}"
        at = match.end()
    # It still refuses to be told a host, which is why this module is there at all.
    assert re.search(r"if self\.host_target\.value:\s*raise DSLUserCodeError", source)
    for name in ("host_triple", "host_cpu", "host_features"):
        assert name in emitted[1]["dump"], emitted[1]["dump"]


def test_emitting_leaves_the_compiled_function_as_it_was(
    emitted: tuple[Path, dict[str, Any]],
) -> None:
    assert emitted[1]["before"] == emitted[1]["after"]


def test_an_object_is_for_its_host_exports_one_symbol_and_holds_the_same_device_code(
    emitted: tuple[Path, dict[str, Any]],
) -> None:
    place, said = emitted
    own = (place / "own.o").read_bytes()
    wanted = [device_code.read(image) for image in device_code.images(own)]
    takes = elf.read(own).undefined - {"_GLOBAL_OFFSET_TABLE_"}
    exported = elf.read(own).defined
    assert exported == {f"__tvm_ffi_{said['symbol']}"}
    for host in HOSTS:
        data = (place / f"{host}.o").read_bytes()
        found = elf.read(data)
        assert found.machine == elf.MACHINES[host]
        assert {name for name in found.defined if not name.startswith("_mlir_")} == exported
        # The wrappers, which linking leaves unused, may take more.
        assert found.undefined >= takes
        assert [device_code.read(image) for image in device_code.images(data)] == wanted
        assert host_target.signature(data) == host_target.signature(own)


_BEYOND_V2 = re.compile(
    r"%[yz]mm\d|%k[1-7]\b|\tv[a-z0-9]+ .*%xmm|"
    r"\t(sarx|shlx|shrx|rorx|mulx|bzhi|pdep|pext|andn|blsr|blsi|blsmsk|bextr|tzcnt|lzcnt|movbe) "
)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_x86_64_objects_hold_no_instruction_beyond_v2(
    emitted: tuple[Path, dict[str, Any]], small_pack: packs.SmallPack
) -> None:
    files = [emitted[0] / "x86_64.o"]
    for host, _, record in small_pack.manifest.libraries():
        if host == "x86_64":
            files.append(small_pack.directory / record.file)
    for file in files:
        done = packs.run(["objdump", "-d", "--no-show-raw-insn", str(file)])
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") > 1000
        assert not _BEYOND_V2.findall(done.stdout), file


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64 (qemu-user)")
def test_a_builder_with_another_cpu_gives_the_same_bytes(
    emitted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The same compile on an emulated CPU of another kind, with no vector extension beyond v2. The
    compiler's own exporter, which emits for the CPU at hand, gives other bytes there: the emulated
    CPU is another one to it.
    """
    qemu = ["qemu-x86_64", "-cpu", "Nehalem", sys.executable]
    done = packs.run([*qemu, "-c", EMIT, str(tmp_path)], tmp_path, timeout=1800)
    assert done.returncode == 0, done.stderr
    place = emitted[0]
    for host in HOSTS:
        same = hashlib.sha256((place / f"{host}.o").read_bytes()).hexdigest()
        assert hashlib.sha256((tmp_path / f"{host}.o").read_bytes()).hexdigest() == same, host
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["before"] == emitted[1]["before"]
    assert (tmp_path / "own.o").read_bytes() != (place / "own.o").read_bytes()


def test_objects_without_a_signature_or_with_two_are_refused() -> None:
    one = b" when calling: `f(a: int32)`\0"
    assert host_target.signature(b"x" + one + one) == "f(a: int32)"
    for data in (b"", one + b" when calling: `g(a: int32)`\0"):
        with pytest.raises(host_target.HostTargetError, match="one signature text"):
            host_target.signature(data)


def test_a_compiler_without_the_inner_interface_is_named(tmp_path: Path) -> None:
    with pytest.raises(host_target.HostTargetError, match="cannot emit code for a named host"):
        host_target.emit(object(), "f", HOSTS["x86_64"], tmp_path / "f.o")

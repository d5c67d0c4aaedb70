"""Which CUDA runtime a pack gets: torch's own, whichever others are in the process; and what is
said where torch brings none that fits.

Small libraries stand for torch's ``libc10_cuda.so`` and for CUDA's runtime, so that the dynamic
linker itself answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from specplan.plans import manifest
from specplan.plans.hosts import this_machine

from support import packs

torch = pytest.importorskip("torch")

LOAD = """
import ctypes, json, sys, types
import torch, specplan
from specplan import library
root, place, earlier = sys.argv[1:]
if earlier:
    ctypes.CDLL(earlier, mode=ctypes.RTLD_GLOBAL)
if place:
    said = types.SimpleNamespace(cuda="13.0")
    fake = types.SimpleNamespace(
        version=said, __version__="2.99.0+cu130", __file__=place + "/torch/__init__.py"
    )
    library.torch = lambda: fake
    ctypes.CDLL(place + "/torch/lib/libc10_cuda.so", mode=ctypes.RTLD_LOCAL)
try:
    pack = specplan.load(root, arch="sm_90a")._packs["sm_90a"]
except specplan.SpecplanError as error:
    print(json.dumps([type(error).__name__, error.reason, str(error)]))
    sys.exit()
runtime = pack.cuda_runtime
host = pack.manifest.hosts[library.this_machine()]
files = [str(pack.directory / record.file) for record in host.objects.values()]
answer = {
    "path": str(runtime.path) if runtime else None,
    "version": runtime.version if runtime else None,
    "unbound": [ctypes.CDLL(file).specplan_cuda_unbound() for file in files],
    "takes": len(host.takes["libcudart.so.13"]),
}
if runtime:
    # The addresses are those of the file that is named.
    called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    answer["mark"] = called(runtime.functions["cudaGetDevice"])(None)
print(json.dumps(answer))
"""


def run(root: Path, place: Path | str = "", earlier: Path | str = "") -> Any:
    done = packs.run([sys.executable, "-c", LOAD, str(root), str(place), str(earlier)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shared(output: Path, source: str, *options: str) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(output), "-xc", "-", "-xnone", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return output


def cuda_runtime(
    pack: packs.SmallPack, output: Path, *, mark: int = 0, version: int = 13000, without: str = ""
) -> Path:
    """A library of CUDA's runtime: every function that packs take, ``cudaGetDevice`` answering
    ``mark``.
    """
    takes = pack.manifest.hosts[this_machine()].takes[manifest.CUDA_RUNTIME]
    source = f"int cudaRuntimeGetVersion(int *v) {{ *v = {version}; return 0; }}\n"
    for name in takes:
        if name != without:
            source += f"int {name}(void) {{ return {mark if name == 'cudaGetDevice' else 0}; }}\n"
    return shared(output, source, f"-Wl,-soname,libcudart.so.{version // 1000}")


def torch_with(place: Path, runtime: Path | None) -> Path:
    """A directory with a ``torch/lib/libc10_cuda.so`` that is linked to a runtime."""
    options = (
        ["-Wl,--no-as-needed", str(runtime), f"-Wl,-rpath,{runtime.parent}"] if runtime else []
    )
    shared(place / "torch" / "lib" / "libc10_cuda.so", "int c10;", *options)
    return place


def test_a_torch_without_cuda_opens_packs_with_nothing_bound(small_pack: packs.SmallPack) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    answer = run(small_pack.root)
    assert answer["path"] is None
    assert answer["unbound"] == [answer["takes"]] * 2


def test_unbound_functions_answer_that_there_is_no_device(small_pack: packs.SmallPack) -> None:
    """A call that passes every check on a machine without CUDA is an error and no crash."""
    script = """
import json, sys
import torch, specplan
from specplan.families import FAMILIES
pack = specplan.load(sys.argv[1], arch="sm_90a")._packs["sm_90a"]
sys.path.insert(0, sys.argv[2])
from support.recorder import on_gpu
texts = []
for symbol, plan in pack.manifest.plans.items():
    idle = FAMILIES[plan.family].idle_arguments(plan, torch.device("cpu"))
    try:
        pack.functions[symbol](*(on_gpu(a) if isinstance(a, torch.Tensor) else a for a in idle))
        texts.append("launched")
    except Exception as error:
        texts.append(f"{type(error).__name__}: {error}")
print(json.dumps(texts))
"""
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    tests = Path(__file__).parents[1]
    done = packs.run([sys.executable, "-c", script, str(small_pack.root), str(tests)])
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout)
    assert len(texts) == len(small_pack.manifest.plans)
    assert all("no CUDA runtime" in text or "100" in text for text in texts), texts


def test_torchs_own_runtime_is_bound_whichever_others_are_in_the_process(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    """Another file under another name was opened first and globally, so that its symbols come first
    everywhere; and the names in torch's directory decide nothing, its dependencies do.
    """
    mine = cuda_runtime(small_pack, tmp_path / "cuda" / "libcudart.so.13", mark=42)
    place = torch_with(tmp_path, mine)
    other = cuda_runtime(small_pack, tmp_path / "other" / "libcudart.so.12", version=12080, mark=7)
    answer = run(small_pack.root, place, other)
    assert (answer["path"], answer["version"], answer["mark"]) == (str(mine), 13000, 42)
    assert answer["unbound"] == [0, 0]
    assert run(small_pack.root, place)["mark"] == 42


def test_a_second_file_of_the_same_name_is_what_torch_is_bound_to(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    """The linker gives torch the library of that name that is there already, so packs get it too:
    one runtime for both, and its file is said.
    """
    mine = cuda_runtime(small_pack, tmp_path / "cuda" / "libcudart.so.13", mark=42)
    other = cuda_runtime(small_pack, tmp_path / "other" / "libcudart.so.13", mark=7)
    answer = run(small_pack.root, torch_with(tmp_path, mine), other)
    assert (answer["path"], answer["mark"]) == (str(other), 7)


def test_a_runtime_of_another_major_version_is_refused(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    old = cuda_runtime(small_pack, tmp_path / "cuda" / "libcudart.so.12", version=12080)
    kind, reason, text = run(small_pack.root, torch_with(tmp_path, old))
    assert (kind, reason) == ("PackVersionError", "cuda_runtime")
    assert "torch 2.99.0+cu130" in text
    assert f"runtime 12.8 ({old})" in text
    assert "install a torch that is built for CUDA 13" in text


def test_a_function_that_the_runtime_lacks_is_named(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    without = "cudaLibraryLoadData"
    old = cuda_runtime(small_pack, tmp_path / "cuda" / "libcudart.so.13", without=without)
    kind, reason, text = run(small_pack.root, torch_with(tmp_path, old))
    assert (kind, reason) == ("PackVersionError", "cuda_runtime")
    assert f"takes {without} from libcudart.so.13, and {old} of version 13.0" in text


def test_a_torch_that_brings_no_shared_runtime_is_named(
    small_pack: packs.SmallPack, tmp_path: Path
) -> None:
    kind, reason, text = run(small_pack.root, torch_with(tmp_path, None))
    assert (kind, reason) == ("RuntimeLibraryError", "cuda_runtime")
    assert "takes no shared CUDA runtime" in text

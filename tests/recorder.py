"""Compiled functions that run for real on a machine without a GPU, up to their launches.

A pack's objects are loaded with a recorder in place of the DSL's runtime library: it answers the
CUDA calls that a compiled function makes and counts the launches. Tensors on the CPU are passed as
if they were on ``cuda:0``. So a test asks the compiled checks themselves what they refuse; only the
device code never runs.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from specplan import library
from specplan.plans import manifest

from stubs import OnDevice  # isort: skip

#: Names in a pack's objects, and those of the same lengths that replace them in the copies: the
#: compiler may have put the real ones into the process.
_RENAMED = {
    b"libcute_dsl_runtime.so": b"libcute_dsl_recordr.so",
    b"CuteDSLRT_TVMFFISet": b"RecoDSLRT_TVMFFISet",
    b"cuda_dialect_": b"reco_dialect_",
    b"\0_cuKernel": b"\0_reKernel",
    b"\0_cuda": b"\0_reco",
}
_RECORDER = "libcute_dsl_recordr.so"
_SOURCE = """
#include <stdint.h>
#include <string.h>
static int64_t launches;
static uint32_t shape[6];
typedef int (*Raise)(void *, void *, void *, void *, void *, void *);
static Raise real;
void recorder_raises_with(Raise function) { real = function; }
int64_t recorder_launches(uint32_t *last) { memcpy(last, shape, sizeof shape); return launches; }

int reco_dialect_init_library_once(void) { return 0; }
int reco_dialect_unload_library_once(void) { return 0; }
int _recoGetDevice(int *device) { *device = 0; return 0; }
int _recoSetDevice(int device) { return 0; }
int _recoLibraryLoadData(void) { return 0; }
int _recoLibraryGetKernel(void) { return 0; }
int _recoKernelSetAttributeForDevice(void) { return 0; }
int _reKernelGetAttribute(int *value) { *value = 0; return 0; }
int _recoDeviceGetAttribute(int *value) { *value = 0; return 0; }
int _recoLaunchKernelEx(const void *config, void *kernel, void **arguments)
{
    memcpy(shape, config, sizeof shape);
    launches++;
    return 0;
}
int RecoDSLRT_TVMFFISetRaisedCudaError(void *a, void *b, void *c, void *d, void *e, void *f)
{
    return real(a, b, c, d, e, f);
}
"""


class Recorder:
    """The functions of a pack, and what they launch."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        self._library = _library()
        self._before = self._library.recorder_launches((ctypes.c_uint32 * 6)())
        scratch.mkdir(parents=True, exist_ok=True)
        pack = manifest.read(directory)
        modules = {}
        for family, record in pack.objects.items():
            copy = scratch / record.file
            content = (directory / record.file).read_bytes()
            for real, recorded in _RENAMED.items():
                content = content.replace(real, recorded)
            copy.write_bytes(content)
            modules[family] = library.tvm_ffi().load_module(str(copy))
        self.functions: Mapping[str, Recorded] = {
            symbol: Recorded(self, symbol, modules[plan.family].get_function(symbol))
            for symbol, plan in pack.plans.items()
        }

    def count(self) -> int:
        """Launches of all functions since this recorder was made."""
        return self.last()[0]

    def last(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Launches so far, and the last one's grid and block."""
        shape = (ctypes.c_uint32 * 6)()
        launches = self._library.recorder_launches(shape)
        return launches - self._before, tuple(shape[:3]), tuple(shape[3:])


class Recorded:
    """One compiled function; ``launches`` has the arguments of the calls that launched."""

    def __init__(self, recorder: Recorder, symbol: str, function: Any) -> None:
        self.symbol = symbol
        self.launches: list[tuple[Any, ...]] = []
        self._recorder, self._function = recorder, function

    def __call__(self, *arguments: Any) -> None:
        before = self._recorder.count()
        self._function(*(on_gpu(a) if isinstance(a, OnDevice) else a for a in arguments))
        if self._recorder.count() > before:
            self.launches.append(arguments)


def on_gpu(tensor: torch.Tensor) -> Any:
    """The same memory as a tvm-ffi tensor that says it is on ``cuda:0``."""
    capsule = tensor.as_subclass(torch.Tensor).__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # A DLTensor begins with its data pointer and its device: type (2: CUDA), then index.
    start = address(capsule, b"dltensor")
    ctypes.c_int32.from_address(start + 8).value = 2

    class Exporter:
        def __dlpack__(self, **options: Any) -> Any:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    return library.tvm_ffi().from_dlpack(Exporter())


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The recorder's library; one a process, because the loader knows libraries by their names."""
    with tempfile.TemporaryDirectory() as scratch:
        source, shared = Path(scratch, "recorder.c"), Path(scratch, _RECORDER)
        source.write_text(_SOURCE)
        named = f"-Wl,-soname,{_RECORDER}"
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", named, "-o", shared, source], check=True)
        loaded = ctypes.CDLL(str(shared))
    loaded.recorder_launches.restype = ctypes.c_int64
    loaded.recorder_raises_with.argtypes = [ctypes.c_void_p]
    real = library.runtime().CuteDSLRT_TVMFFISetRaisedCudaError
    loaded.recorder_raises_with(ctypes.cast(real, ctypes.c_void_p))
    return loaded

"""What the functions of a pack answer on the machine that runs this, as JSON.

    python answers.py PACKS ARCH RECORDER.so [LIBRARY.so ...] < calls.json

Runs on any host with Python, tvm-ffi and specplan's sources: also in an emulated aarch64, for which
torch would be too heavy. There a stand-in takes torch's place, which says that it is built without
CUDA; everything else is the real loader: ``specplan.load`` checks and opens the whole pack. Tensors
are made here of shapes and say that they are on ``cuda:0``; ``RECORDER.so`` takes the place of
CUDA's runtime and counts launches (``tests/recorder.py`` has its source). Further libraries are
opened first, with their symbols in front of everybody's.
"""

from __future__ import annotations

import ctypes
import json
import platform
import sys
import types
from pathlib import Path
from typing import Any

_DTYPES = {
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float32": (2, 32),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
}
#: Where the tensors of a call begin: far apart, since ops refuse memory that overlaps. Nothing is
#: there, and nothing is looked at.
_ADDRESS, _APART = 1 << 40, 1 << 34
_CUDA = 2


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Made:
    """The contiguous tensor at one place of a call, by DLPack."""

    def __init__(self, place: int, shape: list[int], dtype: str) -> None:
        strides = [1] * len(shape)
        for index in reversed(range(len(shape) - 1)):
            strides[index] = strides[index + 1] * max(shape[index + 1], 1)
        self.kept = [(ctypes.c_int64 * max(len(shape), 1))(*values) for values in (shape, strides)]
        code, bits = _DTYPES[dtype]
        pointers = [ctypes.cast(values, ctypes.POINTER(ctypes.c_int64)) for values in self.kept]
        tensor = _DLTensor(
            _ADDRESS + place * _APART, _CUDA, 0, len(shape), code, bits, 1, *pointers, 0
        )
        self.managed = _Managed(tensor, None, None)

    def __dlpack__(self, **options: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def stand_in() -> types.ModuleType:
    """A module that loading and importing the runtime takes for a torch without CUDA."""

    class Module(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    module = Module("torch")
    module.version = types.SimpleNamespace(cuda=None)  # type: ignore[attr-defined]
    module.__version__ = "0"
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: False, device_count=lambda: 0, _is_in_bad_fork=lambda: False
    )
    return module


def main(root: Path, arch: str, recorder_path: str, *first: str) -> None:
    for path in first:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if "torch" not in sys.modules:
        sys.modules["torch"] = stand_in()
    import specplan
    from specplan import library
    from specplan.plans import manifest
    from specplan.plans.hosts import this_machine

    pack = specplan.load(root, arch=arch, candidates=True)
    functions = pack._packs[arch].functions
    told = pack.manifest()
    empty = {}
    for symbol in told.plans:
        try:
            functions[symbol]()
            empty[symbol] = "answered"
        except TypeError as error:
            empty[symbol] = " ".join(str(error).split())

    recorder = ctypes.CDLL(recorder_path)
    recorder.recorder_launches.restype = ctypes.c_int64
    host = told.hosts[this_machine()]
    recorded = {
        name: ctypes.cast(
            getattr(recorder, f"recorded_{name}", recorder.recorded_other), ctypes.c_void_p
        ).value
        or 0
        for name in host.takes[manifest.CUDA_RUNTIME]
    }
    directory = root / arch
    for record in host.objects.values():
        library.bind(ctypes.CDLL(str(directory / record.file)), recorded)
    convert = library.tvm_ffi().from_dlpack
    shape = (ctypes.c_uint32 * 6)()
    answers = []
    for symbol, arguments in json.load(sys.stdin):
        made = [
            Made(place, v["shape"], v["dtype"]) if isinstance(v, dict) else v
            for place, v in enumerate(arguments)
        ]
        values = [convert(v) if isinstance(v, Made) else v for v in made]
        before = recorder.recorder_launches(shape)
        try:
            functions[symbol](*values)
            launches = recorder.recorder_launches(shape) - before
            answers.append(f"{launches} launches {list(shape) if launches else ''}")
        except Exception as error:
            answers.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
        # The tensors go before what they were made of.
        del values
    print(
        json.dumps(
            {
                "machine": platform.machine(),
                "tvm_ffi": library.tvm_ffi().__file__,
                "first": list(first),
                "libraries": sorted(record.file for record in host.objects.values()),
                "empty": empty,
                "answers": answers,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

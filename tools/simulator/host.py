"""Compiled functions that run for real on a machine without a GPU, up to their launches.

A pack's libraries are handed a CUDA runtime made of Python functions: it answers the calls that a
compiled function makes, counts the launches, and gives each to whoever wants to run it. Tensors on
the CPU are passed as if they were on ``cuda:0``.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from specplan import library
from specplan.plans import manifest
from specplan.plans.hosts import this_machine

_ERROR_UNKNOWN = 999
#: A library may call its runtime as long as the process lives, so runtimes live as long too.
_RUNTIMES: list[_Runtime] = []


class _Attribute(ctypes.Structure):
    """``cudaLaunchAttribute``."""

    _fields_: ClassVar[Any] = [
        ("id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    ]


class _Config(ctypes.Structure):
    """``cudaLaunchConfig_t``."""

    _fields_: ClassVar[Any] = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


_CLUSTER, _OVERLAPS = (
    4,
    6,
)  # cudaLaunchAttributeClusterDimension, ...ProgrammaticStreamSerialization


@dataclass(frozen=True)
class Launched:
    """A kernel launch as the compiled host function asked for it."""

    symbol: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    #: Whether it may begin before the launch before it has ended (programmatic dependent launch).
    overlaps: bool
    #: Addresses of the kernel's arguments, to be read before the call returns.
    arguments: Any


#: Takes a launch while the arguments of the call still exist.
OnLaunch = Callable[[Launched, tuple[Any, ...]], None]


class Recorder:
    """The functions of a pack, and what they launch."""

    def __init__(
        self,
        directory: Path,
        scratch: Path,
        on_launch: OnLaunch | None = None,
        *,
        every_tensor: bool = False,
    ) -> None:
        self.on_launch = on_launch
        #: Whether every tensor on the CPU is passed as one on the device, or ``OnDevice`` alone.
        self._taken: type[torch.Tensor] = torch.Tensor if every_tensor else OnDevice
        self._from_dlpack = library.tvm_ffi().from_dlpack
        self._runtime = _Runtime(self)
        _RUNTIMES.append(self._runtime)
        self._call: tuple[str, tuple[Any, ...]] = ("", ())
        self._count = 0
        self._shape: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 0, 0), (0, 0, 0))
        self.error: BaseException | None = None
        scratch.mkdir(parents=True, exist_ok=True)
        pack = manifest.read(directory)
        host = pack.hosts[this_machine()]
        answers = self._runtime.addresses(host.takes[manifest.CUDA_RUNTIME])
        modules = {}
        for family, record in host.objects.items():
            # A copy, because a process has a library once, and the pack itself may be loaded too.
            copy = scratch / record.file
            shutil.copyfile(directory / record.file, copy)
            modules[family] = library.tvm_ffi().load_module(str(copy))
            opened = ctypes.CDLL(str(copy))
            library.bind(opened, answers)
            # At the end of the process libraries unload their kernels, and Python answers no more.
            atexit.register(library.bind, opened, dict.fromkeys(answers, 0))
        self.functions: Mapping[str, Recorded] = {
            symbol: Recorded(self, symbol, modules[plan.family].get_function(symbol))
            for symbol, plan in pack.plans.items()
        }

    def count(self) -> int:
        """Launches of all functions since this recorder was made."""
        return self._count

    def last(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Launches so far, and the last one's grid and block."""
        return self._count, *self._shape

    def launched(self, config: _Config, kernel: bytes, arguments: Any) -> int:
        """A launch of the function that is being called."""
        self._count += 1
        self._shape = tuple(config.grid), tuple(config.block)
        if self.on_launch is None:
            return 0
        cluster, overlaps = [1, 1, 1], False
        for i in range(config.count):
            attribute = config.attributes[i]
            if attribute.id == _CLUSTER:
                cluster = list(attribute.value[:3])
            elif attribute.id == _OVERLAPS:
                overlaps = bool(attribute.value[0])
        symbol, given = self._call
        seen = Launched(
            *(symbol, kernel.decode(), _three(config.grid), _three(config.block)),
            *(_three(cluster), config.shared, overlaps, arguments),
        )
        try:
            self.on_launch(seen, given)
        except BaseException as error:
            self.error = error
            return _ERROR_UNKNOWN
        return 0

    def call(self, symbol: str, function: Any, arguments: tuple[Any, ...]) -> bool:
        """Call a compiled function; whether it launched anything. An error of ``on_launch`` is
        raised as it was.
        """
        before, self.error = self._count, None
        self._call = (symbol, arguments)
        try:
            function(
                *(
                    on_gpu(a, self._from_dlpack) if isinstance(a, self._taken) else a
                    for a in arguments
                )
            )
        except Exception:
            if self.error is None:
                raise
        finally:
            self._call = ("", ())
        if self.error is not None:
            raise self.error
        return self._count > before


def _three(values: Any) -> tuple[int, int, int]:
    x, y, z = values
    return int(x), int(y), int(z)


class _Runtime:
    """CUDA's runtime as far as compiled functions call it. What is not here answers success."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: dict[int, ctypes.c_char_p] = {}
        self._something = ctypes.c_int(1)
        self._kept: list[Any] = []
        out, many = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
        self._driver = self._made(self._zero, ctypes.c_int, out)
        text = ctypes.c_char_p(b"cudaErrorRecorded")
        self._kept.append(text)
        address = ctypes.cast(text, ctypes.c_void_p).value
        self._answers = {
            "cudaGetErrorName": self._made(lambda code: address, ctypes.c_void_p, ctypes.c_int),
            "cudaGetErrorString": self._made(lambda code: address, ctypes.c_void_p, ctypes.c_int),
            "cudaGetDevice": self._made(self._zero, ctypes.c_int, out),
            "cudaGetDeviceCount": self._made(self._gives(1), ctypes.c_int, out),
            "cudaDriverGetVersion": self._made(self._gives(13000), ctypes.c_int, out),
            "cudaDeviceGetAttribute": self._made(self._zero, ctypes.c_int, out),
            "cudaLibraryLoadData": self._made(self._library, ctypes.c_int, many),
            "cudaLibraryGetKernel": self._made(
                self._kernel, ctypes.c_int, many, ctypes.c_void_p, ctypes.c_char_p
            ),
            "cudaGetDriverEntryPointByVersion": self._made(
                *(self._entry_point, ctypes.c_int, ctypes.c_char_p, many),
                *(ctypes.c_uint, ctypes.c_ulonglong, out),
            ),
            "cudaLaunchKernelExC": self._made(
                *(self._launch, ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_void_p, many)
            ),
        }
        self._other = self._made(lambda: 0, ctypes.c_int)

    def addresses(self, names: Any) -> dict[str, int]:
        """Where the answers to some functions are."""
        return {name: self._answers.get(name, self._other) for name in names}

    def _made(self, function: Callable[..., Any], *kinds: Any) -> int:
        callback = ctypes.CFUNCTYPE(*kinds)(function)
        self._kept.append(callback)
        return ctypes.cast(callback, ctypes.c_void_p).value or 0

    @staticmethod
    def _gives(value: int) -> Callable[[Any], int]:
        def answer(result: Any) -> int:
            result[0] = value
            return 0

        return answer

    def _zero(self, result: Any) -> int:
        result[0] = 0
        return 0

    def _library(self, result: Any) -> int:
        result[0] = ctypes.addressof(self._something)
        return 0

    def _kernel(self, result: Any, _: Any, name: bytes) -> int:
        # A kernel's handle is its name.
        text = ctypes.c_char_p(name)
        address = ctypes.cast(text, ctypes.c_void_p).value or 0
        self._names[address] = text
        result[0] = address
        return 0

    def _entry_point(
        self, name: bytes, function: Any, version: int, flags: int, status: Any
    ) -> int:
        function[0] = self._driver
        status[0] = 0
        return 0

    def _launch(self, config: Any, kernel: int, arguments: Any) -> int:
        name = self._names[kernel].value or b""
        return self._recorder.launched(config.contents, name, arguments)


class OnDevice(torch.Tensor):
    """A CPU tensor that claims to be on ``cuda:0``; slices of it claim the same."""

    def get_device(self) -> int:
        return 0


def on_device(tensor: torch.Tensor) -> OnDevice:
    return tensor.as_subclass(OnDevice)


class Recorded:
    """One compiled function; ``launches`` has the arguments of the calls that launched."""

    def __init__(self, recorder: Recorder, symbol: str, function: Any) -> None:
        self.symbol = symbol
        self.launches: list[tuple[Any, ...]] = []
        self._recorder, self._function = recorder, function

    def __call__(self, *arguments: Any) -> None:
        if self._recorder.call(self.symbol, self._function, arguments):
            self.launches.append(arguments)


def on_gpu(tensor: torch.Tensor, from_dlpack: Callable[[Any], Any] | None = None) -> Any:
    """The same memory as a tvm-ffi tensor that says it is on ``cuda:0``."""
    from_dlpack = from_dlpack or library.tvm_ffi().from_dlpack
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

    return from_dlpack(Exporter())

"""A loaded pack on an imagined GPU: the real runtime and the real compiled host functions, whose
launches run on a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from specplan.families import FAMILIES
from specplan.loading import ArchPack
from specplan.pack import Pack
from specplan.plans import manifest
from specplan.tools.simulator.host import Launched, Recorder
from specplan.tools.simulator.machine import Findings, Kernel, LaunchShape, SimulationError
from specplan.tools.simulator.memory import Memory
from specplan.tools.simulator.ptx import entries
from torch.overrides import TorchFunctionMode


class Simulator:
    """Runs launches. ``ptx`` gives the PTX of a plan by its symbol."""

    def __init__(
        self, ptx: Callable[[str], str], *, races: bool = True, banks: bool = False
    ) -> None:
        self._ptx, self.races, self.banks = ptx, races, banks
        self._kernels: dict[str, dict[str, Kernel]] = {}
        #: What the launches since the last ``clear`` showed, by symbol and kernel.
        self.findings: list[tuple[Launched, Findings]] = []

    def clear(self) -> None:
        self.findings.clear()

    def kernel(self, symbol: str, name: str) -> Kernel:
        """A kernel of a plan."""
        if symbol not in self._kernels:
            found = entries(self._ptx(symbol))
            self._kernels[symbol] = {entry: Kernel(body) for entry, body in found.items()}
        if name not in self._kernels[symbol]:
            raise SimulationError(f"the PTX of {symbol} has no kernel {name}")
        return self._kernels[symbol][name]

    def launch(self, launched: Launched, arguments: tuple[Any, ...]) -> None:
        """A launch of a compiled function that was called with ``arguments``."""
        kernel = self.kernel(launched.symbol, launched.kernel)
        given = [
            ctypes.string_at(launched.arguments[number], size)
            for number, size in enumerate(kernel.entry.parameters.values())
        ]
        gx, gy, gz = launched.grid
        shape = LaunchShape((gx, gy, gz), launched.block, launched.cluster, launched.shared)  # type: ignore[arg-type]
        memory = Memory(a for a in arguments if isinstance(a, torch.Tensor))
        found = kernel.launch(shape, given, memory, races=self.races, banks=self.banks)
        self.findings.append((launched, found))


class _OnHost(TorchFunctionMode):
    """Every tensor says that it is on ``cuda:0``, and those made there are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.get_device:
            return 0
        given = dict(kwargs or {})
        if "device" in given and str(given["device"]).startswith(("cuda", "0")):
            given["device"] = torch.device("cpu")
        return func(*args, **given)


@contextmanager
def imagined_device(capability: tuple[int, int]) -> Iterator[None]:
    """torch sees one CUDA device, and every tensor says that it is on it."""
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "get_device_capability", lambda index=0: capability),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.cuda, "synchronize", lambda index=None: None),
        mock.patch.object(torch.cuda, "device", lambda index: nullcontext()),
        _OnHost(),
    ):
        yield


def load(directory: Path, scratch: Path, simulator: Simulator) -> Pack:
    """The pack in a directory, its launches simulated; to be used under ``imagined_device``."""
    arch_pack = ArchPack.__new__(ArchPack)
    arch_pack.directory = directory
    arch_pack.manifest = manifest.read(directory)
    arch_pack.cuda_runtime = None
    arch_pack.functions = dict(
        Recorder(directory, scratch, simulator.launch, every_tensor=True).functions
    )
    pack = Pack([arch_pack], candidates=True)
    # There is no code to load.
    pack._prepared.update((0, family) for family in FAMILIES)
    return pack

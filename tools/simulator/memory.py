"""Global memory by the addresses that it really has: the storages of the tensors of a call, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray
#: User addresses are below it on every 64-bit system with four levels of page tables.
_TOP = 1 << 47
_KINDS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}
_KINDS[8] = np.dtype(np.uint64)


class AccessError(RuntimeError):
    """An access to memory that is not there, or is not aligned."""


class _Everything:
    """The whole address space as an array; only addresses that are checked first may be used."""

    def __init__(self, kind: np.dtype[Any]) -> None:
        self.first = 4096 // kind.itemsize
        self.__array_interface__ = {
            "data": (4096, False),
            "shape": (_TOP // kind.itemsize - self.first,),
            "typestr": kind.str,
            "version": 3,
        }


class Memory:
    """Storages that a kernel may touch."""

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        self._kept: list[Any] = []
        ranges: set[tuple[int, int]] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._kept.append(storage)
            if storage.nbytes():
                ranges.add((storage.data_ptr(), storage.nbytes()))
        ordered = sorted(ranges)
        self.starts = np.array([start for start, _ in ordered], np.uint64)
        self.sizes = np.array([size for _, size in ordered], np.uint64)
        #: Where each storage begins among all, laid end to end with a gap of 16 bytes at least.
        ends = np.cumsum((self.sizes + np.uint64(31)) // np.uint64(16) * np.uint64(16))
        self.offsets = np.concatenate([np.zeros(1, np.uint64), ends])[: len(ordered)]
        self.size = int(ends[-1]) if len(ordered) else 0
        self._views = {size: np.asarray(_Everything(kind)) for size, kind in _KINDS.items()}

    def places(self, addresses: Array, size: int, alignment: int) -> Array:
        """Offsets of accesses of ``size`` bytes among all storages laid end to end; AccessError for
        one that is outside or not aligned.
        """
        if (addresses & np.uint64(alignment - 1)).any():
            bad = int(addresses[(addresses & np.uint64(alignment - 1)) != 0][0])
            raise AccessError(
                f"global access of {alignment} bytes at {bad:#x}, which is not aligned"
            )
        at = np.searchsorted(self.starts, addresses, "right") - 1
        within = addresses - self.starts[at] if len(self.starts) else addresses
        good = at >= 0
        if len(self.starts):
            good &= within + np.uint64(size) <= self.sizes[at]
        if not good.all():
            bad = int(addresses[~good][0])
            raise AccessError(
                f"global access of {size} bytes at {bad:#x}, outside of every tensor"
                f"{self._near(bad)}"
            )
        return (self.offsets[at] + within).astype(np.int64)

    def _near(self, address: int) -> str:
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            if start - 4096 <= address < start + size + 4096:
                return f" ({address - start} bytes from the start of one of {size})"
        return ""

    def load(self, addresses: Array, count: int, size: int) -> list[Array]:
        view, first = self._views[size], 4096 // size
        at = (addresses // np.uint64(size)).astype(np.int64) - first
        return [view[at + i] for i in range(count)]

    def store(self, addresses: Array, values: list[Array], size: int) -> None:
        view, first = self._views[size], 4096 // size
        at = (addresses // np.uint64(size)).astype(np.int64) - first
        for i, value in enumerate(values):
            view[at + i] = value.astype(view.dtype)

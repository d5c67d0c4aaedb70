"""Runs the device code of ``gdn_replay`` on a CPU, warp by warp, as numpy over 32 lanes.

The kernels are written in a handful of instruction wrappers (``ptx.py``); here each has a lane-wise
numpy twin, and ``kernel.py`` itself is executed unchanged on top of them. What is checked is
therefore the kernel's own index arithmetic, layouts, masks and order of operations, and that it
touches no byte outside its tensors. What is not: the compiler, timing and races.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

LANES = 32


class Number:
    """A register of a warp: one value a lane."""

    kind: np.dtype
    width: int

    def __init__(self, value: Any) -> None:
        raw = value.lanes if isinstance(value, Number) else value
        self.lanes = np.broadcast_to(np.asarray(raw), (LANES,)).astype(self.kind)

    def _with(self, other: Any, op: Callable[[Any, Any], Any], swap: bool = False) -> Number:
        kind = type(self)
        if isinstance(other, Number) and other.width > self.width:
            kind = type(other)
        x, y = self.lanes.astype(kind.kind), kind(other).lanes
        with np.errstate(all="ignore"):
            return kind(op(y, x) if swap else op(x, y))

    def _compare(self, other: Any, op: Callable[[Any, Any], Any]) -> Boolean:
        other = other.lanes if isinstance(other, Number) else other
        return Boolean(op(self.lanes, other))

    def __add__(self, o: Any) -> Number:
        return self._with(o, np.add)

    def __radd__(self, o: Any) -> Number:
        return self._with(o, np.add)

    def __sub__(self, o: Any) -> Number:
        return self._with(o, np.subtract)

    def __rsub__(self, o: Any) -> Number:
        return self._with(o, np.subtract, swap=True)

    def __mul__(self, o: Any) -> Number:
        return self._with(o, np.multiply)

    __rmul__ = __mul__

    def __floordiv__(self, o: Any) -> Number:
        return self._with(o, np.floor_divide)

    def __mod__(self, o: Any) -> Number:
        return self._with(o, np.mod)

    def __lshift__(self, o: int) -> Number:
        return self._with(o, np.left_shift)

    def __rshift__(self, o: int) -> Number:
        return self._with(o, np.right_shift)

    def __and__(self, o: Any) -> Number:
        return self._with(o, np.bitwise_and)

    def __or__(self, o: Any) -> Number:
        return self._with(o, np.bitwise_or)

    def __xor__(self, o: Any) -> Number:
        return self._with(o, np.bitwise_xor)

    def __lt__(self, o: Any) -> Boolean:
        return self._compare(o, np.less)

    def __le__(self, o: Any) -> Boolean:
        return self._compare(o, np.less_equal)

    def __gt__(self, o: Any) -> Boolean:
        return self._compare(o, np.greater)

    def __ge__(self, o: Any) -> Boolean:
        return self._compare(o, np.greater_equal)

    def __eq__(self, o: object) -> Boolean:  # type: ignore[override]
        return self._compare(o, np.equal)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        first = bool(self.lanes[0])
        if (self.lanes.astype(bool) != first).any():
            raise AssertionError("a branch diverges within a warp")
        return first


class Int32(Number):
    kind, width = np.dtype(np.int32), 32


class Int64(Number):
    kind, width = np.dtype(np.int64), 64


class Float32(Number):
    kind, width = np.dtype(np.float32), 32


class Boolean(Number):
    kind, width = np.dtype(np.bool_), 1


class BFloat16:
    width = 16


class Memory:
    """Global memory by absolute address, confined to registered tensors, and one CTA's shared
    memory.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.shared = np.zeros(0, np.uint8)

    def allow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def at(self, address: int, size: int) -> np.ndarray:
        if not any(lo <= address and address + size <= hi for lo, hi in self.ranges):
            raise AssertionError(f"access of {size} bytes outside of every tensor")
        if address % size:
            raise AssertionError(f"misaligned access of {size} bytes")
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


MEMORY = Memory()


class Tensor:
    """What the kernels use of a ``cute.Tensor``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        MEMORY.allow(tensor)
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.element_type = types.SimpleNamespace(width=tensor.element_size() * 8)
        self.iterator = types.SimpleNamespace(toint=lambda: Int64(tensor.data_ptr()))


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    tensor = torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16)
    return tensor.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)


def _unary(op: Callable[[np.ndarray], np.ndarray]) -> Callable[[Number], Float32]:
    def apply(x: Number) -> Float32:
        with np.errstate(all="ignore"):
            return Float32(op(x.lanes.astype(np.float32)))

    return apply


def _fields(acc_or_operand: Sequence[Number]) -> np.ndarray:
    return np.stack([x.lanes for x in acc_or_operand])


def _halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = words.astype(np.int64).astype(np.uint32)
    return (bits << 16).view(np.float32), (bits & 0xFFFF0000).view(np.float32)


def _mma(acc: Sequence[Number], a: Sequence[Number], b: Sequence[Number]) -> list[Float32]:
    lane = np.arange(LANES)
    g, t = lane // 4, lane % 4
    A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, (row, k) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        A[g + row, 2 * t + k], A[g + row, 2 * t + k + 1] = _halves(a[i].lanes)
    for i, k in enumerate((0, 8)):
        B[2 * t + k, g], B[2 * t + k + 1, g] = _halves(b[i].lanes)
    for i, (row, column) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
        C[g + row, 2 * t + column] = acc[i].lanes
    with np.errstate(all="ignore"):
        D = (C + A @ B).astype(np.float32)
    order = ((0, 0), (0, 1), (8, 0), (8, 1))
    return [Float32(D[g + row, 2 * t + column]) for row, column in order]


def _load(address: Number, words: int, live: Number | None = None, cache: str = "") -> list[Int32]:
    lanes = np.zeros((words, LANES), np.int32)
    for lane in range(LANES):
        if live is None or live.lanes[lane]:
            lanes[:, lane] = MEMORY.at(int(address.lanes[lane]), 4 * words).view(np.int32)
    return [Int32(row) for row in lanes]


def _load_half(address: Number, live: Number) -> Float32:
    lanes = np.zeros(LANES, np.uint32)
    for lane in range(LANES):
        if live.lanes[lane]:
            lanes[lane] = np.uint32(MEMORY.at(int(address.lanes[lane]), 2).view(np.uint16)[0]) << 16
    return Float32(lanes.view(np.float32))


def _store(address: Number, values: Sequence[Number], live: Number | None = None) -> None:
    words = np.stack([value.lanes for value in values])
    for lane in range(LANES):
        if live is None or live.lanes[lane]:
            to = MEMORY.at(int(address.lanes[lane]), 4 * len(values))
            to.view(np.int32)[:] = words[:, lane]


def _load_shared(address: Number, offset: int) -> list[Int32]:
    start = address.lanes.astype(np.int64) + offset
    for quarter in start.reshape(4, 8):
        distinct = {int(x) for x in quarter}
        assert len({x % 128 for x in distinct}) == len(distinct), "bank conflict within 8 lanes"
    words = np.stack([MEMORY.shared[x : x + 16].view(np.int32) for x in start], axis=1)
    return [Int32(row) for row in words]


class Copies:
    """A warp's copies to shared memory: they land as late as its waits allow, and until then NaN
    lies where they go.
    """

    def __init__(self) -> None:
        self.open: list[tuple[int, Any]] = []
        self.groups: list[list[tuple[int, Any]]] = []

    def start(self, to: int, source: Any) -> None:
        MEMORY.shared[to : to + 16] = 0xFF
        self.open.append((to, source))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        while len(self.groups) > pending:
            for to, source in self.groups.pop(0):
                MEMORY.shared[to : to + 16] = source


def _copy_async(shared: Number, shared_offset: int, address: Number, offset: int) -> None:
    for lane in range(LANES):
        source = MEMORY.at(int(address.lanes[lane]) + offset, 16)
        Launch.local.copies.start(int(shared.lanes[lane]) + shared_offset, source)


def _copy_async_or_zero(shared: Number, address: Number, live: Number) -> None:
    for lane in range(LANES):
        source = MEMORY.at(int(address.lanes[lane]), 16) if live.lanes[lane] else 0
        Launch.local.copies.start(int(shared.lanes[lane]), source)


def _prefetch(address: Number, size: int, live: Number) -> None:
    for lane in range(LANES):
        if live.lanes[lane]:
            at = int(address.lanes[lane])
            assert at % 16 == 0 and size % 16 == 0
            for first in range(0, size, 16):
                MEMORY.at(at + first, 16)


def _store_shared(address: Number, values: Sequence[Number]) -> None:
    words = np.stack([value.lanes for value in values], axis=1).view(np.uint8)
    for lane in range(LANES):
        to = int(address.lanes[lane])
        MEMORY.shared[to : to + 16] = words[lane]


def _permute(x: Number, y: Number, selector: Number) -> Int32:
    raw = np.stack([x.lanes, y.lanes], axis=1).astype("<i4").view(np.uint8)  # [32, 8]
    out = np.zeros((LANES, 4), np.uint8)
    for i in range(4):
        pick = (selector.lanes >> (4 * i)) & 7
        out[:, i] = raw[np.arange(LANES), pick]
    return Int32(out.view("<i4")[:, 0])


def _pack(at_low: Number, at_high: Number) -> Int32:
    return Int32((_bf16_bits(at_low.lanes) | _bf16_bits(at_high.lanes) << 16).view(np.int32))


def _low(word: Number) -> Float32:
    return Float32(_halves(word.lanes)[0])


def _high(word: Number) -> Float32:
    return Float32(_halves(word.lanes)[1])


def _split(at_low: Number, at_high: Number) -> tuple[Int32, Int32]:
    upper = _pack(at_low, at_high)
    return upper, _pack(at_low - _low(upper), at_high - _high(upper))


def _shuffle_up(value: Number, distance: int) -> Float32:
    lane = np.arange(LANES)
    return Float32(value.lanes[np.where(lane >= distance, lane - distance, lane)])


def _instructions() -> types.ModuleType:
    module = types.ModuleType("specplan.kernels.gdn_replay.ptx")
    lane = np.arange(LANES)
    module.__dict__.update(
        select=lambda c, x, y: type(x)(np.where(c.lanes, x.lanes, type(x)(y).lanes)),
        bits_to_float=lambda w: Float32(w.lanes.astype(np.int32).view(np.float32)),
        float_to_bits=lambda x: Int32(x.lanes.view(np.int32)),
        low=_low,
        high=_high,
        pack=_pack,
        split=_split,
        permute=_permute,
        exp2=_unary(np.exp2),
        exp=_unary(lambda x: np.exp2(x * np.float32(1.4426950408889634))),
        reciprocal=_unary(lambda x: 1 / x),
        rsqrt=_unary(lambda x: 1 / np.sqrt(x)),
        maximum=lambda x, y: Float32(np.fmax(x.lanes, y.lanes)),
        magnitude=_unary(np.abs),
        shuffle=lambda v, at: type(v)(v.lanes[np.asarray(Int32(at).lanes) % LANES]),
        shuffle_xor=lambda v, mask: type(v)(v.lanes[lane ^ mask]),
        shuffle_up=_shuffle_up,
        mma=_mma,
        load=_load,
        opaque=Int32,
        load_constant=_load,
        sync_warp=lambda: None,
        sync_cta=lambda: Launch.barrier.wait(),
        store_shared=_store_shared,
        copy_async_or_zero=_copy_async_or_zero,
        wait_for_previous_grid=lambda: None,
        let_next_grid_launch=lambda: None,
        load_half=_load_half,
        store=_store,
        load_shared=_load_shared,
        copy_async=_copy_async,
        prefetch_l2=_prefetch,
        copy_async_commit=lambda: Launch.local.copies.commit(),
        copy_async_wait=lambda pending: Launch.local.copies.wait(pending),
    )
    return module


def _dynamic_range(*bounds: Any, unroll: int) -> Iterator[Int32]:
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else bounds
    at = Int32(start)
    while at < stop:
        yield at
        at = Int32(at + step)


def _decorator(function: Any) -> Any:
    return function


class Launch:
    """Stands for ``kernel(...)``: launching it runs every warp of the grid in turn."""

    block: tuple[Int32, Int32, Int32]
    grid: tuple[Int32, Int32, Int32]
    barrier: threading.Barrier
    local = threading.local()


def _device_module(path: Path) -> types.ModuleType:
    cutlass = types.ModuleType("cutlass")
    cute = types.ModuleType("cutlass.cute")
    runtime = types.ModuleType("cutlass.cute.runtime")
    cutlass_runtime = types.ModuleType("cutlass.runtime")
    cutlass.__dict__.update(
        Int32=Int32, Int64=Int64, Float32=Float32, Boolean=Boolean, BFloat16=BFloat16,
        Uint8=object, range_constexpr=range, const_expr=bool, cute=cute, runtime=cutlass_runtime,
        range=_dynamic_range, min=min,
    )  # fmt: skip
    arch = types.SimpleNamespace(
        block_idx=lambda: Launch.block,
        grid_dim=lambda: Launch.grid,
        thread_idx=lambda: (Launch.local.thread, Int32(0), Int32(0)),
        get_dyn_smem=lambda *_, **__: types.SimpleNamespace(toint=lambda: Int32(0)),
    )
    cute.__dict__.update(
        kernel=_decorator, jit=_decorator, Tensor=Tensor, arch=arch, runtime=runtime, sym_int=None
    )
    runtime.make_fake_tensor = None  # type: ignore[attr-defined]
    cutlass_runtime.make_fake_stream = None  # type: ignore[attr-defined]
    import specplan.kernels.gdn_replay as package

    fakes = {
        "cutlass": cutlass,
        "cutlass.cute": cute,
        "cutlass.cute.runtime": runtime,
        "cutlass.runtime": cutlass_runtime,
        "specplan.kernels.gdn_replay.ptx": _instructions(),
    }
    saved = {name: sys.modules.get(name) for name in fakes}
    saved_ptx = getattr(package, "ptx", None)
    sys.modules.update(fakes)
    package.ptx = fakes["specplan.kernels.gdn_replay.ptx"]  # type: ignore[attr-defined]
    try:
        module = types.ModuleType("emulated_gdn_replay_kernel")
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    finally:
        for name, old in saved.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
        if saved_ptx is None:
            del package.ptx  # type: ignore[attr-defined]
        else:
            package.ptx = saved_ptx  # type: ignore[attr-defined]
    return module


def _source() -> Path:
    import specplan.kernels.gdn_replay as package

    return Path(package.__path__[0]) / "kernel.py"


DEVICE = _device_module(_source())


@contextmanager
def _memory(shared: int) -> Iterator[None]:
    MEMORY.shared = np.full(shared, 0xFF, np.uint8)  # NaN until copied
    yield
    MEMORY.ranges.clear()


def run(
    kernel: Callable[..., None],
    arguments: Sequence[Any],
    grid: tuple[int, int, int],
    warps: int,
    shared: int = 0,
) -> None:
    """Every CTA of the grid, one after another; its warps are threads, so that barriers mean what
    they say.
    """
    with _memory(shared):
        passed = [Tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        Launch.grid = Int32(grid[0]), Int32(grid[1]), Int32(grid[2])
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    MEMORY.shared[:] = 0xFF
                    Launch.block = Int32(x), Int32(y), Int32(z)
                    Launch.barrier = threading.Barrier(warps)
                    with ThreadPoolExecutor(warps) as pool:
                        jobs = [pool.submit(_warp, kernel, passed, w) for w in range(warps)]
                    for job in jobs:
                        job.result()


def _warp(kernel: Callable[..., None], arguments: Sequence[Any], warp: int) -> None:
    Launch.local.thread = Int32(np.arange(LANES) + warp * LANES)
    Launch.local.copies = Copies()
    try:
        kernel(*arguments)
    except BaseException:
        Launch.barrier.abort()
        raise


def verify(
    arguments: dict[str, torch.Tensor],
    scale: float,
    state: str,
    tokens: int,
    rows: int,
    warps: int,
    grouped: bool,
    ctas: int,
) -> None:
    op = DEVICE.Verify(state, tokens, rows, warps, grouped, 1)
    N, _, HV, _ = arguments["v"].shape
    if grouped:
        ctas = ctas // op.parts * op.parts
    grid = min(N * HV * op.parts, ctas), 1, 1
    kernel = op.grouped_kernel if grouped else op.kernel
    run(kernel, [*arguments.values(), Float32(scale)], grid, warps, op.shared_memory)


def materialize(arguments: Sequence[torch.Tensor], state: str) -> None:
    op = DEVICE.Materialize(state)
    grid = 128 // (op.ROWS * op.WARPS), arguments[1].shape[1], arguments[5].shape[0]
    run(op.kernel, arguments, grid, op.WARPS, DEVICE.Shared16.BYTES)


def _cursors(kernel: Callable[..., None], arguments: Sequence[Any], rows: int) -> None:
    threads = DEVICE.CURSOR_THREADS
    run(kernel, arguments, ((rows + threads - 1) // threads, 1, 1), threads // LANES)


def advance(arguments: Sequence[torch.Tensor], tokens: int) -> None:
    _cursors(DEVICE.advance_kernel, [*arguments, Int32(tokens)], arguments[2].shape[0])


def reset(arguments: Sequence[torch.Tensor]) -> None:
    _cursors(DEVICE.reset_kernel, arguments, arguments[2].shape[0])

"""Runs a kernel's PTX on a CPU: a batch of CTAs at a time, all their threads in step, as arrays.

Threads that branch apart go on in groups, the group that is furthest behind first, so that they
meet again where the code does. Shared memory starts as garbage. Asynchronous copies land as late as
the waits allow, and until then garbage lies where they go. Every access is checked against the
memory that exists. Not seen: an access of a thread between its arrival at a cluster's barrier and
the end of its wait counts as one before the barrier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from specplan.tools.simulator import lanes
from specplan.tools.simulator.memory import AccessError, Memory
from specplan.tools.simulator.ptx import SHARED_BASE, Entry, PtxError
from specplan.tools.simulator.races import Race, Shadow, Threads
from specplan.tools.simulator.translate import Translator, blocks

Array = np.ndarray
u8, u32, u64 = np.uint8, np.uint32, np.uint64
Mask = Any  #: Which threads take part, by thread; None for all.

#: Threads that run in step; a batch holds as many CTAs, or one cluster.
BATCH_THREADS = 4096
#: An address of shared memory of a cluster holds rank + 1 above it.
RANK_BITS = 24


class SimulationError(RuntimeError):
    """A kernel did what no kernel may; the message names the line of the PTX."""


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel is launched."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0


@dataclass
class Findings:
    """What a launch showed besides its results."""

    races: list[Race] = field(default_factory=list)
    #: Line of the PTX -> (accesses of a warp to shared memory, further passes that conflicts of
    #: banks cost).
    banks: dict[int, tuple[int, int]] = field(default_factory=dict)
    instructions: int = 0


class Kernel:
    """A kernel ready to run; launches share its translated blocks."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.translator = Translator(entry)
        self.blocks, self.numbers = blocks(entry)
        sizes = [
            int(step.parts[-1][1:]) // 8
            for step in entry.code
            if step.parts[0] in ("ld", "st") and step.parts[-1][1:].isdigit()
        ]
        #: Memory is watched in pieces of the smallest access, up to 4 bytes.
        self.shift = int(np.log2(min([4, *sizes])))

    def launch(
        self,
        shape: LaunchShape,
        arguments: Sequence[bytes],
        memory: Memory,
        *,
        races: bool = True,
        banks: bool = False,
        batch: int = BATCH_THREADS,
    ) -> Findings:
        """Run a grid. ``memory`` is written; the findings say what else was seen."""
        names = list(self.entry.parameters)
        if len(names) != len(arguments):
            raise SimulationError(f"{len(arguments)} arguments for {len(names)} parameters")
        parameters = dict(zip(names, arguments, strict=True))
        per_cta, cluster = prod(shape.block), prod(shape.cluster)
        if per_cta % 32 or shape.cluster[1:] != (1, 1) or shape.grid[0] % shape.cluster[0]:
            raise SimulationError(f"blocks of {shape.block} in clusters of {shape.cluster}")
        total = prod(shape.grid)
        findings = Findings()
        watched = Shadow(memory.size, self.shift, "global", self.entry.name) if races else None
        size = max(cluster, batch // per_cta // cluster * cluster)
        with np.errstate(all="ignore"):
            for first in range(0, total, size):
                run = _Batch(
                    self, shape, first, min(size, total - first), parameters, memory, watched, banks
                )
                run.run()
                findings.instructions += run.instructions
                if run.shadow is not None:
                    findings.races += run.shadow.found
                for line, (count, further) in run.banks.items():
                    c, f = findings.banks.get(line, (0, 0))
                    findings.banks[line] = c + count, f + further
        if watched is not None:
            findings.races += watched.found
        return findings


class _Batch:
    """Some CTAs of a launch. The methods without an underscore are what translated blocks call."""

    def __init__(
        self,
        kernel: Kernel,
        shape: LaunchShape,
        first: int,
        count: int,
        parameters: Mapping[str, bytes],
        memory: Memory,
        watched: Shadow | None,
        banks: bool,
    ) -> None:
        self.kernel, self.shape, self.memory, self.watched = kernel, shape, memory, watched
        self.parameters = parameters
        self.per_cta, self.ctas = prod(shape.block), count
        self.per_cluster = self.per_cta * prod(shape.cluster)
        self.threads = self.per_cta * count
        self.lane = np.arange(self.threads) & 31
        self._warp_start = np.arange(self.threads) - self.lane
        self.special = self._special(first)
        self.shared_size = kernel.entry.static_shared + shape.shared
        # Garbage that is NaN in every float format; whole words, and a guard behind each CTA's.
        self.stride = -(-self.shared_size // 128) * 128 + 128
        self.shared = np.full(self.stride * count, 0xFF, u8)
        self._shared_start = np.arange(self.threads) // self.per_cta * self.stride
        self.alive = np.ones(self.threads, bool)
        self.instructions = 0
        self.banks: dict[int, tuple[int, int]] = {}
        self._count_banks = banks
        self._cached: dict[Any, Any] = {}
        # Asynchronous copies under way: (group, thread, place, data, line); and how many groups
        # each thread has closed.
        self._copies: list[tuple[Array, Array, Array, Array, int]] = []
        self._closed = np.zeros(self.threads, np.int64)
        # Barriers.
        self._waiting = np.full(self.threads, -1, np.int64)  # the next block
        self._barrier = np.zeros(self.threads, np.int64)  # its number, -1 the cluster's
        self._expected = np.zeros(self.threads, np.int64)
        self._reduced = np.zeros(self.threads, bool)
        self._arrived = np.zeros(self.threads, bool)
        self._complete = np.zeros(self.threads, bool)
        # Races.
        self.now = 0
        self.shadow = None
        if watched is not None:
            self.shadow = Shadow(self.shared.size, kernel.shift, "shared", kernel.entry.name)
            self.now = max(watched.lines, default=0)
        self.who = Threads(
            self.threads, first * self.per_cta, self.per_cta, self.per_cluster // self.per_cta
        )

    def _special(self, first: int) -> dict[str, Array]:
        bx, by, _ = self.shape.block
        gx, gy, _ = self.shape.grid
        thread = np.arange(self.threads) % self.per_cta
        cta = first + np.arange(self.threads) // self.per_cta
        cx = self.shape.cluster[0]
        values = {
            "tid_x": thread % bx, "tid_y": thread // bx % by, "tid_z": thread // bx // by,
            "ctaid_x": cta % gx, "ctaid_y": cta // gx % gy, "ctaid_z": cta // gx // gy,
            "laneid": thread & 31, "cluster_ctarank": cta % gx % cx,
            "cluster_ctaid_x": cta % gx % cx,
            "cluster_nctarank": cx + 0 * cta, "clusterid_x": cta % gx // cx,
        }  # fmt: skip
        for name, sizes in (("ntid", self.shape.block), ("nctaid", self.shape.grid)):
            values |= {f"{name}_{axis}": n + 0 * cta for axis, n in zip("xyz", sizes, strict=True)}
        return {name: value.astype(u32) for name, value in values.items()}

    # Control flow

    def run(self) -> None:
        kernel = self.kernel
        registers = kernel.translator.empty_registers(self.threads)
        end = len(kernel.blocks)
        pending: dict[int, Array] = {0: self.alive.copy()}
        while True:
            if not pending:
                if not self.alive.any():
                    return
                pending = self._release()
            number = min(pending)
            mask = pending.pop(number)
            everyone = bool(mask.all())
            if number >= end:
                self._exit(mask)
                continue
            block = kernel.blocks[number]
            self.instructions += (block.end - block.start) * (
                self.threads if everyone else int(mask.sum())
            )
            kernel.translator.block(block, not everyone)(
                registers, self, None if everyone else mask
            )
            self._leave(block.last, kernel.numbers[block.end], mask, registers, pending)

    def _leave(
        self, last: Any, after: int, mask: Array, registers: list[Any], pending: dict[int, Array]
    ) -> None:
        """Where threads go after a block."""

        def go(where: int, who: Array) -> None:
            pending[where] = pending[where] | who if where in pending else who

        if last is None:
            go(after, mask)
            return
        taken = mask
        if last.guard is not None:
            held = registers[self.kernel.translator.index[last.guard]]
            taken = mask & (~held if last.negated else held)
        rest = mask & ~taken if last.guard is not None else None
        name = last.name
        if name in ("bra", "bra.uni"):
            where = self.kernel.numbers[self.kernel.entry.labels[last.operands[0]]]
            if taken.any():
                go(where, taken)
        elif name in ("ret", "exit"):
            self._exit(taken)
        elif name.startswith(("bar.sync", "bar.red")):
            self._at_barrier(last, after, taken, rest, registers)
        elif name.startswith("barrier.cluster"):
            self._at_cluster_barrier(last, after, taken, rest, go)
        else:
            raise PtxError(f"line {last.line}: unknown instruction: {name}")
        if rest is not None and rest.any():
            go(after, rest)

    def _exit(self, mask: Array) -> None:
        self.alive = self.alive & ~mask
        if self.per_cluster > self.per_cta:
            # What a CTA leaves behind is nobody's: whoever reads it later, or has read it without a
            # barrier since, is wrong.
            for cta in np.flatnonzero(
                ~self.alive.reshape(self.ctas, -1).any(1) & mask.reshape(self.ctas, -1).any(1)
            ):
                self._abandon(int(cta))

    def _abandon(self, cta: int) -> None:
        first = cta * self.stride
        self.shared[first : first + self.shared_size] = 0xFF
        if self.shadow is not None:
            self.shadow.abandon(slice(first, first + self.shared_size), cta, self.who)

    def _whole_warps(self, mask: Array, line: int) -> None:
        warps = mask.reshape(-1, 32).any(1)
        if not (mask | ~self.alive).reshape(-1, 32)[warps].all():
            raise SimulationError(f"line {line}: a barrier in divergent code")

    def _at_barrier(
        self, last: Any, after: int, taken: Array, rest: Array | None, registers: list[Any]
    ) -> None:
        if rest is not None and rest.any():
            raise SimulationError(f"line {last.line}: a barrier for some threads")
        self._whole_warps(taken, last.line)
        operands = list(last.operands)
        if last.name == "bar.red.or.pred":
            held = registers[self.kernel.translator.index[operands[-1].lstrip("!")]]
            self._reduced[taken] = (~held if operands[-1].startswith("!") else held)[taken]
            self._cached.setdefault("reductions", {})[after] = operands[0]
            operands = operands[1:-1]
        elif last.name != "bar.sync":
            raise PtxError(f"line {last.line}: unknown instruction: {last.name}")
        numbers = [int(x, 0) for x in operands]
        self._waiting[taken], self._barrier[taken] = after, numbers[0]
        self._expected[taken] = numbers[1] if len(numbers) > 1 else 0
        self._registers = registers

    def _at_cluster_barrier(
        self, last: Any, after: int, taken: Array, rest: Array | None, go: Any
    ) -> None:
        if rest is not None and rest.any():
            raise SimulationError(f"line {last.line}: a barrier for some threads")
        self._whole_warps(taken, last.line)
        parts = last.parts
        if parts[2] == "arrive" and not set(parts[3:]) - {"release", "relaxed", "aligned"}:
            if (self._arrived & taken).any() or (self._complete & taken).any():
                raise SimulationError(f"line {last.line}: a second arrival without a wait")
            self._arrived[taken] = True
            self._complete_clusters()
            go(after, taken)
        elif parts[2] == "wait" and not set(parts[3:]) - {"acquire", "aligned"}:
            if not ((self._arrived | self._complete) | ~taken).all():
                raise SimulationError(f"line {last.line}: a wait without an arrival")
            self._waiting[taken], self._barrier[taken] = after, -1
        else:
            raise PtxError(f"line {last.line}: unknown instruction: {last.name}")

    def _complete_clusters(self) -> None:
        missing = (self.alive & ~self._arrived & ~self._complete).reshape(-1, self.per_cluster)
        arrived = self._arrived.reshape(-1, self.per_cluster)
        for cluster in np.flatnonzero(~missing.any(1) & arrived.any(1)):
            at = slice(cluster * self.per_cluster, (cluster + 1) * self.per_cluster)
            self._complete[at] = self._arrived[at]
            self._arrived[at] = False

    def _release(self) -> dict[int, Array]:
        """Those whose barrier is complete."""
        ready = np.zeros(self.threads, bool)
        waiting = self._waiting >= 0
        self._complete_clusters()
        cluster = waiting & (self._barrier == -1) & self._complete
        if cluster.any():
            ready |= cluster
            self._complete &= ~cluster
            for barrier in (self.who.warp_barrier, self.who.cta_barrier, self.who.cluster_barrier):
                barrier[cluster] = self.now + 1
        for number in np.unique(self._barrier[waiting & (self._barrier >= 0)]):
            here = waiting & (self._barrier == number)
            count = here.reshape(self.ctas, -1).sum(1)
            needed = np.where(
                (self._expected * here).reshape(self.ctas, -1).max(1) > 0,
                (self._expected * here).reshape(self.ctas, -1).max(1),
                self.alive.reshape(self.ctas, -1).sum(1),
            )
            done = np.repeat((count > 0) & (count >= needed), self.per_cta) & here
            if done.any():
                self._reduce(done)
                self.who.cta_barrier[done] = self.who.warp_barrier[done] = self.now + 1
                ready |= done
        if not ready.any():
            raise SimulationError("some threads wait for ever at a barrier")
        found: dict[int, Array] = {}
        for block in np.unique(self._waiting[ready]):
            found[int(block)] = ready & (self._waiting == block)
        self._waiting[ready] = -1
        return found

    def _reduce(self, done: Array) -> None:
        for block, target in self._cached.get("reductions", {}).items():
            here = done & (self._waiting == block)
            if here.any():
                by_cta = (self._reduced & here).reshape(self.ctas, -1).any(1)
                at = self.kernel.translator.index[target]
                answer = np.repeat(by_cta, self.per_cta)
                self._registers[at] = np.where(here, answer, self._registers[at])

    # Values

    def wide(self, value: Any) -> Array:
        """A value of each thread."""
        return value if np.ndim(value) else np.broadcast_to(value, (self.threads,))

    def parameter(self, name: str, offset: int, count: int, size: int) -> list[Array]:
        key = (name, offset, count, size)
        if key not in self._cached:
            raw = self.parameters[name][offset : offset + count * size]
            if len(raw) != count * size:
                raise SimulationError(f"parameter {name[-20:]} ends before byte {offset}")
            values = np.frombuffer(raw, f"<u{size}")
            kind = u64 if size == 8 else u32
            self._cached[key] = [np.full(self.threads, v, kind) for v in values]
        found: list[Array] = self._cached[key]
        return found

    def parameter_at(
        self, addresses: Array, count: int, size: int, mask: Mask, line: int
    ) -> list[Array]:
        """Loads by an address among the parameters, which a kernel computed: each of one parameter,
        aligned, and of no byte beyond it.
        """
        places = self.kernel.entry.parameter_places
        starts = np.array(list(places.values()), np.int64)
        held = [self.parameters[name] for name in places]
        space = bytearray(int(starts[-1]) + len(held[-1]) + 8)
        for start, raw in zip(starts, held, strict=True):
            space[start : start + len(raw)] = raw
        sizes = np.array([len(raw) for raw in held], np.int64)
        live = np.broadcast_to(True if mask is None else mask, (self.threads,))
        at = np.where(live, self.wide(addresses).astype(np.int64), starts[0])
        which = np.maximum(np.searchsorted(starts, at, "right") - 1, 0)
        bad = (at < starts[which]) | (at + count * size > starts[which] + sizes[which])
        bad |= at % size != 0
        if (bad & live).any():
            found = int(at[bad & live][0])
            raise AccessError(f"line {line}: no parameter has {count * size} bytes at {found:#x}")
        flat = np.frombuffer(bytes(space), u8)
        kind = u64 if size == 8 else u32
        values = []
        for number in range(count):
            where = np.where(bad, starts[0], at + number * size)
            parts = [flat[where + byte].astype(kind) << kind(8 * byte) for byte in range(size)]
            values.append(np.bitwise_or.reduce(parts))
        return values

    # Lanes of a warp

    def _converged(self, members: Array, mask: Mask, line: int) -> None:
        """All threads that an instruction names must be there."""
        here = self.alive if mask is None else mask
        named = (members >> self.lane.astype(u32)) & u32(1)
        if not named[here].all():
            raise SimulationError(f"line {line}: a thread does not name itself")
        if mask is None:
            return
        absent = members & ~_words(here) & _words(self.alive)
        if (absent[here] != 0).any():
            raise SimulationError(f"line {line}: threads of a warp that it names are not there")

    def shuffle(
        self,
        how: str,
        value: Array,
        by: Array,
        limits: Array,
        members: Array,
        mask: Mask,
        line: int,
    ) -> tuple[Array, Array]:
        self._converged(members, mask, line)
        source, good = lanes.shuffle_source(how, by, limits, self.lane)
        at = self._warp_start + source
        if mask is not None and not mask[at[mask]].all():
            raise SimulationError(f"line {line}: a shuffle reads a thread that is not there")
        return value[at], good

    def vote(self, how: str, value: Array, members: Array, mask: Mask, line: int) -> Array:
        self._converged(members, mask, line)
        here = value.astype(bool) if mask is None else value & mask
        by_warp = here.reshape(-1, 32)
        if how == "ballot":
            return _words(here)
        there = np.ones(self.threads, bool) if mask is None else mask
        if how == "any":
            return np.repeat(by_warp.any(1), 32)
        every = np.repeat((by_warp | ~there.reshape(-1, 32)).all(1), 32)
        return every if how == "all" else every | ~np.repeat(by_warp.any(1), 32)

    def reduce(self, how: str, value: Array, members: Array, mask: Mask, line: int) -> Array:
        self._converged(members, mask, line)
        if mask is not None and not mask.reshape(-1, 32)[mask.reshape(-1, 32).any(1)].all():
            raise PtxError(f"line {line}: redux of some lanes")
        function: Any = {
            "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
            "min": np.minimum, "max": np.maximum,
        }[how]  # fmt: skip
        reduced = function.reduce(value.reshape(-1, 32), axis=1, dtype=value.dtype)
        return np.repeat(reduced, 32)

    def elect(self, members: Array, mask: Mask, line: int) -> tuple[Array, Array]:
        self._converged(members, mask, line)
        lowest = np.bitwise_and(members, (~members) + u32(1))
        leader = lanes.highest_one(lowest)
        return leader, leader == self.lane

    def warp_barrier(self, members: Array, mask: Mask, line: int) -> None:
        self._converged(members, mask, line)
        self.who.warp_barrier[slice(None) if mask is None else mask] = self.now + 1

    def multiply(
        self, a: list[Array], b: list[Array], c: list[Array], is_f16: bool, mask: Mask, line: int
    ) -> list[Array]:
        if mask is not None:
            warps = mask.reshape(-1, 32).any(1)
            if not mask.reshape(-1, 32)[warps].all():
                raise SimulationError(f"line {line}: mma in divergent code")
            if int(warps.sum()) * 2 <= len(warps):
                some = np.repeat(warps, 32)
                part = lanes.mma(
                    [x[some] for x in a], [x[some] for x in b], [x[some] for x in c], is_f16
                )
                out = [np.zeros(self.threads, u32) for _ in part]
                for whole, piece in zip(out, part, strict=True):
                    whole[some] = piece
                return out
        return lanes.mma(a, b, c, is_f16)

    # Memory

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def _shared_places(
        self, space: str, addresses: Array, who: Any, size: int, align: int, line: int
    ) -> Array:
        if (addresses & u32(align - 1)).any():
            raise AccessError(f"line {line}: shared access of {align} bytes that is not aligned")
        if space == "remote":
            rank = (addresses >> u32(RANK_BITS)).astype(np.int64)
            local = (addresses & u32((1 << RANK_BITS) - 1)).astype(np.int64) - SHARED_BASE
            ctas = self.per_cluster // self.per_cta
            if (rank < 1).any() or (rank > ctas).any():
                raise AccessError(f"line {line}: an address of no CTA of the cluster")
            if (self.who.cluster_barrier[who] == 0).any():
                raise SimulationError(
                    f"line {line}: another CTA's shared memory before a barrier of the cluster, "
                    "which may not have started"
                )
            cta = np.arange(self.threads)[who] // self.per_cta
            start = (cta // ctas * ctas + rank - 1) * self.stride
        else:
            local = addresses.astype(np.int64) - SHARED_BASE
            start = self._shared_start[who]
        if local.size and (int(local.min()) < 0 or int(local.max()) + size > self.shared_size):
            raise AccessError(
                f"line {line}: shared access of {size} bytes at {int(local.min())}.."
                f"{int(local.max())} of {self.shared_size}"
            )
        return start + local

    def load(
        self,
        space: str,
        addresses: Array,
        count: int,
        size: int,
        mask: Mask,
        atomic: bool,
        line: int,
    ) -> list[Array]:
        who: Any = slice(None) if mask is None else mask
        if mask is not None and not mask.any():
            return [np.zeros(self.threads, u64 if size == 8 else u32)] * count
        addresses = addresses if mask is None else addresses[mask]
        width = count * size
        try:
            if space == "global":
                at = self.memory.places(addresses, width, width)
                shadow, values = self.watched, self.memory.load(addresses, count, size)
            else:
                at = self._shared_places(space, addresses, who, width, width, line)
                view = self.shared.view(f"<u{size}")
                shadow, first = self.shadow, at // size
                values = [view[first + i] for i in range(count)]
                if self._count_banks:
                    self._note_banks(at, width, mask, line)
        except AccessError as error:
            raise AccessError(f"line {line}: {error}") from None
        if shadow is not None and not atomic:
            shadow.read(at, width, self.who, who, self._tick(), line)
        kind = u64 if size == 8 else u32
        if mask is None:
            return [v.astype(kind) if v.dtype != kind else v for v in values]
        out = []
        for value in values:
            whole = np.zeros(self.threads, kind)
            whole[mask] = value
            out.append(whole)
        return out

    def store(
        self,
        space: str,
        addresses: Array,
        values: list[Array],
        size: int,
        mask: Mask,
        atomic: bool,
        line: int,
    ) -> None:
        if mask is not None:
            if not mask.any():
                return
            addresses, values = addresses[mask], [v[mask] for v in values]
        who: Any = slice(None) if mask is None else mask
        width = len(values) * size
        shadow = self.watched if space == "global" else self.shadow
        old: list[Array] = []
        try:
            if space == "global":
                at = self.memory.places(addresses, width, width)
                if shadow is not None:
                    old = self._held(space, addresses, at, len(values), size)
                self.memory.store(addresses, values, size)
            else:
                at = self._shared_places(space, addresses, who, width, width, line)
                if shadow is not None:
                    old = self._held(space, addresses, at, len(values), size)
                view, first = self.shared.view(f"<u{size}"), at // size
                for i, value in enumerate(values):
                    view[first + i] = value.astype(view.dtype)
                if self._count_banks:
                    self._note_banks(at, width, mask, line)
        except AccessError as error:
            raise AccessError(f"line {line}: {error}") from None
        if shadow is not None and not atomic:
            kept = self._held(space, addresses, at, len(values), size)
            differs, repeats = np.zeros(len(at), bool), np.ones(len(at), bool)
            for value, now, before in zip(values, kept, old, strict=True):
                differs |= value.astype(now.dtype) != now
                repeats &= value.astype(now.dtype) == before
            shadow.write(at, width, self.who, who, self._tick(), line, differs, repeats)

    def _held(self, space: str, addresses: Array, at: Array, count: int, size: int) -> list[Array]:
        """What memory holds where a store goes."""
        if space == "global":
            return self.memory.load(addresses, count, size)
        view = self.shared.view(f"<u{size}")
        return [view[at // size + i] for i in range(count)]

    def atomic(
        self, space: str, how: str, addresses: Array, value: Array, mask: Mask, line: int
    ) -> Array:
        """One thread after another, in their order; gives what each found."""
        size = value.dtype.itemsize
        unsigned = u64 if size == 8 else u32
        before = np.zeros(self.threads, unsigned)
        who: Any = slice(None) if mask is None else mask
        at_thread = np.arange(self.threads)[who]
        if not len(at_thread):
            return before
        addresses, value = addresses[who], value[who]
        try:
            if space == "global":
                self.memory.places(addresses, size, size)
            else:
                at = self._shared_places(space, addresses, who, size, size, line)
        except AccessError as error:
            raise AccessError(f"line {line}: {error}") from None
        view = self.shared.view(unsigned)
        signed = value.dtype.kind == "i"
        for i, thread in enumerate(at_thread):
            if space == "global":
                old = self.memory.load(addresses[i : i + 1], 1, size)[0]
            else:
                old = view[at[i] // size : at[i] // size + 1].copy()
            before[thread] = old[0]
            given, held = value[i : i + 1], old.view(np.int32) if signed else old
            given = given.view(np.int32) if signed else given.view(unsigned)
            new = {
                "add": lambda a, b: a + b, "or": lambda a, b: a | b, "and": lambda a, b: a & b,
                "xor": lambda a, b: a ^ b, "min": np.minimum, "max": np.maximum,
                "exch": lambda a, b: b,
            }[how](held, given)  # fmt: skip
            new = new.view(unsigned)
            if space == "global":
                self.memory.store(addresses[i : i + 1], [new], size)
            else:
                view[at[i] // size] = new[0]
        return before

    def remote_address(self, address: Array, rank: Array, mask: Mask, line: int) -> Array:
        ctas = self.per_cluster // self.per_cta
        if (rank[slice(None) if mask is None else mask] >= ctas).any():
            raise SimulationError(f"line {line}: a rank of no CTA of the cluster")
        return address + ((rank + u32(1)) << u32(RANK_BITS))

    def prefetch(self, addresses: Array, size: int, mask: Mask, line: int) -> None:
        """Moves nothing that a program sees, but the memory must be there."""
        if mask is not None:
            addresses = addresses[mask]
        if len(addresses):
            try:
                self.memory.places(addresses, size, 16 if size >= 16 else 1)
            except AccessError as error:
                raise AccessError(f"line {line}: {error}") from None

    # Asynchronous copies

    def copy(
        self, target: Array, source: Array, size: int, wanted: Any, mask: Mask, line: int
    ) -> None:
        """``cp.async``: ``wanted`` bytes are copied and the rest of ``size`` becomes zero."""
        who = np.arange(self.threads) if mask is None else np.flatnonzero(mask)
        if not len(who):
            return
        place = self._shared_places("shared", target[who], who, size, size, line)
        count = np.full(len(who), size) if wanted is None else wanted[who].astype(np.int64)
        if ((count != 0) & (count != size)).any():
            raise PtxError(f"line {line}: cp.async of part of its bytes")
        data = np.zeros((len(who), size // 4), u32)
        real = count != 0
        if real.any():
            addresses = source[who][real]
            try:
                at = self.memory.places(addresses, size, size)
            except AccessError as error:
                raise AccessError(f"line {line}: {error}") from None
            data[real] = np.stack(self.memory.load(addresses, size // 4, 4), axis=1)
            if self.watched is not None:
                self.watched.read(at, size, self.who, who[real], self._tick(), line)
        if self.shadow is not None:
            self.shadow.write(place, size, self.who, who, self._tick(), line)
        words = self.shared.view(u32)
        words[(place // 4)[:, None] + np.arange(size // 4)] = u32(0xFFFFFFFF)
        self._copies.append((self._closed[who], who, place, data, line))

    def commit_copies(self, mask: Mask) -> None:
        self._closed[slice(None) if mask is None else mask] += 1

    def wait_for_copies(self, most: int, mask: Mask, line: int) -> None:
        """Land what belongs to all but the last ``most`` closed groups of each thread."""
        left = []
        words = self.shared.view(u32)
        for group, who, place, data, began in self._copies:
            lands = group < self._closed[who] - most
            if mask is not None:
                lands &= mask[who]
            if lands.any():
                size = data.shape[1] * 4
                words[(place[lands] // 4)[:, None] + np.arange(size // 4)] = data[lands]
                if self.shadow is not None:
                    self.shadow.write(place[lands], size, self.who, who[lands], self._tick(), began)
            if not lands.all():
                stays = ~lands
                left.append((group[stays], who[stays], place[stays], data[stays], began))
        self._copies = left

    def wait_for_grid(self, mask: Mask) -> None:
        """The launch before has ended: launches run one after another here."""

    # Banks

    def _note_banks(self, at: Array, width: int, mask: Mask, line: int) -> None:
        """Count the passes that accesses of a warp take beyond those that their size makes."""
        whole = np.full(self.threads, -1, np.int64)
        whole[slice(None) if mask is None else mask] = at
        together = {16: 8, 8: 16}.get(width, 32)
        group = whole.reshape(-1, together)
        local = np.where(group < 0, -1, group % self.stride)
        further = 0
        for row in local[(local >= 0).any(1)]:
            words = np.unique(row[row >= 0] // 4 * 4)
            per_word = (words[:, None] // 4 + np.arange(max(1, width // 4))).ravel()
            per_word = np.unique(per_word)
            further += int(np.bincount(per_word % 32).max()) - 1
        count, before = self.banks.get(line, (0, 0))
        self.banks[line] = count + int((whole.reshape(-1, 32) >= 0).any(1).sum()), before + further


def _words(by_thread: Array) -> Array:
    """A bit of each thread of the warp, for each thread."""
    words = np.packbits(by_thread.reshape(-1, 32), axis=1, bitorder="little").view("<u4").ravel()
    return np.repeat(words, 32).astype(u32)

"""Looking for races: two threads that touch the same memory, one of them to write, with no barrier
between.

Every access gets the number of the instruction execution that made it. A thread remembers when its
last barrier of its warp, its CTA and its cluster was complete. Another thread's access is ordered
before its own if it is older than the barrier that they share; threads of different clusters share
none. Kept for each piece of memory are the last write and two reads, the last one and, where there
is one, the last by another warp than that; so a race with an older read may go unseen. An atomic
access is not compared with anything. Two threads that write one value to the same place do not
race: either order leaves the same. What happens to run as it should and could have run otherwise
is found all the same: nothing here depends on the order in which threads run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Race:
    """Two accesses that no barrier orders."""

    kernel: str
    space: str
    #: Lines of the PTX, in the order in which the simulation ran them.
    first: int
    second: int
    kinds: str
    threads: tuple[int, int]
    where: int

    def __str__(self) -> str:
        a, b = self.threads
        return (
            f"race in {self.space} memory of {self.kernel[:60]}: {self.kinds} at line {self.first} "
            f"of the PTX (thread {a}) and line {self.second} (thread {b}), byte {self.where}"
        )


class Threads:
    """Who and when: numbers of threads in the launch, and when their barriers were complete."""

    def __init__(self, count: int, first: int, per_cta: int, ctas_per_cluster: int) -> None:
        self.number = np.arange(first, first + count, dtype=np.int32)
        self.warp_barrier = np.zeros(count, np.int32)
        self.cta_barrier = np.zeros(count, np.int32)
        self.cluster_barrier = np.zeros(count, np.int32)
        self.per_cta = per_cta
        self.per_cluster = per_cta * ctas_per_cluster


class Shadow:
    """The last accesses to each ``1 << shift`` bytes of a memory."""

    def __init__(self, size: int, shift: int, space: str, kernel: str) -> None:
        count = (size >> shift) + 1
        self.shift, self.space, self.kernel = shift, space, kernel
        # Zeros, so that memory which is never touched costs nothing. Threads are kept plus one.
        self.written_by = np.zeros(count, np.int32)
        self.written_at = np.zeros(count, np.int32)
        self.read_by = np.zeros((2, count), np.int32)
        self.read_at = np.zeros((2, count), np.int32)
        #: Line of the PTX of each instruction execution, found again for reports.
        self.lines: dict[int, int] = {}
        self.found: list[Race] = []

    def read(
        self, at: Array, size: int, threads: Threads, active: Array | slice, now: int, line: int
    ) -> None:
        """Reads of ``size`` bytes at byte offsets ``at``."""
        self.lines[now] = line
        who = threads.number[active]
        for where in self._pieces(at, size):
            self._check(
                self.written_by, self.written_at, where, who, threads, active, now, "write, read"
            )
            self._note_read(where, who, now)

    def _pieces(self, at: Array, size: int) -> list[Array]:
        first = at >> self.shift
        return [first + i for i in range(max(1, size >> self.shift))]

    def _note_read(self, where: Array, who: Array, now: int) -> None:
        by, older = self.read_by[0], self.read_by[1]
        moved = (by[where] - 1 >> 5) != (who >> 5)
        if moved.any():
            here = where[moved]
            older[here], self.read_at[1][here] = by[here], self.read_at[0][here]
        by[where], self.read_at[0][where] = who + 1, now
        # Of several readers in this very instruction the last has stayed: keep one of another warp.
        lost = (by[where] - 1 >> 5) != (who >> 5)
        if lost.any():
            here = where[lost]
            older[here], self.read_at[1][here] = who[lost] + 1, now

    def write(
        self,
        at: Array,
        size: int,
        threads: Threads,
        active: Array | slice,
        now: int,
        line: int,
        differs: Array | None = None,
        repeats: Array | None = None,
    ) -> None:
        """Writes of ``size`` bytes at byte offsets ``at``. ``differs``: where another thread has
        written another value in the same instruction. ``repeats``: where memory held the value
        already.
        """
        self.lines[now] = line
        who = threads.number[active]
        for where in self._pieces(at, size):
            writers = (self.written_by, self.written_at)
            self._check(*writers, where, who, threads, active, now, "two writes", repeats)
            for by, since in zip(self.read_by, self.read_at, strict=True):
                self._check(by, since, where, who, threads, active, now, "read, write")
            self.written_by[where], self.written_at[where] = who + 1, now
            if differs is not None and differs.any():
                other = self.written_by[where] - 1
                clash = differs & (other != who)
                if clash.any():
                    i = int(np.flatnonzero(clash)[0])
                    self._report(now, now, "two writes", int(other[i]), int(who[i]), int(where[i]))

    def _check(
        self, by: Array, since: Array, where: Array, who: Array, threads: Threads,
        active: Array | slice, now: int, kinds: str, harmless: Array | None = None,
    ) -> None:  # fmt: skip
        last, when = by[where] - 1, since[where]
        # What is older than a thread's last barrier of its CTA is ordered, unless it is another's.
        suspect = (last >= 0) & (last != who)
        if harmless is not None:
            suspect &= ~harmless
        if not suspect.any():
            return
        cta = threads.per_cta
        barrier = np.where(
            last // threads.per_cluster != who // threads.per_cluster,
            np.int32(0),
            np.where(
                last // cta != who // cta,
                threads.cluster_barrier[active],
                np.where(
                    last >> 5 != who >> 5,
                    threads.cta_barrier[active],
                    threads.warp_barrier[active],
                ),
            ),
        )
        suspect &= when >= barrier
        if suspect.any():
            i = int(np.flatnonzero(suspect)[0])
            self._report(int(when[i]), now, kinds, int(last[i]), int(who[i]), int(where[i]))

    def abandon(self, at: slice, cta: int, threads: Threads) -> None:
        """A CTA of the batch has ended, and its shared memory with it: accesses of other CTAs must
        be older than its last barrier of the cluster.
        """
        pieces = slice(at.start >> self.shift, at.stop >> self.shift)
        mine = int(threads.number[cta * threads.per_cta]) // threads.per_cta
        since = threads.cluster_barrier[cta * threads.per_cta]
        ends = [(self.written_by, self.written_at, "write, end of its CTA")]
        ends += [
            (b, t, "read, end of its CTA") for b, t in zip(self.read_by, self.read_at, strict=True)
        ]
        for by, when, kinds in ends:
            last = by[pieces] - 1
            late = (last >= 0) & (last // threads.per_cta != mine) & (when[pieces] >= since)
            if late.any():
                i = int(np.flatnonzero(late)[0])
                then, thread = int(when[pieces][i]), mine * threads.per_cta
                self._report(then, -1, kinds, int(last[i]), thread, pieces.start + i)

    def _report(self, then: int, now: int, kinds: str, a: int, b: int, where: int) -> None:
        first, second = self.lines.get(then, 0), self.lines.get(now, 0)
        if any((r.first, r.second, r.kinds) == (first, second, kinds) for r in self.found):
            return
        self.found.append(
            Race(self.kernel, self.space, first, second, kinds, (a, b), where << self.shift)
        )

"""X = [k^; q^], the row operand of every product: load, normalize, store to shared memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from specplan.kernels.device import convert, memory, smem
from specplan.kernels.gdn_replay.tiles import HEAD, LANES, Operand

NORM_EPS = 1e-6


class TokenShare:
    """This thread's part of making X: a token, and the same 16-byte chunks of its k and q."""

    def __init__(self, thread: Int32, warps: int) -> None:
        self.threads = min(warps * LANES // 8, 2 * HEAD // 16)  # per token
        self.token = thread // self.threads % 8  # above 128 threads, two make the same chunk
        self.first = thread % self.threads
        self.chunks = range(0, 2 * HEAD // 16, self.threads)
        self.plane = warps * LANES * 16  # bytes of one chunk per thread

    def load(self, row: Int64, live: Boolean) -> list[list[Int32]]:
        """Load the chunks to registers; zeros where not ``live``."""
        start = row + Int64(self.first * 16)
        return [memory.load_read_only(start + Int64(chunk * 16), 4, live) for chunk in self.chunks]

    def copy_async(self, to: Int32, row: Int64, live: Boolean) -> None:
        """Start copying the chunks to shared memory that only this thread reads."""
        start = row + Int64(self.first * 16)
        for i, chunk in enumerate(self.chunks):
            memory.copy_async_or_zero(to + i * self.plane, start + Int64(chunk * 16), live)

    def load_copied(self, at: Int32) -> list[list[Int32]]:
        """Load the copied chunks, after this thread has waited for the copy."""
        return [smem.load_shared4(at, i * self.plane) for i in range(len(self.chunks))]


def normalize_rows(share: TokenShare, raw: list[list[Int32]], scale: Float32) -> list[list[Int32]]:
    """x * rsqrt(sum x^2 + eps) * scale, rounded once to bf16. A row without a token is zeros."""
    totals = []
    for chunk in raw:
        total = Float32(0.0)
        for word in chunk:
            x, y = convert.bf16_low(word), convert.bf16_high(word)
            total = total + x * x
            total = total + y * y
        for distance in (1, 2, 4, 8):
            if distance < share.threads:
                total = total + cute.arch.shuffle_sync_bfly(total, distance)
        totals.append(total)
    # chunks of one thread are 8 apart: the order of the sum does not depend on the number of
    # threads
    total = totals[0] if len(totals) == 1 else totals[0] + totals[1]
    factor = cute.math.rsqrt(total + Float32(NORM_EPS), fastmath=True) * scale
    return [
        [
            convert.pack_bf16(convert.bf16_low(w) * factor, convert.bf16_high(w) * factor)
            for w in chunk
        ]
        for chunk in raw
    ]


def store_operand(
    X: Operand,
    share: TokenShare,
    keys: list[list[Int32]],
    queries: list[list[Int32]],
    record: Int64,
    writes: Boolean,
) -> None:
    """Store X to shared memory, and where ``writes`` its keys to their record, the same bits."""
    for chunk, k, q in zip(share.chunks, keys, queries, strict=True):
        at = share.first + chunk
        lane = share.token * 4 + (at & 3)
        to = X.start + (at >> 2) * (2 * LANES * 16) + lane * 16
        smem.store_shared4(to, [k[0], q[0], k[1], q[1]])
        smem.store_shared4(to + LANES * 16, [k[2], q[2], k[3], q[3]])
        memory.store_global(record + Int64(at * 16), k, writes)

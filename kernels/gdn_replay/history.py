"""A row's records: K_hist, U_hist and their decays, and folding them into the checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from cutlass import Boolean, Float32, Int32, Int64
from specplan.kernels.device import convert, memory, ptx, smem
from specplan.kernels.device.mma import mma_bf16
from specplan.kernels.gdn_replay.cursors import Cursor
from specplan.kernels.gdn_replay.tiles import BLOCKS, HEAD, LANES, WINDOW, HistoryKeys, Lane

#: Records that a lane holds of the sixteen, counted from 2 * (lane % 4).
RECORD = (0, 1, 8, 9)
#: One bank of one head's rec_u or rec_k.
BANK_BYTES = WINDOW * HEAD * 2


def load_decays(head_G: Int64, lane: Lane, cursor: Cursor, live: Boolean) -> list[Float32]:
    """Load cumulative log decays of a head's history: G_P, and G_j of the lane's four records."""
    bank_G = head_G + Int64(cursor.bank * (WINDOW * 4))
    rows = [cursor.length - 1, *(lane.quad * 2 + r for r in RECORD)]
    return [
        convert.bits_to_float(
            memory.load_read_only(
                bank_G + Int64(row * 4), 1, live & (row >= 0) & (row < cursor.length)
            )[0]
        )
        for row in rows
    ]


class Weights:
    """e^(G_P), and w_j = e^(G_P - G_j) of the lane's four records."""

    def __init__(self, decays: list[Float32], lane: Lane, cursor: Cursor) -> None:
        self.total, *G = decays
        self.decay = ptx.exp(self.total)
        self.weight = [
            ptx.select(lane.quad * 2 + row < cursor.length, ptx.exp(self.total - g), Float32(0.0))
            for row, g in zip(RECORD, G, strict=True)
        ]


def load_deltas(
    head_u: Int64, lane: Lane, cursor: Cursor, first_row: Int32, live: Boolean
) -> list[Int32]:
    """Load the lane's words of its four records of U_hist, at a warp's value rows."""
    base = head_u + Int64(cursor.bank * BANK_BYTES + (first_row + lane.operand_row) * 2)
    words = []
    for r in RECORD:
        row = lane.quad * 2 + r
        at = base + Int64(row * (HEAD * 2))
        words += memory.load_read_only(at, lane.tiles, live & (row < cursor.length))
    return words


def arrange_deltas(lane: Lane, words: list[Int32]) -> list[list[Int32]]:
    """Arrange U_hist as column operands: per tile the lane's words of records (0, 1) and (8, 9)."""
    row = [words[i * lane.tiles : (i + 1) * lane.tiles] for i in range(4)]
    return [lane.columns(row[0], row[1]), lane.columns(row[2], row[3])]


def copy_history_keys(
    records: HistoryKeys, slot_k: Int64, cursor: Cursor, thread: Int32, warps: int
) -> None:
    """Start copying K_hist to shared memory, with all threads of the CTA. Dead rows become
    zeros, unread.
    """
    source = slot_k + Int64(cursor.bank * BANK_BYTES)
    for first in range(0, 16 * 16, warps * LANES):
        index = thread + first
        row, chunk = index >> 4, index & 15
        memory.copy_async_or_zero(
            records.chunk_address(row, chunk), source + Int64(index * 16), row < cursor.length
        )


class HistoryKeysShare:
    """This thread's part of K_hist, copied through registers.

    For a CTA's first unit: an asynchronous copy would be committed after the first tile's, so
    waiting for it would be waiting for the tile.
    """

    def __init__(self, thread: Int32, warps: int) -> None:
        self.chunks = [thread + first for first in range(0, 16 * 16, warps * LANES)]

    def load(self, slot_k: Int64, cursor: Cursor, live: Boolean) -> list[list[Int32]]:
        """Load the chunks; zeros for dead rows."""
        source = slot_k + Int64(cursor.bank * BANK_BYTES)
        return [
            memory.load_read_only(
                source + Int64(chunk * 16), 4, live & ((chunk >> 4) < cursor.length)
            )
            for chunk in self.chunks
        ]

    def store(self, records: HistoryKeys, words: list[list[Int32]]) -> None:
        """Store the loaded chunks to shared memory."""
        for chunk, row in zip(self.chunks, words, strict=True):
            smem.store_shared4(records.chunk_address(chunk >> 4, chunk & 15), row)


def weight_deltas(
    lane: Lane, weights: Weights, deltas: list[list[Int32]]
) -> list[list[tuple[Int32, Int32]]]:
    """Scale U_hist by w, as row operands of the fold: by tile, records (0, 1) and (8, 9), term."""
    w = weights.weight
    return [
        [
            convert.split_bf16(
                convert.bf16_low(deltas[half][tile]) * w[2 * half],
                convert.bf16_high(deltas[half][tile]) * w[2 * half + 1],
            )
            for half in range(2)
        ]
        for tile in range(lane.tiles)
    ]


def fold_history(
    lane: Lane,
    half: Int32,
    decay: Float32,
    weighted: list[list[tuple[Int32, Int32]]],
    keys: HistoryKeys,
    read: Callable[[int, int], list[Int32]],
    target: Int64,
    wide: bool,
) -> None:
    """Store e^(G_P) S0 + (w o U_hist)^T K_hist of a warp's rows, columns 64 half to 64 half + 63.

    ``keys`` holds K_hist; ``read(tile, block)`` gives the lane's 8 elements of S0 and ``target`` is
    where those of tile 0, block 0 go, both counted from this half. Two tiles make the 16 rows of a
    product; columns are permuted as value rows are, so that a lane's results belong to the elements
    that it read.
    """
    size = 4 if wide else 2
    nothing = (Int32(0), Int32(0))
    for block in range(BLOCKS // 2):
        columns = keys.load_columns(lane, half, block)
        for tile in range(0, lane.tiles, 2):
            pair = [tile, tile + 1] if tile + 1 < lane.tiles else [tile]
            upper = weighted[tile]
            lower = weighted[tile + 1] if len(pair) == 2 else [nothing, nothing]
            sums = []
            for i in range(4):
                acc = [Float32(0.0)] * 4
                for term in range(2):
                    a = [upper[0][term], lower[0][term], upper[1][term], lower[1][term]]
                    acc = mma_bf16(acc, a, (columns[0][i], columns[1][i]))
                sums.append(acc)
            for side, member in enumerate(pair):
                written = [x for acc in sums for x in acc[2 * side : 2 * side + 2]]
                old = read(member, block)
                if wide:
                    old = [convert.bits_to_float(word) for word in old]
                else:
                    old = [
                        x for word in old for x in (convert.bf16_low(word), convert.bf16_high(word))
                    ]
                new = [decay * x + y for x, y in zip(old, written, strict=True)]
                words = (
                    [convert.float_to_bits(x) for x in new]
                    if wide
                    else convert.pack_bf16_pairs(new)
                )
                to = target + Int64((member * 2 * HEAD + block * 32) * size)
                for i in range(0, len(words), 4):
                    memory.store_global(to + Int64(i * 4), words[i : i + 4])

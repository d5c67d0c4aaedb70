"""How operands lie over the lanes of a warp and in shared memory."""

from __future__ import annotations

from collections.abc import Callable

from cutlass import Boolean, Int32, Int64
from specplan.kernels.device import memory, ptx, smem

HEAD = 128
WINDOW = 16
LANES = 32
#: Blocks of 32 elements of a 128-long row: a lane holds 8 consecutive elements of each, at 8 *
#: (lane % 4).
BLOCKS = 4


class Lane:
    """Who this lane is in the m16n8k16 layout, and where its elements lie.

    Row of the operand X: token ``token`` (k^ in row token, q^ in row token + 8). Column of a warp's
    tile i of 8 value rows: value row ``2 tiles (token // 2) + 2 i + token % 2``, so that a lane's
    accumulators of all tiles, columns 2 quad and 2 quad + 1, are ``2 tiles`` consecutive value rows
    from ``2 tiles quad`` on: one vector access.
    """

    def __init__(self, lane: Int32, tiles: int) -> None:
        self.index = lane
        self.token = lane >> 2
        self.quad = lane & 3
        self.odd = self.token & 1
        self.tiles = tiles
        self.operand_row = (self.token >> 1) * (2 * tiles)
        self.result_row = self.quad * (2 * tiles)
        #: Takes the lower or the upper halves of two words, by the parity of this lane's column.
        self.pair_selector = ptx.select(self.odd == 1, Int32(0x7632), Int32(0x5410))

    def columns(self, first: list[Int32], second: list[Int32]) -> list[Int32]:
        """This lane's column out of two record rows, one word of (first, second) per tile."""
        return [
            ptx.permute_bytes(x, y, self.pair_selector) for x, y in zip(first, second, strict=True)
        ]


def swizzle(row: Int32) -> Int32:
    """The mask that a row's 16-byte chunk numbers are xored with.

    It makes both access patterns of a 256-byte row, two neighbouring rows over four chunks and four
    rows of one parity at one chunk, free of bank conflicts.
    """
    return ((row & 1) << 2) | ((row >> 1) & 3)


class HistoryKeys:
    """K_hist, 16 x 128 bf16, in shared memory, for all warps of a CTA."""

    BYTES = 16 * HEAD * 2

    def __init__(self, start: Int32) -> None:
        self.start = start

    def chunk_address(self, row: Int32, chunk: Int32) -> Int32:
        """Address of a 16-byte chunk of a row."""
        return self.start + row * (HEAD * 2) + (chunk ^ swizzle(row)) * 16

    def row_bases(self, lane: Lane) -> tuple[Int32, Int32]:
        """Addresses of the lane's chunks of blocks 0 and 1 in row ``token``; row ``token + 8`` is
        2048 bytes on.
        """
        row = self.start + lane.token * (HEAD * 2) + (lane.quad ^ (lane.token >> 1)) * 16
        return row + lane.odd * 64, row + (1 - lane.odd) * 64

    @staticmethod
    def load_rows(bases: tuple[Int32, Int32], block: int) -> tuple[list[Int32], list[Int32]]:
        """Load the lane's 8 elements of block ``block``, of rows ``token`` and ``token + 8``."""
        at, offset = bases[block % 2], (block // 2) * 128
        return smem.load_shared4(at, offset), smem.load_shared4(at, offset + 8 * HEAD * 2)

    def load_columns(self, lane: Lane, half: Int32, block: int) -> tuple[list[Int32], list[Int32]]:
        """Load block ``2 half + block`` as column operands: per tile of 8 columns, the words of
        rows (0, 1) and (8, 9) from 2 quad on.
        """
        at = self.start + lane.quad * (2 * HEAD * 2) + ((lane.token >> 1) ^ lane.quad) * 16
        at = at + half * 128
        even, odd = block * 64, HEAD * 2 + (block ^ 1) * 64
        first = lane.columns(smem.load_shared4(at, even), smem.load_shared4(at, odd))
        down = 8 * HEAD * 2
        second = lane.columns(smem.load_shared4(at, even + down), smem.load_shared4(at, odd + down))
        return first, second


class Operand:
    """X = [k^; q^] in shared memory, in the order of the lanes' registers: 16 bytes per lane are
    the four registers of a row operand.

    Fragment f = 2 block + step covers the elements 32 block + 8 quad + 4 step + {0..3} of a lane's
    rows ``token`` (k^) and ``token + 8`` (q^), as words (k, q, k, q).
    """

    BYTES = 16 * HEAD * 2

    def __init__(self, start: Int32) -> None:
        self.start = start

    def load_fragment(self, lane: Lane, block: int, step: int) -> list[Int32]:
        """Load a row operand: the lane's four registers of one k-step of 16 elements."""
        return smem.load_shared4(self.start + lane.index * 16, (2 * block + step) * (LANES * 16))


class StateTile:
    """A warp's rows of one head's state in shared memory, swizzled against bank conflicts by
    16-byte chunks.

    A quarter of a warp reads two rows, of different parity. bf16: its 8 chunks are half a row of
    each, so odd rows have their halves of every 128 bytes exchanged. fp32: they are every other
    chunk, so odd rows have neighbours exchanged.
    """

    def __init__(self, wide: bool, rows: int) -> None:
        self.wide = wide
        self.rows = rows
        self.row_bytes = HEAD * (4 if wide else 2)
        self.bytes = rows * self.row_bytes

    def copy_async(self, shared: Int32, source: Int64, lane: Int32) -> None:
        """Start copying the tile, which is contiguous in global memory from ``source`` on."""
        here = source + Int64(lane * 16)
        if self.wide:
            even = shared + lane * 16
            odd = shared + (lane ^ 1) * 16
            for row in range(self.rows):
                to = odd if row % 2 else even
                memory.copy_async(to, row * self.row_bytes, here, row * self.row_bytes)
        else:
            parity = lane >> 4
            to = shared + parity * self.row_bytes + ((lane & 15) ^ (parity << 2)) * 16
            for pair in range(self.rows // 2):
                memory.copy_async(to, pair * 512, here, pair * 512)

    def prefetch_l2(self, source: Int64, leads: Boolean) -> None:
        """Prefetch the tile to L2, by the one lane that ``leads``."""
        memory.prefetch_l2(source, self.bytes, leads)

    def lane_bases(self, shared: Int32, lane: Lane) -> tuple[Int32, Int32]:
        """Addresses of the lane's first two chunks of tile 0; later ones lie at constant offsets
        from them.
        """
        row = shared + (lane.operand_row + lane.odd) * self.row_bytes
        if self.wide:
            first = row + lane.quad * 32
            return first + lane.odd * 16, first + (1 - lane.odd) * 16
        first = row + lane.quad * 16
        return first + lane.odd * 64, first + (1 - lane.odd) * 64

    def read(self, bases: tuple[Int32, Int32], tile: int, block: int) -> list[Int32]:
        """Load the lane's 8 elements of block ``block`` in its row of tile ``tile``: 4 words of
        bf16, or 8 of fp32.
        """
        row = tile * 2 * self.row_bytes
        if self.wide:
            first = smem.load_shared4(bases[0], row + block * 128)
            return first + smem.load_shared4(bases[1], row + block * 128)
        return smem.load_shared4(bases[block % 2], row + (block // 2) * 128)

    def reader(
        self, bases: tuple[Int32, Int32], half: Int32 | None = None
    ) -> Callable[[int, int], list[Int32]]:
        """``read`` as a function of tile and block, which counts from half ``half`` on if given."""
        if half is not None:
            start = half * (self.row_bytes // 2)
            bases = bases[0] + start, bases[1] + start
        return lambda tile, block: self.read(bases, tile, block)

"""What a compiled plan fixes: its form, tile sizes, and the layout of shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from specplan.plans.plan import Plan
from specplan.plans.sparse_gqa_verify import (
    GROUP_ROWS,
    HEAD_DIM,
    UNION_LIST,
    UNION_TOKENS,
    WARP_TOKENS,
    WARPS,
)

#: Entries of a lone row that a thread looks up before anything else is known.
EARLY = 4
#: Words of a bitmap of blocks: one bit for every four tokens.
BITMAP_WORDS = UNION_TOKENS // 4 // 32
#: Columns of the block table at most that a CTA keeps in shared memory while it finds a union.
TABLE_WORDS = 1024
#: Bytes of a row of staged and of partial results: fp32 sums, then four words, of which partial
#: rows use two.
STAGED_ROW = HEAD_DIM * 4 + 16
PARTIAL_ROW = HEAD_DIM * 4 + 16
LOG2_E = 1.4426950408889634
NO_LIMIT = 2**31 - 1
#: Copies that a thread prepares together: reads of the window cannot pass a copy to shared memory.
FETCH_BATCH = 8
#: Partial results that a thread of the merge has in flight. Of lone rows: of 33 splits, the most
#: the rule takes, a thread takes a quarter, which are one batch. Of groups, whose splits are fewer.
MERGE_BATCH = 9
GROUP_MERGE_BATCH = 8
MERGE_THREADS = HEAD_DIM
#: Query heads that a CTA of a group's merge takes: four dims a thread.
MERGE_HEADS = 4 * MERGE_THREADS // HEAD_DIM
#: Shared memory of a CTA that leaves none for another of the same launch on its SM.
APART_BYTES = 116 * 1024
#: Rows that a warp merges and stores side by side, by the MMA tiles of a group.
STORE_BATCH = {1: 1, 2: 2, 3: 3}
#: Rows of partial results that a warp has in flight.
PARTIAL_BATCH = 3
#: Largest sum of four weights that a row's maximum of an earlier tile may give, before it is
#: replaced: far below the largest fp16.
MOST_WEIGHT = 1024.0
DIRECT, UNION, FILTERED = 0, 1, 2


@dataclass(frozen=True)
class Form:
    """What is fixed at compile time."""

    dtype: str
    m_tiles: int
    native_e2m1: bool

    @property
    def row_bytes(self) -> int:
        return {"bf16": 2 * HEAD_DIM, "fp8_e4m3": HEAD_DIM, "nvfp4": HEAD_DIM // 2}[self.dtype]

    @property
    def stages(self) -> int:
        return {"bf16": 1, "fp8_e4m3": 2, "nvfp4": 3}[self.dtype]

    @property
    def warps(self) -> int:
        """A warp scores 16 tokens of a tile, and takes its slice of the head dimension of all of
        them.
        """
        return WARPS[self.m_tiles]

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile(self) -> int:
        return WARP_TOKENS * self.warps

    @property
    def slice(self) -> int:
        return HEAD_DIM // self.warps

    @property
    def sums(self) -> int:
        """fp32 sums that a thread keeps."""
        return self.m_tiles * self.slice // 2

    @property
    def per_window(self) -> int:
        """Entries of a window for each thread."""
        return 9 if self.warps == 4 else 5

    @property
    def window(self) -> int:
        return self.per_window * self.threads

    @property
    def quads(self) -> int:
        """Runs of four entries of a row's list that a thread marks; the lanes of a warp take one
        each of what is left of a row.
        """
        return UNION_LIST // 4 // self.threads

    @property
    def f16(self) -> bool:
        return self.dtype != "bf16"

    @property
    def m_rows(self) -> int:
        return 16 * self.m_tiles

    @property
    def e2m1_exponent(self) -> int:
        """Decoded K and V are this many powers of two below their value (integer decode: 14, less 7
        in the scale).
        """
        return 7 if self.dtype == "nvfp4" and not self.native_e2m1 else 0

    # Shared memory, in bytes from its start.
    @property
    def p_at(self) -> int:
        return self.m_tiles * 16 * 512

    @property
    def p_bytes(self) -> int:
        """Weights of a tile. There are two, so that a warp may store the next while others read."""
        return self.m_tiles * self.tile * 32

    @property
    def window_at(self) -> int:
        return self.p_at + 2 * self.p_bytes

    @property
    def reduce_at(self) -> int:
        return self.window_at + self.window * 8

    @property
    def misc_at(self) -> int:
        return self.reduce_at + self.warps * self.m_rows * 4

    @property
    def planes_at(self) -> int:
        return self.misc_at + 128

    @property
    def share_at(self) -> int:
        return self.planes_at + 128

    @property
    def row_scales_at(self) -> int:
        return self.share_at + 64

    @property
    def ring_at(self) -> int:
        return self.row_scales_at + 4 * (self.m_rows if self.f16 else 16)

    @property
    def v_at(self) -> int:
        return self.ring_at + self.stages * self.tile * self.row_bytes

    @property
    def k_scales_at(self) -> int:
        return self.v_at + self.stages * self.tile * self.row_bytes

    @property
    def v_scales_at(self) -> int:
        return self.k_scales_at + (self.stages * self.tile * 16 if self.dtype == "nvfp4" else 0)

    @property
    def smem_bytes(self) -> int:
        scales = self.stages * self.warps * self.tile * 16 if self.dtype == "nvfp4" else 0
        union = self.table_at + TABLE_WORDS * 4
        return max(self.v_scales_at + scales, union, self.ring_at + self.m_rows * STAGED_ROW)

    # The union is found where the ring lies later: a bitmap of each row, that of the union, counts
    # of its bits below each word, what is left of the lists, and the request's block table.
    @property
    def union_at(self) -> int:
        return self.ring_at + GROUP_ROWS * BITMAP_WORDS * 4

    @property
    def prefix_at(self) -> int:
        return self.union_at + BITMAP_WORDS * 4

    @property
    def rest_at(self) -> int:
        return self.prefix_at + BITMAP_WORDS * 4

    @property
    def broken_at(self) -> int:
        return self.rest_at + self.threads * 16

    @property
    def table_at(self) -> int:
        return self.broken_at + self.threads * 4


def form_of(plan: Plan) -> Form:
    return Form(str(plan["dtype"]), plan.int("m_tiles"), not plan.arch.startswith("sm_9"))

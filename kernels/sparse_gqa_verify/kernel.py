"""Device code of ``sparse_gqa_verify``: attention of verify rows over their chosen tokens in a
paged K/V cache.

``reference.py`` states the math; this file computes the same with bf16 or fp16 MMAs and fp32 sums.

**Arguments** of the compiled function, positional; marks: [f] FP8 only, [n] NVFP4 only, [fn] both.

====================  ==================  ========================================================
q                     bf16 [N, Hq, 256]   last stride 1, others multiples of 8
k_cache, v_cache      [P, Hk, T, 256]     bf16, or float8_e4m3fn [f]; uint8 [P, Hk, T, 128] [n].
                                          Views: last stride 1, others multiples of 16 bytes
                                          (NHD: ``permute(0, 2, 1, 3)``)
k_block_scales,       [P, Hk, T, 16]      [n] float8_e4m3fn; last stride 1, others multiples of 16
v_block_scales
k_scale, v_scale      fp32 [1]            [fn] dequantization factors
block_table           int32 [B, C]        any strides
selected_tokens       int32 [N, W]        any strides
request_indices       int32 [N]           any stride
valid_count           int32 [N]           any int32 [N] tensor if unused
query_positions       int32 [N]           any int32 [N] tensor if unused
output_gate           bf16 [N, Hq, 256]   like q; any such tensor if unused
out                   bf16 [N, Hq, 256]   like q
workspace             fp32 [words]        16-byte aligned; unused if splits is 1 or cluster is not
softmax_scale         float
use_valid_count       0 or 1
use_query_positions   0 or 1
use_output_gate       0 or 1
v_interleaved         0 or 1              [n] ``VScaleOrder``
requests, q_heads,    the plan's sizes    N = requests x tokens, Hq, Hk, T and W
kv_heads, page_size,
width
words                 the plan's words    ``plans.sparse_gqa_verify.workspace_words``
tokens, group_rows,   the plan's launch   ``plans/sparse_gqa_verify.py``
splits, whole_units,                      splits 0: a call that checks, and launches nothing
cluster, apart
====================  ==================  ========================================================

The host side raises RuntimeError and launches nothing unless the tensors have the plan's sizes, the
workspace has its words, ``softmax_scale`` is finite and above 0, an interleaved V scale plane has
token stride 16, ``out`` and a used workspace overlap no other argument, and the rows of ``out``
share no memory. **The planning rule sees to it** that Hq is a multiple of Hk and fits the plan's
``m_tiles``: ``ceil(group_rows * Hq / Hk / 16)``; that T is a multiple of 4; that W times ``splits``
is below 2^31; that ``cluster`` is 1, or ``splits`` where no unit is whole and splits are at most
``MAX_CLUSTER``; and that ``group_rows`` is 1 in forms of one MMA tile alone.

**Work.** A CTA takes one K/V head of a group of rows, or a split of it. It fills a *window* with
what the rows attend, then walks it in tiles of 16 tokens a warp: four warps and two CTAs an SM, or
eight warps and one. In a group of several rows of one request the window is the union of their
lists in blocks of four tokens, found through bitmaps of blocks in shared memory, one of each row
and one of all, and an entry says which rows list which token. A split's part of the union is a
range of its blocks in their order, so a CTA looks up no others. In any other case (one row; rows of
several requests; lists longer than 2176; more than 262144 positions) rows are done one after
another. So are the rows of a union in which a list repeats a token, or that meets a V which is not
finite (0 * NaN must not reach a row that does not list it). A list's order does not matter to a
union, and no result depends on the order of threads: runs repeat bit for bit.

**Numbers.** bf16 caches: bf16 MMAs. FP8 and NVFP4 decode exactly to fp16 (e2m1 times its block
scale is exact there); Q goes to fp16 scaled by a power of two for each row, exact down to 2^-28 of
the row's largest magnitude; the global scales and these powers of two multiply the fp32 scores and
sums. Softmax is online in fp32. Split results are fp32 sums before division, with their maximum in
log2 units and total, merged in the order of the splits: where the splits of a unit are a cluster,
each of its CTAs merges a share of the rows out of the shared memory of all, and a union that fails
in one is done again in all; else a second kernel of the same call merges them out of the workspace.

The gate multiplies the rounded output by a sigmoid that repeats CUDA's ``expf`` and a correctly
rounded reciprocal, so that a fused gate equals ``(out.float() *
torch.sigmoid(gate.float())).to(bf16)`` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, Numeric, Uint8, cute
from specplan.kernels import fakes, ranges
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.plans.plan import Plan
from specplan.plans.sparse_gqa_verify import (
    GROUP_ROWS,
    HEAD_DIM,
    MAX_CLUSTER,
    MAX_SPLITS,
    UNION_LIST,
    UNION_TOKENS,
    WARP_TOKENS,
    WARPS,
    resident,
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


class _Cta(NamedTuple):
    """One CTA's share of the work."""

    smem: Int32
    thread: Int32
    warp: Int32
    lane: Int32
    row0: Int32
    rows: Int32
    kv_head: Int32
    group: Int32
    group_reciprocal: Int32
    split: Int32
    splits: Int32
    lists: cute.Tensor
    table: cute.Tensor
    page_size: Int32
    page_reciprocal: Int32
    pages: Int32
    interleaved: Int32


def _save(cta: _Cta, form: Form) -> None:
    """Keeps in shared memory what the tile loop does not need, so that it takes no registers
    there.
    """
    at = cta.smem + form.share_at
    ptx.store_shared4(at, (cta.row0, cta.rows, cta.kv_head, cta.split))
    ptx.store_shared4(at + 16, (cta.splits, cta.group, cta.group_reciprocal, cta.page_reciprocal))


def _restore(cta: _Cta, form: Form) -> _Cta:
    """What ``_save`` kept. Thread numbers come back opaque: the compiler would otherwise compute
    what follows from them alone before all loops, and keep some hundred values in registers.
    """
    at = cta.smem + form.share_at
    row0, rows, kv_head, split = ptx.load_shared4(at)
    splits, group, group_reciprocal, page_reciprocal = ptx.load_shared4(at + 16)
    return cta._replace(
        thread=ptx.opaque(cta.thread),
        warp=ptx.opaque(cta.warp),
        lane=ptx.opaque(cta.lane),
        row0=row0,
        rows=rows,
        kv_head=kv_head,
        split=split,
        splits=splits,
        group=group,
        group_reciprocal=group_reciprocal,
        page_reciprocal=page_reciprocal,
    )


class _Plane(NamedTuple):
    """How the copies address a cache plane of this CTA's head, in bytes: base, page stride, token
    stride.

    It is kept in shared memory: in registers these values would be alive through the whole tile
    loop.
    """

    base: Int64
    page: Int64
    token: Int32


# ----- the kernel: load the queries, then for each pass fill a window and walk its tiles, then stor


@cute.kernel
def _attend(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    k_block_scales: cute.Tensor,
    v_block_scales: cute.Tensor,
    k_scale: cute.Tensor,
    v_scale: cute.Tensor,
    block_table: cute.Tensor,
    selected_tokens: cute.Tensor,
    request_indices: cute.Tensor,
    valid_count: cute.Tensor,
    query_positions: cute.Tensor,
    output_gate: cute.Tensor,
    out: cute.Tensor,
    workspace: cute.Tensor,
    softmax_scale: Float32,
    use_valid_count: Int32,
    use_query_positions: Int32,
    use_output_gate: Int32,
    v_interleaved: Int32,
    tokens: Int32,
    group_rows: Int32,
    splits: Int32,
    whole_units: Int32,
    cluster: Int32,
    alone: cutlass.Constexpr,
    form: cutlass.Constexpr,
) -> None:
    # ``alone``: for launches without clusters only.
    if cutlass.const_expr(alone):
        cluster = Int32(1)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cute.arch.get_dyn_smem(Uint8, alignment=128).toint()
    kv_heads = Int32(k_cache.shape[1])
    group = Int32(q.shape[1]) // kv_heads
    subgroups = (tokens + group_rows - 1) // group_rows

    tail = block - whole_units
    unit = block
    split = Int32(0)
    count = Int32(1)
    if tail >= 0:
        unit = whole_units + tail // splits
        split = tail % splits
        count = splits
    kv_head = unit % kv_heads
    verify = unit // kv_heads
    request = verify // subgroups
    within = (verify % subgroups) * group_rows
    row0 = request * tokens + within
    rows = cutlass.min(group_rows, tokens - within)
    cta = _Cta(
        smem=smem,
        thread=thread,
        warp=thread >> 5,
        lane=thread & 31,
        row0=row0,
        rows=rows,
        kv_head=kv_head,
        group=group,
        group_reciprocal=Int32(65536) // group + 1,
        split=split,
        splits=count,
        lists=selected_tokens,
        table=block_table,
        page_size=Int32(k_cache.shape[2]),
        # floor((2^32 - 1) / page_size): a quotient from its high product is right or one short.
        page_reciprocal=ptx.divide_unsigned(Int32(-1), Int32(k_cache.shape[2])),
        pages=Int32(k_cache.shape[0]),
        interleaved=v_interleaved,
    )
    if thread == 0:
        _save(cta, form)
        planes = (k_cache, v_cache, k_block_scales, v_block_scales)
        for i in cutlass.range_constexpr(4 if form.dtype == "nvfp4" else 2):
            size = 2 if cutlass.const_expr(form.dtype == "bf16") else 1
            base = planes[i].iterator.toint() + Int64(kv_head) * Int64(planes[i].stride[1]) * size
            at = smem + form.planes_at + 32 * i
            ptx.store_shared_wide(at, base, Int64(planes[i].stride[0]) * size)
            ptx.store_shared(at + 16, Int32(Int64(planes[i].stride[2]) * size))

    # A group of several rows fills two MMA tiles or more, or is of few heads.
    several = form.m_tiles > 1
    if cutlass.const_expr(several):
        _clear(cta, form)

    first, last = _share(cta, Int32(selected_tokens.shape[1]))
    scalars = (request_indices, valid_count, query_positions)
    _prefetch(cta, q, request, scalars, (k_scale, v_scale), form)
    cute.arch.griddepcontrol_wait()
    # The next call may take its place on the SMs at once. A merge comes when results do: 26.2 us in
    # place of 26.7 at 32 rows on an H200.
    if (cluster > 1) | (splits == 1):
        cute.arch.griddepcontrol_launch_dependents()

    # Row r of the group stands in three words: its request or -1, its entries, its last position.
    info = smem + form.misc_at
    width = Int32(selected_tokens.shape[1])
    row = row0 + cutlass.min(thread & 3, rows - 1)
    owner = ptx.load_global(_word_address(request_indices, row))
    listed = ptx.load_global_if(_word_address(valid_count, row), use_valid_count != 0, NO_LIMIT)
    limit = ptx.load_global_if(
        _word_address(query_positions, row), use_query_positions != 0, NO_LIMIT
    )
    # The list is fetched before its request is known: what a lone row's first entries need hangs on
    # one chain of loads, list to table to page, and everything else runs beside it.
    early = (group_rows == 1) if cutlass.const_expr(not several) else Boolean(False)
    ahead = [Int32(-1)] * EARLY
    fits = (
        (rows > 1)
        & (width <= UNION_LIST)
        & (Int32(block_table.shape[1]) <= Int32(UNION_TOKENS) // cta.page_size)
        & ((cta.page_size & 3) == 0)
    )
    quads: list[list[ptx.Words]] = []
    rest: list[Int32] = []
    if cutlass.const_expr(several):
        for r in cutlass.range_constexpr(GROUP_ROWS):
            quads.append(_fetch_row(cta, r, fits & (r < rows), form))
        rest = _fetch_rest(cta, fits, form)
    if early:
        listed = cutlass.max(cutlass.min(listed, width), 0)
        if listed < width:
            first, last = _share(cta, listed)
        entry = Int64(selected_tokens.stride[1]) * 4
        source = _list_address(cta, Int32(0)) + Int64(first + thread) * entry
        for u in cutlass.range_constexpr(EARLY):
            place = first + u * form.threads + thread
            ahead[u] = ptx.load_global_if(source, place < last, -1)
            source = source + form.threads * entry
    words = _fetch_queries(cta, q, form)
    if ((count == 1) | ((cluster > 1) & (split == 0))) & (use_output_gate != 0):
        # The gates are needed last and read at once.
        for turn in cutlass.range_constexpr(-(-form.m_rows * 4 // form.threads)):
            line = turn * form.threads + thread
            m = line >> 2
            row, head = _row_and_head(cta, m)
            source = _row_address(output_gate, row, head, 64 * (line & 3))
            ptx.prefetch_l2(source, m < rows * group)
    score_scale = softmax_scale * Float32(LOG2_E * 2.0**form.e2m1_exponent)
    value_scale = Float32(2.0**form.e2m1_exponent)
    if cutlass.const_expr(form.f16):
        score_scale = score_scale * ptx.load_global_float(k_scale.iterator.toint())
        value_scale = value_scale * ptx.load_global_float(v_scale.iterator.toint())
    live = (owner >= 0) & (owner < Int32(block_table.shape[0]))
    if early:
        _place_entries(cta, owner, ahead, limit, live, form)
        if thread == 0:
            last = ptx.choose(live, last, first)
            ptx.store_shared2(smem + form.share_at + 48, first, last)
    if thread == 0:
        ptx.store_shared(smem + form.share_at + 32, tail)
        ptx.store_shared_float(smem + form.share_at + 36, value_scale)
    if thread < GROUP_ROWS:
        live = live & (thread < rows)
        listed = cutlass.max(cutlass.min(listed, width), 0)
        ptx.store_shared4(
            info + thread * 16,
            (
                ptx.choose(live, owner, Int32(-1)),
                ptx.choose(live, listed, Int32(0)),
                limit,
                Int32(0),
            ),
        )
    twice = Int32(0)
    if cutlass.const_expr(several):
        ptx.barrier()
        _stage_table(cta, form)
        broken = Int32(0)
        for r in cutlass.range_constexpr(GROUP_ROWS):
            odd_quads, again = _mark_row(cta, Int32(r), quads[r], form)
            broken = broken | (odd_quads << (r * form.quads))
            twice = twice | again
        _mark_rest(cta, rest, broken, form)
    _place_queries(cta, words, score_scale, form)
    ptx.wait(0)
    if cutlass.const_expr(several):
        twice = ptx.any_thread(twice != 0)
    else:
        ptx.barrier()

    late = smem + form.share_at + 32
    owners = [ptx.load_shared(info + 16 * r) for r in range(GROUP_ROWS)]
    base = owners[0]
    for r in cutlass.range_constexpr(1, GROUP_ROWS):
        base = cutlass.max(base, owners[r])
    same = Int32(1)
    for r in cutlass.range_constexpr(GROUP_ROWS):
        same = same & Int32((owners[r] == base) | (owners[r] < 0))
    unite = fits & (same != 0)

    lane_row = cta.lane >> 2
    # Four bits for each of this lane's rows: the row's bit of an entry's membership, or none.
    row_bits = Int32(0)
    for i in cutlass.range_constexpr(2 * form.m_tiles):
        m = lane_row + 8 * i
        bit = ptx.choose(m < rows * group, Int32(1) << _row_of(cta, m), Int32(0))
        row_bits = row_bits | (bit << (4 * i))

    acc = cute.make_rmem_tensor((form.sums,), Float32)
    top = cute.make_rmem_tensor((2 * form.m_tiles,), Float32)
    total = cute.make_rmem_tensor((2 * form.m_tiles,), Float32)
    # A list with a block twice: a union would count it once.
    whole = unite & (twice == 0)
    mode = ptx.choose(unite, ptx.choose(whole, Int32(UNION), Int32(FILTERED)), Int32(DIRECT))
    done = Int32(0)
    passes = Boolean(True)
    while passes:
        for i in cutlass.range_constexpr(form.sums):
            acc[i] = Float32(0.0)
        for i in cutlass.range_constexpr(2 * form.m_tiles):
            top[i] = Float32(float("-inf"))
            total[i] = Float32(0.0)
        window = Int32(0)
        more = Int32(1)
        failed = Int32(0)
        while more != 0:
            entries, left, repeated = _fill(cta, mode, done, window, early, form)
            shift = ptx.choose(mode == UNION, Int32(2), Int32(0))
            _walk(cta, window, entries, shift, row_bits, acc, top, total, form)
            failed = failed | repeated
            more = left
            window += 1
        if mode == UNION:
            # A union feeds every row's V to the MMAs of all rows with weight 0. Where such a V is
            # not finite, or where a list repeats a token, each row is done again alone.
            odd = Float32(0.0)
            for i in cutlass.range_constexpr(form.sums):
                odd = odd + acc[i] * Float32(0.0)
            failed = ptx.any_thread((odd != odd) | (failed != 0))
        if (cluster == 1) & (splits > 1):
            cute.arch.griddepcontrol_launch_dependents()
        tail = ptx.load_shared(late)
        value_scale = ptx.load_shared_float(late + 4)
        chosen = ptx.choose(mode == UNION, Int32(-1), Int32(1) << done)
        # The first gates come while sums are staged, and while the others of a cluster are waited
        # for.
        gates = cute.make_rmem_tensor((4 * STORE_BATCH[form.m_tiles],), Int32)
        wanted = ptx.choose(use_output_gate != 0, chosen, Int32(0))
        if cluster > 1:
            fresh = _restore(cta, form)
            _stage(fresh, value_scale, acc, total, form)
            _stage_tops(fresh, top, form)
            first_m = fresh.split + cluster * fresh.warp
            _fetch_gates(fresh, output_gate, gates, first_m, cluster, wanted, form)
            failed = _meet(fresh, mode, failed, cluster, form)
            if failed == 0:
                _store_rows(cta, out, output_gate, gates, wanted, chosen, cluster, True, form)
        elif failed == 0:
            if (tail < 0) | (splits == 1):
                fresh = _restore(cta, form)
                _fetch_gates(fresh, output_gate, gates, fresh.warp, cluster, wanted, form)
                _stage(fresh, value_scale, acc, total, form)
                ptx.barrier()
                _store_rows(cta, out, output_gate, gates, wanted, chosen, cluster, False, form)
            else:
                _store_partial(
                    cta, workspace, tail, group_rows, chosen, value_scale, acc, top, total, form
                )
        if failed != 0:
            mode = Int32(FILTERED)
        else:
            done += 1
        # Rows again from shared memory: no register is free through the loops.
        passes = done < ptx.choose(
            mode == UNION, Int32(1), ptx.load_shared(smem + form.share_at + 4)
        )


@cute.jit
def _prefetch(
    cta: _Cta,
    q: cute.Tensor,
    request: Int32,
    of_rows: tuple[cute.Tensor, ...],
    factors: tuple[cute.Tensor, ...],
    form: cutlass.Constexpr,
) -> None:
    """Asks the L2 for what the CTAs of a unit read first, each for a part: lists, queries, and the
    table of the request, if its rows name the one that they stand at. No more than a hint: what
    came before may still write all of this, and nothing is read.
    """
    place = cta.split * form.threads + cta.thread
    together = cta.splits * form.threads
    for tensor in of_rows:
        ptx.prefetch_l2(_word_address(tensor, cta.row0), place == 0)
    if cutlass.const_expr(form.f16):
        for tensor in factors:
            ptx.prefetch_l2(tensor.iterator.toint(), place == 0)
    entry = Int64(cta.lists.stride[1]) * 4
    for row in cutlass.range(cta.rows, unroll=1):
        source = _list_address(cta, row)
        for line in cutlass.range(32 * place, Int32(cta.lists.shape[1]), 32 * together, unroll=1):
            ptx.prefetch_l2(source + Int64(line) * entry, Boolean(True))
        for line in cutlass.range(place, cta.group * 4, together, unroll=1):
            head = cta.kv_head * cta.group + (line >> 2)
            dim = 64 * (line & 3)
            ptx.prefetch_l2(_row_address(q, cta.row0 + row, head, dim), Boolean(True))
    if request < Int32(cta.table.shape[0]):
        for column in cutlass.range(32 * place, Int32(cta.table.shape[1]), 32 * together, unroll=1):
            ptx.prefetch_l2(_table_address(cta, request, column), Boolean(True))


# ----- queries: global memory to MMA fragments in shared memory -----------------------------------


def _first_dim(form: Form, warp: Int32, quad: Int32, pair: int) -> Int32:
    """First of the eight dims that lane ``quad`` of a quad feeds to MMA steps 2 p and 2 p + 1,
    where p = pairs a warp x warp + pair.

    A step contracts 16 dims in any order, if K and Q agree. This order makes what a lane needs of a
    K row 16 contiguous bytes in every format.
    """
    p = warp * (8 // form.warps) + pair
    if form.dtype == "bf16":
        return p * 32 + 8 * quad
    if form.dtype == "fp8_e4m3":
        return (p >> 1) * 64 + (p & 1) * 8 + 16 * quad
    return (p >> 2) * 128 + ((p >> 1) & 1) * 16 + (p & 1) * 8 + 32 * quad


def _row_of(cta: _Cta, m: Int32) -> Int32:
    """``m // group``, exact for the few rows there are."""
    return (m * cta.group_reciprocal) >> 16


def _row_and_head(cta: _Cta, m: Int32) -> tuple[Int32, Int32]:
    """The row of q and the query head of a row of the MMA tiles."""
    row = _row_of(cta, m)
    return cta.row0 + row, cta.kv_head * cta.group + (m - row * cta.group)


def _fetch_queries(cta: _Cta, q: cute.Tensor, form: Form) -> Any:
    """What this lane's fragments of its warp's steps hold: eight dims of each of its rows for
    every two steps.
    """
    pairs = 8 // form.warps
    words = cute.make_rmem_tensor((form.m_tiles * 8 * pairs,), Int32)
    for i in range(2 * form.m_tiles):
        m = (cta.lane >> 2) + 8 * i
        row, head = _row_and_head(cta, m)
        for pair in range(pairs):
            dim = _first_dim(form, cta.warp, cta.lane & 3, pair)
            address = _row_address(q, row, head, dim)
            four = ptx.load_global4_if(address, m < cta.rows * cta.group)
            for j in range(4):
                words[4 * (pairs * i + pair) + j] = four[j]
    return words


def _maxima(cta: _Cta, form: Form) -> Int32:
    """Where each warp's part of something about this lane's first row stands; the next is eight
    rows of ``warps`` words on.
    """
    return cta.smem + form.reduce_at + (cta.lane >> 2) * 4 * form.warps


@cute.jit
def _place_queries(
    cta: _Cta,
    words: Any,
    score_scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Q to fragments in shared memory. In fp16 each row is scaled by a power of two, which is
    exact.
    """
    pairs = 8 // form.warps
    if cutlass.const_expr(form.f16):
        mine = _maxima(cta, form) + cta.warp * 4
        for i in cutlass.range_constexpr(2 * form.m_tiles):
            largest = Int32(0)
            for j in cutlass.range_constexpr(4 * pairs):
                word = words[i * 4 * pairs + j]
                largest = cutlass.max(largest, word & 0x7FFF)
                largest = cutlass.max(largest, ptx.shift_right(word, 16) & 0x7FFF)
            largest = cutlass.max(largest, ptx.shuffle_xor(largest, 1))
            largest = cutlass.max(largest, ptx.shuffle_xor(largest, 2))
            ptx.store_shared(mine, largest, 32 * form.warps * i)
        ptx.barrier()
        for i in cutlass.range_constexpr(2 * form.m_tiles):
            largest = Int32(0)
            for part in cutlass.range_constexpr(form.warps // 4):
                at = _maxima(cta, form)
                four = ptx.load_shared4(at, 32 * form.warps * i + 16 * part)
                both = cutlass.max(cutlass.max(four[0], four[1]), cutlass.max(four[2], four[3]))
                largest = cutlass.max(largest, both)
            # The largest magnitude moves to [16, 32). Rows with Inf or NaN stay as they are.
            exponent = cutlass.max(largest >> 7, 8)
            exponent = ptx.choose(largest >= 0x7F80, Int32(131), exponent)
            factor = ptx.float_of_bits((258 - exponent) << 23)
            inverse = ptx.float_of_bits((exponent - 4) << 23)
            row_scale = cta.smem + form.row_scales_at + ((cta.lane >> 2) + 8 * i) * 4
            if cta.warp == 0:
                ptx.store_shared_float(row_scale, score_scale * inverse)
            for j in cutlass.range_constexpr(4 * pairs):
                at_word = i * 4 * pairs + j
                low, high = ptx.unpack_bf16(words[at_word])
                words[at_word] = ptx.pack_f16(low * factor, high * factor)
    elif cta.thread == 0:
        ptx.store_shared_float(cta.smem + form.row_scales_at, score_scale)

    base = cta.smem + cta.warp * (2 * pairs * 512) + cta.lane * 16
    for tile in cutlass.range_constexpr(form.m_tiles):
        for pair in cutlass.range_constexpr(pairs):
            upper = [words[4 * (2 * tile * pairs + pair) + i] for i in range(4)]
            lower = [words[4 * ((2 * tile + 1) * pairs + pair) + i] for i in range(4)]
            if cutlass.const_expr(form.dtype == "nvfp4" and not form.native_e2m1):
                upper, lower = _evens_first(upper), _evens_first(lower)
            for step in cutlass.range_constexpr(2):
                ptx.store_shared4(
                    base,
                    (upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]),
                    (tile * 16 + 2 * pair + step) * 512,
                )


def _evens_first(words: list[Int32]) -> list[Int32]:
    """Eight halves d0 .. d7 as (d0,d2) (d4,d6) (d1,d3) (d5,d7), the order that the integer e2m1
    decode produces.
    """
    a, b, c, d = words
    return [
        ptx.permute(a, b, 0x5410),
        ptx.permute(c, d, 0x5410),
        ptx.permute(a, b, 0x7632),
        ptx.permute(c, d, 0x7632),
    ]


# ----- the window: which tokens this CTA attends, and for which rows ------------------------------
#
# An entry is two words: the physical page, and slot << 16 | membership. In a union an entry is four
# consecutive tokens, and bit 4 i + r says that row r lists token i of it. Otherwise an entry is one
# token, and bit r says that it is row r's.


@cute.jit
def _fill(
    cta: _Cta,
    mode: Int32,
    row: Int32,
    window: Int32,
    early: Any,
    form: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """``(entries, windows are left, a list repeats a token)``. Ends with a barrier."""
    entries = Int32(0)
    left = Int32(0)
    cta = _restore(cta, form)
    repeated = Int32(0)
    first = Int32(0)
    low = Int32(0)
    high = Int32(0)
    # The first entries of a lone row are there already.
    begin = ptx.choose(early & (window == 0), Int32(EARLY * form.threads), Int32(0))
    if mode == DIRECT:
        last = Int32(0)
        if begin > 0:
            first, last = ptx.load_shared2(cta.smem + form.share_at, 48)
        else:
            ptx.wait(0)
            ptx.barrier()
            first, last = _share(cta, ptx.load_shared(cta.smem + form.misc_at + row * 16 + 4))
        first = first + window * form.window
        entries = cutlass.min(last - first, form.window)
        left = Int32(last - first > form.window)
    else:
        # Several rows' first bitmaps are there already, and tiles overwrite them.
        again = Int32(1)
        if cutlass.const_expr(form.m_tiles > 1):
            again = Int32((window > 0) | (mode == FILTERED))
        if again != 0:
            repeated = _mark_again(cta, form)
        blocks = _count_blocks(cta, form)
        low, high = _share(cta, blocks)
        if mode == UNION:
            low = low + window * form.window
            entries = cutlass.min(high - low, form.window)
            left = Int32(high - low > form.window)
            repeated = repeated | _fill_union(cta, low, entries, again == 0, form)
            ptx.barrier()
        else:
            repeated = Int32(0)  # rows alone take a list as it is
            listed = ptx.load_shared(cta.smem + form.misc_at + row * 16 + 4)
            first = window * form.window
            entries = cutlass.min(listed - first, form.window)
            left = Int32(listed - first > form.window)
    if (mode != UNION) & (begin < cutlass.max(entries, 1)):
        _fill_listed(cta, row, first, entries, begin, mode == FILTERED, low, high, form)
        ptx.barrier()
    return entries, left, repeated


def _place_entries(
    cta: _Cta, owner: Int32, tokens: list[Int32], limit: Int32, live: Any, form: Form
) -> None:
    """Window entries of a lone row's first tokens, of which this thread has every so many."""
    found = [
        _page_of(cta, owner, token, live & (token >= 0) & (token <= limit)) for token in tokens
    ]
    for u, (page, slot, valid) in enumerate(found):
        ptx.store_shared2(
            cta.smem + form.window_at + (u * form.threads + cta.thread) * 8,
            ptx.choose(valid, page, Int32(0)),
            ptx.choose(valid, (slot << 16) | 1, Int32(0)),
        )


def _word_address(vector: cute.Tensor, index: Int32) -> Int64:
    return vector.iterator.toint() + Int64(index) * Int64(vector.stride[0]) * 4


def _share(cta: _Cta, count: Int32) -> tuple[Int32, Int32]:
    """This split's part of ``count`` items."""
    return count * cta.split // cta.splits, count * (cta.split + 1) // cta.splits


def _list_address(cta: _Cta, row: Int32) -> Int64:
    return cta.lists.iterator.toint() + Int64(cta.row0 + row) * Int64(cta.lists.stride[0]) * 4


def _page_of(cta: _Cta, owner: Int32, token: Int32, exists: Any) -> tuple[Int32, Int32, Any]:
    """``(page, slot, valid)`` of a logical token of request ``owner``."""
    column, slot = _column_of(cta, token)
    inside = exists & (column < Int32(cta.table.shape[1]))
    page = ptx.load_global_if(_table_address(cta, owner, column), inside, -1)
    return page, slot, (page >= 0) & (page < cta.pages)


def _column_of(cta: _Cta, token: Int32) -> tuple[Int32, Int32]:
    """``(column of the block table, slot)`` of a logical token."""
    column = ptx.multiply_high(token, cta.page_reciprocal)
    slot = token - column * cta.page_size
    short = slot >= cta.page_size
    return column + Int32(short), slot - ptx.choose(short, cta.page_size, Int32(0))


def _table_address(cta: _Cta, owner: Int32, column: Int32) -> Int64:
    at = Int64(owner) * Int64(cta.table.stride[0]) + Int64(column) * Int64(cta.table.stride[1])
    return cta.table.iterator.toint() + at * 4


@cute.jit
def _fill_listed(
    cta: _Cta,
    row: Int32,
    first: Int32,
    entries: Int32,
    begin: Int32,
    filtered: Any,
    low: Int32,
    high: Int32,
    form: cutlass.Constexpr,
) -> None:
    """Entries ``first ..`` of a row's list; if filtered, those alone whose block's rank is in low
    .. high - 1.
    """
    info = cta.smem + form.misc_at + row * 16
    owner = ptx.load_shared(info)
    limit = ptx.load_shared(info + 8)
    source = _list_address(cta, row)
    entry = Int64(cta.lists.stride[1]) * 4
    padded = (entries + form.tile - 1) // form.tile * form.tile
    if begin < padded:
        places = [begin + u * form.threads + cta.thread for u in range(form.per_window)]
        tokens = [
            ptx.load_global_if(source + Int64(first + i) * entry, i < entries, -1) for i in places
        ]
        found = []
        for token in tokens:
            exists = (token >= 0) & (token <= limit)
            within = exists & (token < UNION_TOKENS)
            rank = _rank(cta, ptx.choose(within, token >> 2, Int32(0)), form)
            exists = exists & (~filtered | (within & (rank >= low) & (rank < high)))
            found.append(_page_of(cta, owner, token, exists))
        for u in cutlass.range_constexpr(form.per_window):
            page, slot, valid = found[u]
            ptx.store_shared2_if(
                cta.smem + form.window_at + places[u] * 8,
                ptx.choose(valid, page, Int32(0)),
                ptx.choose(valid, (slot << 16) | (Int32(1) << row), Int32(0)),
                places[u] < form.window,
            )


def _rank(cta: _Cta, block: Int32, form: Form) -> Int32:
    """How many marked blocks lie below ``block``."""
    word = (block >> 5) * 4
    bits = ptx.load_shared(cta.smem + form.union_at + word)
    below = ptx.load_shared(cta.smem + form.prefix_at + word)
    return below + ptx.population(bits & ((Int32(1) << (block & 31)) - 1))


# A union is found through bitmaps of blocks of four tokens: one of each row, of the blocks that it
# lists whole and in order, a *quad*, and one of all rows. Most lists are quads but for up to three
# tokens at their end. What is left of a list after as many quads as all threads take, and the
# tokens of broken quads, stand in the bitmap of all rows alone, and are looked at one by one when
# the window is filled.


def _words(cta: _Cta) -> Int32:
    """Words of a bitmap that tokens of the request can stand in: a multiple of 4."""
    most = ptx.divide_unsigned(Int32(UNION_TOKENS), cta.page_size)
    tokens = cutlass.min(Int32(cta.table.shape[1]), most) * cta.page_size
    return ptx.shift_right(tokens + 511, 9) << 2


@cute.jit
def _clear(cta: _Cta, form: cutlass.Constexpr) -> None:
    """Clears bitmaps and window."""
    zero = Int32(0)
    for word in cutlass.range(4 * cta.thread, _words(cta), 4 * form.threads, unroll=1):
        for r in cutlass.range_constexpr(GROUP_ROWS + 1):
            at = cta.smem + form.ring_at + r * BITMAP_WORDS * 4 + word * 4
            ptx.store_shared4(at, (zero, zero, zero, zero))
    for i in cutlass.range_constexpr(form.per_window):
        ptx.store_shared2(
            cta.smem + form.window_at + (i * form.threads + cta.thread) * 8, zero, zero
        )


def _fetch_row(cta: _Cta, row: Int32 | int, exists: Any, form: Form) -> list[ptx.Words]:
    """This thread's quads of a row's list, -1 where it has none."""
    entry = Int64(cta.lists.stride[1]) * 4
    source = _list_address(cta, Int32(row))
    width = Int32(cta.lists.shape[1])
    address = source + Int64(4 * cta.thread) * entry
    found = []
    for turn in range(form.quads):
        first = 4 * (turn * form.threads + cta.thread)
        inside = exists & (first + 4 <= width)
        found.append(ptx.load_global_steps_if(address, entry, inside))
        address = address + 4 * form.threads * entry
    return found


def _rest_row(cta: _Cta) -> Int32:
    """The row of what this warp takes of the rests."""
    return cta.warp & 3


def _fetch_rest(cta: _Cta, exists: Any, form: Form) -> list[Int32]:
    """This thread's four entries of a row's rest, -1 where it has none."""
    row = _rest_row(cta)
    exists = exists & (row < cta.rows) & (cta.warp < 4)
    entry = Int64(cta.lists.stride[1]) * 4
    first = 4 * (form.quads * form.threads + cta.lane)
    source = _list_address(cta, row) + Int64(first) * entry
    width = Int32(cta.lists.shape[1])
    return [
        ptx.load_global_if(source + i * entry, exists & (first + i < width), -1) for i in range(4)
    ]


def _facts(cta: _Cta, row: Int32, form: Form) -> tuple[Int32, Int32]:
    """``(entries, last token)`` of a row that may be listed: a token of the request's table, and of
    the bitmaps.
    """
    _, listed, limit, _ = ptx.load_shared4(cta.smem + row * 16, form.misc_at)
    tokens = cutlass.min(Int32(cta.table.shape[1]) * cta.page_size, UNION_TOKENS)
    return listed, cutlass.min(limit, tokens - 1)


def _mark_row(cta: _Cta, row: Int32, quads: list[ptx.Words], form: Form) -> tuple[Int32, Int32]:
    """Marks the whole blocks of this thread's quads of a row. ``(a bit for each quad that is not
    one but has tokens, not 0 if a block is there twice)``.
    """
    listed, limit = _facts(cta, row, form)
    bitmap = cta.smem + form.ring_at + row * (BITMAP_WORDS * 4)
    width = Int32(cta.lists.shape[1])
    broken = Int32(0)
    twice = Int32(0)
    for turn, t in enumerate(quads):
        first = 4 * (turn * form.threads + cta.thread)
        odd = (t[0] & 3) | (t[1] ^ (t[0] + 1)) | (t[2] ^ (t[0] + 2)) | (t[3] ^ (t[0] + 3))
        whole = (odd == 0) & (t[0] >= 0) & (t[3] <= limit) & (first + 4 <= listed)
        # Threads with nothing to mark write a harmless 0 to a word of their own: a condition on an
        # atomic would be a branch.
        block = t[0] >> 2
        bit = ptx.choose(whole, Int32(1) << (block & 31), Int32(0))
        at = ptx.choose(whole, (block >> 5) * 4, cta.thread * 4)
        twice = twice | (ptx.or_shared_before(bitmap + at, bit) & bit)
        tokens = ((t[0] & t[1] & t[2] & t[3]) >= 0) | (first + 4 > width)
        broken = broken | (Int32(~whole & tokens & (first < listed)) << turn)
    return broken, twice


@cute.jit
def _mark_rest(cta: _Cta, rest: Any, broken: Int32, form: cutlass.Constexpr) -> None:
    """Marks the blocks of the rests and of broken quads, and keeps what is looked at again."""
    row = _rest_row(cta)
    listed, limit = _facts(cta, row, form)
    first = 4 * (form.quads * form.threads + cta.lane)
    tokens = []
    for i in cutlass.range_constexpr(4):
        valid = (first + i < listed) & (rest[i] >= 0) & (rest[i] <= limit)
        tokens.append(ptx.choose(valid, rest[i], Int32(-1)))
    kept = cta.smem + form.rest_at + cta.thread * 16
    ptx.store_shared4(kept, (tokens[0], tokens[1], tokens[2], tokens[3]))
    ptx.store_shared(cta.smem + form.broken_at + cta.thread * 4, broken)
    more = Boolean(True)
    while more:
        if ptx.any_lane((tokens[0] & tokens[1] & tokens[2] & tokens[3]) >= 0):
            for token in tokens:
                block = token >> 2
                at = ptx.choose(token >= 0, (block >> 5) * 4, cta.thread * 4)
                bit = ptx.choose(token >= 0, Int32(1) << (block & 31), Int32(0))
                ptx.or_shared(cta.smem + form.union_at + at, bit)
        more = ptx.any_lane(broken != 0)
        row, tokens = _broken_quad(cta, broken, form)
        broken = broken & (broken - 1)


def _broken_quad(cta: _Cta, broken: Int32, form: Form) -> tuple[Int32, list[Int32]]:
    """``(row, four tokens, -1 if not valid)`` of the last of this thread's broken quads, if any."""
    number = ptx.lowest_bit(broken)
    number = ptx.choose(broken != 0, number, Int32(0))
    row = number // form.quads
    first = 4 * ((number % form.quads) * form.threads + cta.thread)
    listed, limit = _facts(cta, row, form)
    entry = Int64(cta.lists.stride[1]) * 4
    source = _list_address(cta, row) + Int64(first) * entry
    tokens = [
        ptx.load_global_if(source + i * entry, (broken != 0) & (first + i < listed), -1)
        for i in range(4)
    ]
    return row, [ptx.choose((token >= 0) & (token <= limit), token, Int32(-1)) for token in tokens]


@cute.jit
def _mark_again(cta: _Cta, form: cutlass.Constexpr) -> Int32:
    """Bitmaps and rests of all rows, where tiles have overwritten them; not 0 if a row lists a
    block twice. Begins and ends with a barrier.
    """
    ptx.wait(0)
    ptx.barrier()
    _clear(cta, form)
    ptx.barrier()
    broken = Int32(0)
    twice = Int32(0)
    for row in cutlass.range(cta.rows, unroll=1):
        quads = _fetch_row(cta, row, Boolean(True), form)
        odd, again = _mark_row(cta, row, quads, form)
        broken = broken | (odd << (row * form.quads))
        twice = twice | again
    _mark_rest(cta, _fetch_rest(cta, Boolean(True), form), broken, form)
    ptx.barrier()
    return twice


@cute.jit
def _stage_table(cta: _Cta, form: cutlass.Constexpr) -> None:
    """Starts copying the request's row of the block table, if it is short."""
    columns = Int32(cta.table.shape[1])
    base = _request(cta, form)
    if (columns <= TABLE_WORDS) & (base >= 0):
        source = _table_address(cta, base, Int32(0))
        step = Int64(cta.table.stride[1]) * 4
        for column in cutlass.range(cta.thread, columns, form.threads, unroll=1):
            target = cta.smem + form.table_at + column * 4
            ptx.copy4_if(target, source + Int64(column) * step, Boolean(True))
    ptx.commit()


def _request(cta: _Cta, form: Form) -> Int32:
    """The request of a union's rows, -1 if none of them has one."""
    owners = [ptx.load_shared(cta.smem + form.misc_at + 16 * r) for r in range(GROUP_ROWS)]
    return cutlass.max(cutlass.max(owners[0], owners[1]), cutlass.max(owners[2], owners[3]))


@cute.jit
def _count_blocks(cta: _Cta, form: cutlass.Constexpr) -> Int32:
    """The bitmap of the union, and the blocks below each of its words; how many there are. Ends
    with a barrier, unless there are none.
    """
    scratch = cta.smem + form.misc_at + 64
    words = _words(cta)
    blocks = Int32(0)
    for start in cutlass.range(0, words, 4 * form.threads, unroll=1):
        word = start + 4 * cta.thread
        there = word < words
        at = cta.smem + form.ring_at + word * 4
        four = [Int32(0)] * 4
        for r in cutlass.range_constexpr(GROUP_ROWS + 1):
            part = ptx.load_shared4(at, r * BITMAP_WORDS * 4)
            four = [a | b for a, b in zip(four, part, strict=True)]
        four = [ptx.choose(there, each, Int32(0)) for each in four]
        ptx.store_shared4(at, (four[0], four[1], four[2], four[3]), GROUP_ROWS * BITMAP_WORDS * 4)
        each = [ptx.population(bits) for bits in four]
        mine = (each[0] + each[1]) + (each[2] + each[3])
        inclusive = mine
        for power in cutlass.range_constexpr(5):
            lower = ptx.shuffle_up(inclusive, 1 << power)
            inclusive = inclusive + ptx.choose(cta.lane >= (1 << power), lower, Int32(0))
        if cta.lane == 31:
            ptx.store_shared(scratch + cta.warp * 4, inclusive)
        ptx.barrier()
        of_warps = []
        for part in cutlass.range_constexpr(form.warps // 4):
            of_warps += ptx.load_shared4(scratch, 16 * part)
        running = blocks + inclusive - mine
        for w in cutlass.range_constexpr(form.warps):
            running = running + ptx.choose(cta.warp > w, of_warps[w], Int32(0))
            blocks = blocks + of_warps[w]
        below = []
        for j in cutlass.range_constexpr(4):
            below.append(running)
            running = running + each[j]
        ptx.store_shared4(
            at, (below[0], below[1], below[2], below[3]), (GROUP_ROWS + 1) * BITMAP_WORDS * 4
        )
        ptx.barrier()
    return blocks


@cute.jit
def _fill_union(
    cta: _Cta, low: Int32, entries: Int32, staged: Any, form: cutlass.Constexpr
) -> Int32:
    """Entries for the blocks of rank ``low ..``; not 0 if a row lists a token in two ways.
    ``staged``: the table may be in shared memory.
    """
    window = cta.smem + form.window_at
    base = _request(cta, form)
    staged = staged & (Int32(cta.table.shape[1]) <= TABLE_WORDS)
    words = _words(cta)
    # The largest power of two below the words: a search over them starts there.
    widest = Int32(1) << ptx.highest_bit(words - 1)
    twice = Int32(0)
    # A warp whose entries are beyond the last has nothing to find.
    for start in cutlass.range(32 * cta.warp, entries, form.threads, unroll=1):
        place = start + cta.lane
        rank = low + cutlass.min(place, entries - 1)
        at = Int32(0)
        half = widest
        while half > 0:
            beyond = at + half
            inside = beyond < words
            safe = ptx.choose(inside, beyond, Int32(0))
            below = ptx.load_shared(cta.smem + safe * 4, form.prefix_at)
            at = ptx.choose(inside & (below <= rank), beyond, at)
            half = half >> 1
        word = cta.smem + at * 4
        bits = ptx.load_shared(word, form.union_at)
        bit = _nth_bit(bits, rank - ptx.load_shared(word, form.prefix_at))
        members = Int32(0)
        for r in cutlass.range_constexpr(GROUP_ROWS):
            row_bits = ptx.load_shared(word, form.ring_at + r * BITMAP_WORDS * 4)
            members = members | ((ptx.shift_right(row_bits, bit) & 1) << r)
        members = members * 0x1111
        token = (at * 32 + bit) * 4
        page, slot, valid = _union_page(cta, base, token, place < entries, staged, form)
        target = window + ptx.choose(valid, place, cta.thread) * 8
        entry = ptx.choose(valid, (slot << 16) | members, Int32(0))
        ptx.store_shared_if(target, page, valid)
        twice = twice | (ptx.or_shared_before(target + 4, entry) & members & entry)
    row = _rest_row(cta)
    tokens = list(ptx.load_shared4(cta.smem + form.rest_at + cta.thread * 16))
    broken = ptx.load_shared(cta.smem + form.broken_at + cta.thread * 4)
    more = Boolean(True)
    while more:
        if ptx.any_lane((tokens[0] & tokens[1] & tokens[2] & tokens[3]) >= 0):
            marks = []
            found = []
            for token in tokens:
                place = _rank(cta, ptx.choose(token >= 0, token >> 2, Int32(0)), form) - low
                mine = (token >= 0) & (place >= 0) & (place < entries)
                marks.append((place, Int32(1) << (4 * (token & 3) + row)))
                found.append(_union_page(cta, base, token, mine, staged, form))
            for i in cutlass.range_constexpr(4):
                place, member = marks[i]
                _, _, valid = found[i]
                member = ptx.choose(valid, member, Int32(0))
                target = window + ptx.choose(valid, place, cta.thread) * 8
                twice = twice | (ptx.or_shared_before(target + 4, member) & member)
        more = ptx.any_lane(broken != 0)
        row, tokens = _broken_quad(cta, broken, form)
        broken = broken & (broken - 1)
    return twice


def _nth_bit(bits: Int32, number: Int32) -> Int32:
    """Where the bit stands that has ``number`` set bits below it."""
    at = Int32(0)
    for half in (16, 8, 4, 2, 1):
        lower = ptx.population(ptx.shift_right(bits, at) & ((1 << half) - 1))
        above = number >= lower
        number = number - ptx.choose(above, lower, Int32(0))
        at = at + ptx.choose(above, Int32(half), Int32(0))
    return at


def _union_page(
    cta: _Cta, base: Int32, token: Int32, exists: Any, staged: Any, form: Form
) -> tuple[Int32, Int32, Any]:
    """``(page, slot, valid)`` of a token of a union's request."""
    column, slot = _column_of(cta, token)
    inside = exists & (column < Int32(cta.table.shape[1]))
    near = cta.smem + ptx.choose(inside & staged, column, Int32(0)) * 4
    page = ptx.load_global_if(_table_address(cta, base, column), inside & ~staged, -1)
    page = ptx.choose(staged, ptx.load_shared(near, form.table_at), page)
    return page, slot, inside & (page >= 0) & (page < cta.pages)


# ----- tiles: gather K and V, score, weigh, accumulate --------------------------------------------
#
# What a warp reads of K and V it also fetches, so copies need no barrier of the CTA: warp w scores
# tokens 16 w .. 16 w + 15 of a tile against all dims, and accumulates its slice of the dims over
# all tokens. Only row maxima and weights cross.


@cute.jit
def _walk(
    cta: _Cta,
    window: Int32,
    entries: Int32,
    shift: Int32,
    row_bits: Int32,
    acc: Any,
    top: Any,
    total: Any,
    form: cutlass.Constexpr,
) -> None:
    tiles = ((entries << shift) + form.tile - 1) // form.tile
    stage = Int32(0)
    # The first turns only fetch, so that the loop holds every step once.
    for tile in cutlass.range(-form.stages, tiles, unroll=1):
        # What follows from the lane alone is computed again for each tile: kept, it would push
        # other values out of registers.
        fresh = cta._replace(lane=ptx.opaque(cta.lane), warp=ptx.opaque(cta.warp))
        if tile >= 0:
            ptx.wait(2 * form.stages - 1)
            ptx.warp_barrier()
            scores = cute.make_rmem_tensor((8 * form.m_tiles,), Float32)
            for i in cutlass.range_constexpr(8 * form.m_tiles):
                scores[i] = Float32(0.0)
            _score(cta, stage, scores, form)
            ptx.warp_barrier()
            _fetch_k(fresh, tile + form.stages, stage, tiles, shift, form)
            first = (tile | window) == 0
            _weigh(cta, tile, first, shift, row_bits, scores, acc, top, total, form)
            _accumulate(cta, tile, stage, shift, acc, form)
            ptx.warp_barrier()
        else:
            _fetch_k(fresh, tile + form.stages, stage, tiles, shift, form)
        _fetch_v(fresh, tile + form.stages, stage, tiles, shift, form)
        stage = ptx.choose(stage == form.stages - 1, Int32(0), stage + 1)
    ptx.wait(0)


class _Places(NamedTuple):
    """Window entries of tokens that are a multiple of four apart: where the first stands, less
    ``window_at``, and the bytes to the next; which of an entry's tokens they are, and that token's
    bits of its membership.
    """

    at: Int32
    step: Int32
    within: Int32
    bits: Int32


def _places(cta: _Cta, place: Int32, apart: int, shift: Int32) -> _Places:
    within = place & ((Int32(1) << shift) - 1)
    at = cta.smem + (place >> shift) * 8
    return _Places(at, Int32(8 * apart) >> shift, within, Int32(15) << (4 * within))


def _entries(
    places: _Places, start: Int32 | int, count: int, form: Form
) -> list[tuple[Int32, Int32, Any]]:
    """``(page, slot, listed by any row)`` of some of the tokens."""
    found = []
    at = places.at + start * places.step
    for _ in range(count):
        page, packed = ptx.load_shared2(at, form.window_at)
        slot = ptx.shift_right(packed, 16) + places.within
        found.append((page, slot, (packed & places.bits) != 0))
        at = at + places.step
    return found


def _plane(cta: _Cta, which: int, form: Form) -> _Plane:
    base, page = ptx.load_shared_wide(cta.smem + form.planes_at + 32 * which)
    return _Plane(base, page, ptx.load_shared(cta.smem + form.planes_at + 32 * which + 16))


def _source(plane: _Plane, first: Int32, page: Int32, slot: Int32) -> Int64:
    """Where the bytes of a token stand, from ``first`` on."""
    base = ptx.advance(plane.base + Int64(first), page, plane.page)
    return base + Int64(slot) * Int64(plane.token)


@cute.jit
def _fetch_k(
    cta: _Cta, tile: Int32, stage: Int32, tiles: Int32, shift: Int32, form: cutlass.Constexpr
) -> None:
    """Starts copying this warp's tokens of K; one group of copies, empty beyond the last tile."""
    if tile < tiles:
        plane = _plane(cta, 0, form)
        # Eight lanes a token, so that an address serves all of the 128 bytes of a row.
        chunk = cta.lane & 7
        token = cta.warp * 16 + (cta.lane >> 3)
        ring = cta.smem + form.ring_at + (stage * form.tile + token) * form.row_bytes
        ring = ring + (chunk ^ ((token & 1) << 2)) * 16
        places = _places(cta, tile * form.tile + token, 4, shift)
        entries = _entries(places, 0, 4, form)
        for turn in cutlass.range_constexpr(4):
            page, slot, listed = entries[turn]
            source = _source(plane, chunk * 16, page, slot)
            for part in cutlass.range_constexpr(form.row_bytes // 128):
                target = ring + (4 * turn * form.row_bytes + 128 * part)
                ptx.copy16(target, source + 128 * part, listed)
        if cutlass.const_expr(form.dtype == "nvfp4"):
            # Half of a token's 16 scales a lane.
            token, half = cta.warp * 16 + (cta.lane >> 1), (cta.lane & 1) * 8
            places = _places(cta, tile * form.tile + token, 4, shift)
            page, slot, listed = _entries(places, 0, 1, form)[0]
            source = _source(_plane(cta, 2, form), half, page, slot)
            target = cta.smem + form.k_scales_at + (stage * form.tile + token) * 16 + half
            ptx.copy8(target, source, listed)
    ptx.commit()


@cute.jit
def _fetch_v(
    cta: _Cta, tile: Int32, stage: Int32, tiles: Int32, shift: Int32, form: cutlass.Constexpr
) -> None:
    """Starts copying this warp's dims of V; one group of copies, empty beyond the last tile."""
    if tile < tiles:
        plane = _plane(cta, 1, form)
        chunks = form.row_bytes // 16 // form.warps
        per_turn = 32 // chunks
        chunk = cta.warp * chunks + (cta.lane & (chunks - 1))
        token = cta.lane >> (chunks.bit_length() - 1)
        ring = cta.smem + form.v_at + (stage * form.tile + token) * form.row_bytes
        # The swizzle goes by bits 1 and 2 of the token; of four tokens a turn bit 2 is the turn's.
        swizzle = token & 6
        sides = (ring + (chunk ^ swizzle) * 16, ring + (chunk ^ swizzle ^ (per_turn & 4)) * 16)
        places = _places(cta, tile * form.tile + token, per_turn, shift)
        turns = form.tile // per_turn
        batch = min(turns, FETCH_BATCH)
        for start in cutlass.range(0, turns, batch, unroll=1):
            entries = _entries(places, start, batch, form)
            first = start * (per_turn * form.row_bytes)
            for u in cutlass.range_constexpr(batch):
                page, slot, listed = entries[u]
                target = sides[u % 2] + first + u * (per_turn * form.row_bytes)
                ptx.copy16(target, _source(plane, chunk * 16, page, slot), listed)
        if cutlass.const_expr(form.dtype == "nvfp4"):
            scales = _plane(cta, 3, form)
            # 16 bytes, or 4, hold what a warp needs, or two of eight. Interleaved ones are those of
            # four tokens.
            wanted = (cta.warp >> (form.warps // 8)) * (4 + 12 * cta.interleaved)
            keep = -1 - 3 * cta.interleaved
            ring = cta.smem + form.v_scales_at
            ring = ring + ((stage * form.warps + cta.warp) * form.tile + cta.lane) * 16
            places = _places(cta, tile * form.tile + cta.lane, 32, shift)
            entries = _entries(places, 0, form.tile // 32, form)
            for turn in cutlass.range_constexpr(form.tile // 32):
                page, slot, listed = entries[turn]
                source = _source(scales, wanted, page, slot & keep)
                if cta.interleaved != 0:
                    ptx.copy16(ring + turn * 512, source, listed)
                else:
                    ptx.copy4(ring + turn * 512, source, listed)
    ptx.commit()


def _decode_e2m1(word: Int32, form: Form) -> list[Int32]:
    """Eight e2m1 as four f16x2. By integers: times 2^-14, in the order of ``_evens_first``."""
    if form.native_e2m1:
        return list(ptx.e2m1_pairs(word))
    odd = ptx.blend(word, -0x7F7F7F80, ptx.shift_right(word, 3) & 0x0E0E0E0E)
    even = ptx.blend(word << 4, -0x7F7F7F80, (word << 1) & 0x0E0E0E0E)
    return [
        ptx.zero_extend_bytes(even, 0x1404),
        ptx.zero_extend_bytes(even, 0x3424),
        ptx.zero_extend_bytes(odd, 0x1404),
        ptx.zero_extend_bytes(odd, 0x3424),
    ]


def _scale_pairs(word: Int32, form: Form) -> tuple[Int32, Int32]:
    """Four e4m3 block scales as two f16x2, times 2^7 where the integer decode left 2^-14."""
    low, high = ptx.e4m3_pairs(word)
    if form.native_e2m1:
        return low, high
    factor = Int32(0x58005800)
    return ptx.multiply_f16(low, factor), ptx.multiply_f16(high, factor)


@cute.jit
def _score(cta: _Cta, stage: Int32, scores: Any, form: cutlass.Constexpr) -> None:
    """scores += Q K^T of this warp's 16 tokens."""
    quad, g = cta.lane & 3, cta.lane >> 2
    blocks = {"bf16": 8, "fp8_e4m3": 4, "nvfp4": 2}[form.dtype]
    steps = 16 // blocks
    queries = cta.smem + cta.lane * 16
    first = stage * form.tile + cta.warp * 16 + g
    # The swizzle flips the upper half of the eight chunks of 128 bytes for odd tokens.
    swizzle = (g & 1) * 64
    keys = cta.smem + form.ring_at + first * form.row_bytes + quad * 16
    sides = (keys + swizzle, keys + (64 - swizzle))
    key_scales = cta.smem + form.k_scales_at + first * 16 + 2 * quad
    for block in cutlass.range_constexpr(blocks):
        words = []
        scales = []
        for j in cutlass.range_constexpr(2):
            at = 8 * j * form.row_bytes + (block // 2) * 128
            words.append(ptx.load_shared4(sides[block % 2], at))
            if cutlass.const_expr(form.dtype == "nvfp4"):
                half = ptx.load_shared_half(key_scales, 128 * j + 8 * block)
                both, _ = _scale_pairs(half, form)
                scales.append((ptx.permute(both, both, 0x1010), ptx.permute(both, both, 0x3232)))
        fragments: list[list[Int32]] = []
        for step in cutlass.range_constexpr(steps):
            fragments = _key_fragments(words, scales, step, fragments, form)
            for tile in cutlass.range_constexpr(form.m_tiles):
                a = ptx.load_shared4(queries, (tile * 16 + block * steps + step) * 512)
                for j in cutlass.range_constexpr(2):
                    b0, b1 = fragments[j][0], fragments[j][1]
                    ptx.mma(scores, (tile * 2 + j) * 4, a, b0, b1, form.f16)


def _key_fragments(
    words: list[ptx.Words],
    scales: list[tuple[Int32, Int32]],
    step: int,
    before: list[list[Int32]],
    form: Form,
) -> list[list[Int32]]:
    """B fragments of a step, for each n-tile; an e2m1 word holds two steps, of which the second is
    left from ``before``.
    """
    if form.dtype == "bf16":
        return [[four[2 * step], four[2 * step + 1]] for four in words]
    if form.dtype == "fp8_e4m3":
        return [list(ptx.e4m3_pairs(four[step])) for four in words]
    if step % 2:
        return [pairs[2:] for pairs in before]
    return [
        [ptx.multiply_f16(pair, each[step // 4]) for pair in _decode_e2m1(four[step // 2], form)]
        for four, each in zip(words, scales, strict=True)
    ]


def _members(cta: _Cta, tile: Int32, shift: Int32, form: Form) -> list[Int32]:
    """Membership of the four tokens that this lane has scores of, in its lowest bits."""
    place = tile * form.tile + cta.warp * 16 + 2 * (cta.lane & 3)
    first = cta.smem + (place >> shift) * 8
    rest = Int32(1) - (shift >> 1)  # of a union both tokens of a pair are of one entry
    members: list[Int32] = []
    for j in range(2):
        for e in range(2):
            at = first + j * (Int32(64) >> shift) + e * 8 * rest
            packed = ptx.load_shared(at, form.window_at + 4)
            within = (place + e) & ((Int32(1) << shift) - 1)
            members.append(packed >> (4 * within))
    return members


def _listed(members: list[Int32], row_bits: Int32, i: int) -> list[Int32]:
    """Not 0 where this lane's row ``i`` lists each of its four tokens."""
    bits = (row_bits >> (4 * i)) & 15
    return [each & bits for each in members]


def _spots(i: int) -> list[int]:
    """Where a lane's four scores of its row ``i`` stand."""
    return [(i // 2 * 2 + j) * 4 + 2 * (i % 2) + e for j in range(2) for e in range(2)]


def _row_scale(cta: _Cta, i: int, form: Form) -> Float32:
    """What makes a raw score of this lane's row ``i`` one in log2 units."""
    at = cta.smem + ((cta.lane >> 2) * 4 if form.f16 else 0)
    return ptx.load_shared_float(at, form.row_scales_at + (32 * i if form.f16 else 0))


@cute.jit
def _weigh(
    cta: _Cta,
    tile: Int32,
    first: Any,
    shift: Int32,
    row_bits: Int32,
    scores: Any,
    acc: Any,
    top: Any,
    total: Any,
    form: cutlass.Constexpr,
) -> None:
    """Scores to weights in shared memory, as A fragments, and to totals. Ends with a barrier.

    A weight is relative to its row's ``top``, which is the row's maximum at some earlier tile. As
    long as no sum of four weights is above ``MOST_WEIGHT``, no warp has to know the others' scores;
    else all rows take their maxima of now, and what was summed before shrinks.
    """
    added = cute.make_rmem_tensor((2 * form.m_tiles,), Float32)
    above = Int32(1)
    if not first:
        members = _members(cta, tile, shift, form)
        anchors = [top[i] for i in range(2 * form.m_tiles)]
        _store_weights(cta, tile, members, row_bits, scores, anchors, added, False, form)
        # A row that has no maximum yet gives infinite weights, or NaN.
        fits = added[0] <= MOST_WEIGHT
        for i in cutlass.range_constexpr(1, 2 * form.m_tiles):
            fits = fits & (added[i] <= MOST_WEIGHT)
        ptx.wait(2 * form.stages - 1)
        above = ptx.any_thread(~fits)
    if above != 0:
        # Rare: what is read again takes no registers before.
        again = _members(cta, tile, shift, form)
        _raise_tops(cta, again, row_bits, scores, acc, top, total, form)
        again = _members(cta, tile, shift, form)
        anchors = [_anchor(top[i]) for i in range(2 * form.m_tiles)]
        _store_weights(cta, tile, again, row_bits, scores, anchors, added, True, form)
        ptx.wait(2 * form.stages - 1)
        ptx.barrier()
    for i in cutlass.range_constexpr(2 * form.m_tiles):
        total[i] = total[i] + added[i]


def _anchor(top: Float32) -> Float32:
    """A maximum, or 0 for a row that has none."""
    return ptx.choose_float(top == Float32(float("-inf")), Float32(0.0), top)


def _store_weights(
    cta: _Cta,
    tile: Int32,
    members: list[Int32],
    row_bits: Int32,
    scores: Any,
    anchors: list[Float32],
    added: Any,
    rounded: bool,
    form: Form,
) -> None:
    """``rounded``: scores are scaled as maxima are, so that a row's maximum weighs 1 however large
    it is. Else they may weigh more or less where they have no digits after the point.
    """
    pack = ptx.pack_f16 if form.f16 else ptx.pack_bf16
    base = cta.smem + (tile & 1) * form.p_bytes + cta.warp * 512 + cta.lane * 16
    for m_tile in range(form.m_tiles):
        halves: list[list[Int32]] = []
        for i in (2 * m_tile, 2 * m_tile + 1):
            scale = _row_scale(cta, i, form)
            weights = []
            for spot, listed in zip(_spots(i), _listed(members, row_bits, i), strict=True):
                if rounded:
                    exponent = ptx.multiply(scores[spot], scale) - anchors[i]
                else:
                    exponent = ptx.multiply_add(scores[spot], scale, -anchors[i])
                weight = ptx.exp2(exponent)
                weights.append(ptx.choose_float(listed, weight, Float32(0.0)))
            added[i] = (weights[0] + weights[1]) + (weights[2] + weights[3])
            halves.append([pack(weights[0], weights[1]), pack(weights[2], weights[3])])
        upper, lower = halves
        fragment = (upper[0], lower[0], upper[1], lower[1])
        ptx.store_shared4(base, fragment, form.p_at + m_tile * form.warps * 512)


def _raise_tops(
    cta: _Cta,
    members: list[Int32],
    row_bits: Int32,
    scores: Any,
    acc: Any,
    top: Any,
    total: Any,
    form: Form,
) -> None:
    """Every row's maximum over all warps' scores so far; sums and totals become relative to it."""
    minus = Float32(float("-inf"))
    tops: list[Float32] = []
    for i in range(2 * form.m_tiles):
        scale = _row_scale(cta, i, form)
        largest = minus
        for spot, listed in zip(_spots(i), _listed(members, row_bits, i), strict=True):
            scaled = ptx.choose_float(listed, ptx.multiply(scores[spot], scale), minus)
            largest = ptx.maximum(largest, scaled)
        tops.append(largest)
    # Side by side, so that a shuffle does not wait for the one before.
    for mask in (1, 2):
        others = [ptx.shuffle_xor_float(each, mask) for each in tops]
        tops = [ptx.maximum(a, b) for a, b in zip(tops, others, strict=True)]
    for i in range(2 * form.m_tiles):
        ptx.store_shared_float(_maxima(cta, form) + cta.warp * 4, tops[i], 32 * form.warps * i)
    ptx.barrier()
    n_tiles = form.slice // 8
    for i in range(2 * form.m_tiles):
        largest = top[i]
        for part in range(form.warps // 4):
            at = _maxima(cta, form)
            four = ptx.load_shared4_float(at, 32 * form.warps * i + 16 * part)
            several = ptx.maximum(ptx.maximum(four[0], four[1]), ptx.maximum(four[2], four[3]))
            largest = ptx.maximum(largest, several)
        fade = ptx.exp2(top[i] - _anchor(largest))
        top[i] = largest
        total[i] = total[i] * fade
        for n in range(n_tiles):
            for e in range(2):
                spot = ((i // 2) * n_tiles + n) * 4 + 2 * (i % 2) + e
                acc[spot] = acc[spot] * fade


@cute.jit
def _phases(cta: _Cta, tile: Int32, shift: Int32, phases: Any, form: cutlass.Constexpr) -> None:
    """Where in an interleaved group of four scale bytes each of this lane's four tokens of a step
    is, a byte each; 0 if linear.
    """
    quad = cta.lane & 3
    # A union's entries are whole groups of four. Elsewhere a token may stand anywhere in its own.
    first = 2 * (quad & 1) * cta.interleaved
    both = first | ((first + cta.interleaved) << 8)
    for step in cutlass.range_constexpr(form.tile // 16):
        phases[step] = both | (both << 16)
    # A loop of one turn or none: a condition would become predicates, which cost every tile.
    for _ in cutlass.range(cta.interleaved * (1 - (shift >> 1)), unroll=1):
        for step in cutlass.range_constexpr(form.tile // 16):
            word = Int32(0)
            for i in cutlass.range_constexpr(4):
                token = 16 * step + 8 * (i // 2) + i % 2 + 2 * quad
                at = cta.smem + (tile * form.tile + token) * 8
                phase = ptx.shift_right(ptx.load_shared(at, form.window_at + 4), 16) & 3
                word = word | (phase << (8 * i))
            phases[step] = word


def _value_fragments(
    cta: _Cta, stage: Int32, step: int, phases: Any, form: Form
) -> list[tuple[Int32, Int32]]:
    """B fragments of V for 16 tokens: column g of n-tile i is dim ``slice warp + n g + i`` of n
    n-tiles.
    """
    g, quad = cta.lane >> 2, cta.lane & 3
    n_tiles = form.slice // 8
    # The swizzle flips pairs of 16-byte chunks by bits 1 and 2 of the token, which are this lane's
    # quad.
    lane_bytes = n_tiles * form.row_bytes // HEAD_DIM
    byte = g * lane_bytes
    chunk = cta.warp * (form.row_bytes // form.warps // 16) + (byte >> 4)
    base = cta.smem + (stage * form.tile + 2 * quad) * form.row_bytes
    base = base + (chunk ^ (2 * quad)) * 16 + (byte & 15)
    halves: list[list[Int32]] = []
    for high in range(2):
        at = [form.v_at + (16 * step + 8 * high + e) * form.row_bytes for e in range(2)]
        dims: list[Int32] = [Int32(0)] * n_tiles
        a, b = (_lane_words(base, offset, lane_bytes) for offset in at)
        if form.dtype == "bf16":
            for i in range(n_tiles // 2):
                dims[2 * i] = ptx.permute(a[i], b[i], 0x5410)
                dims[2 * i + 1] = ptx.permute(a[i], b[i], 0x7632)
        elif form.dtype == "fp8_e4m3":
            for i in range(n_tiles // 4):
                dims[4 * i : 4 * i + 2] = ptx.e4m3_pairs(ptx.permute(a[i], b[i], 0x5140))
                dims[4 * i + 2 : 4 * i + 4] = ptx.e4m3_pairs(ptx.permute(a[i], b[i], 0x7362))
        else:
            scale = _value_scale(cta, stage, 16 * step + 8 * high, phases[step], form)
            if form.native_e2m1:
                a8, b8 = _decode_e2m1(a[0], form), _decode_e2m1(b[0], form)
                for i in range(n_tiles // 2):
                    dims[2 * i] = ptx.permute(a8[i], b8[i], 0x5410)
                    dims[2 * i + 1] = ptx.permute(a8[i], b8[i], 0x7632)
            else:
                # Bytes of both tokens by turns decode to pairs of dims 0, 2, 1, 3 of four.
                for i, turns in enumerate((0x5140, 0x7362)[: n_tiles // 4]):
                    pairs = _decode_e2m1(ptx.permute(a[0], b[0], turns), form)
                    for j, dim in enumerate((0, 2, 1, 3)):
                        dims[4 * i + dim] = pairs[j]
            dims = [ptx.multiply_f16(pair, scale) for pair in dims]
        halves.append(dims)
    return list(zip(halves[0], halves[1], strict=True))


def _lane_words(base: Int32, offset: int, count: int) -> tuple[Int32, ...]:
    """``count`` bytes of shared memory, as words."""
    if count == 16:
        return ptx.load_shared4(base, offset)
    if count == 8:
        return ptx.load_shared2(base, offset)
    return (ptx.load_shared(base, offset) if count == 4 else ptx.load_shared_half(base, offset),)


def _value_scale(cta: _Cta, stage: Int32, first: int, phases: Int32, form: Form) -> Int32:
    """The block scales of this lane's dims, for tokens ``first + 2 quad`` and the next, as
    f16x2.
    """
    block = cta.lane >> 3 if form.warps == 4 else 2 * (cta.warp & 1) + (cta.lane >> 4)
    base = cta.smem + ((stage * form.warps + cta.warp) * form.tile + 2 * (cta.lane & 3)) * 16
    base = base + block * (1 + 3 * cta.interleaved)
    pair = []
    for e in range(2):
        phase = ptx.zero_extend_bytes(phases, 0x4440 + first % 16 // 4 + e)
        pair.append(ptx.load_shared_byte(base + phase, form.v_scales_at + (first + e) * 16))
    both, _ = _scale_pairs(pair[0] | (pair[1] << 8), form)
    return both


@cute.jit
def _accumulate(
    cta: _Cta, tile: Int32, stage: Int32, shift: Int32, acc: Any, form: cutlass.Constexpr
) -> None:
    """acc += P V of this warp's dims."""
    steps = form.tile // 16
    phases = cute.make_rmem_tensor((steps,), Int32)
    if cutlass.const_expr(form.dtype == "nvfp4"):
        _phases(cta, tile, shift, phases, form)
    base = cta.smem + (tile & 1) * form.p_bytes + cta.lane * 16
    for step in cutlass.range_constexpr(steps):
        weights = []
        for m_tile in cutlass.range_constexpr(form.m_tiles):
            weights.append(ptx.load_shared4(base, form.p_at + (m_tile * form.warps + step) * 512))
        fragments = _value_fragments(cta, stage, step, phases, form)
        for n in cutlass.range_constexpr(form.slice // 8):
            b0, b1 = fragments[n]
            for m_tile in cutlass.range_constexpr(form.m_tiles):
                ptx.mma(
                    acc, (m_tile * (form.slice // 8) + n) * 4, weights[m_tile], b0, b1, form.f16
                )


# ----- results: divide, round, gate, round --------------------------------------------------------


def _first_sum(cta: _Cta, form: Form) -> Int32:
    """First dim of this lane's sums, which are of neighbouring dims."""
    return cta.warp * form.slice + (cta.lane & 3) * (form.slice // 4)


def _row_sums(acc: Any, i: int, value_scale: Float32, form: Form) -> list[list[Float32]]:
    """A thread's sums of its row ``i``, in the order of the dims, by fours."""
    n_tiles = form.slice // 8
    spots = [
        ((i // 2) * n_tiles + n) * 4 + 2 * (i % 2) + e for e in range(2) for n in range(n_tiles)
    ]
    values = [acc[spot] * value_scale for spot in spots]
    return [values[at : at + 4] for at in range(0, len(values), 4)]


def _total(cta: _Cta, m: Int32, form: Form) -> Float32:
    """The sum of the warps' totals of a row."""
    total = Float32(0.0)
    for part in range(form.warps // 4):
        at = cta.smem + form.reduce_at + m * (4 * form.warps)
        four = ptx.load_shared4_float(at, 16 * part)
        total = total + ((four[0] + four[1]) + (four[2] + four[3]))
    return total


def _stage(cta: _Cta, value_scale: Float32, acc: Any, total: Any, form: Form) -> None:
    """Sums to shared memory where the ring was, a row after another; each row's total beside
    them.
    """
    reduce = cta.smem + form.reduce_at
    ptx.barrier()
    for i in range(2 * form.m_tiles):
        m = (cta.lane >> 2) + 8 * i
        value = total[i]
        value = value + ptx.shuffle_xor_float(value, 1)
        value = value + ptx.shuffle_xor_float(value, 2)
        ptx.store_shared_float(reduce + (m * form.warps + cta.warp) * 4, value)
        at = cta.smem + form.ring_at + m * STAGED_ROW + _first_sum(cta, form) * 4
        for part, four in enumerate(_row_sums(acc, i, value_scale, form)):
            ptx.store_shared4_float(at + 16 * part, four)


def _staged(cta: _Cta, m: Int32, form: Form) -> tuple[list[Float32], Float32]:
    """``(eight sums at dim 8 lane, total)`` of a staged row."""
    at = cta.smem + form.ring_at + m * STAGED_ROW + cta.lane * 32
    values = [*ptx.load_shared4_float(at), *ptx.load_shared4_float(at + 16)]
    return values, _total(cta, m, form)


def _row_address(tensor: cute.Tensor, row: Int32, head: Int32, dim: Int32) -> Int64:
    at = Int64(row) * Int64(tensor.stride[0]) + Int64(head) * Int64(tensor.stride[1]) + Int64(dim)
    return tensor.iterator.toint() + at * 2


@cute.jit
def _factors(gates: list[Int32], use_output_gate: Int32) -> list[Float32]:
    """Sigmoids of pairs of gates, or anything."""
    factors = [Float32(1.0)] * (2 * len(gates))
    if use_output_gate != 0:
        for i in cutlass.range_constexpr(len(gates)):
            low, high = ptx.unpack_bf16(gates[i])
            factors[2 * i] = _sigmoid(low)
            factors[2 * i + 1] = _sigmoid(high)
    return factors


@cute.jit
def _finish(
    target: Int64,
    factors: list[Float32],
    use_output_gate: Int32,
    sums: list[Float32],
    total: Float32,
) -> None:
    """Sums, two, four or eight, over their total: rounded, gated if asked for, rounded again."""
    empty = total == Float32(0.0)
    factor = ptx.reciprocal(ptx.choose_float(empty, Float32(1.0), total))
    values = [ptx.choose_float(empty, Float32(0.0), value * factor) for value in sums]
    pairs = len(values) // 2
    words = [ptx.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(pairs)]
    if use_output_gate != 0:
        for i in cutlass.range_constexpr(pairs):
            low, high = ptx.unpack_bf16(words[i])
            words[i] = ptx.pack_bf16(low * factors[2 * i], high * factors[2 * i + 1])
    if cutlass.const_expr(pairs == 1):
        ptx.store_global(target, words[0])
    elif cutlass.const_expr(pairs == 2):
        ptx.store_global2(target, words[0], words[1])
    else:
        ptx.store_global4(target, (words[0], words[1], words[2], words[3]))


def _sigmoid(value: Float32) -> Float32:
    """1 / (1 + e^-x) in fp32, each step rounded once, as a separate gate computes it."""
    return ptx.exact_reciprocal(Float32(1.0) + ptx.exponential(-value))


# ----- splits in a cluster: each merges a share of the rows, from where all staged them -----------


@cute.jit
def _stage_tops(cta: _Cta, top: Any, form: cutlass.Constexpr) -> None:
    """Each row's maximum, in log2 units, after its staged sums."""
    if (cta.warp == 0) & (cta.lane & 3 == 0):
        for i in cutlass.range_constexpr(2 * form.m_tiles):
            at = cta.smem + form.ring_at + ((cta.lane >> 2) + 8 * i) * STAGED_ROW
            ptx.store_shared_float(at, top[i], HEAD_DIM * 4)


@cute.jit
def _meet(cta: _Cta, mode: Int32, failed: Int32, cluster: Int32, form: cutlass.Constexpr) -> Int32:
    """Waits until all splits have staged their sums; whether the union failed in any of them."""
    flag = cta.smem + form.share_at + 40
    # A union comes first if at all, so that no split writes this again while another reads it.
    if (mode == UNION) & (cta.thread == 0):
        ptx.store_shared(flag, failed)
    ptx.cluster_arrive()
    ptx.cluster_wait()
    if mode == UNION:
        rank = ptx.choose(cta.lane < cluster, cta.lane, Int32(0))
        failed = Int32(ptx.any_lane(ptx.load_rank(flag, rank) != 0))
    return failed


def _fetch_gates(
    cta: _Cta,
    output_gate: cute.Tensor,
    gates: Any,
    first: Int32,
    cluster: Int32,
    chosen: Int32,
    form: Form,
) -> None:
    """Gates of a batch of this warp's rows of the rank's share, beginning with row ``first`` of the
    MMA tiles.
    """
    for u in range(STORE_BATCH[form.m_tiles]):
        m = first + u * cluster * form.warps
        row, head = _row_and_head(cta, m)
        source = _row_address(output_gate, row, head, cta.lane * 8)
        four = ptx.load_global4_if(source, _is_chosen(cta, m, chosen))
        for j in range(4):
            gates[4 * u + j] = four[j]


def _is_chosen(cta: _Cta, m: Int32, chosen: Int32) -> Any:
    """Whether a row of the MMA tiles is a query head of a row that is stored now."""
    return (m < cta.rows * cta.group) & ((ptx.shift_right(chosen, _row_of(cta, m)) & 1) != 0)


@cute.jit
def _store_rows(
    cta: _Cta,
    out: cute.Tensor,
    output_gate: cute.Tensor,
    gates: Any,
    wanted: Int32,
    chosen: Int32,
    cluster: Int32,
    joint: cutlass.Constexpr,
    form: cutlass.Constexpr,
) -> None:
    """All rows, or this rank's share of them, ``joint``: a warp takes as many at a time as a group
    has MMA tiles, and asks for the gates of those that come next.
    """
    cta = _restore(cta, form)
    # What follows from it would be kept in registers through all loops.
    cluster = ptx.opaque(cluster)
    batch = STORE_BATCH[form.m_tiles]
    later = cute.make_rmem_tensor((4 * batch,), Int32)
    first = cta.split + cluster * cta.warp
    while first < cta.rows * cta.group:
        parts = []
        if cutlass.const_expr(joint):
            for u in cutlass.range_constexpr(batch):
                m = first + u * cluster * form.warps
                parts.append(_parts(cta, m, cluster, _is_chosen(cta, m, chosen), form))
        after = first + batch * cluster * form.warps
        _fetch_gates(cta, output_gate, later, after, cluster, wanted, form)
        for u in cutlass.range_constexpr(batch):
            m = first + u * cluster * form.warps
            row, head = _row_and_head(cta, m)
            if cutlass.const_expr(joint):
                values, total = _merged(cta, parts[u], cluster)
            else:
                values, total = _staged(cta, m, form)
            if _is_chosen(cta, m, chosen):
                target = _row_address(out, row, head, cta.lane * 8)
                factors = _factors([gates[4 * u + j] for j in range(4)], wanted)
                _finish(target, factors, wanted, values, total)
        for j in cutlass.range_constexpr(4 * batch):
            gates[j] = later[j]
        first = after
    if cutlass.const_expr(joint):
        # No CTA goes on, or leaves, while another reads its sums. Nothing that was written before
        # is for the others, and to wait for stores to global memory would cost a microsecond.
        ptx.cluster_arrive_relaxed()
        ptx.cluster_wait()


class _Parts(NamedTuple):
    """What all ranks have of a row: in lane r the maximum and the warps' totals of rank r, and of
    each rank the eight sums at dim 8 lane.
    """

    top: Float32
    totals: list[list[Float32]]
    sums: list[list[Float32]]


def _parts(cta: _Cta, m: Int32, cluster: Int32, exists: Any, form: Form) -> _Parts:
    staged = cta.smem + form.ring_at + m * STAGED_ROW
    totals = cta.smem + form.reduce_at + m * (4 * form.warps)
    there = exists & (cta.lane < cluster)
    (top,) = ptx.load_rank_floats_if(staged + HEAD_DIM * 4, cta.lane, 1, there)
    of_warps = [
        ptx.load_rank_floats_if(totals + 16 * part, cta.lane, 4, there)
        for part in range(form.warps // 4)
    ]
    sums = []
    for rank in range(MAX_CLUSTER):
        eight: list[Float32] = []
        for part in range(2):
            source = staged + cta.lane * 32 + 16 * part
            eight += ptx.load_rank_floats_if(source, Int32(rank), 4, exists & (cluster > rank))
        sums.append(eight)
    return _Parts(top, of_warps, sums)


def _merged(cta: _Cta, parts: _Parts, cluster: Int32) -> tuple[list[Float32], Float32]:
    """``(eight sums at dim 8 lane, total)`` of a row over all ranks, in their order."""
    minus = Float32(float("-inf"))
    top = ptx.choose_float(cta.lane < cluster, parts.top, minus)
    largest = top
    for rank in range(MAX_CLUSTER):
        largest = ptx.maximum(largest, ptx.shuffle_from_float(top, Int32(rank)))
    weight = ptx.exp2(top - _anchor(largest))
    mine = Float32(0.0)
    for four in parts.totals:
        mine = mine + ((four[0] + four[1]) + (four[2] + four[3]))
    total = Float32(0.0)
    merged = [Float32(0.0)] * 8
    for rank in range(MAX_CLUSTER):
        # Ranks beyond the last weigh 0, and their sums are 0.
        share = ptx.shuffle_from_float(weight, Int32(rank))
        total = total + share * ptx.shuffle_from_float(mine, Int32(rank))
        merged = [a + share * b for a, b in zip(merged, parts.sums[rank], strict=True)]
    return merged, total


@cute.jit
def _store_partial(
    cta: _Cta,
    workspace: cute.Tensor,
    tail: Int32,
    group_rows: Int32,
    chosen: Int32,
    value_scale: Float32,
    acc: Any,
    top: Any,
    total: Any,
    form: cutlass.Constexpr,
) -> None:
    """Sums before division, with their maximum (in log2 units) and total, for the merge: staged in
    shared memory, so that a warp stores whole rows.
    """
    cta = _restore(cta, form)
    _stage(cta, value_scale, acc, total, form)
    _stage_tops(cta, top, form)
    ptx.barrier()
    first = workspace.iterator.toint() + Int64(tail) * Int64(group_rows * cta.group) * PARTIAL_ROW
    staged = cta.smem + form.ring_at
    for start in cutlass.range(
        cta.warp, cta.rows * cta.group, PARTIAL_BATCH * form.warps, unroll=1
    ):
        parts = []
        for u in cutlass.range_constexpr(PARTIAL_BATCH):
            at = staged + (start + u * form.warps) * STAGED_ROW + cta.lane * 16
            parts.append((ptx.load_shared4_float(at), ptx.load_shared4_float(at, HEAD_DIM * 2)))
        for u in cutlass.range_constexpr(PARTIAL_BATCH):
            m = start + u * form.warps
            if _is_chosen(cta, m, chosen):
                place = first + Int64(m) * PARTIAL_ROW + Int64(cta.lane * 16)
                ptx.store_global4_float(place, list(parts[u][0]))
                ptx.store_global4_float(place + HEAD_DIM * 2, list(parts[u][1]))
    m = cta.thread
    if _is_chosen(cta, m, chosen):
        place = first + Int64(m) * PARTIAL_ROW + HEAD_DIM * 4
        ptx.store_global_float(place, ptx.load_shared_float(staged + m * STAGED_ROW, HEAD_DIM * 4))
        ptx.store_global_float(place + 4, _total(cta, m, form))


class _MergedRow(NamedTuple):
    """A query head of a row that was split: where its first partial result stands, the bytes from a
    split's to the next, where it goes, and whether the last group of a request has that row.
    """

    first: Int64
    step: Int64
    row: Int32
    head: Int32
    exists: Any


def _merged_row(
    place: Int32,
    q: cute.Tensor,
    k_cache: cute.Tensor,
    workspace: cute.Tensor,
    tokens: Int32,
    group_rows: Int32,
    splits: Int32,
    whole_units: Int32,
) -> _MergedRow:
    """By number among all query heads of rows of split units."""
    kv_heads = Int32(k_cache.shape[1])
    group = Int32(q.shape[1]) // kv_heads
    m_rows = group_rows * group
    tail = place // m_rows
    m = place - tail * m_rows
    row = m // group
    unit = whole_units + tail
    verify = unit // kv_heads
    subgroups = (tokens + group_rows - 1) // group_rows
    within = (verify % subgroups) * group_rows + row
    before = Int64(tail) * Int64(splits) * Int64(m_rows) + Int64(m)
    return _MergedRow(
        first=workspace.iterator.toint() + before * PARTIAL_ROW,
        step=Int64(m_rows) * PARTIAL_ROW,
        row=(verify // subgroups) * tokens + within,
        head=(unit % kv_heads) * group + (m - row * group),
        exists=within < tokens,
    )


@cute.kernel
def _merge(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    output_gate: cute.Tensor,
    out: cute.Tensor,
    workspace: cute.Tensor,
    use_output_gate: Int32,
    tokens: Int32,
    group_rows: Int32,
    splits: Int32,
    whole_units: Int32,
) -> None:
    """One CTA a row and query head: sums the partial results in the order of the splits, four dims
    and every fourth split a thread.
    """
    thread, _, _ = cute.arch.thread_idx()
    place, _, _ = cute.arch.block_idx()
    lane = thread & 31
    quarter = thread >> 6
    dim = (thread & 63) * 4
    joint = cute.arch.alloc_smem(Float32, 4 * HEAD_DIM, alignment=16).toint()
    merged = _merged_row(place, q, k_cache, workspace, tokens, group_rows, splits, whole_units)
    # The first half of the threads gate two dims each in the end.
    gate_at = _row_address(output_gate, merged.row, merged.head, (thread & 127) * 2)
    gated = merged.exists & (use_output_gate != 0) & (thread < 128)
    ptx.prefetch_l2(gate_at, gated)

    # What comes next waits for all of this grid, and this one for all that came before. Had the
    # grid before said so, too, the next call's CTAs would come before this one's are done, two on
    # some SMs and none on others: 163 us in place of 133 at 256 rows, 9.9 in place of 8.7 at 1.
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    if merged.exists:
        gate = ptx.load_global_if(gate_at, gated, 0)
        tops, sums = _load_statistics(merged.first, merged.step, lane, splits)
        source = merged.first + Int64(quarter) * merged.step + Int64(dim * 4)
        step = merged.step * 4
        parts = []
        for u in cutlass.range_constexpr(MERGE_BATCH):
            parts.append(ptx.load_global4_float_if(source, 4 * u + quarter < splits))
            source = source + step
        # Gates come first, and what they cost is over when the sums are there.
        factors = _factors([gate], use_output_gate)
        weights, total = _weights(tops, sums)
        acc = cute.make_rmem_tensor((4,), Float32)
        for j in cutlass.range_constexpr(4):
            acc[j] = Float32(0.0)
        for u in cutlass.range_constexpr(MERGE_BATCH):
            # Beyond the last split the parts are zeros, and so are the weights.
            of_lane = weights[4 * u // 32]
            weight = ptx.shuffle_from_float(of_lane, (4 * u + quarter) & 31)
            for j in cutlass.range_constexpr(4):
                acc[j] = acc[j] + weight * parts[u][j]
        for split in cutlass.range(4 * MERGE_BATCH + quarter, splits, 4, unroll=1):
            four = ptx.load_global4_float_if(source, Boolean(True))
            source = source + step
            weight = _weight_of(weights, split)
            for j in cutlass.range_constexpr(4):
                acc[j] = acc[j] + weight * four[j]
        ptx.store_shared4_float(
            joint + (quarter * HEAD_DIM + dim) * 4, [acc[0], acc[1], acc[2], acc[3]]
        )
        ptx.barrier()
        if thread < 128:
            at = joint + thread * 8
            pair = []
            for j in cutlass.range_constexpr(2):
                of = [ptx.load_shared_float(at, (HEAD_DIM * k + j) * 4) for k in range(4)]
                pair.append((of[0] + of[1]) + (of[2] + of[3]))
            target = _row_address(out, merged.row, merged.head, thread * 2)
            _finish(target, factors, use_output_gate, pair, total)


@cute.kernel
def _merge_groups(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    output_gate: cute.Tensor,
    out: cute.Tensor,
    workspace: cute.Tensor,
    use_output_gate: Int32,
    tokens: Int32,
    group_rows: Int32,
    splits: Int32,
    whole_units: Int32,
) -> None:
    """The same for groups, of which there are many rows and few splits: a CTA takes four heads of
    rows, and a thread four dims, so that all CTAs are there before the sums are.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread & 31
    kv_heads = Int32(k_cache.shape[1])
    subgroups = (tokens + group_rows - 1) // group_rows
    tails = Int32(q.shape[0]) // tokens * subgroups * kv_heads - whole_units
    place = block * MERGE_HEADS + thread // (MERGE_THREADS // MERGE_HEADS)
    there = place < tails * group_rows * (Int32(q.shape[1]) // kv_heads)
    place = ptx.choose(there, place, Int32(0))
    merged = _merged_row(place, q, k_cache, workspace, tokens, group_rows, splits, whole_units)
    there = there & merged.exists
    dim = (thread % (MERGE_THREADS // MERGE_HEADS)) * 4
    gate_at = _row_address(output_gate, merged.row, merged.head, dim)
    gated = there & (use_output_gate != 0)
    ptx.prefetch_l2(gate_at, gated)

    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    gates = ptx.load_global2_if(gate_at, gated)
    tops, sums = _load_statistics(merged.first, merged.step, lane, splits, there)
    source = merged.first + Int64(dim * 4)
    parts = cute.make_rmem_tensor((4 * GROUP_MERGE_BATCH,), Float32)
    ready = ptx.choose(there, splits, Int32(0))
    _load_fours(parts, source, merged.step, Int32(0), ready)
    factors = _factors(list(gates), use_output_gate)
    weights, total = _weights(tops, sums)
    acc = cute.make_rmem_tensor((4,), Float32)
    for j in cutlass.range_constexpr(4):
        acc[j] = Float32(0.0)
    for start in cutlass.range(0, splits, GROUP_MERGE_BATCH, unroll=1):
        for u in cutlass.range_constexpr(GROUP_MERGE_BATCH):
            weight = _weight_of(weights, start + u)
            # Beyond the last split the parts are zeros, and so are the weights.
            for j in cutlass.range_constexpr(4):
                acc[j] = acc[j] + weight * parts[4 * u + j]
        if start + GROUP_MERGE_BATCH < splits:
            _load_fours(parts, source, merged.step, start + GROUP_MERGE_BATCH, ready)
    if there:
        target = _row_address(out, merged.row, merged.head, dim)
        _finish(target, factors, use_output_gate, [acc[j] for j in range(4)], total)


def _load_statistics(
    first: Int64, step: Int64, lane: Int32, splits: Int32, exists: Any = True
) -> tuple[list[Float32], list[Float32]]:
    """``(maxima, totals)`` of the splits that a lane keeps: its own number and 32 more."""
    tops = []
    sums = []
    for i in range(MAX_SPLITS // 32):
        split = lane + 32 * i
        there = (split < splits) if exists is True else exists & (split < splits)
        at = first + Int64(split) * step + HEAD_DIM * 4
        tops.append(ptx.float_of_bits(ptx.load_global_if(at, there, -0x800000)))
        sums.append(ptx.float_of_bits(ptx.load_global_if(at + 4, there, 0)))
    return tops, sums


def _weights(tops: list[Float32], sums: list[Float32]) -> tuple[list[Float32], Float32]:
    """``(weights of the splits that a lane keeps, weighted total of all)``."""
    largest = ptx.maximum(tops[0], tops[1])
    for power in range(5):
        largest = ptx.maximum(largest, ptx.shuffle_xor_float(largest, 1 << power))
    anchor = _anchor(largest)
    weights = [ptx.exp2(top - anchor) for top in tops]
    total = weights[0] * sums[0] + weights[1] * sums[1]
    for power in range(5):
        total = total + ptx.shuffle_xor_float(total, 1 << power)
    return weights, total


def _weight_of(weights: list[Float32], split: Int32) -> Float32:
    low, high = (ptx.shuffle_from_float(each, split & 31) for each in weights)
    return ptx.choose_float(split >= 32, high, low)


def _load_fours(parts: Any, source: Int64, step: Int64, start: Int32, splits: Int32) -> None:
    """Four sums each of a batch of splits, all in flight; zeros beyond the last."""
    for u in range(GROUP_MERGE_BATCH):
        split = start + u
        four = ptx.load_global4_float_if(source + Int64(split) * step, split < splits)
        for j in range(4):
            parts[4 * u + j] = four[j]


# ----- lowering -----------------------------------------------------------------------------------


def form_of(plan: Plan) -> Form:
    return Form(str(plan["dtype"]), plan.int("m_tiles"), not plan.arch.startswith("sm_9"))


def lower(plan: Plan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The host function of a plan and the fake arguments to compile it with; see the module
    docstring for the lists.
    """
    form = form_of(plan)
    rows, heads, pages, kv_heads, page_size = (fakes.extent() for _ in range(5))

    def strided(dtype: type[Numeric], shape: tuple[Any, ...], unit: int = 1) -> Any:
        """Strides free but for the last, multiples of 16 bytes."""
        strides = [cute.sym_int64(divisibility=unit) for _ in shape[:-1]]
        return fakes.tensor(dtype, shape, (*strides, 1), align=16)

    def loose(shape: tuple[Any, ...]) -> Any:
        return fakes.tensor(Int32, shape, tuple(fakes.extent() for _ in shape))

    element: type[Numeric] = {
        "bf16": BFloat16, "fp8_e4m3": Float8E4M3FN, "nvfp4": Uint8
    }[form.dtype]  # fmt: skip
    width = HEAD_DIM // 2 if form.dtype == "nvfp4" else HEAD_DIM
    unit = 16 * 8 // element.width
    query = strided(BFloat16, (rows, heads, HEAD_DIM), 8)
    cache = [strided(element, (pages, kv_heads, page_size, width), unit) for _ in range(2)]
    blocks = [
        strided(Float8E4M3FN, (pages, kv_heads, page_size, HEAD_DIM // 16), 16) for _ in range(2)
    ]
    scalars = [fakes.vector(Float32, 1) for _ in range(2)]
    requests = fakes.extent()
    common = (
        loose((requests, fakes.extent())),
        loose((rows, fakes.extent())),
        loose((rows,)),
        loose((rows,)),
        loose((rows,)),
        strided(BFloat16, (rows, heads, HEAD_DIM), 8),
        strided(BFloat16, (rows, heads, HEAD_DIM), 8),
        fakes.tensor(Float32, (fakes.extent32(),), (1,), align=16),
        Float32(1.0),
        *[Int32(0)] * 3,
    )
    launch = [Int32(1)] * 12
    stream = fakes.stream()

    if form.dtype == "bf16":

        @cute.jit
        def sparse_gqa_verify(
            q: cute.Tensor,
            k_cache: cute.Tensor,
            v_cache: cute.Tensor,
            block_table: cute.Tensor,
            selected_tokens: cute.Tensor,
            request_indices: cute.Tensor,
            valid_count: cute.Tensor,
            query_positions: cute.Tensor,
            output_gate: cute.Tensor,
            out: cute.Tensor,
            workspace: cute.Tensor,
            softmax_scale: Float32,
            use_valid_count: Int32,
            use_query_positions: Int32,
            use_output_gate: Int32,
            requests: Int32,
            q_heads: Int32,
            kv_heads: Int32,
            page_size: Int32,
            width: Int32,
            words: Int32,
            tokens: Int32,
            group_rows: Int32,
            splits: Int32,
            whole_units: Int32,
            cluster: Int32,
            apart: Int32,
            stream: Any,
        ) -> None:
            ranges.refuse_unless(
                *_as_planned(
                    q, k_cache, selected_tokens, softmax_scale, requests, q_heads, kv_heads,
                    page_size, width, tokens,
                ),
                *_apart(
                    out, workspace, words,
                    (q, k_cache, v_cache, block_table, selected_tokens, request_indices,
                     valid_count, query_positions, output_gate),
                ),
            )  # fmt: skip
            _launch(
                q, k_cache, v_cache, k_cache, v_cache, workspace, workspace, block_table,
                selected_tokens, request_indices, valid_count, query_positions, output_gate, out,
                workspace, softmax_scale, use_valid_count, use_query_positions, use_output_gate,
                Int32(0), requests, tokens, group_rows, splits, whole_units, cluster, apart,
                stream, form,
            )  # fmt: skip

        return sparse_gqa_verify, (query, *cache, *common, *launch, stream)

    if form.dtype == "fp8_e4m3":

        @cute.jit
        def sparse_gqa_verify(
            q: cute.Tensor,
            k_cache: cute.Tensor,
            v_cache: cute.Tensor,
            k_scale: cute.Tensor,
            v_scale: cute.Tensor,
            block_table: cute.Tensor,
            selected_tokens: cute.Tensor,
            request_indices: cute.Tensor,
            valid_count: cute.Tensor,
            query_positions: cute.Tensor,
            output_gate: cute.Tensor,
            out: cute.Tensor,
            workspace: cute.Tensor,
            softmax_scale: Float32,
            use_valid_count: Int32,
            use_query_positions: Int32,
            use_output_gate: Int32,
            requests: Int32,
            q_heads: Int32,
            kv_heads: Int32,
            page_size: Int32,
            width: Int32,
            words: Int32,
            tokens: Int32,
            group_rows: Int32,
            splits: Int32,
            whole_units: Int32,
            cluster: Int32,
            apart: Int32,
            stream: Any,
        ) -> None:
            ranges.refuse_unless(
                *_as_planned(
                    q, k_cache, selected_tokens, softmax_scale, requests, q_heads, kv_heads,
                    page_size, width, tokens,
                ),
                *_apart(
                    out, workspace, words,
                    (q, k_cache, v_cache, k_scale, v_scale, block_table, selected_tokens,
                     request_indices, valid_count, query_positions, output_gate),
                ),
            )  # fmt: skip
            _launch(
                q, k_cache, v_cache, k_cache, v_cache, k_scale, v_scale, block_table,
                selected_tokens, request_indices, valid_count, query_positions, output_gate, out,
                workspace, softmax_scale, use_valid_count, use_query_positions, use_output_gate,
                Int32(0), requests, tokens, group_rows, splits, whole_units, cluster, apart,
                stream, form,
            )  # fmt: skip

        return sparse_gqa_verify, (query, *cache, *scalars, *common, *launch, stream)

    @cute.jit
    def sparse_gqa_verify(
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        k_block_scales: cute.Tensor,
        v_block_scales: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        block_table: cute.Tensor,
        selected_tokens: cute.Tensor,
        request_indices: cute.Tensor,
        valid_count: cute.Tensor,
        query_positions: cute.Tensor,
        output_gate: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        softmax_scale: Float32,
        use_valid_count: Int32,
        use_query_positions: Int32,
        use_output_gate: Int32,
        v_interleaved: Int32,
        requests: Int32,
        q_heads: Int32,
        kv_heads: Int32,
        page_size: Int32,
        width: Int32,
        words: Int32,
        tokens: Int32,
        group_rows: Int32,
        splits: Int32,
        whole_units: Int32,
        cluster: Int32,
        apart: Int32,
        stream: Any,
    ) -> None:
        ranges.refuse_unless(
            *_as_planned(
                q, k_cache, selected_tokens, softmax_scale, requests, q_heads, kv_heads,
                page_size, width, tokens,
            ),
            (v_interleaved == 0) | (v_block_scales.stride[2] == HEAD_DIM // 16),
            *_apart(
                out, workspace, words,
                (q, k_cache, v_cache, k_block_scales, v_block_scales, k_scale, v_scale, block_table,
                 selected_tokens, request_indices, valid_count, query_positions, output_gate),
            ),
        )  # fmt: skip
        _launch(
            q, k_cache, v_cache, k_block_scales, v_block_scales, k_scale, v_scale, block_table,
            selected_tokens, request_indices, valid_count, query_positions, output_gate, out,
            workspace, softmax_scale, use_valid_count, use_query_positions, use_output_gate,
            v_interleaved, requests, tokens, group_rows, splits, whole_units, cluster, apart,
            stream, form,
        )  # fmt: skip

    arguments = (query, *cache, *blocks, *scalars, *common, Int32(0), *launch, stream)
    return sparse_gqa_verify, arguments


def _as_planned(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    selected_tokens: cute.Tensor,
    softmax_scale: Float32,
    requests: Int32,
    q_heads: Int32,
    kv_heads: Int32,
    page_size: Int32,
    width: Int32,
    tokens: Int32,
) -> tuple[Any, ...]:
    """That a call has the extents that its plan was picked for."""
    return (
        tokens >= 1,
        Int64(requests) * tokens == q.shape[0],
        q.shape[1] == q_heads,
        k_cache.shape[1] == kv_heads,
        k_cache.shape[2] == page_size,
        selected_tokens.shape[1] == width,
        softmax_scale > 0.0,
        softmax_scale < float("inf"),
    )


def _apart(
    out: cute.Tensor, workspace: cute.Tensor, words: Int32, inputs: tuple[cute.Tensor, ...]
) -> tuple[Any, ...]:
    """That the workspace holds the words of the call, that what is written overlaps nothing else,
    and that the rows of ``out`` share no memory.
    """
    rows, heads = Int64(out.shape[0]), Int64(out.shape[1])
    row, head = Int64(out.stride[0]), Int64(out.stride[1])
    one_head = (heads == 1) | (head >= HEAD_DIM)
    nested = (row >= head * heads) & one_head
    crossed = (head >= row * rows) & (row >= HEAD_DIM)
    lone = (rows == 1) & one_head
    headless = (heads == 1) & (row >= HEAD_DIM)
    spans = [_span(each) for each in inputs]
    written, space = _span(out), _span(workspace)
    unused = words == 0
    return (
        workspace.shape[0] >= words,
        nested | crossed | lone | headless,
        *[_disjoint(written, span) for span in spans],
        *[unused | _disjoint(space, span) for span in (written, *spans)],
    )


def _span(tensor: cute.Tensor) -> tuple[Int64, Int64]:
    """First byte and the one after the last of a tensor; the same if it is empty."""
    first = tensor.iterator.toint()
    last = Int64(0)
    filled = Boolean(True)
    for extent, stride in zip(tensor.shape, tensor.stride, strict=True):
        last = last + (Int64(extent) - 1) * Int64(stride)
        filled = filled & (Int64(extent) > 0)
    size = (last + 1) * (tensor.element_type.width // 8)
    return first, first + size * Int64(filled)


def _disjoint(a: tuple[Int64, Int64], b: tuple[Int64, Int64]) -> Any:
    return (a[0] >= b[1]) | (b[0] >= a[1])


@cute.jit
def _launch(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    k_block_scales: cute.Tensor,
    v_block_scales: cute.Tensor,
    k_scale: cute.Tensor,
    v_scale: cute.Tensor,
    block_table: cute.Tensor,
    selected_tokens: cute.Tensor,
    request_indices: cute.Tensor,
    valid_count: cute.Tensor,
    query_positions: cute.Tensor,
    output_gate: cute.Tensor,
    out: cute.Tensor,
    workspace: cute.Tensor,
    softmax_scale: Float32,
    use_valid_count: Int32,
    use_query_positions: Int32,
    use_output_gate: Int32,
    v_interleaved: Int32,
    requests: Int32,
    tokens: Int32,
    group_rows: Int32,
    splits: Int32,
    whole_units: Int32,
    cluster: Int32,
    apart: Int32,
    stream: Any,
    form: cutlass.Constexpr,
) -> None:
    kv_heads = Int32(k_cache.shape[1])
    subgroups = (tokens + group_rows - 1) // group_rows
    units = requests * subgroups * kv_heads
    tail = units - whole_units
    # No splits: a call that checks its arguments and launches nothing.
    if splits > 0:
        arguments = (
            q, k_cache, v_cache, k_block_scales, v_block_scales, k_scale, v_scale, block_table,
            selected_tokens, request_indices, valid_count, query_positions, output_gate, out,
            workspace, softmax_scale, use_valid_count, use_query_positions, use_output_gate,
            v_interleaved, tokens, group_rows, splits, whole_units, cluster,
        )  # fmt: skip
        ctas = whole_units + tail * splits
        if cutlass.const_expr(form.m_tiles == 1):
            # Even a cluster of one costs where a launch fills few SMs: 9.4 us in place of 8.4 at a
            # row on an H200.
            if cluster > 1:
                _start(_attend(*arguments, False, form), ctas, cluster, apart, stream, form)
            else:
                _start(_attend(*arguments, True, form), ctas, None, apart, stream, form)
        else:
            _start(_attend(*arguments, False, form), ctas, cluster, apart, stream, form)
        if (splits > 1) & (cluster == 1):
            heads_to_merge = tail * group_rows * (Int32(q.shape[1]) // kv_heads)
            sums = (
                q, k_cache, output_gate, out, workspace, use_output_gate, tokens, group_rows,
                splits, whole_units,
            )  # fmt: skip
            if cutlass.const_expr(form.m_tiles == 1):
                merge, merge_ctas = _merge(*sums), heads_to_merge
            else:
                merge = _merge_groups(*sums)
                merge_ctas = (heads_to_merge + MERGE_HEADS - 1) // MERGE_HEADS
            # An SM that gave its shared memory to the L1 in between would have to be empty to take
            # it back.
            merge.launch(
                grid=(merge_ctas, 1, 1),
                block=(MERGE_THREADS, 1, 1),
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=True,
            )


def _start(
    kernel: Any, ctas: Int32, cluster: Int32 | None, apart: Int32, stream: Any, form: Form
) -> None:
    # Where no more CTAs than SMs are launched, some SMs would get two and others none: 30.9 us in
    # place of 38.1 at 32 rows in eight splits on an H200, before the merge of groups.
    room = max(0, APART_BYTES - form.smem_bytes)
    kernel.launch(
        grid=(ctas, 1, 1),
        block=(form.threads, 1, 1),
        cluster=None if cluster is None else (cluster, 1, 1),
        smem=form.smem_bytes + apart * room,
        min_blocks_per_mp=resident(form.warps),
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )

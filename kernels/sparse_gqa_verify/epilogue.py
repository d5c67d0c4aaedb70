"""Results of a CTA or a cluster: combine, divide, round, gate, round, store."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import (
    PARTIAL_BATCH,
    PARTIAL_ROW,
    STAGED_ROW,
    STORE_BATCH,
    UNION,
    Form,
)
from specplan.kernels.sparse_gqa_verify.cta import Cta, restore_cta
from specplan.kernels.sparse_gqa_verify.queries import locate_row_and_head, row_address, row_of
from specplan.kernels.sparse_gqa_verify.softmax import anchor_of
from specplan.plans.sparse_gqa_verify import HEAD_DIM, MAX_CLUSTER


def first_sum(cta: Cta, form: Form) -> Int32:
    """First dim of this lane's sums, which are of neighbouring dims."""
    return cta.warp * form.slice + (cta.lane & 3) * (form.slice // 4)


def take_row_sums(acc: Any, i: int, value_scale: Float32, form: Form) -> list[list[Float32]]:
    """A thread's sums of its row ``i``, in the order of the dims, by fours."""
    n_tiles = form.slice // 8
    spots = [
        ((i // 2) * n_tiles + n) * 4 + 2 * (i % 2) + e for e in range(2) for n in range(n_tiles)
    ]
    values = [acc[spot] * value_scale for spot in spots]
    return [values[at : at + 4] for at in range(0, len(values), 4)]


def sum_warp_totals(cta: Cta, m: Int32, form: Form) -> Float32:
    """The sum of the warps' totals of a row."""
    total = Float32(0.0)
    for part in range(form.warps // 4):
        at = cta.smem + form.reduce_at + m * (4 * form.warps)
        four = ptx.load_shared4_float(at, 16 * part)
        total = total + ((four[0] + four[1]) + (four[2] + four[3]))
    return total


def stage_sums(cta: Cta, value_scale: Float32, acc: Any, total: Any, form: Form) -> None:
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
        at = cta.smem + form.ring_at + m * STAGED_ROW + first_sum(cta, form) * 4
        for part, four in enumerate(take_row_sums(acc, i, value_scale, form)):
            ptx.store_shared4_float(at + 16 * part, four)


def load_staged(cta: Cta, m: Int32, form: Form) -> tuple[list[Float32], Float32]:
    """``(eight sums at dim 8 lane, total)`` of a staged row."""
    at = cta.smem + form.ring_at + m * STAGED_ROW + cta.lane * 32
    values = [*ptx.load_shared4_float(at), *ptx.load_shared4_float(at + 16)]
    return values, sum_warp_totals(cta, m, form)


@cute.jit
def compute_gate_factors(gates: list[Int32], use_output_gate: Int32) -> list[Float32]:
    """Sigmoids of pairs of gates, or anything."""
    factors = [Float32(1.0)] * (2 * len(gates))
    if use_output_gate != 0:
        for i in cutlass.range_constexpr(len(gates)):
            low, high = ptx.unpack_bf16(gates[i])
            factors[2 * i] = sigmoid(low)
            factors[2 * i + 1] = sigmoid(high)
    return factors


@cute.jit
def store_outputs(
    target: Int64,
    factors: list[Float32],
    use_output_gate: Int32,
    sums: list[Float32],
    total: Float32,
) -> None:
    """Sums, two, four or eight, over their total: rounded, gated if asked for, rounded again. Zeros
    where the total is 0, whatever the gate holds.
    """
    empty = total == Float32(0.0)
    factor = ptx.reciprocal(ptx.choose_float(empty, Float32(1.0), total))
    values = [value * factor for value in sums]
    pairs = len(values) // 2
    words = [ptx.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(pairs)]
    if use_output_gate != 0:
        for i in cutlass.range_constexpr(pairs):
            low, high = ptx.unpack_bf16(words[i])
            words[i] = ptx.pack_bf16(low * factors[2 * i], high * factors[2 * i + 1])
    words = [ptx.choose(empty, Int32(0), word) for word in words]
    if cutlass.const_expr(pairs == 1):
        ptx.store_global(target, words[0])
    elif cutlass.const_expr(pairs == 2):
        ptx.store_global2(target, words[0], words[1])
    else:
        ptx.store_global4(target, (words[0], words[1], words[2], words[3]))


def sigmoid(value: Float32) -> Float32:
    """1 / (1 + e^-x) in fp32, each step rounded once, as a separate gate computes it."""
    return ptx.exact_reciprocal(Float32(1.0) + ptx.exponential(-value))


@cute.jit
def stage_row_maxima(cta: Cta, top: Any, form: cutlass.Constexpr) -> None:
    """Each row's maximum, in log2 units, after its staged sums."""
    if (cta.warp == 0) & (cta.lane & 3 == 0):
        for i in cutlass.range_constexpr(2 * form.m_tiles):
            at = cta.smem + form.ring_at + ((cta.lane >> 2) + 8 * i) * STAGED_ROW
            ptx.store_shared_float(at, top[i], HEAD_DIM * 4)


@cute.jit
def meet_cluster(
    cta: Cta, mode: Int32, failed: Int32, cluster: Int32, form: cutlass.Constexpr
) -> Int32:
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


def fetch_gates(
    cta: Cta,
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
        row, head = locate_row_and_head(cta, m)
        source = row_address(output_gate, row, head, cta.lane * 8)
        four = ptx.load_global4_if(source, is_chosen(cta, m, chosen))
        for j in range(4):
            gates[4 * u + j] = four[j]


def is_chosen(cta: Cta, m: Int32, chosen: Int32) -> Any:
    """Whether a row of the MMA tiles is a query head of a row that is stored now."""
    return (m < cta.rows * cta.group) & ((ptx.shift_right(chosen, row_of(cta, m)) & 1) != 0)


@cute.jit
def store_rows(
    cta: Cta,
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
    cta = restore_cta(cta, form)
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
                parts.append(load_parts(cta, m, cluster, is_chosen(cta, m, chosen), form))
        after = first + batch * cluster * form.warps
        fetch_gates(cta, output_gate, later, after, cluster, wanted, form)
        for u in cutlass.range_constexpr(batch):
            m = first + u * cluster * form.warps
            row, head = locate_row_and_head(cta, m)
            if cutlass.const_expr(joint):
                values, total = combine_ranks(cta, parts[u], cluster)
            else:
                values, total = load_staged(cta, m, form)
            if is_chosen(cta, m, chosen):
                target = row_address(out, row, head, cta.lane * 8)
                factors = compute_gate_factors([gates[4 * u + j] for j in range(4)], wanted)
                store_outputs(target, factors, wanted, values, total)
        for j in cutlass.range_constexpr(4 * batch):
            gates[j] = later[j]
        first = after
    if cutlass.const_expr(joint):
        # No CTA goes on, or leaves, while another reads its sums. Nothing that was written before
        # is for the others, and to wait for stores to global memory would cost a microsecond.
        ptx.cluster_arrive_relaxed()
        ptx.cluster_wait()


class Parts(NamedTuple):
    """What all ranks have of a row: in lane r the maximum and the warps' totals of rank r, and of
    each rank the eight sums at dim 8 lane.
    """

    top: Float32
    totals: list[list[Float32]]
    sums: list[list[Float32]]


def load_parts(cta: Cta, m: Int32, cluster: Int32, exists: Any, form: Form) -> Parts:
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
    return Parts(top, of_warps, sums)


def combine_ranks(cta: Cta, parts: Parts, cluster: Int32) -> tuple[list[Float32], Float32]:
    """``(eight sums at dim 8 lane, total)`` of a row over all ranks, in their order."""
    minus = Float32(float("-inf"))
    top = ptx.choose_float(cta.lane < cluster, parts.top, minus)
    largest = top
    for rank in range(MAX_CLUSTER):
        largest = ptx.maximum(largest, ptx.shuffle_from_float(top, Int32(rank)))
    weight = ptx.exp2(top - anchor_of(largest))
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
def store_partial(
    cta: Cta,
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
    cta = restore_cta(cta, form)
    stage_sums(cta, value_scale, acc, total, form)
    stage_row_maxima(cta, top, form)
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
            if is_chosen(cta, m, chosen):
                place = first + Int64(m) * PARTIAL_ROW + Int64(cta.lane * 16)
                ptx.store_global4_float(place, list(parts[u][0]))
                ptx.store_global4_float(place + HEAD_DIM * 2, list(parts[u][1]))
    m = cta.thread
    if is_chosen(cta, m, chosen):
        place = first + Int64(m) * PARTIAL_ROW + HEAD_DIM * 4
        ptx.store_global_float(place, ptx.load_shared_float(staged + m * STAGED_ROW, HEAD_DIM * 4))
        ptx.store_global_float(place + 4, sum_warp_totals(cta, m, form))

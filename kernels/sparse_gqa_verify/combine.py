"""The second kernel of a call: combines the partial results of split units."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from specplan.kernels.device.names import kernel_name
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import (
    GROUP_MERGE_BATCH,
    MERGE_BATCH,
    MERGE_HEADS,
    MERGE_THREADS,
    PARTIAL_ROW,
)
from specplan.kernels.sparse_gqa_verify.epilogue import compute_gate_factors, store_outputs
from specplan.kernels.sparse_gqa_verify.queries import row_address
from specplan.kernels.sparse_gqa_verify.softmax import anchor_of
from specplan.plans.sparse_gqa_verify import HEAD_DIM, MAX_SPLITS


class MergedRow(NamedTuple):
    """A query head of a row that was split: where its first partial result stands, the bytes from a
    split's to the next, where it goes, and whether the last group of a request has that row.
    """

    first: Int64
    step: Int64
    row: Int32
    head: Int32
    exists: Any


def locate_merged_row(
    place: Int32,
    q: cute.Tensor,
    k_cache: cute.Tensor,
    workspace: cute.Tensor,
    tokens: Int32,
    group_rows: Int32,
    splits: Int32,
    whole_units: Int32,
) -> MergedRow:
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
    return MergedRow(
        first=workspace.iterator.toint() + before * PARTIAL_ROW,
        step=Int64(m_rows) * PARTIAL_ROW,
        row=(verify // subgroups) * tokens + within,
        head=(unit % kv_heads) * group + (m - row * group),
        exists=within < tokens,
    )


@kernel_name("sparse_gqa_merge")
@cute.kernel
def combine_splits(
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
    """One CTA per row and query head: sums the partial results in the order of the splits; a thread
    has four dims of every fourth split.
    """
    thread, _, _ = cute.arch.thread_idx()
    place, _, _ = cute.arch.block_idx()
    lane = thread & 31
    quarter = thread >> 6
    dim = (thread & 63) * 4
    joint = cute.arch.alloc_smem(Float32, 4 * HEAD_DIM, alignment=16).toint()
    merged = locate_merged_row(
        place, q, k_cache, workspace, tokens, group_rows, splits, whole_units
    )
    # The first half of the threads gate two dims each in the end.
    gate_at = row_address(output_gate, merged.row, merged.head, (thread & 127) * 2)
    gated = merged.exists & (use_output_gate != 0) & (thread < 128)
    ptx.prefetch_l2(gate_at, gated)

    # What comes next waits for all of this grid, and this one for all that came before. Had the
    # grid before said so, too, the next call's CTAs would come before this one's are done, two on
    # some SMs and none on others: 163 us in place of 133 at 256 rows, 9.9 in place of 8.7 at 1.
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    if merged.exists:
        gate = ptx.load_global_if(gate_at, gated, 0)
        tops, sums = load_statistics(merged.first, merged.step, lane, splits)
        source = merged.first + Int64(quarter) * merged.step + Int64(dim * 4)
        step = merged.step * 4
        parts = []
        for u in cutlass.range_constexpr(MERGE_BATCH):
            parts.append(ptx.load_global4_float_if(source, 4 * u + quarter < splits))
            source = source + step
        # Gates come first, and what they cost is over when the sums are there.
        factors = compute_gate_factors([gate], use_output_gate)
        weights, total = weigh_splits(tops, sums)
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
            weight = weight_of(weights, split)
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
            target = row_address(out, merged.row, merged.head, thread * 2)
            store_outputs(target, factors, use_output_gate, pair, total)


@kernel_name("sparse_gqa_merge_groups")
@cute.kernel
def combine_group_splits(
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
    merged = locate_merged_row(
        place, q, k_cache, workspace, tokens, group_rows, splits, whole_units
    )
    there = there & merged.exists
    dim = (thread % (MERGE_THREADS // MERGE_HEADS)) * 4
    gate_at = row_address(output_gate, merged.row, merged.head, dim)
    gated = there & (use_output_gate != 0)
    ptx.prefetch_l2(gate_at, gated)

    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    gates = ptx.load_global2_if(gate_at, gated)
    tops, sums = load_statistics(merged.first, merged.step, lane, splits, there)
    source = merged.first + Int64(dim * 4)
    parts = cute.make_rmem_tensor((4 * GROUP_MERGE_BATCH,), Float32)
    ready = ptx.choose(there, splits, Int32(0))
    load_partial_sums(parts, source, merged.step, Int32(0), ready)
    factors = compute_gate_factors(list(gates), use_output_gate)
    weights, total = weigh_splits(tops, sums)
    acc = cute.make_rmem_tensor((4,), Float32)
    for j in cutlass.range_constexpr(4):
        acc[j] = Float32(0.0)
    for start in cutlass.range(0, splits, GROUP_MERGE_BATCH, unroll=1):
        for u in cutlass.range_constexpr(GROUP_MERGE_BATCH):
            weight = weight_of(weights, start + u)
            # Beyond the last split the parts are zeros, and so are the weights.
            for j in cutlass.range_constexpr(4):
                acc[j] = acc[j] + weight * parts[4 * u + j]
        if start + GROUP_MERGE_BATCH < splits:
            load_partial_sums(parts, source, merged.step, start + GROUP_MERGE_BATCH, ready)
    if there:
        target = row_address(out, merged.row, merged.head, dim)
        store_outputs(target, factors, use_output_gate, [acc[j] for j in range(4)], total)


def load_statistics(
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


def weigh_splits(tops: list[Float32], sums: list[Float32]) -> tuple[list[Float32], Float32]:
    """``(weights of the splits that a lane keeps, weighted total of all)``."""
    largest = ptx.maximum(tops[0], tops[1])
    for power in range(5):
        largest = ptx.maximum(largest, ptx.shuffle_xor_float(largest, 1 << power))
    anchor = anchor_of(largest)
    weights = [ptx.exp2(top - anchor) for top in tops]
    total = weights[0] * sums[0] + weights[1] * sums[1]
    for power in range(5):
        total = total + ptx.shuffle_xor_float(total, 1 << power)
    return weights, total


def weight_of(weights: list[Float32], split: Int32) -> Float32:
    low, high = (ptx.shuffle_from_float(each, split & 31) for each in weights)
    return ptx.choose_float(split >= 32, high, low)


def load_partial_sums(parts: Any, source: Int64, step: Int64, start: Int32, splits: Int32) -> None:
    """Four sums each of a batch of splits, all in flight; zeros beyond the last."""
    for u in range(GROUP_MERGE_BATCH):
        split = start + u
        four = ptx.load_global4_float_if(source + Int64(split) * step, split < splits)
        for j in range(4):
            parts[4 * u + j] = four[j]

"""The kernel: load the queries, then for each pass fill a window and walk its tiles, then store."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute
from specplan.kernels.device.names import kernel_name
from specplan.kernels.sparse_gqa_verify import ptx
from specplan.kernels.sparse_gqa_verify.config import (
    DIRECT,
    EARLY,
    FILTERED,
    LOG2_E,
    NO_LIMIT,
    STORE_BATCH,
    UNION,
)
from specplan.kernels.sparse_gqa_verify.cta import Cta, restore_cta, save_cta
from specplan.kernels.sparse_gqa_verify.epilogue import (
    fetch_gates,
    meet_cluster,
    stage_row_maxima,
    stage_sums,
    store_partial,
    store_rows,
)
from specplan.kernels.sparse_gqa_verify.mainloop import run_mainloop
from specplan.kernels.sparse_gqa_verify.queries import (
    fetch_queries,
    locate_row_and_head,
    place_queries,
    row_address,
    row_of,
)
from specplan.kernels.sparse_gqa_verify.selection import (
    list_address,
    place_entries,
    prefetch_inputs,
    share_of,
    word_address,
)
from specplan.kernels.sparse_gqa_verify.union import (
    clear_bitmaps,
    fetch_rest,
    fetch_row,
    mark_rest,
    mark_row,
    stage_table,
)
from specplan.kernels.sparse_gqa_verify.window import fill_window
from specplan.plans.sparse_gqa_verify import GROUP_ROWS, UNION_LIST, UNION_TOKENS


@kernel_name("sparse_gqa_attend")
@cute.kernel
def attend_rows(
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
    cta = Cta(
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
        save_cta(cta, form)
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
        clear_bitmaps(cta, form)

    first, last = share_of(cta, Int32(selected_tokens.shape[1]))
    scalars = (request_indices, valid_count, query_positions)
    prefetch_inputs(cta, q, request, scalars, (k_scale, v_scale), form)
    cute.arch.griddepcontrol_wait()
    # The next call may take its place on the SMs at once. A merge comes when results do: 26.2 us in
    # place of 26.7 at 32 rows on an H200.
    if (cluster > 1) | (splits == 1):
        cute.arch.griddepcontrol_launch_dependents()

    # Row r of the group stands in three words: its request or -1, its entries, its last position.
    info = smem + form.misc_at
    width = Int32(selected_tokens.shape[1])
    row = row0 + cutlass.min(thread & 3, rows - 1)
    owner = ptx.load_global(word_address(request_indices, row))
    listed = ptx.load_global_if(word_address(valid_count, row), use_valid_count != 0, NO_LIMIT)
    limit = ptx.load_global_if(
        word_address(query_positions, row), use_query_positions != 0, NO_LIMIT
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
            quads.append(fetch_row(cta, r, fits & (r < rows), form))
        rest = fetch_rest(cta, fits, form)
    if early:
        listed = cutlass.max(cutlass.min(listed, width), 0)
        if listed < width:
            first, last = share_of(cta, listed)
        entry = Int64(selected_tokens.stride[1]) * 4
        source = list_address(cta, Int32(0)) + Int64(first + thread) * entry
        for u in cutlass.range_constexpr(EARLY):
            place = first + u * form.threads + thread
            ahead[u] = ptx.load_global_if(source, place < last, -1)
            source = source + form.threads * entry
    words = fetch_queries(cta, q, form)
    if ((count == 1) | ((cluster > 1) & (split == 0))) & (use_output_gate != 0):
        # The gates are needed last and read at once.
        for turn in cutlass.range_constexpr(-(-form.m_rows * 4 // form.threads)):
            line = turn * form.threads + thread
            m = line >> 2
            row, head = locate_row_and_head(cta, m)
            source = row_address(output_gate, row, head, 64 * (line & 3))
            ptx.prefetch_l2(source, m < rows * group)
    score_scale = softmax_scale * Float32(LOG2_E * 2.0**form.e2m1_exponent)
    value_scale = Float32(2.0**form.e2m1_exponent)
    if cutlass.const_expr(form.f16):
        score_scale = score_scale * ptx.load_global_float(k_scale.iterator.toint())
        value_scale = value_scale * ptx.load_global_float(v_scale.iterator.toint())
    live = (owner >= 0) & (owner < Int32(block_table.shape[0]))
    if early:
        place_entries(cta, owner, ahead, limit, live, form)
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
        stage_table(cta, form)
        broken = Int32(0)
        for r in cutlass.range_constexpr(GROUP_ROWS):
            odd_quads, again = mark_row(cta, Int32(r), quads[r], form)
            broken = broken | (odd_quads << (r * form.quads))
            twice = twice | again
        mark_rest(cta, rest, broken, form)
    place_queries(cta, words, score_scale, form)
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
        bit = ptx.choose(m < rows * group, Int32(1) << row_of(cta, m), Int32(0))
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
            entries, left, repeated = fill_window(cta, mode, done, window, early, form)
            shift = ptx.choose(mode == UNION, Int32(2), Int32(0))
            run_mainloop(cta, window, entries, shift, row_bits, acc, top, total, form)
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
            fresh = restore_cta(cta, form)
            stage_sums(fresh, value_scale, acc, total, form)
            stage_row_maxima(fresh, top, form)
            first_m = fresh.split + cluster * fresh.warp
            fetch_gates(fresh, output_gate, gates, first_m, cluster, wanted, form)
            failed = meet_cluster(fresh, mode, failed, cluster, form)
            if failed == 0:
                store_rows(cta, out, output_gate, gates, wanted, chosen, cluster, True, form)
        elif failed == 0:
            if (tail < 0) | (splits == 1):
                fresh = restore_cta(cta, form)
                fetch_gates(fresh, output_gate, gates, fresh.warp, cluster, wanted, form)
                stage_sums(fresh, value_scale, acc, total, form)
                ptx.barrier()
                store_rows(cta, out, output_gate, gates, wanted, chosen, cluster, False, form)
            else:
                store_partial(
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

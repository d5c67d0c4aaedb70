"""A plan's host function, with the checks of its arguments and its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, Numeric, Uint8, cute
from specplan.kernels import fakes, ranges
from specplan.kernels.device.names import host_name
from specplan.kernels.sparse_gqa_verify.attend import attend_rows
from specplan.kernels.sparse_gqa_verify.combine import combine_group_splits, combine_splits
from specplan.kernels.sparse_gqa_verify.config import (
    APART_BYTES,
    MERGE_HEADS,
    MERGE_THREADS,
    Form,
    form_of,
)
from specplan.plans.plan import Plan
from specplan.plans.sparse_gqa_verify import HEAD_DIM, resident


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

        @host_name("sparse_gqa_verify")
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
                *as_planned(
                    q, k_cache, selected_tokens, softmax_scale, requests, q_heads, kv_heads,
                    page_size, width, tokens,
                ),
                *keeps_apart(
                    out, workspace, words,
                    (q, k_cache, v_cache, block_table, selected_tokens, request_indices,
                     valid_count, query_positions, output_gate),
                ),
            )  # fmt: skip
            launch_kernels(
                q, k_cache, v_cache, k_cache, v_cache, workspace, workspace, block_table,
                selected_tokens, request_indices, valid_count, query_positions, output_gate, out,
                workspace, softmax_scale, use_valid_count, use_query_positions, use_output_gate,
                Int32(0), requests, tokens, group_rows, splits, whole_units, cluster, apart,
                stream, form,
            )  # fmt: skip

        return sparse_gqa_verify, (query, *cache, *common, *launch, stream)

    if form.dtype == "fp8_e4m3":

        @host_name("sparse_gqa_verify")
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
                *as_planned(
                    q, k_cache, selected_tokens, softmax_scale, requests, q_heads, kv_heads,
                    page_size, width, tokens,
                ),
                *keeps_apart(
                    out, workspace, words,
                    (q, k_cache, v_cache, k_scale, v_scale, block_table, selected_tokens,
                     request_indices, valid_count, query_positions, output_gate),
                ),
            )  # fmt: skip
            launch_kernels(
                q, k_cache, v_cache, k_cache, v_cache, k_scale, v_scale, block_table,
                selected_tokens, request_indices, valid_count, query_positions, output_gate, out,
                workspace, softmax_scale, use_valid_count, use_query_positions, use_output_gate,
                Int32(0), requests, tokens, group_rows, splits, whole_units, cluster, apart,
                stream, form,
            )  # fmt: skip

        return sparse_gqa_verify, (query, *cache, *scalars, *common, *launch, stream)

    @host_name("sparse_gqa_verify")
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
            *as_planned(
                q, k_cache, selected_tokens, softmax_scale, requests, q_heads, kv_heads,
                page_size, width, tokens,
            ),
            (v_interleaved == 0) | (v_block_scales.stride[2] == HEAD_DIM // 16),
            *keeps_apart(
                out, workspace, words,
                (q, k_cache, v_cache, k_block_scales, v_block_scales, k_scale, v_scale, block_table,
                 selected_tokens, request_indices, valid_count, query_positions, output_gate),
            ),
        )  # fmt: skip
        launch_kernels(
            q, k_cache, v_cache, k_block_scales, v_block_scales, k_scale, v_scale, block_table,
            selected_tokens, request_indices, valid_count, query_positions, output_gate, out,
            workspace, softmax_scale, use_valid_count, use_query_positions, use_output_gate,
            v_interleaved, requests, tokens, group_rows, splits, whole_units, cluster, apart,
            stream, form,
        )  # fmt: skip

    arguments = (query, *cache, *blocks, *scalars, *common, Int32(0), *launch, stream)
    return sparse_gqa_verify, arguments


def as_planned(
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


def keeps_apart(
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
    spans = [span_of(each) for each in inputs]
    written, space = span_of(out), span_of(workspace)
    unused = words == 0
    return (
        workspace.shape[0] >= words,
        nested | crossed | lone | headless,
        *[are_disjoint(written, span) for span in spans],
        *[unused | are_disjoint(space, span) for span in (written, *spans)],
    )


def span_of(tensor: cute.Tensor) -> tuple[Int64, Int64]:
    """First byte and the one after the last of a tensor; the same if it is empty."""
    first = tensor.iterator.toint()
    last = Int64(0)
    filled = Boolean(True)
    for extent, stride in zip(tensor.shape, tensor.stride, strict=True):
        last = last + (Int64(extent) - 1) * Int64(stride)
        filled = filled & (Int64(extent) > 0)
    size = (last + 1) * (tensor.element_type.width // 8)
    return first, first + size * Int64(filled)


def are_disjoint(a: tuple[Int64, Int64], b: tuple[Int64, Int64]) -> Any:
    return (a[0] >= b[1]) | (b[0] >= a[1])


@cute.jit
def launch_kernels(
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
                start_kernel(
                    attend_rows(*arguments, False, form), ctas, cluster, apart, stream, form
                )
            else:
                start_kernel(attend_rows(*arguments, True, form), ctas, None, apart, stream, form)
        else:
            start_kernel(attend_rows(*arguments, False, form), ctas, cluster, apart, stream, form)
        if (splits > 1) & (cluster == 1):
            heads_to_merge = tail * group_rows * (Int32(q.shape[1]) // kv_heads)
            sums = (
                q, k_cache, output_gate, out, workspace, use_output_gate, tokens, group_rows,
                splits, whole_units,
            )  # fmt: skip
            if cutlass.const_expr(form.m_tiles == 1):
                merge, merge_ctas = combine_splits(*sums), heads_to_merge
            else:
                merge = combine_group_splits(*sums)
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


def start_kernel(
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

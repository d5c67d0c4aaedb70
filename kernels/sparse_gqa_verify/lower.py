"""A plan's host function, with the checks of its arguments and its launches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
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
from specplan.plans.sparse_gqa_verify import HEAD_DIM, OP, resident

#: Numbers that a call is compared with, and that no launch needs.
COMPARED = ("q_heads", "kv_heads", "page_size", "width", "words")


def lower(plan: Plan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The host function of a plan and the fake arguments to compile it with; see the module
    docstring for the lists.
    """
    form = form_of(plan)
    tensors, scalars = OP.in_form(form.dtype)
    names = [each.name for each in (*tensors, *scalars)]

    def check_and_launch(arguments: tuple[Any, ...], stream: Any) -> None:
        given = dict(zip(names, arguments, strict=True))
        call = SimpleNamespace(**given)
        checks = as_planned(call)
        if form.dtype == "nvfp4":
            stride = HEAD_DIM // 16
            plain = (call.v_interleaved == 0) | (call.v_block_scales.stride[2] == stride)
            checks = (*checks, plain)
        inputs = tuple(given[each.name] for each in tensors if not each.written)
        ranges.refuse_unless(*checks, *keeps_apart(call.out, call.workspace, call.words, inputs))
        # What only other formats have is passed on, too, and not looked at.
        absent = {
            "k_block_scales": given["k_cache"],
            "v_block_scales": given["v_cache"],
            "k_scale": given["workspace"],
            "v_scale": given["workspace"],
            "v_interleaved": Int32(0),
        }
        launch_kernels(
            **{name: value for name, value in (absent | given).items() if name not in COMPARED},
            stream=stream,
            form=form,
        )

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
            check_and_launch(
                (q, k_cache, v_cache, block_table, selected_tokens, request_indices, valid_count,
                 query_positions, output_gate, out, workspace, softmax_scale, use_valid_count,
                 use_query_positions, use_output_gate, requests, q_heads, kv_heads, page_size,
                 width, words, tokens, group_rows, splits, whole_units, cluster, apart),
                stream,
            )  # fmt: skip

    elif form.dtype == "fp8_e4m3":

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
            check_and_launch(
                (q, k_cache, v_cache, k_scale, v_scale, block_table, selected_tokens,
                 request_indices, valid_count, query_positions, output_gate, out, workspace,
                 softmax_scale, use_valid_count, use_query_positions, use_output_gate, requests,
                 q_heads, kv_heads, page_size, width, words, tokens, group_rows, splits,
                 whole_units, cluster, apart),
                stream,
            )  # fmt: skip

    else:

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
            check_and_launch(
                (q, k_cache, v_cache, k_block_scales, v_block_scales, k_scale, v_scale,
                 block_table, selected_tokens, request_indices, valid_count, query_positions,
                 output_gate, out, workspace, softmax_scale, use_valid_count, use_query_positions,
                 use_output_gate, v_interleaved, requests, q_heads, kv_heads, page_size, width,
                 words, tokens, group_rows, splits, whole_units, cluster, apart),
                stream,
            )  # fmt: skip

    return sparse_gqa_verify, fakes.arguments(OP, plan)


def as_planned(c: Any) -> tuple[Any, ...]:
    """That a call has the extents that its plan was picked for."""
    return (
        c.tokens >= 1,
        Int64(c.requests) * c.tokens == c.q.shape[0],
        c.q.shape[1] == c.q_heads,
        c.k_cache.shape[1] == c.kv_heads,
        c.k_cache.shape[2] == c.page_size,
        c.selected_tokens.shape[1] == c.width,
        c.softmax_scale > 0.0,
        c.softmax_scale < float("inf"),
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

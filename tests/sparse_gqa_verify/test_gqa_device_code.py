"""The compiled device code itself, its PTX run on a CPU: indices, fragments, masks, splits, merge,
gate and races.

A CPU cannot show what only a GPU does: the exact rounding of ``ex2.approx``, timing.
"""

from __future__ import annotations

import struct

import pytest
import torch
from specplan.kernels.sparse_gqa_verify import cases
from specplan.kernels.sparse_gqa_verify.reference import VScaleOrder
from specplan.plans.sparse_gqa_verify import Launch, groups
from specplan.tools.simulator.machine import Kernel, LaunchShape
from specplan.tools.simulator.memory import Memory
from specplan.tools.simulator.ptx import entries

from support.shared import Shared

pytest.importorskip("cutlass")
from forms import plan_of

PROBLEM = {"q_heads": 12, "kv_heads": 1, "head_dim": 256, "page_size": 64, "selected": 131}


def _tensor(tensor: torch.Tensor, dims: int) -> bytes:
    """A tensor as the compiled kernels take it: address, the sizes that are not fixed, their
    strides.
    """
    shape = b"".join(struct.pack("<q", tensor.shape[d]) for d in range(dims))
    strides = b"".join(struct.pack("<q", tensor.stride(d)) for d in range(dims))
    return struct.pack("<Q", tensor.data_ptr()) + shape + strides


def _run(ptx: str, dtype: str, case: cases.GqaCase, launch: Launch) -> None:
    from specplan.kernels.sparse_gqa_verify.config import MERGE_HEADS, MERGE_THREADS, Form

    inputs = case.inputs

    def whole(value: int) -> bytes:
        return struct.pack("<i", value)

    def vector(given: torch.Tensor | None) -> bytes:
        return _tensor(inputs.request_indices if given is None else given, 1)

    nvfp4 = dtype == "nvfp4"
    scales = (inputs.k_block_scales, inputs.v_block_scales) if nvfp4 else (inputs.k_cache,) * 2
    space = struct.pack("<Qq", case.workspace.data_ptr(), case.words)
    scalars = [struct.pack("<Q", s.data_ptr()) for s in (inputs.k_scale, inputs.v_scale)]
    gate = inputs.q if inputs.output_gate is None else inputs.output_gate
    numbers = [
        whole(x) for x in (launch.tokens, launch.group_rows, launch.splits, launch.whole_units)
    ]
    cluster = whole(launch.cluster)
    gated = whole(inputs.output_gate is not None)
    q, out, gates = (_tensor(t, 2) for t in (inputs.q, case.out, gate))
    cache = _tensor(inputs.k_cache, 3)
    arguments = [
        q,
        cache,
        _tensor(inputs.v_cache, 3),
        *[_tensor(s, 3) for s in scales],
        *([space] * 2 if dtype == "bf16" else scalars),
        _tensor(inputs.block_table, 2),
        _tensor(inputs.selected_tokens, 2),
        vector(None),
        vector(inputs.valid_count),
        vector(inputs.query_positions),
        gates,
        out,
        space,
        struct.pack("<f", inputs.softmax_scale),
        whole(inputs.valid_count is not None),
        whole(inputs.query_positions is not None),
        gated,
        whole(inputs.v_scale_order is VScaleOrder.INTERLEAVED),
        *numbers,
        cluster,
    ]
    rows, heads, _ = inputs.q.shape
    kv_heads = inputs.k_cache.shape[1]
    tail = groups(rows // launch.tokens, launch.tokens, launch.group_rows) * kv_heads
    tail -= launch.whole_units
    m_tiles = -(-launch.group_rows * heads // kv_heads // 16)
    form = Form(dtype, m_tiles, False)
    held = [value for value in vars(inputs).values() if isinstance(value, torch.Tensor)]
    memory = Memory([*held, case.out, case.workspace])
    kernels = entries(ptx)
    # One MMA tile has a kernel of its own, the last, for launches without clusters.
    attend = [entry for name, entry in kernels.items() if "_attend" in name]
    ctas = launch.whole_units + tail * launch.splits
    shape = LaunchShape((ctas, 1, 1), (form.threads, 1, 1), (launch.cluster, 1, 1), form.smem_bytes)
    number = -1 if launch.cluster == 1 else 0
    races = Kernel(attend[number]).launch(shape, arguments, memory).races
    if launch.splits > 1 and launch.cluster == 1:
        arguments = [q, cache, gates, out, space, gated, *numbers]
        heads_to_merge = tail * launch.group_rows * heads // kv_heads
        each = 1 if m_tiles == 1 else MERGE_HEADS
        (merge,) = [entry for name, entry in kernels.items() if "_merge" in name]
        shape = LaunchShape((-(-heads_to_merge // each), 1, 1), (MERGE_THREADS, 1, 1), shared=4096)
        races += Kernel(merge).launch(shape, arguments, memory).races
    assert races == [], "\n".join(map(str, races))


@pytest.mark.parametrize(
    ("dtype", "arch", "requests", "tokens", "launch"),
    [
        ("bf16", "sm_90a", 1, 1, Launch(1, 1, 1, 1)),
        ("fp8_e4m3", "sm_90a", 1, 1, Launch(1, 1, 2, 0)),
        ("fp8_e4m3", "sm_90a", 1, 2, Launch(2, 2, 1, 1)),
        ("bf16", "sm_90a", 2, 1, Launch(1, 1, 3, 0, 3)),
        ("bf16", "sm_90a", 1, 4, Launch(4, 4, 4, 0, 4)),
        ("bf16", "sm_90a", 1, 3, Launch(3, 3, 9, 0)),
        ("nvfp4", "sm_90a", 1, 4, Launch(4, 4, 2, 0)),
        ("nvfp4", "sm_90a", 1, 2, Launch(2, 2, 2, 0, 2)),
        ("nvfp4", "sm_100a", 2, 1, Launch(1, 1, 2, 1)),
        ("nvfp4", "sm_100a", 1, 2, Launch(2, 2, 1, 1)),
        # Groups and clusters of nothing but padding rows.
        ("bf16", "sm_90a", 2, 2, Launch(2, 2, 2, 0, 2)),
        ("bf16", "sm_90a", 2, 2, Launch(2, 2, 2, 0)),
    ],
)
def test_device_code_computes_the_reference(
    dtype: str, arch: str, requests: int, tokens: int, launch: Launch, shared: Shared
) -> None:
    m_tiles = -(-launch.group_rows * 12 // 16)
    ptx = shared.compiled(plan_of(dtype, m_tiles, arch)).ptx
    checks = cases.checks(PROBLEM, requests, tokens, launch.splits, dtype, "cpu")
    for number, case in enumerate(checks):
        case.refill(number + 1)
        expected = case.expect()
        _run(ptx, dtype, case, launch)
        for found in case.compare(expected):
            assert found.error <= found.bound, (case.name, found)


@pytest.mark.parametrize(
    ("dtype", "tokens", "launch"),
    [
        pytest.param("bf16", 3, Launch(1, 1, 1, 3), id="whole units"),
        pytest.param("fp8_e4m3", 3, Launch(1, 1, 2, 0), id="splits merged in memory"),
        pytest.param("nvfp4", 3, Launch(1, 1, 2, 0, 2), id="splits merged in a cluster"),
        pytest.param("nvfp4", 4, Launch(4, 4, 1, 1), id="a group, whole"),
        pytest.param("bf16", 4, Launch(4, 4, 2, 0), id="a group's splits merged in memory"),
        pytest.param("fp8_e4m3", 4, Launch(4, 4, 2, 0, 2), id="a group's in a cluster"),
    ],
)
@pytest.mark.parametrize("empty", ["no entries", "of no request"])
def test_a_row_without_entries_is_zeros_whatever_its_gate_holds(
    dtype: str, tokens: int, launch: Launch, empty: str, shared: Shared
) -> None:
    """Nobody writes the gates and queries of padding rows."""
    ptx = shared.compiled(plan_of(dtype, -(-launch.group_rows * 12 // 16))).ptx
    options = {"context": 150, "gated": True}
    case = cases.GqaCase(empty, PROBLEM, 1, tokens, launch.splits, dtype, "cpu", **options)
    inputs = case.inputs
    if empty == "no entries":
        inputs.selected_tokens[1] = -1
    else:
        inputs.request_indices[1] = -1
    inputs.q[1] = torch.nan
    assert inputs.output_gate is not None
    inputs.output_gate[1, ::2], inputs.output_gate[1, 1::2] = torch.nan, torch.inf
    expected = case.expect()
    assert expected.out[1].eq(0).all() and cases.expected(inputs)[1].eq(0).all()
    _run(ptx, dtype, case, launch)
    assert case.out[1].view(torch.int16).eq(0).all()
    for found in case.compare(expected):
        assert found.error <= found.bound, found


@pytest.mark.parametrize(("dtype", "q", "k"), [("bf16", 1.3e4, 1.7e4), ("fp8_e4m3", 1.3e9, 1.0)])
def test_scores_without_digits_after_the_point(
    dtype: str, q: float, k: float, shared: Shared
) -> None:
    """A row's maximum weighs 1 even where its rounding is worth many powers of two."""
    ptx = shared.compiled(plan_of(dtype, 1)).ptx
    case = next(cases.checks(PROBLEM, 2, 1, 2, dtype, "cpu"))
    case.inputs.q.mul_(q)
    if dtype == "bf16":
        case.inputs.k_cache.mul_(k)
    expected = case.expect()
    _run(ptx, dtype, case, Launch(1, 1, 2, 0))
    for found in case.compare(expected):
        assert found.error <= found.bound, found


def test_a_union_over_more_positions_than_one_turn_counts(shared: Shared) -> None:
    """Bitmaps of more than 65,536 positions, and a table that stays in global memory."""
    ptx = shared.compiled(plan_of("bf16", 3)).ptx
    case = cases.GqaCase("long", PROBLEM, 1, 4, 2, "bf16", "cpu", context=72_000, overlap=0.5)
    case.refill(3)
    assert int(case.inputs.selected_tokens.amax()) > 65_536
    assert case.inputs.block_table.shape[1] > 1024
    expected = case.expect()
    _run(ptx, "bf16", case, Launch(4, 4, 2, 0))
    for found in case.compare(expected):
        assert found.error <= found.bound, found


@pytest.mark.parametrize("launch", [Launch(4, 4, 1, 1), Launch(4, 2, 3, 0)])
def test_groups_of_few_heads_fill_one_tile(launch: Launch, shared: Shared) -> None:
    """The form of lone rows, which looks for a union where one is asked for."""
    ptx = shared.compiled(plan_of("bf16", 1)).ptx
    problem = {**PROBLEM, "q_heads": 3}
    for case in cases.checks(problem, 1, 4, launch.splits, "bf16", "cpu"):
        case.refill(5)
        expected = case.expect()
        _run(ptx, "bf16", case, launch)
        for found in case.compare(expected):
            assert found.error <= found.bound, (case.name, found)


@pytest.mark.parametrize("launch", [Launch(2, 2, 2, 0, 2), Launch(2, 2, 2, 0)])
def test_a_block_that_a_row_lists_twice_counts_twice(launch: Launch, shared: Shared) -> None:
    """What the union would count once: all rows are done alone from the start."""
    ptx = shared.compiled(plan_of("bf16", 2)).ptx
    case = next(cases.checks(PROBLEM, 1, 2, 2, "bf16", "cpu"))
    lists = case.inputs.selected_tokens
    assert (lists[1, 4:8] - lists[1, 4]).tolist() == [0, 1, 2, 3]
    lists[1, 8:12] = lists[1, 4:8].clone()
    wanted = cases.expected(case.inputs)
    _run(ptx, "bf16", case, launch)
    difference = case.out.float() - wanted.float()
    assert difference.norm() < cases.RELATIVE_L2 * wanted.float().norm()


def test_a_union_that_fails_in_one_split_is_done_again_in_all(shared: Shared) -> None:
    """A token listed twice, which one CTA of the cluster alone meets."""
    ptx = shared.compiled(plan_of("bf16", 2)).ptx
    case = next(cases.checks(PROBLEM, 1, 2, 1, "bf16", "cpu"))
    inputs = case.inputs
    lists = inputs.selected_tokens
    assert all(len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in lists)
    inputs.selected_tokens[0, 1] = lists[0, 0]
    wanted = cases.expected(inputs)
    _run(ptx, "bf16", case, Launch(2, 2, 2, 0, 2))
    difference = case.out.float() - wanted.float()
    assert difference.norm() < cases.RELATIVE_L2 * wanted.float().norm()


@pytest.mark.parametrize("launch", [Launch(4, 4, 1, 1), Launch(4, 4, 2, 0, 2)])
def test_nan_in_v_reaches_the_rows_that_list_it_and_no_others(
    launch: Launch, shared: Shared
) -> None:
    ptx = shared.compiled(plan_of("bf16", 3)).ptx
    case = next(cases.checks(PROBLEM, 1, 4, 1, "bf16", "cpu"))
    inputs = case.inputs
    lists = [set(row.tolist()) for row in inputs.selected_tokens]
    token = min(t for t in lists[0] - lists[1] if t >= 0)
    page = inputs.block_table[0, token // PROBLEM["page_size"]]
    inputs.v_cache[page, :, token % PROBLEM["page_size"]] = torch.nan
    wanted = cases.expected(inputs)
    _run(ptx, "bf16", case, launch)
    listing = torch.tensor([token in chosen for chosen in lists])
    assert case.out[listing].isnan().all() and wanted[listing].isnan().all()
    difference = case.out[~listing].float() - wanted[~listing].float()
    assert difference.norm() < cases.RELATIVE_L2 * wanted[~listing].float().norm()

"""The strict reference against hand examples, dense attention, and inputs that must not be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specplan.kernels.sparse_gqa_verify import cases
from specplan.kernels.sparse_gqa_verify.reference import (
    VScaleOrder,
    attention,
    deinterleave,
    gate,
    interleave,
    select_tokens,
)
from specplan.plans.catalog import load as load_catalog
from specplan.plans.sparse_gqa_verify import Launch, workspace_words

SMALL = {"q_heads": 6, "kv_heads": 2, "head_dim": 256, "page_size": 8, "selected": 67}


@pytest.mark.parametrize(
    ("position", "groups", "wanted"),
    [
        (9, [1, 0], [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, -1]),
        (5, [0, -1], [0, 1, 2, 3, 4, 5, -1, -1, -1, -1, -1]),
        (13, [2, 1], [8, 9, 10, 11, 4, 5, 6, 7, 12, 13, -1]),
    ],
)
def test_selection_examples(position: int, groups: list[int], wanted: list[int]) -> None:
    assert select_tokens(position, groups, position + 1, ratio=4, budget=8) == wanted


def _dense(inputs: cases.Inputs, positions: torch.Tensor) -> torch.Tensor:
    """Each row over all tokens up to its position, through torch's own attention in float64."""
    rows, heads, _ = inputs.q.shape
    outs = []
    for row in range(rows):
        table = inputs.block_table[int(inputs.request_indices[row])].long()
        length = int(positions[row]) + 1
        k, v = (
            cache[table].double().permute(1, 0, 2, 3).flatten(1, 2)[:, :length]
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        q = inputs.q[row].double()[:, None]
        group = heads // k.shape[0]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        )
        outs.append(out[:, 0])
    return torch.stack(outs)


def test_equals_dense_attention_while_everything_is_selected() -> None:
    inputs = cases.make_inputs(SMALL, 2, 3, "bf16", "cpu", context=60, gated=False)
    assert inputs.query_positions is not None
    exact = attention(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.selected_tokens,
        inputs.request_indices,
        softmax_scale=inputs.softmax_scale,
        dtype=torch.float64,
    ).exact
    dense = _dense(inputs, inputs.query_positions)
    # float64 on both sides: what is left is the order of the sums.
    torch.testing.assert_close(exact, dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("nhd", [False, True])
def test_poison_is_not_read(dtype: str, nhd: bool) -> None:
    inputs = cases.make_inputs(SMALL, 2, 2, dtype, "cpu", context=200, nhd=nhd)
    clean = cases.make_inputs(SMALL, 2, 2, dtype, "cpu", context=200, nhd=nhd, poison=False)
    wanted = cases.expected(clean)
    assert torch.isfinite(wanted).all()
    assert torch.equal(cases.expected(inputs), wanted)


def test_v_scale_orders_differ_in_bytes_and_agree_in_values() -> None:
    linear = cases.make_inputs(SMALL, 2, 2, "nvfp4", "cpu", context=200)
    mixed = cases.make_inputs(
        SMALL, 2, 2, "nvfp4", "cpu", context=200, order=VScaleOrder.INTERLEAVED
    )
    assert linear.v_block_scales is not None and mixed.v_block_scales is not None
    assert not torch.equal(
        linear.v_block_scales.view(torch.uint8), mixed.v_block_scales.view(torch.uint8)
    )
    assert torch.equal(cases.expected(linear), cases.expected(mixed))


def test_interleave_is_the_published_byte_map() -> None:
    tokens, blocks = 8, 16
    linear = torch.arange(tokens * blocks).view(tokens, blocks)
    flat = interleave(linear).flatten()
    for t in range(tokens):
        for s in range(blocks):
            assert flat[(t // 4) * 4 * blocks + 4 * s + t % 4] == linear[t, s]
            row, column = t // 4 * 4 + s // (blocks // 4), (s % (blocks // 4)) * 4 + t % 4
            assert interleave(linear)[row, column] == linear[t, s]
    assert torch.equal(deinterleave(interleave(linear)), linear)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_select_nothing_are_zero(poison: float) -> None:
    inputs = cases.make_inputs(SMALL, 2, 3, "bf16", "cpu", context=200)
    lists, owner = inputs.selected_tokens.clone(), inputs.request_indices.clone()
    table = inputs.block_table.clone()
    lists[0] = -1
    owner[1] = -1
    owner[2] = table.shape[0]
    table[1, :] = -1
    lists[5] = table.shape[1] * SMALL["page_size"]  # one past the last position
    result = attention(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        table,
        lists,
        owner,
        softmax_scale=1.0,
        output_gate=torch.full_like(inputs.q, poison),
    )
    assert torch.equal(result.lse, torch.full_like(result.lse, -torch.inf))
    assert (result.out == 0).all()


def test_duplicates_count_and_order_does_not() -> None:
    inputs = cases.make_inputs(SMALL, 1, 1, "bf16", "cpu", context=200, gated=False)
    chosen = inputs.selected_tokens[:, :3].clone()

    def run(lists: torch.Tensor) -> torch.Tensor:
        return attention(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.block_table,
            lists,
            inputs.request_indices,
            softmax_scale=0.0625,
            dtype=torch.float64,
        ).exact

    torch.testing.assert_close(run(chosen), run(chosen.flip(1)), rtol=1e-12, atol=1e-12)
    twice = torch.cat((chosen, chosen[:, :1]), 1)
    assert (run(twice) - run(chosen)).abs().max() > 1e-3
    torch.testing.assert_close(
        run(twice), run(torch.cat((chosen, chosen), 1)[:, [0, 3, 1, 2]]), rtol=1e-12, atol=1e-12
    )


def test_limits_by_count_and_position() -> None:
    inputs = cases.make_inputs(SMALL, 1, 1, "bf16", "cpu", context=200, gated=False)

    def run(lists: torch.Tensor, **limits: torch.Tensor) -> torch.Tensor:
        return attention(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.block_table,
            lists,
            inputs.request_indices,
            softmax_scale=0.0625,
            **limits,  # type: ignore[arg-type]
        ).out

    lists = inputs.selected_tokens
    assert torch.equal(run(lists, valid_count=torch.tensor([7])), run(lists[:, :7]))
    middle = int(lists[0].sort().values[30])
    kept = lists[:, lists[0] <= middle]
    torch.testing.assert_close(run(lists, query_positions=torch.tensor([middle])), run(kept))


def test_gate_rounds_twice() -> None:
    inputs = cases.make_inputs(SMALL, 2, 2, "bf16", "cpu", context=200)
    assert inputs.output_gate is not None
    plain = cases.expected(replace(inputs, output_gate=None))
    assert torch.equal(cases.expected(inputs), gate(plain, inputs.output_gate))
    exact = attention(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.selected_tokens,
        inputs.request_indices,
        softmax_scale=inputs.softmax_scale,
    ).exact
    once = (exact * torch.sigmoid(inputs.output_gate.float())).to(torch.bfloat16)
    assert not torch.equal(once, cases.expected(inputs))


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "nvfp4"])
def test_cases_see_what_they_look_for(dtype: str) -> None:
    for case in cases.checks(SMALL, 3, 2, 2, dtype, "cpu"):
        case.refill(7)
        expected = case.expect()
        assert torch.isfinite(expected.out).all()
        # Dead, empty and beyond the requests; a request of two padding rows.
        empty = (expected.out == 0).flatten(1).all(1)
        assert empty.sum() == (3 if case.name == "hard" else 2)
        for unwritten in (case.inputs.q, case.inputs.output_gate):
            if unwritten is not None:
                finite = torch.isfinite(unwritten).flatten(1)
                assert not finite[empty].any() and finite[~empty].all()
        assert not any(c.error <= c.bound for c in case.compare(expected) if "error" in c.measure)

        def failed(case: cases.GqaCase = case, expected: cases.Expected = expected) -> set[str]:
            return {c.measure for c in case.compare(expected) if not c.error <= c.bound}

        case.out.copy_(expected.out)
        assert failed() == set()
        case.buffer[0, 0, 0] = 0
        case.space[-1] = 0
        assert failed() == {"elements written"}
        before = case.snapshot()
        case.inputs.q[0, 0, 0] += 1
        case.out[0] += 1
        assert {"bytes that differ", "largest error", "relative L2 error"} <= failed()
        assert case.identical(before) > 0
        case.restore(before)
        assert case.identical(before) == 0 and failed() == {"elements written"}
        case.out[empty] = torch.nan  # what a gate of NaN makes of a row of zeros
        assert "rows that should be 0 and are not" in failed()


def test_a_gate_in_every_other_cell_of_hard_cases() -> None:
    """Gated and not, rows without entries are in the cases of lone rows and of groups."""
    for tokens in (1, 4):
        hard = [list(cases.checks(SMALL, n, tokens, 1, "bf16", "cpu"))[1] for n in (4, 6)]
        assert {case.inputs.output_gate is None for case in hard} == {True, False}


def test_lists_overlap_as_asked() -> None:
    generator = torch.Generator().manual_seed(1)
    lists, positions = cases.random_lists(1, 4, 8190, 2051, 0.9, generator, "cpu")
    sets = [set(row.tolist()) - {-1} for row in lists]
    assert 0.86 < len(sets[0] & sets[3]) / len(sets[0]) < 0.94
    for row, position in zip(sets, positions.tolist(), strict=True):
        tail = set(range((position + 1) // 4 * 4, position + 1))
        assert len(row) == 2048 + len(tail) and tail <= row and max(row) <= position


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "nvfp4"])
def test_by_request_equals_the_reference(dtype: str) -> None:
    """The certification's formulation over whole contexts against the one over gathered lists."""
    for requests, tokens in ((1, 1), (5, 1), (2, 4), (6, 3), (40, 1)):
        for case in cases.checks(SMALL, requests, tokens, 1, dtype, "cpu"):
            case.refill(requests)
            wanted = cases.expected(case.inputs).float()
            found = cases.by_request(case.inputs, tokens).float()
            # Both round to bf16: a sum in another order moves a few of them by one step, which is
            # 3.9e-3 for values from 0.5 to 1, of outputs whose norm is 18 and more.
            assert (found - wanted).norm() < 4e-4 * wanted.norm()
            empty = (wanted == 0).flatten(1).all(1)
            assert torch.equal(empty, (found == 0).flatten(1).all(1))


def test_large_cells_share_a_graph_with_few() -> None:
    """What certification holds at a time is bounded, however many rows and heads a cell has."""
    geometry = {**SMALL, "q_heads": 24}
    shared = [cases.cells_a_graph(geometry, n, 8, "bf16") for n in (1, 32, 64, 128, 256)]
    assert shared == [8, 8, 4, 2, 1]
    assert cases.cells_a_graph({**geometry, "q_heads": 64}, 256, 8, "bf16") == 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_every_cell_has_room_for_its_partial_sums(arch: str) -> None:
    """Else certification would find the call declined."""
    catalog = load_catalog()
    problems = catalog.problems["sparse_gqa_verify"]
    split = 0
    for cell in catalog.cells(arch, "sparse_gqa_verify"):
        problem, sizes = problems[cell.problem], (cell.requests, cell.tokens)
        for plan in catalog.plans_of(cell):
            launch = Launch(**dict(plan.launch))
            words = workspace_words(
                problem,
                *sizes,
                launch.group_rows,
                launch.splits,
                launch.whole_units,
                launch.cluster,
            )
            assert words <= cases.room(problem, *sizes, launch.splits), cell
            split += words > 0
    assert split > 1000

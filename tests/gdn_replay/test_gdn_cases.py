"""The certification inputs: what they cover, that the reference passes, and that their checks can
fail.
"""

from __future__ import annotations

import math

import pytest
import torch
from specplan.kernels.gdn_replay import cases, reference
from specplan.kernels.gdn_replay.cases import GdnCase

GEOMETRY = {"key_heads": 1, "value_heads": 2}
CELLS = [(1, 1), (3, 4), (9, 8), (6, 1)]
OPS = ("verify", "advance", "materialize", "reset")


def every(requests: int, tokens: int, dtype: str = "bf16") -> list[GdnCase]:
    return list(cases.checks(GEOMETRY, requests, tokens, 1, dtype, "cpu"))


def worst(case: GdnCase, expected: cases.Expected) -> float:
    """The worst error over its bound: 0 where all is as expected, above 1 where a check fails."""
    shares = []
    for comparison in case.compare(expected):
        error = float(comparison.error)
        passes = error <= comparison.bound
        shares.append(error if comparison.bound else (0.0 if passes else math.inf))
        if math.isnan(error):
            shares.append(math.inf)
    return max(shares)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("requests", "tokens"), CELLS)
def test_the_reference_passes_and_doing_nothing_fails(
    requests: int, tokens: int, dtype: str
) -> None:
    seen = set()
    for case in every(requests, tokens, dtype):
        seen.add(case.op)
        for seed in (4, 5):
            case.refill(seed)
            expected = case.expect()
            if requests > 1 and case.op != "materialize":
                assert not worst(case, expected) <= 1.0, (case.op, case.name)
            before = case.snapshot()
            cases.run_reference(case.op, case.step, tokens)
            assert worst(case, expected) == 0.0, (case.op, case.name)
            assert int(case.identical(case.snapshot())) == 0
            case.restore(before)
            assert int(case.identical(before)) == 0
    assert seen == set(OPS)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_matrix_form_with_the_kernels_roundings_stays_within_the_bounds(dtype: str) -> None:
    """The device code's arithmetic without the device: the bounds are not exceeded, nor empty.
    Eight heads, so that one decays strongly.
    """
    geometry = {"key_heads": 2, "value_heads": 8}
    for case in cases.checks(geometry, 9, 4, 1, dtype, "cpu"):
        if case.op != "verify":
            continue
        for seed in (11, 12):
            case.refill(seed)
            expected = case.expect()
            reference.verify_wy(**case.step.tensors)
            shares = {c.buffer: float(c.error) for c in case.compare(expected) if c.bound}
            assert set(shares) == {"out", *cases.POOLS}
            assert 0.0 < max(shares.values()) <= 1.0, shares
            assert all(c.bound or float(c.error) == 0 for c in case.compare(expected))


def test_the_matrix_form_of_a_materialize_that_does_nothing_is_found() -> None:
    case = next(c for c in every(6, 1) if c.op == "materialize")
    case.refill(2)
    assert not worst(case, case.expect()) <= 1.0


def test_a_step_covers_commits_padding_and_every_length() -> None:
    step = cases.make_step(GEOMETRY, 33, 4, "bf16")
    hist_len, slot = step.tensors["hist_len"], step.tensors["slot"]
    assert set(hist_len.tolist()) == set(range(17))
    assert (slot < 0).sum() == 7
    live = slot[slot >= 0].long()
    assert live.unique().numel() == live.numel()
    assert (hist_len[live] + 4 > 16).any() and (hist_len[live] + 4 <= 16).any()


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_full_histories_commit(tokens: int) -> None:
    case = next(c for c in every(9, tokens) if c.op == "verify")
    case.refill(1)
    t = case.step.tensors
    assert torch.equal(case.pool.commits(t["slot"], tokens), t["slot"] >= 0)
    assert t["hist_len"].max() <= 16
    case.refill(2)
    assert not case.pool.commits(t["slot"], tokens).all()


def test_large_cells_share_a_graph_with_few() -> None:
    """Certification holds some GiB at a time: 256 requests of 64 heads are 1.1 GiB of states in
    fp32.
    """
    large, small = {"key_heads": 16, "value_heads": 64}, {"key_heads": 2, "value_heads": 8}
    assert cases.cells_a_graph(large, 256, 4, "fp32") == 1
    assert cases.cells_a_graph(small, 3, 4, "bf16") == 16
    case = GdnCase("x", "verify", small, 8, 4, 1, "fp32", "cpu")
    held = case.buffer.numel() * cases.cells_a_graph(small, 8, 4, "fp32")
    assert held < 1.5 * cases.GRAPH_BYTES


def test_refill_is_a_function_of_the_seed_and_poisons() -> None:
    for case in every(3, 2):
        case.refill(7)
        first = case.snapshot()
        case.refill(8)
        assert int(case.identical(first)) > 0
        case.refill(7)
        assert int(case.identical(first)) == 0
        if case.op == "verify":
            assert case.step.tensors["out"].isnan().all()
            assert case.step.tensors["rec_u"].isnan().any()


@pytest.mark.parametrize("op", OPS)
def test_inputs_of_padding_rows_are_poisoned(op: str) -> None:
    case = next(c for c in every(9, 3) if c.op == op)
    case.refill(1)
    t, integers = case.step.tensors, case.step.integers
    padding = t["slot"] < 0
    assert padding.any() and not padding.all()
    assert (integers["n_acc"][padding] < 0).all() and (integers["n_acc"][~padding] >= 0).all()
    if op == "verify":
        for name in ("q", "k", "v", "a", "b"):
            assert t[name][padding].isnan().all(), name
            assert not t[name][~padding].isnan().any(), name
    if op == "materialize":
        idle = (integers["src"] < 0) | (integers["dst"] < 0)
        assert idle.any() and (integers["count"][idle] < 0).all()
        assert (integers["count"][~idle] >= 0).all()


@pytest.mark.parametrize("value", [1e-7, -0.0, float("nan")])
def test_a_padding_row_that_is_not_exactly_zero_is_found(value: float) -> None:
    """Far within the bound of ``out``: an input of a padding row reached it, or nobody wrote it."""
    case = next(c for c in every(3, 2) if c.op == "verify")
    case.refill(1)
    expected = case.expect()
    cases.run_reference("verify", case.step, 2)
    assert worst(case, expected) == 0.0
    case.step.tensors["out"][2, 1, 0, 5] = value
    assert worst(case, expected) == math.inf


@pytest.mark.parametrize("op", OPS)
def test_every_stray_byte_is_seen(op: str) -> None:
    """One bit flipped in the guard before and behind every buffer, and in its last element where
    that is a guard or read only, shows.
    """
    case = next(c for c in every(4, 3) if c.op == op)
    case.refill(1)
    expected = case.expect()
    cases.run_reference(op, case.step, 3)
    good = case.snapshot()
    assert worst(case, expected) == 0.0
    names = list(case.step.backing)
    for name, (start, end) in zip(names, case.step.spans, strict=True):
        at = [start - 1, end] + ([] if name == "out" and op == "verify" else [end - 1])
        for place in at:
            case.restore(good)
            case.buffer[place] ^= 1
            assert worst(case, expected) == math.inf, (name, place - start)


def test_nan_and_a_wrong_value_in_what_is_written_are_found() -> None:
    case = next(c for c in every(4, 3) if c.op == "verify")
    case.refill(1)
    expected = case.expect()
    cases.run_reference("verify", case.step, 3)
    good = case.snapshot()
    for name, written in expected.written.items():
        place = tuple(int(i[0]) for i in written.nonzero(as_tuple=True))
        for value in (float("nan"), 9.0, float("inf")):
            case.restore(good)
            case.step.tensors[name][place] = value
            assert not worst(case, expected) <= 1.0, (name, value)


def test_a_wrong_head_map_is_found() -> None:
    case = GdnCase("x", "verify", {"key_heads": 2, "value_heads": 4}, 4, 3, 1, "bf16", "cpu")
    case.refill(0)
    expected = case.expect()
    t = case.step.tensors
    reference.verify(**(t | {"k": t["k"].flip(2), "q": t["q"].flip(2)}))
    assert worst(case, expected) > 10.0


def test_declined_calls_differ_from_a_good_one() -> None:
    seen = set()
    for what, arguments, _ in cases.declined(torch.device("cpu")):
        assert arguments["op"] in OPS
        seen.add(what)
    assert len(seen) > 60


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("requests", "tokens"), [(1, 4), (3, 1), (13, 8)])
def test_shared_rows_expect_what_the_reference_makes_of_the_call(
    requests: int, tokens: int, dtype: str
) -> None:
    """A row's result does not depend on its place, its slot or the other rows."""
    for seed in range(6):
        case = every(requests, tokens, dtype)[0]
        assert case.drawn_once
        case.refill(seed)
        expected = case.expect()
        own = case.step.clone()
        cases.run_reference("verify", own, tokens)
        for name, written in expected.written.items():
            a, b = (s.tensors[name] for s in (own, expected.step))
            error = cases._share(a, b, *cases.bound_of(name, dtype)[:2])
            # torch sums in another order where the batch is another.
            assert float(torch.where(written, error, 0.0).max()) < 0.2, name
        slot = case.step.tensors["slot"]
        live = slot[slot >= 0].tolist()
        assert len(set(live)) == len(live)
        rows = case.placed.rows[case.placed.live].tolist()
        assert case.placed.slots[slot[slot >= 0].long()].tolist() == rows
        commits = case.step.tensors["hist_len"][slot[slot >= 0].long()] + tokens > 16
        assert bool(commits.all()) or seed % 2 == 0


def test_shared_rows_are_other_rows_for_another_draw_and_the_same_for_the_same() -> None:
    case = every(9, 4)[0]
    found = {}
    for seed in (0, 1, 2, 3, 4):
        case.refill(seed)
        found[seed] = case.snapshot()
    case.refill(0)
    assert torch.equal(case.snapshot(), found[0])
    assert all(not torch.equal(found[0], found[seed]) for seed in (1, 2, 3, 4))


def test_every_element_that_an_op_writes_and_every_other_is_compared() -> None:
    """A change of any element beyond the bound fails, wherever it lies."""
    case = every(6, 4)[0]
    case.refill(1)
    expected = case.expect()
    cases.run_reference("verify", case.step, 4)
    assert worst(case, expected) <= 1
    chance = torch.Generator().manual_seed(5)
    for name, memory in case.step.backing.items():
        flat = memory.view(-1)
        for _ in range(12):
            at = int(torch.randint(0, flat.numel(), (), generator=chance))
            was = flat[at].clone()
            changed = 0.0 if memory.is_floating_point() and bool(was.isnan()) else was + 1
            flat[at] = changed
            assert worst(case, expected) > 1, (name, at)
            flat[at] = was
    for gap in case.gaps[:: max(1, len(case.gaps) // 20)]:
        case.buffer[gap] += 1
        assert worst(case, expected) > 1
        case.buffer[gap] -= 1
    assert worst(case, expected) <= 1

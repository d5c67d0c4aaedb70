"""The references against a hand-computed case, against each other, and against the contract's
properties.
"""

from __future__ import annotations

import math

import pytest
import torch
from specplan.kernels.gdn_replay import cases, reference
from torch import Tensor

WINDOW = cases.WINDOW
POOLS = ("state", "rec_u", "rec_k", "rec_G")


def small(
    heads: tuple[int, int],
    tokens: int,
    rows: int = 4,
    seed: int = 0,
    dim: int = 8,
    window: int = WINDOW,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """An unrounded step with a small head, one slot more than rows."""
    HK, HV = heads
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=dtype)

    slots = rows + 1
    return {
        "q": normal(rows, tokens, HK, dim),
        "k": normal(rows, tokens, HK, dim),
        "v": normal(rows, tokens, HV, dim),
        "a": normal(rows, tokens, HV),
        "b": normal(rows, tokens, HV),
        "A_log": torch.linspace(-3, 1, HV, dtype=dtype),
        "dt_bias": normal(HV),
        "state": 0.3 * normal(slots, HV, dim, dim),
        "rec_u": normal(slots, HV, 2, window, dim),
        "rec_k": reference.unit(normal(slots, HK, 2, window, dim), dtype),
        "rec_G": -torch.rand((slots, HV, 2, window), generator=gen, dtype=dtype).cumsum(-1),
        "hist_len": torch.randint(0, window + 1, (slots,), generator=gen, dtype=torch.int32),
        "bank": torch.randint(0, 2, (slots,), generator=gen, dtype=torch.int32),
        "slot": torch.randperm(slots, generator=gen)[:rows].to(torch.int32),
        "out": torch.full((rows, tokens, HV, dim), math.nan, dtype=dtype),
    }


def clone(step: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in step.items()}


def fresh_tokens(step: dict[str, Tensor], seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    for name in ("q", "k", "v", "a", "b"):
        shape = step[name].shape
        step[name] = torch.randn(shape, generator=gen, dtype=torch.float64).to(step[name].dtype)


def unrounded(step: dict[str, Tensor], form: str) -> None:
    if form == "sequential":
        reference.verify(**step, compute=torch.float64)
    else:
        reference.verify_wy(**step, compute=torch.float64, operand=torch.float64)


@pytest.mark.parametrize("form", ["sequential", "wy"])
def test_hand_computed_case(form: str) -> None:
    half = math.log(math.expm1(math.log(2)))  # softplus(half) = ln 2, so g = -ln 2 with A_log = 0
    wide = torch.float64
    step = {
        "q": torch.tensor([[[[1.0, 0]], [[0, 1]]]], dtype=wide),
        "k": torch.tensor([[[[1.0, 0]], [[3, 4]]]], dtype=wide),
        "v": torch.tensor([[[[2.0, 4]], [[1, 1]]]], dtype=wide),
        "a": torch.full((1, 2, 1), half, dtype=wide),
        "b": torch.tensor([[[60.0], [0.0]]], dtype=wide),
        "A_log": torch.zeros(1, dtype=wide),
        "dt_bias": torch.zeros(1, dtype=wide),
        "state": torch.zeros(1, 1, 2, 2, dtype=wide),
        "rec_u": torch.full((1, 1, 2, WINDOW, 2), math.nan, dtype=wide),
        "rec_k": torch.full((1, 1, 2, WINDOW, 2), math.nan, dtype=wide),
        "rec_G": torch.full((1, 1, 2, WINDOW), math.nan, dtype=wide),
        "hist_len": torch.zeros(1, dtype=torch.int32),
        "bank": torch.zeros(1, dtype=torch.int32),
        "slot": torch.zeros(1, dtype=torch.int32),
        "out": torch.full((1, 2, 1, 2), math.nan, dtype=wide),
        "scale": 1.0,
    }
    unrounded(step, form)

    def near(got: Tensor, want: list[object]) -> None:
        torch.testing.assert_close(got, torch.tensor(want, dtype=wide), atol=4e-6, rtol=0)

    near(step["out"][0, :, 0], [[2, 4], [0.16, -0.08]])
    near(step["rec_u"][0, 0, 0, :2], [[2, 4], [0.2, -0.1]])
    near(step["rec_k"][0, 0, 0, :2], [[1, 0], [0.6, 0.8]])
    near(step["rec_G"][0, 0, 0, :2], [-math.log(2), -2 * math.log(2)])
    assert step["rec_u"][0, 0, 0, 2:].isnan().all()
    assert step["rec_u"][0, 0, 1].isnan().all()
    assert (step["state"] == 0).all()

    step["hist_len"][0] = 2
    folded = torch.zeros(2, 1, 2, 2, dtype=wide)
    pools = [torch.cat((step[name], step[name])) for name in ("rec_u", "rec_k", "rec_G")]
    cursors = [torch.tensor([value], dtype=torch.int32) for value in (0, 1, 2)]
    reference.materialize(folded, *pools, torch.zeros(2, dtype=torch.int32), *cursors, compute=wide)
    near(folded[1, 0], [[1.12, 0.16], [1.94, -0.08]])


def brute_force(step: dict[str, Tensor], row: int, head: int) -> tuple[Tensor, Tensor]:
    """Outputs and folded state of one row and head, by scalar loops over the definition."""
    ratio = step["v"].shape[2] // step["k"].shape[2]
    slot = int(step["slot"][row])
    P, c = int(step["hist_len"][slot]), int(step["bank"][slot])
    G = step["rec_G"][slot, head, c]
    S = step["state"][slot, head].clone()
    if P:
        S *= math.exp(G[P - 1])
    for j in range(P):
        u, k = step["rec_u"][slot, head, c, j], step["rec_k"][slot, head // ratio, c, j]
        S += math.exp(G[P - 1] - G[j]) * torch.outer(u, k)
    folded, outs = S.clone(), []
    for t in range(step["q"].shape[1]):
        x = float(step["a"][row, t, head] + step["dt_bias"][head])
        g = -math.exp(step["A_log"][head]) * math.log1p(math.exp(x))
        beta = 1 / (1 + math.exp(-step["b"][row, t, head]))
        k = step["k"][row, t, head // ratio]
        k = k / math.sqrt(float(k @ k) + 1e-6)
        q = step["q"][row, t, head // ratio]
        q = q / math.sqrt(float(q @ q) + 1e-6) * q.shape[0] ** -0.5
        S *= math.exp(g)
        S += torch.outer(beta * (step["v"][row, t, head] - S @ k), k)
        outs.append(S @ q)
    return torch.stack(outs), folded


@pytest.mark.parametrize("form", ["sequential", "wy"])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
def test_both_forms_equal_scalar_loops(form: str, ratio: int, tokens: int) -> None:
    step = small((2, 2 * ratio), tokens, rows=5, seed=tokens * 7 + ratio)
    step["hist_len"][:] = torch.tensor([0, 3, WINDOW - tokens, WINDOW - tokens + 1, WINDOW, 9])
    before = clone(step)
    unrounded(step, form)
    for row in range(5):
        slot = int(before["slot"][row])
        commits = int(before["hist_len"][slot]) + tokens > WINDOW
        for head in range(2 * ratio):
            want, folded = brute_force(before, row, head)
            torch.testing.assert_close(step["out"][row, :, head], want, atol=1e-12, rtol=1e-12)
            kept = folded if commits else before["state"][slot, head]
            torch.testing.assert_close(step["state"][slot, head], kept, atol=1e-12, rtol=1e-12)


def test_float32_forms_agree() -> None:
    step = {n: t.float() if t.is_floating_point() else t for n, t in small((2, 4), 8).items()}
    other = clone(step)
    reference.verify(**step)
    reference.verify_wy(**other, operand=torch.float32)
    for name in ("out", *POOLS):
        torch.testing.assert_close(other[name], step[name], atol=2e-6, rtol=0, equal_nan=True)


def run_steps(step: dict[str, Tensor], form: str, rounds: int, seed: int, oracle: bool) -> None:
    """Closed loop with random acceptance, compared step by step with the plain recurrence over the
    accepted tokens.
    """
    tokens = step["q"].shape[1]
    gen = torch.Generator().manual_seed(seed)
    true = step["state"].clone()
    step["hist_len"].zero_()
    for n in range(rounds):
        fresh_tokens(step, seed * 1000 + n)
        step["slot"] = torch.randperm(step["state"].shape[0] - 1, generator=gen).to(torch.int32)
        step["out"].fill_(math.nan)
        unrounded(step, form)
        n_acc = torch.randint(0, tokens + 1, step["slot"].shape, generator=gen)
        if oracle:
            plain = {name: step[name] for name in step if name not in (*POOLS, "out")}
            plain |= {
                "state": true,
                "hist_len": torch.zeros_like(step["hist_len"]),
                "rec_u": torch.zeros_like(step["rec_u"]),
                "rec_k": torch.zeros_like(step["rec_k"]),
                "rec_G": torch.zeros_like(step["rec_G"]),
                "out": torch.empty_like(step["out"]),
            }
            reference.verify(**plain, compute=torch.float64)
            torch.testing.assert_close(step["out"], plain["out"], atol=1e-10, rtol=1e-10)
            at = step["slot"].long()
            true_next = true.clone()
            reference.materialize(
                true_next,
                plain["rec_u"],
                plain["rec_k"],
                plain["rec_G"],
                plain["bank"],
                step["slot"],
                step["slot"],
                n_acc,
                compute=torch.float64,
            )
            true[at] = true_next[at]
        reference.advance(step["hist_len"], step["bank"], step["slot"], n_acc, tokens)


@pytest.mark.parametrize(
    "ratio,tokens", [(1, 1), (2, 4), (3, 3), (4, 8), (2, 7), (1, 6), (4, 2), (2, 5)]
)
@pytest.mark.parametrize("form", ["sequential", "wy"])
def test_p1_closed_loop_equals_the_recurrence(form: str, ratio: int, tokens: int) -> None:
    step = small((2, 2 * ratio), tokens, rows=3, seed=ratio)
    spare = step["state"].shape[0] - 1
    untouched = {name: step[name][spare].clone() for name in POOLS}
    run_steps(step, form, rounds=24, seed=ratio, oracle=True)
    for name in POOLS:
        assert torch.equal(step[name][spare], untouched[name])


@pytest.mark.parametrize("form", ["sequential", "wy"])
def test_p2_live_rows_and_uncommitted_checkpoints_stay(form: str) -> None:
    step = small((2, 4), 4, rows=6, seed=3)
    step["hist_len"][:] = torch.tensor([0, 12, 13, 16, 5, 14, 1])
    before = clone(step)
    unrounded(step, form)
    committed = 0
    for slot in step["slot"].tolist():
        P, c = int(before["hist_len"][slot]), int(before["bank"][slot])
        for name in ("rec_u", "rec_k", "rec_G"):
            assert torch.equal(step[name][slot, :, c, :P], before[name][slot, :, c, :P])
        same = torch.equal(step["state"][slot], before["state"][slot])
        assert same == (P + 4 <= WINDOW)
        committed += not same
    assert committed >= 2


@pytest.mark.parametrize("form", ["sequential", "wy"])
def test_p3_what_was_rejected_does_not_matter(form: str) -> None:
    step = small((2, 4), 4, rows=4, seed=4)
    unrounded(step, form)
    n_acc = torch.tensor([0, 1, 3, 4])
    reference.advance(step["hist_len"], step["bank"], step["slot"], n_acc, 4)
    fresh_tokens(step, 5)
    clean = clone(step)
    for slot in range(5):
        P, c = int(step["hist_len"][slot]), int(step["bank"][slot])
        for name in ("rec_u", "rec_k", "rec_G"):
            step[name][slot, :, c, P:] = math.nan
            step[name][slot, :, 1 - c] = math.nan
    unrounded(step, form)
    unrounded(clean, form)
    assert torch.equal(step["out"], clean["out"])
    assert torch.equal(step["state"], clean["state"])
    assert not step["out"].isnan().any()


@pytest.mark.parametrize("form", ["sequential", "wy"])
def test_p4_rows_do_not_depend_on_slot_or_order(form: str) -> None:
    step = small((2, 4), 3, rows=5, seed=6)
    other = clone(step)
    perm = torch.tensor([3, 0, 4, 1, 2])
    renumber = torch.tensor([5, 2, 0, 4, 1, 3])  # slot s of step is slot renumber[s] of other
    for name in ("q", "k", "v", "a", "b"):
        other[name] = step[name][perm]
    for name in (*POOLS, "hist_len", "bank"):
        other[name][renumber] = step[name]
    other["slot"] = renumber[step["slot"][perm].long()].to(torch.int32)
    unrounded(step, form)
    unrounded(other, form)
    # torch's vectorised exp on a CPU differs by an ulp between a vector's body and its tail
    torch.testing.assert_close(other["out"], step["out"][perm], atol=1e-14, rtol=1e-13)
    for name in POOLS:
        torch.testing.assert_close(other[name][renumber], step[name], atol=1e-14, rtol=1e-13)


def test_p6_commit_equals_a_wider_window() -> None:
    """Committing and replaying the new history equals never committing, in a window of twice the
    rows.
    """
    tokens = 4
    step = small((2, 4), tokens, rows=3, seed=8)
    wide = clone(step)
    for name in ("rec_u", "rec_k", "rec_G"):
        dim = 3
        wide[name] = torch.cat((step[name], torch.full_like(step[name], math.nan)), dim=dim)
    step["hist_len"][:] = wide["hist_len"][:] = torch.tensor([13, 16, 14, 15])
    n_acc = torch.tensor([2, 4, 1])
    for round_seed in (11, 12):
        fresh_tokens(step, round_seed)
        fresh_tokens(wide, round_seed)
        unrounded(step, "wy")
        unrounded(wide, "wy")
        torch.testing.assert_close(step["out"], wide["out"], atol=1e-12, rtol=1e-10)
        reference.advance(step["hist_len"], step["bank"], step["slot"], n_acc, tokens)
        reference.advance(wide["hist_len"], wide["bank"], wide["slot"], n_acc, tokens, 2 * WINDOW)
    assert (step["hist_len"] < WINDOW).any() and (wide["hist_len"] > WINDOW).any()


@pytest.mark.parametrize("form", ["sequential", "wy"])
def test_padding_writes_zeros_and_nothing_else(form: str) -> None:
    step = small((2, 4), 4, rows=4, seed=9)
    step["slot"][1] = step["slot"][3] = -1
    before = clone(step)
    unrounded(step, form)
    assert (step["out"][[1, 3]] == 0).all()
    assert not step["out"].isnan().any()
    idle = [s for s in range(5) if s not in step["slot"].tolist()]
    for name in POOLS:
        assert torch.equal(step[name][idle], before[name][idle])


@pytest.mark.parametrize("form", ["sequential", "wy"])
def test_strong_decay_stays_finite(form: str) -> None:
    step = {n: t.float() if t.is_floating_point() else t for n, t in small((1, 2), 8).items()}
    step["A_log"].fill_(4.0)
    step["dt_bias"].fill_(3.0)
    other = clone(step)
    reference.verify(**step)
    reference.verify_wy(**other, operand=torch.float32)
    assert step["rec_G"].min() < -1000
    assert step["out"].isfinite().all() and step["state"].isfinite().all()
    torch.testing.assert_close(other["out"], step["out"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_exact_matrix_form_is_the_definition(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to float64's rounding, for any number of rows at a time; in certification's dtypes, to
    float32's before the last rounding.
    """
    geometry = {"key_heads": 2, "value_heads": 8}
    step = cases.make_step(geometry, 9, 5, "fp32", seed=7)
    monkeypatch.setattr(reference, "CHUNK", rows * 8 * 128 * 128 * 8)
    want = {name: t.double() if t.is_floating_point() else t for name, t in step.tensors.items()}
    got = {name: t.clone() for name, t in want.items()}
    reference.verify(**want, compute=torch.float64)
    reference.verify_exact(**got, compute=torch.float64)
    for name in ("out", "state", "rec_u", "rec_k", "rec_G"):
        torch.testing.assert_close(got[name], want[name], atol=1e-12, rtol=1e-12, equal_nan=True)
    other = step.clone()
    reference.verify(**step.tensors)
    reference.verify_exact(**other.tensors)
    for name in ("out", "state", "rec_u", "rec_k", "rec_G"):
        a, b = step.tensors[name].float(), other.tensors[name].float()
        exact = step.tensors[name].dtype == torch.float32
        rtol = 1e-5 if exact else 2.0**-7
        torch.testing.assert_close(b, a, atol=1e-6, rtol=rtol, equal_nan=True)


def test_gates_do_not_overflow() -> None:
    a = torch.tensor([-200.0, 0.0, 19.9, 20.1, 200.0])
    g, beta = reference.gates(a, a, torch.zeros(5), torch.zeros(5), torch.float32)
    assert g.isfinite().all() and (g <= 0).all()
    torch.testing.assert_close(g[2:], -a[2:], atol=1e-6, rtol=1e-6)
    assert beta[2] > 0.99 and beta[0] < 1e-30


def test_norm_has_eps_inside_the_root() -> None:
    x = torch.zeros(4)
    x[0] = 0.012
    assert float(reference.unit(x, torch.float64).norm()) == pytest.approx(0.9965, abs=1e-4)
    x[0] = 0.0012
    assert float(reference.unit(x, torch.float64).norm()) == pytest.approx(0.7682, abs=1e-3)


@pytest.mark.parametrize("state", ["bf16", "fp32"])
def test_wy_with_the_kernels_roundings_is_close_to_the_definition(state: str) -> None:
    """Bound: bf16 unit keys and queries are 2^-9 off in each of 128 terms; about 4 times what was
    seen (out 3e-3).
    """
    step = cases.make_step({"key_heads": 2, "value_heads": 6}, 10, 5, state, seed=2)
    other = step.clone()
    reference.verify(**step.tensors)
    reference.verify_wy(**other.tensors)
    live = step.tensors["slot"] >= 0
    torch.testing.assert_close(
        other.tensors["out"][live], step.tensors["out"][live], atol=4e-3, rtol=1.6e-2
    )
    for name in POOLS:
        torch.testing.assert_close(
            other.tensors[name], step.tensors[name], atol=3e-2, rtol=1.6e-2, equal_nan=True
        )


def test_advance_uses_the_commit_predicate_and_replaces_on_zero() -> None:
    hist_len = torch.tensor([12, 13, 13, 16, 0], dtype=torch.int32)
    bank = torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32)
    slot = torch.tensor([3, -1, 0, 1, 2], dtype=torch.int32)
    reference.advance(hist_len, bank, slot, torch.tensor([1, 9, 4, 0, 3]), 4)
    assert hist_len.tolist() == [16, 0, 3, 1, 0]
    assert bank.tolist() == [0, 1, 0, 0, 0]


def test_reset_leaves_other_slots() -> None:
    hist_len = torch.tensor([12, 13, 5], dtype=torch.int32)
    bank = torch.tensor([1, 1, 1], dtype=torch.int32)
    reference.reset(hist_len, bank, torch.tensor([2, -1], dtype=torch.int32))
    assert hist_len.tolist() == [12, 13, 0] and bank.tolist() == [1, 1, 0]

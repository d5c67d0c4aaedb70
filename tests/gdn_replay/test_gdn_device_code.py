"""The compiled device code against the references, its PTX run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from specplan.kernels.gdn_replay import cases, reference  # noqa: E402
from specplan.plans.manifest import PlanRecord  # noqa: E402

import reference_pack  # noqa: E402
from support.shared import Shared  # noqa: E402
from support.simulated import SimulatedFunctions  # noqa: E402

SCALE = cases.HEAD**-0.5
POOLS = ("out", "state", "rec_u", "rec_k", "rec_G")
#: state, tokens, rows a warp, grouped
SINGLE = ("bf16", 4, 32, False)
GROUPED = ("bf16", 4, 32, True)
#: A shape, value heads of the key head, and CTAs: shares of 3 x heads that split key heads and rows
#: of the batch in every way.
SHAPES = [
    (SINGLE, 2, 3),
    (GROUPED, 1, 1),
    (GROUPED, 2, 1),
    (GROUPED, 2, 4),
    (("bf16", 8, 32, True), 3, 2),
    (("bf16", 4, 32, True), 4, 3),
    (("fp32", 8, 16, True), 2, 4),
    (("bf16", 8, 16, False), 1, 3),
    (("fp32", 8, 16, False), 2, 3),
    (("bf16", 4, 8, False), 1, 3),
]
Shape = tuple[str, int, int, bool]


@pytest.fixture(scope="module")
def gdn(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedFunctions]:
    made = SimulatedFunctions(reference_pack.built(shared), tmp_path_factory.mktemp("simulated"))
    yield made
    made.close()


def verify_plan(gdn: SimulatedFunctions, shape: Shape) -> PlanRecord:
    state, tokens, rows, grouped = shape
    return gdn.plan("verify", state=state, tokens=tokens, rows=rows, grouped=grouped)


def verify(
    gdn: SimulatedFunctions, tensors: dict[str, torch.Tensor], shape: Shape, ctas: int
) -> None:
    gdn.call(verify_plan(gdn, shape), *tensors.values(), SCALE, ctas)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.view(bits), b.view(bits))


def small_step(state: str, tokens: int, heads: int, seed: int, lengths: list[int]) -> cases.Step:
    geometry = {"key_heads": 1, "value_heads": heads}
    given = torch.tensor(lengths)
    return cases.make_step(geometry, len(lengths) - 1, tokens, state, seed=seed, lengths=given)


@pytest.mark.parametrize("shape,ratio,ctas", SHAPES)
def test_verify_against_the_matrix_form(
    gdn: SimulatedFunctions, shape: Shape, ratio: int, ctas: int
) -> None:
    """One ulp of bf16 on out and u at most (the order of sums differs), 1e-5 on G; every other byte
    the same.

    Slots, q, k, v, a and b lie in wider memory, dead records are NaN, three rows share the CTAs,
    one of them padding, and copies land as late as the waits allow.
    """
    state, tokens = shape[:2]
    geometry = {"key_heads": 1, "value_heads": ratio}
    case = cases.GdnCase("simulated", "verify", geometry, 3, tokens - 1, 1, state, "cpu")
    step, lengths = case.step, torch.tensor([14, 5, 16, 0])
    cases.fill(step, torch.Generator().manual_seed(3), 3, tokens - 1, lengths=lengths)
    expected, want = case.expect(), step.clone()
    reference.verify_wy(**want.tensors)
    verify(gdn, step.tensors, shape, ctas)
    for check in case.compare(expected):
        assert float(check.error) <= check.bound, check
    ulp = 2.0**-7
    for name in POOLS:
        got, near = step.tensors[name].float(), want.tensors[name].float()
        rtol = 1e-5 if step.tensors[name].dtype == torch.float32 else ulp
        torch.testing.assert_close(got, near, atol=2e-5, rtol=rtol, equal_nan=True)


def test_rows_do_not_depend_on_shape_slot_or_order(gdn: SimulatedFunctions) -> None:
    step = small_step("bf16", 3, 2, seed=5, lengths=[13, 2, 16, 9])
    other = step.clone()
    verify(gdn, step.tensors, GROUPED, 2)
    order = torch.tensor([2, 0, 1])
    for name in ("qkv", "ba", "slots"):
        other.backing[name].copy_(other.backing[name][order])
    verify(gdn, other.tensors, ("bf16", 4, 16, False), 8)
    assert same_bits(other.backing["out"], step.backing["out"][order])
    for name in ("state", "rec_u", "rec_k", "rec_G"):
        assert same_bits(other.backing[name], step.backing[name])


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "a", "b"])
def test_a_token_does_not_reach_earlier_ones(gdn: SimulatedFunctions, poisoned: str) -> None:
    step = small_step("bf16", 3, 1, seed=6, lengths=[4, 11])
    other = step.clone()
    other.tensors[poisoned][:, 2] = float("nan")
    for one in (step, other):
        verify(gdn, one.tensors, SINGLE, 9)
    assert same_bits(other.tensors["out"][:, :2], step.tensors["out"][:, :2])
    assert same_bits(other.backing["state"], step.backing["state"])


@pytest.mark.parametrize("state", ["bf16", "fp32"])
def test_materialize(gdn: SimulatedFunctions, state: str) -> None:
    step = cases.make_step({"key_heads": 1, "value_heads": 2}, 3, 2, state, seed=4, spare=3)
    t = step.tensors
    src = torch.tensor([0, 1, -1], dtype=torch.int32)
    dst = torch.tensor([4, 1, 5], dtype=torch.int32)
    count = t["hist_len"][:3].clone()
    count[0] -= 1
    want = step.clone()
    w = want.tensors
    pools = ("state", "rec_u", "rec_k", "rec_G", "bank")
    reference.materialize(*(w[name] for name in pools), src, dst, count)
    plan = gdn.plan("materialize", state=state)
    gdn.call(plan, *(t[name] for name in pools), src, dst, count)
    rtol = 2.0**-7 if state == "bf16" else 1e-5
    torch.testing.assert_close(t["state"].float(), w["state"].float(), atol=1e-5, rtol=rtol)
    for slot in (0, 2, 3, 5):
        assert same_bits(t["state"][slot], w["state"][slot])
    for name in ("rec_u", "rec_k", "rec_G"):
        assert same_bits(step.backing[name], want.backing[name])


@pytest.mark.parametrize("tokens", [1, 4])
def test_cursors(gdn: SimulatedFunctions, tokens: int) -> None:
    hist_len = torch.arange(17, dtype=torch.int32).repeat(2)
    bank = (torch.arange(34, dtype=torch.int32) // 17) % 2
    table = torch.stack((torch.randperm(34).int(), torch.zeros(34).int()), dim=1)
    table[::5, 0] = -1
    slot, n_acc = table[:, 0], (torch.arange(34, dtype=torch.int32) % (tokens + 1))
    want = hist_len.clone(), bank.clone()
    reference.advance(*want, slot, n_acc, tokens)
    gdn.call(gdn.plan("advance"), hist_len, bank, slot, n_acc, tokens)
    assert torch.equal(hist_len, want[0]) and torch.equal(bank, want[1])
    reference.reset(*want, slot[:9])
    gdn.call(gdn.plan("reset"), hist_len, bank, slot[:9])
    assert torch.equal(hist_len, want[0]) and torch.equal(bank, want[1])

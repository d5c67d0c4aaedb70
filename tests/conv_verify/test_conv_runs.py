"""conv_verify on an imagined GPU: compiled host functions and PTX against float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import specplan  # noqa: E402
from specplan.kernels.conv_verify import cases, reference  # noqa: E402
from specplan.kernels.conv_verify.cases import ConvCase, MoveCase, ulps  # noqa: E402

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def run(setup: Any, case: ConvCase | MoveCase, seed: int = 1) -> None:
    """A case once, compared whole, and once more, equal bit for bit."""
    case.refill(seed)
    before, expected = case.snapshot(), case.expect()
    found = []
    for _ in range(2):
        case.restore(before)
        with setup.on_device() as pack:
            op = pack.conv_verify
            (op if case.op == "conv_verify" else getattr(op, case.op)).require(**case.arguments())
        assert len(setup.launches) == 1
        found.append(case.snapshot())
        for comparison in case.compare(expected):
            assert comparison.error <= comparison.bound, (case.name, comparison)
    assert torch.equal(*found)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_every_case_of_a_cell(setup: Any, tokens: int) -> None:
    seen = 0
    for requests in (1, 6, 13):
        for case in cases.checks({"channels": 520}, requests, tokens, 1, "bf16", CPU):
            run(setup, case, tokens + requests)
            seen += 1
    assert seen == (18 if tokens == 1 else 6)


def test_channels_that_end_within_a_cta(setup: Any) -> None:
    """Nothing is read or written beyond the last channel: guards lie there."""
    run(setup, ConvCase("wide", 1288, 3, 4, CPU, bias="bf16", wide=8))
    run(setup, MoveCase("import_", 1288, 3, CPU, order="taps"))


def step(
    setup: Any, x: Any, weight: Any, ring: Any, positions: list[int], slots: list[int], **more: Any
) -> Any:
    out = more.pop("out", None)
    out = torch.full_like(x, float("nan")) if out is None else out
    with setup.on_device() as pack:
        pack.conv_verify.require(
            *(x, weight, ring),
            *(torch.tensor(v, dtype=torch.int32) for v in (positions, slots)),
            out,
            **more,
        )
    return out


@pytest.mark.parametrize("places", [11, 12, 16])
def test_twenty_steps_with_random_acceptance(setup: Any, places: int) -> None:
    """Against the convolution of all accepted inputs, which knows no ring; tokens change."""
    chance, channels = torch.Generator().manual_seed(places), 520
    weight = torch.randn(channels, 4, generator=chance).to(BF16)
    ring = torch.full((4, places, channels), float("nan"), dtype=BF16)
    history: dict[int, list[Any]] = {2: [], 0: [], 3: []}
    slots = [2, -1, 0, 3]
    for _ in range(20):
        tokens = int(torch.randint(1, 9, (), generator=chance))
        x = torch.randn(4, tokens, channels, generator=chance).to(BF16)
        positions = [len(history[s]) if s >= 0 else 5 for s in slots]
        out = step(setup, x, weight, ring, positions, slots)
        assert not out[1].any()
        for number, slot in enumerate(slots):
            if slot < 0:
                continue
            rows = [torch.zeros(channels, dtype=BF16)] * 3 + history[slot] + list(x[number])
            whole, first = torch.stack(rows).double(), len(history[slot])
            for t in range(tokens):
                total = (whole[first + t : first + t + 4] * weight.double().T).sum(0)
                wanted = (total / (1 + (-total).exp())).to(BF16)
                assert int(ulps(out[number, t], wanted).max()) <= 1
            kept = int(torch.randint(0, tokens + 1, (), generator=chance))
            history[slot] += list(x[number, :kept])
    assert ring[1].isnan().all()


def test_rows_of_a_step_are_steps_of_a_row(setup: Any) -> None:
    """Bit for bit, at every position of a ring, apart and in place."""
    chance, channels, places = torch.Generator().manual_seed(3), 520, 12
    weight = torch.randn(channels, 4, generator=chance).to(BF16)
    for position in range(0, 2 * places, 3):
        ring = torch.randn(1, places, channels, generator=chance).to(BF16)
        x = torch.randn(1, 8, channels, generator=chance).to(BF16)
        single, whole, in_place = ring.clone(), ring.clone(), x.clone()
        outs = [
            step(setup, x[:, t : t + 1].clone(), weight, single, [position + t], [0])
            for t in range(8)
        ]
        out = step(setup, x, weight, whole, [position], [0])
        assert torch.equal(torch.cat(outs, 1), out)
        assert torch.equal(single, whole)
        step(setup, in_place, weight, ring, [position], [0], out=in_place)
        assert torch.equal(in_place, out)


def test_silu_of_every_bf16(setup: Any) -> None:
    """One tap that is 1: the activation alone, of all finite numbers."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    every = torch.where(every.isfinite(), every, 0)
    weight = torch.tensor([0, 0, 0, 1], dtype=BF16).expand(1024, 4).contiguous()
    rows = every.view(8, 8, 1024)
    ring = torch.zeros(8, 11, 1024, dtype=BF16)
    out = step(setup, rows, weight, ring, [0] * 8, list(range(8)))
    a = rows.double()
    wanted = (a / (1 + (-a).exp())).to(BF16)
    assert int(ulps(out, wanted).max()) <= 1
    assert int((ulps(out, wanted) > 0).sum()) < 700


def test_a_window_goes_round(setup: Any) -> None:
    """What is imported is what a step reads, and what export gives back."""
    chance, channels = torch.Generator().manual_seed(9), 520
    windows = torch.randn(2, 3, channels, 3, generator=chance).to(BF16)
    ring = torch.full((2, 5, 7, channels), float("nan"), dtype=BF16)
    lists = [torch.tensor(v, dtype=torch.int32) for v in ([9, 2, 5], [4, 0, -1])]
    with setup.on_device() as pack:
        pack.conv_verify.import_.require(windows, ring, *lists)
    assert ring[:, [1, 2, 3]].isnan().all()
    back = torch.full_like(windows, 7.0)
    with setup.on_device() as pack:
        pack.conv_verify.export.require(
            back.transpose(2, 3).contiguous().transpose(2, 3), ring, *lists
        )
        pack.conv_verify.export.require(back, ring, *lists)
    assert torch.equal(back[:, 0], windows[:, 0])
    assert torch.equal(back[:, 1, :, 1:], windows[:, 1, :, 1:]) and not back[:, 1, :, 0].any()
    assert (back[:, 2] == 7).all()
    weight = torch.randn(channels, 4, generator=chance).to(BF16)
    x = torch.randn(1, 1, channels, generator=chance).to(BF16)
    out = step(setup, x, weight, ring[1], [9], [4])
    total = torch.cat([windows[1, 0], x[0].T], 1).double().mul(weight.double()).sum(1)
    assert int(ulps(out[0, 0], (total / (1 + (-total).exp())).to(BF16)).max()) <= 1


def test_larger_batches_run_in_parts(setup: Any) -> None:
    case = ConvCase("parts", 520, 30, 2, CPU, places=8)
    case.refill(4)
    expected = case.expect()
    with setup.on_device() as pack:
        answer = pack.conv_verify(**case.arguments())
    assert isinstance(answer, specplan.InParts) and answer
    assert len(setup.launches) == 3
    for comparison in case.compare(expected):
        assert comparison.error <= comparison.bound


def test_declined_calls_write_nothing(setup: Any) -> None:
    count = 0
    for what, arguments, storage in cases.declined(CPU):
        before = storage.clone()
        op = arguments.pop("op")
        with setup.on_device() as pack:
            called = pack.conv_verify if op == "conv_verify" else getattr(pack.conv_verify, op)
            answers = [called(**arguments), called.bind(**arguments)]
        assert all(isinstance(answer, specplan.Uncertified) for answer in answers), what
        assert not setup.launches, what
        assert torch.equal(storage, before), what
        count += 1
    assert count >= 40


def test_the_certification_compares_everything() -> None:
    """A change of any word beyond a unit fails."""
    for case in cases.checks({"channels": 520}, 6, 1, 1, "bf16", CPU):
        case.refill(2)
        expected = case.expect()
        op = getattr(reference, case.op)
        op(**case.arguments())
        assert all(c.error <= c.bound for c in case.compare(expected))
        words = case.buffer.view(torch.int16)
        for at in torch.linspace(0, words.numel() - 1, 60).long():
            was = words[at].clone()
            words[at] = was ^ 0x4000
            worst = [c.error > c.bound for c in case.compare(expected)]
            assert any(worst), (case.name, int(at))
            words[at] = was

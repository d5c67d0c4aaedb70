"""Batches that no cell holds: ``gdn_replay`` runs them in parts, bit for bit what each row gives
alone; over the compiled host functions with the references for kernels, and over the kernels' PTX.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specplan import InParts, LaunchError, Pack, Reason, Uncertified, UncoveredError
from specplan.kernels.gdn_replay import reference
from specplan.kernels.gdn_replay.cases import GdnCase
from specplan.op import BoundParts
from specplan.plans.cell import Cell
from specplan.tools.simulator.compiling import PtxCompiler
from specplan.tools.simulator.device import Simulator
from specplan.tools.simulator.host import Recorder

import reference_pack
from reference_pack import ARCH, Graph, reference_graphs
from support.shared import Shared

pytestmark = pytest.mark.usefixtures("one_thread")

NARROW = {"key_heads": 1, "value_heads": 2}
LISTS = {"verify": ("slot",), "advance": ("slot", "n_acc"), "reset": ("slot",),
         "materialize": ("src", "dst", "count")}  # fmt: skip
ROWS = {**LISTS, "verify": ("q", "k", "v", "a", "b", "slot", "out")}


class RowByRow:
    """The references as kernels are: no row's bits depend on the others. torch's sums on a CPU
    round differently in batches of other sizes.
    """

    advance, reset = reference.advance, reference.reset

    @staticmethod
    def verify(*arguments: Any) -> None:
        q, k, v, a, b, A_log, dt_bias, *pool, slot, out, scale = arguments
        for row in range(q.shape[0]):
            at = slice(row, row + 1)
            reference.verify(
                *(t[at] for t in (q, k, v, a, b)), A_log, dt_bias, *pool, slot[at], out[at], scale
            )

    @staticmethod
    def materialize(*arguments: Any) -> None:
        *pool, src, dst, count = arguments
        for row in range(src.shape[0]):
            at = slice(row, row + 1)
            reference.materialize(*pool, src[at], dst[at], count[at])


@pytest.fixture
def pack(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pack:
    monkeypatch.setattr(reference_pack, "reference", RowByRow)
    directory = reference_pack.built(shared)
    return reference_pack.reference_pack(directory, tmp_path / "recorder", monkeypatch)[0]


def case_of(op: str, requests: int, seed: int = 3, tokens: int = 4) -> GdnCase:
    case = GdnCase("x", op, NARROW, requests, tokens, 1, "bf16", "cpu")
    case.refill(seed)
    return case


def call_of(case: GdnCase) -> dict[str, Any]:
    return {**case.arguments(), **({"splits": None} if case.op == "verify" else {})}


def alone(call: dict[str, Any], op: str, row: int, count: int = 1) -> dict[str, Any]:
    """The same call for some rows."""
    return {n: a[row : row + count] if n in ROWS[op] else a for n, a in call.items()}


def run_bound(launch: Any) -> None:
    """Run a bound launch, whose tensors but the first are no torch tensors: the recorder passes
    torch's as if they were on the device.
    """
    for each in launch.launches if isinstance(launch, BoundParts) else (launch,):
        each.func(
            *(
                a if isinstance(a, (int, float, torch.Tensor)) else torch.from_dlpack(a)
                for a in each.args
            )
        )


def launches(pack: Pack) -> int:
    return sum(len(f.launches) for f in pack._packs[ARCH].functions.values())


def same(case: GdnCase, other: GdnCase) -> None:
    assert torch.equal(case.buffer, other.buffer)


@pytest.mark.parametrize(
    ("requests", "parts"), [(68, (64, 4)), (300, (256, 44)), (1000, (256, 256, 256, 232))]
)
def test_verify_in_parts_is_the_reference_and_every_row_alone(
    pack: Pack, requests: int, parts: tuple[int, ...]
) -> None:
    verify = pack.gdn_replay.verify
    whole, single = case_of("verify", requests), case_of("verify", requests)
    expected = whole.expect()
    answer = verify(**call_of(whole))
    assert isinstance(answer, InParts) and answer
    assert answer.requests == parts
    assert answer.cells[1] == Cell("gdn_replay", "narrow", "bf16", ARCH, answer.cells[1].splits, 4,
                                   parts[1])  # fmt: skip
    assert str(requests) in str(answer) and " + ".join(map(str, parts)) in str(answer)
    assert all(float(c.error) <= c.bound for c in whole.compare(expected))
    for row in range(requests):
        assert verify(**alone(call_of(single), "verify", row)) is True
    same(whole, single)
    bits = case_of("verify", requests)
    RowByRow.verify(*bits.compiled_arguments())
    same(whole, bits)


@pytest.mark.parametrize("op", ["advance", "materialize", "reset"])
def test_the_ops_beside_verify_take_every_batch(pack: Pack, op: str) -> None:
    whole, single = case_of(op, 300), case_of(op, 300)
    expected = whole.expect()
    the_op = getattr(pack.gdn_replay, op)
    answer = the_op(**call_of(whole))
    assert isinstance(answer, InParts) and answer.requests == (256, 44)
    assert all(float(c.error) <= c.bound for c in whole.compare(expected))
    for row in range(300):
        assert the_op(**alone(call_of(single), op, row)) is True
    same(whole, single)
    assert the_op.require(**call_of(case_of(op, 300))) is None


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.integers(1, 600),
    op=st.sampled_from(sorted(ROWS)),
    seed=st.integers(0, 1 << 20),
    bound=st.booleans(),
)
def test_any_batch_runs_and_is_what_its_halves_give(
    pack: Pack, requests: int, op: str, seed: int, bound: bool
) -> None:
    the_op = getattr(pack.gdn_replay, op)
    whole, halves = case_of(op, requests, seed), case_of(op, requests, seed)
    if bound:
        before = whole.snapshot()
        launch = the_op.bind(**call_of(whole))
        assert launch and torch.equal(before, whole.buffer)
        run_bound(launch)
    else:
        assert the_op(**call_of(whole))
    middle = requests // 2
    for row, count in ((0, middle), (middle, requests - middle)):
        assert the_op(**alone(call_of(halves), op, row, count))
    same(whole, halves)


def test_a_second_call_takes_the_fast_path_of_each_part(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = pack.gdn_replay.verify.op
    case = case_of("verify", 300)
    first = op.call(**call_of(case))
    before = launches(pack)
    monkeypatch.setattr(op, "resolve", lambda values: pytest.fail("resolved again"))
    case.refill(8)
    expected = case.expect()
    assert op.call(**call_of(case)) is first
    assert launches(pack) == before + 2
    assert all(float(c.error) <= c.bound for c in case.compare(expected))


def test_a_plan_that_was_forgotten_between_two_calls_is_found_again(pack: Pack) -> None:
    op = pack.gdn_replay.verify.op
    case = case_of("verify", 300)
    op.call(**call_of(case))
    for kept in list(op.plans)[:1], []:
        for key in list(op.plans):
            if key not in kept:
                del op.plans[key]
        case.refill(3)
        expected = case.expect()
        assert op.call(**call_of(case))
        assert all(float(c.error) <= c.bound for c in case.compare(expected))


def test_a_call_with_a_cell_of_its_own_never_looks_at_parts(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_pick_parts", lambda *arguments: pytest.fail("asked for parts"))
    for _ in range(2):
        assert pack.gdn_replay.verify(**call_of(case_of("verify", 64))) is True
    assert not pack.gdn_replay.verify.op.parted


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ROWS["verify"])
@pytest.mark.parametrize("how", ["short", "dtype", "rank"])
def test_a_wrong_argument_declines_the_whole_and_writes_nothing(
    pack: Pack, name: str, how: str, warm: bool
) -> None:
    pack.prepare(0)
    if warm:
        assert pack.gdn_replay.verify(**call_of(case_of("verify", 68)))
    case = case_of("verify", 68)
    call = call_of(case)
    changed = {"short": lambda t: t[:-1], "dtype": lambda t: t.double(), "rank": lambda t: t[None]}
    call[name] = changed[how](call[name])
    if name == "q" and how == "short":
        call["q"] = torch.cat([call["q"], call["q"]])[:69]
    before, count = case.snapshot(), launches(pack)
    for run in (pack.gdn_replay.verify, pack.gdn_replay.verify.bind):
        answer = run(**call)
        assert isinstance(answer, Uncertified) and answer.reason is Reason.ARGUMENT, answer
    assert torch.equal(before, case.buffer)
    assert launches(pack) == count


def test_a_launch_that_fails_after_another_is_an_error_and_no_answer(pack: Pack) -> None:
    pack.prepare(0)
    for warm in (False, True):
        case = case_of("verify", 300)
        if warm:
            assert pack.gdn_replay.verify(**call_of(case))
        part = pack.gdn_replay.verify.pick(requests=44, tokens=4, problem="narrow")
        part.function.fails = ValueError("not this one")
        with pytest.raises(LaunchError, match="1 of 2 parts"):
            pack.gdn_replay.verify(**call_of(case))
        part.function.fails = None


def test_parts_are_of_cells_that_may_run(pack: Pack) -> None:
    said = pack.gdn_replay.verify.parts(requests=300, tokens=4, problem="narrow")
    assert [picked.cell.requests for picked in said] == [256, 44]
    assert len(pack.gdn_replay.verify.parts(requests=64, tokens=4, problem="narrow")) == 1
    pack.candidates = False
    answer = pack.gdn_replay.verify(**call_of(case_of("verify", 300)))
    assert isinstance(answer, Uncertified) and answer.reason is Reason.NOT_IN_CATALOG
    # No part has other splits than those asked for.
    pack.candidates = True
    case = case_of("verify", 68)
    answer = pack.gdn_replay.verify(**{**call_of(case), "splits": 4})
    assert isinstance(answer, Uncertified) and "splits=4" in str(answer)


def test_parts_are_captured_and_replayed(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_graphs(pack, monkeypatch)
    case = case_of("verify", 300)
    call = call_of(case)
    pack.prepare(0)
    graph: Any = Graph()
    with torch.cuda.graph(graph):
        assert pack.gdn_replay.verify(**call)
    assert len(graph.nodes) == 2
    for seed in (4, 5):
        case.refill(seed)
        other = case_of("verify", 300, seed)
        graph.replay()
        for row in (0, 150):
            assert pack.gdn_replay.verify(**alone(call_of(other), "verify", row, 150))
        same(case, other)


def test_bound_parts_launch_each_time(pack: Pack) -> None:
    case = case_of("verify", 68)
    launch = pack.gdn_replay.verify.bind(**call_of(case))
    assert launch.parts.requests == (64, 4)
    assert case.cursors.committer == "gdn_replay.verify"
    for seed in (6, 7):
        case.refill(seed)
        other = case_of("verify", 68, seed)
        run_bound(launch)
        for row, count in ((0, 60), (60, 8)):
            assert pack.gdn_replay.verify(**alone(call_of(other), "verify", row, count))
        same(case, other)


# ----- the kernels' own code


@pytest.fixture
def simulated(shared: Shared, pack: Pack, tmp_path: Path) -> Iterator[Pack]:
    pytest.importorskip("cutlass")
    directory = reference_pack.built(shared)
    compiler = PtxCompiler(directory.parent / "ptx")
    plans = pack.manifest().plans
    simulator = Simulator(lambda symbol: compiler.ptx(plans[symbol]))
    recorder = Recorder(directory, tmp_path / "simulated", simulator.launch, every_tensor=True)
    pack._packs[ARCH].functions = dict(recorder.functions)
    yield pack
    compiler.close()


def test_simulated_kernels_give_the_same_bits_in_parts(
    simulated: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = simulated.gdn_replay.verify
    # Of the catalog's sizes, few: 5 = 4 + 1.
    picks = type(simulated)._pick
    monkeypatch.setattr(
        type(simulated),
        "_pick",
        lambda self, family, op, arch_pack, size, problem=None: (
            Uncertified(family, ARCH, Reason.NOT_IN_CATALOG, "not today")
            if size.requests == 5
            else picks(self, family, op, arch_pack, size, problem)
        ),
    )
    monkeypatch.setattr("specplan.pack.parts_of", lambda requests, sizes: (4, 1))
    whole, single = case_of("verify", 5), case_of("verify", 5)
    expected = whole.expect()
    answer = verify(**call_of(whole))
    assert isinstance(answer, InParts) and answer.requests == (4, 1)
    assert all(float(c.error) <= c.bound for c in whole.compare(expected))
    for row in range(5):
        assert verify(**alone(call_of(single), "verify", row)) is True
    same(whole, single)


# ----- what is said of it


def test_parts_are_counted_logged_once_and_taken_by_require(
    pack: Pack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = case_of("reset", 300)
    with caplog.at_level(logging.INFO, "specplan"):
        answers = [pack.gdn_replay.reset(**call_of(case)) for _ in range(3)]
    assert pack.stats()["parts"] == {"gdn_replay.reset": {str(answers[0]): 3}}
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "256 + 44" in record.message
    path = tmp_path / "server.yaml"
    path.write_text(
        "schema: 1\narch: sm_90a\nmax_requests: 300\ngraph_requests: [1, 68, 300]\neager: false\n"
        "draft_lengths: [3]\nfamilies:\n  gdn_replay: {problem: narrow, dtype: bf16}\n"
    )
    # The ops beside verify run 68 as 72.
    assert {(answer.cells[0].tokens, answer.requests) for answer in pack.require(path)} == {
        (4, (64, 4)),
        (4, (256, 44)),
        (1, (256, 44)),
    }
    path.write_text(path.read_text().replace("draft_lengths: [3]", "draft_lengths: [2]"))
    with pytest.raises(UncoveredError, match=r"gdn_replay\.verify narrow tokens=3 .*1, 68, 300"):
        pack.require(path)

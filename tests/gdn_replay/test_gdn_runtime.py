"""The runtime ops without a GPU: what is launched with what, what is declined, who commits, and the
certification driver over the references.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from specplan import LaunchError, Pack, Reason, Uncertified, UncertifiedCell
from specplan.kernels.gdn_replay import cases
from specplan.kernels.gdn_replay.cases import GdnCase
from specplan.plans import certificates
from specplan.plans.catalog import Catalog
from specplan.plans.gdn_replay import CommitterError, Cursors
from specplan.tools.certify import CertificationError, FamilyRun, Shard

import reference_pack
from reference_pack import ARCH, Checked, reference_graphs
from support.shared import Shared

GEOMETRY = {"key_heads": 2, "value_heads": 8}
OPS = ("verify", "advance", "materialize", "reset")


@pytest.fixture
def loaded(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Pack, Catalog]:
    directory = reference_pack.built(shared)
    return reference_pack.reference_pack(directory, tmp_path / "recorder", monkeypatch)


@pytest.fixture
def pack(loaded: tuple[Pack, Catalog]) -> Pack:
    return loaded[0]


def case_of(op: str, requests: int = 3, tokens: int = 4, dtype: str = "bf16") -> GdnCase:
    case = GdnCase("x", op, GEOMETRY, requests, tokens, 1, dtype, "cpu")
    case.refill(3)
    return case


def call_of(op: str, *sizes: Any, **changes: Any) -> dict[str, Any]:
    arguments = {**case_of(op, *sizes).arguments()}
    if op == "verify":
        arguments["splits"] = None
    return {**arguments, **changes}


def functions(pack: Pack) -> dict[str, Checked]:
    found: dict[str, Checked] = pack._packs[ARCH].functions
    return found


def launches(pack: Pack, op: str) -> list[tuple[Checked, tuple[Any, ...]]]:
    """Launches with a row of the batch; those without one only load code or ask a module."""
    at = {"verify": 13, "advance": 2, "materialize": 5, "reset": 2}[op]
    return [
        (function, arguments)
        for function in functions(pack).values()
        for arguments in function.launches
        if function.op == op and (arguments[at] >= 0).any()
    ]


def declined(answer: Any, reason: Reason) -> str:
    assert isinstance(answer, Uncertified), answer
    assert answer.reason is reason, answer
    return str(answer)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", OPS)
def test_calls_launch_what_is_picked_with_the_arguments_in_order(
    pack: Pack, op: str, dtype: str
) -> None:
    case = case_of(op, 3, 4, dtype)
    arguments = {**case.arguments()}
    if op == "verify":
        arguments["splits"] = None
    the_op = getattr(pack.gdn_replay, op)
    expected = case.expect()
    assert the_op(**arguments) is True
    assert all(float(c.error) <= c.bound for c in case.compare(expected))
    ((function, launched),) = launches(pack, op)
    picked = the_op.pick(requests=3, tokens=4, problem="small", dtype=dtype)
    assert function is picked.function
    compiled = case.compiled_arguments()
    assert len(launched) == len(compiled) + len(picked.launch)
    for got, wanted in zip(launched, compiled, strict=False):
        assert got is wanted or (got == wanted and not isinstance(got, torch.Tensor))
    assert launched[len(compiled) :] == tuple(picked.launch.values())
    assert the_op.require(**arguments) is None
    assert len(launches(pack, op)) == 2


def test_forced_splits_are_a_cell_of_their_own(pack: Pack) -> None:
    assert pack.gdn_replay.verify(**call_of("verify", splits=4)) is True
    ((function, _),) = launches(pack, "verify")
    assert (function.spec["rows"], function.spec["warps"]) == (8, 4)
    said = declined(pack.gdn_replay.verify(**call_of("verify", splits=1)), Reason.NOT_IN_CATALOG)
    assert "splits" in said


def test_many_heads_come_to_a_grouped_plan(pack: Pack) -> None:
    picked = pack.gdn_replay.verify.pick(requests=32, tokens=4, problem="wide")
    assert dict(picked.launch) == {"ctas": 2 * 132}
    assert dict(picked.plan.spec)["grouped"]


@pytest.mark.parametrize("op", OPS)
def test_bind_launches_the_same_and_writes_nothing_before(pack: Pack, op: str) -> None:
    case = case_of(op)
    arguments = {**case.arguments()}
    if op == "verify":
        arguments["splits"] = None
    before, expected = case.snapshot(), case.expect()
    launch = getattr(pack.gdn_replay, op).bind(**arguments)
    assert launch
    assert int(case.identical(before)) == 0
    assert not launches(pack, op)
    converted = launch.args
    assert converted[0] is case.compiled_arguments()[0]
    for got, wanted in zip(converted[1:], case.compiled_arguments()[1:], strict=False):
        if isinstance(wanted, torch.Tensor):
            got = torch.from_dlpack(got)
            assert got.data_ptr() == wanted.data_ptr()
            assert got.shape == wanted.shape
        else:
            assert got == wanted
    restored = [
        each if isinstance(each, (int, float, torch.Tensor)) else torch.from_dlpack(each)
        for each in converted
    ]
    launch.func(*restored)
    assert all(float(c.error) <= c.bound for c in case.compare(expected))


@pytest.mark.parametrize("op", ["verify", "materialize"])
@pytest.mark.parametrize("value", [None, 2.5, "slots"])
def test_a_pool_that_holds_no_tensor_is_declined(pack: Pack, op: str, value: Any) -> None:
    call = call_of(op)
    call["pool"].tensors = (value, *call["pool"].tensors[1:])
    the_op = getattr(pack.gdn_replay, op)
    declined(the_op(**call), Reason.ARGUMENT)
    declined(the_op.bind(**call), Reason.ARGUMENT)


@pytest.mark.parametrize("op", OPS)
def test_no_rows_are_nothing_to_do(pack: Pack, op: str) -> None:
    empty = torch.empty(0, dtype=torch.int32)
    changes: dict[str, Any] = {"slot": empty}
    if op == "verify":
        changes["q"] = torch.empty(0, 4, 2, 128, dtype=torch.bfloat16)
    if op == "materialize":
        changes = {"src": empty, "dst": empty, "count": empty}
    the_op = getattr(pack.gdn_replay, op)
    assert the_op(**call_of(op, **changes)) is True
    assert the_op.bind(**call_of(op, **changes))() is None
    assert not any(f.launches for f in functions(pack).values())


def test_every_declined_call_is_declined_cold_and_warm(pack: Pack) -> None:
    for warm in (False, True):
        if warm:
            for op in OPS:
                assert getattr(pack.gdn_replay, op)(**call_of(op)) is True
        for what, arguments, storage in cases.declined(torch.device("cpu")):
            before = storage.clone()
            op = getattr(pack.gdn_replay, arguments.pop("op"))
            for call in (op, op.bind):
                assert isinstance(call(**arguments), Uncertified), what
            with pytest.raises(UncertifiedCell):
                op.require(**arguments)
            assert torch.equal(before, storage), what


def test_what_is_no_tensor_is_declined(pack: Pack) -> None:
    wrong = {"verify": "q", "advance": "slot", "materialize": "src", "reset": "slot"}
    for op, name in wrong.items():
        for value in (None, [1], torch.zeros((), dtype=torch.int32)):
            the_op = getattr(pack.gdn_replay, op)
            declined(the_op(**call_of(op, **{name: value})), Reason.ARGUMENT)
            declined(the_op.bind(**call_of(op, **{name: value})), Reason.ARGUMENT)


@pytest.mark.parametrize("op", ["advance", "materialize", "reset"])
def test_rows_without_a_cell_run_as_part_of_the_next_multiple_of_eight(pack: Pack, op: str) -> None:
    the_op = getattr(pack.gdn_replay, op)
    assert the_op(**call_of(op, 7)) is True
    assert the_op(**call_of(op, 11)) is True
    assert len(launches(pack, op)) == 2


def test_a_call_of_the_same_sizes_and_another_shape_leaves_no_plan(pack: Pack) -> None:
    """Four rows of four tokens are as many numbers as two of eight: each comes to its own plan,
    whichever was refused before.
    """
    good, other = call_of("verify", 2, 8), call_of("verify", 4, 4)
    mixed = {**good, **{name: other[name] for name in ("q", "k", "v", "a", "b", "out")}}
    for _ in range(2):
        declined(pack.gdn_replay.verify(**mixed), Reason.ARGUMENT)
        declined(pack.gdn_replay.verify.bind(**mixed), Reason.ARGUMENT)
    for call, requests, tokens in ((good, 2, 8), (other, 4, 4)):
        picked = pack.gdn_replay.verify.pick(requests=requests, tokens=tokens, problem="small")
        before = len(picked.function.launches)
        assert pack.gdn_replay.verify(**call) is True
        assert len(picked.function.launches) == before + 1
    declined(pack.gdn_replay.verify(**mixed), Reason.ARGUMENT)


def test_other_heads_are_no_problem_of_the_catalog(pack: Pack) -> None:
    case = GdnCase("x", "reset", {"key_heads": 1, "value_heads": 3}, 2, 1, 1, "bf16", "cpu")
    case.refill(0)
    declined(pack.gdn_replay.reset(**case.arguments()), Reason.UNKNOWN_PROBLEM)


def test_candidates_run_only_where_they_are_accepted(pack: Pack) -> None:
    pack.candidates = False
    for op in OPS:
        declined(getattr(pack.gdn_replay, op)(**call_of(op)), Reason.CANDIDATE)
    assert not any(launches(pack, op) for op in OPS)


def test_a_failed_launch_is_an_error(pack: Pack) -> None:
    for op in OPS:
        assert getattr(pack.gdn_replay, op)(**call_of(op)) is True
    for function in functions(pack).values():
        function.fails = RuntimeError("CUDA said no")
    for op in OPS:
        with pytest.raises(LaunchError, match="CUDA said no"):
            getattr(pack.gdn_replay, op)(**call_of(op))


def test_preparing_launches_every_plan_without_a_row(pack: Pack) -> None:
    pack.prepare(0)
    assert all(len(f.launches) == 1 for f in functions(pack).values())
    assert not any(launches(pack, op) for op in OPS)
    verify = [f for f in functions(pack).values() if f.op == "verify"]
    parts = [128 // (f.spec["rows"] * f.spec["warps"]) for f in verify]
    assert [f.launches[0][-1] for f in verify] == parts and len({*parts}) > 1


# ----- one committer


def test_a_manager_that_commits_is_refused_after_verify(pack: Pack) -> None:
    call = call_of("verify")
    cursors = call["pool"].cursors
    assert cursors.committer is None
    assert pack.gdn_replay.verify.bind(**call)
    assert cursors.committer == "gdn_replay.verify"
    with pytest.raises(
        CommitterError, match=r"cache manager .* gdn_replay\.verify commits already"
    ):
        cursors.claim("cache manager")


@pytest.mark.parametrize("how", ["call", "bind", "require"])
def test_verify_is_refused_after_a_manager_that_commits(pack: Pack, how: str) -> None:
    good = call_of("verify")
    assert pack.gdn_replay.verify(**good) is True  # warm
    call = call_of("verify")
    call["pool"].cursors.claim("cache manager")
    before = len(launches(pack, "verify"))
    verify = pack.gdn_replay.verify
    with pytest.raises(CommitterError, match=r"gdn_replay\.verify would commit"):
        {"call": verify, "bind": verify.bind, "require": verify.require}[how](**call)
    assert len(launches(pack, "verify")) == before


def test_verify_may_be_bound_for_many_batches(pack: Pack) -> None:
    call = call_of("verify")
    for _ in range(2):
        assert pack.gdn_replay.verify.bind(**call)
    assert pack.gdn_replay.verify(**call) is True


def test_layers_share_the_committer() -> None:
    case = case_of("verify")
    other = type(case.pool)(case.cursors, *case.pool.tensors[:4])
    other.cursors.claim("one")
    with pytest.raises(CommitterError):
        case.pool.cursors.claim("two")


@pytest.mark.parametrize("how", ["call", "bind"])
def test_folding_in_place_commits(pack: Pack, how: str) -> None:
    call = call_of("materialize")
    materialize = pack.gdn_replay.materialize
    run = materialize if how == "call" else materialize.bind
    assert run(**call)
    assert call["pool"].cursors.committer is None
    call["pool"].cursors.claim("gdn_replay.verify")
    assert run(**call)
    with pytest.raises(CommitterError, match="in place"):
        run(**{**call, "dst": call["src"]})


def test_commits_is_the_predicate_of_the_kernel() -> None:
    case = case_of("verify", 5, 4)
    t = case.step.tensors
    commits = case.pool.commits(t["slot"], 4)
    written = cases.written_by("verify", case.step, 4)["state"][:, 0, 0, 0]
    live = t["slot"] >= 0
    assert torch.equal(commits[live], written[t["slot"][live].long()])
    assert not commits[~live].any()


def test_pools_that_do_not_fit_the_cursors_are_refused() -> None:
    case = case_of("verify")
    state, rec_u, rec_k, rec_G = case.pool.tensors[:4]
    pool = type(case.pool)
    for wrong in ((state[:-1], rec_u, rec_k, rec_G), (state, rec_k, rec_k, rec_G),
                  (state, rec_u, rec_u, rec_G), (state, rec_u, rec_k, rec_G[..., :8]),
                  (state.float(), rec_u, rec_k, rec_G)):  # fmt: skip
        with pytest.raises(ValueError, match="is "):
            pool(case.cursors, *wrong)
    hist_len, bank = case.pool.tensors[4:]
    with pytest.raises(ValueError, match="dtype is 'fp16'"):
        Cursors(hist_len, bank, key_heads=2, value_heads=8, dtype="fp16")
    with pytest.raises(ValueError, match="value_heads 7"):
        Cursors(hist_len, bank, key_heads=2, value_heads=7)


# ----- the certification driver


@pytest.fixture
def run(loaded: tuple[Pack, Catalog], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FamilyRun:
    pack, catalog = loaded
    reference_graphs(pack, monkeypatch)
    facts = {"name": "none", "capability": "9.0", "sm_count": 132, "driver": "none"}
    monkeypatch.setattr("specplan.tools.certify._device_facts", lambda device: facts)
    directory = tmp_path / ARCH
    directory.mkdir(exist_ok=True)
    return FamilyRun(catalog, pack, "gdn_replay", torch.device("cpu"), directory, Shard(1, 1))


def test_the_driver_certifies_the_references(run: FamilyRun, loaded: tuple[Pack, Catalog]) -> None:
    cells = [
        cell
        for cell in loaded[1].cells(ARCH, "gdn_replay")
        if cell.problem == "small"
        and (cell.requests, cell.tokens, cell.dtype) in ((3, 4, "bf16"), (1, 1, "fp32"))
    ]
    assert {cell.splits for cell in cells} >= {2, 4}
    found = certificates.read(run.certify(cells))
    assert found.recorded == certificates.EVERY_OUTPUT
    # Every output by the plan that wrote it; the state by two ops.
    wrote: dict[str, set[str]] = {}
    for tally in found.tallies:
        assert tally.comparisons > 0
        for symbol, problems in tally.errors.items():
            assert set(problems) == {"small"}
            wrote.setdefault(symbol, set()).add(tally.output.name)
    exact = {"all that must not change", "all that the call writes, run again"}
    expected = {
        "verify": {"out", "state", "rec_u", "rec_k", "rec_G", *exact},
        "materialize": {"state", *exact},
        "advance": exact,
        "reset": exact,
    }
    ops = {symbol: run.manifest.plans[symbol].op for symbol in wrote}
    assert set(ops.values()) == set(expected)
    for symbol, op in ops.items():
        assert wrote[symbol] == expected[op], symbol
    # bf16 and fp32 states have bounds of their own.
    assert len([tally for tally in found.tallies if tally.output.name == "state"]) == 2
    assert sum(cell.comparisons for cell in found.cells()) == sum(
        tally.comparisons for tally in found.tallies
    )


def test_a_run_that_was_killed_within_a_line_resumes(
    run: FamilyRun,
    loaded: tuple[Pack, Catalog],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had finished is kept and not run again, the cell of the half line is."""
    cells = [
        cell
        for cell in loaded[1].cells(ARCH, "gdn_replay")
        if cell.problem == "small" and (cell.requests, cell.tokens) in ((1, 1), (1, 2), (3, 4))
    ][:3]
    ran: list[Any] = []
    real = run.run_batch

    def batch(cells: Any, uses: Any) -> Any:
        ran.extend(cells)
        return real(cells, uses)

    monkeypatch.setattr(run, "run_batch", batch)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("specplan.tools.certify.certificates.write", _killed)
        run.certify(cells)
    assert ran == cells
    text = run.progress_path.read_text()
    assert text.count("\n") == 1 + len(cells)
    run.progress_path.write_text(text[:-20])
    ran.clear()
    path = run.certify(cells)
    assert ran == cells[-1:]
    resumed = certificates.read(path)
    assert resumed.count == len(cells)
    run.path = run.path.with_name("gdn_replay.2.yaml")
    whole = certificates.read(run.certify(cells))
    # Inputs differ, since a batch draws its own: what was compared, and how often, does not.
    assert whole.groups == resumed.groups
    compared = [
        {
            t.output: (t.comparisons, {s: set(problems) for s, problems in t.errors.items()})
            for t in each.tallies
        }
        for each in (whole, resumed)
    ]
    assert compared[0] == compared[1]
    assert not run.progress_path.exists()


def _killed(path: Path, certificate: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("buffer", ["out", "state", "rec_u", "rec_k", "rec_G"])
def test_the_driver_finds_a_wrong_value(
    run: FamilyRun,
    loaded: tuple[Pack, Catalog],
    monkeypatch: pytest.MonkeyPatch,
    buffer: str,
) -> None:
    real = cases.reference.verify

    def broken(*arguments: Any) -> None:
        real(*arguments)
        tensor = arguments[cases.reference_arguments("verify").index(buffer)]
        tensor.mul_(1.5)

    monkeypatch.setattr("reference_pack.reference", _Instead(cases.reference, verify=broken))
    (cell,) = (
        cell
        for cell in loaded[1].cells(ARCH, "gdn_replay")
        if cell.problem == "small"
        and (cell.requests, cell.tokens) == (1, 1)
        and cell.dtype == "bf16"
    )
    with pytest.raises(CertificationError, match=r"bound|differ"):
        run.certify([cell])


class _Instead:
    """A module with some functions replaced."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self._module, self._functions = module, functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(self._module, name)

"""The fuzzer without a GPU: the ops and the checks of their compiled functions are the real ones,
driven by Hypothesis, and the reference stands in for device code; and the fuzzer's own judgement,
over ops with mistakes in them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402

import fuzzing  # noqa: E402  isort: skip
from support.recorder import Recorded, Recorder  # noqa: E402  isort: skip
from support.stubs import on_device  # noqa: E402  isort: skip
from test_runtime_calls import GATHER, SCATTER  # noqa: E402  isort: skip

HOST = torch.device("cpu")
COPY_BYTES, EPISODE_BYTES = 64 << 10, 128 << 10
PROBLEMS = {
    "scatter": [{"history": 4, "next": 4, "draft": 3}, {"history": 8, "next": 8, "draft": 7}],
    "gather": [{"next": 4, "draft": 3}],
}
NAMES = {"scatter": SCATTER, "gather": GATHER}


class Module:
    """A compiled function whose launches do what the reference does."""

    def __init__(self, family: str, spec: Mapping[str, Any], recorded: Recorded) -> None:
        self.family, self.spec, self.recorded = family, dict(spec), recorded
        #: Launches that no kernel may see.
        self.beyond: list[str] = []

    def __call__(self, *arguments: Any) -> None:
        before = len(self.recorded.launches)
        self.recorded(*arguments)
        if len(self.recorded.launches) == before:
            return
        # What the plan was picked for may follow the call's own integers.
        call = dict(zip(NAMES[self.family], arguments, strict=False))
        beyond = self._beyond(call)
        if beyond is not None:
            self.beyond.append(beyond)
        given = {n: _plain(v) for n, v in call.items()}
        fuzzing.REFERENCES[self.family](**given)

    def _beyond(self, call: Mapping[str, Any]) -> str | None:
        """What the kernels take for granted (see their contracts) and this launch does not keep."""
        if self.family == "scatter":
            begin, rows = call["row_begin"], call["rows"]
            held = min(call[name].shape[0] for name in SCATTER[:4])
            fits = begin >= 0 and rows >= 0 and begin + rows <= held
            return None if fits and rows <= call["slots"].numel() else f"rows {begin}, {rows}"
        requests, tokens, drafts = call["requests"], call["tokens"], call["drafts"]
        flat = requests * tokens
        if not (requests >= 0 and 1 <= tokens <= min(self.spec["next"], self.spec["lanes"])):
            return f"{requests} x {tokens}"
        if not (0 <= drafts < tokens and drafts <= self.spec["draft"]):
            return f"tokens {tokens}, drafts {drafts}"
        for name, count in (
            ("input_ids", flat),
            ("draft_tokens", requests * drafts),
            ("pos_offsets", flat),
            ("kv_offsets", requests),
        ):
            begin = call[f"{name}_begin"]
            if begin < 0 or begin + count > call[name].numel():
                return f"{name} from {begin}, {count}"
        if requests > call["slots"].numel() or flat > call["pos_indices"].numel():
            return "short lists"
        return None


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


@pytest.fixture
def modules(
    pack: specplan.Pack, small_pack: packs.SmallPack, tmp_path: Path
) -> Iterator[specplan.Pack]:
    """The small pack on an imagined device, with its compiled functions."""
    recorder = Recorder(small_pack.directory, tmp_path / "recorder")
    made = {
        symbol: Module(plan.family, dict(plan.spec), recorder.functions[symbol])
        for symbol, plan in small_pack.manifest.plans.items()
    }
    pack._packs[packs.ARCH].functions = dict(made)
    # Of the small pack's own problems only: the others of the fixture have no compiled function.
    pack._packs[packs.ARCH].manifest = small_pack.manifest
    pack._prepared |= {(0, family) for family in specplan.pack.FAMILIES}
    yield pack
    assert not [beyond for module in made.values() for beyond in module.beyond]


def batch(chance: Random, size: int) -> list[fuzzing.Call]:
    calls: list[fuzzing.Call] = []
    while len(calls) < size:
        call = fuzzing.any_call(chance, PROBLEMS)
        try:
            fuzzing.place(call, COPY_BYTES, chance)
        except fuzzing.DoesNotFit:
            continue
        calls.append(call)
    return calls


def noise(rows: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.empty(rows, size // 4, dtype=torch.int32)
    return words.random_(-(1 << 31), (1 << 31) - 1, generator=generator).view(torch.uint8)


Launch = Callable[[fuzzing.Call, Mapping[str, Any]], Any]


def run(calls: list[fuzzing.Call], launch: Launch, seed: int = 1) -> fuzzing.Score:
    score = fuzzing.Score()
    fuzzing.run_copies(
        *(0, calls, noise(len(calls), COPY_BYTES, seed), launch, HOST, score),
        wrap=on_device,
    )
    return score


def public(pack: specplan.Pack) -> Launch:
    return lambda call, arguments: getattr(pack, call.op)(**arguments)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chance=st.randoms(use_true_random=False), seed=st.integers(0, 1 << 60))
def test_any_call_equals_the_reference_or_is_declined(
    modules: specplan.Pack, chance: Random, seed: int
) -> None:
    score = run(batch(chance, 2), public(modules), seed)
    assert not score.failures, "\n".join(map(str, score.failures))


def test_many_calls_equal_the_reference_or_are_declined(modules: specplan.Pack) -> None:
    """Two thousand calls from one seed, of which enough are launched and enough declined."""
    answers: Counter[str] = Counter()
    for number in range(8):
        score = run(batch(Random(f"cpu:{number}"), 250), public(modules), number)
        assert not score.failures, "\n".join(map(str, score.failures))
        answers += score.answers
    launched = sum(count for answer, count in answers.items() if answer.endswith("launched"))
    assert 400 < launched < 1600, answers
    for reason in ("argument", "range", "not_in_catalog", "unknown_problem", "device"):
        assert any(answer.endswith(f"declined: {reason}") for answer in answers), answers


# The judgement itself: an op with a mistake must not pass


def all_right(call: fuzzing.Call, arguments: Mapping[str, Any]) -> Any:
    fuzzing.REFERENCES[call.op](**{name: _plain(value) for name, value in arguments.items()})
    return True


def right_calls(count: int) -> list[fuzzing.Call]:
    chance = Random(3)
    calls = [call for call in batch(chance, 8 * count) if not call.changes]
    assert len(calls) >= count
    return calls[:count]


def test_the_reference_itself_passes() -> None:
    score = run(right_calls(20), all_right)
    assert (score.calls, score.failures) == (20, [])


def test_a_wrong_value_is_found_where_it_is() -> None:
    def wrong(call: fuzzing.Call, arguments: Mapping[str, Any]) -> Any:
        all_right(call, arguments)
        tensor = arguments[call.written[-1]]
        tensor[(0,) * tensor.dim()] += 1
        return True

    score = run(right_calls(10), wrong)
    assert [failure.row for failure in score.failures] == list(range(10))
    for failure in score.failures:
        assert "store_next_draft" in failure.what or "kv_offsets" in failure.what


@pytest.mark.parametrize("at", [-4, 0], ids=["before", "after"])
def test_a_write_into_a_guard_is_found(at: int) -> None:
    def stray(call: fuzzing.Call, arguments: Mapping[str, Any]) -> Any:
        all_right(call, arguments)
        view = call.arguments["slots"]
        tensor = arguments["slots"]
        offset = tensor.storage_offset() + (at // 4 if at < 0 else view.extent // 4)
        torch.as_strided(tensor.as_subclass(torch.Tensor), (1,), (1,), offset).add_(1)
        return True

    score = run(right_calls(10), stray)
    assert len(score.failures) == 10
    assert all("a guard" in failure.what for failure in score.failures)


def test_a_write_by_a_declined_call_is_found() -> None:
    def writes(call: fuzzing.Call, arguments: Mapping[str, Any]) -> Any:
        all_right(call, arguments)
        return specplan.Uncertified("scatter", "sm_90a", specplan.Reason.RANGE, "made up")

    assert len(run(right_calls(10), writes).failures) == 10


def test_an_exception_and_a_strange_answer_are_failures() -> None:
    def raises(call: fuzzing.Call, arguments: Mapping[str, Any]) -> Any:
        raise ValueError("made up")

    assert "raised ValueError" in run(right_calls(2), raises).failures[0].what
    assert "answered None" in run(right_calls(2), lambda call, arguments: None).failures[0].what


def test_a_launch_that_the_reference_refuses_is_a_failure() -> None:
    calls = right_calls(1)
    calls[0].arguments["slots"] = fuzzing.View((1,), (1,), kind="none")
    (failure,) = run(calls, lambda call, arguments: True).failures
    assert "the reference raises" in failure.what


def test_a_stray_write_of_a_call_whose_outcome_is_not_defined_is_found() -> None:
    calls = right_calls(10)
    for call in calls:
        call.defined = False
    assert not run(calls, all_right).failures

    def stray(call: fuzzing.Call, arguments: Mapping[str, Any]) -> Any:
        all_right(call, arguments)
        arguments["slots"].add_(1)
        return True

    calls = right_calls(10)
    for call in calls:
        call.defined = False
    assert len(run(calls, stray).failures) == 10


def test_a_call_whose_arguments_share_what_is_written_is_not_judged_by_its_values() -> None:
    """A wide output that lies where the narrow lengths lie reaches over the stores behind them."""
    (call,) = [c for c in right_calls(40) if c.op == "scatter"][:1]
    wide = fuzzing.dense(*call.arguments["lens"].shape, 400)
    call.arguments["next_draft_tokens"] = dataclasses.replace(wide, alias="lens")
    assert call.defined
    fuzzing.place(call, COPY_BYTES, Random(1))
    assert not call.defined
    (other,) = [c for c in right_calls(40) if c.op == "scatter"][:1]
    narrow = fuzzing.dense(*other.arguments["lens"].shape, 1)
    other.arguments["next_draft_tokens"] = dataclasses.replace(narrow, alias="lens")
    fuzzing.place(other, COPY_BYTES, Random(1))
    assert other.defined


# rollback's sequences, over an op that is the reference


def episodes(count: int, seed: int) -> list[fuzzing.Episode]:
    chance = Random(seed)
    geometry = {"planes": 3, "row_bytes": 256, "side_planes": 1, "side_row_bytes": 12}
    found: list[fuzzing.Episode] = []
    while len(found) < count:
        try:
            found.append(fuzzing.episode(chance, geometry, EPISODE_BYTES))
        except fuzzing.DoesNotFit:
            continue
    return found


@pytest.mark.parametrize("mistake", ["", "rollback.gather", "rollback.restore", "rollback.commit"])
def test_rollbacks_sequences_are_judged(mistake: str) -> None:
    made = episodes(24, 11)

    def launch(
        row: int, call: fuzzing.Call, layout: Any, arguments: Mapping[str, Any], rows: Any
    ) -> Any:
        if call.changes:
            return specplan.Uncertified("rollback", "", specplan.Reason.ARGUMENT, "made up")
        fuzzing.apply(call, arguments, layout, made[row], rows, row)
        if call.op == mistake:
            rows.rows[row, 5] += 1
        return True

    score = fuzzing.Score()
    fuzzing.run_episodes(0, made, noise(24, EPISODE_BYTES, 1), launch, HOST, score)
    launched = {answer.partition(":")[0] for answer in score.answers if "launched" in answer}
    assert launched == {"rollback.gather", "rollback.restore", "rollback.commit"}
    if not mistake:
        assert not score.failures, "\n".join(map(str, score.failures))
    else:
        assert len(score.failures) > 0
        assert all("a guard" in failure.what for failure in score.failures)


def test_a_rollback_that_does_nothing_is_found() -> None:
    """Sequences in which nothing would have to change show nothing."""
    made = episodes(24, 12)
    score = fuzzing.Score()
    fuzzing.run_episodes(
        *(0, made, noise(24, EPISODE_BYTES, 1), lambda *arguments: True, HOST, score)
    )
    assert len(score.failures) > 12


# Which batches the processes on a GPU run


@pytest.fixture(scope="module")
def device_fuzz() -> Any:
    path = Path(__file__).resolve().parent.parent / "device" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("device_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks itself up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("jobs", [1, 4, 5, 16])
def test_the_batches_of_all_processes_are_all_batches_and_each_has_every_family(
    device_fuzz: Any, jobs: int
) -> None:
    of_jobs = [
        list(islice(device_fuzz.Numbers(device_fuzz.FAMILIES, job, jobs), 60))
        for job in range(jobs)
    ]
    assert sorted(n for numbers in of_jobs for n in numbers) == list(range(60 * jobs))
    for numbers in of_jobs:
        counts = Counter(map(device_fuzz.family_of, numbers))
        assert set(counts) == set(device_fuzz.FAMILIES)
        assert min(counts.values()) >= 3


def test_a_family_alone_gets_its_own_batches(device_fuzz: Any) -> None:
    chosen = list(islice(device_fuzz.Numbers(("rollback", "gather"), 1, 3), 20))
    assert {device_fuzz.family_of(number) for number in chosen} == {"rollback", "gather"}


def test_a_family_of_which_hardly_anything_is_launched_or_declined_is_named(
    device_fuzz: Any,
) -> None:
    answers = Counter(
        {
            "scatter: launched": 95,
            "scatter: declined: range": 5,
            "gdn_replay.verify: launched": 5,
            "gdn_replay.reset: launched, outcome not defined": 90,
            "gdn_replay.reset: declined: argument": 5,
            "rollback.gather: launched": 50,
            "rollback.gather: declined: argument": 50,
        }
    )
    assert device_fuzz.lopsided(answers) == ["gdn_replay", "scatter"]


def test_a_batch_that_ends_with_an_error_is_a_failure(
    device_fuzz: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*arguments: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(device_fuzz, "batch", breaks)
    score = fuzzing.Score()
    device_fuzz.run(12, 1, None, {}, HOST, score)
    (failure,) = score.failures
    assert failure.batch == 12
    assert "illegal memory access" in failure.what

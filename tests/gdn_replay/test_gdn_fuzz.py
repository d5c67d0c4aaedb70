"""The fuzzer of ``gdn_replay`` without a GPU: random calls of the ops over the compiled host
functions, with the sequential reference for device code, and the fuzzer's judgement over ops with
mistakes in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import specplan
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specplan import library
from specplan import op as call_path

import fuzzing
import reference_pack
from fuzzing import gdn_replay, scenes
from support.shared import Shared
from support.stubs import on_device, plain

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = torch.device("cpu")
PROBLEMS = [{"key_heads": 2, "value_heads": 8}]


@pytest.fixture
def pack(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> specplan.Pack:
    """The compiled pack, on a device on which tensors are only if they say so."""
    directory = reference_pack.built(shared)
    pack, _ = reference_pack.reference_pack(
        directory, tmp_path / "recorder", monkeypatch, every_tensor=False
    )
    pack._prepared |= {(0, "gdn_replay")}
    alike = call_path._alike

    def there(tensor: torch.Tensor, what: str) -> torch.Tensor:
        if tensor.get_device() != 0:
            return alike(tensor, what)
        return on_device(alike(plain(tensor), what))

    monkeypatch.setattr(call_path, "_alike", there)
    monkeypatch.setattr(library, "tvm_ffi", lambda: SimpleNamespace(from_dlpack=lambda t: t))
    return pack


def run(
    launch: Callable[[scenes.Scene], scenes.Launch],
    seed: str,
    count: int,
    keep: Callable[[fuzzing.Call], bool] = lambda call: True,
    wrap: Callable[[torch.Tensor], torch.Tensor] = on_device,
) -> scenes.Run:
    """Some scenes with ten calls each."""

    def scene_of(chance: Random) -> scenes.Scene:
        return gdn_replay.scene(chance, PROBLEMS, HOST, most=5)

    return scenes.run_scenes(
        gdn_replay.FAMILY, scene_of, gdn_replay.any_call, launch, seed, count, keep, wrap
    )


# What the stand-in for device code does with an output whose rows are one.
@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
def test_many_calls_equal_the_reference_or_are_declined(pack: specplan.Pack) -> None:
    def public(scene: scenes.Scene) -> scenes.Launch:
        return lambda call, given: gdn_replay.launch(pack.gdn_replay, call, given)

    score = run(public, "cpu", 50).score
    assert not score.failures, "\n".join(map(str, score.failures))
    assert score.calls == 500
    for op in gdn_replay.OPS:
        of_op = {a: n for a, n in score.answers.items() if a.startswith(f"gdn_replay.{op}:")}
        launched = of_op[f"gdn_replay.{op}: launched"]
        assert 0.2 < launched / sum(of_op.values()) < 0.9, of_op
    for reason in ("argument", "not_in_catalog", "device", "another committer"):
        assert any(answer.endswith(f"declined: {reason}") for answer in score.answers), reason


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chance=st.randoms(use_true_random=False))
def test_any_call_equals_the_reference_or_is_declined(pack: specplan.Pack, chance: Random) -> None:
    score, verdicts = fuzzing.Score(), scenes.Verdicts(0)
    scene = gdn_replay.scene(chance, PROBLEMS, HOST, most=3)
    calls = [gdn_replay.any_call(chance, scene) for _ in range(3)]
    scenes.run_scene(
        *(0, scene, calls, gdn_replay.FAMILY),
        lambda call, given: gdn_replay.launch(pack.gdn_replay, call, given),
        *(verdicts, score, on_device),
    )
    verdicts.settle(score)
    assert not score.failures, "\n".join(map(str, score.failures))


def test_a_seed_names_the_calls() -> None:
    shown = []
    for _ in range(2):
        chance = Random("again")
        scene = gdn_replay.scene(chance, PROBLEMS, HOST, most=5)
        shown.append([str(gdn_replay.any_call(chance, scene)) for _ in range(40)])
        assert any("is on the CPU" in call for call in shown[0])
    assert shown[0] == shown[1]


# The judgement itself: an op with a mistake must not pass


def as_made(call: fuzzing.Call) -> bool:
    """A call that nobody has spoilt, over at least one row, and that commits for itself."""
    return not call.changes and not gdn_replay.rival(call) and not gdn_replay.FAMILY.idle(call)


def right(scene: scenes.Scene) -> scenes.Launch:
    def launch(call: fuzzing.Call, given: Mapping[str, Any]) -> Any:
        gdn_replay.FAMILY.expect(scene, call, given)
        return True

    return launch


def mistaken(
    mistake: Callable[[scenes.Scene, fuzzing.Call, Mapping[str, Any]], Any],
) -> Callable[[scenes.Scene], scenes.Launch]:
    """The reference, and then a mistake, whose answer is the op's unless it is None."""

    def of(scene: scenes.Scene) -> scenes.Launch:
        def launch(call: fuzzing.Call, given: Mapping[str, Any]) -> Any:
            right(scene)(call, given)
            answer = mistake(scene, call, given)
            return True if answer is None else answer

        return launch

    return of


def judged(
    launch: Callable[[scenes.Scene], scenes.Launch],
    op: str = "",
    keep: Callable[[fuzzing.Call], bool] = as_made,
) -> scenes.Run:
    return run(
        launch,
        "judge",
        8,
        lambda call: keep(call) and call.op.endswith(op),
        wrap=lambda tensor: tensor,
    )


def test_the_reference_itself_passes() -> None:
    score = judged(right)
    assert score.score.calls > 25
    assert not score.failures, "\n".join(map(str, score.failures))


@pytest.mark.parametrize("buffer", ["out", "rec_u", "rec_k", "rec_G", "state"])
def test_a_wrong_value_is_found_where_it_is(buffer: str) -> None:
    """Whether the value is one that the op writes or one that it must not."""

    def wrong(scene: scenes.Scene, call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given[buffer].nan_to_num_()
        given[buffer].add_(0.125)

    score = judged(mistaken(wrong), "verify")
    assert score.all_fail()
    assert all(buffer in failure.what for failure in score.failures)


def test_an_error_just_beyond_the_bound_is_found_and_one_within_is_not() -> None:
    def off(by: float) -> Callable[[scenes.Scene], scenes.Launch]:
        def change(scene: scenes.Scene, call: fuzzing.Call, given: Mapping[str, Any]) -> None:
            out = given["out"]
            live = (given["slot"] >= 0)[:, None, None, None]
            scale = call.arguments["scale"]
            scale = 1.0 if scale is None else abs(scale) / gdn_replay.DEFAULT_SCALE
            out.copy_(torch.where(live, out.float() + by * scale, out.float()))

        return mistaken(change)

    def fits(call: fuzzing.Call) -> bool:
        return as_made(call) and call.arguments.get("scale") != 0

    assert not judged(off(5e-4), "verify", fits).failures
    # A call of padding rows alone has no error.
    assert len(judged(off(2e-3), "verify", fits).failures) >= 4


@pytest.mark.parametrize("op", ["advance", "reset"])
def test_a_wrong_cursor_is_found(op: str) -> None:
    def wrong(scene: scenes.Scene, call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given["hist_len"][-1] += 1

    score = judged(mistaken(wrong), op)
    assert score.failures
    assert all("hist_len" in failure.what for failure in score.failures)


@pytest.mark.parametrize("op", gdn_replay.OPS)
def test_an_op_that_does_nothing_is_found(op: str) -> None:
    score = judged(lambda scene: lambda call, given: True, op)
    assert len(score.failures) >= 4


@pytest.mark.parametrize("op", gdn_replay.OPS)
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_write_into_a_guard_is_found(op: str, side: str) -> None:
    def stray(scene: scenes.Scene, call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        home = scene.facts["homes"]["hist_len"]
        first, end = scenes.span(home)
        raw = given["hist_len"].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(raw)
        whole[first - 1 if side == "before" else end] ^= 1

    score = judged(mistaken(stray), op)
    assert len(score.failures) >= 4
    assert all("beside what it may write" in failure.what for failure in score.failures)


def test_a_write_to_a_padding_row_and_to_an_input_is_found() -> None:
    def pads(scene: scenes.Scene, call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given["out"][given["slot"] < 0] = 1e-4

    assert judged(mistaken(pads), "verify").failures

    def reads(scene: scenes.Scene, call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given["q"].view(torch.int16).bitwise_xor_(1)

    ran = judged(mistaken(reads), "verify")
    failures = ran.failures
    assert ran.all_fail()
    assert all("in q" in f.what or "in k" in f.what for f in failures)


def test_a_write_by_a_declined_call_is_found() -> None:
    refused = specplan.Uncertified("gdn_replay", "", specplan.Reason.ARGUMENT, "made up")
    score = judged(mistaken(lambda scene, call, given: refused))
    assert score.all_fail()
    quiet = judged(lambda scene: lambda call, given: refused)
    assert quiet.score.calls > 25
    assert not quiet.failures


def test_a_second_committer_that_is_let_through_is_found() -> None:
    def rivals(call: fuzzing.Call) -> bool:
        return not call.changes and gdn_replay.rival(call) and not gdn_replay.FAMILY.idle(call)

    score = judged(right, keep=rivals)
    assert score.failures
    assert all("commits although" in failure.what for failure in score.failures)


def test_an_exception_and_a_strange_answer_are_failures() -> None:
    def raises(call: fuzzing.Call, given: Mapping[str, Any]) -> Any:
        raise ValueError("made up")

    assert "raised ValueError" in judged(lambda scene: raises).failures[0].what
    nothing = judged(lambda scene: lambda call, given: None)
    assert "answered None" in nothing.failures[0].what


def test_a_stray_write_of_a_call_whose_outcome_is_not_defined_is_found() -> None:
    def spoilt(call: fuzzing.Call) -> bool:
        call.defined = False
        return as_made(call)

    assert not judged(right, keep=spoilt).failures

    def stray(scene: scenes.Scene, call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given["hist_len" if call.op.endswith("verify") else "bank"][0] ^= 1

    verify = judged(mistaken(stray), "verify", keep=spoilt)
    assert verify.all_fail()
    assert judged(mistaken(stray), "materialize", keep=spoilt).failures

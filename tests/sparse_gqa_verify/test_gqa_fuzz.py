"""The fuzzer of ``sparse_gqa_verify`` without a GPU: random calls of the op over imagined compiled
functions that run the reference, and the fuzzer's judgement over ops with mistakes in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan.sparse_gqa_verify import SparseGqaVerify  # noqa: E402

import fuzzing  # noqa: E402
from fuzzing import scenes, sparse_gqa_verify  # noqa: E402

from support.stubs import OnlyOnDevice, on_device  # noqa: E402  isort: skip
from test_gqa_op import SMALL, functions, pack  # noqa: E402, F401  isort: skip

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = torch.device("cpu")


def run(
    launch: scenes.Launch,
    seed: str,
    count: int,
    words: Callable[..., int],
    keep: Callable[[fuzzing.Call], bool] = lambda call: True,
    wrap: Callable[[torch.Tensor], torch.Tensor] = on_device,
) -> scenes.Run:
    """Some scenes with ten calls each."""
    family = sparse_gqa_verify.FAMILY

    def scene_of(chance: Random) -> scenes.Scene:
        return sparse_gqa_verify.scene(chance, [dict(SMALL)], HOST, words, most=1)

    any_call = sparse_gqa_verify.any_call
    return scenes.run_scenes(
        family, scene_of, any_call, lambda scene: launch, seed, count, keep, wrap
    )


@pytest.fixture
def op(pack: specplan.Pack) -> SparseGqaVerify:  # noqa: F811
    """The op, on a device on which tensors are only if they say so."""
    (arch_pack,) = pack._packs.values()
    arch_pack.functions = {s: OnlyOnDevice(f) for s, f in arch_pack.functions.items()}
    pack.sparse_gqa_verify.op._absent[0] = (on_device(torch.empty(0)),)
    return pack.sparse_gqa_verify


def public(op: SparseGqaVerify) -> scenes.Launch:
    return lambda call, given: fuzzing.through(op, call.way, **given)


def test_many_calls_equal_the_reference_or_are_declined(op: SparseGqaVerify) -> None:
    score = run(public(op), "cpu", 50, sparse_gqa_verify.words_of(op)).score
    assert not score.failures, "\n".join(map(str, score.failures))
    assert score.calls == 500
    launched = score.answers["sparse_gqa_verify: launched"]
    assert 0.2 < launched / score.calls < 0.9, score.answers
    for reason in ("argument", "range", "not_in_catalog", "unknown_problem", "device"):
        assert f"sparse_gqa_verify: declined: {reason}" in score.answers, score.answers


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chance=st.randoms(use_true_random=False))
def test_any_call_equals_the_reference_or_is_declined(op: SparseGqaVerify, chance: Random) -> None:
    score, verdicts = fuzzing.Score(), scenes.Verdicts(0)
    words = sparse_gqa_verify.words_of(op)
    scene = sparse_gqa_verify.scene(chance, [dict(SMALL)], HOST, words, most=1)
    calls = [sparse_gqa_verify.any_call(chance, scene) for _ in range(3)]
    scenes.run_scene(
        *(0, scene, calls, sparse_gqa_verify.FAMILY, public(op), verdicts, score, on_device)
    )
    verdicts.settle(score)
    assert not score.failures, "\n".join(map(str, score.failures))


# The judgement itself: an op with a mistake must not pass


def as_made(call: fuzzing.Call) -> bool:
    return not call.changes and not sparse_gqa_verify.FAMILY.idle(call)


def right(call: fuzzing.Call, given: Mapping[str, Any]) -> Any:
    given["out"].copy_(sparse_gqa_verify.FAMILY.expect(None, call, given))
    return True


def mistaken(mistake: Callable[[fuzzing.Call, Mapping[str, Any]], Any]) -> scenes.Launch:
    """The reference, and then a mistake, whose answer is the op's unless it is None."""

    def launch(call: fuzzing.Call, given: Mapping[str, Any]) -> Any:
        right(call, given)
        answer = mistake(call, given)
        return True if answer is None else answer

    return launch


def judged(
    launch: scenes.Launch, keep: Callable[[fuzzing.Call], bool] = as_made, words: int = 0
) -> scenes.Run:
    return run(launch, "judge", 8, lambda *_, **__: words, keep, wrap=lambda tensor: tensor)


def whole(given: Mapping[str, Any]) -> torch.Tensor:
    raw: torch.Tensor = torch.empty(0, dtype=torch.uint8)
    return raw.set_(given["q"].untyped_storage())


def test_the_reference_itself_passes() -> None:
    score = judged(right)
    assert score.score.calls > 20
    assert not score.failures, "\n".join(map(str, score.failures))


def test_a_wrong_value_is_found() -> None:
    def wrong(call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given["out"][0, 0, 0] += 8.0

    failures = judged(mistaken(wrong)).failures
    # Where all of a scene's first rows list a NaN, nothing is wrong.
    assert len(failures) >= 6
    assert all("out, largest error" in f.what or "should be 0" in f.what for f in failures)


def test_an_error_beyond_the_bounds_is_found_and_a_rounding_is_not() -> None:
    def scaled(by: float) -> scenes.Launch:
        def change(call: fuzzing.Call, given: Mapping[str, Any]) -> None:
            given["out"].mul_(by)

        return mistaken(change)

    assert not judged(scaled(1 + 2**-9)).failures
    assert len(judged(scaled(1 + 2**-6)).failures) >= 4


def test_a_row_that_should_be_empty_and_is_not_is_found() -> None:
    def fills(call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        out = given["out"]
        empty = (out == 0).flatten(1).all(1)
        out[empty] = 1e-6

    failures = judged(mistaken(fills)).failures
    assert failures
    assert all("rows that should be 0" in failure.what for failure in failures)


def test_a_nan_where_none_belongs_is_found() -> None:
    def wrong(call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given["out"][-1].masked_fill_(given["out"][-1].isfinite(), torch.nan)

    assert len(judged(mistaken(wrong)).failures) >= 6


def test_an_op_that_does_nothing_is_found() -> None:
    assert judged(lambda call, given: True).all_fail()


@pytest.mark.parametrize("at", ["before the output", "after the workspace", "in the lists"])
def test_a_write_beside_the_output_is_found(at: str) -> None:
    def stray(call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        lists = call.arguments["selected_tokens"]
        byte = {"before the output": 256 - 1, "after the workspace": -1}.get(at, lists.offset)
        whole(given)[byte] ^= 1

    ran = judged(mistaken(stray))
    failures = ran.failures
    assert ran.all_fail()
    assert all("beside what it may write" in failure.what for failure in failures)
    if at == "in the lists":
        assert all("in selected_tokens" in failure.what for failure in failures)


def test_a_write_by_a_declined_call_is_found() -> None:
    refused = specplan.Uncertified("sparse_gqa_verify", "", specplan.Reason.RANGE, "made up")
    assert judged(mistaken(lambda call, given: refused)).all_fail()
    assert not judged(lambda call, given: refused).failures


def test_a_launch_with_too_little_workspace_is_found() -> None:
    ran = judged(right, words=1 << 23)
    failures = ran.failures
    assert ran.all_fail()
    assert all("words of workspace" in failure.what for failure in failures)


def test_a_launch_over_an_input_is_found() -> None:
    def overlaps(call: fuzzing.Call) -> bool:
        call.arguments["out"] = call.arguments["q"]
        return as_made(call)

    ran = judged(lambda call, given: True, overlaps)
    failures = ran.failures
    assert ran.all_fail()
    assert all("out overlaps q" in failure.what for failure in failures)


def test_an_exception_and_a_strange_answer_are_failures() -> None:
    def raises(call: fuzzing.Call, given: Mapping[str, Any]) -> Any:
        raise ValueError("made up")

    assert "raised ValueError" in judged(raises).failures[0].what
    assert "answered None" in judged(lambda call, given: None).failures[0].what


def test_a_stray_write_of_a_call_whose_outcome_is_not_defined_is_found() -> None:
    def spoilt(call: fuzzing.Call) -> bool:
        call.defined = False
        return as_made(call)

    assert not judged(right, spoilt).failures

    def stray(call: fuzzing.Call, given: Mapping[str, Any]) -> None:
        given["request_indices"][0] ^= 1

    assert judged(mistaken(stray), spoilt).all_fail()

"""``examples/step_chain.py`` without a GPU: on the references, and with the compiled code of five
of its ops on an imagined one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.shared import Shared

torch = pytest.importorskip("torch")

from specplan.plans import catalog as catalogs  # noqa: E402

PATH = Path(__file__).resolve().parents[2] / "examples" / "step_chain.py"

CELLS = """\
  scatter:
    problems:
      mtp3: {history: 4, next: 4, draft: 3}
    cells:
      - {problems: [mtp3], requests: 8, tokens: 4, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  step_setup:
    problems:
      group4: {group: 4}
    cells:
      - {problems: [group4], requests: 8, tokens: 4, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  stage:
    problems:
      segments16: {segments: 16}
    cells:
      - {problems: [segments16], requests: 1..16, tokens: 1, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  accept:
    problems:
      class_32k: {vocabulary_k: 32}
    cells:
      - {problems: [class_32k], requests: 8, tokens: 4, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
  draft_step:
    problems:
      class_32k: {vocabulary_k: 32}
    cells:
      - {problems: [class_32k], requests: 8, tokens: 1, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
"""


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_chain", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pack of the ops, and the simulator under it."""
    for needed in ("numpy", "cutlass"):
        pytest.importorskip(needed)
    from support.simulated_pack import simulated_pack

    with simulated_pack(shared, tmp_path_factory.mktemp("chain"), "chain", CELLS) as made:
        yield made


def test_without_a_gpu_it_says_so_and_runs_on_the_references() -> None:
    done = subprocess.run(
        [sys.executable, str(PATH)], capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no GPU: the same chain on the references" in done.stdout
    assert "20 chained steps are those of the loop" in done.stdout


def test_the_steps_accept_reject_and_commit(example: ModuleType) -> None:
    seen = example.on_references()
    assert seen["accepted"] > 150 and seen["rejected"] > 150 and seen["commits"] > 8


def _wrong_counts(op: Callable[..., None]) -> Callable[..., None]:
    def accept(*arguments: Any, **named: Any) -> None:
        op(*arguments, **named)
        arguments[2][0] += 1

    return accept


def _wrong_draft(op: Callable[..., None]) -> Callable[..., None]:
    def draft_step(*arguments: Any, **named: Any) -> None:
        op(*arguments, **{**named, "slot": None})

    return draft_step


def _nothing(op: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **named: None


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [
        ("accept", _wrong_counts), ("draft_step", _wrong_draft),
        *((name, _nothing) for name in ("commit", "gather", "advance", "scatter", "step_setup")),
    ],
)  # fmt: skip
def test_an_op_that_is_wrong_is_noticed(
    example: ModuleType,
    name: str,
    spoilt: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = example.referenced

    def referenced(s: Any) -> Any:
        ops = right(s)
        setattr(ops, name, spoilt(getattr(ops, name)))
        return ops

    monkeypatch.setattr(example, "referenced", referenced)
    with pytest.raises(AssertionError, match="loop"):
        example.on_references()


def test_every_op_of_the_chain_has_a_cell_in_the_catalog(example: ModuleType) -> None:
    from specplan.rollback import describe

    layout, _ = describe(example.State("cpu").planes)
    catalog = catalogs.load()
    b, t = example.B, example.T
    for family, geometry, requests, tokens, dtype in (
        ("stage", {"segments": 16}, 4, 1, "int32"),
        ("step_setup", {"group": example.GROUP}, b, t, "int32"),
        ("rollback", layout.geometry, b, t, "int32"),
        ("accept", {"vocabulary_k": 32}, b, t, "bf16"),
        ("gdn_replay", {"key_heads": 16, "value_heads": 32}, b, t, "bf16"),
        ("draft_step", {"vocabulary_k": 32}, b, 1, "bf16"),
        ("scatter", {"history": t, "next": t, "draft": t - 1}, b, t, "int32"),
    ):
        problems = [name for name, held in catalog.problems[family].items() if held == geometry]
        found = [
            block
            for block in catalog.blocks
            if block.family == family and set(problems) & set(block.problems)
            and requests in block.requests and tokens in block.tokens and dtype in block.dtypes
        ]  # fmt: skip
        assert found, family


def test_the_compiled_ops_make_the_same_chain(example: ModuleType, setup: Any) -> None:
    """stage, step_setup, accept, draft_step and scatter as compiled; rollback, whose tables the
    simulator's launches do not follow, and the cursors on the references.
    """
    launched: dict[str, int] = {}

    def simulated(family: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with setup.on_device() as pack:
                answer = getattr(pack, family)(*arguments, **named)
            assert answer, answer
            launched[family] = launched.get(family, 0) + len(setup.launches)
            return answer

        return call

    right = example.referenced

    def mixed(s: Any) -> Any:
        ops = right(s)
        for family in ("stage", "step_setup", "accept", "draft_step", "scatter"):
            setattr(ops, family, simulated(family))
        return ops

    example.referenced = mixed
    assert example.on_references()["commits"] > 8
    assert launched == {
        **dict.fromkeys(("stage", "step_setup", "accept", "scatter"), 20), "draft_step": 60,
    }  # fmt: skip

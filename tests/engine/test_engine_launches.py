"""The engine on specplan's launches: compiled host functions and PTX on an imagined GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.shared import Shared

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("cutlass")

#: A model of one layer of each kind, steps of one request and two rows.
CELLS = """\
  step_setup:
    problems:
      group1: {group: 1}
    cells:
      - {problems: [group1], requests: 1, tokens: 2, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  accept:
    problems:
      class_32k: {vocabulary_k: 32}
    cells:
      - {problems: [class_32k], requests: 1, tokens: 2, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
  conv_verify:
    problems:
      heads_1_2: {channels: 512}
    cells:
      - {problems: [heads_1_2], requests: 1, tokens: 2, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
  gdn_replay:
    problems:
      heads_1_2: {key_heads: 1, value_heads: 2}
    cells:
      - {problems: [heads_1_2], requests: 1, tokens: 2, splits: auto, dtypes: [fp32],
         candidate: [sm_90a], why: tests}
  sparse_gqa_verify:
    problems:
      qsa_3_1: {q_heads: 3, kv_heads: 1, head_dim: 256, page_size: 32, selected: 2051}
    cells:
      - {problems: [qsa_3_1], requests: 1, tokens: 2, splits: 1, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
      - {problems: [qsa_3_1], requests: 1, tokens: 2, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
"""


@pytest.fixture(scope="module")
def setup(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pack of a step's ops, and the simulator under it."""
    pytest.importorskip("numpy")
    from support.simulated_pack import simulated_pack

    with simulated_pack(shared, tmp_path_factory.mktemp("engine"), "engine", CELLS) as made:
        yield made


@pytest.fixture(scope="module")
def small(model: Any) -> Any:
    from engine.model import HybridModel, load

    changes = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 3,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 64,
    }
    return HybridModel(load("tiny", torch.device("cpu"), **changes))


def engine_of(small: Any, ops: Any, drafter: Any) -> Any:
    from engine.engine import Engine

    return Engine(small, drafter, tokens=2, slots=1, pages=4, batches=(1,), ops=ops)


def test_launches_say_what_the_references_say(setup: Any, small: Any) -> None:
    from engine.drafting import Oracle
    from engine.engine import by_the_models_own_code
    from engine.ops import PackOps

    prompt = [5, 11, 7, 90]
    answer = prompt + by_the_models_own_code(small, prompt, 12)[0]

    def oracle() -> Any:
        return Oracle({0: answer}, 0.7, 97, 3)

    plain = engine_of(small, None, oracle())
    wanted = plain.submit(prompt, 5)
    plain.run()
    with setup.on_device() as pack:
        engine = engine_of(small, PackOps(pack), oracle())
        request = engine.submit(prompt, 5)
        engine.step()
        first = [launched.symbol.partition("__")[0] for launched in setup.launches]
        engine.run()
    assert request.generated and len(request.generated) == 5
    assert engine.counts.steps >= 3
    # One launch each between the matrix products; the attention's second one merges its splits.
    names = [name for name in first if not name.startswith("sparse")]
    assert names == ["step_setup", "conv_verify", "gdn_replay_verify", "accept"], first
    assert request.generated == wanted.generated


def test_a_pack_without_the_cells_is_refused(setup: Any, small: Any) -> None:
    from engine.drafting import PromptLookup
    from engine.engine import Engine
    from engine.ops import PackOps

    with setup.on_device() as pack, pytest.raises(ValueError, match="does not hold") as raised:
        Engine(small, PromptLookup(), tokens=4, slots=1, batches=(1,), ops=PackOps(pack))
    for family in ("step_setup", "accept", "gdn_replay", "conv_verify", "sparse_gqa_verify"):
        assert family in str(raised.value)
    assert "tokens=4" in str(raised.value)

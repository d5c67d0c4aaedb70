"""Deployments derived from a model's config: every number that servers have printed in public."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from specplan.plans import catalog as catalogs
from specplan.plans import deployment, ranges, servers
from specplan.plans.catalog import Catalog
from specplan.plans.servers import Linear, ModelError, Setup, derive, graph_requests, vllm_block

MODELS = Path(__file__).resolve().parent.parent / "models"


@pytest.fixture(scope="module")
def shipped() -> Catalog:
    return catalogs.load()


def config(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return body


def derived(name: str, server: str = "vllm", **given: Any) -> servers.Derived:
    return derive(config(name), Setup(server, **{"max_requests": 256, **given}))


def block(model: str, **given: Any) -> int:
    """vLLM's block for any model with linear layers, dense attention too."""
    body = config(model)
    text = body.get("text_config", body)
    linear = servers.read_model(body).linear
    assert linear is not None
    return vllm_block(linear, text["num_key_value_heads"], text["head_dim"], **given)


# vLLM's block


@pytest.mark.parametrize(
    ("kv_dtype", "state_dtype", "drafts", "blocks"),
    [
        ("auto", "auto", 3, (1600, 1600, 800, 400)),
        ("fp8", "auto", 3, (3200, 3200, 1600, 800)),
        ("auto", "auto", 0, (1568, 1568, 784, 400)),
        ("bfloat16", "bfloat16", 3, (832, 832, 416, 208)),
    ],
)
def test_the_blocks_of_the_flash_model_by_tensor_parallel(
    kv_dtype: str, state_dtype: str, drafts: int, blocks: tuple[int, ...]
) -> None:
    """The state is fp32 because the config asks for it."""
    given = {"kv_dtype": kv_dtype, "state_dtype": state_dtype, "drafts": drafts}
    found = [derived("qwen3.8-flash-next", tp=tp, **given).page for tp in (1, 2, 4, 8)]
    assert tuple(found) == blocks


@pytest.mark.parametrize(
    ("seen", "model", "given"),
    [
        # Printed by servers in public, with what was given there.
        (1616, "qwen3.6-27b", {"kv_dtype": "fp8_e4m3", "drafts": 4}),
        (1616, "qwen3.8-flash-next", {"kv_dtype": "bf16", "drafts": 5}),
        (1648, "qwen3.6-27b", {"kv_dtype": "fp8_e4m3", "drafts": 7}),
        (480, "qwen3.6-27b", {"kv_dtype": "bf16", "state_dtype": "bf16", "drafts": 15}),
        (448, "qwen3.6-27b", {"kv_dtype": "bf16", "state_dtype": "bf16", "drafts": 7}),
        (832, "qwen3.6-27b", {"kv_dtype": "bf16", "drafts": 7}),
        (800, "qwen3.6-27b", {"kv_dtype": "bf16", "drafts": 1}),
        (784, "qwen3.8-flash-next", {"kv_dtype": "bf16", "tp": 4, "drafts": 0}),
        (544, "qwen3-next-80b", {"kv_dtype": "bf16", "state_dtype": "bf16", "drafts": 0}),
        (272, "qwen3-next-80b", {"kv_dtype": "bf16", "state_dtype": "bf16", "tp": 4, "drafts": 0}),
        (1072, "qwen3-next-80b", {"kv_dtype": "fp8_e4m3", "state_dtype": "bf16", "drafts": 0}),
        (1072, "qwen3-next-80b", {"kv_dtype": "bf16", "drafts": 3}),
        (544, "qwen3-next-80b", {"kv_dtype": "bf16", "tp": 4, "drafts": 3}),
        (272, "qwen3-next-80b", {"kv_dtype": "bf16", "tp": 8, "drafts": 3}),
        (528, "qwen3.5-4b", {"kv_dtype": "bf16", "drafts": 0}),
        (1056, "qwen3.5-35b-a3b", {"kv_dtype": "bf16", "drafts": 0}),
        (2176, "qwen3.5-397b", {"kv_dtype": "bf16", "drafts": 7}),
    ],
)
def test_blocks_that_servers_have_printed(seen: int, model: str, given: dict[str, Any]) -> None:
    assert block(model, **{"tp": 1, "state_dtype": "fp32", **given}) == seen


def test_the_block_of_a_page_that_holds_records_too() -> None:
    """1280 was seen with a replay kernel whose records lie in the page of recurrent state."""
    given = {"tp": 1, "kv_dtype": "bf16", "state_dtype": "fp32", "drafts": 3}
    assert block("qwen3.5-35b-a3b", **given, records=True) == 1280
    linear = Linear(16, 32, 128, 128, 4, None)
    u_and_k = 2 * 16 * 128 * 2 * (32 + 16)
    assert servers.record_bytes(linear, 1) == u_and_k + 2 * 16 * 4 * 32
    assert servers.record_bytes(linear, 4) * 4 == servers.record_bytes(linear, 1)


@given(
    keys=st.sampled_from([2, 4, 8, 16]),
    ratio=st.integers(1, 4),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2]),
    drafts=st.integers(0, 16),
    kv_dtype=st.sampled_from(["bf16", "fp8_e4m3", "nvfp4"]),
    state_dtype=st.sampled_from(["bf16", "fp32"]),
    records=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_block_is_the_least_multiple_of_16_that_holds_the_state(
    keys: int,
    ratio: int,
    kv_heads: int,
    tp: int,
    drafts: int,
    kv_dtype: str,
    state_dtype: str,
    records: bool,
) -> None:
    """By counting elements of the tensors that the block must hold."""
    linear = Linear(keys, keys * ratio, 128, 128, 4, None)
    found = vllm_block(
        linear,
        kv_heads,
        256,
        tp=tp,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        drafts=drafts,
        records=records,
    )
    rank_keys, rank_values = keys / tp, keys * ratio / tp
    held = 2 * (3 + drafts) * 128 * (2 * rank_keys + rank_values)
    held += rank_values * 128 * 128 * {"bf16": 2, "fp32": 4}[state_dtype]
    if records:
        held += 2 * 16 * (rank_values * (128 * 2 + 4) + rank_keys * 128 * 2)
    token = 2 * max(kv_heads // tp, 1) * 256
    token *= {"bf16": 2.0, "fp8_e4m3": 1.0, "nvfp4": 0.5 + 1 / 16}[kv_dtype]
    assert found % 16 == 0
    assert (found - 16) * token < held <= found * token


# Batches


@pytest.mark.parametrize(
    ("server", "drafts", "most", "sizes"),
    [
        ("vllm", 3, 1024, "1..2, 4..64/2, 68..128/4"),
        ("vllm", 1, 1024, "1..2, 4..128/4, 136..256/8"),
        ("vllm", 0, 1024, "1..2, 4, 8..256/8, 272..512/16"),
        ("vllm", 3, 65, "1..2, 4..64/2, 68"),
        ("vllm", 3, 1, "1"),
        ("sglang", 3, 1024, "1..8, 10..32/2, 40..64/4, 72..256/8"),
        ("sglang", 3, 65, "1..8, 10..32/2, 40..64/4, 65"),
        ("sglang", 0, 23, "1..2, 4..16/4, 23"),
        ("trtllm", 3, 256, ""),
    ],
)
def test_the_batch_sizes_of_graphs(server: str, drafts: int, most: int, sizes: str) -> None:
    assert ranges.spell(graph_requests(Setup(server, most, drafts=drafts))) == sizes


def test_blackwell_captures_twice_the_tokens() -> None:
    setup = Setup("vllm", 1024, drafts=3, archs=("sm_100a",))
    assert graph_requests(setup)[-1] == 256


@given(
    server=st.sampled_from(servers.SERVERS),
    drafts=st.integers(0, 7),
    most=st.integers(1, 1500),
    tp=st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=150, deadline=None)
def test_every_batch_up_to_the_most_is_reachable_or_padded_to_one_that_is(
    shipped: Catalog, server: str, drafts: int, most: int, tp: int
) -> None:
    """The written deployment holds each batch size: at its own size, or padded to a graph's."""
    setup = Setup(server, most, tp=tp, drafts=drafts)
    text = derive(config("qwen3.8-flash-next"), setup).text
    found = deployment.loads(text, shipped)
    graphs = graph_requests(setup)
    assert set(graphs) <= set(found.requests)
    for batch in range(1, most + 1):
        padded = next((size for size in graphs if size >= batch), batch)
        assert padded in found.requests, batch
    assert found.tokens == (drafts + 1,)


# Deployments


def test_a_deployment_is_read_back_with_the_shards_of_a_rank(shipped: Catalog) -> None:
    found = derived("qwen3.8-flash-next", tp=4, kv_dtype="fp8", drafts=3)
    assert found.families == {
        "gdn_replay": {"key_heads": 4, "value_heads": 12, "dtype": "fp32"},
        "sparse_gqa_verify": {
            "q_heads": 6,
            "kv_heads": 1,
            "head_dim": 256,
            "page_size": 1600,
            "selected": 2051,
            "dtype": "fp8_e4m3",
        },
    }
    assert yaml.safe_load(found.text)["families"] == found.families
    uses = deployment.loads(found.text, shipped).uses
    assert {u.family: {**u.geometry, "dtype": u.dtype} for u in uses} == found.families
    assert "each K/V head is replicated on 2 ranks" in found.notes


def test_trtllm_has_the_stores_of_its_sampler_and_rolls_back_index_keys() -> None:
    found = derived("qwen3.8-flash-next", "trtllm", kv_dtype="nvfp4", drafts=3).families
    assert found["scatter"] == {"history": 4, "next": 4, "draft": 3}
    assert found["gather"] == {"next": 4, "draft": 3}
    assert found["rollback"] == {
        "planes": 12,
        "row_bytes": 256,
        "side_planes": 1,
        "side_row_bytes": 12,
        "dtype": "int32",
    }
    assert (found["sparse_gqa_verify"]["page_size"], found["sparse_gqa_verify"]["dtype"]) == (
        32,
        "nvfp4",
    )
    assert set(derived("qwen3.6-27b", "trtllm").families) == {"gdn_replay"}


def test_servers_differ_in_the_state_where_the_model_says_nothing() -> None:
    states = {
        server: derived("qwen3-next-80b", server).families["gdn_replay"]["dtype"]
        for server in servers.SERVERS
    }
    assert states == {"vllm": "bf16", "sglang": "fp32", "trtllm": "bf16"}
    assert derived("qwen3.6-27b").families["gdn_replay"]["dtype"] == "fp32"
    given = derived("qwen3.6-27b", state_dtype="float16").families["gdn_replay"]["dtype"]
    assert given == "fp16"


def test_holes_name_the_view_that_would_reach_a_problem(shipped: Catalog, tmp_path: Path) -> None:
    """Certified pages if they divide the block, others if only they do."""
    for kv_dtype, drafts, remainder, page in (
        *(("fp8", 3, 0, "32 (qsa_24_2)"), ("auto", 5, 16, "16 (qsa_24_2_page16)")),
    ):
        setup = Setup("vllm", 8, kv_dtype=kv_dtype, drafts=drafts)
        found = derive(config("qwen3.8-flash-next"), setup)
        assert found.page is not None and found.page % 32 == remainder
        answer = servers.answer(found, setup, shipped, tmp_path, [])
        holes = [hole for hole in answer.holes if hole.cell.family == "sparse_gqa_verify"]
        said = f"a view that cuts its pages into pages of {page}"
        assert holes and all(said in hole.reason for hole in holes)
    assert not any("a view" in hole.reason for hole in holes_of_page(shipped, tmp_path, 24))


def holes_of_page(shipped: Catalog, tmp_path: Path, page: int) -> list[Any]:
    """The holes of a server with pages of a size that no page of the catalog divides."""
    setup = Setup("trtllm", 8, kv_dtype="fp8", drafts=3, page=page)
    found = derive(config("qwen3.8-flash-next"), setup)
    answer = servers.answer(found, setup, shipped, tmp_path, [])
    holes = [hole for hole in answer.holes if hole.cell.family == "sparse_gqa_verify"]
    assert holes
    return holes


def test_a_block_that_vllm_refuses_is_noted() -> None:
    (note,) = (n for n in derived("qwen3.8-flash-next", drafts=5).notes if "does not start" in n)
    assert "its ring of 12 raw index keys must divide the block of 1616 tokens" in note
    assert not any("not start" in n for n in derived("qwen3.8-flash-next", drafts=3).notes)


# Models that specplan does not serve


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("kimi-linear-48b", ("Kimi delta attention", "latent K/V cache (MLA)")),
        ("nemotron-h", ("Mamba2",)),
        ("falcon-h1", ("Mamba2",)),
        ("olmo-hybrid", ("allow_neg_eigval",)),
        ("deepseek-v3.2", ("attends to chosen tokens over a latent K/V cache",)),
        ("deepseek-v4", ("sparse attention is of a kind",)),
        ("minimax-m2", ("dense and it has no linear layers",)),
    ],
)
@pytest.mark.parametrize("server", servers.SERVERS)
def test_an_unserved_model_says_which_part_is_missing(
    shipped: Catalog, tmp_path: Path, model: str, server: str, said: tuple[str, ...]
) -> None:
    setup = Setup(server, 64, drafts=3)
    found = derive(config(model), setup)
    assert (found.text, found.families) == ("", {})
    assert len(found.unserved) == len(said)
    for part, sentence in zip(said, found.unserved, strict=True):
        assert part in sentence
    answer = servers.answer(found, setup, shipped, tmp_path, [])
    assert not answer.holds
    assert list(answer.complaints) == list(found.unserved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "a\nfamilies: {}\n"),
        ("mamba_ssm_dtype", "fp32}"),
        ("mamba_ssm_dtype", ["float32"]),
        ("mamba_ssm_dtype", "a: b"),
        ("layer_types", 5),
        ("dtype", "x, y: z"),
    ],
)
def test_no_text_of_a_config_becomes_part_of_the_deployments_structure(
    shipped: Catalog, key: str, value: Any
) -> None:
    body = config("qwen3.8-flash-next")
    body["text_config"][key] = value
    try:
        found = derive(body, Setup("vllm", 8))
    except ModelError as error:
        assert repr(value) in str(error) or key in str(error)
        return
    wanted = deployment.loads(found.text, shipped)
    assert [use.family for use in wanted.uses] == ["gdn_replay", "sparse_gqa_verify"]


def test_heads_of_another_width_are_a_part_that_is_missing() -> None:
    body = config("qwen3.6-27b")
    body["text_config"]["linear_key_head_dim"] = 64
    (sentence,) = derive(body, Setup("vllm", 8)).unserved
    assert "heads of 64/128" in sentence


def test_vllm_has_no_nvfp4_cache_for_chosen_tokens(shipped: Catalog, tmp_path: Path) -> None:
    setup = Setup("vllm", 8, kv_dtype="nvfp4")
    found = derive(config("qwen3.8-flash-next"), setup)
    assert set(found.families) == {"gdn_replay"}
    assert not servers.answer(found, setup, shipped, tmp_path, []).holds


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        ({"linear_num_key_heads": "16"}, {}, "linear_num_key_heads is '16'"),
        ({"linear_num_value_heads": 0}, {}, "linear_num_value_heads is 0"),
        ({"num_key_value_heads": True}, {}, "num_key_value_heads is True"),
        ({"indexer_compress_ratio": None}, {}, "indexer_compress_ratio is None"),
        ({}, {"tp": 3}, "16 key heads do not divide by tensor parallel 3"),
        ({}, {"tp": 0}, "tp is 0"),
        ({}, {"max_requests": 0}, "max_requests is 0"),
        ({}, {"drafts": -1}, "drafts is -1"),
        ({}, {"server": "tgi"}, "server is 'tgi'"),
        ({}, {"kv_dtype": "int3"}, "K/V dtype 'int3' has no size here"),
        ({"num_key_value_heads": 3}, {"tp": 2}, "3 K/V heads do not divide"),
        ({"num_key_value_heads": 3, "num_attention_heads": 24}, {"tp": 8}, "no multiple of 3"),
    ],
)
def test_what_cannot_be_meant_is_a_model_error(
    change: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    body = config("qwen3.8-flash-next")
    body["text_config"].update(change)
    with pytest.raises(ModelError, match=said.replace("/", ".")):
        derive(body, Setup(**{"server": "vllm", "max_requests": 8, **given}))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_config_is_derived_or_refused(shipped: Catalog, data: st.DataObject) -> None:
    """Mutated facts of a real model: a deployment that can be read, a sentence, or ModelError."""
    body = config(data.draw(st.sampled_from(sorted(p.stem for p in MODELS.glob("*.json")))))
    text = body.get("text_config", body)
    for key in data.draw(st.lists(st.sampled_from(sorted(text)), max_size=3, unique=True)):
        if data.draw(st.booleans()):
            del text[key]
        else:
            text[key] = data.draw(JSON_VALUES)
    server = data.draw(st.sampled_from(servers.SERVERS))
    setup = Setup(server, data.draw(st.integers(1, 40)), tp=data.draw(st.sampled_from([1, 2, 4])))
    try:
        found = derive(body, setup)
    except ModelError as error:
        assert str(error)
        return
    assert bool(found.text) == bool(found.families)
    assert found.text or found.unserved
    if found.text:
        try:
            deployment.loads(found.text, shipped)
        except deployment.DeploymentError as error:
            # A dtype of nobody, or heads beyond an integer of the file.
            assert "unknown name" in str(error) or "outside" in str(error)

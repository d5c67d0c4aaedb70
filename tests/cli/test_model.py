"""``specplan coverage --model``: a server's own config in, the answer of ``--deployment`` out."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from specplan.plans import catalog as catalogs
from specplan.plans import deployment, servers

from support import synthetic
from support.synthetic import Place, Ran, specplan

MODELS = Path(__file__).resolve().parent.parent / "models"

#: sm_90a certified, sm_100a a candidate; the geometry is that of the flash model on 8 ranks of
#: SGLang at 3 drafts, and of a page of 64.
CATALOG = (
    synthetic.CATALOG[: synthetic.CATALOG.index("families:")]
    + """\
families:
  gdn_replay:
    problems:
      shard: {key_heads: 2, value_heads: 6}
    cells:
      - {problems: [shard], requests: 1..4, tokens: 4, splits: auto, dtypes: [fp32],
         certified: [sm_90a], candidate: [sm_100a], why: A shard.}
  sparse_gqa_verify:
    problems:
      shard: {q_heads: 3, kv_heads: 1, head_dim: 256, page_size: 64, selected: 2051}
    cells:
      - {problems: [shard], requests: 1..4, tokens: 4, splits: auto, dtypes: [fp8_e4m3],
         certified: [sm_90a], candidate: [sm_100a], why: A shard.}
"""
)
SGLANG = ("--server", "sglang", "--tp", "8", "--kv-dtype", "fp8_e4m3", "--drafts", "3")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Packs of both archs in which every claim holds."""
    root = tmp_path / "place"
    found = Place(root / "catalog.yaml", root / "packs", root / "certificates")
    root.mkdir()
    found.certificates.mkdir()
    found.catalog_path.write_text(CATALOG, encoding="utf-8")
    claims = catalogs.loads(CATALOG, "synthetic.yaml")
    families = ("gdn_replay", "sparse_gqa_verify")
    for arch in ("sm_90a", "sm_100a"):
        built = synthetic.pack(found.packs, claims, arch, families=families)
        if arch == "sm_90a":
            evidence = [synthetic.certificate(built, family) for family in families]
            for each in evidence:
                synthetic.write_certificate(found.certificates, each)
            synthetic.pack(found.packs, claims, arch, families=families, evidence=evidence)
    return found


def ask(place: Place, model: str, *arguments: str | Path) -> Ran:
    return specplan("coverage", *place.options, "--model", MODELS / f"{model}.json", *arguments)


def test_a_covered_server_is_exit_0_and_shows_what_was_derived(place: Place) -> None:
    ran = ask(place, "qwen3.8-flash-next", *SGLANG, "--max-requests", "4")
    assert (ran.code, ran.err) == (0, ""), ran.out
    lines = ran.out.splitlines()
    assert lines[0].startswith("# qwen4_exp_text on sglang: tp 8, K/V fp8_e4m3")
    assert "  gdn_replay: {key_heads: 2, value_heads: 6, dtype: fp32}" in lines
    assert "note: sglang keeps 64 tokens in a page" in lines
    assert "certified and built: 8 of 8 reachable cells (100.0 %)" in lines
    assert lines[-1] == "every reachable cell is certified and built"


def test_holes_are_exit_1_in_every_form(place: Place) -> None:
    given = (*SGLANG, "--max-requests", "5")
    ran = ask(place, "qwen3.8-flash-next", *given)
    assert ran.code == 1
    assert "certified and built: 8 of 10 reachable cells (80.0 %)" in ran.out
    assert "hole: gdn_replay shard fp32 requests=5 tokens=4: uncertified" in ran.out
    body = json.loads(ask(place, "qwen3.8-flash-next", *given, "--json").out)
    assert list(body) == ["deployment", "notes", "holds", "cells", "complaints"]
    assert body["holds"] is False and len(body["cells"]) == 10
    suite = ElementTree.fromstring(ask(place, "qwen3.8-flash-next", *given, "--junit").out)
    assert (suite.get("tests"), suite.get("failures")) == ("10", "2")
    marked = ask(place, "qwen3.8-flash-next", *given, "--markdown").out.splitlines()
    assert marked[0] == "```yaml" and "- sglang keeps 64 tokens in a page" in marked
    assert sum(line.startswith("| ") for line in marked) == 2 + 2


def test_the_written_deployment_gives_the_same_answer(place: Place, tmp_path: Path) -> None:
    kept = tmp_path / "server.yaml"
    given = (*SGLANG, "--max-requests", "5", "--json")
    ran = ask(place, "qwen3.8-flash-next", *given, "--write", kept)
    body = json.loads(ran.out)
    assert kept.read_text(encoding="utf-8") == body["deployment"]
    again = specplan("coverage", *place.options, "--deployment", kept, "--json")
    assert again.code == ran.code == 1
    rest = {key: body[key] for key in ("holds", "cells", "complaints")}
    assert json.loads(again.out) == rest


def test_an_arch_can_be_named(place: Place) -> None:
    given = (*SGLANG, "--max-requests", "4")
    ran = ask(place, "qwen3.8-flash-next", *given, "--arch", "sm_100a")
    assert ran.code == 1
    assert "8 candidate" in ran.out
    both = ask(place, "qwen3.8-flash-next", *given, "--arch", "all")
    assert both.code == 1
    assert "8 candidate, 8 certified" in both.out


@pytest.mark.parametrize("form", [(), ("--markdown",), ("--json",), ("--junit",)])
def test_a_model_that_is_not_served_is_exit_1_with_the_part(
    place: Place, form: tuple[str, ...], tmp_path: Path
) -> None:
    kept = tmp_path / "none.yaml"
    given = (*SGLANG, "--max-requests", "4", "--write", kept)
    ran = ask(place, "kimi-linear-48b", *given, *form)
    assert (ran.code, ran.err) == (1, "")
    assert "its linear layers are Kimi delta attention" in ran.out
    assert "latent K/V cache (MLA)" in ran.out
    assert not kept.exists()
    if form == ("--junit",):
        suite = ElementTree.fromstring(ran.out)
        assert (suite.get("tests"), suite.get("failures")) == ("2", "2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-requests", "4"), "--model needs --server and --max-requests"),
        (("--server", "vllm"), "--model needs --server and --max-requests"),
        (("--server", "tgi", "--max-requests", "4"), "'tgi' is not one of"),
        (("--server", "vllm", "--max-requests", "4", "--strict"), "--model takes --arch"),
        (("--server", "vllm", "--max-requests", "4", "--tp", "3"), "do not divide"),
        (("--server", "vllm", "--max-requests", "4", "--kv-dtype", "f p"), "expected a word"),
        (("--server", "sglang", "--max-requests", "4", "--kv-dtype", "int3"), "unknown name"),
        (("--server", "vllm", "--max-requests", "4", "--deployment", "x"), "one of the two"),
    ],
)
def test_wrong_use_is_exit_2(place: Place, arguments: tuple[str, ...], said: str) -> None:
    ran = ask(place, "qwen3.8-flash-next", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.split()), ran.err


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"text_config": 3}', "\0"])
def test_a_config_that_cannot_be_meant_is_exit_2_with_its_name(
    place: Place, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    ran = specplan("coverage", *place.options, "--model", tmp_path, *SGLANG, "--max-requests", "4")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1


def test_options_of_a_model_go_with_one(place: Place) -> None:
    for option in ("--server=vllm", "--tp=1", "--kv-dtype=auto", "--drafts=0", "--records"):
        ran = specplan("coverage", *place.options, option)
        assert (ran.code, ran.out) == (2, ""), option
        assert f"{option.split('=')[0]} goes with --model" in ran.err


def test_a_file_that_cannot_be_written_is_exit_1(place: Place, tmp_path: Path) -> None:
    kept = tmp_path / "no" / "such" / "directory.yaml"
    given = (*SGLANG, "--max-requests", "4", "--write", kept)
    ran = ask(place, "qwen3.8-flash-next", *given)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: {kept}: No such file or directory\n"


def test_the_function_and_the_command_answer_alike(place: Place) -> None:
    catalog = catalogs.loads(CATALOG, "synthetic.yaml")
    setup = servers.Setup("sglang", 5, tp=8, kv_dtype="fp8_e4m3", drafts=3)
    derived = servers.derive(servers.read_config(MODELS / "qwen3.8-flash-next.json"), setup)
    answer = servers.answer(derived, setup, catalog, place.packs, [place.certificates])
    assert deployment.loads(derived.text, catalog) == answer.deployment
    given = (*SGLANG, "--max-requests", "5", "--json")
    body = json.loads(ask(place, "qwen3.8-flash-next", *given).out)
    assert json.loads(json.dumps(answer.as_json())) == {
        key: body[key] for key in ("holds", "cells", "complaints")
    }

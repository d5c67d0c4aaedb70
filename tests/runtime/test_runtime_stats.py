"""What a pack counts, logs, and does with declined calls; and whether it takes a deployment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import specplan
from specplan import Uncertified, UncertifiedCell, UncoveredError
from specplan.plans.deployment import DeploymentError
from test_runtime_calls import CALLS, gather_call, scatter_call

from support import packs

DEPLOYMENT = """\
schema: 1
arch: [sm_90a, sm_100a]
max_requests: {most}
draft_lengths: [2]
families:
  scatter: {{problem: mtp3}}
  gather: {{next: 4, draft: 3}}
"""


def wide(width: int = 4) -> dict[str, Any]:
    """A call of six requests, for which there is no cell."""
    return scatter_call(width, held=9, slots=scatter_call()["slots"].repeat(2)[:6], rows=6)


def test_calls_are_counted_on_every_path(pack: specplan.Pack) -> None:
    for times in range(1, 4):
        assert pack.scatter(**scatter_call()) is True
        assert pack.stats()["calls"]["scatter"] == times
    assert not pack.scatter(**wide())
    assert pack.scatter(**{**scatter_call(), "rows": 0}) is True
    assert pack.gather.bind(**gather_call())
    counted = pack.stats()
    assert (counted["calls"]["scatter"], counted["calls"]["gather"]) == (5, 0)
    assert (counted["binds"]["scatter"], counted["binds"]["gather"]) == (0, 1)
    assert set(counted["calls"]) >= {"scatter", "gather", "rollback.commit", "gdn_replay.verify"}
    json.dumps(counted)


def test_declined_calls_are_counted_by_reason_and_cell(pack: specplan.Pack) -> None:
    answer = pack.scatter(**wide())
    assert isinstance(answer, Uncertified)
    pack.scatter(**wide())
    pack.scatter(**{**scatter_call(), "row_begin": 100})
    pack.gather.bind(**gather_call(requests=-1))
    declines = pack.stats()["declines"]
    assert declines["scatter"]["not_in_catalog"] == {str(answer.cell): 2}
    assert declines["scatter"]["range"] == {"no cell": 1}
    assert declines["gather"]["range"] == {"no cell": 1}
    declines.clear()
    assert pack.stats()["declines"]


def test_the_count_of_cells_has_an_end(
    pack: specplan.Pack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specplan.declines.MOST_APART", 1)
    with caplog.at_level(logging.INFO, "specplan"):
        for width in (4, 3, 2, 2):
            assert not pack.scatter(**wide(width))
    (cells,) = pack.stats()["declines"]["scatter"].values()
    assert list(cells.values()) == [1, 3] and list(cells)[1] == "further ones"
    assert len(caplog.records) == 1


def test_a_cell_that_is_declined_is_logged_once(
    pack: specplan.Pack, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "specplan"):
        for _ in range(3):
            assert not pack.scatter(**wide())
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "requests=6" in record.message and "not_in_catalog" in record.message
        assert not pack.scatter(**wide(3))
        assert pack.scatter(**scatter_call()) is True
    assert len(caplog.records) == 2


def loaded(small_pack: packs.SmallPack, **options: Any) -> specplan.Pack:
    return specplan.load(small_pack.root, arch=packs.ARCH, **options)


@pytest.mark.parametrize("policy", ["return", "raise", "log", "function", "raising function"])
def test_one_policy_for_declined_calls(
    pack: specplan.Pack, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Uncertified] = []

    def raising(answer: Uncertified) -> None:
        raise KeyError(str(answer.cell))

    kinds: dict[str, Any] = {"function": seen.append, "raising function": raising}
    pack.declines.policy = kinds.get(policy, policy)
    for how in (pack.scatter, pack.scatter.bind):
        if policy == "raise":
            with pytest.raises(UncertifiedCell, match="requests=6"):
                how(**wide())
        elif policy == "raising function":
            with pytest.raises(KeyError):
                how(**wide())
        else:
            assert isinstance(how(**wide()), Uncertified)
    assert len(seen) == (2 if policy == "function" else 0)
    assert len(caplog.records) == (2 if policy == "log" else 1)
    assert pack.scatter(**scatter_call()) is True
    with pytest.raises(KeyError if policy == "raising function" else UncertifiedCell):
        pack.scatter.require(**wide())


def test_the_policy_is_given_at_load(small_pack: packs.SmallPack) -> None:
    assert loaded(small_pack).declines.policy == "return"
    assert loaded(small_pack, on_uncertified="raise").declines.policy == "raise"
    with pytest.raises(specplan.SpecplanError, match="'ignore', expected 'return'") as caught:
        loaded(small_pack, on_uncertified="ignore")
    assert caught.value.reason == "argument"


def test_times_and_bytes(pack: specplan.Pack, small_pack: packs.SmallPack) -> None:
    stats = pack.stats()
    assert 0 < stats["load_seconds"] < 60
    assert stats["prepare_seconds"] == {}
    files = {
        family: (small_pack.directory / record.file).stat().st_size
        for family, record in small_pack.manifest.objects.items()
    }
    assert stats["bytes"] == {packs.ARCH: files}
    pack.prepare(0)
    (seconds,) = pack.stats()["prepare_seconds"].values()
    assert {"scatter", "gather"} <= set(seconds) and all(0 <= s < 60 for s in seconds.values())


def deployment(place: Path, most: int) -> Path:
    path = place / "server.yaml"
    path.write_text(DEPLOYMENT.format(most=most))
    return path


def test_a_deployment_that_the_pack_covers_is_taken(pack: specplan.Pack, tmp_path: Path) -> None:
    assert pack.require(deployment(tmp_path, 4)) == ()
    assert pack.stats()["calls"]["scatter"] == 0
    assert pack.stats()["declines"] == {}


def test_holes_are_named_with_what_is_near(pack: specplan.Pack, tmp_path: Path) -> None:
    with pytest.raises(UncoveredError) as caught:
        pack.require(str(deployment(tmp_path, 7)))
    said = str(caught.value)
    assert caught.value.reason == "uncovered"
    assert "declines 6 calls" in said
    assert "scatter mtp3 tokens=3 dtype=int32 on sm_90a, candidate: requests 5; nearest" in said
    assert "gather mtp3 tokens=3 dtype=int32 on sm_90a, not_in_catalog: requests 6..7" in said
    assert "nearest certified: scatter mtp3 requests=4" in said
    assert {hole.reason.value for hole in caught.value.holes} == {"candidate", "not_in_catalog"}
    pack.candidates = True
    with pytest.raises(UncoveredError, match="declines 4 calls"):
        pack.require(deployment(tmp_path, 7))


def test_a_deployment_of_another_arch_or_problem_is_refused(
    pack: specplan.Pack, tmp_path: Path
) -> None:
    path = deployment(tmp_path, 4)
    text = path.read_text()
    path.write_text(text.replace("[sm_90a, sm_100a]", "sm_100a"))
    with pytest.raises(specplan.SpecplanError, match="loaded packs are for sm_90a") as caught:
        pack.require(path)
    assert caught.value.reason == "deployment_arch"
    path.write_text(text.replace("{next: 4, draft: 3}", "{next: 9, draft: 3}"))
    with pytest.raises(UncoveredError, match=r"gather next=9 draft=3 .* unknown_problem: requests"):
        pack.require(path)
    path.write_text(text.replace("mtp3", "mtp33"))
    with pytest.raises(DeploymentError, match="mtp33"):
        pack.require(path)


def test_every_family_and_op_has_its_name(pack: specplan.Pack) -> None:
    assert set(CALLS) <= set(pack.stats()["calls"])

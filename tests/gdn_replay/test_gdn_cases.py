"""The certification inputs: what they cover, and that their checks can fail."""

from __future__ import annotations

import math

import pytest
import torch
from specplan.kernels.gdn_replay import cases, reference

GEOMETRY = {"key_heads": 1, "value_heads": 2}


def run_reference(case: cases.Case) -> None:
    getattr(reference, case.op)(**case.arguments)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("requests,tokens", [(1, 1), (3, 4), (9, 8)])
def test_the_reference_passes_and_doing_nothing_fails(
    requests: int, tokens: int, dtype: str
) -> None:
    seen = set()
    for case in cases.checks(GEOMETRY, requests, tokens, 1, dtype, "cpu"):
        seen.add(case.op)
        if requests > 1:
            assert max(case.errors().values()) > 10.0, case.name
        run_reference(case)
        assert max(case.errors().values()) == 0.0, case.name
    assert seen == {"verify", "advance", "reset", "materialize"}


def test_a_step_covers_commits_padding_and_every_length() -> None:
    step = cases.make_step(GEOMETRY, 33, 4, "bf16")
    hist_len, slot = step.tensors["hist_len"], step.tensors["slot"]
    assert set(hist_len.tolist()) == set(range(17))
    assert (slot < 0).sum() == 7
    live = slot[slot >= 0].long()
    assert live.unique().numel() == live.numel()
    assert (hist_len[live] + 4 > 16).any() and (hist_len[live] + 4 <= 16).any()


@pytest.mark.parametrize("buffer", ["state", "rec_u", "rec_k", "rec_G", "slots", "bank"])
def test_one_byte_outside_of_what_may_be_written_is_found(buffer: str) -> None:
    step = cases.make_step(GEOMETRY, 4, 3, "bf16", spare=2)
    case = cases.verify_case(step, "x")
    run_reference(case)
    assert case.errors()[buffer] == 0.0
    memory = case.backing[buffer]
    bits = memory.view(torch.int16 if memory.element_size() == 2 else torch.int32)
    bits.flatten()[-1] ^= 1  # a guard element, or the last slot
    assert case.errors()[buffer] == math.inf


def test_a_wrong_head_map_is_found() -> None:
    step = cases.make_step({"key_heads": 2, "value_heads": 4}, 4, 3, "bf16")
    case = cases.verify_case(step, "x")
    t = step.tensors
    reference.verify(**(t | {"k": t["k"].flip(2), "q": t["q"].flip(2)}))
    assert case.errors()["out"] > 10.0

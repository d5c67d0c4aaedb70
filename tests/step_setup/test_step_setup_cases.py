"""step_setup's input cases: each comes to its own cell, keeps its guards, holds what is hard."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from specplan.kernels.case import GUARD  # noqa: E402
from specplan.kernels.step_setup import cases  # noqa: E402
from specplan.plans.families import SIGNATURES  # noqa: E402
from specplan.plans.step_setup import FAMILY, OP  # noqa: E402

CPU = torch.device("cpu")
GROUP4 = {"group": 4}


@pytest.mark.parametrize(("requests", "tokens"), [(1, 1), (5, 3), (6, 8)])
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_every_case_comes_to_its_own_cell(requests: int, tokens: int, dtype: str) -> None:
    found = list(cases.checks(GROUP4, requests, tokens, 1, dtype, CPU))
    assert len(found) == (4 if tokens == 8 else 3)
    for case in found:
        assert dict(case.pick()) == {
            "group": 4, "requests": requests, "tokens": tokens, "dtype": dtype
        }, case.name  # fmt: skip


def test_the_call_changes_its_outputs_and_nothing_else() -> None:
    written = {tensor.name for tensor in OP.tensors if tensor.written}
    for case in cases.checks(GROUP4, 7, 8, 1, "int64", CPU):
        case.refill(3)
        before, expected = case.snapshot(), case.expect()
        after = case.arena.tensors(expected)
        for name, tensor in case.tensors.items():
            if name in written:
                assert (after[name] != tensor).any(), (case.name, name)
            else:
                assert torch.equal(after[name], tensor), (case.name, name)
        for name in ("request_of_row", "page_of_row", "cache_slot", "first_position"):
            if name in after:
                # Random words that are equal by chance are one in four billion.
                assert (after[name] != case.tensors[name]).all(), (case.name, name)
        (comparison,) = case.compare(expected)
        assert comparison.error > comparison.bound
        # Gaps and guards: what lies in no tensor.
        marks = torch.zeros(case.buffer.numel(), dtype=torch.int32)
        for name, tensor in case.arena.tensors(marks).items():
            if name in written:
                tensor.fill_(-1)
        assert torch.equal(before[marks == 0], expected[marks == 0])
        assert case.buffer.numel() >= int((marks != 0).sum()) + GUARD * len(case.tensors)


def test_cases_hold_what_is_hard() -> None:
    seen: set[str] = set()
    for requests in range(1, 40):
        for case in cases.checks(GROUP4, requests, 8, 1, "int32", CPU):
            case.refill(requests)
            out = case.arena.tensors(case.expect())
            t, page = case.tensors, case.page_size
            seen.add(f"page {page}")
            seen.add(f"scale {case.integers.get('scale')}")
            p, pages = out["position_of_row"], out["page_of_row"]
            real = p >= 0
            hard = {
                "padding": ~real,
                "ends a page": real & ((p + 1) % page == 0),
                "ends a group": real & ((p + 1) % 4 == 0),
                "column out of range": real & (p // page >= case.columns) & (pages == -1),
                "hole": real & (pages == -7),
                "dummy": t["kv_lens"] == 0,
                "shorter than its rows": (t["kv_lens"] > 0) & (out["first_position"] == -1),
            }
            if "seq_lens" in t:
                counts = t["seq_lens"]
                hard["no rows at the start"] = counts[:1] == 0
                hard["no rows in the middle"] = counts[1:-1] == 0
                hard["no rows at the end"] = counts[-1:] == 0
                hard["a context request"] = counts > 100
            if "work" in out:
                hard["committed"] = out["n_commit"] > 0
                hard["a slot outside"] = out["work"][:requests, 1] == -1
            seen |= {name for name, where in hard.items() if where.any()}
    pages = {f"page {size}" for size in (4, 32, 64, 128)}
    scales = {f"scale {scale}" for scale in (None, 2, 48)}
    assert seen == pages | scales | set(hard) | {
        *("no rows at the start", "no rows in the middle", "no rows at the end"),
        *("a context request", "committed", "a slot outside"),
    }


def test_declined_calls_name_every_tensor_once_and_are_all_different() -> None:
    said = [what for what, _, _ in cases.declined(CPU)]
    assert len(set(said)) == len(said)
    for tensor in SIGNATURES["step_setup"]["step_setup"].tensors:
        if tensor.name != "seq_lens":
            assert f"{tensor.name} is float32" in said
            assert f"{tensor.name} has one dimension more" in said

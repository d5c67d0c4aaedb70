"""What the sanitizer scripts choose, without a GPU."""

from __future__ import annotations

import pytest
from specplan.plans.catalog import load

pytest.importorskip("torch")


@pytest.mark.parametrize("family", ["scatter", "gather", "rollback", "gdn_replay"])
def test_every_compiled_form_is_reached(family: str) -> None:
    import sanitize

    catalog = load()
    cells = catalog.cells("sm_90a", family)
    forms = {plan.symbol for cell in cells for plan in catalog.plans_of(cell)}
    chosen = sanitize.one_of_each_kind(catalog, cells)
    assert {plan.symbol for cell in chosen for plan in catalog.plans_of(cell)} == forms
    assert len(chosen) < len(cells) // 100


def test_attention_is_reached_lone_and_grouped_in_every_form_and_merge() -> None:
    import sanitize

    catalog = load()
    cells = catalog.cells("sm_90a", "sparse_gqa_verify")
    kinds = set()
    for cell in sanitize.one_of_each_kind(catalog, cells):
        (plan,) = catalog.plans_of(cell)
        split = "one" if plan.int("splits") == 1 else "memory"
        split = "cluster" if plan.int("cluster") > 1 else split
        kinds.add((cell.dtype, plan.int("m_tiles"), plan.int("group_rows") > 1, split))
    for dtype in ("bf16", "fp8_e4m3", "nvfp4"):
        lone = {(dtype, 1, False, split) for split in ("one", "memory", "cluster")}
        groups = {(dtype, m, True, s) for m in (2, 3) for s in ("one", "memory", "cluster")}
        assert lone | groups | {(dtype, 1, True, "memory")} <= kinds

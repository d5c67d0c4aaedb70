"""Batches between two cells: every batch that a larger cell covers runs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specplan.argmax import larger_batches  # noqa: E402
from specplan.plans import catalog as catalogs  # noqa: E402
from specplan.plans.signature import Size  # noqa: E402

FAMILIES = ("step_setup", "accept", "argmax", "draft_step")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_batch_up_to_the_largest_cell_has_a_cell(family: str) -> None:
    """With the next larger one first, whatever the catalog's batches are."""
    catalog = catalogs.load()
    held: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for block in catalog.blocks:
        if block.family == family:
            for problem in block.problems:
                for dtype in block.dtypes:
                    for tokens in block.tokens:
                        held[problem, dtype, tokens] |= set(block.requests)
    assert held
    for cells in {frozenset(each) for each in held.values()}:
        for requests in range(1, max(cells) + 1):
            tried = [size.requests for size in larger_batches(Size((1,), "int32", requests, 1))]
            assert tried == sorted(set(tried)) and tried[0] == requests
            found = next((each for each in tried if each in cells), None)
            assert found == min(each for each in cells if each >= requests), (family, requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_such_batches_tries_them(family: str) -> None:
    from specplan.families import FAMILIES as RUNTIME

    size = Size((1,), "int32", 300, 4)
    op: Any = RUNTIME[family]
    assert op.size_for(object.__new__(op), size) == larger_batches(size)

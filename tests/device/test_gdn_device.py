"""Gated DeltaNet verify on a GPU: long runs, batches of any size, graphs.

Run where a pack is: ``SPECPLAN_PACKS=packs pytest tests/device``. Skipped without a GPU of a
catalogued arch. ``tests/gdn_replay/test_gdn_runs.py`` shows on a CPU that the checks can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import specplan
import torch

from support import gdn_runs
from support.gdn_runs import PackOps, Scenario


@pytest.fixture(scope="module")
def ops() -> Iterator[PackOps]:
    loaded = specplan.load(candidates=True)
    loaded.prepare()
    yield PackOps(loaded)


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", gdn_runs.SCENARIOS, ids=lambda s: s.name)
def test_a_thousand_steps_stay_close_to_the_recurrence(ops: PackOps, scenario: Scenario) -> None:
    run = gdn_runs.long_run(ops, scenario, 1024, rows=12, device="cuda", seed=3)
    run.check(slice(16, 272), slice(768, 1024))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_has_the_same_bits_in_every_batch(ops: PackOps, dtype: str) -> None:
    """1 to 256 rows: all splits, one head or several a CTA."""
    batches = (15, 16, 17, 31, 64, 256)
    gdn_runs.batches_agree(ops, batches, heads=(16, 32), steps=12, device="cuda", dtype=dtype)
    gdn_runs.batches_agree(ops, (1, 2, 8, 40), heads=(2, 8), steps=24, device="cuda", dtype=dtype)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 32])
def test_a_graph_equals_eager_calls(ops: PackOps, rows: int) -> None:
    gdn_runs.graph_equals_eager(ops, captured, heads=(16, 32), rows=rows, steps=64, device="cuda")

"""The checks of whole runs: the matrix form passes them, and ops that are wrong in the ways that
servers have been do not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from specplan.kernels.gdn_replay import reference
from torch import Tensor

from support import gdn_runs
from support.gdn_runs import Layer, ReferenceOps, Scenario

STEPS, EARLY, LATE = 96, slice(16, 48), slice(64, 96)
SMALL = {"heads": (1, 2), "rows": 3}


@pytest.mark.parametrize("scenario", gdn_runs.SCENARIOS, ids=lambda s: s.name)
def test_the_matrix_form_stays_close_over_many_steps(scenario: Scenario) -> None:
    gdn_runs.long_run(ReferenceOps(), scenario, STEPS, **SMALL).check(EARLY, LATE)


class FoldsTwice(ReferenceOps):
    """The cache manager folds a history that the kernel has folded already."""

    def verify(self, layer: Layer, step: dict[str, Tensor], slot: Tensor, out: Tensor) -> None:
        commits = layer.pool.commits(slot, out.shape[1])
        super().verify(layer, step, slot, out)
        again = torch.where(commits, slot, -1)
        count = layer.hist_len[again.clamp(min=0).long()]
        reference.materialize(*layer.pools, layer.bank, again, again, count)


class KeepsTheBank(ReferenceOps):
    def advance(self, layer: Layer, slot: Tensor, n_acc: Tensor, tokens: int) -> None:
        before = layer.bank.clone()
        super().advance(layer, slot, n_acc, tokens)
        layer.bank.copy_(before)


class KeepsTheLengthOfNone(ReferenceOps):
    """A row that committed but accepted no token keeps its history."""

    def advance(self, layer: Layer, slot: Tensor, n_acc: Tensor, tokens: int) -> None:
        none = torch.where(n_acc > 0, slot, -1)
        super().advance(layer, none, n_acc, tokens)


class NeverResets(ReferenceOps):
    def reset(self, layer: Layer, slot: Tensor) -> None:
        pass


class AdvancesByTokens(ReferenceOps):
    """The rejected tokens stay in the history."""

    def advance(self, layer: Layer, slot: Tensor, n_acc: Tensor, tokens: int) -> None:
        super().advance(layer, slot, torch.full_like(n_acc, tokens), tokens)


WRONG = (FoldsTwice, KeepsTheBank, KeepsTheLengthOfNone, NeverResets, AdvancesByTokens)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_ops_are_found_by_a_long_run(wrong: type[ReferenceOps]) -> None:
    with pytest.raises(AssertionError, match=r"^(out|states) .* bound"):
        gdn_runs.long_run(wrong(), gdn_runs.SCENARIOS[0], STEPS, **SMALL).check(EARLY, LATE)


class Ages(ReferenceOps):
    """An error that grows by 1e-4 per step and stays within the bounds."""

    steps = 0

    def verify(self, layer: Layer, step: dict[str, Tensor], slot: Tensor, out: Tensor) -> None:
        super().verify(layer, step, slot, out)
        self.steps += 1
        out.mul_(1 + 1e-4 * self.steps)


def test_an_error_that_grows_is_found() -> None:
    run = gdn_runs.long_run(Ages(), gdn_runs.SCENARIOS[0], STEPS, **SMALL)
    assert float(torch.stack(run.worst).max()) < 1.0
    with pytest.raises(AssertionError, match="relative error"):
        run.check(EARLY, LATE)


class Exact(ReferenceOps):
    """The sequential form row by row, so that no sum depends on the batch."""

    def verify(self, layer: Layer, step: dict[str, Tensor], slot: Tensor, out: Tensor) -> None:
        for n in range(slot.shape[0]):
            row = {x: t if t.dim() == 1 else t[n : n + 1] for x, t in step.items()}
            super().verify(layer, row, slot[n : n + 1], out[n : n + 1])


class DependsOnTheBatch(Exact):
    """Batches of three rows and more do not commit."""

    def verify(self, layer: Layer, step: dict[str, Tensor], slot: Tensor, out: Tensor) -> None:
        before = layer.state.clone()
        super().verify(layer, step, slot, out)
        if slot.shape[0] >= 3:
            layer.state.copy_(before)


def test_batches_agree() -> None:
    gdn_runs.batches_agree(Exact(), (2, 3, 4), heads=(1, 2), steps=12)
    with pytest.raises(AssertionError, match="state, 3 rows"):
        gdn_runs.batches_agree(DependsOnTheBatch(), (2, 3, 4), heads=(1, 2), steps=12)


def test_a_graph_that_reads_its_buffers_equals_eager_calls() -> None:
    def faithful(call: Callable[[], None]) -> Callable[[], None]:
        return call

    gdn_runs.graph_equals_eager(Exact(), faithful, heads=(1, 2), rows=4, steps=24)


class Baked(Exact):
    """Every call takes the accepted counts of the first one."""

    def __init__(self) -> None:
        self.counts: dict[int, Tensor] = {}

    def advance(self, layer: Layer, slot: Tensor, n_acc: Tensor, tokens: int) -> None:
        kept = self.counts.setdefault(id(layer), n_acc.clone())
        super().advance(layer, slot, kept, tokens)


def test_a_graph_with_counts_of_its_capture_is_found() -> None:
    with pytest.raises(AssertionError, match=r"hist_len|bank|out"):
        gdn_runs.graph_equals_eager(Baked(), lambda call: call, heads=(1, 2), rows=4, steps=24)

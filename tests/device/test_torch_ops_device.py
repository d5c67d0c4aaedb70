"""``torch.ops.specplan`` on a GPU: inside ``torch.compile(fullgraph=True)`` with inductor, and in a
captured graph that is replayed over rewritten inputs.

Run where a pack is: ``SPECPLAN_PACKS=packs pytest tests/device``. Skipped without a GPU of a
catalogued arch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from specplan.plans.catalog import Catalog
from specplan.plans.catalog import load as load_catalog

#: Ops that are called like their families, each with a cell: problem, requests, tokens, dtype.
CELLS = {
    "scatter": ("mtp7", 8, 4, "int32"),
    "gather": ("mtp7", 8, 4, "int32"),
    "sparse_gqa_verify": ("qsa_24_2", 4, 4, "bf16"),
}


@cache
def catalog() -> Catalog:
    return load_catalog()


def case_of(family: str, device: torch.device) -> Any:
    """The first input case of the family's cell, as certification takes it."""
    wanted = (family, *CELLS[family], "sm_90a")
    (splits,) = {
        cell.splits
        for cell in catalog().claims
        if (cell.family, cell.problem, cell.requests, cell.tokens, cell.dtype, cell.arch) == wanted
        and catalog().is_automatic(cell)
    } or {1}
    problem, requests, tokens, dtype = CELLS[family]
    geometry = catalog().problems[family][problem]
    checks = import_module(f"specplan.kernels.{family}.cases").checks
    return next(iter(checks(geometry, requests, tokens, splits, dtype, device)))


def own_memory(case: Any) -> dict[str, torch.Tensor]:
    """Copies of the case's tensors, each an allocation of its own, by name."""
    return {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for name, t in getattr(case, "tensors", {}).items()
    }


def step_of(family: str, case: Any, own: dict[str, torch.Tensor]) -> Callable[[], None]:
    import specplan.torch_ops

    specplan.torch_ops.use(specplan.load(candidates=True))
    op = getattr(torch.ops.specplan, family)
    arguments = {
        "output" if name == "out" else name: value.value if name == "v_scale_order" else value
        for name, value in case.arguments().items()
    }
    arguments |= own

    def step() -> None:
        op(**arguments)

    return step


def judge(case: Any, expected: Any) -> None:
    compared = list(case.compare(expected))
    assert compared
    for comparison in compared:
        assert float(comparison.error) <= comparison.bound, comparison


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [True, False], ids=["memory of its own", "views"])
@pytest.mark.parametrize("family", CELLS)
def test_inductors_whole_graph_does_what_the_reference_says(
    family: str, apart: bool, gpu: Any
) -> None:
    case = case_of(family, torch.device("cuda", 0))
    if not apart and hasattr(case, "tensors") and torch.__version__ < "2.13":
        pytest.skip("inductor before torch 2.13 copies from a wrong place: see specplan.torch_ops")
    own = own_memory(case) if apart else {}
    torch._dynamo.reset()
    compiled = torch.compile(step_of(family, case, own), fullgraph=True)
    for seed in (1, 2, 3):
        case.refill(seed)
        for name, tensor in own.items():
            tensor.copy_(case.tensors[name])
        expected = case.expect()
        compiled()
        for name, tensor in own.items():
            case.tensors[name].copy_(tensor)
        torch.cuda.synchronize()
        judge(case, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CELLS)
def test_a_captured_graph_is_replayed_over_rewritten_inputs(family: str, gpu: Any) -> None:
    case = case_of(family, torch.device("cuda", 0))
    step = step_of(family, case, {})
    case.refill(1)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (2, 3, 4):
        case.refill(seed)
        expected = case.expect()
        graph.replay()
        torch.cuda.synchronize()
        judge(case, expected)

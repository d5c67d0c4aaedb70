"""What the ops declare, compared with the compiled functions that were certified: their signatures
stand in the committed certificates as the compiler wrote them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from specplan.plans import catalog, certificates
from specplan.plans.families import FAMILIES, SIGNATURES
from specplan.plans.plan import Plan

ROOT = Path(__file__).resolve().parents[2] / "certificates"
ARCH = "sm_90a"


#: Families whose cells are all candidates have no certificate yet.
CERTIFIED = [name for name in FAMILIES if (ROOT / ARCH / f"{name}.yaml").is_file()]


def test_every_family_with_certified_cells_has_a_certificate() -> None:
    claims = catalog.load()
    claimed = {cell.family for cell in claims.cells(ARCH) if claims.claims[cell]}
    assert claimed == set(CERTIFIED)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Every plan of the catalog's first arch, by symbol."""
    claims = catalog.load()
    kinds = {(c.family, c.problem, c.dtype, c.splits, c.tokens, c.requests): c
             for c in claims.cells(ARCH)}  # fmt: skip
    return {plan.symbol: plan for cell in kinds.values() for plan in claims.plans_of(cell)}


@pytest.mark.parametrize("family", CERTIFIED)
def test_the_compiled_signatures_are_the_declared_ones(plans: dict[str, Plan], family: str) -> None:
    certificate = certificates.read(ROOT / ARCH / f"{family}.yaml")
    assert certificate.plans
    for symbol, certified in certificate.plans.items():
        plan = plans[symbol]
        op = SIGNATURES[family][plan.op]
        name = certified.signature.partition("(")[0]
        assert op.signature(name, dict(plan.spec)) == certified.signature, symbol


def test_a_declaration_that_differs_is_seen(plans: dict[str, Plan]) -> None:
    op = SIGNATURES["scatter"]["scatter"]
    plan = next(plan for plan in plans.values() if plan.family == "scatter")
    signature = op.signature("scatter", dict(plan.spec))
    shorter = replace(op, tensors=op.tensors[1:])
    assert shorter.signature("scatter", dict(plan.spec)) != signature
    unshared = replace(op.tensors[2], shape=("own",))
    changed = replace(op, tensors=(*op.tensors[:2], unshared, *op.tensors[3:]))
    assert changed.signature("scatter", dict(plan.spec)) != signature


@pytest.mark.parametrize(
    "op", [op for ops in SIGNATURES.values() for op in ops.values()], ids=lambda op: op.name
)
def test_the_written_functions_are_python_and_the_table_has_every_parameter(op: object) -> None:
    compile(op.source(), op.name, "exec")  # type: ignore[attr-defined]
    table = op.table()  # type: ignore[attr-defined]
    for parameter in op.parameters:  # type: ignore[attr-defined]
        assert f"| `{parameter.name}` |" in table

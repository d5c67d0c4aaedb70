"""Checks that a compiled function makes on its host side, before it launches.

The compiled module checks by itself what a tensor's description can say. What it cannot say (a
range of rows lies inside a tensor, one extent is at least another) is checked here, in the same
compiled call, so that it costs Python nothing.
"""

from __future__ import annotations

from typing import Any

from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import cuda
from cutlass.cutlass_dsl import dsl_user_op, select_
from specplan.plans.plan import Plan
from specplan.plans.signature import Op

#: What a refused call returns in place of a CUDA error: no error of CUDA has this number.
REFUSED = 77_001


def refuse_unless(*conditions: Any) -> None:
    """End the host function here, before anything is launched, unless all conditions hold.

    The caller gets the exception of a failed launch; an op then finds out by itself which condition
    it was. Called at the top level of a host function, not inside a branch.
    """
    holds = Boolean(True)
    for condition in conditions:
        holds = holds & Boolean(condition)
    _return_if_error(Int32(select_(holds, Int32(0), Int32(REFUSED))))


def refuse_unless_declared(op: Op, plan: Plan, **arguments: Any) -> None:
    """End the host function unless the rules hold that its op declares; ``arguments`` are what
    they ask about, by name.
    """
    spec = dict(plan.spec)
    refuse_unless(*op.conditions(op.call(arguments, spec, Int64), op.form_of(spec)))


@dsl_user_op  # type: ignore[misc]
def _return_if_error(code: Int32, *, loc: Any = None, ip: Any = None) -> None:
    cuda.return_if_error([code.ir_value(loc=loc, ip=ip)], loc=loc, ip=ip)

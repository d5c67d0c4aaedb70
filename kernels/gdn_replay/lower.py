"""From a plan to its host function and the fake arguments to compile it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specplan.kernels import fakes
from specplan.kernels.gdn_replay.cursors import advance, reset
from specplan.kernels.gdn_replay.materialize import Materialize
from specplan.kernels.gdn_replay.stream import StreamVerify
from specplan.kernels.gdn_replay.verify import Verify
from specplan.plans.gdn_replay import OPS
from specplan.plans.plan import Plan


def lower(plan: Plan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The host function of a plan and the fake arguments to compile it with."""
    return _host_function(plan), fakes.arguments(OPS[plan.op], plan)


def _host_function(plan: Plan) -> Callable[..., None]:
    if plan.op == "advance":
        return advance
    if plan.op == "reset":
        return reset
    state = str(plan["state"])
    if plan.op == "materialize":
        return Materialize(state)
    sizes = [plan.int(name) for name in ("tokens", "rows", "warps", "resident")]
    verify = StreamVerify if plan.int("grouped") else Verify
    return verify(state, *sizes)

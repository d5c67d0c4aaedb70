"""The compiled functions of a pack, whose launches run on a CPU: host code and PTX are the
compiler's, CUDA's runtime and the GPU are specplan's simulator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specplan.plans import manifest
from specplan.plans.manifest import PlanRecord
from specplan.tools.simulator.compiling import PtxCompiler
from specplan.tools.simulator.device import Simulator
from specplan.tools.simulator.host import Recorder


class SimulatedFunctions:
    """Calls by what a plan is compiled for. Every launch must be free of races, and no load of 16
    bytes from shared memory may meet another in a bank.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self.plans = manifest.read(directory).plans
        self._compiler = PtxCompiler(directory.parent / "ptx")
        self.simulator = Simulator(
            lambda symbol: self._compiler.ptx(self.plans[symbol]), banks=True
        )
        recorder = Recorder(directory, scratch, self.simulator.launch, every_tensor=True)
        self._functions = recorder.functions

    def close(self) -> None:
        self._compiler.close()

    def plan(self, op: str, **spec: Any) -> PlanRecord:
        """The only plan of an op with these constants."""
        (found,) = [
            plan
            for plan in self.plans.values()
            if plan.op == op and spec.items() <= dict(plan.spec).items()
        ]
        return found

    def call(self, plan: PlanRecord, *arguments: Any) -> None:
        """Call a compiled function, run what it launches, and look at what that showed."""
        self.simulator.clear()
        self._functions[plan.symbol](*arguments)
        assert self.simulator.findings, "nothing was launched"
        for launched, found in self.simulator.findings:
            assert found.races == [], "\n".join(map(str, found.races))
            kernel = self.simulator.kernel(plan.symbol, launched.kernel)
            wide = {s.line for s in kernel.entry.code if s.name == "ld.shared.v4.b32"}
            conflicts = {line: found.banks[line] for line in wide & set(found.banks)}
            assert not any(further for _, further in conflicts.values()), conflicts

"""A pack of one family that runs without a GPU: the runtime's ops and the compiled host functions,
whose launches the simulator runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specplan.pack import Pack
from specplan.plans import manifest
from specplan.tools.simulator.compiling import PtxCompiler
from specplan.tools.simulator.device import Simulator, imagined_device, load

from support import packs
from support.shared import Shared

#: What the families' cells lie under.
HEAD = """\
schema: 1
archs:
  sm_90a:
    {device: NVIDIA H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472,
     smem_per_cta: 232448}
families:
"""


class SimulatedPack:
    """A loaded pack, and what its launches showed."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        plans = manifest.read(directory).plans
        self._compiler = PtxCompiler(directory.parent / "ptx")
        self.simulator = Simulator(lambda symbol: self._compiler.ptx(plans[symbol]))
        self._capability = manifest.read(directory).capability
        with imagined_device(self._capability):
            self.pack: Pack = load(directory, scratch, self.simulator)

    def close(self) -> None:
        self._compiler.close()

    @contextmanager
    def on_device(self) -> Iterator[Pack]:
        """Every tensor is on the imagined device; at the end, no launch may have raced."""
        self.simulator.clear()
        with imagined_device(self._capability):
            yield self.pack
        for launched, found in self.simulator.findings:
            assert found.races == [], (launched.symbol, "\n".join(map(str, found.races)))

    @property
    def launches(self) -> list[Any]:
        """The launches since the last ``on_device`` began."""
        return [launched for launched, _ in self.simulator.findings]


@contextmanager
def simulated_pack(
    shared: Shared, scratch: Path, family: str, cells: str
) -> Iterator[SimulatedPack]:
    """The pack of a family's part of a catalog, built once in a test run."""
    place = shared.made(
        f"simulated-{family}",
        lambda place: packs.build(place, HEAD + cells, "--arch", packs.ARCH),
    )
    made = SimulatedPack(place / "packs" / packs.ARCH, scratch)
    try:
        yield made
    finally:
        made.close()

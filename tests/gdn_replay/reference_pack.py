"""A pack of ``gdn_replay`` on a machine without a GPU: an imagined device of its arch, the real
runtime, and the compiled host functions with all their checks; in the place of each kernel that
they launch, the op's reference runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from specplan.kernels.gdn_replay import reference
from specplan.loading import ArchPack
from specplan.pack import Pack
from specplan.plans import manifest
from specplan.plans.catalog import Catalog
from specplan.tools.simulator.host import Launched, Recorded, Recorder

from support import packs, synthetic
from support.shared import Shared

ARCH = "sm_90a"
#: The cells of ``device`` are there for the shapes of their plans, which the tests of device code
#: call with other heads.
CATALOG = """\
schema: 1
archs:
  sm_90a:
    {device: NVIDIA H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472, smem_per_cta:
    232448}
families:
  gdn_replay:
    problems:
      small: {key_heads: 2, value_heads: 8}
      wide: {key_heads: 16, value_heads: 32}
      device: {key_heads: 4, value_heads: 4}
      narrow: {key_heads: 1, value_heads: 2}
    cells:
      - {problems: [small], requests: [1..5, 8, 16], tokens: 1..8, splits: auto,
         dtypes: [bf16, fp32], candidate: [sm_90a], why: tests}
      - {problems: [small], requests: [3], tokens: [4], splits: 4, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
      - {problems: [wide], requests: [8, 32], tokens: [4], splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
      - {problems: [narrow], requests: [1..64, 72..256/8], tokens: [1, 4], splits: auto,
         dtypes: [bf16], candidate: [sm_90a], why: batches in parts}
      - {problems: [device], requests: [1], tokens: [4], splits: 1, dtypes: [bf16],
         candidate: [sm_90a], why: device code}
      - {problems: [device], requests: [1], tokens: [8], splits: 2, dtypes: [fp32],
         candidate: [sm_90a], why: device code}
      - {problems: [device], requests: [256], tokens: [8], splits: 1, dtypes: [bf16],
         candidate: [sm_90a], why: device code}
      - {problems: [device], requests: [256], tokens: [8], splits: 2, dtypes: [fp32],
         candidate: [sm_90a], why: device code}
"""


def built(shared: Shared) -> Path:
    """The directory of the compiled pack of the catalog."""
    place = shared.made("gdn-pack", lambda folder: packs.build(folder, CATALOG))
    return place / "packs" / ARCH


class Checked:
    """A compiled host function, which tests may let fail; ``launches`` has the arguments of the
    calls that launched.
    """

    def __init__(self, recorded: Recorded, op: str, spec: dict[str, Any]) -> None:
        self.symbol, self.op, self.spec = recorded.symbol, op, spec
        self.fails: Exception | None = None
        self._recorded = recorded

    @property
    def launches(self) -> list[tuple[Any, ...]]:
        return self._recorded.launches

    def __call__(self, *arguments: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self._recorded(*arguments)


class References:
    """Runs the reference of an op in the place of its kernel, or keeps it for a graph."""

    def __init__(self, pack: manifest.Manifest) -> None:
        self.ops = {symbol: plan.op for symbol, plan in pack.plans.items()}
        #: Where launches go while a graph is captured.
        self.nodes: list[Callable[[], None]] | None = None

    def __call__(self, launched: Launched, arguments: tuple[Any, ...]) -> None:
        op = self.ops[launched.symbol]
        taken = [_tensor(a) if not isinstance(a, int | float) else a for a in arguments]
        # Verify's scale and advance's tokens stand behind the tensors; launch integers after them.
        count = sum(isinstance(a, torch.Tensor) for a in taken)
        numbers = taken[count : count + 1] if op in ("verify", "advance") else []

        def run() -> None:
            getattr(reference, op)(*taken[:count], *numbers)

        if self.nodes is None:
            run()
        else:
            self.nodes.append(run)


def _tensor(value: Any) -> torch.Tensor:
    """A torch tensor of the same memory."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor)
    return torch.from_dlpack(value)


def reference_pack(
    directory: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, *, every_tensor: bool = True
) -> tuple[Pack, Catalog]:
    """The compiled pack on an imagined GPU; with ``every_tensor``, every tensor says that it is on
    it, and else those alone that say so themselves.
    """
    claims = synthetic.catalog(CATALOG)
    arch_pack = ArchPack.__new__(ArchPack)
    arch_pack.directory, arch_pack.cuda_runtime = directory, None
    arch_pack.manifest = manifest.read(directory)
    references = References(arch_pack.manifest)
    recorder = Recorder(directory, scratch, references, every_tensor=every_tensor)
    arch_pack.functions = {
        symbol: Checked(recorder.functions[symbol], plan.op, dict(plan.spec))
        for symbol, plan in arch_pack.manifest.plans.items()
    }
    pack = Pack([arch_pack], candidates=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    if every_tensor:
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0, raising=False)
    real = type(pack.gdn_replay).idle_arguments.__func__
    monkeypatch.setattr(
        type(pack.gdn_replay),
        "idle_arguments",
        classmethod(lambda cls, record, device: real(cls, record, torch.device("cpu"))),
    )
    arch_pack.references = references  # type: ignore[attr-defined]
    return pack, claims


class Graph:
    """A CUDA graph as the driver uses it: what is launched under capture runs at each replay."""

    def __init__(self) -> None:
        self.nodes: list[Callable[[], None]] = []

    def replay(self) -> None:
        for node in self.nodes:
            node()


def reference_graphs(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``torch.cuda.graph`` keep the references that are launched under capture."""
    references: References = pack._packs[ARCH].references  # type: ignore[attr-defined]

    @contextmanager
    def capture(graph: Graph) -> Any:
        references.nodes = graph.nodes
        yield
        references.nodes = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)

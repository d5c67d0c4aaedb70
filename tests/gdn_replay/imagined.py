"""A pack of ``gdn_replay`` on a machine without a GPU: an imagined device of its arch, and compiled
functions that check what compiled modules check and then run the references.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from specplan.kernels.gdn_replay import cases, reference
from specplan.pack import Pack, _ArchPack
from specplan.plans.catalog import Catalog

import synthetic

ARCH = "sm_90a"
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
    cells:
      - {problems: [small], requests: [1..5, 8, 16], tokens: 1..8, splits: auto,
         dtypes: [bf16, fp32], candidate: [sm_90a], why: tests}
      - {problems: [small], requests: [3], tokens: [4], splits: 4, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
      - {problems: [wide], requests: [8, 32], tokens: [4], splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
"""
BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
STATE = {"bf16": BF16, "fp32": FP32}
#: How a compiled module describes its tensors: dtype, extents, how many leading strides are free,
#: what they are multiples of.
ROWS = (INT32, ("N",), 1, 1)
CURSORS = (INT32, ("slots",), 0, 1)


def described(op: str, spec: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The tensors of an op in their order, as ``kernels/gdn_replay/kernel.py`` describes them."""
    state = STATE[spec["state"]] if "state" in spec else None
    item = 4 if state == FP32 else 8
    table = {
        "q": (BF16, ("N", "T", "HK", 128), 2, 8),
        "k": (BF16, ("N", "T", "HK", 128), 2, 8),
        "v": (BF16, ("N", "T", "HV", 128), 2, 8),
        "a": (BF16, ("N", "T", "HV"), 2, 1),
        "b": (BF16, ("N", "T", "HV"), 2, 1),
        "A_log": (FP32, ("HV",), 0, 1),
        "dt_bias": (FP32, ("HV",), 0, 1),
        "state": (state, ("slots", "HV", 128, 128), 1, item),
        "rec_u": (BF16, ("slots", "HV", 2, 16, 128), 1, 8),
        "rec_k": (BF16, ("slots", "HK", 2, 16, 128), 1, 8),
        "rec_G": (FP32, ("slots", "HV", 2, 16), 1, 1),
        "hist_len": CURSORS,
        "bank": CURSORS,
        "out": (BF16, ("N", "T", "HV", 128), 2, 8),
        **dict.fromkeys(("slot", "n_acc", "src", "dst", "count"), ROWS),
    }
    return {name: table[name] for name in cases.reference_arguments(op)}


class Module:
    """A compiled function: it refuses what its tensors' descriptions do not take, writes every
    launch down, and runs the reference.
    """

    def __init__(self, symbol: str, op: str, spec: dict[str, Any]) -> None:
        self.symbol, self.op, self.spec = symbol, op, spec
        self.launches: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None
        #: What a launch does instead, while a graph is captured.
        self.recorder: list[Callable[[], None]] | None = None

    def __call__(self, *arguments: Any) -> None:
        if self.fails is not None:
            raise self.fails
        named = described(self.op, self.spec)
        numbers = arguments[len(named) :]
        extents: dict[str, int] = {}
        for (name, wanted), tensor in zip(named.items(), arguments, strict=False):
            wrong = refusal(tensor, *wanted, extents)
            if wrong:
                raise ValueError(f"mismatched {name}: {wrong}")
        kinds = {"verify": (float, int), "advance": (int,)}.get(self.op, ())
        if len(numbers) != len(kinds) or not all(map(isinstance, numbers, kinds)):
            raise TypeError(f"mismatched numbers {numbers}")
        self.launches.append(arguments)
        tensors = arguments[: len(named)]
        reference_numbers = numbers[:1]

        def run() -> None:
            getattr(reference, self.op)(*tensors, *reference_numbers)

        if self.recorder is None:
            run()
        else:
            self.recorder.append(run)


def refusal(
    tensor: Any,
    dtype: torch.dtype,
    shape: tuple[str | int, ...],
    free: int,
    multiple: int,
    extents: dict[str, int],
) -> str | None:
    """The first thing about a tensor that a description does not take."""
    if not isinstance(tensor, torch.Tensor):
        return "no tensor"
    if tensor.dtype != dtype or tensor.dim() != len(shape):
        return f"{tensor.dtype} of {tensor.dim()} dimensions"
    if tensor.data_ptr() % (multiple * dtype.itemsize):
        return "alignment"
    for got, wanted in zip(tensor.shape, shape, strict=True):
        if got != (extents.setdefault(wanted, got) if isinstance(wanted, str) else wanted):
            return f"shape {tuple(tensor.shape)}"
    dense = 1
    for at in reversed(range(len(shape))):
        stride = tensor.stride(at)
        if stride % multiple if at < free else stride != dense:
            return f"strides {tensor.stride()}"
        dense *= tensor.shape[at]
    return None


def imagined_pack(
    root: Path, monkeypatch: pytest.MonkeyPatch, text: str = CATALOG
) -> tuple[Pack, Catalog]:
    """The pack of a catalog, on an imagined GPU; every tensor says that it is on it."""
    claims = synthetic.catalog(text)
    arch_pack = _ArchPack.__new__(_ArchPack)
    arch_pack.directory = root / ARCH
    arch_pack.manifest = synthetic.pack(root, claims, ARCH, families=("gdn_replay",))
    arch_pack.functions = {
        symbol: Module(symbol, plan.op, dict(plan.spec))
        for symbol, plan in arch_pack.manifest.plans.items()
    }
    pack = Pack([arch_pack], candidates=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0, raising=False)
    real = type(pack.gdn_replay).idle_arguments.__func__
    monkeypatch.setattr(
        type(pack.gdn_replay),
        "idle_arguments",
        classmethod(lambda cls, record, device: real(cls, record, torch.device("cpu"))),
    )
    return pack, claims


class Graph:
    """A CUDA graph as the driver uses it: what is launched under capture runs at each replay."""

    def __init__(self) -> None:
        self.nodes: list[Callable[[], None]] = []

    def replay(self) -> None:
        for node in self.nodes:
            node()


def imagined_graphs(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = pack._packs[ARCH].functions

    @contextmanager
    def capture(graph: Graph) -> Any:
        for function in functions.values():
            function.recorder = graph.nodes
        yield
        for function in functions.values():
            function.recorder = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)

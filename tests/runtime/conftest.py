"""A pack that runs without a GPU."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest

from support import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan.plans import manifest  # noqa: E402

from support.stubs import Compiled  # noqa: E402  isort: skip


@pytest.fixture
def pack(small_pack: packs.SmallPack, monkeypatch: pytest.MonkeyPatch) -> specplan.Pack:
    """The small pack on one imagined device of its arch, its functions replaced by stubs;
    ``prepare`` does nothing.

    It also knows two problems that are built for nothing else than to be mistaken for mtp3:
    scatter's ``alike`` and gather's ``alike`` differ from it in the width of the next store.
    """
    loaded = specplan.load(small_pack.root, arch=packs.ARCH)
    arch_pack = loaded._packs[packs.ARCH]
    old = arch_pack.manifest
    plans, groups = dict(old.plans), list(old.groups)
    problems = {family: dict(of_family) for family, of_family in old.problems.items()}
    for family in ("scatter", "gather"):
        problems[family]["alike"] = {**problems[family]["mtp3"], "next": 6}
        renamed = {}
        for group in old.groups:
            if (group.family, group.problem) != (family, "mtp3"):
                continue
            uses = []
            for use in group.uses:
                symbol = use.symbol.replace("next4", "next6")
                plan = old.plans[use.symbol]
                spec = tuple((k, 6 if k == "next" else v) for k, v in plan.spec)
                plans[symbol] = dataclasses.replace(plan, symbol=symbol, spec=spec)
                renamed[use.symbol] = symbol
                uses.append(manifest.Use(symbol, use.launch))
            groups.append(dataclasses.replace(group, problem="alike", uses=tuple(uses)))
        assert renamed
    arch_pack.manifest = dataclasses.replace(
        old, plans=plans, groups=tuple(groups), problems=problems
    )
    arch_pack.functions = {s: Compiled(s, dict(p.spec)) for s, p in plans.items()}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    for op in (type(loaded.scatter.op), type(loaded.gather.op)):
        real = op.idle_arguments.__func__

        def on_host(cls: Any, plan: Any, device: Any, real: Any = real) -> Any:
            assert device == torch.device("cuda", 0)
            return real(cls, plan, torch.device("cpu"))

        monkeypatch.setattr(op, "idle_arguments", classmethod(on_host))
    return loaded

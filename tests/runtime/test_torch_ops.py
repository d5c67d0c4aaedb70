"""``torch.ops.specplan``: schemas, fake implementations and mutations, over functions that write to
what their op writes to; and compiled graphs of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import library  # noqa: E402
from specplan.pack import Pack  # noqa: E402
from specplan.plans import signature  # noqa: E402
from specplan.plans.families import SIGNATURES  # noqa: E402

from fuzzing import mixed  # noqa: E402
from support import synthetic  # noqa: E402

from support.stubs import Checking  # noqa: E402  isort: skip
from test_runtime_sequences import ARCH, CATALOG, Sequences  # noqa: E402  isort: skip


class Writing(Checking):
    """A compiled function whose launch adds one to what its op writes, so that nothing that it
    writes goes unseen.
    """

    def __init__(self, op: signature.Op, symbol: str, spec: Any) -> None:
        super().__init__(op, symbol, spec)
        self.op = op

    def __call__(self, *arguments: Any) -> None:
        super().__call__(*arguments)
        tensors, _ = self.op.in_form(self.op.form_of(self.spec))
        for tensor, value in zip(tensors, arguments, strict=False):
            if tensor.written and value.numel():
                value.add_(1)
        if self.op.family == "rollback" and self.op.name != "gather":
            # The planes are written, too, through their addresses.
            for base in arguments[0][:, 0].tolist():
                ctypes.c_uint8.from_address(base).value += 1


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pack:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Pack, "_prepare", lambda *arguments: None)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0, raising=False)
    monkeypatch.setattr(library, "tvm_ffi", lambda: SimpleNamespace(from_dlpack=lambda t: t))
    manifest = synthetic.pack(
        tmp_path, synthetic.catalog(CATALOG), ARCH, families=tuple(SIGNATURES)
    )
    functions = {
        symbol: Writing(SIGNATURES[plan.family][plan.op], symbol, dict(plan.spec))
        for symbol, plan in manifest.plans.items()
    }
    arch_pack = SimpleNamespace(directory=tmp_path, manifest=manifest, functions=functions)
    loaded = Sequences(arch_pack, 1).pack()
    for op in loaded._ops:
        made = [
            torch.empty(shape, dtype=specplan.op.DTYPES[dtype])
            for dtype, shape in op.declared.absent.values()
        ]
        op._absent[0] = tuple(made)
    specplan.torch_ops.use(loaded)
    return loaded


def custom_call(chance: Random, pack: Pack, op: str) -> tuple[Any, dict[str, Any]]:
    """A custom op and the arguments of a right call of it, all tensors its own."""
    problems = {f: list(named.values()) for f, named in pack.manifest().problems.items()}
    while True:
        world = mixed.World(problems, lambda tensor, device: tensor.clone())
        given = mixed.right_call(chance, world, op).arguments
        target: Any = pack
        for part in op.split("."):
            target = getattr(target, part)
        try:
            found = target(**given)
        except specplan.plans.gdn_replay.CommitterError:
            continue
        if found and target.op.plans:
            break
    made = getattr(torch.ops.specplan, op.replace(".", "_")).default
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        if name == "layout":
            planes = [t for key, t in world.made.items() if "planes " in str(key[1])]
            arguments["caches"] = planes
            if op.endswith("commit"):
                arguments |= {"pools": [], "candidates": []}
        elif name == "segments":
            arguments["destinations"] = list(value.views[: value.count])
            arguments["offsets"] = list(value.offsets[: value.count])
        elif name == "pool" and not isinstance(value, torch.Tensor):
            arguments |= dict(zip(specplan.torch_ops._POOL, value.tensors, strict=True))
        elif name == "cursors" and not isinstance(value, torch.Tensor):
            arguments |= dict(zip(("hist_len", "bank"), value.tensors, strict=True))
            arguments |= dict(zip(("key_heads", "value_heads"), value.geometry, strict=True))
            arguments["dtype"] = value.dtype
        elif name == "v_scale_order":
            arguments[name] = value.value
        elif name == "out":
            arguments["output"] = value
        elif name != "planes":
            arguments[name] = value
    return made, arguments


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same strides over a copy of its storage."""
    storage = tensor.untyped_storage().clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@pytest.fixture(autouse=True)
def imported() -> None:
    import specplan.torch_ops  # noqa: F401


@pytest.mark.parametrize("op", mixed.OPS)
def test_opcheck_passes(pack: Pack, op: str) -> None:
    checked = 0
    for seed in range(20):
        made, arguments = custom_call(Random(f"{op} {seed}"), pack, op)
        dtypes = {value.dtype for value in arguments.values() if isinstance(value, torch.Tensor)}
        # Its comparisons of what changed do not know FP8.
        if torch.float8_e4m3fn not in dtypes:
            torch.library.opcheck(made, (), arguments)
            checked += 1
        if checked == 2:
            break
    assert checked == 2


@pytest.mark.parametrize("op", mixed.OPS)
def test_a_custom_op_launches_what_the_packs_op_launches(pack: Pack, op: str) -> None:
    made, arguments = custom_call(Random(op), pack, op)
    functions = pack._packs[ARCH].functions.values()

    def launches() -> list[tuple[str, int]]:
        return [(f.symbol, len(f.launches)) for f in functions if f.launches]

    before = launches()
    made(**arguments)
    after = launches()
    assert before != after
    assert [symbol for symbol, _ in before] == [symbol for symbol, _ in after]


def test_a_declined_call_raises_the_answers_text(pack: Pack) -> None:
    made, arguments = custom_call(Random("declined"), pack, "gather")
    with pytest.raises(specplan.UncertifiedCell, match="declined: requests is -1"):
        made(**{**arguments, "requests": -1})
    made, arguments = custom_call(Random("declined"), pack, "sparse_gqa_verify")
    with pytest.raises(specplan.UncertifiedCell, match="must be finite and above 0"):
        made(**{**arguments, "softmax_scale": 0.0})


Step = Callable[..., torch.Tensor]


@pytest.mark.parametrize("op", mixed.OPS)
def test_a_compiled_graph_is_whole_and_does_what_the_eager_calls_do(pack: Pack, op: str) -> None:
    """Two calls and what is read between and after them, in one graph."""
    made, arguments = custom_call(Random(f"graph {op}"), pack, op)
    tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    lists = {n: v for n, v in arguments.items() if isinstance(v, list) and n != "offsets"}
    others = {n: v for n, v in arguments.items() if n not in tensors and n not in lists}
    written = [a.name for a in made._schema.arguments if a.alias_info is not None]
    written = [name for name in written if name in tensors or lists.get(name)]

    def step(tensors: dict[str, Any], lists: dict[str, Any]) -> list[torch.Tensor]:
        seen = []
        for _ in range(2):
            made(**tensors, **lists, **others)
            for name in written:
                value = tensors[name] if name in tensors else lists[name][0]
                seen.append(value.view(torch.uint8).flatten()[:1].to(torch.int32) * 2)
        return seen

    def copies() -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {n: copied(t) for n, t in tensors.items()},
            {n: [copied(t) for t in each] for n, each in lists.items()},
        )

    torch._dynamo.reset()
    eager, graph = copies(), copies()
    wanted = step(*eager)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*graph)
    assert written
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)
    for name in tensors:
        same = eager[0][name].view(torch.uint8), graph[0][name].view(torch.uint8)
        assert torch.equal(*same), name
    for name in lists:
        for a, b in zip(eager[1][name], graph[1][name], strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("op", mixed.OPS)
def test_inductor_takes_the_op_by_keywords(pack: Pack, op: str) -> None:
    """As a server's own step has it: the overloaded name, keywords, tensors with strides."""
    functions = pack._packs[ARCH].functions.values()
    made, arguments = custom_call(Random(f"keywords {op}"), pack, op)
    packet = getattr(torch.ops.specplan, made._schema.name.removeprefix("specplan::"))

    def step() -> None:
        packet(**arguments)

    torch._dynamo.reset()
    before = sum(len(f.launches) for f in functions)
    torch.compile(step, fullgraph=True)()
    assert sum(len(f.launches) for f in functions) == before + 1


def test_strided_outputs_are_nothing_special_to_a_compiled_graph(pack: Pack) -> None:
    """A keyword ``out`` would be torch's own to Dynamo, which refuses one with strides."""
    names = {
        argument.name
        for name in torch.ops.specplan
        for argument in getattr(torch.ops.specplan, name).default._schema.arguments
    }
    assert "output" in names
    assert "out" not in names
    _, arguments = custom_call(Random("strided"), pack, "sparse_gqa_verify")
    rows, heads, width = arguments["output"].shape
    wide = torch.zeros(rows, heads + 1, width, dtype=torch.bfloat16)
    arguments["output"] = wide[:, :heads]
    torch._dynamo.reset()
    torch.compile(lambda: torch.ops.specplan.sparse_gqa_verify(**arguments), fullgraph=True)()
    assert bool(wide[:, :heads].any())
    assert not bool(wide[:, heads:].any())

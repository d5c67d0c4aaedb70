"""What the rollback ops check in Python and pass on, with the compiled functions replaced."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import packs
from support.shared import Shared

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import Reason, UncertifiedCell, op  # noqa: E402
from specplan import pack as runtime_pack  # noqa: E402
from specplan.checking import Checks  # noqa: E402
from specplan.kernels.rollback.cases import RollbackCase  # noqa: E402
from specplan.loading import ArchPack  # noqa: E402
from specplan.plans import catalog as catalogs  # noqa: E402
from specplan.plans.coverage import uses_of  # noqa: E402
from specplan.plans.manifest import Manifest, PlanRecord, group_cells  # noqa: E402

from support.recorder import Recorder  # noqa: E402  isort: skip
from support.stubs import Compiled, on_device  # noqa: E402  isort: skip

ARCH = "sm_90a"
CATALOG = """\
schema: 1
archs:
  sm_90a:
    {device: NVIDIA H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472, smem_per_cta:
    232448}
families:
  rollback:
    problems:
      qsa12: {planes: 12, row_bytes: 256, side_planes: 1, side_row_bytes: 12}
    cells:
      - {problems: [qsa12], requests: 1..3, tokens: 4, splits: auto, dtypes: [int32],
         candidate: [sm_90a], why: tests}
"""
GEOMETRY = {"planes": 12, "row_bytes": 256, "side_planes": 1, "side_row_bytes": 12}


@pytest.fixture(scope="module")
def compiled(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The compiled functions of the cells up to 3 requests of qsa12."""
    pytest.importorskip("cutlass", reason="needs the compiler: pip install 'specplan[test]'")
    place = shared.made("rollback-ranges", lambda place: packs.build(place, CATALOG, "--jobs", "1"))
    return Recorder(place / "packs" / ARCH, tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> specplan.Pack:
    """The shipped rollback cells up to 3 requests on one imagined device, all certified."""
    catalog = catalogs.load()
    plans: dict[str, PlanRecord] = {}
    entries = []
    for cell in catalog.cells(ARCH, "rollback"):
        if cell.requests <= 3 and cell.problem == "qsa12":
            of_cell = catalog.plans_of(cell)
            entries.append((cell, uses_of(of_cell), True, True))
            for plan in of_cell:
                plans[plan.symbol] = PlanRecord(
                    plan.symbol, "rollback", plan.op, plan.spec, {}, "", "", "", 0, 0, {}
                )
    arch_pack = object.__new__(ArchPack)
    arch_pack.directory = Path("nowhere")
    arch_pack.manifest = Manifest(
        *(ARCH, (9, 0), "0", {}, {}, plans, catalog.problems, group_cells(entries))
    )
    arch_pack.functions = {s: Compiled(s, dict(p.spec)) for s, p in plans.items()}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    pack = runtime_pack.Pack([arch_pack], candidates=False)
    pack._prepared.add((0, "rollback"))
    # The optional arguments that a call leaves out are made on the imagined device once.
    nothing = on_device(torch.empty(0, dtype=torch.int32))
    pack.rollback.commit.op._absent[0] = (nothing, on_device(torch.empty(0, 9, dtype=torch.int64)))
    return pack


def call(op_name: str, requests: int = 2, tokens: int = 4, **options: Any) -> dict[str, Any]:
    case = RollbackCase("call", op_name, GEOMETRY, requests, tokens, "int32", "cpu", **options)
    case.refill(1)
    return {
        name: on_device(value) if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }


def launches(pack: specplan.Pack) -> list[tuple[str, tuple[Any, ...]]]:
    functions = pack._packs[ARCH].functions
    return [(f.symbol, launch) for f in functions.values() for launch in f.launches]


@pytest.mark.parametrize("name", ["gather", "restore", "commit"])
def test_a_call_launches_its_plan_with_the_arguments_in_the_compiled_order(
    loaded: specplan.Pack, name: str
) -> None:
    arguments = call(name)
    assert getattr(loaded.rollback, name)(**arguments) is True
    ((symbol, launch),) = launches(loaded)
    assert symbol.startswith(f"rollback_{name}__index_int32")
    names = ["planes", "pages", "within", "old", "pending"]
    names += {"gather": [], "restore": ["rejected"], "commit": ["accepted"]}[name]
    for at, argument in enumerate(names):
        assert launch[at] is arguments[argument], argument
    picked = getattr(loaded.rollback, name).pick(problem="qsa12", requests=2, tokens=4)
    assert launch[-2:] == (picked.launch["splits"], picked.launch["overlap"])
    if name == "commit":
        assert launch[8:11] == tuple(arguments[n] for n in ("states", "slots", "cursors"))
        assert [t.numel() for t in launch[6:8]] == [0, 0]
        assert launch[11] == 4


def test_listed_rows_pass_their_lists_and_no_tokens(loaded: specplan.Pack) -> None:
    arguments = call("commit", listed=True)
    assert loaded.rollback.commit(**arguments)
    ((_, launch),) = launches(loaded)
    assert launch[6] is arguments["row_requests"] and launch[7] is arguments["row_ordinals"]
    assert launch[11] == 0


def test_ragged_rows_run_the_plan_of_the_full_batch(loaded: specplan.Pack) -> None:
    arguments = call("gather", requests=3)
    for name in ("pages", "within"):
        arguments[name] = arguments[name][:9]
    assert loaded.rollback.gather(**arguments)
    arguments["pages"] = torch.cat([arguments["pages"]] * 2)[:13]
    answer = loaded.rollback.gather(**arguments)
    assert not answer and answer.reason is Reason.NOT_IN_CATALOG
    assert answer.cell is not None and answer.cell.requests == 4


@pytest.mark.parametrize("name", ["gather", "restore", "commit"])
def test_no_rows_is_true_before_anything_is_looked_at(loaded: specplan.Pack, name: str) -> None:
    arguments = {**call(name), "pages": torch.empty(0, dtype=torch.int32), "old": None}
    assert getattr(loaded.rollback, name)(**arguments) is True
    assert getattr(loaded.rollback, name).bind(**arguments)() is None
    assert launches(loaded) == []


WRONG: list[tuple[str, str, Any, Reason]] = [
    ("gather", "old", lambda t: t[:7], Reason.RANGE),
    ("gather", "old", lambda t: t[:, :3072], Reason.RANGE),
    ("gather", "old", lambda t: t.reshape(-1), Reason.ARGUMENT),
    ("gather", "planes", lambda t: t[:-1], Reason.RANGE),
    ("gather", "tokens", lambda t: 0, Reason.RANGE),
    ("gather", "tokens", lambda t: -1, Reason.RANGE),
    ("gather", "pages", lambda t: t.short(), Reason.ARGUMENT),
    ("restore", "pages", lambda t: None, Reason.ARGUMENT),
    ("commit", "accepted", lambda t: t[:-1], Reason.RANGE),
    ("commit", "row_ordinals", lambda t: torch.zeros(8, dtype=torch.int32), Reason.RANGE),
    ("commit", "slots", lambda t: t[:-1], Reason.RANGE),
    ("commit", "slots", lambda t: None, Reason.RANGE),
    ("commit", "states", lambda t: torch.zeros(65, 9, dtype=torch.int64), Reason.RANGE),
]


@pytest.mark.parametrize(("name", "argument", "change", "reason"), WRONG)
def test_what_does_not_fit_together_is_declined_before_a_launch(
    loaded: specplan.Pack,
    compiled: Recorder,
    name: str,
    argument: str,
    change: Any,
    reason: Reason,
) -> None:
    """By a first call, and by one behind a remembered good one, which only the compiled function
    checks.
    """
    loaded._packs[ARCH].functions.update(compiled.functions)
    good = call(name)
    arguments = dict(good)
    arguments[argument] = change(arguments[argument])
    called = getattr(loaded.rollback, name)
    for remembered in (False, True):
        if remembered:
            assert called(**good) is True
        before = compiled.count()
        for answer in (called(**arguments), called.bind(**arguments)):
            assert not answer
            assert answer.reason is reason, str(answer)
        with pytest.raises(UncertifiedCell):
            called.require(**arguments)
        assert compiled.count() == before


def test_layouts_whose_records_differ_by_the_order_of_their_planes_are_told_apart(
    loaded: specplan.Pack, compiled: Recorder
) -> None:
    """The same planes in another order need longer records: a snapshot for the one is too short
    for the other.
    """
    loaded._packs[ARCH].functions.update(compiled.functions)
    good = call("gather")
    assert loaded.rollback.gather(**good) is True
    longer = replace(good["layout"], record_bytes=good["layout"].record_bytes + 128)
    answer = loaded.rollback.gather(**{**good, "layout": longer})
    assert not answer and answer.reason is Reason.RANGE


def test_planes_of_another_problem_are_an_unknown_problem(loaded: specplan.Pack) -> None:
    planes = [torch.zeros(2, 8, 4, dtype=torch.int32) for _ in range(5)]
    layout, table = loaded.rollback.describe(planes)
    rows = on_device(torch.zeros(4, dtype=torch.int32))
    old = torch.zeros(4, layout.record_bytes, dtype=torch.uint8)
    pending = torch.zeros(1, dtype=torch.int32)
    answer = loaded.rollback.gather(layout, 4, table, rows, rows, old, pending)
    assert not answer and answer.reason is Reason.UNKNOWN_PROBLEM


@pytest.mark.parametrize("name", ["gather", "restore", "commit"])
def test_bind_asks_the_module_with_a_launch_of_no_work(
    loaded: specplan.Pack, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoConversion:
        @staticmethod
        def from_dlpack(tensor: Any) -> Any:
            return tensor

    monkeypatch.setattr(op.library, "tvm_ffi", lambda: NoConversion)
    arguments = call(name)
    launch = getattr(loaded.rollback, name).bind(**arguments)
    ((_, idle),) = launches(loaded)
    assert idle[-2:] == (0, 0), "no splits, so that nothing is launched"
    launch()
    real = launches(loaded)[-1][1]
    picked = getattr(loaded.rollback, name).pick(problem="qsa12", requests=2, tokens=4)
    assert real[-2:] == tuple(picked.launch.values())
    assert real[:-2] == idle[:-2]


def test_bind_and_call_take_the_same_call(
    loaded: specplan.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument that is left out is left out of both, wherever it stands in the signature."""
    converter = type("NoConversion", (), {"from_dlpack": staticmethod(lambda tensor: tensor)})
    monkeypatch.setattr(op.library, "tvm_ffi", lambda: converter)
    given = call("commit", staged=True)
    assert given["slots"] is not None and given["row_requests"] is None
    for left_out in ((), ("cursors",), ("states",), ("cursors", "states", "slots")):
        named = {name: value for name, value in given.items() if value is not None}
        for name in left_out:
            del named[name]
        assert loaded.rollback.commit(**named) is True
        called = launches(loaded)[-1]
        loaded.rollback.commit.bind(**named)()
        assert launches(loaded)[-1] == called


def test_idle_arguments_fit_the_compiled_functions(loaded: specplan.Pack) -> None:
    counts = {"gather": 9, "restore": 10, "commit": 16}
    for record in loaded.manifest().plans.values():
        arguments = loaded.rollback.idle_arguments(record, torch.device("cpu"))
        assert len(arguments) == counts[record.op]
        assert arguments[1].dtype == getattr(torch, dict(record.spec)["index"])


@pytest.mark.parametrize("candidates", [False, True])
def test_preparing_launches_no_plan_that_no_cell_may_run(
    loaded: specplan.Pack, monkeypatch: pytest.MonkeyPatch, candidates: bool
) -> None:
    """Only the int64 cells lose their certificates: their plans stay untouched unless asked for."""
    arch_pack = loaded._packs[ARCH]
    groups = tuple(replace(g, certified=g.dtype == "int32") for g in arch_pack.manifest.groups)
    arch_pack.manifest = replace(arch_pack.manifest, groups=groups)
    loaded.candidates = candidates
    loaded._prepared.clear()
    monkeypatch.setattr(
        type(loaded.rollback), "idle_arguments", staticmethod(lambda record, device: ("idle",))
    )
    loaded._prepare(0, "rollback")
    seen = {symbol for symbol, launch in launches(loaded) if launch == ("idle",)}
    both = {s for s in arch_pack.functions if "int64" in s}
    assert seen == set(arch_pack.functions) - (set() if candidates else both)
    assert both, "there are plans that it is about"


@pytest.mark.parametrize("name", ["gather", "restore", "commit"])
def test_values_are_checked_where_the_pack_is_told_to(loaded: specplan.Pack, name: str) -> None:
    loaded.checks = Checks(True)
    op, right = getattr(loaded.rollback, name), call(name)
    for each in ("pages", "within"):
        right[each] = on_device(right[each].clamp(-1, 0))
    if name == "commit":
        right["slots"] = on_device(torch.tensor([0, -1], dtype=torch.int32))
    assert op(**right) is True
    wrong: list[tuple[str, int]] = [("pages", 1 << 20), ("within", 1 << 20)]
    if name == "commit":
        wrong += [("slots", 1 << 20), ("slots", 0)]
    for argument, value in wrong:
        changed = on_device(right[argument].clone())
        changed[1] = value
        before = len(launches(loaded))
        with pytest.raises(specplan.ValueCheckError, match=f"{argument} in row 1 is {value}"):
            op(**{**right, argument: changed})
        assert len(launches(loaded)) == before

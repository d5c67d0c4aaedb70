"""The op with its compiled functions replaced by the reference behind the checks of a compiled
module: what it passes on, what it declines, and the whole of certification over it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specplan import (  # noqa: E402, ValueCheckError
    Reason,
    Uncertified,
    UncertifiedCell,
    ValueCheckError,
    library,
)
from specplan.checking import Checks  # noqa: E402
from specplan.kernels.sparse_gqa_verify import cases, reference  # noqa: E402
from specplan.loading import ArchPack  # noqa: E402
from specplan.pack import Pack  # noqa: E402
from specplan.plans import catalog, certificates, manifest  # noqa: E402
from specplan.plans.sparse_gqa_verify import (  # noqa: E402
    FAMILY,
    HEAD_DIM,
    OP,
    VScaleOrder,
    workspace_words,
)
from specplan.sparse_gqa_verify import SparseGqaVerify  # noqa: E402
from specplan.tools import certify  # noqa: E402

from support.stubs import OnDevice, broken, refusal  # noqa: E402  isort: skip

CATALOG = catalog.loads(
    """\
schema: 1
archs:
  sm_90a: {device: H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472,
    smem_per_cta: 232448}
families:
  sparse_gqa_verify:
    problems:
      model: {q_heads: 24, kv_heads: 2, head_dim: 256, page_size: 32, selected: 2051}
      small: {q_heads: 6, kv_heads: 2, head_dim: 256, page_size: 32, selected: 75}
    cells:
      - {problems: [model, small], requests: 1..6, tokens: 1..4, splits: auto,
         dtypes: [bf16, fp8_e4m3, nvfp4], candidate: [sm_90a], why: tests}
      - {problems: [small], requests: 2, tokens: 3, splits: [1, 4, 8],
         dtypes: [bf16, fp8_e4m3, nvfp4], candidate: [sm_90a], why: tests}
"""
)
SMALL = CATALOG.problems["sparse_gqa_verify"]["small"]
NAMES = {
    "bf16": ("q", "k_cache", "v_cache"),
    "fp8_e4m3": ("q", "k_cache", "v_cache", "k_scale", "v_scale"),
    "nvfp4": (
        *("q", "k_cache", "v_cache", "k_block_scales", "v_block_scales", "k_scale", "v_scale"),
    ),
}
COMMON = (
    *("block_table", "selected_tokens", "request_indices", "valid_count", "query_positions"),
    *("output_gate", "out", "workspace", "softmax_scale", "use_valid_count"),
    *("use_query_positions", "use_output_gate"),
)
SIZES = ("requests", "q_heads", "kv_heads", "page_size", "width", "words")
LAUNCH = ("tokens", "group_rows", "splits", "whole_units", "cluster", "apart")


class Compiled:
    """What a compiled function checks, and then the reference."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.names = (*NAMES[dtype], *COMMON, *(("v_interleaved",) * (dtype == "nvfp4")))
        self.names += (*SIZES, *LAUNCH)
        self.calls: list[dict[str, Any]] = []
        self.captured: list[dict[str, Any]] | None = None
        self.damage: Callable[[dict[str, Any]], object] = lambda call: None

    def __call__(self, *arguments: Any) -> None:
        self.check(arguments)
        call = dict(zip(self.names, arguments, strict=True))
        if call["splits"] == 0:
            return
        self.calls.append(call)
        if self.captured is not None:
            self.captured.append(call)
        else:
            self.run(call)

    def check(self, arguments: tuple[Any, ...]) -> None:
        wrong = refusal(OP, {"dtype": self.dtype}, arguments)
        if wrong is not None:
            raise ValueError(wrong)
        # What the host side refuses by itself: test_gqa_compiled_ranges.py asks it.
        if broken(OP, {"dtype": self.dtype}, arguments):
            raise RuntimeError("error 77001")

    def run(self, call: dict[str, Any]) -> None:
        order = VScaleOrder.INTERLEAVED if call.get("v_interleaved") else VScaleOrder.LINEAR
        tensors = {
            name: value.as_subclass(torch.Tensor)
            for name, value in call.items()
            if isinstance(value, torch.Tensor)
        }
        splits, whole = call["splits"], call["whole_units"]
        rows, heads, _ = tensors["q"].shape
        kv_heads = tensors["k_cache"].shape[1]
        geometry = {"q_heads": heads, "kv_heads": kv_heads}
        requests = rows // call["tokens"]
        words = workspace_words(
            geometry, requests, call["tokens"], call["group_rows"], splits, whole, call["cluster"]
        )
        tensors["workspace"][:words] = 1.0
        scales = {n: tensors[n] for n in self.names[3 : self.names.index("block_table")]}
        result = reference.attention(
            *(tensors[n] for n in (*NAMES["bf16"], *COMMON[:3])),
            softmax_scale=call["softmax_scale"],
            v_scale_order=order,
            **scales,
            **{n: tensors[n] for n in COMMON[3:6] if call[f"use_{n}"]},
        )
        tensors["out"].copy_(result.out)
        self.damage({**call, **tensors})


@pytest.fixture
def functions() -> dict[str, Compiled]:
    plans = [p for cell in CATALOG.cells() for p in CATALOG.plans_of(cell)]
    return {plan.symbol: Compiled(str(plan["dtype"])) for plan in plans}


@pytest.fixture
def pack(functions: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch) -> Pack:
    """A pack of the catalog above without objects, on one imagined device."""
    plans, entries = {}, []
    for cell in CATALOG.cells():
        uses = []
        for plan in CATALOG.plans_of(cell):
            facts = (plan.symbol, plan.family, plan.op, plan.spec, {}, "", "", "", 0, 0, {})
            plans[plan.symbol] = manifest.PlanRecord(*facts)
            uses.append(manifest.Use(plan.symbol, plan.launch))
        entries.append((cell, tuple(uses), CATALOG.is_automatic(cell), False))
    arch_pack = object.__new__(ArchPack)
    arch_pack.manifest = manifest.Manifest(
        *("sm_90a", (9, 0), "0", {}, {}, plans, CATALOG.problems),
        manifest.group_cells(entries),
    )
    arch_pack.functions = dict(functions)
    arch_pack.directory = None  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: None)
    monkeypatch.setattr(Pack, "_prepare", lambda *arguments: None)
    monkeypatch.setattr(library, "tvm_ffi", lambda: SimpleNamespace(from_dlpack=lambda t: t))
    loaded = Pack([arch_pack], candidates=True)
    loaded.sparse_gqa_verify.op._absent[0] = (torch.empty(0),)
    return loaded


def case_of(dtype: str, requests: int = 2, tokens: int = 3, **options: Any) -> cases.GqaCase:
    options.setdefault("context", 160)
    splits = FAMILY.splits(SMALL, requests, tokens, dtype, CATALOG.archs["sm_90a"])
    return cases.GqaCase("test", SMALL, requests, tokens, splits, dtype, "cpu", **options)


def call_of(case: cases.GqaCase, **changes: Any) -> dict[str, Any]:
    call = {**case.arguments(), "splits": None, **changes}
    return {**call, "q": call["q"].as_subclass(OnDevice)}


def passed(case: cases.GqaCase, expected: cases.Expected) -> bool:
    return all(bool(c.error <= c.bound) for c in case.compare(expected))


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("nhd", [False, True])
@pytest.mark.parametrize("options", [{}, {"counted": True, "gated": False}])
def test_a_call_reaches_its_plan_with_its_arguments_in_order(
    pack: Pack, functions: dict[str, Compiled], dtype: str, nhd: bool, options: dict[str, Any]
) -> None:
    for order in VScaleOrder if dtype == "nvfp4" else (VScaleOrder.LINEAR,):
        # Not poisoned: without positions, rows attend what these exclude.
        case = case_of(dtype, nhd=nhd, order=order, poison=False, **options)
        for change in ({}, {"query_positions": None}):
            case.refill(5)
            case.inputs = dataclasses.replace(case.inputs, **change)
            expected = case.expect()
            assert pack.sparse_gqa_verify(**call_of(case, **change)) is True
            assert passed(case, expected)
            case._poison()
            launch = pack.sparse_gqa_verify.bind(**call_of(case, **change))
            assert launch
            assert case.buffer.isnan().all()
            launch()
            assert passed(case, expected)
            assert pack.sparse_gqa_verify.require(**call_of(case, **change)) is None
    used = [stub for stub in functions.values() if stub.calls]
    assert [stub.dtype for stub in used] == [dtype]
    for call in used[0].calls:
        assert call["use_output_gate"] == int(options.get("gated", True))
        assert call["use_valid_count"] == int(options.get("counted", False))
        assert call["tokens"] == 3


def test_forced_splits_are_launched(pack: Pack, functions: dict[str, Compiled]) -> None:
    case = case_of("bf16")
    space = torch.zeros(1 << 20)
    for splits in (1, 4, 8):
        assert pack.sparse_gqa_verify(**call_of(case, splits=splits, workspace=space)) is True
    assert [c["splits"] for stub in functions.values() for c in stub.calls] == [1, 4, 8]
    answer = pack.sparse_gqa_verify(**call_of(case, splits=3, workspace=space))
    assert isinstance(answer, Uncertified)
    assert answer.reason is Reason.NOT_IN_CATALOG


def test_calls_that_look_alike_to_the_hot_path_are_told_apart(pack: Pack) -> None:
    """Four rows of 6 heads and one of 24 have as many elements: the compiled function refuses the
    other's sizes, and the call is looked up anew.
    """
    model = CATALOG.problems["sparse_gqa_verify"]["model"]
    made = [
        cases.GqaCase("small", SMALL, 4, 1, 64, "bf16", "cpu", context=160),
        cases.GqaCase("model", model, 1, 1, 64, "bf16", "cpu", context=160),
    ]
    for case in (made[0], made[1], made[0], made[0], made[1]):
        case._poison()
        assert pack.sparse_gqa_verify(**call_of(case)) is True
        assert passed(case, case.expect())


def test_no_workspace_where_nothing_is_split(pack: Pack) -> None:
    case = case_of("bf16")
    assert pack.sparse_gqa_verify(**call_of(case, splits=1, workspace=None)) is True
    assert pack.sparse_gqa_verify.bind(**call_of(case, splits=1, workspace=None))


def test_no_rows_is_a_launch_of_nothing(pack: Pack, functions: dict[str, Compiled]) -> None:
    case = case_of("bf16")
    call = call_of(case)
    for name in ("q", "out", "output_gate", "selected_tokens", "request_indices"):
        call[name] = call[name][:0]
    assert pack.sparse_gqa_verify(**call) is True
    pack.sparse_gqa_verify.bind(**call)()
    assert not any(stub.calls for stub in functions.values())


def test_block_scales_as_bytes_and_a_flat_gate_are_taken(pack: Pack) -> None:
    case = case_of("nvfp4", order=VScaleOrder.INTERLEAVED)
    case.refill(3)
    expected = case.expect()
    arguments = case.arguments()
    changes = {
        "k_block_scales": arguments["k_block_scales"].view(torch.uint8),
        "v_block_scales": arguments["v_block_scales"].view(torch.uint8),
        "output_gate": arguments["output_gate"].flatten(1),
    }
    assert pack.sparse_gqa_verify(**call_of(case, **changes)) is True
    assert passed(case, expected)
    case._poison()
    pack.sparse_gqa_verify.bind(**call_of(case, **changes))()
    assert passed(case, expected)


@pytest.mark.parametrize("warm", [False, True])
def test_declined_calls_say_why_and_launch_nothing(
    pack: Pack, functions: dict[str, Compiled], warm: bool
) -> None:
    op = pack.sparse_gqa_verify
    case = case_of("bf16")
    if warm:
        assert op(**call_of(case)) is True
        for stub in functions.values():
            stub.calls.clear()
    arguments = case.arguments()
    out, q = arguments["out"], arguments["q"]
    fused = torch.zeros(6, 3, 6, HEAD_DIM, dtype=torch.bfloat16)
    words = op.workspace(problem="small", requests=2, tokens=3, splits=8)
    space = torch.empty(words)
    expected = [
        ({"tokens": 4}, Reason.RANGE, "6 rows are no multiple of 4 tokens"),
        ({"tokens": 0}, Reason.RANGE, "tokens is 0"),
        ({"tokens": "3"}, Reason.ARGUMENT, "str"),
        (
            {"workspace": space[:-1], "splits": 8},
            Reason.RANGE,
            f"needs a workspace of {words} words, this one has {words - 1}",
        ),
        ({"workspace": None, "splits": 8}, Reason.RANGE, "needs a workspace of "),
        ({"output_gate": out}, Reason.ARGUMENT, "out overlaps"),
        ({"q": fused[:, 0], "out": fused[:, 1]}, Reason.ARGUMENT, "out overlaps"),
        ({"out": out[:1].expand(out.shape)}, Reason.ARGUMENT, "rows of out share memory"),
        ({"softmax_scale": float("inf")}, Reason.ARGUMENT, "softmax_scale is inf"),
        ({"softmax_scale": -1.0}, Reason.ARGUMENT, "softmax_scale is -1.0"),
        ({"softmax_scale": 1e39}, Reason.ARGUMENT, "softmax_scale is 1e+39"),
        ({"softmax_scale": 1e-50}, Reason.ARGUMENT, "softmax_scale is 1e-50"),
        ({"softmax_scale": 1 << 2000}, Reason.ARGUMENT, "too large"),
        ({"softmax_scale": None}, Reason.ARGUMENT, "NoneType"),
        ({"k_scale": torch.ones(1)}, Reason.ARGUMENT, "take no k_scale"),
        ({"v_block_scales": torch.ones(1)}, Reason.ARGUMENT, "take no v_block_scales"),
        (
            {"v_scale_order": VScaleOrder.LINEAR},
            Reason.ARGUMENT,
            "caches of bf16 take no v_scale_order",
        ),
        ({"q": q[:, :5]}, Reason.UNKNOWN_PROBLEM, "q_heads=5"),
        ({"q": q.half()}, Reason.ARGUMENT, "q.dtype"),
        ({"q": q[0]}, Reason.ARGUMENT, "expected 3 dimensions"),
        ({"k_cache": arguments["k_cache"].float()}, Reason.ARGUMENT, "torch.float32"),
        ({"k_cache": arguments["k_cache"][:, :, :16]}, Reason.UNKNOWN_PROBLEM, "page_size=16"),
        ({"request_indices": arguments["request_indices"].long()}, Reason.ARGUMENT, "dtype"),
        ({"query_positions": arguments["query_positions"].long()}, Reason.ARGUMENT, "dtype"),
        ({"block_table": None}, Reason.ARGUMENT, "no tensor"),
        ({"output_gate": 2.5}, Reason.ARGUMENT, "no tensor"),
        ({"output_gate": [1, 2]}, Reason.ARGUMENT, "no tensor"),
    ]
    within = space[:6].view(torch.int32)
    overlap = {"request_indices": within, "workspace": space, "splits": 8}
    expected.append((overlap, Reason.ARGUMENT, "the workspace overlaps"))
    for changes, reason, said in expected:
        for ask in (op, op.bind):
            answer = ask(**call_of(case, **changes))
            assert isinstance(answer, Uncertified), changes
            assert answer.reason is reason, (changes, answer.detail)
            assert said in answer.detail, (changes, answer.detail)
        with pytest.raises(UncertifiedCell):
            op.require(**call_of(case, **changes))
    answer = op(**case.arguments())
    assert isinstance(answer, Uncertified)
    assert answer.reason is Reason.DEVICE
    assert not any(stub.calls for stub in functions.values())
    assert op(**call_of(case)) is True


@pytest.mark.parametrize("name", ["k_block_scales", "v_block_scales", "output_gate"])
@pytest.mark.parametrize("value", [3, "slots", [1, 2, 3]])
def test_what_is_no_tensor_is_declined_where_it_could_be_fitted(
    pack: Pack, name: str, value: Any
) -> None:
    case = case_of("nvfp4")
    for ask in (pack.sparse_gqa_verify, pack.sparse_gqa_verify.bind):
        answer = ask(**call_of(case, **{name: value}))
        assert isinstance(answer, Uncertified)
        assert answer.reason is Reason.ARGUMENT


def test_the_declined_cases_differ_from_a_good_call_by_what_they_name(pack: Pack) -> None:
    """The unchanged call is taken, so each of them is declined for its change."""
    model = CATALOG.problems["sparse_gqa_verify"]["model"]
    for dtype in FAMILY.dtypes:
        case = cases.GqaCase("good", model, 2, 4, 64, dtype, "cpu", context=2600)
        assert pack.sparse_gqa_verify.bind(**call_of(case)), dtype
    count = 0
    for what, arguments, storage in cases.declined(torch.device("cpu")):
        before = storage.clone()
        arguments["q"] = arguments["q"].as_subclass(OnDevice)
        for ask in (pack.sparse_gqa_verify, pack.sparse_gqa_verify.bind):
            assert isinstance(ask(**arguments), Uncertified), what
        assert torch.equal(before, storage), what
        count += 1
    assert count > 40


def test_workspace_comes_from_integers_alone(pack: Pack) -> None:
    op = pack.sparse_gqa_verify
    for requests, tokens, splits in ((2, 3, None), (2, 3, 1), (2, 3, 4), (2, 3, 8), (5, 1, None)):
        words = op.workspace(problem="small", requests=requests, tokens=tokens, splits=splits)
        assert words == op.workspace(**SMALL, requests=requests, tokens=tokens, splits=splits)
        (plan,) = FAMILY.plans(
            SMALL,
            requests,
            tokens,
            splits or FAMILY.splits(SMALL, requests, tokens, "bf16", CATALOG.archs["sm_90a"]),
            "bf16",
            CATALOG.archs["sm_90a"],
        )
        sizes = [plan.int(n) for n in LAUNCH]
        assert words == workspace_words(SMALL, requests, *sizes[:-1])
        assert (words == 0) == (plan.int("splits") == 1 or plan.int("cluster") > 1)
    with pytest.raises(UncertifiedCell):
        op.workspace(problem="small", requests=7, tokens=1)


def test_a_workspace_for_no_dtype_is_enough_for_each(pack: Pack) -> None:
    """The rule's launches depend on the dtype."""
    op = pack.sparse_gqa_verify
    differ = 0
    for requests in range(1, 7):
        for tokens in range(1, 5):
            sizes = {"problem": "model", "requests": requests, "tokens": tokens}
            words = [op.workspace(**sizes, dtype=dtype) for dtype in FAMILY.dtypes]
            assert op.workspace(**sizes) == max(words)
            differ += len(set(words)) > 1
    assert differ > 0


def test_idle_arguments_are_taken_and_split(functions: dict[str, Compiled], pack: Pack) -> None:
    for symbol, plan in pack.manifest().plans.items():
        device = torch.device("cpu")
        functions[symbol](*SparseGqaVerify.idle_arguments(plan, device))
        for arguments in SparseGqaVerify.further_idle_arguments(plan, device):
            functions[symbol](*arguments)
        calls = functions[symbol].calls
        assert [(call["splits"], call["cluster"]) for call in calls] == [(2, 1), (2, 2)]
        assert all((call["out"] == 0).all() for call in calls)


class Graph:
    """A CUDA graph of stubs: captured calls run at each replay."""

    def __init__(self) -> None:
        self.calls: list[tuple[Compiled, dict[str, Any]]] = []

    def replay(self) -> None:
        for stub, call in self.calls:
            stub.run(call)


@pytest.fixture
def run(
    pack: Pack,
    functions: dict[str, Compiled],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> certify.FamilyRun:
    """Certification of the family over the stubs, on the CPU."""

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        captured: list[tuple[Compiled, dict[str, Any]]] = graph.calls
        for stub in functions.values():
            stub.captured = _Appending(stub, captured)  # type: ignore[assignment]
        yield
        for stub in functions.values():
            stub.captured = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    drawn = cases.GqaCase.arguments

    def arguments(case: cases.GqaCase) -> dict[str, Any]:
        given = dict(drawn(case))
        return {**given, "q": given["q"].as_subclass(OnDevice)}

    monkeypatch.setattr(cases.GqaCase, "arguments", arguments)
    device = torch.device("cpu")
    return certify.FamilyRun(
        CATALOG, pack, "sparse_gqa_verify", device, tmp_path, certify.Shard(1, 1)
    )


class _Appending:
    def __init__(self, stub: Compiled, calls: list[tuple[Compiled, dict[str, Any]]]) -> None:
        self.stub, self.calls = stub, calls

    def append(self, call: dict[str, Any]) -> None:
        self.calls.append((self.stub, call))


def cells(requests: int, tokens: int) -> list[Any]:
    return [
        cell
        for cell in CATALOG.cells("sm_90a")
        if (cell.problem, cell.requests, cell.tokens) == ("small", requests, tokens)
    ]


@pytest.mark.parametrize(("requests", "tokens"), [(1, 1), (2, 3), (6, 4)])
def test_certification_passes_the_reference(
    run: certify.FamilyRun, requests: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cells(requests, tokens)
    assert len(asked) == (12 if (requests, tokens) == (2, 3) else 3)
    uses = {cell: certify.uses_of(CATALOG.plans_of(cell)) for cell in asked}
    results = dict(run.run_batch(asked, uses))
    assert set(results) == set(asked)
    for measured in results.values():
        assert sum(each.comparisons for each in measured) == 2 * (4 * 6 + 1)
        bounds = {(each.output.name, each.output.measure): each.output.bound for each in measured}
        assert bounds["out", "relative L2 error"] == cases.RELATIVE_L2
        assert bounds["out", "largest error"] == cases.ABSOLUTE
        assert len(bounds) == 7
        assert all(each.error <= each.output.bound for each in measured)
    # What was measured makes a certificate that is read.
    facts = {"name": "none", "capability": "9.0", "sm_count": 132, "driver": "none"}
    monkeypatch.setattr(certify, "_device_facts", lambda device: facts)
    bits = {"device_code": "1" * 64, "host_code": "2" * 64, "signature": "f()"}
    key = {"sources": {}, "tools": {}}
    plans = {s: dataclasses.replace(p, key=key, **bits) for s, p in run.manifest.plans.items()}
    run.manifest = dataclasses.replace(run.manifest, plans=plans)
    run.path = run.path.parent / "sm_90a" / run.path.name
    run.path.parent.mkdir()
    certificates.write(run.path, run.certificate(uses, results))
    found = certificates.read(run.path)
    assert found.count == len(asked)
    assert {tally.output.name for tally in found.tallies} >= {"out", "guards", "inputs"}


def _guard(call: dict[str, Any]) -> None:
    out = call["out"]
    end = out.storage_offset() + out.stride(0) * out.shape[0]
    torch.as_strided(out, (1,), (1,), end)[0] = torch.nan


def _beyond(call: dict[str, Any]) -> None:
    space = call["workspace"]
    torch.as_strided(space, (1,), (1,), space.storage_offset() + space.shape[0])[0] = torch.nan


def _unsteady() -> Callable[[dict[str, Any]], object]:
    state = iter(range(1, 1 << 20))

    def change(call: dict[str, Any]) -> None:
        call["out"][0, 0, 0] += 2.0**-9 * (next(state) % 2)

    return change


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    # The last row is of no request.
    "one head of one row": (lambda c: c["out"][0, 2].mul_(1.5), "error"),
    "one element": (lambda c: c["out"][0, 0, 7:8].add_(0.25), "error"),
    "NaN": (lambda c: c["out"][0, 0, :1].fill_(torch.nan), "nan relative L2"),
    "a stray NaN after the output": (_guard, "elements written"),
    "a stray write after the workspace": (_beyond, "elements written"),
    "an input": (lambda c: c["selected_tokens"][0, :1].add_(1), "bytes that differ"),
    "a cache": (lambda c: c["v_cache"].view(torch.uint8)[0, 0, 0, :1].add_(1), "bytes that differ"),
    "another result when run again": (_unsteady(), "bits that differ"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_certification_fails_on(
    run: certify.FamilyRun, functions: dict[str, Compiled], damage: str
) -> None:
    change, said = DAMAGES[damage]
    for stub in functions.values():
        stub.damage = change
    cell = cells(3, 2)[0]
    uses = {cell: certify.uses_of(CATALOG.plans_of(cell))}
    with pytest.raises(certify.CertificationError, match=said):
        dict(run.run_batch([cell], uses))


def test_certification_checks_declined_calls(run: certify.FamilyRun) -> None:
    run.check_declined()


def test_values_are_checked_where_the_pack_is_told_to(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pack.checks = Checks(True)
    case = case_of("bf16", counted=True)
    case.refill(1)
    call = call_of(case)
    pages, columns = call["k_cache"].shape[0], call["block_table"].shape[1]
    width, page = call["selected_tokens"].shape[1], call["k_cache"].shape[2]
    right = {
        "block_table": call["block_table"].clamp(-1, pages - 1),
        "request_indices": call["request_indices"].clamp(-1, 1),
        "selected_tokens": call["selected_tokens"].clamp(-1, columns * page - 1),
        "valid_count": torch.full_like(call["valid_count"], width),
        "query_positions": torch.full_like(call["query_positions"], columns * page),
    }
    right["request_indices"][0] = 0
    right["selected_tokens"][0, 2] = page - 1
    call.update(right)
    assert pack.sparse_gqa_verify(**call) is True
    wrong = {
        "block_table": ((0, 0), pages, rf"block_table in row 0, \d+ is {pages}; the caches have"),
        "request_indices": ((1,), 2, "request_indices in row 1 is 2; the block table has 2 rows"),
        "selected_tokens": ((0, 2), columns * page, r"selected_tokens in row 0, 2 is"),
        "valid_count": ((1,), width + 1, "valid_count in row 1 is"),
    }
    for name, (at, value, said) in wrong.items():
        changed = right[name].clone()
        changed[at] = value
        with pytest.raises(ValueCheckError, match=said):
            pack.sparse_gqa_verify(**{**call, name: changed})
    # What does not count is not asked where it lies.
    right["selected_tokens"][0, 2] = columns * page
    for name, limit in (("valid_count", 2), ("query_positions", columns * page - 1)):
        assert pack.sparse_gqa_verify(**{**call, name: torch.full_like(right[name], limit)}) is True

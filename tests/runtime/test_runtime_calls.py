"""What the ops check in Python, with the compiled functions replaced: ranges, refits, preparation,
and what errors become.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest

from support import packs

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import Reason, Uncertified, UncertifiedCell, op  # noqa: E402

from support.stubs import Compiled, on_device  # noqa: E402  isort: skip

#: The order in which scatter's and gather's functions take their arguments.
SCATTER = (
    *("new_tokens", "next_new_tokens", "lens", "next_draft_tokens", "slots", "store_new_tokens"),
    *("store_next_new_tokens", "store_lens", "store_next_draft", "row_begin", "rows"),
)
GATHER = (
    *("store_next_new_tokens", "store_next_draft", "store_lens", "slots", "pos_indices"),
    *("input_ids", "draft_tokens", "pos_offsets", "kv_offsets"),
    *("input_ids_begin", "draft_tokens_begin", "pos_offsets_begin", "kv_offsets_begin"),
    *("requests", "tokens", "drafts"),
)
#: What the compiled functions take: scatter's also the columns that its plan was picked for.
COMPILED = {"scatter": (*SCATTER, "columns"), "gather": GATHER}
#: The arguments that are integers; all others are tensors.
INTEGERS = (*SCATTER[9:], *GATHER[9:], "columns")


def zeros(*shape: int) -> torch.Tensor:
    return on_device(torch.zeros(shape, dtype=torch.int32))


def scatter_call(width: int = 3, held: int = 6, size: int = 8, **changes: Any) -> dict[str, Any]:
    """A call of mtp3 that moves rows 1..4 of 6."""
    call = {
        "new_tokens": zeros(held, width),
        "next_new_tokens": zeros(held, 4),
        "lens": zeros(held),
        "next_draft_tokens": zeros(held, 3),
        "slots": zeros(4),
        "store_new_tokens": zeros(4, size, 1),
        "store_next_new_tokens": zeros(4, size, 1),
        "store_lens": zeros(size),
        "store_next_draft": zeros(size, 3),
        "row_begin": 1,
        "rows": 3,
    }
    return {**call, **changes}


def gather_call(**changes: Any) -> dict[str, Any]:
    """A call of mtp3 with 3 requests of 4 tokens and 2 drafts; every range ends where its tensor
    ends.
    """
    call = {
        "store_next_new_tokens": zeros(4, 8, 1),
        "store_next_draft": zeros(8, 3),
        "store_lens": zeros(8),
        "slots": zeros(3),
        "pos_indices": zeros(12),
        "input_ids": zeros(17),
        "draft_tokens": zeros(8),
        "pos_offsets": zeros(13),
        "kv_offsets": zeros(6),
        "input_ids_begin": 5,
        "draft_tokens_begin": 2,
        "pos_offsets_begin": 1,
        "kv_offsets_begin": 3,
        "requests": 3,
        "tokens": 4,
        "drafts": 2,
    }
    return {**call, **changes}


def checked(names: tuple[str, ...]) -> Any:
    """What a compiled module checks of a call, by its plan's widths: the first thing wrong."""

    def refuses(spec: dict[str, int], *arguments: Any) -> str | None:
        call = dict(zip(names, arguments, strict=True))
        for name, value in call.items():
            if not isinstance(value, int if name in INTEGERS else torch.Tensor):
                return f"mismatched type on {name}"
        if call["store_next_new_tokens"].size(0) != spec["next"]:
            return "mismatched store_next_new_tokens.shape[0]"
        if call["store_next_draft"].size(1) != spec["draft"]:
            return "mismatched store_next_draft.shape[1]"
        if "columns" in names:
            if call["store_new_tokens"].size(0) != spec["history"]:
                return "mismatched store_new_tokens.shape[0]"
            outputs = [call[name].size(0) for name in names[:4]]
            if len(set(outputs)) != 1:
                return f"mismatched lens.shape[0]: {outputs}"
        if any(t.dtype != torch.int32 for t in arguments if isinstance(t, torch.Tensor)):
            return "mismatched dtype, expected int32"
        return None

    return refuses


def outside(names: tuple[str, ...], *arguments: Any) -> bool:
    """Whether the host side of a kernel refuses a call; tests/runtime/test_compiled_ranges.py asks
    the compiled ones.
    """
    call = dict(zip(names, arguments, strict=True))
    if "columns" in names:
        rows, begin = call["rows"], call["row_begin"]
        held, width = call["new_tokens"].shape
        return (
            not (0 <= begin <= held - rows and 0 <= rows <= call["slots"].numel())
            or width != call["columns"]
        )
    requests, tokens, drafts = (call[name] for name in ("requests", "tokens", "drafts"))
    if not (requests >= 0 and 0 <= drafts < tokens):
        return True
    if requests > call["slots"].numel() or requests * tokens > call["pos_indices"].numel():
        return True
    counts = (requests * tokens, requests * drafts, requests * tokens, requests)
    return any(
        call[f"{name}_begin"] < 0 or call[f"{name}_begin"] + count > call[name].numel()
        for name, count in zip(names[5:9], counts, strict=True)
    )


@pytest.fixture
def functions(pack: specplan.Pack) -> dict[str, Compiled]:
    """The stubs of the pack, which check what compiled modules check."""
    found: dict[str, Compiled] = pack._packs[packs.ARCH].functions
    for stub in found.values():
        names = COMPILED[stub.symbol.partition("__")[0]]
        refuses = checked(names)
        stub.outside = partial(outside, names)
        stub.refuses = lambda *arguments, stub=stub, refuses=refuses: refuses(stub.spec, *arguments)
    return found


def launched(functions: dict[str, Compiled]) -> list[tuple[str, tuple[Any, ...]]]:
    """The launches that do work: those of no rows only load code or ask a module."""
    return [
        (symbol, arguments)
        for symbol, stub in functions.items()
        for arguments in stub.launches
        if arguments[GATHER.index("requests") if symbol.startswith("gather") else -2] > 0
    ]


def declined(answer: Any, reason: Reason) -> str:
    assert isinstance(answer, Uncertified), answer
    assert not answer
    assert answer.reason is reason, answer.detail
    return str(answer)


CALLS = {"scatter": scatter_call, "gather": gather_call}
ORDERS = {"scatter": SCATTER, "gather": GATHER}


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_a_call_launches_the_picked_plan_with_its_arguments_in_order(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str
) -> None:
    call = CALLS[family]()
    for _ in range(2):
        assert getattr(pack, family)(**call) is True
    first, second = launched(functions)
    assert first[0] == second[0]
    assert "next4" in first[0]
    for name, argument in zip(COMPILED[family], first[1], strict=True):
        assert argument is {**call, "columns": 3}[name]
    assert getattr(pack, family).require(**call) is None
    assert len(launched(functions)) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"row_begin": -1}, "row_begin is -1, below 0"),
        ({"row_begin": 4}, "rows 4..7 lie outside the outputs' 6 rows"),
        ({"row_begin": 1 << 40}, "lie outside the outputs' 6 rows"),
        ({"rows": -1}, "rows is -1, below 0"),
        ({"slots": zeros(2)}, "rows is 3, the slot table has 2"),
    ],
)
def test_scatter_declines_ranges_outside_its_tensors(
    pack: specplan.Pack, functions: dict[str, Compiled], changes: dict[str, Any], said: str
) -> None:
    for warm in (False, True):
        if warm:
            assert pack.scatter(**scatter_call()) is True
        assert said in declined(pack.scatter(**scatter_call(**changes)), Reason.RANGE)
        assert said in declined(pack.scatter.bind(**scatter_call(**changes)), Reason.RANGE)
        with pytest.raises(UncertifiedCell, match=said.replace(".", r"\.")):
            pack.scatter.require(**scatter_call(**changes))
    assert len(launched(functions)) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({f"{n}_begin": -1}, f"{n} begins at -1, below 0") for n in GATHER[5:9]),
        ({"input_ids_begin": 6}, "input_ids needs 6..18, it has 17 elements"),
        ({"draft_tokens_begin": 3}, "draft_tokens needs 3..9, it has 8 elements"),
        ({"pos_offsets_begin": 2}, "pos_offsets needs 2..14, it has 13 elements"),
        ({"kv_offsets_begin": 4}, "kv_offsets needs 4..7, it has 6 elements"),
        ({"slots": zeros(2)}, "slots needs 0..3, it has 2 elements"),
        ({"pos_indices": zeros(11)}, "pos_indices needs 0..12, it has 11 elements"),
        ({"tokens": 0}, "tokens is 0, outside 1..4"),
        ({"tokens": 5}, "tokens is 5, outside 1..4"),
        ({"drafts": -1}, "drafts is -1, outside 0..3"),
        ({"drafts": 4}, "drafts is 4, outside 0..3"),
        ({"tokens": 3, "drafts": 3}, "drafts is 3, outside 0..2"),
        ({"requests": -1}, "requests is -1, below 0"),
    ],
)
def test_gather_declines_ranges_outside_its_tensors(
    pack: specplan.Pack, functions: dict[str, Compiled], changes: dict[str, Any], said: str
) -> None:
    for warm in (False, True):
        if warm:
            assert pack.gather(**gather_call()) is True
        assert said in declined(pack.gather(**gather_call(**changes)), Reason.RANGE)
        assert said in declined(pack.gather.bind(**gather_call(**changes)), Reason.RANGE)
    assert len(launched(functions)) == 1


def test_scatter_of_no_rows_is_true_whatever_the_tensors(
    pack: specplan.Pack, functions: dict[str, Compiled]
) -> None:
    nonsense = {**dict.fromkeys(SCATTER, "not a tensor"), "row_begin": 1}
    assert pack.scatter(**{**nonsense, "rows": 0}) is True
    launch = pack.scatter.bind(**{**nonsense, "rows": 0})
    assert launch() is None
    assert pack.scatter.require(**{**nonsense, "rows": 0}) is None
    assert not any(stub.launches for stub in functions.values())


def test_gather_of_no_requests_is_true_only_with_valid_tensors(
    pack: specplan.Pack, functions: dict[str, Compiled]
) -> None:
    assert pack.gather(**gather_call(requests=0)) is True
    assert not launched(functions)
    wide = gather_call(requests=0, store_next_draft=zeros(8, 9))
    declined(pack.gather(**wide), Reason.UNKNOWN_PROBLEM)
    said = declined(pack.gather(**gather_call(requests=0, slots=zeros(3).long())), Reason.ARGUMENT)
    assert "int32" in said


def test_outputs_with_different_numbers_of_rows_are_narrowed_to_the_rows_moved(
    pack: specplan.Pack, functions: dict[str, Compiled]
) -> None:
    call = scatter_call(lens=zeros(7), next_draft_tokens=zeros(9, 3), next_new_tokens=zeros(4, 4))
    assert pack.scatter(**call) is True
    ((_, arguments),) = launched(functions)
    for index, name in enumerate(SCATTER[:4]):
        assert arguments[index].size(0) == 4
        assert arguments[index].data_ptr() == call[name].data_ptr()
        assert arguments[index].stride() == call[name].stride()
    assert arguments[4:] == (*(call[name] for name in SCATTER[4:]), 3)


@pytest.mark.parametrize("short", SCATTER[1:4])
def test_an_output_that_lacks_the_rows_moved_is_declined(
    pack: specplan.Pack, functions: dict[str, Compiled], short: str
) -> None:
    call = scatter_call()
    call[short] = call[short][:3]
    assert "mismatched" in declined(pack.scatter(**call), Reason.ARGUMENT)
    assert not launched(functions)


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_problems_that_look_alike_to_the_hot_path_get_their_own_plans(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str
) -> None:
    """mtp3 and ``alike`` differ in the next store's width alone, which no call reads first."""
    alike = {"store_next_new_tokens": zeros(6, 8, 1)}
    for changes in ({}, alike, {}, alike, alike):
        assert getattr(pack, family)(**CALLS[family](**changes)) is True
    widths = [6 if "next6" in symbol else 4 for symbol, _ in launched(functions)]
    assert sorted(widths) == [4, 4, 6, 6, 6]
    for symbol, arguments in launched(functions):
        store = arguments[ORDERS[family].index("store_next_new_tokens")]
        assert store.size(0) == (6 if "next6" in symbol else 4)


def test_a_width_of_no_problem_is_declined_even_behind_a_remembered_call(
    pack: specplan.Pack, functions: dict[str, Compiled]
) -> None:
    assert pack.scatter(**scatter_call()) is True
    answer = pack.scatter(**scatter_call(store_next_new_tokens=zeros(5, 8, 1)))
    assert "next=5" in declined(answer, Reason.UNKNOWN_PROBLEM)
    assert len(launched(functions)) == 1


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_a_modules_objection_is_a_declined_call(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str
) -> None:
    call = CALLS[family]()
    wrong = {**call, "store_lens": call["store_lens"].long()}
    for _ in range(2):
        answer = getattr(pack, family)(**wrong)
        assert "mismatched dtype" in declined(answer, Reason.ARGUMENT)
        assert answer.arch == packs.ARCH
        declined(getattr(pack, family).bind(**wrong), Reason.ARGUMENT)
    assert not launched(functions)
    assert getattr(pack, family)(**call) is True


@pytest.mark.parametrize("kind", [TypeError, ValueError, OverflowError])
def test_every_kind_of_argument_error_is_a_declined_call(
    pack: specplan.Pack, functions: dict[str, Compiled], kind: type[Exception]
) -> None:
    for stub in functions.values():
        stub.fails = kind("not  like\nthis")
    pack._prepared.update({(0, "scatter"), (0, "gather")})
    for family in ("scatter", "gather"):
        answer = getattr(pack, family)(**CALLS[family]())
        assert "not like this" in declined(answer, Reason.ARGUMENT)


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_a_cuda_error_is_a_launch_error(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str
) -> None:
    pack._prepared.update({(0, "scatter"), (0, "gather")})
    cause = RuntimeError("CUDA error 700: an illegal memory access")
    for stub in functions.values():
        stub.fails = cause
    for call in (getattr(pack, family), getattr(pack, family).bind):
        with pytest.raises(specplan.LaunchError, match=r"error 700.*sticky") as caught:
            call(**CALLS[family]())
        assert caught.value.__cause__ is cause
        assert caught.value.reason == "launch"


@pytest.mark.parametrize("family", ["scatter", "gather"])
@pytest.mark.parametrize("value", [None, 3, "text", [1, 2]])
def test_what_is_not_a_tensor_is_a_declined_call(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str, value: object
) -> None:
    first = ORDERS[family][0]
    for name in (first, "slots", "store_next_draft"):
        answer = getattr(pack, family)(**CALLS[family](**{name: value}))
        declined(answer, Reason.ARGUMENT)
        declined(getattr(pack, family).bind(**CALLS[family](**{name: value})), Reason.ARGUMENT)
    assert not launched(functions)


@pytest.mark.parametrize(
    ("family", "name"),
    [("scatter", "rows"), ("gather", "requests"), ("gather", "tokens"), ("gather", "drafts")],
)
@pytest.mark.parametrize("value", [2.5, None, "3"])
def test_a_size_that_is_no_integer_is_declined_and_can_be_read(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str, name: str, value: object
) -> None:
    answer = getattr(pack, family)(**CALLS[family](**{name: value}))
    assert isinstance(answer, Uncertified)
    assert str(answer)
    with pytest.raises(UncertifiedCell):
        getattr(pack, family).require(**CALLS[family](**{name: value}))
    assert not launched(functions)


@pytest.mark.parametrize(
    ("family", "name"), [("scatter", "row_begin"), ("gather", "kv_offsets_begin")]
)
def test_bind_declines_a_begin_that_is_no_integer(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str, name: str
) -> None:
    answer = getattr(pack, family).bind(**CALLS[family](**{name: 1.5}))
    declined(answer, Reason.ARGUMENT)
    assert not launched(functions)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("scatter", {"slots": zeros(9), "rows": 6, "row_begin": 0}),
        ("gather", {"requests": 6, **{name: zeros(64) for name in GATHER[3:9]}}),
    ],
)
def test_a_size_beyond_the_catalog_is_declined_with_the_nearest_cells(
    pack: specplan.Pack, functions: dict[str, Compiled], family: str, changes: dict[str, Any]
) -> None:
    answer = getattr(pack, family)(**CALLS[family](**changes))
    assert "nearest certified" in declined(answer, Reason.NOT_IN_CATALOG)
    assert not launched(functions)


def test_a_first_call_inside_a_capture_raises_and_a_prepared_one_launches(
    pack: specplan.Pack, functions: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for family in ("scatter", "gather"):
        with pytest.raises(specplan.ColdCaptureError, match=r"pack\.prepare\(\)") as caught:
            getattr(pack, family)(**CALLS[family]())
        assert family in str(caught.value)
        assert caught.value.reason == "cold_capture"
    with pytest.raises(specplan.ColdCaptureError):
        pack.prepare()
    assert not any(stub.launches for stub in functions.values())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pack.prepare()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for family in ("scatter", "gather"):
        assert getattr(pack, family)(**CALLS[family]()) is True


def test_prepare_calls_every_plan_once_with_no_work(
    pack: specplan.Pack, functions: dict[str, Compiled]
) -> None:
    for device in (None, 0, torch.device("cuda", 0)):
        pack.prepare(device)
        assert [len(stub.launches) for stub in functions.values()] == [1] * len(functions)
    assert not launched(functions)


def test_prepare_without_a_fitting_device_says_so(
    pack: specplan.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(specplan.NoDeviceError, match="sm_90a"):
        pack.prepare(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (8, 0))
    with pytest.raises(specplan.NoDeviceError, match="sm_90a"):
        pack.prepare()
    declined(pack.scatter(**scatter_call()), Reason.DEVICE)


@pytest.mark.parametrize("family", ["scatter", "gather"])
def test_bind_asks_the_module_with_no_work_and_launches_what_it_was_given(
    pack: specplan.Pack,
    functions: dict[str, Compiled],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    class Converter:
        @staticmethod
        def from_dlpack(tensor: torch.Tensor) -> tuple[str, int]:
            return ("converted", tensor.data_ptr())

    monkeypatch.setattr(op.library, "tvm_ffi", Converter)
    call = CALLS[family]()
    launch = getattr(pack, family).bind(**call)
    assert not launched(functions)
    asked = sum(len(stub.launches) for stub in functions.values())
    # The stubs check tensors, and a bound launch passes converted ones.
    for stub in functions.values():
        stub.refuses = stub.outside = lambda *arguments: None
    assert launch() is None
    assert launch() is None
    first, second = launched(functions)
    assert first[1] == second[1]
    assert sum(len(stub.launches) for stub in functions.values()) == asked + 2
    tensors = [name for name in ORDERS[family] if isinstance(call[name], torch.Tensor)]
    assert first[1][0] is call[tensors[0]]
    assert list(first[1][1 : len(tensors)]) == [
        ("converted", call[name].data_ptr()) for name in tensors[1:]
    ]
    integers = COMPILED[family][len(tensors) :]
    assert list(first[1][len(tensors) :]) == [{**call, "columns": 3}[name] for name in integers]


def test_remembered_calls_are_bounded(
    pack: specplan.Pack, functions: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "MOST_REMEMBERED", 3)
    for size in range(2, 12):
        assert pack.scatter(**scatter_call(size=size, slots=zeros(4))) is True
        assert len(pack.scatter.op.plans) <= 3
    assert len(launched(functions)) == 10


@pytest.mark.parametrize("kind", ["first", "remembered", "adapted", "declined"])
def test_a_call_leaves_no_cycle_that_keeps_its_tensors(pack: specplan.Pack, kind: str) -> None:
    """A caught exception that its own frame names would hold GPU buffers until the cyclic collector
    runs: certification, which runs without it, grew to 133 GB.
    """
    functions = pack._packs[packs.ARCH].functions
    if kind == "remembered":
        assert pack.scatter(**scatter_call()) is True
    call = scatter_call()
    if kind == "adapted":
        call["lens"] = zeros(5)
        for function in functions.values():
            function.refuses = lambda *a: None if len({t.shape[0] for t in a[:4]}) == 1 else "rows"
    if kind == "declined":
        call["rows"] = 5
    held = [weakref.ref(value) for value in call.values() if isinstance(value, torch.Tensor)]
    gc.collect()
    gc.disable()
    try:
        answer = pack.scatter(**call)
        assert answer is True or kind == "declined"
        assert bool(answer) == (kind != "declined")
        del call, answer
        for function in functions.values():
            function.launches.clear()
            function.refuses = lambda *arguments: None
        assert [reference() for reference in held if reference() is not None] == []
    finally:
        gc.enable()

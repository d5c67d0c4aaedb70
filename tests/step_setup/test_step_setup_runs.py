"""step_setup on an imagined GPU: compiled host function and PTX against loops and the reference."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import specplan  # noqa: E402
from specplan.kernels.step_setup import cases  # noqa: E402
from specplan.kernels.step_setup.cases import StepSetupCase  # noqa: E402

from setup_loops import call_of, held, loops, poisoned  # noqa: E402

CPU = torch.device("cpu")


def run(setup: Any, case: StepSetupCase, seed: int = 1) -> None:
    """A case once, compared whole, and once more, equal bit for bit."""
    case.refill(seed)
    before, expected = case.snapshot(), case.expect()
    for _ in range(2):
        case.restore(before)
        with setup.on_device() as pack:
            pack.step_setup.require(**case.arguments())
        assert len(setup.launches) == 1
        for comparison in case.compare(expected):
            assert comparison.error <= comparison.bound, case.name


@pytest.mark.parametrize("page_size", [4, 32, 64, 128])
@pytest.mark.parametrize("scale", [1, 2, 48])
def test_page_sizes_and_scales(setup: Any, page_size: int, scale: int) -> None:
    dtype = "int64" if scale == 2 else "int32"
    more: dict[str, Any] = {"dtype": dtype, "page_size": page_size, "scale": scale}
    case = StepSetupCase(*("uniform", {"group": 4}, CPU), requests=9, tokens=4, capacity=41, **more)
    run(setup, case)
    counts = [0, 4, 3, 0, 0, 1, 4, 2, 0]
    case = StepSetupCase(
        *("ragged", {"group": 4}, CPU), requests=9, tokens=4, counts=counts, capacity=30,
        strided=True, **more,
    )  # fmt: skip
    run(setup, case)


@pytest.mark.parametrize("requests", [255, 257, 600, 1024])
def test_more_requests_than_a_cta_has_threads(setup: Any, requests: int) -> None:
    counts = cases.ragged(requests, 2)
    case = StepSetupCase(
        *("ragged", {"group": 4}, CPU), requests=requests, tokens=2, counts=counts,
        capacity=2 * requests, columns=3,
    )  # fmt: skip
    run(setup, case)


def test_a_context_request_spans_ctas(setup: Any) -> None:
    counts = [0, 700, 4, 0, 4]
    case = StepSetupCase(
        *("context", {"group": 4}, CPU), requests=5, tokens=8, counts=counts, capacity=1000,
        columns=30,
    )  # fmt: skip
    run(setup, case)


def test_every_case_of_small_cells(setup: Any) -> None:
    for requests, tokens, dtype in ((1, 1, "int32"), (5, 8, "int64"), (7, 3, "int32")):
        for case in cases.checks({"group": 4}, requests, tokens, 1, dtype, CPU):
            run(setup, case, requests)


def test_garbage_lengths_are_answered_as_the_loops_do(setup: Any) -> None:
    far = [-(1 << 31), (1 << 31) - 1, -1, 0, 3, (1 << 31) - 4]
    table = [[(1 << 31) - 1, -(1 << 31), -5]] * 6
    for more in ({"tokens": 4}, {"counts": [4, 2, -3, 1, 0, 4]}):
        call = call_of(far, table, 26, scale=3, table_out=poisoned(6, 3), **more)
        expected = loops(call)
        with setup.on_device() as pack:
            pack.step_setup.require(**call)
        held(call, expected)


def test_no_requests_write_padding_alone(setup: Any) -> None:
    call = call_of([], [], 9, tokens=4, index=torch.int64)
    expected = loops(call)
    with setup.on_device() as pack:
        pack.step_setup.require(**call)
    held(call, expected)
    assert call["request_of_row"].tolist() == [-1] * 9


def test_more_rows_than_the_capacity_are_cut(setup: Any) -> None:
    """The host cannot know the sum of the list: rows beyond the capacity do not exist."""
    call = call_of([90] * 3, [[1, 2, 3]] * 3, 7, counts=[4, (1 << 31) - 1, 4])
    call["kv_lens"][1] = (1 << 31) - 1
    with setup.on_device() as pack:
        pack.step_setup.require(**call)
    assert call["request_of_row"].tolist() == [0] * 4 + [1] * 3
    assert call["position_of_row"].tolist() == [86, 87, 88, 89, 0, 1, 2]


def test_declined_calls_write_nothing(setup: Any) -> None:
    count = 0
    for what, arguments, storage in cases.declined(CPU):
        before = storage.clone()
        with setup.on_device() as pack:
            answer = pack.step_setup(**arguments)
        assert isinstance(answer, specplan.Uncertified), what
        assert not setup.launches, what
        assert torch.equal(storage, before), what
        count += 1
    assert count > 100
    case = StepSetupCase("good", {"group": 4}, CPU, requests=6, tokens=4, capacity=30)
    run(setup, case)


@pytest.mark.parametrize("requests", [3, 5, 15, 33, 257])
def test_a_batch_between_two_cells_runs_the_next_one(setup: Any, requests: int) -> None:
    """The launch follows the requests and rows that there are."""
    more: dict[str, Any] = {"tokens": 4, "page_size": 128}
    rows = requests * 4 + 2
    case = StepSetupCase("between", {"group": 128}, CPU, requests=requests, capacity=rows, **more)
    run(setup, case)
    entries = requests * case.tensors["block_table"].shape[1]
    assert setup.launches[0].grid[0] == -(-rows // 256) + -(-entries // 2048) + 1
    with setup.on_device() as pack:
        assert not pack.step_setup.pick(group=128, requests=requests, tokens=4, dtype="int32")


def test_a_batch_past_every_cell_is_declined(setup: Any) -> None:
    case = StepSetupCase(
        "past", {"group": 128}, CPU, requests=513, capacity=513, tokens=1, page_size=128
    )
    case.refill(1)
    before = case.buffer.clone()
    with setup.on_device() as pack:
        answer = pack.step_setup(**case.arguments())
    assert isinstance(answer, specplan.Uncertified) and torch.equal(case.buffer, before)


def test_a_declined_call_after_a_good_one_is_still_declined(setup: Any) -> None:
    """The plan is remembered by less than the rules ask about."""
    case = StepSetupCase("good", {"group": 4}, CPU, requests=6, tokens=4, capacity=30)
    run(setup, case)
    arguments = dict(case.arguments())
    for changes in ({"page_size": 6}, {"page_size": 0}, {"scale": 0}, {"n_commit": None}):
        before = case.buffer.clone()
        with setup.on_device() as pack:
            assert not pack.step_setup(**{**arguments, **changes}), changes
        assert not setup.launches and torch.equal(case.buffer, before)


def test_a_bound_launch_writes_at_its_call_and_not_before(setup: Any) -> None:
    case = StepSetupCase("bound", {"group": 4}, CPU, requests=6, tokens=4, capacity=30)
    case.refill(3)
    before, expected = case.snapshot(), case.expect()
    with setup.on_device() as pack:
        bound = pack.step_setup.op.resolve(
            tuple(case.arguments().get(p.name) for p in pack.step_setup.op.declared.parameters)
        )
        pack.step_setup.op.launch(bound, idle=True)
        assert not setup.launches and torch.equal(case.buffer, before)
        pack.step_setup.op.launch(bound)
    assert (case.buffer == expected).all()


def test_twenty_steps_with_lengths_and_tables_rewritten_in_place(setup: Any) -> None:
    """State carried by a Python loop: requests come, go and leave holes; lengths grow by what is
    accepted; histories commit. The same buffers all along.
    """
    chance = Random(17)
    requests, tokens, columns = 6, 4, 5
    call = call_of([0] * requests, [[-1] * columns] * requests, 30, tokens=tokens)
    call |= {
        "table_out": poisoned(requests, columns),
        "work": poisoned(requests, 4),
        "n_commit": poisoned(1),
        "slots": torch.full((requests,), -1, dtype=torch.int32),
        "hist_len": torch.zeros(9, dtype=torch.int32),
        "bank": torch.zeros(9, dtype=torch.int32),
        "scale": 2,
    }
    lens = [0] * requests
    seen = 0
    for _ in range(20):
        for b in range(requests):
            slot = int(call["slots"][b])
            if slot < 0 and chance.random() < 0.5:
                free = set(range(9)) - set(call["slots"].tolist())
                call["slots"][b], lens[b] = chance.choice(sorted(free)), chance.randint(0, 40)
                call["hist_len"][call["slots"][b]] = 0
                call["block_table"][b] = torch.tensor(chance.sample(range(100), columns)).int() * 2
            elif slot >= 0 and chance.random() < 0.15:
                call["slots"][b], lens[b] = -1, 0
            call["kv_lens"][b] = lens[b] + tokens if call["slots"][b] >= 0 else 0
        expected = loops(call)
        with setup.on_device() as pack:
            pack.step_setup.require(**call)
        held(call, expected)
        seen += int(call["n_commit"][0])
        for b, slot in enumerate(call["slots"].tolist()):
            if slot >= 0:
                accepted = chance.randint(1, tokens)
                lens[b] += accepted
                commits = int(call["hist_len"][slot]) + tokens > 16
                call["hist_len"][slot] = accepted + (0 if commits else call["hist_len"][slot])
                call["bank"][slot] ^= int(commits)
    assert seen > 0


def test_the_outputs_are_taken_by_the_ops_that_read_them() -> None:
    """dtypes and strides of what is passed on, by the declarations of both sides."""
    from specplan.plans.families import SIGNATURES

    made = {tensor.name: tensor for tensor in SIGNATURES["step_setup"]["step_setup"].tensors}

    def taken(family: str, op: str, name: str) -> Any:
        return next(t for t in SIGNATURES[family][op].tensors if t.name == name)

    for op in ("gather", "restore", "commit"):
        for ours, theirs in (("page_of_row", "pages"), ("within_of_row", "within")):
            other = taken("rollback", op, theirs)
            assert (made[ours].dtype, made[ours].strides) == (other.dtype, other.strides)
    for family, op, ours, theirs in (
        ("rollback", "commit", "request_of_row", "row_requests"),
        ("rollback", "commit", "ordinal_of_row", "row_ordinals"),
        ("sparse_gqa_verify", "sparse_gqa_verify", "request_of_row", "request_indices"),
        ("sparse_gqa_verify", "sparse_gqa_verify", "position_of_row", "query_positions"),
        ("sparse_gqa_verify", "sparse_gqa_verify", "table_out", "block_table"),
    ):
        other = taken(family, op, theirs)
        assert made[ours].dtype == other.dtype == "int32"
        assert len(made[ours].shape) == len(other.shape)

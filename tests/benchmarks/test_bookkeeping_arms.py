"""The benchmarks of the bookkeeping without a GPU: the arms beside the references on CPU tensors,
what is counted as wrong, and the options.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.shared import Shared

torch = pytest.importorskip("torch")

ROOM = Path(__file__).resolve().parents[2] / "benchmarks"
CPU = torch.device("cpu")
MODULES = ("bookkeeping", "accept", "step_setup", "between_steps", "rollback", "step_copies")


@pytest.fixture(scope="module")
def rooms() -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules, whose names no other test finds afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOM))
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(ROOM))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(ROOM)):
            del sys.modules[name]


def works(book: Any) -> list[Any]:
    return [
        *(book.accept_work(b, t, 130, d, CPU, b) for b, t, d in (
            (1, 4, "bf16"), (8, 4, "fp32"), (5, 1, "bf16"), (3, 8, "fp32"))),
        *(book.setup_work(b, t, CPU, b) for b, t in ((1, 4), (8, 4), (70, 1), (9, 8))),
        *(book.draft_work(b, 4, CPU, b) for b in (1, 8, 70)),
        book.draft_work(5, 4, CPU, 3, 300),
        book.stage_work(512, CPU, 4), book.stage_work(2048, CPU, 5),
    ]  # fmt: skip


def test_the_torch_ops_are_the_references(rooms: dict[str, ModuleType]) -> None:
    book, changed = rooms["bookkeeping"], set()
    for work in works(book):
        before = {name: tensor.clone() for name, tensor in work.tensors.items()}
        call = book.torch_call(work, book.REPLACED[work.family])
        assert book.differences(work, call) == [], work.family
        for name, tensor in work.tensors.items():
            assert torch.equal(tensor, before[name]), "a check leaves all as it was"
        work.reference()
        changed |= {
            (work.family, name)
            for name, tensor in work.tensors.items()
            if not torch.equal(tensor, before[name])
        }
    written = {
        "accept": {"accepted", "n_acc", "next_token", "rows", "kv_lens", "positions_out"},
        "stage": {f"destination_{number}" for number in range(4)},
        "draft_step": {"input_ids", "drafts", "next_new_tokens", "kv_lens", "positions"},
        "step_setup": {"table_out", "cache_slot", "group_slot", "visible_of_row"},
    }
    written["accept"] |= {"hist_len", "bank"}
    written["draft_step"] |= {"page_of_row", "within_of_row", "cache_slot"}
    for family, names in written.items():
        assert {(family, name) for name in names} <= changed


def test_torch_compile_takes_them_whole(rooms: dict[str, ModuleType]) -> None:
    """Traced, functionalised and run; on a GPU inductor makes kernels of the same graph."""
    book = rooms["bookkeeping"]
    for work in (
        book.accept_work(3, 4, 60, "bf16", CPU, 1), book.setup_work(5, 4, CPU, 2),
        book.draft_work(5, 4, CPU, 3), book.draft_work(5, 4, CPU, 4, 60),
        book.stage_work(512, CPU, 5),
    ):  # fmt: skip
        ops = book.REPLACED[work.family]
        compiled = torch.compile(ops, dynamic=False, fullgraph=True, backend="aot_eager")
        assert book.differences(work, book.torch_call(work, compiled, mapped=True)) == []


def test_every_draft_of_a_loop(rooms: dict[str, ModuleType]) -> None:
    books = rooms["between_steps"].Books.of(8, CPU)
    assert [work.family for work in books.works] == [
        *("stage", "step_setup", "accept", "draft_step", "draft_step", "draft_step")
    ]
    for at, call in books.torch_calls().items():
        work = books.works[at]
        assert rooms["bookkeeping"].differences(work, call) == [], (work.family, work.numbers)


def test_an_arm_that_is_wrong_ends_the_program(rooms: dict[str, ModuleType]) -> None:
    book = rooms["bookkeeping"]
    work = book.draft_work(8, 4, CPU, 1)

    def wrong() -> None:
        work.reference()
        work.tensors["kv_lens"][3] += 1
        work.tensors["cache_slot"][0] -= 1

    assert book.differences(work, wrong) == ["kv_lens", "cache_slot"]
    with pytest.raises(SystemExit, match="plain is not the reference in kv_lens, cache_slot"):
        book.check(work, {"fine": work.reference, "plain": wrong})


def test_the_commit_in_torch_puts_the_rejected_rows_back(rooms: dict[str, ModuleType]) -> None:
    class Step:
        accepted = torch.tensor([0, 1, 4, 2], dtype=torch.int32)
        rejected = torch.full((16,), 9, dtype=torch.int32)
        restored = 0

        def torch_restore(self) -> None:
            self.restored += 1

    step = Step()
    rooms["between_steps"].commit_in_torch(step, 4)
    assert step.restored == 1
    assert step.rejected.view(4, 4).tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0] * 4, [0, 0, 1, 1]]


def test_options(rooms: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    chosen = rooms["accept"].options(
        ["--out", "x.json", "--requests", "1", "3", "--dtypes", "fp32"]
    )
    assert (chosen.requests, chosen.dtypes, chosen.tokens) == ([1, 3], ["fp32"], 4)
    assert chosen.columns == [151_936, 248_320] and chosen.out == Path("x.json")
    chosen = rooms["step_setup"].options(["--out", "x.json", "--bytes", "2048"])
    assert (chosen.requests, chosen.bytes) == ([1, 8, 64, 256], [2048])
    assert rooms["between_steps"].options(["--out", "x.json"]).requests == [1, 8, 64]
    for name in ("accept", "step_setup", "between_steps"):
        with pytest.raises(SystemExit):
            rooms[name].options([])
        assert "--out" in capsys.readouterr().err


def test_the_rows_of_step_setup(rooms: dict[str, ModuleType]) -> None:
    setup = rooms["step_setup"]
    setup.COLUMNS = 100
    chosen = setup.options(["--out", "x.json", "--requests", "2"])
    found = [(family, size, len(sets)) for family, size, sets in setup.works(chosen, CPU)]
    assert found == [
        ("step_setup", "2 x 4", 8), ("draft_step", "2 x 4", 8), ("draft_step", "2 x 4, logits", 8),
        ("stage", "2048 bytes", 8), ("stage", "32768 bytes", 8),
    ]  # fmt: skip


def test_the_share_of_the_ceiling(rooms: dict[str, ModuleType]) -> None:
    # 256 rows of 151,936 bf16 are 77.8 MB: 18.1 µs at 4.3 TB/s.
    assert rooms["accept"].share(64, 4, 151_936, "bf16", 18.09) == pytest.approx(1, abs=1e-3)


_INTERPRETED = """
import sys
import torch
import bookkeeping as book
import bookkeeping_triton as arms
cpu = torch.device("cpu")
works = [
    book.accept_work(3, 4, 5000, "bf16", cpu, 1), book.accept_work(2, 1, 70, "fp32", cpu, 2),
    book.setup_work(70, 4, cpu, 3), book.draft_work(70, 4, cpu, 4),
    book.draft_work(3, 4, cpu, 5, 5000), book.stage_work(2048, cpu, 6),
]
for work in works:
    wrong = book.differences(work, lambda: arms.ARMS[work.family](work))
    print(work.family, wrong)
"""


def test_the_triton_kernels_in_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], cwd=ROOM, capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    families = ("accept", "accept", "step_setup", "draft_step", "draft_step", "stage")
    assert done.stdout.split("\n")[:-1] == [f"{family} []" for family in families]


CELLS = """\
  step_setup:
    problems:
      group4: {group: 4}
    cells:
      - {problems: [group4], requests: 8, tokens: 4, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  stage:
    problems:
      segments16: {segments: 16}
    cells:
      - {problems: [segments16], requests: 1..16, tokens: 1, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  accept:
    problems:
      class_32k: {vocabulary_k: 32}
    cells:
      - {problems: [class_32k], requests: 8, tokens: 4, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
  draft_step:
    problems:
      ids: {vocabulary_k: 0}
      class_32k: {vocabulary_k: 32}
    cells:
      - {problems: [ids], requests: 8, tokens: 1, splits: auto, dtypes: [int32],
         candidate: [sm_90a], why: tests}
      - {problems: [class_32k], requests: 8, tokens: 1, splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
"""


def test_a_run_over_compiled_ops(
    rooms: dict[str, ModuleType],
    shared: Shared,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours is checked as compiled, on an imagined GPU; each arm is called once in place of timed. A
    bound launch takes no memory of the host.
    """
    pytest.importorskip("cutlass")
    from support.simulated_pack import simulated_pack

    book = rooms["bookkeeping"]
    called: list[str] = []

    def once(arms: dict[str, Any]) -> dict[str, float]:
        for name, calls in arms.items():
            if name != "bind":
                for call in calls if isinstance(calls, list) else [calls]:
                    call()
                called.append(name)
        return dict.fromkeys(arms, 2.0)

    monkeypatch.setattr(book.measure, "EmptyKernel", lambda: lambda: None)
    for name in ("graph_times", "eager_times", "host_times"):
        monkeypatch.setattr(book.measure, name, once)
    monkeypatch.setattr(torch, "compile", lambda ops, **options: ops)
    works = [
        book.setup_work(8, 4, CPU, 1), book.accept_work(8, 4, 300, "bf16", CPU, 1),
        book.draft_work(8, 4, CPU, 1), book.draft_work(8, 4, CPU, 1, 300),
        book.stage_work(512, CPU, 1),
    ]  # fmt: skip
    with simulated_pack(shared, tmp_path_factory.mktemp("bench"), "bench", CELLS) as setup:
        for work in works:
            with setup.on_device() as pack:
                figures = book.run(pack, [work], lambda w: w.reference())
            # Checked, in a graph, eager, bare and by the op.
            assert len(setup.launches) == 5, work.family
            assert figures["host_op_over_bare_us"] == 0.0
            assert {"graph_compiled_us", "eager_torch_us", "host_bind_us"} <= set(figures)
    assert called.count("triton") == 2 * len(works) and called.count("bare") == len(works)

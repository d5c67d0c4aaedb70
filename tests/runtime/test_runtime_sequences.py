"""No earlier call changes what a call answers: random sequences of mixed calls of every op, each
compared with the same call on a fresh pack.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import specplan  # noqa: E402
from specplan import library  # noqa: E402
from specplan.loading import ArchPack  # noqa: E402
from specplan.pack import Pack  # noqa: E402
from specplan.plans import manifest  # noqa: E402
from specplan.plans.families import SIGNATURES  # noqa: E402
from specplan.plans.sparse_gqa_verify import workspace_words  # noqa: E402

from fuzzing import mixed  # noqa: E402
from support import synthetic  # noqa: E402

from support.recorder import Recorder  # noqa: E402  isort: skip
from support.stubs import Checking, OnDevice, on_device  # noqa: E402  isort: skip

ARCH = "sm_90a"
#: Problems that are mistaken for each other by what a fast path reads: equal products of extents.
CATALOG = """\
schema: 1
archs:
  sm_90a:
    {device: NVIDIA H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472, smem_per_cta:
    232448}
families:
  scatter:
    problems:
      four: {history: 4, next: 4, draft: 3}
      six: {history: 4, next: 6, draft: 3}
      two: {history: 2, next: 4, draft: 3}
      wide: {history: 8, next: 4, draft: 4}
    cells:
      - {problems: [four, six, two, wide], requests: 1..3, tokens: 1..2, splits: 1,
         dtypes: [int32], candidate: [sm_90a], why: tests}
  gather:
    problems:
      four: {next: 4, draft: 3}
      six: {next: 6, draft: 3}
      more: {next: 4, draft: 5}
    cells:
      - {problems: [four, six, more], requests: 1..3, tokens: 1..4, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  rollback:
    problems:
      three: {planes: 3, row_bytes: 256, side_planes: 1, side_row_bytes: 12}
      four: {planes: 4, row_bytes: 256, side_planes: 0, side_row_bytes: 0}
      other: {planes: 3, row_bytes: 256, side_planes: 1, side_row_bytes: 16}
    cells:
      - {problems: [three, four, other], requests: 1..4, tokens: [1, 2], splits: auto,
         dtypes: [int32, int64], candidate: [sm_90a], why: tests}
  gdn_replay:
    problems:
      small: {key_heads: 2, value_heads: 8}
      same: {key_heads: 4, value_heads: 8}
      half: {key_heads: 2, value_heads: 4}
      one: {key_heads: 1, value_heads: 8}
    cells:
      - {problems: [small, same, half, one], requests: [1, 2, 4, 8], tokens: [1, 2, 4],
         splits: auto, dtypes: [bf16, fp32], candidate: [sm_90a], why: tests}
  sparse_gqa_verify:
    problems:
      large: {q_heads: 24, kv_heads: 2, head_dim: 256, page_size: 32, selected: 300}
      pages: {q_heads: 24, kv_heads: 2, head_dim: 256, page_size: 64, selected: 300}
      narrow: {q_heads: 12, kv_heads: 1, head_dim: 256, page_size: 32, selected: 300}
      short: {q_heads: 24, kv_heads: 2, head_dim: 256, page_size: 32, selected: 20}
    cells:
      - {problems: [large, pages, narrow, short], requests: 1..8, tokens: [1, 2, 4], splits: auto,
         dtypes: [bf16, fp8_e4m3, nvfp4], candidate: [sm_90a], why: tests}
      - {problems: [large, narrow], requests: 1..4, tokens: [1, 2], splits: 1,
         dtypes: [bf16, nvfp4], candidate: [sm_90a], why: tests}
  step_setup:
    problems:
      four: {group: 4}
      one: {group: 1}
    cells:
      - {problems: [four, one], requests: 1..4, tokens: 1..4, splits: 1, dtypes: [int32, int64],
         candidate: [sm_90a], why: tests}
  stage:
    problems:
      sixteen: {segments: 16}
    cells:
      - {problems: [sixteen], requests: 1..4, tokens: 1, splits: 1, dtypes: [int32],
         candidate: [sm_90a], why: tests}
  draft_step:
    problems:
      ids: {vocabulary_k: 0}
      small: {vocabulary_k: 32}
      next: {vocabulary_k: 64}
    cells:
      - {problems: [ids], requests: 1..4, tokens: 1, splits: 1, dtypes: [int32, int64],
         candidate: [sm_90a], why: tests}
      - {problems: [small, next], requests: 1..4, tokens: 1, splits: auto, dtypes: [bf16, fp32],
         candidate: [sm_90a], why: tests}
  accept:
    problems:
      ids: {vocabulary_k: 0}
      small: {vocabulary_k: 32}
      next: {vocabulary_k: 64}
    cells:
      - {problems: [ids], requests: 1..4, tokens: 1..4, splits: 1, dtypes: [int32, int64],
         candidate: [sm_90a], why: tests}
      - {problems: [small, next], requests: 1..4, tokens: 1..4, splits: auto, dtypes: [bf16, fp32],
         candidate: [sm_90a], why: tests}
  argmax:
    problems:
      small: {vocabulary_k: 32}
      next: {vocabulary_k: 64}
    cells:
      - {problems: [small, next], requests: 1..4, tokens: 1, splits: auto, dtypes: [bf16, fp32],
         candidate: [sm_90a], why: tests}
  conv_verify:
    problems:
      small: {channels: 128}
      twice: {channels: 256}
    cells:
      - {problems: [small, twice], requests: 1..4, tokens: [1, 2, 4], splits: auto, dtypes: [bf16],
         candidate: [sm_90a], why: tests}
"""


class OnOtherDevice(torch.Tensor):
    """A CPU tensor that claims to be on ``cuda:1``."""

    def get_device(self) -> int:
        return 1


def place(tensor: torch.Tensor, device: int) -> torch.Tensor:
    return tensor.as_subclass((OnDevice, OnOtherDevice)[device])


class OneDevice(Checking):
    """A compiled function that also refuses tensors of more than one device."""

    def __call__(self, *arguments: Any) -> None:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if len({tensor.get_device() for tensor in tensors}) > 1:
            raise ValueError("mismatched devices")
        super().__call__(*arguments)


def imagine(monkeypatch: pytest.MonkeyPatch, ffi: Any, devices: int) -> None:
    """Devices of the arch with their code loaded, on which tensors are that say so."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Pack, "_prepare", lambda *arguments: None)
    real = torch.empty

    def empty(*arguments: Any, device: Any = None, **named: Any) -> torch.Tensor:
        made = real(*arguments, **named)
        return place(made, device) if isinstance(device, int) else made

    monkeypatch.setattr("specplan.op.torch.empty", empty)
    monkeypatch.setattr(library, "tvm_ffi", lambda: ffi)


class Sequences:
    """Sequences of calls over the functions of one pack, which write their launches down."""

    def __init__(self, arch_pack: Any, devices: int) -> None:
        self.arch_pack, self.devices = arch_pack, devices
        # As ArchPack has them.
        arch_pack.problems = ArchPack.problems.func(arch_pack)
        arch_pack.automatic = ArchPack.automatic.func(arch_pack)

    def pack(self) -> Pack:
        """A pack that has seen no call."""
        return Pack([self.arch_pack], candidates=True)

    def launches(self) -> list[tuple[str, tuple[Any, ...]]]:
        functions = self.arch_pack.functions
        found = [(symbol, given) for symbol, f in functions.items() for given in f.launches]
        for function in functions.values():
            function.launches.clear()
        return found

    def run(self, seed: str, count: int, ops: Any = mixed.OPS) -> tuple[dict[str, int], list[str]]:
        by_family = self.arch_pack.manifest.problems.items()
        problems = {family: list(named.values()) for family, named in by_family}
        world = mixed.World(problems, place, self.devices)
        return mixed.sequence(
            *(Random(seed), world, count, self.pack(), self.pack, self.launches, ops)
        )


@pytest.fixture
def over_stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sequences:
    """Sequences over functions that check what the declared ones do."""
    imagine(monkeypatch, SimpleNamespace(from_dlpack=lambda tensor: tensor), 2)
    claims = synthetic.catalog(CATALOG)
    pack = synthetic.pack(tmp_path, claims, ARCH, families=tuple(SIGNATURES))
    functions = {
        symbol: OneDevice(SIGNATURES[plan.family][plan.op], symbol, dict(plan.spec))
        for symbol, plan in pack.plans.items()
    }
    return Sequences(SimpleNamespace(directory=tmp_path, manifest=pack, functions=functions), 2)


@pytest.mark.parametrize("op", mixed.OPS)
def test_no_earlier_call_changes_an_answer(over_stubs: Sequences, op: str) -> None:
    answers, failures = over_stubs.run(f"one op {op}", 400, (op,))
    assert not failures, "\n".join(failures[:5])
    for needed in ("True", "argument"):
        assert answers.get(f"{op}: {needed}", 0) > 5, answers


def test_no_earlier_call_of_any_op_changes_an_answer(over_stubs: Sequences) -> None:
    answers, failures = over_stubs.run("all ops", 600)
    assert not failures, "\n".join(failures[:5])
    assert {answer.partition(":")[0] for answer in answers} == set(mixed.OPS)


def test_the_judgement_finds_an_answer_of_a_stale_plan(
    over_stubs: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow path that takes the refusal of a remembered plan for an answer must not pass."""
    real = specplan.op.Op.slow_path

    def stale(op: Any, values: Any) -> Any:
        try:
            remembered = op._parts["key_of"](*values) in op.plans
        except Exception:
            remembered = False
        # Asked although a plan is remembered for the call: that plan has refused it.
        return op._refused(ValueError("refused")) if remembered else real(op, values)

    monkeypatch.setattr(specplan.op.Op, "slow_path", stale)
    _, failures = over_stubs.run("stale", 400, ("sparse_gqa_verify", "scatter"))
    assert any("sparse_gqa_verify" in failure for failure in failures)
    assert any("scatter" in failure for failure in failures)


def test_a_workspace_is_asked_for_by_the_call_that_needs_it(over_stubs: Sequences) -> None:
    """24/2 heads x 4 rows and 12/1 x 8, and pages of 32 and 64: equal elements, dtype and tokens;
    of each pair one is split. What needs none takes none, and what needs one is told how much.
    """
    pack = over_stubs.pack()

    def call(heads: int, kv: int, rows: int, page: int, **more: Any) -> Any:
        def zeros(*shape: int, dtype: Any = torch.bfloat16) -> torch.Tensor:
            return on_device(torch.zeros(shape, dtype=dtype))

        integers = torch.int32
        caches = (zeros(2, kv, page, 256), zeros(2, kv, page, 256))
        lists = zeros(rows, 300, dtype=integers)
        table, owner = zeros(rows, 2, dtype=integers), zeros(rows, dtype=integers)
        out = zeros(rows, heads, 256)
        return pack.sparse_gqa_verify(
            *(zeros(rows, heads, 256), *caches, table, lists, owner, out),
            tokens=1,
            softmax_scale=0.0625,
            **more,
        )

    words = {
        (heads, rows): pack.sparse_gqa_verify.workspace(
            q_heads=heads, kv_heads=kv, head_dim=256, page_size=32, selected=300,
            requests=rows, tokens=1, dtype="bf16",
        )
        for heads, kv, rows in ((24, 2, 4), (12, 1, 8))
    }  # fmt: skip
    for heads, kv, rows, page, splits in (
        *((24, 2, 4, 32, None), (12, 1, 8, 32, None), (24, 2, 4, 64, None), (24, 2, 4, 32, None)),
        *((24, 2, 4, 32, 1), (12, 1, 8, 32, None)),
    ):
        needed = 0 if splits == 1 else words[heads, rows]
        answer = call(heads, kv, rows, page, splits=splits)
        if needed:
            assert not answer
            assert f"needs a workspace of {needed} words, none is given" in answer.detail
            space = on_device(torch.zeros(needed))
            assert call(heads, kv, rows, page, splits=splits, workspace=space) is True
        else:
            assert answer is True, answer
    assert workspace_words({"q_heads": 24, "kv_heads": 2}, 4, 1, 1, 2, 0) > 0


PACK = Path(__file__).resolve().parents[2] / "packs" / ARCH


@pytest.mark.skipif(not (PACK / manifest.NAME).is_file(), reason="needs `make plans`")
def test_no_earlier_call_changes_an_answer_of_the_compiled_functions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same over the compiled functions of a pack, up to their launches."""
    recorder = Recorder(PACK, tmp_path / "recorder")
    ffi = library.tvm_ffi()

    def from_dlpack(value: Any) -> Any:
        # The recorder says by itself that such a tensor is on the device.
        return value if isinstance(value, OnDevice) else ffi.from_dlpack(value)

    imagine(monkeypatch, SimpleNamespace(from_dlpack=from_dlpack), 1)
    functions = dict(recorder.functions)
    arch_pack = SimpleNamespace(directory=PACK, manifest=manifest.read(PACK), functions=functions)
    answers, failures = Sequences(arch_pack, 1).run("compiled", 1200)
    assert not failures, "\n".join(failures[:5])
    for op in mixed.OPS:
        assert answers.get(f"{op}: True", 0) > 5, answers
        assert answers.get(f"{op}: argument", 0) > 5, answers

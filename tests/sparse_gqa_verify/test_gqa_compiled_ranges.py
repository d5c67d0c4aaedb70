"""What the compiled functions refuse by themselves, asked without a GPU: other sizes than the
plan's, ranges, and memory that overlaps.
"""

from __future__ import annotations

from typing import Any

import pytest

from support import packs
from support.shared import Shared

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from specplan.kernels.sparse_gqa_verify import cases  # noqa: E402
from specplan.plans import manifest  # noqa: E402
from specplan.plans.sparse_gqa_verify import HEAD_DIM, VScaleOrder  # noqa: E402

from support.recorder import Recorded, Recorder  # noqa: E402  isort: skip
from support.stubs import on_device  # noqa: E402  isort: skip

CATALOG = """\
schema: 1
archs:
  sm_90a: {device: H200, capability: [9, 0], sm_count: 132, smem_per_sm: 233472,
    smem_per_cta: 232448}
families:
  sparse_gqa_verify:
    problems:
      small: {q_heads: 4, kv_heads: 2, head_dim: 256, page_size: 32, selected: 35}
    cells:
      - {problems: [small], requests: 1..2, tokens: 2, splits: 2, dtypes: [bf16, nvfp4],
         candidate: [sm_90a], why: tests}
"""
GEOMETRY = {"q_heads": 4, "kv_heads": 2, "head_dim": 256, "page_size": 32, "selected": 35}
SCALES = ("k_block_scales", "v_block_scales", "k_scale", "v_scale")
WORDS = 2 * 2 * 2 * 2 * 260 * 2
#: The last integers of a good call.
SIZES = {"requests": 2, "q_heads": 4, "kv_heads": 2, "page_size": 32, "width": 35, "words": WORDS}
LAUNCH = {"tokens": 2, "group_rows": 1, "splits": 2, "whole_units": 0, "cluster": 1, "apart": 0}


@pytest.fixture(scope="module")
def functions(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    root = shared.made("gqa-ranges", lambda place: packs.build(place, CATALOG))
    recorder = Recorder(root / "packs" / "sm_90a", tmp_path_factory.mktemp("recorder"))
    plans = manifest.read(root / "packs" / "sm_90a").plans
    return {str(dict(plans[s].spec)["dtype"]): f for s, f in recorder.functions.items()}


def call_of(dtype: str, **changes: Any) -> tuple[Any, ...]:
    case = cases.GqaCase(
        "call", GEOMETRY, 2, 2, 2, dtype, "cpu", context=64, order=VScaleOrder.INTERLEAVED
    )
    inputs = case.inputs
    call: dict[str, Any] = {"q": inputs.q, "k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    if dtype == "nvfp4":
        call |= {name: getattr(inputs, name) for name in SCALES}
    call |= {
        "block_table": inputs.block_table,
        "selected_tokens": inputs.selected_tokens,
        "request_indices": inputs.request_indices,
        "valid_count": inputs.request_indices,
        "query_positions": inputs.query_positions,
        "output_gate": inputs.output_gate,
        "out": case.out,
        "workspace": torch.empty(WORDS),
        "softmax_scale": 0.25,
        "use_valid_count": 0,
        "use_query_positions": 1,
        "use_output_gate": 1,
    }
    if dtype == "nvfp4":
        call["v_interleaved"] = 1
    call |= {**SIZES, **LAUNCH}
    for name, change in changes.items():
        call[name] = change(call) if callable(change) else change
    return tuple(on_device(v) if isinstance(v, torch.Tensor) else v for v in call.values())


def spread(call: dict[str, Any]) -> torch.Tensor:
    scales = call["v_block_scales"]
    wide = torch.zeros(*scales.shape[:-1], 32, dtype=torch.uint8).view(scales.dtype)
    return wide[..., :16]


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    *[("bf16", f"another {name}", {name: value + 1}) for name, value in SIZES.items()],
    *[("nvfp4", f"another {name}", {name: value - 1}) for name, value in list(SIZES.items())[:5]],
    ("bf16", "other tokens", {"tokens": 4}),
    ("bf16", "no tokens", {"tokens": 0, "requests": 4}),
    ("bf16", "scale 0", {"softmax_scale": 0.0}),
    ("bf16", "scale NaN", {"softmax_scale": float("nan")}),
    ("bf16", "scale Inf", {"softmax_scale": float("inf")}),
    ("nvfp4", "token stride of interleaved scales", {"v_block_scales": spread}),
    *[
        (dtype, f"out is {name}", {name: lambda call: call["out"]})
        for dtype in ("bf16", "nvfp4")
        for name in ("q", "output_gate")
    ],
    (
        "bf16",
        "out begins in q's last row",
        {"q": lambda c: pair()[:4], "out": lambda c: pair()[3:7]},
    ),
    *[
        ("bf16", f"{name} in out", {name: lambda call: call["out"][:1].view(torch.int32)[0, 0, :4]})
        for name in ("request_indices", "valid_count", "query_positions")
    ],
    *[
        (dtype, f"{name} in the workspace", {name: lambda c: c["workspace"].view(torch.int32)[-4:]})
        for dtype in ("bf16", "nvfp4")
        for name in ("request_indices", "valid_count", "query_positions")
    ],
    ("nvfp4", "k_scale in the workspace", {"k_scale": lambda call: call["workspace"][-1:]}),
    ("nvfp4", "v_scale in out", {"v_scale": lambda c: c["out"].view(torch.float32)[-1, -1, -1:]}),
    ("bf16", "out in the workspace", {"out": lambda c: within(c["workspace"])}),
    ("bf16", "rows of out are one", {"out": lambda call: call["out"][:1].expand(4, 4, 256)}),
    ("bf16", "heads of out are one", {"out": lambda call: call["out"][:, :1].expand(4, 4, 256)}),
    (
        "bf16",
        "rows of out overlap",
        {
            "out": lambda c: torch.empty(9999)
            .to(torch.bfloat16)
            .as_strided((4, 4, 256), (768, 256, 1))
        },
    ),
]


def within(workspace: torch.Tensor) -> torch.Tensor:
    return workspace.view(torch.bfloat16)[: 4 * 1024].view(4, 4, HEAD_DIM)


@pytest.mark.parametrize(("dtype", "changes"), [(d, c) for d, _, c in REFUSED],
                         ids=[f"{d}-{w}" for d, w, _ in REFUSED])  # fmt: skip
def test_refused_before_anything_is_launched(
    functions: dict[str, Recorded], dtype: str, changes: dict[str, Any]
) -> None:
    function = functions[dtype]
    before = len(function.launches)
    with pytest.raises(Exception, match="77001"):
        function(*call_of(dtype, **changes))
    assert len(function.launches) == before


TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("as it stands", {}),
    ("linear scales", {"v_interleaved": 0}),
    ("a larger workspace", {"workspace": lambda call: torch.empty(WORDS + 4)}),
    ("unused options that are other arguments", {"output_gate": lambda call: call["q"]}),
    ("heads of out outside its rows", {"out": lambda call: crossed()}),
    ("out right after q", {"q": lambda call: pair()[:4], "out": lambda call: pair()[4:]}),
    ("an empty table", {"block_table": lambda call: torch.zeros(2, 0, dtype=torch.int32)}),
]


def crossed() -> torch.Tensor:
    return torch.empty(4, 4, HEAD_DIM, dtype=torch.bfloat16).transpose(0, 1)


_PAIR = torch.zeros(8, 4, HEAD_DIM, dtype=torch.bfloat16)


def pair() -> torch.Tensor:
    return _PAIR


@pytest.mark.parametrize("changes", [c for _, c in TAKEN], ids=[w for w, _ in TAKEN])
@pytest.mark.parametrize("dtype", ["bf16", "nvfp4"])
def test_taken(functions: dict[str, Recorded], dtype: str, changes: dict[str, Any]) -> None:
    changes = {k: v for k, v in changes.items() if dtype == "nvfp4" or k != "v_interleaved"}
    before = len(functions[dtype].launches)
    functions[dtype](*call_of(dtype, **changes))
    assert len(functions[dtype].launches) == before + 1


def test_a_call_of_no_splits_is_checked_and_launches_nothing(
    functions: dict[str, Recorded],
) -> None:
    function = functions["bf16"]
    before = len(function.launches)
    function(*call_of("bf16", splits=0))
    with pytest.raises(Exception, match="77001"):
        function(*call_of("bf16", splits=0, words=WORDS + 1))
    assert len(function.launches) == before

"""sparse_gqa_verify on a GPU, beyond what certification does for each cell: caches of more than 4
GiB, the fused gate against a separate one bit for bit, and a NaN that one row lists.

Run where a pack is: ``SPECPLAN_PACKS=packs pytest tests/device``. Skipped without a GPU of a
catalogued arch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import specplan
import torch
from specplan.kernels.sparse_gqa_verify import cases
from specplan.kernels.sparse_gqa_verify.reference import gate

FAMILY = "sparse_gqa_verify"
DTYPES = ("bf16", "fp8_e4m3", "nvfp4")
FAR = 5 << 30


@pytest.fixture(scope="module")
def pack() -> Iterator[specplan.Pack]:
    loaded = specplan.load(candidates=True)
    loaded.prepare()
    yield loaded


def geometry_of(pack: specplan.Pack) -> dict[str, int]:
    return dict(pack.manifest().problems[FAMILY]["qsa_24_2"])


def run(
    pack: specplan.Pack, inputs: cases.Inputs, tokens: int, splits: int | None = None
) -> torch.Tensor:
    """The op's output, in a buffer of NaNs."""
    dtype = {2: "bf16", 1: "fp8_e4m3"}[inputs.k_cache.itemsize]
    if inputs.k_block_scales is not None:
        dtype = "nvfp4"
    op, requests = pack.sparse_gqa_verify, inputs.q.shape[0] // tokens
    words = op.workspace(
        problem="qsa_24_2", requests=requests, tokens=tokens, dtype=dtype, splits=splits
    )
    out = torch.full_like(inputs.q, torch.nan)
    options: dict[str, Any] = {}
    if dtype != "bf16":
        options |= {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    if dtype == "nvfp4":
        options |= {
            "k_block_scales": inputs.k_block_scales,
            "v_block_scales": inputs.v_block_scales,
            "v_scale_order": inputs.v_scale_order,
        }
    op.require(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.selected_tokens,
        inputs.request_indices,
        out,
        torch.full((words,), torch.nan, device=out.device),
        tokens=tokens,
        softmax_scale=inputs.softmax_scale,
        query_positions=inputs.query_positions,
        output_gate=inputs.output_gate,
        splits=splits,
        **options,
    )
    return out


def far(plane: torch.Tensor) -> torch.Tensor:
    """The same plane with its pages spread over more than 4 GiB."""
    step = -(-FAR // plane.shape[0]) // 256 * 256
    pool = torch.empty(step * plane.shape[0], dtype=torch.uint8, device=plane.device)
    strides = (step // plane.itemsize, *plane.contiguous().stride()[1:])
    spread = pool.view(plane.dtype).as_strided(plane.shape, strides)
    spread.copy_(plane)
    assert (plane.shape[0] - 1) * step > 1 << 32
    return spread


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("requests", "tokens"), [(1, 1), (24, 4)])
def test_pages_beyond_four_gibibytes(
    pack: specplan.Pack, dtype: str, requests: int, tokens: int
) -> None:
    near = cases.make_inputs(
        geometry_of(pack), requests, tokens, dtype, "cuda", seed=3, context=2600
    )
    planes = ("k_cache", "v_cache", *(("k_block_scales", "v_block_scales") * (dtype == "nvfp4")))
    spread = replace(near, **{name: far(getattr(near, name)) for name in planes})
    first, second = run(pack, near, tokens), run(pack, spread, tokens)
    assert first.isfinite().all()
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_gate_is_a_separate_gate_in_every_variant(pack: specplan.Pack, dtype: str) -> None:
    """One-split, all-split with either merge, and split last wave; lone rows and groups."""
    geometry = geometry_of(pack)
    kinds = set()
    for tokens in (1, 4):
        for requests in (1, 2, 3, 5, 9, 17, 33, 65, 129, 140, 256):
            gated = cases.make_inputs(
                geometry, requests, tokens, dtype, "cuda", seed=requests, context=2600
            )
            plain = replace(gated, output_gate=None)
            wanted = gate(run(pack, plain, tokens), gated.output_gate)
            found = run(pack, gated, tokens)
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), requests
            picked = pack.sparse_gqa_verify.pick(
                problem="qsa_24_2", requests=requests, tokens=tokens, dtype=dtype
            )
            launch = picked.launch
            merge = "cluster" if launch["cluster"] > 1 else "memory"
            kind = "last wave" if launch["whole_units"] else merge
            kinds.add((kind if launch["splits"] > 1 else "one", launch["group_rows"] > 1))
    assert kinds == {
        *(("one", False), ("memory", False), ("cluster", False), ("last wave", False)),
        *(("one", True), ("memory", True), ("cluster", True), ("last wave", True)),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_nan_in_v_reaches_the_rows_that_list_it_and_no_others(
    pack: specplan.Pack, tokens: int
) -> None:
    inputs = cases.make_inputs(
        geometry_of(pack), 24, tokens, "bf16", "cuda", seed=1, context=2600, overlap=0.5
    )
    clean = run(pack, inputs, tokens)
    chosen = int(inputs.selected_tokens[5, 7])
    page = int(inputs.block_table[int(inputs.request_indices[5]), chosen // 32])
    # Requests share pages here: whoever lists the page's token is meant.
    inputs.v_cache[page, :, chosen % 32] = torch.nan
    found = run(pack, inputs, tokens)
    physical = inputs.block_table.long()[
        inputs.request_indices.long()[:, None], inputs.selected_tokens.clamp(min=0).long() // 32
    ]
    listing = (
        (inputs.selected_tokens % 32 == chosen % 32)
        & (inputs.selected_tokens >= 0)
        & (physical == page)
    ).any(1)
    assert listing[5]
    assert found[listing].isnan().all()
    assert torch.equal(found[~listing].isnan(), torch.zeros_like(found[~listing]).bool())
    # Another way to the same sums rounds otherwise.
    error = (found[~listing].float() - clean[~listing].float()).norm()
    assert error <= cases.RELATIVE_L2 * clean[~listing].float().norm()

"""The servers' tensors, with their shapes, strides and dtypes, as arguments of specplan's ops."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from specplan.integrations import sglang, tensors, trtllm, vllm  # noqa: E402
from specplan.integrations.paging import recut  # noqa: E402
from specplan.kernels.sparse_gqa_verify import reference  # noqa: E402

#: Tokens of a block that vLLM comes to: by model, shards, dtypes and drafts.
BLOCKS = (
    *(208, 272, 400, 416, 448, 480, 528, 544, 784, 800, 832, 1056, 1072, 1280, 1568, 1600),
    *(1616, 1648, 2176, 2432, 3200),
)
BY_32 = (416, 448, 480, 544, 800, 832, 1056, 1280, 1568, 1600, 2176, 2432, 3200)
DIM = 8


def vllm_cache(
    order: str, blocks: int, heads: int, tokens: int, *, layers: int = 1, padding: int = 0
) -> torch.Tensor:
    """One layer's cache [blocks, heads, tokens, 2 * DIM] of distinct numbers: in HND or NHD order
    inside a block, other layers between the blocks, or padding of so many tokens of a head.
    """
    inner = (heads, tokens) if order == "HND" else (tokens, heads)
    row = 2 * DIM
    block = heads * tokens * row
    stride = layers * block + padding * row
    storage = torch.arange(blocks * stride, dtype=torch.int32)
    one = storage.as_strided((blocks, *inner, row), (stride, inner[1] * row, row, 1),
                             (layers - 1) * block)  # fmt: skip
    return one if order == "HND" else one.permute(0, 2, 1, 3)


def same_tokens(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: vllm.Recut) -> None:
    """Every token of every request lies where the block table says, seen through the pages."""
    blocks, _, tokens, _ = cache.shape
    table = torch.tensor([[blocks - 1, 0, -1], [1, -1, -1]], dtype=torch.int32)
    out = torch.full((2, 3 * cut.pages_of_block), 77, dtype=torch.int32)
    assert cut.table_into(table, cut.steps("cpu"), out) is out
    for request, columns in enumerate(((blocks - 1, 0), (1,))):
        positions = torch.arange(len(columns) * tokens)
        block = torch.tensor(columns)[positions // tokens]
        pages = out[request].long()[positions // cut.page_size]
        within = positions % cut.page_size
        wanted = cache[block, :, positions % tokens]
        assert torch.equal(k[pages, :, within], wanted[..., :DIM])
        assert torch.equal(v[pages, :, within], wanted[..., DIM:])
    none = out.view(2, 3, -1)
    assert (none[0, 2] < 0).all() and (none[1, 1:] < 0).all()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("tokens", BLOCKS)
def test_vllm_blocks_as_pages(tokens: int, page: int, order: str, heads: int) -> None:
    cache = vllm_cache(order, 3, heads, tokens)
    if page == 32 and tokens not in BY_32:
        with pytest.raises(ValueError, match=f"blocks of {tokens} tokens are no whole number"):
            vllm.kv_pages(cache, page, head_dim=DIM)
        return
    k, v, cut = vllm.kv_pages(cache, page, head_dim=DIM)
    assert k.shape[1:] == v.shape[1:] == (heads, page, DIM)
    assert k.data_ptr() == cache.data_ptr(), "a view"
    assert cut.pages_of_block == tokens // page
    same_tokens(cache, k, v, cut)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("tokens", [208, 1600, 1616])
def test_layers_inside_a_block_and_padded_blocks(tokens: int, order: str, heads: int) -> None:
    cache = vllm_cache(order, 3, heads, tokens, layers=3)
    same_tokens(cache, *vllm.kv_pages(cache, 16, head_dim=DIM))
    page = 16 if order == "HND" else 16 * heads
    cache = vllm_cache(order, 3, heads, tokens, padding=5 * page)
    same_tokens(cache, *vllm.kv_pages(cache, 16, head_dim=DIM))
    cache = vllm_cache(order, 3, heads, tokens, padding=page // 2)
    with pytest.raises(ValueError, match="no whole number of pages of 16"):
        vllm.kv_pages(cache, 16, head_dim=DIM)


def test_caches_that_no_view_cuts() -> None:
    with pytest.raises(ValueError, match="expected 4 dimensions"):
        recut(torch.zeros(2, 3, 4), 2)
    with pytest.raises(ValueError, match="2 apart"):
        recut(torch.zeros(2, 1, 32, 8)[..., ::2], 16)
    with pytest.raises(ValueError, match="lie inside each other"):
        recut(torch.zeros(64, 8).as_strided((2, 1, 32, 8), (128, 8, 8, 1)), 16)
    with pytest.raises(ValueError, match="more than int32 can name"):
        recut(torch.empty(1 << 24, 1, 256, 1, device="meta"), 1)
    with pytest.raises(ValueError, match="expected rows of 512"):
        vllm.kv_pages(torch.zeros(2, 1, 32, 256), 16)


def test_a_table_goes_into_memory_of_its_size_alone() -> None:
    _, cut = recut(torch.zeros(4, 1, 64, 8), 16)
    table = torch.tensor([[3, 1]], dtype=torch.int64)
    steps = cut.steps("cpu")
    out = torch.empty(1, 8, dtype=torch.int32)
    assert cut.table_into(table, steps, out).tolist() == [[12, 13, 14, 15, 4, 5, 6, 7]]
    for wrong in (out[:, :7], out.long()):
        with pytest.raises(ValueError, match=r"expected int32 \(1, 8\)"):
            cut.table_into(table, steps, wrong)


def test_attention_over_the_pages_is_attention_over_the_blocks() -> None:
    """The whole way of a call on vLLM's tensors: bytes, fused K and V, a count in the last column,
    scales as numbers and as tensors of no dimension.
    """
    generator = torch.Generator().manual_seed(1)
    blocks, heads, tokens, dim, rows, width = 4, 2, 48, 256, 3, 20
    kv = torch.randn(blocks, tokens, heads, 2 * dim, generator=generator)
    stored = kv.to(torch.float8_e4m3fn).view(torch.uint8).permute(0, 2, 1, 3)
    q = torch.randn(rows, 4, dim, generator=generator).bfloat16()
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    lists = torch.randint(0, 2 * tokens, (rows, width + 1), generator=generator, dtype=torch.int32)
    lists[:, -1] = torch.tensor([width, 7, 0])
    selected, count = vllm.chosen_tokens(lists)
    assert selected.data_ptr() == lists.data_ptr() and selected.stride() == (width + 1, 1)
    positions = torch.tensor([90, 80, 95])
    narrow = vllm.int32_into(positions, torch.empty(3, dtype=torch.int32))
    owners = torch.tensor([0, 1, 1], dtype=torch.int32)
    scales = {
        "k_scale": vllm.scale(0.5, "cpu"),
        "v_scale": vllm.scale(torch.tensor(2.0), "cpu"),
        "valid_count": count,
        "query_positions": narrow,
    }
    cache = tensors.fp8(stored)
    whole = reference.attention(
        *(q, cache[..., :dim], cache[..., dim:], table, selected, owners),
        softmax_scale=1 / 16,
        **scales,
    )
    k, v, cut = vllm.kv_pages(stored, 16)
    pages = cut.table_into(table, cut.steps("cpu"), torch.empty(2, 6, dtype=torch.int32))
    paged = reference.attention(q, k, v, pages, selected, owners, softmax_scale=1 / 16, **scales)
    assert whole.out.abs().sum() > 0
    assert torch.equal(whole.out, paged.out)
    assert not paged.out[2].any()


def test_a_token_pool_of_sglang_as_pages_of_32() -> None:
    size, heads, page, server = 640, 2, 32, 64
    pool = torch.arange(size * heads * DIM, dtype=torch.int32).view(size, heads, DIM)
    pages = sglang.token_pool_pages(pool, page)
    assert pages.shape == (size // page, heads, page, DIM) and pages.data_ptr() == pool.data_ptr()
    # Tokens of a server's page lie together; pages lie anywhere.
    order = torch.tensor([3, 1, 9, 4])
    slots = (order[:, None] * server + torch.arange(server)).flatten().int()
    req_to_token = torch.zeros(5, 300, dtype=torch.int32)
    req_to_token[3, :256], req_to_token[1, :100] = slots, slots[:100] + 64
    for kind in (torch.int32, torch.int64):
        which = torch.tensor([3, 1], dtype=kind)
        out = torch.empty(2, 10, dtype=torch.int32)
        assert sglang.page_table_into(req_to_token, which, page, out) is out
        for row, (request, length) in enumerate(((3, 256), (1, 100))):
            at = torch.arange(length)
            found = pages[out[row].long()[at // page], :, at % page]
            assert torch.equal(found, pool[req_to_token[request, :length].long()])
    with pytest.raises(ValueError, match=r"expected int32 \(2, 10\)"):
        sglang.page_table_into(req_to_token, which, page, out[:, :9])
    with pytest.raises(ValueError, match="pages x 32"):
        sglang.token_pool_pages(pool[:-1], page)


def test_pages_of_128_of_trtllm_are_cut_in_four() -> None:
    pool = torch.arange(5 * 2 * 128 * DIM).view(5, 2, 128, DIM).int()
    pages, cut = trtllm.recut(pool, 32)
    table = torch.tensor([[4, 2, -1]], dtype=torch.int32)
    out = cut.table_into(table, cut.steps("cpu"), torch.empty(1, 12, dtype=torch.int32))
    at = torch.arange(256)
    wanted = pool[table[0, at // 128].long(), :, at % 128]
    assert torch.equal(pages[out[0, at // 32].long(), :, at % 32], wanted)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_null_block_of_vllm_is_padding(kind: torch.dtype) -> None:
    indices = torch.tensor([[5, 9, 9, 9], [0, 0, 0, 0], [3, 8, 8, 8], [0, 0, 0, 0]], dtype=kind)
    out = torch.full((4,), 7, dtype=torch.int32)
    assert vllm.state_slots_into(indices, out).tolist() == [5, -1, 3, -1]
    assert vllm.state_slots_into(indices[:, 0], out).tolist() == [5, -1, 3, -1]
    with pytest.raises(ValueError, match="out is"):
        vllm.state_slots_into(indices, out[:3])


def test_int32_is_passed_as_it_is() -> None:
    given = torch.arange(4, dtype=torch.int32)[::2]
    assert tensors.int32_into(given, given) is given


def test_scales_are_views_or_made_once() -> None:
    held = torch.tensor(3.0)
    view = tensors.scale(held, "cpu")
    held.fill_(4.0)
    assert view.tolist() == [4.0]
    assert tensors.scale(0.25, "cpu").tolist() == [0.25]
    for wrong in (torch.ones(2), torch.ones(1).double()):
        with pytest.raises(ValueError, match="a scale is"):
            tensors.scale(wrong, "cpu")


def test_packed_heads_and_gates_are_views() -> None:
    keys, values, tokens = 2, 6, 4
    wide = (2 * keys + values) * 128
    rows = torch.randn(3 * tokens, wide + 64)[:, :wide]
    q, k, v = tensors.packed_heads(rows, keys, values, tokens)
    assert (q.shape, k.shape, v.shape) == ((3, 4, 2, 128), (3, 4, 2, 128), (3, 4, 6, 128))
    assert torch.equal(k[1, 2, 1], rows[6, 3 * 128 : 4 * 128])
    assert torch.equal(v[2, 3, 5], rows[11, -128:])
    assert all(t.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
               for t in (q, k, v))  # fmt: skip
    assert tensors.by_request(rows[:, :values], tokens).shape == (3, 4, 6)
    with pytest.raises(ValueError, match="no multiple of 5"):
        tensors.by_request(rows, 5)
    for wrong in ((keys, values, 5), (keys, 5, tokens)):
        with pytest.raises(ValueError, match="rows are"):
            tensors.packed_heads(rows, *wrong)


def test_gate_parameters_and_records() -> None:
    a_log, bias = tensors.gate_parameters(torch.ones(8)[::2], torch.ones(4).bfloat16())
    assert a_log.dtype is bias.dtype is torch.float32 and a_log.is_contiguous()
    from specplan.plans.gdn_replay import Cursors, Pool

    zeros = torch.zeros(3, dtype=torch.int32)
    cursors = Cursors(zeros, zeros.clone(), key_heads=2, value_heads=4, dtype="fp32")
    pool = torch.zeros(2, 3, 4, 128, 128)
    Pool(cursors, sglang.layer_state(pool, 1), **tensors.replay_records(3, 2, 4, "cpu"))


def test_no_server_is_imported() -> None:
    code = (
        "import sys; from specplan.integrations import sglang, trtllm, vllm; "
        "print([n for n in ('vllm', 'sglang', 'tensorrt_llm', 'tvm_ffi') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

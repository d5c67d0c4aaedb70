"""Device code of ``sparse_gqa_verify``: attention of verify rows over their chosen tokens in a
paged K/V cache.

``reference.py`` states the math; the device code computes the same with bf16 or fp16 MMAs and fp32
sums. It reads as data flows: ``lower`` launches ``attend``, which takes ``queries``, fills a
``window`` (``selection``, ``union``) and walks it (``mainloop``: ``gather_kv``, ``fragments``,
``softmax``), and stores (``epilogue``) what ``combine`` sums over splits.

**Arguments** of the compiled function, positional; marks: [f] FP8 only, [n] NVFP4 only, [fn] both.

====================  ==================  ========================================================
q                     bf16 [N, Hq, 256]   last stride 1, others multiples of 8
k_cache, v_cache      [P, Hk, T, 256]     bf16, or float8_e4m3fn [f]; uint8 [P, Hk, T, 128] [n].
                                          Views: last stride 1, others multiples of 16 bytes
                                          (NHD: ``permute(0, 2, 1, 3)``)
k_block_scales,       [P, Hk, T, 16]      [n] float8_e4m3fn; last stride 1, others multiples of 16
v_block_scales
k_scale, v_scale      fp32 [1]            [fn] dequantization factors
block_table           int32 [B, C]        any strides
selected_tokens       int32 [N, W]        any strides
request_indices       int32 [N]           any stride
valid_count           int32 [N]           any int32 [N] tensor if unused
query_positions       int32 [N]           any int32 [N] tensor if unused
output_gate           bf16 [N, Hq, 256]   like q; any such tensor if unused
out                   bf16 [N, Hq, 256]   like q
workspace             fp32 [words]        16-byte aligned; unused if splits is 1 or cluster is not
softmax_scale         float
use_valid_count       0 or 1
use_query_positions   0 or 1
use_output_gate       0 or 1
v_interleaved         0 or 1              [n] ``VScaleOrder``
requests, q_heads,    the plan's sizes    N = requests x tokens, Hq, Hk, T and W
kv_heads, page_size,
width
words                 the plan's words    ``plans.sparse_gqa_verify.workspace_words``
tokens, group_rows,   the plan's launch   ``plans/sparse_gqa_verify.py``
splits, whole_units,                      splits 0: a call that checks, and launches nothing
cluster, apart
====================  ==================  ========================================================

The host side raises RuntimeError and launches nothing unless the tensors have the plan's sizes, the
workspace has its words, ``softmax_scale`` is finite and above 0, an interleaved V scale plane has
token stride 16, ``out`` and a used workspace overlap no other argument, and the rows of ``out``
share no memory. **The planning rule sees to it** that Hq is a multiple of Hk and fits the plan's
``m_tiles``: ``ceil(group_rows * Hq / Hk / 16)``; that T is a multiple of 4; that W times ``splits``
is below 2^31; that ``cluster`` is 1, or ``splits`` where no unit is whole and splits are at most
``MAX_CLUSTER``; and that ``group_rows`` is 1 in forms of one MMA tile alone.

**Work.** A CTA takes one K/V head of a group of rows, or a split of it. It fills a *window* with
what the rows attend, then walks it in tiles of 16 tokens per warp: four warps and two CTAs per SM,
or eight warps and one. In a group of several rows of one request the window is the union of their
lists in blocks of four tokens, found through bitmaps of blocks in shared memory, one of each row
and one of all, and an entry says which rows list which token. A split's part of the union is a
range of its blocks in their order, so a CTA looks up no others. In any other case (one row; rows of
several requests; lists longer than 2176; more than 262144 positions) rows are done one after
another. So are the rows of a union in which a list repeats a token, or that meets a V which is not
finite (0 * NaN must not reach a row that does not list it). A list's order does not matter to a
union, and no result depends on the order of threads: runs repeat bit for bit.

**Numbers.** bf16 caches: bf16 MMAs. FP8 and NVFP4 decode exactly to fp16 (e2m1 times its block
scale is exact there); Q goes to fp16 scaled by a power of two for each row, exact down to 2^-28 of
the row's largest magnitude; the global scales and these powers of two multiply the fp32 scores and
sums. Softmax is online in fp32. Split results are fp32 sums before division, with their maximum in
log2 units and total, merged in the order of the splits: where the splits of a unit are a cluster,
each of its CTAs merges a share of the rows out of the shared memory of all, and a union that fails
in one is done again in all; else a second kernel of the same call merges them out of the workspace.

The gate multiplies the rounded output by a sigmoid that repeats CUDA's ``expf`` and a correctly
rounded reciprocal, so that a fused gate equals ``(out.float() *
torch.sigmoid(gate.float())).to(bf16)`` bit for bit. A row without entries, or of no request, is
zeros whatever its gate holds: nobody writes the gates of padding rows.
"""

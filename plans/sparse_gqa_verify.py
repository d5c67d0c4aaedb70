"""Planning rule of ``sparse_gqa_verify``: how the rows of a call are grouped, and how its units are
split over CTAs.

A *unit* is one K/V head of a group of rows. Rows of a request that are grouped read the union of
their lists once; a group of one row is the row-wise path. Every device function serves every
variant; what a plan fixes at compile time is the K/V format and how many MMA tiles of 16 query rows
a group fills, and the rest are launch integers:

``tokens``       rows of a request, which are consecutive
``group_rows``   rows of a group; a request has ``ceil(tokens / group_rows)`` groups
``whole_units``  units that one CTA takes alone, the first ones, before others are split
``splits``       CTAs that share each unit beyond those
``cluster``      CTAs of a cluster: ``splits`` where a unit's splits merge in shared memory, or 1
``apart``        1: one CTA per SM although two would fit; else 0

One-split: a CTA per unit, ``splits`` 1. All-split: no unit is whole, and the splits merge in
clusters or through the workspace. Split last wave: full waves of whole units, and the remainder
split so that the last wave ends sooner, merged through the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import and_
from types import MappingProxyType
from typing import Any

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import (
    FREE,
    Form,
    Free,
    Op,
    Parameter,
    Rule,
    Scalar,
    Size,
    Tensor,
    Value,
    vector,
)

HEAD_DIM = 256
#: Query rows of an MMA tile, and the most such tiles of a group: accumulators of more do not fit
#: the registers.
MMA_ROWS = 16
MAX_M_TILES = 3
#: Rows of a group: an entry of the union keeps 4 bits for each of its 4 tokens.
GROUP_ROWS = 4
MAX_GROUP = 16
MAX_TOKENS = 8
MAX_REQUESTS = 256
#: The merge keeps the statistics of two splits in a lane.
MAX_SPLITS = 64
#: CTAs of a cluster at most: larger ones leave SMs without work.
MAX_CLUSTER = 4
#: Longest list, and highest position, that a union is built from; beyond them rows are done one
#: after another.
UNION_LIST = 2176
UNION_TOKENS = 262144
#: Warps of a CTA by the MMA tiles that its group fills: four, and two CTAs per SM, or eight and
#: one. On an H200, in us in bf16, NVFP4 and FP8, with 24/2 heads: 128 units of two rows took 74, 77
#: and 64 with eight (with four, in an earlier version, 92 and 86 in bf16 and NVFP4). Of four rows,
#: 512 units took 360, 343 and 294 with four and 423, 411 and 351 with eight.
WARPS = {1: 4, 2: 8, 3: 4}
#: Tokens of a tile of the inner loop for each warp.
WARP_TOKENS = 16
#: What a merge in memory costs after a last wave, in tiles.
MERGE_TILES = 2
#: What a tile of lone rows costs where a CTA has its SM for itself, and where two share it; and
#: what a merge in memory costs, once and for every so many units. On an H200 in bf16, in an earlier
#: version: 1.6 us and 2.5 us a tile, and 3, 6 and 9 us a merge of 32, 64 and 96 units.
LONE_TILE = (2, 3)
MERGE_COST = 1
MERGE_UNITS = 10
#: fp32 words of a row of partial results: its sums, and four more of which two are used.
PARTIAL_WORDS = HEAD_DIM + 4
#: Fewest units, were every row its own, from which grouping pays where lists overlap 90 %, by dtype
#: and the rows of a group.
GROUPING_UNITS = {
    "bf16": {2: 40, 3: 48, 4: 48},
    "fp8_e4m3": {2: 80, 3: 80, 4: 64},
    "nvfp4": {2: 40, 3: 48, 4: 48},
}


@dataclass(frozen=True)
class Cost:
    """What a call of grouped rows costs on an H200, in tenths of a microsecond: a sum that depends
    on where splits merge, and a tile of the CTA that has most of them. ``apart`` where a CTA has
    its SM for itself, ``shared`` where there are two.
    """

    tile_apart: int
    tile_shared: int
    memory_apart: int
    memory_shared: int
    cluster: int


#: By dtype and warps of a CTA. Fitted to launches of four rows per group at 12 to 256 rows, of two
#: at 16 to 96, 24/2 heads, lists that overlap 90 %.
COSTS = {
    ("bf16", 4): Cost(23, 43, 118, 162, 92),
    ("bf16", 8): Cost(31, 31, 103, 103, 90),
    ("fp8_e4m3", 4): Cost(18, 29, 128, 170, 125),
    ("fp8_e4m3", 8): Cost(28, 28, 95, 95, 85),
    ("nvfp4", 4): Cost(22, 34, 130, 170, 110),
    ("nvfp4", 8): Cost(35, 35, 90, 90, 80),
}


class VScaleOrder(Enum):
    """Where the V scale of token ``t`` and block ``s`` of ``S`` lies in the bytes of one page and
    head.

    ``LINEAR``: at ``t * S + s``. ``INTERLEAVED``: at ``(t // 4) * 4 * S + 4 * s + t % 4``, so every
    tile of four tokens is transposed. Nothing in the data tells them apart.
    """

    LINEAR = "linear"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True)
class Launch:
    """The integers of one launch; see the module docstring."""

    tokens: int
    group_rows: int
    splits: int
    whole_units: int
    cluster: int = 1
    apart: int = 0


def m_tiles(geometry: Mapping[str, int], group_rows: int) -> int:
    """MMA tiles that the queries of a group fill."""
    return -(-group_rows * (geometry["q_heads"] // geometry["kv_heads"]) // MMA_ROWS)


def resident(warps: int) -> int:
    """CTAs of so many warps that fit an SM at a time."""
    return 8 // warps


def _tiles(width: int, splits: int, warps: int) -> int:
    return -(-width // (WARP_TOKENS * warps * splits))


def _useful_splits(width: int, most: int, warps: int) -> int:
    """The fewest splits, not above ``most``, that give the tiles per CTA which ``most`` would
    give.
    """
    most = max(1, min(most, MAX_SPLITS, -(-width // (WARP_TOKENS * warps))))
    return -(-width // (WARP_TOKENS * warps * _tiles(width, most, warps)))


def groups(requests: int, tokens: int, group_rows: int) -> int:
    return requests * -(-tokens // group_rows)


def group_rows(geometry: Mapping[str, int], requests: int, tokens: int, dtype: str) -> int:
    """Rows of a group: 1, or an even share of a request's rows that fills few MMA tiles."""
    group = geometry["q_heads"] // geometry["kv_heads"]
    most = min(GROUP_ROWS, MAX_M_TILES * MMA_ROWS // group)
    if tokens == 1 or most == 1:
        return 1
    selected = geometry["selected"]
    if selected > UNION_LIST or geometry["page_size"] % 4:
        return 1
    rows = -(-tokens // -(-tokens // most))
    lone_units = requests * tokens * geometry["kv_heads"]
    return rows if lone_units >= GROUPING_UNITS[dtype][rows] else 1


def _clusters(size: int, slots: int) -> int:
    """Clusters of so many CTAs that fit a GPU with room for ``slots`` CTAs at a time. What a part
    of the chip has left over takes none: an H200 takes 66, 39 and 30 of two, three and four where a
    CTA fills an SM, and 132, 79 and 62 where two do.
    """
    return slots // size if size <= 2 else 9 * slots // (10 * size)


def _forced(splits: int) -> int:
    """CTAs of a cluster where all units are split: all of a unit's, if a cluster holds them."""
    return splits if splits <= MAX_CLUSTER else 1


def _split_lone(width: int, units: int, warps: int, arch: Arch) -> tuple[int, int]:
    """``(splits, CTAs of a cluster)`` that cost least where all units of lone rows run at a time:
    tiles per CTA, which take longer where SMs hold two CTAs, and the merge.
    """
    slots = arch.sm_count * resident(warps)
    single, shared = LONE_TILE
    costs = [(_tiles(width, 1, warps) * (single if units <= arch.sm_count else shared), 1, 1)]
    for size in range(2, MAX_CLUSTER + 1):
        if units <= _clusters(size, slots):
            # Clusters of three took as long as if two of their CTAs shared an SM while others were
            # free.
            spread = size % 2 == 0 and units <= _clusters(size, arch.sm_count)
            costs.append((_tiles(width, size, warps) * (single if spread else shared), size, size))
    splits = _useful_splits(width, slots // units, warps)
    if splits > 1:
        tile = single if units * splits <= arch.sm_count else shared
        merge = MERGE_COST + units // MERGE_UNITS
        costs.append((_tiles(width, splits, warps) * tile + merge, splits, 1))
    _, splits, cluster = min(costs)
    return splits, cluster


def _split_groups(
    width: int, units: int, rows: int, cost: Cost, warps: int, arch: Arch
) -> tuple[int, int, int]:
    """``(splits, CTAs of a cluster, apart)`` that cost least where all units of groups run at a
    time.
    """
    # The union, where a tenth of each further row's list is its own.
    width = width * (9 + rows) // 10
    slots = arch.sm_count * resident(warps)
    found = []

    def add(splits: int, cluster: int) -> None:
        alone = units <= _clusters(cluster, arch.sm_count) // (splits if cluster == 1 else 1)
        tile = cost.tile_apart if alone else cost.tile_shared
        base = cost.cluster
        if splits > 1 and cluster == 1:
            base = cost.memory_apart if alone else cost.memory_shared
        apart = int(alone and resident(warps) > 1)
        found.append((base + tile * _tiles(width, splits, warps), splits, cluster, apart))

    add(1, 1)
    for size in range(2, MAX_CLUSTER + 1):
        # Larger ones were not better than a merge in memory where SMs hold two CTAs.
        if units <= _clusters(size, slots if size == 2 else arch.sm_count):
            add(size, size)
    for most in (arch.sm_count, slots):
        # As many as there is room for, even if no CTA has a tile less: a union may be longer.
        splits = min(most // units, MAX_SPLITS, _tiles(width, 1, warps))
        if splits > 1:
            add(splits, 1)
    _, splits, cluster, apart = min(found)
    return splits, cluster, apart


def choose(
    geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
) -> Launch:
    """The launch that the rule takes when nothing is forced."""
    rows = group_rows(geometry, requests, tokens, dtype)
    warps = WARPS[m_tiles(geometry, rows)]
    units = groups(requests, tokens, rows) * geometry["kv_heads"]
    width = geometry["selected"]
    slots = arch.sm_count * resident(warps)
    if units < slots:
        if rows == 1:
            splits, cluster = _split_lone(width, units, warps, arch)
            return Launch(tokens, rows, splits, 0, cluster)
        cost = COSTS[dtype, warps]
        splits, cluster, apart = _split_groups(width, units, rows, cost, warps, arch)
        return Launch(tokens, rows, splits, 0, cluster, apart)
    whole = units // slots * slots
    rest = units - whole
    if rest:
        splits = _useful_splits(width, slots // rest, warps)
        full = _tiles(width, 1, warps)
        split_time = whole // slots * full + _tiles(width, splits, warps) + MERGE_TILES
        if splits > 1 and split_time < -(-units // slots) * full:
            return Launch(tokens, rows, splits, whole)
    return Launch(tokens, rows, 1, 0)


def workspace_words(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    group_rows: int,
    splits: int,
    whole_units: int,
    cluster: int = 1,
) -> int:
    """fp32 words of workspace of a launch; 0 where nothing is split, or where clusters merge.

    >>> workspace_words({"q_heads": 24, "kv_heads": 2}, 1, 1, 1, 8, 0) == 2 * 8 * 12 * (256 + 4)
    True
    """
    if splits == 1 or cluster > 1:
        return 0
    units = groups(requests, tokens, group_rows) * geometry["kv_heads"] - whole_units
    heads = geometry["q_heads"] // geometry["kv_heads"]
    return units * splits * group_rows * heads * PARTIAL_WORDS


class _SparseGqaVerify:
    name = "sparse_gqa_verify"
    ops = ("sparse_gqa_verify",)
    dtypes = ("bf16", "fp8_e4m3", "nvfp4")
    geometry: Mapping[str, tuple[int, int]] = MappingProxyType(
        {
            "q_heads": (1, 256),
            "kv_heads": (1, 64),
            "head_dim": (HEAD_DIM, HEAD_DIM),
            "page_size": (4, 1024),
            "selected": (1, 1 << 20),
        }
    )

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        q_heads, kv_heads = geometry["q_heads"], geometry["kv_heads"]
        if q_heads % kv_heads:
            return f"q_heads ({q_heads}) is not a multiple of kv_heads ({kv_heads})"
        if q_heads // kv_heads > MAX_GROUP:
            return f"{q_heads // kv_heads} query heads share a K/V head; at most {MAX_GROUP} may"
        if geometry["page_size"] % 4:
            return f"page_size ({geometry['page_size']}) is not a multiple of 4"
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        if tokens > MAX_TOKENS:
            return f"a request has at most {MAX_TOKENS} rows, not {tokens}"
        return None

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        return choose(geometry, requests, tokens, dtype, arch).splits

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        """The rule's launch where ``splits`` is the rule's; else all units in as many splits as are
        asked for.
        """
        if not 1 <= splits <= MAX_SPLITS:
            raise ValueError(f"splits is {splits}; it must be between 1 and {MAX_SPLITS}")
        launch = choose(geometry, requests, tokens, dtype, arch)
        if splits != launch.splits:
            launch = Launch(tokens, launch.group_rows, splits, 0, _forced(splits))
        return (
            Plan(
                family=self.name,
                op=self.name,
                arch=arch.name,
                spec=(("dtype", dtype), ("m_tiles", m_tiles(geometry, launch.group_rows))),
                launch=(
                    ("tokens", launch.tokens),
                    ("group_rows", launch.group_rows),
                    ("splits", launch.splits),
                    ("whole_units", launch.whole_units),
                    ("cluster", launch.cluster),
                    ("apart", launch.apart),
                ),
            ),
        )


FAMILY = _SparseGqaVerify()


# ----- the op -------------------------------------------------------------------------------------

#: Strides that are multiples of 16 bytes, but for the last.
_WIDE = Free(16)
#: The K/V formats as they are stored: dtype and elements of a row.
_STORED = {
    "bf16": ("bf16", HEAD_DIM),
    "fp8_e4m3": ("fp8_e4m3", HEAD_DIM),
    "nvfp4": ("uint8", HEAD_DIM // 2),
}


def _cache(name: str, about: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            *(name, dtype, ("P", "Hk", "T", width), (_WIDE, _WIDE, _WIDE, 1), about),
            align=16,
            bits=64,
            forms=(form,),
        )
        for form, (dtype, width) in _STORED.items()
    )


def _block_scales(name: str, about: str) -> Tensor:
    return Tensor(
        *(name, "fp8_e4m3", ("P", "Hk", "T", HEAD_DIM // 16), (_WIDE, _WIDE, _WIDE, 1), about),
        align=16,
        bits=64,
        forms=("nvfp4",),
    )


def _heads(name: str, about: str, **more: Any) -> Tensor:
    return Tensor(
        *(name, "bf16", ("N", "Hq", HEAD_DIM), (_WIDE, _WIDE, 1), about),
        align=16,
        bits=64,
        **more,
    )


def _loose(name: str, shape: tuple[str, ...], about: str, **more: Any) -> Tensor:
    return Tensor(name, "int32", shape, (FREE,) * len(shape), about, bits=64, **more)


def _inputs(c: Any) -> dict[str, Any]:
    """The spans of memory of what a call reads, by name."""
    names = (
        *("q", "k_cache", "v_cache", "k_block_scales", "v_block_scales", "k_scale", "v_scale"),
        *("block_table", "selected_tokens", "request_indices", "valid_count", "query_positions"),
        "output_gate",
    )
    tensors = {name: getattr(c, name, None) for name in names}
    return {name: c.span(tensor) for name, tensor in tensors.items() if tensor is not None}


def _disjoint(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    return (a[0] >= b[1]) | (b[0] >= a[1])


def _unfolded(c: Any) -> Any:
    """No two indices of ``out`` mean one element: heads within rows, rows within heads, or one of
    either.
    """
    rows, heads = c.wide(c.out.shape[0]), c.wide(c.out.shape[1])
    row, head = c.wide(c.out.stride[0]), c.wide(c.out.stride[1])
    one_head = (heads == 1) | (head >= HEAD_DIM)
    nested = (row >= head * heads) & one_head
    crossed = (head >= row * rows) & (row >= HEAD_DIM)
    lone = (rows == 1) & one_head
    headless = (heads == 1) & (row >= HEAD_DIM)
    return nested | crossed | lone | headless


def _needs(c: Any) -> str:
    there = "none is given" if c.given.workspace is None else f"this one has {c.workspace.shape[0]}"
    return f"the call needs a workspace of {c.words} words, {there}"


def words_of(geometry: Mapping[str, int], requests: int, launch: Mapping[str, int]) -> int:
    """:func:`workspace_words` of a launch by its parameters' names."""
    return workspace_words(
        geometry,
        requests,
        launch["tokens"],
        launch["group_rows"],
        launch["splits"],
        launch["whole_units"],
        launch["cluster"],
    )


def _size(c: Any) -> Size:
    geometry = (c.q.shape[1], c.k_cache.shape[1], c.q.shape[2], c.k_cache.shape[2])
    return Size(
        (*geometry, c.selected_tokens.shape[1]),
        c.form,
        c.q.shape[0] // c.tokens,
        c.tokens,
        c.given.splits,
    )


def _attended(c: Any) -> Any:
    """Which entries of the lists count, before it is asked where they lie: bool [N, W]."""
    chosen, owner = c.selected_tokens.tensor, c.request_indices.tensor
    counts = (chosen >= 0) & ((owner >= 0) & (owner < c.B))[:, None]
    if c.given.valid_count is not None:
        # Ordinals of the entries, with torch's own ops alone.
        order = (chosen[:1] * 0 + 1).cumsum(1) - 1
        counts = counts & (order < c.valid_count.tensor[:, None])
    if c.given.query_positions is not None:
        counts = counts & (chosen <= c.query_positions.tensor[:, None])
    return counts


def _columns(c: Any) -> Any:
    return c.selected_tokens.tensor // c.k_cache.shape[2]


def _pages(c: Any) -> Any:
    """The page of each entry that has a column: int [N, W]."""
    owner = c.request_indices.tensor.clamp(0, max(c.B - 1, 0)).long()
    table = c.block_table.tensor
    return table[owner[:, None], _columns(c).clamp(0, max(table.shape[1] - 1, 0)).long()]


_VALUES = (
    Value(
        "request_indices",
        lambda c: c.request_indices.tensor >= c.B,
        "the block table has {c.B} rows; a row of no request is negative",
    ),
    Value(
        "valid_count",
        lambda c: None if c.given.valid_count is None else c.valid_count.tensor > c.W,
        "lists have {c.W} entries",
    ),
    Value(
        "selected_tokens",
        lambda c: _attended(c) & (_columns(c) >= c.C),
        "the block table has {c.C} columns",
    ),
    Value(
        "block_table",
        lambda c: _attended(c) & (_pages(c) >= c.P),
        "the caches have {c.P} pages (row and entry are those of selected_tokens)",
        _pages,
    ),
)

_SPLIT = ("tokens", "group_rows", "splits", "whole_units", "cluster", "apart")

OP = Op(
    "sparse_gqa_verify",
    "sparse_gqa_verify",
    tensors=(
        _heads("q", "queries of each row"),
        *_cache("k_cache", "key pages"),
        *_cache("v_cache", "value pages"),
        _block_scales("k_block_scales", "of the keys, NVFP4"),
        _block_scales("v_block_scales", "of the values, NVFP4"),
        *(
            vector(
                name,
                "fp32",
                1,
                "value = stored x block scale x this, FP8 and NVFP4",
                bits=64,
                forms=("fp8_e4m3", "nvfp4"),
            )
            for name in ("k_scale", "v_scale")
        ),
        _loose("block_table", ("B", "C"), "page of each `page_size` tokens, -1 for none"),
        _loose("selected_tokens", ("N", "W"), "token positions, -1 for none, in any order"),
        _loose("request_indices", ("N",), "row of the block table of each row"),
        _loose("valid_count", ("N",), "entries of the list that count", stand_in="request_indices"),
        _loose("query_positions", ("N",), "last position attended", stand_in="request_indices"),
        _heads("output_gate", "before the sigmoid", stand_in="q", ranks=(2,)),
        _heads("out", "every row is written", written=True),
        vector(
            "workspace",
            "fp32",
            "held",
            "fp32 words, see `workspace`",
            align=16,
            written=True,
            stand_in="nothing",
        ),
    ),
    scalars=(
        Scalar("softmax_scale", "float"),
        *(
            Scalar(f"use_{name}", expression=f"0 if {name} is None else 1")
            for name in ("valid_count", "query_positions", "output_gate")
        ),
        Scalar("v_interleaved", expression="0 if v_scale_order is LINEAR else 1", forms=("nvfp4",)),
        Scalar("requests", known=lambda c: c.q.shape[0] // c.given.tokens),
        Scalar("q_heads", known=lambda c: c.q.shape[1]),
        Scalar("kv_heads", known=lambda c: c.k_cache.shape[1]),
        Scalar("page_size", known=lambda c: c.k_cache.shape[2]),
        Scalar("width", known=lambda c: c.selected_tokens.shape[1]),
        Scalar(
            "words",
            known=lambda c: words_of(
                {"q_heads": c.q_heads, "kv_heads": c.kv_heads}, c.requests, c.launch
            ),
        ),
        # With no splits a call is checked and nothing is launched.
        *(Scalar(name, launch=name, idle=0 if name == "splits" else None) for name in _SPLIT),
    ),
    parameters=(
        *(
            Parameter(name)
            for name in (
                "q",
                "k_cache",
                "v_cache",
                "block_table",
                "selected_tokens",
                "request_indices",
                "out",
            )
        ),
        Parameter("workspace", optional=True),
        Parameter("tokens", "int", keyword=True, about="rows of a request"),
        Parameter("softmax_scale", "float", keyword=True, about="finite and above 0, in fp32"),
        *(
            Parameter(name, optional=True, keyword=True)
            for name in ("k_scale", "v_scale", "k_block_scales", "v_block_scales")
        ),
        Parameter("v_scale_order", "choice", True, True, "how the V block scales lie in a page"),
        *(
            Parameter(name, optional=True, keyword=True)
            for name in ("valid_count", "query_positions", "output_gate")
        ),
        Parameter("splits", "int", True, True, "CTAs that share a unit; the rule's without it"),
    ),
    # The compiled function compares all sizes that the plan was picked for with the tensors'.
    key=("q.get_device()", "q.numel()", "form", "tokens", "splits"),
    size=_size,
    rules=(
        Rule(lambda c: c.tokens >= 1, "tokens is {c.tokens}, below 1"),
        Rule(
            lambda c: c.q.shape[0] % c.tokens == 0,
            "{c.q.shape[0]} rows are no multiple of {c.tokens} tokens a request",
            compiled=False,
        ),
        Rule(
            lambda c: c.wide(c.requests) * c.tokens == c.q.shape[0],
            "q has {c.q.shape[0]} rows, the plan is for {c.requests} x {c.tokens}",
            planned=True,
        ),
        Rule(
            lambda c: c.q.shape[1] == c.q_heads,
            "q has {c.q.shape[1]} heads, the plan is for {c.q_heads}",
            planned=True,
        ),
        Rule(
            lambda c: c.k_cache.shape[1] == c.kv_heads,
            "the caches have {c.k_cache.shape[1]} heads, the plan is for {c.kv_heads}",
            planned=True,
        ),
        Rule(
            lambda c: c.k_cache.shape[2] == c.page_size,
            "pages have {c.k_cache.shape[2]} tokens, the plan is for {c.page_size}",
            planned=True,
        ),
        Rule(
            lambda c: c.selected_tokens.shape[1] == c.width,
            "lists have {c.selected_tokens.shape[1]} entries, the plan is for {c.width}",
            planned=True,
        ),
        *(
            Rule(
                condition,
                "softmax_scale is {c.given.softmax_scale}, it must be finite and above 0 in fp32",
                reason="argument",
            )
            for condition in (
                lambda c: c.softmax_scale > 0.0,
                lambda c: c.softmax_scale < float("inf"),
            )
        ),
        Rule(
            lambda c: (c.v_interleaved == 0) | (c.v_block_scales.stride[2] == HEAD_DIM // 16),
            "interleaved V scales have token stride 16, these have {c.v_block_scales.stride[2]}",
            reason="argument",
            planned=True,
            forms=("nvfp4",),
        ),
        Rule(lambda c: c.workspace.shape[0] >= c.words, _needs, planned=True),
        Rule(
            _unfolded,
            "rows of out share memory, its strides are {c.out.stride}",
            reason="argument",
        ),
        Rule(
            lambda c: reduce(and_, [_disjoint(c.written, span) for span in c.inputs.values()]),
            "out overlaps the memory of another argument",
            reason="argument",
        ),
        Rule(
            lambda c: (c.words == 0) | _disjoint(c.space, c.written),
            "out overlaps the memory of another argument",
            reason="argument",
            planned=True,
        ),
        Rule(
            lambda c: (
                (c.words == 0)
                | reduce(and_, [_disjoint(c.space, span) for span in c.inputs.values()])
            ),
            "the workspace overlaps the memory of another argument",
            reason="argument",
            planned=True,
        ),
    ),
    derived=(
        ("inputs", _inputs),
        ("written", lambda c: c.span(c.out)),
        ("space", lambda c: c.span(c.workspace)),
    ),
    values=_VALUES,
    no_work=lambda p: p.q.dim() == 3 and p.q.shape[0] == 0,
    form=Form(
        "k_cache",
        {"bf16": "bf16", "fp8_e4m3": "fp8_e4m3", "uint8": "nvfp4"},
        {"nvfp4": {"v_scale_order": ("LINEAR", "INTERLEAVED")}},
    ),
    absent={"nothing": ("fp32", (0,))},
    # A row of no request, split in two and merged in memory.
    idle={
        "T": 4,
        "page_size": 4,
        "splits": 2,
        "whole_units": 0,
        "apart": 0,
        "v_interleaved": 0,
        **{f"use_{name}": 0 for name in ("valid_count", "query_positions", "output_gate")},
        **dict.fromkeys(
            ("held", "words"),
            workspace_words({"q_heads": 1, "kv_heads": 1}, 1, 1, 1, 2, 0),
        ),
    },
)
OPS = {OP.name: OP}

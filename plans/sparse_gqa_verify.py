"""Planning rule of ``sparse_gqa_verify``: how the rows of a call are grouped, and how its units are
split over CTAs.

A *unit* is one K/V head of a group of rows. Rows of a request that are grouped read the union of
their lists once; a group of one row is the row-wise path. Every device function serves every
variant; what a plan fixes at compile time is the K/V format and how many MMA tiles of 16 query rows
a group fills, and the rest are launch integers:

``tokens``       rows of a request, which are consecutive
``group_rows``   rows of a group; a request has ``ceil(tokens / group_rows)`` groups
``whole_units``  units that one CTA takes alone, the first ones
``splits``       CTAs that share each unit beyond those

One-split: all units are whole. All-split with merge: none is. Split last wave: full waves of whole
units, and the remainder split so that the last wave ends sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan

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
#: Longest list, and highest position, that a union is built from; beyond them rows are done one
#: after another.
UNION_LIST = 2176
UNION_TOKENS = 262144
#: CTAs that fit an SM at a time, and tokens of a tile of the inner loop: where the queries of a
#: group fill one MMA tile, as those of a lone row do, and where they fill more.
RESIDENT = (2, 1)
TILE = (64, 128)
#: What a merge costs, in tiles.
MERGE_TILES = 2
#: fp32 words of a row of partial results: its sums, and four more of which two are used.
PARTIAL_WORDS = HEAD_DIM + 4
#: Fewest units, were every row its own, from which grouping the rows of a request pays. On an H200
#: with 24/2 heads, 4 rows a request and lists that overlap 90 %: 32 rows (64 units) took 34.9 us
#: row by row and 37.7 grouped in bf16, 64 rows 60.0 and 49.8; in FP8 29.6 against 37.9, and 47.7
#: against 45.7.
GROUPING_UNITS = 96


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


def m_tiles(geometry: Mapping[str, int], group_rows: int) -> int:
    """MMA tiles that the queries of a group fill."""
    return -(-group_rows * (geometry["q_heads"] // geometry["kv_heads"]) // MMA_ROWS)


def resident(m_tiles: int) -> int:
    """CTAs of a plan that fit an SM at a time."""
    return RESIDENT[m_tiles > 1]


def tile_tokens(m_tiles: int) -> int:
    """Tokens of a tile of the inner loop of a plan."""
    return TILE[m_tiles > 1]


def _tiles(width: int, splits: int, tile: int) -> int:
    return -(-width // (tile * splits))


def _useful_splits(width: int, most: int, tile: int) -> int:
    """The fewest splits, not above ``most``, that give the tiles a CTA which ``most`` would
    give.
    """
    most = max(1, min(most, MAX_SPLITS, -(-width // tile)))
    return -(-width // (tile * _tiles(width, most, tile)))


def groups(requests: int, tokens: int, group_rows: int) -> int:
    return requests * -(-tokens // group_rows)


def group_rows(geometry: Mapping[str, int], requests: int, tokens: int) -> int:
    """Rows of a group: 1, or an even share of a request's rows that fills few MMA tiles."""
    group = geometry["q_heads"] // geometry["kv_heads"]
    units = requests * tokens * geometry["kv_heads"]
    most = min(GROUP_ROWS, MAX_M_TILES * MMA_ROWS // group)
    if tokens == 1 or most == 1 or units < GROUPING_UNITS:
        return 1
    if geometry["selected"] > UNION_LIST or geometry["page_size"] % 4:
        return 1
    return -(-tokens // -(-tokens // most))


def choose(geometry: Mapping[str, int], requests: int, tokens: int, arch: Arch) -> Launch:
    """The launch that the rule takes when nothing is forced."""
    rows = group_rows(geometry, requests, tokens)
    filled = m_tiles(geometry, rows)
    size = tile_tokens(filled)
    units = groups(requests, tokens, rows) * geometry["kv_heads"]
    width = geometry["selected"]
    slots = arch.sm_count * resident(filled)
    if units < slots:
        splits = _useful_splits(width, slots // units, size)
        return Launch(tokens, rows, splits, units if splits == 1 else 0)
    whole = units // slots * slots
    rest = units - whole
    if rest:
        splits = _useful_splits(width, slots // rest, size)
        full = _tiles(width, 1, size)
        split_time = whole // slots * full + _tiles(width, splits, size) + MERGE_TILES
        if splits > 1 and split_time < -(-units // slots) * full:
            return Launch(tokens, rows, splits, whole)
    return Launch(tokens, rows, 1, units)


def workspace_words(
    geometry: Mapping[str, int],
    requests: int,
    tokens: int,
    group_rows: int,
    splits: int,
    whole_units: int,
) -> int:
    """fp32 words of workspace of a launch; 0 where nothing is split.

    >>> workspace_words({"q_heads": 24, "kv_heads": 2}, 1, 1, 1, 8, 0) == 2 * 8 * 12 * (256 + 4)
    True
    """
    if splits == 1:
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
        return choose(geometry, requests, tokens, arch).splits

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
        launch = choose(geometry, requests, tokens, arch)
        if splits != launch.splits:
            rows = launch.group_rows
            units = groups(requests, tokens, rows) * geometry["kv_heads"]
            launch = Launch(tokens, rows, splits, units if splits == 1 else 0)
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
                ),
            ),
        )


FAMILY = _SparseGqaVerify()

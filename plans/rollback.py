"""Planning rule, plane table and snapshot layout of ``rollback``.

A verify step overwrites index-side cache rows that may be rejected. ``gather`` saves them before
the step writes; ``restore`` (a rejected mask) or ``commit`` (accepted counts, and the staged
per-request state) puts the rejected ones back. Each op is one launch over all planes and rows.

Everything here is integers: the layouts that host code and device code share, and the rule that
chooses a plan.

**Plane table**, int64 ``[planes, PLANE_FIELDS]`` on the device, one row per plane, in the order of
:class:`Plane`'s fields. **State table**, int64 ``[states, STATE_FIELDS]``, one row per state pool,
in the order of :class:`State`'s fields. **Snapshot**, uint8 ``[rows, record_bytes]``: row r of
every plane side by side, at the planes' ``record_offset``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import Any

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import (
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

MAX_PLANES = 64
MAX_STATES = 64
MAX_ROW_BYTES = 1 << 20
#: The ``side_row_bytes`` of a problem without side planes.
NO_SIDE = 0

#: Widest access of one thread in bytes, and the least alignment of a row in the snapshot.
VECTOR = 16
#: Bytes of a cache line: records start on one, and so do rows of at least that size.
LINE = 128
#: Lanes that may share one row: a warp.
MAX_LANES = 32

#: An armed snapshot is worth this many shares; every CTA of a restore or commit takes its own, so
#: that exactly one launch consumes it whatever its grid is. Zero (a fresh ``pending`` buffer) means
#: that nothing is pending.
SHARES = 1 << 30

#: How a candidate becomes a pool element. Values 4, 8 and 16 are bit copies in accesses of that
#: many bytes.
CASTS: Mapping[tuple[str, str], int] = {
    ("float32", "bfloat16"): 32,
    ("float32", "float16"): 33,
    ("bfloat16", "float32"): 34,
    ("float16", "float32"): 35,
    ("int64", "int32"): 36,
    ("int32", "int64"): 37,
}
ITEM_BYTES: Mapping[str, int] = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True)
class Plane:
    """One plane ``[pages, page_tokens, row]`` as the device sees it; strides in bytes.

    Rows need not be dense in a page, nor pages in the pool: index planes are views into a pooled
    allocation.
    """

    base: int
    page_stride: int
    row_stride: int
    pages: int
    page_tokens: int
    row_bytes: int
    record_offset: int
    vector: int


@dataclass(frozen=True)
class State:
    """One state pool ``[slots, state]`` and its candidates ``[requests, candidates, state]``;
    strides in bytes.

    ``items`` counts accesses of ``kind`` bytes for a bit copy, elements for a cast (see
    :data:`CASTS`).
    """

    candidates_base: int
    request_stride: int
    candidate_stride: int
    candidates: int
    pool_base: int
    slot_stride: int
    slots: int
    items: int
    kind: int


PLANE_FIELDS = len(Plane.__dataclass_fields__)
STATE_FIELDS = len(State.__dataclass_fields__)


def access_bytes(*quantities: int) -> int:
    """The widest access, 16, 8 or 4 bytes, that divides every base, stride and size given; 0 if
    none does.
    """
    for width in (16, 8, 4):
        if all(quantity % width == 0 for quantity in quantities):
            return width
    return 0


def plane(
    base: int, page_stride: int, row_stride: int, pages: int, page_tokens: int, row_bytes: int
) -> Plane:
    """Describe one plane; :func:`layout` then gives it a place in the snapshot's record.

    Parameters
    ----------
    base
        Device address of page 0, row 0, in bytes.
    page_stride, row_stride
        Bytes from one page, and from one row of a page, to the next.
    pages, page_tokens
        Pages of the plane and rows of a page. A row whose page or place in the page lies outside is
        skipped.
    row_bytes
        Bytes of one row, dense in memory.

    Raises
    ------
    ValueError
        If no 4-byte access fits, the row size is out of range, or rows or pages overlap.

    """
    if not 0 < row_bytes <= MAX_ROW_BYTES:
        raise ValueError(f"a plane's rows have {row_bytes} bytes, expected 1..{MAX_ROW_BYTES}")
    if pages < 0 or page_tokens < 1:
        raise ValueError(f"a plane has {pages} pages of {page_tokens} rows")
    if pages * page_tokens > 1 and (page_tokens > 1 and row_stride < row_bytes):
        raise ValueError(f"rows of {row_bytes} bytes overlap at a row stride of {row_stride} bytes")
    if pages > 1 and page_stride < (page_tokens - 1) * row_stride + row_bytes:
        raise ValueError(
            f"pages of {page_tokens} rows of {row_bytes} bytes overlap at a page stride of "
            f"{page_stride} bytes"
        )
    vector = access_bytes(base, page_stride, row_stride, row_bytes)
    if vector == 0:
        raise ValueError(
            f"a plane's base ({base:#x}), page stride ({page_stride}), row stride ({row_stride}) "
            f"and row size ({row_bytes}) must be multiples of 4 bytes"
        )
    return Plane(base, page_stride, row_stride, pages, page_tokens, row_bytes, 0, vector)


@dataclass(frozen=True)
class Layout:
    """Planes with their places in a record, and the record's bytes (see :func:`layout`)."""

    planes: tuple[Plane, ...]
    record_bytes: int

    def table(self) -> list[list[int]]:
        """The plane table's rows, for an int64 tensor on the planes' device."""
        return [list(astuple(each)) for each in self.planes]

    @cached_property
    def key(self) -> tuple[int, ...]:
        """What tells layouts apart that need other launches, for look-ups: the geometry and the
        bytes of a record, which the order of the planes changes.
        """
        geometry = () if self.geometry is None else tuple(self.geometry.values())
        return (*geometry, self.record_bytes)

    @cached_property
    def geometry(self) -> Mapping[str, int] | None:
        """The problem that these planes are: one or two row sizes, the first plane's first. None if
        there are more.
        """
        sizes = list(dict.fromkeys(each.row_bytes for each in self.planes))
        if len(sizes) > 2:
            return None
        main = sum(each.row_bytes == sizes[0] for each in self.planes)
        return {
            "planes": main,
            "row_bytes": sizes[0],
            "side_planes": len(self.planes) - main,
            "side_row_bytes": sizes[1] if len(sizes) == 2 else NO_SIDE,
        }


def layout(planes: Sequence[Plane]) -> Layout:
    """Place the planes in a record.

    A plane starts at a multiple of 16 bytes, so that the plane alone decides its access width, and
    of the largest power of two up to a cache line that its rows fill, so that a row's accesses
    touch no line more than it needs.

    Raises
    ------
    ValueError
        If there are no planes, or more than a launch takes.

    """
    if not 1 <= len(planes) <= MAX_PLANES:
        raise ValueError(f"{len(planes)} planes, expected 1..{MAX_PLANES}")
    placed = []
    end = 0
    for each in planes:
        filled = 1 << (each.row_bytes.bit_length() - 1)
        start = _round_up(end, min(max(filled, VECTOR), LINE))
        placed.append(replace(each, record_offset=start))
        end = start + each.row_bytes
    return Layout(tuple(placed), _round_up(end, LINE))


def state(
    candidates_base: int,
    request_stride: int,
    candidate_stride: int,
    candidates: int,
    pool_base: int,
    slot_stride: int,
    slots: int,
    elements: int,
    candidates_dtype: str,
    pool_dtype: str,
) -> State:
    """Describe one state pool and its candidates; strides in bytes, ``elements`` of one state dense
    in memory.

    Equal dtypes are copied bit for bit and need 4-byte multiples throughout; unequal ones must be a
    pair of :data:`CASTS`, with natural alignment.

    Raises
    ------
    ValueError
        If the pair of dtypes is not covered, or an address or stride does not fit the access.

    """
    if candidates < 1 or elements < 1 or slots < 0:
        raise ValueError(f"{candidates} candidates of {elements} elements for {slots} slots")
    if candidates_dtype == pool_dtype:
        size = elements * _item_bytes(pool_dtype)
        kind = access_bytes(
            candidates_base, request_stride, candidate_stride, pool_base, slot_stride, size
        )
        if kind == 0:
            raise ValueError(
                f"a {pool_dtype} state of {size} bytes: size, strides and bases must be "
                "multiples of 4"
            )
        items = size // kind
    else:
        pair = (candidates_dtype, pool_dtype)
        if pair not in CASTS:
            known = ", ".join(f"{source} to {target}" for source, target in CASTS)
            raise ValueError(f"no cast from {candidates_dtype} to {pool_dtype}; there are: {known}")
        source, target = _item_bytes(candidates_dtype), _item_bytes(pool_dtype)
        if any(q % source for q in (candidates_base, request_stride, candidate_stride)):
            raise ValueError(f"candidates of {candidates_dtype} are not aligned to {source} bytes")
        if any(q % target for q in (pool_base, slot_stride)):
            raise ValueError(f"a pool of {pool_dtype} is not aligned to {target} bytes")
        kind, items = CASTS[pair], elements
    return State(
        candidates_base,
        request_stride,
        candidate_stride,
        candidates,
        pool_base,
        slot_stride,
        slots,
        items,
        kind,
    )


def state_table(states: Iterable[State]) -> list[list[int]]:
    """The state table's rows, for an int64 tensor on the pools' device."""
    return [list(astuple(each)) for each in states]


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"no state dtype {dtype!r}; there are: {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ----- the planning rule --------------------------------------------------------------------------

#: Threads of a CTA.
THREADS = 128
#: Rows that a thread keeps in flight, at few rows and at many.
UNROLL_FEW, UNROLL_MANY = 1, 4
#: Up to this many snapshot bytes a step is bound by latency: rows are spread thin and ``old`` is
#: loaded before it is known whether the row goes back. Above it, bandwidth counts, and only
#: rejected rows are read.
FEW_BYTES = 1 << 19
#: Most CTAs per SM of a launch over many rows.
MANY_CTAS_PER_SM = 4
#: Programmatic dependent launch: 1 on, 0 off.
OVERLAP = 1


@dataclass(frozen=True)
class Rollback:
    """The planning side of ``rollback``; see :class:`specplan.plans.family.Family`.

    A problem has ``planes`` planes with rows of ``row_bytes`` (index keys) and ``side_planes`` more
    with rows of ``side_row_bytes`` (positions). Pages, strides and the staged states are run-time
    data of the tables. The dtype of a cell is that of the page and row indices: planes are moved as
    bits, whatever they hold.
    """

    name: str = "rollback"
    ops: tuple[str, ...] = ("gather", "restore", "commit")
    dtypes: tuple[str, ...] = ("int32", "int64")

    @property
    def geometry(self) -> Mapping[str, tuple[int, int]]:
        return {
            "planes": (1, MAX_PLANES),
            "row_bytes": (4, MAX_ROW_BYTES),
            "side_planes": (0, MAX_PLANES - 1),
            "side_row_bytes": (NO_SIDE, MAX_ROW_BYTES),
        }

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        """Why these values do not fit together, or None."""
        total = geometry["planes"] + geometry["side_planes"]
        if total > MAX_PLANES:
            return f"{total} planes, at most {MAX_PLANES} fit one launch"
        for key in ("row_bytes", "side_row_bytes"):
            if geometry[key] % 4:
                return f"{key} is {geometry[key]}, rows are moved in multiples of 4 bytes"
        if (geometry["side_planes"] == 0) != (geometry["side_row_bytes"] == NO_SIDE):
            return f"side_row_bytes is {NO_SIDE} exactly where there are no side planes"
        if geometry["side_row_bytes"] == geometry["row_bytes"]:
            return "side planes with rows of the same size are planes like the others"
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        """Why a problem of this geometry has no cells with so many tokens a request, or None: there
        is no such bound.
        """
        return None

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        """Chunks that a plane's rows are cut into, one CTA each.

        A chunk is a multiple of the rows that a CTA keeps in flight: one chain of dependent loads
        moves them all. Many rows are cut into at most ``MANY_CTAS_PER_SM`` CTAs an SM.
        """
        rows = requests * tokens
        chunk = _rows_at_once(geometry["row_bytes"])
        if not _few(geometry, rows):
            planes = geometry["planes"] + geometry["side_planes"]
            most = max(1, MANY_CTAS_PER_SM * arch.sm_count // planes)
            chunk = _round_up(-(-rows // most), chunk * UNROLL_MANY)
        return -(-rows // chunk)

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        """One plan each for ``gather``, ``restore`` and ``commit``."""
        few = _few(geometry, requests * tokens)
        spec = (
            ("index", dtype),
            ("threads", THREADS),
            ("unroll", UNROLL_FEW if few else UNROLL_MANY),
        )
        launch = (("splits", splits), ("overlap", OVERLAP))
        return (
            Plan(self.name, "gather", arch.name, spec, launch),
            Plan(self.name, "restore", arch.name, spec, launch),
            Plan(self.name, "commit", arch.name, spec, launch),
        )


def _few(geometry: Mapping[str, int], rows: int) -> bool:
    record = geometry["planes"] * geometry["row_bytes"]
    record += geometry["side_planes"] * geometry["side_row_bytes"]
    return rows * record <= FEW_BYTES


def _rows_at_once(row_bytes: int) -> int:
    """Rows that one CTA moves with one access a thread, if the plane's alignment allows its widest
    access.
    """
    items = row_bytes // access_bytes(row_bytes)
    lanes = min(MAX_LANES, 1 << (items - 1).bit_length())
    return THREADS // lanes


FAMILY = Rollback()


# ----- the ops ------------------------------------------------------------------------------------

_COMMON = (
    Tensor("planes", "int64", ("planes", PLANE_FIELDS), (PLANE_FIELDS, 1), "plane table", align=8),
    Tensor("pages", "index", ("rows",), (1,), "page of each verify row"),
    Tensor("within", "index", ("rows",), (1,), "place of the row in its page"),
    Tensor(
        *("old", "uint8", ("held", "record"), (Free(VECTOR), 1)),
        "snapshot, row r of a plane at its `record_offset`",
        align=VECTOR,
    ),
    vector("pending", "int32", 1, "the snapshot's shares, 0: not pending", align=4, written=True),
)
_LAUNCH = (
    Scalar("record_bytes", known=lambda c: c.layout.record_bytes),
    Scalar("plane_count", known=lambda c: len(c.layout.planes)),
    # With no splits a call is checked and nothing is launched.
    Scalar("splits", launch="splits", idle=0),
    Scalar("overlap", launch="overlap", idle=0),
)
_PARAMETERS = (
    Parameter("layout", "Layout", about="from `describe`"),
    Parameter("tokens", "int", about="rows of a request"),
    *(Parameter(tensor.name, about=tensor.about) for tensor in _COMMON),
)
_INDEX = {"torch.int32": "int32", "torch.int64": "int64"}


def _index_of(c: Any) -> str:
    """The dtype of the page and row indices, by the name that a cell has for it."""
    return _INDEX.get(str(c.pages.tensor.dtype), "")


def _size(c: Any) -> Size:
    # Ragged rows run the plan of the full batch.
    requests = -(-c.pages.shape[0] // c.tokens)
    return Size(tuple(c.layout.geometry.values()), _index_of(c), requests, c.tokens)


def _snapshot(c: Any) -> str:
    return (
        f"{c.pages.shape[0]} rows of {len(c.layout.planes)} planes take records of "
        f"{c.layout.record_bytes} bytes; the snapshot is {c.old.shape}, the plane table "
        f"{c.planes.shape}"
    )


#: In what a call says alone, and in what a compiled function sees.
_RULES = (
    Rule(lambda c: c.given.tokens >= 1, "tokens is {c.given.tokens}, below 1", compiled=False),
    Rule(
        lambda c: _index_of(c) != "",
        "pages are {c.pages.tensor.dtype}, expected torch.int32 or torch.int64",
        reason="argument",
        compiled=False,
    ),
    Rule(
        lambda c: c.layout.geometry is not None,
        "the planes have more than two row sizes",
        reason="unknown_problem",
        compiled=False,
    ),
    Rule(lambda c: c.old.shape[0] >= c.pages.shape[0], _snapshot, planned=True),
    Rule(lambda c: c.old.shape[1] >= c.record_bytes, _snapshot, planned=True),
    Rule(lambda c: c.planes.shape[0] == c.plane_count, _snapshot, planned=True),
)


def _place(name: str, extent: str) -> Value:
    """A row's page, or its place in it, is not beyond the largest plane. Rows outside a plane are
    passed over there, which hides a mistake.
    """

    def most(c: Any) -> int:
        return int(max(getattr(plane, extent) for plane in c.layout.planes))

    what = "pages" if extent == "pages" else "places of a page"
    return Value(
        name,
        lambda c: getattr(c, name).tensor >= most(c),
        f"no plane has so many {what}; a row of none is negative",
    )


def _commit_live(c: Any) -> Any:
    return None if c.given.slots is None else c.slots.tensor >= 0


def _commit_beyond(c: Any) -> Any:
    """Which slots lie beyond the cursors and beyond every pool of states."""
    if c.given.slots is None:
        return None
    most = c.cursors.shape[0]
    if c.states.shape[0] > 0:
        column = [each.name for each in fields(State)].index("slots")
        most = max(most, int(c.states.tensor[:, column].max()))
    return c.slots.tensor >= most


def _op(
    name: str,
    tensors: tuple[Tensor, ...] = (),
    scalars: tuple[Scalar, ...] = (),
    rules: tuple[Rule, ...] = (),
    values: tuple[Value, ...] = (),
    **more: Any,
) -> Op:
    return Op(
        "rollback",
        name,
        # Only a gather writes the snapshot.
        tensors=(
            *(
                replace(t, written=t.written or (t.name == "old" and name == "gather"))
                for t in _COMMON
            ),
            *tensors,
        ),
        scalars=(*scalars, *_LAUNCH),
        parameters=(
            *_PARAMETERS,
            *(Parameter(t.name, optional=bool(t.stand_in), about=t.about) for t in tensors),
        ),
        # The compiled module refuses pages and tables of other ranks, so counts are enough.
        key=("pages.get_device()", "layout.key", "pages.numel()", "tokens", "pages.dtype"),
        size=_size,
        rules=(*_RULES, *rules),
        values=(_place("pages", "pages"), _place("within", "page_tokens"), *values),
        no_work=lambda p: p.pages.numel() == 0,
        device="pages.get_device()",
        idle={"planes": 1, "record": LINE, "splits": 1, "overlap": 0},
        **more,
    )


def _commit_slots(c: Any) -> str:
    if c.given.slots is None:
        return "staged states and cursors need slots"
    return f"{c.slots.shape[0]} slots for {c.accepted.shape[0]} requests"


def _listed(name: str, extent: str, stand_in: str, about: str, **more: Any) -> Tensor:
    return vector(name, "int32", extent, about, align=4, stand_in=stand_in, **more)


OPS: Mapping[str, Op] = {
    "gather": _op("gather"),
    "restore": _op("restore", (vector("rejected", "int32", "rows", "not 0: the row goes back"),)),
    "commit": _op(
        "commit",
        tensors=(
            vector("accepted", "int32", "requests", "accepted tokens of each request", align=4),
            _listed("row_requests", "listed", "none", "request of each row"),
            _listed("row_ordinals", "listed", "none", "place of each row in its request"),
            Tensor(
                *("states", "int64", ("states", STATE_FIELDS), (STATE_FIELDS, 1), "state table"),
                align=8,
                stand_in="no_states",
            ),
            _listed("slots", "slots", "none", "state slot of each request"),
            _listed("cursors", "cursors", "none", "replay cursors", written=True),
        ),
        scalars=(Scalar("tokens", expression="tokens if row_requests is None else 0"),),
        absent={"none": ("int32", (0,)), "no_states": ("int64", (0, STATE_FIELDS))},
        values=(
            Value("slots", _commit_beyond, "neither pools nor cursors have so many slots"),
            Value("slots", _commit_live, "no two requests have one slot", distinct=True),
            Value(
                "row_requests",
                lambda c: (
                    None
                    if c.given.row_requests is None
                    else c.row_requests.tensor[: c.row_count] >= c.request_count
                ),
                "there are {c.request_count} requests; a row of none is negative",
            ),
        ),
        derived=(
            ("row_count", lambda c: c.pages.shape[0]),
            ("request_count", lambda c: c.accepted.shape[0]),
        ),
        rules=(
            Rule(
                lambda c: (c.given.row_requests is None) == (c.given.row_ordinals is None),
                "row_requests and row_ordinals are given together or not at all",
                compiled=False,
            ),
            Rule(lambda c: c.tokens >= 0, "tokens is {c.tokens}, below 0", planned=True),
            Rule(
                lambda c: (c.tokens > 0) | (c.row_requests.shape[0] >= c.row_count),
                "the row lists are shorter than the {c.row_count} rows",
                planned=True,
            ),
            Rule(
                lambda c: ((c.tokens == 0) | (c.wide(c.request_count) * c.tokens == c.row_count)),
                "{c.row_count} rows are not {c.tokens} tokens of {c.request_count} "
                "requests; list them",
                planned=True,
            ),
            Rule(
                lambda c: (
                    (c.slots.shape[0] == c.request_count)
                    | (
                        (c.slots.shape[0] == 0)
                        & (c.states.shape[0] == 0)
                        & (c.cursors.shape[0] == 0)
                    )
                ),
                _commit_slots,
                planned=True,
            ),
            Rule(
                lambda c: c.states.shape[0] <= MAX_STATES,
                f"{{c.states.shape[0]}} staged states, at most {MAX_STATES} fit one launch",
                planned=True,
            ),
        ),
    ),
}

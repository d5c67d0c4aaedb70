"""Planning rule of ``gdn_replay``: how many CTAs share a head's value rows, and whether a CTA takes
heads one by one or as a stream.

A head's 128 value rows are independent of each other, so any of 1, 2 or 4 CTAs may share them; what
each part repeats is the work on keys, queries and the history's keys. Few heads need splits to
spread the state over the device, many want none, and where there are more than are resident at once
each CTA takes its share of all heads as one stream (*grouped*). The result is the same bits for
every choice.

The figures behind the constants: H200, CUDA graphs of calls over 768 slots of 16/32 heads, T = 4,
bf16 state, plain and commit steps weighted 0.773 and 0.227, microseconds by splits (with a prefetch
hint on the copies of states, without which they took 0.0 to 0.4 less)::

    requests   1, grouped      1      2      4
           1          3.7    3.3    3.0    3.5
           4          5.5    4.6    4.5    5.1
           8          6.4    7.5    6.6    9.0
          12          8.2    8.1   10.6
          16          9.1   13.0   11.9
          32         15.8   20.0   21.1
          64         29.6   36.8   37.8
         256          108    127    137

Grouped from 8 requests on: a later run, with one tile per warp in flight; the run's own figures for
what the rule takes below that were 6.4 at 8 and 7.9 at 12. fp32: 3.3 with 4 splits and 3.9 with 2
grouped at 1 request, 12.0 and 11.6 at 8, 68.5 and 56.8 at 64, and with one tile under way 9.2 at 8
and 52.8 at 64, 8.4 beside 8.0 at 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import (
    FREE,
    Free,
    Op,
    Parameter,
    Scalar,
    Size,
    Tensor,
    Value,
    picked,
    vector,
)

HEAD = 128
#: Records of a history bank.
WINDOW = 16
SPLITS = (1, 2, 4)
#: Compiled token capacities: a launch of T tokens takes the smallest that holds it.
TOKENS = (4, 8)
ELEMENT = {"bf16": 2, "fp32": 4}
#: Value rows of one warp and warps of one CTA, by splits: rows * warps * splits = 128.
SHAPE = {1: (32, 4), 2: (16, 4), 4: (8, 4)}
#: The splits of few heads, while their CTAs are no more than this times the SMs: all are resident
#: at once. Otherwise the fewest: a wider state has at least two (two buffers of an unsplit head
#: leave one CTA per SM: 85 us against 60 at 64 requests).
MOST_SPLITS, LEAST_SPLITS = {"bf16": 2, "fp32": 4}, {"bf16": 1, "fp32": 2}
CTAS_PER_SM = 4
#: Resident CTAs per SM that the registers of a shape allow without spills: 128 per thread, 168
#: with 32 rows per warp.
RESIDENT = {1: 3, 2: 4, 4: 4}
#: The same where heads are grouped, with up to 255 registers.
RESIDENT_GROUPED = 2
#: Heads (or halves of them) are grouped where there are more than this an SM: so many single ones
#: are resident at once.
SINGLE_PER_SM = 3
#: Shared memory of a CTA besides its part of the state: K_hist and the operand of keys and queries,
#: 16 x 128 bf16 each.
OPERANDS = 2 * 16 * HEAD * 2
#: Keys and queries of 8 tokens.
RAW = 2 * 8 * HEAD * 2
#: What the driver reserves of an SM's shared memory for each CTA.
RESERVED = 1024


def shared_memory(dtype: str, splits: int, grouped: bool) -> int:
    """Bytes of one CTA: two buffers for its part of a head's state, and the operands; where heads
    are grouped those of two units, and raw keys and queries.
    """
    state = 2 * (HEAD // splits) * HEAD * ELEMENT[dtype]
    return state + 2 * OPERANDS + RAW if grouped else state + OPERANDS


def resident(dtype: str, splits: int, grouped: bool, arch: Arch) -> int:
    """CTAs that one SM of ``arch`` holds at a time."""
    by_registers = RESIDENT_GROUPED if grouped else RESIDENT[splits]
    bytes_each = shared_memory(dtype, splits, grouped) + RESERVED
    return max(1, min(by_registers, arch.smem_per_sm // bytes_each))


def is_grouped(
    geometry: Mapping[str, int], requests: int, splits: int, dtype: str, arch: Arch
) -> bool:
    """Whether a CTA takes consecutive heads as a stream, those of a key head with one set of
    operands.
    """
    parts = requests * geometry["value_heads"] * splits
    return splits == LEAST_SPLITS[dtype] and parts > SINGLE_PER_SM * arch.sm_count


class CommitterError(RuntimeError):
    """A second party wants to commit histories that another one commits already."""

    #: A stable code for programs, as every error of specplan has one.
    reason = "committer"


#: The committers among the ops, by the name under which they claim cursors.
VERIFY = "gdn_replay.verify"
MATERIALIZE = "gdn_replay.materialize in place"


#: Every (key heads, value heads, dtype, device) so far, numbered.
_KEYS: dict[tuple[int, int, str, int], int] = {}


class Cursors:
    """The cursors of a model's slots, shared by its layers, and who commits their histories.

    Two parties that both fold an accepted history into the checkpoint give wrong states and no
    error: so the first one that is bound claims the cursors, and a second one is refused.

    Parameters
    ----------
    hist_len, bank
        int32 [slots] tensors, dense: live records of each slot, 0..16, and the bank that holds
        them, 0 or 1. Written by ``advance`` and ``reset`` only.
    key_heads, value_heads, dtype
        Geometry of the layers and dtype of their states: they name the cells of every op.

    Raises
    ------
    ValueError
        For a geometry or dtype that the family does not have.
    """

    __slots__ = ("_committer", "device", "dtype", "geometry", "key", "tensors", "verify_key")

    def __init__(
        self, hist_len: Any, bank: Any, *, key_heads: int, value_heads: int, dtype: str = "bf16"
    ) -> None:
        if dtype not in ELEMENT:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(ELEMENT)}")
        if key_heads < 1 or value_heads < 1 or value_heads % key_heads:
            raise ValueError(
                f"value_heads {value_heads} is not a positive multiple of key_heads {key_heads}"
            )
        self.tensors = (hist_len, bank)
        self.geometry = (key_heads, value_heads)
        self.dtype = dtype
        self.device: int = hist_len.get_device()
        #: What a call needs to know of the cursors, as one number.
        self.key = _KEYS.setdefault((key_heads, value_heads, dtype, self.device), len(_KEYS))
        #: The same once the verify op is the one that commits; until then no key of anything.
        self.verify_key: int | None = None
        self._committer: str | None = None

    @property
    def hist_len(self) -> Any:
        """Live records of each slot."""
        return self.tensors[0]

    @property
    def bank(self) -> Any:
        """The bank that holds them."""
        return self.tensors[1]

    @property
    def committer(self) -> str | None:
        """Who commits, or None while nobody has said so."""
        return self._committer

    def claim(self, committer: str) -> None:
        """Say who commits; again by the same one is no error.

        Raises
        ------
        CommitterError
            Another one commits already.
        """
        self.check(committer)
        self._committer = committer
        if committer == VERIFY:
            self.verify_key = self.key

    def check(self, committer: str) -> None:
        """Ask whether a party may commit, and change nothing; errors as for :meth:`claim`."""
        if self._committer is not None and self._committer != committer:
            raise CommitterError(
                f"{committer} would commit histories that {self._committer} commits already; a "
                "history folded twice is a wrong state. Keep one of the two"
            )


class Pool:
    """One layer's checkpoints and records, under the cursors that all layers share.

    Parameters
    ----------
    cursors
        See :class:`Cursors`.
    state
        bf16 or fp32 [slots, HV, 128, 128], K contiguous: the checkpoints. Dense within a slot, as
        the other pools are; the stride of the slots is free, a multiple of 16 bytes.
    rec_u, rec_k
        bf16 [slots, HV, 2, 16, 128] and [slots, HK, 2, 16, 128].
    rec_G
        fp32 [slots, HV, 2, 16].

    Raises
    ------
    ValueError
        For pools whose heads or state dtype are not those of the cursors.
    """

    __slots__ = ("cursors", "tensors")

    def __init__(self, cursors: Cursors, state: Any, rec_u: Any, rec_k: Any, rec_G: Any) -> None:
        keys, values = cursors.geometry
        wanted = {
            "state": (state, (values, HEAD, HEAD)),
            "rec_u": (rec_u, (values, 2, WINDOW, HEAD)),
            "rec_k": (rec_k, (keys, 2, WINDOW, HEAD)),
            "rec_G": (rec_G, (values, 2, WINDOW)),
        }
        slots = cursors.hist_len.shape[0]
        for name, (tensor, shape) in wanted.items():
            if tuple(tensor.shape) != (slots, *shape):
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}, expected {(slots, *shape)}: {slots} slots, "
                    f"{keys}/{values} heads"
                )
        if state.element_size() != ELEMENT[cursors.dtype]:
            raise ValueError(f"state is {state.dtype}, the cursors say {cursors.dtype}")
        self.cursors = cursors
        self.tensors = (state, rec_u, rec_k, rec_G, cursors.hist_len, cursors.bank)

    def commits(self, slot: Any, tokens: int) -> Any:
        """Which rows of a step of ``tokens`` tokens fold their history: a bool tensor [N].

        A verify launch may be repeated before ``advance`` only if none does.
        """
        return commits(self.cursors.hist_len, slot, tokens)


def commits(hist_len: Any, slot: Any, tokens: int) -> Any:
    """The kernel's predicate P + tokens > 16, by row; False for padding rows."""
    return (slot >= 0) & (hist_len[slot.clamp(min=0).long()] + tokens > WINDOW)


@dataclass(frozen=True)
class GdnReplay:
    """See ``specplan.plans.family.Family``. Heads of 128, a history window of 16 tokens."""

    name: str = "gdn_replay"
    ops: tuple[str, ...] = ("verify", "advance", "materialize", "reset")
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    geometry: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"key_heads": (1, 64), "value_heads": (1, 256)}
    )

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        """Why these values do not fit together, or None."""
        keys, values = geometry["key_heads"], geometry["value_heads"]
        if values % keys:
            return f"value_heads {values} is not a multiple of key_heads {keys}"
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        """A verify step has up to 8 tokens a request, whatever the geometry."""
        return None if tokens <= 8 else f"{tokens} tokens a request, at most 8"

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        """Few heads are split, to spread their state over the device; many are not."""
        heads = requests * geometry["value_heads"]
        most = MOST_SPLITS[dtype]
        fits = heads * most <= CTAS_PER_SM * arch.sm_count
        return most if fits else LEAST_SPLITS[dtype]

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        """One plan for each op. Geometry, requests and tokens are run-time shapes: cells differ in
        few compiled functions.
        """
        if splits not in SPLITS:
            raise ValueError(f"splits {splits} is not one of {SPLITS}")
        if not 1 <= tokens <= TOKENS[-1]:
            raise ValueError(f"tokens {tokens} is not in 1..{TOKENS[-1]}")
        rows, warps = SHAPE[splits]
        grouped = is_grouped(geometry, requests, splits, dtype, arch)
        held = resident(dtype, splits, grouped, arch)
        verify = Plan(
            self.name,
            "verify",
            arch.name,
            spec=(
                ("state", dtype),
                ("tokens", next(t for t in TOKENS if t >= tokens)),
                ("rows", rows),
                ("warps", warps),
                ("grouped", grouped),
                ("resident", held),
            ),
            launch=(("ctas", held * arch.sm_count),),
        )
        return (
            verify,
            Plan(self.name, "advance", arch.name, spec=()),
            Plan(self.name, "materialize", arch.name, spec=(("state", dtype),)),
            Plan(self.name, "reset", arch.name, spec=()),
        )


FAMILY = GdnReplay()


# ----- the ops ------------------------------------------------------------------------------------


def _rows(name: str, heads: str, about: str, **more: Any) -> Tensor:
    """A row of heads for every token, any stride of requests and tokens."""
    strides = (Free(16), Free(16), HEAD, 1)
    return Tensor(name, "bf16", ("N", "T", heads, HEAD), strides, about, align=16, **more)


def _gates(name: str) -> Tensor:
    return Tensor(name, "bf16", ("N", "T", "HV"), (FREE, FREE, 1), "raw gates", align=2)


def _list(name: str, about: str, idle: str = "") -> Tensor:
    """An integer for every row of the batch, any stride."""
    return Tensor(name, "int32", ("N",), (FREE,), about, align=4, idle=idle)


def _dense(*extents: int | str) -> tuple[int, ...]:
    """The strides of the dimensions within a slot."""
    strides = [1]
    for extent in reversed(extents[1:]):
        strides.append(strides[-1] * int(extent))
    return tuple(reversed(strides))


def _pool(name: str, dtype: str, heads: str, *extents: int, about: str) -> Tensor:
    """A tensor of slots: dense within one, any multiple of 16 bytes from one to the next."""
    multiple = 0 if dtype == "fp32" else 16
    return Tensor(
        name,
        dtype,
        ("slots", heads, *extents),
        (Free(multiple), *_dense(heads, *extents)),
        about,
        align=multiple or 4,
        stride_bits=64,
    )


_POOL = (
    _pool("state", "state", "HV", HEAD, HEAD, about="checkpoints"),
    _pool("rec_u", "bf16", "HV", 2, WINDOW, HEAD, about="records of updates"),
    _pool("rec_k", "bf16", "HK", 2, WINDOW, HEAD, about="records of keys"),
    _pool("rec_G", "fp32", "HV", 2, WINDOW, about="records of decays"),
)
_HIST_LEN = vector("hist_len", "int32", "slots", "live records", align=4)
_BANK = vector("bank", "int32", "slots", "bank of the records", align=4)


def _written(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(replace(tensor, written=True) for tensor in tensors)


_OF_POOL = Parameter("pool", "Pool", about="one layer's checkpoints and records")
_OF_CURSORS = Parameter("cursors", "Cursors", about="cursors of the slots, shared by the layers")


def _size_of(rows: str, tokens: int | None = None) -> Any:
    """The cell of an op over a list of rows, of one token a row unless the call says more."""

    def size(c: Any) -> Size:
        cursors = c.given.pool.cursors if hasattr(c.given, "pool") else c.given.cursors
        each = tokens if tokens is not None else c.tokens
        return Size(cursors.geometry, cursors.dtype, getattr(c, rows).shape[0], each)

    return size


def _slots(name: str, least: int | None = None) -> Value:
    """A list of slots lies in the pools, apart from what says that a row has none."""

    def wrong(c: Any) -> Any:
        slot = getattr(c, name).tensor
        beyond = slot >= c.slots
        return beyond if least is None else beyond | (slot < least)

    none = "-1 for padding" if least is not None else "negative for none"
    return Value(name, wrong, f"the pools have {{c.slots}} slots, {none}")


def _cursor(name: str, most: int, rows: str = "slot") -> Value:
    """A cursor of every live row has a value that cursors have."""

    def held(c: Any) -> Any:
        return picked(getattr(c, name).tensor, getattr(c, rows).tensor)

    def wrong(c: Any) -> Any:
        return (getattr(c, rows).tensor >= 0) & ((held(c) < 0) | (held(c) > most))

    return Value(name, wrong, f"of its slot it is 0..{most}", held)


_LIVE = Value("slot", lambda c: c.slot.tensor >= 0, "no two live rows have one slot", distinct=True)


def _moves(c: Any) -> Any:
    """Which rows of ``materialize`` write a state."""
    return (c.src.tensor >= 0) & (c.dst.tensor >= 0)


def _read_by_another(c: Any) -> Any:
    """Which rows write a state that another row reads."""
    src, dst, moves = c.src.tensor, c.dst.tensor, _moves(c)
    same = (dst[:, None] == src[None, :]) & moves[:, None] & moves[None, :]
    return same.fill_diagonal_(False).any(dim=1)


def _counts(c: Any) -> Any:
    """Which rows fold more than their slot's history has."""
    live = picked(c.given.pool.cursors.hist_len, c.src.tensor)
    return _moves(c) & ((c.count.tensor < 0) | (c.count.tensor > live))


OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        Op(
            "gdn_replay",
            "verify",
            tensors=(
                _rows("q", "HK", "raw queries"),
                _rows("k", "HK", "raw keys"),
                _rows("v", "HV", "values"),
                *(_gates("a"), _gates("b")),
                vector("A_log", "fp32", "HV", align=4),
                vector("dt_bias", "fp32", "HV", align=4),
                *_written(*_POOL),
                *(_HIST_LEN, _BANK),
                _list("slot", "pool slot of each row, -1 for padding", "rows"),
                _rows("out", "HV", "zeros for padding rows", written=True, idle="scratch"),
            ),
            scalars=(
                Scalar("scale", "float", "SCALE if scale is None else scale"),
                Scalar("ctas", launch="ctas"),
            ),
            parameters=(
                _OF_POOL,
                *map(Parameter, ("q", "k", "v", "a", "b", "A_log", "dt_bias", "slot", "out")),
                Parameter("scale", "float", True, about="of the queries; 128 ** -0.5 without it"),
                Parameter("splits", "int", True, about="the planning rule's without it"),
            ),
            # The cursors' key names geometry, dtype and device, and none of them unless this op is
            # the one that commits.
            key=("q.numel()", "slot.numel()", "pool.cursors.verify_key", "splits"),
            size=lambda c: Size(
                c.given.pool.cursors.geometry,
                c.given.pool.cursors.dtype,
                *(c.q.shape[0], c.q.shape[1], c.given.splits),
            ),
            no_work=lambda p: p.q.dim() == 4 and p.q.shape[0] == 0,
            device="pool.cursors.device",
            setup=("state, rec_u, rec_k, rec_G, hist_len, bank = pool.tensors",),
            idle={"HV": 2},
            cut=("q", "k", "v", "a", "b", "slot", "out"),
            values=(
                *(_slots("slot", -1), _LIVE),
                *(_cursor("hist_len", WINDOW), _cursor("bank", 1)),
            ),
        ),
        Op(
            "gdn_replay",
            "advance",
            tensors=(
                *_written(_HIST_LEN, _BANK),
                _list("slot", "slots of the step's rows, -1 for padding", "rows"),
                _list("n_acc", "accepted tokens of each row"),
            ),
            scalars=(Scalar("tokens"),),
            parameters=(
                _OF_CURSORS,
                *map(Parameter, ("slot", "n_acc")),
                Parameter("tokens", "int", about="of the step's verify launches"),
            ),
            key=("slot.numel()", "cursors.key", "tokens"),
            size=_size_of("slot"),
            no_work=lambda p: p.slot.dim() == 1 and p.slot.numel() == 0,
            device="cursors.device",
            setup=("hist_len, bank = cursors.tensors",),
            cut=("slot", "n_acc"),
            values=(
                *(_slots("slot", -1), _LIVE),
                *(_cursor("hist_len", WINDOW), _cursor("bank", 1)),
                Value(
                    "n_acc",
                    lambda c: (
                        (c.slot.tensor >= 0)
                        & ((c.n_acc.tensor < 0) | (c.n_acc.tensor > c.given.tokens))
                    ),
                    "accepted tokens are 0..{c.given.tokens}",
                ),
            ),
        ),
        Op(
            "gdn_replay",
            "materialize",
            tensors=(
                *(*_written(_POOL[0]), *_POOL[1:]),
                _BANK,
                _list("src", "slot of the history", "rows"),
                _list("dst", "slot that gets the state", "rows"),
                _list("count", "records of the history that count"),
            ),
            scalars=(),
            parameters=(_OF_POOL, *map(Parameter, ("src", "dst", "count"))),
            key=("src.numel()", "pool.cursors.key"),
            size=_size_of("src", 1),
            no_work=lambda p: p.src.dim() == 1 and p.src.numel() == 0,
            # Folding in place commits.
            guard=("(dst.data_ptr() != src.data_ptr() or pool.cursors.committer == MATERIALIZE)"),
            device="pool.cursors.device",
            setup=("state, rec_u, rec_k, rec_G, _, bank = pool.tensors",),
            idle={"HV": 2},
            cut=("src", "dst", "count"),
            values=(
                *(_slots("src"), _slots("dst")),
                Value("dst", _moves, "no dst is another row's", distinct=True),
                Value("dst", _read_by_another, "no dst is another row's src"),
                _cursor("bank", 1, "src"),
                Value("count", _counts, "a count is 0..hist_len of its src"),
            ),
            tokens=1,
        ),
        Op(
            "gdn_replay",
            "reset",
            tensors=(
                *_written(_HIST_LEN, _BANK),
                _list("slot", "slots to empty; negative ones do nothing", "rows"),
            ),
            scalars=(),
            parameters=(_OF_CURSORS, Parameter("slot")),
            key=("slot.numel()", "cursors.key"),
            size=_size_of("slot", 1),
            no_work=lambda p: p.slot.dim() == 1 and p.slot.numel() == 0,
            device="cursors.device",
            setup=("hist_len, bank = cursors.tensors",),
            cut=("slot",),
            values=(_slots("slot"),),
            tokens=1,
        ),
    )
}

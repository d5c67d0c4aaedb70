"""Planning of ``accept``: the splits of a row of logits are those of ``argmax``; ready target ids
have none.

Requests, tokens, contexts, the vocabulary and everything that may be left out are run-time values
of one compiled function for each dtype of the target. A problem is the class that the vocabulary is
of, 0 for target ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specplan.plans import argmax
from specplan.plans.arch import Arch
from specplan.plans.argmax import ITEM, MOST_CLASS, held, held_either
from specplan.plans.plan import Plan
from specplan.plans.signature import (
    FREE,
    Form,
    Op,
    Parameter,
    Rule,
    Scalar,
    Size,
    Tensor,
    Value,
    picked,
    vector,
)

#: The class of target ids, which have no vocabulary.
IDS_CLASS = 0
IDS = ("int32", "int64")
#: The most tokens of a request: a lane of a warp for each.
MOST_TOKENS = 32
#: The most axes of positions.
MOST_AXES = 32
#: Records of a history bank of ``gdn_replay``.
WINDOW = 16

#: Forced acceptance: off, the same number for every request, one more by a draw for each request.
FORCE_OFF, FORCE_SAME, FORCE_DRAWN = 0, 1, 2
#: Uniform numbers of the pool, and the seed that they come from.
POOL, POOL_SEED = 65536, 0xACCE9D
#: A request's place in the pool: these times the counter and the request's number.
POOL_STEP, POOL_REQUEST = 6007, 1009


def force(accepted: float, tokens: int) -> tuple[int, int, float]:
    """``force_mode``, ``force_base`` and ``force_frac`` for ``accepted`` drafts of each request on
    average, of ``tokens`` - 1; the target's own token comes on top.

    Raises
    ------
    ValueError
        A number below 0, or no tokens.
    """
    if not accepted >= 0 or tokens < 1:
        raise ValueError(f"{accepted} accepted drafts of {tokens} tokens a request")
    whole = int(min(accepted, tokens))
    base = min(whole + 1, tokens)
    rest = min(accepted, tokens) - whole
    if rest == 0 or base == tokens:
        return FORCE_SAME, base, 0.0
    return FORCE_DRAWN, base, rest


class Accept:
    """The planning side of ``accept`` (see :class:`specplan.plans.family.Family`)."""

    name = "accept"
    ops = ("accept",)
    dtypes = (*ITEM, *IDS)
    geometry: Mapping[str, tuple[int, int]] = {"vocabulary_k": (IDS_CLASS, MOST_CLASS)}

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        classes = geometry["vocabulary_k"]
        return None if classes == IDS_CLASS else argmax.check_class(classes)

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        return None if tokens <= MOST_TOKENS else f"{tokens} tokens a request, at most 32"

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        if geometry["vocabulary_k"] == IDS_CLASS or dtype not in ITEM:
            return 1
        return argmax.splits_of(geometry["vocabulary_k"], requests * tokens, dtype, arch)

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        if (geometry["vocabulary_k"] == IDS_CLASS) != (dtype in IDS):
            raise ValueError(f"a target of {dtype} and vocabulary_k {geometry['vocabulary_k']}")
        spec, launch = (("dtype", dtype),), (("splits", splits),)
        return (Plan("accept", "accept", arch.name, spec, launch),)


FAMILY = Accept()


# ----- the op -------------------------------------------------------------------------------------


def _target(dtype: str) -> Tensor:
    about = "rows of logits, any row stride, or the target's token of each row"
    shape: tuple[int | str, ...] = ("N", "V") if dtype in ITEM else ("N",)
    strides = (FREE, 1) if dtype in ITEM else (FREE,)
    return Tensor("target", dtype, shape, strides, about, bits=64, forms=(dtype,))


def _positions(name: str, columns: str, about: str, **more: Any) -> tuple[Tensor, Tensor]:
    """Positions by axis in int32 or int64, as a tensor of each dtype."""

    def of(dtype: str, other: str) -> Tensor:
        return Tensor(
            *(f"{name}_{dtype}", dtype, (f"axes_{dtype}", f"{columns}_{dtype}"), (FREE, 1), about),
            source=f"no_positions_{dtype} if {name} is None or {name}.dtype {other} else {name}",
            parameter=name,
            **more,
        )

    return of("int32", "is not int32"), of("int64", "is int32")


def _cursor(name: str, about: str) -> Tensor:
    return vector(name, "int32", "slots", about, stand_in="no_int32", written=True)


def _number(name: str, kind: str = "int") -> Scalar:
    """A number that is 0 where the call gives none."""
    return Scalar(name, kind, f"{'0' if kind == 'int' else '0.0'} if {name} is None else {name}")


def _if_forced(condition: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A condition of calls that draw."""
    return lambda c: (c.force_mode != FORCE_DRAWN) | condition(c)


def _positions_rules(dtype: str) -> tuple[Rule, Rule]:
    """Positions of one dtype have few axes, and room for every request."""

    def axes(c: Any) -> Any:
        return getattr(c, f"positions_{dtype}").shape[0]

    def room(c: Any) -> Any:
        return getattr(c, f"positions_out_{dtype}").shape[1]

    return (
        Rule(
            lambda c: axes(c) <= MOST_AXES,
            lambda c: f"positions have {axes(c)} axes, at most {MOST_AXES}",
        ),
        Rule(
            lambda c: (axes(c) == 0) | (room(c) >= c.requests),
            lambda c: f"positions_out needs {c.requests} elements an axis, it has {room(c)}",
        ),
    )


def _with_history(c: Any) -> Any:
    """Which requests have a history that moves; None where there are no cursors."""
    if c.hist_len.shape[0] == 0 or c.slot.shape[0] == 0:
        return None
    slot = c.slot.tensor[: c.requests]
    live = (slot >= 0) & (slot < c.hist_len.shape[0])
    live[: c.contexts] = False
    return live


def _of_history(name: str, most: int) -> Value:
    """What the history of each request holds."""

    def held(c: Any) -> Any:
        return picked(getattr(c, name).tensor, c.slot.tensor[: c.requests])

    def wrong(c: Any) -> Any:
        live = _with_history(c)
        return None if live is None else live & ((held(c) < 0) | (held(c) > most))

    return Value(name, wrong, f"of its slot it is 0..{most}", held=held)


#: What the tensors that a call may leave out hold by request.
_BY_REQUEST = ("next_token", "kv_lens", "slot", "n_override")
_OPTIONAL = (
    *("next_token", "rows", "last_row", "kv_lens", "positions", "positions_out", "slot"),
    *("hist_len", "bank", "n_override", "pool", "counter"),
)
_NUMBERS = ("contexts", "extra", "fill", "force_mode", "force_base")
_ABOUT = {
    "contexts": "context requests, which come first; 0 without it",
    "extra": "added to every length; 0 without it",
    "fill": "1: -1 past the accepted tokens; else the target's tokens",
    "force_mode": "0, 1 or 2, see `force`",
    "force_base": "accepted tokens of `force_mode` 1 and 2",
    "force_frac": "share of the requests with one more in `force_mode` 2",
}

OP = Op(
    "accept",
    "accept",
    tensors=(
        *(_target(dtype) for dtype in (*ITEM, *IDS)),
        Tensor(
            *("drafts", "int32", ("G", "K"), (FREE, 1), "of the generation requests; -1: none"),
            stand_in="no_drafts",
        ),
        Tensor(
            *("accepted", "int32", ("B", "T"), (FREE, 1), "the target's tokens of each request"),
            written=True,
        ),
        vector("n_acc", "int32", "B", "accepted tokens, the target's own included", written=True),
        vector("scratch", "int64", "scratch_held", "rows + requests + 1, zero", written=True),
        argmax.optional("next_token", "int32", "the last accepted token", written=True),
        *argmax.either("rows", "row of the last accepted token", written=True),
        argmax.optional("last_row", "int32", "row of each context request; its number without it"),
        argmax.optional("kv_lens", "int32", "tokens of each request in the cache", written=True),
        *_positions("positions", "P", "position of each row, by axis"),
        *_positions("positions_out", "Q", "of `rows`, plus 1, by axis", written=True),
        Tensor(
            *("slot", "int32", ("slot_held",), (FREE,), "state slot, any stride; -1: padding"),
            stand_in="no_int32",
        ),
        _cursor("hist_len", "live records by slot"),
        _cursor("bank", "bank of the records by slot"),
        argmax.optional("n_override", "int32", "count in place of the matching one; -1: none"),
        argmax.optional("pool", "fp32", "uniform numbers of `force_mode` 2"),
        argmax.optional("counter", "int64", "launches of `force_mode` 2 so far", written=True),
    ),
    scalars=(
        *map(_number, _NUMBERS),
        _number("force_frac", "float"),
        # With no splits a call is checked and nothing is launched.
        Scalar("splits", launch="splits", idle=0),
    ),
    parameters=(
        *map(Parameter, ("target", "accepted", "n_acc", "scratch")),
        Parameter("drafts", optional=True),
        *(Parameter(name, optional=True, keyword=True) for name in _OPTIONAL),
        *(Parameter(name, "int", True, True, _ABOUT[name]) for name in _NUMBERS),
        Parameter("force_frac", "float", True, True, _ABOUT["force_frac"]),
        Parameter("splits", "int", True, True, "the planning rule's without it"),
    ),
    key=(
        *("target.get_device()", "target.numel()", "accepted.numel()", "n_acc.numel()"),
        *("contexts", "target.dtype", "splits"),
    ),
    size=lambda c: Size(
        (argmax.vocabulary_class(c.target.shape[1]) if c.form in ITEM else IDS_CLASS,),
        *(c.form, c.requests, c.tokens, c.given.splits),
    ),
    derived=(
        ("requests", lambda c: c.accepted.shape[0]),
        ("tokens", lambda c: c.accepted.shape[1]),
    ),
    rules=(
        Rule(
            lambda c: c.tokens >= 1,
            "accepted has no columns, one is the target's own token",
        ),
        Rule(
            lambda c: c.tokens <= MOST_TOKENS,
            f"{{c.tokens}} tokens a request, at most {MOST_TOKENS}",
        ),
        Rule(
            lambda c: c.target.shape[1] >= 1,
            "a row of logits has no columns",
            forms=tuple(ITEM),
        ),
        Rule(
            lambda c: c.target.shape[1] <= MOST_CLASS * 1024,
            f"{{c.target.shape[1]}} columns, at most {MOST_CLASS * 1024}",
            forms=tuple(ITEM),
        ),
        Rule(lambda c: c.contexts >= 0, "contexts is {c.contexts}, below 0", planned=True),
        Rule(
            lambda c: c.contexts <= c.requests,
            "contexts is {c.contexts}, of {c.requests} requests",
            planned=True,
        ),
        Rule(
            lambda c: (
                c.target.shape[0] == c.wide(c.requests - c.contexts) * c.tokens + c.contexts
            ),
            "{c.target.shape[0]} rows are not {c.contexts} context requests and {c.tokens} tokens "
            "of each other one of {c.requests}",
            planned=True,
        ),
        Rule(
            lambda c: (
                (c.tokens == 1)
                | (c.contexts == c.requests)
                | (
                    (c.drafts.shape[0] >= c.requests - c.contexts)
                    & (c.drafts.shape[1] == c.tokens - 1)
                )
            ),
            "drafts are {c.drafts.shape} for {c.requests} requests, {c.contexts} of them context "
            "requests, of {c.tokens} tokens",
            planned=True,
        ),
        Rule(
            lambda c: c.scratch.shape[0] >= c.wide(c.target.shape[0]) + c.requests + 1,
            "scratch needs {c.target.shape[0]} + {c.requests} + 1 elements, it has "
            "{c.scratch.shape[0]}",
        ),
        *(held(name, "requests") for name in _BY_REQUEST),
        *held_either("rows", "requests"),
        Rule(
            lambda c: (c.last_row.shape[0] == 0) | (c.last_row.shape[0] >= c.contexts),
            "last_row has {c.last_row.shape[0]} elements for {c.contexts} context requests",
            planned=True,
        ),
        *(rule for dtype in IDS for rule in _positions_rules(dtype)),
        Rule(
            lambda c: (c.hist_len.shape[0] == 0) | (c.slot.shape[0] > 0),
            "cursors need slots",
        ),
        Rule(lambda c: (c.fill >= 0) & (c.fill <= 1), "fill is {c.fill}, not 0 or 1", planned=True),
        Rule(
            lambda c: (c.force_mode >= FORCE_OFF) & (c.force_mode <= FORCE_DRAWN),
            "force_mode is {c.force_mode}, not 0, 1 or 2",
            planned=True,
        ),
        Rule(
            _if_forced(lambda c: c.pool.shape[0] == POOL),
            f"force_mode 2 draws from a pool of {POOL} numbers, it has {{c.pool.shape[0]}}",
            planned=True,
        ),
        Rule(
            _if_forced(lambda c: c.counter.shape[0] > 0),
            "force_mode 2 needs a counter",
            planned=True,
        ),
    ),
    values=(
        Value(
            "scratch",
            lambda c: c.scratch.tensor[: c.target.shape[0] + c.requests + 1] != 0,
            "it is zero before every call",
        ),
        Value("slot", _with_history, "no two requests have one history", distinct=True),
        _of_history("hist_len", WINDOW),
        _of_history("bank", 1),
    ),
    no_work=lambda p: p.accepted.dim() == 2 and p.accepted.shape[0] == 0,
    form=Form("target", {dtype: dtype for dtype in (*ITEM, *IDS)}),
    absent={
        "no_drafts": ("int32", (0, 0)),
        "no_positions_int32": ("int32", (0, 0)),
        "no_positions_int64": ("int64", (0, 0)),
        **{name: argmax.ABSENT[name] for name in ("no_int32", "no_int64", "no_fp32")},
    },
    idle={"scratch_held": 3, "splits": 1, **dict.fromkeys(_NUMBERS, 0), "force_frac": 0},
)
OPS = {OP.name: OP}

"""Planning of ``gather``: one plan for each pair of store widths and power of two of tokens.

Requests, drafts and every address are run-time values of the kernel. The store widths are extents
that the compiled module checks; tokens choose how many lanes a request takes, so that no thread
divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import FREE, Op, Rule, Scalar, Size, Tensor, Value, vector


class Gather:
    """The planning side of ``gather`` (see :class:`specplan.plans.family.Family`)."""

    name = "gather"
    ops = ("gather",)
    dtypes = ("int32",)
    geometry: ClassVar[Mapping[str, tuple[int, int]]] = {"next": (1, 128), "draft": (0, 128)}

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        if tokens > geometry["next"]:
            return f"{tokens} tokens do not fit a next-input store of width {geometry['next']}"
        return None

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        return 1

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        lanes = 1 << (tokens - 1).bit_length()
        spec = (("next", geometry["next"]), ("draft", geometry["draft"]), ("lanes", lanes))
        return (Plan("gather", "gather", arch.name, spec),)


FAMILY = Gather()

#: Each destination, and how many elements a call writes to it.
_DESTINATIONS: Mapping[str, Callable[[Any], Any]] = {
    "input_ids": lambda c: c.flat,
    "draft_tokens": lambda c: c.drafted,
    "pos_offsets": lambda c: c.flat,
    "kv_offsets": lambda c: c.requests,
}


def _within(name: str) -> tuple[Rule, Rule]:
    """A destination's range begins at 0 or later and ends where the buffer ends or before."""
    count = _DESTINATIONS[name]

    def begin(c: Any) -> Any:
        return getattr(c, f"{name}_begin")

    def held(c: Any) -> Any:
        return getattr(c, name).shape[0]

    def fits(c: Any) -> Any:
        # 64-bit either way, with the wide one first.
        if name == "kv_offsets":
            return c.wide(begin(c)) + count(c) <= held(c)
        return count(c) + begin(c) <= held(c)

    return (
        Rule(lambda c: begin(c) >= 0, lambda c: f"{name} begins at {begin(c)}, below 0"),
        Rule(
            fits,
            lambda c: (
                f"{name} needs {begin(c)}..{begin(c) + count(c)}, it has {held(c)} elements"
            ),
        ),
    )


def _store_slots(name: str, count: Callable[[Any], int]) -> Value:
    """An index of a store is not beyond it. The op gives 0 there, which hides a mistake."""

    def held(c: Any) -> Any:
        return getattr(c, name).tensor[: count(c)]

    text = "the stores have {c.S} slots; an index of none is negative"
    return Value(name, lambda c: held(c) >= c.S, text, held)


OP = Op(
    "gather",
    "gather",
    tensors=(
        Tensor(
            *("store_next_new_tokens", "int32", ("next", "S", 1), (FREE, 1, FREE)),
            "token-major next-input store",
        ),
        Tensor("store_next_draft", "int32", ("S", "draft"), (FREE, 1), "slot-major draft store"),
        vector("store_lens", "int32", "S", "length store"),
        vector("slots", "int32", "listed", "store slot of each request; may repeat"),
        vector("pos_indices", "int32", "positions", "store slot of each (request, token)"),
        *(
            vector(name, "int32", f"{name}_held", "destination", written=True)
            for name in _DESTINATIONS
        ),
    ),
    scalars=(
        *(Scalar(f"{name}_begin", idle=0) for name in _DESTINATIONS),
        Scalar("requests", idle=0),
        Scalar("tokens", idle=1),
        Scalar("drafts", idle=0),
    ),
    key=("store_next_new_tokens.get_device()", "requests", "tokens", "drafts"),
    # A call with no requests is checked like one with a single request, and launches no work.
    size=lambda c: Size((c.next, c.draft), "int32", max(1, c.requests), c.tokens),
    derived=(
        ("flat", lambda c: c.wide(c.requests) * c.tokens),
        ("drafted", lambda c: c.wide(c.requests) * c.drafts),
    ),
    rules=(
        Rule(lambda c: c.requests >= 0, "requests is {c.requests}, below 0"),
        Rule(
            lambda c: c.tokens >= 1,
            "tokens is {c.tokens}, outside 1..{c.next}, the next-input store's width",
        ),
        Rule(
            # Lanes are the plan's alone; where there is no plan yet, no call is beyond them.
            lambda c: c.tokens <= min(c.next, getattr(c, "lanes", c.next)),
            "tokens is {c.tokens}, outside 1..{c.next}, the next-input store's width",
        ),
        Rule(lambda c: c.drafts >= 0, lambda c: _drafts(c)),
        Rule(lambda c: c.drafts < c.tokens, lambda c: _drafts(c)),
        Rule(lambda c: c.drafts <= c.draft, lambda c: _drafts(c)),
        Rule(
            lambda c: c.requests <= c.slots.shape[0],
            "slots needs 0..{c.requests}, it has {c.slots.shape[0]} elements",
        ),
        Rule(
            lambda c: c.flat <= c.pos_indices.shape[0],
            "pos_indices needs 0..{c.flat}, it has {c.pos_indices.shape[0]} elements",
        ),
        *(rule for name in _DESTINATIONS for rule in _within(name)),
    ),
    values=(
        _store_slots("slots", lambda c: c.requests),
        _store_slots("pos_indices", lambda c: c.flat),
    ),
)
OPS = {OP.name: OP}


def _drafts(c: Any) -> str:
    return f"drafts is {c.drafts}, outside 0..{min(c.tokens - 1, c.draft)}"

"""Two result files of one benchmark: which points got slower, each by its ratio to a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.points import Run, ratios


@dataclass(frozen=True)
class Change:
    """One point's ratio to its strongest common peer, before and after."""

    point: tuple[Any, ...]
    metric: str
    peer: str
    old: float
    new: float

    @property
    def worse(self) -> float:
        """By how much the ratio grew: 0.05 is 5 % slower beside the peer; negative is faster."""
        return self.new / self.old - 1


def compare(old: Run, new: Run) -> Sequence[Change]:
    """Every point that both runs measured beside a common peer, by the peer that was the strongest
    in the old run. Absolute times differ between machines, so they are never compared.

    Raises
    ------
    ValueError
        The runs are of different benchmarks, or have no point with a peer in common.
    """
    if old.benchmark != new.benchmark:
        raise ValueError(f"{old.path} is of {old.benchmark}, {new.path} of {new.benchmark}")
    after = {(r.point, r.metric, r.peer): r.value for r in ratios(new)}
    strongest: dict[tuple[Any, ...], Change] = {}
    for r in ratios(old):
        value = after.get((r.point, r.metric, r.peer))
        at = (r.point, r.metric)
        # The strongest peer is the fastest, beside which our ratio is the largest.
        if value is not None and (at not in strongest or r.value > strongest[at].old):
            strongest[at] = Change(r.point, r.metric, r.peer, r.value, value)
    if not strongest:
        raise ValueError(f"{old.path} and {new.path} have no point with a peer in common")
    return list(strongest.values())

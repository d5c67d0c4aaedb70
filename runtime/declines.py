"""What a pack says of declined calls: the policy of the one who loaded it, a line in the log for
each cell that is met for the first time, and counts. Nothing here runs on a fast path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from specplan.errors import InParts, SpecplanError, Uncertified, UncertifiedCell

#: The logger of the package's runtime.
LOG = logging.getLogger("specplan")

#: What is done with a declined call beside counting it.
OnUncertified = Literal["return", "raise", "log"] | Callable[[Uncertified], object]
POLICIES = ("return", "raise", "log")
#: Cells and batches that are counted and logged one by one; further ones are counted together, so
#: that no caller can make the counts grow without end.
MOST_APART = 4096
TOGETHER = "further ones"


class Declines:
    """Counts and policy of one pack."""

    def __init__(self, policy: OnUncertified = "return") -> None:
        if policy not in POLICIES and not callable(policy):
            known = ", ".join(map(repr, POLICIES))
            raise SpecplanError(
                f"on_uncertified is {policy!r}, expected {known} or a function", reason="argument"
            )
        self.policy = policy
        #: op -> reason -> cell -> calls.
        self.declined: dict[str, dict[str, dict[str, int]]] = {}
        #: op -> batch and its parts -> calls.
        self.parted: dict[str, dict[str, int]] = {}

    def decline(self, op: str, answer: Uncertified) -> Uncertified:
        """Count a declined call, log it the first time that its cell is declined, and do what the
        policy says; returns the answer.
        """
        reasons = self.declined.setdefault(op, {})
        cells = reasons.setdefault(answer.reason.value, {})
        first = _count(cells, str(answer.cell) if answer.cell is not None else "no cell")
        if first or self.policy == "log":
            LOG.warning("%s: %s (reason %s)", op, answer, answer.reason.value)
        if self.policy == "raise":
            raise UncertifiedCell(answer)
        if callable(self.policy):
            self.policy(answer)
        return answer

    def split(self, op: str, answer: InParts) -> InParts:
        """Count a call that ran in parts, and log the first of its size."""
        if _count(self.parted.setdefault(op, {}), str(answer)):
            LOG.info("%s: %s", op, answer)
        return answer

    def as_dict(self) -> Mapping[str, Any]:
        """Copies of the counts."""
        return {
            "declines": {
                op: {reason: dict(cells) for reason, cells in reasons.items()}
                for op, reasons in self.declined.items()
            },
            "parts": {op: dict(batches) for op, batches in self.parted.items()},
        }


def _count(counts: dict[str, int], what: str) -> bool:
    """Count one more; whether it is the first, of something that is counted by itself."""
    if what not in counts and len(counts) >= MOST_APART:
        counts[TOGETHER] = counts.get(TOGETHER, 0) + 1
        return False
    counts[what] = counts.get(what, 0) + 1
    return counts[what] == 1

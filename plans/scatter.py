"""Planning of ``scatter``: one plan for each set of store widths.

The widths of the outputs, the number of rows and every address are run-time values of the one
kernel, so requests and tokens do not choose the plan; the store widths do, because they are the
extents that the compiled module checks and the lanes that a row takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan


class Scatter:
    """The planning side of ``scatter`` (see :class:`specplan.plans.family.Family`)."""

    name = "scatter"
    ops = ("scatter",)
    dtypes = ("int32",)
    geometry: ClassVar[Mapping[str, tuple[int, int]]] = {
        "history": (1, 128),
        "next": (1, 128),
        "draft": (0, 128),
    }

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        if tokens > geometry["history"]:
            return f"{tokens} tokens do not fit a history store of width {geometry['history']}"
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
        columns = max(geometry["history"], geometry["next"], geometry["draft"], 1)
        lanes = 1 << (columns - 1).bit_length()
        spec = (
            ("history", geometry["history"]),
            ("next", geometry["next"]),
            ("draft", geometry["draft"]),
            ("lanes", lanes),
        )
        return (Plan("scatter", "scatter", arch.name, spec),)


FAMILY = Scatter()

"""Planning of ``gather``: one plan for each pair of store widths and power of two of tokens.

Requests, drafts and every address are run-time values of the kernel. The store widths are extents
that the compiled module checks; tokens choose how many lanes a request takes, so that no thread
divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan


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

"""What every family tells the other rooms about itself: its problems, its ops and its planning
rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan


class Family(Protocol):
    """The planning side of one family (``plans/<family>.py`` exports it as ``FAMILY``).

    A *problem* is the family's fixed geometry, given in the catalog as a mapping of integers; the
    family says which keys it takes and checks them. The planning rule is a pure function of
    integers: it may use the catalog's facts about the arch and nothing else.
    """

    name: str
    #: Ops in the order in which documentation shows them. A family with one op names it like
    #: itself.
    ops: tuple[str, ...]
    #: Names of the dtype axis, for example ``("int32",)``.
    dtypes: tuple[str, ...]
    #: Keys of a problem's geometry in the catalog, each with the inclusive range of its value.
    geometry: Mapping[str, tuple[int, int]]

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        """Why these values do not fit together, or None."""
        ...

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        """Why a problem of this geometry has no cells with so many tokens a request, or None."""
        ...

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        """The splits that the planning rule chooses for a cell whose catalog entry says ``splits:
        auto``.
        """
        ...

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        """The plans that a cell needs, one for each op, in the order of ``ops``."""
        ...

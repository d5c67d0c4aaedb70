"""The families that the runtime launches, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specplan.gather import Gather
from specplan.op import Op
from specplan.scatter import Scatter

FAMILIES: Mapping[str, type[Op]] = MappingProxyType({"scatter": Scatter, "gather": Gather})

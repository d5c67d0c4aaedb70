"""The families that this version knows, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from specplan.plans.family import Family
from specplan.plans.signature import Op

NAMES = (
    *("scatter", "gather", "rollback", "gdn_replay", "sparse_gqa_verify"),
    *("step_setup", "stage", "argmax", "accept", "conv_verify", "draft_step"),
)


def _load() -> Mapping[str, Family]:
    return MappingProxyType(
        {name: import_module(f"specplan.plans.{name}").FAMILY for name in NAMES}
    )


FAMILIES: Mapping[str, Family] = _load()
#: What each op takes, by family and op.
SIGNATURES: Mapping[str, Mapping[str, Op]] = MappingProxyType(
    {name: import_module(f"specplan.plans.{name}").OPS for name in NAMES}
)

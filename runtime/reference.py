"""The families' references in plain torch, under the name ``specplan.reference.<family>``.

A caller always has a path: what a pack declines, the reference computes, on CPU or GPU. Loaded on
first use, so that importing specplan imports none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Families whose reference is one function, and families with a module of them, one an op.
_FUNCTIONS = ("scatter", "gather", "step_setup", "stage", "argmax", "accept", "draft_step")
_MODULES = ("rollback", "gdn_replay", "sparse_gqa_verify", "conv_verify")


def __getattr__(name: str) -> Any:
    if name not in (*_FUNCTIONS, *_MODULES):
        raise AttributeError(f"specplan.reference has no {name!r}; it has: {', '.join(__dir__())}")
    module = import_module(f"specplan.kernels.{name}.reference")
    return getattr(module, name) if name in _FUNCTIONS else module


def __dir__() -> list[str]:
    return sorted((*_FUNCTIONS, *_MODULES))

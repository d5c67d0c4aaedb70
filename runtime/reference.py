"""The families' references in plain torch, under the name ``specplan.reference.<family>``.

A caller always has a path: what a pack declines, the reference computes, on CPU or GPU. Loaded on first use, so that importing specplan
imports none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FUNCTIONS = {"scatter": "specplan.kernels.scatter.reference", "gather": "specplan.kernels.gather.reference"}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    raise AttributeError(
        f"specplan.reference has no {name!r}; it has: {', '.join(sorted(_FUNCTIONS))}"
    )


def __dir__() -> list[str]:
    return sorted(_FUNCTIONS)

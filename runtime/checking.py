"""Checks of values that no compiled function sees: slots, pages, counts, on the device.

Each op declares them (``plans/signature.py``: :class:`Value`). They run before a launch where the
pack was loaded with ``check=True`` or under ``SPECPLAN_CHECK=1``, with torch's ops on the tensors'
device, and wait for the device: for the first runs of an integration, not for traffic.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from specplan.declines import LOG
from specplan.errors import ValueCheckError
from specplan.plans.signature import Op, Value

ENVIRONMENT = "SPECPLAN_CHECK"


def wanted() -> bool:
    """Whether the environment asks for checks."""
    return os.environ.get(ENVIRONMENT, "") not in ("", "0")


class Checks:
    """Whether a pack checks values, and whether it has said that a capture skips them."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._said = False

    def run(self, title: str, declared: Op, call: Any) -> None:
        """Check what a call's op declares; ValueCheckError for the first value that is wrong."""
        if torch.cuda.is_current_stream_capturing():
            if not self._said:
                LOG.warning("%s: values are not checked while a graph is captured", title)
                self._said = True
            return
        for value in declared.values:
            if not value.forms or call.form in value.forms:
                _check(title, value, call)


def _check(title: str, value: Value, call: Any) -> None:
    wrong = value.wrong(call)
    if wrong is None:
        return
    held = value.held(call) if value.held is not None else getattr(call, value.argument).tensor
    repeats = _repeats(held, wrong) if value.distinct else None
    wrong = repeats if repeats is not None else wrong
    found = wrong.nonzero()
    if found.shape[0] == 0:
        return
    at = tuple(found[0].tolist())
    number = held[at].item()
    beside = ""
    if repeats is not None:
        # The first row that repeats another stands behind it.
        other = (held[: at[0]] == number).nonzero()[-1].item()
        beside = f", as in row {other}"
    row = ", ".join(map(str, at))
    said = value.text.format(c=call)
    raise ValueCheckError(
        f"{title}: {value.argument} in row {row} is {number}{beside}; {said}",
        argument=value.argument,
        row=at,
        value=number,
    )


def _repeats(values: Any, live: Any) -> Any:
    """Which live rows have the value of a live row before them."""
    rows = live.nonzero().flatten()
    order = values[rows].sort(stable=True)
    again = torch.zeros_like(live)
    same = order.values[1:] == order.values[:-1]
    again[rows[order.indices[1:][same]]] = True
    return again

"""A loaded pack on a machine without a GPU: tensors that say they are on one, and compiled
functions that write down their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class OnDevice(torch.Tensor):
    """A CPU tensor that claims to be on ``cuda:0``; slices of it claim the same."""

    def get_device(self) -> int:
        return 0


def on_device(tensor: torch.Tensor) -> OnDevice:
    return tensor.as_subclass(OnDevice)


class OnlyOnDevice:
    """A compiled function that refuses tensors which are not on the device, as modules do."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and not isinstance(argument, OnDevice):
                raise ValueError("mismatched device")
        self.function(*map(plain, arguments))


def plain(value: Any) -> Any:
    """A tensor as torch has it; anything else as it is."""
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


class Compiled:
    """A compiled function: it refuses what ``refuses`` finds, raises ``fails``, and writes down
    every launch.
    """

    def __init__(self, symbol: str, spec: Mapping[str, Any]) -> None:
        self.symbol = symbol
        self.spec = dict(spec)
        self.refuses: Callable[..., str | None] = lambda *arguments: None
        #: Whether the function's own checks of ranges end the call (``kernels/ranges.py``).
        self.outside: Callable[..., bool] = lambda *arguments: False
        self.fails: Exception | None = None
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        if self.fails is not None:
            raise self.fails
        wrong = self.refuses(*arguments)
        if wrong is not None:
            raise ValueError(wrong)
        if self.outside(*arguments):
            raise RuntimeError("CUDA Error Code: 77001")
        self.launches.append(arguments)

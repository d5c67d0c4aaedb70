"""A loaded pack on a machine without a GPU: tensors that say they are on one, and compiled
functions that write down their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_float
from typing import Any

import torch
from specplan.op import DTYPES, Operand, _span
from specplan.plans import signature
from specplan.plans.signature import ITEM_BYTES, Tensor
from specplan.tools.simulator.host import OnDevice as OnDevice
from specplan.tools.simulator.host import on_device as on_device


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


def refusal(op: signature.Op, spec: Mapping[str, Any], arguments: tuple[Any, ...]) -> str | None:
    """The first thing of a call that the compiled module of a declared op does not take, whatever
    its rules say.
    """
    tensors, scalars = op.in_form(op.form_of(spec))
    if len(arguments) != len(tensors) + len(scalars):
        return f"expected {len(tensors) + len(scalars)} arguments, got {len(arguments)}"
    extents: dict[str, int] = {}
    for tensor, value in zip(tensors, arguments, strict=False):
        wrong = _mismatch(tensor, value, spec, extents)
        if wrong is not None:
            return f"mismatched {tensor.name}{wrong}"
    for scalar, value in zip(scalars, arguments[len(tensors) :], strict=True):
        kinds = (int,) if scalar.kind == "int" else (int, float)
        if not isinstance(value, kinds):
            return f"mismatched type on {scalar.name}: {type(value).__name__}"
        if scalar.kind == "int" and not -(1 << 31) <= value < 1 << 31:
            return f"{scalar.name} does not fit 32 bits"
    return None


def _mismatch(
    tensor: Tensor, value: Any, spec: Mapping[str, Any], extents: dict[str, int]
) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f" type: {type(value).__name__} is no tensor"
    dtype = str(spec.get(tensor.dtype, tensor.dtype))
    if value.dtype is not DTYPES[dtype]:
        return f".dtype, expected {dtype}"
    if value.dim() != len(tensor.shape):
        return f".ndim, expected {len(tensor.shape)}"
    item = ITEM_BYTES[dtype]
    if value.data_ptr() % (tensor.align or item):
        return " alignment"
    for axis, (extent, found) in enumerate(zip(tensor.shape, value.shape, strict=True)):
        fixed = extent if isinstance(extent, int) else spec.get(extent)
        if found != (extents.setdefault(str(extent), found) if fixed is None else fixed):
            return f".shape[{axis}]: {tuple(value.shape)}"
    for axis, (stride, found) in enumerate(zip(tensor.strides, value.stride(), strict=True)):
        if isinstance(stride, int):
            if found != stride and value.shape[axis] > 1:
                return f".strides[{axis}], expected {stride}"
        elif found * item % max(stride.multiple, 1):
            return f".strides[{axis}], expected a multiple of {stride.multiple} bytes"
    return None


def broken(op: signature.Op, spec: Mapping[str, Any], arguments: tuple[Any, ...]) -> bool:
    """Whether a call breaks a rule that the compiled function checks by itself."""
    tensors, scalars = op.in_form(op.form_of(spec))
    named: dict[str, Any] = {
        tensor.name: Operand(tuple(value.shape), tuple(value.stride()), value)
        for tensor, value in zip(tensors, arguments, strict=False)
    }
    for scalar, value in zip(scalars, arguments[len(tensors) :], strict=True):
        named[scalar.name] = c_float(value).value if scalar.kind == "float" else int(value)
    call = op.call({**named, "span": _span}, dict(spec), int)
    return not all(op.conditions(call, op.form_of(spec)))


class Checking(Compiled):
    """A compiled function that checks what the compiled module of its declared op does."""

    def __init__(self, op: signature.Op, symbol: str, spec: Mapping[str, Any]) -> None:
        super().__init__(symbol, spec)
        self.refuses = lambda *arguments: refusal(op, self.spec, arguments)
        self.outside = lambda *arguments: broken(op, self.spec, arguments)

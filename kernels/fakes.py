"""Fake arguments: what a compiled function will accept, written down before any tensor exists.

A symbolic extent or stride is read at run time; an integer is checked by the compiled module before
the launch. Strides of dimensions that may have extent 0 or 1 are left symbolic, because torch gives
such dimensions strides that a compact layout would not have (an ``[N, 0]`` tensor has strides ``(1,
1)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from specplan.plans.plan import Plan
from specplan.plans.signature import ITEM_BYTES, Op

#: The compiler's types by the names of ``plans/signature.py``.
TYPES: Mapping[str, Any] = {
    "int32": Int32,
    "int64": Int64,
    "uint8": Uint8,
    "bf16": BFloat16,
    "fp32": Float32,
    "fp8_e4m3": Float8E4M3FN,
}


def arguments(op: Op, plan: Plan) -> tuple[Any, ...]:
    """The fake arguments of a plan's host function, as its op declares them, the stream last."""
    constants = dict(plan.spec)
    tensors, scalars = op.in_form(op.form_of(constants))
    extents: dict[str, Any] = {}
    made = []
    for each in tensors:
        dtype = str(constants.get(each.dtype, each.dtype))
        shape = []
        for name in each.shape:
            fixed = name if isinstance(name, int) else constants.get(name)
            shape.append(fixed if fixed is not None else _shared(extents, str(name), each.bits))
        item, bits = ITEM_BYTES[dtype], each.stride_bits or each.bits
        strides = tuple(
            s if isinstance(s, int) else _stride(bits, max(1, s.multiple // item))
            for s in each.strides
        )
        made.append(make_fake_tensor(TYPES[dtype], tuple(shape), strides, assumed_align=each.align))
    numbers = (Int32(0) if each.kind == "int" else Float32(1.0) for each in scalars)
    return (*made, *numbers, stream())


def _shared(extents: dict[str, Any], name: str, bits: int) -> Any:
    """The symbol of an extent, one for all tensors that share it."""
    if name not in extents:
        extents[name] = cute.sym_int64() if bits == 64 else cute.sym_int()
    return extents[name]


def _stride(bits: int, multiple: int) -> Any:
    if bits == 64:
        return cute.sym_int64(divisibility=multiple) if multiple > 1 else cute.sym_int64()
    return cute.sym_int(divisibility=multiple) if multiple > 1 else cute.sym_int()


def extent() -> Any:
    """A 64-bit extent or stride known at run time only."""
    return cute.sym_int64()


def extent32() -> Any:
    """An extent or stride that the compiled module refuses unless it fits 32 bits; products of two
    are still 64-bit.
    """
    return cute.sym_int()


def tensor(
    dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int | None = None
) -> Any:
    """A device tensor; ``align`` is the alignment of its base in bytes (default: one element).

    All symbols of one tensor must have one width. The compiler (4.8.1) writes a tensor's descriptor
    as a flat struct and reads it as nested ones, whose padding differs when 32- and 64-bit symbols
    are mixed: the kernel then gets a stride of another dimension.
    """
    widths = {symbol.width for symbol in (*shape, *stride) if not isinstance(symbol, int)}
    if len(widths) > 1:
        raise ValueError(
            "a tensor mixes 32- and 64-bit symbols; the compiler would misread its strides"
        )
    return make_fake_tensor(dtype, shape, stride, assumed_align=align)


def vector(dtype: Any, size: Any = None) -> Any:
    """A dense one-dimensional device tensor."""
    return tensor(dtype, (extent() if size is None else size,), (1,))


def stream() -> Any:
    """The launch stream: taken from the tensors' framework, not from the argument list."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)

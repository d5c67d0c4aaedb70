"""Fake arguments: what a compiled function will accept, written down before any tensor exists.

A symbolic extent or stride is read at run time; an integer is checked by the compiled module before
the launch. Strides of dimensions that may have extent 0 or 1 are left symbolic, because torch gives
such dimensions strides that a compact layout would not have (an ``[N, 0]`` tensor has strides ``(1,
1)``).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


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

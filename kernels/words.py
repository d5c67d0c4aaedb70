"""Single words of global memory by pointer and 64-bit offset.

A kernel that takes pointers and the few integers it needs, instead of whole tensors with all their
extents and strides, has a third of the parameters; short kernels wait for each line of them.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def load(pointer: cute.Pointer, offset: Int64) -> Int32:
    """The 32-bit word at ``pointer[offset]``."""
    return cute.make_tensor(pointer + offset, cute.make_layout(1))[0]


@cute.jit
def store(pointer: cute.Pointer, offset: Int64, value: Int32) -> None:
    """``pointer[offset] = value``, one 32-bit word."""
    cute.make_tensor(pointer + offset, cute.make_layout(1))[0] = value

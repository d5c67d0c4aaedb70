"""Names of kernels and host functions in compiled code.

The compiler's own names hold the module path and the types of all arguments as this Python version
prints them, so a file that moves would change the compiled bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Decorator = Callable[[Any], Any]


def kernel_name(name: str) -> Decorator:
    """Fix the name of a ``cute.kernel``: ``kernel_cutlass_<name>_0``, or the kernel's number in its
    module in place of 0.

    The first words are those of the compiler's own names. Sanitizers and profiles select the
    kernels of all families by them, and ptxas 13 compiles a kernel whose name holds ``cutlass``
    differently: without it gdn_replay's fp32 ``materialize`` took 64 registers instead of 62.
    """
    return _named(f"kernel_cutlass_{name}")


def host_name(name: str) -> Decorator:
    """Fix the name of a ``cute.jit`` host function: ``cutlass_<name>``."""
    return _named(f"cutlass_{name}")


def _named(name: str) -> Decorator:
    def set_name(function: Any) -> Any:
        function.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        return function

    return set_name

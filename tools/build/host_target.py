"""Object code for a named host: the one place that reaches past the compiler's public exporter.

``export_to_c`` of nvidia-cutlass-dsl emits TVM-FFI functions for the CPU of the machine that builds
and refuses to be told another (``CONFIG_INCOMPATIBLE_FLAGS``). The steps below are its own, with
the last one told its target. They use names that are no public interface, so
``tests/build/test_host_target.py`` checks each of them against the installed compiler, and
:func:`emit` fails by name where one is missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specplan.plans.hosts import Host


class HostTargetError(RuntimeError):
    """The compiler no longer has what emitting for a named host needs."""


def emit(compiled: Any, symbol: str, host: Host, path: Path) -> None:
    """Write the object of a compiled function for a host, under the name ``__tvm_ffi_<symbol>``.

    The engine's own wrappers (``_mlir_…``) are in it too; linking hides them. ``compiled`` is not
    changed and can be emitted for other hosts too.
    """
    try:
        from cutlass.base_dsl.export import get_export_module
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider

        module = get_export_module(
            compiled.ir_module,
            "__cute_internal_" + symbol,
            preserve_symbols={f"__tvm_ffi_{compiled.function_name}"},
        )
        provider.rename_tvm_ffi_function(module, compiled.function_name, symbol)
        provider._inplace_hide_symbols(module, lambda name: not name.startswith("__tvm_ffi"))
        dump = compiled.export_provider.mlirExecutionEngine.dump_object_file_pic
    except (ImportError, AttributeError, TypeError) as error:
        raise HostTargetError(
            f"this version of nvidia-cutlass-dsl cannot emit code for a named host ({error}); "
            "use the version that specplan[build] names"
        ) from error
    dump(
        module,
        str(path),
        "__tvm_ffi_" + symbol,
        host_triple=host.triple,
        host_cpu=host.cpu,
        host_features="",
    )
    if not path.is_file():
        raise HostTargetError(f"the compiler wrote no object for {host.name}")


def signature(data: bytes) -> str:
    """The signature text in an object: what the function names when it refuses its arguments."""
    found = {match[1] for match in re.finditer(rb"when calling: `([^`\0]*)`", data)}
    if len(found) != 1:
        raise HostTargetError(
            f"expected one signature text in an object, found {len(found)}; the compiler's "
            "messages have changed"
        )
    return " ".join(found.pop().decode().split())

"""Accesses of global memory, and asynchronous copies from it to shared memory.

Those that take a 64-bit address are volatile, so they keep their order against each other and
against barriers. An address is not accessed where ``live`` is false.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric
from specplan.kernels.device.convert import bits_to_float
from specplan.kernels.device.ptx import emit


def element_address(tensor: cute.Tensor, *coordinates: Int32) -> Int64:
    """Address of an element, or of the first one in the dimensions that are left out.

    In 64 bits throughout: a slot times its stride needs them.
    """
    offset = Int64(0)
    for coordinate, stride in zip(coordinates, tensor.stride, strict=False):
        offset = offset + Int64(coordinate) * Int64(stride)
    return tensor.iterator.toint() + offset * (tensor.element_type.width // 8)


def load_global(
    address: Int64, words: int, live: Boolean | None = None, cache: str = ""
) -> list[Int32]:
    """Load 1, 2 or 4 words; zeros where not ``live``. ``cache`` is the load's cache operator."""
    text = f"ld.global{cache}.{_width(words)} {_vector(words, 0)}, [${words}];"
    if live is None:
        return emit([Int32] * words, [address], text, "=r," * words + "l", volatile=True)
    zero = "".join(f"mov.b32 ${i}, 0; " for i in range(words))
    text = f"{{ .reg .pred p; setp.ne.s32 p, ${words + 1}, 0; {zero}@p {text} }}"
    # The early clobber keeps the results out of the address register.
    constraints = "=&r," * words + "l,r"
    return emit([Int32] * words, [address, Int32(live)], text, constraints, volatile=True)


def load_read_only(address: Int64, words: int, live: Boolean | None = None) -> list[Int32]:
    """``load_global`` of what nobody writes while the kernel runs (``ld.global.nc``)."""
    return load_global(address, words, live, ".nc")


def load_read_only_bf16(address: Int64, live: Boolean) -> Float32:
    """Load one bf16 that nobody writes while the kernel runs, widened; zero where not ``live``."""
    text = (
        "{ .reg .pred p; .reg .b16 x; setp.ne.s32 p, $2, 0; mov.b16 x, 0; "
        "@p ld.global.nc.b16 x, [$1]; .reg .b16 z; mov.b16 z, 0; mov.b32 $0, {z, x}; }"
    )
    return bits_to_float(emit([Int32], [address, Int32(live)], text, "=r,l,r", volatile=True)[0])


def store_global(address: Int64, words: Sequence[Int32], live: Boolean | None = None) -> None:
    """Store 1, 2 or 4 words, where ``live``."""
    count = len(words)
    if live is None:
        text = f"st.global.{_width(count)} [$0], {_vector(count, 1)};"
        emit([], [address, *words], text, "l" + ",r" * count, volatile=True)
        return
    text = f"st.global.{_width(count)} [$0], {_vector(count, 2)};"
    text = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; @p {text} }}"
    constraints = "l,r" + ",r" * count
    emit([], [address, Int32(live), *words], text, constraints, volatile=True)


def _vector(words: int, first: int) -> str:
    names = ", ".join(f"${first + i}" for i in range(words))
    return f"{{{names}}}" if words > 1 else names


def _width(words: int) -> str:
    return {1: "b32", 2: "v2.b32", 4: "v4.b32"}[words]


@cute.jit
def load_word(pointer: cute.Pointer, offset: Int64) -> Int32:
    """Load the word at ``pointer[offset]``.

    A kernel that takes pointers and the few integers it needs, instead of whole tensors with all
    their extents and strides, has a third of the parameters; short kernels wait for each line of
    them.
    """
    return cute.make_tensor(pointer + offset, cute.make_layout(1))[0]


@cute.jit
def store_word(pointer: cute.Pointer, offset: Int64, value: Int32) -> None:
    """Store a word at ``pointer[offset]``."""
    cute.make_tensor(pointer + offset, cute.make_layout(1))[0] = value


def load_element(tensor: cute.Tensor, index: Int32, live: Boolean | None = None) -> Numeric:
    """Load one element of a vector; undefined where not ``live``.

    A plain load of the tensor is scheduled ahead of others; this one keeps its order.
    """
    dtype = tensor.element_type
    return cute.arch.inline_ptx(
        f"ld.global.b{dtype.width} {{$w0}}, [{{$r0}}];",
        write_only_types=[dtype],
        read_only_args=[tensor.iterator.toint() + Int64(index) * (dtype.width // 8)],
        predicate=live,
    )


def load_once(address: Int64, words: int, live: Boolean) -> list[Int32]:
    """Load 1, 2 or 4 words that are read only once, without filling L1; undefined where not
    ``live``.
    """
    names = [f"{{$w{i}}}" for i in range(words)]
    target = names[0] if words == 1 else f"{{{', '.join(names)}}}"
    value = cute.arch.inline_ptx(
        f"ld.global.L1::no_allocate.{_width(words)} {target}, [{{$r0}}];",
        write_only_types=[Int32] * words,
        read_only_args=[address],
        predicate=live,
    )
    return [value] if words == 1 else list(value)


def store_once(address: Int64, words: list[Int32], live: Boolean) -> None:
    """Store 1, 2 or 4 words, where ``live``; the pair of ``load_once``.

    As ``store_global``, but the predicate is the compiler's: with that one, rollback's ``restore``
    takes 64 registers instead of 56.
    """
    names = [f"{{$r{i + 1}}}" for i in range(len(words))]
    source = names[0] if len(words) == 1 else f"{{{', '.join(names)}}}"
    cute.arch.inline_ptx(
        f"st.global.{_width(len(words))} [{{$r0}}], {source};",
        read_only_args=[address, *words],
        predicate=live,
    )


# ----- asynchronous copies (cp.async): committed in groups, waited for by cute.arch ---------------


def copy_async(shared: Int32, shared_offset: int, address: Int64, offset: int) -> None:
    """Start copying 16 bytes from global to shared memory, past L1."""
    text = f"cp.async.cg.shared.global [$0+{shared_offset}], [$1+{offset}], 16;"
    emit([], [shared, address], text, "r,l", volatile=True)


def copy_async_or_zero(shared: Int32, address: Int64, live: Boolean) -> None:
    """Start copying 16 bytes to shared memory, or 16 zero bytes where not ``live``."""
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    emit([], [shared, address, Int32(live) * 16], text, "r,l,r", volatile=True)


def prefetch_l2(address: Int64, size: int, live: Boolean) -> None:
    """Start bringing ``size`` bytes, a multiple of 16, to L2, where ``live``.

    No value is read: what earlier grids still write there is seen by a later load.
    """
    text = (
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$0], {size}; }}"
    )
    emit([], [address, Int32(live)], text, "l,r", volatile=True)

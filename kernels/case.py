"""Input cases: what tests, certification and benchmarks call an op with, and what must come out.

A case keeps its buffers for its whole life and rewrites them in place, so that a captured graph can
be replayed over new inputs. Bit-exact families put all their tensors into one arena with guard
words between them; then one comparison covers every output, every input that must not change, and
every stray write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from specplan.plans.certificates import Output

#: Where the bound of what is compared bit for bit comes from.
EXACT = "equal bit for bit"


@dataclass(frozen=True)
class Comparison:
    """One buffer, compared whole.

    ``error`` is a zero-dimensional tensor on the case's device, so that many comparisons cost one
    synchronisation; a comparison holds if ``error <= bound``, and NaN never does. ``source`` says
    where the bound comes from. ValueError for a bound without a source, and for a bound of 0 on
    anything but bit equality.
    """

    buffer: str
    measure: str
    error: torch.Tensor
    bound: float
    source: str = ""

    def __post_init__(self) -> None:
        self.output.check()

    @property
    def output(self) -> Output:
        """What is compared, as a certificate names it."""
        source = self.source or (EXACT if self.bound == 0 else "")
        return Output(self.buffer, self.measure, float(self.bound), source)


class Case(Protocol):
    """One call of one op."""

    name: str
    op: str

    def arguments(self) -> Mapping[str, Any]:
        """The op's arguments by name; the same tensors every time."""
        ...

    def pick(self) -> Mapping[str, Any]:
        """What ``op.pick`` takes to come to the same cell as the call."""
        ...

    def refill(self, seed: int) -> None:
        """Rewrite every input in place with new random values, and poison every output."""
        ...

    def snapshot(self) -> Any:
        """All buffers, as they are now."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Put the buffers back."""
        ...

    def expect(self) -> Any:
        """What all buffers must be after the call, computed from the inputs as they are now."""
        ...

    def compare(self, expected: Any) -> Iterator[Comparison]:
        """Every buffer against what it must be."""
        ...

    def identical(self, snapshot: Any) -> torch.Tensor:
        """How many elements differ in bits from a snapshot, as a zero-dimensional tensor."""
        ...


#: Guard words before, between and after the tensors of an arena: a stray write of one row or one
#: warp lands in them.
GUARD = 64


@dataclass(frozen=True)
class View:
    """Where a tensor lies in an arena, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype = torch.int32


class Arena:
    """Tensors in one storage of words, with guard words around each; int32 unless they say so."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.words = GUARD

    def add(self, name: str, *shape: int, row_stride: int | None = None) -> None:
        """Reserve a tensor; ``row_stride`` (in words) leaves a gap of guard words after each row of
        a 2-D tensor.
        """
        stride = [prod(shape[i + 1 :]) for i in range(len(shape))]
        if row_stride is not None:
            stride[0] = row_stride
        extent = (shape[0] - 1) * stride[0] + prod(shape[1:]) if prod(shape) else 0
        self.views[name] = View(self.words, shape, tuple(max(1, s) for s in stride))
        self.words += extent + GUARD

    def add_strided(
        self,
        name: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype = torch.int32,
    ) -> None:
        """Reserve a tensor of any strides, in elements."""
        self.add_typed(name, dtype, *shape, strides=stride)

    def add_long(self, name: str, *shape: int) -> None:
        """Reserve a dense int64 tensor."""
        stride = tuple(max(1, prod(shape[i + 1 :])) for i in range(len(shape)))
        self.add_strided(name, shape, stride, torch.int64)

    def add_typed(
        self,
        name: str,
        dtype: torch.dtype,
        *shape: int,
        strides: tuple[int, ...] | None = None,
        shift: int = 0,
    ) -> None:
        """Reserve a tensor of any dtype that begins ``shift`` elements past a multiple of 16
        bytes, dense unless ``strides`` says otherwise.
        """
        stride = strides or tuple(max(1, prod(shape[i + 1 :])) for i in range(len(shape)))
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        extent = last + 1 if prod(shape) else 0
        start = -(-self.words // 4) * 4
        offset = start * 4 // dtype.itemsize + shift
        self.views[name] = View(offset, shape, stride, dtype)
        self.words = -(-(offset + extent) * dtype.itemsize // 4) + GUARD
        # Whole elements of any dtype.
        self.words += self.words % 2

    def storage(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.words, dtype=torch.int32, device=device)

    def tensors(self, storage: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a storage, by name."""
        even = storage.numel() // 2 * 2
        return {
            name: torch.as_strided(
                storage if view.dtype is torch.int32 else storage[:even].view(view.dtype),
                view.shape,
                view.stride,
                view.offset,
            )
            for name, view in self.views.items()
        }


class ExactCase:
    """A case of a bit-exact family: int32 tensors in one arena, integers, and a reference that
    works in place.

    Subclasses fill ``arena`` and ``integers`` before they call this constructor, and implement
    ``shape_inputs``.
    """

    measure = "elements that differ"

    def __init__(
        self, name: str, op: str, arena: Arena, integers: Mapping[str, int], device: torch.device
    ) -> None:
        self.name = name
        self.op = op
        self.arena = arena
        self.integers = dict(integers)
        self.generator = torch.Generator(device=device)
        self.buffer = arena.storage(device)
        self.tensors = arena.tensors(self.buffer)

    def reference(self, **arguments: Any) -> None:
        raise NotImplementedError

    def shape_inputs(self, generator: torch.Generator) -> None:
        """Give the inputs that are indices or lengths their values; everything is random words
        already.
        """
        raise NotImplementedError

    def pick(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def arguments(self) -> Mapping[str, Any]:
        return {**self.tensors, **self.integers}

    def refill(self, seed: int) -> None:
        self.generator.manual_seed(seed)
        self.buffer.random_(-(1 << 31), (1 << 31) - 1, generator=self.generator)
        self.shape_inputs(self.generator)

    def snapshot(self) -> torch.Tensor:
        return self.buffer.clone()

    def restore(self, snapshot: torch.Tensor) -> None:
        self.buffer.copy_(snapshot)

    def expect(self) -> torch.Tensor:
        expected = self.buffer.clone()
        self.reference(**self.arena.tensors(expected), **self.integers)
        return expected

    def compare(self, expected: torch.Tensor) -> Iterator[Comparison]:
        yield Comparison("all tensors and guards", self.measure, self.identical(expected), 0)

    def identical(self, snapshot: torch.Tensor) -> torch.Tensor:
        return (self.buffer != snapshot).sum()

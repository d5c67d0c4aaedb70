"""Planning of ``stage``: one plan an arch.

Where the segments go, where they lie in the record and how long they are are run-time values of the
one kernel. A cell counts segments where others count requests, and has one token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import Op, Parameter, Rule, Scalar, Size, Tensor, vector

#: The most segments of a launch: their addresses, offsets and lengths are kernel arguments.
SEGMENTS = 16


class Stage:
    """The planning side of ``stage`` (see :class:`specplan.plans.family.Family`)."""

    name = "stage"
    ops = ("stage",)
    dtypes = ("int32",)
    geometry: ClassVar[Mapping[str, tuple[int, int]]] = {"segments": (SEGMENTS, SEGMENTS)}

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        if tokens != 1:
            return f"{tokens} tokens; cells of stage count segments as requests, of one token each"
        return None

    def splits(
        self, geometry: Mapping[str, int], requests: int, tokens: int, dtype: str, arch: Arch
    ) -> int:
        return 1

    def plans(
        self,
        geometry: Mapping[str, int],
        requests: int,
        tokens: int,
        splits: int,
        dtype: str,
        arch: Arch,
    ) -> tuple[Plan, ...]:
        return (Plan("stage", "stage", arch.name, (("segments", geometry["segments"]),)),)


FAMILY = Stage()


# ----- where segments go --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the segments of a record go (:func:`describe` makes it).

    Attributes
    ----------
    views
        The destinations as int32 words, sixteen with empty ones behind; they share the memory of
        the tensors that they are made of, and keep it alive.
    offsets
        First word of each in the record; 0 for the empty ones.
    count
        How many there are.
    """

    views: tuple[Any, ...]
    offsets: tuple[int, ...]
    count: int


def describe(segments: Sequence[tuple[Any, int]], words: Any) -> Segments:
    """Segments of pairs of a destination and a word of the record; ``words`` is torch's int32.

    Raises
    ------
    ValueError
        For destinations that a launch cannot take, or that overlap, with what was found.
    """
    found = list(segments)
    for number, (destination, offset) in enumerate(found):
        wrong = refused(destination)
        if not wrong and (type(offset) is not int or offset < 0):
            wrong = f"its offset is {offset!r}, expected an integer from 0 on"
        if not wrong and destination.device != found[0][0].device:
            wrong = f"it is on {destination.device}, the first on {found[0][0].device}"
        if wrong:
            raise ValueError(f"segment {number}: {wrong}")
    given = [(destination, offset) for destination, offset in found if destination.numel()]
    if not 1 <= len(given) <= SEGMENTS:
        raise ValueError(f"{len(given)} segments that are not empty, expected 1..{SEGMENTS}")
    views = [destination.view(words) for destination, _ in given]
    spans = sorted((v.data_ptr(), v.data_ptr() + 4 * v.numel(), n) for n, v in enumerate(views))
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise ValueError(f"the destinations of segments {first} and {second} overlap")
    more = SEGMENTS - len(views)
    return Segments(
        (*views, *[views[0][:0]] * more),
        (*(offset for _, offset in given), *[0] * more),
        len(views),
    )


def refused(destination: Any) -> str:
    """Why something is no destination, or nothing."""
    dtype = str(getattr(destination, "dtype", ""))
    if not hasattr(destination, "data_ptr"):
        return f"the destination is no tensor: {type(destination).__name__}"
    if dtype not in ("torch.int32", "torch.int64"):
        return f"the destination is {dtype}, expected torch.int32 or torch.int64"
    if destination.dim() != 1 or not destination.is_contiguous():
        return (
            f"the destination is {tuple(destination.shape)} with strides {destination.stride()}, "
            "expected a dense vector"
        )
    return ""


def on_device(host: Any, index: int) -> Any:
    """A DLPack capsule of a host tensor's memory that says it is on a CUDA device; it keeps the
    tensor alive.
    """
    capsule = host.__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # A DLTensor begins with its data pointer and its device: type (2: CUDA), then index.
    start = address(capsule, b"dltensor")
    ctypes.c_int32.from_address(start + 8).value = 2
    ctypes.c_int32.from_address(start + 12).value = index
    return capsule


# ----- the op -------------------------------------------------------------------------------------


def _destination(number: int) -> Tensor:
    return vector(
        *(f"destination_{number}", "int32", f"words_{number}", "destination"),
        written=True,
        source=f"segments.views[{number}]",
    )


def _inside(number: int) -> tuple[Rule, Rule]:
    """A segment's words lie in the record."""

    def begin(c: Any) -> Any:
        return getattr(c, f"offset_{number}")

    def words(c: Any) -> Any:
        return getattr(c, f"destination_{number}").shape[0]

    return (
        Rule(
            lambda c: begin(c) >= 0,
            lambda c: f"segment {number} begins at word {begin(c)}, below 0",
            planned=True,
        ),
        Rule(
            lambda c: c.wide(begin(c)) + words(c) <= c.record.shape[0],
            lambda c: (
                f"segment {number} needs words {begin(c)}..{begin(c) + words(c)} of a record of "
                f"{c.record.shape[0]}"
            ),
            planned=True,
        ),
    )


OP = Op(
    "stage",
    "stage",
    tensors=(
        vector("record", "int32", "words", "words on the device, or mapped host memory"),
        *(_destination(number) for number in range(SEGMENTS)),
    ),
    scalars=(
        *(
            Scalar(f"offset_{number}", expression=f"segments.offsets[{number}]")
            for number in range(SEGMENTS)
        ),
        # 0: the call is checked and nothing is launched.
        Scalar("launches", expression="1", idle=0),
    ),
    parameters=(
        Parameter("record"),
        Parameter("segments", "Segments", about="from `describe`: where each goes, and from where"),
    ),
    key=("record.get_device()", "segments.count"),
    size=lambda c: Size((SEGMENTS,), "int32", max(1, c.given.segments.count), 1),
    rules=tuple(rule for number in range(SEGMENTS) for rule in _inside(number)),
    idle={"launches": 1, **{f"offset_{number}": 0 for number in range(SEGMENTS)}},
)
OPS = {OP.name: OP}

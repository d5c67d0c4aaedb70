"""Planning of ``conv_verify``: a plan for steps of up to 4 tokens and one for up to 8; channels,
the ring's size and all strides are run-time data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specplan.plans.arch import Arch
from specplan.plans.plan import Plan
from specplan.plans.signature import (
    FREE,
    Free,
    Op,
    Parameter,
    Rule,
    Scalar,
    Size,
    Tensor,
    Value,
    vector,
)

#: Taps of the convolution, and the inputs before a step that it reads.
TAPS = 4
BEFORE = TAPS - 1
#: Tokens of a step at most, and positions of a ring at most.
MOST_TOKENS, MOST_RING = 8, 64
#: Channels of a thread, 16 bytes of each row, and threads of a CTA.
CHANNELS, THREADS = 8, 128


class ConvVerify:
    """The planning side of ``conv_verify`` (see :class:`specplan.plans.family.Family`).

    A problem is the channels of a layer: queries, keys and values of its heads.
    """

    name = "conv_verify"
    ops = ("conv_verify", "import_", "export")
    dtypes = ("bf16",)
    geometry: ClassVar[Mapping[str, tuple[int, int]]] = {"channels": (CHANNELS, 1 << 17)}

    def check_problem(self, geometry: Mapping[str, int]) -> str | None:
        if geometry["channels"] % CHANNELS:
            return f"{geometry['channels']} channels, expected a multiple of {CHANNELS}"
        return None

    def check_tokens(self, geometry: Mapping[str, int], tokens: int) -> str | None:
        return None if tokens <= MOST_TOKENS else f"{tokens} tokens a request, at most 8"

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
        most = 4 if tokens <= 4 else MOST_TOKENS
        return (
            Plan("conv_verify", "conv_verify", arch.name, (("most_tokens", most),)),
            Plan("conv_verify", "import_", arch.name, (("taps", TAPS),)),
            Plan("conv_verify", "export", arch.name, (("taps", TAPS),)),
        )


FAMILY = ConvVerify()


def channels_of(key_heads: int, value_heads: int) -> int:
    """Channels of a Gated DeltaNet layer with heads of 128."""
    return (2 * key_heads + value_heads) * 128


# ----- the ops ------------------------------------------------------------------------------------

_ROW = (Free(16), Free(16), 1)


def _rows(name: str, about: str, **more: Any) -> Tensor:
    return Tensor(*(name, "bf16", ("N", "T", "D"), _ROW, about), align=16, stride_bits=64, **more)


def _bias(dtype: str) -> Tensor:
    other = {"bf16": "is not bf16", "fp32": "is bf16"}[dtype]
    return vector(
        *(f"bias_{dtype}", dtype, f"bias_{dtype}_held", "added before the activation"),
        source=f"no_{dtype} if bias is None or bias.dtype {other} else bias",
        parameter="bias",
    )


def _list(name: str, rows: str, about: str, idle: str = "") -> Tensor:
    return Tensor(name, "int32", (rows,), (FREE,), about, idle=idle)


def _span(c: Any, tensor: Any, item: int) -> tuple[Any, Any]:
    """First byte of a tensor and the one behind its last, compiled or in Python."""
    compiled = hasattr(tensor, "iterator")
    first = tensor.iterator.toint() if compiled else c.wide(tensor.tensor.data_ptr())
    last = c.wide(0)
    for extent, stride in zip(tensor.shape, tensor.stride, strict=True):
        last = last + (c.wide(extent) - 1) * c.wide(stride)
    return first, first + (last + 1) * item


def _apart(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    return (a[0] >= b[1]) | (b[0] >= a[1])


def _same_rows(c: Any) -> Any:
    """``out`` is ``x`` itself."""
    x, out = _span(c, c.x, 2), _span(c, c.out, 2)
    strides = (c.wide(c.x.stride[0]) == c.wide(c.out.stride[0])) & (
        c.wide(c.x.stride[1]) == c.wide(c.out.stride[1])
    )
    return (x[0] == out[0]) & strides


def _bias_fits(c: Any) -> Any:
    held = c.bias_bf16.shape[0] + c.bias_fp32.shape[0]
    return (held == 0) | (held == c.channels)


_RING = Rule(
    lambda c: (c.places >= BEFORE + 1) & (c.places <= MOST_RING),
    f"the ring has {{c.places}} positions, expected {BEFORE + 1}..{MOST_RING}",
)
_WHOLE = Rule(
    lambda c: c.channels % CHANNELS == 0,
    f"{{c.channels}} channels are no multiple of {CHANNELS}",
)


def _slots(name: str, slots: Any) -> Value:
    return Value(
        name,
        lambda c: getattr(c, name).tensor >= slots(c),
        "a slot of the ring, or negative for none",
    )


_LIVE = Value("slot", lambda c: c.slot.tensor >= 0, "no two live rows have one slot", distinct=True)


CONV = Op(
    "conv_verify",
    "conv_verify",
    tensors=(
        _rows("x", "inputs of the step's rows; a slice of a packed row does"),
        Tensor("weight", "bf16", ("D", TAPS), (TAPS, 1), "the last tap is the row's own", 16),
        *(_bias("bf16"), _bias("fp32")),
        Tensor(
            *("ring", "bf16", ("slots", "places", "D"), (Free(16), Free(16), 1)),
            "the input at position p at p modulo places",
            align=16,
            stride_bits=64,
            written=True,
        ),
        _list("position", "N", "of each request's first row; negative for padding"),
        _list("slot", "N", "of the ring; negative for padding", "rows"),
        _rows("out", "like x, or x itself; zeros for padding rows", written=True),
    ),
    # 0: the call is checked and nothing is launched.
    scalars=(Scalar("launches", expression="1", idle=0),),
    parameters=(
        *map(Parameter, ("x", "weight", "ring", "position", "slot", "out")),
        Parameter("bias", optional=True, about="bf16 or fp32"),
    ),
    key=("x.get_device()", "x.shape"),
    size=lambda c: Size((c.x.shape[2],), "bf16", c.x.shape[0], c.x.shape[1]),
    no_work=lambda p: p.x.dim() == 3 and 0 in p.x.shape[:2],
    absent={"no_bf16": ("bf16", (0,)), "no_fp32": ("fp32", (0,))},
    derived=(
        ("channels", lambda c: c.x.shape[2]),
        ("places", lambda c: c.ring.shape[1]),
        ("tokens", lambda c: c.x.shape[1]),
    ),
    rules=(
        _WHOLE,
        _RING,
        Rule(
            lambda c: c.places >= c.tokens + BEFORE,
            f"the ring has {{c.places}} positions; {{c.tokens}} tokens need {BEFORE} more than "
            "they are",
        ),
        # A compiled function knows how many it has rows for.
        Rule(
            lambda c: c.tokens <= getattr(c, "most_tokens", MOST_TOKENS),
            f"{{c.tokens}} tokens a request, at most {MOST_TOKENS}",
        ),
        Rule(_bias_fits, "the bias does not have a number for each of {c.channels} channels"),
        Rule(
            lambda c: _same_rows(c) | _apart(_span(c, c.x, 2), _span(c, c.out, 2)),
            "out overlaps x and is not x itself",
            reason="argument",
        ),
        Rule(
            lambda c: (
                _apart(_span(c, c.ring, 2), _span(c, c.out, 2))
                & _apart(_span(c, c.ring, 2), _span(c, c.x, 2))
            ),
            "the ring overlaps x or out",
            reason="argument",
        ),
    ),
    idle={"D": CHANNELS, "places": MOST_RING, "launches": 1},
    cut=("x", "position", "slot", "out"),
    values=(_slots("slot", lambda c: c.ring.shape[0]), _LIVE),
)


def _moved(name: str, window: str, about: str, written: str) -> Op:
    """``import_`` and ``export``: all layers in one launch."""
    return Op(
        "conv_verify",
        name,
        tensors=(
            Tensor(
                *(window, "bf16", ("L", "M", "D", BEFORE), (FREE,) * 4),
                about,
                align=2,
                stride_bits=64,
                written=written == window,
            ),
            Tensor(
                *("ring", "bf16", ("L", "slots", "places", "D")),
                (Free(16), Free(16), Free(16), 1),
                "of all layers",
                align=16,
                stride_bits=64,
                written=written == "ring",
            ),
            _list("position", "M", "of the input that comes next"),
            _list("slot", "M", "of the ring; negative: nothing is moved", "rows"),
        ),
        scalars=(Scalar("launches", expression="1", idle=0),),
        parameters=tuple(map(Parameter, (window, "ring", "position", "slot"))),
        # All of it: a call of no layers must not come to a plan.
        key=(f"{window}.get_device()", f"{window}.shape"),
        size=lambda c: Size((c.ring.shape[3],), "bf16", c.slot.shape[0], 1),
        no_work=lambda p: getattr(p, window).dim() == 4 and 0 in getattr(p, window).shape[:2],
        derived=(
            ("channels", lambda c: c.ring.shape[3]),
            ("places", lambda c: c.ring.shape[2]),
        ),
        rules=(
            _WHOLE,
            _RING,
            Rule(
                lambda c: c.ring.shape[0] <= 65535,
                "{c.ring.shape[0]} layers, at most 65535",
            ),
        ),
        idle={"D": CHANNELS, "places": MOST_RING, "launches": 1},
        values=(_slots("slot", lambda c: c.ring.shape[1]), _LIVE),
    )


IMPORT = _moved("import_", "windows", "the last three inputs, the latest last", "ring")
EXPORT = _moved("export", "windows", "the last three inputs, the latest last", "windows")
OPS: Mapping[str, Op] = {op.name: op for op in (CONV, IMPORT, EXPORT)}

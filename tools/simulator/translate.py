"""Blocks of PTX as Python functions over arrays of one value a thread.

A block is translated when it first runs, twice: for all threads of a batch at once, and for some of
them, where what the others hold stays. An instruction or a form of one that is not known here is an
error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from specplan.tools.simulator import lanes
from specplan.tools.simulator.ptx import SHARED_BASE, Address, Entry, Instruction, Operand, PtxError

_UNSIGNED = {1: "bool", 16: "u32", 32: "u32", 64: "u64"}
_INTEGERS = ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64")
_BITS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "bf16": 16}
#: What says how memory is cached or ordered, and changes no value here.
_ORDER = {
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "weak",
    "volatile",
    "gpu",
    "cta",
    "sys",
    "cluster",
}
_CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}
_ATOMIC = {"relaxed", "acquire", "release"}
_SPECIAL = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
    "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%cluster_ctarank",
    "%cluster_nctarank", "%cluster_ctaid.x", "%clusterid.x",
}  # fmt: skip
_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
#: Of integers ``lo``, ``ls``, ``hi``, ``hs`` are the unsigned comparisons.
_COMPARISONS = {**_ORDERED, "ne": "!=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_NEGATED = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}

#: What ends a block.
_ENDS = ("bra", "ret", "exit", "trap", "bar.sync", "bar.red", "barrier")


def ends_block(name: str) -> bool:
    return name.startswith(_ENDS)


@dataclass(frozen=True)
class Block:
    """Straight code from ``start`` up to ``end``; the instruction at ``end - 1`` may be the one
    that ends it, and is then not part of the function.
    """

    start: int
    end: int
    last: Instruction | None


def blocks(entry: Entry) -> tuple[list[Block], dict[int, int]]:
    """The blocks in program order, and which of them begins at an instruction."""
    starts = {0, *entry.labels.values()}
    starts |= {at + 1 for at, step in enumerate(entry.code) if ends_block(step.name)}
    ordered = sorted(at for at in starts if at < len(entry.code))
    found = []
    for at, end in zip(ordered, [*ordered[1:], len(entry.code)], strict=True):
        last = entry.code[end - 1]
        found.append(Block(at, end, last if ends_block(last.name) else None))
    numbers = {block.start: number for number, block in enumerate(found)}
    numbers[len(entry.code)] = len(found)
    return found, numbers


#: A translated block: registers, machine, which threads (None: all).
Run = Callable[[list[Any], Any, Any], None]


class Translator:
    """Translates the blocks of one kernel."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.index = {name: number for number, name in enumerate(entry.widths)}
        self.constants: dict[str, Any] = {}
        self._globals: dict[str, Any] = {
            name: getattr(lanes, name) for name in dir(lanes) if not name.startswith("_")
        }
        self._globals.update(where=np.where, np=np)
        self._done: dict[tuple[int, bool], Run] = {}

    def empty_registers(self, threads: int) -> list[Any]:
        """Registers that hold what nobody should use."""
        junk = {
            1: np.zeros(threads, bool),
            8: np.full(threads, 0xDE, np.uint32),
            16: np.full(threads, 0xDEAD, np.uint32),
            32: np.full(threads, 0xDEADBEEF, np.uint32),
            64: np.full(threads, 0xDEADBEEFDEADBEEF, np.uint64),
        }
        return [junk[width] for width in self.entry.widths.values()]

    def block(self, block: Block, some: bool) -> Run:
        """The function of a block, for some of the threads or for all."""
        key = (block.start, some)
        if key not in self._done:
            end = block.end - (block.last is not None)
            writer = _Writer(self, some)
            for step in self.entry.code[block.start : end]:
                writer.write(step)
            source = "def run(R, M, m):\n" + "".join(f"    {x}\n" for x in writer.lines or ["pass"])
            scope: dict[str, Any] = {}
            exec(
                compile(source, f"<block {block.start} of {self.entry.name[:40]}>", "exec"),
                {**self._globals, **self.constants},
                scope,
            )
            self._done[key] = scope["run"]
        return self._done[key]


class _Writer:
    def __init__(self, translator: Translator, some: bool) -> None:
        self.t = translator
        self.some = some
        self.lines: list[str] = []
        self.step: Instruction = None  # type: ignore[assignment]
        #: The expression of the threads that take part, None where all do.
        self.mask: str | None = None

    # Operands

    def unknown(self, what: str = "") -> PtxError:
        text = f"{self.step.name} {', '.join(map(str, self.step.operands))}"
        return PtxError(f"line {self.step.line}: {what or 'unknown instruction'}: {text}")

    def constant(self, value: Any) -> str:
        name = f"k_{type(value).__name__}_{hash((type(value), value.tobytes())) & 0xFFFFFFFFFF:x}"
        self.t.constants[name] = value
        return name

    def width(self, operand: Operand) -> int:
        if isinstance(operand, str) and operand in self.t.entry.widths:
            return self.t.entry.widths[operand]
        return 0

    def value(self, operand: Operand, kind: str) -> str:
        """An operand as an array (or a number) of a type."""
        if not isinstance(operand, str):
            raise self.unknown("operand")
        bits = _BITS.get(kind) or int(kind[1:])
        if operand in self.t.entry.widths:
            if self.t.entry.widths[operand] != bits:
                raise self.unknown(f"{operand} has {self.t.entry.widths[operand]} bits")
            text = f"R[{self.t.index[operand]}]"
        elif operand in _SPECIAL:
            name = operand[1:].replace(".", "_")
            text = f"M.special[{name!r}]"
            if bits != 32:
                raise self.unknown("special register")
        else:
            return self.number(operand, kind, bits)
        if kind in ("s32", "s64", "f32", "f64"):
            return f"{text}.view({kind.replace('s', 'i') if kind[0] == 's' else kind})"
        if kind == "s16":
            return f"{text}.astype(u16).view(i16).astype(i32)"
        return text

    def number(self, text: str, kind: str, bits: int) -> str:
        if text in self.t.entry.shared:
            value = self.t.entry.shared[text][0]
        elif text[:2] in ("0f", "0F"):
            return self.constant(
                np.uint32(int(text[2:], 16)).view(np.float32)
                if kind == "f32"
                else np.uint32(int(text[2:], 16))
            )
        else:
            try:
                value = int(text, 0)
            except ValueError:
                raise self.unknown(f"operand {text!r}") from None
        if kind == "pred":
            return self.constant(np.bool_(value))
        if kind[0] == "f" and kind in ("f32", "f64"):
            raise self.unknown("decimal float")
        raw = value & ((1 << bits) - 1)
        storage: Any = np.uint64(raw) if bits == 64 else np.uint32(raw)
        if kind == "s32":
            storage = storage.view(np.int32)
        elif kind == "s64":
            storage = storage.view(np.int64)
        elif kind == "s16":
            storage = np.int32(raw - (1 << 16) if raw >> 15 else raw)
        return self.constant(storage)

    def predicate(self, operand: Operand) -> str:
        """A predicate, perhaps negated."""
        if isinstance(operand, str) and operand.startswith("!"):
            return f"~{self.value(operand[1:], 'pred')}"
        return self.value(operand, "pred")

    # Results

    def line(self, text: str) -> None:
        self.lines.append(text)

    def out(self, operand: Operand, text: str) -> None:
        """Give a register a value: an expression of what it is stored as."""
        if operand == "_":
            return
        if not isinstance(operand, str) or operand not in self.t.index:
            raise self.unknown("destination")
        at = f"R[{self.t.index[operand]}]"
        self.line(
            f"{at} = {text}" if self.mask is None else f"{at} = where({self.mask}, {text}, {at})"
        )

    def put(self, operand: Operand, kind: str, text: str) -> None:
        """Give a register a value of a type."""
        if kind in ("s32", "f32"):
            text = f"({text}).view(u32)"
        elif kind in ("s64", "f64"):
            text = f"({text}).view(u64)"
        elif kind in ("u16", "s16", "b16"):
            text = f"({text}).astype(u32) & u32(65535)"
        self.out(operand, text)

    # Instructions

    def write(self, step: Instruction) -> None:
        self.step = step
        mask = "m" if self.some else None
        if step.guard is not None:
            taken = ("~" if step.negated else "") + self.value(step.guard, "pred")
            self.line(f"g = {taken}" if mask is None else f"g = m & {taken}")
            mask = "g"
        self.mask = mask
        parts = step.parts
        handler = getattr(self, f"do_{parts[0]}", None)
        if handler is None:
            raise self.unknown()
        handler(parts, parts[-1], list(step.operands))

    def _allow(self, parts: list[str], *allowed: str) -> None:
        if set(parts[1:]) - set(allowed):
            raise self.unknown()

    def _arithmetic(self, parts: list[str], kind: str, o: list[Operand], sign: str) -> None:
        if kind in ("f32", "f64"):
            self._allow(parts, kind, "rn")
            self.put(o[0], kind, f"{self.value(o[1], kind)} {sign} {self.value(o[2], kind)}")
            return
        self._allow(parts, *_INTEGERS)
        plain = "b" + kind[1:]
        self.put(o[0], plain, f"{self.value(o[1], plain)} {sign} {self.value(o[2], plain)}")

    def do_add(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._arithmetic(parts, kind, o, "+")

    def do_sub(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._arithmetic(parts, kind, o, "-")

    def do_mul(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if kind == "f16x2":
            self._allow(parts, "f16x2", "rn")
            a, b = (f"f16_pairs({self.value(x, kind)})" for x in o[1:3])
            self.out(o[0], f"({a} * {b}).view(u32).reshape(-1)")
        elif "wide" in parts:
            self._allow(parts, "wide", "s32", "u32", "s16", "u16")
            self.out(o[0], self._wide_product(kind, o))
        elif "hi" in parts:
            self._allow(parts, "hi", "s32", "u32")
            self.out(o[0], f"high_product({self.value(o[1], kind)}, {self.value(o[2], kind)})")
        else:
            self._arithmetic([p for p in parts if p != "lo"], kind, o, "*")

    def _wide_product(self, kind: str, o: list[Operand]) -> str:
        a, b = self.value(o[1], kind), self.value(o[2], kind)
        if kind in ("s16", "u16"):
            return f"({a} * {b}).view(u32)"
        wide = "i64" if kind == "s32" else "u64"
        return f"({a}.astype({wide}) * {b}.astype({wide})).view(u64)"

    def do_mad(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if "wide" in parts:
            self._allow(parts, "wide", "s32", "u32")
            self.out(o[0], f"{self._wide_product(kind, o)} + {self.value(o[3], 'b64')}")
            return
        self._allow(parts, "lo", *_INTEGERS)
        plain = "b" + kind[1:]
        a, b, c = (self.value(x, plain) for x in o[1:4])
        self.put(o[0], plain, f"{a} * {b} + {c}")

    def do_fma(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        a, b, c = (self.value(x, kind) for x in o[1:4])
        if parts[1:] == ["rn", "f32"]:
            self.put(o[0], "f32", f"fma({a}, {b}, {c})")
        elif parts[1:] == ["rn", "sat", "f32"]:
            self.put(o[0], "f32", f"clamp(fma({a}, {b}, {c}))")
        elif parts[1] == "rm" and kind == "f32":
            self._allow(parts, "rm", "sat", "f32")
            self.put(o[0], "f32", f"fma_down({a}, {b}, {c}, {'sat' in parts})")
        elif kind == "f16x2" and parts[1:] == ["rn", "f16x2"]:
            a, b, c = (f"f16_pairs({x}).astype(f64)" for x in (a, b, c))
            self.out(o[0], f"({a} * {b} + {c}).astype(f16).view(u32).reshape(-1)")
        else:
            raise self.unknown()

    def do_div(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "s32", "u32", "s64", "u64")
        self.put(o[0], kind, f"divide({self.value(o[1], kind)}, {self.value(o[2], kind)})")

    def do_rem(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "s32", "u32", "s64", "u64")
        self.put(o[0], kind, f"remainder({self.value(o[1], kind)}, {self.value(o[2], kind)})")

    def _least(self, parts: list[str], kind: str, o: list[Operand], name: str) -> None:
        a, b = self.value(o[1], kind), self.value(o[2], kind)
        if kind == "f32":
            self._allow(parts, "f32", "NaN")
            function = f"np.f{name[:3]}" if "NaN" not in parts else f"np.{name}"
            self.put(o[0], kind, f"{function}({a}, {b})")
            return
        if kind == "bf16x2":
            if parts[1:] != ["NaN", "bf16x2"]:
                raise self.unknown()
            self.out(o[0], f"bf16_pairs(np.{name}, {a}, {b})")
            return
        self._allow(parts, "relu", *_INTEGERS)
        text = f"np.{name}({a}, {b})"
        self.put(o[0], kind, f"np.maximum({text}, 0)" if "relu" in parts else text)

    def do_max(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._least(parts, kind, o, "maximum")

    def do_min(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._least(parts, kind, o, "minimum")

    def _bitwise(self, parts: list[str], kind: str, o: list[Operand], sign: str) -> None:
        self._allow(parts, "pred", "b16", "b32", "b64")
        a, b = (self.predicate(x) if kind == "pred" else self.value(x, kind) for x in o[1:3])
        self.out(o[0], f"{a} {sign} {b}")

    def do_and(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._bitwise(parts, kind, o, "&")

    def do_or(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._bitwise(parts, kind, o, "|")

    def do_xor(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._bitwise(parts, kind, o, "^")

    def do_not(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "pred", "b16", "b32", "b64")
        text = f"~{self.predicate(o[1]) if kind == 'pred' else self.value(o[1], kind)}"
        self.put(o[0], kind if kind == "b16" else "b32", text)

    def do_neg(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "s32", "s64", "f32")
        self.put(o[0], kind, f"-{self.value(o[1], kind)}")

    def do_abs(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "s32", "s64", "f32")
        self.put(o[0], kind, f"np.abs({self.value(o[1], kind)})")

    def do_shl(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "b16", "b32", "b64")
        self.put(o[0], kind, f"{self.value(o[1], kind)} << {self.value(o[2], 'b32')}")

    def do_shr(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, *_INTEGERS)
        by = self.value(o[2], "b32")
        # numpy's shifts by more than the width give 0, or the sign, as PTX's do; the amount must
        # not make the value wider.
        if kind == "s32":
            by = f"{by}.view(i32)"
        elif kind == "s64":
            by = f"{by}.astype(i64)"
        elif kind == "s16":
            by = f"{by}.view(i32)"
        self.put(o[0], kind, f"{self.value(o[1], kind)} >> {by}")

    def do_shf(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1:] not in (["l", "wrap", "b32"], ["r", "wrap", "b32"]):
            raise self.unknown()
        low, high, by = (self.value(x, "b32") for x in o[1:4])
        both = f"({low}.astype(u64) | ({high}.astype(u64) << u64(32)))"
        if parts[1] == "l":
            self.out(o[0], f"(({both} << ({by} & u32(31))) >> u64(32)).astype(u32)")
        else:
            self.out(o[0], f"({both} >> ({by} & u32(31))).astype(u32)")

    def do_selp(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "f32", *_INTEGERS)
        kind = "b" + kind[1:]
        a, b = self._storage(o[1], kind), self._storage(o[2], kind)
        self.out(o[0], f"where({self.predicate(o[3])}, {a}, {b})")

    def _storage(self, operand: Operand, kind: str) -> str:
        """An operand's bits."""
        return self.value(operand, kind)

    def do_setp(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        how, rest = parts[1], parts[2:-1]
        a, b = self.value(o[1], kind), self.value(o[2], kind)
        if kind in ("f32", "f64"):
            if how in _ORDERED:
                text = f"{a} {_ORDERED[how]} {b}"
            elif how == "ne":
                text = f"({a} < {b}) | ({a} > {b})"
            elif how == "neu":
                text = f"{a} != {b}"
            elif how == "equ":
                text = f"~(({a} < {b}) | ({a} > {b}))"
            elif how in _NEGATED:
                text = f"~({a} {_NEGATED[how]} {b})"
            elif how == "nan":
                text = f"np.isnan({a}) | np.isnan({b})"
            elif how == "num":
                text = f"~(np.isnan({a}) | np.isnan({b}))"
            else:
                raise self.unknown()
        elif how in _COMPARISONS and kind in _INTEGERS:
            text = f"{a} {_COMPARISONS[how]} {b}"
        else:
            raise self.unknown()
        if rest:
            signs = {"and": "&", "or": "|", "xor": "^"}
            if len(rest) != 1 or rest[0] not in signs:
                raise self.unknown()
            text = f"({text}) {signs[rest[0]]} {self.predicate(o[3])}"
        if "|" in str(o[0]):
            raise self.unknown("two results")
        self.out(o[0], f"M.wide({text})")

    def do_mov(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "pred", "f32", *_INTEGERS)
        if isinstance(o[0], tuple):
            each = int(kind[1:]) // len(o[0])
            whole = self.value(o[1], "b" + kind[1:])
            self.line(f"x = {whole}")
            for number, part in enumerate(o[0]):
                shift = "u64" if kind.endswith("64") else "u32"
                text = f"(x >> {shift}({each * number}))"
                text = f"{text}.astype(u32)" if shift == "u64" else text
                self.out(part, f"{text} & u32({(1 << each) - 1})" if each < 32 else text)
            return
        if isinstance(o[1], tuple):
            each = int(kind[1:]) // len(o[1])
            wide = "u64" if kind.endswith("64") else "u32"
            text = " | ".join(
                f"({self.value(part, f'b{each}')}.astype({wide}) << {wide}({each * number}))"
                for number, part in enumerate(o[1])
            )
            self.out(o[0], text)
            return
        if kind == "pred":
            self.out(o[0], f"M.wide({self.predicate(o[1])})")
            return
        if isinstance(o[1], str) and o[1] in self.t.entry.parameters:
            place = self.t.entry.parameter_places[o[1]]
            self.out(o[0], f"M.wide({self.constant(np.uint64(place))})")
            return
        self.out(o[0], f"M.wide({self._storage(o[1], 'b' + kind[1:])})")

    def do_lop3(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1:] != ["b32"]:
            raise self.unknown()
        a, b, c = (self.value(x, "b32") for x in o[1:4])
        self.out(o[0], f"any_of_three({a}, {b}, {c}, {int(str(o[4]), 0)})")

    def do_prmt(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1:] != ["b32"]:
            raise self.unknown()
        a, b, c = (f"M.wide({self.value(x, 'b32')})" for x in o[1:4])
        self.out(o[0], f"permute_bytes({a}, {b}, {c})")

    def _unary(self, parts: list[str], o: list[Operand], function: str) -> None:
        if parts[1:] not in (["b32"], ["u32"]):
            raise self.unknown()
        self.out(o[0], f"{function}(M.wide({self.value(o[1], 'b32')}))")

    def do_popc(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._unary(parts, o, "count_ones")

    def do_bfind(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._unary(parts, o, "highest_one")

    def do_clz(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._unary(parts, o, "leading_zeros")

    def do_brev(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._unary(parts, o, "reverse_bits")

    def _approximate(self, parts: list[str], o: list[Operand], function: str) -> None:
        if parts[1:] == ["approx", "f32"]:
            self.put(o[0], "f32", f"{function}({self.value(o[1], 'f32')})")
        elif parts[1:] == ["approx", "ftz", "f32"]:
            self.put(o[0], "f32", f"flush({function}(flush({self.value(o[1], 'f32')})))")
        else:
            raise self.unknown()

    def do_ex2(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._approximate(parts, o, "exp2")

    def do_lg2(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._approximate(parts, o, "log2")

    def do_rcp(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._approximate(parts, o, "reciprocal")

    def do_rsqrt(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._approximate(parts, o, "reciprocal_root")

    def do_cvt(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        form = ".".join(parts[1:])
        if form == "rn.bf16x2.f32":
            high, low = (f"to_bf16({self.value(x, 'f32')})" for x in o[1:3])
            self.out(o[0], f"{low} | ({high} << u32(16))")
        elif form == "rn.f16x2.f32":
            high, low = (f"to_f16({self.value(x, 'f32')})" for x in o[1:3])
            self.out(o[0], f"{low} | ({high} << u32(16))")
        elif form == "rn.bf16.f32":
            self.out(o[0], f"to_bf16({self.value(o[1], 'f32')})")
        elif form == "rn.f16.f32":
            self.out(o[0], f"to_f16({self.value(o[1], 'f32')})")
        elif form == "f32.bf16":
            self.put(o[0], "f32", f"from_bf16({self.value(o[1], 'b16')})")
        elif form == "f32.f16":
            self.put(o[0], "f32", f"from_f16({self.value(o[1], 'b16')})")
        elif form == "rn.f16x2.e4m3x2":
            self.out(o[0], f"pairs_from_e4m3({self.value(o[1], 'b16')})")
        elif form == "rn.f16x2.e2m1x2":
            # A byte of two codes, in a register of 8, 16 or 32 bits.
            self.out(o[0], f"pairs_from_e2m1({self.value(o[1], f'b{self.width(o[1])}')})")
        elif len(parts) == 3 and parts[1] in _INTEGERS and parts[2] in _INTEGERS:
            self._convert(parts[1], parts[2], o)
        elif form in ("rn.f32.s32", "rn.f32.u32"):
            self.put(o[0], "f32", f"{self.value(o[1], parts[3])}.astype(f32)")
        else:
            raise self.unknown()

    def _convert(self, to: str, source: str, o: list[Operand]) -> None:
        bits, held = int(to[1:]), self.width(o[1])
        if held > int(source[1:]):
            # The lowest bits of a wider register.
            value = self.value(o[1], f"b{held}")
            value = f"{value}.astype(u32)" if held == 64 else value
            short = ".astype(u16).view(i16).astype(i32)" if source == "s16" else ".view(i32)"
            value = f"{value}{short if source[0] == 's' else ''}"
        else:
            value = self.value(o[1], source)
        if int(source[1:]) == 16 and source[0] != "s":
            value = f"({value} & u32(65535))"
        if bits == 64:
            signed = source[0] == "s"
            text = f"{value}.astype(i64).view(u64)" if signed else f"{value}.astype(u64)"
        elif source.endswith("64"):
            text = f"{value}.view(u64).astype(u32)"
        else:
            text = f"{value}.view(u32)" if source[0] == "s" else value
        self.out(o[0], f"{text} & u32(65535)" if bits == 16 else text)

    # Across lanes

    def do_shfl(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1] != "sync" or parts[2] not in ("up", "down", "bfly", "idx") or kind != "b32":
            raise self.unknown()
        target, _, inside = str(o[0]).partition("|")
        value, by, limits, members = (f"M.wide({self.value(x, 'b32')})" for x in o[1:5])
        self.line(
            f"x, y = M.shuffle({parts[2]!r}, {value}, {by}, {limits}, {members}, "
            f"{self.mask}, {self.step.line})"
        )
        self.out(target, "x")
        if inside:
            self.out(inside, "y")

    def do_vote(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1] != "sync" or parts[2] not in ("any", "all", "ballot", "uni"):
            raise self.unknown()
        value, members = f"M.wide({self.predicate(o[1])})", self._members(o[2])
        self.out(o[0], f"M.vote({parts[2]!r}, {value}, {members}, {self.mask}, {self.step.line})")

    def _members(self, operand: Operand) -> str:
        return f"M.wide({self.value(operand, 'b32')})"

    def do_redux(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1] != "sync" or parts[2] not in ("add", "and", "or", "xor", "min", "max"):
            raise self.unknown()
        value = f"M.wide({self.value(o[1], kind)})"
        self.put(
            o[0],
            kind,
            f"M.reduce({parts[2]!r}, {value}, {self._members(o[2])}, {self.mask}, "
            f"{self.step.line})",
        )

    def do_elect(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        lane, _, elected = str(o[0]).partition("|")
        if not elected:
            raise self.unknown()
        self.line(f"x, y = M.elect({self._members(o[1])}, {self.mask}, {self.step.line})")
        self.out(lane, "x")
        self.out(elected, "y")

    def do_bar(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1:] != ["warp", "sync"]:
            raise self.unknown()
        self.line(f"M.warp_barrier({self._members(o[0])}, {self.mask}, {self.step.line})")

    def do_mma(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        form = parts[1:]
        kinds = {"bf16": False, "f16": True}
        if (
            form[:5] != ["sync", "aligned", "m16n8k16", "row", "col"]
            or form[5] != "f32"
            or form[6] != form[7]
            or form[6] not in kinds
            or form[8:] != ["f32"]
        ):
            raise self.unknown()

        def each(x: Operand, as_kind: str) -> str:
            return "[" + ", ".join(f"M.wide({self.value(r, as_kind)})" for r in x) + "]"

        a, b, c = each(o[1], "b32"), each(o[2], "b32"), each(o[3], "b32")
        self.line(f"x = M.multiply({a}, {b}, {c}, {kinds[form[6]]}, {self.mask}, {self.step.line})")
        for number, target in enumerate(o[0]):
            self.out(target, f"x[{number}]")

    # Memory

    def _space(self, parts: list[str]) -> tuple[str, int, str, bool]:
        """State space, elements, type, and whether the access is atomic."""
        space, count, atomic = "generic", 1, False
        text = (
            ".".join(parts[1:-1])
            .replace("shared::cta", "shared")
            .replace("shared::cluster", "remote")
        )
        for part in text.split("."):
            if part in ("global", "shared", "param", "const", "local", "remote"):
                space = part
            elif part in ("v2", "v4", "v8"):
                count = int(part[1:])
            elif part in _ORDER or part in _CACHE or part.startswith(("L1::", "L2::")):
                atomic |= part in _ATOMIC
            elif part:
                raise self.unknown()
        if space not in ("global", "shared", "param", "remote"):
            raise self.unknown(f"memory of kind {space}")
        return space, count, parts[-1], atomic

    def _address(self, operand: Operand, space: str) -> str:
        if not isinstance(operand, Address):
            raise self.unknown("address")
        kind = "b64" if space == "global" else "b32"
        base = self.value(operand.base, kind)
        if operand.offset == 0:
            return f"M.wide({base})"
        bits = int(kind[1:])
        raw = operand.offset & ((1 << bits) - 1)
        return f"M.wide({base} + {self.constant(np.uint64(raw) if bits == 64 else np.uint32(raw))})"

    def do_ld(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        space, count, kind, atomic = self._space(parts)
        size = int(kind[1:]) // 8
        targets = list(o[0]) if isinstance(o[0], tuple) else [o[0]]
        if len(targets) != count:
            raise self.unknown("registers")
        if space == "param":
            assert isinstance(o[1], Address)
            if o[1].base in self.t.entry.parameters:
                self.line(f"x = M.parameter({o[1].base!r}, {o[1].offset}, {count}, {size})")
            elif self.width(o[1].base) == 64:
                self.line(
                    f"x = M.parameter_at({self._address(o[1], 'global')}, {count}, {size}, "
                    f"{self.mask}, {self.step.line})"
                )
            else:
                raise self.unknown("parameter")
        else:
            self.line(
                f"x = M.load({space!r}, {self._address(o[1], space)}, {count}, {size}, "
                f"{self.mask}, {atomic}, {self.step.line})"
            )
        for number, target in enumerate(targets):
            text, bits = f"x[{number}]", self.width(target)
            signed = kind[0] == "s"
            if signed and size < 4:
                text = f"{text}.astype(u{8 * size}).view(i{8 * size}).astype(i32).view(u32)"
            if bits == 64 and size < 8:
                text = (
                    f"{text}.view(i32).astype(i64).view(u64)" if signed else f"{text}.astype(u64)"
                )
            elif bits == 16 and size < 2:
                text = f"{text} & u32(65535)"
            elif bits < 8 * size:
                raise self.unknown(f"{target} has {bits} bits")
            self.out(target, text)

    def do_st(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        space, count, kind, atomic = self._space(parts)
        size = int(kind[1:]) // 8
        sources = list(o[1]) if isinstance(o[1], tuple) else [o[1]]
        if len(sources) != count or space == "param":
            raise self.unknown("registers")
        values = []
        for source in sources:
            bits = self.width(source) or 8 * size
            if bits < 8 * size:
                raise self.unknown(f"{source} has {bits} bits")
            values.append(f"M.wide({self.value(source, f'b{bits}')})")
        self.line(
            f"M.store({space!r}, {self._address(o[0], space)}, [{', '.join(values)}], {size}, "
            f"{self.mask}, {atomic}, {self.step.line})"
        )

    def _atomic(self, parts: list[str], kind: str, o: list[Operand], target: Operand) -> None:
        kept = [p for p in parts[1:-1] if p not in _ORDER]
        text = ".".join(kept).replace("shared::cta", "shared").replace("shared::cluster", "remote")
        space, _, how = text.partition(".")
        kinds = ("b32", "u32", "s32", "u64") if space == "global" else ("b32", "u32", "s32")
        if space not in ("global", "shared", "remote") or kind not in kinds:
            raise self.unknown()
        known = ("add", "or", "and", "xor", "min", "max", "inc", "dec", "exch", "cas")
        if how not in known[:6] + known[8:9]:
            raise self.unknown()
        self.line(
            f"x = M.atomic({space!r}, {how!r}, {self._address(o[0], space)}, "
            f"M.wide({self.value(o[1], kind)}), {self.mask}, {self.step.line})"
        )
        if target != "_":
            self.out(target, "x")

    def do_red(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._atomic(parts, kind, o, "_")

    def do_atom(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._atomic(parts, kind, o[1:], o[0])

    def do_mapa(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if parts[1:] != ["shared::cluster", "u32"]:
            raise self.unknown()
        address, rank = self.value(o[1], "b32"), f"M.wide({self.value(o[2], 'b32')})"
        self.out(o[0], f"M.remote_address({address}, {rank}, {self.mask}, {self.step.line})")

    def do_prefetch(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "global", "L1", "L2")
        self.line(f"M.prefetch({self._address(o[0], 'global')}, 1, {self.mask}, {self.step.line})")

    def do_cp(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        form = ".".join(parts[1:])
        if form == "async.commit_group":
            self.line(f"M.commit_copies({self.mask})")
        elif form == "async.wait_group":
            self.line(f"M.wait_for_copies({int(str(o[0]))}, {self.mask}, {self.step.line})")
        elif form == "async.bulk.prefetch.L2.global":
            size = int(str(o[1]))
            self.line(
                f"M.prefetch({self._address(o[0], 'global')}, {size}, {self.mask}, "
                f"{self.step.line})"
            )
        elif (
            parts[1] == "async"
            and parts[2] in ("ca", "cg")
            and parts[3] in ("shared", "shared::cta")
        ):
            self._allow(
                parts,
                "async",
                "ca",
                "cg",
                "shared",
                "shared::cta",
                "global",
                "L2::128B",
                "L2::256B",
                "L2::64B",
            )
            size = int(str(o[2]))
            wanted = f"M.wide({self.value(o[3], 'b32')})" if len(o) > 3 else "None"
            self.line(
                f"M.copy({self._address(o[0], 'shared')}, {self._address(o[1], 'global')}, {size}, "
                f"{wanted}, {self.mask}, {self.step.line})"
            )
        else:
            raise self.unknown()

    def do_griddepcontrol(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        if kind == "wait":
            self.line(f"M.wait_for_grid({self.mask})")
        elif kind != "launch_dependents":
            raise self.unknown()

    def do_fence(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "acq_rel", "sc", *_ORDER)

    def do_membar(self, parts: list[str], kind: str, o: list[Operand]) -> None:
        self._allow(parts, "gl", "cta", "sys")


__all__ = ["SHARED_BASE", "Block", "Translator", "blocks", "ends_block"]

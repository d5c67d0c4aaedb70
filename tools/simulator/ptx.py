"""Reading PTX: the entries of a module, with their parameters, shared memory, registers and
instructions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union


class PtxError(RuntimeError):
    """PTX that this package cannot read or does not know how to run; the message names it."""


@dataclass(frozen=True)
class Address:
    """``[base + offset]``: a register or a named variable, and bytes."""

    base: str
    offset: int


#: A register, name or number as it is written; an address; a vector of operands.
Operand = Union[str, Address, "tuple[str, ...]"]


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``line`` counts lines of the module's text, from 1."""

    line: int
    guard: str | None
    negated: bool
    name: str
    operands: tuple[Operand, ...]

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")


@dataclass(frozen=True)
class Entry:
    """A kernel.

    Attributes
    ----------
    parameters
        Name -> size in bytes, in order.
    shared
        Name -> (address, size in bytes) of its variables in shared memory; the size of memory that
        the launch provides is 0.
    widths
        Bits of each register; 1 for predicates.
    code, labels
        The instructions, and where in them each label points.
    """

    name: str
    parameters: Mapping[str, int]
    shared: Mapping[str, tuple[int, int]]
    static_shared: int
    widths: Mapping[str, int]
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]

    @property
    def parameter_places(self) -> Mapping[str, int]:
        """Where each parameter begins in a space of their own, with a gap behind each: a kernel may
        take the address of one, and chooses among several by it.
        """
        places, at = {}, PARAMETER_BASE
        for name, size in self.parameters.items():
            places[name] = at
            at += (-(-size // PARAMETER_STEP) + 1) * PARAMETER_STEP
        return places


#: Addresses of parameters begin here, each at a multiple of the step.
PARAMETER_BASE, PARAMETER_STEP = 4096, 16
#: Addresses of shared memory begin here, so that a null pointer is no address.
SHARED_BASE = 1024

_SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4}
_SIZES |= {"s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}
_WIDTHS = {"pred": 1} | {kind: 8 * size for kind, size in _SIZES.items()}
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr)?(?:\s+\.global)?(?:\s+\.align\s+\d+)?"
    r"\s+([\w$]+)(?:\[(\d+)\])?"
)
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
_NAME = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyz])?")


def entries(text: str) -> dict[str, Entry]:
    """The kernels of a module by name."""
    text = re.sub(r"//[^\n]*", "", text)
    found = {}
    starts = [m.start() for m in re.finditer(r"\.visible\s+\.entry", text)]
    if not starts:
        raise PtxError("the module has no entry")
    common = _shared_variables(text[: starts[0]], SHARED_BASE)
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        entry = _entry(text[start:end], text.count("\n", 0, start) + 1, common)
        found[entry.name] = entry
    return found


def _shared_variables(text: str, start: int) -> dict[str, tuple[int, int]]:
    """Variables in shared memory; those without a size lie behind all others."""
    found, open_ended, at = {}, [], start
    for align, kind, name, count in _SHARED.findall(text):
        if count == "" and f"{name}[]" in text:
            open_ended.append((name, int(align)))
            continue
        at = -(-at // int(align)) * int(align)
        size = _SIZES[kind] * int(count or 1)
        found[name] = (at, size)
        at += size
    for name, align in open_ended:
        found[name] = (-(-at // align) * align, 0)
    return found


def _entry(text: str, line: int, shared: Mapping[str, tuple[int, int]]) -> Entry:
    header, brace, body = text.partition("{")
    match = re.match(r"\.visible\s+\.entry\s+([\w$]+)", header)
    if match is None or not brace:
        raise PtxError(f"line {line}: an entry without a name or a body")
    parameters = {
        name: _SIZES[kind] * int(count or 1) for kind, name, count in _PARAMETER.findall(header)
    }
    end = max([SHARED_BASE, *(at + size for at, size in shared.values())])
    shared = {**shared, **_shared_variables(body, end)}
    static = max([0, *(at + size - SHARED_BASE for at, size in shared.values())])
    reader = _Body(line + header.count("\n"))
    reader.read(body)
    missing = {
        str(i.operands[0])
        for i in reader.code
        if i.name.startswith("bra") and i.operands[0] not in reader.labels
    }
    if missing:
        raise PtxError(f"{match[1]}: branches to {', '.join(sorted(missing))}, which is nowhere")
    return Entry(
        match[1], parameters, shared, static, reader.widths, tuple(reader.code), reader.labels
    )


class _Body:
    """Reads the body of an entry. Names declared in a nested block get names of their own."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = [{}]
        self.made = 0

    def read(self, text: str) -> None:
        at = 0
        for match in re.finditer(
            r"\s+|([\w$]+):(?!:)|([{}])|([^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);", text
        ):
            if match.start() != at:
                raise PtxError(f"line {self.line}: cannot read {text[at : at + 60]!r}")
            at = match.end()
            label, brace, statement = match.groups()
            if label:
                self.labels[label] = len(self.code)
            elif brace == "{":
                self.scopes.append({})
            elif brace == "}":
                self.scopes.pop()
                if not self.scopes:
                    return
            elif statement and statement.strip():
                self._statement(statement.strip())
            self.line += match.group().count("\n")

    def _statement(self, text: str) -> None:
        # Directives that end with their line stand before the statement.
        while text.startswith((".loc", ".file")):
            text = text.partition("\n")[2].strip()
        if text.startswith(".reg"):
            self._declare(text)
            return
        if not text or text.startswith((".shared", ".pragma")):
            return
        guard, negated = None, False
        guarded = re.match(r"@(!?)([%\w$]+)\s+(.*)", text, re.S)
        if guarded:
            negated, guard = guarded[1] == "!", self._name(guarded[2])
            text = guarded[3]
        name, _, tail = (
            text.partition(" ") if "\t" not in text.split(" ")[0] else text.partition("\t")
        )
        operands = tuple(
            self._operand(each.strip())
            for each in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", tail)
        )
        self.code.append(Instruction(self.line, guard, negated, name.strip(), operands))

    def _declare(self, text: str) -> None:
        kind, _, names = text[len(".reg") :].strip().lstrip(".").partition(" ")
        width = _WIDTHS.get(kind.strip())
        if width is None:
            raise PtxError(f"line {self.line}: registers of type {kind!r}")
        for each in re.split(r"[,\s]+", names.strip()):
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", each)
            if many:
                self.widths.update({f"{many[1]}{i}": width for i in range(int(many[2]))})
            else:
                self.made += 1
                unique = f"{each}.{self.made}"
                self.scopes[-1][each] = unique
                self.widths[unique] = width

    def _name(self, text: str) -> str:
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        return text

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return tuple(self._name(each.strip()) for each in text[1:-1].split(","))
        if text.startswith("["):
            base, plus, offset = text[1:-1].partition("+")
            if not plus:
                base, minus, offset = text[1:-1].partition("-")
                offset = f"-{offset}" if minus else "0"
            return Address(self._name(base.strip()), int(offset.strip() or "0", 0))
        return self._name(text)

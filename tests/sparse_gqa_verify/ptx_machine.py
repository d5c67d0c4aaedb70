"""Runs the PTX of a kernel on a CPU, one warp of numpy lanes at a time.

It knows the instructions that ``sparse_gqa_verify`` compiles to and refuses any other. Shared
memory starts as garbage, every access is checked against the buffers that exist, and asynchronous
copies land either at once or only when they are waited for, so that a missing wait and a buffer
that is overwritten too early both show.

The CTAs of a cluster run one after another from cluster barrier to cluster barrier, the first ahead
of all others, and what a CTA leaves behind becomes garbage: memory of another CTA that is read
without a barrier before, or with none after, shows too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from specplan.kernels.sparse_gqa_verify.reference import E2M1

Lanes = np.ndarray
U32, U64, F32 = np.uint32, np.uint64, np.float32
_LANES = np.arange(32)
#: Where global memory begins, and the gap between buffers.
_BASE, _GAP = 1 << 32, 1 << 16
#: What an address of shared memory in a cluster holds above the address in its CTA: rank + 1.
_RANK_BITS = 24
#: What takes the low 32 bits of its operands and results, whatever their sign.
_MODULAR = ("add", "sub", "and", "or", "xor", "mul.lo")
#: What ``_Warp.run`` does itself, besides branches and barriers of the cluster.
_CONTROL = ("ret", "exit", "bar.sync", "bar.red.or.pred")
_ARRIVALS = tuple(f"barrier.cluster.arrive.{order}.aligned" for order in ("release", "relaxed"))


#: Where the operands of an MMA stand, by register, lane and half: A is 16 x 16, B is 16 x 8, and of
#: C, which is 16 x 8, a register holds one value.
_ROW, _QUAD = _LANES[None, :, None] >> 2, _LANES[None, :, None] & 3
_REGISTER, _HALF = np.arange(4)[:, None, None], np.arange(2)[None, None, :]
_A_ROWS = np.broadcast_to(_ROW + 8 * (_REGISTER % 2), (4, 32, 2))
_A_COLUMNS = 2 * _QUAD + _HALF + 8 * (_REGISTER // 2)
_B_ROWS = 2 * _QUAD + _HALF + 8 * _REGISTER[:2]
_B_COLUMNS = np.broadcast_to(_ROW, (2, 32, 2))
_C_ROWS = (_ROW + 8 * (_REGISTER // 2))[:, :, 0]
_C_COLUMNS = (2 * _QUAD + _REGISTER % 2)[:, :, 0]


class Memory:
    """Global memory: copies of torch storages, at addresses of our own."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, np.ndarray, torch.Tensor]] = []
        self._next = _BASE

    def place(self, tensor: torch.Tensor) -> int:
        """Address of a tensor's first element."""
        storage = tensor.untyped_storage()
        for base, _, owner in self._parts:
            if owner.untyped_storage().data_ptr() == storage.data_ptr():
                return base + tensor.storage_offset() * tensor.itemsize
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        base = self._next
        self._parts.append((base, raw.numpy(), tensor))
        self._next += (raw.numel() // _GAP + 2) * _GAP
        return base + tensor.storage_offset() * tensor.itemsize

    def find(self, addresses: Lanes, size: int) -> tuple[np.ndarray, np.ndarray]:
        """``(bytes of the part, offsets)``; all lanes of one access lie in one part."""
        low, high = int(addresses.min()), int(addresses.max())
        for base, raw, _ in self._parts:
            if base <= low and high + size <= base + raw.size:
                return raw, (addresses - U64(base)).astype(np.int64)
        raise IndexError(f"access outside of every buffer: {low:#x} .. {high:#x}")


@dataclass
class Instruction:
    guard: str | None
    negated: bool
    name: str
    operands: list[Any]
    target: int = -1
    parts: list[str] = field(init=False)
    #: The last part of the name: what it works on.
    kind: str = field(init=False)
    #: Which method of a warp carries it out; None where control flow does, or nothing can.
    do: Callable[..., None] | None = field(init=False)
    control: bool = field(init=False)

    def __post_init__(self) -> None:
        self.parts = self.name.split(".")
        self.kind = self.parts[-1]
        self.do = getattr(_Warp, f"do_{self.parts[0]}", None)
        self.control = self.name.startswith(("bra", "barrier.cluster")) or self.name in _CONTROL


def parse(ptx: str, entry: str, number: int = 0) -> tuple[list[Instruction], list[str]]:
    """Instructions and parameter names of an entry: of those whose name contains ``entry``, which
    may be two, the one at ``number``.
    """
    text = re.sub(r"//[^\n]*", "", ptx)
    _, *bodies = re.split(r"\.visible \.entry", text)
    chosen = [body for body in bodies if entry in body.partition("(")[0]][number]
    header, _, rest = chosen.partition("{")
    parameters = re.findall(r"(\w+_param_\d+)", header)
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    for statement in rest.split(";"):
        line = statement.strip()
        while True:
            line = line.strip()
            label = re.match(r"(\$\w+):", line)
            if label:
                labels[label.group(1)] = len(code)
                line = line[label.end() :]
            elif line[:1] == "}" or re.match(r"\{\s*\.reg", line):
                line = line[1:]
            elif line.startswith((".loc", ".pragma")):
                line = line.partition("\n")[2]
            else:
                break
        if not line or line.startswith((".reg", ".shared")):
            continue
        guard, negated = None, False
        match = re.match(r"@(!?)(%?\w+)\s+(.*)", line, re.S)
        if match:
            negated, guard, line = match.group(1) == "!", match.group(2), match.group(3)
        name, _, tail = line.partition(" ") if " " in line.split("\t")[0] else line.partition("\t")
        operands = [_operand(o) for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", tail)]
        code.append(Instruction(guard, negated, name.strip(), operands))
    for instruction in code:
        if instruction.name.startswith("bra"):
            instruction.target = labels[instruction.operands[0]]
    return code, parameters


def _operand(text: str) -> Any:
    text = text.strip()
    if text[0] == "{":
        return [o.strip() for o in text[1:-1].split(",")]
    if text[0] == "[":
        inner = text[1:-1].strip()
        base, _, offset = inner.partition("+")
        return (base.strip(), int(offset or 0))
    return text


@dataclass
class _Warp:
    index: int
    code: list[Instruction]
    machine: Machine
    cta: int
    #: Shared memory of the CTAs of the cluster, and which of them this warp's is.
    ranks: list[np.ndarray]
    rank: int
    arrived: bool = False
    registers: dict[str, Lanes] = field(default_factory=dict)
    answer: bool = False
    current: list[Any] = field(default_factory=list)
    groups: list[list[Any]] = field(default_factory=list)

    @property
    def shared(self) -> np.ndarray:
        return self.ranks[self.rank]

    # ----- operands -----

    def read(self, operand: Any, kind: type = U32) -> Lanes:
        if isinstance(operand, str):
            found = self.registers.get(operand)
            if found is not None:
                return found
            if operand == "%tid.x":
                return (_LANES + 32 * self.index).astype(U32)
            if operand == "%ctaid.x":
                return np.full(32, self.cta, U32)
            return _immediate(operand, kind)
        raise TypeError(operand)

    def write(self, name: str, value: Lanes, mask: Lanes | None) -> None:
        if mask is None or name not in self.registers:
            self.registers[name] = value
        else:
            self.registers[name] = np.where(mask, value, self.registers[name])

    def floats(self, operand: Any) -> Lanes:
        return self.read(operand).astype(U32).view(F32)

    def signed(self, operand: Any) -> Lanes:
        return self.read(operand).astype(U32).view(np.int32)

    # ----- control -----

    def run(self) -> Iterator[tuple[str, Lanes | None]]:
        """Yields at barriers, of the CTA and of the cluster; ("or", predicate) for a reduction,
        whose result comes back in ``self.answer``.
        """
        pcs = np.zeros(32, np.int64)
        pc, end = 0, len(self.code)
        uniform = True
        while True:
            if uniform:
                mask = None
            else:
                pc = int(pcs.min())
                mask = pcs == pc
            if pc >= end:
                return
            step = self.code[pc]
            active = mask
            if step.guard is not None:
                taken = self.registers[step.guard].astype(bool)
                if step.negated:
                    taken = ~taken
                active = taken if mask is None else (taken & mask)
            name = step.name
            if not step.control:
                if active is None or active.any():
                    self.execute(step, active)
            elif name.startswith("bra"):
                if active is None or active.all():
                    if uniform:
                        pc = step.target
                    else:
                        pcs[:] = step.target
                        uniform, pc = True, step.target
                    continue
                if uniform:
                    if not active.any():
                        pc += 1
                        continue
                    pcs[:] = pc + 1
                    pcs[active] = step.target
                    uniform = False
                else:
                    pcs[mask] = pc + 1
                    pcs[active] = step.target
                    if (pcs == pcs[0]).all():
                        uniform, pc = True, int(pcs[0])
                continue
            elif name in ("ret", "exit"):
                if uniform:
                    return
                pcs[mask] = end
                continue
            elif name == "bar.sync":
                assert uniform, "a barrier in divergent code"
                yield ("sync", None)
            elif name.startswith("barrier.cluster"):
                assert uniform, "a barrier in divergent code"
                waits = name == "barrier.cluster.wait.acquire.aligned"
                assert waits or name in _ARRIVALS, name
                assert self.arrived == waits, "each arrival has its wait"
                self.arrived = not waits
                if waits:
                    yield ("cluster", None)
            elif name == "bar.red.or.pred":
                yield ("or", self.registers[step.operands[2]])
                self.write(step.operands[0], np.full(32, self.answer), None)
            if uniform:
                pc += 1
            else:
                pcs[mask] = pc + 1
                if (pcs == pcs[0]).all():
                    uniform, pc = True, int(pcs[0])

    # ----- instructions -----

    def execute(self, step: Instruction, mask: Lanes | None) -> None:
        if step.do is None:
            raise NotImplementedError(step.name)
        step.do(self, step.name, step.parts, step.kind, step.operands, mask)

    def do_mov(self, name: str, parts: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if isinstance(o[0], list):
            value = self.read(o[1])
            width = 32 // len(o[0])
            for i, part in enumerate(o[0]):
                bits = (value >> U32(width * i)) & U32((1 << width) - 1)
                self.write(part, bits, mask)
            return
        wide = U64 if kind in ("b64", "u64") else U32
        if kind == "pred":
            known = self.registers.get(o[1])
            self.write(o[0], np.full(32, bool(int(o[1]))) if known is None else known, mask)
            return
        self.write(o[0], self.read(o[1], wide), mask)

    def _integer(self, kind: str, operand: Any) -> Lanes:
        if kind in ("s32",):
            return self.signed(operand).astype(np.int64)
        if kind in ("u32", "b32"):
            return self.read(operand).astype(np.int64)
        if kind == "s64":
            return self.read(operand, U64).view(np.int64)
        return self.read(operand, U64)

    def _put(self, kind: str, name: str, value: Lanes, mask: Any) -> None:
        if kind.endswith("32"):
            self.write(name, (value.astype(np.int64) & 0xFFFFFFFF).astype(U32), mask)
        else:
            self.write(
                name, value.astype(U64) if value.dtype != np.int64 else value.view(U64), mask
            )

    def _two(self, name: str, kind: str, o: list[Any], mask: Any, integer: Any, real: Any) -> None:
        if kind == "f32":
            value = real(self.floats(o[1]), self.floats(o[2])).astype(F32)
            self.write(o[0], value.view(U32), mask)
        elif kind == "pred":
            self.write(o[0], integer(self.registers[o[1]], self.registers[o[2]]), mask)
        elif kind.endswith("64"):
            a, b = self.read(o[1], U64), self.read(o[2], U64)
            self.write(o[0], integer(a, b).astype(U64), mask)
        elif name.startswith(_MODULAR):
            assert kind in ("s32", "u32", "b32"), name
            self.write(o[0], integer(self.read(o[1]), self.read(o[2])), mask)
        else:
            self._put(
                kind, o[0], integer(self._integer(kind, o[1]), self._integer(kind, o[2])), mask
            )

    def do_add(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._two(n, kind, o, mask, lambda a, b: a + b, lambda a, b: a + b)

    def do_sub(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._two(n, kind, o, mask, lambda a, b: a - b, lambda a, b: a - b)

    def do_and(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._two(n, kind, o, mask, lambda a, b: a & b, None)

    def do_or(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._two(n, kind, o, mask, lambda a, b: a | b, None)

    def do_xor(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._two(n, kind, o, mask, lambda a, b: a ^ b, None)

    def do_max(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._two(n, kind, o, mask, np.maximum, np.fmax)

    def do_min(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if "relu" in p:
            self._two(n, kind, o, mask, lambda a, b: np.maximum(np.minimum(a, b), 0), None)
        else:
            self._two(n, kind, o, mask, np.minimum, np.fmin)

    def do_not(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if kind == "pred":
            self.write(o[0], ~self.registers[o[1]].astype(bool), mask)
        else:
            self.write(o[0], ~self.read(o[1]), mask)

    def do_neg(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if kind == "f32":
            self.write(o[0], (-self.floats(o[1])).view(U32), mask)
        else:
            self._put(kind, o[0], -self._integer(kind, o[1]), mask)

    def do_abs(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._put(kind, o[0], np.abs(self._integer(kind, o[1])), mask)

    def do_mul(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if kind == "f16x2":
            a = np.ascontiguousarray(self.read(o[1])).view(np.float16)
            b = np.ascontiguousarray(self.read(o[2])).view(np.float16)
            self.write(o[0], (a * b).view(U32), mask)
        elif "wide" in p:
            value = self._integer(kind, o[1]) * self._integer(kind, o[2])
            self.write(o[0], value.view(U64), mask)
        elif "hi" in p:
            value = self.read(o[1]).astype(U64) * self.read(o[2]).astype(U64)
            self.write(o[0], (value >> U64(32)).astype(U32), mask)
        else:
            self._two(n, kind, o, mask, lambda a, b: a * b, lambda a, b: a * b)

    def do_mad(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if "wide" in p:
            value = self._integer(kind, o[1]) * self._integer(kind, o[2])
            self.write(o[0], value.view(U64) + self.read(o[3], U64), mask)
        elif kind.endswith("64"):
            value = self.read(o[1], U64) * self.read(o[2], U64) + self.read(o[3], U64)
            self.write(o[0], value, mask)
        else:
            value = self._integer(kind, o[1]) * self._integer(kind, o[2]) + self._integer(
                kind, o[3]
            )
            self._put(kind, o[0], value, mask)

    def do_div(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        a, b = self._integer(kind, o[1]), self._integer(kind, o[2])
        b = np.where(b == 0, 1, b)
        self._put(kind, o[0], np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), mask)

    def do_rem(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        a, b = self._integer(kind, o[1]), self._integer(kind, o[2])
        b = np.where(b == 0, 1, b)
        self._put(kind, o[0], np.sign(a) * (np.abs(a) % np.abs(b)), mask)

    def do_shl(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        by = self.read(o[2]).astype(U64)
        value = self.read(o[1], U64).astype(U64) << np.minimum(by, U64(63))
        self.write(o[0], value if kind.endswith("64") else value.astype(U32), mask)

    def do_shr(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        by = np.minimum(self.read(o[2]).astype(np.int64), 63)
        if kind == "s32":
            self._put(kind, o[0], self.signed(o[1]).astype(np.int64) >> by, mask)
        elif kind.endswith("32"):
            self._put(kind, o[0], self.read(o[1]).astype(np.int64) >> by, mask)
        else:
            self.write(o[0], self.read(o[1], U64) >> by.astype(U64), mask)

    def do_selp(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        wide = U64 if kind.endswith("64") else U32
        value = np.where(
            self.registers[o[3]].astype(bool), self.read(o[1], wide), self.read(o[2], wide)
        )
        self.write(o[0], value, mask)

    def do_setp(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        how = p[1]
        if kind == "f32":
            a, b = self.floats(o[1]), self.floats(o[2])
        else:
            a, b = self._integer(kind, o[1]), self._integer(kind, o[2])
        value = {
            "eq": lambda: a == b,
            "ne": lambda: a != b,
            "neu": lambda: a != b,
            "lt": lambda: a < b,
            "le": lambda: a <= b,
            "gt": lambda: a > b,
            "ge": lambda: a >= b,
            "gtu": lambda: ~(a <= b),
            "nan": lambda: np.isnan(a) | np.isnan(b),
        }[how]()
        self.write(o[0], value, mask)

    def do_lop3(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        assert int(o[4], 0) == 0xEA
        self.write(o[0], (self.read(o[1]) & self.read(o[2])) | self.read(o[3]), mask)

    def do_prmt(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        both = self.read(o[1]).astype(U64) | (self.read(o[2]).astype(U64) << U64(32))
        selector = int(o[3], 0)
        value = np.zeros(32, U32)
        for i in range(4):
            byte = (selector >> (4 * i)) & 15
            assert byte < 8
            value |= ((both >> U64(8 * byte)) & U64(255)).astype(U32) << U32(8 * i)
        self.write(o[0], value, mask)

    def do_popc(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        raw = np.ascontiguousarray(self.read(o[1]).astype(U32)).view(np.uint8).reshape(32, 4)
        self.write(o[0], np.unpackbits(raw, axis=1).sum(1).astype(U32), mask)

    def do_bfind(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        assert n == "bfind.u32", n
        value = self.read(o[1]).astype(np.int64)
        found = np.array([int(x).bit_length() - 1 for x in value])
        self._put("s32", o[0], found, mask)

    def do_fma(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        a, b, c = (self.floats(x).astype(np.float64) for x in o[1:4])
        value = a * b + c
        if "rm" in p:
            value = np.floor(value)  # used where a unit is the last place
        if "sat" in p:
            value = np.where(np.isnan(value), 0, np.clip(value, 0, 1))
        self.write(o[0], value.astype(F32).view(U32), mask)

    def do_ex2(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self.write(o[0], np.exp2(self.floats(o[1])).astype(F32).view(U32), mask)

    def do_rcp(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self.write(o[0], (F32(1) / self.floats(o[1])).view(U32), mask)

    def do_cvt(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if n == "cvt.rn.bf16x2.f32":
            pair = [
                torch.from_numpy(self.floats(x).copy()).bfloat16().view(torch.int16) for x in o[1:]
            ]
            high, low = (x.numpy().view(np.uint16).astype(U32) for x in pair)
            self.write(o[0], low | (high << U32(16)), mask)
        elif n == "cvt.rn.f16x2.f32":
            high, low = (
                self.floats(x).astype(np.float16).view(np.uint16).astype(U32) for x in o[1:]
            )
            self.write(o[0], low | (high << U32(16)), mask)
        elif n == "cvt.rn.f16x2.e4m3x2":
            value = self.read(o[1])
            low, high = (_E4M3[(value >> U32(s)) & U32(255)].astype(U32) for s in (0, 8))
            self.write(o[0], low | (high << U32(16)), mask)
        elif n == "cvt.rn.f16x2.e2m1x2":
            value = self.read(o[1])
            low, high = (_E2M1[(value >> U32(s)) & U32(15)].astype(U32) for s in (0, 4))
            self.write(o[0], low | (high << U32(16)), mask)
        elif n == "cvt.s64.s32":
            self.write(o[0], self.signed(o[1]).astype(np.int64).view(U64), mask)
        elif n == "cvt.u64.u32":
            self.write(o[0], self.read(o[1]).astype(U64), mask)
        elif n == "cvt.u32.u64":
            self.write(o[0], self.read(o[1], U64).astype(U32), mask)
        else:
            raise NotImplementedError(n)

    # ----- lanes -----

    def do_shfl(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        assert mask is None, "a shuffle in divergent code"
        value = self.read(o[1])
        by = self.read(o[2]).astype(np.int64)
        source = {"up": _LANES - by, "bfly": _LANES ^ by, "idx": by & 31}[p[2]]
        source = np.where(source < 0, _LANES, source)
        self.write(o[0], value[source], mask)

    def do_vote(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self.write(o[0], np.full(32, self.registers[o[1]].any()), mask)

    def do_redux(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        self._put("s32", o[0], np.full(32, self.signed(o[1]).astype(np.int64).sum()), mask)

    def do_bar(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        assert n == "bar.warp.sync" and mask is None

    def do_griddepcontrol(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        pass

    def do_mma(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        assert mask is None
        f16 = ".f16.f16." in n

        def halves(registers: list[str]) -> np.ndarray:
            """Registers x lanes x 2."""
            raw = np.stack([self.read(each) for each in registers])
            if f16:
                return raw.view(np.float16).reshape(-1, 32, 2).astype(np.float64)
            pair = raw.view(np.uint16).reshape(-1, 32, 2).astype(U32) << U32(16)
            return pair.view(F32).astype(np.float64)

        a, b = np.zeros((16, 16)), np.zeros((16, 8))
        a[_A_ROWS, _A_COLUMNS] = halves(o[1])
        b[_B_ROWS, _B_COLUMNS] = halves(o[2])
        old = np.stack([self.floats(each) for each in o[3]])
        values = old + (a @ b).astype(F32)[_C_ROWS, _C_COLUMNS]
        for out, value in zip(o[0], values.view(U32), strict=True):
            self.write(out, value, mask)

    # ----- memory -----

    def _address(self, operand: Any, wide: bool) -> Lanes:
        base, offset = operand
        kind = U64 if wide else U32
        return self.read(base, kind) + kind(offset)

    def _bytes(self, space: str, addresses: Lanes, size: int) -> tuple[np.ndarray, np.ndarray]:
        assert not (addresses % size).any(), f"misaligned {space} access of {size} bytes"
        if space == "shared::cluster":
            ranks = addresses >> _RANK_BITS
            assert ranks.min() > 0, "an address of no rank"
            addresses = addresses & U32((1 << _RANK_BITS) - 1)
            assert int(addresses.max()) + size <= self.shared.size
            # All ranks side by side.
            at = (ranks.astype(np.int64) - 1) * self.shared.size + addresses
            return self.machine.cluster, at
        if space == "shared":
            assert int(addresses.max()) + size <= self.shared.size
            return self.shared, addresses.astype(np.int64)
        return self.machine.memory.find(addresses, size)

    def do_ld(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        count = int(p[2][1:]) if p[2].startswith("v") else 1
        width = int(re.sub(r"\D", "", kind)) // 8
        names = o[0] if isinstance(o[0], list) else [o[0]]
        register = U64 if width == 8 else U32
        if p[1] == "param":
            base, offset = o[1]
            raw = self.machine.parameters[base]
            for i, name in enumerate(names):
                piece = raw[offset + i * width : offset + (i + 1) * width]
                value = int.from_bytes(piece, "little")
                self.write(name, np.full(32, value, register), mask)
            return
        live = np.ones(32, bool) if mask is None else mask
        addresses = self._address(o[1], p[1] == "global")[live]
        raw, at = self._bytes(p[1], addresses, count * width)
        words, at = _words(raw, at, width)
        for i, name in enumerate(names):
            value = np.zeros(32, register)
            value[live] = words[at + i]
            self.write(name, value, mask)

    def do_st(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        count = int(p[2][1:]) if p[2].startswith("v") else 1
        width = int(re.sub(r"\D", "", kind)) // 8
        names = o[1] if isinstance(o[1], list) else [o[1]]
        register = U64 if width == 8 else U32
        live = np.ones(32, bool) if mask is None else mask
        addresses = self._address(o[0], p[1] == "global")[live]
        raw, at = self._bytes(p[1], addresses, count * width)
        words, at = _words(raw, at, width)
        for i, name in enumerate(names):
            words[at + i] = self.read(name, register)[live].astype(words.dtype)

    def do_mapa(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        ranks = self.read(o[2])
        live = np.ones(32, bool) if mask is None else mask
        assert (ranks[live] < len(self.ranks)).all(), "no such rank"
        self.write(o[0], self.read(o[1]) + ((ranks + U32(1)) << U32(_RANK_BITS)), mask)

    def do_red(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        live = np.ones(32, bool) if mask is None else mask
        words = self.shared.view(U32)
        at = (self._address(o[0], False)[live] // 4).astype(np.int64)
        value = self.read(o[1]).astype(U32)[live]
        (np.bitwise_or if p[2] == "or" else np.add).at(words, at, value)

    def do_atom(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        assert n == "atom.shared.or.b32", n
        live = np.ones(32, bool) if mask is None else mask
        words = self.shared.view(U32)
        at = (self._address(o[1], False) // 4).astype(np.int64)
        value = self.read(o[2]).astype(U32)
        before = np.zeros(32, U32)
        # A lane after another, as hardware may: each sees what those before it have set.
        for lane in np.flatnonzero(live):
            before[lane] = words[at[lane]]
            words[at[lane]] |= value[lane]
        self.write(o[0], before, mask)

    def do_prefetch(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        # Moves nothing that a program sees, but the memory must be there.
        live = np.ones(32, bool) if mask is None else mask
        if live.any():
            self._bytes("global", self._address(o[0], True)[live], 1)

    def do_cp(self, n: str, p: list[str], kind: str, o: list[Any], mask: Any) -> None:
        if "commit_group" in n:
            self.groups.append(self.current)
            self.current = []
        elif "wait_group" in n:
            keep = int(o[0])
            while len(self.groups) > keep:
                for target, data in self.groups.pop(0):
                    self.shared[target] = data
        else:
            size = int(o[2])
            live = np.ones(32, bool) if mask is None else mask
            targets = self._address(o[0], False)
            sources = self._address(o[1], True)
            real = live & (self.read(o[3]) != 0) if len(o) > 3 else live
            data = np.zeros((32, size), np.uint8)
            if real.any():
                raw, at = self._bytes("global", sources[real], size)
                data[real] = raw[at[:, None] + np.arange(size)]
            _, place = self._bytes("shared", targets[live], size)
            where = place[:, None] + np.arange(size)
            if self.machine.eager:
                self.shared[where] = data[live]
            else:
                self.current.append((where, data[live]))


def _words(raw: np.ndarray, at: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory as numbers of ``width`` bytes, and which of them stand at aligned offsets."""
    kind = {1: np.uint8, 2: np.uint16, 4: U32, 8: U64}[width]
    return raw[: raw.size // width * width].view(kind), at // width


@cache
def _immediate(operand: str, kind: type) -> Lanes:
    if operand.startswith("__"):  # where shared memory begins
        value = 0
    elif operand.startswith("0f"):
        value, kind = int(operand[2:], 16), U32
    else:
        value = int(operand, 0) & (0xFFFFFFFFFFFFFFFF if kind is U64 else 0xFFFFFFFF)
    lanes = np.full(32, value, kind)
    lanes.flags.writeable = False
    return lanes


def _half_bits(values: torch.Tensor) -> np.ndarray:
    return values.half().numpy().view(np.uint16)


_E4M3 = _half_bits(torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn))
_E2M1 = _half_bits(torch.tensor(E2M1 + tuple(-x for x in E2M1)))


class Machine:
    """One kernel with its parameters in place."""

    def __init__(
        self,
        ptx: str,
        entry: str,
        memory: Memory,
        arguments: list[bytes],
        shared: int,
        eager: bool,
        number: int = 0,
    ) -> None:
        self.code, names = parse(ptx, entry, number)
        assert len(names) == len(arguments), (len(names), len(arguments))
        self.parameters = dict(zip(names, arguments, strict=True))
        self.memory = memory
        self.eager = eager
        self.size = shared
        self.cluster = np.zeros(0, np.uint8)

    @np.errstate(all="ignore")
    def run(self, ctas: int, threads: int, cluster: int = 1) -> None:
        assert ctas % cluster == 0, "a grid is whole clusters"
        for first in range(0, ctas, cluster):
            self.cluster = np.full(cluster * self.size, 0xFF, np.uint8)
            ranks = np.split(self.cluster, cluster)
            flows = [self._cta(first + rank, threads, ranks, rank) for rank in range(cluster)]
            while True:
                met = []
                for flow, shared in zip(flows, ranks, strict=True):
                    met.append(next(flow, False))
                    if not met[-1]:
                        shared[:] = 0xFF
                assert len(set(met)) == 1, "some CTAs wait for ever"
                if not met[0]:
                    break

    def _cta(self, cta: int, threads: int, ranks: list[np.ndarray], rank: int) -> Iterator[bool]:
        """One CTA; yields at barriers of the cluster."""
        warps = [_Warp(i, self.code, self, cta, ranks, rank) for i in range(threads // 32)]
        flows = [warp.run() for warp in warps]
        while True:
            events = [next(flow, None) for flow in flows]
            if all(event is None for event in events):
                return
            kinds = {None if event is None else event[0] for event in events}
            assert len(kinds) == 1, "some warps wait for ever"
            if kinds == {"cluster"}:
                yield True
            reduced = [event[1] for event in events if event is not None and event[0] == "or"]
            answer = any(value is not None and bool(value.any()) for value in reduced)
            for warp in warps:
                warp.answer = answer

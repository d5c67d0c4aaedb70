"""One call path for the ops of all families, made from what an op declares
(``plans/signature.py``).

A call of an op is a plain function whose text is written from the declaration: one dictionary
look-up and one compiled call. What the arguments must look like is checked by the compiled
function, before any CUDA call and at no cost to Python: dtypes, ranks, equal extents by the
module's own checks, ranges by the declared rules. Whatever the fast path stumbles over goes to
:meth:`Op.slow_path`, which forgets how the call was tried and answers from the arguments alone:

``resolve``          arguments -> compiled function and its arguments, or why the call is declined
``plan_for``         the plan of the call's cell on its device, with its code loaded there
``launch``           call the compiled function, with adapted arguments if it refuses these
``adapt_arguments``  other views of the same memory that the compiled function may take
``in_parts``         the same call over parts of its requests, where no cell holds all of them
``remember``         keep the plan for the fast path, once the compiled function has taken the call

A plan is remembered by less than what it follows from. That no earlier call changes an answer rests
on two things: the compiled function checks the rest, and its refusal is never an answer before the
call has been resolved anew.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from numbers import Integral, Real
from operator import index
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from specplan import library
from specplan.checking import Checks
from specplan.declines import Declines
from specplan.errors import (
    InParts,
    LaunchError,
    Reason,
    SpecplanError,
    Uncertified,
    UncertifiedCell,
)
from specplan.forked import refuse, watched
from specplan.plans import signature
from specplan.plans.cell import Cell
from specplan.plans.families import FAMILIES as PLANNING
from specplan.plans.manifest import Group, Manifest, PlanRecord
from specplan.plans.signature import Parameter, Size, Tensor

#: What a compiled function raises for arguments that it does not take, always before it launches.
ARGUMENT_ERRORS = (TypeError, ValueError, OverflowError)
#: What reading the shape of something that is not the tensor that an op wants raises.
SHAPE_ERRORS = (AttributeError, IndexError, TypeError, ValueError)
#: Plans remembered by an op before it forgets them all; a server has some thousand kinds of call, a
#: fuzzer has more.
MOST_REMEMBERED = 1 << 16

DTYPES: Mapping[str, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Picked:
    """The plan of one op for one cell, ready to launch on one arch.

    Attributes
    ----------
    cell, certified
        The cell, and whether a certificate covers it (else it runs as a candidate).
    plan
        The plan's record in the manifest: symbol, constants, registers, device-code hash.
    launch
        Launch parameters of this cell, by name.
    function
        The compiled function, positional arguments only.
    """

    cell: Cell
    certified: bool
    plan: PlanRecord
    launch: Mapping[str, int]
    function: Any


class ArchPack(Protocol):
    """The pack of one arch, as :mod:`specplan.loading` opens it."""

    directory: Path
    manifest: Manifest
    functions: dict[str, Any]
    #: What is wrong with the pack's marks, or nothing; said where a call is declined for it.
    unbacked: str

    @property
    def problems(self) -> Mapping[tuple[str, tuple[int, ...]], list[str]]:
        """(family, geometry) -> the problems of that geometry."""
        ...

    @property
    def automatic(self) -> Mapping[tuple[str, str, str, int, int], Group]:
        """(family, problem, dtype, tokens, requests) -> the group with the rule's splits."""
        ...


class LoadedPack(Protocol):
    """What an op asks of the pack that it belongs to (:class:`specplan.Pack`)."""

    _ops: list[Op]
    declines: Declines
    checks: Checks

    @property
    def archs(self) -> tuple[str, ...]:
        """The archs that are loaded."""
        ...

    def manifest(self, arch: str | None = None) -> Manifest:
        """The manifest of one arch."""
        ...

    def _of_arch(self, arch: str | None) -> ArchPack: ...

    def _of_device(self, index: int) -> ArchPack | None: ...

    def _prepare(self, index: int, family: str) -> None: ...

    def _pick(
        self,
        family: str,
        op: str,
        arch_pack: ArchPack,
        size: Size,
        problem: str | None = None,
    ) -> Picked | Uncertified: ...

    def _pick_parts(
        self,
        family: str,
        op: str,
        arch_pack: ArchPack,
        size: Size,
        problem: str | None = None,
    ) -> tuple[Picked, ...]: ...


class Operand(NamedTuple):
    """A tensor as rules see it: what a compiled function sees, too."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    tensor: torch.Tensor


class Resolved(NamedTuple):
    """What a call's arguments come to: the compiled function and what it is called with."""

    values: tuple[Any, ...]
    form: str
    function: Any
    tensors: tuple[Any, ...]
    numbers: tuple[Any, ...]
    #: The function, and what else is remembered for the fast path.
    plan: tuple[Any, ...]
    device: int
    #: What rules are asked about.
    asked: Any


class Parted(NamedTuple):
    """What the arguments of a call come to that no cell holds: the plans of its parts."""

    values: tuple[Any, ...]
    plans: tuple[Picked, ...]
    device: int
    asked: Any


class BoundParts:
    """The launches of a bind that runs in parts."""

    def __init__(self, launches: Sequence[Callable[[], None]], parts: InParts) -> None:
        self.launches = tuple(launches)
        self.parts = parts

    def __call__(self) -> None:
        """Launch every part on torch's current stream."""
        for launch in self.launches:
            launch()


class Op:
    """One op of a family. :class:`specplan.Pack` has its ``call``: a function with the attributes
    ``require``, ``bind`` and ``pick``.
    """

    declared: ClassVar[signature.Op]
    #: What the expressions of the declaration name beside the parameters.
    names: ClassVar[Mapping[str, Any]] = {}
    #: Further attributes of ``call``.
    attributes: ClassVar[tuple[str, ...]] = ()
    #: The fast path, for callers. Not a method: an object with ``__call__`` takes 0.4 us more to
    #: call by position, and 1.4 us more by name, on the machine where a function takes 0.13.
    call: Any

    def __init__(self, pack: LoadedPack) -> None:
        self._pack = pack
        #: The compiled function of a call and what goes with it, by the declared key.
        self.plans: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        #: What a call in parts answers, by the same key.
        self.parted: dict[tuple[Any, ...], InParts] = {}
        self._absent: dict[int, tuple[torch.Tensor, ...]] = {}
        #: Counts calls, and how often it was asked for them: 20 to 60 ns of the 4.2 us that a call
        #: of scatter takes over a stub function, on the machine where it was tried.
        self._calls, self._asked = count(), 0
        self._binds = 0
        self._parts: dict[str, Any] = {
            "plans": self.plans,
            "slow_path": self.slow_path,
            "_count": self._calls.__next__,
            "bind_values": self.bind_values,
            "refuse": refuse,
            "__name__": type(self).__module__,
            **DTYPES,
            **self.names,
        }
        exec(_compiled(self.declared), self._parts)
        self.call = self._parts[self.declared.name]
        self.call.__doc__ = type(self).__call__.__doc__
        self.call.__annotations__ = dict(type(self).__call__.__annotations__)
        bind = self._parts["bind_call"]
        bind.__doc__ = Op.bind.__doc__
        for name in ("require", "pick", "parts", *self.attributes):
            setattr(self.call, name, getattr(self, name))
        self.call.bind, self.call.op = bind, self
        pack._ops.append(self)

    # For callers

    def __call__(self, *arguments: Any, **named: Any) -> bool | InParts | Uncertified:
        """Launch; every op has its own signature."""
        answer: bool | InParts | Uncertified = self.call(*arguments, **named)
        return answer

    def require(self, *arguments: Any, **named: Any) -> None:
        """The same call, raising :class:`~specplan.UncertifiedCell` where it would be declined."""
        required(self.call(*arguments, **named))

    def bind(self, *arguments: Any, **named: Any) -> Any:
        """Check and convert the arguments of a call once; returns ``launch()`` for these buffers,
        or a falsy Uncertified.

        ``launch()`` runs on torch's current stream, returns None, and checks nothing but what the
        compiled module checks: the buffers must stay allocated as they are. Nothing of the
        caller's is written here; the compiled module's checks are asked with a launch that has no
        work.
        """
        return self._parts["bind_call"](*arguments, **named)

    def pick(
        self,
        *,
        requests: int,
        tokens: int,
        problem: str | None = None,
        splits: int | None = None,
        dtype: str | None = None,
        arch: str | None = None,
        **geometry: int,
    ) -> Picked | Uncertified:
        """The plan that a call of this size would run, or why none would; launches nothing and
        needs no GPU.

        Parameters
        ----------
        requests, tokens
            Size of the call; rows = requests x tokens.
        problem
            Name of the geometry in the catalog, for example ``"mtp7"``; or give the geometry itself
            as keywords.
        splits, dtype
            Without them: the planning rule's splits, the family's first dtype.
        arch
            Without it: the only or first loaded arch.
        """
        arch_pack = self._pack._of_arch(arch)
        size = self._size_of(arch_pack, requests, tokens, problem, splits, dtype, geometry)
        if isinstance(size, Uncertified):
            return size
        return self._pack._pick(self.family, self.declared.name, arch_pack, size, problem)

    def parts(
        self,
        *,
        requests: int,
        tokens: int,
        problem: str | None = None,
        splits: int | None = None,
        dtype: str | None = None,
        arch: str | None = None,
        **geometry: int,
    ) -> tuple[Picked, ...] | Uncertified:
        """The plans that a call of this size launches, or why it is declined: one, or one for each
        part of an op that takes more requests than a cell holds. Parameters as for :meth:`pick`.
        """
        arch_pack = self._pack._of_arch(arch)
        size = self._size_of(arch_pack, requests, tokens, problem, splits, dtype, geometry)
        if isinstance(size, Uncertified):
            return size
        found = self._plans_for(size, arch_pack, problem)
        return (found,) if isinstance(found, Picked) else found

    def _size_of(
        self,
        arch_pack: ArchPack,
        requests: int,
        tokens: int,
        problem: str | None,
        splits: int | None,
        dtype: str | None,
        geometry: Mapping[str, int],
    ) -> Size | Uncertified:
        planning = PLANNING[self.family]
        if problem is not None:
            found = arch_pack.manifest.problems.get(self.family, {}).get(problem)
            if found is None:
                known = ", ".join(arch_pack.manifest.problems.get(self.family, {})) or "none"
                return Uncertified(
                    self.family,
                    arch_pack.manifest.arch,
                    Reason.UNKNOWN_PROBLEM,
                    f"no problem {problem!r}; problems: {known}",
                )
            geometry = dict(found)
        missing = [key for key in planning.geometry if key not in geometry]
        if missing or len(geometry) != len(planning.geometry):
            raise TypeError(
                f"{self.family} problems are given by name or by {', '.join(planning.geometry)}"
            )
        return Size(
            tuple(geometry[key] for key in planning.geometry),
            dtype if dtype is not None else planning.dtypes[0],
            requests,
            tokens,
            splits,
        )

    # What a family may have of its own

    def adapt_arguments(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Arguments of the same meaning that the compiled function may take where it refused the
        given ones, or None.
        """
        return None

    def may_launch(self, values: Mapping[str, Any]) -> None:
        """Raise what forbids a call for which there is a plan."""

    def launched(self, values: Mapping[str, Any]) -> None:
        """Take notice that the compiled function has taken a call, or a bind of it."""

    def size_for(self, size: Size) -> Sequence[Size]:
        """The cells that may run a call of this size, the call's own first."""
        return (size,)

    @classmethod
    def idle_argument(cls, name: str, plan: PlanRecord, device: torch.device) -> Any:
        """What a launch without work passes for an argument whose idle form is not declared, or
        None.
        """
        return None

    # The call path

    @property
    def family(self) -> str:
        """The family's name."""
        return self.declared.family

    @property
    def title(self) -> str:
        """The op's name for people: ``scatter``, ``gdn_replay.verify``."""
        family, name = self.declared.family, self.declared.name
        return family if name == family else f"{family}.{name}"

    @property
    def calls(self) -> int:
        """Calls so far, declined ones included."""
        made = next(self._calls) - self._asked
        self._asked += 1
        return made

    @property
    def binds(self) -> int:
        """Binds so far, declined ones included. What their launches do is counted nowhere."""
        return self._binds

    def slow_path(self, values: tuple[Any, ...]) -> bool | InParts | Uncertified:
        """A call that its fast path could not make: the first of its kind, refused, failed, or one
        that runs in parts. What the fast path stumbled over is no part of the answer: the plan that
        it found may have been another call's.
        """
        answer = self._answer(values)
        if isinstance(answer, Uncertified):
            return self._pack.declines.decline(self.title, answer)
        if isinstance(answer, InParts):
            return self._pack.declines.split(self.title, answer)
        return answer

    def _answer(self, values: tuple[Any, ...]) -> bool | InParts | Uncertified:
        if self.parted:
            again = self._again_in_parts(values)
            if again is not None:
                return again
        call = self.resolve(values)
        if call is None:
            return True
        if isinstance(call, Uncertified):
            return call
        self._check_values(call)
        if isinstance(call, Parted):
            return self.in_parts(call)
        call = self.launch(call)
        if isinstance(call, Uncertified):
            return call
        self.remember(call)
        return True

    def bind_values(self, values: tuple[Any, ...]) -> Any:
        """The launch of :meth:`bind`, from the values of all parameters.

        The first tensor stays torch's, because that is how the call learns torch's current stream;
        the others become tvm-ffi tensors that share memory with, and keep alive, the ones given.
        """
        self._binds += 1
        bound = self._bind_values(values)
        if isinstance(bound, Uncertified):
            return self._pack.declines.decline(self.title, bound)
        if self._pack.checks.enabled:
            return partial(self._checked_launch, values, bound)
        return bound

    def _checked_launch(self, values: tuple[Any, ...], launch: Callable[[], None]) -> None:
        """A bound launch of a pack that checks values: as the buffers are now."""
        call = self.resolve(values)
        if isinstance(call, (Resolved, Parted)):
            self._check_values(call)
        launch()

    def _check_values(self, call: Resolved | Parted) -> None:
        if self._pack.checks.enabled:
            self._pack.checks.run(self.title, self.declared, call.asked)

    def _bind_values(self, values: tuple[Any, ...]) -> Any:
        call = self.resolve(values)
        if call is None:
            return no_launch
        if isinstance(call, Uncertified):
            return call
        if isinstance(call, Parted):
            return self._bind_parts(call)
        return self._bind(call)

    def _bind(self, call: Resolved) -> partial[Any] | Uncertified:
        taken = self.launch(call, idle=True)
        if isinstance(taken, Uncertified):
            return taken
        call = taken
        convert = library.tvm_ffi().from_dlpack
        first, *others = call.tensors
        return watched(partial(call.function, first, *map(convert, others), *call.numbers))

    def _bind_parts(self, call: Parted) -> BoundParts | Uncertified:
        parts = self._resolved_parts(call)
        if isinstance(parts, Uncertified):
            return parts
        launches = []
        for part in parts:
            bound = self._bind(part)
            if isinstance(bound, Uncertified):
                return bound
            launches.append(bound)
        return BoundParts(launches, _answer_of(call))

    # Calls of more requests than a cell holds

    def in_parts(self, call: Parted) -> InParts | Uncertified:
        """Launch a call over parts of its requests, each the call of a cell of its own.

        Nothing is launched before every part is known to have its plan; what the first part's
        function takes, those of the others take, whose arguments differ in where they begin.
        """
        parts = self._resolved_parts(call)
        if isinstance(parts, Uncertified):
            return parts
        for at, part in enumerate(parts):
            taken = self.launch(part)
            if isinstance(taken, Uncertified):
                if at == 0:
                    return taken
                raise self._half_done(at, len(parts), taken)
            self.remember(taken)
        answer = _answer_of(call)
        if self._pack.checks.enabled:
            return answer
        if len(self.parted) >= MOST_REMEMBERED:
            self.parted.clear()
        self.parted[self._parts["key_of"](*call.values)] = answer
        return answer

    def _resolved_parts(self, call: Parted) -> list[Resolved] | Uncertified:
        cut = self._cut(call.values, [picked.cell.requests for picked in call.plans])
        if isinstance(cut, str):
            return self._declined(Reason.ARGUMENT, cut, call.device)
        resolved = []
        for values in cut:
            part = self.resolve(values)
            if isinstance(part, Uncertified):
                return part
            if not isinstance(part, Resolved):
                return self._declined(Reason.ARGUMENT, "a part has no rows", call.device)
            resolved.append(part)
        return resolved

    def _again_in_parts(self, values: tuple[Any, ...]) -> InParts | None:
        """A call of a kind that ran in parts before, by the fast path of each part; None, and
        nothing launched, where it stumbles.
        """
        try:
            answer = self.parted[self._parts["key_of"](*values)]
            cut = self._cut(values, answer.requests)
        except (*SHAPE_ERRORS, KeyError, RuntimeError):
            return None
        if isinstance(cut, str):
            return None
        launch = self._parts["part_call"]
        for at, part in enumerate(cut):
            if not launch(*part):
                if at == 0:
                    return None
                # The plan may have been forgotten since.
                call = self.resolve(part)
                again = self.launch(call) if isinstance(call, Resolved) else call
                if not isinstance(again, Resolved):
                    raise self._half_done(at, len(cut), again)
                self.remember(again)
        return answer

    def _cut(self, values: tuple[Any, ...], requests: Sequence[int]) -> list[tuple[Any, ...]] | str:
        """The values of each part's call, or what is wrong with those of the whole. Every part is a
        view of what was given, as aligned as its beginning.
        """
        declared, total = self.declared, sum(requests)
        given = dict(zip(self._parameter_names, values, strict=True))
        needs = {t.name: t.align or 1 for t in declared.tensors}
        for name in declared.cut:
            tensor = given[name]
            if tensor.shape[0] != total:
                return f"{name} has {tensor.shape[0]} rows, the call is of {total} requests"
            stride = tensor.stride(0) * tensor.element_size()
            if stride % needs[name] and tensor.data_ptr() % needs[name] == 0:
                return f"rows of {name} are {stride} bytes apart, no multiple of {needs[name]}"
        parts, begin = [], 0
        for held in requests:
            cut = {name: given[name].narrow(0, begin, held) for name in declared.cut}
            parts.append(tuple({**given, **cut}.values()))
            begin += held
        return parts

    def _half_done(self, done: int, count: int, why: Any) -> LaunchError:
        return LaunchError(
            f"{self.family}: {done} of {count} parts of a call were launched, and the next one was "
            f"not: {why}"
        )

    def resolve(self, values: tuple[Any, ...]) -> Resolved | Parted | Uncertified | None:
        """What a call comes to, from its arguments alone: every rule is checked here, too, and
        says what it found. None where there is nothing to do.
        """
        declared = self.declared
        try:
            given = {
                parameter.name: _typed(parameter, value)
                for parameter, value in zip(declared.parameters, values, strict=True)
            }
        except _Wrong as wrong:
            return self._declined(Reason.ARGUMENT, str(wrong))
        if self._no_work(given):
            return None
        values = tuple(given.values())
        try:
            self._check_tensors(given)
            device = self._parts["device_of"](*values)
            form = self._form(values, given)
            return self._resolve(values, given, form, device)
        except _Wrong as wrong:
            return self._declined(Reason.ARGUMENT, str(wrong), _device_of(values))
        except SHAPE_ERRORS as error:
            return self._refused(error, _device_of(values))

    def _resolve(
        self, values: tuple[Any, ...], given: Mapping[str, Any], form: str, device: int
    ) -> Resolved | Parted | Uncertified:
        declared = self.declared
        tensors, scalars = declared.in_form(form)
        # The stand-ins are empty tensors on the call's device; rules read their shapes alone.
        absent = self._nothing_of(device, anywhere=True)
        unplanned = (0,) * len(declared.planned)
        passed = self._parts[f"tensors_{form}"](*values, *absent, *unplanned)
        self._check_operands(tensors, passed)
        constants = {
            name: extent
            for tensor, operand in zip(tensors, passed, strict=True)
            for name, extent in zip(tensor.shape, operand.shape, strict=False)
            if isinstance(name, str)
        }
        operands = {
            tensor.name: Operand(tuple(operand.shape), tuple(operand.stride()), operand)
            for tensor, operand in zip(tensors, passed, strict=True)
        }
        more = {"form": form, "given": SimpleNamespace(**given), "launch": {}, "span": _span}
        # Numbers as a kernel gets them: 1e39 is infinite in fp32, and 1e-50 is 0.
        rounded = {
            each.name: c_float(given[each.name]).value
            for each in declared.parameters_of("float")
            if given[each.name] is not None
        }
        call = declared.call({**given, **operands, **rounded, **more}, constants, int)
        wrong = self._broken(call, planned=False, device=device)
        if wrong is not None:
            return wrong
        picked = self.plan_for(declared.size(call), device)
        if isinstance(picked, Uncertified):
            return picked
        if not isinstance(picked, Picked):
            return Parted(values, picked, device, call)
        call.launch = picked.launch
        planned = []
        for scalar in declared.planned:
            number = scalar.known(call) if scalar.known else picked.launch[scalar.launch]
            setattr(call, scalar.name, number)
            planned.append(number)
        numbers = self._parts[f"numbers_{form}"](*values, *absent, *planned)
        for scalar, number in zip(scalars, numbers, strict=True):
            setattr(call, scalar.name, c_float(number).value if scalar.kind == "float" else number)
        wrong = self._broken(call, planned=True, device=device)
        if wrong is not None:
            return wrong
        self.may_launch(given)
        absent = self._nothing_of(device)
        return Resolved(
            values,
            form,
            picked.function,
            self._parts[f"tensors_{form}"](*values, *absent, *planned),
            numbers,
            (picked.function, *absent, *planned),
            device,
            call,
        )

    def plan_for(self, size: Size, device: int) -> Picked | tuple[Picked, ...] | Uncertified:
        """The plan of a call on a device, or those of its parts, with their code loaded there, or
        why there is none.
        """
        if size.requests < 1 or size.tokens < 1:
            detail = f"requests is {size.requests} and tokens is {size.tokens}; both must be at "
            return self._declined(Reason.RANGE, detail + "least 1", device)
        arch_pack = self._pack._of_device(device) if device >= 0 else None
        if arch_pack is None:
            where = f"cuda:{device}" if device >= 0 else "the CPU"
            return Uncertified(
                self.family,
                "",
                Reason.DEVICE,
                f"the tensors are on {where}, "
                f"the loaded packs are for {', '.join(self._pack.archs)}",
            )
        found = self._plans_for(size, arch_pack)
        if not isinstance(found, Uncertified):
            self._pack._prepare(device, self.family)
        return found

    def _plans_for(
        self, size: Size, arch_pack: ArchPack, problem: str | None = None
    ) -> Picked | tuple[Picked, ...] | Uncertified:
        """The same for one arch, and nothing is loaded."""
        at = (self.family, self.declared.name, arch_pack)
        answers = []
        for each in self.size_for(size):
            picked = self._pack._pick(*at, each, problem)
            if not isinstance(picked, Uncertified):
                return picked
            answers.append(picked)
        parts = self._pack._pick_parts(*at, size, problem) if self.declared.cut else ()
        return parts or answers[0]

    def launch(self, call: Resolved, *, idle: bool = False) -> Resolved | Uncertified:
        """Call the compiled function, once more with adapted arguments if it refuses these; the
        call as it was taken. ``idle`` for one without work, which writes nothing of the caller's.
        """
        try:
            self._start(call, idle)
        except ARGUMENT_ERRORS as refusal:
            given = dict(zip(self._parameter_names, call.values, strict=True))
            adapted = self.adapt_arguments(given)
            if adapted is None:
                return self._refused(refusal, call.device)
            again = self.resolve(tuple({**given, **adapted}.values()))
            if not isinstance(again, Resolved):
                return (
                    again if isinstance(again, Uncertified) else self._refused(refusal, call.device)
                )
            call = again
            try:
                self._start(call, idle)
            except ARGUMENT_ERRORS as second:
                return self._refused(second, call.device)
            except Exception as failure:
                return self._failed(failure, call)
        except Exception as failure:
            return self._failed(failure, call)
        self.launched(dict(zip(self._parameter_names, call.values, strict=True)))
        return call

    def remember(self, call: Resolved) -> None:
        """Keep the plan of a call that the compiled function has taken; none where every call is
        checked, because its fast path checks no values.
        """
        if self._pack.checks.enabled:
            return
        key = self._parts["key_of"](*call.values)
        if len(self.plans) >= MOST_REMEMBERED:
            self.plans.clear()
        self.plans[key] = call.plan

    def close(self) -> None:
        """Raise from now on what every use of an inherited pack raises (``specplan.forked``)."""
        for name in (self.declared.name, "bind_call"):
            self._parts[name].__code__ = _closed.__code__

    # Loading code

    @classmethod
    def idle_arguments(cls, plan: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """Arguments of a launch that changes nothing of the caller's, to load the plan's code."""
        spec, declared = dict(plan.spec), cls.declared
        tensors, scalars = declared.in_form(declared.form_of(spec))
        made: list[Any] = []
        for each in tensors:
            own = cls.idle_argument(each.name, plan, device)
            made.append(own if own is not None else _idle_tensor(each, spec, declared, device))
        for scalar in scalars:
            own = cls.idle_argument(scalar.name, plan, device)
            if own is None:
                own = declared.idle.get(scalar.name, 1 if scalar.idle is None else scalar.idle)
            made.append(own if scalar.kind == "int" else float(own))
        return tuple(made)

    @classmethod
    def further_idle_arguments(
        cls, plan: PlanRecord, device: torch.device
    ) -> tuple[tuple[Any, ...], ...]:
        """The same for further kernels of the plan."""
        return ()

    # Parts of the call path

    @property
    def _parameter_names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.declared.parameters)

    def _no_work(self, given: Mapping[str, Any]) -> bool:
        """Whether a call has nothing to do; one that cannot be asked has something wrong."""
        if self.declared.no_work is None:
            return False
        try:
            return bool(self.declared.no_work(SimpleNamespace(**given)))
        except (*SHAPE_ERRORS, RuntimeError):
            return False

    def _check_tensors(self, given: Mapping[str, Any]) -> None:
        for parameter in self.declared.parameters:
            name, value = parameter.name, given[parameter.name]
            if value is None and parameter.optional:
                continue
            if parameter.kind == "tensor":
                _check_tensor(name, value)
            elif parameter.kind in self.names and not isinstance(value, self.names[parameter.kind]):
                raise _Wrong(f"{name} is {_shown(value)}, expected a {parameter.kind}")

    @staticmethod
    def _check_operands(tensors: Sequence[Tensor], passed: Sequence[Any]) -> None:
        for tensor, operand in zip(tensors, passed, strict=True):
            _check_tensor(tensor.name, operand)
            rank = len(tensor.shape)
            if operand.dim() not in (rank, *tensor.ranks):
                shape = tuple(operand.shape)
                raise _Wrong(f"{tensor.name} is {shape}, expected {rank} dimensions")

    def _form(self, values: tuple[Any, ...], given: Mapping[str, Any]) -> str:
        """The compiled form of a call, whose own parameters are given and no others."""
        form = self.declared.form
        if form is None:
            return ""
        by_dtype = {self._parts[dtype]: name for dtype, name in form.dtypes.items()}
        dtype = self._parts["form_of"](*values)
        if dtype not in by_dtype:
            known = ", ".join(map(str, by_dtype))
            raise _Wrong(f"{form.tensor} is {dtype}, expected one of {known}")
        found = by_dtype[dtype]
        for name in self.declared.left_out(found):
            if given[name] is not None:
                raise _Wrong(f"caches of {found} take no {name}")
        for tensor in self.declared.in_form(found)[0]:
            if tensor.forms and given[tensor.name] is None:
                raise _Wrong(f"caches of {found} need {tensor.name}")
        for name, choices in form.choices.get(found, {}).items():
            if not any(given[name] is self._parts[each] for each in choices):
                known = " or ".join(str(self._parts[each]) for each in choices)
                raise _Wrong(f"{name} is {_shown(given[name])}; caches of {found} need {known}")
        return found

    def _broken(self, call: Any, *, planned: bool, device: int) -> Uncertified | None:
        """The first rule that a call breaks, as an answer."""
        for rule in self.declared.rules_of(call.form):
            if rule.planned == planned and not rule.condition(call):
                return self._declined(Reason(rule.reason), rule.said(call), device)
        return None

    def _start(self, call: Resolved, idle: bool) -> None:
        if not idle:
            call.function(*call.tensors, *call.numbers)
            return
        declared, scalars = self.declared.in_form(call.form)
        try:
            tensors = [
                _alike(given, tensor.idle) if tensor.idle else given
                for tensor, given in zip(declared, call.tensors, strict=True)
            ]
        except (*SHAPE_ERRORS, RuntimeError) as error:
            raise ValueError(str(error)) from error
        numbers = [
            number if scalar.idle is None else scalar.idle
            for scalar, number in zip(scalars, call.numbers, strict=True)
        ]
        call.function(*tensors, *numbers)

    def _nothing_of(self, device: int, *, anywhere: bool = False) -> tuple[torch.Tensor, ...]:
        """The empty tensors that stand in for optional ones, made once a device; ``anywhere`` if
        only their shapes are read, by a call that may be declined for its device.
        """
        declared = self.declared.absent
        if not declared:
            return ()
        found = self._absent.get(device)
        if found is None:
            made = tuple(
                torch.empty(shape, dtype=DTYPES[dtype], device="cpu" if anywhere else device)
                for dtype, shape in declared.values()
            )
            if anywhere:
                return made
            found = self._absent[device] = made
        return found

    def _declined(self, reason: Reason, detail: str, device: int = -1) -> Uncertified:
        pack = self._pack._of_device(device) if device >= 0 else None
        return Uncertified(self.family, pack.manifest.arch if pack else "", reason, detail)

    def _refused(self, error: Exception, device: int = -1) -> Uncertified:
        """The compiled module's, or Python's, objection to an argument as an answer."""
        return self._declined(Reason.ARGUMENT, " ".join(str(error).split()), device)

    def _failed(self, error: Exception, call: Resolved) -> Uncertified:
        """What a failed call of the compiled function was: an argument that is no memory a launch
        can take, or a failed launch, which is raised.
        """
        if isinstance(error, SpecplanError):
            raise error
        tensors, _ = self.declared.in_form(call.form)
        for tensor, given in zip(tensors, call.tensors, strict=True):
            try:
                library.tvm_ffi().from_dlpack(given)
            except Exception as refusal:
                why = " ".join(str(refusal).split())
                return self._declined(Reason.ARGUMENT, f"{tensor.name}: {why}", call.device)
        raise LaunchError(
            f"{self.family}: the launch failed: {error}. CUDA errors are sticky: an earlier launch "
            "may be the cause"
        ) from error


class _Wrong(Exception):
    """An argument that no plan takes, in words."""


def _typed(parameter: Parameter, value: Any) -> Any:
    """A scalar as the compiled function takes it; anything else as it is. Of scalars no bool, no
    text and no tensor is taken, whatever it may count as.
    """
    if value is None and parameter.optional:
        return None
    kind = parameter.kind
    if kind == "int":
        if isinstance(value, Integral) and not isinstance(value, bool):
            return index(value)
        raise _Wrong(f"{parameter.name} is {_shown(value)}, expected an integer")
    if kind == "float":
        if isinstance(value, Real) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError as error:
                raise _Wrong(f"{parameter.name} is too large: {error}") from error
            return value if isinstance(value, (int, float)) else number
        raise _Wrong(f"{parameter.name} is {_shown(value)}, expected a number")
    return value


def _check_tensor(name: str, value: Any) -> None:
    """That a value is a tensor with memory that strides describe."""
    if not isinstance(value, torch.Tensor):
        raise _Wrong(f"{name} is no tensor: {_shown(value)}")
    if value.layout is not torch.strided:
        raise _Wrong(f"{name} is a tensor of layout {value.layout}, not strided")
    if value.is_meta:
        raise _Wrong(f"{name} is a meta tensor, it has no memory")


def _shown(value: Any) -> str:
    """A value for people: numbers and texts as they are written, anything else by its type."""
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, (str, int, float)) else kind


def _device_of(values: Sequence[Any]) -> int:
    """The device of the first tensor among the values of a call; -1 if there is none."""
    return next((value.get_device() for value in values if isinstance(value, torch.Tensor)), -1)


def _idle_tensor(
    tensor: Tensor, spec: Mapping[str, Any], declared: signature.Op, device: torch.device
) -> torch.Tensor:
    shape = [
        extent if isinstance(extent, int) else int(spec.get(extent, declared.idle.get(extent, 1)))
        for extent in tensor.shape
    ]
    dtype = DTYPES[str(spec.get(tensor.dtype, tensor.dtype))]
    if tensor.idle == "rows":
        return torch.full(shape, -1, dtype=dtype, device=device)
    if dtype is torch.float8_e4m3fn:
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _alike(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Memory of its own with the dtype, shape, strides and 16-byte alignment of a tensor; rows are
    those of no request.
    """
    item = tensor.element_size()
    shift = tensor.data_ptr() % 16 // item
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(shift + reach + 1, dtype=tensor.dtype, device=tensor.device)
    alike = storage.as_strided(tensor.shape, tensor.stride(), shift)
    return alike.fill_(-1) if what == "rows" else alike


def _span(operand: Operand) -> tuple[int, int]:
    """First byte and the one after the last of a tensor; the same if it is empty."""
    start = operand.tensor.data_ptr()
    if operand.tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(operand.shape, operand.stride, strict=True))
    return start, start + (last + 1) * operand.tensor.element_size()


@cache
def _compiled(declared: signature.Op) -> CodeType:
    """The code of the functions that an op is made of; tracebacks show its text."""
    source = declared.source()
    name = f"<specplan {declared.family}.{declared.name}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")


def _closed(*arguments: Any, **named: Any) -> Any:
    """What the functions of a closed op do, each with its own ``refuse``."""
    refuse(*arguments, **named)


def required(answer: Any) -> Any:
    """The answer itself, or UncertifiedCell for a declined call."""
    if isinstance(answer, Uncertified):
        raise UncertifiedCell(answer)
    return answer


def _answer_of(call: Parted) -> InParts:
    """What a call in parts answers."""
    return InParts([picked.cell for picked in call.plans])


def no_launch() -> None:
    """The launch of a bind over no rows."""


#: The public function of an op.
Call = Callable[..., Any]

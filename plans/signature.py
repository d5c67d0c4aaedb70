"""What an op takes, declared once.

An :class:`Op` lists the tensors and scalars of a compiled function in their order, the parameters
of the public call, the least that tells one plan from another, and the rules that the arguments
keep. Everything else that needs an argument list is made from it:

====================================  ===========================================================
fake arguments for the compiler       ``kernels/fakes.py``: :func:`arguments`
checks of the host function           ``kernels/ranges.py``, by :meth:`Op.conditions`
why a call is declined                ``runtime/op.py``, by the same :class:`Rule` objects
the fast path, ``bind``               ``runtime/op.py``, by :meth:`Op.source`
arguments of a launch without work    ``runtime/op.py``, by ``idle``
``torch.ops.specplan``                ``runtime/torch_ops.py``
tables of the documentation           :meth:`Op.table`
====================================  ===========================================================

Nothing here knows torch or the compiler. A rule's condition is a function of a *call*: an object
with an attribute for every argument, for every extent that the plan fixes, and for what the op
derives from them. Tensors have ``shape`` and ``stride`` there. So one condition compares integers
in Python and numbers of the compiler in a host function; ``call.wide`` makes a sum 64-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

#: Bytes of an element by dtype.
ITEM_BYTES: Mapping[str, int] = {
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bf16": 2,
    "fp32": 4,
    "fp8_e4m3": 1,
}
#: What the compiler calls them in the text of a signature.
SPELLED: Mapping[str, str] = {
    **{name: name for name in ("int32", "int64", "uint8")},
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
}


@dataclass(frozen=True)
class Free:
    """A stride that is read at run time: any multiple of so many bytes, 0 for of one element."""

    multiple: int = 0


FREE = Free()


@dataclass(frozen=True)
class Tensor:
    """One tensor of a compiled function.

    Attributes
    ----------
    dtype
        A key of :data:`ITEM_BYTES`, or the name of a constant of the plan that is one.
    shape
        Extents. A name that tensors share is one extent; a name of a constant of the plan is that
        integer; any other is whatever the tensor has.
    strides
        Of each dimension, in elements, or :class:`Free`.
    align
        Bytes that the base address is a multiple of; None for one element.
    bits, stride_bits
        Width of what is read at run time: extents, and strides where they differ.
    written
        Whether the op writes it.
    source
        Where it comes from: an expression of the parameters, if it is not one.
    parameter
        The parameter that it is, if one of another name: a parameter that may have one of several
        dtypes is a tensor for each.
    stand_in
        What is passed where the caller gives None: another tensor's name, or one of ``Op.absent``.
        A tensor without one is not optional.
    forms
        The compiled forms that take it; none for all (see ``Op.form``).
    ranks
        Further numbers of dimensions that a call may give it in, and that are adapted.
    idle
        What a launch without work passes: ``rows`` for a list that names no row, ``scratch`` for
        other memory of the same form, nothing for the tensor itself.
    about
        A phrase for the documentation.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    strides: tuple[int | Free, ...]
    about: str = ""
    align: int | None = None
    bits: int = 32
    stride_bits: int | None = None
    written: bool = False
    source: str = ""
    parameter: str = ""
    stand_in: str = ""
    forms: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    idle: str = ""

    @property
    def of(self) -> str:
        """The parameter's name."""
        return self.parameter or self.name

    @property
    def expression(self) -> str:
        """The tensor as the fast path passes it."""
        taken = self.source or self.name
        if not self.stand_in:
            return taken
        return f"{self.stand_in} if {taken} is None else {taken}"


@dataclass(frozen=True)
class Scalar:
    """One number of a compiled function.

    Attributes
    ----------
    kind
        ``int`` or ``float``.
    expression
        What is passed, if it is not the parameter of this name: an expression of the parameters.
    known
        The same for a number that is remembered with the plan: a function of the call.
    launch
        The launch parameter of the plan that is passed.
    idle
        The number in a launch without work; None for that of the call.
    forms
        The compiled forms that take it; none for all.
    """

    name: str
    kind: str = "int"
    expression: str = ""
    known: Callable[[Any], int] | None = None
    launch: str = ""
    idle: int | None = None
    forms: tuple[str, ...] = ()

    @property
    def planned(self) -> bool:
        """Whether it is remembered with the plan."""
        return self.known is not None or bool(self.launch)

    @property
    def passed(self) -> str:
        """The number as the fast path passes it. What is remembered with the plan has a name of its
        own there: a parameter may have the same.
        """
        return self.expression or (f"{self.name}_" if self.planned else self.name)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the public call.

    ``kind`` is ``tensor``, ``int``, ``float``, or the name of a class of the family's module.
    """

    name: str
    kind: str = "tensor"
    optional: bool = False
    keyword: bool = False
    about: str = ""


@dataclass(frozen=True)
class Rule:
    """What the arguments of a call must keep, and what is said of a call that does not.

    Attributes
    ----------
    condition
        A function of the call.
    text
        A format string over ``c``, the call, or a function of it.
    reason
        Code of the reason for which such a call is declined (``specplan.Reason``).
    compiled
        Whether the host function checks it, too. Where not, it is of something that a compiled
        function never sees.
    planned
        Whether it is about numbers that come with the plan.
    forms
        The compiled forms that it is about; none for all.
    """

    condition: Callable[[Any], Any]
    text: str | Callable[[Any], str]
    reason: str = "range"
    compiled: bool = True
    planned: bool = False
    forms: tuple[str, ...] = ()

    def said(self, call: Any) -> str:
        """The reason for a call that breaks the rule."""
        return self.text.format(c=call) if isinstance(self.text, str) else self.text(call)


@dataclass(frozen=True)
class Value:
    """What the values in an argument keep, which no compiled function checks: the caller promises
    it. Looked at where a pack was loaded to check (``runtime/checking.py``), with tensors in the
    place of integers.

    Attributes
    ----------
    argument
        The argument that an error names.
    wrong
        A function of the call: a bool tensor, true where a value is wrong; or None where there is
        nothing to check. Tensors of the call have the attribute ``tensor``.
    text
        What is expected: a format string over ``c``, the call.
    held
        The values that ``wrong`` is about, if not the argument's own.
    distinct
        ``wrong`` says which values are live instead; no two of them may be equal.
    forms
        The compiled forms that it is about; none for all.
    """

    argument: str
    wrong: Callable[[Any], Any]
    text: str
    held: Callable[[Any], Any] | None = None
    distinct: bool = False
    forms: tuple[str, ...] = ()


def picked(tensor: Any, index: Any) -> Any:
    """The elements of a vector at indices, of which those outside it give its first or last."""
    return tensor[index.clamp(0, max(tensor.shape[0] - 1, 0)).long()]


class Size(NamedTuple):
    """The cell that a call asks for; the arch is that of its tensors' device."""

    geometry: tuple[int, ...]
    dtype: str
    requests: int
    tokens: int
    splits: int | None = None


@dataclass(frozen=True)
class Form:
    """How the compiled forms of an op are told apart on a call.

    Attributes
    ----------
    tensor
        The tensor whose dtype tells.
    dtypes
        The form's name by that dtype.
    choices
        Of a form's parameters, those that take one of a few objects: the expressions of these, by
        the parameter's name.
    """

    tensor: str
    dtypes: Mapping[str, str]
    choices: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Op:
    """One op of a family; see the module docstring.

    Attributes
    ----------
    tensors, scalars
        Of the compiled function, in its order: all tensors, then all scalars.
    parameters
        Of the public call; none where they are the tensors and scalars as they stand.
    key
        Expressions of the parameters: the least that tells the plan of a call apart from those of
        other calls. What else the plan follows from, the compiled function must check.
    size
        The cell of a call.
    device
        The parameter's expression that says on which device the call is.
    derived
        Names for what several rules use, in order: functions of the call.
    no_work
        Of the parameters: a call that has nothing to do, whatever its tensors are. ``quick`` if the
        fast path asks it, too.
    guard
        An expression of the parameters that the fast path needs to be true.
    absent
        Empty tensors that stand in for optional ones: dtype and shape by name.
    setup
        Lines of the fast path before the look-up: names for parts of the parameters.
    idle
        Extents of the tensors of a launch without work; 1 unless given.
    cut
        Of the parameters: those that have one row for each request, in their first dimension, where
        requests are independent of each other and whatever else a call takes is the same for all.
        Given, a call of more requests than a cell holds runs as several calls over parts of these
        tensors, each of a cell of its own. None where such a call is declined.
    tokens
        Of the cell of every call, where no argument says it; 0 where one does.
    values
        What the caller promises of values on the device, in the order in which they are checked.
    """

    family: str
    name: str
    tensors: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...]
    key: tuple[str, ...]
    size: Callable[[Any], Size]
    parameters: tuple[Parameter, ...] = ()
    rules: tuple[Rule, ...] = ()
    derived: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    no_work: Callable[[Any], bool] | None = None
    quick: str = ""
    guard: str = ""
    device: str = ""
    form: Form | None = None
    absent: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    idle: Mapping[str, int] = field(default_factory=dict)
    cut: tuple[str, ...] = ()
    tokens: int = 0
    values: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        if not self.parameters:
            own = [Parameter(t.name, about=t.about) for t in self.tensors if not t.source]
            own += [Parameter(s.name, s.kind) for s in self.scalars if not s.planned]
            object.__setattr__(self, "parameters", tuple(own))
        if not self.device:
            object.__setattr__(self, "device", f"{self.parameters[0].name}.get_device()")

    # Compiled functions

    def in_form(self, form: str = "") -> tuple[tuple[Tensor, ...], tuple[Scalar, ...]]:
        """Tensors and scalars of one compiled form, in order."""
        return (
            tuple(t for t in self.tensors if not t.forms or form in t.forms),
            tuple(s for s in self.scalars if not s.forms or form in s.forms),
        )

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of the compiled forms, one empty name where there is one form."""
        return tuple(self.form.dtypes.values()) if self.form is not None else ("",)

    def left_out(self, form: str) -> tuple[str, ...]:
        """The parameters that are None in calls of one form, because only others take them."""
        if self.form is None:
            return ()
        taken = {t.name for t in self.in_form(form)[0]} | set(self.form.choices.get(form, {}))
        of_forms = {t.name for t in self.tensors if t.forms} | {
            name for choices in self.form.choices.values() for name in choices
        }
        return tuple(p.name for p in self.parameters if p.name in of_forms - taken)

    def form_of(self, spec: Mapping[str, Any]) -> str:
        """The compiled form of a plan's constants: that of its dtype, if there are several."""
        return str(spec["dtype"]) if self.form is not None else ""

    def signature(self, name: str, spec: Mapping[str, Any]) -> str:
        """The compiled function's signature as the compiler writes it into the manifest."""
        numbers: dict[str, str] = {}
        parts = []
        tensors, scalars = self.in_form(self.form_of(spec))
        for tensor in tensors:
            extents = []
            for at, extent in enumerate(tensor.shape):
                fixed = extent if isinstance(extent, int) else spec.get(extent)
                if fixed is None:
                    own = extent if extent != "_" else f"{tensor.name}.{at}"
                    fixed = numbers.setdefault(str(own), f"n{len(numbers)}")
                extents.append(str(fixed))
            dtype = SPELLED[str(spec.get(tensor.dtype, tensor.dtype))]
            parts.append(f"{tensor.name}: Tensor([{', '.join(extents)}], {dtype})")
        parts += [f"{s.name}: {'int32' if s.kind == 'int' else 'float32'}" for s in scalars]
        return f"{name}({', '.join(parts)})"

    # Rules

    def call(
        self,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        wide: Callable[[Any], Any],
    ) -> Any:
        """What rules are asked about: arguments and plan constants by name, and what is derived."""
        call = SimpleNamespace(**{**constants, **arguments}, wide=wide)
        for name, value in self.derived:
            setattr(call, name, value(call))
        return call

    def conditions(self, call: Any, form: str = "") -> tuple[Any, ...]:
        """What the host function checks, in order."""
        return tuple(rule.condition(call) for rule in self.rules_of(form) if rule.compiled)

    def rules_of(self, form: str) -> tuple[Rule, ...]:
        """The rules that are about one compiled form."""
        return tuple(rule for rule in self.rules if not rule.forms or form in rule.forms)

    # Python

    @property
    def planned(self) -> tuple[Scalar, ...]:
        """The numbers that are remembered with a plan, in order."""
        return tuple(scalar for scalar in self.scalars if scalar.planned)

    def header(self, name: str) -> str:
        """The line that begins a function of the public parameters."""
        parts = []
        for parameter in self.parameters:
            if parameter.keyword and "*" not in parts:
                parts.append("*")
            parts.append(parameter.name + (" = None" if parameter.optional else ""))
        return f"def {name}({', '.join(parts)}):"

    def source(self) -> str:
        """The text of the functions that an op of the runtime is made of.

        By the op's own name, the fast path: one look-up and one call of the compiled function,
        written out. Whatever it stumbles over, it leaves to ``slow_path``, which starts anew.
        ``bind_call`` takes the same parameters. ``part_call`` is the fast path for one part of a
        call that runs in parts: False where it stumbles. The others take all of them by position,
        and give parts of the same call: its key, its device, what tells its compiled form, and the
        arguments of each form.
        """
        names = ", ".join(parameter.name for parameter in self.parameters)
        lines = [
            self.header(self.name),
            "    _count()",
            *self._tried(),
            f"    return slow_path(({names},))",
            "",
            self.header("bind_call"),
            f"    return bind_values(({names},))",
        ]
        if self.cut:
            lines += ["", f"def part_call({names}):", *self._tried(), "    return False"]
        parts = {
            "key_of": ", ".join(self.key) + ",",
            "device_of": self.device,
            "form_of": "form" if self.form is not None else "None",
        }
        for form in self.forms:
            tensors, scalars = self.in_form(form)
            parts[f"tensors_{form}"] = "".join(f"({each.expression}), " for each in tensors)
            parts[f"numbers_{form}"] = "".join(f"({each.passed}), " for each in scalars)
        kept = ", ".join((*self.absent, *(f"{scalar.name}_" for scalar in self.planned)))
        for name, expression in parts.items():
            more = f", {kept}" if kept and name.startswith(("tensors_", "numbers_")) else ""
            lines += [
                "",
                f"def {name}({names}{more}):",
                *(f"    {line}" for line in self._setup()),
                f"    return {expression if expression else '()'}",
            ]
        return "\n".join((*lines, ""))

    def _tried(self) -> Iterator[str]:
        """The fast path, and nothing where it stumbles."""
        yield "    try:"
        yield from ("        " + line for line in self._fast())
        # Not kept: the frame and an exception that it names would keep each other, and all tensors
        # of the call, until the cyclic collector runs.
        yield "    except Exception:"
        yield "        pass"

    def _fast(self) -> Iterator[str]:
        guards = [*self._types(), *([self.guard] if self.guard else [])]
        indent = ""
        if guards:
            yield f"if {' and '.join(guards)}:"
            indent = "    "
        if self.quick:
            yield f"{indent}if {self.quick}:"
            yield f"{indent}    return True"
        for line in self._setup():
            yield indent + line
        kept = ["function", *self.absent, *(f"{scalar.name}_" for scalar in self.planned)]
        found = f"plans[{', '.join(self.key)}]"
        single = self.form is None and len(kept) == 1
        yield (
            f"{indent}{kept[0]} = {found}[0]"
            if single
            else (f"{indent}{', '.join(kept)} = {found}")
        )
        if self.form is None:
            yield from (indent + line for line in self._call_of(""))
            return
        for at, (dtype, form) in enumerate(self.form.dtypes.items()):
            yield f"{indent}{'elif' if at else 'if'} form is {dtype}:"
            yield from (f"{indent}    {line}" for line in self._guarded(form))

    def _setup(self) -> Iterator[str]:
        yield from self.setup
        if self.form is not None:
            yield f"form = {self.form.tensor}.dtype"

    def _types(self) -> Iterator[str]:
        """A scalar of another type may equal the one that a plan is remembered by: True, 4.0. An
        integer that the compiled function gets as it is needs the cheaper check alone: that one
        refuses whatever is no integer, but takes a bool for one.
        """
        as_it_is = {scalar.name for scalar in self.scalars if scalar.passed == scalar.name}
        for parameter in self.parameters:
            name = parameter.name
            if parameter.kind == "int" and name in as_it_is and not parameter.optional:
                yield f"{name} is not True and {name} is not False"
                continue
            kinds = {"int": f"type({name}) is int"}
            kinds["float"] = f"(type({name}) is float or type({name}) is int)"
            if parameter.kind in kinds:
                check = kinds[parameter.kind]
                yield f"({name} is None or {check})" if parameter.optional else check

    def _guarded(self, form: str) -> Iterator[str]:
        """The call of one form, where the parameters of the others are left out."""
        assert self.form is not None
        guards = [f"{name} is None" for name in self.left_out(form)]
        for name, objects in self.form.choices.get(form, {}).items():
            guards.append("(" + " or ".join(f"{name} is {each}" for each in objects) + ")")
        if not guards:
            yield from self._call_of(form)
            return
        yield f"if {' and '.join(guards)}:"
        yield from ("    " + line for line in self._call_of(form))

    def _call_of(self, form: str) -> Iterator[str]:
        tensors, scalars = self.in_form(form)
        yield "function("
        for tensor in tensors:
            yield f"    {tensor.expression},"
        for scalar in scalars:
            yield f"    {scalar.passed},"
        yield ")"
        yield "return True"

    # Documentation

    def table(self) -> str:
        """The op's tensors and scalars as a Markdown table."""
        lines = ["| argument | dtype | shape | |", "|---|---|---|---|"]
        for parameter in self.parameters:
            # An op with forms declares a tensor once for each: bf16 and fp8 caches, say.
            tensors = [tensor for tensor in self.tensors if tensor.of == parameter.name]
            dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
            shapes = dict.fromkeys(f"[{', '.join(map(str, each.shape))}]" for each in tensors)
            notes = [parameter.about or next((t.about for t in tensors if t.about), "")]
            notes += ["written"] * any(tensor.written for tensor in tensors)
            notes += ["optional"] * parameter.optional
            kind = " or ".join(dtypes) or parameter.kind
            text = "; ".join(filter(None, notes))
            lines.append(f"| `{parameter.name}` | {kind} | {' or '.join(shapes)} | {text} |")
        return "\n".join(lines)

    def parameters_of(self, kind: str) -> Iterable[Parameter]:
        """The parameters of one kind."""
        return (parameter for parameter in self.parameters if parameter.kind == kind)


def vector(name: str, dtype: str, extent: int | str, about: str = "", **more: Any) -> Tensor:
    """A dense one-dimensional tensor."""
    return Tensor(name, dtype, (extent,), (1,), about, **more)

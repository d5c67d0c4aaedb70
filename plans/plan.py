"""A plan: one compiled specialization plus its launch parameters.

A plan is plain data. What its ``spec`` means is known to the family's planning rule, which makes
it, and to the family's device code, which is compiled from it. Nothing between the two needs to
look inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

Constant = int | str | bool

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Plan:
    """One compiled specialization of one op of a family, for one arch, plus its launch parameters.

    Attributes
    ----------
    family
        The kernel contract, for example ``scatter``.
    op
        The family's op that this plan serves. A family with one op names it like itself.
    arch
        Compile target, for example ``sm_90a``.
    spec
        Compile-time constants, ``((name, value), ...)`` in the order that the planning rule gave
        them.
    launch
        Run-time integers, ``((name, value), ...)``, passed to the compiled function with every
        call. Plans that differ only here share their device code.
    """

    family: str
    op: str
    arch: str
    spec: tuple[tuple[str, Constant], ...]
    launch: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> Constant:
        """The value of a constant of ``spec`` or ``launch``; KeyError names what there is."""
        for key, value in (*self.spec, *self.launch):
            if key == name:
                return value
        known = ", ".join(key for key, _ in (*self.spec, *self.launch))
        raise KeyError(f"plan of {self.family!r} has no constant {name!r}; it has: {known}")

    def int(self, name: str) -> int:
        """The value of an integer constant, for typed use in device code."""
        value = self[name]
        if not isinstance(value, int):
            raise TypeError(f"constant {name!r} of {self.symbol} is {value!r}, not an integer")
        return value

    @property
    def symbol(self) -> str:
        """Name of the compiled function: injective in (family, op, spec, arch), a valid C
        identifier.

        Raises
        ------
        ValueError
            The constants do not spell an identifier, or another plan of this process has the same
            spelling.
        """
        kinds = tuple([type(value) for _, value in self.spec])
        return _symbol(self.family, self.op, self.arch, self.spec, kinds)


#: What each symbol stands for. Names and texts may run together (``a1`` = 2 and ``a`` = 12), and
#: two functions of one name would be one function: the second plan is an error where it is made.
_SPELLED: dict[str, tuple[object, ...]] = {}


@cache
def _symbol(
    family: str,
    op: str,
    arch: str,
    spec: tuple[tuple[str, Constant], ...],
    kinds: tuple[type, ...],
) -> str:
    # Cached: hundreds of thousands of cells share some hundred symbols. By kinds too: True == 1.
    parts = [op if op == family else f"{family}_{op}"]
    parts += [f"{key}{_spell(value)}" for key, value in spec]
    parts.append(arch)
    symbol = "__".join(parts)
    if not _SYMBOL.fullmatch(symbol):
        raise ValueError(f"plan constants do not spell a C identifier: {symbol!r}")
    meaning = (family, op, arch, spec, kinds)
    if _SPELLED.setdefault(symbol, meaning) != meaning:
        raise ValueError(f"two plans spell {symbol!r}: {_SPELLED[symbol][:4]} and {meaning[:4]}")
    return symbol


def _spell(value: Constant) -> str:
    if isinstance(value, bool):
        return "_on" if value else "_off"
    if isinstance(value, int):
        return f"m{-value}" if value < 0 else str(value)
    return f"_{value}"

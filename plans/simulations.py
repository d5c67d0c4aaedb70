"""Simulations: evidence that a plan's PTX, run on a CPU, gave what the reference gives, for some
small cells.

It is a mark on a plan, never a certificate: no GPU ran, and what the compiler made of the PTX did
not run either. A simulation binds to the same bits as a certificate, the device code and the launch
code of each plan. ``simulations/<arch>/<family>.yaml`` ends with a digest of what stands before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from specplan.plans.evidence import digest_of, natural, text_of, texts
from specplan.plans.manifest import Manifest, Use, write_atomically

SCHEMA = 1
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SEAL = "digest: "
_HEADER = (
    "# Written by `specplan simulate`: the PTX of these plans, run on a CPU. Not a certificate,\n"
    "# and an edit makes it false.\n"
)


class SimulationFileError(ValueError):
    """A file of simulations that cannot be read, was edited, or says what cannot be true."""


@dataclass(frozen=True)
class Measured:
    """The worst error of one output of a plan, and its bound."""

    output: str
    measure: str
    error: float
    bound: float


@dataclass(frozen=True)
class SimulatedPlan:
    """What ran of a plan: the bits, the cells as ``problem dtype splits tokens requests``, and how
    near each output came to its bound.
    """

    device_code: str
    host_code: str
    cells: tuple[str, ...]
    calls: int
    comparisons: int
    #: Instructions of threads.
    instructions: int
    outputs: tuple[Measured, ...]


@dataclass(frozen=True)
class Simulations:
    """The simulations of one family's plans for one arch."""

    family: str
    arch: str
    date: str
    tools: Mapping[str, str]
    #: sha256 of all sources of the simulator.
    simulator: str
    suite: Sequence[str]
    unseen: Sequence[str]
    plans: Mapping[str, SimulatedPlan]

    def covers(self, uses: Iterable[Use], pack: Manifest) -> bool:
        """Whether every plan of a cell, as the pack has it, was simulated."""
        for use in uses:
            ran, plan = self.plans.get(use.symbol), pack.plans.get(use.symbol)
            if ran is None or plan is None:
                return False
            if (ran.device_code, ran.host_code) != (plan.device_code, plan.host_code):
                return False
        return True


def default_directory() -> Path:
    """The simulations of this installation: packaged beside the code, or at the root of a
    checkout.
    """
    packaged = Path(__file__).with_name("simulations")
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parent.parent / "simulations"


def local_directory(pack: Path) -> Path:
    """Where ``specplan simulate`` writes by itself: beside the pack."""
    return pack / "simulations"


def read_all(directories: Iterable[Path], arch: str) -> list[Simulations]:
    """Every file of simulations for an arch."""
    return [
        read(path)
        for directory in directories
        for path in sorted((directory / arch).glob("*.yaml"))
    ]


def dumps(found: Simulations) -> str:
    """The text of a file; the same for the same contents."""
    body = {
        "schema": SCHEMA,
        "family": found.family,
        "arch": found.arch,
        "date": found.date,
        "tools": dict(found.tools),
        "simulator": found.simulator,
        "suite": list(found.suite),
        "not seen": list(found.unseen),
        "plans": {
            symbol: {
                "device_code": plan.device_code,
                "host_code": plan.host_code,
                "cells": list(plan.cells),
                "calls": plan.calls,
                "comparisons": plan.comparisons,
                "instructions": plan.instructions,
                "outputs": [
                    {"output": m.output, "measure": m.measure, "error": m.error, "bound": m.bound}
                    for m in plan.outputs
                ],
            }
            for symbol, plan in sorted(found.plans.items())
        },
    }
    text = _HEADER + yaml.safe_dump(body, sort_keys=False, width=120, default_flow_style=None)
    return f"{text}{_SEAL}{sha256(text.encode()).hexdigest()}\n"


def write(found: Simulations, path: Path) -> None:
    write_atomically(path, dumps(found).encode())


def read(path: Path) -> Simulations:
    """One file; SimulationFileError names it and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SimulationFileError(f"{path}: cannot be read ({error})") from error
    body, seal, end = text.rpartition(_SEAL)
    if not seal or end != f"{sha256(body.encode()).hexdigest()}\n":
        raise SimulationFileError(f"{path}: does not match its own digest: it was edited or cut")
    try:
        return _parsed(yaml.load(body, Loader=_LOADER))
    except yaml.YAMLError as error:
        raise SimulationFileError(f"{path}: cannot be read ({error})") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SimulationFileError(f"{path}: not a file of simulations ({error!r})") from error


def _parsed(body: Mapping[str, Any]) -> Simulations:
    if body["schema"] != SCHEMA:
        raise ValueError(f"schema {body['schema']!r}, this version reads {SCHEMA}")
    arch = text_of(body["arch"])
    plans = {}
    for symbol, plan in body["plans"].items():
        if not text_of(symbol).endswith(f"__{arch}"):
            raise ValueError(f"plan {symbol} is not of arch {arch}")
        plans[symbol] = SimulatedPlan(
            digest_of(plan["device_code"]),
            digest_of(plan["host_code"]),
            tuple(map(text_of, plan["cells"])),
            natural(plan["calls"], 1),
            natural(plan["comparisons"], 1),
            natural(plan["instructions"], 1),
            tuple(map(_measured, plan["outputs"])),
        )
        if not plans[symbol].cells or not plans[symbol].outputs:
            raise ValueError(f"plan {symbol} ran nothing")
    return Simulations(
        text_of(body["family"]),
        arch,
        text_of(body["date"]),
        texts(body["tools"]),
        digest_of(body["simulator"]),
        tuple(map(text_of, body["suite"])),
        tuple(map(text_of, body["not seen"])),
        plans,
    )


def _measured(body: Mapping[str, Any]) -> Measured:
    error, bound = float(body["error"]), float(body["bound"])
    if not (math.isfinite(bound) and 0 <= error <= bound):
        raise ValueError(f"{error!r} does not keep its bound {bound!r}")
    return Measured(text_of(body["output"]), text_of(body["measure"]), error, bound)

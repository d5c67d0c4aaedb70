"""Calls of compiled functions, made from their signatures, and what they answer on a host."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from specplan.families import FAMILIES
from specplan.plans.manifest import PlanRecord
from specplan.plans.signature import Scalar, Tensor
from specplan.tools.build import link

from support import packs, recorder

_PARAMETER = re.compile(r"(\w+): (?:Tensor\(\[([^\]]*)\], (\w+)\)|(\w+))")
_INTEGERS = (0, 1, 2, 3, 4, 8, 64, -1, 2**31 - 1, -(2**31))
_SIZES = (0, 1, 2, 8, 64, 65, 1000)


def calls_of(symbol: str, plan: PlanRecord, count: int) -> list[tuple[str, list[Any]]]:
    """Calls of one function: the one that loads its code, plain ones of one size, and both with
    something changed.
    """
    signature = plan.signature
    idle = [described(v) for v in FAMILIES[plan.family].idle_arguments(plan, torch.device("cpu"))]
    chance = random.Random(symbol)
    parameters = _PARAMETER.findall(signature.partition("(")[2])
    tensors, scalars = operations(plan)
    # The launch's own numbers come from the planning rule, which gives none below 1: compiled code
    # divides by some of them.
    planned = {len(tensors) + at for at, scalar in enumerate(scalars) if scalar.planned}
    names = sorted({n for _, shape, _, _ in parameters for n in re.findall(r"n\d+", shape)})
    found = []
    for number in range(count):
        sizes = dict.fromkeys(names, chance.choice((8, 64)))
        if number % 3:
            for name in chance.sample(names, min(len(names), chance.randint(0, 2))):
                sizes[name] = chance.choice(_SIZES)
        small = [chance.choice((0, 1, 1, 1, 2, 4)) for _ in parameters]
        arguments: list[Any] = []
        for (_, shape, dtype, scalar), value in zip(parameters, small, strict=True):
            if not dtype:
                arguments.append(float(value) if scalar.startswith("float") else value)
                continue
            extents = [sizes[part] if part in sizes else int(part) for part in _parts(shape)]
            arguments.append({"shape": extents, "dtype": dtype})
        arguments = [max(1, v) if at in planned else v for at, v in enumerate(arguments)]
        if number % 4 < 2:
            arguments = list(idle)
        if number % 2:
            at = chance.randrange(len(arguments))
            value = arguments[at]
            if isinstance(value, dict):
                changed: list[Any] = [
                    {**value, "dtype": "int64" if value["dtype"] != "int64" else "int32"},
                    {**value, "shape": value["shape"][:-1]},
                    {**value, "shape": [*value["shape"][:-1], 7]},
                    None,
                    5,
                ]
                arguments[at] = chance.choice(changed)
            else:
                arguments[at] = chance.choice(
                    [v for v in _INTEGERS if v > 0] if at in planned else _INTEGERS
                )
        if number == 1:
            arguments.pop()
        found.append((symbol, arguments))
    return found


def operations(plan: PlanRecord) -> tuple[tuple[Tensor, ...], tuple[Scalar, ...]]:
    """The tensors and scalars of a plan's compiled function, as its op declares them."""
    op = import_module(f"specplan.plans.{plan.family}").OPS[plan.op]
    return op.in_form(op.form_of(dict(plan.spec)))


def described(value: Any) -> Any:
    """A tensor as its shape and dtype; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    assert value.is_contiguous()
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _parts(shape: str) -> list[str]:
    return [part.strip() for part in shape.split(",") if part.strip()]


def answers(
    command: list[str],
    path: list[Path],
    root: Path,
    host: str,
    calls: object,
    scratch: Path,
    *first: Path,
) -> dict[str, Any]:
    """What the functions of a pack answer under a Python of some host."""
    source, shared = scratch / "recorder.c", scratch / f"recorder-{host}.so"
    source.write_text(recorder.SOURCE)
    options = ["-shared", "-fPIC", "-w", "-fno-sanitize=all", "-o", str(shared), str(source)]
    subprocess.run([*link.compiler(host), *options], check=True)
    done = subprocess.run(
        [
            *command,
            str(Path(__file__).with_name("answers.py")),
            str(root),
            packs.ARCH,
            str(shared),
            *map(str, first),
        ],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    # Compiled code prints a line about a launch that no device could take.
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["machine"] == host
    return found

"""Certificates: the evidence that a plan's device code passed every check of its cells on a named
GPU.

One file an arch and family, ``certificates/<arch>/<family>.yaml``. A certificate binds to bits: to
the hash of the device code, to the launch code's, to the signature, and for each cell to the launch
parameters and the problem's geometry. If any of these changes, the certificate no longer matches
and the cell falls back to candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from specplan.plans import ranges
from specplan.plans.cell import Cell
from specplan.plans.manifest import Manifest, Use

SCHEMA = 1
#: More cells than this in one file is a slip of the pen, and would take minutes to read.
MOST_CELLS = 2_000_000
#: The mismatch of a certificate that says nothing of a cell.
NO_EVIDENCE = "no evidence for this cell"


class CertificateError(ValueError):
    """A certificate file that cannot be read."""


@dataclass(frozen=True)
class CertifiedPlan:
    """The bits that were certified."""

    device_code: str
    host_code: str
    signature: str


@dataclass(frozen=True)
class Result:
    """What was measured for one cell.

    ``error`` is in the unit that ``measure`` names; ``bound`` is the most that the check allows;
    ``checks`` is how many comparisons of whole buffers were made.
    """

    measure: str
    error: float
    bound: float
    checks: int


@dataclass(frozen=True)
class CertifiedCell:
    """One cell's evidence: the plans that ran, their launch parameters, what was measured."""

    problem: str
    dtype: str
    splits: int
    tokens: int
    requests: int
    uses: tuple[Use, ...]
    result: Result


@dataclass(frozen=True)
class Certificate:
    """One certificate file."""

    family: str
    arch: str
    device: Mapping[str, Any]
    date: str
    tools: Mapping[str, str]
    sources: Mapping[str, str]
    suite: Sequence[str]
    problems: Mapping[str, Mapping[str, int]]
    plans: Mapping[str, CertifiedPlan]
    cells: tuple[CertifiedCell, ...] = field(repr=False)

    @cached_property
    def table(self) -> Mapping[tuple[str, str, int, int, int], CertifiedCell]:
        return {(c.problem, c.dtype, c.splits, c.tokens, c.requests): c for c in self.cells}

    def mismatch(self, cell: Cell, uses: tuple[Use, ...], manifest: Manifest) -> str | None:
        """Why this certificate does not cover a cell as the pack has it, or None when it does."""
        evidence = self.table.get(
            (cell.problem, cell.dtype, cell.splits, cell.tokens, cell.requests)
        )
        if evidence is None:
            return NO_EVIDENCE
        geometry = manifest.problems[cell.family][cell.problem]
        if self.problems.get(cell.problem) != geometry:
            return f"the geometry of problem {cell.problem!r} changed"
        if evidence.uses != uses:
            return "the planning rule gives other plans or launch parameters"
        for use in uses:
            plan = manifest.plans[use.symbol]
            certified = self.plans.get(use.symbol)
            if certified is None:
                return f"plan {use.symbol} has no evidence"
            for what in ("device_code", "host_code", "signature"):
                if getattr(certified, what) != getattr(plan, what):
                    return f"{what.replace('_', ' ')} changed ({self.changed_inputs(plan.key)})"
        return None

    def changed_inputs(self, key: Mapping[str, Any]) -> str:
        """Which sources and tools differ between what was certified and a plan's key."""
        changed = [
            f"source {name.removeprefix('specplan.')}"
            for name, digest in key["sources"].items()
            if self.sources.get(name) != digest
        ]
        changed += [
            f"{name} {self.tools.get(name, 'absent')} -> {version}"
            for name, version in key["tools"].items()
            if self.tools.get(name) != version
        ]
        return ", ".join(changed) or "no source or tool version differs"


def default_directory() -> Path:
    """The certificates of this installation: packaged beside the code, or at the root of a
    checkout.
    """
    packaged = Path(__file__).with_name("certificates")
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parent.parent / "certificates"


def read_all(directories: Iterable[Path], arch: str) -> list[Certificate]:
    """Every certificate for an arch in ``<directory>/<arch>/*.yaml``."""
    found = []
    for directory in directories:
        for path in sorted((directory / arch).glob("*.yaml")):
            found.append(read(path))
    return found


def read(path: Path) -> Certificate:
    """One certificate file; CertificateError names the file and what is wrong."""
    try:
        body = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
        if body["schema"] != SCHEMA:
            raise CertificateError(
                f"{path}: schema {body['schema']!r}, this version of specplan reads {SCHEMA}"
            )
        return Certificate(
            _text(body["family"]),
            _text(body["arch"]),
            dict(body["device"]),
            str(body["date"]),
            _texts(body["tools"]),
            _texts(body["sources"]),
            tuple(map(_text, body["suite"])),
            {_text(name): _integers(geometry) for name, geometry in body["problems"].items()},
            {
                _text(symbol): CertifiedPlan(
                    _text(p["device_code"]), _text(p["host_code"]), _text(p["signature"])
                )
                for symbol, p in body["plans"].items()
            },
            tuple(_cells(body["cells"])),
        )
    except CertificateError:
        raise
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CertificateError(f"{path}: cannot be read ({error})") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CertificateError(f"{path}: not a certificate ({error!r})") from error


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no integer")
    return value


def _texts(body: Mapping[Any, Any]) -> Mapping[str, str]:
    return {_text(name): _text(value) for name, value in body.items()}


def _integers(body: Mapping[Any, Any]) -> Mapping[str, int]:
    return {_text(name): _integer(value) for name, value in body.items()}


def _result(row: Mapping[str, Any]) -> Result:
    """What was measured; an error beyond its bound, or none at all, is no evidence."""
    result = Result(
        _text(row["measure"]), float(row["error"]), float(row["bound"]), _integer(row["checks"])
    )
    if not 0 <= result.error <= result.bound or result.checks < 1:
        raise ValueError(f"{result} does not keep its bound")
    return result


def _cells(groups: Iterable[Mapping[str, Any]]) -> Iterable[CertifiedCell]:
    count = 0
    for group in groups:
        uses = tuple(
            Use(_text(u["symbol"]), tuple(_integers(u["launch"]).items())) for u in group["plans"]
        )
        for row in group["results"]:
            result = _result(row)
            many, often = ranges.parse(row["tokens"]), ranges.parse(row["requests"])
            count += len(many) * len(often)
            if count > MOST_CELLS:
                raise ValueError(f"more than {MOST_CELLS:,} cells")
            for tokens in many:
                for requests in often:
                    yield CertifiedCell(
                        _text(group["problem"]),
                        _text(group["dtype"]),
                        _integer(group["splits"]),
                        tokens,
                        requests,
                        uses,
                        result,
                    )


def dumps(certificate: Certificate) -> str:
    """The text of a certificate file; cells with equal results share a line."""
    groups: dict[tuple[Any, ...], dict[tuple[Result, int], set[int]]] = {}
    for cell in certificate.cells:
        at = (cell.problem, cell.dtype, cell.splits, cell.uses)
        groups.setdefault(at, {}).setdefault((cell.result, cell.tokens), set()).add(cell.requests)
    body = {
        "schema": SCHEMA,
        "family": certificate.family,
        "arch": certificate.arch,
        "device": dict(certificate.device),
        "date": certificate.date,
        "tools": dict(certificate.tools),
        "sources": dict(certificate.sources),
        "suite": list(certificate.suite),
        "problems": {name: dict(g) for name, g in certificate.problems.items()},
        "plans": {
            symbol: {
                "device_code": plan.device_code,
                "host_code": plan.host_code,
                "signature": plan.signature,
            }
            for symbol, plan in sorted(certificate.plans.items())
        },
        "cells": [
            {
                "problem": problem,
                "dtype": dtype,
                "splits": splits,
                "plans": [{"symbol": u.symbol, "launch": dict(u.launch)} for u in uses],
                "results": _merge(rows),
            }
            for (problem, dtype, splits, uses), rows in sorted(
                groups.items(), key=lambda item: (item[0][:3], str(item[0][3]))
            )
        ],
    }
    header = (
        "# Written by `specplan certify`. Evidence, not configuration: it binds to the device code "
        "that it names,\n# and an edit makes it false.\n"
    )
    return header + yaml.safe_dump(body, sort_keys=False, width=140, default_flow_style=None)


def _merge(rows: Mapping[tuple[Result, int], set[int]]) -> list[dict[str, Any]]:
    by_requests: dict[tuple[Result, tuple[int, ...]], list[int]] = {}
    for (result, tokens), requests in sorted(rows.items(), key=lambda item: item[0][1]):
        by_requests.setdefault((result, tuple(sorted(requests))), []).append(tokens)
    return [
        {
            "tokens": ranges.spell(tokens),
            "requests": ranges.spell(requests),
            "measure": result.measure,
            "error": result.error,
            "bound": result.bound,
            "checks": result.checks,
        }
        for (result, requests), tokens in by_requests.items()
    ]

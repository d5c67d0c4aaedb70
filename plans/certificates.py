"""Certificates: the evidence that a plan's device code passed every check of its cells on a named
GPU.

A certificate is two files. The head, ``certificates/<arch>/<family>.yaml``, is the page that people
review: device, tools, sources, plans, and the worst error of every output. It names by sha256 a
generated file, ``<family>-<sha256>.json``, that holds the cells with their launch parameters
(:mod:`specplan.plans.evidence`). Both carry a digest, so that an accident or an edit is seen.

A certificate binds to bits: to the hash of the device code, to the launch code's, to the signature,
and for each cell to the launch parameters and the problem's geometry. If any of these changes, the
certificate no longer matches and the cell falls back to candidate.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from specplan.plans import evidence, ranges
from specplan.plans.evidence import (
    NO_EVIDENCE,
    SCHEMA,
    CertificateError,
    CertifiedCell,
    CertifiedGroup,
    CertifiedPlan,
    Evidence,
    default_directory,
    group_cells,
    heads,
)
from specplan.plans.manifest import write_atomically
from specplan.plans.version import DATE

__all__ = [
    "NO_EVIDENCE",
    "Certificate",
    "CertificateError",
    "CertifiedCell",
    "CertifiedGroup",
    "CertifiedPlan",
    "Evidence",
    "Output",
    "Tally",
    "default_directory",
    "group_cells",
    "heads",
    "read",
    "read_all",
    "write",
]

#: Measures that count what is not equal bit for bit: their bound is 0, and no other's is.
BIT_EQUALITY = frozenset(
    {
        "bits that differ",
        "bytes that differ",
        "words that differ",
        "elements that differ",
        "elements written",
        "rows that should be 0 and are not",
    }
)

#: What a certificate says of its errors. Certificates before schema 2 kept one measure of each
#: cell.
EVERY_OUTPUT = "every output of every cell"
CLOSEST_MEASURE = (
    "of each cell only the measure that came closest to its bound, with the number of comparisons "
    "of all measures"
)


@dataclass(frozen=True, order=True)
class Output:
    """One thing that the checks measure: what is compared, the most that is allowed, and where that
    bound comes from.
    """

    name: str
    measure: str
    bound: float
    source: str

    def check(self) -> None:
        """ValueError where the bound is none: zero belongs to bit equality, and to nothing else."""
        for value in (self.name, self.measure, self.source):
            evidence.text_of(value)
        if not isinstance(self.bound, int | float) or not math.isfinite(self.bound):
            raise ValueError(f"the bound {self.bound!r} of {self.name!r} is no finite number")
        if self.bound < 0 or (self.bound == 0) != (self.measure in BIT_EQUALITY):
            raise ValueError(f"{self.bound!r} is no bound of {self.name!r} in {self.measure!r}")


@dataclass(frozen=True)
class Tally:
    """What was measured of one output: the worst error by plan and problem, and the number of
    comparisons.
    """

    output: Output
    comparisons: int
    #: symbol -> problem -> the worst error
    errors: Mapping[str, Mapping[str, float]]

    @property
    def worst(self) -> float:
        """The worst error of all plans and problems."""
        return max(error for problems in self.errors.values() for error in problems.values())


@dataclass(frozen=True)
class Certificate(Evidence):
    """A certificate: the cells that it covers, and what people want to know of it."""

    device: Mapping[str, Any]
    date: str
    suite: Sequence[str]
    #: Which errors the tallies hold: ``EVERY_OUTPUT`` or ``CLOSEST_MEASURE``.
    recorded: str
    tallies: tuple[Tally, ...]


def join_tallies(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """One tally an output: those with a tolerance first, then those of bit equality."""
    comparisons: Counter[Output] = Counter()
    errors: dict[Output, dict[str, dict[str, float]]] = {}
    for tally in tallies:
        comparisons[tally.output] += tally.comparisons
        of_output = errors.setdefault(tally.output, {})
        for symbol, problems in tally.errors.items():
            of_plan = of_output.setdefault(symbol, {})
            for problem, error in problems.items():
                of_plan[problem] = max(error, of_plan.get(problem, error))
    return tuple(
        Tally(output, comparisons[output], errors[output])
        for output in sorted(errors, key=lambda o: (o.bound == 0, o))
    )


def read_all(directories: Iterable[Path], arch: str) -> list[Certificate]:
    """Every certificate for an arch in ``<directory>/<arch>/*.yaml``."""
    return [read(path) for path in evidence.heads(directories, arch)]


# Writing

_HEADER = (
    "# Written by `specplan certify`. Evidence, not configuration: it binds to the bits that it "
    "names,\n# and an edit makes it false.\n"
)
_WIDE = 1 << 20


def write(path: Path, certificate: Certificate) -> None:
    """Write a certificate: the cells file first, then the head ``path`` that names it.

    A reader sees the old certificate or the new one. The cells file of the certificate that was
    there before goes last.
    """
    cells = evidence.dumps(certificate)
    name = evidence.cells_name(path.stem, cells)
    before = _cells_named(path)
    write_atomically(path.with_name(name), cells.encode())
    write_atomically(path, _head(certificate, name, cells).encode())
    if before not in (None, name):
        path.with_name(str(before)).unlink(missing_ok=True)


def _cells_named(path: Path) -> str | None:
    """The cells file that a head names, if it is one of the head's own form."""
    try:
        match = evidence.CELLS.search(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    own = re.compile(rf"{re.escape(path.stem)}-[0-9a-f]{{16}}\.json")
    return match[1] if match and own.fullmatch(match[1]) else None


def _head(certificate: Certificate, name: str, cells: str) -> str:
    signatures: dict[str, str] = {}
    for plan in certificate.plans.values():
        signatures.setdefault(plan.signature, f"signature {len(signatures) + 1}")
    of_plans = {
        symbol: {
            "device_code": plan.device_code,
            "host_code": plan.host_code,
            "signature": signatures[plan.signature],
        }
        for symbol, plan in sorted(certificate.plans.items())
    }
    tallies = [
        {
            "output": tally.output.name,
            "measure": tally.output.measure,
            "bound": tally.output.bound,
            "source": tally.output.source,
            "comparisons": tally.comparisons,
            "worst": tally.worst,
            "errors": {
                symbol: dict(sorted(problems.items()))
                for symbol, problems in sorted(tally.errors.items())
            },
        }
        for tally in certificate.tallies
    ]
    problems = {problem: dict(geometry) for problem, geometry in certificate.problems.items()}
    signed = {number: signature for signature, number in signatures.items()}
    body = [
        _dump(
            {"schema": SCHEMA, "family": certificate.family, "arch": certificate.arch}, flow=False
        ),
        _dump({"device": dict(certificate.device), "date": certificate.date}, _WIDE),
        _dump({"suite": list(certificate.suite)}, flow=False),
        _dump({"recorded": certificate.recorded}, flow=False),
        _dump({"tools": dict(certificate.tools)}, flow=False),
        _dump({"sources": dict(certificate.sources)}, _WIDE, flow=False),
        _dump({"problems": problems}, _WIDE),
        _dump({"outputs": tallies}, _WIDE),
        _dump({"signatures": signed}, flow=False),
        _dump({"plans": of_plans}, _WIDE),
    ]
    text = _HEADER + "".join(body)
    digest = sha256(cells.encode()).hexdigest()
    text += f"cells: {{file: {name}, sha256: {digest}, count: {certificate.count}}}\n"
    return sealed(text)


def sealed(text: str) -> str:
    """The text of a head, ending with the digest of everything before it."""
    return f"{text}digest: {sha256(text.encode()).hexdigest()}\n"


def _dump(body: Mapping[str, Any], width: int = 100, flow: bool | None = None) -> str:
    text: str = yaml.safe_dump(
        body, sort_keys=False, width=width, default_flow_style=flow, allow_unicode=True
    )
    return text


# Reading

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read(path: Path) -> Certificate:
    """One certificate; CertificateError names the file and what is wrong."""
    text = evidence.head_text(path)
    cells = evidence.cells_of(path, text)
    try:
        body = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise CertificateError(f"{path}: cannot be read ({error})") from error
    try:
        found = _from_body(body, cells)
        _check(found, path)
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CertificateError(f"{path}: not a certificate ({error!r})") from error


def _from_body(body: Mapping[str, Any], cells: Evidence) -> Certificate:
    """The certificate, where head and cells file agree."""
    if body["schema"] != SCHEMA:
        raise ValueError(f"schema {body['schema']!r}")
    signatures = evidence.texts(body["signatures"])
    plans = {
        symbol: CertifiedPlan(
            evidence.digest_of(plan["device_code"]),
            evidence.digest_of(plan["host_code"]),
            signatures[plan["signature"]],
        )
        for symbol, plan in body["plans"].items()
    }
    same = {
        "family": body["family"],
        "arch": body["arch"],
        "tools": evidence.texts(body["tools"]),
        "sources": evidence.texts(body["sources"]),
        "problems": {name: evidence.integers(g) for name, g in body["problems"].items()},
        "plans": plans,
    }
    for name, value in same.items():
        if value != getattr(cells, name):
            raise ValueError(f"the head and the file of cells differ in {name}")
    tallies = tuple(
        Tally(
            Output(row["output"], row["measure"], _number(row["bound"]), row["source"]),
            evidence.natural(row["comparisons"], 1),
            {
                symbol: {problem: _number(error) for problem, error in problems.items()}
                for symbol, problems in row["errors"].items()
            },
        )
        for row in body["outputs"]
    )
    for row, tally in zip(body["outputs"], tallies, strict=True):
        if row["worst"] != tally.worst:
            raise ValueError(f"the worst error of {tally.output.name!r} is not {row['worst']!r}")
    return Certificate(
        **{each.name: getattr(cells, each.name) for each in fields(Evidence)},
        device=dict(body["device"]),
        date=evidence.text_of(body["date"]),
        suite=tuple(map(evidence.text_of, body["suite"])),
        recorded=body["recorded"],
        tallies=tallies,
    )


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _check(certificate: Certificate, path: Path) -> None:
    """ValueError for what cannot be true."""
    check_device(certificate.device, certificate.arch)
    check_date(certificate.date)
    if not certificate.suite:
        raise ValueError("no check was made")
    if certificate.recorded not in (EVERY_OUTPUT, CLOSEST_MEASURE):
        raise ValueError(f"recorded is {certificate.recorded!r}")
    compared: set[tuple[str, str]] = set()
    for tally in certificate.tallies:
        tally.output.check()
        for symbol, problems in tally.errors.items():
            for problem, error in problems.items():
                if symbol not in certificate.plans or problem not in certificate.problems:
                    raise ValueError(f"an error of {symbol} in {problem}, which no cell used")
                if not 0 <= error <= tally.output.bound:  # false for NaN too
                    raise ValueError(
                        f"the error {error!r} of {tally.output.name!r} does not keep its bound "
                        f"{tally.output.bound!r}"
                    )
                compared.add((symbol, problem))
    ran = {(use.symbol, group.problem) for group in certificate.groups for use in group.uses}
    if certificate.recorded == EVERY_OUTPUT and ran - compared:
        symbol, problem = min(ran - compared)
        raise ValueError(f"nothing was compared of plan {symbol} in problem {problem}")
    if ran and not compared:
        raise ValueError("nothing was compared")


def check_device(device: Mapping[str, Any], arch: str) -> None:
    """ValueError unless a device says what it is, and runs code of that arch."""
    evidence.text_of(device["name"])
    evidence.text_of(device["driver"])
    evidence.natural(device["sm_count"], 1, ranges.MOST)
    digits = re.fullmatch(r"(\d+)\.(\d+)", device["capability"])
    if digits is None or f"sm_{digits[1]}{digits[2]}a" != arch:
        raise ValueError(f"a device of capability {device['capability']!r} does not run {arch}")


def check_date(text: str) -> None:
    """ValueError for what is no date, or is in the future. A clock may be behind: then this
    version's own date is today. And a day ahead of it: it is tomorrow somewhere.
    """
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        raise ValueError(f"{text!r} is no date")
    date = datetime.date.fromisoformat(text)
    today = datetime.datetime.now(datetime.UTC).date()
    if date > max(today, datetime.date.fromisoformat(DATE)) + datetime.timedelta(days=1):
        raise ValueError(f"the date {text} is in the future")

"""Evidence: the cells that a certificate covers, the bits that they ran, and what that makes of a
pack's cells.

Everything that says of a cell whether it is certified, candidate or stale asks :func:`judge`:
coverage, deployments, ``explain``, ``verify``, ``list`` and the build's marking. The runtime asks
:func:`backed`, the same for a whole pack at once.

The cells file is the machine's part of a certificate: compact JSON with a digest of its own, named
by its content. The head, for people, is in :mod:`specplan.plans.certificates`. Nothing here reads
YAML, because a server reads evidence too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from specplan.plans import manifest, ranges
from specplan.plans.cell import Cell, State
from specplan.plans.manifest import Group, Manifest, Use

SCHEMA = 2
#: The mismatch of a certificate that says nothing of a cell.
NO_EVIDENCE = "no evidence for this cell"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CertificateError(ValueError):
    """A certificate that cannot be read, was edited, or says what cannot be true."""


@dataclass(frozen=True)
class CertifiedPlan:
    """The bits that were certified."""

    device_code: str
    host_code: str
    signature: str


@dataclass(frozen=True)
class CertifiedCell:
    """One cell's evidence: the plans that ran, their launch parameters, and how many comparisons
    were made.
    """

    problem: str
    dtype: str
    splits: int
    tokens: int
    requests: int
    uses: tuple[Use, ...]
    comparisons: int


@dataclass(frozen=True)
class CertifiedGroup:
    """Cells of one problem, dtype and splits that ran the same plans with the same launch
    parameters.
    """

    problem: str
    dtype: str
    splits: int
    uses: tuple[Use, ...]
    #: ``(tokens, requests, comparisons of each cell)``; a cell is in one of these products.
    extent: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Evidence:
    """What a certificate covers. It binds to bits: to the hash of the device code, to the launch
    code's, to the signature, and for each cell to the launch parameters and the problem's geometry.
    """

    family: str
    arch: str
    tools: Mapping[str, str]
    sources: Mapping[str, str]
    problems: Mapping[str, Mapping[str, int]]
    plans: Mapping[str, CertifiedPlan]
    groups: tuple[CertifiedGroup, ...] = field(repr=False)

    @cached_property
    def index(
        self,
    ) -> Mapping[tuple[str, str, int, int], Mapping[tuple[Use, ...], Collection[int]]]:
        """(problem, dtype, splits, tokens) -> the plans that ran -> the requests that they ran."""
        found: dict[tuple[str, str, int, int], dict[tuple[Use, ...], set[int]]] = {}
        for group in self.groups:
            for tokens, requests, _ in group.extent:
                for count in tokens:
                    at = (group.problem, group.dtype, group.splits, count)
                    found.setdefault(at, {}).setdefault(group.uses, set()).update(requests)
        return found

    @property
    def count(self) -> int:
        """How many cells are covered."""
        return sum(len(t) * len(r) for group in self.groups for t, r, _ in group.extent)

    def cells(self) -> Iterator[CertifiedCell]:
        """Every cell that is covered."""
        for group in self.groups:
            for tokens, requests, comparisons in group.extent:
                for count in tokens:
                    for request in requests:
                        yield CertifiedCell(
                            *(group.problem, group.dtype, group.splits, count, request),
                            *(group.uses, comparisons),
                        )

    def covered(self, group: Group, tokens: int) -> Collection[int]:
        """The requests of that many tokens that ran a pack's group, with whatever bits."""
        at = (group.problem, group.dtype, group.splits, tokens)
        return self.index.get(at, {}).get(group.uses, ())

    def mismatch(self, cell: Cell, uses: tuple[Use, ...], pack: Manifest) -> str | None:
        """Why this certificate does not cover a cell as the pack has it, or None when it does."""
        ran = self.index.get((cell.problem, cell.dtype, cell.splits, cell.tokens), {})
        if not any(cell.requests in requests for requests in ran.values()):
            return NO_EVIDENCE
        if cell.requests not in ran.get(uses, ()):
            other = "the planning rule gives other plans or launch parameters"
            return self.unlike(cell.problem, (), pack) or other
        return self.unlike(cell.problem, uses, pack)

    def unlike(self, problem: str, uses: tuple[Use, ...], pack: Manifest) -> str | None:
        """How the pack's geometry of a problem or its plans differ from what was certified."""
        if self.problems.get(problem) != pack.problems[self.family][problem]:
            return f"the geometry of problem {problem!r} changed"
        for use in uses:
            plan = pack.plans[use.symbol]
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
        python = key.get("python", "")
        # One version alone, where the key names those that are known to compile alike.
        if python and " " not in python:
            changed.append(f"Python {python}")
        return ", ".join(changed) or "no source or tool version differs"


def group_cells(cells: Iterable[CertifiedCell]) -> tuple[CertifiedGroup, ...]:
    """Compress cells into groups; the same for the same set of cells.

    Raises
    ------
    ValueError
        A cell is there twice.
    """
    found: dict[tuple[Any, ...], dict[tuple[int, int], set[int]]] = {}
    seen: set[tuple[str, str, int, int, int]] = set()
    for cell in cells:
        name = (cell.problem, cell.dtype, cell.splits, cell.tokens, cell.requests)
        if name in seen:
            raise ValueError(f"the cell {name} is there twice")
        seen.add(name)
        rows = found.setdefault((cell.problem, cell.dtype, cell.splits, cell.uses), {})
        rows.setdefault((cell.tokens, cell.comparisons), set()).add(cell.requests)
    groups = []
    for (problem, dtype, splits, uses), rows in found.items():
        by_requests: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for (tokens, comparisons), requests in sorted(rows.items()):
            by_requests.setdefault((tuple(sorted(requests)), comparisons), []).append(tokens)
        extent = tuple((tuple(t), r, c) for (r, c), t in by_requests.items())
        groups.append(CertifiedGroup(problem, dtype, splits, uses, extent))
    groups.sort(
        key=lambda g: (g.problem, g.dtype, g.splits, [(u.symbol, u.launch) for u in g.uses])
    )
    return tuple(groups)


# What evidence makes of a pack


class Verdict(NamedTuple):
    """What a cell of a pack is, and why it is no more than that."""

    state: State
    reason: str


#: Reasons of cells whose mark in the pack is not what the evidence says.
UNMARKED = "a certificate covers it, and the pack's marks are older; `specplan mark` renews them"
UNBACKED = "the pack marks it certified, and no certificate backs that"


def judge(cell: Cell, group: Group, pack: Manifest, evidence: Iterable[Evidence]) -> Verdict:
    """Whether a cell that a pack has in ``group`` is certified, candidate or stale.

    It is certified where a certificate covers it with the bits that the pack has, **and** the pack
    marks it so: the runtime runs nothing else. It is stale where a certificate speaks of the cell
    with other bits, and a candidate without any.
    """
    mismatches = []
    for each in evidence:
        if each.family == cell.family:
            mismatch = each.mismatch(cell, group.uses, pack)
            if mismatch is None:
                if group.certified:
                    return Verdict(State.CERTIFIED, "")
                return Verdict(State.CANDIDATE, UNMARKED)
            mismatches.append(mismatch)
    stale = [mismatch for mismatch in mismatches if mismatch != NO_EVIDENCE]
    if stale:
        return Verdict(State.STALE, stale[0])
    return Verdict(State.CANDIDATE, UNBACKED if group.certified else "")


def mark(pack: Manifest, evidence: Sequence[Evidence]) -> Manifest:
    """The pack with exactly those cells marked certified that a certificate covers."""
    return _marked(pack, evidence, every=True)


def backed(pack: Manifest, evidence: Sequence[Evidence]) -> Manifest:
    """The pack with the marks that a certificate backs, and without any other: its cells are marked
    certified exactly where :func:`judge` calls them so.
    """
    return _marked(pack, evidence, every=False)


def _marked(pack: Manifest, evidence: Sequence[Evidence], *, every: bool) -> Manifest:
    by_family: dict[str, list[Evidence]] = {}
    for one in evidence:
        by_family.setdefault(one.family, []).append(one)
    bits: dict[tuple[int, str, tuple[Use, ...]], bool] = {}
    same: list[Group] = []
    entries: list[tuple[Cell, tuple[Use, ...], bool, bool]] = []
    for group in pack.groups:
        if not every and not group.certified:
            same.append(group)
            continue
        matching = []
        for number, each in enumerate(by_family.get(group.family, ())):
            at = (number, group.problem, group.uses)
            if at not in bits:
                bits[at] = each.unlike(group.problem, group.uses, pack) is None
            if bits[at]:
                matching.append(each)
        found = [
            (count, requests, set().union(*[each.covered(group, count) for each in matching]))
            for tokens, requests in group.extent
            for count in tokens
        ]
        if group.certified:
            unchanged = all(covered.issuperset(requests) for _, requests, covered in found)
        else:
            unchanged = all(covered.isdisjoint(requests) for _, requests, covered in found)
        if unchanged:
            same.append(group)
            continue
        name = (group.family, group.problem, group.dtype, pack.arch, group.splits)
        entries += [
            (Cell(*name, count, each), group.uses, group.automatic, each in covered)
            for count, requests, covered in found
            for each in requests
        ]
    if not entries:
        return pack
    # All of a changed group's cells go back to the cells that they were grouped from.
    entries += [
        (cell, group.uses, group.automatic, group.certified)
        for cell, group in replace(pack, groups=tuple(same)).cells()
    ]
    return replace(pack, groups=manifest.group_cells(entries))


class Marks(NamedTuple):
    """How a pack's marks differ from its evidence: the cells marked without a certificate that
    backs it, and those that one covers and that are not marked.
    """

    ahead: tuple[Cell, ...]
    behind: tuple[Cell, ...]


def compare(pack: Manifest, evidence: Sequence[Evidence]) -> Marks:
    """How a pack's marks differ from the evidence."""
    return differences(pack, mark(pack, evidence))


def differences(pack: Manifest, right: Manifest) -> Marks:
    """How a pack's marks differ from those that are right."""
    ahead: list[Cell] = []
    behind: list[Cell] = []
    if right is not pack:
        for cell, group in pack.cells():
            found = right.find(cell)
            if found is not None and found.certified != group.certified:
                (ahead if group.certified else behind).append(cell)
    return Marks(tuple(ahead), tuple(behind))


def mark_complaints(marks: Marks, directory: Path) -> list[str]:
    """A sentence for each way in which marks and evidence differ, with what mends it."""
    mends = f"mend it with `specplan mark {directory}`"
    said = []
    if marks.ahead:
        said.append(
            f"{directory} marks {len(marks.ahead)} cells certified that no certificate backs, and "
            f"the runtime takes them for candidates (first: {marks.ahead[0]}); {mends}"
        )
    if marks.behind:
        said.append(
            f"{directory} does not mark {len(marks.behind)} cells that a certificate covers, and "
            f"the runtime takes them for candidates (first: {marks.behind[0]}); {mends}"
        )
    return said


# Where evidence lies


def default_directory() -> Path:
    """The certificates of this installation: packaged beside the code, or at the root of a
    checkout.
    """
    packaged = Path(__file__).with_name("certificates")
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parent.parent / "certificates"


def local_directory(pack: Path) -> Path:
    """Where ``specplan certify`` puts the certificates that a user makes: beside the pack."""
    return pack / "certificates"


def heads(directories: Iterable[Path], arch: str) -> list[Path]:
    """The certificates for an arch, each named by its head: ``<directory>/<arch>/*.yaml``."""
    return [path for root in directories for path in sorted((root / arch).glob("*.yaml"))]


def read_all(
    directories: Iterable[Path], arch: str, families: Collection[str]
) -> tuple[list[Evidence], list[CertificateError]]:
    """The evidence of some families for an arch, and what could not be read of it."""
    found, wrong = [], []
    for path in heads(directories, arch):
        if path.name.partition(".")[0] in families:
            try:
                found.append(cells_of(path, head_text(path)))
            except CertificateError as error:
                wrong.append(error)
    return found, wrong


def head_text(path: Path) -> str:
    """The text of a head."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(f"{path}: cannot be read ({error})") from error


#: How a head names its cells file, in the last line but one.
CELLS = re.compile(
    r"^cells: \{file: ([^ ,/]+), sha256: ([0-9a-f]{64}), count: (\d+)\}\n"
    r"digest: ([0-9a-f]{64})\n\Z",
    re.MULTILINE,
)


def cells_of(path: Path, text: str) -> Evidence:
    """The cells file that a head names, checked against the head's digest and its own."""
    named = CELLS.search(text)
    if named is None:
        schema = re.search(r"^schema: (\d+)$", text, re.MULTILINE)
        if schema and int(schema[1]) != SCHEMA:
            raise CertificateError(
                f"{path}: schema {schema[1]}, this version of specplan reads {SCHEMA}; "
                "certify again"
            )
        raise CertificateError(f"{path}: does not end as a certificate does: it was edited or cut")
    whole = text[: text.rindex("digest: ")]
    if sha256(whole.encode()).hexdigest() != named[4]:
        raise CertificateError(f"{path}: does not match its own digest: it was edited")
    beside = path.with_name(named[1])
    try:
        data = beside.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: its cells cannot be read ({error})") from error
    if sha256(data).hexdigest() != named[2]:
        raise CertificateError(f"{path}: {beside} is not the file of cells that it names")
    found = loads(data.decode("utf-8", "replace"), beside)
    if found.count != int(named[3]):
        raise CertificateError(f"{path}: says {named[3]} cells, {beside} has {found.count}")
    if found.arch != path.parent.name:
        raise CertificateError(f"{path}: is of arch {found.arch!r}, and lies in {path.parent}")
    if found.family != path.name.partition(".")[0]:
        raise CertificateError(f"{path}: is of family {found.family!r}, by its name it is not")
    return found


# The cells file


def cells_name(stem: str, text: str) -> str:
    """The name of a cells file: by content, so that a head never names another's cells."""
    return f"{stem}-{sha256(text.encode()).hexdigest()[:16]}.json"


def dumps(evidence: Evidence) -> str:
    """The text of the cells file: the same for the same contents, with a digest of its own."""
    signatures = sorted({plan.signature for plan in evidence.plans.values()})
    symbols = sorted(evidence.plans)
    number = {symbol: at for at, symbol in enumerate(symbols)}
    body = {
        "schema": SCHEMA,
        "family": evidence.family,
        "arch": evidence.arch,
        "tools": dict(evidence.tools),
        "sources": dict(evidence.sources),
        "problems": {name: dict(g) for name, g in evidence.problems.items()},
        "signatures": signatures,
        "plans": [
            [symbol, plan.device_code, plan.host_code, signatures.index(plan.signature)]
            for symbol, plan in ((symbol, evidence.plans[symbol]) for symbol in symbols)
        ],
    }
    uses: dict[tuple[Use, ...], int] = {}
    groups = [
        [
            *(group.problem, group.dtype, group.splits, uses.setdefault(group.uses, len(uses))),
            [[ranges.spell(t), ranges.spell(r), c] for t, r, c in group.extent],
        ]
        for group in evidence.groups
    ]
    ran = [[[number[use.symbol], dict(use.launch)] for use in each] for each in uses]
    text = _compact(body).removesuffix("}")
    for name, rows in (("uses", ran), ("groups", groups)):
        text += f',\n"{name}":[\n' + ",\n".join(map(_compact, rows)) + "\n]"
    return sealed(text)


def sealed(text: str) -> str:
    """The text of a cells file, which lacks its closing brace, ending with its own digest."""
    return f'{text}{_SEAL}{sha256(text.encode()).hexdigest()}"}}\n'


#: What stands before the digest, which is the last value of the text.
_SEAL = ',\n"digest":"'


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def loads(text: str, path: Path) -> Evidence:
    """Read a cells file; CertificateError names the file and what is wrong."""
    body, seal, end = text.rpartition(_SEAL)
    if not seal or end != f'{sha256(body.encode()).hexdigest()}"}}\n':
        raise CertificateError(f"{path}: does not match its own digest: it was edited or cut")
    try:
        found = json.loads(text)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}, this version reads {SCHEMA}")
        return _from_body(found)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CertificateError(f"{path}: not a file of certified cells ({error!r})") from error


def _from_body(body: Mapping[str, Any]) -> Evidence:
    arch = text_of(body["arch"])
    signatures = [text_of(signature) for signature in body["signatures"]]
    plans = {
        text_of(symbol): CertifiedPlan(
            digest_of(device_code), digest_of(host_code), signatures[natural(signature)]
        )
        for symbol, device_code, host_code, signature in body["plans"]
    }
    for symbol in plans:
        if not symbol.endswith(f"__{arch}"):
            raise ValueError(f"plan {symbol} is not of arch {arch}")
    symbols = list(plans)
    problems = {text_of(name): integers(geometry) for name, geometry in body["problems"].items()}
    uses = [
        tuple(Use(symbols[natural(at)], tuple(integers(launch).items())) for at, launch in each)
        for each in body["uses"]
    ]
    if not all(uses):
        raise ValueError("a group ran no plan")
    groups = []
    total = 0
    for problem, dtype, splits, ran, rows in body["groups"]:
        if problem not in problems:
            raise ValueError(f"a group is of problem {problem!r}, which has no geometry")
        extent = tuple(
            [
                (*ranges.extent(tokens, requests), natural(comparisons, 1))
                for tokens, requests, comparisons in rows
            ]
        )
        total = ranges.counted(total, extent)
        splits = natural(splits, 1, ranges.MOST)
        groups.append(CertifiedGroup(problem, text_of(dtype), splits, uses[natural(ran)], extent))
    found = Evidence(
        text_of(body["family"]),
        arch,
        texts(body["tools"]),
        {name: digest_of(digest) for name, digest in texts(body["sources"]).items()},
        problems,
        plans,
        tuple(groups),
    )
    if sum(len(set().union(*ran.values())) for ran in found.index.values()) != total:
        raise ValueError("a cell is there twice")
    return found


def text_of(value: Any) -> str:
    """The value, if it is a text that says something."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is no text")
    return value


def digest_of(value: Any) -> str:
    """The value, if it is a sha256."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is no sha256")
    return value


def natural(value: Any, low: int = 0, high: int = 1 << 62) -> int:
    """The value, if it is an integer of that range."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is no integer of {low}..{high}")
    return value


def texts(body: Mapping[Any, Any]) -> dict[str, str]:
    return {text_of(name): text_of(value) for name, value in body.items()}


def integers(body: Mapping[Any, Any]) -> dict[str, int]:
    return {text_of(name): natural(value, -(1 << 62)) for name, value in body.items()}

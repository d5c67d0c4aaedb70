"""Packs and certificates without a compiler: real manifests over files that hold CUDA ELF images.

The shared objects cannot be loaded; what looks at bytes, tables and evidence takes them for real.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specplan.plans import catalog as catalogs
from specplan.plans import certificates, device_code, manifest
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell
from specplan.plans.certificates import (
    EVERY_OUTPUT,
    Certificate,
    CertifiedCell,
    CertifiedPlan,
    Output,
    Tally,
    group_cells,
    join_tallies,
)
from specplan.plans.coverage import is_certified, uses_of
from specplan.plans.hosts import HOSTS
from specplan.plans.manifest import HostRecord, Manifest, ObjectRecord, PlanObject, PlanRecord

#: On each arch 20 scatter cells of 2 plans and 12 gather cells of 3; certified on sm_90a alone.
CATALOG = """\
schema: 1
archs:
  sm_90a:
    device: Device nine
    capability: [9, 0]
    sm_count: 132
    smem_per_sm: 233472
    smem_per_cta: 232448
  sm_100a:
    device: Device ten
    capability: [10, 0]
    sm_count: 148
    smem_per_sm: 233472
    smem_per_cta: 232448
families:
  scatter:
    problems:
      small: {history: 2, next: 2, draft: 1}
      large: {history: 4, next: 4, draft: 3}
    cells:
      - problems: [small]
        requests: 1..4
        tokens: 1..2
        splits: 1
        dtypes: [int32]
        certified: [sm_90a]
        candidate: [sm_100a]
        why: The small stores.
      - problems: [large]
        requests: [1, 2, 8]
        tokens: 1..4
        splits: auto
        dtypes: [int32]
        certified: [sm_90a]
        candidate: [sm_100a]
        why: The large stores.
  gather:
    problems:
      large: {next: 4, draft: 3}
    cells:
      - problems: [large]
        requests: [1, 2, 8]
        tokens: 1..4
        splits: 1
        dtypes: [int32]
        certified: [sm_90a]
        candidate: [sm_100a]
        why: The counterpart.
"""

SOURCES = {"specplan.kernels.{family}.kernel": "5" * 64, "specplan.plans.plan": "6" * 64}
HOST = "x86_64"
TOOLS = {"apache-tvm-ffi": "0.1.15.post2", "nvidia-cutlass-dsl": "4.8.1"}
DEVICE = {"name": "Device nine", "capability": "9.0", "sm_count": 132, "driver": "580.0"}

#: What `scatter` cells the catalog above claims on one arch, and `gather` cells.
CELLS = {"scatter": 20, "gather": 12}


def catalog(text: str = CATALOG) -> Catalog:
    return catalogs.loads(text, "synthetic.yaml")


def image(payload: bytes) -> bytes:
    """A CUDA ELF image with one kernel ``k`` of 32 registers whose code is ``payload``."""
    code = payload + bytes(-len(payload) % 16)
    info = struct.pack("<BBHII", 4, 0x2F, 8, 0, 32)
    names = b"\0.shstrtab\0.text.k\0.nv.info\0"
    bodies = [names, code, info]
    offsets, at = [], 64
    for body in bodies:
        offsets.append(at)
        at += len(body)
    at += -at % 8
    sections = [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
    for name, body, offset in zip(
        (b".shstrtab", b".text.k", b".nv.info"), bodies, offsets, strict=True
    ):
        start = names.index(b"\0" + name + b"\0") + 1
        sections.append(struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, offset, len(body), 0, 0, 1, 0))
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, 4, 1)
    body = header + b"".join(bodies)
    return body.ljust(at, b"\0") + b"".join(sections)


def key(symbol: str, family: str, arch: str) -> dict[str, Any]:
    """A plan's key, with the parts that certificates and ``gc`` look at."""
    return {
        "symbol": symbol,
        "arch": arch,
        "sources": {name.format(family=family): digest for name, digest in SOURCES.items()},
        "tools": dict(TOOLS),
    }


def write_manifest(directory: Path, pack: Manifest) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / manifest.NAME).write_text(manifest.dumps(pack), encoding="utf-8")


def pack(
    root: Path,
    claims: Catalog,
    arch: str,
    *,
    families: Sequence[str] = ("scatter", "gather"),
    evidence: Iterable[Certificate] = (),
    keep: Callable[[Cell], bool] = lambda cell: True,
) -> Manifest:
    """Write one arch's pack under ``root``, of the cells that ``keep`` keeps, and return it."""
    directory = root / arch
    directory.mkdir(parents=True, exist_ok=True)
    objects: dict[str, ObjectRecord] = {}
    plans: dict[str, PlanRecord] = {}
    cells = [c for c in claims.cells(arch) if c.family in families and keep(c)]
    for family in families:
        found = {p.symbol: p for c in cells if c.family == family for p in claims.plans_of(c)}
        data = b"host code of " + family.encode()
        for symbol, plan in sorted(found.items()):
            code = image(symbol.encode())
            data += code
            plans[symbol] = PlanRecord(
                symbol,
                family,
                plan.op,
                plan.spec,
                key(symbol, family, arch),
                f"{plan.op}(rows: int32)",
                device_code.read(code).sha256,
                hashlib.sha256(b"host " + symbol.encode()).hexdigest(),
                32,
                0,
                {HOST: PlanObject(len(code), hashlib.sha256(code).hexdigest())},
            )
        sha256 = hashlib.sha256(data).hexdigest()
        record = ObjectRecord(f"{family}-{HOST}-{sha256[:16]}.so", len(data), sha256, "1" * 64)
        (directory / record.file).write_bytes(data)
        objects[family] = record
    bare = Manifest(
        arch,
        claims.archs[arch].capability,
        "0.1.0",
        TOOLS,
        {HOST: HostRecord(HOSTS[HOST].triple, HOSTS[HOST].cpu, "GNU ld", {}, objects)},
        plans,
        claims.problems,
        (),
    )
    known = list(evidence)
    groups = manifest.group_cells(
        (cell, uses, claims.is_automatic(cell), is_certified(cell, uses, bare, known))
        for cell in cells
        for uses in (uses_of(claims.plans_of(cell)),)
    )
    whole = replace(bare, groups=groups)
    write_manifest(directory, whole)
    return whole


def certificate(
    of: Manifest,
    family: str,
    *,
    keep: Callable[[Cell], bool] = lambda cell: True,
    device: Mapping[str, Any] | None = None,
    date: str = "2026-01-31",
) -> Certificate:
    """Evidence for the cells of a family that ``keep`` keeps, with the bits that the pack has."""
    cells = [(cell, group) for cell, group in of.cells(family) if keep(cell)]
    symbols = {use.symbol for _, group in cells for use in group.uses}
    return Certificate(
        family=family,
        arch=of.arch,
        tools={**of.tools, "specplan": of.version},
        sources={name.format(family=family): digest for name, digest in SOURCES.items()},
        problems={cell.problem: of.problems[family][cell.problem] for cell, _ in cells},
        plans={
            symbol: CertifiedPlan(plan.device_code, plan.host_code, plan.signature)
            for symbol, plan in of.plans.items()
            if symbol in symbols
        },
        groups=group_cells(
            CertifiedCell(
                *(cell.problem, cell.dtype, cell.splits, cell.tokens, cell.requests),
                *(group.uses, 12 + cell.tokens % 2),
            )
            for cell, group in cells
        ),
        device=dict(device or device_of(of.arch)),
        date=date,
        suite=("eager", "in a graph"),
        recorded=EVERY_OUTPUT,
        tallies=join_tallies(
            Tally(output, 6 + cell.tokens % 2, {use.symbol: {cell.problem: error}})
            for cell, group in cells
            for use in group.uses
            for output, error in ((CLOSE, cell.tokens / 8), (EXACT, 0.0))
        ),
    )


#: What the made-up certificates measure: one output with a tolerance, one without.
CLOSE = Output("out", "|error| / (0.001 + 0.01 |value|)", 1.0, "made up")
EXACT = Output("all tensors", "elements that differ", 0.0, "equal bit for bit")


def device_of(arch: str) -> Mapping[str, Any]:
    """A device of that arch."""
    digits = arch.removeprefix("sm_").removesuffix("a")
    return {**DEVICE, "capability": f"{digits[:-1]}.{digits[-1]}"}


def write_certificate(root: Path, evidence: Certificate, name: str | None = None) -> Path:
    path = root / evidence.arch / f"{name or evidence.family}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    certificates.write(path, evidence)
    return path


@dataclass(frozen=True)
class Place:
    """A catalog, packs and certificates on disk."""

    catalog_path: Path
    packs: Path
    certificates: Path

    @property
    def options(self) -> list[str]:
        """What points a command at this place."""
        return [
            "--packs",
            str(self.packs),
            "--catalog",
            str(self.catalog_path),
            "--certificates",
            str(self.certificates),
        ]

    def object(self, arch: str, family: str) -> Path:
        """The shared object of one family."""
        directory = self.packs / arch
        return directory / manifest.read(directory).objects[family].file


def place(root: Path, text: str = CATALOG, archs: Sequence[str] = ("sm_90a", "sm_100a")) -> Place:
    """Packs in which every claim of the catalog holds: sm_90a has its certificates."""
    found = Place(root / "catalog.yaml", root / "packs", root / "certificates")
    root.mkdir(parents=True, exist_ok=True)
    found.catalog_path.write_text(text, encoding="utf-8")
    found.certificates.mkdir(exist_ok=True)
    claims = catalog(text)
    for arch in archs:
        built = pack(found.packs, claims, arch)
        if arch == "sm_90a":
            evidence = [certificate(built, family) for family in built.objects]
            for each in evidence:
                write_certificate(found.certificates, each)
            pack(found.packs, claims, arch, evidence=evidence)
    return found


@dataclass(frozen=True)
class Ran:
    """What a command answered."""

    code: int
    out: str
    err: str


def specplan(*arguments: str | Path) -> Ran:
    """``specplan ARGUMENTS`` in this process; what would be a traceback stays an exception."""
    from specplan.tools.cli import main

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(args=[str(argument) for argument in arguments], prog_name="specplan")
        except SystemExit as exit_:
            code = exit_.code or 0
    return Ran(int(code), out.getvalue(), err.getvalue())

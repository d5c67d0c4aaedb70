"""The manifest of a pack: what was built, from what, and which cell uses which plan.

A pack is one directory for one arch: shared objects named by their content, and ``manifest.json``,
which is written last. The manifest holds the full cell -> plan table, so a reader needs neither the
planning rules nor YAML.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specplan.plans import ranges
from specplan.plans.cell import Cell
from specplan.plans.hosts import this_machine

SCHEMA = 2
NAME = "manifest.json"
#: The libraries whose symbols packs take, as the manifest names them.
TVM_FFI = "libtvm_ffi.so"
CUDA_RUNTIME = "libcudart.so.13"


class ManifestError(ValueError):
    """A manifest that cannot be used; ``reason`` is ``missing``, ``unreadable``, ``edited`` or
    ``schema``.
    """

    def __init__(self, path: Path, reason: str, detail: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {detail}")


@dataclass(frozen=True)
class ObjectRecord:
    """One shared object of the pack: one family for one host."""

    file: str
    size: int
    sha256: str
    #: Digest of what was linked: the objects in order, the linker, what is linked in.
    inputs: str


@dataclass(frozen=True)
class HostRecord:
    """The libraries of one host.

    Attributes
    ----------
    triple, cpu
        The target that the host code was emitted for, as LLVM spells it; an empty CPU is the
        architecture's baseline.
    linker
        The C compiler and the linker.
    takes
        The symbols that the libraries take from outside beside libc's, by library.
    objects
        The shared objects by family.
    """

    triple: str
    cpu: str
    linker: str
    takes: Mapping[str, tuple[str, ...]]
    objects: Mapping[str, ObjectRecord]


@dataclass(frozen=True)
class PlanObject:
    """The object of one plan for one host, before it is linked."""

    size: int
    sha256: str


@dataclass(frozen=True)
class PlanRecord:
    """One compiled plan of the pack."""

    symbol: str
    family: str
    op: str
    spec: tuple[tuple[str, Any], ...]
    key: Mapping[str, Any] = field(repr=False)
    signature: str
    #: sha256 of the CUDA image that the driver gets.
    device_code: str
    #: sha256 of the launch code before it is lowered to host instructions: grid, cluster, argument
    #: checks.
    host_code: str
    registers: int
    spills: int
    #: What was linked, by host. The device code in it is the same for all.
    objects: Mapping[str, PlanObject]


@dataclass(frozen=True)
class Use:
    """A plan as a cell uses it: the compiled function, and the launch parameters passed with each
    call.
    """

    symbol: str
    launch: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Group:
    """Cells of one problem, dtype and splits that use the same plans.

    ``automatic``: the splits are the planning rule's choice for these cells, so a call that names
    no splits gets them. ``certified``: a certificate covers these cells with these bits.
    """

    family: str
    problem: str
    dtype: str
    splits: int
    uses: tuple[Use, ...]
    automatic: bool
    certified: bool
    #: ``(tokens, requests)`` sets; a cell is in the group if it is in one of these products.
    extent: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def points(self) -> Iterator[tuple[int, int]]:
        """Every (tokens, requests) of the group."""
        for tokens, requests in self.extent:
            for count in tokens:
                for request in requests:
                    yield count, request


@dataclass(frozen=True)
class Manifest:
    """Everything that ``manifest.json`` says."""

    arch: str
    capability: tuple[int, int]
    version: str
    tools: Mapping[str, str]
    hosts: Mapping[str, HostRecord]
    plans: Mapping[str, PlanRecord]
    problems: Mapping[str, Mapping[str, Mapping[str, int]]]
    groups: tuple[Group, ...]
    #: Digest of everything that the pack was made from, or empty where it is not all of a catalog.
    inputs: str = ""

    @property
    def families(self) -> tuple[str, ...]:
        """The families that the pack has plans of, sorted."""
        return tuple(sorted({plan.family for plan in self.plans.values()}))

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """The shared objects by family: for this machine, or for the first host of a pack that has
        none for this machine.
        """
        host = this_machine()
        record = self.hosts.get(host) or next(iter(self.hosts.values()), None)
        return record.objects if record is not None else {}

    def libraries(self, host: str | None = None) -> Iterator[tuple[str, str, ObjectRecord]]:
        """Host, family and record of every shared object, or of those of one host."""
        for name, record in self.hosts.items():
            if host in (None, name):
                for family, library in record.objects.items():
                    yield name, family, library

    def lacking(self) -> Iterator[tuple[str, str]]:
        """Host and family of every library that is not in the pack though other hosts have it."""
        for name, record in self.hosts.items():
            for family in self.families:
                if family not in record.objects:
                    yield name, family

    @cached_property
    def table(self) -> Mapping[tuple[str, str, str, int, int, int], Group]:
        """(family, problem, dtype, splits, tokens, requests) -> group, for every cell."""
        return {
            (group.family, group.problem, group.dtype, group.splits, tokens, requests): group
            for group in self.groups
            for tokens, requests in group.points()
        }

    def find(self, cell: Cell) -> Group | None:
        """The group that holds a cell, or None."""
        if cell.arch != self.arch:
            return None
        return self.table.get(
            (cell.family, cell.problem, cell.dtype, cell.splits, cell.tokens, cell.requests)
        )

    def cells(self, family: str | None = None) -> Iterator[tuple[Cell, Group]]:
        """Every cell of the pack."""
        for group in self.groups:
            if family in (None, group.family):
                for tokens, requests in group.points():
                    yield (
                        Cell(
                            group.family,
                            group.problem,
                            group.dtype,
                            self.arch,
                            group.splits,
                            tokens,
                            requests,
                        ),
                        group,
                    )


def group_cells(
    entries: Iterable[tuple[Cell, tuple[Use, ...], bool, bool]],
) -> tuple[Group, ...]:
    """Compress ``(cell, uses, automatic, certified)`` into groups; the same for the same set of
    cells.
    """
    sorted_cells: dict[
        tuple[str, str, str, int, tuple[Use, ...], bool, bool], dict[int, set[int]]
    ] = {}
    for cell, uses, automatic, certified in entries:
        at = (cell.family, cell.problem, cell.dtype, cell.splits, uses, automatic, certified)
        sorted_cells.setdefault(at, {}).setdefault(cell.tokens, set()).add(cell.requests)
    groups = []
    for at, by_tokens in sorted_cells.items():
        by_requests: dict[tuple[int, ...], list[int]] = {}
        for tokens, requests in sorted(by_tokens.items()):
            by_requests.setdefault(tuple(sorted(requests)), []).append(tokens)
        extent = tuple((tuple(tokens), requests) for requests, tokens in by_requests.items())
        groups.append(Group(*at, extent))
    groups.sort(
        key=lambda g: (
            g.family,
            g.problem,
            g.dtype,
            g.splits,
            [(u.symbol, u.launch) for u in g.uses],
            g.automatic,
            g.certified,
        )
    )
    return tuple(groups)


def dumps(manifest: Manifest) -> str:
    """The text of ``manifest.json``: the same for the same contents, with a digest of its own."""
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "arch": manifest.arch,
        "capability": list(manifest.capability),
        "specplan": manifest.version,
        "tools": dict(sorted(manifest.tools.items())),
        "inputs": manifest.inputs,
        "hosts": {
            name: {
                "triple": host.triple,
                "cpu": host.cpu,
                "linker": host.linker,
                "takes": {
                    library: " ".join(symbols) for library, symbols in sorted(host.takes.items())
                },
                "objects": {
                    family: {
                        "file": record.file,
                        "size": record.size,
                        "sha256": record.sha256,
                        "inputs": record.inputs,
                    }
                    for family, record in sorted(host.objects.items())
                },
            }
            for name, host in sorted(manifest.hosts.items())
        },
        "plans": {
            symbol: {
                "family": plan.family,
                "op": plan.op,
                "spec": dict(plan.spec),
                "signature": plan.signature,
                "device_code": plan.device_code,
                "host_code": plan.host_code,
                "registers": plan.registers,
                "spills": plan.spills,
                "objects": {
                    name: {"size": item.size, "sha256": item.sha256}
                    for name, item in sorted(plan.objects.items())
                },
                "key": plan.key,
            }
            for symbol, plan in sorted(manifest.plans.items())
        },
        "problems": {
            family: {name: dict(geometry) for name, geometry in problems.items()}
            for family, problems in sorted(manifest.problems.items())
        },
        "cells": [
            {
                "family": group.family,
                "problem": group.problem,
                "dtype": group.dtype,
                "splits": group.splits,
                "automatic": group.automatic,
                "certified": group.certified,
                "plans": [{"symbol": use.symbol, "launch": dict(use.launch)} for use in group.uses],
                "extent": [
                    {"tokens": ranges.spell(tokens), "requests": ranges.spell(requests)}
                    for tokens, requests in group.extent
                ],
            }
            for group in manifest.groups
        ],
    }
    return sealed(body)


#: What stands before the digest, which is the last value of the text.
_SEAL = ',\n "digest": "'


def sealed(body: Mapping[str, Any]) -> str:
    """The text of a manifest's body, ending with the digest of everything before it."""
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, indent=1)
    text = text.removesuffix("\n}")
    return f'{text}{_SEAL}{_digest(text)}"\n}}\n'


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_sealed(text: str) -> bool:
    """Whether a text ends with its own digest."""
    body, seal, end = text.removesuffix("\n").rpartition(_SEAL)
    return bool(seal) and end == f'{_digest(body)}"\n}}'


def loads(text: str, path: Path) -> Manifest:
    """Read a manifest; every way in which it can be unusable is a ``ManifestError`` that says
    which.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            path, "unreadable", f"is not JSON ({error}); build the pack again"
        ) from error
    if not isinstance(body, dict):
        raise ManifestError(path, "unreadable", "is not a manifest; build the pack again")
    schema = body.get("schema")
    if schema != SCHEMA:
        age = "a newer" if isinstance(schema, int) and schema > SCHEMA else "another"
        raise ManifestError(
            path,
            "schema",
            f"was written by {age} version of specplan (schema {schema!r}, this one reads "
            f"{SCHEMA}); build the pack again with this version",
        )
    if not _is_sealed(text):
        raise ManifestError(
            path, "edited", "does not match its own digest: it was edited; build the pack again"
        )
    try:
        return _checked(_from_body(body))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(
            path, "unreadable", f"lacks what a manifest has ({error!r}); build the pack again"
        ) from error


def _from_body(body: Mapping[str, Any]) -> Manifest:
    major, minor = body["capability"]
    return Manifest(
        arch=str(body["arch"]),
        capability=(int(major), int(minor)),
        version=str(body["specplan"]),
        tools=body["tools"],
        hosts={
            name: HostRecord(
                str(host["triple"]),
                str(host["cpu"]),
                str(host["linker"]),
                {library: tuple(text.split()) for library, text in host["takes"].items()},
                {
                    family: ObjectRecord(
                        file_name(item["file"]),
                        int(item["size"]),
                        str(item["sha256"]),
                        str(item["inputs"]),
                    )
                    for family, item in host["objects"].items()
                },
            )
            for name, host in body["hosts"].items()
        },
        plans={
            symbol: PlanRecord(
                symbol,
                str(item["family"]),
                str(item["op"]),
                tuple(item["spec"].items()),
                item["key"],
                str(item["signature"]),
                str(item["device_code"]),
                str(item["host_code"]),
                int(item["registers"]),
                int(item["spills"]),
                {
                    name: PlanObject(int(part["size"]), str(part["sha256"]))
                    for name, part in item["objects"].items()
                },
            )
            for symbol, item in body["plans"].items()
        },
        problems=body["problems"],
        groups=tuple(
            Group(
                str(item["family"]),
                str(item["problem"]),
                str(item["dtype"]),
                int(item["splits"]),
                tuple(
                    Use(str(use["symbol"]), tuple(use["launch"].items())) for use in item["plans"]
                ),
                bool(item["automatic"]),
                bool(item["certified"]),
                extent,
            )
            for item, extent in zip(body["cells"], _extents(body["cells"]), strict=True)
        ),
        inputs=str(body["inputs"]),
    )


def file_name(value: Any) -> str:
    """The value, if it names a file of the pack's own directory: no path leads out of a pack."""
    if not isinstance(value, str) or not _FILE.fullmatch(value):
        raise ValueError(f"{value!r} is no name of a file in the pack")
    return value


_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def _checked(manifest: Manifest) -> Manifest:
    """The manifest, where what its cells name is in it; else ValueError or TypeError."""
    for family, problems in manifest.problems.items():
        for name, geometry in problems.items():
            if not all(type(value) is int for value in geometry.values()):
                raise ValueError(f"problem {name!r} of {family!r} is no geometry")
    for plan in manifest.plans.values():
        for part in ("sources", "tools"):
            plan.key[part].items()
    for group in manifest.groups:
        if group.problem not in manifest.problems.get(group.family, {}):
            raise ValueError(f"cells of problem {group.problem!r}, which has no geometry")
        for use in group.uses:
            if use.symbol not in manifest.plans:
                raise ValueError(f"cells of plan {use.symbol!r}, which is not there")
    return manifest


def _extents(
    items: Iterable[Mapping[str, Any]],
) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]:
    """The extents of all groups; ValueError for cells that no catalog has, before any is counted
    out.
    """
    extents, total = [], 0
    for item in items:
        extent = tuple([ranges.extent(p["tokens"], p["requests"]) for p in item["extent"]])
        total = ranges.counted(total, extent)
        extents.append(extent)
    return extents


def wrong_arch(pack: Manifest, directory: Path, arch: str) -> str | None:
    """Why a pack is not what is looked for in its directory, or None."""
    if pack.arch == arch:
        return None
    return (
        f"{directory} holds a pack for {pack.arch}, not for {arch}; "
        f"build it again: specplan build --arch {arch} --out {directory.parent}"
    )


def read(directory: Path) -> Manifest:
    """The manifest of a pack directory."""
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ManifestError(
            path, "missing", "no such file: this is not a pack, or its build never finished"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(path, "unreadable", f"cannot be read ({error})") from error
    return loads(text, path)


def packs_under(root: Path) -> dict[str, Path]:
    """Pack directories by arch: the root itself, or the subdirectories that have a manifest."""
    try:
        if (root / NAME).is_file():
            try:
                return {read(root).arch: root}
            except ManifestError:
                return {root.name: root}
        if not root.is_dir():
            return {}
    except PermissionError:
        return {}
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{NAME}"))}


def check_object(directory: Path, record: ObjectRecord) -> str | None:
    """What is wrong with a shared object's bytes, or None. Size first: it is free."""
    path = directory / record.file
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path} has {size} bytes, the manifest says {record.size}"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    if found != record.sha256:
        return f"{path} has sha256 {found[:16]}..., the manifest says {record.sha256[:16]}..."
    return None


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside, fsync, rename, fsync the directory: a reader sees the old file or the new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

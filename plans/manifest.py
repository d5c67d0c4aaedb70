"""The manifest of a pack: what was built, from what, and which cell uses which plan.

A pack is one directory for one arch: shared objects named by their content, and ``manifest.json``,
which is written last. The manifest holds the full cell -> plan table, so a reader needs neither the
planning rules nor YAML.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specplan.plans import ranges
from specplan.plans.cell import Cell

SCHEMA = 1
NAME = "manifest.json"


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
    """One shared object of the pack."""

    file: str
    size: int
    sha256: str
    #: Digest of what was linked: the objects in order and the linker.
    inputs: str
    #: Vector and bit extensions of the host that the host code uses, as /proc/cpuinfo spells them.
    cpu_features: tuple[str, ...]


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
    object_size: int
    object_sha256: str


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
    host: str
    objects: Mapping[str, ObjectRecord]
    plans: Mapping[str, PlanRecord]
    problems: Mapping[str, Mapping[str, Mapping[str, int]]]
    groups: tuple[Group, ...]
    #: Digest of everything that the pack was made from, or empty where it is not all of a catalog.
    inputs: str = ""

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
        "host": manifest.host,
        "inputs": manifest.inputs,
        "objects": {
            family: {
                "file": record.file,
                "size": record.size,
                "sha256": record.sha256,
                "inputs": record.inputs,
                "cpu_features": list(record.cpu_features),
            }
            for family, record in sorted(manifest.objects.items())
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
                "object_size": plan.object_size,
                "object_sha256": plan.object_sha256,
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
        return _from_body(body)
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
        host=str(body["host"]),
        objects={
            family: ObjectRecord(
                str(item["file"]),
                int(item["size"]),
                str(item["sha256"]),
                str(item["inputs"]),
                tuple(item["cpu_features"]),
            )
            for family, item in body["objects"].items()
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
                int(item["object_size"]),
                str(item["object_sha256"]),
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
                tuple(
                    (ranges.parse(part["tokens"]), ranges.parse(part["requests"]))
                    for part in item["extent"]
                ),
            )
            for item in body["cells"]
        ),
        inputs=str(body["inputs"]),
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
    if (root / NAME).is_file():
        try:
            return {read(root).arch: root}
        except ManifestError:
            return {root.name: root}
    if not root.is_dir():
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

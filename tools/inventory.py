"""What packs are at hand, what they hold, and what they weigh."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplan.plans import evidence, locations, manifest, ranges
from specplan.plans.manifest import Group, Manifest, ManifestError, packs_under

#: What lies in a pack's directory and is no family's.
OTHER = "other files"


@dataclass(frozen=True)
class Found:
    """One pack directory.

    Attributes
    ----------
    arch, directory
        The arch that it was found under, and where.
    place
        Why that place is searched.
    used
        Whether ``specplan.load`` takes this one: the first of its arch in the order of the search.
    pack, wrong
        The manifest, or why it cannot be used.
    """

    arch: str
    directory: Path
    place: str
    used: bool
    pack: Manifest | None
    wrong: str

    def groups(self, family: str | None, problem: str | None) -> list[Group]:
        """The cells of the pack that pass the filters, in the manifest's groups."""
        groups = self.pack.groups if self.pack is not None else ()
        return [
            group
            for group in groups
            if family in (None, group.family) and problem in (None, group.problem)
        ]


def at_hand(path: Path | None, arch: str | None = None) -> list[Found]:
    """Every pack under a directory, or in the places that a load searches, in its order."""
    places = [("as given", path)] if path is not None else locations.search_path()
    found: list[Found] = []
    taken: set[str] = set()
    for why, root in places:
        for name, directory in packs_under(root).items():
            if arch not in (None, name):
                continue
            pack, wrong = _examined(directory, name)
            found.append(Found(name, directory, why, name not in taken, pack, wrong))
            taken.add(name)
    return found


def _examined(directory: Path, arch: str) -> tuple[Manifest | None, str]:
    """A pack with the marks that the runtime goes by, or none; and what is wrong with it."""
    try:
        pack = manifest.read(directory)
    except ManifestError as error:
        return None, str(error)
    other = manifest.wrong_arch(pack, directory, arch)
    if other is not None:
        return None, other
    places = [evidence.default_directory(), evidence.local_directory(directory)]
    known, unread = evidence.read_all(places, arch, pack.families)
    differ = evidence.mark_complaints(evidence.compare(pack, known), directory)
    return evidence.backed(pack, known), "; ".join([*differ, *map(str, unread)])


def packs(found: Sequence[Found]) -> list[Mapping[str, Any]]:
    """A record for each pack: where, by which version, how many plans and cells."""
    records: list[Mapping[str, Any]] = []
    for each in found:
        cells = Counter({"certified": 0, "candidate": 0})
        for group in each.groups(None, None):
            cells["certified" if group.certified else "candidate"] += size_of(group)
        pack = each.pack
        records.append(
            {
                "arch": each.arch,
                "directory": str(each.directory),
                "place": each.place,
                "used": each.used,
                "specplan": pack.version if pack else None,
                "hosts": sorted(pack.hosts) if pack else [],
                "families": list(pack.families) if pack else [],
                "plans": len(pack.plans) if pack else 0,
                "cells": dict(cells),
                "wrong": each.wrong,
            }
        )
    return records


def plans(
    found: Sequence[Found], family: str | None, problem: str | None
) -> Iterator[Mapping[str, Any]]:
    """A record for each plan that a cell within the filters uses, in the packs that a load
    takes.
    """
    for each in _used(found):
        cells: Counter[str] = Counter()
        for group in each.groups(family, problem):
            cells.update({use.symbol: size_of(group) for use in group.uses})
        for symbol, plan in _pack(each).plans.items():
            if cells[symbol]:
                yield {
                    "arch": each.arch,
                    "family": plan.family,
                    "op": plan.op,
                    "symbol": symbol,
                    "cells": cells[symbol],
                    "registers": plan.registers,
                    "spills": plan.spills,
                    "object_bytes": {host: item.size for host, item in plan.objects.items()},
                    "device_code": plan.device_code,
                }


def cells(
    found: Sequence[Found], family: str | None, problem: str | None
) -> Iterator[Mapping[str, Any]]:
    """A record for each rectangle of cells that share plans, in the packs that a load takes."""
    for each in _used(found):
        for group in each.groups(family, problem):
            for tokens, requests in group.extent:
                yield {
                    "arch": each.arch,
                    "family": group.family,
                    "problem": group.problem,
                    "dtype": group.dtype,
                    "tokens": ranges.spell(tokens),
                    "requests": ranges.spell(requests),
                    "splits": group.splits,
                    "cells": len(tokens) * len(requests),
                    "state": "certified" if group.certified else "candidate",
                    "planned": group.automatic,
                    "plans": [use.symbol for use in group.uses],
                }


def size_of(group: Group) -> int:
    """How many cells a group has."""
    return sum(len(tokens) * len(requests) for tokens, requests in group.extent)


def _used(found: Sequence[Found]) -> Iterator[Found]:
    return (each for each in found if each.used and each.pack is not None)


def _pack(each: Found) -> Manifest:
    assert each.pack is not None
    return each.pack


@dataclass(frozen=True)
class Weight:
    """What one family of one pack weighs for one host, in bytes.

    ``library`` is its shared object, ``table`` its share of the manifest, which is divided evenly
    among the hosts, ``packed`` what both are in a wheel, which deflates them. ``objects`` are what
    the library was linked from; they stay with the builder. Files that no family owns
    (certificates, libraries of earlier builds) come under ``OTHER``; a wheel has none of them.
    """

    arch: str
    host: str
    family: str
    plans: int
    cells: int
    library: int
    table: int
    packed: int
    objects: int

    @property
    def installed(self) -> int:
        return self.library + self.table

    def as_dict(self) -> Mapping[str, Any]:
        return {
            "arch": self.arch,
            "host": self.host,
            "family": self.family,
            "plans": self.plans,
            "cells": self.cells,
            "library_bytes": self.library,
            "manifest_bytes": self.table,
            "installed_bytes": self.installed,
            "wheel_bytes": self.packed,
            "linked_objects_bytes": self.objects,
        }


def weigh(each: Found, family: str | None = None) -> tuple[list[Weight], list[str]]:
    """What the families of a pack weigh, the biggest first, and what is wrong with its files."""
    pack = _pack(each)
    text = (each.directory / manifest.NAME).read_bytes()
    shares = _shares(json.loads(text), len(text))
    ratio = len(zlib.compress(text)) / len(text)
    weights, wrong = [], []
    named = {manifest.NAME}
    for host, name, record in pack.libraries():
        named.add(record.file)
        if family not in (None, name):
            continue
        try:
            data = (each.directory / record.file).read_bytes()
        except OSError as error:
            wrong.append(f"{each.directory / record.file}: {error.strerror or error}")
            continue
        if len(data) != record.size:
            wrong.append(
                f"{each.directory / record.file} has {len(data)} bytes, the manifest says "
                f"{record.size}"
            )
        mine = [plan for plan in pack.plans.values() if plan.family == name]
        table = shares[name] // len(pack.hosts)
        weights.append(
            Weight(
                each.arch,
                host,
                name,
                len(mine),
                sum(size_of(group) for group in pack.groups if group.family == name),
                len(data),
                table,
                len(zlib.compress(data)) + round(table * ratio),
                sum(plan.objects[host].size for plan in mine),
            )
        )
    if family is None:
        rest = [
            path.stat().st_size
            for path in each.directory.rglob("*")
            if path.is_file() and str(path.relative_to(each.directory)) not in named
        ]
        if rest:
            weights.append(Weight(each.arch, "", OTHER, 0, 0, sum(rest), 0, 0, 0))
    return sorted(weights, key=lambda w: -w.installed), wrong


def _shares(body: Mapping[str, Any], total: int) -> Mapping[str, int]:
    """A manifest's bytes by family: by what each has in it, what is common shared out alike."""
    texts: Counter[str] = Counter()
    for plan in body["plans"].values():
        texts[plan["family"]] += len(json.dumps(plan, indent=1))
    for group in body["cells"]:
        texts[group["family"]] += len(json.dumps(group, indent=1))
    for host in body["hosts"].values():
        for family in host["objects"]:
            texts[family] += 1
    return {family: total * size // texts.total() for family, size in texts.items()}

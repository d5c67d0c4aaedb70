"""Loading packs, and choosing the plan of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from specplan import forked, library
from specplan.errors import (
    ColdCaptureError,
    NoDeviceError,
    PackCorruptError,
    PackNotFoundError,
    PackVersionError,
)
from specplan.families import FAMILIES
from specplan.gather import Gather
from specplan.gdn_replay import GdnReplay
from specplan.plans import locations, manifest
from specplan.plans.cell import Cell, nearest
from specplan.plans.families import FAMILIES as PLANNING
from specplan.plans.manifest import Group, Manifest, ManifestError, PlanRecord, packs_under
from specplan.rollback import Rollback
from specplan.scatter import Scatter
from specplan.sparse_gqa_verify import SparseGqaVerify
from specplan.uncertified import Reason, Uncertified


def load(
    path: str | Path | None = None,
    *,
    arch: str | None = None,
    candidates: bool = False,
) -> Pack:
    """Load the packs for this machine's GPUs: check their bytes, then open them.

    Parameters
    ----------
    path
        A pack directory, or a directory of packs. Without it: ``$SPECPLAN_PACKS``, the installed
        wheel, the per-user directory.
    arch
        Load the pack of this arch only, for example ``"sm_90a"``, with or without such a GPU.
        Without it: the packs of all visible GPUs.
    candidates
        Also run cells that are built for the arch but not certified on it.

    Returns
    -------
    Pack
        With one attribute a family: ``pack.scatter``, ``pack.gather``, ``pack.rollback``,
        ``pack.gdn_replay``, ``pack.sparse_gqa_verify``.

    Raises
    ------
    PackNotFoundError
        With every place searched, the archs wanted and the archs found.
    PackCorruptError
        A file is not what the manifest describes. Sizes and sha256 are checked before anything is
        mapped: a truncated shared object can kill the process.
    PackVersionError, RuntimeLibraryError, NoDeviceError
        With what was found and the command that mends it.
    """
    wanted = [arch] if arch is not None else visible_archs()
    places = [("the path given", Path(path))] if path is not None else list(locations.search_path())
    if path is not None and (Path(path) / manifest.NAME).is_file():
        # Named as a pack, it is read as one: what is wrong with it is not that it was not found.
        _read_manifest(Path(path))
    found: dict[str, Path] = {}
    for _, root in places:
        for name, directory in packs_under(root).items():
            found.setdefault(name, directory)
    usable = [name for name in wanted if name in found]
    if not usable:
        searched = "; ".join(f"{root} ({why})" for why, root in places)
        there = ", ".join(sorted(found)) or "none"
        raise PackNotFoundError(
            f"no pack for {' or '.join(wanted)}. Searched: {searched}. Archs found: {there}. "
            f"{_without_manifest([root for _, root in places], wanted)}"
            f"Build one: specplan build --arch {wanted[0]}"
        )
    return Pack([_ArchPack(found[name], name) for name in usable], candidates=candidates)


def _without_manifest(roots: Sequence[Path], wanted: Sequence[str]) -> str:
    """A sentence about what would be a pack if it had its manifest, or nothing."""
    for directory in (place for root in roots for place in (root, *(root / a for a in wanted))):
        if any(directory.glob("*.so")) and not (directory / manifest.NAME).is_file():
            return (
                f"{directory} holds libraries and no {manifest.NAME}: its build never finished, or "
                "the file was taken away. "
            )
    return ""


def visible_archs() -> list[str]:
    """The archs of the visible GPUs, each once, in device order."""
    if forked.inherited():
        forked.refuse()
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "torch sees no CUDA device, so there is no arch to load a pack for; "
            "name one to inspect it: specplan.load(arch='sm_90a')"
        )
    archs = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        archs.append(f"sm_{major}{minor}a")
    return list(dict.fromkeys(archs))


class _ArchPack:
    """One pack directory, checked and opened."""

    def __init__(self, directory: Path, arch: str) -> None:
        self.directory = directory
        self.manifest = _read_manifest(directory)
        if self.manifest.arch != arch:
            raise PackCorruptError(
                f"{directory} holds a pack for {self.manifest.arch}, not for {arch}; "
                f"build it again: specplan build --arch {arch} --out {directory.parent}",
                reason="manifest_arch",
            )
        library.check_versions(self.manifest, directory)
        for record in self.manifest.objects.values():
            wrong = manifest.check_object(directory, record)
            if wrong is not None:
                raise PackCorruptError(
                    f"{wrong}; nothing of it was loaded. Build it again: "
                    f"specplan build --arch {self.manifest.arch} --out {directory.parent}"
                )
        library.runtime()
        load_module = library.tvm_ffi().load_module
        modules = {
            family: load_module(str(directory / record.file))
            for family, record in self.manifest.objects.items()
        }
        self.functions: dict[str, Any] = {}
        for symbol, plan in self.manifest.plans.items():
            function = modules[plan.family].get_function(symbol)
            # Releasing the lock costs more than the microseconds that a launch holds it.
            function.release_gil = False
            self.functions[symbol] = function

    @cached_property
    def problems(self) -> Mapping[tuple[str, tuple[int, ...]], list[str]]:
        """(family, geometry) -> the problems of that geometry; the catalog may name one geometry
        twice.
        """
        names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for family, problems in self.manifest.problems.items():
            if family in PLANNING:
                for name, geometry in problems.items():
                    at = (family, tuple(geometry[key] for key in PLANNING[family].geometry))
                    names.setdefault(at, []).append(name)
        return names

    @cached_property
    def automatic(self) -> Mapping[tuple[str, str, str, int, int], Group]:
        """(family, problem, dtype, tokens, requests) -> the group whose splits the planning rule
        chooses.
        """
        return {
            (group.family, group.problem, group.dtype, tokens, requests): group
            for group in self.manifest.groups
            if group.automatic
            for tokens, requests in group.points()
        }


def _read_manifest(directory: Path) -> Manifest:
    try:
        return manifest.read(directory)
    except ManifestError as error:
        if error.reason == "schema":
            raise PackVersionError(str(error), reason="schema") from error
        raise PackCorruptError(str(error), reason=f"manifest_{error.reason}") from error


@dataclass(frozen=True)
class Picked:
    """The plan of one op for one cell, ready to launch on one arch.

    Attributes
    ----------
    cell, certified
        The cell, and whether a certificate covers it (else it runs as a candidate).
    plan
        The plan's record in the manifest: symbol, constants, registers, device-code hash.
    launch
        Launch parameters of this cell, by name.
    function
        The compiled function, positional arguments only.
    """

    cell: Cell
    certified: bool
    plan: PlanRecord
    launch: Mapping[str, int]
    function: Any


class Pack:
    """The loaded packs of one or more archs. Families are attributes: ``pack.scatter``,
    ``pack.gather``, ``pack.rollback``, ``pack.gdn_replay``, ``pack.sparse_gqa_verify``.

    A pack stays usable while the files under it are replaced: its objects are mapped, and a new
    :func:`load` sees the new ones.
    """

    scatter: Scatter
    gather: Gather
    rollback: Rollback
    gdn_replay: GdnReplay
    sparse_gqa_verify: SparseGqaVerify

    def __init__(self, packs: Sequence[_ArchPack], *, candidates: bool) -> None:
        self._packs = {pack.manifest.arch: pack for pack in packs}
        self._by_capability = {pack.manifest.capability: pack for pack in packs}
        self._prepared: set[tuple[int, str]] = set()
        self._preparing = Lock()
        self.candidates = candidates
        for name, family in FAMILIES.items():
            setattr(self, name, family(self))
        forked.watch(self)

    @property
    def archs(self) -> tuple[str, ...]:
        """The archs that are loaded."""
        return tuple(self._packs)

    def manifest(self, arch: str | None = None) -> Manifest:
        """The manifest of one arch; without a name, of the only or first one."""
        return self._of_arch(arch).manifest

    def _of_arch(self, arch: str | None) -> _ArchPack:
        """The pack of an arch, or of the first one; an arch that is not loaded is an error."""
        name = arch if arch is not None else self.archs[0]
        if name not in self._packs:
            raise PackNotFoundError(
                f"no pack for {name} is loaded; loaded: {', '.join(self.archs)}"
            )
        return self._packs[name]

    def __repr__(self) -> str:
        parts = [f"{a}: {len(p.functions)} plans in {p.directory}" for a, p in self._packs.items()]
        return f"<specplan.Pack {'; '.join(parts)}>"

    def prepare(self, device: int | torch.device | None = None) -> None:
        """Load the GPU code of every plan that may run, on one device or on all visible ones, and
        wait for it.

        The first call of a plan loads its code, which a graph capture must not hold. This calls
        every plan once with no work to do; the plans of candidates only with ``candidates=True``.

        Raises
        ------
        NoDeviceError
            No visible device has the arch of a loaded pack.
        ColdCaptureError
            Called while a CUDA graph is being captured.
        """
        if device is None:
            indices = [
                index
                for index in range(torch.cuda.device_count())
                if self._of_device(index) is not None
            ]
        else:
            index = torch.device("cuda", device).index if isinstance(device, int) else device.index
            indices = [torch.cuda.current_device() if index is None else index]
        if not indices or any(self._of_device(index) is None for index in indices):
            raise NoDeviceError(
                f"no visible CUDA device has the arch of a loaded pack ({', '.join(self.archs)})"
            )
        for index in indices:
            for name in FAMILIES:
                self._prepare(index, name)
            torch.cuda.synchronize(index)

    def _of_device(self, index: int) -> _ArchPack | None:
        if not 0 <= index < torch.cuda.device_count():
            return None
        return self._by_capability.get(torch.cuda.get_device_capability(index))

    def _prepare(self, index: int, family: str) -> None:
        """Load one family's code on one device, once."""
        pack = self._of_device(index)
        if pack is None or (index, family) in self._prepared:
            return
        if torch.cuda.is_current_stream_capturing():
            raise ColdCaptureError(
                f"the GPU code of {family} is not loaded on cuda:{index}, and a graph capture is "
                "under way; call pack.prepare() before the capture"
            )
        with self._preparing:
            if (index, family) not in self._prepared:
                self._load_code(pack, index, family)
                self._prepared.add((index, family))

    def _load_code(self, pack: _ArchPack, index: int, family: str) -> None:
        op = FAMILIES[family]
        # A plan that no cell may run is not launched here either, not even with no work to do.
        allowed = {
            use.symbol
            for group in pack.manifest.groups
            if group.family == family and (group.certified or self.candidates)
            for use in group.uses
        }
        with torch.cuda.device(index):
            for symbol, plan in pack.manifest.plans.items():
                if symbol in allowed:
                    device = torch.device("cuda", index)
                    pack.functions[symbol](*op.idle_arguments(plan, device))
                    further = getattr(op, "further_idle_arguments", None)
                    for arguments in further(plan, device) if further else ():
                        pack.functions[symbol](*arguments)

    def _pick(
        self,
        family: str,
        op: str,
        arch_pack: _ArchPack,
        geometry: tuple[int, ...],
        dtype: str,
        requests: int,
        tokens: int,
        splits: int | None,
        problem: str | None = None,
    ) -> Picked | Uncertified:
        """The plan of a cell on an arch, or why there is none."""
        pack = arch_pack.manifest
        names = arch_pack.problems.get((family, geometry), [])
        if problem is not None:
            names = [name for name in names if name == problem]
        if not names:
            keys = PLANNING[family].geometry
            shape = ", ".join(f"{k}={v}" for k, v in zip(keys, geometry, strict=True))
            known = ", ".join(pack.problems.get(family, {})) or "none"
            return Uncertified(
                family,
                pack.arch,
                Reason.UNKNOWN_PROBLEM,
                f"no problem in the catalog has {shape}; problems: {known}",
            )
        group = None
        for name in names:
            group = (
                arch_pack.automatic.get((family, name, dtype, tokens, requests))
                if splits is None
                else pack.table.get((family, name, dtype, splits, tokens, requests))
            )
            if group is not None:
                break
        wanted = Cell(
            family,
            group.problem if group is not None else names[0],
            dtype,
            pack.arch,
            group.splits if group is not None else splits or 1,
            tokens,
            requests,
        )

        def close() -> Sequence[Cell]:
            return nearest(wanted, (cell for cell, g in pack.cells(family) if g.certified))

        if group is None:
            return Uncertified(
                family, pack.arch, Reason.NOT_IN_CATALOG, f"no cell {wanted}", wanted, close
            )
        if not group.certified and not self.candidates:
            return Uncertified(
                family,
                pack.arch,
                Reason.CANDIDATE,
                f"{wanted} is built but not certified on this arch; certify it on this machine "
                "with `specplan certify`, or accept candidates with specplan.load(candidates=True)",
                wanted,
                close,
            )
        for use in group.uses:
            plan = pack.plans[use.symbol]
            if plan.op == op:
                return Picked(
                    wanted,
                    group.certified,
                    plan,
                    dict(use.launch),
                    arch_pack.functions[use.symbol],
                )
        raise PackCorruptError(f"{wanted} has no plan for op {op!r}; build the pack again")

"""Loaded packs: choosing the plan of a call, and loading its GPU code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from specplan import forked
from specplan.checking import Checks
from specplan.declines import Declines, OnUncertified
from specplan.errors import (
    ColdCaptureError,
    InParts,
    NoDeviceError,
    PackCorruptError,
    PackNotFoundError,
    Reason,
    Uncertified,
)
from specplan.families import FAMILIES, Families
from specplan.op import ArchPack, Op, Picked
from specplan.plans.cell import Cell, nearest
from specplan.plans.families import FAMILIES as PLANNING
from specplan.plans.manifest import Manifest
from specplan.plans.parts import parts_of
from specplan.plans.signature import Size

if TYPE_CHECKING:
    from specplan.plans.deployment import Deployment

__all__ = ["Pack", "Picked"]


class Pack(Families):
    """The loaded packs of one or more archs. Families are attributes (``specplan.families``).

    A pack stays usable while the files under it are replaced: its objects are mapped, and a new
    :func:`load` sees the new ones.
    """

    def __init__(
        self,
        packs: Sequence[ArchPack],
        *,
        candidates: bool,
        on_uncertified: OnUncertified = "return",
        check: bool = False,
    ) -> None:
        #: Checks of values on the device, before each launch if they are enabled.
        self.checks = Checks(check)
        #: Policy and counts of declined calls.
        self.declines = Declines(on_uncertified)
        #: Seconds that opening the packs took, and loading their code, by device and family.
        self._load_seconds = 0.0
        self._prepare_seconds: dict[tuple[int, str], float] = {}
        self._packs = {pack.manifest.arch: pack for pack in packs}
        self._by_capability = {pack.manifest.capability: pack for pack in packs}
        self._prepared: set[tuple[int, str]] = set()
        self._preparing = Lock()
        self._ops: list[Op] = []
        self.candidates = candidates
        for name, family in FAMILIES.items():
            made = family(self)
            # Of an op its function, of several ops what holds them.
            setattr(self, name, made.call if isinstance(made, Op) else made)
        forked.watch(self)

    def _close(self) -> None:
        """Exchange what needs a GPU for what raises (``specplan.forked``); the rest still works."""
        self.__dict__.update(
            prepare=forked.refuse, _prepare=forked.refuse, _of_device=forked.refuse
        )
        for op in self._ops:
            op.close()

    @property
    def archs(self) -> tuple[str, ...]:
        """The archs that are loaded."""
        return tuple(self._packs)

    def manifest(self, arch: str | None = None) -> Manifest:
        """The manifest of one arch; without a name, of the only or first one."""
        return self._of_arch(arch).manifest

    def _of_arch(self, arch: str | None) -> ArchPack:
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

    def require(self, deployment: str | os.PathLike[str] | Deployment) -> tuple[InParts, ...]:
        """Refuse to serve a deployment of which any call would be declined; before traffic.

        Parameters
        ----------
        deployment
            A deployment file, as ``specplan coverage --deployment`` takes it, or what
            ``specplan.plans.deployment`` made of one. Of its archs those count that are loaded.

        Returns
        -------
        The batch sizes that run in parts, and how.

        Raises
        ------
        UncoveredError
            With every kind of call that the pack declines, its batch sizes and the nearest
            certified cells.
        SpecplanError
            The deployment is for none of the loaded archs (reason ``deployment_arch``).
        """
        # Here, because it reads YAML.
        from specplan import requirement

        manifests = {arch: pack.manifest for arch, pack in self._packs.items()}
        return requirement.check(deployment, manifests, self._ops)

    def stats(self) -> Mapping[str, Any]:
        """What the pack has done so far: a dictionary of its own, of plain values.

        ``calls`` and ``binds`` by op, declined ones included; launches of a bind, and of a captured
        graph, are counted nowhere. ``declines`` by op, reason and cell. ``parts``: calls that ran
        in parts, by op and size. ``load_seconds``; ``prepare_seconds`` by device and family.
        ``bytes`` of the opened libraries, by arch and family.
        """
        prepared: dict[str, dict[str, float]] = {}
        for (index, family), seconds in self._prepare_seconds.items():
            prepared.setdefault(f"cuda:{index}", {})[family] = seconds
        return {
            "calls": {op.title: op.calls for op in self._ops},
            "binds": {op.title: op.binds for op in self._ops},
            **self.declines.as_dict(),
            "load_seconds": self._load_seconds,
            "prepare_seconds": prepared,
            "bytes": {
                arch: {family: record.size for family, record in pack.manifest.objects.items()}
                for arch, pack in self._packs.items()
            },
        }

    def _of_device(self, index: int) -> ArchPack | None:
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
                begin = perf_counter()
                self._load_code(pack, index, family)
                self._prepare_seconds[index, family] = perf_counter() - begin
                self._prepared.add((index, family))

    def _load_code(self, pack: ArchPack, index: int, family: str) -> None:
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
        arch_pack: ArchPack,
        size: Size,
        problem: str | None = None,
    ) -> Picked | Uncertified:
        """The plan of a cell on an arch, or why there is none."""
        pack = arch_pack.manifest
        geometry, dtype, requests, tokens, splits = size
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
                "with `specplan certify`, or accept candidates with specplan.load(candidates=True)"
                + (f". {arch_pack.unbacked}" if arch_pack.unbacked else ""),
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

    def _pick_parts(
        self,
        family: str,
        op: str,
        arch_pack: ArchPack,
        size: Size,
        problem: str | None = None,
    ) -> tuple[Picked, ...]:
        """The plans of the fewest cells that hold the requests of a call between them; none if no
        cells do.
        """
        names = arch_pack.problems.get((family, size.geometry), [])
        sizes = {
            requests
            for group in arch_pack.manifest.groups
            if group.family == family
            and group.dtype == size.dtype
            and group.problem in (names if problem is None else [problem])
            and (group.automatic if size.splits is None else group.splits == size.splits)
            and (group.certified or self.candidates)
            for tokens, every in group.extent
            if size.tokens in tokens
            for requests in every
        }
        picks = {}
        counts = parts_of(size.requests, sizes)
        for requests in dict.fromkeys(counts):
            part = size._replace(requests=requests)
            picked = self._pick(family, op, arch_pack, part, problem)
            if isinstance(picked, Uncertified):
                return ()
            picks[requests] = picked
        return tuple(picks[requests] for requests in counts)

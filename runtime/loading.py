"""Loading packs: finding them, checking their bytes, opening their libraries.

This module imports no torch by itself, so that tools can ask :func:`refusal` on machines that have
none.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specplan import library
from specplan.errors import (
    NoDeviceError,
    PackCorruptError,
    PackNotFoundError,
    PackVersionError,
    PackWarning,
    RuntimeLibraryError,
    SpecplanError,
)
from specplan.plans import evidence, locations, manifest
from specplan.plans.families import FAMILIES as PLANNING
from specplan.plans.hosts import this_machine
from specplan.plans.manifest import (
    CUDA_RUNTIME,
    TVM_FFI,
    Group,
    Manifest,
    ManifestError,
    packs_under,
)

if TYPE_CHECKING:
    from specplan.declines import OnUncertified
    from specplan.pack import Pack


def load(
    path: str | Path | None = None,
    *,
    arch: str | None = None,
    candidates: bool = False,
    on_uncertified: OnUncertified = "return",
    check: bool | None = None,
) -> Pack:
    """Load the packs for this machine's GPUs: check their bytes, then open them.

    Parameters
    ----------
    path
        A pack directory, or a directory of packs. Without it: ``$SPECPLAN_PACKS``, the checkout
        that specplan runs from, the installed wheel, the per-user directory.
    arch
        Load the pack of this arch only, for example ``"sm_90a"``, with or without such a GPU.
        Without it: the packs of all visible GPUs.
    candidates
        Also run cells that are built for the arch but not certified on it.
    on_uncertified
        What is done with a declined call, in one place for all ops: ``"return"`` gives the falsy
        answer to the caller, ``"raise"`` raises :class:`~specplan.UncertifiedCell`, ``"log"``
        returns it and logs every one, a function is called with it before it is returned, and may
        raise. Whichever it is, the first declined call of a cell is logged as a warning of the
        logger ``specplan``.
    check
        Before each launch, check what is only a promise otherwise: values on the device (slots,
        pages, cursors, counts). It waits for the device, so it is for the first runs of an
        integration. Without it: whether ``SPECPLAN_CHECK`` is set, and not to 0.

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
        With what was found and what mends it.
    """
    if arch is not None and not isinstance(arch, str):
        raise PackNotFoundError(
            f"arch is one name such as 'sm_90a', not {arch!r}; call load once for each",
            reason="argument",
        )
    if path is not None and not isinstance(path, str | os.PathLike):
        raise PackNotFoundError(f"path is the path of a directory, not {path!r}", reason="argument")
    begin = perf_counter()
    library.torch()
    wanted = [arch] if arch is not None else visible_archs()
    places = [("the path given", Path(path))] if path is not None else list(locations.search_path())
    if path is not None:
        _check_readable(Path(path))
    if path is not None and (Path(path) / manifest.NAME).is_file():
        # Named as a pack, it is read as one: what is wrong with it is not that it was not found.
        _read_manifest(Path(path))
    found: dict[str, Path] = {}
    for _, root in places:
        for name, directory in packs_under(root).items():
            found.setdefault(name, directory)
    usable = [name for name in wanted if name in found]
    if not usable:
        for _, root in places:
            for directory in (root, *(root / name for name in wanted)):
                _check_readable(directory)
        searched = "; ".join(f"{root} ({why})" for why, root in places)
        there = ", ".join(sorted(found)) or "none"
        raise PackNotFoundError(
            f"no pack for {' or '.join(wanted)}. Searched: {searched}. Archs found: {there}. "
            f"{_without_manifest([root for _, root in places], wanted)}"
            f"Build one: specplan build --arch {wanted[0]}"
        )
    # Here, because they import torch.
    from specplan import checking
    from specplan.pack import Pack

    opened = [ArchPack(found[name], name) for name in usable]
    checks = checking.wanted() if check is None else check
    pack = Pack(opened, candidates=candidates, on_uncertified=on_uncertified, check=checks)
    pack._load_seconds = perf_counter() - begin
    return pack


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
    import torch
    from specplan import forked

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


class ArchPack:
    """One pack directory, checked and opened."""

    #: What is wrong with the pack's marks, or nothing; said again where a call is declined for it.
    unbacked = ""

    def __init__(self, directory: Path, arch: str) -> None:
        self.directory = directory
        checked = _checked_manifest(directory, arch)
        self.manifest, self.unbacked = backed_manifest(checked, directory)
        danger = locations.writable_by_others(directory) if os.geteuid() == 0 else None
        if danger is not None:
            said = f"this process is root's, and what it loads can be changed: {danger}"
            warnings.warn(said, PackWarning, stacklevel=3)
        host = self.manifest.hosts[this_machine()]
        library.check_loaded_tvm_ffi(host.takes.get(TVM_FFI, ()))
        #: The CUDA runtime that the libraries call; None with a torch that has no CUDA.
        self.cuda_runtime = library.cuda_runtime(host.takes.get(CUDA_RUNTIME, ()))
        modules: dict[str, Any] = {
            family: library.open_library(directory / record.file, self.cuda_runtime)
            for family, record in host.objects.items()
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


def refusal(directory: Path, arch: str) -> SpecplanError | None:
    """What :func:`load` would refuse a pack directory for, or None; opens none of its libraries.

    An error that only opening shows is not seen: a library whose symbols do not resolve, or a torch
    with another CUDA runtime.
    """
    try:
        _checked_manifest(directory, arch)
    except SpecplanError as error:
        return error
    return None


def _checked_manifest(directory: Path, arch: str) -> Manifest:
    """The manifest of a pack that this installation can open; everything else is an error."""
    pack = _read_manifest(directory)
    other = manifest.wrong_arch(pack, directory, arch)
    if other is not None:
        raise PackCorruptError(other, reason="manifest_arch")
    library.check_host(pack, directory)
    library.check_installed_tvm_ffi(pack)
    if os.statvfs(directory).f_flag & os.ST_NOEXEC:
        raise RuntimeLibraryError(
            f"{directory} is on a file system that is mounted noexec, which forbids to open "
            "libraries from it; copy the pack to another one and set SPECPLAN_PACKS to its place",
            reason="noexec",
        )
    for _, _, record in pack.libraries(this_machine()):
        _check_readable(directory / record.file)
        wrong = manifest.check_object(directory, record)
        if wrong is not None:
            raise PackCorruptError(
                f"{wrong}; nothing of it was loaded. Build it again: "
                f"specplan build --arch {pack.arch} --out {directory.parent}"
            )
    return pack


def _check_readable(path: Path) -> None:
    """Refuse a file or directory that is there and that this user may not read."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)
            path.joinpath(manifest.NAME).stat()
        else:
            path.open("rb").close()
    except PermissionError as error:
        raise PackNotFoundError(_not_readable(path, error), reason="unreadable") from error
    except OSError:
        pass  # What is not there is somebody else's complaint.


def _not_readable(path: Path, error: PermissionError) -> str:
    at = Path(os.fsdecode(error.filename)) if error.filename else path
    facts = ""
    with suppress(OSError):
        status = at.stat()
        facts = f" (owner uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o})"
    return (
        f"{at} cannot be read by uid {os.geteuid()}: {error.strerror}{facts}. Let this user read "
        f"the directory and what is in it: chmod -R a+rX {path}"
    )


def backed_manifest(pack: Manifest, directory: Path) -> tuple[Manifest, str]:
    """The pack with only those cells marked certified that a certificate of this installation or
    beside the pack backs, and what to say of the others.
    """
    marked = {group.family for group in pack.groups if group.certified}
    if not marked:
        return pack, ""
    places = [evidence.default_directory(), evidence.local_directory(directory)]
    found, wrong = evidence.read_all(places, pack.arch, marked)
    backed = evidence.backed(pack, found)
    if backed is pack:
        return pack, ""
    lost = sum(group.certified for _, group in pack.cells())
    lost -= sum(group.certified for _, group in backed.cells())
    said = "; ".join(
        [
            f"{directory} marks {lost} cells certified that no certificate backs: they are "
            f"candidates until `specplan mark {directory}` renews the marks, or `specplan certify` "
            f"certifies them on this machine",
            *map(str, wrong),
        ]
    )
    warnings.warn(said, PackWarning, stacklevel=4)
    return backed, said


def _read_manifest(directory: Path) -> Manifest:
    _check_readable(directory)
    _check_readable(directory / manifest.NAME)
    try:
        return manifest.read(directory)
    except ManifestError as error:
        if error.reason == "schema":
            raise PackVersionError(str(error), reason="schema") from error
        raise PackCorruptError(str(error), reason=f"manifest_{error.reason}") from error

"""``specplan doctor``: everything that a bug report needs, and what is wrong."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from specplan import library
from specplan.errors import SpecplanError
from specplan.loading import refusal
from specplan.plans import certificates, evidence, locations, manifest
from specplan.plans.manifest import ManifestError, packs_under
from specplan.plans.version import VERSION
from specplan.tools.certify import driver_version

_DISTRIBUTIONS = (
    "torch",
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu13",
    "cuda-bindings",
)


def examine(packs: Path | None = None) -> tuple[Mapping[str, Any], list[str]]:
    """Facts by name, and complaints about them: of a pack or a directory of packs, or of all places
    that a load searches.
    """
    report: dict[str, Any] = {
        "specplan": VERSION,
        "python": f"{platform.python_version()} ({sys.executable})",
        "host": f"{platform.machine()} {platform.platform()}",
    }
    complaints: list[str] = []
    for name in _DISTRIBUTIONS:
        try:
            report[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            report[name] = "not installed"
    try:
        library.tvm_ffi()
        version = library.tvm_ffi_version() or "unknown"
        report["tvm-ffi"] = f"loads; {version} is " + (
            "a version that packs were tried under"
            if library.is_tried(version)
            else f"untried (tried: {', '.join(library.TRIED_TVM_FFI)})"
        )
    except SpecplanError as error:
        report["tvm-ffi"] = "does not load"
        complaints.append(str(error))
    archs = _devices(report, complaints)
    found: set[str] = set()
    places = [("as given", packs)] if packs is not None else locations.search_path()
    for why, place in places:
        texts = []
        for arch, directory in packs_under(place).items():
            text, wrong = _pack(directory, arch)
            texts.append(f"{arch} ({text})")
            complaints += [complaint for complaint in wrong if complaint not in complaints]
            if not wrong:
                found.add(arch)
        report[f"packs in {place}"] = f"{', '.join(texts) or 'none'} [{why}]"
    root = evidence.default_directory()
    files = []
    for path in sorted(root.glob("*/*.yaml")):
        files.append(str(path.relative_to(root)))
        try:
            certificates.read(path)
        except certificates.CertificateError as error:
            complaints.append(str(error))
    report["certificates"] = ", ".join(files) or "none"
    for arch in archs:
        if arch not in found:
            complaints.append(f"no usable pack for {arch}; specplan build --arch {arch}")
    return report, complaints


def _pack(directory: Path, arch: str) -> tuple[str, list[str]]:
    """A pack in some words, and what is wrong with it: what a load would refuse it for, marks that
    no evidence backs, who else may write it.
    """
    wrong = []
    refused = refusal(directory, arch)
    if refused is not None:
        wrong.append(str(refused))
    try:
        pack = manifest.read(directory)
    except ManifestError:
        return "unreadable", wrong
    local = evidence.local_directory(directory)
    known, unread = evidence.read_all(
        [evidence.default_directory(), local], pack.arch, pack.families
    )
    wrong += evidence.mark_complaints(evidence.compare(pack, known), directory)
    wrong += [str(error) for error in unread]
    danger = locations.writable_by_others(directory)
    if danger is not None:
        wrong.append(f"what a load of {directory} runs can be changed by others: {danger}")
    certified = sum(group.certified for _, group in evidence.backed(pack, known).cells())
    return f"{len(pack.plans)} plans, {certified} certified cells", wrong


def _devices(report: dict[str, Any], complaints: list[str]) -> list[str]:
    """The archs of the visible GPUs."""
    report["driver"] = driver_version()
    try:
        import torch
    except ImportError as error:
        report["devices"] = f"unknown: torch cannot be imported ({error})"
        return []
    if not torch.cuda.is_available():
        report["devices"] = "none: torch sees no CUDA device"
        return []
    archs = []
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        archs.append(f"sm_{properties.major}{properties.minor}a")
        names.append(f"cuda:{index} {properties.name} ({archs[-1]})")
    report["devices"] = ", ".join(names)
    return list(dict.fromkeys(archs))

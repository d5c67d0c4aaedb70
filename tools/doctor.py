"""``specplan doctor``: everything that a bug report needs, and what is wrong."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from specplan import library
from specplan.errors import SpecplanError
from specplan.plans import certificates, locations, manifest
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


def examine() -> tuple[Mapping[str, Any], list[str]]:
    """Facts by name, and complaints about them."""
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
        library.runtime()
        report["runtime library"] = "loads"
    except SpecplanError as error:
        report["runtime library"] = "does not load"
        complaints.append(str(error))
    archs = _devices(report, complaints)
    found: set[str] = set()
    for why, place in locations.search_path():
        packs = packs_under(place)
        texts = []
        for arch, directory in packs.items():
            try:
                pack = manifest.read(directory)
                bad = [
                    wrong
                    for record in pack.objects.values()
                    if (wrong := manifest.check_object(directory, record)) is not None
                ]
                certified = sum(1 for _, group in pack.cells() if group.certified)
                texts.append(f"{arch} ({len(pack.plans)} plans, {certified} certified cells)")
                complaints.extend(bad)
                if not bad:
                    found.add(arch)
            except ManifestError as error:
                texts.append(f"{arch} (unreadable)")
                complaints.append(str(error))
        report[f"packs in {place}"] = f"{', '.join(texts) or 'none'} [{why}]"
    evidence = certificates.default_directory()
    files = sorted(p.relative_to(evidence) for p in evidence.glob("*/*.yaml"))
    report["certificates"] = ", ".join(map(str, files)) or "none"
    for arch in archs:
        if arch not in found:
            complaints.append(f"no usable pack for {arch}; specplan build --arch {arch}")
    return report, complaints


def _devices(report: dict[str, Any], complaints: list[str]) -> list[str]:
    """The archs of the visible GPUs."""
    report["driver"] = driver_version()
    try:
        import torch
    except ImportError as error:
        complaints.append(f"torch cannot be imported ({error}); a server needs it")
        return []
    if not torch.cuda.is_available():
        report["devices"] = "none"
        complaints.append("torch sees no CUDA device")
        return []
    archs = []
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        archs.append(f"sm_{properties.major}{properties.minor}a")
        names.append(f"cuda:{index} {properties.name} ({archs[-1]})")
    report["devices"] = ", ".join(names)
    return list(dict.fromkeys(archs))

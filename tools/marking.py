"""The marks of a built pack, renewed from the certificates at hand: no compiler, no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from specplan.plans import certificates, evidence, manifest
from specplan.plans.manifest import Manifest
from specplan.tools.locking import exclusive


def renew(directory: Path, places: Sequence[Path], waiting: Callable[[str], None]) -> Manifest:
    """Mark a pack's cells anew, under the build's lock; returns its manifest as it is then.

    Certificates are those of ``places`` and those beside the pack. The runtime looks in this
    installation's and beside the pack, so that those from elsewhere are copied there.
    """
    root = directory.parent if (directory.parent / "objects").is_dir() else directory
    with exclusive(root, waiting):
        carry(directory, manifest.read(directory).arch, places)
        return restamp(directory, places)


def restamp(directory: Path, places: Iterable[Path]) -> Manifest:
    """Mark the cells of a built pack anew, after a certificate came or went."""
    old = manifest.read(directory)
    local = evidence.local_directory(directory)
    new = evidence.mark(old, certificates.read_all([*places, local], old.arch))
    if new is not old:
        # What it was made from has changed by a certificate: the next build looks at everything
        # again.
        new = replace(new, inputs="")
        manifest.write_atomically(directory / manifest.NAME, manifest.dumps(new).encode())
    return new


def carry(directory: Path, arch: str, places: Iterable[Path]) -> None:
    """Copy beside a pack the certificates of its arch that the runtime would not find."""
    known = [evidence.default_directory(), evidence.local_directory(directory)]
    there = {path.read_bytes() for path in evidence.heads(known, arch)}
    for path in evidence.heads(places, arch):
        if path.read_bytes() not in there:
            found = certificates.read(path)
            to = known[1] / arch / path.name
            to.parent.mkdir(parents=True, exist_ok=True)
            certificates.write(free(to), found)


def free(path: Path) -> Path:
    """The path itself, or with the first number that no file has: ``scatter.yaml``,
    ``scatter.2.yaml`` ...
    """
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}.{number}.yaml")
    return found

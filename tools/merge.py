"""Joining the certificates of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from specplan.plans import certificates
from specplan.plans.certificates import Certificate, group_cells, join_tallies


class MergeError(RuntimeError):
    """Parts that are not parts of one certification."""


def merge(parts: Sequence[Path], out: Path) -> Iterator[tuple[Path, int]]:
    """Join certificate files, one output file an arch and family; yields each path with its number
    of cells.

    Parameters
    ----------
    parts
        Files, or directories of them.
    out
        Directory of certificates; the files go to ``<out>/<arch>/<family>.yaml``.

    Raises
    ------
    MergeError
        Two parts disagree about the bits, the device or the problems, or claim the same cell.
    """
    files = [f for p in parts for f in (sorted(p.rglob("*.yaml")) if p.is_dir() else [p])]
    joined: dict[tuple[str, str], tuple[Path, Certificate]] = {}
    for path in files:
        part = certificates.read(path)
        at = (part.arch, part.family)
        joined[at] = (path, _join(*joined[at], path, part) if at in joined else part)
    if not joined:
        raise MergeError("no certificate files were given")
    for (arch, family), (_, certificate) in sorted(joined.items()):
        target = out / arch / f"{family}.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        certificates.write(target, certificate)
        yield target, certificate.count


def _join(left_path: Path, left: Certificate, right_path: Path, right: Certificate) -> Certificate:
    for what in ("device", "tools", "sources", "suite", "recorded"):
        if getattr(left, what) != getattr(right, what):
            raise MergeError(f"{left_path} and {right_path} differ in {what}")
    for what in ("problems", "plans"):
        ours, theirs = getattr(left, what), getattr(right, what)
        for name in sorted(set(ours) & set(theirs)):
            if ours[name] != theirs[name]:
                raise MergeError(f"{left_path} and {right_path} differ in {what[:-1]} {name}")
    twice = {
        (*at, requests)
        for at in left.index.keys() & right.index.keys()
        for requests in _requests(left, at) & _requests(right, at)
    }
    if twice:
        raise MergeError(
            f"{left_path} and {right_path} both have {len(twice)} cells, such as {min(twice)}"
        )
    return replace(
        left,
        date=max(left.date, right.date),
        problems={**left.problems, **right.problems},
        plans={**left.plans, **right.plans},
        groups=group_cells([*left.cells(), *right.cells()]),
        tallies=join_tallies([*left.tallies, *right.tallies]),
    )


def _requests(part: Certificate, at: tuple[str, str, int, int]) -> set[int]:
    """The requests at which a part has evidence, whatever plans ran."""
    return set().union(*part.index[at].values())

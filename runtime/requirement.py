"""``pack.require``: whether a pack launches every call that a deployment can make."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specplan.errors import InParts, SpecplanError, Uncertified, UncoveredError
from specplan.plans import deployment as deployments
from specplan.plans import ranges
from specplan.plans.arch import Arch
from specplan.plans.catalog import Catalog
from specplan.plans.deployment import Deployment
from specplan.plans.manifest import Manifest

if TYPE_CHECKING:
    from specplan.op import Op

#: Holes that an error lists; the others are counted.
MOST_LISTED = 24


def check(
    deployment: str | os.PathLike[str] | Deployment,
    manifests: Mapping[str, Manifest],
    ops: Sequence[Op],
) -> tuple[InParts, ...]:
    """The sizes that run in parts; UncoveredError where one would be declined.

    ``manifests`` are those of the loaded archs, ``ops`` all ops of the pack.
    """
    wanted = deployment
    if not isinstance(wanted, Deployment):
        wanted = deployments.load(Path(os.fspath(wanted)), _catalog_of(manifests))
    archs = [arch for arch in wanted.archs if arch in manifests]
    if not archs:
        raise SpecplanError(
            f"the deployment is for {', '.join(wanted.archs)}, and the loaded packs are for "
            f"{', '.join(manifests)}",
            reason="deployment_arch",
        )
    holes: dict[str, Uncertified] = {}
    sizes: dict[str, list[int]] = {}
    parted: dict[InParts, None] = {}
    for what, requests, answer in _answers(wanted, archs, ops):
        if isinstance(answer, Uncertified):
            where = f"{what}, {answer.reason.value}"
            holes.setdefault(where, answer)
            sizes.setdefault(where, []).append(requests)
        elif len(answer.cells) > 1:
            parted[answer] = None
    if holes:
        raise UncoveredError(_said(holes, sizes), tuple(holes.values()))
    return tuple(parted)


def _answers(
    wanted: Deployment, archs: Sequence[str], ops: Sequence[Op]
) -> Iterator[tuple[str, int, InParts | Uncertified]]:
    """Every call that the deployment can make: what it is, its requests, and what it comes to."""
    for arch in archs:
        for use in wanted.uses:
            for op in (op for op in ops if op.family == use.family):
                name = op.declared.name
                which = use.family if name == use.family else f"{use.family}.{name}"
                geometry: Mapping[str, Any] = use.geometry
                problem = use.problems[0] if use.problems else _shape(use.geometry)
                for tokens in wanted.tokens:
                    what = f"{which} {problem} tokens={tokens} dtype={use.dtype} on {arch}"
                    for requests in wanted.requests:
                        found = op.parts(
                            requests=requests,
                            tokens=op.declared.tokens or tokens,
                            dtype=use.dtype,
                            arch=arch,
                            **geometry,
                        )
                        if isinstance(found, Uncertified):
                            yield what, requests, found
                        else:
                            yield what, requests, InParts([picked.cell for picked in found])


def _said(holes: Mapping[str, Uncertified], sizes: Mapping[str, Sequence[int]]) -> str:
    lines = []
    for where, answer in list(holes.items())[:MOST_LISTED]:
        near = "; ".join(map(str, answer.nearest))
        counts = ranges.spell(sizes[where])
        lines.append(f"{where}: requests {counts}" + (f"; nearest certified: {near}" * bool(near)))
    left = len(holes) - len(lines)
    if left:
        lines.append(f"and {left} more")
    count = sum(map(len, sizes.values()))
    return f"the pack declines {count} calls that the deployment can make:\n" + "\n".join(lines)


def _shape(geometry: Mapping[str, int]) -> str:
    return " ".join(f"{key}={value}" for key, value in geometry.items())


def _catalog_of(manifests: Mapping[str, Manifest]) -> Catalog:
    """As much of a catalog as reading a deployment takes: names of archs and problems."""
    problems: dict[str, dict[str, Mapping[str, int]]] = {}
    for manifest in manifests.values():
        for family, named in manifest.problems.items():
            problems.setdefault(family, {}).update(named)
    archs = {name: Arch(name, m.capability, 0, 0, 0, "") for name, m in manifests.items()}
    return Catalog("the loaded packs", archs, problems, ())

"""A deployment: which cells a server can reach, and whether each of them is certified and built.

A server owner writes down what the server is started with, and CI asks whether every call that it
can make would launch. The file is small and strict::

    schema: 1
    arch: sm_90a                  # or a list: every arch is checked
    max_requests: 64
    draft_lengths: [3]            # drafts a step; a step verifies one token more
    graph_requests: [1, 2, 4, 8, 16, 32, 64]
    eager: false                  # steps run only at the sizes that graphs were captured for
    families:
      scatter: {history: 4, next: 4, draft: 3}
      gather: {next: 4, draft: 3}
      rollback: {problem: qsa12, dtype: [int32, int64]}

``graph_requests`` are the batch sizes that graphs are captured for. A batch above the largest of
them runs without a graph, so every size from there to ``max_requests`` is reachable; ``eager:
true`` adds every size from 1, and ``eager: false`` says that none runs without a graph, which
``max_requests`` must then agree with. A family is given by its geometry, or by a problem's name, or
by a list of such mappings; ``dtype`` may be left out where the family has one. ``arch``,
``problem`` and ``dtype`` may be lists, of which every entry is checked.

What is well written and not covered is a hole, not an error: an arch, a dtype or a geometry that
the catalog does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from specplan.plans.catalog import Catalog
from specplan.plans.cell import Cell, State
from specplan.plans.coverage import compute
from specplan.plans.families import FAMILIES
from specplan.plans.nearest import Nearest, Neighbour
from specplan.plans.reading import LocatedError, Reader, suggest

SCHEMA = 1
#: The state of a cell that the server can reach and the catalog does not have.
UNCERTIFIED = "uncertified"
#: More cells than this in one deployment is a slip of the pen, not a server.
MAX_CELLS = 2_000_000
#: dtypes as servers and torch spell them. One of these that a family lacks is a hole; any other
#: word is a misspelling.
KNOWN_DTYPES = frozenset(
    (
        *("auto", "bf16", "bfloat16", "fp16", "half", "float16", "fp32", "float", "float32"),
        *("tf32", "fp64", "float64", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fn", "fp8_inc"),
        *("fp8_e4m3fnuz", "fp8_e5m2fnuz", "fp8_ds_mla", "float8_e4m3fn", "float8_e5m2", "mxfp8"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "e4m3", "e5m2", "nvfp4", "fp4", "fp4_e2m1"),
        *("float4_e2m1fn_x2", "mxfp4", "fp6", "mxfp6", "int4", "uint4", "int8", "uint8", "int16"),
        *("uint16", "int32", "uint32", "int64", "uint64", "bool"),
    )
)
_ARCH = re.compile(r"sm_\d{2,3}[af]?")


class DeploymentError(LocatedError):
    """The deployment file does not say what it may say; the message has file, line and column."""


@dataclass(frozen=True)
class Use:
    """How a server uses one family."""

    family: str
    geometry: Mapping[str, int]
    dtype: str
    #: Names of the catalog's problems of this geometry; none if the catalog has no such problem.
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Deployment:
    """What a server can reach, from its configuration alone."""

    archs: tuple[str, ...]
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    uses: tuple[Use, ...]

    @property
    def size(self) -> int:
        """How many cells the server can reach."""
        return len(self.archs) * len(self.requests) * len(self.tokens) * len(self.uses)


@dataclass(frozen=True)
class Reached:
    """One cell that the server can reach: its state, and where it is a hole, why and what is near.

    ``state`` is a coverage state, or ``uncertified`` for a cell that the catalog does not have. A
    geometry that no problem of the catalog has stands under the problem ``?``.
    """

    cell: Cell
    geometry: Mapping[str, int]
    state: str
    reason: str
    near: tuple[Neighbour, ...] = ()

    @property
    def holds(self) -> bool:
        """Only a certified and built cell launches."""
        return self.state == State.CERTIFIED.value


@dataclass(frozen=True)
class Answer:
    """The cells of a deployment, and complaints about the pack as a whole."""

    deployment: Deployment
    cells: Sequence[Reached]
    complaints: Sequence[str]

    @property
    def holds(self) -> bool:
        return not self.complaints and all(cell.holds for cell in self.cells)

    @property
    def holes(self) -> list[Reached]:
        return [cell for cell in self.cells if not cell.holds]

    def as_json(self) -> Mapping[str, Any]:
        """``{"holds", "cells": [{cell fields, "state", "reason", "nearest", "geometry"}],
        "complaints"}``.
        """
        return {
            "holds": self.holds,
            "cells": [
                {
                    **reached.cell.as_dict(),
                    "state": reached.state,
                    "reason": reached.reason,
                    "nearest": [near.as_dict() for near in reached.near],
                    "geometry": dict(reached.geometry),
                }
                for reached in self.cells
            ],
            "complaints": list(self.complaints),
        }


def load(path: Path, catalog: Catalog) -> Deployment:
    """Read and check a deployment file.

    Raises
    ------
    DeploymentError
        With file, line, column and the nearest valid spelling.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(str(path), None, f"cannot be read: {error}") from error
    return loads(text, catalog, str(path))


def loads(text: str, catalog: Catalog, source: str = "deployment.yaml") -> Deployment:
    """Check a deployment given as text; ``source`` is the name that errors show."""
    reader = _Reader(source)
    return reader.deployment(reader.compose(text, "a deployment"), catalog)


class _Reader(Reader):
    error = DeploymentError

    def deployment(self, node: yaml.Node, catalog: Catalog) -> Deployment:
        top = self.record(
            node,
            "the deployment",
            ("schema", "arch", "max_requests", "draft_lengths", "families"),
            ("graph_requests", "eager"),
        )
        schema = self.integer(top["schema"], "schema", 0, 1 << 31)
        if schema != SCHEMA:
            raise self.fail(
                top["schema"], f"schema is {schema}, this version of specplan reads {SCHEMA}"
            )
        archs = tuple(
            self.arch(name, item, catalog) for name, item in self.words(top["arch"], "arch")
        )
        requests = self.requests(node, top)
        drafts = self.integers(top["draft_lengths"], "draft_lengths", 0, 1023)
        families = self.mapping(top["families"], "families")
        if not families:
            raise self.fail(top["families"], "families is empty")
        uses: list[Use] = []
        for name, (key, value) in families.items():
            if name not in FAMILIES:
                raise self.fail(key, f"unknown family {name!r}{suggest(name, FAMILIES)}")
            bodies = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if not bodies:
                raise self.fail(value, f"family {name!r} is empty")
            for item in bodies:
                for use in self.uses(name, item, catalog):
                    if use in uses:
                        raise self.fail(item, f"family {name!r} has the same use twice")
                    uses.append(use)
        tokens = tuple(length + 1 for length in drafts)
        found = Deployment(archs, requests, tokens, tuple(uses))
        if found.size > MAX_CELLS:
            raise self.fail(
                node, f"{found.size:,} cells, more than {MAX_CELLS:,}; is a range too long?"
            )
        return found

    def arch(self, name: str, node: yaml.Node, catalog: Catalog) -> str:
        """An arch of the catalog, or another one that is spelt as archs are."""
        misspelt = f"{name}a" in catalog.archs or not _ARCH.fullmatch(name)
        if name not in catalog.archs and misspelt:
            raise self.fail(node, f"arch: unknown name {name!r}{suggest(name, catalog.archs)}")
        return name

    def requests(self, node: yaml.Node, top: Mapping[str, yaml.Node]) -> tuple[int, ...]:
        """The batch sizes that steps run at."""
        most = self.integer(top["max_requests"], "max_requests", 1, 65536)
        graphs: tuple[int, ...] = ()
        if "graph_requests" in top:
            graphs = self.integers(top["graph_requests"], "graph_requests", 1, most)
        if "eager" not in top:
            return tuple(sorted({*graphs, *range(max(graphs, default=0) + 1, most + 1)}))
        if self.boolean(top["eager"], "eager"):
            return tuple(range(1, most + 1))
        if not graphs:
            raise self.fail(node, "eager is false and there are no graph_requests: nothing can run")
        if graphs[-1] < most:
            raise self.fail(
                top["eager"],
                f"eager is false, and no graph holds more than {graphs[-1]} of max_requests "
                f"{most}; leave eager out if larger batches run without a graph",
            )
        return graphs

    def uses(self, name: str, node: yaml.Node, catalog: Catalog) -> Iterator[Use]:
        """Every problem (or the one geometry) with every dtype."""
        family, what = FAMILIES[name], f"family {name!r}"
        problems = catalog.problems.get(name, {})
        by_name = "problem" in self.mapping(node, what)
        required = ("problem",) if by_name else tuple(family.geometry)
        body = self.record(node, what, required, ("dtype",))
        geometries: list[Mapping[str, int]] = []
        if by_name:
            named = self.names(body["problem"], f"problem of {what}", problems)
            geometries += [problems[problem] for problem in named]
        else:
            geometries.append(
                {
                    key: self.integer(body[key], f"{key} of {what}", 0, (1 << 31) - 1)
                    for key in family.geometry
                }
            )
        dtypes = list(family.dtypes)
        if "dtype" in body:
            dtypes = []
            for word, item in self.words(body["dtype"], f"dtype of {what}"):
                if word not in family.dtypes and word not in KNOWN_DTYPES:
                    hint = suggest(word, family.dtypes)
                    raise self.fail(item, f"dtype of {what}: unknown name {word!r}{hint}")
                dtypes.append(word)
        elif len(dtypes) > 1:
            raise self.fail(node, f"{what} lacks 'dtype'; known: {', '.join(dtypes)}")
        for geometry in geometries:
            same = tuple(p for p, values in problems.items() if dict(values) == dict(geometry))
            for dtype in dtypes:
                yield Use(name, geometry, dtype, same)


def unserved(use: Use, arch: str, catalog: Catalog) -> str | None:
    """Why no cell of the family can be meant, whatever the batch, or None."""
    family = FAMILIES[use.family]
    if arch not in catalog.archs:
        return f"the catalog has no arch {arch}; it has {', '.join(catalog.archs)}"
    if use.dtype not in family.dtypes:
        hint = suggest(use.dtype, family.dtypes)
        return f"{use.family} has no dtype {use.dtype!r}{hint}"
    for key, (low, high) in family.geometry.items():
        if not low <= use.geometry[key] <= high:
            only = f"only {low}" if low == high else f"{low}..{high}"
            return f"{key} is {use.geometry[key]}, {use.family} has {only}"
    return family.check_problem(use.geometry)


def smaller_pages(use: Use, arch: str, catalog: Catalog) -> list[tuple[int, str]]:
    """Problems that differ in a smaller page alone, of which a page holds a whole number: their
    page sizes and names. Those with certified cells on the arch, if there are any.

    A view could cut the pages so, an index space over the same memory; it is the caller's.
    """
    page = use.geometry.get("page_size")
    if not page or arch not in catalog.archs:
        return []
    found = sorted(
        (geometry["page_size"], name)
        for name, geometry in catalog.problems.get(use.family, {}).items()
        if {**geometry, "page_size": page} == dict(use.geometry)
        and geometry["page_size"] < page
        and page % geometry["page_size"] == 0
    )
    certified = {
        name
        for block in catalog.blocks
        if block.family == use.family and arch in block.certified
        for name in block.problems
    }
    return [(size, name) for size, name in found if name in certified] or found


def reachable(deployment: Deployment, catalog: Catalog) -> Iterator[tuple[Use, Cell, str | None]]:
    """Every cell that the server can reach, under the problem's name if the catalog has it, and why
    there can be no such cell, if there cannot.
    """
    for arch in deployment.archs:
        for use in deployment.uses:
            family = FAMILIES[use.family]
            never = unserved(use, arch, catalog)
            for tokens in deployment.tokens:
                complaint = never or family.check_tokens(use.geometry, tokens)
                for requests in deployment.requests:
                    splits = 1
                    if complaint is None:
                        facts = catalog.archs[arch]
                        splits = family.splits(use.geometry, requests, tokens, use.dtype, facts)
                    named = [
                        Cell(use.family, name, use.dtype, arch, splits, tokens, requests)
                        for name in use.problems or ("?",)
                    ]
                    cell = next((cell for cell in named if cell in catalog.claims), named[0])
                    yield use, cell, complaint


def answer(
    deployment: Deployment,
    catalog: Catalog,
    root: Path | Mapping[str, Path],
    evidence: Sequence[Path],
) -> Answer:
    """Whether every cell that the server can reach is certified and built.

    Parameters
    ----------
    root
        Directory of packs, or the pack of each arch.
    evidence
        Directories of certificates; those beside a pack count too.
    """
    wanted = list(reachable(deployment, catalog))
    claimed = {cell: catalog.claims[cell] for _, cell, _ in wanted if cell in catalog.claims}
    known = [arch for arch in deployment.archs if arch in catalog.archs]
    coverage = compute(replace(catalog, blocks=(), claims=claimed), root, known, evidence)
    rows = {row.cell: row for row in coverage.rows}
    nearest = Nearest(catalog)
    views: dict[tuple[Any, ...], str] = {}
    cells = []
    for use, cell, complaint in wanted:
        if cell in rows:
            row = rows[cell]
            reason = row.reason
            if row.state is State.CANDIDATE and not reason:
                reason = "built, and not certified on this arch"
            state = row.state.value
        else:
            state = UNCERTIFIED
            shape = ", ".join(f"{key}={value}" for key, value in use.geometry.items())
            reason = complaint or (
                "the catalog has no such cell"
                if use.problems
                else f"no problem of the catalog has {shape}"
            )
            if not use.problems:
                at = (use.family, cell.arch, *use.geometry.values())
                if at not in views:
                    fits = smaller_pages(use, cell.arch, catalog)
                    which = " or ".join(f"{size} ({name})" for size, name in fits)
                    views[at] = (
                        f"; a view that cuts its pages into pages of {which} would reach a problem"
                        if fits
                        else ""
                    )
                reason += views[at]
        near: tuple[Neighbour, ...] = ()
        if state != State.CERTIFIED.value:
            found = nearest.find(cell, use.geometry)
            near = () if found is None else (found,)
        cells.append(Reached(cell, use.geometry, state, reason, near))
    return Answer(deployment, cells, coverage.complaints)
